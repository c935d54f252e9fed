//! When a worker counts as what. One pure function, used by the owner and by the worker itself, each with
//! its own clock; the owner's thresholds count for both.
//!
//! The worker's side is stricter. It may live until its *lease* is over, counted from the moment it *sent*
//! its last answered heartbeat; the owner counts `lost_after_ms` from the moment it *received* that
//! heartbeat, which is later. With clocks that go wrong by at most [`RATE_ERROR_PERCENT`], and runs that are
//! killed within the margin, whatever the worker ran is dead when the owner gives it up.

use crate::refusal::Refusal;

/// How wrong a clock may go, in percent. Real ones are a hundred times better.
pub const RATE_ERROR_PERCENT: u64 = 1;
/// The part of `lost_after_ms` that is left for killing runs, a tenth, and the least it may be.
const MARGIN_PART: u64 = 10;
const MARGIN_MIN_MS: u64 = 100;

/// How long somebody must wait for what lasts so long by another's clock: his may be fast, the other slow.
pub fn waited_ms(lasts_ms: u64) -> u64 {
    lasts_ms.saturating_mul(100 + RATE_ERROR_PERCENT).div_ceil(100 - RATE_ERROR_PERCENT)
}

/// When a worker counts as what, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// How often a worker says that it is alive.
    pub heartbeat_ms: u64,
    /// After so much silence it gets no more work.
    pub unhealthy_after_ms: u64,
    /// After so much silence it is lost, and its tasks are run again.
    pub lost_after_ms: u64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Thresholds { heartbeat_ms: 1_000, unhealthy_after_ms: 5_000, lost_after_ms: 60_000 }
    }
}

impl Thresholds {
    /// How long a worker may go on after it sent its last answered heartbeat:
    /// `lease * (1 + 2 * rate error) + margin <= lost_after`.
    pub fn lease_ms(&self) -> u64 {
        let margin = (self.lost_after_ms / MARGIN_PART).max(MARGIN_MIN_MS);
        self.lost_after_ms.saturating_sub(margin) * 100 / (100 + 2 * RATE_ERROR_PERCENT)
    }

    /// Whether they make sense together.
    pub fn check(&self) -> Result<(), Refusal> {
        let Thresholds { heartbeat_ms, unhealthy_after_ms, lost_after_ms } = *self;
        let day = 24 * 3600 * 1000;
        if !(10..=60_000).contains(&heartbeat_ms) {
            return Err(Refusal::invalid("heartbeat", "must be between 10ms and 60s"));
        }
        if unhealthy_after_ms < 2 * heartbeat_ms {
            return Err(Refusal::invalid("unhealthy-after", "must be at least two heartbeats"));
        }
        if lost_after_ms < 2 * unhealthy_after_ms || lost_after_ms < 500 || lost_after_ms > day {
            let what = "must be at least twice unhealthy-after, between 500ms and a day";
            return Err(Refusal::invalid("lost-after", what));
        }
        Ok(())
    }
}

/// How one side sees a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// It has not said anything since it joined.
    New,
    /// It is heard and may be given work.
    Healthy,
    /// It has been silent for a while: no new work.
    Unhealthy,
    /// It has been silent for so long that it must be dead, or must die. Final.
    MustDie,
}

impl Health {
    /// What it is after so much silence. It does not go from healthy to dead in one look: whoever has
    /// slept may have been the one who looks.
    pub fn after(self, silent_ms: u64, unhealthy_after_ms: u64, dead_after_ms: u64) -> Health {
        match self {
            Health::MustDie => Health::MustDie,
            Health::Healthy if silent_ms >= unhealthy_after_ms => Health::Unhealthy,
            Health::Healthy => Health::Healthy,
            Health::New | Health::Unhealthy if silent_ms >= dead_after_ms => Health::MustDie,
            Health::New | Health::Unhealthy if silent_ms >= unhealthy_after_ms => Health::Unhealthy,
            Health::New => Health::New,
            Health::Unhealthy => Health::Healthy,
        }
    }

    /// Its name, the same on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Health::New => "new",
            Health::Healthy => "healthy",
            Health::Unhealthy => "unhealthy",
            Health::MustDie => "must_die",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_lost_while_its_lease_runs() {
        for lost_after_ms in [500, 501, 999, 1_000, 3_000, 60_000, 3_600_000] {
            let thresholds = Thresholds { lost_after_ms, ..Thresholds::default() };
            let lease = thresholds.lease_ms() as f64;
            // The worker's clock is slow by 1 %, the owner's fast by 1 %: the worst there is.
            let lives = lease / 0.99;
            let lost = lost_after_ms as f64 / 1.01;
            assert!(lives + 0.05 * lost_after_ms as f64 <= lost, "{lost_after_ms}: {lives} {lost}");
        }
    }

    #[test]
    fn nobody_is_lost_in_an_absence_however_long() {
        for absence_ms in [0, 1, 500, 60_000, 300_000, 24 * 3_600_000] {
            for lost_after_ms in [500, 1_000, 60_000] {
                let thresholds = Thresholds { lost_after_ms, ..Thresholds::default() };
                let lives = (thresholds.lease_ms() + absence_ms) as f64 / 0.99;
                let lost = (lost_after_ms + waited_ms(absence_ms)) as f64 / 1.01;
                assert!(lives + 0.05 * lost_after_ms as f64 <= lost, "{absence_ms}: {lives} {lost}");
            }
        }
    }

    #[test]
    fn healthy_is_never_dead_at_once_and_dead_is_final() {
        assert_eq!(Health::Healthy.after(1_000_000, 5, 60), Health::Unhealthy);
        assert_eq!(Health::Unhealthy.after(60, 5, 60), Health::MustDie);
        assert_eq!(Health::Unhealthy.after(4, 5, 60), Health::Healthy);
        assert_eq!(Health::MustDie.after(0, 5, 60), Health::MustDie);
        assert_eq!(Health::New.after(60, 5, 60), Health::MustDie);
    }

    #[test]
    fn thresholds_that_contradict_each_other_are_refused() {
        let wrong = |change: fn(&mut Thresholds)| {
            let mut thresholds = Thresholds::default();
            change(&mut thresholds);
            thresholds.check().unwrap_err().field
        };
        assert_eq!(Thresholds::default().check(), Ok(()));
        assert_eq!(wrong(|t| t.heartbeat_ms = 0), "heartbeat");
        assert_eq!(wrong(|t| t.unhealthy_after_ms = 1_500), "unhealthy-after");
        assert_eq!(wrong(|t| t.lost_after_ms = 9_000), "lost-after");
    }
}
