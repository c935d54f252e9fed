//! How long things took. All of them are kept and sorted: a run has some ten thousands of calls, and exact
//! percentiles of them are cheaper than an explanation of inexact ones.

use std::time::Duration;

use serde_json::{Map, Value};

/// Times, from the shortest to the longest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn new(mut times: Vec<Duration>) -> Times {
        times.sort_unstable();
        Times(times)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The least time that so many per mille of them did not exceed; zero if there are none.
    pub(crate) fn at(&self, per_mille: u64) -> Duration {
        let rank = (self.0.len() as u64 * per_mille).div_ceil(1_000).max(1);
        self.0.get(rank as usize - 1).copied().unwrap_or_default()
    }

    /// For people: p50, p99, p99.9 and the longest.
    pub(crate) fn cells(&self) -> [String; 4] {
        PARTS.map(|(_, per_mille)| text(self.at(per_mille)))
    }

    /// For programs: the same, in milliseconds.
    pub(crate) fn fields(&self) -> Map<String, Value> {
        let field = |(name, per_mille): (&str, u64)| (name.to_string(), Value::from(ms(self.at(per_mille))));
        PARTS.into_iter().map(field).collect()
    }
}

/// The headings of [`Times::cells`].
pub(crate) const HEADINGS: [&str; 4] = ["p50", "p99", "p99.9", "max"];
const PARTS: [(&str, u64); 4] = [("p50_ms", 500), ("p99_ms", 990), ("p999_ms", 999), ("max_ms", 1_000)];

/// Milliseconds, to the microsecond.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// A time with as many decimals as mean something: 0.41 ms, 12.3 ms, 340 ms.
pub(crate) fn text(time: Duration) -> String {
    match ms(time) {
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms if ms < 100.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: impl IntoIterator<Item = u64>) -> Times {
        Times::new(ms.into_iter().map(Duration::from_millis).collect())
    }

    #[test]
    fn a_percentile_is_one_of_the_times() {
        let thousand = times((1..=1_000).rev());
        let at = [0, 1, 500, 990, 999, 1_000].map(|per_mille| thousand.at(per_mille).as_millis());
        assert_eq!(at, [1, 1, 500, 990, 999, 1_000]);
        let three = times([30, 10, 20]);
        assert_eq!(
            [1, 333, 334, 500, 990, 1_000].map(|at| three.at(at).as_millis()),
            [10, 10, 20, 20, 30, 30]
        );
    }

    #[test]
    fn few_times_and_none_have_percentiles() {
        assert_eq!([0, 500, 1_000].map(|at| times([7]).at(at).as_millis()), [7, 7, 7]);
        assert_eq!([0, 500, 1_000].map(|at| times([]).at(at).as_millis()), [0, 0, 0]);
    }

    #[test]
    fn times_are_readable() {
        let micros = [412, 9_994, 12_340, 340_100];
        assert_eq!(
            micros.map(|us| text(Duration::from_micros(us))),
            ["0.41 ms", "9.99 ms", "12.3 ms", "340 ms"]
        );
        let fields = times([1, 2]).fields();
        assert_eq!(fields["p50_ms"], 1.0);
        assert_eq!(fields["max_ms"], 2.0);
    }
}
