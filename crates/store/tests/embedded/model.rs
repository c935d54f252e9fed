//! Random work of owners, done to the embedded store and to the store in memory alike: whatever is asked
//! of the two, the answers are the same. Logs are tiny, so that tables are made and merged all the time,
//! and the embedded store is closed and opened again now and then.

use evenhand_core::Change;
use evenhand_core::backlog::Level;
use evenhand_core::change::Place;
use evenhand_core::names::{Epoch, TaskId};
use evenhand_store::embedded;
use evenhand_store::{Embedded, Memory, Store, Wanted, ready};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::support::{Dice, read_all, small};
use crate::work::{LANES, Owned, SHARDS};

/// How a sequence goes.
#[derive(Clone, Copy)]
struct Course {
    segment: u64,
    commits: u64,
    /// Changes in a commit, at most.
    batch: u64,
    /// One in so many commits is followed by a comparison, and one in so many of those by opening again.
    compare: u64,
    reopen: u64,
    /// Tasks of a shard at which it stops to accept more than it finishes, until few are left.
    many: usize,
}

struct World {
    dice: Dice,
    course: Course,
    runtime: Runtime,
    dir: TempDir,
    /// None while it is opened again.
    disk: Option<Embedded>,
    memory: Memory,
    owned: [Owned; 2],
}

impl World {
    fn new(seed: u64, course: Course) -> World {
        // In memory if there is such a place: syncs only take time here.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut world = World {
            dice: Dice(seed),
            course,
            runtime: Builder::new_current_thread().build().unwrap(),
            disk: Some(Embedded::open(dir.path(), small(course.segment)).unwrap()),
            dir,
            memory: Memory::default(),
            owned: Default::default(),
        };
        (0..2).for_each(|n| world.compare(n));
        world
    }

    fn disk(&self) -> &Embedded {
        self.disk.as_ref().unwrap()
    }

    fn commit(&mut self) {
        let n = self.dice.below(2) as usize;
        let owned = &mut self.owned[n];
        let mut changes = Vec::new();
        for _ in 0..self.dice.below(self.course.batch + 1) {
            changes.extend(owned.change(&mut self.dice, self.course.many));
        }
        changes.push(Change::Seq { next: owned.next + 1 });
        let (shard, epoch) = (SHARDS[n], owned.epoch);
        if self.dice.one_in(20) {
            // Whoever owned it before changes nothing.
            let before = Epoch(epoch.0 - 1);
            let expected = ready(self.memory.commit(shard, before, changes.clone()));
            let answer = self.runtime.block_on(self.disk().commit(shard, before, changes.clone()));
            assert_eq!(answer, expected);
            assert!(answer.is_err());
        }
        ready(self.memory.commit(shard, epoch, changes.clone())).unwrap();
        self.runtime.block_on(self.disk().commit(shard, epoch, changes)).unwrap();
    }

    /// Takes a shard in both and reads all of it, and asks some questions beside.
    fn compare(&mut self, n: usize) {
        let (shard, limit) = (SHARDS[n], 1 + self.dice.below(60 + self.course.many as u64 / 10) as usize);
        let (epoch, expected) = ready(read_all(&self.memory, shard, &LANES, limit)).unwrap();
        let disk = self.disk.as_ref().unwrap();
        let (found_epoch, found) = self.runtime.block_on(read_all(disk, shard, &LANES, limit)).unwrap();
        assert_eq!(found_epoch, epoch);
        assert_eq!(found, expected);
        found.check();
        self.owned[n].epoch = epoch;

        for _ in 0..5 {
            let task = TaskId(self.dice.below(self.owned[n].next + 2));
            let expected = ready(self.memory.read_task(shard, task)).unwrap();
            assert_eq!(self.runtime.block_on(disk.read_task(shard, task)).unwrap(), expected);

            let lane = LANES[self.dice.below(4) as usize];
            let queue = self.dice.one_in(2).then_some(lane.queue);
            let ended = [None, Some(true), Some(false)][self.dice.below(3) as usize];
            let wanted = Wanted { queue, ended };
            let expected = ready(self.memory.list_tasks(shard, wanted, task, limit)).unwrap();
            let found = self.runtime.block_on(disk.list_tasks(shard, wanted, task, limit)).unwrap();
            assert_eq!(found, expected);

            let expected = ready(self.memory.read_history(shard, task)).unwrap();
            assert_eq!(self.runtime.block_on(disk.read_history(shard, task)).unwrap(), expected);

            let above = self.owned[n].some_ended(&mut self.dice).map_or(Level::ZERO, |(_, at)| at);
            let expected = ready(self.memory.read_timers(shard, above, limit)).unwrap();
            let found = self.runtime.block_on(disk.read_timers(shard, above, limit)).unwrap();
            assert_eq!((found.rows, found.end), (expected.rows, expected.end));

            if let Some(task) = self.owned[n].some_task(&mut self.dice) {
                let above = match task.place {
                    Place::Parked(level) => level.before(),
                    Place::Lane(_) | Place::Timer(_) | Place::Aside | Place::Over => Level::ZERO,
                };
                let (lane, key) = (task.lane, task.key);
                let expected =
                    ready(self.memory.read_parked(shard, lane, key.clone(), above, limit)).unwrap();
                let found = self.runtime.block_on(disk.read_parked(shard, lane, key, above, limit)).unwrap();
                assert_eq!((found.rows, found.end), (expected.rows, expected.end));
            }

            let above = self.owned[n].some_task(&mut self.dice).and_then(|task| task.place.level());
            let above = above.unwrap_or(Level::ZERO);
            let expected = ready(self.memory.read_lane(shard, lane, above, limit)).unwrap();
            let found = self.runtime.block_on(disk.read_lane(shard, lane, above, limit)).unwrap();
            assert_eq!((found.rows, found.end), (expected.rows, expected.end));
        }
    }

    /// The store that is closed must be whole. What queues count is made up here, and so no problem.
    fn check(&self) {
        let checked = embedded::check(self.dir.path(), &mut |_, _| {}).unwrap();
        let wrong = |problem: &&String| problem.contains("not the same") || problem.contains("not there");
        assert_eq!(checked.problems.iter().find(wrong), None);
    }

    fn run(&mut self) {
        for _ in 0..self.course.commits {
            self.commit();
            if self.dice.one_in(self.course.compare) {
                if self.dice.one_in(self.course.reopen) {
                    self.disk = None;
                    self.check();
                    let segment = self.course.segment;
                    self.disk = Some(Embedded::open(self.dir.path(), small(segment)).unwrap());
                }
                (0..2).for_each(|n| self.compare(n));
            }
        }
        (0..2).for_each(|n| self.compare(n));
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

#[test]
fn short_work_leaves_the_same_on_disk_as_in_memory() {
    for seed in 0..250 {
        let said = Seed(seed);
        let mut dice = Dice(seed);
        let course = Course {
            segment: 2048 << dice.below(3),
            commits: 20 + dice.below(60),
            batch: 1 + dice.below(12),
            compare: 3 + dice.below(20),
            reopen: 1 + dice.below(4),
            many: 5 << dice.below(6),
        };
        World::new(seed, course).run();
        drop(said);
    }
}

/// So long that what was deleted is merged away, which only pays when it is much.
#[test]
fn long_work_leaves_the_same_on_disk_as_in_memory() {
    for seed in 1_000..1_002 {
        let said = Seed(seed);
        let course =
            Course { segment: 32 * 1024, commits: 1_000, batch: 150, compare: 80, reopen: 4, many: 8_000 };
        World::new(seed, course).run();
        drop(said);
    }
}
