//! The chaotic world: owners that crash, stop or go on as zombies, a store that is slow, forgetful and out of
//! order, workers that fail, sleep, are cut off and die, a network that holds back and breaks, clocks that
//! differ, clients that enqueue, cancel and change weights. Everything happens at a time that the seed decides;
//! the [`Oracle`] looks on.
//!
//! Here are the agenda and the loop. What is on it belongs to `owners` (servers and the shard), `storage`,
//! `network` (connections), `workers` (processes, guardians, runs), `clients` and `weather` (what goes wrong);
//! `clock` tells what time each of them believes it is.

mod clients;
mod clock;
mod network;
mod owners;
mod storage;
mod weather;
mod workers;

use std::collections::BTreeMap;

use evenhand_core::backlog::Weight;
use evenhand_core::canary::Bug;
use evenhand_core::messages::Input;
use evenhand_core::names::{CommitId, Epoch, Fence, QueueName, RequestId, RequestKey, TaskId};
use evenhand_core::owner::health::Thresholds;
use evenhand_core::owner::messages::Input as OwnerInput;
use evenhand_core::worker::Down;
use evenhand_core::{Change, bounds};
use evenhand_store::{Flaw, Memory, Tables};

use crate::disk::Disk;
use crate::driver::SHARD;
use crate::oracle::Oracle;
use crate::plan::Plan;
use crate::reads::Read;
use crate::rng::Rng;
use crate::{Canary, Mistake, Report, Violation};
use clients::Named;
use clock::{Micros, ms};
use network::{Link, Said, Up, Way};
use owners::{OwnerState, Server};
use workers::{Fact, Place, Process};

/// Long runs in a world: enough to meet everything that goes wrong, few enough that it ends.
const LONG_RUNS: u64 = 12;

/// What happens at some time.
#[derive(Clone, Debug)]
enum Event {
    ClientsAct,
    Weather,
    /// All tasks should have ended by now, or it is time to look again.
    Look,

    ToOwner(usize, Input),
    WakeOwner(usize, u64),
    ContinueOwner(usize),
    Crash(usize),
    TakeOver(Option<Server>),
    Seal(usize),
    Apply(usize, CommitId, Vec<Change>),
    Applied(usize, CommitId, bool),
    Read(usize, Read),

    Dial(usize),
    Up(usize, Up),
    Down(usize, Said),
    Late(usize, Epoch, Down),
    Broken(usize, Way),
    Block(usize, Way, Micros),
    Partition(usize, Micros),

    Begin(usize, bool),
    Wake(usize, u64),
    Continue(usize),
    Deadline(usize),
    Dead(usize),
    NotStarted(usize, TaskId, Fence),
    RunEnds(usize, TaskId, Fence),
    TimeUp(usize, TaskId, Fence),
    RunKilled(usize, TaskId, Fence),
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
    now: Micros,
    steps: u64,
    agenda: BTreeMap<(Micros, u64), Event>,
    next_event: u64,
    store: Memory,
    disk: Option<Disk>,
    /// Whether the store has room, decided beside the other dice so that these fall as they always did.
    room: (bool, Rng),
    bug: Option<Bug>,
    owners: Vec<OwnerState>,
    current: Option<usize>,
    /// What the newest owner's workers are told.
    thresholds: Thresholds,
    links: Vec<Link>,
    places: Vec<Place>,
    processes: Vec<Process>,
    next_token: u64,
    next_request: u64,
    next_key: u64,
    actions_left: u64,
    weather_left: u64,
    long_runs_left: u64,
    /// A partition that is not healed before its time.
    stubborn_until: Micros,
    /// Nothing goes wrong any more, and nothing new is asked for.
    calm: bool,
    /// When everything must have come to rest.
    rest_by: Micros,
    tasks_seen: Vec<TaskId>,
    named: Vec<Named>,
    keys_of_requests: BTreeMap<RequestId, RequestKey>,
    cancels: BTreeMap<RequestId, TaskId>,
    /// Unique keys that tasks have had, with their queues.
    uniques: Vec<(QueueName, RequestKey)>,
    oracle: Oracle,
    /// An old copy of the store, and the onlooker's notes of then. No task has been accepted since.
    copy: Option<(Tables, Oracle)>,
    /// An epoch of which the store knows nothing, as a worker has shown.
    shown: Option<Epoch>,
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
        Some(Canary::World(_)) | None => (None, Memory::default()),
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
        thresholds: plan.thresholds[0],
        links: Vec::new(),
        places: Vec::new(),
        processes: Vec::new(),
        next_token: 0,
        next_request: 0,
        next_key: 0,
        actions_left: plan.actions,
        weather_left: plan.weather,
        long_runs_left: LONG_RUNS,
        stubborn_until: 0,
        calm: false,
        rest_by: Micros::MAX,
        plan,
        tasks_seen: Vec::new(),
        named: Vec::new(),
        keys_of_requests: BTreeMap::new(),
        cancels: BTreeMap::new(),
        uniques: Vec::new(),
        oracle: Oracle::default(),
        copy: None,
        shown: None,
        options,
        digest: 0xcbf2_9ce4_8422_2325,
    };
    if world.plan.rates.set_back > 0 {
        // Nobody lives by a time that the copy does not know.
        world.plan.thresholds[1] = world.plan.thresholds[0];
    }
    if options.disk {
        world.plan.rates.set_back = 0;
        world.plan.doubtful = false;
        let disk = Disk::new(seed).map_err(|what| Violation::new("chaos", seed, 0, what))?;
        world.disk = Some(disk);
    }
    if options.trace {
        println!("{:?}", world.plan);
    }
    match world.run() {
        Ok(()) => Ok(Report {
            steps: world.steps,
            simulated_ms: world.now / ms(1),
            starts: world.oracle.starts,
            digest: world.digest,
            ..Report::default()
        }),
        Err(what) => Err(Violation::new("chaos", seed, world.steps, what)),
    }
}

impl World {
    fn run(&mut self) -> Result<(), String> {
        for place in 0..self.plan.workers as usize {
            self.new_place()?;
            let pause = self.rng.below(ms(self.plan.span_ms / 8) + 1);
            self.at(pause, Event::Begin(place, false));
        }
        self.at(0, Event::TakeOver(None));
        self.at(1, Event::ClientsAct);
        self.at(1, Event::Weather);
        self.at(ms(self.plan.span_ms), Event::Look);
        while let Some(((time, _), event)) = self.agenda.pop_first() {
            self.now = time;
            self.steps += 1;
            if self.steps > 1_000_000 {
                return Err("it goes in circles".into());
            }
            if self.options.crash_at == Some(self.steps) {
                self.crash();
            }
            if self.options.trace {
                println!("chaos {} at {}.{:03} ms: {event:?}", self.steps, time / 1_000, time % 1_000);
            }
            if !matches!(event, Event::Look) {
                self.happen(event)?;
            } else if self.look()? {
                break;
            }
        }
        self.store.look(SHARD, |tables| self.oracle.over(tables).and_then(|()| Oracle::counts(tables)))?;
        match self.disk.take() {
            Some(disk) => self.store.look(SHARD, |tables| disk.over(tables)),
            None => Ok(()),
        }
    }

    /// True when everything has come to rest. Once nothing goes wrong any more, that must be so in time.
    fn look(&mut self) -> Result<bool, String> {
        self.at(ms(100), Event::Look);
        if self.actions_left > 0 || self.weather_left > 0 || self.stubborn_until > self.now {
            return Ok(false);
        }
        if !std::mem::replace(&mut self.calm, true) {
            self.clear_up()?;
            let tasks = self.store.look(SHARD, |tables| tables.tasks.len()) as u64;
            // Each may take all its attempts, one after the other; then absent workers are given up, and ends
            // that got lost are said again.
            let runs = 4 * (tasks + 50) * (self.plan.run_ms + 4 * (self.plan.delay_ms + self.plan.net_ms));
            let waits = (LONG_RUNS + 4) * self.plan.long_run_ms() + 10 * self.plan.longest_wait_ms();
            self.rest_by = self.now + ms(20 * bounds::SAY_AGAIN_MS + runs + waits);
        }
        self.resume_queues()?;
        let Some(busy) = self.busy() else { return Ok(true) };
        if self.now < self.rest_by { Ok(false) } else { Err(format!("it does not come to rest: {busy}")) }
    }

    /// Why the world has not come to rest, if it has not.
    fn busy(&self) -> Option<String> {
        let tasks = self.store.look(SHARD, |tables| self.oracle.over(tables)).err();
        tasks.or_else(|| self.busy_owner()).or_else(|| self.busy_workers()).or_else(|| {
            self.store.look(SHARD, |tables| {
                let mut members = tables.members.iter();
                let gone = members.find(|(seat, record)| !self.lives(seat, record.token, record.life))?;
                Some(format!("{} is saved, and is not waited for: {:?}", gone.0, gone.1))
            })
        })
    }

    fn at_time(&mut self, time: Micros, event: Event) {
        self.next_event += 1;
        self.agenda.insert((time.max(self.now), self.next_event), event);
    }

    fn at(&mut self, delay: Micros, event: Event) {
        self.at_time(self.now + delay, event);
    }

    /// As soon as the store, or a caller's network, lets it.
    fn soon(&mut self, event: Event) {
        let delay = self.rng.below(ms(self.plan.delay_ms) + 1);
        self.at(delay, event);
    }

    fn unhealthy_ms(&self) -> u64 {
        self.thresholds.unhealthy_after_ms
    }

    fn lost_ms(&self) -> u64 {
        self.thresholds.lost_after_ms
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::ClientsAct => {
                self.room_changes();
                self.clients_act()
            }
            Event::Weather => self.weather(),
            Event::Look => Ok(()),

            Event::ToOwner(owner, input) => self.tell_owner(owner, OwnerInput::Shard(input)),
            Event::WakeOwner(owner, number) => self.wake_owner(owner, number),
            Event::ContinueOwner(owner) => self.continue_owner(owner),
            Event::Crash(owner) => {
                if self.current == Some(owner) {
                    self.crash();
                }
                Ok(())
            }
            Event::TakeOver(server) => self.take_over(server),
            Event::Seal(owner) => self.seal(owner),
            Event::Apply(owner, commit, changes) => self.apply(owner, commit, changes),
            Event::Applied(owner, commit, happened) => self.applied(owner, commit, happened),
            Event::Read(owner, read) => self.read(owner, read),

            Event::Dial(process) => self.dial(process),
            Event::Up(link, up) => self.arrive_up(link, up),
            Event::Down(link, said) => self.arrive_down(link, said),
            Event::Late(link, epoch, down) => {
                self.tell_worker(self.links[link].process, Fact::Down(link, epoch, down))
            }
            Event::Broken(link, way) => self.learn_broken(link, way),
            Event::Block(process, way, lasts) => {
                self.block(process, way, lasts);
                Ok(())
            }
            Event::Partition(process, lasts) => {
                self.cut_off_for_long(process, lasts);
                Ok(())
            }

            Event::Begin(place, rival) => self.begin(place, rival),
            Event::Wake(process, number) => self.wake_worker(process, number),
            Event::Continue(process) => self.continue_worker(process),
            Event::Deadline(process) => {
                self.deadline(process);
                Ok(())
            }
            Event::Dead(process) => self.say_dead(process),
            Event::NotStarted(process, task, fence) => {
                self.tell_worker(process, Fact::NotStarted { task, fence })
            }
            Event::RunEnds(process, task, fence) => self.run_is_gone(process, task, fence, false),
            Event::TimeUp(process, task, fence) => self.time_up(process, task, fence),
            Event::RunKilled(process, task, fence) => self.run_is_gone(process, task, fence, true),
        }
    }

    fn note(&mut self, effect: &impl std::fmt::Debug) {
        for byte in format!("{}{effect:?}", self.now).bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
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

/// The mistakes of those around core and store that count as canaries.
pub const MISTAKES: &[(Mistake, &str)] = &[
    (Mistake::LockNotHeld, "lock taken as proof of death while runs are alive"),
    (Mistake::WallClock, "wall clock used for health"),
];
