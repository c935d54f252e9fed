//! Directories of every format that was ever released are kept in `tests/formats`, one for each, and must
//! open with the contents that they were written with. `UPDATE_FORMATS=1` writes the one of the current
//! format if it is not there; a directory that is there is never written again.

use std::path::{Path, PathBuf};

use evenhand_core::backlog::{Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, MemberRecord, QueueRecord, RequestRecord, Totals};
use evenhand_core::life::Outcome;
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, Key, LaneId, Life, Millis, Priority, QueueId, QueueName, RequestKey,
    Seat, ShardId, StoreId, TaskId,
};
use evenhand_core::{Change, Row, Run, Task};
use evenhand_store::embedded::{self, FORMAT};
use evenhand_store::{Embedded, Listing, Memory, Page, Store, Taken};

use crate::support::{block_on, copy, small};

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

fn charge() -> Charge {
    Charge { cost: Cost::ONE, weight: Weight::from_thousandths(1_500).unwrap() }
}

/// Commits with every kind of change of a format in them: tasks that wait, were retried, run long, and ended.
fn commits(format: u32) -> Vec<Vec<Change>> {
    let accepted = |id: u64| {
        Change::Accepted(Task {
            id: TaskId(id),
            lane: LANE,
            level: Some(level(id)),
            key: key(id),
            charge: charge(),
            attempt: 1,
            max_attempts: 3,
            accepted: Millis(1_700_000_000_000 + id),
            max_duration_ms: if format >= 2 { id % 3 * 1_000 } else { 0 },
            content_type: ContentType::new(if format >= 2 { TYPES[id as usize % 3] } else { "" }).unwrap(),
            payload: format!("payload of task {id}").into_bytes().into(),
        })
    };
    let mut commits: Vec<Vec<Change>> = (1..=TASKS)
        .map(|id| {
            let totals = Totals { accepted: id, ..Totals::default() };
            let name = QueueName::new("render").unwrap();
            vec![accepted(id), Change::Queue { queue: QueueId(0), record: QueueRecord { name, totals } }]
        })
        .collect();
    commits.push(
        (0..5)
            .map(|n| {
                let time = VTime::from_bits(u128::from(n) << 60);
                let record = KeyRecord { finish: time, due: time, rows: 9, chained: 7, weight: Weight::ONE };
                Change::Key { lane: LANE, key: key(n), record: Some(record) }
            })
            .collect(),
    );
    for id in 1..=10 {
        let finished =
            |level| Change::Finished { task: TaskId(id), lane: LANE, level, outcome: Outcome::Succeeded };
        let row = Row {
            level: level(1_000 + id),
            task: TaskId(id),
            key: key(id),
            charge: charge(),
            attempt: 2,
            max_attempts: 3,
        };
        commits.push(match id % 5 {
            0 => vec![finished(Some(level(id)))],
            1 => vec![Change::Requeued { task: TaskId(id), lane: LANE, from: Some(level(id)), row }],
            2 => vec![Change::SetAside { task: TaskId(id), lane: LANE, level: level(id) }],
            3 => vec![
                Change::SetAside { task: TaskId(id), lane: LANE, level: level(id) },
                Change::Requeued { task: TaskId(id), lane: LANE, from: None, row },
            ],
            _ => vec![
                Change::Requeued { task: TaskId(id), lane: LANE, from: Some(level(id)), row },
                finished(Some(level(1_000 + id))),
            ],
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
        Change::Override { queue: QueueId(0), key: key(1), weight: Some(Weight::MAX) },
        Change::Seq { next: 1_011 },
    ]);
    if format >= 2 {
        let request = RequestRecord { at: Millis(1_700_000_000_000), first: TaskId(1), tasks: 60 };
        let run = Run {
            task: TaskId(11),
            lane: LANE,
            level: level(11),
            key: key(11),
            charge: charge(),
            attempt: 1,
            max_attempts: 3,
            fence: Fence { epoch: Epoch(7), dispatch: 12 },
            started: Millis(1_700_000_000_100),
        };
        let life = Life { process: 3, rejoin: 1 };
        let member = MemberRecord { token: 77, life, wait_ms: 60_000, running: vec![run] };
        commits.push(vec![
            Change::Member { seat: Seat::new("gpu-7").unwrap(), record: Some(member) },
            Change::Stopped { stopped: true },
            Change::Request { key: RequestKey(1 << 100), record: Some(request) },
            Change::Store { id: StoreId(4711) },
        ]);
    }
    commits
}

async fn write(store: &impl Store, format: u32) {
    let epoch = store.take(SHARD).await.unwrap().epoch;
    for changes in commits(format) {
        store.commit(SHARD, epoch, changes).await.unwrap();
    }
}

async fn contents(store: &impl Store) -> (Taken, Page, Listing) {
    let taken = store.take(SHARD).await.unwrap();
    let page = store.read_lane(SHARD, LANE, Level::ZERO, 1_000).await.unwrap();
    let page = Page { deleted: 0, ..page };
    (taken, page, store.list_tasks(SHARD, None, TaskId(0), 1_000).await.unwrap())
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
        let expected = block_on(contents(&model));
        let kept = formats().join(format.to_string());
        let dir = tempfile::tempdir().unwrap();
        copy(&kept, dir.path());
        let checked = embedded::check(dir.path(), &mut |_, _| {}).unwrap();
        assert_eq!((checked.tasks, checked.rows), (56, 54), "{}", kept.display());
        let store = Embedded::open(dir.path(), small(4096)).unwrap();
        assert_eq!(block_on(contents(&store)), expected, "{}", kept.display());
    }
}
