//! The fairness world: one queue, driven in lock step, with arrivals, weights, costs, windows, restarts
//! and store faults that a seed decides. It knows at every moment what each key has received, and checks
//! what docs/decisions/0002-fair-places.md proves:
//!
//! - a start takes the lowest waiting row of its lane, and no row of a more urgent priority waits;
//! - while two keys keep waiting, what they received, each as the sum of cost / weight, never differs by
//!   more than 2 times the larger of their charges;
//! - a newcomer's first task starts before any other key has received more than two charges (with equal
//!   charges: more than one task);
//! - a stream of ever new keys does not keep a key with a backlog from its share;
//! - where there are duration classes, all of this holds within each, however long it was full;
//! - where some keys have limits of their own, it holds among the others, and one with a limit does not receive more
//!   than any of them.

use std::collections::{BTreeMap, BTreeSet};

use evenhand_core::admission::{ClassLimit, Limit};
use evenhand_core::backlog::{Cost, VTime, Weight};
use evenhand_core::change::Settings;
use evenhand_core::life::{End, Ending};
use evenhand_core::messages::KeyChange;
use evenhand_core::names::{Key, LaneId, Millis, Priority, QueueName, TaskId, WorkerId};
use evenhand_core::{Bounds, Input, NewTask, Run, Task};
use evenhand_store::Fault;

use crate::driver::{Driver, Event, SHARD, Trouble, plain, slots_of};
use crate::rng::Rng;
use crate::world::Options;
use crate::{Canary, Report, Violation};

/// What kind of tenants there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tenants {
    /// Some keys with any weights and costs, arriving in bursts.
    Mixed,
    /// The same with equal weights and costs: bounds are sharp here.
    Equal,
    /// One key with a standing backlog, and a new key with every dispatch.
    Stream,
    /// Crowds of light one-shot keys among heavy ones.
    Crowds,
    /// Several priorities.
    Priorities,
    /// Several duration classes, some of them often full, and default tasks.
    Classes,
    /// Every other key has a limit of its own.
    Limited,
}

/// The shortest class. Nothing ends because its time is up here: a world is over long before that.
const CLASS_MS: u64 = 100_000_000;

/// Keys that return.
const KEYS: u64 = 12;

/// What a key has received since it began to wait, and against whom.
#[derive(Clone, Debug, Default)]
struct KeyState {
    waiting: u32,
    largest: VTime,
    /// Retried, canceled or refused: its service is not only that of its places.
    tainted: bool,
    /// Received by others while this key, never seen before, waits for its first start.
    newcomer: Option<BTreeMap<Key, (u32, VTime)>>,
    /// For the stream: dispatches since its last start, each divided by the waiting weights.
    passed_over: f64,
}

/// Received by the first key less received by the second, since both wait: now, lowest, highest; and how much it has
/// risen and fallen in between.
#[derive(Clone, Copy, Debug, Default)]
struct Difference {
    now: i128,
    low: i128,
    high: i128,
    rise: i128,
    fall: i128,
}

impl Difference {
    fn add(&mut self, received: i128) {
        self.now += received;
        self.low = self.low.min(self.now);
        self.high = self.high.max(self.now);
        self.rise = self.rise.max(self.now - self.low);
        self.fall = self.fall.max(self.high - self.now);
    }

    /// How far it was from fair. A key with a limit may receive less, not more; two with limits are not compared.
    fn spread(&self, a_limited: bool, b_limited: bool) -> u128 {
        match (a_limited, b_limited) {
            (false, false) => (self.high - self.low).unsigned_abs(),
            (true, false) => self.rise.unsigned_abs(),
            (false, true) => self.fall.unsigned_abs(),
            (true, true) => 0,
        }
    }
}

struct World {
    rng: Rng,
    driver: Driver,
    queue: QueueName,
    tenants: Tenants,
    keys: BTreeMap<(LaneId, Key), KeyState>,
    pairs: BTreeMap<(LaneId, Key, Key), Difference>,
    weights: BTreeMap<Key, Weight>,
    /// How many duration classes there are.
    classes: u64,
    /// Keys with a limit of their own.
    limited: BTreeSet<Key>,
    known: BTreeSet<TaskId>,
    running: Vec<(WorkerId, Run)>,
    unacknowledged: Vec<(WorkerId, Run, End)>,
    stuck: Option<TaskId>,
    next_key: u64,
    steps: u64,
    worst: f64,
    trace: bool,
}

/// Plays one seed.
pub fn play(seed: u64, options: Options) -> Result<Report, Violation> {
    let bug = match options.canary {
        Some(Canary::Core(bug)) => Some(bug),
        Some(Canary::Store(_) | Canary::World(_)) | None => None,
    };
    let mut rng = Rng::new(seed);
    let tenants = *rng.pick(&[
        Tenants::Mixed,
        Tenants::Mixed,
        Tenants::Equal,
        Tenants::Stream,
        Tenants::Crowds,
        Tenants::Priorities,
        Tenants::Classes,
        Tenants::Limited,
    ]);
    let window_rows = *rng.pick(&[1, 2, 3, 7, 20, 1000]);
    let bounds = Bounds {
        window_rows,
        page_rows: rng.range(1, 10) as usize,
        aside_after_ends: rng.range(2, 30) as u32,
        aside_after_ms: rng.range(10, 2_000),
        ..Bounds::default()
    };
    let mut driver = Driver::fresh_with(bounds, bug);
    driver.checks = !options.blind;
    let queue =
        QueueName::new("q").map_err(|refusal| Violation::new("fair", seed, 0, refusal.to_string()))?;
    let mut world = World {
        rng,
        driver,
        queue,
        tenants,
        keys: BTreeMap::new(),
        pairs: BTreeMap::new(),
        weights: BTreeMap::new(),
        classes: 0,
        limited: BTreeSet::new(),
        known: BTreeSet::new(),
        running: Vec::new(),
        unacknowledged: Vec::new(),
        stuck: None,
        next_key: 0,
        steps: 0,
        worst: 0.0,
        trace: options.trace,
    };
    let simulated = world.run().map_err(|what| Violation::new("fair", seed, world.steps, what))?;
    Ok(Report {
        steps: world.steps,
        simulated_ms: simulated.0,
        starts: world.known.len() as u64,
        worst_difference: world.worst,
        ..Report::default()
    })
}

impl World {
    fn run(&mut self) -> Result<Millis, String> {
        let workers = self.rng.range(1, 3);
        for worker in 0..workers {
            let slots = self.rng.range(1, 3) as u32;
            self.tell(slots_of(worker, slots, &self.queue))?;
        }
        self.set_up()?;
        if self.tenants == Tenants::Stream {
            self.enqueue_burst(Key::new("standing"), 60)?;
        }
        for _ in 0..self.rng.range(100, 500) {
            self.steps += 1;
            self.act()?;
            let pause = self.rng.below(20);
            self.time(pause)?;
        }
        self.drain()?;
        Ok(self.driver.now)
    }

    /// Classes of the queue, limits of its keys.
    fn set_up(&mut self) -> Result<(), String> {
        let queue = self.queue.clone();
        if self.tenants == Tenants::Classes {
            let mut limit = Limit::All;
            self.classes = *self.rng.pick(&[2, 3, 5]);
            let classes = (1..=self.classes).map(|n| {
                let class = ClassLimit { duration_ms: n * CLASS_MS, limit };
                limit = Limit::Slots(if n > 2 { 1 } else { self.rng.range(1, 2) as u32 });
                class
            });
            let settings = Settings { classes: classes.collect(), ..plain() };
            let request = self.driver.request();
            self.tell(Input::Configure { request, queue: queue.clone(), settings, version: None })?;
        }
        if self.tenants == Tenants::Limited {
            for n in (0..KEYS).filter(|n| n % 2 == 1) {
                let key = Key::new(&format!("k{n}")).map_err(|refusal| refusal.to_string())?;
                let change =
                    KeyChange { limit: Some(Some(self.rng.range(1, 2) as u32)), ..KeyChange::default() };
                let request = self.driver.request();
                self.limited.insert(key.clone());
                self.tell(Input::SetKey { request, queue: queue.clone(), key, change })?;
            }
        }
        Ok(())
    }

    fn act(&mut self) -> Result<(), String> {
        if self.tenants == Tenants::Stream {
            let standing = self.keys.iter().find(|((_, key), _)| key.as_str() == "standing");
            if standing.is_none_or(|(_, state)| state.waiting < 20) {
                self.enqueue_burst(Key::new("standing"), 40)?;
            }
            let key = self.new_key();
            self.enqueue_burst(key, 1)?;
            return self.end_some();
        }
        match self.rng.below(100) {
            0..=34 => {
                let key = self.some_key();
                let tasks = *self.rng.pick(&[1, 1, 2, 5, 25]);
                self.enqueue_burst(key, tasks)
            }
            35..=36 if self.tenants == Tenants::Crowds => {
                for _ in 0..self.rng.range(10, 60) {
                    let key = self.new_key();
                    self.enqueue_burst(key, 1)?;
                }
                Ok(())
            }
            35..=84 => self.end_some(),
            85..=87 => self.restart(),
            88..=90 => {
                let fault = *self.rng.pick(&[Fault::Lost, Fault::AnswerLost, Fault::Full]);
                self.driver.store.fail_commit(fault);
                Ok(())
            }
            91..=93 => {
                self.driver.store.fail_read(Fault::Lost);
                Ok(())
            }
            94..=95 => self.cancel_one(),
            96 => self.refuse_one(),
            97 => {
                let worker = self.rng.below(3);
                let slots = self.rng.below(4) as u32;
                self.tell(slots_of(worker, slots, &self.queue.clone()))
            }
            _ => {
                let pause = self.rng.below(3_000);
                self.time(pause)
            }
        }
    }

    fn some_key(&mut self) -> Result<Key, evenhand_core::Refusal> {
        if self.rng.chance(50) {
            return self.new_key();
        }
        let n = self.rng.zipf(KEYS);
        Key::new(&format!("k{n}"))
    }

    fn new_key(&mut self) -> Result<Key, evenhand_core::Refusal> {
        self.next_key += 1;
        Key::new(&format!("new{}", self.next_key))
    }

    fn enqueue_burst(&mut self, key: Result<Key, evenhand_core::Refusal>, n: u64) -> Result<(), String> {
        let key = key.map_err(|refusal| refusal.to_string())?;
        let tasks = (0..n).map(|_| self.task_of(&key)).collect();
        let request = self.driver.request();
        self.tell(Input::Enqueue { request, queue: self.queue.clone(), tasks, once: None })
    }

    fn task_of(&mut self, key: &Key) -> NewTask {
        let mut task = NewTask::new(key.clone());
        task.max_attempts = Some(3);
        let light = key.as_str().starts_with("new");
        match self.tenants {
            Tenants::Equal | Tenants::Stream => {}
            Tenants::Crowds if light => task.weight = Weight::MIN,
            Tenants::Crowds => {}
            Tenants::Mixed | Tenants::Priorities | Tenants::Classes | Tenants::Limited => {
                let weight = match self.weights.get(key) {
                    Some(&weight) if !self.rng.chance(20) => weight,
                    _ => weight(*self.rng.pick(&[1, 3, 10, 501, 1000, 1000, 2000, 7000, 100_000, 1_000_000])),
                };
                self.weights.insert(key.clone(), weight);
                task.weight = weight;
                task.cost = cost(*self.rng.pick(&[1, 500, 1000, 1000, 1000, 3000, 20_000]));
            }
        }
        if self.tenants == Tenants::Priorities {
            task.priority = Priority(self.rng.below(3) as u8);
        }
        if self.tenants == Tenants::Classes {
            task.max_duration_ms = self.rng.below(self.classes + 1) * CLASS_MS; // 0: a default task
        }
        task
    }

    fn end_some(&mut self) -> Result<(), String> {
        let free: Vec<usize> =
            (0..self.running.len()).filter(|&n| Some(self.running[n].1.task) != self.stuck).collect();
        if free.is_empty() {
            return Ok(());
        }
        let (worker, run) = self.running.swap_remove(*self.rng.pick(&free));
        let unlucky =
            self.tenants != Tenants::Stream && run.key.as_str().ends_with('7') && self.rng.chance(300);
        let end = if unlucky { End::Failed } else { End::Succeeded };
        if unlucky {
            self.taint(run.lane, &run.key);
        }
        let (task, fence, attempt) = (run.task, run.fence, run.attempt);
        self.unacknowledged.push((worker, run, end));
        self.tell(Input::Ended { worker, task, fence, attempt, end, ending: Ending::default() })
    }

    fn cancel_one(&mut self) -> Result<(), String> {
        let waiting: Vec<Task> = self.driver.store.look(SHARD, |t| t.tasks.values().cloned().collect());
        if waiting.is_empty() {
            return Ok(());
        }
        let task = self.rng.pick(&waiting).clone();
        if self.running.iter().any(|(_, run)| run.task == task.id) {
            return Ok(());
        }
        self.taint(task.lane, &task.key);
        if let Some(state) = self.keys.get_mut(&(task.lane, task.key.clone())) {
            state.waiting = state.waiting.saturating_sub(1);
        }
        let request = self.driver.request();
        self.tell(Input::Cancel { request, task: task.id })
    }

    fn refuse_one(&mut self) -> Result<(), String> {
        if self.running.is_empty() {
            return Ok(());
        }
        let n = self.rng.below(self.running.len() as u64) as usize;
        let (worker, run) = self.running.swap_remove(n);
        self.taint(run.lane, &run.key);
        if let Some(state) = self.keys.get_mut(&(run.lane, run.key.clone())) {
            state.waiting += 1;
        }
        self.tell(Input::Refused { worker, task: run.task, fence: run.fence })
    }

    fn time(&mut self, ms: u64) -> Result<(), String> {
        let before = self.seq();
        let result = self.driver.wait(ms);
        self.after(result, false, before)
    }

    fn tell(&mut self, input: Input) -> Result<(), String> {
        if self.trace {
            println!("fair {} at {} ms: {input:?}", self.steps, self.driver.now);
        }
        let enqueue = matches!(input, Input::Enqueue { .. });
        let before = self.seq();
        let result = self.driver.tell(input);
        self.after(result, enqueue, before)
    }

    fn seq(&self) -> u64 {
        self.driver.store.look(SHARD, |tables| tables.next_seq.max(1))
    }

    /// Looks at what happened; restarts if the store let the shard down.
    fn after(&mut self, result: Result<(), Trouble>, enqueue: bool, seq_before: u64) -> Result<(), String> {
        let events = self.driver.events();
        if enqueue {
            self.meet_new_tasks();
        }
        let mut started = Vec::new();
        for event in events {
            match event {
                Event::Started(worker, run) => {
                    if self.trace {
                        println!("fair {}: worker {worker} starts {run:?}", self.steps);
                    }
                    self.started(&run)?;
                    started.push(run.clone());
                    self.running.push((worker, run));
                }
                Event::Acknowledged(_, task, fence) => {
                    self.unacknowledged.retain(|(_, run, _)| run.task != task || run.fence != fence)
                }
                Event::Stopped(..) | Event::Cut(..) | Event::Answered(..) | Event::Finished(..) => {}
            }
        }
        match result {
            Ok(()) => self.in_order(&started, if enqueue { u64::MAX } else { seq_before }),
            Err(Trouble::Store(_)) => self.restart(),
            Err(Trouble::Wrong(what)) => Err(what),
        }
    }

    fn restart(&mut self) -> Result<(), String> {
        for _ in 0..1000 {
            match self.try_restart() {
                Ok(before) => {
                    let result = self.driver.tell(Input::Open);
                    return self.after(result, false, before);
                }
                Err(Trouble::Store(_)) => {}
                Err(Trouble::Wrong(what)) => return Err(what),
            }
        }
        Err("the shard could not be taken in 1000 tries".into())
    }

    fn try_restart(&mut self) -> Result<u64, Trouble> {
        self.driver.retake()?;
        self.meet_new_tasks();
        for worker in 0..3 {
            let slots = self.rng.range(1, 3) as u32;
            self.driver.tell(slots_of(worker, slots, &self.queue))?;
            let mine = |id: WorkerId| id == WorkerId(worker);
            let running =
                self.running.iter().filter(|(id, _)| mine(*id)).map(|(_, run)| run.clone()).collect();
            let ended = self.unacknowledged.iter().filter(|(id, ..)| mine(*id));
            let ended = ended.map(|(_, run, end)| (run.clone(), *end, Ending::default())).collect();
            self.driver.tell(Input::Report { worker: WorkerId(worker), running, ended, verify: false })?;
        }
        if let Some(Event::Stopped(_, task, _)) =
            self.driver.events().into_iter().find(|event| matches!(event, Event::Stopped(..)))
        {
            return Err(Trouble::Wrong(format!("task {task} runs, but the new owner does not count it")));
        }
        Ok(self.seq())
    }

    /// Tasks that are in the store and that we have not met: accepted, whatever the caller was told.
    fn meet_new_tasks(&mut self) {
        let last = self.known.last().map_or(0, |task| task.0);
        let new: Vec<Task> = self
            .driver
            .store
            .look(SHARD, |t| t.tasks.range(TaskId(last + 1)..).map(|(_, t)| t.clone()).collect());
        for task in new {
            self.known.insert(task.id);
            let (lane, key, span) = (task.lane, task.key, task.charge.span());
            let first = !self.keys.contains_key(&(lane, key.clone()));
            let state = self.keys.entry((lane, key.clone())).or_default();
            state.largest = state.largest.max(span);
            state.waiting += 1;
            if state.waiting == 1 {
                state.passed_over = 0.0;
                if first && !self.limited.contains(&key) {
                    state.newcomer = Some(BTreeMap::new());
                }
                self.pair_up(lane, &key);
            }
        }
    }

    /// From now on this key and the others that wait are compared.
    fn pair_up(&mut self, lane: LaneId, key: &Key) {
        if self.keys[&(lane, key.clone())].tainted {
            return;
        }
        for ((other_lane, other), state) in &self.keys {
            if *other_lane == lane && other != key && state.waiting > 0 && !state.tainted {
                let (a, b) = if key < other { (key, other) } else { (other, key) };
                self.pairs.insert((lane, a.clone(), b.clone()), Difference::default());
            }
        }
    }

    fn taint(&mut self, lane: LaneId, key: &Key) {
        if let Some(state) = self.keys.get_mut(&(lane, key.clone())) {
            state.tainted = true;
            state.newcomer = None;
        }
        self.unpair(lane, key);
    }

    fn unpair(&mut self, lane: LaneId, key: &Key) {
        self.pairs.retain(|(l, a, b), _| *l != lane || (a != key && b != key));
    }

    /// A run was dispatched: compare its key with all that wait.
    fn started(&mut self, run: &Run) -> Result<(), String> {
        let (lane, key, span) = (run.lane, &run.key, run.charge.span());
        let weights: u64 = self
            .keys
            .iter()
            .filter(|((l, _), state)| *l == lane && state.waiting > 0)
            .map(|((_, key), _)| self.weights.get(key).map_or(1000, |w| u64::from(w.thousandths())))
            .sum();
        let Some(state) = self.keys.get_mut(&(lane, key.clone())) else {
            return Err(format!("task {} of key {key} was started, but never accepted", run.task));
        };
        if run.attempt > 1 || !run.charge.chained && !self.limited.contains(key) {
            state.passed_over = 0.0;
            return Ok(()); // placed again: no part of its key's chain
        }
        state.waiting = state.waiting.saturating_sub(1);
        state.largest = state.largest.max(span); // one that was parked is charged when it comes back
        state.newcomer = None;
        state.passed_over = 0.0;
        let (waits, tainted) = (state.waiting > 0, state.tainted);
        self.newcomers_wait_no_longer_than_a_round(lane, key, span)?;
        if self.tenants == Tenants::Stream {
            self.stream_passes_nobody(key, f64::from(run.charge.cost.thousandths()) / weights.max(1) as f64)?;
        }
        if !waits {
            self.unpair(lane, key);
        } else if !tainted {
            self.compare(lane, key, span)?;
        }
        if self.stuck.is_none() && self.tenants != Tenants::Stream && self.rng.chance(50) {
            self.stuck = Some(run.task);
        }
        Ok(())
    }

    fn compare(&mut self, lane: LaneId, key: &Key, span: VTime) -> Result<(), String> {
        let span = span.to_bits() as i128;
        for ((l, a, b), difference) in &mut self.pairs {
            if *l != lane || (a != key && b != key) {
                continue;
            }
            difference.add(if a == key { span } else { -span });
            let largest = |key: &Key| self.keys[&(lane, key.clone())].largest;
            let larger = largest(a).max(largest(b));
            let spread = difference.spread(self.limited.contains(a), self.limited.contains(b));
            // Places are shown in ticks, so order is exact to one tick at either end.
            let allowed = 2 * (larger + VTime::TICK).to_bits();
            self.worst = self.worst.max(spread as f64 / larger.to_bits() as f64);
            if spread > allowed {
                let times = spread as f64 / larger.to_bits() as f64;
                return Err(format!(
                    "keys {a} and {b} kept waiting in lane {lane}, and what they received differs by {times:.2} \
                     times the larger of their charges"
                ));
            }
        }
        Ok(())
    }

    fn newcomers_wait_no_longer_than_a_round(
        &mut self,
        lane: LaneId,
        served: &Key,
        span: VTime,
    ) -> Result<(), String> {
        let largest = self.keys[&(lane, served.clone())].largest;
        let tainted = self.keys[&(lane, served.clone())].tainted;
        let equal = matches!(self.tenants, Tenants::Equal | Tenants::Stream);
        for ((l, key), state) in &mut self.keys {
            let Some(seen) = &mut state.newcomer else { continue };
            if *l != lane || key == served || tainted {
                continue;
            }
            let (tasks, received) = seen.entry(served.clone()).or_default();
            *tasks += 1;
            *received += span;
            let too_long = if equal { *tasks > 1 } else { *received > largest + largest + VTime::TICK };
            if too_long {
                return Err(format!("newcomer {key} still waits after {tasks} tasks of {served} started"));
            }
        }
        Ok(())
    }

    fn stream_passes_nobody(&mut self, served: &Key, step: f64) -> Result<(), String> {
        for ((_, key), state) in &mut self.keys {
            if key == served || key.as_str() != "standing" || state.waiting == 0 {
                continue;
            }
            state.passed_over += step;
            if state.passed_over > 4.0 {
                return Err(format!("key {key} waits while a stream of others passes it"));
            }
        }
        Ok(())
    }

    /// What was started stood first: in its lane, and no more urgent lane had anything.
    fn in_order(&self, started: &[Run], seq_limit: u64) -> Result<(), String> {
        let running: BTreeSet<TaskId> = self.running.iter().map(|(_, run)| run.task).collect();
        let ended: BTreeSet<TaskId> = self.unacknowledged.iter().map(|(_, run, _)| run.task).collect();
        self.driver.store.look(SHARD, |tables| {
            for run in started {
                let rows = tables.rows.iter().filter(|((lane, level), row)| {
                    lane.queue == run.lane.queue
                        && !self.limited.contains(&row.key)
                        && level.seq() < seq_limit
                        && !running.contains(&row.task)
                        && !ended.contains(&row.task)
                });
                for ((lane, level), row) in rows {
                    if *lane == run.lane && *level < run.level {
                        let (task, other) = (run.task, row.task);
                        return Err(format!(
                            "task {task} was started at {}, before {other} at {level}",
                            run.level
                        ));
                    }
                    if lane.priority < run.lane.priority {
                        let (task, other) = (run.task, row.task);
                        return Err(format!("task {task} was started before {other}, which is more urgent"));
                    }
                }
            }
            Ok(())
        })
    }

    /// Everything ends, nothing is left.
    fn drain(&mut self) -> Result<(), String> {
        self.stuck = None;
        for worker in 0..3 {
            self.tell(slots_of(worker, 2, &self.queue.clone()))?;
        }
        for _ in 0..200_000 {
            self.steps += 1;
            self.stuck = None;
            self.end_some()?;
            if self.running.is_empty() {
                self.time(10_000)?;
                if self.running.is_empty() {
                    break;
                }
            }
        }
        let settled = self.driver.settle();
        self.after(settled, false, u64::MAX)?;
        let left = self.driver.store.look(SHARD, |t| (t.tasks.len(), t.rows.len(), t.keys.len()));
        let held = self.driver.shard.held();
        if left != (0, 0, 0) || held.rows + held.keys + held.alarms + held.runs + held.loads > 0 {
            return Err(format!("not drained: tasks, rows, keys in the store {left:?}, in memory {held:?}"));
        }
        Ok(())
    }
}

fn weight(thousandths: u32) -> Weight {
    Weight::from_thousandths(thousandths).unwrap_or(Weight::ONE)
}

fn cost(thousandths: u32) -> Cost {
    Cost::new(thousandths).unwrap_or(Cost::ONE)
}
