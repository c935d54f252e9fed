//! `evenhand`, the one binary: server, worker and client.
//!
//! Answers go to standard output (tables for people, `--json` for programs), everything else to standard
//! error. It ends with 0 if all is well, and otherwise by the kind of the error: see `evenhand --help`.
//!
//! In reading order: `config` (which settings count), `serve`, `worker`, `dev` (what goes on until it is stopped),
//! `client` (what asks a server and ends), `submit`, `attach`, `watch`, `explain`, `many` (cancel and replay), `queue`,
//! `workers`, `gate`, `top`;
//! `bench`, `store`; `show` and `table` make what people see, `terminal` brings it to them, `parse` reads what they type.

mod attach;
mod bench;
mod client;
mod config;
mod dev;
mod explain;
mod gate;
mod log;
mod many;
mod parse;
mod queue;
mod serve;
mod show;
mod store;
mod submit;
mod table;
mod terminal;
mod top;
mod watch;
mod worker;
mod workers;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use evenhand::{Kind, Refusal};
use evenhand_api::errors;

/// A durable, fair task queue and scheduler.
#[derive(Debug, Parser)]
#[command(
    name = "evenhand",
    version,
    propagate_version = true,
    max_term_width = 120,
    arg_required_else_help = true,
    after_help = "\
Examples:
  evenhand dev                                   a server and a worker to play with
  evenhand serve --data /var/lib/evenhand        a server
  evenhand worker render=3 mail=1 -- ./work.sh   a worker for two queues
  evenhand submit render --key acme 'page 7'     a task
  evenhand attach shell --tty                    a worker's command, to talk to
  evenhand explain 0-42                          why it is not running
  evenhand replay --queue render --state failed  what failed, once more
  evenhand top                                   everything at a glance

Settings come from flags, then the environment, then a file: see `evenhand config --help`.

Exit codes: 0 all is well, 1 a failure, 2 the command or its data is wrong, 3 not found, 4 conflict, \
5 limited (send it again later), 6 the server cannot be reached."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// The configuration file; ./evenhand.toml or /etc/evenhand/evenhand.toml, if nobody says
    #[arg(long, global = true, env = "EVENHAND_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
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
    Submit(submit::Args),
    /// Talk to a worker's command: it runs now, or not at all
    Attach(attach::Args),
    /// Show how a task stands
    #[command(after_help = "Examples:\n  evenhand get 0-42\n  evenhand get 0-42 --json | jq -r .state")]
    Get(client::TaskArgs),
    /// Show what happens to a task until it has ended, or to all tasks of a queue or a key
    Watch(watch::Args),
    /// Say why a task is not running, and what to do about it
    Explain(explain::Args),
    /// Give a task less time, whether it waits or runs
    ///
    /// So long may one run of it take from now on: never longer than before. A run that has taken longer already is
    /// stopped.
    #[command(after_help = "Examples:\n  evenhand shorten 0-42 5s\n  evenhand shorten 0-42 250ms --json")]
    Shorten(client::ShortenArgs),
    /// Cancel tasks
    ///
    /// A task that waits will never run. One that runs is stopped: its worker is told to end it.
    Cancel(many::CancelArgs),
    /// Run ended tasks again, as new tasks
    ///
    /// An ended task can be run again as long as its end is remembered: see `evenhand queue set --retention`.
    Replay(many::ReplayArgs),
    /// List tasks: those that have not ended, and those whose end is remembered
    List(client::ListArgs),
    /// Show the queues and how their tasks stand
    #[command(
        after_help = "Examples:\n  evenhand queues\n  evenhand queues --json | jq '.queues[] | {queue, waiting}'"
    )]
    Queues(client::LookArgs),
    /// Show and change how a queue treats its tasks: retries, retention, pause, classes, limits, rates
    #[command(subcommand)]
    Queue(queue::Command),
    /// Show the workers: their health, what they run, and why one gets no work; drain one, or give it up
    Workers(workers::Args),
    /// Show the start gate and whom it waits for; open it by hand
    Gate(gate::Args),
    /// Show the server: its store, its start gate, its thresholds
    #[command(after_help = "Examples:\n  evenhand status\n  evenhand status --json | jq '.shards[].open'")]
    Status(client::LookArgs),
    /// Show everything at a glance, and again every second
    Top(top::Args),
    /// Check and show the settings
    ///
    /// A setting is a flag, a variable of the environment, or a field of a file; a flag goes before the environment,
    /// the environment before the file, the file before the default. The file is TOML with the sections [client],
    /// [serve] and [worker]; its fields are the flags that have a variable, with _ for -.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Print what makes a shell complete evenhand's commands
    #[command(after_help = "\
Examples:
  evenhand completions bash > /etc/bash_completion.d/evenhand
  evenhand completions zsh > ~/.zfunc/_evenhand
  evenhand completions fish > ~/.config/fish/completions/evenhand.fish")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
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

/// What went wrong, for a person to read, and what to exit with. No text: there is nobody to read it.
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
            ("", None)
                if refusal.kind == Kind::Unavailable && refusal.message.contains("cannot be reached") =>
            {
                let what_to_do =
                    "start one with `evenhand serve` or `evenhand dev`, or name another with --server";
                format!("{}; {what_to_do}", refusal.message)
            }
            ("", None) => refusal.message.clone(),
            ("", Some(ms)) => format!("{} (in {ms} ms)", refusal.message),
            (field, _) => format!("{field}: {}", refusal.message),
        };
        Failure { text, exit: errors::row(refusal.kind).exit }
    }
}

type Done = Result<ExitCode, Failure>;

/// For the fuzzer, and nobody else: reads a file of settings of whatever bytes.
#[doc(hidden)]
pub fn fuzz_config(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        config::fuzz(text);
    }
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    // What is started by us has no settings.
    let ours = args.get(1).is_some_and(|command| command == "guardian" || command == "trampoline");
    let cli = if ours { Ok(Cli::parse_from(args)) } else { config::parse(args) };
    let result = cli.and_then(|cli| match cli.command {
        // These two must be the first thing their process does, on its only thread.
        Command::Guardian(args) => Ok(worker::guardian(args)),
        Command::Trampoline(args) => Ok(worker::trampoline(args)),
        Command::Config(command) => config::run(command, cli.config),
        Command::Completions { shell } => completions(shell),
        Command::Store(command) => store::run(command),
        Command::Bench(command) => block_on(bench::run(command)),
        Command::Dev(args) => block_on(dev::run(args)),
        Command::Serve(args) => block_on(serve::run(args)),
        Command::Worker(args) => block_on(worker::run(args)),
        Command::Submit(args) => block_on(submit::run(args)),
        Command::Attach(args) => block_on(attach::run(args)),
        Command::Get(args) => block_on(client::get(args)),
        Command::Watch(args) => block_on(watch::run(args)),
        Command::Explain(args) => block_on(explain::run(args)),
        Command::Shorten(args) => block_on(client::shorten(args)),
        Command::Cancel(args) => block_on(many::cancel(args)),
        Command::Replay(args) => block_on(many::replay(args)),
        Command::List(args) => block_on(client::list(args)),
        Command::Queues(args) => block_on(client::queues(args)),
        Command::Queue(command) => block_on(queue::run(command)),
        Command::Workers(args) => block_on(workers::run(args)),
        Command::Gate(args) => block_on(gate::run(args)),
        Command::Status(args) => block_on(client::status(args)),
        Command::Top(args) => block_on(top::run(args)),
    });
    result.unwrap_or_else(|failure| {
        if !failure.text.is_empty() {
            // There is nobody else to tell.
            let _ = terminal::say(format!("evenhand: {}", failure.text));
        }
        ExitCode::from(failure.exit)
    })
}

fn completions(shell: clap_complete::Shell) -> Done {
    // Zsh would be told of hidden commands too.
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut command = clap::Command::new("evenhand").args(all.get_arguments().cloned()).subcommands(shown);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "evenhand", &mut script);
    terminal::print(String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

fn block_on(command: impl Future<Output = Done>) -> Done {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("cannot start: {error}")))?;
    let done = runtime.block_on(command);
    runtime.shutdown_background();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_exits_with_what_the_table_says() {
        for row in errors::TABLE {
            let failure = Failure::from(Refusal::new(row.kind, "weight", "must be positive"));
            assert_eq!((failure.exit, failure.text.as_str()), (row.exit, "weight: must be positive"));
        }
    }
}
