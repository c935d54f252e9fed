//! A lane: one ordered backlog, its places and the window onto it.

use super::keys::KeyIx;
use super::level::Level;
use super::pins::Pins;
use super::places::{Charge, Places};
use super::vtime::{Pass, VTime};
use super::window::{Entry, Running, Window};
use crate::bounds::Bounds;
use crate::canary::Canary;
use crate::change::{LaneRecord, Row};
use crate::estimate::Took;
use crate::names::{CommitId, LaneId, Millis, TaskId};

/// One lane in memory.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    pub(crate) id: LaneId,
    pub(crate) places: Places,
    pub(crate) window: Window,
    /// Per commit that is not durable yet, the lowest level it writes here: A stays below.
    pins: Pins,
    /// Ends so far. Many of them since a row started that holds A back, and that row is set aside.
    ends: u64,
    /// When the next try of a failed read is due.
    pub(crate) read_retry: Option<Millis>,
    pub(crate) read_failures: u32,
    /// The last round of forgetting keys reached its bound.
    pub(crate) more_to_forget: bool,
    pub(crate) forget_armed: bool,
    pub(crate) aside_armed: bool,
    /// How long its runs took of late.
    pub(crate) took: Took,
}

impl Lane {
    pub(crate) fn restore(
        id: LaneId,
        record: &LaneRecord,
        bounds: &Bounds,
        seed: u64,
        canary: Canary,
    ) -> Lane {
        Lane {
            id,
            places: Places::restore(record.vtime, seed, canary),
            window: Window::restore(record.ack, record.max, bounds.window_rows, canary),
            pins: Pins::default(),
            ends: 0,
            read_retry: None,
            read_failures: 0,
            more_to_forget: false,
            forget_armed: false,
            aside_armed: false,
            took: Took::default(),
        }
    }

    pub(crate) fn record(&self, turn: VTime) -> LaneRecord {
        LaneRecord { ack: self.window.ack(), max: self.window.max(), vtime: self.places.vtime(), turn }
    }

    pub(crate) fn ack(&self) -> Pass {
        self.window.ack().pass()
    }

    /// A level was chosen for a row that `commit` will write.
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

    pub(crate) fn merge(&mut self, level: Level, entry: Entry) {
        self.window.merge(level, entry);
    }

    /// The lowest waiting row starts to run, and V moves.
    pub(crate) fn start_first(&mut self) -> Option<(Level, Entry)> {
        let (level, entry) = self.window.start_first(|entry| entry.task, self.ends)?;
        self.places.served(entry.key, level.pass(), entry.charge);
        Some((level, entry))
    }

    /// A dispatch that never started.
    pub(crate) fn give_back(&mut self, level: Level, entry: Entry) {
        self.places.unserved(entry.key, entry.charge.chained);
        self.window.give_back(level, entry);
    }

    /// A running row left the lane: its run ended, or it is set aside.
    pub(crate) fn settle(&mut self, level: Level, charge: Charge, key: KeyIx) {
        self.window.leave(level);
        self.places.settled(key, charge.chained);
        self.ends += 1;
        self.advance();
    }

    /// The running row that holds A back, and how many have ended since it started.
    pub(crate) fn stuck_behind(&self) -> Option<(Level, TaskId, u64)> {
        let (level, running) = self.window.stuck_behind()?;
        Some((level, running.task, self.ends - running.ends_before))
    }

    /// A waiting row is to stand at another level, which `commit` will write.
    pub(crate) fn move_row(&mut self, from: Level, to: Level, commit: CommitId) {
        self.chosen(to, commit);
        self.window.leave(from);
        self.advance();
    }

    /// A waiting row left the lane without being served.
    pub(crate) fn withdraw(&mut self, level: Level, charge: Charge, key: KeyIx) {
        self.window.leave(level);
        self.places.withdrawn(key, charge.chained);
        self.advance();
    }

    /// A waiting row left the lane because its key may not run.
    pub(crate) fn park(&mut self, level: Level, charge: Charge, key: KeyIx) {
        self.window.leave(level);
        self.places.parked(key, charge);
        self.advance();
    }

    /// A worker runs this row since before the restart.
    pub(crate) fn adopt(&mut self, level: Level, task: TaskId, key: KeyIx, charge: Charge) {
        self.window.adopt(level, Running { task, ends_before: self.ends });
        self.places.adopted(key, level.pass(), charge);
    }

    /// Forgets keys whose time has passed, a bounded number of them.
    pub(crate) fn forget(&mut self) {
        self.more_to_forget = self.places.forget();
    }

    pub(crate) fn advance(&mut self) {
        self.window.advance(self.pin());
    }

    /// A page of rows arrived. An error says what contradicts the saved records.
    pub(crate) fn read_returned(
        &mut self,
        rows: Vec<Row>,
        end: bool,
        durable_seq: u64,
    ) -> Result<(), String> {
        if rows.is_empty() && !end {
            return Err(format!("lane {}: a read returned nothing, and not the end", self.id));
        }
        let more = (self.window.waiting().len() + self.window.running().len() + rows.len()) as u64;
        if more > self.places.rows() + self.window.doubtful(&rows, durable_seq) {
            return Err(format!("lane {}: it has more rows than its keys count", self.id));
        }
        let mut known = Vec::with_capacity(rows.len());
        let mut last = self.window.read();
        for row in rows {
            if row.level <= last {
                return Err(format!("lane {}: row {} was read out of order", self.id, row.level));
            }
            last = row.level;
            let key = self.places.keys().find(&row.key);
            // A row that is not durable to our knowledge may belong to a key we have not seen saved.
            let Some(key) = key.filter(|&ix| self.places.keys().get(ix).rows > 0) else {
                if row.level.seq() > durable_seq || self.window.knows_gone(row.level) {
                    continue;
                }
                let (id, level) = (self.id, row.level);
                return Err(format!("lane {id}: row {level} names key {:?}, which has no rows", row.key));
            };
            known.push((row.level, Entry::of(&row, key)));
        }
        self.window.read_returned(known, last, end, durable_seq);
        self.read_failures = 0;
        self.advance();
        Ok(())
    }
}
