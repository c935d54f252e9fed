//! What a power cut would take: a kill cannot show that a sync is missing, the calls to the operating
//! system can. The committer runs under strace, and the order of its calls is held against the rules.

use std::path::Path;

use evenhand_core::Change;

use crate::plan;
use crate::support::{Committer, Model};

const SEGMENT: u64 = 16 * 1024;
const COMMITS: u64 = 200;
const CALLS: &str = "pwrite64,write,fdatasync,fsync,openat,rename,renameat,renameat2,mkdir,unlink,unlinkat";

/// One call, with the lines of the trace where it began and ended: other threads may come in between.
struct Call {
    thread: String,
    name: String,
    /// The text between its parentheses.
    arguments: String,
    failed: bool,
    start: usize,
    end: usize,
}

impl Call {
    /// The path of the open file that it is about, which strace shows in pointed brackets.
    fn file(&self) -> &str {
        self.arguments.split(['<', '>']).nth(1).unwrap_or_default()
    }

    /// The paths that it names.
    fn paths(&self) -> Vec<&str> {
        self.arguments.split('"').skip(1).step_by(2).collect()
    }

    fn is_rename(&self) -> bool {
        self.name.starts_with("rename") && !self.failed
    }

    fn is_sync_of(&self, path: &str) -> bool {
        matches!(self.name.as_str(), "fsync" | "fdatasync") && !self.failed && self.file() == path
    }
}

/// Reads what strace wrote, in the order in which the calls began.
fn parse(text: &str) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let (thread, rest) = line.split_once(' ').unwrap();
        let rest = rest.trim_start();
        let failed = rest.contains(" = -1 ");
        if rest.starts_with("<... ") {
            let of_thread = |call: &&mut Call| call.thread == thread && call.end == usize::MAX;
            let begun = calls.iter_mut().rev().find(of_thread).unwrap();
            (begun.end, begun.failed) = (at, failed);
        } else if let Some((name, rest)) = rest.split_once('(') {
            let unfinished = rest.strip_suffix(" <unfinished ...>");
            let arguments = unfinished.or_else(|| Some(rest.rsplit_once(" = ")?.0)).unwrap();
            let end = if unfinished.is_some() { usize::MAX } else { at };
            let (thread, name) = (thread.to_string(), name.to_string());
            calls.push(Call { thread, name, arguments: arguments.into(), failed, start: at, end });
        }
    }
    calls
}

/// The calls of one run, and what must have come before what.
struct Trace {
    calls: Vec<Call>,
}

impl Trace {
    fn those(&self, is: impl Fn(&Call) -> bool) -> Vec<&Call> {
        self.calls.iter().filter(|call| is(call)).collect()
    }

    fn acks(&self) -> Vec<&Call> {
        self.those(|call| call.name == "write" && call.arguments.contains(", \"acked "))
    }

    /// When the first sync of a path ends that begins after a call has ended.
    fn synced_after(&self, call: &Call, path: &str) -> usize {
        let sync = self.calls.iter().find(|sync| sync.is_sync_of(path) && sync.start > call.end);
        sync.map_or(usize::MAX, |sync| sync.end)
    }

    /// A path must have been synced after a call, and before another one.
    fn check(&self, call: &Call, path: &str, before: Option<&Call>, why: &str) {
        let synced = self.synced_after(call, path);
        if let Some(before) = before {
            assert!(
                synced < before.start,
                "{path} was not synced between line {} of the trace, {}({}), and line {}, {}({}): {why}",
                call.end + 1,
                call.name,
                call.arguments,
                before.start + 1,
                before.name,
                before.arguments,
            );
        }
    }

    /// The first of some calls that begins after a call began.
    fn first_after<'a>(&self, call: &Call, of: &[&'a Call]) -> Option<&'a Call> {
        of.iter().find(|other| other.start > call.start).copied()
    }
}

fn parent(path: &str) -> &str {
    Path::new(path).parent().unwrap().to_str().unwrap()
}

fn is_log(path: &str) -> bool {
    path.ends_with(".log") || path.ends_with("/spare")
}

fn is_table(path: &str) -> bool {
    [".rows", ".tasks", ".records"].iter().any(|kind| path.ends_with(kind))
}

/// Lets the committer make so many commits in a directory, and returns its calls.
fn trace(scratch: &Path, dir: &Path, commits: u64) -> Trace {
    let file = scratch.join("trace");
    let strace = ["-o", file.to_str().unwrap(), "-e", &format!("trace={CALLS}")];
    let witness = scratch.join("witness");
    let options = ["--segment", &SEGMENT.to_string(), "--commits", &commits.to_string()];
    let options = [&options[..], &["--witness", witness.to_str().unwrap()]].concat();
    let (status, last, failures) = Committer::traced(&strace, dir, &options).end();
    assert!(status.success() && last == commits, "strace and the committer: {status}, {last}, {failures:?}");
    let trace = Trace { calls: parse(&std::fs::read_to_string(&file).unwrap()) };
    assert_eq!(trace.acks().len() as u64, commits, "every commit is in the trace");
    trace
}

#[test]
fn the_names_of_new_directories_are_synced_before_the_first_acknowledgement() {
    let scratch = tempfile::tempdir().unwrap();
    let trace = trace(scratch.path(), &scratch.path().join("new/store"), 3);
    let made = trace.those(|call| call.name == "mkdir" && !call.failed);
    assert!(made.len() >= 4, "new, new/store, and log and tables in it");
    for made in made {
        let path = made.paths()[0];
        let ack = trace.first_after(made, &trace.acks());
        trace.check(made, parent(path), ack, "commits are below a directory that has a name");
    }
}

#[test]
fn nothing_is_relied_upon_before_it_is_synced() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("store");
    let trace = trace(scratch.path(), &dir, COMMITS);
    let acks = trace.acks();
    let writes = trace.those(|call| matches!(call.name.as_str(), "write" | "pwrite64"));
    let renames = trace.those(Call::is_rename);
    let to = |end: &str| -> Vec<&Call> {
        renames.iter().filter(|call| call.paths()[1].ends_with(end)).copied().collect()
    };
    let (segments, manifests) = (to(".log"), to("/manifest"));

    for write in writes.iter().filter(|call| is_log(call.file())) {
        let ack = trace.first_after(write, &acks);
        trace.check(write, write.file(), ack, "an acknowledged commit must be on disk");
    }
    for segment in &segments {
        let ack = trace.first_after(segment, &acks);
        trace.check(segment, parent(segment.paths()[1]), ack, "commits go to a segment that has a name");
    }

    // Files that are written under one name and then get another.
    for rename in renames.iter().filter(|call| call.paths()[0].ends_with(".new")) {
        let new = rename.paths()[0];
        for write in writes.iter().filter(|call| call.file() == new && call.start < rename.start) {
            let next = trace.first_after(write, &renames_of(&renames, new));
            trace.check(write, new, next, "what gets the name must be whole");
        }
        if rename.paths()[1].ends_with("/evenhand-store") {
            let ack = trace.first_after(rename, &acks);
            trace.check(rename, parent(new), ack, "without the mark all the rest is made anew");
        }
    }

    // What a copy must not lack unnoticed is on disk, then the witness says so, then somebody is told.
    let outside = scratch.path().join("witness");
    let seen: Vec<&Call> = renames
        .iter()
        .filter(|call| call.paths()[1].starts_with(outside.to_str().unwrap()))
        .copied()
        .collect();
    for rename in &seen {
        let told = trace.those(|call| call.name == "write" && call.arguments.contains("<pipe:"));
        let told = trace.first_after(rename, &told);
        trace.check(rename, outside.to_str().unwrap(), told, "the witness must know what was acknowledged");
        let own = |call: &&&Call| call.thread == rename.thread && call.end < rename.start;
        let new = writes.iter().rev().find(|call| own(call) && call.file() == rename.paths()[0]).unwrap();
        if let Some(frame) = writes.iter().rev().find(|call| own(call) && is_log(call.file())) {
            trace.check(frame, frame.file(), Some(new), "the witness must not be ahead of the store");
        }
    }
    let is_seen =
        |change: &Change| matches!(change, Change::Member { record: Some(_), .. } | Change::Stopped { .. });
    let commits = (1..=COMMITS).filter(|n| plan::changes(*n).iter().any(is_seen)).count();
    assert_eq!(
        seen.len(),
        commits + 2,
        "one for each of them, for opening and for taking, and none for tasks"
    );

    // A table is opened when it is finished, and only what was opened comes into a manifest.
    let reads = |call: &Call| call.name == "openat" && call.arguments.contains("O_RDONLY");
    let tables = trace.those(|call| reads(call) && is_table(call.paths()[0]));
    for table in &tables {
        let path = table.paths()[0];
        let written: Vec<&&Call> = writes.iter().filter(|call| call.file() == path).collect();
        assert!(!written.is_empty(), "{path} was opened, but never written");
        for write in written {
            trace.check(write, path, Some(table), "a table must be on disk before it counts");
        }
        let own: Vec<&Call> = manifests.iter().filter(|call| call.thread == table.thread).copied().collect();
        let manifest = trace.first_after(table, &own);
        trace.check(table, parent(path), manifest, "a manifest names only tables that are sure to be there");
    }

    // What the last manifest needed goes when the next one is sure to be there.
    let root = dir.to_str().unwrap();
    for gone in trace.those(|call| call.name.starts_with("unlink") && is_table(call.paths()[0])) {
        let own = manifests.iter().rev().find(|call| call.thread == gone.thread && call.end < gone.start);
        trace.check(own.unwrap(), root, Some(gone), "the old manifest may come back, and needs the table");
    }
    let given_away = renames.iter().filter(|call| call.paths()[0].ends_with(".log"));
    let given_away = given_away
        .copied()
        .chain(trace.those(|call| call.name.starts_with("unlink") && call.paths()[0].ends_with(".log")));
    let mut used = 0;
    for gone in given_away {
        let path = gone.paths()[0];
        let number = |path: &str| Path::new(path).file_stem()?.to_str()?.parse::<u64>().ok();
        let next = segments.iter().find(|call| number(call.paths()[1]) == number(path).map(|n| n + 1));
        let next = next.unwrap();
        let flushed = manifests
            .iter()
            .any(|manifest| manifest.start > next.end && trace.synced_after(manifest, root) < gone.start);
        assert!(flushed, "{path} was given away before a manifest was synced that does without it");
        used += 1;
    }

    let counts = (segments.len(), manifests.len(), tables.len(), used);
    assert!(segments.len() > 20 && manifests.len() > 20 && tables.len() > 50 && used > 20, "{counts:?}");
    assert_eq!(Model::default().check_dir(&dir, SEGMENT), COMMITS);
}

fn renames_of<'a>(renames: &[&'a Call], from: &str) -> Vec<&'a Call> {
    renames.iter().filter(|call| call.paths()[0] == from).copied().collect()
}
