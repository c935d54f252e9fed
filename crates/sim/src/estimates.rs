//! How good estimates are. Loads are played in lock step, in simulated time; at every start of a task what was said of it
//! while it waited is compared with what happened.
//!
//! The upper bound must hold wherever nothing goes ahead that did not stand ahead when it was given: so the loads that
//! measure it have their backlog from the beginning, or one key, whose later tasks go behind. The expected time is measured
//! in steady load, where tasks come as fast as they end.

use std::collections::{BTreeMap, BTreeSet};

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::change::{Place, Settings};
use evenhand_core::estimate::Wanted;
use evenhand_core::life::End;
use evenhand_core::names::{Key, Millis, QueueName, TaskId, WorkerId};
use evenhand_core::{Bounds, Input, NewTask, Refusal, Run};

use crate::driver::{Driver, Event, SHARD, Trouble, plain, slots_of};
use crate::rng::Rng;

/// A load to be measured.
#[derive(Clone, Debug)]
pub struct Load {
    /// What it is.
    pub name: &'static str,
    /// Keys that send tasks.
    pub keys: u64,
    /// Durations and limits; none if durations are deadlines alone.
    pub classes: Vec<ClassLimit>,
    /// Durations that tasks name, in milliseconds; 0 is none.
    pub durations: Vec<u64>,
    /// So many may start in a second, in thousandths; 0 is no rate.
    pub per_second: u64,
    /// A run takes all of its time, or any part of it.
    pub exact: bool,
    /// Slots.
    pub slots: u32,
    /// Tasks that wait in the beginning.
    pub backlog: u64,
    /// Tasks that come later, each when one has ended.
    pub steady: u64,
    /// Its upper bound must hold for every start.
    pub strict: bool,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Starts of tasks that had been given a bound.
    pub bounded: u64,
    /// Those that were later than their bound.
    pub late: Vec<String>,
    /// Errors of the expected time, in parts of the wait, of waits that were longer than ten runs take.
    pub errors: Vec<f64>,
}

impl Measured {
    /// The error that half of the estimates do not exceed.
    pub fn median_error(&self) -> f64 {
        let mut errors = self.errors.clone();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied().unwrap_or(0.0)
    }
}

fn class(duration_ms: u64, limit: Limit) -> ClassLimit {
    ClassLimit { duration_ms, limit }
}

/// Every load.
pub fn loads() -> Vec<Load> {
    let three =
        vec![class(3_000, Limit::All), class(10_000, Limit::Slots(5)), class(30_000, Limit::Slots(2))];
    let five = vec![
        class(1_000, Limit::All),
        class(3_000, Limit::Percent(75)),
        class(10_000, Limit::Percent(50)),
        class(30_000, Limit::Slots(2)),
        class(90_000, Limit::Slots(1)),
    ];
    let one = Load {
        name: "one key, fixed durations",
        keys: 1,
        classes: Vec::new(),
        durations: vec![500, 2_000, 7_000],
        per_second: 0,
        exact: false,
        slots: 8,
        backlog: 400,
        steady: 400,
        strict: true,
    };
    let of = |classes: &[ClassLimit]| classes.iter().map(|class| class.duration_ms).collect::<Vec<u64>>();
    let with_default = |classes: &[ClassLimit]| [of(classes), vec![0]].concat();
    vec![
        one.clone(),
        Load { name: "one key, fixed durations, all used up", exact: true, ..one.clone() },
        Load {
            name: "one key, 3 classes",
            classes: three.clone(),
            durations: of(&three),
            steady: 0,
            ..one.clone()
        },
        Load {
            name: "one key, 5 classes",
            classes: five.clone(),
            durations: of(&five),
            steady: 0,
            ..one.clone()
        },
        Load { name: "one key, a rate", per_second: 2_500, ..one.clone() },
        Load { name: "9 keys, fixed durations", keys: 9, steady: 0, strict: false, ..one.clone() },
        Load {
            name: "9 keys, 3 classes",
            keys: 9,
            classes: three.clone(),
            durations: of(&three),
            steady: 0,
            strict: false,
            ..one.clone()
        },
        Load {
            name: "9 keys, 3 classes, default tasks",
            keys: 9,
            classes: three.clone(),
            durations: with_default(&three),
            steady: 0,
            strict: false,
            ..one.clone()
        },
        Load {
            name: "9 keys, 5 classes, default tasks",
            keys: 9,
            classes: five.clone(),
            durations: with_default(&five),
            steady: 0,
            strict: false,
            ..one.clone()
        },
        Load {
            name: "steady: one key, no durations",
            durations: vec![0],
            steady: 3_000,
            backlog: 300,
            strict: false,
            ..one.clone()
        },
        Load {
            name: "steady: one key, 3 classes",
            classes: three.clone(),
            durations: of(&three),
            steady: 3_000,
            strict: false,
            ..one
        },
    ]
}

/// What was said of a task while it waited.
struct Said {
    at: Millis,
    upper_ms: Option<u64>,
    expected_ms: Option<u64>,
}

/// Plays a load.
pub fn play(load: &Load, seed: u64) -> Result<Measured, String> {
    Playing::new(load, seed)?.run().map_err(|trouble| trouble.to_string())
}

struct Playing<'a> {
    load: &'a Load,
    rng: Rng,
    driver: Driver,
    queue: QueueName,
    /// When runs end, and how.
    ends: BTreeSet<(Millis, TaskId)>,
    runs: BTreeMap<TaskId, (Run, Millis, End)>,
    said: BTreeMap<TaskId, Vec<Said>>,
    waiting: BTreeSet<TaskId>,
    steady: u64,
    measured: Measured,
}

impl<'a> Playing<'a> {
    fn new(load: &'a Load, seed: u64) -> Result<Playing<'a>, String> {
        let mut driver = Driver::fresh(Bounds::default());
        driver.checks = false;
        let queue = QueueName::new("q").map_err(|refusal| refusal.to_string())?;
        let (per_second, unit) = (load.per_second, RateUnit::Tasks);
        let rate = (per_second > 0).then_some(Rate { per_second, burst: 1_000, unit });
        let settings = Settings { classes: load.classes.clone(), rate, ..plain() };
        let request = driver.request();
        let configure = Input::Configure { request, queue: queue.clone(), settings, version: None };
        driver.tell(configure).map_err(|trouble| trouble.to_string())?;
        Ok(Playing {
            load,
            rng: Rng::new(seed),
            driver,
            queue,
            ends: BTreeSet::new(),
            runs: BTreeMap::new(),
            said: BTreeMap::new(),
            waiting: BTreeSet::new(),
            steady: load.steady,
            measured: Measured::default(),
        })
    }

    fn run(mut self) -> Result<Measured, Trouble> {
        for _ in 0..self.load.backlog {
            self.put()?;
        }
        self.driver.tell(slots_of(1, self.load.slots, &self.queue))?;
        self.look()?;
        loop {
            // With a rate, tasks start also when none has ended.
            if self.load.per_second > 0 && !self.waiting.is_empty() {
                let next = Millis(self.driver.now.0 + 1);
                if self.ends.first().is_none_or(|(at, _)| *at > next) {
                    self.driver.wait(1)?;
                    self.take_in();
                    continue;
                }
            }
            let Some((at, task)) = self.ends.pop_first() else { break };
            let wait = at.0.saturating_sub(self.driver.now.0);
            self.driver.wait(wait)?;
            let Some((run, _, end)) = self.runs.remove(&task) else { continue };
            self.driver.end(WorkerId(1), &run, end)?;
            if self.steady > 0 {
                self.steady -= 1;
                self.put()?;
            }
            self.look()?;
        }
        Ok(self.measured)
    }

    fn put(&mut self) -> Result<(), Trouble> {
        let wrong = |refusal: Refusal| Trouble::Wrong(refusal.to_string());
        let key = Key::new(&format!("k{}", self.rng.below(self.load.keys))).map_err(wrong)?;
        let mut task = NewTask::new(key);
        task.max_duration_ms = *self.rng.pick(&self.load.durations);
        task.max_attempts = Some(1);
        self.driver.enqueue(&self.queue.clone(), vec![task])
    }

    /// Takes in what happened, and notes what is said of those that wait.
    fn look(&mut self) -> Result<(), Trouble> {
        self.take_in();
        // Somebody asks now and then, of one task or another.
        if self.rng.chance(200) {
            self.ask();
        }
        Ok(())
    }

    fn take_in(&mut self) {
        let now = self.driver.now;
        for event in self.driver.events() {
            match event {
                Event::Answered(_, Ok(evenhand_core::Answer::Accepted(tasks))) => {
                    self.waiting.extend(tasks.into_iter().map(|(task, _)| task));
                }
                Event::Started(_, run) => self.started(run),
                Event::Cut(task, limit_ms) => {
                    if let Some((run, ends, end)) = self.runs.get_mut(&task) {
                        let cut = Millis(run.started.0 + limit_ms).max(now);
                        if cut < *ends {
                            self.ends.remove(&(*ends, task));
                            (*ends, *end) = (cut, End::TimeUp);
                            self.ends.insert((cut, task));
                        }
                    }
                }
                Event::Answered(..) | Event::Stopped(..) | Event::Acknowledged(..) | Event::Finished(..) => {}
            }
        }
    }

    fn ask(&mut self) {
        let some: Vec<TaskId> = self.waiting.iter().copied().filter(|task| task.0 % 7 == 0).collect();
        let wanted: Vec<Wanted> = self.driver.store.look(SHARD, |tables| {
            let of =
                |task: &TaskId| tables.tasks.get(task).filter(|task| matches!(task.place, Place::Lane(_)));
            let wanted = some.iter().filter_map(of);
            wanted
                .map(|task| Wanted {
                    task: task.id,
                    lane: task.lane,
                    place: task.place,
                    key: task.key.clone(),
                })
                .collect()
        });
        let Some(snapshot) = self.driver.shard.snapshot(&self.queue, self.driver.now) else { return };
        for (wanted, estimate) in wanted.iter().zip(snapshot.estimate(&wanted)) {
            if let Some(estimate) = estimate {
                let (at, upper_ms, expected_ms) = (self.driver.now, estimate.upper_ms, estimate.expected_ms);
                self.said.entry(wanted.task).or_default().push(Said { at, upper_ms, expected_ms });
            }
        }
    }

    fn started(&mut self, run: Run) {
        let now = self.driver.now;
        self.waiting.remove(&run.task);
        let said = self.said.remove(&run.task).unwrap_or_default();
        let longest = if run.limit_ms == 0 { 4_000 } else { run.limit_ms };
        for said in said {
            let waited = now.0 - said.at.0;
            if let Some(upper) = said.upper_ms {
                self.measured.bounded += 1;
                if waited > upper {
                    let text = format!(
                        "task {} started after {waited} ms, said at {}: {upper} at most",
                        run.task, said.at
                    );
                    self.measured.late.push(text);
                }
            }
            if let Some(expected) = said.expected_ms.filter(|_| waited > 10 * longest) {
                self.measured.errors.push((expected as f64 - waited as f64).abs() / waited as f64);
            }
        }
        let takes = if self.load.exact { longest } else { self.rng.range(1, longest) };
        let ends = Millis(now.0 + takes);
        // A default task may well be cut while it runs; it takes as long as it likes.
        self.ends.insert((ends, run.task));
        self.runs.insert(run.task, (run, ends, End::Succeeded));
    }
}
