//! Directories of every format that was ever released are kept in `tests/formats`, one for each, and must
//! open with the contents that they were written with. `UPDATE_FORMATS=1` writes the one of the current
//! format if it is not there; a directory that is there is never written again.

use std::path::{Path, PathBuf};

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    AfterDowngrade, EndRecord, KeyRecord, LaneRecord, MemberRecord, Override, Place, QueueRecord, RequestIds,
    RequestRecord, Settings, SettingsRecord, Share, ShelfRecord, Timed, TimerRow, Totals, Try,
};
use evenhand_core::life::{Backoff, End, Outcome, Terms};
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, FileName, Key, LaneId, Life, Millis, Priority, QueueId, QueueName,
    RequestKey, Seat, ShardId, StoreId, TaskId,
};
use evenhand_core::{Change, File, Row, Run, Task, bounds};
use evenhand_store::embedded::{self, FORMAT};
use evenhand_store::{Embedded, Memory, Store};

use crate::support::{Contents, block_on, copy, read_all, small};

const SHARD: ShardId = ShardId(3);
const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };
const TASKS: u64 = 60;
const TYPES: [&str; 3] = ["", ContentType::JSON, "text/plain; charset=utf-8"];

fn formats() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats")
}

fn level(seq: u64) -> Level {
    Level::new(VTime::from_bits(u128::from(seq % 7) << 70).pass(), seq)
}

fn key(n: u64) -> Key {
    Key::new(&format!("tenant-{}", n % 5)).unwrap()
}

/// Formats 1 and 2 did not say whether a charge is chained: it is as long as a task stands where it was first
/// placed. None of those kept here is of time.
fn charge(chained: bool) -> Charge {
    Charge { cost: Cost::ONE, weight: Weight::from_thousandths(1_500).unwrap(), chained, timed: false }
}

fn accepted(format: u32, id: u64) -> Task {
    Task {
        id: TaskId(id),
        lane: LANE,
        place: Place::Lane(level(id)),
        key: key(id),
        charge: charge(true),
        attempt: 1,
        max_attempts: 3,
        lost: 0,
        terms: None,
        replay_of: None,
        files: Default::default(),
        accepted: Millis(1_700_000_000_000 + id),
        content_type: ContentType::new(if format >= 2 { TYPES[id as usize % 3] } else { "" }).unwrap(),
        payload: format!("payload of task {id}").into_bytes().into(),
    }
}

/// Commits with every kind of change of a format in them: tasks that wait, were retried, run long, and ended.
fn commits(format: u32) -> Vec<Vec<Change>> {
    let mut commits: Vec<Vec<Change>> = (1..=TASKS)
        .map(|id| {
            let totals = Totals { accepted: id, ..Totals::default() };
            let (name, average) = (QueueName::new("render").unwrap(), Average::default());
            vec![
                Change::Accepted(accepted(format, id)),
                Change::Queue { queue: QueueId(0), record: QueueRecord { name, totals, average } },
            ]
        })
        .collect();
    commits.push(
        (0..5)
            .map(|n| {
                let time = VTime::from_bits(u128::from(n) << 60);
                let record = KeyRecord {
                    finish: time,
                    due: time,
                    rows: 9,
                    chained: 7,
                    refund: VTime::ZERO,
                    credit: VTime::ZERO,
                    average: Average::default(),
                    weight: Weight::ONE,
                };
                Change::Key { lane: LANE, key: key(n), record: Some(record) }
            })
            .collect(),
    );
    for id in 1..=10 {
        let lane = Place::Lane;
        let finished = |from| Change::Finished {
            task: TaskId(id),
            lane: LANE,
            from,
            tries: 0,
            canceling: false,
            outcome: Outcome::Succeeded,
            end: None,
        };
        let moved = |from, to: Place| {
            let (attempt, chained) = if to == Place::Aside { (1, true) } else { (2, false) };
            let at = to.level().unwrap_or(Level::ZERO);
            let row = Row { attempt, charge: charge(chained), ..accepted(format, id).row_at(at) };
            Change::Moved { lane: LANE, from, to, row, tried: None }
        };
        let (first, second) = (lane(level(id)), lane(level(1_000 + id)));
        commits.push(match id % 5 {
            0 => vec![finished(first)],
            1 => vec![moved(first, second)],
            2 => vec![moved(first, Place::Aside)],
            3 => vec![moved(first, Place::Aside), moved(Place::Aside, second)],
            _ => vec![moved(first, second), finished(second)],
        });
    }
    let record = LaneRecord {
        ack: Level::ZERO,
        max: level(1_010),
        vtime: VTime::from_bits(5 << 70),
        turn: VTime::from_bits(6 << 70),
    };
    commits.push(vec![
        Change::Lane { lane: LANE, record },
        Change::Override {
            queue: QueueId(0),
            key: key(1),
            over: Override { weight: Some(Weight::MAX), ..Override::default() },
        },
        Change::Seq { next: 1_011 },
    ]);
    if format >= 2 {
        // Format 2 saved when it came.
        let until = Millis(1_700_000_000_000 + bounds::REQUEST_MS);
        let request = RequestRecord { until, ids: RequestIds::Range { first: TaskId(1), tasks: 60 } };
        let run = Run {
            task: TaskId(11),
            lane: LANE,
            level: level(11),
            key: key(11),
            charge: charge(true),
            attempt: 1,
            max_attempts: 3,
            lost: 0,
            terms: None,
            fence: Fence { epoch: Epoch(7), dispatch: 12, nonce: 0 },
            started: Millis(1_700_000_000_100),
            limit_ms: 0,
        };
        let life = Life { process: 3, rejoin: 1 };
        let member = MemberRecord { token: 77, life, wait_ms: 60_000, running: vec![run], set: None };
        commits.push(vec![
            Change::Member { seat: Seat::new("gpu-7").unwrap(), record: Some(member) },
            Change::Stopped { stopped: true },
            Change::Request { key: RequestKey(1 << 100), record: Some(request) },
            Change::Store { id: StoreId(4711) },
        ]);
    }
    if format >= 3 {
        commits.extend(lives());
    }
    if format >= 4 {
        commits.push(vec![Change::Accepted(with_files())]);
        commits.extend(admission());
    }
    commits
}

/// What format 3 added: timers, tries, ends, settings, and what goes with them.
fn lives() -> Vec<Vec<Change>> {
    let timer = |seq: u64| Level::new(VTime::from_bits(u128::from(seq % 7) << 70).pass(), seq);
    let terms = Terms {
        backoff: Some(Backoff::default()),
        expires: Some(Millis(1 << 42)),
        attach_ms: 5_000,
        expected_ms: 0,
        max_duration_ms: 0,
    };
    let delayed = Task {
        place: Place::Timer(timer(101)),
        charge: charge(false),
        terms: Some(terms.into()),
        replay_of: Some(TaskId(21)),
        ..accepted(3, 101)
    };
    let tried = |attempt| Try {
        attempt,
        seat: (attempt != 2).then(|| Seat::new("gpu-7").unwrap()),
        started: Millis(1_700_000_000_200),
        ended: Millis(1_700_000_000_300),
        end: if attempt == 2 { End::Lost } else { End::Failed },
        error: format!("try {attempt} came to nothing").into(),
    };
    let moved = |id: u64, from, to: Place, attempt: u16| {
        let level = match to {
            Place::Lane(level) | Place::Timer(level) | Place::Parked(level) => level,
            Place::Aside | Place::Over => Level::ZERO,
        };
        let row = Row {
            attempt,
            lost: attempt as u8 - 1,
            charge: charge(attempt == 3),
            ..accepted(3, id).row_at(level)
        };
        Change::Moved { lane: LANE, from, to, row, tried: Some(tried(attempt - 1)) }
    };
    let ended = |id: u64, from, tries, seq: u64| {
        let end = EndRecord {
            key: key(id),
            outcome: Outcome::Failed,
            at: Millis(1_700_000_001_000),
            last: Some(tried(tries + 1)),
            result: format!("result of task {id}").into_bytes().into(),
        };
        let (task, outcome) = (TaskId(id), end.outcome);
        let end = Some(end.into());
        vec![
            Change::Finished { task, lane: LANE, from, tries, canceling: false, outcome, end },
            Change::Timed(TimerRow { at: timer(seq), task, what: Timed::Forget { tries } }),
        ]
    };
    let settings = Settings {
        max_attempts: 7,
        backoff: Backoff { first_ms: 1, factor: 1_500, max_ms: 9 },
        max_lost: 2,
        retention_ms: 1_000,
        share: Share::Time,
        paused: true,
        ..Settings::default()
    };
    let totals = Totals { accepted: 61, expired: 1, scheduled: 2, ..Totals::default() };
    let (name, average) = (QueueName::new("render").unwrap(), Average::default());
    let record = QueueRecord { name, totals, average };
    let ids = RequestIds::List([TaskId(20), TaskId(101)].into());
    vec![
        vec![Change::Accepted(delayed)],
        vec![moved(20, Place::Lane(level(20)), Place::Timer(timer(1_101)), 2)],
        vec![moved(21, Place::Lane(level(21)), Place::Timer(timer(1_102)), 2)],
        vec![moved(21, Place::Timer(timer(1_102)), Place::Lane(level(1_103)), 3)],
        ended(21, Place::Lane(level(1_103)), 2, 1_104),
        ended(22, Place::Lane(level(22)), 0, 1_105),
        ended(23, Place::Lane(level(23)), 0, 1_106),
        vec![Change::Forgotten { task: TaskId(23), tries: 0 }, Change::Untimed { at: timer(1_106) }],
        vec![Change::Timed(TimerRow { at: timer(1_107), task: TaskId(24), what: Timed::Expire })],
        vec![Change::Timed(TimerRow { at: timer(1_108), task: TaskId(25), what: Timed::Detach })],
        vec![
            Change::Replayed { task: TaskId(21), again: TaskId(101) },
            Change::Canceling { task: TaskId(2) },
            Change::Settings { queue: QueueId(0), record: SettingsRecord { version: 9, settings } },
            Change::Request { key: RequestKey(5), record: Some(RequestRecord { until: Millis(77), ids }) },
            Change::Queue { queue: QueueId(0), record },
            Change::Timers { record: ShelfRecord { ack: timer(0), max: timer(1_108) } },
            Change::Seq { next: 1_109 },
        ],
    ]
}

/// What format 4 added: files of tasks.
fn with_files() -> Task {
    let file = |name: &str, bytes: &[u8]| File { name: FileName::new(name).unwrap(), bytes: bytes.into() };
    Task { files: [file("page.html", b"<p>"), file("empty", b"")].into(), ..accepted(4, 201) }
}

/// And how long tasks may take, which of them were cut short, classes, limits and rates.
fn admission() -> Vec<Vec<Change>> {
    let terms = |max_duration_ms| Some(Terms { max_duration_ms, ..Terms::default() }.into());
    let long = Task { terms: terms(30_000), ..accepted(4, 202) };
    let short = Row { terms: terms(3_000), charge: charge(false), ..long.row_at(level(1_202)) };
    let (from, to) = (Place::Lane(level(202)), Place::Lane(level(1_202)));
    let again = Row { attempt: 2, ..Row { level: level(1_203), ..short.clone() } };
    let tried = Try {
        attempt: 1,
        seat: None,
        started: Millis(1),
        ended: Millis(2),
        end: End::Downgraded,
        error: "its time was cut".into(),
    };
    let rate = Rate { per_second: 1_500, burst: 9_000, unit: RateUnit::Cost };
    let settings = Settings {
        classes: vec![
            ClassLimit { duration_ms: 3_000, limit: Limit::All },
            ClassLimit { duration_ms: 10_000, limit: Limit::Percent(50) },
            ClassLimit { duration_ms: 30_000, limit: Limit::Slots(2) },
        ],
        after_downgrade: AfterDowngrade::Requeue,
        interactive_grace_ms: 2_000,
        key_limit: Some(4),
        rate: Some(rate),
        key_rate: None,
        ..Settings::default()
    };
    let over = Override { weight: None, limit: Some(7), rate: Some(rate) };
    vec![
        vec![Change::Accepted(long)],
        vec![Change::Shortened { from_lane: LANE, from, lane: LANE, to, row: short }],
        vec![Change::Moved {
            lane: LANE,
            from: to,
            to: Place::Lane(level(1_203)),
            row: again,
            tried: Some(tried),
        }],
        vec![
            Change::Settings { queue: QueueId(1), record: SettingsRecord { version: 3, settings } },
            Change::Override { queue: QueueId(0), key: key(2), over },
        ],
    ]
}

/// Formats 2 and 3 had how long a task may take in its record, and not in its row.
fn with_durations(format: u32, contents: &mut Contents) {
    let tasks = contents.tasks.iter_mut().chain(&mut contents.metadata.aside);
    for task in tasks.filter(|task| (2..=3).contains(&format) && task.id.0 % 3 > 0) {
        let terms = task.terms.as_deref().cloned().unwrap_or_default();
        task.terms = Some(Terms { max_duration_ms: task.id.0 % 3 * 1_000, ..terms }.into());
    }
}

async fn write(store: &impl Store, format: u32) {
    let epoch = store.take(SHARD, None).await.unwrap().epoch;
    for changes in commits(format) {
        store.commit(SHARD, epoch, changes).await.unwrap();
    }
}

async fn contents(store: &impl Store) -> Contents {
    read_all(store, SHARD, &[LANE], 1_000).await.unwrap().1
}

#[test]
fn directories_of_every_format_open_with_what_they_held() {
    let current = formats().join(FORMAT.to_string());
    if std::env::var_os("UPDATE_FORMATS").is_some() && !current.exists() {
        let store = Embedded::open(&current, small(4096)).unwrap();
        block_on(write(&store, FORMAT));
    }
    assert!(current.exists(), "format {FORMAT} has no directory; write it with UPDATE_FORMATS=1");

    for format in 1..=FORMAT {
        let model = Memory::default();
        block_on(write(&model, format));
        let mut expected = block_on(contents(&model));
        with_durations(format, &mut expected);
        let kept = formats().join(format.to_string());
        let dir = tempfile::tempdir().unwrap();
        copy(&kept, dir.path());
        let checked = embedded::check(dir.path(), &mut |_, _| {}).unwrap();
        let found = (checked.tasks, checked.rows, checked.timers, checked.ended);
        let written = match format {
            1 | 2 => (56, 54, 0, 0),
            3 => (56, 50, 6, 2),
            _ => (58, 52, 6, 2),
        };
        assert_eq!(found, written, "{}", kept.display());
        let store = Embedded::open(dir.path(), small(4096)).unwrap();
        assert_eq!(block_on(contents(&store)), expected, "{}", kept.display());
    }
}
