//! Rates: a bucket that fills with time and is emptied by starts. It is memory alone; a bucket that a new owner has not
//! seen is empty when the owner begins, so that a restart never lets more start than the rate allows.

use crate::backlog::Cost;
use crate::bounds;
use crate::names::Millis;
use crate::refusal::Refusal;

/// What a rate counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateUnit {
    /// Every start is one.
    #[default]
    Tasks,
    /// A start is what its task costs: where time is shared, the seconds that it is expected to take.
    Cost,
}

/// How much may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// So much in a second, in thousandths.
    pub per_second: u64,
    /// So much at once after a pause, in thousandths.
    pub burst: u64,
    /// Of what.
    pub unit: RateUnit,
}

impl Rate {
    /// Checks what a user chose.
    pub fn check(self) -> Result<(), Refusal> {
        let range = |field: &str, is: u64, from: u64| {
            let most = bounds::RATE;
            let [is_, from_, most_] = [is, from, most].map(|n| n as f64 / 1_000.0);
            let text = format!("{is_} is out of range; use {from_} to {most_}");
            if (from..=most).contains(&is) { Ok(()) } else { Err(Refusal::invalid(field, text)) }
        };
        range("per_second", self.per_second, 1)?;
        range("burst", self.burst, 1_000)
    }

    /// What has to be there before anything may start, in thousandths. What a task costs may be more than a bucket ever
    /// holds, so there it is enough that no debt is left.
    fn needs(self) -> u64 {
        match self.unit {
            RateUnit::Tasks => 1_000,
            RateUnit::Cost => 1,
        }
    }

    /// What a start of this cost takes, in thousandths.
    pub(crate) fn takes(self, cost: Cost) -> u64 {
        match self.unit {
            RateUnit::Tasks => 1_000,
            RateUnit::Cost => cost.thousandths().into(),
        }
    }
}

/// A bucket. Its content is in millionths: a thousandth a second is one in a millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    content: i128,
    at: Millis,
}

impl Bucket {
    /// One that was empty then.
    pub(crate) fn empty(at: Millis) -> Bucket {
        Bucket { content: 0, at }
    }

    fn fill(&mut self, rate: Rate, now: Millis) {
        let passed = now.0.saturating_sub(self.at.0);
        let gained = i128::from(rate.per_second) * i128::from(passed);
        self.content = (self.content + gained).min(i128::from(rate.burst) * 1_000);
        self.at = self.at.max(now);
    }

    /// When something may start, if nothing else does before.
    pub(crate) fn ready_at(mut self, rate: Rate, now: Millis) -> Millis {
        self.fill(rate, now);
        let lacks = i128::from(rate.needs()) * 1_000 - self.content;
        let wait = lacks.max(0).div_euclid(i128::from(rate.per_second.max(1)));
        let rest = i128::from(lacks.max(0).rem_euclid(i128::from(rate.per_second.max(1))) > 0);
        now.plus(u64::try_from(wait + rest).unwrap_or(u64::MAX))
    }

    /// How many may start now.
    pub(crate) fn available(mut self, rate: Rate, now: Millis) -> u64 {
        self.fill(rate, now);
        let needs = i128::from(rate.needs()) * 1_000;
        match rate.unit {
            RateUnit::Tasks => u64::try_from(self.content.max(0) / needs).unwrap_or(u64::MAX),
            RateUnit::Cost => u64::from(self.content >= needs),
        }
    }

    /// Something starts. It may take more than there is: the next waits until that is paid.
    pub(crate) fn take(&mut self, rate: Rate, takes: u64, now: Millis) {
        self.fill(rate, now);
        self.content -= i128::from(takes) * 1_000;
    }

    /// Nothing started after all.
    pub(crate) fn give_back(&mut self, takes: u64) {
        self.content += i128::from(takes) * 1_000;
    }

    /// It is as if nothing had ever started.
    pub(crate) fn is_full(mut self, rate: Rate, now: Millis) -> bool {
        self.fill(rate, now);
        self.content >= i128::from(rate.burst) * 1_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 2_000, burst: 3_000, unit: RateUnit::Tasks };

    /// In any stretch of time: no more than the burst and what the rate brings.
    #[test]
    fn no_stretch_of_time_has_more_than_its_rate() {
        let mut bucket = Bucket::empty(Millis(0));
        let mut starts: Vec<u64> = Vec::new();
        let mut now = Millis(0);
        for n in 0..200_u64 {
            now = bucket.ready_at(RATE, now);
            bucket.take(RATE, 1_000, now);
            starts.push(now.0);
            if n % 17 == 0 {
                now = now.plus(n * 13);
            }
        }
        assert_eq!(starts[0], 500, "it begins empty");
        for (n, from) in starts.iter().enumerate() {
            for (m, to) in starts.iter().enumerate().skip(n) {
                let most = 3.0 + (to - from) as f64 / 500.0;
                assert!((m - n + 1) as f64 <= most + 1e-9, "{} starts from {from} to {to}", m - n + 1);
            }
        }
    }

    #[test]
    fn one_that_takes_more_than_the_bucket_leaves_a_debt() {
        let rate = Rate { unit: RateUnit::Cost, ..RATE };
        let mut bucket = Bucket::empty(Millis(0));
        let ready = bucket.ready_at(rate, Millis(1_500));
        assert_eq!(ready, Millis(1_500));
        bucket.take(rate, 10_000, ready);
        assert_eq!(bucket.ready_at(rate, ready), ready.plus(3_501), "7 of debt, at 2 a second");
        bucket.give_back(10_000);
        assert!(bucket.is_full(rate, ready));
    }

    #[test]
    fn rates_out_of_range_are_refused() {
        let refused = |rate: Rate| rate.check().unwrap_err().to_string();
        assert!(
            refused(Rate { per_second: 0, ..RATE }).contains("per_second: 0 is out of range; use 0.001 to")
        );
        assert!(refused(Rate { burst: 500, ..RATE }).contains("burst: 0.5 is out of range; use 1 to"));
        assert_eq!(RATE.check(), Ok(()));
    }
}
