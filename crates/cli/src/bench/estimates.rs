//! `evenhand bench estimates`: how much slower tasks are started while many watch tasks that wait, and are told when those
//! will start.
//!
//! One queue, with a backlog and slots that are never idle. It is run in slices, in turn without watchers and with: before
//! each the queue is paused and filled up, then so many tasks are run, and what counts is how many begin in a second and
//! how much processor time the server uses for each. Those that are watched are spread over what is left at the end of a
//! slice, so that all of them wait all the time. Slices that stand beside each other are compared, and the median counts.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use evenhand::{Client, NewTask, QueueSettings};
use evenhand_api::v1;
use serde_json::json;
use tokio::task::JoinSet;

use super::load::{self, Crew, Hands};
use super::target::{Room, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure};

/// Tasks in one call, and calls on their way at once.
const BATCH: u64 = 1_000;
const CALLS: usize = 4;
/// Watchers that share a connection.
const PER_CONNECTION: usize = 100;
const LOOK: Duration = Duration::from_millis(2);
/// How long nothing may happen before a measurement is given up.
const STALLED: Duration = Duration::from_secs(60);
/// What is aimed at, in percent.
const AIM: f64 = 5.0;

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench estimates
  evenhand bench estimates --rounds 10 --watchers 5000
  evenhand bench estimates --waiting 10000 --tasks 50000 --json | jq .

Server, worker and watchers share this machine: what the watchers themselves cost counts as slower, too. The server's
processor time is its own.")]
pub(crate) struct Args {
    #[command(flatten)]
    room: Room,
    /// Tasks that wait, at least
    #[arg(long, default_value_t = 100_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    waiting: u64,
    /// Those of them that somebody watches
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=50_000))]
    watchers: u64,
    /// Tasks that are run in each slice: some seconds of work, or all that is measured is how watchers begin
    #[arg(long, default_value_t = 300_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    tasks: u64,
    /// Keys that the tasks are charged to, in turn
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    keys: u64,
    #[command(flatten)]
    hands: Hands,
    /// Slices of each kind, in turn; the median counts
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    rounds: u64,
    /// Print JSON for programs, an object for each slice and one for the ratio, instead of a table for people
    #[arg(long)]
    json: bool,
}

/// One slice.
#[derive(Clone, Copy, Debug)]
struct Slice {
    watchers: u64,
    begun: u64,
    took: Duration,
    /// The server's processor time.
    cpu: Option<Duration>,
    /// Estimates that watchers were told.
    told: u64,
}

impl Slice {
    fn rate(&self) -> f64 {
        load::rate(self.begun, self.took)
    }

    fn cpu_us(&self) -> Option<f64> {
        self.cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / self.begun.max(1) as f64)
    }
}

/// The queue and what is known of it.
struct Stage<'a> {
    args: &'a Args,
    target: &'a Target,
    client: Client,
    queue: String,
    begun: Arc<AtomicU64>,
    /// What waits, in the order in which it was submitted, which is the order in which it is started.
    ids: VecDeque<String>,
    submitted: u64,
}

pub(crate) async fn run(args: Args) -> Done {
    if args.watchers > args.waiting {
        let text = "--watchers must not be more than --waiting: each watches another task".into();
        return Err(Failure { text, exit: 2 });
    }
    let target = Target::begin(&args.room.clone().into()).await?;
    let queue = target.name("estimates");
    let client = target.client()?;
    client.set_queue(&queue, QueueSettings::new().retention(Duration::ZERO)).await?;
    let mut crew = Crew::start(&target, &queue, &args.hands, |_, _| {})?;
    load::warm_up(&target, &mut crew, Vec::new()).await?;
    let begun = crew.counter();
    let mut stage =
        Stage { args: &args, target: &target, client, queue, begun, ids: VecDeque::new(), submitted: 0 };
    let bar = load::progress("slices", 2 * args.rounds + 1);
    // The first warms up: its files are new, and nothing is known of how long tasks take.
    stage.slice(0).await?;
    bar.inc(1);
    let mut slices = Vec::new();
    for round in 0..args.rounds {
        // Each kind goes first as often: what a machine does over time must not look like a difference.
        let kinds = if round % 2 == 0 { [0, args.watchers] } else { [args.watchers, 0] };
        for watchers in kinds {
            slices.push(stage.slice(watchers).await?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    drop(stage);
    match args.json {
        true => print_json(&args, &slices),
        false => print_table(&args, &slices),
    }
    Ok(ExitCode::SUCCESS)
}

impl Stage<'_> {
    /// Fills the queue up and runs a slice, with so many who watch.
    async fn slice(&mut self, watchers: u64) -> Result<Slice, Failure> {
        self.client.pause(&self.queue).await?;
        self.fill().await?;
        let told = Arc::new(AtomicU64::new(0));
        let watching = self.watch(watchers, &told).await?;
        let before = self.begun.load(Ordering::Relaxed);
        self.client.resume(&self.queue).await?;
        self.until(before + 1).await?;
        let (cpu, from, began) = (self.target.on_cpu(), self.begun.load(Ordering::Relaxed), Instant::now());
        self.until(from + self.args.tasks).await?;
        let (to, took) = (self.begun.load(Ordering::Relaxed), began.elapsed());
        let cpu = self.target.on_cpu().zip(cpu).map(|(to, from)| to.saturating_sub(from));
        drop(watching);
        Ok(Slice { watchers, begun: to - from, took, cpu, told: told.load(Ordering::Relaxed) })
    }

    /// Waits until so many tasks have begun.
    async fn until(&self, wanted: u64) -> Result<(), Failure> {
        let (mut seen, mut moved) = (0, Instant::now());
        loop {
            let begun = self.begun.load(Ordering::Relaxed);
            if begun >= wanted {
                return Ok(());
            }
            if begun != seen {
                (seen, moved) = (begun, Instant::now());
            }
            if moved.elapsed() > STALLED {
                let seconds = STALLED.as_secs();
                return Err(Failure::new(format!(
                    "no task has begun for {seconds} s; {begun} of {wanted} have"
                )));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Submits as many tasks as are missing, when nothing runs any more.
    async fn fill(&mut self) -> Result<(), Failure> {
        let began = Instant::now();
        let waiting = loop {
            let queues = self.client.queues().await?;
            let Some(mine) = queues.iter().find(|queue| queue.name == self.queue) else { break 0 };
            if mine.running == 0 {
                break mine.waiting;
            }
            if began.elapsed() > STALLED {
                return Err(Failure::new(format!(
                    "{} still run in a queue that is paused",
                    of(mine.running, "task")
                )));
            }
            tokio::time::sleep(LOOK * 5).await;
        };
        while self.ids.len() as u64 > waiting {
            self.ids.pop_front();
        }
        // A slice is over some tasks after its last: as many as there are slots, and those that are on their way.
        let slots = u64::from(self.args.hands.workers) * u64::from(self.args.hands.slots);
        let wanted = self.args.waiting + self.args.tasks + 2 * slots;
        let mut missing = wanted.saturating_sub(waiting);
        while missing > 0 {
            let mut calls = JoinSet::new();
            // Calls that are on their way together may be accepted in any order; that is near enough.
            for _ in 0..CALLS {
                let many = BATCH.min(missing);
                if many == 0 {
                    break;
                }
                missing -= many;
                let first = self.submitted;
                self.submitted += many;
                let keys = self.args.keys;
                let task = |n: u64| NewTask::new(bytes::Bytes::new()).key(load::key(n % keys));
                let tasks: Vec<NewTask> = (first..first + many).map(task).collect();
                let (client, queue) = (self.client.clone(), self.queue.clone());
                calls.spawn(async move { client.enqueue_all(&queue, tasks).await });
            }
            while let Some(call) = calls.join_next().await {
                self.ids.extend(call.map_err(Failure::new)??.ids);
            }
        }
        Ok(())
    }

    /// So many watch tasks that are spread over those that will be left. They cease when what is returned is dropped.
    async fn watch(&self, watchers: u64, told: &Arc<AtomicU64>) -> Result<JoinSet<()>, Failure> {
        let left: Vec<&String> = self.ids.iter().rev().take(self.args.waiting as usize).collect();
        let step = left.len() as f64 / watchers.max(1) as f64;
        let ids: Vec<String> = (0..watchers)
            .filter_map(|n| left.get((n as f64 * step) as usize).map(|id| (*id).clone()))
            .collect();
        let mut opening = JoinSet::new();
        for ids in ids.chunks(PER_CONNECTION) {
            let (client, ids) = (self.target.client()?, ids.to_vec());
            opening.spawn(async move {
                let mut open = Vec::new();
                for id in ids {
                    open.push(client.watch(&id).await?);
                }
                Ok::<_, Failure>(open)
            });
        }
        let mut watching = JoinSet::new();
        while let Some(open) = opening.join_next().await {
            for mut watch in open.map_err(Failure::new)?? {
                let told = told.clone();
                watching.spawn(async move {
                    while let Ok(Some(event)) = watch.next().await {
                        if let Some(v1::task_event::Event::Estimate(_)) = event.event {
                            told.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        }
        Ok(watching)
    }
}

/// The middle one.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// What both kinds of slices come to.
#[derive(Debug)]
struct Compared {
    /// Of the slices without watchers, and of those with.
    rates: [Option<f64>; 2],
    cpu_us: [Option<f64>; 2],
    told_per_second: f64,
    /// How much slower, in percent: the median over pairs; and the least and the most.
    slower: Option<f64>,
    least_most: (f64, f64),
    /// How much more processor time the server takes for a task, in percent.
    costlier: Option<f64>,
}

fn compare(slices: &[Slice]) -> Compared {
    // Of each pair: the one without watchers, then the one with.
    let pairs: Vec<[Slice; 2]> = slices
        .chunks_exact(2)
        .map(|pair| if pair[0].watchers == 0 { [pair[0], pair[1]] } else { [pair[1], pair[0]] })
        .collect();
    let of = |n: usize, what: fn(&Slice) -> Option<f64>| {
        median(pairs.iter().filter_map(|pair| what(&pair[n])).collect())
    };
    let slower: Vec<f64> =
        pairs.iter().map(|[without, with]| 100.0 * (1.0 - with.rate() / without.rate())).collect();
    let costlier = |[without, with]: &[Slice; 2]| {
        Some(100.0 * (with.cpu_us()? / without.cpu_us().filter(|us| *us > 0.0)? - 1.0))
    };
    let told: u64 = slices.iter().map(|slice| slice.told).sum();
    let took: Duration = pairs.iter().map(|pair| pair[1].took).sum();
    Compared {
        rates: [0, 1].map(|n| of(n, |slice| Some(slice.rate()))),
        cpu_us: [0, 1].map(|n| of(n, Slice::cpu_us)),
        told_per_second: load::rate(told, took),
        least_most: slower.iter().fold((f64::MAX, f64::MIN), |(l, m), s| (l.min(*s), m.max(*s))),
        slower: median(slower),
        costlier: median(pairs.iter().filter_map(costlier).collect()),
    }
}

fn print_json(args: &Args, slices: &[Slice]) {
    for slice in slices {
        let row = json!({
            "bench": "estimates",
            "part": "slice",
            "waiting": args.waiting,
            "watchers": slice.watchers,
            "tasks": slice.begun,
            "seconds": slice.took.as_secs_f64(),
            "begun_per_second": slice.rate(),
            "server_cpu_us_per_task": slice.cpu_us(),
            "estimates_told": slice.told,
        });
        println!("{row}");
    }
    let compared = compare(slices);
    let row = json!({
        "bench": "estimates",
        "part": "ratio",
        "waiting": args.waiting,
        "watchers": args.watchers,
        "slower_percent": compared.slower,
        "slower_percent_least": compared.least_most.0,
        "slower_percent_most": compared.least_most.1,
        "server_cpu_more_percent": compared.costlier,
        "aim_percent": AIM,
    });
    println!("{row}");
}

fn print_table(args: &Args, slices: &[Slice]) {
    println!(
        "{} wait, {} in a slice, {} of each kind; {} of {}",
        of(args.waiting, "task"),
        count(args.tasks),
        of(args.rounds, "slice"),
        of(args.hands.workers.into(), "worker"),
        of(args.hands.slots.into(), "slot"),
    );
    let compared = compare(slices);
    let row = |n: usize| {
        let how = match n {
            0 => "nobody watches".to_string(),
            _ => format!("{} watched", of(args.watchers, "task")),
        };
        let told = if n == 0 { 0.0 } else { compared.told_per_second };
        vec![
            how,
            compared.rates[n].map_or("-".into(), |rate| count(rate as u64)),
            compared.cpu_us[n].map_or("-".into(), |us| format!("{us:.1}")),
            format!("{told:.0}"),
        ]
    };
    print!("{}", table(&["how", "begun/s", "server µs/task", "estimates told/s"], &[row(0), row(1)]));
    if let Some(slower) = compared.slower {
        let (least, most) = compared.least_most;
        println!(
            "with watchers: {slower:.1}% slower ({least:.1}% to {most:.1}%); the aim is at most {AIM:.0}%"
        );
    }
    if let Some(costlier) = compared.costlier {
        println!("the server's processor time for a task: {costlier:+.1}%");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_compared_with_those_beside_them() {
        let slice = |watchers, ms, cpu_ms| Slice {
            watchers,
            begun: 1_000,
            took: Duration::from_millis(ms),
            cpu: Some(Duration::from_millis(cpu_ms)),
            told: watchers,
        };
        // The machine becomes twice as slow: the second pair is of the other order.
        let slices = [slice(0, 90, 100), slice(7, 100, 110), slice(7, 200, 110), slice(0, 180, 100)];
        let compared = compare(&slices);
        assert!(compared.slower.is_some_and(|slower| (slower - 10.0).abs() < 0.01), "{compared:?}");
        assert!(compared.costlier.is_some_and(|costlier| (costlier - 10.0).abs() < 0.01), "{compared:?}");
    }
}
