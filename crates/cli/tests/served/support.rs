//! A server, workers and a client in a scratch directory. Whatever was started is ended when it is dropped.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use evenhand::{Client, Enqueued, NewTask, Refusal, Task, TaskState, wire};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Bounds a test that hangs; nothing is said about how fast anything is.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Asks until it is so.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < SOON, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Asks until there is an answer.
pub(crate) fn eventually_some<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let mut answer = None;
    eventually(what, || {
        answer = ask();
        answer.is_some()
    });
    answer.unwrap()
}

/// The runtime of all clients.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap())
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    runtime().block_on(future)
}

/// For tests that need the machine to themselves.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Random numbers that a seed repeats.
pub(crate) struct Dice(u64);

impl Dice {
    /// From the environment's seed, or the time. The test prints it if it fails.
    pub(crate) fn new() -> Dice {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Dice::fixed(now.as_nanos() as u64)
    }

    /// From the environment's seed, or this one.
    pub(crate) fn fixed(usually: u64) -> Dice {
        let seed = std::env::var("EVENHAND_CHAOS_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or(usually);
        // Shown when the test fails; passing tests' output is swallowed.
        println!("EVENHAND_CHAOS_SEED={seed}");
        Dice(seed)
    }

    /// Others, for another thread.
    pub(crate) fn split(&mut self) -> Dice {
        Dice(self.below(u64::MAX))
    }

    /// One of 0 to n - 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A pause of a fault schedule.
    pub(crate) fn pause(&mut self, from_ms: u64, to_ms: u64) {
        std::thread::sleep(Duration::from_millis(from_ms + self.below(to_ms - from_ms + 1)));
    }
}

/// How many rounds a test under load goes on for.
pub(crate) fn rounds(usually: u64) -> u64 {
    std::env::var("EVENHAND_CHAOS_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usually)
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    // It may have gone by itself.
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
}

/// Whether a process runs (one that only waits to be reaped does not).
pub(crate) fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace().next();
    state.is_some_and(|state| state != "Z" && state != "X")
}

/// When a server gives its workers up, as it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) lost_after: &'static str,
    pub(crate) absence: &'static str,
}

/// For tests in which workers are lost.
pub(crate) const SHORT: Times = Times { lost_after: "2s", absence: "30s" };
/// For tests in which nobody may be lost.
pub(crate) const LONG: Times = Times { lost_after: "10m", absence: "10m" };

/// A port outside of those that the system hands out, so that it is still free after a restart.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed) + (std::process::id() % 300) as u16 * 64;
        let port = 12_000 + n % 19_200;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A server on a data directory and a port that it keeps over restarts, and a place for everything else.
pub(crate) struct Server {
    pub(crate) dir: TempDir,
    pub(crate) data: PathBuf,
    pub(crate) addr: SocketAddr,
    pub(crate) args: Vec<String>,
    child: Option<Child>,
}

impl Server {
    pub(crate) fn start(times: Times) -> Server {
        Server::with(times, &[])
    }

    pub(crate) fn with(times: Times, more: &[&str]) -> Server {
        let dir = TempDir::new().unwrap();
        let data = dir.path().join("data");
        Server::on(dir, data, times, more)
    }

    /// One that listens elsewhere than on the loopback.
    pub(crate) fn listening(ip: IpAddr, times: Times, more: &[&str]) -> Server {
        let dir = TempDir::new().unwrap();
        let data = dir.path().join("data");
        Server::begin(ip, dir, data, times, more)
    }

    pub(crate) fn on(dir: TempDir, data: PathBuf, times: Times, more: &[&str]) -> Server {
        Server::begin(Ipv4Addr::LOCALHOST.into(), dir, data, times, more)
    }

    fn begin(ip: IpAddr, dir: TempDir, data: PathBuf, times: Times, more: &[&str]) -> Server {
        fs::create_dir(dir.path().join("locks")).unwrap();
        let told = ["--heartbeat", "100ms", "--unhealthy-after", "400ms"];
        let times = ["--lost-after", times.lost_after, "--absence", times.absence];
        let args = told.iter().chain(&times).chain(more).map(|arg| arg.to_string()).collect();
        let addr = SocketAddr::new(ip, free_port());
        let mut server = Server { dir, data, addr, args, child: None };
        server.restart();
        server
    }

    /// Starts it, on what is there. It must not run.
    pub(crate) fn restart(&mut self) {
        assert!(self.child.is_none(), "the server runs");
        let log = log(&self.dir.path().join("server.log"));
        let mut child = Command::new(env!("CARGO_BIN_EXE_evenhand"))
            .arg("serve")
            .args(["--listen", &self.addr.to_string()])
            .arg("--data")
            .arg(&self.data)
            .arg("--witness")
            .arg(self.path("witness"))
            .args(["--log", "info"])
            .args(&self.args)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        self.child = Some(child);
        assert!(said.contains("listens on"), "the server said {said:?}\n{}", self.log());
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// No last words.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// In good order.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        signal(child.id(), Signal::TERM);
        wait(&mut child, "the server stops")
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub(crate) fn api(&self) -> Api {
        Api::new(&self.url())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What it has said so far, in all its lives.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("server.log")).unwrap_or_default()
    }

    /// A page for operators, with its status line: `/healthz`.
    pub(crate) fn page(&self, path: &str) -> String {
        let mut answer = String::new();
        self.send("GET", path, "", b"").read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends a request of HTTP, with these lines in its head, and leaves its answer to be read.
    pub(crate) fn send(&self, method: &str, path: &str, head: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let (host, length) = (self.addr, body.len());
        let begin = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
        write!(stream, "{begin}content-length: {length}\r\n{head}\r\n").unwrap();
        // One that is refused may not be read to its end.
        let _ = stream.write_all(body);
        stream
    }

    /// A number from `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let page = self.page("/metrics");
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
    }

    /// A line of /proc/PID/status, in KiB: VmRSS, VmHWM.
    pub(crate) fn memory_kib(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// `evenhand ARGS --server URL`.
    pub(crate) fn cli<S: AsRef<OsStr>>(&self, args: &[S]) -> Said {
        self.cli_with(args, b"")
    }

    pub(crate) fn cli_with<S: AsRef<OsStr>>(&self, args: &[S], stdin: &[u8]) -> Said {
        let mut child = Command::new(env!("CARGO_BIN_EXE_evenhand"))
            .args(args)
            .env("EVENHAND_SERVER", self.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // One that does not read may end before all is written.
        let _ = child.stdin.take().unwrap().write_all(stdin);
        Said::new(child.wait_with_output().unwrap())
    }

    /// A worker of the queue `q` that runs checked tasks.
    pub(crate) fn worker(&self, seat: &str, slots: u32) -> WorkerProcess {
        let command = [checked_task().into_os_string(), self.dir.path().into()];
        self.worker_of(seat, &["q", "--slots", &slots.to_string()], &command)
    }

    /// A worker of this machine with these arguments that runs this command.
    pub(crate) fn worker_of<S: AsRef<OsStr>>(
        &self,
        seat: &str,
        args: &[&str],
        command: &[S],
    ) -> WorkerProcess {
        self.worker_on("seats", seat, args, command)
    }

    /// A worker that keeps its lock files in this directory: another one is another machine.
    pub(crate) fn worker_on<S: AsRef<OsStr>>(
        &self,
        machine: &str,
        seat: &str,
        args: &[&str],
        command: &[S],
    ) -> WorkerProcess {
        self.worker_by(Command::new(env!("CARGO_BIN_EXE_evenhand")), machine, seat, args, command)
    }

    /// The same, begun by this command: `evenhand` itself, or what becomes it.
    pub(crate) fn worker_by<S: AsRef<OsStr>>(
        &self,
        mut evenhand: Command,
        machine: &str,
        seat: &str,
        args: &[&str],
        command: &[S],
    ) -> WorkerProcess {
        let path = self.path(&format!("{machine}-{seat}.log"));
        let child = evenhand
            .arg("worker")
            .args(args)
            .args(["--server", &self.url(), "--seat", seat, "--grace", "2s", "--seat-dir"])
            .arg(self.path(machine))
            .arg("--")
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log(&path))
            .spawn()
            .unwrap();
        WorkerProcess { child, log: path, guardian: None }
    }

    /// What went wrong, for a test that fails.
    pub(crate) fn tell_logs(&self) -> String {
        let mut text = String::new();
        for entry in fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ext| ext == "log") {
                let said = fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<&str> = said.lines().collect();
                let last = lines[lines.len().saturating_sub(60)..].join("\n");
                writeln!(text, "--- {}\n{last}", path.display()).unwrap();
            }
        }
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.tell_logs());
            let records = fs::read_to_string(self.path("records")).unwrap_or_default();
            let kept = std::env::temp_dir().join(format!("evenhand-failed-{}.records", self.addr.port()));
            let _ = fs::write(&kept, records);
            eprintln!("the records are kept in {}", kept.display());
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn log(path: &Path) -> File {
    OpenOptions::new().create(true).append(true).open(path).unwrap()
}

pub(crate) fn wait(child: &mut Child, what: &str) -> ExitStatus {
    eventually_some(what, || child.try_wait().unwrap())
}

/// The program of checked tasks.
pub(crate) fn checked_task() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples/checked_task");
    let there = path.exists();
    assert!(
        there,
        "{} is missing; run `cargo build -p evenhand-cli --examples --profile test`",
        path.display()
    );
    path
}

/// What a command said, and how it ended.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) code: i32,
}

impl Said {
    fn new(output: Output) -> Said {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { out: text(output.stdout), err: text(output.stderr), code: output.status.code().unwrap_or(-1) }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A worker's process, with its guardian beside it.
pub(crate) struct WorkerProcess {
    child: Child,
    log: PathBuf,
    guardian: Option<u32>,
}

impl WorkerProcess {
    /// The guardian's pid.
    pub(crate) fn guardian(&mut self) -> u32 {
        let worker = self.child.id();
        let found =
            self.guardian.unwrap_or_else(|| eventually_some("there is a guardian", || guardian_of(worker)));
        self.guardian = Some(found);
        found
    }

    /// Kills the guardian and waits until the worker has another one. If the guardian had not begun yet, the worker ends
    /// instead: it cannot tell that from one that never will.
    pub(crate) fn kill_guardian(&mut self) {
        let (worker, killed) = (self.child.id(), self.guardian());
        signal(killed, Signal::KILL);
        self.guardian = None;
        eventually("there is another guardian, or the worker has ended", || {
            self.guardian = guardian_of(worker).filter(|guardian| *guardian != killed);
            self.guardian.is_some() || self.has_ended().is_some()
        });
    }

    pub(crate) fn kill(&mut self) {
        self.guardian();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn kill_with_guardian(&mut self) {
        let guardian = self.guardian();
        signal(guardian, Signal::KILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
        eventually("the guardian is dead", || !lives(guardian));
    }

    pub(crate) fn signal(&self, which: Signal) {
        signal(self.child.id(), which);
    }

    /// How it ended, once it has.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        wait(&mut self.child, "the worker ends")
    }

    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        let guardian = self.guardian.or_else(|| guardian_of(self.child.id()));
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(guardian) = guardian {
            // It kills what runs and ends by itself, unless it was stopped or hangs.
            signal(guardian, Signal::CONT);
            let began = Instant::now();
            while lives(guardian) && began.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(10));
            }
            if lives(guardian) {
                signal(guardian, Signal::KILL);
            }
        }
    }
}

fn guardian_of(worker: u32) -> Option<u32> {
    let threads = fs::read_dir(format!("/proc/{worker}/task")).ok()?;
    let children =
        threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let children: Vec<u32> = children
        .flat_map(|list| list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    let is_guardian = |pid: &u32| {
        let said = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        said.split(|byte| *byte == 0).nth(1) == Some(b"guardian")
    };
    children.into_iter().find(is_guardian)
}

/// A client that waits for its answers.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) client: Client,
}

impl Api {
    pub(crate) fn new(url: &str) -> Api {
        let _inside = runtime().enter();
        Api { client: Client::new(url).unwrap().patience(SOON) }
    }

    /// Says what is refused at once.
    pub(crate) fn hasty(&self) -> Api {
        Api { client: self.client.clone().patience(Duration::ZERO) }
    }

    /// A checked task that may be tried as often as anybody likes.
    pub(crate) fn submit(&self, payload: &str) -> String {
        self.submit_all("q", [payload]).remove(0)
    }

    pub(crate) fn submit_all<'a>(
        &self,
        queue: &str,
        payloads: impl IntoIterator<Item = &'a str>,
    ) -> Vec<String> {
        let tasks = payloads.into_iter().map(task).collect();
        block_on(self.client.enqueue_all(queue, tasks)).unwrap().ids
    }

    pub(crate) fn enqueue(&self, queue: &str, tasks: Vec<NewTask>) -> Result<Enqueued, Refusal> {
        block_on(self.client.enqueue_all(queue, tasks))
    }

    /// As a request of this name, until there is an answer.
    pub(crate) fn enqueue_once(&self, queue: &str, tasks: &[NewTask], request: &str) -> Enqueued {
        let hasty = self.hasty();
        eventually_some("a request is answered", || {
            match block_on(hasty.client.enqueue_once(queue, tasks.to_vec(), request.into())) {
                Ok(enqueued) => Some(enqueued),
                Err(refusal) => {
                    let passing =
                        matches!(refusal.kind, evenhand::Kind::Unavailable | evenhand::Kind::Limited);
                    assert!(passing, "a request is refused: {refusal}");
                    None
                }
            }
        })
    }

    pub(crate) fn get(&self, id: &str) -> Task {
        block_on(self.client.get(id)).unwrap()
    }

    pub(crate) fn state(&self, id: &str) -> TaskState {
        self.get(id).state()
    }

    /// Waits until a task has ended. That it is known all the while is tested elsewhere (`contract`).
    pub(crate) fn end(&self, id: &str) -> Task {
        eventually_some(&format!("task {id} ends"), || match block_on(self.client.get(id)) {
            Ok(task) => is_over(&task).then_some(task),
            Err(refusal) => {
                assert_eq!(refusal.kind, evenhand::Kind::NotFound, "{refusal}");
                None
            }
        })
    }

    pub(crate) fn queue(&self, name: &str) -> wire::Queue {
        let queues = block_on(self.client.queues()).unwrap();
        queues.into_iter().find(|queue| queue.name == name).unwrap_or_default()
    }

    pub(crate) fn shard(&self) -> wire::Shard {
        block_on(self.client.status()).unwrap().shards.remove(0)
    }

    /// The same of a server that may not be able to answer.
    pub(crate) fn client_shard(&self) -> Option<wire::Shard> {
        block_on(self.client.status()).ok().map(|mut status| status.shards.remove(0))
    }

    pub(crate) fn workers(&self) -> Vec<wire::Worker> {
        block_on(self.client.workers()).unwrap()
    }

    /// The same of a server that may not be able to answer.
    pub(crate) fn client_workers(&self) -> Option<Vec<wire::Worker>> {
        block_on(self.client.workers()).ok()
    }

    /// Waits until a seat's worker gets work.
    pub(crate) fn await_worker(&self, seat: &str) {
        eventually(&format!("{seat} gets work"), || {
            self.workers().iter().any(|worker| worker.seat == seat && worker.health == "healthy")
        });
    }
}

pub(crate) fn is_over(task: &Task) -> bool {
    match task.state() {
        TaskState::Succeeded | TaskState::Failed | TaskState::Canceled | TaskState::Expired => true,
        TaskState::Queued | TaskState::Scheduled | TaskState::Running | TaskState::Unspecified => false,
    }
}

/// A checked task: only its own records say how often it was tried.
pub(crate) fn task(payload: &str) -> NewTask {
    NewTask::new(payload.as_bytes().to_vec()).max_attempts(1_000)
}

/// A file that tasks wait for.
pub(crate) struct Signpost(PathBuf);

impl Signpost {
    pub(crate) fn new(server: &Server) -> Signpost {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Signpost(server.path(&format!("go-{}", NEXT.fetch_add(1, Ordering::Relaxed))))
    }

    /// A payload: wait for it.
    pub(crate) fn until(&self) -> String {
        format!("until {}", self.0.display())
    }

    /// Where it stands.
    pub(crate) fn path(&self) -> std::path::Display<'_> {
        self.0.display()
    }

    pub(crate) fn raise(&self) {
        File::create(&self.0).unwrap();
    }
}
