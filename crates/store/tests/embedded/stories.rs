//! Rows, tasks, timers and records must tell the same story, and the check says where they do not. Each of these
//! stores was written by an owner that forgot something.

use evenhand_core::backlog::{Average, Charge, Cost, Level, Weight};
use evenhand_core::change::{
    EndRecord, KeyRecord, LaneRecord, ParkedRecord, Place, QueueRecord, SettingsRecord, ShelfRecord, Timed,
    TimerRow, Totals, Try,
};
use evenhand_core::life::{End, Outcome};
use evenhand_core::names::{
    Class, ContentType, Key, LaneId, Millis, Priority, QueueId, QueueName, ShardId, TaskId,
};
use evenhand_core::{Change, Task};
use evenhand_store::embedded::{self, Checked};
use evenhand_store::{Embedded, Store};

use crate::support::{block_on, small};

const SHARD: ShardId = ShardId(0);
const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };

fn level(seq: u64) -> Level {
    Level::new(Default::default(), seq)
}

fn task(id: u64, place: Place) -> Task {
    Task {
        id: TaskId(id),
        lane: LANE,
        place,
        key: Key::shared(),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
        attempt: 1,
        max_attempts: 3,
        lost: 0,
        terms: None,
        replay_of: None,
        files: Default::default(),
        accepted: Millis(0),
        content_type: ContentType::default(),
        payload: [].into(),
    }
}

fn tried() -> Try {
    let error = "it came to nothing".into();
    Try { attempt: 1, seat: None, started: Millis(1), ended: Millis(2), end: End::Failed, error }
}

fn ended(id: u64) -> Change {
    let (outcome, last, result) = (Outcome::Failed, Some(tried()), [7; 10].into());
    let end = EndRecord { key: Key::shared(), outcome, at: Millis(3), last, result };
    let from = Place::Lane(level(id));
    let (task, end) = (TaskId(id), Some(end.into()));
    Change::Finished { task, lane: LANE, from, tries: 0, canceling: false, outcome, end }
}

fn timed(seq: u64, task: u64, what: Timed) -> Change {
    Change::Timed(TimerRow { at: level(seq), task: TaskId(task), what })
}

fn counted(totals: Totals) -> Change {
    let (name, average) = (QueueName::new("render").unwrap(), Average::default());
    Change::Queue { queue: LANE.queue, record: QueueRecord { name, totals, average } }
}

/// What is saved of the shared key's rows that are parked beside a lane.
fn parked(lane: LaneId, rows: u64) -> Change {
    let shelf = ShelfRecord { ack: Level::ZERO, max: level(8) };
    Change::Parked { lane, key: Key::shared(), record: Some(ParkedRecord { rows, shelf }) }
}

/// Task 1 waits in its lane, and somebody wants it stopped; task 2 waits for a time, task 3 has ended and was run
/// again as task 1, task 4 was tried, waits again, and has an expiry, and task 8 is parked. Its key is paused.
fn good() -> Vec<Change> {
    let fourth = task(4, Place::Lane(level(4)));
    let again = Task { attempt: 2, charge: Charge { chained: false, ..fourth.charge }, ..fourth.clone() };
    let key = KeyRecord {
        finish: Default::default(),
        due: Default::default(),
        rows: 2,
        chained: 1,
        refund: Default::default(),
        credit: Default::default(),
        average: Average::default(),
        weight: Weight::ONE,
    };
    vec![
        Change::Accepted(task(1, Place::Lane(level(1)))),
        Change::Canceling { task: TaskId(1) },
        Change::Accepted(task(2, Place::Timer(level(2)))),
        Change::Accepted(task(3, Place::Lane(level(3)))),
        ended(3),
        timed(5, 3, Timed::Forget { tries: 0 }),
        Change::Replayed { task: TaskId(3), again: TaskId(1) },
        Change::Accepted(fourth.clone()),
        Change::Moved {
            lane: LANE,
            from: fourth.place,
            to: Place::Lane(level(6)),
            row: again.row_at(level(6)),
            tried: Some(tried()),
        },
        timed(7, 4, Timed::Expire),
        Change::Accepted(task(8, Place::Parked(level(8)))),
        parked(LANE, 1),
        Change::Paused { queue: LANE.queue, key: Key::shared(), paused: true },
        Change::Key { lane: LANE, key: Key::shared(), record: Some(key) },
        Change::Lane { lane: LANE, record: LaneRecord { max: level(6), ..LaneRecord::default() } },
        Change::Timers { record: ShelfRecord { ack: Level::ZERO, max: level(7) } },
        Change::Settings { queue: LANE.queue, record: SettingsRecord::default() },
        counted(Totals { accepted: 5, failed: 1, scheduled: 1, ..Totals::default() }),
        Change::Seq { next: 9 },
    ]
}

fn check(more: Vec<Change>) -> Checked {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path(), small(1 << 16)).unwrap();
    let epoch = block_on(store.take(SHARD, None)).unwrap().epoch;
    block_on(store.commit(SHARD, epoch, good())).unwrap();
    block_on(store.commit(SHARD, epoch, more)).unwrap();
    drop(store);
    embedded::check(dir.path(), &mut |_, _| {}).unwrap()
}

#[test]
fn a_store_whose_tables_agree_is_whole() {
    let checked = check(Vec::new());
    assert_eq!(checked.problems, [""; 0]);
    assert_eq!((checked.tasks, checked.ended, checked.rows, checked.timers), (5, 1, 2, 3));
}

#[test]
fn a_store_whose_tables_contradict_each_other_is_not_whole() {
    let due = |id: u64, lane, seq: u64| Timed::Due(lane, task(id, Place::Over).row_at(level(seq)));
    let nowhere = LaneId { queue: QueueId(7), ..LANE };
    let beside = LaneId { class: Class(1), ..LANE };
    let shelved = |lane| Task { lane, ..task(9, Place::Parked(level(9))) };
    let key = Key::shared();
    let stories = [
        (Change::Untimed { at: level(2) }, "0 timers are of tasks that wait for them, and 1 tasks say"),
        (timed(9, 1, due(1, LANE, 9)), "2 timers are of tasks that wait for them, and 1 tasks say"),
        (timed(9, 1, due(1, nowhere, 9)), "1 tasks wait for a time in queue 7, which does not exist"),
        (Change::Untimed { at: level(5) }, "1 tasks have ended, 1 ends are remembered, and 0 timers"),
        (timed(9, 1, Timed::Forget { tries: 0 }), "1 tasks have ended, 1 ends are remembered, and 2 timers"),
        (ended(99), "1 tasks have ended, 2 ends are remembered, and 1 timers"),
        (ended(1), "the cancel of task 1 is remembered, and the task is not there any more"),
        (Change::Canceling { task: TaskId(99) }, "the cancel of task 99 is remembered"),
        (Change::Replayed { task: TaskId(99), again: TaskId(1) }, "the replay of task 99 is remembered"),
        (Change::Forgotten { task: TaskId(4), tries: 0 }, "a try of task 4 is remembered"),
        (Change::Forgotten { task: TaskId(4), tries: 1 }, "has 2 rows, and 1 tasks say"),
        (
            counted(Totals { accepted: 5, failed: 1, ..Totals::default() }),
            "counts 0 tasks that wait for a time",
        ),
        (Change::Settings { queue: QueueId(7), record: SettingsRecord::default() }, "queue 7 has settings"),
        (Change::Timers { record: ShelfRecord { ack: level(2), max: level(99) } }, "there are timers up to"),
        (
            Change::Unparked { lane: LANE, key: key.clone(), level: level(8) },
            "has 0 rows beside lane 0/5/0, and 1 tasks say that they are parked there",
        ),
        (Change::Forgotten { task: TaskId(8), tries: 0 }, "has 1 rows beside lane 0/5/0, and 0 tasks say"),
        (Change::Accepted(shelved(LANE)), "counts 1 tasks parked beside lane 0/5/0, and has 2"),
        (
            Change::Accepted(shelved(beside)),
            "1 tasks of key (shared) are parked beside lane 0/5/1, where it has no record",
        ),
        (parked(LANE, 2), "counts 2 tasks parked beside lane 0/5/0, and has 1"),
        (parked(beside, 1), "counts 1 tasks parked beside lane 0/5/1, and has 0"),
        (parked(beside, 0), "is parked beside lane 0/5/1, which does not exist"),
        (Change::Parked { lane: LANE, key: key.clone(), record: None }, "where it has no record"),
        (
            Change::Paused { queue: QueueId(7), key, paused: true },
            "is paused in queue 7, which does not exist",
        ),
    ];
    for (change, expected) in stories {
        let problems = check(vec![change.clone()]).problems;
        let found = problems.iter().any(|problem| problem.contains(expected));
        assert!(found, "after {change:?}: {problems:#?} says nothing of {expected:?}");
    }
}
