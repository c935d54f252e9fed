//! The simulator's command line.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use clap::{Parser, Subcommand};
use evenhand_sim::estimates::Measured;
use evenhand_sim::model::{Explored, Witness, World};
use evenhand_sim::{Options, Report, Violation, canaries, day, play};

/// Plays simulated worlds against Evenhand's core and checks that no promise is broken.
#[derive(Parser)]
#[command(
    name = "evenhand-sim",
    version,
    after_help = "Examples:
  evenhand-sim run --seeds 1000             play 1000 seeds
  evenhand-sim run --seeds 1000 --start 5000
  evenhand-sim run --seeds 50 --disk        the same with the embedded store beside the model
  evenhand-sim replay 4711                  play one seed again and print every event
  evenhand-sim canaries                     switch on known bugs; each must be caught
  evenhand-sim model                        play everything that can happen in a small world
  evenhand-sim estimates                    how good estimates are
  evenhand-sim day                          four tenants share 16 slots for a day"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Play many seeds. Exit code 1 if any breaks a promise.
    Run {
        /// How many seeds.
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: u64,
        /// The first one.
        #[arg(long, default_value_t = 0)]
        start: u64,
        /// Let the embedded store play beside the model, in a scratch directory.
        #[arg(long)]
        disk: bool,
    },
    /// Play one seed again and print what happens. Exit code 1 if it breaks a promise.
    Replay {
        /// The seed, as `run` printed it.
        seed: u64,
        /// Switch this canary on, by the words that `canaries` prints.
        #[arg(long)]
        canary: Option<String>,
        /// Print only the result.
        #[arg(long)]
        quiet: bool,
        /// Let the embedded store play beside the model, as `run --disk` does.
        #[arg(long)]
        disk: bool,
    },
    /// Switch on each known bug and see that it is caught. Exit code 1 if one survives.
    Canaries {
        /// How many seeds a bug may survive before it counts as not caught.
        #[arg(long, default_value_t = 1200, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: u64,
        /// Do without the core's own invariants, so that the onlooker has to notice.
        #[arg(long)]
        blind: bool,
        /// Only those whose text holds these words.
        #[arg(long, default_value = "")]
        only: String,
    },
    /// Play everything that can happen among a few workers, owners and tasks. Exit code 1 if a task runs twice at once, or
    /// cannot be run any more.
    Model {
        /// How many workers.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=4))]
        workers: u8,
        /// How many tasks.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4))]
        tasks: u8,
        /// How often an owner may crash.
        #[arg(long, default_value_t = 2)]
        crashes: u8,
        /// How many lives workers may have beyond their first, all together.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(..=3))]
        rebirths: u8,
        /// Messages are never late, and never come twice.
        #[arg(long)]
        prompt: bool,
        /// Workers that join are never queued.
        #[arg(long)]
        no_turnover: bool,
        /// Give up beyond so many states.
        #[arg(long, default_value_t = 100_000_000)]
        most: usize,
    },
    /// Measure how good estimates are, and print a table. Exit code 1 if an upper bound did not hold where it must.
    Estimates {
        /// How many seeds of each load.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: u64,
    },
    /// Play a simulated day and print who got what.
    Day {
        /// The seed that decides how long each task takes.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

/// Misses that are printed of each load.
const MISSES: usize = 3;

fn estimates(seeds: u64) -> ExitCode {
    println!("{:<40} {:>9} {:>6} {:>8} {:>13}", "load", "bounds", "late", "held", "median error");
    let mut broken = false;
    for load in evenhand_sim::estimates::loads() {
        let mut all = Measured::default();
        for seed in 0..seeds {
            match evenhand_sim::estimates::play(&load, seed) {
                Ok(Measured { bounded, late, errors }) => {
                    all.bounded += bounded;
                    all.late.extend(late.into_iter().map(|text| format!("seed {seed}: {text}")));
                    all.errors.extend(errors);
                }
                Err(what) => {
                    eprintln!("{}, seed {seed}: {what}", load.name);
                    return ExitCode::FAILURE;
                }
            }
        }
        let held = 100.0 * (1.0 - all.late.len() as f64 / all.bounded.max(1) as f64);
        let held = if all.bounded == 0 { "-".into() } else { format!("{held:.2}%") };
        let error =
            if all.errors.is_empty() { "-".into() } else { format!("{:.1}%", 100.0 * all.median_error()) };
        println!("{:<40} {:>9} {:>6} {held:>8} {error:>13}", load.name, all.bounded, all.late.len());
        for miss in all.late.iter().take(MISSES) {
            println!("    {miss}");
        }
        broken |= if load.strict { !all.late.is_empty() } else { all.late.len() as u64 * 100 > all.bounded };
    }
    if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run { seeds, start, disk } => run(seeds, start, disk),
        Command::Estimates { seeds } => estimates(seeds),
        Command::Replay { seed, canary, quiet, disk } => replay_one(seed, canary.as_deref(), quiet, disk),
        Command::Canaries { seeds, blind, only } => hunt(seeds, blind, &only),
        Command::Model { workers, tasks, crashes, rebirths, prompt, no_turnover, most } => {
            let worlds = [Witness::Workers, Witness::Saved, Witness::Both].map(|witness| World {
                workers: workers.into(),
                tasks: tasks.into(),
                crashes,
                rebirths,
                late: !prompt,
                twice: !prompt,
                turnover: !no_turnover,
                witness,
                bug: None,
            });
            explore(&worlds, most)
        }
        Command::Day { seed } => match day::play(seed) {
            Ok(table) => {
                print!("{table}");
                ExitCode::SUCCESS
            }
            Err(what) => {
                eprintln!("the day went wrong: {what}");
                ExitCode::FAILURE
            }
        },
    }
}

/// Plays seeds on all cores; what is printed does not depend on how many there are.
fn run(seeds: u64, start: u64, disk: bool) -> ExitCode {
    let next = AtomicU64::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut total = Report::default();
    let mut violations: Vec<Violation> = Vec::new();
    std::thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        for _ in 0..cores {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= seeds || send.send(caught(start.wrapping_add(n), disk)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(send);
        for (n, result) in results.into_iter().enumerate() {
            match result {
                Ok(report) => total.add(&report),
                Err(violation) => violations.push(violation),
            }
            progress(n as u64 + 1, seeds, violations.len());
        }
    });
    violations.sort_by_key(|violation| violation.seed);
    for violation in &violations {
        println!("violation: {violation}");
        println!("  replay: evenhand-sim replay {}{}", violation.seed, if disk { " --disk" } else { "" });
    }
    println!(
        "seeds {seeds}  steps {}  simulated {:.1} h  starts {}  largest difference {:.2} charges, \
         {:.2} of what may be under way in time  violations {}",
        total.steps,
        total.simulated_ms as f64 / 3_600_000.0,
        total.starts,
        total.worst_difference,
        total.worst_time,
        violations.len()
    );
    if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Plays a seed; a panic of the core is a violation like any other.
fn caught(seed: u64, disk: bool) -> Result<Report, Violation> {
    std::panic::catch_unwind(|| play(seed, Options { disk, ..Options::default() }))
        .unwrap_or_else(|_| Err(Violation::panicked(seed)))
}

fn progress(done: u64, of: u64, violations: usize) {
    if std::io::stderr().is_terminal() && (done.is_multiple_of(16) || done == of) {
        eprint!("\r{done} of {of} seeds, {violations} violations ");
        if done == of {
            eprintln!();
        }
        // A progress line that cannot be written is no reason to stop.
        let _ = std::io::stderr().flush();
    }
}

fn replay_one(seed: u64, canary: Option<&str>, quiet: bool, disk: bool) -> ExitCode {
    let canary = match canary {
        None => None,
        Some(text) => match canaries::all().into_iter().find(|(_, t)| *t == text) {
            Some((canary, _)) => Some(canary),
            None => {
                eprintln!("there is no canary {text:?}; `evenhand-sim canaries` lists them");
                return ExitCode::from(2);
            }
        },
    };
    match play(seed, Options { canary, trace: !quiet, disk, ..Options::default() }) {
        Ok(report) => {
            println!(
                "seed {seed}: no violation in {} steps and {:.1} simulated hours",
                report.steps,
                report.simulated_ms as f64 / 3_600_000.0
            );
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("violation: {violation}");
            ExitCode::FAILURE
        }
    }
}

/// Has something done about each item, on all cores. What came of each, in order, as soon as it is there.
fn on_all_cores<'scope, T: Sync, R: Send + 'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    items: &'scope [T],
    work: impl Fn(&T) -> R + Copy + Send + 'scope,
) -> Vec<mpsc::Receiver<R>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (senders, receivers): (Vec<_>, Vec<_>) = items.iter().map(|_| mpsc::channel()).unzip();
    let jobs = Arc::new(Mutex::new(items.iter().zip(senders)));
    for _ in 0..cores {
        let jobs = Arc::clone(&jobs);
        scope.spawn(move || {
            while let Some((item, done)) = jobs.lock().ok().and_then(|mut jobs| jobs.next()) {
                if done.send(work(item)).is_err() {
                    return;
                }
            }
        });
    }
    receivers
}

/// Plays worlds in full and prints what was found of each; how far they are goes to stderr.
fn explore(worlds: &[World], most: usize) -> ExitCode {
    let mut all_well = true;
    println!("{:8} {:>12} {:>14}  result", "witness", "states", "steps");
    std::thread::scope(|scope| {
        let play = |world: &World| world.explore_telling(most, |states| explored(world.witness, states));
        for (world, found) in worlds.iter().zip(on_all_cores(scope, worlds, play)) {
            let Ok(Explored { states, steps, wrong }) = found.recv() else {
                all_well = false;
                continue;
            };
            let result = wrong.as_ref().map_or("all well", |(_, what)| what);
            println!("{:8} {states:>12} {steps:>14}  {result}", format!("{:?}", world.witness));
            for step in wrong.iter().flat_map(|(way, _)| way) {
                println!("  {step}");
            }
            all_well &= wrong.is_none();
        }
    });
    if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn explored(witness: Witness, states: usize) {
    if std::io::stderr().is_terminal() {
        eprint!("\r{witness:?}: {states} states ");
        // A progress line that cannot be written is no reason to stop.
        let _ = std::io::stderr().flush();
    }
}

fn hunt(seeds: u64, blind: bool, only: &str) -> ExitCode {
    // Some bugs make the core stop with a panic. That counts as caught; its text would only be noise.
    std::panic::set_hook(Box::new(|_| {}));
    let mut all = canaries::all();
    all.retain(|(_, text)| text.contains(only));
    if all.is_empty() {
        eprintln!("no canary has {only:?} in its text");
        return ExitCode::FAILURE;
    }
    let mut survived = 0;
    std::thread::scope(|scope| {
        let hunts: Vec<_> = on_all_cores(scope, &all, |(canary, _)| canaries::hunt(*canary, seeds, blind));
        for ((_, text), caught) in all.iter().zip(hunts) {
            match caught.recv() {
                Ok(Some(violation)) => {
                    println!("caught    {text}  (seed {}: {})", violation.seed, violation.what);
                }
                Ok(None) | Err(_) => {
                    survived += 1;
                    println!("SURVIVED  {text}  ({seeds} seeds)");
                }
            }
        }
    });
    if survived == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
