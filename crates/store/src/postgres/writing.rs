//! Writing: what a commit [comes to](super::effects) as one statement, the [fence](Call) inside of it. What is not there
//! costs nothing: only functions that have something to do are called.

use std::sync::Arc;

use evenhand_core::change::{EndRecord, Place, Timed, TimerRow, Try};
use evenhand_core::life::{End, Outcome};
use evenhand_core::names::{Epoch, LaneId, QueueId, ShardId, TaskId};
use tokio_postgres::types::Type;

use super::columns::{Call, Sorted, bools, bytes, int2, int4, int8, one, texts};
use super::effects::{Effects, Moved, OfTask, Rows};
use crate::values;

/// Numbers of [`Place`].
pub(super) const IN_LANE: i16 = 0;
pub(super) const TIMED: i16 = 1;
pub(super) const PARKED: i16 = 2;
pub(super) const ASIDE: i16 = 3;
pub(super) const OVER: i16 = 4;

/// Kinds of timers that are no task's place.
pub(super) const EXPIRE: i16 = 1;
pub(super) const DETACH: i16 = 2;
pub(super) const FORGET: i16 = 3;

pub(super) fn shard(shard: ShardId) -> i32 {
    shard.0 as i32
}

pub(super) fn queue(queue: QueueId) -> i32 {
    queue.0 as i32
}

fn priority(lane: LaneId) -> i16 {
    lane.priority.0.into()
}

fn class(lane: LaneId) -> i16 {
    lane.class.0.into()
}

fn place(place: Place) -> (i16, Option<Sorted>) {
    match place {
        Place::Lane(level) => (IN_LANE, Some(level.into())),
        Place::Timer(level) => (TIMED, Some(level.into())),
        Place::Parked(level) => (PARKED, Some(level.into())),
        Place::Aside => (ASIDE, None),
        Place::Over => (OVER, None),
    }
}

pub(super) fn outcome(outcome: Outcome) -> i16 {
    match outcome {
        Outcome::Succeeded => 0,
        Outcome::Failed => 1,
        Outcome::Canceled => 2,
        Outcome::Expired => 3,
    }
}

pub(super) fn end(end: End) -> i16 {
    match end {
        End::Succeeded => 0,
        End::Failed => 1,
        End::FailedForGood => 2,
        End::Lost => 3,
        End::TimeUp => 4,
        End::Downgraded => 5,
    }
}

/// A text as PostgreSQL can hold it, and as it is if that is not the same.
fn text(text: &str) -> (String, Option<&[u8]>) {
    match text.contains('\0') {
        true => (text.replace('\0', "\u{fffd}"), Some(text.as_bytes())),
        false => (text.into(), None),
    }
}

/// A record in our own encoding.
fn record<T>(what: T, put: impl FnOnce(&mut Vec<u8>, T)) -> Vec<u8> {
    let mut value = Vec::new();
    put(&mut value, what);
    value
}

/// The rows that are put, and the keys of those that are deleted.
fn split<K, V>(rows: &Rows<K, V>) -> (Vec<(&K, &V)>, Vec<&K>) {
    let put = rows.iter().filter_map(|(key, value)| Some((key, value.as_ref()?))).collect();
    (put, rows.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| key).collect())
}

/// The statement of a commit.
pub(super) fn commit<'a>(
    schema: &'a str,
    of: ShardId,
    epoch: Epoch,
    writes: bool,
    all: &'a Effects,
) -> Call<'a> {
    let number = |number: Option<u64>| one(number.map(|number| number as i64), Type::INT8);
    let fence = vec![
        one(shard(of), Type::INT4),
        one(epoch.0 as i64, Type::INT8),
        one(writes, Type::BOOL),
        number(all.next_seq),
        one(all.stopped, Type::BOOL),
        one(all.doubt.is_some(), Type::BOOL),
        number(all.doubt.flatten()),
        number(all.store.map(|id| id.0)),
        one(all.shelf.map(|shelf| Sorted::from(shelf.ack)), Type::BYTEA),
        one(all.shelf.map(|shelf| Sorted::from(shelf.max)), Type::BYTEA),
    ];
    let mut call = Call::new(schema, "fence", fence);
    tasks(&mut call, all);
    tries(&mut call, all);
    timers(&mut call, all);
    queues(&mut call, all);
    keys(&mut call, all);
    people(&mut call, all);
    call
}

fn tasks<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let gone: Vec<i64> = all.tasks.iter().filter(|(_, of)| of.gone).map(|(id, _)| id.0 as i64).collect();
    if !gone.is_empty() {
        call.add("forget_tasks", vec![int8(gone), int8(all.untried.iter().map(|id| id.0 as i64))]);
    }
    new_tasks(call, all);
    moved_tasks(call, all);
    ended_tasks(call, all);
    let replayed: Vec<(&TaskId, TaskId)> =
        all.tasks.iter().filter_map(|(id, of)| Some((id, of.replayed_as?))).collect();
    if !replayed.is_empty() {
        let again = int8(replayed.iter().map(|(_, again)| again.0 as i64));
        call.add("replay_tasks", vec![int8(replayed.iter().map(|(id, _)| id.0 as i64)), again]);
    }
    let canceling: Vec<i64> =
        all.tasks.iter().filter(|(_, of)| of.canceling).map(|(id, _)| id.0 as i64).collect();
    if !canceling.is_empty() {
        call.add("cancel_tasks", vec![int8(canceling)]);
    }
}

fn new_tasks<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let new = || all.tasks.values().filter_map(|of| of.new.as_ref());
    if new().next().is_none() {
        return;
    }
    let terms = new().map(|task| task.terms.as_ref().map(|terms| record(&**terms, values::put_terms)));
    let files =
        new().map(|task| (!task.files.is_empty()).then(|| record(&task.files[..], values::put_files)));
    call.add(
        "put_tasks",
        vec![
            int8(new().map(|task| task.id.0 as i64)),
            int4(new().map(|task| queue(task.lane.queue))),
            int2(new().map(|task| priority(task.lane))),
            int2(new().map(|task| class(task.lane))),
            int2(new().map(|task| place(task.place).0)),
            bytes(new().map(|task| place(task.place).1)),
            texts(new().map(|task| task.key.as_str())),
            int4(new().map(|task| task.charge.cost.thousandths() as i32)),
            int4(new().map(|task| task.charge.weight.thousandths() as i32)),
            bools(new().map(|task| task.charge.chained)),
            bools(new().map(|task| task.charge.timed)),
            int4(new().map(|task| i32::from(task.attempt))),
            int4(new().map(|task| i32::from(task.max_attempts))),
            int2(new().map(|task| i16::from(task.lost))),
            bytes(terms),
            int8(new().map(|task| task.replay_of.map(|of| of.0 as i64))),
            int8(new().map(|task| task.accepted.0 as i64)),
            texts(new().map(|task| task.content_type.as_str())),
            bytes(files),
            bytes(new().map(|task| &*task.payload)),
        ],
    );
}

fn moved_tasks<'a>(call: &mut Call<'a>, all: &'a Effects) {
    // Where one that has ended was last says nothing, but its tries and its charge stay.
    let moved: Vec<(&TaskId, &Moved)> =
        all.tasks.iter().filter_map(|(id, of)| Some((id, of.moved.as_ref()?))).collect();
    if moved.is_empty() {
        return;
    }
    let each = || moved.iter().map(|(_, moved)| *moved);
    let new_terms = each().map(|moved| {
        let terms = moved.terms.as_ref()?.as_ref()?;
        Some(record(&**terms, values::put_terms))
    });
    call.add(
        "move_tasks",
        vec![
            int8(moved.iter().map(|(id, _)| id.0 as i64)),
            int4(each().map(|moved| moved.lane.map(|lane| queue(lane.queue)))),
            int2(each().map(|moved| moved.lane.map(priority))),
            int2(each().map(|moved| moved.lane.map(class))),
            int2(each().map(|moved| place(moved.place).0)),
            bytes(each().map(|moved| place(moved.place).1)),
            int4(each().map(|moved| moved.charge.cost.thousandths() as i32)),
            int4(each().map(|moved| moved.charge.weight.thousandths() as i32)),
            bools(each().map(|moved| moved.charge.chained)),
            bools(each().map(|moved| moved.charge.timed)),
            int4(each().map(|moved| moved.tries.map(|(attempt, _)| i32::from(attempt)))),
            int2(each().map(|moved| moved.tries.map(|(_, lost)| i16::from(lost)))),
            bools(each().map(|moved| moved.terms.is_some())),
            bytes(new_terms),
        ],
    );
}

fn ended_tasks<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let end_of = |(id, of): (&'a TaskId, &'a OfTask)| Some((id, of.end.as_ref()?));
    let ended: Vec<(&TaskId, &Arc<EndRecord>)> = all.tasks.iter().filter_map(end_of).collect();
    if ended.is_empty() {
        return;
    }
    let last = || ended.iter().map(|(_, end)| end.last.as_ref());
    call.add(
        "end_tasks",
        vec![
            int8(ended.iter().map(|(id, _)| id.0 as i64)),
            int2(ended.iter().map(|(_, end)| outcome(end.outcome))),
            int8(ended.iter().map(|(_, end)| end.at.0 as i64)),
            int4(last().map(|last| last.map(|tried| i32::from(tried.attempt)))),
            int2(last().map(|last| last.map(|tried| end(tried.end)))),
            int8(last().map(|last| last.map(|tried| tried.started.0 as i64))),
            int8(last().map(|last| last.map(|tried| tried.ended.0 as i64))),
            texts(last().map(|last| last.and_then(|tried| tried.seat.as_ref()).map(|seat| seat.as_str()))),
            texts(last().map(|last| last.map(|tried| text(&tried.error).0))),
            bytes(last().map(|last| last.and_then(|tried| text(&tried.error).1))),
            bytes(ended.iter().map(|(_, end)| &*end.result)),
            texts(ended.iter().map(|(_, end)| end.key.as_str())),
        ],
    );
}

fn tries<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let (put, gone): (Vec<(&(TaskId, u16), &Try)>, _) = split(&all.tries);
    if !gone.is_empty() {
        let attempts = int4(gone.iter().map(|(_, attempt)| i32::from(*attempt)));
        call.add("drop_tries", vec![int8(gone.iter().map(|(task, _)| task.0 as i64)), attempts]);
    }
    if put.is_empty() {
        return;
    }
    let each = || put.iter().map(|(_, tried)| *tried);
    call.add(
        "put_tries",
        vec![
            int8(put.iter().map(|((task, _), _)| task.0 as i64)),
            int4(each().map(|tried| i32::from(tried.attempt))),
            int8(each().map(|tried| tried.started.0 as i64)),
            int8(each().map(|tried| tried.ended.0 as i64)),
            int2(each().map(|tried| end(tried.end))),
            texts(each().map(|tried| tried.seat.as_ref().map(|seat| seat.as_str()))),
            texts(each().map(|tried| text(&tried.error).0)),
            bytes(each().map(|tried| text(&tried.error).1)),
        ],
    );
}

fn timers<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let (put, gone) = split(&all.timers);
    if !gone.is_empty() {
        call.add("drop_timers", vec![bytes(gone.iter().map(|level| Sorted::from(**level)))]);
    }
    if put.is_empty() {
        return;
    }
    let kind = |timer: &TimerRow| match timer.what {
        // Never among these: see `Effects`.
        Timed::Due(..) | Timed::Expire => (EXPIRE, None),
        Timed::Detach => (DETACH, None),
        Timed::Forget { tries } => (FORGET, Some(i32::from(tries))),
    };
    call.add(
        "put_timers",
        vec![
            bytes(put.iter().map(|(level, _)| Sorted::from(**level))),
            int2(put.iter().map(|(_, timer)| kind(timer).0)),
            int8(put.iter().map(|(_, timer)| timer.task.0 as i64)),
            int4(put.iter().map(|(_, timer)| kind(timer).1)),
        ],
    );
}

fn queues<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let totals = || all.queues.values().map(|record| record.totals);
    if !all.queues.is_empty() {
        call.add(
            "put_queues",
            vec![
                int4(all.queues.keys().map(|id| queue(*id))),
                texts(all.queues.values().map(|record| record.name.as_str())),
                int8(totals().map(|totals| totals.accepted as i64)),
                int8(totals().map(|totals| totals.succeeded as i64)),
                int8(totals().map(|totals| totals.failed as i64)),
                int8(totals().map(|totals| totals.canceled as i64)),
                int8(totals().map(|totals| totals.expired as i64)),
                int8(totals().map(|totals| totals.scheduled as i64)),
                int8(all.queues.values().map(|record| record.average.to_bits() as i64)),
            ],
        );
    }
    if !all.settings.is_empty() {
        call.add(
            "put_settings",
            vec![
                int4(all.settings.keys().map(|id| queue(*id))),
                int8(all.settings.values().map(|settings| settings.version as i64)),
                bools(all.settings.values().map(|settings| settings.settings.paused)),
                bytes(all.settings.values().map(|settings| record(settings, values::put_settings))),
            ],
        );
    }
    if !all.lanes.is_empty() {
        call.add(
            "put_lanes",
            vec![
                int4(all.lanes.keys().map(|lane| queue(lane.queue))),
                int2(all.lanes.keys().map(|lane| priority(*lane))),
                int2(all.lanes.keys().map(|lane| class(*lane))),
                bytes(all.lanes.values().map(|lane| Sorted::from(lane.ack))),
                bytes(all.lanes.values().map(|lane| Sorted::from(lane.max))),
                bytes(all.lanes.values().map(|lane| Sorted::from(lane.vtime))),
                bytes(all.lanes.values().map(|lane| Sorted::from(lane.turn))),
            ],
        );
    }
}

fn keys<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let (put, gone) = split(&all.keys);
    if !gone.is_empty() {
        call.add(
            "drop_keys",
            vec![
                int4(gone.iter().map(|(lane, _)| queue(lane.queue))),
                int2(gone.iter().map(|(lane, _)| priority(*lane))),
                int2(gone.iter().map(|(lane, _)| class(*lane))),
                texts(gone.iter().map(|(_, key)| key.as_str())),
            ],
        );
    }
    if !put.is_empty() {
        call.add(
            "put_keys",
            vec![
                int4(put.iter().map(|((lane, _), _)| queue(lane.queue))),
                int2(put.iter().map(|((lane, _), _)| priority(*lane))),
                int2(put.iter().map(|((lane, _), _)| class(*lane))),
                texts(put.iter().map(|((_, key), _)| key.as_str())),
                int4(put.iter().map(|(_, of)| of.weight.thousandths() as i32)),
                int8(put.iter().map(|(_, of)| i64::from(of.rows))),
                bytes(put.iter().map(|(_, of)| record(*of, values::put_key_record))),
            ],
        );
    }
    let (put, gone) = split(&all.parked);
    if !gone.is_empty() {
        call.add(
            "drop_parked",
            vec![
                int4(gone.iter().map(|(lane, _)| queue(lane.queue))),
                int2(gone.iter().map(|(lane, _)| priority(*lane))),
                int2(gone.iter().map(|(lane, _)| class(*lane))),
                texts(gone.iter().map(|(_, key)| key.as_str())),
            ],
        );
    }
    if !put.is_empty() {
        call.add(
            "put_parked",
            vec![
                int4(put.iter().map(|((lane, _), _)| queue(lane.queue))),
                int2(put.iter().map(|((lane, _), _)| priority(*lane))),
                int2(put.iter().map(|((lane, _), _)| class(*lane))),
                texts(put.iter().map(|((_, key), _)| key.as_str())),
                int8(put.iter().map(|(_, of)| of.rows as i64)),
                bytes(put.iter().map(|(_, of)| Sorted::from(of.shelf.ack))),
                bytes(put.iter().map(|(_, of)| Sorted::from(of.shelf.max))),
            ],
        );
    }
}

/// What people and workers have to do with: paused keys, keys with something of their own, workers and requests.
fn people<'a>(call: &mut Call<'a>, all: &'a Effects) {
    let (put, gone) = split(&all.paused);
    let put: Vec<_> = put.into_iter().map(|(at, ())| at).collect();
    for (function, rows) in [("drop_paused", gone), ("put_paused", put)] {
        if !rows.is_empty() {
            let keys = texts(rows.iter().map(|(_, key)| key.as_str()));
            call.add(function, vec![int4(rows.iter().map(|(of, _)| queue(*of))), keys]);
        }
    }
    let (put, gone) = split(&all.overrides);
    if !gone.is_empty() {
        let keys = texts(gone.iter().map(|(_, key)| key.as_str()));
        call.add("drop_overrides", vec![int4(gone.iter().map(|(of, _)| queue(*of))), keys]);
    }
    if !put.is_empty() {
        call.add(
            "put_overrides",
            vec![
                int4(put.iter().map(|((of, _), _)| queue(*of))),
                texts(put.iter().map(|((_, key), _)| key.as_str())),
                int4(put.iter().map(|(_, own)| own.weight.map(|weight| weight.thousandths() as i32))),
                int8(put.iter().map(|(_, own)| own.limit.map(i64::from))),
                bytes(put.iter().map(|(_, own)| record(*own, values::put_override))),
            ],
        );
    }
    let (put, gone) = split(&all.members);
    if !gone.is_empty() {
        call.add("drop_members", vec![texts(gone.iter().map(|seat| seat.as_str()))]);
    }
    if !put.is_empty() {
        let running = put.iter().map(|(_, member)| {
            let ids: Vec<String> = member.running.iter().map(|run| (run.task.0 as i64).to_string()).collect();
            format!("{{{}}}", ids.join(","))
        });
        call.add(
            "put_members",
            vec![
                texts(put.iter().map(|(seat, _)| seat.as_str())),
                int8(put.iter().map(|(_, member)| member.wait_ms as i64)),
                texts(running),
                bytes(put.iter().map(|(_, member)| record(*member, values::put_member))),
            ],
        );
    }
    let (put, gone) = split(&all.requests);
    if !gone.is_empty() {
        call.add("drop_requests", vec![bytes(gone.iter().map(|key| Sorted::from(key.0)))]);
    }
    if !put.is_empty() {
        call.add(
            "put_requests",
            vec![
                bytes(put.iter().map(|(key, _)| Sorted::from(key.0))),
                int8(put.iter().map(|(_, request)| request.until.0 as i64)),
                bytes(put.iter().map(|(_, request)| record(*request, values::put_request))),
            ],
        );
    }
}
