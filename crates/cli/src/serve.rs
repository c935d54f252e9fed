//! `evenhand serve`: a server until it is told to stop.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use evenhand_core::owner::Settings;
use evenhand_core::owner::health::Thresholds;
use evenhand_server::{Config, Server};
use evenhand_store::Embedded;
use evenhand_store::embedded::Options;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::log::LogArgs;
use crate::terminal::print;
use crate::{Done, Failure, parse};

/// What a server is told.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand serve
  evenhand serve --data /var/lib/evenhand --listen 0.0.0.0:7400 --log-format json
  evenhand serve --config /etc/evenhand/evenhand.toml

SIGTERM and Ctrl-C stop it in good order: what runs goes on, and is taken up by the next start.")]
pub(crate) struct Args {
    /// Where the data is; made if it is not there
    #[arg(long, env = "EVENHAND_DATA", default_value = "evenhand-data", value_name = "DIR")]
    data: PathBuf,
    /// Where the store's witness is, by which it notices that it is an old copy of itself: outside of the data, and never
    /// put back with it; $XDG_STATE_HOME/evenhand/witness or ~/.local/state/evenhand/witness, if nobody says
    #[arg(long, env = "EVENHAND_WITNESS", value_name = "DIR")]
    witness: Option<PathBuf>,
    /// Where to listen
    #[arg(long, env = "EVENHAND_LISTEN", default_value = "127.0.0.1:7400", value_name = "ADDR")]
    listen: SocketAddr,
    #[command(flatten)]
    times: Times,
    /// Free space below which no new tasks are accepted, in MiB
    #[arg(long, env = "EVENHAND_FLOOR", default_value = "512", value_name = "MIB")]
    floor: u64,
    #[command(flatten)]
    log: LogArgs,
}

/// When a worker counts as what.
#[derive(Debug, ClapArgs)]
pub(crate) struct Times {
    /// How often a worker says that it is alive
    #[arg(long, env = "EVENHAND_HEARTBEAT", default_value = "1s", value_parser = parse::duration, value_name = "TIME")]
    heartbeat: Duration,
    /// After so much silence a worker gets no more work
    #[arg(long, env = "EVENHAND_UNHEALTHY_AFTER", default_value = "5s", value_parser = parse::duration, value_name = "TIME")]
    unhealthy_after: Duration,
    /// After so much silence a worker is lost, and its tasks are run again
    #[arg(long, env = "EVENHAND_LOST_AFTER", default_value = "60s", value_parser = parse::duration, value_name = "TIME")]
    lost_after: Duration,
    /// How long what runs may go on without the server, after it was stopped in good order
    #[arg(long, env = "EVENHAND_ABSENCE", default_value = "5m", value_parser = parse::duration, value_name = "TIME")]
    absence: Duration,
}

impl Args {
    /// Whether what it is told goes together.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.times.settings().map(drop)
    }
}

impl Times {
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        let ms = |time: Duration| time.as_millis() as u64;
        let thresholds = Thresholds {
            heartbeat_ms: ms(self.heartbeat),
            unhealthy_after_ms: ms(self.unhealthy_after),
            lost_after_ms: ms(self.lost_after),
        };
        let wrong = |refusal: evenhand::Refusal| Failure {
            text: format!("--{} {}", refusal.field, refusal.message),
            exit: 2,
        };
        thresholds.check().map_err(wrong)?;
        Ok(Settings { thresholds, absence_ms: ms(self.absence), ..Settings::default() })
    }
}

pub(crate) async fn run(args: Args) -> Done {
    args.log.begin()?;
    let mut signals = Signals::new()?;
    let settings = args.times.settings()?;
    let witness = args.witness.unwrap_or_else(witness_dir);
    info!(data = %args.data.display(), witness = %witness.display(), "opening the store");
    let mut server = start(&args.data, Some(witness), args.listen, settings, args.floor).await?;
    // Nobody has to listen.
    let _ = print(format!("evenhand listens on http://{}, data in {}\n", server.addr(), args.data.display()));
    let why = tokio::select! {
        ended = server.ended() => return ended.map(|()| ExitCode::SUCCESS).map_err(Failure::new),
        why = signals.told_to_stop() => why,
    };
    info!("{why}: stopping in good order; once more to stop at once");
    stop(server, &mut signals).await
}

/// Where the witness is, if nobody says: a place of this machine that outlives the process, beside the seats' lock files.
/// One that is lost makes the next start wait, so no place for temporary files will do.
fn witness_dir() -> PathBuf {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    match state.or_else(home) {
        Some(state) => state.join("evenhand/witness"),
        None => PathBuf::from("/var/lib/evenhand-witness"),
    }
}

/// Opens the store and starts a server on it. Without a witness an old copy of the store is taken for the newest.
pub(crate) async fn start(
    data: &Path,
    witness: Option<PathBuf>,
    listen: SocketAddr,
    settings: Settings,
    floor_mib: u64,
) -> Result<Server, Failure> {
    // A store that is full to its floor must still have room to open: a few segments of its log.
    let floor = floor_mib << 20;
    let segment = (floor / 16).clamp(1 << 20, Options::default().segment);
    let options = Options { floor, segment, witness, ..Options::default() };
    let dir = data.to_path_buf();
    let opened = tokio::task::spawn_blocking(move || Embedded::open(dir, options)).await;
    let store = opened.map_err(Failure::new)?.map_err(Failure::new)?;
    let about = format!("embedded, {}", data.display());
    Server::start(Config { listen, store: about, settings }, store).await.map_err(Failure::new)
}

/// Stops in good order, or at once when somebody insists.
pub(crate) async fn stop(server: Server, signals: &mut Signals) -> Done {
    tokio::select! {
        stopped = server.stop() => stopped.map(|()| ExitCode::SUCCESS).map_err(Failure::new),
        insisted = signals.told_to_stop() => {
            warn!("{insisted}: stopping at once; the next start will wait for its workers");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// SIGTERM and Ctrl-C. From when this is made, they no longer end the process by themselves.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Signals, Failure> {
        let listen = |kind| signal(kind).map_err(Failure::new);
        Ok(Signals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// Waits for one of them, and says which it was.
    pub(crate) async fn told_to_stop(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "Ctrl-C",
        }
    }
}
