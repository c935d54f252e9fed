//! Between the wire's types and the core's. What comes from outside is checked here, once: an error names the
//! field, and what passes is as good as what the core made itself.

use evenhand_core::backlog::{Charge, Cost, Level, Weight};
use evenhand_core::life::End;
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, Key, LaneId, Life, Millis, Priority, QueueId, QueueName, Seat, ShardId,
    StoreId, TaskId,
};
use evenhand_core::owner::health::Thresholds;
use evenhand_core::owner::messages::{Hello, Then};
use evenhand_core::{NewTask, Refusal, Run, bounds};

use crate::v1;

/// A task's id as people see it: the shard and the task, `0-42`.
pub fn task_id(shard: ShardId, task: TaskId) -> String {
    format!("{shard}-{task}")
}

/// Reads a task's id.
pub fn parse_task_id(text: &str) -> Result<(ShardId, TaskId), Refusal> {
    let number =
        |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten();
    let parts = text.split_once('-').map(|(shard, task)| (number(shard), number(task)));
    match parts {
        Some((Some(shard), Some(task))) if shard <= u64::from(u32::MAX) => {
            Ok((ShardId(shard as u32), TaskId(task)))
        }
        _ => Err(Refusal::invalid("id", format!("{text:?} is no task's id; one looks like 0-42"))),
    }
}

/// What users may check at their own resources: a later run of a task has a greater text.
pub fn fence_text(fence: Fence) -> String {
    format!("{:010}-{:016}", fence.epoch.0, fence.dispatch)
}

/// A weight in thousandths.
pub fn weight(thousandths: u32) -> Result<Weight, Refusal> {
    Weight::from_thousandths(thousandths).ok_or_else(|| {
        Refusal::invalid(
            "weight_thousandths",
            format!("{thousandths} is out of range; use 1 (0.001) to 1000000 (1000)"),
        )
    })
}

/// A task as a client asks for it.
pub fn new_task(task: v1::NewTask) -> Result<NewTask, Refusal> {
    let mut new = NewTask::new(Key::new(&task.key)?);
    if let Some(thousandths) = task.weight_thousandths {
        new.weight = weight(thousandths)?;
    }
    if let Some(priority) = task.priority {
        new.priority = Priority(u8::try_from(priority).unwrap_or(u8::MAX));
    }
    if let Some(attempts) = task.max_attempts {
        new.max_attempts = u16::try_from(attempts).unwrap_or(u16::MAX);
    }
    if let Some(ms) = task.max_duration_ms {
        if ms == 0 {
            let most = bounds::DURATION_MS;
            return Err(Refusal::invalid("max_duration_ms", format!("0 is out of range; use 1 to {most}")));
        }
        new.max_duration_ms = ms;
    }
    new.content_type = ContentType::new(&task.content_type)?;
    new.payload = task.payload[..].into();
    Ok(new)
}

/// What a run says of how far it is: within bounds, whatever it says.
pub fn progress(said: v1::Progress) -> v1::Progress {
    let v1::Progress { fraction, mut message } = said;
    cut(&mut message, crate::PROGRESS_BYTES);
    v1::Progress {
        fraction: fraction.filter(|part| part.is_finite()).map(|part| part.clamp(0.0, 1.0)),
        message,
    }
}

/// Cuts a text to at most so many bytes, between two characters.
pub fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        let end = (0..=bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
}

/// Which run, on the wire.
pub fn run_id(task: TaskId, fence: Fence) -> v1::RunId {
    v1::RunId { task: task.0, epoch: fence.epoch.0, dispatch: fence.dispatch }
}

/// Which run, from the wire.
pub fn parse_run_id(id: &v1::RunId) -> (TaskId, Fence) {
    (TaskId(id.task), Fence { epoch: Epoch(id.epoch), dispatch: id.dispatch })
}

/// A run on the wire.
pub fn run(run: &Run, max_duration_ms: u64) -> v1::Run {
    v1::Run {
        id: Some(run_id(run.task, run.fence)),
        queue_id: run.lane.queue.0,
        priority: run.lane.priority.0.into(),
        class: run.lane.class.0.into(),
        level: run.level.to_bytes().to_vec(),
        key: run.key.as_str().into(),
        cost_thousandths: run.charge.cost.thousandths(),
        weight_thousandths: run.charge.weight.thousandths(),
        attempt: run.attempt.into(),
        max_attempts: run.max_attempts.into(),
        started_ms: run.started.0,
        max_duration_ms,
    }
}

/// A run from the wire.
pub fn parse_run(run: &v1::Run) -> Result<Run, Refusal> {
    let small = |field: &str, n: u32, most: u8| {
        u8::try_from(n).ok().filter(|n| *n <= most).ok_or_else(|| out_of_range(field, n))
    };
    let id = run.id.as_ref().ok_or_else(|| Refusal::invalid("id", "is missing"))?;
    let (task, fence) = parse_run_id(id);
    let level: [u8; 16] = run.level[..]
        .try_into()
        .map_err(|_| Refusal::invalid("level", format!("has {} bytes, not 16", run.level.len())))?;
    Ok(Run {
        task,
        lane: LaneId {
            queue: QueueId(run.queue_id),
            priority: Priority(small("priority", run.priority, bounds::PRIORITIES - 1)?),
            class: Class(small("class", run.class, bounds::CLASSES - 1)?),
        },
        level: Level::from_bytes(level),
        key: Key::new(&run.key)?,
        charge: Charge { cost: Cost::new(run.cost_thousandths)?, weight: weight(run.weight_thousandths)? },
        attempt: parse_attempt("attempt", run.attempt)?,
        max_attempts: parse_attempt("max_attempts", run.max_attempts)?,
        fence,
        started: Millis(run.started_ms),
    })
}

/// The number of an attempt, from the wire.
pub fn parse_attempt(field: &str, n: u32) -> Result<u16, Refusal> {
    let attempt = u16::try_from(n).ok().filter(|n| (1..=bounds::ATTEMPTS).contains(n));
    attempt.ok_or_else(|| out_of_range(field, n))
}

fn out_of_range(field: &str, n: u32) -> Refusal {
    Refusal::invalid(field, format!("{n} is out of range"))
}

/// How a run ended, on the wire. A worker never says that it is lost.
pub fn end(end: End) -> v1::EndKind {
    match end {
        End::Succeeded => v1::EndKind::Succeeded,
        End::Failed | End::Lost => v1::EndKind::Failed,
        End::FailedForGood => v1::EndKind::FailedForGood,
    }
}

/// How a run ended, from the wire.
pub fn parse_end(kind: i32) -> Result<End, Refusal> {
    match v1::EndKind::try_from(kind) {
        Ok(v1::EndKind::Succeeded) => Ok(End::Succeeded),
        Ok(v1::EndKind::Failed) => Ok(End::Failed),
        Ok(v1::EndKind::FailedForGood) => Ok(End::FailedForGood),
        Ok(v1::EndKind::Unspecified) | Err(_) => {
            Err(Refusal::invalid("end", format!("{kind} is no way for a run to end")))
        }
    }
}

/// A run that ended, from the wire.
pub fn parse_ended(ended: &v1::Ended) -> Result<(Run, End), Refusal> {
    let run = ended.run.as_ref().ok_or_else(|| Refusal::invalid("run", "is missing"))?;
    Ok((parse_run(run).map_err(|refusal| refusal.within("run"))?, parse_end(ended.end)?))
}

/// The queues that a worker serves, on the wire.
pub fn served(queues: &[(QueueName, Weight)]) -> Vec<v1::ServedQueue> {
    let queue = |(name, weight): &(QueueName, Weight)| v1::ServedQueue {
        queue: name.as_str().into(),
        weight_thousandths: weight.thousandths(),
    };
    queues.iter().map(queue).collect()
}

/// How a worker begins a session, on the wire. The shell adds what only it knows.
pub fn hello(hello: &Hello, shard: ShardId, running: Vec<v1::Run>, ended: Vec<v1::Ended>) -> v1::Hello {
    v1::Hello {
        protocol: crate::PROTOCOL,
        program: concat!("evenhand ", env!("CARGO_PKG_VERSION")).into(),
        shard: shard.0,
        seat: hello.seat.as_str().into(),
        token: hello.token,
        process_life: hello.life.process,
        rejoin: hello.life.rejoin,
        session: hello.session,
        slots: hello.slots,
        queues: served(&hello.queues),
        store_id: hello.store.map_or(0, |store| store.0),
        epoch: hello.epoch.0,
        worker_set: None,
        running,
        ended,
    }
}

/// How a worker begins a session, from the wire.
pub fn parse_hello(hello: &v1::Hello) -> Result<Hello, Refusal> {
    if hello.queues.is_empty() {
        return Err(Refusal::invalid("queues", "is empty; name at least one queue to serve"));
    }
    let mut queues = Vec::with_capacity(hello.queues.len());
    for (n, served) in hello.queues.iter().enumerate() {
        let within = |refusal: Refusal| refusal.within(format_args!("queues[{n}]"));
        let queue = QueueName::new(&served.queue).map_err(within)?;
        queues.push((queue, weight(served.weight_thousandths).map_err(within)?));
    }
    let runs = hello.running.iter().enumerate();
    let running: Result<Vec<Run>, Refusal> =
        runs.map(|(n, run)| parse_run(run).map_err(|r| r.within(format_args!("running[{n}]")))).collect();
    let ends = hello.ended.iter().enumerate();
    let ended: Result<Vec<(Run, End)>, Refusal> =
        ends.map(|(n, end)| parse_ended(end).map_err(|r| r.within(format_args!("ended[{n}]")))).collect();
    Ok(Hello {
        seat: Seat::new(&hello.seat)?,
        token: hello.token,
        life: Life { process: hello.process_life, rejoin: hello.rejoin },
        session: hello.session,
        slots: hello.slots,
        queues,
        store: (hello.store_id != 0).then_some(StoreId(hello.store_id)),
        epoch: Epoch(hello.epoch),
        running: running?,
        ended: ended?,
    })
}

/// Thresholds on the wire.
pub fn thresholds(thresholds: &Thresholds) -> v1::Thresholds {
    v1::Thresholds {
        heartbeat_ms: thresholds.heartbeat_ms,
        unhealthy_after_ms: thresholds.unhealthy_after_ms,
        lost_after_ms: thresholds.lost_after_ms,
        lease_ms: thresholds.lease_ms(),
    }
}

/// Thresholds from the wire.
pub fn parse_thresholds(thresholds: &v1::Thresholds) -> Result<Thresholds, Refusal> {
    let parsed = Thresholds {
        heartbeat_ms: thresholds.heartbeat_ms,
        unhealthy_after_ms: thresholds.unhealthy_after_ms,
        lost_after_ms: thresholds.lost_after_ms,
    };
    parsed.check()?;
    Ok(parsed)
}

/// What a worker does when its session is ended, on the wire.
pub fn then(then: Then) -> v1::die::Then {
    match then {
        Then::Retry => v1::die::Then::Retry,
        Then::Exit => v1::die::Then::Exit,
        Then::Forget => v1::die::Then::Forget,
    }
}

/// What a worker does when its session is ended, from the wire.
pub fn parse_then(then: i32) -> Then {
    match v1::die::Then::try_from(then) {
        Ok(v1::die::Then::Exit) => Then::Exit,
        Ok(v1::die::Then::Forget) => Then::Forget,
        Ok(v1::die::Then::Retry | v1::die::Then::Unspecified) | Err(_) => Then::Retry,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_comes_back_as_it_was() {
        let there = Run {
            task: TaskId(u64::MAX),
            lane: LaneId { queue: QueueId(7), priority: Priority(9), class: Class(15) },
            level: Level::from_bytes([7; 16]),
            key: Key::new("acme/ü").unwrap(),
            charge: Charge { cost: Cost::MAX, weight: Weight::MIN },
            attempt: 1_000,
            max_attempts: 1,
            fence: Fence { epoch: Epoch(3), dispatch: 9 },
            started: Millis(5),
        };
        assert_eq!(parse_run(&run(&there, 70)), Ok(there));
    }

    #[test]
    fn ids_are_readable_and_nonsense_is_refused() {
        assert_eq!(parse_task_id(&task_id(ShardId(0), TaskId(42))), Ok((ShardId(0), TaskId(42))));
        for bad in [
            "",
            "-",
            "42",
            "0-",
            "-42",
            "0-42 ",
            "+0-42",
            "0-4x",
            "0-99999999999999999999",
            "4294967296-1",
            "0-\u{0}",
        ] {
            assert_eq!(parse_task_id(bad).unwrap_err().field, "id", "{bad:?}");
        }
    }

    #[test]
    fn a_later_fence_is_a_greater_text() {
        let fence = |epoch, dispatch| fence_text(Fence { epoch: Epoch(epoch), dispatch });
        assert!(fence(1, 99) < fence(2, 1) && fence(2, 9) < fence(2, 10) && fence(9, 1) < fence(10, 0));
    }

    #[test]
    fn garbage_names_its_field() {
        let hello = |change: fn(&mut v1::Hello)| {
            let served = v1::ServedQueue { queue: "render".into(), weight_thousandths: 1000 };
            let mut hello = v1::Hello { seat: "w1".into(), queues: vec![served], ..v1::Hello::default() };
            change(&mut hello);
            parse_hello(&hello).map(|_| ()).map_err(|refusal| refusal.field)
        };
        assert_eq!(hello(|_| {}), Ok(()));
        assert_eq!(hello(|h| h.seat = "a/b".into()), Err("seat".into()));
        assert_eq!(hello(|h| h.queues.clear()), Err("queues".into()));
        assert_eq!(hello(|h| h.queues[0].queue = "\u{0}".into()), Err("queues[0].queue".into()));
        assert_eq!(hello(|h| h.queues[0].weight_thousandths = 0), Err("queues[0].weight_thousandths".into()));
        assert_eq!(hello(|h| h.running = vec![v1::Run::default()]), Err("running[0].id".into()));
        assert_eq!(hello(|h| h.ended = vec![v1::Ended::default()]), Err("ended[0].run".into()));
    }
}
