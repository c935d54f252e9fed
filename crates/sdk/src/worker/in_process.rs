//! Tasks that are run in this process, by handlers.
//!
//! The process is its own guardian here. A handler goes on only inside the lease: before each of its steps the
//! time is looked at, and past the lease it is dropped where it waits. What does not wait (a loop without an
//! await) cannot be dropped; for that a thread watches the lease, and kills the process.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;
use tracing::error;

use super::handlers::{Board, Handlers, Handling, Order, Run, Told, Word};
use super::interactive::not_started;
use super::runtime::{Happening, Job, RunKey, Runner, cut};
use super::{Offer, WorkerError};
use crate::guardian::{Instance, SeatLock, boottime_ms};

/// Things that may wait to be told to the server.
const HAPPENINGS: usize = 4_096;
/// How long a seat that was just left may take to be free.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// How often the lease is looked at, and how much later than its end the process is killed.
const LOOK: Duration = Duration::from_millis(20);
const TOO_LATE_MS: u64 = 40;

/// Why an interactive run is refused.
const NOT_INTERACTIVE: &str = "its worker runs handlers, and nobody can talk to those; a queue for interactive tasks is \
                               served by `evenhand worker`";

/// What the handlers, their lease and its watch share. The seat is free when the last of them is gone.
#[derive(Debug)]
struct Shared {
    _seat: Option<SeatLock>,
    ended: Notify,
    /// In milliseconds since boot; 0: there is none.
    lease_ms: AtomicU64,
    alive: AtomicUsize,
}

impl Shared {
    fn new(seat: Option<SeatLock>, lease_ms: u64) -> Shared {
        Shared {
            _seat: seat,
            ended: Notify::new(),
            lease_ms: AtomicU64::new(lease_ms),
            alive: AtomicUsize::new(0),
        }
    }

    fn is_over(&self, late_ms: u64) -> bool {
        boottime_ms() >= self.lease_ms.load(Ordering::Relaxed).saturating_add(late_ms)
    }
}

/// Runs handlers.
pub(crate) struct InProcess {
    handlers: Handlers,
    shared: Arc<Shared>,
    told: HashMap<RunKey, watch::Sender<Told>>,
    happenings: mpsc::Sender<Happening>,
    happening: mpsc::Receiver<Happening>,
    board: Arc<Board>,
    grace: Duration,
}

impl InProcess {
    /// Takes the seat and begins a life.
    pub(super) fn begin(offer: &Offer, handlers: Handlers) -> Result<(InProcess, Instance), WorkerError> {
        let (seat, instance) = SeatLock::begin(&offer.seat_dir(), &offer.seat()?, LOCK_WAIT)?;
        let shared = Arc::new(Shared::new(Some(seat), 0));
        let watched = Arc::downgrade(&shared);
        let watch = move || {
            while let Some(shared) = watched.upgrade() {
                if shared.alive.load(Ordering::Relaxed) > 0 && shared.is_over(TOO_LATE_MS) {
                    error!("the lease is over and a handler does not end: this process is killed");
                    // By the kernel: nothing in this process may stand in the way.
                    let _ = kill_process(getpid(), Signal::KILL);
                }
                drop(shared);
                std::thread::sleep(LOOK);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("lease".into()).spawn(watch) {
            return Err(
                crate::guardian::GuardianError::Setup(format!("no thread for the lease: {error}")).into()
            );
        }
        Ok((InProcess::new(handlers, shared, Board::default(), offer.grace), instance))
    }

    /// Without a server: no seat, a lease for ever, and all that runs say is kept.
    pub(crate) fn for_tests(handlers: Handlers, grace: Duration) -> InProcess {
        InProcess::new(handlers, Arc::new(Shared::new(None, u64::MAX)), Board::keeping_all(), grace)
    }

    fn new(handlers: Handlers, shared: Arc<Shared>, board: Board, grace: Duration) -> InProcess {
        let (happenings, happening) = mpsc::channel(HAPPENINGS);
        let (told, board) = (HashMap::new(), Arc::new(board));
        InProcess { handlers, shared, told, happenings, happening, board, grace }
    }

    fn tell(&self, run: RunKey, what: impl FnOnce(&mut Told)) {
        if let Some(tell) = self.told.get(&run) {
            tell.send_modify(what);
        }
    }
}

impl Drop for InProcess {
    /// Whoever drops a worker wants nothing of it to go on.
    fn drop(&mut self) {
        self.kill_all();
    }
}

impl Runner for InProcess {
    fn start(&mut self, job: Job) {
        if let Some((_, call)) = job.interactive {
            // The reason first, while somebody waits for it. Then it has ended: a worker that gives starts back gets
            // no work for a while, and whoever asks for what it cannot do must not bring that about.
            let (run, happenings) = (job.run, self.happenings.clone());
            tokio::spawn(async move {
                call.say(not_started(NOT_INTERACTIVE)).await;
                let word = Some(Word::failed_for_good(NOT_INTERACTIVE.into()));
                let happening = Happening::Ended { run, word, lines_dropped: 0, ran: Duration::ZERO };
                drop(happenings.send(happening).await);
            });
            return;
        }
        let told = Told { order: Order::Go, max_duration_ms: job.max_duration_ms };
        let (tell, told) = watch::channel(told);
        let run = job.run;
        // Those that have ended are cleared away now and then, not each time.
        if self.told.len() > 2 * self.shared.alive.load(Ordering::Relaxed) + 64 {
            self.told.retain(|_, tell| !tell.is_closed());
        }
        self.told.insert(run, tell);
        let handler = self.handlers.of(&job.queue);
        let (shared, happenings, grace) = (self.shared.clone(), self.happenings.clone(), self.grace);
        let board = self.board.clone();
        shared.alive.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            let began = Instant::now();
            let ended = match handler {
                Some(handler) => {
                    let context = Run {
                        task_id: job.task_id,
                        queue: job.queue,
                        key: job.key,
                        attempt: job.attempt,
                        content_type: job.content_type,
                        files: job.files.into(),
                        run,
                        began,
                        board,
                        happenings: happenings.clone(),
                        told: told.clone(),
                    };
                    let handling =
                        Guarded { handling: handler(job.payload, context), shared: shared.clone() };
                    bounded(handling, told, began, grace).await
                }
                None => {
                    let why = format!("no handler serves queue {}", job.queue);
                    Some(Word::failed(why))
                }
            };
            shared.alive.fetch_sub(1, Ordering::Relaxed);
            shared.ended.notify_one();
            let happening = Happening::Ended { run, word: ended, lines_dropped: 0, ran: began.elapsed() };
            drop(happenings.send(happening).await);
        });
    }

    fn stop(&mut self, run: RunKey) {
        self.tell(run, |told| told.order = Order::Stop);
    }

    fn deadline(&mut self, run: RunKey, max_duration_ms: u64) {
        self.tell(run, |told| told.max_duration_ms = max_duration_ms);
    }

    fn kill_all(&mut self) {
        // From now on; what does not end by itself is killed with the process a moment later.
        self.shared.lease_ms.fetch_min(boottime_ms(), Ordering::Relaxed);
        self.told.values().for_each(|tell| tell.send_modify(|told| told.order = Order::Kill));
    }

    fn lease(&mut self, until_ms: u64) {
        self.shared.lease_ms.store(until_ms, Ordering::Relaxed);
    }

    fn happenings(&mut self) -> &mut mpsc::Receiver<Happening> {
        &mut self.happening
    }

    fn board(&self) -> Arc<Board> {
        self.board.clone()
    }

    async fn end(mut self) {
        self.kill_all();
        while self.shared.alive.load(Ordering::Relaxed) > 0 {
            self.shared.ended.notified().await;
        }
    }
}

/// A handler at work, inside the lease only.
struct Guarded {
    handling: Handling,
    shared: Arc<Shared>,
}

impl Future for Guarded {
    type Output = Option<Word>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.shared.is_over(0) {
            return Poll::Ready(None);
        }
        // A panic is the handler's, and ends its run alone.
        match catch_unwind(AssertUnwindSafe(|| self.handling.as_mut().poll(context))) {
            Ok(polled) => polled.map(Some),
            Err(panic) => Poll::Ready(Some(Word::failed(panic_text(&*panic)))),
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
    cut(format!("the handler stopped with a panic: {text}"))
}

/// Waits for a handler's end, and makes it end at its deadline, when it was stopped, and when it is to be killed:
/// dropped where it waits, nothing of it is left.
async fn bounded(
    mut handling: Guarded,
    mut told: watch::Receiver<Told>,
    began: Instant,
    grace: Duration,
) -> Option<Word> {
    let mut stop_at = None;
    loop {
        let Told { order, max_duration_ms } = *told.borrow_and_update();
        match order {
            Order::Kill => return None,
            Order::Stop => stop_at = stop_at.or(Some(Instant::now() + grace)),
            Order::Go => {}
        }
        let late_at = (max_duration_ms > 0).then(|| began + Duration::from_millis(max_duration_ms));
        let over = async {
            match [late_at, stop_at].into_iter().flatten().min() {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            ended = &mut handling => return ended,
            Ok(()) = told.changed() => {}
            () = over => {
                let canceled = stop_at.is_some_and(|at| late_at.is_none_or(|late| at <= late));
                return Some(match canceled {
                    true => Word::failed("it was canceled and did not end in time".into()),
                    false => Word::time_up(format!("it took longer than {max_duration_ms} ms")),
                });
            }
        }
    }
}
