//! The keys a lane remembers: those with rows in the lane, and those whose last charge has not passed
//! yet. A key is looked up by name once per accepted task; everything else uses its index.

use std::collections::BTreeMap;

use super::vtime::{VTime, Weight};
use crate::names::Key;

/// Where a key stands in its lane's table. Valid until the key is forgotten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KeyIx(u32);

/// What a lane knows about one key.
#[derive(Clone, Debug)]
pub(crate) struct KeyState {
    pub(crate) key: Key,
    /// F: the end of its last charge.
    pub(crate) finish: VTime,
    /// The end of the charge of its first waiting task, less one tick: V must not pass it (see places).
    /// The charge is that of the task before it where its own is not at hand, and F is never exceeded.
    pub(crate) due: VTime,
    pub(crate) weight: Weight,
    /// Rows that wait: neither running nor settled.
    pub(crate) waiting: u32,
    /// Rows in the lane: waiting and running.
    pub(crate) rows: u32,
    /// It has its one entry among the lane's alarms.
    pub(crate) alarmed: bool,
    /// Its record changed since the last commit.
    pub(crate) dirty: bool,
}

/// The table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    index: BTreeMap<Key, KeyIx>,
    states: Vec<KeyState>,
    free: Vec<KeyIx>,
}

impl Keys {
    pub(crate) fn find(&self, key: &Key) -> Option<KeyIx> {
        self.index.get(key).copied()
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
            waiting: 0,
            rows: 0,
            alarmed: false,
            dirty: false,
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
        self.index.insert(key.clone(), ix);
        ix
    }

    pub(crate) fn remove(&mut self, ix: KeyIx) -> Key {
        let state = self.get_mut(ix);
        state.dirty = false;
        let key = std::mem::replace(&mut state.key, Key::shared());
        self.index.remove(&key);
        self.free.push(ix);
        if self.index.is_empty() {
            // Memory follows the keys that have work: an idle lane holds none.
            *self = Keys::default();
        }
        key
    }

    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (KeyIx, &KeyState)> {
        self.index.values().map(|&ix| (ix, self.get(ix)))
    }
}
