//! What REST says and hears, in JSON; `--json` of the command line prints the same. Every type here becomes a
//! schema of the OpenAPI document, with its comments.
//!
//! What comes in refuses fields that it does not know, so that a misspelt one is noticed. What goes out leaves
//! out what does not apply.

use std::collections::HashSet;
use std::marker::PhantomData;

use base64::alphabet;
use base64::engine::{Engine, GeneralPurpose, GeneralPurposeConfig};
use evenhand_core::backlog::Weight;
use evenhand_core::names::ContentType;
use evenhand_core::{Refusal, bounds};
use serde::de::{DeserializeOwned, Error as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa::openapi::RefOr;

use crate::v1;

/// Reads JSON from outside. An error names the field.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, Refusal> {
    let reader = &mut serde_json::Deserializer::from_slice(json);
    let value = serde_path_to_error::deserialize(&mut *reader).map_err(|error| wrong(&error))?;
    reader.end().map_err(|error| Refusal::invalid("", error.to_string()))?;
    Ok(value)
}

/// What serde says of a field, as a refusal that names it.
pub fn wrong(error: &serde_path_to_error::Error<impl std::fmt::Display>) -> Refusal {
    let path = error.path().to_string();
    let field = if path == "." { String::new() } else { path };
    Refusal::invalid(field, error.inner().to_string())
}

/// Tasks to accept, all of them or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Enqueue {
    /// 1 to 10,000 of them.
    #[serde(deserialize_with = "bounded::<_, _, { bounds::TASKS_PER_ENQUEUE }>")]
    #[schema(min_items = 1, max_items = 10000)]
    pub tasks: Vec<NewTask>,
    /// Chosen by the caller. The same id again within ten minutes is the same request: it gets the first one's
    /// answer and accepts nothing.
    #[schema(max_length = 128)]
    pub request_id: Option<String>,
}

impl Enqueue {
    /// The same on the wire.
    pub fn to_wire(self, queue: String) -> Result<v1::EnqueueRequest, Refusal> {
        let task = |(n, task): (usize, NewTask)| {
            task.to_wire().map_err(|refusal| refusal.within(format_args!("tasks[{n}]")))
        };
        let tasks = self.tasks.into_iter().enumerate().map(task).collect::<Result<Vec<_>, _>>()?;
        Ok(v1::EnqueueRequest { queue, tasks, request_id: self.request_id.unwrap_or_default() })
    }
}

/// A task to accept. Its payload is one of `payload`, `text` and `base64`, or nothing.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewTask {
    /// Any JSON value. The worker gets it as JSON, byte for byte as it was sent.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = serde_json::Value)]
    pub payload: Option<Box<RawValue>>,
    /// A text. The worker gets it as it is.
    #[serde(default, deserialize_with = "present")]
    #[schema(nullable = false)]
    pub text: Option<String>,
    /// Bytes, in base64.
    #[serde(default, deserialize_with = "present")]
    #[schema(
        nullable = false,
        content_encoding = "base64",
        pattern = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
    )]
    pub base64: Option<String>,
    /// What the payload is, as HTTP says it; application/json if it is a JSON value and nobody says.
    #[schema(max_length = 127, pattern = "^([ -~]*/[ -~]*)?$", example = "text/plain")]
    pub content_type: Option<String>,
    /// Whom to charge.
    #[schema(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "acme")]
    pub key: Option<String>,
    /// The key's weight from now on.
    #[schema(minimum = 0.001, maximum = 1000, multiple_of = 0.001, example = 1)]
    pub weight: Option<f64>,
    /// 0 (first) to 9; 5 if nobody says.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 9)]
    pub priority: Option<u32>,
    /// How it is tried again when it fails; where it says nothing, its queue decides.
    pub retry: Option<TaskRetry>,
    /// How long one run may take.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 31_536_000_000_u64)]
    pub max_duration_ms: Option<u64>,
    /// How long a run of it takes, as far as you know. What it is charged where its queue shares time; like the last
    /// runs of its key if nobody says.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub expected_ms: Option<u64>,
    /// It may start after so long.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 315_360_000_000_u64)]
    pub delay_ms: Option<u64>,
    /// It may start at this time, in milliseconds since 1970; the past is now. Not with `delay_ms`.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 253_402_300_799_999_u64)]
    pub run_at_ms: Option<u64>,
    /// It is too late to start it after so long.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 315_360_000_000_u64)]
    pub expires_ms: Option<u64>,
    /// It is canceled when nobody has watched it for so long.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1_000, maximum = 86_400_000)]
    pub attach_ttl_ms: Option<u64>,
    /// The same again in the same queue within `unique_ms` is the same task.
    #[schema(max_length = 256)]
    pub unique_key: Option<String>,
    /// How long `unique_key` counts; a day if nobody says.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 2_592_000_000_u64)]
    pub unique_ms: Option<u64>,
    /// Given to whoever runs it; a worker of commands places them in the run's own directory. Each has a name of its own
    /// and at most 1 MiB; all of them and the payload together have at most 4 MiB.
    #[serde(default, deserialize_with = "bounded::<_, _, { bounds::FILES_PER_TASK }>")]
    #[schema(max_items = 64)]
    pub files: Vec<File>,
}

/// An input file of a task. What is in it is one of `text` and `base64`, or nothing.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// What it is called: a name and no path.
    #[schema(
        min_length = 1,
        max_length = 128,
        pattern = r"^(?!\.{1,2}$)[^/\x00-\x1f\x7f-\x9f]+$",
        example = "page.html"
    )]
    pub name: String,
    /// A text.
    #[serde(default, deserialize_with = "present")]
    #[schema(nullable = false)]
    pub text: Option<String>,
    /// Bytes, in base64.
    #[serde(default, deserialize_with = "present")]
    #[schema(
        nullable = false,
        content_encoding = "base64",
        pattern = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
    )]
    pub base64: Option<String>,
}

impl File {
    /// The same on the wire.
    fn wire(self) -> Result<v1::File, Refusal> {
        let content = match (self.text, self.base64) {
            (Some(_), Some(_)) => {
                return Err(Refusal::invalid("text", "goes with no base64; give one of them"));
            }
            (Some(text), None) => text.into_bytes(),
            (None, Some(base64)) => from_base64(base64)?,
            (None, None) => Vec::new(),
        };
        Ok(v1::File { name: self.name, content: content.into() })
    }
}

/// How a task is tried again when it fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskRetry {
    /// How often it is tried in all.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 1000)]
    pub max_attempts: Option<u32>,
    /// How long it waits before the second try. All waits vary by half.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 2_592_000_000_u64)]
    pub backoff_ms: Option<u64>,
    /// How many times as long each next wait is.
    #[schema(minimum = 1, maximum = 100, multiple_of = 0.001)]
    pub factor: Option<f64>,
    /// How long a wait is at most.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 2_592_000_000_u64)]
    pub max_backoff_ms: Option<u64>,
}

impl TaskRetry {
    /// The same on the wire.
    pub fn to_wire(self) -> Result<v1::Retry, Refusal> {
        let TaskRetry { max_attempts, backoff_ms, factor, max_backoff_ms } = self;
        Retry { max_attempts, backoff_ms, factor, max_backoff_ms, max_lost: None }.to_wire()
    }
}

/// How a queue's tasks are tried again when they fail and do not say themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Retry {
    /// How often a task is tried in all.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub max_attempts: Option<u32>,
    /// How long it waits before the second try. All waits vary by half.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 2_592_000_000_u64)]
    pub backoff_ms: Option<u64>,
    /// How many times as long each next wait is.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100, multiple_of = 0.001)]
    pub factor: Option<f64>,
    /// How long a wait is at most.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 2_592_000_000_u64)]
    pub max_backoff_ms: Option<u64>,
    /// After so many runs that were lost with their workers a task is not tried again.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 255)]
    pub max_lost: Option<u32>,
}

impl Retry {
    /// The same on the wire.
    pub fn to_wire(self) -> Result<v1::Retry, Refusal> {
        Ok(v1::Retry {
            max_attempts: self.max_attempts,
            backoff_ms: self.backoff_ms,
            factor_thousandths: self.factor.map(factor).transpose()?,
            max_backoff_ms: self.max_backoff_ms,
            max_lost: self.max_lost,
        })
    }
}

impl From<v1::Retry> for Retry {
    fn from(retry: v1::Retry) -> Retry {
        Retry {
            max_attempts: retry.max_attempts,
            backoff_ms: retry.backoff_ms,
            factor: retry.factor_thousandths.map(|factor| f64::from(factor) / 1e3),
            max_backoff_ms: retry.max_backoff_ms,
            max_lost: retry.max_lost,
        }
    }
}

/// The factor of a backoff in thousandths, as the wire has it.
pub fn factor(factor: f64) -> Result<u32, Refusal> {
    let thousandths = (factor * 1e3).round();
    if (1.0..=100.0).contains(&factor) && thousandths / 1e3 == factor {
        return Ok(thousandths as u32);
    }
    let advice = "use 1 to 100 with at most three decimals";
    Err(Refusal::invalid("factor", format!("{factor:?} is out of range; {advice}")))
}

/// A value that is there: null is one, not its absence.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// A list, and one more than there may be; the rest is passed over, so that it takes no memory before it is refused.
fn bounded<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MOST: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct List<T, const MOST: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for List<T, MOST> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut taken = Vec::new();
            while taken.len() <= MOST {
                match list.next_element()? {
                    Some(next) => taken.push(next),
                    None => return Ok(taken),
                }
            }
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok(taken)
        }
    }

    deserializer.deserialize_seq(List::<T, MOST>(PhantomData))
}

/// A whole number or none. To JSON 2 and 2.0 are the same number, and some programs write the second.
fn whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(deserializer)? else { return Ok(None) };
    let wrong = || D::Error::custom(format!("{number} is out of range, or not a whole number"));
    whole_number(&number).map(Some).ok_or_else(wrong)
}

/// The same, where there must be one.
fn some_whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<T, D::Error> {
    let number = serde_json::Number::deserialize(deserializer)?;
    let wrong = || D::Error::custom(format!("{number} is out of range, or not a whole number"));
    whole_number(&number).ok_or_else(wrong)
}

fn whole_number<T: TryFrom<u64>>(number: &serde_json::Number) -> Option<T> {
    let exact = |float: f64| (float.fract() == 0.0 && (0.0..9e15).contains(&float)).then_some(float as u64);
    let whole = number.as_u64().or_else(|| number.as_f64().and_then(exact));
    whole.and_then(|whole| T::try_from(whole).ok())
}

/// Base64 as everybody writes it, also those whose last character has bits to spare.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

fn from_base64(text: String) -> Result<Vec<u8>, Refusal> {
    BASE64.decode(text).map_err(|error| Refusal::invalid("base64", format!("cannot be read: {error}")))
}

impl NewTask {
    /// The same on the wire.
    pub fn to_wire(self) -> Result<v1::NewTask, Refusal> {
        let given = [self.payload.is_some(), self.text.is_some(), self.base64.is_some()];
        if given.into_iter().filter(|given| *given).count() > 1 {
            return Err(Refusal::invalid("payload", "is given twice; use one of payload, text and base64"));
        }
        let mut content_type = self.content_type.unwrap_or_default();
        let payload = match (self.payload, self.text, self.base64) {
            (Some(json), ..) => {
                if content_type.is_empty() {
                    content_type = ContentType::JSON.into();
                }
                String::from(Box::<str>::from(json)).into_bytes()
            }
            (_, Some(text), _) => text.into_bytes(),
            (.., Some(base64)) => from_base64(base64)?,
            (None, None, None) => Vec::new(),
        };
        let retry = self.retry.map(TaskRetry::to_wire).transpose();
        let file = |(n, file): (usize, File)| {
            file.wire().map_err(|refusal| refusal.within(format_args!("files[{n}]")))
        };
        Ok(v1::NewTask {
            files: self.files.into_iter().enumerate().map(file).collect::<Result<_, _>>()?,
            payload: payload.into(),
            key: self.key.unwrap_or_default(),
            weight_thousandths: self.weight.map(weight).transpose()?,
            priority: self.priority,
            retry: retry.map_err(|refusal| refusal.within("retry"))?,
            max_duration_ms: self.max_duration_ms,
            expected_ms: self.expected_ms,
            content_type,
            delay_ms: self.delay_ms,
            run_at_ms: self.run_at_ms,
            expires_ms: self.expires_ms,
            attach_ttl_ms: self.attach_ttl_ms,
            unique_key: self.unique_key.unwrap_or_default(),
            unique_ms: self.unique_ms,
        })
    }
}

/// A weight in thousandths, as the wire has it.
pub fn weight(weight: f64) -> Result<u32, Refusal> {
    Weight::new(weight).map(Weight::thousandths)
}

/// What was accepted, in the order of the request.
#[derive(Debug, Serialize, ToSchema)]
pub struct Enqueued {
    /// One for each task.
    pub tasks: Vec<EnqueuedTask>,
}

/// A task that was accepted.
#[derive(Debug, Serialize, ToSchema)]
pub struct EnqueuedTask {
    /// Its id.
    #[schema(example = "0-42")]
    pub id: String,
    /// False: the request id or its unique key was known, and this is the task of then.
    pub created: bool,
}

impl From<v1::EnqueueResponse> for Enqueued {
    fn from(response: v1::EnqueueResponse) -> Enqueued {
        let known: HashSet<u32> = response.known.into_iter().collect();
        let created = |n: u32| response.created && !known.contains(&n);
        let ids = (0..).zip(response.ids);
        Enqueued { tasks: ids.map(|(n, id)| EnqueuedTask { id, created: created(n) }).collect() }
    }
}

/// How a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It waits for its turn.
    Queued,
    /// A worker runs it.
    Running,
    /// It ended well.
    Succeeded,
    /// It was tried as often as it may be, or said that trying again is of no use.
    Failed,
    /// Somebody canceled it.
    Canceled,
    /// It waits for a time: its delay, or the backoff before its next try.
    Scheduled,
    /// It was not started in time.
    Expired,
}

impl State {
    /// From the wire.
    pub fn of(task: &v1::Task) -> State {
        match task.state() {
            v1::TaskState::Queued | v1::TaskState::Unspecified => State::Queued,
            v1::TaskState::Running => State::Running,
            v1::TaskState::Succeeded => State::Succeeded,
            v1::TaskState::Failed => State::Failed,
            v1::TaskState::Canceled => State::Canceled,
            v1::TaskState::Scheduled => State::Scheduled,
            v1::TaskState::Expired => State::Expired,
        }
    }

    /// On the wire.
    pub fn to_wire(self) -> v1::TaskState {
        match self {
            State::Queued => v1::TaskState::Queued,
            State::Running => v1::TaskState::Running,
            State::Succeeded => v1::TaskState::Succeeded,
            State::Failed => v1::TaskState::Failed,
            State::Canceled => v1::TaskState::Canceled,
            State::Scheduled => v1::TaskState::Scheduled,
            State::Expired => v1::TaskState::Expired,
        }
    }

    /// Its name, the same on every surface.
    pub fn name(self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::Running => "running",
            State::Succeeded => "succeeded",
            State::Failed => "failed",
            State::Canceled => "canceled",
            State::Scheduled => "scheduled",
            State::Expired => "expired",
        }
    }

    /// Whether the task has ended.
    pub fn is_over(self) -> bool {
        match self {
            State::Succeeded | State::Failed | State::Canceled | State::Expired => true,
            State::Queued | State::Running | State::Scheduled => false,
        }
    }
}

/// A task.
#[derive(Debug, Serialize, ToSchema)]
pub struct Task {
    /// Its id.
    #[schema(example = "0-42")]
    pub id: String,
    /// Its queue.
    pub queue: String,
    /// Whom it is charged to; empty for the shared key.
    pub key: String,
    /// How it stands.
    pub state: State,
    /// 0 (first) to 9.
    pub priority: u32,
    /// Which try runs, ran last, or comes next. Absent: nobody knows any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// How often it may be tried. Absent: its queue decides, or nobody knows any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// When it was accepted, in milliseconds since 1970. Not in all events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_ms: Option<u64>,
    /// The size of its payload. Not in events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_bytes: Option<u64>,
    /// What its payload is, if somebody said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// Its files. Not in events.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileInfo>,
    /// How long one run may take, if that is bounded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_duration_ms: Option<u64>,
    /// How long a run of it takes, as its caller said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_ms: Option<u64>,
    /// While it is scheduled: when it is due, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_ms: Option<u64>,
    /// When it expires, if it does, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// It is canceled when nobody has watched it for so long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attach_ttl_ms: Option<u64>,
    /// While it waits: how many tasks of its queue and priority go before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead: Option<u64>,
    /// While it waits: `ahead` is all of them, not only those that memory knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead_is_exact: Option<bool>,
    /// While it waits: when it will start, as far as that is known. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Estimate>,
    /// While it waits: what for. The message of the first of `holds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// While it waits: every rule that stands in its way now, in the order in which the scheduler asks. Not in lists.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<Hold>,
    /// While it runs: the seat of its worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seat: Option<String>,
    /// While it runs: it was canceled and is being stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopping: Option<bool>,
    /// While it runs: how long the run may take as things stand, from its start. Absent: as long as it likes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<u64>,
    /// While it runs: when its time is over, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// While it runs: the duration of the class that it holds. Absent: its queue has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_ms: Option<u64>,
    /// While it runs: it has less time than it had at its start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// While it runs: the last that it said of how far it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// When it has succeeded: what it said, if that is text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// When it has succeeded: what it said, in base64, if that is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(content_encoding = "base64")]
    pub result_base64: Option<String>,
    /// What its last run said of its failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When it ended, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Its tries that are over, the last ones, in order. Not in lists and events.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tries: Vec<Try>,
    /// The ended task that it runs again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay_of: Option<String>,
    /// The task that runs it again, the latest one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replayed_as: Option<String>,
}

/// An input file of a task, without what is in it.
#[derive(Debug, Serialize, ToSchema)]
pub struct FileInfo {
    /// What it is called.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// A run has less time than it had at its start.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Cut {
    /// What it had. Absent: as much as it liked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_ms: Option<u64>,
    /// What it has.
    pub to_ms: u64,
    /// When that was decided, in milliseconds since 1970.
    pub at_ms: u64,
    /// class_full (a task needed its class), no_free_slot (a task needed its slot sooner), denied (an interactive task found
    /// no slot) or shortened (its client wanted it).
    pub kind: String,
    /// Why, in words.
    pub reason: String,
}

impl From<v1::Cut> for Cut {
    fn from(cut: v1::Cut) -> Cut {
        let v1::Cut { from_ms, to_ms, at_ms, reason, kind } = cut;
        Cut { from_ms: (from_ms > 0).then_some(from_ms), to_ms, at_ms, kind, reason }
    }
}

/// A rule that stands in the way of a task that waits. Which numbers there are depends on its kind.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Hold {
    /// gate_shut, queue_paused, key_paused, key_limit, key_rate, queue_rate, class_full, no_worker, no_free_slot,
    /// higher_priority, other_keys, own_key, reading or writing. There may be more in time.
    pub kind: String,
    /// In words.
    pub message: String,
    /// Of class_full: the duration of the class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_ms: Option<u64>,
    /// Of class_full and key_limit: runs that count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<u64>,
    /// Of class_full and key_limit: how many may. Of no_free_slot: the slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Of class_full: tasks that hold it, at most five.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by: Vec<String>,
    /// Of key_rate and queue_rate: in how long the next may start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Of key_rate and queue_rate: the rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// Of higher_priority: which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Of other_keys: how many keys. Of own_key: how many tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl From<v1::Hold> for Hold {
    fn from(hold: v1::Hold) -> Hold {
        let v1::Hold { kind, message, class_ms, held, limit, by, wait_ms, rate, priority, count } = hold;
        let rate = rate.map(Rate::from);
        Hold { kind, message, class_ms, held, limit, by, wait_ms, rate, priority, count }
    }
}

/// What to change of a task.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Shorten {
    /// How long one run may take from now on: at most what it may take now.
    #[serde(deserialize_with = "some_whole")]
    #[schema(minimum = 1, maximum = 31_536_000_000_u64)]
    pub max_duration_ms: u64,
}

/// A task that takes less time.
#[derive(Debug, Serialize, ToSchema)]
pub struct Shortened {
    /// How long one run may take from now on.
    pub max_duration_ms: u64,
}

/// A try at a task that is over.
#[derive(Debug, Serialize, ToSchema)]
pub struct Try {
    /// Which.
    pub attempt: u32,
    /// The seat of its worker, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seat: Option<String>,
    /// When it began, if that is known, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<u64>,
    /// When its end was known, in milliseconds since 1970.
    pub ended_ms: u64,
    /// succeeded, failed, failed_for_good, lost, time_up (it took longer than it may) or downgraded (the same, and it had
    /// less time than at its start).
    pub end: String,
    /// What it said of its failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<v1::Try> for Try {
    fn from(tried: v1::Try) -> Try {
        let said = |text: String| (!text.is_empty()).then_some(text);
        Try {
            attempt: tried.attempt,
            seat: said(tried.seat),
            started_ms: (tried.started_ms > 0).then_some(tried.started_ms),
            ended_ms: tried.ended_ms,
            end: tried.end,
            error: said(tried.error),
        }
    }
}

impl From<v1::Task> for Task {
    fn from(task: v1::Task) -> Task {
        let state = State::of(&task);
        let (waits, runs) = (state == State::Queued, state == State::Running);
        let said = |text: String| (!text.is_empty()).then_some(text);
        let result = task.result.map(|bytes| String::from_utf8(bytes.into()));
        let (result, result_base64) = match result {
            Some(Ok(text)) => (Some(text), None),
            Some(Err(no_text)) => (None, Some(BASE64.encode(no_text.as_bytes()))),
            None => (None, None),
        };
        Task {
            id: task.id,
            queue: task.queue,
            key: task.key,
            state,
            priority: task.priority,
            attempt: (task.attempt > 0).then_some(task.attempt),
            max_attempts: (task.max_attempts > 0).then_some(task.max_attempts),
            accepted_ms: (task.accepted_ms > 0).then_some(task.accepted_ms),
            payload_bytes: (task.accepted_ms > 0).then_some(task.payload_bytes),
            content_type: said(task.content_type),
            files: task
                .files
                .into_iter()
                .map(|v1::FileInfo { name, bytes }| FileInfo { name, bytes })
                .collect(),
            max_duration_ms: task.max_duration_ms,
            expected_ms: task.expected_ms,
            due_ms: task.due_ms.filter(|_| state == State::Scheduled),
            expires_at_ms: task.expires_at_ms,
            attach_ttl_ms: task.attach_ttl_ms,
            ahead: task.ahead.filter(|_| waits),
            ahead_is_exact: task.ahead.filter(|_| waits).map(|_| task.ahead_is_exact),
            estimate: task.estimate.filter(|_| waits).map(Into::into),
            hold: said(task.hold).filter(|_| waits),
            holds: task.holds.into_iter().map(Hold::from).filter(|_| waits).collect(),
            seat: said(task.seat).filter(|_| runs),
            stopping: runs.then_some(task.stopping),
            limit_ms: task.limit_ms.filter(|_| runs),
            deadline_ms: task.deadline_ms.filter(|_| runs),
            class_ms: task.class_ms.filter(|_| runs),
            cut: task.cut.map(Cut::from).filter(|_| runs),
            progress: task.progress.map(Progress::from).filter(|_| runs),
            result,
            result_base64,
            error: said(task.error),
            ended_ms: task.ended_ms,
            tries: task.tries.into_iter().map(Try::from).collect(),
            replay_of: said(task.replay_of),
            replayed_as: said(task.replayed_as),
        }
    }
}

/// How far a run is, in its own words.
#[derive(Debug, Serialize, ToSchema)]
pub struct Progress {
    /// 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// In words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl From<v1::Progress> for Progress {
    fn from(progress: v1::Progress) -> Progress {
        Progress { fraction: progress.fraction, message: progress.message }
    }
}

/// A page of tasks.
#[derive(Debug, Serialize, ToSchema)]
pub struct Tasks {
    /// By id. A page may have fewer than were asked for, or none, and still not be the last.
    pub tasks: Vec<Task>,
    /// For the next page. Absent: this is the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

impl From<v1::ListResponse> for Tasks {
    fn from(page: v1::ListResponse) -> Tasks {
        let cursor = (!page.cursor.is_empty()).then_some(page.cursor);
        Tasks { tasks: page.tasks.into_iter().map(Task::from).collect(), cursor }
    }
}

/// What became of a cancel.
#[derive(Debug, Serialize, ToSchema)]
pub struct Canceled {
    /// True: it was running, and its worker has been told to stop it. False: it will never run.
    pub stopping: bool,
}

/// What became of a replay.
#[derive(Debug, Serialize, ToSchema)]
pub struct Replayed {
    /// The new task.
    #[schema(example = "0-43")]
    pub id: String,
}

/// How a task stands that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unfinished {
    /// It waits for its turn.
    Queued,
    /// A worker runs it.
    Running,
    /// It waits for a time.
    Scheduled,
}

impl From<Unfinished> for State {
    fn from(state: Unfinished) -> State {
        match state {
            Unfinished::Queued => State::Queued,
            Unfinished::Running => State::Running,
            Unfinished::Scheduled => State::Scheduled,
        }
    }
}

/// How a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Over {
    /// It ended well.
    Succeeded,
    /// It was tried as often as it may be, or said that trying again is of no use.
    Failed,
    /// Somebody canceled it.
    Canceled,
    /// It was not started in time.
    Expired,
}

impl From<Over> for State {
    fn from(state: Over) -> State {
        match state {
            Over::Succeeded => State::Succeeded,
            Over::Failed => State::Failed,
            Over::Canceled => State::Canceled,
            Over::Expired => State::Expired,
        }
    }
}

/// Which tasks to cancel: all that match everything that is named; a queue or a key at least.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelMany {
    /// Of this queue.
    #[schema(max_length = 64, pattern = "^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
    pub queue: Option<String>,
    /// Of this key.
    #[schema(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$")]
    pub key: Option<String>,
    /// In this state.
    #[schema(inline)]
    pub state: Option<Unfinished>,
    /// Accepted at this time or later, in milliseconds since 1970.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 253_402_300_799_999_u64)]
    pub accepted_from_ms: Option<u64>,
    /// Accepted before this time, in milliseconds since 1970.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 253_402_300_799_999_u64)]
    pub accepted_before_ms: Option<u64>,
    /// Where the last call ended.
    #[schema(pattern = "^([0-9]{1,9}-[0-9]{1,18}-[0-9]{1,18}-[12])?$")]
    pub cursor: Option<String>,
    /// Tasks to change in this call at most; 1000 if nobody says.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 1000)]
    pub limit: Option<u32>,
}

/// Which ended tasks to run again, of those that were not yet: all that match everything that is named; a queue or
/// a key at least.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplayMany {
    /// Of this queue.
    #[schema(max_length = 64, pattern = "^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
    pub queue: Option<String>,
    /// Of this key.
    #[schema(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$")]
    pub key: Option<String>,
    /// In this state.
    #[schema(inline)]
    pub state: Option<Over>,
    /// Accepted at this time or later, in milliseconds since 1970.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 253_402_300_799_999_u64)]
    pub accepted_from_ms: Option<u64>,
    /// Accepted before this time, in milliseconds since 1970.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 253_402_300_799_999_u64)]
    pub accepted_before_ms: Option<u64>,
    /// Where the last call ended.
    #[schema(pattern = "^([0-9]{1,9}-[0-9]{1,18}-[0-9]{1,18}-[12])?$")]
    pub cursor: Option<String>,
    /// Tasks to run again in this call at most; 1000 if nobody says.
    #[serde(default, deserialize_with = "whole")]
    #[schema(minimum = 1, maximum = 1000)]
    pub limit: Option<u32>,
}

impl From<CancelMany> for v1::ManyRequest {
    fn from(many: CancelMany) -> v1::ManyRequest {
        let CancelMany { queue, key, state, accepted_from_ms, accepted_before_ms, cursor, limit } = many;
        let filter = filter(queue, key, state.map(State::from), accepted_from_ms, accepted_before_ms);
        v1::ManyRequest { filter: Some(filter), cursor: cursor.unwrap_or_default(), limit }
    }
}

impl From<ReplayMany> for v1::ManyRequest {
    fn from(many: ReplayMany) -> v1::ManyRequest {
        let ReplayMany { queue, key, state, accepted_from_ms, accepted_before_ms, cursor, limit } = many;
        let filter = filter(queue, key, state.map(State::from), accepted_from_ms, accepted_before_ms);
        v1::ManyRequest { filter: Some(filter), cursor: cursor.unwrap_or_default(), limit }
    }
}

fn filter(
    queue: Option<String>,
    key: Option<String>,
    state: Option<State>,
    accepted_from_ms: Option<u64>,
    accepted_before_ms: Option<u64>,
) -> v1::Filter {
    v1::Filter {
        queue: queue.unwrap_or_default(),
        key: key.unwrap_or_default(),
        state: state.map_or(v1::TaskState::Unspecified, State::to_wire).into(),
        accepted_from_ms,
        accepted_before_ms,
    }
}

/// What became of a cancel of many.
#[derive(Debug, Serialize, ToSchema)]
pub struct CanceledMany {
    /// Tasks that this call canceled, or had stopped.
    pub changed: u64,
    /// Of these, running ones whose workers were told to stop them.
    pub stopping: u64,
    /// For the next call. Absent: all are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

impl From<v1::ManyResponse> for CanceledMany {
    fn from(many: v1::ManyResponse) -> CanceledMany {
        let cursor = (!many.cursor.is_empty()).then_some(many.cursor);
        CanceledMany { changed: many.changed, stopping: many.stopping, cursor }
    }
}

/// What became of a replay of many.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReplayedMany {
    /// Tasks that this call had run again.
    pub changed: u64,
    /// The new tasks.
    pub ids: Vec<String>,
    /// For the next call. Absent: all are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

impl From<v1::ManyResponse> for ReplayedMany {
    fn from(many: v1::ManyResponse) -> ReplayedMany {
        let cursor = (!many.cursor.is_empty()).then_some(many.cursor);
        ReplayedMany { changed: many.changed, ids: many.ids, cursor }
    }
}

/// When a waiting task will start.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Estimate {
    /// 1 goes next.
    pub position: u64,
    /// It starts within so many milliseconds, if nothing goes ahead that does not stand ahead now. Absent: something ahead
    /// may take as long as it likes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upper_ms: Option<u64>,
    /// It is expected to start in so many milliseconds, by how long runs took of late. Absent: none has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_ms: Option<u64>,
    /// Not all is known that decides it.
    pub approximate: bool,
}

impl From<v1::Estimate> for Estimate {
    fn from(estimate: v1::Estimate) -> Estimate {
        let v1::Estimate { position, upper_ms, expected_ms, approximate } = estimate;
        Estimate { position, upper_ms, expected_ms, approximate }
    }
}

/// Something that happened to a task.
#[derive(Debug, Serialize, ToSchema)]
pub struct Event {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Which task; absent if it is none in particular.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_id: Option<String>,
    /// Of `queued`, `scheduled`, `started`, `cut` and `finished`: how it stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Of `output`: a line that its run wrote to standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// Of `progress`: how far it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Of `estimate`: when it will start. Of single tasks only, and when it has changed noticeably.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Estimate>,
    /// Of `dropped`: so many events were left out, because they came too fast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<u64>,
}

impl Event {
    /// The event's name, and the event.
    pub fn named(event: v1::TaskEvent) -> (&'static str, Event) {
        let task_id = (!event.task_id.is_empty()).then_some(event.task_id);
        let mut said = Event {
            at_ms: event.at_ms,
            task_id,
            task: None,
            output: None,
            progress: None,
            estimate: None,
            dropped: None,
        };
        let name = match event.event {
            Some(v1::task_event::Event::Task(task)) => {
                let name = match State::of(&task) {
                    State::Queued => "queued",
                    State::Scheduled => "scheduled",
                    State::Running if task.cut.is_some() => "cut",
                    State::Running => "started",
                    State::Succeeded | State::Failed | State::Canceled | State::Expired => "finished",
                };
                said.task = Some(task.into());
                name
            }
            Some(v1::task_event::Event::Output(line)) => {
                said.output = Some(line);
                "output"
            }
            Some(v1::task_event::Event::Progress(progress)) => {
                said.progress = Some(progress.into());
                "progress"
            }
            Some(v1::task_event::Event::Estimate(estimate)) => {
                said.estimate = Some(estimate.into());
                "estimate"
            }
            Some(v1::task_event::Event::Dropped(count)) => {
                said.dropped = Some(count);
                "dropped"
            }
            Some(v1::task_event::Event::Missed(_)) | None => "missed",
        };
        (name, said)
    }
}

/// A queue and how its tasks stand.
#[derive(Debug, Serialize, ToSchema)]
pub struct Queue {
    /// Its name.
    pub queue: String,
    /// Tasks that wait.
    pub waiting: u64,
    /// Tasks that run.
    pub running: u64,
    /// Tasks accepted, ever.
    pub accepted: u64,
    /// Tasks that succeeded, ever.
    pub succeeded: u64,
    /// Tasks that failed, ever.
    pub failed: u64,
    /// Tasks that were canceled, ever.
    pub canceled: u64,
    /// Tasks that were not started in time, ever.
    pub expired: u64,
    /// Tasks that wait for a time.
    pub scheduled: u64,
    /// Nothing of it is started.
    pub paused: bool,
    /// What its loop does: `idle` (nothing to do), `running` (there is something to start), `scheduled` (asleep until
    /// something is due or comes), `saturated` (every slot is taken: asleep until one becomes free).
    #[serde(rename = "loop")]
    pub loop_state: String,
    /// How long the task has waited that goes next. Absent: none waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_waiting_ms: Option<u64>,
    /// Interactive tasks that run. They are not among `running`.
    pub interactive: u64,
    /// How its duration classes stand, shortest first. Absent: it has none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<QueueClass>,
}

/// How a duration class of a queue stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct QueueClass {
    /// How long its tasks may run.
    pub duration_ms: u64,
    /// Runs that hold it or a longer one.
    pub held: u64,
    /// How many may, with the slots that there are.
    pub limit: u64,
}

impl From<v1::QueueClass> for QueueClass {
    fn from(class: v1::QueueClass) -> QueueClass {
        let v1::QueueClass { duration_ms, held, limit } = class;
        QueueClass { duration_ms, held, limit }
    }
}

impl From<v1::Queue> for Queue {
    fn from(queue: v1::Queue) -> Queue {
        Queue {
            queue: queue.name,
            waiting: queue.waiting,
            running: queue.running,
            accepted: queue.accepted,
            succeeded: queue.succeeded,
            failed: queue.failed,
            canceled: queue.canceled,
            expired: queue.expired,
            scheduled: queue.scheduled,
            paused: queue.paused,
            loop_state: queue.r#loop,
            oldest_waiting_ms: queue.oldest_waiting_ms,
            interactive: queue.interactive,
            classes: queue.classes.into_iter().map(QueueClass::from).collect(),
        }
    }
}

/// Every queue.
#[derive(Debug, Serialize, ToSchema)]
pub struct Queues {
    /// In the order in which they were made.
    pub queues: Vec<Queue>,
}

impl From<v1::QueuesResponse> for Queues {
    fn from(response: v1::QueuesResponse) -> Queues {
        Queues { queues: response.queues.into_iter().map(Queue::from).collect() }
    }
}

/// How a queue treats its tasks.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QueueSettings {
    /// How its tasks are tried again, if they do not say themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// How long ends are remembered, with their results; 0 is not at all.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 31_536_000_000_u64)]
    pub retention_ms: Option<u64>,
    /// Nothing of it is started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// What its keys share: every task counts one, or the time that it takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// Its duration classes, shortest first: durations grow, limits do not, and the first limit is all. A list replaces
    /// the one before; an empty one removes it. Absent where it goes out: it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 16)]
    pub classes: Option<Vec<ClassLimit>>,
    /// What happens to a task whose time was up after it had been downgraded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_downgrade: Option<AfterDowngrade>,
    /// How long the client of an interactive run is warned before it is halted; 0 is not at all.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 60_000)]
    pub interactive_grace_ms: Option<u64>,
    /// How many tasks of one key may run at once, unless the key has a limit of its own; 0 removes it. Absent where it
    /// goes out: there is none.
    #[serde(default, deserialize_with = "whole", skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 4_294_967_295_u64)]
    pub key_limit: Option<u32>,
    /// How much of it may start in a second. Absent where it goes out: there is no rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// How much of one key may start in a second, unless the key has a rate of its own. Absent where it goes out: there is
    /// no rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_rate: Option<Rate>,
}

/// A duration class: tasks that may take so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClassLimit {
    /// How long a task of this class may run.
    #[serde(deserialize_with = "some_whole")]
    #[schema(minimum = 1, maximum = 31_536_000_000_u64)]
    pub duration_ms: u64,
    /// How many runs may hold this class or a longer one.
    pub limit: Limit,
}

/// How many runs may hold a class or a longer one: `"all"` (as many as there are slots), a number of slots, or a part of
/// the slots that there are, such as `"25%"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// As many as there are slots.
    All,
    /// So many, or as many as there are slots if these are fewer.
    Slots(u32),
    /// So many in a hundred of the slots that there are, and at least one.
    Percent(u8),
}

/// What is said of a limit that cannot be read.
const LIMIT: &str = "use \"all\", a number of slots such as 8, or a percentage such as \"25%\"";

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Limit::All => f.write_str("all"),
            Limit::Slots(slots) => write!(f, "{slots}"),
            Limit::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Limit::Slots(slots) => serializer.serialize_u32(*slots),
            Limit::All | Limit::Percent(_) => serializer.collect_str(self),
        }
    }
}

impl std::str::FromStr for Limit {
    type Err = String;

    /// Reads `all`, `8` or `25%`.
    fn from_str(text: &str) -> Result<Limit, String> {
        let wrong = || {
            format!("{text:?} is no limit; use all, a number of slots such as 8, or a percentage such as 25%")
        };
        match (text, text.strip_suffix('%')) {
            ("all", _) => Ok(Limit::All),
            (_, Some(percent)) => percent.parse().map(Limit::Percent).map_err(|_| wrong()),
            (slots, None) => slots.parse().map(Limit::Slots).map_err(|_| wrong()),
        }
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Limit, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Said {
            Number(serde_json::Number),
            Text(String),
        }
        let wrong = |is: &dyn std::fmt::Display| D::Error::custom(format!("{is} is no limit; {LIMIT}"));
        match Said::deserialize(deserializer).map_err(|_| wrong(&"this"))? {
            Said::Number(number) => whole_number(&number).map(Limit::Slots).ok_or_else(|| wrong(&number)),
            // A number is written as one.
            Said::Text(text) => match text.parse() {
                Ok(limit @ (Limit::All | Limit::Percent(_))) => Ok(limit),
                Ok(Limit::Slots(_)) | Err(_) => Err(wrong(&format_args!("{text:?}"))),
            },
        }
    }
}

impl utoipa::PartialSchema for Limit {
    fn schema() -> RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Type};
        let slots =
            ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).maximum(Some(4_294_967_295_u64));
        let part = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^(all|100%|[1-9][0-9]?%)$"));
        let about = "`\"all\"` (as many as there are slots), a number of slots, or a part of the slots that there are, such \
                     as `\"25%\"`.";
        OneOfBuilder::new().item(slots).item(part).description(Some(about)).into()
    }
}

impl ToSchema for Limit {}

impl ClassLimit {
    fn to_wire(self) -> v1::ClassLimit {
        let limit = match self.limit {
            Limit::All => v1::class_limit::Limit::All(true),
            Limit::Slots(slots) => v1::class_limit::Limit::Slots(slots),
            Limit::Percent(percent) => v1::class_limit::Limit::Percent(percent.into()),
        };
        v1::ClassLimit { duration_ms: self.duration_ms, limit: Some(limit) }
    }
}

impl From<v1::ClassLimit> for ClassLimit {
    fn from(class: v1::ClassLimit) -> ClassLimit {
        let limit = match class.limit {
            Some(v1::class_limit::Limit::Slots(slots)) => Limit::Slots(slots),
            Some(v1::class_limit::Limit::Percent(percent)) => {
                Limit::Percent(u8::try_from(percent).unwrap_or(u8::MAX))
            }
            Some(v1::class_limit::Limit::All(_)) | None => Limit::All,
        };
        ClassLimit { duration_ms: class.duration_ms, limit }
    }
}

/// What happens to a task whose time was up after it had been downgraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AfterDowngrade {
    /// It has failed.
    Fail,
    /// It is tried again at once, as long as it has attempts.
    Requeue,
}

impl AfterDowngrade {
    /// On the wire.
    pub fn to_wire(self) -> v1::AfterDowngrade {
        match self {
            AfterDowngrade::Fail => v1::AfterDowngrade::Fail,
            AfterDowngrade::Requeue => v1::AfterDowngrade::Requeue,
        }
    }

    fn of(settings: &v1::QueueSettings) -> Option<AfterDowngrade> {
        match settings.after_downgrade() {
            v1::AfterDowngrade::Fail => Some(AfterDowngrade::Fail),
            v1::AfterDowngrade::Requeue => Some(AfterDowngrade::Requeue),
            v1::AfterDowngrade::Unspecified => None,
        }
    }
}

/// How much may start.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// So much in a second, with at most three decimals; 0 removes the rate.
    #[schema(minimum = 0, maximum = 1_000_000, multiple_of = 0.001)]
    pub per_second: f64,
    /// So much at once after a pause; as much as in a second, and at least 1, if nobody says.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000, multiple_of = 0.001)]
    pub burst: Option<f64>,
    /// What it counts; tasks, if nobody says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<RateUnit>,
}

/// What a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RateUnit {
    /// Every start counts one.
    Tasks,
    /// A start counts what its task costs: where time is shared, the seconds that it is expected to take; 1 elsewhere.
    Cost,
}

impl Rate {
    /// The same on the wire.
    pub fn to_wire(self) -> Result<v1::Rate, Refusal> {
        let thousandths = |field: &str, is: f64, from: f64| {
            let most = bounds::RATE as f64 / 1e3;
            let rounded = (is * 1e3).round();
            let wrong = || {
                let text =
                    format!("{is:?} is out of range; use {from} to {most} with at most three decimals");
                Refusal::invalid(field, text)
            };
            let good = (from..=most).contains(&is) && rounded / 1e3 == is;
            if good { Ok(rounded as u64) } else { Err(wrong()) }
        };
        let unit = match self.unit {
            Some(RateUnit::Cost) => v1::RateUnit::Cost,
            Some(RateUnit::Tasks) | None => v1::RateUnit::Tasks,
        };
        Ok(v1::Rate {
            per_second_thousandths: thousandths("per_second", self.per_second, 0.0)?,
            burst_thousandths: self.burst.map(|burst| thousandths("burst", burst, 1.0)).transpose()?,
            unit: unit.into(),
        })
    }

    /// From the wire; none, if it is 0 a second.
    fn some(rate: v1::Rate) -> Option<Rate> {
        (rate.per_second_thousandths > 0).then(|| rate.into())
    }
}

impl From<v1::Rate> for Rate {
    fn from(rate: v1::Rate) -> Rate {
        let unit = match rate.unit() {
            v1::RateUnit::Tasks | v1::RateUnit::Unspecified => RateUnit::Tasks,
            v1::RateUnit::Cost => RateUnit::Cost,
        };
        Rate {
            per_second: rate.per_second_thousandths as f64 / 1e3,
            burst: rate.burst_thousandths.map(|burst| burst as f64 / 1e3),
            unit: Some(unit),
        }
    }
}

/// What a queue's keys share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// Every task counts one.
    Tasks,
    /// A task counts the time that it takes.
    Time,
}

impl Share {
    /// From the wire. None: nothing is said.
    pub fn of(settings: &v1::QueueSettings) -> Option<Share> {
        match settings.share() {
            v1::Share::Tasks => Some(Share::Tasks),
            v1::Share::Time => Some(Share::Time),
            v1::Share::Unspecified => None,
        }
    }

    /// On the wire.
    pub fn to_wire(self) -> v1::Share {
        match self {
            Share::Tasks => v1::Share::Tasks,
            Share::Time => v1::Share::Time,
        }
    }
}

impl QueueSettings {
    /// The same on the wire.
    pub fn to_wire(self) -> Result<v1::QueueSettings, Refusal> {
        let retry = self.retry.map(Retry::to_wire).transpose();
        Ok(v1::QueueSettings {
            retry: retry.map_err(|refusal| refusal.within("retry"))?,
            retention_ms: self.retention_ms,
            paused: self.paused,
            share: self.share.map(|share| share.to_wire().into()),
            classes: self.classes.map(|classes| v1::Classes {
                classes: classes.into_iter().map(ClassLimit::to_wire).collect(),
            }),
            after_downgrade: self.after_downgrade.map(|after| after.to_wire().into()),
            interactive_grace_ms: self.interactive_grace_ms,
            key_limit: self.key_limit,
            rate: self.rate.map(Rate::to_wire).transpose().map_err(|refusal| refusal.within("rate"))?,
            key_rate: self
                .key_rate
                .map(Rate::to_wire)
                .transpose()
                .map_err(|refusal| refusal.within("key_rate"))?,
        })
    }
}

impl From<v1::QueueSettings> for QueueSettings {
    fn from(settings: v1::QueueSettings) -> QueueSettings {
        QueueSettings {
            share: Share::of(&settings),
            after_downgrade: AfterDowngrade::of(&settings),
            classes: settings
                .classes
                .map(|of| of.classes.into_iter().map(ClassLimit::from).collect::<Vec<_>>())
                .filter(|classes| !classes.is_empty()),
            interactive_grace_ms: settings.interactive_grace_ms,
            key_limit: settings.key_limit.filter(|limit| *limit > 0),
            rate: settings.rate.and_then(Rate::some),
            key_rate: settings.key_rate.and_then(Rate::some),
            retry: settings.retry.map(Retry::from),
            retention_ms: settings.retention_ms,
            paused: settings.paused,
        }
    }
}

/// What to change of a queue's settings: all that is named, or nothing.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetQueue {
    /// What is absent stays.
    pub settings: QueueSettings,
    /// Only if nobody has changed them since: the version as it was read.
    #[serde(default, deserialize_with = "whole")]
    pub version: Option<u64>,
}

impl SetQueue {
    /// The same on the wire.
    pub fn to_wire(self, name: String) -> Result<v1::SetQueueRequest, Refusal> {
        let settings = self.settings.to_wire().map_err(|refusal| refusal.within("settings"))?;
        Ok(v1::SetQueueRequest { name, settings: Some(settings), version: self.version })
    }
}

/// What to change of a key of a queue.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetKey {
    /// The key; empty is the shared one.
    #[schema(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "acme")]
    pub key: String,
    /// Its weight from now on, whatever its tasks ask for: 0.001 to 1000 with at most three decimals; 0 is what they
    /// ask for again. What is absent stays.
    #[schema(minimum = 0, maximum = 1000, multiple_of = 0.001, example = 1)]
    pub weight: Option<f64>,
    /// True: its tasks wait, and what runs goes on.
    pub paused: Option<bool>,
    /// How many of its tasks may run at once, whatever its queue says; 0 is what its queue says again.
    #[serde(default, deserialize_with = "whole")]
    #[schema(maximum = 4_294_967_295_u64)]
    pub limit: Option<u32>,
    /// How much of it may start in a second, whatever its queue says; 0 a second is what its queue says again.
    pub rate: Option<Rate>,
}

impl SetKey {
    /// The same on the wire.
    pub fn to_wire(self, queue: String) -> Result<v1::SetKeyRequest, Refusal> {
        let SetKey { key, weight, paused, limit, rate } = self;
        let rate = rate.map(Rate::to_wire).transpose().map_err(|refusal| refusal.within("rate"))?;
        let weight_thousandths = match weight {
            Some(0.0) => Some(0),
            Some(weight) => Some(Weight::new(weight)?.thousandths()),
            None => None,
        };
        Ok(v1::SetKeyRequest { queue, key, weight_thousandths, paused, limit, rate })
    }
}

/// A queue's settings, all of them.
#[derive(Debug, Serialize, ToSchema)]
pub struct QueueSet {
    /// What they are now.
    pub settings: QueueSettings,
    /// Grows with every change of them.
    pub version: u64,
}

impl From<v1::SetQueueResponse> for QueueSet {
    fn from(set: v1::SetQueueResponse) -> QueueSet {
        QueueSet { settings: set.settings.unwrap_or_default().into(), version: set.version }
    }
}

/// One queue, its settings, and the shares of its busiest keys.
#[derive(Debug, Serialize, ToSchema)]
pub struct QueueDetail {
    /// The queue.
    #[serde(flatten)]
    pub queue: Queue,
    /// All of them.
    pub settings: QueueSettings,
    /// Grows with every change of them; 0 if there was none.
    pub version: u64,
    /// Keys that start most or go next, not all there are.
    pub keys: Vec<QueueKey>,
}

impl From<v1::QueueResponse> for QueueDetail {
    fn from(response: v1::QueueResponse) -> QueueDetail {
        QueueDetail {
            queue: response.queue.unwrap_or_default().into(),
            settings: response.settings.unwrap_or_default().into(),
            version: response.version,
            keys: response.keys.into_iter().map(QueueKey::from).collect(),
        }
    }
}

/// A key of a queue.
#[derive(Debug, Serialize, ToSchema)]
pub struct QueueKey {
    /// The key; empty for the shared one.
    pub key: String,
    /// Its weight.
    pub weight: f64,
    /// Tasks that wait.
    pub waiting: u64,
    /// Tasks that run.
    pub running: u64,
    /// Starts within the last minute or so.
    pub started: u64,
    /// Its part of what the queue's keys share, within the last minute or so, 0 to 1: of its starts, or of the time of
    /// its runs.
    pub share: f64,
    /// The part that is due to it while it waits: its weight among those of all keys that wait, 0 to 1.
    pub share_due: f64,
    /// It may not run.
    pub paused: bool,
    /// How many of its tasks may run at once: its own limit, or its queue's. Absent: as many as there are slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// How much of it may start in a second: its own rate, or its queue's. Absent: as much as there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// Why none of its tasks may start now: `paused`, `limit` or `rate`. Absent: one may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<String>,
}

impl From<v1::QueueKey> for QueueKey {
    fn from(key: v1::QueueKey) -> QueueKey {
        QueueKey {
            key: key.key,
            weight: f64::from(key.weight_thousandths) / 1e3,
            waiting: key.waiting,
            running: key.running,
            started: key.started,
            share: key.share,
            share_due: key.share_due,
            paused: key.paused,
            limit: key.limit,
            rate: key.rate.map(Rate::from),
            held: (!key.held.is_empty()).then_some(key.held),
        }
    }
}

/// Every worker.
#[derive(Debug, Serialize, ToSchema)]
pub struct Workers {
    /// By seat.
    pub workers: Vec<Worker>,
}

impl From<v1::WorkersResponse> for Workers {
    fn from(response: v1::WorkersResponse) -> Workers {
        Workers { workers: response.workers.into_iter().map(Worker::from).collect() }
    }
}

/// A worker that is counted on.
#[derive(Debug, Serialize, ToSchema)]
pub struct Worker {
    /// Its seat.
    pub seat: String,
    /// The life of its process, and how often that has joined again: 3.1.
    pub life: String,
    /// new, healthy, unhealthy, absent or draining.
    pub health: String,
    /// How many tasks it runs at once.
    pub slots: u32,
    /// How many it runs now.
    pub running: u32,
    /// The queues that it serves.
    pub queues: Vec<ServedQueue>,
    /// Since it was last heard. Absent: this server has not heard of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heard_ms_ago: Option<u64>,
    /// In how long it counts as lost, if it is not heard.
    pub lost_in_ms: u64,
    /// Why it gets no work. Absent: it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// Where it speaks from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

/// A queue that a worker serves.
#[derive(Debug, Serialize, ToSchema)]
pub struct ServedQueue {
    /// Its name.
    pub queue: String,
    /// Its part of the worker's slots, among the others.
    pub weight: f64,
}

impl From<v1::Worker> for Worker {
    fn from(worker: v1::Worker) -> Worker {
        let said = |text: String| (!text.is_empty()).then_some(text);
        let served = |served: v1::ServedQueue| ServedQueue {
            queue: served.queue,
            weight: f64::from(served.weight_thousandths) / 1e3,
        };
        Worker {
            life: life(&worker),
            seat: worker.seat,
            health: worker.health,
            slots: worker.slots,
            running: worker.running,
            queues: worker.queues.into_iter().map(served).collect(),
            heard_ms_ago: worker.heard_ms_ago,
            lost_in_ms: worker.lost_in_ms,
            why_not: said(worker.why_not),
            address: said(worker.address),
        }
    }
}

/// A worker's life as people see it.
pub fn life(worker: &v1::Worker) -> String {
    match worker.rejoin {
        0 => worker.process_life.to_string(),
        rejoin => format!("{}.{rejoin}", worker.process_life),
    }
}

/// A worker that was asked to drain.
#[derive(Debug, Serialize, ToSchema)]
pub struct Drained {
    /// False: it is not connected, and is told when it is back.
    pub told: bool,
    /// Runs that go on until they have ended.
    pub running: u32,
}

impl From<v1::DrainWorkerResponse> for Drained {
    fn from(response: v1::DrainWorkerResponse) -> Drained {
        let v1::DrainWorkerResponse { told, running } = response;
        Drained { told, running }
    }
}

/// A worker that was given up.
#[derive(Debug, Serialize, ToSchema)]
pub struct GivenUp {
    /// Runs that were its: their tasks are tried again.
    pub running: u32,
}

impl From<v1::GiveUpWorkerResponse> for GivenUp {
    fn from(response: v1::GiveUpWorkerResponse) -> GivenUp {
        GivenUp { running: response.running }
    }
}

/// A start gate that was opened by hand.
#[derive(Debug, Serialize, ToSchema)]
pub struct GateOpened {
    /// It was open already.
    pub was_open: bool,
    /// The seats of the workers that count as dead now.
    pub given_up: Vec<String>,
}

impl From<v1::OpenGateResponse> for GateOpened {
    fn from(response: v1::OpenGateResponse) -> GateOpened {
        let v1::OpenGateResponse { was_open, given_up } = response;
        GateOpened { was_open, given_up }
    }
}

/// The server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Status {
    /// The server's version.
    pub version: String,
    /// What kind of store, and where.
    pub store: String,
    /// The store's id.
    pub store_id: String,
    /// How long it has been up.
    pub up_ms: u64,
    /// When a worker counts as what.
    pub thresholds: Thresholds,
    /// Its shards.
    pub shards: Vec<Shard>,
}

/// When a worker counts as what.
#[derive(Debug, Serialize, ToSchema)]
pub struct Thresholds {
    /// How often it is heard.
    pub heartbeat_ms: u64,
    /// Silent for so long, it gets no work.
    pub unhealthy_after_ms: u64,
    /// Silent for so long, its runs are lost.
    pub lost_after_ms: u64,
    /// How long it may go on after its last answered heartbeat: follows from `lost_after_ms`.
    pub lease_ms: u64,
    /// How long it may go on without a server that was stopped in good order.
    pub absence_ms: u64,
    /// For how long a start gate can be shut at most: follows from `lost_after_ms` and `absence_ms`.
    pub longest_shut_ms: u64,
}

/// A shard of the server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Shard {
    /// Its number.
    pub id: u32,
    /// How often it was taken.
    pub epoch: u64,
    /// Tasks may start.
    pub open: bool,
    /// While its start gate is shut: what it waits for, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The seats of workers that have not been heard.
    pub absent_seats: Vec<String>,
    /// In how long it opens at the latest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opens_in_ms: Option<u64>,
    /// Tasks that wait.
    pub waiting: u64,
    /// Tasks that run.
    pub running: u64,
    /// Workers that are counted on.
    pub workers: u32,
    /// The store has room for new tasks.
    pub room: bool,
    /// The store may be an old copy of itself: there may be workers that it does not know.
    pub in_doubt: bool,
}

impl From<v1::StatusResponse> for Status {
    fn from(status: v1::StatusResponse) -> Status {
        let times = status.thresholds.unwrap_or_default();
        let shard = |shard: v1::Shard| Shard {
            id: shard.id,
            epoch: shard.epoch,
            open: shard.open,
            waits_for: (!shard.waits_for.is_empty()).then_some(shard.waits_for),
            absent_seats: shard.absent_seats,
            opens_in_ms: shard.opens_in_ms,
            waiting: shard.waiting,
            running: shard.running,
            workers: shard.workers,
            room: shard.room,
            in_doubt: shard.in_doubt,
        };
        Status {
            version: status.version,
            store: status.store,
            store_id: format!("{:016x}", status.store_id),
            up_ms: status.up_ms,
            thresholds: Thresholds {
                heartbeat_ms: times.heartbeat_ms,
                unhealthy_after_ms: times.unhealthy_after_ms,
                lost_after_ms: times.lost_after_ms,
                lease_ms: times.lease_ms,
                absence_ms: status.absence_ms,
                longest_shut_ms: status.longest_shut_ms,
            },
            shards: status.shards.into_iter().map(shard).collect(),
        }
    }
}

/// Why a request was not done.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The one field.
    pub error: Error,
}

/// What was wrong, and what to do.
#[derive(Debug, Serialize, ToSchema)]
pub struct Error {
    /// invalid, not_found, conflict, too_large, limited, unavailable or internal.
    pub kind: String,
    /// For people.
    pub message: String,
    /// Which field is wrong, if one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// When to send it again, if that helps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl From<&Refusal> for ErrorBody {
    fn from(refusal: &Refusal) -> ErrorBody {
        let field = (!refusal.field.is_empty()).then(|| refusal.field.clone());
        let (message, retry_after_ms) = (refusal.message.clone(), refusal.retry_after_ms);
        ErrorBody { error: Error { kind: refusal.kind.name().into(), message, field, retry_after_ms } }
    }
}
