//! What a list of changes comes to. Changes are applied in their order; a database is faster with one statement for each
//! table. So the list is folded first: for each row of each table, what it is in the end. What is accepted and gone in
//! the same commit is never written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use evenhand_core::backlog::{Charge, Level};
use evenhand_core::bounds::TRIES_KEPT;
use evenhand_core::change::{
    EndRecord, KeyRecord, LaneRecord, MemberRecord, Override, ParkedRecord, Place, QueueRecord,
    RequestRecord, SettingsRecord, ShelfRecord, Timed, TimerRow, Try,
};
use evenhand_core::life::Terms;
use evenhand_core::names::{Key, LaneId, QueueId, RequestKey, Seat, StoreId, TaskId};
use evenhand_core::{Change, Row, Task};

/// A row of a table that is put; None if it is deleted.
pub(super) type Rows<K, V> = BTreeMap<K, Option<V>>;

/// What a commit does, table by table.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub(super) next_seq: Option<u64>,
    pub(super) stopped: Option<bool>,
    pub(super) doubt: Option<Option<u64>>,
    pub(super) store: Option<StoreId>,
    pub(super) shelf: Option<ShelfRecord>,
    pub(super) tasks: BTreeMap<TaskId, OfTask>,
    pub(super) tries: Rows<(TaskId, u16), Try>,
    /// Of these all tries go.
    pub(super) untried: BTreeSet<TaskId>,
    /// But for those that tasks wait for.
    pub(super) timers: Rows<Level, TimerRow>,
    pub(super) queues: BTreeMap<QueueId, QueueRecord>,
    pub(super) settings: BTreeMap<QueueId, SettingsRecord>,
    pub(super) lanes: BTreeMap<LaneId, LaneRecord>,
    pub(super) keys: Rows<(LaneId, Key), KeyRecord>,
    pub(super) parked: Rows<(LaneId, Key), ParkedRecord>,
    pub(super) paused: Rows<(QueueId, Key), ()>,
    pub(super) overrides: Rows<(QueueId, Key), Override>,
    pub(super) members: Rows<Seat, MemberRecord>,
    pub(super) requests: Rows<RequestKey, RequestRecord>,
}

/// What becomes of a task.
#[derive(Debug, Default)]
pub(super) struct OfTask {
    /// It is new, and this is what it is by now.
    pub(super) new: Option<Task>,
    /// It was there before, and has moved.
    pub(super) moved: Option<Moved>,
    pub(super) end: Option<Arc<EndRecord>>,
    pub(super) replayed_as: Option<TaskId>,
    pub(super) canceling: bool,
    /// All there is of it goes.
    pub(super) gone: bool,
}

/// Where a task is now, and what that changed. What is None has not changed.
#[derive(Debug)]
pub(super) struct Moved {
    pub(super) place: Place,
    pub(super) charge: Charge,
    pub(super) lane: Option<LaneId>,
    pub(super) tries: Option<(u16, u8)>,
    pub(super) terms: Option<Option<Arc<Terms>>>,
}

impl Effects {
    /// What the changes come to.
    pub(super) fn of(changes: Vec<Change>) -> Effects {
        let mut effects = Effects::default();
        changes.into_iter().for_each(|change| effects.change(change));
        effects
    }

    fn task(&mut self, task: TaskId) -> &mut OfTask {
        self.tasks.entry(task).or_default()
    }

    /// A task is somewhere else: in its lane with other tries, or with another duration, possibly in another lane.
    fn move_task(&mut self, shortened: Option<LaneId>, to: Place, row: Row) {
        let of = self.task(row.task);
        let tries = shortened.is_none().then_some((row.attempt, row.lost));
        let terms = shortened.is_some().then_some(row.terms);
        if let Some(task) = &mut of.new {
            (task.place, task.charge) = (to, row.charge);
            task.lane = shortened.unwrap_or(task.lane);
            (task.attempt, task.lost) = tries.unwrap_or((task.attempt, task.lost));
            if let Some(terms) = terms {
                task.terms = terms;
            }
            return;
        }
        let before = of.moved.take();
        let (lane_before, tries_before, terms_before) =
            before.map_or((None, None, None), |moved| (moved.lane, moved.tries, moved.terms));
        of.moved = Some(Moved {
            place: to,
            charge: row.charge,
            lane: shortened.or(lane_before),
            tries: tries.or(tries_before),
            terms: terms.or(terms_before),
        });
    }

    /// All there is of a task goes; so many tries may be remembered of it.
    fn forget(&mut self, task: TaskId, tries: u16) {
        let of = self.tasks.remove(&task).unwrap_or_default();
        if of.new.is_none() {
            self.tasks.insert(task, OfTask { gone: true, ..OfTask::default() });
        }
        let here: Vec<_> = self.tries.range((task, 0)..=(task, u16::MAX)).map(|(at, _)| *at).collect();
        here.iter().for_each(|at| drop(self.tries.remove(at)));
        if of.new.is_none() && (tries > 0 || !here.is_empty()) {
            self.untried.insert(task);
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Accepted(task) => {
                let of = self.task(task.id);
                *of = OfTask { gone: of.gone, new: Some(task), ..OfTask::default() };
            }
            Change::Moved { lane: _, from: _, to, row, tried } => {
                if let Some(tried) = tried {
                    if let Some(gone) = tried.attempt.checked_sub(TRIES_KEPT) {
                        self.tries.insert((row.task, gone), None);
                    }
                    self.tries.insert((row.task, tried.attempt), Some(tried));
                }
                self.move_task(None, to, row);
            }
            Change::Shortened { from_lane: _, from: _, lane, to, row } => {
                self.move_task(Some(lane), to, row);
            }
            Change::Canceling { task } => self.task(task).canceling = true,
            Change::Finished { task, tries, end, lane: _, from: _, canceling: _, outcome: _ } => match end {
                Some(end) => {
                    let of = self.task(task);
                    (of.end, of.canceling) = (Some(end), false);
                }
                None => self.forget(task, tries),
            },
            Change::Forgotten { task, tries } => self.forget(task, tries),
            Change::Replayed { task, again } => self.task(task).replayed_as = Some(again),
            Change::Timed(timer) => match timer.what {
                // A task's own timer is the task's place.
                Timed::Due(_, row) => self.move_task(None, Place::Timer(timer.at), row),
                Timed::Expire | Timed::Detach | Timed::Forget { .. } => {
                    self.timers.insert(timer.at, Some(timer));
                }
            },
            Change::Untimed { at } => drop(self.timers.insert(at, None)),
            Change::Timers { record } => {
                self.timers.retain(|at, _| *at > record.ack);
                self.shelf = Some(record);
            }
            // A parked row is where its task is: it goes when that ends.
            Change::Unparked { .. } => {}
            Change::Parked { lane, key, record } => drop(self.parked.insert((lane, key), record)),
            Change::Paused { queue, key, paused } => {
                self.paused.insert((queue, key), paused.then_some(()));
            }
            Change::Settings { queue, record } => drop(self.settings.insert(queue, record)),
            Change::Key { lane, key, record } => drop(self.keys.insert((lane, key), record)),
            Change::Lane { lane, record } => drop(self.lanes.insert(lane, record)),
            Change::Queue { queue, record } => drop(self.queues.insert(queue, record)),
            Change::Override { queue, key, over } => {
                self.overrides.insert((queue, key), (over != Override::default()).then_some(over));
            }
            Change::Member { seat, record } => drop(self.members.insert(seat, record)),
            Change::Stopped { stopped } => self.stopped = Some(stopped),
            Change::Doubt { left_ms } => self.doubt = Some(left_ms),
            Change::Request { key, record } => drop(self.requests.insert(key, record)),
            Change::Store { id } => self.store = Some(id),
            Change::Seq { next } => self.next_seq = Some(next),
        }
    }
}
