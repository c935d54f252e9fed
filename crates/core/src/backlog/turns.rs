//! Whose turn it is among a few members: start-time fair queueing without tasks. Lanes of one priority
//! share their queue this way, and queues share a worker's slots.
//!
//! The member with the lowest charge goes next, and the clock follows it. A member that had nothing to
//! start for a while is no further back than the clock, so it returns without credit.

use std::collections::BTreeMap;

use super::vtime::{Pass, VTime};

/// The charges of the members and the clock they share.
#[derive(Clone, Debug)]
pub(crate) struct Turns<M> {
    clock: VTime,
    charges: BTreeMap<M, VTime>,
}

impl<M> Default for Turns<M> {
    fn default() -> Self {
        Turns { clock: VTime::ZERO, charges: BTreeMap::new() }
    }
}

impl<M: Copy + Ord> Turns<M> {
    /// The candidate that goes next; the first of several equal ones.
    pub(crate) fn next(&self, candidates: impl Iterator<Item = M>) -> Option<M> {
        candidates.min_by_key(|&member| self.turn(member))
    }

    /// When a member's turn comes; the lowest goes next.
    pub(crate) fn turn(&self, member: M) -> (Pass, M) {
        (self.start(member).pass(), member)
    }

    /// Charges a member for its turn.
    pub(crate) fn charge(&mut self, member: M, amount: VTime) {
        let start = self.start(member);
        self.clock = start;
        self.charges.insert(member, start + amount);
    }

    /// A member's charge, to be saved.
    pub(crate) fn charged(&self, member: M) -> VTime {
        self.charges.get(&member).copied().unwrap_or_default()
    }

    /// Puts a saved charge back; [`Turns::resume`] follows.
    pub(crate) fn restore(&mut self, member: M, charged: VTime) {
        self.charges.insert(member, charged);
    }

    /// After a restart the clock is the lowest charge of those that compete. If none does it is the highest:
    /// whoever comes next has no credit.
    pub(crate) fn resume(&mut self, competes: impl Fn(M) -> bool) {
        let lowest =
            self.charges.iter().filter(|(member, _)| competes(**member)).map(|(_, charge)| *charge).min();
        self.clock = lowest.or(self.charges.values().max().copied()).unwrap_or_default();
    }

    /// Drops members that are gone.
    pub(crate) fn retain(&mut self, keep: impl Fn(M) -> bool) {
        self.charges.retain(|&member, _| keep(member));
    }

    fn start(&self, member: M) -> VTime {
        self.charged(member).max(self.clock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backlog::{Cost, Weight};

    fn turns_taken(turns: &mut Turns<u8>, weights: &[(u8, f64)], n: usize) -> String {
        let mut order = String::new();
        for _ in 0..n {
            let member = turns.next(weights.iter().map(|w| w.0)).unwrap();
            let weight = Weight::new(weights.iter().find(|w| w.0 == member).unwrap().1).unwrap();
            turns.charge(member, VTime::charge(Cost::ONE, weight));
            order.push(char::from(member));
        }
        order
    }

    #[test]
    fn turns_follow_the_weights() {
        let mut turns = Turns::default();
        assert_eq!(turns_taken(&mut turns, &[(b'm', 1.0), (b'r', 3.0)], 8), "mrrrmrrr");
    }

    #[test]
    fn a_member_returns_without_credit_after_a_restart() {
        let mut turns = Turns::default();
        turns_taken(&mut turns, &[(b'm', 1.0)], 3);
        turns_taken(&mut turns, &[(b'r', 1.0)], 100);
        let mut restored = Turns::default();
        restored.restore(b'm', turns.charged(b'm'));
        restored.restore(b'r', turns.charged(b'r'));
        restored.resume(|member| member == b'r');
        assert_eq!(turns_taken(&mut restored, &[(b'm', 1.0), (b'r', 1.0)], 6), "mrmrmr");
    }

    #[test]
    fn a_member_returns_without_credit() {
        let mut turns = Turns::default();
        assert_eq!(turns_taken(&mut turns, &[(b'm', 1.0)], 100), "m".repeat(100));
        assert_eq!(turns_taken(&mut turns, &[(b'm', 1.0), (b'r', 1.0)], 6), "rmrmrm");
    }
}
