//! The store in memory: ordered maps behind a lock, for tests and simulation. Several owners may share
//! one, to fight over a shard. Faults can be ordered in advance, and flaws (deliberate bugs of a store)
//! switched on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use evenhand_core::backlog::Level;
use evenhand_core::bounds::TRIES_KEPT;
use evenhand_core::change::{
    EndRecord, KeyRecord, LaneRecord, MemberRecord, Override, ParkedRecord, Place, QueueRecord,
    RequestRecord, SettingsRecord, ShelfRecord, Timed, TimerRow, Try,
};
use evenhand_core::names::{Epoch, Key, LaneId, QueueId, RequestKey, Seat, ShardId, StoreId, TaskId};
use evenhand_core::{Change, Metadata, Row, Task};

use crate::{Doubt, History, LISTING_BYTES, Listing, Page, Store, StoreError, Taken, Wanted, next_epoch};

/// What shall go wrong with the next commit or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It does not happen, and the caller learns only that there was no answer.
    Lost,
    /// It happens, and the caller learns only that there was no answer.
    AnswerLost,
    /// It does not happen for want of room.
    Full,
}

/// A deliberate bug of a store, for the simulator to catch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Deletes are done whatever the epoch.
    UnfencedDelete,
    /// Taking a shard returns its metadata but does not raise the epoch.
    EpochNotRaised,
}

/// The store. Clones share what is in it.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    shards: BTreeMap<ShardId, Tables>,
    commit_faults: VecDeque<Fault>,
    read_faults: VecDeque<Fault>,
    take_faults: VecDeque<Fault>,
    no_room: bool,
    flaw: Option<Flaw>,
}

/// One shard's tables, open to checkers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    /// The epoch of the owner.
    pub epoch: Epoch,
    /// The next seq.
    pub next_seq: u64,
    /// Queues by id.
    pub queues: BTreeMap<QueueId, QueueRecord>,
    /// Weights by override.
    pub overrides: BTreeMap<(QueueId, Key), Override>,
    /// Lanes by id.
    pub lanes: BTreeMap<LaneId, LaneRecord>,
    /// Keys by lane.
    pub keys: BTreeMap<(LaneId, Key), KeyRecord>,
    /// Rows by lane and level.
    pub rows: BTreeMap<(LaneId, Level), Row>,
    /// Rows deleted one by one and not yet covered by a range: what a read would have to pass over.
    pub deleted: BTreeSet<(LaneId, Level)>,
    /// Timers by level.
    pub timers: BTreeMap<Level, TimerRow>,
    /// What is saved of them.
    pub timers_record: ShelfRecord,
    /// Timers deleted one by one, as rows are.
    pub deleted_timers: BTreeSet<Level>,
    /// Parked rows by lane, key and level.
    pub parked_rows: BTreeMap<(LaneId, Key, Level), Row>,
    /// Keys with parked rows, by lane.
    pub parked: BTreeMap<(LaneId, Key), ParkedRecord>,
    /// Keys that are paused, by queue.
    pub paused: BTreeSet<(QueueId, Key)>,
    /// Tasks by id.
    pub tasks: BTreeMap<TaskId, Task>,
    /// Tasks whose rows are set aside.
    pub aside: BTreeSet<TaskId>,
    /// Tasks that somebody wants stopped.
    pub canceling: BTreeSet<TaskId>,
    /// Tries by task and attempt.
    pub tries: BTreeMap<(TaskId, u16), Try>,
    /// Ends by task.
    pub ends: BTreeMap<TaskId, Arc<EndRecord>>,
    /// Which task runs an ended one again.
    pub replayed: BTreeMap<TaskId, TaskId>,
    /// Settings by queue.
    pub settings: BTreeMap<QueueId, SettingsRecord>,
    /// Workers by seat.
    pub members: BTreeMap<Seat, MemberRecord>,
    /// The last owner stopped in good order.
    pub stopped: bool,
    /// For how long there may be workers that the store does not know of, in milliseconds.
    pub doubt: Option<u64>,
    /// Requests by what their callers named them.
    pub requests: BTreeMap<RequestKey, RequestRecord>,
    /// The store's id.
    pub store: Option<StoreId>,
}

impl Memory {
    /// Orders a fault for a coming commit; each is used once, in order.
    pub fn fail_commit(&self, fault: Fault) {
        self.lock().commit_faults.push_back(fault);
    }

    /// Orders a fault for a coming take.
    pub fn fail_take(&self, fault: Fault) {
        self.lock().take_faults.push_back(fault);
    }

    /// Orders a fault for a coming read. Whichever it is, the read has no answer.
    pub fn fail_read(&self, fault: Fault) {
        self.lock().read_faults.push_back(fault);
    }

    /// Says whether there is room for new tasks.
    pub fn set_room(&self, enough: bool) {
        self.lock().no_room = !enough;
    }

    /// Switches a deliberate bug on.
    pub fn with_flaw(flaw: Flaw) -> Memory {
        let memory = Memory::default();
        memory.lock().flaw = Some(flaw);
        memory
    }

    /// Puts a shard back to what it once was, as restoring an old copy does.
    pub fn set_back(&self, shard: ShardId, tables: Tables) {
        self.lock().shards.insert(shard, tables);
    }

    /// Lets a checker look at a shard's tables.
    pub fn look<T>(&self, shard: ShardId, look: impl FnOnce(&Tables) -> T) -> T {
        look(self.lock().shards.entry(shard).or_default())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T>(&self, shard: ShardId, read: impl FnOnce(&Tables) -> T) -> Result<T, StoreError> {
        let mut inner = self.lock();
        if inner.read_faults.pop_front().is_some() {
            return Err(unavailable("read"));
        }
        Ok(read(inner.shards.entry(shard).or_default()))
    }
}

impl Store for Memory {
    async fn take(&self, shard: ShardId, shown: Option<Epoch>) -> Result<Taken, StoreError> {
        let mut inner = self.lock();
        let raise = inner.flaw != Some(Flaw::EpochNotRaised);
        let fault = inner.take_faults.pop_front();
        if matches!(fault, Some(Fault::Lost | Fault::Full)) {
            return Err(unavailable("take"));
        }
        let tables = inner.shards.entry(shard).or_default();
        let current = tables.epoch;
        let next = next_epoch(current, shown)?;
        if raise || current == Epoch(0) {
            tables.epoch = next;
        }
        let doubt = shown.map(|shown| Doubt::Shown { shown, current });
        if doubt.is_some() {
            tables.doubt = Some(u64::MAX);
        }
        if fault == Some(Fault::AnswerLost) {
            return Err(unavailable("take"));
        }
        Ok(Taken { epoch: tables.epoch, metadata: tables.metadata(), doubt })
    }

    fn room(&self) -> Result<(), StoreError> {
        if self.lock().no_room { Err(full("it was told so")) } else { Ok(()) }
    }

    async fn commit(&self, shard: ShardId, epoch: Epoch, changes: Vec<Change>) -> Result<(), StoreError> {
        let mut inner = self.lock();
        let no_room = inner.no_room;
        let fault = inner.commit_faults.pop_front();
        let flaw = inner.flaw;
        let tables = inner.shards.entry(shard).or_default();
        if fault == Some(Fault::Lost) {
            return Err(unavailable("commit"));
        }
        if fault == Some(Fault::Full) {
            return Err(full("a fault was ordered"));
        }
        // 0 is the epoch of a shard that nobody has taken, so it is no owner's.
        if tables.epoch != epoch || epoch == Epoch(0) {
            if flaw == Some(Flaw::UnfencedDelete) {
                changes.iter().for_each(|change| tables.delete_rows(change));
            }
            return Err(StoreError::Fenced { epoch, current: tables.epoch });
        }
        if no_room && changes.iter().any(|change| matches!(change, Change::Accepted(_))) {
            return Err(full("it was told so"));
        }
        for change in changes {
            tables.apply(change);
        }
        if fault == Some(Fault::AnswerLost) { Err(unavailable("commit")) } else { Ok(()) }
    }

    async fn read_lane(
        &self,
        shard: ShardId,
        lane: LaneId,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.read(shard, |tables| tables.page(lane, above, limit))
    }

    async fn read_timers(
        &self,
        shard: ShardId,
        above: Level,
        limit: usize,
    ) -> Result<Page<TimerRow>, StoreError> {
        self.read(shard, |tables| tables.timers_above(above, limit))
    }

    async fn read_parked(
        &self,
        shard: ShardId,
        lane: LaneId,
        key: Key,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.read(shard, |tables| {
            let from = std::ops::Bound::Excluded((lane, key.clone(), above));
            let all = tables.parked_rows.range((from, std::ops::Bound::Unbounded));
            let mut found = all.take_while(|((of, k, _), _)| *of == lane && *k == key);
            let rows = found.by_ref().take(limit).map(|(_, row)| row.clone()).collect();
            Page { rows, end: found.next().is_none(), deleted: 0 }
        })
    }

    async fn read_task(&self, shard: ShardId, task: TaskId) -> Result<Option<Task>, StoreError> {
        self.read(shard, |tables| tables.tasks.get(&task).cloned())
    }

    async fn read_history(&self, shard: ShardId, task: TaskId) -> Result<History, StoreError> {
        self.read(shard, |tables| History {
            tries: tables.tries.range((task, 0)..=(task, u16::MAX)).map(|(_, tried)| tried.clone()).collect(),
            end: tables.ends.get(&task).map(|end| EndRecord::clone(end)),
            replayed_as: tables.replayed.get(&task).copied(),
        })
    }

    async fn list_tasks(
        &self,
        shard: ShardId,
        wanted: Wanted,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, StoreError> {
        self.read(shard, |tables| {
            let all = tables.tasks.range(TaskId(after.0.saturating_add(1))..).map(|(_, task)| task);
            let mut wanted = all.filter(|task| {
                wanted.queue.is_none_or(|queue| task.lane.queue == queue)
                    && wanted.ended.is_none_or(|ended| ended == (task.place == Place::Over))
            });
            let mut bytes = 0;
            let fits = |task: &&Task| {
                bytes += task.input_bytes();
                bytes - task.input_bytes() < LISTING_BYTES
            };
            let tasks: Vec<Task> = wanted.clone().take(limit).take_while(fits).cloned().collect();
            let more = wanted.nth(tasks.len()).map(|_| tasks.last().map_or(after, |last| last.id));
            Listing { tasks, more }
        })
    }
}

impl Tables {
    fn metadata(&self) -> Metadata {
        let aside = self.aside.iter().filter_map(|id| self.tasks.get(id)).cloned().collect();
        Metadata {
            next_seq: self.next_seq,
            queues: self.queues.iter().map(|(id, record)| (*id, record.clone())).collect(),
            overrides: self.overrides.iter().map(|((queue, key), w)| (*queue, key.clone(), *w)).collect(),
            lanes: self.lanes.iter().map(|(id, record)| (*id, *record)).collect(),
            keys: self.keys.iter().map(|((lane, key), record)| (*lane, key.clone(), *record)).collect(),
            aside,
            members: self.members.iter().map(|(seat, record)| (seat.clone(), record.clone())).collect(),
            stopped: self.stopped,
            doubt: self.doubt,
            requests: self.requests.iter().map(|(key, record)| (*key, record.clone())).collect(),
            timers: self.timers_record,
            canceling: self.canceling.iter().copied().collect(),
            parked: self.parked.iter().map(|((lane, key), r)| (*lane, key.clone(), *r)).collect(),
            paused: self.paused.iter().cloned().collect(),
            settings: self.settings.iter().map(|(queue, record)| (*queue, record.clone())).collect(),
            store: self.store,
        }
    }

    fn timers_above(&self, above: Level, limit: usize) -> Page<TimerRow> {
        let from = std::ops::Bound::Excluded(above);
        let mut found = self.timers.range((from, std::ops::Bound::Unbounded));
        let rows: Vec<TimerRow> = found.by_ref().take(limit).map(|(_, timer)| timer.clone()).collect();
        let end = found.next().is_none();
        let last = match (end, rows.last()) {
            (false, Some(timer)) => std::ops::Bound::Included(timer.at),
            (true, _) | (false, None) => std::ops::Bound::Unbounded,
        };
        Page { rows, end, deleted: self.deleted_timers.range((from, last)).count() as u64 }
    }

    fn page(&self, lane: LaneId, above: Level, limit: usize) -> Page {
        let from = std::ops::Bound::Excluded((lane, above));
        let mut found =
            self.rows.range((from, std::ops::Bound::Unbounded)).take_while(|((id, _), _)| *id == lane);
        let rows: Vec<Row> = found.by_ref().take(limit).map(|(_, row)| row.clone()).collect();
        let end = found.next().is_none();
        let last = match (end, rows.last()) {
            (false, Some(row)) => row.level,
            (true, _) | (false, None) => Level::from_bytes([0xff; 16]),
        };
        let passed = self.deleted.range((from, std::ops::Bound::Included((lane, last))));
        Page { rows, end, deleted: passed.count() as u64 }
    }

    fn delete_rows(&mut self, change: &Change) {
        match change {
            Change::Moved { lane, from: Place::Parked(level), row, .. }
            | Change::Shortened { from_lane: lane, from: Place::Parked(level), row, .. } => {
                self.parked_rows.remove(&(*lane, row.key.clone(), *level));
            }
            Change::Finished { lane, from, .. }
            | Change::Moved { lane, from, .. }
            | Change::Shortened { from_lane: lane, from, .. } => match from {
                Place::Lane(level) => self.delete_row(*lane, *level),
                Place::Timer(level) => self.delete_timer(*level),
                Place::Parked(_) | Place::Aside | Place::Over => {}
            },
            Change::Unparked { lane, key, level } => {
                self.parked_rows.remove(&(*lane, key.clone(), *level));
            }
            Change::Untimed { at } => self.delete_timer(*at),
            Change::Lane { lane, record } => self.delete_up_to(*lane, record.ack),
            Change::Timers { record } => {
                while let Some(first) = self.timers.first_entry().filter(|first| *first.key() <= record.ack) {
                    first.remove();
                }
                self.deleted_timers.retain(|level| *level > record.ack);
            }
            Change::Accepted(_)
            | Change::Canceling { .. }
            | Change::Forgotten { .. }
            | Change::Replayed { .. }
            | Change::Timed(_)
            | Change::Parked { .. }
            | Change::Paused { .. }
            | Change::Settings { .. }
            | Change::Key { .. }
            | Change::Queue { .. }
            | Change::Override { .. }
            | Change::Member { .. }
            | Change::Stopped { .. }
            | Change::Doubt { .. }
            | Change::Request { .. }
            | Change::Store { .. }
            | Change::Seq { .. } => {}
        }
    }

    fn delete_row(&mut self, lane: LaneId, level: Level) {
        if self.rows.remove(&(lane, level)).is_some() {
            self.deleted.insert((lane, level));
        }
    }

    fn delete_timer(&mut self, level: Level) {
        if self.timers.remove(&level).is_some() {
            self.deleted_timers.insert(level);
        }
    }

    /// Puts a task's row where it is now.
    fn put_row(&mut self, lane: LaneId, to: Place, row: Row) {
        match to {
            Place::Lane(level) => drop(self.rows.insert((lane, level), row)),
            Place::Timer(at) => {
                let timer = TimerRow { at, task: row.task, what: Timed::Due(lane, row) };
                self.timers.insert(at, timer);
            }
            Place::Parked(level) => {
                self.parked_rows.insert((lane, row.key.clone(), level), row);
            }
            Place::Aside => drop(self.aside.insert(row.task)),
            Place::Over => {}
        }
    }

    /// Forgets all that is remembered of a task beside its row.
    fn forget(&mut self, task: TaskId) {
        self.tasks.remove(&task);
        self.ends.remove(&task);
        self.replayed.remove(&task);
        while let Some((&at, _)) = self.tries.range((task, 0)..=(task, u16::MAX)).next() {
            self.tries.remove(&at);
        }
    }

    /// Deletes the settled range of a lane, and with it the traces of single deletes.
    fn delete_up_to(&mut self, lane: LaneId, ack: Level) {
        let range = (lane, Level::ZERO)..=(lane, ack);
        while let Some((&at, _)) = self.rows.range(range.clone()).next() {
            self.rows.remove(&at);
        }
        while let Some(&at) = self.deleted.range(range.clone()).next() {
            self.deleted.remove(&at);
        }
    }

    fn apply(&mut self, change: Change) {
        self.delete_rows(&change);
        match change {
            Change::Accepted(task) => {
                match task.place {
                    Place::Lane(level) | Place::Timer(level) | Place::Parked(level) => {
                        self.put_row(task.lane, task.place, task.row_at(level));
                    }
                    Place::Aside | Place::Over => {}
                }
                self.tasks.insert(task.id, task);
            }
            Change::Moved { lane, from: _, to, row, tried } => {
                self.aside.remove(&row.task);
                if let Some(record) = self.tasks.get_mut(&row.task) {
                    record.place = to;
                    record.attempt = row.attempt;
                    record.charge = row.charge;
                    record.lost = row.lost;
                }
                if let Some(tried) = tried {
                    if let Some(gone) = tried.attempt.checked_sub(TRIES_KEPT) {
                        self.tries.remove(&(row.task, gone));
                    }
                    self.tries.insert((row.task, tried.attempt), tried);
                }
                self.put_row(lane, to, row);
            }
            Change::Shortened { from_lane: _, from: _, lane, to, row } => {
                self.aside.remove(&row.task);
                if let Some(record) = self.tasks.get_mut(&row.task) {
                    (record.lane, record.place) = (lane, to);
                    (record.charge, record.terms) = (row.charge, row.terms.clone());
                }
                self.put_row(lane, to, row);
            }
            Change::Canceling { task } => drop(self.canceling.insert(task)),
            Change::Finished { task, end, .. } => {
                self.aside.remove(&task);
                self.canceling.remove(&task);
                match end {
                    Some(end) => {
                        self.ends.insert(task, end);
                        if let Some(record) = self.tasks.get_mut(&task) {
                            record.place = Place::Over;
                        }
                    }
                    None => self.forget(task),
                }
            }
            Change::Forgotten { task, tries: _ } => self.forget(task),
            Change::Replayed { task, again } => drop(self.replayed.insert(task, again)),
            Change::Timed(timer) => drop(self.timers.insert(timer.at, timer)),
            Change::Untimed { at: _ } => {}
            Change::Timers { record } => self.timers_record = record,
            Change::Unparked { .. } => {}
            Change::Parked { lane, key, record: Some(record) } => {
                self.parked.insert((lane, key), record);
            }
            Change::Parked { lane, key, record: None } => {
                self.parked.remove(&(lane, key));
            }
            Change::Paused { queue, key, paused: true } => drop(self.paused.insert((queue, key))),
            Change::Paused { queue, key, paused: false } => drop(self.paused.remove(&(queue, key))),
            Change::Settings { queue, record } => drop(self.settings.insert(queue, record)),
            Change::Key { lane, key, record: Some(record) } => {
                self.keys.insert((lane, key), record);
            }
            Change::Key { lane, key, record: None } => {
                self.keys.remove(&(lane, key));
            }
            Change::Lane { lane, record } => {
                self.lanes.insert(lane, record);
            }
            Change::Queue { queue, record } => {
                self.queues.insert(queue, record);
            }
            Change::Override { queue, key, over } if over == Override::default() => {
                self.overrides.remove(&(queue, key));
            }
            Change::Override { queue, key, over } => {
                self.overrides.insert((queue, key), over);
            }
            Change::Member { seat, record: Some(record) } => {
                self.members.insert(seat, record);
            }
            Change::Member { seat, record: None } => {
                self.members.remove(&seat);
            }
            Change::Stopped { stopped } => self.stopped = stopped,
            Change::Doubt { left_ms } => self.doubt = left_ms,
            Change::Request { key, record: Some(record) } => {
                self.requests.insert(key, record);
            }
            Change::Request { key, record: None } => {
                self.requests.remove(&key);
            }
            Change::Store { id } => self.store = Some(id),
            Change::Seq { next } => self.next_seq = next,
        }
    }
}

fn full(what: &str) -> StoreError {
    StoreError::Full { what: what.into() }
}

fn unavailable(what: &str) -> StoreError {
    StoreError::Unavailable { what: what.into() }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use evenhand_core::backlog::{Charge, Cost, Weight};
    use evenhand_core::names::{Class, ContentType, Millis, Priority};

    use super::*;
    use crate::conformance::{self, Harness};
    use crate::ready;

    struct InMemory(Option<Flaw>);

    impl Harness for InMemory {
        type Store = Memory;

        async fn fresh(&self) -> Memory {
            self.0.map_or_else(Memory::default, Memory::with_flaw)
        }

        /// Nothing is lost when a handle goes: clones share what is in the store.
        async fn reopen(&self, store: Memory) -> Memory {
            store.clone()
        }
    }

    mod conforms {
        use super::*;

        conformance::suite!(InMemory(None), ready);
    }

    const SHARD: ShardId = ShardId(1);
    const LANE: LaneId = LaneId { queue: QueueId(1), priority: Priority(5), class: Class(0) };

    fn accepted(seq: u64) -> Change {
        Change::Accepted(Task {
            id: TaskId(seq),
            lane: LANE,
            place: Place::Lane(Level::new(Default::default(), seq)),
            key: Key::shared(),
            charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
            attempt: 1,
            max_attempts: 1,
            lost: 0,
            terms: None,
            replay_of: None,
            accepted: Millis(0),
            content_type: ContentType::default(),
            payload: [].into(),
            files: Default::default(),
        })
    }

    fn taken() -> (Memory, Epoch) {
        let memory = Memory::default();
        let epoch = ready(memory.take(SHARD, None)).unwrap().epoch;
        (memory, epoch)
    }

    fn commit(memory: &Memory, epoch: Epoch, seq: u64) -> Result<(), StoreError> {
        ready(memory.commit(SHARD, epoch, vec![accepted(seq), Change::Seq { next: seq + 1 }]))
    }

    /// Tasks, rows and the next seq, which must tell the same story.
    fn counts(memory: &Memory) -> (usize, usize, u64) {
        memory.look(SHARD, |tables| (tables.tasks.len(), tables.rows.len(), tables.next_seq))
    }

    #[test]
    fn a_lost_commit_has_not_happened() {
        let (memory, epoch) = taken();
        memory.fail_commit(Fault::Lost);
        assert!(matches!(commit(&memory, epoch, 1), Err(StoreError::Unavailable { .. })));
        assert_eq!(counts(&memory), (0, 0, 0));
        assert_eq!(commit(&memory, epoch, 1), Ok(()));
        assert_eq!(counts(&memory), (1, 1, 2));
    }

    #[test]
    fn a_commit_whose_answer_is_lost_has_happened() {
        let (memory, epoch) = taken();
        memory.fail_commit(Fault::AnswerLost);
        assert!(matches!(commit(&memory, epoch, 1), Err(StoreError::Unavailable { .. })));
        assert_eq!(counts(&memory), (1, 1, 2));
        let next = ready(memory.take(SHARD, None)).unwrap();
        assert_eq!(next.metadata.next_seq, 2);
        assert_eq!(ready(memory.read_lane(SHARD, LANE, Level::ZERO, 10)).unwrap().rows.len(), 1);
    }

    #[test]
    fn a_commit_without_room_has_not_happened() {
        let (memory, epoch) = taken();
        memory.fail_commit(Fault::Full);
        assert!(matches!(commit(&memory, epoch, 1), Err(StoreError::Full { .. })));
        assert_eq!(counts(&memory), (0, 0, 0));
        assert_eq!(commit(&memory, epoch, 1), Ok(()));
    }

    #[test]
    fn faults_are_used_once_and_in_order() {
        let (memory, epoch) = taken();
        for fault in [Fault::AnswerLost, Fault::Lost, Fault::Full] {
            memory.fail_commit(fault);
        }
        let answers: Vec<_> = (1..=4).map(|seq| commit(&memory, epoch, seq)).collect();
        assert!(matches!(answers[0], Err(StoreError::Unavailable { .. })));
        assert!(matches!(answers[1], Err(StoreError::Unavailable { .. })));
        assert!(matches!(answers[2], Err(StoreError::Full { .. })));
        assert_eq!(answers[3], Ok(()));
        let ids = memory.look(SHARD, |tables| tables.tasks.keys().map(|id| id.0).collect::<Vec<_>>());
        assert_eq!(ids, [1, 4]);
    }

    #[test]
    fn no_fault_lets_a_zombie_write() {
        let (memory, zombie) = taken();
        ready(memory.take(SHARD, None)).unwrap();
        for fault in [Fault::AnswerLost, Fault::Lost, Fault::Full] {
            memory.fail_commit(fault);
            assert!(commit(&memory, zombie, 1).is_err());
            assert_eq!(counts(&memory), (0, 0, 0));
        }
    }

    #[test]
    fn a_read_fault_fails_one_read_of_any_kind_and_no_commit() {
        let (memory, epoch) = taken();
        assert_eq!(commit(&memory, epoch, 1), Ok(()));
        for fault in [Fault::Lost, Fault::AnswerLost, Fault::Full] {
            let fail = || memory.fail_read(fault);
            fail();
            assert_eq!(commit(&memory, epoch, 1), Ok(()));
            assert!(ready(memory.read_lane(SHARD, LANE, Level::ZERO, 10)).is_err());
            assert!(ready(memory.read_lane(SHARD, LANE, Level::ZERO, 10)).is_ok());
            fail();
            assert!(ready(memory.read_task(SHARD, TaskId(1))).is_err());
            assert!(ready(memory.read_task(SHARD, TaskId(1))).is_ok());
            fail();
            assert!(ready(memory.read_timers(SHARD, Level::ZERO, 10)).is_err());
            assert!(ready(memory.read_timers(SHARD, Level::ZERO, 10)).is_ok());
            fail();
            assert!(ready(memory.read_history(SHARD, TaskId(1))).is_err());
            assert!(ready(memory.read_history(SHARD, TaskId(1))).is_ok());
            fail();
            assert!(ready(memory.list_tasks(SHARD, Wanted::default(), TaskId(0), 10)).is_err());
            assert!(ready(memory.list_tasks(SHARD, Wanted::default(), TaskId(0), 10)).is_ok());
        }
        assert_eq!(counts(&memory), (1, 1, 2));
    }

    /// Runs a case, given as a function, and says whether it failed.
    fn fails(case: impl FnOnce() + std::panic::UnwindSafe) -> bool {
        catch_unwind(case).is_err()
    }

    /// Asserts that these cases fail on a store with the flaw: a case that cannot fail protects nothing.
    macro_rules! caught {
        ($flaw:expr; $($case:ident)+) => {
            $(
                let failed = fails(|| ready(conformance::$case(&InMemory(Some($flaw)))));
                assert!(failed, "{} does not see {:?}", stringify!($case), $flaw);
            )+
        };
    }

    #[test]
    fn deletes_without_a_fence_are_caught() {
        caught! { Flaw::UnfencedDelete;
            a_zombie_owner_changes_nothing_by_any_kind_of_change
            a_fenced_commit_changes_nothing_at_all
            a_zombie_owner_deletes_nothing_of_what_its_successor_accepted
            an_epoch_that_nobody_was_given_is_refused
            the_epoch_of_another_shard_is_refused
        }
    }

    #[test]
    fn an_epoch_that_is_not_raised_is_caught() {
        caught! { Flaw::EpochNotRaised;
            taking_raises_the_epoch_every_time
            two_takes_at_once_get_two_epochs
            reopening_keeps_everything_and_the_epoch_goes_on_rising
            a_zombie_owner_changes_nothing_by_any_kind_of_change
            a_fenced_commit_changes_nothing_at_all
            a_zombie_owner_deletes_nothing_of_what_its_successor_accepted
            a_fenced_commit_of_no_changes_is_refused
            a_fenced_owner_can_take_the_shard_again
            a_late_write_fails_or_was_seen_by_the_take_over
        }
    }
}
