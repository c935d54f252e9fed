//! `evenhand bench enqueue`: how many tasks a server accepts in a second, and how long a call takes.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::json;

use super::load::{self, Load};
use super::percentiles::HEADINGS;
use super::target::{Place, Target};
use crate::Done;
use crate::table::{count, of, table};

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench enqueue
  evenhand bench enqueue --tasks 20000 --batch 1 --calls 64
  evenhand bench enqueue --server http://127.0.0.1:7400 --json

Nothing runs the tasks: on a server of yours (--server) they stay in a queue named bench-..")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    load: Load,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(args: Args) -> Done {
    let target = Target::begin(&args.place).await?;
    let bar = load::progress("accepting", args.load.tasks);
    let accepted = load::submit(&target, &target.name("enqueue"), &args.load, &bar).await?;
    bar.finish_and_clear();
    let rate = load::rate(args.load.tasks, accepted.took);
    if args.json {
        let mut row = json!({
            "bench": "enqueue",
            "tasks": args.load.tasks,
            "batch": args.load.batch,
            "calls": args.load.calls,
            "connections": args.load.connections,
            "payload_bytes": args.load.kind.payload,
            "keys": args.load.kind.keys,
            "seconds": accepted.took.as_secs_f64(),
            "accepted_per_second": rate,
        });
        super::add(&mut row, accepted.calls.fields());
        println!("{row}");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{} of {} bytes, {} in a call, {} at once, {}; each answered when it is on disk",
        of(args.load.tasks, "task"),
        args.load.kind.payload,
        count(args.load.batch),
        of(args.load.calls, "call"),
        of(args.load.kind.keys, "key"),
    );
    let numbers = [count(accepted.calls.len() as u64), count(rate as u64)];
    let row = numbers.into_iter().chain(accepted.calls.cells()).collect();
    let head: Vec<&str> = ["calls", "accepted/s"].into_iter().chain(HEADINGS).collect();
    print!("{}", table(&head, &[row]));
    Ok(ExitCode::SUCCESS)
}
