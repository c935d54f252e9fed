//! What a change becomes on disk. Three kinds of rows, each in sorted tables of its own:
//!
//! | kind | key | value | written |
//! |---|---|---|---|
//! | rows | shard, lane, level | what the window needs of a task | once |
//! | tasks | shard, id | the task as it was accepted, payload included | once |
//! | records | shard, one letter, a name | epoch, seq, queues, lanes, keys, overrides, moves, workers, requests | in place |
//!
//! A task costs two puts when it is accepted (its row, its record) and two deletes when it ends, or one if
//! the same commit raises its lane's ack level above it, which deletes rows by range. A retried
//! task's place and attempt stand in a small record of their own ([`MOVED`]), and one that was set aside
//! has another ([`ASIDE`]), so that rows and tasks are written once and never again: a delete then cancels
//! its put wherever the two meet, and a task that ends soon after it was accepted never reaches a table.
//! Such a task pays for what it wrote with one more delete each.
//!
//! Keys are big-endian, so that bytes sort as numbers do.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use evenhand_core::backlog::{Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, MemberRecord, QueueRecord, RequestRecord, Totals};
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, Key, LaneId, Life, Millis, Priority, QueueId, QueueName, RequestKey,
    Seat, ShardId, StoreId, TaskId,
};
use evenhand_core::{Change, Metadata, Row, Run, Task};

use super::bytes::{Get, Put};
use super::log::FRAME_HEADER;
use super::table::TableKey;

/// The key of a row: shard (4), queue (4), priority, class, level (16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowKey([u8; 26]);
/// The part of it that names the lane.
pub(super) type LanePrefix = [u8; 10];
/// The key of a task: shard (4), id (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskKey([u8; 12]);
/// The key of a record: shard (4), a letter, a name.
pub(super) type RecordKey = Box<[u8]>;

/// The shard's epoch.
pub(super) const EPOCH: u8 = b'e';
/// The shard's counter of seqs.
pub(super) const SEQ: u8 = b's';
/// A queue, by id.
pub(super) const QUEUE: u8 = b'q';
/// A weight by override, by queue and key.
pub(super) const OVERRIDE: u8 = b'o';
/// A lane, by id.
pub(super) const LANE: u8 = b'l';
/// A key, by lane and text.
pub(super) const KEY: u8 = b'k';
/// Where a retried task is now, by task.
pub(super) const MOVED: u8 = b'm';
/// That a task is set aside, by task.
pub(super) const ASIDE: u8 = b'a';
/// A worker that the shard counts on, by seat.
pub(super) const MEMBER: u8 = b'w';
/// That the last owner stopped in good order.
pub(super) const STOPPED: u8 = b'x';
/// A request, by what its caller named it.
pub(super) const REQUEST: u8 = b'r';
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
    /// Rows of lanes.
    Rows,
    /// Tasks with their payloads.
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

pub(super) fn task_of(key: &TaskKey) -> TaskId {
    TaskId(u64::from_be_bytes(part(&key.0, 4)))
}

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

pub(super) fn moved_key(shard: ShardId, task: TaskId) -> RecordKey {
    record_of_task(shard, MOVED, task)
}

pub(super) fn aside_key(shard: ShardId, task: TaskId) -> RecordKey {
    record_of_task(shard, ASIDE, task)
}

pub(super) fn epoch_key(shard: ShardId) -> RecordKey {
    record_key(shard, EPOCH, &[])
}

/// Where a retried task is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moved {
    pub(super) level: Level,
    pub(super) attempt: u16,
    pub(super) charge: Charge,
}

/// What a commit does, row by row, as it stands in the log. The first bytes are left free for the head of
/// the log's frame, so that a commit that travels alone is never copied.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) bytes: Vec<u8>,
    /// It accepts tasks, so it needs room that may not be there.
    pub(super) accepts: bool,
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
        Batch { bytes: vec![0; FRAME_HEADER], accepts: false }
    }

    pub(super) fn of(shard: ShardId, changes: &[Change]) -> Batch {
        let mut batch = Batch::new();
        let accepted = |change: &Change| match change {
            Change::Accepted(task) => 160 + 2 * task.key.as_str().len() + task.payload.len(),
            Change::Requeued { .. }
            | Change::SetAside { .. }
            | Change::Finished { .. }
            | Change::Key { .. }
            | Change::Lane { .. }
            | Change::Queue { .. }
            | Change::Override { .. }
            | Change::Stopped { .. }
            | Change::Request { .. }
            | Change::Store { .. }
            | Change::Seq { .. } => 64,
            Change::Member { record, .. } => 128 + 128 * record.as_ref().map_or(0, |r| r.running.len()),
        };
        batch.bytes.reserve(changes.iter().map(accepted).sum());
        let mut acks = BTreeMap::new();
        for change in changes {
            if let Change::Lane { lane, record } = change {
                acks.insert(*lane, record.ack);
            }
        }
        let mut value = Vec::with_capacity(512);
        for change in changes {
            batch.change(shard, change, &acks, &mut value);
        }
        batch
    }

    /// Deletes a row, unless the same commit settles its lane up to there: that deletes it too.
    fn delete_row(&mut self, shard: ShardId, lane: LaneId, level: Level, acks: &BTreeMap<LaneId, Level>) {
        if acks.get(&lane).is_none_or(|ack| level > *ack) {
            self.delete(Kind::Rows, row_key(lane_prefix(shard, lane), level).bytes());
        }
    }

    fn change(
        &mut self,
        shard: ShardId,
        change: &Change,
        acks: &BTreeMap<LaneId, Level>,
        value: &mut Vec<u8>,
    ) {
        value.clear();
        match change {
            Change::Accepted(task) => {
                self.accepts = true;
                if let Some(level) = task.level {
                    put_row(value, task.id, &task.key, task.charge, task.attempt, task.max_attempts);
                    self.put(Kind::Rows, row_key(lane_prefix(shard, task.lane), level).bytes(), value);
                    value.clear();
                }
                put_task(value, task);
                self.put(Kind::Tasks, task_key(shard, task.id).bytes(), value);
            }
            Change::Requeued { task, lane, from, row } => {
                let prefix = lane_prefix(shard, *lane);
                match from {
                    Some(from) => self.delete_row(shard, *lane, *from, acks),
                    None => self.delete(Kind::Records, &aside_key(shard, *task)),
                }
                put_row(value, row.task, &row.key, row.charge, row.attempt, row.max_attempts);
                self.put(Kind::Rows, row_key(prefix, row.level).bytes(), value);
                value.clear();
                value.put(&row.level.to_bytes());
                value.put_short(row.attempt.into());
                put_charge(value, row.charge);
                self.put(Kind::Records, &moved_key(shard, *task), value);
            }
            Change::SetAside { task, lane, level } => {
                self.delete_row(shard, *lane, *level, acks);
                self.put(Kind::Records, &aside_key(shard, *task), &[]);
            }
            Change::Finished { task, lane, level, outcome: _ } => {
                self.delete(Kind::Tasks, task_key(shard, *task).bytes());
                if let Some(level) = level {
                    self.delete_row(shard, *lane, *level, acks);
                } else {
                    self.delete(Kind::Records, &aside_key(shard, *task));
                }
                // A level ends in the seq it was given with: that of a task that never moved is its id.
                if level.is_none_or(|level| level.seq() != task.0) {
                    self.delete(Kind::Records, &moved_key(shard, *task));
                }
            }
            Change::Key { lane, key, record } => {
                let at = record_key(shard, KEY, &[&lane_prefix(shard, *lane)[4..], key.as_str().as_bytes()]);
                match record {
                    Some(record) => {
                        value.put_u128(record.finish.to_bits());
                        value.put_u128(record.due.to_bits());
                        value.put_u32(record.rows);
                        value.put_u32(record.chained);
                        value.put_u32(record.weight.thousandths());
                        self.put(Kind::Records, &at, value);
                    }
                    None => self.delete(Kind::Records, &at),
                }
            }
            Change::Lane { lane, record } => {
                value.put(&record.ack.to_bytes());
                value.put(&record.max.to_bytes());
                value.put_u128(record.vtime.to_bits());
                value.put_u128(record.turn.to_bits());
                let at = record_key(shard, LANE, &[&lane_prefix(shard, *lane)[4..]]);
                self.put(Kind::Records, &at, value);
            }
            Change::Queue { queue, record } => {
                value.put_text(record.name.as_str());
                let Totals { accepted, succeeded, failed, canceled } = record.totals;
                [accepted, succeeded, failed, canceled].into_iter().for_each(|count| value.put_u64(count));
                self.put(Kind::Records, &record_key(shard, QUEUE, &[&queue.0.to_be_bytes()]), value);
            }
            Change::Override { queue, key, weight } => {
                let at = record_key(shard, OVERRIDE, &[&queue.0.to_be_bytes(), key.as_str().as_bytes()]);
                match weight {
                    Some(weight) => {
                        value.put_u32(weight.thousandths());
                        self.put(Kind::Records, &at, value);
                    }
                    None => self.delete(Kind::Records, &at),
                }
            }
            Change::Member { seat, record } => {
                let at = record_key(shard, MEMBER, &[seat.as_str().as_bytes()]);
                match record {
                    Some(record) => {
                        put_member(value, record);
                        self.put(Kind::Records, &at, value);
                    }
                    None => self.delete(Kind::Records, &at),
                }
            }
            Change::Stopped { stopped } => {
                let at = record_key(shard, STOPPED, &[]);
                match stopped {
                    true => self.put(Kind::Records, &at, &[]),
                    false => self.delete(Kind::Records, &at),
                }
            }
            Change::Request { key, record } => {
                let at = record_key(shard, REQUEST, &[&key.0.to_be_bytes()]);
                match record {
                    Some(record) => {
                        value.put_short(record.at.0);
                        value.put_short(record.first.0);
                        value.put_short(record.tasks.into());
                        self.put(Kind::Records, &at, value);
                    }
                    None => self.delete(Kind::Records, &at),
                }
            }
            Change::Store { id } => {
                self.put(Kind::Records, &record_key(shard, STORE, &[]), &id.0.to_le_bytes());
            }
            Change::Seq { next } => {
                self.put(Kind::Records, &record_key(shard, SEQ, &[]), &next.to_le_bytes());
            }
        }
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

/// What a task's record has beside the rest.
const HAS_LEVEL: u8 = 1;
const HAS_DURATION: u8 = 2;
const HAS_CONTENT_TYPE: u8 = 4;

fn put_charge(value: &mut Vec<u8>, charge: Charge) {
    value.put_short(charge.cost.thousandths().into());
    value.put_short(charge.weight.thousandths().into());
}

fn put_row(value: &mut Vec<u8>, task: TaskId, key: &Key, charge: Charge, attempt: u16, max_attempts: u16) {
    value.put_short(task.0);
    value.put_text(key.as_str());
    put_charge(value, charge);
    value.put_short(attempt.into());
    value.put_short(max_attempts.into());
}

pub(super) fn put_task(value: &mut Vec<u8>, task: &Task) {
    value.put_short(task.lane.queue.0.into());
    value.put_u8(task.lane.priority.0);
    value.put_u8(task.lane.class.0);
    let timed = if task.max_duration_ms > 0 { HAS_DURATION } else { 0 };
    let content_type = task.content_type.as_str();
    let typed = if content_type.is_empty() { 0 } else { HAS_CONTENT_TYPE };
    match task.level {
        Some(level) => {
            value.put_u8(HAS_LEVEL | timed | typed);
            value.put(&level.to_bytes());
        }
        None => value.put_u8(timed | typed),
    }
    value.put_text(task.key.as_str());
    put_charge(value, task.charge);
    value.put_short(task.attempt.into());
    value.put_short(task.max_attempts.into());
    value.put_short(task.accepted.0);
    if timed > 0 {
        value.put_short(task.max_duration_ms);
    }
    if typed > 0 {
        value.put_text(content_type);
    }
    value.put(&task.payload);
}

fn put_member(value: &mut Vec<u8>, record: &MemberRecord) {
    value.put_u64(record.token);
    value.put_short(record.life.process);
    value.put_short(record.life.rejoin.into());
    value.put_short(record.wait_ms);
    value.put_short(record.running.len() as u64);
    for run in &record.running {
        value.put_short(run.task.0);
        value.put_short(run.lane.queue.0.into());
        value.put_u8(run.lane.priority.0);
        value.put_u8(run.lane.class.0);
        value.put(&run.level.to_bytes());
        value.put_text(run.key.as_str());
        put_charge(value, run.charge);
        value.put_short(run.attempt.into());
        value.put_short(run.max_attempts.into());
        value.put_short(run.fence.epoch.0);
        value.put_short(run.fence.dispatch);
        value.put_short(run.started.0);
    }
}

fn member(get: &mut Get<'_>) -> Option<MemberRecord> {
    let token = get.u64()?;
    let life = Life { process: get.short()?, rejoin: short(get)? };
    let wait_ms = get.short()?;
    let runs = get.short()?;
    let mut running = Vec::new();
    for _ in 0..runs {
        let task = TaskId(get.short()?);
        let queue = QueueId(short(get)?);
        running.push(Run {
            task,
            lane: LaneId { queue, priority: Priority(get.u8()?), class: Class(get.u8()?) },
            level: level(get)?,
            key: key(get)?,
            charge: charge(get)?,
            attempt: short(get)?,
            max_attempts: short(get)?,
            fence: Fence { epoch: Epoch(get.short()?), dispatch: get.short()? },
            started: Millis(get.short()?),
        });
    }
    Some(MemberRecord { token, life, wait_ms, running })
}

fn short<T: TryFrom<u64>>(get: &mut Get<'_>) -> Option<T> {
    T::try_from(get.short()?).ok()
}

fn charge(get: &mut Get<'_>) -> Option<Charge> {
    let cost = Cost::new(short(get)?).ok()?;
    Some(Charge { cost, weight: Weight::from_thousandths(short(get)?)? })
}

fn key(get: &mut Get<'_>) -> Option<Key> {
    Key::new(get.text()?).ok()
}

fn content_type(get: &mut Get<'_>) -> Option<ContentType> {
    ContentType::new(get.text()?).ok()
}

fn level(get: &mut Get<'_>) -> Option<Level> {
    Some(Level::from_bytes(get.take(16)?.try_into().ok()?))
}

fn vtime(get: &mut Get<'_>) -> Option<VTime> {
    get.u128().map(VTime::from_bits)
}

pub(super) fn row(at: &RowKey, value: &[u8]) -> Option<Row> {
    let get = &mut Get::new(value);
    let task = TaskId(get.short()?);
    let (key, charge) = (key(get)?, charge(get)?);
    Some(Row { level: level_of(at), task, key, charge, attempt: short(get)?, max_attempts: short(get)? })
}

pub(super) fn task(at: &TaskKey, value: &[u8]) -> Option<Task> {
    let get = &mut Get::new(value);
    let queue = QueueId(short(get)?);
    let lane = LaneId { queue, priority: Priority(get.u8()?), class: Class(get.u8()?) };
    let has = get.u8()?;
    if has & !(HAS_LEVEL | HAS_DURATION | HAS_CONTENT_TYPE) != 0 {
        return None;
    }
    let level = if has & HAS_LEVEL > 0 { Some(level(get)?) } else { None };
    Some(Task {
        id: task_of(at),
        lane,
        level,
        key: key(get)?,
        charge: charge(get)?,
        attempt: short(get)?,
        max_attempts: short(get)?,
        accepted: Millis(get.short()?),
        max_duration_ms: if has & HAS_DURATION > 0 { get.short()? } else { 0 },
        content_type: if has & HAS_CONTENT_TYPE > 0 { content_type(get)? } else { ContentType::default() },
        payload: value.get(get.at()..)?.into(),
    })
}

pub(super) fn moved(value: &[u8]) -> Option<Moved> {
    let get = &mut Get::new(value);
    Some(Moved { level: level(get)?, attempt: short(get)?, charge: charge(get)? })
}

pub(super) fn epoch(value: &[u8]) -> Option<Epoch> {
    Get::new(value).u64().map(Epoch)
}

pub(super) fn ack(value: &[u8]) -> Option<Level> {
    level(&mut Get::new(value))
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

fn lane(get: &mut Get<'_>) -> Option<LaneId> {
    let queue = QueueId(u32::from_be_bytes(get.take(4)?.try_into().ok()?));
    Some(LaneId { queue, priority: Priority(get.u8()?), class: Class(get.u8()?) })
}

/// Adds a record to what a new owner must know. `aside` gets the tasks that are set aside.
pub(super) fn tell(
    metadata: &mut Metadata,
    aside: &mut Vec<TaskId>,
    record: &[u8],
    value: &[u8],
) -> Option<()> {
    let name = &mut Get::from(record, 5);
    let get = &mut Get::new(value);
    match record.get(4)? {
        &EPOCH | &MOVED => {}
        &SEQ => metadata.next_seq = get.u64()?,
        &QUEUE => {
            let queue = QueueId(u32::from_be_bytes(name.take(4)?.try_into().ok()?));
            let name = QueueName::new(get.text()?).ok()?;
            let totals = Totals {
                accepted: get.u64()?,
                succeeded: get.u64()?,
                failed: get.u64()?,
                canceled: get.u64()?,
            };
            metadata.queues.push((queue, QueueRecord { name, totals }));
        }
        &OVERRIDE => {
            let queue = QueueId(u32::from_be_bytes(name.take(4)?.try_into().ok()?));
            let key = Key::new(std::str::from_utf8(&record[name.at()..]).ok()?).ok()?;
            metadata.overrides.push((queue, key, Weight::from_thousandths(get.u32()?)?));
        }
        &LANE => {
            let record =
                LaneRecord { ack: level(get)?, max: level(get)?, vtime: vtime(get)?, turn: vtime(get)? };
            metadata.lanes.push((lane(name)?, record));
        }
        &KEY => {
            let lane = lane(name)?;
            let key = Key::new(std::str::from_utf8(&record[name.at()..]).ok()?).ok()?;
            let record = KeyRecord {
                finish: vtime(get)?,
                due: vtime(get)?,
                rows: get.u32()?,
                chained: get.u32()?,
                weight: Weight::from_thousandths(get.u32()?)?,
            };
            metadata.keys.push((lane, key, record));
        }
        &MEMBER => {
            let seat = Seat::new(std::str::from_utf8(&record[name.at()..]).ok()?).ok()?;
            metadata.members.push((seat, member(get)?));
        }
        &STOPPED => metadata.stopped = true,
        &REQUEST => {
            let key = RequestKey(u128::from_be_bytes(name.take(16)?.try_into().ok()?));
            let (at, first) = (Millis(get.short()?), TaskId(get.short()?));
            metadata.requests.push((key, RequestRecord { at, first, tasks: short(get)? }));
        }
        &STORE => metadata.store = Some(StoreId(get.u64()?)),
        &ASIDE => aside.push(TaskId(u64::from_be_bytes(name.take(8)?.try_into().ok()?))),
        _ => return None,
    }
    Some(())
}
