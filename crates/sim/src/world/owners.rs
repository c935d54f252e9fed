//! Owners. A server takes the shard and steps its owner until it crashes, is stopped, or learns that a commit
//! failed; then it, or another server, takes the shard again. Sometimes another takes it while the first goes on,
//! as a zombie. A server that is paused hears nothing: what arrives waits for it.

use std::collections::{BTreeMap, VecDeque};

use evenhand_core::messages::{self, Answer};
use evenhand_core::names::{CommitId, Fence, Millis, SessionId, StoreId, TaskId, WorkerId};
use evenhand_core::owner::messages::{Effect, Input};
use evenhand_core::owner::{Identity, Owner, Settings};
use evenhand_core::timers::due_at;
use evenhand_core::worker::Down;
use evenhand_core::{Change, Run, canary, check};
use evenhand_store::{Fault, Store, Tables, ready};

use super::clock::{Clock, Micros, ms};
use super::network::Said;
use super::{Event, World};
use crate::driver::SHARD;
use crate::reads::Read;

/// A server process: what stays when it drops its owner and takes the shard again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Server {
    clock: Clock,
    /// Which of the plan's thresholds it was started with.
    thresholds: usize,
}

/// A process that believes it owns the shard.
#[derive(Debug)]
pub(super) struct OwnerState {
    pub(super) core: Owner,
    server: Server,
    pub(super) alive: bool,
    pub(super) paused: bool,
    inbox: VecDeque<Fact>,
    /// The session of each worker's latest welcome.
    routes: BTreeMap<WorkerId, usize>,
    wake: u64,
    due: bool,
    pub(super) unsent: VecDeque<(CommitId, Vec<Change>)>,
    pub(super) in_flight: bool,
    sealing: bool,
}

impl OwnerState {
    /// What its clock shows.
    pub(super) fn clock(&self, now: Micros) -> Millis {
        self.server.clock.read(now)
    }
}

/// What an owner's server is about to learn.
#[derive(Clone, Debug)]
enum Fact {
    Input(Input),
    Applied(CommitId, bool),
}

impl World {
    /// Somebody takes the shard: a new server, or one that has dropped its owner.
    pub(super) fn take_over(&mut self, server: Option<Server>) -> Result<(), String> {
        if !self.calm && self.rng.chance(self.plan.rates.commit) {
            self.store.fail_take(*self.rng.pick(&[Fault::Lost, Fault::AnswerLost]));
        }
        let before = self.store.look(SHARD, |tables| tables.epoch);
        if self.plan.doubtful {
            self.store.set_back(
                SHARD,
                self.store.look(SHARD, |now| Tables { doubt: Some(u64::MAX), ..now.clone() }),
            );
        }
        let taken = ready(self.store.take(SHARD, self.shown));
        if let Some(disk) = &mut self.disk
            && self.store.look(SHARD, |tables| tables.epoch) > before
        {
            disk.take(taken.as_ref().ok())?;
        }
        let taken = match taken {
            Ok(taken) => taken,
            Err(_) => {
                self.soon(Event::TakeOver(server));
                return Ok(());
            }
        };
        self.shown = None;
        self.oracle.taken(taken.epoch)?;
        if let Some(zombie) = self.current {
            self.cut_off(zombie);
        }
        let server = match server {
            Some(server) => server,
            None => Server {
                clock: Clock::of_server(&mut self.rng, self.plan.drift),
                thresholds: usize::from(self.rng.chance(500)),
            },
        };
        self.thresholds = self.plan.thresholds[server.thresholds];
        let settings = Settings {
            bounds: self.plan.bounds.clone(),
            thresholds: self.thresholds,
            absence_ms: self.plan.absence_ms,
            queue: self.plan.queue.clone(),
        };
        let identity = Identity {
            epoch: taken.epoch,
            seed: self.options.hash_seed,
            store: StoreId(taken.epoch.0 + 7),
            nonce: self.owners.len() as u64,
        };
        let canary = self.bug.map_or_else(canary::Canary::default, canary::Canary::new);
        let mut effects = Vec::new();
        // Its time does not begin before what has been done is over, even if its clock was set back.
        let server =
            Server { clock: server.clock.at_least(self.now, due_at(taken.metadata.timers.ack)), ..server };
        let now = server.clock.read(self.now);
        let core = Owner::with_canary(now, settings, identity, taken.metadata, canary, &mut effects)?;
        let owner = self.owners.len();
        self.owners.push(OwnerState {
            core,
            server,
            alive: true,
            paused: false,
            inbox: VecDeque::new(),
            routes: BTreeMap::new(),
            wake: 0,
            due: false,
            unsent: VecDeque::new(),
            in_flight: false,
            sealing: false,
        });
        self.current = Some(owner);
        self.perform(owner, effects)?;
        self.seal_soon(owner);
        self.tell_room();
        Ok(())
    }

    pub(super) fn tell_room(&mut self) {
        if let Some(owner) = self.current {
            let room = messages::Input::Room { enough: self.store.room().is_ok() };
            self.at(ms(1), Event::ToOwner(owner, room));
        }
    }

    /// An owner learned that it must not go on. If it was the right one, its server drops it, closes all
    /// connections and takes the shard again.
    fn drop_owner(&mut self, owner: usize) {
        self.owners[owner].alive = false;
        self.owners[owner].unsent.clear();
        if self.current == Some(owner) {
            self.current = None;
            self.hang_up_all(owner);
            self.soon(Event::TakeOver(Some(self.owners[owner].server)));
        }
    }

    /// The store is copied; or it is set back to the copy, while no server is there.
    pub(super) fn set_back(&mut self) {
        let Some((tables, oracle)) = self.copy.take() else {
            self.copy = Some((self.store.look(SHARD, Clone::clone), self.oracle.clone()));
            return;
        };
        self.crash();
        // Nobody is left who would write to it.
        for owner in &mut self.owners {
            owner.alive = false;
            owner.unsent.clear();
        }
        self.agenda.retain(|_, event| !matches!(event, Event::Apply(..)));
        self.store.set_back(SHARD, Tables { doubt: Some(u64::MAX), ..tables });
        self.oracle.set_back(oracle);
    }

    /// The server dies, and another is started after a while.
    pub(super) fn crash(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.crash();
        }
        let Some(owner) = self.current.take() else { return };
        self.owners[owner].alive = false;
        self.owners[owner].unsent.clear();
        self.cut_off(owner);
        let (lost, lease) = (ms(self.lost_ms()), ms(self.thresholds.lease_ms()));
        let soon = ms(self.plan.delay_ms) + 1;
        let pause = match self.rng.below(5) {
            0..2 => self.rng.below(soon),
            2 => self.rng.below(lost / 4),
            3 => self.rng.below(lost),
            _ => lease - lease / 16 + self.rng.below(lease / 8), // just when the workers' leases end
        };
        self.at(pause, Event::TakeOver(None));
    }

    /// A server has stopped in good order. What it said last may get lost.
    fn stopped(&mut self, owner: usize) {
        self.owners[owner].alive = false;
        self.owners[owner].unsent.clear();
        if self.current != Some(owner) {
            return;
        }
        self.current = None;
        self.murphy_at_stop(owner);
        if self.rng.chance(300) {
            self.cut_off(owner);
        } else {
            self.hang_up_all(owner);
        }
        let absence = self.plan.absence_ms;
        let soon = self.plan.delay_ms;
        let away = *self.rng.pick(&[soon, soon, absence / 8, absence + absence / 8]);
        let pause = self.rng.below(ms(away) + 1);
        self.at(pause, Event::TakeOver(None));
    }

    /// Something reaches an owner, now or when its server continues.
    pub(super) fn tell_owner(&mut self, owner: usize, input: Input) -> Result<(), String> {
        self.tell(owner, Fact::Input(input))
    }

    /// A commit's outcome reaches its owner.
    pub(super) fn applied(&mut self, owner: usize, commit: CommitId, happened: bool) -> Result<(), String> {
        self.tell(owner, Fact::Applied(commit, happened))
    }

    fn tell(&mut self, owner: usize, fact: Fact) -> Result<(), String> {
        let state = &mut self.owners[owner];
        if !state.alive {
            return Ok(());
        }
        if state.paused {
            state.inbox.push_back(fact);
            return Ok(());
        }
        match fact {
            Fact::Input(input) => self.step(owner, input),
            Fact::Applied(commit, true) => {
                state.in_flight = false;
                self.send_next(owner);
                self.step(owner, Input::Shard(messages::Input::Committed { commit }))
            }
            Fact::Applied(_, false) => {
                self.drop_owner(owner);
                Ok(())
            }
        }
    }

    /// The time has come that an owner wished to be woken at.
    pub(super) fn wake_owner(&mut self, owner: usize, number: u64) -> Result<(), String> {
        let state = &mut self.owners[owner];
        if state.wake != number || !state.alive {
            return Ok(());
        }
        if state.paused {
            state.due = true;
            return Ok(());
        }
        self.step(owner, Input::Tick)
    }

    /// A server that was stopped goes on: with what waits in its sockets, or with its timers.
    pub(super) fn continue_owner(&mut self, owner: usize) -> Result<(), String> {
        if !std::mem::replace(&mut self.owners[owner].paused, false) {
            return Ok(());
        }
        if self.rng.chance(500) && std::mem::replace(&mut self.owners[owner].due, false) {
            self.tell_owner(owner, Input::Tick)?;
        }
        for fact in std::mem::take(&mut self.owners[owner].inbox) {
            self.tell(owner, fact)?;
        }
        if std::mem::replace(&mut self.owners[owner].due, false) {
            self.tell_owner(owner, Input::Tick)?;
        }
        if std::mem::replace(&mut self.owners[owner].sealing, false) {
            self.seal_soon(owner);
        }
        Ok(())
    }

    fn step(&mut self, owner: usize, input: Input) -> Result<(), String> {
        let state = &mut self.owners[owner];
        let mut effects = Vec::new();
        let asked = if let Input::Shard(messages::Input::Interactive { request, .. }) = &input {
            Some(*request)
        } else {
            None
        };
        if let Input::Refused { task, .. } = &input {
            self.oracle.not_started(*task);
        }
        state.core.step(state.server.clock.read(self.now), input, &mut effects);
        if let Some(asked) = asked {
            let is_answer = |effect: &Effect| matches!(effect, Effect::Shard(messages::Effect::Answer { request, .. }) if *request == asked);
            if !effects.iter().any(is_answer) {
                return Err("an interactive request was not answered at once".into());
            }
        }
        // What a zombie believes is past; it only must not do harm.
        if self.current == Some(owner) && !self.options.blind {
            check::owner(&state.core)?;
        }
        self.perform(owner, effects)?;
        self.seal_soon(owner);
        self.knows_what_runs()
    }

    /// An owner whose gate is open knows every run that is alive: it starts whatever it does not know.
    pub(super) fn knows_what_runs(&self) -> Result<(), String> {
        let Some(owner) = self.current.map(|owner| &self.owners[owner].core) else { return Ok(()) };
        let unknown =
            |task: TaskId, fence: Fence| owner.shard().run(task).is_none_or(|run| run.fence != fence);
        // One that is halted counts no more while it is being killed.
        let counts = |task: TaskId| !task.is_interactive();
        match self.oracle.alive().iter().find(|&(&task, &fence)| counts(task) && unknown(task, fence)) {
            Some((task, fence)) if owner.gate().open => {
                Err(format!("task {task} runs as {fence:?}, and the owner takes it for dead"))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn seal_soon(&mut self, owner: usize) {
        if self.owners[owner].alive && !std::mem::replace(&mut self.owners[owner].sealing, true) {
            let delay = self.rng.below(ms(2) + 1);
            self.at(delay, Event::Seal(owner));
        }
    }

    pub(super) fn seal(&mut self, owner: usize) -> Result<(), String> {
        if !self.owners[owner].alive || self.owners[owner].paused {
            return Ok(()); // a paused one does it when it continues
        }
        self.owners[owner].sealing = false;
        let mut effects = Vec::new();
        self.owners[owner].core.seal(&mut effects);
        self.perform(owner, effects)
    }

    fn perform(&mut self, owner: usize, effects: Vec<Effect>) -> Result<(), String> {
        for effect in effects {
            if self.options.digest {
                self.note(&effect);
            }
            if self.options.trace {
                println!("    owner {owner}: {effect:?}");
            }
            match effect {
                Effect::Shard(effect) => self.perform_for_shard(owner, effect)?,
                Effect::Welcome { session, worker, store, nonce, thresholds, set } => {
                    self.owners[owner].routes.insert(worker, session.0 as usize);
                    self.say(owner, session, Down::Welcome { store, nonce, thresholds, set });
                }
                Effect::Refuse { session, then, .. } => {
                    self.say(owner, session, Down::Die { then });
                    self.hang_up(session.0 as usize);
                }
                Effect::Answer { session, number, set } => {
                    self.say(owner, session, Down::Answer { number, set })
                }
                Effect::Absence { session, ms } => self.say(owner, session, Down::Absence { ms }),
                Effect::Drain { session } => self.say(owner, session, Down::Drain),
                Effect::Doubt { shown } => {
                    // A zombie learns that it is one.
                    if self.current == Some(owner) {
                        self.shown = Some(shown);
                    }
                    self.drop_owner(owner);
                }
                Effect::Stopped => self.stopped(owner),
                Effect::Note(_) => {}
            }
        }
        Ok(())
    }

    fn say(&mut self, owner: usize, session: SessionId, down: Down) {
        let epoch = self.owners[owner].core.shard().epoch();
        self.send_down(session.0 as usize, Said::Down(epoch, down));
    }

    /// Says something to a worker, in the session of its latest welcome.
    fn say_to(&mut self, owner: usize, worker: WorkerId, down: Down) {
        if let Some(&link) = self.owners[owner].routes.get(&worker) {
            self.say(owner, SessionId(link as u64), down);
        }
    }

    fn perform_for_shard(&mut self, owner: usize, effect: messages::Effect) -> Result<(), String> {
        use messages::Effect;
        match effect {
            Effect::Save { commit, changes } => {
                self.owners[owner].unsent.push_back((commit, changes));
                self.send_next(owner);
            }
            Effect::Load { load, lane, above, limit } => {
                self.soon(Event::Read(owner, Read::Lane { load, lane, above, limit }));
            }
            Effect::LoadTimers { load, above, limit } => {
                self.soon(Event::Read(owner, Read::Timers { load, above, limit }));
            }
            Effect::LoadParked { load, lane, key, above, limit } => {
                self.soon(Event::Read(owner, Read::Parked { load, lane, key, above, limit }));
            }
            Effect::LoadTask { load, task } => self.soon(Event::Read(owner, Read::Task { load, task })),
            Effect::Start { worker, run, .. } => {
                let now = self.owners[owner].server.clock.read(self.now);
                self.oracle.dispatched(&run, now)?;
                self.admitted(owner, &run)?;
                if let Some(&link) = self.owners[owner].routes.get(&worker) {
                    self.murphy_at_start(self.links[link].process);
                }
                if let Some(&link) = self.owners[owner].routes.get(&worker) {
                    self.links[link].starts += 1;
                    let number = self.links[link].starts;
                    self.say_to(owner, worker, Down::Start { number, run });
                }
            }
            Effect::Stop { worker, task, fence } => self.say_to(owner, worker, Down::Stop { task, fence }),
            Effect::Acknowledge { worker, task, fence } if task.is_interactive() => {
                self.say_to(owner, worker, Down::Acknowledge { task, fence });
            }
            Effect::Acknowledge { worker, task, fence } => {
                self.store.look(SHARD, |tables| self.oracle.acknowledged(tables, task, fence))?;
                self.say_to(owner, worker, Down::Acknowledge { task, fence });
            }
            Effect::Answer { request, answer: Ok(Answer::Accepted(tasks)) } => {
                let tasks: Vec<TaskId> = tasks.into_iter().map(|(task, _)| task).collect();
                self.told_accepted(request, &tasks)?;
                self.tasks_seen.extend(tasks);
            }
            Effect::Answer { request, answer: Ok(Answer::AcceptedBefore(tasks)) } => {
                self.told_accepted(request, &tasks)?;
            }
            Effect::Answer { answer: Ok(Answer::Replayed(task)), .. } => {
                self.oracle.told_accepted(&[task])?;
                self.tasks_seen.push(task);
            }
            Effect::Answer { request, answer: Ok(Answer::Stopping) } => {
                if let Some(&task) = self.cancels.get(&request) {
                    self.oracle.told_stopping(task);
                }
            }
            Effect::Answer {
                answer:
                    Ok(
                        Answer::KeySet
                        | Answer::Canceled
                        | Answer::Configured(_)
                        | Answer::KeyPaused(_)
                        | Answer::Shortened(_),
                    )
                    | Err(_),
                ..
            } => {}
            Effect::Answer { answer: Ok(Answer::Interactive { task, fence, .. }), .. } => {
                self.oracle.interactive_began(task, fence);
                // Clients leave at some time.
                let stays = self.rng.below(4 * ms(self.plan.run_ms) + 1);
                self.at(stays, Event::ToOwner(owner, messages::Input::Hangup { task, fence }));
            }
            Effect::Limit { worker, task, fence, limit_ms, max_duration_ms } => {
                self.say_to(owner, worker, Down::Limit { task, fence, limit_ms, max_duration_ms });
            }
            Effect::Warn { .. } => {}
            Effect::InteractiveOver { task, fence, .. } => self.oracle.interactive_over(task, fence)?,
            Effect::Retried { task, attempt, end, .. } => {
                if end.is_none() {
                    self.oracle.not_started(task);
                }
                self.store.look(SHARD, |tables| self.oracle.told_retried(tables, task, attempt))?;
            }
            Effect::Due { .. } => {}
            Effect::Finished { task, .. } => self.oracle.told_ended(task)?,
            Effect::Wake { at } => {
                let state = &mut self.owners[owner];
                state.wake += 1;
                let (number, at) = (state.wake, state.server.clock.when(at));
                self.at_time(at, Event::WakeOwner(owner, number));
            }
            // A zombie may well read what its successor wrote.
            Effect::Broken { .. } if self.current != Some(owner) => self.owners[owner].alive = false,
            Effect::Broken { what } => return Err(what),
            Effect::RefuseWorker { .. } | Effect::MemberSaved { .. } | Effect::Marked { .. } => {
                return Err(format!("{effect:?} is for the owner alone"));
            }
        }
        Ok(())
    }

    /// No start exceeds a limit: not that of its class, nor that of its key.
    fn admitted(&mut self, owner: usize, run: &Run) -> Result<(), String> {
        let shard = self.owners[owner].core.shard();
        let Some(queue) = shard.queue_name(run.lane.queue) else { return Ok(()) };
        let held = shard.class_of_run(run.task);
        for class in shard.classes(queue).iter().skip(1) {
            if held.is_some_and(|held| held >= class.duration_ms) && class.held > class.limit {
                let (is, limit, ms) = (class.held, class.limit, class.duration_ms);
                return Err(format!("task {}: {is} runs hold the class of {ms} ms, {limit} may", run.task));
            }
        }
        let settings = shard.settings(queue).settings;
        if let Some(rate) = settings.rate {
            self.oracle.within_rate(run, None, self.now, rate)?;
        }
        if let Some(rate) = shard.key_rate(run.lane.queue, &run.key) {
            self.oracle.within_rate(run, Some(&run.key), self.now, rate)?;
        }
        let limit = shard.override_of(queue, &run.key).limit.or(settings.key_limit);
        let running = shard.key_counts(queue, &run.key).running;
        match limit {
            Some(limit) if running > u64::from(limit) => {
                Err(format!("task {}: {running} of key {} run, {limit} may", run.task, run.key))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Why the owner has not come to rest, if it has not.
    pub(super) fn busy_owner(&self) -> Option<String> {
        let Some(owner) = self.current else { return Some("nobody owns the shard".into()) };
        let owner = &self.owners[owner].core;
        let gate = owner.gate();
        if !gate.open || !gate.absent.is_empty() {
            return Some(format!("the owner waits for workers: {gate:?}"));
        }
        let held = owner.shard().held();
        if held != evenhand_core::shard::Held::default() {
            return Some(format!("memory did not return to its base: {held:?}"));
        }
        let (slots, alive) = (owner.shard().slots_and_runs(), self.oracle.alive().len());
        if slots != (0, 0) || alive > 0 {
            return Some(format!("slots held and runs known are {slots:?}, {alive} runs are alive"));
        }
        if let Some((task, _)) = self.oracle.talking(owner.shard().epoch()).next() {
            return Some(format!("nobody told the client of interactive task {task} that it is over"));
        }
        let silent = owner.members().find(|member| member.why_not.is_some())?;
        Some(format!("{} gets no work: {:?}", silent.seat, silent.why_not))
    }
}
