//! `peers`: Evenhand as a server beside its own store and beside beanstalkd, in one run on one machine.
//!
//! 1. [`evenhand`]: `evenhand bench end-to-end`, a program of its own, with its server, client and workers.
//! 2. [`beanstalk`]: beanstalkd's protocol. [`daemon`]: a beanstalkd to measure. [`loads`]: what is done to it, and
//!    [`times`] how long that took.
//!
//! They take turns, round by round, and it is their rounds that are compared: disks and neighbours are never quiet.
//! All data is on the same disk. What beanstalkd does by default is no durability: it is there to show its price.

mod beanstalk;
mod daemon;
mod evenhand;
mod loads;
mod times;

use std::path::Path;
use std::time::Duration;

use crate::Failure;
use crate::cli::PeersArgs;
use crate::measure::median;
use crate::report::{Aims, Report, Value};
use crate::store;
use daemon::{Daemon, Syncs};
use evenhand::Speed;
use loads::{Throughput, Way};

/// How long tasks waited, in milliseconds, and how many had not begun when the time was over.
#[derive(Clone, Copy, Debug)]
struct Percentiles {
    p50_ms: f64,
    p99_ms: f64,
    p999_ms: f64,
    max_ms: f64,
    missing: u64,
}

/// All of them in one round.
#[derive(Clone, Debug)]
struct Round {
    store: Throughput,
    evenhand: Speed,
    each: Throughput,
    sometimes: Throughput,
    /// For each rate.
    latencies: Vec<Latencies>,
}

/// How soon tasks ran, at one rate.
#[derive(Clone, Copy, Debug)]
struct Latencies {
    evenhand: Percentiles,
    each: Percentiles,
    sometimes: Percentiles,
}

type Whose = fn(&Latencies) -> Percentiles;

/// Whether all that is to be measured is there. Better known now than after some minutes.
pub(crate) fn ready(args: &PeersArgs) -> Result<(), Failure> {
    evenhand::ready(args)?;
    Daemon::ready(&args.beanstalkd)
}

/// Measures all of them.
pub(crate) fn run(args: &PeersArgs, show: impl Fn(Report)) -> Result<(), Failure> {
    ready(args)?;
    std::fs::create_dir_all(&args.dir).map_err(|error| format!("{}: {error}", args.dir.display()))?;
    let scratch = tempfile::Builder::new().prefix("evenhand-peers-").tempdir_in(&args.dir);
    let scratch = scratch.map_err(|error| format!("{}: {error}", args.dir.display()))?;
    let mut rounds = Vec::new();
    for n in 1..=args.rounds {
        eprintln!("peers: round {n} of {}", args.rounds);
        rounds.push(round(args, scratch.path())?);
    }
    show(speeds(args, &rounds));
    show(latencies(args, &rounds));
    show(ratios(args, &rounds));
    show(aims(args, &rounds));
    Ok(())
}

fn round(args: &PeersArgs, dir: &Path) -> Result<Round, Failure> {
    let (accept, finish) =
        store::alone(&dir.join("store"), args.keys as usize, args.payload as usize, args.tasks)?;
    let store = Throughput { accepted_per_second: accept, finished_per_second: finish };
    let evenhand = evenhand::speed(args, dir)?;
    eprintln!(
        "peers: evenhand: {:.0} tasks/s finished; {:.0} accepted alone, {:.0} finished alone",
        evenhand.together.finished_per_second,
        evenhand.apart.accepted_per_second,
        evenhand.apart.finished_per_second,
    );
    let each = best(args, dir, Syncs::Each)?;
    let sometimes = best(args, dir, Syncs::Sometimes)?;
    let mut latencies = Vec::new();
    for &rate in &args.rates {
        let told = |who: &str, times: Percentiles| {
            let late = if times.missing > 0 { "; it does not keep up" } else { "" };
            eprintln!(
                "peers: {who}: {rate}/s, until a task runs: p50 {:.2} ms, p99 {:.2} ms{late}",
                times.p50_ms, times.p99_ms
            );
            times
        };
        latencies.push(Latencies {
            evenhand: told("evenhand", evenhand::latency(args, dir, rate)?),
            each: told(Syncs::Each.name(), latency(args, dir, Syncs::Each, rate)?),
            sometimes: told(Syncs::Sometimes.name(), latency(args, dir, Syncs::Sometimes, rate)?),
        });
    }
    Ok(Round { store, evenhand, each, sometimes, latencies })
}

/// Hands a new beanstalkd to somebody; its data is removed afterwards.
fn with_beanstalkd<T>(
    args: &PeersArgs,
    dir: &Path,
    syncs: Syncs,
    what: impl FnOnce(&Daemon) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let data =
        tempfile::Builder::new().prefix("beanstalkd-").tempdir_in(dir).map_err(|error| error.to_string())?;
    let daemon = Daemon::start(&args.beanstalkd, data.path(), syncs)?;
    what(&daemon)
}

fn way(args: &PeersArgs, connections: u64) -> Way {
    Way { connections, pipeline: args.pipeline, payload: args.payload as usize }
}

/// What beanstalkd does with as many connections as suit it best.
fn best(args: &PeersArgs, dir: &Path, syncs: Syncs) -> Result<Throughput, Failure> {
    let mut best: Option<Throughput> = None;
    for &connections in &args.connections {
        let at_most = Duration::from_secs(args.seconds);
        let done = with_beanstalkd(args, dir, syncs, |daemon| {
            loads::throughput(daemon, &way(args, connections), args.tasks, at_most)
        })?;
        let finished = done.finished_per_second;
        eprintln!(
            "peers: {}: {finished:.0} tasks/s finished with {connections} + {connections} connections",
            syncs.name()
        );
        best = best.filter(|best| best.finished_per_second >= finished).or(Some(done));
    }
    best.ok_or_else(|| "no number of connections was given".into())
}

fn latency(args: &PeersArgs, dir: &Path, syncs: Syncs, rate: u64) -> Result<Percentiles, Failure> {
    let connections = args.connections.iter().copied().max().unwrap_or(1);
    let latency = with_beanstalkd(args, dir, syncs, |daemon| {
        loads::latency(daemon, &way(args, connections), rate, args.seconds)
    })?;
    let times = latency.started;
    Ok(Percentiles {
        p50_ms: times.ms(500),
        p99_ms: times.ms(990),
        p999_ms: times.ms(999),
        max_ms: times.ms(1_000),
        missing: latency.missing,
    })
}

fn over(rounds: &[Round], of: impl Fn(&Round) -> f64) -> f64 {
    median(rounds.iter().map(of).collect())
}

/// The least and the most of them.
fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, 0.0), |(low, high), value| (f64::min(low, value), f64::max(high, value)))
}

fn speeds(args: &PeersArgs, rounds: &[Round]) -> Report {
    let mut report = Report::new(
        "peers",
        &format!(
            "Tasks per second: payloads of {} bytes, {} keys, {} tasks (beanstalkd: at most what it takes in {} s),\n\
             medians of {} rounds. `together`: tasks come in while others are finished, in batches of {} by {} calls\n\
             at once; at beanstalkd by {:?} connections that put and as many that reserve and delete, {} in one\n\
             write, and the best of them counts. `apart`: all are accepted, then all are finished. All syncs are on,\n\
             but beanstalkd's by default: it syncs every 50 ms, and has answered before.",
            args.payload,
            args.keys,
            args.tasks,
            args.seconds,
            rounds.len(),
            args.batch,
            args.calls,
            args.connections,
            args.pipeline,
        ),
        &[
            ("who", "who"),
            ("how", "how"),
            ("accepted_per_second", "accepted/s"),
            ("finished_per_second", "finished/s"),
            ("finished_lowest", "lowest"),
            ("finished_highest", "highest"),
        ],
    );
    let mut row = |who: &str, how: &str, of: fn(&Round) -> Throughput| {
        let (low, high) = ends(rounds.iter().map(|round| of(round).finished_per_second));
        report.row(vec![
            Value::text(who),
            Value::text(how),
            Value::Number(over(rounds, |round| of(round).accepted_per_second), 0),
            Value::Number(over(rounds, |round| of(round).finished_per_second), 0),
            Value::Number(low, 0),
            Value::Number(high, 0),
        ]);
    };
    row("the embedded store alone", "apart", |round| round.store);
    row("evenhand", "apart", |round| round.evenhand.apart);
    row("evenhand", "together", |round| round.evenhand.together);
    row(Syncs::Each.name(), "together", |round| round.each);
    row(Syncs::Sometimes.name(), "together", |round| round.sometimes);
    report
}

fn latencies(args: &PeersArgs, rounds: &[Round]) -> Report {
    let mut report = Report::new(
        "peers_latency",
        &format!(
            "From when a single task was due to be submitted until it runs, in milliseconds, for {} s: medians of\n\
             {} rounds. Who does not keep up is later and later; what had not begun when as much time again was\n\
             over (`missing`) counts as late as it was then.",
            args.seconds,
            rounds.len(),
        ),
        &[
            ("tasks_per_second", "tasks/s"),
            ("who", "who"),
            ("p50_ms", "p50"),
            ("p99_ms", "p99"),
            ("p999_ms", "p99.9"),
            ("max_ms", "longest"),
            ("missing", "missing"),
        ],
    );
    let who: [(&str, Whose); 3] = [
        ("evenhand", |at| at.evenhand),
        (Syncs::Each.name(), |at| at.each),
        (Syncs::Sometimes.name(), |at| at.sometimes),
    ];
    for (n, &rate) in args.rates.iter().enumerate() {
        for (who, of) in who {
            let part = |part: fn(&Percentiles) -> f64| over(rounds, |round| part(&of(&round.latencies[n])));
            report.row(vec![
                Value::Count(rate),
                Value::text(who),
                Value::Number(part(|times| times.p50_ms), 2),
                Value::Number(part(|times| times.p99_ms), 2),
                Value::Number(part(|times| times.p999_ms), 2),
                Value::Number(part(|times| times.max_ms), 2),
                Value::Number(part(|times| times.missing as f64), 0),
            ]);
        }
    }
    report
}

/// What is compared: Evenhand's number as a part of another's.
struct Part {
    what: String,
    /// In each round.
    parts: Vec<f64>,
    aim: Aim,
}

/// What is aimed at, in percent.
#[derive(Clone, Copy)]
enum Aim {
    AtLeast(f64),
    /// The same, but nobody promised it.
    Stretch(f64),
    AtMost(f64),
    None,
}

fn parts(args: &PeersArgs, rounds: &[Round]) -> Vec<Part> {
    let part = |what: &str, aim: Aim, of: &dyn Fn(&Round) -> f64| {
        let parts = rounds.iter().map(of).collect();
        Part { what: what.into(), parts, aim }
    };
    let mut all = vec![
        part("accepted/s alone, of the store's", Aim::AtLeast(50.0), &|round| {
            round.evenhand.apart.accepted_per_second / round.store.accepted_per_second
        }),
        part("finished/s alone, of the store's", Aim::AtLeast(50.0), &|round| {
            round.evenhand.apart.finished_per_second / round.store.finished_per_second
        }),
        part("finished/s together, of beanstalkd -f0", Aim::Stretch(1_000.0), &|round| {
            round.evenhand.together.finished_per_second / round.each.finished_per_second
        }),
        part("finished/s together, of beanstalkd by default", Aim::Stretch(150.0), &|round| {
            round.evenhand.together.finished_per_second / round.sometimes.finished_per_second
        }),
    ];
    for (n, rate) in args.rates.iter().enumerate() {
        let mut times = |whose: &str, aim: Aim, of: Whose| {
            let ratio = |round: &Round, part: fn(Percentiles) -> f64| {
                let at = &round.latencies[n];
                part(at.evenhand) / part(of(at))
            };
            let what = |p: &str| format!("{p} until a task runs at {rate}/s, of beanstalkd {whose}");
            all.push(part(&what("p50"), aim, &|round| ratio(round, |times| times.p50_ms)));
            all.push(part(&what("p99"), aim, &|round| ratio(round, |times| times.p99_ms)));
        };
        times("-f0", Aim::AtMost(300.0), |at| at.each);
        times("by default", Aim::None, |at| at.sometimes);
    }
    all
}

fn ratios(args: &PeersArgs, rounds: &[Round]) -> Report {
    let mut report = Report::new(
        "peers_ratio",
        "Evenhand's number as a part of the other's: the median of the rounds' own ratios, the lowest, the highest.",
        &[("what", "what"), ("ratio", "ratio"), ("lowest", "lowest"), ("highest", "highest")],
    );
    for part in parts(args, rounds) {
        let (low, high) = ends(part.parts.iter().copied());
        let number = |ratio: f64| Value::Number(ratio, 3);
        report.row(vec![Value::text(part.what), number(median(part.parts)), number(low), number(high)]);
    }
    report
}

fn aims(args: &PeersArgs, rounds: &[Round]) -> Report {
    let mut aims = Aims::new("Aims for the server, in percent of the other");
    for Part { what, parts, aim } in parts(args, rounds) {
        let percent = 100.0 * median(parts);
        match aim {
            Aim::AtLeast(aim) => aims.at_least(&format!("{what}, at least"), aim, percent, 0),
            Aim::Stretch(aim) => aims.at_least(&format!("{what}, at least (a stretch)"), aim, percent, 0),
            Aim::AtMost(aim) => aims.at_most(&format!("{what}, at most"), aim, percent, 0),
            Aim::None => {}
        }
    }
    aims.report()
}
