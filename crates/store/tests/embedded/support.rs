//! Stores in scratch directories, what the committer must have left there, and the committer itself.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use evenhand_store::embedded::Options;
use evenhand_store::{Embedded, Memory, Store, ready};

pub(crate) use crate::contents::{Contents, Dice, read_all};
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
