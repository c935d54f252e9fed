//! Stores in scratch directories, all that is in them, what the committer must have left there, and the
//! committer itself.

use std::collections::BTreeSet;
use std::future::Future;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use evenhand_core::backlog::Level;
use evenhand_core::change::{Place, Timed, TimerRow};
use evenhand_core::names::{Epoch, Key, LaneId, ShardId, TaskId};
use evenhand_core::{Metadata, Row, Task};
use evenhand_store::embedded::Options;
use evenhand_store::{Embedded, History, Memory, Store, StoreError, Wanted, ready};

use crate::plan;

/// Runs a future to its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Options for small tests: a log of this size, and no floor.
pub(crate) fn small(segment: u64) -> Options {
    Options { segment, floor: 0, table: segment, witness: None }
}

/// All files in a directory and below, in order.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in dir.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(self::files(&path)) } else { files.push(path) }
    }
    files.sort();
    files
}

/// Copies all that is in a directory into another.
pub(crate) fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let copy = to.join(file.strip_prefix(from).unwrap());
        std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::copy(&file, &copy).unwrap();
    }
}

/// Random numbers that are the same in every run.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// One of 0 to n - 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// All that a shard holds.
#[derive(Debug, PartialEq)]
pub(crate) struct Contents {
    pub(crate) metadata: Metadata,
    pub(crate) rows: Vec<(LaneId, Row)>,
    pub(crate) timers: Vec<TimerRow>,
    /// Beside those lanes, of every key that is known of anywhere.
    pub(crate) parked: Vec<(LaneId, Row)>,
    pub(crate) tasks: Vec<Task>,
    /// Of every task that has one.
    pub(crate) histories: Vec<(TaskId, History)>,
}

/// Takes a shard and reads all of it by pages, rows in the given lanes.
pub(crate) async fn read_all<S: Store>(
    store: &S,
    shard: ShardId,
    lanes: &[LaneId],
    limit: usize,
) -> Result<(Epoch, Contents), StoreError> {
    let taken = store.take(shard, None).await?;
    let mut metadata = taken.metadata;
    metadata.queues.sort_by_key(|(queue, _)| *queue);
    metadata.overrides.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.lanes.sort_by_key(|(lane, _)| *lane);
    metadata.keys.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.aside.sort_by_key(|task| task.id);
    metadata.requests.sort_by_key(|(key, _)| *key);
    metadata.canceling.sort();
    metadata.parked.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    metadata.paused.sort();
    metadata.settings.sort_by_key(|(queue, _)| *queue);
    let mut rows = Vec::new();
    for &lane in lanes {
        let mut above = Level::ZERO;
        loop {
            let page = store.read_lane(shard, lane, above, limit).await?;
            assert!(page.end || page.rows.len() == limit, "a page before the end is full");
            assert!(page.rows.is_sorted_by(|a, b| a.level < b.level), "rows come in order");
            above = page.rows.last().map_or(above, |row| row.level);
            rows.extend(page.rows.into_iter().map(|row| (lane, row)));
            if page.end {
                break;
            }
        }
    }
    let (mut timers, mut above): (Vec<TimerRow>, Level) = (Vec::new(), Level::ZERO);
    loop {
        let page = store.read_timers(shard, above, limit).await?;
        assert!(page.end || page.rows.len() == limit, "a page before the end is full");
        assert!(page.rows.is_sorted_by(|a, b| a.at < b.at), "timers come in order");
        above = page.rows.last().map_or(above, |timer| timer.at);
        timers.extend(page.rows);
        if page.end {
            break;
        }
    }
    let mut tasks: Vec<Task> = Vec::new();
    loop {
        let after = tasks.last().map_or(TaskId(0), |task| task.id);
        let listing = store.list_tasks(shard, Wanted::default(), after, limit).await?;
        let more = listing.more.is_some();
        assert!(!more || listing.tasks.len() == limit, "a listing before the end is full");
        tasks.extend(listing.tasks);
        if !more {
            break;
        }
    }
    let mut histories = Vec::new();
    for task in tasks.iter().filter(|task| task.attempt > 1 || task.place == Place::Over) {
        histories.push((task.id, store.read_history(shard, task.id).await?));
    }
    let keys: BTreeSet<&Key> =
        tasks.iter().map(|task| &task.key).chain(metadata.keys.iter().map(|(_, key, _)| key)).collect();
    let mut parked = Vec::new();
    for (&lane, key) in lanes.iter().flat_map(|lane| keys.iter().map(move |key| (lane, *key))) {
        let mut above = Level::ZERO;
        loop {
            let page = store.read_parked(shard, lane, key.clone(), above, limit).await?;
            assert!(page.end || page.rows.len() == limit, "a page before the end is full");
            assert!(page.rows.is_sorted_by(|a, b| a.level < b.level), "parked rows come in order");
            above = page.rows.last().map_or(above, |row| row.level);
            parked.extend(page.rows.into_iter().map(|row| (lane, row)));
            if page.end {
                break;
            }
        }
    }
    Ok((taken.epoch, Contents { metadata, rows, timers, parked, tasks, histories }))
}

impl Contents {
    /// Each task must be in exactly one place: in its lane as its record says, parked beside it, among the timers,
    /// set aside, or over.
    pub(crate) fn check(&self) {
        let mut waiting: Vec<_> =
            self.tasks.iter().filter_map(|task| Some((task.lane, task.row()?))).collect();
        waiting.sort_by_key(|(lane, row)| (*lane, row.level));
        assert_eq!(self.rows, waiting, "the rows of the lanes, and what the tasks' records say of them");
        let due = self.timers.iter().filter(|timer| matches!(timer.what, Timed::Due(..))).cloned();
        let scheduled = self.tasks.iter().filter_map(|task| match task.place {
            Place::Timer(at) => {
                Some(TimerRow { at, task: task.id, what: Timed::Due(task.lane, task.row_at(at)) })
            }
            Place::Lane(_) | Place::Parked(_) | Place::Aside | Place::Over => None,
        });
        let mut scheduled: Vec<_> = scheduled.collect();
        scheduled.sort_by_key(|timer| timer.at);
        assert_eq!(due.collect::<Vec<_>>(), scheduled, "the timers, and what the tasks' records say of them");
        let shelved = self.tasks.iter().filter_map(|task| match task.place {
            Place::Parked(level) => Some((task.lane, task.row_at(level))),
            Place::Lane(_) | Place::Timer(_) | Place::Aside | Place::Over => None,
        });
        let mut shelved: Vec<_> = shelved.collect();
        shelved.sort_by(|(a, x), (b, y)| (a, &x.key, x.level).cmp(&(b, &y.key, y.level)));
        let mut parked = self.parked.clone();
        parked.sort_by(|(a, x), (b, y)| (a, &x.key, x.level).cmp(&(b, &y.key, y.level)));
        assert_eq!(parked, shelved, "the parked rows, and what the tasks' records say of them");
        let over: Vec<_> =
            self.tasks.iter().filter(|task| task.place == Place::Over).map(|task| task.id).collect();
        let ended = self.histories.iter().filter(|(_, history)| history.end.is_some()).map(|(id, _)| *id);
        assert_eq!(ended.collect::<Vec<_>>(), over, "the ends, and what the tasks' records say of them");
        let apart: Vec<_> = self.tasks.iter().filter(|task| task.place == Place::Aside).cloned().collect();
        assert_eq!(self.metadata.aside, apart, "the long runners, and what the tasks' records say of them");
    }
}

/// What a store must hold after so many commits of the committer.
#[derive(Default)]
pub(crate) struct Model {
    memory: Memory,
    commits: u64,
}

impl Model {
    /// Goes on to a commit, which must not be before the last one asked for.
    pub(crate) fn at(&mut self, commit: u64) -> Contents {
        assert!(commit >= self.commits, "commit {} was there, now the last is {commit}", self.commits);
        let epoch = ready(self.memory.take(plan::SHARD, None)).unwrap().epoch;
        while self.commits < commit {
            self.commits += 1;
            ready(self.memory.commit(plan::SHARD, epoch, plan::changes(self.commits))).unwrap();
        }
        ready(read_all(&self.memory, plan::SHARD, &[plan::LANE], 1_000)).unwrap().1
    }

    /// Reads a store that the committer wrote: it must hold some number of commits, each in full. Returns
    /// that number.
    pub(crate) fn check<S: Store>(&mut self, store: &S) -> u64 {
        let (_, contents) = block_on(read_all(store, plan::SHARD, &[plan::LANE], 100)).unwrap();
        contents.check();
        let commits = plan::last_commit(contents.metadata.next_seq);
        assert!(contents == self.at(commits), "the store holds {commits} commits, but not as they were");
        commits
    }

    /// The same of the store in a directory, which is opened for it and closed again.
    pub(crate) fn check_dir(&mut self, dir: &Path, segment: u64) -> u64 {
        self.check(&Embedded::open(dir, small(segment)).unwrap())
    }
}

fn committer() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples/committer");
    let there = path.exists();
    assert!(there, "{} is missing; run `cargo build -p evenhand-store --examples`", path.display());
    path
}

/// The committer, running in a process of its own. Killed when dropped.
pub(crate) struct Committer {
    child: Child,
    lines: BufReader<ChildStdout>,
    /// The last commit that it called durable, if any.
    pub(crate) last: u64,
    /// What it said about failures, and about doubt.
    pub(crate) failures: Vec<String>,
}

impl Committer {
    /// Starts it.
    pub(crate) fn start(dir: &Path, options: &[&str]) -> Committer {
        Committer::spawn(Command::new(committer()).arg(dir).args(options))
    }

    /// Starts it under strace.
    pub(crate) fn traced(strace: &[&str], dir: &Path, options: &[&str]) -> Committer {
        let mut command = Command::new("strace");
        command.args(["-f", "-y"]).args(strace).arg(committer()).arg(dir).args(options);
        Committer::spawn(&mut command)
    }

    fn spawn(command: &mut Command) -> Committer {
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| {
            let program = command.get_program().display();
            panic!("{program} cannot be started ({error}); `make tools` installs what the tests need")
        });
        let lines = BufReader::new(child.stdout.take().unwrap());
        Committer { child, lines, last: 0, failures: Vec::new() }
    }

    /// The next line that it says; None at its end.
    pub(crate) fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        if self.lines.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        let line = line.trim_end().to_string();
        match line.split_once(' ') {
            Some(("acked" | "holds", number)) => self.last = number.parse().unwrap(),
            Some(("failed", what)) => self.failures.push(what.into()),
            Some(("doubt", _)) => self.failures.push(line.clone()),
            _ => {}
        }
        Some(line)
    }

    /// Reads what it still says, until it has ended.
    pub(crate) fn end(mut self) -> (ExitStatus, u64, Vec<String>) {
        drop(self.child.stdin.take());
        while self.line().is_some() {}
        (self.child.wait().unwrap(), self.last, std::mem::take(&mut self.failures))
    }

    /// Kills it: no last words, no destructors. Returns the last commit that it called durable.
    pub(crate) fn kill(mut self) -> u64 {
        self.child.kill().unwrap();
        while self.line().is_some() {}
        self.last
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
