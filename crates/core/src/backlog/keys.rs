//! The keys a lane remembers: those with rows in the lane, and those whose last charge has not passed
//! yet. A key is looked up by name once per accepted task; everything else uses its index.
//!
//! Names are found by a hash table, which holds nothing but places in `states`. Nothing is ever read in its
//! order. The hash has a secret seed: tenants choose their keys, and must not be able to choose slow ones.

use std::hash::{DefaultHasher, Hash, Hasher};

use hashbrown::HashTable;

use super::vtime::{Average, VTime, Weight};
use crate::names::Key;

/// Where a key stands in its lane's table. Valid until the key is forgotten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KeyIx(u32);

impl KeyIx {
    /// The place as a number.
    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

/// What a lane knows about one key.
#[derive(Clone, Debug)]
pub(crate) struct KeyState {
    pub(crate) key: Key,
    /// F: the end of its last charge.
    pub(crate) finish: VTime,
    /// The end of the first charge of its chain, less one tick: V must not pass it (see places). Counts
    /// while there is a chain. The charge is that of the task before it where its own is not at hand.
    pub(crate) due: VTime,
    /// What its tasks are charged by: its override, else what its latest accepted task asked for.
    pub(crate) weight: Weight,
    /// What its latest accepted task asked for.
    pub(crate) asked: Weight,
    /// Rows that wait: neither running nor settled.
    pub(crate) waiting: u32,
    /// Those of them that stand where they were first placed, each where the charge of the one before ends.
    pub(crate) chain: u32,
    /// Rows that stand where they were first placed, running ones included.
    pub(crate) chained: u32,
    /// Rows in the lane: waiting and running.
    pub(crate) rows: u32,
    /// Charges of rows that were parked, to be given back when no row waits any more.
    pub(crate) refund: VTime,
    /// What its runs took less than they were charged: given back as far as its rows that wait allow it.
    pub(crate) credit: VTime,
    /// Where the last row that was placed begins, as far as it is known. F must not fall below while rows wait.
    pub(crate) last: VTime,
    /// How long its runs took of late.
    pub(crate) average: Average,
    /// It may not run: it is paused, or at a limit of its own. Its rows are parked when they are met.
    pub(crate) held: bool,
    /// It has its one entry among the lane's alarms.
    pub(crate) alarmed: bool,
    /// Its record changed since the last commit.
    pub(crate) dirty: bool,
    /// This place is taken.
    live: bool,
}

/// The table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    seed: u64,
    index: HashTable<KeyIx>,
    states: Vec<KeyState>,
    free: Vec<KeyIx>,
}

impl Keys {
    pub(crate) fn new(seed: u64) -> Keys {
        Keys { seed, ..Keys::default() }
    }

    pub(crate) fn find(&self, key: &Key) -> Option<KeyIx> {
        self.index.find(hash(self.seed, key), |&ix| self.get(ix).key == *key).copied()
    }

    pub(crate) fn get(&self, ix: KeyIx) -> &KeyState {
        &self.states[ix.0 as usize]
    }

    pub(crate) fn get_mut(&mut self, ix: KeyIx) -> &mut KeyState {
        &mut self.states[ix.0 as usize]
    }

    pub(crate) fn insert(&mut self, key: &Key, weight: Weight) -> KeyIx {
        let state = KeyState {
            key: key.clone(),
            finish: VTime::ZERO,
            due: VTime::ZERO,
            weight,
            asked: weight,
            waiting: 0,
            chain: 0,
            chained: 0,
            rows: 0,
            refund: VTime::ZERO,
            credit: VTime::ZERO,
            last: VTime::ZERO,
            average: Average::default(),
            held: false,
            alarmed: false,
            dirty: false,
            live: true,
        };
        let ix = match self.free.pop() {
            Some(ix) => {
                self.states[ix.0 as usize] = state;
                ix
            }
            None => {
                self.states.push(state);
                KeyIx((self.states.len() - 1) as u32)
            }
        };
        let Keys { seed, index, states, .. } = self;
        index.insert_unique(hash(*seed, key), ix, |&ix| hash(*seed, &states[ix.0 as usize].key));
        ix
    }

    pub(crate) fn remove(&mut self, ix: KeyIx) -> Key {
        let state = self.get_mut(ix);
        state.dirty = false;
        state.live = false;
        let key = std::mem::replace(&mut state.key, Key::shared());
        if let Ok(entry) = self.index.find_entry(hash(self.seed, &key), |&other| other == ix) {
            entry.remove();
        }
        self.free.push(ix);
        if self.index.is_empty() {
            // Memory follows the keys that have work: an idle lane holds none.
            *self = Keys::new(self.seed);
        }
        key
    }

    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (KeyIx, &KeyState)> {
        let all = self.states.iter().enumerate().map(|(n, state)| (KeyIx(n as u32), state));
        all.filter(|(_, state)| state.live)
    }
}

fn hash(seed: u64, key: &Key) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(seed);
    key.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_until_they_are_removed() {
        let mut keys = Keys::new(1);
        let names: Vec<Key> = (0..200).map(|n| Key::new(&format!("k{n}")).unwrap()).collect();
        let ixs: Vec<KeyIx> = names.iter().map(|name| keys.insert(name, Weight::ONE)).collect();
        for gone in (0..200).step_by(3) {
            assert_eq!(keys.remove(ixs[gone]), names[gone]);
        }
        for (n, name) in names.iter().enumerate() {
            assert_eq!(keys.find(name), (n % 3 != 0).then_some(ixs[n]), "{name}");
        }
        assert_eq!((keys.len(), keys.iter().count()), (133, 133));
        (0..200).filter(|n| n % 3 != 0).for_each(|n| drop(keys.remove(ixs[n])));
        assert_eq!((keys.len(), keys.states.capacity()), (0, 0), "an empty table holds no memory");
    }
}
