//! Whatever waits for a time: delays and backoffs, expiries, the end of an end's retention. (What runs, and what
//! a worker is given to stop it, lives in memory and is rebuilt from reports.)
//!
//! Timers are kept like a lane whose places are times. Time is cut into segments of 100 ms, and a timer's level
//! is its segment, what it is for, and a seq. The [`Window`] that holds the part of a lane that memory knows holds
//! the first timers too, with the same rules about reads, writes and bounds; its ack level is the cursor behind
//! which every segment is empty, and dropped whole. So a timer costs one row, a wake-up serves all that are due
//! in a segment, and what is far away costs no memory.

use std::collections::VecDeque;

use crate::backlog::{Level, Window};
use crate::bounds::Bounds;
use crate::canary::{Bug, Canary};
use crate::change::{Timed, TimerRow, TimersRecord};
use crate::names::{CommitId, Millis, TaskId};

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
    pub(crate) window: Window<(TaskId, Timed)>,
    /// Per commit that is not durable yet, the lowest level that it writes: the cursor stays below.
    pins: VecDeque<(CommitId, Level)>,
    pub(crate) read_retry: Option<Millis>,
    pub(crate) read_failures: u32,
    /// How many the open batch has handled.
    pub(crate) handled: usize,
    canary: Canary,
}

impl Timers {
    pub(crate) fn restore(record: &TimersRecord, bounds: &Bounds, canary: Canary) -> Timers {
        // Nothing is above A if nothing ever was.
        let max = if canary.is(Bug::RetryLost) { record.ack } else { record.max };
        Timers {
            window: Window::restore(record.ack, max, bounds.window_rows, canary),
            pins: VecDeque::new(),
            read_retry: None,
            read_failures: 0,
            handled: 0,
            canary,
        }
    }

    pub(crate) fn record(&self) -> TimersRecord {
        TimersRecord { ack: self.window.ack(), max: self.window.max() }
    }

    /// The level of a new timer: never at or below the cursor, whatever the time is said to be.
    pub(crate) fn level(&self, due: Millis, what: &Timed, seq: u64) -> Level {
        let level = moment(due, what, seq);
        if level > self.window.ack() {
            level
        } else {
            moment(due_at(self.window.ack()).plus(SEGMENT_MS), what, seq)
        }
    }

    /// A timer was given this level, and `commit` will write it.
    pub(crate) fn chosen(&mut self, level: Level, commit: CommitId) {
        self.window.chosen(level);
        match self.pins.back_mut() {
            Some((last, lowest)) if *last == commit => *lowest = (*lowest).min(level),
            _ => self.pins.push_back((commit, level)),
        }
    }

    /// The lowest level that is chosen but not merged yet.
    pub(crate) fn pin(&self) -> Option<Level> {
        self.pins.iter().map(|&(_, level)| level).min()
    }

    /// All timers up to this commit are durable and merged.
    pub(crate) fn unpin(&mut self, commit: CommitId) {
        while self.pins.front().is_some_and(|&(c, _)| c <= commit) {
            self.pins.pop_front();
        }
        self.advance();
    }

    /// A timer is over, or not needed any more.
    pub(crate) fn leave(&mut self, level: Level) {
        self.window.leave(level);
        self.advance();
    }

    fn advance(&mut self) {
        let pin = if self.canary.is(Bug::SegmentDropped) { None } else { self.pin() };
        self.window.advance(pin);
    }

    /// When the first timer that memory knows is due. Later ones may be unknown, earlier ones are not.
    pub(crate) fn next_due(&self) -> Option<Millis> {
        self.window.waiting().first_key_value().map(|(&level, _)| due_at(level))
    }

    /// Takes the first timer, if it is due. It stays in the books until it [leaves](Timers::leave).
    pub(crate) fn take_due(&mut self, now: Millis) -> Option<(Level, TaskId, Timed)> {
        if self.next_due()? > now {
            return None;
        }
        let (level, (task, what)) = self.window.start_first(|(task, _)| *task, 0)?;
        Some((level, task, what))
    }

    /// A page of timers arrived. An error says how it contradicts what is known.
    pub(crate) fn read_returned(
        &mut self,
        rows: Vec<TimerRow>,
        end: bool,
        durable_seq: u64,
    ) -> Result<(), String> {
        if rows.is_empty() && !end {
            return Err("timers: a read returned nothing, and not the end".into());
        }
        let mut last = self.window.read();
        for row in &rows {
            if row.at <= last {
                return Err(format!("timers: {} was read out of order", row.at));
            }
            last = row.at;
        }
        let rows = rows.into_iter().map(|row| (row.at, (row.task, row.what))).collect();
        self.window.read_returned(rows, last, end, durable_seq);
        self.read_failures = 0;
        self.advance();
        Ok(())
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
        let record = TimersRecord {
            ack: moment(Millis(5_000), &Timed::Forget { tries: 0 }, 9),
            max: moment(Millis(5_000), &Timed::Forget { tries: 0 }, 9),
        };
        let timers = Timers::restore(&record, &Bounds::default(), Canary::default());
        let level = timers.level(Millis(0), &Timed::Expire, 10);
        assert!(level > record.ack);
        assert_eq!(due_at(level), Millis(5_100));
    }
}
