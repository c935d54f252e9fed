//! Handlers: async functions, typed by serde, whose results and failures are values. What runs them is
//! `in_process`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use evenhand_api::{RESULT_BYTES, convert, v1};
use evenhand_core::life::End;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::runtime::{Happening, RunKey, cut};

/// Why a run failed. Errors of the standard kind become one with `?`; for others there is `.map_err(Failure::retry)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another try may help.
    Retry {
        /// Why it failed.
        why: String,
        /// When to try it again, counted from now. None: the task or its queue decides.
        after: Option<Duration>,
    },
    /// Another try would fail too.
    ForGood(String),
}

impl Failure {
    /// Another try may help.
    pub fn retry(why: impl ToString) -> Failure {
        Failure::Retry { why: why.to_string(), after: None }
    }

    /// Another try may help, after so long: whatever the backoff of the task is.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use evenhand::Failure;
    /// let busy = Failure::retry_after(Duration::from_secs(30), "the printer is out of paper");
    /// ```
    pub fn retry_after(after: Duration, why: impl ToString) -> Failure {
        Failure::Retry { why: why.to_string(), after: Some(after) }
    }

    /// Another try would fail too.
    pub fn for_good(why: impl ToString) -> Failure {
        Failure::ForGood(why.to_string())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Retry { why, after: None } => write!(f, "{why}; to be tried again"),
            Failure::Retry { why, after: Some(after) } => {
                write!(f, "{why}; to be tried again in {} ms", after.as_millis())
            }
            Failure::ForGood(why) => write!(f, "{why}; for good"),
        }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    /// With `?`, an error means that another try may help.
    fn from(error: E) -> Failure {
        Failure::retry(error)
    }
}

/// What a handler knows of its run.
#[derive(Clone, Debug)]
pub struct Run {
    pub(super) task_id: String,
    pub(super) queue: Arc<str>,
    pub(super) key: String,
    pub(super) attempt: u32,
    pub(super) content_type: String,
    pub(super) files: Arc<[v1::File]>,
    pub(super) run: RunKey,
    pub(super) began: Instant,
    pub(super) happenings: mpsc::Sender<Happening>,
    pub(super) board: Arc<Board>,
    pub(super) told: watch::Receiver<Told>,
}

/// What a run is told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) order: Order,
    /// How long it may take; 0: as long as it likes.
    pub(super) max_duration_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
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

    /// Its queue.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// Whom it is charged to. Empty: nobody was named.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Which try it is: 1 for the first.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// What the payload is, as whoever submitted it said: `application/json`. Empty: nobody said.
    pub fn content_type(&self) -> &str {
        &self.content_type
    }

    /// The task's files, in the order in which they were given.
    ///
    /// ```
    /// # use evenhand::{Failure, Run};
    /// async fn count(_: (), run: Run) -> Result<usize, Failure> {
    ///     let page = run.file("page.html").ok_or_else(|| Failure::for_good("there is no page"))?;
    ///     Ok(run.files().len() * page.len())
    /// }
    /// ```
    pub fn files(&self) -> &[v1::File] {
        &self.files
    }

    /// What is in the file of this name, if the task has one.
    pub fn file(&self, name: &str) -> Option<&Bytes> {
        self.files.iter().find(|file| file.name == name).map(|file| &file.content)
    }

    /// When it is stopped, if the task may take only so long.
    pub fn deadline(&self) -> Option<std::time::Instant> {
        let Told { max_duration_ms, .. } = *self.told.borrow();
        (max_duration_ms > 0).then(|| self.began.into_std() + Duration::from_millis(max_duration_ms))
    }

    /// A later run of the task has a greater one: compare it at your own resources.
    pub fn fence(&self) -> String {
        convert::fence_text(self.run.1)
    }

    /// Says a line to whoever watches the task. Left out if too many are on their way.
    pub fn output(&self, line: impl Into<String>) {
        let line = cut(line.into());
        drop(self.happenings.try_send(Happening::Output { run: self.run, line }));
    }

    /// Says how far it is: a fraction from 0 to 1, if it is known, and a few words. Never waits: when it is said more
    /// often than it can be told, the last one counts.
    ///
    /// ```
    /// # fn example(run: evenhand::Run) {
    /// run.progress(0.25, "page 5 of 20");
    /// run.progress(None, "looking for pages");
    /// # }
    /// ```
    pub fn progress(&self, fraction: impl Into<Option<f64>>, message: impl Into<String>) {
        let said = v1::Progress { fraction: fraction.into(), message: message.into() };
        self.board.say(self.run, convert::progress(said));
    }

    /// Whether the task was canceled: end what you do. After a grace the handler is dropped.
    pub fn is_canceled(&self) -> bool {
        self.told.borrow().order != Order::Go
    }

    /// Returns when the task was canceled: end what you do. After a grace the handler is dropped.
    pub async fn canceled(&self) {
        if self.told.clone().wait_for(|told| told.order != Order::Go).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// What runs said of how far they are, until it is told.
#[derive(Debug, Default)]
pub(crate) struct Board {
    /// Keeps all that was said, and not only the last of each run. For tests.
    keeps_all: bool,
    said: Mutex<HashMap<RunKey, Vec<v1::Progress>>>,
    news: Notify,
}

impl Board {
    pub(super) fn keeping_all() -> Board {
        Board { keeps_all: true, ..Board::default() }
    }

    pub(super) fn say(&self, run: RunKey, progress: v1::Progress) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let of_run = said.entry(run).or_default();
        if !self.keeps_all {
            of_run.clear();
        }
        of_run.push(progress);
        drop(said);
        self.news.notify_one();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// All that has not been taken.
    pub(crate) fn take(&self) -> Vec<(RunKey, v1::Progress)> {
        let said = std::mem::take(&mut *self.said.lock().unwrap_or_else(PoisonError::into_inner));
        flat(said)
    }

    /// The same of these runs only.
    pub(super) fn take_of(&self, runs: impl Iterator<Item = RunKey>) -> Vec<(RunKey, v1::Progress)> {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        flat(runs.filter_map(|run| said.remove_entry(&run)))
    }

    /// Returns when something was said since the last time.
    pub(crate) async fn said(&self) {
        self.news.notified().await;
    }
}

fn flat(said: impl IntoIterator<Item = (RunKey, Vec<v1::Progress>)>) -> Vec<(RunKey, v1::Progress)> {
    said.into_iter().flat_map(|(run, all)| all.into_iter().map(move |one| (run, one))).collect()
}

/// Which queues are served, and by what. A [`super::Worker`] has one; made by itself, the same one can be given to a
/// worker and to the [test kit](crate::testing).
///
/// ```
/// use evenhand::{Failure, Handlers, Run};
///
/// async fn double(number: u64, _: Run) -> Result<u64, Failure> {
///     number.checked_mul(2).ok_or_else(|| Failure::for_good("that is too much"))
/// }
///
/// let handlers = Handlers::new().handle("double", double);
/// ```
#[derive(Clone, Default)]
pub struct Handlers {
    /// With their weights in thousandths, as they were named.
    pub(super) queues: Vec<(String, u32)>,
    by_queue: HashMap<String, Handler>,
}

impl Handlers {
    /// None yet.
    pub fn new() -> Handlers {
        Handlers::default()
    }

    /// Serves a queue with this handler.
    pub fn handle<T, R, H, F>(self, queue: &str, handler: H) -> Handlers
    where
        T: DeserializeOwned + Send + 'static,
        R: Serialize + Send + 'static,
        H: Fn(T, Run) -> F + Send + Sync + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        self.handle_weighted(queue, 1_000, handler)
    }

    /// The same, with this share of the worker's slots, in thousandths.
    pub fn handle_weighted<T, R, H, F>(self, queue: &str, weight_thousandths: u32, handler: H) -> Handlers
    where
        T: DeserializeOwned + Send + 'static,
        R: Serialize + Send + 'static,
        H: Fn(T, Run) -> F + Send + Sync + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        self.serve(queue, weight_thousandths, typed(handler))
    }

    /// Serves a queue with a handler of plain bytes.
    pub fn handle_bytes<R, H, F>(self, queue: &str, handler: H) -> Handlers
    where
        R: Into<Bytes> + Send + 'static,
        H: Fn(Bytes, Run) -> F + Send + Sync + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        self.serve(queue, 1_000, plain(handler))
    }

    fn serve(mut self, queue: &str, weight_thousandths: u32, handler: Handler) -> Handlers {
        self.queues.push((queue.into(), weight_thousandths));
        self.by_queue.insert(queue.into(), handler);
        self
    }

    pub(super) fn of(&self, queue: &str) -> Option<Handler> {
        self.by_queue.get(queue).cloned()
    }
}

impl std::fmt::Debug for Handlers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handlers").field("queues", &self.queues).finish_non_exhaustive()
    }
}

/// How a run ended, and what it left behind.
#[derive(Debug)]
pub(crate) struct Word {
    pub(crate) end: End,
    pub(crate) result: Bytes,
    pub(crate) error: String,
    /// When it wants to be tried again, if it says.
    pub(crate) retry_after: Option<Duration>,
}

impl Word {
    pub(crate) fn succeeded(result: Bytes) -> Word {
        Word { end: End::Succeeded, result, error: String::new(), retry_after: None }
    }

    /// It failed; another try may help.
    pub(crate) fn failed(error: String) -> Word {
        Word { end: End::Failed, result: Bytes::new(), error, retry_after: None }
    }

    pub(crate) fn failed_for_good(error: String) -> Word {
        Word { end: End::FailedForGood, ..Word::failed(error) }
    }

    pub(super) fn time_up(error: String) -> Word {
        Word { end: End::TimeUp, ..Word::failed(error) }
    }
}

pub(super) type Handling = Pin<Box<dyn Future<Output = Word> + Send>>;
pub(super) type Handler = Arc<dyn Fn(Bytes, Run) -> Handling + Send + Sync>;

/// A handler of bytes, made of one of values.
fn typed<T, R, H, F>(handler: H) -> Handler
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
                    return Word::failed_for_good(why);
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
fn plain<R, H, F>(handler: H) -> Handler
where
    R: Into<Bytes> + Send + 'static,
    H: Fn(Bytes, Run) -> F + Send + Sync + 'static,
    F: Future<Output = Result<R, Failure>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |payload: Bytes, run: Run| {
        let handler = handler.clone();
        Box::pin(async move { ended(handler(payload, run).await, |result: R| Ok(result.into())) })
    })
}

/// What a handler's answer means.
fn ended<R>(said: Result<R, Failure>, bytes: impl FnOnce(R) -> Result<Bytes, String>) -> Word {
    match said.map(bytes) {
        // A part of a result is worse than none.
        Ok(Ok(result)) if result.len() > RESULT_BYTES => {
            let is = result.len();
            Word::failed_for_good(format!(
                "the result has {is} bytes; at most {RESULT_BYTES} are kept: store it elsewhere and return its address"
            ))
        }
        Ok(Ok(result)) => Word::succeeded(result),
        Ok(Err(why)) | Err(Failure::ForGood(why)) => Word::failed_for_good(cut(why)),
        Err(Failure::Retry { why, after }) => Word { retry_after: after, ..Word::failed(cut(why)) },
    }
}
