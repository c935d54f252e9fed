//! What clients ask, over gRPC. Requests are checked here and turned into the core's words; what the store
//! knows is read from it, what only the owner knows is asked of the loop.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenhand_api::v1::TaskState;
use evenhand_api::v1::attach_request::Message as FromClient;
use evenhand_api::v1::attach_response::Message as ToClient;
use evenhand_api::v1::client_server::Client;
use evenhand_api::{REQUEST_ID_BYTES, convert, errors, interactive, v1};
use evenhand_core::change::Place;
use evenhand_core::estimate::Wanted;
use evenhand_core::explain::{Ahead, Standing};
use evenhand_core::life::Backoff;
use evenhand_core::messages::{InteractiveAsk, KeyChange};
use evenhand_core::names::{Key, Millis, QueueName, RequestKey, Seat, ShardId, TaskId};
use evenhand_core::owner::Settings;
use evenhand_core::refusal::Kind;
use evenhand_core::{Answer, NewTask, Refusal, Task, bounds};
use evenhand_store::{History, Store, StoreError};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};
use tracing::warn;
use xxhash_rust::xxh3::xxh3_128;

use crate::clock::Clock;
use crate::events::{Began, Watched, say_end};
use crate::forecasts::{self, Forecasts, Told};
use crate::interactive::{Gone, Session, Sink, Source, checked, relay};
use crate::listing::Many;
use crate::mailbox::{Explained, KeyRequest, Mailbox, Operated, Operation, QueueView, View};
use crate::shard::SHARD;

/// Most keys of a queue that are shown.
const PAGE_KEYS: u32 = 1_000;
/// How long a client has to say what it wants, after it has called.
const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// Messages of an interactive task that may wait for its client.
const ANSWERS: usize = 2;
/// Words on a task that waits after which its place is looked up again.
const PLACE_EVERY: u32 = 5;
/// How often a task that moves while it is looked at is looked at again.
const LOOKS: u32 = 100;

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct Clients<S> {
    pub(crate) mailbox: Mailbox,
    pub(crate) store: S,
    pub(crate) about: String,
    pub(crate) settings: Settings,
    pub(crate) began: Instant,
    pub(crate) clock: Clock,
    pub(crate) forecasts: Arc<Forecasts>,
}

impl<S: Store + Clone + 'static> Clients<S> {
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
        // What a task leaves open of its backoff is its queue's; most leave all of it, and nobody need be asked.
        let asks = request.tasks.iter().filter_map(|task| task.retry.as_ref()).any(convert::is_partial);
        let backoff = match asks {
            true => self.mailbox.settings(queue.clone()).await?.settings.backoff,
            false => Backoff::default(),
        };
        let task = |(n, task): (usize, v1::NewTask)| {
            new_task(&queue, task, backoff).map_err(|refusal| refusal.within(format_args!("tasks[{n}]")))
        };
        let tasks = request.tasks.into_iter().enumerate().map(task).collect::<Result<Vec<_>, _>>()?;
        let (ids, created) = match self.mailbox.enqueue(queue, tasks, once).await? {
            Answer::Accepted(ids) => (ids, true),
            Answer::AcceptedBefore(ids) => (ids.into_iter().map(|id| (id, true)).collect(), false),
            Answer::KeySet
            | Answer::Shortened(_)
            | Answer::Interactive { .. }
            | Answer::Canceled
            | Answer::Stopping
            | Answer::Replayed(_)
            | Answer::Configured(_)
            | Answer::KeyPaused(_) => return Err(no_such_answer()),
        };
        let known = (0..).zip(&ids).filter(|(_, (_, new))| !new).map(|(n, _)| n).collect();
        let ids = ids.into_iter().map(|(task, _)| convert::task_id(SHARD, task)).collect();
        Ok(v1::EnqueueResponse { ids, created, known })
    }

    /// How a task stands: what the store has of it, and what only the shard knows.
    pub(crate) async fn get(&self, id: &str) -> Result<v1::Task, Refusal> {
        let task = own_task(id)?;
        for _ in 0..LOOKS {
            let stored = self.store.read_task(SHARD, task).await.map_err(|why| unavailable(&why))?;
            let Some(stored) = stored else {
                // Its queue remembers nothing, but we do for a while.
                let recent = self.mailbox.ended(task).await?;
                return recent.map(|recent| recent.task(SHARD, task)).ok_or_else(|| not_there(id, task));
            };
            let tried = stored.attempt > 1;
            let Some(explained) = self.mailbox.explain(vec![stored.clone()]).await?.pop() else { continue };
            let standing = explained.standing.clone();
            let mut told = to_wire(explained);
            match standing {
                // It ended, or was retried, and moved, between the store's word and the shard's: look again when
                // that is durable.
                Standing::Gone => {
                    self.mailbox.ended(task).await?;
                }
                Standing::Running { .. } | Standing::Waiting { .. } | Standing::Scheduled { .. } => {
                    if tried {
                        let history = self.store.read_history(SHARD, task).await;
                        say_history(&mut told, &history.map_err(|why| unavailable(&why))?);
                    }
                    if told.state() == v1::TaskState::Queued {
                        let queue = QueueName::new(&told.queue)?;
                        let estimate = self.forecasts.of(&self.mailbox, &queue, &wanted(&stored)).await;
                        told.estimate = estimate.map(forecasts::to_wire);
                    }
                    return Ok(told);
                }
                Standing::Over => {
                    let history = self.store.read_history(SHARD, task).await;
                    let history = history.map_err(|why| unavailable(&why))?;
                    if history.end.is_some() {
                        say_history(&mut told, &history);
                        return Ok(told);
                    }
                    // Forgotten in this moment.
                }
            }
        }
        Err(not_there(id, task))
    }

    async fn cancel(&self, id: &str) -> Result<v1::CancelResponse, Refusal> {
        let task = own_task(id)?;
        match self.mailbox.cancel(task).await {
            Ok(Answer::Stopping) => Ok(v1::CancelResponse { stopping: true }),
            Ok(
                Answer::Canceled
                | Answer::KeySet
                | Answer::Shortened(_)
                | Answer::Interactive { .. }
                | Answer::Accepted(_)
                | Answer::AcceptedBefore(_)
                | Answer::Replayed(_)
                | Answer::Configured(_)
                | Answer::KeyPaused(_),
            ) => Ok(v1::CancelResponse { stopping: false }),
            // Said twice, it is done all the same.
            Err(refusal) if refusal.kind == Kind::NotFound => match self.get(id).await {
                Ok(task) if task.state() == TaskState::Canceled => Ok(v1::CancelResponse { stopping: false }),
                Ok(_) => Err(Refusal::not_found(format!("task {id} has ended"))),
                Err(refusal) => Err(refusal),
            },
            Err(refusal) => Err(refusal),
        }
    }

    async fn shorten(&self, request: v1::ShortenRequest) -> Result<v1::ShortenResponse, Refusal> {
        let v1::ShortenRequest { id, max_duration_ms } = request;
        match self.mailbox.shorten(own_task(&id)?, max_duration_ms).await {
            Ok(Answer::Shortened(max_duration_ms)) => Ok(v1::ShortenResponse { max_duration_ms }),
            Ok(
                Answer::Accepted(_)
                | Answer::AcceptedBefore(_)
                | Answer::Replayed(_)
                | Answer::Configured(_)
                | Answer::KeySet
                | Answer::Interactive { .. }
                | Answer::KeyPaused(_)
                | Answer::Canceled
                | Answer::Stopping,
            ) => Err(no_such_answer()),
            // The shard has no names for tasks; and one that is not here may have ended, or may never have been.
            Err(refusal) if refusal.kind == Kind::NotFound => {
                self.get(&id).await?;
                Err(Refusal::not_found(format!("task {id} has ended")))
            }
            Err(refusal) => Err(refusal),
        }
    }

    async fn replay(&self, id: &str) -> Result<v1::ReplayResponse, Refusal> {
        let task = own_task(id)?;
        let stored = self.store.read_task(SHARD, task).await.map_err(|why| unavailable(&why))?;
        let gone = || Refusal::not_found(format!("task {id} does not exist, or its end is not remembered"));
        match self.mailbox.replay(stored.ok_or_else(gone)?).await {
            Ok(Answer::Replayed(again)) => Ok(v1::ReplayResponse { id: convert::task_id(SHARD, again) }),
            Ok(
                Answer::Accepted(_)
                | Answer::AcceptedBefore(_)
                | Answer::Configured(_)
                | Answer::KeySet
                | Answer::Shortened(_)
                | Answer::Interactive { .. }
                | Answer::KeyPaused(_)
                | Answer::Canceled
                | Answer::Stopping,
            ) => Err(no_such_answer()),
            Err(refusal) => Err(refusal),
        }
    }

    async fn set_queue(&self, request: v1::SetQueueRequest) -> Result<v1::SetQueueResponse, Refusal> {
        let v1::SetQueueRequest { name, settings, version } = request;
        let name = QueueName::new(&name)?;
        match self.mailbox.set_queue(name, settings.unwrap_or_default(), version).await? {
            (settings, Answer::Configured(version)) => {
                Ok(v1::SetQueueResponse { settings: Some(convert::settings(&settings)), version })
            }
            (
                _,
                Answer::Accepted(_)
                | Answer::AcceptedBefore(_)
                | Answer::Replayed(_)
                | Answer::KeySet
                | Answer::Shortened(_)
                | Answer::Interactive { .. }
                | Answer::KeyPaused(_)
                | Answer::Canceled
                | Answer::Stopping,
            ) => Err(no_such_answer()),
        }
    }

    async fn set_key(&self, request: v1::SetKeyRequest) -> Result<v1::SetKeyResponse, Refusal> {
        let (queue, key) = (QueueName::new(&request.queue)?, Key::new(&request.key)?);
        // All is checked before anything is changed.
        let change = convert::key_change(&request)?;
        if change != KeyChange::default() {
            self.mailbox.set_key(queue.clone(), key.clone(), KeyRequest::Change(change)).await?;
        }
        if let Some(paused) = request.paused {
            self.mailbox.set_key(queue, key, KeyRequest::Paused(paused)).await?;
        }
        Ok(v1::SetKeyResponse {})
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
        let settings = Some(convert::settings(&view.settings.settings));
        let version = view.settings.version;
        Ok(v1::QueueResponse { queue: Some(view.queue), keys: view.keys, settings, version })
    }

    /// A task as the store has it.
    async fn stored(&self, id: &str) -> Result<Task, Refusal> {
        let task = own_task(id)?;
        let stored = self.store.read_task(SHARD, task).await.map_err(|why| unavailable(&why))?;
        stored.ok_or_else(|| not_there(id, task))
    }

    async fn file(&self, request: v1::FileRequest) -> Result<v1::File, Refusal> {
        let v1::FileRequest { id, name } = request;
        let task = self.stored(&id).await?;
        let file = convert::wire_files(&task.files).into_iter().find(|file| file.name == name);
        file.ok_or_else(|| Refusal::not_found(format!("task {id} has no file {name:?}")))
    }

    async fn payload(&self, id: &str) -> Result<v1::PayloadResponse, Refusal> {
        let task = self.stored(id).await?;
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
            thresholds: Some(convert::thresholds(&self.settings.thresholds)),
            absence_ms: self.settings.absence_ms,
            longest_shut_ms: self.settings.longest_ms(),
        })
    }

    /// A slot for an interactive task, or a refusal.
    pub(crate) async fn interactive(&self, open: v1::AttachOpen) -> Result<Session, Refusal> {
        let v1::AttachOpen { queue, key, max_duration_ms, terminal } = open;
        let (queue, key) = (QueueName::new(&queue)?, Key::new(&key)?);
        let most = bounds::DURATION_MS;
        if let Some(ms) = max_duration_ms.filter(|ms| !(1..=most).contains(ms)) {
            return Err(Refusal::invalid(
                "max_duration_ms",
                format!("{ms} is out of range; use 1 to {most}"),
            ));
        }
        let terminal =
            interactive::terminal(terminal.as_ref()).map_err(|refusal| refusal.within("terminal"))?;
        let ask = InteractiveAsk { key, max_duration_ms: max_duration_ms.unwrap_or(0) };
        self.mailbox.interactive(queue, ask, terminal).await
    }

    async fn drain_worker(&self, seat: &str) -> Result<v1::DrainWorkerResponse, Refusal> {
        match self.mailbox.operate(Operation::Drain(Seat::new(seat)?)).await? {
            Operated::Draining(answer) => Ok(answer),
            Operated::GivenUp(_) | Operated::GateOpen(_) => Err(no_such_answer()),
        }
    }

    async fn give_up_worker(&self, seat: &str) -> Result<v1::GiveUpWorkerResponse, Refusal> {
        match self.mailbox.operate(Operation::GiveUp(Seat::new(seat)?)).await? {
            Operated::GivenUp(answer) => Ok(answer),
            Operated::Draining(_) | Operated::GateOpen(_) => Err(no_such_answer()),
        }
    }

    async fn open_gate(&self) -> Result<v1::OpenGateResponse, Refusal> {
        match self.mailbox.operate(Operation::OpenGate).await? {
            Operated::GateOpen(answer) => Ok(answer),
            Operated::Draining(_) | Operated::GivenUp(_) => Err(no_such_answer()),
        }
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
        let mut attached = false;
        if !id.is_empty() {
            let stands = self.get(&id).await?; // nobody waits for what is not there
            attached = stands.attach_ttl_ms.is_some() && !is_over(stands.state());
        }
        // First watch, then look: what happens in between is seen twice, not missed.
        let began = self.mailbox.watch(what, after, lingers, attached).await?;
        let Began { at, mut before, missed, mut events } = began;
        let at_ms = self.clock.now().0;
        let mut first = Vec::new();
        let say = |event| v1::TaskEvent { at_ms, event: Some(event), ..v1::TaskEvent::default() };
        if missed {
            first.push(say(v1::task_event::Event::Missed(true)));
        }
        let (mut over, mut waits) = (false, false);
        if !id.is_empty() {
            let stands = v1::Task { tries: Vec::new(), ..self.get(&id).await? };
            over = is_over(stands.state());
            waits = is_waiting(stands.state());
            // Its end may have come since the watch began.
            while over && let Ok(event) = events.try_recv() {
                before.push(event);
            }
            if over && resumes && !missed && before.is_empty() {
                return Ok(None);
            }
            if !resumes || missed {
                let told = say(v1::task_event::Event::Task(stands));
                first.push(v1::TaskEvent { id: at, task_id: id.clone(), ..told });
            }
        }
        first.extend(before);
        let first = tokio_stream::iter(first.into_iter().map(Ok));
        if over {
            return Ok(Some(Box::pin(first)));
        }
        let events = if id.is_empty() { events } else { self.clone().with_estimates(id, waits, events) };
        let rest = ReceiverStream::new(events).map(Ok);
        Ok(Some(Box::pin(first.chain(rest))))
    }

    /// A task that waits for its turn, and its queue.
    async fn waiting(&self, id: &str) -> Option<(QueueName, Wanted)> {
        let stored = self.store.read_task(SHARD, own_task(id).ok()?).await.ok()??;
        let place = matches!(stored.place, Place::Lane(_) | Place::Parked(_));
        let queue = self.mailbox.queue_name(stored.lane.queue).await.ok()??;
        // Who watches holds no payload.
        place.then(|| (queue, wanted(&stored)))
    }

    /// The events of a task, and between them when it will start, as long as it waits. Whether it does is told.
    fn with_estimates(
        self,
        id: String,
        mut waits: bool,
        mut events: mpsc::Receiver<v1::TaskEvent>,
    ) -> mpsc::Receiver<v1::TaskEvent> {
        // One is enough: who is slow is noticed where the events come from.
        let (out, told) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(forecasts::TELL_EVERY);
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let (mut said, mut ticks) = (Told::default(), 0_u32);
            let mut waiting = None;
            loop {
                let event = tokio::select! {
                    biased;
                    () = out.closed() => return,
                    event = events.recv() => match event {
                        Some(event) => event,
                        None => return,
                    },
                    _ = tick.tick(), if waits => {
                        // Where it waits is looked up again now and then: it may have moved.
                        if ticks.is_multiple_of(PLACE_EVERY) {
                            waiting = self.waiting(&id).await;
                        }
                        ticks = ticks.wrapping_add(1);
                        let Some((queue, wanted)) = &waiting else { continue };
                        let estimate = self.forecasts.of(&self.mailbox, queue, wanted).await;
                        let estimate = estimate.map(forecasts::to_wire);
                        let Some(estimate) = estimate.filter(|now| said.is_news(*now)) else { continue };
                        v1::TaskEvent {
                            at_ms: self.clock.now().0,
                            event: Some(v1::task_event::Event::Estimate(estimate)),
                            task_id: id.clone(),
                            ..v1::TaskEvent::default()
                        }
                    }
                };
                if let Some(v1::task_event::Event::Task(task)) = &event.event {
                    waits = is_waiting(task.state());
                }
                if out.send(event).await.is_err() {
                    return;
                }
            }
        });
        told
    }
}

/// What an interactive task says.
pub(crate) type Attaching = Pin<Box<dyn Stream<Item = Result<v1::AttachResponse, Status>> + Send>>;

/// What a client says to an interactive task.
struct Asks {
    incoming: Streaming<v1::AttachRequest>,
    /// Closed when the client does not listen any more.
    listens: Said,
    /// It will say no more, but listens.
    ended: bool,
}

impl Source for Asks {
    async fn next(&mut self) -> Option<Result<FromClient, Refusal>> {
        loop {
            tokio::select! {
                () = self.listens.closed() => return None,
                said = self.incoming.message(), if !self.ended => match said {
                    Ok(Some(v1::AttachRequest { message: Some(said) })) => return Some(checked(said)),
                    Ok(Some(v1::AttachRequest { message: None })) => {}
                    Ok(None) => {
                        self.ended = true;
                        return Some(Ok(FromClient::Eof(true)));
                    }
                    Err(_) => return None,
                },
            }
        }
    }

    async fn gone(&mut self) -> Option<Refusal> {
        self.listens.closed().await;
        None
    }

    async fn leave(self) {}
}

/// The way to a client that listens.
type Said = mpsc::Sender<Result<v1::AttachResponse, Status>>;

/// How it is answered.
struct Answers {
    answers: Said,
    /// For one message, behind all others.
    last: Said,
}

impl Answers {
    /// It, and what the client hears.
    fn new() -> (Answers, Attaching) {
        let (answers, answered) = mpsc::channel(ANSWERS);
        // The last word has a place of its own: it does not wait for those who read slowly.
        let (last, ending) = mpsc::channel(1);
        let attaching = ReceiverStream::new(answered).chain(ReceiverStream::new(ending));
        (Answers { answers, last }, Box::pin(attaching))
    }

    /// Says it, and waits until it is taken.
    async fn end(self, said: Result<v1::AttachResponse, Status>) {
        let Answers { answers, last } = self;
        drop(answers);
        if last.send(said).await.is_ok() {
            let _ = last.reserve().await;
        }
    }
}

impl Sink for Answers {
    async fn send(&mut self, said: ToClient) -> Result<(), Gone> {
        let said = v1::AttachResponse { message: Some(said) };
        self.answers.send(Ok(said)).await.map_err(|_| Gone)
    }

    async fn ping(&mut self) -> Result<(), Gone> {
        // The connection does that by itself.
        Ok(())
    }

    async fn close(self, closed: v1::AttachClosed) {
        self.end(Ok(v1::AttachResponse { message: Some(ToClient::Closed(closed)) })).await;
    }

    async fn refuse(self, refusal: Refusal) {
        self.end(Err(errors::status(&refusal))).await;
    }
}

/// Waits for the first message.
async fn opened(incoming: &mut Streaming<v1::AttachRequest>) -> Result<v1::AttachOpen, Refusal> {
    let first = tokio::time::timeout(OPEN_WITHIN, incoming.message()).await;
    match first {
        Ok(Ok(Some(v1::AttachRequest { message: Some(FromClient::Open(open)) }))) => Ok(open),
        Ok(_) => Err(Refusal::invalid("open", "must be the first message")),
        Err(_) => {
            let seconds = OPEN_WITHIN.as_secs();
            Err(Refusal::invalid("open", format!("did not come within {seconds} s")))
        }
    }
}

/// Events as they happen.
pub(crate) type Watching = Pin<Box<dyn Stream<Item = Result<v1::TaskEvent, Status>> + Send>>;

fn one_or_many(field: &str) -> Refusal {
    Refusal::invalid(field, "goes with no id: watch one task, or all of a queue or a key")
}

/// Whether tasks that stand like this have ended.
pub(crate) fn is_over(state: TaskState) -> bool {
    match state {
        TaskState::Succeeded | TaskState::Failed | TaskState::Canceled | TaskState::Expired => true,
        TaskState::Queued | TaskState::Running | TaskState::Scheduled | TaskState::Unspecified => false,
    }
}

/// Whether tasks that stand like this have yet to start.
fn is_waiting(state: TaskState) -> bool {
    match state {
        TaskState::Queued | TaskState::Scheduled => true,
        TaskState::Running
        | TaskState::Succeeded
        | TaskState::Failed
        | TaskState::Canceled
        | TaskState::Expired
        | TaskState::Unspecified => false,
    }
}

/// What decides when a task starts.
fn wanted(task: &Task) -> Wanted {
    Wanted { task: task.id, lane: task.lane, place: task.place, key: task.key.clone() }
}

/// To whoever asks for a task that is not there.
fn not_there(id: &str, task: TaskId) -> Refusal {
    Refusal::not_found(match task.is_interactive() {
        true => format!(
            "task {id} is interactive: there is no record of it; while it runs it can be talked to, and canceled"
        ),
        false => format!("task {id} does not exist, or is not remembered"),
    })
}

/// To whoever got an answer to something else.
pub(crate) fn no_such_answer() -> Refusal {
    Refusal::new(Kind::Internal, "", "the shard answered something else than it was asked; this is a bug")
}

/// A task as a client asks for it, in its queue.
fn new_task(queue: &QueueName, task: v1::NewTask, backoff: Backoff) -> Result<NewTask, Refusal> {
    let name = unique_key(queue, &task.unique_key);
    let mut new = convert::new_task_in(task, backoff)?;
    if let Some(unique) = &mut new.unique {
        unique.key = name;
    }
    Ok(new)
}

/// A task's unique name, with its queue's. Queues' names do not begin with this byte, so no request has the same.
fn unique_key(queue: &QueueName, name: &str) -> RequestKey {
    RequestKey(xxh3_128(&[&[0], queue.as_str().as_bytes(), &[0], name.as_bytes()].concat()))
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

pub(crate) fn unavailable(why: &StoreError) -> Refusal {
    warn!(%why, "a client's read failed");
    Refusal::new(Kind::Unavailable, "", format!("{why}; send this again in a moment")).after(500)
}

/// What became of a task, besides how it stands.
fn say_history(told: &mut v1::Task, history: &History) {
    if let Some(end) = &history.end {
        say_end(told, end);
        told.replayed_as = history.replayed_as.map_or_else(String::new, |id| convert::task_id(SHARD, id));
    }
    let last = history.end.iter().filter_map(|end| end.last.as_ref());
    told.tries = history.tries.iter().chain(last).map(convert::tried).collect();
}

/// A task on the wire. How one has ended is not known here.
pub(crate) fn to_wire(explained: Explained) -> v1::Task {
    let Explained { task, queue, standing, seat, progress, holds, time } = explained;
    let mut wire = v1::Task {
        id: convert::task_id(SHARD, task.id),
        queue,
        key: task.key.as_str().into(),
        priority: task.lane.priority.0.into(),
        attempt: task.attempt.into(),
        max_attempts: task.max_attempts.into(),
        accepted_ms: task.accepted.0,
        payload_bytes: task.payload.len() as u64,
        files: convert::file_infos(&task.files),
        max_duration_ms: Some(task.max_duration_ms()).filter(|ms| *ms > 0),
        content_type: task.content_type.as_str().into(),
        replay_of: task.replay_of.map_or_else(String::new, |id| convert::task_id(SHARD, id)),
        ..v1::Task::default()
    };
    if let Some(terms) = &task.terms {
        wire.expires_at_ms = terms.expires.map(|at| at.0);
        wire.attach_ttl_ms = (terms.attach_ms > 0).then_some(terms.attach_ms);
        wire.expected_ms = (terms.expected_ms > 0).then_some(terms.expected_ms);
    }
    match standing {
        Standing::Running { stopping, .. } => {
            wire.state = v1::TaskState::Running.into();
            wire.seat = seat.map_or_else(String::new, |seat| seat.as_str().into());
            wire.stopping = stopping;
            wire.progress = progress;
            time.say(&mut wire);
        }
        Standing::Waiting { ahead, .. } => {
            wire.state = v1::TaskState::Queued.into();
            wire.hold = holds.first().map_or_else(String::new, |hold| hold.message.clone());
            wire.holds = holds;
            let (ahead, exact) = match ahead {
                Ahead::Exactly(n) => (n, true),
                Ahead::AtLeast(n) => (n, false),
            };
            wire.ahead = Some(ahead as u64);
            wire.ahead_is_exact = exact;
        }
        Standing::Scheduled { due } => {
            wire.state = v1::TaskState::Scheduled.into();
            wire.due_ms = Some(due.0);
        }
        Standing::Over | Standing::Gone => {}
    }
    wire
}

fn answer<T>(result: Result<T, Refusal>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|refusal| errors::status(&refusal))
}

#[tonic::async_trait]
impl<S: Store + Clone + 'static> Client for Clients<S> {
    type WatchStream = Watching;
    type AttachStream = Attaching;

    async fn attach(
        &self,
        request: Request<Streaming<v1::AttachRequest>>,
    ) -> Result<Response<Attaching>, Status> {
        let mut incoming = request.into_inner();
        let open = opened(&mut incoming).await.map_err(|refusal| errors::status(&refusal))?;
        let session = self.interactive(open).await.map_err(|refusal| errors::status(&refusal))?;
        let (answers, attaching) = Answers::new();
        let source = Asks { incoming, listens: answers.last.clone(), ended: false };
        tokio::spawn(relay(session, source, answers));
        Ok(Response::new(attaching))
    }

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

    async fn file(&self, request: Request<v1::FileRequest>) -> Result<Response<v1::File>, Status> {
        answer(self.file(request.into_inner()).await)
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

    async fn cancel_many(
        &self,
        request: Request<v1::ManyRequest>,
    ) -> Result<Response<v1::ManyResponse>, Status> {
        answer(self.many(Many::Cancel, request.into_inner()).await)
    }

    async fn shorten(
        &self,
        request: Request<v1::ShortenRequest>,
    ) -> Result<Response<v1::ShortenResponse>, Status> {
        answer(self.shorten(request.into_inner()).await)
    }

    async fn replay(
        &self,
        request: Request<v1::ReplayRequest>,
    ) -> Result<Response<v1::ReplayResponse>, Status> {
        answer(self.replay(&request.into_inner().id).await)
    }

    async fn replay_many(
        &self,
        request: Request<v1::ManyRequest>,
    ) -> Result<Response<v1::ManyResponse>, Status> {
        answer(self.many(Many::Replay, request.into_inner()).await)
    }

    async fn set_queue(
        &self,
        request: Request<v1::SetQueueRequest>,
    ) -> Result<Response<v1::SetQueueResponse>, Status> {
        answer(self.set_queue(request.into_inner()).await)
    }

    async fn set_key(
        &self,
        request: Request<v1::SetKeyRequest>,
    ) -> Result<Response<v1::SetKeyResponse>, Status> {
        answer(self.set_key(request.into_inner()).await)
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

    async fn drain_worker(
        &self,
        request: Request<v1::DrainWorkerRequest>,
    ) -> Result<Response<v1::DrainWorkerResponse>, Status> {
        answer(self.drain_worker(&request.into_inner().seat).await)
    }

    async fn give_up_worker(
        &self,
        request: Request<v1::GiveUpWorkerRequest>,
    ) -> Result<Response<v1::GiveUpWorkerResponse>, Status> {
        answer(self.give_up_worker(&request.into_inner().seat).await)
    }

    async fn open_gate(
        &self,
        _: Request<v1::OpenGateRequest>,
    ) -> Result<Response<v1::OpenGateResponse>, Status> {
        answer(self.open_gate().await)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_last_word_reaches_also_who_reads_slowly() {
        let (mut answers, mut attaching) = Answers::new();
        for _ in 0..ANSWERS {
            answers.send(ToClient::Stdout("a".into())).await.unwrap();
        }
        let closing = answers.close(v1::AttachClosed::default());
        tokio::time::timeout(Duration::from_secs(5), closing).await.unwrap_err();
        for _ in 0..ANSWERS {
            let said = attaching.next().await.unwrap().unwrap().message.unwrap();
            assert_eq!(said, ToClient::Stdout("a".into()));
        }
        let said = attaching.next().await.unwrap().unwrap().message.unwrap();
        assert_eq!(said, ToClient::Closed(v1::AttachClosed::default()));
        assert!(attaching.next().await.is_none());
        // Who hears it is not waited for.
        let (answers, mut attaching) = Answers::new();
        let heard = tokio::spawn(async move { attaching.next().await.unwrap().is_err() });
        answers.refuse(Refusal::invalid("stdin", "is wrong")).await;
        assert!(heard.await.unwrap());
    }
}
