//! A shelf: rows in an order of their own, beside the lanes. Timers stand on one, by time; the rows of a key that
//! may not run stand on another, in the order in which they were put there. Memory holds a window of it, as of a
//! lane, and the store all of it.

use super::level::Level;
use super::pins::Pins;
use super::window::Window;
use crate::canary::{Bug, Canary};
use crate::change::ShelfRecord;
use crate::names::{CommitId, Millis};

/// One shelf in memory.
#[derive(Clone, Debug)]
pub(crate) struct Shelf<E> {
    pub(crate) window: Window<E>,
    /// Per commit that is not durable yet, the lowest level that it writes: A stays below.
    pins: Pins,
    /// When the next try of a failed read is due.
    pub(crate) read_retry: Option<Millis>,
    pub(crate) read_failures: u32,
    /// A stays below this, if rows may still come there: those of timers may as long as their time has not come.
    pub(crate) open_from: Option<Level>,
    canary: Canary,
}

impl<E> Shelf<E> {
    pub(crate) fn restore(record: &ShelfRecord, bound: usize, canary: Canary) -> Shelf<E> {
        Shelf {
            window: Window::restore(record.ack, record.max, bound, canary),
            pins: Pins::default(),
            read_retry: None,
            read_failures: 0,
            open_from: None,
            canary,
        }
    }

    pub(crate) fn record(&self) -> ShelfRecord {
        ShelfRecord { ack: self.window.ack(), max: self.window.max() }
    }

    /// A row was given this level, and `commit` will write it.
    pub(crate) fn chosen(&mut self, level: Level, commit: CommitId) {
        self.window.chosen(level);
        self.pins.chosen(level, commit);
    }

    /// The lowest level that is chosen but not merged yet.
    pub(crate) fn pin(&self) -> Option<Level> {
        self.pins.lowest()
    }

    /// All rows up to this commit are durable and merged.
    pub(crate) fn unpin(&mut self, commit: CommitId) {
        self.pins.unpin(commit);
        self.advance();
    }

    /// A row is gone.
    pub(crate) fn leave(&mut self, level: Level) {
        self.window.leave(level);
        self.advance();
    }

    fn advance(&mut self) {
        let pin = if self.canary.is(Bug::SegmentDropped) { None } else { self.pin() };
        self.window.advance(pin.into_iter().chain(self.open_from).min());
    }

    /// A page of rows arrived. An error says how it contradicts what is known.
    pub(crate) fn read_returned(
        &mut self,
        rows: Vec<(Level, E)>,
        end: bool,
        durable_seq: u64,
    ) -> Result<(), String> {
        if rows.is_empty() && !end {
            return Err("a read returned nothing, and not the end".into());
        }
        let mut last = self.window.read();
        for (level, _) in &rows {
            if *level <= last {
                return Err(format!("{level} was read out of order"));
            }
            last = *level;
        }
        self.window.read_returned(rows, last, end, durable_seq);
        self.read_failures = 0;
        self.advance();
        Ok(())
    }

    /// What must always be true of it.
    pub(crate) fn check(&self) -> Result<(), String> {
        let window = &self.window;
        let (ack, read) = (window.ack(), window.read());
        if ack > read {
            return Err(format!("A {ack} is above R {read}"));
        }
        let known = window.waiting().keys().chain(window.running().keys()).copied();
        if let Some(level) = known.chain(self.pin()).find(|level| *level <= ack) {
            return Err(format!("{level} is to come, but A is {ack}"));
        }
        match window.waiting().last_key_value() {
            Some((&last, _)) if last > read => Err(format!("{last} is in the window, but R is {read}")),
            Some(_) | None => Ok(()),
        }
    }
}
