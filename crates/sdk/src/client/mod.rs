//! A client. Cheap to clone; all clones share one connection, which is made when it is needed and made again
//! when it breaks. A call that fails because the server is away or busy is tried again for a while; an enqueue
//! has a request id for that, so that it happens once however often it is sent.
//!
//! In reading order: `task` (what is submitted), this module (the calls), `watch` (streams that outlive a
//! connection), `many` (changes of many tasks, step by step), `batch` (many callers, few calls), `attach` (interactive
//! tasks).

mod attach;
mod batch;
mod many;
mod task;
mod watch;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use bytes::Bytes;
use evenhand_api::v1::client_client::ClientClient;
use evenhand_api::{MESSAGE_BYTES, convert, errors, v1};
use evenhand_core::backlog::Weight;
use evenhand_core::refusal::Kind;
use evenhand_core::{Refusal, bounds};
use prost::Message;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status, Streaming};

pub use attach::{Attach, AttachInput, AttachOutput, Attached, Heard};
pub use batch::{Batcher, Batching, Receipt};
pub use evenhand_core::admission::Limit;
pub use many::{Changed, Changing};
pub use task::{Filter, KeySettings, NewTask, QueueSettings, Rate, Retries};
pub use v1::{AfterDowngrade, Share, Task, TaskState, Try};
pub use watch::Watch;

type Grpc = ClientClient<Channel>;

/// How long a call may take, if nobody says.
const PATIENCE: Duration = Duration::from_secs(30);
/// A try gets half of the time that is left, or so much if there is so much: a server that hangs must leave time
/// for another try, and a large request over a slow line needs what it needs.
const TRY: Duration = Duration::from_secs(10);
/// How long an enqueue may take, at most. A server that has forgotten its request id would accept it again, so the last
/// try must be over before that; a minute is for what is on its way.
const ENQUEUE: Duration = Duration::from_millis(bounds::REQUEST_MS - 60_000);
/// A server is told that nobody waits any more a little after that is so.
const LATER: Duration = Duration::from_millis(100);
/// The first wait between two tries, and the longest.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a connection may take to be made.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// The answer to an enqueue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enqueued {
    /// The ids of the tasks, in order.
    pub ids: Vec<String>,
    /// False: the request id was known, and nothing was accepted anew.
    pub created: bool,
    /// Those that were known by their unique keys, by their places in `ids`, in order: they were not accepted anew.
    pub known: Vec<usize>,
}

impl Enqueued {
    /// The id of each task, in order, and whether it was accepted by this request.
    pub fn tasks(&self) -> impl Iterator<Item = (&str, bool)> {
        let created = |n| self.created && self.known.binary_search(&n).is_err();
        self.ids.iter().enumerate().map(move |(n, id)| (id.as_str(), created(n)))
    }
}

/// The payload of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Its bytes.
    pub bytes: Bytes,
    /// What they are, as the task's submitter said. Empty: nobody said.
    pub content_type: String,
}

/// A connection to a server.
#[derive(Clone, Debug)]
pub struct Client {
    grpc: Grpc,
    /// For connections that are not shared.
    endpoint: Endpoint,
    patience: Duration,
}

impl Client {
    /// A client of this server. It connects when it is first used. Needs a runtime of tokio around it; without
    /// one, use [`crate::blocking::Client`].
    pub fn new(server: &str) -> Result<Client, Refusal> {
        if tokio::runtime::Handle::try_current().is_err() {
            let what = "is used outside of a tokio runtime; use evenhand::blocking::Client there";
            return Err(Refusal::invalid("client", what));
        }
        let endpoint = endpoint(server)?;
        let channel = endpoint.connect_lazy();
        let grpc = ClientClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        Ok(Client { grpc, endpoint, patience: PATIENCE })
    }

    /// How long a call may take, with all its tries; 30 s if nobody says. Zero: one try, of at most 10 s.
    ///
    /// An enqueue is tried for nine minutes at most, however long the patience: a server remembers a request id for ten,
    /// and would accept what comes later a second time.
    ///
    /// It is for the calls of this clone: `client.clone().patience(..)` makes one call more or less patient. Waiting
    /// for events is not limited, only how long the server may be away meanwhile.
    pub fn patience(mut self, patience: Duration) -> Client {
        self.patience = patience;
        self
    }

    /// Submits one task and returns its id. It is durable then. If its unique key is known, the id is that of the task
    /// that is there already; [`Client::enqueue_all`] tells which it is.
    pub async fn enqueue(&self, queue: &str, task: NewTask) -> Result<String, Refusal> {
        let enqueued = self.enqueue_all(queue, vec![task]).await?;
        enqueued
            .ids
            .into_iter()
            .next()
            .ok_or_else(|| Refusal::new(Kind::Internal, "", "the server gave no id"))
    }

    /// Submits tasks, all or none.
    pub async fn enqueue_all(&self, queue: &str, tasks: Vec<NewTask>) -> Result<Enqueued, Refusal> {
        self.enqueue_once(queue, tasks, random_id()).await
    }

    /// The same, as a request of this name: said again within ten minutes, it is the same request.
    pub async fn enqueue_once(
        &self,
        queue: &str,
        tasks: Vec<NewTask>,
        request_id: String,
    ) -> Result<Enqueued, Refusal> {
        let tasks = tasks.into_iter().map(|task| task.task).collect();
        let request = v1::EnqueueRequest { queue: queue.into(), tasks, request_id };
        let bytes = request.encoded_len();
        if bytes > MESSAGE_BYTES {
            let most = bounds::PAYLOAD_BYTES_PER_ENQUEUE;
            let what =
                format!("are {bytes} bytes; send at most {most} bytes of payloads and files in one call");
            return Err(Refusal::too_large("tasks", what));
        }
        let client = self.clone().patience(self.patience.min(ENQUEUE));
        let answer = client.call(request, async |mut grpc, request| grpc.enqueue(request).await).await?;
        let mut known: Vec<usize> = answer.known.into_iter().map(|place| place as usize).collect();
        known.sort_unstable();
        Ok(Enqueued { ids: answer.ids, created: answer.created, known })
    }

    /// How a task stands.
    pub async fn get(&self, id: &str) -> Result<Task, Refusal> {
        self.call(v1::GetRequest { id: id.into() }, async |mut grpc, request| grpc.get(request).await).await
    }

    /// What a task was submitted with, as long as it is remembered.
    pub async fn payload(&self, id: &str) -> Result<Payload, Refusal> {
        let request = v1::GetRequest { id: id.into() };
        let answer = self.call(request, async |mut grpc, request| grpc.payload(request).await).await?;
        Ok(Payload { bytes: answer.payload, content_type: answer.content_type })
    }

    /// What is in a file that a task was submitted with, as long as it is remembered. [`Client::get`] says which there
    /// are.
    pub async fn file(&self, id: &str, name: &str) -> Result<Bytes, Refusal> {
        let request = v1::FileRequest { id: id.into(), name: name.into() };
        Ok(self.call(request, async |mut grpc, request| grpc.file(request).await).await?.content)
    }

    /// Waits until a task has ended, and says how. A server that is restarted meanwhile does not matter.
    pub async fn wait(&self, id: &str) -> Result<Task, Refusal> {
        match self.watch(id).await?.end().await? {
            Some(task) => Ok(task),
            None => self.get(id).await,
        }
    }

    /// Everything that happens to a task, from how it stands now to its end.
    pub async fn watch(&self, id: &str) -> Result<Watch, Refusal> {
        // Without an id it would be a watch of all.
        convert::parse_task_id(id)?;
        self.watch_from(v1::WatchRequest { id: id.into(), ..v1::WatchRequest::default() }).await
    }

    /// Everything that happens to the tasks of a filter, from now on.
    pub async fn watch_all(&self, filter: Filter) -> Result<Watch, Refusal> {
        self.watch_from(filter.watched()?).await
    }

    /// The same, as the wire has it: with `after`, the id of an event, it goes on from there.
    pub async fn watch_from(&self, request: v1::WatchRequest) -> Result<Watch, Refusal> {
        Watch::open(self, request).await
    }

    /// Cancels a task. True: it was running, and is being stopped.
    pub async fn cancel(&self, id: &str) -> Result<bool, Refusal> {
        let request = v1::CancelRequest { id: id.into() };
        let answer = self.call(request, async |mut grpc, request| grpc.cancel(request).await).await?;
        Ok(answer.stopping)
    }

    /// Gives a task less time, whether it waits or runs: so long may one run of it take from now on. Never more; who
    /// wants that submits another task. A run that has taken longer already is stopped.
    pub async fn shorten(&self, id: &str, max_duration: Duration) -> Result<(), Refusal> {
        let max_duration_ms = u64::try_from(max_duration.as_millis()).unwrap_or(u64::MAX);
        let request = v1::ShortenRequest { id: id.into(), max_duration_ms };
        // The same again is the same.
        self.call(request, async |mut grpc, request| grpc.shorten(request).await).await.map(drop)
    }

    /// Cancels all tasks of a filter that have not ended, step by step: see [`Changing`]. The filter names a queue or a
    /// key at least.
    ///
    /// ```no_run
    /// # async fn example(client: evenhand::Client) -> Result<(), evenhand::Refusal> {
    /// use evenhand::{Filter, TaskState};
    ///
    /// let waiting = Filter::all().queue("render").key("acme").state(TaskState::Queued);
    /// let mut canceling = client.cancel_many(waiting);
    /// while let Some(step) = canceling.next().await? {
    ///     println!("{} more are canceled", step.tasks);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn cancel_many(&self, filter: Filter) -> Changing {
        Changing::begin(self.clone(), many::What::Cancel, filter)
    }

    /// Runs an ended task again, as another task, whose id it returns. The two know each other: `replay_of` and
    /// `replayed_as` of a [`Task`].
    ///
    /// Every call makes a task, so one that is not answered is not sent again: look at `replayed_as` then.
    pub async fn replay(&self, id: &str) -> Result<String, Refusal> {
        let request = v1::ReplayRequest { id: id.into() };
        let replay = async |mut grpc: Grpc, request| grpc.replay(request).await;
        let answer = self.tries(request, true, |refusal| refusal.kind == Kind::Limited, replay).await?;
        Ok(answer.id)
    }

    /// Runs all ended tasks of a filter again that were not run again yet, step by step: see [`Changing`]. The filter
    /// names a queue or a key at least.
    ///
    /// ```no_run
    /// # async fn example(client: evenhand::Client) -> Result<(), evenhand::Refusal> {
    /// use evenhand::{Filter, TaskState};
    ///
    /// let failed = Filter::all().queue("render").state(TaskState::Failed);
    /// println!("{} are run again", client.replay_many(failed).all().await?.tasks);
    /// # Ok(()) }
    /// ```
    pub fn replay_many(&self, filter: Filter) -> Changing {
        Changing::begin(self.clone(), many::What::Replay, filter)
    }

    /// A page of tasks, by id: those that have not ended, and those whose end is remembered. Of a [`Filter`], or what
    /// the wire has for it.
    pub async fn list(&self, request: impl Into<v1::ListRequest>) -> Result<v1::ListResponse, Refusal> {
        self.call(request.into(), async |mut grpc, request| grpc.list(request).await).await
    }

    /// All tasks of a filter, one after the other; pages are fetched as they are needed.
    pub fn list_all(&self, filter: Filter) -> Listing {
        Listing { client: self.clone(), next: Some(filter.into()), page: Vec::new().into_iter() }
    }

    /// Gathers tasks for a queue into calls: for many tasks that come one at a time. See [`Batcher`].
    pub fn batch(&self, queue: impl Into<String>) -> Batcher {
        self.batch_with(queue, Batching::default())
    }

    /// The same, with other limits than the usual ones.
    pub fn batch_with(&self, queue: impl Into<String>, batching: Batching) -> Batcher {
        Batcher::begin(self.clone(), queue.into(), batching)
    }

    /// Every queue.
    pub async fn queues(&self) -> Result<Vec<v1::Queue>, Refusal> {
        let answer =
            self.call(v1::QueuesRequest {}, async |mut grpc, request| grpc.queues(request).await).await?;
        Ok(answer.queues)
    }

    /// One queue, its settings, and the shares of at most so many keys, the busiest first: 1 to 1000.
    pub async fn queue(&self, name: &str, keys: u32) -> Result<v1::QueueResponse, Refusal> {
        let request = v1::QueueRequest { name: name.into(), keys: Some(keys) };
        self.call(request, async |mut grpc, request| grpc.queue(request).await).await
    }

    /// Changes settings of a queue, all that are named or none, and returns all of them with their new version. The
    /// queue is made if it is new.
    ///
    /// ```no_run
    /// # async fn example(client: evenhand::Client) -> Result<(), evenhand::Refusal> {
    /// use evenhand::{QueueSettings, Retries};
    ///
    /// let settings = QueueSettings::new().retries(Retries::new().max_attempts(8));
    /// client.set_queue("render", settings).await?;
    /// # Ok(()) }
    /// ```
    pub async fn set_queue(
        &self,
        name: &str,
        settings: QueueSettings,
    ) -> Result<v1::SetQueueResponse, Refusal> {
        let QueueSettings { settings, version } = settings;
        let request = v1::SetQueueRequest { name: name.into(), settings: Some(settings), version };
        // The same again is the same settings. With a version it is not the same: the first may have changed it.
        let passing = move |refusal: &Refusal| match version {
            None => is_passing(refusal),
            Some(_) => refusal.kind == Kind::Limited,
        };
        self.tries(request, true, passing, async |mut grpc, request| grpc.set_queue(request).await).await
    }

    /// Pauses a queue: nothing of it is started any more. What runs goes on.
    pub async fn pause(&self, queue: &str) -> Result<(), Refusal> {
        self.set_queue(queue, QueueSettings::new().paused(true)).await.map(drop)
    }

    /// Resumes a paused queue.
    pub async fn resume(&self, queue: &str) -> Result<(), Refusal> {
        self.set_queue(queue, QueueSettings::new().paused(false)).await.map(drop)
    }

    /// Gives a key of a queue a weight, whatever its tasks ask for: 0.001 to 1000, or 0 for what they ask for again.
    pub async fn set_key_weight(&self, queue: &str, key: &str, weight: f64) -> Result<(), Refusal> {
        self.set_key(queue, key, KeySettings::new().weight(Some(weight))).await
    }

    /// Pauses a key of a queue: its tasks wait. What runs goes on.
    pub async fn pause_key(&self, queue: &str, key: &str) -> Result<(), Refusal> {
        self.set_key(queue, key, KeySettings::new().paused(true)).await
    }

    /// Lets a paused key go on. It gets its share from then on, and not what it missed.
    pub async fn resume_key(&self, queue: &str, key: &str) -> Result<(), Refusal> {
        self.set_key(queue, key, KeySettings::new().paused(false)).await
    }

    /// Changes what a key of a queue has of its own: its weight, its limit, its rate; and whether it is paused. What is not
    /// named stays. The queue is made if it is new.
    ///
    /// ```no_run
    /// # async fn example(client: evenhand::Client) -> Result<(), evenhand::Refusal> {
    /// use evenhand::KeySettings;
    ///
    /// client.set_key("render", "acme", KeySettings::new().limit(Some(4))).await?;
    /// # Ok(()) }
    /// ```
    pub async fn set_key(&self, queue: &str, key: &str, settings: KeySettings) -> Result<(), Refusal> {
        let KeySettings { weight, request } = settings;
        let weight_thousandths = match weight {
            Some(0.0) => Some(0),
            Some(weight) => Some(Weight::new(weight)?.thousandths()),
            None => None,
        };
        let (queue, key) = (queue.into(), key.into());
        let request = v1::SetKeyRequest { queue, key, weight_thousandths, ..request };
        // The same again is the same.
        self.tries(request, true, is_passing, async |mut grpc, request| grpc.set_key(request).await)
            .await
            .map(drop)
    }

    /// Every worker.
    pub async fn workers(&self) -> Result<Vec<v1::Worker>, Refusal> {
        let answer =
            self.call(v1::WorkersRequest {}, async |mut grpc, request| grpc.workers(request).await).await?;
        Ok(answer.workers)
    }

    /// Asks a worker to take no more work, and to end when what it runs has ended. One that is not connected is told when
    /// it is back, if this server is still there.
    pub async fn drain_worker(&self, seat: &str) -> Result<v1::DrainWorkerResponse, Refusal> {
        let request = v1::DrainWorkerRequest { seat: seat.into() };
        self.call(request, async |mut grpc, request| grpc.drain_worker(request).await).await
    }

    /// Counts a worker as dead, with all that it ran: its tasks are tried again at once. For whoever knows that its
    /// machine is dead. **If it is alive, its tasks run twice at once.** One that is connected and healthy is refused.
    pub async fn give_up_worker(&self, seat: &str) -> Result<v1::GiveUpWorkerResponse, Refusal> {
        let request = v1::GiveUpWorkerRequest { seat: seat.into() };
        // Not sent again if there is no answer: by then another worker may have the seat.
        let give_up = async |mut grpc: Grpc, request| grpc.give_up_worker(request).await;
        self.tries(request, true, |refusal| refusal.kind == Kind::Limited, give_up).await
    }

    /// Opens the start gate without the workers that it waits for: they count as dead. **If one of them is alive, its
    /// tasks run twice at once**; so do those of a worker that an old copy of the store does not know.
    pub async fn open_gate(&self) -> Result<v1::OpenGateResponse, Refusal> {
        // Not sent again if there is no answer: a later gate may wait for others.
        let open = async |mut grpc: Grpc, request| grpc.open_gate(request).await;
        let limited = |refusal: &Refusal| refusal.kind == Kind::Limited;
        self.tries(v1::OpenGateRequest {}, true, limited, open).await
    }

    /// The server.
    pub async fn status(&self) -> Result<v1::StatusResponse, Refusal> {
        self.call(v1::StatusRequest {}, async |mut grpc, request| grpc.status(request).await).await
    }

    /// Calls, within the time that it has.
    async fn call<Q: Clone, A>(
        &self,
        request: Q,
        call: impl AsyncFn(Grpc, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, Refusal> {
        self.tries(request, true, is_passing, call).await
    }

    /// The same for a call that opens a stream: only its beginning is limited, and the server not told.
    async fn open<Q: Clone, A>(
        &self,
        request: Q,
        call: impl AsyncFn(Grpc, Request<Q>) -> Result<Response<Streaming<A>>, Status>,
    ) -> Result<Streaming<A>, Refusal> {
        self.tries(request, false, is_passing, call).await
    }

    /// Calls, and calls again while the reason of a failure may pass, and it is safe to.
    async fn tries<Q: Clone, A>(
        &self,
        request: Q,
        timed: bool,
        again: impl Fn(&Refusal) -> bool,
        call: impl AsyncFn(Grpc, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, Refusal> {
        let began = Instant::now();
        let mut pause = PAUSE;
        loop {
            let within = match self.patience {
                Duration::ZERO => TRY,
                all => all.saturating_sub(began.elapsed()),
            };
            let within = within.min(TRY.max(within / 2));
            let mut request = Request::new(request.clone());
            if timed {
                request.set_timeout(within + LATER);
            }
            let answer = call(self.grpc.clone(), request);
            let refusal = match tokio::time::timeout(within, answer).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) => passing(&status),
                Err(_) => silent(within),
            };
            let wait = refusal.retry_after_ms.map_or(pause, Duration::from_millis).max(pause);
            if !again(&refusal) || began.elapsed() + wait >= self.patience {
                return Err(refusal);
            }
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// The tasks of a filter: see [`Client::list_all`].
#[derive(Debug)]
pub struct Listing {
    client: Client,
    /// None: there are no more pages.
    next: Option<v1::ListRequest>,
    page: std::vec::IntoIter<Task>,
}

impl Listing {
    /// The next task, if there is one.
    pub async fn next(&mut self) -> Result<Option<Task>, Refusal> {
        loop {
            if let Some(task) = self.page.next() {
                return Ok(Some(task));
            }
            let Some(request) = &mut self.next else { return Ok(None) };
            let page = self.client.list(request.clone()).await?;
            self.page = page.tasks.into_iter();
            if page.cursor.is_empty() {
                self.next = None;
            } else {
                request.cursor = page.cursor;
            }
        }
    }
}

/// Whether sending the same again may help.
fn is_passing(refusal: &Refusal) -> bool {
    matches!(refusal.kind, Kind::Unavailable | Kind::Limited)
}

/// The server is there, perhaps, but says nothing.
fn silent(within: Duration) -> Refusal {
    let what = format!(
        "the server did not answer within {} ms, and may have done what was asked; look, or ask again with more patience",
        within.as_millis()
    );
    Refusal::new(Kind::Unavailable, "", what)
}

/// What a server or the way to it said.
fn passing(status: &Status) -> Refusal {
    let refusal = errors::refusal(status);
    let source = std::error::Error::source(status);
    // What the server itself says has details. Without them, and with a cause, the connection broke.
    if status.details().is_empty() && (refusal.kind == Kind::Unavailable || source.is_some()) {
        let why = source.map_or_else(|| status.message().into(), root);
        return Refusal::new(Kind::Unavailable, "", format!("the server cannot be reached: {why}"));
    }
    refusal
}

/// The first cause of an error: what is around it says only that something went wrong.
fn root(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Where a server is, as gRPC wants it.
pub(crate) fn endpoint(server: &str) -> Result<Endpoint, Refusal> {
    let bad = || {
        Refusal::invalid("server", format!("{server:?} is no address; one looks like http://127.0.0.1:7400"))
    };
    if !server.starts_with("http://") {
        return Err(bad());
    }
    let endpoint = Endpoint::from_shared(server.to_string()).map_err(|_| bad())?;
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(CONNECT_WITHIN)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .initial_connection_window_size(4 * 1024 * 1024)
        .initial_stream_window_size(1024 * 1024))
}

/// A name that no other request has.
fn random_id() -> String {
    let draw = || RandomState::new().hash_one(Instant::now());
    format!("{:016x}{:016x}", draw(), draw())
}
