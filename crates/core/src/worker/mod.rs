//! The worker's side of a session with one shard, as pure as the shard: what it runs, what ended and is not
//! acknowledged, and how long it may go on. The runtime around it moves bytes, starts and kills.
//!
//! The *lease* is what makes it safe to run a task elsewhere: it is counted from the moment the last answered
//! heartbeat was *sent*, on a clock that counts suspended time. Nothing starts outside of it, and when it is
//! over everything is killed; only when all is dead does the worker join again, as a new life.
//!
//! It obeys one owner: the highest epoch it has seen, in its newest session. A hello raises the session's
//! number before it lists what runs, so a start that was on its way in an older session can no longer happen,
//! and the owner may take what is not listed as never started.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::backlog::Weight;
use crate::bounds;
use crate::canary::{Bug, Canary};
use crate::life::{End, Terms};
use crate::messages::Run;
use crate::names::{Epoch, Fence, Incarnation, Life, Millis, QueueName, Seat, StoreId, TaskId, WorkerSetId};
use crate::owner::health::Thresholds;
use crate::owner::messages::{Beat, Hello, Then};

/// Who a worker is and what it offers.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Its seat.
    pub seat: Seat,
    /// Bound to its machine.
    pub token: u64,
    /// Its process life, from the seat's lock.
    pub process: u64,
    /// Its slots.
    pub slots: u32,
    /// The queues it serves.
    pub queues: Vec<(QueueName, Weight)>,
}

/// What an owner says.
#[derive(Clone, Debug, PartialEq)]
pub enum Down {
    /// The worker is let in.
    Welcome {
        /// The store.
        store: StoreId,
        /// The owner's nonce.
        nonce: u64,
        /// What counts.
        thresholds: Thresholds,
        /// Who the workers are, if it may know.
        set: Option<WorkerSetId>,
    },
    /// A heartbeat was heard.
    Answer {
        /// Which.
        number: u64,
        /// Who the workers are, if it may know.
        set: Option<WorkerSetId>,
    },
    /// Start a run.
    Start {
        /// Counted within the session: what does not come after the last one has been answered.
        number: u64,
        /// The run.
        run: Run,
    },
    /// Take no more work, and end when what runs has ended.
    Drain,
    /// End a run.
    Stop {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// A run has less time than it was told.
    Limit {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// How long it may take from its start, in milliseconds.
        limit_ms: u64,
        /// How long its task says that it may take, in milliseconds; 0 if it does not say.
        max_duration_ms: u64,
    },
    /// The end of a run is durable.
    Acknowledge {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// The owner stops in good order.
    Absence {
        /// The lease is so much longer, in milliseconds.
        ms: u64,
    },
    /// The session is refused, or over.
    Die {
        /// What to do.
        then: Then,
    },
}

/// A fact that a worker learns.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A connection is there: say hello.
    Connected,
    /// The connection is gone.
    Disconnected,
    /// An owner said something.
    Down {
        /// Its epoch.
        epoch: Epoch,
        /// The session that it speaks in, as the worker counts them.
        session: u64,
        /// What it said.
        down: Down,
    },
    /// A run is over, and nothing of it is left.
    Ended {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// How it ended; None if it was killed because the lease was over.
        end: Option<End>,
    },
    /// A run was not started after all, and will not be.
    NotStarted {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// Take no more work, and end when what runs has ended and is acknowledged.
    Drain,
    /// Time has passed.
    Tick,
}

/// Something the runtime must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Say hello.
    Hello(Hello),
    /// Say that it is alive.
    Beat(Beat),
    /// Say how a run ended.
    Ended {
        /// The run.
        run: Run,
        /// How.
        end: End,
    },
    /// Say that a run was not started.
    Refuse {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// Say how many slots there are now.
    Offer {
        /// So many.
        slots: u32,
    },
    /// Start a run.
    Start {
        /// The run.
        run: Run,
    },
    /// End a run: ask it to, and kill it after a grace.
    Stop {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// A run has this much time from its start.
    Limit {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// In milliseconds.
        limit_ms: u64,
    },
    /// The end of a run is durable: forget it.
    Forget {
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// Everything may live until then, and must be dead soon after, whatever happens to this process.
    Lease {
        /// On the same clock as `now`.
        until: Millis,
    },
    /// Kill everything now.
    KillAll,
    /// Close the connection, and make another after a while.
    Disconnect,
    /// It is over.
    Exit(Exit),
    /// Send a tick at this time, or soon after. The latest wake counts.
    Wake {
        /// When.
        at: Millis,
    },
}

/// Why a worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It was asked to, and all is done.
    Drained,
    /// The owner has no place for it.
    Refused,
}

/// Where it stands with its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Away,
    /// It said hello at this time.
    Greeting(Millis),
    In,
}

/// A worker. See the module's text.
#[derive(Clone, Debug)]
pub struct Worker {
    offer: Offer,
    canary: Canary,
    now: Millis,
    phase: Phase,
    rejoin: u32,
    session: u64,
    store: Option<StoreId>,
    /// The last owner it obeyed.
    obeyed: Incarnation,
    /// The last worker set that it was told.
    set: Option<WorkerSetId>,
    thresholds: Thresholds,
    /// When the last answered heartbeat was sent.
    answered_at: Option<Millis>,
    lease: Option<Millis>,
    /// Heartbeats without an answer, and when they were sent.
    beats: VecDeque<(u64, Millis)>,
    next_beat: u64,
    last_answer: u64,
    /// The last start of this session.
    last_start: u64,
    beat_at: Millis,
    running: BTreeMap<TaskId, Run>,
    /// Those of them that were given less time since they began, and not because their clients wanted it.
    downgraded: BTreeSet<TaskId>,
    /// Interactive ones of them that it was told to stop: their slots are given to others before they are gone.
    stopping: BTreeSet<TaskId>,
    /// Runs that wait until such a one is gone. They count as running.
    held_up: VecDeque<TaskId>,
    /// Ends that are not acknowledged, and when they were last said.
    ended: BTreeMap<(TaskId, Fence), (Run, End, Millis)>,
    /// Runs that the hello named, and that were not started after all.
    misnamed: Vec<(TaskId, Fence)>,
    /// The lease is over, and what ran is being killed; then it joins anew.
    killing: bool,
    draining: bool,
    /// Runs were killed of which no owner has heard since.
    killed: bool,
    /// The heartbeat after the first one that followed the word that nothing is offered.
    drained_beat: u64,
    exited: bool,
    wake: Option<Millis>,
}

impl Worker {
    /// A worker that has not said hello yet.
    pub fn new(offer: Offer) -> Worker {
        Worker::with_canary(offer, Canary::default())
    }

    /// A worker with a deliberate bug, or none.
    pub fn with_canary(offer: Offer, canary: Canary) -> Worker {
        Worker {
            offer,
            canary,
            now: Millis(0),
            phase: Phase::Away,
            rejoin: 0,
            session: 0,
            store: None,
            obeyed: Incarnation::default(),
            set: None,
            thresholds: Thresholds::default(),
            answered_at: None,
            lease: None,
            beats: VecDeque::new(),
            next_beat: 1,
            last_answer: 0,
            last_start: 0,
            beat_at: Millis(0),
            running: BTreeMap::new(),
            downgraded: BTreeSet::new(),
            stopping: BTreeSet::new(),
            held_up: VecDeque::new(),
            ended: BTreeMap::new(),
            misnamed: Vec::new(),
            killing: false,
            draining: false,
            killed: false,
            drained_beat: 0,
            exited: false,
            wake: None,
        }
    }

    /// Learns one fact and says what must be done about it.
    pub fn step(&mut self, now: Millis, input: Input, effects: &mut Vec<Effect>) {
        self.now = self.now.max(now);
        if self.exited {
            return;
        }
        // Before anything else: what was buffered while the process slept must not start.
        if !(self.canary.is(Bug::StartAfterLease) && matches!(input, Input::Down { .. })) {
            self.look_at_lease(effects);
        }
        match input {
            Input::Connected => self.on_connected(effects),
            Input::Disconnected => self.leave(),
            Input::Down { epoch, session, down } => self.on_down(epoch, session, down, effects),
            Input::Ended { task, fence, end } => self.on_ended(task, fence, end, effects),
            Input::NotStarted { task, fence } => self.on_not_started(task, fence, effects),
            Input::Drain => self.on_drain(effects),
            Input::Tick => self.on_tick(effects),
        }
        if self.draining && self.running.is_empty() && self.ended.is_empty() && self.is_unoffered() {
            self.exited = true;
            effects.push(Effect::Exit(Exit::Drained));
        }
        self.emit_wake(effects);
    }

    /// The session that counts, to go with everything that is said up.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// Its life with this shard.
    pub fn life(&self) -> Life {
        Life { process: self.offer.process, rejoin: self.rejoin }
    }

    /// It has been welcomed in the session that counts.
    pub fn is_in(&self) -> bool {
        self.phase == Phase::In
    }

    /// A connection is of use: it is neither killing its runs nor over.
    pub fn wants_session(&self) -> bool {
        self.phase == Phase::Away && !self.killing && !self.exited
    }

    /// What runs is being killed, because the lease is over.
    pub fn is_killing(&self) -> bool {
        self.killing
    }

    /// Every run that it was given has ended and been acknowledged, or never began.
    pub fn is_clean(&self) -> bool {
        !self.killed && self.running.is_empty() && self.ended.is_empty()
    }

    /// Until when everything may live.
    pub fn lease(&self) -> Option<Millis> {
        self.lease
    }

    /// What runs.
    pub fn running(&self) -> impl Iterator<Item = &Run> {
        self.running.values()
    }

    /// A run waits until one that was told to stop is gone.
    pub fn holds_up(&self, task: TaskId) -> bool {
        self.held_up.contains(&task)
    }

    /// What ended and is not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.ended.len()
    }

    fn on_connected(&mut self, effects: &mut Vec<Effect>) {
        if self.killing {
            effects.push(Effect::Disconnect);
            return;
        }
        self.session += 1;
        self.phase = Phase::Greeting(self.now);
        self.beats.clear();
        self.misnamed.clear();
        self.next_beat = 1;
        self.last_answer = 0;
        self.last_start = 0;
        let now = self.now;
        for (.., said) in self.ended.values_mut() {
            *said = now;
        }
        effects.push(Effect::Hello(Hello {
            seat: self.offer.seat.clone(),
            token: self.offer.token,
            life: self.life(),
            session: self.session,
            slots: self.slots(),
            queues: self.offer.queues.clone(),
            store: self.store,
            obeyed: self.obeyed,
            set: self.set,
            running: self.running.values().cloned().collect(),
            ended: self.ended.values().map(|(run, end, _)| (run.clone(), *end)).collect(),
        }));
    }

    fn slots(&self) -> u32 {
        if self.draining { 0 } else { self.offer.slots }
    }

    /// The owner knows that nothing is offered any more, so no start is on its way.
    fn is_unoffered(&self) -> bool {
        self.phase != Phase::In || self.last_answer.saturating_add(1) >= self.drained_beat
    }

    fn leave(&mut self) {
        self.phase = Phase::Away;
    }

    fn on_down(&mut self, epoch: Epoch, session: u64, down: Down, effects: &mut Vec<Effect>) {
        let of_now = session == self.session || self.canary.is(Bug::OldSessionObeyed);
        if !of_now || epoch < self.obeyed.epoch || self.phase == Phase::Away {
            // An older session, or an owner that has a successor.
            if of_now && epoch < self.obeyed.epoch && self.phase != Phase::Away {
                self.leave();
                effects.push(Effect::Disconnect);
            }
            return;
        }
        match (down, self.phase) {
            (Down::Welcome { store, nonce, thresholds, set }, Phase::Greeting(sent)) => {
                self.phase = Phase::In;
                self.obeyed = Incarnation { epoch, nonce };
                self.killed = false;
                self.store = Some(store);
                self.thresholds = thresholds;
                self.learn(set);
                self.answered(sent, effects);
                if self.draining {
                    effects.push(Effect::Offer { slots: 0 });
                }
                self.say_again(effects);
                let misnamed = self.misnamed.drain(..);
                effects.extend(misnamed.map(|(task, fence)| Effect::Refuse { task, fence }));
                self.beat(effects);
                self.drained_beat = self.next_beat;
            }
            (Down::Die { then }, Phase::Greeting(_) | Phase::In) => self.on_die(then, effects),
            (Down::Answer { number, set }, Phase::In) => {
                self.learn(set);
                self.on_answer(number, effects);
            }
            (Down::Start { number, run }, Phase::In) => {
                if number > self.last_start {
                    self.last_start = number;
                    self.on_start(run, effects);
                }
            }
            (Down::Drain, Phase::In) => self.on_drain(effects),
            (Down::Stop { task, fence }, Phase::In) => self.on_stop(task, fence, effects),
            (Down::Limit { task, fence, limit_ms, max_duration_ms }, Phase::In) => {
                self.on_limit(task, fence, limit_ms, max_duration_ms, effects);
            }
            (Down::Acknowledge { task, fence }, Phase::In) => {
                if self.ended.remove(&(task, fence)).is_some() {
                    effects.push(Effect::Forget { task, fence });
                }
            }
            (Down::Absence { ms }, Phase::In) => {
                if let Some(lease) = self.lease {
                    self.set_lease(lease.plus(ms), effects);
                }
            }
            // Not in this order: an owner that has not said welcome has nothing else to say.
            (
                Down::Welcome { .. }
                | Down::Answer { .. }
                | Down::Start { .. }
                | Down::Drain
                | Down::Stop { .. }
                | Down::Limit { .. }
                | Down::Acknowledge { .. }
                | Down::Absence { .. }
                | Down::Die { .. },
                Phase::Away | Phase::Greeting(_) | Phase::In,
            ) => {}
        }
    }

    fn on_die(&mut self, then: Then, effects: &mut Vec<Effect>) {
        self.leave();
        effects.push(Effect::Disconnect);
        match then {
            Then::Retry => {}
            Then::Exit => {
                self.exited = true;
                effects.push(Effect::KillAll);
                effects.push(Effect::Exit(Exit::Refused));
            }
            Then::Forget => {
                let ended = std::mem::take(&mut self.ended);
                effects.extend(ended.into_keys().map(|(task, fence)| Effect::Forget { task, fence }));
                self.store = None;
                self.obeyed = Incarnation::default();
                self.kill_all(effects);
            }
        }
    }

    /// It is told who the workers are. An owner that does not say leaves it at what it knows.
    fn learn(&mut self, set: Option<WorkerSetId>) {
        let Some(set) = set else { return };
        let newer = |known: WorkerSetId| known.incarnation != set.incarnation || known.version < set.version;
        if self.set.is_none_or(newer) {
            self.set = Some(set);
        }
    }

    fn on_answer(&mut self, number: u64, effects: &mut Vec<Effect>) {
        self.last_answer = self.last_answer.max(number);
        let mut sent = None;
        while let Some(&(first, at)) = self.beats.front() {
            if first > number {
                break;
            }
            sent = Some(at);
            self.beats.pop_front();
        }
        if let Some(sent) = sent {
            self.answered(if self.canary.is(Bug::LeaseFromAnswer) { self.now } else { sent }, effects);
        }
    }

    /// The owner has heard what was sent then: that is when the lease begins.
    fn answered(&mut self, sent: Millis, effects: &mut Vec<Effect>) {
        self.answered_at = Some(sent);
        self.set_lease(sent.plus(self.thresholds.lease_ms()), effects);
        self.look_at_lease(effects); // the answer may have come too late
    }

    fn set_lease(&mut self, until: Millis, effects: &mut Vec<Effect>) {
        self.lease = Some(until);
        effects.push(Effect::Lease { until });
    }

    fn on_start(&mut self, run: Run, effects: &mut Vec<Effect>) {
        let (task, fence) = (run.task, run.fence);
        if self.running.get(&task).is_some_and(|other| other.fence == fence) {
            return;
        }
        let fresh = self.answered_at.is_some_and(|at| self.now < at.plus(self.thresholds.unhealthy_after_ms));
        let leased = self.lease.is_some_and(|until| self.now < until);
        let careless = self.canary.is(Bug::StartAfterLease);
        if (careless || fresh && leased) && !self.draining && !self.running.contains_key(&task) {
            self.downgraded.remove(&task);
            self.running.insert(task, run.clone());
            if self.is_full() {
                self.held_up.push_back(task);
            } else {
                effects.push(Effect::Start { run });
            }
        } else {
            effects.push(Effect::Refuse { task, fence });
        }
    }

    /// As many run as there are slots, and one of them is about to go.
    fn is_full(&self) -> bool {
        let begun = self.running.len() - self.held_up.len() - 1;
        !self.stopping.is_empty() && begun >= self.offer.slots as usize
    }

    fn on_stop(&mut self, task: TaskId, fence: Fence, effects: &mut Vec<Effect>) {
        if self.running.get(&task).is_none_or(|run| run.fence != fence) {
            return;
        }
        if let Some(at) = self.held_up.iter().position(|held| *held == task) {
            self.held_up.remove(at);
            self.running.remove(&task);
            return effects.push(Effect::Refuse { task, fence });
        }
        if task.is_interactive() {
            self.stopping.insert(task);
        }
        effects.push(Effect::Stop { task, fence });
    }

    fn on_limit(
        &mut self,
        task: TaskId,
        fence: Fence,
        limit_ms: u64,
        max_duration_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(run) = self.running.get_mut(&task).filter(|run| run.fence == fence) else { return };
        if run.max_duration_ms() != max_duration_ms {
            let terms = run.terms.as_deref().cloned().unwrap_or_default();
            run.terms = Some(Terms { max_duration_ms, ..terms }.into());
        }
        if run.limit_ms != limit_ms {
            run.limit_ms = limit_ms;
            if max_duration_ms == 0 {
                // A later owner does not know of it, and has to when its time is up.
                self.downgraded.retain(|task| self.running.contains_key(task));
                self.downgraded.insert(task);
            }
            effects.push(Effect::Limit { task, fence, limit_ms });
        }
    }

    /// A run is gone: one that waited for that begins.
    fn go_on(&mut self, task: TaskId, effects: &mut Vec<Effect>) {
        self.stopping.remove(&task);
        if let Some(next) = self.held_up.pop_front()
            && let Some(run) = self.running.get(&next)
        {
            effects.push(Effect::Start { run: run.clone() });
        }
    }

    fn on_ended(&mut self, task: TaskId, fence: Fence, end: Option<End>, effects: &mut Vec<Effect>) {
        // Killed although this side knows of no end of the lease: whoever guards it does. The owner still counts
        // on the run, so it must hear of its end.
        let end = if self.killing { end } else { end.or(Some(End::Failed)) };
        // What ran for another store is nobody's business here.
        let end = end.filter(|_| !(self.killing && self.store.is_none()));
        let ended = self.running.get(&task).is_some_and(|run| run.fence == fence);
        let downgraded = ended && self.downgraded.remove(&task);
        let end = if downgraded && end == Some(End::TimeUp) { Some(End::Downgraded) } else { end };
        if ended
            && let Some(run) = self.running.remove(&task)
            && let Some(end) = end
        {
            let said = if self.phase == Phase::In { self.now } else { Millis(0) };
            self.ended.insert((task, fence), (run.clone(), end, said));
            if self.phase == Phase::In {
                effects.push(Effect::Ended { run, end });
            }
        }
        if ended {
            self.go_on(task, effects);
        }
        self.look_at_killed();
    }

    fn on_not_started(&mut self, task: TaskId, fence: Fence, effects: &mut Vec<Effect>) {
        if self.running.get(&task).is_some_and(|run| run.fence == fence) {
            self.running.remove(&task);
            self.go_on(task, effects);
            match self.phase {
                // The next hello does not name it.
                Phase::Away => {}
                Phase::Greeting(_) => self.misnamed.push((task, fence)),
                Phase::In => effects.push(Effect::Refuse { task, fence }),
            }
        }
        self.look_at_killed();
    }

    fn on_drain(&mut self, effects: &mut Vec<Effect>) {
        if !std::mem::replace(&mut self.draining, true) && self.phase == Phase::In {
            effects.push(Effect::Offer { slots: 0 });
            // When this one is answered, the owner knows; what it sent before has arrived.
            self.beat(effects);
            self.drained_beat = self.next_beat;
        }
    }

    fn on_tick(&mut self, effects: &mut Vec<Effect>) {
        if self.wake.is_some_and(|at| at <= self.now) {
            self.wake = None;
        }
        if self.phase != Phase::In {
            // A hello that nobody answers is no better than silence.
            if let Phase::Greeting(sent) = self.phase
                && self.now >= sent.plus(self.thresholds.unhealthy_after_ms)
            {
                self.leave();
                effects.push(Effect::Disconnect);
            }
            return;
        }
        let silent =
            self.answered_at.is_none_or(|at| self.now >= at.plus(self.thresholds.unhealthy_after_ms));
        if silent {
            self.leave();
            effects.push(Effect::Disconnect);
            return;
        }
        if self.now >= self.beat_at {
            self.beat(effects);
            self.say_again(effects);
        }
    }

    fn beat(&mut self, effects: &mut Vec<Effect>) {
        let number = self.next_beat;
        self.next_beat += 1;
        if self.beats.len() < bounds::BEATS_IN_FLIGHT {
            self.beats.push_back((number, self.now));
        }
        self.beat_at = self.now.plus(self.thresholds.heartbeat_ms);
        effects.push(Effect::Beat(Beat { number, answered: self.last_answer, set: self.set }));
    }

    /// An owner that is too busy drops ends and relies on hearing them again.
    fn say_again(&mut self, effects: &mut Vec<Effect>) {
        let now = self.now;
        for (run, end, said) in self.ended.values_mut() {
            if now >= said.plus(bounds::SAY_AGAIN_MS) {
                *said = now;
                effects.push(Effect::Ended { run: run.clone(), end: *end });
            }
        }
    }

    fn look_at_lease(&mut self, effects: &mut Vec<Effect>) {
        if self.lease.is_some_and(|until| self.now >= until) {
            self.lease = None;
            self.kill_all(effects);
        }
    }

    /// Everything dies; then the worker joins as a new life.
    fn kill_all(&mut self, effects: &mut Vec<Effect>) {
        if self.phase != Phase::Away {
            self.leave();
            effects.push(Effect::Disconnect);
        }
        self.answered_at = None;
        self.lease = None;
        // What has not begun need not be killed.
        for task in self.held_up.drain(..) {
            self.running.remove(&task);
        }
        self.stopping.clear();
        self.killed |= !self.running.is_empty();
        // Whoever was with it may be gone by the time it is back.
        self.set = None;
        self.killing = true;
        effects.push(Effect::KillAll);
        self.look_at_killed();
    }

    fn look_at_killed(&mut self) {
        if self.killing && self.running.is_empty() {
            self.killing = false;
            self.rejoin += 1;
        }
    }

    fn emit_wake(&mut self, effects: &mut Vec<Effect>) {
        let silence = |from: Millis| from.plus(self.thresholds.unhealthy_after_ms);
        let next = match self.phase {
            Phase::Away => None,
            Phase::Greeting(sent) => Some(silence(sent)),
            Phase::In => Some(self.beat_at.min(self.answered_at.map_or(self.now, silence))),
        };
        let next = [next, self.lease].into_iter().flatten().min();
        if let Some(at) = next
            && !self.exited
            && self.wake.is_none_or(|wake| at < wake || wake <= self.now)
        {
            self.wake = Some(at);
            effects.push(Effect::Wake { at });
        }
    }
}

#[cfg(test)]
mod tests;
