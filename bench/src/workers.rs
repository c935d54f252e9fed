//! `workers`: what it costs to find out who requires whom, with ten times and a hundred times the workers. One of them is
//! new; the others have shown sets of all ages, as workers do whose heartbeats come at different times. Beside it, in
//! the same run: to look at everybody once.

use std::hint::black_box;
use std::time::{Duration, Instant};

use evenhand_core::canary::Canary;
use evenhand_core::names::{Epoch, Incarnation, Life, Seat, WorkerId, WorkerSetId};
use evenhand_core::owner::worker_set::{WorkerSet, agree};

use crate::Failure;
use crate::report::{Report, Value};
use crate::rng::Rng;

const CROWDS: [u64; 3] = [100, 1_000, 10_000];
const ROUNDS: usize = 31;

/// Measures all crowds.
pub(crate) fn run(show: impl Fn(Report)) -> Result<(), Failure> {
    let mut report = Report::new(
        "workers",
        "Worker sets: a heartbeat that shows another set, a pass that finds out who requires whom, a start gate that\n\
         asks whether all agree. `x look` compares the pass with one look at every worker.",
        &[
            ("workers", "workers"),
            ("ns_per_heartbeat", "ns per heartbeat"),
            ("us_per_pass", "us per pass"),
            ("us_per_look", "us per look"),
            ("times_a_look", "x look"),
            ("us_to_agree", "us to agree"),
        ],
    );
    for workers in CROWDS {
        let (beat, pass, look, agreed) = play(workers)?;
        let us = |time: Duration| time.as_nanos() as f64 / 1_000.0;
        report.row(vec![
            Value::Count(workers),
            Value::Number(beat.as_nanos() as f64 / workers as f64, 0),
            Value::Number(us(pass), 0),
            Value::Number(us(look), 1),
            Value::Number(us(pass) / us(look), 1),
            Value::Number(us(agreed), 0),
        ]);
    }
    show(report);
    Ok(())
}

fn timed<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let value = what();
    (value, start.elapsed())
}

/// The medians of: all heartbeats, a pass, a look, an agreement.
fn play(workers: u64) -> Result<(Duration, Duration, Duration, Duration), Failure> {
    let mut rng = Rng::new(workers);
    let incarnation = Incarnation { epoch: Epoch(1), nonce: 1 };
    let seats: Result<Vec<Seat>, _> = (0..workers).map(|n| Seat::new(&format!("worker-{n}"))).collect();
    let seats = seats.map_err(|refusal| refusal.to_string())?;
    let (life, mut times) = (Life { process: 1, rejoin: 0 }, [const { Vec::new() }; 4]);
    for _ in 0..ROUNDS {
        let mut set = WorkerSet::new(incarnation, Canary::default());
        let mut shown: Vec<WorkerSetId> = Vec::new();
        for (n, seat) in (0..workers).zip(&seats) {
            set.join(WorkerId(n), seat, life);
            shown.push(set.id());
        }
        // What each has shown is between its own join and now.
        let known: Vec<WorkerSetId> =
            (0..workers).map(|n| shown[(n + rng.below(workers - n)) as usize]).collect();
        let (_, beat) = timed(|| {
            for (n, id) in (0..workers).zip(&known) {
                set.heard(WorkerId(n), Some(*id));
            }
        });
        let (_, pass) = timed(|| set.propagate(|_| false));
        let (_, look) = timed(|| (0..workers).filter(|n| black_box(&set).contains(WorkerId(*n))).count());
        let now = set.id();
        let (all, agreed) = timed(|| agree(seats.iter().map(|seat| (seat, life, Some(now)))));
        if !all {
            return Err("workers that name the same set do not agree on it".into());
        }
        for (times, time) in times.iter_mut().zip([beat, pass, look, agreed]) {
            times.push(time);
        }
    }
    let [beat, pass, look, agreed] = times.map(|mut times| {
        times.sort_unstable();
        times[ROUNDS / 2]
    });
    Ok((beat, pass, look, agreed))
}
