//! Filling windows and looking up tasks. A read is emitted only when everything that happened before it
//! was asked for is durable; what happens after that is reconciled when it returns.

use super::parking::ParkedKey;
use super::{Alarm, HeldEnd, LaneIx, Shard};
use crate::backlog::Level;
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Row, Task, Timed, TimerRow};
use crate::messages::Effect;
use crate::names::{Fence, LoadId, Millis, RequestId, TaskId};

/// Whom a read is for.
#[derive(Clone, Debug)]
pub(super) enum LoadFor {
    Lane(LaneIx),
    Timers,
    Parked(ParkedKey),
    Task(TaskId),
}

/// Who waits for the store's word on a task.
#[derive(Clone, Debug)]
pub(super) enum Waiter {
    /// Somebody who wants it canceled; nobody waits for the answer if an earlier owner was asked.
    Cancel(Option<RequestId>),
    Replay(RequestId),
    /// Somebody who wants it to take no longer than this.
    Shorten(RequestId, u64),
    LateEnd(HeldEnd),
    /// A run that was reported while the gate was shut.
    Reported(Fence),
    /// A timer of this level.
    Expire(Level),
    Detach(Level),
}

/// A read of one task.
#[derive(Clone, Debug, Default)]
pub(super) struct TaskRead {
    waiters: Vec<Waiter>,
    /// The task changed since the read was asked for, so what it returns may be old.
    stale: bool,
    failures: u32,
}

impl TaskRead {
    pub(super) fn waiters(&self) -> usize {
        self.waiters.len()
    }
}

impl Shard {
    /// Asks for the reads that windows want.
    pub(super) fn ask_reads(&mut self, effects: &mut Vec<Effect>) {
        while let Some(ix) = self.hungry.pop_first() {
            let lane = &mut self.lanes[ix.0];
            if lane.read_retry.is_some() {
                continue;
            }
            let Some((above, limit)) = lane.window.wants_read(self.bounds.page_rows) else { continue };
            let load = LoadId(self.next_load);
            self.next_load += 1;
            lane.window.read_asked(load);
            let lane = lane.id;
            self.loads.insert(load, LoadFor::Lane(ix));
            let effect = Effect::Load { load, lane, above, limit };
            if self.canary.is(Bug::LoadBeforeCommit) {
                effects.push(effect);
            } else {
                self.after_commit(effect, effects);
            }
        }
        self.ask_timers(effects);
    }

    /// Asks for timers, if more of them should be known.
    fn ask_timers(&mut self, effects: &mut Vec<Effect>) {
        if self.timers.shelf.read_retry.is_some() {
            return;
        }
        let Some((above, limit)) = self.timers.shelf.window.wants_read(self.bounds.page_rows) else { return };
        let load = LoadId(self.next_load);
        self.next_load += 1;
        self.timers.shelf.window.read_asked(load);
        self.loads.insert(load, LoadFor::Timers);
        self.after_commit(Effect::LoadTimers { load, above, limit }, effects);
    }

    pub(super) fn on_timers_loaded(
        &mut self,
        load: LoadId,
        rows: Vec<TimerRow>,
        end: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(LoadFor::Timers) = self.loads.remove(&load) else { return };
        if !self.timers.shelf.window.awaits(load) {
            return; // given up because it took too long
        }
        let foreign = rows.iter().find(|row| row.at.seq() >= self.next_seq || !self.knows_lane(row));
        if let Some(row) = foreign {
            effects.push(Effect::Broken { what: foreign_task(row.task) });
        } else if let Err(what) = self.timers_returned(rows, end) {
            effects.push(Effect::Broken { what });
        }
    }

    fn timers_returned(&mut self, rows: Vec<TimerRow>, end: bool) -> Result<(), String> {
        let rows = rows.into_iter().map(|row| (row.at, (row.task, row.what))).collect();
        let returned = self.timers.shelf.read_returned(rows, end, self.durable_seq);
        returned.map_err(|what| format!("timers: {what}"))
    }

    /// Whether a timer's task can be placed when it is due.
    fn knows_lane(&self, row: &TimerRow) -> bool {
        match &row.what {
            Timed::Due(lane, _) => self.lane_of(*lane).is_some(),
            Timed::Expire | Timed::Detach | Timed::Forget { .. } => true,
        }
    }

    pub(super) fn on_loaded(&mut self, load: LoadId, rows: Vec<Row>, end: bool, effects: &mut Vec<Effect>) {
        let Some(LoadFor::Lane(ix)) = self.loads.remove(&load) else { return };
        let lane = &mut self.lanes[ix.0];
        self.hungry.insert(ix);
        if !lane.window.awaits(load) {
            return; // given up because it took too long
        }
        let ack = lane.window.ack();
        let foreign = rows.iter().find(|row| row.level.seq() >= self.next_seq).map(|row| row.task);
        if let Some(task) = foreign {
            effects.push(Effect::Broken { what: foreign_task(task) });
        } else if let Err(what) = lane.read_returned(rows, end, self.durable_seq) {
            effects.push(Effect::Broken { what });
        }
        let queue = lane.id.queue;
        self.wake(queue);
        self.save_empty(ix, ack);
    }

    pub(super) fn on_load_failed(&mut self, load: LoadId) {
        match self.loads.remove(&load) {
            Some(LoadFor::Lane(ix)) => {
                let lane = &mut self.lanes[ix.0];
                if lane.window.awaits(load) {
                    lane.window.read_failed();
                    let at = retry_at(self.now, lane.read_failures);
                    lane.read_failures = lane.read_failures.saturating_add(1);
                    lane.read_retry = Some(at);
                    self.arm(at, Alarm::ReadLane(ix));
                }
            }
            Some(LoadFor::Parked(at)) => self.on_parked_failed(load, at),
            Some(LoadFor::Timers) if !self.timers.shelf.window.awaits(load) => {}
            Some(LoadFor::Timers) => {
                self.timers.shelf.window.read_failed();
                let at = retry_at(self.now, self.timers.shelf.read_failures);
                self.timers.shelf.read_failures = self.timers.shelf.read_failures.saturating_add(1);
                self.timers.shelf.read_retry = Some(at);
                self.arm(at, Alarm::ReadTimers);
            }
            Some(LoadFor::Task(task)) => {
                if let Some(read) = self.task_reads.get_mut(&task) {
                    let at = retry_at(self.now, read.failures);
                    read.failures = read.failures.saturating_add(1);
                    self.arm(at, Alarm::ReadTask(task));
                }
            }
            None => {}
        }
    }

    /// Looks a task up in the store, for one more waiter.
    pub(super) fn read_task_for(&mut self, task: TaskId, waiter: Waiter, effects: &mut Vec<Effect>) {
        if let (Waiter::LateEnd(held), Some(read)) = (&waiter, self.task_reads.get(&task))
            && read.waiters.iter().any(|w| matches!(w, Waiter::LateEnd(other) if other.fence == held.fence))
        {
            return; // said again
        }
        let read = self.task_reads.entry(task).or_default();
        read.waiters.push(waiter);
        if read.waiters.len() == 1 {
            self.ask_task(task, effects);
        }
    }

    pub(super) fn ask_task(&mut self, task: TaskId, effects: &mut Vec<Effect>) {
        let Some(read) = self.task_reads.get_mut(&task) else { return };
        read.stale = false;
        let load = LoadId(self.next_load);
        self.next_load += 1;
        self.loads.insert(load, LoadFor::Task(task));
        self.after_commit(Effect::LoadTask { load, task }, effects);
    }

    /// A task ended or moved: what a pending read of it returns may be old.
    pub(super) fn task_changed(&mut self, task: TaskId) {
        if let Some(read) = self.task_reads.get_mut(&task) {
            read.stale = true;
        }
    }

    pub(super) fn on_task_loaded(&mut self, load: LoadId, task: Option<Task>, effects: &mut Vec<Effect>) {
        let Some(LoadFor::Task(id)) = self.loads.remove(&load) else { return };
        if self.task_reads.get(&id).is_some_and(|read| read.stale) {
            self.ask_task(id, effects);
            return;
        }
        if let Some(task) = &task
            && (task.place.level().is_some_and(|level| level.seq() >= self.next_seq)
                || self.lane_of(task.lane).is_none())
        {
            effects.push(Effect::Broken { what: foreign_task(id) });
            return;
        }
        let Some(read) = self.task_reads.remove(&id) else { return };
        let mut waiters = read.waiters.into_iter();
        for waiter in waiters.by_ref() {
            let changes = self.batch.changes.len();
            self.on_task_known(id, task.as_ref(), waiter, effects);
            if self.batch.changes.len() > changes {
                break; // it has ended or moved: the others must look again
            }
        }
        for waiter in waiters {
            self.read_task_for(id, waiter, effects);
        }
        if !self.task_reads.contains_key(&id) && self.unresolved.remove(&id) {
            self.begin(effects);
        }
    }
}

/// An owner that was fenced and does not know it yet may read what its successor wrote.
pub(super) fn foreign_task(task: TaskId) -> String {
    format!("the store holds task {task} at a place that this owner never gave: another owner has the shard")
}

pub(super) fn retry_at(now: Millis, failures: u32) -> Millis {
    let wait = bounds::READ_RETRY_MS << failures.min(16);
    now.plus(wait.min(bounds::READ_RETRY_MAX_MS))
}
