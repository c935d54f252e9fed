//! What is said of waiting tasks, and what then happens. `evenhand-sim estimates` prints the same as a table, over more
//! seeds.

#![expect(clippy::unwrap_used, reason = "a failed unwrap here is a failed test")]

use evenhand_core::admission::{ClassLimit, Limit};
use evenhand_core::change::Settings;
use evenhand_core::estimate::{Estimate, Wanted};
use evenhand_core::names::{Key, QueueName, TaskId};
use evenhand_core::{Bounds, Input, NewTask};
use evenhand_sim::driver::{Driver, SHARD, plain, slots_of};
use evenhand_sim::estimates::{loads, play};

#[test]
fn nothing_starts_later_than_its_bound_and_half_of_what_is_expected_is_right_within_a_fifth() {
    for load in loads() {
        let (mut bounded, mut late, mut errors) = (0, Vec::new(), Vec::new());
        for seed in 100..103 {
            let measured = play(&load, seed).unwrap();
            bounded += measured.bounded;
            errors.push(measured.median_error());
            late.extend(measured.late);
        }
        assert!(bounded > 500, "{}: only {bounded} were told a bound", load.name);
        let most = if load.strict { 0 } else { bounded / 100 };
        assert!(late.len() as u64 <= most, "{}: {late:?}", load.name);
        if load.name.starts_with("steady") {
            assert!(errors.iter().all(|error| *error < 0.2), "{}: {errors:?}", load.name);
        }
    }
}

struct Queue(Driver, QueueName);

impl Queue {
    fn new(classes: Vec<ClassLimit>, slots: u32) -> Queue {
        let name = QueueName::new("q").unwrap();
        let mut driver = Driver::fresh(Bounds::default());
        let (request, settings) = (driver.request(), Settings { classes, ..plain() });
        driver.tell(Input::Configure { request, queue: name.clone(), settings, version: None }).unwrap();
        driver.tell(slots_of(1, slots, &name)).unwrap();
        Queue(driver, name)
    }

    fn put(&mut self, key: &str, count: u64, max_duration_ms: u64) {
        let mut task = NewTask::new(Key::new(key).unwrap());
        task.max_duration_ms = max_duration_ms;
        self.0.enqueue(&self.1.clone(), vec![task; count as usize]).unwrap();
    }

    /// What is said of these tasks.
    fn said(&self, tasks: &[u64]) -> Vec<Option<Estimate>> {
        let wanted: Vec<Wanted> = self.0.store.look(SHARD, |tables| {
            let tasks = tasks.iter().map(|id| &tables.tasks[&TaskId(*id)]);
            tasks.map(|t| Wanted { task: t.id, lane: t.lane, place: t.place, key: t.key.clone() }).collect()
        });
        self.0.shard.snapshot(&self.1, self.0.now).unwrap().estimate(&wanted)
    }
}

fn upper(estimates: &[Option<Estimate>]) -> Vec<(u64, Option<u64>)> {
    estimates.iter().map(|said| said.map(|said| (said.position, said.upper_ms)).unwrap()).collect()
}

#[test]
fn a_bound_is_what_all_that_go_before_may_take() {
    let mut queue = Queue::new(Vec::new(), 2);
    queue.put("a", 6, 1_000);
    // Two run; the others follow two by two.
    assert_eq!(
        upper(&queue.said(&[3, 4, 5, 6])),
        [(1, Some(1_000)), (2, Some(1_000)), (3, Some(2_000)), (4, Some(2_000))]
    );
    queue.0.wait(400).unwrap();
    assert_eq!(upper(&queue.said(&[3, 5])), [(1, Some(600)), (3, Some(1_600))]);
    // One without a duration goes ahead of whatever comes behind it, and there is no bound for that.
    queue.put("a", 1, 0);
    queue.put("a", 3, 1_000);
    assert_eq!(
        upper(&queue.said(&[7, 8, 9, 10])),
        [(5, Some(2_600)), (6, Some(2_600)), (7, Some(3_600)), (8, Some(4_600))]
    );
    queue.put("a", 1, 0);
    queue.put("a", 2, 1_000);
    assert_eq!(upper(&queue.said(&[12, 13])), [(10, None), (11, None)]);
}

#[test]
fn what_comes_behind_changes_nothing_and_what_is_fairer_goes_ahead() {
    let class = |duration_ms, limit| ClassLimit { duration_ms, limit };
    for classes in [vec![], vec![class(1_000, Limit::All)]] {
        let mut queue = Queue::new(classes, 3);
        queue.put("a", 20, 1_000);
        let tasks: Vec<u64> = (4..=20).collect();
        let before = queue.said(&tasks);
        queue.put("a", 30, 1_000);
        assert_eq!(queue.said(&tasks), before, "tasks of the same key stand behind");
        queue.put("b", 1, 1_000);
        let after = queue.said(&tasks);
        assert_eq!(after.last().unwrap().unwrap().position, before.last().unwrap().unwrap().position + 1);
    }
}

#[test]
fn a_queue_in_which_nothing_starts_says_nothing() {
    let mut queue = Queue::new(Vec::new(), 0);
    queue.put("a", 2, 1_000);
    assert_eq!(queue.said(&[1, 2]), [None, None]);
}

/// Memory knows eight rows; the others are placed by what their keys were charged.
#[test]
fn what_memory_does_not_know_is_extrapolated_and_marked() {
    let name = QueueName::new("q").unwrap();
    let bounds = Bounds { window_rows: 8, page_rows: 8, ..Bounds::default() };
    let mut queue = Queue(Driver::fresh(bounds), name.clone());
    queue.put("a", 60, 1_000);
    queue.put("b", 60, 1_000);
    queue.0.tell(slots_of(1, 2, &name)).unwrap();
    let ids: Vec<u64> = (1..=120).filter(|id| queue.0.shard.run(TaskId(*id)).is_none()).collect();
    let said = queue.said(&ids);
    let (known, beyond): (Vec<_>, Vec<_>) = said.into_iter().flatten().partition(|said| !said.approximate);
    assert!(known.len() >= 4 && beyond.len() > 100, "{} known, {} beyond", known.len(), beyond.len());
    let mut positions: Vec<u64> = beyond.iter().map(|said| said.position).collect();
    positions.sort_unstable();
    // Two keys share: position n is served as the n-th, within a few.
    for (n, position) in positions.iter().enumerate() {
        let served = (known.len() + n + 1) as u64;
        assert!(position.abs_diff(served) <= 4, "the {served}th is said to be the {position}th");
    }
    assert!(beyond.iter().all(|said| said.upper_ms.is_some()));
}
