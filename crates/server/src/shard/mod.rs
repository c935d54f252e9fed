//! The loop around an owner. A round takes what has come (the end of a commit, reads, workers, clients, time),
//! steps through it, sends what the owner wants sent, and, if no commit is on its way, closes what has changed
//! into the next one. So the next batch gathers and is stepped while the last one is being written, and
//! heartbeats are answered in the round they come in, whatever the store does.
//!
//! If a commit fails, the owner is dropped with all it knows and the shard is taken again: whoever waits for an
//! answer is told that it is not known, and every worker says hello again.
//!
//! `telling` is what those who watch are told, `view` what people see of it all, `operating` what they do by hand,
//! `interactive` what has to do with runs that somebody talks to.

mod interactive;
mod operating;
mod telling;
mod view;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use evenhand_api::{convert, errors, v1};
use evenhand_core::life::End;
use evenhand_core::messages::Start;
use evenhand_core::names::{
    CommitId, Epoch, Fence, Millis, QueueId, RequestId, SessionId, ShardId, StoreId, TaskId, WorkerId,
};
use evenhand_core::owner::messages::{Effect, Input, Note, Then};
use evenhand_core::owner::{GateView, Identity, Owner};
use evenhand_core::timers::due_at;
use evenhand_core::{Answer, NewTask, Refusal, Run, Task, Work};
use evenhand_core::{Effect as ShardEffect, Input as ShardInput};
use evenhand_store::{Store, StoreError};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info, warn};

use crate::clock::Clock;
use crate::events::{Events, LOST, Of, Recent, Watched};
use crate::mailbox::{self, FromWorker, Inbox, KeyRequest, Operated, Reply, Request, RunEnded};
use crate::metrics::{Metrics, Starts};
use crate::outbox::{Gathering, Outbox};
use crate::{Config, ServerError};
use interactive::Asking;
pub(crate) use interactive::Talks;
use operating::Operator;
use telling::{NOT_STARTED, waited_for};
use view::gate_text;

/// The one shard of a server with an embedded store.
pub(crate) const SHARD: ShardId = ShardId(0);
/// Messages of workers and of clients that one round takes at most, so that a round stays short.
const WORKERS_PER_ROUND: usize = 1_024;
const REQUESTS_PER_ROUND: usize = 256;
/// Changes that close a batch although more could be taken in: a commit should stay a few megabytes.
const BATCH_CHANGES: usize = 20_000;
/// How often the store is asked whether it has room.
const ROOM_EVERY: Duration = Duration::from_millis(100);
/// How often watchers who have left are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// The same for those of attached tasks, which are canceled when nobody watches them.
const UNWATCHED_EVERY: Duration = Duration::from_millis(500);
/// Between two tries to take the shard.
const TAKE_AGAIN: Duration = Duration::from_millis(100);
const TAKE_AGAIN_MAX: Duration = Duration::from_secs(5);
/// Whoever asks while the shard is being taken waits for so long before they are refused: mostly it is taken
/// sooner, and a server that has just said that it listens has an answer.
const REFUSE_AFTER: Duration = Duration::from_millis(500);
/// Deaths that are kept for the next owner.
const DEATHS: usize = 10_000;
/// How often the payload of a run is asked for before the run is given back.
const WORK_TRIES: u32 = 5;

type Commit = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// What comes back from the store.
#[derive(Debug)]
enum Back {
    Input(ShardInput),
    Work {
        session: SessionId,
        run: Run,
        work: Option<Work>,
    },
    /// A task that somebody watches, to be told anew.
    Watched(Box<Task>),
}

/// Why an owner is no longer one.
enum Over {
    Stopped,
    Again(StoreError),
    /// A worker has obeyed an owner of this epoch, of which the store knows nothing.
    Doubted(Epoch),
}

/// A worker's connection.
#[derive(Debug)]
struct Link {
    outbox: Outbox,
    /// The session as the worker counts it.
    numbered: u64,
    address: String,
    gathering: Gathering,
    /// Starts that were sent on it.
    starts: u64,
    /// Queues whose names it has been told.
    named: HashSet<QueueId>,
    /// Who was let in on it.
    worker: Option<WorkerId>,
}

/// The loop. See the module's text.
pub(crate) struct Loop<S> {
    config: Config,
    store: S,
    inbox: Inbox,
    talks: Talks,
    metrics: Arc<Metrics>,
    clock: Clock,
    events: Events,
    starts: Starts,
    /// The server was told to stop.
    stopping: bool,
    /// Workers whose death was told while there was no owner to hear it.
    deaths: Vec<FromWorker>,
    identity: (u64, StoreId),
    /// An epoch of which the store knew nothing when a worker showed it.
    shown: Option<Epoch>,
    /// How the start gate stood when those who watch were last told.
    gate_told: Option<GateView>,
}

/// A number that nobody can know.
fn random() -> u64 {
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id())
}

impl<S: Store + Clone + 'static> Loop<S> {
    pub(crate) fn new(
        config: Config,
        store: S,
        inbox: Inbox,
        talks: Talks,
        metrics: Arc<Metrics>,
        clock: Clock,
    ) -> Loop<S> {
        let random = random();
        let store_id = self::random() | 1;
        let now = clock.now();
        Loop {
            config,
            store,
            inbox,
            talks,
            metrics,
            clock,
            events: Events::new(SHARD, random),
            starts: Starts::new(now),
            stopping: false,
            deaths: Vec::new(),
            identity: (random, StoreId(store_id)),
            shown: None,
            gate_told: None,
        }
    }

    /// Owns the shard until the server stops.
    pub(crate) async fn run(mut self) -> Result<(), ServerError> {
        loop {
            let Some((owner, effects)) = self.take().await? else { return Ok(()) };
            let over = Owned::new(&mut self, owner).run(effects).await;
            // No interactive run outlives its owner.
            self.talks.registry.all_over(v1::Over::Lost);
            match over? {
                Over::Stopped => return Ok(()),
                Over::Again(why) if self.stopping => {
                    return Err(ServerError::Store(format!("{why}; what runs is not saved")));
                }
                Over::Again(why) => warn!(%why, "a commit failed: the shard is dropped and taken again"),
                Over::Doubted(epoch) => {
                    warn!(%epoch, "a worker has obeyed an owner that this store knows nothing of: the store has been \
                          set back to an old copy; the shard is taken again, and the start gate is shut");
                }
            }
        }
    }

    /// Takes the shard, however long that needs. None: the server stops.
    async fn take(&mut self) -> Result<Option<(Owner, Vec<Effect>)>, ServerError> {
        let mut pause = TAKE_AGAIN;
        let shown = self.shown;
        let store = self.store.clone();
        loop {
            let taking = async {
                let taken = store.take(SHARD, shown).await;
                if taken.is_err() {
                    tokio::time::sleep(pause).await;
                }
                taken
            };
            let refusing = async {
                tokio::time::sleep(REFUSE_AFTER).await;
                refuse_all(&mut self.inbox, &mut self.deaths).await;
            };
            let taken = tokio::select! {
                taken = taking => taken,
                () = refusing => return Ok(None),
            };
            match taken {
                Ok(taken) => {
                    self.shown = None;
                    let identity = Identity {
                        epoch: taken.epoch,
                        seed: self.identity.0,
                        store: self.identity.1,
                        nonce: random(),
                    };
                    let mut effects = Vec::new();
                    let settings = self.config.settings.clone();
                    // What was due stays due.
                    let behind = self.clock.not_before(due_at(taken.metadata.timers.ack));
                    if behind > 0 {
                        warn!(
                            ms = behind,
                            "the system's clock is behind what the store has seen; it is taken to be as late as that"
                        );
                    }
                    let owner =
                        Owner::new(self.clock.now(), settings, identity, taken.metadata, &mut effects);
                    let owner =
                        owner.map_err(|what| ServerError::Store(format!("the store is damaged: {what}")))?;
                    let gate = owner.gate();
                    info!(epoch = %taken.epoch, workers = gate.members, "the shard is taken");
                    if let Some(why) = taken.doubt {
                        warn!(%why, "the store is taken for an old copy of itself");
                    }
                    if gate.in_doubt {
                        warn!("the start gate is shut: {}", gate_text(&gate));
                    } else if !gate.open && !gate.absent.is_empty() {
                        info!("the start gate is shut: {}", gate_text(&gate));
                    }
                    return Ok(Some((owner, effects)));
                }
                Err(why @ (StoreError::Corrupt { .. } | StoreError::Fenced { .. })) => {
                    error!(%why, "the shard cannot be taken");
                    return Err(ServerError::Store(why.to_string()));
                }
                Err(why @ (StoreError::Unavailable { .. } | StoreError::Full { .. })) => {
                    warn!(%why, "the shard cannot be taken yet");
                    pause = (pause * 2).min(TAKE_AGAIN_MAX);
                }
            }
        }
    }
}

/// Answers everybody that the shard is not to be had, and keeps what is said only once. Returns when the server
/// stops.
async fn refuse_all(inbox: &mut Inbox, deaths: &mut Vec<FromWorker>) {
    loop {
        tokio::select! {
            Some(request) = inbox.requests.recv() => refuse(request),
            Some(message) = inbox.workers.recv() => match message {
                FromWorker::Stop => return,
                FromWorker::Hello { outbox, hello, .. } => {
                    let _ = outbox.push(die(0, hello.session, &mailbox::taking(), Then::Retry));
                    outbox.close();
                }
                FromWorker::Beat { .. }
                | FromWorker::Offer { .. }
                | FromWorker::Ended { .. }
                | FromWorker::Refused { .. }
                | FromWorker::Output { .. }
                | FromWorker::Progress { .. }
                | FromWorker::Closed { .. } => {}
                // Beyond the bound they are waited for, as if nothing had been said.
                death @ FromWorker::Dead { .. } if deaths.len() < DEATHS => deaths.push(death),
                FromWorker::Dead { .. } => {}
            },
            else => return,
        }
    }
}

fn refuse(request: Request) {
    match request {
        Request::Enqueue { reply, .. }
        | Request::Cancel { reply, .. }
        | Request::Shorten { reply, .. }
        | Request::Replay { reply, .. }
        | Request::SetQueue { reply, .. }
        | Request::SetKey { reply, .. } => reply.send(Err(mailbox::taking())),
        Request::Operate { reply, .. } => drop(reply.send(Err(mailbox::taking()))),
        Request::Interactive { reply, .. } => drop(reply.send(Err(mailbox::taking()))),
        // Their callers hear that there is no answer.
        Request::Explain { .. }
        | Request::Snapshot { .. }
        | Request::QueueName { .. }
        | Request::Ended { .. }
        | Request::Watch { .. }
        | Request::Queue { .. }
        | Request::Settings { .. }
        | Request::Look { .. } => {}
    }
}

fn die(epoch: u64, session: u64, refusal: &Refusal, then: Then) -> v1::Down {
    let die = v1::Die { error: Some(errors::error(refusal)), then: convert::then(then).into() };
    v1::Down { epoch, session, die: Some(die), ..v1::Down::default() }
}

/// A task that is being accepted, and when it is due if that is later.
#[derive(Clone, Debug)]
struct Accepting {
    of: Of,
    due: Option<Millis>,
}

/// An owner and all that depends on it: dropped together.
struct Owned<'a, S> {
    shell: &'a mut Loop<S>,
    owner: Owner,
    links: HashMap<SessionId, Link>,
    /// The session of each worker's latest welcome.
    reach: HashMap<WorkerId, SessionId>,
    /// Sessions for which something has gathered.
    gathered: Vec<SessionId>,
    replies: HashMap<RequestId, Reply>,
    /// Tasks that are being accepted and that somebody watches by a filter, with what they will be.
    accepting: HashMap<RequestId, Vec<Accepting>>,
    /// The last that runs have said of how far they are.
    progress: HashMap<TaskId, (Fence, v1::Progress)>,
    /// Runs whose time was cut, as far as it was told: to what. A worker that comes back is told again, and nobody else.
    cuts: HashMap<TaskId, (Fence, u64)>,
    next_request: u64,
    /// Runs whose payload is being read, and whether they were stopped meanwhile.
    fetching: HashMap<(TaskId, Fence), bool>,
    /// Those who want to talk to a run.
    asking: Asking,
    commit: Option<(CommitId, Instant, Commit)>,
    /// Commits that were begun, and that are durable.
    sealed: u64,
    durable: u64,
    /// Who asked how a task ended, and after which commit that is known.
    asked: Vec<(u64, TaskId, oneshot::Sender<Option<Recent>>)>,
    /// What was done for operators, and after which commit it is durable.
    operated: Vec<(u64, Operated, Operator)>,
    to_back: mpsc::UnboundedSender<Back>,
    back: Option<mpsc::UnboundedReceiver<Back>>,
    wake: Option<Millis>,
    room: bool,
    stopping: bool,
    stopped: bool,
    broken: Option<String>,
    /// A worker has obeyed an owner of this epoch, of which the store knows nothing.
    doubted: Option<Epoch>,
}

impl<'a, S: Store + Clone + 'static> Owned<'a, S> {
    fn new(shell: &'a mut Loop<S>, owner: Owner) -> Owned<'a, S> {
        let (to_back, back) = mpsc::unbounded_channel();
        Owned {
            shell,
            owner,
            links: HashMap::new(),
            reach: HashMap::new(),
            gathered: Vec::new(),
            replies: HashMap::new(),
            accepting: HashMap::new(),
            progress: HashMap::new(),
            cuts: HashMap::new(),
            next_request: 0,
            fetching: HashMap::new(),
            asking: Asking::default(),
            commit: None,
            sealed: 0,
            durable: 0,
            asked: Vec::new(),
            operated: Vec::new(),
            to_back,
            back: Some(back),
            wake: None,
            room: true,
            stopping: false,
            stopped: false,
            broken: None,
            doubted: None,
        }
    }

    async fn run(mut self, mut effects: Vec<Effect>) -> Result<Over, ServerError> {
        let mut from_workers = Vec::with_capacity(WORKERS_PER_ROUND);
        let mut requests = Vec::with_capacity(REQUESTS_PER_ROUND);
        let Some(mut back) = self.back.take() else { return Ok(Over::Stopped) };
        for death in std::mem::take(&mut self.shell.deaths) {
            self.on_worker(death, &mut effects);
        }
        self.shell.gate_told.get_or_insert_with(|| waited_for(self.owner.gate()));
        let (mut next_room, mut next_sweep) = (Instant::now(), Instant::now() + SWEEP_EVERY);
        let mut next_turn = Instant::now() + Starts::TURN_EVERY;
        let mut next_unwatched = Instant::now() + UNWATCHED_EVERY;
        for task in self.shell.events.attached().collect::<Vec<_>>() {
            self.step(Input::Shard(ShardInput::Watched { task, now: true }), &mut effects);
        }
        loop {
            self.perform(&mut effects);
            self.send_gathered();
            if self.commit.is_none() {
                self.owner.seal(&mut effects);
                self.perform(&mut effects);
            }
            if let Some(what) = self.broken.take() {
                error!(what, "the store contradicts itself");
                return Err(ServerError::Store(what));
            }
            if let Some(shown) = self.doubted.filter(|_| self.commit.is_none() && !self.stopping) {
                return self.doubt(shown).await;
            }
            if self.stopped && self.commit.is_none() {
                self.send_gathered();
                self.links.values().for_each(|link| link.outbox.close());
                while let Ok(request) = self.shell.inbox.requests.try_recv() {
                    self.on_request(request, &mut effects); // which says that the server stops
                }
                return Ok(Over::Stopped);
            }
            let now = self.shell.clock.now();
            let sleep = self.wake.map_or(ROOM_EVERY, |at| Duration::from_millis(at.0.saturating_sub(now.0)));
            let sleep = sleep.min(next_room.saturating_duration_since(Instant::now()));
            let mut committed = None;
            tokio::select! {
                biased;
                result = commit_of(&mut self.commit) => committed = Some(result),
                Some(back) = back.recv() => self.on_back(back, &mut effects),
                heard = self.shell.inbox.workers.recv_many(&mut from_workers, WORKERS_PER_ROUND) => {
                    if heard == 0 {
                        from_workers.push(FromWorker::Stop); // nobody is left who could say it
                    }
                }
                1.. = self.shell.inbox.requests.recv_many(&mut requests, REQUESTS_PER_ROUND) => {}
                Some(run) = self.shell.talks.hung_up.recv() => self.on_hangup(run, &mut effects),
                () = tokio::time::sleep(sleep) => {}
            }
            if let Some(result) = committed {
                match self.on_committed(result, &mut effects) {
                    Ok(()) => {}
                    Err(why @ (StoreError::Fenced { .. } | StoreError::Corrupt { .. })) => {
                        error!(%why, "this server cannot go on");
                        self.close_sessions();
                        return Err(ServerError::Store(why.to_string()));
                    }
                    Err(why @ (StoreError::Unavailable { .. } | StoreError::Full { .. })) => {
                        self.close_sessions();
                        return Ok(Over::Again(why));
                    }
                }
            }
            while let Ok(message) = back.try_recv() {
                self.on_back(message, &mut effects);
            }
            take_more(&mut self.shell.inbox.workers, &mut from_workers, WORKERS_PER_ROUND);
            for message in from_workers.drain(..) {
                self.on_worker(message, &mut effects);
            }
            if self.owner.shard().unsealed() < BATCH_CHANGES {
                take_more(&mut self.shell.inbox.requests, &mut requests, REQUESTS_PER_ROUND);
            }
            for request in requests.drain(..) {
                self.on_request(request, &mut effects);
            }
            let now = self.shell.clock.now();
            if self.wake.is_some_and(|at| at <= now) {
                self.wake = None;
                self.step(Input::Tick, &mut effects);
            }
            if Instant::now() >= next_room {
                next_room = Instant::now() + ROOM_EVERY;
                self.look_at_room(&mut effects);
            }
            if Instant::now() >= next_sweep {
                next_sweep = Instant::now() + SWEEP_EVERY;
                self.shell.events.sweep(self.shell.clock.now());
            }
            if Instant::now() >= next_unwatched {
                next_unwatched = Instant::now() + UNWATCHED_EVERY;
                for task in self.shell.events.unwatched() {
                    self.step(Input::Shard(ShardInput::Watched { task, now: false }), &mut effects);
                }
                self.look_at_gate();
            }
            if Instant::now() >= next_turn {
                next_turn = Instant::now() + Starts::TURN_EVERY;
                self.shell.starts.turn(self.shell.clock.now());
            }
        }
    }

    /// Whether the store still is this owner's: then it has been set back, and is taken anew. If not, another server has
    /// it, and the worker has only been there before.
    async fn doubt(mut self, shown: Epoch) -> Result<Over, ServerError> {
        let checked = self.shell.store.commit(SHARD, self.owner.shard().epoch(), Vec::new()).await;
        self.close_sessions();
        match checked {
            Ok(()) => Ok(Over::Doubted(shown)),
            Err(why @ (StoreError::Fenced { .. } | StoreError::Corrupt { .. })) => {
                error!(%why, "this server cannot go on");
                Err(ServerError::Store(why.to_string()))
            }
            Err(why @ (StoreError::Unavailable { .. } | StoreError::Full { .. })) => Ok(Over::Again(why)),
        }
    }

    fn step(&mut self, input: Input, effects: &mut Vec<Effect>) {
        self.owner.step(self.shell.clock.now(), input, effects);
    }

    fn look_at_room(&mut self, effects: &mut Vec<Effect>) {
        let room = self.shell.store.room();
        if room.is_ok() != self.room {
            self.room = room.is_ok();
            match room {
                Ok(()) => info!("the store has room again: tasks are accepted"),
                Err(why) => warn!(%why, "no new tasks are accepted; what was accepted goes on"),
            }
            self.step(Input::Shard(ShardInput::Room { enough: self.room }), effects);
        }
    }

    fn on_committed(
        &mut self,
        result: Result<(), StoreError>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), StoreError> {
        let Some((commit, began, _)) = self.commit.take() else { return Ok(()) };
        result?;
        self.shell.metrics.committed(began.elapsed());
        self.step(Input::Shard(ShardInput::Committed { commit }), effects);
        self.perform(effects);
        self.durable += 1;
        self.answer_asked();
        self.answer_operators();
        Ok(())
    }

    /// Says how tasks ended, where that is known by now.
    fn answer_asked(&mut self) {
        for (after, task, reply) in std::mem::take(&mut self.asked) {
            if after <= self.durable {
                drop(reply.send(self.shell.events.recent(task).cloned()));
            } else {
                self.asked.push((after, task, reply));
            }
        }
    }

    fn close_sessions(&mut self) {
        let epoch = self.owner.shard().epoch().0;
        for link in self.links.values() {
            let _ = link.outbox.push(die(epoch, link.numbered, &mailbox::taking(), Then::Retry));
            link.outbox.close();
        }
    }

    // --- what comes in ---

    fn on_back(&mut self, back: Back, effects: &mut Vec<Effect>) {
        match back {
            Back::Input(input) => self.step(Input::Shard(input), effects),
            Back::Watched(task) => self.tell_again(*task),
            Back::Work { session, mut run, work } => {
                let stopped = self.fetching.remove(&(run.task, run.fence));
                // Its time may have been cut while its payload was read.
                let as_it_is = self.owner.shard().run(run.task).filter(|other| other.fence == run.fence);
                if let Some(now) = as_it_is.filter(|now| now.limit_ms > 0) {
                    (run.limit_ms, run.terms) = (now.limit_ms, now.terms.clone());
                }
                match work {
                    Some(work) if stopped == Some(false) => self.send_start(session, &run, work, None),
                    Some(_) | None => {
                        let (task, fence) = (run.task, run.fence);
                        self.step(Input::Refused { session, task, fence }, effects);
                    }
                }
            }
        }
    }

    fn on_worker(&mut self, message: FromWorker, effects: &mut Vec<Effect>) {
        match message {
            FromWorker::Hello { session, hello, results, outbox, address } => {
                let numbered = hello.session;
                self.links.insert(
                    session,
                    Link {
                        outbox,
                        numbered,
                        address,
                        gathering: Gathering::default(),
                        starts: 0,
                        named: HashSet::new(),
                        worker: None,
                    },
                );
                self.step(Input::Hello { session, hello, endings: results }, effects);
            }
            FromWorker::Beat { session, beat } => self.step(Input::Beat { session, beat }, effects),
            FromWorker::Offer { session, slots } => self.step(Input::Offer { session, slots }, effects),
            FromWorker::Ended { session, ended } => {
                for RunEnded { task, fence, attempt, end, ending } in ended {
                    self.count_time(task, fence, ending.ran_ms);
                    self.step(Input::Ended { session, task, fence, attempt, end, ending }, effects);
                }
            }
            FromWorker::Refused { session, task, fence } => {
                self.step(Input::Refused { session, task, fence }, effects);
            }
            FromWorker::Output { task, fence, lines, dropped } => self.on_output(task, fence, lines, dropped),
            FromWorker::Progress { task, fence, progress } => self.on_progress(task, fence, progress),
            FromWorker::Closed { session } => {
                self.unlink(session);
                self.step(Input::Closed { session }, effects);
            }
            FromWorker::Dead { seat, token, process, drained } => {
                self.step(Input::Dead { seat, token, process, drained }, effects);
            }
            FromWorker::Stop => {
                self.stopping = true;
                self.shell.stopping = true;
                self.step(Input::Stop, effects);
            }
        }
    }

    /// Where keys share time, what they got is seen by how long their runs took.
    fn count_time(&mut self, task: TaskId, fence: Fence, ran_ms: Option<u64>) {
        let run = self.owner.shard().run(task).filter(|run| run.fence == fence && run.charge.timed);
        if let Some(run) = run {
            let now = self.shell.clock.now();
            let since_ms = now.0.saturating_sub(run.started.0);
            let took_ms = ran_ms.unwrap_or(since_ms).min(since_ms);
            self.shell.starts.took(run.lane.queue, &run.key, took_ms, now);
        }
    }

    /// Forgets a connection. Its worker is out of reach until it is let in on another.
    fn unlink(&mut self, session: SessionId) -> Option<Link> {
        let link = self.links.remove(&session)?;
        if let Some(worker) = link.worker
            && self.reach.get(&worker) == Some(&session)
        {
            self.reach.remove(&worker);
        }
        Some(link)
    }

    fn queue_name(&self, queue: QueueId) -> String {
        self.owner.shard().queue_name(queue).map_or_else(String::new, |name| name.as_str().into())
    }

    fn on_request(&mut self, request: Request, effects: &mut Vec<Effect>) {
        match request {
            Request::Enqueue { reply, .. }
            | Request::Cancel { reply, .. }
            | Request::Shorten { reply, .. }
            | Request::Replay { reply, .. }
            | Request::SetQueue { reply, .. }
            | Request::SetKey { reply, .. }
                if self.stopping =>
            {
                reply.send(Err(mailbox::stopping()));
            }
            Request::Operate { reply, .. } if self.stopping => drop(reply.send(Err(mailbox::stopping()))),
            Request::Operate { what, reply } => self.operate(what, reply, effects),
            Request::Interactive { reply, .. } if self.stopping => drop(reply.send(Err(mailbox::stopping()))),
            Request::Interactive { queue, ask, terminal, reply } => {
                self.ask_interactive(queue, ask, terminal, reply, effects);
            }
            Request::Enqueue { queue, tasks, once, reply } => {
                let request = self.await_answer(reply);
                if self.shell.events.has_filters() {
                    let attempts = self.owner.shard().settings(&queue).settings.max_attempts;
                    let now = self.shell.clock.now();
                    let of = |task: &NewTask| {
                        let (key, attempts) = (task.key.clone(), task.max_attempts.unwrap_or(attempts));
                        let (queue, priority) = (queue.clone(), task.priority);
                        let of = Of { queue, key, priority, attempts: Some((1, attempts)) };
                        Accepting { of, due: due(task.start, now) }
                    };
                    self.accepting.insert(request, tasks.iter().map(of).collect());
                }
                self.step(Input::Shard(ShardInput::Enqueue { request, queue, tasks, once }), effects);
            }
            Request::Cancel { task, reply } => {
                let request = self.await_answer(reply);
                self.step(Input::Shard(ShardInput::Cancel { request, task }), effects);
            }
            Request::Shorten { task, max_duration_ms, reply } => {
                let request = self.await_answer(reply);
                self.step(Input::Shard(ShardInput::Shorten { request, task, max_duration_ms }), effects);
            }
            Request::Replay { task, reply } => {
                let request = self.await_answer(reply);
                if self.shell.events.has_filters()
                    && let Some(queue) = self.owner.shard().queue_name(task.lane.queue).cloned()
                {
                    let (priority, attempts) = (task.lane.priority, Some((1, task.max_attempts)));
                    let of = Of { queue, key: task.key.clone(), priority, attempts };
                    self.accepting.insert(request, vec![Accepting { of, due: None }]);
                }
                self.step(Input::Shard(ShardInput::Replay { request, task: task.id }), effects);
            }
            Request::SetQueue { name, change, version, changed, reply } => {
                // What stays as it is and what is changed are put together here, in one step with the check of the
                // version: nobody can change them in between.
                let before = self.owner.shard().settings(&name).settings;
                match convert::changed(before, &change) {
                    Ok(settings) => {
                        drop(changed.send(settings.clone()));
                        let request = self.await_answer(reply);
                        let configure = ShardInput::Configure { request, queue: name, settings, version };
                        self.step(Input::Shard(configure), effects);
                    }
                    Err(refusal) => reply.send(Err(refusal.within("settings"))),
                }
            }
            Request::SetKey { queue, key, set, reply } => {
                let request = self.await_answer(reply);
                let input = match set {
                    KeyRequest::Change(change) => ShardInput::SetKey { request, queue, key, change },
                    KeyRequest::Paused(paused) => ShardInput::PauseKey { request, queue, key, paused },
                };
                self.step(Input::Shard(input), effects);
            }
            Request::Settings { name, reply } => drop(reply.send(self.owner.shard().settings(&name))),
            Request::QueueName { queue, reply } => {
                drop(reply.send(self.owner.shard().queue_name(queue).cloned()));
            }
            Request::Snapshot { queue, reply } => {
                drop(reply.send(self.owner.shard().snapshot(&queue, self.shell.clock.now())));
            }
            Request::Explain { tasks, reply } => {
                drop(reply.send(self.explain(tasks)));
            }
            Request::Ended { task, reply } => match self.shell.events.recent(task) {
                Some(recent) => drop(reply.send(Some(recent.clone()))),
                // Its end may be in a commit that is on its way, or about to be.
                None => {
                    let open = u64::from(self.owner.shard().unsealed() > 0);
                    self.asked.push((self.sealed + open, task, reply));
                    self.answer_asked();
                }
            },
            Request::Watch { what, after, lingers, attached, reply } => {
                let task = match what {
                    Watched::Task(task) if attached => Some(task),
                    Watched::Task(_) | Watched::Filter(..) => None,
                };
                let began = self.shell.events.watch(what, after.as_deref(), lingers);
                if let Some(task) = task.filter(|_| began.is_some())
                    && self.shell.events.attach(task)
                {
                    self.step(Input::Shard(ShardInput::Watched { task, now: true }), effects);
                }
                drop(reply.send(began));
            }
            Request::Queue { name, keys, reply } => drop(reply.send(self.queue(&name, keys))),
            Request::Look { reply } => drop(reply.send(self.view())),
        }
    }

    fn await_answer(&mut self, reply: Reply) -> RequestId {
        self.next_request += 1;
        let request = RequestId(self.next_request);
        self.replies.insert(request, reply);
        request
    }

    // --- what goes out ---

    fn perform(&mut self, effects: &mut Vec<Effect>) {
        for effect in effects.drain(..) {
            match effect {
                Effect::Shard(effect) => self.perform_shard(effect),
                Effect::Welcome { session, worker, store, nonce, thresholds, set } => {
                    self.reach.insert(worker, session);
                    if let Some(link) = self.links.get_mut(&session) {
                        link.worker = Some(worker);
                    }
                    let thresholds = Some(convert::thresholds(&thresholds));
                    let worker_set = set.map(convert::worker_set);
                    let welcome = v1::Welcome { store_id: store.0, nonce, thresholds, worker_set };
                    self.gather(session, |gathering| gathering.down.welcome = Some(welcome));
                }
                Effect::Refuse { session, refusal, then } => {
                    match then {
                        Then::Retry => debug!(why = %refusal, "a worker's session is ended"),
                        Then::Exit | Then::Forget => info!(why = %refusal, ?then, "a worker is sent away"),
                    }
                    let epoch = self.owner.shard().epoch().0;
                    self.send_gathered();
                    if let Some(link) = self.unlink(session) {
                        let _ = link.outbox.push(die(epoch, link.numbered, &refusal, then));
                        link.outbox.close();
                    }
                }
                Effect::Answer { session, number, set } => {
                    let answer = v1::Answer { number, worker_set: set.map(convert::worker_set) };
                    self.gather(session, |gathering| gathering.down.answer = Some(answer));
                }
                Effect::Absence { session, ms } => {
                    self.gather(session, |gathering| gathering.down.absence_ms = Some(ms));
                }
                Effect::Drain { session } => self.gather(session, |gathering| gathering.down.drain = true),
                Effect::Doubt { shown } => {
                    self.doubted = Some(shown);
                    self.shell.shown = Some(shown);
                }
                Effect::Stopped => self.stopped = true,
                Effect::Note(note) => self.note(&note),
            }
        }
    }

    fn note(&self, note: &Note) {
        if let Note::Lost { runs, why, .. } = note {
            self.shell.metrics.lost(*runs, why);
        }
        match note {
            Note::Joined { seat, life } => info!(%seat, %life, "a worker joins"),
            Note::Lost { seat, life, runs: 0, why } => info!(%seat, %life, why, "a worker is gone"),
            Note::Lost { seat, life, runs, why } => warn!(%seat, %life, runs, why, "a worker is given up"),
            Note::Health { seat, healthy: true } => debug!(%seat, "a worker is healthy"),
            Note::Health { seat, healthy: false } => warn!(%seat, "a worker is silent: it gets no work"),
            Note::GateOpened => info!("the start gate is open"),
        }
    }

    fn perform_shard(&mut self, effect: ShardEffect) {
        match effect {
            ShardEffect::Save { commit, changes } => {
                self.sealed += 1;
                self.shell.metrics.sealed(&changes);
                let (store, epoch) = (self.shell.store.clone(), self.owner.shard().epoch());
                let saving = async move { store.commit(SHARD, epoch, changes).await };
                self.commit = Some((commit, Instant::now(), Box::pin(saving)));
            }
            ShardEffect::Load { load, lane, above, limit } => {
                self.fetch(async move |store| match store.read_lane(SHARD, lane, above, limit).await {
                    Ok(page) => ShardInput::Loaded { load, rows: page.rows, end: page.end },
                    Err(why) => {
                        warn!(%why, "a read failed and is tried again");
                        ShardInput::LoadFailed { load }
                    }
                })
            }
            ShardEffect::LoadTimers { load, above, limit } => {
                self.fetch(async move |store| match store.read_timers(SHARD, above, limit).await {
                    Ok(page) => ShardInput::TimersLoaded { load, rows: page.rows, end: page.end },
                    Err(why) => {
                        warn!(%why, "a read failed and is tried again");
                        ShardInput::LoadFailed { load }
                    }
                })
            }
            ShardEffect::LoadParked { load, lane, key, above, limit } => {
                self.fetch(async move |store| match store.read_parked(SHARD, lane, key, above, limit).await {
                    Ok(page) => ShardInput::ParkedLoaded { load, rows: page.rows, end: page.end },
                    Err(why) => {
                        warn!(%why, "a read failed and is tried again");
                        ShardInput::LoadFailed { load }
                    }
                })
            }
            ShardEffect::LoadTask { load, task } => {
                self.fetch(async move |store| match store.read_task(SHARD, task).await {
                    Ok(task) => ShardInput::TaskLoaded { load, task },
                    Err(why) => {
                        warn!(%why, "a read failed and is tried again");
                        ShardInput::LoadFailed { load }
                    }
                });
            }
            ShardEffect::Start { worker, run, work } => self.start(worker, run, work),
            ShardEffect::Stop { worker, task, fence } => {
                if let Some(stopped) = self.fetching.get_mut(&(task, fence)) {
                    *stopped = true;
                } else {
                    let run = convert::run_id(task, fence);
                    self.gather_for(worker, |gathering| gathering.down.stop.push(run));
                }
            }
            ShardEffect::Limit { worker, task, fence, limit_ms, max_duration_ms } => {
                let run = Some(convert::run_id(task, fence));
                let deadline = v1::Deadline { run, max_duration_ms: limit_ms, asked_ms: max_duration_ms };
                self.gather_for(worker, |gathering| gathering.down.deadlines.push(deadline));
                self.tell_cut(worker, task, fence, limit_ms);
            }
            ShardEffect::Warn { task, fence, grace_ms } => {
                self.shell.talks.registry.warn((task, fence), grace_ms);
            }
            ShardEffect::InteractiveOver { task, fence, why } => self.on_interactive_over((task, fence), why),
            ShardEffect::Acknowledge { worker, task, fence } => {
                let run = convert::run_id(task, fence);
                self.gather_for(worker, |gathering| gathering.down.acknowledged.push(run));
            }
            ShardEffect::Answer { request, answer } => {
                if let Some(accepting) = self.accepting.remove(&request) {
                    match &answer {
                        Ok(Answer::Accepted(ids)) => self.tell_accepted(ids, accepting),
                        Ok(Answer::Replayed(id)) => self.tell_accepted(&[(*id, true)], accepting),
                        Ok(
                            Answer::AcceptedBefore(_)
                            | Answer::Configured(_)
                            | Answer::KeySet
                            | Answer::Shortened(_)
                            | Answer::Interactive { .. }
                            | Answer::KeyPaused(_)
                            | Answer::Canceled
                            | Answer::Stopping,
                        )
                        | Err(_) => {}
                    }
                }
                if let Some(reply) = self.replies.remove(&request) {
                    reply.send(answer);
                } else {
                    self.answer_interactive(request, answer);
                }
            }
            ShardEffect::Retried { task, end, lane, key, attempt, max_attempts, due, error } => {
                let error = match (end, error.as_ref()) {
                    (None, _) => NOT_STARTED,
                    (Some(End::Lost), "") => LOST,
                    (
                        Some(
                            End::Lost
                            | End::Succeeded
                            | End::Failed
                            | End::FailedForGood
                            | End::TimeUp
                            | End::Downgraded,
                        ),
                        error,
                    ) => error,
                };
                self.progress.remove(&task);
                self.cuts.remove(&task);
                if let Some(end) = end {
                    self.shell.metrics.run_ended(end);
                }
                self.tell_waits(task, lane, key, Some((attempt, max_attempts)), due, error);
            }
            ShardEffect::Due { task, lane, key } => self.tell_waits(task, lane, key, None, None, ""),
            ShardEffect::Finished { task, lane, max_attempts, end } => {
                self.finished(task, lane, max_attempts, end);
            }
            ShardEffect::Wake { at } => self.wake = Some(at),
            ShardEffect::Broken { what } => self.broken = Some(what),
            // The owner keeps these to itself.
            ShardEffect::RefuseWorker { .. }
            | ShardEffect::MemberSaved { .. }
            | ShardEffect::Marked { .. } => {}
        }
    }

    fn fetch<F>(&self, read: impl FnOnce(S) -> F + Send + 'static)
    where
        F: Future<Output = ShardInput> + Send + 'static,
    {
        let (store, back) = (self.shell.store.clone(), self.to_back.clone());
        let reading = read(store);
        tokio::spawn(async move { drop(back.send(Back::Input(reading.await))) });
    }

    fn start(&mut self, worker: WorkerId, run: Run, work: Option<Work>) {
        self.shell.starts.count(run.lane.queue, &run.key);
        // A worker that cannot be reached never starts it, and says so by not naming it in its next hello.
        let Some(&session) = self.reach.get(&worker) else { return };
        if run.task.is_interactive() {
            return self.start_interactive(session, run, work);
        }
        self.tell_started(worker, &run);
        match work {
            Some(work) => self.send_start(session, &run, work, None),
            None => {
                self.fetching.insert((run.task, run.fence), false);
                let (store, back) = (self.shell.store.clone(), self.to_back.clone());
                let mut run = run;
                tokio::spawn(async move {
                    let found = fetch_work(&store, run.task).await;
                    let work = found.map(|(work, max_duration_ms)| {
                        if run.limit_ms == 0 {
                            // Its row is of a format that did not say.
                            run.limit_ms = max_duration_ms;
                        }
                        work
                    });
                    drop(back.send(Back::Work { session, run, work }));
                });
            }
        }
    }

    fn send_start(
        &mut self,
        session: SessionId,
        run: &Run,
        work: Work,
        interactive: Option<v1::Interactive>,
    ) {
        let Some(link) = self.links.get_mut(&session) else { return };
        let queue = run.lane.queue;
        let name = if link.named.insert(queue) { self.owner.shard().queue_name(queue) } else { None };
        let name = name.map(|name| v1::QueueName { id: queue.0, name: name.as_str().into() });
        let payload = Bytes::from_owner(work.payload);
        let content_type = work.content_type.as_str().into();
        link.starts += 1;
        let (run, number) = (Some(convert::run(run)), link.starts);
        let files = convert::wire_files(&work.files);
        let start = v1::Start { run, payload, content_type, files, number, interactive };
        self.gather(session, |gathering| {
            gathering.down.queues.extend(name);
            gathering.start(start);
        });
        if self.links.get(&session).is_some_and(|link| link.gathering.is_full()) {
            self.send_gathered();
        }
    }

    fn gather_for(&mut self, worker: WorkerId, what: impl FnOnce(&mut Gathering)) {
        if let Some(&session) = self.reach.get(&worker) {
            self.gather(session, what);
        }
    }

    fn gather(&mut self, session: SessionId, what: impl FnOnce(&mut Gathering)) {
        if let Some(link) = self.links.get_mut(&session) {
            if link.gathering.is_empty() {
                self.gathered.push(session);
            }
            what(&mut link.gathering);
        }
    }

    fn send_gathered(&mut self) {
        let epoch = self.owner.shard().epoch().0;
        for session in self.gathered.drain(..) {
            if let Some(link) = self.links.get_mut(&session) {
                let mut down = std::mem::take(&mut link.gathering).down;
                down.epoch = epoch;
                down.session = link.numbered;
                if !link.outbox.push(down) {
                    // It does not read: its connection is cut, and it says hello again.
                    link.outbox.cut();
                }
            }
        }
    }
}

/// When a task is due that may start then, if that is later than now.
fn due(start: Start, now: Millis) -> Option<Millis> {
    match start {
        Start::Now => None,
        Start::After(ms) => Some(Millis(now.0.saturating_add(ms))),
        Start::At(at) => Some(at).filter(|at| *at > now),
    }
}

/// Waits for the commit that is on its way; for ever, if none is.
async fn commit_of(commit: &mut Option<(CommitId, Instant, Commit)>) -> Result<(), StoreError> {
    match commit {
        Some((_, _, saving)) => saving.await,
        None => std::future::pending().await,
    }
}

/// Takes what else is there.
fn take_more<T>(from: &mut mpsc::Receiver<T>, into: &mut Vec<T>, most: usize) {
    while into.len() < most {
        match from.try_recv() {
            Ok(message) => into.push(message),
            Err(_) => return,
        }
    }
}

/// Reads what a run needs, and how long its task may take. None: it is not to be had, and the run must be given back.
async fn fetch_work<S: Store>(store: &S, task: TaskId) -> Option<(Work, u64)> {
    for n in 0..WORK_TRIES {
        match store.read_task(SHARD, task).await {
            Ok(Some(task)) => {
                let max_duration_ms = task.max_duration_ms();
                let Task { payload, content_type, files, .. } = task;
                return Some((Work { payload, content_type, files }, max_duration_ms));
            }
            Ok(None) => return None,
            Err(why) => {
                warn!(%why, %task, "a payload could not be read");
                tokio::time::sleep(TAKE_AGAIN * 2_u32.pow(n)).await;
            }
        }
    }
    None
}
