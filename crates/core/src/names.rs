//! The names of things: ids as newtypes, and the two names users choose (queue and key), validated once
//! where they enter so that the rest of the core can rely on them.

use std::fmt;
use std::sync::Arc;

use crate::bounds;
use crate::refusal::Refusal;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// Milliseconds since some fixed moment. The core never asks what time it is; it is told.
    Millis(u64)
);
number!(
    /// A task, unique in its shard: the seq it was accepted with.
    TaskId(u64)
);
number!(
    /// A queue, by number: short enough to stand in every row of the store.
    QueueId(u32)
);
number!(
    /// The shard that a queue lives on.
    ShardId(u32)
);
number!(
    /// The number that fences a shard's owner: each take-over raises it.
    Epoch(u64)
);
number!(
    /// One life of a worker, as an owner numbers those it knows.
    WorkerId(u64)
);
number!(
    /// A connection of a worker, as its server numbers them.
    SessionId(u64)
);
number!(
    /// A store, for ever: drawn when it is first used.
    StoreId(u64)
);
number!(
    /// What a caller named its request, digested by the edge: the same name again is the same request.
    RequestKey(u128)
);
number!(
    /// A caller's request, as the server numbers it; answers carry it back.
    RequestId(u64)
);
number!(
    /// A group commit, numbered within one life of the shard.
    CommitId(u64)
);
number!(
    /// A read asked of the store, numbered within one life of the shard.
    LoadId(u64)
);
number!(
    /// 0 is served first, 9 last; strict.
    Priority(u8)
);
number!(
    /// The duration class of a task: 0 is the shortest.
    Class(u8)
);

impl TaskId {
    /// Set in the ids of interactive tasks, of which the store knows nothing. Numbers of others are far below.
    const INTERACTIVE: u64 = 1 << 62;

    /// The id of the interactive task that this dispatch starts.
    pub(crate) fn interactive(dispatch: u64) -> TaskId {
        TaskId(TaskId::INTERACTIVE | dispatch)
    }

    /// It is an interactive one.
    pub fn is_interactive(self) -> bool {
        self.0 & TaskId::INTERACTIVE != 0
    }
}

impl Millis {
    /// So many milliseconds later; the end of time if that is later still.
    pub(crate) fn plus(self, ms: u64) -> Millis {
        Millis(self.0.saturating_add(ms))
    }
}

impl Priority {
    /// The priority of a task that does not say.
    pub const DEFAULT: Priority = Priority(5);
}

/// One ordered backlog: (queue, priority, class).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId {
    /// The queue it belongs to.
    pub queue: QueueId,
    /// Its priority.
    pub priority: Priority,
    /// Its duration class.
    pub class: Class,
}

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.queue, self.priority, self.class)
    }
}

/// An owner's time with a shard. The nonce tells two apart that have the same epoch, because the store was set back
/// to an old copy in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation {
    /// Its epoch.
    pub epoch: Epoch,
    /// Drawn at random.
    pub nonce: u64,
}

/// A set of workers, as an owner told it to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerSetId {
    /// Whose it is.
    pub incarnation: Incarnation,
    /// Which of its sets, counted.
    pub version: u64,
    /// Over the seats and lives of all who are in it, in any order.
    pub hash: u64,
}

/// Identifies one run of a task for ever: a later run of the same task has a higher fence. It grows
/// without a write, because the epoch does the durable part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence {
    /// The epoch of the owner that dispatched it.
    pub epoch: Epoch,
    /// The dispatch, counted within that epoch.
    pub dispatch: u64,
    /// That owner's nonce: if the store is set back to an old copy, epochs and dispatches come again, fences do not.
    pub nonce: u64,
}

impl Fence {
    /// The owner that dispatched it.
    pub fn incarnation(self) -> Incarnation {
        Incarnation { epoch: self.epoch, nonce: self.nonce }
    }
}

/// One life of a seat. A later one with the same machine token proves the earlier one dead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Life {
    /// Counted in the seat's lock file: a process and its guardian.
    pub process: u64,
    /// How often that process has joined the shard anew, each time after its runs there were ended.
    pub rejoin: u32,
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rejoin == 0 { self.process.fmt(f) } else { write!(f, "{}.{}", self.process, self.rejoin) }
    }
}

/// A worker's stable name, under the same rule as a queue's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat(Arc<str>);

impl Seat {
    /// Checks a name that a user chose.
    pub fn new(name: &str) -> Result<Self, Refusal> {
        plain_name("seat", "gpu-7", name).map(Seat)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
fn plain_name(field: &str, example: &str, name: &str) -> Result<Arc<str>, Refusal> {
    if name.is_empty() {
        return Err(Refusal::invalid(field, format!("is empty; give a name such as `{example}`")));
    }
    if name.len() > bounds::NAME_BYTES {
        let (is, most) = (name.len(), bounds::NAME_BYTES);
        return Err(Refusal::too_large(field, format!("has {is} bytes; at most {most} are allowed")));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err(Refusal::invalid(field, format!("{name:?} must begin with a letter or a digit")));
    }
    match name.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
        Some(bad) => {
            Err(Refusal::invalid(field, format!("contains {bad:?}; use letters, digits, `.`, `_` and `-`")))
        }
        None => Ok(name.into()),
    }
}

/// A queue's name: letters, digits, `.`, `_` and `-`, beginning with a letter or digit, so that it can
/// stand in a URL as it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueName(Arc<str>);

impl QueueName {
    /// Checks a name that a user chose.
    pub fn new(name: &str) -> Result<Self, Refusal> {
        plain_name("queue", "render", name).map(QueueName)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whom a task is charged to. The empty key is the shared one of tasks that name none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// Checks a key that a user chose: any text without control characters. It stands in no URL path.
    pub fn new(key: &str) -> Result<Self, Refusal> {
        if key.len() > bounds::KEY_BYTES {
            let (is, most) = (key.len(), bounds::KEY_BYTES);
            return Err(Refusal::too_large("key", format!("has {is} bytes; at most {most} are allowed")));
        }
        match key.chars().find(|c| c.is_control()) {
            Some(bad) => {
                Err(Refusal::invalid("key", format!("contains the control character {bad:?}; remove it")))
            }
            None => Ok(Key(key.into())),
        }
    }

    /// The key of tasks that name none.
    pub fn shared() -> Self {
        Key("".into())
    }

    /// The key's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("(shared)") } else { f.write_str(&self.0) }
    }
}

/// The name of an input file, as it stands in a run's directory: one name and no path, so that no file can be placed
/// anywhere else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileName(Arc<str>);

impl FileName {
    /// Checks a name that a user chose.
    pub fn new(name: &str) -> Result<Self, Refusal> {
        const FIELD: &str = "name";
        if name.is_empty() {
            return Err(Refusal::invalid(FIELD, "is empty; give a name such as `page.html`"));
        }
        if name.len() > bounds::FILE_NAME_BYTES {
            let (is, most) = (name.len(), bounds::FILE_NAME_BYTES);
            return Err(Refusal::too_large(FIELD, format!("has {is} bytes; at most {most} are allowed")));
        }
        if matches!(name, "." | "..") {
            return Err(Refusal::invalid(FIELD, format!("{name:?} is a directory; give the name of a file")));
        }
        match name.chars().find(|c| *c == '/' || c.is_control()) {
            Some('/') => Err(Refusal::invalid(FIELD, format!("{name:?} is a path; give a name without `/`"))),
            Some(bad) => {
                Err(Refusal::invalid(FIELD, format!("contains the control character {bad:?}; remove it")))
            }
            None => Ok(FileName(name.into())),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a payload is, as HTTP says it. Nobody need say it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ContentType(Named);

/// Most payloads need no text of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
enum Named {
    #[default]
    Nothing,
    Json,
    Other(Arc<str>),
}

impl ContentType {
    /// What JSON is called.
    pub const JSON: &str = "application/json";

    /// Checks what a user said; the empty text is nothing.
    pub fn new(text: &str) -> Result<Self, Refusal> {
        const FIELD: &str = "content_type";
        if text.len() > bounds::CONTENT_TYPE_BYTES {
            let (is, most) = (text.len(), bounds::CONTENT_TYPE_BYTES);
            return Err(Refusal::too_large(FIELD, format!("has {is} bytes; at most {most} are allowed")));
        }
        match text {
            "" => Ok(ContentType(Named::Nothing)),
            Self::JSON => Ok(ContentType(Named::Json)),
            _ if text.bytes().all(|b| (b' '..=b'~').contains(&b)) && text.contains('/') => {
                Ok(ContentType(Named::Other(text.into())))
            }
            _ => Err(Refusal::invalid(FIELD, format!("{text:?} is none; one looks like text/plain"))),
        }
    }

    /// The text; empty if nobody said.
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Named::Nothing => "",
            Named::Json => Self::JSON,
            Named::Other(text) => text,
        }
    }
}
