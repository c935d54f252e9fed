//! An owner, its store and its workers as a script: who says what when, and what the owner answers.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test looks for one effect among many")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use super::*;
use crate::backlog::{Level, Weight};
use crate::change::{
    Change, KeyRecord, LaneRecord, Place, QueueRecord, RequestRecord, Row, ShelfRecord, Task,
};
use crate::check;
use crate::life::{Backoff, End, Outcome};
use crate::messages::{NewTask, Run};
use crate::names::{CommitId, Key, LaneId, QueueId, RequestId, RequestKey, WorkerSetId};

/// What a store keeps of one shard.
#[derive(Clone, Default)]
struct Tables {
    epoch: u64,
    next_seq: u64,
    queues: BTreeMap<QueueId, QueueRecord>,
    lanes: BTreeMap<LaneId, LaneRecord>,
    keys: BTreeMap<(LaneId, Key), KeyRecord>,
    rows: BTreeMap<(LaneId, Level), Row>,
    tasks: BTreeMap<TaskId, Task>,
    members: BTreeMap<Seat, MemberRecord>,
    requests: BTreeMap<RequestKey, RequestRecord>,
    stopped: bool,
    doubt: Option<u64>,
    store: Option<StoreId>,
    timers: ShelfRecord,
    canceling: BTreeSet<TaskId>,
}

impl Tables {
    fn metadata(&self) -> Metadata {
        Metadata {
            next_seq: self.next_seq,
            queues: self.queues.clone().into_iter().collect(),
            overrides: Vec::new(),
            lanes: self.lanes.clone().into_iter().collect(),
            keys: self.keys.iter().map(|((lane, key), record)| (*lane, key.clone(), *record)).collect(),
            aside: Vec::new(),
            members: self.members.clone().into_iter().collect(),
            stopped: self.stopped,
            doubt: self.doubt,
            requests: self.requests.clone().into_iter().collect(),
            store: self.store,
            timers: self.timers,
            canceling: self.canceling.iter().copied().collect(),
            parked: Vec::new(),
            paused: Vec::new(),
            settings: Vec::new(),
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Accepted(task) => {
                self.rows.extend(task.row().map(|row| ((task.lane, row.level), row)));
                self.tasks.insert(task.id, task);
            }
            Change::Moved { lane, from: Place::Lane(from), to, row, .. } => {
                self.rows.remove(&(lane, from));
                if let Some(record) = self.tasks.get_mut(&row.task) {
                    (record.place, record.attempt) = (to, row.attempt);
                }
                self.rows.insert((lane, row.level), row);
            }
            Change::Finished { task, lane, from, .. } => {
                self.rows.retain(|at, _| Some(*at) != from.level().map(|level| (lane, level)));
                self.tasks.remove(&task);
                self.canceling.remove(&task);
            }
            Change::Canceling { task } => {
                self.canceling.insert(task);
            }
            Change::Timers { record } => self.timers = record,
            Change::Key { lane, key, record: Some(record) } => {
                self.keys.insert((lane, key), record);
            }
            Change::Key { lane, key, record: None } => {
                self.keys.remove(&(lane, key));
            }
            Change::Lane { lane, record } => {
                self.lanes.insert(lane, record);
            }
            Change::Queue { queue, record } => {
                self.queues.insert(queue, record);
            }
            Change::Member { seat, record: Some(record) } => {
                self.members.insert(seat, record);
            }
            Change::Member { seat, record: None } => {
                self.members.remove(&seat);
            }
            Change::Stopped { stopped } => self.stopped = stopped,
            Change::Doubt { left_ms } => self.doubt = left_ms,
            Change::Store { id } => self.store = Some(id),
            Change::Seq { next } => self.next_seq = next,
            Change::Request { key, record } => {
                self.requests.extend(record.map(|record| (key, record)));
            }
            Change::Moved { .. }
            | Change::Shortened { .. }
            | Change::Override { .. }
            | Change::Forgotten { .. }
            | Change::Replayed { .. }
            | Change::Timed(_)
            | Change::Unparked { .. }
            | Change::Parked { .. }
            | Change::Paused { .. }
            | Change::Untimed { .. }
            | Change::Settings { .. } => unreachable!("no script makes it happen"),
        }
    }
}

/// A server with one shard. Commits are durable at once, unless they are held.
#[derive(Clone)]
struct Server {
    tables: Tables,
    owner: Owner,
    settings: Settings,
    now: u64,
    hold: bool,
    held: Vec<(CommitId, Vec<Change>)>,
}

const LOST: u64 = 60_000;

/// Nothing waits for a time here: what fails is tried again at once, and ends are not remembered.
fn plain() -> Settings {
    let backoff = Backoff { first_ms: 0, ..Backoff::default() };
    Settings {
        queue: change::Settings { backoff, retention_ms: 0, ..change::Settings::default() },
        ..Settings::default()
    }
}

impl Server {
    fn start() -> Server {
        Server::take(Tables::default(), plain(), 0)
    }

    fn take(tables: Tables, settings: Settings, now: u64) -> Server {
        Server::take_above(tables, settings, now, 1, None)
    }

    fn take_above(
        mut tables: Tables,
        settings: Settings,
        now: u64,
        nonce: u64,
        shown: Option<Epoch>,
    ) -> Server {
        if let Some(shown) = shown {
            tables.epoch = tables.epoch.max(shown.0);
            tables.doubt = Some(u64::MAX);
        }
        tables.epoch += 1;
        let identity = Identity { epoch: Epoch(tables.epoch), seed: 1, store: StoreId(5), nonce };
        let mut effects = Vec::new();
        let metadata = tables.metadata();
        let owner = Owner::new(Millis(now), settings.clone(), identity, metadata, &mut effects).unwrap();
        let mut server = Server { tables, owner, settings, now, hold: false, held: Vec::new() };
        server.seal(&mut effects);
        server.perform(effects);
        server
    }

    /// Another server begins with this one's store as it was here, which is noticed.
    fn restore(self, after: u64) -> Server {
        Server::take_above(self.tables, self.settings, self.now + after, 2, Some(Epoch(0)))
    }

    /// The same, and nobody notices.
    fn restore_unnoticed(self, after: u64) -> Server {
        Server::take_above(self.tables, self.settings, self.now + after, 2, None)
    }

    /// The owner has been shown this epoch: the store is taken anew.
    fn take_again(self, shown: Epoch) -> Server {
        Server::take_above(self.tables, self.settings, self.now, 3, Some(shown))
    }

    /// The server dies; what it held is lost. Another begins.
    fn crash(self, after: u64) -> Server {
        Server::take(self.tables, self.settings, self.now + after)
    }

    fn crash_with(self, after: u64, thresholds: Thresholds) -> Server {
        Server::take(self.tables, Settings { thresholds, ..self.settings }, self.now + after)
    }

    fn seal(&mut self, effects: &mut Vec<Effect>) {
        self.owner.seal(effects);
        check::owner(&self.owner).unwrap();
    }

    /// Does what an owner wants from its store, in order, and returns what it wants from others.
    fn perform(&mut self, effects: Vec<Effect>) -> Vec<Effect> {
        let (mut todo, mut others) = (VecDeque::from(effects), Vec::new());
        while let Some(effect) = todo.pop_front() {
            let input = match effect {
                Effect::Shard(shard_messages::Effect::Save { commit, changes }) => {
                    if self.hold {
                        self.held.push((commit, changes));
                        continue;
                    }
                    changes.into_iter().for_each(|change| self.tables.apply(change));
                    shard_messages::Input::Committed { commit }
                }
                Effect::Shard(shard_messages::Effect::Load { load, lane, above, limit }) => {
                    let above = (Bound::Excluded((lane, above)), Bound::Unbounded);
                    let rows = self.tables.rows.range(above).take_while(|(at, _)| at.0 == lane);
                    let rows: Vec<Row> = rows.map(|(_, row)| row.clone()).collect();
                    let end = rows.len() <= limit;
                    shard_messages::Input::Loaded { load, rows: rows.into_iter().take(limit).collect(), end }
                }
                Effect::Shard(shard_messages::Effect::LoadTask { load, task }) => {
                    shard_messages::Input::TaskLoaded { load, task: self.tables.tasks.get(&task).cloned() }
                }
                Effect::Shard(shard_messages::Effect::Wake { .. }) | Effect::Note(Note::Joined { .. }) => {
                    continue;
                }
                other => {
                    others.push(other);
                    continue;
                }
            };
            todo.extend(self.step(Input::Shard(input)));
        }
        others
    }

    /// What was held becomes durable.
    fn release(&mut self) -> Vec<Effect> {
        self.hold = false;
        let save = |(commit, changes)| Effect::Shard(shard_messages::Effect::Save { commit, changes });
        let effects = std::mem::take(&mut self.held).into_iter().map(save).collect();
        self.perform(effects)
    }

    fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.owner.step(Millis(self.now), input, &mut effects);
        self.seal(&mut effects);
        effects
    }

    fn tell(&mut self, input: Input) -> Vec<Effect> {
        let effects = self.step(input);
        self.perform(effects)
    }

    /// Time passes, with a look at everybody now and then; these sessions beat meanwhile.
    fn wait_with(&mut self, ms: u64, beating: &mut [&mut Session]) -> Vec<Effect> {
        let (until, mut effects) = (self.now + ms, Vec::new());
        while self.now < until {
            self.now = until.min(self.now + self.settings.thresholds.heartbeat_ms / 2);
            for session in beating.iter_mut() {
                effects.extend(session.beat(self));
            }
            effects.extend(self.tell(Input::Tick));
        }
        effects.retain(|effect| !matches!(effect, Effect::Answer { .. }));
        effects
    }

    fn wait(&mut self, ms: u64) -> Vec<Effect> {
        self.wait_with(ms, &mut [])
    }

    fn put(&mut self, tasks: usize) -> Vec<Effect> {
        let tasks = vec![NewTask::new(Key::shared()); tasks];
        let input =
            shard_messages::Input::Enqueue { request: RequestId(1), queue: queue(), tasks, once: None };
        self.tell(Input::Shard(input))
    }

    fn dead(&mut self, seat: &str, token: u64, process: u64) -> Vec<Effect> {
        self.tell(Input::Dead { seat: Seat::new(seat).unwrap(), token, process, drained: false })
    }

    fn wait_saved(&self, seat: &str) -> u64 {
        self.tables.members[&Seat::new(seat).unwrap()].wait_ms
    }
}

/// A worker as an owner sees it.
#[derive(Clone)]
struct Session {
    hello: Hello,
    id: SessionId,
    beats: u64,
}

fn queue() -> QueueName {
    QueueName::new("q").unwrap()
}

/// A worker with two slots, on machine 1, in its first life.
fn worker(seat: &str) -> Session {
    let hello = Hello {
        seat: Seat::new(seat).unwrap(),
        token: 1,
        life: Life { process: 1, rejoin: 0 },
        session: 0,
        slots: 2,
        queues: vec![(queue(), Weight::ONE)],
        store: None,
        obeyed: Incarnation::default(),
        set: None,
        running: Vec::new(),
        ended: Vec::new(),
    };
    Session { hello, id: SessionId(0), beats: 0 }
}

impl Session {
    fn hello(&mut self, server: &mut Server) -> Vec<Effect> {
        self.hello.session += 1;
        let number: u64 = self.hello.seat.as_str()[1..].parse().unwrap();
        self.id = SessionId(1_000_000 * server.tables.epoch + 1_000 * number + self.hello.session);
        self.beats = 0;
        let input = Input::Hello { session: self.id, hello: self.hello.clone(), endings: Vec::new() };
        let effects = server.tell(input);
        self.learn(server.owner.shard().epoch(), &effects);
        effects
    }

    /// What it is told of the worker set.
    fn learn(&mut self, epoch: Epoch, effects: &[Effect]) {
        for effect in effects {
            if let Effect::Welcome { session, set, .. } | Effect::Answer { session, set, .. } = effect
                && *session == self.id
            {
                self.hello.set = set.or(self.hello.set);
            }
            if let Effect::Welcome { session, nonce, store, .. } = effect
                && *session == self.id
            {
                self.hello.obeyed = Incarnation { epoch, nonce: *nonce };
                self.hello.store = Some(*store);
            }
        }
    }

    fn beat(&mut self, server: &mut Server) -> Vec<Effect> {
        let beat = Beat { number: self.beats + 1, answered: self.beats, set: self.hello.set };
        self.beats += 1;
        let effects = server.tell(Input::Beat { session: self.id, beat });
        self.learn(server.owner.shard().epoch(), &effects);
        effects
    }

    /// Is welcomed, and shows that it has heard it.
    fn join(&mut self, server: &mut Server) -> Vec<Effect> {
        let welcomed = self.hello(server);
        assert!(is_welcome(&welcomed), "{welcomed:?}");
        let mut effects = self.beat(server);
        effects.retain(|effect| !matches!(effect, Effect::Answer { .. }));
        effects
    }

    fn ended(&self, server: &mut Server, run: &Run, end: End) -> Vec<Effect> {
        let Run { task, fence, attempt, .. } = *run;
        let ending = Ending::default();
        server.tell(Input::Ended { session: self.id, task, fence, attempt, end, ending })
    }

    fn later_life(&self) -> Session {
        let mut later = self.clone();
        later.hello.life.process += 1;
        later.hello.session = 0;
        later
    }

    fn on_machine(&self, token: u64) -> Session {
        let mut other = self.clone();
        other.hello.token = token;
        other.hello.session = 100;
        other
    }
}

fn is_welcome(effects: &[Effect]) -> bool {
    effects.iter().any(|effect| matches!(effect, Effect::Welcome { .. }))
}

fn started(effects: &[Effect]) -> Vec<Run> {
    let start = |effect: &Effect| match effect {
        Effect::Shard(shard_messages::Effect::Start { run, .. }) => Some(run.clone()),
        _ => None,
    };
    effects.iter().filter_map(start).collect()
}

fn lost(effects: &[Effect]) -> Vec<&'static str> {
    let lost = |effect: &Effect| match effect {
        Effect::Note(Note::Lost { why, .. }) => Some(*why),
        _ => None,
    };
    effects.iter().filter_map(lost).collect()
}

fn finished(effects: &[Effect]) -> Vec<Outcome> {
    let finished = |effect: &Effect| match effect {
        Effect::Shard(shard_messages::Effect::Finished { end, .. }) => Some(end.outcome),
        _ => None,
    };
    effects.iter().filter_map(finished).collect()
}

fn refused(effects: &[Effect]) -> Option<(&str, Then)> {
    effects.iter().find_map(|effect| match effect {
        Effect::Refuse { refusal, then, .. } => Some((refusal.field.as_str(), *then)),
        _ => None,
    })
}

/// A server, and a worker that runs one task.
fn at_work() -> (Server, Session, Run) {
    let mut server = Server::start();
    let mut w1 = worker("w1");
    w1.join(&mut server);
    let run = started(&server.put(1)).pop().unwrap();
    (server, w1, run)
}

// Scenario 30.
#[test]
fn on_a_store_with_a_saved_worker_a_fresh_one_alone_does_not_open_the_gate() {
    let (server, ..) = at_work();
    let mut server = server.crash(0);
    let mut fresh = worker("w2");
    assert_eq!(started(&fresh.join(&mut server)), []);
    let effects = server.wait_with(LOST - 1, &mut [&mut fresh]);
    assert_eq!(started(&effects), [], "it was started before the safe time");
    assert_eq!(server.owner.gate().absent, [Seat::new("w1").unwrap()]);
    let effects = server.wait_with(1_501, &mut [&mut fresh]);
    assert_eq!((lost(&effects).len(), started(&effects).len()), (1, 1));
}

// Scenario 30, second part.
#[test]
fn the_gate_waits_for_each_saved_worker() {
    let mut server = Server::start();
    let mut workers = [worker("w1"), worker("w2"), worker("w3")];
    workers.iter_mut().for_each(|worker| drop(worker.join(&mut server)));
    let [w1, w2, w3] = &mut workers;
    server.wait_with(1_000, &mut [w1, w2, w3]);
    let runs = started(&server.put(3));
    assert_eq!(runs.len(), 3);
    let mut server = server.crash(0);
    let [w1, w2, w3] = &mut workers;
    // w1 and w2 come back with nothing; w3, cut off, runs a task.
    assert_eq!(started(&w1.join(&mut server)), []);
    assert_eq!(started(&w2.join(&mut server)), []);
    assert_eq!(started(&server.wait_with(10_000, &mut [w1, w2])), []);
    w3.hello.running = vec![runs[2].clone()];
    let effects = w3.hello(&mut server);
    assert_eq!(started(&effects).len(), 2, "all but the one that w3 runs");
    assert!(started(&effects).iter().all(|run| run.task != runs[2].task));
}

// Scenario 34.
#[test]
fn a_server_that_slept_does_not_give_up_a_healthy_worker_in_one_look() {
    let (mut server, mut w1, _) = at_work();
    server.now += 10 * LOST;
    let effects = server.tell(Input::Tick);
    assert_eq!(lost(&effects).len(), 0);
    let silent = Note::Health { seat: w1.hello.seat.clone(), healthy: false };
    assert!(effects.contains(&Effect::Note(silent)));
    assert!(matches!(w1.beat(&mut server)[..], [Effect::Answer { .. }, Effect::Note(Note::Health { .. })]));
    assert_eq!(server.owner.members().next().unwrap().health, Some(Health::Healthy));
}

#[test]
fn what_a_lost_worker_says_in_its_session_is_not_heard() {
    let (mut server, mut w1, run) = at_work();
    assert_eq!(lost(&server.wait(LOST + 500)), ["it has been silent for too long"]);
    assert_eq!(w1.beat(&mut server), []);
    assert_eq!(w1.ended(&mut server, &run, End::Succeeded), []);
}

// Scenario 35.
#[test]
fn a_later_life_on_the_same_machine_replaces_the_earlier() {
    let (mut server, w1, run) = at_work();
    let mut later = w1.later_life();
    let effects = later.hello(&mut server);
    assert_eq!(lost(&effects), ["a later life of it has come"]);
    let again = started(&later.beat(&mut server)).pop().unwrap();
    assert_eq!((again.task, again.attempt), (run.task, 2));
    // And the earlier one does not come back, however often it says hello.
    let mut earlier = w1.clone();
    assert_eq!(refused(&earlier.hello(&mut server)), Some(("seat", Then::Exit)));
}

// Scenario 35.
#[test]
fn another_machine_gets_a_seat_only_when_the_one_that_has_it_is_given_up() {
    let (mut server, w1, run) = at_work();
    let mut other = w1.on_machine(2);
    assert_eq!(refused(&other.hello(&mut server)), Some(("seat", Then::Exit)), "the other is healthy");
    server.wait(10_000);
    assert_eq!(refused(&other.hello(&mut server)), Some(("seat", Then::Retry)), "it may be alive");
    assert_eq!(lost(&server.wait(LOST)).len(), 1);
    let again = started(&other.join(&mut server)).pop().unwrap();
    assert_eq!((again.task, again.attempt), (run.task, 2));
}

#[test]
fn a_guardian_says_that_a_worker_is_dead_and_speaks_for_its_own_alone() {
    let (mut server, mut w1, run) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    assert_eq!(lost(&server.dead("w1", 2, 1)), [""; 0], "another machine");
    assert_eq!(lost(&server.dead("w1", 1, 0)), [""; 0], "an earlier life");
    assert_eq!(lost(&server.dead("w3", 1, 1)), [""; 0], "another seat");
    let effects = server.dead("w1", 1, 1);
    assert_eq!(lost(&effects).len(), 1);
    assert_eq!(started(&effects)[0].task, run.task);
    // Its last hello was on its way: it is let in, and is told to end what it says it runs.
    w1.hello.running = vec![run.clone()];
    let effects = w1.hello(&mut server);
    let stop = |effect: &Effect| matches!(effect, Effect::Shard(shard_messages::Effect::Stop { fence, .. }) if *fence == run.fence);
    assert!(effects.iter().any(stop));
}

/// A start that was on its way to a worker that had drained cost the task one of its lost runs, and a backoff.
#[test]
fn a_start_that_was_on_its_way_to_a_drained_worker_costs_the_task_nothing() {
    let (mut server, _, run) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    let dead = Input::Dead { seat: Seat::new("w1").unwrap(), token: 1, process: 1, drained: true };
    let effects = server.tell(dead);
    assert_eq!(lost(&effects).len(), 1);
    let again = started(&effects).pop().unwrap();
    assert_eq!((again.task, again.attempt), (run.task, 1));
}

// Scenario 36.
#[test]
fn a_start_whose_fate_is_unknown_counts_as_running_until_it_is_denied() {
    let (mut server, mut w1, run) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    server.tell(Input::Closed { session: w1.id });
    assert_eq!(started(&server.wait_with(30_000, &mut [&mut w2])), []);
    assert_eq!(server.owner.shard().slots_and_runs(), (1, 1));
    // It comes back and does not name it: it never started, and costs no attempt.
    let mut effects = w1.hello(&mut server);
    effects.extend(server.wait_with(1_000, &mut [&mut w1, &mut w2]));
    let again = started(&effects).pop().unwrap();
    assert_eq!((again.task, again.attempt), (run.task, 1));
    assert!(again.fence > run.fence);
}

/// Found by a seed: a slot that a denial freed was filled at once, in the session that was over; nobody ever
/// heard of that run, and it was never denied.
#[test]
fn nothing_is_started_in_the_session_that_is_over() {
    let (mut server, mut w1, _) = at_work();
    let effects = w1.hello(&mut server);
    assert!(is_welcome(&effects));
    assert_eq!(started(&effects), []);
    assert_eq!(started(&w1.beat(&mut server)).len(), 1);
}

// Scenario 37.
#[test]
fn a_real_result_counts_although_its_worker_was_given_up() {
    let (mut server, w1, run) = at_work();
    assert_eq!(lost(&server.wait(LOST + 500)).len(), 1);
    let mut rejoined = w1.clone();
    rejoined.hello.life.rejoin = 1;
    rejoined.hello.ended = vec![(run.clone(), End::Succeeded)];
    assert_eq!(finished(&rejoined.hello(&mut server)), [Outcome::Succeeded]);
    assert_eq!(started(&rejoined.beat(&mut server)), []);
}

// Scenario 37.
#[test]
fn a_real_result_is_not_overwritten_by_the_loss_of_its_worker() {
    let (mut server, w1, run) = at_work();
    server.hold = true;
    w1.ended(&mut server, &run, End::Succeeded);
    server.dead("w1", 1, 1);
    let effects = server.release();
    assert_eq!(finished(&effects), [Outcome::Succeeded]);
    assert_eq!((server.tables.tasks.len(), server.tables.members.len()), (0, 0));
}

/// The same while the gate is shut: what a worker said before it was given up counts.
#[test]
fn an_end_that_waits_for_the_gate_is_not_overwritten_by_the_loss_of_its_worker() {
    let (mut server, mut w1, run) = at_work();
    worker("w2").join(&mut server);
    let mut server = server.crash(0);
    w1.hello.running = vec![run.clone()];
    w1.join(&mut server);
    assert_eq!(finished(&w1.ended(&mut server, &run, End::Succeeded)), [], "w2 is waited for");
    assert_eq!(finished(&server.dead("w1", 1, 1)), [Outcome::Succeeded]);
}

// Scenario 37b.
#[test]
fn a_worker_that_lives_by_a_higher_value_is_waited_for() {
    let (server, mut w1, run) = at_work();
    let low = Thresholds { heartbeat_ms: 500, unhealthy_after_ms: 1_000, lost_after_ms: 3_000 };
    let mut server = server.crash_with(0, low);
    let mut w2 = worker("w2");
    w2.join(&mut server);
    assert_eq!(started(&server.wait_with(LOST - 10_000, &mut [&mut w2])), []);
    // It comes in time; from when it has shown that it heard the lower value, that one counts.
    w1.hello.running = vec![run];
    assert!(is_welcome(&w1.hello(&mut server)));
    assert_eq!(lost(&server.wait_with(9_000, &mut [&mut w2])), [""; 0], "the old value counts still");
    w1.join(&mut server);
    assert_eq!(server.wait_saved("w1"), 3_000);
    assert_eq!(lost(&server.wait_with(3_500, &mut [&mut w2])).len(), 1);
}

// Scenario 37b, the other way.
#[test]
fn a_higher_value_is_saved_before_a_worker_may_live_by_it() {
    let low = Thresholds { heartbeat_ms: 500, unhealthy_after_ms: 1_000, lost_after_ms: 3_000 };
    let settings = Settings { thresholds: low, ..plain() };
    let mut server = Server::take(Tables::default(), settings, 0);
    let mut w1 = worker("w1");
    w1.join(&mut server);
    assert_eq!(server.wait_saved("w1"), 3_000);
    let mut server = server.crash_with(0, Thresholds::default());
    server.hold = true;
    assert!(!is_welcome(&w1.hello(&mut server)));
    assert_eq!(w1.beat(&mut server), [], "it cannot have been welcomed");
    let effects = server.release();
    assert!(is_welcome(&effects));
    assert_eq!(server.wait_saved("w1"), LOST);
}

#[test]
fn nobody_gets_work_before_the_store_knows_it() {
    let mut server = Server::start();
    server.put(1);
    server.hold = true;
    let mut w1 = worker("w1");
    assert_eq!(w1.hello(&mut server), []);
    assert_eq!(w1.beat(&mut server), []);
    let welcomed = server.release();
    assert!(is_welcome(&welcomed));
    w1.learn(server.owner.shard().epoch(), &welcomed);
    assert_eq!(started(&w1.beat(&mut server)).len(), 1);
}

// Scenario 38.
#[test]
fn a_worker_that_is_cut_off_is_dead_before_its_tasks_start_elsewhere() {
    let (mut server, _, run) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    let lease = server.owner.thresholds().lease_ms();
    assert_eq!(started(&server.wait_with(lease + LOST / 20, &mut [&mut w2])), []);
    let effects = server.wait_with(LOST - lease, &mut [&mut w2]);
    assert_eq!(started(&effects)[0].task, run.task);
}

#[test]
fn a_worker_that_is_heard_but_does_not_hear_is_given_up() {
    let (mut server, w1, _) = at_work();
    let mut effects = Vec::new();
    for number in 2..80 {
        server.now += 1_000;
        let beat = Beat { number, answered: 0, set: w1.hello.set };
        effects.extend(server.tell(Input::Beat { session: w1.id, beat }));
        effects.extend(server.tell(Input::Tick));
    }
    let answers = effects.iter().filter(|effect| matches!(effect, Effect::Answer { .. })).count();
    assert_eq!((answers, lost(&effects).len()), (5, 1));
}

// As scenario 39: refused with a clear word, and let in when it is right.
#[test]
fn a_worker_of_another_store_forgets_it_first() {
    let mut server = Server::start();
    let mut w1 = worker("w1");
    w1.hello.store = Some(StoreId(6));
    assert_eq!(refused(&w1.hello(&mut server)), Some(("store_id", Then::Forget)));
    w1.hello.store = None;
    w1.join(&mut server);
}

#[test]
fn an_epoch_that_can_be_no_owners_is_refused() {
    let (mut server, ..) = at_work();
    let mut w2 = worker("w2");
    w2.hello.obeyed.epoch = Epoch(u64::MAX);
    let effects = w2.hello(&mut server);
    assert_eq!(refused(&effects), Some(("epoch", Then::Exit)));
    assert_eq!(doubted(&effects), None);
}

/// The epoch that an owner was shown and that its store knows nothing of.
fn doubted(effects: &[Effect]) -> Option<Epoch> {
    effects.iter().find_map(|effect| match effect {
        Effect::Doubt { shown } => Some(*shown),
        _ => None,
    })
}

/// A server was set back with all that is on its machine, so nothing there tells that the store is an old copy; the
/// gate opens, as those have come whom the store knows. Then one comes that it does not know.
#[test]
fn a_worker_of_an_owner_that_the_store_does_not_know_shuts_the_gate_again() {
    let (mut server, mut w1, run) = at_work();
    let copy = server.clone();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    server.wait_with(1_000, &mut [&mut w1, &mut w2]);
    let later = started(&server.put(3));
    let of_w2: Vec<Run> = later.into_iter().filter(|later| later.key == run.key).skip(1).collect();
    let mut server = server.crash(0);
    w1.hello.running = vec![run.clone()];
    w2.hello.running = of_w2.clone();
    w1.join(&mut server);
    w2.join(&mut server);
    assert_eq!(w2.hello.obeyed, Incarnation { epoch: Epoch(2), nonce: 1 });
    // The old copy had epoch 1 and is taken as epoch 2 by another owner.
    for shows in ["what it obeyed", "what it runs", "what it knows"] {
        let (mut server, mut w2) = (copy.clone().restore_unnoticed(0), w2.clone());
        let mut w3 = worker("w3");
        assert!(is_welcome(&w3.hello(&mut server)), "who has never worked is no sign of anything");
        if shows != "what it obeyed" {
            w2.hello.obeyed = Incarnation::default();
        }
        if shows != "what it knows" {
            w2.hello.set = None;
        }
        if shows == "what it runs" {
            w2.hello.running.iter_mut().for_each(|run| run.fence.epoch = Epoch(2));
        } else {
            w2.hello.running.clear();
        }
        let effects = w2.hello(&mut server);
        assert_eq!(
            (refused(&effects), doubted(&effects)),
            (Some(("epoch", Then::Retry)), Some(Epoch(2))),
            "{shows}"
        );
        assert_eq!(doubted(&w2.hello(&mut server)), None, "once is enough");
        let mut stranger = w2.clone();
        stranger.hello.store = None;
        let effects = stranger.hello(&mut copy.clone().restore_unnoticed(0));
        assert_eq!(doubted(&effects), None, "who does not know the store is not believed");
        let mut server = server.take_again(Epoch(2));
        assert_eq!(server.owner.shard().epoch(), Epoch(3));
        assert!(is_welcome(&w2.hello(&mut server)));
        assert!(!server.owner.gate().open && server.owner.gate().in_doubt);
    }
}

#[test]
fn a_session_that_is_older_than_the_newest_is_refused() {
    let (mut server, mut w1, _) = at_work();
    let mut late = w1.clone();
    w1.hello(&mut server);
    assert_eq!(refused(&late.hello(&mut server)), Some(("session", Then::Retry)));
}

#[test]
fn after_a_good_stop_the_gate_opens_at_once_and_what_runs_is_known() {
    let (mut server, mut w1, run) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    server.wait_with(1_000, &mut [&mut w1, &mut w2]);
    let effects = server.tell(Input::Stop);
    let absence = |session| Effect::Absence { session, ms: 300_000 };
    assert_eq!(effects, [absence(w1.id), absence(w2.id), Effect::Stopped]);
    assert_eq!(server.wait_saved("w1"), LOST + health::waited_ms(300_000));
    let mut server = server.crash(40_000);
    assert!(server.owner.gate().open);
    assert_eq!(started(&w2.join(&mut server)), [], "it runs, as far as anybody knows");
    assert_eq!(started(&server.put(1)).len(), 1, "other tasks do not wait");
    // It comes back after a minute and a half, and its end counts.
    server.wait_with(90_000, &mut [&mut w2]);
    w1.hello.ended = vec![(run, End::Succeeded)];
    assert_eq!(finished(&w1.hello(&mut server)), [Outcome::Succeeded]);
}

#[test]
fn the_mark_of_a_good_stop_counts_once() {
    let (mut server, ..) = at_work();
    server.tell(Input::Stop);
    let server = server.crash(1_000);
    assert!(server.owner.gate().open);
    let mut server = server.crash(1_000);
    assert!(!server.owner.gate().open);
    let mut w2 = worker("w2");
    w2.join(&mut server);
    assert_eq!(started(&server.wait_with(LOST + 300_000, &mut [&mut w2])), []);
    assert_eq!(started(&server.wait_with(10_000, &mut [&mut w2])).len(), 1);
}

#[test]
fn the_gate_does_not_open_before_the_mark_is_removed() {
    let (mut server, ..) = at_work();
    server.tell(Input::Stop);
    let Server { mut tables, settings, now, .. } = server;
    tables.epoch += 1;
    let identity = Identity { epoch: Epoch(tables.epoch), seed: 1, store: StoreId(5), nonce: 1 };
    let mut effects = Vec::new();
    let owner = Owner::new(Millis(now), settings, identity, tables.metadata(), &mut effects).unwrap();
    assert!(!owner.gate().open);
}

#[test]
fn a_server_that_stops_before_it_knows_what_runs_leaves_no_mark() {
    let (server, ..) = at_work();
    let mut server = server.crash(0);
    assert_eq!(server.tell(Input::Stop), [Effect::Stopped]);
    assert!(!server.tables.stopped);
}

#[test]
fn a_server_that_stops_hears_workers_no_more() {
    let (mut server, mut w1, run) = at_work();
    server.hold = true;
    server.tell(Input::Stop);
    assert_eq!(w1.beat(&mut server), []);
    assert_eq!(w1.ended(&mut server, &run, End::Succeeded), []);
    assert_eq!(server.dead("w1", 1, 1), []);
    assert_eq!(refused(&worker("w2").hello(&mut server)), Some(("", Then::Retry)));
    assert_eq!(server.release().last(), Some(&Effect::Stopped));
    assert_eq!(server.tables.members.values().next().unwrap().running, [run]);
}

#[test]
fn restarts_do_not_postpone_the_gate_for_ever() {
    let (mut server, ..) = at_work();
    let mut waited = 0;
    let mut w2 = worker("w2");
    while waited < 2 * LOST {
        server = server.crash(0);
        w2.join(&mut server);
        let effects = server.wait_with(18_000, &mut [&mut w2]);
        waited += 18_000;
        if !started(&effects).is_empty() {
            break;
        }
    }
    // What is left is saved every five seconds: of 18 s that each server waits, 15 count for the next one.
    assert_eq!(waited, 4 * 18_000);
}

/// Found by a seed: nothing was read before the first worker came.
#[test]
fn a_new_owner_asks_for_its_windows_at_once() {
    let mut server = Server::start();
    server.put(3);
    let Server { mut tables, settings, now, .. } = server;
    tables.epoch += 1;
    let identity = Identity { epoch: Epoch(tables.epoch), seed: 1, store: StoreId(5), nonce: 1 };
    let mut effects = Vec::new();
    let owner = Owner::new(Millis(now), settings, identity, tables.metadata(), &mut effects).unwrap();
    let load = |effect: &Effect| matches!(effect, Effect::Shard(shard_messages::Effect::Load { .. }));
    assert!(effects.iter().any(load));
    check::owner(&owner).unwrap();
}

/// A worker set, as one that knows it says it.
fn set_of(session: &Session) -> WorkerSetId {
    session.hello.set.unwrap()
}

// Scenario 31.
#[test]
fn a_new_worker_gets_nothing_until_a_silent_one_knows_of_it_or_is_lost() {
    let (mut server, w1, _) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    assert_eq!(started(&server.put(4)).len(), 1, "w1 has one more slot");
    assert_eq!(started(&server.wait_with(LOST - 1_000, &mut [&mut w2])), []);
    let why: Vec<_> = server.owner.members().filter_map(|member| member.why_not).collect();
    assert_eq!(why, ["it is silent", "1 of 2 workers do not know of it yet"]);
    let mut told = server.clone();
    assert_eq!(started(&told.wait_with(1_000, &mut [&mut w1.clone(), &mut w2.clone()])).len(), 2);
    // Nobody is lost for want of consensus, only of heartbeats.
    let effects = server.wait_with(2_000, &mut [&mut w2]);
    assert_eq!(lost(&effects), ["it has been silent for too long"]);
    assert_eq!(started(&effects).len(), 2);
}

/// The store was set back to a copy from before w2 came: what w2 runs is not to be started on w1.
// Scenario 32.
#[test]
fn on_an_old_copy_of_the_store_workers_have_to_agree() {
    let (mut server, mut w1, run) = at_work();
    let copy = server.clone();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    server.wait_with(1_000, &mut [&mut w1, &mut w2]);
    let started_later = started(&server.put(3));
    assert!(started_later.len() == 3, "{started_later:?}");
    let mut server = copy.restore(0);
    w1.hello.running = vec![run.clone()];
    w1.join(&mut server);
    assert!(!server.owner.gate().open, "w2 is unknown to the store, but w1 knows it");
    server.wait_with(10_000, &mut [&mut w1]);
    assert!(!server.owner.gate().open);
    assert_eq!(set_of(&w1), set_of(&w2));
    w2.join(&mut server);
    assert!(server.owner.gate().open);
}

#[test]
fn on_an_old_copy_of_the_store_the_safe_time_opens_the_gate() {
    let (server, ..) = at_work();
    let mut server = server.restore(0);
    let safe_ms = LOST + health::waited_ms(server.settings.absence_ms);
    server.wait(safe_ms - 1);
    assert!(!server.owner.gate().open);
    let gate = server.owner.gate();
    assert_eq!((gate.in_doubt, gate.opens_in_ms), (true, 1));
    server.wait(1);
    assert!(server.owner.gate().open);
}

#[test]
fn no_worker_set_is_told_while_the_gate_is_shut() {
    let mut server = Server::start();
    let mut workers = [worker("w1"), worker("w2")];
    workers.iter_mut().for_each(|worker| drop(worker.join(&mut server)));
    let [w1, w2] = &mut workers;
    server.wait_with(1_000, &mut [w1, w2]);
    let before = set_of(w1);
    let mut server = server.crash(0);
    w1.join(&mut server);
    server.wait_with(10_000, &mut [w1]);
    assert_eq!(set_of(w1), before);
    w2.join(&mut server);
    server.wait_with(1_000, &mut [w1, w2]);
    assert_ne!(set_of(w1), before);
    assert_eq!(set_of(w1), set_of(w2));
}

#[test]
fn doubt_outlives_restarts_and_its_time_goes_on() {
    let (server, ..) = at_work();
    let mut server = server.restore(0);
    let safe_ms = LOST + health::waited_ms(server.settings.absence_ms);
    assert_eq!(server.tables.doubt, Some(safe_ms));
    server.wait(safe_ms / 2);
    let mut server = server.crash(1_000);
    let gate = server.owner.gate();
    assert!(gate.in_doubt && gate.opens_in_ms <= safe_ms / 2 + bounds::WAIT_SAVED_MS, "{gate:?}");
    server.wait(gate.opens_in_ms);
    assert!(server.owner.gate().open);
    assert_eq!(server.tables.doubt, None);
    assert!(!server.crash(0).owner.gate().in_doubt);
}

/// A copy that was made while the server was stopped has the mark of a good stop. What it says of what runs is not true
/// any more.
#[test]
fn the_mark_of_an_old_copy_does_not_count() {
    let (mut server, mut w1, run) = at_work();
    server.tell(Input::Stop);
    assert!(server.tables.stopped);
    let mut server = server.restore(0);
    assert!(!server.owner.gate().open && !server.tables.stopped);
    w1.hello.running = vec![run];
    w1.join(&mut server);
    assert!(server.owner.gate().open, "it is alone, and knows that");
}

/// Workers that join, and are never heard again.
fn passers_by(server: &mut Server, from: usize, count: usize) {
    for n in from..from + count {
        worker(&format!("w{}", 100 + n)).hello(server);
    }
}

// Scenario 40.
#[test]
fn workers_that_come_and_go_do_not_keep_new_ones_from_working() {
    let mut server = Server::start();
    let mut steady: Vec<Session> = (0..3).map(|n| worker(&format!("w{n}"))).collect();
    steady.iter_mut().for_each(|worker| drop(worker.join(&mut server)));
    let [w0, w1, w2] = steady.as_mut_slice() else { unreachable!() };
    server.wait_with(2_000, &mut [w0, w1, w2]);
    assert_eq!(server.owner.members().filter_map(|member| member.why_not).count(), 0);
    let mut late = worker("w9");
    let (mut seconds, mut passed, mut working) = (0, 0, None);
    // Two of them a second, each silent for ever: there is always one that knows nobody.
    while working.is_none() && seconds < 4 * LOST / 1_000 {
        passers_by(&mut server, passed, 2);
        passed += 2;
        if seconds == 10 {
            late.join(&mut server);
        }
        server.wait_with(1_000, &mut [w0, w1, w2, &mut late]);
        seconds += 1;
        let member = server.owner.members().find(|member| member.seat.as_str() == "w9");
        working = member.filter(|member| member.why_not.is_none()).map(|_| seconds);
    }
    // It waits for those before it to be lost, and at most once more for those who joined with it.
    assert!(working.is_some_and(|at| at <= 10 + 2 * LOST / 1_000 + 10), "{working:?}");
    assert!(server.owner.members().filter(|member| member.why_not.is_none()).count() == 4);
}

/// One whose turn has not come is told no set, so it cannot take a part of the workers for all; and whoever comes with a
/// set of its own does not have to wait for its turn.
#[test]
fn who_waits_for_its_turn_is_told_nothing() {
    let mut server = Server::start();
    let mut first = worker("w1");
    first.join(&mut server);
    passers_by(&mut server, 0, JOINS as usize);
    let mut queued = worker("w2");
    queued.join(&mut server);
    assert_eq!(queued.hello.set, None);
    let why = |server: &Server, seat: &str| {
        let member = server.owner.members().find(|member| member.seat.as_str() == seat).unwrap();
        member.why_not.unwrap().into_owned()
    };
    assert_eq!(why(&server, "w2"), "many workers join at once: its turn comes when all know those before it");
    let mut other = worker("w3");
    other.hello.set = first.hello.set;
    other.join(&mut server);
    assert_ne!(other.hello.set, first.hello.set);
    server.wait_with(LOST + 2_000, &mut [&mut first, &mut queued, &mut other]);
    assert_eq!(server.owner.members().filter_map(|member| member.why_not).count(), 0);
    assert_eq!(queued.hello.set, first.hello.set);
}

#[test]
fn a_worker_that_is_asked_to_drain_gets_nothing_more_and_is_asked_again_in_its_next_session() {
    let (mut server, mut w1, _) = at_work();
    let drain = || Input::Drain { seat: Seat::new("w1").unwrap() };
    assert_eq!(server.tell(drain()), [Effect::Drain { session: w1.id }]);
    assert_eq!(started(&server.put(1)), []);
    let why: Vec<_> = server.owner.members().filter_map(|member| member.why_not).collect();
    assert_eq!(why, ["it was asked to drain"]);
    assert!(w1.hello(&mut server).contains(&Effect::Drain { session: w1.id }));
    assert_eq!(server.tell(Input::Drain { seat: Seat::new("nobody").unwrap() }), []);
}

#[test]
fn an_operator_may_give_a_worker_up() {
    let (mut server, _, run) = at_work();
    let mut w2 = worker("w2");
    w2.join(&mut server);
    server.wait_with(10_000, &mut [&mut w2]);
    let effects = server.tell(Input::GiveUp { seat: Seat::new("w1").unwrap() });
    assert_eq!(lost(&effects), ["an operator has given it up"]);
    let mut effects = effects;
    effects.extend(server.wait_with(1_000, &mut [&mut w2]));
    assert_eq!(started(&effects).pop().map(|run| (run.task, run.attempt)), Some((run.task, 2)));
}

#[test]
fn an_operator_may_open_the_gate() {
    let (server, ..) = at_work();
    for mut server in [server.clone().crash(0), server.restore(0)] {
        assert!(!server.owner.gate().open);
        let effects = server.tell(Input::OpenGate);
        assert_eq!(lost(&effects), ["an operator has opened the start gate without it"]);
        assert!(server.owner.gate().open && !server.owner.gate().in_doubt);
        assert_eq!(server.tables.doubt, None);
        assert_eq!(server.tell(Input::OpenGate), [], "it is open");
    }
}
