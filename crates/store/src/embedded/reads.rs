//! Reading: what the trees hold, put together again as the core knows it. The same for a store that is
//! open for work and for one that is only looked at.

use std::collections::BTreeMap;
use std::ops::Bound;

use evenhand_core::backlog::Level;
use evenhand_core::names::{Epoch, LaneId, QueueId, ShardId, TaskId};
use evenhand_core::{Metadata, Row, Task};

use super::bytes::Value;
use super::files::DirError;
use super::layout::{self, RecordKey, RowKey, TaskKey};
use super::table::Slot;
use super::tree::{self, Found};
use super::trees::{Acks, Planted, Trees};
use crate::{LISTING_BYTES, LISTING_TASKS, Listing, Page};

/// About what a listing reads at once.
const PIECE_BYTES: usize = 256 * 1024;

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

    /// A shard's epoch.
    fn epoch(&self, shard: ShardId) -> Result<Epoch, DirError> {
        match self.find(&layout::epoch_key(shard))? {
            Some(value) => layout::epoch(value.bytes())
                .ok_or_else(|| unreadable(format_args!("the epoch of shard {shard}"))),
            None => Ok(Epoch(0)),
        }
    }

    /// The ack level of every lane.
    fn acks(&self) -> Result<Acks, DirError> {
        let mut acks = Acks::new();
        for shard in self.shards()? {
            self.records(shard, layout::LANE..=layout::LANE, |key, value| {
                let known = layout::lane_of_record(key).zip(layout::ack(value.bytes()));
                let (lane, ack) = known.ok_or_else(|| unreadable_record(key))?;
                acks.insert(lane, ack);
                Ok(())
            })?;
        }
        Ok(acks)
    }

    /// Rows of a lane above a level.
    fn page(&self, shard: ShardId, lane: LaneId, above: Level, limit: usize) -> Result<Page, DirError> {
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
        let rows = found.iter().map(|(key, value)| row(key, value)).collect::<Result<_, _>>()?;
        Ok(Page { rows, end, deleted: 0 })
    }

    /// A task as it is now.
    fn task(&self, shard: ShardId, id: TaskId) -> Result<Option<Task>, DirError> {
        let key = layout::task_key(shard, id);
        let (moved, aside) = (layout::moved_key(shard, id), layout::aside_key(shard, id));
        // All three at one moment.
        let found = self
            .with(|trees| (trees.tasks.find(&key), trees.records.find(&moved), trees.records.find(&aside)));
        let Some(value) = look_up(found.0, &key)? else { return Ok(None) };
        let (moved, aside) = (look_up(found.1, &moved)?, look_up(found.2, &aside)?);
        as_it_is(&key, &value, moved.as_ref(), aside.is_some()).map(Some)
    }

    /// Tasks by id.
    fn list(
        &self,
        shard: ShardId,
        queue: Option<QueueId>,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, DirError> {
        let mut listing = Listing::default();
        let mut from = Bound::Excluded(layout::task_key(shard, after));
        let to = Bound::Included(layout::task_key(shard, TaskId(u64::MAX)));
        let (mut bytes, mut passed, mut seen) = (0, 0, after);
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
            for task in self.as_they_are(shard, &found)? {
                passed += 1;
                if queue.is_some_and(|queue| task.lane.queue != queue) {
                    if passed >= LISTING_TASKS {
                        listing.more = Some(task.id);
                        return Ok(listing);
                    }
                    continue;
                }
                if listing.tasks.len() == limit || bytes >= LISTING_BYTES {
                    listing.more = Some(seen);
                    return Ok(listing);
                }
                seen = task.id;
                bytes += task.payload.len();
                listing.tasks.push(task);
            }
            match next {
                Some(next) => from = Bound::Excluded(next),
                None => return Ok(listing),
            }
            let read: usize = found.iter().map(|(_, value)| value.bytes().len()).sum();
            piece = (found.len() * PIECE_BYTES / read.max(1)).clamp(16.min(most), most);
        }
    }

    /// Tasks as they are now, of some that follow each other. Those that have ended since are left out.
    fn as_they_are(&self, shard: ShardId, found: &[(TaskKey, Value)]) -> Result<Vec<Task>, DirError> {
        let (Some((first, _)), Some((last, _))) = (found.first(), found.last()) else {
            return Ok(Vec::new());
        };
        // Tasks and what became of them at one moment.
        let (tasks, moved, aside) = self.with(|trees| {
            let (from, to) = (layout::task_of(first), layout::task_of(last));
            let marks = |key: fn(ShardId, TaskId) -> RecordKey| {
                let (from, to) = (Bound::Included(key(shard, from)), Bound::Included(key(shard, to)));
                trees.records.view(from, to, usize::MAX)
            };
            let tasks = trees.tasks.view(Bound::Included(*first), Bound::Included(*last), usize::MAX);
            (tasks, marks(layout::moved_key), marks(layout::aside_key))
        });
        let moved: BTreeMap<RecordKey, Value> = moved.rows()?.into_iter().collect();
        let aside: BTreeMap<RecordKey, Value> = aside.rows()?.into_iter().collect();
        let task = |(key, value): &(TaskKey, Value)| {
            let id = layout::task_of(key);
            let moved = moved.get(&layout::moved_key(shard, id));
            as_it_is(key, value, moved, aside.contains_key(&layout::aside_key(shard, id)))
        };
        tasks.rows()?.iter().map(task).collect()
    }

    /// What an owner must know, all of one moment. `read` is told of every so many bytes.
    fn metadata(&self, shard: ShardId, read: &mut dyn FnMut(u64)) -> Result<Metadata, DirError> {
        let mut metadata = Metadata::default();
        let mut aside = Vec::new();
        let from = Bound::Included(layout::record_key(shard, 0, &[]));
        let to = Bound::Excluded(layout::record_key(shard, 0xff, &[]));
        for (key, value) in self.rows(from, to, usize::MAX)? {
            read((key.len() + value.bytes().len()) as u64);
            layout::tell(&mut metadata, &mut aside, &key, value.bytes())
                .ok_or_else(|| unreadable_record(&key))?;
        }
        for id in aside {
            // Of another moment: if a successor has moved it since, that is found out by the epoch.
            let task = self.task(shard, id)?.filter(|task| task.level.is_none());
            metadata
                .aside
                .push(task.ok_or_else(|| unreadable(format_args!("task {id}, which is set aside,")))?);
        }
        Ok(metadata)
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

/// A row of a lane.
pub(super) fn row(key: &RowKey, value: &Value) -> Result<Row, DirError> {
    layout::row(key, value.bytes())
        .ok_or_else(|| unreadable(format_args!("the row at {}", layout::level_of(key))))
}

/// A task as it was accepted, and what became of its place.
fn as_it_is(key: &TaskKey, value: &Value, moved: Option<&Value>, aside: bool) -> Result<Task, DirError> {
    let wrong = || unreadable(format_args!("task {}", layout::task_of(key)));
    let mut task = layout::task(key, value.bytes()).ok_or_else(wrong)?;
    if let Some(moved) = moved {
        let moved = layout::moved(moved.bytes()).ok_or_else(wrong)?;
        task.level = Some(moved.level);
        task.attempt = moved.attempt;
        task.charge = moved.charge;
    }
    if aside {
        task.level = None;
    }
    Ok(task)
}
