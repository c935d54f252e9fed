//! Clocks. The world's agenda is in true time, in microseconds; every process reads a clock of its own,
//! which began at some other moment and goes wrong by up to a hundredth. What a process hears of time, and
//! what it asks for, is converted here and nowhere else.

use evenhand_core::names::Millis;
use evenhand_core::owner::health::RATE_ERROR_PERCENT;

use crate::plan::Drift;
use crate::rng::Rng;

/// True time, in microseconds since the world began.
pub(super) type Micros = u64;

/// So many milliseconds of true time.
pub(super) const fn ms(ms: u64) -> Micros {
    ms * 1_000
}

/// Microseconds that a clock counts in a true second, and by how many it may be wrong.
const RIGHT: u64 = 1_000_000;
const WRONG: u64 = RIGHT * RATE_ERROR_PERCENT / 100;

/// The clock of a machine or a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// What it showed when the world began, in microseconds.
    offset: u64,
    /// Microseconds that it counts in a true second.
    rate: u64,
}

impl Clock {
    /// The clock of a machine with workers.
    pub(super) fn of_worker(rng: &mut Rng, drift: Drift) -> Clock {
        Clock::new(rng, drift, RIGHT - WRONG)
    }

    /// The clock of a server.
    pub(super) fn of_server(rng: &mut Rng, drift: Drift) -> Clock {
        Clock::new(rng, drift, RIGHT + WRONG)
    }

    fn new(rng: &mut Rng, drift: Drift, worst: u64) -> Clock {
        let (slow, fast) = (RIGHT - WRONG, RIGHT + WRONG);
        let between = rng.range(slow, fast);
        let rate = match drift {
            Drift::None => RIGHT,
            Drift::Any => *rng.pick(&[slow, fast, between]),
            Drift::Worst => worst,
        };
        Clock { offset: ms(1_000_000 + rng.below(5_000)), rate }
    }

    /// The same clock, set forward to show this now, or more.
    pub(super) fn at_least(self, now: Micros, least: Millis) -> Clock {
        let behind = ms(least.0).saturating_sub(ms(self.read(now).0));
        Clock { offset: self.offset + behind, ..self }
    }

    /// The same clock, set back.
    pub(super) fn set_back(self, by: Micros) -> Clock {
        Clock { offset: self.offset.saturating_sub(by), ..self }
    }

    /// What it shows.
    pub(super) fn read(self, now: Micros) -> Millis {
        let counted = u128::from(now) * u128::from(self.rate) / u128::from(RIGHT);
        Millis((self.offset + counted as u64) / 1_000)
    }

    /// The first true moment at which it shows this, or more.
    pub(super) fn when(self, shown: Millis) -> Micros {
        let counted = u128::from(ms(shown.0).saturating_sub(self.offset));
        (counted * u128::from(RIGHT)).div_ceil(u128::from(self.rate)) as Micros
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_is_never_early_and_never_a_millisecond_late() {
        let mut rng = Rng::new(1);
        for _ in 0..1_000 {
            let clock = Clock::of_worker(&mut rng, Drift::Any);
            let shown = Millis(clock.read(0).0 + 1 + rng.below(1_000_000));
            let when = clock.when(shown);
            assert_eq!(clock.read(when), shown, "{clock:?}");
            assert!(clock.read(when - 1) < shown, "{clock:?}");
        }
    }
}
