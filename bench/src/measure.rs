//! Rounds and medians. A machine is never quiet: each row is measured in several rounds, and the median
//! counts. Things that are compared take turns, round by round, so that noise meets them all, and it is
//! their rounds that are compared. Time in which somebody else had the processor is taken off.

use std::time::{Duration, Instant};

use crate::Failure;
use crate::clock::{Spent, on_cpu};

/// Something that runs cycles.
pub(crate) trait Cycles {
    /// Cycles after which nothing is left of how the backlog was built: every task that stood at first has
    /// ended. Before that, the order in which it was built shows (memory is laid out in order, all keys
    /// begin at the same time), and cycles are cheaper than they ever are again.
    fn turnover(&self) -> u64;

    /// Runs some, and says how many.
    fn batch(&mut self) -> Result<u64, Failure>;

    /// What was spent since the last call.
    fn spent(&mut self) -> Spent;
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Rounds that count. Before them comes a turnover of the backlog, to warm up.
    pub(crate) rounds: u32,
    /// The length of each.
    pub(crate) each: Each,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort { rounds: 5, each: Each::Cycles(300_000) }
    }
}

/// The length of a round.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Each {
    /// So many cycles, or just above.
    Cycles(u64),
    /// So long, or just above.
    Time(Duration),
}

impl Each {
    pub(crate) fn seconds(seconds: f64) -> Each {
        Each::Time(Duration::from_secs_f64(seconds))
    }
}

/// The rounds of one row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds(Vec<Round>);

#[derive(Clone, Copy, Debug)]
struct Round {
    cycles: f64,
    spent: Spent,
    whole: Duration,
}

impl Round {
    fn inside(&self) -> f64 {
        nanos(self.spent.inside) / self.cycles
    }
}

impl Rounds {
    /// Nanoseconds that a cycle takes inside the measured thing.
    pub(crate) fn inside(&self) -> f64 {
        self.median(Round::inside)
    }

    /// Nanoseconds that a cycle takes inside the store.
    pub(crate) fn store(&self) -> f64 {
        self.median(|round| nanos(round.spent.store) / round.cycles)
    }

    /// Nanoseconds that a cycle takes with everything, the benchmark's own work included.
    pub(crate) fn whole(&self) -> f64 {
        self.median(|round| nanos(round.whole) / round.cycles)
    }

    /// Rows read per cycle.
    pub(crate) fn rows_read(&self) -> f64 {
        self.median(|round| round.spent.rows_read as f64 / round.cycles)
    }

    /// Reads per thousand cycles.
    pub(crate) fn reads(&self) -> f64 {
        self.median(|round| 1000.0 * round.spent.reads as f64 / round.cycles)
    }

    /// How far the slowest round is above the fastest, as a part of the fastest.
    pub(crate) fn spread(&self) -> f64 {
        let each = self.0.iter().map(Round::inside);
        let (low, high) = each.fold((f64::MAX, 0.0_f64), |(low, high), ns| (low.min(ns), high.max(ns)));
        high / low - 1.0
    }

    /// How many times the cost of the other's cycle one of these is: the median over rounds.
    pub(crate) fn cost_over(&self, other: &Rounds) -> f64 {
        median(self.0.iter().zip(&other.0).map(|(this, that)| this.inside() / that.inside()).collect())
    }

    fn median(&self, of: impl Fn(&Round) -> f64) -> f64 {
        median(self.0.iter().map(of).collect())
    }
}

/// Cycles per second.
pub(crate) fn rate(nanos_per_cycle: f64) -> f64 {
    1e9 / nanos_per_cycle
}

/// Measures some things in turn: the rounds of each, in the same order.
pub(crate) fn rounds(
    name: &str,
    effort: Effort,
    things: &mut [&mut dyn Cycles],
) -> Result<Vec<Rounds>, Failure> {
    let mut all = vec![Rounds::default(); things.len()];
    for n in 0..=effort.rounds {
        if n == 0 {
            eprintln!("{name}: warming up until every standing task has been replaced");
        } else {
            eprintln!("{name}: round {n} of {}", effort.rounds);
        }
        for (thing, rounds) in things.iter_mut().zip(&mut all) {
            if n == 0 {
                let turnover = Each::Cycles(thing.turnover());
                one(*thing, turnover)?;
            } else {
                rounds.0.push(one(*thing, effort.each)?);
            }
        }
    }
    Ok(all)
}

fn one(thing: &mut dyn Cycles, each: Each) -> Result<Round, Failure> {
    thing.spent();
    let (start, had) = (Instant::now(), on_cpu());
    let mut cycles = 0;
    loop {
        cycles += thing.batch()?;
        let enough = match each {
            Each::Cycles(n) => cycles >= n,
            Each::Time(time) => start.elapsed() >= time,
        };
        if enough {
            break;
        }
    }
    let (whole, has) = (start.elapsed(), on_cpu());
    let mut spent = thing.spent();
    // Being interrupted strikes everything alike, so everything is scaled alike.
    let share = had.zip(has).map_or(1.0, |(had, has)| nanos(has - had) / nanos(whole)).clamp(0.01, 1.0);
    spent.inside = spent.inside.mul_f64(share);
    spent.store = spent.store.mul_f64(share);
    Ok(Round { cycles: cycles as f64, spent, whole: whole.mul_f64(share) })
}

fn nanos(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

/// The one in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 100.0]), 3.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 100.0]), 3.0);
        assert_eq!(median(vec![7.0]), 7.0);
    }

    #[test]
    fn a_round_is_as_long_as_it_should_be() {
        struct Tens;
        impl Cycles for Tens {
            fn turnover(&self) -> u64 {
                50
            }
            fn batch(&mut self) -> Result<u64, Failure> {
                Ok(10)
            }
            fn spent(&mut self) -> Spent {
                Spent { inside: Duration::from_nanos(100), ..Spent::default() }
            }
        }
        let effort = Effort { rounds: 3, each: Each::Cycles(25) };
        let all = rounds("test", effort, &mut [&mut Tens, &mut Tens]).unwrap();
        assert_eq!((all.len(), all[0].0.len(), all[0].0[0].cycles), (2, 3, 30.0));
    }
}
