//! Keys that may not run for reasons of their own: they are paused. Such a key must not gain credit by waiting, nor
//! fill the windows of its lanes, nor hold their ack levels back. So its rows are parked: they leave their lanes as
//! they are met there, for a shelf of the key's own, and its new tasks go there directly. When the key may run
//! again they come back in order, a bounded number at a time, at places chosen then; new ones go behind them until
//! the shelf is empty.
//!
//! What a parked row was charged when it was placed is given back when no row of its key waits in the lane
//! any more ([`Places::parked`](crate::backlog)): the key then stands where its last task that ran has left it. If it
//! may run again before that, nothing is given back, for its other rows stand where they stood.

use super::reads::{LoadFor, foreign_task, retry_at};
use super::timing::Placing;
use super::{Alarm, LaneIx, Shard};
use crate::backlog::{Level, Shelf};
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Change, ParkedRecord, ParkedRow, Place, Row, ShelfRecord, Try};
use crate::messages::{Answer, Effect};
use crate::names::{Key, LaneId, LoadId, QueueId, QueueName, RequestId};
use crate::refusal::Refusal;

/// A key whose rows are parked, wholly or in part.
#[derive(Clone, Debug)]
pub(crate) struct Parked {
    /// It may not run.
    pub(crate) paused: bool,
    /// Rows on its shelf.
    pub(crate) rows: u64,
    pub(crate) shelf: Shelf<(LaneId, Row)>,
}

/// Which key, of which queue.
pub(crate) type ParkedKey = (QueueId, Key);

impl Shard {
    pub(super) fn restore_parked(&mut self, queue: QueueId, key: Key, record: &ParkedRecord) {
        let bound = self.bounds.window_rows.min(bounds::PARKED_IN_MEMORY);
        let shelf = Shelf::restore(&record.shelf, bound, self.canary);
        let parked = Parked { paused: record.paused, rows: record.rows, shelf };
        if !record.paused {
            self.returning.insert((queue, key.clone()));
        }
        self.parked.insert((queue, key), parked);
    }

    /// Whether tasks of this key go to its shelf.
    pub(super) fn is_parked(&self, queue: QueueId, key: &Key) -> bool {
        !self.parked.is_empty() && self.parked.contains_key(&(queue, key.clone()))
    }

    /// Whether this key is paused.
    pub fn is_paused(&self, queue: &QueueName, key: &Key) -> bool {
        let id = self.names.get(queue);
        id.and_then(|id| self.parked.get(&(*id, key.clone()))).is_some_and(|parked| parked.paused)
    }

    /// Every key that is paused, with its queue.
    pub fn paused_keys(&self) -> impl Iterator<Item = (&QueueName, &Key)> {
        let paused = self.parked.iter().filter(|(_, parked)| parked.paused);
        paused.map(|((queue, key), _)| (&self.queues[queue.0 as usize].record.name, key))
    }

    /// Whether a key of this queue may not run.
    pub(crate) fn key_is_paused(&self, queue: QueueId, key: &Key) -> bool {
        !self.parked.is_empty() && self.parked.get(&(queue, key.clone())).is_some_and(|parked| parked.paused)
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
        let at = (id, key.clone());
        if paused && !self.parked.contains_key(&at) {
            let record = ParkedRecord { paused, rows: 0, shelf: ShelfRecord::default() };
            self.restore_parked(id, key.clone(), &record);
        }
        if let Some(parked) = self.parked.get_mut(&at) {
            parked.paused = paused;
        }
        for ix in self.queues[id.0 as usize].lanes.values().copied().collect::<Vec<LaneIx>>() {
            let places = &mut self.lanes[ix.0].places;
            if let Some(key) = places.keys().find(&key) {
                places.set_paused(key, paused);
                self.dirty_lanes.insert(ix);
            }
        }
        if paused {
            self.returning.remove(&at);
        } else if self.parked.contains_key(&at) {
            self.returning.insert(at.clone());
            self.look_at_shelf(&at);
        }
        // Said here, so that the answer waits for it.
        let (queue, record) = (id, self.parked_record(&at));
        self.batch.changes.push(Change::Parked { queue, key, record });
        self.wake(id);
        self.answer_after_commit(request, Answer::KeyPaused(paused), effects);
    }

    fn may_pause(&self, queue: &QueueName, key: &Key) -> Result<(), Refusal> {
        self.has_room_for_queue(queue)?;
        let known = self.names.get(queue).is_some_and(|id| self.is_parked(*id, key));
        if known || self.parked.len() < bounds::PARKED_KEYS {
            return Ok(());
        }
        let most = bounds::PARKED_KEYS;
        Err(Refusal::invalid("key", format!("would be one more than {most} that are paused; resume others")))
    }

    /// Puts a row on its key's shelf. The change that says so is the caller's.
    pub(super) fn shelve(&mut self, lane: LaneId, mut row: Row, seq: u64) -> Row {
        row.level = Level::numbered(0, seq);
        row.charge.chained = false;
        let at = (lane.queue, row.key.clone());
        if let Some(parked) = self.parked.get_mut(&at) {
            parked.rows += 1;
            parked.shelf.chosen(row.level, self.batch.id);
            self.batch.parked.push((at.clone(), row.level, (lane, row.clone())));
            self.dirty_parked.insert(at);
        }
        self.payloads.take(row.task);
        row
    }

    /// The same for a row that comes from elsewhere.
    pub(super) fn park(&mut self, lane: LaneId, row: Row, from: Place, tried: Option<Try>) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let row = self.shelve(lane, row, seq);
        let to = Place::Parked(row.level);
        self.batch.changes.push(Change::Moved { lane, from, to, row, tried });
    }

    /// If the task that goes next in this lane is of a key that may not run, it is parked.
    pub(super) fn park_first(&mut self, ix: LaneIx) -> bool {
        let lane = &mut self.lanes[ix.0];
        let Some((&level, entry)) = lane.window.waiting().first_key_value() else { return false };
        let state = lane.places.keys().get(entry.key);
        if !state.paused {
            return false;
        }
        let (at, id) = (entry.key, lane.id);
        let row = Row {
            level,
            task: entry.task,
            key: state.key.clone(),
            charge: entry.charge,
            attempt: entry.attempt,
            max_attempts: entry.max_attempts,
            lost: entry.lost,
            terms: entry.terms.clone(),
        };
        lane.park(level, row.charge, at);
        self.batch.parks += 1;
        self.task_changed(row.task);
        self.left_lane(ix);
        self.park(id, row, Place::Lane(level), None);
        true
    }

    /// Whether the task that goes next in this lane has to leave it without being started, and this batch has seen
    /// enough of that. All queues are looked at again when it is sealed.
    pub(super) fn is_held_up(&self, ix: LaneIx) -> bool {
        let lane = &self.lanes[ix.0];
        self.batch.parks >= self.bounds.moves_per_commit
            && lane.window.waiting().first_key_value().is_some_and(|(_, entry)| {
                lane.places.keys().get(entry.key).paused || entry.expires_by(self.now)
            })
    }

    /// A row leaves its key's shelf.
    pub(super) fn unshelve(&mut self, queue: QueueId, key: &Key, level: Level) {
        let at = (queue, key.clone());
        if let Some(parked) = self.parked.get_mut(&at) {
            parked.rows = parked.rows.saturating_sub(1);
            parked.shelf.leave(level);
            self.dirty_parked.insert(at.clone());
            self.look_at_shelf(&at);
        }
    }

    /// An empty shelf of a key that may run is not needed.
    fn look_at_shelf(&mut self, at: &ParkedKey) {
        if self.parked.get(at).is_some_and(|parked| !parked.paused && parked.rows == 0) {
            self.parked.remove(at);
            self.returning.remove(at);
            self.dirty_parked.insert(at.clone());
        }
    }

    /// Gives the rows of keys that may run again their places, a bounded number in one commit.
    pub(super) fn bring_back(&mut self, effects: &mut Vec<Effect>) {
        if !self.may_start() {
            return;
        }
        for at in self.returning.iter().cloned().collect::<Vec<ParkedKey>>() {
            while self.batch.parks < self.bounds.moves_per_commit
                && let Some(parked) = self.parked.get_mut(&at)
                && let Some((level, (lane, row))) = parked.shelf.window.start_first(|(_, row)| row.task, 0)
            {
                self.batch.parks += 1;
                self.task_changed(row.task);
                // As new ones: at the places they would get if they came now.
                let placing = if self.canary.is(Bug::ParkedCredit) { Placing::Again } else { Placing::New };
                self.place_row_now(lane, row, Place::Parked(level), None, placing);
                self.unshelve(at.0, &at.1, level);
            }
            self.ask_parked(&at, effects);
        }
    }

    /// Asks for parked rows, if more of them should be known.
    fn ask_parked(&mut self, at: &ParkedKey, effects: &mut Vec<Effect>) {
        let Some(parked) = self.parked.get_mut(at).filter(|parked| parked.shelf.read_retry.is_none()) else {
            return;
        };
        let Some((above, limit)) = parked.shelf.window.wants_read(self.bounds.page_rows) else { return };
        let load = LoadId(self.next_load);
        self.next_load += 1;
        parked.shelf.window.read_asked(load);
        self.loads.insert(load, LoadFor::Parked(at.clone()));
        let (queue, key) = at.clone();
        self.after_commit(Effect::LoadParked { load, queue, key, above, limit }, effects);
    }

    pub(super) fn on_parked_loaded(
        &mut self,
        load: LoadId,
        rows: Vec<ParkedRow>,
        end: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(LoadFor::Parked(at)) = self.loads.remove(&load) else { return };
        let foreign =
            rows.iter().find(|row| row.row.level.seq() >= self.next_seq || self.lane_of(row.lane).is_none());
        if let Some(row) = foreign {
            effects.push(Effect::Broken { what: foreign_task(row.row.task) });
            return;
        }
        let durable_seq = self.durable_seq;
        if let Some(parked) = self.parked.get_mut(&at).filter(|parked| parked.shelf.window.awaits(load)) {
            let rows = rows.into_iter().map(|row| (row.row.level, (row.lane, row.row))).collect();
            if let Err(what) = parked.shelf.read_returned(rows, end, durable_seq) {
                effects.push(Effect::Broken { what: format!("parked rows of key {}: {what}", at.1) });
            }
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
        for parked in self.parked.values_mut() {
            parked.shelf.read_retry = parked.shelf.read_retry.filter(|at| *at > self.now);
        }
    }

    fn parked_record(&self, at: &ParkedKey) -> Option<ParkedRecord> {
        let record = |parked: &Parked| ParkedRecord {
            paused: parked.paused,
            rows: parked.rows,
            shelf: parked.shelf.record(),
        };
        self.parked.get(at).map(record)
    }

    /// What is saved of shelves that changed.
    pub(super) fn save_parked(&mut self, changes: &mut Vec<Change>) {
        for (queue, key) in std::mem::take(&mut self.dirty_parked) {
            let record = self.parked_record(&(queue, key.clone()));
            changes.push(Change::Parked { queue, key, record });
        }
    }

    /// Rows on shelves of this queue.
    pub(crate) fn parked_of(&self, queue: QueueId) -> u64 {
        self.parked.iter().filter(|((of, _), _)| *of == queue).map(|(_, parked)| parked.rows).sum()
    }
}
