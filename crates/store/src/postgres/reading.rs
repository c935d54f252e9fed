//! Reading: rows of the database as the core knows them. What cannot be what we wrote is named, with its table and task.

use std::sync::Arc;

use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    EndRecord, LaneRecord, ParkedRecord, Place, QueueRecord, ShelfRecord, Timed, TimerRow, Totals, Try,
};
use evenhand_core::life::{End, Outcome};
use evenhand_core::names::{
    Class, ContentType, Key, LaneId, Millis, Priority, QueueId, QueueName, RequestKey, Seat, StoreId, TaskId,
};
use evenhand_core::{Metadata, Row, Task};
use tokio_postgres::Row as Found;
use tokio_postgres::types::FromSql;

use super::errors::corrupt;
use super::writing::{ASIDE, DETACH, EXPIRE, FORGET, IN_LANE, OVER, PARKED, TIMED};
use crate::{History, StoreError, values};

/// The columns of a task, as [`task`] wants them.
pub(super) const TASK: &str = "id, queue, priority, class, place, level, key, cost, weight, chained, timed, attempt, \
     max_attempts, lost, terms, replay_of, accepted_ms, content_type, files, payload";

/// A column of a row; None if it is not what it should be.
fn get<'a, T: FromSql<'a>>(row: &'a Found, column: &str) -> Option<T> {
    row.try_get(column).ok()
}

fn number<T: TryFrom<i64>>(row: &Found, column: &str) -> Option<T> {
    T::try_from(get::<i32>(row, column)?.into()).ok()
}

fn small(row: &Found, column: &str) -> Option<u8> {
    u8::try_from(get::<i16>(row, column)?).ok()
}

fn long(row: &Found, column: &str) -> Option<u64> {
    get::<i64>(row, column).map(|number| number as u64)
}

fn level(row: &Found, column: &str) -> Option<Level> {
    get::<&[u8]>(row, column)?.try_into().ok().map(Level::from_bytes)
}

fn vtime(row: &Found, column: &str) -> Option<VTime> {
    let bytes = get::<&[u8]>(row, column)?.try_into().ok()?;
    Some(VTime::from_bits(u128::from_be_bytes(bytes)))
}

fn key(row: &Found) -> Option<Key> {
    Key::new(get(row, "key")?).ok()
}

fn queue_id(row: &Found) -> Option<QueueId> {
    get::<i32>(row, "queue").map(|queue| QueueId(queue as u32))
}

fn lane(row: &Found) -> Option<LaneId> {
    let (priority, class) = (Priority(small(row, "priority")?), Class(small(row, "class")?));
    Some(LaneId { queue: queue_id(row)?, priority, class })
}

fn id(row: &Found) -> Option<TaskId> {
    long(row, "id").map(TaskId)
}

fn charge(row: &Found) -> Option<Charge> {
    Some(Charge {
        cost: Cost::new(number(row, "cost")?).ok()?,
        weight: Weight::from_thousandths(number(row, "weight")?)?,
        chained: get(row, "chained")?,
        timed: get(row, "timed")?,
    })
}

/// Says which row it is that makes no sense.
fn sense<T>(what: &str, row: &Found, read: Option<T>) -> Result<T, StoreError> {
    read.ok_or_else(|| {
        let of = ["id", "queue", "key", "seat"].iter().find_map(|column| {
            let number = get::<i64>(row, column).or_else(|| get::<i32>(row, column).map(i64::from));
            let value = number.map(|id| id.to_string()).or_else(|| get::<String>(row, column))?;
            Some(format!(" ({column} {value})"))
        });
        corrupt(format!("a row of {what}{} cannot be what was written", of.unwrap_or_default()))
    })
}

/// All rows of an answer.
pub(super) fn all<T>(
    what: &str,
    found: &[Found],
    read: impl Fn(&Found) -> Option<T>,
) -> Result<Vec<T>, StoreError> {
    found.iter().map(|row| sense(what, row, read(row))).collect()
}

/// The first row of an answer, if there is one.
pub(super) fn first<T>(
    what: &str,
    found: &[Found],
    read: impl Fn(&Found) -> Option<T>,
) -> Result<Option<T>, StoreError> {
    found.first().map(|row| sense(what, row, read(row))).transpose()
}

/// What a task asked for, where it may have asked for nothing.
fn maybe<'a, T: FromSql<'a>, R>(
    row: &'a Found,
    column: &str,
    read: impl FnOnce(T) -> Option<R>,
) -> Option<Option<R>> {
    match get::<Option<T>>(row, column)? {
        Some(value) => read(value).map(Some),
        None => Some(None),
    }
}

/// A row of a lane, or of a shelf.
pub(super) fn row(row: &Found) -> Option<Row> {
    Some(Row {
        level: level(row, "level")?,
        task: id(row)?,
        key: key(row)?,
        charge: charge(row)?,
        attempt: number(row, "attempt")?,
        max_attempts: number(row, "max_attempts")?,
        lost: small(row, "lost")?,
        terms: maybe(row, "terms", values::terms)?,
    })
}

/// A timer.
pub(super) fn timer(found: &Found) -> Option<TimerRow> {
    let (at, task) = (level(found, "level")?, id(found)?);
    let what = match get::<i16>(found, "kind")? {
        0 => Timed::Due(lane(found)?, row(found)?),
        EXPIRE => Timed::Expire,
        DETACH => Timed::Detach,
        FORGET => Timed::Forget { tries: number(found, "tries")? },
        _ => return None,
    };
    Some(TimerRow { at, task, what })
}

/// A task.
pub(super) fn task(row: &Found) -> Option<Task> {
    let place = match get::<i16>(row, "place")? {
        IN_LANE => Place::Lane(level(row, "level")?),
        TIMED => Place::Timer(level(row, "level")?),
        PARKED => Place::Parked(level(row, "level")?),
        ASIDE => Place::Aside,
        OVER => Place::Over,
        _ => return None,
    };
    Some(Task {
        id: id(row)?,
        lane: lane(row)?,
        place,
        key: key(row)?,
        charge: charge(row)?,
        attempt: number(row, "attempt")?,
        max_attempts: number(row, "max_attempts")?,
        lost: small(row, "lost")?,
        terms: maybe(row, "terms", values::terms)?,
        replay_of: maybe(row, "replay_of", |id: i64| Some(TaskId(id as u64)))?,
        accepted: Millis(long(row, "accepted_ms")?),
        content_type: ContentType::new(get(row, "content_type")?).ok()?,
        payload: get::<&[u8]>(row, "payload")?.into(),
        files: maybe(row, "files", values::files_of)?.unwrap_or_default(),
    })
}

fn end(number: i16) -> Option<End> {
    let ends = [End::Succeeded, End::Failed, End::FailedForGood, End::Lost, End::TimeUp, End::Downgraded];
    ends.get(usize::try_from(number).ok()?).copied()
}

fn outcome(number: i16) -> Option<Outcome> {
    let outcomes = [Outcome::Succeeded, Outcome::Failed, Outcome::Canceled, Outcome::Expired];
    outcomes.get(usize::try_from(number).ok()?).copied()
}

/// A try, or the last one of a task that has ended.
fn tried(row: &Found) -> Option<Try> {
    let raw = maybe(row, "error_raw", |raw: &[u8]| std::str::from_utf8(raw).ok().map(Arc::from))?;
    Some(Try {
        attempt: number(row, "attempt")?,
        seat: maybe(row, "seat", |seat| Seat::new(seat).ok())?,
        started: Millis(long(row, "started_ms")?),
        ended: Millis(long(row, "ended_ms")?),
        end: end(get(row, "ending")?)?,
        error: match raw {
            Some(error) => error,
            None => Arc::from(get::<&str>(row, "error")?),
        },
    })
}

/// The statement that reads what became of a task: its tries in order and, with an outcome, the task.
pub(super) fn history_of(schema: &str) -> String {
    format!(
        "SELECT NULL::smallint AS outcome, NULL::bigint AS at_ms, NULL::bigint AS replayed_as, NULL::text AS key,
            NULL::bytea AS result, NULL::smallint AS place, attempt, outcome AS ending, started_ms, ended_ms, seat, error,
            error_raw
         FROM {schema}.tries WHERE shard = $1 AND task = $2
         UNION ALL
         SELECT outcome, ended_ms, replayed_as, coalesce(end_key, key), result, place, last_attempt, last_end, last_started_ms, last_ended_ms,
            last_seat, last_error, last_error_raw
         FROM {schema}.tasks WHERE shard = $1 AND id = $2"
    )
}

/// What became of a task.
pub(super) fn history(found: &[Found]) -> Result<History, StoreError> {
    let mut history = History::default();
    for row in found {
        let added = add_to(&mut history, row);
        sense("tries, or an end,", row, added)?;
    }
    history.tries.sort_by_key(|tried| tried.attempt);
    Ok(history)
}

fn add_to(history: &mut History, row: &Found) -> Option<()> {
    let Some(place) = get::<Option<i16>>(row, "place")? else {
        history.tries.push(tried(row)?);
        return Some(());
    };
    history.replayed_as = maybe(row, "replayed_as", |id: i64| Some(TaskId(id as u64)))?;
    if place == OVER {
        history.end = Some(EndRecord {
            key: key(row)?,
            outcome: outcome(get(row, "outcome")?)?,
            at: Millis(long(row, "at_ms")?),
            last: if get::<Option<i32>>(row, "attempt")?.is_some() { Some(tried(row)?) } else { None },
            result: get::<&[u8]>(row, "result")?.into(),
        });
    }
    Some(())
}

/// What an owner must know: the answers to [`METADATA`], in its order.
pub(super) fn metadata(found: &[Vec<Found>; METADATA.len()]) -> Result<Metadata, StoreError> {
    let [
        shards,
        queues,
        settings,
        lanes,
        keys,
        parked,
        paused,
        overrides,
        members,
        requests,
        aside,
        canceling,
    ] = found;
    let shard = first("shards", shards, |row| {
        Some(Metadata {
            next_seq: long(row, "next_seq")?,
            stopped: get(row, "stopped")?,
            doubt: maybe(row, "doubt_ms", |ms: i64| Some(ms as u64))?,
            store: maybe(row, "store_id", |id: i64| Some(StoreId(id as u64)))?,
            timers: ShelfRecord { ack: level(row, "timers_ack")?, max: level(row, "timers_max")? },
            ..Metadata::default()
        })
    })?;
    Ok(Metadata {
        queues: all("queues", queues, |row| Some((queue_id(row)?, queue(row)?)))?,
        settings: all("settings", settings, |row| {
            Some((queue_id(row)?, values::settings(get(row, "record")?)?))
        })?,
        lanes: all("lanes", lanes, |row| {
            let (ack, max) = (level(row, "ack")?, level(row, "max")?);
            Some((
                lane(row)?,
                LaneRecord { ack, max, vtime: vtime(row, "vtime")?, turn: vtime(row, "turn")? },
            ))
        })?,
        keys: all("keys", keys, |row| {
            Some((lane(row)?, key(row)?, values::key_record(get(row, "record")?)?))
        })?,
        parked: all("parked", parked, |row| {
            let shelf = ShelfRecord { ack: level(row, "ack")?, max: level(row, "max")? };
            Some((lane(row)?, key(row)?, ParkedRecord { rows: long(row, "rows")?, shelf }))
        })?,
        paused: all("paused", paused, |row| Some((queue_id(row)?, key(row)?)))?,
        overrides: all("overrides", overrides, |row| {
            Some((queue_id(row)?, key(row)?, values::own(get(row, "record")?)?))
        })?,
        members: all("members", members, |row| {
            Some((Seat::new(get(row, "seat")?).ok()?, values::member(get(row, "record")?)?))
        })?,
        requests: all("requests", requests, |row| {
            let key = get::<&[u8]>(row, "key")?.try_into().ok().map(u128::from_be_bytes)?;
            Some((RequestKey(key), values::request(get(row, "record")?)?))
        })?,
        aside: all("tasks", aside, task)?,
        canceling: all("tasks", canceling, id)?,
        ..shard.ok_or_else(|| corrupt("the shard was taken, and is not there".into()))?
    })
}

fn queue(row: &Found) -> Option<QueueRecord> {
    Some(QueueRecord {
        name: QueueName::new(get(row, "name")?).ok()?,
        totals: Totals {
            accepted: long(row, "accepted")?,
            succeeded: long(row, "succeeded")?,
            failed: long(row, "failed")?,
            canceled: long(row, "canceled")?,
            expired: long(row, "expired")?,
            scheduled: long(row, "scheduled")?,
        },
        average: Average::from_bits(long(row, "average")?),
    })
}

/// What is read of each table when a shard is taken.
pub(super) const METADATA: [(&str, &str); 12] = [
    ("next_seq, stopped, doubt_ms, store_id, timers_ack, timers_max", "shards WHERE shard = $1"),
    (
        "queue, name, accepted, succeeded, failed, canceled, expired, scheduled, average",
        "queues WHERE shard = $1",
    ),
    ("queue, record", "settings WHERE shard = $1"),
    ("queue, priority, class, ack, max, vtime, turn", "lanes WHERE shard = $1"),
    ("queue, priority, class, key, record", "keys WHERE shard = $1"),
    ("queue, priority, class, key, rows, ack, max", "parked WHERE shard = $1"),
    ("queue, key", "paused WHERE shard = $1"),
    ("queue, key, record", "overrides WHERE shard = $1"),
    ("seat, record", "members WHERE shard = $1"),
    ("key, record", "requests WHERE shard = $1"),
    (TASK, "tasks WHERE shard = $1 AND place = 3"),
    ("id", "tasks WHERE shard = $1 AND canceling"),
];
