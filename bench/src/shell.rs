//! Drives a shard as a server would: inputs are stepped in batches, a batch is sealed into one commit, the
//! commit is acknowledged, reads are answered, ended runs are reported. Each ended task is replaced by one
//! of a random key, so the backlog keeps its length.
//!
//! Time inside the core is what `step` and `seal` take, and nothing else: tasks are made before, and
//! effects thrown away after. Commits are acknowledged at once and saved nowhere, unless there is a store.

use std::collections::VecDeque;

use evenhand_core::backlog::Weight;
use evenhand_core::change::{Metadata, Settings};
use evenhand_core::life::{End, Ending};
use evenhand_core::names::{Epoch, Fence, Millis, QueueName, RequestId, ShardId, TaskId, WorkerId};
use evenhand_core::shard::Held;
use evenhand_core::{Bounds, Effect, Input, Shard};
use evenhand_store::{Memory, Store, ready};

use crate::Failure;
use crate::clock::{Spent, timed};
use crate::load::Load;
use crate::measure::Cycles;
use crate::rng::Rng;

const SHARD: ShardId = ShardId(1);
/// The shard's clock moves by a millisecond in so many tasks: half a million of them a second.
const TASKS_PER_MS: u64 = 500;

/// Bounds under which a shard holds all of a load in memory and never reads.
pub(crate) fn all_in_memory(load: &Load) -> Bounds {
    Bounds { window_rows: 2 * load.tasks as usize + 1_000_000, ..Bounds::default() }
}

/// A run that a worker has been told to start.
#[derive(Clone, Copy, Debug)]
struct Started {
    worker: WorkerId,
    task: TaskId,
    fence: Fence,
    attempt: u16,
    queue: usize,
}

/// A shard under a load.
#[derive(Debug)]
pub(crate) struct Shell {
    load: Load,
    rng: Rng,
    shard: Shard,
    store: Option<Memory>,
    queues: Vec<QueueName>,
    /// What runs, oldest first. Runs end in this order.
    runs: VecDeque<Started>,
    /// Per queue, ended tasks that have not been replaced yet. A full batch of them is.
    missing: Vec<u64>,
    enqueued: u64,
    wake: Option<Millis>,
    inputs: Vec<Input>,
    effects: Vec<Effect>,
    spent: Spent,
}

impl Shell {
    /// Builds the backlog, then lets the workers in.
    pub(crate) fn build(
        load: Load,
        bounds: Bounds,
        store: Option<Memory>,
        seed: u64,
    ) -> Result<Shell, Failure> {
        load.check()?;
        let mut shell = Shell::standing(load, bounds, store, seed)?;
        for worker in 0..load.workers {
            let queues = load.queues_of(worker).into_iter();
            let queues = queues.map(|queue| (shell.queues[queue as usize].clone(), Weight::ONE)).collect();
            shell.inputs.push(Input::Slots { worker: WorkerId(worker + 1), slots: load.slots, queues });
        }
        shell.step(true);
        shell.follow()?;
        Ok(shell)
    }

    /// The backlog alone, without workers.
    pub(crate) fn standing(
        load: Load,
        bounds: Bounds,
        store: Option<Memory>,
        seed: u64,
    ) -> Result<Shell, Failure> {
        let (epoch, metadata) = match &store {
            Some(store) => {
                let taken = ready(store.take(SHARD, None)).map_err(|error| error.to_string())?;
                (taken.epoch, taken.metadata)
            }
            None => (Epoch(1), Metadata::default()),
        };
        let queues: Result<Vec<QueueName>, Failure> = (0..load.queues).map(Load::queue).collect();
        let mut shell = Shell {
            load,
            rng: Rng::new(seed),
            // Ends are not remembered: that is the store's work, not the core's.
            shard: Shard::new(bounds, epoch, seed, metadata)?
                .with_defaults(Settings { retention_ms: 0, ..Settings::default() }),
            store,
            queues: queues?,
            runs: VecDeque::new(),
            missing: vec![0; load.queues as usize],
            enqueued: 0,
            wake: None,
            inputs: vec![Input::Open],
            effects: Vec::new(),
            spent: Spent::default(),
        };
        for queue in 0..load.queues {
            let mut made = 0;
            while made < load.tasks_of(queue) {
                let to = (made + load.batch).min(load.tasks_of(queue));
                let tasks: Result<Vec<_>, Failure> = (made..to).map(|n| load.standing(queue, n)).collect();
                shell.enqueue(queue, tasks?);
                shell.step(true);
                shell.follow()?;
                made = to;
            }
        }
        Ok(shell)
    }

    /// What the shard holds in memory.
    pub(crate) fn held(&self) -> Held {
        self.shard.held()
    }

    /// The shard alone: all that the shell holds beside it is given back.
    pub(crate) fn into_shard(self) -> Shard {
        self.shard
    }

    /// Checks that the shard has every task that was put into it and has not ended.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for (n, name) in self.queues.iter().enumerate() {
            let counts = self.shard.counts(name).ok_or_else(|| format!("queue {name} is gone"))?;
            let (has, should) =
                (counts.waiting + counts.running, self.load.tasks_of(n as u64) - self.missing[n]);
            if has != should {
                return Err(format!("queue {name} has {has} tasks, not {should}"));
            }
        }
        Ok(())
    }

    fn enqueue(&mut self, queue: u64, tasks: Vec<evenhand_core::NewTask>) {
        self.enqueued += tasks.len() as u64;
        let queue = self.queues[queue as usize].clone();
        self.inputs.push(Input::Enqueue { request: RequestId(self.enqueued), queue, tasks, once: None });
    }

    /// Replaces what ended, by whole enqueues.
    fn replace(&mut self) -> Result<(), Failure> {
        for queue in 0..self.load.queues {
            while self.missing[queue as usize] >= self.load.batch {
                self.missing[queue as usize] -= self.load.batch;
                let tasks: Result<Vec<_>, Failure> =
                    (0..self.load.batch).map(|_| self.load.random(queue, &mut self.rng)).collect();
                self.enqueue(queue, tasks?);
            }
        }
        Ok(())
    }

    /// Steps the inputs; this is the time that counts.
    fn step(&mut self, seal: bool) {
        let now = Millis(self.enqueued / TASKS_PER_MS);
        let (shard, inputs, effects) = (&mut self.shard, &mut self.inputs, &mut self.effects);
        timed(&mut self.spent.inside, || {
            for input in inputs.drain(..) {
                shard.step(now, input, effects);
            }
            if seal {
                shard.seal(effects);
            }
        });
    }

    /// Does what the shard wants done, and tells it so, until it wants nothing more.
    fn follow(&mut self) -> Result<(), Failure> {
        while !self.effects.is_empty() {
            let mut effects = std::mem::take(&mut self.effects);
            for effect in effects.drain(..) {
                self.obey(effect)?;
            }
            self.effects = effects;
            self.step(false);
        }
        Ok(())
    }

    fn obey(&mut self, effect: Effect) -> Result<(), Failure> {
        match effect {
            Effect::Save { commit, changes } => {
                if let Some(store) = &self.store {
                    let epoch = self.shard.epoch();
                    timed(&mut self.spent.store, || ready(store.commit(SHARD, epoch, changes)))
                        .map_err(|error| error.to_string())?;
                }
                self.inputs.push(Input::Committed { commit });
            }
            Effect::Load { load, lane, above, limit } => {
                let store =
                    self.store.as_ref().ok_or("the shard wants to read, but should hold everything")?;
                let page = timed(&mut self.spent.store, || ready(store.read_lane(SHARD, lane, above, limit)))
                    .map_err(|error| error.to_string())?;
                self.spent.reads += 1;
                self.spent.rows_read += page.rows.len() as u64;
                self.inputs.push(Input::Loaded { load, rows: page.rows, end: page.end });
            }
            Effect::Start { worker, run, .. } => self.runs.push_back(Started {
                worker,
                task: run.task,
                fence: run.fence,
                attempt: run.attempt,
                queue: run.lane.queue.0 as usize,
            }),
            Effect::Wake { at } => self.wake = Some(at),
            Effect::Answer { answer: Err(refusal), .. } => return Err(refusal.to_string()),
            Effect::RefuseWorker { refusal, .. } => return Err(refusal.to_string()),
            Effect::Broken { what } => return Err(what),
            Effect::LoadParked { .. } | Effect::LoadTimers { .. } => {
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
            | Effect::Finished { .. } => {}
        }
        Ok(())
    }
}

impl Cycles for Shell {
    fn turnover(&self) -> u64 {
        self.load.tasks
    }

    /// One commit: a batch of ends (and so of starts), and whatever enqueues replace them.
    fn batch(&mut self) -> Result<u64, Failure> {
        if self.wake.is_some_and(|at| at.0 <= self.enqueued / TASKS_PER_MS) {
            self.wake = None;
            self.inputs.push(Input::Tick);
        }
        let mut left = self.load.batch as usize;
        while left > 0 {
            let ending = left.min(self.runs.len());
            if ending == 0 {
                return Err("no task runs: the backlog ran dry".into());
            }
            for run in self.runs.drain(..ending) {
                let Started { worker, task, fence, attempt, queue } = run;
                self.missing[queue] += 1;
                self.inputs.push(Input::Ended {
                    worker,
                    task,
                    fence,
                    attempt,
                    end: End::Succeeded,
                    ending: Ending::default(),
                });
            }
            left -= ending;
            if left == 0 {
                self.replace()?;
            }
            self.step(left == 0);
            self.follow()?;
        }
        Ok(self.load.batch)
    }

    fn spent(&mut self) -> Spent {
        std::mem::take(&mut self.spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs_steadily(load: Load, bounds: Bounds, store: Option<Memory>) -> Shell {
        let mut shell = Shell::build(load, bounds, store, 1).unwrap();
        for _ in 0..100 {
            shell.batch().unwrap();
        }
        shell.check().unwrap();
        shell
    }

    #[test]
    fn the_backlog_stays_as_long_as_it_was() {
        let load = Load::new(50, 2_000);
        let shell = runs_steadily(load, all_in_memory(&load), None);
        let held = shell.held();
        assert_eq!((held.rows, held.runs), (1_900, 100));
    }

    #[test]
    fn fewer_slots_than_a_batch_are_enough() {
        let load = Load { slots: 1, ..Load::new(50, 2_000) };
        let shell = runs_steadily(load, all_in_memory(&load), None);
        assert_eq!(shell.held().runs, 1);
    }

    #[test]
    fn keys_are_forgotten_and_return() {
        let load = Load::new(2_000, 2_000);
        let shell = runs_steadily(load, all_in_memory(&load), None);
        assert!((1_000..1_900).contains(&shell.held().keys), "{:?}", shell.held());
    }

    #[test]
    fn many_queues_and_workers_share_the_load() {
        let load = Load { queues: 10, workers: 3, slots: 20, ..Load::new(100, 5_000) };
        runs_steadily(load, all_in_memory(&load), None);
    }

    #[test]
    fn a_small_window_reads_from_the_store() {
        let bounds = Bounds { window_rows: 500, page_rows: 100, ..Bounds::default() };
        let mut shell = runs_steadily(Load::new(50, 5_000), bounds, Some(Memory::default()));
        assert!(shell.held().rows <= 500);
        assert!(shell.spent().rows_read > 5_000);
    }
}
