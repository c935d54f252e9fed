//! What people see of tasks, queues, workers and servers. Programs see the same types as JSON.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evenhand_api::rest::{Event, Progress, Queue, ServedQueue, Shard, State, Status, Task, Worker};

use crate::table::{Cell, Table, bytes, column, count, number, of};
use crate::terminal::{Look, Paint, plain, wrap};

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
pub(crate) fn since(ms: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64;
    now.saturating_sub(ms)
}

/// A part of a whole.
pub(crate) fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

/// A bar of so many columns, filled to a part, with a mark where it should end.
pub(crate) fn bar(part: f64, due: Option<f64>, columns: usize) -> String {
    let place = |part: f64| (part.clamp(0.0, 1.0) * columns as f64).round() as usize;
    let mark = due.map(|due| place(due).min(columns.saturating_sub(1)));
    let at = |n: usize| match n {
        n if Some(n) == mark => '┃',
        n if n < place(part) => '█',
        _ => '·',
    };
    (0..columns).map(at).collect()
}

/// Whom a task is charged to.
pub(crate) fn key(key: &str) -> &str {
    if key.is_empty() { "-" } else { key }
}

/// A weight as people write it.
pub(crate) fn weight(weight: f64) -> String {
    format!("{weight:.3}").trim_end_matches('0').trim_end_matches('.').into()
}

fn look(state: State) -> Look {
    match state {
        State::Succeeded => Look::Good,
        State::Failed => Look::Bad,
        State::Running => Look::Active,
        State::Queued | State::Canceled => Look::Waits,
    }
}

/// How many go before a task.
pub(crate) fn position(task: &Task) -> Option<String> {
    let least = if task.ahead_is_exact == Some(true) { "" } else { "at least " };
    task.ahead.map(|n| format!("{least}{} ahead", count(n)))
}

/// Which try it is, of how many.
pub(crate) fn attempt(task: &Task, of: &str) -> Option<String> {
    task.attempt.zip(task.max_attempts).map(|(attempt, most)| format!("{attempt}{of}{most}"))
}

/// What a task waits for, or where it runs, or what it said at its end.
pub(crate) fn why(task: &Task) -> String {
    match task.state {
        State::Queued => {
            let hold = task.hold.clone();
            [position(task), hold].into_iter().flatten().collect::<Vec<_>>().join("; ")
        }
        State::Running => {
            let seat = task.seat.as_deref().unwrap_or("a worker");
            let stopping = if task.stopping == Some(true) { ", being stopped" } else { "" };
            let progress =
                task.progress.as_ref().map_or_else(String::new, |told| format!(", {}", progress(told)));
            format!("on {seat}{stopping}{progress}")
        }
        State::Succeeded | State::Failed | State::Canceled => task.error.clone().unwrap_or_default(),
    }
}

/// How far a run is.
pub(crate) fn progress(progress: &Progress) -> String {
    let fraction = progress.fraction.map(percent);
    let message = Some(plain(&progress.message)).filter(|message| !message.is_empty());
    [fraction, message].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

pub(crate) fn tasks(tasks: &[Task]) -> Table<'static> {
    let mut table = Table::new(vec![
        column("task", 0),
        column("queue", 2),
        column("key", 1),
        column("state", 1),
        number("attempt", 6),
        number("age", 4),
        column("why", 3),
    ]);
    for task in tasks {
        table.row(vec![
            task.id.as_str().into(),
            task.queue.as_str().into(),
            key(&task.key).into(),
            Cell::new(task.state.name(), look(task.state)),
            attempt(task, "/").unwrap_or_else(|| "-".into()).into(),
            task.accepted_ms.map_or_else(|| "-".into(), |at| age(since(at))).into(),
            why(task).into(),
        ]);
    }
    table
}

/// Lines with a name before each, broken where there is no more room.
pub(crate) struct Facts {
    text: String,
    room: Option<usize>,
    paint: Paint,
}

/// Where the value of a fact begins.
const VALUE: usize = 12;

impl Facts {
    pub(crate) fn new(room: Option<usize>, paint: Paint) -> Facts {
        Facts { text: String::new(), room, paint }
    }

    /// One more; nothing, if there is nothing to say.
    pub(crate) fn fact(&mut self, name: &str, value: impl AsRef<str>) {
        self.looks(name, value, Look::Plain);
    }

    /// The same, in colour.
    pub(crate) fn looks(&mut self, name: &str, value: impl AsRef<str>, look: Look) {
        let value = value.as_ref();
        if value.is_empty() {
            return;
        }
        let room = self.room.map(|room| room.saturating_sub(VALUE));
        let lines = value.lines().flat_map(|line| wrap(line, 0, room));
        for (n, line) in lines.enumerate() {
            let name = self.paint.of(Look::Dim, &format!("{:<9}", if n == 0 { name } else { "" }));
            // Writing to a string cannot fail.
            let _ = writeln!(self.text, "  {name} {}", self.paint.of(look, &line));
        }
    }

    pub(crate) fn text(self) -> String {
        self.text
    }
}

/// A task alone.
pub(crate) fn task_text(task: &Task, room: Option<usize>, paint: Paint) -> String {
    let mut facts = Facts::new(room, paint);
    facts.fact("task", &task.id);
    facts.looks("state", task.state.name(), look(task.state));
    facts.fact("queue", &task.queue);
    facts.fact("key", &task.key);
    if let Some(attempt) = attempt(task, " of ") {
        facts.fact("attempt", attempt);
        facts.fact("priority", task.priority.to_string());
    }
    if let Some(accepted) = task.accepted_ms {
        facts.fact("accepted", format!("{} ago", age(since(accepted))));
    }
    if let Some(size) = task.payload_bytes {
        let kind = task.content_type.as_ref().map_or_else(String::new, |kind| format!(" of {kind}"));
        facts.fact("payload", format!("{}{kind}", bytes(size)));
    }
    facts.fact("may take", task.max_duration_ms.map_or_else(String::new, age));
    match task.state {
        State::Queued => facts.fact("waits", why(task)),
        State::Running => facts.fact("runs", why(task)),
        State::Succeeded | State::Failed | State::Canceled => {}
    }
    facts.fact("error", plain(task.error.as_deref().unwrap_or_default()));
    if let Some(result) = &task.result {
        facts.fact("result", printable(result));
    } else if task.result_base64.is_some() {
        facts.fact("result", "is no text; --json shows it");
    }
    facts.text()
}

/// A result, if it is text that a terminal can show.
fn printable(result: &str) -> String {
    match result.chars().any(|c| c.is_control() && !c.is_whitespace()) {
        true => format!("{} that are no text; --json shows them", of(result.len() as u64, "byte")),
        false => result.trim_end().into(),
    }
}

/// What happened to a task, in a line. None: nothing that a person wants to know.
pub(crate) fn event(event: &Event, paint: Paint) -> Option<String> {
    if let Some(task) = &event.task {
        let again = task.error.as_ref().filter(|_| task.state == State::Queued);
        let more = again.map_or_else(|| why(task), |error| format!("again: {error}"));
        let more = if more.is_empty() { more } else { format!(": {}", plain(&more)) };
        let again = task.attempt.filter(|attempt| *attempt > 1);
        let again = again.map_or_else(String::new, |attempt| format!(" (attempt {attempt})"));
        return Some(format!("{} {}{again}{more}", task.id, paint.of(look(task.state), task.state.name())));
    }
    if let Some(line) = &event.output {
        return Some(format!("  {}", plain(line)));
    }
    if let Some(told) = &event.progress {
        return Some(format!("  {}", progress(told)));
    }
    event.dropped.map(|n| format!("  ({} left out)", of(n, "line")))
}

/// The same among the events of many tasks.
pub(crate) fn event_of_many(event: &Event, name: &str, paint: Paint) -> String {
    let id = event.task_id.as_deref().unwrap_or("-");
    if name == "missed" {
        return "(some events are not known any more)".into();
    }
    match &event.task {
        Some(task) => {
            let again = task.error.as_ref().filter(|_| task.state == State::Queued);
            let more = again.map_or_else(|| why(task), |error| format!("again: {error}"));
            let state = paint.of(look(task.state), task.state.name());
            let line = format!("{id} {} {} {state} {}", task.queue, key(&task.key), plain(&more));
            line.trim_end().into()
        }
        None => format!("{id} {}", self::event(event, paint).unwrap_or_default()),
    }
}

/// What a task does now, for the line that is replaced.
pub(crate) fn live(task: &Task) -> Vec<(String, Look)> {
    let mut parts = vec![(task.id.clone(), Look::Plain), (task.state.name().into(), look(task.state))];
    if let Some(fraction) = task.progress.as_ref().and_then(|told| told.fraction) {
        parts.push((bar(fraction, None, 20), Look::Active));
    }
    // Before what may be cut.
    if let Some(accepted) = task.accepted_ms {
        parts.push((age(since(accepted)), Look::Dim));
    }
    parts.push((plain(&why(task)), Look::Plain));
    parts
}

pub(crate) fn queues(queues: &[Queue], chosen: Option<&str>) -> Table<'static> {
    let mut columns = vec![
        column("queue", 0),
        number("waiting", 0),
        number("running", 1),
        number("accepted", 5),
        number("succeeded", 4),
        number("failed", 2),
        number("canceled", 6),
        number("next waits", 3),
    ];
    if chosen.is_some() {
        columns.insert(0, column(" ", 0));
    }
    let mut table = Table::new(columns);
    for queue in queues {
        let is_chosen = chosen == Some(queue.queue.as_str());
        let numbers = [queue.running, queue.accepted, queue.succeeded, queue.failed, queue.canceled];
        let mut cells = vec![
            Cell::new(&queue.queue, if is_chosen { Look::Strong } else { Look::Plain }),
            count(queue.waiting).into(),
        ];
        cells.extend(numbers.map(|n| Cell::from(count(n))));
        cells.push(queue.oldest_waiting_ms.map_or_else(|| "-".into(), age).into());
        if chosen.is_some() {
            cells.insert(0, Cell::new(if is_chosen { "▶" } else { "" }, Look::Active));
        }
        table.row(cells);
    }
    table
}

pub(crate) fn workers(workers: &[Worker]) -> Table<'static> {
    let mut table = Table::new(vec![
        column("seat", 0),
        number("life", 6),
        column("health", 1),
        number("slots", 2),
        number("running", 2),
        column("queues", 4),
        number("heard", 5),
        column("why no work", 3),
    ]);
    for worker in workers {
        table.row(vec![
            worker.seat.as_str().into(),
            worker.life.as_str().into(),
            Cell::new(&worker.health, health_look(&worker.health)),
            count(worker.slots.into()).into(),
            count(worker.running.into()).into(),
            worker.queues.iter().map(served).collect::<Vec<_>>().join(" ").into(),
            worker.heard_ms_ago.map_or_else(|| "-".into(), |ms| format!("{} ago", age(ms))).into(),
            why_no_work(worker).into(),
        ]);
    }
    table
}

fn health_look(health: &str) -> Look {
    match health {
        "healthy" => Look::Good,
        "unhealthy" | "absent" => Look::Bad,
        _ => Look::Waits,
    }
}

fn served(served: &ServedQueue) -> String {
    match weight(served.weight).as_str() {
        "1" => served.queue.clone(),
        weight => format!("{}={weight}", served.queue),
    }
}

/// Why a worker gets no work; nothing, if it does.
pub(crate) fn why_no_work(worker: &Worker) -> String {
    let why = worker.why_not.as_deref().unwrap_or_default();
    match worker.health.as_str() {
        "absent" | "unhealthy" => format!("{why}; lost in {}", age(worker.lost_in_ms)),
        _ => why.into(),
    }
}

/// What a shard's gate does.
pub(crate) fn gate(shard: &Shard) -> String {
    match (shard.open, &shard.waits_for) {
        (true, _) => "open".into(),
        (false, None) => "shut".into(),
        (false, Some(waits_for)) => format!("shut: {waits_for}"),
    }
}

pub(crate) fn status_text(server: &str, status: &Status, room: Option<usize>, paint: Paint) -> String {
    let mut facts = Facts::new(room, paint);
    facts.fact("server", format!("{server}, evenhand {}, up {}", status.version, age(status.up_ms)));
    facts.fact("store", format!("{} (id {})", status.store, status.store_id));
    let times = &status.thresholds;
    let [heartbeat, unhealthy, lost, lease] =
        [times.heartbeat_ms, times.unhealthy_after_ms, times.lost_after_ms, times.lease_ms].map(age);
    facts.fact(
        "times",
        format!("heartbeat {heartbeat}, unhealthy after {unhealthy}, lost after {lost}; a worker's lease is {lease}"),
    );
    for shard in &status.shards {
        let tasks = format!("{} waiting, {} running", count(shard.waiting), count(shard.running));
        let room = if shard.room { "" } else { "; NO ROOM: no new tasks are accepted" };
        let workers = of(shard.workers.into(), "worker");
        facts
            .fact(&format!("shard {}", shard.id), format!("epoch {}, {workers}, {tasks}{room}", shard.epoch));
        facts.looks("gate", gate(shard), if shard.open { Look::Good } else { Look::Waits });
    }
    facts.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_filled_to_their_part_and_marked_where_they_should_end() {
        assert_eq!(bar(0.0, None, 10), "··········");
        assert_eq!(bar(0.5, Some(0.8), 10), "█████···┃·");
        assert_eq!(bar(0.5, Some(0.2), 10), "██┃██·····");
        assert_eq!(bar(1.0, Some(1.0), 10), "█████████┃");
        assert_eq!(bar(7.0, Some(f64::NAN), 4), "┃███");
    }

    #[test]
    fn times_and_parts_are_readable() {
        let ages = [999, 1_000, 119_999, 120_000, 7_200_000, 172_800_000].map(age);
        assert_eq!(ages, ["999 ms", "1 s", "119 s", "2 min", "2 h", "2 d"]);
        assert_eq!([1.0, 2.5, 0.001].map(weight), ["1", "2.5", "0.001"]);
        let half = Progress { fraction: Some(0.5), message: "page\n7".into() };
        assert_eq!(progress(&half), "50 % page 7");
    }

    #[test]
    fn progress_is_seen_in_every_way() {
        let mut task = Task::from(evenhand::wire::Task {
            id: "0-42".into(),
            state: evenhand::wire::TaskState::Running.into(),
            seat: "gpu-7".into(),
            progress: Some(evenhand::wire::Progress { fraction: Some(0.3), message: "page 7".into() }),
            ..Default::default()
        });
        let shown: Vec<String> = live(&task).into_iter().map(|(text, _)| text).collect();
        assert_eq!(shown.join("  "), "0-42  running  ██████··············  on gpu-7, 30 % page 7");
        let progress = task.progress.take();
        let told = Event { at_ms: 0, task_id: None, task: None, output: None, progress, dropped: None };
        assert_eq!(event(&told, Paint::NONE).as_deref(), Some("  30 % page 7"));
    }
}
