//! The simplest window that is right, as the oracle for the real one: whenever a row is written below R,
//! drop everything from there on and read again. It reads far too often, and it cannot be wrong.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::keys::KeyIx;
use super::level::Level;
use super::places::Charge;
use super::vtime::{Cost, VTime, Weight};
use super::window::{Entry, Window};
use crate::canary::Canary;
use crate::names::{LoadId, TaskId};

#[derive(Default)]
struct PlanOne {
    read: Level,
    buffer: BTreeSet<Level>,
    running: BTreeSet<Level>,
    bound: usize,
}

impl PlanOne {
    fn written(&mut self, level: Level) {
        if level <= self.read {
            self.read = level.before();
            self.buffer.split_off(&level);
        }
    }

    fn start(&mut self, store: &BTreeMap<Level, TaskId>) -> Option<Level> {
        if self.buffer.is_empty() {
            let above = (std::ops::Bound::Excluded(self.read), std::ops::Bound::Unbounded);
            let rows = store.range(above).map(|(&level, _)| level).filter(|l| !self.running.contains(l));
            self.buffer = rows.take(self.bound).collect();
            self.read = self.buffer.last().copied().unwrap_or(self.read);
        }
        let level = self.buffer.pop_first()?;
        self.running.insert(level);
        Some(level)
    }

    fn settled(&mut self, level: Level) {
        self.running.remove(&level);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(Vec<u16>),
    Start,
    Settle(u8),
    ReadHappens,
    ReadReturns,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => prop::collection::vec(0u16..60, 1..6).prop_map(Op::Write),
        5 => Just(Op::Start),
        3 => any::<u8>().prop_map(Op::Settle),
        2 => Just(Op::ReadHappens),
        2 => Just(Op::ReadReturns),
    ];
    prop::collection::vec(op, 1..120)
}

/// A read that has seen the store but not returned yet.
type Seen = Option<(Vec<Level>, bool)>;

fn ask(window: &mut Window, asked: &mut Option<(Level, usize)>) {
    if asked.is_none()
        && let Some(wanted) = window.wants_read(3)
    {
        window.read_asked(LoadId(1));
        *asked = Some(wanted);
    }
}

fn look(store: &BTreeMap<Level, TaskId>, asked: Option<(Level, usize)>, seen: &mut Seen) {
    if let (Some((above, limit)), None) = (asked, &seen) {
        let above = (std::ops::Bound::Excluded(above), std::ops::Bound::Unbounded);
        let mut rows = store.range(above).map(|(&level, _)| level);
        let page: Vec<Level> = rows.by_ref().take(limit).collect();
        *seen = Some((page, rows.next().is_none()));
    }
}

fn give(window: &mut Window, asked: &mut Option<(Level, usize)>, seen: &mut Seen) {
    if let Some((rows, end)) = seen.take() {
        *asked = None;
        let last = rows.last().copied().unwrap_or(window.read());
        window.read_returned(rows.into_iter().map(|l| (l, entry(l))).collect(), last, end, u64::MAX);
    }
}

fn entry(level: Level) -> Entry {
    let charge = Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false };
    Entry {
        task: TaskId(level.seq()),
        key: KeyIx::default(),
        charge,
        attempt: 1,
        max_attempts: 1,
        lost: 0,
        terms: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn merging_serves_the_order_of_dropping_and_reading_again(bound in 1usize..6, ops in ops()) {
        let mut store: BTreeMap<Level, TaskId> = BTreeMap::new();
        let mut window = Window::restore(Level::ZERO, Level::ZERO, bound, Canary::default());
        let mut plan = PlanOne { bound, ..PlanOne::default() };
        let (mut asked, mut seen): (Option<(Level, usize)>, Seen) = (None, None);
        let mut running: Vec<Level> = Vec::new();
        let mut seq = 0;
        for op in ops {
            match op {
                Op::Write(steps) => {
                    for step in steps {
                        seq += 1;
                        let time = window.ack().pass().time();
                        let place = (0..step).fold(time, |at, _| at + VTime::charge(Cost::ONE, Weight::ONE));
                        let level = Level::new(place.pass(), seq);
                        window.chosen(level);
                        store.insert(level, TaskId(seq));
                        window.merge(level, entry(level));
                        plan.written(level);
                    }
                }
                Op::Start => {
                    // The real window may have to wait for a read; then it starts the same row.
                    while window.waiting().is_empty() && (asked.is_some() || window.is_unread()) {
                        ask(&mut window, &mut asked);
                        look(&store, asked, &mut seen);
                        give(&mut window, &mut asked, &mut seen);
                    }
                    let started = window.start_first(|entry| entry.task, 0).map(|(level, _)| level);
                    prop_assert_eq!(started, plan.start(&store));
                    running.extend(started);
                }
                Op::Settle(which) if !running.is_empty() => {
                    let level = running.swap_remove(usize::from(which) % running.len());
                    store.remove(&level);
                    window.leave(level);
                    plan.settled(level);
                }
                Op::Settle(_) => {}
                Op::ReadHappens => look(&store, asked, &mut seen),
                Op::ReadReturns => give(&mut window, &mut asked, &mut seen),
            }
            window.advance(None);
            ask(&mut window, &mut asked);
            prop_assert!(store.keys().next().is_none_or(|&first| window.ack() < first));
        }
    }
}
