//! What can be asked of the program on the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use evenhand_core::bounds;

use crate::measure::{Each, Effort};

const EXAMPLES: &str = "\
Examples:
  evenhand-bench                                  everything, as tables (some minutes)
  evenhand-bench core                             speed by number of keys, and memory
  evenhand-bench core --keys 1000 --seconds 10    one row, measured for ten seconds
  evenhand-bench core --tasks 100000 --cycles 50000 --keys 10,1000   a quick look
  evenhand-bench memory                           bytes per task and per waiting key
  evenhand-bench window --json                    with reads, one JSON object per line
  evenhand-bench growth > growth.txt              progress still goes to the terminal
  evenhand-bench timers                           what it costs to put tasks off
  evenhand-bench workers                          who knows of whom, among 10,000 workers
  evenhand-bench limits                           what a key at its limit costs the others
  evenhand-bench store                            the embedded store, up to 10 million tasks (some minutes)
  evenhand-bench store --standing 0 --batches 1000 --tasks 300000    a quick look at it
  evenhand-bench peers                            the server beside its store and beanstalkd (some minutes)
  evenhand-bench peers --rounds 1 --seconds 2     a quick look at them

Build it alone and optimized, or the numbers mean nothing:
  cargo run --release -p evenhand-bench -- core";

/// Measures what Evenhand's decisions cost: cycles per second on one core, and bytes of memory.
///
/// A cycle is one task enqueued, one started and one finished, with a backlog of steady length. Without
/// a subcommand all benchmarks run. Tables go to stdout, progress to stderr.
#[derive(Debug, Parser)]
#[command(name = "evenhand-bench", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Print one JSON object per line instead of tables.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// Which benchmark.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Speed by number of keys beside a naive fair queue, and memory. All tasks are in memory, no store.
    #[command(after_help = EXAMPLES)]
    Core(CoreArgs),
    /// Memory alone: bytes per waiting task and per waiting key.
    Memory,
    /// The price of the window: default bounds and the memory store behind it, reads included.
    Window(EffortArgs),
    /// How the cost of a cycle grows with ten times the workers, queues and backlog.
    Growth(EffortArgs),
    /// What it costs to put tasks off: a million due at one moment, a million spread over a day.
    Timers(TimersArgs),
    /// What it costs to find out which workers know of which, with up to 10,000 of them.
    Workers,
    /// What a key at its limit, with up to a million tasks waiting, costs the others.
    Limits(LimitsArgs),
    /// The embedded store on a real disk: speed beside a raw file, latencies, room, opening it again.
    #[command(after_help = EXAMPLES)]
    Store(StoreArgs),
    /// The server beside its own store and beside beanstalkd: tasks per second, and how soon a task runs.
    #[command(after_help = EXAMPLES)]
    Peers(PeersArgs),
    /// Opens a store and prints what that took (what `store` runs in processes of their own).
    #[command(hide = true)]
    StoreOpen(StoreOpenArgs),
    /// Prints the resident memory of one shard (what `memory` runs in processes of their own).
    #[command(hide = true)]
    Resident(ResidentArgs),
}

/// How many timers.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TimersArgs {
    /// Tasks of each kind [default: 1000000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1_000..))]
    pub(crate) tasks: Option<u64>,
}

/// What `limits` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct LimitsArgs {
    /// Tasks of the limited key that wait, one row for each.
    #[arg(long, value_name = "T,T,..", value_delimiter = ',', default_values_t = [10_000, 100_000, 1_000_000],
        value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) waiting: Vec<u64>,
    /// Single tasks of other keys, for each row.
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) probes: u64,
    #[command(flatten)]
    pub(crate) effort: EffortArgs,
}

impl Default for LimitsArgs {
    fn default() -> LimitsArgs {
        LimitsArgs {
            waiting: vec![10_000, 100_000, 1_000_000],
            probes: 20_000,
            effort: EffortArgs::default(),
        }
    }
}

/// How long to measure.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct EffortArgs {
    /// Cycles in each round [default: 300000].
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(100..))]
    cycles: Option<u64>,
    /// Measure each row for about this long instead, over all rounds.
    #[arg(long, value_name = "S", value_parser = seconds)]
    seconds: Option<f64>,
    /// Rounds; the median counts. As many cycles as there are tasks come first, to warm up [default: 5].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: Option<u32>,
}

impl From<&EffortArgs> for Effort {
    fn from(args: &EffortArgs) -> Effort {
        let usual = Effort::default();
        let rounds = args.rounds.unwrap_or(usual.rounds);
        let each = match (args.seconds, args.cycles) {
            (Some(seconds), _) => Each::seconds(seconds / f64::from(rounds)),
            (None, Some(cycles)) => Each::Cycles(cycles),
            (None, None) => usual.each,
        };
        Effort { rounds, each }
    }
}

/// What `core` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct CoreArgs {
    /// Numbers of keys, one row for each.
    #[arg(
        long,
        value_name = "K,K,..",
        value_delimiter = ',',
        default_values_t = [10, 1_000, 100_000, 1_000_000],
        value_parser = clap::value_parser!(u64).range(1..=10_000_000)
    )]
    pub(crate) keys: Vec<u64>,
    /// Tasks that stand in the backlog, spread evenly over the keys.
    #[arg(long, value_name = "T", default_value_t = 1_000_000,
        value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub(crate) tasks: u64,
    /// Slots of the one worker.
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(bounds::SLOTS_PER_WORKER)))]
    pub(crate) slots: u32,
    /// Tasks in one enqueue, and cycles in one commit.
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=bounds::TASKS_PER_ENQUEUE as i64))]
    pub(crate) batch: u32,
    #[command(flatten)]
    pub(crate) effort: EffortArgs,
}

impl Default for CoreArgs {
    fn default() -> CoreArgs {
        CoreArgs {
            keys: vec![10, 1_000, 100_000, 1_000_000],
            tasks: 1_000_000,
            slots: 100,
            batch: 100,
            effort: EffortArgs::default(),
        }
    }
}

/// The shard whose memory is measured.
#[derive(Clone, Debug, Args)]
pub(crate) struct ResidentArgs {
    /// Keys.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) keys: u64,
    /// Tasks that stand.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tasks: u64,
    /// Cycles to run before looking.
    #[arg(long, default_value_t = 0)]
    pub(crate) cycles: u64,
}

/// What `store` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct StoreArgs {
    /// Numbers of tasks that stand, one part of the table for each.
    #[arg(long, value_name = "T,T,..", value_delimiter = ',', default_values_t = [0, 1_000_000, 10_000_000],
        value_parser = clap::value_parser!(u64).range(0..=100_000_000))]
    pub(crate) standing: Vec<u64>,
    /// Tasks in one commit, one row for each.
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_values_t = [1, 10, 100, 1_000],
        value_parser = clap::value_parser!(u64).range(1..=5_000))]
    pub(crate) batches: Vec<u64>,
    /// Tasks of a row.
    #[arg(long, value_name = "T", default_value_t = 1_000_000,
        value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    pub(crate) tasks: u64,
    /// Commits of a row, at most.
    #[arg(long, value_name = "N", default_value_t = 5_000,
        value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) commits: u64,
    /// Slices of a row, in which the store and the raw files take turns.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Keys.
    #[arg(long, value_name = "K", default_value_t = 1_000,
        value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) keys: u64,
    /// Bytes of a task's payload.
    #[arg(long, value_name = "N", default_value_t = 200,
        value_parser = clap::value_parser!(u64).range(0..=1_000))]
    pub(crate) payload: u64,
    /// Where to make the store, on a real disk. What is made is removed again.
    #[arg(long, value_name = "DIR", default_value = "target/bench-store")]
    pub(crate) dir: PathBuf,
}

impl StoreArgs {
    /// What runs where all benchmarks run: without the ten million, which take some minutes alone.
    pub(crate) fn short() -> StoreArgs {
        StoreArgs {
            standing: vec![0, 1_000_000],
            batches: vec![1, 10, 100, 1_000],
            tasks: 500_000,
            commits: 2_000,
            rounds: 3,
            keys: 1_000,
            payload: 200,
            dir: "target/bench-store".into(),
        }
    }
}

/// What `peers` measures, and with what.
#[derive(Clone, Debug, Args)]
pub(crate) struct PeersArgs {
    /// Evenhand's binary, optimized [default: the one beside this program, as in target/release/evenhand].
    #[arg(long, value_name = "PATH")]
    pub(crate) evenhand: Option<PathBuf>,
    /// beanstalkd's.
    #[arg(long, value_name = "PATH", default_value = "beanstalkd")]
    pub(crate) beanstalkd: PathBuf,
    /// Rounds, in which all take turns; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Tasks of a measurement.
    #[arg(long, value_name = "T", default_value_t = 200_000,
        value_parser = clap::value_parser!(u64).range(1_000..=10_000_000))]
    pub(crate) tasks: u64,
    /// Tasks in one call.
    #[arg(long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u64).range(1..=bounds::TASKS_PER_ENQUEUE as u64))]
    pub(crate) batch: u64,
    /// Calls on their way at once.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub(crate) calls: u64,
    /// Bytes of a task's payload.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(8..=1_000))]
    pub(crate) payload: u64,
    /// Keys, which beanstalkd does not have.
    #[arg(long, value_name = "K", default_value_t = 1_000,
        value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) keys: u64,
    /// Evenhand's workers.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub(crate) workers: u64,
    /// Slots of each.
    #[arg(long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u64).range(1..=u64::from(bounds::SLOTS_PER_WORKER)))]
    pub(crate) slots: u64,
    /// beanstalkd's connections, so many that put and so many that reserve and delete; the best number counts.
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_values_t = [1, 4],
        value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub(crate) connections: Vec<u64>,
    /// Commands to beanstalkd in one write.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub(crate) pipeline: u64,
    /// Single tasks per second, where it is measured how soon a task runs, one part of the table for each.
    #[arg(long, value_name = "R,R,..", value_delimiter = ',', default_values_t = [1_000, 100],
        value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub(crate) rates: Vec<u64>,
    /// For how long; and for how long tasks are put into beanstalkd at most.
    #[arg(long, value_name = "S", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub(crate) seconds: u64,
    /// Where all data is, on a real disk. What is made is removed again.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
}

impl Default for PeersArgs {
    fn default() -> PeersArgs {
        PeersArgs {
            evenhand: None,
            beanstalkd: "beanstalkd".into(),
            rounds: 3,
            tasks: 200_000,
            batch: 1_000,
            calls: 4,
            payload: 200,
            keys: 1_000,
            workers: 2,
            slots: 1_000,
            connections: vec![1, 4],
            pipeline: 100,
            rates: vec![1_000, 100],
            seconds: 4,
            dir: ".".into(),
        }
    }
}

/// The store to open.
#[derive(Clone, Debug, Args)]
pub(crate) struct StoreOpenArgs {
    /// Where it is.
    #[arg(long)]
    pub(crate) dir: PathBuf,
    /// Its keys.
    #[arg(long)]
    pub(crate) keys: u64,
    /// Bytes of a task's payload.
    #[arg(long)]
    pub(crate) payload: u64,
    /// Tasks to accept and finish before the most memory is looked at.
    #[arg(long, default_value_t = 0)]
    pub(crate) tasks: u64,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 3600.0 => Ok(seconds),
        Ok(_) => Err("use more than 0 and at most 3600 seconds".into()),
        Err(_) => Err("not a number; use seconds such as 10 or 0.5".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, String> {
        Cli::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_of_all_and_of_one_are_the_same() {
        let Some(Command::Core(args)) = parse("evenhand-bench core").unwrap().command else { panic!() };
        assert_eq!(format!("{args:?}"), format!("{:?}", CoreArgs::default()));
        let Some(Command::Limits(args)) = parse("evenhand-bench limits").unwrap().command else { panic!() };
        assert_eq!(format!("{args:?}"), format!("{:?}", LimitsArgs::default()));
        let Some(Command::Peers(args)) = parse("evenhand-bench peers").unwrap().command else { panic!() };
        assert_eq!(format!("{args:?}"), format!("{:?}", PeersArgs::default()));
    }

    #[test]
    fn wrong_numbers_are_refused_with_the_right_ones() {
        for (line, says) in [
            ("evenhand-bench core --keys 0", "0 is not in 1..=10000000"),
            ("evenhand-bench store --batches 0", "0 is not in 1..=5000"),
            ("evenhand-bench store --standing none", "invalid value 'none'"),
            ("evenhand-bench store --tasks 1", "1 is not in 1000..=100000000"),
            ("evenhand-bench peers --connections 0", "0 is not in 1..=1000"),
            ("evenhand-bench peers --payload 1", "1 is not in 8..=1000"),
            ("evenhand-bench core --keys 10,x", "invalid value 'x'"),
            ("evenhand-bench core --tasks 0", "0 is not in 1..=100000000"),
            ("evenhand-bench core --slots 0", "0 is not in 1..=10000"),
            ("evenhand-bench core --seconds -1", "unexpected argument '-1'"),
            ("evenhand-bench core --seconds=-1", "use more than 0"),
            ("evenhand-bench window --seconds soon", "not a number"),
            ("evenhand-bench growth --cycles 100 --seconds 1", "cannot be used with"),
        ] {
            let refused = parse(line).unwrap_err();
            assert!(refused.contains(says), "{line}: {refused}");
        }
    }
}
