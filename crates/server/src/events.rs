//! Who watches which task, and how the last ones ended. All of it is in memory and bounded: a watcher that is
//! slow misses lines and is told how many; of the tasks that have ended the last ones are remembered, so that a
//! client that asks a moment later still gets the result.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use evenhand_api::{convert, v1};
use evenhand_core::life::Outcome;
use evenhand_core::names::{Key, Millis, Priority, QueueName, ShardId, TaskId};
use tokio::sync::mpsc;

/// Events that wait for a slow watcher.
pub(crate) const EVENTS_PER_WATCHER: usize = 256;
/// Watchers of all tasks.
const WATCHERS: usize = 100_000;
/// Ended tasks that are remembered, and the bytes that they may take.
const RECENT: usize = 100_000;
const RECENT_BYTES: usize = 64 * 1024 * 1024;

/// Somebody who watches a task.
#[derive(Debug)]
pub(crate) struct Watcher {
    events: mpsc::Sender<v1::TaskEvent>,
    dropped: u64,
}

impl Watcher {
    pub(crate) fn new() -> (Watcher, mpsc::Receiver<v1::TaskEvent>) {
        let (events, watched) = mpsc::channel(EVENTS_PER_WATCHER);
        (Watcher { events, dropped: 0 }, watched)
    }

    /// False if nobody listens any more.
    fn tell(&mut self, at: Millis, event: v1::task_event::Event) -> bool {
        let dropped = Some(v1::task_event::Event::Dropped(self.dropped));
        if self.dropped > 0 && self.events.try_send(v1::TaskEvent { at_ms: at.0, event: dropped }).is_ok() {
            self.dropped = 0;
        }
        match self.events.try_send(v1::TaskEvent { at_ms: at.0, event: Some(event) }) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.dropped += 1;
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }
}

/// How a task ended.
#[derive(Clone, Debug)]
pub(crate) struct Recent {
    pub(crate) outcome: Outcome,
    pub(crate) of: Option<Of>,
    pub(crate) result: Bytes,
    pub(crate) error: String,
}

/// What is known of an ended task by one of its runs.
#[derive(Clone, Debug)]
pub(crate) struct Of {
    pub(crate) queue: QueueName,
    pub(crate) key: Key,
    pub(crate) priority: Priority,
    pub(crate) attempt: u16,
    pub(crate) max_attempts: u16,
}

impl Recent {
    fn bytes(&self) -> usize {
        size_of::<Recent>() + self.result.len() + self.error.len()
    }

    /// The same on the wire.
    pub(crate) fn task(self, shard: ShardId, task: TaskId) -> v1::Task {
        let state = match self.outcome {
            Outcome::Succeeded => v1::TaskState::Succeeded,
            Outcome::Failed => v1::TaskState::Failed,
            Outcome::Canceled => v1::TaskState::Canceled,
        };
        let known = self.of.map_or_else(v1::Task::default, |of| v1::Task {
            queue: of.queue.as_str().into(),
            key: of.key.as_str().into(),
            priority: of.priority.0.into(),
            attempt: of.attempt.into(),
            max_attempts: of.max_attempts.into(),
            ..v1::Task::default()
        });
        v1::Task {
            id: convert::task_id(shard, task),
            state: state.into(),
            result: (self.outcome == Outcome::Succeeded).then_some(self.result),
            error: self.error,
            ..known
        }
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Events {
    watchers: HashMap<TaskId, Vec<Watcher>>,
    watching: usize,
    recent: HashMap<TaskId, Recent>,
    order: VecDeque<TaskId>,
    recent_bytes: usize,
}

impl Events {
    /// Beyond the bound nobody more is let in: dropping the watcher ends its stream.
    pub(crate) fn watch(&mut self, task: TaskId, watcher: Watcher) {
        if self.watching < WATCHERS {
            self.watching += 1;
            self.watchers.entry(task).or_default().push(watcher);
        }
    }

    pub(crate) fn is_watched(&self, task: TaskId) -> bool {
        !self.watchers.is_empty() && self.watchers.contains_key(&task)
    }

    pub(crate) fn tell(&mut self, at: Millis, task: TaskId, event: &v1::task_event::Event) {
        if let Some(watchers) = self.watchers.get_mut(&task) {
            let before = watchers.len();
            watchers.retain_mut(|watcher| watcher.tell(at, event.clone()));
            self.watching -= before - watchers.len();
            if watchers.is_empty() {
                self.watchers.remove(&task);
            }
        }
    }

    /// A task has ended: its watchers get their last event, and whoever asks later finds it for a while.
    pub(crate) fn ended(&mut self, at: Millis, shard: ShardId, task: TaskId, ended: Recent) {
        if self.is_watched(task) {
            let event = v1::task_event::Event::Task(ended.clone().task(shard, task));
            self.tell(at, task, &event);
            self.watching -= self.watchers.remove(&task).map_or(0, |watchers| watchers.len());
        }
        self.recent_bytes += ended.bytes();
        if let Some(before) = self.recent.insert(task, ended) {
            self.recent_bytes -= before.bytes();
        } else {
            self.order.push_back(task);
        }
        while self.recent.len() > RECENT || self.recent_bytes > RECENT_BYTES {
            let Some(oldest) = self.order.pop_front() else { break };
            self.recent_bytes -= self.recent.remove(&oldest).map_or(0, |recent| recent.bytes());
        }
    }

    pub(crate) fn recent(&self, task: TaskId) -> Option<&Recent> {
        self.recent.get(&task)
    }

    /// Forgets those who no longer listen, also to tasks of which nothing is heard.
    pub(crate) fn sweep(&mut self) {
        self.watchers.retain(|_, watchers| {
            watchers.retain(|watcher| !watcher.events.is_closed());
            !watchers.is_empty()
        });
        self.watching = self.watchers.values().map(Vec::len).sum();
    }
}
