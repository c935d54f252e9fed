//! What the committer (`examples/committer.rs`) writes: the changes of a commit follow from its number
//! alone, so whoever knows how many commits a store has taken knows all that it must hold.
//!
//! Commit n accepts five tasks. The first of them is put off three commits later, after a try that came to
//! nothing, and due two commits after that; the second is set aside four commits later (and brought back in the
//! next, every other time), and somebody wants it stopped; the third is parked every other time, and placed eight
//! commits later, or never; the last one waits for a time, for ten commits. Thirty commits later all but the
//! fourth end, the ends of the first and the third are remembered, for thirty more. The fourth ends a hundred and
//! twenty commits later; the lane's ack level follows that one, and that of the timers follows every fourth
//! commit.

use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    EndRecord, KeyRecord, LaneRecord, MemberRecord, Override, ParkedRecord, Place, QueueRecord, RequestIds,
    RequestRecord, SettingsRecord, ShelfRecord, Timed, TimerRow, Totals, Try,
};
use evenhand_core::life::{End, Outcome, Terms};
use evenhand_core::names::{
    Class, ContentType, Key, LaneId, Life, Millis, Priority, QueueId, QueueName, RequestKey, Seat, ShardId,
    TaskId,
};
use evenhand_core::{Change, Task};

/// The shard that it owns.
pub(crate) const SHARD: ShardId = ShardId(0);
/// The lane that all tasks are in.
pub(crate) const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };

/// Tasks that a commit accepts.
const TASKS: u64 = 5;
/// Seqs that a commit uses beside one for each task: where the first waits for its backoff, and where it then
/// waits for its next try; where the second comes back to; where the last one waits when its time has come; the
/// timers that forget the first and the third; and where that one is placed.
const OFF: u64 = TASKS;
const AGAIN: u64 = TASKS + 1;
const BACK: u64 = TASKS + 2;
const DUE: u64 = TASKS + 3;
const FORGET: [u64; 2] = [TASKS + 4, TASKS + 5];
const PLACED: u64 = TASKS + 6;
const SEQS: u64 = TASKS + 7;

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

/// The level of a timer that is due in a commit.
fn timer(commit: u64, seq: u64) -> Level {
    Level::new(VTime::from_bits(u128::from(commit) << 60).pass(), seq)
}

/// A task as it was accepted.
fn task(commit: u64, place: u64) -> Task {
    let id = seq(commit, place);
    let at = match place {
        2 if is_parked(commit) => Place::Parked(level(id)),
        4 => Place::Timer(timer(commit + 10, id)),
        _ => Place::Lane(level(id)),
    };
    let terms = place == 2 && commit.is_multiple_of(3);
    let terms = terms.then(|| Terms { expected_ms: commit, ..Terms::default() }.into());
    let chained = matches!(at, Place::Lane(_));
    Task {
        id: TaskId(id),
        lane: LANE,
        place: at,
        key: key(id),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained, timed: false },
        attempt: 1,
        max_attempts: 5,
        lost: 0,
        terms,
        replay_of: None,
        files: Default::default(),
        accepted: Millis(commit),
        content_type: ContentType::default(),
        payload: format!("payload of {id}; ").repeat(8 + (id % 16) as usize).into_bytes().into(),
    }
}

fn tried(task: &Task) -> Try {
    Try {
        attempt: task.attempt,
        seat: Some(Seat::new("gpu-7").unwrap()),
        started: task.accepted,
        ended: Millis(task.accepted.0 + 3),
        end: End::Failed,
        error: format!("task {} came to nothing", task.id).into(),
    }
}

/// The same task at another place.
fn at(task: &Task, place: Place) -> Task {
    Task { place, ..task.clone() }
}

fn moved(task: &Task, to: &Task) -> Change {
    let level = match to.place {
        Place::Lane(level) | Place::Timer(level) | Place::Parked(level) => level,
        Place::Aside | Place::Over => Level::ZERO,
    };
    let tried = (to.attempt > task.attempt).then(|| tried(task));
    Change::Moved { lane: LANE, from: task.place, to: to.place, row: to.row_at(level), tried }
}

fn finished(task: &Task, canceling: bool, end: Option<EndRecord>) -> Change {
    Change::Finished {
        task: task.id,
        lane: LANE,
        from: task.place,
        tries: task.attempt - 1,
        canceling,
        outcome: Outcome::Succeeded,
        end: end.map(Into::into),
    }
}

/// The end of a task in a commit, and the timer that forgets it.
fn remembered(n: u64, task: &Task, seq: u64) -> [Change; 2] {
    let result = format!("result of {}; ", task.id).repeat((task.id.0 % 9) as usize);
    let end = EndRecord {
        key: task.key.clone(),
        outcome: Outcome::Succeeded,
        at: Millis(n),
        last: Some(tried(task)),
        result: result.into_bytes().into(),
    };
    let what = Timed::Forget { tries: task.attempt - 1 };
    let timer = TimerRow { at: timer(n + 30, seq), task: task.id, what };
    [finished(task, false, Some(end)), Change::Timed(timer)]
}

/// The first task of a commit after it was put off, and when its backoff is over.
fn put_off(commit: u64) -> [Task; 2] {
    let first = task(commit, 0);
    let charge = Charge { chained: false, ..first.charge };
    let off = timer(commit + 5, seq(commit + 3, OFF));
    let off = Task { place: Place::Timer(off), attempt: 2, lost: 1, charge, ..first };
    let again = at(&off, Place::Lane(level(seq(commit + 5, AGAIN))));
    [off, again]
}

/// The second task of a commit as it is in the end.
fn second(commit: u64) -> Task {
    let aside = at(&task(commit, 1), Place::Aside);
    if comes_back(commit) { at(&aside, Place::Lane(level(seq(commit + 5, BACK)))) } else { aside }
}

/// Whether the second task of a commit comes back after it was set aside.
fn comes_back(commit: u64) -> bool {
    commit.is_multiple_of(2)
}

/// Whether the third task of a commit is parked when it is accepted, and whether it is placed then.
fn is_parked(commit: u64) -> bool {
    commit.is_multiple_of(2)
}

fn is_placed(commit: u64) -> bool {
    commit.is_multiple_of(4)
}

/// The third task of a commit as it is in the end.
fn third(commit: u64) -> Task {
    let task = task(commit, 2);
    if !is_placed(commit) {
        return task;
    }
    let charge = Charge { cost: Cost::of_ms(commit), chained: true, timed: true, ..task.charge };
    Task { charge, place: Place::Lane(level(seq(commit + 8, PLACED))), ..task }
}

/// The last task of a commit when its time has come.
fn last(commit: u64) -> Task {
    let task = task(commit, 4);
    let charge = Charge { chained: true, ..task.charge };
    Task { charge, place: Place::Lane(level(seq(commit + 10, DUE))), ..task }
}

/// What a commit does. The first has number 1.
pub(crate) fn changes(n: u64) -> Vec<Change> {
    let mut changes: Vec<Change> = (0..TASKS).map(|place| Change::Accepted(task(n, place))).collect();
    if n > 3 {
        changes.push(moved(&task(n - 3, 0), &put_off(n - 3)[0]));
    }
    if n > 4 {
        let second = task(n - 4, 1);
        changes.push(moved(&second, &at(&second, Place::Aside)));
        changes.push(Change::Canceling { task: second.id });
    }
    if n > 5 {
        let [off, again] = put_off(n - 5);
        changes.push(moved(&off, &again));
        if comes_back(n - 5) {
            changes.push(moved(&at(&task(n - 5, 1), Place::Aside), &second(n - 5)));
        }
    }
    if n > 8 && is_placed(n - 8) {
        changes.push(moved(&task(n - 8, 2), &third(n - 8)));
    }
    if n > 10 {
        changes.push(moved(&task(n - 10, 4), &last(n - 10)));
    }
    if n > 30 {
        let of = n - 30;
        changes.extend(remembered(n, &put_off(of)[1], seq(n, FORGET[0])));
        changes.push(finished(&second(of), true, None));
        changes.extend(remembered(n, &third(of), seq(n, FORGET[1])));
        if let Place::Parked(level) = third(of).place {
            changes.push(Change::Unparked { lane: LANE, key: third(of).key, level });
        }
        changes.push(finished(&last(of), false, None));
    }
    if n > 40 && n.is_multiple_of(3) {
        changes.push(Change::Replayed { task: task(n - 40, 2).id, again: task(n, 0).id });
    }
    if n > 60 {
        changes.push(Change::Forgotten { task: task(n - 60, 0).id, tries: 1 });
        changes.push(Change::Forgotten { task: task(n - 60, 2).id, tries: 0 });
        for seq in FORGET.map(|place| seq(n - 30, place)) {
            changes.push(Change::Untimed { at: timer(n, seq) });
        }
    }
    if n.is_multiple_of(4) {
        let ack = timer(n, Level::LAST_SEQ);
        changes.push(Change::Timers { record: ShelfRecord { ack, max: timer(n + 30, seq(n, FORGET[1])) } });
    }
    let mut ack = Level::ZERO;
    if n > 120 {
        changes.push(finished(&task(n - 120, 3), false, None));
        ack = level(seq(n - 120, SEQS - 1));
    }
    if n.is_multiple_of(7) {
        let record = SettingsRecord { version: n, ..SettingsRecord::default() };
        changes.push(Change::Settings { queue: LANE.queue, record });
        let ids = RequestIds::List([task(n, 1).id, task(n, 0).id].into());
        let record = RequestRecord { until: Millis(n), ids };
        changes.push(Change::Request { key: RequestKey(n.into()), record: Some(record) });
        changes.push(Change::Request { key: RequestKey((n / 2).into()), record: None });
    }
    let vtime = VTime::from_bits(u128::from(n) << 60);
    let record = LaneRecord { ack, max: level(seq(n, SEQS - 1)), vtime, turn: VTime::ZERO };
    changes.push(Change::Lane { lane: LANE, record });
    let record = KeyRecord {
        finish: vtime,
        due: vtime,
        rows: n as u32,
        chained: 1,
        refund: if n.is_multiple_of(3) { vtime } else { VTime::ZERO },
        credit: if n.is_multiple_of(4) { vtime } else { VTime::ZERO },
        average: Average::from_bits(n / 2 % 3 * n),
        weight: Weight::ONE,
    };
    changes.push(Change::Key { lane: LANE, key: key(n), record: Some(record) });
    if n.is_multiple_of(5) {
        changes.push(Change::Key { lane: LANE, key: key(n + 3), record: None });
    }
    if n.is_multiple_of(3) {
        let weight =
            (!n.is_multiple_of(9)).then(|| Weight::from_thousandths(1_000 + n as u32 % 999).unwrap());
        changes.push(Change::Override {
            queue: LANE.queue,
            key: key(n / 9),
            over: Override { weight, ..Override::default() },
        });
    }
    if n.is_multiple_of(5) {
        let (seat, life) =
            (Seat::new(&format!("gpu-{}", n / 5 % 4)).unwrap(), Life { process: n, rejoin: 0 });
        let member = MemberRecord { token: n, life, wait_ms: n, running: Vec::new(), set: None };
        changes.push(Change::Member { seat, record: (!n.is_multiple_of(35)).then_some(member) });
    }
    if n.is_multiple_of(17) {
        changes.push(Change::Stopped { stopped: n.is_multiple_of(2) });
        changes.push(Change::Doubt { left_ms: (n.is_multiple_of(3)).then_some(n) });
    }
    if n.is_multiple_of(2) {
        let shelf = ShelfRecord { ack: Level::ZERO, max: level(task(n, 2).id.0) };
        let record = (!n.is_multiple_of(6)).then_some(ParkedRecord { rows: n, shelf });
        changes.push(Change::Parked { lane: LANE, key: key(n / 6), record });
        let (of, paused) = if n.is_multiple_of(4) { (n / 4, true) } else { (n / 4 + 3, false) };
        changes.push(Change::Paused { queue: LANE.queue, key: key(of), paused });
    }
    let totals = Totals { accepted: n * TASKS, ..Totals::default() };
    let (name, average) = (QueueName::new("render").unwrap(), Average::from_bits(n / 100));
    let record = QueueRecord { name, totals, average };
    changes.push(Change::Queue { queue: LANE.queue, record });
    changes.push(Change::Seq { next: seq(n + 1, 0) });
    changes
}
