//! Why a task does not run: every rule that can stand in its way, as data. A task may have several at once; they are
//! told in the order in which the dispatcher asks.

use evenhand_sim::scenario::play;
use expect_test::{Expect, expect};

fn check(script: &str, expected: Expect) {
    expected.assert_eq(&play(script));
}

#[test]
fn the_gate_and_whoever_is_missing() {
    check(
        "put a
           slots w1 1
           put b
           take
           explain b/1
           report w1
           explain b/1
           open
           explain b/1",
        expect![[r#"
               run a/1
               another owner takes the shard
               b/1: at least 0 ahead; the start gate is shut; no worker serves its queue; its lane is being read
               b/1: 0 ahead; the start gate is shut; every slot is taken (1)
               b/1: 0 ahead; every slot is taken (1)
           "#]],
    );
}

#[test]
fn a_queue_and_a_key_that_are_paused_and_no_worker() {
    check(
        "put a
           pause
           pause key a
           explain a/1
           slots w1 1
           resume
           explain a/1
           resume key a",
        expect![[r#"
               a/1: 0 ahead; its queue is paused; key a is paused; no worker serves its queue
               a/1: at least 0 ahead; key a is paused
               run a/1
           "#]],
    );
}

#[test]
fn a_key_at_its_limit() {
    check(
        "slots w1 3
           limit a 2
           put a*4 b
           explain a/3
           explain a/4
           done a/1
           explain a/4",
        expect![[r#"
               run a/1
               run b/1
               run a/2
               a/3: at least 0 ahead; key a is at its limit, 2 of 2; every slot is taken (3)
               a/4: at least 1 ahead; key a is at its limit, 2 of 2; every slot is taken (3); 1 task of its key goes before it
               run a/3
               a/4: at least 0 ahead; key a is at its limit, 2 of 2; every slot is taken (3)
           "#]],
    );
}

#[test]
fn a_key_at_its_rate_and_the_time_that_is_left() {
    check(
        "slots w1 3
           rate a 1/1
           wait 1000
           put a*2
           explain a/2
           wait 600
           explain a/2
           wait 400",
        expect![[r#"
            run a/1
            a/2: at least 0 ahead; key a is at its rate, 1 a second; the next may start in 1s
            a/2: at least 0 ahead; key a is at its rate, 1 a second; the next may start in 400ms
            run a/2
        "#]],
    );
}

#[test]
fn a_queue_at_its_rate_and_the_time_that_is_left() {
    check(
        "settings rate=2/1
           slots w1 3
           wait 1000
           put a b
           explain b/1
           wait 400
           explain b/1
           wait 100",
        expect![[r#"
            run a/1
            b/1: 0 ahead; its queue is at its rate, 2 a second; the next may start in 500ms
            b/1: 0 ahead; its queue is at its rate, 2 a second; the next may start in 100ms
            run b/1
        "#]],
    );
}

#[test]
fn a_class_that_is_full_and_who_holds_it() {
    check(
        "classes 3s:all 10s:4 30s:2
           slots w1 8
           put a*2:d=30s
           put a:d=30s b:d=12s c:d=5s
           explain a/3
           explain b/1
           put c*2:d=10s
           explain c/3
           held",
        expect![[r#"
            run a/1 for 30s
            run a/2 for 30s
            run c/1 for 5s
            a/3: 0 ahead; the 30s class is full: 2 of 2 held by a/1, a/2
            b/1: 1 ahead; the 30s class is full: 2 of 2 held by a/1, a/2; 1 other key shares the queue and goes before its key
            run c/2 for 10s
            c/3: 0 ahead; the 10s class is full: 4 of 4 held by a/1, a/2, c/1, c/2
            3s: 4 of 8, 10s: 4 of 4, 30s: 2 of 2
        "#]],
    );
}

#[test]
fn a_class_that_a_default_run_makes_room_in_is_not_full() {
    check(
        "classes 3s:all 30s:1
           slots w1 2
           put d
           pause
           put a:d=30s
           explain a/1
           resume",
        expect![[r#"
               run d/1 for 30s
               a/1: 0 ahead; its queue is paused
               cut d/1 to 3s
               run a/1 for 30s
           "#]],
    );
}

#[test]
fn at_most_five_of_those_that_hold_a_class_are_named() {
    check(
        "classes 3s:all 30s:6
           slots w1 9
           put a*7:d=30s
           explain a/7",
        expect![[r#"
               run a/1 for 30s
               run a/2 for 30s
               run a/3 for 30s
               run a/4 for 30s
               run a/5 for 30s
               run a/6 for 30s
               a/7: 0 ahead; the 30s class is full: 6 of 6 held by a/1, a/2, a/3, a/4, a/5, …
           "#]],
    );
}

#[test]
fn every_slot_is_taken_and_others_go_first() {
    check(
        "slots w1 1
           put x
           put a*2 b c:p=2 d:d=5s
           explain a/1
           explain a/2
           explain b/1
           explain c/1",
        expect![[r#"
            run x/1
            a/1: 0 ahead; every slot is taken (1); priority 2 goes first
            a/2: 3 ahead; every slot is taken (1); priority 2 goes first; 2 other keys share the queue and go before its key; 1 task of its key goes before it
            b/1: 1 ahead; every slot is taken (1); priority 2 goes first; 1 other key shares the queue and goes before its key
            c/1: 0 ahead; every slot is taken (1)
        "#]],
    );
}

#[test]
fn a_more_urgent_task_that_needs_a_full_class_lets_others_pass() {
    check(
        "classes 3s:all 30s:1
           slots w1 2
           put a:d=30s
           put a:d=30s:p=1
           put x
           put b
           explain a/2
           explain b/1",
        expect![[r#"
               run a/1 for 30s
               run x/1 for 3s
               a/2: 0 ahead; the 30s class is full: 1 of 1 held by a/1; every slot is taken (2)
               b/1: 0 ahead; every slot is taken (2)
           "#]],
    );
}

#[test]
fn a_key_that_was_at_its_rate_when_its_first_task_came_goes_on_by_itself() {
    check(
        "slots w1 3
         rate a 1/1
         put a*2
         explain a/1
         wait 1000
         wait 1000",
        expect![[r#"
            a/1: at least 0 ahead; key a is at its rate, 1 a second; the next may start in 1s
            run a/1
            run a/2
        "#]],
    );
}
