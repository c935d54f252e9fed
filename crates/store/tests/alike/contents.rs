//! All that a shard holds, as any store tells it, and dice.

use std::collections::BTreeSet;

use evenhand_core::backlog::Level;
use evenhand_core::change::{Place, Timed, TimerRow};
use evenhand_core::names::{Epoch, Key, LaneId, ShardId, TaskId};
use evenhand_core::{Metadata, Row, Task};
use evenhand_store::{History, Store, StoreError, Wanted};

/// Random numbers that are the same in every run.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// One of 0 to n - 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// All that a shard holds.
#[derive(Debug, PartialEq)]
pub(crate) struct Contents {
    pub(crate) metadata: Metadata,
    pub(crate) rows: Vec<(LaneId, Row)>,
    pub(crate) timers: Vec<TimerRow>,
    /// Beside those lanes, of every key that is known of anywhere.
    pub(crate) parked: Vec<(LaneId, Row)>,
    pub(crate) tasks: Vec<Task>,
    /// Of every task that has one.
    pub(crate) histories: Vec<(TaskId, History)>,
}

/// Takes a shard and reads all of it by pages, rows in the given lanes.
pub(crate) async fn read_all<S: Store>(
    store: &S,
    shard: ShardId,
    lanes: &[LaneId],
    limit: usize,
) -> Result<(Epoch, Contents), StoreError> {
    let taken = store.take(shard, None).await?;
    let mut metadata = taken.metadata;
    metadata.queues.sort_by_key(|(queue, _)| *queue);
    metadata.overrides.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.lanes.sort_by_key(|(lane, _)| *lane);
    metadata.keys.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.aside.sort_by_key(|task| task.id);
    metadata.requests.sort_by_key(|(key, _)| *key);
    metadata.canceling.sort();
    metadata.parked.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.paused.sort();
    metadata.settings.sort_by_key(|(queue, _)| *queue);
    let mut rows = Vec::new();
    for &lane in lanes {
        let mut above = Level::ZERO;
        loop {
            let page = store.read_lane(shard, lane, above, limit).await?;
            assert!(page.end || page.rows.len() == limit, "a page before the end is full");
            assert!(page.rows.is_sorted_by(|a, b| a.level < b.level), "rows come in order");
            above = page.rows.last().map_or(above, |row| row.level);
            rows.extend(page.rows.into_iter().map(|row| (lane, row)));
            if page.end {
                break;
            }
        }
    }
    let (mut timers, mut above): (Vec<TimerRow>, Level) = (Vec::new(), Level::ZERO);
    loop {
        let page = store.read_timers(shard, above, limit).await?;
        assert!(page.end || page.rows.len() == limit, "a page before the end is full");
        assert!(page.rows.is_sorted_by(|a, b| a.at < b.at), "timers come in order");
        above = page.rows.last().map_or(above, |timer| timer.at);
        timers.extend(page.rows);
        if page.end {
            break;
        }
    }
    let mut tasks: Vec<Task> = Vec::new();
    loop {
        let after = tasks.last().map_or(TaskId(0), |task| task.id);
        let listing = store.list_tasks(shard, Wanted::default(), after, limit).await?;
        let more = listing.more.is_some();
        assert!(!more || listing.tasks.len() == limit, "a listing before the end is full");
        tasks.extend(listing.tasks);
        if !more {
            break;
        }
    }
    let mut histories = Vec::new();
    for task in tasks.iter().filter(|task| task.attempt > 1 || task.place == Place::Over) {
        histories.push((task.id, store.read_history(shard, task.id).await?));
    }
    let keys: BTreeSet<&Key> =
        tasks.iter().map(|task| &task.key).chain(metadata.keys.iter().map(|(_, key, _)| key)).collect();
    let mut parked = Vec::new();
    for (&lane, key) in lanes.iter().flat_map(|lane| keys.iter().map(move |key| (lane, *key))) {
        let mut above = Level::ZERO;
        loop {
            let page = store.read_parked(shard, lane, key.clone(), above, limit).await?;
            assert!(page.end || page.rows.len() == limit, "a page before the end is full");
            assert!(page.rows.is_sorted_by(|a, b| a.level < b.level), "parked rows come in order");
            above = page.rows.last().map_or(above, |row| row.level);
            parked.extend(page.rows.into_iter().map(|row| (lane, row)));
            if page.end {
                break;
            }
        }
    }
    Ok((taken.epoch, Contents { metadata, rows, timers, parked, tasks, histories }))
}

impl Contents {
    /// Each task must be in exactly one place: in its lane as its record says, parked beside it, among the timers,
    /// set aside, or over.
    pub(crate) fn check(&self) {
        let mut waiting: Vec<_> =
            self.tasks.iter().filter_map(|task| Some((task.lane, task.row()?))).collect();
        waiting.sort_by_key(|(lane, row)| (*lane, row.level));
        assert_eq!(self.rows, waiting, "the rows of the lanes, and what the tasks' records say of them");
        let due = self.timers.iter().filter(|timer| matches!(timer.what, Timed::Due(..))).cloned();
        let scheduled = self.tasks.iter().filter_map(|task| match task.place {
            Place::Timer(at) => {
                Some(TimerRow { at, task: task.id, what: Timed::Due(task.lane, task.row_at(at)) })
            }
            Place::Lane(_) | Place::Parked(_) | Place::Aside | Place::Over => None,
        });
        let mut scheduled: Vec<_> = scheduled.collect();
        scheduled.sort_by_key(|timer| timer.at);
        assert_eq!(due.collect::<Vec<_>>(), scheduled, "the timers, and what the tasks' records say of them");
        let shelved = self.tasks.iter().filter_map(|task| match task.place {
            Place::Parked(level) => Some((task.lane, task.row_at(level))),
            Place::Lane(_) | Place::Timer(_) | Place::Aside | Place::Over => None,
        });
        let mut shelved: Vec<_> = shelved.collect();
        shelved.sort_by(|(a, x), (b, y)| (a, &x.key, x.level).cmp(&(b, &y.key, y.level)));
        let mut parked = self.parked.clone();
        parked.sort_by(|(a, x), (b, y)| (a, &x.key, x.level).cmp(&(b, &y.key, y.level)));
        assert_eq!(parked, shelved, "the parked rows, and what the tasks' records say of them");
        let over: Vec<_> =
            self.tasks.iter().filter(|task| task.place == Place::Over).map(|task| task.id).collect();
        let ended = self.histories.iter().filter(|(_, history)| history.end.is_some()).map(|(id, _)| *id);
        assert_eq!(ended.collect::<Vec<_>>(), over, "the ends, and what the tasks' records say of them");
        let apart: Vec<_> = self.tasks.iter().filter(|task| task.place == Place::Aside).cloned().collect();
        assert_eq!(self.metadata.aside, apart, "the long runners, and what the tasks' records say of them");
    }
}
