//! `evenhand bench waits`: what waiting tasks are told, and what then happens, through a real server and worker.
//!
//! Loads are played one after the other, each in a queue of its own. A backlog is submitted while the queue is paused; when
//! it goes on, one of the tasks that wait is asked about again and again, each time another. When a task begins, what was
//! said of it is compared with how long it really waited. In a steady load as many tasks come as begin.
//!
//! A bound counts as broken if the task began later than that, by however little: clocks, commits and a busy machine are
//! part of what a client waits for.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use evenhand::{Client, Limit, NewTask, QueueSettings};
use indicatif::ProgressBar;
use serde_json::json;

use super::load::{self, Crew, Hands};
use super::percentiles::{ms, text};
use super::target::{Room, Target};
use crate::table::{count, of, table};
use crate::{Done, Failure};

/// Durations that tasks name, in milliseconds; classes are the same ones.
const DURATIONS: [u64; 3] = [200, 600, 2_000];
/// Runs take so many in a hundred of the duration that they name: at least, and below.
const USED: (u64, u64) = (10, 90);
const KEYS: u64 = 9;
/// Broken bounds that are shown of each load.
const MISSES: usize = 3;
/// How long nothing may happen before a measurement is given up.
const STALLED: Duration = Duration::from_secs(60);

/// What is measured.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand bench waits
  evenhand bench waits --tasks 1000 --slots 16
  evenhand bench waits --json | jq .

The error of the expected time is that of waits that are longer than ten runs take, in parts of the wait. `evenhand-sim
estimates` measures the same over more loads, in simulated time.")]
pub(crate) struct Args {
    #[command(flatten)]
    room: Room,
    /// Tasks that wait when a load begins
    #[arg(long, default_value_t = 250, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    tasks: u64,
    /// Slots of the worker
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=10_000))]
    slots: u32,
    /// Time from one question to the next, in milliseconds
    #[arg(long, default_value_t = 5, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    every: u64,
    /// How often each load is played
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    rounds: u64,
    /// Print JSON for programs, an object for each load, instead of a table for people
    #[arg(long)]
    json: bool,
}

/// A load.
#[derive(Clone, Copy, Debug)]
struct Load {
    name: &'static str,
    keys: u64,
    classes: bool,
    /// Some tasks name no duration.
    default: bool,
    /// As many more tasks come, each when one begins.
    steady: bool,
}

const LOADS: [Load; 6] = {
    let one = Load { name: "one key, durations", keys: 1, classes: false, default: false, steady: false };
    [
        one,
        Load { name: "one key, 3 classes", classes: true, ..one },
        Load { name: "9 keys, durations", keys: KEYS, ..one },
        Load { name: "9 keys, 3 classes", keys: KEYS, classes: true, ..one },
        Load { name: "9 keys, 3 classes, default tasks", keys: KEYS, classes: true, default: true, ..one },
        Load { name: "steady: one key, 3 classes", classes: true, steady: true, ..one },
    ]
};

/// What a task was told: when, by when it begins, and when it is expected to.
#[derive(Clone, Copy, Debug)]
struct Said {
    at: Instant,
    position: u64,
    upper: Option<Duration>,
    expected: Option<Duration>,
}

/// What came of a load.
#[derive(Debug, Default)]
struct Measured {
    /// Answers about tasks that then began.
    said: u64,
    bounds: u64,
    late: Vec<String>,
    /// Errors of the expected time, in parts of the wait.
    errors: Vec<f64>,
}

impl Measured {
    /// A task began then, of which this had been said.
    fn began(&mut self, said: Said, began: Instant, long: Duration) {
        let Some(wait) = began.checked_duration_since(said.at) else { return };
        self.said += 1;
        if let Some(upper) = said.upper {
            self.bounds += 1;
            if wait > upper {
                let (bound, took, position) = (text(upper), text(wait), said.position);
                self.late.push(format!("position {position}: at most {bound} were said, {took} it was"));
            }
        }
        if let Some(expected) = said.expected.filter(|_| wait > long) {
            self.errors.push(expected.abs_diff(wait).as_secs_f64() / wait.as_secs_f64());
        }
    }

    fn held_percent(&self) -> Option<f64> {
        (self.bounds > 0).then(|| 100.0 * (1.0 - self.late.len() as f64 / self.bounds as f64))
    }

    /// The error that half of the expected times do not exceed, in percent.
    fn median_error_percent(&self) -> Option<f64> {
        let mut errors = self.errors.clone();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).map(|error| 100.0 * error)
    }
}

pub(crate) async fn run(args: Args) -> Done {
    let target = Target::begin(&args.room.clone().into()).await?;
    let tasks: u64 = LOADS.iter().map(|load| all_tasks(&args, *load)).sum();
    let bar = load::progress("beginning", tasks * args.rounds);
    let mut all = Vec::new();
    for (n, load) in LOADS.into_iter().enumerate() {
        let mut measured = Measured::default();
        for round in 0..args.rounds {
            let seed = round * LOADS.len() as u64 + n as u64;
            play(&args, &target, load, seed, &mut measured, &bar).await?;
        }
        all.push((load, measured));
    }
    bar.finish_and_clear();
    match args.json {
        true => print_json(&args, &all),
        false => print_table(&args, &all),
    }
    Ok(ExitCode::SUCCESS)
}

fn all_tasks(args: &Args, load: Load) -> u64 {
    if load.steady { 3 * args.tasks } else { args.tasks }
}

/// Its task of this number, and how long a run of it takes: as the payload says.
fn task(load: Load, seed: u64, number: u64) -> NewTask {
    let chance = |what: u64| load::mixed((seed << 40) + number * 4 + what);
    let named = DURATIONS[(chance(0) % DURATIONS.len() as u64) as usize];
    let is_default = load.default && chance(1).is_multiple_of(4);
    // A default task is told to end when something else needs its class, but never before the shortest.
    let may = if is_default { DURATIONS[0] } else { named };
    let takes = may * (USED.0 + chance(2) % (USED.1 - USED.0)) / 100;
    let task = NewTask::new(takes.to_le_bytes().to_vec()).key(load::key(chance(3) % load.keys));
    if is_default { task } else { task.max_duration(Duration::from_millis(named)) }
}

/// How long a run takes on average, longer than any is: what waits ten times as long waits for others.
fn ten_runs(slots: u32) -> Duration {
    let mean = DURATIONS.iter().sum::<u64>() / DURATIONS.len() as u64 * (USED.0 + USED.1) / 200;
    Duration::from_millis(10 * mean / u64::from(slots))
}

async fn play(
    args: &Args,
    target: &Target,
    load: Load,
    seed: u64,
    sum: &mut Measured,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    let client = target.client()?;
    let queue = target.name(&format!("waits-{seed}"));
    let mut settings = QueueSettings::new().retention(Duration::ZERO);
    if load.classes {
        let limits = [Limit::All, Limit::Percent(60), Limit::Percent(25)];
        settings = settings.classes(DURATIONS.map(Duration::from_millis).into_iter().zip(limits));
    }
    client.set_queue(&queue, settings).await?;
    let begun: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
    let see = {
        let (begun, bar) = (begun.clone(), bar.clone());
        move |payload: &[u8], run: &evenhand::Run| {
            let Ok(takes) = <[u8; 8]>::try_from(payload) else { return Duration::ZERO };
            let mut begun = begun.lock().unwrap_or_else(PoisonError::into_inner);
            // A second run of it, after a downgrade, is not what was estimated.
            begun.entry(run.task_id().to_string()).or_insert_with(Instant::now);
            bar.set_position(bar.position().max(begun.len() as u64));
            Duration::from_millis(u64::from_le_bytes(takes))
        }
    };
    let hands = Hands { workers: 1, slots: args.slots };
    let mut crew = Crew::as_told(target, &queue, &hands, see)?;
    load::warm_up(target, &mut crew, Vec::new()).await?;
    client.pause(&queue).await?;
    let tasks = (0..args.tasks).map(|number| task(load, seed, number)).collect();
    let mut ids = submit(&client, &queue, tasks).await?;
    client.resume(&queue).await?;

    let mut said: Vec<(usize, Said)> = Vec::new();
    let (mut asked, mut seen, mut moved) = (0, 0, Instant::now());
    let mut ticks = tokio::time::interval(Duration::from_millis(args.every));
    loop {
        ticks.tick().await;
        let done = begun.lock().unwrap_or_else(PoisonError::into_inner).len();
        if done as u64 >= all_tasks(args, load) {
            break;
        }
        if done > seen {
            let more = (ids.len() as u64..all_tasks(args, load)).take(done - seen);
            let more: Vec<NewTask> = more.map(|number| task(load, seed, number)).collect();
            if !more.is_empty() {
                ids.extend(submit(&client, &queue, more).await?);
            }
            (seen, moved) = (done, Instant::now());
        }
        if moved.elapsed() > STALLED {
            return Err(Failure::new(format!(
                "{done} of {} have begun, and no more do",
                of(ids.len() as u64, "task")
            )));
        }
        let waiting: Vec<usize> = {
            let begun = begun.lock().unwrap_or_else(PoisonError::into_inner);
            (0..ids.len()).filter(|n| !begun.contains_key(&ids[*n])).collect()
        };
        asked += 1;
        let Some(n) = waiting.get(load::mixed(asked) as usize % waiting.len().max(1)) else { continue };
        // One that has ended meanwhile is not remembered.
        let Ok(task) = client.get(&ids[*n]).await else { continue };
        if let Some(estimate) = task.estimate {
            let [upper, expected] =
                [estimate.upper_ms, estimate.expected_ms].map(|ms| ms.map(Duration::from_millis));
            said.push((*n, Said { at: Instant::now(), position: estimate.position, upper, expected }));
        }
    }
    crew.stop().await?;
    let begun = begun.lock().unwrap_or_else(PoisonError::into_inner);
    for (n, said) in said {
        if let Some(began) = begun.get(&ids[n]) {
            sum.began(said, *began, ten_runs(args.slots));
        }
    }
    Ok(())
}

async fn submit(client: &Client, queue: &str, tasks: Vec<NewTask>) -> Result<Vec<String>, Failure> {
    let accepted = client.enqueue_all(queue, tasks).await?;
    Ok(accepted.tasks().map(|(id, _)| id.to_string()).collect())
}

fn print_json(args: &Args, all: &[(Load, Measured)]) {
    for (load, measured) in all {
        let row = json!({
            "bench": "waits",
            "load": load.name,
            "tasks": all_tasks(args, *load) * args.rounds,
            "slots": args.slots,
            "asked": measured.said,
            "bounds": measured.bounds,
            "late": measured.late.len(),
            "held_percent": measured.held_percent(),
            "median_error_percent": measured.median_error_percent(),
            "long_wait_ms": ms(ten_runs(args.slots)),
            "misses": measured.late,
        });
        println!("{row}");
    }
}

fn print_table(args: &Args, all: &[(Load, Measured)]) {
    let of_runs = DURATIONS.map(|ms| text(Duration::from_millis(ms))).join(", ");
    println!(
        "runs that may take {of_runs} and take {} to {} % of it; {}",
        USED.0,
        USED.1,
        of(args.slots.into(), "slot")
    );
    let percent = |percent: Option<f64>, decimals: usize| {
        percent.map_or_else(|| "-".to_string(), |percent| format!("{percent:.decimals$} %"))
    };
    let mut rows = Vec::new();
    for (load, measured) in all {
        rows.push(vec![
            load.name.to_string(),
            count(measured.said),
            count(measured.bounds),
            count(measured.late.len() as u64),
            percent(measured.held_percent(), 2),
            percent(measured.median_error_percent(), 1),
        ]);
    }
    print!("{}", table(&["load", "asked", "bounds", "late", "held", "median error"], &rows));
    for (load, measured) in all {
        for miss in measured.late.iter().take(MISSES) {
            println!("late in {}: {miss}", load.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_compared_with_what_happened() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let said = Said { at: now, position: 3, upper: Some(second * 4), expected: Some(second * 3) };
        let mut measured = Measured::default();
        measured.began(said, now + second * 4, second);
        assert_eq!((measured.said, measured.bounds, measured.late.len()), (1, 1, 0));
        assert_eq!(measured.median_error_percent(), Some(25.0));
        measured.began(said, now + second * 5, second * 5);
        assert_eq!(measured.late, ["position 3: at most 4000 ms were said, 5000 ms it was"]);
        assert_eq!(measured.held_percent(), Some(50.0));
        assert_eq!(measured.errors.len(), 1, "short waits have no expected time that means something");
        measured.began(said, now - second, second);
        assert_eq!(measured.said, 2, "it had begun when the answer came");
    }

    #[test]
    fn a_load_is_the_same_each_time_and_has_what_it_says() {
        for load in LOADS {
            let tasks: Vec<String> = (0..200).map(|n| format!("{:?}", task(load, 1, n))).collect();
            let again: Vec<String> = (0..200).map(|n| format!("{:?}", task(load, 1, n))).collect();
            assert_eq!(tasks, again);
            let none = tasks.iter().filter(|task| !task.contains("max_duration_ms: Some")).count();
            assert_eq!(none > 0, load.default, "{}", load.name);
        }
    }
}
