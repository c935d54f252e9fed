//! What people see of tasks, queues, workers and servers. Programs see the same types as JSON.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evenhand_api::rest::{
    AfterDowngrade, ClassLimit, Estimate, Event, FileInfo, Progress, Queue, QueueClass, QueueDetail,
    QueueKey, QueueSet, QueueSettings, Rate, RateUnit, ServedQueue, Shard, Share, State, Status, Task, Try,
    Worker,
};
use evenhand_core::admission::classes;

use crate::table::{Cell, Table, bytes, column, count, number, of};
use crate::terminal::{Look, Paint, plain, width, wrap};

/// Workers that are named where a reason is that of many.
const SEATS_NAMED: usize = 5;

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

/// A duration as it is typed: 250ms, 3s, 5m.
pub(crate) fn duration(ms: u64) -> String {
    classes::name(ms)
}

/// How classes stand: 3s 5/8  10s 2/4.
pub(crate) fn classes_held(classes: &[QueueClass]) -> String {
    let class =
        |class: &QueueClass| format!("{} {}/{}", duration(class.duration_ms), class.held, class.limit);
    classes.iter().map(class).collect::<Vec<_>>().join("  ")
}

/// A rate as it is typed: 100/s, 5cost/s:burst=60. A burst of a second's worth is not worth a word.
pub(crate) fn rate(rate: &Rate) -> String {
    let unit = match rate.unit {
        Some(RateUnit::Cost) => "cost",
        Some(RateUnit::Tasks) | None => "",
    };
    let burst = rate.burst.filter(|burst| *burst != rate.per_second.max(1.0));
    let burst = burst.map_or_else(String::new, |burst| format!(":burst={}", weight(burst)));
    format!("{}{unit}/s{burst}", weight(rate.per_second))
}

/// Why none of a key's tasks may start now; nothing, if one may.
pub(crate) fn key_held(key: &QueueKey) -> String {
    match (key.held.as_deref(), key.limit, &key.rate) {
        (Some("limit"), Some(limit), _) => format!("limit {limit}"),
        (Some("rate"), _, Some(of)) => format!("rate {}", rate(of)),
        (Some(other), ..) => other.into(),
        (None, ..) => String::new(),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64
}

/// How long ago something was, in milliseconds.
pub(crate) fn since(ms: u64) -> u64 {
    now().saturating_sub(ms)
}

/// When something comes, if it is still to come.
pub(crate) fn due(ms: u64) -> String {
    match ms.saturating_sub(now()) {
        0 => "due".into(),
        ms => format!("due in {}", age(ms)),
    }
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
        State::Failed | State::Expired => Look::Bad,
        State::Running => Look::Active,
        State::Queued | State::Scheduled | State::Canceled => Look::Waits,
    }
}

/// When a waiting task will start, as far as that is known.
fn start(estimate: &Estimate) -> Option<String> {
    let more = if estimate.approximate { " or so" } else { "" };
    let expected = estimate.expected_ms.map(|ms| format!("starts in about {}", age(ms)));
    let upper = estimate.upper_ms.map(|ms| format!("within {}{more}", age(ms)));
    let said: Vec<String> = [expected, upper].into_iter().flatten().collect();
    (!said.is_empty()).then(|| said.join(", "))
}

/// How many go before a task, and when it will start.
pub(crate) fn position(task: &Task) -> Option<String> {
    let least = if task.ahead_is_exact == Some(true) { "" } else { "at least " };
    let ahead = task.ahead.map(|n| format!("{least}{} ahead", count(n)))?;
    match task.estimate.as_ref().and_then(start) {
        Some(start) => Some(format!("{ahead}, {start}")),
        None => Some(ahead),
    }
}

/// Which try it is, of how many.
pub(crate) fn attempt(task: &Task, of: &str) -> Option<String> {
    let attempt = task.attempt?;
    Some(task.max_attempts.map_or_else(|| attempt.to_string(), |most| format!("{attempt}{of}{most}")))
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
            let cut = task.cut.as_ref().map_or_else(String::new, |cut| format!("; {}", cut.reason));
            format!("on {seat}{stopping}{progress}{cut}")
        }
        State::Scheduled => {
            let last = task.error.as_ref().map(|error| format!("failed: {error}"));
            [task.due_ms.map(due), last].into_iter().flatten().collect::<Vec<_>>().join("; ")
        }
        State::Succeeded | State::Failed | State::Canceled | State::Expired => {
            task.error.clone().unwrap_or_default()
        }
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
    let ago = |at: u64| format!("{} ago", age(since(at)));
    facts.fact("accepted", task.accepted_ms.map_or_else(String::new, ago));
    facts.fact("ended", task.ended_ms.map_or_else(String::new, ago));
    if let Some(size) = task.payload_bytes {
        let kind = task.content_type.as_ref().map_or_else(String::new, |kind| format!(" of {kind}"));
        facts.fact("payload", format!("{}{kind}", bytes(size)));
    }
    let file = |file: &FileInfo| format!("{}  {}", bytes(file.bytes), plain(&file.name));
    facts.fact("files", task.files.iter().map(file).collect::<Vec<_>>().join("\n"));
    facts.fact("may take", task.max_duration_ms.map_or_else(String::new, age));
    facts.fact("expected", task.expected_ms.map_or_else(String::new, |ms| format!("to take {}", age(ms))));
    if let Some(expires) = task.expires_at_ms.filter(|_| !task.state.is_over()) {
        let left = expires.saturating_sub(now());
        facts.fact("expires", if left == 0 { "now".into() } else { format!("in {}", age(left)) });
    }
    if let Some(ttl) = task.attach_ttl_ms.filter(|_| !task.state.is_over()) {
        facts.fact("attached", format!("canceled when nobody has watched it for {}", age(ttl)));
    }
    facts.fact("replay of", task.replay_of.as_deref().unwrap_or_default());
    facts.fact("replayed", task.replayed_as.as_ref().map_or_else(String::new, |id| format!("as {id}")));
    match task.state {
        State::Queued => facts.fact("waits", why(task)),
        State::Scheduled => facts.fact("waits", task.due_ms.map_or_else(String::new, due)),
        State::Running => {
            facts.fact("runs", why(task));
            let left = task.deadline_ms.map(|at| at.saturating_sub(now()));
            if let (Some(limit), Some(left)) = (task.limit_ms, left) {
                facts.fact("time", format!("{} in all, {} left", duration(limit), age(left)));
            }
            let class = task.class_ms.map(|ms| format!("it holds the {} class", duration(ms)));
            facts.fact("class", class.unwrap_or_default());
        }
        State::Succeeded | State::Failed | State::Canceled | State::Expired => {}
    }
    facts.fact("error", plain(task.error.as_deref().unwrap_or_default()));
    if let Some(result) = &task.result {
        facts.fact("result", printable(result));
    } else if task.result_base64.is_some() {
        facts.fact("result", "is no text; --json shows it");
    }
    let mut text = facts.text();
    if !task.tries.is_empty() {
        text.push('\n');
        text.push_str(&tries(&task.tries).text(room, paint));
    }
    text
}

/// The tries at a task.
fn tries(tries: &[Try]) -> Table<'static> {
    let mut table = Table::new(vec![
        number("attempt", 0),
        column("where", 2),
        number("started", 3),
        number("took", 4),
        column("how", 0),
        column("error", 1),
    ]);
    for tried in tries {
        let (how, look) = match tried.end.as_str() {
            "succeeded" => ("succeeded", Look::Good),
            "failed_for_good" => ("failed for good", Look::Bad),
            "time_up" => ("time up", Look::Bad),
            "downgraded" => ("downgraded", Look::Bad),
            other => (other, Look::Waits),
        };
        let started = tried.started_ms.map(|at| format!("{} ago", age(since(at))));
        let took = tried.started_ms.map(|at| age(tried.ended_ms.saturating_sub(at)));
        table.row(vec![
            tried.attempt.to_string().into(),
            tried.seat.as_deref().unwrap_or("-").into(),
            started.unwrap_or_else(|| "-".into()).into(),
            took.unwrap_or_else(|| "-".into()).into(),
            Cell::new(how, look),
            tried.error.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}

/// A result, if it is text that a terminal can show.
fn printable(result: &str) -> String {
    match result.chars().any(|c| c.is_control() && !c.is_whitespace()) {
        true => format!("{} that are no text; --json shows them", of(result.len() as u64, "byte")),
        false => result.trim_end().into(),
    }
}

/// What an event says beside the state: of a run that failed, why it is tried again.
fn what(task: &Task) -> String {
    match (&task.error, task.state) {
        (Some(error), State::Queued) => format!("again: {error}"),
        (Some(error), State::Scheduled) => {
            let due = task.due_ms.map_or_else(String::new, |at| format!(", {}", due(at)));
            format!("again{due}: {error}")
        }
        (None, State::Queued | State::Scheduled)
        | (_, State::Running | State::Succeeded | State::Failed | State::Canceled | State::Expired) => {
            why(task)
        }
    }
}

/// What happened to a task, in a line. None: nothing that a person wants to know.
pub(crate) fn event(event: &Event, paint: Paint) -> Option<String> {
    if let Some(task) = &event.task {
        let more = what(task);
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
    if let Some(told) = &event.estimate {
        let position = format!("position {}", count(told.position));
        return Some(format!(
            "  {}",
            [Some(position), start(told)].into_iter().flatten().collect::<Vec<_>>().join(", ")
        ));
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
            let more = what(task);
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
        number("scheduled", 4),
        number("accepted", 6),
        number("succeeded", 5),
        number("failed", 2),
        number("canceled", 7),
        number("expired", 8),
        number("next waits", 3),
    ];
    let some_paused = queues.iter().any(|queue| queue.paused);
    if some_paused {
        columns.push(column("paused", 1));
    }
    let some_interactive = queues.iter().any(|queue| queue.interactive > 0);
    if some_interactive {
        columns.push(number("interactive", 3));
    }
    let some_classes = queues.iter().any(|queue| !queue.classes.is_empty());
    if some_classes {
        columns.push(column("classes", 2));
    }
    if chosen.is_some() {
        columns.insert(0, column(" ", 0));
    }
    let mut table = Table::new(columns);
    for queue in queues {
        let is_chosen = chosen == Some(queue.queue.as_str());
        let numbers = [
            queue.running,
            queue.scheduled,
            queue.accepted,
            queue.succeeded,
            queue.failed,
            queue.canceled,
            queue.expired,
        ];
        let mut cells = vec![
            Cell::new(&queue.queue, if is_chosen { Look::Strong } else { Look::Plain }),
            count(queue.waiting).into(),
        ];
        cells.extend(numbers.map(|n| Cell::from(count(n))));
        cells.push(queue.oldest_waiting_ms.map_or_else(|| "-".into(), age).into());
        if some_paused {
            cells.push(Cell::new(if queue.paused { "paused" } else { "" }, Look::Waits));
        }
        if some_interactive {
            cells.push(count(queue.interactive).into());
        }
        if some_classes {
            cells.push(classes_held(&queue.classes).into());
        }
        if chosen.is_some() {
            cells.insert(0, Cell::new(if is_chosen { "▶" } else { "" }, Look::Active));
        }
        table.row(cells);
    }
    table
}

/// A queue alone.
pub(crate) fn queue_text(detail: &QueueDetail, room: Option<usize>, paint: Paint) -> String {
    let queue = &detail.queue;
    let mut facts = Facts::new(room, paint);
    facts.fact("queue", &queue.queue);
    facts.looks("paused", if queue.paused { "nothing of it is started" } else { "" }, Look::Waits);
    let (waiting, running, scheduled) = (count(queue.waiting), count(queue.running), count(queue.scheduled));
    let interactive = match queue.interactive {
        0 => String::new(),
        n => format!(", {} interactive", count(n)),
    };
    facts.fact("tasks", format!("{waiting} waiting, {running} running, {scheduled} scheduled{interactive}"));
    facts.fact("held", classes_held(&queue.classes));
    let does = match queue.loop_state.as_str() {
        "idle" => "idle: nothing to do",
        "running" => "running: there is something to start",
        "scheduled" => "scheduled: asleep until something is due or comes",
        "saturated" => "saturated: every slot is taken, or there is none",
        other => other,
    };
    facts.fact("loop", does);
    let ended = [
        ("succeeded", queue.succeeded),
        ("failed", queue.failed),
        ("canceled", queue.canceled),
        ("expired", queue.expired),
    ];
    let ended = ended.map(|(name, n)| format!("{} {name}", count(n)));
    facts.fact("ever", format!("{} accepted, {}", count(queue.accepted), ended.join(", ")));
    settings(&mut facts, &detail.settings, detail.version);
    facts.text()
}

/// A queue's settings.
pub(crate) fn settings_text(queue: &str, set: &QueueSet, room: Option<usize>, paint: Paint) -> String {
    let mut facts = Facts::new(room, paint);
    facts.fact("queue", queue);
    let is_paused = set.settings.paused == Some(true);
    facts.looks("paused", if is_paused { "nothing of it is started" } else { "" }, Look::Waits);
    settings(&mut facts, &set.settings, set.version);
    facts.text()
}

fn settings(facts: &mut Facts, settings: &QueueSettings, version: u64) {
    let retry = settings.retry.unwrap_or_default();
    let attempts = retry.max_attempts.map(|most| match most {
        1 => "a task is tried once".into(),
        most => format!("a task is tried {} at most", of(most.into(), "time")),
    });
    facts.fact("attempts", attempts.unwrap_or_default());
    if let Some(first) = retry.backoff_ms {
        let factor = retry.factor.filter(|factor| *factor > 1.0);
        let then = factor
            .map_or_else(String::new, |factor| format!(", then {} times as long each time", weight(factor)));
        let most = retry.max_backoff_ms.map_or_else(String::new, |most| format!(", at most {}", age(most)));
        facts.fact("backoff", format!("{} before the second try{then}{most}", age(first)));
    }
    let lost = retry.max_lost.map(|most| {
        format!("a task is given up after {} that were lost with their workers", of(most.into(), "run"))
    });
    facts.fact("lost", lost.unwrap_or_default());
    let kept = settings.retention_ms.map(|ms| match ms {
        0 => "ends are not remembered".into(),
        ms => format!("ends are remembered for {}", age(ms)),
    });
    facts.fact("retention", kept.unwrap_or_default());
    let share = settings.share.map(|share| match share {
        Share::Tasks => "keys share tasks: every task counts one",
        Share::Time => "keys share time: a task counts the time that it takes",
    });
    facts.fact("share", share.unwrap_or_default());
    if let Some(classes) = &settings.classes {
        let class = |class: &ClassLimit| format!("{}:{}", duration(class.duration_ms), class.limit);
        facts.fact("classes", classes.iter().map(class).collect::<Vec<_>>().join(","));
        let after = settings.after_downgrade.map(|after| match after {
            AfterDowngrade::Fail => "a task whose time was cut and is up has failed",
            AfterDowngrade::Requeue => "a task whose time was cut and is up is tried again at once",
        });
        facts.fact("downgrade", after.unwrap_or_default());
    }
    let grace = settings.interactive_grace_ms.filter(|ms| *ms > 0);
    let grace = grace.map(|ms| format!("an interactive task is warned {} before it is halted", duration(ms)));
    facts.fact("grace", grace.unwrap_or_default());
    let limit =
        settings.key_limit.map(|limit| format!("at most {} of a key at once", of(limit.into(), "run")));
    facts.fact("key limit", limit.unwrap_or_default());
    let starts =
        |of: &Option<Rate>| of.as_ref().map(|of| format!("{} may start", rate(of))).unwrap_or_default();
    facts.fact("rate", starts(&settings.rate));
    facts.fact("key rate", starts(&settings.key_rate));
    facts.fact("version", version.to_string());
}

pub(crate) fn workers(workers: &[Worker]) -> Table<'static> {
    workers_table(workers, true)
}

fn workers_table(workers: &[Worker], with_why: bool) -> Table<'static> {
    let mut columns = vec![
        column("seat", 0),
        number("life", 6),
        column("health", 1),
        number("slots", 2),
        number("running", 2),
        column("queues", 4),
        number("heard", 5),
    ];
    columns.extend(with_why.then_some(column("why no work", 3)));
    let mut table = Table::new(columns);
    for worker in workers {
        let mut cells: Vec<Cell> = vec![
            worker.seat.as_str().into(),
            worker.life.as_str().into(),
            Cell::new(&worker.health, health_look(&worker.health)),
            count(worker.slots.into()).into(),
            count(worker.running.into()).into(),
            worker.queues.iter().map(served).collect::<Vec<_>>().join(" ").into(),
            worker.heard_ms_ago.map_or_else(|| "-".into(), |ms| format!("{} ago", age(ms))).into(),
        ];
        cells.extend(with_why.then(|| Cell::from(why_no_work(worker))));
        table.row(cells);
    }
    table
}

/// The workers alone. Where there is no room for the reasons beside them, they stand below, in full.
pub(crate) fn workers_text(all: &[Worker], room: Option<usize>, paint: Paint) -> String {
    let table = workers(all);
    let fits = |room: usize| table.lines(None, Paint::NONE).iter().all(|line| width(line) <= room);
    if room.is_none_or(fits) {
        return table.text(room, paint);
    }
    let mut text = workers_table(all, false).text(room, paint);
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for worker in all {
        let why = why_no_work(worker);
        match reasons.iter_mut().find(|(other, _)| *other == why) {
            _ if why.is_empty() => {}
            Some((_, seats)) => seats.push(&worker.seat),
            None => reasons.push((why, vec![&worker.seat])),
        }
    }
    if !reasons.is_empty() {
        text.push_str("\nWhy no work:\n");
    }
    for (why, seats) in reasons {
        let more = match seats.len().saturating_sub(SEATS_NAMED) {
            0 => String::new(),
            n => format!(" and {} more", count(n as u64)),
        };
        let named = seats.iter().take(SEATS_NAMED).copied().collect::<Vec<_>>().join(", ");
        let lines = wrap(&plain(&format!("  {named}{more}: {why}")), 4, room);
        lines.into_iter().for_each(|line| text.push_str(&(line + "\n")));
    }
    text
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

/// The start gate alone, what its state means, and what to do about it.
pub(crate) fn gate_text(shard: &Shard, room: Option<usize>, paint: Paint) -> String {
    let mut facts = Facts::new(room, paint);
    if shard.open {
        facts.looks("gate", "open: tasks may start", Look::Good);
        return facts.text();
    }
    facts.looks("gate", "shut: nothing starts; tasks are accepted, and what runs goes on", Look::Waits);
    facts.fact("why", shard.waits_for.as_deref().unwrap_or_default());
    if shard.in_doubt {
        facts.fact(
            "in doubt",
            "the store seems to be older than what it was before, such as a backup that was restored. There may be \
             workers that it does not know, and what they run. The gate opens as soon as those that are here agree that \
             nobody is missing, or when nobody else can be alive",
        );
    }
    if shard.absent_seats.len() > SEATS_NAMED {
        facts.fact("absent", shard.absent_seats.join(", "));
    }
    let mut text = facts.text();
    let back = match shard.absent_seats.is_empty() {
        true => "wait: it opens by itself",
        false => "bring these workers back, in their seats; or wait: it opens by itself",
    };
    let open = "evenhand gate open   opens it now; it says what that risks";
    text.push_str("\nWhat to do:\n");
    for hint in [back, open] {
        wrap(&format!("  {hint}"), 4, room).into_iter().for_each(|line| text.push_str(&(line + "\n")));
    }
    text
}

pub(crate) fn status_text(server: &str, status: &Status, room: Option<usize>, paint: Paint) -> String {
    let mut facts = Facts::new(room, paint);
    facts.fact("server", format!("{server}, evenhand {}, up {}", status.version, age(status.up_ms)));
    facts.fact("store", format!("{} (id {})", status.store, status.store_id));
    let times = &status.thresholds;
    let [heartbeat, unhealthy, killed, lost] =
        [times.heartbeat_ms, times.unhealthy_after_ms, times.lease_ms, times.lost_after_ms].map(age);
    facts.fact(
        "times",
        format!("heartbeat {heartbeat}, unhealthy after {unhealthy}, killed after {killed} (its lease), lost after {lost}"),
    );
    let [absence, shut] = [times.absence_ms, times.longest_shut_ms].map(age);
    facts.fact("absence", format!("{absence}; the start gate is shut for {shut} at most"));
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
    use expect_test::expect;

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
    fn reasons_for_which_there_is_no_room_beside_the_workers_stand_below() {
        let worker = |seat: &str, health: &str, why_not: &str| {
            let (seat, health, why_not) = (seat.into(), health.into(), why_not.into());
            let wire = evenhand::wire::Worker {
                seat,
                health,
                why_not,
                slots: 8,
                process_life: 1,
                lost_in_ms: 41_000,
                ..Default::default()
            };
            Worker::from(wire)
        };
        let turn = "many workers join at once: its turn comes when all know those before it";
        let mut all: Vec<Worker> = (1..=7).map(|n| worker(&format!("gpu-{n}"), "new", turn)).collect();
        all.push(worker("gpu-8", "healthy", ""));
        all.push(worker("gpu-9", "absent", "it has not been heard since this server started"));
        expect![[r#"
              seat   life  health   slots  running  queues  heard
              gpu-1     1  new          8        0              -
              gpu-2     1  new          8        0              -
              gpu-3     1  new          8        0              -
              gpu-4     1  new          8        0              -
              gpu-5     1  new          8        0              -
              gpu-6     1  new          8        0              -
              gpu-7     1  new          8        0              -
              gpu-8     1  healthy      8        0              -
              gpu-9     1  absent       8        0              -

            Why no work:
              gpu-1, gpu-2, gpu-3, gpu-4, gpu-5 and 2 more: many workers join at
                once: its turn comes when all know those before it
              gpu-9: it has not been heard since this server started; lost in 41 s
        "#]]
        .assert_eq(&workers_text(&all, Some(70), Paint::NONE));
        assert_eq!(workers_text(&all, None, Paint::NONE), workers(&all).text(None, Paint::NONE));
    }

    #[test]
    fn a_task_is_shown_with_its_tries_and_its_links() {
        use evenhand::wire;
        let tried = |attempt, end: &str, error: &str| wire::Try {
            attempt,
            seat: "gpu-7".into(),
            started_ms: now() - 3_600_000 * 3,
            ended_ms: now() - 3_600_000 * 3 + 2_100,
            end: end.into(),
            error: error.into(),
        };
        let mut tries = vec![
            tried(1, "failed", "it ended with exit code 3"),
            tried(2, "lost", ""),
            tried(3, "succeeded", ""),
        ];
        tries[1].seat.clear();
        tries[1].started_ms = 0;
        let task = Task::from(wire::Task {
            id: "0-42".into(),
            queue: "render".into(),
            state: wire::TaskState::Scheduled.into(),
            priority: 5,
            attempt: 4,
            max_attempts: 8,
            expected_ms: Some(300_000),
            due_ms: Some(now() + 46_440_000),
            expires_at_ms: Some(now() + 9_000_000),
            error: "it ended with exit code 3".into(),
            replay_of: "0-7".into(),
            replayed_as: "0-99".into(),
            tries,
            ..wire::Task::default()
        });
        expect![[r#"
            shown:
              task      0-42
              state     scheduled
              queue     render
              attempt   4 of 8
              priority  5
              expected  to take 5 min
              expires   in 2 h
              replay of 0-7
              replayed  as 0-99
              waits     due in 12 h
              error     it ended with exit code 3

              attempt  where  started  took  how        error
                    1  gpu-7  3 h ago   2 s  failed     it ended with exit code 3
                    2  -            -     -  lost
                    3  gpu-7  3 h ago   2 s  succeeded
        "#]]
        .assert_eq(&format!("shown:\n{}", task_text(&task, None, Paint::NONE)));
        let told = Event {
            at_ms: 0,
            task_id: None,
            task: Some(task),
            output: None,
            progress: None,
            estimate: None,
            dropped: None,
        };
        assert_eq!(
            event(&told, Paint::NONE).as_deref(),
            Some("0-42 scheduled (attempt 4): again, due in 12 h: it ended with exit code 3")
        );
    }

    #[test]
    fn a_queue_is_shown_with_its_settings() {
        use evenhand::wire;
        let retry = wire::Retry {
            max_attempts: Some(5),
            backoff_ms: Some(250),
            factor_thousandths: Some(2_000),
            max_backoff_ms: Some(3_600_000),
            max_lost: Some(3),
        };
        use wire::class_limit::Limit::{All, Percent};
        let class = |duration_ms, limit| wire::ClassLimit { duration_ms, limit: Some(limit) };
        let classes = vec![class(3_000, All(true)), class(30_000, Percent(25))];
        let rate = |per_second_thousandths, burst| wire::Rate {
            per_second_thousandths,
            burst_thousandths: Some(burst),
            unit: wire::RateUnit::Tasks.into(),
        };
        let settings = wire::QueueSettings {
            retry: Some(retry),
            retention_ms: Some(86_400_000),
            paused: Some(true),
            share: Some(wire::Share::Time.into()),
            classes: Some(wire::Classes { classes }),
            after_downgrade: Some(wire::AfterDowngrade::Requeue.into()),
            interactive_grace_ms: Some(2_000),
            key_limit: Some(4),
            rate: Some(rate(100_000, 200_000)),
            key_rate: Some(rate(500, 1_000)),
        };
        let held = |duration_ms, held, limit| wire::QueueClass { duration_ms, held, limit };
        let queue = wire::Queue {
            name: "render".into(),
            paused: true,
            waiting: 1_200,
            interactive: 1,
            classes: vec![held(3_000, 5, 8), held(30_000, 1, 2)],
            ..Default::default()
        };
        let detail = wire::QueueResponse {
            queue: Some(queue),
            keys: Vec::new(),
            settings: Some(settings),
            version: 3,
        };
        expect![[r#"
            shown:
              queue     render
              paused    nothing of it is started
              tasks     1,200 waiting, 0 running, 0 scheduled, 1 interactive
              held      3s 5/8  30s 1/2
              ever      0 accepted, 0 succeeded, 0 failed, 0 canceled, 0 expired
              attempts  a task is tried 5 times at most
              backoff   250 ms before the second try, then 2 times as long each time, at most 60 min
              lost      a task is given up after 3 runs that were lost with their workers
              retention ends are remembered for 24 h
              share     keys share time: a task counts the time that it takes
              classes   3s:all,30s:25%
              downgrade a task whose time was cut and is up is tried again at once
              grace     an interactive task is warned 2s before it is halted
              key limit at most 4 runs of a key at once
              rate      100/s:burst=200 may start
              key rate  0.5/s may start
              version   3
        "#]]
        .assert_eq(&format!("shown:\n{}", queue_text(&detail.into(), None, Paint::NONE)));
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
        let told = Event {
            at_ms: 0,
            task_id: None,
            task: None,
            output: None,
            progress,
            estimate: None,
            dropped: None,
        };
        assert_eq!(event(&told, Paint::NONE).as_deref(), Some("  30 % page 7"));
    }
}
