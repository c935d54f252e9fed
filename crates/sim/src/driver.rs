//! A shell in lock step: it steps a shard, makes every commit durable at once and answers every read at
//! once, so that after each input nothing is in flight. Worlds that test order and fairness use it,
//! where delays would only blur what is expected.

use evenhand_core::backlog::Weight;
use evenhand_core::canary::Bug;
use evenhand_core::change::Settings;
use evenhand_core::life::{Backoff, End, Ending, Outcome};
use evenhand_core::messages::Answer;
use evenhand_core::names::{Fence, QueueName};
use evenhand_core::names::{Millis, RequestId, ShardId, TaskId, WorkerId};
use evenhand_core::{Bounds, Effect, Input, NewTask, Refusal, Run, Shard, check};
use evenhand_store::{Memory, Store, StoreError, ready};

use crate::reads::Read;

/// The shard that worlds with one shard use.
pub const SHARD: ShardId = ShardId(0);

/// What a driven shard did that others can see.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A run was dispatched.
    Started(WorkerId, Run),
    /// A worker was told to stop a run.
    Stopped(WorkerId, TaskId, Fence),
    /// A run has so much time now, in milliseconds from its start.
    Cut(TaskId, u64),
    /// The end of a run is durable.
    Acknowledged(WorkerId, TaskId, Fence),
    /// A request was answered.
    Answered(RequestId, Result<Answer, Refusal>),
    /// A task ended.
    Finished(TaskId, Outcome),
}

/// Settings by which nothing waits for a time: what fails is tried again at once, and ends are not remembered.
pub fn plain() -> Settings {
    let backoff = Backoff { first_ms: 0, ..Backoff::default() };
    Settings { backoff, max_lost: u8::MAX, retention_ms: 0, ..Settings::default() }
}

/// A shard and its store, in lock step.
#[derive(Debug)]
pub struct Driver {
    /// The store.
    pub store: Memory,
    /// The shard.
    pub shard: Shard,
    /// The time.
    pub now: Millis,
    /// Reads that were answered, for tests that count them.
    pub reads: u64,
    bounds: Bounds,
    bug: Option<Bug>,
    wake: Option<Millis>,
    next_request: u64,
    events: Vec<Event>,
    /// Check the invariants after each step: right for small worlds, slow for large ones.
    pub checks: bool,
}

impl Driver {
    /// Takes the shard from the store. Its gate is shut.
    pub fn take(store: Memory, bounds: Bounds, bug: Option<Bug>, now: Millis) -> Result<Driver, StoreError> {
        let taken = ready(store.take(SHARD, None))?;
        let shard = match bug {
            Some(bug) => Shard::with_bug(bounds.clone(), taken.epoch, 7, taken.metadata, bug),
            None => Shard::new(bounds.clone(), taken.epoch, 7, taken.metadata),
        };
        let shard = shard.map_err(|what| StoreError::Corrupt { what })?.with_defaults(plain());
        Ok(Driver {
            store,
            shard,
            now,
            reads: 0,
            bounds,
            bug,
            wake: None,
            next_request: 1,
            events: Vec::new(),
            checks: true,
        })
    }

    /// A new store with an open gate.
    pub fn fresh(bounds: Bounds) -> Driver {
        Driver::fresh_with(bounds, None)
    }

    /// The same with a deliberate bug.
    pub fn fresh_with(bounds: Bounds, bug: Option<Bug>) -> Driver {
        let mut driver = match Driver::take(Memory::default(), bounds, bug, Millis(0)) {
            Ok(driver) => driver,
            Err(error) => unreachable!("a new memory store can be taken: {error}"),
        };
        let opened = driver.tell(Input::Open);
        debug_assert!(opened.is_ok());
        driver
    }

    /// The owner is gone; another takes the shard. Its gate is shut.
    pub fn retake(&mut self) -> Result<(), Trouble> {
        let mut next = Driver::take(self.store.clone(), self.bounds.clone(), self.bug, self.now)?;
        next.next_request = self.next_request;
        next.reads = self.reads;
        next.checks = self.checks;
        next.events = std::mem::take(&mut self.events);
        *self = next;
        Ok(())
    }

    /// What happened since the last call.
    pub fn events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Tells the shard a fact and does what it asks until nothing is in flight. An error means that the
    /// shard must be dropped.
    pub fn tell(&mut self, input: Input) -> Result<(), Trouble> {
        let mut effects = Vec::new();
        self.shard.step(self.now, input, &mut effects);
        self.shard.seal(&mut effects);
        self.perform(effects)
    }

    fn check(&self) -> Result<(), Trouble> {
        if self.checks { check::invariants(&self.shard).map_err(Trouble::Wrong) } else { Ok(()) }
    }

    fn perform(&mut self, mut effects: Vec<Effect>) -> Result<(), Trouble> {
        while !effects.is_empty() {
            self.check()?;
            let mut inputs = Vec::new();
            for effect in effects.drain(..) {
                match effect {
                    Effect::Save { commit, changes } => {
                        ready(self.store.commit(SHARD, self.shard.epoch(), changes))?;
                        inputs.push(Input::Committed { commit });
                    }
                    Effect::Load { load, lane, above, limit } => {
                        self.reads += 1;
                        inputs.push(Read::Lane { load, lane, above, limit }.happen(&self.store));
                    }
                    Effect::LoadTimers { load, above, limit } => {
                        inputs.push(Read::Timers { load, above, limit }.happen(&self.store));
                    }
                    Effect::LoadParked { load, lane, key, above, limit } => {
                        inputs.push(Read::Parked { load, lane, key, above, limit }.happen(&self.store));
                    }
                    Effect::LoadTask { load, task } => {
                        inputs.push(Read::Task { load, task }.happen(&self.store));
                    }
                    Effect::Start { worker, run, .. } => self.events.push(Event::Started(worker, run)),
                    Effect::Stop { worker, task, fence } => {
                        self.events.push(Event::Stopped(worker, task, fence))
                    }
                    Effect::Acknowledge { worker, task, fence } => {
                        self.events.push(Event::Acknowledged(worker, task, fence))
                    }
                    Effect::Answer { request, answer } => self.events.push(Event::Answered(request, answer)),
                    Effect::Finished { task, end, .. } => {
                        self.events.push(Event::Finished(task, end.outcome))
                    }
                    Effect::RefuseWorker { refusal, .. } => return Err(Trouble::Wrong(refusal.to_string())),
                    Effect::Limit { task, limit_ms, .. } => self.events.push(Event::Cut(task, limit_ms)),
                    Effect::Warn { .. }
                    | Effect::InteractiveOver { .. }
                    | Effect::MemberSaved { .. }
                    | Effect::Marked { .. }
                    | Effect::Retried { .. }
                    | Effect::Due { .. } => {}
                    Effect::Wake { at } => self.wake = Some(at),
                    Effect::Broken { what } => return Err(Trouble::Wrong(what)),
                }
            }
            for input in inputs {
                self.shard.step(self.now, input, &mut effects);
            }
            self.shard.seal(&mut effects);
        }
        self.check()
    }

    /// Lets time pass; ticks the shard when it asked for it.
    pub fn wait(&mut self, ms: u64) -> Result<(), Trouble> {
        let until = Millis(self.now.0 + ms);
        while let Some(at) = self.wake.filter(|&at| at <= until) {
            self.now = self.now.max(at);
            self.wake = None;
            self.tell(Input::Tick)?;
        }
        self.now = until;
        Ok(())
    }

    /// Waits until the shard has no timer left.
    pub fn settle(&mut self) -> Result<(), Trouble> {
        while let Some(at) = self.wake {
            self.wait(at.0.saturating_sub(self.now.0))?;
        }
        Ok(())
    }

    /// Enqueues tasks.
    pub fn enqueue(&mut self, queue: &QueueName, tasks: Vec<NewTask>) -> Result<(), Trouble> {
        let request = self.request();
        self.tell(Input::Enqueue { request, queue: queue.clone(), tasks, once: None })
    }

    /// Ends a run.
    pub fn end(&mut self, worker: WorkerId, run: &Run, end: End) -> Result<(), Trouble> {
        let Run { task, fence, attempt, .. } = *run;
        self.tell(Input::Ended { worker, task, fence, attempt, end, ending: Ending::default() })
    }

    /// A new request's number.
    pub fn request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }
}

/// A worker offers slots for one queue.
pub fn slots_of(worker: u64, slots: u32, queue: &QueueName) -> Input {
    Input::Slots { worker: WorkerId(worker), slots, queues: vec![(queue.clone(), Weight::ONE)] }
}

/// Why a shard must be dropped.
#[derive(Clone, Debug, PartialEq)]
pub enum Trouble {
    /// The store said so: a fault, expected in a world with faults.
    Store(StoreError),
    /// The core is wrong.
    Wrong(String),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Trouble::Store(error)
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Store(error) => write!(f, "{error}"),
            Trouble::Wrong(what) => f.write_str(what),
        }
    }
}
