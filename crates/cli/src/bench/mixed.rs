//! `evenhand bench mixed`: how long short tasks wait beside long ones, without duration classes and with them.
//!
//! Two keys submit at a steady rate, one of them much: four short tasks for each long one. There is more long work than
//! all slots can do, so that without classes every slot is soon taken by a long task. The same load is played twice, each
//! time on a server of its own: in a queue without classes, and in one where long tasks may hold a part of the slots.
//! Waits count from when a task was due to be submitted. After the last call a phase goes on until every short task has
//! begun, so that those that waited longest count too; long ones that are left are dropped.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use evenhand::{Limit, NewTask, QueueSettings};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::load::{self, Crew, Hands};
use super::percentiles::{HEADINGS, Times, ms, text};
use super::target::{Room, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure, parse};

/// Every so many tasks of a key one is long.
const ONE_LONG_IN: u64 = 5;
/// A long task may take so many times as long as it does; a short one half as long as a long one takes.
const LONG_TIMES: u32 = 10;
/// Looked at so often whether all short tasks have begun; and given up when none has for so long.
const LOOK: Duration = Duration::from_millis(5);
const STALLED: Duration = Duration::from_secs(60);
/// Before the first task is due.
const BEFORE: Duration = Duration::from_millis(100);

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench mixed
  evenhand bench mixed --seconds 30 --rounds 3
  evenhand bench mixed --limit 50 --long 2s --json | jq .

One task in five is long. Without classes the waits grow for as long as tasks come: compare runs of the same length.
What the limit keeps free of long tasks is for short ones, also while there are none: that is its price, and the column
of long tasks shows it.")]
pub(crate) struct Args {
    #[command(flatten)]
    room: Room,
    /// Slots of the worker
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=10_000))]
    slots: u32,
    /// How long a short task takes
    #[arg(long, default_value = "20ms", value_name = "TIME", value_parser = parse::duration)]
    short: Duration,
    /// How long a long one takes, at least four times as long
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    long: Duration,
    /// How many in a hundred slots long tasks may hold, in the queue with classes
    #[arg(long, default_value_t = 25, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    limit: u8,
    /// Tasks per second of the key that floods
    #[arg(long, default_value_t = 48, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    flood: u64,
    /// Tasks per second of the quiet key
    #[arg(long, default_value_t = 12, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    quiet: u64,
    /// For how long tasks come
    #[arg(long, default_value_t = 12, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// How often both are played, in turn; all their waits count
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    rounds: u64,
    /// Print JSON for programs, an object for each result, instead of a table for people
    #[arg(long)]
    json: bool,
}

/// A task of the schedule. Its payload says what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    at: Duration,
    quiet: bool,
    long: bool,
}

impl Due {
    fn payload(self) -> Vec<u8> {
        let mut payload = (self.at.as_nanos() as u64).to_le_bytes().to_vec();
        payload.extend([u8::from(self.quiet), u8::from(self.long)]);
        payload
    }

    fn read(payload: &[u8]) -> Option<Due> {
        let (at, [quiet, long]) = payload.split_first_chunk::<8>()? else { return None };
        let at = Duration::from_nanos(u64::from_le_bytes(*at));
        Some(Due { at, quiet: *quiet == 1, long: *long == 1 })
    }
}

/// All tasks of a phase, in the order in which they are due. Where the long ones are is the same in each.
fn schedule(args: &Args) -> Vec<Due> {
    let of = |rate: u64, quiet: bool| {
        (0..rate * args.seconds).map(move |n| Due {
            at: Duration::from_secs_f64(n as f64 / rate as f64),
            quiet,
            // One in each five, and not always the same.
            long: n % ONE_LONG_IN == load::mixed(n / ONE_LONG_IN * 2 + u64::from(quiet)) % ONE_LONG_IN,
        })
    };
    let mut all: Vec<Due> = of(args.flood, false).chain(of(args.quiet, true)).collect();
    all.sort_by_key(|due| due.at);
    all
}

/// What came of a phase, or of several of the same kind.
#[derive(Debug, Default)]
struct Seen {
    /// How long short tasks waited: the quiet key's, and all.
    quiet: Vec<Duration>,
    all: Vec<Duration>,
    /// Tasks that began while tasks came.
    short: u64,
    long: u64,
}

/// The waits of one kind of phase.
#[derive(Debug)]
struct Phase {
    classes: bool,
    quiet: Times,
    all: Times,
    short: u64,
    long: u64,
}

pub(crate) async fn run(args: Args) -> Done {
    if args.long < args.short * 4 {
        let text = "--long must be at least four times --short: else nothing is in anybody's way".into();
        return Err(Failure { text, exit: 2 });
    }
    let all = schedule(&args);
    let bar =
        load::progress("beginning", 2 * args.rounds * all.iter().filter(|due| !due.long).count() as u64);
    let (mut without, mut with) = (Seen::default(), Seen::default());
    for _ in 0..args.rounds {
        play(&args, &all, false, &mut without, &bar).await?;
        play(&args, &all, true, &mut with, &bar).await?;
    }
    bar.finish_and_clear();
    let phases = [(false, without), (true, with)].map(|(classes, seen)| Phase {
        classes,
        quiet: Times::new(seen.quiet),
        all: Times::new(seen.all),
        short: seen.short,
        long: seen.long,
    });
    match args.json {
        true => print_json(&args, &phases),
        false => print_table(&args, &phases),
    }
    Ok(ExitCode::SUCCESS)
}

/// Plays the load once.
async fn play(
    args: &Args,
    all: &[Due],
    classes: bool,
    sum: &mut Seen,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    let target = Target::begin(&args.room.clone().into()).await?;
    let queue = target.name(if classes { "classes" } else { "plain" });
    let (short_most, long_most) = (args.long / 2, args.long * LONG_TIMES);
    let mut settings = QueueSettings::new().retention(Duration::ZERO);
    if classes {
        settings = settings.classes([(short_most, Limit::All), (long_most, Limit::Percent(args.limit))]);
    }
    let client = target.client()?;
    client.set_queue(&queue, settings).await?;

    let epoch = Instant::now();
    let seen = Arc::new(Mutex::new(Seen::default()));
    let begun = Arc::new(AtomicU64::new(0));
    // Known when the worker is there.
    let from = Arc::new(std::sync::OnceLock::<Duration>::new());
    let (short, long, comes) = (args.short, args.long, Duration::from_secs(args.seconds));
    let hands = Hands { workers: 1, slots: args.slots };
    let see = {
        let (seen, begun, from, bar) = (seen.clone(), begun.clone(), from.clone(), bar.clone());
        move |payload: &[u8], run: &evenhand::Run| {
            let (Some(due), Some(from)) = (Due::read(payload), from.get()) else { return Duration::ZERO };
            let at = epoch.elapsed().saturating_sub(*from);
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let during = u64::from(at < comes);
            match due.long {
                true => seen.long += during,
                false => seen.short += during,
            }
            if !due.long && run.attempt() == 1 {
                let wait = at.saturating_sub(due.at);
                seen.all.push(wait);
                seen.quiet.extend(due.quiet.then_some(wait));
                begun.fetch_add(1, Ordering::Relaxed);
                bar.inc(1);
            }
            if due.long { long } else { short }
        }
    };
    let mut crew = Crew::as_told(&target, &queue, &hands, see)?;
    load::warm_up(&target, &mut crew, Vec::new()).await?;

    let from = *from.get_or_init(|| epoch.elapsed() + BEFORE);
    let mut calls = JoinSet::new();
    for due in all {
        tokio::time::sleep((from + due.at).saturating_sub(epoch.elapsed())).await;
        let (most, key) =
            (if due.long { long_most } else { short_most }, if due.quiet { "quiet" } else { "flood" });
        let task = NewTask::new(due.payload()).key(key).max_duration(most);
        let (client, queue) = (client.clone(), queue.clone());
        calls.spawn(async move { client.enqueue(&queue, task).await });
    }
    while let Some(call) = calls.join_next().await {
        call.map_err(Failure::new)??;
    }
    let wanted = all.iter().filter(|due| !due.long).count() as u64;
    let (mut last, mut moved) = (0, Instant::now());
    loop {
        let now = begun.load(Ordering::Relaxed);
        if now >= wanted && epoch.elapsed() >= from + comes {
            break;
        }
        if now != last {
            (last, moved) = (now, Instant::now());
        }
        if moved.elapsed() > STALLED.max(args.long * LONG_TIMES) {
            return Err(Failure::new(format!(
                "only {now} of {wanted} short tasks have begun, and no more do"
            )));
        }
        tokio::time::sleep(LOOK).await;
    }
    let mut seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    sum.quiet.append(&mut seen.quiet);
    sum.all.append(&mut seen.all);
    sum.short += seen.short;
    sum.long += seen.long;
    // What is left need not be run: server and worker end here.
    Ok(())
}

/// How many times as long short tasks wait without classes, at this rank.
fn ratio(without: &Times, with: &Times, per_mille: u64) -> f64 {
    let nanos = |times: &Times| times.at(per_mille).as_nanos().max(1) as f64;
    nanos(without) / nanos(with)
}

/// Which short tasks, and their waits in both kinds of phase.
fn waits(phases: &[Phase; 2]) -> [(&'static str, [&Times; 2]); 2] {
    let [without, with] = phases;
    [("quiet", [&without.quiet, &with.quiet]), ("all", [&without.all, &with.all])]
}

fn print_json(args: &Args, phases: &[Phase; 2]) {
    let seconds = (args.seconds * args.rounds) as f64;
    for (n, phase) in phases.iter().enumerate() {
        for (whose, times) in waits(phases) {
            let mut row = json!({
                "bench": "mixed",
                "classes": phase.classes,
                "whose": whose,
                "slots": args.slots,
                "short_ms": ms(args.short),
                "long_ms": ms(args.long),
                "limit_percent": args.limit,
                "flood_per_second": args.flood,
                "quiet_per_second": args.quiet,
                "seconds": seconds,
                "short_begun_per_second": phase.short as f64 / seconds,
                "long_begun_per_second": phase.long as f64 / seconds,
                "count": times[n].len(),
                "p99_without_over_with": ratio(times[0], times[1], 990),
            });
            if let Value::Object(_) = &row {
                super::add(&mut row, times[n].fields());
            }
            println!("{row}");
        }
    }
}

fn print_table(args: &Args, phases: &[Phase; 2]) {
    println!(
        "{} short ({}) and one long ({}) in turn, {} and {} per second of two keys for {} s; {}",
        ONE_LONG_IN - 1,
        text(args.short),
        text(args.long),
        count(args.flood),
        of(args.quiet, "task"),
        args.seconds * args.rounds,
        of(args.slots.into(), "slot"),
    );
    let mut rows = Vec::new();
    for (n, phase) in phases.iter().enumerate() {
        let how = match phase.classes {
            false => "without classes".to_string(),
            true => format!("long tasks hold at most {}%", args.limit),
        };
        for (whose, times) in waits(phases) {
            let whose = if whose == "quiet" { "of the quiet key" } else { "of both keys" };
            rows.push(
                [how.clone(), whose.to_string()].into_iter().chain(times[n].cells()).collect::<Vec<_>>(),
            );
        }
    }
    let head: Vec<&str> = ["short tasks wait", "whose"].into_iter().chain(HEADINGS).collect();
    print!("{}", table(&head, &rows));
    println!();
    let seconds = (args.seconds * args.rounds) as f64;
    let begun = |phase: &Phase| {
        let each = |begun: u64| format!("{:.1}", begun as f64 / seconds);
        let how = if phase.classes { "with classes" } else { "without classes" };
        vec![how.to_string(), each(phase.short), each(phase.long), each(phase.short + phase.long)]
    };
    let rows: Vec<Vec<String>> = phases.iter().map(begun).collect();
    print!("{}", table(&["begun per second", "short", "long", "all"], &rows));
    let [quiet, all] = waits(phases).map(|(_, times)| ratio(times[0], times[1], 990));
    println!("p99 without classes / with: {quiet:.1} for the quiet key, {all:.1} for both keys");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn one_task_in_five_is_long_for_each_key() {
        let line = <Line as clap::Parser>::parse_from(["bench", "--seconds", "10"]);
        let all = schedule(&line.args);
        assert_eq!(all.len(), 600);
        assert!(all.is_sorted_by_key(|due| due.at));
        for quiet in [true, false] {
            let (mine, long) = all
                .iter()
                .filter(|due| due.quiet == quiet)
                .fold((0, 0), |(all, long), due| (all + 1, long + u64::from(due.long)));
            assert_eq!(mine, long * ONE_LONG_IN);
        }
    }

    #[test]
    fn a_payload_says_what_it_is() {
        let due = Due { at: Duration::from_millis(1_234), quiet: true, long: false };
        assert_eq!(Due::read(&due.payload()), Some(due));
        assert_eq!(Due::read(b""), None);
    }
}
