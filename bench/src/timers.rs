//! `timers`: what it costs to put tasks off. A million of them due at the same moment, a million spread over a
//! day, and, in the same run, a million that wait for nothing. All are accepted, none is started; the store is the
//! one in memory, and the bounds are the default ones, so that timers are read back in pages as on a server.

use std::time::Duration;

use evenhand_core::change::Settings;
use evenhand_core::messages::Start;
use evenhand_core::names::{Key, Millis, QueueName, RequestId, ShardId};
use evenhand_core::{Bounds, Effect, Input, NewTask, Shard};
use evenhand_store::{Memory, Store, ready};

use crate::Failure;
use crate::clock::timed;
use crate::report::{Report, Value};
use crate::rng::Rng;

const TASKS: u64 = 1_000_000;
const KEYS: u64 = 1_000;
const BATCH: u64 = 1_000;
const SHARD: ShardId = ShardId(1);
const DAY_MS: u64 = 24 * 3600 * 1000;
/// When the first may be due: all are accepted before.
const FROM_MS: u64 = 1_000_000;

/// Which tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Now,
    SameMoment,
    OverADay,
}

/// What happened to one kind of task.
#[derive(Debug, Default)]
struct Played {
    accepting: Duration,
    moving: Duration,
    store: Duration,
    commits: u64,
    reads: u64,
    ticks: u64,
    most_timers: usize,
}

struct Stage {
    shard: Shard,
    store: Memory,
    now: Millis,
    wake: Option<Millis>,
    played: Played,
}

/// Measures all kinds.
pub(crate) fn run(tasks: Option<u64>, show: impl Fn(Report)) -> Result<(), Failure> {
    let tasks = tasks.unwrap_or(TASKS);
    let mut report = Report::new(
        "timers",
        "Putting tasks off: accepted, and moved to their lanes when they are due. Times are inside the core; the\n\
         memory store's own time stands beside it. `x now` compares with tasks that wait for nothing.",
        &[
            ("due", "due"),
            ("tasks", "tasks"),
            ("ns_to_accept", "ns to accept"),
            ("ns_to_move", "ns to move"),
            ("ns_in_store", "in store"),
            ("times_the_cost_of_now", "x now"),
            ("commits", "commits"),
            ("reads", "reads"),
            ("wake_ups", "wake-ups"),
            ("timers_in_memory", "most timers in memory"),
        ],
    );
    let mut now_cost = None;
    for (kind, name) in
        [(Kind::Now, "now"), (Kind::SameMoment, "at one moment"), (Kind::OverADay, "over a day")]
    {
        eprintln!("timers: {tasks} tasks, {name}");
        let played = play(kind, tasks)?;
        let each = |time: Duration| time.as_nanos() as f64 / tasks as f64;
        let cost = each(played.accepting + played.moving);
        let first = *now_cost.get_or_insert(cost);
        report.row(vec![
            Value::text(name),
            Value::Count(tasks),
            Value::Number(each(played.accepting), 0),
            Value::Number(each(played.moving), 0),
            Value::Number(each(played.store), 0),
            Value::Number(cost / first, 2),
            Value::Count(played.commits),
            Value::Count(played.reads),
            Value::Count(played.ticks),
            Value::Count(played.most_timers as u64),
        ]);
    }
    show(report);
    Ok(())
}

fn play(kind: Kind, tasks: u64) -> Result<Played, Failure> {
    let store = Memory::default();
    let taken = ready(store.take(SHARD, None)).map_err(|error| error.to_string())?;
    let shard = Shard::new(Bounds::default(), taken.epoch, 1, taken.metadata)?;
    let shard = shard.with_defaults(Settings { retention_ms: 0, ..Settings::default() });
    let mut stage = Stage { shard, store, now: Millis(0), wake: None, played: Played::default() };
    let queue = QueueName::new("q").map_err(|refusal| refusal.to_string())?;
    let mut rng = Rng::new(3);
    stage.step(vec![Input::Open], false)?;
    for n in 0..tasks / BATCH {
        let made: Result<Vec<NewTask>, Failure> = (0..BATCH).map(|_| task(kind, &mut rng)).collect();
        let request = RequestId(n + 1);
        stage
            .step(vec![Input::Enqueue { request, queue: queue.clone(), tasks: made?, once: None }], false)?;
    }
    while let Some(at) = stage.wake.take() {
        stage.now = stage.now.max(at);
        stage.played.ticks += 1;
        stage.step(vec![Input::Tick], true)?;
    }
    let counts = stage.shard.counts(&queue).ok_or("the queue is gone")?;
    if (counts.waiting, counts.scheduled) != (tasks / BATCH * BATCH, 0) {
        return Err(format!("of {tasks} tasks {} wait, {} are scheduled", counts.waiting, counts.scheduled));
    }
    Ok(stage.played)
}

fn task(kind: Kind, rng: &mut Rng) -> Result<NewTask, Failure> {
    let key = Key::new(&format!("k{}", rng.below(KEYS))).map_err(|refusal| refusal.to_string())?;
    let mut task = NewTask::new(key);
    task.start = match kind {
        Kind::Now => Start::Now,
        Kind::SameMoment => Start::At(Millis(FROM_MS)),
        Kind::OverADay => Start::At(Millis(FROM_MS + rng.below(DAY_MS))),
    };
    Ok(task)
}

impl Stage {
    /// Steps the inputs, and does what the shard wants done until it wants nothing more.
    fn step(&mut self, mut inputs: Vec<Input>, moving: bool) -> Result<(), Failure> {
        while !inputs.is_empty() {
            let mut effects = Vec::new();
            let (shard, now) = (&mut self.shard, self.now);
            let sum = if moving { &mut self.played.moving } else { &mut self.played.accepting };
            timed(sum, || {
                inputs.drain(..).for_each(|input| shard.step(now, input, &mut effects));
                shard.seal(&mut effects);
            });
            self.played.most_timers = self.played.most_timers.max(self.shard.held().timers);
            for effect in effects {
                self.obey(effect, &mut inputs)?;
            }
        }
        Ok(())
    }

    fn obey(&mut self, effect: Effect, inputs: &mut Vec<Input>) -> Result<(), Failure> {
        let (store, sum) = (&self.store, &mut self.played.store);
        match effect {
            Effect::Save { commit, changes } => {
                let epoch = self.shard.epoch();
                timed(sum, || ready(store.commit(SHARD, epoch, changes)))
                    .map_err(|error| error.to_string())?;
                self.played.commits += 1;
                inputs.push(Input::Committed { commit });
            }
            Effect::LoadTimers { load, above, limit } => {
                let page = timed(sum, || ready(store.read_timers(SHARD, above, limit)));
                let page = page.map_err(|error| error.to_string())?;
                self.played.reads += 1;
                inputs.push(Input::TimersLoaded { load, rows: page.rows, end: page.end });
            }
            Effect::Load { load, lane, above, limit } => {
                let page = timed(sum, || ready(store.read_lane(SHARD, lane, above, limit)));
                let page = page.map_err(|error| error.to_string())?;
                inputs.push(Input::Loaded { load, rows: page.rows, end: page.end });
            }
            Effect::Wake { at } => self.wake = Some(at),
            Effect::Answer { answer: Err(refusal), .. } => return Err(refusal.to_string()),
            Effect::Broken { what } => return Err(what),
            Effect::Answer { answer: Ok(_), .. }
            | Effect::LoadParked { .. }
            | Effect::LoadTask { .. }
            | Effect::Start { .. }
            | Effect::Stop { .. }
            | Effect::Limit { .. }
            | Effect::Warn { .. }
            | Effect::InteractiveOver { .. }
            | Effect::RefuseWorker { .. }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_them_reach_their_lanes() {
        for kind in [Kind::Now, Kind::SameMoment, Kind::OverADay] {
            let played = play(kind, 5_000).unwrap();
            assert_eq!(played.most_timers > 0, kind != Kind::Now);
        }
    }
}
