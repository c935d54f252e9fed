//! A task to submit, which tasks to look at or to change, and how a queue treats them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use evenhand_api::{convert, v1};
use evenhand_core::Refusal;
use serde::Serialize;

use super::{AfterDowngrade, Limit, Share, TaskState};

/// A task to submit.
///
/// ```
/// # use std::time::Duration;
/// use evenhand::NewTask;
///
/// let task = NewTask::json(&["report.pdf"])?.key("acme").max_duration(Duration::from_secs(60));
/// # Ok::<(), evenhand::Refusal>(())
/// ```
///
/// It may wait for a time, be too late after another, and be the only one of its kind:
///
/// ```
/// # use std::time::Duration;
/// use evenhand::{NewTask, Retries};
///
/// let minutes = |n: u64| Duration::from_secs(60 * n);
/// let task = NewTask::new("the bill of May")
///     .delay(minutes(10))
///     .expires(minutes(60))
///     .retries(Retries::new().max_attempts(8).backoff(Duration::from_secs(5)))
///     .unique("bill-2026-05");
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

    /// Gives it an input file: a handler finds it in [`Run::files`](crate::Run::files), a command in the directory that it
    /// works in. Each has a name of its own, without `/`. At most 64, each of at most 1 MiB, and 4 MiB together with the
    /// payload.
    ///
    /// ```
    /// # use evenhand::NewTask;
    /// let task = NewTask::new("to pdf").file("page.html", "<p>hello").file("style.css", "p { color: red }");
    /// ```
    pub fn file(mut self, name: impl Into<String>, bytes: impl Into<Bytes>) -> NewTask {
        self.task.files.push(v1::File { name: name.into(), content: bytes.into() });
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

    /// How often it may be tried; its queue decides if nobody says.
    pub fn max_attempts(mut self, attempts: u32) -> NewTask {
        self.task.retry.get_or_insert_default().max_attempts = Some(attempts);
        self
    }

    /// How it is tried again when it fails. Where this says nothing, its queue decides.
    pub fn retries(mut self, retries: Retries) -> NewTask {
        self.task.retry = Some(retries.retry);
        self
    }

    /// It may start after so long, and is scheduled until then.
    pub fn delay(mut self, delay: Duration) -> NewTask {
        self.task.delay_ms = Some(ms(delay));
        self.task.run_at_ms = None;
        self
    }

    /// It may start at this time, and is scheduled until then. The past is now.
    pub fn run_at(mut self, at: SystemTime) -> NewTask {
        self.task.run_at_ms = Some(since_1970(at));
        self.task.delay_ms = None;
        self
    }

    /// It is too late to start it after so long: it ends as expired.
    pub fn expires(mut self, after: Duration) -> NewTask {
        self.task.expires_ms = Some(ms(after));
        self
    }

    /// The same key again in the same queue within a day is the same task: it is not accepted anew, and its id is
    /// answered. See [`NewTask::unique_for`] for another window.
    pub fn unique(mut self, key: impl Into<String>) -> NewTask {
        self.task.unique_key = key.into();
        self
    }

    /// How long its unique key counts, at most 30 days; a day if nobody says.
    pub fn unique_for(mut self, window: Duration) -> NewTask {
        self.task.unique_ms = Some(ms(window));
        self
    }

    /// It is wanted as long as somebody watches it: it is canceled when nobody has for so long, a second to a day.
    pub fn attached(mut self, ttl: Duration) -> NewTask {
        self.task.attach_ttl_ms = Some(ms(ttl));
        self
    }

    /// Bytes of its payload.
    pub fn payload_bytes(&self) -> usize {
        self.task.payload.len()
    }

    /// Bytes of its payload and its files.
    pub fn input_bytes(&self) -> usize {
        self.payload_bytes() + self.task.files.iter().map(|file| file.content.len()).sum::<usize>()
    }

    /// How long one run may take.
    pub fn max_duration(mut self, duration: Duration) -> NewTask {
        self.task.max_duration_ms = Some(ms(duration));
        self
    }

    /// How long a run of it takes, as far as you know: what it is charged where its queue shares time
    /// ([`QueueSettings::share`]). If nobody says, it is taken for one like the last of its key. What a run really
    /// took counts when it has ended.
    pub fn expected(mut self, duration: Duration) -> NewTask {
        self.task.expected_ms = Some(ms(duration));
        self
    }

    /// Says what a server would say of this task, whatever else it has: spares a call, or spoiling one for others.
    pub fn check(&self) -> Result<(), Refusal> {
        convert::check_files(&self.task.files, self.payload_bytes())?;
        // Without the payload and the files, which would be copied.
        let (payload, files) = (Bytes::new(), Vec::new());
        let task = convert::new_task(v1::NewTask { payload, files, ..self.task.clone() })?;
        task.check(self.payload_bytes())
    }
}

impl From<v1::NewTask> for NewTask {
    fn from(task: v1::NewTask) -> NewTask {
        NewTask { task }
    }
}

/// How tasks are tried again: for one ([`NewTask::retries`]), or for all of a queue that do not say
/// ([`QueueSettings::retries`]). What it does not say stays as it is.
///
/// ```
/// # use std::time::Duration;
/// use evenhand::Retries;
///
/// // After 1 s, 3 s, 9 s, and then every 10 s; each varies by half, so that what failed together does not come
/// // back together.
/// let patient = Retries::new()
///     .max_attempts(20)
///     .backoff(Duration::from_secs(1))
///     .factor(3.0)
///     .max_backoff(Duration::from_secs(10));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Retries {
    pub(crate) retry: v1::Retry,
}

impl Retries {
    /// Nothing said yet.
    pub fn new() -> Retries {
        Retries::default()
    }

    /// How often a task is tried in all, 1 to 1000.
    pub fn max_attempts(mut self, attempts: u32) -> Retries {
        self.retry.max_attempts = Some(attempts);
        self
    }

    /// How long it waits before the second try.
    pub fn backoff(mut self, first: Duration) -> Retries {
        self.retry.backoff_ms = Some(ms(first));
        self
    }

    /// How many times as long it waits before each later one, 1 to 100.
    pub fn factor(mut self, factor: f64) -> Retries {
        // What is no such number becomes one that is refused.
        self.retry.factor_thousandths = Some((factor * 1e3).round() as u32);
        self
    }

    /// How long it waits at most.
    pub fn max_backoff(mut self, longest: Duration) -> Retries {
        self.retry.max_backoff_ms = Some(ms(longest));
        self
    }

    /// After so many runs that were lost with their workers a task is not tried again, 1 to 255. Of queues only.
    pub fn max_lost(mut self, runs: u32) -> Retries {
        self.retry.max_lost = Some(runs);
        self
    }
}

impl From<v1::Retry> for Retries {
    fn from(retry: v1::Retry) -> Retries {
        Retries { retry }
    }
}

/// How a queue treats its tasks: what is to be changed, see [`Client::set_queue`](crate::Client::set_queue). What it
/// does not say stays as it is.
///
/// ```
/// # use std::time::Duration;
/// use evenhand::{QueueSettings, Retries, Share};
///
/// let settings = QueueSettings::new()
///     .retries(Retries::new().max_attempts(8))
///     .retention(Duration::from_secs(7 * 24 * 3600))
///     .share(Share::Time);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueSettings {
    pub(super) settings: v1::QueueSettings,
    pub(super) version: Option<u64>,
}

impl QueueSettings {
    /// Nothing said yet.
    pub fn new() -> QueueSettings {
        QueueSettings::default()
    }

    /// How its tasks are tried again, unless they say it themselves.
    pub fn retries(mut self, retries: Retries) -> QueueSettings {
        self.settings.retry = Some(retries.retry);
        self
    }

    /// How long the ends of its tasks are remembered, with their results, at most a year. Zero: not at all.
    pub fn retention(mut self, retention: Duration) -> QueueSettings {
        self.settings.retention_ms = Some(ms(retention));
        self
    }

    /// Whether it is paused: nothing of it is started. What runs goes on.
    pub fn paused(mut self, paused: bool) -> QueueSettings {
        self.settings.paused = Some(paused);
        self
    }

    /// What its keys share: tasks, each of which counts one, or the time that they take. Tasks that wait when it is
    /// changed keep their places.
    pub fn share(mut self, share: Share) -> QueueSettings {
        self.settings.share = Some(share.into());
        self
    }

    /// Its duration classes, shortest first: how long a task may run, and how many runs may hold that class or a longer
    /// one. Durations grow, limits do not, and the first limit is [`Limit::All`]. They replace those it had; none at all
    /// removes them.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use evenhand::{Limit, QueueSettings};
    ///
    /// let seconds = Duration::from_secs;
    /// let settings = QueueSettings::new().classes([
    ///     (seconds(3), Limit::All),
    ///     (seconds(10), Limit::Slots(8)),
    ///     (seconds(30), Limit::Percent(25)),
    /// ]);
    /// ```
    pub fn classes(mut self, classes: impl IntoIterator<Item = (Duration, Limit)>) -> QueueSettings {
        let class = |(duration, limit): (Duration, Limit)| {
            let limit = match limit {
                Limit::All => v1::class_limit::Limit::All(true),
                Limit::Slots(slots) => v1::class_limit::Limit::Slots(slots),
                Limit::Percent(percent) => v1::class_limit::Limit::Percent(percent.into()),
            };
            v1::ClassLimit { duration_ms: ms(duration), limit: Some(limit) }
        };
        self.settings.classes = Some(v1::Classes { classes: classes.into_iter().map(class).collect() });
        self
    }

    /// What happens to a task whose time was up after it had been downgraded: it fails, or is tried again at once.
    pub fn after_downgrade(mut self, after: AfterDowngrade) -> QueueSettings {
        self.settings.after_downgrade = Some(after.into());
        self
    }

    /// How long the client of an interactive run is warned before it is halted, at most a minute. Zero: not at all.
    pub fn interactive_grace(mut self, grace: Duration) -> QueueSettings {
        self.settings.interactive_grace_ms = Some(ms(grace));
        self
    }

    /// How many tasks of one key may run at once, unless the key has a limit of its own ([`KeySettings::limit`]). None:
    /// as many as there are slots.
    pub fn key_limit(mut self, limit: Option<u32>) -> QueueSettings {
        self.settings.key_limit = Some(limit.unwrap_or(0));
        self
    }

    /// How much of it may start in a second. None: as much as there is.
    pub fn rate(mut self, rate: Option<Rate>) -> QueueSettings {
        self.settings.rate = Some(Rate::or_none(rate));
        self
    }

    /// How much of one key may start in a second, unless the key has a rate of its own ([`KeySettings::rate`]). None: as
    /// much as there is.
    pub fn key_rate(mut self, rate: Option<Rate>) -> QueueSettings {
        self.settings.key_rate = Some(Rate::or_none(rate));
        self
    }

    /// Only if nobody has changed them since: the version as it was read ([`Client::queue`](crate::Client::queue)).
    /// Otherwise it is refused, as a conflict.
    pub fn if_version(mut self, version: u64) -> QueueSettings {
        self.version = Some(version);
        self
    }
}

/// How much may start in a second, of a queue ([`QueueSettings::rate`]) or of a key ([`KeySettings::rate`]).
///
/// ```
/// use evenhand::Rate;
///
/// // Ten tasks a second, and thirty at once after a pause.
/// let rate = Rate::per_second(10.0).burst(30.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    rate: v1::Rate,
}

impl Rate {
    /// So many tasks a second, with at most three decimals: 0.001 to 1,000,000.
    pub fn per_second(tasks: f64) -> Rate {
        // What is no such number becomes one that is refused.
        let per_second_thousandths = thousandths(tasks).unwrap_or(u64::MAX);
        Rate { rate: v1::Rate { per_second_thousandths, ..v1::Rate::default() } }
    }

    /// So many at once after a pause, at least 1; as many as in a second, if nobody says.
    pub fn burst(mut self, tasks: f64) -> Rate {
        self.rate.burst_thousandths = Some(thousandths(tasks).unwrap_or(u64::MAX));
        self
    }

    /// It counts what tasks cost instead: where time is shared, the seconds that they are expected to take.
    pub fn of_cost(mut self) -> Rate {
        self.rate.unit = v1::RateUnit::Cost.into();
        self
    }

    fn or_none(rate: Option<Rate>) -> v1::Rate {
        rate.map_or_else(v1::Rate::default, |rate| rate.rate)
    }
}

impl From<v1::Rate> for Rate {
    fn from(rate: v1::Rate) -> Rate {
        Rate { rate }
    }
}

/// A number above 0 in thousandths, if it is one.
fn thousandths(number: f64) -> Option<u64> {
    let thousandths = (number * 1e3).round();
    (thousandths >= 1.0 && thousandths <= u64::MAX as f64).then_some(thousandths as u64)
}

/// What a key of a queue has of its own: what is to be changed, see [`Client::set_key`](crate::Client::set_key). What it
/// does not say stays as it is.
///
/// ```
/// use evenhand::{KeySettings, Rate};
///
/// let settings = KeySettings::new().weight(Some(2.0)).limit(Some(4)).rate(Some(Rate::per_second(10.0)));
/// let as_its_queue_says = KeySettings::new().limit(None).rate(None);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeySettings {
    pub(super) weight: Option<f64>,
    pub(super) request: v1::SetKeyRequest,
}

impl KeySettings {
    /// Nothing said yet.
    pub fn new() -> KeySettings {
        KeySettings::default()
    }

    /// Its weight, whatever its tasks ask for: 0.001 to 1000. None: what they ask for.
    pub fn weight(mut self, weight: Option<f64>) -> KeySettings {
        self.weight = Some(weight.unwrap_or(0.0));
        self
    }

    /// How many of its tasks may run at once, whatever its queue says. None: what its queue says.
    pub fn limit(mut self, limit: Option<u32>) -> KeySettings {
        self.request.limit = Some(limit.unwrap_or(0));
        self
    }

    /// How much of it may start in a second, whatever its queue says. None: what its queue says.
    pub fn rate(mut self, rate: Option<Rate>) -> KeySettings {
        self.request.rate = Some(Rate::or_none(rate));
        self
    }

    /// Whether it is paused: its tasks wait. What runs goes on.
    pub fn paused(mut self, paused: bool) -> KeySettings {
        self.request.paused = Some(paused);
        self
    }
}

/// Which tasks to list, to watch, to cancel or to run again: those that match everything that is named.
///
/// ```
/// use evenhand::{Filter, TaskState};
///
/// let running_for_acme = Filter::all().queue("render").key("acme").state(TaskState::Running);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub(super) filter: v1::Filter,
}

impl Filter {
    /// All of them.
    pub fn all() -> Filter {
        Filter::default()
    }

    /// Of this queue only.
    pub fn queue(mut self, queue: impl Into<String>) -> Filter {
        self.filter.queue = queue.into();
        self
    }

    /// Of this key only.
    pub fn key(mut self, key: impl Into<String>) -> Filter {
        self.filter.key = key.into();
        self
    }

    /// In this state only. A watch tells every state, and refuses it.
    pub fn state(mut self, state: TaskState) -> Filter {
        self.filter.state = state.into();
        self
    }

    /// Accepted at this time or later only. A watch begins now, and refuses it.
    pub fn accepted_from(mut self, from: SystemTime) -> Filter {
        self.filter.accepted_from_ms = Some(since_1970(from));
        self
    }

    /// Accepted before this time only. A watch refuses it.
    pub fn accepted_before(mut self, before: SystemTime) -> Filter {
        self.filter.accepted_before_ms = Some(since_1970(before));
        self
    }

    /// What a watch can ask for.
    pub(super) fn watched(self) -> Result<v1::WatchRequest, Refusal> {
        let v1::Filter { queue, key, state, accepted_from_ms, accepted_before_ms } = self.filter;
        if state != i32::from(TaskState::Unspecified) {
            return Err(Refusal::invalid("state", "is for lists; a watch tells every state"));
        }
        if accepted_from_ms.or(accepted_before_ms).is_some() {
            return Err(Refusal::invalid("accepted", "is for lists; a watch tells what happens from now on"));
        }
        Ok(v1::WatchRequest { queue, key, ..v1::WatchRequest::default() })
    }
}

impl From<v1::Filter> for Filter {
    fn from(filter: v1::Filter) -> Filter {
        Filter { filter }
    }
}

impl From<Filter> for v1::ListRequest {
    /// The first page, of the usual size.
    fn from(filter: Filter) -> v1::ListRequest {
        let v1::Filter { queue, key, state, accepted_from_ms, accepted_before_ms } = filter.filter;
        let (cursor, limit) = (String::new(), None);
        v1::ListRequest { queue, cursor, limit, key, state, accepted_from_ms, accepted_before_ms }
    }
}

/// A duration on the wire. What is too long for it is refused there.
fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A time on the wire. Whatever was before 1970 is past all the same.
fn since_1970(at: SystemTime) -> u64 {
    ms(at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_on_when_a_task_starts_counts() {
        let later = UNIX_EPOCH + Duration::from_secs(7);
        let task = NewTask::new("x").delay(Duration::from_secs(3)).run_at(later).task;
        assert_eq!((task.delay_ms, task.run_at_ms), (None, Some(7_000)));
        let task = NewTask::new("x").run_at(later).delay(Duration::from_secs(3)).task;
        assert_eq!((task.delay_ms, task.run_at_ms), (Some(3_000), None));
        let past = NewTask::new("x").run_at(UNIX_EPOCH - Duration::from_secs(7)).task;
        assert_eq!(past.run_at_ms, Some(0));
    }

    #[test]
    fn what_is_said_of_time_is_told_in_milliseconds() {
        let task = NewTask::new("x").expected(Duration::from_secs(90)).task;
        assert_eq!((task.expected_ms, task.max_duration_ms), (Some(90_000), None));
        let settings = QueueSettings::new().share(Share::Time).settings;
        assert_eq!((settings.share(), settings.paused), (Share::Time, None));
        assert_eq!(QueueSettings::new().settings.share, None);
    }

    #[test]
    fn classes_limits_and_rates_are_told_as_the_wire_has_them() {
        use v1::class_limit::Limit::{All, Percent, Slots};
        let seconds = Duration::from_secs;
        let settings = QueueSettings::new()
            .classes([
                (seconds(3), Limit::All),
                (seconds(10), Limit::Slots(8)),
                (seconds(30), Limit::Percent(25)),
            ])
            .key_limit(Some(4))
            .rate(Some(Rate::per_second(1.5).burst(3.0)))
            .key_rate(None)
            .settings;
        let classes = settings.classes.unwrap_or_default().classes;
        let limits: Vec<_> = classes.iter().map(|class| (class.duration_ms, class.limit)).collect();
        assert_eq!(limits, [(3_000, Some(All(true))), (10_000, Some(Slots(8))), (30_000, Some(Percent(25)))]);
        let rate = settings.rate.unwrap_or_default();
        assert_eq!((rate.per_second_thousandths, rate.burst_thousandths), (1_500, Some(3_000)));
        assert_eq!((settings.key_limit, settings.key_rate), (Some(4), Some(v1::Rate::default())));
        let none = QueueSettings::new().classes([]).key_limit(None).settings;
        assert_eq!((none.classes, none.key_limit), (Some(v1::Classes::default()), Some(0)));
        // A rate that is none must not become no rate.
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(convert::parse_rate(&Rate::per_second(wrong).rate).is_err(), "{wrong}");
        }
    }

    #[test]
    fn attempts_are_a_part_of_the_retries() {
        let task = NewTask::new("x").retries(Retries::new().backoff(Duration::from_secs(1))).max_attempts(7);
        let retry = task.task.retry.unwrap_or_default();
        assert_eq!((retry.max_attempts, retry.backoff_ms), (Some(7), Some(1_000)));
        let factors = [1.0, 2.5, -1.0, f64::NAN, 1e12].map(|n| Retries::new().factor(n).retry);
        let factors = factors.map(|retry| retry.factor_thousandths);
        assert_eq!(factors, [1_000, 2_500, 0, 0, u32::MAX].map(Some));
    }

    #[test]
    fn a_watch_refuses_what_it_cannot_do() {
        let watched = |filter: Filter| filter.watched().map_err(|refusal| refusal.field);
        assert!(watched(Filter::all().queue("q").key("k")).is_ok());
        assert_eq!(watched(Filter::all().state(TaskState::Queued)).err(), Some("state".into()));
        assert_eq!(watched(Filter::all().accepted_before(UNIX_EPOCH)).err(), Some("accepted".into()));
    }
}
