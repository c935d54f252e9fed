//! Random numbers that a seed decides, for ever. (SplitMix64, written out because the stream of a seed
//! must not change with a dependency: a seed is a bug report.)

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed ^ 0x5eed_0fe7_e9aa_11d3)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { ((u128::from(self.number()) * u128::from(n)) >> 64) as u64 }
    }

    /// A number from `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True in `permille` of a thousand cases.
    pub fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// One of several.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    /// A rank from 0 to n - 1 by Zipf's law: the first is the most frequent.
    pub fn zipf(&mut self, n: u64) -> u64 {
        // Inverse of the continuous law with exponent 1: n^u - 1, close enough for a workload.
        let u = self.number() as f64 / u64::MAX as f64;
        (((n as f64 + 1.0).powf(u)) as u64).clamp(1, n) - 1
    }
}
