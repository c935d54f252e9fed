//! Why a task is not running. The reasons are the dispatcher's own, in the order in which it asks.

use std::collections::BTreeMap;
use std::fmt;

use crate::backlog::Level;
use crate::change::{Place, Task};
use crate::names::{Millis, Priority, WorkerId};
use crate::shard::{LaneIx, Shard};
use crate::timers::due_at;

/// Where a task stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A worker runs it.
    Running {
        /// Which.
        worker: WorkerId,
        /// It was canceled; its worker has been told to stop it.
        stopping: bool,
    },
    /// It waits for a time.
    Scheduled {
        /// When it is due.
        due: Millis,
    },
    /// It waits for its turn.
    Waiting {
        /// How many tasks of its lane go before it.
        ahead: Ahead,
        /// What it waits for.
        hold: Hold,
    },
    /// It has ended, and its end is remembered.
    Over,
    /// The shard has no such task: it has ended, or belongs elsewhere, or has moved meanwhile.
    Gone,
}

/// How many tasks go before one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Exactly so many.
    Exactly(usize),
    /// It is not in the window: at least so many.
    AtLeast(usize),
}

/// What a waiting task waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// The start gate is shut: what runs already is not known yet.
    GateShut,
    /// Its queue is paused.
    Paused,
    /// Its key is paused.
    KeyPaused,
    /// Its row is being written or moved.
    Writing,
    /// No worker serves its queue.
    NoWorker,
    /// Every slot of the workers that serve its queue is taken.
    NoFreeSlot {
        /// How many slots there are.
        slots: u64,
    },
    /// Tasks of a more urgent priority go first.
    HigherPriority {
        /// Which.
        priority: Priority,
    },
    /// Its lane, or one that goes before it, is being read from the store.
    Reading,
}

impl Shard {
    /// The same for many tasks, at the cost of one walk over the windows that they are in.
    pub fn explain_all(&self, tasks: &[Task]) -> Vec<Standing> {
        let mut by_place: Vec<(LaneIx, Level)> =
            tasks.iter().filter_map(|task| Some((self.lane_of(task.lane)?, self.place_of(task)?))).collect();
        by_place.sort_unstable();
        let mut ahead: BTreeMap<(LaneIx, Level), usize> = BTreeMap::new();
        for places in by_place.chunk_by(|(a, _), (b, _)| a == b) {
            let Some(&(ix, _)) = places.first() else { continue };
            let mut waiting = self.lane_at(ix).window.waiting().keys().peekable();
            let mut passed = 0;
            for &(_, level) in places {
                while waiting.next_if(|other| **other < level).is_some() {
                    passed += 1;
                }
                ahead.insert((ix, level), passed);
            }
        }
        let passed = |ix, level| ahead.get(&(ix, level)).copied().unwrap_or(0);
        tasks.iter().map(|task| self.standing(task, passed)).collect()
    }

    /// Why this task, as the store has it, is not running.
    pub fn explain(&self, task: &Task) -> Standing {
        self.standing(task, |ix, level| self.lane_at(ix).window.waiting().range(..level).count())
    }

    fn standing(&self, task: &Task, ahead: impl Fn(LaneIx, Level) -> usize) -> Standing {
        if let Some(live) = self.runs.get(&task.id) {
            return Standing::Running { worker: live.worker, stopping: live.cancel };
        }
        let Some(ix) = self.lane_of(task.lane) else { return Standing::Gone };
        let lane = self.lane_at(ix);
        let level = match task.place {
            Place::Lane(level) => level,
            Place::Timer(level) if level <= self.timers.shelf.window.ack() => return Standing::Gone,
            Place::Timer(level) => return Standing::Scheduled { due: due_at(level) },
            Place::Parked(level) => {
                let shelf = self.parked.get(&(task.lane, task.key.clone()));
                let before = shelf.map_or(0, |p| p.shelf.window.waiting().range(..level).count());
                let in_lane = self.place_of(task).map_or(0, |behind| ahead(ix, behind));
                let ahead = Ahead::AtLeast(in_lane + before);
                return Standing::Waiting { ahead, hold: self.hold(task, false) };
            }
            Place::Aside => {
                return Standing::Waiting { ahead: Ahead::AtLeast(0), hold: self.hold(task, false) };
            }
            Place::Over => return Standing::Over,
        };
        if level <= lane.window.ack() {
            return Standing::Gone;
        }
        let known = lane.window.waiting().contains_key(&level);
        let ahead = match known {
            true => Ahead::Exactly(ahead(ix, level)),
            false => Ahead::AtLeast(ahead(ix, level)),
        };
        Standing::Waiting { ahead, hold: self.hold(task, known) }
    }

    /// A task's place in its lane; the first that it can get, if its row stands beside it.
    fn place_of(&self, task: &Task) -> Option<Level> {
        let Place::Parked(_) = task.place else { return task.place.level() };
        let places = &self.lane_at(self.lane_of(task.lane)?).places;
        let finish = places.keys().find(&task.key).map(|key| places.keys().get(key).finish);
        Some(Level::new(finish.unwrap_or_default().max(places.vtime()).pass(), 0))
    }

    fn hold(&self, task: &Task, known: bool) -> Hold {
        if !self.may_start() {
            return Hold::GateShut;
        }
        let queue = &self.queues[task.lane.queue.0 as usize];
        if self.settings_of(task.lane.queue).paused {
            return Hold::Paused;
        }
        if self.key_is_paused(task.lane.queue, &task.key) {
            return Hold::KeyPaused;
        }
        for ((priority, _), &ix) in &queue.lanes {
            let window = &self.lane_at(ix).window;
            if *priority < task.lane.priority && !window.waiting().is_empty() {
                return self.hold_for_slot(task).unwrap_or(Hold::HigherPriority { priority: *priority });
            }
            if *priority <= task.lane.priority && window.is_unread() {
                return Hold::Reading;
            }
        }
        match self.hold_for_slot(task) {
            Some(hold) => hold,
            None if known => Hold::Reading,
            None => Hold::Writing,
        }
    }

    /// Why no worker can take a task of this queue, if none can.
    fn hold_for_slot(&self, task: &Task) -> Option<Hold> {
        let serving = self.workers.values().filter(|w| w.queues.iter().any(|(id, _)| *id == task.lane.queue));
        let slots: u64 = serving.map(|worker| u64::from(worker.slots)).sum();
        if slots == 0 {
            return Some(Hold::NoWorker);
        }
        self.queues[task.lane.queue.0 as usize].free.is_empty().then_some(Hold::NoFreeSlot { slots })
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hold::GateShut => f.write_str("the start gate is shut"),
            Hold::Paused => f.write_str("its queue is paused"),
            Hold::KeyPaused => f.write_str("its key is paused"),
            Hold::Writing => f.write_str("its row is being written"),
            Hold::NoWorker => f.write_str("no worker serves its queue"),
            Hold::NoFreeSlot { slots } => write!(f, "every slot is taken ({slots})"),
            Hold::HigherPriority { priority } => write!(f, "priority {priority} goes first"),
            Hold::Reading => f.write_str("its lane is being read"),
        }
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Standing::Running { worker, stopping: false } => write!(f, "running on worker {worker}"),
            Standing::Running { worker, stopping: true } => write!(f, "being stopped on worker {worker}"),
            Standing::Waiting { ahead: Ahead::Exactly(n), hold } => write!(f, "{n} ahead; {hold}"),
            Standing::Waiting { ahead: Ahead::AtLeast(n), hold } => write!(f, "at least {n} ahead; {hold}"),
            Standing::Scheduled { due } => write!(f, "due at {due}"),
            Standing::Over => f.write_str("ended"),
            Standing::Gone => f.write_str("not here"),
        }
    }
}
