//! An owner: a shard together with what it knows of its workers. It decides who is let in, who is alive, who
//! gets work, and when the start gate opens; the shard decides what they run.
//!
//! The promise is that no task runs twice at once. It rests on four rules:
//! 1. A worker gets work only after the store knows it ([`Change::Member`](crate::Change)), so that the next
//!    owner knows whom to ask.
//! 2. A worker is told nothing that lets it live longer than the store says it may: `wait_ms` is saved
//!    before the welcome that makes it true.
//! 3. A new owner starts nothing until every saved worker has said hello (which says all that it runs), is
//!    proven dead by a later life under its seat's lock, or has been silent for its `wait_ms`. An owner that
//!    stopped in good order leaves a mark and what runs; then nobody has to be asked.
//! 4. A worker is lost in one commit with the ends of its runs.
//!
//! Rule 3 trusts the store to be its newest copy. Where that is not known, the workers themselves are witnesses: the
//! gate opens when they agree that nobody is missing, or when nobody can be alive any more who has not come. So that
//! their word can be trusted, a new worker gets work only when all others require it: [`worker_set`].
//!
//! Read [`messages`] for what goes in and out, [`health`] for the times, `members` for who may have a seat,
//! [`worker_set`] for who knows whom.

pub mod health;
mod members;
pub mod messages;
pub mod worker_set;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::bounds::{self, Bounds};
use crate::canary::{Bug, Canary};
use crate::change::{self, MemberRecord, Metadata};
use crate::life::Ending;
use crate::messages as shard_messages;
use crate::names::{
    Epoch, Fence, Incarnation, Life, Millis, QueueName, Seat, SessionId, StoreId, TaskId, WorkerId,
    WorkerSetId,
};
use crate::refusal::{Kind, Refusal};
use crate::shard::Shard;
use health::{Health, Thresholds};
use members::{Claim, Member};
use messages::{Beat, Effect, Hello, Input, Note, Then};
use worker_set::WorkerSet;

/// Up to so many workers it is found out at once who requires whom, whenever one of them says something new.
const FEW: usize = 64;
/// Between two times that it is found out for more, in milliseconds.
const PROPAGATE_MS: u64 = 20;
/// Workers that may join before those who joined before them are known to all; the others wait for their turn. Without
/// that, workers that come and go fast enough would keep everybody who is new from working.
const JOINS: u32 = 16;
/// An epoch that is so far above the owner's own is no owner's.
const EPOCHS_AHEAD: u64 = 1_000_000;

/// What an owner is told once.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bounds of its shard.
    pub bounds: Bounds,
    /// When a worker counts as what.
    pub thresholds: Thresholds,
    /// How long workers may go on without a server that stopped in good order, in milliseconds.
    pub absence_ms: u64,
    /// What counts for queues for which nobody has chosen settings.
    pub queue: change::Settings,
}

impl Settings {
    /// How long a worker can live that hears nothing from an owner with these settings: so long its start gate can be
    /// shut at most.
    pub fn longest_ms(&self) -> u64 {
        self.thresholds.lost_after_ms.saturating_add(health::waited_ms(self.absence_ms))
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            bounds: Bounds::default(),
            thresholds: Thresholds::default(),
            absence_ms: 5 * 60 * 1000,
            queue: change::Settings::default(),
        }
    }
}

/// What distinguishes this owner from all others.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Its epoch.
    pub epoch: Epoch,
    /// A random number that callers cannot know. What the owner does never depends on it.
    pub seed: u64,
    /// The store's id, if the store has none yet.
    pub store: StoreId,
    /// Another random number: with the epoch it tells this owner from all others, even if the store is set back.
    pub nonce: u64,
}

/// The start gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// Workers are waited for.
    Shut,
    /// The last owner left a mark, which is being removed: it counts once.
    Unmarking,
    Open,
}

/// A shard and its workers. See the module's text.
#[derive(Clone, Debug)]
pub struct Owner {
    shard: Shard,
    settings: Settings,
    store: StoreId,
    nonce: u64,
    canary: Canary,
    now: Millis,
    members: BTreeMap<Seat, Member>,
    /// The members as workers are told them, since the gate is open.
    set: WorkerSet,
    /// Those in the set that have never had work, as the others may not know them yet.
    waiting: BTreeSet<Seat>,
    /// Members that are not in the set yet: many came at once, and their turn comes.
    queued: BTreeSet<Seat>,
    /// Joins since all who were in the set had work.
    joins: u32,
    /// When it may be found out again who requires whom.
    propagate_at: Millis,
    /// The store may be an old copy: when nobody can be alive any more whom it does not know.
    doubt: Option<Millis>,
    /// It has been found that the store was set back: what happens now is for the next owner.
    doubted: bool,
    /// Whose session a connection is.
    sessions: BTreeMap<SessionId, Seat>,
    workers: BTreeMap<WorkerId, Seat>,
    next_worker: u64,
    gate: Gate,
    stopping: bool,
    /// The next look at everybody's health.
    look_at: Option<Millis>,
    /// When what absent workers are still waited for was last saved.
    wait_saved: Millis,
    shard_wake: Option<Millis>,
    wake: Option<Millis>,
    inner: Vec<shard_messages::Effect>,
}

impl Owner {
    /// The owner of a shard as the store has it. An error says how the metadata contradicts itself.
    pub fn new(
        now: Millis,
        settings: Settings,
        identity: Identity,
        metadata: Metadata,
        effects: &mut Vec<Effect>,
    ) -> Result<Owner, String> {
        Owner::with_canary(now, settings, identity, metadata, Canary::default(), effects)
    }

    /// An owner with a deliberate bug, or none.
    pub fn with_canary(
        now: Millis,
        settings: Settings,
        identity: Identity,
        mut metadata: Metadata,
        canary: Canary,
        effects: &mut Vec<Effect>,
    ) -> Result<Owner, String> {
        let saved = std::mem::take(&mut metadata.members);
        let nonce = if canary.is(Bug::FenceRepeats) { 0 } else { identity.nonce };
        if metadata.doubt == Some(u64::MAX) {
            // Tasks may have been accepted of which an old copy knows nothing: their numbers do not come again, not even
            // if the same copy is put back twice.
            let skipped = bounds::SEQS_SKIPPED + nonce % bounds::SEQS_SKIPPED;
            metadata.next_seq =
                metadata.next_seq.max(1).saturating_add(skipped).min(crate::backlog::Level::LAST_NEW_SEQ);
        }
        metadata.doubt = metadata.doubt.filter(|_| !canary.is(Bug::DoubtIgnored));
        let doubt = metadata.doubt;
        let (marked, store) = (metadata.stopped, metadata.store);
        // What an old copy says of what runs is worth nothing.
        let stopped = marked && doubt.is_none();
        let shard =
            Shard::with_canary(settings.bounds.clone(), identity.epoch, identity.seed, metadata, canary)?
                .with_nonce(nonce)
                .with_defaults(settings.queue.clone());
        let mut owner = Owner {
            shard,
            settings,
            store: store.unwrap_or(identity.store),
            nonce,
            canary,
            now,
            members: BTreeMap::new(),
            set: WorkerSet::new(Incarnation { epoch: identity.epoch, nonce }, canary),
            waiting: BTreeSet::new(),
            queued: BTreeSet::new(),
            joins: 0,
            propagate_at: now,
            doubt: None,
            doubted: false,
            sessions: BTreeMap::new(),
            workers: BTreeMap::new(),
            next_worker: 1,
            gate: Gate::Shut,
            stopping: false,
            look_at: None,
            wait_saved: now,
            shard_wake: None,
            wake: None,
            inner: Vec::new(),
        };
        if store.is_none() {
            owner.feed(shard_messages::Input::Identify { store: owner.store }, effects);
        }
        if let Some(left_ms) = doubt {
            let granted = saved.iter().map(|(_, record)| record.wait_ms).max().unwrap_or(0);
            let left_ms =
                if left_ms == u64::MAX { owner.settings.longest_ms().max(granted) } else { left_ms };
            owner.doubt = Some(now.plus(left_ms));
            owner.save_doubt(effects);
            if marked {
                owner.feed(shard_messages::Input::Mark { stopped: false }, effects);
            }
        }
        for (seat, mut record) in saved {
            if stopped && canary.is(Bug::AbsenceForgotten) {
                record.wait_ms = owner.settings.thresholds.lost_after_ms;
            }
            let worker = owner.add(seat.clone(), |worker| Member::saved(worker, &record, now));
            owner.shard.count_on(worker, seat);
            if stopped {
                let running = record.running;
                let report =
                    shard_messages::Input::Report { worker, running, ended: Vec::new(), verify: false };
                owner.feed(report, effects);
            }
        }
        if stopped && !canary.is(Bug::MarkKept) {
            owner.gate = Gate::Unmarking;
            owner.feed(shard_messages::Input::Mark { stopped: false }, effects);
        } else if stopped {
            owner.open(effects);
        }
        // The shard asks for its windows and its timers now, and not when the first worker comes.
        owner.feed(shard_messages::Input::Tick, effects);
        owner.settle(effects);
        Ok(owner)
    }

    /// Learns one fact and says what must be done about it.
    pub fn step(&mut self, now: Millis, input: Input, effects: &mut Vec<Effect>) {
        self.now = self.now.max(now);
        let was_settled = self.is_settled();
        match input {
            Input::Shard(input) => self.feed(input, effects),
            Input::Hello { session, hello, endings } => self.on_hello(session, hello, endings, effects),
            Input::Beat { session, beat } => self.on_beat(session, beat, effects),
            Input::Offer { session, slots } => self.on_offer(session, slots, effects),
            Input::Ended { session, task, fence, attempt, end, ending } => {
                if let Some(worker) = self.worker_of(session) {
                    let ended = shard_messages::Input::Ended { worker, task, fence, attempt, end, ending };
                    self.feed(ended, effects);
                }
            }
            Input::Refused { session, task, fence } => {
                if let Some(worker) = self.worker_of(session) {
                    self.rest_after_refusal(session, effects);
                    self.feed(shard_messages::Input::Refused { worker, task, fence }, effects);
                }
            }
            Input::Closed { session } => self.on_closed(session, effects),
            Input::Dead { seat, token, process, drained } => {
                self.on_dead(&seat, token, process, drained, effects);
            }
            Input::Drain { seat } => self.on_drain(&seat, effects),
            Input::GiveUp { seat } => {
                if !self.stopping {
                    self.lose(&seat, "an operator has given it up", effects);
                    self.look_at_gate(effects);
                }
            }
            Input::OpenGate => self.on_open_gate(effects),
            Input::Stop => self.on_stop(effects),
            Input::Tick => self.on_tick(effects),
        }
        if !was_settled && self.is_settled() {
            self.look_at_gate(effects);
        }
        self.settle(effects);
    }

    /// Closes what happened into one commit, if there is anything to save.
    pub fn seal(&mut self, effects: &mut Vec<Effect>) {
        let mut inner = std::mem::take(&mut self.inner);
        self.shard.seal(&mut inner);
        effects.extend(inner.drain(..).map(Effect::Shard));
        self.inner = inner;
    }

    /// The shard.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// The store that it owns a shard of.
    pub fn store(&self) -> StoreId {
        self.store
    }

    /// What counts for its workers.
    pub fn thresholds(&self) -> Thresholds {
        self.settings.thresholds
    }

    /// The worker set, as workers are told it while the gate is open.
    pub fn worker_set(&self) -> WorkerSetId {
        self.set.id()
    }

    /// How the start gate stands.
    pub fn gate(&self) -> GateView {
        // While the mark is being removed nobody is waited for.
        let waits = self.gate != Gate::Unmarking;
        let absent = || self.members.iter().filter(move |(_, member)| waits && member.is_absent());
        GateView {
            open: self.gate == Gate::Open,
            absent: absent().map(|(seat, _)| seat.clone()).collect(),
            opens_in_ms: absent()
                .map(|(_, member)| member.wait_left(self.now))
                .chain(self.doubt.map(|until| until.0.saturating_sub(self.now.0)))
                .max()
                .unwrap_or(0),
            in_doubt: self.doubt.is_some(),
            members: self.members.len(),
        }
    }

    /// Every worker that it counts on, by seat.
    pub fn members(&self) -> impl Iterator<Item = MemberView<'_>> {
        self.members.iter().map(|(seat, member)| MemberView {
            seat,
            worker: member.worker,
            life: member.life,
            session: member.session,
            health: member.health,
            slots: member.slots,
            running: self.shard.busy(member.worker),
            queues: &member.queues,
            silent_ms: self.now.0.saturating_sub(member.heard.0),
            lost_in_ms: member.wait_left(self.now),
            draining: member.draining,
            required: member.required,
            why_not: self.why_not(seat, member),
        })
    }

    /// Whether a connection is a worker's newest session.
    pub fn is_session(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    /// The seat of a worker.
    pub fn seat(&self, worker: WorkerId) -> Option<&Seat> {
        self.workers.get(&worker)
    }

    /// Why a worker gets no work, if it gets none.
    fn why_not(&self, seat: &Seat, member: &Member) -> Option<Cow<'static, str>> {
        let why = match member.health {
            None => Some("it has not been heard since this server started"),
            Some(_) if self.stopping => Some("this server is stopping"),
            Some(_) if self.gate != Gate::Open => Some("the start gate is shut"),
            Some(_) if member.unsaved => Some("its join is being saved"),
            Some(_) if member.session.is_none() => Some("it is not connected"),
            Some(_) if member.draining => Some("it was asked to drain"),
            Some(_) if self.queued.contains(seat) => {
                Some("many workers join at once: its turn comes when all know those before it")
            }
            Some(_) if !member.required => {
                let (unaware, all) = (self.set.unaware(member.worker), self.members.len());
                return Some(format!("{unaware} of {all} workers do not know of it yet").into());
            }
            Some(Health::New) => Some("it has just joined, or refused a task"),
            Some(Health::Unhealthy | Health::MustDie) => Some("it is silent"),
            Some(Health::Healthy) if member.slots == 0 => Some("it offers no slots: it drains"),
            Some(Health::Healthy) => None,
        };
        why.map(Cow::Borrowed)
    }

    // --- sessions ---

    fn on_hello(
        &mut self,
        session: SessionId,
        hello: Hello,
        endings: Vec<Ending>,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(shown) = self.shown(&hello) {
            // Whatever this owner believes is not all there is.
            if !std::mem::replace(&mut self.doubted, true) {
                self.feed(shard_messages::Input::Halt, effects);
                // Whatever becomes of this server before it has begun anew.
                self.feed(shard_messages::Input::Doubt { left_ms: Some(u64::MAX) }, effects);
                effects.push(Effect::Doubt { shown });
            }
        }
        if let Err((refusal, then)) = self.may_enter(&hello) {
            effects.push(Effect::Refuse { session, refusal, then });
            return;
        }
        let claim =
            self.members.get(&hello.seat).map_or(Claim::Join, |member| member.claim(&hello, self.now));
        let old = matches!(&claim, Claim::Refuse(refusal, _) if refusal.field == "session");
        let claim = if old && self.canary.is(Bug::OldHelloHeard) { Claim::Resume } else { claim };
        match claim {
            Claim::Refuse(refusal, then) => {
                effects.push(Effect::Refuse { session, refusal, then });
                return;
            }
            Claim::Replace => self.lose(&hello.seat.clone(), "a later life of it has come", effects),
            Claim::Join | Claim::Resume => {}
        }
        let seat = hello.seat.clone();
        if claim == Claim::Resume {
            self.resume(session, &hello, effects);
        } else {
            let (token, life, set) = (hello.token, hello.life, hello.set);
            let record = MemberRecord { token, life, set, ..MemberRecord::default() };
            let now = self.now;
            self.add(seat.clone(), |worker| Member {
                confirmed: true,
                ..Member::saved(worker, &record, now)
            });
            self.take_in(session, &hello);
            effects.push(Effect::Note(Note::Joined { seat: seat.clone(), life: hello.life }));
        }
        self.report(&seat, hello, endings, effects);
        self.save_before_welcome(&seat, effects);
        if self.gate == Gate::Shut && self.canary.is(Bug::SavedSetOverwritten) {
            self.forget_absent(effects);
        }
        self.look_at_gate(effects);
    }

    /// What does not depend on who has the seat.
    fn may_enter(&self, hello: &Hello) -> Result<(), (Refusal, Then)> {
        if self.stopping {
            let refusal = Refusal::new(Kind::Unavailable, "", "this server is stopping").after(1_000);
            return Err((refusal, Then::Retry));
        }
        if hello.store.is_some_and(|store| store != self.store) {
            let message = "the worker has worked for another store; it forgets that one and begins anew";
            return Err((Refusal::new(Kind::Conflict, "store_id", message), Then::Forget));
        }
        if self.doubted {
            let message = "the store has been set back to an old copy; the server begins anew with it";
            return Err((Refusal::new(Kind::Unavailable, "epoch", message).after(500), Then::Retry));
        }
        let (epoch, ahead) = (self.shard.epoch(), obeyed(hello).map(|obeyed| obeyed.epoch).max());
        if let Some(ahead) = ahead.filter(|ahead| *ahead > epoch) {
            let message =
                format!("the worker has obeyed epoch {ahead}, which is no owner's: this one has {epoch}");
            return Err((Refusal::new(Kind::Conflict, "epoch", message), Then::Exit));
        }
        if !self.members.contains_key(&hello.seat) && self.members.len() >= bounds::WORKERS {
            let refusal = Refusal::limited(format!("there are {} workers already", bounds::WORKERS));
            return Err((refusal.after(5_000), Then::Retry));
        }
        let known = self.members.get(&hello.seat).map_or(WorkerId(0), |member| member.worker);
        self.shard.may_join(known, hello.slots, &hello.queues).map_err(|refusal| (refusal, Then::Exit))
    }

    /// The highest epoch of an owner that a worker has obeyed and that the store knows nothing of, if there is one: the
    /// store has been set back, or is another owner's by now.
    fn shown(&self, hello: &Hello) -> Option<Epoch> {
        let own = Incarnation { epoch: self.shard.epoch(), nonce: self.nonce };
        let unknown = obeyed(hello).filter(|obeyed| obeyed.epoch >= own.epoch && *obeyed != own);
        // Whoever has obeyed one knows the store's id; anybody else may say what they like.
        let credible = hello.store == Some(self.store) && !self.stopping;
        let shown = unknown.map(|obeyed| obeyed.epoch).max().filter(|_| credible)?;
        (shown.0 - own.epoch.0 <= EPOCHS_AHEAD).then_some(shown)
    }

    /// The same life says hello again: to this owner, or first to an earlier one.
    fn resume(&mut self, session: SessionId, hello: &Hello, effects: &mut Vec<Effect>) {
        if let Some(old) = self.members.get_mut(&hello.seat).and_then(|member| member.session.take()) {
            self.sessions.remove(&old);
            let refusal = Refusal::new(Kind::Conflict, "session", "the worker has begun a newer session");
            effects.push(Effect::Refuse { session: old, refusal, then: Then::Retry });
        }
        if let Some(member) = self.members.get_mut(&hello.seat).filter(|member| member.is_absent()) {
            member.wait_ms = member.wait_left(self.now);
            member.first_set = hello.set;
        }
        self.take_in(session, hello);
        // It gets nothing until it is welcomed: what is sent before that, no session would carry.
        self.offer(&hello.seat, effects);
    }

    /// What every hello changes.
    fn take_in(&mut self, session: SessionId, hello: &Hello) {
        let lost_after_ms = self.settings.thresholds.lost_after_ms;
        if let Some(member) = self.members.get_mut(&hello.seat) {
            member.session = Some(session);
            member.numbered = hello.session;
            member.slots = hello.slots;
            member.queues = hello.queues.clone();
            member.health = Some(Health::New);
            member.heard = self.now;
            member.acknowledged = self.now;
            member.answered = 0;
            member.wait_ms = match self.canary.is(Bug::LoweredAtOnce) {
                false => member.wait_ms.max(lost_after_ms),
                true => lost_after_ms,
            };
            self.set.heard(member.worker, hello.set);
        }
        self.sessions.insert(session, hello.seat.clone());
    }

    /// What a worker runs and what ended there. What it does not name, it never started.
    fn report(&mut self, seat: &Seat, hello: Hello, endings: Vec<Ending>, effects: &mut Vec<Effect>) {
        let Some(worker) = self.members.get(seat).map(|member| member.worker) else { return };
        let named = hello.running.iter().chain(hello.ended.iter().map(|(run, _)| run));
        let named: BTreeSet<(TaskId, Fence)> = named.map(|run| (run.task, run.fence)).collect();
        let runs = self.shard.runs_of(worker).map(|run| (run.task, run.fence));
        let denied: Vec<(TaskId, Fence)> = runs.filter(|run| !named.contains(run)).collect();
        let Hello { running, ended, .. } = hello;
        let endings = endings.into_iter().chain(std::iter::repeat_with(Ending::default));
        let ended = ended.into_iter().zip(endings).map(|((run, end), ending)| (run, end, ending)).collect();
        let from = effects.len();
        self.feed(shard_messages::Input::Report { worker, running, ended, verify: true }, effects);
        // It hears nothing before its welcome, so what it is to stop is kept until then.
        let stop: Vec<(TaskId, Fence)> =
            effects[from..].iter().filter_map(|effect| stop_of(effect, worker)).collect();
        if let Some(member) = self.members.get_mut(seat) {
            member.stop = stop;
        }
        for (task, fence) in denied {
            self.feed(shard_messages::Input::Refused { worker, task, fence }, effects);
        }
    }

    /// The welcome grants a lease, so what it may grant is saved first, if it is not.
    fn save_before_welcome(&mut self, seat: &Seat, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get_mut(seat) else { return };
        let worker = member.worker;
        if member.saved_wait_ms >= member.wait_ms && !member.unsaved
            || self.canary.is(Bug::AnswerBeforeWaitSaved) && member.saved_wait_ms > 0
        {
            self.welcome(worker, effects);
        } else {
            member.unsaved = true;
            if self.canary.is(Bug::WorkBeforeJoinSaved) {
                self.welcome(worker, effects);
            }
            self.save(seat, effects);
        }
    }

    /// A deliberate bug: the store is told of those alone who have come.
    fn forget_absent(&mut self, effects: &mut Vec<Effect>) {
        let absent = self.members.iter().filter(|(_, member)| member.is_absent());
        let absent: Vec<_> = absent.map(|(seat, member)| (seat.clone(), member.worker)).collect();
        for (seat, worker) in absent {
            let record = MemberRecord::default();
            self.feed(shard_messages::Input::Member { worker, seat, record }, effects);
        }
    }

    fn save(&mut self, seat: &Seat, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get_mut(seat) else { return };
        member.saved_wait_ms = member.wait_ms;
        let record = MemberRecord {
            token: member.token,
            life: member.life,
            wait_ms: member.wait_ms,
            running: Vec::new(),
            set: None,
        };
        let worker = member.worker;
        self.feed(shard_messages::Input::Member { worker, seat: seat.clone(), record }, effects);
    }

    fn welcome(&mut self, worker: WorkerId, effects: &mut Vec<Effect>) {
        let Some(seat) = self.workers.get(&worker).cloned() else { return };
        let Some(member) = self.members.get_mut(&seat) else { return };
        member.unsaved = false;
        if let (Some(session), false) = (member.session, self.stopping) {
            let (store, thresholds) = (self.store, self.settings.thresholds);
            let set = self.join(&seat);
            let Some(member) = self.members.get_mut(&seat) else { return };
            let (nonce, drain) = (self.nonce, member.draining);
            effects.push(Effect::Welcome { session, worker, store, nonce, thresholds, set });
            effects.extend(drain.then_some(Effect::Drain { session }));
            // What was to be stopped before it could be told.
            let stop = std::mem::take(&mut member.stop);
            let canceled = self.shard.canceled_runs_of(worker).map(|run| (run.task, run.fence));
            for (task, fence) in canceled.chain(self.shard.condemned_of(worker)).chain(stop) {
                effects.push(Effect::Shard(shard_messages::Effect::Stop { worker, task, fence }));
            }
            // What it was told of its runs' times may not have arrived.
            effects.extend(self.shard.cut_runs_of(worker).map(Effect::Shard));
            self.offer(&seat, effects);
        }
    }

    fn on_beat(&mut self, session: SessionId, beat: Beat, effects: &mut Vec<Effect>) {
        if self.stopping {
            return;
        }
        let Some(seat) = self.sessions.get(&session).cloned() else { return };
        let Some(member) = self.members.get_mut(&seat) else { return };
        if member.unsaved {
            return; // it has not been welcomed: it is ahead of itself
        }
        let Thresholds { unhealthy_after_ms, lost_after_ms, .. } = self.settings.thresholds;
        if member.health == Some(Health::New) || beat.answered > member.answered {
            member.answered = beat.answered;
            member.acknowledged = self.now;
        } else if self.now.0 - member.acknowledged.0 > unhealthy_after_ms
            && !self.canary.is(Bug::OneWayNeverLost)
        {
            return; // it is heard but does not hear: an answer would keep nobody alive
        }
        member.heard = self.now;
        member.confirmed = true;
        member.wait_ms = lost_after_ms;
        let was_healthy = member.is_healthy();
        member.health = Some(Health::Healthy);
        let unsaved = member.saved_wait_ms != lost_after_ms;
        let worker = member.worker;
        if self.canary.is(Bug::AgreeOnNewSet) {
            member.first_set = beat.set;
        }
        self.set.heard(worker, beat.set);
        let set = self.tells().then(|| self.set.id()).filter(|_| self.set.contains(worker));
        effects.push(Effect::Answer { session, number: beat.number, set });
        if !was_healthy {
            effects.push(Effect::Note(Note::Health { seat: seat.clone(), healthy: true }));
            self.offer(&seat, effects);
        }
        if unsaved {
            self.save(&seat, effects);
        }
    }

    fn on_drain(&mut self, seat: &Seat, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get_mut(seat) else { return };
        member.draining = true;
        let session = member.session.filter(|_| !member.unsaved && !self.stopping);
        effects.extend(session.map(|session| Effect::Drain { session }));
        self.offer(seat, effects);
    }

    fn on_offer(&mut self, session: SessionId, slots: u32, effects: &mut Vec<Effect>) {
        let Some(seat) = self.sessions.get(&session).cloned() else { return };
        if let Some(member) = self.members.get_mut(&seat) {
            member.slots = slots.min(bounds::SLOTS_PER_WORKER);
            self.offer(&seat, effects);
        }
    }

    /// A worker that refuses gets nothing until its next heartbeat: what it refused would come back to it at
    /// once, and be refused again, as fast as the network allows.
    fn rest_after_refusal(&mut self, session: SessionId, effects: &mut Vec<Effect>) {
        let Some(seat) = self.sessions.get(&session).cloned() else { return };
        if let Some(member) = self.members.get_mut(&seat)
            && member.is_healthy()
        {
            member.health = Some(Health::New);
            self.offer(&seat, effects);
        }
    }

    fn on_closed(&mut self, session: SessionId, effects: &mut Vec<Effect>) {
        let Some(seat) = self.sessions.remove(&session) else { return };
        if let Some(member) = self.members.get_mut(&seat)
            && member.session == Some(session)
        {
            member.session = None;
            self.offer(&seat, effects);
        }
    }

    /// Tells the shard what a worker offers now, if that is news.
    fn offer(&mut self, seat: &Seat, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get_mut(seat) else { return };
        let slots = if member.is_usable() { member.slots } else { 0 };
        if slots == 0 && member.offered == 0 {
            return;
        }
        member.offered = slots;
        member.worked |= slots > 0;
        let (worker, queues) = (member.worker, member.queues.clone());
        self.feed(shard_messages::Input::Slots { worker, slots, queues }, effects);
    }

    fn on_dead(&mut self, seat: &Seat, token: u64, process: u64, drained: bool, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get_mut(seat) else { return };
        if self.stopping || member.token != token || member.life.process > process {
            return;
        }
        if drained && member.life.process == process {
            // Starts were on their way when it ended. What they free must not come to it again.
            member.slots = 0;
            let worker = member.worker;
            self.offer(seat, effects);
            let runs: Vec<_> = self.shard.runs_of(worker).map(|run| (run.task, run.fence)).collect();
            for (task, fence) in runs {
                self.feed(shard_messages::Input::Refused { worker, task, fence }, effects);
            }
        }
        self.lose(seat, "it has ended, with all its runs", effects);
        self.look_at_gate(effects);
    }

    /// A worker is gone, and none of its runs is alive.
    fn lose(&mut self, seat: &Seat, why: &'static str, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.remove(seat) else { return };
        self.workers.remove(&member.worker);
        self.waiting.remove(seat);
        self.queued.remove(seat);
        self.set.lose(member.worker);
        if let Some(session) = member.session {
            self.sessions.remove(&session);
            let refusal = Refusal::new(Kind::Conflict, "", "this worker has been given up as lost");
            effects.push(Effect::Refuse { session, refusal, then: Then::Retry });
        }
        let runs = self.shard.busy(member.worker) as usize;
        effects.push(Effect::Note(Note::Lost { seat: seat.clone(), life: member.life, runs, why }));
        self.feed(shard_messages::Input::Lost { worker: member.worker }, effects);
    }

    // --- time ---

    fn on_tick(&mut self, effects: &mut Vec<Effect>) {
        if self.wake.is_some_and(|at| at <= self.now) {
            self.wake = None;
        }
        if self.shard_wake.is_some_and(|at| at <= self.now) {
            self.shard_wake = None;
            self.feed(shard_messages::Input::Tick, effects);
        }
        if self.look_at.is_some_and(|at| at <= self.now) {
            self.look_at = None;
            self.look_at_health(effects);
        }
    }

    /// Who has been silent for how long.
    fn look_at_health(&mut self, effects: &mut Vec<Effect>) {
        if self.stopping {
            return;
        }
        let unhealthy_after_ms = self.settings.thresholds.unhealthy_after_ms;
        let mut silent = Vec::new();
        let mut lost = Vec::new();
        for (seat, member) in &mut self.members {
            let silent_ms = self.now.0.saturating_sub(member.heard.0);
            let Some(health) = member.health else {
                if silent_ms >= member.wait_ms {
                    lost.push(seat.clone());
                }
                continue;
            };
            let after = health.after(silent_ms, unhealthy_after_ms, member.wait_ms);
            match after {
                Health::MustDie => lost.push(seat.clone()),
                Health::Unhealthy if health != Health::Unhealthy => silent.push(seat.clone()),
                // It is a heartbeat that makes it healthy again.
                Health::New | Health::Healthy | Health::Unhealthy => continue,
            }
            member.health = Some(after);
        }
        for seat in silent {
            effects.push(Effect::Note(Note::Health { seat: seat.clone(), healthy: false }));
            if let Some(member) =
                self.members.get_mut(&seat).filter(|_| self.canary.is(Bug::RequiredForgotten))
            {
                member.required = false;
                self.waiting.insert(seat.clone());
            }
            self.offer(&seat, effects);
        }
        for seat in lost {
            self.lose(&seat, "it has been silent for too long", effects);
        }
        self.look_at_gate(effects);
        self.save_waits(effects);
    }

    /// Saves how long absent workers are still waited for, so that restarts do not begin anew each time.
    fn save_waits(&mut self, effects: &mut Vec<Effect>) {
        if self.now.0 - self.wait_saved.0 < bounds::WAIT_SAVED_MS || self.gate == Gate::Unmarking {
            return;
        }
        self.wait_saved = self.now;
        if self.doubt.is_some() {
            self.save_doubt(effects);
        }
        let now = self.now;
        let absent = self.members.iter_mut().filter(|(_, member)| member.is_absent());
        let mut seats = Vec::new();
        for (seat, member) in absent {
            member.wait_ms = member.wait_left(now);
            member.heard = now;
            seats.push(seat.clone());
        }
        for seat in seats {
            self.save(&seat, effects);
        }
    }

    /// Nothing that was reported is in the way of the gate.
    fn is_settled(&self) -> bool {
        self.gate != Gate::Shut || self.shard.is_verified() && !self.shard.has_condemned()
    }

    /// Opens the gate if nobody is left who could run something unknown. The saved members are witnesses, if the
    /// store is known to be its newest copy; if it is not, the workers themselves are, or time.
    fn look_at_gate(&mut self, effects: &mut Vec<Effect>) {
        // In doubt, a run that the store does not know is real, and is being ended; but nobody is believed for ever.
        let doubted = self.doubt.is_some_and(|until| self.now < until);
        if self.gate != Gate::Shut || !self.shard.is_verified() || doubted && self.shard.has_condemned() {
            return;
        }
        let saved = !self.members.values().any(Member::is_absent) || self.canary.is(Bug::GateIgnoresAbsent);
        if saved && self.doubt.is_none_or(|until| self.now >= until) {
            self.open(effects);
        } else if self.doubt.is_some() && self.workers_agree() {
            // Whoever has not come runs nothing: the others would not have agreed.
            self.lose_absent("the other workers agree that it is gone", effects);
            self.open(effects);
        }
    }

    /// Whether those who have said hello agree that they are all there are.
    fn workers_agree(&self) -> bool {
        let present = || self.members.iter().filter(|(_, member)| !member.is_absent());
        if self.canary.is(Bug::AgreeOnSome) {
            let mut sets = present().map(|(_, member)| member.first_set);
            let first = sets.next().flatten();
            return first.is_some() && sets.all(|set| set == first);
        }
        worker_set::agree(present().map(|(seat, member)| (seat, member.life, member.first_set)))
    }

    /// From now on tasks may start, and workers are told who is there. If they all know that already, work may begin
    /// at once; if not, it waits until they do.
    fn open(&mut self, effects: &mut Vec<Effect>) {
        self.gate = Gate::Open;
        if self.doubt.take().is_some() {
            self.feed(shard_messages::Input::Doubt { left_ms: None }, effects);
        }
        effects.push(Effect::Note(Note::GateOpened));
        let members = self.members.iter().filter(|(_, member)| !member.unsaved);
        for seat in members.map(|(seat, _)| seat.clone()).collect::<Vec<Seat>>() {
            self.enter_set(&seat);
        }
        let all = self.members.iter().map(|(seat, member)| (seat, member.life, member.first_set));
        if worker_set::agree(all) {
            self.set.all_know();
        }
        self.feed(shard_messages::Input::Open, effects);
    }

    /// Whoever has not come is gone.
    fn lose_absent(&mut self, why: &'static str, effects: &mut Vec<Effect>) {
        let absent = self.members.iter().filter(|(_, member)| member.is_absent());
        for seat in absent.map(|(seat, _)| seat.clone()).collect::<Vec<Seat>>() {
            self.lose(&seat, why, effects);
        }
    }

    /// Somebody does not want to wait.
    fn on_open_gate(&mut self, effects: &mut Vec<Effect>) {
        if self.gate == Gate::Shut && !self.stopping {
            self.lose_absent("an operator has opened the start gate without it", effects);
            // What is being ended by those who are there does not take long.
            let condemned = self.shard.has_condemned();
            let more_ms = if condemned { self.settings.thresholds.lost_after_ms } else { 0 };
            self.doubt = self.doubt.map(|until| until.min(self.now.plus(more_ms)));
            self.look_at_gate(effects);
        }
    }

    /// Saves how long there may still be workers that the store does not know.
    fn save_doubt(&mut self, effects: &mut Vec<Effect>) {
        let left_ms = self.doubt.map(|until| until.0.saturating_sub(self.now.0));
        let left_ms = left_ms.filter(|_| !self.canary.is(Bug::DoubtForgotten));
        self.feed(shard_messages::Input::Doubt { left_ms }, effects);
    }

    /// Whether workers may be told who they are.
    fn tells(&self) -> bool {
        let careless = self.canary.is(Bug::SetToldWhileShut) || self.canary.is(Bug::AgreeOnNewSet);
        self.gate == Gate::Open || careless
    }

    /// A worker that is let in joins the set, now or when its turn comes; what it may be told of it then.
    fn join(&mut self, seat: &Seat) -> Option<WorkerSetId> {
        let member = self.members.get(seat).filter(|_| self.tells())?;
        if !self.set.contains(member.worker) {
            // One that comes with the word of an earlier owner could agree with others like it: all must know it soon.
            let may_wait = member.first_set.is_none();
            if may_wait && self.joins >= JOINS && !self.waiting.is_empty() {
                self.queued.insert(seat.clone());
                return None;
            }
            self.joins += 1;
            self.enter_set(seat);
        }
        Some(self.set.id())
    }

    fn enter_set(&mut self, seat: &Seat) {
        if let Some(member) = self.members.get(seat) {
            self.set.join(member.worker, seat, member.life);
            self.waiting.insert(seat.clone());
        }
    }

    /// If all who are in the set have had work, or are gone, whoever waited for their turn joins.
    fn let_queued_join(&mut self) {
        if self.waiting.is_empty() {
            self.joins = 0;
            for seat in std::mem::take(&mut self.queued) {
                self.enter_set(&seat);
            }
        }
    }

    /// Lets those have work whom all others require by now.
    fn look_at_set(&mut self, effects: &mut Vec<Effect>) {
        self.let_queued_join();
        if self.gate != Gate::Open || self.waiting.is_empty() || !self.set.is_dirty() {
            return;
        }
        if self.now < self.propagate_at {
            return;
        }
        // With many workers it takes a while, and many of them speak.
        let pause_ms = if self.members.len() > FEW { PROPAGATE_MS } else { 0 };
        self.propagate_at = self.now.plus(pause_ms);
        let silent = |worker: WorkerId| {
            let member = self.workers.get(&worker).and_then(|seat| self.members.get(seat));
            !member.is_some_and(Member::is_healthy)
        };
        self.set.propagate(silent);
        let permitted =
            |seat: &&Seat| self.members.get(seat).is_some_and(|member| self.set.permits(member.worker));
        for seat in self.waiting.iter().filter(permitted).cloned().collect::<Vec<Seat>>() {
            self.waiting.remove(&seat);
            if let Some(member) = self.members.get_mut(&seat) {
                member.required = true;
            }
            self.offer(&seat, effects);
        }
        self.let_queued_join();
    }

    // --- stopping ---

    /// Ceases to start and to answer, then saves what runs. Whatever comes from workers from now on is for the
    /// next owner.
    fn on_stop(&mut self, effects: &mut Vec<Effect>) {
        if std::mem::replace(&mut self.stopping, true) {
            return;
        }
        let known = self.gate == Gate::Open && self.shard.may_start();
        self.feed(shard_messages::Input::Halt, effects);
        if !known {
            // What runs is not known, so there is nothing to leave to the next owner.
            effects.push(Effect::Stopped);
            return;
        }
        let mut records = Vec::new();
        for (seat, member) in &self.members {
            // The worker counts its absence by its own clock.
            let absence_ms = if member.is_heard() { health::waited_ms(self.settings.absence_ms) } else { 0 };
            let record = MemberRecord {
                token: member.token,
                life: member.life,
                wait_ms: member.wait_ms.saturating_add(absence_ms),
                running: self
                    .shard
                    .runs_of(member.worker)
                    .filter(|run| !run.task.is_interactive())
                    .cloned()
                    .collect(),
                set: self.set.knows_all(member.worker).then(|| self.set.id()),
            };
            records.push((member.worker, seat.clone(), record));
        }
        for (worker, seat, record) in records {
            self.feed(shard_messages::Input::Member { worker, seat, record }, effects);
        }
        self.feed(shard_messages::Input::Mark { stopped: true }, effects);
    }

    fn on_marked(&mut self, stopped: bool, effects: &mut Vec<Effect>) {
        if stopped {
            let ms = self.settings.absence_ms;
            let heard = self.members.values().filter(|member| member.is_heard());
            effects.extend(heard.filter_map(|m| m.session).map(|session| Effect::Absence { session, ms }));
            effects.push(Effect::Stopped);
        } else if self.gate == Gate::Unmarking {
            self.open(effects);
        }
    }

    // --- inside ---

    fn add(&mut self, seat: Seat, member: impl FnOnce(WorkerId) -> Member) -> WorkerId {
        let worker = WorkerId(self.next_worker);
        self.next_worker += 1;
        self.workers.insert(worker, seat.clone());
        self.members.insert(seat, member(worker));
        worker
    }

    /// The worker whose session this is. While the owner stops, nothing from workers counts any more.
    fn worker_of(&self, session: SessionId) -> Option<WorkerId> {
        if self.stopping {
            return None;
        }
        let seat = self.sessions.get(&session)?;
        self.members.get(seat).map(|member| member.worker)
    }

    /// Lets the shard step, and takes out of its effects what is for the owner.
    fn feed(&mut self, input: shard_messages::Input, effects: &mut Vec<Effect>) {
        let mut inner = std::mem::take(&mut self.inner);
        self.shard.step(self.now, input, &mut inner);
        for effect in inner.drain(..) {
            match effect {
                shard_messages::Effect::MemberSaved { worker, wait_ms } => {
                    // An earlier save may say less than the welcome would grant: its own is on the way.
                    let enough = |member: &Member| member.unsaved && wait_ms >= member.wait_ms;
                    let enough = |seat: &Seat| self.members.get(seat).is_some_and(enough);
                    if self.workers.get(&worker).is_some_and(enough) {
                        self.welcome(worker, effects);
                    }
                }
                shard_messages::Effect::Marked { stopped } => self.on_marked(stopped, effects),
                shard_messages::Effect::Wake { at } => self.shard_wake = Some(at),
                shard_messages::Effect::RefuseWorker { worker, refusal } => {
                    self.on_refused_by_shard(worker, refusal, effects);
                }
                other @ (shard_messages::Effect::Save { .. }
                | shard_messages::Effect::Load { .. }
                | shard_messages::Effect::LoadTimers { .. }
                | shard_messages::Effect::LoadParked { .. }
                | shard_messages::Effect::LoadTask { .. }
                | shard_messages::Effect::Due { .. }
                | shard_messages::Effect::Start { .. }
                | shard_messages::Effect::Stop { .. }
                | shard_messages::Effect::Limit { .. }
                | shard_messages::Effect::Warn { .. }
                | shard_messages::Effect::InteractiveOver { .. }
                | shard_messages::Effect::Acknowledge { .. }
                | shard_messages::Effect::Answer { .. }
                | shard_messages::Effect::Finished { .. }
                | shard_messages::Effect::Retried { .. }
                | shard_messages::Effect::Broken { .. }) => effects.push(Effect::Shard(other)),
            }
        }
        if inner.capacity() > self.inner.capacity() {
            self.inner = inner;
        }
    }

    /// What it offered was in order when it said hello, and is no longer.
    fn on_refused_by_shard(&mut self, worker: WorkerId, refusal: Refusal, effects: &mut Vec<Effect>) {
        let Some(seat) = self.workers.get(&worker).cloned() else { return };
        if let Some(session) = self.members.get_mut(&seat).and_then(|member| member.session.take()) {
            self.sessions.remove(&session);
            effects.push(Effect::Refuse { session, refusal, then: Then::Retry });
        }
    }

    /// Asks to be woken for whatever comes next.
    fn settle(&mut self, effects: &mut Vec<Effect>) {
        self.look_at_set(effects);
        if self.members.is_empty() {
            self.look_at_gate(effects);
        }
        if self.members.is_empty() && self.doubt.is_none() {
            self.look_at = None;
        } else if self.look_at.is_none() {
            self.look_at = Some(self.now.plus((self.settings.thresholds.heartbeat_ms / 2).max(1)));
        }
        let propagate = (!self.waiting.is_empty() && self.set.is_dirty()).then_some(self.propagate_at);
        let propagate = propagate.filter(|_| self.gate == Gate::Open);
        let safe = self.doubt.filter(|until| self.now < *until);
        let next = [self.shard_wake, self.look_at, propagate, safe].into_iter().flatten().min();
        if let Some(at) = next
            && self.wake.is_none_or(|wake| at < wake)
        {
            self.wake = Some(at);
            effects.push(Effect::Shard(shard_messages::Effect::Wake { at }));
        }
    }

    /// What must always be true between steps, beyond what is true of the shard.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (session, seat) in &self.sessions {
            if self.members.get(seat).is_none_or(|member| member.session != Some(*session)) {
                return Err(format!("session {session} is of {seat}, which does not know it"));
            }
        }
        for (seat, member) in &self.members {
            if self.workers.get(&member.worker) != Some(seat) {
                return Err(format!("{seat} is worker {}, which is another", member.worker));
            }
            if member.offered > 0 && !member.is_usable() {
                return Err(format!("{seat} is offered as {} slots, but may get no work", member.offered));
            }
        }
        for (seat, member) in &self.members {
            if member.worked && !member.required {
                return Err(format!("{seat} has had work, and waits until the others know it"));
            }
        }
        if self.workers.len() != self.members.len() {
            return Err("a worker has no seat".into());
        }
        Ok(())
    }
}

/// Every owner that a worker shows to have obeyed.
fn obeyed(hello: &Hello) -> impl Iterator<Item = Incarnation> {
    let runs = hello.running.iter().chain(hello.ended.iter().map(|(run, _)| run));
    let sets = hello.set.iter().map(|set| set.incarnation);
    runs.map(|run| run.fence.incarnation()).chain(sets).chain([hello.obeyed])
}

/// What this effect has a worker stop.
fn stop_of(effect: &Effect, of: WorkerId) -> Option<(TaskId, Fence)> {
    match effect {
        Effect::Shard(shard_messages::Effect::Stop { worker, task, fence }) if *worker == of => {
            Some((*task, *fence))
        }
        Effect::Shard(_)
        | Effect::Welcome { .. }
        | Effect::Refuse { .. }
        | Effect::Answer { .. }
        | Effect::Absence { .. }
        | Effect::Drain { .. }
        | Effect::Doubt { .. }
        | Effect::Stopped
        | Effect::Note(_) => None,
    }
}

/// How the start gate stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateView {
    /// Tasks may start.
    pub open: bool,
    /// Workers that this owner has not heard yet.
    pub absent: Vec<Seat>,
    /// When they are given up at the latest, in milliseconds from now.
    pub opens_in_ms: u64,
    /// The store may be an old copy: there may be workers that it does not know.
    pub in_doubt: bool,
    /// Workers that it counts on.
    pub members: usize,
}

/// How a worker stands.
#[derive(Clone, Debug)]
pub struct MemberView<'a> {
    /// Its seat.
    pub seat: &'a Seat,
    /// Its number.
    pub worker: WorkerId,
    /// Its life.
    pub life: Life,
    /// Its connection.
    pub session: Option<SessionId>,
    /// None: this owner has not heard it.
    pub health: Option<Health>,
    /// Slots it offers.
    pub slots: u32,
    /// Slots that are held.
    pub running: u32,
    /// The queues it serves.
    pub queues: &'a [(QueueName, crate::backlog::Weight)],
    /// Since it was last heard.
    pub silent_ms: u64,
    /// Until it counts as lost, if it stays silent.
    pub lost_in_ms: u64,
    /// It was asked to take no more work.
    pub draining: bool,
    /// All others have required it, so it may have work.
    pub required: bool,
    /// Why it gets no work, if it gets none.
    pub why_not: Option<Cow<'static, str>>,
}

#[cfg(test)]
mod tests;
