//! The simulator: how we come to trust the core.
//!
//! One seed decides everything: clock, tenants, faults, crashes. Three worlds are played with each seed.
//! [`world`] is chaotic and checks safety: nothing accepted is lost, nothing runs twice at once (measured at
//! the processes of workers), everything drains. [`fair`] is in lock step ([`driver`]) and checks order and fairness exactly; [`time`] does so where keys share time.
//! With [`Options::disk`] the embedded store plays beside the model, crashes with its owner, and must
//! give every answer that the model gives. [`oracle`] looks on and knows nothing of the core; [`canaries`] proves that they would notice: each
//! deliberate bug must be caught. [`scenario`] plays small situations written as text; [`day`] shows a
//! day in the life of four tenants.

pub mod canaries;
pub mod day;
mod disk;
pub mod driver;
pub mod estimates;
pub mod fair;
pub mod model;
pub mod one_way;
pub mod oracle;
pub mod plan;
mod reads;
pub mod rng;
pub mod scenario;
pub mod set_back;
pub mod time;
pub mod world;

use std::fmt;

use evenhand_core::canary::Bug;
use evenhand_store::Flaw;

pub use world::Options;

/// What a world went through without a violation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Events.
    pub steps: u64,
    /// Simulated time.
    pub simulated_ms: u64,
    /// Runs that started.
    pub starts: u64,
    /// The largest difference between two keys that kept waiting, in charges of the larger.
    pub worst_difference: f64,
    /// The largest difference in time received between two that did, as a part of what may be under way.
    pub worst_time: f64,
    /// A digest of every effect, if asked for.
    pub digest: u64,
}

impl Report {
    /// Adds another world's.
    pub fn add(&mut self, other: &Report) {
        self.steps += other.steps;
        self.simulated_ms += other.simulated_ms;
        self.starts += other.starts;
        self.worst_difference = self.worst_difference.max(other.worst_difference);
        self.worst_time = self.worst_time.max(other.worst_time);
    }
}

/// A rule that a world broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which world.
    pub world: &'static str,
    /// Its seed.
    pub seed: u64,
    /// After how many events.
    pub step: u64,
    /// What was seen.
    pub what: String,
}

impl Violation {
    pub(crate) fn new(world: &'static str, seed: u64, step: u64, what: String) -> Violation {
        Violation { world, seed, step, what }
    }

    /// The core stopped with a panic.
    pub fn panicked(seed: u64) -> Violation {
        Violation::new("some", seed, 0, "the core stopped with a panic".into())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, {} world, step {}: {}", self.seed, self.world, self.step, self.what)
    }
}

/// A deliberate mistake of those around the core: servers, worker runtimes, guardians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A guardian lets go of its seat's lock while runs of its process are alive.
    LockNotHeld,
    /// Workers and guardians live by the clock on the wall, which people set.
    WallClock,
}

/// A deliberate bug, in the core, in the store or around them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canary {
    /// In the core.
    Core(Bug),
    /// In the store.
    Store(Flaw),
    /// In what a world does in the place of a server or a worker's runtime.
    World(Mistake),
}

/// Plays all worlds of a seed.
pub fn play(seed: u64, options: Options) -> Result<Report, Violation> {
    let mut report = world::play(seed, options)?;
    report.add(&fair::play(seed, options)?);
    report.add(&time::play(seed, options)?);
    // One in four: what they look for is rare in the others, and they take as long.
    if seed % 4 == 3 && !options.disk {
        report.add(&canaries::play_set_backs(seed, options)?);
    }
    if seed % 8 == 1 && !options.disk {
        report.add(&canaries::play_restarts(seed, options)?);
    }
    if seed % 8 == 5 && !options.disk {
        let mut rng = rng::Rng::new(seed);
        let plan = plan::Plan::of_crowds(&mut rng);
        report.add(&world::play_plan(seed, rng, plan, options)?);
    }
    Ok(report)
}
