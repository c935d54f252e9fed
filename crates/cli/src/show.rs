//! What people see of tasks, workers and servers, and the same as JSON for programs.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evenhand::{Task, TaskState, wire};
use serde_json::{Value, json};

use crate::table::{bytes, count, of};

/// A state's name, the same on every surface.
pub(crate) fn state(task: &Task) -> &'static str {
    match task.state() {
        TaskState::Queued => "queued",
        TaskState::Running => "running",
        TaskState::Succeeded => "succeeded",
        TaskState::Failed => "failed",
        TaskState::Canceled => "canceled",
        TaskState::Unspecified => "unknown",
    }
}

/// Whether a task has ended.
pub(crate) fn is_over(task: &Task) -> bool {
    matches!(task.state(), TaskState::Succeeded | TaskState::Failed | TaskState::Canceled)
}

/// A time in the unit that fits: 340 ms, 12 s, 3 min, 2 h.
pub(crate) fn age(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{} s", ms / 1_000),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        7_200_000..172_800_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} d", ms / 86_400_000),
    }
}

/// How long ago something was, in milliseconds.
fn since(ms: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64;
    now.saturating_sub(ms)
}

/// What a task waits for, or where it runs.
fn why(task: &Task) -> String {
    match task.state() {
        TaskState::Queued => {
            let ahead = match task.ahead {
                Some(n) if task.ahead_is_exact => format!("{} ahead; ", count(n)),
                Some(n) => format!("at least {} ahead; ", count(n)),
                None => String::new(),
            };
            format!("{ahead}{}", task.hold)
        }
        TaskState::Running if task.stopping => format!("on {}, being stopped", task.seat),
        TaskState::Running => format!("on {}", task.seat),
        TaskState::Succeeded | TaskState::Failed | TaskState::Canceled | TaskState::Unspecified => {
            task.error.clone()
        }
    }
}

/// A task in a list.
pub(crate) fn task_row(task: &Task) -> Vec<String> {
    vec![
        task.id.clone(),
        task.queue.clone(),
        if task.key.is_empty() { "-".into() } else { task.key.clone() },
        state(task).into(),
        format!("{}/{}", task.attempt, task.max_attempts),
        age(since(task.accepted_ms)),
        why(task),
    ]
}

/// A task alone.
pub(crate) fn task_text(task: &Task) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {name:<9} {value}");
        }
    };
    line("task", task.id.clone());
    line("state", state(task).into());
    line("queue", task.queue.clone());
    line("key", task.key.clone());
    if task.max_attempts > 0 {
        line("attempt", format!("{} of {}", task.attempt, task.max_attempts));
        line("priority", task.priority.to_string());
    }
    if !is_over(task) {
        line("accepted", format!("{} ago", age(since(task.accepted_ms))));
        line("payload", bytes(task.payload_bytes));
        line("may take", task.max_duration_ms.map_or_else(String::new, age));
        line(if task.state() == TaskState::Queued { "waits" } else { "runs" }, why(task));
    }
    line("error", task.error.clone());
    if let Some(result) = &task.result {
        line("result", printable(result));
    }
    text
}

/// Bytes as text, if they are any.
fn printable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(|c| c.is_control() && !c.is_whitespace()) => text.trim_end().into(),
        Ok(_) | Err(_) => format!("{} that are no text; --json shows them", of(bytes.len() as u64, "byte")),
    }
}

pub(crate) fn task_json(task: &Task) -> Value {
    let mut value = json!({
        "id": task.id,
        "queue": task.queue,
        "key": task.key,
        "state": state(task),
        "priority": task.priority,
        "attempt": task.attempt,
        "max_attempts": task.max_attempts,
    });
    let mut set = |name: &str, field: Value| {
        if let Value::Object(fields) = &mut value {
            fields.insert(name.into(), field);
        }
    };
    if !is_over(task) {
        set("accepted_ms", task.accepted_ms.into());
        set("payload_bytes", task.payload_bytes.into());
        set("max_duration_ms", task.max_duration_ms.into());
    }
    if let Some(ahead) = task.ahead {
        set("ahead", ahead.into());
        set("ahead_is_exact", task.ahead_is_exact.into());
        set("hold", task.hold.clone().into());
    }
    if task.state() == TaskState::Running {
        set("seat", task.seat.clone().into());
        set("stopping", task.stopping.into());
    }
    if !task.error.is_empty() {
        set("error", task.error.clone().into());
    }
    match task.result.as_deref().map(std::str::from_utf8) {
        Some(Ok(text)) => set("result", text.into()),
        Some(Err(_)) => set("result_bytes", task.result.as_deref().unwrap_or_default().into()),
        None => {}
    }
    value
}

/// Says what happened to a task, on standard error.
pub(crate) fn event(event: &wire::TaskEvent) {
    match &event.event {
        Some(wire::task_event::Event::Task(task)) => {
            let again = task.state() == TaskState::Queued && !task.error.is_empty();
            let more = if again { format!("again: {}", task.error) } else { why(task) };
            let more = if more.is_empty() { more } else { format!(": {more}") };
            let again = if task.attempt > 1 { format!(" (attempt {})", task.attempt) } else { String::new() };
            eprintln!("{} {}{again}{more}", task.id, paint(task));
        }
        Some(wire::task_event::Event::Output(line)) => eprintln!("  {}", plain(line)),
        Some(wire::task_event::Event::Dropped(n)) => eprintln!("  ({} left out)", of(*n, "line")),
        Some(wire::task_event::Event::Progress(_) | wire::task_event::Event::Missed(_)) | None => {}
    }
}

/// A line of somebody's program, without what would move the cursor.
fn plain(line: &str) -> String {
    line.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// A state, in colour on a terminal.
fn paint(task: &Task) -> String {
    let color = match task.state() {
        TaskState::Succeeded => 32,
        TaskState::Failed => 31,
        TaskState::Running => 36,
        TaskState::Queued | TaskState::Canceled | TaskState::Unspecified => 33,
    };
    let plain = std::env::var_os("NO_COLOR").is_some() || !std::io::stderr().is_terminal();
    if plain { state(task).into() } else { format!("\x1b[{color}m{}\x1b[0m", state(task)) }
}

pub(crate) fn event_json(event: &wire::TaskEvent) -> Value {
    let at = event.at_ms;
    match &event.event {
        Some(wire::task_event::Event::Task(task)) => json!({ "at_ms": at, "task": task_json(task) }),
        Some(wire::task_event::Event::Output(line)) => json!({ "at_ms": at, "output": line }),
        Some(wire::task_event::Event::Dropped(n)) => json!({ "at_ms": at, "dropped": n }),
        Some(wire::task_event::Event::Progress(_) | wire::task_event::Event::Missed(_)) | None => {
            json!({ "at_ms": at })
        }
    }
}

pub(crate) fn queue_json(queue: &wire::Queue) -> Value {
    json!({
        "queue": queue.name,
        "waiting": queue.waiting,
        "running": queue.running,
        "accepted": queue.accepted,
        "succeeded": queue.succeeded,
        "failed": queue.failed,
        "canceled": queue.canceled,
        "oldest_waiting_ms": queue.oldest_waiting_ms,
    })
}

fn life(worker: &wire::Worker) -> String {
    if worker.rejoin == 0 {
        worker.process_life.to_string()
    } else {
        format!("{}.{}", worker.process_life, worker.rejoin)
    }
}

/// A weight as people write it.
fn weight(thousandths: u32) -> String {
    format!("{:.3}", f64::from(thousandths) / 1e3).trim_end_matches('0').trim_end_matches('.').into()
}

pub(crate) fn worker_row(worker: &wire::Worker) -> Vec<String> {
    let queue = |served: &wire::ServedQueue| match served.weight_thousandths {
        1_000 => served.queue.clone(),
        of => format!("{}={}", served.queue, weight(of)),
    };
    let why = match worker.health.as_str() {
        "absent" | "unhealthy" => format!("{}; lost in {}", worker.why_not, age(worker.lost_in_ms)),
        _ => worker.why_not.clone(),
    };
    vec![
        worker.seat.clone(),
        life(worker),
        worker.health.clone(),
        count(worker.slots.into()),
        count(worker.running.into()),
        worker.queues.iter().map(queue).collect::<Vec<_>>().join(" "),
        worker.heard_ms_ago.map_or_else(|| "-".into(), |ms| format!("{} ago", age(ms))),
        why,
    ]
}

pub(crate) fn worker_json(worker: &wire::Worker) -> Value {
    let queue = |served: &wire::ServedQueue| json!({ "queue": served.queue, "weight": f64::from(served.weight_thousandths) / 1e3 });
    json!({
        "seat": worker.seat,
        "life": life(worker),
        "health": worker.health,
        "slots": worker.slots,
        "running": worker.running,
        "queues": worker.queues.iter().map(queue).collect::<Vec<_>>(),
        "heard_ms_ago": worker.heard_ms_ago,
        "lost_in_ms": worker.lost_in_ms,
        "why_not": worker.why_not,
        "address": worker.address,
    })
}

/// What a shard's gate does.
fn gate(shard: &wire::Shard) -> String {
    match (shard.open, shard.waits_for.as_str()) {
        (true, _) => "open".into(),
        (false, "") => "shut".into(),
        (false, waits_for) => format!("shut: {waits_for}"),
    }
}

pub(crate) fn status_text(server: &str, status: &wire::StatusResponse) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<9} {value}");
    };
    line("server", format!("{server}, evenhand {}, up {}", status.version, age(status.up_ms)));
    line("store", format!("{} (id {:016x})", status.store, status.store_id));
    if let Some(times) = &status.thresholds {
        let derived = format!("a worker's lease is {}", age(times.lease_ms));
        let told = [times.heartbeat_ms, times.unhealthy_after_ms, times.lost_after_ms].map(age);
        line(
            "times",
            format!("heartbeat {}, unhealthy after {}, lost after {}; {derived}", told[0], told[1], told[2]),
        );
    }
    for shard in &status.shards {
        let tasks = format!("{} waiting, {} running", count(shard.waiting), count(shard.running));
        let room = if shard.room { "" } else { "; NO ROOM: no new tasks are accepted" };
        line(
            &format!("shard {}", shard.id),
            format!("epoch {}, {}, {tasks}{room}", shard.epoch, of(shard.workers.into(), "worker")),
        );
        line("gate", gate(shard));
    }
    text
}

pub(crate) fn status_json(status: &wire::StatusResponse) -> Value {
    let shard = |shard: &wire::Shard| {
        json!({
            "id": shard.id,
            "epoch": shard.epoch,
            "open": shard.open,
            "waits_for": shard.waits_for,
            "absent_seats": shard.absent_seats,
            "opens_in_ms": shard.opens_in_ms,
            "waiting": shard.waiting,
            "running": shard.running,
            "workers": shard.workers,
            "room": shard.room,
        })
    };
    let times = status.thresholds.as_ref().map(|times| {
        json!({
            "heartbeat_ms": times.heartbeat_ms,
            "unhealthy_after_ms": times.unhealthy_after_ms,
            "lost_after_ms": times.lost_after_ms,
            "lease_ms": times.lease_ms,
        })
    });
    json!({
        "version": status.version,
        "store": status.store,
        "store_id": format!("{:016x}", status.store_id),
        "up_ms": status.up_ms,
        "thresholds": times,
        "shards": status.shards.iter().map(shard).collect::<Vec<_>>(),
    })
}
