//! What goes into a shard and what comes out. Inputs are facts; effects are what the shell must do, and
//! every effect may be done as soon as it is emitted: what has to wait for a commit is emitted when that
//! commit is acknowledged.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::admission::Rate;
use crate::backlog::{Charge, Cost, Level, Weight};
use crate::bounds;
use crate::change::{Change, EndRecord, MemberRecord, Row, Settings, Task, TimerRow};
use crate::life::{Backoff, End, Ending, Terms};
use crate::names::{
    CommitId, ContentType, Fence, FileName, Key, LaneId, LoadId, Millis, Priority, QueueName, RequestId,
    RequestKey, Seat, StoreId, TaskId, WorkerId,
};
use crate::refusal::Refusal;

/// A task as a caller asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTask {
    /// Whom to charge.
    pub key: Key,
    /// The weight of its key from now on, unless the key has an override.
    pub weight: Weight,
    /// Its priority.
    pub priority: Priority,
    /// What it takes of its key's share, where tasks are shared.
    pub cost: Cost,
    /// How often it may be tried; the queue decides if it does not say.
    pub max_attempts: Option<u16>,
    /// How long it waits between its tries; the queue decides if it does not say.
    pub backoff: Option<Backoff>,
    /// When it may start.
    pub start: Start,
    /// After so many milliseconds no run of it is started any more; 0 if it never is too late.
    pub expires_ms: u64,
    /// It is canceled when nobody has watched it for so many milliseconds; 0 if it does not care.
    pub attach_ms: u64,
    /// The same name again within its window is the same task.
    pub unique: Option<Unique>,
    /// How long a run of it takes, as the caller thinks, in milliseconds; 0 if it does not say. Counts where keys
    /// share time.
    pub expected_ms: u64,
    /// How long one run may take, in milliseconds; 0 if it may take as long as it likes.
    pub max_duration_ms: u64,
    /// What the payload is.
    pub content_type: ContentType,
    /// The caller's bytes.
    pub payload: Arc<[u8]>,
    /// Its input files; most tasks have none.
    pub files: Arc<[File]>,
}

/// An input file of a task. It goes wherever the payload goes, and is kept as long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// What it is called; no other file of its task is.
    pub name: FileName,
    /// What is in it.
    pub bytes: Arc<[u8]>,
}

impl File {
    /// Bytes that a payload and files have together.
    pub fn bytes_with(payload: &[u8], files: &[File]) -> usize {
        payload.len() + files.iter().map(|file| file.bytes.len()).sum::<usize>()
    }

    /// Whether a task may have these files, by their names and sizes, beside a payload of so many bytes: callers may
    /// keep the bytes apart.
    pub fn check_all<'a>(
        payload_bytes: usize,
        files: impl ExactSizeIterator<Item = (&'a str, usize)>,
    ) -> Result<(), Refusal> {
        if files.len() > bounds::FILES_PER_TASK {
            let (is, most) = (files.len(), bounds::FILES_PER_TASK);
            return Err(Refusal::too_large("files", format!("has {is} files; at most {most} are allowed")));
        }
        let mut names = BTreeSet::new();
        let mut all = payload_bytes;
        for (n, (name, bytes)) in files.enumerate() {
            if bytes > bounds::FILE_BYTES {
                let most = bounds::FILE_BYTES;
                let text = format!(
                    "has {bytes} bytes, at most {most} are allowed; store it elsewhere and send its address"
                );
                return Err(Refusal::too_large(format!("files[{n}]"), text));
            }
            if !names.insert(name) {
                let text = format!("{name:?} is the name of another file too; give each its own");
                return Err(Refusal::invalid(format!("files[{n}].name"), text));
            }
            all += bytes;
        }
        if all > bounds::INPUT_BYTES && !names.is_empty() {
            let most = bounds::INPUT_BYTES;
            let text = format!(
                "have {all} bytes together with the payload, at most {most} are allowed; store some of them \
                 elsewhere and send their addresses"
            );
            return Err(Refusal::too_large("files", text));
        }
        Ok(())
    }
}

/// When a task may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// When its turn comes.
    #[default]
    Now,
    /// Not before so many milliseconds have passed.
    After(u64),
    /// Not before this time.
    At(Millis),
}

/// A name that makes a task the only one of its kind for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unique {
    /// The name, with its queue's: two queues are two tasks.
    pub key: RequestKey,
    /// How long it counts, in milliseconds.
    pub window_ms: u64,
}

/// What a run needs beyond its record: what only the store and the worker know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The caller's bytes.
    pub payload: Arc<[u8]>,
    /// What they are.
    pub content_type: ContentType,
    /// Its input files.
    pub files: Arc<[File]>,
}

impl NewTask {
    /// A plain task of this key.
    pub fn new(key: Key) -> NewTask {
        NewTask {
            key,
            weight: Weight::ONE,
            priority: Priority::DEFAULT,
            cost: Cost::ONE,
            max_attempts: None,
            backoff: None,
            start: Start::Now,
            expires_ms: 0,
            attach_ms: 0,
            unique: None,
            expected_ms: 0,
            max_duration_ms: 0,
            content_type: ContentType::default(),
            payload: Arc::from([]),
            files: Arc::default(),
        }
    }

    /// Whether it may be accepted, with a payload of so many bytes: callers may keep that apart.
    pub fn check(&self, payload_bytes: usize) -> Result<(), Refusal> {
        if self.priority.0 >= bounds::PRIORITIES {
            let last = bounds::PRIORITIES - 1;
            return Err(Refusal::invalid(
                "priority",
                format!("{} is out of range; use 0 (first) to {last}", self.priority),
            ));
        }
        let range = |field: &str, is: u64, from: u64, most: u64| {
            let wrong = || Refusal::invalid(field, format!("{is} is out of range; use {from} to {most}"));
            if (from..=most).contains(&is) { Ok(()) } else { Err(wrong()) }
        };
        if let Some(attempts) = self.max_attempts {
            range("retry.max_attempts", attempts.into(), 1, bounds::ATTEMPTS.into())?;
        }
        if let Some(backoff) = self.backoff {
            backoff.check().map_err(|refusal| refusal.within("retry"))?;
        }
        if self.max_duration_ms > 0 {
            range("max_duration_ms", self.max_duration_ms, 1, bounds::DURATION_MS)?;
        }
        if self.expected_ms > 0 {
            range("expected_ms", self.expected_ms, 1, Cost::MAX.thousandths().into())?;
        }
        if let Start::After(ms) = self.start {
            range("delay_ms", ms, 0, bounds::DELAY_MS)?;
        }
        if self.expires_ms > 0 {
            range("expires_ms", self.expires_ms, 1, bounds::DELAY_MS)?;
        }
        if self.attach_ms > 0 {
            range("attach_ttl_ms", self.attach_ms, bounds::ATTACH_MIN_MS, bounds::ATTACH_MS)?;
        }
        if let Some(unique) = self.unique {
            range("unique_ms", unique.window_ms, 1, bounds::UNIQUE_MS)?;
        }
        if payload_bytes > bounds::PAYLOAD_BYTES {
            let (is, most) = (payload_bytes, bounds::PAYLOAD_BYTES);
            return Err(Refusal::too_large(
                "payload",
                format!(
                    "has {is} bytes, at most {most} are allowed; store it elsewhere and send its address"
                ),
            ));
        }
        File::check_all(payload_bytes, self.files.iter().map(|file| (file.name.as_str(), file.bytes.len())))
    }

    /// Bytes of its payload and its files.
    pub fn input_bytes(&self) -> usize {
        File::bytes_with(&self.payload, &self.files)
    }
}

/// One try at a task, with all that a new owner needs to count it as running.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The task.
    pub task: TaskId,
    /// Its lane.
    pub lane: LaneId,
    /// Where its row stood when it was dispatched.
    pub level: Level,
    /// Whom it is charged to.
    pub key: Key,
    /// What it was charged.
    pub charge: Charge,
    /// Which try it is.
    pub attempt: u16,
    /// How many tries the task has.
    pub max_attempts: u16,
    /// How many of them were lost with their workers.
    pub lost: u8,
    /// What the task asked for beyond the ordinary.
    pub terms: Option<Arc<Terms>>,
    /// Which run it is, for ever.
    pub fence: Fence,
    /// When it was dispatched, on the clock of the owner that did.
    pub started: Millis,
    /// How long it may take as things stand, in milliseconds from its start; 0 if as long as it likes.
    pub limit_ms: u64,
}

impl Run {
    /// How long its task said that it may take, in milliseconds; 0 if it did not say.
    pub fn max_duration_ms(&self) -> u64 {
        self.terms.as_ref().map_or(0, |terms| terms.max_duration_ms)
    }
}

/// What somebody wants of an interactive task.
#[derive(Clone, Debug, PartialEq)]
pub struct InteractiveAsk {
    /// Whom its slot is counted to.
    pub key: Key,
    /// How long it may take, in milliseconds; 0 if as long as it likes.
    pub max_duration_ms: u64,
}

/// Why an interactive run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It ended by itself.
    Ended,
    /// A task needed its slot.
    Halted,
    /// Its time was up.
    TimeUp,
    /// Its worker is gone, or did not start it.
    Lost,
    /// Its client left, or somebody canceled it.
    Canceled,
}

/// What is to change of a key; what is None stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyChange {
    /// Its weight, whatever its tasks say.
    pub weight: Option<Option<Weight>>,
    /// How many of its tasks may run at once.
    pub limit: Option<Option<u32>>,
    /// How much of it may start in a second.
    pub rate: Option<Option<Rate>>,
}

/// A fact that a shard learns.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A caller wants tasks to be run: all of them or none.
    Enqueue {
        /// To answer.
        request: RequestId,
        /// The queue; made if it is new.
        queue: QueueName,
        /// The tasks.
        tasks: Vec<NewTask>,
        /// What the caller named the request: the same again is answered as the first was.
        once: Option<RequestKey>,
    },
    /// What a key of a queue has of its own is changed.
    SetKey {
        /// To answer.
        request: RequestId,
        /// The queue; made if it is new.
        queue: QueueName,
        /// The key.
        key: Key,
        /// How.
        change: KeyChange,
    },
    /// A caller wants a task to take less time, whether it waits or runs.
    Shorten {
        /// To answer.
        request: RequestId,
        /// The task.
        task: TaskId,
        /// How long a run of it may take from now on, in milliseconds.
        max_duration_ms: u64,
    },
    /// A caller wants a slot now, or to be told now that there is none.
    Interactive {
        /// To answer.
        request: RequestId,
        /// The queue.
        queue: QueueName,
        /// What it wants.
        ask: InteractiveAsk,
    },
    /// The client of an interactive run is gone.
    Hangup {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// A caller no longer wants a task to be run.
    Cancel {
        /// To answer.
        request: RequestId,
        /// The task.
        task: TaskId,
    },
    /// A caller wants an ended task to be run again, as another task.
    Replay {
        /// To answer.
        request: RequestId,
        /// The task that has ended.
        task: TaskId,
    },
    /// A queue's settings are these from now on.
    Configure {
        /// To answer.
        request: RequestId,
        /// The queue; made if it is new.
        queue: QueueName,
        /// All of them.
        settings: Settings,
        /// Only if nobody has changed them since: their version as it was read.
        version: Option<u64>,
    },
    /// A key may not run, or may again. What runs goes on.
    PauseKey {
        /// To answer.
        request: RequestId,
        /// The queue; made if it is new.
        queue: QueueName,
        /// The key.
        key: Key,
        /// It may not.
        paused: bool,
    },
    /// Somebody watches a task now, or has just ceased to.
    Watched {
        /// The task.
        task: TaskId,
        /// Somebody does.
        now: bool,
    },
    /// A worker offers this many slots in all, for these queues; said again, the newer counts.
    Slots {
        /// The worker.
        worker: WorkerId,
        /// Its slots, busy ones included.
        slots: u32,
        /// The queues it serves and how its slots are divided among them.
        queues: Vec<(QueueName, Weight)>,
    },
    /// While the gate is shut, a worker says what it runs and what ended unacknowledged.
    Report {
        /// The worker.
        worker: WorkerId,
        /// What it runs.
        running: Vec<Run>,
        /// What ended since it last heard from an owner.
        ended: Vec<(Run, End, Ending)>,
        /// The store is asked of each run before it counts; if not, the store itself has said so.
        verify: bool,
    },
    /// Whether the store has room for new tasks. It has until somebody says otherwise; while it has not,
    /// enqueues are refused and everything else goes on.
    Room {
        /// It has.
        enough: bool,
    },
    /// The start gate opens: whatever could be running has been reported or cannot be alive.
    Open,
    /// A worker did not start a run, and never will.
    Refused {
        /// The worker.
        worker: WorkerId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// A run ended. Acknowledged when that is durable; a worker repeats it until then.
    Ended {
        /// The worker.
        worker: WorkerId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// Which try it was.
        attempt: u16,
        /// How it ended.
        end: End,
        /// What it left behind.
        ending: Ending,
    },
    /// A worker is gone, and none of its runs is alive.
    Lost {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker joins, or what must be remembered of it has changed. Said before it gets any work; it is
    /// remembered until it is lost.
    Member {
        /// The worker.
        worker: WorkerId,
        /// Its seat.
        seat: Seat,
        /// What to remember.
        record: MemberRecord,
    },
    /// Nothing shall be started any more: the owner is about to stop.
    Halt,
    /// Whether the owner stops in good order.
    Mark {
        /// It does.
        stopped: bool,
    },
    /// For how long there may be workers that the store does not know of.
    Doubt {
        /// In milliseconds; None if there are none any more.
        left_ms: Option<u64>,
    },
    /// The store has no id yet: this is it.
    Identify {
        /// The id.
        store: StoreId,
    },
    /// A commit is durable. Acknowledged in order. (One that failed, or whose outcome is unknown, ends
    /// the shard: it is dropped and loaded again under a new epoch.)
    Committed {
        /// The commit.
        commit: CommitId,
    },
    /// A read of a lane returned.
    Loaded {
        /// The read.
        load: LoadId,
        /// The rows above the asked level, in order.
        rows: Vec<Row>,
        /// Nothing is above them.
        end: bool,
    },
    /// A read of the timers returned.
    TimersLoaded {
        /// The read.
        load: LoadId,
        /// The timers above the asked level, in order.
        rows: Vec<TimerRow>,
        /// Nothing is above them.
        end: bool,
    },
    /// A read of parked rows returned.
    ParkedLoaded {
        /// The read.
        load: LoadId,
        /// The rows above the asked level, in order.
        rows: Vec<Row>,
        /// Nothing is above them.
        end: bool,
    },
    /// A read of one task returned.
    TaskLoaded {
        /// The read.
        load: LoadId,
        /// The task, if there is such a one.
        task: Option<Task>,
    },
    /// A read failed.
    LoadFailed {
        /// The read.
        load: LoadId,
    },
    /// Time has passed.
    Tick,
}

/// Something the shell must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make these changes durable together, under this owner's epoch, after all earlier ones.
    Save {
        /// To acknowledge.
        commit: CommitId,
        /// What happened.
        changes: Vec<Change>,
    },
    /// Read rows of a lane.
    Load {
        /// To answer.
        load: LoadId,
        /// The lane.
        lane: LaneId,
        /// Rows above this level.
        above: Level,
        /// At most so many.
        limit: usize,
    },
    /// Read timers.
    LoadTimers {
        /// To answer.
        load: LoadId,
        /// Those above this level.
        above: Level,
        /// At most so many.
        limit: usize,
    },
    /// Read rows of a key that are parked beside a lane.
    LoadParked {
        /// To answer.
        load: LoadId,
        /// The lane.
        lane: LaneId,
        /// The key.
        key: Key,
        /// Rows above this level.
        above: Level,
        /// At most so many.
        limit: usize,
    },
    /// Read one task.
    LoadTask {
        /// To answer.
        load: LoadId,
        /// The task.
        task: TaskId,
    },
    /// Have a worker start a run.
    Start {
        /// The worker.
        worker: WorkerId,
        /// The run.
        run: Run,
        /// What it needs, if it is in memory; otherwise read the task.
        work: Option<Work>,
    },
    /// Have a worker end a run: it was canceled, or is none that counts.
    Stop {
        /// The worker.
        worker: WorkerId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// Tell a worker that a run has another time than it was told: less, always.
    Limit {
        /// The worker.
        worker: WorkerId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// How long it may take from its start, in milliseconds.
        limit_ms: u64,
        /// How long its task says that it may take, in milliseconds; 0 if it does not say.
        max_duration_ms: u64,
    },
    /// Warn the client of an interactive run: it will be halted, to make room.
    Warn {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// In so many milliseconds.
        grace_ms: u64,
    },
    /// An interactive run is over, as far as the shard is concerned: tell its client.
    InteractiveOver {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// Why.
        why: Why,
    },
    /// Tell a worker that what it offered is not accepted; nothing has changed.
    RefuseWorker {
        /// The worker.
        worker: WorkerId,
        /// Why.
        refusal: Refusal,
    },
    /// Tell a worker that the end of a run is durable.
    Acknowledge {
        /// The worker.
        worker: WorkerId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// What was said of this worker is durable.
    MemberSaved {
        /// The worker.
        worker: WorkerId,
        /// How long the store says now that it must be waited for.
        wait_ms: u64,
    },
    /// The mark is durable.
    Marked {
        /// What it says.
        stopped: bool,
    },
    /// Answer a caller.
    Answer {
        /// Which request.
        request: RequestId,
        /// What to say.
        answer: Result<Answer, Refusal>,
    },
    /// A run of a task ended, durably, or never began, and the task waits again: for whoever watches it.
    Retried {
        /// The task.
        task: TaskId,
        /// How the run ended; None if it never began, and counts as no try.
        end: Option<End>,
        /// Its lane.
        lane: LaneId,
        /// Whom it is charged to.
        key: Key,
        /// Which try comes next.
        attempt: u16,
        /// How many tries it has.
        max_attempts: u16,
        /// When it is due, if it waits for a time.
        due: Option<Millis>,
        /// What the last one said of its failure.
        error: Arc<str>,
    },
    /// A task that waited for a time waits for its turn now, durably: for whoever watches it.
    Due {
        /// The task.
        task: TaskId,
        /// Its lane.
        lane: LaneId,
        /// Whom it is charged to.
        key: Key,
    },
    /// A task ended, durably: for whoever watches it.
    Finished {
        /// The task.
        task: TaskId,
        /// Its lane.
        lane: LaneId,
        /// How often it might have been tried.
        max_attempts: u16,
        /// How it ended.
        end: Arc<EndRecord>,
    },
    /// Send a tick at this time, or soon after. The latest wake is the one that counts.
    Wake {
        /// When.
        at: Millis,
    },
    /// What the store returned contradicts itself. Stop this shard and tell the operator.
    Broken {
        /// What is wrong.
        what: String,
    },
}

/// A good answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The tasks are accepted: durable, with these ids, in order; and whether each is new, or had been accepted
    /// before under its unique key.
    Accepted(Vec<(TaskId, bool)>),
    /// This request was accepted before: these are its tasks.
    AcceptedBefore(Vec<TaskId>),
    /// An ended task will be run again, as this one, durably.
    Replayed(TaskId),
    /// The settings are changed, durably; their version now.
    Configured(u64),
    /// What the key has of its own is changed, durably.
    KeySet,
    /// The task has so much time, durably; in milliseconds.
    Shortened(u64),
    /// An interactive task has a slot, and starts.
    Interactive {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// Its worker.
        worker: WorkerId,
    },
    /// The key may not run any more, or may again, durably.
    KeyPaused(bool),
    /// The task will never run (again), durably.
    Canceled,
    /// The task is running; its worker has been told to stop it.
    Stopping,
}
