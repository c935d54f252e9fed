//! A client for programs without async: the same operations, each of which returns when it is done.
//!
//! ```no_run
//! use evenhand::{NewTask, blocking::Client};
//!
//! let client = Client::new("http://127.0.0.1:7400")?;
//! let id = client.enqueue("mail", NewTask::new("hello").key("acme"))?;
//! println!("{:?}", client.wait(&id)?.state());
//! # Ok::<(), evenhand::Refusal>(())
//! ```
//!
//! The connection lives on a thread of its own, in a small runtime. A thread of an async runtime must not wait: there,
//! every operation returns a refusal that says so, also in `spawn_blocking`. Use [`crate::Client`] there.

use std::iter::FusedIterator;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use evenhand_api::v1;
use evenhand_core::Refusal;
use evenhand_core::refusal::Kind;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::client::{
    self, Batching, Changed, Enqueued, Filter, KeySettings, NewTask, Payload, QueueSettings, Task,
};

/// A connection to a server. Cheap to clone, and may be used by many threads at once.
#[derive(Clone, Debug)]
pub struct Client {
    client: client::Client,
    thread: Arc<Thread>,
}

/// The thread that moves the bytes, until this is dropped.
#[derive(Debug)]
struct Thread {
    runtime: Handle,
    _stop: oneshot::Sender<()>,
}

impl Thread {
    fn begin() -> Result<Thread, Refusal> {
        let failed = |error: std::io::Error| {
            Refusal::new(Kind::Internal, "", format!("no thread for the connection: {error}"))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (_stop, stopped) = oneshot::channel::<()>();
        let work = move || drop(runtime.block_on(stopped));
        std::thread::Builder::new().name("evenhand".into()).spawn(work).map_err(failed)?;
        Ok(Thread { runtime: handle, _stop })
    }

    /// Waits for an operation, which goes on in this thread.
    fn wait<T>(&self, operation: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
        may_wait()?;
        self.runtime.block_on(operation)
    }
}

/// Whether this thread may wait: one that others' tasks need must not.
fn may_wait() -> Result<(), Refusal> {
    match Handle::try_current() {
        Ok(_) => Err(Refusal::invalid(
            "client",
            "is a blocking one, used in an async runtime; use evenhand::Client there, or a thread of its own",
        )),
        Err(_) => Ok(()),
    }
}

impl Client {
    /// A client of this server. It connects when it is first used.
    pub fn new(server: &str) -> Result<Client, Refusal> {
        may_wait()?;
        let thread = Thread::begin()?;
        let client = {
            let _inside = thread.runtime.enter();
            client::Client::new(server)?
        };
        Ok(Client { client, thread: Arc::new(thread) })
    }

    /// How long a call may take, with all its tries: see [`crate::Client::patience`].
    pub fn patience(mut self, patience: Duration) -> Client {
        self.client = self.client.patience(patience);
        self
    }

    /// Submits one task and returns its id. It is durable then.
    pub fn enqueue(&self, queue: &str, task: NewTask) -> Result<String, Refusal> {
        self.thread.wait(self.client.enqueue(queue, task))
    }

    /// Submits tasks, all or none.
    pub fn enqueue_all(&self, queue: &str, tasks: Vec<NewTask>) -> Result<Enqueued, Refusal> {
        self.thread.wait(self.client.enqueue_all(queue, tasks))
    }

    /// The same, as a request of this name: said again within ten minutes, it is the same request.
    pub fn enqueue_once(
        &self,
        queue: &str,
        tasks: Vec<NewTask>,
        request_id: String,
    ) -> Result<Enqueued, Refusal> {
        self.thread.wait(self.client.enqueue_once(queue, tasks, request_id))
    }

    /// Gathers tasks for a queue into calls, for many threads that submit one at a time.
    pub fn batch(&self, queue: impl Into<String>) -> Batcher {
        self.batch_with(queue, Batching::default())
    }

    /// The same, with other limits than the usual ones.
    pub fn batch_with(&self, queue: impl Into<String>, batching: Batching) -> Batcher {
        let _inside = self.thread.runtime.enter();
        let batcher = self.client.batch_with(queue, batching);
        Batcher { gathering: Arc::new(Gathering { batcher, thread: self.thread.clone() }) }
    }

    /// How a task stands.
    pub fn get(&self, id: &str) -> Result<Task, Refusal> {
        self.thread.wait(self.client.get(id))
    }

    /// What a task was submitted with, as long as it is remembered.
    pub fn payload(&self, id: &str) -> Result<Payload, Refusal> {
        self.thread.wait(self.client.payload(id))
    }

    /// What is in a file that a task was submitted with, as long as it is remembered.
    pub fn file(&self, id: &str, name: &str) -> Result<Bytes, Refusal> {
        self.thread.wait(self.client.file(id, name))
    }

    /// Waits until a task has ended, and says how.
    pub fn wait(&self, id: &str) -> Result<Task, Refusal> {
        self.thread.wait(self.client.wait(id))
    }

    /// Everything that happens to a task, from how it stands now to its end.
    pub fn watch(&self, id: &str) -> Result<Watch, Refusal> {
        self.watching(self.client.watch(id))
    }

    /// Everything that happens to the tasks of a filter, from now on.
    pub fn watch_all(&self, filter: Filter) -> Result<Watch, Refusal> {
        self.watching(self.client.watch_all(filter))
    }

    /// The same, as the wire has it: with `after`, the id of an event, it goes on from there.
    pub fn watch_from(&self, request: v1::WatchRequest) -> Result<Watch, Refusal> {
        self.watching(self.client.watch_from(request))
    }

    fn watching(
        &self,
        watch: impl Future<Output = Result<client::Watch, Refusal>>,
    ) -> Result<Watch, Refusal> {
        Ok(Watch { watch: self.thread.wait(watch)?, thread: self.thread.clone(), over: false })
    }

    /// Cancels a task. True: it was running, and is being stopped.
    pub fn cancel(&self, id: &str) -> Result<bool, Refusal> {
        self.thread.wait(self.client.cancel(id))
    }

    /// Gives a task less time, whether it waits or runs: see [`crate::Client::shorten`].
    pub fn shorten(&self, id: &str, max_duration: Duration) -> Result<(), Refusal> {
        self.thread.wait(self.client.shorten(id, max_duration))
    }

    /// Cancels all tasks of a filter that have not ended, step by step: see [`crate::Client::cancel_many`].
    pub fn cancel_many(&self, filter: Filter) -> Changing {
        self.changing(self.client.cancel_many(filter))
    }

    /// Runs an ended task again, as another task, whose id it returns: see [`crate::Client::replay`].
    pub fn replay(&self, id: &str) -> Result<String, Refusal> {
        self.thread.wait(self.client.replay(id))
    }

    /// Runs all ended tasks of a filter again, step by step: see [`crate::Client::replay_many`].
    pub fn replay_many(&self, filter: Filter) -> Changing {
        self.changing(self.client.replay_many(filter))
    }

    fn changing(&self, changing: client::Changing) -> Changing {
        Changing { changing, thread: self.thread.clone(), over: false }
    }

    /// A page of tasks, by id: those that have not ended, and those whose end is remembered.
    pub fn list(&self, request: impl Into<v1::ListRequest>) -> Result<v1::ListResponse, Refusal> {
        self.thread.wait(self.client.list(request))
    }

    /// All tasks of a filter, one after the other.
    pub fn list_all(&self, filter: Filter) -> Listing {
        Listing { listing: self.client.list_all(filter), thread: self.thread.clone(), over: false }
    }

    /// Every queue.
    pub fn queues(&self) -> Result<Vec<v1::Queue>, Refusal> {
        self.thread.wait(self.client.queues())
    }

    /// One queue, its settings, and the shares of at most so many keys.
    pub fn queue(&self, name: &str, keys: u32) -> Result<v1::QueueResponse, Refusal> {
        self.thread.wait(self.client.queue(name, keys))
    }

    /// Changes settings of a queue: see [`crate::Client::set_queue`].
    pub fn set_queue(&self, name: &str, settings: QueueSettings) -> Result<v1::SetQueueResponse, Refusal> {
        self.thread.wait(self.client.set_queue(name, settings))
    }

    /// Pauses a queue: nothing of it is started any more. What runs goes on.
    pub fn pause(&self, queue: &str) -> Result<(), Refusal> {
        self.thread.wait(self.client.pause(queue))
    }

    /// Resumes a paused queue.
    pub fn resume(&self, queue: &str) -> Result<(), Refusal> {
        self.thread.wait(self.client.resume(queue))
    }

    /// Changes what a key of a queue has of its own: see [`crate::Client::set_key`].
    pub fn set_key(&self, queue: &str, key: &str, settings: KeySettings) -> Result<(), Refusal> {
        self.thread.wait(self.client.set_key(queue, key, settings))
    }

    /// Gives a key of a queue a weight: see [`crate::Client::set_key_weight`].
    pub fn set_key_weight(&self, queue: &str, key: &str, weight: f64) -> Result<(), Refusal> {
        self.thread.wait(self.client.set_key_weight(queue, key, weight))
    }

    /// Pauses a key of a queue: its tasks wait. What runs goes on.
    pub fn pause_key(&self, queue: &str, key: &str) -> Result<(), Refusal> {
        self.thread.wait(self.client.pause_key(queue, key))
    }

    /// Lets a paused key go on.
    pub fn resume_key(&self, queue: &str, key: &str) -> Result<(), Refusal> {
        self.thread.wait(self.client.resume_key(queue, key))
    }

    /// Every worker.
    pub fn workers(&self) -> Result<Vec<v1::Worker>, Refusal> {
        self.thread.wait(self.client.workers())
    }

    /// Asks a worker to take no more work, and to end when what it runs has ended.
    pub fn drain_worker(&self, seat: &str) -> Result<v1::DrainWorkerResponse, Refusal> {
        self.thread.wait(self.client.drain_worker(seat))
    }

    /// Counts a worker as dead, with all that it ran: see [`crate::Client::give_up_worker`] for what that risks.
    pub fn give_up_worker(&self, seat: &str) -> Result<v1::GiveUpWorkerResponse, Refusal> {
        self.thread.wait(self.client.give_up_worker(seat))
    }

    /// Opens the start gate by hand: see [`crate::Client::open_gate`] for what that risks.
    pub fn open_gate(&self) -> Result<v1::OpenGateResponse, Refusal> {
        self.thread.wait(self.client.open_gate())
    }

    /// The server.
    pub fn status(&self) -> Result<v1::StatusResponse, Refusal> {
        self.thread.wait(self.client.status())
    }
}

/// Events as they happen: see [`crate::Watch`]. An error is the last item; [`Client::watch_from`] goes on after the last
/// event that was seen.
#[derive(Debug)]
pub struct Watch {
    watch: client::Watch,
    thread: Arc<Thread>,
    /// The last item was given.
    over: bool,
}

impl Iterator for Watch {
    type Item = Result<v1::TaskEvent, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = (!self.over).then(|| self.thread.wait(self.watch.next()).transpose()).flatten();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl FusedIterator for Watch {}

/// The tasks of a filter: see [`Client::list_all`]. An error is the last item.
#[derive(Debug)]
pub struct Listing {
    listing: client::Listing,
    thread: Arc<Thread>,
    /// The last item was given.
    over: bool,
}

impl Iterator for Listing {
    type Item = Result<Task, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = (!self.over).then(|| self.thread.wait(self.listing.next()).transpose()).flatten();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl FusedIterator for Listing {}

/// Cancels or replays tasks, a step with each item: see [`Client::cancel_many`]. An error is the last item.
///
/// ```no_run
/// use evenhand::{Filter, TaskState, blocking::Client};
///
/// let client = Client::new("http://127.0.0.1:7400")?;
/// for step in client.replay_many(Filter::all().queue("mail").state(TaskState::Failed)) {
///     println!("{} are run again", step?.tasks);
/// }
/// # Ok::<(), evenhand::Refusal>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is changed until the steps are asked for"]
pub struct Changing {
    changing: client::Changing,
    thread: Arc<Thread>,
    /// The last item was given.
    over: bool,
}

impl Changing {
    /// Makes all steps, and says what they changed together.
    pub fn all(self) -> Result<Changed, Refusal> {
        self.thread.wait(self.changing.all())
    }
}

impl Iterator for Changing {
    type Item = Result<Changed, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = (!self.over).then(|| self.thread.wait(self.changing.next()).transpose()).flatten();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl FusedIterator for Changing {}

/// Gathers tasks into calls: see [`crate::Batcher`]. What was handed in is sent before the last clone is gone, if
/// that is not within an async runtime; [`Batcher::close`] waits for it.
#[derive(Clone, Debug)]
pub struct Batcher {
    gathering: Arc<Gathering>,
}

#[derive(Debug)]
struct Gathering {
    batcher: client::Batcher,
    thread: Arc<Thread>,
}

impl Batcher {
    /// Submits a task and returns its id. It is durable then.
    pub fn enqueue(&self, task: NewTask) -> Result<String, Refusal> {
        self.gathering.thread.wait(self.gathering.batcher.enqueue(task))
    }

    /// Hands a task in, and waits only for room. The receipt is for its id. A task that no server would take is
    /// refused here.
    pub fn push(&self, task: NewTask) -> Result<Receipt, Refusal> {
        let thread = self.gathering.thread.clone();
        Ok(Receipt { receipt: thread.wait(self.gathering.batcher.push(task))?, thread })
    }

    /// Takes no more, from any clone, and returns when all that was handed in is answered.
    pub fn close(self) -> Result<(), Refusal> {
        self.gathering.close()
    }
}

impl Gathering {
    fn close(&self) -> Result<(), Refusal> {
        let closed = self.batcher.clone().close();
        self.thread.wait(async {
            closed.await;
            Ok(())
        })
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        // Within a runtime nobody may wait: what is left is sent as long as the client lives.
        let _ = self.close();
    }
}

/// The answer to come for a task that was handed in.
#[derive(Debug)]
#[must_use = "the task's id, or why it was refused, comes when this is waited for"]
pub struct Receipt {
    receipt: client::Receipt,
    thread: Arc<Thread>,
}

impl Receipt {
    /// Waits for the task's id.
    pub fn wait(self) -> Result<String, Refusal> {
        self.thread.wait(self.receipt)
    }
}
