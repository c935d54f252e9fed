//! Reading: what the trees hold, put together again as the core knows it. The same for a store that is
//! open for work and for one that is only looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use evenhand_core::backlog::Level;
use evenhand_core::change::{EndRecord, Place, TimerRow};
use evenhand_core::life::Terms;
use evenhand_core::names::{Epoch, Key, LaneId, ShardId, TaskId};
use evenhand_core::{Metadata, Row, Task};

use super::bytes::Value;
use super::files::DirError;
use super::layout::{self, RecordKey, RowKey, TIMERS, TaskKey};
use super::table::Slot;
use super::tree::{self, Found};
use super::trees::{Acks, Planted, Trees};
use super::witness::Saved;
use crate::values;
use crate::{History, LISTING_BYTES, LISTING_TASKS, Listing, Page, Wanted};

/// About what a listing reads at once.
const PIECE_BYTES: usize = 256 * 1024;

/// Bytes of tasks that are not wanted after which a listing ends, as it does after [many](LISTING_TASKS) of them.
const PASSED_BYTES: usize = 64 * 1024 * 1024;

/// Rows read at once when all are wanted: what is held in memory on the way.
const PIECE: usize = 16_384;

/// Something that has trees to read from.
pub(super) trait Reads {
    /// Lets `look` see the trees. Nothing that waits for the disk belongs in there.
    fn with<T>(&self, look: impl FnOnce(&Trees) -> T) -> T;

    /// What a key stands for.
    fn find<K: Planted>(&self, key: &K) -> Result<Option<Value>, DirError> {
        look_up(self.with(|trees| K::tree(trees).find(key)), key)
    }

    /// Rows in a range of keys, `limit` of them or all there are.
    fn rows<K: Planted>(
        &self,
        from: Bound<K>,
        to: Bound<K>,
        limit: usize,
    ) -> Result<Vec<(K, Value)>, DirError> {
        self.with(|trees| K::tree(trees).view(from, to, limit)).rows()
    }

    /// All rows in a range of keys, piece by piece.
    fn walk<K: Planted>(
        &self,
        mut from: Bound<K>,
        to: Bound<K>,
        mut each: impl FnMut(&K, &Value) -> Result<(), DirError>,
    ) -> Result<(), DirError> {
        loop {
            let found = self.rows(from, to.clone(), PIECE)?;
            for (key, value) in &found {
                each(key, value)?;
            }
            match found.last() {
                Some((last, _)) if found.len() == PIECE => from = Bound::Excluded(last.clone()),
                _ => return Ok(()),
            }
        }
    }

    /// All records of a shard that have one of these letters.
    fn records(
        &self,
        shard: ShardId,
        letters: std::ops::RangeInclusive<u8>,
        each: impl FnMut(&RecordKey, &Value) -> Result<(), DirError>,
    ) -> Result<(), DirError> {
        let from = Bound::Included(layout::record_key(shard, *letters.start(), &[]));
        let to = Bound::Excluded(layout::record_key(shard, letters.end() + 1, &[]));
        self.walk(from, to, each)
    }

    /// Every shard that has been taken.
    fn shards(&self) -> Result<Vec<ShardId>, DirError> {
        let mut shards: Vec<ShardId> = Vec::new();
        loop {
            let from = match shards.last() {
                Some(last) => last.0.checked_add(1),
                None => Some(0),
            };
            let Some(from) = from else { return Ok(shards) };
            let from: RecordKey = from.to_be_bytes().into();
            let first = self.rows(Bound::Included(from), Bound::Unbounded, 1)?;
            match first.first().and_then(|(key, _)| layout::shard_of(key)) {
                Some(shard) => shards.push(shard),
                None => return Ok(shards),
            }
        }
    }

    /// What the store remembers of its witness.
    fn witness(&self) -> Result<Option<Saved>, DirError> {
        let key: RecordKey = layout::WITNESS.into();
        let found = self.find(&key)?;
        found
            .map(|value| Saved::get(value.bytes()).ok_or_else(|| unreadable(format_args!("the witness"))))
            .transpose()
    }

    /// A shard's epoch.
    fn epoch(&self, shard: ShardId) -> Result<Epoch, DirError> {
        match self.find(&layout::epoch_key(shard))? {
            Some(value) => values::epoch(value.bytes())
                .ok_or_else(|| unreadable(format_args!("the epoch of shard {shard}"))),
            None => Ok(Epoch(0)),
        }
    }

    /// The ack level of every lane.
    fn acks(&self) -> Result<Acks, DirError> {
        let mut acks = Acks::new();
        for shard in self.shards()? {
            self.records(shard, layout::LANE..=layout::LANE, |key, value| {
                let known = layout::lane_of_record(key).zip(values::ack(value.bytes()));
                let (lane, ack) = known.ok_or_else(|| unreadable_record(key))?;
                acks.insert(lane, ack);
                Ok(())
            })?;
        }
        Ok(acks)
    }

    /// Rows of a lane above a level.
    fn page(&self, shard: ShardId, lane: LaneId, above: Level, limit: usize) -> Result<Page, DirError> {
        self.page_of(shard, lane, above, limit, row)
    }

    /// Timers above a level.
    fn timers(&self, shard: ShardId, above: Level, limit: usize) -> Result<Page<TimerRow>, DirError> {
        self.page_of(shard, TIMERS, above, limit, timer)
    }

    /// Rows of a key that are parked beside a lane, above a level.
    fn parked(
        &self,
        shard: ShardId,
        lane: LaneId,
        key: &Key,
        above: Level,
        limit: usize,
    ) -> Result<Page, DirError> {
        let at = |level| layout::parked_row_key(shard, lane, key, level);
        let (from, to) = (Bound::Excluded(at(above)), Bound::Included(at(Level::from_bytes([0xff; 16]))));
        let mut found = self.rows::<RecordKey>(from, to, limit.saturating_add(1))?;
        let end = found.len() <= limit;
        found.truncate(limit);
        let rows = found.iter().map(|(at, value)| Ok(parked_row(at, value)?.1)).collect::<Result<_, _>>()?;
        Ok(Page { rows, end, deleted: 0 })
    }

    /// Rows of a lane above a level, each as `read` understands it.
    fn page_of<R>(
        &self,
        shard: ShardId,
        lane: LaneId,
        above: Level,
        limit: usize,
        read: impl Fn(&RowKey, &Value) -> Result<R, DirError>,
    ) -> Result<Page<R>, DirError> {
        let prefix = layout::lane_prefix(shard, lane);
        let view = self.with(|trees| {
            let above = trees.acks.get(&prefix).map_or(above, |ack| above.max(*ack));
            let from = Bound::Excluded(layout::row_key(prefix, above));
            let to = Bound::Included(layout::row_key(prefix, Level::from_bytes([0xff; 16])));
            trees.rows.view(from, to, limit.saturating_add(1))
        });
        let mut found = view.rows()?;
        let end = found.len() <= limit;
        found.truncate(limit);
        let rows = found.iter().map(|(key, value)| read(key, value)).collect::<Result<_, _>>()?;
        Ok(Page { rows, end, deleted: 0 })
    }

    /// A task as it is now.
    fn task(&self, shard: ShardId, id: TaskId) -> Result<Option<Task>, DirError> {
        if id > layout::LAST_TASK {
            return Ok(None);
        }
        let (key, end) = (layout::task_key(shard, id), layout::end_key(shard, id));
        let (moved, aside) = (layout::moved_key(shard, id), layout::aside_key(shard, id));
        // All of it at one moment.
        let (tasks, records) = self.with(|trees| {
            let tasks = (trees.tasks.find(&key), trees.tasks.find(&end));
            (tasks, (trees.records.find(&moved), trees.records.find(&aside)))
        });
        let Some(value) = look_up(tasks.0, &key)? else { return Ok(None) };
        let (moved, aside) = (look_up(records.0, &moved)?, look_up(records.1, &aside)?);
        let place = match (look_up(tasks.1, &end)?, aside) {
            (Some(_), _) => Some(Place::Over),
            (None, Some(_)) => Some(Place::Aside),
            (None, None) => None,
        };
        as_it_is(&key, &value, moved.as_ref(), place).map(Some)
    }

    /// What became of a task.
    fn history(&self, shard: ShardId, id: TaskId) -> Result<History, DirError> {
        if id > layout::LAST_TASK {
            return Ok(History::default());
        }
        let (end, replayed) = (layout::end_key(shard, id), layout::replayed_key(shard, id));
        // All of it at one moment.
        let (tries, found_end, found_replayed) = self.with(|trees| {
            let from = Bound::Included(layout::try_key(shard, id, 0));
            let to = Bound::Included(layout::try_key(shard, id, u16::MAX));
            let tries = trees.records.view(from, to, usize::MAX);
            (tries, trees.tasks.find(&end), trees.records.find(&replayed))
        });
        let mut history = History::default();
        for (key, value) in tries.rows()? {
            history.tries.push(values::tried(value.bytes()).ok_or_else(|| unreadable_record(&key))?);
        }
        if let Some(value) = look_up(found_end, &end)? {
            history.end = Some(end_of(id, &value)?);
        }
        if let Some(value) = look_up(found_replayed, &replayed)? {
            let again = values::number(value.bytes()).ok_or_else(|| unreadable_record(&replayed))?;
            history.replayed_as = Some(TaskId(again));
        }
        Ok(history)
    }

    /// Tasks by id.
    fn list(&self, shard: ShardId, wanted: Wanted, after: TaskId, limit: usize) -> Result<Listing, DirError> {
        let key = match wanted.ended {
            Some(true) => layout::end_key,
            Some(false) | None => layout::task_key,
        };
        let mut from = Bound::Excluded(key(shard, after.min(layout::LAST_TASK)));
        let to = Bound::Included(key(shard, layout::LAST_TASK));
        let mut filling = Filling::new(limit, after);
        // What is read for a piece is in memory at once: as many tasks as fit into a few hundred KiB.
        let most = limit.saturating_add(1).min(1_000);
        let mut piece = most.min(16);
        loop {
            let (view, beyond) = self.with(|trees| trees.tasks.view_some(from, to, piece));
            let found = view.rows()?;
            // A full piece ends with its last task; another one where the view was cut, if it was.
            let next = match found.last() {
                Some((last, _)) if found.len() == piece => Some(*last),
                _ => beyond,
            };
            let goes_on = match wanted.ended {
                Some(true) => self.fill_ended(shard, wanted, &found, &mut filling)?,
                Some(false) | None => self.fill(shard, wanted, &found, &mut filling)?,
            };
            match next {
                Some(next) if goes_on => from = Bound::Excluded(next),
                _ => return Ok(filling.listing),
            }
            let read: usize = found.iter().map(|(_, value)| value.bytes().len()).sum();
            piece = (found.len() * PIECE_BYTES / read.max(1)).clamp(16.min(most), most);
        }
    }

    /// Adds those tasks that are wanted, of some that follow each other, as they are now; those that are gone
    /// since are left out. False if the listing is full.
    fn fill(
        &self,
        shard: ShardId,
        wanted: Wanted,
        found: &[(TaskKey, Value)],
        filling: &mut Filling,
    ) -> Result<bool, DirError> {
        let (Some((first, _)), Some((last, _))) = (found.first(), found.last()) else { return Ok(true) };
        let (from, to) = (layout::task_of(first), layout::task_of(last));
        // Tasks and what became of them at one moment.
        let (tasks, ends, moved, aside) = self.with(|trees| {
            let marks = |key: fn(ShardId, TaskId) -> RecordKey| {
                let (from, to) = (Bound::Included(key(shard, from)), Bound::Included(key(shard, to)));
                trees.records.view(from, to, usize::MAX)
            };
            let by = |key: fn(ShardId, TaskId) -> TaskKey| {
                let (from, to) = (Bound::Included(key(shard, from)), Bound::Included(key(shard, to)));
                trees.tasks.view(from, to, usize::MAX)
            };
            let (tasks, ends) = (by(layout::task_key), by(layout::end_key));
            (tasks, ends, marks(layout::moved_key), marks(layout::aside_key))
        });
        let moved: BTreeMap<RecordKey, Value> = moved.rows()?.into_iter().collect();
        let aside: BTreeSet<RecordKey> = aside.keys()?.into_iter().collect();
        let ended: BTreeSet<TaskKey> = ends.keys()?.into_iter().collect();
        for (key, value) in &tasks.rows()? {
            let id = layout::task_of(key);
            let place = if ended.contains(&layout::end_key(shard, id)) {
                Some(Place::Over)
            } else {
                aside.contains(&layout::aside_key(shard, id)).then_some(Place::Aside)
            };
            let task = as_it_is(key, value, moved.get(&layout::moved_key(shard, id)), place)?;
            if !filling.offer(task, wanted) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The same of some ends that follow each other. Whatever lies between their tasks is not read.
    fn fill_ended(
        &self,
        shard: ShardId,
        wanted: Wanted,
        found: &[(TaskKey, Value)],
        filling: &mut Filling,
    ) -> Result<bool, DirError> {
        let tasks = self.with(|trees| {
            let find = |(end, _): &(TaskKey, Value)| {
                let id = layout::task_of(end);
                let (key, moved) = (layout::task_key(shard, id), layout::moved_key(shard, id));
                (trees.tasks.find(&key), trees.records.find(&moved))
            };
            found.iter().map(find).collect::<Vec<_>>()
        });
        for ((end, value), (task, moved)) in found.iter().zip(tasks) {
            let id = layout::task_of(end);
            let lane = values::lane_of_end(value.bytes()).ok_or_else(|| unreadable_end(id))?;
            if wanted.queue.is_some_and(|queue| lane.queue != queue) {
                if !filling.pass(id, value.bytes().len()) {
                    return Ok(false);
                }
                continue;
            }
            let key = layout::task_key(shard, id);
            // It may be forgotten since.
            let Some(value) = look_up(task, &key)? else { continue };
            let moved = look_up(moved, &layout::moved_key(shard, id))?;
            if !filling.offer(as_it_is(&key, &value, moved.as_ref(), Some(Place::Over))?, wanted) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What an owner must know, all of one moment. `read` is told of every so many bytes.
    fn metadata(&self, shard: ShardId, read: &mut dyn FnMut(u64)) -> Result<Metadata, DirError> {
        let mut metadata = Metadata::default();
        let mut aside = Vec::new();
        // Not what is remembered of single tasks, which may be much.
        let views = self.with(|trees| {
            [(b'a', layout::MOVED), (layout::MOVED + 1, 0xff)].map(|(first, end)| {
                let from = Bound::Included(layout::record_key(shard, first, &[]));
                let to = Bound::Excluded(layout::record_key(shard, end, &[]));
                trees.records.view(from, to, usize::MAX)
            })
        });
        for view in views {
            for (key, value) in view.rows()? {
                read((key.len() + value.bytes().len()) as u64);
                layout::tell(&mut metadata, &mut aside, &key, value.bytes())
                    .ok_or_else(|| unreadable_record(&key))?;
            }
        }
        for id in aside {
            // Of another moment: if a successor has moved it since, that is found out by the epoch.
            let task = self.task(shard, id)?.filter(|task| task.place == Place::Aside);
            metadata
                .aside
                .push(task.ok_or_else(|| unreadable(format_args!("task {id}, which is set aside,")))?);
        }
        Ok(metadata)
    }
}

/// A listing that is being filled.
pub(super) struct Filling {
    listing: Listing,
    limit: usize,
    bytes: usize,
    /// Tasks that were looked at.
    passed: usize,
    /// Bytes of those that were not wanted.
    passed_bytes: usize,
    /// The last task in it.
    seen: TaskId,
}

impl Filling {
    fn new(limit: usize, after: TaskId) -> Filling {
        Filling { listing: Listing::default(), limit, bytes: 0, passed: 0, passed_bytes: 0, seen: after }
    }

    /// Adds a task if it is wanted. False if the listing is full.
    fn offer(&mut self, task: Task, wanted: Wanted) -> bool {
        if wanted.queue.is_some_and(|queue| task.lane.queue != queue)
            || wanted.ended.is_some_and(|ended| ended != (task.place == Place::Over))
        {
            return self.pass(task.id, task.input_bytes());
        }
        self.passed += 1;
        if self.listing.tasks.len() == self.limit || self.bytes >= LISTING_BYTES {
            self.listing.more = Some(self.seen);
            return false;
        }
        self.seen = task.id;
        self.bytes += task.input_bytes();
        self.listing.tasks.push(task);
        true
    }

    /// Passes over a task that is not wanted. False if that was enough for one listing.
    fn pass(&mut self, task: TaskId, bytes: usize) -> bool {
        self.passed += 1;
        self.passed_bytes += bytes;
        if self.passed >= LISTING_TASKS || self.passed_bytes >= PASSED_BYTES {
            self.listing.more = Some(task);
            return false;
        }
        true
    }
}

/// What a key stands for: as memory knows, or else as the layers do.
fn look_up<K: Planted>(found: Found<K>, key: &K) -> Result<Option<Value>, DirError> {
    match found {
        Ok(Slot::Put(value)) => Ok(Some(value)),
        Ok(Slot::Gone) => Ok(None),
        Err(layers) => tree::find_in(&layers, key),
    }
}

/// Something that has a right checksum and yet cannot be what we wrote.
fn unreadable(what: std::fmt::Arguments<'_>) -> DirError {
    DirError::Unreadable { what: what.to_string() }
}

fn unreadable_record(key: &RecordKey) -> DirError {
    unreadable(format_args!("the record {}", key.escape_ascii()))
}

fn unreadable_end(task: TaskId) -> DirError {
    unreadable(format_args!("the end of task {task}"))
}

/// A row of a lane.
pub(super) fn row(key: &RowKey, value: &Value) -> Result<Row, DirError> {
    let at = layout::level_of(key);
    values::row(at, value.bytes()).ok_or_else(|| unreadable(format_args!("the row at {at}")))
}

/// A parked row, and the lane that it stands beside.
pub(super) fn parked_row(at: &RecordKey, value: &Value) -> Result<(LaneId, Row), DirError> {
    let parked = layout::place_of_parked(at);
    let row = parked.and_then(|(lane, level)| Some((lane, values::row(level, value.bytes())?)));
    row.ok_or_else(|| unreadable_record(at))
}

/// A timer.
pub(super) fn timer(key: &RowKey, value: &Value) -> Result<TimerRow, DirError> {
    let at = layout::level_of(key);
    values::timer(at, value.bytes()).ok_or_else(|| unreadable(format_args!("the timer at {at}")))
}

/// How a task ended.
pub(super) fn end_of(task: TaskId, value: &Value) -> Result<EndRecord, DirError> {
    values::end_record(value.bytes()).ok_or_else(|| unreadable_end(task))
}

/// A task as it was accepted, and what became of it. `place` is where it is if that is no level.
fn as_it_is(
    key: &TaskKey,
    value: &Value,
    moved: Option<&Value>,
    place: Option<Place>,
) -> Result<Task, DirError> {
    let id = layout::task_of(key);
    let wrong = || unreadable(format_args!("task {id}"));
    let mut task = values::task(id, value.bytes()).ok_or_else(wrong)?;
    if let Some(moved) = moved {
        let moved = values::moved(id, moved.bytes()).ok_or_else(wrong)?;
        task.place = moved.place;
        task.attempt = moved.attempt;
        task.lost = moved.lost;
        task.charge = moved.charge;
        if let Some((class, max_duration_ms)) = moved.duration {
            task.lane.class = class;
            if task.max_duration_ms() != max_duration_ms {
                let terms = task.terms.as_deref().cloned().unwrap_or_default();
                task.terms = Some(Terms { max_duration_ms, ..terms }.into());
            }
        }
    }
    if let Some(place) = place {
        task.place = place;
    }
    Ok(task)
}
