//! How fast the store accepts and finishes, beside a raw file that takes as many bytes.
//!
//! A row of the table is measured in slices that take turns: some commits to the store, then the same
//! number of bytes, in as many pieces, to the raw files. Before the raw files have their turn the store
//! comes to rest, so that its flushes and merges do not slow them down; how long that took is told.
//!
//! The commits of a slice are made before its time begins: while they are made the store would catch up, and
//! nobody would see what that costs. The time of finishing includes that of reading the rows: those of the first
//! slice before it, those of the others while the slice before them is finished. Only where
//! accepting and finishing take turns are commits made in between; that is not counted, but gives the store
//! some time.

use std::path::Path;
use std::time::{Duration, Instant};

use evenhand_core::backlog::Level;
use evenhand_core::names::TaskId;
use evenhand_store::Embedded;
use evenhand_store::embedded::Options;

use super::Plan;
use super::owner::{Commit, Owner};
use super::raw::{How, Index, Raw};
use super::room::{self, Scratch};
use crate::Failure;
use crate::clock::timed;

/// What commits do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Accept,
    Finish,
    /// One that accepts, one that finishes, and so on.
    Mix,
}

impl Work {
    pub(super) fn name(self) -> &'static str {
        match self {
            Work::Accept => "accept",
            Work::Finish => "finish",
            Work::Mix => "both, in turn",
        }
    }
}

/// Bytes that a commit takes in the store's log.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    accept: u64,
    finish: u64,
}

/// What was measured in one row.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) standing: u64,
    pub(super) work: Work,
    pub(super) batch: u64,
    /// Tasks accepted or finished; of a mix, those that were both.
    pub(super) tasks: u64,
    /// Bytes in the log for one task.
    pub(super) bytes_per_task: f64,
    /// Of the store, until the last task could be read.
    pub(super) store: Duration,
    /// The part of it that went into reading rows.
    pub(super) reading: Duration,
    /// For how long the store went on working after that, over all slices.
    pub(super) behind: Duration,
    pub(super) appended: Beside,
    pub(super) in_place: Beside,
    pub(super) indexed: Beside,
    /// Of each commit, sorted.
    pub(super) latencies: Vec<Duration>,
}

/// A raw file in the same slices.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// All of them.
    pub(super) took: Duration,
    /// What it took over what the store took, of each.
    parts: Vec<f64>,
}

impl Beside {
    fn add(&mut self, took: Duration, store: Duration) {
        self.took += took;
        self.parts.push(took.as_secs_f64() / store.as_secs_f64());
    }

    /// The store's speed as a part of its own: the median of the slices, for no disk is ever quiet.
    pub(super) fn part(&self) -> f64 {
        let mut parts = self.parts.clone();
        parts.sort_by(f64::total_cmp);
        let middle = |n: usize| parts.get(n).copied().unwrap_or(f64::NAN);
        (middle(parts.len() / 2) + middle(parts.len().saturating_sub(1) / 2)) / 2.0
    }
}

impl Row {
    pub(super) fn rate(&self, took: Duration) -> f64 {
        self.tasks as f64 / took.as_secs_f64().max(1e-9)
    }

    /// The latency that this part of the commits did not exceed.
    pub(super) fn latency(&self, part: f64) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get((part * last as f64).ceil() as usize).copied().unwrap_or_default()
    }
}

/// The raw files, and an index that knows the tasks that stand.
#[derive(Debug)]
pub(super) struct Yardsticks {
    append: Raw,
    in_place: Raw,
    beside_index: Raw,
    index: Index,
}

impl Yardsticks {
    pub(super) fn create(scratch: &Scratch) -> Result<Yardsticks, Failure> {
        Ok(Yardsticks {
            append: Raw::create(&scratch.join("raw"), How::Append)?,
            in_place: Raw::create(&scratch.join("raw-in-place"), How::InPlace)?,
            beside_index: Raw::create(&scratch.join("raw-indexed"), How::Append)?,
            index: Index::default(),
        })
    }

    fn empty(&mut self) -> Result<(), Failure> {
        self.append.empty()?;
        self.in_place.empty()?;
        self.beside_index.empty()
    }
}

/// One commit of a slice, as the yardsticks repeat it.
struct Done {
    accepts: bool,
    places: Vec<(Level, TaskId)>,
}

/// Brings the standing tasks to a number.
pub(super) fn stand(owner: &mut Owner, sticks: &mut Yardsticks, tasks: u64) -> Result<(), Failure> {
    const LARGE: u64 = 5_000;
    let start = Instant::now();
    let mut told = 0;
    while owner.standing() < tasks {
        let commit = owner.accept(LARGE.min(tasks - owner.standing()));
        sticks.index.insert(&commit.places, 0);
        owner.commit(commit.changes)?;
        if owner.standing() / 1_000_000 > told {
            told = owner.standing() / 1_000_000;
            eprintln!("store: {told},000,000 tasks stand after {:.0} s", start.elapsed().as_secs_f64());
        }
    }
    owner.wait_until_applied()
}

/// Measures one row.
pub(super) fn measure(
    plan: &Plan,
    owner: &mut Owner,
    sticks: &mut Yardsticks,
    standing: u64,
    work: Work,
    batch: u64,
) -> Result<Row, Failure> {
    let sizes = sizes(plan, batch)?;
    let commits = plan.commits(batch);
    let slices = plan.rounds.min(commits);
    let per_task = match work {
        Work::Accept => sizes.accept,
        Work::Finish => sizes.finish,
        Work::Mix => sizes.accept + sizes.finish,
    };
    let mut row = Row {
        standing,
        work,
        batch,
        tasks: 0,
        bytes_per_task: per_task as f64 / batch as f64,
        store: Duration::ZERO,
        reading: Duration::ZERO,
        behind: Duration::ZERO,
        appended: Beside::default(),
        in_place: Beside::default(),
        indexed: Beside::default(),
        latencies: Vec::new(),
    };
    for slice in 0..slices {
        let commits = commits * (slice + 1) / slices - commits * slice / slices;
        let before = row.store;
        let last = slice + 1 == slices;
        let done = slice_of_store(owner, work, batch, commits, last, &mut row)?;
        row.behind += owner.rest()?;
        row.tasks += commits * batch;
        let store = row.store - before;
        slice_of_yardsticks(sticks, sizes, &done, store, &mut row)?;
    }
    sticks.empty()?;
    row.latencies.sort_unstable();
    eprintln!(
        "store: {standing} standing, batch {batch}, {}: {:.0} tasks/s, {:.2} of a raw append",
        work.name(),
        row.rate(row.store),
        row.appended.part(),
    );
    Ok(row)
}

/// Some commits, one after the other, until what they did can be read.
fn slice_of_store(
    owner: &mut Owner,
    work: Work,
    batch: u64,
    commits: u64,
    last: bool,
    row: &mut Row,
) -> Result<Vec<Done>, Failure> {
    let mut done = Vec::new();
    let commit = |owner: &Owner, Commit { changes, places }, accepts, row: &mut Row| {
        let start = Instant::now();
        owner.commit(changes)?;
        row.latencies.push(start.elapsed());
        Ok::<Done, Failure>(Done { accepts, places })
    };
    let (mut making, mut reading) = (Duration::ZERO, Duration::ZERO);
    let ahead: Vec<Commit> = match work {
        Work::Accept => (0..commits).map(|_| owner.accept(batch)).collect(),
        Work::Finish => {
            timed(&mut reading, || owner.read(commits * batch))?;
            (0..commits).map(|_| owner.finish(batch)).collect::<Result<_, _>>()?
        }
        Work::Mix => Vec::new(),
    };
    // The rows of the next slice are read meanwhile, as a window is filled while its first rows run.
    let reader = owner.reader(if work == Work::Finish && !last { commits * batch } else { 0 });
    let start = Instant::now();
    let read = std::thread::scope(|scope| {
        let reading = scope.spawn(|| reader.read());
        for next in ahead {
            done.push(commit(owner, next, work == Work::Accept, row)?);
        }
        reading.join().unwrap_or_else(|_| Err("reading panicked".into()))
    })?;
    owner.learn(read)?;
    if work == Work::Mix {
        for _ in 0..commits {
            let next = timed(&mut making, || owner.accept(batch));
            done.push(commit(owner, next, true, row)?);
            timed(&mut reading, || owner.read(batch))?;
            let next = timed(&mut making, || owner.finish(batch))?;
            done.push(commit(owner, next, false, row)?);
        }
    }
    owner.wait_until_applied()?;
    row.store += start.elapsed() - making;
    row.reading += reading;
    if work == Work::Finish {
        row.store += reading;
    }
    Ok(done)
}

/// The same number of bytes in as many pieces to the raw files.
fn slice_of_yardsticks(
    sticks: &mut Yardsticks,
    sizes: Sizes,
    done: &[Done],
    store: Duration,
    row: &mut Row,
) -> Result<(), Failure> {
    let bytes = |done: &Done| if done.accepts { sizes.accept } else { sizes.finish };
    let start = Instant::now();
    for done in done {
        sticks.append.write(bytes(done))?;
    }
    row.appended.add(start.elapsed(), store);
    let start = Instant::now();
    for done in done {
        sticks.in_place.write(bytes(done))?;
    }
    row.in_place.add(start.elapsed(), store);
    let start = Instant::now();
    for done in done {
        let at = sticks.beside_index.write(bytes(done))?;
        if done.accepts {
            sticks.index.insert(&done.places, at);
        } else {
            sticks.index.remove(&done.places);
        }
    }
    row.indexed.add(start.elapsed(), store);
    Ok(())
}

/// Bytes that a commit takes in the log: those by which a few commits move the log's end in a new store.
fn sizes(plan: &Plan, batch: u64) -> Result<Sizes, Failure> {
    const SAMPLES: u64 = 4;
    let dir = plan.scratch.join("sizes");
    let sized = (|| {
        let store = Embedded::open(&dir, Options::default()).map_err(|error| error.to_string())?;
        let mut owner = Owner::take(store, plan.keys, plan.payload, 3)?;
        let begin = log_end(&dir)?;
        for _ in 0..SAMPLES {
            let commit = owner.accept(batch);
            owner.commit(commit.changes)?;
        }
        let middle = log_end(&dir)?;
        for _ in 0..SAMPLES {
            let commit = owner.finish(batch)?;
            owner.commit(commit.changes)?;
        }
        let end = log_end(&dir)?;
        Ok(Sizes { accept: (middle - begin) / SAMPLES, finish: (end - middle) / SAMPLES })
    })();
    let _ = std::fs::remove_dir_all(&dir);
    sized
}

/// The last byte of the only segment that is not nought.
fn log_end(dir: &Path) -> Result<u64, Failure> {
    let logs: Vec<_> =
        room::files(dir).into_iter().filter(|path| path.extension().is_some_and(|e| e == "log")).collect();
    let [log] = logs.as_slice() else { return Err("a few commits do not fit into a segment".into()) };
    let bytes = std::fs::read(log).map_err(|error| format!("{}: {error}", log.display()))?;
    Ok(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1))
}
