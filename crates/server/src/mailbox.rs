//! How the server reaches the shard's loop. Two mailboxes, both bounded: one for workers, whose messages are
//! few and must not wait behind a crowd of clients, and one for clients. A client that finds its mailbox full is
//! told so; a worker's stream waits, and its peer with it.

use evenhand_api::v1;
use evenhand_core::change::{Settings, SettingsRecord};
use evenhand_core::estimate::Snapshot;
use evenhand_core::explain::Standing;
use evenhand_core::life::{End, Ending};
use evenhand_core::messages::{InteractiveAsk, KeyChange};
use evenhand_core::names::{Fence, Key, QueueId, QueueName, RequestKey, Seat, SessionId, TaskId};
use evenhand_core::owner::messages::{Beat, Hello};
use evenhand_core::refusal::Kind;
use evenhand_core::{Answer, NewTask, Refusal, Task};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::events::{Began, Recent, Watched};
use crate::interactive::Session;
use crate::outbox::Outbox;

/// Clients' requests that may wait. At 16 MiB each they would be too much, so their bytes are bounded too.
pub(crate) const REQUESTS: usize = 4_096;
/// Bytes of payloads and files of enqueues that may wait or be in a commit.
const REQUEST_BYTES: usize = 256 * 1024 * 1024;
/// Workers' messages that may wait.
const FROM_WORKERS: usize = 4_096;

/// Where an answer goes, and the bytes that are held until it is given: also for a caller who has left.
#[derive(Debug)]
pub(crate) struct Reply {
    to: oneshot::Sender<Result<Answer, Refusal>>,
    _held: Option<OwnedSemaphorePermit>,
}

impl Reply {
    /// Answers. A caller that has left is no matter.
    pub(crate) fn send(self, answer: Result<Answer, Refusal>) {
        let _ = self.to.send(answer);
    }
}

/// What is to be changed of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyRequest {
    /// What it has of its own.
    Change(KeyChange),
    /// Whether it may not run.
    Paused(bool),
}

/// What a client wants.
#[derive(Debug)]
pub(crate) enum Request {
    Enqueue {
        queue: QueueName,
        tasks: Vec<NewTask>,
        once: Option<RequestKey>,
        reply: Reply,
    },
    Cancel {
        task: TaskId,
        reply: Reply,
    },
    /// A task is to take less time.
    Shorten {
        task: TaskId,
        max_duration_ms: u64,
        reply: Reply,
    },
    /// An ended task, as the store has it, is to be run again.
    Replay {
        task: Task,
        reply: Reply,
    },
    /// Changes a queue's settings, and says what they will be.
    SetQueue {
        name: QueueName,
        change: v1::QueueSettings,
        version: Option<u64>,
        changed: oneshot::Sender<Settings>,
        reply: Reply,
    },
    /// Sets what a key has of its own, or whether it may run.
    SetKey {
        queue: QueueName,
        key: Key,
        set: KeyRequest,
        reply: Reply,
    },
    /// How tasks stand that the store has.
    QueueName {
        queue: QueueId,
        reply: oneshot::Sender<Option<QueueName>>,
    },
    Snapshot {
        queue: QueueName,
        reply: oneshot::Sender<Option<Snapshot>>,
    },
    Explain {
        tasks: Vec<Task>,
        reply: oneshot::Sender<Vec<Explained>>,
    },
    /// How a task ended that the store no longer has.
    Ended {
        task: TaskId,
        reply: oneshot::Sender<Option<Recent>>,
    },
    Watch {
        what: Watched,
        after: Option<String>,
        lingers: bool,
        /// It is a task that wants to be watched.
        attached: bool,
        reply: oneshot::Sender<Option<Began>>,
    },
    /// A queue, and so many of its keys.
    Queue {
        name: QueueName,
        keys: usize,
        reply: oneshot::Sender<Option<QueueView>>,
    },
    /// The settings of a queue, also of one that does not exist yet.
    Settings {
        name: QueueName,
        reply: oneshot::Sender<SettingsRecord>,
    },
    /// A slot for an interactive task, now or not at all.
    Interactive {
        queue: QueueName,
        ask: InteractiveAsk,
        terminal: v1::Interactive,
        reply: oneshot::Sender<Result<Session, Refusal>>,
    },
    Look {
        reply: oneshot::Sender<View>,
    },
    /// What an operator asks of a worker or of the start gate.
    Operate {
        what: Operation,
        reply: oneshot::Sender<Result<Operated, Refusal>>,
    },
}

/// What an operator wants.
#[derive(Debug)]
pub(crate) enum Operation {
    Drain(Seat),
    GiveUp(Seat),
    OpenGate,
}

/// What has been done for an operator.
#[derive(Debug)]
pub(crate) enum Operated {
    Draining(v1::DrainWorkerResponse),
    GivenUp(v1::GiveUpWorkerResponse),
    GateOpen(v1::OpenGateResponse),
}

/// What a worker says.
#[derive(Debug)]
pub(crate) enum FromWorker {
    Hello { session: SessionId, hello: Hello, results: Vec<Ending>, outbox: Outbox, address: String },
    Beat { session: SessionId, beat: Beat },
    Offer { session: SessionId, slots: u32 },
    Ended { session: SessionId, ended: Vec<RunEnded> },
    Refused { session: SessionId, task: TaskId, fence: Fence },
    Output { task: TaskId, fence: Fence, lines: Vec<String>, dropped: u64 },
    Progress { task: TaskId, fence: Fence, progress: v1::Progress },
    Closed { session: SessionId },
    Dead { seat: Seat, token: u64, process: u64, drained: bool },
    Stop,
}

/// A run that ended.
#[derive(Debug)]
pub(crate) struct RunEnded {
    pub(crate) task: TaskId,
    pub(crate) fence: Fence,
    pub(crate) attempt: u16,
    pub(crate) end: End,
    pub(crate) ending: Ending,
}

/// How a task stands.
#[derive(Debug)]
pub(crate) struct Explained {
    pub(crate) task: Task,
    pub(crate) queue: String,
    pub(crate) standing: Standing,
    pub(crate) seat: Option<Seat>,
    pub(crate) progress: Option<v1::Progress>,
    /// What stands in its way, if it waits.
    pub(crate) holds: Vec<v1::Hold>,
    /// What time it has, if it runs.
    pub(crate) time: RunTime,
}

/// How long a run may take.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunTime {
    /// From its start, if that is limited.
    pub(crate) limit_ms: Option<u64>,
    /// When that is over.
    pub(crate) deadline_ms: Option<u64>,
    /// The duration of the class that it holds.
    pub(crate) class_ms: Option<u64>,
    /// It has less than at its start.
    pub(crate) cut: Option<v1::Cut>,
}

impl RunTime {
    /// Says it of a task.
    pub(crate) fn say(self, task: &mut v1::Task) {
        let RunTime { limit_ms, deadline_ms, class_ms, cut } = self;
        (task.limit_ms, task.deadline_ms, task.class_ms, task.cut) = (limit_ms, deadline_ms, class_ms, cut);
    }
}

/// All that a server says of a queue.
#[derive(Clone, Debug)]
pub(crate) struct QueueView {
    pub(crate) id: QueueId,
    pub(crate) queue: v1::Queue,
    pub(crate) settings: SettingsRecord,
    /// Keys that are held by their limits, and by their rates.
    pub(crate) held_keys: (u64, u64),
    /// The tasks that go next in its lanes.
    pub(crate) first: Vec<TaskId>,
    pub(crate) keys: Vec<v1::QueueKey>,
}

/// All that a server says of a shard.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) shard: v1::Shard,
    pub(crate) store_id: u64,
    pub(crate) queues: Vec<QueueView>,
    pub(crate) workers: Vec<v1::Worker>,
    /// Starts since the server began, by queue, and of the busiest keys.
    pub(crate) started: Vec<(QueueId, u64)>,
    pub(crate) busiest: Vec<(QueueId, Key, u64)>,
    pub(crate) slots_held: u64,
    pub(crate) runs_alive: u64,
    pub(crate) payload_bytes: usize,
    pub(crate) window_rows: usize,
    pub(crate) timers: usize,
    pub(crate) keys: usize,
    /// How often a queue was looked at for something to start.
    pub(crate) looks: u64,
    /// The version of the worker set.
    pub(crate) worker_set: u64,
}

/// The way in. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    requests: mpsc::Sender<Request>,
    workers: mpsc::Sender<FromWorker>,
    bytes: std::sync::Arc<tokio::sync::Semaphore>,
}

/// The loop's end.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) requests: mpsc::Receiver<Request>,
    pub(crate) workers: mpsc::Receiver<FromWorker>,
}

pub(crate) fn new() -> (Mailbox, Inbox) {
    let (to_requests, requests) = mpsc::channel(REQUESTS);
    let (to_workers, workers) = mpsc::channel(FROM_WORKERS);
    let bytes = std::sync::Arc::new(tokio::sync::Semaphore::new(REQUEST_BYTES));
    (Mailbox { requests: to_requests, workers: to_workers, bytes }, Inbox { requests, workers })
}

impl Mailbox {
    /// Enqueues, or says at once that it cannot be done now.
    pub(crate) async fn enqueue(
        &self,
        queue: QueueName,
        tasks: Vec<NewTask>,
        once: Option<RequestKey>,
    ) -> Result<Answer, Refusal> {
        let bytes = tasks.iter().map(|task| 256 + task.input_bytes()).sum::<usize>().min(REQUEST_BYTES);
        let Ok(held) = self.bytes.clone().try_acquire_many_owned(bytes as u32) else {
            return Err(Refusal::limited("too many bytes are on their way to the store; send this again"));
        };
        let reply = |to| Reply { to, _held: Some(held) };
        self.ask(|to| Request::Enqueue { queue, tasks, once, reply: reply(to) }).await?
    }

    pub(crate) async fn cancel(&self, task: TaskId) -> Result<Answer, Refusal> {
        self.ask(|to| Request::Cancel { task, reply: Reply { to, _held: None } }).await?
    }

    pub(crate) async fn shorten(&self, task: TaskId, max_duration_ms: u64) -> Result<Answer, Refusal> {
        self.ask(|to| Request::Shorten { task, max_duration_ms, reply: Reply { to, _held: None } }).await?
    }

    pub(crate) async fn replay(&self, task: Task) -> Result<Answer, Refusal> {
        self.ask(|to| Request::Replay { task, reply: Reply { to, _held: None } }).await?
    }

    /// Changes a queue's settings. What they are then, and the answer.
    pub(crate) async fn set_queue(
        &self,
        name: QueueName,
        change: v1::QueueSettings,
        version: Option<u64>,
    ) -> Result<(Settings, Answer), Refusal> {
        let (changed, settings) = oneshot::channel();
        let reply = |to| Reply { to, _held: None };
        let answer =
            self.ask(|to| Request::SetQueue { name, change, version, changed, reply: reply(to) }).await??;
        Ok((settings.await.map_err(|_| unknown())?, answer))
    }

    pub(crate) async fn set_key(
        &self,
        queue: QueueName,
        key: Key,
        set: KeyRequest,
    ) -> Result<Answer, Refusal> {
        self.ask(|to| Request::SetKey { queue, key, set, reply: Reply { to, _held: None } }).await?
    }

    pub(crate) async fn settings(&self, name: QueueName) -> Result<SettingsRecord, Refusal> {
        self.ask(|reply| Request::Settings { name, reply }).await
    }

    /// The name of a queue.
    pub(crate) async fn queue_name(&self, queue: QueueId) -> Result<Option<QueueName>, Refusal> {
        self.ask(|reply| Request::QueueName { queue, reply }).await
    }

    /// A copy of all that decides when the tasks of a queue start.
    pub(crate) async fn snapshot(&self, queue: QueueName) -> Result<Option<Snapshot>, Refusal> {
        self.ask(|reply| Request::Snapshot { queue, reply }).await
    }

    pub(crate) async fn explain(&self, tasks: Vec<Task>) -> Result<Vec<Explained>, Refusal> {
        self.ask(|reply| Request::Explain { tasks, reply }).await
    }

    pub(crate) async fn ended(&self, task: TaskId) -> Result<Option<Recent>, Refusal> {
        self.ask(|reply| Request::Ended { task, reply }).await
    }

    pub(crate) async fn interactive(
        &self,
        queue: QueueName,
        ask: InteractiveAsk,
        terminal: v1::Interactive,
    ) -> Result<Session, Refusal> {
        self.ask(|reply| Request::Interactive { queue, ask, terminal, reply }).await?
    }

    pub(crate) async fn look(&self) -> Result<View, Refusal> {
        self.ask(|reply| Request::Look { reply }).await
    }

    pub(crate) async fn operate(&self, what: Operation) -> Result<Operated, Refusal> {
        self.ask(|reply| Request::Operate { what, reply }).await?
    }

    pub(crate) async fn queue(&self, name: QueueName, keys: usize) -> Result<QueueView, Refusal> {
        let none = Refusal::not_found(format!("there is no queue {name} yet"));
        self.ask(|reply| Request::Queue { name, keys, reply }).await?.ok_or(none)
    }

    pub(crate) async fn watch(
        &self,
        what: Watched,
        after: Option<String>,
        lingers: bool,
        attached: bool,
    ) -> Result<Began, Refusal> {
        let began = self.ask(|reply| Request::Watch { what, after, lingers, attached, reply }).await?;
        began.ok_or_else(|| Refusal::limited("more watch than the server can tell; try again in a moment"))
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(request(reply))?;
        answer.await.map_err(|_| unknown())
    }

    fn send(&self, request: Request) -> Result<(), Refusal> {
        self.requests.try_send(request).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Refusal::limited("more requests wait than the server holds; send this again in a moment")
            }
            mpsc::error::TrySendError::Closed(_) => stopping(),
        })
    }

    /// Says something of a worker's; waits while there is no room. False: the loop has ended.
    pub(crate) async fn hear(&self, message: FromWorker) -> bool {
        self.workers.send(message).await.is_ok()
    }

    pub(crate) async fn stop(&self) {
        drop(self.workers.send(FromWorker::Stop).await);
    }

    /// The part of the clients' mailbox that is in use, from 0 to 1.
    pub(crate) fn fill(&self) -> f64 {
        1.0 - self.requests.capacity() as f64 / REQUESTS as f64
    }
}

/// To whoever asked something of a server that stops.
pub(crate) fn stopping() -> Refusal {
    Refusal::new(Kind::Unavailable, "", "this server is stopping; send this again in a moment").after(1_000)
}

/// To whoever waits for an answer that will not come.
fn unknown() -> Refusal {
    let message = "the store failed while this was on its way, so whether it was done is not known; send it again \
                   with the same request id";
    Refusal::new(Kind::Unavailable, "", message).after(1_000)
}

/// To whoever asks while the shard is being taken.
pub(crate) fn taking() -> Refusal {
    let message = "the store is not available at the moment; send this again";
    Refusal::new(Kind::Unavailable, "", message).after(500)
}
