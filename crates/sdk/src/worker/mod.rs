//! A worker as its users see it: which queues it serves, how many slots it offers, and what a task runs.

mod commands;
mod drain;
mod handlers;
mod in_process;
mod interactive;
mod runtime;

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use evenhand_core::Refusal;
use evenhand_core::backlog::Weight;
use evenhand_core::names::{QueueName, Seat};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::guardian::GuardianError;
pub use commands::Commands;
use drain::Drain;
pub(crate) use handlers::Word;
pub use handlers::{Failure, Handlers, Run};
pub(crate) use in_process::InProcess;
pub use runtime::say_dead;
pub(crate) use runtime::{Happening, Job, RunKey, Runner};

/// Why a worker could not begin, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The server, or what the worker asks of it, will not do.
    #[error("{0}")]
    Refused(Refusal),
    /// The seat or the guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
}

impl From<Refusal> for WorkerError {
    fn from(refusal: Refusal) -> Self {
        WorkerError::Refused(refusal)
    }
}

/// A worker that runs handlers in this process.
///
/// A handler is an async function from a payload (JSON, by serde) and a [`Run`] to a result or a [`Failure`]. It ends
/// when it returns; it is dropped where it waits when its time is over, some seconds after its task was canceled, and
/// when the worker has lost its server for too long.
///
/// ```no_run
/// use evenhand::{Failure, Run, Worker};
///
/// async fn resize(name: String, run: Run) -> Result<usize, Failure> {
///     run.progress(None, "reading");
///     let image = tokio::fs::read(&name).await?;     // an error here means: try again
///     if image.is_empty() {
///         return Err(Failure::for_good("there is no image"));
///     }
///     run.progress(0.5, "resizing");
///     Ok(image.len() / 2)
/// }
///
/// # async fn example() -> Result<(), evenhand::WorkerError> {
/// Worker::new(&evenhand::server()).handle("resize", resize).drain_on_signals().run().await
/// # }
/// ```
#[derive(Debug)]
pub struct Worker {
    server: String,
    offer: Offer,
    handlers: Handlers,
    drain: Option<watch::Receiver<bool>>,
    on_signals: bool,
}

impl From<Worker> for Handlers {
    /// What the worker would have run: for the [test kit](crate::testing).
    fn from(worker: Worker) -> Handlers {
        worker.handlers
    }
}

/// What every worker offers.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) queues: Vec<(String, u32)>,
    pub(crate) slots: u32,
    pub(crate) seat: Option<String>,
    pub(crate) seat_dir: Option<PathBuf>,
    pub(crate) work_dir: Option<PathBuf>,
    pub(crate) grace: Duration,
}

impl Offer {
    fn new() -> Offer {
        let slots = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let grace = Duration::from_secs(10);
        Offer { queues: Vec::new(), slots, seat: None, seat_dir: None, work_dir: None, grace }
    }

    /// The queues, checked.
    pub(crate) fn queues(&self) -> Result<Vec<(QueueName, Weight)>, Refusal> {
        if self.queues.is_empty() {
            return Err(Refusal::invalid("queues", "is empty; name at least one queue to serve"));
        }
        let queue = |(name, weight): &(String, u32)| {
            Ok((QueueName::new(name)?, evenhand_api::convert::weight(*weight)?))
        };
        self.queues.iter().map(queue).collect()
    }

    /// The seat: the one that was named, or the first that is free of those named after this machine.
    pub(crate) fn seat(&self) -> Result<crate::guardian::Seat, Refusal> {
        match &self.seat {
            Some(seat) => Seat::new(seat).map(|seat| crate::guardian::Seat::Named(seat.as_str().into())),
            None => Ok(crate::guardian::Seat::FirstFree(host_name())),
        }
    }

    /// Where lock files are, if nobody says: a place of this machine that outlives the process.
    pub(crate) fn seat_dir(&self) -> PathBuf {
        let at_home = || {
            let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_else(std::env::temp_dir);
            std::env::var_os("XDG_STATE_HOME").map_or_else(|| home.join(".local/state"), PathBuf::from)
        };
        self.seat_dir.clone().unwrap_or_else(|| at_home().join("evenhand/seats"))
    }

    /// Where the directories of runs are, if nobody says: beside the lock files. They belong to a seat, so whoever takes
    /// it next finds what was left, also after the machine was started anew; and no one cleans up there.
    pub(crate) fn work_dir(&self) -> PathBuf {
        let dir = self.work_dir.clone().unwrap_or_else(|| self.seat_dir().join("work"));
        // A command is told it, and works elsewhere.
        std::path::absolute(&dir).unwrap_or(dir)
    }
}

/// The machine's name, in letters that a seat may have.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = name.trim().chars().map(plain).take(48).collect();
    match name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        true => name,
        false => "worker".into(),
    }
}

impl Worker {
    /// A worker of this server, with as many slots as the machine has cores.
    pub fn new(server: &str) -> Worker {
        let (offer, handlers) = (Offer::new(), Handlers::new());
        Worker { server: server.into(), offer, handlers, drain: None, on_signals: false }
    }

    /// How many tasks it runs at once.
    pub fn slots(mut self, slots: u32) -> Worker {
        self.offer.slots = slots;
        self
    }

    /// Its stable name. If nobody says, the first that is free of those named after this machine.
    pub fn seat(mut self, seat: impl Into<String>) -> Worker {
        self.offer.seat = Some(seat.into());
        self
    }

    /// Where the lock files of this machine's seats are.
    pub fn seat_dir(mut self, dir: impl Into<PathBuf>) -> Worker {
        self.offer.seat_dir = Some(dir.into());
        self
    }

    /// How long a handler may go on after its task was canceled; 10 s if nobody says.
    pub fn grace(mut self, grace: Duration) -> Worker {
        self.offer.grace = grace;
        self
    }

    /// Drains when this turns true: takes no more work, ends when what runs has ended and the server knows.
    ///
    /// ```
    /// # use evenhand::{Failure, Worker};
    /// let (drain, draining) = tokio::sync::watch::channel(false);
    /// let worker = Worker::new(&evenhand::server())
    ///     .handle("q", async |number: u64, _| Ok::<_, Failure>(number))
    ///     .drain_on(draining);
    /// // Later, when it is time to stop:
    /// drain.send_replace(true);
    /// ```
    pub fn drain_on(mut self, drain: watch::Receiver<bool>) -> Worker {
        self.drain = Some(drain);
        self
    }

    /// Drains when the process gets SIGTERM or SIGINT (Ctrl-C). A second signal ends the worker at once: what runs is
    /// dropped and will be run again, elsewhere or by the next worker.
    pub fn drain_on_signals(mut self) -> Worker {
        self.on_signals = true;
        self
    }

    /// Serves what these handlers serve, and nothing else.
    pub fn handlers(mut self, handlers: Handlers) -> Worker {
        self.handlers = handlers;
        self
    }

    /// Serves a queue with this handler.
    pub fn handle<T, R, H, F>(mut self, queue: &str, handler: H) -> Worker
    where
        T: DeserializeOwned + Send + 'static,
        R: Serialize + Send + 'static,
        H: Fn(T, Run) -> F + Send + Sync + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        self.handlers = self.handlers.handle(queue, handler);
        self
    }

    /// The same, with this share of the worker's slots, in thousandths.
    pub fn handle_weighted<T, R, H, F>(mut self, queue: &str, weight_thousandths: u32, handler: H) -> Worker
    where
        T: DeserializeOwned + Send + 'static,
        R: Serialize + Send + 'static,
        H: Fn(T, Run) -> F + Send + Sync + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        self.handlers = self.handlers.handle_weighted(queue, weight_thousandths, handler);
        self
    }

    /// Serves a queue with a handler of plain bytes.
    pub fn handle_bytes<R, H, F>(mut self, queue: &str, handler: H) -> Worker
    where
        R: Into<Bytes> + Send + 'static,
        H: Fn(Bytes, Run) -> F + Send + Sync + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        self.handlers = self.handlers.handle_bytes(queue, handler);
        self
    }

    /// Works until it is drained, or refused.
    pub async fn run(mut self) -> Result<(), WorkerError> {
        self.offer.queues.clone_from(&self.handlers.queues);
        let drain = Drain::new(self.drain, self.on_signals)?;
        let (runner, instance) = InProcess::begin(&self.offer, self.handlers)?;
        runtime::Runtime::new(&self.server, &self.offer, instance, runner)?.run(drain).await
    }
}
