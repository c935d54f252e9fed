//! What a change becomes on disk. Three kinds of rows, each in sorted tables of its own:
//!
//! | kind | key | value | written |
//! |---|---|---|---|
//! | rows | shard, lane, level | what the window needs of a task | once |
//! | rows | shard, [`TIMERS`], level | a timer, with the row of the task that waits for it | once |
//! | tasks | shard, id | the task as it was accepted, payload and files included | once |
//! | tasks | shard, id with its top bit set | how the task ended, result included | once |
//! | records | shard, one letter, a name | epoch, seq, queues, lanes, keys, workers and the rest, by letter | in place |
//!
//! A task costs two puts when it is accepted (its row, its record) and two deletes when it ends, or one if
//! the same commit raises its lane's ack level above it, which deletes rows by range. An end that is remembered
//! is one more put, and the task's record stays until both are forgotten. Where a task that has moved is now
//! stands in a small record of its own ([`MOVED`]), and one that was set aside has another ([`ASIDE`]), so that
//! rows and tasks are written once and never again: a delete then cancels its put wherever the two meet, and a
//! task that ends soon after it was accepted never reaches a table. Such a task pays for what it wrote with one
//! more delete each; so does one whose tries are remembered ([`TRY`]), or that was to be stopped ([`CANCELING`]).
//!
//! Timers are the rows of a lane that is no queue's: read from a level on, and deleted by range up to an ack
//! level, which stands in the record of that lane.
//!
//! One record is of the store as a whole: what it remembers of its [`witness`](WITNESS).
//!
//! Keys are big-endian, so that bytes sort as numbers do. What values look like is in [`values`].

use std::cmp::Ordering;
use std::collections::BTreeMap;

use evenhand_core::backlog::Level;
use evenhand_core::bounds::TRIES_KEPT;
use evenhand_core::change::{LaneRecord, Override, Place, ShelfRecord};
use evenhand_core::names::{
    Class, Key, LaneId, Priority, QueueId, RequestKey, Seat, ShardId, StoreId, TaskId,
};
use evenhand_core::{Change, Metadata, Row};

use super::bytes::{Get, Put};
use super::log::FRAME_HEADER;
use super::table::TableKey;
use crate::values;

/// The key of a row: shard (4), queue (4), priority, class, level (16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowKey([u8; 26]);
/// The part of it that names the lane.
pub(super) type LanePrefix = [u8; 10];
/// The key of a task: shard (4), id (8). With the top bit of the id set it is the key of the task's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskKey([u8; 12]);
/// The key of a record: shard (4), a letter, a name.
pub(super) type RecordKey = Box<[u8]>;

/// The lane of the timers. No queue has it: there are not so many.
pub(super) const TIMERS: LaneId =
    LaneId { queue: QueueId(u32::MAX), priority: Priority(u8::MAX), class: Class(u8::MAX) };

/// The bit that makes the key of an end of the key of a task. Ids are far below.
const ENDED: u64 = 1 << 63;

// Letters of records. Capital ones, and MOVED, are of single tasks, and of no interest to a new owner.

/// A try at a task that was followed by another, by task and attempt.
pub(super) const TRY: u8 = b'T';
/// Which task runs an ended one again, by the one that ended.
pub(super) const REPLAYED: u8 = b'P';
/// A parked row, by lane, key and level.
pub(super) const PARKED_ROW: u8 = b'R';
/// A key with parked rows, by lane and key.
pub(super) const PARKED: u8 = b'p';
/// That a key is paused, by queue and key.
pub(super) const PAUSED: u8 = b'u';
/// The shard's epoch.
pub(super) const EPOCH: u8 = b'e';
/// The shard's counter of seqs.
pub(super) const SEQ: u8 = b's';
/// A queue, by id.
pub(super) const QUEUE: u8 = b'q';
/// A queue's settings, by id.
pub(super) const SETTINGS: u8 = b'g';
/// What a key has of its own, by queue and key.
pub(super) const OVERRIDE: u8 = b'o';
/// A lane, by id; and the timers, as [`TIMERS`].
pub(super) const LANE: u8 = b'l';
/// A key, by lane and text.
pub(super) const KEY: u8 = b'k';
/// Where a task that has moved is now, by task.
pub(super) const MOVED: u8 = b'm';
/// That a task is set aside, by task.
pub(super) const ASIDE: u8 = b'a';
/// That somebody wants a running task stopped, by task.
pub(super) const CANCELING: u8 = b'c';
/// A worker that the shard counts on, by seat.
pub(super) const MEMBER: u8 = b'w';
/// That the last owner stopped in good order.
pub(super) const STOPPED: u8 = b'x';
/// For how long there may be workers that the store does not know of.
pub(super) const DOUBT: u8 = b'd';
/// A request, by what its caller named it.
pub(super) const REQUEST: u8 = b'r';
/// What the store remembers of its witness. The only record that is no shard's: it stands before all of them.
pub(super) const WITNESS: &[u8] = &[0];
/// The store's id.
pub(super) const STORE: u8 = b'i';

fn part<const N: usize>(key: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&key[at..at + N]);
    part
}

// Keys are compared all the time: as numbers, which is faster than byte by byte and gives the same order.
impl Ord for RowKey {
    fn cmp(&self, other: &Self) -> Ordering {
        let lane = |key: &[u8; 26]| (u64::from_be_bytes(part(key, 0)), u16::from_be_bytes(part(key, 8)));
        let level = |key: &[u8; 26]| u128::from_be_bytes(part(key, 10));
        lane(&self.0).cmp(&lane(&other.0)).then_with(|| level(&self.0).cmp(&level(&other.0)))
    }
}

impl PartialOrd for RowKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TaskKey {
    fn cmp(&self, other: &Self) -> Ordering {
        let numbers = |key: &[u8; 12]| (u32::from_be_bytes(part(key, 0)), u64::from_be_bytes(part(key, 4)));
        numbers(&self.0).cmp(&numbers(&other.0))
    }
}

impl PartialOrd for TaskKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

macro_rules! table_key {
    ($key:ident) => {
        impl TableKey for $key {
            fn bytes(&self) -> &[u8] {
                &self.0
            }
            fn from_bytes(bytes: &[u8]) -> Option<Self> {
                bytes.try_into().ok().map($key)
            }
        }
    };
}

table_key!(RowKey);
table_key!(TaskKey);

/// The kind of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Rows of lanes, and timers.
    Rows,
    /// Tasks with their payloads, and ends with their results.
    Tasks,
    /// Everything else.
    Records,
}

impl Kind {
    /// All of them.
    pub(super) const ALL: [Kind; 3] = [Kind::Rows, Kind::Tasks, Kind::Records];

    /// Its name, which its tables' files end with.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Rows => "rows",
            Kind::Tasks => "tasks",
            Kind::Records => "records",
        }
    }

    /// Whether each key is put at most once in its life.
    pub(super) fn once(self) -> bool {
        match self {
            Kind::Rows | Kind::Tasks => true,
            Kind::Records => false,
        }
    }
}

pub(super) fn lane_prefix(shard: ShardId, lane: LaneId) -> LanePrefix {
    let mut key = [0; 10];
    key[..4].copy_from_slice(&shard.0.to_be_bytes());
    key[4..8].copy_from_slice(&lane.queue.0.to_be_bytes());
    key[8] = lane.priority.0;
    key[9] = lane.class.0;
    key
}

pub(super) fn row_key(prefix: LanePrefix, level: Level) -> RowKey {
    let mut key = [0; 26];
    key[..10].copy_from_slice(&prefix);
    key[10..].copy_from_slice(&level.to_bytes());
    RowKey(key)
}

/// The first and the last key that a row of a shard can have.
pub(super) fn rows_of(shard: ShardId) -> (RowKey, RowKey) {
    let (mut first, mut last) = ([0; 26], [0xff; 26]);
    first[..4].copy_from_slice(&shard.0.to_be_bytes());
    last[..4].copy_from_slice(&shard.0.to_be_bytes());
    (RowKey(first), RowKey(last))
}

pub(super) fn lane_of(key: &RowKey) -> LanePrefix {
    part(&key.0, 0)
}

pub(super) fn level_of(key: &RowKey) -> Level {
    Level::from_bytes(part(&key.0, 10))
}

pub(super) fn task_key(shard: ShardId, task: TaskId) -> TaskKey {
    let mut key = [0; 12];
    key[..4].copy_from_slice(&shard.0.to_be_bytes());
    key[4..].copy_from_slice(&task.0.to_be_bytes());
    TaskKey(key)
}

pub(super) fn end_key(shard: ShardId, task: TaskId) -> TaskKey {
    task_key(shard, TaskId(task.0 | ENDED))
}

/// The task of a task's key, or of an end's.
pub(super) fn task_of(key: &TaskKey) -> TaskId {
    TaskId(u64::from_be_bytes(part(&key.0, 4)) & !ENDED)
}

/// Whether it is the key of an end, given the bytes of a task's key.
pub(super) fn is_end(key: &[u8]) -> bool {
    key.get(4).is_some_and(|first| first & 0x80 != 0)
}

/// The last id that a task could have. Those above are none.
pub(super) const LAST_TASK: TaskId = TaskId(ENDED - 1);

pub(super) fn shard_of(key: &[u8]) -> Option<ShardId> {
    Some(ShardId(u32::from_be_bytes(key.get(..4)?.try_into().ok()?)))
}

pub(super) fn record_key(shard: ShardId, letter: u8, name: &[&[u8]]) -> RecordKey {
    let mut key = Vec::with_capacity(5 + name.iter().map(|part| part.len()).sum::<usize>());
    key.extend_from_slice(&shard.0.to_be_bytes());
    key.push(letter);
    name.iter().for_each(|part| key.extend_from_slice(part));
    key.into_boxed_slice()
}

fn record_of_task(shard: ShardId, letter: u8, task: TaskId) -> RecordKey {
    record_key(shard, letter, &[&task.0.to_be_bytes()])
}

fn lane_key(shard: ShardId, lane: LaneId) -> RecordKey {
    record_key(shard, LANE, &[&lane_prefix(shard, lane)[4..]])
}

pub(super) fn moved_key(shard: ShardId, task: TaskId) -> RecordKey {
    record_of_task(shard, MOVED, task)
}

pub(super) fn aside_key(shard: ShardId, task: TaskId) -> RecordKey {
    record_of_task(shard, ASIDE, task)
}

pub(super) fn canceling_key(shard: ShardId, task: TaskId) -> RecordKey {
    record_of_task(shard, CANCELING, task)
}

pub(super) fn replayed_key(shard: ShardId, task: TaskId) -> RecordKey {
    record_of_task(shard, REPLAYED, task)
}

pub(super) fn try_key(shard: ShardId, task: TaskId, attempt: u16) -> RecordKey {
    record_key(shard, TRY, &[&task.0.to_be_bytes(), &attempt.to_be_bytes()])
}

/// The key's length goes before it, or those of one key would stand among those of another.
pub(super) fn parked_row_key(shard: ShardId, lane: LaneId, key: &Key, level: Level) -> RecordKey {
    let text = key.as_str().as_bytes();
    let length = (text.len() as u16).to_be_bytes();
    record_key(shard, PARKED_ROW, &[&lane_prefix(shard, lane)[4..], &length, text, &level.to_bytes()])
}

/// The lane that such a key begins with, and the level that it ends with.
pub(super) fn place_of_parked(record: &[u8]) -> Option<(LaneId, Level)> {
    let level = record.get(record.len().checked_sub(16)?..)?.try_into().ok()?;
    Some((lane(&mut Get::from(record, 5))?, Level::from_bytes(level)))
}

pub(super) fn epoch_key(shard: ShardId) -> RecordKey {
    record_key(shard, EPOCH, &[])
}

pub(super) fn doubt_key(shard: ShardId) -> RecordKey {
    record_key(shard, DOUBT, &[])
}

/// What a commit does, row by row, as it stands in the log. The first bytes are left free for the head of
/// the log's frame, so that a commit that travels alone is never copied.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) bytes: Vec<u8>,
    /// It accepts tasks, so it needs room that may not be there.
    pub(super) accepts: bool,
    /// It holds what a copy of the store must not lack unnoticed.
    pub(super) witnessed: bool,
}

/// One of its rows, by places in its bytes.
pub(super) struct Op<'a> {
    pub(super) kind: Kind,
    pub(super) key: &'a [u8],
    /// Where its value is; None deletes.
    pub(super) value: Option<(usize, usize)>,
}

const DELETE: u8 = 0x80;

impl Batch {
    pub(super) fn new() -> Batch {
        Batch { bytes: vec![0; FRAME_HEADER], accepts: false, witnessed: false }
    }

    pub(super) fn of(shard: ShardId, changes: &[Change]) -> Batch {
        let mut batch = Batch::new();
        batch.bytes.reserve(changes.iter().map(about_bytes).sum());
        let mut acks = BTreeMap::new();
        for change in changes {
            if let Change::Lane { lane, record } = change {
                acks.insert(*lane, record.ack);
            } else if let Change::Timers { record } = change {
                acks.insert(TIMERS, record.ack);
            }
        }
        let mut writing = Writing { shard, acks, batch, value: Vec::with_capacity(512) };
        for change in changes {
            writing.value.clear();
            writing.change(change);
        }
        writing.batch
    }

    pub(super) fn put(&mut self, kind: Kind, key: &[u8], value: &[u8]) {
        self.bytes.put_u8(kind as u8);
        self.bytes.put_short(key.len() as u64);
        self.bytes.put_short(value.len() as u64);
        self.bytes.put(key);
        self.bytes.put(value);
    }

    fn delete(&mut self, kind: Kind, key: &[u8]) {
        self.bytes.put_u8(kind as u8 | DELETE);
        self.bytes.put_short(key.len() as u64);
        self.bytes.put(key);
    }
}

/// About how much a change writes.
fn about_bytes(change: &Change) -> usize {
    match change {
        // Of a file also its name, and two lengths.
        Change::Accepted(task) => {
            160 + 2 * task.key.as_str().len() + task.files.len() * 144 + task.input_bytes()
        }
        Change::Shortened { .. } => 192,
        Change::Moved { tried, .. } => 192 + tried.as_ref().map_or(0, |tried| 64 + tried.error.len()),
        Change::Finished { end, .. } => 64 + end.as_ref().map_or(0, |end| 128 + end.result.len()),
        Change::Member { record, .. } => 128 + 128 * record.as_ref().map_or(0, |r| r.running.len()),
        Change::Canceling { .. }
        | Change::Forgotten { .. }
        | Change::Replayed { .. }
        | Change::Timed(_)
        | Change::Untimed { .. }
        | Change::Timers { .. }
        | Change::Unparked { .. }
        | Change::Parked { .. }
        | Change::Paused { .. }
        | Change::Settings { .. }
        | Change::Key { .. }
        | Change::Lane { .. }
        | Change::Queue { .. }
        | Change::Override { .. }
        | Change::Stopped { .. }
        | Change::Doubt { .. }
        | Change::Request { .. }
        | Change::Store { .. }
        | Change::Seq { .. } => 64,
    }
}

/// A commit that is being written.
struct Writing {
    shard: ShardId,
    /// Up to where its lanes and timers are settled by it.
    acks: BTreeMap<LaneId, Level>,
    batch: Batch,
    /// The value at hand.
    value: Vec<u8>,
}

impl Writing {
    /// Puts the value at hand.
    fn put(&mut self, kind: Kind, key: &[u8]) {
        self.batch.put(kind, key, &self.value);
        self.value.clear();
    }

    fn put_record(&mut self, key: &RecordKey) {
        self.put(Kind::Records, key);
    }

    fn delete_record(&mut self, key: &RecordKey) {
        self.batch.delete(Kind::Records, key);
    }

    /// Puts the value at hand as a row of a lane.
    fn put_row(&mut self, lane: LaneId, level: Level) {
        self.put(Kind::Rows, row_key(lane_prefix(self.shard, lane), level).bytes());
    }

    /// Deletes a row, unless the same commit settles its lane up to there: that deletes it too.
    fn delete_row(&mut self, lane: LaneId, level: Level) {
        if self.acks.get(&lane).is_none_or(|ack| level > *ack) {
            self.batch.delete(Kind::Rows, row_key(lane_prefix(self.shard, lane), level).bytes());
        }
    }

    /// Puts a task's row where it is now.
    fn enter(&mut self, task: TaskId, lane: LaneId, to: Place, row: impl FnOnce(Level) -> Row) {
        match to {
            Place::Lane(level) => {
                values::put_row(&mut self.value, &row(level));
                self.put_row(lane, level);
            }
            Place::Timer(level) => {
                values::put_due(&mut self.value, lane, &row(level));
                self.put_row(TIMERS, level);
            }
            Place::Parked(level) => {
                let row = row(level);
                values::put_row(&mut self.value, &row);
                self.put_record(&parked_row_key(self.shard, lane, &row.key, level));
            }
            Place::Aside => self.put_record(&aside_key(self.shard, task)),
            Place::Over => {}
        }
    }

    /// Deletes a task's row where it was.
    fn leave(&mut self, task: TaskId, lane: LaneId, from: Place) {
        match from {
            Place::Lane(level) => self.delete_row(lane, level),
            Place::Timer(level) => self.delete_row(TIMERS, level),
            Place::Aside => self.delete_record(&aside_key(self.shard, task)),
            // A parked row goes with its key, which whoever calls this knows.
            Place::Parked(_) | Place::Over => {}
        }
    }

    /// Deletes what is remembered of so many tries.
    fn delete_tries(&mut self, task: TaskId, tries: u16) {
        for attempt in tries.saturating_sub(TRIES_KEPT) + 1..=tries {
            self.delete_record(&try_key(self.shard, task, attempt));
        }
    }

    fn change(&mut self, change: &Change) {
        let shard = self.shard;
        let value = &mut self.value;
        match change {
            Change::Accepted(task) => {
                self.batch.accepts = true;
                match task.place {
                    Place::Lane(_) | Place::Timer(_) | Place::Parked(_) => {
                        self.enter(task.id, task.lane, task.place, |level| task.row_at(level));
                    }
                    Place::Aside | Place::Over => {}
                }
                values::put_task(&mut self.value, task);
                self.put(Kind::Tasks, task_key(shard, task.id).bytes());
            }
            Change::Moved { lane, from, to, row, tried } => {
                self.leave(row.task, *lane, *from);
                if let Place::Parked(level) = from {
                    self.delete_record(&parked_row_key(shard, *lane, &row.key, *level));
                }
                self.enter(row.task, *lane, *to, |level| Row { level, ..row.clone() });
                values::put_moved(&mut self.value, *lane, *to, row);
                self.put_record(&moved_key(shard, row.task));
                if let Some(tried) = tried {
                    values::put_try(&mut self.value, tried);
                    self.put_record(&try_key(shard, row.task, tried.attempt));
                    if tried.attempt > TRIES_KEPT {
                        self.delete_record(&try_key(shard, row.task, tried.attempt - TRIES_KEPT));
                    }
                }
            }
            Change::Shortened { from_lane, from, lane, to, row } => {
                self.leave(row.task, *from_lane, *from);
                if let Place::Parked(level) = from {
                    self.delete_record(&parked_row_key(shard, *from_lane, &row.key, *level));
                }
                self.enter(row.task, *lane, *to, |level| Row { level, ..row.clone() });
                values::put_moved(&mut self.value, *lane, *to, row);
                self.put_record(&moved_key(shard, row.task));
            }
            Change::Canceling { task } => self.put_record(&canceling_key(shard, *task)),
            Change::Finished { task, lane, from, tries, canceling, outcome: _, end } => {
                match end {
                    Some(end) => {
                        values::put_end(value, *lane, end);
                        self.put(Kind::Tasks, end_key(shard, *task).bytes());
                    }
                    None => {
                        self.batch.delete(Kind::Tasks, task_key(shard, *task).bytes());
                        if has_moved(*task, *from) {
                            self.delete_record(&moved_key(shard, *task));
                        }
                        self.delete_tries(*task, *tries);
                    }
                }
                self.leave(*task, *lane, *from);
                if *canceling {
                    self.delete_record(&canceling_key(shard, *task));
                }
            }
            Change::Forgotten { task, tries } => {
                self.batch.delete(Kind::Tasks, task_key(shard, *task).bytes());
                self.batch.delete(Kind::Tasks, end_key(shard, *task).bytes());
                self.delete_record(&moved_key(shard, *task));
                self.delete_record(&replayed_key(shard, *task));
                self.delete_tries(*task, *tries);
            }
            Change::Replayed { task, again } => {
                value.put_u64(again.0);
                self.put_record(&replayed_key(shard, *task));
            }
            Change::Timed(timer) => {
                values::put_timer(value, timer);
                self.put_row(TIMERS, timer.at);
            }
            Change::Untimed { at } => self.delete_row(TIMERS, *at),
            Change::Timers { record } => {
                let record = LaneRecord { ack: record.ack, max: record.max, ..LaneRecord::default() };
                values::put_lane(value, &record);
                self.put_record(&lane_key(shard, TIMERS));
            }
            Change::Unparked { lane, key, level } => {
                self.delete_record(&parked_row_key(shard, *lane, key, *level));
            }
            Change::Paused { queue, key, paused } => {
                let at = record_key(shard, PAUSED, &[&queue.0.to_be_bytes(), key.as_str().as_bytes()]);
                match paused {
                    true => self.put_record(&at),
                    false => self.delete_record(&at),
                }
            }
            Change::Parked { lane, key, record } => {
                let at =
                    record_key(shard, PARKED, &[&lane_prefix(shard, *lane)[4..], key.as_str().as_bytes()]);
                match record {
                    Some(record) => {
                        values::put_parked(value, record);
                        self.put_record(&at);
                    }
                    None => self.delete_record(&at),
                }
            }
            Change::Settings { queue, record } => {
                values::put_settings(value, record);
                self.put_record(&record_key(shard, SETTINGS, &[&queue.0.to_be_bytes()]));
            }
            Change::Key { lane, key, record } => {
                let at = record_key(shard, KEY, &[&lane_prefix(shard, *lane)[4..], key.as_str().as_bytes()]);
                match record {
                    Some(record) => {
                        values::put_key_record(value, record);
                        self.put_record(&at);
                    }
                    None => self.delete_record(&at),
                }
            }
            Change::Lane { lane, record } => {
                values::put_lane(value, record);
                self.put_record(&lane_key(shard, *lane));
            }
            Change::Queue { queue, record } => {
                values::put_queue(value, record);
                self.put_record(&record_key(shard, QUEUE, &[&queue.0.to_be_bytes()]));
            }
            Change::Override { queue, key, over } => {
                let at = record_key(shard, OVERRIDE, &[&queue.0.to_be_bytes(), key.as_str().as_bytes()]);
                if *over == Override::default() {
                    self.delete_record(&at);
                } else {
                    values::put_override(value, over);
                    self.put_record(&at);
                }
            }
            Change::Member { seat, record } => {
                let at = record_key(shard, MEMBER, &[seat.as_str().as_bytes()]);
                match record {
                    Some(record) => {
                        self.batch.witnessed = true;
                        values::put_member(value, record);
                        self.put_record(&at);
                    }
                    None => self.delete_record(&at),
                }
            }
            Change::Stopped { stopped } => {
                self.batch.witnessed = true;
                let at = record_key(shard, STOPPED, &[]);
                match stopped {
                    true => self.put_record(&at),
                    false => self.delete_record(&at),
                }
            }
            Change::Doubt { left_ms } => match left_ms {
                Some(left_ms) => {
                    value.put_u64(*left_ms);
                    self.put_record(&doubt_key(shard));
                }
                None => self.delete_record(&doubt_key(shard)),
            },
            Change::Request { key, record } => {
                let at = record_key(shard, REQUEST, &[&key.0.to_be_bytes()]);
                match record {
                    Some(record) => {
                        values::put_request(value, record);
                        self.put_record(&at);
                    }
                    None => self.delete_record(&at),
                }
            }
            Change::Store { id } => {
                value.put_u64(id.0);
                self.put_record(&record_key(shard, STORE, &[]));
            }
            Change::Seq { next } => {
                value.put_u64(*next);
                self.put_record(&record_key(shard, SEQ, &[]));
            }
        }
    }
}

/// Whether a task may have moved, by the place that it ends at. A level ends in the seq it was given with: that
/// of a task that never moved is its id.
fn has_moved(task: TaskId, from: Place) -> bool {
    match from {
        Place::Lane(level) | Place::Timer(level) | Place::Parked(level) => level.seq() != task.0,
        Place::Aside | Place::Over => true,
    }
}

/// Reads the next op of a frame's payload.
pub(super) fn next_op<'a>(get: &mut Get<'a>) -> Option<Op<'a>> {
    let tag = get.u8()?;
    let kind = *Kind::ALL.get(usize::from(tag & !DELETE))?;
    let key_len = get.short()? as usize;
    if tag & DELETE != 0 {
        return Some(Op { kind, key: get.take(key_len)?, value: None });
    }
    let value_len = get.short()? as usize;
    let key = get.take(key_len)?;
    let start = get.at();
    get.take(value_len)?;
    Some(Op { kind, key, value: Some((start, start + value_len)) })
}

/// Which lane a lane's record is of, as the prefix of its rows.
pub(super) fn lane_of_record(key: &[u8]) -> Option<LanePrefix> {
    if key.len() != 11 || key[4] != LANE {
        return None;
    }
    let mut prefix = [0; 10];
    prefix[..4].copy_from_slice(&key[..4]);
    prefix[4..].copy_from_slice(&key[5..]);
    Some(prefix)
}

/// A name that is a number.
fn queue(name: &mut Get<'_>) -> Option<QueueId> {
    Some(QueueId(u32::from_be_bytes(name.take(4)?.try_into().ok()?)))
}

fn lane(name: &mut Get<'_>) -> Option<LaneId> {
    Some(LaneId { queue: queue(name)?, priority: Priority(name.u8()?), class: Class(name.u8()?) })
}

fn task(name: &mut Get<'_>) -> Option<TaskId> {
    Some(TaskId(u64::from_be_bytes(name.take(8)?.try_into().ok()?)))
}

/// The rest of a name, as text.
fn text<'a>(record: &'a [u8], name: &Get<'_>) -> Option<&'a str> {
    std::str::from_utf8(record.get(name.at()..)?).ok()
}

/// The task that a record of a single task is of.
pub(super) fn task_of_record(record: &[u8]) -> Option<TaskId> {
    task(&mut Get::from(record, 5))
}

/// Adds a record to what a new owner must know. `aside` gets the tasks that are set aside.
pub(super) fn tell(
    metadata: &mut Metadata,
    aside: &mut Vec<TaskId>,
    record: &[u8],
    value: &[u8],
) -> Option<()> {
    let name = &mut Get::from(record, 5);
    match record.get(4)? {
        &EPOCH | &MOVED | &TRY | &REPLAYED | &PARKED_ROW => {}
        &PARKED => {
            let lane = lane(name)?;
            metadata.parked.push((lane, Key::new(text(record, name)?).ok()?, values::parked(value)?));
        }
        &PAUSED => {
            let queue = queue(name)?;
            metadata.paused.push((queue, Key::new(text(record, name)?).ok()?));
        }
        &SEQ => metadata.next_seq = values::number(value)?,
        &QUEUE => metadata.queues.push((queue(name)?, values::queue(value)?)),
        &SETTINGS => metadata.settings.push((queue(name)?, values::settings(value)?)),
        &OVERRIDE => {
            let queue = queue(name)?;
            metadata.overrides.push((queue, Key::new(text(record, name)?).ok()?, values::own(value)?));
        }
        &LANE => {
            let (lane, record) = (lane(name)?, values::lane(value)?);
            if lane == TIMERS {
                metadata.timers = ShelfRecord { ack: record.ack, max: record.max };
            } else {
                metadata.lanes.push((lane, record));
            }
        }
        &KEY => {
            let lane = lane(name)?;
            metadata.keys.push((lane, Key::new(text(record, name)?).ok()?, values::key_record(value)?));
        }
        &MEMBER => metadata.members.push((Seat::new(text(record, name)?).ok()?, values::member(value)?)),
        &STOPPED => metadata.stopped = true,
        &DOUBT => metadata.doubt = Some(values::number(value)?),
        &REQUEST => {
            let key = RequestKey(u128::from_be_bytes(name.take(16)?.try_into().ok()?));
            metadata.requests.push((key, values::request(value)?));
        }
        &STORE => metadata.store = Some(StoreId(values::number(value)?)),
        &CANCELING => metadata.canceling.push(task(name)?),
        &ASIDE => aside.push(task(name)?),
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use evenhand_core::Task;
    use evenhand_core::backlog::{Charge, Cost, Weight};
    use evenhand_core::change::{EndRecord, Timed, TimerRow, Try};
    use evenhand_core::life::{End, Outcome};
    use evenhand_core::names::{ContentType, Millis};

    use super::*;

    const SHARD: ShardId = ShardId(1);
    const OWN: LaneId = LaneId { queue: QueueId(1), priority: Priority(5), class: Class(0) };

    fn level(seq: u64) -> Level {
        Level::new(Default::default(), seq)
    }

    fn task(place: Place) -> Task {
        Task {
            id: TaskId(1),
            lane: OWN,
            place,
            key: Key::shared(),
            charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
            attempt: 1,
            max_attempts: 3,
            lost: 0,
            terms: None,
            replay_of: None,
            accepted: Millis(0),
            content_type: ContentType::default(),
            payload: [].into(),
            files: Default::default(),
        }
    }

    fn finished(from: Place, tries: u16, canceling: bool, remember: bool) -> Change {
        let (key, outcome, at) = (Key::shared(), Outcome::Succeeded, Millis(0));
        let end = remember.then(|| Arc::new(EndRecord { key, outcome, at, last: None, result: [].into() }));
        Change::Finished { task: TaskId(1), lane: OWN, from, tries, canceling, outcome, end }
    }

    fn moved(from: Place, to: Place, tried: bool) -> Change {
        let end = End::Failed;
        let (started, ended, error) = (Millis(0), Millis(0), "".into());
        let tried = tried.then_some(Try { attempt: 1, seat: None, started, ended, end, error });
        Change::Moved { lane: OWN, from, to, row: task(to).row_at(level(9)), tried }
    }

    fn acked(ack: Level) -> Change {
        Change::Lane { lane: OWN, record: LaneRecord { ack, ..LaneRecord::default() } }
    }

    /// Puts and deletes of changes: a letter for each, capital if it puts; `r`ow, `t`ask, `e`nd, or `x` for a
    /// record, whose own letter follows.
    fn ops(changes: &[Change]) -> String {
        let batch = Batch::of(SHARD, changes);
        let get = &mut Get::from(&batch.bytes, FRAME_HEADER);
        let mut text = String::new();
        while !get.is_done() {
            let op = next_op(get).unwrap();
            let letter = match op.kind {
                Kind::Rows => 'r',
                Kind::Tasks if is_end(op.key) => 'e',
                Kind::Tasks => 't',
                Kind::Records => 'x',
            };
            text.push(if op.value.is_some() { letter.to_ascii_uppercase() } else { letter });
            if op.kind == Kind::Records {
                text.push(op.key[4].into());
            }
        }
        text
    }

    #[test]
    fn an_ordinary_task_costs_no_more_than_it_must() {
        let own = Place::Lane(level(1));
        assert_eq!(ops(&[Change::Accepted(task(own))]), "RT");
        assert_eq!(ops(&[finished(own, 0, false, false)]), "tr");
        assert_eq!(ops(&[finished(own, 0, false, false), acked(level(1))]), "tXl");
        assert_eq!(ops(&[finished(own, 0, false, true)]), "Er");
        assert_eq!(ops(&[finished(own, 0, false, true), acked(level(1))]), "EXl");
        let forget = TimerRow { at: level(2), task: TaskId(1), what: Timed::Forget { tries: 0 } };
        assert_eq!(ops(&[Change::Timed(forget)]), "R");
        assert_eq!(ops(&[Change::Forgotten { task: TaskId(1), tries: 0 }]), "texmxP");
    }

    #[test]
    fn other_tasks_pay_for_what_they_wrote() {
        let (own, timer, later) = (Place::Lane(level(1)), Place::Timer(level(1)), Place::Lane(level(9)));
        assert_eq!(ops(&[Change::Accepted(task(timer))]), "RT");
        assert_eq!(ops(&[finished(timer, 0, false, false)]), "tr");
        let record = ShelfRecord { ack: level(1), max: level(1) };
        assert_eq!(ops(&[finished(timer, 0, false, false), Change::Timers { record }]), "tXl");
        assert_eq!(ops(&[moved(timer, later, false)]), "rRXm");
        assert_eq!(ops(&[moved(timer, later, false), Change::Timers { record }]), "RXmXl");
        assert_eq!(ops(&[moved(own, Place::Timer(level(9)), true)]), "rRXmXT");
        assert_eq!(ops(&[moved(own, Place::Aside, false)]), "rXaXm");
        assert_eq!(ops(&[finished(later, 0, false, false)]), "txmr");
        assert_eq!(ops(&[finished(later, 2, true, false)]), "txmxTxTrxc");
        assert_eq!(ops(&[finished(Place::Aside, 0, false, false)]), "txmxa");
        assert_eq!(ops(&[finished(later, 2, true, true)]), "Erxc");
        assert_eq!(ops(&[Change::Forgotten { task: TaskId(1), tries: 1_000 }]).matches("xT").count(), 20);
    }

    #[test]
    fn a_parked_task_costs_what_one_in_its_lane_does() {
        let (parked, later) = (Place::Parked(level(1)), Place::Lane(level(9)));
        assert_eq!(ops(&[Change::Accepted(task(parked))]), "XRT");
        assert_eq!(ops(&[moved(parked, later, false)]), "xRRXm");
        assert_eq!(ops(&[moved(later, Place::Parked(level(10)), false)]), "rXRXm");
        let unparked = Change::Unparked { lane: OWN, key: Key::shared(), level: level(1) };
        assert_eq!(ops(&[finished(parked, 0, false, false), unparked]), "txR");
        let paused = |paused| Change::Paused { queue: OWN.queue, key: Key::shared(), paused };
        assert_eq!(ops(&[paused(true), paused(false)]), "Xuxu");
    }

    /// Rows of a key stand together in order of their levels, whatever the keys and lanes around it.
    #[test]
    fn keys_of_parked_rows_sort_by_lane_key_and_level() {
        let other = LaneId { class: Class(1), ..OWN };
        let mut keys = Vec::new();
        for lane in [OWN, other] {
            for text in ["", "b", "ab", "abc"] {
                let key = Key::new(text).unwrap();
                keys.extend([1, 2, 300].map(|seq| parked_row_key(SHARD, lane, &key, level(seq))));
            }
        }
        assert!(keys.is_sorted());
        assert_eq!(place_of_parked(&keys[2]), Some((OWN, level(300))));
        assert_eq!(place_of_parked(&keys[23]), Some((other, level(300))));
    }
}
