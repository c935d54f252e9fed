//! `evenhand workers`: how they stand; and what an operator does to one: drain it, give it up.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand};
use evenhand::{Client, Refusal};
use evenhand_api::rest;
use serde::Serialize;

use crate::client::LookArgs;
use crate::table::of;
use crate::terminal::{Stream, ask, print, print_json, say};
use crate::{Done, Failure, show};

/// How often a worker that drains is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a server may be away from somebody who waits for a worker.
const PATIENCE: Duration = Duration::from_secs(60);

/// All workers, or one of them.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  evenhand workers
  evenhand workers --json | jq -r '.workers[] | select(.why_not) | .seat'
  evenhand workers drain gpu-7 --wait
  evenhand workers give-up gpu-7"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    look: LookArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Ask a worker to take no more work, and to end when what it runs has ended
    Drain(DrainArgs),
    /// Say that a worker is dead, with all that it ran: its tasks are tried again at once
    GiveUp(GiveUpArgs),
}

/// Which worker drains.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand workers drain gpu-7
  evenhand workers drain gpu-7 --wait && ssh gpu-7 reboot

It does the same as SIGTERM to the worker. One that is not connected is told when it is back.")]
struct DrainArgs {
    /// Its seat
    seat: String,
    /// Wait until it is gone
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    look: LookArgs,
}

/// Which worker is dead.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand workers give-up gpu-7
  evenhand workers give-up gpu-7 --yes --json

For a machine that you know to be dead, so that its tasks need not wait until it is lost by itself. If the worker is \
alive after all, its tasks run twice at once. On a terminal you are asked first; everywhere else say --yes.")]
struct GiveUpArgs {
    /// Its seat
    seat: String,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn run(args: Args) -> Done {
    match args.command {
        None => list(args.look).await,
        Some(Command::Drain(args)) => drain(args).await,
        Some(Command::GiveUp(args)) => give_up(args).await,
    }
}

async fn list(look: LookArgs) -> Done {
    let workers = look.server.client()?.workers().await?;
    let workers = rest::Workers { workers: workers.into_iter().map(rest::Worker::from).collect() };
    if look.json {
        print_json(&workers)?;
    } else if workers.workers.is_empty() {
        print("no workers; `evenhand worker QUEUE -- COMMAND` starts one\n")?;
    } else {
        print(show::workers_text(&workers.workers, Stream::Out.width(), Stream::Out.paint()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A worker by its seat, and its process's life.
async fn find(client: &Client, seat: &str) -> Result<Option<(u64, rest::Worker)>, Refusal> {
    let workers = client.workers().await?;
    let worker = workers.into_iter().find(|worker| worker.seat == seat);
    Ok(worker.map(|worker| (worker.process_life, worker.into())))
}

fn none(seat: &str) -> Refusal {
    Refusal::not_found(format!("there is no worker {seat}"))
}

// --- drain ---

/// How a worker that drains stands, for programs.
#[derive(Serialize)]
struct Left<'a> {
    seat: &'a str,
    /// Runs that go on; none when it is gone.
    running: u32,
    gone: bool,
}

async fn drain(args: DrainArgs) -> Done {
    let DrainArgs { seat, wait, look } = args;
    let client = look.server.client()?;
    let (life, _) = find(&client, &seat).await?.ok_or_else(|| none(&seat))?;
    let drained = rest::Drained::from(client.drain_worker(&seat).await?);
    match look.json {
        true => print_json(&drained)?,
        false => print(drains(&seat, &drained) + "\n")?,
    }
    if wait {
        await_gone(&client, &seat, life, look.json).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What happens to a worker that was asked to drain.
fn drains(seat: &str, drained: &rest::Drained) -> String {
    match (drained.told, drained.running) {
        (false, _) => {
            format!("{seat} is not connected, so it cannot be told now; it drains when it is back")
        }
        (true, 0) => format!("{seat} drains: it runs nothing, and ends"),
        (true, 1) => format!("{seat} drains: 1 run goes on, then it ends"),
        (true, n) => format!("{seat} drains: {} go on, then it ends", of(n.into(), "run")),
    }
}

/// Waits until this life of a worker is gone, and shows how much is left.
async fn await_gone(client: &Client, seat: &str, life: u64, json: bool) -> Result<(), Failure> {
    let client = client.clone().patience(PATIENCE);
    let live = Stream::Err.is_live() && !json;
    let mut shown = None;
    loop {
        let worker = find(&client, seat).await?.filter(|(now, _)| *now == life);
        let Some((_, worker)) = worker else { break };
        let left = match (worker.health.as_str(), worker.running) {
            ("absent" | "unhealthy", _) => format!("{seat}: {}", show::why_no_work(&worker)),
            (_, n) => format!("{seat}: {} left", of(n.into(), "run")),
        };
        if live {
            Stream::Err.print(format!("\r\x1b[2K{left}"))?;
        } else if shown.replace(worker.running) != Some(worker.running) {
            match json {
                true => print_json(&Left { seat, running: worker.running, gone: false })?,
                false => say(left)?,
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    if live {
        Stream::Err.print("\r\x1b[2K")?;
    }
    match json {
        true => print_json(&Left { seat, running: 0, gone: true }),
        false => print(format!("{seat} is gone\n")),
    }
}

// --- give up ---

async fn give_up(args: GiveUpArgs) -> Done {
    let GiveUpArgs { seat, yes, look } = args;
    let client = look.server.client()?;
    let (_, worker) = find(&client, &seat).await?.ok_or_else(|| none(&seat))?;
    say(risk(&worker))?;
    ask(yes, &format!("give {seat} up"), &format!("Is {seat} dead, with all that it ran?"))?;
    let given_up = rest::GivenUp::from(client.give_up_worker(&seat).await?);
    match (look.json, given_up.running) {
        (true, _) => print_json(&given_up)?,
        (false, 0) => print(format!("{seat} is given up\n"))?,
        (false, 1) => print(format!("{seat} is given up: 1 task is tried again\n"))?,
        (false, n) => {
            print(format!("{seat} is given up: {} are tried again\n", of(n.into(), "task")))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What it means to give a worker up.
fn risk(worker: &rest::Worker) -> String {
    let seat = &worker.seat;
    let heard = worker.heard_ms_ago.map(|ms| format!(", heard {} ago", show::age(ms)));
    let runs = match (&heard, worker.running) {
        (None, 0) => "what it runs is not known".into(),
        (_, n) => of(n.into(), "run"),
    };
    let lost = show::age(worker.lost_in_ms);
    format!(
        "{seat} is {}{}, {runs}; if it stays silent, it is lost by itself in {lost}\n\
         if {seat} is alive, its tasks run twice at once: give it up only if you know that it is dead",
        worker.health,
        heard.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn workers_alone_are_shown_and_one_is_named_to_be_drained_or_given_up() {
        let reads = |words: &[&str]| Line::try_parse_from(["workers"].iter().chain(words)).is_ok();
        assert!(reads(&[]) && reads(&["--json"]) && reads(&["drain", "w1", "--wait", "--json"]));
        assert!(reads(&["give-up", "w1", "--yes"]) && !reads(&["give-up"]) && !reads(&["drain"]));
        assert!(!reads(&["give-up", "w1", "--wait"]));
    }

    #[test]
    fn what_a_drain_means_depends_on_what_runs() {
        let says = |told, running| drains("w1", &rest::Drained { told, running });
        assert_eq!(says(true, 3), "w1 drains: 3 runs go on, then it ends");
        assert_eq!(says(true, 1), "w1 drains: 1 run goes on, then it ends");
        assert_eq!(says(true, 0), "w1 drains: it runs nothing, and ends");
        assert_eq!(
            says(false, 3),
            "w1 is not connected, so it cannot be told now; it drains when it is back"
        );
    }
}
