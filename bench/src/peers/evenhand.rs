//! Evenhand's own part: `evenhand bench end-to-end`, run as a program, and what it says.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::Percentiles;
use super::loads::Throughput;
use crate::Failure;
use crate::cli::PeersArgs;

/// How fast it was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    /// Submitted while workers run them.
    pub(super) together: Throughput,
    /// All submitted, then all run.
    pub(super) apart: Throughput,
}

/// How fast tasks are accepted and finished.
pub(super) fn speed(args: &PeersArgs, dir: &Path) -> Result<Speed, Failure> {
    read_speed(&run(args, dir, "throughput,apart", 1)?)
}

/// How soon a task runs, at a rate.
pub(super) fn latency(args: &PeersArgs, dir: &Path, rate: u64) -> Result<Percentiles, Failure> {
    read_latency(&run(args, dir, "latency", rate)?)
}

/// The binary: the one that was named, or the one beside this program.
fn program(args: &PeersArgs) -> Result<PathBuf, Failure> {
    let beside = || std::env::current_exe().map(|this| this.with_file_name("evenhand"));
    args.evenhand.clone().map_or_else(beside, Ok).map_err(|error| error.to_string())
}

/// Whether there is one.
pub(super) fn ready(args: &PeersArgs) -> Result<(), Failure> {
    let program = program(args)?;
    if program.is_file() { Ok(()) } else { Err(missing(&program, "it is not there")) }
}

fn missing(program: &Path, why: &str) -> Failure {
    let how = "`cargo build --release -p evenhand-cli` makes it, or --evenhand says where it is";
    format!("cannot run {}: {why}; {how}", program.display())
}

/// Runs the program: what it printed, an object in each line.
fn run(args: &PeersArgs, dir: &Path, parts: &str, rate: u64) -> Result<Vec<Value>, Failure> {
    let program = program(args)?;
    let mut command = Command::new(&program);
    command.args(["bench", "end-to-end", "--json", "--parts", parts, "--dir"]).arg(dir);
    for (name, number) in [
        ("--tasks", args.tasks),
        ("--batch", args.batch),
        ("--calls", args.calls),
        ("--payload", args.payload),
        ("--keys", args.keys),
        ("--workers", args.workers),
        ("--slots", args.slots),
        ("--rate", rate),
        ("--seconds", args.seconds),
    ] {
        command.args([name, &number.to_string()]);
    }
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| missing(&program, &error.to_string()))?;
    if !output.status.success() {
        return Err(format!("{} bench end-to-end: {}", program.display(), output.status));
    }
    rows(&String::from_utf8_lossy(&output.stdout))
}

fn rows(text: &str) -> Result<Vec<Value>, Failure> {
    let row =
        |line: &str| serde_json::from_str(line).map_err(|error| format!("evenhand said {line:?}: {error}"));
    text.lines().map(row).collect()
}

fn find<'a>(rows: &'a [Value], part: &str, what: Option<&str>) -> Result<&'a Value, Failure> {
    let is = |row: &&Value| row["part"] == part && what.is_none_or(|what| row["what"] == what);
    rows.iter().find(is).ok_or_else(|| format!("evenhand said nothing of {part}"))
}

fn read_speed(rows: &[Value]) -> Result<Speed, Failure> {
    let rates = |part: &str| {
        let row = find(rows, part, None)?;
        Ok::<_, Failure>(Throughput {
            accepted_per_second: number(row, "accepted_per_second")?,
            finished_per_second: number(row, "finished_per_second")?,
        })
    };
    Ok(Speed { together: rates("throughput")?, apart: rates("apart")? })
}

fn read_latency(rows: &[Value]) -> Result<Percentiles, Failure> {
    let row = find(rows, "latency", Some("submit-to-start"))?;
    Ok(Percentiles {
        p50_ms: number(row, "p50_ms")?,
        p99_ms: number(row, "p99_ms")?,
        p999_ms: number(row, "p999_ms")?,
        max_ms: number(row, "max_ms")?,
        missing: 0,
    })
}

fn number(row: &Value, name: &str) -> Result<f64, Failure> {
    row[name].as_f64().ok_or_else(|| format!("evenhand said no {name} in {row}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = r#"{"bench":"end-to-end","part":"throughput","accepted_per_second":1.5,"finished_per_second":2}
{"bench":"end-to-end","part":"apart","accepted_per_second":3,"finished_per_second":4}
{"bench":"end-to-end","part":"latency","what":"submit-to-accepted","p50_ms":9,"p99_ms":9,"p999_ms":9,"max_ms":9}
{"bench":"end-to-end","part":"latency","what":"submit-to-start","p50_ms":5,"p99_ms":6,"p999_ms":7,"max_ms":8}
"#;

    #[test]
    fn what_evenhand_prints_is_read() {
        let rows = rows(SAID).unwrap();
        let (speed, latency) = (read_speed(&rows).unwrap(), read_latency(&rows).unwrap());
        assert_eq!((speed.together.accepted_per_second, speed.apart.finished_per_second), (1.5, 4.0));
        assert_eq!((latency.p50_ms, latency.max_ms), (5.0, 8.0));
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(rows("no").unwrap_err().contains("evenhand said \"no\""));
        let less = rows(&SAID.replace("p99_ms", "p98_ms").replace("apart", "a part")).unwrap();
        assert!(read_latency(&less).unwrap_err().contains("said no p99_ms"));
        assert!(read_speed(&less).unwrap_err().contains("nothing of apart"));
        assert!(read_latency(&[]).unwrap_err().contains("nothing of latency"));
    }
}
