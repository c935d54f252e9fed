//! A guardian in a scratch directory, a worker in a process of its own, and looks at the processes there are.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use evenhand::guardian::{
    Ended, Event, Guardian, GuardianError, Instance, Options, RunSpec, Seat, boottime_ms,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::sync::mpsc;

/// Longer than anything takes on the slowest machine: a test that waits so long has failed.
const PATIENCE: Duration = Duration::from_secs(60);
/// A lease or a deadline that is not to matter.
pub(crate) const LONG_MS: u64 = 600_000;

pub(crate) fn child_program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples/guardian_child");
    let there = path.exists();
    assert!(there, "{} is missing; run `cargo build -p evenhand --examples`", path.display());
    path
}

pub(crate) fn options(dir: &Path, seat: &str) -> Options {
    Options {
        program: child_program(),
        args: vec!["guardian".into()],
        trampoline: vec!["trampoline".into()],
        seat_dir: dir.to_owned(),
        work_dir: dir.join("work"),
        seat: Seat::Named(seat.to_owned()),
        lock_wait: Duration::ZERO,
        cgroups: false,
    }
}

/// This process as a worker, with a guardian and a lease.
pub(crate) struct Bench {
    pub(crate) guardian: Guardian,
    pub(crate) instance: Instance,
    pub(crate) dir: TempDir,
    events: mpsc::Receiver<Event>,
    /// The lines of standard error that came by, by run.
    pub(crate) lines: HashMap<u64, Vec<String>>,
}

impl Bench {
    pub(crate) async fn new(seat: &str) -> Bench {
        Bench::with(seat, |_| {}).await
    }

    pub(crate) async fn with(seat: &str, change: impl FnOnce(&mut Options)) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options(dir.path(), seat);
        change(&mut options);
        let (guardian, instance, events) = Guardian::start(options).await.unwrap();
        guardian.lease(boottime_ms() + LONG_MS).await.unwrap();
        Bench { guardian, instance, dir, events, lines: HashMap::new() }
    }

    /// Starts a shell script as a run.
    pub(crate) async fn start(&self, id: u64, script: &str) {
        self.guardian.run(self.spec(id, script)).await.unwrap();
    }

    pub(crate) fn spec(&self, id: u64, script: &str) -> RunSpec {
        let command = ["sh", "-c", script].map(Into::into).to_vec();
        let env = vec![("DIR".into(), self.dir.path().into())];
        RunSpec { id, command, env, ..RunSpec::default() }
    }

    /// The next event that is no line.
    pub(crate) async fn event(&mut self) -> Event {
        loop {
            let event = self.any_event().await;
            let Event::Output { id, line } = event else { return event };
            self.lines.entry(id).or_default().push(line);
        }
    }

    async fn any_event(&mut self) -> Event {
        tokio::time::timeout(PATIENCE, self.events.recv()).await.unwrap().unwrap()
    }

    /// The process of a run, when it has started.
    pub(crate) async fn started(&mut self, id: u64) -> u32 {
        let event = self.event().await;
        let Event::Started { id: of, pid } = event else { panic!("run {id} should have started: {event:?}") };
        assert_eq!(of, id);
        pid
    }

    pub(crate) async fn ended(&mut self, id: u64) -> Ended {
        let event = self.event().await;
        let Event::Ended(ended) = event else { panic!("run {id} should have ended: {event:?}") };
        assert_eq!(ended.id, id);
        ended
    }

    /// Starts a script and waits for its end.
    pub(crate) async fn run(&mut self, id: u64, script: &str) -> Ended {
        self.start(id, script).await;
        self.started(id).await;
        self.ended(id).await
    }

    /// Starts a script and waits until it says `ready` on its standard error.
    pub(crate) async fn ready(&mut self, id: u64, script: &str) -> u32 {
        self.start(id, script).await;
        let pid = self.started(id).await;
        let ready = Event::Output { id, line: "ready".into() };
        assert_eq!(self.any_event().await, ready);
        pid
    }

    /// The number that a script wrote to a file.
    pub(crate) fn number(&self, file: &str) -> u32 {
        fs::read_to_string(self.dir.path().join(file)).unwrap().trim().parse().unwrap()
    }

    /// The events until there are no more.
    pub(crate) async fn rest(mut self) -> Vec<Event> {
        drop(self.guardian);
        let mut rest = Vec::new();
        while let Some(event) = tokio::time::timeout(PATIENCE, self.events.recv()).await.unwrap() {
            rest.push(event);
        }
        rest
    }

    /// Shuts the guardian down. The events that were left.
    pub(crate) async fn shutdown(mut self) -> (TempDir, Vec<Event>) {
        let (shut, rest) = tokio::join!(self.guardian.shutdown(), async {
            let mut rest = Vec::new();
            while let Some(event) = self.events.recv().await {
                rest.push(event);
            }
            rest
        });
        shut.unwrap();
        (self.dir, rest)
    }
}

/// A worker in a process of its own, with one run. Killed when dropped.
pub(crate) struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
    pub(crate) token: u64,
    pub(crate) life: u64,
    pub(crate) guardian: u32,
    /// The run's main process.
    pub(crate) run: u32,
}

impl Worker {
    /// Its guardian writes to the file `death` in the directory when it dies.
    pub(crate) fn start(dir: &Path, seat: &str, lease_ms: u64, script: &str) -> Worker {
        let mut command = Command::new(child_program());
        command.arg("worker").arg(dir).arg(seat).arg(lease_ms.to_string()).args(["--", "sh", "-c", script]);
        command.env("GUARDIAN_CHILD_DEATH", dir.join("death")).env("DIR", dir);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut worker = Worker { child, lines, token: 0, life: 0, guardian: 0, run: 0 };
        let instance = worker.line();
        let numbers: Vec<u64> = instance.split(' ').skip(1).map(|number| number.parse().unwrap()).collect();
        (worker.token, worker.life) = (numbers[0], numbers[1]);
        worker.guardian = worker.line().strip_prefix("guardian ").unwrap().parse().unwrap();
        worker.run = worker.line().strip_prefix("started ").unwrap().parse().unwrap();
        worker
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

/// The letter that tells what a process does; none if it is gone.
pub(crate) fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// Whether a process is there and can do something.
pub(crate) fn lives(pid: u32) -> bool {
    state(pid).is_some_and(|state| state != 'Z' && state != 'X')
}

/// Waits for what the system does not announce.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < PATIENCE, "this never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The processes that carry the marker of a seat's runs.
pub(crate) fn strays(dir: &Path, seat: &str) -> Vec<u32> {
    let file = fs::metadata(dir.join(format!("{seat}.lock"))).unwrap();
    let marker = format!("EVENHAND_RUN={seat}@{:x}-{:x}.", file.dev(), file.ino());
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|&byte| byte == 0).any(|variable| variable.starts_with(marker.as_bytes()))
    })
    .collect()
}

/// The next life of a seat, once its lock is free.
pub(crate) async fn next_life(dir: &Path, seat: &str) -> (Guardian, Instance, mpsc::Receiver<Event>) {
    let mut options = options(dir, seat);
    options.lock_wait = PATIENCE;
    Guardian::start(options).await.unwrap()
}

/// What keeps a seat from being taken.
pub(crate) async fn refusal(options: Options) -> GuardianError {
    Guardian::start(options).await.map(drop).unwrap_err()
}
