//! Workers, as far as the shard needs them to start tasks: a source of free slots for some queues. What
//! makes a worker eligible (health, worker set, start gate) belongs in this module when it comes; the
//! dispatcher asks [`Worker::has_free_slot`] and nothing else.

use std::collections::BTreeSet;
use std::fmt;

use crate::backlog::{Cost, KeyIx, Turns, VTime, Weight};
use crate::messages::Run;
use crate::names::{Millis, QueueId, TaskId, WorkerId};

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
    /// Runs that can make room: interactive ones, and default ones that hold more than the first class.
    pub(crate) yielding: BTreeSet<TaskId>,
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
    /// The class of its queue that it holds.
    pub(crate) class: usize,
    /// Its task names no duration, and its queue has classes: it can be downgraded.
    pub(crate) default: bool,
    /// What has changed about its time since it started.
    pub(crate) cut: Option<Cut>,
    /// Its client has shortened it since it started.
    pub(crate) shortened: bool,
    /// When the scheduler looks whether its time is over.
    pub(crate) overdue_at: Option<Millis>,
    /// Its time was over, its worker did not stop it, and was told to.
    pub(crate) overdue: bool,
    /// Its client has been warned: it is halted then.
    pub(crate) halt_at: Option<Millis>,
}

impl LiveRun {
    /// A run that has just begun, of a queue without classes.
    pub(crate) fn new(run: Run, worker: WorkerId, in_lane: Option<KeyIx>) -> LiveRun {
        LiveRun {
            run,
            worker,
            in_lane,
            cancel: false,
            class: 0,
            default: false,
            cut: None,
            shortened: false,
            overdue_at: None,
            overdue: false,
            halt_at: None,
        }
    }
}

/// A run has less time than it had at its start, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// When that was decided.
    pub at: Millis,
    /// What it had, in milliseconds; 0 if as much as it likes.
    pub from_ms: u64,
    /// What it has now.
    pub to_ms: u64,
    /// Why.
    pub why: CutWhy,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ms: u64| ms as f64 / 1_000.0;
        match self.from_ms {
            0 => write!(f, "its time was cut to {} s", seconds(self.to_ms))?,
            from_ms => {
                write!(f, "its time was cut from {} s to {} s", seconds(from_ms), seconds(self.to_ms))?
            }
        }
        match self.why {
            CutWhy::ClassFull { class_ms, among } => {
                let class = seconds(class_ms);
                write!(f, ": a task needed the {class} s class, which was full (drawn among {among})")
            }
            CutWhy::NoFreeSlot => f.write_str(": a task waited and every slot was taken"),
            CutWhy::Denied { among } => {
                write!(f, ": an interactive task found every slot taken (drawn among {among})")
            }
            CutWhy::Shortened => f.write_str(": its client wanted it"),
        }
    }
}

impl CutWhy {
    /// Its name, for programs.
    pub fn name(self) -> &'static str {
        match self {
            CutWhy::ClassFull { .. } => "class_full",
            CutWhy::NoFreeSlot => "no_free_slot",
            CutWhy::Denied { .. } => "denied",
            CutWhy::Shortened => "shortened",
        }
    }
}

/// Why a run has less time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutWhy {
    /// A task needed a class that was full; the run was drawn among so many.
    ClassFull {
        /// The duration of that class, in milliseconds.
        class_ms: u64,
        /// Runs that could have been drawn.
        among: usize,
    },
    /// A task waited and every slot was taken.
    NoFreeSlot,
    /// An interactive task was denied; the run was drawn among so many.
    Denied {
        /// Runs that could have been drawn.
        among: usize,
    },
    /// Its client wanted it.
    Shortened,
}
