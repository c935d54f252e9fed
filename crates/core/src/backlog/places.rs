//! Places: which level a task gets. Start-time fair queueing, decided when a task is accepted.
//!
//! A lane keeps a virtual time V, which never falls, and per key F, the end of its last charge. A task
//! is placed at F while its key has tasks waiting, else at max(V, A, F), and F moves on by
//! `cost / weight`. Served in that order, keys that keep waiting get capacity by their weights.
//!
//! V says where a newcomer starts. At each dispatch it becomes the larger of the task's pass and
//! `V + cost / (sum of the weights of the waiting keys)`: following passes alone it could be held still
//! by a stream of ever new keys, each placed at V. But it never passes the end of the first charge of a
//! key that waits, or a newcomer could be placed any number of rounds behind its place
//! (docs/decisions/0002-fair-places.md has the proof and the counterexamples).
//!
//! That limit is kept by *alarms*: a heap with one entry per key, at a virtual time no later than the
//! one at which the key has to be looked at. For a waiting key that is the end of its first charge; for
//! a key without rows it is F, when the key can be forgotten. Entries are corrected when they surface.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::keys::{KeyIx, Keys};
use super::vtime::{Cost, Pass, VTime, Weight};
use crate::bounds;
use crate::canary::{Bug, Canary};
use crate::change::KeyRecord;
use crate::names::Key;

/// The charge that goes with a place: what was asked, at the weight of the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// What the task costs.
    pub cost: Cost,
    /// The weight its key had when it was placed.
    pub weight: Weight,
    /// It stands in its key's chain: the key's next task begins where this charge ends. A task that is tried
    /// again does not.
    pub chained: bool,
    /// The cost is the time that the run was expected to take. What it took is known at its end, and counts then.
    pub timed: bool,
}

impl Charge {
    /// What its task asked for. What is charged is decided anew with every place.
    pub(crate) fn asked(self) -> Charge {
        let cost = if self.timed { Cost::ONE } else { self.cost };
        Charge { cost, chained: false, timed: false, ..self }
    }

    /// How far it moves F.
    pub fn span(self) -> VTime {
        VTime::charge(self.cost, self.weight)
    }
}

/// V, and F of every key that a lane remembers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    vtime: VTime,
    /// The highest F ever.
    top: VTime,
    /// The sum of the weights of the keys that wait, in thousandths.
    waiting_weights: u64,
    /// Rows of all keys.
    rows: u64,
    /// Rows that stand beside the lane and may be placed: somebody waits, though not here.
    pub(crate) to_come: u64,
    keys: Keys,
    alarms: BinaryHeap<Reverse<(VTime, KeyIx)>>,
    dirty: Vec<KeyIx>,
    forgotten: Vec<Key>,
    canary: Canary,
}

impl Places {
    pub(crate) fn restore(vtime: VTime, seed: u64, canary: Canary) -> Places {
        Places { vtime, top: vtime, keys: Keys::new(seed), canary, ..Places::default() }
    }

    /// Puts a saved key back.
    pub(crate) fn restore_key(&mut self, key: &Key, record: &KeyRecord, over: Option<Weight>) {
        let ix = self.keys.insert(key, record.weight);
        let state = self.keys.get_mut(ix);
        state.weight = over.unwrap_or(record.weight);
        state.finish = if self.canary.is(Bug::ChargesNotRestored) { VTime::ZERO } else { record.finish };
        state.due = record.due;
        state.rows = record.rows;
        state.waiting = record.rows;
        state.chain = record.chained;
        state.chained = record.chained;
        state.refund = record.refund;
        state.credit = record.credit;
        state.last = state.finish;
        state.average = record.average;
        self.rows += u64::from(record.rows);
        // F was at least there once, though it may have fallen since: an alarm may be set for then.
        self.top = self.top.max(state.finish).max(record.due);
        if record.rows > 0 {
            self.waiting_weights += u64::from(state.weight.thousandths());
        }
        if record.chained > 0 {
            self.alarm(ix, record.due);
        } else if record.rows == 0 {
            self.alarm(ix, record.finish);
        }
    }

    pub(crate) fn vtime(&self) -> VTime {
        self.vtime
    }

    /// After a restart: this much was dispatched, whatever the saved V says.
    pub(crate) fn raise_vtime(&mut self, pass: Pass) {
        self.vtime = self.vtime.max(pass.time());
    }

    pub(crate) fn waiting_weights(&self) -> u64 {
        self.waiting_weights
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.keys
    }

    pub(crate) fn alarms(&self) -> usize {
        self.alarms.len()
    }

    /// The highest place a task can have been given so far.
    pub(crate) fn top(&self) -> VTime {
        self.top.max(self.vtime)
    }

    pub(crate) fn key(&mut self, key: &Key, weight: Weight) -> KeyIx {
        match self.keys.find(key) {
            Some(ix) => ix,
            None => self.keys.insert(key, weight),
        }
    }

    /// What a task accepted now asks for, if there is one, and what an override says, if there is one.
    pub(crate) fn set_weight(&mut self, ix: KeyIx, asked: Option<Weight>, over: Option<Weight>) {
        let state = self.keys.get_mut(ix);
        let asked = asked.unwrap_or(state.asked);
        let weight = over.unwrap_or(asked);
        if (state.asked, state.weight) == (asked, weight) {
            return;
        }
        if state.waiting > 0 {
            self.waiting_weights = self.waiting_weights.saturating_sub(u64::from(state.weight.thousandths()));
            self.waiting_weights += u64::from(weight.thousandths());
        }
        state.asked = asked;
        state.weight = weight;
        self.touch(ix);
    }

    /// Places a new task of `ix` and charges its key.
    pub(crate) fn place(&mut self, ix: KeyIx, cost: Cost, ack: Pass) -> (Pass, Charge) {
        self.give_back_credit(ix);
        let state = self.keys.get(ix);
        // While a key keeps waiting F is above V and A, so its tasks form a chain.
        let start = state.finish.max(self.newcomer(ack));
        let charge = Charge { cost, weight: state.weight, chained: true, timed: false };
        let state = self.keys.get_mut(ix);
        state.last = start;
        state.finish = start + charge.span();
        state.chain += 1;
        state.chained += 1;
        self.top = self.top.max(state.finish);
        if state.chain == 1 {
            state.due = state.due.max(due(start, charge.span(), state.finish));
            let due = state.due;
            self.alarm(ix, due);
        }
        self.add_row(ix);
        self.give_back_credit(ix);
        (start.pass(), charge)
    }

    /// Places a task again that failed, or whose row had been set aside: ahead of its key's later tasks.
    /// A retry is charged; a dispatch that never started is not.
    pub(crate) fn place_again(&mut self, ix: KeyIx, charge: Charge, ack: Pass, charged: bool) -> Pass {
        let start = self.newcomer(ack);
        let state = self.keys.get_mut(ix);
        state.last = state.last.max(start);
        state.finish = state.finish.max(start);
        if charged && !self.canary.is(Bug::RetryUncharged) {
            state.finish += charge.span();
        }
        self.top = self.top.max(state.finish);
        self.add_row(ix);
        start.pass()
    }

    /// A run whose time was charged ahead took so long in fact. The difference goes to F: what was too little at
    /// once, what was too much as soon as F may fall.
    pub(crate) fn took(&mut self, key: &Key, pass: Pass, charge: Charge, took: Cost) {
        let (charged, real) = (charge.span(), VTime::charge(took, charge.weight));
        if self.waiting_weights > 0 {
            self.grow(took, self.waiting_weights);
        }
        let Some(ix) = self.keys.find(key) else {
            // Its charge has passed. What it should have been may not have.
            if pass.time() + real > self.vtime {
                let ix = self.keys.insert(key, charge.weight);
                self.keys.get_mut(ix).finish = pass.time() + real;
                self.keys.get_mut(ix).average.learn(took);
                self.top = self.top.max(pass.time() + real);
                self.touch(ix);
                self.alarm(ix, pass.time() + real);
            }
            return;
        };
        let state = self.keys.get_mut(ix);
        let debt = real - charged;
        state.finish += debt - state.credit;
        state.credit = (state.credit - debt) + (charged - real);
        state.average.learn(took);
        self.top = self.top.max(state.finish);
        if state.waiting > 0 {
            self.give_back_credit(ix);
        }
        self.touch(ix);
    }

    /// A row whose time was charged ahead will not run: it took none.
    pub(crate) fn uncharge(&mut self, key: &Key, charge: Charge) {
        if let Some(ix) = self.keys.find(key).filter(|_| charge.timed) {
            self.keys.get_mut(ix).credit += charge.span();
            self.touch(ix);
        }
    }

    /// F falls by what the key has been charged too much, but not below its last row that waits: its tasks
    /// keep their order.
    fn give_back_credit(&mut self, ix: KeyIx) {
        let state = self.keys.get_mut(ix);
        let room = if state.waiting > 0 { state.finish - state.last } else { state.finish };
        let given = if self.canary.is(Bug::CreditNotGiven) { VTime::ZERO } else { state.credit.min(room) };
        state.finish = state.finish - given;
        state.credit = if state.waiting > 0 { state.credit - given } else { VTime::ZERO };
    }

    /// Where a key that has nothing waiting starts.
    fn newcomer(&self, ack: Pass) -> VTime {
        if self.canary.is(Bug::TimeFromAck) {
            return ack.time();
        }
        if self.canary.is(Bug::PassBelowAck) {
            return self.vtime;
        }
        self.vtime.max(ack.time())
    }

    fn add_row(&mut self, ix: KeyIx) {
        let state = self.keys.get_mut(ix);
        state.rows += 1;
        self.rows += 1;
        state.waiting += 1;
        if state.waiting == 1 {
            self.waiting_weights += u64::from(state.weight.thousandths());
        }
        self.touch(ix);
    }

    /// A task is dispatched: V moves.
    pub(crate) fn served(&mut self, ix: KeyIx, pass: Pass, charge: Charge) {
        let weights = self.waiting_weights;
        self.no_longer_waits(ix, pass, charge);
        // How much a run takes that shares time is known at its end.
        if !charge.timed {
            self.grow(charge.cost, weights);
        }
        self.vtime = self.vtime.max(pass.time());
        self.when_nothing_waits();
    }

    /// V grows by a cost, divided among all that wait, as far as these let it.
    fn grow(&mut self, cost: Cost, weights: u64) {
        if !self.canary.is(Bug::TimeHeldByNewKeys) {
            let grown = self.up_to_alarm(self.vtime + VTime::share(cost, weights));
            self.vtime = self.vtime.max(grown);
        }
    }

    fn no_longer_waits(&mut self, ix: KeyIx, pass: Pass, charge: Charge) {
        let state = self.keys.get_mut(ix);
        state.waiting = state.waiting.saturating_sub(1);
        if charge.chained {
            // The next one of the chain begins where this one's charge ends.
            state.chain = state.chain.saturating_sub(1);
            if state.chain > 0 {
                state.due = state.due.max(due(pass.time() + charge.span(), charge.span(), state.finish));
            }
        }
        if state.waiting == 0 {
            self.waiting_weights = self.waiting_weights.saturating_sub(u64::from(state.weight.thousandths()));
        }
    }

    /// A dispatch that never started: its row waits again where it was.
    pub(crate) fn unserved(&mut self, ix: KeyIx, chained: bool) {
        let state = self.keys.get_mut(ix);
        state.waiting += 1;
        if state.waiting == 1 {
            self.waiting_weights += u64::from(state.weight.thousandths());
        }
        if chained {
            state.chain += 1;
            let due = state.due;
            self.alarm(ix, due);
        }
        self.touch(ix);
    }

    /// A running row left the lane.
    pub(crate) fn settled(&mut self, ix: KeyIx, chained: bool) {
        let state = self.keys.get_mut(ix);
        state.rows = state.rows.saturating_sub(1);
        state.chained = state.chained.saturating_sub(u32::from(chained));
        self.rows = self.rows.saturating_sub(1);
        if state.rows == 0 {
            state.finish = state.finish - std::mem::take(&mut state.credit);
        }
        let (rows, finish, alarmed) = (state.rows, state.finish, state.alarmed);
        self.touch(ix);
        if rows == 0 && !alarmed {
            if finish <= self.vtime { self.forget_key(ix) } else { self.alarm(ix, finish) }
        }
    }

    /// A waiting row left the lane without being served. Which row of its chain is first now may be known
    /// to the store alone, so the key holds V only by the end of all it has been charged so far.
    pub(crate) fn withdrawn(&mut self, ix: KeyIx, chained: bool) {
        let state = self.keys.get_mut(ix);
        state.waiting = state.waiting.saturating_sub(1);
        if state.waiting == 0 {
            state.finish = state.finish - std::mem::take(&mut state.refund);
        }
        if chained {
            state.chain = state.chain.saturating_sub(1);
            state.due = state.due.max(state.finish - VTime::TICK);
        }
        if state.waiting == 0 {
            self.waiting_weights = self.waiting_weights.saturating_sub(u64::from(state.weight.thousandths()));
        }
        self.when_nothing_waits();
        self.settled(ix, chained);
    }

    /// A waiting row left the lane because its key may not run. What it was charged is given back when no row
    /// waits any more: the key then stands where the last of its tasks that ran has left it.
    pub(crate) fn parked(&mut self, ix: KeyIx, charge: Charge) {
        let state = self.keys.get_mut(ix);
        state.refund += charge.span();
        self.withdrawn(ix, charge.chained);
    }

    /// Whether a key may run. If it may again before all its rows have left, nothing is given back: the others
    /// stand where they stood.
    pub(crate) fn set_held(&mut self, ix: KeyIx, held: bool) {
        let state = self.keys.get_mut(ix);
        state.held = held;
        if !held {
            state.refund = VTime::ZERO;
        }
        self.touch(ix);
    }

    /// After a restart: a row counted as waiting is running. Its dispatch was not saved.
    pub(crate) fn adopted(&mut self, ix: KeyIx, pass: Pass, charge: Charge) {
        self.no_longer_waits(ix, pass, charge);
        self.raise_vtime(pass);
        self.when_nothing_waits();
    }

    /// Nobody waits, so nobody can lose: time rises to the highest F, and old charges are over.
    fn when_nothing_waits(&mut self) {
        if self.waiting_weights == 0 && self.to_come == 0 {
            self.vtime = self.vtime.max(self.top);
        }
    }

    /// `grown`, or the first alarm on the way that stops it.
    fn up_to_alarm(&mut self, grown: VTime) -> VTime {
        let mut budget = bounds::FORGET_PER_STEP;
        while let Some(&Reverse((at, ix))) = self.alarms.peek() {
            if at >= grown || self.canary.is(Bug::TimePassesWaiting) {
                return grown;
            }
            if budget == 0 || !self.look_at(at, ix) {
                return at;
            }
            budget -= 1;
        }
        grown
    }

    /// Forgets keys whose time has passed, a bounded number of them. True if some are left.
    pub(crate) fn forget(&mut self) -> bool {
        self.when_nothing_waits();
        for _ in 0..bounds::FORGET_PER_STEP {
            match self.alarms.peek() {
                Some(&Reverse((at, ix))) if at <= self.vtime => {
                    if !self.look_at(at, ix) {
                        return false;
                    }
                }
                _ => return false,
            }
        }
        true
    }

    /// Looks at the key of the first alarm, because V is about to pass it. False if the key waits and V
    /// must stay.
    fn look_at(&mut self, at: VTime, ix: KeyIx) -> bool {
        let state = self.keys.get_mut(ix);
        let next = if state.chain > 0 {
            if state.due <= at {
                return false;
            }
            Some(state.due)
        } else if state.rows > 0 {
            None
        } else if state.finish > at {
            Some(state.finish)
        } else {
            self.alarms.pop();
            self.vtime = self.vtime.max(state.finish);
            self.forget_key(ix);
            return true;
        };
        match next {
            Some(next) => {
                if let Some(mut first) = self.alarms.peek_mut() {
                    *first = Reverse((next, ix));
                }
            }
            None => {
                state.alarmed = false;
                self.alarms.pop();
            }
        }
        true
    }

    fn alarm(&mut self, ix: KeyIx, at: VTime) {
        let state = self.keys.get_mut(ix);
        if !state.alarmed {
            state.alarmed = true;
            self.alarms.push(Reverse((at, ix)));
        }
    }

    fn touch(&mut self, ix: KeyIx) {
        let state = self.keys.get_mut(ix);
        if !state.dirty {
            state.dirty = true;
            self.dirty.push(ix);
        }
    }

    fn forget_key(&mut self, ix: KeyIx) {
        self.forgotten.push(self.keys.remove(ix));
        if self.keys.len() == 0 {
            self.alarms = BinaryHeap::new();
            self.dirty = Vec::new();
        }
    }

    /// The records that changed since the last call; None for a forgotten key. Forgotten ones first: a
    /// key may be forgotten and return within one batch.
    pub(crate) fn changed(&mut self, mut each: impl FnMut(&Key, Option<KeyRecord>)) {
        for key in self.forgotten.drain(..) {
            each(&key, None);
        }
        for ix in std::mem::take(&mut self.dirty) {
            let state = self.keys.get_mut(ix);
            if state.dirty {
                state.dirty = false;
                let record = KeyRecord {
                    finish: state.finish,
                    due: state.due,
                    rows: state.rows,
                    chained: state.chained,
                    refund: state.refund,
                    credit: state.credit,
                    average: state.average,
                    weight: state.asked,
                };
                each(&state.key, Some(record));
            }
        }
    }

    pub(crate) fn has_forgotten(&self) -> bool {
        !self.forgotten.is_empty()
    }
}

/// Up to where a chain that begins at `head` lets V go: one charge on, less a tick, and not beyond F; but past
/// the head as a level shows it, or newcomers placed at V would go before it for ever.
fn due(head: VTime, span: VTime, finish: VTime) -> VTime {
    ((head + span).min(finish) - VTime::TICK).max(head + VTime::TICK).min(finish)
}
