//! A client. Cheap to clone; all clones share one connection, which is made when it is needed and made again
//! when it breaks. A call that fails because the server is away or busy is tried again for a while; an enqueue
//! has a request id for that, so that it happens once however often it is sent.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use bytes::Bytes;
use evenhand_api::v1::client_client::ClientClient;
use evenhand_api::{MESSAGE_BYTES, errors, v1};
use evenhand_core::refusal::Kind;
use evenhand_core::{Refusal, bounds};
use prost::Message;
use serde::Serialize;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status, Streaming};

pub use v1::{Task, TaskState};

/// How long a call is tried again, if nobody says.
const PATIENCE: Duration = Duration::from_secs(30);
/// The first wait between two tries, and the longest.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a connection may take to be made.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// A task to submit.
#[derive(Clone, Debug, Default)]
pub struct NewTask {
    task: v1::NewTask,
}

impl NewTask {
    /// A task with these bytes.
    pub fn new(payload: impl Into<Bytes>) -> NewTask {
        NewTask { task: v1::NewTask { payload: payload.into(), ..v1::NewTask::default() } }
    }

    /// A task with this value, as JSON.
    pub fn json(value: &impl Serialize) -> Result<NewTask, Refusal> {
        match serde_json::to_vec(value) {
            Ok(bytes) => Ok(NewTask::new(bytes)),
            Err(error) => Err(Refusal::invalid("payload", format!("cannot be written as JSON: {error}"))),
        }
    }

    /// Whom to charge.
    pub fn key(mut self, key: impl Into<String>) -> NewTask {
        self.task.key = key.into();
        self
    }

    /// The key's weight from now on, in thousandths.
    pub fn weight_thousandths(mut self, weight: u32) -> NewTask {
        self.task.weight_thousandths = Some(weight);
        self
    }

    /// 0 (first) to 9; 5 if nobody says.
    pub fn priority(mut self, priority: u32) -> NewTask {
        self.task.priority = Some(priority);
        self
    }

    /// How often it may be tried; 5 if nobody says.
    pub fn max_attempts(mut self, attempts: u32) -> NewTask {
        self.task.max_attempts = Some(attempts);
        self
    }

    /// Bytes of its payload.
    pub fn payload_bytes(&self) -> usize {
        self.task.payload.len()
    }

    /// How long one run may take.
    pub fn max_duration(mut self, duration: Duration) -> NewTask {
        self.task.max_duration_ms = Some(duration.as_millis() as u64);
        self
    }
}

impl From<v1::NewTask> for NewTask {
    fn from(task: v1::NewTask) -> NewTask {
        NewTask { task }
    }
}

/// The answer to an enqueue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enqueued {
    /// The ids of the tasks, in order.
    pub ids: Vec<String>,
    /// False: the request id was known, and nothing was accepted anew.
    pub created: bool,
}

/// A connection to a server.
#[derive(Clone, Debug)]
pub struct Client {
    grpc: ClientClient<Channel>,
    patience: Duration,
}

impl Client {
    /// A client of this server. It connects when it is first used.
    pub fn new(server: &str) -> Result<Client, Refusal> {
        let channel = endpoint(server)?.connect_lazy();
        let grpc = ClientClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        Ok(Client { grpc, patience: PATIENCE })
    }

    /// Tries a call that fails for a passing reason for so long; not again, if that is zero.
    pub fn patience(mut self, patience: Duration) -> Client {
        self.patience = patience;
        self
    }

    /// Submits one task and returns its id. It is durable then.
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
            let what = format!("are {bytes} bytes; send at most {most} bytes of payload in one call");
            return Err(Refusal::too_large("tasks", what));
        }
        let answer = self.call(request, async |mut grpc, request| grpc.enqueue(request).await).await?;
        Ok(Enqueued { ids: answer.ids, created: answer.created })
    }

    /// How a task stands.
    pub async fn get(&self, id: &str) -> Result<Task, Refusal> {
        self.call(v1::GetRequest { id: id.into() }, async |mut grpc, request| grpc.get(request).await).await
    }

    /// Everything that happens to a task, from how it stands now to its end.
    pub async fn watch(&self, id: &str) -> Result<Watch, Refusal> {
        self.watch_all(v1::WatchRequest { id: id.into(), ..v1::WatchRequest::default() }).await
    }

    /// Everything that happens to the tasks that a request names, until the caller leaves.
    pub async fn watch_all(&self, request: v1::WatchRequest) -> Result<Watch, Refusal> {
        let events = self.call(request, async |mut grpc, request| grpc.watch(request).await).await?;
        Ok(Watch { events })
    }

    /// Cancels a task. True: it was running, and is being stopped.
    pub async fn cancel(&self, id: &str) -> Result<bool, Refusal> {
        let request = v1::CancelRequest { id: id.into() };
        let answer = self.call(request, async |mut grpc, request| grpc.cancel(request).await).await?;
        Ok(answer.stopping)
    }

    /// A page of the tasks that have not ended.
    pub async fn list(&self, request: v1::ListRequest) -> Result<v1::ListResponse, Refusal> {
        self.call(request, async |mut grpc, request| grpc.list(request).await).await
    }

    /// Every queue.
    pub async fn queues(&self) -> Result<Vec<v1::Queue>, Refusal> {
        let answer =
            self.call(v1::QueuesRequest {}, async |mut grpc, request| grpc.queues(request).await).await?;
        Ok(answer.queues)
    }

    /// One queue, and the shares of its busiest keys.
    pub async fn queue(&self, request: v1::QueueRequest) -> Result<v1::QueueResponse, Refusal> {
        self.call(request, async |mut grpc, request| grpc.queue(request).await).await
    }

    /// Every worker.
    pub async fn workers(&self) -> Result<Vec<v1::Worker>, Refusal> {
        let answer =
            self.call(v1::WorkersRequest {}, async |mut grpc, request| grpc.workers(request).await).await?;
        Ok(answer.workers)
    }

    /// The server.
    pub async fn status(&self) -> Result<v1::StatusResponse, Refusal> {
        self.call(v1::StatusRequest {}, async |mut grpc, request| grpc.status(request).await).await
    }

    /// Calls, and calls again while the reason of a failure may pass. Every call is safe to repeat.
    async fn call<Q, A>(
        &self,
        request: Q,
        call: impl AsyncFn(ClientClient<Channel>, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, Refusal>
    where
        Q: Clone,
    {
        let began = Instant::now();
        let mut pause = PAUSE;
        loop {
            let refusal = match call(self.grpc.clone(), Request::new(request.clone())).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) => passing(&status),
            };
            let wait = refusal.retry_after_ms.map_or(pause, Duration::from_millis).max(pause);
            let hopeful = matches!(refusal.kind, Kind::Unavailable | Kind::Limited);
            if !hopeful || began.elapsed() + wait > self.patience {
                return Err(refusal);
            }
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// What a server or the way to it said.
fn passing(status: &Status) -> Refusal {
    let refusal = errors::refusal(status);
    if refusal.kind == Kind::Unavailable && status.details().is_empty() {
        let why = std::error::Error::source(status).map_or_else(|| status.message().into(), root);
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

/// What happens to a task.
#[derive(Debug)]
pub struct Watch {
    events: Streaming<v1::TaskEvent>,
}

impl Watch {
    /// The next event; None after the task's end.
    pub async fn next(&mut self) -> Result<Option<v1::TaskEvent>, Refusal> {
        self.events.message().await.map_err(|status| passing(&status))
    }

    /// Waits for the end. None: the server ended the stream before it.
    pub async fn end(mut self) -> Result<Option<Task>, Refusal> {
        while let Some(event) = self.next().await? {
            if let Some(v1::task_event::Event::Task(task)) = event.event
                && is_over(&task)
            {
                return Ok(Some(task));
            }
        }
        Ok(None)
    }
}

/// Whether a task has ended.
pub(crate) fn is_over(task: &Task) -> bool {
    match task.state() {
        TaskState::Succeeded | TaskState::Failed | TaskState::Canceled => true,
        TaskState::Queued | TaskState::Running | TaskState::Unspecified => false,
    }
}
