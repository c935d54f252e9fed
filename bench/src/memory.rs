//! `memory`: bytes per waiting task and per waiting key.
//!
//! Each shard is built in a process of its own, which then throws away everything but the shard and says
//! how much memory of it is resident. Differences between such processes are the shard's alone:
//! - a task: (1,000,000 tasks of 1,000 keys) less (1,000 tasks of 1,000 keys), per task;
//! - a key: (1,000,000 keys of one task each) less (one key of one task), per key, less one task.
//!
//! Both are measured as built, and again after as many cycles as there are tasks: ordered maps that were
//! filled in order are packed differently from ones that have been used for a while.

use std::process::Command;

use crate::Failure;
use crate::cli::ResidentArgs;
use crate::load::Load;
use crate::measure::Cycles;
use crate::report::{Aims, Report, Value};
use crate::shell::{Shell, all_in_memory};

const MANY: u64 = 1_000_000;
const FEW: u64 = 1_000;
const SEED: u64 = 1;

/// Measures tasks and keys.
pub(crate) fn run(show: impl Fn(Report)) -> Result<(), Failure> {
    let mut report = Report::new(
        "memory",
        "Memory of the core: resident bytes of a process that holds one shard and nothing else, without\n\
         payloads, less those of one with an almost empty shard. Keys have 13 bytes of text.",
        &[("when", "when"), ("bytes_per_task", "bytes per task"), ("bytes_per_key", "bytes per waiting key")],
    );
    let mut aims = Aims::new("Aims for the memory");
    for (when, cycles) in [("as built", 0), ("after 1,000,000 cycles", MANY)] {
        eprint!("memory: {when} .. ");
        let (task, key) = per_task_and_key(cycles)?;
        eprintln!("{task:.0} bytes per task, {key:.0} per waiting key");
        report.row(vec![Value::text(when), Value::Number(task, 0), Value::Number(key, 0)]);
        aims.at_most(&format!("bytes per waiting key, {when}, at most"), 200.0, key, 0);
        aims.at_most(&format!("bytes per task, {when}, at most"), 150.0, task, 0);
    }
    show(report);
    show(aims.report());
    Ok(())
}

fn per_task_and_key(cycles: u64) -> Result<(f64, f64), Failure> {
    let few_tasks = child(FEW, FEW, 0)?;
    let many_tasks = child(FEW, MANY, cycles)?;
    let task = (many_tasks.bytes - few_tasks.bytes) / (MANY - FEW) as f64;
    let one = child(1, 1, 0)?;
    let many_keys = child(MANY, MANY, cycles)?;
    let both = many_keys.bytes - one.bytes;
    Ok((task, (both - task * MANY as f64) / many_keys.keys))
}

/// What a child said.
struct Resident {
    bytes: f64,
    keys: f64,
}

fn child(keys: u64, tasks: u64, cycles: u64) -> Result<Resident, Failure> {
    let failed = |why: String| format!("measuring the memory of {tasks} tasks of {keys} keys: {why}");
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let arguments =
        ["--keys", &keys.to_string(), "--tasks", &tasks.to_string(), "--cycles", &cycles.to_string()];
    let output = Command::new(program).arg("resident").args(arguments).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut numbers = said.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(bytes), Some(keys)) => Ok(Resident { bytes, keys }),
        (_, _) => Err(failed(format!("it said {said:?}"))),
    }
}

/// In the child: builds one shard and prints its resident bytes and its keys.
pub(crate) fn resident(of: &ResidentArgs) -> Result<(), Failure> {
    let load = Load::new(of.keys, of.tasks);
    let mut shell = if of.cycles == 0 {
        Shell::standing(load, all_in_memory(&load), None, SEED)?
    } else {
        Shell::build(load, all_in_memory(&load), None, SEED)?
    };
    let mut done = 0;
    while done < of.cycles {
        done += shell.batch()?;
    }
    let keys = shell.held().keys;
    let shard = shell.into_shard();
    let bytes = resident_bytes()?;
    println!("{bytes} {keys}");
    drop(shard);
    Ok(())
}

fn resident_bytes() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|error| format!("resident memory can only be read where there is /proc: {error}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib =
        line.and_then(|line| line.trim().strip_suffix("kB")).and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| "no resident memory in /proc/self/status".into())
}
