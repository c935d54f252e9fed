//! Making it durable: batches, and what each of them sets free.

use super::parking::ParkedKey;
use super::{Alarm, LaneIx, Shard};
use crate::backlog::{Entry, Level};
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Change, Row, Timed};
use crate::messages::{Answer, Effect};
use crate::names::{CommitId, QueueId, RequestId, TaskId};

/// One group commit, and what waits for it.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) id: CommitId,
    pub(super) changes: Vec<Change>,
    /// Rows that join their lanes when it is durable.
    pub(super) rows: Vec<(LaneIx, Level, Entry)>,
    /// Timers that join the others when it is durable.
    pub(super) timers: Vec<(Level, TaskId, Timed)>,
    /// Rows that join the shelves of their keys.
    pub(super) parked: Vec<(ParkedKey, Level, Row)>,
    /// Rows that it parks, or that expire as they are met.
    pub(super) parks: usize,
    /// Rows that it brings back from shelves.
    pub(super) returns: usize,
    /// Effects that are emitted when it is durable.
    then: Vec<Effect>,
    /// The last seq that was handed out when it was sealed.
    last_seq: u64,
}

impl Batch {
    pub(super) fn new(id: CommitId) -> Batch {
        let (rows, timers, then) = (Vec::new(), Vec::new(), Vec::new());
        Batch {
            id,
            changes: Vec::new(),
            rows,
            timers,
            parked: Vec::new(),
            parks: 0,
            returns: 0,
            then,
            last_seq: 0,
        }
    }

    /// How much it makes us hold: changes while it is open, rows and answers until it is durable.
    pub(super) fn size(&self) -> usize {
        self.changes.len().max(self.rows.len() + self.timers.len() + self.parked.len()).max(self.then.len())
    }
}

impl Shard {
    /// Changes in the open batch. The shell seals when it has enough, or nothing more to step.
    pub fn unsealed(&self) -> usize {
        self.batch.changes.len()
    }

    /// Closes the batch into one commit, if there is anything to save. Call it after a round of steps,
    /// as often as you like; past the bound of commits in flight it waits.
    pub fn seal(&mut self, effects: &mut Vec<Effect>) {
        let nothing = self.batch.changes.is_empty() && !self.flush;
        if nothing || self.sealed.len() >= bounds::COMMITS_IN_FLIGHT {
            return;
        }
        self.flush = false;
        let next = CommitId(self.batch.id.0 + 1);
        let mut batch = std::mem::replace(&mut self.batch, Batch::new(next));
        if batch.parks >= self.bounds.moves_per_commit {
            // What was held up by that goes on, with the next fact: this commit's, if no other comes.
            (0..self.queues.len() as u32).map(QueueId).for_each(|queue| self.wake(queue));
        }
        let mut changes = std::mem::take(&mut batch.changes);
        for ix in std::mem::take(&mut self.dirty_lanes) {
            let lane = &mut self.lanes[ix.0];
            let id = lane.id;
            lane.places
                .changed(|key, record| changes.push(Change::Key { lane: id, key: key.clone(), record }));
            let turns = self.queues[id.queue.0 as usize].turns.get(&id.priority);
            let turn = turns.map_or_else(Default::default, |turns| turns.charged(id.class));
            changes.push(Change::Lane { lane: id, record: lane.record(turn) });
        }
        for queue in std::mem::take(&mut self.dirty_queues) {
            changes.push(Change::Queue { queue, record: self.queues[queue.0 as usize].record.clone() });
        }
        self.save_parked(&mut changes);
        if std::mem::take(&mut self.dirty_timers) {
            changes.push(Change::Timers { record: self.timers.shelf.record() });
        }
        self.timers.handled = 0;
        changes.push(Change::Seq { next: self.next_seq });
        batch.last_seq = self.next_seq - 1;
        effects.push(Effect::Save { commit: batch.id, changes });
        self.sealed.push_back(batch);
    }

    /// Emits an effect once everything that happened before it is durable.
    pub(super) fn after_commit(&mut self, effect: Effect, effects: &mut Vec<Effect>) {
        if !self.batch.changes.is_empty() {
            self.batch.then.push(effect);
        } else if let Some(last) = self.sealed.back_mut() {
            last.then.push(effect);
        } else {
            effects.push(effect);
        }
    }

    pub(super) fn answer_after_commit(
        &mut self,
        request: RequestId,
        answer: Answer,
        effects: &mut Vec<Effect>,
    ) {
        let effect = Effect::Answer { request, answer: Ok(answer) };
        if self.canary.is(Bug::ReplyBeforeCommit) {
            effects.push(effect);
        } else {
            self.after_commit(effect, effects);
        }
    }

    pub(super) fn on_committed(&mut self, commit: CommitId, effects: &mut Vec<Effect>) {
        if self.sealed.front().is_none_or(|batch| batch.id != commit) {
            let what = format!("commit {commit} was acknowledged out of order");
            effects.push(Effect::Broken { what });
            return;
        }
        let Some(batch) = self.sealed.pop_front() else { return };
        self.durable_seq = batch.last_seq;
        let mut lanes: Vec<LaneIx> = Vec::new();
        for (ix, level, entry) in batch.rows {
            let lane = &mut self.lanes[ix.0];
            lane.merge(level, entry);
            if lanes.last() != Some(&ix) {
                lanes.push(ix);
            }
        }
        for (level, task, what) in batch.timers {
            self.timers.shelf.window.merge(level, (task, what));
        }
        self.timers.shelf.unpin(commit);
        for (at, level, entry) in batch.parked {
            if let Some(parked) = self.parked.get_mut(&at) {
                parked.shelf.window.merge(level, entry);
                parked.shelf.unpin(commit);
            }
            self.returning.insert(at);
        }
        for ix in lanes {
            let lane = &mut self.lanes[ix.0];
            let ack = lane.window.ack();
            lane.unpin(commit);
            let queue = lane.id.queue;
            self.wake(queue);
            self.hungry.insert(ix);
            self.save_empty(ix, ack);
        }
        effects.extend(batch.then);
    }

    /// If A moved in a lane that is empty now, no end will come along to save it: save it on its own, or a new
    /// owner would look for rows where there are none.
    pub(super) fn save_empty(&mut self, ix: LaneIx, ack_before: Level) {
        let lane = &self.lanes[ix.0];
        if lane.window.ack() > ack_before && lane.places.rows() == 0 {
            self.dirty_lanes.insert(ix);
            self.flush = true;
        }
    }

    /// Forgets keys of this lane whose time has passed. If one round is not enough, goes on soon.
    pub(super) fn forget(&mut self, ix: LaneIx) {
        let lane = &mut self.lanes[ix.0];
        lane.forget();
        if lane.places.has_forgotten() {
            self.dirty_lanes.insert(ix);
            self.flush = true;
        }
        if lane.more_to_forget {
            self.forget_soon(ix);
        }
    }

    /// Does it a little later: more may happen by then.
    pub(super) fn forget_soon(&mut self, ix: LaneIx) {
        if !std::mem::replace(&mut self.lanes[ix.0].forget_armed, true) {
            self.arm(self.now.plus(bounds::FORGET_AFTER_MS), Alarm::Forget(ix));
        }
    }

    pub(super) fn on_forget_timer(&mut self, ix: LaneIx) {
        self.lanes[ix.0].forget_armed = false;
        self.forget(ix);
    }
}
