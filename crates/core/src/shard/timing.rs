//! What waits for a time: setting timers, and doing what is due. A timer and what comes of it are one commit, so
//! that it is done once; a bounded number is done per commit, and the rest follows when that is sealed.

use std::sync::Arc;

use super::ends::NO_TRIES;
use super::reads::Waiter;
use super::{LaneIx, Part, Shard};
use crate::backlog::{Charge, Cost, Entry, KeyIx, Level};
use crate::canary::Bug;
use crate::change::{Change, Place, Row, Share, Task, Timed, TimerRow, Try};
use crate::life::{self, Event, Next, Outcome, State, Terms, Tries};
use crate::messages::Effect;
use crate::names::{Key, LaneId, Millis, TaskId};

impl Shard {
    /// When the next timer has to be looked at; never, while as many as one commit may have are handled.
    pub(super) fn next_timer(&self) -> Option<Millis> {
        self.handles_timers().then(|| self.timers.next_due()).flatten()
    }

    fn handles_timers(&self) -> bool {
        self.may_start()
            && self.timers.handled < self.bounds.moves_per_commit
            && self.task_reads.len() < self.bounds.task_reads
    }

    /// Does what is due.
    pub(super) fn handle_timers(&mut self, effects: &mut Vec<Effect>) {
        while self.handles_timers()
            && let Some((level, task, what)) = self.timers.take_due(self.now)
        {
            self.timers.handled += 1;
            match what {
                Timed::Due(lane, row) => self.on_due(level, lane, row, effects),
                // What they mean depends on where the task is, which the store knows.
                Timed::Expire => self.read_task_for(task, Waiter::Expire(level), effects),
                Timed::Detach => self.read_task_for(task, Waiter::Detach(level), effects),
                Timed::Forget { tries } => {
                    self.batch.changes.push(Change::Forgotten { task, tries });
                    self.task_changed(task);
                    self.timer_over(level);
                }
            }
        }
    }

    /// Sets a timer.
    pub(super) fn set_timer(&mut self, due: Millis, task: TaskId, what: Timed) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let at = self.new_timer(due, task, &what, seq);
        self.batch.changes.push(Change::Timed(TimerRow { at, task, what }));
    }

    /// Sets the timer that ends a task which has not started in time. Its seq is the task's, so that it is found
    /// again when the task ends.
    pub(super) fn set_expiry(&mut self, expires: Millis, task: TaskId) {
        let at = self.new_timer(expires, task, &Timed::Expire, task.0);
        self.batch.changes.push(Change::Timed(TimerRow { at, task, what: Timed::Expire }));
    }

    /// Chooses a timer's level, and has it join the others when it is durable.
    fn new_timer(&mut self, due: Millis, task: TaskId, what: &Timed, seq: u64) -> Level {
        let at = self.timers.level(due, what, seq);
        self.join_timers(at, task, what.clone());
        at
    }

    fn join_timers(&mut self, at: Level, task: TaskId, what: Timed) {
        self.timers.shelf.chosen(at, self.batch.id);
        self.batch.timers.push((at, task, what));
        self.dirty_timers = true;
    }

    /// A timer was handled, or is not needed any more, and its row is gone with what comes of it.
    pub(super) fn timer_over(&mut self, level: Level) {
        self.timers.shelf.leave(level);
        self.dirty_timers = true;
    }

    /// A timer is not needed any more, and nothing else comes of it.
    pub(super) fn untime(&mut self, at: Level) {
        self.batch.changes.push(Change::Untimed { at });
        self.timer_over(at);
    }

    /// Puts a task off. The change that says so is the caller's.
    pub(super) fn schedule(&mut self, due: Millis, lane: LaneId, mut row: Row, seq: u64) -> Row {
        self.queues[lane.queue.0 as usize].record.totals.scheduled += 1;
        self.dirty_queues.insert(lane.queue);
        row.level = self.timers.level(due, &Timed::Due(lane, row.clone()), seq);
        self.join_timers(row.level, row.task, Timed::Due(lane, row.clone()));
        row
    }

    /// A task that waited for a time does not any more.
    pub(super) fn unschedule(&mut self, lane: LaneId, level: Level) {
        let totals = &mut self.queues[lane.queue.0 as usize].record.totals;
        totals.scheduled = totals.scheduled.saturating_sub(1);
        self.dirty_queues.insert(lane.queue);
        self.timer_over(level);
    }

    /// A delay or a backoff is over: the task goes to its lane.
    fn on_due(&mut self, at: Level, lane: LaneId, row: Row, effects: &mut Vec<Effect>) {
        let tries = Tries { attempt: row.attempt, max_attempts: row.max_attempts, ..NO_TRIES };
        if life::after(State::Scheduled, Event::Due, tries) != Next::Queue {
            return;
        }
        self.unschedule(lane, at);
        self.task_changed(row.task);
        if row.expires().is_some_and(|expires| expires <= self.now) {
            return self.finish(Over::of_row(&row, lane, Place::Timer(at), Outcome::Expired), effects);
        }
        let (task, key) = (row.task, row.key.clone());
        // One that was put off before its first try stands where it would if it came now.
        let placing = if row.attempt == 1 { Placing::New } else { Placing::Again };
        self.place_row(lane, row, Place::Timer(at), None, placing);
        self.after_commit(Effect::Due { task, lane, key }, effects);
    }

    /// Gives a task that comes from the timers, or is tried again, a place in its lane.
    pub(super) fn place_row(
        &mut self,
        lane: LaneId,
        row: Row,
        from: Place,
        tried: Option<Try>,
        placing: Placing,
    ) {
        let (parked, part) = match placing {
            Placing::New => (self.is_parked(lane, &row.key), Part::Last),
            Placing::Again | Placing::Back => (self.key_hold(lane.queue, &row.key).is_some(), Part::First),
        };
        if parked {
            self.park(lane, row, from, tried, part);
        } else {
            self.place_row_now(lane, row, from, tried, placing);
        }
    }

    pub(super) fn place_row_now(
        &mut self,
        lane: LaneId,
        row: Row,
        from: Place,
        tried: Option<Try>,
        placing: Placing,
    ) {
        let row = self.enter_lane(lane, row, placing);
        let to = Place::Lane(row.level);
        self.batch.changes.push(Change::Moved { lane, from, to, row, tried });
    }

    /// Gives a row its place. The change that says so is the caller's.
    pub(super) fn enter_lane(&mut self, lane_id: LaneId, mut row: Row, placing: Placing) -> Row {
        let ix: LaneIx = self.lane(lane_id);
        let commit = self.batch.id;
        let over = self.queues[lane_id.queue.0 as usize].overrides.get(&row.key).and_then(|over| over.weight);
        let places = &mut self.lanes[ix.0].places;
        let key = places.key(&row.key, row.charge.weight);
        places.set_weight(key, None, over);
        if placing != Placing::Back {
            let (cost, timed) = self.cost_of(ix, key, row.charge.asked().cost, row.terms.as_deref());
            row.charge =
                Charge { cost, timed, weight: self.lanes[ix.0].places.keys().get(key).weight, ..row.charge };
        }
        let lane = &mut self.lanes[ix.0];
        let behind = self.canary.is(Bug::RetryBehindBacklog);
        let pass = match placing {
            Placing::Again | Placing::Back if !behind => {
                row.charge.chained = false;
                lane.places.place_again(key, row.charge, lane.ack(), placing == Placing::Again)
            }
            Placing::New | Placing::Again | Placing::Back => {
                let (pass, charge) = lane.places.place(key, row.charge.cost, lane.ack());
                row.charge = Charge { timed: row.charge.timed, ..charge };
                pass
            }
        };
        row.level = Level::new(pass, self.next_seq);
        self.next_seq += 1;
        lane.chosen(row.level, commit);
        self.batch.rows.push((ix, row.level, Entry::of(&row, key)));
        if !self.parked.is_empty() {
            self.recount(&(lane_id, row.key.clone()));
        }
        self.dirty_lanes.insert(ix);
        row
    }

    /// What a task of this key costs if it is placed now, and whether that is a time. One that does not say how long
    /// it takes is taken for one like its key's last ones, or else its queue's.
    pub(super) fn cost_of(&self, ix: LaneIx, key: KeyIx, asked: Cost, terms: Option<&Terms>) -> (Cost, bool) {
        let lane = &self.lanes[ix.0];
        if self.settings_of(lane.id.queue).share == Share::Tasks {
            return (asked, false);
        }
        let said = terms.map(|terms| terms.expected_ms).filter(|ms| *ms > 0).map(Cost::of_ms);
        let of_key = || lane.places.keys().get(key).average.cost();
        let of_queue = || self.queues[lane.id.queue.0 as usize].record.average.cost();
        (said.or_else(of_key).or_else(of_queue).unwrap_or(Cost::ONE), true)
    }

    /// The store's word on a task that may have expired.
    pub(super) fn on_expiry(&mut self, at: Level, task: Option<&Task>, effects: &mut Vec<Effect>) {
        self.untime(at);
        let Some(task) = task else { return };
        match life::after(self.state_of(task), Event::Expire, self.tries_of(task)) {
            Next::Finish(outcome) => self.finish_waiting(task, outcome, effects),
            Next::Stay | Next::Queue | Next::Retry | Next::Stop | Next::Again | Next::Refuse => {}
        }
    }

    /// The store's word on a task that somebody should watch.
    pub(super) fn on_detached(
        &mut self,
        at: Level,
        id: TaskId,
        task: Option<&Task>,
        effects: &mut Vec<Effect>,
    ) {
        self.untime(at);
        let state = task.map_or(State::Unknown, |task| self.state_of(task));
        let Some(task) = task.filter(|_| state != State::Ended) else {
            self.watched.remove(&id); // somebody watched it after its end
            return;
        };
        let ttl_ms = task.terms.as_ref().map_or(0, |terms| terms.attach_ms);
        let since = match self.watched.get(&id) {
            Some((true, _)) => self.now,
            Some(&(false, left)) => left,
            // Whoever watched it through an earlier owner has to connect again first.
            None => task.accepted.max(self.began.unwrap_or(self.now)),
        };
        if since.plus(ttl_ms) > self.now {
            return self.set_timer(since.plus(ttl_ms), id, Timed::Detach);
        }
        match life::after(state, Event::Detached, self.tries_of(task)) {
            Next::Finish(outcome) => self.finish_waiting(task, outcome, effects),
            Next::Stop => self.stop_run(id, effects),
            Next::Stay | Next::Queue | Next::Retry | Next::Again | Next::Refuse => {}
        }
    }
}

/// How a row gets its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placing {
    /// As a new task.
    New,
    /// To be tried again: ahead of its key's later tasks, and charged.
    Again,
    /// Because it was never started: the same, but for nothing.
    Back,
}

/// A task that has ended, and how.
#[derive(Clone, Debug)]
pub(super) struct Over {
    pub(super) task: TaskId,
    pub(super) lane: LaneId,
    pub(super) key: Key,
    pub(super) from: Place,
    pub(super) attempt: u16,
    pub(super) max_attempts: u16,
    pub(super) expires: Option<Millis>,
    pub(super) outcome: Outcome,
    pub(super) last: Option<Try>,
    pub(super) result: Arc<[u8]>,
}

impl Over {
    /// Of a task that is not running.
    pub(super) fn of_row(row: &Row, lane: LaneId, from: Place, outcome: Outcome) -> Over {
        Over {
            task: row.task,
            lane,
            key: row.key.clone(),
            from,
            attempt: row.attempt,
            max_attempts: row.max_attempts,
            expires: row.expires(),
            outcome,
            last: None,
            result: [].into(),
        }
    }
}
