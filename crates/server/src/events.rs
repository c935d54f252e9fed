//! Who watches which tasks, and how the last ones ended that the store does not remember. All of it is in memory and
//! bounded: a watcher that is slow misses events and is told how many; of the tasks that have ended in queues that
//! keep nothing the last ones are remembered, so that a client that asks a moment later still gets the result.
//!
//! Tasks that want to be watched (attached ones) are looked at more often: see [`Events::unwatched`].
//!
//! A watcher may come back and go on where it was. For that, what it would have seen is kept for a while after it
//! has left: see [`Events::watch`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use evenhand_api::{convert, v1};
use evenhand_core::change::EndRecord;
use evenhand_core::life::{End, Outcome};
use evenhand_core::names::{Key, Millis, Priority, QueueName, ShardId, TaskId};
use prost::Message;
use tokio::sync::mpsc;

/// Events that wait for a slow watcher.
const EVENTS_PER_WATCHER: usize = 256;
/// Places for the last event of a task, and for how many were left out before it.
const RESERVED: usize = 2;
/// Watchers of single tasks, and of filters: these are asked about every event.
const WATCHERS: usize = 100_000;
const FILTERS: usize = 100;
/// How long a watcher that has left may come back, in milliseconds; and how many such there may be.
const LINGER_MS: u64 = 60_000;
const LINGERING: usize = 20_000;
/// Events that are kept for those who come back, and the bytes that they may take.
const KEPT: usize = 20_000;
const KEPT_BYTES: usize = 16 * 1024 * 1024;
/// Ended tasks that are remembered here, and the bytes that they may take.
const RECENT: usize = 100_000;
const RECENT_BYTES: usize = 64 * 1024 * 1024;

/// What somebody watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    Task(TaskId),
    /// All tasks, of this queue and of this key.
    Filter(Option<QueueName>, Option<Key>),
}

/// Whose event it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) task: TaskId,
    pub(crate) queue: &'a QueueName,
    pub(crate) key: &'a Key,
}

impl Watched {
    fn is_about(&self, of: Subject<'_>) -> bool {
        match self {
            Watched::Task(task) => *task == of.task,
            Watched::Filter(queue, key) => {
                queue.as_ref().is_none_or(|queue| queue == of.queue)
                    && key.as_ref().is_none_or(|key| key == of.key)
            }
        }
    }
}

/// How a watch begins.
#[derive(Debug)]
pub(crate) struct Began {
    /// The place in the order of events, to go on from.
    pub(crate) at: String,
    /// What the watcher has not seen of what came before.
    pub(crate) before: Vec<v1::TaskEvent>,
    /// It wanted to go on from somewhere, and what came since is not known any more.
    pub(crate) missed: bool,
    pub(crate) events: mpsc::Receiver<v1::TaskEvent>,
}

/// Somebody who watches, or did a moment ago.
#[derive(Debug)]
struct Watcher {
    /// None: it has left, or its task has ended.
    events: Option<mpsc::Sender<v1::TaskEvent>>,
    dropped: u64,
    /// All events after this one that it is to see are kept, unless they had to make room; if it may come back.
    since: Option<u64>,
    left: Millis,
}

impl Watcher {
    /// Says something, unless the watcher has left. For the last thing there is always a place, and for how many
    /// were left out before it.
    fn tell(&mut self, event: &v1::TaskEvent, last: bool) {
        let Some(events) = &self.events else { return };
        if events.is_closed() {
            return self.leave(Millis(event.at_ms));
        }
        if events.capacity() <= RESERVED && !last {
            self.dropped += 1;
            return;
        }
        if self.dropped > 0 {
            let dropped = Some(v1::task_event::Event::Dropped(std::mem::take(&mut self.dropped)));
            let told = v1::TaskEvent { at_ms: event.at_ms, event: dropped, ..v1::TaskEvent::default() };
            let _ = events.try_send(told);
        }
        // If it has left in this moment, that is seen the next time.
        let _ = events.try_send(event.clone());
    }

    fn listens(&self) -> bool {
        self.events.as_ref().is_some_and(|events| !events.is_closed())
    }

    fn leave(&mut self, now: Millis) {
        self.events = None;
        self.left = now;
    }

    /// Whether it listens, or may come back.
    fn counts(&mut self, now: Millis) -> bool {
        if self.events.as_ref().is_some_and(mpsc::Sender::is_closed) {
            self.leave(now);
        }
        self.events.is_some() || self.since.is_some() && now.0 < self.left.0.saturating_add(LINGER_MS)
    }
}

/// How a task ended.
#[derive(Clone, Debug)]
pub(crate) struct Recent {
    pub(crate) of: Of,
    pub(crate) end: Arc<EndRecord>,
}

/// What events say of a task.
#[derive(Clone, Debug)]
pub(crate) struct Of {
    pub(crate) queue: QueueName,
    pub(crate) key: Key,
    pub(crate) priority: Priority,
    /// Which try, and how many it has, if that is known.
    pub(crate) attempts: Option<(u16, u16)>,
}

/// What is said of a run of which nothing was heard any more.
pub(crate) const LOST: &str = "its worker was lost";

/// What its end says of a task.
pub(crate) fn say_end(task: &mut v1::Task, end: &EndRecord) {
    let state = match end.outcome {
        Outcome::Succeeded => v1::TaskState::Succeeded,
        Outcome::Failed => v1::TaskState::Failed,
        Outcome::Canceled => v1::TaskState::Canceled,
        Outcome::Expired => v1::TaskState::Expired,
    };
    task.state = state.into();
    task.ended_ms = Some(end.at.0);
    task.result = (end.outcome == Outcome::Succeeded).then(|| Bytes::from_owner(end.result.clone()));
    if let Some(last) = &end.last {
        let lost = last.end == End::Lost && last.error.is_empty();
        task.error = if lost { LOST.into() } else { last.error.as_ref().into() };
    }
}

impl Of {
    /// The same on the wire.
    pub(crate) fn task(&self, shard: ShardId, task: TaskId) -> v1::Task {
        let (attempt, max_attempts) = self.attempts.unwrap_or_default();
        v1::Task {
            id: convert::task_id(shard, task),
            queue: self.queue.as_str().into(),
            key: self.key.as_str().into(),
            priority: self.priority.0.into(),
            attempt: attempt.into(),
            max_attempts: max_attempts.into(),
            ..v1::Task::default()
        }
    }
}

impl Recent {
    fn bytes(&self) -> usize {
        let error = self.end.last.as_ref().map_or(0, |last| last.error.len());
        size_of::<Recent>() + size_of::<EndRecord>() + self.end.result.len() + error
    }

    /// The same on the wire.
    pub(crate) fn task(&self, shard: ShardId, task: TaskId) -> v1::Task {
        let mut told = self.of.task(shard, task);
        say_end(&mut told, &self.end);
        told
    }
}

/// An event that is kept.
#[derive(Debug)]
struct Kept {
    at: u64,
    queue: QueueName,
    key: Key,
    task: TaskId,
    event: v1::TaskEvent,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Events {
    shard: ShardId,
    /// Of this life of the server: places in the order of another one mean nothing.
    life: String,
    /// The last event's place in the order.
    at: u64,
    tasks: HashMap<TaskId, Vec<Watcher>>,
    filters: Vec<(Watched, Watcher)>,
    watching: usize,
    /// Attached tasks that somebody watches, as far as the shard has been told.
    attached: HashSet<TaskId>,
    kept: VecDeque<Kept>,
    kept_bytes: usize,
    /// The last event that had to make room.
    dropped_at: u64,
    recent: HashMap<TaskId, Recent>,
    order: VecDeque<TaskId>,
    recent_bytes: usize,
}

impl Events {
    pub(crate) fn new(shard: ShardId, nonce: u64) -> Events {
        Events {
            shard,
            life: format!("{:08x}", nonce as u32),
            at: 0,
            tasks: HashMap::new(),
            filters: Vec::new(),
            watching: 0,
            attached: HashSet::new(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            dropped_at: 0,
            recent: HashMap::new(),
            order: VecDeque::new(),
            recent_bytes: 0,
        }
    }

    /// Begins a watch, from now on, or `after` an event that was seen before. One that may come back (`lingers`)
    /// finds what it missed if somebody watched the same all the time since, be it only itself within a minute.
    ///
    /// None: there are too many watchers.
    pub(crate) fn watch(&mut self, what: Watched, after: Option<&str>, lingers: bool) -> Option<Began> {
        let full = match &what {
            Watched::Task(_) => self.watching >= WATCHERS,
            Watched::Filter(..) => {
                self.filters.iter().filter(|(_, watcher)| watcher.listens()).count() >= FILTERS
            }
        };
        if full {
            return None;
        }
        let from = after.and_then(|after| self.place(after)).filter(|from| self.is_known(&what, *from));
        let before = from.map_or_else(Vec::new, |from| self.kept_after(&what, from));
        let (events, watched) = mpsc::channel(EVENTS_PER_WATCHER + RESERVED);
        let since = lingers.then_some(from.unwrap_or(self.at));
        let watcher = Watcher { events: Some(events), dropped: 0, since, left: Millis(0) };
        let began = Began {
            at: self.id(self.at),
            before,
            missed: after.is_some() && from.is_none(),
            events: watched,
        };
        self.watching += 1;
        match what {
            Watched::Task(task) => self.tasks.entry(task).or_default().push(watcher),
            filter @ Watched::Filter(..) => {
                // Those who have left make room, the oldest first.
                if self.filters.len() >= 2 * FILTERS
                    && let Some(gone) = self.filters.iter().position(|(_, watcher)| !watcher.listens())
                {
                    self.filters.remove(gone);
                }
                self.filters.push((filter, watcher));
            }
        }
        Some(began)
    }

    /// An attached task is watched from now on. False: that is known.
    pub(crate) fn attach(&mut self, task: TaskId) -> bool {
        self.attached.insert(task)
    }

    /// Attached tasks that somebody watches: to tell a new owner.
    pub(crate) fn attached(&self) -> impl Iterator<Item = TaskId> {
        self.attached.iter().copied()
    }

    /// Tasks that somebody watches by their ids.
    pub(crate) fn watched(&self) -> impl Iterator<Item = TaskId> {
        self.tasks.iter().filter(|(_, all)| all.iter().any(Watcher::listens)).map(|(task, _)| *task)
    }

    /// Attached tasks whose last watcher has left since this was last asked. All of them are looked at, and no
    /// others: this is to be asked every second.
    pub(crate) fn unwatched(&mut self) -> Vec<TaskId> {
        let tasks = &self.tasks;
        let is_left = |task: &TaskId| !tasks.get(task).is_some_and(|all| all.iter().any(Watcher::listens));
        self.attached.extract_if(is_left).collect()
    }

    fn id(&self, at: u64) -> String {
        format!("{}-{at}", self.life)
    }

    /// A place in the order, if it is one of this life.
    fn place(&self, id: &str) -> Option<u64> {
        let at = id.strip_prefix(&self.life)?.strip_prefix('-')?.parse().ok()?;
        (at <= self.at).then_some(at)
    }

    /// Whether all is kept that `what` is about and that came after a place.
    fn is_known(&self, what: &Watched, from: u64) -> bool {
        let kept = |watcher: &Watcher| watcher.since.is_some_and(|since| since <= from);
        self.dropped_at <= from
            && match what {
                Watched::Task(task) => self.tasks.get(task).is_some_and(|all| all.iter().any(kept)),
                Watched::Filter(..) => {
                    self.filters.iter().any(|(other, watcher)| other == what && kept(watcher))
                }
            }
    }

    fn kept_after(&self, what: &Watched, from: u64) -> Vec<v1::TaskEvent> {
        let first = self.kept.partition_point(|kept| kept.at <= from);
        let about =
            |kept: &&Kept| what.is_about(Subject { task: kept.task, queue: &kept.queue, key: &kept.key });
        self.kept.range(first..).filter(about).map(|kept| kept.event.clone()).collect()
    }

    /// Whether somebody wants to know of every task.
    pub(crate) fn has_filters(&self) -> bool {
        !self.filters.is_empty()
    }

    /// Whether somebody wants to know what happens to this task, or may ask later.
    pub(crate) fn is_watched(&self, of: Subject<'_>) -> bool {
        self.filters.iter().any(|(filter, _)| filter.is_about(of))
            || !self.tasks.is_empty() && self.tasks.contains_key(&of.task)
    }

    /// Tells those who watch the task.
    pub(crate) fn tell(&mut self, now: Millis, of: Subject<'_>, event: v1::task_event::Event) {
        self.tell_all(now, of, event, false);
    }

    fn tell_all(&mut self, now: Millis, of: Subject<'_>, event: v1::task_event::Event, last: bool) {
        self.at += 1;
        let event = v1::TaskEvent {
            at_ms: now.0,
            id: self.id(self.at),
            task_id: convert::task_id(self.shard, of.task),
            event: Some(event),
        };
        let mut keep = false;
        let filters = self.filters.iter_mut().filter(|(filter, _)| filter.is_about(of));
        let of_filters = filters.map(|(_, watcher)| (watcher, false));
        let of_task = self.tasks.get_mut(&of.task).into_iter().flatten().map(|watcher| (watcher, last));
        for (watcher, last) in of_filters.chain(of_task) {
            watcher.tell(&event, last);
            keep |= watcher.since.is_some();
        }
        if keep {
            self.keep(of, event);
        }
    }

    fn keep(&mut self, of: Subject<'_>, event: v1::TaskEvent) {
        let bytes = |event: &v1::TaskEvent| event.encoded_len() + size_of::<Kept>();
        self.kept_bytes += bytes(&event);
        let (queue, key) = (of.queue.clone(), of.key.clone());
        self.kept.push_back(Kept { at: self.at, queue, key, task: of.task, event });
        while self.kept.len() > KEPT || self.kept_bytes > KEPT_BYTES {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.kept_bytes -= bytes(&oldest.event);
            self.dropped_at = oldest.at;
        }
    }

    /// A task has ended: its watchers get their last event. If it is to be kept here, whoever asks later finds it
    /// for a while.
    pub(crate) fn ended(&mut self, now: Millis, task: TaskId, ended: Recent, keep: bool) {
        self.attached.remove(&task);
        let of = Subject { task, queue: &ended.of.queue, key: &ended.of.key };
        if self.is_watched(of) {
            let told = v1::task_event::Event::Task(ended.task(self.shard, task));
            self.tell_all(now, of, told, true);
            self.tasks.get_mut(&task).into_iter().flatten().for_each(|watcher| watcher.leave(now));
        }
        if !keep {
            return;
        }
        self.recent_bytes += ended.bytes();
        if let Some(before) = self.recent.insert(task, ended) {
            self.recent_bytes -= before.bytes();
        } else {
            self.order.push_back(task);
        }
        while self.recent.len() > RECENT || self.recent_bytes > RECENT_BYTES {
            let Some(oldest) = self.order.pop_front() else { break };
            self.recent_bytes -= self.recent.remove(&oldest).map_or(0, |recent| recent.bytes());
        }
    }

    pub(crate) fn recent(&self, task: TaskId) -> Option<&Recent> {
        self.recent.get(&task)
    }

    /// Forgets those who no longer listen, also to tasks of which nothing is heard.
    pub(crate) fn sweep(&mut self, now: Millis) {
        self.forget(now);
        let lingering = |watcher: &&Watcher| watcher.events.is_none();
        let watchers = self.tasks.values().flatten().chain(self.filters.iter().map(|(_, watcher)| watcher));
        if watchers.filter(lingering).count() > LINGERING {
            // Too many to wait for any of them.
            self.forget(Millis(u64::MAX));
        }
        self.watching = self.tasks.values().map(Vec::len).sum::<usize>() + self.filters.len();
        if self.watching == 0 {
            self.kept.clear();
            self.kept_bytes = 0;
            self.dropped_at = self.at;
        }
    }

    fn forget(&mut self, now: Millis) {
        self.tasks.retain(|_, watchers| {
            watchers.retain_mut(|watcher| watcher.counts(now));
            !watchers.is_empty()
        });
        self.filters.retain_mut(|(_, watcher)| watcher.counts(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> QueueName {
        QueueName::new("render").unwrap()
    }

    fn key(key: &str) -> Key {
        Key::new(key).unwrap()
    }

    fn output(events: &mut Events, now: u64, task: u64, of: &str, line: &str) {
        let of = Subject { task: TaskId(task), queue: &queue(), key: &key(of) };
        if events.is_watched(of) {
            events.tell(Millis(now), of, v1::task_event::Event::Output(line.into()));
        }
    }

    fn heard(began: &mut Began) -> Vec<v1::TaskEvent> {
        let mut heard = std::mem::take(&mut began.before);
        heard.extend(std::iter::from_fn(|| began.events.try_recv().ok()));
        heard
    }

    fn lines(began: &mut Began) -> Vec<String> {
        let line = |event: v1::TaskEvent| match event.event {
            Some(v1::task_event::Event::Output(line)) => line,
            other => format!("{other:?}"),
        };
        heard(began).into_iter().map(line).collect()
    }

    #[test]
    fn a_filter_sees_its_queue_and_key_only() {
        let mut events = Events::new(ShardId(0), 7);
        let mut of_acme = events.watch(Watched::Filter(None, Some(key("acme"))), None, false).unwrap();
        let other = Watched::Filter(Some(QueueName::new("mail").unwrap()), None);
        let mut of_mail = events.watch(other, None, false).unwrap();
        output(&mut events, 0, 1, "acme", "a");
        output(&mut events, 0, 2, "zeta", "z");
        assert_eq!((lines(&mut of_acme), lines(&mut of_mail)), (vec!["a".to_string()], vec![]));
    }

    #[test]
    fn a_watcher_that_comes_back_has_missed_nothing() {
        let mut events = Events::new(ShardId(0), 7);
        let task = Watched::Task(TaskId(1));
        let mut first = events.watch(task.clone(), None, true).unwrap();
        output(&mut events, 0, 1, "acme", "a");
        let seen = heard(&mut first).pop().unwrap().id;
        drop(first);
        output(&mut events, 1_000, 1, "acme", "b");
        output(&mut events, 1_000, 2, "acme", "of another task");
        events.sweep(Millis(10_000));
        output(&mut events, 50_000, 1, "acme", "c");
        let mut again = events.watch(task.clone(), Some(&seen), true).unwrap();
        assert!(!again.missed);
        output(&mut events, 50_000, 1, "acme", "d");
        assert_eq!(lines(&mut again), ["b", "c", "d"]);
        drop(again);
        // Too late, or from another life, or never: it is told.
        events.sweep(Millis(51_000));
        events.sweep(Millis(111_001));
        for after in [seen.as_str(), "00000008-1", "00000007-99", "", "\u{0}", "00000007-x"] {
            assert!(events.watch(task.clone(), Some(after), true).unwrap().missed, "{after}");
        }
    }

    #[test]
    fn what_nobody_watched_is_not_taken_for_known() {
        let mut events = Events::new(ShardId(0), 7);
        let all = Watched::Filter(None, None);
        let began = events.watch(Watched::Task(TaskId(1)), None, true).unwrap();
        output(&mut events, 0, 2, "acme", "not kept");
        assert!(events.watch(all.clone(), Some(&began.at), true).unwrap().missed);
        output(&mut events, 0, 2, "acme", "kept");
        assert!(!events.watch(all, Some(&events.id(events.at)), true).unwrap().missed);
    }

    #[test]
    fn what_had_to_make_room_is_missed_and_told() {
        let mut events = Events::new(ShardId(0), 7);
        let all = Watched::Filter(None, None);
        let mut began = events.watch(all.clone(), None, true).unwrap();
        for n in 0..KEPT + 300 {
            output(&mut events, 0, 1, "acme", &n.to_string());
        }
        let heard = heard(&mut began);
        assert_eq!(heard.len(), EVENTS_PER_WATCHER);
        output(&mut events, 0, 1, "acme", "more");
        assert_eq!(events.kept.len(), KEPT);
        let (dropped, last) = (began.events.try_recv().unwrap(), began.events.try_recv().unwrap());
        let left_out = KEPT + 300 - EVENTS_PER_WATCHER;
        assert_eq!(dropped.event, Some(v1::task_event::Event::Dropped(left_out as u64)));
        assert_eq!(last.event, Some(v1::task_event::Event::Output("more".into())));
        assert!(events.watch(all.clone(), Some(&heard[0].id), true).unwrap().missed);
        assert!(!events.watch(all, Some(&last.id), true).unwrap().missed);
    }

    #[test]
    fn the_end_is_told_however_slow_the_watcher_is() {
        let mut events = Events::new(ShardId(0), 7);
        let mut began = events.watch(Watched::Task(TaskId(1)), None, false).unwrap();
        for n in 0..1_000 {
            output(&mut events, 0, 1, "acme", &n.to_string());
        }
        let of = Of { queue: queue(), key: key("acme"), priority: Priority::DEFAULT, attempts: Some((1, 1)) };
        let (outcome, at) = (Outcome::Succeeded, Millis(1));
        let end = EndRecord { key: key("acme"), outcome, at, last: None, result: [].into() };
        events.ended(Millis(1), TaskId(1), Recent { of, end: Arc::new(end) }, false);
        assert!(events.recent(TaskId(1)).is_none());
        let heard = heard(&mut began);
        assert_eq!(heard.len(), EVENTS_PER_WATCHER + 2);
        let left_out = 1_000 - EVENTS_PER_WATCHER as u64;
        assert_eq!(heard[EVENTS_PER_WATCHER].event, Some(v1::task_event::Event::Dropped(left_out)));
        assert!(matches!(heard.last().unwrap().event, Some(v1::task_event::Event::Task(_))));
        assert!(began.events.try_recv().is_err());
    }

    #[test]
    fn those_who_left_take_nobodys_place() {
        let mut events = Events::new(ShardId(0), 7);
        let all = Watched::Filter(None, None);
        for _ in 0..10 * FILTERS {
            assert!(events.watch(all.clone(), None, true).is_some());
        }
        assert!(events.filters.len() <= 2 * FILTERS);
        let stay: Vec<_> = (0..FILTERS).map(|_| events.watch(all.clone(), None, true).unwrap()).collect();
        assert!(events.watch(all.clone(), None, true).is_none());
        drop(stay);
        assert!(events.watch(all, None, true).is_some());
    }

    #[test]
    fn it_is_noticed_when_nobody_watches_an_attached_task_any_more() {
        let mut events = Events::new(ShardId(0), 7);
        let watch = |events: &mut Events, n| events.watch(Watched::Task(TaskId(n)), None, true).unwrap();
        let (first, second, other) = (watch(&mut events, 1), watch(&mut events, 1), watch(&mut events, 2));
        assert!(events.attach(TaskId(1)) && !events.attach(TaskId(1)));
        drop((first, other));
        assert_eq!(events.unwatched(), []);
        drop(second);
        assert_eq!(events.unwatched(), [TaskId(1)]);
        assert_eq!(events.unwatched(), []);
        // It came back.
        let _third = watch(&mut events, 1);
        assert!(events.attach(TaskId(1)));
        assert_eq!(events.attached().collect::<Vec<_>>(), [TaskId(1)]);
    }

    #[test]
    fn nothing_is_kept_for_those_who_do_not_come_back() {
        let mut events = Events::new(ShardId(0), 7);
        let began = events.watch(Watched::Task(TaskId(1)), None, false).unwrap();
        output(&mut events, 0, 1, "acme", "a");
        assert!(events.kept.is_empty());
        drop(began);
        events.sweep(Millis(1));
        assert!(events.tasks.is_empty() && events.watching == 0);
    }
}
