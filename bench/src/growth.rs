//! `growth`: does a cycle cost more when there is more of everything? One thing grows tenfold at a time,
//! the others stay: 1,000,000 tasks of 1,000 keys, one queue, one worker, 1,000 slots in all. All tasks
//! are in memory, no store.

use evenhand_core::bounds;

use crate::Failure;
use crate::load::Load;
use crate::measure::{Cycles, Effort, rate, rounds};
use crate::report::{Report, Value};
use crate::shell::{Shell, all_in_memory};

const KEYS: u64 = 1_000;
const TASKS: u64 = 1_000_000;
const SLOTS: u64 = 1_000;
const SEED: u64 = 3;

/// Measures every series.
pub(crate) fn run(effort: Effort, show: impl Fn(Report)) -> Result<(), Failure> {
    let mut report = Report::new(
        "growth",
        "Growth: what a cycle costs at ten times the workers, queues (a worker serves at most 64) or tasks.\n\
         1,000,000 tasks of 1,000 keys, 1 queue, 1 worker, 1,000 slots in all unless the row says otherwise;\n\
         all in memory, no store. The last column compares with the first row of the series.",
        &[
            ("of", "of"),
            ("number", "number"),
            ("cycles_per_second", "cycles/s"),
            ("ns_per_cycle", "ns/cycle"),
            ("spread_percent", "spread %"),
            ("times_the_cost_of_first", "x first"),
        ],
    );
    for (of, loads) in [("workers", workers()), ("queues", queues()), ("tasks", tasks())] {
        let mut shells = Vec::new();
        for (number, load) in &loads {
            eprintln!("growth: building {} tasks for {number} {of}", load.tasks);
            shells.push(Shell::build(*load, all_in_memory(load), None, SEED)?);
        }
        let mut things: Vec<&mut dyn Cycles> =
            shells.iter_mut().map(|shell| shell as &mut dyn Cycles).collect();
        let all = rounds(&format!("growth of {of}"), effort, &mut things)?;
        shells.iter().try_for_each(Shell::check)?;
        for ((number, _), ours) in loads.iter().zip(&all) {
            report.row(vec![
                Value::text(of),
                Value::Count(*number),
                Value::Number(rate(ours.inside()), 0),
                Value::Number(ours.inside(), 0),
                Value::Number(100.0 * ours.spread(), 0),
                Value::Number(ours.cost_over(&all[0]), 2),
            ]);
        }
    }
    show(report);
    Ok(())
}

type Series = Vec<(u64, Load)>;

fn usual() -> Load {
    Load { slots: SLOTS as u32, ..Load::new(KEYS, TASKS) }
}

fn workers() -> Series {
    let load = |workers| Load { workers, slots: (SLOTS / workers) as u32, ..usual() };
    [1, 10, 100, 1_000].map(|workers| (workers, load(workers))).into()
}

fn queues() -> Series {
    let load = |queues: u64| {
        let workers = queues.div_ceil(bounds::QUEUES_PER_WORKER as u64);
        Load { queues, workers, slots: SLOTS.div_ceil(workers) as u32, ..usual() }
    };
    [1, 10, 100, 1_000].map(|queues| (queues, load(queues))).into()
}

fn tasks() -> Series {
    [10_000, 100_000, 1_000_000].map(|tasks| (tasks, Load { tasks, ..usual() })).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_of_every_series_can_be_run() {
        for (number, load) in [workers(), queues(), tasks()].concat() {
            load.check().unwrap();
            let most = (0..load.workers).map(|worker| load.queues_of(worker).len()).max();
            assert!(most <= Some(bounds::QUEUES_PER_WORKER), "{number}");
        }
    }
}
