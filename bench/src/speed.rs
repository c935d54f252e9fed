//! `core`: cycles per second by number of keys, beside the yardstick. All tasks are in memory and nothing
//! is stored, so this is what deciding costs.

use crate::Failure;
use crate::cli::CoreArgs;
use crate::load::Load;
use crate::measure::{Cycles, Effort, Rounds, rate, rounds};
use crate::report::{Aims, Report, Value};
use crate::shell::{Shell, all_in_memory};
use crate::yardstick::Yardstick;

/// The row that the others are compared with.
const USUAL_KEYS: u64 = 1_000;
const MANY_KEYS: u64 = 1_000_000;
const SEED: u64 = 1;

/// Measures every number of keys.
pub(crate) fn run(args: &CoreArgs, show: impl Fn(Report)) -> Result<(), Failure> {
    let loads = args.keys.iter().map(|&keys| Load {
        slots: args.slots,
        batch: u64::from(args.batch),
        ..Load::new(keys, args.tasks)
    });
    let loads: Vec<Load> = loads.collect();
    loads.iter().try_for_each(Load::check)?;
    let measured = measure(&loads, Effort::from(&args.effort))?;
    let of = |keys| measured.iter().find(|row| row.load.keys == keys).map(|row| &row.ours);
    show(table(&measured, of(USUAL_KEYS)));
    show(aims(of(USUAL_KEYS), of(MANY_KEYS)));
    Ok(())
}

/// The core and the yardstick under one load.
struct Measured {
    load: Load,
    ours: Rounds,
    theirs: Rounds,
}

fn measure(loads: &[Load], effort: Effort) -> Result<Vec<Measured>, Failure> {
    let mut built = Vec::new();
    for &load in loads {
        eprintln!("core: building {} tasks of {} keys", load.tasks, load.keys);
        built.push((Shell::build(load, all_in_memory(&load), None, SEED)?, Yardstick::build(load, SEED)?));
    }
    let mut things: Vec<&mut dyn Cycles> = Vec::new();
    for (shell, yardstick) in &mut built {
        things.extend([shell as &mut dyn Cycles, yardstick]);
    }
    let mut all = rounds("core", effort, &mut things)?.into_iter();
    let mut measured = Vec::new();
    for (&load, (shell, _)) in loads.iter().zip(&built) {
        shell.check()?;
        if let (Some(ours), Some(theirs)) = (all.next(), all.next()) {
            measured.push(Measured { load, ours, theirs });
        }
    }
    Ok(measured)
}

fn table(measured: &[Measured], usual: Option<&Rounds>) -> Report {
    let mut report = Report::new(
        "core",
        "Speed of the core. A cycle is one task enqueued, one started, one finished; all tasks in memory, no\n\
         store. Times are inside the core; `with harness` adds making tasks and dropping effects. The\n\
         yardstick is a naive fair queue of ordered maps without durability, in the same run.",
        &[
            ("keys", "keys"),
            ("tasks", "tasks"),
            ("cycles_per_second", "cycles/s"),
            ("ns_per_cycle", "ns/cycle"),
            ("spread_percent", "spread %"),
            ("ns_per_cycle_with_harness", "with harness"),
            ("times_the_cost_at_1000_keys", "x 1,000 keys"),
            ("yardstick_cycles_per_second", "yardstick/s"),
            ("part_of_yardstick", "of yardstick"),
        ],
    );
    for Measured { load, ours, theirs } in measured {
        report.row(vec![
            Value::Count(load.keys),
            Value::Count(load.tasks),
            Value::Number(rate(ours.inside()), 0),
            Value::Number(ours.inside(), 0),
            Value::Number(100.0 * ours.spread(), 0),
            Value::Number(ours.whole(), 0),
            usual.map_or(Value::None, |usual| Value::Number(ours.cost_over(usual), 2)),
            Value::Number(rate(theirs.inside()), 0),
            Value::Number(theirs.cost_over(ours), 2),
        ]);
    }
    report
}

fn aims(usual: Option<&Rounds>, many: Option<&Rounds>) -> Report {
    let mut aims = Aims::new("Aims for the speed");
    if let Some(usual) = usual {
        aims.at_least("cycles/s at 1,000 keys, at least", 500_000.0, rate(usual.inside()), 0);
        if let Some(many) = many {
            aims.at_most("times slower at 1,000,000 keys, at most", 3.0, many.cost_over(usual), 2);
        }
    }
    aims.report()
}
