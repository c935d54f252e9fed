//! Values as bytes: what stands behind a key of the embedded store, or in a column of another, written and read back.
//! Whatever the bytes are, reading them says None where they cannot be what we wrote, and never panics.
//!
//! What most tasks do not have takes no room: it is announced by a flag, which older formats never set, so that
//! their values are read by the same code. A charge says whether it is chained only where that is not what older
//! formats knew it by: that a level ends in the task's id, the seq that it was first placed with.

use std::sync::Arc;

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    AfterDowngrade, EndRecord, KeyRecord, LaneRecord, MemberRecord, Override, ParkedRecord, Place,
    QueueRecord, RequestIds, RequestRecord, Settings, SettingsRecord, Share, ShelfRecord, Timed, TimerRow,
    Totals, Try,
};
use evenhand_core::life::{Backoff, End, Outcome, Terms};
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, FileName, Incarnation, Key, LaneId, Life, Millis, Priority, QueueId,
    QueueName, Seat, TaskId, WorkerSetId,
};
use evenhand_core::{File, Row, Run, Task, bounds};

use crate::bytes::{Get, Put};

/// Where a task that has moved is now, and what that changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moved {
    pub(crate) place: Place,
    pub(crate) attempt: u16,
    pub(crate) lost: u8,
    pub(crate) charge: Charge,
    /// The class of its lane, and how long it may take, if it says how long.
    pub(crate) duration: Option<(Class, u64)>,
}

fn short<T: TryFrom<u64>>(get: &mut Get<'_>) -> Option<T> {
    T::try_from(get.short()?).ok()
}

fn put_key(value: &mut Vec<u8>, key: &Key) {
    value.put_text(key.as_str());
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

fn average(get: &mut Get<'_>) -> Option<Average> {
    get.short().map(Average::from_bits)
}

fn put_lane_id(value: &mut Vec<u8>, lane: LaneId) {
    value.put_short(lane.queue.0.into());
    value.put_u8(lane.priority.0);
    value.put_u8(lane.class.0);
}

fn lane_id(get: &mut Get<'_>) -> Option<LaneId> {
    let queue = QueueId(short(get)?);
    Some(LaneId { queue, priority: Priority(get.u8()?), class: Class(get.u8()?) })
}

/// Stands above every weight: the charge is chained though its level does not end in the task's id, or is not
/// though it does.
const CONTRARY: u32 = 1 << 20;
/// And this, that its cost is a time.
const TIMED: u32 = 1 << 21;

fn put_charge(value: &mut Vec<u8>, charge: Charge, level: Level, task: TaskId) {
    value.put_short(charge.cost.thousandths().into());
    let contrary = if charge.chained == (level.seq() == task.0) { 0 } else { CONTRARY };
    let timed = if charge.timed { TIMED } else { 0 };
    value.put_short(u64::from(charge.weight.thousandths() | contrary | timed));
}

fn charge(get: &mut Get<'_>, level: Level, task: TaskId) -> Option<Charge> {
    let cost = Cost::new(short(get)?).ok()?;
    let weight: u32 = short(get)?;
    let chained = (level.seq() == task.0) != (weight & CONTRARY != 0);
    let timed = weight & TIMED != 0;
    let weight = Weight::from_thousandths(weight & !(CONTRARY | TIMED))?;
    Some(Charge { cost, weight, chained, timed })
}

/// Stands above every number of tries: there is more, and a byte that says what.
const MORE: u32 = 1 << 16;
const HAS_LOST: u8 = 1;
const HAS_TERMS: u8 = 2;
const HAS_BACKOFF: u8 = 4;
const HAS_EXPIRY: u8 = 8;
const HAS_ATTACH: u8 = 16;
const HAS_EXPECTED: u8 = 32;
const HAS_MAX_DURATION: u8 = 64;

/// A task's tries, and what it asked for beyond the ordinary.
struct Tries {
    attempt: u16,
    max_attempts: u16,
    lost: u8,
    terms: Option<Arc<Terms>>,
}

fn put_tries(value: &mut Vec<u8>, attempt: u16, max_attempts: u16, lost: u8, terms: Option<&Terms>) {
    value.put_short(attempt.into());
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    let more = flag(lost > 0, HAS_LOST)
        | flag(terms.is_some(), HAS_TERMS)
        | flag(terms.is_some_and(|terms| terms.backoff.is_some()), HAS_BACKOFF)
        | flag(terms.is_some_and(|terms| terms.expires.is_some()), HAS_EXPIRY)
        | flag(terms.is_some_and(|terms| terms.attach_ms > 0), HAS_ATTACH)
        | flag(terms.is_some_and(|terms| terms.expected_ms > 0), HAS_EXPECTED)
        | flag(terms.is_some_and(|terms| terms.max_duration_ms > 0), HAS_MAX_DURATION);
    if more == 0 {
        return value.put_short(max_attempts.into());
    }
    value.put_short(u64::from(u32::from(max_attempts) | MORE));
    value.put_u8(more);
    if lost > 0 {
        value.put_u8(lost);
    }
    let Some(terms) = terms else { return };
    if let Some(backoff) = terms.backoff {
        put_backoff(value, backoff);
    }
    if let Some(expires) = terms.expires {
        value.put_short(expires.0);
    }
    if terms.attach_ms > 0 {
        value.put_short(terms.attach_ms);
    }
    if terms.expected_ms > 0 {
        value.put_short(terms.expected_ms);
    }
    if terms.max_duration_ms > 0 {
        value.put_short(terms.max_duration_ms);
    }
}

fn tries(get: &mut Get<'_>) -> Option<Tries> {
    let attempt = short(get)?;
    let max: u32 = short(get)?;
    let max_attempts = u16::try_from(max & !MORE).ok()?;
    let more = if max & MORE == 0 { 0 } else { get.u8()? };
    let known =
        HAS_LOST | HAS_TERMS | HAS_BACKOFF | HAS_EXPIRY | HAS_ATTACH | HAS_EXPECTED | HAS_MAX_DURATION;
    if more & !known != 0 {
        return None;
    }
    let has = |flag: u8| more & flag != 0;
    let lost = if has(HAS_LOST) { get.u8()? } else { 0 };
    let asked = Terms {
        backoff: if has(HAS_BACKOFF) { Some(backoff(get)?) } else { None },
        expires: if has(HAS_EXPIRY) { Some(Millis(get.short()?)) } else { None },
        attach_ms: if has(HAS_ATTACH) { get.short()? } else { 0 },
        expected_ms: if has(HAS_EXPECTED) { get.short()? } else { 0 },
        max_duration_ms: if has(HAS_MAX_DURATION) { get.short()? } else { 0 },
    };
    let terms = has(HAS_TERMS).then(|| Arc::new(asked));
    Some(Tries { attempt, max_attempts, lost, terms })
}

/// What a task asked for beyond the ordinary, alone.
pub(crate) fn put_terms(value: &mut Vec<u8>, terms: &Terms) {
    put_tries(value, 0, 0, 0, Some(terms));
}

pub(crate) fn terms(value: &[u8]) -> Option<Arc<Terms>> {
    tries(&mut Get::new(value))?.terms
}

fn put_backoff(value: &mut Vec<u8>, backoff: Backoff) {
    value.put_short(backoff.first_ms);
    value.put_short(backoff.factor.into());
    value.put_short(backoff.max_ms);
}

fn backoff(get: &mut Get<'_>) -> Option<Backoff> {
    Some(Backoff { first_ms: get.short()?, factor: short(get)?, max_ms: get.short()? })
}

/// A row, whose level is in its key.
pub(crate) fn put_row(value: &mut Vec<u8>, row: &Row) {
    value.put_short(row.task.0);
    put_key(value, &row.key);
    put_charge(value, row.charge, row.level, row.task);
    put_tries(value, row.attempt, row.max_attempts, row.lost, row.terms.as_deref());
}

pub(crate) fn row(at: Level, value: &[u8]) -> Option<Row> {
    get_row(at, &mut Get::new(value))
}

fn get_row(at: Level, get: &mut Get<'_>) -> Option<Row> {
    let task = TaskId(get.short()?);
    let (key, charge) = (key(get)?, charge(get, at, task)?);
    let Tries { attempt, max_attempts, lost, terms } = tries(get)?;
    Some(Row { level: at, task, key, charge, attempt, max_attempts, lost, terms })
}

const DUE: u8 = 0;
const EXPIRE: u8 = 1;
const DETACH: u8 = 2;
const FORGET: u8 = 3;

/// A timer for a task's row: a delay or a backoff.
pub(crate) fn put_due(value: &mut Vec<u8>, lane: LaneId, row: &Row) {
    value.put_u8(DUE);
    put_lane_id(value, lane);
    put_row(value, row);
}

/// A timer, whose level is in its key.
pub(crate) fn put_timer(value: &mut Vec<u8>, timer: &TimerRow) {
    match &timer.what {
        Timed::Due(lane, row) => put_due(value, *lane, row),
        Timed::Expire => {
            value.put_u8(EXPIRE);
            value.put_short(timer.task.0);
        }
        Timed::Detach => {
            value.put_u8(DETACH);
            value.put_short(timer.task.0);
        }
        Timed::Forget { tries } => {
            value.put_u8(FORGET);
            value.put_short(timer.task.0);
            value.put_short((*tries).into());
        }
    }
}

pub(crate) fn timer(at: Level, value: &[u8]) -> Option<TimerRow> {
    let get = &mut Get::new(value);
    let kind = get.u8()?;
    if kind == DUE {
        let lane = lane_id(get)?;
        let row = get_row(at, get)?;
        return Some(TimerRow { at, task: row.task, what: Timed::Due(lane, row) });
    }
    let task = TaskId(get.short()?);
    let what = match kind {
        EXPIRE => Timed::Expire,
        DETACH => Timed::Detach,
        FORGET => Timed::Forget { tries: short(get)? },
        _ => return None,
    };
    Some(TimerRow { at, task, what })
}

/// What a task's record has beside the rest.
const HAS_LEVEL: u8 = 1;
/// Formats 2 and 3 had how long it may take here; now it stands with its other terms.
const HAS_DURATION: u8 = 2;
const HAS_CONTENT_TYPE: u8 = 4;
/// Its level is one of the timers.
const IN_TIMERS: u8 = 8;
const HAS_REPLAY: u8 = 16;
/// Its level is one of its key's shelf.
const IS_PARKED: u8 = 32;
/// From format 4 on.
const HAS_FILES: u8 = 64;

pub(crate) fn put_files(value: &mut Vec<u8>, files: &[File]) {
    value.put_short(files.len() as u64);
    for file in files {
        value.put_text(file.name.as_str());
        value.put_short(file.bytes.len() as u64);
        value.put(&file.bytes);
    }
}

pub(crate) fn files_of(value: &[u8]) -> Option<Arc<[File]>> {
    files(&mut Get::new(value))
}

fn files(get: &mut Get<'_>) -> Option<Arc<[File]>> {
    let count: usize = short(get)?;
    let file = |_| {
        let name = FileName::new(get.text()?).ok()?;
        let bytes = short(get)?;
        Some(File { name, bytes: get.take(bytes)?.into() })
    };
    (0..count).map(file).collect()
}

pub(crate) fn put_task(value: &mut Vec<u8>, task: &Task) {
    put_lane_id(value, task.lane);
    let (placed, level) = match task.place {
        Place::Lane(level) => (HAS_LEVEL, level),
        Place::Timer(level) => (HAS_LEVEL | IN_TIMERS, level),
        Place::Parked(level) => (HAS_LEVEL | IS_PARKED, level),
        Place::Aside | Place::Over => (0, Level::ZERO),
    };
    let content_type = task.content_type.as_str();
    let typed = if content_type.is_empty() { 0 } else { HAS_CONTENT_TYPE };
    let again = if task.replay_of.is_some() { HAS_REPLAY } else { 0 };
    let filed = if task.files.is_empty() { 0 } else { HAS_FILES };
    value.put_u8(placed | typed | again | filed);
    if placed > 0 {
        value.put(&level.to_bytes());
    }
    put_key(value, &task.key);
    put_charge(value, task.charge, level, task.id);
    put_tries(value, task.attempt, task.max_attempts, task.lost, task.terms.as_deref());
    value.put_short(task.accepted.0);
    if typed > 0 {
        value.put_text(content_type);
    }
    if let Some(of) = task.replay_of {
        value.put_short(of.0);
    }
    if filed > 0 {
        put_files(value, &task.files);
    }
    value.put(&task.payload);
}

pub(crate) fn task(id: TaskId, value: &[u8]) -> Option<Task> {
    let get = &mut Get::new(value);
    let lane = lane_id(get)?;
    let has = get.u8()?;
    let known = HAS_LEVEL | HAS_DURATION | HAS_CONTENT_TYPE | IN_TIMERS | HAS_REPLAY | IS_PARKED | HAS_FILES;
    if has & !known != 0 {
        return None;
    }
    let at = if has & HAS_LEVEL != 0 { Some(level(get)?) } else { None };
    let place = match (at, has & IN_TIMERS != 0, has & IS_PARKED != 0) {
        (Some(level), false, false) => Place::Lane(level),
        (Some(level), true, false) => Place::Timer(level),
        (Some(level), false, true) => Place::Parked(level),
        (None, false, false) => Place::Aside,
        (Some(_), true, true) | (None, true, _) | (None, false, true) => return None,
    };
    let level = at.unwrap_or(Level::ZERO);
    let (key, charge) = (key(get)?, charge(get, level, id)?);
    let Tries { attempt, max_attempts, lost, mut terms } = tries(get)?;
    let accepted = Millis(get.short()?);
    if has & HAS_DURATION > 0 {
        let asked = terms.as_deref().cloned().unwrap_or_default();
        terms = Some(Terms { max_duration_ms: get.short()?, ..asked }.into());
    }
    Some(Task {
        id,
        lane,
        place,
        key,
        charge,
        attempt,
        max_attempts,
        lost,
        terms,
        accepted,
        content_type: if has & HAS_CONTENT_TYPE > 0 { content_type(get)? } else { ContentType::default() },
        replay_of: if has & HAS_REPLAY > 0 { Some(TaskId(get.short()?)) } else { None },
        files: if has & HAS_FILES > 0 { files(get)? } else { Arc::default() },
        payload: value.get(get.at()..)?.into(),
    })
}

/// Stand above the attempt of a task that has moved: not to a level of its lane, but there; both, to its key's
/// shelf.
const TO_TIMERS: u32 = 1 << 16;
const TO_ASIDE: u32 = 1 << 17;
/// Runs of it were lost.
const MOVED_LOST: u32 = 1 << 18;
/// It says how long it may take, which may have been shortened, and with it the class of its lane.
const MOVED_DURATION: u32 = 1 << 19;

pub(crate) fn put_moved(value: &mut Vec<u8>, lane: LaneId, to: Place, row: &Row) {
    let (flags, level) = match to {
        Place::Lane(level) => (0, level),
        Place::Timer(level) => (TO_TIMERS, level),
        Place::Parked(level) => (TO_TIMERS | TO_ASIDE, level),
        Place::Aside | Place::Over => (TO_ASIDE, Level::ZERO),
    };
    let lost = if row.lost > 0 { MOVED_LOST } else { 0 };
    value.put(&level.to_bytes());
    let timed = if row.max_duration_ms() > 0 { MOVED_DURATION } else { 0 };
    value.put_short(u64::from(u32::from(row.attempt) | flags | lost | timed));
    put_charge(value, row.charge, level, row.task);
    if lost > 0 {
        value.put_u8(row.lost);
    }
    if timed > 0 {
        value.put_u8(lane.class.0);
        value.put_short(row.max_duration_ms());
    }
}

pub(crate) fn moved(task: TaskId, value: &[u8]) -> Option<Moved> {
    let get = &mut Get::new(value);
    let level = level(get)?;
    let attempt: u32 = short(get)?;
    let place = match (attempt & TO_TIMERS != 0, attempt & TO_ASIDE != 0) {
        (false, false) => Place::Lane(level),
        (true, false) => Place::Timer(level),
        (false, true) => Place::Aside,
        (true, true) => Place::Parked(level),
    };
    let charge = charge(get, level, task)?;
    let lost = if attempt & MOVED_LOST != 0 { get.u8()? } else { 0 };
    let duration = if attempt & MOVED_DURATION != 0 { Some((Class(get.u8()?), get.short()?)) } else { None };
    let attempt = u16::try_from(attempt & !(TO_TIMERS | TO_ASIDE | MOVED_LOST | MOVED_DURATION)).ok()?;
    Some(Moved { place, attempt, lost, charge, duration })
}

fn put_outcome(value: &mut Vec<u8>, outcome: Outcome) {
    value.put_u8(match outcome {
        Outcome::Succeeded => 0,
        Outcome::Failed => 1,
        Outcome::Canceled => 2,
        Outcome::Expired => 3,
    });
}

fn outcome(get: &mut Get<'_>) -> Option<Outcome> {
    match get.u8()? {
        0 => Some(Outcome::Succeeded),
        1 => Some(Outcome::Failed),
        2 => Some(Outcome::Canceled),
        3 => Some(Outcome::Expired),
        _ => None,
    }
}

fn end(get: &mut Get<'_>) -> Option<End> {
    match get.u8()? {
        0 => Some(End::Succeeded),
        1 => Some(End::Failed),
        2 => Some(End::FailedForGood),
        3 => Some(End::Lost),
        4 => Some(End::TimeUp),
        5 => Some(End::Downgraded),
        _ => None,
    }
}

/// A try; its attempt is written too, because that of an end has no key of its own.
pub(crate) fn put_try(value: &mut Vec<u8>, tried: &Try) {
    value.put_short(tried.attempt.into());
    // No seat has an empty name.
    value.put_text(tried.seat.as_ref().map_or("", |seat| seat.as_str()));
    value.put_short(tried.started.0);
    value.put_short(tried.ended.0);
    value.put_u8(match tried.end {
        End::Succeeded => 0,
        End::Failed => 1,
        End::FailedForGood => 2,
        End::Lost => 3,
        End::TimeUp => 4,
        End::Downgraded => 5,
    });
    value.put_short(tried.error.len() as u64);
    value.put(tried.error.as_bytes());
}

pub(crate) fn tried(value: &[u8]) -> Option<Try> {
    get_try(&mut Get::new(value))
}

fn get_try(get: &mut Get<'_>) -> Option<Try> {
    let attempt = short(get)?;
    let seat = match get.text()? {
        "" => None,
        name => Some(Seat::new(name).ok()?),
    };
    let (started, ended) = (Millis(get.short()?), Millis(get.short()?));
    let end = end(get)?;
    let bytes = short(get)?;
    let error = std::str::from_utf8(get.take(bytes)?).ok()?.into();
    Some(Try { attempt, seat, started, ended, end, error })
}

/// How a task of a lane ended.
pub(crate) fn put_end(value: &mut Vec<u8>, lane: LaneId, end: &EndRecord) {
    put_lane_id(value, lane);
    put_key(value, &end.key);
    put_outcome(value, end.outcome);
    value.put_short(end.at.0);
    match &end.last {
        Some(last) => {
            value.put_u8(1);
            put_try(value, last);
        }
        None => value.put_u8(0),
    }
    value.put(&end.result);
}

/// The lane of a task that has ended.
pub(crate) fn lane_of_end(value: &[u8]) -> Option<LaneId> {
    lane_id(&mut Get::new(value))
}

pub(crate) fn end_record(value: &[u8]) -> Option<EndRecord> {
    let get = &mut Get::new(value);
    lane_id(get)?;
    let key = key(get)?;
    let outcome = outcome(get)?;
    let at = Millis(get.short()?);
    let last = match get.u8()? {
        0 => None,
        1 => Some(get_try(get)?),
        _ => return None,
    };
    Some(EndRecord { key, outcome, at, last, result: value.get(get.at()..)?.into() })
}

pub(crate) fn put_member(value: &mut Vec<u8>, record: &MemberRecord) {
    value.put_u64(record.token);
    value.put_short(record.life.process);
    value.put_short(record.life.rejoin.into());
    value.put_short(record.wait_ms);
    value.put_short(record.running.len() as u64);
    for run in &record.running {
        value.put_short(run.task.0);
        put_lane_id(value, run.lane);
        value.put(&run.level.to_bytes());
        put_key(value, &run.key);
        put_charge(value, run.charge, run.level, run.task);
        put_tries(value, run.attempt, run.max_attempts, run.lost, run.terms.as_deref());
        value.put_short(run.fence.epoch.0);
        value.put_short(run.fence.dispatch);
        value.put_short(run.started.0);
    }
    value.put_u8(record.set.is_some().into());
    if let Some(WorkerSetId { incarnation, version, hash }) = record.set {
        value.put_short(incarnation.epoch.0);
        value.put_u64(incarnation.nonce);
        value.put_short(version);
        value.put_u64(hash);
    }
    record.running.iter().for_each(|run| value.put_u64(run.fence.nonce));
    record.running.iter().for_each(|run| value.put_short(run.limit_ms));
}

fn worker_set(get: &mut Get<'_>) -> Option<WorkerSetId> {
    let incarnation = Incarnation { epoch: Epoch(get.short()?), nonce: get.u64()? };
    Some(WorkerSetId { incarnation, version: get.short()?, hash: get.u64()? })
}

pub(crate) fn member(value: &[u8]) -> Option<MemberRecord> {
    let get = &mut Get::new(value);
    let token = get.u64()?;
    let life = Life { process: get.short()?, rejoin: short(get)? };
    let wait_ms = get.short()?;
    let runs = get.short()?;
    let mut running = Vec::new();
    for _ in 0..runs {
        let task = TaskId(get.short()?);
        let lane = lane_id(get)?;
        let level = level(get)?;
        let key = key(get)?;
        let charge = charge(get, level, task)?;
        let Tries { attempt, max_attempts, lost, terms } = tries(get)?;
        let fence = Fence { epoch: Epoch(get.short()?), dispatch: get.short()?, nonce: 0 };
        let started = Millis(get.short()?);
        running.push(Run {
            task,
            lane,
            level,
            key,
            charge,
            attempt,
            max_attempts,
            lost,
            terms,
            fence,
            started,
            limit_ms: 0,
        });
    }
    let mut record = MemberRecord { token, life, wait_ms, running, set: None };
    if get.is_done() {
        return Some(record); // written before there were sets and nonces
    }
    record.set = match get.u8()? {
        0 => None,
        1 => Some(worker_set(get)?),
        _ => return None,
    };
    for run in &mut record.running {
        run.fence.nonce = get.u64()?;
    }
    if get.is_done() {
        return Some(record); // format 3 did not say how long they may take
    }
    for run in &mut record.running {
        run.limit_ms = get.short()?;
    }
    Some(record)
}

pub(crate) fn put_parked(value: &mut Vec<u8>, record: &ParkedRecord) {
    value.put_short(record.rows);
    value.put(&record.shelf.ack.to_bytes());
    value.put(&record.shelf.max.to_bytes());
}

pub(crate) fn parked(value: &[u8]) -> Option<ParkedRecord> {
    let get = &mut Get::new(value);
    let rows = get.short()?;
    Some(ParkedRecord { rows, shelf: ShelfRecord { ack: level(get)?, max: level(get)? } })
}

/// Stand above the weight of a key: what follows it. A refund comes last, and is there if anything is left.
const HAS_CREDIT: u32 = 1 << 20;
const HAS_AVERAGE: u32 = 1 << 21;

pub(crate) fn put_key_record(value: &mut Vec<u8>, record: &KeyRecord) {
    value.put_u128(record.finish.to_bits());
    value.put_u128(record.due.to_bits());
    value.put_u32(record.rows);
    value.put_u32(record.chained);
    let (credit, average) = (record.credit.to_bits(), record.average.to_bits());
    let has_credit = if credit > 0 { HAS_CREDIT } else { 0 };
    let has_average = if average > 0 { HAS_AVERAGE } else { 0 };
    value.put_u32(record.weight.thousandths() | has_credit | has_average);
    if credit > 0 {
        value.put_u128(credit);
    }
    if average > 0 {
        value.put_short(average);
    }
    if record.refund > VTime::ZERO {
        value.put_u128(record.refund.to_bits());
    }
}

pub(crate) fn key_record(value: &[u8]) -> Option<KeyRecord> {
    let get = &mut Get::new(value);
    let (finish, due) = (vtime(get)?, vtime(get)?);
    let (rows, chained, weight) = (get.u32()?, get.u32()?, get.u32()?);
    Some(KeyRecord {
        finish,
        due,
        rows,
        chained,
        credit: if weight & HAS_CREDIT != 0 { vtime(get)? } else { VTime::ZERO },
        average: if weight & HAS_AVERAGE != 0 { average(get)? } else { Average::default() },
        refund: if get.is_done() { VTime::ZERO } else { vtime(get)? },
        weight: Weight::from_thousandths(weight & !(HAS_CREDIT | HAS_AVERAGE))?,
    })
}

pub(crate) fn put_lane(value: &mut Vec<u8>, record: &LaneRecord) {
    value.put(&record.ack.to_bytes());
    value.put(&record.max.to_bytes());
    value.put_u128(record.vtime.to_bits());
    value.put_u128(record.turn.to_bits());
}

pub(crate) fn lane(value: &[u8]) -> Option<LaneRecord> {
    let get = &mut Get::new(value);
    Some(LaneRecord { ack: level(get)?, max: level(get)?, vtime: vtime(get)?, turn: vtime(get)? })
}

/// The ack level of a lane's record.
pub(crate) fn ack(value: &[u8]) -> Option<Level> {
    level(&mut Get::new(value))
}

pub(crate) fn put_queue(value: &mut Vec<u8>, record: &QueueRecord) {
    value.put_text(record.name.as_str());
    let Totals { accepted, succeeded, failed, canceled, expired, scheduled } = record.totals;
    for count in [accepted, succeeded, failed, canceled, expired, scheduled] {
        value.put_u64(count);
    }
    if record.average != Average::default() {
        value.put_short(record.average.to_bits());
    }
}

pub(crate) fn queue(value: &[u8]) -> Option<QueueRecord> {
    let get = &mut Get::new(value);
    let name = QueueName::new(get.text()?).ok()?;
    let mut totals = Totals {
        accepted: get.u64()?,
        succeeded: get.u64()?,
        failed: get.u64()?,
        canceled: get.u64()?,
        ..Totals::default()
    };
    // Formats 1 and 2 end here.
    if !get.is_done() {
        (totals.expired, totals.scheduled) = (get.u64()?, get.u64()?);
    }
    let average = if get.is_done() { Average::default() } else { average(get)? };
    Some(QueueRecord { name, totals, average })
}

/// Stand above the weight of a key's own: what it has beside. Without a weight there is 0 in its place.
const OWN_LIMIT: u32 = 1 << 20;
const OWN_RATE: u32 = 1 << 21;

pub(crate) fn put_override(value: &mut Vec<u8>, over: &Override) {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let weight = over.weight.map_or(0, Weight::thousandths);
    value.put_u32(weight | flag(over.limit.is_some(), OWN_LIMIT) | flag(over.rate.is_some(), OWN_RATE));
    if let Some(limit) = over.limit {
        value.put_short(limit.into());
    }
    if let Some(rate) = over.rate {
        put_rate(value, rate);
    }
}

pub(crate) fn own(value: &[u8]) -> Option<Override> {
    let get = &mut Get::new(value);
    let first = get.u32()?;
    let weight = match first & !(OWN_LIMIT | OWN_RATE) {
        0 => None,
        weight => Some(Weight::from_thousandths(weight)?),
    };
    Some(Override {
        weight,
        limit: if first & OWN_LIMIT != 0 { Some(short(get)?) } else { None },
        rate: if first & OWN_RATE != 0 { Some(rate(get)?) } else { None },
    })
}

fn put_rate(value: &mut Vec<u8>, rate: Rate) {
    value.put_short(rate.per_second);
    value.put_short(rate.burst);
    value.put_u8(match rate.unit {
        RateUnit::Tasks => 0,
        RateUnit::Cost => 1,
    });
}

fn rate(get: &mut Get<'_>) -> Option<Rate> {
    let (per_second, burst) = (get.short()?, get.short()?);
    let unit = match get.u8()? {
        0 => RateUnit::Tasks,
        1 => RateUnit::Cost,
        _ => return None,
    };
    Some(Rate { per_second, burst, unit })
}

fn put_maybe<T>(value: &mut Vec<u8>, what: Option<T>, put: impl FnOnce(&mut Vec<u8>, T)) {
    value.put_u8(what.is_some().into());
    if let Some(what) = what {
        put(value, what);
    }
}

fn maybe<T>(get: &mut Get<'_>, what: impl FnOnce(&mut Get<'_>) -> Option<T>) -> Option<Option<T>> {
    match get.u8()? {
        0 => Some(None),
        1 => what(get).map(Some),
        _ => None,
    }
}

fn put_class(value: &mut Vec<u8>, class: ClassLimit) {
    value.put_short(class.duration_ms);
    let (kind, limit) = match class.limit {
        Limit::All => (0, 0),
        Limit::Slots(limit) => (1, limit),
        Limit::Percent(percent) => (2, percent.into()),
    };
    value.put_u8(kind);
    value.put_short(limit.into());
}

fn class(get: &mut Get<'_>) -> Option<ClassLimit> {
    let (duration_ms, kind) = (get.short()?, get.u8()?);
    let limit: u32 = short(get)?;
    let limit = match kind {
        0 => Limit::All,
        1 => Limit::Slots(limit),
        2 => Limit::Percent(u8::try_from(limit).ok()?),
        _ => return None,
    };
    Some(ClassLimit { duration_ms, limit })
}

pub(crate) fn put_settings(value: &mut Vec<u8>, record: &SettingsRecord) {
    let Settings { max_attempts, backoff, max_lost, retention_ms, share, paused, .. } = record.settings;
    let Settings { classes, after_downgrade, interactive_grace_ms, key_limit, rate, key_rate, .. } =
        &record.settings;
    value.put_short(record.version);
    value.put_short(max_attempts.into());
    put_backoff(value, backoff);
    value.put_u8(max_lost);
    value.put_short(retention_ms);
    value.put_u8(match share {
        Share::Tasks => 0,
        Share::Time => 1,
    });
    value.put_u8(paused.into());
    value.put_short(classes.len() as u64);
    classes.iter().for_each(|class| put_class(value, *class));
    value.put_u8(match after_downgrade {
        AfterDowngrade::Fail => 0,
        AfterDowngrade::Requeue => 1,
    });
    value.put_short(*interactive_grace_ms);
    put_maybe(value, *key_limit, |value, limit| value.put_short(limit.into()));
    put_maybe(value, *rate, put_rate);
    put_maybe(value, *key_rate, put_rate);
}

pub(crate) fn settings(value: &[u8]) -> Option<SettingsRecord> {
    let get = &mut Get::new(value);
    let version = get.short()?;
    let mut settings = Settings {
        max_attempts: short(get)?,
        backoff: backoff(get)?,
        max_lost: get.u8()?,
        retention_ms: get.short()?,
        share: match get.u8()? {
            0 => Share::Tasks,
            1 => Share::Time,
            _ => return None,
        },
        paused: match get.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        },
        ..Settings::default()
    };
    if get.is_done() {
        return Some(SettingsRecord { version, settings }); // format 3 knew no more
    }
    let classes: u8 = short(get)?;
    settings.classes = (0..classes).map(|_| class(get)).collect::<Option<_>>()?;
    settings.after_downgrade = match get.u8()? {
        0 => AfterDowngrade::Fail,
        1 => AfterDowngrade::Requeue,
        _ => return None,
    };
    settings.interactive_grace_ms = get.short()?;
    settings.key_limit = maybe(get, short)?;
    (settings.rate, settings.key_rate) = (maybe(get, rate)?, maybe(get, rate)?);
    Some(SettingsRecord { version, settings })
}

const RANGE: u8 = 0;
const LIST: u8 = 1;

/// A request. What its ids are comes last: format 2 knew ranges alone, and did not say.
pub(crate) fn put_request(value: &mut Vec<u8>, record: &RequestRecord) {
    value.put_short(record.until.0);
    match &record.ids {
        RequestIds::Range { first, tasks } => {
            value.put_short(first.0);
            value.put_short((*tasks).into());
            value.put_u8(RANGE);
        }
        RequestIds::List(ids) => {
            value.put_short(0);
            value.put_short(ids.len() as u64);
            value.put_u8(LIST);
            ids.iter().for_each(|id| value.put_short(id.0));
        }
    }
}

pub(crate) fn request(value: &[u8]) -> Option<RequestRecord> {
    let get = &mut Get::new(value);
    let (time, first, tasks) = (get.short()?, TaskId(get.short()?), short::<u32>(get)?);
    first.0.checked_add(tasks.into())?; // whoever lists them may add
    if get.is_done() {
        // Format 2 saved when it came.
        let until = Millis(time.saturating_add(bounds::REQUEST_MS));
        return Some(RequestRecord { until, ids: RequestIds::Range { first, tasks } });
    }
    let ids = match get.u8()? {
        RANGE => RequestIds::Range { first, tasks },
        LIST => RequestIds::List((0..tasks).map(|_| get.short().map(TaskId)).collect::<Option<_>>()?),
        _ => return None,
    };
    Some(RequestRecord { until: Millis(time), ids })
}

pub(crate) fn epoch(value: &[u8]) -> Option<Epoch> {
    number(value).map(Epoch)
}

pub(crate) fn number(value: &[u8]) -> Option<u64> {
    Get::new(value).u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(put: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut value = Vec::new();
        put(&mut value);
        value
    }

    /// Each of them with the others and without, and no room for what is not there.
    #[test]
    fn what_a_key_mostly_does_not_have_takes_no_room() {
        let none = KeyRecord {
            finish: VTime::from_bits(5 << 70),
            due: VTime::from_bits(u128::MAX),
            rows: 9,
            chained: 7,
            refund: VTime::ZERO,
            credit: VTime::ZERO,
            average: Average::default(),
            weight: Weight::MAX,
        };
        let longest = Average::from_bits(u64::MAX);
        for refund in [0, 1, 1 << 20, u128::MAX] {
            for credit in [0, 1, 1 << 20, u128::MAX] {
                for average in [Average::default(), Average::from_bits(1), longest] {
                    let [refund, credit] = [refund, credit].map(VTime::from_bits);
                    let record = KeyRecord { refund, credit, average, ..none };
                    let value = bytes(|value| put_key_record(value, &record));
                    assert_eq!(key_record(&value), Some(record));
                    let times = [refund, credit].iter().filter(|time| **time > VTime::ZERO).count();
                    let shorts = bytes(|value| value.put_short(average.to_bits())).len();
                    let shorts = if average == Average::default() { 0 } else { shorts };
                    assert_eq!(value.len(), 44 + 16 * times + shorts);
                }
            }
        }
        // What was written before there was credit: a refund, or nothing, behind the weight.
        let before = KeyRecord { refund: VTime::from_bits(77), ..none };
        let mut old = bytes(|value| put_key_record(value, &none));
        assert_eq!(key_record(&old), Some(none));
        old.put_u128(77);
        assert_eq!(key_record(&old), Some(before));
    }

    /// Formats 1 and 2 had four counts, format 3 had six before there were averages.
    #[test]
    fn queues_of_every_age_are_read() {
        let name = QueueName::new("render").unwrap();
        let of = |counts: u64, average: Option<u64>| {
            bytes(|value| {
                value.put_text(name.as_str());
                (1..=counts).for_each(|count| value.put_u64(count));
                average.into_iter().for_each(|average| value.put_short(average));
            })
        };
        let mut totals = Totals { accepted: 1, succeeded: 2, failed: 3, canceled: 4, ..Totals::default() };
        let record = |totals, average| {
            Some(QueueRecord { name: name.clone(), totals, average: Average::from_bits(average) })
        };
        assert_eq!(queue(&of(4, None)), record(totals, 0));
        (totals.expired, totals.scheduled) = (5, 6);
        assert_eq!(queue(&of(6, None)), record(totals, 0));
        assert_eq!(queue(&of(6, Some(1_000))), record(totals, 1_000));
        for (average, written) in [(0, of(6, None)), (1_000, of(6, Some(1_000)))] {
            let record = record(totals, average).unwrap();
            assert_eq!(bytes(|value| put_queue(value, &record)), written);
        }
    }

    fn task_with(files: &[(&str, &[u8])]) -> Task {
        let file = |(name, bytes): &(&str, &[u8])| File {
            name: FileName::new(name).unwrap(),
            bytes: Arc::from(*bytes),
        };
        Task {
            id: TaskId(7),
            lane: LaneId { queue: QueueId(1), priority: Priority(5), class: Class(0) },
            place: Place::Lane(Level::new(Default::default(), 7)),
            key: Key::shared(),
            charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
            attempt: 1,
            max_attempts: 5,
            lost: 0,
            terms: None,
            replay_of: None,
            accepted: Millis(1_000),
            content_type: ContentType::default(),
            payload: b"payload".as_slice().into(),
            files: files.iter().map(file).collect(),
        }
    }

    /// Whatever is cut off or changed of a task with files, reading it says so or reads something, and never panics.
    #[test]
    fn files_stand_before_the_payload_and_take_no_room_where_there_are_none() {
        let none = bytes(|value| put_task(value, &task_with(&[])));
        assert_eq!(none[3] & HAS_FILES, 0);
        assert_eq!(task(TaskId(7), &none), Some(task_with(&[])));
        let some = task_with(&[("a", b""), ("b c", b"\0\xff"), ("d", &[7; 300])]);
        let value = bytes(|value| put_task(value, &some));
        assert_eq!(task(TaskId(7), &value), Some(some));
        let of_files = 1 + (2 + 1 + 1) + (2 + 3 + 1 + 2) + (2 + 1 + 2 + 300);
        assert_eq!(value.len(), none.len() + of_files);
        for end in 0..value.len() - b"payload".len() {
            assert_eq!(task(TaskId(7), &value[..end]), None, "cut off at {end}");
        }
        for at in 0..value.len() {
            let mut changed = value.clone();
            changed[at] ^= 0xff;
            let _ = task(TaskId(7), &changed);
        }
    }

    /// Neither flag of a charge shows in its weight, nor in the other.
    #[test]
    fn the_flags_of_a_charge_stand_above_every_weight() {
        assert!(Weight::MAX.thousandths() < CONTRARY.min(HAS_CREDIT));
        let at = Level::new(Default::default(), 7);
        for (chained, timed) in [(false, false), (false, true), (true, false), (true, true)] {
            for (weight, task) in [(Weight::MIN, 7), (Weight::MAX, 8)] {
                let written = Charge { cost: Cost::MAX, weight, chained, timed };
                let value = bytes(|value| put_charge(value, written, at, TaskId(task)));
                assert_eq!(charge(&mut Get::new(&value), at, TaskId(task)), Some(written));
            }
        }
    }
}
