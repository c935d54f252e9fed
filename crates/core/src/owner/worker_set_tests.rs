use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::names::Epoch;

fn incarnation(epoch: u64) -> Incarnation {
    Incarnation { epoch: Epoch(epoch), nonce: 7 * epoch }
}

fn seat(n: u64) -> Seat {
    Seat::new(&format!("w{n}")).unwrap()
}

fn life(process: u64) -> Life {
    Life { process, rejoin: 0 }
}

fn set() -> WorkerSet {
    WorkerSet::new(incarnation(1), Canary::default())
}

/// Who gets tasks, of the first `n`.
fn permitted(set: &mut WorkerSet, n: u64) -> Vec<u64> {
    set.propagate(|_| false);
    (1..=n).filter(|worker| set.permits(WorkerId(*worker))).collect()
}

#[test]
fn one_that_is_alone_needs_only_know_itself() {
    let mut set = set();
    set.join(WorkerId(1), &seat(1), life(1));
    assert_eq!(permitted(&mut set, 1), []);
    set.heard(WorkerId(1), Some(set.id()));
    assert_eq!(permitted(&mut set, 1), [1]);
}

// Scenario 31.
#[test]
fn a_second_one_waits_until_the_first_knows_of_it_or_is_lost() {
    let mut set = set();
    set.join(WorkerId(1), &seat(1), life(1));
    set.heard(WorkerId(1), Some(set.id()));
    set.join(WorkerId(2), &seat(2), life(1));
    set.heard(WorkerId(2), Some(set.id()));
    assert_eq!(permitted(&mut set, 2), [1]);
    assert_eq!(set.unaware(WorkerId(2)), 1);
    let mut told = set.clone();
    told.heard(WorkerId(1), Some(told.id()));
    assert_eq!(permitted(&mut told, 2), [1, 2]);
    set.lose(WorkerId(1));
    assert_eq!(permitted(&mut set, 2), [2]);
}

#[test]
fn one_of_many_that_knows_is_enough_if_all_know_that_one() {
    let mut set = set();
    for n in 1..=40 {
        set.join(WorkerId(n), &seat(n), life(1));
    }
    let all = set.id();
    (1..=40).for_each(|n| set.heard(WorkerId(n), Some(all)));
    set.join(WorkerId(41), &seat(41), life(1));
    set.heard(WorkerId(41), Some(set.id()));
    assert_eq!(permitted(&mut set, 41).last(), Some(&40));
    assert_eq!(set.unaware(WorkerId(41)), 40);
    set.heard(WorkerId(17), Some(set.id()));
    assert_eq!(permitted(&mut set, 41).last(), Some(&41));
    assert_eq!(set.unaware(WorkerId(41)), 0);
}

#[test]
fn chains_lead_through_those_that_are_lost() {
    let mut set = set();
    // The first knows the second, which knew the third and was lost, which knows the fourth.
    set.join(WorkerId(1), &seat(1), life(1));
    set.join(WorkerId(2), &seat(2), life(1));
    set.heard(WorkerId(1), Some(set.id()));
    set.join(WorkerId(3), &seat(3), life(1));
    set.heard(WorkerId(2), Some(set.id()));
    set.lose(WorkerId(2));
    set.join(WorkerId(4), &seat(4), life(1));
    set.heard(WorkerId(3), Some(set.id()));
    set.heard(WorkerId(4), Some(set.id()));
    assert_eq!(permitted(&mut set, 4), [1, 3, 4]);
}

#[test]
fn an_id_of_another_owner_or_of_the_future_says_nothing() {
    let mut set = set();
    set.join(WorkerId(1), &seat(1), life(1));
    let id = set.id();
    set.heard(WorkerId(1), None);
    set.heard(WorkerId(1), Some(WorkerSetId { incarnation: incarnation(2), ..id }));
    set.heard(WorkerId(1), Some(WorkerSetId { version: id.version + 1, ..id }));
    assert_eq!(permitted(&mut set, 1), []);
}

#[test]
fn workers_agree_only_if_all_are_there_and_say_the_same() {
    let mut set = set();
    for n in 1..=3 {
        set.join(WorkerId(n), &seat(n), life(1));
    }
    let id = set.id();
    let seats: Vec<Seat> = (1..=3).map(seat).collect();
    let of = |ids: [Option<WorkerSetId>; 3], some: &[usize]| {
        agree(some.iter().map(|n| (&seats[*n], life(1), ids[*n])))
    };
    assert!(of([Some(id); 3], &[0, 1, 2]));
    assert!(!of([Some(id); 3], &[0, 1]));
    assert!(!of([Some(id); 3], &[]));
    assert!(!of([Some(id), Some(id), None], &[0, 1, 2]));
    let older = WorkerSetId { version: 2, ..id };
    assert!(!of([Some(id), Some(id), Some(older)], &[0, 1, 2]));
    // A later life is another worker.
    assert!(!agree(seats.iter().map(|seat| (seat, life(2), Some(id)))));
}

#[test]
fn who_leaves_leaves_no_trace_in_the_hash() {
    let mut set = set();
    set.join(WorkerId(1), &seat(1), life(1));
    let before = set.id();
    set.join(WorkerId(2), &seat(2), life(1));
    set.lose(WorkerId(2));
    assert_eq!((set.id().hash, set.id().version), (before.hash, before.version + 2));
}

#[test]
fn memory_follows_those_who_live() {
    let mut set = set();
    set.join(WorkerId(1), &seat(1), life(1));
    set.heard(WorkerId(1), Some(set.id()));
    // The first is silent: all that come and go might be required by it.
    for n in 2..10_000 {
        set.join(WorkerId(n), &seat(n), life(1));
        set.heard(WorkerId(n), Some(set.id()));
        set.lose(WorkerId(n));
    }
    assert!(set.entries.len() <= 2 + LOST_KEPT, "{}", set.entries.len());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Join,
    Lose(usize),
    Echo(usize, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => Just(Step::Join),
        1 => (0..100_usize).prop_map(Step::Lose),
        6 => (0..100_usize, 0..4_u64).prop_map(|(who, behind)| Step::Echo(who, behind)),
    ];
    prop::collection::vec(step, 1..60)
}

/// The same with every set written out, and every chain walked.
#[derive(Default)]
struct Naive {
    sets: Vec<BTreeSet<u64>>,
    known: BTreeMap<u64, usize>,
}

impl Naive {
    fn requires(&self, from: u64, whom: u64) -> bool {
        let mut seen = BTreeSet::new();
        let mut next = vec![from];
        while let Some(worker) = next.pop() {
            let Some(&known) = self.known.get(&worker) else { continue };
            next.extend(self.sets[known].iter().filter(|other| seen.insert(**other)));
        }
        seen.contains(&whom)
    }
}

proptest! {
    #[test]
    fn who_gets_tasks_is_required_by_all(steps in steps()) {
        let mut set = set();
        let mut naive = Naive { sets: vec![BTreeSet::new()], ..Naive::default() };
        let mut next = 1;
        for step in steps {
            let live: Vec<u64> = naive.sets[naive.sets.len() - 1].iter().copied().collect();
            let pick = |n: usize| live.get(n % live.len().max(1)).copied();
            let mut now = naive.sets[naive.sets.len() - 1].clone();
            match step {
                Step::Join => {
                    set.join(WorkerId(next), &seat(next), life(1));
                    now.insert(next);
                    naive.sets.push(now);
                    next += 1;
                }
                Step::Lose(who) => if let Some(who) = pick(who) {
                    set.lose(WorkerId(who));
                    now.remove(&who);
                    naive.sets.push(now);
                },
                Step::Echo(who, behind) => if let Some(who) = pick(who) {
                    // Nobody was told of a set before it joined.
                    let joined = naive.sets.iter().position(|set| set.contains(&who)).unwrap();
                    let version = (naive.sets.len() - 1).saturating_sub(behind as usize).max(joined);
                    set.heard(WorkerId(who), Some(WorkerSetId { version: version as u64, ..set.id() }));
                    let known = naive.known.entry(who).or_default();
                    *known = version.max(*known);
                },
            }
            set.propagate(|_| false);
            let live = &naive.sets[naive.sets.len() - 1];
            for &worker in live {
                let required = live.iter().all(|&other| naive.requires(other, worker));
                // What is kept is a lower bound; it says yes at the latest when all know the set of now.
                prop_assert!(!set.permits(WorkerId(worker)) || required, "{worker} of {live:?}");
                let all_know = live.iter().all(|other| naive.known.get(other) == Some(&(naive.sets.len() - 1)));
                prop_assert!(!all_know || set.permits(WorkerId(worker)));
            }
        }
    }
}

/// A set, the versions that workers were told last, and who may still join.
#[derive(Clone, Debug)]
struct Told {
    set: WorkerSet,
    told: BTreeMap<u64, u64>,
    next: u64,
}

impl Told {
    /// What [`WorkerSet::standings`] says of it, with whom the named versions are of.
    fn form(&self) -> String {
        let named: Vec<u64> = self.told.values().copied().collect();
        format!("{:?} {:?} {}", self.set.standings(&named), self.told.keys(), self.next)
    }

    /// All that can happen to a set, in an order that depends on its form alone.
    fn after(&self) -> Vec<Told> {
        let live: Vec<u64> = (1..self.next).filter(|worker| self.set.contains(WorkerId(*worker))).collect();
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut Told)| {
            let mut after = self.clone();
            change(&mut after);
            after.set.propagate(|_| false);
            all.push(after);
        };
        if self.next <= 4 {
            add(&|s| {
                s.set.join(WorkerId(s.next), &seat(s.next), life(1));
                s.next += 1;
            });
        }
        add(&|s| s.set.all_know());
        for worker in live {
            add(&|s| {
                s.set.lose(WorkerId(worker));
                s.told.remove(&worker);
            });
            add(&|s| {
                s.told.insert(worker, s.set.id().version);
            });
            if let Some(version) = self.told.get(&worker) {
                let id = WorkerSetId { version: *version, ..self.set.id() };
                add(&|s| s.set.heard(WorkerId(worker), Some(id)));
            }
        }
        all
    }
}

#[test]
fn sets_with_the_same_standings_permit_the_same_now_and_later() {
    let first = Told { set: set(), told: BTreeMap::new(), next: 1 };
    let mut seen = BTreeSet::from([format!("{first:?}")]);
    let mut todo = std::collections::VecDeque::from([first]);
    let mut alike: BTreeMap<String, String> = BTreeMap::new();
    while let Some(told) = todo.pop_front() {
        let after = told.after();
        let permits = |worker| (told.set.permits(WorkerId(worker)), told.set.unaware(WorkerId(worker)));
        let live = (1..told.next).filter(|worker| told.set.contains(WorkerId(*worker)));
        let forms: Vec<String> = after.iter().map(Told::form).collect();
        let what = format!("{:?} {forms:?}", live.map(permits).collect::<Vec<_>>());
        let other = alike.entry(told.form()).or_insert_with(|| what.clone());
        assert_eq!(*other, what, "{:?}", told.set);
        todo.extend(
            after.into_iter().filter(|after| seen.len() < 30_000 && seen.insert(format!("{after:?}"))),
        );
    }
    assert!(alike.len() < seen.len(), "{} of {} differ", alike.len(), seen.len());
}
