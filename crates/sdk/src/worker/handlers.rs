//! Tasks that are run in this process, by handlers: async functions, typed by serde, whose results and failures
//! are values.
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
use std::time::{Duration, Instant};

use bytes::Bytes;
use evenhand_api::convert;
use evenhand_core::life::End;
use rustix::process::{Signal, getpid, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc, watch};
use tracing::error;

use super::runtime::{Happening, Job, RunKey, Runner};
use super::{Offer, WorkerError};
use crate::guardian::{Instance, SeatLock, boottime_ms};

/// Things that may wait to be told to the server.
const HAPPENINGS: usize = 4_096;
/// How long a seat that was just left may take to be free.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// How often the lease is looked at, and how much later than its end the process is killed.
const LOOK: Duration = Duration::from_millis(20);
const TOO_LATE_MS: u64 = 40;

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another try may help.
    Retry(String),
    /// Another try would fail too.
    ForGood(String),
}

impl Failure {
    /// Another try may help.
    pub fn retry(why: impl ToString) -> Failure {
        Failure::Retry(why.to_string())
    }

    /// Another try would fail too.
    pub fn for_good(why: impl ToString) -> Failure {
        Failure::ForGood(why.to_string())
    }
}

impl<E: std::error::Error> From<E> for Failure {
    /// With `?`, an error means that another try may help.
    fn from(error: E) -> Failure {
        Failure::Retry(error.to_string())
    }
}

/// What a handler knows of its run.
#[derive(Clone, Debug)]
pub struct Run {
    task_id: String,
    key: String,
    attempt: u32,
    run: RunKey,
    happenings: mpsc::Sender<Happening>,
    told: watch::Receiver<Told>,
}

/// What a run is told.
#[derive(Clone, Copy, Debug)]
struct Told {
    order: Order,
    /// How long it may take; 0: as long as it likes.
    max_duration_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Go,
    /// End, with grace.
    Stop,
    /// End now.
    Kill,
}

impl Run {
    /// The task.
    pub fn task_id(&self) -> &str {
        &self.task_id
    }

    /// Whom it is charged to.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Which try it is: 1 for the first.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// A later run of the task has a greater one: compare it at your own resources.
    pub fn fence(&self) -> String {
        convert::fence_text(self.run.1)
    }

    /// Says a line to whoever watches the task. Left out if too many are on their way.
    pub fn output(&self, line: impl Into<String>) {
        drop(self.happenings.try_send(Happening::Output { run: self.run, line: line.into() }));
    }

    /// Returns when the task was canceled: end what you do. After a grace the handler is dropped.
    pub async fn canceled(&mut self) {
        if self.told.wait_for(|told| told.order != Order::Go).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

type Handling = Pin<Box<dyn Future<Output = (End, Bytes, String)> + Send>>;
pub(super) type Handler = Arc<dyn Fn(Bytes, Run) -> Handling + Send + Sync>;

/// A handler of bytes, made of one of values.
pub(super) fn typed<T, R, H, F>(handler: H) -> Handler
where
    T: DeserializeOwned + Send + 'static,
    R: Serialize + Send + 'static,
    H: Fn(T, Run) -> F + Send + Sync + 'static,
    F: Future<Output = Result<R, Failure>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |payload: Bytes, run: Run| {
        let handler = handler.clone();
        Box::pin(async move {
            // No payload is null, so that a handler of `()` or an `Option` needs none.
            let json = if payload.is_empty() { b"null" } else { &payload[..] };
            let value = match serde_json::from_slice(json) {
                Ok(value) => value,
                Err(error) => {
                    let why = format!("the payload is not what the handler takes: {error}");
                    return (End::FailedForGood, Bytes::new(), why);
                }
            };
            ended(handler(value, run).await, |result: R| {
                let bytes = serde_json::to_vec(&result).map(Bytes::from);
                bytes.map_err(|error| format!("the result cannot be written as JSON: {error}"))
            })
        })
    })
}

/// A handler of bytes.
pub(super) fn plain<R, H, F>(handler: H) -> Handler
where
    R: Into<Bytes> + Send + 'static,
    H: Fn(Bytes, Run) -> F + Send + Sync + 'static,
    F: Future<Output = Result<R, Failure>> + Send + 'static,
{
    Arc::new(move |payload: Bytes, run: Run| {
        let handling = handler(payload, run);
        Box::pin(async move { ended(handling.await, |result: R| Ok(result.into())) })
    })
}

/// What a handler's word means.
fn ended<R>(
    said: Result<R, Failure>,
    bytes: impl FnOnce(R) -> Result<Bytes, String>,
) -> (End, Bytes, String) {
    match said.map(bytes) {
        Ok(Ok(result)) => (End::Succeeded, result, String::new()),
        Ok(Err(why)) | Err(Failure::ForGood(why)) => (End::FailedForGood, Bytes::new(), why),
        Err(Failure::Retry(why)) => (End::Failed, Bytes::new(), why),
    }
}

/// What the handlers, their lease and its watch share. The seat is free when the last of them is gone.
#[derive(Debug)]
struct Shared {
    _seat: SeatLock,
    ended: Notify,
    /// In milliseconds since boot; 0: there is none.
    lease_ms: AtomicU64,
    alive: AtomicUsize,
}

impl Shared {
    fn is_over(&self, late_ms: u64) -> bool {
        boottime_ms() >= self.lease_ms.load(Ordering::Relaxed).saturating_add(late_ms)
    }
}

/// Runs handlers.
pub(super) struct Handlers {
    handlers: HashMap<String, Handler>,
    shared: Arc<Shared>,
    told: HashMap<RunKey, watch::Sender<Told>>,
    happenings: mpsc::Sender<Happening>,
    happening: mpsc::Receiver<Happening>,
    grace: Duration,
}

impl Handlers {
    /// Takes the seat and begins a life.
    pub(super) fn begin(
        offer: &Offer,
        handlers: HashMap<String, Handler>,
    ) -> Result<(Handlers, Instance), WorkerError> {
        let (seat, instance) = SeatLock::begin(&offer.seat_dir(), &offer.seat()?, LOCK_WAIT)?;
        let shared = Arc::new(Shared {
            _seat: seat,
            ended: Notify::new(),
            lease_ms: AtomicU64::new(0),
            alive: AtomicUsize::new(0),
        });
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
        let (happenings, happening) = mpsc::channel(HAPPENINGS);
        let grace = offer.grace;
        Ok((Handlers { handlers, shared, told: HashMap::new(), happenings, happening, grace }, instance))
    }
}

impl Handlers {
    fn tell(&self, run: RunKey, what: impl FnOnce(&mut Told)) {
        if let Some(tell) = self.told.get(&run) {
            tell.send_modify(what);
        }
    }
}

impl Drop for Handlers {
    /// Whoever drops a worker wants nothing of it to go on.
    fn drop(&mut self) {
        self.kill_all();
    }
}

impl Runner for Handlers {
    fn start(&mut self, job: Job) {
        let told = Told { order: Order::Go, max_duration_ms: job.max_duration_ms };
        let (tell, told) = watch::channel(told);
        let run = job.run;
        // Those that have ended are cleared away now and then, not each time.
        if self.told.len() > 2 * self.shared.alive.load(Ordering::Relaxed) + 64 {
            self.told.retain(|_, tell| !tell.is_closed());
        }
        self.told.insert(run, tell);
        let handler = self.handlers.get(&*job.queue).cloned();
        let (shared, happenings, grace) = (self.shared.clone(), self.happenings.clone(), self.grace);
        shared.alive.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            let ended = match handler {
                Some(handler) => {
                    let context = Run {
                        task_id: job.task_id,
                        key: job.key,
                        attempt: job.attempt,
                        run,
                        happenings: happenings.clone(),
                        told: told.clone(),
                    };
                    let handling =
                        Guarded { handling: handler(job.payload, context), shared: shared.clone() };
                    bounded(handling, told, grace).await
                }
                None => {
                    let why = format!("no handler serves queue {}", job.queue);
                    Some((End::Failed, Bytes::new(), why))
                }
            };
            shared.alive.fetch_sub(1, Ordering::Relaxed);
            shared.ended.notify_one();
            let happening = match ended {
                Some((end, result, error)) => {
                    Happening::Ended { run, end: Some(end), result, error, lines_dropped: 0 }
                }
                None => Happening::Ended {
                    run,
                    end: None,
                    result: Bytes::new(),
                    error: String::new(),
                    lines_dropped: 0,
                },
            };
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
    type Output = Option<(End, Bytes, String)>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.shared.is_over(0) {
            return Poll::Ready(None);
        }
        // A panic is the handler's, and ends its run alone.
        match catch_unwind(AssertUnwindSafe(|| self.handling.as_mut().poll(context))) {
            Ok(polled) => polled.map(Some),
            Err(panic) => Poll::Ready(Some((End::Failed, Bytes::new(), panic_text(&*panic)))),
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
    format!("the handler stopped with a panic: {text}")
}

/// Waits for a handler's end, and makes it end at its deadline, when it was stopped, and when it is to be killed:
/// dropped where it waits, nothing of it is left.
async fn bounded(
    mut handling: Guarded,
    mut told: watch::Receiver<Told>,
    grace: Duration,
) -> Option<(End, Bytes, String)> {
    let began = Instant::now();
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
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            ended = &mut handling => return ended,
            Ok(()) = told.changed() => {}
            () = over => {
                let why = match stop_at {
                    Some(at) if late_at.is_none_or(|late| at <= late) => "it was canceled and did not end in time".into(),
                    Some(_) | None => format!("it took longer than {max_duration_ms} ms"),
                };
                return Some((End::Failed, Bytes::new(), why));
            }
        }
    }
}
