//! The server's clock: milliseconds since 1970 when it was made, and from then on a clock that never jumps and
//! counts the time that the machine is suspended. So the times that are stored mean something to people, and
//! nobody's lease depends on somebody setting the wall clock.
//!
//! It may be moved up when a shard is taken: what is stored says that it was later than the wall clock says now, so
//! that one was set back, and what was due must not become undue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evenhand_core::names::Millis;
use rustix::time::{ClockId, clock_gettime};

/// See the module's text. Clones are the same clock.
#[derive(Clone, Debug)]
pub struct Clock {
    /// Wall time minus time since boot.
    offset_ms: Arc<AtomicU64>,
}

impl Clock {
    /// A clock that is right now.
    pub fn new() -> Clock {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let offset_ms = (wall.as_millis() as u64).saturating_sub(since_boot());
        Clock { offset_ms: Arc::new(AtomicU64::new(offset_ms)) }
    }

    /// What time it is.
    pub fn now(&self) -> Millis {
        Millis(self.offset_ms.load(Ordering::Relaxed).saturating_add(since_boot()))
    }

    /// It is at least this late. By how many milliseconds the clock had to be moved up for that.
    pub fn not_before(&self, time: Millis) -> u64 {
        let since_boot = since_boot();
        let least = time.0.saturating_sub(since_boot);
        let before = self.offset_ms.fetch_max(least, Ordering::Relaxed);
        least.saturating_sub(before)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Clock::new()
    }
}

/// Milliseconds since the machine was started, suspended time included.
fn since_boot() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_moved_up_and_never_back() {
        let clock = Clock::new();
        let (same, began) = (clock.clone(), clock.now());
        assert_eq!(clock.not_before(Millis(began.0 - 5)), 0);
        assert_eq!(clock.not_before(Millis(0)), 0);
        let moved = clock.not_before(Millis(began.0 + 60_000));
        assert!((59_000..=60_000).contains(&moved), "{moved}");
        assert!(same.now().0 >= began.0 + 60_000);
    }
}
