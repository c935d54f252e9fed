//! Who holds which class of a queue, and the cycle that decides what gives way to what.
//!
//! A run holds a class: a task with a duration the one that it belongs to, a *default* task (one that names no duration)
//! the longest that was free when it started. Runs that hold class i or a longer one count against limit i. When a task
//! needs a class that is full, a default run is *downgraded*: it holds a shorter class from then on, and has as much less
//! time. Interactive runs hold a slot and the first class, and give way first of all.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::chance::Chance;
use crate::names::TaskId;

/// What runs of a queue hold.
#[derive(Clone, Debug)]
pub(crate) struct Holders {
    /// Per class: how many runs may hold it or a longer one.
    limits: Vec<u64>,
    /// Per class: runs that hold exactly this one.
    held: Vec<u64>,
    /// Per class: default runs that hold it.
    defaults: Vec<Pool>,
}

/// A default run is to hold a shorter class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Downgrade {
    pub(crate) task: TaskId,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Among so many it was chosen.
    pub(crate) among: usize,
}

/// What the first part of the cycle comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Tasks that need this class or a longer one are left out.
    pub(crate) below: usize,
    /// A default run that holds the one class is to hold the other, in this order.
    pub(crate) moves: Vec<(usize, usize)>,
}

impl Holders {
    /// Of a queue with these limits, of which nothing runs. One without classes has one, without a limit.
    pub(crate) fn new(limits: Vec<u64>) -> Holders {
        let limits = if limits.is_empty() { vec![u64::MAX] } else { limits };
        let classes = limits.len();
        Holders { limits, held: vec![0; classes], defaults: vec![Pool::default(); classes] }
    }

    /// The limits are these from now on, for the same classes.
    pub(crate) fn set_limits(&mut self, limits: Vec<u64>) {
        if limits.len() == self.limits.len() {
            self.limits = limits;
        }
    }

    pub(crate) fn classes(&self) -> usize {
        self.limits.len()
    }

    pub(crate) fn limit(&self, class: usize) -> u64 {
        self.limits.get(class).copied().unwrap_or(u64::MAX)
    }

    /// Runs that hold this class or a longer one.
    pub(crate) fn count(&self, class: usize) -> u64 {
        self.held.iter().skip(class).sum()
    }

    /// No further run may hold this class.
    pub(crate) fn is_reached(&self, class: usize) -> bool {
        self.count(class) >= self.limit(class)
    }

    /// Default runs that hold this class.
    pub(crate) fn defaults(&self, class: usize) -> usize {
        self.defaults.get(class).map_or(0, |pool| pool.members.len())
    }

    #[cfg(test)]
    fn defaults_of(&self, class: usize) -> Vec<TaskId> {
        self.defaults[class].members.clone()
    }

    /// A run holds a class.
    pub(crate) fn hold(&mut self, task: TaskId, class: usize, default: bool) {
        self.held[class] += 1;
        if default {
            self.defaults[class].insert(task);
        }
    }

    /// It does not any more.
    pub(crate) fn release(&mut self, task: TaskId, class: usize, default: bool) {
        self.held[class] = self.held[class].saturating_sub(1);
        if default {
            self.defaults[class].remove(task);
        }
    }

    /// The longest class that a default task can hold from now on without exceeding a limit.
    pub(crate) fn longest_free(&self) -> usize {
        (1..self.classes()).find(|class| self.is_reached(*class)).unwrap_or(self.classes()) - 1
    }

    /// The first part of the cycle. `first` says which class the first task needs among those that need less than this
    /// one. What is found to be blocked is left out, longest first, after one default run has made room for it if any
    /// can. None if no task is left.
    pub(crate) fn plan(&self, first: impl Fn(usize) -> Option<usize>) -> Option<Plan> {
        let (below, moves) = self.plan_all(&first);
        first(below).map(|_| Plan { below, moves })
    }

    /// The same, also if no task is left.
    pub(crate) fn plan_all(&self, first: impl Fn(usize) -> Option<usize>) -> (usize, Vec<(usize, usize)>) {
        let (mut below, mut moves) = (self.classes(), Vec::new());
        if self.classes() == 1 {
            return (below, moves);
        }
        let mut counts: Vec<u64> = self.held.clone();
        let mut defaults: Vec<usize> = self.defaults.iter().map(Pool::len).collect();
        let reached =
            |counts: &[u64], class: usize| counts[class..].iter().sum::<u64>() >= self.limits[class];
        for class in (1..self.classes()).rev() {
            let Some(needs) = first(below) else { break };
            if needs < class || !reached(&counts, class) {
                continue;
            }
            if let Some(from) = (class..self.classes()).rev().find(|longest| defaults[*longest] > 0) {
                // To below the lowest limit that is reached, itself included in the count.
                let to = (1..=class).find(|lowest| reached(&counts, *lowest)).unwrap_or(class) - 1;
                (counts[from], counts[to]) = (counts[from] - 1, counts[to] + 1);
                (defaults[from], defaults[to]) = (defaults[from] - 1, defaults[to] + 1);
                moves.push((from, to));
            }
            if reached(&counts, class) {
                below = class;
            }
        }
        (below, moves)
    }

    /// Does what was planned. Whom it concerns is left to chance.
    pub(crate) fn carry_out(&mut self, moves: &[(usize, usize)], chance: &mut Chance) -> Vec<Downgrade> {
        moves.iter().filter_map(|(from, to)| self.downgrade_one(*from, *to, chance)).collect()
    }

    /// An interactive task found no slot: one default run gives up one class, the longest first.
    pub(crate) fn deny(&mut self, chance: &mut Chance) -> Option<Downgrade> {
        let longest = (1..self.classes()).rev().find(|class| self.defaults(*class) > 0)?;
        self.downgrade_one(longest, longest - 1, chance)
    }

    fn downgrade_one(&mut self, from: usize, to: usize, chance: &mut Chance) -> Option<Downgrade> {
        let among = self.defaults(from);
        let task = self.defaults[from].members.get(chance.below(among)).copied()?;
        self.downgrade(task, from, to);
        Some(Downgrade { task, from, to, among })
    }

    /// A default run holds a shorter class from now on.
    pub(crate) fn downgrade(&mut self, task: TaskId, from: usize, to: usize) {
        self.release(task, from, true);
        self.hold(task, to, true);
    }
}

/// Tasks in no order of meaning, from which one can be drawn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    members: Vec<TaskId>,
    at: BTreeMap<TaskId, usize>,
}

impl Pool {
    pub(crate) fn insert(&mut self, task: TaskId) {
        if let Entry::Vacant(place) = self.at.entry(task) {
            place.insert(self.members.len());
            self.members.push(task);
        }
    }

    pub(crate) fn remove(&mut self, task: TaskId) -> bool {
        let Some(at) = self.at.remove(&task) else { return false };
        self.members.swap_remove(at);
        if let Some(moved) = self.members.get(at) {
            self.at.insert(*moved, at);
        }
        true
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }
}

#[cfg(test)]
#[path = "cycle_tests.rs"]
mod tests;
