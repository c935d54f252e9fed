//! Room is given back: what went through the store leaves nothing behind but the log's own files.

use evenhand_core::Change;
use evenhand_core::backlog::{Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{EndRecord, LaneRecord, Place, ShelfRecord, Timed, TimerRow};
use evenhand_core::life::Outcome;
use evenhand_core::names::{Class, ContentType, Key, LaneId, Millis, Priority, QueueId, ShardId, TaskId};
use evenhand_store::embedded;
use evenhand_store::{Embedded, Store};

use crate::support::{block_on, small};

const SHARD: ShardId = ShardId(0);
const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };
const BATCH: u64 = 500;

fn level(id: u64) -> Level {
    // Ten tenants in turn: levels come out of order.
    Level::new(VTime::from_bits(u128::from((id % 10) * 1_000 + id / 10) << 70).pass(), id)
}

fn accepted(id: u64) -> Change {
    Change::Accepted(evenhand_core::Task {
        id: TaskId(id),
        lane: LANE,
        place: Place::Lane(level(id)),
        key: Key::shared(),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
        attempt: 1,
        max_attempts: 1,
        lost: 0,
        terms: None,
        replay_of: None,
        files: Default::default(),
        accepted: Millis(0),
        content_type: ContentType::default(),
        payload: vec![id as u8; 200].into(),
    })
}

fn finished(task: TaskId, level: Level, end: Option<EndRecord>) -> Change {
    Change::Finished {
        task,
        lane: LANE,
        from: Place::Lane(level),
        tries: 0,
        canceling: false,
        outcome: Outcome::Succeeded,
        end: end.map(Into::into),
    }
}

/// So many tasks come, and when all are there they go, in the order of their levels.
async fn pass_through(store: &Embedded, first: u64, tasks: u64) {
    let epoch = store.take(SHARD, None).await.unwrap().epoch;
    let ids: Vec<u64> = (first..first + tasks).collect();
    for ids in ids.chunks(BATCH as usize) {
        store.commit(SHARD, epoch, ids.iter().map(|id| accepted(*id)).collect()).await.unwrap();
    }
    let mut above = Level::ZERO;
    loop {
        let page = store.read_lane(SHARD, LANE, above, BATCH as usize).await.unwrap();
        let Some(last) = page.rows.last() else { return };
        above = last.level;
        let mut changes: Vec<Change> =
            page.rows.iter().map(|row| finished(row.task, row.level, None)).collect();
        changes.push(Change::Lane {
            lane: LANE,
            record: LaneRecord { ack: above, max: above, ..Default::default() },
        });
        store.commit(SHARD, epoch, changes).await.unwrap();
    }
}

fn tables(dir: &std::path::Path) -> u64 {
    let info = embedded::info(dir, &mut |_, _| {}).unwrap();
    info.tables
        .iter()
        .filter(|tables| tables.kind != "records")
        .map(|tables| tables.puts + tables.deletes)
        .sum()
}

#[test]
fn what_went_through_leaves_next_to_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let store = Embedded::open(dir.path(), small(1 << 20)).unwrap();
        block_on(pass_through(&store, 1 + round * 1_000_000, 60_000));
        block_on(store.rest()).unwrap();
        drop(store);
        let left = tables(dir.path());
        // Fewer than 10,000 deletes are not worth the work, neither of rows nor of tasks; each may have
        // its put in a table still.
        assert!(left < 40_000, "round {round} of 60,000 tasks leaves {left} entries");
    }
}

/// So many tasks come and end, and their ends are remembered while as many others come and end; then forgotten.
async fn pass_through_and_remember(store: &Embedded, first: u64, tasks: u64) {
    let epoch = store.take(SHARD, None).await.unwrap().epoch;
    let timer = |id| Level::new(VTime::from_bits(u128::from(id) << 70).pass(), id);
    let ids: Vec<u64> = (first..first + 2 * tasks).collect();
    for ids in ids.chunks(BATCH as usize) {
        let mut changes = Vec::new();
        for &id in ids.iter().filter(|id| **id < first + tasks) {
            let end = EndRecord {
                key: Key::shared(),
                outcome: Outcome::Succeeded,
                at: Millis(id),
                last: None,
                result: vec![id as u8; 50].into(),
            };
            let what = Timed::Forget { tries: 0 };
            changes.extend([accepted(id), finished(TaskId(id), level(id), Some(end))]);
            changes.push(Change::Timed(TimerRow { at: timer(id), task: TaskId(id), what }));
        }
        for id in ids.iter().filter_map(|id| id.checked_sub(tasks)).filter(|id| *id >= first) {
            changes.push(Change::Forgotten { task: TaskId(id), tries: 0 });
            changes.push(Change::Timers { record: ShelfRecord { ack: timer(id), max: timer(id) } });
        }
        store.commit(SHARD, epoch, changes).await.unwrap();
    }
}

#[test]
fn what_was_remembered_and_forgotten_leaves_next_to_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let store = Embedded::open(dir.path(), small(1 << 20)).unwrap();
        block_on(pass_through_and_remember(&store, 1 + round * 1_000_000, 60_000));
        block_on(store.rest()).unwrap();
        drop(store);
        let left = tables(dir.path());
        assert!(left < 40_000, "round {round} of 60,000 tasks leaves {left} entries");
        let checked = embedded::check(dir.path(), &mut |_, _| {}).unwrap();
        assert_eq!((checked.tasks, checked.rows, checked.timers), (0, 0, 0));
    }
}

/// Each opening writes what the log held into tables of its own.
#[test]
fn many_openings_leave_few_tables() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let store = Embedded::open(dir.path(), small(1 << 16)).unwrap();
        let epoch = block_on(store.take(SHARD, None)).unwrap().epoch;
        let tasks = (1..=10).map(|n| accepted(round * 10 + n)).collect();
        block_on(store.commit(SHARD, epoch, tasks)).unwrap();
        block_on(store.rest()).unwrap();
    }
    let info = embedded::info(dir.path(), &mut |_, _| {}).unwrap();
    for of in &info.tables {
        // Less than eight runs of each size, of two sizes.
        assert!(of.tables <= 16, "{} tables of {}", of.tables, of.kind);
    }
}
