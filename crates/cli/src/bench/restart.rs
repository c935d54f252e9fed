//! `evenhand bench restart`: how soon a server that was killed starts tasks again.
//!
//! Tasks are due while the server is away, and their workers live. The server is killed and started again on the same data.
//! It starts nothing until all workers have come back (the start gate), and they come when they dial: real ones after a
//! pause that grows while the server is away. So each crowd is measured twice, with pauses, and with workers that dial as soon
//! as the server listens: bare hellos, the limit beside which the first is shown. Last, one worker does not come back, and
//! the server waits until it cannot be alive any more.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use evenhand::NewTask;
use indicatif::ProgressBar;
use serde_json::json;

use super::crowd::{Crowd, Event, allow_connections};
use super::load;
use super::percentiles::{ms, text};
use super::target::{Room, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure, parse};

/// How long nothing may happen before a measurement is given up.
const STALLED: Duration = Duration::from_secs(120);
/// How often a server is asked what it waits for.
const LOOK: Duration = Duration::from_millis(50);
/// Tasks are due so long after they were submitted: the server is away by then.
const DUE: Duration = Duration::from_millis(500);
/// Tasks that wait when the server is back.
const TASKS: usize = 10;

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench restart
  evenhand bench restart --workers 500 --rounds 10 --away 5s
  evenhand bench restart --missing 0 --json | jq .

All times count from when the server listens again. A worker's pause between two dials begins with 50 ms and doubles up to
2 s, so it depends on --away how long the last one takes.")]
pub(crate) struct Args {
    #[command(flatten)]
    room: Room,
    /// How many workers, all in this process
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,100,2000", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    workers: Vec<u64>,
    /// Workers of which one does not come back; 0: leave that part out
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=10_000))]
    missing: u64,
    /// Restarts of each crowd; the median is shown
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    rounds: u64,
    /// How long the server is away
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    away: Duration,
    /// The server's heartbeat
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    heartbeat: Duration,
    /// The server's lost time, which a missing worker costs; at least twenty heartbeats
    #[arg(long, default_value = "20s", value_name = "TIME", value_parser = parse::duration)]
    lost_after: Duration,
    /// Print JSON for programs, an object for each result, instead of tables for people
    #[arg(long)]
    json: bool,
}

impl Args {
    async fn target(&self) -> Result<Target, Failure> {
        let ms = |time: Duration| format!("{}ms", time.as_millis());
        let unhealthy = ms(self.heartbeat * 5);
        let (heartbeat, lost) = (ms(self.heartbeat), ms(self.lost_after));
        let args = ["--heartbeat", &heartbeat, "--unhealthy-after", &unhealthy, "--lost-after", &lost];
        Target::begin_with(&self.room.clone().into(), args.map(str::to_string).to_vec()).await
    }
}

/// One restart, in times since the server listened.
#[derive(Clone, Copy, Debug, Default)]
struct Restart {
    /// From its start until it listened: not counted in the others.
    opening: Duration,
    /// When the worker dialed that came back last.
    last_dial: Duration,
    /// When that one was let in.
    all_back: Duration,
    first_task: Duration,
}

/// A crowd's restarts, with and without pauses.
struct Measured {
    workers: u64,
    paused: Restart,
    bare: Restart,
}

/// One that did not come back.
struct Missing {
    reason: String,
    restart: Restart,
}

pub(crate) async fn run(args: Args) -> Done {
    if args.away < DUE || args.lost_after < args.heartbeat * 20 || args.away * 2 > args.lost_after {
        let text =
            "--away must be at least 500ms, --lost-after at least 20 heartbeats and twice --away".into();
        return Err(Failure { text, exit: 2 });
    }
    let most = args.workers.iter().copied().chain([args.missing]).max().unwrap_or(1);
    allow_connections(most as usize)?;
    let steps = args.workers.len() as u64 * 2 * args.rounds + u64::from(args.missing > 1);
    let bar = load::progress("restarts", steps);
    let mut all = Vec::new();
    for &workers in &args.workers {
        let paused = restarts(&args, workers, false, &bar).await?;
        let bare = restarts(&args, workers, true, &bar).await?;
        all.push(Measured { workers, paused, bare });
    }
    let missing = match args.missing {
        0 | 1 => None,
        workers => Some(one_missing(&args, workers, &bar).await?),
    };
    bar.finish_and_clear();
    match args.json {
        true => print_json(&args, &all, missing.as_ref()),
        false => print_tables(&args, &all, missing.as_ref()),
    }
    Ok(ExitCode::SUCCESS)
}

async fn restarts(args: &Args, workers: u64, at_once: bool, bar: &ProgressBar) -> Result<Restart, Failure> {
    let mut target = args.target().await?;
    let queue = target.name("restart");
    let mut crowd = Crowd::start(&target, &queue, workers as usize, at_once);
    let mut all = Vec::new();
    for _ in 0..args.rounds {
        all.push(restart(args, &mut target, &queue, &mut crowd, workers as usize).await?);
        bar.inc(1);
    }
    let median = |of: fn(&Restart) -> Duration| {
        let mut times: Vec<Duration> = all.iter().map(of).collect();
        times.sort_unstable();
        times[times.len() / 2]
    };
    Ok(Restart {
        opening: median(|restart| restart.opening),
        last_dial: median(|restart| restart.last_dial),
        all_back: median(|restart| restart.all_back),
        first_task: median(|restart| restart.first_task),
    })
}

async fn restart(
    args: &Args,
    target: &mut Target,
    queue: &str,
    crowd: &mut Crowd,
    workers: usize,
) -> Result<Restart, Failure> {
    await_crowd(args, target, crowd, workers).await?;
    let epoch = go_away(args, target, queue, crowd).await?;
    let began = Instant::now();
    target.start_again().await?;
    let listens = Instant::now();
    crowd.there.send_replace(true);
    let (back, first) = returned(crowd, epoch, workers, true).await?;
    let last = back.values().max_by_key(|(_, at)| *at).copied().unwrap_or((listens, listens));
    Ok(Restart {
        opening: listens - began,
        last_dial: last.0.saturating_duration_since(listens),
        all_back: last.1.saturating_duration_since(listens),
        first_task: first.unwrap_or(listens).saturating_duration_since(listens),
    })
}

async fn one_missing(args: &Args, workers: u64, bar: &ProgressBar) -> Result<Missing, Failure> {
    let mut target = args.target().await?;
    let queue = target.name("missing");
    let mut crowd = Crowd::start(&target, &queue, workers as usize, true);
    await_crowd(args, &target, &mut crowd, workers as usize).await?;
    let epoch = go_away(args, &mut target, &queue, &mut crowd).await?;
    crowd.vanish(0);
    let began = Instant::now();
    target.start_again().await?;
    let listens = Instant::now();
    crowd.there.send_replace(true);
    returned(&mut crowd, epoch, workers as usize - 1, false).await?;
    let all_back = listens.elapsed();
    let client = target.client()?;
    let reason = loop {
        let shards = client.status().await?.shards;
        let waits_for = shards.into_iter().next().map(|shard| shard.waits_for).unwrap_or_default();
        if waits_for.starts_with("waiting for 1 of ") || listens.elapsed() > args.lost_after {
            break waits_for;
        }
        tokio::time::sleep(LOOK).await;
    };
    let (_, first) = returned(&mut crowd, epoch, 0, true).await?;
    bar.inc(1);
    let first_task = first.unwrap_or(listens) - listens;
    Ok(Missing {
        reason,
        restart: Restart { opening: listens - began, last_dial: Duration::ZERO, all_back, first_task },
    })
}

/// Waits until all get work and know each other: as a server's workers do that has run for a while.
async fn await_crowd(args: &Args, target: &Target, crowd: &mut Crowd, workers: usize) -> Result<(), Failure> {
    let client = target.client()?;
    let began = Instant::now();
    loop {
        if let Some(failure) = crowd.failed() {
            return Err(failure);
        }
        let ready = client.workers().await?.iter().filter(|worker| worker.why_not.is_empty()).count();
        if ready == workers {
            break;
        }
        if began.elapsed() > STALLED {
            return Err(Failure::new(format!(
                "{ready} of {workers} workers get work after {} s",
                STALLED.as_secs()
            )));
        }
        tokio::time::sleep(LOOK * 4).await;
    }
    // Two heartbeats later each has shown that it knows the last that joined.
    tokio::time::sleep(args.heartbeat * 2).await;
    Ok(())
}

/// Kills the server, with tasks that are due before it is back. The epoch that it had.
async fn go_away(args: &Args, target: &mut Target, queue: &str, crowd: &mut Crowd) -> Result<u64, Failure> {
    let client = target.client()?;
    let epoch = client.status().await?.shards.first().map_or(0, |shard| shard.epoch);
    let task = || NewTask::new(bytes::Bytes::new()).delay(DUE);
    client.enqueue_all(queue, (0..TASKS).map(|_| task()).collect()).await?;
    crowd.there.send_replace(false);
    target.kill();
    tokio::time::sleep(args.away).await;
    while crowd.events.try_recv().is_ok() {}
    Ok(epoch)
}

/// When each worker dialed and was let in after a restart, and when the first task began. Waits for so many workers, and
/// for a task if it is told to.
async fn returned(
    crowd: &mut Crowd,
    epoch: u64,
    workers: usize,
    task: bool,
) -> Result<(BTreeMap<usize, (Instant, Instant)>, Option<Instant>), Failure> {
    let (mut back, mut first) = (BTreeMap::new(), None);
    while back.len() < workers || task && first.is_none() {
        let event = tokio::time::timeout(STALLED, crowd.events.recv()).await;
        match event.map_err(|_| Failure::new("nothing happens any more after a restart"))? {
            Some(Event::Welcomed { worker, epoch: of, dialed, at }) if of > epoch => {
                back.entry(worker).or_insert((dialed, at));
            }
            Some(Event::Began { at }) => first = first.or(Some(at)),
            Some(Event::Welcomed { .. }) => {}
            None => return Err(Failure::new("the workers are gone")),
        }
    }
    Ok((back, first))
}

/// How many times one time is another.
fn beside(time: Duration, limit: Duration) -> f64 {
    time.as_secs_f64() / limit.as_secs_f64().max(1e-6)
}

fn print_json(args: &Args, all: &[Measured], missing: Option<&Missing>) {
    for Measured { workers, paused, bare } in all {
        for (dial, restart) in [("paused", paused), ("at_once", bare)] {
            let row = json!({
                "bench": "restart",
                "part": "all_back",
                "workers": workers,
                "dial": dial,
                "rounds": args.rounds,
                "away_ms": ms(args.away),
                "opening_ms": ms(restart.opening),
                "last_dial_ms": ms(restart.last_dial),
                "all_back_ms": ms(restart.all_back),
                "first_task_ms": ms(restart.first_task),
                "beside_heartbeat": beside(restart.first_task, args.heartbeat),
                "beside_bare_hellos": beside(restart.first_task, bare.all_back),
            });
            println!("{row}");
        }
    }
    if let Some(Missing { reason, restart }) = missing {
        let row = json!({
            "bench": "restart",
            "part": "missing",
            "workers": args.missing,
            "waits_for": reason,
            "all_others_back_ms": ms(restart.all_back),
            "first_task_ms": ms(restart.first_task),
            "lost_after_ms": ms(args.lost_after),
            "beside_lost_after": beside(restart.first_task, args.lost_after),
        });
        println!("{row}");
    }
}

fn print_tables(args: &Args, all: &[Measured], missing: Option<&Missing>) {
    if !all.is_empty() {
        println!(
            "A server is killed and back after {}; times since it listens again, the median of {}",
            text(args.away),
            of(args.rounds, "restart")
        );
        let row = |workers: u64, dial: &str, restart: &Restart, bare: &Restart| {
            vec![
                count(workers),
                dial.to_string(),
                text(restart.opening),
                text(restart.last_dial),
                text(restart.all_back),
                text(restart.first_task),
                format!("{:.2}", beside(restart.first_task, args.heartbeat)),
                format!("{:.1}", beside(restart.first_task, bare.all_back)),
            ]
        };
        let rows: Vec<Vec<String>> = all
            .iter()
            .flat_map(|Measured { workers, paused, bare }| {
                [row(*workers, "after pauses", paused, bare), row(*workers, "at once", bare, bare)]
            })
            .collect();
        let head = [
            "workers",
            "dial",
            "opening",
            "last dial",
            "all back",
            "first task",
            "/ heartbeat",
            "/ bare hellos",
        ];
        print!("{}", table(&head, &rows));
        for Measured { workers, paused, .. } in all {
            let part = 100.0 * beside(paused.last_dial, paused.first_task);
            println!(
                "{}: {part:.0}% of the time until the first task is the last one's pause between two dials",
                of(*workers, "worker")
            );
        }
    }
    if let Some(Missing { reason, restart }) = missing {
        println!("\n{}, one of which does not come back: status says", of(args.missing, "worker"));
        println!("  {reason}");
        println!(
            "first task after {:.1} s, {:.2} of the lost time of {} s",
            restart.first_task.as_secs_f64(),
            beside(restart.first_task, args.lost_after),
            args.lost_after.as_secs()
        );
    }
}
