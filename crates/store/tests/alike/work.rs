//! Random work of owners: what may happen to tasks next, given what has, by the rules that owners keep to.

use std::collections::{BTreeMap, BTreeSet};

use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    EndRecord, KeyRecord, LaneRecord, Override, ParkedRecord, Place, QueueRecord, RequestIds, RequestRecord,
    Settings, SettingsRecord, ShelfRecord, Timed, TimerRow, Totals, Try,
};
use evenhand_core::life::{Backoff, End, Outcome, Terms};
use evenhand_core::names::{
    Class, ContentType, Epoch, FileName, Key, LaneId, Millis, Priority, QueueId, QueueName, RequestKey, Seat,
    ShardId, TaskId,
};
use evenhand_core::{Change, File, Task};

use crate::contents::Dice;

pub(crate) const SHARDS: [ShardId; 2] = [ShardId(0), ShardId(256)];
pub(crate) const LANES: [LaneId; 4] = [lane(0, 5, 0), lane(0, 5, 1), lane(1, 0, 0), lane(256, 9, 255)];

pub(crate) const fn lane(queue: u32, priority: u8, class: u8) -> LaneId {
    LaneId { queue: QueueId(queue), priority: Priority(priority), class: Class(class) }
}

/// What an owner knows, as far as the rules for it ask.
#[derive(Default)]
pub(crate) struct Owned {
    pub(crate) epoch: Epoch,
    pub(crate) next: u64,
    pub(crate) tasks: BTreeMap<TaskId, Task>,
    /// Those that have ended, with the timers that forget them.
    pub(crate) ended: BTreeMap<TaskId, (Task, Level)>,
    pub(crate) canceling: BTreeSet<TaskId>,
    /// Timers for nothing in particular.
    pub(crate) timers: BTreeSet<Level>,
    pub(crate) timers_ack: Level,
    pub(crate) acks: BTreeMap<LaneId, Level>,
    pub(crate) falling: bool,
}

pub(crate) fn key(n: u64) -> Key {
    // One is the beginning of another, and one is long.
    let texts = ["a", "ab", "b", "a long name of somebody who pays for tasks", "z"];
    Key::new(texts[n as usize % texts.len()]).unwrap()
}

impl Owned {
    /// A place that nobody has had, above the lane's ack level and among its rows.
    fn place(&mut self, dice: &mut Dice, lane: LaneId) -> Level {
        self.next += 1;
        let ack = self.acks.get(&lane).copied().unwrap_or(Level::ZERO);
        let pass = ack.pass().time().to_bits() + u128::from(dice.below(500)) * VTime::TICK.to_bits();
        let level = Level::new(VTime::from_bits(pass).pass(), self.next);
        assert!(level > ack);
        level
    }

    /// The same among the timers.
    fn moment(&mut self, dice: &mut Dice) -> Level {
        self.next += 1;
        let pass =
            self.timers_ack.pass().time().to_bits() + u128::from(dice.below(500)) * VTime::TICK.to_bits();
        let level = Level::new(VTime::from_bits(pass).pass(), self.next);
        assert!(level > self.timers_ack);
        level
    }

    /// Some things that may happen now together, and what becomes of them.
    pub(crate) fn change(&mut self, dice: &mut Dice, many: usize) -> Vec<Change> {
        let lane = LANES[dice.below(4) as usize];
        let time = |dice: &mut Dice| VTime::from_bits(u128::from(dice.below(1 << 40)) << 50);
        self.falling = self.tasks.len() >= if self.falling { many / 8 } else { many };
        vec![match dice.below(30) {
            0..8 if !self.falling => self.accept(dice, lane),
            8..12 => return self.shift(dice),
            12..15 if !self.falling => self.accept(dice, lane),
            0..17 => return self.finish(dice),
            17 => self.ack(dice, lane),
            18 => self.ack_timers(dice),
            19..22 => return self.forget(dice),
            22 => return self.mark(dice),
            23 => self.time(dice),
            24 => {
                let settings = Settings { retention_ms: dice.below(1 << 40), ..Settings::default() };
                let record = SettingsRecord { version: dice.below(99), settings };
                Change::Settings { queue: lane.queue, record }
            }
            25 => {
                let ids = match dice.one_in(2) {
                    true => RequestIds::Range { first: TaskId(dice.below(99)), tasks: dice.below(99) as u32 },
                    false => RequestIds::List((0..dice.below(9)).map(TaskId).collect()),
                };
                let record = RequestRecord { until: Millis(dice.below(1 << 40)), ids };
                let key = RequestKey(dice.below(9).into());
                Change::Request { key, record: (!dice.one_in(3)).then_some(record) }
            }
            26 => {
                let (finish, due) = (time(dice), time(dice));
                let (rows, weight) = (dice.below(9) as u32, Weight::MAX);
                let [refund, credit] =
                    [(); 2].map(|()| if dice.one_in(2) { VTime::ZERO } else { time(dice) });
                let average = Owned::average(dice);
                let record = KeyRecord { finish, due, rows, chained: 0, refund, credit, average, weight };
                Change::Key { lane, key: key(dice.below(9)), record: (!dice.one_in(3)).then_some(record) }
            }
            27 => {
                let shelf = ShelfRecord { ack: Level::ZERO, max: Level::new(time(dice).pass(), self.next) };
                let record = ParkedRecord { rows: dice.below(1 << 40), shelf };
                Change::Parked { lane, key: key(dice.below(9)), record: (!dice.one_in(3)).then_some(record) }
            }
            28 => Change::Paused { queue: lane.queue, key: key(dice.below(9)), paused: !dice.one_in(3) },
            _ if dice.one_in(2) => {
                let weight = Weight::from_thousandths(1 + dice.below(999) as u32);
                let weight = weight.filter(|_| !dice.one_in(3));
                let limit = dice.one_in(3).then(|| 1 + dice.below(9) as u32);
                let over = Override { weight, limit, ..Override::default() };
                Change::Override { queue: lane.queue, key: key(dice.below(9)), over }
            }
            _ => {
                let totals =
                    Totals { accepted: dice.below(99), scheduled: dice.below(99), ..Totals::default() };
                let name = QueueName::new(["mail", "render"][dice.below(2) as usize]).unwrap();
                let average = Owned::average(dice);
                Change::Queue { queue: lane.queue, record: QueueRecord { name, totals, average } }
            }
        }]
    }

    fn charge(dice: &mut Dice) -> Charge {
        let weight = Weight::from_thousandths(1 + dice.below(999_999) as u32).unwrap();
        let cost = Cost::new(1 + dice.below(5_000) as u32).unwrap();
        Charge { cost, weight, chained: dice.one_in(2), timed: dice.one_in(2) }
    }

    /// None, or of short runs or long ones.
    fn average(dice: &mut Dice) -> Average {
        let bits = [0, 7, 30][dice.below(3) as usize];
        Average::from_bits(dice.below(1 << bits))
    }

    /// A place that nobody has had on a shelf. Nothing there goes by range.
    fn shelf(&mut self, dice: &mut Dice) -> Level {
        self.next += 1;
        Level::new(VTime::from_bits(u128::from(dice.below(500)) * VTime::TICK.to_bits()).pass(), self.next)
    }

    fn accept(&mut self, dice: &mut Dice, lane: LaneId) -> Change {
        // The seq of a first place is the task's id.
        let (place, id) = match dice.below(8) {
            0 | 1 => {
                let level = self.moment(dice);
                (Place::Timer(level), level.seq())
            }
            2 | 3 => {
                let level = self.shelf(dice);
                (Place::Parked(level), level.seq())
            }
            _ => {
                let level = self.place(dice, lane);
                (Place::Lane(level), level.seq())
            }
        };
        let terms = dice.one_in(4).then(|| Terms {
            backoff: dice.one_in(2).then(Backoff::default),
            expires: dice.one_in(2).then(|| Millis(dice.below(1 << 50))),
            attach_ms: dice.below(2) * 5_000,
            expected_ms: dice.below(2) * (1 + dice.below(1 << 30)),
            max_duration_ms: dice.below(2) * (1 + dice.below(1 << 30)),
        });
        let files = if dice.one_in(5) { dice.below(4) } else { 0 };
        let file = |n| File {
            name: FileName::new(&format!("file-{n}")).unwrap(),
            bytes: vec![n as u8; id as usize % 200].into(),
        };
        let task = Task {
            id: TaskId(id),
            lane,
            place,
            key: key(dice.below(9)),
            charge: Owned::charge(dice),
            attempt: 1,
            max_attempts: 1 + dice.below(300) as u16,
            lost: 0,
            terms: terms.map(Into::into),
            replay_of: dice.one_in(9).then(|| TaskId(dice.below(99))),
            accepted: Millis(dice.below(1 << 50)),
            content_type: ContentType::default(),
            payload: vec![id as u8; dice.below(150) as usize].into(),
            files: (0..files).map(file).collect(),
        };
        self.tasks.insert(task.id, task.clone());
        Change::Accepted(task)
    }

    pub(crate) fn some_task(&self, dice: &mut Dice) -> Option<Task> {
        let from = TaskId(dice.below(self.next + 1));
        let found = self.tasks.range(from..).next().or_else(|| self.tasks.first_key_value());
        found.map(|(_, task)| task.clone())
    }

    pub(crate) fn some_ended(&self, dice: &mut Dice) -> Option<(Task, Level)> {
        let from = TaskId(dice.below(self.next + 1));
        let found = self.ended.range(from..).next().or_else(|| self.ended.first_key_value());
        found.map(|(_, ended)| ended.clone())
    }

    fn tried(dice: &mut Dice, task: &Task) -> Try {
        Try {
            attempt: task.attempt,
            seat: dice.one_in(2).then(|| Seat::new("gpu-7").unwrap()),
            started: Millis(dice.below(1 << 50)),
            ended: Millis(dice.below(1 << 50)),
            end: [End::Succeeded, End::Failed, End::FailedForGood, End::Lost][dice.below(4) as usize],
            error: "e".repeat(dice.below(99) as usize).into(),
        }
    }

    /// Has a task go from anywhere to anywhere else, once or several times.
    fn shift(&mut self, dice: &mut Dice) -> Vec<Change> {
        let Some(mut task) = self.some_task(dice) else { return vec![self.accept(dice, LANES[0])] };
        // Now and then so often that tries are forgotten.
        let times = if dice.one_in(20) { 30 } else { 1 + dice.below(2) };
        let mut changes = Vec::new();
        for _ in 0..times {
            let (to, level) = match dice.below(7) {
                0 if task.place != Place::Aside => (Place::Aside, Level::ZERO),
                1 | 2 => {
                    let level = self.moment(dice);
                    (Place::Timer(level), level)
                }
                3 | 4 => {
                    let level = self.shelf(dice);
                    (Place::Parked(level), level)
                }
                _ => {
                    let level = self.place(dice, task.lane);
                    (Place::Lane(level), level)
                }
            };
            let mut moved = Task { place: to, charge: Owned::charge(dice), ..task.clone() };
            let tried = (!dice.one_in(3)).then(|| Owned::tried(dice, &task));
            if tried.is_some() {
                moved.attempt += 1;
                moved.lost = moved.lost.saturating_add(dice.below(2) as u8);
            }
            let (lane, from, row) = (task.lane, task.place, moved.row_at(level));
            changes.push(Change::Moved { lane, from, to, row, tried });
            task = moved;
        }
        self.tasks.insert(task.id, task);
        changes
    }

    fn finish(&mut self, dice: &mut Dice) -> Vec<Change> {
        let Some(task) = self.some_task(dice) else { return vec![self.accept(dice, LANES[1])] };
        self.tasks.remove(&task.id);
        let outcomes = [Outcome::Succeeded, Outcome::Failed, Outcome::Canceled, Outcome::Expired];
        let (outcome, tries) = (outcomes[dice.below(4) as usize], task.attempt - 1);
        let end = dice.one_in(2).then(|| EndRecord {
            key: task.key.clone(),
            outcome,
            at: Millis(dice.below(1 << 50)),
            last: dice.one_in(2).then(|| Owned::tried(dice, &task)),
            result: vec![task.id.0 as u8; dice.below(150) as usize].into(),
        });
        let remembered = end.is_some();
        let mut changes = vec![Change::Finished {
            task: task.id,
            lane: task.lane,
            from: task.place,
            tries,
            canceling: self.canceling.remove(&task.id),
            outcome,
            end: end.map(Into::into),
        }];
        if let Place::Parked(level) = task.place {
            let unparked = Change::Unparked { lane: task.lane, key: task.key.clone(), level };
            changes.insert(dice.below(2) as usize, unparked);
        }
        if remembered {
            let at = self.moment(dice);
            changes.push(Change::Timed(TimerRow { at, task: task.id, what: Timed::Forget { tries } }));
            self.ended.insert(task.id, (task, at));
        }
        changes
    }

    fn forget(&mut self, dice: &mut Dice) -> Vec<Change> {
        let Some((task, at)) = self.some_ended(dice) else { return self.finish(dice) };
        self.ended.remove(&task.id);
        vec![Change::Forgotten { task: task.id, tries: task.attempt - 1 }, Change::Untimed { at }]
    }

    /// Has a task that is there stopped, or one that has ended run again.
    fn mark(&mut self, dice: &mut Dice) -> Vec<Change> {
        if dice.one_in(2)
            && let Some((task, _)) = self.some_ended(dice)
        {
            return vec![Change::Replayed { task: task.id, again: TaskId(dice.below(99)) }];
        }
        let Some(task) = self.some_task(dice) else { return vec![self.accept(dice, LANES[2])] };
        self.canceling.insert(task.id);
        vec![Change::Canceling { task: task.id }]
    }

    /// Sets a timer, or does without one.
    fn time(&mut self, dice: &mut Dice) -> Change {
        if dice.one_in(2)
            && let Some(at) = self.timers.pop_first()
        {
            return Change::Untimed { at };
        }
        let (at, task) = (self.moment(dice), TaskId(dice.below(99)));
        self.timers.insert(at);
        Change::Timed(TimerRow { at, task, what: if dice.one_in(2) { Timed::Expire } else { Timed::Detach } })
    }

    /// Raises the ack level of the timers. Those for nothing in particular may be over.
    fn ack_timers(&mut self, dice: &mut Dice) -> Change {
        let due = self.tasks.values().filter_map(|task| match task.place {
            Place::Timer(level) => Some(level),
            Place::Lane(_) | Place::Parked(_) | Place::Aside | Place::Over => None,
        });
        let first = due.chain(self.ended.values().map(|(_, at)| *at)).min();
        let ack = first.map_or(self.timers_ack, Level::before);
        assert!(ack >= self.timers_ack, "no timer is at or below the ack level");
        if !dice.one_in(3) {
            self.timers_ack = ack;
            self.timers.retain(|at| *at > ack);
        }
        Change::Timers { record: ShelfRecord { ack: self.timers_ack, max: ack } }
    }

    /// Raises a lane's ack level, as far as its rows allow.
    fn ack(&mut self, dice: &mut Dice, lane: LaneId) -> Change {
        let rows = self.tasks.values().filter(|task| task.lane == lane).filter_map(|task| task.place.level());
        let last = self.acks.get(&lane).copied().unwrap_or(Level::ZERO);
        let ack = match rows.min() {
            Some(first) => Level::from_bytes((u128::from_be_bytes(first.to_bytes()) - 1).to_be_bytes()),
            None => last,
        };
        assert!(ack >= last, "no row is at or below the ack level");
        let ack = if dice.one_in(3) { last } else { ack };
        self.acks.insert(lane, ack);
        Change::Lane {
            lane,
            record: LaneRecord { ack, max: ack, vtime: ack.pass().time(), turn: VTime::ZERO },
        }
    }
}
