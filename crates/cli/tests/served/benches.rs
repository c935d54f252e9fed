//! The benchmarks that start servers of their own, some of which are killed, played small: they come to their ends, clean up, and say what they
//! are asked. What they measure is nobody's business here.

use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// The rows of `evenhand bench ARGS --json`.
fn rows(args: &[&str]) -> Vec<Value> {
    let dir = TempDir::new().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .arg("bench")
        .args(args)
        .args(["--rounds", "1", "--json", "--dir"])
        .arg(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {complained}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "what was made is removed again");
    let said = String::from_utf8(output.stdout).unwrap();
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_restart_is_measured_with_all_workers_and_with_one_missing() {
    let times = ["--away", "500ms", "--heartbeat", "100ms", "--lost-after", "2s"];
    let rows = rows(&[&["restart", "--workers", "1,3", "--missing", "3"][..], &times].concat());
    let all: Vec<_> =
        rows.iter().map(|row| (row["workers"].as_u64().unwrap(), row["dial"].as_str())).collect();
    let (paused, at_once) = (Some("paused"), Some("at_once"));
    assert_eq!(all, [(1, paused), (1, at_once), (3, paused), (3, at_once), (3, None)], "{rows:?}");
    for row in &rows {
        assert!(row["first_task_ms"].as_f64().unwrap() > 0.0, "{row}");
    }
    let waits_for = rows[4]["waits_for"].as_str().unwrap();
    assert!(waits_for.starts_with("waiting for 1 of 3 workers: bench-"), "{waits_for}");
}

#[test]
fn turnover_is_measured_while_a_server_runs_and_when_it_is_restarted() {
    let rows = rows(&["turnover", "--steady", "2", "--crashing", "3", "--seconds", "1"]);
    let parts: Vec<_> = rows.iter().map(|row| row["part"].as_str().unwrap()).collect();
    assert_eq!(parts, ["running", "restarted"]);
    assert!(rows[0]["alone_per_second"].as_f64().unwrap() > 0.0, "{rows:?}");
    assert!(rows[0]["lives_per_second"].as_f64().unwrap() > 0.0, "{rows:?}");
}

#[test]
fn a_mixed_load_is_measured_without_classes_and_with_them() {
    let times = ["--short", "5ms", "--long", "200ms", "--slots", "4", "--seconds", "1"];
    let rows = rows(&[&["mixed", "--flood", "40", "--quiet", "10"][..], &times].concat());
    let all: Vec<_> =
        rows.iter().map(|row| (row["classes"].as_bool().unwrap(), row["whose"].as_str().unwrap())).collect();
    assert_eq!(all, [(false, "quiet"), (false, "all"), (true, "quiet"), (true, "all")], "{rows:?}");
    let counts: Vec<_> = rows.iter().map(|row| row["count"].as_u64().unwrap()).collect();
    assert_eq!(counts, [8, 40, 8, 40], "every short task has begun, and counts once: {rows:?}");
    for row in &rows {
        assert!(row["p99_without_over_with"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn slices_with_and_without_watchers_are_compared() {
    let sizes = ["--waiting", "300", "--watchers", "20", "--tasks", "500", "--keys", "10", "--slots", "20"];
    let rows = rows(&[&["estimates"][..], &sizes].concat());
    let parts: Vec<_> =
        rows.iter().map(|row| (row["part"].as_str().unwrap(), row["watchers"].as_u64().unwrap())).collect();
    assert_eq!(parts, [("slice", 0), ("slice", 20), ("ratio", 20)]);
    for row in &rows[..2] {
        assert!(row["tasks"].as_u64().unwrap() >= 500, "{row}");
        assert!(row["begun_per_second"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(rows[2]["slower_percent"].is_number(), "{rows:?}");
}

#[test]
fn what_waiting_tasks_were_told_is_compared_with_what_happened() {
    let rows = rows(&["waits", "--tasks", "8", "--slots", "16"]);
    assert_eq!(rows.len(), 6, "{rows:?}");
    for row in &rows {
        let [asked, bounds, late] = ["asked", "bounds", "late"].map(|field| row[field].as_u64().unwrap());
        assert!(asked >= bounds && bounds >= late, "{row}");
        assert_eq!(row["misses"].as_array().unwrap().len() as u64, late, "{row}");
    }
}
