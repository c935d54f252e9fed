//! `evenhand bench fairness`: what each key gets while all compete, against what is due to it by its weight.
//!
//! Every key has as many tasks, submitted key after key, before the workers begin: by order of arrival the last key
//! would get nothing for long. Starts are counted until the first key runs out of waiting tasks.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args as ClapArgs;
use evenhand::NewTask;
use serde_json::json;
use tokio::task::JoinSet;

use super::load::{self, Crew, Hands};
use super::target::{Place, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure, parse};

/// Tasks in one call, and calls on their way at once.
const BATCH: u64 = 1_000;
const CALLS: usize = 4;
/// Keys that a table shows at most.
const SHOWN: usize = 20;

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench fairness
  evenhand bench fairness --keys 100 --weights 1,10 --tasks 2000
  evenhand bench fairness --workers 4 --slots 8 --json

A key's deviation is how many tasks it had got too many or too few, at the moment when that was the most. Handlers
begin in nearly the order in which the server starts them: slots blur it.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    /// Tasks of each key
    #[arg(long, default_value_t = 5_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    tasks: u64,
    /// How many keys
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=10_000))]
    keys: u64,
    /// Their weights; those of the first keys, if there are more, are those of the next
    #[arg(long, value_name = "W,..", value_delimiter = ',', default_value = "1,2,5", value_parser = parse::weight)]
    weights: Vec<u32>,
    /// Workers, all in this process
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    workers: u32,
    /// Slots of each worker
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slots: u32,
    /// Bytes of a task's payload
    #[arg(long, default_value_t = 200, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(0..=1_048_576))]
    payload: u64,
    /// Print JSON for programs, an object for each key, instead of a table for people
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(args: Args) -> Done {
    let at_once = u64::from(args.workers) * u64::from(args.slots);
    if args.tasks <= at_once {
        let text = format!(
            "--tasks must be more than all slots together, which are {at_once}: else nobody competes"
        );
        return Err(Failure { text, exit: 2 });
    }
    let target = Target::begin(&args.place).await?;
    let queue = target.name("fairness");
    let weights: Vec<u32> = args.weights.iter().copied().cycle().take(args.keys as usize).collect();
    submit(&target, &queue, &args, &weights).await?;
    let all = args.keys * args.tasks;
    let starts = Arc::new(Mutex::new(Vec::with_capacity(all as usize)));
    let seen = starts.clone();
    let hands = Hands { workers: args.workers, slots: args.slots };
    let mut crew = Crew::start(&target, &queue, &hands, move |_, run| {
        let key = number(run.key());
        seen.lock().unwrap_or_else(PoisonError::into_inner).extend(key);
    })?;
    let bar = load::progress("starting", all);
    crew.finished(&target, all, &bar).await?;
    bar.finish_and_clear();
    crew.stop().await?;
    let starts = std::mem::take(&mut *starts.lock().unwrap_or_else(PoisonError::into_inner));
    // What is last on the way may be out of order.
    let shares = Shares::of(&starts, &weights, args.tasks - at_once);
    match args.json {
        true => shares.print_json(),
        false => shares.print_table(&args),
    }
    Ok(ExitCode::SUCCESS)
}

async fn submit(target: &Target, queue: &str, args: &Args, weights: &[u32]) -> Result<(), Failure> {
    let client = target.client()?;
    let payload = bytes::Bytes::from(vec![0xa5; args.payload as usize]);
    let bar = load::progress("accepting", args.keys * args.tasks);
    for (n, weight) in weights.iter().enumerate() {
        let mut calls = JoinSet::new();
        for first in (0..args.tasks).step_by(BATCH as usize) {
            if calls.len() == CALLS {
                joined(calls.join_next().await)?;
            }
            let many = BATCH.min(args.tasks - first);
            let task = || NewTask::new(payload.clone()).key(load::key(n as u64)).weight_thousandths(*weight);
            let tasks = (0..many).map(|_| task()).collect();
            let (client, queue, bar) = (client.clone(), queue.to_string(), bar.clone());
            calls.spawn(async move {
                client.enqueue_all(&queue, tasks).await?;
                bar.inc(many);
                Ok::<(), Failure>(())
            });
        }
        while !calls.is_empty() {
            joined(calls.join_next().await)?;
        }
    }
    bar.finish_and_clear();
    Ok(())
}

fn joined(call: Option<Result<Result<(), Failure>, tokio::task::JoinError>>) -> Result<(), Failure> {
    call.map_or(Ok(()), |call| call.map_err(Failure::new)?)
}

/// A key's number.
fn number(key: &str) -> Option<usize> {
    key.strip_prefix("tenant-")?.parse().ok()
}

/// What a key got, and was due.
#[derive(Clone, Debug, PartialEq)]
struct Share {
    key: usize,
    weight: u32,
    due: f64,
    received: u64,
    /// In tasks, at its most; below zero: too few.
    deviation: f64,
}

#[derive(Debug)]
struct Shares {
    starts: u64,
    keys: Vec<Share>,
}

impl Shares {
    /// Of starts in their order, until the first key has had so many.
    fn of(starts: &[usize], weights: &[u32], most: u64) -> Shares {
        let whole: f64 = weights.iter().copied().map(f64::from).sum();
        let share = |(key, weight): (usize, &u32)| Share {
            key,
            weight: *weight,
            due: 0.0,
            received: 0,
            deviation: 0.0,
        };
        let mut keys: Vec<Share> = weights.iter().enumerate().map(share).collect();
        let mut counted = 0;
        for &key in starts {
            let Some(got) = keys.get_mut(key) else { continue };
            if got.received == most {
                break;
            }
            got.received += 1;
            counted += 1;
            for share in &mut keys {
                share.due = counted as f64 * f64::from(share.weight) / whole;
                let off = share.received as f64 - share.due;
                if off.abs() > share.deviation.abs() {
                    share.deviation = off;
                }
            }
        }
        Shares { starts: counted, keys }
    }

    /// The one that was furthest off.
    fn worst(&self) -> Option<&Share> {
        self.keys.iter().max_by(|a, b| a.deviation.abs().total_cmp(&b.deviation.abs()))
    }

    fn percent(&self, tasks: f64) -> f64 {
        100.0 * tasks / (self.starts as f64).max(1.0)
    }

    fn print_json(&self) {
        for share in &self.keys {
            let row = json!({
                "bench": "fairness",
                "key": load::key(share.key as u64),
                "weight": f64::from(share.weight) / 1e3,
                "starts": self.starts,
                "due_tasks": share.due,
                "received_tasks": share.received,
                "due_percent": self.percent(share.due),
                "received_percent": self.percent(share.received as f64),
                "worst_deviation_tasks": share.deviation,
            });
            println!("{row}");
        }
    }

    fn print_table(&self, args: &Args) {
        println!(
            "{} with {} each; {} while all competed for {} of {}",
            of(args.keys, "key"),
            of(args.tasks, "task"),
            of(self.starts, "start"),
            of(args.slots.into(), "slot"),
            of(args.workers.into(), "worker"),
        );
        let mut keys = self.keys.clone();
        if keys.len() > SHOWN {
            keys.sort_by(|a, b| b.deviation.abs().total_cmp(&a.deviation.abs()));
            keys.truncate(SHOWN);
        }
        let row = |share: &Share| {
            vec![
                load::key(share.key as u64),
                format!("{}", f64::from(share.weight) / 1e3),
                format!("{:.2}", self.percent(share.due)),
                format!("{:.2}", self.percent(share.received as f64)),
                format!("{:.1}", share.due),
                count(share.received),
                format!("{:+.1}", share.deviation),
            ]
        };
        let rows: Vec<Vec<String>> = keys.iter().map(row).collect();
        let head = ["key", "weight", "due %", "received %", "due", "received", "worst deviation"];
        print!("{}", table(&head, &rows));
        if self.keys.len() > SHOWN {
            println!("  ({SHOWN} of {}, the worst first)", of(self.keys.len() as u64, "key"));
        }
        if let Some(worst) = self.worst() {
            let off = worst.deviation.abs();
            println!("  worst: {} was {off:.1} tasks off its due", load::key(worst.key as u64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_counted_while_all_compete() {
        // Due 1:3. The second key has had its four when the seventh start comes.
        let shares = Shares::of(&[1, 1, 0, 1, 1, 0, 1, 0], &[1_000, 3_000], 4);
        assert_eq!(shares.starts, 6);
        assert_eq!(shares.keys.iter().map(|share| share.received).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(shares.keys.iter().map(|share| share.due).collect::<Vec<_>>(), [1.5, 4.5]);
        assert_eq!(shares.worst().map(|worst| worst.deviation.abs()), Some(0.5));
    }

    #[test]
    fn the_worst_moment_counts_and_not_the_last() {
        let shares = Shares::of(&[0, 0, 1, 1], &[1_000, 1_000], 10);
        assert_eq!(shares.keys.iter().map(|share| share.deviation).collect::<Vec<_>>(), [1.0, -1.0]);
        assert_eq!(shares.keys[0].received as f64, shares.keys[0].due);
    }

    #[test]
    fn keys_have_numbers() {
        assert_eq!(number(&load::key(42)), Some(42));
        assert_eq!((number(""), number("acme")), (None, None));
    }
}
