//! Where Evenhand remembers. One trait with few coarse methods, one suite that every backend passes
//! unchanged ([`conformance`]), one module per backend.
//!
//! What a store promises, and nothing more is needed:
//! - a commit is atomic and, once acknowledged, durable;
//! - a commit under an epoch that is no longer the shard's changes nothing, deletes included;
//! - [`Store::take`] raises the epoch and reads the metadata in one atomic step, so that a delayed write of
//!   an earlier owner either happened before and is seen, or fails;
//! - reads see every commit acknowledged before they began.

mod bytes;
pub mod conformance;
pub mod embedded;
mod memory;
pub mod postgres;
mod values;

use std::future::Future;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use evenhand_core::backlog::Level;
use evenhand_core::change::{EndRecord, TimerRow, Try};
use evenhand_core::names::{Epoch, Key, LaneId, QueueId, ShardId, TaskId};
use evenhand_core::{Change, Metadata, Row, Task};

pub use embedded::Embedded;
pub use memory::{Fault, Flaw, Memory, Tables};
pub use postgres::Postgres;

/// A place that remembers shards. Cheap to share between owners.
pub trait Store: Send + Sync {
    /// Makes the caller the owner: raises the shard's epoch and returns what an owner must know. A shard
    /// that does not exist begins empty.
    ///
    /// `shown` is an epoch that a worker has obeyed and of which this store knows nothing: so it is an old copy of
    /// itself. The new epoch is above that one too, and in the same durable write the metadata's
    /// [doubt](Metadata::doubt) becomes `u64::MAX`, whatever it was before. An epoch beyond [`LAST_SHOWN`] is
    /// refused as [`StoreError::Full`].
    fn take(
        &self,
        shard: ShardId,
        shown: Option<Epoch>,
    ) -> impl Future<Output = Result<Taken, StoreError>> + Send;

    /// Whether new tasks would be accepted: an owner asks before it accepts any. Finishing tasks needs no
    /// such room. An error says what is full.
    fn room(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Makes the changes durable, all or none, in their order, if the epoch is still the shard's (an empty
    /// list only asks that). An owner sends its commits one after the other: the next one only when the
    /// last has been acknowledged, and none after one that was not.
    fn commit(
        &self,
        shard: ShardId,
        epoch: Epoch,
        changes: Vec<Change>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Reads rows of a lane above a level, in order: `limit` of them, or all there are. Starts at that
    /// level: what was deleted below it must cost nothing. The last lane that there could be, of the last queue,
    /// is no owner's: a store may have a use for it.
    fn read_lane(
        &self,
        shard: ShardId,
        lane: LaneId,
        above: Level,
        limit: usize,
    ) -> impl Future<Output = Result<Page, StoreError>> + Send;

    /// Reads timers above a level, in order, as [`Store::read_lane`] reads rows.
    fn read_timers(
        &self,
        shard: ShardId,
        above: Level,
        limit: usize,
    ) -> impl Future<Output = Result<Page<TimerRow>, StoreError>> + Send;

    /// Reads rows of a key that are parked beside a lane, those above a level, in order, as [`Store::read_lane`]
    /// reads rows.
    fn read_parked(
        &self,
        shard: ShardId,
        lane: LaneId,
        key: Key,
        above: Level,
        limit: usize,
    ) -> impl Future<Output = Result<Page, StoreError>> + Send;

    /// Reads one task; one that has ended, too, as long as its end is remembered.
    fn read_task(
        &self,
        shard: ShardId,
        task: TaskId,
    ) -> impl Future<Output = Result<Option<Task>, StoreError>> + Send;

    /// Reads what became of a task: its tries before the last one, in order, and its end.
    fn read_history(
        &self,
        shard: ShardId,
        task: TaskId,
    ) -> impl Future<Output = Result<History, StoreError>> + Send;

    /// Lists tasks by id, those after `after` that are wanted: `limit` of them, or all there are; or fewer,
    /// where one read would be too much (see [`Listing::more`]).
    fn list_tasks(
        &self,
        shard: ShardId,
        wanted: Wanted,
        after: TaskId,
        limit: usize,
    ) -> impl Future<Output = Result<Listing, StoreError>> + Send;
}

/// The last epoch that a worker may show when a shard is taken: there is room above it for as many takes as anybody
/// could need.
pub const LAST_SHOWN: Epoch = Epoch(1 << 62);

/// What a new owner gets.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// Its epoch.
    pub epoch: Epoch,
    /// What it must know before it starts anything.
    pub metadata: Metadata,
    /// Why the store is taken for an old copy of itself, if this take found a reason. There may be doubt in the
    /// metadata without one: an earlier take found it.
    pub doubt: Option<Doubt>,
}

/// Why a store is taken for an old copy of itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// A worker has obeyed an epoch that the store knows nothing of.
    #[error("a worker has obeyed epoch {shown}, and the store is at {current}")]
    Shown {
        /// The worker's.
        shown: Epoch,
        /// The store's, before the shard was taken.
        current: Epoch,
    },
    /// The store is not the one that its witness saw last.
    #[error("it is at stamp {store}, and its witness {} has seen another one, stamp {witness}", file.display())]
    Behind {
        /// The witness.
        file: PathBuf,
        /// The number of the store's last stamp.
        store: u64,
        /// That of the witness's: as a rule a higher one.
        witness: u64,
    },
    /// Its witness is gone.
    #[error("its witness {} is missing", file.display())]
    Missing {
        /// The witness.
        file: PathBuf,
    },
    /// Its witness says nothing that can be understood.
    #[error("its witness {} cannot be read: {what}", file.display())]
    Unreadable {
        /// The witness.
        file: PathBuf,
        /// Why not.
        what: String,
    },
    /// It was used before, and kept no witness.
    #[error("it has kept no witness so far")]
    Unwitnessed,
    /// It is in another cluster of PostgreSQL than it was, or on another timeline: a copy was restored, or a standby
    /// promoted.
    #[error("it was in cluster {before}, and is in cluster {now} now")]
    Cluster {
        /// Where it was.
        before: String,
        /// Where it is.
        now: String,
    },
    /// An earlier take found that it is an old copy, and this shard is not in it.
    #[error("it was an old copy once, which may have lacked this shard")]
    Shard,
}

/// The epoch of the next owner; an error if there is none above what was shown.
fn next_epoch(current: Epoch, shown: Option<Epoch>) -> Result<Epoch, StoreError> {
    match shown {
        Some(shown) if shown > LAST_SHOWN => Err(StoreError::Full {
            what: format!("a worker has shown epoch {shown}; there are none above {LAST_SHOWN} to take"),
        }),
        Some(shown) => Ok(Epoch(current.max(shown).0 + 1)),
        None => Ok(Epoch(current.0 + 1)),
    }
}

/// Rows of a lane, or parked beside one, or timers.
#[derive(Clone, Debug, PartialEq)]
pub struct Page<R = Row> {
    /// In order of their levels.
    pub rows: Vec<R>,
    /// No row is above them.
    pub end: bool,
    /// Deleted rows that had to be passed over to find these, where the store can tell.
    pub deleted: u64,
}

/// What became of a task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Its tries that ended and were followed by another, the last [`TRIES_KEPT`](evenhand_core::bounds::TRIES_KEPT).
    pub tries: Vec<Try>,
    /// How it ended, if it has.
    pub end: Option<EndRecord>,
    /// The task that runs it again, if somebody asked for that: the latest one.
    pub replayed_as: Option<TaskId>,
}

/// Which tasks a listing wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Of this queue only.
    pub queue: Option<QueueId>,
    /// Only those that have ended, or only those that have not.
    pub ended: Option<bool>,
}

/// Some tasks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// In order of their ids.
    pub tasks: Vec<Task>,
    /// There are more after this task. A listing is full then, unless [many](LISTING_TASKS) that are not wanted
    /// or [many bytes](LISTING_BYTES) were read for it: then there may be more.
    pub more: Option<TaskId>,
}

/// A listing ends, full or not, when its payloads are about so many bytes.
pub const LISTING_BYTES: usize = 4 * 1024 * 1024;
/// And when so many tasks were passed over for it.
pub const LISTING_TASKS: usize = 20_000;

/// What can go wrong, by what the owner has to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Another owner has taken the shard. Nothing was changed. Stop.
    #[error("the shard is at epoch {current}, this owner's is {epoch}: another owner has taken it")]
    Fenced {
        /// The caller's epoch.
        epoch: Epoch,
        /// The shard's.
        current: Epoch,
    },
    /// The store did not answer. A commit may or may not have happened: drop the shard, take it again.
    #[error("the store did not answer ({what}); whether the last commit happened is unknown")]
    Unavailable {
        /// What was tried.
        what: String,
    },
    /// What is stored cannot be what was written. Stop and tell the operator.
    #[error("the store is damaged: {what}")]
    Corrupt {
        /// Where, and what is wrong.
        what: String,
    },
    /// There is no room. Nothing was changed. Take the shard again when there is.
    #[error("the store is full: {what}")]
    Full {
        /// Which limit.
        what: String,
    },
}

/// Waits for a future on this thread. For programs without a runtime; in one, await it.
pub fn wait<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

/// The value of a future that is ready at once, as those of the memory store are.
///
/// # Panics
/// If it is not ready: then it needs a real runtime.
pub fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("this store's futures need a runtime"),
    }
}
