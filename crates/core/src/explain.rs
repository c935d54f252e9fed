//! Why a task is not running. A task that waits may have several rules against it at once: all of them are told, in
//! the order in which the dispatcher asks. Who reads only the first knows what to look at first.

use std::collections::BTreeMap;
use std::fmt;

use crate::admission::{Rate, classes};
use crate::backlog::{KeyIx, Level};
use crate::change::{Place, Task};
use crate::names::{Class, Key, Millis, Priority, QueueId, TaskId, WorkerId};
use crate::shard::{KeyHold, LaneIx, Shard};
use crate::timers::due_at;

/// Runs that are named where a class is full.
const HOLDERS_NAMED: usize = 5;

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
        /// Every rule that stands in its way now; at least one.
        holds: Vec<Hold>,
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

/// A rule that stands in the way of a task that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// The start gate is shut: what runs already is not known yet.
    GateShut,
    /// Its queue is paused.
    Paused,
    /// None of its key's tasks may start now.
    Key {
        /// The key.
        key: Key,
        /// Why.
        hold: KeyHold,
        /// In how long it passes by itself, in milliseconds, if that is known.
        wait_ms: Option<u64>,
    },
    /// As much of its queue has started as its rate allows.
    QueueRate {
        /// The rate.
        rate: Rate,
        /// In how long the next may start, in milliseconds.
        wait_ms: u64,
    },
    /// It needs a class that is full, and nothing that holds it makes room.
    ClassFull {
        /// The duration of that class, in milliseconds.
        class_ms: u64,
        /// Runs that hold it or a longer one.
        held: u64,
        /// How many may.
        limit: u64,
        /// Some of them.
        by: Vec<TaskId>,
    },
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
    /// Other keys share the queue, and have tasks whose turn comes first.
    OtherKeys {
        /// How many keys.
        keys: usize,
    },
    /// Tasks of its own key go before it.
    OwnKey {
        /// How many, as far as memory knows.
        tasks: usize,
    },
    /// Its lane, or one that goes before it, is being read from the store.
    Reading,
    /// Its row is being written or moved.
    Writing,
}

/// What goes before a place in a lane, as far as memory knows.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    tasks: usize,
    /// Of them, those of the same key.
    own: usize,
    /// How many other keys they are of.
    keys: usize,
}

/// What is the same for all tasks that are asked about at once.
#[derive(Debug)]
struct Asked {
    now: Millis,
    /// Some of the runs that hold a class or a longer one, where that was asked before.
    holders: BTreeMap<(QueueId, usize), Vec<TaskId>>,
}

impl Shard {
    /// Why these tasks, as the store has them, are not running; at the cost of one walk over the windows that they are in.
    pub fn explain_all(&self, now: Millis, tasks: &[Task]) -> Vec<Standing> {
        let before = self.before(tasks);
        let mut asked = Asked { now: now.max(self.time()), holders: BTreeMap::new() };
        tasks.iter().zip(before).map(|(task, before)| self.standing(task, before, &mut asked)).collect()
    }

    /// Why this task is not running.
    pub fn explain(&self, now: Millis, task: &Task) -> Standing {
        self.explain_all(now, std::slice::from_ref(task)).pop().unwrap_or(Standing::Gone)
    }

    /// What goes before each of these tasks.
    fn before(&self, tasks: &[Task]) -> Vec<Before> {
        let place = |(n, task): (usize, &Task)| {
            let ix = self.lane_of(task.lane)?;
            Some((ix, self.place_of(task)?, n))
        };
        let mut places: Vec<(LaneIx, Level, usize)> = tasks.iter().enumerate().filter_map(place).collect();
        places.sort_unstable();
        let mut before = vec![Before::default(); tasks.len()];
        for places in places.chunk_by(|(a, ..), (b, ..)| a == b) {
            let Some(&(ix, ..)) = places.first() else { continue };
            let lane = self.lane_at(ix);
            let mut waiting = lane.window.waiting().iter().peekable();
            let mut passed: BTreeMap<KeyIx, usize> = BTreeMap::new();
            let mut all = 0;
            for &(_, level, n) in places {
                while let Some((_, entry)) = waiting.next_if(|(other, _)| **other < level) {
                    all += 1;
                    *passed.entry(entry.key).or_default() += 1;
                }
                let key = lane.places.keys().find(&tasks[n].key);
                let own = key.and_then(|key| passed.get(&key)).copied().unwrap_or(0);
                before[n] = Before { tasks: all, own, keys: passed.len() - usize::from(own > 0) };
            }
        }
        before
    }

    fn standing(&self, task: &Task, mut before: Before, asked: &mut Asked) -> Standing {
        if let Some(live) = self.runs.get(&task.id) {
            return Standing::Running { worker: live.worker, stopping: live.cancel };
        }
        let Some(ix) = self.lane_of(task.lane) else { return Standing::Gone };
        let window = &self.lane_at(ix).window;
        let known = match task.place {
            Place::Lane(level) if level <= window.ack() => return Standing::Gone,
            Place::Lane(level) => window.waiting().contains_key(&level),
            Place::Timer(level) if level <= self.timers.shelf.window.ack() => return Standing::Gone,
            Place::Timer(level) => return Standing::Scheduled { due: due_at(level) },
            Place::Parked(level) => {
                let shelf = self.parked.get(&(task.lane, task.key.clone()));
                let beside = shelf.map_or(0, |p| p.shelf.window.waiting().range(..level).count());
                (before.tasks, before.own) = (before.tasks + beside, before.own + beside);
                false
            }
            Place::Aside => false,
            Place::Over => return Standing::Over,
        };
        let ahead = if known { Ahead::Exactly(before.tasks) } else { Ahead::AtLeast(before.tasks) };
        Standing::Waiting { ahead, holds: self.holds(task, known, before, asked) }
    }

    /// A task's place in its lane; the first that it can get, if its row stands beside it.
    fn place_of(&self, task: &Task) -> Option<Level> {
        let Place::Parked(_) = task.place else { return task.place.level() };
        let places = &self.lane_at(self.lane_of(task.lane)?).places;
        let finish = places.keys().find(&task.key).map(|key| places.keys().get(key).finish);
        Some(Level::new(finish.unwrap_or_default().max(places.vtime()).pass(), 0))
    }

    /// Every rule that stands in the way of a task that waits, in the dispatcher's order.
    fn holds(&self, task: &Task, known: bool, before: Before, asked: &mut Asked) -> Vec<Hold> {
        let (id, now) = (task.lane.queue, asked.now);
        let queue = &self.queues[id.0 as usize];
        let left = |until: Millis| until.0.saturating_sub(now.0);
        let mut holds = Vec::new();
        if !self.may_start() {
            holds.push(Hold::GateShut);
        }
        if self.settings_of(id).paused {
            holds.push(Hold::Paused);
        }
        for hold in self.key_holds(id, &task.key) {
            let wait_ms = match hold {
                KeyHold::AtRate { until, .. } => Some(left(until)),
                KeyHold::Paused | KeyHold::AtLimit { .. } => None,
            };
            holds.push(Hold::Key { key: task.key.clone(), hold, wait_ms });
        }
        if let (Some(rate), Some(until)) = (self.settings_of(id).rate, self.rate_wait(id)) {
            holds.push(Hold::QueueRate { rate, wait_ms: left(until) });
        }
        let full = self.full_classes(id);
        let needs = self.needs(id, task.max_duration_ms());
        for &class in full.iter().filter(|class| **class <= needs) {
            holds.extend(self.class_full(id, class, asked));
        }
        if queue.slots == 0 {
            holds.push(Hold::NoWorker);
        } else if queue.free.is_empty() {
            holds.push(Hold::NoFreeSlot { slots: queue.slots });
        }
        // What needs a class that is full lets others pass.
        let below = full.first().copied().unwrap_or(usize::MAX);
        let urgent = queue.lanes.range(..(task.lane.priority, Class(0)));
        let urgent = urgent.filter(|(_, ix)| !self.is_left_out(**ix, below));
        let waits = |ix: &LaneIx| !self.lane_at(*ix).window.waiting().is_empty();
        if let Some(((priority, _), _)) = urgent.clone().find(|(_, ix)| waits(ix)) {
            holds.push(Hold::HigherPriority { priority: *priority });
        }
        if before.keys > 0 {
            holds.push(Hold::OtherKeys { keys: before.keys });
        }
        if before.own > 0 {
            holds.push(Hold::OwnKey { tasks: before.own });
        }
        let unread = |ix: LaneIx| self.lane_at(ix).window.is_unread();
        let to_come = |ix: &LaneIx| self.lane_at(*ix).places.to_come > 0 && !waits(ix);
        let mut before_it = urgent.map(|(_, ix)| ix);
        if before_it.any(|ix| unread(*ix) || to_come(ix)) || self.lane_of(task.lane).is_some_and(unread) {
            holds.push(Hold::Reading);
        }
        if holds.is_empty() {
            holds.push(if known { Hold::Reading } else { Hold::Writing });
        }
        holds
    }

    fn class_full(&self, queue: QueueId, class: usize, asked: &mut Asked) -> Option<Hold> {
        let holders = self.queues[queue.0 as usize].holders.as_ref()?;
        let class_ms = self.classes_of(queue).get(class)?.duration_ms;
        let named = || {
            let of = self.runs.values().filter(|live| live.run.lane.queue == queue && live.class >= class);
            of.map(|live| live.run.task).take(HOLDERS_NAMED).collect()
        };
        let by = asked.holders.entry((queue, class)).or_insert_with(named).clone();
        Some(Hold::ClassFull { class_ms, held: holders.count(class), limit: holders.limit(class), by })
    }
}

impl Hold {
    /// What kind of rule it is, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Hold::GateShut => "gate_shut",
            Hold::Paused => "queue_paused",
            Hold::Key { hold: KeyHold::Paused, .. } => "key_paused",
            Hold::Key { hold: KeyHold::AtLimit { .. }, .. } => "key_limit",
            Hold::Key { hold: KeyHold::AtRate { .. }, .. } => "key_rate",
            Hold::QueueRate { .. } => "queue_rate",
            Hold::ClassFull { .. } => "class_full",
            Hold::NoWorker => "no_worker",
            Hold::NoFreeSlot { .. } => "no_free_slot",
            Hold::HigherPriority { .. } => "higher_priority",
            Hold::OtherKeys { .. } => "other_keys",
            Hold::OwnKey { .. } => "own_key",
            Hold::Reading => "reading",
            Hold::Writing => "writing",
        }
    }

    /// The rule in a sentence, with tasks called as the caller calls them.
    pub fn text(&self, name: impl Fn(TaskId) -> String) -> String {
        let a_second = |rate: &Rate| format!("{} a second", rate.per_second as f64 / 1_000.0);
        let next = |wait_ms: u64| format!("the next may start in {}", classes::name(wait_ms));
        let many = |n: usize| if n == 1 { "" } else { "s" };
        match self {
            Hold::GateShut => "the start gate is shut".into(),
            Hold::Paused => "its queue is paused".into(),
            Hold::Key { key, hold, wait_ms } => {
                let key = match key.as_str() {
                    "" => "the shared key".into(),
                    key => format!("key {key}"),
                };
                match hold {
                    KeyHold::Paused => format!("{key} is paused"),
                    KeyHold::AtLimit { running, limit } => {
                        format!("{key} is at its limit, {running} of {limit}")
                    }
                    KeyHold::AtRate { rate, .. } => {
                        let next = next(wait_ms.unwrap_or(0));
                        format!("{key} is at its rate, {}; {next}", a_second(rate))
                    }
                }
            }
            Hold::QueueRate { rate, wait_ms } => {
                format!("its queue is at its rate, {}; {}", a_second(rate), next(*wait_ms))
            }
            Hold::ClassFull { class_ms, held, limit, by } => {
                let more = if *held > by.len() as u64 { ", …" } else { "" };
                let by = match by.iter().map(|task| name(*task)).collect::<Vec<_>>().join(", ") {
                    none if none.is_empty() => none,
                    by => format!(" held by {by}{more}"),
                };
                format!("the {} class is full: {held} of {limit}{by}", classes::name(*class_ms))
            }
            Hold::NoWorker => "no worker serves its queue".into(),
            Hold::NoFreeSlot { slots } => format!("every slot is taken ({slots})"),
            Hold::HigherPriority { priority } => format!("priority {priority} goes first"),
            Hold::OtherKeys { keys } => {
                let (shares, goes) = if *keys == 1 { ("shares", "goes") } else { ("share", "go") };
                format!("{keys} other key{} {shares} the queue and {goes} before its key", many(*keys))
            }
            Hold::OwnKey { tasks } => {
                let go = if *tasks == 1 { "goes" } else { "go" };
                format!("{tasks} task{} of its key {go} before it", many(*tasks))
            }
            Hold::Reading => "its lane is being read".into(),
            Hold::Writing => "its row is being written".into(),
        }
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(|task| task.to_string()))
    }
}

impl Standing {
    /// The same in words, with tasks called as the caller calls them.
    pub fn text(&self, name: impl Fn(TaskId) -> String) -> String {
        match self {
            Standing::Running { worker, stopping: false } => format!("running on worker {worker}"),
            Standing::Running { worker, stopping: true } => format!("being stopped on worker {worker}"),
            Standing::Waiting { ahead, holds } => {
                let ahead = match ahead {
                    Ahead::Exactly(n) => format!("{n} ahead"),
                    Ahead::AtLeast(n) => format!("at least {n} ahead"),
                };
                let holds = holds.iter().map(|hold| hold.text(&name));
                std::iter::once(ahead).chain(holds).collect::<Vec<_>>().join("; ")
            }
            Standing::Scheduled { due } => format!("due at {due}"),
            Standing::Over => "ended".into(),
            Standing::Gone => "not here".into(),
        }
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(|task| task.to_string()))
    }
}
