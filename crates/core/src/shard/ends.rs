//! Taking tasks out: ends, retries, cancels, lost workers; and what a new owner is told of runs that
//! began before it.

use std::collections::BTreeSet;
use std::collections::btree_map;

use super::reads::Waiter;
use super::{HeldEnd, LaneIx, Shard, Timer};
use crate::backlog::{Entry, Level};
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Change, MemberRecord, Row, Task};
use crate::life::{self, End, Next, Outcome};
use crate::messages::{Answer, Effect, Run};
use crate::names::{Fence, Key, LaneId, Millis, QueueId, RequestId, Seat, TaskId, WorkerId};
use crate::refusal::Refusal;
use crate::workers::LiveRun;

impl Shard {
    /// A worker's runs from before the restart count as running; what ended is held until the gate opens.
    pub(super) fn on_report(
        &mut self,
        worker: WorkerId,
        running: Vec<Run>,
        ended: Vec<(Run, End)>,
        effects: &mut Vec<Effect>,
    ) {
        for run in running {
            let (task, fence) = (run.task, run.fence);
            let known = |live: &LiveRun| (live.worker, live.run.fence) == (worker, fence);
            if self.runs.get(&task).is_some_and(known) {
                continue;
            }
            if self.open || !self.adopt(worker, run, effects) {
                effects.push(Effect::Stop { worker, task, fence });
            }
        }
        for (run, end) in ended {
            if let Some(ix) = self.lane_of(run.lane).filter(|ix| run.level <= self.lanes[ix.0].window.max()) {
                // It was dispatched, so V was at least here, whatever the store remembers.
                self.lanes[ix.0].places.raise_vtime(run.level.pass());
            }
            let Run { task, fence, attempt, .. } = run;
            self.on_ended(HeldEnd { worker, task, fence, attempt, end }, effects);
        }
    }

    /// Counts a reported run as running. False if the shard knows better.
    fn adopt(&mut self, worker: WorkerId, run: Run, effects: &mut Vec<Effect>) -> bool {
        let Some(ix) = self.lane_of(run.lane) else { return false };
        if run.level > self.lanes[ix.0].window.max() {
            return false; // no owner ever gave that place
        }
        if !self.workers.contains_key(&worker) && self.workers.len() >= bounds::WORKERS {
            return false;
        }
        if let Some(live) = self.runs.get_mut(&run.task) {
            let (other, fence) = (live.worker, live.run.fence);
            let place = |run: &Run| (run.lane, run.level);
            if run.fence <= fence || place(&run) != place(&live.run) || run.key != live.run.key {
                return false;
            }
            // Of two runs of a task the newer one counts.
            let task = run.task;
            live.run = run;
            live.worker = worker;
            self.free_slot(other);
            self.hold_slot(worker);
            effects.push(Effect::Stop { worker: other, task, fence });
            return true;
        }
        let lane = &mut self.lanes[ix.0];
        let in_lane = if self.aside.remove(&run.task).is_some() {
            lane.places.raise_vtime(run.level.pass());
            *self.aside_runs.entry((run.lane.queue, run.key.clone())).or_default() += 1;
            None
        } else {
            let found = lane.places.keys().find(&run.key);
            let Some(key) = found.filter(|&key| lane.places.keys().get(key).waiting > 0) else {
                return false;
            };
            if run.level <= lane.window.ack() {
                return false;
            }
            lane.adopt(run.level, run.task, key, run.charge);
            Some(key)
        };
        self.queues[run.lane.queue.0 as usize].running += 1;
        self.hold_slot(worker);
        self.payloads.take(run.task);
        self.runs.insert(run.task, LiveRun { run, worker, in_lane, cancel: false });
        self.hungry.insert(ix);
        true
    }

    /// Whatever could be running has been reported. Long runners that nobody reported are lost.
    pub(super) fn on_open(&mut self, effects: &mut Vec<Effect>) {
        if self.open {
            return;
        }
        self.open = true;
        let ended: BTreeSet<TaskId> = self.held_ends.keys().map(|(task, _)| *task).collect();
        let lost: Vec<Task> = self.aside.values().filter(|task| !ended.contains(&task.id)).cloned().collect();
        for task in lost {
            self.lose_aside(&task, effects);
        }
        for held in std::mem::take(&mut self.held_ends).into_values() {
            if self.runs.contains_key(&held.task) {
                self.on_ended(held, effects);
            } else {
                self.unresolved.insert(held.task);
                self.read_task_for(held.task, Waiter::LateEnd(held), effects);
            }
        }
        for ix in 0..self.lanes.len() {
            self.forget(LaneIx(ix));
        }
        self.begin(effects);
    }

    /// If nothing is in the way any more, tasks may start, and cancels that came too early are looked at.
    pub(super) fn begin(&mut self, effects: &mut Vec<Effect>) {
        if self.may_start() {
            self.ready.extend((0..self.queues.len() as u32).map(QueueId));
            for (request, task) in std::mem::take(&mut self.held_cancels) {
                self.cancel(request, task, effects);
            }
        }
    }

    /// A saved long runner that no worker runs.
    fn lose_aside(&mut self, task: &Task, effects: &mut Vec<Effect>) {
        match life::after(End::Lost, task.attempt, task.max_attempts, false) {
            Next::Retry => {
                self.requeue(&retried(task), None);
                self.after_commit(retry_of(task), effects);
            }
            Next::Finish(outcome) => self.finish(task.id, &task.key, task.lane, None, outcome, effects),
        }
    }

    /// A dispatch that never started: its row waits again, uncharged.
    pub(super) fn on_refused(
        &mut self,
        worker: WorkerId,
        task: TaskId,
        fence: Fence,
        effects: &mut Vec<Effect>,
    ) {
        if self.runs.get(&task).is_some_and(|live| live.cancel && live.run.fence == fence) {
            return self.end_run(task, End::Failed, None, effects); // canceled before it began
        }
        let Some(live) = self.take_run(worker, task, fence) else { return };
        let run = &live.run;
        match (live.in_lane, self.lane_of(run.lane)) {
            (Some(key), Some(ix)) => {
                let Run { charge, attempt, max_attempts, .. } = *run;
                self.lanes[ix.0].give_back(run.level, Entry { task, key, charge, attempt, max_attempts });
                self.hungry.insert(ix);
                self.dirty_lanes.insert(ix);
            }
            (Some(_), None) | (None, _) => {
                self.place_again(run, run.attempt, None, false);
                self.task_changed(task);
            }
        }
        self.ready.insert(live.run.lane.queue);
        let Run { lane, attempt, max_attempts, .. } = live.run;
        let key = live.run.key;
        self.after_commit(Effect::Retried { task, began: false, lane, key, attempt, max_attempts }, effects);
    }

    /// The end of a run counts once, by (task, fence). The others are expected: a worker repeats an end
    /// until it is acknowledged, and reports to a new owner what it reported to the old one.
    pub(super) fn on_ended(&mut self, held: HeldEnd, effects: &mut Vec<Effect>) {
        let HeldEnd { worker, task, fence, .. } = held;
        if !self.open {
            // A worker may well say it again before the gate opens.
            if self.held_ends.len() < bounds::HELD_ENDS {
                self.held_ends.insert((task, fence), held);
            }
            return;
        }
        match self.runs.get(&task) {
            Some(live) if live.run.fence == fence => self.end_run(task, held.end, Some(worker), effects),
            // A newer run of the task is alive: this end is of one that was given up.
            Some(_) => self.after_commit(Effect::Acknowledge { worker, task, fence }, effects),
            // Ended before, or lost, or from before a restart: the store knows.
            None if self.task_reads.len() < self.bounds.task_reads => {
                self.read_task_for(task, Waiter::LateEnd(held), effects);
            }
            None => {} // its worker says it again
        }
    }

    /// All runs of a lost worker end.
    pub(super) fn on_lost(&mut self, worker: WorkerId, effects: &mut Vec<Effect>) {
        let lost: Vec<TaskId> =
            self.runs.iter().filter(|(_, live)| live.worker == worker).map(|(&task, _)| task).collect();
        self.leave_queues(worker);
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.slots = 0;
        }
        for task in lost {
            // What it said before it was lost counts.
            let fence = self.runs.get(&task).map(|live| live.run.fence);
            let held = fence.and_then(|fence| self.held_ends.remove(&(task, fence)));
            self.end_run(task, held.map_or(End::Lost, |held| held.end), None, effects);
        }
        self.workers.remove(&worker);
        // In one commit with the ends of its runs: they are only known to be over if it is.
        if let Some(seat) = self.seats.remove(&worker) {
            self.batch.changes.push(Change::Member { seat, record: None });
        }
    }

    /// A worker that an earlier owner saved is counted on.
    pub(crate) fn count_on(&mut self, worker: WorkerId, seat: Seat) {
        self.seats.insert(worker, seat);
    }

    /// A worker is counted on from now on, or what is remembered of it changes.
    pub(super) fn on_member(
        &mut self,
        worker: WorkerId,
        seat: Seat,
        record: MemberRecord,
        effects: &mut Vec<Effect>,
    ) {
        self.seats.insert(worker, seat.clone());
        let wait_ms = record.wait_ms;
        self.batch.changes.push(Change::Member { seat, record: Some(record) });
        self.after_commit(Effect::MemberSaved { worker, wait_ms }, effects);
    }

    /// Takes a run out of the books and frees its slot.
    fn take_run(&mut self, worker: WorkerId, task: TaskId, fence: Fence) -> Option<LiveRun> {
        let live = self.runs.get(&task)?;
        if live.run.fence != fence || live.worker != worker {
            return None;
        }
        let live = self.runs.remove(&task)?;
        self.queues[live.run.lane.queue.0 as usize].running -= 1;
        if live.in_lane.is_none() {
            self.forget_aside_run(&live.run);
        }
        self.free_slot(live.worker);
        Some(live)
    }

    fn forget_aside_run(&mut self, run: &Run) {
        if let btree_map::Entry::Occupied(mut count) =
            self.aside_runs.entry((run.lane.queue, run.key.clone()))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// A run that counts has ended: retry or finish its task, and acknowledge when that is durable.
    fn end_run(&mut self, task: TaskId, end: End, tell: Option<WorkerId>, effects: &mut Vec<Effect>) {
        let Some((fence, worker)) = self.runs.get(&task).map(|live| (live.run.fence, live.worker)) else {
            return;
        };
        let taken = if self.canary.is(Bug::EndCountedTwice) && end == End::Failed {
            self.runs.get(&task).cloned()
        } else {
            self.take_run(worker, task, fence)
        };
        let Some(live) = taken else { return };
        let run = &live.run;
        let level = live.in_lane.map(|_| run.level);
        if let Some(ix) = self.lane_of(run.lane) {
            if let Some(key) = live.in_lane {
                self.lanes[ix.0].settle(run.level, task, key);
            }
            self.left_lane(ix);
        }
        match life::after(end, run.attempt, run.max_attempts, live.cancel) {
            Next::Retry => {
                self.place_again(run, run.attempt + 1, level, true);
                let (lane, key, max_attempts) = (run.lane, run.key.clone(), run.max_attempts);
                let attempt = run.attempt + 1;
                let retried = Effect::Retried { task, began: true, lane, key, attempt, max_attempts };
                self.after_commit(retried, effects);
            }
            Next::Finish(outcome) => self.finish(task, &run.key, run.lane, level, outcome, effects),
        }
        self.task_changed(task);
        if let Some(worker) = tell {
            let acknowledge = Effect::Acknowledge { worker, task, fence };
            if self.canary.is(Bug::AckBeforeCommit) {
                effects.push(acknowledge);
            } else {
                self.after_commit(acknowledge, effects);
            }
        }
    }

    /// Records a task's end.
    fn finish(
        &mut self,
        task: TaskId,
        key: &Key,
        lane: LaneId,
        level: Option<Level>,
        outcome: Outcome,
        effects: &mut Vec<Effect>,
    ) {
        self.batch.changes.push(Change::Finished { task, lane, level, outcome });
        self.dirty_queues.insert(lane.queue);
        let totals = &mut self.queues[lane.queue.0 as usize].record.totals;
        match outcome {
            Outcome::Succeeded => totals.succeeded += 1,
            Outcome::Failed => totals.failed += 1,
            Outcome::Canceled => totals.canceled += 1,
        }
        self.payloads.take(task);
        self.aside.remove(&task);
        let finished = Effect::Finished { task, lane, key: key.clone(), outcome };
        self.after_commit(finished, effects);
    }

    fn place_again(&mut self, run: &Run, attempt: u16, from: Option<Level>, charged: bool) {
        let row = Row {
            level: run.level,
            task: run.task,
            key: run.key.clone(),
            charge: run.charge,
            attempt,
            max_attempts: run.max_attempts,
        };
        self.requeue_row(run.lane, row, from, charged);
    }

    /// A saved long runner waits again.
    fn requeue(&mut self, task: &Task, from: Option<Level>) {
        self.aside.remove(&task.id);
        let row = Row {
            level: Level::ZERO,
            task: task.id,
            key: task.key.clone(),
            charge: task.charge,
            attempt: task.attempt,
            max_attempts: task.max_attempts,
        };
        self.requeue_row(task.lane, row, from, true);
    }

    /// Gives a task another place: a new seq at the lane's time, ahead of its key's later tasks.
    fn requeue_row(&mut self, lane_id: LaneId, mut row: Row, from: Option<Level>, charged: bool) {
        let ix = self.lane(lane_id);
        let commit = self.batch.id;
        let lane = &mut self.lanes[ix.0];
        let over = self.queues[lane_id.queue.0 as usize].overrides.get(&row.key).copied();
        let key = lane.places.key(&row.key, over.unwrap_or(row.charge.weight));
        row.charge.weight = lane.places.keys().get(key).weight;
        let pass = lane.places.place_again(key, row.charge, lane.ack(), charged);
        row.level = Level::new(pass, self.next_seq);
        self.next_seq += 1;
        lane.chosen(row.level, commit);
        let entry = Entry {
            task: row.task,
            key,
            charge: row.charge,
            attempt: row.attempt,
            max_attempts: row.max_attempts,
        };
        self.batch.rows.push((ix, row.level, entry));
        self.batch.changes.push(Change::Requeued { task: row.task, lane: lane_id, from, row });
        self.dirty_lanes.insert(ix);
    }

    /// A row left this lane: forget keys, save levels, and see whether a long runner holds A back.
    fn left_lane(&mut self, ix: LaneIx) {
        self.dirty_lanes.insert(ix);
        self.hungry.insert(ix);
        self.forget(ix);
        let bound = u64::from(self.bounds.aside_after_ends.max(1));
        while self.lanes[ix.0].stuck_behind().is_some_and(|(_, _, ends)| ends >= bound) {
            if !self.set_aside_first(ix) {
                break;
            }
        }
        self.arm_aside(ix);
    }

    /// Sees to it that a long runner is noticed by time, too.
    fn arm_aside(&mut self, ix: LaneIx) {
        let Some(started) = self.first_stuck(ix) else { return };
        if !self.lanes[ix.0].aside_armed {
            self.lanes[ix.0].aside_armed = true;
            let at = started.plus(self.bounds.aside_after_ms).max(self.now.plus(1));
            self.arm(at, Timer::SetAside(ix));
        }
    }

    /// When the run that holds A back was dispatched, if one does.
    fn first_stuck(&self, ix: LaneIx) -> Option<Millis> {
        let (_, task, _) = self.lanes[ix.0].stuck_behind()?;
        self.runs.get(&task).map(|live| live.run.started)
    }

    pub(super) fn on_aside_timer(&mut self, ix: LaneIx) {
        self.lanes[ix.0].aside_armed = false;
        while self.first_stuck(ix).is_some_and(|started| started.plus(self.bounds.aside_after_ms) <= self.now)
        {
            if !self.set_aside_first(ix) {
                break;
            }
        }
        self.arm_aside(ix);
    }

    /// Moves the row of the run that holds A back to the table of long runners.
    fn set_aside_first(&mut self, ix: LaneIx) -> bool {
        let Some((level, task, _)) = self.lanes[ix.0].stuck_behind() else { return false };
        let Some(live) = self.runs.get_mut(&task) else { return false };
        let Some(key) = live.in_lane.take() else { return false };
        *self.aside_runs.entry((live.run.lane.queue, live.run.key.clone())).or_default() += 1;
        let lane = &mut self.lanes[ix.0];
        let id = lane.id;
        lane.settle(level, task, key);
        self.batch.changes.push(Change::SetAside { task, lane: id, level });
        self.dirty_lanes.insert(ix);
        self.hungry.insert(ix);
        self.task_changed(task);
        true
    }

    pub(super) fn on_cancel(&mut self, request: RequestId, task: TaskId, effects: &mut Vec<Effect>) {
        let waiters = self.task_reads.get(&task).map_or(0, |read| read.waiters());
        if self.task_reads.len() + self.held_cancels.len() >= self.bounds.task_reads
            || waiters >= bounds::WAITERS_PER_TASK
        {
            let refusal = Refusal::limited("too many cancels at once; send this again in a moment");
            effects.push(Effect::Answer { request, answer: Err(refusal) });
        } else if self.may_start() || self.runs.contains_key(&task) {
            self.cancel(request, task, effects);
        } else {
            self.held_cancels.push((request, task));
        }
    }

    fn cancel(&mut self, request: RequestId, task: TaskId, effects: &mut Vec<Effect>) {
        match self.runs.get_mut(&task) {
            Some(live) => {
                let (worker, fence) = (live.worker, live.run.fence);
                if !std::mem::replace(&mut live.cancel, true) {
                    effects.push(Effect::Stop { worker, task, fence });
                }
                effects.push(Effect::Answer { request, answer: Ok(Answer::Stopping) });
            }
            None => self.read_task_for(task, Waiter::Cancel(request), effects),
        }
    }

    /// The store's word on a task that somebody asked about.
    pub(super) fn on_task_known(
        &mut self,
        id: TaskId,
        task: Option<&Task>,
        waiter: Waiter,
        effects: &mut Vec<Effect>,
    ) {
        match waiter {
            Waiter::Cancel(request) if self.runs.contains_key(&id) => self.cancel(request, id, effects),
            Waiter::Cancel(request) => match task {
                Some(task) => {
                    self.withdraw(task, false);
                    self.finish(id, &task.key, task.lane, task.level, Outcome::Canceled, effects);
                    self.answer_after_commit(request, Answer::Canceled, effects);
                }
                None => {
                    let answer = Err(Refusal::not_found(format!("task {id} does not exist, or has ended")));
                    effects.push(Effect::Answer { request, answer });
                }
            },
            Waiter::LateEnd(held) if self.runs.contains_key(&id) => self.on_ended(held, effects),
            Waiter::LateEnd(held) => {
                if let Some(task) = task {
                    self.late_end(task, &held, effects);
                    if let Some(task) = self.aside.get(&id).cloned() {
                        self.lose_aside(&task, effects); // it was of an earlier attempt
                    }
                }
                let HeldEnd { worker, task, fence, .. } = held;
                self.after_commit(Effect::Acknowledge { worker, task, fence }, effects);
            }
        }
    }

    /// The end of a run that nobody counted on any more, of a task that waits. A real result counts; a
    /// failure counts only if its attempt has not been counted already.
    fn late_end(&mut self, task: &Task, held: &HeldEnd, effects: &mut Vec<Effect>) {
        match held.end {
            End::Succeeded | End::FailedForGood => {}
            End::Failed | End::Lost if held.attempt == task.attempt => {}
            End::Failed | End::Lost => return,
        }
        self.withdraw(task, true);
        match life::after(held.end, task.attempt, task.max_attempts, false) {
            Next::Retry => {
                self.requeue(&retried(task), task.level);
                self.after_commit(retry_of(task), effects);
            }
            Next::Finish(outcome) => self.finish(task.id, &task.key, task.lane, task.level, outcome, effects),
        }
    }

    /// A waiting task's row leaves its lane: it was canceled, or had been served before this owner knew.
    fn withdraw(&mut self, task: &Task, served: bool) {
        let Some(ix) = self.lane_of(task.lane) else { return };
        let lane = &mut self.lanes[ix.0];
        if let (Some(level), Some(key)) = (task.level, lane.places.keys().find(&task.key)) {
            if served {
                lane.adopt(level, task.id, key, task.charge);
                lane.settle(level, task.id, key);
            } else {
                lane.withdraw(level, task.id, key);
            }
            self.left_lane(ix);
        }
        self.task_changed(task.id);
    }
}

/// What whoever watches a task is told when it is to be tried again.
fn retry_of(task: &Task) -> Effect {
    let (lane, key, max_attempts) = (task.lane, task.key.clone(), task.max_attempts);
    Effect::Retried { task: task.id, began: true, lane, key, attempt: task.attempt + 1, max_attempts }
}

/// The task on its next attempt.
fn retried(task: &Task) -> Task {
    Task { attempt: task.attempt + 1, ..task.clone() }
}
