//! The server that is measured: one that runs, if it is named, or one that is started for this and ended with it,
//! by its id, however the measurement ends. Its data lies in a directory of its own, on a real disk, and is removed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args as ClapArgs;
use evenhand::Client;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::Failure;

/// How long a server may take to end before it is killed: this long, looked at this often.
const END_WITHIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);
/// How long a named server may be away.
const REACHED_WITHIN: Duration = Duration::from_secs(2);
/// What the system calls a file system that is in memory.
const TMPFS: i64 = 0x0102_1994;

/// Where to measure.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Place {
    /// Measure this server, which runs already; its new queues stay. If none is named, one is started and ended again
    #[arg(long, value_name = "URL", conflicts_with = "dir")]
    server: Option<String>,
    #[command(flatten)]
    room: Room,
}

/// Where a server is started.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Room {
    /// Where the started server has its data, on a real disk; what is made there is removed again
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

impl From<Room> for Place {
    fn from(room: Room) -> Place {
        Place { server: None, room }
    }
}

/// A server to measure.
#[derive(Debug)]
pub(crate) struct Target {
    url: String,
    name: String,
    /// What the server is told beside where its data is.
    args: Vec<String>,
    // In the order in which they end.
    started: Option<Started>,
    scratch: TempDir,
}

impl Target {
    pub(crate) async fn begin(place: &Place) -> Result<Target, Failure> {
        Target::begin_with(place, Vec::new()).await
    }

    /// The same, and a server that is started is told this.
    pub(crate) async fn begin_with(place: &Place, args: Vec<String>) -> Result<Target, Failure> {
        let scratch = scratch(&place.room.dir)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("bench-{:x}-{:x}", now.as_millis() as u64, std::process::id());
        let (url, started) = match &place.server {
            Some(url) => {
                // A server that is not there is told at once, not after a program's patience.
                Client::new(url.trim_end_matches('/'))?.patience(REACHED_WITHIN).status().await?;
                (url.trim_end_matches('/').to_string(), None)
            }
            None => {
                let (url, started) = Started::begin(&data(&scratch), "127.0.0.1:0", &args).await?;
                (url, Some(started))
            }
        };
        Ok(Target { url, name, args, started, scratch })
    }

    /// Kills the server that was started: no last words.
    pub(crate) fn kill(&mut self) {
        if let Some(mut started) = self.started.take() {
            let _ = started.child.kill();
            let _ = started.child.wait();
        }
    }

    /// Starts it again, on its data and its port, and returns when it listens.
    pub(crate) async fn start_again(&mut self) -> Result<(), Failure> {
        let listen = self.url.trim_start_matches("http://").to_string();
        let (_, started) = Started::begin(&data(&self.scratch), &listen, &self.args).await?;
        self.started = Some(started);
        Ok(())
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The processor time that the server has used, if it was started for this and the system tells (Linux does).
    pub(crate) fn on_cpu(&self) -> Option<Duration> {
        let id = self.started.as_ref()?.child.id();
        on_cpu(&std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
    }

    /// A client with a connection of its own.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        Ok(Client::new(&self.url)?)
    }

    /// A queue, or a seat, that nobody else has.
    pub(crate) fn name(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }

    /// Where workers lock their seats.
    pub(crate) fn seats(&self) -> PathBuf {
        self.scratch.path().join("seats")
    }
}

fn data(scratch: &TempDir) -> PathBuf {
    scratch.path().join("data")
}

fn scratch(under: &Path) -> Result<TempDir, Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", under.display()));
    std::fs::create_dir_all(under).map_err(failed)?;
    if rustix::fs::statfs(under).is_ok_and(|about| about.f_type == TMPFS) {
        eprintln!(
            "warning: {} is in memory, where a sync costs nothing; --dir names another place",
            under.display()
        );
    }
    tempfile::Builder::new().prefix("evenhand-bench-").tempdir_in(under).map_err(failed)
}

/// A server that was started for this.
#[derive(Debug)]
struct Started {
    child: Child,
    /// Kept open: the server must not find that nobody listens.
    _said: Option<BufReader<ChildStdout>>,
}

impl Started {
    /// Starts it, and returns when it listens.
    async fn begin(data: &Path, listen: &str, args: &[String]) -> Result<(String, Started), Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("serve").arg("--data").arg(data).args(["--listen", listen, "--log", "warn"]).args(args);
        command.arg("--witness").arg(data.with_extension("witness"));
        // What this process was told of servers is not for that one.
        for name in ["EVENHAND_DATA", "EVENHAND_WITNESS", "EVENHAND_LISTEN", "EVENHAND_LOG"] {
            command.env_remove(name);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let child = child.map_err(|error| Failure::new(format!("cannot start a server: {error}")))?;
        let mut started = Started { child, _said: None };
        let Some(said) = started.child.stdout.take() else {
            return Err(Failure::new("the server has no output"));
        };
        let mut said = BufReader::new(said);
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            said.read_line(&mut line).map(|_| (line, said))
        });
        let (line, said) = read.await.map_err(Failure::new)?.map_err(Failure::new)?;
        let Some(url) = address(&line) else {
            return Err(Failure::new(format!(
                "the server that was started did not say where it listens: {line:?}"
            )));
        };
        started._said = Some(said);
        Ok((url.to_string(), started))
    }
}

/// What a server's first line says of where it is.
fn address(line: &str) -> Option<&str> {
    let (address, _) = line.strip_prefix("evenhand listens on ")?.split_once(',')?;
    address.starts_with("http://").then_some(address)
}

/// What the system's line on a process says of its processor time. Ticks are hundredths of a second on every Linux.
fn on_cpu(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * 10))
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        for _ in 0..END_WITHIN.as_millis() / LOOK.as_millis() {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(LOOK),
                Ok(Some(_)) | Err(_) => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_of_a_process_is_read() {
        let stat = "4711 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0 9 0 1";
        assert_eq!(on_cpu(stat), Some(Duration::from_millis(1_500)));
        assert_eq!(on_cpu(""), None);
    }

    #[test]
    fn a_servers_first_line_says_where_it_is() {
        let line = "evenhand listens on http://127.0.0.1:39211, data in ./a, b\n";
        assert_eq!(address(line), Some("http://127.0.0.1:39211"));
        for wrong in
            ["", "evenhand: no", "evenhand listens on nothing, data in .", "evenhand listens on http://a"]
        {
            assert_eq!(address(wrong), None, "{wrong:?}");
        }
    }
}
