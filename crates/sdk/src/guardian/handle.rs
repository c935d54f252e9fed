//! The worker's side: starts a guardian, tells it what to do, and hears how runs go.
//!
//! Three tasks belong to a guardian: one writes orders, one reads reports, one watches the process. If the
//! guardian dies, or stops while a lease runs out, the last one makes sure that nothing goes on running before
//! anybody is told.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::process::{Pid, set_child_subreaper};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{sleep, timeout};

use super::dirs::Dirs;
use super::estate::kill_estate;
use super::frames::{
    Deadline, End, FRAME_BYTES, Failure, FrameReader, Hello, Interactive, KillAll, Order, Report, Setup,
    Shutdown, Start, Stop, ToGuardian, ToWorker, Variable, encode,
};
use super::socket::{self, Parcel};
use super::streams::{Streams, Terminal};
use super::{
    Ended, Event, GuardianError, Instance, KillCause, Options, Outcome, Refusal, RunSpec, STDOUT_BYTES, Seat,
    boottime_ms, processes,
};

/// Frames that wait to be written. More callers wait.
const ORDERS: usize = 64;
/// Events that wait to be heard. Beyond it the guardian drops lines.
const EVENTS: usize = 256;
/// How long a guardian may take to say hello, beside waiting for the lock: it may have to sweep first.
const HELLO: Duration = Duration::from_secs(20);
/// How long after the end of a lease a guardian must have said that it killed. One that does not is stopped
/// itself, and is killed.
const STALLED: Duration = Duration::from_secs(2);
/// How often that is looked at.
const TICK: Duration = Duration::from_millis(200);

/// A guardian that runs. If it is dropped without [`Guardian::shutdown`], the guardian takes the worker for
/// dead.
#[derive(Debug)]
pub struct Guardian {
    orders: mpsc::Sender<Parcel>,
    shared: Arc<Shared>,
    pid: u32,
    dirs: Dirs,
    /// Turns true when the process is gone and nothing runs.
    gone: watch::Receiver<bool>,
}

/// What the handle and its tasks know together.
#[derive(Debug, Default)]
struct Shared {
    /// The last lease that was ordered, and the last one that the guardian said is over.
    lease_until_ms: AtomicU64,
    over_until_ms: AtomicU64,
    /// An end was ordered, so it is none of ours.
    shutdown: AtomicBool,
    /// The guardian speaks nonsense and must end.
    broken: Notify,
    /// The runs that have started and not ended, with their main processes.
    alive: Mutex<BTreeMap<u64, Pid>>,
}

impl Guardian {
    /// Starts a guardian and waits until its life has begun.
    ///
    /// Makes this process a subreaper: what a guardian that was killed leaves behind is handed to it.
    pub async fn start(
        options: Options,
    ) -> Result<(Guardian, Instance, mpsc::Receiver<Event>), GuardianError> {
        let spawn = |source| GuardianError::Spawn { program: options.program.clone(), source };
        set_child_subreaper(Some(processes::own_pid())).map_err(|error| spawn(error.into()))?;
        let (mut ours, theirs) = socket_pair().map_err(spawn)?;
        let mut command = Command::new(&options.program);
        command.args(&options.args).stdin(theirs).stdout(Stdio::piped());
        let child = command.spawn();
        // It holds the guardian's end of the socket.
        drop(command);
        let mut child = child.map_err(spawn)?;
        let (Some(stdout), Some(pid)) = (child.stdout.take(), child.id()) else {
            return Err(GuardianError::Gone);
        };
        let mut reports = FrameReader::new(stdout);
        let patience = HELLO + options.lock_wait;
        let setup = order(Order::Setup(setup(&options)))
            .ok_or_else(|| GuardianError::Setup("the arguments of the trampoline are too long".into()))?;
        let hello = timeout(patience, async {
            socket::write(&mut ours, setup.into()).await.map_err(|_| GuardianError::Gone)?;
            hello(&mut reports).await
        });
        let hello = match hello.await {
            Ok(Ok(hello)) => hello,
            failed => {
                // Nothing runs in it. It must not hold the seat, nor stay a zombie.
                let _ = child.start_kill();
                let _ = child.wait().await;
                return Err(failed.map_or(GuardianError::NoAnswer(patience), |result| {
                    result.err().unwrap_or(GuardianError::Gone)
                }));
            }
        };
        let instance = Instance { seat: hello.seat.clone(), token: hello.token, life: hello.life };
        let shared = Arc::new(Shared::default());
        let (orders, ordered) = mpsc::channel(ORDERS);
        let (heard, events) = mpsc::channel(EVENTS);
        let (gone_sender, gone) = watch::channel(false);
        let dirs = Dirs::new(&options.work_dir, &hello.marker);
        tokio::spawn(write_orders(ours, ordered));
        tokio::spawn(read_reports(reports, shared.clone(), heard, gone.clone()));
        tokio::spawn(watch_over(child, shared.clone(), hello, gone_sender));
        Ok((Guardian { orders, shared, pid, dirs, gone }, instance, events))
    }

    /// The guardian's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The directories of this life's runs. The guardian removes them when it ends.
    pub(crate) fn dirs(&self) -> &Dirs {
        &self.dirs
    }

    /// Starts a run. It is answered by [`Event::Started`] and [`Event::Ended`], or by one of
    /// [`Event::Refused`] and [`Event::Ended`] alone.
    pub async fn run(&self, spec: RunSpec) -> Result<(), GuardianError> {
        self.start_run(spec, None, Vec::new()).await
    }

    /// Starts an interactive run, with a terminal or with pipes. It is answered like any other, but its streams are
    /// the caller's: nothing of them is in [`Event::Output`] and [`Event::Ended`], the payload is not used, and what a
    /// command that could not be executed has to say stands in its standard error.
    pub async fn attach(&self, spec: RunSpec, terminal: Option<&Terminal>) -> Result<Streams, GuardianError> {
        let (id, what) = (spec.id, if terminal.is_some() { "terminal" } else { "pipes" });
        let opened = Streams::open(terminal).map_err(|source| GuardianError::Streams { id, what, source })?;
        let (streams, theirs) = opened;
        let mut spec = RunSpec { payload: Bytes::new(), ..spec };
        if let Some(Terminal { term, .. }) = terminal.filter(|terminal| !terminal.term.is_empty()) {
            spec.env.push(("TERM".into(), term.into()));
        }
        self.start_run(spec, Some(Interactive { terminal: terminal.is_some() }), theirs).await?;
        Ok(streams)
    }

    async fn start_run(
        &self,
        spec: RunSpec,
        interactive: Option<Interactive>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), GuardianError> {
        let id = spec.id;
        let start = Start {
            id,
            command: spec.command.into_iter().map(OsStringExt::into_vec).collect(),
            env: spec
                .env
                .into_iter()
                .map(|(name, value)| Variable { name: name.into_vec(), value: value.into_vec() })
                .collect(),
            dir: spec.dir.map(|dir| dir.into_os_string().into_vec()),
            payload: spec.payload,
            deadline_ms: spec.deadline_ms,
            grace_ms: spec.grace_ms,
            stdout_limit: spec.stdout_limit.unwrap_or(STDOUT_BYTES) as u64,
            interactive,
        };
        let frame = order(Order::Start(start)).ok_or(GuardianError::TooLarge { id, max: FRAME_BYTES })?;
        self.write(Parcel { frame, descriptors }).await
    }

    /// Ends a run: SIGTERM to its process group, and SIGKILL after the grace. One that is not there has
    /// ended already.
    pub async fn stop(&self, id: u64, grace_ms: u64) -> Result<(), GuardianError> {
        self.send(Order::Stop(Stop { id, grace_ms })).await
    }

    /// Gives a run another deadline, in milliseconds of [`boottime_ms`], or none.
    pub async fn set_deadline(&self, id: u64, deadline_ms: Option<u64>) -> Result<(), GuardianError> {
        self.send(Order::Deadline(Deadline { id, deadline_ms })).await
    }

    /// SIGKILL to all runs. Later ones may start.
    pub async fn kill_all(&self) -> Result<(), GuardianError> {
        self.send(Order::KillAll(KillAll {})).await
    }

    /// Says until when runs may be alive, in milliseconds of [`boottime_ms`]. Past it all are killed, and
    /// none starts.
    pub async fn lease(&self, until_ms: u64) -> Result<(), GuardianError> {
        self.shared.lease_until_ms.store(until_ms, Ordering::Relaxed);
        self.send(Order::Lease(until_ms)).await
    }

    /// Ends the guardian. It kills and reaps what is left and frees the seat. The events of that can be
    /// heard before the channel closes; there is no [`Event::Gone`].
    pub async fn shutdown(self) -> Result<(), GuardianError> {
        self.shared.shutdown.store(true, Ordering::Relaxed);
        // If it is gone already, that is what is waited for below.
        let _ = self.send(Order::Shutdown(Shutdown {})).await;
        let mut gone = self.gone.clone();
        drop(self);
        gone.wait_for(|&gone| gone).await.map(drop).map_err(|_| GuardianError::Gone)
    }

    async fn send(&self, what: Order) -> Result<(), GuardianError> {
        self.write(order(what).ok_or(GuardianError::Gone)?.into()).await
    }

    async fn write(&self, parcel: Parcel) -> Result<(), GuardianError> {
        if *self.gone.borrow() {
            return Err(GuardianError::Gone);
        }
        self.orders.send(parcel).await.map_err(|_| GuardianError::Gone)
    }
}

/// The way of orders: our end, and the guardian's.
fn socket_pair() -> std::io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs.into()))
}

fn setup(options: &Options) -> Setup {
    let (seat, first_free) = match &options.seat {
        Seat::Named(seat) => (seat.clone(), false),
        Seat::FirstFree(name) => (name.clone(), true),
    };
    Setup {
        seat_dir: options.seat_dir.as_os_str().as_bytes().to_vec(),
        seat,
        first_free,
        lock_wait_ms: u64::try_from(options.lock_wait.as_millis()).unwrap_or(u64::MAX),
        trampoline: options.trampoline.iter().map(|arg| arg.as_bytes().to_vec()).collect(),
        cgroups: options.cgroups,
        work_dir: options.work_dir.as_os_str().as_bytes().to_vec(),
    }
}

/// An order as a frame, unless it is too long for one.
fn order(order: Order) -> Option<Bytes> {
    encode(&ToGuardian { order: Some(order) }).ok()
}

async fn hello(reports: &mut FrameReader<ChildStdout>) -> Result<Hello, GuardianError> {
    let speech = |what: String| GuardianError::Speech(what);
    let message = reports.next::<ToWorker>().await.map_err(|error| speech(error.to_string()))?;
    match message.map(|message| message.report) {
        Some(Some(Report::Hello(hello))) => Ok(hello),
        Some(Some(Report::Failed(failed))) => Err(match failed.failure {
            Some(Failure::InUse(held)) => GuardianError::SeatInUse { seat: held.seat, pid: held.pid },
            Some(Failure::NoSeatFree(name)) => GuardianError::NoSeatFree { name },
            Some(Failure::Leftovers(left)) => GuardianError::Leftovers { seat: left.seat, pids: left.pids },
            Some(Failure::Other(why)) => GuardianError::Setup(why),
            None => GuardianError::Setup("it does not say why".into()),
        }),
        Some(_) => Err(speech("no hello".into())),
        None => Err(GuardianError::Setup("it ended at once; see its messages on standard error".into())),
    }
}

/// Writes orders until there is nobody to give more, and closes the socket: the guardian notices.
async fn write_orders(mut socket: UnixStream, mut orders: mpsc::Receiver<Parcel>) {
    while let Some(parcel) = orders.recv().await {
        if socket::write(&mut socket, parcel).await.is_err() {
            return;
        }
    }
}

async fn read_reports(
    mut reports: FrameReader<ChildStdout>,
    shared: Arc<Shared>,
    events: mpsc::Sender<Event>,
    mut gone: watch::Receiver<bool>,
) {
    loop {
        let event = match reports.next::<ToWorker>().await {
            Ok(Some(ToWorker { report: Some(report) })) => shared.on_report(report),
            Ok(None) => break,
            Ok(Some(ToWorker { report: None })) => Err("a report that says nothing".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        match event {
            Ok(Some(event)) => {
                // Nobody listens any more; but what runs is to be known.
                let _ = events.send(event).await;
            }
            Ok(None) => {}
            Err(nonsense) => {
                tracing::error!("the guardian is killed, for it says: {nonsense}");
                shared.broken.notify_one();
                break;
            }
        }
    }
    // Without the watcher's word nobody knows what runs. Then there is only the end of all events.
    let known = gone.wait_for(|&gone| gone).await.is_ok();
    if known && !shared.shutdown.load(Ordering::Relaxed) {
        let _ = events.send(Event::Gone).await;
    }
}

impl Shared {
    fn alive(&self) -> MutexGuard<'_, BTreeMap<u64, Pid>> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a report means to the worker, if anything; or why it makes no sense.
    fn on_report(&self, report: Report) -> Result<Option<Event>, String> {
        match report {
            Report::Hello(_) | Report::Failed(_) => Err("hello, again".into()),
            Report::LeaseOver(until_ms) => {
                self.over_until_ms.fetch_max(until_ms, Ordering::Relaxed);
                Ok(None)
            }
            Report::Started(started) => {
                let pid = Pid::from_raw(started.pid).ok_or("a run with process 0")?;
                self.alive().insert(started.id, pid);
                Ok(Some(Event::Started { id: started.id, pid: processes::number(pid) }))
            }
            Report::Output(output) => {
                let line = String::from_utf8_lossy(&output.line).into_owned();
                Ok(Some(Event::Output { id: output.id, line }))
            }
            Report::Ended(end) => {
                self.alive().remove(&end.id);
                Ok(Some(Event::Ended(ended(end).ok_or("a run without an outcome")?)))
            }
            Report::Refused(refused) => {
                let why = Refusal::try_from(refused.why).map_err(|error| error.to_string())?;
                Ok(Some(Event::Refused { id: refused.id, why }))
            }
        }
    }

    /// Whether the guardian should have killed by now and has not said so.
    fn stalled(&self) -> bool {
        let until_ms = self.lease_until_ms.load(Ordering::Relaxed);
        boottime_ms() >= until_ms
            && self.over_until_ms.load(Ordering::Relaxed) < until_ms
            && !self.alive().is_empty()
    }
}

fn ended(end: End) -> Option<Ended> {
    let outcome: Outcome = end.outcome?;
    let killed = end.killed.map(KillCause::try_from).transpose().ok()?;
    let End { id, stdout, stdout_cut, lines_dropped, .. } = end;
    Some(Ended { id, outcome, stdout, stdout_cut, lines_dropped, killed })
}

/// Waits for the guardian's end, kills it when it must be, and kills what it leaves.
async fn watch_over(mut child: Child, shared: Arc<Shared>, hello: Hello, gone: watch::Sender<bool>) {
    let guardian = child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    let mut stalled_since = None;
    let orderly = loop {
        tokio::select! {
            status = child.wait() => break status.is_ok_and(|status| status.success()),
            () = shared.broken.notified() => {
                let _ = child.start_kill();
            }
            () = sleep(TICK) => {
                // Looked at again and again before it is believed: whoever has slept may have been this process,
                // with the guardian's word waiting to be read.
                stalled_since = if shared.stalled() { stalled_since.or(Some(Instant::now())) } else { None };
                if stalled_since.is_some_and(|since| since.elapsed() >= STALLED) {
                    let _ = child.start_kill();
                    tracing::error!("the guardian is killed, for it did not kill when the lease was over");
                }
            }
        }
    };
    // One that ended in order has reaped everything first.
    if !(orderly && shared.shutdown.load(Ordering::Relaxed)) {
        // A run with a terminal leads a session of its own.
        let mut sessions: Vec<Pid> = shared.alive().values().copied().collect();
        sessions.extend(guardian);
        kill_estate(&sessions, &hello).await;
    }
    gone.send_replace(true);
}
