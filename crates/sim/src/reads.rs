//! A read that a shard has asked for, on its way to the store.

use evenhand_core::Input;
use evenhand_core::backlog::Level;
use evenhand_core::names::{Key, LaneId, LoadId, TaskId};
use evenhand_store::{Store, wait};

use crate::driver::SHARD;

/// What to read, and whom to answer.
#[derive(Clone, Debug)]
pub(crate) enum Read {
    Lane { load: LoadId, lane: LaneId, above: Level, limit: usize },
    Timers { load: LoadId, above: Level, limit: usize },
    Parked { load: LoadId, lane: LaneId, key: Key, above: Level, limit: usize },
    Task { load: LoadId, task: TaskId },
}

impl Read {
    /// Looks at the store, now.
    pub(crate) fn happen(&self, store: &impl Store) -> Input {
        match *self {
            Read::Lane { load, lane, above, limit } => {
                match wait(store.read_lane(SHARD, lane, above, limit)) {
                    Ok(page) => Input::Loaded { load, rows: page.rows, end: page.end },
                    Err(_) => self.fail(),
                }
            }
            Read::Timers { load, above, limit } => match wait(store.read_timers(SHARD, above, limit)) {
                Ok(page) => Input::TimersLoaded { load, rows: page.rows, end: page.end },
                Err(_) => self.fail(),
            },
            Read::Parked { load, lane, ref key, above, limit } => {
                match wait(store.read_parked(SHARD, lane, key.clone(), above, limit)) {
                    Ok(page) => Input::ParkedLoaded { load, rows: page.rows, end: page.end },
                    Err(_) => self.fail(),
                }
            }
            Read::Task { load, task } => match wait(store.read_task(SHARD, task)) {
                Ok(task) => Input::TaskLoaded { load, task },
                Err(_) => self.fail(),
            },
        }
    }

    /// Is lost.
    pub(crate) fn fail(&self) -> Input {
        match *self {
            Read::Lane { load, .. }
            | Read::Timers { load, .. }
            | Read::Parked { load, .. }
            | Read::Task { load, .. } => Input::LoadFailed { load },
        }
    }
}
