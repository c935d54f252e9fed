//! What the loop tells those who watch: that a task was accepted, starts, says something, waits again or has ended.

use bytes::Bytes;
use evenhand_api::v1;
use evenhand_core::Run;
use evenhand_core::life::{End, Outcome};
use evenhand_core::names::{Fence, Key, LaneId, TaskId, WorkerId};
use evenhand_store::Store;

use super::{Owned, SHARD};
use crate::events::{Of, Recent, Subject};
use crate::mailbox::Ending;

/// What is said of a run of which nothing was heard any more.
const LOST: &str = "its worker was lost";
/// What is said of a run that was given back.
const NOT_STARTED: &str = "its worker did not start it";

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

    pub(super) fn keep_ending(&mut self, task: TaskId, fence: Fence, of: Of, end: End, ending: Ending) {
        let outcome = match end {
            End::Succeeded => Outcome::Succeeded,
            End::Failed | End::FailedForGood | End::Lost => Outcome::Failed,
        };
        let Ending { result, error } = ending;
        if self.endings.get(&task).is_some_and(|(kept, _)| *kept > fence) {
            return; // of a run before that one
        }
        self.endings.insert(task, (fence, Recent { outcome, of, result, error }));
    }

    /// What is known of a task by one of its runs.
    pub(super) fn about(&self, run: &Run) -> Option<Of> {
        let queue = self.owner.shard().queue_name(run.lane.queue)?.clone();
        let (key, priority) = (run.key.clone(), run.lane.priority);
        Some(Of { queue, key, priority, attempts: Some((run.attempt, run.max_attempts)) })
    }

    pub(super) fn tell_accepted(&mut self, ids: &[TaskId], accepted: Vec<Of>) {
        let now = self.shell.clock.now();
        for (&task, of) in ids.iter().zip(accepted) {
            let subject = Subject { task, queue: &of.queue, key: &of.key };
            if self.shell.events.is_watched(subject) {
                let queued = v1::TaskState::Queued.into();
                let told = v1::Task { state: queued, accepted_ms: now.0, ..of.task(SHARD, task) };
                self.shell.events.tell(now, subject, v1::task_event::Event::Task(told));
            }
        }
    }

    pub(super) fn tell_started(&mut self, worker: WorkerId, run: &Run) {
        let Some(queue) = self.owner.shard().queue_name(run.lane.queue) else { return };
        let subject = Subject { task: run.task, queue, key: &run.key };
        if self.shell.events.is_watched(subject)
            && let Some(of) = self.about(run)
        {
            let seat = self.owner.seat(worker).map_or_else(String::new, |seat| seat.as_str().into());
            let running = v1::TaskState::Running.into();
            let told = v1::Task { seat, state: running, ..of.task(SHARD, run.task) };
            self.shell.events.tell(self.shell.clock.now(), subject, v1::task_event::Event::Task(told));
        }
    }

    /// A run has ended, or never began, but its task has not ended: it waits again.
    pub(super) fn retried(
        &mut self,
        task: TaskId,
        began: bool,
        lane: LaneId,
        key: Key,
        attempts: (u16, u16),
    ) {
        self.progress.remove(&task);
        let error = self.endings.remove(&task).map(|(_, recent)| recent.error);
        let Some(queue) = self.owner.shard().queue_name(lane.queue) else { return };
        let subject = Subject { task, queue, key: &key };
        if self.shell.events.is_watched(subject) {
            let (queue, key, priority) = (queue.clone(), key.clone(), lane.priority);
            let told = Of { queue, key, priority, attempts: Some(attempts) }.task(SHARD, task);
            let error = error.unwrap_or_else(|| if began { LOST.into() } else { NOT_STARTED.into() });
            let told = v1::Task { state: v1::TaskState::Queued.into(), error, ..told };
            self.shell.events.tell(self.shell.clock.now(), subject, v1::task_event::Event::Task(told));
        }
    }

    pub(super) fn finished(&mut self, task: TaskId, lane: LaneId, key: Key, outcome: Outcome) {
        self.progress.remove(&task);
        let ending = self.endings.remove(&task).map(|(_, recent)| Recent { outcome, ..recent });
        let unknown = || {
            let error = if outcome == Outcome::Failed { LOST.into() } else { String::new() };
            let queue = self.owner.shard().queue_name(lane.queue)?.clone();
            let of = Of { queue, key, priority: lane.priority, attempts: None };
            Some(Recent { outcome, of, result: Bytes::new(), error })
        };
        if let Some(recent) = ending.or_else(unknown) {
            self.shell.events.ended(self.shell.clock.now(), task, recent);
        }
    }
}
