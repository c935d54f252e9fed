//! What really ran, by the tasks' own records (see `examples/checked_task.rs`), against what callers were told.

use std::collections::{BTreeMap, BTreeSet};

use evenhand::TaskState;

use crate::support::{Server, eventually};

/// A line of the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) what: String,
    pub(crate) task: String,
    pub(crate) attempt: u32,
    pub(crate) fence: String,
    pub(crate) pid: u32,
    /// Nanoseconds since boot.
    pub(crate) at: u64,
}

/// All that was recorded so far, in the order in which it was written.
pub(crate) fn records(server: &Server) -> Vec<Record> {
    let text = std::fs::read_to_string(server.path("records")).unwrap_or_default();
    let record = |line: &str| {
        let mut words = line.split(' ').map(str::to_owned);
        let mut word = || words.next().unwrap_or_else(|| panic!("a record is torn: {line:?}"));
        Record {
            what: word(),
            task: word(),
            attempt: word().parse().unwrap(),
            fence: word(),
            pid: word().parse().unwrap(),
            at: word().parse().unwrap(),
        }
    };
    text.lines().map(record).collect()
}

/// The records of one task of one kind.
pub(crate) fn of(server: &Server, what: &str, task: &str) -> Vec<Record> {
    records(server).into_iter().filter(|record| record.what == what && record.task == task).collect()
}

pub(crate) fn await_start(server: &Server, task: &str) {
    eventually(&format!("task {task} starts"), || !of(server, "start", task).is_empty());
}

pub(crate) fn await_starts(server: &Server, task: &str, starts: usize) {
    eventually(&format!("task {task} starts {starts} times"), || of(server, "start", task).len() >= starts);
}

/// Waits until every task of the queue `q` has ended, and checks everything: `accepted` is what callers were
/// told, all of whose tasks are to succeed. Returns how often tasks were started in all.
pub(crate) fn all_is_well(server: &Server, accepted: &[String]) -> usize {
    let api = server.api();
    eventually("everything ends", || {
        let queue = api.queue("q");
        queue.waiting == 0
            && queue.running == 0
            && queue.succeeded + queue.failed + queue.canceled + queue.expired >= queue.accepted
    });
    let queue = api.queue("q");
    let distinct: BTreeSet<&String> = accepted.iter().collect();
    assert_eq!(distinct.len(), accepted.len(), "an id was given to two tasks");
    assert_eq!(
        queue.accepted as usize,
        accepted.len(),
        "tasks that the server has accepted, and that callers know"
    );
    if queue.succeeded != queue.accepted {
        let ended = accepted.iter().map(|id| api.end(id));
        let others: Vec<_> = ended.filter(|task| task.state() != TaskState::Succeeded).collect();
        panic!("all were to succeed: {queue:?}, {others:?}");
    }
    let starts = ran_once_at_a_time(server);
    let records = records(server);
    let ended: BTreeSet<&String> =
        records.iter().filter(|record| record.what == "end").map(|record| &record.task).collect();
    for id in accepted {
        assert!(ended.contains(id), "task {id} is said to have succeeded, and never came to its end");
    }
    let strangers: Vec<&Record> = records.iter().filter(|record| !distinct.contains(&record.task)).collect();
    assert!(strangers.is_empty(), "tasks ran that nobody knows: {strangers:?}");
    starts
}

/// No run overlapped another one of its task, fences grew, no slot is leaked, nothing panicked.
pub(crate) fn ran_once_at_a_time(server: &Server) -> usize {
    let records = records(server);
    let overlaps: Vec<&Record> = records.iter().filter(|record| record.what == "overlap").collect();
    assert!(overlaps.is_empty(), "runs overlapped: {overlaps:?}");
    let mut runs: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.what == "start") {
        runs.entry(&record.task).or_default().push(record);
    }
    for (task, starts) in &runs {
        // The lock orders the starts, so their order in the file is the order in which they happened.
        assert!(
            starts.is_sorted_by(|a, b| a.fence < b.fence),
            "the fences of {task} do not grow: {starts:?}"
        );
        assert!(starts.is_sorted_by(|a, b| a.attempt <= b.attempt), "attempts of {task} go back: {starts:?}");
        assert!(starts.is_sorted_by(|a, b| a.at < b.at), "the times of {task} go back: {starts:?}");
    }
    eventually("no slot is leaked", || server.metric("evenhand_slots_leaked") == 0.0);
    assert!(!server.log().contains("panicked"), "the server panicked");
    runs.values().map(Vec::len).sum()
}

/// Every task ran exactly once.
pub(crate) fn ran_exactly_once(server: &Server, accepted: &[String]) {
    for id in accepted {
        let starts = of(server, "start", id);
        assert_eq!(starts.len(), 1, "task {id} was to run once: {starts:?}");
        assert_eq!(starts[0].attempt, 1, "task {id} was to be tried once");
    }
}
