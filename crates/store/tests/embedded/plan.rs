//! What the committer (`examples/committer.rs`) writes: the changes of a commit follow from its number
//! alone, so whoever knows how many commits a store has taken knows all that it must hold.
//!
//! Commit n accepts four tasks. The first of them is retried three commits later, the second set aside
//! four commits later (and brought back in the next, every other time), the first three end thirty commits
//! later and the last one a hundred and twenty commits later; the lane's ack level follows that one.

use evenhand_core::backlog::{Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, QueueRecord, Totals};
use evenhand_core::life::Outcome;
use evenhand_core::names::{
    Class, ContentType, Key, LaneId, Millis, Priority, QueueId, QueueName, ShardId, TaskId,
};
use evenhand_core::{Change, Task};

/// The shard that it owns.
pub(crate) const SHARD: ShardId = ShardId(0);
/// The lane that all tasks are in.
pub(crate) const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };

/// Tasks that a commit accepts.
const TASKS: u64 = 4;
/// Seqs that a commit uses: one for each task, and two for retries.
const SEQS: u64 = TASKS + 2;

/// The number of the last commit, by the counter of seqs that it wrote.
pub(crate) fn last_commit(next_seq: u64) -> u64 {
    next_seq / SEQS
}

fn seq(commit: u64, place: u64) -> u64 {
    (commit - 1) * SEQS + 1 + place
}

fn level(seq: u64) -> Level {
    Level::new(VTime::from_bits(u128::from(seq) * VTime::TICK.to_bits()).pass(), seq)
}

fn key(n: u64) -> Key {
    Key::new(&format!("tenant-{}", n % 7)).unwrap()
}

/// A task as it was accepted.
fn task(commit: u64, place: u64) -> Task {
    let id = seq(commit, place);
    Task {
        id: TaskId(id),
        lane: LANE,
        level: Some(level(id)),
        key: key(id),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE },
        attempt: 1,
        max_attempts: 5,
        accepted: Millis(commit),
        max_duration_ms: 0,
        content_type: ContentType::default(),
        payload: format!("payload of {id}; ").repeat(8 + (id % 16) as usize).into_bytes().into(),
    }
}

fn requeued(task: &Task, from: Option<Level>, to: u64) -> Change {
    let moved = Task { level: Some(level(to)), attempt: task.attempt + 1, ..task.clone() };
    Change::Requeued { task: task.id, lane: LANE, from, row: moved.row().unwrap() }
}

fn finished(task: &Task, level: Option<Level>) -> Change {
    Change::Finished { task: task.id, lane: LANE, level, outcome: Outcome::Succeeded }
}

/// Whether the second task of a commit comes back after it was set aside.
fn comes_back(commit: u64) -> bool {
    commit.is_multiple_of(2)
}

/// What a commit does. The first has number 1.
pub(crate) fn changes(n: u64) -> Vec<Change> {
    let (retry, back) = (seq(n, TASKS), seq(n, TASKS + 1));
    let mut changes: Vec<Change> = (0..TASKS).map(|place| Change::Accepted(task(n, place))).collect();
    if n > 3 {
        let first = task(n - 3, 0);
        changes.push(requeued(&first, first.level, retry));
    }
    if n > 4 {
        let second = task(n - 4, 1);
        changes.push(Change::SetAside { task: second.id, lane: LANE, level: second.level.unwrap() });
    }
    if n > 5 && comes_back(n - 5) {
        changes.push(requeued(&task(n - 5, 1), None, back));
    }
    if n > 30 {
        let of = n - 30;
        changes.push(finished(&task(of, 0), Some(level(seq(of + 3, TASKS)))));
        changes.push(finished(&task(of, 1), comes_back(of).then(|| level(seq(of + 5, TASKS + 1)))));
        changes.push(finished(&task(of, 2), task(of, 2).level));
    }
    let mut ack = Level::ZERO;
    if n > 120 {
        changes.push(finished(&task(n - 120, 3), task(n - 120, 3).level));
        ack = level(seq(n - 120, TASKS + 1));
    }
    let vtime = VTime::from_bits(u128::from(n) << 60);
    let record = LaneRecord { ack, max: level(back), vtime, turn: VTime::ZERO };
    changes.push(Change::Lane { lane: LANE, record });
    let record = KeyRecord { finish: vtime, due: vtime, rows: n as u32, chained: 1, weight: Weight::ONE };
    changes.push(Change::Key { lane: LANE, key: key(n), record: Some(record) });
    if n.is_multiple_of(5) {
        changes.push(Change::Key { lane: LANE, key: key(n + 3), record: None });
    }
    if n.is_multiple_of(3) {
        let weight =
            (!n.is_multiple_of(9)).then(|| Weight::from_thousandths(1_000 + n as u32 % 999).unwrap());
        changes.push(Change::Override { queue: LANE.queue, key: key(n / 9), weight });
    }
    let totals = Totals { accepted: n * TASKS, ..Totals::default() };
    let record = QueueRecord { name: QueueName::new("render").unwrap(), totals };
    changes.push(Change::Queue { queue: LANE.queue, record });
    changes.push(Change::Seq { next: seq(n + 1, 0) });
    changes
}
