//! Larger worlds: crowds of keys, restarts with many of them, crashes at every point, zombies, and the
//! simulator's own honesty (the same seed gives the same effects). That every canary is caught, `make test` sees with
//! the simulator's own command.

#![expect(clippy::unwrap_used, reason = "a failed unwrap here is a failed test")]

use std::collections::BTreeMap;

use evenhand_core::backlog::{Cost, Weight};
use evenhand_core::life::{End, Ending};
use evenhand_core::names::{Key, QueueName, WorkerId};
use evenhand_core::{Bounds, Input, NewTask, Run};
use evenhand_sim::driver::{Driver, Event, SHARD, Trouble};
use evenhand_sim::plan::Plan;
use evenhand_sim::rng::Rng;
use evenhand_sim::{Options, Report, Violation, fair, play, world};
use evenhand_store::StoreError;

const WORKER: WorkerId = WorkerId(1);

fn queue() -> QueueName {
    QueueName::new("q").unwrap()
}

fn key(n: u64) -> Key {
    Key::new(&format!("key-{n}")).unwrap()
}

/// A driver for large worlds: the invariants are checked now and then by hand.
fn large() -> Driver {
    let mut driver = Driver::fresh(Bounds { window_rows: 5_000, page_rows: 2_000, ..Bounds::default() });
    driver.checks = false;
    driver
}

fn put(driver: &mut Driver, keys: impl IntoIterator<Item = u64>) {
    let tasks: Vec<NewTask> = keys.into_iter().map(|n| NewTask::new(key(n))).collect();
    for some in tasks.chunks(5_000) {
        driver.enqueue(&queue(), some.to_vec()).unwrap();
    }
}

fn slots(driver: &mut Driver, slots: u32) {
    driver.tell(Input::Slots { worker: WORKER, slots, queues: vec![(queue(), Weight::ONE)] }).unwrap();
}

fn started(driver: &mut Driver) -> Vec<Run> {
    let started = |event| if let Event::Started(_, run) = event { Some(run) } else { None };
    driver.events().into_iter().filter_map(started).collect()
}

/// Runs everything on one slot and returns the keys in the order in which they were started.
fn serve_all(driver: &mut Driver) -> Vec<Key> {
    let mut order = Vec::new();
    slots(driver, 1);
    let mut running = started(driver);
    while let Some(run) = running.pop() {
        order.push(run.key.clone());
        driver.end(WORKER, &run, End::Succeeded).unwrap();
        running.extend(started(driver));
    }
    evenhand_core::check::invariants(&driver.shard).unwrap();
    driver.settle().unwrap();
    order
}

// Scenario 10, third part.
#[test]
fn weights_501_and_1000_differ_by_their_true_ratio() {
    let mut driver = large();
    for (n, weight) in [(1, 501.0), (2, 1000.0)] {
        let mut task = NewTask::new(key(n));
        task.weight = Weight::new(weight).unwrap();
        for _ in 0..4 {
            driver.enqueue(&queue(), vec![task.clone(); 5_000]).unwrap();
        }
    }
    let order = serve_all(&mut driver);
    // Of the first 15,010 starts, the weights give 501 / 1501 to the first key.
    let first = order[..15_010].iter().filter(|k| **k == key(1)).count();
    assert!((5_009..=5_011).contains(&first), "{first} of 15,010, due are 5,010");
}

// Scenario 11.
#[test]
fn light_keys_come_earlier_and_the_heaviest_later_than_in_order_of_arrival() {
    let mut driver = large();
    let mut rng = Rng::new(11);
    let arrivals: Vec<u64> = (0..100_000).map(|_| rng.zipf(90)).collect();
    put(&mut driver, arrivals.iter().copied());
    let order = serve_all(&mut driver);
    assert_eq!(order.len(), arrivals.len());

    let mean = |positions: &[usize]| positions.iter().sum::<usize>() as f64 / positions.len() as f64;
    let mut arrived: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
    let mut served: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
    arrivals.iter().enumerate().for_each(|(at, &n)| arrived.entry(key(n)).or_default().push(at));
    order.iter().enumerate().for_each(|(at, k)| served.entry(k.clone()).or_default().push(at));
    let mut by_size: Vec<&Key> = arrived.keys().collect();
    by_size.sort_by_key(|k| arrived[*k].len());
    for light in &by_size[..45] {
        assert!(mean(&served[*light]) < mean(&arrived[*light]), "light key {light} was not served earlier");
    }
    let heaviest = by_size[89];
    assert!(mean(&served[heaviest]) > mean(&arrived[heaviest]), "the heaviest key was not served later");
}

#[test]
fn equal_keys_finish_within_one_round_of_each_other() {
    for (keys, each) in [(50, 200), (50_000, 2)] {
        let mut driver = large();
        put(&mut driver, (0..keys).flat_map(|n| std::iter::repeat_n(n, each)));
        let order = serve_all(&mut driver);
        let mut last: BTreeMap<&Key, usize> = BTreeMap::new();
        order.iter().enumerate().for_each(|(at, key)| {
            last.insert(key, at);
        });
        let first_to_finish = last.values().min().unwrap();
        assert!(
            order.len() - first_to_finish <= keys as usize,
            "{keys} keys finished more than a round apart"
        );
    }
}

// Scenario 12.
#[test]
fn after_a_restart_with_100_000_keys_each_goes_on_behind_its_own() {
    let mut driver = large();
    put(&mut driver, (0..100_000).chain(0..100_000));
    driver.retake().unwrap();
    driver.tell(Input::Open).unwrap();
    put(&mut driver, 0..100_000);
    let places: BTreeMap<Key, Vec<(u64, u64)>> = driver.store.look(SHARD, |tables| {
        let mut places: BTreeMap<Key, Vec<(u64, u64)>> = BTreeMap::new();
        for ((_, level), row) in &tables.rows {
            places
                .entry(row.key.clone())
                .or_default()
                .push((level.pass().time().to_f64() as u64, row.task.0));
        }
        places
    });
    assert_eq!(places.len(), 100_000);
    for (key, mut places) in places {
        places.sort_unstable_by_key(|(_, task)| *task);
        let passes: Vec<u64> = places.iter().map(|(pass, _)| *pass).collect();
        assert_eq!(passes, [0, 1, 2], "{key} was not placed behind its own tasks");
    }
}

// Scenario 14, last sentence.
#[test]
fn one_new_key_per_dispatch_does_not_starve_a_key_with_a_backlog() {
    let mut driver = large();
    put(&mut driver, std::iter::repeat_n(0, 2_000));
    slots(&mut driver, 1);
    let mut running = started(&mut driver);
    let mut standing = 0;
    for n in 1..=3_000 {
        let run = running.pop().unwrap();
        standing += u64::from(run.key == key(0));
        put(&mut driver, [n]);
        driver.end(WORKER, &run, End::Succeeded).unwrap();
        running.extend(started(&mut driver));
    }
    // Newcomers arrive as fast as tasks are started, so they queue up beside it; were V held still, it
    // would not be served at all.
    assert!(standing > 50, "the standing key was started {standing} times in 3,000");
}

// Scenario 17a.
#[test]
fn a_retry_is_not_sent_behind_its_keys_backlog() {
    let mut driver = large();
    put(&mut driver, std::iter::repeat_n(1, 50_000).chain(std::iter::repeat_n(2, 50)));
    slots(&mut driver, 1);
    let run = started(&mut driver).pop().unwrap();
    driver.end(WORKER, &run, End::Failed).unwrap();
    for wait in 0..5 {
        let next = started(&mut driver).pop().unwrap();
        if next.task == run.task {
            assert_eq!(next.attempt, 2);
            return;
        }
        assert!(wait < 4, "the retry still waits after {wait} others");
        driver.end(WORKER, &next, End::Succeeded).unwrap();
    }
}

#[test]
fn a_retry_does_not_let_a_stream_of_new_keys_starve_its_key() {
    let mut driver = large();
    put(&mut driver, [0]);
    slots(&mut driver, 1);
    let run = started(&mut driver).pop().unwrap();
    driver.end(WORKER, &run, End::Failed).unwrap();
    put(&mut driver, std::iter::repeat_n(0, 200).chain(std::iter::repeat_n(1, 200)));
    let mut running = started(&mut driver);
    let mut served = [0, 0];
    for n in 2..2_000 {
        let run = running.pop().unwrap();
        (0..2).for_each(|k| served[k] += u64::from(run.key == key(k as u64)));
        put(&mut driver, [n]);
        driver.end(WORKER, &run, End::Succeeded).unwrap();
        running.extend(started(&mut driver));
    }
    assert!(served.iter().all(|&n| n > 20), "in 2,000 starts the standing keys had {served:?}");
}

/// The least charge is hardly more than a tick: V must still get past the place that a level shows.
#[test]
fn the_smallest_charge_is_not_starved_by_a_stream_of_new_keys() {
    let mut driver = large();
    let smallest = |n| {
        let mut task = NewTask::new(key(n));
        task.weight = Weight::MAX;
        task.cost = Cost::new(1).unwrap();
        task
    };
    driver.enqueue(&queue(), vec![smallest(0); 1_000]).unwrap();
    slots(&mut driver, 1);
    let mut running = started(&mut driver);
    let mut late = 0;
    for n in 1..3_000 {
        let run = running.pop().unwrap();
        late += u64::from(n > 1_500 && run.key == key(0));
        driver.enqueue(&queue(), vec![smallest(n)]).unwrap();
        driver.end(WORKER, &run, End::Succeeded).unwrap();
        running.extend(started(&mut driver));
    }
    assert!(late > 10, "in the second half the standing key was started {late} times");
}

#[test]
fn a_newcomer_does_not_pay_for_a_dispatch_that_was_lost() {
    let mut driver = large();
    let mut light = NewTask::new(key(1));
    light.weight = Weight::MIN;
    driver.enqueue(&queue(), vec![light, NewTask::new(key(2))]).unwrap();
    slots(&mut driver, 2);
    assert_eq!(started(&mut driver).len(), 2);
    put(&mut driver, []);
    // The owner and its worker die together: both rows wait again, and V is far ahead of key 2.
    driver.retake().unwrap();
    driver.tell(Input::Open).unwrap();
    put(&mut driver, std::iter::repeat_n(2, 900).chain([3]));
    slots(&mut driver, 1);
    let mut running = started(&mut driver);
    for waited in 0.. {
        let run = running.pop().unwrap();
        if run.key == key(3) {
            break;
        }
        assert!(waited < 5, "the newcomer waits for a backlog");
        driver.end(WORKER, &run, End::Succeeded).unwrap();
        running.extend(started(&mut driver));
    }
}

#[test]
fn an_old_end_does_not_hide_a_long_runner_that_was_lost() {
    let mut driver = Driver::fresh(Bounds { aside_after_ends: 1, ..Bounds::default() });
    put(&mut driver, [1]);
    slots(&mut driver, 2);
    let first = started(&mut driver).pop().unwrap();
    driver.end(WORKER, &first, End::Failed).unwrap();
    let second = started(&mut driver).pop().unwrap();
    assert_eq!((second.task, second.attempt), (first.task, 2));
    put(&mut driver, [2]);
    let other = started(&mut driver).pop().unwrap();
    driver.end(WORKER, &other, End::Succeeded).unwrap();
    assert_eq!(driver.store.look(SHARD, |tables| tables.aside.len()), 1, "it was to be set aside");
    driver.retake().unwrap();
    // The worker that ran it is gone; another one still says how the first attempt ended.
    let ended = vec![(first.clone(), End::Failed, Ending::default())];
    driver.tell(Input::Report { worker: WorkerId(2), running: Vec::new(), ended, verify: false }).unwrap();
    driver.tell(Input::Open).unwrap();
    slots(&mut driver, 1);
    let third = started(&mut driver).pop().unwrap();
    assert_eq!((third.task, third.attempt), (first.task, 3));
}

#[test]
fn a_hundred_thousand_one_shot_keys_are_all_forgotten_when_idle() {
    let mut driver = large();
    put(&mut driver, 0..100_000);
    assert_eq!(serve_all(&mut driver).len(), 100_000);
    let held = driver.shard.held();
    assert_eq!((held.keys, held.alarms, held.rows, held.runs), (0, 0, 0, 0));
    assert_eq!(
        driver.store.look(SHARD, |tables| (tables.keys.len(), tables.rows.len(), tables.tasks.len())),
        (0, 0, 0)
    );
}

#[test]
fn a_window_far_smaller_than_the_backlog_reads_each_row_about_once() {
    let mut driver = large();
    put(&mut driver, (0..60_000).map(|n| n % 7));
    assert_eq!(serve_all(&mut driver).len(), 60_000);
    assert!(driver.reads < 100, "{} reads for 60,000 rows in pages of 2,000", driver.reads);
}

#[test]
fn long_runners_leave_no_field_of_deleted_rows() {
    let mut driver = Driver::fresh(Bounds { aside_after_ends: 100, ..Bounds::default() });
    driver.checks = false;
    put(&mut driver, (0..5_000).map(|n| n % 3));
    slots(&mut driver, 300);
    let mut running = started(&mut driver);
    let mut stuck = Vec::new();
    while let Some(run) = running.pop() {
        // One task in twenty runs for ever, and there is always a slot for the others.
        if run.task.0 % 20 == 0 {
            stuck.push(run);
        } else {
            driver.end(WORKER, &run, End::Succeeded).unwrap();
        }
        running.extend(started(&mut driver));
        let deleted = driver.store.look(SHARD, |tables| tables.deleted.len());
        assert!(deleted <= 400, "a new owner would pass over {deleted} deleted rows");
    }
    assert_eq!(stuck.len(), 250);
    for run in stuck {
        driver.end(WORKER, &run, End::Succeeded).unwrap();
    }
    assert_eq!(driver.store.look(SHARD, |tables| tables.tasks.len()), 0);
}

// Scenario 13.
#[test]
fn an_owner_that_lost_the_shard_changes_nothing() {
    let mut old = Driver::fresh(Bounds::default());
    put(&mut old, [1, 1, 2]);
    slots(&mut old, 1);
    let run = started(&mut old).pop().unwrap();
    let mut new = Driver::take(old.store.clone(), Bounds::default(), None, old.now).unwrap();
    new.tell(Input::Report { worker: WORKER, running: vec![run.clone()], ended: Vec::new(), verify: false })
        .unwrap();
    new.tell(Input::Open).unwrap();
    put(&mut new, [3]);
    let before = new.store.look(SHARD, Clone::clone);

    let fenced =
        |result: Result<(), Trouble>| matches!(result, Err(Trouble::Store(StoreError::Fenced { .. })));
    let mut zombie = old.shard.clone();
    assert!(fenced(old.end(WORKER, &run, End::Succeeded)), "it finished a task");
    std::mem::swap(&mut zombie, &mut old.shard);
    assert!(fenced(old.enqueue(&queue(), vec![NewTask::new(key(9))])), "it accepted a task");
    assert_eq!(new.store.look(SHARD, Clone::clone), before);
    assert!(old.events().iter().all(|event| !matches!(event, Event::Answered(..) | Event::Acknowledged(..))));
}

/// A chaotic world with few actions, in which nothing goes wrong but what is asked for.
fn short(seed: u64, options: world::Options) -> Result<Report, Violation> {
    let mut rng = Rng::new(seed);
    let plan = Plan::new(&mut rng);
    let span_ms = plan.thresholds[0].lost_after_ms;
    let plan = Plan { actions: 10, weather: 0, span_ms, long_run: 0, ..plan };
    world::play_plan(seed, rng, plan, options)
}

// Scenario 19, as far as there are writes.
#[test]
fn a_crash_at_every_point_loses_nothing() {
    for seed in 0..12 {
        let calm = short(seed, world::Options::default()).unwrap();
        for crash_at in 1..calm.steps {
            let options = world::Options { crash_at: Some(crash_at), ..world::Options::default() };
            if let Err(violation) = short(seed, options) {
                panic!("crash at {crash_at}: {violation}");
            }
        }
    }
}

/// The same with a real directory, which crashes too: every so many points, as each costs real syncs.
#[test]
fn a_crash_of_the_embedded_store_loses_nothing() {
    for seed in 0..3 {
        let disk = world::Options { disk: true, ..world::Options::default() };
        let calm = short(seed, disk).unwrap();
        for crash_at in (1 + seed..calm.steps).step_by(17) {
            if let Err(violation) = short(seed, world::Options { crash_at: Some(crash_at), ..disk }) {
                panic!("crash at {crash_at}: {violation}");
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_effects() {
    for seed in 0..40 {
        let options = world::Options { digest: true, ..world::Options::default() };
        let (first, second) = (world::play(seed, options).unwrap(), world::play(seed, options).unwrap());
        assert_eq!(first, second, "seed {seed}");
        let other = world::play(seed, world::Options { hash_seed: 99, ..options }).unwrap();
        assert_eq!(first, other, "seed {seed}: the order of a hash table shows");
        assert_eq!(fair::play(seed, options).unwrap(), fair::play(seed, options).unwrap());
    }
}

#[test]
fn some_seeds_break_nothing() {
    for seed in 1_000_000..1_000_150 {
        if let Err(violation) = play(seed, Options::default()) {
            panic!("{violation}");
        }
    }
}

/// Fences do not come again, though epochs and dispatches do.
#[test]
fn the_end_of_a_run_from_before_the_store_was_set_back_ends_no_other() {
    assert_eq!(evenhand_sim::set_back::play(None), Ok(()));
}

/// It is heard, and does not hear.
#[test]
fn a_worker_on_a_link_that_is_dead_one_way_is_given_up() {
    assert_eq!(evenhand_sim::one_way::play(None), Ok(()));
}
