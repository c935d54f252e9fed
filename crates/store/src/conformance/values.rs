//! What users and the core put in comes out the same: any bytes, any allowed text, any number that the
//! types can hold. A store that trims, folds, collates, escapes or cuts off is found here.

use evenhand_core::backlog::{Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, Place, QueueRecord, Totals};
use evenhand_core::life::{Backoff, Terms};
use evenhand_core::names::{ContentType, Key, Millis, QueueId, TaskId};
use evenhand_core::{Change, Task, bounds};

use super::Harness;
use super::given::*;

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
    let found: Vec<_> =
        contents.metadata.overrides.iter().map(|(_, key, w)| (key.clone(), w.thousandths())).collect();
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
    let smallest = Task {
        place: Place::Lane(level(0, 1)),
        charge: Charge { cost: cheapest, weight: Weight::MAX, chained: true },
        max_attempts: 1,
        accepted: Millis(0),
        max_duration_ms: 0,
        content_type: ContentType::default(),
        ..task(1)
    };
    let largest = Task {
        id: TaskId(Level::LAST_SEQ),
        lane: lane(u32::MAX, u8::MAX, u8::MAX - 1),
        place: Place::Lane(highest()),
        charge: Charge { cost: Cost::MAX, weight: Weight::MIN, chained: false },
        attempt: u16::MAX,
        max_attempts: u16::MAX,
        lost: u8::MAX,
        terms: Some(
            Terms { backoff: Some(slowest), expires: Some(Millis(u64::MAX)), attach_ms: u64::MAX }.into(),
        ),
        replay_of: Some(TaskId(Level::LAST_SEQ - 1)),
        accepted: Millis(u64::MAX),
        max_duration_ms: u64::MAX,
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
        let record = KeyRecord { finish: time, due: opposite, rows, chained: rows, weight };
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
    let queue = (QueueId(u32::MAX), QueueRecord { name: queue_name("render"), totals });
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
