//! The model's worker sets: the core's own, each asked once.

use std::collections::HashMap;
use std::rc::Rc;

use evenhand_core::canary::{Bug, Canary};
use evenhand_core::names::{Epoch, Incarnation, Life, Seat, WorkerId, WorkerSetId};
use evenhand_core::owner::worker_set::{Standings, WorkerSet, agree};

use super::alike::Quick;
use super::{LIVES, WORKERS};

/// A worker set's id. Whom its hash is of is written out: a bit for every life of every worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Id {
    pub(super) epoch: u8,
    pub(super) version: u8,
    pub(super) members: u16,
}

/// What happens to a worker set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Op {
    New(u8),
    Join(u8, u8),
    Lose(u8, u8),
    Heard(u8, u8, Option<Id>),
    AllKnow,
    /// With those who are silent, a bit each.
    Propagate(u8),
}

/// A worker set, and what the core says of it.
struct Decided {
    set: WorkerSet,
    id: Id,
    /// Who is permitted, a bit for every life.
    permitted: u16,
    dirty: bool,
}

/// All worker sets that came up, and what became of each: what the core decides about a set is asked once.
pub(super) struct Sets {
    canary: Canary,
    seats: Vec<Seat>,
    /// The hash of every id, by whom it is of.
    hashes: HashMap<u16, u64, Quick>,
    all: Vec<Decided>,
    numbers: HashMap<WorkerSet, u32>,
    after: HashMap<(u32, Op), u32, Quick>,
    /// By set and versions that can be named, a bit each.
    standings: HashMap<(u32, u64), Rc<Standings>, Quick>,
}

impl Sets {
    pub(super) fn new(bug: Option<Bug>) -> Sets {
        let canary = bug.map_or_else(Canary::default, Canary::new);
        Sets {
            canary,
            seats: (0..WORKERS).map(seat).collect(),
            hashes: HashMap::default(),
            all: Vec::new(),
            numbers: HashMap::new(),
            after: HashMap::default(),
            standings: HashMap::default(),
        }
    }

    pub(super) fn id(&self, set: u32) -> Id {
        self.all[set as usize].id
    }

    pub(super) fn permits(&self, set: u32, w: usize, life: u8) -> bool {
        self.all[set as usize].permitted & bit(w, life) != 0
    }

    /// The id as the core knows it.
    fn real(&self, id: Id) -> WorkerSetId {
        let incarnation = incarnation(id.epoch);
        WorkerSetId { incarnation, version: id.version.into(), hash: self.hashes[&id.members] }
    }

    pub(super) fn agree(&self, workers: impl Iterator<Item = (usize, u8, Option<Id>)>) -> bool {
        agree(workers.map(|(w, life, id)| (&self.seats[w], life_of(life), id.map(|id| self.real(id)))))
    }

    pub(super) fn after(&mut self, set: u32, op: Op) -> u32 {
        // What changes nothing, as far as can be seen at once.
        if op == Op::Propagate(0) && !self.all[set as usize].dirty || matches!(op, Op::Heard(_, _, None)) {
            return set;
        }
        if let Some(after) = self.after.get(&(set, op)) {
            return *after;
        }
        let before = self.all.get(set as usize).map(|before| before.set.clone());
        let mut after = before.unwrap_or_else(|| WorkerSet::new(Incarnation::default(), self.canary));
        match op {
            Op::New(epoch) => after = WorkerSet::new(incarnation(epoch), self.canary),
            Op::Join(w, life) => {
                after.join(id_of(w.into(), life), &self.seats[usize::from(w)], life_of(life));
            }
            Op::Lose(w, life) => after.lose(id_of(w.into(), life)),
            Op::Heard(w, life, id) => after.heard(id_of(w.into(), life), id.map(|id| self.real(id))),
            Op::AllKnow => after.all_know(),
            Op::Propagate(silent) => after.propagate(|worker| silent & 1 << whose(worker).0 != 0),
        }
        let number = match self.numbers.get(&after) {
            Some(number) => *number,
            None => {
                let number = self.all.len() as u32;
                let bits = |is: &dyn Fn(WorkerId) -> bool| {
                    let lives = lives_of(u16::MAX).filter(|(w, life)| is(id_of(*w, *life)));
                    lives.fold(0, |bits, (w, life)| bits | bit(w, life))
                };
                let members = bits(&|worker| after.contains(worker));
                let permitted = bits(&|worker| after.permits(worker));
                let real = after.id();
                let id = Id { epoch: real.incarnation.epoch.0 as u8, version: real.version as u8, members };
                self.hashes.entry(members).or_insert(real.hash);
                assert_eq!(self.real(id), real, "the hash of an id is of its set alone");
                let (set, dirty) = (after.clone(), after.is_dirty());
                self.all.push(Decided { set, id, permitted, dirty });
                self.numbers.insert(after, number);
                number
            }
        };
        self.after.insert((set, op), number);
        number
    }

    pub(super) fn standings(&mut self, set: u32, named: u64) -> Rc<Standings> {
        let all = &self.all;
        let standing = self.standings.entry((set, named)).or_insert_with(|| {
            let versions: Vec<u64> = (0..64).filter(|version| named & 1 << version != 0).collect();
            Rc::new(all[set as usize].set.standings(&versions))
        });
        Rc::clone(standing)
    }
}

fn incarnation(epoch: u8) -> Incarnation {
    Incarnation { epoch: Epoch(epoch.into()), nonce: 0 }
}

pub(super) fn id_of(w: usize, life: u8) -> WorkerId {
    WorkerId(w as u64 * 256 + u64::from(life))
}

fn life_of(life: u8) -> Life {
    Life { process: life.into(), rejoin: 0 }
}

/// The worker and life of an id.
pub(super) fn whose(worker: WorkerId) -> (usize, u8) {
    ((worker.0 / 256) as usize, (worker.0 % 256) as u8)
}

/// The bit of a worker's life.
fn bit(w: usize, life: u8) -> u16 {
    1 << (w as u8 * LIVES + life - 1)
}

/// Workers and lives of bits.
pub(super) fn lives_of(mut bits: u16) -> impl Iterator<Item = (usize, u8)> {
    std::iter::from_fn(move || {
        let at = (bits != 0).then(|| bits.trailing_zeros() as u8)?;
        bits &= bits - 1;
        Some((usize::from(at / LIVES), at % LIVES + 1))
    })
}

fn seat(w: usize) -> Seat {
    match Seat::new(&format!("w{w}")) {
        Ok(seat) => seat,
        Err(refusal) => unreachable!("{refusal}"),
    }
}
