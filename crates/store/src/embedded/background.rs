//! What goes on behind the writer: the flusher turns what is in memory into tables, the merger keeps the
//! layers few and gives room back. Both write new files only, so for want of room they wait and try again;
//! whatever else fails fails the engine.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Options;
use super::engine::{Background, Flush, Shared, lock};
use super::files::{About, DirError, sync_dir};
use super::layout::{Kind, RecordKey, RowKey, TaskKey};
use super::log;
use super::manifest::Standing;
use super::opening::add_layer;
use super::table::TableKey;
use super::tree::{self, FEW_GONES, Layer, Making, Part};
use super::trees::{Planted, Trees};

/// How long to wait for room before asking again.
const NO_ROOM: Duration = Duration::from_millis(200);

impl Shared {
    /// Changes the manifest and then the layers. If that fails it is unknown which of them counts, so there
    /// is no second try.
    fn install(
        &self,
        change: impl FnOnce(&mut Standing),
        then: impl FnOnce(&mut Trees),
    ) -> Result<(), DirError> {
        self.try_install(change, then).map_err(DirError::beyond_retry)
    }

    fn try_install(
        &self,
        change: impl FnOnce(&mut Standing),
        then: impl FnOnce(&mut Trees),
    ) -> Result<(), DirError> {
        let mut standing = lock(&self.standing);
        let mut next = standing.clone();
        change(&mut next);
        next.next_table = self.next_table.load(Ordering::SeqCst);
        sync_dir(&self.dir.tables())?;
        next.write(&self.dir)?;
        let old = std::mem::replace(&mut *standing, next);
        {
            let mut trees = self.trees_mut();
            trees.rows.layers = Arc::new(standing.rows.clone());
            trees.tasks.layers = Arc::new(standing.tasks.clone());
            trees.records.layers = Arc::new(standing.records.clone());
            then(&mut trees);
        }
        let live: BTreeSet<u64> = standing.numbers().into_iter().collect();
        let paths = table_paths(&old);
        drop(standing);
        for (number, path) in paths {
            if !live.contains(&number) {
                std::fs::remove_file(&path).about(&path, "removing")?;
            }
        }
        Ok(())
    }

    pub(super) fn flush_all(&self) {
        loop {
            let flush = {
                let mut background = lock(&self.background);
                loop {
                    if self.is_over() {
                        return;
                    }
                    if let Some(flush) = background.flush.clone() {
                        break flush;
                    }
                    background = self.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
                }
            };
            match self.flush_tables(&flush) {
                Ok(()) => {
                    let mut background = lock(&self.background);
                    background.flush = None;
                    background.no_room_to_flush = None;
                    background.merge = true;
                    self.turned.notify_all();
                }
                Err(error) => self.wait_for_room(error, |background| &mut background.no_room_to_flush),
            }
        }
    }

    fn flush_tables(&self, flush: &Flush) -> Result<(), DirError> {
        let making = Making {
            dir: &self.dir.tables(),
            number: &|| self.next_table.fetch_add(1, Ordering::SeqCst),
            stop: &|| false,
            room: &|| Ok(()),
            table: self.options.table,
        };
        let (bottom, acks) = {
            let trees = self.trees();
            let layers = [trees.rows.layers.len(), trees.tasks.layers.len(), trees.records.layers.len()];
            (layers.map(|layers| layers == 0), trees.acks.clone())
        };
        let is_settled = |key: &RowKey| key.is_settled(&acks);
        let mut rows = tree::flush(Kind::Rows, &flush.rows, bottom[0], &is_settled, &making)?;
        let mut tasks = tree::flush(Kind::Tasks, &flush.tasks, bottom[1], &|_| false, &making)?;
        let mut records = tree::flush(Kind::Records, &flush.records, bottom[2], &|_| false, &making)?;
        self.install(
            |standing| {
                add_layer(standing, rows.hand_over());
                add_layer(standing, tasks.hand_over());
                add_layer(standing, records.hand_over());
                standing.flushed = flush.through;
                standing.segment = flush.segment + 1;
            },
            |trees| {
                trees.rows.sealed = None;
                trees.tasks.sealed = None;
                trees.records.sealed = None;
            },
        )?;
        let used = log::segment_path(&self.dir.log(), flush.segment);
        let spare = log::prepare_spare(&self.dir.log(), Some(&used), self.options.segment);
        spare.map_err(DirError::beyond_retry)
    }

    /// Waits for room, or fails the engine if that is not what is missing. New tables are new files, so
    /// trying again is no retry on a doubtful state.
    fn wait_for_room(&self, error: DirError, whose: fn(&mut Background) -> &mut Option<DirError>) {
        if !matches!(error, DirError::Io { full: true, .. }) {
            return self.fail(error.into());
        }
        let mut background = lock(&self.background);
        *whose(&mut background) = Some(error);
        self.turned.notify_all();
        drop(self.turned.wait_timeout_while(background, NO_ROOM, |_| !self.is_over()));
    }

    pub(super) fn merge_all(&self) {
        loop {
            {
                let mut background = lock(&self.background);
                while !background.merge && !self.is_over() {
                    background = self.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
                }
                (background.merge, background.merging) = (false, true);
            }
            loop {
                if self.is_over() {
                    return;
                }
                let merged = self.merge_one::<RowKey>().and_then(|rows| {
                    let tasks = self.merge_one::<TaskKey>()?;
                    Ok(rows | tasks | self.merge_one::<RecordKey>()?)
                });
                match merged {
                    Ok(true) => lock(&self.background).no_room_to_merge = None,
                    Ok(false) => break,
                    Err(error) => self.wait_for_room(error, |background| &mut background.no_room_to_merge),
                }
                self.turned.notify_all();
            }
            {
                let mut background = lock(&self.background);
                (background.merging, background.no_room_to_merge) = (false, None);
            }
            self.turned.notify_all();
        }
    }

    /// How many deletes are too few to be worth a merge: without room for new tasks, none are.
    pub(super) fn few_gones(&self) -> u64 {
        if self.room().is_ok() { FEW_GONES } else { 1 }
    }

    /// Merges some layers of a kind, if there is a reason to.
    fn merge_one<K: Planted>(&self) -> Result<bool, DirError> {
        let (kind, layers, acks) = {
            let trees = self.trees();
            let tree = K::tree(&trees);
            (tree.kind, tree.layers.clone(), trees.acks.clone())
        };
        let is_settled = |key: &K| key.is_settled(&acks);
        let Some(range) = tree::choose(&layers, &is_settled, self.few_gones()) else { return Ok(false) };
        let bottom = range.end == layers.len();
        let group = &layers[range.clone()];
        let ids: Vec<u64> = group.iter().map(|layer| layer.id).collect();
        let deepest = group.iter().map(|layer| layer.tier).max().unwrap_or(0);
        // A merge of everything keeps the size class of the largest.
        let tier = if bottom && group[0].tier != deepest { deepest } else { deepest.saturating_add(1) };
        let target = {
            let mut standing = lock(&self.standing);
            standing.next_layer += 1;
            standing.next_layer - 1
        };
        let small = deepest == 0;
        let making = Making {
            dir: &self.dir.tables(),
            number: &|| self.next_table.fetch_add(1, Ordering::SeqCst),
            stop: &|| self.is_over(),
            room: &|| self.room_to_merge(),
            table: self.options.table,
        };
        tree::merge(kind, group, bottom, &is_settled, &making, |parts, through| {
            self.install(
                |standing| replace_layers(K::layers(standing), &ids, target, tier, parts, through),
                |_| {},
            )?;
            // A long merge lets the small ones go first: commits would have to wait for those.
            Ok(small || !self.is_merge_urgent())
        })?;
        Ok(true)
    }

    fn is_merge_urgent(&self) -> bool {
        let trees = self.trees();
        tree::is_urgent(&trees.rows.layers)
            || tree::is_urgent(&trees.tasks.layers)
            || tree::is_urgent(&trees.records.layers)
    }

    /// A merge leaves the flusher room for what two segments hold: without a flush nothing can end.
    fn room_to_merge(&self) -> Result<(), DirError> {
        let Options { segment, floor, table, .. } = self.options;
        let (free, needed) = (self.dir.free()?, (4 * segment + table).min(floor / 2));
        if free >= needed {
            return Ok(());
        }
        let what = format!("merging needs {} MiB to be free, there are {}", needed >> 20, free >> 20);
        Err(DirError::Io { file: self.dir.tables(), what, full: true })
    }
}

fn table_paths(standing: &Standing) -> Vec<(u64, PathBuf)> {
    fn of<K>(layers: &[Layer<K>]) -> impl Iterator<Item = (u64, PathBuf)> {
        layers.iter().flat_map(|layer| &layer.parts).map(|part| (part.table.number, part.table.path.clone()))
    }
    of(&standing.rows).chain(of(&standing.tasks)).chain(of(&standing.records)).collect()
}

/// Puts newly made parts in the place of what was merged: up to a key, or everything.
fn replace_layers<K: TableKey>(
    layers: &mut Vec<Layer<K>>,
    merged: &[u64],
    target: u64,
    tier: u8,
    made: Vec<Part<K>>,
    through: Option<&K>,
) {
    let is_merged = |layer: &Layer<K>| merged.contains(&layer.id);
    match layers.iter_mut().find(|layer| layer.id == target) {
        Some(layer) => layer.parts.extend(made),
        None => {
            // Behind the oldest of them, and before what is older still.
            let place = layers.iter().rposition(is_merged).map_or(layers.len(), |last| last + 1);
            layers.insert(place, Layer { id: target, tier, parts: made });
        }
    }
    match through {
        None => layers.retain(|layer| !is_merged(layer)),
        Some(key) => {
            for layer in layers.iter_mut().filter(|layer| is_merged(layer)) {
                layer.parts.retain(|part| part.table.last > *key);
                for part in &mut layer.parts {
                    // A merge that stopped half way may have come further than this one is yet.
                    if part.table.first <= *key && part.above.as_ref().is_none_or(|above| above < key) {
                        part.above = Some(key.clone());
                    }
                }
            }
        }
    }
    layers.retain(|layer| !layer.parts.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::layout::task_key;
    use crate::embedded::table::{Slot, Writer};
    use evenhand_core::names::{ShardId, TaskId};

    // A merge stopped after it had merged all up to 50; the next one of the same layers is at 20.
    #[test]
    fn what_an_earlier_merge_took_over_does_not_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let key = |id| task_key(ShardId(0), TaskId(id));
        let mut writer = Writer::create(dir.path(), 1, Kind::Tasks).unwrap();
        (1..=100).for_each(|id| writer.add(&key(id), &Slot::Gone).unwrap());
        let table = Arc::new(writer.finish(dir.path(), Kind::Tasks).unwrap());
        let mut layers = vec![Layer { id: 1, tier: 0, parts: vec![Part { table, above: Some(key(50)) }] }];
        for (through, above) in [(20, 50), (70, 70)] {
            replace_layers(&mut layers, &[1], 2, 1, Vec::new(), Some(&key(through)));
            assert_eq!(layers[0].parts[0].above, Some(key(above)));
        }
    }
}
