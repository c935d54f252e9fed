//! What is done to beanstalkd: the same that is done to Evenhand, in beanstalkd's best way.
//!
//! - Throughput: several connections put jobs, many in one write, while as many others reserve and delete them, many
//!   in one write too. Deletes go ahead of reserves, and no reserve waits while a delete is behind it.
//! - Latency: single puts by a schedule, whether or not those before were answered; times count from when a put was
//!   due. Workers wait for one job each.
//!
//! A beanstalkd that does not keep up is not waited for without end: after some time no more is put, or what has not
//! been reserved counts as late as it is by then.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::beanstalk::{Connection, Reply};
use super::daemon::Daemon;
use super::times::Times;
use crate::Failure;

/// Seconds that a worker waits for a job before it looks whether there will be any.
const WAIT_SECONDS: u32 = 1;
/// How often it is looked whether a schedule is over.
const LOOK: Duration = Duration::from_millis(10);
/// Bytes of a payload that say which job it is.
const STAMP: usize = 8;

/// How jobs are put and reserved.
#[derive(Clone, Debug)]
pub(super) struct Way {
    /// Connections that put, and as many that reserve.
    pub(super) connections: u64,
    /// Commands in one write.
    pub(super) pipeline: u64,
    /// Bytes of a job.
    pub(super) payload: usize,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Throughput {
    pub(super) accepted_per_second: f64,
    pub(super) finished_per_second: f64,
}

/// Puts so many jobs, or as many as it can in so long, and has all of them reserved and deleted.
pub(super) fn throughput(
    daemon: &Daemon,
    way: &Way,
    jobs: u64,
    at_most: Duration,
) -> Result<Throughput, Failure> {
    let puts = (0..way.connections).map(|_| daemon.connect()).collect::<Result<Vec<_>, _>>()?;
    let takes = (0..way.connections).map(|_| daemon.connect()).collect::<Result<Vec<_>, _>>()?;
    let job = vec![0xa5; way.payload];
    let (next, putting) = (AtomicU64::new(0), AtomicU64::new(way.connections));
    let (inserted, deleted) = (Count::default(), Count::default());
    let began = Instant::now();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for mut connection in puts {
            let (job, next, putting, inserted) = (&job, &next, &putting, &inserted);
            threads.push(scope.spawn(move || {
                let mut put = || {
                    while began.elapsed() < at_most {
                        let first = next.fetch_add(way.pipeline, Ordering::Relaxed);
                        let many = way.pipeline.min(jobs.saturating_sub(first));
                        if many == 0 {
                            break;
                        }
                        put_all(&mut connection, job, many)?;
                        inserted.add(many, began);
                    }
                    Ok(())
                };
                let done = put();
                // Only after everything that it put is counted.
                putting.fetch_sub(1, Ordering::Release);
                done
            }));
        }
        for mut connection in takes {
            let (putting, inserted, deleted) = (&putting, &inserted, &deleted);
            threads.push(scope.spawn(move || {
                let mut held = Vec::new();
                loop {
                    let over = putting.load(Ordering::Acquire) == 0;
                    if over && held.is_empty() && deleted.so_far() >= inserted.so_far() {
                        return Ok::<(), Failure>(());
                    }
                    let done = held.len() as u64;
                    take(&mut connection, way.pipeline, &mut held)?;
                    if done > 0 {
                        deleted.add(done, began);
                    }
                }
            }));
        }
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())))
    })?;
    Ok(Throughput { accepted_per_second: inserted.rate(), finished_per_second: deleted.rate() })
}

/// Things that were done, and when the last of them was.
#[derive(Debug, Default)]
struct Count {
    many: AtomicU64,
    last_nanos: AtomicU64,
}

impl Count {
    fn add(&self, many: u64, began: Instant) {
        self.last_nanos.fetch_max(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.many.fetch_add(many, Ordering::Release);
    }

    fn so_far(&self) -> u64 {
        self.many.load(Ordering::Acquire)
    }

    fn rate(&self) -> f64 {
        self.so_far() as f64 / (self.last_nanos.load(Ordering::Relaxed) as f64 / 1e9).max(1e-9)
    }
}

fn put_all(connection: &mut Connection, job: &[u8], many: u64) -> Result<(), Failure> {
    (0..many).for_each(|_| connection.put(job));
    connection.send()?;
    for _ in 0..many {
        match connection.reply()? {
            Reply::Inserted(_) => {}
            other @ (Reply::Reserved(_) | Reply::Deleted | Reply::TimedOut) => {
                return Err(strange("a put", &other));
            }
        }
    }
    Ok(())
}

/// Deletes what is held, and reserves what is there; if nothing was held, waits for something.
fn take(connection: &mut Connection, pipeline: u64, held: &mut Vec<u64>) -> Result<(), Failure> {
    let (deletes, reserves) = (held.len(), if held.is_empty() { 1 } else { pipeline });
    held.iter().for_each(|id| connection.delete(*id));
    (0..reserves).for_each(|_| connection.reserve(if deletes == 0 { WAIT_SECONDS } else { 0 }));
    connection.send()?;
    held.clear();
    for _ in 0..deletes {
        match connection.reply()? {
            Reply::Deleted => {}
            other @ (Reply::Inserted(_) | Reply::Reserved(_) | Reply::TimedOut) => {
                return Err(strange("a delete", &other));
            }
        }
    }
    for _ in 0..reserves {
        match connection.reply()? {
            Reply::Reserved(id) => held.push(id),
            Reply::TimedOut => {}
            other @ (Reply::Inserted(_) | Reply::Deleted) => return Err(strange("a reserve", &other)),
        }
    }
    Ok(())
}

fn strange(to: &str, reply: &Reply) -> Failure {
    format!("beanstalkd answered {reply:?} to {to}")
}

/// How late jobs were.
#[derive(Debug)]
pub(super) struct Latency {
    pub(super) started: Times,
    /// Jobs that nobody had got when the time was over.
    pub(super) missing: u64,
}

/// What the threads of a schedule share.
struct Schedule {
    epoch: Instant,
    rate: u64,
    /// When each job was reserved, in nanoseconds after the first was due; 0: not yet.
    started: Vec<AtomicU64>,
    many: AtomicU64,
    over: AtomicBool,
    failed: Mutex<Option<Failure>>,
}

impl Schedule {
    fn due(&self, job: u64) -> Duration {
        Duration::from_secs_f64(job as f64 / self.rate as f64)
    }

    fn start(&self, job: &[u8]) {
        let number = job.get(..STAMP).and_then(|stamp| stamp.try_into().ok()).map(u64::from_le_bytes);
        if let Some(started) = number.and_then(|number| self.started.get(number as usize)) {
            started.store((self.epoch.elapsed().as_nanos() as u64).max(1), Ordering::Relaxed);
            self.many.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A failure counts only while the schedule lasts: then connections are closed under whoever waits.
    fn failed(&self, done: Result<(), Failure>) {
        if let Err(failure) = done
            && !self.over.swap(true, Ordering::Relaxed)
            && let Ok(mut failed) = self.failed.lock()
        {
            *failed = Some(failure);
        }
    }
}

/// Puts single jobs at a steady rate for so long, and sees how late each is reserved. At most as long again is
/// waited for what is late.
pub(super) fn latency(daemon: &Daemon, way: &Way, rate: u64, seconds: u64) -> Result<Latency, Failure> {
    let jobs = rate * seconds;
    let puts = (0..way.connections).map(|_| daemon.connect()).collect::<Result<Vec<_>, _>>()?;
    let takes = (0..way.connections).map(|_| daemon.connect()).collect::<Result<Vec<_>, _>>()?;
    let mut senders = puts.iter().map(Connection::sender).collect::<Result<Vec<_>, _>>()?;
    let all = puts.iter().chain(&takes).map(Connection::sender).collect::<Result<Vec<_>, _>>()?;
    let schedule = Schedule {
        epoch: Instant::now() + Duration::from_millis(50),
        rate,
        started: (0..jobs).map(|_| AtomicU64::new(0)).collect(),
        many: AtomicU64::new(0),
        over: AtomicBool::new(false),
        failed: Mutex::new(None),
    };
    let deadline = Duration::from_secs(2 * seconds);
    std::thread::scope(|scope| {
        let schedule = &schedule;
        for mut connection in puts {
            scope.spawn(move || {
                while !schedule.over.load(Ordering::Relaxed) {
                    if let Err(failure) = connection.reply() {
                        return schedule.failed(Err(failure));
                    }
                }
            });
        }
        for mut connection in takes {
            scope.spawn(move || schedule.failed(work(&mut connection, schedule)));
        }
        let payload = way.payload.max(STAMP);
        scope.spawn(move || {
            let mut job = vec![0xa5; payload];
            for number in 0..jobs {
                let due = schedule.epoch + schedule.due(number);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                if schedule.over.load(Ordering::Relaxed) {
                    return;
                }
                job[..STAMP].copy_from_slice(&number.to_le_bytes());
                let connections = senders.len();
                if let Err(failure) = senders[number as usize % connections].put(&job) {
                    return schedule.failed(Err(failure));
                }
            }
        });
        while schedule.epoch.elapsed() < deadline
            && schedule.many.load(Ordering::Relaxed) < jobs
            && !schedule.over.load(Ordering::Relaxed)
        {
            std::thread::sleep(LOOK);
        }
        schedule.over.store(true, Ordering::Relaxed);
        all.iter().for_each(super::beanstalk::Sender::close);
    });
    if let Some(failure) = schedule.failed.lock().ok().and_then(|mut failed| failed.take()) {
        return Err(failure);
    }
    let (mut times, mut missing) = (Vec::new(), 0);
    for (number, started) in schedule.started.iter().enumerate() {
        let at = match started.load(Ordering::Relaxed) {
            0 => {
                missing += 1;
                deadline
            }
            nanos => Duration::from_nanos(nanos),
        };
        times.push(at.saturating_sub(schedule.due(number as u64)));
    }
    Ok(Latency { started: Times::new(times), missing })
}

/// A worker: deletes what it had and waits for the next, in one write.
fn work(connection: &mut Connection, schedule: &Schedule) -> Result<(), Failure> {
    let mut had = None;
    while !schedule.over.load(Ordering::Relaxed) {
        if let Some(id) = had {
            connection.delete(id);
        }
        connection.reserve(WAIT_SECONDS);
        connection.send()?;
        if had.take().is_some() {
            match connection.reply()? {
                Reply::Deleted => {}
                other @ (Reply::Inserted(_) | Reply::Reserved(_) | Reply::TimedOut) => {
                    return Err(strange("a delete", &other));
                }
            }
        }
        match connection.reply()? {
            Reply::Reserved(id) => {
                schedule.start(connection.job());
                had = Some(id);
            }
            Reply::TimedOut => {}
            other @ (Reply::Inserted(_) | Reply::Deleted) => return Err(strange("a reserve", &other)),
        }
    }
    Ok(())
}
