//! `evenhand bench end-to-end`: server, client and workers together on this machine.
//!
//! Five parts, each on a server of its own: throughput (tasks are submitted while workers run them, and their ends are
//! remembered with a result of 100 bytes, as a queue does that nobody has configured), plain (the same, but nothing is
//! remembered), time (as the first, but keys share time), apart (all are submitted, and then workers begin), latency (single tasks at a steady rate). The calls of the last part are begun
//! by a schedule, whether or not those before them were answered, and times count from when a call was due: a server
//! that stops for a while is late for every call of that while.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args as ClapArgs, ValueEnum};
use evenhand::{NewTask, QueueSettings, Refusal, Share};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::load::{self, Crew, Hands, Load};
use super::percentiles::{HEADINGS, Times};
use super::target::{Place, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure};

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench end-to-end
  evenhand bench end-to-end --tasks 1000000 --batch 5000
  evenhand bench end-to-end --parts latency --rate 5000 --seconds 30
  evenhand bench end-to-end --json | jq .

Accepted means on disk; finished means that the server has counted the task's end and that is on disk.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    /// Which parts
    #[arg(
        long,
        value_name = "PART,..",
        value_delimiter = ',',
        default_value = "throughput,plain,time,apart,latency"
    )]
    parts: Vec<Part>,
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    hands: Hands,
    /// Latency: single tasks submitted per second
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rate: u64,
    /// Latency: for how long
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// Print JSON for programs, an object for each result, instead of tables for people
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Tasks are submitted while workers run them
    Throughput,
    /// The same, and their ends are not remembered
    Plain,
    /// As throughput, and keys share time
    Time,
    /// All tasks are submitted, then workers begin
    Apart,
    /// Single tasks at a steady rate
    Latency,
}

pub(crate) async fn run(args: Args) -> Done {
    let mut rates = Vec::new();
    for (part, name, settings) in [
        (Part::Throughput, "throughput", QueueSettings::new()),
        (Part::Plain, "plain", QueueSettings::new().retention(Duration::ZERO)),
        (Part::Time, "time", QueueSettings::new().share(Share::Time)),
    ] {
        if args.parts.contains(&part) {
            rates.push(throughput(&args, name, settings).await?);
        }
    }
    if args.parts.contains(&Part::Apart) {
        rates.push(apart(&args).await?);
    }
    let latencies = match args.parts.contains(&Part::Latency) {
        true => Some(latency(&args).await?),
        false => None,
    };
    match args.json {
        true => print_json(&args, &rates, latencies.as_ref()),
        false => print_tables(&args, &rates, latencies.as_ref()),
    }
    Ok(ExitCode::SUCCESS)
}

/// How fast tasks were accepted and finished.
struct Rates {
    part: &'static str,
    accepted: Duration,
    finished: Duration,
}

async fn throughput(args: &Args, part: &'static str, settings: QueueSettings) -> Result<Rates, Failure> {
    let target = Target::begin(&args.place).await?;
    let queue = target.name(part);
    target.client()?.set_queue(&queue, settings).await?;
    let mut crew = Crew::start(&target, &queue, &args.hands, |_, _| {})?;
    load::warm_up(&target, &mut crew, Vec::new()).await?;
    let bar = load::progress("accepting and finishing", args.load.tasks + 1);
    let began = Instant::now();
    let hidden = load::unseen();
    let (accepted, finished) = tokio::join!(
        load::submit(&target, &queue, &args.load, &hidden),
        crew.finished(&target, args.load.tasks + 1, &bar),
    );
    bar.finish_and_clear();
    let (accepted, finished) = (accepted?, finished?);
    crew.stop().await?;
    Ok(Rates { part, accepted: accepted.took, finished: finished - began })
}

async fn apart(args: &Args) -> Result<Rates, Failure> {
    let target = Target::begin(&args.place).await?;
    let queue = target.name("apart");
    let bar = load::progress("accepting", args.load.tasks);
    let accepted = load::submit(&target, &queue, &args.load, &bar).await?;
    bar.finish_and_clear();
    let mut crew = Crew::start(&target, &queue, &args.hands, |_, _| {})?;
    let bar = load::progress("finishing", args.load.tasks);
    let finished = crew.finished(&target, args.load.tasks, &bar).await?;
    bar.finish_and_clear();
    let began = crew.first().unwrap_or(finished);
    crew.stop().await?;
    Ok(Rates { part: "apart", accepted: accepted.took, finished: finished - began })
}

/// How late things were.
struct Latencies {
    /// Until the call was made: this program's own part of the others.
    begun: Times,
    accepted: Times,
    started: Times,
}

/// A payload begins with when its call was due, in nanoseconds; or with this, if that is of no interest.
const WARM_UP: u64 = u64::MAX;

fn stamped(nanos: u64, bytes: u64) -> Vec<u8> {
    let mut payload = vec![0xa5; bytes.max(8) as usize];
    payload[..8].copy_from_slice(&nanos.to_le_bytes());
    payload
}

fn stamp(payload: &[u8]) -> Option<Duration> {
    let nanos = u64::from_le_bytes(payload.get(..8)?.try_into().ok()?);
    (nanos != WARM_UP).then_some(Duration::from_nanos(nanos))
}

/// A call of the schedule: when it was due, begun, answered.
struct Call {
    due: Duration,
    begun: Duration,
    answered: Result<Duration, Refusal>,
}

async fn latency(args: &Args) -> Result<Latencies, Failure> {
    let target = Target::begin(&args.place).await?;
    let queue = target.name("latency");
    let tasks = args.rate * args.seconds;
    let epoch = Instant::now();
    let started = Arc::new(Mutex::new(Vec::with_capacity(tasks as usize)));
    let seen = started.clone();
    let mut crew = Crew::start(&target, &queue, &args.hands, move |payload, _| {
        if let Some(due) = stamp(payload) {
            let late = epoch.elapsed().saturating_sub(due);
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(late);
        }
    })?;
    load::warm_up(&target, &mut crew, stamped(WARM_UP, args.load.kind.payload)).await?;
    let client = target.client()?;
    client.status().await?;
    let bar = load::progress("one after the other", tasks + 1);
    let (answers, mut answered) = mpsc::unbounded_channel();
    let (rate, payload, keys) = (args.rate, args.load.kind.payload, args.load.kind.keys);
    let runtime = tokio::runtime::Handle::current();
    // A thread of its own keeps the schedule: the runtime's timers know only milliseconds.
    let begin = epoch.elapsed() + Duration::from_millis(50);
    let schedule = move || {
        for n in 0..tasks {
            let due = begin + Duration::from_secs_f64(n as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(epoch.elapsed()));
            let (client, queue, answers) = (client.clone(), queue.clone(), answers.clone());
            if answers.is_closed() {
                return;
            }
            runtime.spawn(async move {
                let begun = epoch.elapsed();
                let task = NewTask::new(stamped(due.as_nanos() as u64, payload)).key(load::key(n % keys));
                let answered = client.enqueue(&queue, task).await.map(|_| epoch.elapsed());
                // Nobody listens if the measurement was given up.
                drop(answers.send(Call { due, begun, answered }));
            });
        }
    };
    let schedule = tokio::task::spawn_blocking(schedule);
    let (mut begun, mut accepted) = (Vec::new(), Vec::new());
    while let Some(call) = answered.recv().await {
        begun.push(call.begun.saturating_sub(call.due));
        accepted.push(call.answered?.saturating_sub(call.due));
        bar.inc(1);
    }
    schedule.await.map_err(Failure::new)?;
    crew.finished(&target, tasks + 1, &bar).await?;
    bar.finish_and_clear();
    crew.stop().await?;
    let started = std::mem::take(&mut *started.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(Latencies { begun: Times::new(begun), accepted: Times::new(accepted), started: Times::new(started) })
}

impl Latencies {
    fn rows(&self) -> [(&'static str, &Times); 3] {
        [
            ("submit-to-start", &self.started),
            ("submit-to-accepted", &self.accepted),
            ("due-to-submit", &self.begun),
        ]
    }
}

fn print_json(args: &Args, rates: &[Rates], latencies: Option<&Latencies>) {
    let common = |part: &str| {
        json!({
            "bench": "end-to-end",
            "part": part,
            "payload_bytes": args.load.kind.payload,
            "keys": args.load.kind.keys,
            "workers": args.hands.workers,
            "slots": args.hands.slots,
        })
    };
    for rates in rates {
        let mut row = common(rates.part);
        let more = json!({
            "tasks": args.load.tasks,
            "batch": args.load.batch,
            "calls": args.load.calls,
            "connections": args.load.connections,
            "accepted_seconds": rates.accepted.as_secs_f64(),
            "finished_seconds": rates.finished.as_secs_f64(),
            "accepted_per_second": load::rate(args.load.tasks, rates.accepted),
            "finished_per_second": load::rate(args.load.tasks, rates.finished),
        });
        if let Value::Object(more) = more {
            super::add(&mut row, more);
        }
        println!("{row}");
    }
    for (what, times) in latencies.iter().flat_map(|latencies| latencies.rows()) {
        let mut row = common("latency");
        let more = json!({ "what": what, "rate": args.rate, "seconds": args.seconds, "count": times.len() });
        if let Value::Object(more) = more {
            super::add(&mut row, more);
        }
        super::add(&mut row, times.fields());
        println!("{row}");
    }
}

/// How many times as fast tasks are finished in one part as in another, if both were measured.
fn beside(rates: &[Rates], part: &str, other: &str) -> Option<f64> {
    let took = |part| rates.iter().find(|rates| rates.part == part).map(|rates| rates.finished.as_secs_f64());
    Some(took(other)? / took(part)?)
}

fn print_tables(args: &Args, rates: &[Rates], latencies: Option<&Latencies>) {
    if !rates.is_empty() {
        println!(
            "{} of {} bytes, {} in a call, {} at once, {}; {} of {}",
            of(args.load.tasks, "task"),
            args.load.kind.payload,
            count(args.load.batch),
            of(args.load.calls, "call"),
            of(args.load.kind.keys, "key"),
            of(args.hands.workers.into(), "worker"),
            of(args.hands.slots.into(), "slot"),
        );
        let row = |rates: &Rates| {
            let how = match rates.part {
                "throughput" => "submitted while workers run them",
                "plain" => "the same, ends are not remembered",
                "time" => "as the first, keys share time",
                _ => "all submitted, then run",
            };
            let number = |took| count(load::rate(args.load.tasks, took) as u64);
            vec![how.to_string(), number(rates.accepted), number(rates.finished)]
        };
        let rows: Vec<Vec<String>> = rates.iter().map(row).collect();
        print!("{}", table(&["how", "accepted/s", "finished/s"], &rows));
        if let Some(part) = beside(rates, "throughput", "plain") {
            println!("remembering ends: {:.0}% of the tasks that are finished without", 100.0 * part);
        }
        if let Some(part) = beside(rates, "time", "throughput") {
            println!("sharing time: {:.0}% of the tasks that are finished by tasks", 100.0 * part);
        }
    }
    if let Some(latencies) = latencies {
        if !rates.is_empty() {
            println!();
        }
        println!(
            "{} per second for {} s, from when each was due",
            of(args.rate, "single task"),
            args.seconds
        );
        let row = |(what, times): (&str, &Times)| {
            let what = match what {
                "submit-to-start" => "until it runs",
                "submit-to-accepted" => "until it is accepted",
                _ => "until its call is made (part of both)",
            };
            [what.to_string()].into_iter().chain(times.cells()).collect::<Vec<_>>()
        };
        let rows: Vec<Vec<String>> = latencies.rows().into_iter().map(row).collect();
        let head: Vec<&str> = ["time"].into_iter().chain(HEADINGS).collect();
        print!("{}", table(&head, &rows));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_says_when_it_was_due() {
        assert_eq!(stamp(&stamped(12_345, 200)), Some(Duration::from_nanos(12_345)));
        assert_eq!(stamped(1, 200).len(), 200);
        assert_eq!(stamp(&stamped(7, 0)), Some(Duration::from_nanos(7)));
        assert_eq!(stamp(&stamped(WARM_UP, 8)), None);
        assert_eq!(stamp(b"short"), None);
    }
}
