//! What the cases are made of: tasks that are told apart by one number, the changes an owner would write
//! for them, the owner itself, and the whole contents of a shard for before-and-after comparisons.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    AfterDowngrade, EndRecord, KeyRecord, LaneRecord, MemberRecord, Override, ParkedRecord, Place,
    QueueRecord, RequestIds, RequestRecord, Settings, SettingsRecord, Share, ShelfRecord, Timed, TimerRow,
    Totals, Try,
};
use evenhand_core::life::{Backoff, End, Outcome, Terms};
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, Incarnation, Key, LaneId, Life, Millis, Priority, QueueId, QueueName,
    RequestKey, Seat, ShardId, StoreId, TaskId, WorkerSetId,
};
use evenhand_core::{Change, Metadata, Row, Run, Task};

use crate::{Doubt, History, Listing, Page, Store, StoreError, Wanted};

/// The shard of cases that need only one.
pub(super) const SHARD: ShardId = ShardId(1);
/// The lane of cases that need only one.
pub(super) const LANE: LaneId = lane(1, 5, 0);
/// More than any case writes.
pub(super) const ALL: usize = 1_000_000;

/// A lane by its numbers.
pub(super) const fn lane(queue: u32, priority: u8, class: u8) -> LaneId {
    LaneId { queue: QueueId(queue), priority: Priority(priority), class: Class(class) }
}

pub(super) fn key(text: &str) -> Key {
    Key::new(text).expect("a key that users may choose")
}

pub(super) fn queue_name(text: &str) -> QueueName {
    QueueName::new(text).expect("a name that users may choose")
}

pub(super) fn weight(thousandths: u32) -> Weight {
    Weight::from_thousandths(thousandths).expect("a weight that users may choose")
}

/// The level of a pass, counted in the smallest steps that a level shows.
pub(super) fn level(pass: u128, seq: u64) -> Level {
    Level::new(VTime::from_bits(pass * VTime::TICK.to_bits()).pass(), seq)
}

/// The highest level there can be.
pub(super) fn highest() -> Level {
    level((1 << 80) - 1, Level::LAST_SEQ)
}

/// Where [`task`] puts the task of this number.
pub(super) fn at(n: u64) -> Level {
    level(u128::from(n), n)
}

/// A task of [`LANE`] that waits for its first run.
pub(super) fn task(n: u64) -> Task {
    Task {
        id: TaskId(n),
        lane: LANE,
        place: Place::Lane(at(n)),
        key: key("acme"),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
        attempt: 1,
        max_attempts: 5,
        lost: 0,
        terms: None,
        replay_of: None,
        files: Default::default(),
        accepted: Millis(1_000 + n),
        content_type: ContentType::default(),
        payload: format!("payload {n}").into_bytes().into(),
    }
}

/// The same task as if it had been accepted to wait for a time.
pub(super) fn delayed(task: &Task) -> Task {
    Task { place: Place::Timer(timer_at(task.id.0)), ..task.clone() }
}

/// The same task once its row is set aside.
pub(super) fn aside(task: &Task) -> Task {
    Task { place: Place::Aside, ..task.clone() }
}

/// The same task as it waits for its next run, at another place and with another charge.
pub(super) fn retried(task: &Task, to: Level) -> Task {
    again(task, Place::Lane(to))
}

/// The same task as it waits for its backoff to be over.
pub(super) fn put_off(task: &Task, to: Level) -> Task {
    again(task, Place::Timer(to))
}

fn again(task: &Task, place: Place) -> Task {
    let charge = Charge { cost: Cost::MAX, weight: Weight::MAX, chained: false, timed: true };
    Task { place, attempt: task.attempt + 1, lost: task.lost + 1, charge, ..task.clone() }
}

/// The same task once it has ended, and as long as that is remembered.
pub(super) fn over(task: &Task) -> Task {
    Task { place: Place::Over, ..task.clone() }
}

pub(super) fn accepted(task: &Task) -> Change {
    Change::Accepted(task.clone())
}

pub(super) fn accept_all(tasks: &[Task]) -> Vec<Change> {
    tasks.iter().map(accepted).collect()
}

/// The end of a task that is not to be remembered.
pub(super) fn finished(task: &Task) -> Change {
    ended(task, Outcome::Succeeded, None)
}

/// An end, which is remembered if there is something to remember.
pub(super) fn ended(task: &Task, outcome: Outcome, end: Option<EndRecord>) -> Change {
    stopped(task, outcome == Outcome::Canceled, outcome, end)
}

/// The same of a task that somebody wanted stopped, or that nobody did.
pub(super) fn stopped(task: &Task, canceling: bool, outcome: Outcome, end: Option<EndRecord>) -> Change {
    let (end, tries) = (end.map(Into::into), task.attempt - 1);
    Change::Finished { task: task.id, lane: task.lane, from: task.place, tries, canceling, outcome, end }
}

/// The end of a task as [`end_record`] has it, and the timer that will forget it.
pub(super) fn remembered(task: &Task) -> [Change; 2] {
    let end = end_record(task);
    [ended(task, end.outcome, Some(end)), Change::Timed(forget_timer(task))]
}

/// What is remembered of a task's end.
pub(super) fn end_record(task: &Task) -> EndRecord {
    let n = task.id.0;
    EndRecord {
        key: task.key.clone(),
        outcome: Outcome::Failed,
        at: Millis(2_000 + n),
        last: Some(tried(task)),
        result: format!("result {n}").into_bytes().into(),
    }
}

/// The timer that forgets a task's end.
pub(super) fn forget_timer(task: &Task) -> TimerRow {
    let at = timer_at(100_000 + task.id.0);
    TimerRow { at, task: task.id, what: Timed::Forget { tries: task.attempt - 1 } }
}

/// Forgets an end.
pub(super) fn forgotten(task: &Task) -> Change {
    Change::Forgotten { task: task.id, tries: task.attempt - 1 }
}

/// The try that a task is at, when it is over.
pub(super) fn tried(task: &Task) -> Try {
    let (n, attempt) = (task.id.0, task.attempt);
    Try {
        attempt,
        seat: (attempt % 3 > 0).then(|| seat_name("gpu-7")),
        started: Millis(n),
        ended: Millis(n + u64::from(attempt)),
        end: if attempt % 2 == 0 { End::Failed } else { End::Lost },
        error: format!("try {attempt} of {n} came to nothing").into(),
    }
}

/// Turns a task into another one: its row goes from the place that it has in the one to that in the other.
pub(super) fn moved(task: &Task, to: &Task) -> Change {
    let level = match to.place {
        Place::Lane(level) | Place::Timer(level) | Place::Parked(level) => level,
        Place::Aside | Place::Over => Level::ZERO,
    };
    let tried = (to.attempt > task.attempt).then(|| tried(task));
    Change::Moved { lane: task.lane, from: task.place, to: to.place, row: to.row_at(level), tried }
}

/// The same task with so much time, in this lane and at this place.
pub(super) fn shorter(task: &Task, lane: LaneId, place: Place, max_duration_ms: u64) -> Task {
    let terms = task.terms.as_deref().cloned().unwrap_or_default();
    Task { lane, place, terms: Some(Terms { max_duration_ms, ..terms }.into()), ..task.clone() }
}

/// Turns a task into what [`shorter`] makes of it.
pub(super) fn shortened(task: &Task, to: &Task) -> Change {
    let Change::Moved { from, to: place, row, .. } = moved(task, to) else { unreachable!("a move") };
    Change::Shortened { from_lane: task.lane, from, lane: to.lane, to: place, row }
}

/// Turns a task into what [`retried`] makes of it.
pub(super) fn requeued(task: &Task, to: Level) -> Change {
    moved(task, &retried(task, to))
}

/// Turns a waiting task into what [`aside`] makes of it.
pub(super) fn set_aside(task: &Task) -> Change {
    moved(task, &aside(task))
}

/// The level of a timer that is told apart by one number, in the order of these.
pub(super) fn timer_at(n: u64) -> Level {
    level(u128::from(n) << 20, n)
}

/// The timer of a task that waits for one.
pub(super) fn due_timer(task: &Task) -> TimerRow {
    let Place::Timer(at) = task.place else { panic!("task {} waits for no time", task.id) };
    TimerRow { at, task: task.id, what: Timed::Due(task.lane, task.row_at(at)) }
}

/// A timer of another kind.
pub(super) fn timer(n: u64) -> TimerRow {
    let what = match n % 3 {
        0 => Timed::Expire,
        1 => Timed::Detach,
        _ => Timed::Forget { tries: n as u16 },
    };
    TimerRow { at: timer_at(n), task: TaskId(n), what }
}

/// Saves the ack level of the timers.
pub(super) fn timers_acked(ack: Level) -> Change {
    Change::Timers { record: ShelfRecord { ack, max: ack } }
}

/// What a task may ask for, all of it.
pub(super) fn terms(n: u64) -> Terms {
    let backoff = Backoff { first_ms: n, factor: 1_000 + n as u32, max_ms: n << 8 };
    let (expires, max_duration_ms) = (Some(Millis(n << 30)), n << 2);
    Terms { backoff: Some(backoff), expires, attach_ms: n, expected_ms: n << 4, max_duration_ms }
}

/// Settings that are told apart by one number.
pub(super) fn settings_record(n: u64) -> SettingsRecord {
    let settings = Settings {
        max_attempts: n as u16,
        backoff: Backoff { first_ms: n + 1, factor: n as u32 + 2, max_ms: n + 3 },
        max_lost: n as u8,
        retention_ms: n << 40,
        share: if n.is_multiple_of(2) { Share::Time } else { Share::Tasks },
        paused: n.is_multiple_of(3),
        classes: (1..=n % 4)
            .map(|class| ClassLimit {
                duration_ms: class << 20,
                limit: [Limit::All, Limit::Slots(class as u32 + 5), Limit::Percent(class as u8)]
                    [class as usize - 1],
            })
            .collect(),
        after_downgrade: if n.is_multiple_of(2) { AfterDowngrade::Requeue } else { AfterDowngrade::Fail },
        interactive_grace_ms: n << 9,
        key_limit: n.is_multiple_of(2).then_some(n as u32),
        rate: n.is_multiple_of(3).then_some(rate(n)),
        key_rate: n.is_multiple_of(5).then_some(rate(n << 20)),
    };
    SettingsRecord { version: n, settings }
}

pub(super) fn put_settings(queue: QueueId, n: u64) -> Change {
    Change::Settings { queue, record: settings_record(n) }
}

/// Saves a lane's ack level.
pub(super) fn acked(lane: LaneId, ack: Level) -> Change {
    let record = LaneRecord { ack, max: ack, ..LaneRecord::default() };
    Change::Lane { lane, record }
}

pub(super) fn level_of(task: &Task) -> Level {
    task.place.level().expect("a task in its lane")
}

pub(super) fn row(task: &Task) -> Row {
    task.row().expect("a task in its lane")
}

pub(super) fn rows(tasks: &[Task]) -> Vec<Row> {
    tasks.iter().map(row).collect()
}

/// A key's record that is told apart by one number.
pub(super) fn key_record(n: u32) -> KeyRecord {
    let time = |bits: u32| VTime::from_bits(u128::from(n) << bits | 1);
    // Most keys lack one of these or another.
    let some = |every: u32, bits: u32| if n.is_multiple_of(every) { time(bits) } else { VTime::ZERO };
    KeyRecord {
        finish: time(70),
        due: time(60),
        rows: n,
        chained: n / 2,
        refund: some(2, 50),
        credit: some(3, 40),
        average: if n.is_multiple_of(5) { Average::from_bits(n.into()) } else { Average::default() },
        weight: weight(n),
    }
}

pub(super) fn put_key(lane: LaneId, text: &str, n: u32) -> Change {
    Change::Key { lane, key: key(text), record: Some(key_record(n)) }
}

pub(super) fn forget_key(lane: LaneId, text: &str) -> Change {
    Change::Key { lane, key: key(text), record: None }
}

fn rate(n: u64) -> Rate {
    Rate {
        per_second: n,
        burst: n + 1,
        unit: if n.is_multiple_of(2) { RateUnit::Cost } else { RateUnit::Tasks },
    }
}

/// What a key of this weight has of its own, told apart by it.
pub(super) fn own(weight: Weight) -> Override {
    let n = weight.thousandths();
    Override {
        weight: Some(weight),
        limit: n.is_multiple_of(2).then_some(n),
        rate: n.is_multiple_of(3).then_some(rate(n.into())),
    }
}

pub(super) fn put_override(queue: QueueId, text: &str, thousandths: u32) -> Change {
    Change::Override { queue, key: key(text), over: own(weight(thousandths)) }
}

pub(super) fn drop_override(queue: QueueId, text: &str) -> Change {
    Change::Override { queue, key: key(text), over: Override::default() }
}

pub(super) fn put_queue(queue: QueueId, name: &str, accepted: u64) -> Change {
    let totals = Totals { accepted, ..Totals::default() };
    let average = Average::from_bits(accepted / 2);
    Change::Queue { queue, record: QueueRecord { name: queue_name(name), totals, average } }
}

/// What is saved of parked rows, told apart by one number.
pub(super) fn parked_record(n: u64) -> ParkedRecord {
    ParkedRecord { rows: n, shelf: ShelfRecord { ack: level(0, n), max: level(0, n + 1) } }
}

pub(super) fn put_parked(lane: LaneId, text: &str, n: u64) -> Change {
    Change::Parked { lane, key: key(text), record: Some(parked_record(n)) }
}

pub(super) fn drop_parked(lane: LaneId, text: &str) -> Change {
    Change::Parked { lane, key: key(text), record: None }
}

pub(super) fn put_paused(queue: QueueId, text: &str, paused: bool) -> Change {
    Change::Paused { queue, key: key(text), paused }
}

/// One of everything in [`SHARD`], for cases that ask what is left of it: tasks 1, 2 and 3 wait in
/// [`LANE`], where the first was wanted stopped, task 4 is set aside, task 5 waits for a time, task 6 has ended at
/// its second try and was run again, and there is a record of each kind.
pub(super) fn furniture() -> Vec<Change> {
    let mut changes = accept_all(&[task(1), task(2), task(3), task(4), delayed(&task(5)), task(6)]);
    changes.extend([
        Change::Canceling { task: TaskId(1) },
        set_aside(&task(4)),
        requeued(&task(6), at(16)),
        put_key(LANE, "acme", 4),
        put_override(LANE.queue, "acme", 2_500),
        acked(LANE, Level::ZERO),
        put_queue(LANE.queue, "render", 4),
        put_settings(LANE.queue, 4),
        put_member("gpu-7", 4),
        Change::Stopped { stopped: true },
        Change::Doubt { left_ms: Some(4) },
        put_request(4, 4),
        Change::Store { id: StoreId(4) },
        Change::Seq { next: 19 },
    ]);
    changes.extend(remembered(&retried(&task(6), at(16))));
    changes.extend([
        Change::Replayed { task: TaskId(6), again: TaskId(3) },
        Change::Timed(timer(7)),
        timers_acked(Level::ZERO),
        accepted(&shelved()),
        put_parked(LANE, "acme", 1),
        put_paused(LANE.queue, "acme", true),
    ]);
    changes
}

/// A task whose key may not run.
fn shelved() -> Task {
    Task { place: Place::Parked(level(0, 18)), key: key("acme"), ..task(18) }
}

/// The tasks of [`furniture`].
pub(super) fn furnished() -> Vec<Task> {
    let last = over(&retried(&task(6), at(16)));
    vec![task(1), task(2), task(3), aside(&task(4)), delayed(&task(5)), last, shelved()]
}

/// A worker's record that is told apart by one number, and has so many runs.
pub(super) fn member_record(n: u64) -> MemberRecord {
    let run = |task: u64| Run {
        task: TaskId(task),
        lane: LANE,
        level: at(task),
        key: key("acme"),
        charge: Charge {
            cost: Cost::ONE,
            weight: weight(2_500),
            chained: task.is_multiple_of(2),
            timed: task.is_multiple_of(3),
        },
        attempt: 1,
        max_attempts: 3,
        lost: (task % 3) as u8,
        terms: task.is_multiple_of(4).then(|| terms(task).into()),
        fence: Fence { epoch: Epoch(n), dispatch: task, nonce: task << 50 | n },
        started: Millis(n),
        limit_ms: task * n,
    };
    let life = Life { process: n, rejoin: 2 };
    let incarnation = Incarnation { epoch: Epoch(n), nonce: n << 40 };
    let set = n.is_multiple_of(2).then_some(WorkerSetId { incarnation, version: n, hash: !n });
    MemberRecord { token: n << 60, life, wait_ms: n, running: (1..=n).map(run).collect(), set }
}

pub(super) fn put_member(seat: &str, n: u64) -> Change {
    Change::Member { seat: seat_name(seat), record: Some(member_record(n)) }
}

pub(super) fn drop_member(seat: &str) -> Change {
    Change::Member { seat: seat_name(seat), record: None }
}

pub(super) fn seat_name(text: &str) -> Seat {
    Seat::new(text).expect("a plain name")
}

/// A request's record that is told apart by one number: of tasks that follow each other, or not.
pub(super) fn request_record(n: u64) -> RequestRecord {
    let ids = match n % 2 {
        0 => RequestIds::Range { first: TaskId(n), tasks: n as u32 },
        _ => RequestIds::List((0..n).map(|id| TaskId(id * n)).collect()),
    };
    RequestRecord { until: Millis(n), ids }
}

pub(super) fn put_request(key: u128, n: u64) -> Change {
    Change::Request { key: RequestKey(key), record: Some(request_record(n)) }
}

pub(super) fn drop_request(key: u128) -> Change {
    Change::Request { key: RequestKey(key), record: None }
}

/// The same items in another order, always the same one.
pub(super) fn shuffled<T: Clone>(items: &[T]) -> Vec<T> {
    const STRIDE: usize = 7_919; // a prime, so that it meets each item once
    assert!(!items.len().is_multiple_of(STRIDE));
    (0..items.len()).map(|n| items[n * STRIDE % items.len()].clone()).collect()
}

/// An owner of a shard, and whoever still believes to be one. What it does must succeed, unless the
/// method says otherwise.
pub(super) struct Owner<'s, S> {
    pub(super) store: &'s S,
    pub(super) shard: ShardId,
    pub(super) epoch: Epoch,
    /// What it was given, in order.
    pub(super) metadata: Metadata,
}

impl<'s, S: Store> Owner<'s, S> {
    /// Takes [`SHARD`].
    pub(super) async fn new(store: &'s S) -> Owner<'s, S> {
        Owner::of(store, SHARD).await
    }

    pub(super) async fn of(store: &'s S, shard: ShardId) -> Owner<'s, S> {
        let taken = answer(store.take(shard, None).await);
        assert_eq!(taken.doubt, None);
        Owner { store, shard, epoch: taken.epoch, metadata: sorted(taken.metadata) }
    }

    /// Takes [`SHARD`] because a worker has shown an epoch that the store knows nothing of.
    pub(super) async fn shown(store: &'s S, shown: Epoch) -> Owner<'s, S> {
        let taken = answer(store.take(SHARD, Some(shown)).await);
        assert!(
            matches!(taken.doubt, Some(Doubt::Shown { shown: of, .. }) if of == shown),
            "{:?}",
            taken.doubt
        );
        Owner { store, shard: SHARD, epoch: taken.epoch, metadata: sorted(taken.metadata) }
    }

    pub(super) async fn commit(&self, changes: Vec<Change>) {
        answer(self.store.commit(self.shard, self.epoch, changes).await);
    }

    /// Commits, and must learn that another owner is at `current`.
    pub(super) async fn commit_fenced(&self, changes: Vec<Change>, current: Epoch) {
        let answer = self.store.commit(self.shard, self.epoch, changes).await;
        assert_eq!(answer, Err(StoreError::Fenced { epoch: self.epoch, current }));
    }

    pub(super) async fn page(&self, lane: LaneId, above: Level, limit: usize) -> Page {
        answer(self.store.read_lane(self.shard, lane, above, limit).await)
    }

    /// All rows of a lane.
    pub(super) async fn rows(&self, lane: LaneId) -> Vec<Row> {
        self.rows_by(lane, 1_000).await
    }

    /// All rows of a lane, by pages of this size, each from where the last one ended. Pages before the
    /// end are full: an owner asks for what it has room for.
    pub(super) async fn rows_by(&self, lane: LaneId, limit: usize) -> Vec<Row> {
        let (mut rows, mut above): (Vec<Row>, Level) = (Vec::new(), Level::ZERO);
        loop {
            let page = self.page(lane, above, limit).await;
            let (count, end) = (page.rows.len(), page.end);
            assert!(count == limit || count < limit && end, "{count} rows of {limit}, and end = {end}");
            if let Some(last) = page.rows.last() {
                assert!(last.level > above, "a read above {above} came to {}", last.level);
                above = last.level;
            }
            rows.extend(page.rows);
            if end {
                return rows;
            }
        }
    }

    pub(super) async fn timer_page(&self, above: Level, limit: usize) -> Page<TimerRow> {
        answer(self.store.read_timers(self.shard, above, limit).await)
    }

    /// Rows of a key that are parked beside a lane, above a level.
    pub(super) async fn parked_page(&self, lane: LaneId, key: &Key, above: Level, limit: usize) -> Page {
        answer(self.store.read_parked(self.shard, lane, key.clone(), above, limit).await)
    }

    /// All timers.
    pub(super) async fn timers(&self) -> Vec<TimerRow> {
        self.timers_by(1_000).await
    }

    /// All timers, by pages of this size.
    pub(super) async fn timers_by(&self, limit: usize) -> Vec<TimerRow> {
        let (mut timers, mut above): (Vec<TimerRow>, Level) = (Vec::new(), Level::ZERO);
        loop {
            let page = self.timer_page(above, limit).await;
            let (count, end) = (page.rows.len(), page.end);
            assert!(count == limit || count < limit && end, "{count} timers of {limit}, and end = {end}");
            if let Some(last) = page.rows.last() {
                assert!(last.at > above, "a read above {above} came to {}", last.at);
                above = last.at;
            }
            timers.extend(page.rows);
            if end {
                return timers;
            }
        }
    }

    pub(super) async fn history(&self, id: u64) -> History {
        answer(self.store.read_history(self.shard, TaskId(id)).await)
    }

    pub(super) async fn task(&self, id: u64) -> Option<Task> {
        answer(self.store.read_task(self.shard, TaskId(id)).await)
    }

    pub(super) async fn list(&self, queue: Option<QueueId>, after: u64, limit: usize) -> Listing {
        self.list_wanted(Wanted { queue, ended: None }, after, limit).await
    }

    pub(super) async fn list_wanted(&self, wanted: Wanted, after: u64, limit: usize) -> Listing {
        answer(self.store.list_tasks(self.shard, wanted, TaskId(after), limit).await)
    }

    /// All tasks of the shard.
    pub(super) async fn tasks(&self) -> Vec<Task> {
        self.tasks_by(None, 1_000).await
    }

    /// All tasks, of one queue if one is named, by pages of this size. Pages are full while more follow.
    pub(super) async fn tasks_by(&self, queue: Option<QueueId>, limit: usize) -> Vec<Task> {
        self.wanted_by(Wanted { queue, ended: None }, limit).await
    }

    /// The same of those that are wanted.
    pub(super) async fn wanted_by(&self, wanted: Wanted, limit: usize) -> Vec<Task> {
        let mut tasks: Vec<Task> = Vec::new();
        loop {
            let after = tasks.last().map_or(0, |task| task.id.0);
            let listing = self.list_wanted(wanted, after, limit).await;
            let (count, more) = (listing.tasks.len(), listing.more.is_some());
            assert!(count == limit || count < limit && !more, "{count} tasks of {limit}, and more = {more}");
            let rises = listing.tasks.first().is_none_or(|first| first.id.0 > after);
            assert!(rises, "a listing after {after} begins with {:?}", listing.tasks.first());
            tasks.extend(listing.tasks);
            if !more {
                return tasks;
            }
        }
    }
}

/// All that a shard holds.
#[derive(Debug, PartialEq)]
pub(super) struct Contents {
    pub(super) metadata: Metadata,
    pub(super) rows: Vec<(LaneId, Row)>,
    pub(super) timers: Vec<TimerRow>,
    pub(super) tasks: Vec<Task>,
    /// Of every task.
    pub(super) histories: Vec<History>,
}

/// Takes the shard and reads all of it, rows in the given lanes. Whatever it holds, each task must be in
/// exactly one place: in its lane as its record says, among the timers, set aside, or over.
pub(super) async fn contents_of<S: Store>(store: &S, shard: ShardId, lanes: &[LaneId]) -> Contents {
    let owner = Owner::of(store, shard).await;
    let mut rows = Vec::new();
    for &lane in lanes {
        rows.extend(owner.rows(lane).await.into_iter().map(|row| (lane, row)));
    }
    rows.sort_by_key(|(lane, row)| (*lane, row.level));
    let (timers, tasks) = (owner.timers().await, owner.tasks().await);

    let mut waiting: Vec<_> = tasks.iter().filter_map(|task| Some((task.lane, task.row()?))).collect();
    waiting.sort_by_key(|(lane, row)| (*lane, row.level));
    assert_eq!(rows, waiting, "the rows of the lanes, and what the tasks' records say of them");
    let is_due = |timer: &&TimerRow| matches!(timer.what, Timed::Due(..));
    let due: Vec<_> = timers.iter().filter(is_due).cloned().collect();
    let scheduled = tasks.iter().filter(|task| matches!(task.place, Place::Timer(_)));
    let mut scheduled: Vec<_> = scheduled.map(due_timer).collect();
    scheduled.sort_by_key(|timer| timer.at);
    assert_eq!(due, scheduled, "the timers, and what the tasks' records say of them");
    for task in &tasks {
        if let Place::Parked(level) = task.place {
            let page = owner.parked_page(task.lane, &task.key, level.before(), 1).await;
            assert_eq!(page.rows, [task.row_at(level)]);
        }
    }
    let apart: Vec<_> = tasks.iter().filter(|task| task.place == Place::Aside).cloned().collect();
    assert_eq!(owner.metadata.aside, apart, "the table of long runners, and what the tasks' records say");
    let mut histories = Vec::new();
    for task in &tasks {
        let history = owner.history(task.id.0).await;
        assert_eq!(history.end.is_some(), task.place == Place::Over, "whether task {} has ended", task.id);
        histories.push(history);
    }
    let has_ended = |ended| Wanted { queue: None, ended: Some(ended) };
    let (over, not): (Vec<Task>, Vec<Task>) =
        tasks.iter().cloned().partition(|task| task.place == Place::Over);
    assert_eq!(owner.wanted_by(has_ended(true), 1_000).await, over, "the tasks that have ended");
    assert_eq!(owner.wanted_by(has_ended(false), 1_000).await, not, "the tasks that have not ended");
    Contents { metadata: owner.metadata, rows, timers, tasks, histories }
}

/// All that [`SHARD`] holds, of a case that uses one lane.
pub(super) async fn contents<S: Store>(store: &S) -> Contents {
    contents_of(store, SHARD, &[LANE]).await
}

/// Stores return metadata in whatever order they find it.
fn sorted(mut metadata: Metadata) -> Metadata {
    metadata.queues.sort_by_key(|(queue, _)| *queue);
    metadata.overrides.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.lanes.sort_by_key(|(lane, _)| *lane);
    metadata.keys.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.aside.sort_by_key(|task| task.id);
    metadata.members.sort_by(|(a, _), (b, _)| a.cmp(b));
    metadata.requests.sort_by_key(|(key, _)| *key);
    metadata.canceling.sort();
    metadata.parked.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.paused.sort();
    metadata.settings.sort_by_key(|(queue, _)| *queue);
    metadata
}

fn answer<T>(answer: Result<T, StoreError>) -> T {
    answer.unwrap_or_else(|error| panic!("a store in good health and not fenced answered: {error}"))
}

/// Does two things at the same time, as far as the store lets them.
pub(super) async fn both<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut of_a, mut of_b) = (None, None);
    poll_fn(move |context| {
        if of_a.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(context)
        {
            of_a = Some(value);
        }
        if of_b.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(context)
        {
            of_b = Some(value);
        }
        match (of_a.take(), of_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (of_a, of_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

/// Begins something and gives it up: what a caller does whose request was dropped.
pub(super) async fn begin_and_drop<F: Future>(future: F) {
    let mut future = Box::pin(future);
    poll_fn(|context| {
        let _ = future.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}
