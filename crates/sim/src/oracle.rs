//! What an onlooker can say about a world: he sees what callers and workers were told, what the store applied
//! and which processes ran when, and knows nothing of the core.

use std::collections::{BTreeMap, BTreeSet};

use evenhand_core::admission::{Rate, RateUnit};
use evenhand_core::backlog::{Level, VTime};
use evenhand_core::change::{KeyRecord, LaneRecord, Place, Timed};
use evenhand_core::names::{Epoch, Fence, Key, LaneId, Millis, QueueId, RequestKey, TaskId};
use evenhand_core::timers::due_at;
use evenhand_core::{Change, Run, Task};
use evenhand_store::Tables;

fn has_refund(record: &KeyRecord) -> bool {
    record.refund > VTime::ZERO
}

/// Earlier than any run.
const FIRST_FENCE: Fence = Fence { epoch: Epoch(0), dispatch: 0, nonce: 0 };
/// Later than any run.
const LAST_FENCE: Fence = Fence { epoch: Epoch(u64::MAX), dispatch: u64::MAX, nonce: u64::MAX };

/// The onlooker's notes.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// Tasks that some commit made durable.
    stored: BTreeSet<TaskId>,
    /// Tasks whose end some commit made durable.
    ended: BTreeSet<TaskId>,
    /// Tasks that a caller was told are accepted.
    accepted: BTreeSet<TaskId>,
    /// Tasks that somebody was told have ended.
    told_ended: BTreeSet<TaskId>,
    /// What runs at this moment, really: a process is alive.
    running: BTreeMap<TaskId, Fence>,
    /// Tasks that a caller was told are being stopped, and their last run at that time.
    stopping: BTreeMap<TaskId, Fence>,
    /// The attempt of every run that an owner has sent to a worker.
    dispatched: BTreeMap<(TaskId, Fence), u16>,
    /// Runs of which the store knows nothing, since it was set back: how they end need not count.
    void: BTreeSet<(TaskId, Fence)>,
    /// Requests that their callers named: how many tasks they have, which became durable, and what was told.
    named: BTreeMap<RequestKey, Named>,
    /// The highest F ever saved for a key, and A and V for a lane.
    finishes: BTreeMap<(LaneId, Key), VTime>,
    /// Keys of which a task's time was charged ahead: their F may fall.
    timed: BTreeSet<(LaneId, Key)>,
    lanes: BTreeMap<LaneId, (Level, VTime)>,
    epoch: Epoch,
    /// What the rates of queues and of their keys have left, and when that was.
    rates: BTreeMap<(QueueId, Option<Key>), Left>,
    /// What the last run of a task took of them.
    taken: BTreeMap<TaskId, Vec<(QueueId, Option<Key>, f64)>>,
    /// Interactive runs whose clients know that they began.
    interactive: BTreeSet<(TaskId, Fence)>,
    /// Interactive runs whose clients know that they are over.
    interactive_over: BTreeSet<(TaskId, Fence)>,
    /// Runs that started.
    pub starts: u64,
}

/// What a rate has left, in thousandths: at this time, of this owner and this rate.
#[derive(Clone, Copy, Debug)]
struct Left {
    content: f64,
    at_us: u64,
    of: (Epoch, Rate),
}

/// A request that its caller named, to be accepted once however often it is sent.
#[derive(Clone, Debug, Default)]
struct Named {
    tasks: usize,
    stored: BTreeSet<TaskId>,
    told: Option<Vec<TaskId>>,
}

/// The payload of a task of a named request: by it the onlooker knows where it came from.
pub fn named_payload(key: RequestKey) -> Vec<u8> {
    [b"named".as_slice(), &key.0.to_be_bytes()].concat()
}

fn name_of(payload: &[u8]) -> Option<RequestKey> {
    let key = payload.strip_prefix(b"named")?.try_into().ok()?;
    Some(RequestKey(u128::from_be_bytes(key)))
}

impl Oracle {
    /// A caller is about to name a request of so many tasks.
    pub fn names(&mut self, key: RequestKey, tasks: usize) {
        self.named.insert(key, Named { tasks, ..Named::default() });
    }

    /// A caller was told which tasks its named request became.
    pub fn told_named(&mut self, key: RequestKey, tasks: &[TaskId]) -> Result<(), String> {
        let named = self.named.entry(key).or_default();
        let before = named.told.get_or_insert_with(|| tasks.to_vec());
        if before == tasks && named.stored.iter().eq(tasks) {
            return Ok(());
        }
        Err(format!("request {key} became {before:?}, {:?} in the store, and now {tasks:?}", named.stored))
    }

    /// An owner sent a run to a worker, at this time by its clock.
    pub fn dispatched(&mut self, run: &Run, now: Millis) -> Result<(), String> {
        let last = self.dispatched.range((run.task, FIRST_FENCE)..=(run.task, LAST_FENCE)).next_back();
        if last.is_some_and(|(_, attempt)| *attempt == run.attempt) {
            self.not_started(run.task); // it was refused: that did not count
        }
        self.taken.remove(&run.task);
        self.dispatched.insert((run.task, run.fence), run.attempt);
        let task = run.task;
        if let Some(expires) = run.terms.as_ref().and_then(|terms| terms.expires)
            && expires <= now
        {
            return Err(format!("task {task} was started at {now}, and had expired at {expires}"));
        }
        match self.stopping.get(&task) {
            Some(fence) if run.fence > *fence => Err(format!(
                "task {task} was started again after its caller was told that it is being stopped"
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// A caller was told that a running task is being stopped: from then on no other run of it begins.
    pub fn told_stopping(&mut self, task: TaskId) {
        let last =
            self.dispatched.range(..=(task, LAST_FENCE)).next_back().filter(|((of, _), _)| *of == task);
        if let Some((&(_, fence), _)) = last {
            self.stopping.entry(task).or_insert(fence);
        }
    }

    /// An owner told a worker that the end of a run is durable, or that it counts no more.
    pub fn acknowledged(&self, tables: &Tables, task: TaskId, fence: Fence) -> Result<(), String> {
        let later = |at: &(TaskId, Fence)| at.0 == task && at.1 > fence;
        let attempt = self.dispatched.get(&(task, fence)).copied().unwrap_or(0);
        let counted = tables.tasks.get(&task).is_none_or(|task| task.attempt > attempt);
        let replaced = || self.dispatched.range((task, fence)..).nth(1).is_some_and(|(at, _)| later(at));
        if self.ended.contains(&task) || counted || self.void.contains(&(task, fence)) || replaced() {
            return Ok(());
        }
        Err(format!("the end of task {task}, run {fence:?}, was acknowledged but is not durable"))
    }

    /// A caller was told that these are accepted.
    pub fn told_accepted(&mut self, tasks: &[TaskId]) -> Result<(), String> {
        for &task in tasks {
            if !self.stored.contains(&task) {
                return Err(format!("task {task} was answered as accepted, but is not durable"));
            }
            self.accepted.insert(task);
        }
        Ok(())
    }

    /// Somebody was told that this task has ended.
    pub fn told_ended(&mut self, task: TaskId) -> Result<(), String> {
        self.told_ended.insert(task);
        if self.ended.contains(&task) { Ok(()) } else { Err(format!("task {task} ended, but not durably")) }
    }

    /// Somebody was told that this task is to be tried again.
    pub fn told_retried(&self, tables: &Tables, task: TaskId, attempt: u16) -> Result<(), String> {
        let counted = tables.tasks.get(&task).is_some_and(|task| task.attempt >= attempt);
        if counted || self.ended.contains(&task) {
            return Ok(());
        }
        Err(format!("attempt {attempt} of task {task} was told, but is not durable"))
    }

    /// The store is set back to a copy, with which these notes were made. What was promised since does not count; what
    /// runs goes on.
    pub fn set_back(&mut self, then: Oracle) {
        let Oracle { ended, told_ended, stopping, finishes, timed, lanes, epoch, dispatched, .. } = then;
        self.void.extend(self.dispatched.keys().filter(|run| !dispatched.contains_key(run)));
        (self.ended, self.told_ended, self.stopping) = (ended, told_ended, stopping);
        (self.finishes, self.timed, self.lanes, self.epoch) = (finishes, timed, lanes, epoch);
    }

    /// An owner took the shard.
    pub fn taken(&mut self, epoch: Epoch) -> Result<(), String> {
        if epoch <= self.epoch {
            return Err(format!("the shard was taken at epoch {epoch}, after epoch {}", self.epoch));
        }
        self.epoch = epoch;
        Ok(())
    }

    /// A process of a run began.
    pub fn started(&mut self, run: &Run) -> Result<(), String> {
        self.starts += 1;
        if let Some(other) = self.running.insert(run.task, run.fence) {
            return Err(format!("task {} runs twice at once: {other:?} and {:?}", run.task, run.fence));
        }
        if self.told_ended.contains(&run.task) {
            return Err(format!("task {} was started after it had ended", run.task));
        }
        Ok(())
    }

    /// A client was told that its interactive run begins.
    pub fn interactive_began(&mut self, task: TaskId, fence: Fence) {
        self.interactive.insert((task, fence));
    }

    /// Interactive runs of this owner whose clients still talk, as far as they know.
    pub fn talking(&self, epoch: Epoch) -> impl Iterator<Item = &(TaskId, Fence)> {
        let over = |run: &&(TaskId, Fence)| !self.interactive_over.contains(run);
        self.interactive.iter().filter(move |(_, fence)| fence.epoch == epoch).filter(over)
    }

    /// Something of a queue starts, or of one of its keys, that has this rate. Owners come and go, and their clocks are not
    /// quite right; but the rate holds. What costs more than there is may start as long as there is something.
    pub fn within_rate(
        &mut self,
        run: &Run,
        key: Option<&Key>,
        now_us: u64,
        rate: Rate,
    ) -> Result<(), String> {
        let queue = run.lane.queue;
        let takes = match rate.unit {
            RateUnit::Tasks => 1_000.0,
            RateUnit::Cost => f64::from(run.charge.cost.thousandths()),
        };
        let slack = 1.1;
        let most = rate.burst as f64 * slack + 1_000.0;
        let of = (run.fence.epoch, rate);
        let left = self.rates.entry((queue, key.cloned())).or_insert(Left { content: most, at_us: 0, of });
        if left.of != of {
            // Neither a new owner nor a new rate knows of a debt.
            (left.content, left.of) = (left.content.max(0.0), of);
        }
        let passed = (now_us - left.at_us) as f64 / 1_000_000.0;
        let filled = (left.content + passed * rate.per_second as f64 * slack).min(most);
        (left.content, left.at_us) = (filled - takes, now_us);
        self.taken.entry(run.task).or_default().push((queue, key.cloned(), takes));
        let least = match rate.unit {
            RateUnit::Tasks => 1_000.0,
            RateUnit::Cost => 0.0,
        };
        if filled < least - 1.0 {
            let per_second = rate.per_second as f64 / 1_000.0;
            return Err(format!("queue {queue}, key {key:?}, starts more than {per_second} in a second"));
        }
        Ok(())
    }

    /// It did not start after all: what it took is given back.
    pub fn not_started(&mut self, task: TaskId) {
        for (queue, key, takes) in self.taken.remove(&task).unwrap_or_default() {
            if let Some(left) = self.rates.get_mut(&(queue, key)) {
                left.content += takes;
            }
        }
    }

    /// The client of an interactive run was told that it is over: each is told once.
    pub fn interactive_over(&mut self, task: TaskId, fence: Fence) -> Result<(), String> {
        match self.interactive_over.insert((task, fence)) {
            true => Ok(()),
            false => Err(format!("interactive task {task} was over twice")),
        }
    }

    /// The process of a run is gone.
    pub fn stopped(&mut self, task: TaskId) {
        self.running.remove(&task);
    }

    /// The runs that are alive.
    pub fn alive(&self) -> &BTreeMap<TaskId, Fence> {
        &self.running
    }

    /// The store is about to apply these changes, of an owner whose clock shows this.
    pub fn applies(&mut self, before: &Tables, changes: &[Change], now: Millis) -> Result<(), String> {
        let mut charged: BTreeMap<(LaneId, Key), VTime> = BTreeMap::new();
        let mut parked: BTreeSet<(LaneId, Key)> = BTreeSet::new();
        let mut charge = |lane: LaneId, key: &Key, span: VTime| {
            *charged.entry((lane, key.clone())).or_default() += span;
        };
        for change in changes {
            match change {
                Change::Accepted(task) => {
                    self.stored.insert(task.id);
                    self.stores_named(task)?;
                    if task.charge.timed {
                        self.timed.insert((task.lane, task.key.clone()));
                    }
                    if task.place.level().is_some() {
                        charge(task.lane, &task.key, task.charge.span());
                    }
                }
                Change::Moved { lane, from, to, row, tried } => {
                    if row.charge.timed {
                        self.timed.insert((*lane, row.key.clone()));
                    }
                    if let (Place::Lane(_) | Place::Timer(_) | Place::Parked(_), Place::Lane(_)) = (from, to)
                    {
                        charge(*lane, &row.key, row.charge.span());
                    }
                    // (A run that was given up may end meanwhile: then the next try is put off anew.)
                    if let (Place::Timer(at), None) = (from, tried)
                        && due_at(*at) > now
                    {
                        return Err(format!("task {} was due at {}, not at {now}", row.task, due_at(*at)));
                    }
                    let known = before.tasks.get(&row.task).map(|task| task.attempt);
                    if known.is_some_and(|attempt| row.attempt != attempt + u16::from(tried.is_some())) {
                        return Err(format!("task {}: attempt {} follows {known:?}", row.task, row.attempt));
                    }
                    let retried = row.attempt > 1
                        && matches!(
                            (from, to),
                            (Place::Lane(_) | Place::Timer(_) | Place::Aside, Place::Lane(_))
                        );
                    if let (Place::Parked(_), Place::Lane(_), None) = (from, to, tried)
                        && !row.charge.chained
                    {
                        return Err(format!("task {} comes back ahead of its key's others", row.task));
                    }
                    if let (Place::Lane(_), Place::Parked(_)) = (from, to) {
                        parked.insert((*lane, row.key.clone()));
                    }
                    let levels = changes.iter().find_map(|change| {
                        if let Change::Lane { lane: of, record } = change {
                            (of == lane).then_some(record)
                        } else {
                            None
                        }
                    });
                    let ahead =
                        |record: &LaneRecord| row.level.pass() <= record.vtime.pass().max(record.ack.pass());
                    if retried && !levels.is_some_and(ahead) {
                        return Err(format!("task {} is tried again, behind others of its key", row.task));
                    }
                }
                Change::Forgotten { task, .. } => {
                    if !self.ended.contains(task) {
                        return Err(format!("task {task} was forgotten before it had ended"));
                    }
                }
                Change::Finished { task, .. } => {
                    if !self.stored.contains(task) || !self.ended.insert(*task) {
                        return Err(format!("task {task} ended twice, or never began"));
                    }
                }
                Change::Shortened { from_lane, from, lane, to, row } => {
                    let (had, has) =
                        (before.tasks.get(&row.task).map(Task::max_duration_ms), row.max_duration_ms());
                    if had.is_some_and(|had| had > 0 && has > had) {
                        return Err(format!("task {} had {had:?} ms, and has {has}", row.task));
                    }
                    if row.charge.timed {
                        self.timed.insert((*lane, row.key.clone()));
                    }
                    let new = matches!(to, Place::Lane(_))
                        && (lane != from_lane || !matches!(from, Place::Lane(_)));
                    if new {
                        charge(*lane, &row.key, row.charge.span());
                    }
                }
                Change::Canceling { .. }
                | Change::Replayed { .. }
                | Change::Timed(_)
                | Change::Untimed { .. }
                | Change::Timers { .. }
                | Change::Unparked { .. }
                | Change::Parked { .. }
                | Change::Paused { .. }
                | Change::Settings { .. }
                | Change::Key { .. }
                | Change::Lane { .. }
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
        for change in changes {
            match change {
                Change::Key { lane, key, record: Some(record) } => {
                    let at = (*lane, key.clone());
                    let owed = charged.remove(&at).unwrap_or_default();
                    // What its parked rows were charged is given back when the last row has left, and what its
                    // runs took less than they were charged.
                    let refunded = before.keys.get(&at).is_some_and(has_refund);
                    if parked.contains(&at) || refunded || self.timed.contains(&at) {
                        self.finishes.remove(&at);
                        continue;
                    }
                    let saved = before.keys.get(&at).map_or(VTime::ZERO, |record| record.finish);
                    if record.finish < saved + owed {
                        return Err(format!(
                            "key {key}: F is {}, but {saved} + {owed} is due",
                            record.finish
                        ));
                    }
                    let highest = self.finishes.entry(at).or_default();
                    if record.finish < *highest {
                        return Err(format!("key {key}: F moved back from {highest} to {}", record.finish));
                    }
                    *highest = record.finish;
                }
                Change::Lane { lane, record } => {
                    let (ack, vtime) = self.lanes.entry(*lane).or_default();
                    if record.ack < *ack || record.vtime < *vtime {
                        return Err(format!("lane {lane}: A or V moved back: {ack} {vtime} to {record:?}"));
                    }
                    (*ack, *vtime) = (record.ack, record.vtime);
                }
                Change::Key { lane, key, record: None } => {
                    // What its parked rows were charged was given back, so that there was nothing left to remember.
                    let at = (*lane, key.clone());
                    if parked.contains(&at) || before.keys.get(&at).is_some_and(has_refund) {
                        self.finishes.remove(&at);
                    }
                }
                Change::Accepted(_)
                | Change::Moved { .. }
                | Change::Shortened { .. }
                | Change::Canceling { .. }
                | Change::Finished { .. }
                | Change::Forgotten { .. }
                | Change::Replayed { .. }
                | Change::Timed(_)
                | Change::Untimed { .. }
                | Change::Timers { .. }
                | Change::Unparked { .. }
                | Change::Parked { .. }
                | Change::Paused { .. }
                | Change::Settings { .. }
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
        if let Some(((lane, key), owed)) = charged.into_iter().next() {
            return Err(format!("key {key} in lane {lane} owes {owed}, and its record was not saved"));
        }
        Ok(())
    }

    fn stores_named(&mut self, task: &Task) -> Result<(), String> {
        if task.replay_of.is_some() {
            return Ok(()); // somebody wanted it twice
        }
        let Some((key, named)) =
            name_of(&task.payload).and_then(|key| self.named.get_mut(&key).map(|named| (key, named)))
        else {
            return Ok(());
        };
        named.stored.insert(task.id);
        if named.stored.len() > named.tasks {
            return Err(format!("request {key} was accepted twice: {:?}", named.stored));
        }
        Ok(())
    }

    /// The store has applied something: every task has exactly one place.
    pub fn applied(&self, tables: &Tables) -> Result<(), String> {
        let parked = tables.parked_rows.len();
        let scheduled = tables.timers.values().filter(|row| matches!(row.what, Timed::Due(..))).count();
        let (tasks, rows, aside) = (tables.tasks.len(), tables.rows.len(), tables.aside.len());
        let ended = tables.ends.len();
        if tasks == rows + aside + scheduled + parked + ended {
            return Ok(());
        }
        let lost = tables.tasks.values().find(|task| match task.place {
            Place::Lane(level) => !tables.rows.contains_key(&(task.lane, level)),
            Place::Timer(at) => !tables.timers.contains_key(&at),
            Place::Parked(level) => !tables.parked_rows.contains_key(&(task.lane, task.key.clone(), level)),
            Place::Aside => !tables.aside.contains(&task.id),
            Place::Over => !tables.ends.contains_key(&task.id),
        });
        match lost {
            Some(task) => Err(format!("task {} has no row: it would wait for ever", task.id)),
            None => Err(format!(
                "{tasks} tasks, but {rows} rows, {aside} set aside, {scheduled} scheduled, {parked} parked, {ended} ended"
            )),
        }
    }

    /// The saved counts are those of the tables.
    pub fn counts(tables: &Tables) -> Result<(), String> {
        for (queue, record) in &tables.queues {
            let of_queue = |task: &&Task| task.lane.queue == *queue && task.place != Place::Over;
            let tasks = tables.tasks.values().filter(of_queue).count() as u64;
            let kept = record.totals.unfinished();
            if tasks != kept {
                return Err(format!("queue {}: {tasks} tasks are stored, {kept} are counted", record.name));
            }
        }
        for ((lane, key), record) in &tables.keys {
            let rows = tables.rows.values().zip(tables.rows.keys());
            let rows = rows.filter(|(row, (l, _))| l == lane && row.key == *key).count() as u32;
            if rows != record.rows {
                return Err(format!("key {key}: {rows} rows are stored, {} are counted", record.rows));
            }
        }
        Ok(())
    }

    /// The world is over: nothing accepted was lost, nothing is left.
    pub fn over(&self, tables: &Tables) -> Result<(), String> {
        if let Some(task) = tables.tasks.keys().next() {
            return Err(format!(
                "not drained: task {task} and {} others wait for ever",
                tables.tasks.len() - 1
            ));
        }
        if let Some(task) = self.accepted.difference(&self.ended).next() {
            return Err(format!("task {task} was accepted and is lost"));
        }
        if let Some((at, timer)) = tables.timers.first_key_value() {
            return Err(format!("a timer at {at} is not over: {timer:?}"));
        }
        if let Some(((_, key), record)) = tables.parked.first_key_value() {
            return Err(format!("key {key} is still parked: {record:?}"));
        }
        let left = (tables.tries.len(), tables.ends.len(), tables.replayed.len(), tables.canceling.len());
        if left != (0, 0, 0, 0) {
            return Err(format!("tries, ends, replays, cancels that nobody needs: {left:?}"));
        }
        if let Some(((lane, key), record)) = tables.keys.first_key_value() {
            let of = tables.lanes.get(lane);
            return Err(format!("key {key} of lane {lane} was not forgotten: {record:?} in {of:?}"));
        }
        if let Some((lane, level)) = tables.deleted.first() {
            let (ack, left) = (tables.lanes[lane].ack, tables.deleted.len());
            return Err(format!(
                "lane {lane}: A stays at {ack}, below {level} and {left} deleted rows in all"
            ));
        }
        if let Some(task) = self.running.keys().next() {
            return Err(format!("task {task} still runs"));
        }
        Ok(())
    }
}
