//! The world of shared time: one queue whose keys share the time of its slots, with backlogs that stand from the
//! beginning, runs that take longer or shorter than anybody said, weights, restarts and store faults that a seed
//! decides. It is in lock step, knows how long every run takes, and checks what
//! docs/decisions/0010-share-by-time.md promises: while two keys keep waiting, the time that they received, divided
//! by their weights, never differs by more than what can be under way, however long their backlogs are.

use std::collections::BTreeMap;

use evenhand_core::backlog::Weight;
use evenhand_core::change::{Settings, Share};
use evenhand_core::life::{End, Ending};
use evenhand_core::names::{Key, Millis, QueueName, WorkerId};
use evenhand_core::{Bounds, Input, NewTask, Run, bounds};
use evenhand_store::Fault;

use crate::driver::{Driver, Event, SHARD, Trouble, plain, slots_of};
use crate::rng::Rng;
use crate::world::Options;
use crate::{Canary, Report, Violation};

/// What callers say of how long their tasks take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Nothing,
    /// About what is true.
    Right,
    TooLittle,
    TooMuch,
}

/// A key, and what its tasks are really like.
#[derive(Clone, Debug)]
struct Tenant {
    key: Key,
    weight: Weight,
    says: Says,
    /// How long its runs take, and by how many thousandths of that they vary.
    takes_ms: u64,
    varies: u64,
    /// Tasks that were accepted and not started.
    waiting: u64,
    /// The largest that one of its runs was charged or took, in milliseconds for each unit of weight.
    largest: f64,
    /// The time it received, in the same unit.
    received: f64,
}

/// A run that is alive, and how long it takes.
#[derive(Clone, Debug)]
struct Alive {
    ends: Millis,
    worker: WorkerId,
    run: Run,
    takes_ms: u64,
}

struct World {
    rng: Rng,
    driver: Driver,
    queue: QueueName,
    workers: Vec<u32>,
    tenants: BTreeMap<Key, Tenant>,
    alive: Vec<Alive>,
    /// Ends that were told and are not acknowledged.
    told: Vec<(WorkerId, Run, u64)>,
    /// How far two keys are apart: lowest and highest.
    apart: BTreeMap<(Key, Key), (f64, f64)>,
    starts: u64,
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
    let mut rng = Rng::new(seed ^ 0x7137);
    let bounds = Bounds {
        window_rows: *rng.pick(&[1, 3, 20, 1000]),
        page_rows: rng.range(1, 10) as usize,
        moves_per_commit: rng.range(1, 20) as usize,
        aside_after_ends: rng.range(2, 30) as u32,
        ..Bounds::default()
    };
    let mut driver = Driver::fresh_with(bounds, bug);
    driver.checks = !options.blind;
    let wrong = |what: String| Violation::new("time", seed, 0, what);
    let queue = QueueName::new("q").map_err(|refusal| wrong(refusal.to_string()))?;
    let workers = (0..rng.range(1, 3)).map(|_| rng.range(1, 4) as u32).collect();
    let mut world = World {
        rng,
        driver,
        queue,
        workers,
        tenants: BTreeMap::new(),
        alive: Vec::new(),
        told: Vec::new(),
        apart: BTreeMap::new(),
        starts: 0,
        steps: 0,
        worst: 0.0,
        trace: options.trace,
    };
    let ended = world.run();
    ended.map_err(|what| Violation::new("time", seed, world.steps, what))?;
    Ok(Report {
        steps: world.steps,
        simulated_ms: world.driver.now.0,
        starts: world.starts,
        worst_time: world.worst,
        ..Report::default()
    })
}

impl World {
    fn run(&mut self) -> Result<(), String> {
        let settings = Settings { share: Share::Time, ..plain() };
        let (request, queue) = (self.driver.request(), self.queue.clone());
        self.tell(Input::Configure { request, queue, settings, version: None })?;
        for n in 0..self.rng.range(2, 5) {
            let key = Key::new(&format!("k{n}")).map_err(|refusal| refusal.to_string())?;
            let tenant = Tenant {
                key: key.clone(),
                weight: weight(*self.rng.pick(&[100, 1000, 1000, 1000, 3000])),
                says: *self.rng.pick(&[
                    Says::Nothing,
                    Says::Nothing,
                    Says::Right,
                    Says::TooLittle,
                    Says::TooMuch,
                ]),
                takes_ms: *self.rng.pick(&[20, 100, 100, 1_000, 10_000]),
                varies: *self.rng.pick(&[0, 0, 300]),
                waiting: 0,
                largest: 0.0,
                received: 0.0,
            };
            self.tenants.insert(key.clone(), tenant);
            let tasks = self.rng.range(60, 300);
            self.enqueue(&key, tasks)?;
        }
        for pair in pairs(&self.tenants) {
            self.apart.insert(pair, (0.0, 0.0));
        }
        self.come()?;
        while !self.alive.is_empty() {
            self.steps += 1;
            match self.rng.below(200) {
                0 => self.restart()?,
                1 => self.driver.store.fail_commit(*self.rng.pick(&[Fault::Lost, Fault::AnswerLost])),
                2..=4 => {
                    let keys: Vec<Key> = self.tenants.keys().cloned().collect();
                    let (key, tasks) = (self.rng.pick(&keys).clone(), self.rng.range(1, 30));
                    if self.tenants[&key].waiting > 0 {
                        self.enqueue(&key, tasks)?;
                    }
                }
                _ => self.end_next()?,
            }
        }
        self.over()
    }

    fn enqueue(&mut self, key: &Key, tasks: u64) -> Result<(), String> {
        let tasks = (0..tasks).map(|_| self.task(key)).collect();
        let (request, queue) = (self.driver.request(), self.queue.clone());
        self.tell(Input::Enqueue { request, queue, tasks, once: None })?;
        // Whatever the caller was told: what the store has was accepted.
        let alive: Vec<_> = self.alive.iter().map(|alive| alive.run.task).collect();
        let waiting = self.driver.store.look(SHARD, |tables| {
            let waits = |id| !alive.contains(id) && !self.told.iter().any(|(_, run, _)| run.task == *id);
            tables.tasks.iter().filter(|(id, task)| task.key == *key && waits(id)).count() as u64
        });
        if let Some(tenant) = self.tenants.get_mut(key) {
            tenant.waiting = waiting;
        }
        Ok(())
    }

    fn task(&mut self, key: &Key) -> NewTask {
        let tenant = &self.tenants[key];
        let mut task = NewTask::new(key.clone());
        task.weight = tenant.weight;
        task.expected_ms = match tenant.says {
            Says::Nothing => 0,
            Says::Right => tenant.takes_ms,
            Says::TooLittle => 1,
            Says::TooMuch => 20 * tenant.takes_ms,
        };
        task
    }

    fn come(&mut self) -> Result<(), String> {
        for (worker, slots) in self.workers.clone().into_iter().enumerate() {
            self.tell(slots_of(worker as u64, slots, &self.queue.clone()))?;
        }
        Ok(())
    }

    /// The run that ends next does.
    fn end_next(&mut self) -> Result<(), String> {
        let Some(next) = (0..self.alive.len()).min_by_key(|&n| self.alive[n].ends) else { return Ok(()) };
        let Alive { ends, worker, run, takes_ms } = self.alive.swap_remove(next);
        let wait_ms = ends.0.saturating_sub(self.driver.now.0);
        let waited = self.driver.wait(wait_ms);
        self.told.push((worker, run.clone(), takes_ms));
        self.after(waited)?;
        let (task, fence, attempt) = (run.task, run.fence, run.attempt);
        let ending = ending(takes_ms);
        self.tell(Input::Ended { worker, task, fence, attempt, end: End::Succeeded, ending })
    }

    fn tell(&mut self, input: Input) -> Result<(), String> {
        if self.trace {
            println!("time {} at {} ms: {input:?}", self.steps, self.driver.now);
        }
        let told = self.driver.tell(input);
        self.after(told)
    }

    /// Looks at what happened; restarts if the store let the shard down.
    fn after(&mut self, result: Result<(), Trouble>) -> Result<(), String> {
        for event in self.driver.events() {
            match event {
                Event::Started(worker, run) => self.started(worker, run)?,
                Event::Acknowledged(_, task, fence) => {
                    self.told.retain(|(_, run, _)| run.task != task || run.fence != fence)
                }
                Event::Stopped(_, task, _) => return Err(format!("task {task} was to be stopped")),
                Event::Cut(..) | Event::Answered(..) | Event::Finished(..) => {}
            }
        }
        match result {
            Ok(()) => Ok(()),
            Err(Trouble::Store(_)) => self.restart(),
            Err(Trouble::Wrong(what)) => Err(what),
        }
    }

    fn started(&mut self, worker: WorkerId, run: Run) -> Result<(), String> {
        self.starts += 1;
        let Some(tenant) = self.tenants.get_mut(&run.key) else {
            return Err(format!("task {} of an unknown key was started", run.task));
        };
        let range = tenant.takes_ms * tenant.varies / 1000;
        let takes_ms = tenant.takes_ms - range + self.rng.below(2 * range + 1);
        let share = |ms: f64| ms * 1000.0 / f64::from(tenant.weight.thousandths());
        let charged = f64::from(run.charge.cost.thousandths());
        tenant.largest = tenant.largest.max(share(charged)).max(share(takes_ms as f64));
        tenant.received += share(takes_ms as f64);
        tenant.waiting = tenant.waiting.saturating_sub(1);
        let ends = Millis(self.driver.now.0 + takes_ms);
        if self.trace {
            println!("time {}: {} starts, {takes_ms} ms, {run:?}", self.steps, run.key);
        }
        let key = run.key.clone();
        self.alive.push(Alive { ends, worker, run, takes_ms });
        self.compare(&key)
    }

    /// Both keep waiting: they are as far apart as what has places, or runs, allows.
    fn compare(&mut self, served: &Key) -> Result<(), String> {
        let slots: u32 = self.workers.iter().sum();
        let under_way = f64::from(bounds::PLACED_AHEAD.max(slots) + slots + 1);
        let tenants = &self.tenants;
        self.apart.retain(|(a, b), _| tenants[a].waiting > 0 && tenants[b].waiting > 0);
        for ((a, b), (low, high)) in &mut self.apart {
            if a != served && b != served {
                continue;
            }
            let (a, b) = (&tenants[a], &tenants[b]);
            let now = a.received - b.received;
            (*low, *high) = (low.min(now), high.max(now));
            let allowed = under_way * (a.largest + b.largest);
            self.worst = self.worst.max((*high - *low) / allowed);
            if *high - *low > allowed {
                return Err(format!(
                    "keys {} and {} kept waiting, and the time they received differs by {:.0} ms for each \
                     unit of weight; {allowed:.0} ms can be under way: {a:?} {b:?}",
                    a.key,
                    b.key,
                    *high - *low
                ));
            }
        }
        Ok(())
    }

    fn restart(&mut self) -> Result<(), String> {
        for _ in 0..1000 {
            match self.try_restart() {
                Ok(()) => {
                    let opened = self.driver.tell(Input::Open);
                    return self.after(opened);
                }
                Err(Trouble::Store(_)) => {}
                Err(Trouble::Wrong(what)) => return Err(what),
            }
        }
        Err("the shard could not be taken in 1000 tries".into())
    }

    fn try_restart(&mut self) -> Result<(), Trouble> {
        self.driver.retake()?;
        for (n, slots) in self.workers.clone().into_iter().enumerate() {
            let worker = WorkerId(n as u64);
            self.driver.tell(slots_of(n as u64, slots, &self.queue))?;
            let running = self.alive.iter().filter(|alive| alive.worker == worker);
            let running = running.map(|alive| alive.run.clone()).collect();
            let ended = self.told.iter().filter(|(of, ..)| *of == worker);
            let ended = ended.map(|(_, run, ms)| (run.clone(), End::Succeeded, ending(*ms))).collect();
            self.driver.tell(Input::Report { worker, running, ended, verify: false })?;
        }
        Ok(())
    }

    /// Everything ended, nothing is left.
    fn over(&mut self) -> Result<(), String> {
        let settled = self.driver.settle();
        self.after(settled)?;
        let left =
            self.driver.store.look(SHARD, |t| (t.tasks.len(), t.rows.len(), t.parked.len(), t.keys.len()));
        if left == (0, 0, 0, 0) {
            return Ok(());
        }
        Err(format!("not drained: tasks, rows, shelves, keys in the store {left:?}"))
    }
}

fn pairs(tenants: &BTreeMap<Key, Tenant>) -> Vec<(Key, Key)> {
    let keys: Vec<&Key> = tenants.keys().collect();
    let behind = |n: usize| keys[n + 1..].iter().map(move |b| (*b).clone());
    keys.iter().enumerate().flat_map(|(n, a)| behind(n).map(|b| ((*a).clone(), b))).collect()
}

fn ending(takes_ms: u64) -> Ending {
    Ending { ran_ms: Some(takes_ms), ..Ending::default() }
}

fn weight(thousandths: u32) -> Weight {
    Weight::from_thousandths(thousandths).unwrap_or(Weight::ONE)
}
