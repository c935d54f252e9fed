//! Rows that stand beside their lane, on a shelf of their key's own. There are two reasons:
//!
//! - The key is held: it is paused, or at a limit of its own (`limits`). Such a key must not gain credit by waiting, nor fill the windows of its
//!   lanes, nor hold their ack levels back. Its rows leave their lanes as they are met there, and its new
//!   tasks go to the shelf directly.
//! - Its queue shares time, and enough of its rows have places already. Places are chosen as late as possible
//!   there, for only then is it known how long the earlier ones took (docs/decisions/0010-share-by-time.md).
//!
//! Rows come back in order, a bounded number at a time, at places chosen then; new ones go behind them until the
//! shelf is empty. A task that is tried again does not: it goes ahead of its key's later tasks, as ever.
//!
//! What a row of a key that is held was charged when it was placed is given back when no row of its key waits in
//! the lane any more ([`Places::parked`](crate::backlog)): the key then stands where its last task that ran has left
//! it. If it may run again before that, nothing is given back, for its other rows stand where they stood.

use std::ops::Bound;

use super::reads::{LoadFor, foreign_task, retry_at};
use super::timing::Placing;
use super::{Alarm, LaneIx, Shard};
use crate::backlog::{Entry, KeyIx, Level, Shelf};
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Change, ParkedRecord, Place, Row, Share, Try};
use crate::messages::{Answer, Effect};
use crate::names::{Class, Key, LaneId, LoadId, QueueId, QueueName, RequestId};
use crate::refusal::Refusal;

/// The rows of a key that are parked beside a lane.
#[derive(Clone, Debug)]
pub(crate) struct Parked {
    /// Rows on the shelf.
    pub(crate) rows: u64,
    /// Those of them that count as to come to the lane.
    pub(crate) to_come: u64,
    pub(crate) shelf: Shelf<Row>,
}

/// The two parts of a shelf. Rows that had a place already, or were tried, stand before all that had none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    First = 0,
    Last = 1,
}

/// Which key, beside which lane.
pub(crate) type ParkedKey = (LaneId, Key);

impl Shard {
    pub(super) fn restore_parked(&mut self, lane: LaneId, key: Key, record: &ParkedRecord) {
        // Few keys may have many rows in memory, many keys have few.
        let share = bounds::PARKED_IN_MEMORY / (self.parked.len() + 1);
        let bound = self.bounds.window_rows.min(share.clamp(bounds::SHELF_MIN, bounds::SHELF_MAX));
        let mut shelf = Shelf::restore(&record.shelf, bound, self.canary);
        // Rows of the first part may come at any time, behind all that there were.
        shelf.open_from = Some(Level::numbered(Part::First as u64, 1));
        self.returning.insert((lane, key.clone()));
        self.parked.insert((lane, key), Parked { rows: record.rows, to_come: 0, shelf });
    }

    /// Whether this key is paused.
    pub fn is_paused(&self, queue: &QueueName, key: &Key) -> bool {
        self.names.get(queue).is_some_and(|id| self.key_is_paused(*id, key))
    }

    /// Every key that is paused, with its queue.
    pub fn paused_keys(&self) -> impl Iterator<Item = (&QueueName, &Key)> {
        self.paused.iter().map(|(queue, key)| (&self.queues[queue.0 as usize].record.name, key))
    }

    /// Whether a key of this queue may not run.
    pub(crate) fn key_is_paused(&self, queue: QueueId, key: &Key) -> bool {
        !self.paused.is_empty() && self.paused.contains(&(queue, key.clone()))
    }

    /// Whether a row of this key that is to have its first place goes to the shelf instead.
    pub(super) fn is_parked(&self, lane: LaneId, key: &Key) -> bool {
        let shelved = || !self.parked.is_empty() && self.parked.contains_key(&(lane, key.clone()));
        let full = || !self.has_room_beside(lane, key) && self.parked.len() < bounds::SHELVES;
        self.key_hold(lane.queue, key).is_some() || shelved() || full()
    }

    /// Whether one more row of this key may be given its place in the lane now.
    pub(crate) fn has_room_beside(&self, lane: LaneId, key: &Key) -> bool {
        let state = self.lane_of(lane).and_then(|ix| self.key_state(ix, key));
        if self.room_by_limit(lane.queue, key, state.map_or(0, |state| state.waiting)) == 0 {
            return false;
        }
        if self.settings_of(lane.queue).share == Share::Tasks || self.canary.is(Bug::PlacedAtOnce) {
            return true;
        }
        let Some(state) = state else { return true };
        // As many as run may be needed next, at once.
        state.waiting < bounds::PLACED_AHEAD.max(state.rows - state.waiting)
    }

    pub(super) fn on_pause_key(
        &mut self,
        request: RequestId,
        queue: QueueName,
        key: Key,
        paused: bool,
        effects: &mut Vec<Effect>,
    ) {
        if let Err(refusal) = self.may_pause(&queue, &key) {
            effects.push(Effect::Answer { request, answer: Err(refusal) });
            return;
        }
        let id = self.queue_named(&queue);
        if paused {
            self.paused.insert((id, key.clone()));
        } else {
            self.paused.remove(&(id, key.clone()));
        }
        self.look_at_key(id, &key);
        self.batch.changes.push(Change::Paused { queue: id, key, paused });
        self.wake(id);
        self.answer_after_commit(request, Answer::KeyPaused(paused), effects);
    }

    fn may_pause(&self, queue: &QueueName, key: &Key) -> Result<(), Refusal> {
        self.has_room_for_queue(queue)?;
        if self.is_paused(queue, key) || self.paused.len() < bounds::PAUSED_KEYS {
            return Ok(());
        }
        let most = bounds::PAUSED_KEYS;
        Err(Refusal::invalid("key", format!("would be one more than {most} that are paused; resume others")))
    }

    /// Puts a row on its key's shelf. The change that says so is the caller's.
    pub(super) fn shelve(&mut self, lane: LaneId, mut row: Row, seq: u64, part: Part) -> Row {
        row.level = Level::numbered(part as u64, seq);
        row.charge = row.charge.asked();
        let at = (lane, row.key.clone());
        if !self.parked.contains_key(&at) {
            self.restore_parked(lane, row.key.clone(), &ParkedRecord::default());
        }
        let paused = self.key_is_paused(lane.queue, &row.key);
        self.lane(lane);
        if let Some(parked) = self.parked.get_mut(&at) {
            parked.rows += 1;
            parked.shelf.chosen(row.level, self.batch.id);
            self.batch.parked.push((at.clone(), row.level, row.clone()));
            self.dirty_parked.insert(at.clone());
        }
        self.recount(&at);
        self.await_rate(lane.queue, &row.key, self.key_hold(lane.queue, &row.key));
        if paused {
            self.payloads.take(row.task);
        }
        row
    }

    /// The same for a row that comes from elsewhere.
    pub(super) fn park(&mut self, lane: LaneId, row: Row, from: Place, tried: Option<Try>, part: Part) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let row = self.shelve(lane, row, seq, part);
        let to = Place::Parked(row.level);
        self.batch.changes.push(Change::Moved { lane, from, to, row, tried });
    }

    /// If the task that goes next in this lane is of a key that may not run, it is parked.
    pub(super) fn park_first(&mut self, ix: LaneIx) -> bool {
        let lane = &self.lanes[ix.0];
        let is_held = |entry: &Entry| lane.places.keys().get(entry.key).held;
        if !lane.window.waiting().first_key_value().is_some_and(|(_, entry)| is_held(entry)) {
            return false;
        }
        let Some((key, row)) = self.head_row(ix) else { return false };
        let (id, level) = (self.lanes[ix.0].id, row.level);
        self.lanes[ix.0].park(level, row.charge, key);
        self.batch.parks += 1;
        self.task_changed(row.task);
        self.left_lane(ix);
        self.park(id, row, Place::Lane(level), None, Part::First);
        true
    }

    /// If the task that goes next in this lane needs another class than the lane's, it goes to the lane of that one, as a
    /// new task there. So it does when classes have changed, and when a task that was shortened while it ran is tried again.
    pub(super) fn move_first(&mut self, ix: LaneIx) -> bool {
        let from_lane = self.lanes[ix.0].id;
        let first = self.lanes[ix.0].window.waiting().first_key_value();
        let Some(max_duration_ms) = first.map(|(_, entry)| entry.max_duration_ms()) else { return false };
        if !self.belongs_elsewhere(from_lane, max_duration_ms) {
            return false;
        }
        let Some((key, row)) = self.head_row(ix) else { return false };
        let level = row.level;
        self.lanes[ix.0].places.uncharge(&row.key, row.charge);
        self.lanes[ix.0].withdraw(level, row.charge, key);
        self.batch.parks += 1;
        self.task_changed(row.task);
        self.made_room(from_lane, &row.key);
        self.left_lane(ix);
        let class = Class(self.needs(from_lane.queue, max_duration_ms) as u8);
        let lane = LaneId { class, ..from_lane };
        let (to, row) = self.enter_or_shelve(lane, row);
        self.batch.changes.push(Change::Shortened { from_lane, from: Place::Lane(level), lane, to, row });
        true
    }

    /// Puts a row that has left its lane into another one, or on its key's shelf beside that. The change is the caller's.
    pub(super) fn enter_or_shelve(&mut self, lane: LaneId, row: Row) -> (Place, Row) {
        self.lane(lane);
        if self.is_parked(lane, &row.key) {
            let seq = self.next_seq;
            self.next_seq += 1;
            let row = self.shelve(lane, row, seq, Part::Last);
            (Place::Parked(row.level), row)
        } else {
            let row = self.enter_lane(lane, row, Placing::New);
            (Place::Lane(row.level), row)
        }
    }

    /// The row of the task that goes next in this lane.
    fn head_row(&self, ix: LaneIx) -> Option<(KeyIx, Row)> {
        let lane = &self.lanes[ix.0];
        let (&level, entry) = lane.window.waiting().first_key_value()?;
        let row = Row {
            level,
            task: entry.task,
            key: lane.places.keys().get(entry.key).key.clone(),
            charge: entry.charge,
            attempt: entry.attempt,
            max_attempts: entry.max_attempts,
            lost: entry.lost,
            terms: entry.terms.clone(),
        };
        Some((entry.key, row))
    }

    /// Whether the task that goes next in this lane has to leave it without being started, and this batch has seen
    /// enough of that. All queues are looked at again when it is sealed.
    pub(super) fn is_held_up(&self, ix: LaneIx) -> bool {
        let lane = &self.lanes[ix.0];
        self.batch.parks >= self.bounds.moves_per_commit
            && lane.window.waiting().first_key_value().is_some_and(|(_, entry)| {
                lane.places.keys().get(entry.key).held
                    || entry.expires_by(self.now)
                    || self.belongs_elsewhere(lane.id, entry.max_duration_ms())
            })
    }

    /// This batch has not seen so much parked and expired that others have to wait for the next.
    pub(crate) fn moves_left(&self) -> bool {
        self.batch.parks < self.bounds.moves_per_commit
    }

    /// A row leaves its key's shelf. An empty one is not needed.
    pub(super) fn unshelve(&mut self, lane: LaneId, key: &Key, level: Level) {
        let at = (lane, key.clone());
        let Some(parked) = self.parked.get_mut(&at) else { return };
        parked.rows = parked.rows.saturating_sub(1);
        parked.shelf.leave(level);
        if parked.rows == 0 {
            let before = parked.to_come;
            self.parked.remove(&at);
            self.returning.remove(&at);
            self.count_to_come(&at, before, 0);
        } else {
            self.returning.insert(at.clone()); // more of them may have to be read
            self.recount(&at);
        }
        self.dirty_parked.insert(at);
    }

    /// A row of this key waits no more: another may have its place.
    pub(super) fn made_room(&mut self, lane: LaneId, key: &Key) {
        if !self.parked.is_empty() {
            let at = (lane, key.clone());
            if self.parked.contains_key(&at) {
                self.recount(&at);
                self.returning.insert(at);
            }
        }
    }

    /// Gives the rows of keys that may run their places, a bounded number in one commit.
    pub(super) fn bring_back(&mut self, effects: &mut Vec<Effect>) {
        if !self.may_start() {
            return;
        }
        let mut reads = 0;
        while reads < bounds::SHELF_READS
            && self.batch.returns < self.bounds.moves_per_commit
            && let Some(at) = self.next_returning()
        {
            if self.key_hold(at.0.queue, &at.1).is_some() {
                continue; // it is looked at again when it is not
            }
            while self.batch.returns < self.bounds.moves_per_commit
                && self.has_room_beside(at.0, &at.1)
                && let Some(parked) = self.parked.get_mut(&at)
                && let Some((level, row)) = parked.shelf.window.start_first(|row| row.task, 0)
            {
                self.batch.returns += 1;
                self.task_changed(row.task);
                // As new ones: at the places they would get if they came now.
                let placing = if self.canary.is(Bug::ParkedCredit) { Placing::Again } else { Placing::New };
                self.place_row_now(at.0, row, Place::Parked(level), None, placing);
                self.unshelve(at.0, &at.1, level);
            }
            reads += usize::from(self.ask_parked(&at, effects));
            if self.is_due_back(&at) {
                self.returning.insert(at); // as soon as this commit is sealed
            }
        }
    }

    /// The next key to be looked at. All have their turn: those that come first in the alphabet must not use up what one
    /// commit can do.
    fn next_returning(&mut self) -> Option<ParkedKey> {
        let last = self.returned.take();
        let after = last.map(|last| (Bound::Excluded(last), Bound::Unbounded));
        let next = after.and_then(|after| self.returning.range(after).next());
        let next = next.or_else(|| self.returning.first()).cloned()?;
        self.returning.remove(&next);
        self.returned = Some(next.clone());
        Some(next)
    }

    /// Whether a row that is at hand may be given its place.
    pub(crate) fn is_due_back(&self, at: &ParkedKey) -> bool {
        let at_hand = |parked: &Parked| !parked.shelf.window.waiting().is_empty();
        self.parked.get(at).is_some_and(at_hand)
            && self.key_hold(at.0.queue, &at.1).is_none()
            && self.has_room_beside(at.0, &at.1)
    }

    /// It is looked at with the next fact.
    pub(crate) fn is_returning(&self, at: &ParkedKey) -> bool {
        self.returning.contains(at)
    }

    /// Asks for parked rows, if more of them should be known. True if it does.
    fn ask_parked(&mut self, at: &ParkedKey, effects: &mut Vec<Effect>) -> bool {
        let Some(parked) = self.parked.get_mut(at).filter(|parked| parked.shelf.read_retry.is_none()) else {
            return false;
        };
        let wanted = parked.shelf.window.wants_read(self.bounds.page_rows);
        let Some((above, limit)) = wanted else { return false };
        let load = LoadId(self.next_load);
        self.next_load += 1;
        parked.shelf.window.read_asked(load);
        self.loads.insert(load, LoadFor::Parked(at.clone()));
        let (lane, key) = at.clone();
        self.after_commit(Effect::LoadParked { load, lane, key, above, limit }, effects);
        true
    }

    pub(super) fn on_parked_loaded(
        &mut self,
        load: LoadId,
        rows: Vec<Row>,
        end: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(LoadFor::Parked(at)) = self.loads.remove(&load) else { return };
        if let Some(row) = rows.iter().find(|row| row.level.seq() >= self.next_seq) {
            effects.push(Effect::Broken { what: foreign_task(row.task) });
            return;
        }
        let durable_seq = self.durable_seq;
        if let Some(parked) = self.parked.get_mut(&at).filter(|parked| parked.shelf.window.awaits(load)) {
            let rows = rows.into_iter().map(|row| (row.level, row)).collect();
            if let Err(what) = parked.shelf.read_returned(rows, end, durable_seq) {
                effects.push(Effect::Broken { what: format!("parked rows of key {}: {what}", at.1) });
            }
            self.returning.insert(at);
        }
    }

    pub(super) fn on_parked_failed(&mut self, load: LoadId, at: ParkedKey) {
        let now = self.now;
        if let Some(parked) = self.parked.get_mut(&at).filter(|parked| parked.shelf.window.awaits(load)) {
            parked.shelf.window.read_failed();
            let retry = retry_at(now, parked.shelf.read_failures);
            parked.shelf.read_failures = parked.shelf.read_failures.saturating_add(1);
            parked.shelf.read_retry = Some(retry);
            self.arm(retry, Alarm::ReadParked);
        }
    }

    /// Failed reads of parked rows are tried again.
    pub(super) fn on_read_parked(&mut self) {
        for (at, parked) in &mut self.parked {
            if parked.shelf.read_retry.is_some_and(|retry| retry <= self.now) {
                parked.shelf.read_retry = None;
                self.returning.insert(at.clone());
            }
        }
    }

    /// What is saved of shelves that changed.
    pub(super) fn save_parked(&mut self, changes: &mut Vec<Change>) {
        for at in std::mem::take(&mut self.dirty_parked) {
            let saved = |parked: &Parked| ParkedRecord { rows: parked.rows, shelf: parked.shelf.record() };
            let record = self.parked.get(&at).map(saved);
            let (lane, key) = at;
            changes.push(Change::Parked { lane, key, record });
        }
    }

    /// Rows on shelves of this queue.
    pub(crate) fn parked_of(&self, queue: QueueId) -> u64 {
        self.parked.iter().filter(|((lane, _), _)| lane.queue == queue).map(|(_, parked)| parked.rows).sum()
    }
}
