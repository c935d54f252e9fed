//! Many callers, few calls. Tasks that are submitted at about the same time go to the server together: what one
//! call costs is shared, and each caller still gets its task's id, and is told when the task is on disk.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use evenhand_api::v1;
use evenhand_core::refusal::Kind;
use evenhand_core::{Refusal, bounds};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Client, NewTask};

/// How tasks are gathered. A call is sent when it has so many tasks or bytes, or when its first task has waited for
/// so long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Most tasks in a call; at most 10,000.
    pub tasks: usize,
    /// Most bytes in a call; at most 16 MiB. A task that is larger goes alone.
    pub bytes: usize,
    /// How long a task waits for others.
    pub linger: Duration,
    /// Most calls on their way at once. With more than one, tasks may be accepted in another order than they came.
    pub calls: usize,
}

impl Default for Batching {
    /// 1,000 tasks, 1 MiB, 2 ms, 4 calls.
    fn default() -> Batching {
        Batching { tasks: 1_000, bytes: 1024 * 1024, linger: Duration::from_millis(2), calls: 4 }
    }
}

/// Gathers tasks into calls. Cheap to clone; all clones gather into the same calls.
///
/// It holds a bounded number of tasks and bytes: beyond that, callers wait. Tasks that are gathered together are
/// accepted or refused each by itself, as if it had been sent alone; one that is out of bounds is refused before it is
/// gathered. When the last clone is dropped, what was handed
/// in is still sent, as long as the runtime lives; [`Batcher::close`] waits for it.
///
/// ```no_run
/// # async fn example(client: evenhand::Client) -> Result<(), evenhand::Refusal> {
/// use evenhand::NewTask;
///
/// let batch = client.batch("mail");
/// // From one place: hand in many, then look what became of them.
/// let mut receipts = Vec::new();
/// for n in 0..10_000 {
///     receipts.push(batch.push(NewTask::json(&n)?).await?);
/// }
/// for receipt in receipts {
///     println!("{}", receipt.await?);
/// }
/// // From many places at once: each hands in one and waits for its id.
/// let id = batch.enqueue(NewTask::new("hello")).await?;
/// batch.close().await;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Batcher {
    waiting: mpsc::Sender<Waiting>,
    room: Arc<Semaphore>,
    /// Most bytes of `room` that one task takes.
    most: usize,
    /// True: take no more. The other end is dropped when everything has been answered.
    closing: Arc<watch::Sender<bool>>,
}

/// A task that waits for its call, and for the answer.
#[derive(Debug)]
struct Waiting {
    task: v1::NewTask,
    bytes: usize,
    answer: oneshot::Sender<Result<String, Refusal>>,
    _room: OwnedSemaphorePermit,
}

/// The answer to come for a task that was handed in: await it for the task's id.
#[derive(Debug)]
#[must_use = "the task's id, or why it was refused, comes when this is awaited"]
pub struct Receipt {
    answer: oneshot::Receiver<Result<String, Refusal>>,
}

impl Future for Receipt {
    type Output = Result<String, Refusal>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let lost = || Refusal::new(Kind::Unavailable, "", "the runtime ended before the task was answered");
        Pin::new(&mut self.answer).poll(context).map(|answer| answer.unwrap_or_else(|_| Err(lost())))
    }
}

impl Batcher {
    pub(super) fn begin(client: Client, queue: String, batching: Batching) -> Batcher {
        let Batching { tasks, bytes, linger, calls } = batching;
        let batching = Batching {
            tasks: tasks.clamp(1, bounds::TASKS_PER_ENQUEUE),
            bytes: bytes.clamp(1, bounds::PAYLOAD_BYTES_PER_ENQUEUE),
            linger,
            calls: calls.clamp(1, 64),
        };
        let (waiting, gathered) = mpsc::channel(batching.tasks);
        // One call's worth gathers while the others are on their way.
        let room = Arc::new(Semaphore::new(batching.bytes * (batching.calls + 1)));
        let (closing, closed) = watch::channel(false);
        let most = batching.bytes;
        tokio::spawn(Gatherer { client, queue: queue.into(), batching, gathered, closed }.run());
        Batcher { waiting, room, most, closing: Arc::new(closing) }
    }

    /// Submits a task and returns its id. It is durable then. A caller that gives up waiting may still have
    /// submitted it.
    pub async fn enqueue(&self, task: NewTask) -> Result<String, Refusal> {
        self.push(task).await?.await
    }

    /// Hands a task in, and waits only for room. The receipt is for its id. A task that no server would take is
    /// refused here.
    pub async fn push(&self, task: NewTask) -> Result<Receipt, Refusal> {
        task.check()?;
        let NewTask { task } = task;
        let bytes = task.encoded_len();
        let closed = || Refusal::new(Kind::Conflict, "", "the batcher is closed; begin another one");
        let room = self.room.clone().acquire_many_owned(bytes.clamp(1, self.most) as u32);
        let room = room.await.map_err(|_| closed())?;
        let (answer, answered) = oneshot::channel();
        let waiting = Waiting { task, bytes, answer, _room: room };
        self.waiting.send(waiting).await.map_err(|_| closed())?;
        Ok(Receipt { answer: answered })
    }

    /// Takes no more, from any clone, and returns when all that was handed in is answered.
    pub async fn close(self) {
        self.closing.send_replace(true);
        self.closing.closed().await;
    }
}

/// Makes the calls.
struct Gatherer {
    client: Client,
    queue: Arc<str>,
    batching: Batching,
    gathered: mpsc::Receiver<Waiting>,
    closed: watch::Receiver<bool>,
}

impl Gatherer {
    async fn run(mut self) {
        let mut calls = JoinSet::new();
        let mut first = self.next().await;
        while let Some(waiting) = first.take() {
            let due = Instant::now() + self.batching.linger;
            let mut bytes = waiting.bytes;
            let mut batch = vec![waiting];
            while batch.len() < self.batching.tasks {
                let free = calls.len() < self.batching.calls;
                tokio::select! {
                    biased;
                    more = self.next() => match more {
                        Some(waiting) if bytes + waiting.bytes <= self.batching.bytes => {
                            bytes += waiting.bytes;
                            batch.push(waiting);
                        }
                        // It begins the next call.
                        more => {
                            first = more;
                            break;
                        }
                    },
                    Some(_) = calls.join_next() => {}
                    // While all calls are on their way, more can gather.
                    () = tokio::time::sleep_until(due), if free => break,
                }
            }
            while calls.len() >= self.batching.calls {
                calls.join_next().await;
            }
            calls.spawn(send(self.client.clone(), self.queue.clone(), batch));
            if first.is_none() {
                first = self.next().await;
            }
        }
        while calls.join_next().await.is_some() {}
    }

    /// The next task; none when it is closed and empty.
    async fn next(&mut self) -> Option<Waiting> {
        let closed = async { drop(self.closed.wait_for(|closed| *closed).await) };
        tokio::select! {
            biased;
            waiting = self.gathered.recv() => return waiting,
            () = closed => self.gathered.close(),
        }
        self.gathered.recv().await
    }
}

/// Sends tasks in one call, and answers each. A server takes all tasks of a call or none: one that it cannot take, which
/// is rare since each was checked before, is answered by itself, and the others are sent again without it.
async fn send(client: Client, queue: Arc<str>, mut batch: Vec<Waiting>) {
    while !batch.is_empty() {
        let tasks = batch.iter().map(|waiting| waiting.task.clone().into()).collect();
        match client.enqueue_all(&queue, tasks).await {
            Ok(enqueued) => {
                for (waiting, id) in batch.drain(..).zip(enqueued.ids) {
                    let _ = waiting.answer.send(Ok(id));
                }
            }
            Err(refusal) => match culprit(&refusal).filter(|(at, _)| *at < batch.len()) {
                Some((at, refusal)) => {
                    let _ = batch.remove(at).answer.send(Err(refusal));
                }
                None => {
                    for waiting in batch.drain(..) {
                        let _ = waiting.answer.send(Err(refusal.clone()));
                    }
                }
            },
        }
    }
}

/// Which task a refusal is about, and what it says to its caller: `tasks[3].key` is the `key` of task 3.
fn culprit(refusal: &Refusal) -> Option<(usize, Refusal)> {
    let (at, field) = refusal.field.strip_prefix("tasks[")?.split_once(']')?;
    let field = field.strip_prefix('.').unwrap_or(field).into();
    Some((at.parse().ok()?, Refusal { field, ..refusal.clone() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_to_the_one_it_is_about() {
        let about = |field: &str| culprit(&Refusal::invalid(field, "no")).map(|(at, why)| (at, why.field));
        assert_eq!(about("tasks[12].key"), Some((12, "key".into())));
        assert_eq!(about("tasks[0]"), Some((0, String::new())));
        assert_eq!(about("queue"), None);
        assert_eq!(about("tasks"), None);
    }
}
