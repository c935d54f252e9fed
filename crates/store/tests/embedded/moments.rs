//! A read shows one moment, and none that was over when it began.

use std::sync::atomic::{AtomicU16, Ordering};

use evenhand_core::backlog::{Charge, Cost, Level, Weight};
use evenhand_core::change::Place;
use evenhand_core::names::{Class, ContentType, Key, LaneId, Millis, Priority, QueueId, ShardId, TaskId};
use evenhand_core::{Change, Row, Task};
use evenhand_store::{Embedded, Store, Wanted};

use crate::support::{block_on, small};

const SHARD: ShardId = ShardId(0);
const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };
const ID: TaskId = TaskId(1);
const MOVES: u16 = 5_000;

fn level(attempt: u16) -> Level {
    Level::new(Default::default(), attempt.into())
}

fn task() -> Task {
    Task {
        id: ID,
        lane: LANE,
        place: Place::Lane(level(1)),
        key: Key::shared(),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
        attempt: 1,
        max_attempts: 1_000,
        lost: 0,
        terms: None,
        replay_of: None,
        files: Default::default(),
        accepted: Millis(0),
        content_type: ContentType::default(),
        payload: [].into(),
    }
}

fn row(attempt: u16) -> Row {
    Row { level: level(attempt), attempt, ..task().row().unwrap() }
}

#[test]
fn a_task_that_moves_all_the_time_is_never_seen_where_it_was_before() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path(), small(1 << 14)).unwrap();
    let epoch = block_on(store.take(SHARD, None)).unwrap().epoch;
    block_on(store.commit(SHARD, epoch, vec![Change::Accepted(task())])).unwrap();
    // The attempt that it was last requeued for, and the one whose place it last left.
    let (acknowledged, left) = (AtomicU16::new(1), AtomicU16::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for attempt in 2..=MOVES {
                let moved = |from, to, attempt| Change::Moved {
                    lane: LANE,
                    from,
                    to,
                    row: row(attempt),
                    tried: None,
                };
                let aside = moved(Place::Lane(level(attempt - 1)), Place::Aside, attempt - 1);
                let back = moved(Place::Aside, Place::Lane(level(attempt)), attempt);
                block_on(store.commit(SHARD, epoch, vec![aside])).unwrap();
                left.store(attempt - 1, Ordering::SeqCst);
                block_on(store.commit(SHARD, epoch, vec![back])).unwrap();
                acknowledged.store(attempt, Ordering::SeqCst);
            }
        });
        loop {
            let before = acknowledged.load(Ordering::SeqCst);
            let gone = level(left.load(Ordering::SeqCst));
            let found = block_on(store.read_task(SHARD, ID)).unwrap().unwrap();
            let listed = block_on(store.list_tasks(SHARD, Wanted::default(), TaskId(0), 10)).unwrap().tasks;
            for found in [&found, &listed[0]] {
                assert!(found.attempt >= before, "attempt {} after {before}", found.attempt);
                let at = found.place.level();
                assert!(at.is_none_or(|at| at == level(found.attempt) && at > gone), "{found:?}");
            }
            if before == MOVES {
                break;
            }
        }
    });
}
