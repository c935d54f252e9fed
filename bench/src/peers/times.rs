//! How long things took: exact percentiles, as `evenhand bench` tells them.

use std::time::Duration;

/// Times, from the shortest to the longest.
#[derive(Clone, Debug, Default)]
pub(super) struct Times(Vec<Duration>);

impl Times {
    pub(super) fn new(mut times: Vec<Duration>) -> Times {
        times.sort_unstable();
        Times(times)
    }

    /// The least number of milliseconds that so many per mille of them did not exceed.
    pub(super) fn ms(&self, per_mille: u64) -> f64 {
        let rank = (self.0.len() as u64 * per_mille).div_ceil(1_000).max(1);
        let time = self.0.get(rank as usize - 1).copied().unwrap_or_default();
        time.as_micros() as f64 / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_times() {
        let times = Times::new((1..=1_000).rev().map(Duration::from_millis).collect());
        assert_eq!(
            [0, 1, 500, 990, 999, 1_000].map(|at| times.ms(at)),
            [1.0, 1.0, 500.0, 990.0, 999.0, 1_000.0]
        );
        assert_eq!(Times::default().ms(500), 0.0);
    }
}
