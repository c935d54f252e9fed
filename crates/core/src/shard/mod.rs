//! The shard: one single-threaded decision core. It learns facts ([`Input`]), changes its state, and
//! says what must be done ([`Effect`]). It does nothing itself, and the same inputs always give the same
//! effects.
//!
//! The shell calls [`Shard::step`] for each input it has, then [`Shard::seal`], which closes the batch
//! into one group commit. While that commit is in flight the next batch is stepped. What depends on a
//! commit (answers, acknowledgements, reads, and rows that may be started) is kept with its batch and
//! set free by [`Input::Committed`].
//!
//! Where things are: `accept` takes tasks in, `dispatch` starts them, `ends` takes them out, `timing` does what
//! is due, `reads` fills windows, `commits` makes it durable.

mod accept;
mod admit;
mod commits;
mod dispatch;
mod ends;
mod interactive;
mod limits;
mod parking;
mod reads;
mod reported;
mod shorten;
mod timing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::admission::chance::Chance;
use crate::admission::cycle::Holders;
use crate::admission::rate::Bucket;
use crate::backlog::{Average, KeyState, Lane, Level, Turns, Weight};
use crate::bounds::Bounds;
use crate::canary::{Bug, Canary};
use crate::change::{
    Change, LaneRecord, Metadata, Override, QueueRecord, RequestRecord, Settings, SettingsRecord, Task,
    Totals,
};
use crate::estimate::Took;
use crate::life::{End, Ending};
use crate::messages::{Effect, File, Input, Run, Work};
use crate::names::{
    Class, CommitId, Epoch, Fence, Key, LaneId, LoadId, Millis, Priority, QueueId, QueueName, RequestId,
    RequestKey, Seat, TaskId, WorkerId,
};
use crate::timers::Timers;
use crate::workers::{LiveRun, Worker};
pub use admit::ClassView;
use commits::Batch;
pub use dispatch::LoopState;
pub use limits::KeyHold;
use limits::Keyed;
use parking::Part;
pub(crate) use parking::{Parked, ParkedKey};
use reads::{LoadFor, TaskRead};
use reported::Reported;

/// Where a lane stands in the shard's table. Lanes are never removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LaneIx(usize);

/// A queue in memory.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    pub(crate) record: QueueRecord,
    /// Its own, if somebody has chosen them.
    pub(crate) settings: Option<SettingsRecord>,
    /// Its lanes, first priority first.
    pub(crate) lanes: BTreeMap<(Priority, Class), LaneIx>,
    /// Whose turn it is among the lanes of a priority.
    pub(crate) turns: BTreeMap<Priority, Turns<Class>>,
    pub(crate) overrides: BTreeMap<Key, Override>,
    /// Who holds which class; None if it has no classes.
    pub(crate) holders: Option<Box<Holders>>,
    /// What its keys use; None if they have no limits.
    pub(crate) keyed: Option<Box<Keyed>>,
    /// What its rate lets start; None if nothing has since this owner began.
    pub(crate) bucket: Option<Bucket>,
    pub(crate) rate_armed: Option<Millis>,
    /// Runs of its tasks, interactive ones aside.
    pub(crate) running: u64,
    /// Interactive runs.
    pub(crate) interactive: u64,
    /// How long its runs took of late.
    pub(crate) took: Took,
    /// Slots of the workers that serve it.
    pub(crate) slots: u64,
    /// Workers that serve it and run something that can make room.
    pub(crate) yielding: BTreeSet<WorkerId>,
    /// Workers that serve it and have a free slot.
    pub(crate) free: BTreeSet<WorkerId>,
    /// The worker that was given a task last: the next one is, in turn, another.
    pub(crate) last_worker: WorkerId,
}

/// Something the shard wants to do at a time, of which the store knows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    /// Try a failed read of a lane again.
    ReadLane(LaneIx),
    /// Try a failed read of the timers again.
    ReadTimers,
    /// The same for parked rows.
    ReadParked,
    /// Try a failed read of a task again.
    ReadTask(TaskId),
    /// Look whether a long runner holds A back.
    SetAside(LaneIx),
    /// Forget keys, and save that even if nothing else happens.
    Forget(LaneIx),
    /// Forget requests that are older than we promise to remember them.
    ForgetRequests,
    /// A queue may start something again, by its rate.
    Rate(QueueId),
    /// Some keys may.
    KeyRates,
    /// See whether a run's time is over.
    Overdue(TaskId),
    /// Halt an interactive run whose client was warned.
    Halt(TaskId),
}

/// An end of which it is not known yet what it means: it came while the gate was shut, or its run is not one
/// that the shard counts on.
#[derive(Clone, Debug)]
pub(crate) struct HeldEnd {
    worker: WorkerId,
    task: TaskId,
    fence: Fence,
    attempt: u16,
    /// When the run was dispatched, if that is known.
    started: Millis,
    /// Where its row stood then, if that is known.
    level: Option<Level>,
    end: End,
    ending: Ending,
}

/// One shard. See the module's text.
#[derive(Clone, Debug)]
pub struct Shard {
    pub(crate) bounds: Bounds,
    pub(crate) epoch: Epoch,
    nonce: u64,
    /// What workers said while the store was in doubt.
    reported: Reported,
    pub(crate) canary: Canary,
    seed: u64,
    /// Decides among equals. Begins with the owner's nonce.
    chance: Chance,
    now: Millis,

    pub(crate) queues: Vec<Queue>,
    names: BTreeMap<QueueName, QueueId>,
    pub(crate) lanes: Vec<Lane>,
    lane_index: BTreeMap<LaneId, LaneIx>,

    next_seq: u64,
    next_dispatch: u64,
    /// The gate: nothing is started before it opens.
    pub(crate) open: bool,
    /// The store has room for new tasks.
    room: bool,
    pub(crate) workers: BTreeMap<WorkerId, Worker>,
    pub(crate) runs: BTreeMap<TaskId, LiveRun>,
    /// Runs whose rows are set aside, counted by key.
    aside_runs: BTreeMap<(QueueId, Key), u64>,
    /// Saved long runners that no worker has reported yet.
    aside: BTreeMap<TaskId, Task>,
    held_ends: BTreeMap<(TaskId, Fence), HeldEnd>,
    /// Tasks with an end from before the gate opened that the store has to say a word on. Until it has,
    /// nothing starts: one of these could be started again although it ended.
    unresolved: BTreeSet<TaskId>,
    /// Cancels of tasks that a worker may be running, or have ended, for all we know yet.
    held_cancels: Vec<(RequestId, TaskId)>,
    /// Seats of the workers that are saved as members.
    seats: BTreeMap<WorkerId, Seat>,
    /// Nothing is started any more.
    halted: bool,
    /// Requests and tasks that were named by their callers, also in the order in which they are forgotten.
    requests: BTreeMap<RequestKey, RequestRecord>,
    requests_by_age: BTreeSet<(Millis, RequestKey)>,
    requests_armed: Option<Millis>,
    pub(crate) timers: Timers,
    defaults: Settings,
    dirty_timers: bool,
    /// Tasks that somebody wants stopped and that may be running on a worker that has not said so yet.
    canceling: BTreeSet<TaskId>,
    /// Keys that may not run.
    paused: BTreeSet<(QueueId, Key)>,
    /// Keys with rows that are parked, and those of them that are to be looked at.
    pub(crate) parked: BTreeMap<ParkedKey, Parked>,
    returning: BTreeSet<ParkedKey>,
    /// The last that was looked at.
    returned: Option<ParkedKey>,
    dirty_parked: BTreeSet<ParkedKey>,
    /// Keys that are held by their rates, and until when.
    rate_waits: BTreeSet<(Millis, QueueId, Key)>,
    /// Attached tasks: whether somebody watches them, and until when somebody did.
    watched: BTreeMap<TaskId, (bool, Millis)>,
    /// When this owner began. Nobody can have watched through it before.
    began: Option<Millis>,
    payloads: Payloads,

    batch: Batch,
    sealed: VecDeque<Batch>,
    /// The highest seq known to be durable.
    durable_seq: u64,
    dirty_lanes: BTreeSet<LaneIx>,
    dirty_queues: BTreeSet<QueueId>,
    /// Save although only small records changed.
    flush: bool,

    next_load: u64,
    loads: BTreeMap<LoadId, LoadFor>,
    task_reads: BTreeMap<TaskId, TaskRead>,

    alarms: BTreeSet<(Millis, Alarm)>,
    wake: Option<Millis>,
    /// Workers of which a slot has just become free.
    freed: Vec<WorkerId>,
    /// Queues that may have something to start.
    ready: BTreeSet<QueueId>,
    looks: u64,
    /// Lanes that may need a read.
    hungry: BTreeSet<LaneIx>,
}

/// Payloads and files of tasks that have not started, up to a budget. Every task starts or is canceled in the
/// end, and they leave then.
#[derive(Clone, Debug, Default)]
struct Payloads {
    bytes: usize,
    by_task: BTreeMap<TaskId, Work>,
}

impl Payloads {
    fn keep(&mut self, task: TaskId, work: Work, budget: usize) {
        let bytes = Payloads::weigh(&work);
        if self.bytes + bytes <= budget {
            self.bytes += bytes;
            self.by_task.insert(task, work);
        }
    }

    fn take(&mut self, task: TaskId) -> Option<Work> {
        let work = self.by_task.remove(&task)?;
        self.bytes -= Payloads::weigh(&work);
        Some(work)
    }

    /// Bytes that keeping it costs: an empty payload is not free.
    fn weigh(work: &Work) -> usize {
        const KEEPING: usize = 96; // in a map, in an allocation of its own
        const FILE: usize = 64; // in a list, with two allocations
        KEEPING + work.files.len() * FILE + File::bytes_with(&work.payload, &work.files)
    }
}

impl Shard {
    /// The shard as its new owner finds it. Its gate is shut: tell it what runs ([`Input::Report`]), then
    /// [`Input::Open`] it. An error says how the metadata contradicts itself: the store is damaged.
    ///
    /// `seed` is a random number that callers cannot know. What the shard does never depends on it.
    pub fn new(bounds: Bounds, epoch: Epoch, seed: u64, metadata: Metadata) -> Result<Shard, String> {
        Shard::with_canary(bounds, epoch, seed, metadata, Canary::default())
    }

    /// A shard with a deliberate bug.
    #[cfg(feature = "canary")]
    pub fn with_bug(
        bounds: Bounds,
        epoch: Epoch,
        seed: u64,
        metadata: Metadata,
        bug: Bug,
    ) -> Result<Shard, String> {
        Shard::with_canary(bounds, epoch, seed, metadata, Canary::new(bug))
    }

    pub(crate) fn with_canary(
        bounds: Bounds,
        epoch: Epoch,
        seed: u64,
        metadata: Metadata,
        canary: Canary,
    ) -> Result<Shard, String> {
        metadata.check()?;
        let next_seq = metadata.next_seq.max(1);
        let timers = Timers::restore(&metadata.timers, &bounds, canary);
        let mut shard = Shard {
            bounds,
            epoch,
            nonce: 0,
            reported: Reported::default(),
            canary,
            seed,
            chance: Chance::new(epoch.0),
            now: Millis(0),
            queues: Vec::new(),
            names: BTreeMap::new(),
            lanes: Vec::new(),
            lane_index: BTreeMap::new(),
            next_seq,
            next_dispatch: 1,
            open: false,
            room: true,
            workers: BTreeMap::new(),
            runs: BTreeMap::new(),
            aside_runs: BTreeMap::new(),
            aside: BTreeMap::new(),
            held_ends: BTreeMap::new(),
            unresolved: BTreeSet::new(),
            held_cancels: Vec::new(),
            seats: BTreeMap::new(),
            halted: false,
            requests: BTreeMap::new(),
            requests_by_age: BTreeSet::new(),
            requests_armed: None,
            timers,
            defaults: Settings::default(),
            dirty_timers: false,
            canceling: BTreeSet::new(),
            paused: BTreeSet::new(),
            parked: BTreeMap::new(),
            returning: BTreeSet::new(),
            returned: None,
            dirty_parked: BTreeSet::new(),
            rate_waits: BTreeSet::new(),
            watched: BTreeMap::new(),
            began: None,
            payloads: Payloads::default(),
            batch: Batch::new(CommitId(1)),
            sealed: VecDeque::new(),
            durable_seq: next_seq - 1,
            dirty_lanes: BTreeSet::new(),
            dirty_queues: BTreeSet::new(),
            flush: false,
            next_load: 1,
            loads: BTreeMap::new(),
            task_reads: BTreeMap::new(),
            alarms: BTreeSet::new(),
            wake: None,
            freed: Vec::new(),
            ready: BTreeSet::new(),
            looks: 0,
            hungry: BTreeSet::new(),
        };
        shard.restore(metadata);
        Ok(shard)
    }

    fn restore(&mut self, mut metadata: Metadata) {
        // Whatever order a store returns them in, the same shard comes out.
        metadata.queues.sort_by_key(|(id, _)| *id);
        metadata.lanes.sort_by_key(|(id, _)| *id);
        metadata.keys.sort_by(|(a_lane, a, _), (b_lane, b, _)| (a_lane, a).cmp(&(b_lane, b)));
        for (_, record) in metadata.queues {
            self.add_queue(record);
        }
        for (queue, record) in metadata.settings {
            if let Some(queue) = self.queues.get_mut(queue.0 as usize) {
                queue.settings = Some(record);
            }
        }
        for (queue, key, over) in metadata.overrides {
            if let Some(queue) = self.queues.get_mut(queue.0 as usize) {
                queue.overrides.insert(key, over);
            }
        }
        for (id, record) in metadata.lanes {
            self.add_lane(id, &record);
        }
        for (lane, key, record) in metadata.keys {
            if let Some(&ix) = self.lane_index.get(&lane) {
                let over =
                    self.queues[lane.queue.0 as usize].overrides.get(&key).and_then(|over| over.weight);
                self.lanes[ix.0].places.restore_key(&key, &record, over);
            }
        }
        let Shard { queues, lanes, .. } = self;
        for queue in queues {
            for (&priority, turns) in &mut queue.turns {
                let rows = |ix: &LaneIx| lanes[ix.0].places.rows();
                turns.resume(|class| queue.lanes.get(&(priority, class)).is_some_and(|ix| rows(ix) > 0));
            }
        }
        if !self.canary.is(Bug::AsideForgotten) {
            self.aside = metadata.aside.into_iter().map(|task| (task.id, task)).collect();
        }
        if !self.canary.is(Bug::ParkedForgotten) {
            for (lane, key, record) in metadata.parked {
                self.restore_parked(lane, key, &record);
            }
        }
        self.paused = metadata.paused.into_iter().collect();
        for (queue, key) in self.paused.clone() {
            self.look_at_key(queue, &key);
        }
        for queue in (0..self.queues.len() as u32).map(QueueId) {
            self.classes_changed(queue);
            self.limits_changed(queue);
        }
        for at in self.parked.keys().cloned().collect::<Vec<ParkedKey>>() {
            self.recount(&at);
        }
        self.canceling = metadata.canceling.into_iter().collect();
        self.requests_by_age = metadata.requests.iter().map(|(key, record)| (record.until, *key)).collect();
        self.requests = metadata.requests.into_iter().collect();
        if self.canary.is(Bug::UniqueForgotten) {
            self.requests.clear();
        }
        self.arm_requests();
        self.hungry.extend((0..self.lanes.len()).map(LaneIx));
    }

    /// Learns one fact and says what must be done about it.
    pub fn step(&mut self, now: Millis, input: Input, effects: &mut Vec<Effect>) {
        self.now = self.now.max(now);
        self.timers.at(self.now);
        if self.began.is_none() {
            self.began = Some(self.now);
            self.begin_rates();
        }
        match input {
            Input::Enqueue { request, queue, tasks, once } => {
                self.on_enqueue(request, queue, tasks, once, effects)
            }
            Input::SetKey { request, queue, key, change } => {
                self.on_set_key(request, queue, key, change, effects)
            }
            Input::Shorten { request, task, max_duration_ms } => {
                self.on_shorten(request, task, max_duration_ms, effects);
            }
            Input::Interactive { request, queue, ask } => {
                self.on_interactive(request, queue, ask, effects);
            }
            Input::Hangup { task, fence } => self.on_hangup(task, fence, effects),
            Input::Cancel { request, task } => self.on_cancel(request, task, effects),
            Input::Replay { request, task } => self.on_replay(request, task, effects),
            Input::Configure { request, queue, settings, version } => {
                self.on_configure(request, queue, settings, version, effects)
            }
            Input::PauseKey { request, queue, key, paused } => {
                self.on_pause_key(request, queue, key, paused, effects)
            }
            Input::Watched { task, now } => {
                self.watched.insert(task, (now, self.now));
            }
            Input::Slots { worker, slots, queues } => self.on_slots(worker, slots, queues, effects),
            Input::Report { worker, running, ended, verify } => {
                self.on_report(worker, running, ended, verify, effects);
            }
            Input::Room { enough } => self.room = enough,
            Input::Open => self.on_open(effects),
            Input::Refused { worker, task, fence } => self.on_refused(worker, task, fence, effects),
            Input::Ended { worker, task, fence, attempt, end, ending } => {
                let started = self.runs.get(&task).map_or(Millis(0), |live| live.run.started);
                let level = None;
                self.on_ended(HeldEnd { worker, task, fence, attempt, started, level, end, ending }, effects)
            }
            Input::Lost { worker } => self.on_lost(worker, effects),
            Input::Member { worker, seat, record } => self.on_member(worker, seat, record, effects),
            Input::Halt => self.halted = true,
            Input::Mark { stopped } => {
                self.batch.changes.push(Change::Stopped { stopped });
                self.after_commit(Effect::Marked { stopped }, effects);
            }
            Input::Doubt { left_ms } => self.batch.changes.push(Change::Doubt { left_ms }),
            Input::Identify { store } => self.batch.changes.push(Change::Store { id: store }),
            Input::Committed { commit } => self.on_committed(commit, effects),
            Input::Loaded { load, rows, end } => self.on_loaded(load, rows, end, effects),
            Input::TimersLoaded { load, rows, end } => self.on_timers_loaded(load, rows, end, effects),
            Input::ParkedLoaded { load, rows, end } => self.on_parked_loaded(load, rows, end, effects),
            Input::TaskLoaded { load, task } => self.on_task_loaded(load, task, effects),
            Input::LoadFailed { load } => self.on_load_failed(load),
            Input::Tick => self.on_tick(effects),
        }
        self.handle_timers(effects);
        self.dispatch(effects);
        self.bring_back(effects);
        self.ask_reads(effects);
        self.emit_wake(effects);
    }

    /// The latest that it was told of the time.
    pub(crate) fn time(&self) -> Millis {
        self.now
    }

    /// Of an owner that has this nonce beside its epoch.
    #[must_use]
    pub fn with_nonce(mut self, nonce: u64) -> Shard {
        self.nonce = if self.canary.is(Bug::FenceRepeats) { 0 } else { nonce };
        self.chance = Chance::new(nonce);
        self
    }

    /// This owner's epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// How a queue's tasks stand: what it has had, and how many run now.
    pub fn counts(&self, queue: &QueueName) -> Option<Counts> {
        let queue = &self.queues[self.names.get(queue)?.0 as usize];
        let totals = queue.record.totals;
        Some(Counts {
            scheduled: totals.scheduled,
            waiting: totals.unfinished().saturating_sub(queue.running + totals.scheduled),
            running: queue.running,
            interactive: queue.interactive,
            totals,
        })
    }

    /// Every queue, by number.
    pub fn queue_names(&self) -> impl Iterator<Item = &QueueName> {
        self.queues.iter().map(|queue| &queue.record.name)
    }

    /// The settings of a queue, and their version: 0 if nobody has chosen any. A queue that does not exist yet
    /// has some, too.
    pub fn settings(&self, queue: &QueueName) -> SettingsRecord {
        let own = self.names.get(queue).and_then(|id| self.queues[id.0 as usize].settings.clone());
        own.unwrap_or_else(|| SettingsRecord { version: 0, settings: self.defaults.clone() })
    }

    /// What counts for a queue.
    pub(crate) fn settings_of(&self, queue: QueueId) -> &Settings {
        let own = self.queues.get(queue.0 as usize).and_then(|queue| queue.settings.as_ref());
        own.map_or(&self.defaults, |record| &record.settings)
    }

    /// The settings of queues for which nobody has chosen any.
    #[must_use]
    pub fn with_defaults(mut self, defaults: Settings) -> Shard {
        self.defaults = defaults;
        for queue in (0..self.queues.len() as u32).map(QueueId) {
            self.classes_changed(queue);
            self.limits_changed(queue);
        }
        self
    }

    /// The name of a queue.
    pub fn queue_name(&self, queue: QueueId) -> Option<&QueueName> {
        self.queues.get(queue.0 as usize).map(|queue| &queue.record.name)
    }

    /// The number of a queue.
    pub fn queue_id(&self, queue: &QueueName) -> Option<QueueId> {
        self.names.get(queue).copied()
    }

    /// The first task that waits in each lane of a queue, as far as memory knows: one of them has waited
    /// longest, or nearly so.
    pub fn first_waiting(&self, queue: &QueueName) -> impl Iterator<Item = TaskId> {
        let lanes = self.names.get(queue).map(|id| self.queues[id.0 as usize].lanes.values());
        let first = |ix: &LaneIx| self.lanes[ix.0].window.waiting().first_key_value();
        lanes.into_iter().flatten().filter_map(first).map(|(_, entry)| entry.task)
    }

    /// The run of a task that is alive, if one is.
    pub fn run(&self, task: TaskId) -> Option<&Run> {
        self.runs.get(&task).map(|live| &live.run)
    }

    /// What a worker runs, as far as the shard knows.
    pub fn runs_of(&self, worker: WorkerId) -> impl Iterator<Item = &Run> {
        self.runs.values().filter(move |live| live.worker == worker).map(|live| &live.run)
    }

    /// All runs of a queue's tasks.
    pub fn runs_in(&self, queue: QueueId) -> impl Iterator<Item = &Run> {
        self.runs.values().map(|live| &live.run).filter(move |run| run.lane.queue == queue)
    }

    /// Runs of a worker that were canceled.
    pub fn canceled_runs_of(&self, worker: WorkerId) -> impl Iterator<Item = &Run> {
        self.runs.values().filter(move |live| live.worker == worker && live.cancel).map(|live| &live.run)
    }

    /// Slots that are held, and runs that are alive: always the same number.
    pub fn slots_and_runs(&self) -> (u64, u64) {
        (self.workers.values().map(|worker| u64::from(worker.busy)).sum(), self.runs.len() as u64)
    }

    /// Slots of a worker that are held.
    pub fn busy(&self, worker: WorkerId) -> u32 {
        self.workers.get(&worker).map_or(0, |worker| worker.busy)
    }

    /// How a key's tasks stand in a queue.
    pub fn key_counts(&self, queue: &QueueName, key: &Key) -> KeyCounts {
        let Some(&id) = self.names.get(queue) else {
            return KeyCounts { waiting: 0, running: 0, weight: Weight::ONE };
        };
        let aside = self.aside_runs.get(&(id, key.clone())).copied().unwrap_or(0);
        let lanes = self.queues[id.0 as usize].lanes.values();
        let shelf = |ix: &LaneIx| self.parked.get(&(self.lanes[ix.0].id, key.clone()));
        let parked = lanes.clone().filter_map(shelf).map(|parked| parked.rows).sum();
        let mut counts = KeyCounts { waiting: parked, running: aside, weight: Weight::ONE };
        for state in lanes.filter_map(|ix| self.key_state(*ix, key)) {
            counts.waiting += u64::from(state.waiting);
            counts.running += u64::from(state.rows.saturating_sub(state.waiting));
            counts.weight = state.weight;
        }
        counts
    }

    /// The keys of the tasks that go next in a queue, as far as memory knows: those of so many tasks.
    pub fn next_keys(&self, queue: &QueueName, tasks: usize) -> impl Iterator<Item = &Key> {
        let lanes = self.names.get(queue).map(|id| self.queues[id.0 as usize].lanes.values());
        let lanes = lanes.into_iter().flatten().map(|ix| &self.lanes[ix.0]);
        let keys = lanes.flat_map(|lane| {
            lane.window.waiting().values().map(|entry| &lane.places.keys().get(entry.key).key)
        });
        keys.take(tasks)
    }

    /// The part of a queue's starts that is due to a key now, from 0 to 1: its weight among those of all keys
    /// that wait in the most urgent lane where any does, for that lane goes first.
    pub fn share_due(&self, queue: &QueueName, key: &Key) -> f64 {
        let lanes = self.names.get(queue).map(|id| self.queues[id.0 as usize].lanes.values());
        let first = lanes.into_iter().flatten().find(|ix| self.lanes[ix.0].places.waiting_weights() > 0);
        let Some(&ix) = first else { return 0.0 };
        let state = self.key_state(ix, key).filter(|state| state.waiting > 0);
        let weights = self.lanes[ix.0].places.waiting_weights();
        state.map_or(0.0, |state| f64::from(state.weight.thousandths()) / weights as f64)
    }

    /// Tasks, keys and buffers that memory holds: for tests, benchmarks and metrics.
    pub fn held(&self) -> Held {
        Held {
            rows: self.lanes.iter().map(|l| l.window.waiting().len() + l.window.held()).sum::<usize>(),
            timers: self.timers.shelf.window.waiting().len() + self.timers.shelf.window.held(),
            parked: self.parked.len(),
            keys: self.lanes.iter().map(|l| l.places.keys().len()).sum(),
            alarms: self.lanes.iter().map(|l| l.places.alarms()).sum(),
            runs: self.runs.len(),
            loads: self.loads.len() + self.task_reads.len() + self.held_cancels.len() + self.reported.len(),
            payload_bytes: self.payloads.bytes,
            batches: self.sealed.len(),
        }
    }

    /// Tasks of a queue that wait for their turn.
    pub(crate) fn waiting_in(&self, id: QueueId) -> u64 {
        let queue = &self.queues[id.0 as usize];
        queue.record.totals.unfinished().saturating_sub(queue.running + queue.record.totals.scheduled)
    }

    pub(crate) fn key_state(&self, lane: LaneIx, key: &Key) -> Option<&KeyState> {
        let keys = self.lanes[lane.0].places.keys();
        keys.find(key).map(|ix| keys.get(ix))
    }

    pub(crate) fn lane_of(&self, lane: LaneId) -> Option<LaneIx> {
        self.lane_index.get(&lane).copied()
    }

    /// Nothing keeps the shard from starting tasks.
    pub(crate) fn may_start(&self) -> bool {
        self.open && !self.halted && self.unresolved.is_empty()
    }

    pub(crate) fn lane_at(&self, ix: LaneIx) -> &Lane {
        &self.lanes[ix.0]
    }

    pub(crate) fn lane_states(&self) -> impl Iterator<Item = (LaneIx, &Lane)> {
        self.lanes.iter().enumerate().map(|(n, lane)| (LaneIx(n), lane))
    }

    pub(crate) fn has_load_for_timers(&self) -> bool {
        self.loads.values().any(|what| matches!(what, LoadFor::Timers))
    }

    pub(crate) fn has_load_for(&self, lane: LaneIx) -> bool {
        self.loads.values().any(|what| matches!(what, LoadFor::Lane(ix) if *ix == lane))
    }

    /// Saved long runners that nobody has reported.
    pub(crate) fn unreported_aside(&self) -> usize {
        self.aside.len()
    }

    /// Tasks of a queue whose rows are set aside.
    pub(crate) fn aside_of(&self, queue: QueueId) -> u64 {
        let saved = self.aside.values().filter(|task| task.lane.queue == queue).count();
        let live = self.runs.values().filter(|live| live.in_lane.is_none() && live.run.lane.queue == queue);
        let live = live.filter(|live| !live.run.task.is_interactive()).count();
        (saved + live) as u64
    }

    /// The queue of this name, made if it is new.
    fn queue_named(&mut self, name: &QueueName) -> QueueId {
        if let Some(&id) = self.names.get(name) {
            return id;
        }
        let id = self.add_queue(QueueRecord {
            name: name.clone(),
            totals: Totals::default(),
            average: Average::default(),
        });
        self.dirty_queues.insert(id);
        self.flush = true;
        id
    }

    fn add_queue(&mut self, record: QueueRecord) -> QueueId {
        let id = QueueId(self.queues.len() as u32);
        self.names.insert(record.name.clone(), id);
        self.queues.push(Queue {
            record,
            settings: None,
            lanes: BTreeMap::new(),
            turns: BTreeMap::new(),
            overrides: BTreeMap::new(),
            holders: None,
            keyed: None,
            bucket: None,
            rate_armed: None,
            running: 0,
            interactive: 0,
            took: Took::default(),
            slots: 0,
            yielding: BTreeSet::new(),
            free: BTreeSet::new(),
            last_worker: WorkerId(0),
        });
        self.classes_changed(id);
        self.limits_changed(id);
        id
    }

    /// The lane of this id, made if it is new. Its queue exists.
    fn lane(&mut self, id: LaneId) -> LaneIx {
        match self.lane_index.get(&id) {
            Some(&ix) => ix,
            None => self.add_lane(id, &LaneRecord::default()),
        }
    }

    fn add_lane(&mut self, id: LaneId, record: &LaneRecord) -> LaneIx {
        let ix = LaneIx(self.lanes.len());
        self.lanes.push(Lane::restore(id, record, &self.bounds, self.seed, self.canary));
        self.lane_index.insert(id, ix);
        if let Some(queue) = self.queues.get_mut(id.queue.0 as usize) {
            queue.lanes.insert((id.priority, id.class), ix);
            queue.turns.entry(id.priority).or_default().restore(id.class, record.turn);
        }
        ix
    }

    fn arm(&mut self, at: Millis, alarm: Alarm) {
        self.alarms.insert((at, alarm));
    }

    fn on_tick(&mut self, effects: &mut Vec<Effect>) {
        if self.wake.is_some_and(|at| at <= self.now) {
            self.wake = None;
        }
        while let Some(&(at, alarm)) = self.alarms.first() {
            if at > self.now {
                break;
            }
            self.alarms.pop_first();
            match alarm {
                Alarm::ReadLane(ix) => {
                    self.lanes[ix.0].read_retry = None;
                    self.hungry.insert(ix);
                }
                Alarm::ReadTimers => self.timers.shelf.read_retry = None,
                Alarm::ReadParked => self.on_read_parked(),
                Alarm::ReadTask(task) => self.ask_task(task, effects),
                Alarm::SetAside(ix) => self.on_aside_timer(ix),
                Alarm::Forget(ix) => self.on_forget_timer(ix),
                Alarm::ForgetRequests => self.on_requests_timer(),
                Alarm::Rate(queue) => self.on_rate_alarm(queue),
                Alarm::KeyRates => self.on_key_rates_alarm(),
                Alarm::Overdue(task) => self.on_overdue(task, effects),
                Alarm::Halt(task) => self.on_halt_alarm(task, effects),
            }
        }
    }

    /// Asks to be woken for the earliest alarm or timer, if that is news.
    fn emit_wake(&mut self, effects: &mut Vec<Effect>) {
        let alarm = self.alarms.first().map(|&(at, _)| at);
        let Some(at) = alarm.into_iter().chain(self.next_timer()).min() else { return };
        if self.wake.is_none_or(|wake| at < wake) {
            debug_assert!(
                at > self.now,
                "a wake-up in the past would come again and again: {:?}",
                self.alarms.first()
            );
            self.wake = Some(at);
            effects.push(Effect::Wake { at });
        }
    }
}

/// How a queue's tasks stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Tasks that wait for a time.
    pub scheduled: u64,
    /// Tasks that wait for their turn.
    pub waiting: u64,
    /// Tasks that run, interactive ones aside.
    pub running: u64,
    /// Interactive tasks that run.
    pub interactive: u64,
    /// All it has had.
    pub totals: Totals,
}

/// How a key's tasks stand in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyCounts {
    /// Tasks that wait.
    pub waiting: u64,
    /// Tasks that run.
    pub running: u64,
    /// Its weight.
    pub weight: Weight,
}

/// What a shard holds in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Waiting rows.
    pub rows: usize,
    /// Timers.
    pub timers: usize,
    /// Keys whose rows are parked.
    pub parked: usize,
    /// Keys.
    pub keys: usize,
    /// Alarms of keys.
    pub alarms: usize,
    /// Runs.
    pub runs: usize,
    /// Reads asked of the store.
    pub loads: usize,
    /// Bytes of payloads and files.
    pub payload_bytes: usize,
    /// Commits in flight.
    pub batches: usize,
}
