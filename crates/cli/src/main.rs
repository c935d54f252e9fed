//! `evenhand`, the one binary: server, worker and client.
//!
//! Answers go to standard output (tables for people, `--json` for programs), everything else to standard
//! error. It ends with 0 if all is well, and otherwise by the kind of the error: see `evenhand --help`.
//!
//! In reading order: `serve`, `worker`, `dev` (what goes on until it is stopped), `client` (what asks a server and
//! ends), `bench`, `store`; `show` and `table` make what people see, `parse` reads what they type.

mod bench;
mod client;
mod dev;
mod log;
mod parse;
mod serve;
mod show;
mod store;
mod table;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use evenhand::Refusal;
use evenhand_api::errors;

// Tasks come and go in small pieces, made by one thread and freed by another: see docs/decisions/0007.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A durable, fair task queue and scheduler.
#[derive(Debug, Parser)]
#[command(
    name = "evenhand",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  evenhand dev                                   a server and a worker to play with
  evenhand serve --data /var/lib/evenhand        a server
  evenhand worker render=3 mail=1 -- ./work.sh   a worker for two queues
  evenhand submit render --key acme 'page 7'     a task
  evenhand get 0-42                              how it stands

Exit codes: 0 all is well, 1 a failure, 2 the command or its data is wrong, 3 not found, 4 conflict,
5 limited (send it again later), 6 the server cannot be reached."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a server and a worker to play with, data in ./evenhand-data
    Dev(dev::Args),
    /// Start a server
    Serve(serve::Args),
    /// Start a worker that runs a command for each task
    Worker(worker::Args),
    /// Submit a task, or many
    Submit(client::SubmitArgs),
    /// Show how a task stands
    Get(client::TaskArgs),
    /// Show what happens to a task until it has ended
    Watch(client::TaskArgs),
    /// Cancel a task
    Cancel(client::TaskArgs),
    /// List the tasks that have not ended
    List(client::ListArgs),
    /// Show the queues and how their tasks stand
    Queues(client::LookArgs),
    /// Show the workers
    Workers(client::LookArgs),
    /// Show the server: its store, its start gate, its thresholds
    Status(client::LookArgs),
    /// Measure a server: its speed, its latencies, its fairness
    #[command(subcommand)]
    Bench(bench::Command),
    /// Look after the directory of an embedded store
    #[command(subcommand)]
    Store(store::Command),
    /// The parent of a worker's task processes; a worker starts it
    #[command(hide = true)]
    Guardian(worker::GuardianArgs),
    /// The last steps before a task's command; a guardian starts it
    #[command(hide = true, disable_help_flag = true)]
    Trampoline(worker::TrampolineArgs),
}

/// What went wrong, for a person to read, and what to exit with.
#[derive(Debug)]
struct Failure {
    text: String,
    exit: u8,
}

impl Failure {
    fn new(text: impl ToString) -> Failure {
        Failure { text: text.to_string(), exit: 1 }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        let text = match (refusal.field.as_str(), refusal.retry_after_ms) {
            ("", None) => refusal.message.clone(),
            ("", Some(ms)) => format!("{} (in {ms} ms)", refusal.message),
            (field, _) => format!("{field}: {}", refusal.message),
        };
        Failure { text, exit: errors::row(refusal.kind).exit }
    }
}

type Done = Result<ExitCode, Failure>;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        // These two must be the first thing their process does, on its only thread.
        Command::Guardian(args) => return worker::guardian(args),
        Command::Trampoline(args) => return worker::trampoline(args),
        Command::Store(command) => store::run(command).map_err(Failure::new),
        Command::Bench(command) => block_on(bench::run(command)),
        Command::Dev(args) => block_on(dev::run(args)),
        Command::Serve(args) => block_on(serve::run(args)),
        Command::Worker(args) => block_on(worker::run(args)),
        Command::Submit(args) => block_on(client::submit(args)),
        Command::Get(args) => block_on(client::get(args)),
        Command::Watch(args) => block_on(client::watch(args)),
        Command::Cancel(args) => block_on(client::cancel(args)),
        Command::List(args) => block_on(client::list(args)),
        Command::Queues(args) => block_on(client::queues(args)),
        Command::Workers(args) => block_on(client::workers(args)),
        Command::Status(args) => block_on(client::status(args)),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("evenhand: {}", failure.text);
        ExitCode::from(failure.exit)
    })
}

fn block_on(command: impl Future<Output = Done>) -> Done {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start: {error}")))?;
    let done = runtime.block_on(command);
    runtime.shutdown_background();
    done
}
