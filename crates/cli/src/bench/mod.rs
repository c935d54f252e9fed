//! `evenhand bench`: what a server does in a second, and how soon. Against a server that runs, or one that it starts
//! and ends. Every acceptance and every end is on disk before it counts: there is no way to turn that off.
//!
//! In reading order: `target` (the server), `load` (calls and workers), `enqueue`, `end_to_end`, `fairness`, `mixed`,
//! `estimates`, `waits`; `crowd` (very many workers), `restart`, `turnover`; `percentiles` says how long things took.

mod crowd;
mod end_to_end;
mod enqueue;
mod estimates;
mod fairness;
mod load;
mod mixed;
mod percentiles;
mod restart;
mod target;
mod turnover;
mod waits;

use clap::Subcommand;
use serde_json::{Map, Value};

use crate::{Done, Failure, serve};

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Tasks accepted per second, and how long a call takes
    Enqueue(enqueue::Args),
    /// Tasks accepted and finished per second, and how soon a task runs: server, client and workers together
    EndToEnd(end_to_end::Args),
    /// What each key gets while all compete, against what is due to it
    Fairness(fairness::Args),
    /// How long short tasks wait beside long ones, without duration classes and with them
    Mixed(mixed::Args),
    /// How much slower tasks are started while a thousand watch theirs and are told when they will start
    Estimates(estimates::Args),
    /// What waiting tasks are told of when they will start, and what then happens
    Waits(waits::Args),
    /// How soon a server that was killed starts tasks again, with 1, 100 and 2,000 workers, and with one that is missing
    Restart(restart::Args),
    /// What steady workers get done beside others that crash again and again
    Turnover(turnover::Args),
}

pub(crate) async fn run(command: Command) -> Done {
    let measured = async {
        match command {
            Command::Enqueue(args) => enqueue::run(args).await,
            Command::EndToEnd(args) => end_to_end::run(args).await,
            Command::Fairness(args) => fairness::run(args).await,
            Command::Mixed(args) => mixed::run(args).await,
            Command::Estimates(args) => estimates::run(args).await,
            Command::Waits(args) => waits::run(args).await,
            Command::Restart(args) => restart::run(args).await,
            Command::Turnover(args) => turnover::run(args).await,
        }
    };
    // Whichever way it ends, the server that was started for it is dropped with it, and that ends it.
    let mut signals = serve::Signals::new()?;
    tokio::select! {
        done = measured => done,
        told = signals.told_to_stop() => Err(Failure::new(format!("{told}: stopped before it was measured"))),
    }
}

/// Adds fields to a row.
fn add(row: &mut Value, fields: Map<String, Value>) {
    if let Value::Object(row) = row {
        row.extend(fields);
    }
}
