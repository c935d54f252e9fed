//! What is said of waiting tasks, and what then happens. `evenhand-sim estimates` prints the same as a table, over more
//! seeds.

#![expect(clippy::unwrap_used, reason = "a failed unwrap here is a failed test")]

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::change::Settings;
use evenhand_core::estimate::{Estimate, Wanted};
use evenhand_core::life::End;
use evenhand_core::names::{Key, Priority, QueueName, TaskId, WorkerId};
use evenhand_core::{Bounds, Input, NewTask, bounds};
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

/// With several classes too: a bound depends on what runs and what goes before. (What needs a shorter class may go ahead,
/// and is seen to.)
#[test]
fn with_classes_too_what_comes_behind_changes_nothing() {
    let class = |duration_ms, limit| ClassLimit { duration_ms, limit };
    let classes =
        vec![class(1_000, Limit::All), class(5_000, Limit::Slots(2)), class(9_000, Limit::Slots(1))];
    for duration_ms in [1_000, 5_000, 9_000] {
        let mut queue = Queue::new(classes.clone(), 3);
        for runs in [9_000, 5_000, 1_000] {
            queue.put("a", 1, runs);
        }
        queue.put("a", 9, duration_ms);
        let tasks: Vec<u64> = (4..=12).collect();
        let before = queue.said(&tasks);
        queue.put("a", 30, duration_ms);
        assert_eq!(queue.said(&tasks), before);
    }
}

#[test]
fn a_rate_is_played_too() {
    let mut queue = Queue::new(Vec::new(), 8);
    let settings =
        Settings { rate: Some(Rate { per_second: 1_000, burst: 1_000, unit: RateUnit::Tasks }), ..plain() };
    let request = queue.0.request();
    queue.0.tell(Input::Configure { request, queue: queue.1.clone(), settings, version: None }).unwrap();
    queue.put("a", 4, 500);
    let seconds = [(1, Some(1_000)), (2, Some(2_000)), (3, Some(3_000)), (4, Some(4_000))];
    assert_eq!(upper(&queue.said(&[1, 2, 3, 4])), seconds);
    queue.0.wait(1_000).unwrap();
    assert!(queue.0.shard.run(TaskId(1)).is_some(), "it is as it was said");
}

/// Less urgent tasks wait for all that are more urgent, also for those that memory does not know.
#[test]
fn what_waits_behind_the_unknown_is_approximate() {
    let name = QueueName::new("q").unwrap();
    let bounds = Bounds { window_rows: 8, page_rows: 8, ..Bounds::default() };
    let mut queue = Queue(Driver::fresh(bounds), name.clone());
    queue.put("a", 60, 1_000);
    let mut task = NewTask::new(Key::new("b").unwrap());
    (task.max_duration_ms, task.priority) = (1_000, Priority(7));
    queue.0.enqueue(&name, vec![task]).unwrap();
    queue.0.tell(slots_of(1, 2, &name)).unwrap();
    let last = queue.said(&[61])[0].unwrap();
    assert!(last.approximate && last.position.abs_diff(59) <= 1, "{last:?}");
    assert!(last.upper_ms.unwrap().abs_diff(30_000) < 4_000, "{last:?}");
}

/// A key at its limit waits for itself: its rows on the shelf count, one after the other.
#[test]
fn tasks_of_a_key_at_its_limit_have_positions_of_their_own() {
    let mut queue = Queue::new(Vec::new(), 8);
    let (request, settings) = (queue.0.request(), Settings { key_limit: Some(2), ..plain() });
    queue.0.tell(Input::Configure { request, queue: queue.1.clone(), settings, version: None }).unwrap();
    queue.put("a", 8, 1_000);
    let said = queue.said(&[3, 4, 5, 8]);
    let positions: Vec<u64> = said.iter().map(|said| said.unwrap().position).collect();
    assert_eq!(positions, [1, 2, 3, 6]);
    assert!(said.iter().all(|said| said.unwrap().approximate && said.unwrap().upper_ms.is_none()));
}

/// A task that runs is told nothing, though the store has it in its lane.
#[test]
fn nothing_is_said_of_a_task_that_runs() {
    let mut queue = Queue::new(Vec::new(), 1);
    queue.put("a", 3, 1_000);
    assert_eq!(queue.said(&[1]), [None]);
}

/// How much of their durations runs use is learned from what workers say; it may be a lot.
#[test]
fn a_run_that_took_much_longer_than_it_may_does_not_break_the_play() {
    let mut queue = Queue::new(Vec::new(), 1);
    queue.put("a", 1, 1);
    queue.0.wait(3_000_000).unwrap();
    let run = queue.0.shard.run(TaskId(1)).unwrap().clone();
    queue.0.end(WorkerId(1), &run, End::TimeUp).unwrap();
    queue.put("a", 3, bounds::DURATION_MS);
    assert!(queue.said(&[3])[0].is_some());
}
