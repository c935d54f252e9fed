//! The benchmarks that kill servers and let workers crash, played small: they come to their ends, clean up, and say what they
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
