//! Whatever waits for a time: delays and backoffs, expiries, the end of an end's retention. (What runs, and what
//! a worker is given to stop it, lives in memory and is rebuilt from reports.)
//!
//! Timers are kept like a lane whose places are times. Time is cut into segments of 100 ms, and a timer's level
//! is its segment, what it is for, and a seq. The [window](crate::backlog) that holds the part of a lane that memory knows holds
//! the first timers too, with the same rules about reads, writes and bounds; its ack level is the cursor behind
//! which every segment is empty, and dropped whole. So a timer costs one row, a wake-up serves all that are due
//! in a segment, and what is far away costs no memory.

use crate::backlog::{Level, Shelf};
use crate::bounds::Bounds;
use crate::canary::{Bug, Canary};
use crate::change::{ShelfRecord, Timed};
use crate::names::{Millis, TaskId};

/// The length of a segment in milliseconds.
pub const SEGMENT_MS: u64 = 100;

/// Most that can be due at once is told apart by kind, in this order.
const KINDS: u64 = 4;

/// The level of a timer: due at this time or, rounded up to the end of its segment, a moment later; never earlier.
pub fn moment(due: Millis, what: &Timed, seq: u64) -> Level {
    let kind = match what {
        Timed::Due(..) => 0,
        Timed::Expire => 1,
        Timed::Detach => 2,
        Timed::Forget { .. } => 3,
    };
    Level::numbered(due.0.div_ceil(SEGMENT_MS).saturating_mul(KINDS).saturating_add(kind), seq)
}

/// When a timer of this level is due.
pub fn due_at(level: Level) -> Millis {
    Millis((level.number() / KINDS).saturating_mul(SEGMENT_MS))
}

/// The timers in memory.
#[derive(Clone, Debug)]
pub(crate) struct Timers {
    pub(crate) shelf: Shelf<(TaskId, Timed)>,
    /// How many the open batch has handled.
    pub(crate) handled: usize,
}

impl Timers {
    pub(crate) fn restore(record: &ShelfRecord, bounds: &Bounds, canary: Canary) -> Timers {
        // Nothing is above A if nothing ever was.
        let max = if canary.is(Bug::RetryLost) { record.ack } else { record.max };
        let record = ShelfRecord { max, ..*record };
        Timers { shelf: Shelf::restore(&record, bounds.window_rows, canary), handled: 0 }
    }

    /// The level of a new timer: never at or below the cursor, whatever the time is said to be.
    pub(crate) fn level(&self, due: Millis, what: &Timed, seq: u64) -> Level {
        let level = moment(due, what, seq);
        if level > self.shelf.window.ack() {
            level
        } else {
            moment(due_at(self.shelf.window.ack()).plus(SEGMENT_MS), what, seq)
        }
    }

    /// It is so late. A timer that is not needed any more may be far away; what is set later may be due before it, so
    /// the cursor stays behind the time.
    pub(crate) fn at(&mut self, now: Millis) {
        let next = (now.0 / SEGMENT_MS).saturating_add(1).saturating_mul(KINDS);
        self.shelf.open_from = Some(Level::numbered(next, 0));
    }

    /// When the first timer that memory knows is due. Later ones may be unknown, earlier ones are not.
    pub(crate) fn next_due(&self) -> Option<Millis> {
        self.shelf.window.waiting().first_key_value().map(|(&level, _)| due_at(level))
    }

    /// Takes the first timer, if it is due. It stays in the books until it [leaves](Shelf::leave).
    pub(crate) fn take_due(&mut self, now: Millis) -> Option<(Level, TaskId, Timed)> {
        if self.next_due()? > now {
            return None;
        }
        let (level, (task, what)) = self.shelf.window.start_first(|(task, _)| *task, 0)?;
        Some((level, task, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_never_early_and_at_most_a_segment_late() {
        for due in [0, 1, 99, 100, 101, 12_345, u64::MAX / 2] {
            let at = due_at(moment(Millis(due), &Timed::Expire, 7)).0;
            assert!(at >= due && at < due + SEGMENT_MS, "{due} {at}");
        }
        assert!(moment(Millis(u64::MAX), &Timed::Expire, 7) > moment(Millis(1 << 50), &Timed::Expire, 8));
    }

    #[test]
    fn a_timer_in_the_past_is_put_above_the_cursor() {
        let record = ShelfRecord {
            ack: moment(Millis(5_000), &Timed::Forget { tries: 0 }, 9),
            max: moment(Millis(5_000), &Timed::Forget { tries: 0 }, 9),
        };
        let timers = Timers::restore(&record, &Bounds::default(), Canary::default());
        let level = timers.level(Millis(0), &Timed::Expire, 10);
        assert!(level > record.ack);
        assert_eq!(due_at(level), Millis(5_100));
    }
}
