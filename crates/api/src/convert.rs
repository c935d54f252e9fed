//! Between the wire's types and the core's. What comes from outside is checked here, once: an error names the
//! field, and what passes is as good as what the core made itself.

use std::sync::Arc;

use bytes::Bytes;
use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::backlog::{Charge, Cost, Level, Weight};
use evenhand_core::change::{AfterDowngrade, Settings, Share, Try};
use evenhand_core::explain::Hold;
use evenhand_core::life::{Backoff, End, Terms};
use evenhand_core::messages::{KeyChange, Start, Unique};
use evenhand_core::names::{
    Class, ContentType, Epoch, Fence, FileName, Incarnation, Key, LaneId, Life, Millis, Priority, QueueId,
    QueueName, RequestKey, Seat, ShardId, StoreId, TaskId, WorkerSetId,
};
use evenhand_core::owner::health::Thresholds;
use evenhand_core::owner::messages::{Hello, Then};
use evenhand_core::shard::{ClassView, KeyHold};
use evenhand_core::workers::Cut;
use evenhand_core::{File, NewTask, Refusal, Run, bounds};

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

/// A task as a client asks for it. The key of its unique name is left for the server to fill in: it goes with the
/// queue's name. So is what its queue says of its backoff: see [`new_task_in`].
pub fn new_task(task: v1::NewTask) -> Result<NewTask, Refusal> {
    new_task_in(task, Backoff::default())
}

/// The same, in a queue with this backoff: it counts where the task says nothing.
pub fn new_task_in(task: v1::NewTask, backoff: Backoff) -> Result<NewTask, Refusal> {
    let mut new = NewTask::new(Key::new(&task.key)?);
    if let Some(thousandths) = task.weight_thousandths {
        new.weight = weight(thousandths)?;
    }
    if let Some(priority) = task.priority {
        new.priority = Priority(u8::try_from(priority).unwrap_or(u8::MAX));
    }
    if let Some(retry) = &task.retry {
        let within = |refusal: Refusal| refusal.within("retry");
        if retry.max_lost.is_some() {
            return Err(Refusal::invalid("retry.max_lost", "is for queues, not for tasks"));
        }
        new.max_attempts = retry.max_attempts.map(attempts).transpose().map_err(within)?;
        new.backoff = parse_backoff(retry, backoff).map_err(within)?;
    }
    new.start = match (task.delay_ms, task.run_at_ms) {
        (Some(_), Some(_)) => {
            return Err(Refusal::invalid("delay_ms", "goes with no run_at_ms; give one of them"));
        }
        (Some(0), None) | (None, None) => Start::Now,
        (Some(ms), None) => Start::After(ms),
        (None, Some(ms)) => Start::At(Millis(ms)),
    };
    new.max_duration_ms = some_time("max_duration_ms", task.max_duration_ms, 1, bounds::DURATION_MS)?;
    let longest = Cost::MAX.thousandths().into();
    new.expected_ms = some_time("expected_ms", task.expected_ms, 1, longest)?;
    new.expires_ms = some_time("expires_ms", task.expires_ms, 1, bounds::DELAY_MS)?;
    new.attach_ms = some_time("attach_ttl_ms", task.attach_ttl_ms, bounds::ATTACH_MIN_MS, bounds::ATTACH_MS)?;
    new.unique = unique(&task.unique_key, task.unique_ms)?;
    new.content_type = ContentType::new(&task.content_type)?;
    new.files = files(&task.files, task.payload.len())?;
    new.payload = task.payload[..].into();
    Ok(new)
}

/// The files of a task, beside a payload of so many bytes. Nothing is copied before all of it is checked.
fn files(files: &[v1::File], payload_bytes: usize) -> Result<Arc<[File]>, Refusal> {
    if files.is_empty() {
        return Ok(Arc::default());
    }
    let names = check_files(files, payload_bytes)?;
    let file = |(name, file): (FileName, &v1::File)| File { name, bytes: file.content[..].into() };
    Ok(names.into_iter().zip(files).map(file).collect())
}

/// Whether a task may have these files beside a payload of so many bytes; and their names, if it may.
pub fn check_files(files: &[v1::File], payload_bytes: usize) -> Result<Vec<FileName>, Refusal> {
    File::check_all(payload_bytes, files.iter().map(|file| (file.name.as_str(), file.content.len())))?;
    let name = |(n, file): (usize, &v1::File)| {
        FileName::new(&file.name).map_err(|refusal| refusal.within(format_args!("files[{n}]")))
    };
    files.iter().enumerate().map(name).collect()
}

/// The same for whoever runs the task. The bytes are not copied.
pub fn wire_files(files: &[File]) -> Vec<v1::File> {
    let file = |file: &File| v1::File {
        name: file.name.as_str().into(),
        content: Bytes::from_owner(file.bytes.clone()),
    };
    files.iter().map(file).collect()
}

/// The same without what is in them.
pub fn file_infos(files: &[File]) -> Vec<v1::FileInfo> {
    let info = |file: &File| v1::FileInfo { name: file.name.as_str().into(), bytes: file.bytes.len() as u64 };
    files.iter().map(info).collect()
}

/// A time that is none if nobody says, and must not be 0 if somebody does.
fn some_time(field: &str, ms: Option<u64>, from: u64, most: u64) -> Result<u64, Refusal> {
    match ms {
        Some(0) => Err(Refusal::invalid(field, format!("0 is out of range; use {from} to {most}"))),
        Some(ms) => Ok(ms),
        None => Ok(0),
    }
}

fn unique(name: &str, window_ms: Option<u64>) -> Result<Option<Unique>, Refusal> {
    if name.is_empty() {
        return match window_ms {
            Some(_) => {
                Err(Refusal::invalid("unique_ms", "goes with a unique_key; give one, or leave it out"))
            }
            None => Ok(None),
        };
    }
    if name.len() > bounds::UNIQUE_KEY_BYTES {
        let (is, most) = (name.len(), bounds::UNIQUE_KEY_BYTES);
        return Err(Refusal::too_large("unique_key", format!("has {is} bytes; at most {most} are allowed")));
    }
    let window_ms = window_ms.unwrap_or(bounds::DEFAULT_UNIQUE_MS);
    Ok(Some(Unique { key: RequestKey(0), window_ms }))
}

fn attempts(n: u32) -> Result<u16, Refusal> {
    let most = bounds::ATTEMPTS;
    let attempts = u16::try_from(n).ok().filter(|n| (1..=most).contains(n));
    attempts.ok_or_else(|| Refusal::invalid("max_attempts", format!("{n} is out of range; use 1 to {most}")))
}

/// How long a task waits between its tries; None if it does not say. What it leaves open is as `otherwise`.
fn parse_backoff(retry: &v1::Retry, otherwise: Backoff) -> Result<Option<Backoff>, Refusal> {
    let v1::Retry { backoff_ms, factor_thousandths, max_backoff_ms, max_attempts: _, max_lost: _ } = *retry;
    if backoff_ms.is_none() && factor_thousandths.is_none() && max_backoff_ms.is_none() {
        return Ok(None);
    }
    let first_ms = backoff_ms.unwrap_or(otherwise.first_ms);
    let backoff = Backoff {
        first_ms,
        factor: factor_thousandths.unwrap_or(otherwise.factor),
        // Whoever asks for a long wait does not want it cut by a bound that they did not choose.
        max_ms: max_backoff_ms.unwrap_or(otherwise.max_ms.max(first_ms)),
    };
    backoff.check()?;
    Ok(Some(backoff))
}

/// Whether a task says something of its backoff, but not all: then its queue has a say in it.
pub fn is_partial(retry: &v1::Retry) -> bool {
    let said =
        [retry.backoff_ms.is_some(), retry.factor_thousandths.is_some(), retry.max_backoff_ms.is_some()];
    said.contains(&true) && said.contains(&false)
}

/// A queue's settings on the wire.
pub fn settings(settings: &Settings) -> v1::QueueSettings {
    v1::QueueSettings {
        retry: Some(v1::Retry {
            max_attempts: Some(settings.max_attempts.into()),
            max_lost: Some(settings.max_lost.into()),
            ..retry(settings.backoff)
        }),
        retention_ms: Some(settings.retention_ms),
        paused: Some(settings.paused),
        share: Some(share(settings.share).into()),
        classes: Some(v1::Classes { classes: settings.classes.iter().map(class_limit).collect() }),
        after_downgrade: Some(after_downgrade(settings.after_downgrade).into()),
        interactive_grace_ms: Some(settings.interactive_grace_ms),
        key_limit: Some(settings.key_limit.unwrap_or(0)),
        rate: Some(settings.rate.map_or_else(v1::Rate::default, rate)),
        key_rate: Some(settings.key_rate.map_or_else(v1::Rate::default, rate)),
    }
}

fn class_limit(class: &ClassLimit) -> v1::ClassLimit {
    let limit = match class.limit {
        Limit::All => v1::class_limit::Limit::All(true),
        Limit::Slots(slots) => v1::class_limit::Limit::Slots(slots),
        Limit::Percent(percent) => v1::class_limit::Limit::Percent(percent.into()),
    };
    v1::ClassLimit { duration_ms: class.duration_ms, limit: Some(limit) }
}

/// A duration class, from the wire. Whether it goes with the others is for the core to say.
fn parse_class_limit(class: &v1::ClassLimit) -> Result<ClassLimit, Refusal> {
    use v1::class_limit::Limit as Wire;
    let limit = match class.limit {
        Some(Wire::All(true)) => Limit::All,
        Some(Wire::Slots(slots)) => Limit::Slots(slots),
        // What is out of range stays so.
        Some(Wire::Percent(percent)) => Limit::Percent(u8::try_from(percent).unwrap_or(u8::MAX)),
        Some(Wire::All(false)) | None => {
            return Err(Refusal::invalid("limit", "is missing; use all, a number of slots, or a percentage"));
        }
    };
    Ok(ClassLimit { duration_ms: class.duration_ms, limit })
}

fn after_downgrade(after: AfterDowngrade) -> v1::AfterDowngrade {
    match after {
        AfterDowngrade::Fail => v1::AfterDowngrade::Fail,
        AfterDowngrade::Requeue => v1::AfterDowngrade::Requeue,
    }
}

fn parse_after_downgrade(after: i32) -> Result<AfterDowngrade, Refusal> {
    match v1::AfterDowngrade::try_from(after) {
        Ok(v1::AfterDowngrade::Fail) => Ok(AfterDowngrade::Fail),
        Ok(v1::AfterDowngrade::Requeue) => Ok(AfterDowngrade::Requeue),
        Ok(v1::AfterDowngrade::Unspecified) | Err(_) => {
            let text = format!("{after} is nothing that can happen; use fail (1) or requeue (2)");
            Err(Refusal::invalid("after_downgrade", text))
        }
    }
}

/// A rate on the wire.
pub fn rate(rate: Rate) -> v1::Rate {
    let unit = match rate.unit {
        RateUnit::Tasks => v1::RateUnit::Tasks,
        RateUnit::Cost => v1::RateUnit::Cost,
    };
    v1::Rate {
        per_second_thousandths: rate.per_second,
        burst_thousandths: Some(rate.burst),
        unit: unit.into(),
    }
}

/// A rate from the wire; none, if it is 0 a second. Whoever says nothing of a burst gets what a second brings.
pub fn parse_rate(rate: &v1::Rate) -> Result<Option<Rate>, Refusal> {
    let unit = match v1::RateUnit::try_from(rate.unit) {
        Ok(v1::RateUnit::Tasks | v1::RateUnit::Unspecified) => RateUnit::Tasks,
        Ok(v1::RateUnit::Cost) => RateUnit::Cost,
        Err(_) => {
            let text = format!("{} is nothing that a rate counts; use tasks (1) or cost (2)", rate.unit);
            return Err(Refusal::invalid("unit", text));
        }
    };
    let per_second = rate.per_second_thousandths;
    if per_second == 0 {
        return Ok(None);
    }
    let burst = rate.burst_thousandths.unwrap_or(per_second.max(1_000));
    let rate = Rate { per_second, burst, unit };
    rate.check().map(|()| Some(rate))
}

/// What is to be changed of a key, from the wire.
pub fn key_change(request: &v1::SetKeyRequest) -> Result<KeyChange, Refusal> {
    let weight = match request.weight_thousandths {
        Some(0) => Some(None),
        Some(thousandths) => Some(Some(Weight::from_thousandths(thousandths).ok_or_else(|| {
            let is = f64::from(thousandths) / 1e3;
            Refusal::invalid("weight", format!("{is} is out of range; use 0.001 to 1000, or 0 for none"))
        })?)),
        None => None,
    };
    let rate = request.rate.as_ref().map(parse_rate).transpose().map_err(|refusal| refusal.within("rate"))?;
    Ok(KeyChange { weight, limit: request.limit.map(|limit| (limit > 0).then_some(limit)), rate })
}

/// How a duration class stands, on the wire.
pub fn queue_class(class: &ClassView) -> v1::QueueClass {
    let ClassView { duration_ms, held, limit } = *class;
    v1::QueueClass { duration_ms, held, limit }
}

/// Less time for a run, on the wire.
pub fn run_cut(cut: &Cut) -> v1::Cut {
    v1::Cut {
        from_ms: cut.from_ms,
        to_ms: cut.to_ms,
        at_ms: cut.at.0,
        reason: cut.to_string(),
        kind: cut.why.name().into(),
    }
}

/// A rule that stands in a task's way, on the wire.
pub fn hold(shard: ShardId, hold: &Hold) -> v1::Hold {
    let name = |task: TaskId| task_id(shard, task);
    let mut wire = v1::Hold { kind: hold.kind().into(), message: hold.text(name), ..v1::Hold::default() };
    match hold {
        Hold::Key { hold, wait_ms, .. } => {
            wire.wait_ms = *wait_ms;
            match hold {
                KeyHold::Paused => {}
                KeyHold::AtLimit { running, limit } => {
                    (wire.held, wire.limit) = (Some((*running).into()), Some((*limit).into()));
                }
                KeyHold::AtRate { rate, .. } => wire.rate = Some(self::rate(*rate)),
            }
        }
        Hold::QueueRate { rate, wait_ms } => {
            (wire.rate, wire.wait_ms) = (Some(self::rate(*rate)), Some(*wait_ms));
        }
        Hold::ClassFull { class_ms, held, limit, by } => {
            (wire.class_ms, wire.held, wire.limit) = (Some(*class_ms), Some(*held), Some(*limit));
            wire.by = by.iter().map(|task| name(*task)).collect();
        }
        Hold::NoFreeSlot { slots } => wire.limit = Some(*slots),
        Hold::HigherPriority { priority } => wire.priority = Some(priority.0.into()),
        Hold::OtherKeys { keys } => wire.count = Some(*keys as u64),
        Hold::OwnKey { tasks } => wire.count = Some(*tasks as u64),
        Hold::GateShut | Hold::Paused | Hold::NoWorker | Hold::Reading | Hold::Writing => {}
    }
    wire
}

/// What a queue's keys share, on the wire.
fn share(share: Share) -> v1::Share {
    match share {
        Share::Tasks => v1::Share::Tasks,
        Share::Time => v1::Share::Time,
    }
}

/// What a queue's keys share, from the wire.
fn parse_share(share: i32) -> Result<Share, Refusal> {
    match v1::Share::try_from(share) {
        Ok(v1::Share::Tasks) => Ok(Share::Tasks),
        Ok(v1::Share::Time) => Ok(Share::Time),
        Ok(v1::Share::Unspecified) | Err(_) => {
            Err(Refusal::invalid("share", format!("{share} is nothing to share; use tasks (1) or time (2)")))
        }
    }
}

/// A queue's settings as they are when this has been changed of them.
pub fn changed(mut settings: Settings, change: &v1::QueueSettings) -> Result<Settings, Refusal> {
    let v1::QueueSettings {
        retry,
        retention_ms,
        paused,
        share,
        classes,
        after_downgrade,
        interactive_grace_ms,
        key_limit,
        rate,
        key_rate,
    } = change;
    if let Some(retry) = retry {
        let within = |refusal: Refusal| refusal.within("retry");
        if let Some(n) = retry.max_attempts {
            settings.max_attempts = attempts(n).map_err(within)?;
        }
        if let Some(n) = retry.max_lost {
            let wrong = || Refusal::invalid("max_lost", format!("{n} is out of range; use 1 to 255"));
            settings.max_lost = u8::try_from(n).map_err(|_| within(wrong()))?;
        }
        if let Some(backoff) = parse_backoff(retry, settings.backoff).map_err(within)? {
            settings.backoff = backoff;
        }
    }
    settings.retention_ms = retention_ms.unwrap_or(settings.retention_ms);
    settings.paused = paused.unwrap_or(settings.paused);
    if let Some(share) = share {
        settings.share = parse_share(*share)?;
    }
    if let Some(v1::Classes { classes }) = classes {
        if classes.len() > bounds::CLASSES.into() {
            let (are, most) = (classes.len(), bounds::CLASSES);
            return Err(Refusal::too_large("classes", format!("are {are}; at most {most} are allowed")));
        }
        let parse = |(n, class): (usize, &v1::ClassLimit)| {
            parse_class_limit(class).map_err(|refusal| refusal.within(format_args!("classes[{n}]")))
        };
        settings.classes = classes.iter().enumerate().map(parse).collect::<Result<_, _>>()?;
    }
    if let Some(after) = after_downgrade {
        settings.after_downgrade = parse_after_downgrade(*after)?;
    }
    settings.interactive_grace_ms = interactive_grace_ms.unwrap_or(settings.interactive_grace_ms);
    if let Some(limit) = *key_limit {
        settings.key_limit = (limit > 0).then_some(limit);
    }
    if let Some(rate) = rate {
        settings.rate = parse_rate(rate).map_err(|refusal| refusal.within("rate"))?;
    }
    if let Some(rate) = key_rate {
        settings.key_rate = parse_rate(rate).map_err(|refusal| refusal.within("key_rate"))?;
    }
    settings.check()?;
    Ok(settings)
}

/// A backoff on the wire.
fn retry(backoff: Backoff) -> v1::Retry {
    v1::Retry {
        backoff_ms: Some(backoff.first_ms),
        factor_thousandths: Some(backoff.factor),
        max_backoff_ms: Some(backoff.max_ms),
        ..v1::Retry::default()
    }
}

fn terms(terms: &Terms) -> v1::Terms {
    v1::Terms {
        retry: terms.backoff.map(retry),
        expires_at_ms: terms.expires.map_or(0, |at| at.0),
        attach_ttl_ms: terms.attach_ms,
        expected_ms: terms.expected_ms,
        max_duration_ms: terms.max_duration_ms,
    }
}

fn parse_terms(terms: &v1::Terms) -> Result<Option<Arc<Terms>>, Refusal> {
    let backoff = terms.retry.as_ref().map(|retry| parse_backoff(retry, Backoff::default()));
    let terms = Terms {
        backoff: backoff.transpose().map_err(|refusal| refusal.within("retry"))?.flatten(),
        expires: (terms.expires_at_ms > 0).then_some(Millis(terms.expires_at_ms)),
        attach_ms: terms.attach_ttl_ms,
        expected_ms: terms.expected_ms,
        max_duration_ms: terms.max_duration_ms,
    };
    Ok((terms != Terms::default()).then(|| Arc::new(terms)))
}

/// How a run ended, by name.
pub fn end_name(end: End) -> &'static str {
    match end {
        End::Succeeded => "succeeded",
        End::Failed => "failed",
        End::FailedForGood => "failed_for_good",
        End::Lost => "lost",
        End::TimeUp => "time_up",
        End::Downgraded => "downgraded",
    }
}

/// A try that is over, on the wire.
pub fn tried(tried: &Try) -> v1::Try {
    v1::Try {
        attempt: tried.attempt.into(),
        seat: tried.seat.as_ref().map_or_else(String::new, |seat| seat.as_str().into()),
        started_ms: tried.started.0,
        ended_ms: tried.ended.0,
        end: end_name(tried.end).into(),
        error: tried.error.as_ref().into(),
    }
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
    v1::RunId { task: task.0, epoch: fence.epoch.0, dispatch: fence.dispatch, nonce: fence.nonce }
}

/// Which run, from the wire.
pub fn parse_run_id(id: &v1::RunId) -> (TaskId, Fence) {
    (TaskId(id.task), Fence { epoch: Epoch(id.epoch), dispatch: id.dispatch, nonce: id.nonce })
}

/// A run on the wire.
pub fn run(run: &Run) -> v1::Run {
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
        max_duration_ms: run.limit_ms,
        chained: run.charge.chained,
        lost: run.lost.into(),
        terms: run.terms.as_deref().map(terms),
        timed: run.charge.timed,
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
    let charge = Charge {
        cost: Cost::new(run.cost_thousandths)?,
        weight: weight(run.weight_thousandths)?,
        chained: run.chained,
        timed: run.timed,
    };
    let terms = run.terms.as_ref().map(|terms| parse_terms(terms).map_err(|refusal| refusal.within("terms")));
    Ok(Run {
        task,
        lane: LaneId {
            queue: QueueId(run.queue_id),
            priority: Priority(small("priority", run.priority, bounds::PRIORITIES - 1)?),
            class: Class(small("class", run.class, bounds::CLASSES - 1)?),
        },
        level: Level::from_bytes(level),
        key: Key::new(&run.key)?,
        charge,
        attempt: parse_attempt("attempt", run.attempt)?,
        max_attempts: parse_attempt("max_attempts", run.max_attempts)?,
        lost: small("lost", run.lost, u8::MAX)?,
        terms: terms.transpose()?.flatten(),
        fence,
        started: Millis(run.started_ms),
        limit_ms: run.max_duration_ms,
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
        End::TimeUp => v1::EndKind::TimeUp,
        End::Downgraded => v1::EndKind::Downgraded,
    }
}

/// How a run ended, from the wire.
pub fn parse_end(kind: i32) -> Result<End, Refusal> {
    match v1::EndKind::try_from(kind) {
        Ok(v1::EndKind::Succeeded) => Ok(End::Succeeded),
        Ok(v1::EndKind::Failed) => Ok(End::Failed),
        Ok(v1::EndKind::FailedForGood) => Ok(End::FailedForGood),
        Ok(v1::EndKind::TimeUp) => Ok(End::TimeUp),
        Ok(v1::EndKind::Downgraded) => Ok(End::Downgraded),
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

/// A worker set, on the wire.
pub fn worker_set(id: WorkerSetId) -> v1::WorkerSetId {
    let WorkerSetId { incarnation: Incarnation { epoch, nonce }, version, hash } = id;
    v1::WorkerSetId { epoch: epoch.0, nonce, version, hash }
}

/// A worker set, from the wire.
pub fn parse_worker_set(id: &v1::WorkerSetId) -> WorkerSetId {
    let incarnation = Incarnation { epoch: Epoch(id.epoch), nonce: id.nonce };
    WorkerSetId { incarnation, version: id.version, hash: id.hash }
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
        epoch: hello.obeyed.epoch.0,
        nonce: hello.obeyed.nonce,
        worker_set: hello.set.map(worker_set),
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
        obeyed: Incarnation { epoch: Epoch(hello.epoch), nonce: hello.nonce },
        set: hello.worker_set.as_ref().map(parse_worker_set),
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
            charge: Charge { cost: Cost::MAX, weight: Weight::MIN, chained: true, timed: true },
            attempt: 1_000,
            max_attempts: 1,
            lost: 255,
            terms: Some(Arc::new(Terms {
                backoff: Some(Backoff { first_ms: 1, factor: 1_500, max_ms: 70 }),
                expires: Some(Millis(9)),
                attach_ms: 1_000,
                expected_ms: 30_000,
                max_duration_ms: 60_000,
            })),
            fence: Fence { epoch: Epoch(3), dispatch: 9, nonce: 4 },
            started: Millis(5),
            limit_ms: 70,
        };
        assert_eq!(parse_run(&run(&there)), Ok(there.clone()));
        let charge = Charge { chained: false, timed: false, ..there.charge };
        let plain = Run { terms: None, charge, ..there };
        assert_eq!(parse_run(&run(&plain)), Ok(plain));
    }

    #[test]
    fn a_new_task_says_what_is_wrong_with_it() {
        let field = |change: fn(&mut v1::NewTask)| {
            let mut task = v1::NewTask::default();
            change(&mut task);
            let new = new_task(task).and_then(|new| new.check(0));
            new.map_err(|refusal| refusal.field).err().unwrap_or_default()
        };
        let retry = |retry: v1::Retry| Some(retry);
        assert_eq!(field(|_| {}), "");
        assert_eq!(field(|t| (t.delay_ms, t.run_at_ms) = (Some(1), Some(1))), "delay_ms");
        assert_eq!(field(|t| t.delay_ms = Some(u64::MAX)), "delay_ms");
        assert_eq!(field(|t| t.max_duration_ms = Some(0)), "max_duration_ms");
        assert_eq!(field(|t| t.expected_ms = Some(0)), "expected_ms");
        assert_eq!(field(|t| t.expected_ms = Some(1_000_000_001)), "expected_ms");
        assert_eq!(field(|t| t.expected_ms = Some(1_000_000_000)), "");
        assert_eq!(field(|t| t.expires_ms = Some(0)), "expires_ms");
        assert_eq!(field(|t| t.attach_ttl_ms = Some(999)), "attach_ttl_ms");
        assert_eq!(field(|t| t.unique_ms = Some(1)), "unique_ms");
        assert_eq!(field(|t| t.unique_key = "x".repeat(257)), "unique_key");
        assert_eq!(field(|t| (t.unique_key, t.unique_ms) = ("x".into(), Some(0))), "unique_ms");
        let wrong = [
            (v1::Retry { max_attempts: Some(0), ..Default::default() }, "retry.max_attempts"),
            (v1::Retry { max_attempts: Some(70_000), ..Default::default() }, "retry.max_attempts"),
            (v1::Retry { backoff_ms: Some(u64::MAX), ..Default::default() }, "retry.backoff_ms"),
            (v1::Retry { max_backoff_ms: Some(u64::MAX), ..Default::default() }, "retry.max_backoff_ms"),
            (v1::Retry { factor_thousandths: Some(999), ..Default::default() }, "retry.factor"),
            (v1::Retry { max_lost: Some(1), ..Default::default() }, "retry.max_lost"),
        ];
        for (said, field) in wrong {
            let task = v1::NewTask { retry: retry(said), ..Default::default() };
            assert_eq!(new_task(task).unwrap_err().field, field, "{said:?}");
        }
    }

    #[test]
    fn where_a_task_says_nothing_its_queue_decides() {
        let queue = Backoff { first_ms: 70, factor: 3_000, max_ms: 700 };
        let of = |retry: v1::Retry| {
            let task = v1::NewTask { retry: Some(retry), ..Default::default() };
            new_task_in(task, queue).unwrap().backoff
        };
        assert_eq!(of(v1::Retry { max_attempts: Some(3), ..Default::default() }), None);
        let slower = v1::Retry { factor_thousandths: Some(4_000), ..Default::default() };
        assert_eq!(of(slower), Some(Backoff { factor: 4_000, ..queue }));
        let later = v1::Retry { backoff_ms: Some(5_000), ..Default::default() };
        assert_eq!(of(later), Some(Backoff { first_ms: 5_000, factor: 3_000, max_ms: 5_000 }));
        assert!(
            is_partial(&later) && !is_partial(&v1::Retry::default()) && !is_partial(&super::retry(queue))
        );
    }

    #[test]
    fn settings_are_changed_as_a_whole_or_not_at_all() {
        let before = Settings::default();
        let retry = v1::Retry { max_attempts: Some(9), max_lost: Some(300), ..Default::default() };
        let change = v1::QueueSettings { retry: Some(retry), ..Default::default() };
        assert_eq!(changed(before.clone(), &change).unwrap_err().field, "retry.max_lost");
        let change = v1::QueueSettings { retention_ms: Some(u64::MAX), ..Default::default() };
        assert_eq!(changed(before.clone(), &change).unwrap_err().field, "retention_ms");
        let change = v1::QueueSettings { paused: Some(true), ..Default::default() };
        let after = changed(before.clone(), &change).unwrap();
        assert_eq!(after, Settings { paused: true, ..before.clone() });
        assert_eq!(changed(before, &settings(&after)), Ok(after));
    }

    #[test]
    fn what_is_shared_is_one_of_what_there_is() {
        let share = |n: i32| {
            let change = v1::QueueSettings { share: Some(n), ..Default::default() };
            changed(Settings::default(), &change)
        };
        for (wire, ours) in [(v1::Share::Tasks, Share::Tasks), (v1::Share::Time, Share::Time)] {
            let set = share(wire.into()).unwrap();
            assert_eq!(set, Settings { share: ours, ..Settings::default() });
            assert_eq!(settings(&set).share(), wire);
            // What says nothing of it leaves it as it is.
            assert_eq!(changed(set.clone(), &v1::QueueSettings::default()), Ok(set));
        }
        for wrong in [v1::Share::Unspecified.into(), 3, -1] {
            let refusal = share(wrong).unwrap_err();
            assert_eq!(refusal.field, "share");
            assert_eq!(refusal.message, format!("{wrong} is nothing to share; use tasks (1) or time (2)"));
        }
    }

    #[test]
    fn classes_limits_and_rates_come_back_as_they_were() {
        use evenhand_core::admission::Limit::{All, Percent, Slots};
        let class = |duration_ms, limit| ClassLimit { duration_ms, limit };
        let rate = Rate { per_second: 1_500, burst: 3_000, unit: RateUnit::Cost };
        let there = Settings {
            classes: vec![class(3_000, All), class(10_000, Slots(8)), class(30_000, Percent(25))],
            after_downgrade: AfterDowngrade::Requeue,
            interactive_grace_ms: 2_000,
            key_limit: Some(4),
            rate: Some(rate),
            key_rate: Some(Rate { unit: RateUnit::Tasks, ..rate }),
            ..Settings::default()
        };
        let wire = settings(&there);
        assert_eq!(changed(Settings::default(), &wire), Ok(there.clone()));
        // What is not named stays, and nothing is removed by saying so.
        assert_eq!(changed(there.clone(), &v1::QueueSettings::default()), Ok(there.clone()));
        assert_eq!(changed(there, &settings(&Settings::default())), Ok(Settings::default()));
    }

    #[test]
    fn a_rate_without_a_burst_lets_a_second_come_at_once() {
        let parsed = |per_second_thousandths| {
            let said = v1::Rate { per_second_thousandths, ..v1::Rate::default() };
            parse_rate(&said).unwrap().map(|rate| rate.burst)
        };
        assert_eq!([parsed(100_000), parsed(10), parsed(0)], [Some(100_000), Some(1_000), None]);
    }

    #[test]
    fn wrong_classes_limits_and_rates_name_their_fields() {
        let field = |change: v1::QueueSettings| changed(Settings::default(), &change).unwrap_err().field;
        let classes = |limits: &[(u64, Option<v1::class_limit::Limit>)]| {
            let class = |(duration_ms, limit): &(u64, Option<_>)| v1::ClassLimit {
                duration_ms: *duration_ms,
                limit: *limit,
            };
            let classes = Some(v1::Classes { classes: limits.iter().map(class).collect() });
            field(v1::QueueSettings { classes, ..Default::default() })
        };
        use v1::class_limit::Limit::{All, Percent, Slots};
        assert_eq!(classes(&[(3, None)]), "classes[0].limit");
        assert_eq!(classes(&[(3, None); 17]), "classes", "they are counted before they are read");
        assert_eq!(classes(&[(3, Some(All(false)))]), "classes[0].limit");
        assert_eq!(classes(&[(3, Some(Slots(1)))]), "classes[0].limit");
        assert_eq!(classes(&[(3, Some(All(true))), (3, Some(Slots(1)))]), "classes[1].duration_ms");
        assert_eq!(classes(&[(3, Some(All(true))), (5, Some(Percent(300)))]), "classes[1].limit");
        let rate = |per_second_thousandths, burst_thousandths, unit| {
            let rate = Some(v1::Rate { per_second_thousandths, burst_thousandths, unit });
            let of_queue = field(v1::QueueSettings { rate, ..Default::default() });
            let of_key = v1::SetKeyRequest { rate, ..Default::default() };
            assert_eq!(key_change(&of_key).unwrap_err().field, of_queue);
            of_queue
        };
        assert_eq!(rate(u64::MAX, None, 0), "rate.per_second");
        assert_eq!(rate(1_000, Some(999), 0), "rate.burst");
        assert_eq!(rate(1_000, None, 7), "rate.unit");
        assert_eq!(
            field(v1::QueueSettings { after_downgrade: Some(0), ..Default::default() }),
            "after_downgrade"
        );
        let grace = v1::QueueSettings { interactive_grace_ms: Some(u64::MAX), ..Default::default() };
        assert_eq!(field(grace), "interactive_grace_ms");
    }

    #[test]
    fn what_a_task_is_expected_to_take_comes_through() {
        let new = |expected_ms| new_task(v1::NewTask { expected_ms, ..Default::default() }).unwrap();
        assert_eq!((new(Some(30_000)).expected_ms, new(None).expected_ms), (30_000, 0));
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
        let fence = |epoch, dispatch| fence_text(Fence { epoch: Epoch(epoch), dispatch, nonce: 7 });
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
