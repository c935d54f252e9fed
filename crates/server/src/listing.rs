//! Tasks by the page: listing them, and canceling or replaying all of a filter. The store is read in bounded pages;
//! what a call has not come to is left for the next one, by a cursor.

use std::fmt;

use evenhand_api::v1::TaskState;
use evenhand_api::{PAGE_TASKS, TIME_MS, convert, v1};
use evenhand_core::explain::Standing;
use evenhand_core::names::{Key, Millis, QueueId, QueueName, TaskId};
use evenhand_core::refusal::Kind;
use evenhand_core::{Answer, Refusal, Task};
use evenhand_store::{Store, Wanted};
use tokio::task::JoinSet;

use crate::clients::{Clients, is_over, to_wire, unavailable};
use crate::events::say_end;
use crate::mailbox::{Explained, Mailbox};
use crate::shard::SHARD;

/// Tasks that are read at once, at least, and how often is read for one page.
const AT_ONCE: usize = 100;
const READS: usize = 50;
/// Changes of one call that are on their way to the shard at once: each takes a place in the clients' mailbox.
const CHANGES_AT_ONCE: usize = 64;

/// Which tasks.
#[derive(Clone, Debug)]
struct Wants {
    wanted: Wanted,
    key: Option<Key>,
    state: Option<TaskState>,
    /// Accepted from then until before then.
    accepted: std::ops::Range<u64>,
}

/// A task that was found.
#[derive(Debug)]
struct Found {
    task: Task,
    told: v1::Task,
}

/// Some of them.
#[derive(Debug)]
struct Page {
    found: Vec<Found>,
    /// All up to this one have been looked at.
    seen: TaskId,
    more: bool,
}

/// What to do with many tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Many {
    Cancel,
    Replay,
}

/// How far a call came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    /// All up to this task have been looked at.
    after: TaskId,
    /// When the first call began.
    began: Millis,
    /// Running tasks are left for another pass. Else, if those were canceled first, their slots would be given to tasks
    /// that are about to be canceled too.
    first_pass: bool,
}

/// What was done to one of them.
#[derive(Debug)]
enum Done {
    Canceled,
    Stopping,
    Again(TaskId),
    /// Nothing: it is not any more what it was when it was found.
    Nothing,
}

impl<S: Store + Clone + 'static> Clients<S> {
    pub(crate) async fn list(&self, request: v1::ListRequest) -> Result<v1::ListResponse, Refusal> {
        let limit = within(request.limit.unwrap_or(100))?;
        let filter = v1::Filter {
            state: request.state,
            queue: request.queue,
            key: request.key,
            accepted_from_ms: request.accepted_from_ms,
            accepted_before_ms: request.accepted_before_ms,
        };
        let wants = self.wants(&filter, None).await?;
        let mut after = match request.cursor.as_str() {
            "" => TaskId(0),
            cursor => match convert::parse_task_id(cursor) {
                Ok((SHARD, task)) => task,
                // By shard, then by task: another shard's are all before ours, or all behind.
                Ok((shard, _)) if shard < SHARD => TaskId(0),
                Ok(_) => return Ok(v1::ListResponse::default()),
                Err(_) => return Err(Refusal::invalid("cursor", "is none that a list gave")),
            },
        };
        let mut answer = v1::ListResponse::default();
        // A filter may pass over many tasks. After so many the caller is told how far it came.
        for _ in 0..READS {
            let page = self.page(&wants, after, limit - answer.tasks.len()).await?;
            after = page.seen;
            answer.tasks.extend(page.found.into_iter().map(|found| found.told));
            answer.cursor = if page.more { convert::task_id(SHARD, after) } else { String::new() };
            if !page.more || answer.tasks.len() == limit {
                break;
            }
        }
        Ok(answer)
    }

    /// Changes the tasks of a filter, a bounded number of them. Only those that were there when the first call
    /// began: so it comes to an end, and what it makes itself is not changed again.
    pub(crate) async fn many(
        &self,
        what: Many,
        request: v1::ManyRequest,
    ) -> Result<v1::ManyResponse, Refusal> {
        let limit = within(request.limit.unwrap_or(PAGE_TASKS))?;
        let filter = request.filter.unwrap_or_default();
        if filter.queue.is_empty() && filter.key.is_empty() {
            return Err(Refusal::invalid("queue", "is empty; name a queue or a key at least"));
        }
        let mut wants = self.wants(&filter, Some(what)).await?;
        let mut at = match request.cursor.as_str() {
            "" => Progress {
                after: TaskId(0),
                began: self.clock.now(),
                first_pass: what == Many::Cancel && wants.state.is_none(),
            },
            cursor => match Progress::parse(cursor)? {
                Some(at) => at,
                None => return Ok(v1::ManyResponse::default()),
            },
        };
        // What was accepted in the very millisecond may be canceled, but a task is not run again so soon.
        let until = at.began.0.saturating_add(u64::from(what == Many::Cancel));
        wants.accepted.end = wants.accepted.end.min(until);
        let mut answer = v1::ManyResponse::default();
        for _ in 0..READS {
            let page = self.page(&wants, at.after, limit - answer.changed as usize).await?;
            let (mut found, more) = (page.found, page.more || at.first_pass);
            found.retain(|found| match what {
                Many::Cancel if at.first_pass => found.told.state() != TaskState::Running,
                Many::Cancel => !found.told.stopping,
                Many::Replay => found.told.replayed_as.is_empty(),
            });
            let failed = self.change(what, found, &mut answer).await;
            if let Some((task, refusal)) = failed {
                if answer.changed == 0 {
                    return Err(refusal);
                }
                // The caller goes on from there: what was done behind it is not done twice.
                at.after = TaskId(task.0.saturating_sub(1));
                answer.cursor = at.to_string();
                return Ok(answer);
            }
            at.after = page.seen;
            if !page.more && at.first_pass {
                at = Progress { after: TaskId(0), first_pass: false, ..at };
            }
            answer.cursor = if more { at.to_string() } else { String::new() };
            if !more || answer.changed as usize >= limit {
                break;
            }
        }
        Ok(answer)
    }

    /// Changes these tasks, some at a time. The first one that could not be changed, and why, if that may pass.
    async fn change(
        &self,
        what: Many,
        found: Vec<Found>,
        answer: &mut v1::ManyResponse,
    ) -> Option<(TaskId, Refusal)> {
        let mut left = found.into_iter();
        loop {
            let mut changing = JoinSet::new();
            for Found { task, .. } in left.by_ref().take(CHANGES_AT_ONCE) {
                let mailbox = self.mailbox.clone();
                changing.spawn(async move { (task.id, change_one(what, &mailbox, task).await) });
            }
            if changing.is_empty() {
                return None;
            }
            let mut done = changing.join_all().await;
            done.sort_unstable_by_key(|(task, _)| *task);
            let mut failed = None;
            for (task, done) in done {
                match done {
                    Ok(Done::Canceled) => answer.changed += 1,
                    Ok(Done::Stopping) => {
                        answer.changed += 1;
                        answer.stopping += 1;
                    }
                    Ok(Done::Again(again)) => {
                        answer.changed += 1;
                        answer.ids.push(convert::task_id(SHARD, again));
                    }
                    Ok(Done::Nothing) => {}
                    Err(refusal) => failed = failed.or(Some((task, refusal))),
                }
            }
            if failed.is_some() {
                return failed;
            }
        }
    }

    async fn wants(&self, filter: &v1::Filter, many: Option<Many>) -> Result<Wants, Refusal> {
        let queue: Option<QueueId> = match filter.queue.as_str() {
            "" => None,
            name => Some(self.mailbox.queue(QueueName::new(name)?, 0).await?.id),
        };
        let key = Some(Key::new(&filter.key)?).filter(|key| !key.as_str().is_empty());
        let state = Some(filter.state()).filter(|state| *state != TaskState::Unspecified);
        let ended = match (many, state.map(is_over)) {
            (None, over) => over,
            (Some(Many::Cancel), None | Some(false)) => Some(false),
            (Some(Many::Replay), None | Some(true)) => Some(true),
            (Some(Many::Cancel), Some(true)) => {
                return Err(Refusal::invalid(
                    "state",
                    "is of tasks that have ended; they cannot be canceled",
                ));
            }
            (Some(Many::Replay), Some(false)) => {
                return Err(Refusal::invalid(
                    "state",
                    "is of tasks that have not ended; they cannot be run again",
                ));
            }
        };
        let from = time("accepted_from_ms", filter.accepted_from_ms)?;
        let before = time("accepted_before_ms", filter.accepted_before_ms)?;
        let accepted = from.unwrap_or(0)..before.unwrap_or(u64::MAX);
        Ok(Wants { wanted: Wanted { queue, ended }, key, state, accepted })
    }

    /// Reads on after a task, until so many are found or the store has said enough.
    async fn page(&self, wants: &Wants, after: TaskId, limit: usize) -> Result<Page, Refusal> {
        let listing = self.store.list_tasks(SHARD, wants.wanted, after, limit.max(AT_ONCE)).await;
        let mut listing = listing.map_err(|why| unavailable(&why))?;
        let mut seen = listing.more.or(listing.tasks.last().map(|task| task.id)).unwrap_or(after);
        listing.tasks.retain(|task| {
            wants.key.as_ref().is_none_or(|key| task.key == *key) && wants.accepted.contains(&task.accepted.0)
        });
        let mut explained = self.mailbox.explain(listing.tasks).await?.into_iter();
        let mut found = Vec::new();
        for explained in explained.by_ref() {
            let task = explained.task.clone();
            if let Some(told) = self.told(explained).await?
                && wants.state.is_none_or(|state| told.state() == state)
            {
                seen = if found.len() + 1 == limit { task.id } else { seen };
                found.push(Found { task, told });
            }
            if found.len() == limit {
                break;
            }
        }
        let more = listing.more.is_some() || explained.len() > 0;
        Ok(Page { found, seen, more })
    }

    /// A task as lists show it; None if it is not there any more.
    async fn told(&self, explained: Explained) -> Result<Option<v1::Task>, Refusal> {
        let (id, standing) = (explained.task.id, explained.standing.clone());
        let mut told = to_wire(explained);
        match standing {
            // It ended, or moved while it was looked at.
            Standing::Gone => match self.get(&convert::task_id(SHARD, id)).await {
                Ok(task) => Ok(Some(v1::Task { result: None, tries: Vec::new(), holds: Vec::new(), ..task })),
                Err(refusal) if refusal.kind == Kind::NotFound => Ok(None),
                Err(refusal) => Err(refusal),
            },
            Standing::Running { .. } | Standing::Waiting { .. } | Standing::Scheduled { .. } => {
                // The first of them is there; all of them are for who asks about one task.
                told.holds.clear();
                Ok(Some(told))
            }
            Standing::Over => {
                let history = self.store.read_history(SHARD, id).await.map_err(|why| unavailable(&why))?;
                let Some(end) = history.end else { return Ok(None) };
                say_end(&mut told, &end);
                // A page of results would be too much.
                told.result = None;
                told.replayed_as =
                    history.replayed_as.map_or_else(String::new, |id| convert::task_id(SHARD, id));
                Ok(Some(told))
            }
        }
    }
}

/// A time that a caller names, if one does.
fn time(field: &str, ms: Option<u64>) -> Result<Option<u64>, Refusal> {
    if ms.is_none_or(|ms| ms <= TIME_MS) {
        return Ok(ms);
    }
    Err(Refusal::invalid(field, format!("is no time; use milliseconds since 1970, at most {TIME_MS}")))
}

/// Changes one task.
async fn change_one(what: Many, mailbox: &Mailbox, task: Task) -> Result<Done, Refusal> {
    let answer = match what {
        Many::Cancel => mailbox.cancel(task.id).await,
        Many::Replay => mailbox.replay(task).await,
    };
    match answer {
        Ok(Answer::Canceled) => Ok(Done::Canceled),
        Ok(Answer::Stopping) => Ok(Done::Stopping),
        Ok(Answer::Replayed(again)) => Ok(Done::Again(again)),
        Ok(
            Answer::Accepted(_)
            | Answer::AcceptedBefore(_)
            | Answer::Configured(_)
            | Answer::KeySet
            | Answer::Shortened(_)
            | Answer::Interactive { .. }
            | Answer::KeyPaused(_),
        ) => Ok(Done::Nothing),
        // It has ended meanwhile, or is forgotten.
        Err(refusal) if [Kind::NotFound, Kind::Conflict].contains(&refusal.kind) => Ok(Done::Nothing),
        Err(refusal) => Err(refusal),
    }
}

fn within(limit: u32) -> Result<usize, Refusal> {
    if (1..=PAGE_TASKS).contains(&limit) {
        return Ok(limit as usize);
    }
    Err(Refusal::invalid("limit", format!("{limit} is out of range; use 1 to {PAGE_TASKS}")))
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = if self.first_pass { 1 } else { 2 };
        write!(f, "{}-{}-{pass}", convert::task_id(SHARD, self.after), self.began)
    }
}

impl Progress {
    /// Reads a cursor. None: all of this shard is done.
    fn parse(cursor: &str) -> Result<Option<Progress>, Refusal> {
        let parts: Vec<&str> = cursor.splitn(4, '-').collect();
        let &[shard, task, began, pass] = &parts[..] else { return Err(no_cursor()) };
        let first_pass = match pass {
            "1" => true,
            "2" => false,
            _ => return Err(no_cursor()),
        };
        let (id, began) = (format!("{shard}-{task}"), format!("{shard}-{began}"));
        let (Ok((shard, task)), Ok((_, TaskId(began)))) =
            (convert::parse_task_id(&id), convert::parse_task_id(&began))
        else {
            return Err(no_cursor());
        };
        // By shard, then by task, as in lists.
        let after = if shard == SHARD { task } else { TaskId(0) };
        Ok((shard <= SHARD).then_some(Progress { after, began: Millis(began), first_pass }))
    }
}

fn no_cursor() -> Refusal {
    Refusal::invalid("cursor", "is none that an earlier call gave")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_says_how_far_a_call_came_and_when_the_first_began() {
        for first_pass in [true, false] {
            let at = Progress { after: TaskId(42), began: Millis(7), first_pass };
            assert_eq!(Progress::parse(&at.to_string()), Ok(Some(at)));
        }
        assert_eq!(Progress::parse("1-42-7-1"), Ok(None));
        for bad in [
            "",
            "-",
            "---",
            "0-42",
            "0-42-7",
            "0-42-7-",
            "0-42-7-3",
            "0-42-x-1",
            "0-42-+7-1",
            "0--7-1",
            "0-42-99999999999999999999-1",
            "0-42-7-1-1",
        ] {
            assert_eq!(Progress::parse(bad).unwrap_err().field, "cursor", "{bad}");
        }
    }
}
