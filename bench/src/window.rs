//! `window`: the same cycles with the default bounds, so that memory holds only a part of the backlog, and
//! the memory store behind it, which saves every commit and answers the reads. Beside it the same store
//! with a window that holds everything: the difference is the price of the window.

use evenhand_core::Bounds;
use evenhand_store::Memory;

use crate::Failure;
use crate::load::Load;
use crate::measure::{Cycles, Effort, rate, rounds};
use crate::report::{Report, Value};
use crate::shell::{Shell, all_in_memory};

const KEYS: u64 = 1_000;
const TASKS: u64 = 1_000_000;
const SEED: u64 = 2;

/// Measures both windows.
pub(crate) fn run(effort: Effort, show: impl Fn(Report)) -> Result<(), Failure> {
    let mut report = Report::new(
        "window",
        "The window: 1,000,000 tasks of 1,000 keys in the memory store, which saves every commit and answers\n\
         reads. Rates count the time inside the core; the store's own time stands beside it.",
        &[
            ("window", "window"),
            ("rows_in_memory", "rows in memory"),
            ("cycles_per_second", "cycles/s"),
            ("ns_per_cycle", "ns/cycle"),
            ("spread_percent", "spread %"),
            ("ns_per_cycle_in_store", "in store"),
            ("reads_per_1000_cycles", "reads per 1,000"),
            ("rows_read_per_cycle", "rows read per cycle"),
        ],
    );
    let load = Load::new(KEYS, TASKS);
    let mut built = Vec::new();
    for (name, bounds) in [("default bounds", Bounds::default()), ("everything", all_in_memory(&load))] {
        eprintln!("window: building {TASKS} tasks, {name}");
        built.push((name, Shell::build(load, bounds, Some(Memory::default()), SEED)?));
    }
    let mut things: Vec<&mut dyn Cycles> =
        built.iter_mut().map(|(_, shell)| shell as &mut dyn Cycles).collect();
    let all = rounds("window", effort, &mut things)?;
    for ((name, shell), ours) in built.iter().zip(all) {
        shell.check()?;
        report.row(vec![
            Value::text(*name),
            Value::Count(shell.held().rows as u64),
            Value::Number(rate(ours.inside()), 0),
            Value::Number(ours.inside(), 0),
            Value::Number(100.0 * ours.spread(), 0),
            Value::Number(ours.store(), 0),
            Value::Number(ours.reads(), 2),
            Value::Number(ours.rows_read(), 2),
        ]);
    }
    show(report);
    Ok(())
}
