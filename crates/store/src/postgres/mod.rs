//! The PostgreSQL store: for teams that have one, and for several servers that share it. Tables that a person can query
//! (see the views in `sql/0001_tables.sql`), a commit that is one statement and so one round trip, an epoch that is
//! checked in it.
//!
//! Read `sql/` first: what is remembered, and what is done to it. Then `effects` (what a list of changes comes to),
//! `writing` and `columns` (how that becomes a statement), `reading` (and back), `line` (connections), `migrations`, and
//! `address`, `tls` and `errors`, which are as their names say.
//!
//! **Fencing.** A commit locks its shard's row, compares the epoch and changes what it changes, in one transaction; a take
//! locks the same row, raises the epoch and reads the metadata. So whichever comes first is over before the other goes on.
//!
//! **Old copies.** The store remembers which cluster it is in, and on which timeline. A copy that was restored, or a
//! standby that was promoted, has another timeline, and may lack what was acknowledged: the take that finds it is
//! [in doubt](crate::Doubt), for all shards, and a commit of somebody who took a shard before is refused, so that it is
//! taken again. (A file system that was put back, with the server's own files, cannot be told from a crash.)

mod address;
mod columns;
mod effects;
mod errors;
mod line;
mod migrations;
mod reading;
mod tls;
mod writing;

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use evenhand_core::backlog::Level;
use evenhand_core::change::TimerRow;
use evenhand_core::names::{Epoch, Key, LaneId, ShardId, TaskId};
use evenhand_core::{Change, Task};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row as Found};

use crate::{
    Doubt, History, LAST_SHOWN, LISTING_BYTES, LISTING_TASKS, Listing, Page, Store, StoreError, Taken, Wanted,
};
use columns::Sorted;
use effects::Effects;
pub use errors::OpenError;
use line::{Line, Live, Way, in_time};
use reading::METADATA;

/// How a store is used.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long anything may take, connecting included, before it counts as not answered.
    pub limit: Duration,
    /// Connections for commits. A shard uses one of them; more than shards are never made.
    pub commits: usize,
    /// Connections for reads.
    pub reads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { limit: Duration::from_secs(10), commits: 4, reads: 2 }
    }
}

/// For how long there is no room after the database had none, if nothing has been written since. Then it is tried again.
const FULL: Duration = Duration::from_secs(10);

/// How long bringing the schema up to date may wait for others that do the same.
const MIGRATION: Duration = Duration::from_secs(60);

/// An open store. Clones share it. Its futures need the runtime that it was opened in.
#[derive(Clone)]
pub struct Postgres {
    inner: Arc<Inner>,
}

struct Inner {
    way: Way,
    commits: Vec<Line>,
    reads: Vec<Line>,
    next_read: AtomicUsize,
    /// Takes are transactions of several statements: one at a time has the line.
    takes: tokio::sync::Mutex<Line>,
    /// When the database was full last, and what it said.
    full: Mutex<Option<(Instant, String)>>,
}

impl std::fmt::Debug for Postgres {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the PostgreSQL store in schema {}", self.schema())
    }
}

impl Postgres {
    /// Opens the store at an address, `postgres://…?schema=evenhand`, and brings its schema up to date.
    pub async fn open(address: &str, options: Options) -> Result<Postgres, OpenError> {
        let address: address::Address = address.parse()?;
        let way = Way { tls: tls::connector(&address)?, address, limit: options.limit };
        let live = way.connect().await.map_err(|what| OpenError::Unreachable { what })?;
        check_encoding(&live).await?;
        migrations::migrate(&live.client, &way.address.schema, MIGRATION.max(way.limit)).await?;
        let lines = |number: usize| (0..number.max(1)).map(|_| Line::default()).collect();
        let inner = Inner {
            way,
            commits: lines(options.commits),
            reads: lines(options.reads),
            next_read: AtomicUsize::new(0),
            takes: tokio::sync::Mutex::new(Line::new(live)),
            full: Mutex::default(),
        };
        Ok(Postgres { inner: Arc::new(inner) })
    }

    fn schema(&self) -> &str {
        &self.inner.way.address.schema
    }

    /// Reads with a statement about a shard. What it says of the schema is filled in.
    async fn read(
        &self,
        what: &str,
        shard: ShardId,
        statement: &str,
        others: &[line::Parameter<'_>],
    ) -> Result<Vec<Found>, StoreError> {
        let shard = writing::shard(shard);
        let mut parameters: Vec<line::Parameter<'_>> = vec![(&shard, Type::INT4)];
        parameters.extend(others.iter().cloned());
        let turn = self.inner.next_read.fetch_add(1, Ordering::Relaxed);
        let line = &self.inner.reads[turn % self.inner.reads.len()];
        line.read(&self.inner.way, what, statement, &parameters).await
    }

    /// Notes whether the database is full.
    fn note<T>(&self, answer: &Result<T, StoreError>) {
        let full = match answer {
            Ok(_) => None,
            Err(StoreError::Full { what }) => Some((Instant::now(), what.clone())),
            Err(StoreError::Fenced { .. } | StoreError::Unavailable { .. } | StoreError::Corrupt { .. }) => {
                return;
            }
        };
        *self.inner.full.lock().unwrap_or_else(PoisonError::into_inner) = full;
    }
}

async fn check_encoding(live: &Live) -> Result<(), OpenError> {
    let asked = live.client.query_typed("SELECT current_setting('server_encoding')", &[]).await;
    let found = asked.map_err(|error| OpenError::Unreachable { what: errors::told(&error) })?;
    match found.first().map_or("", |row| row.get(0)) {
        "UTF8" => Ok(()),
        other => Err(OpenError::Encoding { encoding: other.into() }),
    }
}

/// A limit as PostgreSQL counts, and one more, to see whether there is more.
fn one_more(limit: usize) -> i64 {
    i64::try_from(limit.saturating_add(1)).unwrap_or(i64::MAX)
}

/// A task's number, or a number above all tasks'.
fn number(task: TaskId) -> i64 {
    i64::try_from(task.0).unwrap_or(i64::MAX)
}

/// A page of what was found in the order of levels: one more than wanted if there is more.
fn page<R>(mut rows: Vec<R>, limit: usize) -> Page<R> {
    let end = rows.len() <= limit;
    rows.truncate(limit);
    // What was deleted above the ack level, and not vacuumed away yet, is passed over unseen.
    Page { rows, end, deleted: 0 }
}

impl Store for Postgres {
    async fn take(&self, shard: ShardId, shown: Option<Epoch>) -> Result<Taken, StoreError> {
        if shown.is_some_and(|shown| shown > LAST_SHOWN) {
            crate::next_epoch(Epoch(0), shown)?;
        }
        let line = self.inner.takes.lock().await;
        let live = line.live(&self.inner.way).await?;
        let answers = taking(self.schema(), &live.client, shard, shown, self.inner.way.limit);
        let answers = in_time(&self.inner.way, "take", &live, answers).await?;
        let (taken, metadata) = answers.map_err(|error| errors::meaning("take", None, &error))?;
        let (epoch, doubt) = taken_as(&taken, shown)?;
        Ok(Taken { epoch, metadata: reading::metadata(&metadata)?, doubt })
    }

    fn room(&self) -> Result<(), StoreError> {
        match &*self.inner.full.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((when, what)) if when.elapsed() < FULL => Err(StoreError::Full { what: what.clone() }),
            Some(_) | None => Ok(()),
        }
    }

    async fn commit(&self, shard: ShardId, epoch: Epoch, changes: Vec<Change>) -> Result<(), StoreError> {
        let writes = !changes.is_empty();
        let effects = Effects::of(changes);
        let call = writing::commit(self.schema(), shard, epoch, writes, &effects);
        let parameters: Vec<line::Parameter<'_>> =
            call.columns.iter().map(|(value, kind)| (&**value as _, kind.clone())).collect();
        let line = &self.inner.commits[shard.0 as usize % self.inner.commits.len()];
        let answer = line.once(&self.inner.way, "commit", Some(epoch), &call.statement(), &parameters).await;
        self.note(&answer);
        answer.map(drop)
    }

    async fn read_lane(
        &self,
        shard: ShardId,
        lane: LaneId,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        let statement = format!("SELECT * FROM {}.read_lane($1, $2, $3, $4, $5, $6)", self.schema());
        let others: [line::Parameter<'_>; 5] = [
            (&writing::queue(lane.queue), Type::INT4),
            (&i16::from(lane.priority.0), Type::INT2),
            (&i16::from(lane.class.0), Type::INT2),
            (&Sorted::from(above), Type::BYTEA),
            (&one_more(limit), Type::INT8),
        ];
        let found = self.read("read a lane", shard, &statement, &others).await?;
        Ok(page(reading::all("tasks", &found, reading::row)?, limit))
    }

    async fn read_timers(
        &self,
        shard: ShardId,
        above: Level,
        limit: usize,
    ) -> Result<Page<TimerRow>, StoreError> {
        let statement = format!("SELECT * FROM {}.read_timers($1, $2, $3)", self.schema());
        let others: [line::Parameter<'_>; 2] =
            [(&Sorted::from(above), Type::BYTEA), (&one_more(limit), Type::INT8)];
        let found = self.read("read timers", shard, &statement, &others).await?;
        // As many of both sorts, of which the first count.
        let mut timers = reading::all("timers", &found, reading::timer)?;
        timers.sort_by_key(|timer| timer.at);
        Ok(page(timers, limit))
    }

    async fn read_parked(
        &self,
        shard: ShardId,
        lane: LaneId,
        key: Key,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        let statement = format!("SELECT * FROM {}.read_parked($1, $2, $3, $4, $5, $6, $7)", self.schema());
        let others: [line::Parameter<'_>; 6] = [
            (&writing::queue(lane.queue), Type::INT4),
            (&i16::from(lane.priority.0), Type::INT2),
            (&i16::from(lane.class.0), Type::INT2),
            (&key.as_str(), Type::TEXT),
            (&Sorted::from(above), Type::BYTEA),
            (&one_more(limit), Type::INT8),
        ];
        let found = self.read("read parked rows", shard, &statement, &others).await?;
        Ok(page(reading::all("tasks", &found, reading::row)?, limit))
    }

    async fn read_task(&self, shard: ShardId, task: TaskId) -> Result<Option<Task>, StoreError> {
        let statement =
            format!("SELECT {} FROM {}.tasks WHERE shard = $1 AND id = $2", reading::TASK, self.schema());
        let others: [line::Parameter<'_>; 1] = [(&number(task), Type::INT8)];
        let found = self.read("read a task", shard, &statement, &others).await?;
        reading::first("tasks", &found, reading::task)
    }

    async fn read_history(&self, shard: ShardId, task: TaskId) -> Result<History, StoreError> {
        let others: [line::Parameter<'_>; 1] = [(&number(task), Type::INT8)];
        let statement = reading::history_of(self.schema());
        let found = self.read("read a task's history", shard, &statement, &others).await?;
        reading::history(&found)
    }

    async fn list_tasks(
        &self,
        shard: ShardId,
        wanted: Wanted,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, StoreError> {
        let statement = format!("SELECT * FROM {}.list_tasks($1, $2, $3, $4, $5, $6, $7)", self.schema());
        let others: [line::Parameter<'_>; 6] = [
            (&wanted.queue.map(writing::queue), Type::INT4),
            (&wanted.ended, Type::BOOL),
            (&number(after), Type::INT8),
            (&i64::try_from(limit).unwrap_or(i64::MAX), Type::INT8),
            (&(LISTING_BYTES as i64), Type::INT8),
            (&(LISTING_TASKS as i64), Type::INT8),
        ];
        let mut found = self.read("list tasks", shard, &statement, &others).await?;
        let more = found.pop_if(|row| row.try_get("is_task").is_ok_and(|is: bool| !is));
        let more = more.and_then(|row| row.try_get::<_, i64>("id").ok()).map(|id| TaskId(id as u64));
        Ok(Listing { tasks: reading::all("tasks", &found, reading::task)?, more })
    }
}

/// An answer to a statement.
type Answer<'a> = Pin<Box<dyn Future<Output = Result<Vec<Found>, Error>> + Send + 'a>>;

/// Takes a shard and reads its metadata, in one transaction that travels in one go: whoever gives up half way leaves
/// none open.
async fn taking(
    schema: &str,
    client: &Client,
    shard: ShardId,
    shown: Option<Epoch>,
    limit: Duration,
) -> Result<(Vec<Found>, [Vec<Found>; METADATA.len()]), Error> {
    // The timeouts are for a server that hears of us no more, in the middle of it all.
    let begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL enable_seqscan = off; SET LOCAL jit = off; \
         SET LOCAL statement_timeout = {0}; SET LOCAL idle_in_transaction_session_timeout = {0}",
        limit.as_millis()
    );
    let (shard, shown) = (writing::shard(shard), shown.map(|shown| shown.0 as i64));
    let take = format!("SELECT * FROM {schema}.take($1, $2)");
    let reads = METADATA.map(|(columns, from)| format!("SELECT {columns} FROM {schema}.{from}"));
    let simple = |statement| -> Answer<'_> {
        Box::pin(async move { client.batch_execute(statement).await.map(|()| Vec::new()) })
    };
    let of: [line::Parameter<'_>; 2] = [(&shard, Type::INT4), (&shown, Type::INT8)];
    let mut all: Vec<Answer<'_>> = vec![simple(&begin)];
    all.push(Box::pin(client.query_typed(&take, &of)));
    let (of_shard, of_client) = (&of[..1], client);
    all.extend(reads.iter().map(|read| -> Answer<'_> { Box::pin(of_client.query_typed(read, of_shard)) }));
    all.push(simple("COMMIT"));
    let mut answers = together(all).await.into_iter();
    // The first error is the one that counts: the others say that it happened.
    let mut next = || answers.next().unwrap_or_else(|| Ok(Vec::new()));
    next()?;
    let taken = next()?;
    let mut metadata = [const { Vec::new() }; METADATA.len()];
    for table in &mut metadata {
        *table = next()?;
    }
    next()?;
    Ok((taken, metadata))
}

/// Waits for all of them. All are begun at once, in their order, and so are sent.
async fn together<T>(mut all: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
    let mut answers: Vec<Option<T>> = all.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, answer) in all.iter_mut().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
            if let Poll::Ready(value) = future.as_mut().poll(context) {
                *answer = Some(value);
            }
        }
        if answers.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}

/// The epoch that a take gave, and why the store is taken for an old copy.
fn taken_as(found: &[Found], shown: Option<Epoch>) -> Result<(Epoch, Option<Doubt>), StoreError> {
    let taken = reading::first("shards", found, |row| {
        let epoch = |column| row.try_get::<_, i64>(column).ok().map(|epoch| Epoch(epoch as u64));
        let truth = |column| row.try_get::<_, bool>(column).ok();
        let name = |cluster, timeline| {
            let cluster: Option<i64> = row.try_get(cluster).ok()?;
            let timeline: Option<i32> = row.try_get(timeline).ok()?;
            let said = |number: Option<i64>| number.map_or("unknown".into(), |number| number.to_string());
            Some(format!("{}, timeline {}", said(cluster), said(timeline.map(i64::from))))
        };
        let (before, now) = (name("old_cluster", "old_timeline")?, name("new_cluster", "new_timeline")?);
        let doubt = match (shown, truth("differs")?, truth("is_new")? && truth("was_old")?) {
            (Some(shown), _, _) => Some(Doubt::Shown { shown, current: epoch("old_epoch")? }),
            (None, true, _) => Some(Doubt::Cluster { before, now }),
            (None, false, true) => Some(Doubt::Shard),
            (None, false, false) => None,
        };
        Some((epoch("new_epoch")?, doubt))
    })?;
    taken.ok_or_else(|| errors::corrupt("a take had no answer".into()))
}
