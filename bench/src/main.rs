//! Evenhand's benchmarks: what the core's decisions cost, in time and in memory, what the store does, and what
//! the server does beside others.
//!
//! The unit of everything but the store and the server is a *cycle*: one task enqueued, one started, one finished,
//! with a backlog that stays as long as it was. A cycle is all that the core ever does for a task that succeeds.
//!
//! The story on one page:
//!
//! 1. [`cli`]: what can be asked for. [`load`]: how many tasks stand, of how many keys, and who works.
//! 2. [`shell`]: drives a real shard as a server would, with no store behind it or with the memory store,
//!    and counts the time spent inside the core apart from its own. [`clock`] is that counting.
//! 3. [`yardstick`]: the simplest fair queue one would write, doing the same cycles in the same run, so
//!    that a slow machine does not look like a slow core.
//! 4. [`measure`]: rounds and medians. [`report`]: tables and JSON.
//! 5. The benchmarks: [`speed`], [`memory`], [`window`], [`growth`], [`timers`], [`workers`], [`limits`]; and two that
//!    stand apart: [`store`], and [`peers`], which measures the server.
//!
//! Numbers are only worth something from a release build of this package alone: building the whole
//! workspace at once compiles the simulator's deliberate bugs into the core. The program warns of both.

mod cli;
mod clock;
mod growth;
mod limits;
mod load;
mod measure;
mod memory;
mod peers;
mod report;
mod rng;
mod shell;
mod speed;
mod store;
mod timers;
mod window;
mod workers;
mod yardstick;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command, StoreArgs};
use measure::Effort;
use report::Report;

/// What went wrong, for a person to read.
type Failure = String;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    if let Some(Command::Resident(of)) = &cli.command {
        return memory::resident(of);
    }
    if let Some(Command::StoreOpen(of)) = &cli.command {
        return store::open(of);
    }
    warn_of_bad_builds();
    let show = |report: Report| report.print(cli.json);
    report::print_machine(cli.json);
    match &cli.command {
        Some(Command::Core(args)) => {
            speed::run(args, show)?;
            memory::run(show)
        }
        Some(Command::Memory) => memory::run(show),
        Some(Command::Window(args)) => window::run(Effort::from(args), show),
        Some(Command::Growth(args)) => growth::run(Effort::from(args), show),
        Some(Command::Timers(args)) => timers::run(args.tasks, show),
        Some(Command::Workers) => workers::run(show),
        Some(Command::Limits(args)) => limits::run(args, show),
        Some(Command::Store(args)) => store::run(args, show),
        Some(Command::Peers(args)) => peers::run(args, show),
        Some(Command::Resident(_) | Command::StoreOpen(_)) | None => {
            peers::ready(&Default::default())?;
            speed::run(&Default::default(), show)?;
            memory::run(show)?;
            window::run(Effort::default(), show)?;
            growth::run(Effort::default(), show)?;
            timers::run(None, show)?;
            workers::run(show)?;
            limits::run(&Default::default(), show)?;
            store::run(&StoreArgs::short(), show)?;
            peers::run(&Default::default(), show)
        }
    }
}

/// Two ways of building this program make its numbers meaningless.
fn warn_of_bad_builds() {
    if cfg!(debug_assertions) {
        eprintln!("warning: this is a debug build; use `cargo run --release -p evenhand-bench`");
    }
    if size_of::<evenhand_core::canary::Canary>() > 0 {
        eprintln!("warning: the core was built with deliberate bugs; build with `-p evenhand-bench` alone");
    }
}
