//! Which states of the model count as one: those that are the same in all that can come of them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

use evenhand_core::owner::worker_set::{Standing, Standings};

use super::sets::{Id, Sets, id_of, lives_of, whose};
use super::{Down, LIVES, State, WORKERS, Witness, World, takes};

/// Ids as far as they matter, by worker: see [`World::names`].
pub(super) struct Names {
    pub(super) set: [Name; WORKERS],
    pub(super) late: [Name; WORKERS],
    pub(super) first: [Name; WORKERS],
    /// Something changes for a worker that is told the set as it is now.
    pub(super) news: [bool; WORKERS],
    standing: Option<Rc<Standings>>,
}

/// An id as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name {
    None,
    /// Nobody will agree on it, and its owner learns nothing from it.
    Void,
    /// These workers may agree on it, a bit each; its owner learns nothing from it.
    Of(u8),
    /// The owner of now may learn from it what version is known, if it is not shown yet. If workers may agree on it, it
    /// has a number among such, in their order; the owner may still tell it, if it is the set as it is now.
    Known {
        shows: Option<u8>,
        number: u8,
        now: bool,
    },
}

impl Name {
    fn packed(self) -> u64 {
        match self {
            Name::None => 0,
            Name::Void => 1,
            Name::Of(_) => 2,
            Name::Known { shows, number, now } => {
                3 | u64::from(now) << 2 | u64::from(number) << 3 | u64::from(shows.map_or(0, |v| v + 1)) << 6
            }
        }
    }

    fn of(self) -> u8 {
        match self {
            Name::Of(workers) => workers,
            Name::None | Name::Void | Name::Known { .. } => 0,
        }
    }
}

impl World {
    /// Plays up to so many states without taking any two for the same, and looks whether those that would count as the
    /// same are alike in all that can come next. What differs, if something does; else how many states, and how many
    /// are left of them.
    pub fn compare(&self, most: usize) -> Result<(usize, usize), String> {
        let mut sets = Sets::new(self.bug);
        let orders = Orders::of(self);
        let first = self.first();
        let mut seen: HashSet<State> = HashSet::from([first]);
        let mut todo = VecDeque::from([first]);
        type Seen = (State, Vec<(u64, bool)>);
        let mut alike: HashMap<u64, Seen, Quick> = HashMap::default();
        let mut next = Vec::new();
        // By turns the first and the last, so that it gets far.
        let mut last = false;
        while let Some(state) = if last { todo.pop_back() } else { todo.pop_front() } {
            last = !last;
            let own = self.fingerprint(&mut sets, &orders, &state);
            let wrong = self.no_task_runs_twice(&state).is_err();
            let over = state.done == self.all_tasks() || state.workers.iter().all(|w| w.life.is_none());
            next.clear();
            if !over {
                self.next(&mut sets, &state, &mut next);
            }
            let mut after: Vec<(u64, bool)> = vec![(u64::from(wrong), over)];
            for (step, next) in &next {
                if seen.len() < most && seen.insert(*next) {
                    todo.push_back(*next);
                }
                let print = self.fingerprint(&mut sets, &orders, next);
                if print != own {
                    after.push((print, step.is_fault()));
                }
            }
            after[1..].sort_unstable();
            after.dedup();
            match alike.entry(own) {
                Entry::Vacant(new) => {
                    new.insert((state, after));
                }
                Entry::Occupied(other) => {
                    let (other, expected) = other.get();
                    if *expected != after {
                        return Err(format!(
                            "{other:?}\n{state:?}\ncount as one, but differ in what can come"
                        ));
                    }
                }
            }
        }
        Ok((seen.len(), alike.len()))
    }

    /// What the ids that are known, on their way, or were said first still decide.
    ///
    /// - Whether workers agree: only if each of an id's set lives and knows it, or can still be told it: now it is on its
    ///   way, or is what the owner says. If not, nobody will ever agree on it; nor if no owner is left to look.
    /// - What its owner learns when it is shown: nothing new, if the worker requires that much already.
    /// - Whether the next that a worker is told replaces it: whatever is told is newer, unless it is the same.
    ///
    /// So most ids are as good as any, and of others it matters only whose they are, or how far they are known.
    pub(super) fn names(&self, sets: &mut Sets, state: &State) -> Names {
        let mut names = Names {
            set: [Name::None; WORKERS],
            late: [Name::None; WORKERS],
            first: [Name::None; WORKERS],
            news: [false; WORKERS],
            standing: None,
        };
        let shut = state.owner.filter(|owner| !owner.open);
        let teller = state.owner.filter(|owner| self.tells(owner));
        let now = teller.map(|owner| sets.id(owner.set));
        let is_ours = |id: Id| now.is_some_and(|now| now.epoch == id.epoch);
        let late = state.workers.map(|worker| match worker.late {
            Some(Down::Set(id)) => Some(id).filter(|id| takes(&worker, *id)),
            Some(Down::Start(_)) | None => None,
        });
        let someone_looks = state.crashes > 0 || state.owner.is_none_or(|owner| !owner.open);
        let may_agree = |id: Id| {
            someone_looks
                && lives_of(id.members).all(|(w, life)| {
                    let worker = &state.workers[w];
                    let knows = worker.set == Some(id) || late[w] == Some(id) || now == Some(id);
                    let member = shut.and_then(|owner| owner.members[w]);
                    let said = member.is_some_and(|m| m.heard && m.life == life && m.first == Some(id));
                    said || worker.life == Some(life) && knows
                })
        };
        // What our owner would learn from each, by the number of the version; first with all versions that can be named,
        // then with those only from which something can be learned.
        let mut shows = [[None; 3]; WORKERS];
        if let Some(owner) = teller {
            let mut ours = [[None; 3]; WORKERS];
            for (w, worker) in state.workers[..self.workers].iter().enumerate() {
                ours[w] = [worker.set, late[w], now].map(|id| id.filter(|id| is_ours(*id)));
            }
            for _ in 0..2 {
                let versions = named(&ours);
                let standings = sets.standings(owner.set, versions);
                for (w, worker) in state.workers[..self.workers].iter().enumerate() {
                    let own = worker.life.map(|life| id_of(w, life));
                    let own = standings.workers.iter().find(|standing| Some(standing.worker) == own);
                    for (id, shows) in ours[w].iter_mut().zip(&mut shows[w]) {
                        let (Some(named), Some(own)) = (*id, own.filter(|own| own.lost.is_none())) else {
                            (*id, *shows) = (None, None);
                            continue;
                        };
                        let below = (versions & ((1 << named.version) - 1)).count_ones();
                        let number = standings.named[below as usize];
                        *shows = Some(number as u8);
                        if shows_nothing(own, number) {
                            (*id, *shows) = (None, None);
                        }
                    }
                }
                names.standing = Some(standings);
                if versions == named(&ours) {
                    break;
                }
            }
        }
        // The ids of ours on which workers may agree, and that are not like those of other owners.
        let mut open_ids: Vec<Id> = Vec::new();
        for (w, worker) in state.workers[..self.workers].iter().enumerate() {
            for (id, shows, is_late) in [(worker.set, shows[w][0], false), (late[w], shows[w][1], true)] {
                let Some(id) = id.filter(|id| is_ours(*id)) else { continue };
                let settled = shows.is_none() && !is_late && now != Some(id);
                if !settled && !open_ids.contains(&id) && may_agree(id) {
                    open_ids.push(id);
                }
            }
        }
        open_ids.sort_unstable();
        let name = |id: Option<Id>, shows: Option<u8>| {
            let Some(id) = id else { return Name::None };
            if let Some(at) = open_ids.iter().position(|open| *open == id) {
                return Name::Known { shows, number: at as u8 + 1, now: now == Some(id) };
            }
            if may_agree(id) {
                return Name::Of(lives_of(id.members).fold(0, |of, (w, _)| of | 1 << w));
            }
            shows.map_or(Name::Void, |shows| Name::Known { shows: Some(shows), number: 0, now: false })
        };
        for (w, worker) in state.workers[..self.workers].iter().enumerate() {
            names.set[w] = name(worker.set, shows[w][0]);
            names.late[w] = name(late[w], shows[w][1]);
            // Of no consequence any more.
            if names.late[w] == names.set[w] {
                names.late[w] = Name::None;
            }
            let first = shut.and_then(|owner| owner.members[w]).and_then(|member| member.first);
            names.first[w] = name(first, None);
            names.news[w] = now.is_some_and(|now| {
                takes(worker, now) && (may_agree(now) || name(Some(now), shows[w][2]) != names.set[w])
            });
        }
        names
    }

    /// The same for states that are the same in all that can come of them. It leaves out:
    ///
    /// - which worker is which, and which task: the least of all orders counts;
    /// - the numbers of lives: it matters only whether a life is over, since nobody hears of a later one in advance;
    /// - epochs and versions: see [`World::names`] and [`WorkerSet::standings`];
    /// - what was said first to an owner whose gate is open, and what is saved if no owner will read it.
    pub(super) fn fingerprint(&self, sets: &mut Sets, orders: &Orders, state: &State) -> u64 {
        let names = self.names(sets, state);
        let saved_is_read = self.witness != Witness::Workers && (state.crashes > 0 || state.owner.is_none());
        let members = state.owner.map_or([None; WORKERS], |owner| owner.members);
        // Those of earlier lives in any order.
        let mut standings = [[0_u64; LIVES as usize]; WORKERS];
        if let Some(all) = &names.standing {
            for standing in &all.workers {
                let (w, life) = whose(standing.worker);
                let at = if Some(life) == state.workers[w].life { 0 } else { usize::from(LIVES - life) };
                let plus_one = |version: Option<u64>| version.map_or(0, |version| version + 1);
                standings[w][at] = 1
                    | u64::from(standing.knows) << 1
                    | standing.joined << 2
                    | plus_one(standing.lost) << 18
                    | plus_one(standing.indirect) << 34;
            }
        }
        let mut keys = [0_u64; WORKERS];
        for w in 0..self.workers {
            let worker = &state.workers[w];
            let which = |life: Option<u8>| match life {
                None => 0_u64,
                Some(life) if Some(life) == worker.life => 1,
                Some(_) => 2,
            };
            let saved = if saved_is_read { which(state.saved[w]) } else { 0 };
            let mut key = u64::from(worker.life.is_some()) | u64::from(worker.connected) << 1;
            key |= saved << 2 | which(members[w].map(|member| member.life)) << 4;
            if let Some(m) = members[w] {
                key |= u64::from(m.heard) << 6 | u64::from(m.queued) << 7 | u64::from(m.required) << 8;
            }
            key |= names.set[w].packed() << 10 | names.late[w].packed() << 26 | names.first[w].packed() << 42;
            standings[w][1..].sort_unstable();
            keys[w] = mixed(0, key);
            for standing in standings[w] {
                keys[w] = mixed(keys[w], standing);
            }
        }
        let owner = state.owner.map_or(0, |owner| 1 + u64::from(owner.open));
        let required = names.standing.as_ref().and_then(|all| all.required).map_or(0, |version| version + 1);
        let world = owner | u64::from(state.crashes) << 2 | u64::from(state.rebirths) << 6 | required << 10;
        let mut least = u64::MAX;
        for order in &orders.workers {
            // In the others the keys are not in order.
            if order.windows(2).any(|two| keys[two[0]] > keys[two[1]]) {
                continue;
            }
            for tasks in &orders.tasks {
                let mut print = mixed(world, reordered(state.done, tasks));
                for &w in order {
                    let worker = &state.workers[w];
                    let late = match worker.late {
                        Some(Down::Start(t)) => 1 << t,
                        Some(Down::Set(_)) | None => 0,
                    };
                    let again = worker.again.map_or(0, |t| 1 << t);
                    let runs = members[w].map_or(0, |member| member.runs);
                    let mut rest = 0;
                    for bits in [worker.runs, runs, late, again] {
                        rest = rest << 8 | reordered(bits, tasks);
                    }
                    for bits in [names.set[w].of(), names.first[w].of()] {
                        rest = rest << 8 | reordered(bits, order);
                    }
                    print = mixed(mixed(print, keys[w]), rest);
                }
                least = least.min(print);
            }
        }
        least
    }
}

/// All orders of workers and of tasks.
pub(super) struct Orders {
    workers: Vec<Vec<usize>>,
    tasks: Vec<Vec<usize>>,
}

impl Orders {
    pub(super) fn of(world: &World) -> Orders {
        Orders { workers: orders(world.workers), tasks: orders(world.tasks) }
    }
}

fn orders(n: usize) -> Vec<Vec<usize>> {
    let Some(last) = n.checked_sub(1) else { return vec![Vec::new()] };
    let shorter = orders(last);
    let longer = |order: &Vec<usize>| {
        (0..n)
            .map(|at| {
                let mut order = order.clone();
                order.insert(at, last);
                order
            })
            .collect::<Vec<_>>()
    };
    shorter.iter().flat_map(longer).collect()
}

/// Bits in another order.
fn reordered(bits: u8, order: &[usize]) -> u64 {
    if bits == 0 {
        return 0;
    }
    order.iter().enumerate().fold(0, |all, (at, from)| all | u64::from(bits >> from & 1) << at)
}

/// The versions of ids, a bit each.
fn named(ids: &[[Option<Id>; 3]; WORKERS]) -> u64 {
    let of = |ids: &[Option<Id>; 3]| ids.iter().fold(0, |all, id| all | id.map_or(0, |id| 1 << id.version));
    ids.iter().fold(0, |all, ids| all | of(ids))
}

/// Nothing is learned if a worker shows a version that it requires already.
fn shows_nothing(own: &Standing, version: u64) -> bool {
    own.knows && own.indirect.is_some_and(|indirect| indirect >= version)
}

/// Two numbers in one, well mixed.
fn mixed(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ 0x9e37_79b9_7f4a_7c15) * u128::from(word ^ 0xd6e8_feb8_6659_fd93);
    let folded = (product as u64) ^ (product >> 64) as u64;
    (folded ^ hash.rotate_left(23)).wrapping_add(word.wrapping_mul(0xbf58_476d_1ce4_e5b9))
}

pub(super) type Quick = BuildHasherDefault<Mixer>;

/// A hasher for small keys.
#[derive(Default)]
pub(super) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = mixed(self.0, word);
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }
}
