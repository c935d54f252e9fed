//! Random work of owners, done to PostgreSQL and to the store in memory alike: whatever is asked of the two, the answers
//! are the same.

use evenhand_core::Change;
use evenhand_core::backlog::Level;
use evenhand_core::change::Place;
use evenhand_core::names::{Epoch, TaskId};
use evenhand_store::{Memory, Postgres, Store, Wanted, ready};

use crate::cluster::{SHARED, block_on, fresh_schema, open};
use crate::contents::{Dice, read_all};
use crate::work::{LANES, Owned, SHARDS};

struct World {
    dice: Dice,
    /// Tasks of a shard at which it stops to accept more than it finishes.
    many: usize,
    store: Postgres,
    memory: Memory,
    owned: [Owned; 2],
}

impl World {
    async fn commit(&mut self, batch: u64) {
        let n = self.dice.below(2) as usize;
        let owned = &mut self.owned[n];
        let mut changes = Vec::new();
        for _ in 0..self.dice.below(batch + 1) {
            changes.extend(owned.change(&mut self.dice, self.many));
        }
        changes.push(Change::Seq { next: owned.next + 1 });
        let (shard, epoch) = (SHARDS[n], owned.epoch);
        if self.dice.one_in(20) {
            // Whoever owned it before changes nothing.
            let before = Epoch(epoch.0 - 1);
            let expected = ready(self.memory.commit(shard, before, changes.clone()));
            assert_eq!(self.store.commit(shard, before, changes.clone()).await, expected);
            assert!(expected.is_err());
        }
        ready(self.memory.commit(shard, epoch, changes.clone())).unwrap();
        self.store.commit(shard, epoch, changes).await.unwrap();
    }

    /// Takes a shard in both and reads all of it, and asks some questions beside.
    async fn compare(&mut self, n: usize) {
        let (shard, limit) = (SHARDS[n], 1 + self.dice.below(60 + self.many as u64 / 10) as usize);
        let (epoch, expected) = ready(read_all(&self.memory, shard, &LANES, limit)).unwrap();
        let (found_epoch, found) = read_all(&self.store, shard, &LANES, limit).await.unwrap();
        assert_eq!(found_epoch, epoch);
        assert_eq!(found, expected);
        found.check();
        self.owned[n].epoch = epoch;

        for _ in 0..5 {
            let task = TaskId(self.dice.below(self.owned[n].next + 2));
            let expected = ready(self.memory.read_task(shard, task)).unwrap();
            assert_eq!(self.store.read_task(shard, task).await.unwrap(), expected);
            let expected = ready(self.memory.read_history(shard, task)).unwrap();
            assert_eq!(self.store.read_history(shard, task).await.unwrap(), expected);

            let lane = LANES[self.dice.below(4) as usize];
            let queue = self.dice.one_in(2).then_some(lane.queue);
            let ended = [None, Some(true), Some(false)][self.dice.below(3) as usize];
            let wanted = Wanted { queue, ended };
            let expected = ready(self.memory.list_tasks(shard, wanted, task, limit)).unwrap();
            assert_eq!(self.store.list_tasks(shard, wanted, task, limit).await.unwrap(), expected);

            let above = self.owned[n].some_ended(&mut self.dice).map_or(Level::ZERO, |(_, at)| at);
            let expected = ready(self.memory.read_timers(shard, above, limit)).unwrap();
            let found = self.store.read_timers(shard, above, limit).await.unwrap();
            assert_eq!((found.rows, found.end), (expected.rows, expected.end));

            let Some(task) = self.owned[n].some_task(&mut self.dice) else { continue };
            let above = match task.place {
                Place::Parked(level) => level.before(),
                Place::Lane(_) | Place::Timer(_) | Place::Aside | Place::Over => Level::ZERO,
            };
            let (of, key) = (task.lane, task.key);
            let expected = ready(self.memory.read_parked(shard, of, key.clone(), above, limit)).unwrap();
            let found = self.store.read_parked(shard, of, key, above, limit).await.unwrap();
            assert_eq!((found.rows, found.end), (expected.rows, expected.end));
            let above = task.place.level().unwrap_or(Level::ZERO);
            let expected = ready(self.memory.read_lane(shard, lane, above, limit)).unwrap();
            let found = self.store.read_lane(shard, lane, above, limit).await.unwrap();
            assert_eq!((found.rows, found.end), (expected.rows, expected.end));
        }
    }
}

/// Says which seed it was if the test fails while this lives.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("it was seed {}", self.0);
        }
    }
}

fn play(seed: u64, commits: u64, batch: u64, compare: u64, many: usize) {
    let said = Seed(seed);
    block_on(async {
        let store = open(&SHARED.address(&fresh_schema())).await;
        let (memory, owned) = (Memory::default(), Default::default());
        let mut world = World { dice: Dice(seed), many, store, memory, owned };
        for n in 0..2 {
            world.compare(n).await;
        }
        for commit in 1..=commits {
            world.commit(batch).await;
            if commit == commits || world.dice.one_in(compare) {
                for n in 0..2 {
                    world.compare(n).await;
                }
            }
        }
    });
    drop(said);
}

#[test]
fn short_work_leaves_the_same_as_in_memory() {
    for seed in 0..25 {
        let mut dice = Dice(seed);
        let (commits, batch) = (20 + dice.below(40), 1 + dice.below(12));
        play(seed, commits, batch, 5 + dice.below(20), 5 << dice.below(6));
    }
}

#[test]
fn long_work_leaves_the_same_as_in_memory() {
    play(1_000, 300, 150, 100, 4_000);
}
