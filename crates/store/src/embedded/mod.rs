//! The embedded store: one directory, no server, a sync before every acknowledgement.
//!
//! Commits go to a log ([`log`]) and to sorted maps in memory; from time to time what is in memory is
//! written into sorted tables ([`table`]), which are merged now and then ([`tree`]); the manifest
//! ([`manifest`]) says which of them count. Everything on disk has a checksum that is looked at when it
//! is read. Read `layout` for what a change becomes on disk, `engine` for who does what and when.

mod bytes;
mod engine;
mod files;
mod layout;
mod log;
mod manifest;
mod table;
mod tree;

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use evenhand_core::backlog::Level;
use evenhand_core::names::{Epoch, LaneId, QueueId, ShardId, TaskId};
use evenhand_core::{Change, Metadata, Row, Task};
use tokio::sync::oneshot;

use crate::{Listing, Page, Store, StoreError, Taken};
use engine::{Engine, Planted, Shared};
pub use files::{DirError, FORMAT};
use layout::{Batch, RecordKey, RowKey, TaskKey};
use table::Slot;

/// How a store is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the log after which what is in memory is written into tables. It bounds the memory (about
    /// twice as much, twice) and the time to open (a second for each 100 MiB or so).
    pub segment: u64,
    /// Free bytes of the file system below which no new tasks are accepted. Enough for finishing what was
    /// accepted: two segments, the tables that are made of them, and one merge.
    pub floor: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { segment: 32 * 1024 * 1024, floor: 512 * 1024 * 1024 }
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
    /// None while it is being opened again.
    engine: Mutex<Option<Engine>>,
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
        let engine = Mutex::new(Some(Engine::open(&dir, options.clone())?));
        Ok(Embedded { inner: Arc::new(Inner { dir, options, engine }) })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    fn engine(&self) -> MutexGuard<'_, Option<Engine>> {
        self.inner.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the engine something and waits for the answer.
    async fn ask<T>(
        &self,
        ask: impl FnOnce(&Engine) -> oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let asked = self.engine().as_ref().map(ask);
        let Some(asked) = asked else { return Err(self.unavailable("it is being opened again")) };
        asked.await.unwrap_or_else(|_| Err(self.unavailable("it was closed while the request was in flight")))
    }

    fn unavailable(&self, what: &str) -> StoreError {
        StoreError::Unavailable { what: format!("{}: {what}", self.inner.dir.display()) }
    }

    /// Opens the store again if it has failed.
    async fn mend(&self) -> Result<(), StoreError> {
        let failed = self.engine().as_ref().is_some_and(|engine| engine.shared.failed().is_some());
        if !failed {
            return Ok(());
        }
        let (answer, answered) = oneshot::channel();
        let store = self.clone();
        // Opening waits for the disk, which no caller should.
        std::thread::spawn(move || {
            let mut engine = store.engine();
            if engine.as_ref().is_some_and(|engine| engine.shared.failed().is_none()) {
                return drop(answer.send(Ok(())));
            }
            *engine = None;
            let opened = Engine::open(&store.inner.dir, store.inner.options.clone());
            drop(answer.send(opened.map(|opened| *engine = Some(opened))));
        });
        match answered.await {
            Ok(opened) => Ok(opened?),
            Err(_) => Err(self.unavailable("opening it again failed")),
        }
    }
}

impl Store for Embedded {
    async fn take(&self, shard: ShardId) -> Result<Taken, StoreError> {
        self.mend().await?;
        let epoch = self.ask(|engine| engine.take(shard)).await?;
        // Nobody but the new owner can change the shard from here on, so the metadata stands still.
        let metadata = self.ask(|engine| engine.read(move |shared| shared.metadata(shard))).await?;
        Ok(Taken { epoch, metadata })
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

    async fn read_task(&self, shard: ShardId, task: TaskId) -> Result<Option<Task>, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.task(shard, task))).await
    }

    async fn list_tasks(
        &self,
        shard: ShardId,
        queue: Option<QueueId>,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, StoreError> {
        self.ask(|engine| engine.read(move |shared| shared.list(shard, queue, after, limit))).await
    }
}

/// A row that has a right checksum and yet cannot be what we wrote.
fn unreadable(what: std::fmt::Arguments<'_>) -> StoreError {
    StoreError::Corrupt { what: format!("{what} cannot be read") }
}

impl Shared {
    /// What a key stands for.
    fn find<K: Planted>(&self, key: &K) -> Result<Option<bytes::Value>, StoreError> {
        let found = K::tree(&self.trees()).find(key);
        Ok(match found {
            Ok(Slot::Put(value)) => Some(value),
            Ok(Slot::Gone) => None,
            Err(runs) => tree::find_in(&runs, key)?,
        })
    }

    /// Rows in a range of keys, `limit` of them or all there are.
    fn rows<K: Planted>(
        &self,
        from: Bound<K>,
        to: Bound<K>,
        limit: usize,
    ) -> Result<Vec<(K, bytes::Value)>, StoreError> {
        let view = K::tree(&self.trees()).view(from, to, limit);
        Ok(view.rows()?)
    }

    fn page(&self, shard: ShardId, lane: LaneId, above: Level, limit: usize) -> Result<Page, StoreError> {
        let prefix = layout::lane_prefix(shard, lane);
        let view = {
            let trees = self.trees();
            let above = trees.acks.get(&prefix).map_or(above, |ack| above.max(*ack));
            let from = Bound::Excluded(layout::row_key(prefix, above));
            let to = Bound::Included(layout::row_key(prefix, Level::from_bytes([0xff; 16])));
            trees.rows.view(from, to, limit.saturating_add(1))
        };
        let mut found = view.rows()?;
        let end = found.len() <= limit;
        found.truncate(limit);
        let read = |(key, value): &(RowKey, bytes::Value)| {
            layout::row(key, value.bytes()).ok_or_else(|| {
                unreadable(format_args!("the row at {} of lane {lane}", layout::level_of(key)))
            })
        };
        let rows: Vec<Row> = found.iter().map(read).collect::<Result<_, _>>()?;
        Ok(Page { rows, end, deleted: 0 })
    }

    fn task(&self, shard: ShardId, id: TaskId) -> Result<Option<Task>, StoreError> {
        let key = layout::task_key(shard, id);
        let Some(value) = self.find(&key)? else { return Ok(None) };
        let moved = self.find(&layout::moved_key(shard, id))?;
        let aside = self.find(&layout::aside_key(shard, id))?;
        as_it_is(&key, &value, moved.as_ref(), aside.is_some()).map(Some)
    }

    fn list(
        &self,
        shard: ShardId,
        queue: Option<QueueId>,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let mut from = Bound::Excluded(layout::task_key(shard, after));
        let to = Bound::Included(layout::task_key(shard, TaskId(u64::MAX)));
        loop {
            let chunk = limit.saturating_add(1).min(1_000);
            let found = self.rows::<TaskKey>(from.clone(), to, chunk)?;
            let Some((last, _)) = found.last() else { return Ok(listing) };
            from = Bound::Excluded(*last);
            let (first, last) = (layout::task_of(&found[0].0), layout::task_of(last));
            let marks = |key: fn(ShardId, TaskId) -> RecordKey| {
                self.rows(Bound::Included(key(shard, first)), Bound::Included(key(shard, last)), usize::MAX)
            };
            let (moved, aside) = (marks(layout::moved_key)?, marks(layout::aside_key)?);
            let marked = |marks: &[(RecordKey, bytes::Value)], key: RecordKey| {
                let at = marks.binary_search_by(|(own, _)| own.cmp(&key));
                at.ok().map(|at| marks[at].1.clone())
            };
            let ended = found.len() < chunk;
            for (key, value) in &found {
                let id = layout::task_of(key);
                let moved = marked(&moved, layout::moved_key(shard, id));
                let aside = marked(&aside, layout::aside_key(shard, id));
                let task = as_it_is(key, value, moved.as_ref(), aside.is_some())?;
                if queue.is_some_and(|queue| task.lane.queue != queue) {
                    continue;
                }
                if listing.tasks.len() == limit {
                    listing.more = true;
                    return Ok(listing);
                }
                listing.tasks.push(task);
            }
            if ended {
                return Ok(listing);
            }
        }
    }

    fn metadata(&self, shard: ShardId) -> Result<Metadata, StoreError> {
        let mut metadata = Metadata::default();
        let mut aside = Vec::new();
        let mut from = Bound::Included(layout::record_key(shard, 0, &[]));
        let to = Bound::Excluded(layout::record_key(shard, 0xff, &[]));
        loop {
            let found = self.rows(from, to.clone(), 16_384)?;
            for (key, value) in &found {
                layout::tell(&mut metadata, &mut aside, key, value.bytes()).ok_or_else(|| {
                    unreadable(format_args!("the record {:?}", key.escape_ascii().to_string()))
                })?;
            }
            match found.last() {
                Some((last, _)) => from = Bound::Excluded(last.clone()),
                None => break,
            }
        }
        for id in aside {
            match self.task(shard, id)? {
                Some(task) => metadata.aside.push(task),
                None => return Err(unreadable(format_args!("task {id}, which is set aside,"))),
            }
        }
        Ok(metadata)
    }
}

/// A task as it was accepted, and what became of its place.
fn as_it_is(
    key: &TaskKey,
    value: &bytes::Value,
    moved: Option<&bytes::Value>,
    aside: bool,
) -> Result<Task, StoreError> {
    let wrong = || unreadable(format_args!("task {}", layout::task_of(key)));
    let mut task = layout::task(key, value.bytes()).ok_or_else(wrong)?;
    if let Some(moved) = moved {
        let moved = layout::moved(moved.bytes()).ok_or_else(wrong)?;
        task.level = Some(moved.level);
        task.attempt = moved.attempt;
        task.charge = moved.charge;
    }
    if aside {
        task.level = None;
    }
    Ok(task)
}
