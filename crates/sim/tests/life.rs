//! Task life as data: delays, retries, cancels, replays, ends. docs/scenarios.md lists what broke other systems;
//! tests are named for what they protect.

#![expect(clippy::unwrap_used, reason = "a failed unwrap here is a failed test")]

use evenhand_core::change::{Settings, Share};
use evenhand_core::life::End;
use evenhand_core::names::{Key, QueueName};
use evenhand_core::{Bounds, Input, NewTask};
use evenhand_sim::driver::{Driver, Event, plain, slots_of};
use evenhand_sim::scenario::play;
use expect_test::{Expect, expect};

fn check(script: &str, expected: Expect) {
    expected.assert_eq(&play(script));
}

// Scenario 16.
#[test]
fn the_end_of_a_run_that_arrives_twice_counts_once() {
    check(
        "settings backoff=1000
         slots w1 1
         put a:t=3
         fail a/1
         again a/1
         counts
         wait 2000
         again a/1
         counts
         done a/1
         again a/1
         counts",
        expect![[r#"
            run a/1
            waiting 0 running 0 succeeded 0 failed 0 canceled 0 scheduled 1
            in memory: 0 rows, 0 keys
            run a/1 (attempt 2)
            waiting 0 running 1 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 1 keys
            waiting 0 running 0 succeeded 1 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

// Scenario 16, the other half: it was lost, is tried elsewhere, and then reports.
#[test]
fn the_end_of_a_run_that_was_given_up_burns_no_attempt() {
    check(
        "settings retention=60000
         slots w1 1
         put a:t=5
         lose w1
         slots w2 1
         fail a/1
         again a/1
         done a/1
         tries a/1",
        expect![[r#"
            run a/1
            run a/1 (attempt 2)
            run a/1 (attempt 3)
            a/1: succeeded at 0
            a/1 attempt 1: Lost from 0 to 0
            a/1 attempt 2: Failed from 0 to 0
            a/1 attempt 3: Succeeded from 0 to 0
        "#]],
    );
}

// Scenario 17.
#[test]
fn a_cancel_works_in_every_state() {
    check(
        "settings backoff=1000 retention=60000
         put before:delay=5000 waits
         cancel before/1
         cancel waits/1
         slots w1 1
         put between:t=3
         fail between/1
         cancel between/1
         put runs
         cancel runs/1
         cancel runs/1
         fail runs/1
         put wins
         cancel wins/1
         done wins/1
         cancel wins/1
         cancel before/1
         counts
         wait 60000
         counts",
        expect![[r#"
            canceled before/1
            canceled waits/1
            run between/1
            canceled between/1
            run runs/1
            stop runs/1
            stopping
            stopping
            canceled runs/1
            run wins/1
            stop wins/1
            stopping
            cancel refused: not_found: task 10 has ended
            cancel refused: not_found: task 1 has ended
            waiting 0 running 0 succeeded 1 failed 0 canceled 4
            in memory: 0 rows, 0 keys
            waiting 0 running 0 succeeded 1 failed 0 canceled 4
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_cancel_of_a_running_task_outlives_its_owner() {
    check(
        "slots w1 1
         put a:t=3
         cancel a/1
         take
         report w1
         open
         fail a/1
         counts",
        expect![[r#"
            run a/1
            stop a/1
            stopping
            another owner takes the shard
            canceled a/1
            waiting 0 running 0 succeeded 0 failed 0 canceled 1
            in memory: 0 rows, 0 keys
        "#]],
    );
    // Nobody runs it any more: it does not start again.
    check(
        "slots w1 1
         put a:t=3
         cancel a/1
         take
         open
         slots w2 1
         counts",
        expect![[r#"
            run a/1
            stop a/1
            stopping
            another owner takes the shard
            canceled a/1
            waiting 0 running 0 succeeded 0 failed 0 canceled 1
            in memory: 0 rows, 0 keys
        "#]],
    );
}

// Scenario 18.
#[test]
fn a_backoff_is_neither_early_because_others_keep_the_loop_busy_nor_late_because_none_do() {
    check(
        "settings backoff=60000
         slots w1 1
         put a:t=3
         fail a/1
         put b*3
         wait 20000
         done
         wait 9000
         done
         explain a/1
         wait 1000
         drain
         explain a/1
         wait 60000
         drain
         counts",
        expect![[r#"
            run a/1
            run b/1
            run b/2
            run b/3
            a/1: due at 30200
            a/1: due at 30200
            run a/1 (attempt 2)
            waiting 0 running 0 succeeded 4 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_delay_outlives_its_owner_and_a_time_in_the_past_is_now() {
    check(
        "slots w1 2
         put later:delay=10000 past:at=0
         explain later/1
         wait 5000
         take
         report w1
         open
         wait 4999
         wait 101
         drain
         counts",
        expect![[r#"
            run past/1
            later/1: due at 10000
            another owner takes the shard
            run later/1
            waiting 0 running 0 succeeded 2 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_delayed_task_gets_no_place_before_those_of_its_key_that_wait() {
    check(
        "slots w1 1
         put a*4 b*4
         put a:delay=100
         wait 200
         drain",
        expect![[r#"
            run a/1
            run b/1
            run a/2
            run b/2
            run a/3
            run b/3
            run a/4
            run b/4
            run a/5
        "#]],
    );
}

// Scenario 7: a whole backlog that has expired.
#[test]
fn what_has_expired_is_not_started_and_what_runs_is_not_stopped() {
    check(
        "bounds window=2 page=2
         slots w1 1
         put a:expires=1000
         put b*5:expires=500
         put c
         wait 400
         wait 700
         counts
         done a/1
         done c/1
         counts",
        expect![[r#"
            run a/1
            expired b/1
            expired b/2
            expired b/3
            expired b/4
            expired b/5
            waiting 1 running 1 succeeded 0 failed 0 canceled 0 expired 5
            in memory: 1 rows, 3 keys
            run c/1
            waiting 0 running 0 succeeded 2 failed 0 canceled 0 expired 5
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_task_that_fails_when_it_is_too_late_to_try_again_has_expired() {
    check(
        "settings backoff=1000
         slots w1 1
         put a:expires=300:t=5
         fail a/1
         counts",
        expect![[r#"
            run a/1
            expired a/1
            waiting 0 running 0 succeeded 0 failed 0 canceled 0 expired 1
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_task_that_keeps_killing_its_workers_is_given_up() {
    check(
        "settings lost=2 attempts=100 retention=60000
         slots w1 1
         put a
         lose w1
         slots w2 1
         lose w2
         slots w3 1
         tries a/1",
        expect![[r#"
            run a/1
            run a/1 (attempt 2)
            failed a/1
            a/1: failed at 0
            a/1 attempt 1: Lost from 0 to 0
            a/1 attempt 2: Lost from 0 to 0
        "#]],
    );
}

#[test]
fn a_task_that_fails_for_good_is_not_tried_again() {
    check(
        "slots w1 1
         put a
         fail a/1 for good
         counts",
        expect![[r#"
            run a/1
            failed a/1
            waiting 0 running 0 succeeded 0 failed 1 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn an_end_is_remembered_as_long_as_it_should_be() {
    check(
        "settings backoff=100 retention=5000
         slots w1 1
         put a:t=2
         fail a/1
         wait 300
         done a/1
         tries a/1
         explain a/1
         take
         report w1
         open
         tries a/1
         wait 5100
         explain a/1
         tries a/1",
        expect![[r#"
            run a/1
            run a/1 (attempt 2)
            a/1: succeeded at 300
            a/1 attempt 1: Failed from 0 to 0
            a/1 attempt 2: Succeeded from 100 to 300
            a/1: ended
            another owner takes the shard
            a/1: succeeded at 300
            a/1 attempt 1: Failed from 0 to 0
            a/1 attempt 2: Succeeded from 100 to 300
            a/1: no such task
        "#]],
    );
}

#[test]
fn an_ended_task_can_be_run_again_as_another() {
    check(
        "settings retention=5000
         slots w1 1
         put a:t=1
         replay a/1 as again/1
         fail a/1
         replay a/1 as again/1
         tries a/1
         done again/1
         counts
         wait 6000
         replay a/1 as again/2",
        expect![[r#"
            run a/1
            replay refused: conflict: task 1 has not ended; cancel it first
            failed a/1
            run again/1
            a/1: failed at 0
            a/1 attempt 1: Failed from 0 to 0
            a/1 again as again/1
            waiting 0 running 0 succeeded 1 failed 1 canceled 0
            in memory: 0 rows, 0 keys
            replay refused: not_found: task 1 does not exist, or its end is not remembered any more
        "#]],
    );
}

#[test]
fn a_unique_key_gives_the_first_task_for_as_long_as_its_window() {
    check(
        "hold writes
         put a:unique=u
         put b:unique=u c:unique=v d:unique=v
         release
         take
         open
         put e:unique=u
         wait 60001
         put f:unique=u:for=1000
         put g:unique=u
         counts",
        expect![[r#"
            b/1 is a/1
            d/1 is c/1
            another owner takes the shard
            e/1 is a/1
            g/1 is f/1
            waiting 3 running 0 succeeded 0 failed 0 canceled 0
            in memory: 3 rows, 3 keys
        "#]],
    );
}

#[test]
fn an_attached_task_is_canceled_when_nobody_has_watched_it_for_its_time() {
    check(
        "slots w1 1
         put runs:attach=2000
         put waits:attach=2000
         put watched:attach=2000
         watch watched/1
         wait 3000
         fail runs/1
         wait 10000
         leave watched/1
         wait 1900
         counts
         wait 300
         fail watched/1
         counts",
        expect![[r#"
            run runs/1
            stop runs/1
            canceled waits/1
            run watched/1
            canceled runs/1
            waiting 0 running 1 succeeded 0 failed 0 canceled 2
            in memory: 0 rows, 2 keys
            stop watched/1
            canceled watched/1
            waiting 0 running 0 succeeded 0 failed 0 canceled 3
            in memory: 0 rows, 0 keys
        "#]],
    );
    // A new owner gives watchers the time to come back.
    check(
        "put a:attach=2000
         wait 1500
         take
         open
         wait 1900
         counts
         wait 200
         counts",
        expect![[r#"
            another owner takes the shard
            waiting 1 running 0 succeeded 0 failed 0 canceled 0
            in memory: 1 rows, 1 keys
            canceled a/1
            waiting 0 running 0 succeeded 0 failed 0 canceled 1
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_paused_queue_starts_nothing_and_forgets_nothing() {
    check(
        "slots w1 2
         put a
         pause
         put b*2
         explain b/1
         done a/1
         take
         report w1
         open
         resume version=0
         resume version=1
         drain
         counts",
        expect![[r#"
            run a/1
            b/1: 0 ahead; its queue is paused
            another owner takes the shard
            resume refused: conflict: version: the settings were changed since version 0; read them again
            run b/1
            run b/2
            waiting 0 running 0 succeeded 3 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

// Scenario 21, and what the loop is said to do.
#[test]
fn what_comes_while_every_slot_is_taken_wakes_nobody() {
    check(
        "loop
         slots w1 1
         loop
         put a
         loop
         put b*50
         put c*50
         put d
         loop
         done a/1
         loop
         drain
         loop
         put e:delay=1000
         loop",
        expect![[r#"
            idle, 0 looks
            idle, 1 looks
            run a/1
            saturated, 2 looks
            saturated, 2 looks
            run b/1
            saturated, 2 looks
            run c/1
            run d/1
            run b/2
            run c/2
            run b/3
            run c/3
            run b/4
            run c/4
            run b/5
            run c/5
            run b/6
            run c/6
            run b/7
            run c/7
            run b/8
            run c/8
            run b/9
            run c/9
            run b/10
            run c/10
            run b/11
            run c/11
            run b/12
            run c/12
            run b/13
            run c/13
            run b/14
            run c/14
            run b/15
            run c/15
            run b/16
            run c/16
            run b/17
            run c/17
            run b/18
            run c/18
            run b/19
            run c/19
            run b/20
            run c/20
            run b/21
            run c/21
            run b/22
            run c/22
            run b/23
            run c/23
            run b/24
            run c/24
            run b/25
            run c/25
            run b/26
            run c/26
            run b/27
            run c/27
            run b/28
            run c/28
            run b/29
            run c/29
            run b/30
            run c/30
            run b/31
            run c/31
            run b/32
            run c/32
            run b/33
            run c/33
            run b/34
            run c/34
            run b/35
            run c/35
            run b/36
            run c/36
            run b/37
            run c/37
            run b/38
            run c/38
            run b/39
            run c/39
            run b/40
            run c/40
            run b/41
            run c/41
            run b/42
            run c/42
            run b/43
            run c/43
            run b/44
            run c/44
            run b/45
            run c/45
            run b/46
            run c/46
            run b/47
            run c/47
            run b/48
            run c/48
            run b/49
            run c/49
            run b/50
            run c/50
            idle, 3 looks
            scheduled, 3 looks
        "#]],
    );
}

// Scenario 14.
#[test]
fn a_paused_key_gets_its_share_from_then_on_and_not_what_it_missed() {
    check(
        "slots w1 1
         put a*8 b*20
         done
         pause key a
         explain a/3
         done
         done
         done
         done
         done
         counts a
         resume key a
         done
         done
         done
         done
         done
         done
         done
         done
         drain
         counts",
        expect![[r#"
            run a/1
            run b/1
            a/3: 2 ahead; key a is paused; every slot is taken (1); 1 other key shares the queue and goes before its key; 1 task of its key goes before it
            run b/2
            run b/3
            run b/4
            run b/5
            run b/6
            a: waiting 7 running 0
            run a/7
            run b/7
            run a/8
            run b/8
            run b/9
            run a/2
            run b/10
            run a/3
            run b/11
            run a/4
            run b/12
            run a/5
            run b/13
            run a/6
            run b/14
            run b/15
            run b/16
            run b/17
            run b/18
            run b/19
            run b/20
            waiting 0 running 0 succeeded 28 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_key_that_is_resumed_while_some_of_its_rows_stand_has_no_credit() {
    check(
        "bounds window=4 page=4
         slots w1 1
         put a*6 b*6 c*6
         pause key a
         done
         done
         done
         resume key a
         drain
         counts",
        expect![[r#"
            run a/1
            run b/1
            run c/1
            run b/2
            run c/2
            run a/3
            run b/3
            run c/3
            run a/4
            run b/4
            run c/4
            run a/5
            run b/5
            run c/5
            run a/6
            run b/6
            run c/6
            run a/2
            waiting 0 running 0 succeeded 18 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn what_is_parked_outlives_its_owner_and_new_tasks_go_behind_it() {
    check(
        "slots w1 1
         put b a*3
         pause key a
         done
         put a*2
         take
         report w1
         open
         put a:delay=500
         wait 600
         counts a
         cancel a/2
         put b
         done
         resume key a
         drain
         counts",
        expect![[r#"
            run b/1
            another owner takes the shard
            a: waiting 6 running 0
            canceled a/2
            run b/2
            run a/1
            run a/3
            run a/4
            run a/5
            run a/6
            waiting 0 running 0 succeeded 7 failed 0 canceled 1
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn what_is_parked_expires_and_fills_no_window() {
    check(
        "bounds window=2 page=2
         settings retention=60000
         put a*9:expires=5000
         put b*2
         pause key a
         slots w1 1
         done
         done
         wait 6000
         counts
         tries a/1
         resume key a
         counts",
        expect![[r#"
            run b/1
            run b/2
            expired a/1
            expired a/2
            expired a/3
            expired a/4
            expired a/5
            expired a/6
            expired a/7
            expired a/8
            expired a/9
            waiting 0 running 0 succeeded 2 failed 0 canceled 0 expired 9
            in memory: 0 rows, 0 keys
            a/1: expired at 5000
            waiting 0 running 0 succeeded 2 failed 0 canceled 0 expired 9
            in memory: 0 rows, 0 keys
        "#]],
    );
}

/// Starts of each key, in order, among the first `n` starts of a queue with one slot whose keys share time. Nobody
/// says how long tasks take, or what is said is as wrong as it can be.
fn starts_by_time(keys: &[(&str, u64, u64)], n: usize, restart_at: Option<usize>) -> Vec<String> {
    let bounds = Bounds { window_rows: 20, page_rows: 7, ..Bounds::default() };
    let mut driver = Driver::fresh(bounds);
    let queue = QueueName::new("q").unwrap();
    let (request, settings) = (driver.request(), Settings { share: Share::Time, ..plain() });
    driver.tell(Input::Configure { request, queue: queue.clone(), settings, version: None }).unwrap();
    for (key, _, says_ms) in keys {
        let task = NewTask { expected_ms: *says_ms, ..NewTask::new(Key::new(key).unwrap()) };
        driver.enqueue(&queue, vec![task; 2 * n]).unwrap();
    }
    driver.tell(slots_of(1, 1, &queue)).unwrap();
    let mut starts = Vec::new();
    while starts.len() < n {
        let events = driver.events();
        let started = events.into_iter().find_map(|event| match event {
            Event::Started(worker, run) => Some((worker, run)),
            Event::Stopped(..)
            | Event::Cut(..)
            | Event::Acknowledged(..)
            | Event::Answered(..)
            | Event::Finished(..) => None,
        });
        let (worker, run) = started.expect("a slot is free, and much waits");
        let takes_ms = keys.iter().find(|(key, ..)| *key == run.key.as_str()).unwrap().1;
        starts.push(run.key.as_str().to_owned());
        driver.wait(takes_ms).unwrap();
        if restart_at == Some(starts.len()) {
            driver.retake().unwrap();
            driver.tell(slots_of(1, 1, &queue)).unwrap();
            let (running, ended) = (vec![run.clone()], vec![]);
            driver.tell(Input::Report { worker, running, ended, verify: false }).unwrap();
            driver.tell(Input::Open).unwrap();
        }
        driver.end(worker, &run, End::Succeeded).unwrap();
    }
    starts
}

fn count(starts: &[String], key: &str) -> usize {
    starts.iter().filter(|start| *start == key).count()
}

#[test]
fn a_key_whose_tasks_take_ten_times_as_long_gets_a_tenth_of_the_starts() {
    // All tasks wait from the beginning, in a backlog hundreds of times as long as the window.
    for (long_says, short_says) in [(0, 0), (1_000, 100), (1, 1_000), (1_000, 1), (1, 0), (0, 5_000)] {
        for restart_at in [None, Some(150)] {
            let keys = [("long", 1_000, long_says), ("short", 100, short_says)];
            let starts = starts_by_time(&keys, 4_400, restart_at);
            let long = count(&starts[1_100..], "long");
            // As many as have places ahead may come early or late, and the one that runs, no more.
            assert!((291..=309).contains(&long), "{long} of 3300, {keys:?}, {restart_at:?}");
            // If nobody exaggerates, that is all from the first start on.
            let from_first = count(&starts, "long");
            let exaggerated = short_says > 100;
            assert!(exaggerated || (391..=409).contains(&from_first), "{from_first} of 4400, {keys:?}");
        }
    }
}

#[test]
fn a_caller_that_says_too_little_gains_nothing() {
    let honest = starts_by_time(&[("liar", 500, 500), ("other", 500, 500)], 400, None);
    let lying = starts_by_time(&[("liar", 500, 1), ("other", 500, 500)], 400, None);
    assert_eq!(count(&honest, "liar"), 200);
    let gained = count(&lying, "liar").abs_diff(200);
    assert!(gained <= 8, "{gained} more");
}

#[test]
fn a_key_that_is_paused_keeps_its_order_where_time_is_shared() {
    check(
        "share time
         put a*12
         pause key a
         slots w1 1
         put a
         resume key a
         drain
         counts",
        expect![[r#"
            run a/1
            run a/2
            run a/3
            run a/4
            run a/5
            run a/6
            run a/7
            run a/8
            run a/9
            run a/10
            run a/11
            run a/12
            run a/13
            waiting 0 running 0 succeeded 13 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn less_urgent_tasks_wait_for_rows_that_come_from_a_shelf() {
    check(
        "share time
         put a*12:p=0 b*4:p=1
         hold writes
         slots w1 10
         release
         done
         done
         drain",
        expect![[r#"
            run a/1
            run a/2
            run a/3
            run a/4
            run a/5
            run a/6
            run a/7
            run a/8
            run a/9
            run a/10
            run a/11
            run a/12
            run b/1
            run b/2
            run b/3
            run b/4
        "#]],
    );
}

#[test]
fn what_a_caller_says_of_its_time_does_not_count_among_queues() {
    check(
        "share time
         slots w1 1 q=1 mail=1
         put a:ms=1000000
         in mail put b*6
         put c*3:ms=10
         drain",
        expect![[r#"
            run a/1
            run b/1
            run c/1
            run b/2
            run c/2
            run b/3
            run c/3
            run b/4
            run b/5
            run b/6
        "#]],
    );
}

#[test]
fn a_task_that_is_canceled_or_expires_took_no_time() {
    check(
        "share time
         slots w1 1
         put b*20:ms=1000
         put a*4:ms=3600000
         put c*2:ms=3600000:expires=500
         cancel a/1
         cancel a/2
         cancel a/3
         cancel a/4
         wait 1000
         put a:ms=1000 c:ms=1000
         done
         wait 1000
         done
         wait 1000
         done
         wait 1000
         done",
        expect![[r#"
            run b/1
            canceled a/1
            canceled a/2
            canceled a/3
            canceled a/4
            expired c/1
            expired c/2
            run a/5
            run c/3
            run b/2
            run b/3
        "#]],
    );
}
