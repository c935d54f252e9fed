//! What is done to a server while it is measured: calls that submit tasks, and workers whose handlers do nothing.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use evenhand::{Client, NewTask, Run, Worker, WorkerError};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::percentiles::Times;
use super::target::Target;
use crate::{Failure, worker};

/// How often it is looked whether all tasks have ended.
const LOOK: Duration = Duration::from_millis(2);
/// How long nothing may happen before a measurement is given up.
const STALLED: Duration = Duration::from_secs(60);

/// What every task makes.
const RESULT: [u8; 100] = [b'.'; 100];

/// Which tasks, and how they are submitted.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Load {
    /// How many tasks
    #[arg(long, default_value_t = 200_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub(crate) tasks: u64,
    /// Tasks in one call
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) batch: u64,
    /// Calls on their way at once
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) calls: u64,
    /// Connections that the calls share
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub(crate) connections: u64,
    #[command(flatten)]
    pub(crate) kind: Kind,
}

/// What a task is like.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Kind {
    /// Bytes of a task's payload
    #[arg(long, default_value_t = 200, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(0..=1_048_576))]
    pub(crate) payload: u64,
    /// Keys that the tasks are charged to, in no order
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) keys: u64,
}

impl Kind {
    /// The task of this number; the same in every run.
    fn task(&self, number: u64, payload: &bytes::Bytes) -> NewTask {
        NewTask::new(payload.clone()).key(key(mixed(number) % self.keys))
    }
}

/// A key by its number.
pub(crate) fn key(number: u64) -> String {
    format!("tenant-{number:06}")
}

/// A number that looks like none in particular (SplitMix64).
pub(crate) fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What came of submitting.
#[derive(Debug)]
pub(crate) struct Accepted {
    /// From the first call to the last answer.
    pub(crate) took: Duration,
    /// Of each call.
    pub(crate) calls: Times,
}

/// Submits all tasks and returns when all are accepted.
pub(crate) async fn submit(
    target: &Target,
    queue: &str,
    load: &Load,
    bar: &ProgressBar,
) -> Result<Accepted, Failure> {
    let clients =
        (0..load.connections.min(load.calls)).map(|_| target.client()).collect::<Result<Vec<_>, _>>()?;
    for client in &clients {
        client.status().await?;
    }
    let payload = bytes::Bytes::from(vec![0xa5; load.kind.payload as usize]);
    let next = Arc::new(AtomicU64::new(0));
    let mut callers = JoinSet::new();
    let began = Instant::now();
    for caller in 0..load.calls {
        let client = clients[(caller % clients.len() as u64) as usize].clone();
        let (queue, load, payload, next, bar) =
            (queue.to_string(), load.clone(), payload.clone(), next.clone(), bar.clone());
        callers.spawn(async move {
            let mut times = Vec::new();
            loop {
                let first = next.fetch_add(load.batch, Ordering::Relaxed);
                if first >= load.tasks {
                    return Ok::<_, Failure>(times);
                }
                let numbers = first..load.tasks.min(first + load.batch);
                let many = numbers.end - numbers.start;
                let tasks = numbers.map(|number| load.kind.task(number, &payload)).collect();
                let began = Instant::now();
                client.enqueue_all(&queue, tasks).await?;
                times.push(began.elapsed());
                bar.inc(many);
            }
        });
    }
    let mut times = Vec::new();
    while let Some(caller) = callers.join_next().await {
        times.extend(caller.map_err(Failure::new)??);
    }
    Ok(Accepted { took: began.elapsed(), calls: Times::new(times) })
}

/// How many workers, and how large.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Hands {
    /// Workers, all in this process
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) workers: u32,
    /// Slots of each worker
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) slots: u32,
}

/// Workers at work.
#[derive(Debug)]
pub(crate) struct Crew {
    client: Client,
    queue: String,
    drain: watch::Sender<bool>,
    running: JoinSet<Result<(), WorkerError>>,
    begun: Arc<AtomicU64>,
    first: Arc<OnceLock<Instant>>,
}

impl Crew {
    /// Starts workers of a queue. Each task's payload and run are shown to `see`, and then the task succeeds.
    pub(crate) fn start(
        target: &Target,
        queue: &str,
        hands: &Hands,
        see: impl Fn(&[u8], &Run) + Send + Sync + 'static,
    ) -> Result<Crew, Failure> {
        Crew::that_takes(Duration::ZERO, target, queue, hands, see)
    }

    /// The same, and every task takes so long.
    pub(crate) fn that_takes(
        time: Duration,
        target: &Target,
        queue: &str,
        hands: &Hands,
        see: impl Fn(&[u8], &Run) + Send + Sync + 'static,
    ) -> Result<Crew, Failure> {
        Crew::as_told(target, queue, hands, move |payload, run| {
            see(payload, run);
            time
        })
    }

    /// The same, and `see` says how long each task takes.
    pub(crate) fn as_told(
        target: &Target,
        queue: &str,
        hands: &Hands,
        see: impl Fn(&[u8], &Run) -> Duration + Send + Sync + 'static,
    ) -> Result<Crew, Failure> {
        let (drain, draining) = watch::channel(false);
        let (begun, first) = (Arc::new(AtomicU64::new(0)), Arc::new(OnceLock::new()));
        let see = Arc::new(see);
        let mut running = JoinSet::new();
        for n in 0..hands.workers {
            let (see, begun, first) = (see.clone(), begun.clone(), first.clone());
            let worker = Worker::new(target.url())
                .seat(target.name(&format!("{n}")))
                .seat_dir(target.seats())
                .slots(hands.slots)
                .drain_on(draining.clone())
                .handle_bytes(queue, move |payload, run| {
                    first.get_or_init(Instant::now);
                    let time = see(&payload, &run);
                    begun.fetch_add(1, Ordering::Relaxed);
                    async move {
                        if !time.is_zero() {
                            tokio::time::sleep(time).await;
                        }
                        Ok(bytes::Bytes::from_static(&RESULT))
                    }
                });
            running.spawn(worker.run());
        }
        Ok(Crew { client: target.client()?, queue: queue.into(), drain, running, begun, first })
    }

    /// Counts the tasks that have begun.
    pub(crate) fn counter(&self) -> Arc<AtomicU64> {
        self.begun.clone()
    }

    /// When the first task began.
    pub(crate) fn first(&self) -> Option<Instant> {
        self.first.get().copied()
    }

    /// Waits until the server has counted so many tasks of the queue as succeeded and all of that is durable;
    /// when that was.
    pub(crate) async fn finished(
        &mut self,
        target: &Target,
        tasks: u64,
        bar: &ProgressBar,
    ) -> Result<Instant, Failure> {
        let (mut seen, mut moved) = (0, Instant::now());
        loop {
            if let Some(ended) = self.running.try_join_next() {
                return Err(ended_early(ended.map_err(Failure::new)?));
            }
            // The server is asked only when it may be so: asking costs it time.
            let begun = self.begun.load(Ordering::Relaxed);
            bar.set_position(begun.min(tasks));
            if begun >= tasks && self.succeeded().await? >= tasks {
                break;
            }
            if begun != seen {
                (seen, moved) = (begun, Instant::now());
            }
            if moved.elapsed() > STALLED {
                let seconds = STALLED.as_secs();
                return Err(Failure::new(format!(
                    "no task has begun for {seconds} s; {begun} of {tasks} have"
                )));
            }
            tokio::time::sleep(LOOK).await;
        }
        // What the server counts, it may be about to save. Saves happen in order: when this one is answered,
        // those before it are durable.
        let last = self.client.enqueue(&target.name("last"), NewTask::new(bytes::Bytes::new())).await?;
        let now = Instant::now();
        self.client.cancel(&last).await?;
        Ok(now)
    }

    async fn succeeded(&self) -> Result<u64, Failure> {
        let queues = self.client.queues().await?;
        Ok(queues.iter().find(|queue| queue.name == self.queue).map_or(0, |queue| queue.succeeded))
    }

    /// Drains the workers.
    pub(crate) async fn stop(mut self) -> Result<(), Failure> {
        let _ = self.drain.send(true);
        while let Some(ended) = self.running.join_next().await {
            ended.map_err(Failure::new)?.map_err(worker::failure)?;
        }
        Ok(())
    }
}

fn ended_early(ended: Result<(), WorkerError>) -> Failure {
    match ended {
        Ok(()) => Failure::new("a worker ended before its work did"),
        Err(error) => worker::failure(error),
    }
}

/// Lets a task or two through, so that connections are made and the server knows its workers.
pub(crate) async fn warm_up(target: &Target, crew: &mut Crew, payload: Vec<u8>) -> Result<(), Failure> {
    crew.client.enqueue(&crew.queue, NewTask::new(payload)).await?;
    crew.finished(target, 1, &unseen()).await?;
    Ok(())
}

/// A bar on a terminal; nothing elsewhere.
pub(crate) fn progress(what: &'static str, tasks: u64) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(tasks), target);
    let template = "{msg:<24} {bar:30} {human_pos} of {human_len} ({per_sec}, {eta} left)";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

/// A bar that nobody sees.
pub(crate) fn unseen() -> ProgressBar {
    ProgressBar::hidden()
}

/// So many in such a time, per second.
pub(crate) fn rate(tasks: u64, took: Duration) -> f64 {
    tasks as f64 / took.as_secs_f64().max(1e-9)
}
