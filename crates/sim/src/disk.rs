//! The embedded store beside the model. Everything that happens to the memory store happens to a real
//! directory too, and every answer must be the same. When the world's owner crashes, so does the store:
//! it is closed without grace and opened again from its files. Logs of a few KiB make it flush, merge and
//! begin new segments all the time.

use std::collections::BTreeSet;

use evenhand_core::backlog::Level;
use evenhand_core::change::EndRecord;
use evenhand_core::names::{Epoch, LaneId, TaskId};
use evenhand_core::{Change, Input, Row, Task};
use evenhand_store::embedded::{self, Options};
use evenhand_store::{Embedded, Store, StoreError, Tables, Taken, Wanted, wait};
use tempfile::TempDir;

use crate::driver::SHARD;
use crate::reads::Read;
use crate::rng::Rng;

#[derive(Debug)]
pub(crate) struct Disk {
    /// None after a crash, until somebody needs it.
    store: Option<Embedded>,
    dir: TempDir,
    segment: u64,
    rng: Rng,
}

impl Disk {
    pub(crate) fn new(seed: u64) -> Result<Disk, String> {
        let mut rng = Rng::new(seed ^ 0x6469_736b);
        let dir = TempDir::with_prefix("evenhand-sim-")
            .map_err(|error| format!("no scratch directory: {error}"))?;
        let segment = 1024 << rng.below(7);
        Ok(Disk { store: None, dir, segment, rng })
    }

    fn store(&mut self) -> Result<&Embedded, String> {
        if self.store.is_none() {
            let options = Options { segment: self.segment, floor: 0, table: self.segment, witness: None };
            let opened = Embedded::open(self.dir.path(), options);
            self.store = Some(opened.map_err(|error| format!("the store does not open again: {error}"))?);
        }
        self.store.as_ref().ok_or_else(|| unreachable!("it was just opened"))
    }

    /// The process dies.
    pub(crate) fn crash(&mut self) {
        self.store = None;
    }

    /// Somebody takes the shard; the model's answer is known unless it got lost.
    pub(crate) fn take(&mut self, expected: Option<&Taken>) -> Result<(), String> {
        if self.rng.chance(500) {
            self.crash();
        }
        let taken = wait(self.store()?.take(SHARD, None)).map_err(|error| error.to_string())?;
        match expected {
            Some(expected) => same("take", &taken, expected),
            None => Ok(()),
        }
    }

    pub(crate) fn commit(
        &mut self,
        epoch: Epoch,
        changes: Vec<Change>,
        expected: &Result<(), StoreError>,
    ) -> Result<(), String> {
        if self.rng.chance(5) {
            self.crash();
        }
        let answer = wait(self.store()?.commit(SHARD, epoch, changes));
        same("commit", &answer, expected)
    }

    pub(crate) fn read(&mut self, read: &Read, expected: &Input) -> Result<(), String> {
        same("read", &read.happen(self.store()?), expected)
    }

    /// The world has come to rest: all of it must be there, and the directory must be whole.
    pub(crate) fn over(mut self, tables: &Tables) -> Result<(), String> {
        self.crash();
        let lanes: BTreeSet<LaneId> = tables.lanes.keys().copied().collect();
        for lane in lanes {
            let page = wait(self.store()?.read_lane(SHARD, lane, Level::ZERO, usize::MAX));
            let rows: Vec<Row> = page.map_err(|error| error.to_string())?.rows;
            let all = tables.rows.iter().filter(|((of, _), _)| *of == lane);
            same("the rows in the end", &rows, &all.map(|(_, row)| row.clone()).collect())?;
        }
        let timers = wait(self.store()?.read_timers(SHARD, Level::ZERO, usize::MAX));
        let timers = timers.map_err(|error| error.to_string())?.rows;
        same("the timers in the end", &timers, &tables.timers.values().cloned().collect())?;
        let listing = wait(self.store()?.list_tasks(SHARD, Wanted::default(), TaskId(0), usize::MAX));
        let tasks: Vec<Task> = listing.map_err(|error| error.to_string())?.tasks;
        same("the tasks in the end", &tasks, &tables.tasks.values().cloned().collect())?;
        for task in tasks {
            let history = wait(self.store()?.read_history(SHARD, task.id));
            let end = tables.ends.get(&task.id).map(|end| EndRecord::clone(end));
            same("an end in the end", &history.map_err(|error| error.to_string())?.end, &end)?;
        }
        self.crash();
        let checked = embedded::check(self.dir.path(), &mut |_, _| {}).map_err(|error| error.to_string())?;
        same("what is wrong in the end", &checked.problems, &Vec::new())
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, disk: &T, model: &T) -> Result<(), String> {
    if disk == model {
        return Ok(());
    }
    Err(format!("{what}: the embedded store says {disk:?}, the model {model:?}"))
}
