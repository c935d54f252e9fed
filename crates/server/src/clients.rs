//! What clients ask, over gRPC. Requests are checked here and turned into the core's words; what the store
//! knows is read from it, what only the owner knows is asked of the loop.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Instant;

use evenhand_api::v1::TaskState;
use evenhand_api::v1::client_server::Client;
use evenhand_api::{PAGE_TASKS, REQUEST_ID_BYTES, convert, errors, v1};
use evenhand_core::explain::{Ahead, Standing};
use evenhand_core::life::Outcome;
use evenhand_core::names::{Key, Millis, QueueName, RequestKey, ShardId, TaskId};
use evenhand_core::refusal::Kind;
use evenhand_core::{Answer, NewTask, Refusal, bounds};
use evenhand_store::{Store, StoreError};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tracing::warn;
use xxhash_rust::xxh3::xxh3_128;

use crate::clock::Clock;
use crate::events::{Began, Watched};
use crate::mailbox::{Explained, Mailbox, QueueView, View};
use crate::shard::SHARD;

/// Tasks that a list reads at once, at least, and how often it reads for one page.
const LIST_AT_ONCE: usize = 100;
const LIST_READS: usize = 50;
/// Most keys of a queue that are shown.
const PAGE_KEYS: u32 = 1_000;
/// How often a task that moves while it is looked at is looked at again.
const LOOKS: u32 = 100;

/// The service.
#[derive(Debug)]
pub(crate) struct Clients<S> {
    pub(crate) mailbox: Mailbox,
    pub(crate) store: S,
    pub(crate) about: String,
    pub(crate) thresholds: v1::Thresholds,
    pub(crate) began: Instant,
    pub(crate) clock: Clock,
}

impl<S: Store + 'static> Clients<S> {
    async fn enqueue(&self, request: v1::EnqueueRequest) -> Result<v1::EnqueueResponse, Refusal> {
        let queue = QueueName::new(&request.queue)?;
        let once = request_key(&queue, &request.request_id)?;
        if request.tasks.len() > bounds::TASKS_PER_ENQUEUE {
            let most = bounds::TASKS_PER_ENQUEUE;
            return Err(Refusal::too_large(
                "tasks",
                format!("are too many; send at most {most} in one call"),
            ));
        }
        let tasks = request.tasks.into_iter().enumerate();
        let tasks: Result<Vec<NewTask>, Refusal> = tasks
            .map(|(n, task)| convert::new_task(task).map_err(|r| r.within(format_args!("tasks[{n}]"))))
            .collect();
        let (ids, created) = match self.mailbox.enqueue(queue, tasks?, once).await? {
            Answer::Accepted(ids) => (ids, true),
            Answer::AcceptedBefore(ids) => (ids, false),
            Answer::WeightSet | Answer::Canceled | Answer::Stopping => (Vec::new(), false),
        };
        let ids = ids.into_iter().map(|task| convert::task_id(SHARD, task)).collect();
        Ok(v1::EnqueueResponse { ids, created })
    }

    async fn get(&self, id: &str) -> Result<v1::Task, Refusal> {
        let task = own_task(id)?;
        for _ in 0..LOOKS {
            let stored = self.store.read_task(SHARD, task).await.map_err(|why| unavailable(&why))?;
            let known = stored.is_some();
            if let Some(stored) = stored
                && let Some(explained) = self.mailbox.explain(vec![stored]).await?.pop()
                && explained.standing != Standing::Gone
            {
                return Ok(to_wire(explained));
            }
            match self.mailbox.ended(task).await? {
                Some(recent) => return Ok(recent.task(SHARD, task)),
                // It was retried, and moved, between the store's word and the shard's: look again.
                None if known => {}
                None => break,
            }
        }
        Err(Refusal::not_found(format!("task {id} does not exist, or ended a while ago")))
    }

    async fn cancel(&self, id: &str) -> Result<v1::CancelResponse, Refusal> {
        let task = own_task(id)?;
        match self.mailbox.cancel(task).await {
            Ok(Answer::Stopping) => Ok(v1::CancelResponse { stopping: true }),
            Ok(Answer::Canceled | Answer::WeightSet | Answer::Accepted(_) | Answer::AcceptedBefore(_)) => {
                Ok(v1::CancelResponse { stopping: false })
            }
            // Said twice, it is done all the same.
            Err(refusal) if refusal.kind == Kind::NotFound => match self.mailbox.ended(task).await? {
                Some(recent) if recent.outcome == Outcome::Canceled => {
                    Ok(v1::CancelResponse { stopping: false })
                }
                Some(_) | None => Err(Refusal::not_found(format!("task {id} does not exist, or has ended"))),
            },
            Err(refusal) => Err(refusal),
        }
    }

    async fn list(&self, request: v1::ListRequest) -> Result<v1::ListResponse, Refusal> {
        let limit = request.limit.unwrap_or(100);
        if !(1..=PAGE_TASKS).contains(&limit) {
            return Err(Refusal::invalid("limit", format!("{limit} is out of range; use 1 to {PAGE_TASKS}")));
        }
        let queue = match request.queue.as_str() {
            "" => None,
            name => Some(self.mailbox.queue(QueueName::new(name)?, 0).await?.id),
        };
        let key = Some(Key::new(&request.key)?).filter(|key| !key.as_str().is_empty());
        let state = match request.state() {
            state @ (TaskState::Unspecified | TaskState::Queued | TaskState::Running) => state,
            TaskState::Succeeded | TaskState::Failed | TaskState::Canceled => {
                return Err(Refusal::invalid("state", "only queued and running tasks are listed"));
            }
        };
        let mut after = match request.cursor.as_str() {
            "" => TaskId(0),
            cursor => match convert::parse_task_id(cursor) {
                Ok((SHARD, task)) => task,
                // By shard, then by task: another shard's are all before ours, or all behind.
                Ok((shard, _)) if shard < SHARD => TaskId(0),
                Ok(_) => return Ok(v1::ListResponse::default()),
                Err(_) => return Err(Refusal::invalid("cursor", "is none that a list gave")),
            },
        };
        let mut page = v1::ListResponse::default();
        // A filter may pass over many tasks. After so many the caller is told how far it came.
        for _ in 0..LIST_READS {
            let left = limit as usize - page.tasks.len();
            let listing = self.store.list_tasks(SHARD, queue, after, left.max(LIST_AT_ONCE)).await;
            let mut listing = listing.map_err(|why| unavailable(&why))?;
            let mut seen = listing.more.or(listing.tasks.last().map(|task| task.id)).unwrap_or(after);
            listing.tasks.retain(|task| key.as_ref().is_none_or(|key| task.key == *key));
            let mut explained = self.mailbox.explain(listing.tasks).await?.into_iter();
            for explained in explained.by_ref() {
                let (id, gone) = (explained.task.id, explained.standing == Standing::Gone);
                let task = to_wire(explained);
                if !gone && (state == TaskState::Unspecified || task.state() == state) {
                    page.tasks.push(task);
                }
                if page.tasks.len() == limit as usize {
                    seen = id;
                    break;
                }
            }
            after = seen;
            let more = listing.more.is_some() || explained.len() > 0;
            page.cursor = if more { convert::task_id(SHARD, after) } else { String::new() };
            if !more || page.tasks.len() == limit as usize {
                break;
            }
        }
        Ok(page)
    }

    /// The shard's view, with the age of each queue's oldest waiting task.
    pub(crate) async fn look(&self) -> Result<View, Refusal> {
        let mut view = self.mailbox.look().await?;
        let now = self.clock.now();
        for view in &mut view.queues {
            self.age(view, now).await?;
        }
        Ok(view)
    }

    /// Finds how long the task has waited that goes next.
    async fn age(&self, view: &mut QueueView, now: Millis) -> Result<(), Refusal> {
        let mut oldest = None;
        for &task in &view.first {
            let stored = self.store.read_task(SHARD, task).await.map_err(|why| unavailable(&why))?;
            oldest = oldest.into_iter().chain(stored.map(|task| task.accepted)).min();
        }
        view.queue.oldest_waiting_ms = oldest.map(|accepted| now.0.saturating_sub(accepted.0));
        Ok(())
    }

    async fn queue(&self, request: v1::QueueRequest) -> Result<v1::QueueResponse, Refusal> {
        let keys = request.keys.unwrap_or(20);
        if !(1..=PAGE_KEYS).contains(&keys) {
            return Err(Refusal::invalid("keys", format!("{keys} is out of range; use 1 to {PAGE_KEYS}")));
        }
        let mut view = self.mailbox.queue(QueueName::new(&request.name)?, keys as usize).await?;
        self.age(&mut view, self.clock.now()).await?;
        Ok(v1::QueueResponse { queue: Some(view.queue), keys: view.keys })
    }

    async fn payload(&self, id: &str) -> Result<v1::PayloadResponse, Refusal> {
        let stored = self.store.read_task(SHARD, own_task(id)?).await.map_err(|why| unavailable(&why))?;
        let gone = || Refusal::not_found(format!("task {id} does not exist, or has ended"));
        let task = stored.ok_or_else(gone)?;
        let content_type = task.content_type.as_str().into();
        Ok(v1::PayloadResponse { payload: bytes::Bytes::from_owner(task.payload), content_type })
    }

    async fn status(&self) -> Result<v1::StatusResponse, Refusal> {
        let view = self.mailbox.look().await?;
        Ok(v1::StatusResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            store: self.about.clone(),
            store_id: view.store_id,
            up_ms: self.began.elapsed().as_millis() as u64,
            shards: vec![view.shard],
            thresholds: Some(self.thresholds),
        })
    }

    /// What happens, from now on or `after` what was seen before. None: the task has ended, and the caller has
    /// seen it.
    pub(crate) async fn watch(
        &self,
        request: v1::WatchRequest,
        lingers: bool,
    ) -> Result<Option<Watching>, Refusal> {
        let v1::WatchRequest { id, queue, key, after } = request;
        let after = (!after.is_empty()).then_some(after);
        let resumes = after.is_some();
        let what = match id.as_str() {
            "" => {
                let queue = (!queue.is_empty()).then(|| QueueName::new(&queue)).transpose()?;
                Watched::Filter(queue, (!key.is_empty()).then(|| Key::new(&key)).transpose()?)
            }
            _ if !queue.is_empty() => return Err(one_or_many("queue")),
            _ if !key.is_empty() => return Err(one_or_many("key")),
            id => Watched::Task(own_task(id)?),
        };
        if !id.is_empty() {
            self.get(&id).await?; // nobody waits for what is not there
        }
        // First watch, then look: what happens in between is seen twice, not missed.
        let Began { at, mut before, missed, mut events } = self.mailbox.watch(what, after, lingers).await?;
        let at_ms = self.clock.now().0;
        let mut first = Vec::new();
        let say = |event| v1::TaskEvent { at_ms, event: Some(event), ..v1::TaskEvent::default() };
        if missed {
            first.push(say(v1::task_event::Event::Missed(true)));
        }
        let mut over = false;
        if !id.is_empty() {
            let stands = self.get(&id).await?;
            over = is_over(stands.state);
            // Its end may have come since the watch began.
            while over && let Ok(event) = events.try_recv() {
                before.push(event);
            }
            if over && resumes && !missed && before.is_empty() {
                return Ok(None);
            }
            if !resumes || missed {
                let told = say(v1::task_event::Event::Task(stands));
                first.push(v1::TaskEvent { id: at, task_id: id, ..told });
            }
        }
        first.extend(before);
        let first = tokio_stream::iter(first.into_iter().map(Ok));
        let rest = tokio_stream::wrappers::ReceiverStream::new(events).map(Ok);
        Ok(Some(if over { Box::pin(first) } else { Box::pin(first.chain(rest)) }))
    }
}

/// Events as they happen.
pub(crate) type Watching = Pin<Box<dyn Stream<Item = Result<v1::TaskEvent, Status>> + Send>>;

fn one_or_many(field: &str) -> Refusal {
    Refusal::invalid(field, "goes with no id: watch one task, or all of a queue or a key")
}

fn is_over(state: i32) -> bool {
    match v1::TaskState::try_from(state) {
        Ok(v1::TaskState::Succeeded | v1::TaskState::Failed | v1::TaskState::Canceled) => true,
        Ok(v1::TaskState::Queued | v1::TaskState::Running | v1::TaskState::Unspecified) | Err(_) => false,
    }
}

/// A request's name, with its queue's: two queues are two requests.
fn request_key(queue: &QueueName, id: &str) -> Result<Option<RequestKey>, Refusal> {
    if id.len() > REQUEST_ID_BYTES {
        let is = id.len();
        return Err(Refusal::too_large(
            "request_id",
            format!("has {is} bytes; at most {REQUEST_ID_BYTES} are allowed"),
        ));
    }
    let named = [queue.as_str().as_bytes(), &[0], id.as_bytes()].concat();
    Ok((!id.is_empty()).then(|| RequestKey(xxh3_128(&named))))
}

/// A task of this server's shard.
fn own_task(id: &str) -> Result<TaskId, Refusal> {
    match convert::parse_task_id(id)? {
        (SHARD, task) => Ok(task),
        (ShardId(other), _) => {
            Err(Refusal::not_found(format!("task {id} is of shard {other}, which is not here")))
        }
    }
}

fn unavailable(why: &StoreError) -> Refusal {
    warn!(%why, "a client's read failed");
    Refusal::new(Kind::Unavailable, "", format!("{why}; send this again in a moment")).after(500)
}

fn to_wire(explained: Explained) -> v1::Task {
    let Explained { task, queue, standing, seat, progress } = explained;
    let mut wire = v1::Task {
        id: convert::task_id(SHARD, task.id),
        queue,
        key: task.key.as_str().into(),
        priority: task.lane.priority.0.into(),
        attempt: task.attempt.into(),
        max_attempts: task.max_attempts.into(),
        accepted_ms: task.accepted.0,
        payload_bytes: task.payload.len() as u64,
        max_duration_ms: (task.max_duration_ms > 0).then_some(task.max_duration_ms),
        content_type: task.content_type.as_str().into(),
        ..v1::Task::default()
    };
    match standing {
        Standing::Running { stopping, .. } => {
            wire.state = v1::TaskState::Running.into();
            wire.seat = seat.map_or_else(String::new, |seat| seat.as_str().into());
            wire.stopping = stopping;
            wire.progress = progress;
        }
        Standing::Waiting { ahead, hold } => {
            wire.state = v1::TaskState::Queued.into();
            wire.hold = hold.to_string();
            let (ahead, exact) = match ahead {
                Ahead::Exactly(n) => (n, true),
                Ahead::AtLeast(n) => (n, false),
            };
            wire.ahead = Some(ahead as u64);
            wire.ahead_is_exact = exact;
        }
        Standing::Gone => {}
    }
    wire
}

fn answer<T>(result: Result<T, Refusal>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|refusal| errors::status(&refusal))
}

#[tonic::async_trait]
impl<S: Store + 'static> Client for Clients<S> {
    type WatchStream = Watching;

    async fn enqueue(
        &self,
        request: Request<v1::EnqueueRequest>,
    ) -> Result<Response<v1::EnqueueResponse>, Status> {
        answer(self.enqueue(request.into_inner()).await)
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::Task>, Status> {
        answer(self.get(&request.into_inner().id).await)
    }

    async fn payload(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::PayloadResponse>, Status> {
        answer(self.payload(&request.into_inner().id).await)
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Watching>, Status> {
        let request = request.into_inner();
        // Who watches one task and comes back is told how it stands; only who watches many needs what was missed.
        let lingers = request.id.is_empty();
        let watching = self.watch(request, lingers).await;
        answer(watching.map(|watching| watching.unwrap_or_else(|| Box::pin(tokio_stream::empty()))))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        answer(self.cancel(&request.into_inner().id).await)
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        answer(self.list(request.into_inner()).await)
    }

    async fn queues(&self, _: Request<v1::QueuesRequest>) -> Result<Response<v1::QueuesResponse>, Status> {
        let queues = |view: View| view.queues.into_iter().map(|view| view.queue).collect();
        answer(self.look().await.map(|view| v1::QueuesResponse { queues: queues(view) }))
    }

    async fn queue(&self, request: Request<v1::QueueRequest>) -> Result<Response<v1::QueueResponse>, Status> {
        answer(self.queue(request.into_inner()).await)
    }

    async fn workers(&self, _: Request<v1::WorkersRequest>) -> Result<Response<v1::WorkersResponse>, Status> {
        answer(self.mailbox.look().await.map(|view| v1::WorkersResponse { workers: view.workers }))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        answer(self.status().await)
    }
}

/// How many workers are how, of all there is to be.
pub(crate) fn by_health(workers: &[v1::Worker]) -> BTreeMap<&str, u64> {
    let mut counts: BTreeMap<&str, u64> =
        ["absent", "new", "healthy", "unhealthy", "draining"].into_iter().map(|health| (health, 0)).collect();
    for worker in workers {
        *counts.entry(worker.health.as_str()).or_default() += 1;
    }
    counts
}
