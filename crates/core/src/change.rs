//! What happened, as a store has to remember it. A commit is a list of changes that become durable
//! together or not at all; each store lays out its own tables for them.
//!
//! A task costs a store two rows: its record (by id: everything, the payload and the files too) and its row where it waits
//! (in its lane, by level; or among the timers, by time). Accepting writes both, starting writes nothing,
//! finishing removes both; or, if the end is to be remembered, removes the row and writes the end beside the
//! record, with a timer for the day when both are forgotten. Records of keys, lanes, queues and of the shard
//! are small and written in place, once per commit that touches them.
//!
//! Timers are ordered like a lane: by level, which is the time they are due at and a seq, and with an ack level
//! below which all of them are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::admission::{ClassLimit, Rate, classes};
use crate::backlog::{Average, Charge, Level, VTime, Weight};
use crate::bounds;
use crate::life::{Backoff, End, Outcome, Terms};
use crate::messages::{File, Run};
use crate::names::{
    ContentType, Key, LaneId, Life, Millis, QueueId, QueueName, RequestKey, Seat, StoreId, TaskId,
    WorkerSetId,
};
use crate::refusal::Refusal;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A task was accepted: put its record and its row, in its lane or among the timers.
    Accepted(Task),
    /// A task's row goes from one place to another, which are not the same: from a lane to the timers, to the
    /// long runners and back, or to another level of its lane. Its attempt, its charge and what was lost are what
    /// the row says from now on. A new level ends in a seq of its own, not in the task's id as the first one did.
    Moved {
        /// Its lane, which does not change.
        lane: LaneId,
        /// Where its row was.
        from: Place,
        /// Where it is now; `row.level` is its level there, if it has one.
        to: Place,
        /// Its row now.
        row: Row,
        /// The try that ended, if one did: to be remembered with the task, as are the last
        /// [`TRIES_KEPT`](crate::bounds::TRIES_KEPT).
        tried: Option<Try>,
    },
    /// A task's duration was shortened, or its queue's classes have changed: its row goes to another place, and possibly
    /// to another lane of its queue; unless it is set aside, where it has none. How long it may take is what the row's
    /// terms say from now on.
    Shortened {
        /// The lane it was in.
        from_lane: LaneId,
        /// Where its row was.
        from: Place,
        /// Its lane now.
        lane: LaneId,
        /// Where its row is now; `row.level` is its level there, if it has one.
        to: Place,
        /// Its row now.
        row: Row,
    },
    /// Somebody wants a running task stopped. Remembered until it has ended.
    Canceling {
        /// The task.
        task: TaskId,
    },
    /// A task ended: remove its row. Unless its end is to be remembered, remove its record too, and the tries.
    Finished {
        /// The task.
        task: TaskId,
        /// Its lane.
        lane: LaneId,
        /// Where its row was.
        from: Place,
        /// How often it was tried before the last time: so many tries may be remembered.
        tries: u16,
        /// Somebody wanted it stopped while it ran. That need not be remembered any more.
        canceling: bool,
        /// How it ended.
        outcome: Outcome,
        /// What to remember, if anything. A timer of its own forgets it.
        end: Option<Arc<EndRecord>>,
    },
    /// The end of a task need not be remembered any more: remove all there is of it.
    Forgotten {
        /// The task.
        task: TaskId,
        /// How often it was tried before the last time.
        tries: u16,
    },
    /// An ended task was run again as another.
    Replayed {
        /// The one that had ended.
        task: TaskId,
        /// The other.
        again: TaskId,
    },
    /// A timer is set.
    Timed(TimerRow),
    /// A timer is not needed any more.
    Untimed {
        /// Its level.
        at: Level,
    },
    /// The levels of the timers. Those at or below the ack level are over: delete them by range.
    Timers {
        /// What to remember.
        record: ShelfRecord,
    },
    /// A parked row is not needed any more: its task has ended. (One that moves goes with its move.)
    Unparked {
        /// The lane beside which it stood.
        lane: LaneId,
        /// The key.
        key: Key,
        /// Its level on the shelf.
        level: Level,
    },
    /// What is saved of a key's rows that are parked beside a lane; None if none are.
    Parked {
        /// The lane.
        lane: LaneId,
        /// The key.
        key: Key,
        /// What to remember.
        record: Option<ParkedRecord>,
    },
    /// Whether a key is paused: none of its tasks is started.
    Paused {
        /// The queue.
        queue: QueueId,
        /// The key.
        key: Key,
        /// It is.
        paused: bool,
    },
    /// A queue's settings.
    Settings {
        /// The queue.
        queue: QueueId,
        /// What to remember.
        record: SettingsRecord,
    },
    /// A key's record; None if the key is forgotten.
    Key {
        /// The lane the record belongs to.
        lane: LaneId,
        /// The key.
        key: Key,
        /// What to remember.
        record: Option<KeyRecord>,
    },
    /// A lane's levels. Rows at or below the ack level are settled: delete them by range.
    Lane {
        /// The lane.
        lane: LaneId,
        /// What to remember.
        record: LaneRecord,
    },
    /// A queue's name and counts.
    Queue {
        /// The queue.
        queue: QueueId,
        /// What to remember.
        record: QueueRecord,
    },
    /// What a key of a queue has of its own; nothing if it has nothing any more.
    Override {
        /// The queue.
        queue: QueueId,
        /// The key.
        key: Key,
        /// What it has.
        over: Override,
    },
    /// What is saved of a worker; None if it is lost or has left.
    Member {
        /// Its seat.
        seat: Seat,
        /// What to remember.
        record: Option<MemberRecord>,
    },
    /// Whether the owner has stopped in good order: then the members' records say what runs.
    Stopped {
        /// It has.
        stopped: bool,
    },
    /// How long there may be workers that the store does not know of; None if there are none any more.
    Doubt {
        /// In milliseconds.
        left_ms: Option<u64>,
    },
    /// A request that was named by its caller; None if it is forgotten.
    Request {
        /// Its name.
        key: RequestKey,
        /// What to remember.
        record: Option<RequestRecord>,
    },
    /// The store's id.
    Store {
        /// The id.
        id: StoreId,
    },
    /// The shard's counter of seqs.
    Seq {
        /// The next seq to hand out.
        next: u64,
    },
}

/// Where a task's row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In its lane: it waits there, or it runs.
    Lane(Level),
    /// Among the timers: it waits for a time.
    Timer(Level),
    /// On the shelf of its key, which may not run.
    Parked(Level),
    /// In the table of long runners.
    Aside,
    /// Nowhere: the task has ended.
    Over,
}

impl Place {
    /// Its level in its lane, if it is there.
    pub fn level(self) -> Option<Level> {
        match self {
            Place::Lane(level) => Some(level),
            Place::Timer(_) | Place::Parked(_) | Place::Aside | Place::Over => None,
        }
    }
}

/// A task as it is stored: all there is to know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// Its lane.
    pub lane: LaneId,
    /// Where its row is.
    pub place: Place,
    /// Whom it is charged to.
    pub key: Key,
    /// What it was charged.
    pub charge: Charge,
    /// Which try comes next, or runs: 1 for the first.
    pub attempt: u16,
    /// How many tries it has.
    pub max_attempts: u16,
    /// How many of them were lost with their workers.
    pub lost: u8,
    /// What it asked for beyond the ordinary.
    pub terms: Option<Arc<Terms>>,
    /// The ended task that it runs again, if it does.
    pub replay_of: Option<TaskId>,
    /// When it was accepted.
    pub accepted: Millis,
    /// What the payload is.
    pub content_type: ContentType,
    /// The caller's bytes.
    pub payload: Arc<[u8]>,
    /// Its input files; most tasks have none.
    pub files: Arc<[File]>,
}

impl Task {
    /// How long one run may take, in milliseconds; 0 if it did not say.
    pub fn max_duration_ms(&self) -> u64 {
        self.terms.as_ref().map_or(0, |terms| terms.max_duration_ms)
    }

    /// Bytes of its payload and its files.
    pub fn input_bytes(&self) -> usize {
        File::bytes_with(&self.payload, &self.files)
    }

    /// Its row in the lane, if it is there.
    pub fn row(&self) -> Option<Row> {
        self.place.level().map(|level| self.row_at(level))
    }

    /// Its row as it is at this level.
    pub fn row_at(&self, level: Level) -> Row {
        Row {
            level,
            task: self.id,
            key: self.key.clone(),
            charge: self.charge,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
            lost: self.lost,
            terms: self.terms.clone(),
        }
    }
}

/// A row of a lane: what the window needs to know of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its place.
    pub level: Level,
    /// The task.
    pub task: TaskId,
    /// Whom it is charged to.
    pub key: Key,
    /// What it was charged.
    pub charge: Charge,
    /// Which try comes next.
    pub attempt: u16,
    /// How many tries it has.
    pub max_attempts: u16,
    /// How many of them were lost with their workers.
    pub lost: u8,
    /// What its task asked for beyond the ordinary.
    pub terms: Option<Arc<Terms>>,
}

impl Row {
    /// How long a run of its task may take, in milliseconds; 0 if it did not say.
    pub fn max_duration_ms(&self) -> u64 {
        self.terms.as_ref().map_or(0, |terms| terms.max_duration_ms)
    }

    /// After this no run of its task is started, if there is such a time.
    pub(crate) fn expires(&self) -> Option<Millis> {
        self.terms.as_ref().and_then(|terms| terms.expires)
    }
}

/// A timer.
#[derive(Clone, Debug, PartialEq)]
pub struct TimerRow {
    /// When it is due, and its seq: see [`Moment`](crate::timers::Moment).
    pub at: Level,
    /// The task that it is for.
    pub task: TaskId,
    /// What is to be done then.
    pub what: Timed,
}

/// What a timer is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Timed {
    /// The task's delay or backoff is over: its row goes to this lane. (The row's level is the timer's.)
    Due(LaneId, Row),
    /// It is too late to start the task.
    Expire,
    /// See whether anybody has watched the task.
    Detach,
    /// The task's end need not be remembered any more.
    Forget {
        /// How often it was tried before the last time.
        tries: u16,
    },
}

/// What is saved of a shelf: of the timers, or of parked rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShelfRecord {
    /// All at or below are over.
    pub ack: Level,
    /// The highest level ever written.
    pub max: Level,
}

/// What is saved of a key's rows that are parked beside a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParkedRecord {
    /// Rows on its shelf.
    pub rows: u64,
    /// The levels of the shelf. Rows at or below the ack level are gone one by one: nothing is deleted by range.
    pub shelf: ShelfRecord,
}

/// One try at a task, when it was over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Try {
    /// Which.
    pub attempt: u16,
    /// Where it ran, if that is known.
    pub seat: Option<Seat>,
    /// When it was dispatched.
    pub started: Millis,
    /// When its end was known.
    pub ended: Millis,
    /// How it ended.
    pub end: End,
    /// What it said of its failure.
    pub error: Arc<str>,
}

/// How a task ended.
#[derive(Clone, Debug, PartialEq)]
pub struct EndRecord {
    /// Whom the task was charged to.
    pub key: Key,
    /// How.
    pub outcome: Outcome,
    /// When.
    pub at: Millis,
    /// Its last try, if it had any.
    pub last: Option<Try>,
    /// What it made.
    pub result: Arc<[u8]>,
}

/// How a queue shares among its keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// Every task counts one.
    #[default]
    Tasks,
    /// A task counts the time that it takes.
    Time,
}

/// What a key of a queue has of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Override {
    /// Its weight, whatever its tasks say.
    pub weight: Option<Weight>,
    /// How many of its tasks may run at once, whatever the queue says.
    pub limit: Option<u32>,
    /// How many of its tasks may start in a second, whatever the queue says.
    pub rate: Option<Rate>,
}

impl Override {
    /// Checks what a user chose.
    pub fn check(&self) -> Result<(), Refusal> {
        check_limit("limit", self.limit)?;
        self.rate.map_or(Ok(()), |rate| rate.check().map_err(|refusal| refusal.within("rate")))
    }
}

fn check_limit(field: &str, limit: Option<u32>) -> Result<(), Refusal> {
    match limit {
        Some(0) => Err(Refusal::invalid(field, "0 lets nothing run; use 1 or more, or pause the key")),
        Some(_) | None => Ok(()),
    }
}

/// What happens to a task whose time was up after it had been downgraded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AfterDowngrade {
    /// It has failed.
    #[default]
    Fail,
    /// It is tried again at once, as long as it has attempts.
    Requeue,
}

/// What a queue's tasks get that do not say otherwise, and how the queue behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How often a task is tried.
    pub max_attempts: u16,
    /// How long it waits in between.
    pub backoff: Backoff,
    /// After so many runs that were lost with their workers it is not tried again.
    pub max_lost: u8,
    /// How long its end is remembered, in milliseconds; 0 if not at all.
    pub retention_ms: u64,
    /// How its keys share.
    pub share: Share,
    /// Nothing of it is started.
    pub paused: bool,
    /// Its duration classes, shortest first; none if durations are deadlines and nothing else.
    pub classes: Vec<ClassLimit>,
    /// What happens to a task that a downgrade ended.
    pub after_downgrade: AfterDowngrade,
    /// How long an interactive run is warned before it is halted, in milliseconds; 0 if it is not.
    pub interactive_grace_ms: u64,
    /// How many tasks of one key may run at once, unless the key has a limit of its own.
    pub key_limit: Option<u32>,
    /// How much of it may start in a second.
    pub rate: Option<Rate>,
    /// How much of one key may start in a second, unless the key has a rate of its own.
    pub key_rate: Option<Rate>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            max_attempts: bounds::DEFAULT_ATTEMPTS,
            backoff: Backoff::default(),
            max_lost: bounds::DEFAULT_LOST,
            retention_ms: bounds::DEFAULT_RETENTION_MS,
            share: Share::Tasks,
            paused: false,
            classes: Vec::new(),
            after_downgrade: AfterDowngrade::Fail,
            interactive_grace_ms: 0,
            key_limit: None,
            rate: None,
            key_rate: None,
        }
    }
}

impl Settings {
    /// Checks what a user chose.
    pub fn check(&self) -> Result<(), Refusal> {
        let range = |field: &str, is: u64, from: u64, most: u64| {
            let wrong = || Refusal::invalid(field, format!("{is} is out of range; use {from} to {most}"));
            if (from..=most).contains(&is) { Ok(()) } else { Err(wrong()) }
        };
        range("retry.max_attempts", self.max_attempts.into(), 1, bounds::ATTEMPTS.into())?;
        range("retry.max_lost", self.max_lost.into(), 1, 255)?;
        range("retention_ms", self.retention_ms, 0, bounds::RETENTION_MS)?;
        range("interactive_grace_ms", self.interactive_grace_ms, 0, bounds::INTERACTIVE_GRACE_MS)?;
        classes::check(&self.classes)?;
        check_limit("key_limit", self.key_limit)?;
        for (field, rate) in [("rate", self.rate), ("key_rate", self.key_rate)] {
            rate.map_or(Ok(()), |rate| rate.check().map_err(|refusal| refusal.within(field)))?;
        }
        self.backoff.check().map_err(|refusal| refusal.within("retry"))
    }
}

/// What is saved of a queue's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingsRecord {
    /// Grows with every change; 0 if they were never changed.
    pub version: u64,
    /// The settings.
    pub settings: Settings,
}

/// What is saved of a key in a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// F: the end of its last charge.
    pub finish: VTime,
    /// Up to where the first task of its chain lets V go, as far as commits know.
    pub due: VTime,
    /// Its rows in the lane. Which of them run is known by the workers alone.
    pub rows: u32,
    /// Those of them that stand where they were first placed.
    pub chained: u32,
    /// Charges of rows that were parked, to be given back when no row waits in the lane any more.
    pub refund: VTime,
    /// What its runs took less than they were charged, and has not been given back yet.
    pub credit: VTime,
    /// How long its runs took of late; none where nobody needs to know.
    pub average: Average,
    /// What its latest accepted task asked for.
    pub weight: Weight,
}

/// What is saved of a worker that the shard counts on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberRecord {
    /// Bound to its machine: a later life with the same token proves this one dead.
    pub token: u64,
    /// Its life.
    pub life: Life,
    /// How long an owner that hears nothing of it must wait until it can no longer be alive, in milliseconds.
    /// Saved before the worker is told anything that lets it live so long.
    pub wait_ms: u64,
    /// What it ran when the owner stopped; counts only if the mark is set.
    pub running: Vec<Run>,
    /// The worker set that it had shown to know by then.
    pub set: Option<WorkerSetId>,
}

/// What is saved of a request that was named by its caller, or of a task that was (by its unique key).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// Until when it is remembered.
    pub until: Millis,
    /// Its tasks.
    pub ids: RequestIds,
}

/// The tasks of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestIds {
    /// They follow each other.
    Range {
        /// The first.
        first: TaskId,
        /// How many.
        tasks: u32,
    },
    /// Some of them had been accepted before.
    List(Arc<[TaskId]>),
}

impl RequestIds {
    /// The same in as little room as possible.
    pub(crate) fn of(ids: &[TaskId]) -> RequestIds {
        match ids.first() {
            Some(&first) if ids.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0) => {
                RequestIds::Range { first, tasks: ids.len() as u32 }
            }
            Some(_) | None => RequestIds::List(ids.into()),
        }
    }

    /// The tasks, in the order of the request.
    pub fn to_vec(&self) -> Vec<TaskId> {
        match self {
            RequestIds::Range { first, tasks } => {
                (first.0..first.0 + u64::from(*tasks)).map(TaskId).collect()
            }
            RequestIds::List(ids) => ids.to_vec(),
        }
    }
}

/// What is saved of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneRecord {
    /// A: everything at or below is settled.
    pub ack: Level,
    /// M: the highest level ever written.
    pub max: Level,
    /// V.
    pub vtime: VTime,
    /// Its charge among the lanes of its priority.
    pub turn: VTime,
}

/// What is saved of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRecord {
    /// Its name.
    pub name: QueueName,
    /// How many tasks it has had.
    pub totals: Totals,
    /// How long their runs took of late; none where nobody needs to know.
    pub average: Average,
}

/// How many tasks a queue has had, and how they ended: counted, never obtained by scanning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tasks accepted.
    pub accepted: u64,
    /// Tasks that succeeded.
    pub succeeded: u64,
    /// Tasks that failed for good.
    pub failed: u64,
    /// Tasks that were canceled.
    pub canceled: u64,
    /// Tasks that were not started in time.
    pub expired: u64,
    /// Tasks that wait for a time now.
    pub scheduled: u64,
}

impl Totals {
    /// Tasks accepted that have not ended: scheduled, waiting or running.
    pub fn unfinished(&self) -> u64 {
        let ended = [self.succeeded, self.failed, self.canceled, self.expired];
        ended.into_iter().fold(self.accepted, u64::saturating_sub)
    }
}

/// All that a new owner must know before it starts anything. Rows and payloads are read later.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// The next seq to hand out; 0 if the shard is new.
    pub next_seq: u64,
    /// Every queue.
    pub queues: Vec<(QueueId, QueueRecord)>,
    /// Every key that has something of its own.
    pub overrides: Vec<(QueueId, Key, Override)>,
    /// Every lane.
    pub lanes: Vec<(LaneId, LaneRecord)>,
    /// Every key that a lane remembers.
    pub keys: Vec<(LaneId, Key, KeyRecord)>,
    /// Every task whose row is set aside.
    pub aside: Vec<Task>,
    /// Every worker that the shard counts on.
    pub members: Vec<(Seat, MemberRecord)>,
    /// The last owner stopped in good order.
    pub stopped: bool,
    /// The store may be an old copy of itself, so that there may be workers that it does not know of: for at most so
    /// many milliseconds yet, or `u64::MAX` if nobody has begun to wait.
    pub doubt: Option<u64>,
    /// Every request that is remembered.
    pub requests: Vec<(RequestKey, RequestRecord)>,
    /// The levels of the timers.
    pub timers: ShelfRecord,
    /// Every running task that somebody wants stopped.
    pub canceling: Vec<TaskId>,
    /// Every key with rows that are parked beside a lane.
    pub parked: Vec<(LaneId, Key, ParkedRecord)>,
    /// Every key that is paused.
    pub paused: Vec<(QueueId, Key)>,
    /// The settings of every queue that has some of its own.
    pub settings: Vec<(QueueId, SettingsRecord)>,
    /// The store's id; None if it has none yet.
    pub store: Option<StoreId>,
}

impl Metadata {
    /// Whether it can be what an owner wrote; the error says what contradicts itself.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut rows: BTreeMap<QueueId, u64> = BTreeMap::new();
        for (n, queue) in
            self.queues.iter().map(|(id, _)| id.0).collect::<BTreeSet<u32>>().into_iter().enumerate()
        {
            if n as u32 != queue {
                return Err(format!("queue {n} is missing, and queue {queue} is there"));
            }
            rows.insert(QueueId(queue), 0);
        }
        if rows.len() != self.queues.len() {
            return Err("a queue is there twice".into());
        }
        let mut lanes = BTreeSet::new();
        for (lane, record) in &self.lanes {
            if !rows.contains_key(&lane.queue) || !lanes.insert(*lane) {
                return Err(format!("lane {lane} belongs to no queue, or is there twice"));
            }
            if record.max.seq() >= self.next_seq.max(1) || self.next_seq > Level::LAST_SEQ {
                return Err(format!(
                    "lane {lane} has rows up to {}, but the next seq is {}",
                    record.max, self.next_seq
                ));
            }
        }
        for (lane, key, record) in &self.keys {
            match rows.get_mut(&lane.queue) {
                Some(rows) if lanes.contains(lane) && record.chained <= record.rows => {
                    *rows += u64::from(record.rows);
                }
                _ => {
                    return Err(format!(
                        "key {key} belongs to no lane ({lane}), or counts more rows than it has"
                    ));
                }
            }
        }
        for task in &self.aside {
            match rows.get_mut(&task.lane.queue) {
                Some(rows) if lanes.contains(&task.lane) && task.place == Place::Aside => *rows += 1,
                _ => return Err(format!("task {} is set aside from a lane that does not exist", task.id)),
            }
        }
        if let Some((queue, key, _)) = self.overrides.iter().find(|(queue, ..)| !rows.contains_key(queue)) {
            return Err(format!("key {key} has something of its own in queue {queue}, which does not exist"));
        }
        for (lane, key, record) in &self.parked {
            let known = lanes.contains(lane) && record.shelf.max.seq() < self.next_seq.max(1);
            match rows.get_mut(&lane.queue).filter(|_| known) {
                Some(rows) => *rows = rows.saturating_add(record.rows),
                None => return Err(format!("key {key} is parked beside lane {lane}, which does not exist")),
            }
        }
        if let Some((queue, key)) = self.paused.iter().find(|(queue, _)| !rows.contains_key(queue)) {
            return Err(format!("key {key} is paused in queue {queue}, which does not exist"));
        }
        if let Some((queue, _)) = self.settings.iter().find(|(queue, _)| !rows.contains_key(queue)) {
            return Err(format!("queue {queue} has settings, but does not exist"));
        }
        if self.timers.max.seq() >= self.next_seq.max(1) {
            let (max, next) = (self.timers.max, self.next_seq);
            return Err(format!("there are timers up to {max}, but the next seq is {next}"));
        }
        for (id, record) in &self.queues {
            let (kept, counted) =
                (record.totals.unfinished(), rows[id].saturating_add(record.totals.scheduled));
            if kept != counted {
                let name = &record.name;
                return Err(format!("queue {name} counts {kept} unfinished tasks, its keys count {counted}"));
            }
        }
        Ok(())
    }
}
