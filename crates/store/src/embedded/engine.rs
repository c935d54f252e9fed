//! The engine: one directory, opened by one process. Its threads:
//! - the **writer** gathers commits into a frame, writes and syncs it, acknowledges, and only then
//!   applies it to memory, so that callers already prepare their next commit; reads wait for it;
//! - the **flusher** turns what is in memory into tables when a segment of the log is full;
//! - the **merger** keeps the layers few and gives room back;
//! - two **readers** do what may have to wait for the disk, so that callers never do.
//!
//! After a failed write or sync nothing is tried again on the same state: whether the disk has what was
//! written is unknown, and asking again would only get a wrong answer. The engine fails as a whole and is
//! opened again from what is on disk. Opening writes everything that the log holds into new tables: what
//! it read may have come from a cache that the disk never saw.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, JoinHandle};

use evenhand_core::names::{Epoch, ShardId};
use tokio::sync::oneshot;

use super::Options;
use super::files::{Dir, DirError, FORMAT};
use super::layout::{Batch, RecordKey, RowKey, TaskKey};
use super::log::{Acked, LastAcked};
use super::manifest::Standing;
use super::opening::{begin, checkpoint, load, raise_open_files};
use super::reads::Reads;
use super::tree::Memory;
use super::trees::Trees;
use super::witness::{self, Witness};
use super::writer::{LARGEST, Writer};
use crate::{Doubt, StoreError};

/// What the threads share.
pub(super) struct Shared {
    pub(super) dir: Dir,
    pub(super) options: Options,
    pub(super) trees: RwLock<Trees>,
    /// What the manifest says. Held while it is changed.
    pub(super) standing: Mutex<Standing>,
    pub(super) next_table: AtomicU64,
    pub(super) stop: AtomicBool,
    pub(super) failed: Mutex<Option<StoreError>>,
    pub(super) has_failed: AtomicBool,
    pub(super) background: Mutex<Background>,
    /// Something in the background has changed.
    pub(super) turned: Condvar,
}

/// What goes on behind the writer.
#[derive(Default)]
pub(super) struct Background {
    /// What is to be flushed, or is being flushed.
    pub(super) flush: Option<Flush>,
    /// The merger should look.
    pub(super) merge: bool,
    /// The merger is looking.
    pub(super) merging: bool,
    /// Why the flusher waits.
    pub(super) no_room_to_flush: Option<DirError>,
    /// Why the merger waits.
    pub(super) no_room_to_merge: Option<DirError>,
}

#[derive(Clone)]
pub(super) struct Flush {
    pub(super) rows: Arc<Memory<RowKey>>,
    pub(super) tasks: Arc<Memory<TaskKey>>,
    pub(super) records: Arc<Memory<RecordKey>>,
    /// The last frame of it.
    pub(super) through: u64,
    /// Its segment.
    pub(super) segment: u64,
}

pub(super) enum Request {
    Commit {
        shard: ShardId,
        epoch: Epoch,
        batch: Batch,
        answer: Answer<()>,
    },
    Take {
        shard: ShardId,
        shown: Option<Epoch>,
        answer: Answer<(Epoch, Option<Doubt>)>,
    },
    /// Answered when everything acknowledged before it has been applied, and flushed if that is worth it.
    Idle {
        answer: Answer<()>,
    },
}

pub(super) type Answer<T> = oneshot::Sender<Result<T, StoreError>>;
type Job = Box<dyn FnOnce(&Shared) + Send>;

/// An open store. Dropping it stops its threads and gives the directory free; nothing is written then.
pub(super) struct Engine {
    pub(super) shared: Arc<Shared>,
    // Neither is bounded by itself: whoever asks waits for the answer, so callers are the bound.
    requests: Option<Sender<Request>>,
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub(super) fn open(path: &Path, options: Options) -> Result<Engine, DirError> {
        let options = Options { segment: options.segment.min(LARGEST as u64), ..options };
        raise_open_files();
        let dir = Dir::open(path)?;
        if let Some(witness) = &options.witness {
            witness::prepare(witness, path)?;
        }
        let format = dir.format()?;
        if format.is_none() {
            begin(&dir, &options)?;
        }
        let loaded = load(&dir)?;
        if format.is_some_and(|format| format < FORMAT) {
            dir.mark()?; // before anything is written that the old format does not know
        }
        let mut epochs = BTreeMap::new();
        for shard in loaded.shards()? {
            epochs.insert(shard, loaded.epoch(shard)?);
        }
        let (last, saved) = (loaded.replayed.last, loaded.witness()?);
        let (standing, trees, segment) = checkpoint(&dir, &options, loaded)?;
        let acked = Acked::open(&dir.path)?;
        acked.say(LastAcked { frame: last, segment: segment.number })?;
        let witness = options.witness.as_ref();
        let witness = witness.map(|dir| Witness::open(dir, path, saved, epochs.is_empty())).transpose()?;

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
        let writer = Writer { shared: shared.clone(), segment, acked, last, epochs, witness };
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

    pub(super) fn take(
        &self,
        shard: ShardId,
        shown: Option<Epoch>,
    ) -> oneshot::Receiver<Result<(Epoch, Option<Doubt>), StoreError>> {
        let (answer, answered) = oneshot::channel();
        self.send(Request::Take { shard, shown, answer });
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

impl Reads for Shared {
    /// Waits while a commit is being applied.
    fn with<T>(&self, look: impl FnOnce(&Trees) -> T) -> T {
        look(&self.trees())
    }
}

impl Shared {
    pub(super) fn trees(&self) -> RwLockReadGuard<'_, Trees> {
        self.trees.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn trees_mut(&self) -> RwLockWriteGuard<'_, Trees> {
        self.trees.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the engine has failed, if it has.
    pub(super) fn failed(&self) -> Option<StoreError> {
        if self.has_failed.load(Ordering::Acquire) { lock(&self.failed).clone() } else { None }
    }

    pub(super) fn fail(&self, error: StoreError) {
        lock(&self.failed).get_or_insert(error);
        self.has_failed.store(true, Ordering::Release);
        drop(lock(&self.background));
        self.turned.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
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

    pub(super) fn most_layers(&self) -> usize {
        let trees = self.trees();
        trees.rows.layers.len().max(trees.tasks.layers.len()).max(trees.records.layers.len())
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
}
