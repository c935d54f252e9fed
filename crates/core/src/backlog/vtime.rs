//! The arithmetic of fairness: virtual time, weights and costs, all integers.
//!
//! Virtual time counts `cost / weight` as a fixed-point number with 64 fraction bits. Dividing rounds
//! down by less than 2^-64 each time, and a shard can number 2^48 tasks in its life, so all roundings of
//! a key together stay below 2^-16 of one plain charge: no weight rounds to another and nothing drifts.
//! A level shows only the upper bits of a time (its [`Pass`]); the rest is carried on in F.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

use crate::refusal::Refusal;

/// Fraction bits of a [`VTime`].
const FRACTION: u32 = 64;
/// Fraction bits that a level shows: the smallest charge (0.001 / 1000) is just above one tick.
const PASS_FRACTION: u32 = 20;

/// A moment in a lane's virtual time, or a span of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct VTime(u128);

impl VTime {
    /// The beginning.
    pub const ZERO: VTime = VTime(0);
    /// The smallest difference that a level shows.
    pub const TICK: VTime = VTime(1 << (FRACTION - PASS_FRACTION));
    /// Past this a lane takes no more tasks. A lane that serves 100,000 tasks a second, all at the
    /// lowest weight, reaches it after 180 years; one whose callers say of empty tasks that they take 11 days, after half
    /// a billion of them. Levels have room for twice as much, for retries.
    pub const LAST: VTime = VTime(1 << (59 + FRACTION));

    /// What one task of this cost is charged at this weight.
    pub fn charge(cost: Cost, weight: Weight) -> VTime {
        VTime::share(cost, u64::from(weight.0))
    }

    /// `cost` divided by a sum of weights in thousandths.
    pub(crate) fn share(cost: Cost, weights: u64) -> VTime {
        debug_assert!(weights > 0);
        VTime((u128::from(cost.0) << FRACTION) / u128::from(weights.max(1)))
    }

    /// The part of it that a level shows, rounded to the nearest tick: three charges of a third and one
    /// whole charge then show the same pass, and the seq decides.
    pub fn pass(self) -> Pass {
        Pass(self.0.saturating_add(VTime::TICK.0 / 2) >> (FRACTION - PASS_FRACTION))
    }

    /// For stores: the number as it is saved.
    pub fn to_bits(self) -> u128 {
        self.0
    }

    /// For stores: the number as it was saved.
    pub fn from_bits(bits: u128) -> VTime {
        VTime(bits)
    }

    /// For people and reports; loses precision.
    pub fn to_f64(self) -> f64 {
        self.0 as f64 / (1u128 << FRACTION) as f64
    }
}

impl Add for VTime {
    type Output = VTime;
    fn add(self, other: VTime) -> VTime {
        VTime(self.0.saturating_add(other.0))
    }
}

impl AddAssign for VTime {
    fn add_assign(&mut self, other: VTime) {
        *self = *self + other;
    }
}

impl Sub for VTime {
    type Output = VTime;
    fn sub(self, other: VTime) -> VTime {
        VTime(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for VTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.to_f64())
    }
}

/// The upper part of a virtual time, as it stands in a level. At most 80 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pass(pub(super) u128);

impl Pass {
    /// The time that this pass stands for.
    pub fn time(self) -> VTime {
        VTime(self.0 << (FRACTION - PASS_FRACTION))
    }
}

/// A key's share, in thousandths: 1 to 1,000,000 for 0.001 to 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weight(u32);

impl Weight {
    /// The weight of a task that does not say.
    pub const ONE: Weight = Weight(1_000);
    /// The smallest weight, 0.001.
    pub const MIN: Weight = Weight(1);
    /// The largest weight, 1000.
    pub const MAX: Weight = Weight(1_000_000);

    /// Checks a weight that a user chose: 0.001 to 1000 with at most three decimals.
    pub fn new(weight: f64) -> Result<Weight, Refusal> {
        let wrong = |why: &str| {
            Refusal::invalid(
                "weight",
                format!("{weight:?} {why}; use 0.001 to 1000 with at most three decimals"),
            )
        };
        if weight.is_nan() {
            return Err(wrong("is not a number"));
        }
        if !(0.001..=1000.0).contains(&weight) {
            return Err(wrong("is out of range"));
        }
        let thousandths = (weight * 1000.0).round();
        if thousandths / 1000.0 != weight {
            return Err(wrong("has more than three decimals"));
        }
        Ok(Weight(thousandths as u32))
    }

    /// For stores: a weight from the thousandths it was saved as.
    pub fn from_thousandths(thousandths: u32) -> Option<Weight> {
        (Weight::MIN.0..=Weight::MAX.0).contains(&thousandths).then_some(Weight(thousandths))
    }

    /// The weight in thousandths.
    pub fn thousandths(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1000.0)
    }
}

/// What one task takes of its key's share, in thousandths of a task (share by tasks) or of a second
/// (share by time).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(u32);

impl Cost {
    /// One task, or one second.
    pub const ONE: Cost = Cost(1_000);
    /// The largest cost: a million seconds, 11 days. It bounds how far one task can move a lane's time.
    pub const MAX: Cost = Cost(1_000_000_000);

    /// Checks a cost in thousandths.
    pub fn new(thousandths: u32) -> Result<Cost, Refusal> {
        if (1..=Cost::MAX.0).contains(&thousandths) {
            Ok(Cost(thousandths))
        } else {
            Err(Refusal::invalid(
                "cost",
                format!("{} is out of range; use 0.001 to 1000000", f64::from(thousandths) / 1000.0),
            ))
        }
    }

    /// The cost in thousandths.
    pub fn thousandths(self) -> u32 {
        self.0
    }

    /// What so many milliseconds cost, where time is shared.
    pub fn of_ms(ms: u64) -> Cost {
        Cost(ms.clamp(1, u64::from(Cost::MAX.0)) as u32)
    }
}

/// How long runs take, on average over about the last eight: each new one counts an eighth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Average {
    /// In eighths of a thousandth; 0 before the first.
    eighths: u64,
}

impl Average {
    /// One more run took so long.
    pub(crate) fn learn(&mut self, took: Cost) {
        let took = u64::from(took.0);
        self.eighths = if self.eighths == 0 { 8 * took } else { self.eighths - self.eighths / 8 + took };
    }

    /// What is to be expected of the next one, if there was any.
    pub fn cost(self) -> Option<Cost> {
        (self.eighths > 0).then(|| Cost::of_ms(self.eighths.div_ceil(8)))
    }

    /// For stores: the number as it is saved, 0 if there is none.
    pub fn to_bits(self) -> u64 {
        self.eighths
    }

    /// For stores: the number as it was saved.
    pub fn from_bits(eighths: u64) -> Average {
        Average { eighths: eighths.min(8 * u64::from(Cost::MAX.0)) }
    }
}
