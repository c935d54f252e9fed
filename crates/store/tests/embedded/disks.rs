//! Disks that fail, fill up or cannot be written, and directories that are not what they should be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use evenhand_core::backlog::{Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::Place;
use evenhand_core::life::Outcome;
use evenhand_core::names::{ContentType, Epoch, Key, Millis, TaskId};
use evenhand_core::{Change, Task};
use evenhand_store::embedded::{DirError, FORMAT, Options};
use evenhand_store::{Embedded, Memory, Store, StoreError, ready};
use tempfile::TempDir;

use crate::plan::{LANE, SHARD};
use crate::support::{Committer, Contents, Model, block_on, read_all, small};

const SEGMENT: u64 = 16 * 1024;
pub(crate) const MIB: u64 = 1024 * 1024;

/// Lets the committer make so many commits while strace makes calls fail, and checks what is there in the
/// end. Returns what it said about failures.
fn commit_in_spite_of(inject: &str, commits: u64) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    // The store is there already: nothing fails while it is made.
    drop(Embedded::open(dir.path(), small(SEGMENT)).unwrap());
    let call = inject.split_once(':').unwrap().0;
    let strace = ["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &format!("inject={inject}")];
    let options = ["--segment", &SEGMENT.to_string(), "--commits", &commits.to_string()];
    let (status, last, failures) = Committer::traced(&strace, dir.path(), &options).end();
    assert!(status.success() && last == commits, "{inject}: {status} after {last} commits, {failures:?}");
    assert_eq!(Model::default().check_dir(dir.path(), SEGMENT), commits, "{inject}");
    assert!(!failures.is_empty(), "{inject}: nothing failed");
    failures
}

#[test]
fn after_a_failed_sync_of_the_log_the_owner_takes_again_and_nothing_is_lost() {
    // Calls are counted by thread, and each life of the store has a thread that writes: it fails again and
    // again.
    for inject in ["fdatasync:error=EIO:when=20", "fdatasync:error=EIO:when=4+"] {
        let failures = commit_in_spite_of(inject, 60);
        assert!(failures.len() >= 2, "{inject}: {failures:?}");
        for failure in failures {
            let says = failure.contains(".log: writing a commit: Input/output error");
            assert!(says, "{inject}: {failure}");
        }
    }
}

#[test]
fn after_a_failed_sync_of_a_table_or_the_manifest_the_owner_takes_again_and_nothing_is_lost() {
    // Opening a store takes fewer syncs than this on one thread; the thread that flushes comes to them,
    // and a flush has seven, each of something else.
    let mut failed: Vec<String> =
        (21..28).flat_map(|when| commit_in_spite_of(&format!("fsync:error=EIO:when={when}"), 100)).collect();
    failed.sort();
    for file in ["/tables/", "/manifest.new: ", "/tables: ", "/log: "] {
        assert!(failed.iter().any(|what| what.contains(file)), "no sync of {file} failed: {failed:?}");
    }
}

#[test]
fn after_a_failed_rename_the_owner_takes_again_and_nothing_is_lost() {
    for when in [8, 9] {
        commit_in_spite_of(&format!("rename:error=EIO:when={when}"), 100);
    }
}

/// A file system of its own, of a given size.
pub(crate) struct Disk {
    dir: TempDir,
}

impl Disk {
    pub(crate) fn new(bytes: u64) -> Disk {
        let dir = tempfile::tempdir().unwrap();
        mount(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"], dir.path());
        Disk { dir }
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// Takes room away, until it is dropped.
    pub(crate) fn ballast(&self, bytes: u64) -> Ballast {
        let path = self.dir.path().join("ballast");
        fs::write(&path, vec![1; bytes as usize]).unwrap();
        Ballast { path }
    }

    pub(crate) fn remount(&self, options: &str) {
        mount(&["-o", &format!("remount,{options}")], self.dir.path());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily, so that it also goes when a failed test has left files open.
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
    }
}

fn mount(arguments: &[&str], dir: &Path) {
    let said = Command::new("mount").args(arguments).arg(dir).output();
    match said {
        Ok(said) if said.status.success() => {}
        Ok(said) => panic!(
            "`mount {}` said: {}. These tests need a small disk; run them as root, where mounting is allowed",
            arguments.join(" "),
            String::from_utf8_lossy(&said.stderr).trim(),
        ),
        Err(error) => panic!("mount cannot be started: {error}"),
    }
}

pub(crate) struct Ballast {
    path: PathBuf,
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// An owner of [`SHARD`] that accepts tasks and finishes them, in a store and in memory alike.
struct Owner {
    store: Embedded,
    epoch: Epoch,
    memory: Memory,
    memory_epoch: Epoch,
    next: u64,
    unfinished: std::collections::VecDeque<Task>,
}

impl Owner {
    fn new(dir: &Path, options: Options) -> Owner {
        let store = Embedded::open(dir, options).unwrap();
        let epoch = block_on(store.take(SHARD, None)).unwrap().epoch;
        let memory = Memory::default();
        let memory_epoch = ready(memory.take(SHARD, None)).unwrap().epoch;
        Owner { store, epoch, memory, memory_epoch, next: 1, unfinished: [].into() }
    }

    fn commit(&mut self, changes: Vec<Change>) -> Result<(), StoreError> {
        block_on(self.store.commit(SHARD, self.epoch, changes.clone()))?;
        self.remember(changes);
        Ok(())
    }

    fn remember(&mut self, changes: Vec<Change>) {
        ready(self.memory.commit(SHARD, self.memory_epoch, changes)).unwrap();
    }

    /// Four tasks of four KiB and a bit, and what accepts them.
    fn tasks(&self) -> (Vec<Task>, Vec<Change>) {
        let task = |id: u64| Task {
            id: TaskId(id),
            lane: LANE,
            place: Place::Lane(Level::new(
                VTime::from_bits(u128::from(id) * VTime::TICK.to_bits()).pass(),
                id,
            )),
            key: Key::new("acme").unwrap(),
            charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
            attempt: 1,
            max_attempts: 3,
            lost: 0,
            terms: None,
            replay_of: None,
            files: Default::default(),
            accepted: Millis(id),
            content_type: ContentType::default(),
            payload: Arc::from(vec![id as u8; 4096 + id as usize % 7]),
        };
        let tasks: Vec<Task> = (self.next..self.next + 4).map(task).collect();
        let seq = Change::Seq { next: self.next + 4 };
        let changes = tasks.iter().cloned().map(Change::Accepted).chain([seq]).collect();
        (tasks, changes)
    }

    fn accept(&mut self) -> Result<(), StoreError> {
        let (tasks, changes) = self.tasks();
        self.commit(changes)?;
        self.next += 4;
        self.unfinished.extend(tasks);
        Ok(())
    }

    /// Accepts until the store says no.
    fn accept_all(&mut self) -> StoreError {
        for _ in 0..100_000 {
            if let Err(error) = self.accept() {
                return error;
            }
        }
        panic!("the disk does not fill up")
    }

    /// Finishes the oldest two.
    fn finish(&mut self) -> Result<(), StoreError> {
        let changes = self.unfinished.iter().take(2).map(|task| Change::Finished {
            task: task.id,
            lane: task.lane,
            from: task.place,
            tries: 0,
            canceling: false,
            outcome: Outcome::Succeeded,
            end: None,
        });
        self.commit(changes.collect())?;
        self.unfinished.drain(..2);
        Ok(())
    }

    /// Takes the shard again. If the last tasks are there in spite of an error, they were accepted.
    fn take(&mut self) -> Result<(), StoreError> {
        let taken = block_on(self.store.take(SHARD, None))?;
        self.epoch = taken.epoch;
        if taken.metadata.next_seq == self.next + 4 {
            let (tasks, changes) = self.tasks();
            self.remember(changes);
            self.next += 4;
            self.unfinished.extend(tasks);
        }
        Ok(())
    }

    fn held(&self) -> Contents {
        ready(read_all(&self.memory, SHARD, &[LANE], 100)).unwrap().1
    }

    /// What the store has must be what memory has. Fences the owner.
    fn check(&self) {
        check(&self.store, &self.held());
    }
}

fn check(store: &Embedded, held: &Contents) {
    let (_, contents) = block_on(read_all(store, SHARD, &[LANE], 100)).unwrap();
    assert!(contents == *held, "{} tasks are there, {} should be", contents.tasks.len(), held.tasks.len());
}

/// Tries until it works. The store asks for room again now and then, and nobody says when.
fn until_it_works(what: &str, mut works: impl FnMut() -> Result<(), StoreError>) {
    let mut last = None;
    for _ in 0..20_000 {
        match works() {
            Ok(()) => return,
            Err(error) => last = Some(error),
        }
        std::thread::yield_now();
    }
    panic!("{what} does not work any more: {last:?}");
}

#[test]
fn a_full_disk_loses_nothing_and_work_goes_on_when_there_is_room_again() {
    let disk = Disk::new(6 * MIB);
    let ballast = disk.ballast(2 * MIB);
    let mut owner = Owner::new(&disk.store(), small(64 * 1024));
    for _ in 0..5 {
        let error = owner.accept_all();
        assert!(matches!(error, StoreError::Full { .. } | StoreError::Unavailable { .. }), "{error}");
        // Whether it can be taken while there is no room is the store's business; what it says is not.
        if let Err(error) = owner.take() {
            let full = matches!(&error, StoreError::Full { what } if what.contains("No space left"));
            assert!(full, "{error}");
        }
    }
    assert!(owner.next > 100, "only {} tasks until it was full", owner.next);

    drop(ballast);
    until_it_works("taking the shard", || owner.take());
    until_it_works("accepting", || owner.accept().or_else(|error| owner.take().and(Err(error))));
    (0..20).for_each(|_| owner.finish().unwrap());
    owner.check();

    let held = owner.held();
    drop(owner);
    check(&Embedded::open(disk.store(), small(64 * 1024)).unwrap(), &held);
}

#[test]
fn a_store_closed_on_a_full_disk_opens_when_there_is_room_again() {
    let disk = Disk::new(6 * MIB);
    let ballast = disk.ballast(2 * MIB);
    let mut owner = Owner::new(&disk.store(), small(64 * 1024));
    owner.accept_all();
    let (held, next) = (owner.held(), owner.next);
    drop(owner);
    // Opening needs room. Trying again and again must not make things worse.
    for _ in 0..50 {
        if let Err(error) = Embedded::open(disk.store(), small(64 * 1024)) {
            let full = matches!(&error, DirError::Io { full: true, .. });
            assert!(full && error.to_string().contains(disk.store().to_str().unwrap()), "{error}");
        }
    }
    drop(ballast);
    let store = Embedded::open(disk.store(), small(64 * 1024)).unwrap();
    let (_, contents) = block_on(read_all(&store, SHARD, &[LANE], 100)).unwrap();
    if contents.metadata.next_seq == next {
        assert!(contents == held);
    } else {
        // The one whose end was unknown.
        assert!(contents.metadata.next_seq == next + 4 && contents.tasks.len() == held.tasks.len() + 4);
    }
}

#[test]
fn below_the_floor_tasks_are_finished_but_not_accepted() {
    let disk = Disk::new(16 * MIB);
    let ballast = disk.ballast(6 * MIB);
    let mut owner = Owner::new(&disk.store(), Options { floor: 8 * MIB, ..small(64 * 1024) });
    let error = owner.accept_all();
    let StoreError::Full { what } = &error else { panic!("{error}") };
    let names_all = what.contains(disk.store().to_str().unwrap()) && what.contains("8 MiB");
    assert!(names_all, "{what}");

    // Some on the same epoch, refused in between: a refusal changes nothing.
    let many = owner.unfinished.len() / 4;
    assert!(many > 40, "only {many} tasks to finish");
    for _ in 0..many {
        owner.finish().unwrap();
        if owner.unfinished.len().is_multiple_of(10)
            && let Err(error) = owner.accept()
        {
            assert!(matches!(error, StoreError::Full { .. }), "{error}");
        }
    }
    drop(ballast);
    owner.accept().unwrap();
    while owner.unfinished.len() > 1 {
        owner.finish().unwrap();
    }
    owner.accept().unwrap();
    owner.check();
}

#[test]
fn a_disk_that_cannot_be_written_is_named() {
    let disk = Disk::new(4 * MIB);
    drop(Embedded::open(disk.store(), small(SEGMENT)).unwrap());
    disk.remount("ro");
    for dir in [disk.store(), disk.dir.path().join("another")] {
        let error = Embedded::open(&dir, small(SEGMENT)).unwrap_err();
        let text = error.to_string();
        let says = text.contains(dir.to_str().unwrap()) && text.contains("Read-only file system");
        assert!(says && matches!(error, DirError::Io { full: false, .. }), "{text}");
    }
    disk.remount("rw");
    Embedded::open(disk.store(), small(SEGMENT)).unwrap();
}

#[test]
fn a_directory_of_somebody_else_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    fs::create_dir(dir.path().join("log")).unwrap();
    fs::write(dir.path().join("log/00000001.log"), "mine, too").unwrap();
    let error = Embedded::open(dir.path(), small(SEGMENT)).unwrap_err();
    assert_eq!(error, DirError::Foreign { dir: dir.path().into() });
    assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}");
    let mut names: Vec<_> = dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["log", "notes.txt"]);
    assert_eq!(fs::read_to_string(dir.path().join("notes.txt")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(dir.path().join("log/00000001.log")).unwrap(), "mine, too");
}

#[test]
fn a_file_in_the_place_of_the_directory_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    fs::write(&file, "mine").unwrap();
    let text = Embedded::open(&file, small(SEGMENT)).unwrap_err().to_string();
    assert!(text.contains(file.to_str().unwrap()), "{text}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
}

#[test]
fn a_store_is_open_in_one_place_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let locked = Err(DirError::Locked { dir: dir.path().into() });
    let open = || Embedded::open(dir.path(), small(SEGMENT)).map(drop);

    // In this process.
    let store = Embedded::open(dir.path(), small(SEGMENT)).unwrap();
    assert_eq!(open(), locked);
    let mut refused = Committer::start(dir.path(), &[]);
    let line = refused.line().unwrap();
    assert!(line.starts_with("refused ") && line.contains(dir.path().to_str().unwrap()), "{line}");
    assert_eq!(refused.end().0.code(), Some(2));
    let clone = store.clone();
    drop(store);
    assert_eq!(open(), locked, "a clone still has it open");
    drop(clone);
    assert_eq!(open(), Ok(()));

    // In another one, which closes it.
    let mut holder = Committer::start(dir.path(), &["--hold"]);
    assert_eq!(holder.line().unwrap(), "holds 0");
    assert_eq!(open(), locked);
    assert!(holder.end().0.success());
    assert_eq!(open(), Ok(()));

    // In another one, which is killed.
    let mut holder = Committer::start(dir.path(), &["--hold"]);
    assert_eq!(holder.line().unwrap(), "holds 0");
    assert_eq!(open(), locked);
    drop(holder);
    assert_eq!(open(), Ok(()));
}

#[test]
fn a_store_of_another_format_is_refused_and_both_formats_are_named() {
    let dir = tempfile::tempdir().unwrap();
    drop(Embedded::open(dir.path(), small(SEGMENT)).unwrap());
    let mark = dir.path().join("evenhand-store");
    let text = fs::read_to_string(&mark).unwrap();
    let current = format!("format {FORMAT}");
    for found in [0, 99] {
        fs::write(&mark, text.replacen(&current, &format!("format {found}"), 1)).unwrap();
        let error = Embedded::open(dir.path(), small(SEGMENT)).unwrap_err();
        assert_eq!(error, DirError::Format { dir: dir.path().into(), found });
        let said = error.to_string();
        assert!(said.contains(&format!("format {found},")) && said.contains(&current), "{said}");
    }
    fs::write(&mark, text).unwrap();
    Embedded::open(dir.path(), small(SEGMENT)).unwrap();
}

#[test]
fn a_store_whose_making_was_interrupted_is_made_anew() {
    let mut interrupted = 0;
    // Killed as it begins a call: every rename and every sync of the making is the last one once.
    for (call, most) in [("mkdir", 3), ("rename", 8), ("fsync", 14), ("fdatasync", 3)] {
        for when in 1..=most {
            let scratch = tempfile::tempdir().unwrap();
            let dir = scratch.path().join("store");
            let inject = format!("inject={call}:signal=SIGKILL:when={when}");
            let strace = ["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject];
            let (status, last, _) = Committer::traced(&strace, &dir, &["--commits", "0"]).end();
            interrupted += u32::from(!status.success());
            assert_eq!(last, 0);
            let marked = dir.join("evenhand-store").exists();
            let mut model = Model::default();
            assert_eq!(model.check_dir(&dir, SEGMENT), 0, "{inject}, marked: {marked}");
            assert!(Committer::start(&dir, &["--commits", "10"]).end().0.success());
            assert_eq!(model.check_dir(&dir, SEGMENT), 10, "{inject}, marked: {marked}");
        }
    }
    assert!(interrupted > 15, "only {interrupted} were interrupted");
}
