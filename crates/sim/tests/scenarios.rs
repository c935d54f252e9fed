//! Situations that broke other systems, as data. docs/scenarios.md lists them; tests are named for what
//! they protect.

use evenhand_sim::scenario::play;
use expect_test::{Expect, expect};

fn check(script: &str, expected: Expect) {
    expected.assert_eq(&play(script));
}

// Scenario 2, second half.
#[test]
fn a_read_asked_for_with_a_write_runs_after_it_is_durable() {
    check(
        "bounds window=1 page=1
         put a*3
         hold reads
         slots w1 1
         read lost
         hold writes
         put b
         wait 10
         reads
         write
         reads
         release
         drain
         counts",
        expect![[r#"
            run a/1
            0 reads, 0 on their way
            0 reads, 1 on their way
            run a/2
            run b/1
            run a/3
            waiting 0 running 0 succeeded 4 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

// Scenario 6.
#[test]
fn a_write_that_was_applied_though_its_answer_was_lost_is_found() {
    check(
        "slots w1 1
         hold writes
         put a*2
         write unknown
         release
         drain
         counts",
        expect![[r#"
            write failed: the store did not answer (commit); whether the last commit happened is unknown
            restart
            run a/1
            run a/2
            waiting 0 running 0 succeeded 2 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_write_that_was_lost_leaves_nothing() {
    check(
        "slots w1 1
         hold writes
         put a*2
         write lost
         release
         put b
         counts",
        expect![[r#"
            write failed: the store did not answer (commit); whether the last commit happened is unknown
            restart
            run b/1
            waiting 0 running 1 succeeded 0 failed 0 canceled 0
            in memory: 0 rows, 1 keys
        "#]],
    );
}

// Scenario 8.
#[test]
fn a_read_that_fails_again_and_again_is_tried_again() {
    check(
        "bounds window=1 page=1
         put a*3
         hold reads
         slots w1 1
         done
         read lost
         explain a/2
         wait 9
         wait 1
         read lost
         wait 19
         wait 1
         read lost
         wait 5000
         release
         drain
         counts",
        expect![[r#"
            run a/1
            a/2: at least 0 ahead; its lane is being read
            run a/2
            run a/3
            waiting 0 running 0 succeeded 3 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

// Scenario 9.
#[test]
fn single_tasks_reach_a_waiting_worker_without_a_read() {
    check(
        "slots w1 1
         put a
         done
         put b
         done
         put c
         reads",
        expect![[r#"
            run a/1
            run b/1
            run c/1
            0 reads, 0 on their way
        "#]],
    );
}

// Scenario 10.
#[test]
fn a_key_with_many_tasks_does_not_hold_up_one_with_a_single_task() {
    check(
        "put a a a a b
         slots w1 1
         drain",
        expect![[r#"
            run a/1
            run b/1
            run a/2
            run a/3
            run a/4
        "#]],
    );
}

#[test]
fn weights_one_and_five_give_five_for_one() {
    check(
        "put a*20 b*20:w=5
         slots w1 1
         drain",
        expect![[r#"
            run a/1
            run b/1
            run b/2
            run b/3
            run b/4
            run b/5
            run a/2
            run b/6
            run b/7
            run b/8
            run b/9
            run b/10
            run a/3
            run b/11
            run b/12
            run b/13
            run b/14
            run b/15
            run a/4
            run b/16
            run b/17
            run b/18
            run b/19
            run b/20
            run a/5
            run a/6
            run a/7
            run a/8
            run a/9
            run a/10
            run a/11
            run a/12
            run a/13
            run a/14
            run a/15
            run a/16
            run a/17
            run a/18
            run a/19
            run a/20
        "#]],
    );
}

// Scenario 12.
#[test]
fn after_a_restart_a_keys_next_task_goes_behind_its_own() {
    check(
        "put a*3 b
         restart
         put a b
         lanes
         slots w1 1
         drain",
        expect![[r#"
            restart
            lane 0/5/0: V=0.000 rows [a/1@0.000 b/1@0.000 a/2@1.000 b/2@1.000 a/3@2.000 a/4@3.000]
            run a/1
            run b/1
            run a/2
            run b/2
            run a/3
            run a/4
        "#]],
    );
}

// Scenario 12a.
#[test]
fn when_a_backlog_is_canceled_a_newcomer_is_placed_above_what_is_settled() {
    check(
        "put a*6
         put b:x=5 b
         slots w1 1
         cancel a/2
         cancel a/3
         cancel a/4
         cancel a/5
         done a/1
         put c
         lanes
         drain
         counts",
        expect![[r#"
            run a/1
            canceled a/2
            canceled a/3
            canceled a/4
            canceled a/5
            run b/1
            lane 0/5/0: V=3.000 rows [b/1@0.000 c/1@3.000 a/6@5.000 b/2@5.000]
            run c/1
            run a/6
            run b/2
            waiting 0 running 0 succeeded 5 failed 0 canceled 4
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn newcomers_to_a_lane_that_was_held_up_share_it_with_those_who_waited() {
    check(
        "put a*4:p=9
         put x*3:p=0
         slots w1 1
         done
         put b*4:p=9
         drain",
        expect![[r#"
            run x/1
            run x/2
            run x/3
            run a/1
            run b/1
            run a/2
            run b/2
            run a/3
            run b/3
            run a/4
            run b/4
        "#]],
    );
}

// Scenario 14.
#[test]
fn a_changed_weight_counts_for_tasks_accepted_from_then_on() {
    check(
        "put a*3 b*8
         weight a 4
         put a*4
         lanes
         slots w1 1
         drain",
        expect![[r#"
            lane 0/5/0: V=0.000 rows [a/1@0.000 b/1@0.000 a/2@1.000 b/2@1.000 a/3@2.000 b/3@2.000 b/4@3.000 a/4@3.000 a/5@3.250 a/6@3.500 a/7@3.750 b/5@4.000 b/6@5.000 b/7@6.000 b/8@7.000]
            run a/1
            run b/1
            run a/2
            run b/2
            run a/3
            run b/3
            run b/4
            run a/4
            run a/5
            run a/6
            run a/7
            run b/5
            run b/6
            run b/7
            run b/8
        "#]],
    );
}

// Scenario 14a.
#[test]
fn after_a_cold_start_the_most_urgent_priority_goes_first_whatever_was_read_first() {
    check(
        "put low*2:p=9 mid*2:p=5 high*2:p=0
         hold reads
         restart
         slots w1 1
         explain low/1
         read
         read
         read
         explain low/1
         release
         drain",
        expect![[r#"
            restart
            low/1: at least 0 ahead; its lane is being read
            run high/1
            low/1: 0 ahead; every slot is taken (1); priority 0 goes first
            run high/2
            run mid/1
            run mid/2
            run low/1
            run low/2
        "#]],
    );
}

// Scenario 15.
#[test]
fn one_end_starts_exactly_one_more_and_fewer_slots_stop_nothing() {
    check(
        "slots w1 3
         put a*7
         done a/1
         slots w1 1
         done a/2
         done a/3
         done a/4
         counts",
        expect![[r#"
            run a/1
            run a/2
            run a/3
            run a/4
            run a/5
            waiting 2 running 1 succeeded 4 failed 0 canceled 0
            in memory: 2 rows, 1 keys
        "#]],
    );
}

// Scenario 17a.
#[test]
fn a_retry_goes_ahead_of_its_keys_later_tasks() {
    check(
        "put a*6 b*2
         slots w1 1
         fail a/1
         drain
         counts",
        expect![[r#"
            run a/1
            run b/1
            run a/1 (attempt 2)
            run a/2
            run b/2
            run a/3
            run a/4
            run a/5
            run a/6
            waiting 0 running 0 succeeded 8 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_dispatch_that_never_started_waits_again_in_its_place() {
    check(
        "put a*3
         slots w1 1
         refuse a/1
         drain
         counts",
        expect![[r#"
            run a/1
            run a/1
            run a/2
            run a/3
            waiting 0 running 0 succeeded 3 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_lost_workers_tasks_are_tried_again_until_their_tries_are_used_up() {
    check(
        "slots w1 2
         put a:t=1 b:t=2
         lose w1
         slots w2 1
         done
         counts",
        expect![[r#"
            run a/1
            run b/1
            failed a/1
            run b/1 (attempt 2)
            waiting 0 running 0 succeeded 1 failed 1 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_long_runner_is_set_aside_and_survives_a_restart() {
    check(
        "bounds aside=3
         slots w1 2
         put slow a*5
         done a/1
         done a/2
         lanes
         done a/3
         lanes
         counts slow
         counts a
         restart
         counts slow
         done slow/1
         drain
         counts",
        expect![[r#"
            run slow/1
            run a/1
            run a/2
            run a/3
            lane 0/5/0: V=3.500 rows [slow/1@0.000 a/3@2.000 a/4@3.000 a/5@4.000]
            run a/4
            lane 0/5/0: V=4.500 rows [a/4@3.000 a/5@4.000]
            slow: waiting 0 running 1
            a: waiting 1 running 1
            restart
            slow: waiting 0 running 1
            run a/5
            waiting 0 running 0 succeeded 6 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_long_runner_whose_worker_vanished_with_the_owner_is_tried_again() {
    check(
        "bounds aside=1
         slots w1 1
         slots w2 1
         put slow a*3
         done a/1
         hold writes
         lose w1
         restart
         release
         drain
         counts",
        expect![[r#"
            run slow/1 on w1
            run a/1 on w2
            run a/2 on w2
            restart
            run a/3
            run slow/1 (attempt 2)
            waiting 0 running 0 succeeded 4 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_workers_slots_are_divided_among_its_queues_by_its_weights() {
    check(
        "in render put r*8
         in mail put m*8
         slots w1 1 render=3 mail=1
         drain",
        expect![[r#"
            run r/1
            run m/1
            run r/2
            run r/3
            run r/4
            run m/2
            run r/5
            run r/6
            run r/7
            run m/3
            run r/8
            run m/4
            run m/5
            run m/6
            run m/7
            run m/8
        "#]],
    );
}

#[test]
fn classes_of_one_priority_take_turns_by_the_weights_that_wait() {
    check(
        "classes 1s:all 9s:all
         put a*4:d=1s b*4:d=1s z*4:d=9s
         slots w1 1
         drain",
        expect![[r#"
            run a/1 for 1s
            run z/1 for 9s
            run b/1 for 1s
            run a/2 for 1s
            run z/2 for 9s
            run b/2 for 1s
            run a/3 for 1s
            run z/3 for 9s
            run b/3 for 1s
            run a/4 for 1s
            run z/4 for 9s
            run b/4 for 1s
        "#]],
    );
}

#[test]
fn a_waiting_task_says_what_it_waits_for() {
    check(
        "put a*2
         explain a/1
         slots w1 1
         explain a/1
         explain a/2
         put b:p=0
         explain a/2
         cancel a/1
         explain a/1
         fail a/1
         explain a/1
         done b/1
         explain a/2",
        expect![[r#"
            a/1: 0 ahead; no worker serves its queue
            run a/1
            a/1: running on worker 1
            a/2: 0 ahead; every slot is taken (1)
            a/2: 0 ahead; every slot is taken (1); priority 0 goes first
            stop a/1
            stopping
            a/1: being stopped on worker 1
            run b/1
            canceled a/1
            a/1: no such task
            run a/2
            a/2: running on worker 1
        "#]],
    );
}

#[test]
fn canceled_tasks_never_start_and_twice_is_fine() {
    check(
        "put a*3
         cancel a/2
         cancel a/2
         slots w1 1
         drain
         counts",
        expect![[r#"
            canceled a/2
            cancel refused: not_found: task 2 does not exist, or has ended
            run a/1
            run a/3
            waiting 0 running 0 succeeded 2 failed 0 canceled 1
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_task_canceled_on_its_way_to_a_worker_that_refuses_it_does_not_wait_again() {
    check(
        "put a*2
         slots w1 1
         cancel a/1
         refuse a/1
         drain
         counts",
        expect![[r#"
            run a/1
            stop a/1
            stopping
            run a/2
            canceled a/1
            waiting 0 running 0 succeeded 1 failed 0 canceled 1
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_cancel_while_the_gate_is_shut_waits_until_it_is_known_what_runs() {
    check(
        "slots w1 2
         put a k*2
         take
         cancel k/1
         cancel k/2
         report w1
         report w1
         open
         fail k/1
         drain
         counts",
        expect![[r#"
            run a/1
            run k/1
            another owner takes the shard
            stop k/1
            stopping
            canceled k/2
            canceled k/1
            waiting 0 running 0 succeeded 1 failed 0 canceled 2
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn what_a_worker_said_before_it_was_lost_counts() {
    check(
        "slots w1 1
         put a:t=1
         take
         report w1
         done a/1
         lose w1
         open
         counts",
        expect![[r#"
            run a/1
            another owner takes the shard
            waiting 0 running 0 succeeded 1 failed 0 canceled 0
            in memory: 0 rows, 0 keys
        "#]],
    );
}

#[test]
fn a_class_that_was_idle_has_no_credit_after_a_restart() {
    check(
        "classes 1s:all 9s:all
         put old:d=1s z*12:d=9s
         slots w1 1
         done
         done
         done
         done
         done
         restart
         put new*6:d=1s
         drain",
        expect![[r#"
            run old/1 for 1s
            run z/1 for 9s
            run z/2 for 9s
            run z/3 for 9s
            run z/4 for 9s
            run z/5 for 9s
            restart
            run new/1 for 1s
            run z/6 for 9s
            run new/2 for 1s
            run z/7 for 9s
            run new/3 for 1s
            run z/8 for 9s
            run new/4 for 1s
            run z/9 for 9s
            run new/5 for 1s
            run z/10 for 9s
            run new/6 for 1s
            run z/11 for 9s
            run z/12 for 9s
        "#]],
    );
}

#[test]
fn without_its_override_a_key_has_the_weight_its_tasks_ask_for() {
    check(
        "put a*2:w=2
         weight a 4
         put a*2:w=2
         weight a none
         put b
         put a*2:w=2
         lanes",
        expect![[r#"
            lane 0/5/0: V=0.000 rows [a/1@0.000 b/1@0.000 a/2@0.500 a/3@1.000 a/4@1.250 a/5@1.500 a/6@2.000]
        "#]],
    );
}

#[test]
fn a_store_that_is_behind_limits_callers_instead_of_growing() {
    check(
        "bounds in_flight=3
         hold writes
         put a*2
         put b*2
         write
         put b*2
         release
         counts",
        expect![[r#"
            put refused: limited: the store is behind; send this again in a moment
            waiting 4 running 0 succeeded 0 failed 0 canceled 0
            in memory: 4 rows, 2 keys
        "#]],
    );
}

#[test]
fn bad_tasks_are_refused_and_change_nothing() {
    check(
        "put a b:p=10
         put a:t=0
         put
         counts
         put a:t=1001",
        expect![[r#"
            put refused: invalid: tasks[1].priority: 10 is out of range; use 0 (first) to 9
            put refused: invalid: tasks[0].retry.max_attempts: 0 is out of range; use 1 to 1000
            put refused: invalid: tasks: is empty; give at least one task
            in memory: 0 rows, 0 keys
            put refused: invalid: tasks[0].retry.max_attempts: 1001 is out of range; use 1 to 1000
        "#]],
    );
}
