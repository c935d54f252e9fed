//! Where the time of a round goes. Whoever runs cycles adds the time it spends inside the measured thing
//! here; the rest of a round is the benchmark's own (making tasks, throwing effects away).
//!
//! Cycles per second on one core means on a core that does nothing else. Where others use the machine,
//! [`on_cpu`] says how much of a round this thread really had a processor for.

use std::time::{Duration, Instant};

/// Time spent, and reads done, since somebody last looked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    /// Inside the measured thing.
    pub(crate) inside: Duration,
    /// Inside the store behind it.
    pub(crate) store: Duration,
    /// Reads of a lane.
    pub(crate) reads: u64,
    /// Rows that they returned.
    pub(crate) rows_read: u64,
}

/// Runs something and adds the time it took.
pub(crate) fn timed<T>(sum: &mut Duration, what: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = what();
    *sum += start.elapsed();
    value
}

/// For how long this thread has had a processor, where the system tells (Linux does).
pub(crate) fn on_cpu() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}
