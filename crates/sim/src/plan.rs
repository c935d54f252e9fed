//! What a seed decides before a chaotic world begins: who the tenants are, how much memory there is,
//! and how much goes wrong.

use evenhand_core::Bounds;

use crate::rng::Rng;

/// How tasks arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// One after the other.
    Steady,
    /// Many at once, then a pause.
    Bursts,
    /// Keys by Zipf's law.
    Zipf,
    /// One tenant sends almost everything.
    Giant,
    /// Every task has a key of its own.
    OneShot,
    /// Large backlogs, most of which are canceled.
    Canceled,
}

/// A world to be played.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bounds of the core, often tiny.
    pub bounds: Bounds,
    /// How tasks arrive.
    pub arrivals: Arrivals,
    /// Queues.
    pub queues: u64,
    /// Keys that return.
    pub keys: u64,
    /// Priorities in use.
    pub priorities: u64,
    /// Classes in use.
    pub classes: u64,
    /// Workers.
    pub workers: u64,
    /// Slots of a worker, at most.
    pub slots: u64,
    /// How many times clients act.
    pub actions: u64,
    /// The longest delay of a message or a store operation.
    pub delay_ms: u64,
    /// The longest run.
    pub run_ms: u64,
    /// Per thousand: a commit fails, in one of several ways.
    pub commit_fault: u64,
    /// Per thousand: a read fails.
    pub read_fault: u64,
    /// Per thousand of client actions: the owner crashes.
    pub crash: u64,
    /// Per thousand of client actions: another owner takes over while the first goes on.
    pub zombie: u64,
    /// Per thousand of client actions: a worker dies.
    pub worker_death: u64,
    /// Per thousand: a run fails.
    pub run_fault: u64,
    /// Per thousand: a worker refuses a dispatch.
    pub refusal: u64,
}

impl Plan {
    /// The plan of a seed.
    pub fn new(rng: &mut Rng) -> Plan {
        let arrivals = *rng.pick(&[
            Arrivals::Steady,
            Arrivals::Bursts,
            Arrivals::Zipf,
            Arrivals::Giant,
            Arrivals::OneShot,
            Arrivals::Canceled,
        ]);
        // A third of the worlds is calm, so that what goes wrong there is not the weather.
        let rough = if rng.chance(333) { 0 } else { 1 };
        Plan {
            bounds: Bounds {
                window_rows: *rng.pick(&[1, 2, 3, 5, 12, 40, 1000]),
                page_rows: *rng.pick(&[1, 2, 3, 10, 100]),
                payload_bytes: *rng.pick(&[0, 40, 10_000]),
                aside_after_ends: *rng.pick(&[1, 2, 5, 50]),
                aside_after_ms: *rng.pick(&[1, 50, 2_000]),
                tasks_in_flight: *rng.pick(&[5, 50, 10_000]),
                task_reads: *rng.pick(&[2, 1000]),
            },
            arrivals,
            queues: rng.range(1, 3),
            keys: *rng.pick(&[1, 3, 10, 30]),
            priorities: rng.range(1, 3),
            classes: rng.range(1, 2),
            workers: rng.range(1, 4),
            slots: rng.range(1, 4),
            actions: rng.range(20, 150),
            delay_ms: *rng.pick(&[0, 1, 5, 50, 300]),
            run_ms: *rng.pick(&[1, 20, 200, 3_000]),
            commit_fault: rough * *rng.pick(&[0, 5, 50]),
            read_fault: rough * *rng.pick(&[0, 20, 300]),
            crash: rough * *rng.pick(&[0, 10, 60]),
            zombie: rough * *rng.pick(&[0, 10, 60]),
            worker_death: rough * *rng.pick(&[0, 10, 50]),
            run_fault: *rng.pick(&[0, 50, 400]),
            refusal: *rng.pick(&[0, 20, 200]),
        }
    }
}
