//! The worker set: whom an owner counts on, and which workers would notice if one of them were missing.
//!
//! A new owner that cannot trust its store asks the workers themselves: each remembers the id of the last set that
//! it was told. If all who came back name the same id, and they are that set, nobody is missing ([`agree`]). So that
//! no part of the workers can ever agree without one that may be running something, a new worker gets tasks only when
//! all others *require* it, themselves or through others: a worker requires all who are in the set that it knows, and
//! those whom these require, and so on.
//!
//! Every join and every loss makes a new version of the set, so a worker's set is one number, and whom it requires
//! in the end is one number too: the highest version that can be reached from it. That is kept for each worker,
//! raised step by step ([`WorkerSet::propagate`]), and it is all that is kept: memory grows with the workers, not with
//! their pairs.
//!
//! Why it is sound. Say that a worker r may run something since the moment when all required it, and that later all
//! workers of a set H without r agree on H, version v. Take any u of H. When r was let in, u had shown v or less, and some
//! chain u, x1, x2, ... led to one that knew of r. The last of the chain knows more than v and never less again, so it
//! does not agree on v, and is not in H; yet all of the chain had joined by v, and this one was alive later, so it is in
//! v. That contradicts. Chains may lead through workers that are lost. A worker that joined after r has never known a
//! set without r, unless r was lost. And one that has no id, or another owner's, agrees with nobody.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::canary::{Bug, Canary};
use crate::names::{Incarnation, Life, Seat, WorkerId, WorkerSetId};

/// Lost workers that are remembered beyond as many as live: chains through them let others in sooner, no more.
const LOST_KEPT: usize = 64;

/// What is known of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Entry {
    /// The version that it joined with.
    joined: u64,
    /// The version without it.
    lost: Option<u64>,
    /// The highest version that it has shown to know.
    known: Option<u64>,
    /// The highest version that it requires, itself or through others.
    indirect: Option<u64>,
    digest: u64,
}

/// How a worker stands in a set, with versions numbered by [`WorkerSet::standings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Standing {
    /// Who it is.
    pub worker: WorkerId,
    /// The version that it joined with.
    pub joined: u64,
    /// The version without it.
    pub lost: Option<u64>,
    /// It has shown that it knows a set with itself in it.
    pub knows: bool,
    /// The highest version that it requires, itself or through others.
    pub indirect: Option<u64>,
}

/// What decides whom a set permits, now and later.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Standings {
    /// Those who live, and the lost that somebody may require.
    pub workers: Vec<Standing>,
    /// The versions that were asked about, as they are numbered here.
    pub named: Vec<u64>,
    /// The highest version that all who live require.
    pub required: Option<u64>,
}

/// The set of an owner, and its history as far as it matters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerSet {
    incarnation: Incarnation,
    version: u64,
    hash: u64,
    /// Those who live, and some who do not any more.
    entries: BTreeMap<WorkerId, Entry>,
    live: usize,
    /// The highest version that all who live require; None if of one it is not known.
    required: Option<u64>,
    /// Something changed since that was found.
    dirty: bool,
    canary: Canary,
}

impl WorkerSet {
    /// An owner's set, with nobody in it.
    pub fn new(incarnation: Incarnation, canary: Canary) -> WorkerSet {
        WorkerSet {
            incarnation,
            version: 0,
            hash: 0,
            entries: BTreeMap::new(),
            live: 0,
            required: None,
            dirty: false,
            canary,
        }
    }

    /// The set as it is now: what workers are told.
    pub fn id(&self) -> WorkerSetId {
        WorkerSetId { incarnation: self.incarnation, version: self.version, hash: self.hash }
    }

    /// Something has changed since it was found out who requires whom.
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Whether a worker has shown to know the set as it is now.
    pub fn knows_all(&self, worker: WorkerId) -> bool {
        self.entries.get(&worker).is_some_and(|entry| entry.known == Some(self.version))
    }

    /// Whether a worker is in it.
    pub fn contains(&self, worker: WorkerId) -> bool {
        self.entries.get(&worker).is_some_and(|entry| entry.lost.is_none())
    }

    /// A worker is counted on.
    pub fn join(&mut self, worker: WorkerId, seat: &Seat, life: Life) {
        if self.contains(worker) {
            return;
        }
        self.version += 1;
        let digest = digest(seat, life);
        self.hash = self.hash.wrapping_add(digest);
        let entry = Entry { joined: self.version, lost: None, known: None, indirect: None, digest };
        self.entries.insert(worker, entry);
        self.live += 1;
        self.dirty = true;
    }

    /// A worker is gone. Whom it required still counts for those who require it.
    pub fn lose(&mut self, worker: WorkerId) {
        let Some(entry) = self.entries.get_mut(&worker).filter(|entry| entry.lost.is_none()) else { return };
        self.version += 1;
        entry.lost = Some(self.version);
        self.hash = self.hash.wrapping_sub(entry.digest);
        self.live -= 1;
        self.dirty = true;
        self.prune();
    }

    /// A worker says which set it knows. One of another owner says nothing.
    pub fn heard(&mut self, worker: WorkerId, id: Option<WorkerSetId>) {
        let ours = |id: &WorkerSetId| id.incarnation == self.incarnation && id.version <= self.version;
        let Some(version) = id.filter(ours).map(|id| id.version) else { return };
        let Some(entry) = self.entries.get_mut(&worker).filter(|entry| entry.lost.is_none()) else { return };
        if entry.known.is_none_or(|known| known < version) {
            entry.known = Some(version);
            entry.indirect = entry.indirect.max(Some(version));
            self.dirty = true;
        }
    }

    /// All who are in the set know it, whatever they call it: they have agreed on it with each other.
    pub fn all_know(&mut self) {
        for entry in self.entries.values_mut().filter(|entry| entry.lost.is_none()) {
            entry.known = Some(self.version);
            entry.indirect = Some(self.version);
        }
        self.dirty = true;
    }

    /// Finds out what everybody requires. Cheap if nothing has changed. `silent` tells whom an owner does not hear; they
    /// count like all others.
    pub fn propagate(&mut self, silent: impl Fn(WorkerId) -> bool) {
        if !std::mem::replace(&mut self.dirty, false) {
            return;
        }
        while self.propagate_once() {}
        let careless = self.canary.is(Bug::UnhealthyNotAsked);
        let live = self.entries.iter().filter(|(_, entry)| entry.lost.is_none());
        let asked = live.filter(|(worker, _)| !(careless && silent(**worker)));
        // If of one nothing is known, nobody is required by all.
        self.required = asked.map(|(_, entry)| entry.indirect).min().flatten();
    }

    /// One step: everybody requires what is required by those in the set that it requires so far. True if
    /// somebody requires more than before.
    fn propagate_once(&mut self) -> bool {
        // Versions are walked through from the first: workers come in as they join, and those that are lost by then
        // fall out when they come to the top.
        let mut joining: Vec<(u64, Option<u64>, Option<u64>)> =
            self.entries.values().map(|entry| (entry.joined, entry.indirect, entry.lost)).collect();
        joining.sort_unstable_by_key(|(joined, ..)| *joined);
        let mut asking: Vec<(u64, WorkerId)> =
            self.entries.iter().filter_map(|(worker, entry)| Some((entry.indirect?, *worker))).collect();
        asking.sort_unstable();
        let mut joining = joining.into_iter().peekable();
        let mut highest: BinaryHeap<(Option<u64>, Option<u64>)> = BinaryHeap::new();
        let mut raised = false;
        for (version, worker) in asking {
            while let Some((_, indirect, lost)) = joining.next_if(|(joined, ..)| *joined <= version) {
                highest.push((indirect, lost));
            }
            while highest.peek().is_some_and(|(_, lost)| lost.is_some_and(|lost| lost <= version)) {
                highest.pop();
            }
            let Some(&(Some(reached), _)) = highest.peek() else { continue };
            if let Some(entry) = self.entries.get_mut(&worker).filter(|_| reached > version) {
                entry.indirect = Some(reached);
                raised = true;
            }
        }
        raised
    }

    /// Whether a worker may be given tasks for the first time, as far as [`WorkerSet::propagate`] has found.
    pub fn permits(&self, worker: WorkerId) -> bool {
        let Some(entry) = self.entries.get(&worker).filter(|entry| entry.lost.is_none()) else {
            return false;
        };
        let knows = entry.known.is_some_and(|known| known >= entry.joined);
        let required = self.required.is_some_and(|required| required >= entry.joined);
        knows && (required || self.canary.is(Bug::NewWorkerNotRequired))
    }

    /// How many of those who live do not require a worker yet.
    pub fn unaware(&self, worker: WorkerId) -> usize {
        let Some(joined) = self.entries.get(&worker).map(|entry| entry.joined) else { return self.live };
        let live = self.entries.values().filter(|entry| entry.lost.is_none());
        live.filter(|entry| entry.indirect.is_none_or(|version| version < joined)).count()
    }

    /// What decides the future of a set, without what does not: two sets that are the same in this permit the same, now
    /// and whatever comes, after [`WorkerSet::propagate`] and as long as few are lost. `named` are the versions that
    /// workers may still come to show. For those who compare sets, such as a model of them.
    ///
    /// Versions are only ever compared: those that can be named or are required, with joins and losses. So they are
    /// numbered anew in their order; versions with no join or loss between them are one, and so are joins and losses
    /// with no version between them. A lost worker that is in none of these versions is left out: later ones are without it.
    pub fn standings(&self, named: &[u64]) -> Standings {
        let live = self.entries.values().filter(|entry| entry.lost.is_none());
        let mut versions: BTreeSet<u64> = live.filter_map(|entry| entry.indirect).collect();
        versions.extend(named.iter().chain([&self.version]));
        let mut kept: BTreeMap<WorkerId, Entry> = BTreeMap::new();
        loop {
            let before = kept.len();
            for (worker, entry) in &self.entries {
                let end = entry.lost.unwrap_or(u64::MAX).max(entry.joined);
                if entry.lost.is_none() || versions.range(entry.joined..end).next().is_some() {
                    kept.insert(*worker, *entry);
                    versions.extend(entry.indirect);
                }
            }
            if kept.len() == before {
                break;
            }
        }
        let events: BTreeSet<u64> =
            kept.values().flat_map(|entry| [Some(entry.joined), entry.lost]).flatten().collect();
        let mut number = 0;
        let mut after_version = true;
        let mut numbers: BTreeMap<u64, u64> = BTreeMap::new();
        for at in events.union(&versions) {
            if events.contains(at) && after_version {
                number += 1;
                after_version = false;
            }
            after_version |= versions.contains(at);
            numbers.insert(*at, number);
        }
        let number = |version: u64| numbers.get(&version).copied().unwrap_or_default();
        let standing = |(worker, entry): (&WorkerId, &Entry)| Standing {
            worker: *worker,
            joined: number(entry.joined),
            lost: entry.lost.map(number),
            knows: entry.known.is_some_and(|known| known >= entry.joined),
            indirect: entry.indirect.map(number),
        };
        Standings {
            workers: kept.iter().map(standing).collect(),
            named: named.iter().map(|version| number(*version)).collect(),
            required: self.required.map(number),
        }
    }

    /// Forgets lost workers that nobody requires any more, and the first lost if there are too many.
    fn prune(&mut self) {
        let live = self.entries.values().filter(|entry| entry.lost.is_none());
        let oldest = live.filter_map(|entry| entry.indirect).min().unwrap_or(self.version);
        self.entries.retain(|_, entry| entry.lost.is_none_or(|lost| lost > oldest));
        while self.entries.len() > 2 * self.live + LOST_KEPT {
            let lost = self.entries.iter().filter_map(|(worker, entry)| Some((entry.lost?, *worker)));
            let Some((_, first)) = lost.min() else { return };
            self.entries.remove(&first);
        }
    }
}

/// Whether workers agree that they are all there are: each names the same set, and they are that set. Nobody agrees on
/// nothing.
pub fn agree<'a>(workers: impl IntoIterator<Item = (&'a Seat, Life, Option<WorkerSetId>)>) -> bool {
    let mut agreed: Option<WorkerSetId> = None;
    let mut hash = 0_u64;
    for (seat, life, id) in workers {
        let Some(id) = id else { return false };
        if agreed.is_some_and(|agreed| agreed != id) {
            return false;
        }
        agreed = Some(id);
        hash = hash.wrapping_add(digest(seat, life));
    }
    agreed.is_some_and(|agreed| agreed.hash == hash)
}

/// A worker's part of the hash: FNV-1a, well mixed, so that sums of different sets differ. It must be the same for every
/// owner, whenever and wherever it was built.
fn digest(seat: &Seat, life: Life) -> u64 {
    let bytes = seat.as_str().bytes().chain([0]);
    let bytes = bytes.chain(life.process.to_le_bytes()).chain(life.rejoin.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
#[path = "worker_set_tests.rs"]
mod tests;
