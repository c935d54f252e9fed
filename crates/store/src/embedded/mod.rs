//! The embedded store: one directory, no server, a sync before every acknowledgement.
//!
//! Commits go to a log ([`log`]) and to sorted maps in memory; from time to time what is in memory is
//! written into sorted tables ([`table`]), which are merged now and then ([`tree`]); the manifest
//! ([`manifest`]) says which of them count. Everything on disk has a checksum that is looked at when it
//! is read. Read `layout` and `values` for what a change becomes on disk, `engine` for who does what and when, then
//! `opening`, `writer` and `background`; and `witness` for how a store knows that it is not an old copy of itself.

mod background;
mod bytes;
mod check;
mod engine;
mod files;
#[doc(hidden)]
pub mod fuzzing;
mod layout;
mod log;
mod manifest;
mod opening;
mod reads;
mod table;
mod tree;
mod trees;
mod witness;
mod writer;

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use evenhand_core::backlog::Level;
use evenhand_core::change::TimerRow;
use evenhand_core::names::{Epoch, Key, LaneId, ShardId, TaskId};
use evenhand_core::{Change, Task};
use tokio::sync::oneshot;

use crate::{History, Listing, Page, Store, StoreError, Taken, Wanted};
pub use check::{Checked, Info, Progress, QueueInfo, ShardInfo, TableInfo, WitnessInfo, check, info};
use engine::Engine;
pub use files::{DirError, FORMAT};
use layout::Batch;
use reads::Reads;

/// How a store is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the log after which what is in memory is written into tables. It bounds the memory (about
    /// twice as much, twice) and the time to open (a second for each 100 MiB or so). At most 1 GiB.
    pub segment: u64,
    /// Free bytes of the file system below which no new tasks are accepted, so that those that were can be
    /// finished. Merges leave a part of it to the flusher. 0: take all there is.
    pub floor: u64,
    /// Bytes after which a table is full and another begins. A merge takes as many of them as it merges
    /// layers, for a while; each is an open file.
    pub table: u64,
    /// The directory of the [witness](crate::Doubt), by which the store knows that it is not an old copy of itself: outside
    /// of its own, and never copied or put back with it. None: no witness is kept, and the store is taken for the
    /// newest copy. Keep one always or never: what happens without is seen by none.
    pub witness: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            segment: 32 * 1024 * 1024,
            floor: 512 * 1024 * 1024,
            table: 64 * 1024 * 1024,
            witness: None,
        }
    }
}

/// An open store. One process has it open at a time; clones share it.
#[derive(Clone)]
pub struct Embedded {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    options: Options,
    state: Mutex<State>,
}

enum State {
    Open(Engine),
    /// It has failed and is being opened again.
    Opening,
    /// It could not be opened again, yet.
    Closed(StoreError),
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "store {}", self.inner.dir.display())
    }
}

impl Embedded {
    /// Opens a store, and makes an empty or missing directory one.
    pub fn open(dir: impl AsRef<Path>, options: Options) -> Result<Embedded, DirError> {
        let dir = dir.as_ref().to_path_buf();
        let state = Mutex::new(State::Open(Engine::open(&dir, options.clone())?));
        Ok(Embedded { inner: Arc::new(Inner { dir, options, state }) })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// Waits until the work behind the commits is done: nothing to flush, nothing to merge. For those who
    /// measure; nobody else has to wait.
    pub async fn rest(&self) -> Result<(), StoreError> {
        self.ask(Engine::idle).await?;
        self.ask(|engine| {
            engine.read(|shared| {
                shared.rest();
                Ok(())
            })
        })
        .await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the engine, if there is one.
    fn with<T>(&self, with: impl FnOnce(&Engine) -> T) -> Result<T, StoreError> {
        match &*self.state() {
            State::Open(engine) => Ok(with(engine)),
            State::Opening => Err(self.unavailable("it is being opened again")),
            State::Closed(error) => Err(error.clone()),
        }
    }

    /// Asks the engine something and waits for the answer.
    async fn ask<T>(
        &self,
        ask: impl FnOnce(&Engine) -> oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let asked = self.with(ask)?;
        asked.await.unwrap_or_else(|_| Err(self.unavailable("it was closed while the request was in flight")))
    }

    fn unavailable(&self, what: &str) -> StoreError {
        StoreError::Unavailable { what: format!("{}: {what}", self.inner.dir.display()) }
    }

    /// Opens the store again if it has failed.
    async fn mend(&self) -> Result<(), StoreError> {
        let failed = {
            let mut state = self.state();
            match &*state {
                State::Open(engine) if engine.shared.failed().is_none() => return Ok(()),
                State::Opening => return Err(self.unavailable("it is being opened again")),
                State::Open(_) | State::Closed(_) => std::mem::replace(&mut *state, State::Opening),
            }
        };
        let (answer, answered) = oneshot::channel();
        let store = self.clone();
        // Opening waits for the disk, which no caller should.
        let open = move || {
            let opened = std::panic::catch_unwind(AssertUnwindSafe(|| {
                drop(failed);
                Ok(Engine::open(&store.inner.dir, store.inner.options.clone())?)
            }));
            let opened = opened.unwrap_or_else(|_| Err(store.unavailable("opening it again panicked")));
            let (state, result) = match opened {
                Ok(engine) => (State::Open(engine), Ok(())),
                Err(error) => (State::Closed(error.clone()), Err(error)),
            };
            *store.state() = state;
            drop(answer.send(result));
        };
        if let Err(error) = std::thread::Builder::new().name("store opener".into()).spawn(open) {
            let error = self.unavailable(&format!("starting a thread to open it again: {error}"));
            *self.state() = State::Closed(error.clone());
            return Err(error);
        }
        answered.await.unwrap_or_else(|_| Err(self.unavailable("opening it again failed")))
    }
}

impl Store for Embedded {
    async fn take(&self, shard: ShardId, shown: Option<Epoch>) -> Result<Taken, StoreError> {
        self.mend().await?;
        let (epoch, doubt) = self.ask(|engine| engine.take(shard, shown)).await?;
        let read = |engine: &Engine| engine.read(move |shared| shared.metadata(shard, &mut |_| {}));
        let metadata = self.ask(read).await;
        if metadata.is_err() {
            // A successor may have ended a task that we were about to read.
            self.ask(|engine| engine.commit(shard, epoch, Batch::new())).await?;
        }
        Ok(Taken { epoch, metadata: metadata?, doubt })
    }

    fn room(&self) -> Result<(), StoreError> {
        self.with(|engine| engine.shared.room())?
    }

    async fn commit(&self, shard: ShardId, epoch: Epoch, changes: Vec<Change>) -> Result<(), StoreError> {
        let batch = Batch::of(shard, &changes);
        self.ask(|engine| engine.commit(shard, epoch, batch)).await
    }

    async fn read_lane(
        &self,
        shard: ShardId,
        lane: LaneId,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.page(shard, lane, above, limit))).await
    }

    async fn read_timers(
        &self,
        shard: ShardId,
        above: Level,
        limit: usize,
    ) -> Result<Page<TimerRow>, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.timers(shard, above, limit))).await
    }

    async fn read_parked(
        &self,
        shard: ShardId,
        lane: LaneId,
        key: Key,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.parked(shard, lane, &key, above, limit))).await
    }

    async fn read_task(&self, shard: ShardId, task: TaskId) -> Result<Option<Task>, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.task(shard, task))).await
    }

    async fn read_history(&self, shard: ShardId, task: TaskId) -> Result<History, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.history(shard, task))).await
    }

    async fn list_tasks(
        &self,
        shard: ShardId,
        wanted: Wanted,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.list(shard, wanted, after, limit))).await
    }
}
