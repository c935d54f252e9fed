//! The chaotic world: owners that crash or go on as zombies, a store that is slow, forgetful and out of
//! order, workers that fail, refuse and die, clients that enqueue, cancel and change weights. Everything
//! happens at a time that the seed decides; the [`Oracle`] looks on.

use std::collections::{BTreeMap, VecDeque};

use evenhand_core::backlog::{Cost, Weight};
use evenhand_core::canary::Bug;
use evenhand_core::life::End;
use evenhand_core::messages::Answer;
use evenhand_core::names::{
    Class, CommitId, Epoch, Fence, Key, Millis, Priority, QueueName, RequestId, TaskId, WorkerId,
};
use evenhand_core::{Change, Effect, Input, NewTask, Refusal, Run, Shard, check};
use evenhand_store::{Fault, Flaw, Memory, Store, StoreError, ready};

use crate::disk::Disk;
use crate::driver::SHARD;
use crate::oracle::Oracle;
use crate::plan::{Arrivals, Plan};
use crate::reads::Read;
use crate::rng::Rng;
use crate::{Canary, Report, Violation};

/// What happens at some time.
#[derive(Clone, Debug)]
enum Event {
    ClientsAct,
    ToOwner(usize, Input),
    Seal(usize),
    Apply(usize, CommitId, Vec<Change>),
    Applied(usize, CommitId, bool),
    Read(usize, Read),
    Start(usize, Epoch, WorkerId, Run),
    Stop(WorkerId, TaskId, Fence),
    Acknowledge(Epoch, WorkerId, TaskId, Fence),
    RunEnds(WorkerId, TaskId, Fence),
    Repeat(WorkerId),
    TakeOver,
    Report(usize, usize),
    Open(usize),
}

/// A process that believes it owns the shard.
#[derive(Debug)]
struct Owner {
    shard: Shard,
    alive: bool,
    unsent: VecDeque<(CommitId, Vec<Change>)>,
    in_flight: bool,
    sealing: bool,
}

/// A worker process and its successors in the same seat.
#[derive(Debug, Default)]
struct Worker {
    id: WorkerId,
    slots: u32,
    queues: Vec<(QueueName, Weight)>,
    runs: BTreeMap<TaskId, (Run, End)>,
    unacknowledged: BTreeMap<TaskId, (Run, End)>,
    epoch: Epoch,
    owner: Option<usize>,
    /// A repetition is on the agenda.
    repeating: bool,
}

/// What to play, beside the seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A deliberate bug.
    pub canary: Option<Canary>,
    /// The owner crashes at this event, whatever else goes wrong.
    pub crash_at: Option<u64>,
    /// Put a digest of every effect into the report.
    pub digest: bool,
    /// Print every event.
    pub trace: bool,
    /// Do without the core's own invariants: only the onlooker may notice.
    pub blind: bool,
    /// The shard's secret seed, on which nothing may depend.
    pub hash_seed: u64,
    /// Let the embedded store play beside the model and compare every answer.
    pub disk: bool,
}

struct World {
    rng: Rng,
    plan: Plan,
    now: u64,
    steps: u64,
    agenda: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    store: Memory,
    disk: Option<Disk>,
    /// Whether the store has room, decided beside the other dice so that these fall as they always did.
    room: (bool, Rng),
    bug: Option<Bug>,
    owners: Vec<Owner>,
    current: Option<usize>,
    workers: Vec<Worker>,
    next_worker: u64,
    next_request: u64,
    next_key: u64,
    actions_left: u64,
    tasks_seen: Vec<TaskId>,
    oracle: Oracle,
    options: Options,
    digest: u64,
}

/// Plays one seed.
pub fn play(seed: u64, options: Options) -> Result<Report, Violation> {
    let mut rng = Rng::new(seed);
    let plan = Plan::new(&mut rng);
    play_plan(seed, rng, plan, options)
}

/// Plays a plan of one's own.
pub fn play_plan(seed: u64, rng: Rng, plan: Plan, options: Options) -> Result<Report, Violation> {
    let (bug, store) = match options.canary {
        Some(Canary::Core(bug)) => (Some(bug), Memory::default()),
        Some(Canary::Store(flaw)) => (None, Memory::with_flaw(flaw)),
        None => (None, Memory::default()),
    };
    let mut world = World {
        rng,
        now: 0,
        steps: 0,
        agenda: BTreeMap::new(),
        next_event: 0,
        store,
        disk: None,
        room: (true, Rng::new(seed ^ 0x726f_6f6d)),
        bug,
        owners: Vec::new(),
        current: None,
        workers: Vec::new(),
        next_worker: 0,
        next_request: 0,
        next_key: 0,
        actions_left: plan.actions,
        plan,
        tasks_seen: Vec::new(),
        oracle: Oracle::default(),
        options,
        digest: 0xcbf2_9ce4_8422_2325,
    };
    if options.disk {
        let disk = Disk::new(seed).map_err(|what| Violation::new("chaos", seed, 0, what))?;
        world.disk = Some(disk);
    }
    if options.trace {
        println!("{:?}", world.plan);
    }
    match world.run() {
        Ok(()) => Ok(Report {
            steps: world.steps,
            simulated_ms: world.now,
            starts: world.oracle.starts,
            digest: world.digest,
            ..Report::default()
        }),
        Err(what) => Err(Violation::new("chaos", seed, world.steps, what)),
    }
}

impl World {
    fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.plan.workers {
            let worker = self.new_worker();
            self.workers.push(worker);
        }
        self.at(0, Event::TakeOver);
        self.at(1, Event::ClientsAct);
        while let Some(((time, _), event)) = self.agenda.pop_first() {
            self.now = time;
            self.steps += 1;
            if self.steps > 3_000_000 {
                return Err("the world does not come to rest".into());
            }
            if self.options.crash_at == Some(self.steps) {
                self.crash();
            }
            if self.options.trace {
                println!("chaos {} at {} ms: {event:?}", self.steps, self.now);
            }
            self.happen(event)?;
            if self.agenda.is_empty() && self.current.is_none() {
                self.at(1, Event::TakeOver);
            }
        }
        self.store.look(SHARD, |tables| self.oracle.over(tables).and_then(|()| Oracle::counts(tables)))?;
        if let Some(disk) = self.disk.take() {
            self.store.look(SHARD, |tables| disk.over(tables))?;
        }
        let Some(owner) = self.current else { return Err("nobody owns the shard".into()) };
        let held = self.owners[owner].shard.held();
        let idle = evenhand_core::shard::Held::default();
        if held == idle { Ok(()) } else { Err(format!("memory did not return to its base: {held:?}")) }
    }

    fn at(&mut self, delay: u64, event: Event) {
        self.next_event += 1;
        self.agenda.insert((self.now + delay, self.next_event), event);
    }

    fn delay(&mut self) -> u64 {
        self.rng.range(0, self.plan.delay_ms)
    }

    fn soon(&mut self, event: Event) {
        let delay = self.delay();
        self.at(delay, event);
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::ClientsAct => {
                self.room_changes();
                self.clients_act()
            }
            Event::ToOwner(owner, input) => self.step(owner, input),
            Event::Seal(owner) => self.seal(owner),
            Event::Apply(owner, commit, changes) => self.apply(owner, commit, changes),
            Event::Applied(owner, commit, true) => {
                self.owners[owner].in_flight = false;
                self.send_next(owner);
                self.step(owner, Input::Committed { commit })
            }
            Event::Applied(owner, _, false) => {
                self.drop_owner(owner);
                Ok(())
            }
            Event::Read(owner, read) => {
                let failed = self.rng.chance(self.plan.read_fault);
                let input = if failed { read.fail() } else { read.happen(&self.store) };
                if let Some(disk) = &mut self.disk
                    && !matches!(input, Input::LoadFailed { .. })
                {
                    disk.read(read, &input)?;
                }
                self.soon(Event::ToOwner(owner, input));
                Ok(())
            }
            Event::Start(owner, epoch, worker, run) => self.start(owner, epoch, worker, run),
            Event::Stop(worker, task, fence) => {
                self.stop(worker, task, fence);
                Ok(())
            }
            Event::Acknowledge(epoch, worker, task, fence) => {
                if let Some(worker) = self.workers.iter_mut().find(|w| w.id == worker && w.epoch <= epoch)
                    && worker.unacknowledged.get(&task).is_some_and(|(run, _)| run.fence == fence)
                {
                    worker.unacknowledged.remove(&task);
                }
                Ok(())
            }
            Event::RunEnds(worker, task, fence) => {
                self.run_ends(worker, task, fence);
                Ok(())
            }
            Event::Repeat(worker) => {
                self.repeat(worker);
                Ok(())
            }
            Event::TakeOver => self.take_over(),
            Event::Report(owner, worker) => self.report(owner, worker),
            Event::Open(owner) => self.step(owner, Input::Open),
        }
    }

    // --- owners ---

    fn take_over(&mut self) -> Result<(), String> {
        if self.rng.chance(self.plan.commit_fault) {
            self.store.fail_take(*self.rng.pick(&[Fault::Lost, Fault::AnswerLost]));
        }
        let before = self.store.look(SHARD, |tables| tables.epoch);
        let taken = ready(self.store.take(SHARD));
        if let Some(disk) = &mut self.disk
            && self.store.look(SHARD, |tables| tables.epoch) > before
        {
            disk.take(taken.as_ref().ok())?;
        }
        let taken = match taken {
            Ok(taken) => taken,
            Err(_) => {
                self.soon(Event::TakeOver);
                return Ok(());
            }
        };
        self.oracle.taken(taken.epoch)?;
        let bounds = self.plan.bounds.clone();
        let seed = self.options.hash_seed;
        let shard = match self.bug {
            Some(bug) => Shard::with_bug(bounds, taken.epoch, seed, taken.metadata, bug),
            None => Shard::new(bounds, taken.epoch, seed, taken.metadata),
        }?;
        let owner = self.owners.len();
        self.owners.push(Owner {
            shard,
            alive: true,
            unsent: VecDeque::new(),
            in_flight: false,
            sealing: false,
        });
        self.current = Some(owner);
        self.tell_room();
        let mut last = 0;
        for worker in 0..self.workers.len() {
            let delay = self.delay();
            last = last.max(delay);
            self.at(delay, Event::Report(owner, worker));
        }
        self.at(last + 1, Event::Open(owner));
        Ok(())
    }

    /// The disk fills up now and then, and is emptied again; it is not full for ever.
    fn room_changes(&mut self) {
        let (room, rng) = &mut self.room;
        let changed = if *room { rng.chance(20) } else { rng.chance(200) };
        if self.actions_left == 0 && !*room || self.actions_left > 0 && changed {
            *room = !*room;
            self.store.set_room(*room);
            self.tell_room();
        }
    }

    fn tell_room(&mut self) {
        if let Some(owner) = self.current {
            let enough = self.store.room().is_ok();
            self.at(1, Event::ToOwner(owner, Input::Room { enough }));
        }
    }

    /// An owner learned that it must not go on. If it was the right one, another will take over.
    fn drop_owner(&mut self, owner: usize) {
        self.owners[owner].alive = false;
        self.owners[owner].unsent.clear();
        if self.current == Some(owner) {
            self.current = None;
            self.soon(Event::TakeOver);
        }
    }

    fn crash(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.crash();
        }
        if let Some(owner) = self.current {
            self.drop_owner(owner);
        }
    }

    fn step(&mut self, owner: usize, input: Input) -> Result<(), String> {
        if !self.owners[owner].alive {
            return Ok(());
        }
        let mut effects = Vec::new();
        self.owners[owner].shard.step(Millis(self.now), input, &mut effects);
        // What a zombie believes is past; it only must not do harm.
        if self.current == Some(owner) && !self.options.blind {
            check::invariants(&self.owners[owner].shard)?;
        }
        self.perform(owner, effects)?;
        if !self.owners[owner].sealing {
            self.owners[owner].sealing = true;
            let delay = self.rng.below(3);
            self.at(delay, Event::Seal(owner));
        }
        Ok(())
    }

    fn seal(&mut self, owner: usize) -> Result<(), String> {
        self.owners[owner].sealing = false;
        if !self.owners[owner].alive {
            return Ok(());
        }
        let mut effects = Vec::new();
        self.owners[owner].shard.seal(&mut effects);
        self.perform(owner, effects)
    }

    fn perform(&mut self, owner: usize, effects: Vec<Effect>) -> Result<(), String> {
        let epoch = self.owners[owner].shard.epoch();
        for effect in effects {
            if self.options.digest {
                self.note(&effect);
            }
            match effect {
                Effect::Save { commit, changes } => {
                    self.owners[owner].unsent.push_back((commit, changes));
                    self.send_next(owner);
                }
                Effect::Load { load, lane, above, limit } => {
                    self.soon(Event::Read(owner, Read::Lane { load, lane, above, limit }));
                }
                Effect::LoadTask { load, task } => self.soon(Event::Read(owner, Read::Task { load, task })),
                Effect::Start { worker, run, .. } => self.soon(Event::Start(owner, epoch, worker, run)),
                Effect::Stop { worker, task, fence } => self.soon(Event::Stop(worker, task, fence)),
                Effect::Acknowledge { worker, task, fence } => {
                    self.soon(Event::Acknowledge(epoch, worker, task, fence))
                }
                Effect::Answer { answer: Ok(Answer::Accepted(tasks)), .. } => {
                    self.oracle.told_accepted(&tasks)?;
                    self.tasks_seen.extend(tasks);
                }
                Effect::Answer { .. } | Effect::MemberSaved { .. } | Effect::Marked { .. } => {}
                Effect::RefuseWorker { refusal, .. } => return Err(refusal.to_string()),
                Effect::Finished { task, .. } => self.oracle.told_ended(task)?,
                Effect::Wake { at } => {
                    let delay = at.0.saturating_sub(self.now);
                    self.at(delay, Event::ToOwner(owner, Input::Tick));
                }
                // A zombie may well read what its successor wrote.
                Effect::Broken { .. } if self.current != Some(owner) => self.owners[owner].alive = false,
                Effect::Broken { what } => return Err(what),
            }
        }
        Ok(())
    }

    fn note(&mut self, effect: &Effect) {
        for byte in format!("{}{effect:?}", self.now).bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    // --- the store ---

    /// One commit is on its way at a time: the next must not happen if this one does not.
    fn send_next(&mut self, owner: usize) {
        if self.owners[owner].in_flight {
            return;
        }
        if let Some((commit, changes)) = self.owners[owner].unsent.pop_front() {
            self.owners[owner].in_flight = true;
            self.soon(Event::Apply(owner, commit, changes));
        }
    }

    fn apply(&mut self, owner: usize, commit: CommitId, changes: Vec<Change>) -> Result<(), String> {
        let faulty = self.rng.chance(self.plan.commit_fault) && self.actions_left > 0;
        let fault = *self.rng.pick(&[Fault::Lost, Fault::AnswerLost, Fault::AnswerLost, Fault::Full]);
        if faulty {
            self.store.fail_commit(fault);
        }
        let epoch = self.owners[owner].shard.epoch();
        let accepts = changes.iter().any(|change| matches!(change, Change::Accepted(_)));
        let happens = self.store.look(SHARD, |tables| tables.epoch == epoch)
            && (self.room.0 || !accepts)
            && !(faulty && matches!(fault, Fault::Lost | Fault::Full));
        if happens {
            let oracle = &mut self.oracle;
            self.store.look(SHARD, |tables| oracle.applies(tables, &changes))?;
        }
        let copy = self.disk.is_some().then(|| changes.clone());
        let result = ready(self.store.commit(SHARD, epoch, changes));
        if let (Some(disk), Some(changes)) = (&mut self.disk, copy) {
            match &result {
                Err(StoreError::Fenced { .. }) => disk.commit(epoch, changes, &result)?,
                _ if happens => disk.commit(epoch, changes, &Ok(()))?,
                _ => {}
            }
        }
        self.store.look(SHARD, |tables| self.oracle.applied(tables))?;
        if self.steps.is_multiple_of(64) {
            self.store.look(SHARD, Oracle::counts)?;
        }
        match result {
            Ok(()) => self.soon(Event::Applied(owner, commit, true)),
            Err(StoreError::Corrupt { what }) => return Err(what),
            Err(StoreError::Fenced { .. } | StoreError::Unavailable { .. } | StoreError::Full { .. }) => {
                self.soon(Event::Applied(owner, commit, false));
            }
        }
        Ok(())
    }

    // --- workers ---

    fn new_worker(&mut self) -> Worker {
        self.next_worker += 1;
        let mut queues = Vec::new();
        for queue in 0..self.plan.queues {
            if queues.is_empty() || self.rng.chance(700) {
                queues.push((queue_name(queue), weight(self.rng.range(1, 3000))));
            }
        }
        // Every queue must be served by somebody.
        if self.workers.is_empty() {
            queues = (0..self.plan.queues).map(|queue| (queue_name(queue), Weight::ONE)).collect();
        }
        Worker {
            id: WorkerId(self.next_worker),
            slots: self.rng.range(1, self.plan.slots) as u32,
            queues,
            ..Worker::default()
        }
    }

    fn report(&mut self, owner: usize, worker: usize) -> Result<(), String> {
        let epoch = self.owners[owner].shard.epoch();
        let state = &mut self.workers[worker];
        if !self.owners[owner].alive || state.epoch > epoch {
            return Ok(());
        }
        state.epoch = epoch;
        state.owner = Some(owner);
        let id = state.id;
        let running = state.runs.values().map(|(run, _)| run.clone()).collect();
        let ended = state.unacknowledged.values().cloned().collect();
        let slots = Input::Slots { worker: id, slots: state.slots, queues: state.queues.clone() };
        self.step(owner, slots)?;
        self.step(owner, Input::Report { worker: id, running, ended })
    }

    fn start(&mut self, owner: usize, epoch: Epoch, id: WorkerId, run: Run) -> Result<(), String> {
        let refuse = self.rng.chance(self.plan.refusal);
        let run_ms = self.rng.range(0, self.plan.run_ms);
        let end = if !self.rng.chance(self.plan.run_fault) {
            End::Succeeded
        } else if self.rng.chance(800) {
            End::Failed
        } else {
            End::FailedForGood
        };
        let Some(worker) = self.workers.iter_mut().find(|worker| worker.id == id) else { return Ok(()) };
        // It obeys only the newest owner it knows; what an older one sent comes too late.
        if worker.epoch != epoch || worker.owner != Some(owner) {
            return Ok(());
        }
        let (task, fence) = (run.task, run.fence);
        if refuse {
            self.soon(Event::ToOwner(owner, Input::Refused { worker: id, task, fence }));
            return Ok(());
        }
        self.oracle.started(&run)?;
        worker.runs.insert(task, (run, end));
        self.at(run_ms, Event::RunEnds(id, task, fence));
        Ok(())
    }

    fn stop(&mut self, id: WorkerId, task: TaskId, fence: Fence) {
        if let Some(worker) = self.workers.iter_mut().find(|worker| worker.id == id)
            && let Some((run, end)) = worker.runs.get_mut(&task)
            && run.fence == fence
        {
            *end = End::Failed;
            self.at(1, Event::RunEnds(id, task, fence));
        }
    }

    fn run_ends(&mut self, id: WorkerId, task: TaskId, fence: Fence) {
        let Some(worker) = self.workers.iter_mut().find(|worker| worker.id == id) else { return };
        if worker.runs.get(&task).is_none_or(|(run, _)| run.fence != fence) {
            return;
        }
        if let Some(ended) = worker.runs.remove(&task) {
            worker.unacknowledged.insert(task, ended);
            self.oracle.stopped(task);
            self.say_ended(id, Some(task));
        }
    }

    /// A worker says again what ended, until it is acknowledged.
    fn repeat(&mut self, id: WorkerId) {
        if let Some(worker) = self.workers.iter_mut().find(|worker| worker.id == id) {
            worker.repeating = false;
            self.say_ended(id, None);
        }
    }

    fn say_ended(&mut self, id: WorkerId, only: Option<TaskId>) {
        let Some(worker) = self.workers.iter_mut().find(|worker| worker.id == id) else { return };
        let Some(owner) = worker.owner else { return };
        let ended =
            worker.unacknowledged.values().filter(|(run, _)| only.is_none_or(|task| task == run.task));
        let ended: Vec<_> = ended.cloned().collect();
        let again = !ended.is_empty() && !worker.repeating;
        worker.repeating |= again;
        for (run, end) in ended {
            let (task, fence, attempt) = (run.task, run.fence, run.attempt);
            self.soon(Event::ToOwner(owner, Input::Ended { worker: id, task, fence, attempt, end }));
        }
        if again {
            self.at(1_000 + 4 * self.plan.delay_ms, Event::Repeat(id));
        }
    }

    fn worker_dies(&mut self, worker: usize) {
        let successor = self.new_worker();
        let old = std::mem::replace(&mut self.workers[worker], successor);
        for task in old.runs.keys() {
            self.oracle.stopped(*task);
        }
        self.workers[worker].slots = old.slots;
        self.workers[worker].queues = old.queues;
        self.workers[worker].epoch = old.epoch;
        for owner in 0..self.owners.len() {
            if self.owners[owner].alive {
                self.soon(Event::ToOwner(owner, Input::Lost { worker: old.id }));
            }
        }
        if let Some(owner) = self.current {
            self.soon(Event::Report(owner, worker));
        }
    }

    // --- clients ---

    fn clients_act(&mut self) -> Result<(), String> {
        if self.actions_left == 0 {
            return Ok(());
        }
        self.actions_left -= 1;
        let pause = match self.plan.arrivals {
            Arrivals::Bursts => *self.rng.pick(&[0, 0, 0, 2_000]),
            Arrivals::Steady | Arrivals::Zipf | Arrivals::Giant | Arrivals::OneShot | Arrivals::Canceled => {
                self.rng.below(60)
            }
        };
        self.at(pause, Event::ClientsAct);
        if self.rng.chance(self.plan.crash) {
            self.crash();
        }
        if self.rng.chance(self.plan.zombie) && self.current.is_some() {
            self.at(0, Event::TakeOver);
        }
        if self.rng.chance(self.plan.worker_death) {
            let worker = self.rng.below(self.workers.len() as u64) as usize;
            self.worker_dies(worker);
        }
        // Most requests reach the owner; some reach one that only believes it is.
        let Some(owner) =
            (if self.rng.chance(900) { self.current } else { self.owners.len().checked_sub(2) })
        else {
            return Ok(());
        };
        self.next_request += 1;
        let request = RequestId(self.next_request);
        let input = self.request(request).map_err(|refusal| refusal.to_string())?;
        self.soon(Event::ToOwner(owner, input));
        if self.plan.arrivals == Arrivals::Canceled && self.rng.chance(300) {
            self.cancel_many(owner);
        }
        Ok(())
    }

    fn request(&mut self, request: RequestId) -> Result<Input, Refusal> {
        let queue = queue_name(self.rng.below(self.plan.queues));
        match self.rng.below(100) {
            0..=4 => {
                let key = self.key()?;
                let weight = self.rng.chance(700).then(|| weight(self.rng.range(1, 1_000_000)));
                Ok(Input::SetWeight { request, queue, key, weight })
            }
            5..=14 if !self.tasks_seen.is_empty() => {
                Ok(Input::Cancel { request, task: *self.rng.pick(&self.tasks_seen) })
            }
            _ => {
                let tasks = match self.plan.arrivals {
                    Arrivals::Steady | Arrivals::Zipf => self.rng.range(1, 4),
                    Arrivals::Bursts | Arrivals::OneShot => self.rng.range(1, 12),
                    Arrivals::Giant => self.rng.range(1, 8),
                    Arrivals::Canceled => self.rng.range(5, 40),
                };
                let tasks: Result<Vec<NewTask>, Refusal> = (0..tasks).map(|_| self.task()).collect();
                Ok(Input::Enqueue { request, queue, tasks: tasks?, once: None })
            }
        }
    }

    fn cancel_many(&mut self, owner: usize) {
        let some = self.tasks_seen.len().saturating_sub(60);
        let spare = self.rng.range(2, 10);
        let tasks: Vec<TaskId> = self.tasks_seen[some..].to_vec();
        for task in tasks {
            if task.0 % spare != 0 {
                self.next_request += 1;
                let request = RequestId(self.next_request);
                self.soon(Event::ToOwner(owner, Input::Cancel { request, task }));
            }
        }
    }

    fn key(&mut self) -> Result<Key, Refusal> {
        let n = match self.plan.arrivals {
            Arrivals::Giant if self.rng.chance(900) => 0,
            Arrivals::Zipf => self.rng.zipf(self.plan.keys),
            Arrivals::OneShot => {
                self.next_key += 1;
                self.plan.keys + self.next_key
            }
            Arrivals::Steady | Arrivals::Bursts | Arrivals::Giant | Arrivals::Canceled => {
                self.rng.below(self.plan.keys)
            }
        };
        Key::new(&format!("k{n}"))
    }

    fn task(&mut self) -> Result<NewTask, Refusal> {
        let mut task = NewTask::new(self.key()?);
        task.weight = weight(*self.rng.pick(&[1, 200, 1000, 1000, 1000, 5000, 1_000_000]));
        task.priority = Priority(self.rng.below(self.plan.priorities) as u8);
        task.class = Class(self.rng.below(self.plan.classes) as u8);
        task.cost = Cost::new(*self.rng.pick(&[1, 1000, 1000, 1000, 7000]))?;
        task.max_attempts = self.rng.range(1, 4) as u16;
        task.payload = vec![7; self.rng.below(20) as usize].into();
        Ok(task)
    }
}

fn queue_name(n: u64) -> QueueName {
    match QueueName::new(&format!("q{n}")) {
        Ok(name) => name,
        Err(refusal) => unreachable!("a plain name: {refusal}"),
    }
}

fn weight(thousandths: u64) -> Weight {
    Weight::from_thousandths(thousandths as u32).unwrap_or(Weight::ONE)
}

/// The flaws of a store that count as canaries.
pub const FLAWS: &[(Flaw, &str)] = &[
    (Flaw::UnfencedDelete, "unfenced delete"),
    (Flaw::EpochNotRaised, "shard reloaded without a new epoch"),
];
