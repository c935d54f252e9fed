//! What an operator asks first, as Prometheus reads it. Counts of tasks are the queues' own, which survive a
//! restart; the rest begins at zero with the server. What the shard knows is looked up when the page is asked
//! for, so nothing is counted twice.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use evenhand_core::Change;
use evenhand_core::change::Place;
use evenhand_core::life::End;
use evenhand_core::messages::Why;
use evenhand_core::names::{Key, Millis, QueueId};
use evenhand_core::workers::CutWhy;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use evenhand_api::convert;
use evenhand_core::admission::classes;

use crate::clients::by_health;
use crate::mailbox::View;

/// Keys whose starts are counted, and those that are shown: the busiest.
const KEYS_COUNTED: usize = 1_000;
const KEYS_SHOWN: usize = 20;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfQueue {
    queue: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOutcome {
    queue: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKey {
    queue: String,
    key: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfHealth {
    health: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReason {
    why: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfEnd {
    end: &'static str,
}

/// A class is known by how long its tasks may run.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfClass {
    queue: String,
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfHeld {
    queue: String,
    by: &'static str,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Metrics {
    commits: Histogram,
    changes: Histogram,
    timers: Counter,
    gone: Family<OfReason, Counter>,
    runs_lost: Counter,
    ends: Family<OfEnd, Counter>,
    cuts: Family<OfReason, Counter>,
    interactive_over: Family<OfReason, Counter>,
    interactive_denied: Counter,
}

/// Starts, and where keys share time how long runs took, by queue, and by key for those that have most. Counted by
/// the loop, which has them to itself.
#[derive(Debug)]
pub(crate) struct Starts {
    queues: HashMap<QueueId, Count>,
    keys: HashMap<(QueueId, Key), Count>,
    /// When this half minute began, and the one before.
    began: [Millis; 2],
}

/// Starts ever, and starts and milliseconds of late.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    ever: u64,
    starts: Lately,
    took_ms: Lately,
}

/// What was counted in this half minute, and in the one before.
#[derive(Clone, Copy, Debug, Default)]
struct Lately {
    now: u64,
    before: u64,
}

impl Lately {
    fn sum(self) -> u64 {
        self.now + self.before
    }

    fn turn(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }
}

impl Count {
    fn add(&mut self) {
        self.ever += 1;
        self.starts.now += 1;
    }

    fn turn(&mut self) {
        self.starts.turn();
        self.took_ms.turn();
    }
}

impl Starts {
    /// How often [`Starts::turn`] is to be called.
    pub(crate) const TURN_EVERY: Duration = Duration::from_secs(30);

    pub(crate) fn new(now: Millis) -> Starts {
        Starts { queues: HashMap::new(), keys: HashMap::new(), began: [now; 2] }
    }

    pub(crate) fn count(&mut self, queue: QueueId, key: &Key) {
        self.queues.entry(queue).or_default().add();
        if self.keys.len() >= KEYS_COUNTED {
            self.make_room();
        }
        self.keys.entry((queue, key.clone())).or_default().add();
    }

    /// A run has ended that took so long.
    pub(crate) fn took(&mut self, queue: QueueId, key: &Key, ms: u64, now: Millis) {
        let ms = self.of_late(ms, now);
        self.queues.entry(queue).or_default().took_ms.now += ms;
        // One that had to make room for others is not busy.
        if let Some(count) = self.keys.get_mut(&(queue, key.clone())) {
            count.took_ms.now += ms;
        }
    }

    /// As much of a time that ends now as is counted: that of the last half minute to minute.
    pub(crate) fn of_late(&self, ms: u64, now: Millis) -> u64 {
        ms.min(now.0.saturating_sub(self.began[1].0))
    }

    /// The keys that start least make room: a key that is busy from now on is seen soon.
    fn make_room(&mut self) {
        let rank = |count: &Count| (count.starts.sum(), count.ever);
        let mut ranks: Vec<(u64, u64)> = self.keys.values().map(rank).collect();
        ranks.sort_unstable();
        let middle = ranks[ranks.len() / 2];
        self.keys.retain(|_, count| rank(count) > middle);
    }

    /// Another half minute begins.
    pub(crate) fn turn(&mut self, now: Millis) {
        self.began = [now, self.began[0]];
        self.queues.values_mut().chain(self.keys.values_mut()).for_each(Count::turn);
    }

    /// Starts of a queue, or of one of its keys, within the last half minute to minute.
    pub(crate) fn lately(&self, queue: QueueId, key: Option<&Key>) -> u64 {
        self.get(queue, key).starts.sum()
    }

    /// The milliseconds that runs took which ended within the last half minute to minute, where time is shared.
    pub(crate) fn took_lately(&self, queue: QueueId, key: Option<&Key>) -> u64 {
        self.get(queue, key).took_ms.sum()
    }

    fn get(&self, queue: QueueId, key: Option<&Key>) -> Count {
        let count = match key {
            None => self.queues.get(&queue),
            Some(key) => self.keys.get(&(queue, key.clone())),
        };
        count.copied().unwrap_or_default()
    }

    /// The keys of a queue that are counted.
    pub(crate) fn keys_of(&self, queue: QueueId) -> impl Iterator<Item = &Key> {
        self.keys.keys().filter(move |(of, _)| *of == queue).map(|(_, key)| key)
    }

    /// Starts by queue.
    pub(crate) fn queues(&self) -> Vec<(QueueId, u64)> {
        self.queues.iter().map(|(queue, count)| (*queue, count.ever)).collect()
    }

    /// The busiest keys.
    pub(crate) fn busiest(&self) -> Vec<(QueueId, Key, u64)> {
        let mut keys: Vec<_> =
            self.keys.iter().map(|((queue, key), count)| (*queue, key.clone(), count.ever)).collect();
        keys.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| (a.0, &a.1).cmp(&(b.0, &b.1))));
        keys.truncate(KEYS_SHOWN);
        keys
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let metrics = Metrics {
            commits: Histogram::new(exponential_buckets(0.0001, 2.0, 18)),
            changes: Histogram::new(exponential_buckets(1.0, 4.0, 9)),
            timers: Counter::default(),
            gone: Family::default(),
            runs_lost: Counter::default(),
            ends: Family::default(),
            cuts: Family::default(),
            interactive_over: Family::default(),
            interactive_denied: Counter::default(),
        };
        // What has not happened yet is told as none, so that the first is seen as one more.
        for end in ["succeeded", "failed", "failed_for_good", "lost", "time_up", "downgraded"] {
            drop(metrics.ends.get_or_create(&OfEnd { end }));
        }
        for why in ["class_full", "no_free_slot", "denied", "shortened"] {
            drop(metrics.cuts.get_or_create(&OfReason { why }));
        }
        for why in ["ended", "halted", "time_up", "lost", "canceled"] {
            drop(metrics.interactive_over.get_or_create(&OfReason { why }));
        }
        metrics
    }

    /// A run has ended, durably.
    pub(crate) fn run_ended(&self, end: End) {
        self.ends.get_or_create(&OfEnd { end: convert::end_name(end) }).inc();
    }

    /// A run has less time than it had.
    pub(crate) fn cut(&self, why: CutWhy) {
        self.cuts.get_or_create(&OfReason { why: why.name() }).inc();
    }

    /// An interactive run is over.
    pub(crate) fn interactive_over(&self, why: Why) {
        let why = match why {
            Why::Ended => "ended",
            Why::Halted => "halted",
            Why::TimeUp => "time_up",
            Why::Lost => "lost",
            Why::Canceled => "canceled",
        };
        self.interactive_over.get_or_create(&OfReason { why }).inc();
    }

    /// Somebody wanted a slot now, and there was none.
    pub(crate) fn interactive_denied(&self) {
        self.interactive_denied.inc();
    }

    /// A worker is gone, and so are its runs.
    pub(crate) fn lost(&self, runs: usize, why: &'static str) {
        self.gone.get_or_create(&OfReason { why }).inc();
        self.runs_lost.inc_by(runs as u64);
    }

    pub(crate) fn committed(&self, took: Duration) {
        self.commits.observe(took.as_secs_f64());
    }

    pub(crate) fn sealed(&self, changes: &[Change]) {
        self.changes.observe(changes.len() as f64);
        let is_timer = |change: &&Change| {
            matches!(
                change,
                Change::Untimed { .. }
                    | Change::Forgotten { .. }
                    | Change::Moved { from: Place::Timer(_), .. }
                    | Change::Finished { from: Place::Timer(_), .. }
            )
        };
        self.timers.inc_by(changes.iter().filter(is_timer).count() as u64);
    }

    /// The page. Without a view, only what does not need one.
    pub(crate) fn page(&self, view: Option<&View>, mailbox_fill: f64) -> String {
        let mut registry = Registry::with_prefix("evenhand");
        registry.register("commit_seconds", "How long commits take", self.commits.clone());
        registry.register("commit_changes", "Changes in a commit", self.changes.clone());
        let about = "Timers that are over since the server began: due, or not needed any more";
        registry.register("timers_over", about, self.timers.clone());
        let about = "Workers that are no longer counted on, since the server began, by why";
        registry.register("workers_gone", about, self.gone.clone());
        let about = "Runs of workers that were given up, since the server began";
        registry.register("runs_lost", about, self.runs_lost.clone());
        let about = "Runs that ended, since the server began, by how";
        registry.register("runs_ended", about, self.ends.clone());
        let about = "Runs whose time was cut, since the server began, by why";
        registry.register("runs_cut", about, self.cuts.clone());
        let about = "Interactive runs that are over, since the server began, by why";
        registry.register("interactive_over", about, self.interactive_over.clone());
        let about = "Interactive tasks that were denied, since the server began";
        registry.register("interactive_denied", about, self.interactive_denied.clone());
        let fill = ConstGauge::new(mailbox_fill);
        registry.register("mailbox_fill", "Part of the clients' mailbox in use, 0 to 1", fill);
        registry.register("up", "The shard is here", ConstGauge::new(i64::from(view.is_some())));
        if let Some(view) = view {
            register_view(&mut registry, view);
        }
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

/// The page for those who do not speak OpenMetrics. They differ in what a counter is called where it is
/// explained, and in how the page ends.
pub(crate) fn plain(page: &str) -> String {
    let counters: HashSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut plain = String::with_capacity(page.len() + 1024);
    for line in page.lines().filter(|line| *line != "# EOF") {
        let explained = ["# HELP ", "# TYPE "].into_iter().find_map(|about| {
            let (name, rest) = line.strip_prefix(about)?.split_once(' ')?;
            counters.contains(name).then(|| format!("{about}{name}_total {rest}"))
        });
        plain.push_str(explained.as_deref().unwrap_or(line));
        plain.push('\n');
    }
    plain
}

fn register_view(registry: &mut Registry, view: &View) {
    let accepted = Family::<OfQueue, Counter>::default();
    let finished = Family::<OfOutcome, Counter>::default();
    let waiting = Family::<OfQueue, Gauge>::default();
    let running = Family::<OfQueue, Gauge>::default();
    let scheduled = Family::<OfQueue, Gauge>::default();
    let paused = Family::<OfQueue, Gauge>::default();
    let oldest = Family::<OfQueue, Gauge<f64, std::sync::atomic::AtomicU64>>::default();
    let interactive = Family::<OfQueue, Gauge>::default();
    let class_held = Family::<OfClass, Gauge>::default();
    let class_limit = Family::<OfClass, Gauge>::default();
    let keys_held = Family::<OfHeld, Gauge>::default();
    for view in &view.queues {
        for (by, keys) in [("limit", view.held_keys.0), ("rate", view.held_keys.1)] {
            keys_held.get_or_create(&OfHeld { queue: view.queue.name.clone(), by }).set(keys as i64);
        }
    }
    for queue in view.queues.iter().map(|view| &view.queue) {
        let of = OfQueue { queue: queue.name.clone() };
        accepted.get_or_create(&of).inc_by(queue.accepted);
        waiting.get_or_create(&of).set(queue.waiting as i64);
        running.get_or_create(&of).set(queue.running as i64);
        scheduled.get_or_create(&of).set(queue.scheduled as i64);
        paused.get_or_create(&of).set(i64::from(queue.paused));
        oldest.get_or_create(&of).set(queue.oldest_waiting_ms.unwrap_or(0) as f64 / 1e3);
        interactive.get_or_create(&of).set(queue.interactive as i64);
        for class in &queue.classes {
            let of = OfClass { queue: queue.name.clone(), class: classes::name(class.duration_ms) };
            class_held.get_or_create(&of).set(class.held as i64);
            class_limit.get_or_create(&of).set(class.limit as i64);
        }
        for (outcome, count) in [
            ("succeeded", queue.succeeded),
            ("failed", queue.failed),
            ("canceled", queue.canceled),
            ("expired", queue.expired),
        ] {
            finished.get_or_create(&OfOutcome { queue: queue.name.clone(), outcome }).inc_by(count);
        }
    }
    let name = |queue: QueueId| {
        view.queues.get(queue.0 as usize).map_or_else(String::new, |view| view.queue.name.clone())
    };
    let started = Family::<OfQueue, Counter>::default();
    for &(queue, count) in &view.started {
        started.get_or_create(&OfQueue { queue: name(queue) }).inc_by(count);
    }
    registry.register("tasks_started", "Runs started since the server began", started);
    let keys = Family::<OfKey, Gauge>::default();
    for (queue, key, count) in &view.busiest {
        keys.get_or_create(&OfKey { queue: name(*queue), key: key.as_str().into() }).set(*count as i64);
    }
    registry.register(
        "busiest_key_started",
        "Runs started of the busiest keys, since they are counted",
        keys,
    );
    registry.register("tasks_accepted", "Tasks accepted, ever", accepted);
    registry.register("tasks_finished", "Tasks that ended, ever, by outcome", finished);
    registry.register("tasks_waiting", "Tasks that wait", waiting);
    registry.register("tasks_running", "Tasks that run", running);
    registry.register("tasks_scheduled", "Tasks that wait for a time", scheduled);
    registry.register("queue_paused", "Nothing of the queue is started", paused);
    registry.register("interactive_running", "Interactive tasks that run", interactive);
    registry.register("class_held", "Runs that hold a duration class or a longer one", class_held);
    registry.register("class_limit", "How many runs may hold a duration class or a longer one", class_limit);
    registry.register(
        "keys_held",
        "Keys of which nothing may start now, by their limits or rates",
        keys_held,
    );
    registry.register("oldest_waiting_seconds", "How long the task has waited that goes next", oldest);
    let workers = Family::<OfHealth, Gauge>::default();
    for (health, count) in by_health(&view.workers) {
        workers.get_or_create(&OfHealth { health: health.into() }).set(count as i64);
    }
    registry.register("workers", "Workers by health", workers);
    registry.register("gate_open", "Tasks may start", ConstGauge::new(i64::from(view.shard.open)));
    let in_doubt = ConstGauge::new(i64::from(view.shard.in_doubt));
    registry.register("gate_in_doubt", "The store may be an old copy of itself", in_doubt);
    let version = ConstGauge::new(view.worker_set as i64);
    registry.register("worker_set_version", "The version of the worker set", version);
    registry.register(
        "room",
        "The store has room for new tasks",
        ConstGauge::new(i64::from(view.shard.room)),
    );
    registry.register("epoch", "The shard's epoch", ConstGauge::new(view.shard.epoch as i64));
    let leaked = view.slots_held as i64 - view.runs_alive as i64;
    registry.register("slots_leaked", "Slots held minus runs alive: must be 0", ConstGauge::new(leaked));
    registry.register("window_rows", "Waiting tasks in memory", ConstGauge::new(view.window_rows as i64));
    registry.register("window_timers", "Timers in memory", ConstGauge::new(view.timers as i64));
    let looks = ConstCounter::new(view.looks);
    registry.register("looks", "How often a queue was looked at for something to start", looks);
    registry.register("keys_remembered", "Keys in memory", ConstGauge::new(view.keys as i64));
    registry.register("payload_bytes", "Payloads in memory", ConstGauge::new(view.payload_bytes as i64));
}
