//! What workers report while the gate is shut.
//!
//! A run says where its task's row is. The store may have that task elsewhere, or not at all: it is an old copy of itself, or
//! the worker is not right. Then the run counts for nothing. So the store is asked of each reported run; those that it
//! knows are adopted, the others are condemned. If the store is an old copy, a condemned run may be a real one, and its
//! task must not be started before it is gone; a task that the store does not have, or that has ended, starts anyway
//! never again.

use std::collections::BTreeMap;

use super::Shard;
use super::reads::Waiter;
use crate::change::{Place, Task};
use crate::messages::{Effect, Run};
use crate::names::{Fence, TaskId, WorkerId};

/// Runs that were reported and are not adopted.
#[derive(Clone, Debug, Default)]
pub(super) struct Reported {
    /// The store is being asked of these.
    unverified: BTreeMap<(TaskId, Fence), (WorkerId, Run)>,
    /// These are to be ended; with each, whether its task could be started meanwhile.
    condemned: BTreeMap<(TaskId, Fence), (WorkerId, bool)>,
}

impl Reported {
    pub(super) fn len(&self) -> usize {
        self.unverified.len() + self.condemned.len()
    }

    /// A run is over, or never began.
    pub(super) fn is_over(&mut self, task: TaskId, fence: Fence) {
        self.unverified.remove(&(task, fence));
        self.condemned.remove(&(task, fence));
    }

    /// A worker is lost, or says anew what it runs.
    pub(super) fn forget(&mut self, of: WorkerId) {
        self.unverified.retain(|_, (worker, _)| *worker != of);
        self.condemned.retain(|_, (worker, _)| *worker != of);
    }
}

impl Shard {
    /// Whether the store has been asked of all that was reported.
    pub(crate) fn is_verified(&self) -> bool {
        self.reported.unverified.is_empty()
    }

    /// Whether somebody still runs what the store does not know of, though it has the task.
    pub(crate) fn has_condemned(&self) -> bool {
        self.reported.condemned.values().any(|(_, startable)| *startable)
    }

    /// Runs that a worker is to end.
    pub(crate) fn condemned_of(&self, of: WorkerId) -> impl Iterator<Item = (TaskId, Fence)> {
        self.reported.condemned.iter().filter(move |(_, (worker, _))| *worker == of).map(|(run, _)| *run)
    }

    /// The store is asked before this run is adopted.
    pub(super) fn verify(&mut self, worker: WorkerId, run: Run, effects: &mut Vec<Effect>) {
        let (task, fence) = (run.task, run.fence);
        self.reported.unverified.insert((task, fence), (worker, run));
        self.read_task_for(task, Waiter::Reported(fence), effects);
    }

    /// The store's word on the task of a reported run.
    pub(super) fn on_verified(
        &mut self,
        id: TaskId,
        fence: Fence,
        task: Option<&Task>,
        effects: &mut Vec<Effect>,
    ) {
        let Some((worker, run)) = self.reported.unverified.remove(&(id, fence)) else { return };
        let is_there = |task: &Task| {
            let placed = match task.place {
                Place::Lane(level) => level == run.level,
                Place::Aside => true,
                Place::Timer(_) | Place::Parked(_) | Place::Over => false,
            };
            placed && task.lane == run.lane && task.key == run.key && task.attempt == run.attempt
        };
        if self.open || !task.is_some_and(is_there) || !self.adopt(worker, run, effects) {
            self.condemn(worker, id, fence, task.is_some_and(|task| task.place != Place::Over), effects);
        } else if self.runs.get(&id).is_some_and(|live| live.cancel) {
            // Its worker may have been welcomed before that was known.
            effects.push(Effect::Stop { worker, task: id, fence });
        }
    }

    /// A run is to end, and does not count.
    pub(super) fn condemn(
        &mut self,
        worker: WorkerId,
        task: TaskId,
        fence: Fence,
        startable: bool,
        effects: &mut Vec<Effect>,
    ) {
        if !self.open {
            self.reported.condemned.insert((task, fence), (worker, startable));
        }
        effects.push(Effect::Stop { worker, task, fence });
    }
}
