//! `evenhand bench turnover`: what steady workers get done beside others that crash again and again.
//!
//! Those connect, say hello and vanish without a word: some before they are let in, some as soon as they are, some later,
//! and come back as the next life of their seat. Steady workers have as many tasks as they like, so what they get done is
//! compared with what they get done alone, in the same run, and both with what their slots could do at most; and the same
//! with a server that is killed and started again in the middle.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use evenhand::{NewTask, QueueSettings, Retries};
use indicatif::ProgressBar;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::crowd::{Dial, Leaves, One, allow_connections};
use super::load::{self, Crew, Hands, mixed};
use super::target::{Room, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure, parse};

/// Tasks that wait at least, and in one call.
const WAITING: u64 = 5_000;
const BATCH: u64 = 1_000;
const LOOK: Duration = Duration::from_millis(50);
/// Before anything is counted.
const WARM_UP: Duration = Duration::from_secs(2);
/// A life lasts at most so long, and so does the pause before the next one.
const LIFE_MS: u64 = 1_500;
const PAUSE_MS: u64 = 200;

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench turnover
  evenhand bench turnover --crashing 200 --rounds 1
  evenhand bench turnover --task 1ms --slots 10 --json | jq .")]
pub(crate) struct Args {
    #[command(flatten)]
    room: Room,
    /// Steady workers
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    steady: u32,
    /// Slots of each steady worker
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slots: u32,
    /// Workers that crash again and again
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=5_000))]
    crashing: u64,
    /// How long a task takes
    #[arg(long, default_value = "20ms", value_name = "TIME", value_parser = parse::duration)]
    task: Duration,
    /// How long is counted each time
    #[arg(long, default_value_t = 8, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// How often all is measured, each time on a new server; the sum is shown
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    rounds: u64,
    /// Print JSON for programs, an object for each result, instead of a table for people
    #[arg(long)]
    json: bool,
}

/// What was begun in all rounds.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    alone: u64,
    beside: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    running: Counted,
    restarted: Counted,
    /// Lives of those that crash, while they were measured.
    lives: u64,
}

pub(crate) async fn run(args: Args) -> Done {
    allow_connections(args.crashing as usize + args.steady as usize)?;
    let bar = load::progress("measuring", args.rounds * 4);
    let mut sums = Sums::default();
    for _ in 0..args.rounds {
        round(&args, &mut sums, &bar).await?;
    }
    bar.finish_and_clear();
    match args.json {
        true => print_json(&args, &sums),
        false => print_table(&args, &sums),
    }
    Ok(ExitCode::SUCCESS)
}

async fn round(args: &Args, sums: &mut Sums, bar: &ProgressBar) -> Result<(), Failure> {
    let mut target = Target::begin(&args.room.clone().into()).await?;
    let queue = target.name("turnover");
    let settings = QueueSettings::new().retention(Duration::ZERO).retries(Retries::new().max_lost(255));
    target.client()?.set_queue(&queue, settings).await?;
    let hands = Hands { workers: args.steady, slots: args.slots };
    let crew = Crew::that_takes(args.task, &target, &queue, &hands, |_, _| {})?;
    let begun = crew.counter();
    let mut others = JoinSet::new();
    others.spawn(feed(target.client()?, queue.clone()));
    tokio::time::sleep(WARM_UP).await;
    sums.running.alone += count_begun(args, &begun, None, bar).await?;
    sums.restarted.alone += count_begun(args, &begun, Some(&mut target), bar).await?;
    let lives = Arc::new(AtomicU64::new(0));
    for number in 0..args.crashing {
        others.spawn(crash_again_and_again(
            target.url().to_string(),
            target.name(&format!("crashing-{number}")),
            queue.clone(),
            number,
            lives.clone(),
        ));
    }
    tokio::time::sleep(WARM_UP).await;
    let before = lives.load(Ordering::Relaxed);
    sums.running.beside += count_begun(args, &begun, None, bar).await?;
    sums.lives += lives.load(Ordering::Relaxed) - before;
    sums.restarted.beside += count_begun(args, &begun, Some(&mut target), bar).await?;
    if let Some(ended) = others.try_join_next() {
        ended.map_err(Failure::new)??;
    }
    Ok(())
}

/// Sees to it that there is always something to do.
async fn feed(client: evenhand::Client, queue: String) -> Result<(), Failure> {
    let task = || NewTask::new(bytes::Bytes::new()).max_attempts(1_000);
    loop {
        let queues = client.queues().await?;
        if queues.iter().find(|of| of.name == queue).is_none_or(|of| of.waiting < WAITING) {
            client.enqueue_all(&queue, (0..BATCH).map(|_| task()).collect()).await?;
        } else {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// One seat's lives.
async fn crash_again_and_again(
    url: String,
    seat: String,
    queue: String,
    number: u64,
    lives: Arc<AtomicU64>,
) -> Result<(), Failure> {
    let (events, _nobody) = mpsc::unbounded_channel();
    for life in 1.. {
        let draw = |n: u64, below: u64| mixed(number * 1_000_003 + life * 31 + n) % below;
        let leaves = match draw(0, 4) {
            0 => Leaves::AtWelcome,
            1 => Leaves::AfterHello(Duration::from_millis(draw(1, 20))),
            _ => Leaves::AfterHello(Duration::from_millis(draw(1, LIFE_MS))),
        };
        let one = One {
            number: number as usize,
            seat: seat.clone(),
            queue: queue.clone(),
            life,
            dial: Dial::Paused,
            leaves,
            events: events.clone(),
        };
        one.live(&url).await?;
        lives.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(draw(2, PAUSE_MS))).await;
    }
    Ok(())
}

/// How many tasks steady workers begin in the time; the server is killed and started again in the middle if it is named.
async fn count_begun(
    args: &Args,
    begun: &AtomicU64,
    restarts: Option<&mut Target>,
    bar: &ProgressBar,
) -> Result<u64, Failure> {
    let (before, began) = (begun.load(Ordering::Relaxed), Instant::now());
    let all = Duration::from_secs(args.seconds);
    if let Some(target) = restarts {
        tokio::time::sleep(all / 2).await;
        target.kill();
        target.start_again().await?;
    }
    tokio::time::sleep(all.saturating_sub(began.elapsed())).await;
    bar.inc(1);
    Ok(begun.load(Ordering::Relaxed) - before)
}

/// The most that the steady workers' slots can begin.
fn limit(args: &Args) -> f64 {
    let slots = f64::from(args.steady) * f64::from(args.slots);
    slots * (args.seconds * args.rounds) as f64 / args.task.as_secs_f64()
}

fn part(of: u64, limit: f64) -> f64 {
    of as f64 / limit.max(1.0)
}

fn rows(sums: &Sums) -> [(&'static str, Counted); 2] {
    [("running", sums.running), ("restarted", sums.restarted)]
}

fn print_json(args: &Args, sums: &Sums) {
    let seconds = (args.seconds * args.rounds) as f64;
    for (name, counted) in rows(sums) {
        let row = json!({
            "bench": "turnover",
            "part": name,
            "steady": args.steady,
            "slots": args.slots,
            "crashing": args.crashing,
            "task_ms": super::percentiles::ms(args.task),
            "seconds": seconds,
            "lives_per_second": sums.lives as f64 / seconds,
            "alone_per_second": counted.alone as f64 / seconds,
            "beside_per_second": counted.beside as f64 / seconds,
            "alone_of_limit": part(counted.alone, limit(args)),
            "beside_of_limit": part(counted.beside, limit(args)),
            "beside_of_alone": part(counted.beside, counted.alone as f64),
        });
        println!("{row}");
    }
}

fn print_table(args: &Args, sums: &Sums) {
    let seconds = args.seconds * args.rounds;
    println!(
        "{} of {}, tasks of {}; beside {} that crash, {} lives per second",
        of(args.steady.into(), "steady worker"),
        of(args.slots.into(), "slot"),
        super::percentiles::text(args.task),
        count(args.crashing),
        count(sums.lives / seconds.max(1)),
    );
    let row = |(name, counted): (&str, Counted)| {
        let how = match name {
            "running" => "the server runs",
            _ => "it is killed and started again in the middle",
        };
        let per_second = |begun: u64| count(begun / seconds.max(1));
        vec![
            how.to_string(),
            per_second(counted.alone),
            format!("{:.0}%", 100.0 * part(counted.alone, limit(args))),
            per_second(counted.beside),
            format!("{:.0}%", 100.0 * part(counted.beside, limit(args))),
            format!("{:.1}%", 100.0 * part(counted.beside, counted.alone as f64)),
        ]
    };
    let rows: Vec<Vec<String>> = rows(sums).into_iter().map(row).collect();
    let head = ["tasks per second", "alone", "of all slots", "beside", "of all slots", "beside / alone"];
    print!("{}", table(&head, &rows));
}
