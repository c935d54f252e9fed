//! A task to submit, and which tasks to look at.

use std::time::Duration;

use bytes::Bytes;
use evenhand_api::{convert, v1};
use evenhand_core::Refusal;
use serde::Serialize;

use super::TaskState;

/// A task to submit.
///
/// ```
/// # use std::time::Duration;
/// use evenhand::NewTask;
///
/// let task = NewTask::json(&["report.pdf"])?.key("acme").max_duration(Duration::from_secs(60));
/// # Ok::<(), evenhand::Refusal>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct NewTask {
    pub(crate) task: v1::NewTask,
}

impl NewTask {
    /// A task with these bytes.
    pub fn new(payload: impl Into<Bytes>) -> NewTask {
        NewTask { task: v1::NewTask { payload: payload.into(), ..v1::NewTask::default() } }
    }

    /// A task with this value, as JSON; its content type says so.
    pub fn json(value: &impl Serialize) -> Result<NewTask, Refusal> {
        match serde_json::to_vec(value) {
            Ok(bytes) => Ok(NewTask::new(bytes).content_type("application/json")),
            Err(error) => Err(Refusal::invalid("payload", format!("cannot be written as JSON: {error}"))),
        }
    }

    /// What the payload is, as HTTP says it. Handed on to whoever runs the task; nothing else depends on it.
    pub fn content_type(mut self, content_type: impl Into<String>) -> NewTask {
        self.task.content_type = content_type.into();
        self
    }

    /// Whom to charge. Tasks that name nobody share one key.
    pub fn key(mut self, key: impl Into<String>) -> NewTask {
        self.task.key = key.into();
        self
    }

    /// The key's weight from now on, in thousandths.
    pub fn weight_thousandths(mut self, weight: u32) -> NewTask {
        self.task.weight_thousandths = Some(weight);
        self
    }

    /// 0 (first) to 9; 5 if nobody says.
    pub fn priority(mut self, priority: u32) -> NewTask {
        self.task.priority = Some(priority);
        self
    }

    /// How often it may be tried; 5 if nobody says.
    pub fn max_attempts(mut self, attempts: u32) -> NewTask {
        self.task.max_attempts = Some(attempts);
        self
    }

    /// Bytes of its payload.
    pub fn payload_bytes(&self) -> usize {
        self.task.payload.len()
    }

    /// How long one run may take.
    pub fn max_duration(mut self, duration: Duration) -> NewTask {
        self.task.max_duration_ms = Some(duration.as_millis() as u64);
        self
    }

    /// Says what a server would say of this task, whatever else it has: spares a call, or spoiling one for others.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        // Without the payload, which would be copied.
        let task = convert::new_task(v1::NewTask { payload: Bytes::new(), ..self.task.clone() })?;
        task.check(self.payload_bytes())
    }
}

impl From<v1::NewTask> for NewTask {
    fn from(task: v1::NewTask) -> NewTask {
        NewTask { task }
    }
}

/// Which tasks to list or to watch: all, of this queue, of this key.
///
/// ```
/// use evenhand::{Filter, TaskState};
///
/// let running_for_acme = Filter::all().queue("render").key("acme").state(TaskState::Running);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub(super) queue: String,
    pub(super) key: String,
    pub(super) state: TaskState,
}

impl Filter {
    /// All of them.
    pub fn all() -> Filter {
        Filter::default()
    }

    /// Of this queue only.
    pub fn queue(mut self, queue: impl Into<String>) -> Filter {
        self.queue = queue.into();
        self
    }

    /// Of this key only.
    pub fn key(mut self, key: impl Into<String>) -> Filter {
        self.key = key.into();
        self
    }

    /// Queued or running only. For lists: a watch tells every state.
    pub fn state(mut self, state: TaskState) -> Filter {
        self.state = state;
        self
    }
}

impl From<Filter> for v1::ListRequest {
    /// The first page, of the usual size.
    fn from(filter: Filter) -> v1::ListRequest {
        let Filter { queue, key, state } = filter;
        v1::ListRequest { queue, key, state: state.into(), ..v1::ListRequest::default() }
    }
}
