//! What happened, as a store has to remember it. A commit is a list of changes that become durable
//! together or not at all; each store lays out its own tables for them.
//!
//! A task costs a store two rows: its record (by id: everything, the payload too) and its backlog row
//! (by lane and level: what the window needs). Accepting writes both, finishing removes both, starting
//! writes nothing. Records of keys, lanes, queues and of the shard are small and written in place, once
//! per commit that touches them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::backlog::{Charge, Level, VTime, Weight};
use crate::life::Outcome;
use crate::messages::Run;
use crate::names::{
    ContentType, Key, LaneId, Life, Millis, QueueId, QueueName, RequestKey, Seat, StoreId, TaskId,
};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A task was accepted: put its record and its row.
    Accepted(Task),
    /// A task waits again at another place: move its row (or bring it back from the long runners) and
    /// update its record.
    Requeued {
        /// The task.
        task: TaskId,
        /// Its lane, which does not change.
        lane: LaneId,
        /// Where its row was; None if it had been set aside.
        from: Option<Level>,
        /// Its row now.
        row: Row,
    },
    /// A long-running task's row leaves the lane for the table of long runners.
    SetAside {
        /// The task.
        task: TaskId,
        /// Its lane.
        lane: LaneId,
        /// Where its row was.
        level: Level,
    },
    /// A task ended: remove its record and its row.
    Finished {
        /// The task.
        task: TaskId,
        /// Its lane.
        lane: LaneId,
        /// Where its row was; None if it had been set aside.
        level: Option<Level>,
        /// How it ended.
        outcome: Outcome,
    },
    /// A key's record; None if the key is forgotten.
    Key {
        /// The lane the record belongs to.
        lane: LaneId,
        /// The key.
        key: Key,
        /// What to remember.
        record: Option<KeyRecord>,
    },
    /// A lane's levels. Rows at or below the ack level are settled: delete them by range.
    Lane {
        /// The lane.
        lane: LaneId,
        /// What to remember.
        record: LaneRecord,
    },
    /// A queue's name and counts.
    Queue {
        /// The queue.
        queue: QueueId,
        /// What to remember.
        record: QueueRecord,
    },
    /// The weight that a key has by override; None if it has none any more.
    Override {
        /// The queue.
        queue: QueueId,
        /// The key.
        key: Key,
        /// Its weight, whatever its tasks say.
        weight: Option<Weight>,
    },
    /// What is saved of a worker; None if it is lost or has left.
    Member {
        /// Its seat.
        seat: Seat,
        /// What to remember.
        record: Option<MemberRecord>,
    },
    /// Whether the owner has stopped in good order: then the members' records say what runs.
    Stopped {
        /// It has.
        stopped: bool,
    },
    /// A request that was named by its caller; None if it is forgotten.
    Request {
        /// Its name.
        key: RequestKey,
        /// What to remember.
        record: Option<RequestRecord>,
    },
    /// The store's id.
    Store {
        /// The id.
        id: StoreId,
    },
    /// The shard's counter of seqs.
    Seq {
        /// The next seq to hand out.
        next: u64,
    },
}

/// A task as it is stored: all there is to know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// Its lane.
    pub lane: LaneId,
    /// Its place in the lane; None while its row is set aside.
    pub level: Option<Level>,
    /// Whom it is charged to.
    pub key: Key,
    /// What it was charged.
    pub charge: Charge,
    /// Which try comes next, or runs: 1 for the first.
    pub attempt: u16,
    /// How many tries it has.
    pub max_attempts: u16,
    /// When it was accepted.
    pub accepted: Millis,
    /// How long one run may take, in milliseconds; 0 if it may take as long as it likes.
    pub max_duration_ms: u64,
    /// What the payload is.
    pub content_type: ContentType,
    /// The caller's bytes.
    pub payload: Arc<[u8]>,
}

impl Task {
    /// Its row in the lane, if it is there.
    pub fn row(&self) -> Option<Row> {
        self.level.map(|level| Row {
            level,
            task: self.id,
            key: self.key.clone(),
            charge: self.charge,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
        })
    }
}

/// A row of a lane: what the window needs to know of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its place.
    pub level: Level,
    /// The task.
    pub task: TaskId,
    /// Whom it is charged to.
    pub key: Key,
    /// What it was charged.
    pub charge: Charge,
    /// Which try comes next.
    pub attempt: u16,
    /// How many tries it has.
    pub max_attempts: u16,
}

/// What is saved of a key in a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// F: the end of its last charge.
    pub finish: VTime,
    /// Up to where the first task of its chain lets V go, as far as commits know.
    pub due: VTime,
    /// Its rows in the lane. Which of them run is known by the workers alone.
    pub rows: u32,
    /// Those of them that stand where they were first placed.
    pub chained: u32,
    /// What its latest accepted task asked for.
    pub weight: Weight,
}

/// What is saved of a worker that the shard counts on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberRecord {
    /// Bound to its machine: a later life with the same token proves this one dead.
    pub token: u64,
    /// Its life.
    pub life: Life,
    /// How long an owner that hears nothing of it must wait until it can no longer be alive, in milliseconds.
    /// Saved before the worker is told anything that lets it live so long.
    pub wait_ms: u64,
    /// What it ran when the owner stopped; counts only if the mark is set.
    pub running: Vec<Run>,
}

/// What is saved of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// When it was accepted.
    pub at: Millis,
    /// Its first task. The others follow.
    pub first: TaskId,
    /// How many tasks it had.
    pub tasks: u32,
}

impl RequestRecord {
    /// Its tasks.
    pub fn ids(&self) -> Vec<TaskId> {
        (self.first.0..self.first.0 + u64::from(self.tasks)).map(TaskId).collect()
    }
}

/// What is saved of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneRecord {
    /// A: everything at or below is settled.
    pub ack: Level,
    /// M: the highest level ever written.
    pub max: Level,
    /// V.
    pub vtime: VTime,
    /// Its charge among the lanes of its priority.
    pub turn: VTime,
}

/// What is saved of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRecord {
    /// Its name.
    pub name: QueueName,
    /// How many tasks it has had.
    pub totals: Totals,
}

/// How many tasks a queue has had, and how they ended: counted, never obtained by scanning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tasks accepted.
    pub accepted: u64,
    /// Tasks that succeeded.
    pub succeeded: u64,
    /// Tasks that failed for good.
    pub failed: u64,
    /// Tasks that were canceled.
    pub canceled: u64,
}

impl Totals {
    /// Tasks accepted that have not ended: waiting or running.
    pub fn unfinished(&self) -> u64 {
        self.accepted.saturating_sub(self.succeeded + self.failed + self.canceled)
    }
}

/// All that a new owner must know before it starts anything. Rows and payloads are read later.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// The next seq to hand out; 0 if the shard is new.
    pub next_seq: u64,
    /// Every queue.
    pub queues: Vec<(QueueId, QueueRecord)>,
    /// Every weight by override.
    pub overrides: Vec<(QueueId, Key, Weight)>,
    /// Every lane.
    pub lanes: Vec<(LaneId, LaneRecord)>,
    /// Every key that a lane remembers.
    pub keys: Vec<(LaneId, Key, KeyRecord)>,
    /// Every task whose row is set aside.
    pub aside: Vec<Task>,
    /// Every worker that the shard counts on.
    pub members: Vec<(Seat, MemberRecord)>,
    /// The last owner stopped in good order.
    pub stopped: bool,
    /// Every request that is remembered.
    pub requests: Vec<(RequestKey, RequestRecord)>,
    /// The store's id; None if it has none yet.
    pub store: Option<StoreId>,
}

impl Metadata {
    /// Whether it can be what an owner wrote; the error says what contradicts itself.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut rows: BTreeMap<QueueId, u64> = BTreeMap::new();
        for (n, queue) in
            self.queues.iter().map(|(id, _)| id.0).collect::<BTreeSet<u32>>().into_iter().enumerate()
        {
            if n as u32 != queue {
                return Err(format!("queue {n} is missing, and queue {queue} is there"));
            }
            rows.insert(QueueId(queue), 0);
        }
        if rows.len() != self.queues.len() {
            return Err("a queue is there twice".into());
        }
        let mut lanes = BTreeSet::new();
        for (lane, record) in &self.lanes {
            if !rows.contains_key(&lane.queue) || !lanes.insert(*lane) {
                return Err(format!("lane {lane} belongs to no queue, or is there twice"));
            }
            if record.max.seq() >= self.next_seq.max(1) || self.next_seq > Level::LAST_SEQ {
                return Err(format!(
                    "lane {lane} has rows up to {}, but the next seq is {}",
                    record.max, self.next_seq
                ));
            }
        }
        for (lane, key, record) in &self.keys {
            match rows.get_mut(&lane.queue) {
                Some(rows) if lanes.contains(lane) && record.chained <= record.rows => {
                    *rows += u64::from(record.rows);
                }
                _ => {
                    return Err(format!(
                        "key {key} belongs to no lane ({lane}), or counts more rows than it has"
                    ));
                }
            }
        }
        for task in &self.aside {
            match rows.get_mut(&task.lane.queue) {
                Some(rows) if lanes.contains(&task.lane) && task.level.is_none() => *rows += 1,
                _ => return Err(format!("task {} is set aside from a lane that does not exist", task.id)),
            }
        }
        if let Some((queue, key, _)) = self.overrides.iter().find(|(queue, ..)| !rows.contains_key(queue)) {
            return Err(format!("key {key} has a weight in queue {queue}, which does not exist"));
        }
        for (id, record) in &self.queues {
            let (kept, counted) = (record.totals.unfinished(), rows[id]);
            if kept != counted {
                let name = &record.name;
                return Err(format!("queue {name} counts {kept} unfinished tasks, its keys count {counted}"));
            }
        }
        Ok(())
    }
}
