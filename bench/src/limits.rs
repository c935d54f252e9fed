//! `limits`: what a key at its limit costs the others. It runs as many tasks as it may, four, and up to a million more of
//! them wait. Two questions: how soon does a single task of another key start, with slots free; and how many cycles of
//! other keys does the core do in a second. Each beside the same with the key absent, in the same run. The store is the one
//! in memory, the bounds are the default ones.
//!
//! Cycles are measured in two ways: the key's runs go on all the time, or they end as soon as others do, so that its
//! next tasks come from its shelf again and again. `none` has no limits at all: how it differs from `absent` is what
//! counting the runs of keys costs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use evenhand_core::backlog::Weight;
use evenhand_core::change::Settings;
use evenhand_core::life::{End, Ending};
use evenhand_core::messages::KeyChange;
use evenhand_core::names::{Fence, Key, Millis, QueueName, RequestId, ShardId, TaskId, WorkerId};
use evenhand_core::{Bounds, Effect, Input, NewTask, Shard};
use evenhand_store::{Memory, Store, ready};

use crate::Failure;
use crate::cli::LimitsArgs;
use crate::clock::{Spent, timed};
use crate::measure::{Cycles, Effort, rate, rounds};
use crate::report::{Report, Value};
use crate::rng::Rng;

const SHARD: ShardId = ShardId(1);
const WORKER: WorkerId = WorkerId(1);
/// Runs that the key may have.
const LIMIT: u32 = 4;
/// Its weight: more is due to it, among all keys, than its limit lets it have.
const WEIGHT: f64 = 100.0;
/// Slots of the others; those of the key come on top where it is there.
const SLOTS: u32 = 96;
const BATCH: u64 = 100;
/// Keys and standing tasks of the others, where cycles are measured.
const KEYS: u64 = 1_000;
const STANDING: u64 = 10_000;
/// The key's tasks in one enqueue.
const FILL: u64 = 1_000;
/// Single tasks of one stage, before it is another's turn.
const IN_TURN: u64 = 100;
/// The shard's clock moves by a millisecond in so many tasks.
const TASKS_PER_MS: u64 = 500;

/// What stands beside the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    /// Nothing, and no key has a limit.
    NoLimits,
    /// Nothing; the key has its limit, but no tasks.
    Absent,
    /// So many tasks of the key wait.
    Waiting {
        tasks: u64,
        /// Its runs end as the others' do.
        ends: bool,
    },
}

impl Beside {
    fn name(self) -> &'static str {
        match self {
            Beside::NoLimits => "none",
            Beside::Absent => "absent",
            Beside::Waiting { ends: false, .. } => "runs go on",
            Beside::Waiting { ends: true, .. } => "runs end",
        }
    }

    fn tasks(self) -> u64 {
        match self {
            Beside::NoLimits | Beside::Absent => 0,
            Beside::Waiting { tasks, .. } => tasks,
        }
    }
}

/// Measures single tasks, then cycles.
pub(crate) fn run(args: &LimitsArgs, show: impl Fn(Report)) -> Result<(), Failure> {
    let waiting = |ends| args.waiting.iter().map(move |&tasks| Beside::Waiting { tasks, ends });
    let kinds: Vec<Beside> =
        [Beside::Absent, Beside::NoLimits].into_iter().chain(waiting(false)).chain(waiting(true)).collect();
    let mut stages = Vec::new();
    for kind in kinds {
        eprintln!("limits: building {} tasks of a key at its limit, {}", kind.tasks(), kind.name());
        stages.push(Stage::build(kind)?);
    }
    show(single_tasks(&mut stages, args.probes)?);
    for stage in &mut stages {
        stage.fill_others()?;
    }
    show(cycles(&mut stages, Effort::from(&args.effort))?);
    stages.iter().try_for_each(Stage::check)
}

fn single_tasks(stages: &mut [Stage], probes: u64) -> Result<Report, Failure> {
    let mut report = Report::new(
        "limits-start",
        "Limits: from the enqueue of a single task of another key to its start, while a key is at its limit of 4 with\n\
         so many tasks waiting. Times are inside the core; the memory store's own stand beside them. `x absent` compares\n\
         with the first row.",
        &[
            ("limited_key", "limited key"),
            ("waiting", "waiting"),
            ("steps", "steps"),
            ("commits", "commits"),
            ("ns_to_start", "ns to start"),
            ("ns_to_start_p99", "p99"),
            ("times_absent", "x absent"),
            ("ns_in_store", "in store"),
        ],
    );
    let mut all: Vec<Vec<Probe>> = stages.iter().map(|_| Vec::new()).collect();
    // One turn that does not count: to warm up.
    for turn in 0..=probes.div_ceil(IN_TURN) {
        for (stage, probes) in stages.iter_mut().zip(&mut all) {
            for _ in 0..IN_TURN {
                let probe = stage.probe()?;
                probes.extend((turn > 0).then_some(probe));
            }
        }
    }
    let mut first = None;
    for (stage, probes) in stages.iter().zip(&all).filter(|(stage, _)| !stage.ends()) {
        let at = |per_cent: usize, what: fn(&Probe) -> u64| {
            let mut values: Vec<u64> = probes.iter().map(what).collect();
            values.sort_unstable();
            values.get(values.len().saturating_sub(1) * per_cent / 100).copied().unwrap_or_default()
        };
        let inside = at(50, |probe| probe.inside.as_nanos() as u64);
        let absent = *first.get_or_insert(inside);
        report.row(vec![
            Value::text(stage.kind.name()),
            Value::Count(stage.kind.tasks()),
            Value::Count(at(100, |probe| probe.steps)),
            Value::Count(at(100, |probe| probe.commits)),
            Value::Number(inside as f64, 0),
            Value::Number(at(99, |probe| probe.inside.as_nanos() as u64) as f64, 0),
            Value::Number(inside as f64 / absent.max(1) as f64, 2),
            Value::Number(at(50, |probe| probe.store.as_nanos() as u64) as f64, 0),
        ]);
    }
    Ok(report)
}

fn cycles(stages: &mut [Stage], effort: Effort) -> Result<Report, Failure> {
    let mut report = Report::new(
        "limits-cycles",
        "Limits: cycles of 1,000 other keys with 10,000 tasks, beside a key at its limit. Where its runs end, some\n\
         cycles are its own. Times are inside the core. `x absent` compares with the first row, round by round.",
        &[
            ("limited_key", "limited key"),
            ("waiting", "waiting"),
            ("cycles_per_second", "cycles/s"),
            ("ns_per_cycle", "ns/cycle"),
            ("spread_percent", "spread %"),
            ("times_absent", "x absent"),
            ("own_cycles", "own cycles"),
            ("reads", "reads"),
        ],
    );
    for stage in stages.iter_mut() {
        (stage.own, stage.reads) = (0, 0);
    }
    let mut things: Vec<&mut dyn Cycles> = stages.iter_mut().map(|stage| stage as &mut dyn Cycles).collect();
    let all = rounds("limits", effort, &mut things)?;
    for (stage, ours) in stages.iter().zip(&all) {
        report.row(vec![
            Value::text(stage.kind.name()),
            Value::Count(stage.kind.tasks()),
            Value::Number(rate(ours.inside()), 0),
            Value::Number(ours.inside(), 0),
            Value::Number(100.0 * ours.spread(), 0),
            Value::Number(ours.cost_over(&all[0]), 2),
            Value::Count(stage.own),
            Value::Count(stage.reads),
        ]);
    }
    Ok(report)
}

/// What it took to start a single task.
#[derive(Clone, Copy, Debug)]
struct Probe {
    steps: u64,
    commits: u64,
    inside: Duration,
    store: Duration,
}

/// A run that the worker has been told to start.
#[derive(Clone, Debug)]
struct Started {
    task: TaskId,
    fence: Fence,
    attempt: u16,
    own: bool,
}

/// A shard with the key that is at its limit, or without.
#[derive(Debug)]
struct Stage {
    kind: Beside,
    shard: Shard,
    store: Memory,
    queue: QueueName,
    key: Key,
    rng: Rng,
    inputs: Vec<Input>,
    /// What runs, oldest first. The key's are not among them where they go on.
    runs: VecDeque<Started>,
    requests: u64,
    enqueued: u64,
    wake: Option<Millis>,
    spent: Spent,
    /// Since somebody last looked.
    steps: u64,
    commits: u64,
    started: u64,
    /// Ends of the key's runs, and reads of its shelf.
    own: u64,
    reads: u64,
    /// Others that stand.
    standing: u64,
}

impl Stage {
    fn build(kind: Beside) -> Result<Stage, Failure> {
        let store = Memory::default();
        let taken = ready(store.take(SHARD, None)).map_err(|error| error.to_string())?;
        let shard = Shard::new(Bounds::default(), taken.epoch, 1, taken.metadata)?
            .with_defaults(Settings { retention_ms: 0, ..Settings::default() });
        let said = |refusal: evenhand_core::Refusal| refusal.to_string();
        let mut stage = Stage {
            kind,
            shard,
            store,
            queue: QueueName::new("render").map_err(said)?,
            key: Key::new("limited").map_err(said)?,
            rng: Rng::new(5),
            inputs: vec![Input::Open],
            runs: VecDeque::new(),
            requests: 0,
            enqueued: 0,
            wake: None,
            spent: Spent::default(),
            steps: 0,
            commits: 0,
            started: 0,
            own: 0,
            reads: 0,
            standing: 0,
        };
        if kind != Beside::NoLimits {
            let weight = Weight::new(WEIGHT).map_err(said)?;
            let change =
                KeyChange { weight: Some(Some(weight)), limit: Some(Some(LIMIT)), ..KeyChange::default() };
            let (request, queue, key) = (stage.request(), stage.queue.clone(), stage.key.clone());
            stage.inputs.push(Input::SetKey { request, queue, key, change });
        }
        let slots = SLOTS + if kind.tasks() > 0 { LIMIT } else { 0 };
        let queues = vec![(stage.queue.clone(), Weight::ONE)];
        stage.inputs.push(Input::Slots { worker: WORKER, slots, queues });
        stage.follow()?;
        let mut left = if kind.tasks() > 0 { kind.tasks() + u64::from(LIMIT) } else { 0 };
        while left > 0 {
            let many = left.min(FILL);
            left -= many;
            let tasks = (0..many).map(|_| NewTask::new(stage.key.clone())).collect();
            stage.enqueue(tasks);
            stage.follow()?;
        }
        stage.check()?;
        Ok(stage)
    }

    fn ends(&self) -> bool {
        matches!(self.kind, Beside::Waiting { ends: true, .. })
    }

    /// Gives the others something to do for ever.
    fn fill_others(&mut self) -> Result<(), Failure> {
        for _ in 0..STANDING / BATCH {
            self.enqueue_others(BATCH)?;
            self.follow()?;
        }
        self.standing = STANDING;
        self.check()
    }

    fn request(&mut self) -> RequestId {
        self.requests += 1;
        RequestId(self.requests)
    }

    fn enqueue(&mut self, tasks: Vec<NewTask>) {
        self.enqueued += tasks.len() as u64;
        let (request, queue) = (self.request(), self.queue.clone());
        self.inputs.push(Input::Enqueue { request, queue, tasks, once: None });
    }

    fn enqueue_others(&mut self, many: u64) -> Result<(), Failure> {
        let other = |rng: &mut Rng| {
            let key = Key::new(&format!("tenant-{:06}", rng.below(KEYS)));
            key.map(NewTask::new).map_err(|refusal| refusal.to_string())
        };
        let tasks: Result<Vec<NewTask>, Failure> = (0..many).map(|_| other(&mut self.rng)).collect();
        self.enqueue(tasks?);
        Ok(())
    }

    fn end(&mut self, run: Started) {
        let Started { task, fence, attempt, .. } = run;
        let (end, ending) = (End::Succeeded, Ending::default());
        self.inputs.push(Input::Ended { worker: WORKER, task, fence, attempt, end, ending });
    }

    /// How soon a single task of another key starts. It ends again.
    fn probe(&mut self) -> Result<Probe, Failure> {
        self.enqueue_others(1)?;
        self.spent = Spent::default();
        (self.steps, self.commits, self.started) = (0, 0, 0);
        while self.started == 0 && !self.inputs.is_empty() {
            self.round()?;
        }
        let Spent { inside, store, .. } = self.spent;
        let probe = Probe { steps: self.steps, commits: self.commits, inside, store };
        self.follow()?;
        match self.runs.pop_back() {
            Some(run) if !run.own => self.end(run),
            Some(_) | None => return Err("a single task did not start, though slots are free".into()),
        }
        self.follow()?;
        Ok(probe)
    }

    /// Does what the shard wants done, and tells it so, until it wants nothing more.
    fn follow(&mut self) -> Result<(), Failure> {
        while !self.inputs.is_empty() {
            self.round()?;
        }
        Ok(())
    }

    /// Steps what has come, closes it into a commit, and does what follows.
    fn round(&mut self) -> Result<(), Failure> {
        let now = Millis(self.enqueued / TASKS_PER_MS);
        if self.wake.is_some_and(|at| at <= now) {
            self.wake = None;
            self.inputs.push(Input::Tick);
        }
        let mut effects = Vec::new();
        let (shard, inputs, steps) = (&mut self.shard, &mut self.inputs, &mut self.steps);
        timed(&mut self.spent.inside, || {
            for input in inputs.drain(..) {
                *steps += 1;
                shard.step(now, input, &mut effects);
            }
            shard.seal(&mut effects);
        });
        effects.into_iter().try_for_each(|effect| self.obey(effect))
    }

    fn obey(&mut self, effect: Effect) -> Result<(), Failure> {
        let began = Instant::now();
        match effect {
            Effect::Save { commit, changes } => {
                let epoch = self.shard.epoch();
                ready(self.store.commit(SHARD, epoch, changes)).map_err(|error| error.to_string())?;
                self.commits += 1;
                self.inputs.push(Input::Committed { commit });
            }
            Effect::Load { load, lane, above, limit } => {
                let page = ready(self.store.read_lane(SHARD, lane, above, limit));
                let page = page.map_err(|error| error.to_string())?;
                self.inputs.push(Input::Loaded { load, rows: page.rows, end: page.end });
            }
            Effect::LoadParked { load, lane, key, above, limit } => {
                let page = ready(self.store.read_parked(SHARD, lane, key, above, limit));
                let page = page.map_err(|error| error.to_string())?;
                self.reads += 1;
                self.inputs.push(Input::ParkedLoaded { load, rows: page.rows, end: page.end });
            }
            Effect::Start { run, .. } => {
                self.started += 1;
                let own = run.key == self.key;
                if !own || self.ends() {
                    self.runs.push_back(Started {
                        task: run.task,
                        fence: run.fence,
                        attempt: run.attempt,
                        own,
                    });
                }
                return Ok(());
            }
            Effect::Wake { at } => {
                self.wake = Some(at);
                return Ok(());
            }
            Effect::Answer { answer: Err(refusal), .. } => return Err(refusal.to_string()),
            Effect::RefuseWorker { refusal, .. } => return Err(refusal.to_string()),
            Effect::Broken { what } => return Err(what),
            Effect::LoadTimers { .. } => {
                return Err("the shard wants timers, but nothing waits for a time".into());
            }
            Effect::LoadTask { task, .. } => return Err(format!("the shard lost sight of task {task}")),
            Effect::Stop { task, .. } => return Err(format!("the shard wants task {task} to stop")),
            Effect::Answer { answer: Ok(_), .. }
            | Effect::Limit { .. }
            | Effect::Warn { .. }
            | Effect::InteractiveOver { .. }
            | Effect::Acknowledge { .. }
            | Effect::MemberSaved { .. }
            | Effect::Marked { .. }
            | Effect::Retried { .. }
            | Effect::Due { .. }
            | Effect::Finished { .. } => return Ok(()),
        }
        self.spent.store += began.elapsed();
        Ok(())
    }

    /// Checks that the key is at its limit and that nothing got lost.
    fn check(&self) -> Result<(), Failure> {
        let own = if self.kind.tasks() > 0 { self.kind.tasks() + u64::from(LIMIT) } else { 0 };
        let counts = self.shard.counts(&self.queue).map_or((0, 0), |of| (of.waiting, of.running));
        if counts.0 + counts.1 != own + self.standing {
            return Err(format!(
                "{} wait and {} run, not {} in all",
                counts.0,
                counts.1,
                own + self.standing
            ));
        }
        let held = self.shard.held_keys(&self.queue).0;
        // Where its runs end, its next ones may be on their way.
        if held != u64::from(own > 0) && !self.ends() {
            return Err(format!("{held} keys are at their limits"));
        }
        Ok(())
    }
}

impl Cycles for Stage {
    fn turnover(&self) -> u64 {
        self.standing
    }

    /// A batch of ends, and what replaces them.
    fn batch(&mut self) -> Result<u64, Failure> {
        let (mut left, mut own) = (BATCH, 0);
        while left > 0 {
            let ending = (left as usize).min(self.runs.len());
            if ending == 0 {
                return Err("no task runs: the backlog ran dry".into());
            }
            let ended: Vec<Started> = self.runs.drain(..ending).collect();
            left -= ending as u64;
            for run in ended {
                own += u64::from(run.own);
                self.end(run);
            }
            if left == 0 {
                self.own += own;
                let tasks: Vec<NewTask> = (0..own).map(|_| NewTask::new(self.key.clone())).collect();
                if !tasks.is_empty() {
                    self.enqueue(tasks);
                }
                self.enqueue_others(BATCH - own)?;
            }
            self.follow()?;
        }
        Ok(BATCH)
    }

    fn spent(&mut self) -> Spent {
        std::mem::take(&mut self.spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Beside; 4] = [
        Beside::NoLimits,
        Beside::Absent,
        Beside::Waiting { tasks: 3_000, ends: false },
        Beside::Waiting { tasks: 3_000, ends: true },
    ];

    #[test]
    fn a_single_task_of_another_key_starts_with_its_commit() {
        for kind in KINDS {
            let mut stage = Stage::build(kind).unwrap();
            for _ in 0..10 {
                let probe = stage.probe().unwrap();
                assert_eq!((probe.steps, probe.commits), (2, 1), "{kind:?}");
            }
            stage.check().unwrap();
        }
    }

    #[test]
    fn cycles_leave_everything_as_long_as_it_was() {
        for kind in KINDS {
            let mut stage = Stage::build(kind).unwrap();
            stage.fill_others().unwrap();
            for _ in 0..300 {
                stage.batch().unwrap();
            }
            stage.check().unwrap();
            assert_eq!(stage.own > 100, stage.ends(), "{kind:?}: {}", stage.own);
        }
    }
}
