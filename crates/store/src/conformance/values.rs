//! What users and the core put in comes out the same: any bytes, any allowed text, any number that the
//! types can hold. A store that trims, folds, collates, escapes or cuts off is found here.

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    AfterDowngrade, EndRecord, KeyRecord, LaneRecord, Place, QueueRecord, RequestIds, RequestRecord,
    Settings, SettingsRecord, Share, ShelfRecord, Timed, TimerRow, Totals, Try,
};
use evenhand_core::life::{Backoff, End, Outcome, Terms};
use evenhand_core::names::{ContentType, FileName, Key, Millis, QueueId, RequestKey, TaskId};
use evenhand_core::{Change, File, Task, bounds};

use super::Harness;
use super::given::*;
use crate::LISTING_BYTES;

/// None, every byte there is, bytes that are no text, and as many as are allowed.
pub async fn payloads_come_back_byte_for_byte<H: Harness>(h: &H) {
    let large = (0..bounds::PAYLOAD_BYTES as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8);
    let payloads: [Vec<u8>; 8] = [
        vec![],
        vec![0],
        vec![0; 1_000],
        vec![0xff, 0xfe, 0xc3, 0x28], // not UTF-8
        b"'; DROP TABLE tasks; --\r\n\\x00\"".to_vec(),
        (0..=255).collect(),
        (0..=255).rev().collect(),
        large.collect(),
    ];
    let tasks: Vec<Task> =
        (1..).zip(payloads).map(|(n, payload)| Task { payload: payload.into(), ..task(n) }).collect();
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&tasks)).await;
    // What is set aside or moved keeps its bytes.
    let last = tasks.len() - 1;
    owner.commit(vec![set_aside(&tasks[5]), requeued(&tasks[last], at(50))]).await;
    let mut tasks = tasks;
    tasks[5] = aside(&tasks[5]);
    tasks[last] = retried(&tasks[last], at(50));

    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for task in &tasks {
        let found = owner.task(task.id.0).await.map(|task| task.payload);
        assert!(found.as_ref() == Some(&task.payload), "the payload of task {}", task.id);
    }
    assert!(owner.tasks().await == tasks, "the payloads in a listing");
    assert_eq!(owner.metadata.aside, [tasks[5].clone()]);
}

/// None, as many as are allowed, the largest, and names that are awkward; of tasks that wait, were moved and have
/// ended. They are forgotten with their task.
pub async fn files_come_back_byte_for_byte_under_their_names<H: Harness>(h: &H) {
    let file =
        |name: &str, bytes: &[u8]| File { name: FileName::new(name).expect("a name"), bytes: bytes.into() };
    let largest = vec![7; bounds::FILE_BYTES];
    let longest = "\u{1f9a5}".repeat(bounds::FILE_NAME_BYTES / 4);
    let names = ["a", "A", "a ", " a", "-a", ".a", "a\\b", "a'b\"", "e\u{301}", "\u{e9}", &longest];
    let files: [Vec<File>; 5] = [
        vec![],
        vec![file("empty", b"")],
        names.iter().map(|name| file(name, name.as_bytes())).collect(),
        (0..bounds::FILES_PER_TASK).map(|n| file(&n.to_string(), &[n as u8; 100])).collect(),
        (0..4).map(|n| file(&format!("large-{n}"), &largest)).collect(),
    ];
    let with = |(n, files): (u64, Vec<File>)| Task { files: files.into(), ..task(n) };
    let mut tasks: Vec<Task> = (1..).zip(files).map(with).collect();
    tasks[4].payload = [].into();
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&tasks)).await;
    owner.commit(vec![set_aside(&tasks[2]), requeued(&tasks[3], at(50))]).await;
    tasks[2] = aside(&tasks[2]);
    tasks[3] = retried(&tasks[3], at(50));

    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for task in &tasks {
        assert!(owner.task(task.id.0).await.as_ref() == Some(task), "the files of task {}", task.id);
    }
    assert!(owner.tasks().await == tasks, "the files in a listing");
    let filled = |n: u64| Task { files: tasks[4].files.clone(), ..task(n) };
    owner.commit(accept_all(&[filled(100), filled(101), filled(102)])).await;
    let listing = owner.list(None, 99, 10).await;
    assert_eq!(listing.tasks.len(), LISTING_BYTES / bounds::INPUT_BYTES, "the bytes of files count in it");
    owner.commit(vec![finished(&tasks[4])]).await;
    assert!(owner.task(5).await.is_none());
}

/// Keys that are awkward alone, and keys that are easily taken for each other.
fn awkward_keys() -> Vec<Key> {
    let longest = "k".repeat(bounds::KEY_BYTES);
    let wide = "\u{1f9a5}".repeat(bounds::KEY_BYTES / 4);
    let texts = [
        "", // the shared key
        " ",
        "  ",
        "a",
        "A",
        "a ",
        " a",
        "aa",
        "aaa",
        "ab",
        "a/b",
        "a/",
        "/",
        "a:b",
        "a'b",
        "a\"b",
        "a`b",
        "a\\b",
        "a%b",
        "a_b",
        "a*b",
        "a?b",
        "{a}b",
        "[a]",
        "$1",
        "0",
        "00",
        "-1",
        "null",
        "NULL",
        "'; DROP TABLE keys; --",
        "\u{e9}",   // é in one code point
        "e\u{301}", // and in two
        "e",
        "ß",
        "ss",
        "İ",
        "i",
        "🦥",
        "🦥🦥",
        "\u{200b}", // a space of no width
        "\u{feff}",
        "\u{ffff}",
        "\u{10ffff}",
        &longest,
        &longest[1..],
        &wide,
    ];
    let mut keys: Vec<Key> = texts.map(key).to_vec();
    keys.sort();
    keys
}

/// In records, overrides, tasks and rows; then some of them are forgotten, and the others are not.
pub async fn keys_come_back_as_they_are_and_stay_apart<H: Harness>(h: &H) {
    let keys = awkward_keys();
    let numbered = || (1..).zip(&keys);
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let mut changes = Vec::new();
    for (n, key) in numbered() {
        changes.push(Change::Accepted(Task { key: key.clone(), ..task(u64::from(n)) }));
        changes.push(put_key(LANE, key.as_str(), n));
        changes.push(put_override(LANE.queue, key.as_str(), n));
    }
    owner.commit(changes).await;
    let store = h.reopen(store).await;
    let contents = contents(&store).await;
    let tasks: Vec<Task> = numbered().map(|(n, key)| Task { key: key.clone(), ..task(n.into()) }).collect();
    assert_eq!(contents.tasks, tasks);
    let records: Vec<_> = numbered().map(|(n, key)| (LANE, key.clone(), key_record(n))).collect();
    assert_eq!(contents.metadata.keys, records);
    let weights: Vec<_> = numbered().map(|(n, key)| (key.clone(), n)).collect();
    let found: Vec<_> = contents
        .metadata
        .overrides
        .iter()
        .map(|(_, key, w)| (key.clone(), w.weight.map_or(0, Weight::thousandths)))
        .collect();
    assert_eq!(found, weights);

    let owner = Owner::new(&store).await;
    let forgotten = || numbered().filter(|(n, _)| n % 2 == 0).map(|(_, key)| key.as_str());
    let mut changes: Vec<Change> = forgotten().map(|key| forget_key(LANE, key)).collect();
    changes.extend(forgotten().map(|key| drop_override(LANE.queue, key)));
    owner.commit(changes).await;
    let metadata = Owner::new(&store).await.metadata;
    let odd: Vec<_> = records.into_iter().step_by(2).collect();
    assert_eq!(metadata.keys, odd);
    let kept: Vec<_> = metadata.overrides.into_iter().map(|(_, key, _)| key).collect();
    assert_eq!(kept, keys.iter().step_by(2).cloned().collect::<Vec<_>>());
}

/// Lane and key, or queue and key, that read the same when they are written one after the other.
pub async fn keys_of_neighbouring_lanes_and_queues_stay_apart<H: Harness>(h: &H) {
    let lanes = [lane(1, 1, 1), lane(1, 1, 11), lane(1, 11, 1), lane(11, 1, 1), lane(u32::MAX, 255, 254)];
    let texts = ["", "1", "11", "1/1", "/1", "1:1"];
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let (mut changes, mut expected) = (Vec::new(), Vec::new());
    for (n, (lane, text)) in (1..).zip(lanes.iter().flat_map(|lane| texts.map(|text| (*lane, text)))) {
        changes.push(put_key(lane, text, n));
        changes.push(put_override(QueueId(n % 3), text, n));
        expected.push((lane, key(text), key_record(n)));
    }
    expected.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    owner.commit(changes).await;
    let metadata = Owner::new(&store).await.metadata;
    assert_eq!(metadata.keys, expected);

    // One is forgotten in one lane.
    let owner = Owner::new(&store).await;
    owner.commit(vec![forget_key(lanes[0], "11")]).await;
    expected.retain(|(lane, text, _)| (*lane, text.as_str()) != (lanes[0], "11"));
    let after = Owner::new(&store).await.metadata;
    assert_eq!(after.keys, expected);
    assert_eq!(after.overrides, metadata.overrides);
}

/// Every character that is allowed, the longest name, and names that differ only in case.
pub async fn queue_names_come_back_as_they_are<H: Harness>(h: &H) {
    let longest = "q".repeat(bounds::NAME_BYTES);
    let names = ["a", "A", "a.b", "a-b", "a_b", "a.", "a-", "a_", "0", "00", "null", &longest, &longest[1..]];
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit((0..).zip(names).map(|(n, name)| put_queue(QueueId(n), name, n.into())).collect()).await;
    let store = h.reopen(store).await;
    let queues = Owner::new(&store).await.metadata.queues;
    let found: Vec<_> = queues.iter().map(|(id, q)| (id.0, q.name.as_str(), q.totals.accepted)).collect();
    let expected: Vec<_> = (0..).zip(names).map(|(n, name)| (n, name, u64::from(n))).collect();
    assert_eq!(found, expected);
}

/// The smallest and the largest of each field, in the record and in the row.
pub async fn tasks_keep_numbers_at_their_limits<H: Harness>(h: &H) {
    let cheapest = Cost::new(1).expect("the smallest cost");
    let slowest = Backoff { first_ms: u64::MAX, factor: u32::MAX, max_ms: u64::MAX };
    let most = Terms {
        backoff: Some(slowest),
        expires: Some(Millis(u64::MAX)),
        attach_ms: u64::MAX,
        expected_ms: u64::MAX,
        max_duration_ms: u64::MAX,
    };
    let smallest = Task {
        place: Place::Lane(level(0, 1)),
        charge: Charge { cost: cheapest, weight: Weight::MAX, chained: true, timed: true },
        max_attempts: 1,
        accepted: Millis(0),
        content_type: ContentType::default(),
        ..task(1)
    };
    let largest = Task {
        id: TaskId(Level::LAST_SEQ),
        lane: lane(u32::MAX, u8::MAX, u8::MAX - 1),
        place: Place::Lane(highest()),
        charge: Charge { cost: Cost::MAX, weight: Weight::MIN, chained: false, timed: false },
        attempt: u16::MAX,
        max_attempts: u16::MAX,
        lost: u8::MAX,
        terms: Some(most.into()),
        replay_of: Some(TaskId(Level::LAST_SEQ - 1)),
        accepted: Millis(u64::MAX),
        content_type: ContentType::new(&"x/".repeat(63)).expect("a long one"),
        ..task(1)
    };
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&[smallest.clone(), largest.clone()])).await;
    let store = h.reopen(store).await;
    let contents = contents_of(&store, SHARD, &[LANE, largest.lane]).await;
    assert_eq!(contents.tasks, [smallest, largest.clone()]);

    let owner = Owner::new(&store).await;
    assert_eq!(owner.task(Level::LAST_SEQ).await, Some(largest.clone()));
    owner.commit(vec![set_aside(&largest)]).await;
    assert_eq!(Owner::new(&store).await.metadata.aside, [aside(&largest)]);
}

/// All bits of a virtual time, all rows a key may have, the last seq, the highest level.
pub async fn records_keep_numbers_at_their_limits<H: Harness>(h: &H) {
    let times =
        [0, 1, u64::MAX.into(), 1 << 64, i128::MAX as u128, 1 << 127, u128::MAX].map(VTime::from_bits);
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let (mut changes, mut keys, mut lanes) = (Vec::new(), Vec::new(), Vec::new());
    for (n, time) in (0..).zip(times) {
        let opposite = times[times.len() - 1 - n as usize];
        let rows = [0, 1, i32::MAX as u32, 1 << 31, u32::MAX][n as usize % 5];
        let weight = if n % 2 == 0 { Weight::MIN } else { Weight::MAX };
        let average = Average::from_bits([0, 1, u64::MAX][n as usize % 3]);
        let (finish, due, chained) = (time, opposite, rows);
        let record =
            KeyRecord { finish, due, rows, chained, refund: time, credit: opposite, average, weight };
        changes.push(Change::Key { lane: LANE, key: key(&n.to_string()), record: Some(record) });
        keys.push((LANE, key(&n.to_string()), record));

        let ack = if n % 2 == 0 { highest() } else { level(0, 1) };
        let record = LaneRecord { ack, max: highest(), vtime: time, turn: opposite };
        changes.push(Change::Lane { lane: lane(n, 0, 0), record });
        lanes.push((lane(n, 0, 0), record));
    }
    // A shard numbers its tasks up to the last seq, so no count of them can be higher.
    let most = Level::LAST_SEQ;
    let totals = Totals {
        accepted: most,
        succeeded: most - 2,
        failed: 1,
        canceled: 1,
        expired: most,
        scheduled: most,
    };
    let queue = (
        QueueId(u32::MAX),
        QueueRecord { name: queue_name("render"), totals, average: Average::from_bits(u64::MAX) },
    );
    changes.push(Change::Queue { queue: queue.0, record: queue.1.clone() });
    changes.push(Change::Seq { next: most + 1 });
    owner.commit(changes).await;

    let store = h.reopen(store).await;
    let metadata = Owner::new(&store).await.metadata;
    assert_eq!(metadata.keys, keys);
    assert_eq!(metadata.lanes, lanes);
    assert_eq!(metadata.queues, [queue]);
    assert_eq!(metadata.next_seq, most + 1);
}

/// The lowest level and the highest, the largest task and tries, in every kind of timer.
pub async fn timers_keep_numbers_at_their_limits<H: Harness>(h: &H) {
    let last = TaskId(Level::LAST_SEQ);
    let timer = |pass, seq, task, what| TimerRow { at: level(pass, seq), task, what };
    let mut timers = vec![
        timer(0, 1, TaskId(0), Timed::Expire),
        timer(1, 2, TaskId(0), Timed::Detach),
        timer(1, 3, TaskId(0), Timed::Forget { tries: 0 }),
        timer(1 << 79, 4, last, Timed::Expire),
        timer(1 << 79, 5, last, Timed::Detach),
        timer((1 << 80) - 1, Level::LAST_SEQ - 1, last, Timed::Forget { tries: u16::MAX }),
    ];
    let largest = Task {
        id: last,
        lane: lane(u32::MAX, u8::MAX, u8::MAX - 1),
        place: Place::Timer(highest()),
        charge: Charge { cost: Cost::MAX, weight: Weight::MAX, chained: false, timed: true },
        attempt: u16::MAX,
        max_attempts: u16::MAX,
        lost: u8::MAX,
        terms: Some(Terms { expires: Some(Millis(0)), ..Terms::default() }.into()),
        ..task(1)
    };
    let smallest = Task {
        place: Place::Timer(level(0, 9)),
        charge: Charge { weight: Weight::MIN, chained: true, ..largest.charge },
        terms: Some(Terms::default().into()),
        ..task(9)
    };
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(timers.iter().cloned().map(Change::Timed).collect()).await;
    owner.commit(accept_all(&[smallest.clone(), largest.clone()])).await;
    let record = ShelfRecord { ack: Level::ZERO, max: highest() };
    owner.commit(vec![Change::Timers { record }]).await;
    let store = h.reopen(store).await;
    let contents = contents(&store).await;
    timers.extend([due_timer(&smallest), due_timer(&largest)]);
    timers.sort_by_key(|timer| timer.at);
    assert_eq!(contents.timers, timers);
    assert_eq!(contents.tasks, [smallest, largest]);
    assert_eq!(contents.metadata.timers, record);
}

/// Any text, as long as it may be; any bytes; any number.
pub async fn tries_and_ends_come_back_as_they_were<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let longest = "\u{1f9a5}".repeat(20_000);
    let texts = ["", "plain", "two\nlines\0and a nul", "'; DROP TABLE tries; --", &longest];
    let ends = [End::Succeeded, End::Failed, End::FailedForGood, End::Lost, End::Lost];
    let largest = Try {
        attempt: u16::MAX,
        seat: Some(seat_name(&"s".repeat(bounds::NAME_BYTES))),
        started: Millis(u64::MAX),
        ended: Millis(u64::MAX),
        end: End::Lost,
        error: longest.as_str().into(),
    };
    let mut tries = Vec::new();
    let mut last = task(1);
    owner.commit(vec![accepted(&last)]).await;
    for (n, (text, end)) in (1..).zip(texts.into_iter().zip(ends)) {
        let next = retried(&last, at(10 + n));
        let tried = Try { error: text.into(), end, ..tried(&last) };
        let Change::Moved { lane, from, to, row, .. } = moved(&last, &next) else { panic!("no move") };
        owner.commit(vec![Change::Moved { lane, from, to, row, tried: Some(tried.clone()) }]).await;
        (last, tries) = (next, [tries, vec![tried]].concat());
    }
    let results: [Vec<u8>; 4] = [vec![], vec![0; 1_000], (0..=255).collect(), vec![7; bounds::PAYLOAD_BYTES]];
    let outcomes = [Outcome::Succeeded, Outcome::Failed, Outcome::Canceled, Outcome::Expired];
    let mut expected = Vec::new();
    for (n, (result, outcome)) in (2..).zip(results.into_iter().zip(outcomes)) {
        let last = [None, Some(largest.clone()), Some(tried(&task(n)))][n as usize % 3].clone();
        let key = awkward_keys()[n as usize * 7].clone();
        let at = Millis([0, u64::MAX][n as usize % 2]);
        let end = EndRecord { key, outcome, at, last, result: result.into() };
        owner.commit(vec![accepted(&task(n)), ended(&task(n), outcome, Some(end.clone()))]).await;
        expected.push(end);
    }
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.history(1).await.tries, tries);
    for (n, end) in (2..).zip(expected) {
        assert!(owner.history(n).await.end == Some(end), "the end of task {n}");
    }
}

/// A request of many tasks that do not follow each other, one of none, and settings from one end to the other.
pub async fn requests_and_settings_come_back_as_they_were<H: Harness>(h: &H) {
    let many: Vec<TaskId> =
        (0..bounds::TASKS_PER_ENQUEUE as u64).map(|n| TaskId(Level::LAST_SEQ - n)).collect();
    let range = |first, tasks| RequestIds::Range { first: TaskId(first), tasks };
    let ids = [
        RequestIds::List(many.into()),
        RequestIds::List([].into()),
        RequestIds::List([TaskId(0), TaskId(Level::LAST_SEQ), TaskId(0)].into()),
        range(0, 0),
        range(Level::LAST_SEQ, u32::MAX),
    ];
    let until = [0, 1, 1 << 32, u64::MAX - 1, u64::MAX].map(Millis);
    let requests: Vec<_> = (0..).zip(ids.into_iter().zip(until)).collect();
    let settings = [
        SettingsRecord::default(),
        settings_record(5),
        settings_record(6),
        SettingsRecord {
            version: u64::MAX,
            settings: Settings {
                max_attempts: u16::MAX,
                backoff: Backoff { first_ms: u64::MAX, factor: u32::MAX, max_ms: u64::MAX },
                max_lost: u8::MAX,
                retention_ms: u64::MAX,
                share: Share::Time,
                paused: true,
                classes: vec![
                    ClassLimit { duration_ms: u64::MAX, limit: Limit::Slots(u32::MAX) };
                    bounds::CLASSES.into()
                ],
                after_downgrade: AfterDowngrade::Requeue,
                interactive_grace_ms: u64::MAX,
                key_limit: Some(u32::MAX),
                rate: Some(Rate { per_second: u64::MAX, burst: u64::MAX, unit: RateUnit::Cost }),
                key_rate: Some(Rate { per_second: 0, burst: 0, unit: RateUnit::Tasks }),
            },
        },
    ];
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let mut changes = Vec::new();
    let mut expected = Vec::new();
    for (n, (ids, until)) in requests {
        let (key, record) = (RequestKey(n), RequestRecord { until, ids });
        changes.push(Change::Request { key, record: Some(record.clone()) });
        expected.push((key, record));
    }
    let queues = [0, 1, 255, u32::MAX].map(QueueId);
    for (queue, record) in queues.into_iter().zip(&settings) {
        changes.push(Change::Settings { queue, record: record.clone() });
    }
    owner.commit(changes).await;
    let store = h.reopen(store).await;
    let metadata = Owner::new(&store).await.metadata;
    assert!(metadata.requests == expected, "{} requests, or not what was saved", metadata.requests.len());
    assert_eq!(metadata.settings, queues.into_iter().zip(settings).collect::<Vec<_>>());
}
