//! A story that no random world comes to: the store is set back, and the next owner gives a run the same number as the
//! one before it did. When the end of the earlier run is heard, it must not be taken for the end of the later one.

use std::collections::VecDeque;

use evenhand_core::canary::Bug;
use evenhand_core::life::{End, Ending};
use evenhand_core::names::{Key, Millis, QueueName, RequestId, WorkerId};
use evenhand_core::{Bounds, Effect, Input, NewTask, Refusal, Run, Shard};
use evenhand_store::{Memory, Store, ready};

use crate::driver::SHARD;
use crate::reads::Read;

/// An owner's shard, whose commits and reads happen at once.
struct Owned {
    store: Memory,
    shard: Shard,
    started: Vec<Run>,
}

impl Owned {
    fn take(store: &Memory, nonce: u64, bug: Option<Bug>) -> Result<Owned, String> {
        let taken = ready(store.take(SHARD, None)).map_err(|error| error.to_string())?;
        let (bounds, epoch) = (Bounds::default(), taken.epoch);
        let shard = match bug {
            Some(bug) => Shard::with_bug(bounds, epoch, 7, taken.metadata, bug)?,
            None => Shard::new(bounds, epoch, 7, taken.metadata)?,
        };
        let mut owned = Owned { store: store.clone(), shard: shard.with_nonce(nonce), started: Vec::new() };
        owned.step(Input::Open)?;
        Ok(owned)
    }

    fn step(&mut self, input: Input) -> Result<(), String> {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let mut effects = Vec::new();
            self.shard.step(Millis(1_000), input, &mut effects);
            self.shard.seal(&mut effects);
            for effect in effects {
                match effect {
                    Effect::Save { commit, changes } => {
                        let epoch = self.shard.epoch();
                        let saved = ready(self.store.commit(SHARD, epoch, changes));
                        saved.map_err(|error| error.to_string())?;
                        inputs.push_back(Input::Committed { commit });
                    }
                    Effect::Load { load, lane, above, limit } => {
                        inputs.push_back(Read::Lane { load, lane, above, limit }.happen(&self.store));
                    }
                    Effect::LoadTimers { load, above, limit } => {
                        inputs.push_back(Read::Timers { load, above, limit }.happen(&self.store));
                    }
                    Effect::LoadTask { load, task } => {
                        inputs.push_back(Read::Task { load, task }.happen(&self.store));
                    }
                    Effect::Start { run, .. } => self.started.push(run),
                    Effect::LoadParked { .. }
                    | Effect::Stop { .. }
                    | Effect::Limit { .. }
                    | Effect::Warn { .. }
                    | Effect::InteractiveOver { .. }
                    | Effect::RefuseWorker { .. }
                    | Effect::Acknowledge { .. }
                    | Effect::MemberSaved { .. }
                    | Effect::Marked { .. }
                    | Effect::Answer { .. }
                    | Effect::Retried { .. }
                    | Effect::Due { .. }
                    | Effect::Finished { .. }
                    | Effect::Wake { .. }
                    | Effect::Broken { .. } => {}
                }
            }
        }
        Ok(())
    }

    /// A worker with one slot comes.
    fn worker(&mut self, worker: u64) -> Result<(), String> {
        let queue = (queue().map_err(|refusal| refusal.to_string())?, evenhand_core::backlog::Weight::ONE);
        self.step(Input::Slots { worker: WorkerId(worker), slots: 1, queues: vec![queue] })
    }
}

fn queue() -> Result<QueueName, Refusal> {
    QueueName::new("q")
}

/// Plays it. An error says what went wrong.
pub fn play(bug: Option<Bug>) -> Result<(), String> {
    let store = Memory::default();
    let mut first = Owned::take(&store, 1, bug)?;
    let queue = queue().map_err(|refusal| refusal.to_string())?;
    let tasks = vec![NewTask::new(Key::shared())];
    first.step(Input::Enqueue { request: RequestId(1), queue, tasks, once: None })?;
    let copy = store.look(SHARD, Clone::clone);
    let mut before = Owned::take(&store, 2, bug)?;
    before.worker(1)?;
    store.set_back(SHARD, copy);
    let mut after = Owned::take(&store, 3, bug)?;
    after.worker(2)?;
    let ([earlier], [later]) = (&before.started[..], &after.started[..]) else {
        return Err("the task was not started once by each owner".into());
    };
    let (task, fence, attempt, now_runs) = (earlier.task, earlier.fence, earlier.attempt, later.clone());
    let (worker, ending) = (WorkerId(1), Ending::default());
    after.step(Input::Ended { worker, task, fence, attempt, end: End::Succeeded, ending })?;
    match after.shard.run(now_runs.task) {
        Some(_) => Ok(()),
        None => Err(format!("task {task} runs as {:?}, and is taken for ended", now_runs.fence)),
    }
}
