//! A task's place in its lane: (pass, seq), as one 128-bit number so that order is one comparison and
//! a store can use its 16 big-endian bytes as a key.

use std::fmt;

use super::vtime::Pass;

/// Bits of the seq: 2^47 tasks and as many retries, 44 years at 100,000 a second.
const SEQ_BITS: u32 = 48;

/// The place of a task in its lane. Lower is served first.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(u128);

impl Level {
    /// Below every task: seqs begin at 1.
    pub const ZERO: Level = Level(0);
    /// The last seq a shard can hand out.
    pub const LAST_SEQ: u64 = (1 << SEQ_BITS) - 1;
    /// The last seq it gives to a new task; the rest is for retries, which cannot be refused.
    pub const LAST_NEW_SEQ: u64 = Level::LAST_SEQ / 2;

    /// The level of a task placed at `pass` with `seq`.
    pub fn new(pass: Pass, seq: u64) -> Level {
        debug_assert!(seq <= Level::LAST_SEQ && pass.0 >> (128 - SEQ_BITS) == 0);
        Level(pass.0 << SEQ_BITS | u128::from(seq & Level::LAST_SEQ))
    }

    /// A level that stands for a number instead of a virtual time.
    pub(crate) fn numbered(number: u64, seq: u64) -> Level {
        Level(u128::from(number) << SEQ_BITS | u128::from(seq & Level::LAST_SEQ))
    }

    /// The number that it stands for.
    pub(crate) fn number(self) -> u64 {
        (self.0 >> SEQ_BITS) as u64
    }

    /// When it is served, in virtual time.
    pub fn pass(self) -> Pass {
        Pass(self.0 >> SEQ_BITS)
    }

    /// Which of several at the same pass: dense, and only grows.
    pub fn seq(self) -> u64 {
        self.0 as u64 & Level::LAST_SEQ
    }

    /// The highest level below this one.
    pub fn before(self) -> Level {
        Level(self.0.saturating_sub(1))
    }

    /// The bytes a store may sort by.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// From the bytes of [`Level::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> Level {
        Level(u128::from_be_bytes(bytes))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.pass().time(), self.seq())
    }
}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
