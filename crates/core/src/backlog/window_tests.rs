//! The window's rules as data: a few commands in, the window after each of them out. Levels are plain
//! numbers; `7-` is the highest level below 7.

use std::fmt::Write;

use expect_test::{Expect, expect};

use super::*;
use crate::backlog::{Cost, Pass, VTime, Weight};

fn level(n: u64) -> Level {
    Level::new(at(n), 1)
}

fn at(n: u64) -> Pass {
    (0..n).fold(VTime::ZERO, |time, _| time + VTime::charge(Cost::ONE, Weight::ONE)).pass()
}

fn show(level: Level) -> String {
    let n = level.pass().time().to_f64();
    if level.seq() == 0 { format!("{n}-") } else { n.to_string() }
}

fn entry(n: u64) -> Entry {
    let charge = Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false };
    Entry {
        task: TaskId(n),
        key: KeyIx::default(),
        charge,
        attempt: 1,
        max_attempts: 1,
        lost: 0,
        terms: None,
    }
}

/// Plays a script: `window A M bound`, `ask`, `return LEVELS [end]`, `fail`, `write LEVELS` (chosen, being
/// written), `written LEVELS` (durable), `start`, `settle LEVELS`, `back LEVEL`, `wants`.
fn check(script: &str, expected: Expect) {
    let mut window = Window::restore(Level::ZERO, Level::ZERO, 1, Canary::default());
    let mut writing: BTreeSet<Level> = BTreeSet::new();
    let mut out = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let end = rest.ends_with("end");
        let numbers: Vec<u64> = rest.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let mut note = String::new();
        match command {
            "window" => {
                let [ack, max, bound] = numbers[..] else { panic!("window A M bound") };
                window = Window::restore(level(ack), level(max), bound as usize, Canary::default());
            }
            "ask" => window.read_asked(LoadId(1)),
            "return" => {
                let rows: Vec<_> = numbers.iter().map(|&n| (level(n), entry(n))).collect();
                let last = rows.last().map_or(window.read(), |(level, _)| *level);
                window.read_returned(rows, last, end, u64::MAX);
            }
            "fail" => window.read_failed(),
            "write" => {
                for &n in &numbers {
                    window.chosen(level(n));
                    writing.insert(level(n));
                }
            }
            "written" => {
                for &n in &numbers {
                    writing.remove(&level(n));
                    window.chosen(level(n));
                    window.merge(level(n), entry(n));
                }
            }
            "start" => {
                let started = window
                    .start_first(|entry| entry.task, 0)
                    .map_or("nothing".into(), |(level, _)| show(level));
                note = format!(" starts {started}");
            }
            "settle" => numbers.iter().for_each(|&n| {
                window.leave(level(n));
            }),
            "back" => numbers.iter().for_each(|&n| window.give_back(level(n), entry(n))),
            "wants" => {
                note = match window.wants_read(100) {
                    Some((above, _)) => format!(" a read above {}", show(above)),
                    None => " no read".into(),
                }
            }
            other => panic!("unknown command {other}"),
        }
        window.advance(writing.first().copied());
        let waiting: Vec<String> = window.waiting().keys().map(|&level| show(level)).collect();
        let running: Vec<String> = window.running().keys().map(|&level| show(level)).collect();
        let (ack, read) = (show(window.ack()), show(window.read()));
        let end = if window.end { " end" } else { "" };
        let (waiting, running) = (waiting.join(" "), running.join(" "));
        writeln!(out, "{line}:{note} A={ack} R={read}{end} waiting [{waiting}] running [{running}]").unwrap();
    }
    expected.assert_eq(&out);
}

// Scenario 1.
#[test]
fn a_write_in_progress_pins_the_ack_level() {
    check(
        "window 10 31 100
         ask
         return 11 21 31 end
         start
         start
         write 13 15 25
         settle 11 21
         written 13 15 25
         start
         settle 13",
        expect![[r#"
            window 10 31 100: A=10 R=10 waiting [] running []
            ask: A=10 R=10 waiting [] running []
            return 11 21 31 end: A=10 R=31 end waiting [11 21 31] running []
            start: starts 11 A=10 R=31 end waiting [21 31] running [11]
            start: starts 21 A=10 R=31 end waiting [31] running [11 21]
            write 13 15 25: A=10 R=31 end waiting [31] running [11 21]
            settle 11 21: A=13- R=31 end waiting [31] running []
            written 13 15 25: A=13- R=31 end waiting [13 15 25 31] running []
            start: starts 13 A=13- R=31 end waiting [15 25 31] running [13]
            settle 13: A=15- R=31 end waiting [15 25 31] running []
        "#]],
    );
}

// Scenario 2: the write is neither lost nor loaded twice, whether the read saw it or not.
#[test]
fn a_write_during_a_read_joins_once_if_the_read_missed_it() {
    check(
        "window 0 20 100
         ask
         written 5 15
         return 10 20 end",
        expect![[r#"
            window 0 20 100: A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            written 5 15: A=0 R=0 waiting [] running []
            return 10 20 end: A=0 R=20 end waiting [5 10 15 20] running []
        "#]],
    );
}

#[test]
fn a_write_during_a_read_joins_once_if_the_read_saw_it() {
    check(
        "window 0 20 100
         ask
         written 5 15 30
         return 5 10
         wants",
        expect![[r#"
            window 0 20 100: A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            written 5 15 30: A=0 R=0 waiting [] running []
            return 5 10: A=0 R=10 waiting [5 10] running []
            wants: a read above 10 A=0 R=10 waiting [5 10] running []
        "#]],
    );
}

// Scenario 3.
#[test]
fn a_row_that_ended_during_a_read_is_not_run_again_and_does_not_hold_the_ack_level() {
    check(
        "window 0 0 1
         written 30
         start
         written 20
         written 5
         start
         ask
         settle 30
         return 20 30 end
         settle 5
         start
         settle 20",
        expect![[r#"
            window 0 0 1: A=0 R=0 end waiting [] running []
            written 30: A=0 R=30 end waiting [30] running []
            start: starts 30 A=0 R=30 end waiting [] running [30]
            written 20: A=0 R=30 end waiting [20] running [30]
            written 5: A=0 R=20- waiting [5] running [30]
            start: starts 5 A=0 R=20- waiting [] running [5 30]
            ask: A=0 R=20- waiting [] running [5 30]
            settle 30: A=5- R=20- waiting [] running [5]
            return 20 30 end: A=5- R=30 end waiting [20] running [5]
            settle 5: A=20- R=30 end waiting [20] running []
            start: starts 20 A=20- R=30 end waiting [] running [20]
            settle 20: A=30 R=30 end waiting [] running []
        "#]],
    );
}

// Scenario 4.
#[test]
fn a_row_on_the_boundary_is_kept_or_dropped_never_neither() {
    check(
        "window 0 0 3
         written 10 20 30
         written 40
         wants
         start
         start
         wants
         ask
         return 40 end",
        expect![[r#"
            window 0 0 3: A=0 R=0 end waiting [] running []
            written 10 20 30: A=0 R=30 end waiting [10 20 30] running []
            written 40: A=0 R=40- waiting [10 20 30] running []
            wants: no read A=0 R=40- waiting [10 20 30] running []
            start: starts 10 A=0 R=40- waiting [20 30] running [10]
            start: starts 20 A=0 R=40- waiting [30] running [10 20]
            wants: a read above 40- A=0 R=40- waiting [30] running [10 20]
            ask: A=0 R=40- waiting [30] running [10 20]
            return 40 end: A=0 R=40 end waiting [30 40] running [10 20]
        "#]],
    );
}

// Scenario 5.
#[test]
fn a_row_that_runs_is_not_started_again_when_the_window_is_read_again() {
    check(
        "window 0 0 1
         written 10
         start
         written 20
         written 5
         start
         ask
         return 10 20 end
         start
         start",
        expect![[r#"
            window 0 0 1: A=0 R=0 end waiting [] running []
            written 10: A=0 R=10 end waiting [10] running []
            start: starts 10 A=0 R=10 end waiting [] running [10]
            written 20: A=0 R=20 end waiting [20] running [10]
            written 5: A=0 R=20- waiting [5] running [10]
            start: starts 5 A=0 R=20- waiting [] running [5 10]
            ask: A=0 R=20- waiting [] running [5 10]
            return 10 20 end: A=0 R=20 end waiting [20] running [5 10]
            start: starts 20 A=0 R=20 end waiting [] running [5 10 20]
            start: starts nothing A=0 R=20 end waiting [] running [5 10 20]
        "#]],
    );
}

// Scenario 7, with rows that were canceled while the page was on its way.
#[test]
fn a_page_of_rows_that_are_all_gone_does_not_stop_the_reading() {
    check(
        "window 0 40 2
         ask
         settle 10 20
         return 10 20
         wants
         ask
         return 30 40 end",
        expect![[r#"
            window 0 40 2: A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            settle 10 20: A=0 R=0 waiting [] running []
            return 10 20: A=20 R=20 waiting [] running []
            wants: a read above 20 A=20 R=20 waiting [] running []
            ask: A=20 R=20 waiting [] running []
            return 30 40 end: A=20 R=40 end waiting [30 40] running []
        "#]],
    );
}

// Scenario 9.
#[test]
fn an_empty_lane_is_known_to_be_empty_without_a_read() {
    check(
        "window 10 10 2
         wants
         written 11
         wants
         start",
        expect![[r#"
            window 10 10 2: A=10 R=10 end waiting [] running []
            wants: no read A=10 R=10 end waiting [] running []
            written 11: A=10 R=11 end waiting [11] running []
            wants: no read A=10 R=11 end waiting [11] running []
            start: starts 11 A=10 R=11 end waiting [] running [11]
        "#]],
    );
}

// Scenario 12b.
#[test]
fn a_row_dropped_below_a_running_one_is_found_again() {
    check(
        "window 0 0 1
         written 7
         start
         written 5
         written 4
         start
         settle 7 4
         wants
         ask
         return 5 end
         start",
        expect![[r#"
            window 0 0 1: A=0 R=0 end waiting [] running []
            written 7: A=0 R=7 end waiting [7] running []
            start: starts 7 A=0 R=7 end waiting [] running [7]
            written 5: A=0 R=7 end waiting [5] running [7]
            written 4: A=0 R=5- waiting [4] running [7]
            start: starts 4 A=0 R=5- waiting [] running [4 7]
            settle 7 4: A=5- R=5- waiting [] running []
            wants: a read above 5- A=5- R=5- waiting [] running []
            ask: A=5- R=5- waiting [] running []
            return 5 end: A=5- R=7 end waiting [5] running []
            start: starts 5 A=5- R=7 end waiting [] running [5]
        "#]],
    );
}

#[test]
fn a_write_above_the_window_is_left_to_a_read_unless_the_end_is_known() {
    check(
        "window 0 30 2
         ask
         return 10 20
         written 25
         start
         start
         wants",
        expect![[r#"
            window 0 30 2: A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            return 10 20: A=0 R=20 waiting [10 20] running []
            written 25: A=0 R=20 waiting [10 20] running []
            start: starts 10 A=0 R=20 waiting [20] running [10]
            start: starts 20 A=0 R=20 waiting [] running [10 20]
            wants: a read above 20 A=0 R=20 waiting [] running [10 20]
        "#]],
    );
}

#[test]
fn a_failed_read_leaves_what_was_known_and_is_wanted_again() {
    check(
        "window 0 30 2
         ask
         written 5
         fail
         wants
         ask
         return 5 30 end",
        expect![[r#"
            window 0 30 2: A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            written 5: A=0 R=0 waiting [] running []
            fail: A=0 R=0 waiting [] running []
            wants: a read above 0 A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            return 5 30 end: A=0 R=30 end waiting [5 30] running []
        "#]],
    );
}

#[test]
fn rows_held_for_a_read_are_bounded_and_found_by_a_later_one() {
    check(
        "window 0 10 2
         ask
         written 20 30 40 50
         return 10 end
         wants
         start
         wants
         ask
         return 30 40",
        expect![[r#"
            window 0 10 2: A=0 R=0 waiting [] running []
            ask: A=0 R=0 waiting [] running []
            written 20 30 40 50: A=0 R=0 waiting [] running []
            return 10 end: A=0 R=30- waiting [10 20] running []
            wants: no read A=0 R=30- waiting [10 20] running []
            start: starts 10 A=0 R=30- waiting [20] running [10]
            wants: a read above 30- A=0 R=30- waiting [20] running [10]
            ask: A=0 R=30- waiting [20] running [10]
            return 30 40: A=0 R=40- waiting [20 30] running [10]
        "#]],
    );
}

#[test]
fn a_dispatch_that_never_started_waits_where_it_was() {
    check(
        "window 0 0 2
         written 10 20
         start
         start
         back 10
         start",
        expect![[r#"
            window 0 0 2: A=0 R=0 end waiting [] running []
            written 10 20: A=0 R=20 end waiting [10 20] running []
            start: starts 10 A=0 R=20 end waiting [20] running [10]
            start: starts 20 A=0 R=20 end waiting [] running [10 20]
            back 10: A=0 R=20 end waiting [10] running [20]
            start: starts 10 A=0 R=20 end waiting [] running [10 20]
        "#]],
    );
}
