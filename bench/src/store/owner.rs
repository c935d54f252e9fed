//! An owner without a core: makes the changes that a shard's owner would make, for tasks whose places it
//! decides by the simplest fair rule, and hands them to the store.
//!
//! Keys have weights 1, 2 and 4 and get as many tasks each, so that tasks of one commit land in three parts
//! of the lane, as they do where tenants differ. Finishing goes by level, read forward from the ack level
//! in pages, as a window reads; rows accepted below what was read join what was read, as in a window.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, Place, QueueRecord, Totals};
use evenhand_core::life::Outcome;
use evenhand_core::names::{
    Class, ContentType, Epoch, Key, LaneId, Millis, Priority, QueueId, QueueName, ShardId, TaskId,
};
use evenhand_core::{Change, Row, Task};
use evenhand_store::{Embedded, Store, wait};

use crate::Failure;
use crate::rng::Rng;

const SHARD: ShardId = ShardId(1);
const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority::DEFAULT, class: Class(0) };
/// Rows in one read, as the core asks for them.
const PAGE: usize = 4096;
const PREFIX: &str = "tenant-";

/// A commit that can be made, and the places of the tasks in it.
#[derive(Debug, Default)]
pub(super) struct Commit {
    pub(super) changes: Vec<Change>,
    pub(super) places: Vec<(Level, TaskId)>,
}

/// The owner of the one shard of a store.
#[derive(Debug)]
pub(super) struct Owner {
    store: Embedded,
    epoch: Epoch,
    rng: Rng,
    payload: usize,
    name: QueueName,
    keys: Vec<(Key, KeyRecord)>,
    lane: LaneRecord,
    totals: Totals,
    next_seq: u64,
    /// Rows that were read and not finished yet, with their keys.
    window: BTreeMap<Level, (TaskId, usize)>,
    /// R: what is at or below was read.
    read: Level,
}

impl Owner {
    /// Takes the shard, and knows of it what the store remembers.
    pub(super) fn take(store: Embedded, keys: usize, payload: usize, seed: u64) -> Result<Owner, Failure> {
        let taken = wait(store.take(SHARD, None)).map_err(|error| error.to_string())?;
        let metadata = taken.metadata;
        let fresh = |n: usize| {
            let key = Key::new(&format!("{PREFIX}{n:06}")).map_err(|refusal| format!("{refusal:?}"))?;
            let weight = Weight::from_thousandths(1_000 << (n % 3)).unwrap_or(Weight::ONE);
            let zero = VTime::ZERO;
            let record = KeyRecord {
                finish: zero,
                due: zero,
                rows: 0,
                chained: 0,
                refund: zero,
                credit: zero,
                average: Average::default(),
                weight,
            };
            Ok((key, record))
        };
        let mut own = (0..keys).map(fresh).collect::<Result<Vec<_>, Failure>>()?;
        for (_, key, record) in metadata.keys {
            let n = number(&key)?;
            own.get_mut(n).ok_or_else(|| format!("the store has a key {key} that nobody made"))?.1 = record;
        }
        let lane = metadata.lanes.first().map(|(_, record)| *record).unwrap_or_default();
        Ok(Owner {
            store,
            epoch: taken.epoch,
            rng: Rng::new(seed),
            payload,
            name: QueueName::new("render").map_err(|refusal| format!("{refusal:?}"))?,
            keys: own,
            lane,
            totals: metadata.queues.first().map(|(_, record)| record.totals).unwrap_or_default(),
            next_seq: metadata.next_seq.max(1),
            window: BTreeMap::new(),
            read: lane.ack,
        })
    }

    /// Tasks that stand.
    pub(super) fn standing(&self) -> u64 {
        self.totals.unfinished()
    }

    /// Accepts tasks of random keys.
    pub(super) fn accept(&mut self, tasks: u64) -> Commit {
        self.accept_of(tasks, |rng, keys, _| rng.below(keys) as usize)
    }

    /// Accepts tasks of one key after the other.
    pub(super) fn accept_in_turn(&mut self, tasks: u64) -> Commit {
        self.accept_of(tasks, |_, keys, seq| (seq % keys) as usize)
    }

    fn accept_of(&mut self, tasks: u64, choose: impl Fn(&mut Rng, u64, u64) -> usize) -> Commit {
        let mut commit = Commit::default();
        let mut touched = BTreeSet::new();
        for _ in 0..tasks {
            let n = choose(&mut self.rng, self.keys.len() as u64, self.next_seq);
            let (key, record) = &mut self.keys[n];
            let charge = Charge { cost: Cost::ONE, weight: record.weight, chained: true, timed: false };
            let place = record.finish.max(self.lane.vtime);
            let level = Level::new(place.pass(), self.next_seq);
            record.finish = place + charge.span();
            record.rows += 1;
            record.chained += 1;
            touched.insert(n);
            let id = TaskId(self.next_seq);
            self.next_seq += 1;
            self.lane.max = self.lane.max.max(level);
            if level <= self.read {
                self.window.insert(level, (id, n));
            }
            let task = Task {
                id,
                lane: LANE,
                place: Place::Lane(level),
                key: key.clone(),
                charge,
                attempt: 1,
                max_attempts: 3,
                lost: 0,
                terms: None,
                replay_of: None,
                files: Default::default(),
                accepted: Millis(1_700_000_000_000 + id.0),
                content_type: ContentType::default(),
                payload: bytes(&mut self.rng, self.payload),
            };
            commit.changes.push(Change::Accepted(task));
            commit.places.push((level, id));
        }
        self.totals.accepted += tasks;
        commit.changes.push(Change::Seq { next: self.next_seq });
        self.records(touched, &mut commit);
        commit
    }

    /// Reads forward until so many of the next rows are known, or all.
    pub(super) fn read(&mut self, tasks: u64) -> Result<(), Failure> {
        let more = tasks.saturating_sub(self.window.len() as u64);
        let read = self.reader(more).read()?;
        self.learn(read)
    }

    /// A read of so many rows beyond what was read, to be done elsewhere.
    pub(super) fn reader(&self, rows: u64) -> Reader {
        Reader { store: self.store.clone(), from: self.read, max: self.lane.max, rows }
    }

    /// Takes in what was read.
    pub(super) fn learn(&mut self, (rows, read): (Vec<Row>, Level)) -> Result<(), Failure> {
        for row in &rows {
            self.window.insert(row.level, (row.task, number(&row.key)?));
        }
        self.read = read;
        Ok(())
    }

    /// Finishes the next tasks in order of their levels; reads what it does not know.
    pub(super) fn finish(&mut self, tasks: u64) -> Result<Commit, Failure> {
        self.read(tasks)?;
        let mut commit = Commit::default();
        let mut touched = BTreeSet::new();
        for _ in 0..tasks {
            let Some((level, (task, n))) = self.window.pop_first() else {
                return Err("the store has fewer rows than were put into it".into());
            };
            let record = &mut self.keys[n].1;
            record.rows -= 1;
            record.chained -= 1;
            record.due = record.finish;
            touched.insert(n);
            self.lane.ack = level;
            self.lane.vtime = self.lane.vtime.max(level.pass().time());
            let outcome = Outcome::Succeeded;
            commit.changes.push(Change::Finished {
                task,
                lane: LANE,
                from: Place::Lane(level),
                tries: 0,
                canceling: false,
                outcome,
                end: None,
            });
            commit.places.push((level, task));
        }
        self.totals.succeeded += tasks;
        self.records(touched, &mut commit);
        Ok(commit)
    }

    /// What is saved beside the tasks, once per commit.
    fn records(&self, touched: BTreeSet<usize>, commit: &mut Commit) {
        commit.changes.push(Change::Lane { lane: LANE, record: self.lane });
        let record =
            QueueRecord { name: self.name.clone(), totals: self.totals, average: Average::default() };
        commit.changes.push(Change::Queue { queue: LANE.queue, record });
        commit.changes.extend(touched.into_iter().map(|n| {
            let (key, record) = &self.keys[n];
            Change::Key { lane: LANE, key: key.clone(), record: Some(*record) }
        }));
    }

    /// Makes changes durable.
    pub(super) fn commit(&self, changes: Vec<Change>) -> Result<(), Failure> {
        wait(self.store.commit(SHARD, self.epoch, changes)).map_err(|error| error.to_string())
    }

    /// Waits until the store has nothing to flush and nothing to merge; how long that took.
    pub(super) fn rest(&self) -> Result<Duration, Failure> {
        let start = Instant::now();
        wait(self.store.rest()).map_err(|error| error.to_string())?;
        Ok(start.elapsed())
    }

    /// Returns when everything acknowledged can be read: acknowledging comes before applying.
    pub(super) fn wait_until_applied(&self) -> Result<(), Failure> {
        let read = wait(self.store.read_lane(SHARD, LANE, self.lane.ack, 1));
        read.map(drop).map_err(|error| error.to_string())
    }
}

/// Reads rows of the lane forward, in pages.
#[derive(Debug)]
pub(super) struct Reader {
    store: Embedded,
    from: Level,
    max: Level,
    rows: u64,
}

impl Reader {
    /// The rows, and up to where all are known.
    pub(super) fn read(mut self) -> Result<(Vec<Row>, Level), Failure> {
        let mut rows = Vec::new();
        while (rows.len() as u64) < self.rows && self.from < self.max {
            let page = wait(self.store.read_lane(SHARD, LANE, self.from, PAGE));
            let page = page.map_err(|error| error.to_string())?;
            self.from = match page.rows.last() {
                Some(last) if !page.end => last.level,
                _ => self.max,
            };
            rows.extend(page.rows);
        }
        Ok((rows, self.from))
    }
}

fn number(key: &Key) -> Result<usize, Failure> {
    let number = key.as_str().strip_prefix(PREFIX).and_then(|digits| digits.parse().ok());
    number.ok_or_else(|| format!("the store has a key {key} that nobody made"))
}

fn bytes(rng: &mut Rng, length: usize) -> Arc<[u8]> {
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&rng.below(u64::MAX).to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}
