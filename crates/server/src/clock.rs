//! The server's clock: milliseconds since 1970 when it was made, and from then on a clock that never jumps and
//! counts the time that the machine is suspended. So the times that are stored mean something to people, and
//! nobody's lease depends on somebody setting the wall clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evenhand_core::names::Millis;
use rustix::time::{ClockId, clock_gettime};

/// See the module's text. Copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Wall time minus time since boot.
    offset_ms: u64,
}

impl Clock {
    /// A clock that is right now.
    pub fn new() -> Clock {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Clock { offset_ms: (wall.as_millis() as u64).saturating_sub(since_boot()) }
    }

    /// What time it is.
    pub fn now(&self) -> Millis {
        Millis(self.offset_ms + since_boot())
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
