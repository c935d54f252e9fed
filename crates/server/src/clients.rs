//! What clients ask, over gRPC. Requests are checked here and turned into the core's words; what the store
//! knows is read from it, what only the owner knows is asked of the loop.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Instant;

use evenhand_api::v1::client_server::Client;
use evenhand_api::{PAGE_TASKS, REQUEST_ID_BYTES, convert, errors, v1};
use evenhand_core::explain::{Ahead, Standing};
use evenhand_core::names::{QueueName, RequestKey, ShardId, TaskId};
use evenhand_core::refusal::Kind;
use evenhand_core::{Answer, NewTask, Refusal, bounds};
use evenhand_store::{Store, StoreError};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tracing::warn;
use xxhash_rust::xxh3::xxh3_128;

use crate::clock::Clock;
use crate::events::Watcher;
use crate::mailbox::{Explained, Mailbox, View};
use crate::shard::SHARD;

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
            let (is, most) = (request.tasks.len(), bounds::TASKS_PER_ENQUEUE);
            return Err(Refusal::too_large(
                "tasks",
                format!("has {is} tasks; send at most {most} in one call"),
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
        let stopping = match self.mailbox.cancel(own_task(id)?).await? {
            Answer::Stopping => true,
            Answer::Canceled | Answer::WeightSet | Answer::Accepted(_) | Answer::AcceptedBefore(_) => false,
        };
        Ok(v1::CancelResponse { stopping })
    }

    async fn list(&self, request: v1::ListRequest) -> Result<v1::ListResponse, Refusal> {
        let limit = request.limit.unwrap_or(100);
        if !(1..=PAGE_TASKS).contains(&limit) {
            return Err(Refusal::invalid("limit", format!("{limit} is out of range; use 1 to {PAGE_TASKS}")));
        }
        let after = match request.cursor.as_str() {
            "" => TaskId(0),
            cursor => own_task(cursor).map_err(|_| Refusal::invalid("cursor", "is none that a list gave"))?,
        };
        let queue = match request.queue.as_str() {
            "" => None,
            name => {
                let name = QueueName::new(name)?;
                let view = self.mailbox.look().await?;
                let at = view.queues.iter().position(|queue| queue.name == name.as_str());
                let none = || Refusal::not_found(format!("there is no queue {name} yet"));
                Some(evenhand_core::names::QueueId(at.ok_or_else(none)? as u32))
            }
        };
        let listing = self.store.list_tasks(SHARD, queue, after, limit as usize).await;
        let listing = listing.map_err(|why| unavailable(&why))?;
        let last = listing.tasks.last().map(|task| convert::task_id(SHARD, task.id));
        let cursor = last.filter(|_| listing.more).unwrap_or_default();
        let explained = self.mailbox.explain(listing.tasks).await?;
        let there = explained.into_iter().filter(|explained| explained.standing != Standing::Gone);
        Ok(v1::ListResponse { tasks: there.map(to_wire).collect(), cursor })
    }

    /// The shard's view, with the age of each queue's oldest waiting task.
    pub(crate) async fn look(&self) -> Result<View, Refusal> {
        let mut view = self.mailbox.look().await?;
        let now = self.clock.now();
        for (queue, first) in view.queues.iter_mut().zip(&view.first) {
            let mut oldest = None;
            for &task in first {
                let stored = self.store.read_task(SHARD, task).await.map_err(|why| unavailable(&why))?;
                oldest = oldest.into_iter().chain(stored.map(|task| task.accepted)).min();
            }
            queue.oldest_waiting_ms = oldest.map(|accepted| now.0.saturating_sub(accepted.0));
        }
        Ok(view)
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

    async fn watch(&self, id: &str) -> Result<Watched, Refusal> {
        let task = own_task(id)?;
        // First watch, then look: what happens in between is seen twice, not missed.
        let (watcher, watched) = Watcher::new();
        self.mailbox.watch(task, watcher)?;
        let stands = self.get(id).await?;
        let at_ms = self.clock.now().0;
        let over = is_over(stands.state);
        let first = v1::TaskEvent { at_ms, event: Some(v1::task_event::Event::Task(stands)) };
        let first = tokio_stream::once(Ok(first));
        if over {
            return Ok(Box::pin(first));
        }
        let rest = tokio_stream::wrappers::ReceiverStream::new(watched).map(Ok);
        Ok(Box::pin(first.chain(rest)))
    }
}

type Watched = Pin<Box<dyn Stream<Item = Result<v1::TaskEvent, Status>> + Send>>;

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
    let Explained { task, queue, standing, seat } = explained;
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
        ..v1::Task::default()
    };
    match standing {
        Standing::Running { stopping, .. } => {
            wire.state = v1::TaskState::Running.into();
            wire.seat = seat.map_or_else(String::new, |seat| seat.as_str().into());
            wire.stopping = stopping;
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
    type WatchStream = Watched;

    async fn enqueue(
        &self,
        request: Request<v1::EnqueueRequest>,
    ) -> Result<Response<v1::EnqueueResponse>, Status> {
        answer(self.enqueue(request.into_inner()).await)
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::Task>, Status> {
        answer(self.get(&request.into_inner().id).await)
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Watched>, Status> {
        answer(self.watch(&request.into_inner().id).await)
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
        answer(self.look().await.map(|view| v1::QueuesResponse { queues: view.queues }))
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
