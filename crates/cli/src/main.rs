//! `evenhand`, the one binary. So far it looks after stores; the server, the worker and the client come to
//! live here too.
//!
//! Answers go to standard output (tables for people, `--json` for programs), everything else to standard
//! error. It ends with 0 if all is well, 1 if what was looked at is not, 2 if the command was wrong.

mod store;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A durable, fair task queue and scheduler.
#[derive(Debug, Parser)]
#[command(name = "evenhand", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Look after the directory of an embedded store
    #[command(subcommand)]
    Store(store::Command),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Store(command) => store::run(command),
    };
    result.unwrap_or_else(|error| {
        eprintln!("evenhand: {error}");
        ExitCode::FAILURE
    })
}
