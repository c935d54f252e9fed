//! Workers. A seat has a process at a time, and with it a guardian on the same machine that is parent to all
//! runs: it kills them at the end of the lease, whatever has become of the process, and holds the seat's lock
//! until they are gone. The core of a worker ([`Worker`]) decides; what is here moves messages, starts and kills
//! runs, crashes, sleeps, drains and begins anew.
//!
//! Whether a run overlaps another is measured here, at the process: from the moment at which the runtime performs
//! a start until the process is really gone. A runtime performs what a step decided at once; for a real one that
//! sleeps in between, the guardian refuses a start outside of the lease, which is a start that does not happen.

use std::collections::{BTreeMap, VecDeque};

use evenhand_core::backlog::Weight;
use evenhand_core::life::End;
use evenhand_core::names::{Epoch, Fence, QueueName, Seat, TaskId};
use evenhand_core::owner::messages::Input as OwnerInput;
use evenhand_core::worker::{Down, Effect, Exit, Input, Offer, Worker};
use evenhand_core::{Run, canary};

use super::clock::{Clock, Micros, ms};
use super::network::Up;
use super::{Event, World, queue_name, weight};
use crate::{Canary, Mistake};

/// A seat, and the machine that has it or wants it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    name: Seat,
    slots: u32,
    queues: Vec<(QueueName, Weight)>,
    token: u64,
    clock: Clock,
    /// Process lives that this machine's lock file has counted.
    lives: u64,
}

/// A worker process and its guardian.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) place: usize,
    pub(super) token: u64,
    life: u64,
    clock: Clock,
    pub(super) core: Worker,
    pub(super) alive: bool,
    /// The lock is free: the process and all its runs are gone.
    released: bool,
    /// It ended because it had drained.
    drained: bool,
    pub(super) paused: bool,
    inbox: VecDeque<Fact>,
    /// Its latest wish to be woken, and that the time has come while it slept.
    wake: u64,
    due: bool,
    pub(super) link: Option<usize>,
    pub(super) dialing: bool,
    /// Its machine hears nothing, or is not heard, until then.
    pub(super) blocked_up: Micros,
    pub(super) blocked_down: Micros,
    /// When the guardian kills everything, and when it looks next.
    deadline: Option<Micros>,
    alarm: Option<Micros>,
    pub(super) runs: BTreeMap<TaskId, (Fence, End)>,
    /// When its runs began.
    began: BTreeMap<Fence, Micros>,
}

/// What a worker process is about to learn.
#[derive(Clone, Debug)]
pub(super) enum Fact {
    Down(usize, Epoch, Down),
    Over(usize),
    Ended { task: TaskId, fence: Fence, end: Option<End> },
    NotStarted { task: TaskId, fence: Fence },
    Drain,
}

impl World {
    pub(super) fn new_place(&mut self) -> Result<(), String> {
        let n = self.places.len();
        let mut queues = Vec::new();
        for queue in 0..self.plan.queues {
            // Every queue must be served by somebody.
            if n == 0 {
                queues.push((queue_name(queue), Weight::ONE));
            } else if queues.is_empty() || self.rng.chance(700) {
                queues.push((queue_name(queue), weight(self.rng.range(1, 3000))));
            }
        }
        let clock = Clock::of_worker(&mut self.rng, self.plan.drift);
        self.next_token += 1;
        self.places.push(Place {
            name: Seat::new(&format!("w{n}")).map_err(|refusal| refusal.to_string())?,
            slots: self.rng.range(1, self.plan.slots) as u32,
            queues,
            token: self.next_token,
            clock,
            lives: 0,
        });
        Ok(())
    }

    /// A process takes the lock and begins, unless another has the seat; `rival` begins anyway.
    pub(super) fn begin(&mut self, place: usize, rival: bool) -> Result<(), String> {
        let token = self.places[place].token;
        let careless = self.options.canary == Some(Canary::World(Mistake::LockNotHeld));
        let taken = |process: &Process| {
            process.place == place
                && (process.alive && !rival || process.token == token && !process.released && !careless)
        };
        if self.processes.iter().any(taken) {
            return Ok(());
        }
        let state = &mut self.places[place];
        state.lives += 1;
        let offer = Offer {
            seat: state.name.clone(),
            token,
            process: state.lives,
            slots: state.slots,
            queues: state.queues.clone(),
        };
        let core = match self.bug {
            Some(bug) => Worker::with_canary(offer, canary::Canary::new(bug)),
            None => Worker::new(offer),
        };
        let (life, clock) = (state.lives, state.clock);
        self.processes.push(Process {
            place,
            token,
            life,
            clock,
            core,
            alive: true,
            released: false,
            drained: false,
            paused: false,
            inbox: VecDeque::new(),
            wake: 0,
            due: false,
            link: None,
            dialing: false,
            blocked_up: 0,
            blocked_down: 0,
            deadline: None,
            alarm: None,
            runs: BTreeMap::new(),
            began: BTreeMap::new(),
        });
        self.dial_soon(self.processes.len() - 1);
        Ok(())
    }

    pub(super) fn dial_soon(&mut self, process: usize) {
        let state = &mut self.processes[process];
        if state.alive
            && !state.paused
            && state.link.is_none()
            && state.core.wants_session()
            && !state.dialing
        {
            state.dialing = true;
            let longest = *self.rng.pick(&[10, self.unhealthy_ms() / 2]);
            let pause = self.rng.below(ms(longest) + 1);
            self.at(pause, Event::Dial(process));
        }
    }

    /// A process learns something, now or when it continues.
    pub(super) fn tell_worker(&mut self, process: usize, fact: Fact) -> Result<(), String> {
        let state = &mut self.processes[process];
        if !state.alive {
            return Ok(());
        }
        if state.paused {
            state.inbox.push_back(fact);
            return Ok(());
        }
        self.learn(process, fact)
    }

    fn learn(&mut self, process: usize, fact: Fact) -> Result<(), String> {
        let state = &mut self.processes[process];
        match fact {
            Fact::Down(link, epoch, down) => {
                let current = state.link == Some(link);
                if !current && !self.links[link].lingers() {
                    return Ok(());
                }
                let session = self.links[link].numbered;
                self.step_worker(process, Input::Down { epoch, session, down })
            }
            Fact::Over(link) if state.link == Some(link) => {
                state.link = None;
                self.step_worker(process, Input::Disconnected)
            }
            Fact::Over(_) => Ok(()),
            Fact::Ended { task, fence, end } => self.step_worker(process, Input::Ended { task, fence, end }),
            Fact::NotStarted { task, fence } => self.step_worker(process, Input::NotStarted { task, fence }),
            Fact::Drain => self.step_worker(process, Input::Drain),
        }
    }

    pub(super) fn step_worker(&mut self, process: usize, input: Input) -> Result<(), String> {
        let state = &mut self.processes[process];
        if !state.alive {
            return Ok(());
        }
        let mut effects = Vec::new();
        state.core.step(state.clock.read(self.now), input, &mut effects);
        for effect in effects {
            if self.options.digest {
                self.note(&effect);
            }
            if self.options.trace {
                println!("    worker {process}: {effect:?}");
            }
            self.perform_for_worker(process, effect)?;
        }
        self.dial_soon(process);
        Ok(())
    }

    fn perform_for_worker(&mut self, process: usize, effect: Effect) -> Result<(), String> {
        let state = &mut self.processes[process];
        let up = match effect {
            Effect::Hello(hello) => {
                if let Some(link) = state.link {
                    self.links[link].numbered = hello.session;
                }
                Up::Hello(hello)
            }
            Effect::Beat(beat) => Up::Beat(beat),
            Effect::Ended { run: Run { task, fence, attempt, .. }, end } => {
                Up::Ended { task, fence, attempt, end }
            }
            Effect::Refuse { task, fence } => Up::Refused { task, fence },
            Effect::Offer { slots } => Up::Offer { slots },
            Effect::Start { run } => return self.start(process, &run),
            Effect::Stop { task, fence } => {
                self.stop(process, task, fence);
                return Ok(());
            }
            Effect::Limit { task, fence, limit_ms } => {
                self.cut(process, task, fence, limit_ms);
                return Ok(());
            }
            Effect::Forget { .. } => return Ok(()),
            Effect::Lease { until } => {
                state.deadline = Some(state.clock.when(until));
                self.set_alarm(process);
                return Ok(());
            }
            Effect::KillAll => {
                self.kill_all(process, self.plan.kill_ms);
                return Ok(());
            }
            Effect::Disconnect => {
                if let Some(link) = state.link.take() {
                    self.send_up(link, Up::Over);
                }
                return Ok(());
            }
            Effect::Exit(exit) => {
                state.drained = exit == Exit::Drained && state.core.is_clean();
                self.process_ends(process, self.plan.kill_ms);
                return Ok(());
            }
            Effect::Wake { at } => {
                state.wake += 1;
                let (number, at) = (state.wake, state.clock.when(at));
                self.at_time(at, Event::Wake(process, number));
                return Ok(());
            }
        };
        if let Some(link) = state.link {
            self.send_up(link, up);
        }
        Ok(())
    }

    /// The time has come that a worker wished to be woken at.
    pub(super) fn wake_worker(&mut self, process: usize, number: u64) -> Result<(), String> {
        let state = &mut self.processes[process];
        if state.wake != number {
            return Ok(()); // it has wished for another
        }
        if state.paused {
            state.due = true;
            return Ok(());
        }
        self.step_worker(process, Input::Tick)
    }

    // --- runs ---

    fn start(&mut self, process: usize, run: &Run) -> Result<(), String> {
        // A guardian that goes on refusing in good weather may need longer than a world may take to rest.
        if self.weather_left > 0 && self.rng.chance(self.plan.refusal) {
            let takes = self.rng.below(ms(self.plan.kill_ms) + 1);
            self.at(takes, Event::NotStarted(process, run.task, run.fence));
            return Ok(());
        }
        self.oracle.started(run)?;
        self.knows_what_runs()?;
        let end = if !self.rng.chance(self.plan.run_fault) {
            End::Succeeded
        } else if self.rng.chance(800) {
            End::Failed
        } else {
            End::FailedForGood
        };
        let takes = if self.long_runs_left > 0 && self.rng.chance(self.plan.long_run) {
            self.long_runs_left -= 1;
            self.rng.range(ms(self.plan.longest_lost_ms()), ms(self.plan.long_run_ms()))
        } else {
            let longest = if self.rng.chance(400) { self.plan.run_ms } else { self.plan.run_ms / 8 };
            self.rng.below(ms(longest) + 1)
        };
        let slots = self.places[self.processes[process].place].slots as usize;
        let state = &mut self.processes[process];
        state.runs.insert(run.task, (run.fence, end));
        state.began.insert(run.fence, self.now);
        if state.runs.len() > slots {
            let alive = state.runs.len();
            return Err(format!("a worker with {slots} slots has {alive} processes: {:?}", state.runs));
        }
        self.at(takes, Event::RunEnds(process, run.task, run.fence));
        if run.limit_ms > 0 {
            self.cut(process, run.task, run.fence, run.limit_ms);
        }
        Ok(())
    }

    /// A run has so much time from its start: it is stopped then.
    fn cut(&mut self, process: usize, task: TaskId, fence: Fence, limit_ms: u64) {
        if let Some(&began) = self.processes[process].began.get(&fence) {
            self.at_time(began + ms(limit_ms), Event::TimeUp(process, task, fence));
        }
    }

    /// The time of a run is over, if it still runs.
    pub(super) fn time_up(&mut self, process: usize, task: TaskId, fence: Fence) -> Result<(), String> {
        if let Some((of, end)) = self.processes[process].runs.get_mut(&task)
            && *of == fence
        {
            *end = End::TimeUp;
        }
        self.run_is_gone(process, task, fence, false)
    }

    fn stop(&mut self, process: usize, task: TaskId, fence: Fence) {
        if let Some((of, end)) = self.processes[process].runs.get_mut(&task)
            && *of == fence
        {
            *end = End::Failed;
            let grace = self.rng.below(ms(50));
            self.at(grace, Event::RunEnds(process, task, fence));
        }
    }

    /// The guardian kills everything, each run within this time.
    fn kill_all(&mut self, process: usize, within_ms: u64) {
        let runs: Vec<(TaskId, Fence)> =
            self.processes[process].runs.iter().map(|(task, (fence, _))| (*task, *fence)).collect();
        for (task, fence) in runs {
            let takes = self.rng.below(ms(within_ms) + 1);
            self.at(takes, Event::RunKilled(process, task, fence));
        }
    }

    /// Somebody sets the clock on the wall back.
    pub(super) fn set_clock_back(&mut self, process: usize, by: Micros) {
        let state = &mut self.processes[process];
        state.clock = state.clock.set_back(by);
        state.deadline = state.deadline.map(|deadline| deadline + by);
    }

    fn set_alarm(&mut self, process: usize) {
        let state = &mut self.processes[process];
        if let Some(deadline) = state.deadline
            && state.alarm.is_none_or(|alarm| deadline < alarm)
        {
            state.alarm = Some(deadline);
            self.at_time(deadline, Event::Deadline(process));
        }
    }

    /// The guardian's alarm: the lease is over, unless it has been made longer.
    pub(super) fn deadline(&mut self, process: usize) {
        let state = &mut self.processes[process];
        if state.alarm.is_some_and(|alarm| alarm <= self.now) {
            state.alarm = None;
        }
        if state.deadline.is_some_and(|deadline| deadline <= self.now) {
            state.deadline = None;
            self.kill_all(process, self.plan.kill_ms);
        }
        self.set_alarm(process);
    }

    /// The process of a run is gone, by itself or killed.
    pub(super) fn run_is_gone(
        &mut self,
        process: usize,
        task: TaskId,
        fence: Fence,
        killed: bool,
    ) -> Result<(), String> {
        let state = &mut self.processes[process];
        let Some(&(of, end)) = state.runs.get(&task) else { return Ok(()) };
        if of != fence {
            return Ok(());
        }
        state.runs.remove(&task);
        self.oracle.stopped(task);
        self.release(process);
        self.tell_worker(process, Fact::Ended { task, fence, end: (!killed).then_some(end) })
    }

    // --- life and death ---

    /// A process ends; its guardian kills its runs, and says so when they are gone.
    pub(super) fn process_ends(&mut self, process: usize, within_ms: u64) {
        let state = &mut self.processes[process];
        state.alive = false;
        state.inbox.clear();
        if let Some(link) = state.link.take() {
            self.send_up(link, Up::Over);
        }
        self.kill_all(process, within_ms);
        if self.options.canary == Some(Canary::World(Mistake::LockNotHeld)) {
            self.begin_soon(process, 20);
        }
        self.release(process);
    }

    /// If a process and its runs are gone, its lock is free and its guardian may say so.
    fn release(&mut self, process: usize) {
        let state = &mut self.processes[process];
        if state.alive || state.released || !state.runs.is_empty() {
            return;
        }
        state.released = true;
        if self.rng.chance(700) {
            let late = self.rng.below(ms(self.lost_ms() / 2) + 1);
            self.at(late, Event::Dead(process));
        }
        self.begin_soon(process, self.lost_ms());
    }

    fn begin_soon(&mut self, process: usize, within_ms: u64) {
        let pause = self.rng.below(ms(within_ms) + 1);
        self.at(pause, Event::Begin(self.processes[process].place, false));
    }

    /// A guardian says to whom it takes for the server that a process life is over.
    pub(super) fn say_dead(&mut self, process: usize) -> Result<(), String> {
        let state = &self.processes[process];
        if state.blocked_up > self.now {
            self.at_time(state.blocked_up, Event::Dead(process));
            return Ok(());
        }
        let seat = self.places[state.place].name.clone();
        let dead = OwnerInput::Dead { seat, token: state.token, process: state.life, drained: state.drained };
        match self.current {
            Some(owner) => self.tell_owner(owner, dead),
            None => Ok(()),
        }
    }

    /// A machine is gone with all that ran on it. Nothing is said; another one wants its seat.
    pub(super) fn machine_is_lost(&mut self, process: usize) {
        let state = &mut self.processes[process];
        state.alive = false;
        state.released = true;
        state.inbox.clear();
        let place = state.place;
        for task in std::mem::take(&mut state.runs).into_keys() {
            self.oracle.stopped(task);
        }
        if let Some(link) = state.link.take() {
            self.silence(link);
        }
        self.another_machine(place, false);
    }

    /// Another machine wants a seat, perhaps while the one that has it is well.
    pub(super) fn another_machine(&mut self, place: usize, rival: bool) {
        self.next_token += 1;
        let clock = Clock::of_worker(&mut self.rng, self.plan.drift);
        let token = self.next_token;
        let state = &mut self.places[place];
        (state.token, state.clock, state.lives) = (token, clock, 0);
        let pause = self.rng.below(ms(2 * self.lost_ms()));
        self.at(pause, Event::Begin(place, rival));
    }

    /// A process that was stopped goes on: with what waits in its sockets, or with its timers.
    pub(super) fn continue_worker(&mut self, process: usize) -> Result<(), String> {
        if !std::mem::replace(&mut self.processes[process].paused, false) {
            return Ok(());
        }
        if self.rng.chance(300) && std::mem::replace(&mut self.processes[process].due, false) {
            self.step_worker(process, Input::Tick)?;
        }
        while let Some(fact) = self.processes[process].inbox.pop_front() {
            self.learn(process, fact)?;
        }
        if std::mem::replace(&mut self.processes[process].due, false) {
            self.step_worker(process, Input::Tick)?;
        }
        self.dial_soon(process);
        Ok(())
    }

    /// Why the workers have not come to rest, if they have not.
    pub(super) fn busy_workers(&self) -> Option<String> {
        for place in 0..self.places.len() {
            let name = &self.places[place].name;
            let alive = || self.processes.iter().filter(|process| process.place == place && process.alive);
            match alive().count() {
                0 => return Some(format!("nobody is in seat {name}")),
                1 => {}
                n => return Some(format!("{n} processes want seat {name}")),
            }
            for process in alive() {
                if !process.core.is_in() {
                    return Some(format!("{name} is not let in"));
                }
                let (running, ended) = (process.core.running().count(), process.core.unacknowledged());
                if running > 0 || ended > 0 {
                    return Some(format!(
                        "{name} runs {running} tasks, and {ended} ends are not acknowledged"
                    ));
                }
            }
        }
        None
    }

    /// Whether a saved worker is one that lives.
    pub(super) fn lives(&self, seat: &Seat, token: u64, life: evenhand_core::names::Life) -> bool {
        self.processes.iter().any(|process| {
            process.alive
                && self.places[process.place].name == *seat
                && process.token == token
                && process.core.life() == life
        })
    }
}
