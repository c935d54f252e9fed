//! The engine: one directory, opened by one process. Its threads:
//! - the **writer** gathers commits into a frame, writes and syncs it, acknowledges, and only then
//!   applies it to memory, so that callers already prepare their next commit; reads wait for it;
//! - the **flusher** turns what is in memory into tables when a segment of the log is full;
//! - the **merger** keeps the runs few and gives room back;
//! - two **readers** do what may have to wait for the disk, so that callers never do.
//!
//! After a failed write or sync nothing is tried again on the same state: whether the disk has what was
//! written is unknown, and asking again would only get a wrong answer. The engine fails as a whole and is
//! opened again from what is on disk. Opening writes everything that the log holds into new tables: what
//! it read may have come from a cache that the disk never saw.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use evenhand_core::backlog::Level;
use evenhand_core::names::{Epoch, ShardId};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::oneshot;

use super::Options;
use super::bytes::{Get, Value};
use super::files::{About, Dir, DirError, damaged, numbered, sync_dir};
use super::layout::{self, Batch, Kind, LanePrefix, RecordKey, RowKey, TaskKey};
use super::log::{self, Acked, LastAcked, Replayed, Segment};
use super::manifest::Standing;
use super::reads::Reads;
use super::table::TableKey;
use super::tree::{self, Making, Memory, Part, Run, Tree};
use crate::StoreError;

/// Runs of one kind above which commits wait for the merger: reads would have to look into too many.
const MOST_RUNS: usize = 64;
/// Bytes that a frame may gather from several commits: enough to share a sync, little enough that the
/// first of them does not wait long.
const GATHER: usize = 1024 * 1024;
/// Bytes of the largest frame: places in it are counted in 32 bits, and a log is read as a whole.
const LARGEST: usize = 1024 * 1024 * 1024;
/// How often the writer looks whether there is something to flush early, when nobody asks for anything.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long to wait for room before asking again.
const NO_ROOM: Duration = Duration::from_millis(200);

/// All rows, and what the writer must know at once.
#[derive(Debug)]
pub(super) struct Trees {
    pub(super) rows: Tree<RowKey>,
    pub(super) tasks: Tree<TaskKey>,
    pub(super) records: Tree<RecordKey>,
    /// Rows at or below are gone, whether or not a delete says so.
    pub(super) acks: BTreeMap<LanePrefix, Level>,
}

/// A kind of row that has a tree.
pub(super) trait Planted: TableKey {
    fn tree(trees: &Trees) -> &Tree<Self>;
    fn runs(standing: &mut Standing) -> &mut Vec<Run<Self>>;
}

macro_rules! planted {
    ($key:ty, $field:ident) => {
        impl Planted for $key {
            fn tree(trees: &Trees) -> &Tree<Self> {
                &trees.$field
            }
            fn runs(standing: &mut Standing) -> &mut Vec<Run<Self>> {
                &mut standing.$field
            }
        }
    };
}

planted!(RowKey, rows);
planted!(TaskKey, tasks);
planted!(RecordKey, records);

impl Trees {
    pub(super) fn of(standing: &Standing) -> Trees {
        Trees {
            rows: Tree::new(Kind::Rows, standing.rows.clone()),
            tasks: Tree::new(Kind::Tasks, standing.tasks.clone()),
            records: Tree::new(Kind::Records, standing.records.clone()),
            acks: BTreeMap::new(),
        }
    }

    /// Does what a frame says. None if it says nothing that we know.
    pub(super) fn apply(&mut self, buffer: &Arc<Vec<u8>>, start: usize, end: usize) -> Option<()> {
        let get = &mut Get::from(&buffer[..end], start);
        while !get.is_done() {
            let op = layout::next_op(get)?;
            let value = op.value.map(|(start, end)| Value::new(buffer, start, end));
            match op.kind {
                Kind::Rows => change(&mut self.rows, op.key, value)?,
                Kind::Tasks => change(&mut self.tasks, op.key, value)?,
                Kind::Records => {
                    if let (Some(lane), Some(value)) = (layout::lane_of_record(op.key), &value) {
                        let ack = layout::ack(value.bytes())?;
                        self.acks.insert(lane, ack);
                        self.rows.forget(layout::row_key(lane, Level::ZERO), layout::row_key(lane, ack));
                    }
                    change(&mut self.records, op.key, value)?;
                }
            }
        }
        Some(())
    }

    fn is_empty(&self) -> bool {
        self.rows.active.is_empty() && self.tasks.active.is_empty() && self.records.active.is_empty()
    }
}

fn change<K: TableKey>(tree: &mut Tree<K>, key: &[u8], value: Option<Value>) -> Option<()> {
    let key = K::from_bytes(key)?;
    match value {
        Some(value) => tree.put(key, value),
        None => tree.delete(key),
    }
    Some(())
}

/// What is on disk, read without changing anything.
pub(super) struct Loaded {
    pub(super) standing: Standing,
    pub(super) trees: Trees,
    pub(super) replayed: Replayed,
}

/// Reads the manifest, the tables' indexes and the log.
pub(super) fn load(dir: &Dir) -> Result<Loaded, DirError> {
    let standing = Standing::read(dir)?;
    let mut trees = Trees::of(&standing);
    let each = |path: &Path, buffer: &Arc<Vec<u8>>, start: usize, end: usize| {
        trees
            .apply(buffer, start, end)
            .map_or_else(|| damaged(path, start as u64, "a commit says what this version does not know"), Ok)
    };
    let Standing { segment, flushed, secret, .. } = standing;
    let replayed = log::replay(&dir.path, &dir.log(), segment, flushed, secret, each)?;
    let mut loaded = Loaded { standing, trees, replayed };
    loaded.trees.acks = loaded.acks()?;
    Ok(loaded)
}

impl Reads for Loaded {
    fn with<T>(&self, look: impl FnOnce(&Trees) -> T) -> T {
        look(&self.trees)
    }
}

/// What the threads share.
pub(super) struct Shared {
    pub(super) dir: Dir,
    pub(super) options: Options,
    trees: RwLock<Trees>,
    /// What the manifest says. Held while it is changed.
    standing: Mutex<Standing>,
    next_table: AtomicU64,
    stop: AtomicBool,
    failed: Mutex<Option<StoreError>>,
    has_failed: AtomicBool,
    background: Mutex<Background>,
    /// Something in the background has changed.
    turned: Condvar,
}

/// What goes on behind the writer.
#[derive(Default)]
struct Background {
    /// What is to be flushed, or is being flushed.
    flush: Option<Flush>,
    /// The merger should look.
    merge: bool,
    /// The merger is looking.
    merging: bool,
    /// Why the flusher waits.
    no_room_to_flush: Option<DirError>,
    /// Why the merger waits.
    no_room_to_merge: Option<DirError>,
}

#[derive(Clone)]
struct Flush {
    rows: Arc<Memory<RowKey>>,
    tasks: Arc<Memory<TaskKey>>,
    records: Arc<Memory<RecordKey>>,
    /// The last frame of it.
    through: u64,
    /// Its segment.
    segment: u64,
}

enum Request {
    Commit {
        shard: ShardId,
        epoch: Epoch,
        batch: Batch,
        answer: Answer<()>,
    },
    Take {
        shard: ShardId,
        answer: Answer<Epoch>,
    },
    /// Answered when everything acknowledged before it has been applied, and flushed if that is worth it.
    Idle {
        answer: Answer<()>,
    },
}

type Answer<T> = oneshot::Sender<Result<T, StoreError>>;
type Job = Box<dyn FnOnce(&Shared) + Send>;

/// An open store. Dropping it stops its threads and gives the directory free; nothing is written then.
pub(super) struct Engine {
    pub(super) shared: Arc<Shared>,
    requests: Option<Sender<Request>>,
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub(super) fn open(path: &Path, options: Options) -> Result<Engine, DirError> {
        let options = Options { segment: options.segment.min(LARGEST as u64), ..options };
        raise_open_files();
        let dir = Dir::open(path)?;
        if !dir.is_marked()? {
            begin(&dir, &options)?;
        }
        let loaded = load(&dir)?;
        let mut epochs = BTreeMap::new();
        for shard in loaded.shards()? {
            epochs.insert(shard, loaded.epoch(shard)?);
        }
        let last = loaded.replayed.last;
        let (standing, trees, segment) = checkpoint(&dir, &options, loaded)?;
        let acked = Acked::open(&dir.path)?;
        acked.say(LastAcked { frame: last, segment: segment.number })?;

        let shared = Arc::new(Shared {
            dir,
            options,
            trees: RwLock::new(trees),
            next_table: AtomicU64::new(standing.next_table),
            standing: Mutex::new(standing),
            stop: AtomicBool::new(false),
            failed: Mutex::new(None),
            has_failed: AtomicBool::new(false),
            background: Mutex::new(Background { merge: true, ..Background::default() }),
            turned: Condvar::new(),
        });
        let (requests, inbox) = channel();
        let (jobs, work) = channel::<Job>();
        let work = Arc::new(Mutex::new(work));
        let writer = Writer { shared: shared.clone(), segment, acked, last, epochs };
        let mut engine = Engine {
            shared: shared.clone(),
            requests: Some(requests),
            jobs: Some(jobs),
            threads: Vec::new(),
        };
        engine.spawn("writer", move || writer.run(&inbox))?;
        let of = shared.clone();
        engine.spawn("flusher", move || of.flush_all())?;
        let of = shared.clone();
        engine.spawn("merger", move || of.merge_all())?;
        for name in ["reader 1", "reader 2"] {
            let (of, work) = (shared.clone(), work.clone());
            engine.spawn(name, move || {
                loop {
                    // Taken before it is done, so that the other reader can take the next.
                    let job = lock(&work).recv();
                    match job {
                        Ok(job) => job(&of),
                        Err(_) => return,
                    }
                }
            })?;
        }
        Ok(engine)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), DirError> {
        let shared = self.shared.clone();
        let guarded = move || {
            // Should one of the threads panic, the others must not go on as if nothing had happened.
            let _guard = Guard(shared);
            run();
        };
        let spawned = thread::Builder::new().name(format!("store {name}")).spawn(guarded);
        let spawned = spawned.map_err(|error| DirError::Io {
            file: self.shared.dir.path.clone(),
            what: format!("starting a thread: {error}"),
            full: false,
        })?;
        self.threads.push(spawned);
        Ok(())
    }

    pub(super) fn commit(
        &self,
        shard: ShardId,
        epoch: Epoch,
        batch: Batch,
    ) -> oneshot::Receiver<Result<(), StoreError>> {
        let (answer, answered) = oneshot::channel();
        self.send(Request::Commit { shard, epoch, batch, answer });
        answered
    }

    pub(super) fn take(&self, shard: ShardId) -> oneshot::Receiver<Result<Epoch, StoreError>> {
        let (answer, answered) = oneshot::channel();
        self.send(Request::Take { shard, answer });
        answered
    }

    pub(super) fn idle(&self) -> oneshot::Receiver<Result<(), StoreError>> {
        let (answer, answered) = oneshot::channel();
        self.send(Request::Idle { answer });
        answered
    }

    /// If the writer is gone the request is dropped, and the caller sees that nobody answers.
    fn send(&self, request: Request) {
        let _ = self.requests.as_ref().map(|requests| requests.send(request));
    }

    pub(super) fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Shared) -> Result<T, DirError> + Send + 'static,
    ) -> oneshot::Receiver<Result<T, StoreError>> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |shared| {
            let read = || read(shared).map_err(StoreError::from);
            let _ = answer.send(shared.failed().map_or_else(read, Err));
        });
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
        answered
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        (self.requests, self.jobs) = (None, None);
        drop(lock(&self.shared.background));
        self.shared.turned.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Fails the engine if the thread that holds it panics.
struct Guard(Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let what = format!("{}: a thread of the store panicked; this is a bug", self.0.dir.path.display());
        self.0.fail(StoreError::Unavailable { what });
    }
}

/// Every table is an open file, and a large store has more of them than the usual soft limit allows.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, opening a table will say so when it comes to that.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Makes an empty store, or ends what an earlier try began. The mark comes last; a directory that has lost
/// its mark is no empty store.
fn begin(dir: &Dir, options: &Options) -> Result<(), DirError> {
    let lost = |what: &str| Err(DirError::Missing { file: dir.mark_path(), what: what.into() });
    if dir.path.join("manifest").exists() {
        return match load(dir)?.replayed.last {
            0 => dir.mark(),
            _ => lost("there are commits in the directory"),
        };
    }
    if !numbered(&dir.tables())?.is_empty() {
        return lost("there are tables in the directory");
    }
    if Acked::read(&dir.path).is_ok_and(|acked| acked.frame > 0) {
        return lost("commits were acknowledged in the directory");
    }
    for (_, _, path) in numbered(&dir.log())? {
        std::fs::remove_file(&path).about(&path, "removing")?;
    }
    // The standard library's hashers begin with random numbers, which is all we need of one.
    let secret = RandomState::new().hash_one(&dir.path);
    log::prepare_spare(&dir.log(), None, options.segment)?;
    Segment::begin(&dir.log(), 1, 1, secret)?;
    let acked = Acked::open(&dir.path)?;
    acked.say(LastAcked { frame: 0, segment: 1 })?;
    acked.sync()?;
    Standing { segment: 1, next_table: 1, next_run: 1, secret, ..Standing::default() }.write(dir)?;
    if let Some(parent) = dir.path.parent().filter(|parent| parent.is_dir()) {
        // An earlier try may have made the directory and died before its name was durable.
        sync_dir(parent)?;
    }
    dir.mark()
}

/// Writes what the log held into tables and begins a new segment.
fn checkpoint(dir: &Dir, options: &Options, loaded: Loaded) -> Result<(Standing, Trees, Segment), DirError> {
    let Loaded { mut standing, mut trees, replayed } = loaded;
    let log = dir.log();
    // Tables that a flush or a merge did not come to name.
    let named: BTreeSet<u64> = standing.numbers().into_iter().collect();
    for (number, _, path) in numbered(&dir.tables())? {
        if !named.contains(&number) {
            std::fs::remove_file(&path).about(&path, "removing")?;
        }
    }
    if !trees.is_empty() {
        let next_table = AtomicU64::new(standing.next_table);
        let making = Making {
            dir: &dir.tables(),
            number: &|| next_table.fetch_add(1, Ordering::SeqCst),
            stop: &|| false,
            room: &|| Ok(()),
        };
        flush_one(&mut standing, &trees.rows.seal(), Kind::Rows, &making)?;
        flush_one(&mut standing, &trees.tasks.seal(), Kind::Tasks, &making)?;
        flush_one(&mut standing, &trees.records.seal(), Kind::Records, &making)?;
        standing.next_table = next_table.into_inner();
        sync_dir(&dir.tables())?;
        trees = Trees { acks: trees.acks, ..Trees::of(&standing) };
    }
    if standing.flushed != replayed.last {
        // Before the next segment begins: what the tables hold need not be in the log any more.
        standing.flushed = replayed.last;
        standing.write(dir)?;
    }
    let (mut used, first) = (replayed.segments, replayed.last + 1);
    let segment = match used.pop_if(|last| last.is_empty()) {
        Some(empty) => Segment::resume(&log, empty.number, first, standing.secret)?,
        None => {
            log::prepare_spare(&log, None, options.segment)?;
            let number = used.last().map_or(standing.segment, |last| last.number + 1);
            Segment::begin(&log, number, first, standing.secret)?
        }
    };
    standing.segment = segment.number;
    standing.write(dir)?;
    // Those that were read, and those that a flush did not come to give away.
    for (number, _, path) in numbered(&log)? {
        if number < segment.number {
            log::prepare_spare(&log, Some(&path), options.segment)?;
        }
    }
    log::prepare_spare(&log, None, options.segment)?;
    Ok((standing, trees, segment))
}

fn flush_one<K: Planted>(
    standing: &mut Standing,
    memory: &Memory<K>,
    kind: Kind,
    making: &Making<'_>,
) -> Result<(), DirError> {
    let bottom = K::runs(standing).is_empty();
    let parts = tree::flush(kind, memory, bottom, &|_| false, making)?.hand_over();
    add_run(standing, parts);
    Ok(())
}

fn add_run<K: Planted>(standing: &mut Standing, parts: Vec<Part<K>>) {
    if !parts.is_empty() {
        let run = Run { id: standing.next_run, tier: 0, parts };
        standing.next_run += 1;
        K::runs(standing).insert(0, run);
    }
}

impl Reads for Shared {
    /// Waits while a commit is being applied.
    fn with<T>(&self, look: impl FnOnce(&Trees) -> T) -> T {
        look(&self.trees())
    }
}

impl Shared {
    fn trees(&self) -> RwLockReadGuard<'_, Trees> {
        self.trees.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn trees_mut(&self) -> RwLockWriteGuard<'_, Trees> {
        self.trees.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the engine has failed, if it has.
    pub(super) fn failed(&self) -> Option<StoreError> {
        if self.has_failed.load(Ordering::Acquire) { lock(&self.failed).clone() } else { None }
    }

    fn fail(&self, error: StoreError) {
        lock(&self.failed).get_or_insert(error);
        self.has_failed.store(true, Ordering::Release);
        drop(lock(&self.background));
        self.turned.notify_all();
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.has_failed.load(Ordering::Acquire)
    }

    /// Whether there is room for new tasks: enough that finishing the old ones never fails for want of it.
    pub(super) fn room(&self) -> Result<(), StoreError> {
        let free = self.dir.free()?;
        if free >= self.options.floor {
            return Ok(());
        }
        let (free, floor) = (free >> 20, self.options.floor >> 20);
        let dir = self.dir.path.display();
        Err(StoreError::Full {
            what: format!("{dir} has {free} MiB left; new tasks need {floor} MiB to be free"),
        })
    }

    fn most_runs(&self) -> usize {
        let trees = self.trees();
        trees.rows.runs.len().max(trees.tasks.runs.len()).max(trees.records.runs.len())
    }

    /// Waits until there is nothing to flush and nothing to merge, or no room to do it.
    pub(super) fn rest(&self) {
        let mut background = lock(&self.background);
        loop {
            let busy = background.flush.is_some() || background.merge || background.merging;
            let stuck = background.no_room_to_flush.is_some() || background.no_room_to_merge.is_some();
            if !busy || stuck || self.is_over() {
                return;
            }
            background = self.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Changes the manifest and then the runs. If that fails it is unknown which of them counts, so there
    /// is no second try.
    fn install(
        &self,
        change: impl FnOnce(&mut Standing),
        then: impl FnOnce(&mut Trees),
    ) -> Result<(), DirError> {
        self.try_install(change, then).map_err(DirError::beyond_retry)
    }

    fn try_install(
        &self,
        change: impl FnOnce(&mut Standing),
        then: impl FnOnce(&mut Trees),
    ) -> Result<(), DirError> {
        let mut standing = lock(&self.standing);
        let mut next = standing.clone();
        change(&mut next);
        next.next_table = self.next_table.load(Ordering::SeqCst);
        sync_dir(&self.dir.tables())?;
        next.write(&self.dir)?;
        let old = std::mem::replace(&mut *standing, next);
        {
            let mut trees = self.trees_mut();
            trees.rows.runs = Arc::new(standing.rows.clone());
            trees.tasks.runs = Arc::new(standing.tasks.clone());
            trees.records.runs = Arc::new(standing.records.clone());
            then(&mut trees);
        }
        let live: BTreeSet<u64> = standing.numbers().into_iter().collect();
        let paths = table_paths(&old);
        drop(standing);
        for (number, path) in paths {
            if !live.contains(&number) {
                std::fs::remove_file(&path).about(&path, "removing")?;
            }
        }
        Ok(())
    }

    fn flush_all(&self) {
        loop {
            let flush = {
                let mut background = lock(&self.background);
                loop {
                    if self.is_over() {
                        return;
                    }
                    if let Some(flush) = background.flush.clone() {
                        break flush;
                    }
                    background = self.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
                }
            };
            match self.flush_tables(&flush) {
                Ok(()) => {
                    let mut background = lock(&self.background);
                    background.flush = None;
                    background.no_room_to_flush = None;
                    background.merge = true;
                    self.turned.notify_all();
                }
                Err(error) => self.wait_for_room(error, |background| &mut background.no_room_to_flush),
            }
        }
    }

    fn flush_tables(&self, flush: &Flush) -> Result<(), DirError> {
        let making = Making {
            dir: &self.dir.tables(),
            number: &|| self.next_table.fetch_add(1, Ordering::SeqCst),
            stop: &|| false,
            room: &|| Ok(()),
        };
        let (bottom, acks) = {
            let trees = self.trees();
            let runs = [trees.rows.runs.len(), trees.tasks.runs.len(), trees.records.runs.len()];
            (runs.map(|runs| runs == 0), trees.acks.clone())
        };
        let is_settled = |key: &RowKey| key.is_settled(&acks);
        let mut rows = tree::flush(Kind::Rows, &flush.rows, bottom[0], &is_settled, &making)?;
        let mut tasks = tree::flush(Kind::Tasks, &flush.tasks, bottom[1], &|_| false, &making)?;
        let mut records = tree::flush(Kind::Records, &flush.records, bottom[2], &|_| false, &making)?;
        self.install(
            |standing| {
                add_run(standing, rows.hand_over());
                add_run(standing, tasks.hand_over());
                add_run(standing, records.hand_over());
                standing.flushed = flush.through;
                standing.segment = flush.segment + 1;
            },
            |trees| {
                trees.rows.sealed = None;
                trees.tasks.sealed = None;
                trees.records.sealed = None;
            },
        )?;
        let used = log::segment_path(&self.dir.log(), flush.segment);
        let spare = log::prepare_spare(&self.dir.log(), Some(&used), self.options.segment);
        spare.map_err(DirError::beyond_retry)
    }

    /// Waits for room, or fails the engine if that is not what is missing. New tables are new files, so
    /// trying again is no retry on a doubtful state.
    fn wait_for_room(&self, error: DirError, whose: fn(&mut Background) -> &mut Option<DirError>) {
        if !matches!(error, DirError::Io { full: true, .. }) {
            return self.fail(error.into());
        }
        let mut background = lock(&self.background);
        *whose(&mut background) = Some(error);
        self.turned.notify_all();
        drop(self.turned.wait_timeout_while(background, NO_ROOM, |_| !self.is_over()));
    }

    fn merge_all(&self) {
        loop {
            {
                let mut background = lock(&self.background);
                while !background.merge && !self.is_over() {
                    background = self.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
                }
                (background.merge, background.merging) = (false, true);
            }
            loop {
                if self.is_over() {
                    return;
                }
                let merged = self.merge_one::<RowKey>().and_then(|rows| {
                    let tasks = self.merge_one::<TaskKey>()?;
                    Ok(rows | tasks | self.merge_one::<RecordKey>()?)
                });
                match merged {
                    Ok(true) => lock(&self.background).no_room_to_merge = None,
                    Ok(false) => break,
                    Err(error) => self.wait_for_room(error, |background| &mut background.no_room_to_merge),
                }
                self.turned.notify_all();
            }
            lock(&self.background).merging = false;
            self.turned.notify_all();
        }
    }

    /// Merges some runs of a kind, if there is a reason to.
    fn merge_one<K: Planted + Settled>(&self) -> Result<bool, DirError> {
        let (kind, runs, acks) = {
            let trees = self.trees();
            let tree = K::tree(&trees);
            (tree.kind, tree.runs.clone(), trees.acks.clone())
        };
        let is_settled = |key: &K| key.is_settled(&acks);
        let Some(range) = tree::choose(&runs, &is_settled) else { return Ok(false) };
        let bottom = range.end == runs.len();
        let group = &runs[range.clone()];
        let ids: Vec<u64> = group.iter().map(|run| run.id).collect();
        let deepest = group.iter().map(|run| run.tier).max().unwrap_or(0);
        // A merge of everything keeps the size class of the largest.
        let tier = if bottom && group[0].tier != deepest { deepest } else { deepest.saturating_add(1) };
        let target = {
            let mut standing = lock(&self.standing);
            standing.next_run += 1;
            standing.next_run - 1
        };
        let small = group[0].tier == 0;
        let making = Making {
            dir: &self.dir.tables(),
            number: &|| self.next_table.fetch_add(1, Ordering::SeqCst),
            stop: &|| self.is_over(),
            room: &|| self.room_to_merge(),
        };
        tree::merge(kind, group, bottom, &is_settled, &making, |parts, through| {
            self.install(
                |standing| replace_runs(K::runs(standing), &ids, target, tier, parts, through),
                |_| {},
            )?;
            // A long merge lets the small ones go first: commits would have to wait for those.
            Ok(small || !self.is_merge_urgent())
        })?;
        Ok(true)
    }

    fn is_merge_urgent(&self) -> bool {
        let trees = self.trees();
        tree::is_urgent(&trees.rows.runs)
            || tree::is_urgent(&trees.tasks.runs)
            || tree::is_urgent(&trees.records.runs)
    }

    /// A merge leaves the flusher room for what two segments hold: without a flush nothing can end.
    fn room_to_merge(&self) -> Result<(), DirError> {
        let (free, needed) = (self.dir.free()?, 4 * self.options.segment + tree::LARGEST_TABLE);
        if free >= needed || self.options.floor == 0 {
            return Ok(());
        }
        let what = format!("merging needs {} MiB to be free, there are {}", needed >> 20, free >> 20);
        Err(DirError::Io { file: self.dir.tables(), what, full: true })
    }
}

/// Whether a row is at or below its lane's ack level, and so settled.
pub(super) trait Settled {
    fn is_settled(&self, acks: &BTreeMap<LanePrefix, Level>) -> bool;
}

impl Settled for RowKey {
    fn is_settled(&self, acks: &BTreeMap<LanePrefix, Level>) -> bool {
        acks.get(&layout::lane_of(self)).is_some_and(|ack| layout::level_of(self) <= *ack)
    }
}

impl Settled for TaskKey {
    fn is_settled(&self, _: &BTreeMap<LanePrefix, Level>) -> bool {
        false
    }
}

impl Settled for RecordKey {
    fn is_settled(&self, _: &BTreeMap<LanePrefix, Level>) -> bool {
        false
    }
}

fn table_paths(standing: &Standing) -> Vec<(u64, std::path::PathBuf)> {
    fn of<K>(runs: &[Run<K>]) -> impl Iterator<Item = (u64, std::path::PathBuf)> {
        runs.iter().flat_map(|run| &run.parts).map(|part| (part.table.number, part.table.path.clone()))
    }
    of(&standing.rows).chain(of(&standing.tasks)).chain(of(&standing.records)).collect()
}

/// Puts newly made parts in the place of what was merged: up to a key, or everything.
fn replace_runs<K: TableKey>(
    runs: &mut Vec<Run<K>>,
    merged: &[u64],
    target: u64,
    tier: u8,
    made: Vec<Part<K>>,
    through: Option<&K>,
) {
    let is_merged = |run: &Run<K>| merged.contains(&run.id);
    match runs.iter_mut().find(|run| run.id == target) {
        Some(run) => run.parts.extend(made),
        None => {
            // Behind the oldest of them, and before what is older still.
            let place = runs.iter().rposition(is_merged).map_or(runs.len(), |last| last + 1);
            runs.insert(place, Run { id: target, tier, parts: made });
        }
    }
    match through {
        None => runs.retain(|run| !is_merged(run)),
        Some(key) => {
            for run in runs.iter_mut().filter(|run| is_merged(run)) {
                run.parts.retain(|part| part.table.last > *key);
                for part in &mut run.parts {
                    if part.table.first <= *key {
                        part.above = Some(key.clone());
                    }
                }
            }
        }
    }
    runs.retain(|run| !run.parts.is_empty());
}

/// The one that writes.
struct Writer {
    shared: Arc<Shared>,
    segment: Segment,
    acked: Acked,
    /// The last frame.
    last: u64,
    epochs: BTreeMap<ShardId, Epoch>,
}

/// What to say when a frame is durable.
enum Pending {
    Commit(Answer<()>),
    Take(Answer<Epoch>, ShardId, Epoch),
}

impl Pending {
    fn answer(self, answer: Result<(), StoreError>) {
        // Nobody may be waiting any more.
        match self {
            Pending::Commit(waiting) => drop(waiting.send(answer)),
            Pending::Take(waiting, _, epoch) => drop(waiting.send(answer.map(|()| epoch))),
        }
    }
}

/// A frame and where its payload ends; None if there was nothing to write.
type Written = Option<(Arc<Vec<u8>>, usize)>;

impl Writer {
    fn run(mut self, inbox: &Receiver<Request>) {
        loop {
            let first = match inbox.recv_timeout(LOOK_AGAIN) {
                Ok(first) => first,
                Err(RecvTimeoutError::Timeout) => {
                    self.flush_early();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut frame: Option<Batch> = None;
            let mut pending = Vec::new();
            let mut next = Some(first);
            while let Some(request) = next {
                self.gather(request, &mut frame, &mut pending);
                let full = frame.as_ref().is_some_and(|frame| frame.bytes.len() >= GATHER);
                next = if full { None } else { inbox.try_recv().ok() };
            }
            self.write(frame, pending);
        }
    }

    /// Adds a request to the frame, or refuses it.
    fn gather(&mut self, request: Request, frame: &mut Option<Batch>, pending: &mut Vec<Pending>) {
        if let Some(error) = self.shared.failed() {
            match request {
                Request::Commit { answer, .. } => drop(answer.send(Err(error))),
                Request::Take { answer, .. } => drop(answer.send(Err(error))),
                Request::Idle { answer } => drop(answer.send(Err(error))),
            }
            return;
        }
        match request {
            Request::Idle { answer } => {
                // Once more if the flusher was busy with what came before.
                self.shared.rest();
                self.flush_early();
                drop(answer.send(Ok(())));
            }
            Request::Take { shard, answer } => {
                let epoch = self.epochs.entry(shard).or_default();
                epoch.0 += 1;
                let mut batch = Batch::new();
                batch.put(Kind::Records, &layout::epoch_key(shard), &epoch.0.to_le_bytes());
                join(frame, batch);
                pending.push(Pending::Take(answer, shard, *epoch));
            }
            Request::Commit { shard, epoch, batch, answer } => {
                let current = self.epochs.get(&shard).copied().unwrap_or_default();
                // 0 is the epoch of a shard that nobody has taken, so it is no owner's.
                if epoch != current || epoch == Epoch(0) {
                    return drop(answer.send(Err(StoreError::Fenced { epoch, current })));
                }
                if batch.accepts
                    && let Err(error) = self.shared.room()
                {
                    return drop(answer.send(Err(error)));
                }
                join(frame, batch);
                pending.push(Pending::Commit(answer));
            }
        }
    }

    fn write(&mut self, frame: Option<Batch>, pending: Vec<Pending>) {
        let written = match frame {
            Some(frame) if frame.bytes.len() > log::FRAME_HEADER => self.append(frame.bytes),
            _ => Ok(None),
        };
        match written {
            Ok(None) => pending.into_iter().for_each(|pending| pending.answer(Ok(()))),
            Ok(Some((frame, end))) => {
                // Held before anybody knows of the commit, so that whoever knows of it reads it.
                let mut trees = self.shared.trees.write().unwrap_or_else(PoisonError::into_inner);
                pending.into_iter().for_each(|pending| pending.answer(Ok(())));
                let applied = trees.apply(&frame, log::FRAME_HEADER, end);
                drop(trees);
                self.flush_early();
                if applied.is_none() {
                    let what = "a commit could not be applied; this is a bug".into();
                    self.shared.fail(StoreError::Corrupt { what });
                }
            }
            Err(error) => {
                if matches!(error, StoreError::Full { .. }) {
                    // Nothing was written, so nobody took a shard.
                    for taken in &pending {
                        if let Pending::Take(_, shard, _) = taken {
                            self.epochs.entry(*shard).and_modify(|epoch| epoch.0 -= 1);
                        }
                    }
                } else {
                    self.shared.fail(error.clone());
                }
                pending.into_iter().for_each(|pending| pending.answer(Err(error.clone())));
            }
        }
    }

    /// Gives deletes to the flusher before the segment is full, if they would free much of what is in
    /// tables and it has nothing else to do.
    fn flush_early(&mut self) {
        let mostly_gone = {
            let trees = self.shared.trees();
            trees.rows.is_mostly_gone() || trees.tasks.is_mostly_gone()
        };
        if !mostly_gone || lock(&self.shared.background).flush.is_some() {
            return;
        }
        match self.rotate() {
            Ok(()) | Err(StoreError::Full { .. }) => {}
            Err(error) => self.shared.fail(error),
        }
    }

    /// Makes a frame durable. `Full` means that nothing was written; any other error that this is unknown.
    fn append(&mut self, mut frame: Vec<u8>) -> Result<Written, StoreError> {
        if frame.len() > LARGEST {
            let what = format!("a commit of {} bytes; at most {LARGEST} are possible", frame.len());
            return Err(StoreError::Full { what });
        }
        let full = self.segment.at + frame.len() as u64 > self.shared.options.segment;
        if full && !self.segment.is_empty() {
            self.rotate()?;
        }
        let end = frame.len();
        let unknown = |error: DirError| StoreError::Unavailable { what: error.to_string() };
        self.segment.append(self.last + 1, &mut frame).map_err(unknown)?;
        self.last += 1;
        let last = LastAcked { frame: self.last, segment: self.segment.number };
        self.acked.say(last).map_err(unknown)?;
        Ok(Some((Arc::new(frame), end)))
    }

    /// Hands what is in memory to the flusher and begins a new segment. Waits if the flusher or the merger
    /// is behind.
    fn rotate(&mut self) -> Result<(), StoreError> {
        let shared = &self.shared;
        let mut background = lock(&shared.background);
        loop {
            if let Some(error) = shared.failed() {
                return Err(error);
            }
            if shared.stop.load(Ordering::SeqCst) {
                return Err(StoreError::Unavailable { what: "the store is being closed".into() });
            }
            let no_room = if background.flush.is_some() {
                &background.no_room_to_flush
            } else if shared.most_runs() > MOST_RUNS {
                &background.no_room_to_merge
            } else {
                break;
            };
            if let Some(error) = no_room {
                return Err(StoreError::Full { what: error.to_string() });
            }
            background = shared.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
        }
        let (number, secret) = (self.segment.number + 1, self.segment.secret());
        let next = Segment::begin(&shared.dir.log(), number, self.last + 1, secret);
        let next = next.map_err(|error| StoreError::Unavailable { what: error.to_string() })?;
        let used = std::mem::replace(&mut self.segment, next);
        let mut trees = shared.trees_mut();
        background.flush = Some(Flush {
            rows: trees.rows.seal(),
            tasks: trees.tasks.seal(),
            records: trees.records.seal(),
            through: self.last,
            segment: used.number,
        });
        drop(trees);
        shared.turned.notify_all();
        Ok(())
    }
}

/// Adds a batch to those that travel in the same frame.
fn join(frame: &mut Option<Batch>, batch: Batch) {
    match frame {
        Some(frame) => frame.bytes.extend_from_slice(&batch.bytes[log::FRAME_HEADER..]),
        None => *frame = Some(batch),
    }
}
