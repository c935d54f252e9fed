//! `evenhand explain`: why a task is not running, in plain words, and what to do about it.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use evenhand::{Client, Kind, Refusal};
use evenhand_api::rest::{Hold, QueueKey, Shard, Share, State, Status, Task, Worker};
use serde::Serialize;

use crate::Done;
use crate::client::TaskArgs;
use crate::show::{self, Facts};
use crate::table::{count, of};
use crate::terminal::{Look, Paint, Stream, plain, print, print_json, wrap};

/// A share that is less than this part of what is due is less than due: shares are counted over a minute.
const NEARLY: f64 = 0.8;

/// Which task.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand explain 0-42
  evenhand explain 0-42 --json | jq -r .why

It tells how the task stands, what it waits for, what its key gets against what is due to it, the workers that serve \
its queue, the start gate, and what to do.")]
pub(crate) struct Args {
    #[command(flatten)]
    task: TaskArgs,
}

/// What is known, and what it means.
#[derive(Debug, Serialize)]
struct Explained {
    /// Why it is not running, in words.
    why: String,
    /// What to do about it, if there is something.
    hints: Vec<String>,
    #[serde(flatten)]
    facts: Known,
}

/// What there is to know of a task that could keep it from running.
#[derive(Debug, Serialize)]
struct Known {
    task: Task,
    /// What its key gets and what is due to it. Absent: it is not among the busiest.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<QueueKey>,
    /// What the keys of its queue share.
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<Share>,
    /// Workers that serve its queue.
    workers: Vec<Worker>,
    /// Its shard, with the start gate.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<Shard>,
}

pub(crate) async fn run(args: Args) -> Done {
    let client = args.task.look.server.client()?;
    let known = look(&client, &args.task.id).await?;
    let (why, hints) = meaning(&known);
    let explained = Explained { why, hints, facts: known };
    match args.task.look.json {
        true => print_json(&explained)?,
        false => print(text(&explained, Stream::Out.width(), Stream::Out.paint()))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn look(client: &Client, id: &str) -> Result<Known, Refusal> {
    let task = Task::from(client.get(id).await?);
    let mut known = Known { task, key: None, share: None, workers: Vec::new(), shard: None };
    let status = Status::from(client.status().await?);
    let shard = id.split('-').next().and_then(|shard| shard.parse::<u32>().ok());
    known.shard = status.shards.into_iter().find(|its| Some(its.id) == shard);
    if known.task.queue.is_empty() {
        return Ok(known);
    }
    let serves = |worker: &Worker| worker.queues.iter().any(|served| served.queue == known.task.queue);
    let workers = client.workers().await?.into_iter().map(Worker::from);
    known.workers = workers.filter(serves).collect();
    match client.queue(&known.task.queue, 1_000).await {
        Ok(queue) => {
            known.share = queue.settings.as_ref().and_then(Share::of);
            known.key = queue.keys.into_iter().map(QueueKey::from).find(|key| key.key == known.task.key);
        }
        // Its last task has ended since.
        Err(refusal) if refusal.kind == Kind::NotFound => {}
        Err(refusal) => return Err(refusal),
    }
    Ok(known)
}

/// Why it is not running, and what to do.
fn meaning(known: &Known) -> (String, Vec<String>) {
    let Known { task, workers, shard, .. } = known;
    let id = &task.id;
    let again = |what: &str| match &task.replayed_as {
        Some(other) => format!("evenhand get {other}   it was run again: this is how that stands"),
        None => format!("evenhand replay {id}   {what}"),
    };
    match task.state {
        State::Running => {
            let on = show::why(task);
            let stopping = task.stopping == Some(true);
            let hint = format!("evenhand watch {id}   shows what it says and how it ends");
            return (format!("task {id} is running {on}"), if stopping { vec![] } else { vec![hint] });
        }
        State::Succeeded => {
            return (format!("task {id} has succeeded: there is nothing to wait for"), vec![]);
        }
        State::Canceled => {
            return (format!("task {id} was canceled and will not run"), vec![again("runs it after all")]);
        }
        State::Expired => {
            let why = format!("task {id} has expired: it was not started in time, and will not run");
            return (why, vec![again("runs it after all")]);
        }
        State::Failed => {
            let tried = format!("after {}", of(task.attempt.unwrap_or(0).into(), "attempt"));
            let error = task.error.as_deref().map_or_else(String::new, |error| format!(": {}", plain(error)));
            let hint = again("runs it again, once the reason is gone");
            return (format!("task {id} has failed {tried}{error}"), vec![hint]);
        }
        State::Scheduled => {
            let due = task
                .due_ms
                .map_or_else(|| "it is not due yet".into(), |at| format!("it is {}", show::due(at)));
            let what = match task.attempt {
                Some(attempt @ 2..) => format!("waits before its attempt {attempt}"),
                Some(_) | None => "waits for its time".into(),
            };
            return (format!("task {id} {what}: {due}"), vec!["this passes by itself".into()]);
        }
        State::Queued => {}
    }
    let queue = &task.queue;
    if let Some(shard) = shard.as_ref().filter(|shard| !shard.open) {
        let waits = shard.waits_for.as_deref().unwrap_or("what runs is not known yet");
        let wait = match shard.absent_seats.as_slice() {
            [] => "wait: it opens by itself".to_string(),
            seats => {
                let seats = seats.join(", ");
                format!("bring these workers back, in their seats: {seats}; or wait: it opens by itself")
            }
        };
        let hints = vec![wait, "evenhand gate open   opens it now; it says what that risks".into()];
        return (format!("task {id} waits: the start gate is shut, nothing starts: {waits}"), hints);
    }
    if let Some((why, hints)) = task.holds.first().and_then(|hold| ruled_out(task, hold)) {
        return (format!("task {id} waits: {why}"), hints);
    }
    let start = |more: &str| format!("evenhand worker {queue} -- COMMAND   starts {more} worker for it");
    if workers.is_empty() {
        return (format!("task {id} waits: no worker serves its queue {queue}"), vec![start("a")]);
    }
    let healthy: Vec<&Worker> = workers.iter().filter(|worker| worker.why_not.is_none()).collect();
    if healthy.is_empty() {
        let why = match workers.as_slice() {
            [one] => {
                format!("the only worker of {queue}, {}, gets no work: {}", one.seat, show::why_no_work(one))
            }
            _ => format!("none of the {} workers of {queue} gets work", workers.len()),
        };
        return (
            format!("task {id} waits: {why}"),
            vec!["look after them: evenhand workers".into(), start("another")],
        );
    }
    let hold = task.hold.as_deref().unwrap_or("its turn has not come");
    let slots: u64 = healthy.iter().map(|worker| u64::from(worker.slots)).sum();
    let running: u64 = healthy.iter().map(|worker| u64::from(worker.running)).sum();
    let mut hints = Vec::new();
    let why = if running >= slots {
        hints.push("wait; or add slots: evenhand worker --slots N, or another worker".to_string());
        format!("every slot is taken: {} of {}", count(running), count(slots))
    } else {
        hints.push("this passes by itself".to_string());
        hold.to_string()
    };
    let ahead = task.ahead.filter(|n| *n > 0).map(|n| {
        let least = if task.ahead_is_exact == Some(true) { "" } else { "at least " };
        let go = if n == 1 { "goes" } else { "go" };
        format!(", and {least}{} {go} before it", of(n, "task"))
    });
    if hold.starts_with("priority ") {
        hints.push(format!(
            "{hold}: priorities are strict; submit with --priority {} to go as soon",
            hold_priority(hold)
        ));
    }
    if known.key.as_ref().is_some_and(is_short) {
        hints.push(
            "its key got less than its share over the last minute: as it must if it began to wait just now"
                .to_string(),
        );
    }
    (format!("task {id} waits: {why}{}", ahead.unwrap_or_default()), hints)
}

/// What a rule means that has nothing to do with slots, and what to do about it; None, if it is about slots and turns.
fn ruled_out(task: &Task, hold: &Hold) -> Option<(String, Vec<String>)> {
    let Task { id, queue, key, .. } = task;
    let key = if key.is_empty() { "''" } else { key };
    let message = hold.message.clone();
    let hints = match hold.kind.as_str() {
        "queue_paused" => {
            let hint = format!("evenhand queue resume {queue}   starts its tasks again");
            return Some((format!("its queue {queue} is paused"), vec![hint]));
        }
        "key_paused" => vec![format!("evenhand queue resume {queue} --key {key}   starts its tasks again")],
        "key_limit" => vec![
            "wait until one of them has ended".into(),
            format!("evenhand queue key {queue} {key} --limit N   lets more of its tasks run at once"),
        ],
        "key_rate" => vec![
            "this passes by itself".into(),
            format!("evenhand queue key {queue} {key} --rate N/s   lets more of its tasks start"),
        ],
        "queue_rate" => vec![
            "this passes by itself".into(),
            format!("evenhand queue set {queue} --rate N/s   lets more of its tasks start"),
        ],
        "class_full" => vec![
            "wait until one of them has ended".into(),
            format!("evenhand shorten {id} TIME   if it needs less: a shorter class may have room"),
            format!("evenhand queue set {queue} --classes ...   gives the class more room"),
        ],
        _ => return None,
    };
    Some((message, hints))
}

/// The number in "priority 2 goes first".
fn hold_priority(hold: &str) -> &str {
    hold.split(' ').nth(1).unwrap_or("0")
}

fn is_short(key: &QueueKey) -> bool {
    key.waiting > 0 && key.share < key.share_due * NEARLY
}

fn text(explained: &Explained, room: Option<usize>, paint: Paint) -> String {
    let Known { task, key, share, workers, shard } = &explained.facts;
    let mut facts = Facts::new(room, paint);
    let attempt = show::attempt(task, " of ").map(|attempt| format!("attempt {attempt}"));
    let accepted = task.accepted_ms.map(|at| format!("accepted {} ago", show::age(show::since(at))));
    let state = [Some(task.state.name().to_string()), attempt, accepted];
    facts.fact("state", state.into_iter().flatten().collect::<Vec<_>>().join(", "));
    if task.state == State::Queued {
        let place = show::position(task)
            .map(|ahead| format!("{ahead} in queue {}, priority {}", task.queue, task.priority));
        facts.fact("position", place.unwrap_or_default());
        // The gate says the same, below.
        if shard.as_ref().is_none_or(|shard| shard.open) {
            let all: Vec<&str> = task.holds.iter().map(|hold| hold.message.as_str()).collect();
            let said = if all.is_empty() { task.hold.clone().unwrap_or_default() } else { all.join("\n") };
            facts.fact("waits for", said);
        }
    }
    if task.state == State::Scheduled {
        facts.fact("waits for", task.due_ms.map_or_else(String::new, show::due));
    }
    if let State::Queued | State::Scheduled = task.state {
        let last = task.error.as_deref().map(|error| format!("failed: {}", plain(error)));
        facts.fact("last run", last.unwrap_or_default());
    }
    if let Some(key) = key.as_ref().filter(|_| !task.state.is_over()) {
        let name = if key.key.is_empty() { "the shared key" } else { &key.key };
        facts.fact("key", {
            let limit = key.limit.map_or_else(String::new, |limit| format!(" of {limit} at most"));
            let rate =
                key.rate.as_ref().map_or_else(String::new, |of| format!(", {} may start", show::rate(of)));
            format!(
                "{name}, weight {}, {} waiting, {} running{limit}{rate}",
                show::weight(key.weight),
                count(key.waiting),
                count(key.running)
            )
        });
        // Where nothing can start, nobody gets a share.
        if !workers.is_empty() {
            let judged = match is_short(key) {
                true => "less than is due",
                false if key.waiting == 0 => "nothing of it waits",
                false => "as is due, or more",
            };
            let (got, due) = (show::percent(key.share), show::percent(key.share_due));
            let what = match share {
                Some(Share::Time) => "time of its queue's runs",
                Some(Share::Tasks) | None => "starts",
            };
            facts
                .fact("share", format!("got {got} of the {what} of the last minute, {due} is due: {judged}"));
        }
    }
    if !task.state.is_over() {
        let healthy = workers.iter().filter(|worker| worker.why_not.is_none()).count() as u64;
        let serve = if workers.len() == 1 { "serves" } else { "serve" };
        let all = of(workers.len() as u64, "worker");
        facts.fact(
            "workers",
            match workers.is_empty() {
                true => format!("none serves {}", task.queue),
                false => format!(
                    "{all} {serve} {}; {} can take work",
                    task.queue,
                    if healthy == 0 { "none".into() } else { count(healthy) }
                ),
            },
        );
        for worker in workers.iter().take(10) {
            let why = show::why_no_work(worker);
            let why = if why.is_empty() { why } else { format!("; {why}") };
            let runs =
                format!("{} of {} running", count(worker.running.into()), of(worker.slots.into(), "slot"));
            facts.fact("", format!("{}: {}, {runs}{why}", worker.seat, worker.health));
        }
        if workers.len() > 10 {
            facts.fact("", format!("and {} more: evenhand workers", count(workers.len() as u64 - 10)));
        }
        facts.fact("gate", shard.as_ref().map(show::gate).unwrap_or_default());
    }
    let why = wrap(&explained.why, 2, room).into_iter().map(|line| paint.of(Look::Strong, &line) + "\n");
    let mut text = why.collect::<String>() + "\n" + &facts.text();
    if !explained.hints.is_empty() {
        text.push_str("\nWhat to do:\n");
        let hints = explained.hints.iter().flat_map(|hint| wrap(&format!("  {hint}"), 4, room));
        hints.for_each(|line| text.push_str(&(line + "\n")));
    }
    text
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use evenhand::wire;

    use super::*;

    fn waiting() -> Known {
        let task = wire::Task {
            id: "0-42".into(),
            queue: "render".into(),
            key: "acme".into(),
            state: wire::TaskState::Queued.into(),
            priority: 5,
            attempt: 1,
            max_attempts: 5,
            ahead: Some(3),
            ahead_is_exact: true,
            hold: "every slot is taken (8)".into(),
            ..wire::Task::default()
        };
        let shard = wire::Shard { open: true, room: true, ..wire::Shard::default() };
        let status = wire::StatusResponse { shards: vec![shard], ..wire::StatusResponse::default() };
        Known {
            task: task.into(),
            key: None,
            share: None,
            workers: Vec::new(),
            shard: Status::from(status).shards.pop(),
        }
    }

    fn rule(kind: &str, message: &str) -> Hold {
        Hold::from(wire::Hold { kind: kind.into(), message: message.into(), ..wire::Hold::default() })
    }

    #[test]
    fn every_rule_in_its_way_is_told_and_the_first_says_what_to_do() {
        let mut known = Known { workers: vec![worker("gpu-1", 7, "")], ..waiting() };
        known.task.holds = vec![
            rule("class_full", "the 30s class is full: 2 of 2 held by 0-1, 0-2"),
            rule("other_keys", "3 other keys share the queue and go before its key"),
        ];
        check(
            known,
            &expect![[r#"
            task 0-42 waits: the 30s class is full: 2 of 2 held by 0-1, 0-2

              state     queued, attempt 1 of 5
              position  3 ahead in queue render, priority 5
              waits for the 30s class is full: 2 of 2 held by 0-1, 0-2
                        3 other keys share the queue and go before its key
              workers   1 worker serves render; 1 can take work
                        gpu-1: healthy, 7 of 8 slots running
              gate      open

            What to do:
              wait until one of them has ended
              evenhand shorten 0-42 TIME   if it needs less: a shorter class may have room
              evenhand queue set render --classes ...   gives the class more room
        "#]],
        );
        for (kind, hint) in [
            ("key_paused", "evenhand queue resume render --key acme"),
            ("key_limit", "evenhand queue key render acme --limit N"),
            ("key_rate", "evenhand queue key render acme --rate N/s"),
            ("queue_rate", "evenhand queue set render --rate N/s"),
        ] {
            let mut known = Known { workers: vec![worker("gpu-1", 7, "")], ..waiting() };
            known.task.holds = vec![rule(kind, "some words")];
            let (why, hints) = meaning(&known);
            assert_eq!(why, "task 0-42 waits: some words");
            assert!(hints.iter().any(|said| said.starts_with(hint)), "{kind}: {hints:?}");
        }
    }

    fn worker(seat: &str, running: u32, why_not: &str) -> Worker {
        let health = if why_not.is_empty() { "healthy" } else { "unhealthy" };
        wire::Worker {
            seat: seat.into(),
            health: health.into(),
            slots: 8,
            running,
            why_not: why_not.into(),
            lost_in_ms: 53_000,
            ..wire::Worker::default()
        }
        .into()
    }

    fn check(known: Known, expected: &Expect) {
        let (why, hints) = meaning(&known);
        expected.assert_eq(&text(&Explained { why, hints, facts: known }, None, Paint::NONE));
    }

    #[test]
    fn no_worker_serves_its_queue() {
        check(
            Known {
                task: Task { hold: Some("no worker serves its queue".into()), ..waiting().task },
                ..waiting()
            },
            &expect![[r#"
                task 0-42 waits: no worker serves its queue render

                  state     queued, attempt 1 of 5
                  position  3 ahead in queue render, priority 5
                  waits for no worker serves its queue
                  workers   none serves render
                  gate      open

                What to do:
                  evenhand worker render -- COMMAND   starts a worker for it
            "#]],
        );
    }

    #[test]
    fn every_slot_is_taken_and_its_key_is_behind() {
        let key = QueueKey {
            key: "acme".into(),
            weight: 2.0,
            waiting: 40,
            running: 1,
            started: 12,
            share: 0.12,
            share_due: 0.5,
            paused: false,
            limit: None,
            rate: None,
            held: None,
        };
        check(
            Known {
                key: Some(key),
                workers: vec![worker("gpu-1", 8, ""), worker("gpu-2", 3, "silent")],
                ..waiting()
            },
            &expect![[r#"
                task 0-42 waits: every slot is taken: 8 of 8, and 3 tasks go before it

                  state     queued, attempt 1 of 5
                  position  3 ahead in queue render, priority 5
                  waits for every slot is taken (8)
                  key       acme, weight 2, 40 waiting, 1 running
                  share     got 12 % of the starts of the last minute, 50 % is due: less than is due
                  workers   2 workers serve render; 1 can take work
                            gpu-1: healthy, 8 of 8 slots running
                            gpu-2: unhealthy, 3 of 8 slots running; silent; lost in 53 s
                  gate      open

                What to do:
                  wait; or add slots: evenhand worker --slots N, or another worker
                  its key got less than its share over the last minute: as it must if it began to wait just now
            "#]],
        );
    }

    #[test]
    fn where_time_is_shared_the_share_is_of_time() {
        let key = QueueKey {
            key: "acme".into(),
            weight: 1.0,
            waiting: 40,
            running: 4,
            started: 2,
            share: 0.5,
            share_due: 0.5,
            paused: false,
            limit: None,
            rate: None,
            held: None,
        };
        let known = Known {
            key: Some(key),
            share: Some(Share::Time),
            workers: vec![worker("gpu-1", 8, "")],
            ..waiting()
        };
        let (why, hints) = meaning(&known);
        let said = text(&Explained { why, hints, facts: known }, None, Paint::NONE);
        let share = said.lines().find(|line| line.trim_start().starts_with("share"));
        assert_eq!(
            share.map(str::trim),
            Some(
                "share     got 50 % of the time of its queue's runs of the last minute, 50 % is due: as is due, or more"
            )
        );
    }

    #[test]
    fn the_only_worker_gets_no_work() {
        check(
            Known { workers: vec![worker("gpu-2", 3, "silent")], ..waiting() },
            &expect![[r#"
                task 0-42 waits: the only worker of render, gpu-2, gets no work: silent; lost in 53 s

                  state     queued, attempt 1 of 5
                  position  3 ahead in queue render, priority 5
                  waits for every slot is taken (8)
                  workers   1 worker serves render; none can take work
                            gpu-2: unhealthy, 3 of 8 slots running; silent; lost in 53 s
                  gate      open

                What to do:
                  look after them: evenhand workers
                  evenhand worker render -- COMMAND   starts another worker for it
            "#]],
        );
    }

    #[test]
    fn the_gate_is_shut() {
        let mut known = waiting();
        if let Some(shard) = &mut known.shard {
            shard.open = false;
            shard.waits_for = Some("waiting for 1 of 2 workers: gpu-7, at most 41 s".into());
            shard.absent_seats = vec!["gpu-7".into()];
            shard.opens_in_ms = Some(41_000);
        }
        check(
            known,
            &expect![[r#"
            task 0-42 waits: the start gate is shut, nothing starts: waiting for 1 of 2 workers: gpu-7, at most 41 s

              state     queued, attempt 1 of 5
              position  3 ahead in queue render, priority 5
              workers   none serves render
              gate      shut: waiting for 1 of 2 workers: gpu-7, at most 41 s

            What to do:
              bring these workers back, in their seats: gpu-7; or wait: it opens by itself
              evenhand gate open   opens it now; it says what that risks
        "#]],
        );
    }

    #[test]
    fn a_more_urgent_priority_goes_first() {
        let mut known = Known { workers: vec![worker("gpu-1", 7, "")], ..waiting() };
        known.task.hold = Some("priority 2 goes first".into());
        check(
            known,
            &expect![[r#"
                task 0-42 waits: priority 2 goes first, and 3 tasks go before it

                  state     queued, attempt 1 of 5
                  position  3 ahead in queue render, priority 5
                  waits for priority 2 goes first
                  workers   1 worker serves render; 1 can take work
                            gpu-1: healthy, 7 of 8 slots running
                  gate      open

                What to do:
                  this passes by itself
                  priority 2 goes first: priorities are strict; submit with --priority 2 to go as soon
            "#]],
        );
    }

    #[test]
    fn what_has_ended_waits_for_nothing() {
        let mut known = waiting();
        known.task.state = State::Failed;
        known.task.error = Some("exit code 7\n".into());
        check(
            known,
            &expect![[r#"
                task 0-42 has failed after 1 attempt: exit code 7

                  state     failed, attempt 1 of 5

                What to do:
                  evenhand replay 0-42   runs it again, once the reason is gone
            "#]],
        );
    }

    #[test]
    fn a_paused_queue_and_a_time_to_come_are_waited_for() {
        let mut known = Known { workers: vec![worker("gpu-1", 0, "")], ..waiting() };
        known.task.holds = vec![rule("queue_paused", "its queue is paused")];
        let (why, hints) = meaning(&known);
        assert_eq!(why, "task 0-42 waits: its queue render is paused");
        assert_eq!(hints, ["evenhand queue resume render   starts its tasks again"]);

        let mut known = waiting();
        known.task.state = State::Scheduled;
        known.task.due_ms = Some(1);
        known.task.attempt = Some(2);
        known.task.error = Some("exit code 7".into());
        check(
            known,
            &expect![[r#"
            task 0-42 waits before its attempt 2: it is due

              state     scheduled, attempt 2 of 5
              waits for due
              last run  failed: exit code 7
              workers   none serves render
              gate      open

            What to do:
              this passes by itself
        "#]],
        );
    }

    #[test]
    fn what_has_ended_can_be_run_again_or_was() {
        let mut known = waiting();
        known.task.state = State::Expired;
        let (why, hints) = meaning(&known);
        assert_eq!(why, "task 0-42 has expired: it was not started in time, and will not run");
        assert_eq!(hints, ["evenhand replay 0-42   runs it after all"]);
        known.task.replayed_as = Some("0-43".into());
        assert_eq!(meaning(&known).1, ["evenhand get 0-43   it was run again: this is how that stands"]);
    }
}
