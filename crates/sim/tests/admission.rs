//! Admission as data: duration classes, limits, rates, interactive tasks. The first tests are the text that the cycle
//! comes from, line by line; docs/scenarios.md lists what broke other systems.

use evenhand_sim::scenario::play;
use expect_test::{Expect, expect};

fn check(script: &str, expected: Expect) {
    expected.assert_eq(&play(script));
}

#[test]
fn short_work_goes_past_long_work_that_waits_for_its_class() {
    check(
        "classes 3s:all 10s:2 30s:1
         slots w1 3
         put a*3:d=30s
         put b*2:d=3s
         held
         explain a/2
         done b/1
         done a/1",
        expect![[r#"
            run a/1 for 30s
            run b/1 for 3s
            run b/2 for 3s
            3s: 3 of 3, 10s: 1 of 2, 30s: 1 of 1
            a/2: 0 ahead; the 30s class is full: 1 of 1 held by a/1; every slot is taken (3)
            run a/2 for 30s
        "#]],
    );
}

#[test]
fn a_default_task_gets_the_longest_class_that_is_free() {
    check(
        "classes 3s:all 10s:2 30s:1
         slots w1 4
         put a*4
         held",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 10s
            run a/3 for 3s
            run a/4 for 3s
            3s: 4 of 4, 10s: 2 of 2, 30s: 1 of 1
        "#]],
    );
}

/// The text's first bullet: the slow limit is reached, and a default run holds it.
#[test]
fn a_slow_task_that_is_first_has_one_default_run_downgraded_to_medium() {
    check(
        "classes 3s:all 10s:3 30s:1
         slots w1 3
         put a
         put b:d=30s
         held",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 10s
            run b/1 for 30s
            3s: 2 of 3, 10s: 2 of 3, 30s: 1 of 1
        "#]],
    );
}

#[test]
fn it_is_downgraded_to_fast_instead_if_medium_is_also_reached() {
    check(
        "classes 3s:all 10s:2 30s:2
         slots w1 4
         put a b:d=30s
         put c:d=30s
         held",
        expect![[r#"
            run a/1 for 30s
            run b/1 for 30s
            cut a/1 to 3s
            run c/1 for 30s
            3s: 3 of 4, 10s: 2 of 2, 30s: 2 of 2
        "#]],
    );
}

#[test]
fn if_nobody_can_be_downgraded_slow_tasks_are_ignored_for_the_rest_of_the_cycle() {
    check(
        "classes 3s:all 10s:3 30s:1
         slots w1 4
         put a:d=30s
         put b:d=30s c:d=10s d:d=3s
         held
         explain b/1",
        expect![[r#"
            run a/1 for 30s
            run d/1 for 3s
            run c/1 for 10s
            3s: 3 of 4, 10s: 2 of 3, 30s: 1 of 1
            b/1: 0 ahead; the 30s class is full: 1 of 1 held by a/1
        "#]],
    );
}

/// The text's second bullet.
#[test]
fn a_medium_task_that_is_first_has_a_slow_default_run_downgraded_to_fast_before_a_medium_one() {
    check(
        "classes 3s:all 10s:2 30s:1
         slots w1 4
         put a b
         held
         put c:d=10s
         held
         put d:d=10s
         held",
        expect![[r#"
            run a/1 for 30s
            run b/1 for 10s
            3s: 2 of 4, 10s: 2 of 2, 30s: 1 of 1
            cut a/1 to 3s
            run c/1 for 10s
            3s: 3 of 4, 10s: 2 of 2, 30s: 0 of 1
            cut b/1 to 3s
            run d/1 for 10s
            3s: 4 of 4, 10s: 2 of 2, 30s: 0 of 1
        "#]],
    );
}

/// The text's third bullet: it does not impact the fast limit immediately.
#[test]
fn when_every_slot_is_taken_all_default_runs_are_downgraded_to_fast_and_no_slot_is_free_by_that() {
    check(
        "classes 3s:all 10s:2 30s:2
         slots w1 2
         put a*2
         held
         put b:d=3s
         held
         explain b/1
         time a/1
         tries a/1",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 30s
            3s: 2 of 2, 10s: 2 of 2, 30s: 2 of 2
            cut a/1 to 3s
            cut a/2 to 3s
            3s: 2 of 2, 10s: 0 of 2, 30s: 0 of 2
            b/1: 0 ahead; every slot is taken (2)
            run b/1 for 3s
            failed a/1
        "#]],
    );
}

#[test]
fn what_a_downgrade_ended_fails_and_says_why() {
    check(
        "settings retention=60000
         classes 3s:all 30s:all
         slots w1 1
         put a
         put b:d=3s
         wait 3000
         time a/1
         tries a/1
         counts",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 3s
            run b/1 for 3s
            failed a/1
            a/1: failed at 3000
            a/1 attempt 1: Downgraded from 0 to 3000
            waiting 0 running 1 succeeded 0 failed 1 canceled 0
            in memory: 0 rows, 1 keys
        "#]],
    );
}

#[test]
fn or_it_is_tried_again_at_once_if_its_queue_wants_that() {
    check(
        "settings retention=60000 after=requeue backoff=5000 attempts=2
         classes 3s:all 30s:all
         slots w1 1
         put a
         put b:d=3s
         time a/1
         done b/1
         put c:d=3s
         time a/1
         tries a/1",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 3s
            run b/1 for 3s
            run a/1 (attempt 2) for 30s
            cut a/1 to 3s
            run c/1 for 3s
            failed a/1
            a/1: failed at 0
            a/1 attempt 1: Downgraded from 0 to 0
            a/1 attempt 2: Downgraded from 0 to 0
        "#]],
    );
}

/// Scenario 26: the worker stops it, for its time counts from its start.
#[test]
fn one_that_ran_longer_than_its_new_class_is_told_at_once() {
    check(
        "classes 3s:all 30s:all
         slots w1 1
         put a
         wait 20000
         put b:d=3s
         time a/1",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 3s
            run b/1 for 3s
            failed a/1
        "#]],
    );
}

#[test]
fn a_task_that_takes_its_whole_time_without_a_downgrade_is_retried_like_any_failure() {
    check(
        "settings retention=60000 attempts=2
         classes 3s:all 30s:all
         slots w1 1
         put a
         time a/1
         tries a/1",
        expect![[r#"
            run a/1 for 30s
            run a/1 (attempt 2) for 30s
            a/1 attempt 1: TimeUp from 0 to 0
        "#]],
    );
}

/// It never queues.
#[test]
fn an_interactive_task_gets_a_slot_now_or_is_denied_now() {
    check(
        "classes 3s:all 10s:2 30s:1
         slots w1 2
         interactive i a
         put b
         interactive j a
         held
         interactive k a
         held
         counts",
        expect![[r#"
            run i
            run b/1 for 30s
            cut b/1 to 10s
            interactive refused: limited: every slot is taken (2); interactive tasks do not wait
            3s: 2 of 2, 10s: 1 of 2, 30s: 0 of 1
            cut b/1 to 3s
            interactive refused: limited: every slot is taken (2); interactive tasks do not wait
            3s: 2 of 2, 10s: 0 of 2, 30s: 0 of 1
            waiting 0 running 1 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 1 keys
        "#]],
    );
}

#[test]
fn a_denied_interactive_request_takes_one_step_of_the_longest_default_run() {
    check(
        "classes 3s:all 10s:2 30s:1
         slots w1 2
         put a*2
         held
         interactive i x
         held
         interactive j x
         held
         interactive k x
         held",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 10s
            3s: 2 of 2, 10s: 2 of 2, 30s: 1 of 1
            cut a/1 to 10s
            interactive refused: limited: every slot is taken (2); interactive tasks do not wait
            3s: 2 of 2, 10s: 2 of 2, 30s: 0 of 1
            cut a/1 to 3s
            interactive refused: limited: every slot is taken (2); interactive tasks do not wait
            3s: 2 of 2, 10s: 1 of 2, 30s: 0 of 1
            cut a/2 to 3s
            interactive refused: limited: every slot is taken (2); interactive tasks do not wait
            3s: 2 of 2, 10s: 0 of 2, 30s: 0 of 1
        "#]],
    );
}

#[test]
fn an_interactive_run_is_halted_when_a_task_needs_its_slot_which_is_free_at_once() {
    check(
        "slots w1 2
         interactive i a
         interactive j a
         put b
         put c
         counts",
        expect![[r#"
            run i
            run j
            stop j
            over j: Halted
            run b/1
            stop i
            over i: Halted
            run c/1
            waiting 0 running 2 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 2 keys
        "#]],
    );
}

#[test]
fn it_is_warned_first_if_its_queue_asks_for_that() {
    check(
        "settings grace=500
         slots w1 1
         interactive i a
         put b
         wait 499
         wait 1
         counts",
        expect![[r#"
            run i
            warn i: 500 ms
            stop i
            over i: Halted
            run b/1
            waiting 0 running 1 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 1 keys
        "#]],
    );
}

#[test]
fn a_warning_is_forgotten_if_nothing_needs_the_slot_any_more() {
    check(
        "settings grace=500
         slots w1 1
         interactive i a
         put b
         cancel b/1
         wait 1000
         hangup i",
        expect![[r#"
            run i
            warn i: 500 ms
            canceled b/1
            stop i
        "#]],
    );
}

#[test]
fn an_interactive_run_that_nobody_watches_any_more_is_stopped() {
    check(
        "slots w1 1
         interactive i a d=5s
         hangup i
         done i
         put b",
        expect![[r#"
            run i for 5s
            stop i
            over i: Canceled
            run b/1
        "#]],
    );
}

#[test]
fn percentages_follow_the_workers() {
    check(
        "classes 3s:all 10s:50% 30s:25%
         slots w1 2
         put a*9:d=30s
         held
         slots w2 6
         held
         lose w2
         held",
        expect![[r#"
            run a/1 for 30s
            3s: 1 of 2, 10s: 1 of 1, 30s: 1 of 1
            run a/2 on w2 for 30s
            3s: 2 of 8, 10s: 2 of 4, 30s: 2 of 2
            3s: 1 of 2, 10s: 1 of 1, 30s: 1 of 1
        "#]],
    );
}

/// However long a class is blocked, its keys share what it gets.
#[test]
fn keys_share_a_class_that_is_blocked_most_of_the_time() {
    check(
        "classes 3s:all 30s:1
         slots w1 2
         put a*3:d=30s
         done
         put b*3:d=30s c*2:d=30s:w=2
         drain",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 30s
            run a/3 for 30s
            run b/1 for 30s
            run c/1 for 30s
            run c/2 for 30s
            run b/2 for 30s
            run b/3 for 30s
        "#]],
    );
}

/// Scenario 23.
#[test]
fn after_a_restart_what_runs_still_counts_for_its_classes() {
    check(
        "classes 3s:all 10s:2 30s:1
         slots w1 3
         put a:d=30s b
         put c*2:d=30s
         held
         restart
         held
         put d:d=30s
         done a/1",
        expect![[r#"
            run b/1 for 30s
            cut b/1 to 10s
            run a/1 for 30s
            3s: 2 of 3, 10s: 2 of 2, 30s: 1 of 1
            restart
            3s: 2 of 3, 10s: 2 of 2, 30s: 1 of 1
            run c/1 for 30s
        "#]],
    );
}

#[test]
fn a_downgrade_survives_a_restart_because_the_worker_knows_it() {
    check(
        "classes 3s:all 10s:3 30s:1
         slots w1 3
         put a
         put b:d=30s
         restart
         held",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 10s
            run b/1 for 30s
            restart
            3s: 2 of 3, 10s: 2 of 3, 30s: 1 of 1
        "#]],
    );
}

#[test]
fn interactive_runs_do_not_outlive_a_restart() {
    check(
        "slots w1 2
         interactive i a
         restart
         counts
         put b*2",
        expect![[r#"
            run i
            restart
            stop i
            waiting 0 running 0 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 0 keys
            run b/1
            run b/2
        "#]],
    );
}

#[test]
fn five_classes_have_the_same_rules() {
    check(
        "classes 1s:all 5s:5 20s:4 60s:3 300s:1
         slots w1 6
         put a
         put b:d=300s
         held
         put c*2:d=60s
         held
         put d:d=60s e:d=20s f:d=1s
         held",
        expect![[r#"
            run a/1 for 300s
            cut a/1 to 60s
            run b/1 for 300s
            1s: 2 of 6, 5s: 2 of 5, 20s: 2 of 4, 60s: 2 of 3, 300s: 1 of 1
            run c/1 for 60s
            cut a/1 to 20s
            run c/2 for 60s
            1s: 4 of 6, 5s: 4 of 5, 20s: 4 of 4, 60s: 3 of 3, 300s: 1 of 1
            run f/1 for 1s
            cut a/1 to 5s
            run e/1 for 20s
            1s: 6 of 6, 5s: 5 of 5, 20s: 4 of 4, 60s: 3 of 3, 300s: 1 of 1
        "#]],
    );
}

#[test]
fn a_class_that_is_longer_than_the_longest_is_refused() {
    check(
        "classes 3s:all 10s:2
         put a:d=11s
         put a:d=10s",
        expect![[r#"
            put refused: invalid: tasks[0].max_duration_ms: 11000 is longer than the longest class of this queue, 10000; ask for less
        "#]],
    );
}

/// Scenario 27. It goes to the lane of its new class.
#[test]
fn a_client_may_shorten_its_task_while_it_waits() {
    check(
        "classes 3s:all 30s:1
         slots w1 2
         put a*2:d=30s
         shorten a/2 3s
         shorten a/2 10s
         shorten a/2 0s
         counts",
        expect![[r#"
            run a/1 for 30s
            shortened to 3s
            run a/2 for 3s
            shorten refused: invalid: max_duration_ms: 10000 is more than the 3000 that the task has; a duration can only be shortened
            shorten refused: invalid: max_duration_ms: 0 is out of range; use 1 to 31536000000
            waiting 0 running 2 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 2 keys
        "#]],
    );
}

#[test]
fn a_client_may_shorten_its_task_while_it_runs() {
    check(
        "classes 3s:all 30s:1
         slots w1 2
         put a*2:d=30s
         shorten a/1 2s
         held
         restart
         held
         shorten a/1 5s",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 30s
            cut a/1 to 2s
            shortened to 2s
            3s: 2 of 2, 30s: 1 of 1
            restart
            3s: 2 of 2, 30s: 1 of 1
            shorten refused: invalid: max_duration_ms: 5000 is more than the 2000 that the task has; a duration can only be shortened
        "#]],
    );
}

#[test]
fn a_default_task_that_is_shortened_is_one_with_a_duration() {
    check(
        "classes 3s:all 30s:all
         slots w1 1
         put a
         shorten a/1 20s
         put b:d=3s
         held",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 20s
            shortened to 20s
            3s: 1 of 1, 30s: 1 of 1
        "#]],
    );
}

#[test]
fn a_task_that_is_put_off_can_be_shortened_too() {
    check(
        "classes 3s:all 30s:1
         slots w1 1
         put a:d=30s:delay=1000
         shorten a/1 3s
         wait 999
         wait 1",
        expect![[r#"
            shortened to 3s
            run a/1 for 3s
        "#]],
    );
}

#[test]
fn one_that_keeps_its_class_keeps_its_place() {
    check(
        "put a*2:d=30s b:d=30s
         shorten a/1 20s
         lanes
         slots w1 1
         drain",
        expect![[r#"
            shortened to 20s
            lane 0/5/0: V=0.000 rows [b/1@0.000 a/1@0.000 a/2@1.000]
            run b/1 for 30s
            run a/1 for 20s
            run a/2 for 30s
        "#]],
    );
}

/// Scenario 28.
#[test]
fn a_key_at_its_limit_hides_nobody_and_comes_back_when_it_may() {
    check(
        "settings keylimit=2
         slots w1 4
         put a*5
         put b
         explain a/3
         done a/1
         counts a",
        expect![[r#"
            run a/1
            run a/2
            run b/1
            a/3: at least 0 ahead; key a is at its limit, 2 of 2
            run a/3
            a: waiting 2 running 2
        "#]],
    );
}

#[test]
fn a_key_may_have_a_limit_of_its_own() {
    check(
        "settings keylimit=1
         slots w1 9
         put a*5 b*5
         limit a 3
         limit b 2
         limit a none
         drain",
        expect![[r#"
            run a/1
            run b/1
            run a/2
            run a/3
            run b/2
            run b/3
            run a/4
            run b/4
            run b/5
            run a/5
        "#]],
    );
}

#[test]
fn a_limit_counts_over_priorities_and_classes() {
    check(
        "settings keylimit=2
         classes 3s:all 30s:2
         slots w1 4
         put a*2:d=3s
         put a*2:d=30s:p=0
         put b
         done a/1
         done a/2
         counts a",
        expect![[r#"
            run a/1 for 3s
            run a/2 for 3s
            run b/1 for 30s
            run a/3 for 30s
            cut b/1 to 3s
            run a/4 for 30s
            a: waiting 0 running 2
        "#]],
    );
}

/// Scenario 29.
#[test]
fn a_limit_that_is_full_leaves_no_slot_idle() {
    check(
        "settings keylimit=1
         classes 3s:all 30s:1
         slots w1 3
         put a*3:d=30s b*3:d=30s c:d=3s
         held
         done a/1",
        expect![[r#"
            run c/1 for 3s
            run a/1 for 30s
            3s: 2 of 3, 30s: 1 of 1
            run b/1 for 30s
        "#]],
    );
}

#[test]
fn a_paused_key_and_its_limit_are_two_things() {
    check(
        "settings keylimit=1
         slots w1 4
         put a*2
         pause key a
         done a/1
         resume key a",
        expect![[r#"
            run a/1
            run a/2
        "#]],
    );
}

#[test]
fn a_rate_lets_so_much_start_and_begins_empty() {
    check(
        "settings rate=2/2
         slots w1 9
         put a*5
         wait 499
         wait 1
         wait 1000
         explain a/4
         wait 5000
         put b*3
         restart
         wait 500",
        expect![[r#"
            run a/1
            run a/2
            run a/3
            a/4: 0 ahead; its queue is at its rate, 2 a second; the next may start in 500ms
            run a/4
            run a/5
            run b/1
            run b/2
            restart
            run b/3
        "#]],
    );
}

#[test]
fn a_rate_of_keys_holds_nobody_else_up() {
    check(
        "settings keyrate=1/1
         slots w1 9
         put a*3 b*2
         wait 1000
         explain a/2
         wait 1000
         wait 1000",
        expect![[r#"
            run a/1
            run b/1
            a/2: at least 0 ahead; key a is at its rate, 1 a second; the next may start in 1s
            run a/2
            run b/2
            run a/3
        "#]],
    );
}

/// What a task costs may be more than a bucket holds: it starts when no debt is left, and leaves one.
#[test]
fn a_rate_of_cost_counts_what_tasks_cost() {
    check(
        "settings rate=2/2cost
         slots w1 9
         put a*2:x=4 a
         wait 1
         explain a/2
         wait 2000
         explain a/3
         wait 2000",
        expect![[r#"
            run a/1
            a/2: 0 ahead; its queue is at its rate, 2 a second; the next may start in 2s
            run a/2
            a/3: 0 ahead; its queue is at its rate, 2 a second; the next may start in 2s
            run a/3
        "#]],
    );
}

/// There a task costs the seconds that it is expected to take.
#[test]
fn a_rate_of_cost_counts_seconds_where_time_is_shared() {
    check(
        "settings rate=2/2cost
         share time
         slots w1 9
         put a*2:ms=4000 a:ms=1000
         wait 1
         explain a/2
         wait 2000
         explain a/3
         wait 2000",
        expect![[r#"
            run a/1
            a/2: 0 ahead; its queue is at its rate, 2 a second; the next may start in 2s
            run a/2
            a/3: 0 ahead; its queue is at its rate, 2 a second; the next may start in 2s
            run a/3
        "#]],
    );
}

/// Scenario 25.
#[test]
fn a_refused_dispatch_costs_no_rate() {
    check(
        "settings rate=1/1
         slots w1 1
         put a
         wait 1000
         refuse a/1
         counts",
        expect![[r#"
            run a/1
            run a/1
            waiting 0 running 1 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 1 keys
        "#]],
    );
}

#[test]
fn an_overdue_run_is_stopped_by_the_scheduler_if_its_worker_does_not() {
    check(
        "settings retention=60000 attempts=1
         slots w1 1
         put a:d=1s
         wait 5999
         wait 1
         wait 5000
         fail a/1
         tries a/1",
        expect![[r#"
            run a/1 for 1s
            stop a/1
            stop a/1
            failed a/1
            a/1: failed at 11000
            a/1 attempt 1: TimeUp from 0 to 11000
        "#]],
    );
}

#[test]
fn classes_may_change_while_tasks_run_and_wait() {
    check(
        "slots w1 3
         put a b:d=30s c*2:d=30s d*2
         held
         classes 3s:all 30s:1
         held
         done b/1
         done c/1
         classes
         held",
        expect![[r#"
            run a/1
            run b/1 for 30s
            run c/1 for 30s

            cut a/1 to 3s
            3s: 3 of 3, 30s: 2 of 1
            run d/1 for 3s
            run d/2 for 30s
            cut d/2 to 3s

        "#]],
    );
}

#[test]
fn lowering_a_limit_stops_nothing_and_default_runs_make_way_one_by_one() {
    check(
        "classes 3s:all 30s:3
         slots w1 4
         put a*3
         classes 3s:all 30s:1
         put b:d=30s
         held
         put b:d=30s
         held",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 30s
            run a/3 for 30s
            cut a/2 to 3s
            cut a/3 to 3s
            cut a/1 to 3s
            run b/1 for 30s
            3s: 4 of 4, 30s: 1 of 1
            3s: 4 of 4, 30s: 1 of 1
        "#]],
    );
}

/// The alarm of the old rate would be heard a quarter of an hour later.
#[test]
fn a_rate_that_is_raised_counts_at_once() {
    check(
        "settings rate=0.001/1
         slots w1 2
         resume
         put a*2
         wait 1000
         settings rate=10/1
         resume
         wait 100
         wait 100",
        expect![[r#"
            run a/1
            run a/2
        "#]],
    );
}

/// The cycle repeats after a start: what has just begun with all the time there is may have to give it up at once.
#[test]
fn a_default_run_that_begins_while_others_wait_is_downgraded_at_once() {
    check(
        "classes 3s:all 30s:1
         slots w1 1
         put x:d=3s
         put a*2
         done x/1
         held",
        expect![[r#"
            run x/1 for 3s
            run a/1 for 30s
            cut a/1 to 3s
            3s: 1 of 1, 30s: 0 of 1
        "#]],
    );
}

/// The same for what waits in another queue of its worker.
#[test]
fn it_gives_way_to_another_queue_of_its_worker_too() {
    check(
        "classes 3s:all 30s:1
         slots w1 1 q p
         in p put x
         put a
         in p put y
         done x/1
         done a/1",
        expect![[r#"
            run x/1 for 30s
            cut x/1 to 3s
            run a/1 for 30s
            cut a/1 to 3s
            run y/1 for 30s
        "#]],
    );
}

#[test]
fn nobody_makes_room_for_a_task_whose_key_is_at_its_limit() {
    check(
        "settings keylimit=1
         classes 3s:all 30s:all
         slots w1 2
         put b
         put a:d=3s a:d=3s:p=6
         held
         explain a/2
         done a/1
         put c",
        expect![[r#"
            run b/1 for 30s
            run a/1 for 3s
            3s: 2 of 2, 30s: 1 of 2
            a/2: at least 0 ahead; key a is at its limit, 1 of 1; every slot is taken (2)
            run a/2 for 3s
            cut b/1 to 3s
        "#]],
    );
    check(
        "settings keylimit=1
         slots w1 2
         resume
         interactive i b
         put a a:p=6
         explain a/2",
        expect![[r#"
            run i
            run a/1
            a/2: at least 0 ahead; key a is at its limit, 1 of 1; every slot is taken (2)
        "#]],
    );
}

/// A backlog from before there were classes: what is short goes past what is long.
#[test]
fn when_classes_come_long_tasks_that_wait_hide_no_short_ones() {
    check(
        "slots w1 1
         put x
         put a*3:d=30s
         put b:d=3s c
         classes 3s:all 30s:1
         slots w1 3
         held
         explain a/2
         done b/1
         explain a/3
         cancel a/2
         done a/1
         restart
         lanes",
        expect![[r#"
            run x/1
            cut x/1 to 3s
            run a/1 for 30s
            run b/1 for 3s
            3s: 3 of 3, 30s: 1 of 1
            a/2: 1 ahead; the 30s class is full: 1 of 1 held by a/1; every slot is taken (3); 1 other key shares the queue and goes before its key
            run c/1 for 3s
            a/3: 1 ahead; the 30s class is full: 1 of 1 held by a/1; every slot is taken (3); 1 task of its key goes before it
            canceled a/2
            run a/3 for 30s
            restart
            lane 0/5/0: V=4.000 rows [x/1@0.000 c/1@1.000]
            lane 0/5/1: V=1.000 rows [a/3@1.000]
        "#]],
    );
}

/// Ten clients that were warned at once go at once, if as many tasks need their slots.
#[test]
fn all_that_were_warned_go_when_their_grace_is_over() {
    check(
        "settings grace=500
         slots w1 3
         resume
         interactive i a
         interactive j a
         interactive k a
         put b*2
         wait 500
         loop",
        expect![[r#"
            run i
            run j
            run k
            warn j: 500 ms
            warn k: 500 ms
            stop j
            over j: Halted
            run b/1
            stop k
            over k: Halted
            run b/2
            scheduled, 6 looks
        "#]],
    );
}

/// The worker knows that the run was downgraded, and says so; the next owner does with it what the queue wants.
#[test]
fn what_a_downgrade_ended_is_known_after_a_restart() {
    check(
        "settings after=fail
         classes 3s:all 30s:1
         slots w1 2
         put a
         put b:d=30s
         restart
         cut a/1
         tries a/1",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 3s
            run b/1 for 30s
            restart
            failed a/1
        "#]],
    );
}

/// Also one that was shortened when it had no more than that: it is no default task any more.
#[test]
fn a_shortened_run_stays_shortened_after_a_restart() {
    check(
        "classes 3s:all 30s:1
         slots w1 2
         put a
         shorten a/1 30s
         restart
         put b:d=30s
         held
         fail a/1
         explain a/1",
        expect![[r#"
            run a/1 for 30s
            cut a/1 to 30s
            shortened to 30s
            restart
            3s: 1 of 2, 30s: 1 of 1
            run b/1 for 30s
            a/1: 0 ahead; the 30s class is full: 1 of 1 held by b/1
        "#]],
    );
}
