//! What the loop tells those who watch: that a task was accepted, starts, says something, waits again or has ended.

use std::sync::Arc;

use evenhand_api::{convert, v1};
use evenhand_core::change::EndRecord;
use evenhand_core::explain::Standing;
use evenhand_core::names::{Fence, Key, LaneId, Millis, TaskId, WorkerId};
use evenhand_core::owner::GateView;
use evenhand_core::{Run, Task};
use evenhand_store::Store;

use super::{Accepting, Back, Owned, SHARD};
use crate::clients::to_wire;
use crate::events::{Of, Recent, Subject};
use crate::mailbox::RunTime;

/// What is said of a run that was given back.
pub(super) const NOT_STARTED: &str = "its worker did not start it";

impl<S: Store + Clone + 'static> Owned<'_, S> {
    pub(super) fn on_output(&mut self, task: TaskId, fence: Fence, lines: Vec<String>, dropped: u64) {
        let Some(run) = self.owner.shard().run(task).filter(|run| run.fence == fence) else { return };
        let Some(queue) = self.owner.shard().queue_name(run.lane.queue) else { return };
        let of = Subject { task, queue, key: &run.key };
        let events = &mut self.shell.events;
        if events.is_watched(of) {
            let now = self.shell.clock.now();
            for line in lines {
                events.tell(now, of, v1::task_event::Event::Output(line));
            }
            if dropped > 0 {
                events.tell(now, of, v1::task_event::Event::Dropped(dropped));
            }
        }
    }

    pub(super) fn on_progress(&mut self, task: TaskId, fence: Fence, progress: v1::Progress) {
        let run = self.owner.shard().run(task).filter(|run| run.fence == fence);
        let Some(run) = run else { return };
        let Some(queue) = self.owner.shard().queue_name(run.lane.queue) else { return };
        let of = Subject { task, queue, key: &run.key };
        if self.shell.events.is_watched(of) {
            let event = v1::task_event::Event::Progress(progress.clone());
            self.shell.events.tell(self.shell.clock.now(), of, event);
        }
        self.progress.insert(task, (fence, progress));
    }

    /// What is known of a task by one of its runs.
    pub(super) fn about(&self, run: &Run) -> Option<Of> {
        let queue = self.owner.shard().queue_name(run.lane.queue)?.clone();
        let (key, priority) = (run.key.clone(), run.lane.priority);
        Some(Of { queue, key, priority, attempts: Some((run.attempt, run.max_attempts)) })
    }

    pub(super) fn tell_accepted(&mut self, ids: &[(TaskId, bool)], accepted: Vec<Accepting>) {
        let now = self.shell.clock.now();
        let new = ids.iter().zip(accepted).filter(|((_, new), _)| *new);
        for (&(task, _), Accepting { of, due }) in new {
            let subject = Subject { task, queue: &of.queue, key: &of.key };
            if self.shell.events.is_watched(subject) {
                let told = v1::Task { accepted_ms: now.0, ..waits(of.task(SHARD, task), due) };
                self.shell.events.tell(now, subject, v1::task_event::Event::Task(told));
            }
        }
    }

    /// A run starts, or has less time than before.
    pub(super) fn tell_started(&mut self, worker: WorkerId, run: &Run) {
        let Some(queue) = self.owner.shard().queue_name(run.lane.queue) else { return };
        let subject = Subject { task: run.task, queue, key: &run.key };
        if self.shell.events.is_watched(subject)
            && let Some(of) = self.about(run)
        {
            let seat = self.owner.seat(worker).map_or_else(String::new, |seat| seat.as_str().into());
            let running = v1::TaskState::Running.into();
            let mut told = v1::Task { seat, state: running, ..of.task(SHARD, run.task) };
            self.time_of(run).say(&mut told);
            self.shell.events.tell(self.shell.clock.now(), subject, v1::task_event::Event::Task(told));
        }
    }

    /// A run has less time than before: those who watch its task are told, unless they were.
    pub(super) fn tell_cut(&mut self, worker: WorkerId, task: TaskId, fence: Fence, limit_ms: u64) {
        if self.cuts.insert(task, (fence, limit_ms)) == Some((fence, limit_ms)) {
            return;
        }
        if let Some(cut) = self.owner.shard().cut_of(task) {
            self.shell.metrics.cut(cut.why);
        }
        if let Some(run) = self.owner.shard().run(task).filter(|run| run.fence == fence).cloned() {
            self.tell_started(worker, &run);
        }
    }

    /// What time a run has.
    pub(super) fn time_of(&self, run: &Run) -> RunTime {
        let shard = self.owner.shard();
        let limit_ms = Some(run.limit_ms).filter(|ms| *ms > 0);
        RunTime {
            limit_ms,
            deadline_ms: limit_ms.map(|ms| run.started.0.saturating_add(ms)),
            class_ms: shard.class_of_run(run.task),
            cut: shard.cut_of(run.task).map(convert::run_cut),
        }
    }

    /// A task waits (again), for a time or for its turn.
    pub(super) fn tell_waits(
        &mut self,
        task: TaskId,
        lane: LaneId,
        key: Key,
        attempts: Option<(u16, u16)>,
        due: Option<Millis>,
        error: &str,
    ) {
        let Some(queue) = self.owner.shard().queue_name(lane.queue) else { return };
        let subject = Subject { task, queue, key: &key };
        if self.shell.events.is_watched(subject) {
            let (queue, key, priority) = (queue.clone(), key.clone(), lane.priority);
            let told = waits(Of { queue, key, priority, attempts }.task(SHARD, task), due);
            let told = v1::Task { error: error.into(), ..told };
            self.shell.events.tell(self.shell.clock.now(), subject, v1::task_event::Event::Task(told));
        }
    }

    /// When the start gate opens, or waits for others than before, so do the tasks that wait: those who watch one are
    /// told how it stands.
    pub(super) fn look_at_gate(&mut self) {
        let gate = waited_for(self.owner.gate());
        let is_news = self.shell.gate_told.replace(gate.clone()).is_some_and(|told| told != gate);
        let watched: Vec<TaskId> = if is_news { self.shell.events.watched().collect() } else { Vec::new() };
        if watched.is_empty() {
            return;
        }
        let (store, back) = (self.shell.store.clone(), self.to_back.clone());
        tokio::spawn(async move {
            for task in watched {
                // Who is not told now is told when it starts.
                if let Ok(Some(task)) = store.read_task(SHARD, task).await
                    && back.send(Back::Watched(Box::new(task))).is_err()
                {
                    return;
                }
            }
        });
    }

    /// Says how a task stands that waits.
    pub(super) fn tell_again(&mut self, task: Task) {
        let (id, key) = (task.id, task.key.clone());
        let Some(queue) = self.owner.shard().queue_name(task.lane.queue).cloned() else { return };
        let Some(explained) = self.explain(vec![task]).pop() else { return };
        if let Standing::Waiting { .. } = explained.standing {
            let subject = Subject { task: id, queue: &queue, key: &key };
            let told = v1::task_event::Event::Task(to_wire(explained));
            self.shell.events.tell(self.shell.clock.now(), subject, told);
        }
    }

    pub(super) fn finished(&mut self, task: TaskId, lane: LaneId, max_attempts: u16, end: Arc<EndRecord>) {
        self.progress.remove(&task);
        self.cuts.remove(&task);
        if let Some(last) = &end.last {
            self.shell.metrics.run_ended(last.end);
        }
        let Some(queue) = self.owner.shard().queue_name(lane.queue).cloned() else { return };
        // What the store remembers need not be remembered here.
        let keep = self.owner.shard().settings(&queue).settings.retention_ms == 0;
        let attempts = end.last.as_ref().map(|last| (last.attempt, max_attempts));
        let of = Of { queue, key: end.key.clone(), priority: lane.priority, attempts };
        self.shell.events.ended(self.shell.clock.now(), task, Recent { of, end }, keep);
    }
}

/// Of a gate, what tasks wait for.
pub(super) fn waited_for(gate: GateView) -> GateView {
    let absent = if gate.open { Vec::new() } else { gate.absent };
    GateView { absent, opens_in_ms: 0, members: 0, ..gate }
}

/// A task that waits: for a time, if it is due at one.
fn waits(task: v1::Task, due: Option<Millis>) -> v1::Task {
    let state = if due.is_some() { v1::TaskState::Scheduled } else { v1::TaskState::Queued };
    v1::Task { state: state.into(), due_ms: due.map(|due| due.0), ..task }
}
