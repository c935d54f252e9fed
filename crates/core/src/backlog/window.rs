//! The window: the part of a lane that memory knows.
//!
//! ```text
//!   settled ──► A ──── known: waiting and running rows ────► R ──── only the store knows ────► M
//! ```
//! Everything at or below A is settled. `(A, R]` is known completely. If the window reaches the *end*,
//! nothing waits above R. All levels are inclusive. A only rises; R may fall when rows are dropped.
//!
//! The rules below were all bugs in somebody's system:
//! - a row written at or below R joins at once; above R only if the end is known, since what lies
//!   between is not;
//! - while a read is pending, rows written above its start are held and join after it, and rows that
//!   leave meanwhile count as gone when it returns;
//! - over the bound the highest waiting rows are dropped, R falls below the lowest of them, and the end
//!   is no longer known; running rows never count and are never forgotten; nothing is dropped while a
//!   read is pending (a read that takes so long that this matters is given up instead);
//! - A stays below every row that is known, being written, or dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::keys::KeyIx;
use super::level::Level;
use super::places::Charge;
use crate::canary::{Bug, Canary};
use crate::change::Row;
use crate::life::Terms;
use crate::names::{LoadId, Millis, TaskId};

/// A waiting row in memory.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) task: TaskId,
    pub(crate) key: KeyIx,
    pub(crate) charge: Charge,
    pub(crate) attempt: u16,
    pub(crate) max_attempts: u16,
    pub(crate) lost: u8,
    pub(crate) terms: Option<Arc<Terms>>,
}

impl Entry {
    /// How long a run of its task may take, in milliseconds; 0 if it did not say.
    pub(crate) fn max_duration_ms(&self) -> u64 {
        self.terms.as_ref().map_or(0, |terms| terms.max_duration_ms)
    }

    /// It is too late to start it then.
    pub(crate) fn expires_by(&self, now: Millis) -> bool {
        self.terms.as_ref().and_then(|terms| terms.expires).is_some_and(|expires| expires <= now)
    }

    /// A row, whose key stands here.
    pub(crate) fn of(row: &Row, key: KeyIx) -> Entry {
        let Row { task, charge, attempt, max_attempts, lost, .. } = *row;
        Entry { task, key, charge, attempt, max_attempts, lost, terms: row.terms.clone() }
    }
}

/// A running row in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    pub(crate) task: TaskId,
    /// How many had ended in this lane when it started.
    pub(crate) ends_before: u64,
}

/// A read that is under way.
#[derive(Clone, Debug)]
struct Reading<E> {
    load: LoadId,
    /// It reads above this level: R when it was asked for.
    start: Level,
    /// Rows above the start that left the lane since.
    gone: BTreeSet<Level>,
    /// Rows written above the start since.
    held: BTreeMap<Level, E>,
    /// The lowest held row that had to be dropped: the read counts only up to below it.
    cut: Option<Level>,
}

/// What memory knows of a lane.
#[derive(Clone, Debug)]
pub(crate) struct Window<E = Entry> {
    ack: Level,
    read: Level,
    max: Level,
    end: bool,
    waiting: BTreeMap<Level, E>,
    running: BTreeMap<Level, Running>,
    /// The highest level that ever settled: A never needs to pass it.
    settled: Level,
    reading: Option<Reading<E>>,
    bound: usize,
    canary: Canary,
}

impl<E> Window<E> {
    /// The window of a lane as it was saved. M is written in the same commit as the rows, so a lane
    /// whose M is not above A is known to be empty without a read.
    pub(crate) fn restore(ack: Level, max: Level, bound: usize, canary: Canary) -> Window<E> {
        Window {
            ack,
            read: ack,
            max,
            end: max <= ack,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            settled: ack,
            reading: None,
            bound: bound.max(1),
            canary,
        }
    }

    pub(crate) fn ack(&self) -> Level {
        self.ack
    }

    pub(crate) fn read(&self) -> Level {
        self.read
    }

    pub(crate) fn max(&self) -> Level {
        self.max
    }

    pub(crate) fn waiting(&self) -> &BTreeMap<Level, E> {
        &self.waiting
    }

    pub(crate) fn running(&self) -> &BTreeMap<Level, Running> {
        &self.running
    }

    pub(crate) fn held(&self) -> usize {
        self.reading.as_ref().map_or(0, |r| r.held.len())
    }

    pub(crate) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Nothing waits here that could be started now, but the store may hold more.
    pub(crate) fn is_unread(&self) -> bool {
        self.waiting.is_empty() && !self.end
    }

    /// A level was chosen and will be written.
    pub(crate) fn chosen(&mut self, level: Level) {
        self.max = self.max.max(level);
    }

    /// A durable row joins the window, waits for the pending read, or is left to a later one.
    pub(crate) fn merge(&mut self, level: Level, entry: E) {
        if let Some(reading) = &mut self.reading
            && level > reading.start
        {
            if !self.canary.is(Bug::HeldWriteLost) {
                reading.held.insert(level, entry);
            }
            if reading.held.len() > self.bound
                && let Some((dropped, _)) = reading.held.pop_last()
            {
                reading.cut = Some(reading.cut.map_or(dropped, |cut| cut.min(dropped)));
            }
            return;
        }
        if level > self.read {
            if !self.end && !self.canary.is(Bug::MergeWithoutEnd) {
                return;
            }
            self.read = level;
        }
        self.waiting.insert(level, entry);
        self.shrink();
    }

    /// The lowest waiting row starts to run.
    pub(crate) fn start_first(
        &mut self,
        task: impl FnOnce(&E) -> TaskId,
        ends_before: u64,
    ) -> Option<(Level, E)> {
        let (level, entry) = self.waiting.pop_first()?;
        self.running.insert(level, Running { task: task(&entry), ends_before });
        Some((level, entry))
    }

    /// A row that was running waits again.
    pub(crate) fn give_back(&mut self, level: Level, entry: E) {
        self.running.remove(&level);
        self.merge(level, entry);
    }

    /// After a restart: a worker runs this row.
    pub(crate) fn adopt(&mut self, level: Level, running: Running) {
        self.running.insert(level, running);
        self.waiting.remove(&level);
    }

    /// A row left the lane: it ended, moved, or was set aside. It may never have been in the window.
    pub(crate) fn leave(&mut self, level: Level) -> Option<E> {
        // A row runs or waits, never both; most rows that leave were running.
        let ran = self.running.remove(&level).is_some();
        let mut entry = if ran { None } else { self.waiting.remove(&level) };
        if let Some(reading) = &mut self.reading
            && level > reading.start
        {
            entry = entry.or(reading.held.remove(&level));
            reading.gone.insert(level);
            if reading.gone.len() > 2 * self.bound {
                self.reading = None; // so much has gone that another read is better
            }
        }
        self.settled = self.settled.max(level);
        entry
    }

    /// Raises A as far as it may go: below every row that waits, runs or is being written (`pin`), not
    /// beyond R, and not beyond what has settled.
    pub(crate) fn advance(&mut self, pin: Option<Level>) {
        let pin = if self.canary.is(Bug::AckNotPinned) { None } else { pin };
        let lowest = [
            self.waiting.first_key_value().map(|(&level, _)| level),
            self.running.first_key_value().map(|(&level, _)| level),
            pin,
        ]
        .into_iter()
        .flatten()
        .min();
        if self.end && lowest.is_none() {
            // The lane is empty: all that was ever written is settled, whoever settled it.
            self.settled = self.settled.max(self.max);
            self.read = self.read.max(self.max);
        }
        let mut ack = self.settled.min(self.read);
        if let Some(lowest) = lowest {
            ack = ack.min(lowest.before());
        }
        self.ack = self.ack.max(ack);
    }

    /// The lowest row that holds A back, if it is one that runs.
    pub(crate) fn stuck_behind(&self) -> Option<(Level, Running)> {
        let (&level, &running) = self.running.first_key_value()?;
        let blocked = self.waiting.first_key_value().is_some_and(|(&waiting, _)| waiting < level);
        (!blocked && level < self.settled).then_some((level, running))
    }

    /// Whether a read is needed, and from where and how much.
    pub(crate) fn wants_read(&self, page: usize) -> Option<(Level, usize)> {
        let wanted = !self.end && self.reading.is_none() && self.waiting.len() <= self.bound / 2;
        wanted.then(|| (self.read, page.min(self.bound - self.waiting.len()).max(1)))
    }

    pub(crate) fn read_asked(&mut self, load: LoadId) {
        self.reading =
            Some(Reading { load, start: self.read, gone: BTreeSet::new(), held: BTreeMap::new(), cut: None });
    }

    /// Whether this read is the one we wait for. One that was given up is not.
    pub(crate) fn awaits(&self, load: LoadId) -> bool {
        self.reading.as_ref().is_some_and(|r| r.load == load)
    }

    /// How many of these rows the counts may not cover: known already, gone, or not durable to our knowledge.
    pub(crate) fn doubtful(&self, rows: &[Row], durable_seq: u64) -> u64 {
        let known = |level: &Level| self.waiting.contains_key(level) || self.running.contains_key(level);
        let doubtful =
            |row: &&Row| known(&row.level) || self.knows_gone(row.level) || row.level.seq() > durable_seq;
        rows.iter().filter(doubtful).count() as u64
    }

    /// Whether this row left the lane since the pending read was asked for.
    pub(crate) fn knows_gone(&self, level: Level) -> bool {
        self.reading.as_ref().is_some_and(|r| r.gone.contains(&level))
    }

    /// A read failed: nothing more is known than before.
    pub(crate) fn read_failed(&mut self) {
        self.reading = None;
    }

    /// A read returned rows above its start, in order, up to `last`. `durable_seq` is the highest seq known to be
    /// durable: rows above it are seen before their commit is acknowledged, and join when it is.
    pub(crate) fn read_returned(&mut self, rows: Vec<(Level, E)>, last: Level, end: bool, durable_seq: u64) {
        let Some(reading) = self.reading.take() else { return };
        self.read = self.read.max(last);
        if end {
            self.end = true;
            self.read = self.read.max(self.max);
        }
        for (level, entry) in rows {
            let gone = reading.gone.contains(&level) && !self.canary.is(Bug::PageOverwrites);
            let unknown = level > self.ack
                && level.seq() <= durable_seq
                && !gone
                && !self.running.contains_key(&level)
                && !self.waiting.contains_key(&level);
            if unknown {
                self.waiting.insert(level, entry);
            }
        }
        for (level, entry) in reading.held {
            if (level <= self.read || self.end) && !self.running.contains_key(&level) {
                self.read = self.read.max(level);
                self.waiting.insert(level, entry);
            }
        }
        if let Some(cut) = reading.cut {
            self.drop_from(cut);
        }
        self.shrink();
    }

    /// Forgets waiting rows from `level` on; a later read finds them.
    fn drop_from(&mut self, level: Level) {
        self.waiting.split_off(&level);
        if !self.canary.is(Bug::ReadAboveDropped) {
            self.read = self.read.min(level.before());
        }
        self.end = false;
    }

    /// Keeps the window within its bound.
    fn shrink(&mut self) {
        if self.reading.is_some() {
            if self.waiting.len() <= 2 * self.bound {
                return;
            }
            // The read takes so long that what was written below its start alone is too much. Give it
            // up; rows held for it are found by the next one.
            self.reading = None;
        }
        while self.waiting.len() > self.bound {
            if let Some((&highest, _)) = self.waiting.last_key_value() {
                self.drop_from(highest);
                if self.canary.is(Bug::RunningForgotten) {
                    self.running.split_off(&highest);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
