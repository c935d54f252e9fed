//! Workers, as far as the shard needs them to start tasks: a source of free slots for some queues. What
//! makes a worker eligible (health, worker set, start gate) belongs in this module when it comes; the
//! dispatcher asks [`Worker::has_free_slot`] and nothing else.

use crate::backlog::{Cost, KeyIx, Turns, VTime, Weight};
use crate::messages::Run;
use crate::names::{QueueId, WorkerId};

/// One worker's session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Worker {
    /// Slots it offers, busy ones included.
    pub(crate) slots: u32,
    /// Slots held by runs. Always the number of its runs.
    pub(crate) busy: u32,
    /// The queues it serves, with the share of its slots that each gets.
    pub(crate) queues: Vec<(QueueId, Weight)>,
    pub(crate) turns: Turns<QueueId>,
    /// It stands in the lists of free workers of its queues.
    pub(crate) listed: bool,
}

impl Worker {
    pub(crate) fn has_free_slot(&self) -> bool {
        self.busy < self.slots
    }

    /// Charges one of its queues for a run.
    pub(crate) fn charge(&mut self, queue: QueueId, cost: Cost) {
        if let Some(&(_, weight)) = self.queues.iter().find(|(id, _)| *id == queue) {
            self.turns.charge(queue, VTime::charge(cost, weight));
        }
    }
}

/// A run that the shard counts as alive.
#[derive(Clone, Debug)]
pub(crate) struct LiveRun {
    pub(crate) run: Run,
    pub(crate) worker: WorkerId,
    /// Its key in its lane; None once its row is set aside in the table of long runners.
    pub(crate) in_lane: Option<KeyIx>,
    /// Somebody canceled it; its worker has been told.
    pub(crate) cancel: bool,
}
