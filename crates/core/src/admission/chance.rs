//! Choices among equals. The generator is part of the state, and what it chose is recorded by whoever asked, so that a
//! decision can be explained and played again.

/// A generator of numbers (splitmix64).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// A number below `n`, which is above 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        // The upper bits of a product: even enough for any number of runs there can be.
        ((u128::from(z) * n.max(1) as u128) >> 64) as usize
    }
}
