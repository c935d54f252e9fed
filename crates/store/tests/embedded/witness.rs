//! Old copies of a store are noticed, and newest ones are not taken for old ones: by the witness, whatever happens to
//! it and to the store, and wherever either was when the process died.

use std::fs;
use std::path::{Path, PathBuf};

use evenhand_core::Change;
use evenhand_core::change::MemberRecord;
use evenhand_core::names::{Epoch, Life, Seat, ShardId};
use evenhand_store::embedded::{self, DirError, Options};
use evenhand_store::{Doubt, Embedded, Store, StoreError, Taken};
use tempfile::TempDir;

use crate::disks::{Disk, MIB};
use crate::plan;
use crate::support::{Committer, Model, block_on, copy, files, small};

const SHARD: ShardId = plan::SHARD;
const SEGMENT: u64 = 16 * 1024;

/// A store in a scratch directory, its witness, and copies of it.
struct Scene {
    scratch: TempDir,
}

impl Scene {
    fn new() -> Scene {
        Scene { scratch: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn dir(&self) -> PathBuf {
        self.path("store")
    }

    fn witness(&self) -> PathBuf {
        self.path("witness")
    }

    fn options(&self) -> Options {
        Options { witness: Some(self.witness()), ..small(SEGMENT) }
    }

    fn open(&self) -> Embedded {
        Embedded::open(self.dir(), self.options()).unwrap()
    }

    /// Starts a server, as it were: what it is given, and what it holds.
    fn start(&self) -> (Embedded, Taken) {
        let store = self.open();
        let taken = take(&store);
        (store, taken)
    }

    /// Starts a server that is not in doubt, lets it do something, and ends it without grace.
    fn work(&self, changes: Vec<Change>) {
        let (store, taken) = self.start();
        assert_eq!((taken.doubt, taken.metadata.doubt), (None, None));
        block_on(store.commit(SHARD, taken.epoch, changes)).unwrap();
    }

    /// Copies the store away.
    fn back_up(&self, name: &str) {
        copy(&self.dir(), &self.path(name));
    }

    /// Puts a copy in the place of the store.
    fn restore(&self, name: &str) {
        fs::remove_dir_all(self.dir()).unwrap();
        copy(&self.path(name), &self.dir());
    }

    /// The witness's only file.
    fn file(&self) -> PathBuf {
        let mut files = files(&self.witness());
        files.retain(|file| file.extension().is_none());
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }
}

fn take(store: &Embedded) -> Taken {
    block_on(store.take(SHARD, None)).unwrap()
}

fn member(seat: &str) -> Change {
    let record = MemberRecord {
        token: 1,
        life: Life { process: 1, rejoin: 0 },
        wait_ms: 1,
        running: Vec::new(),
        set: None,
    };
    Change::Member { seat: Seat::new(seat).unwrap(), record: Some(record) }
}

fn stopped() -> Change {
    Change::Stopped { stopped: true }
}

/// It is in doubt, and says why; when it is over, nothing is left of it, not even after a restart.
fn is_in_doubt(scene: &Scene, why: impl Fn(&Doubt) -> bool) {
    let (store, taken) = scene.start();
    let doubt = taken.doubt.as_ref().unwrap();
    assert!(why(doubt), "{doubt}");
    assert_eq!(taken.metadata.doubt, Some(u64::MAX), "{doubt}");
    drop(store);
    // Nobody has waited yet. The witness has nothing against the store any more, but the doubt is saved.
    let (store, taken) = scene.start();
    assert_eq!((taken.doubt, taken.metadata.doubt), (None, Some(u64::MAX)));
    block_on(store.commit(SHARD, taken.epoch, vec![Change::Doubt { left_ms: None }])).unwrap();
    drop(store);
    let (_, taken) = scene.start();
    assert_eq!((taken.doubt, taken.metadata.doubt), (None, None));
}

#[test]
fn a_first_start_makes_nobody_wait() {
    let scene = Scene::new();
    // Opened, but never taken, as if it had crashed there; twice.
    drop(scene.open());
    drop(scene.open());
    scene.work(vec![member("gpu-7")]);
}

#[test]
fn a_restart_makes_nobody_wait() {
    let scene = Scene::new();
    for n in 0..5 {
        scene.work(vec![member(&format!("gpu-{n}")), stopped()]);
        scene.work(vec![Change::Seq { next: n }]);
    }
    // A store that fails is opened again by the next take.
    let (store, taken) = scene.start();
    drop(store.clone());
    assert_eq!(taken.metadata.members.len(), 5);
    assert_eq!(take(&store).doubt, None);
}

#[test]
fn a_copy_from_before_a_worker_joined_is_noticed() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    let (store, taken) = scene.start();
    scene.back_up("backup");
    // In the life of one server: its take is in the copy, what joins now is not.
    block_on(store.commit(SHARD, taken.epoch, vec![member("gpu-8")])).unwrap();
    drop(store);
    scene.restore("backup");
    let file = scene.file();
    is_in_doubt(&scene, |doubt| *doubt == Doubt::Behind { file: file.clone(), store: 4, witness: 5 });
}

#[test]
fn a_copy_from_before_a_take_is_noticed() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("backup");
    drop(scene.start());
    scene.restore("backup");
    is_in_doubt(&scene, |doubt| matches!(doubt, Doubt::Behind { .. }));
}

/// It says that nothing runs but what it lists, which was true then.
#[test]
fn a_copy_with_the_mark_of_a_good_stop_is_noticed() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7"), stopped()]);
    scene.back_up("backup");
    scene.work(vec![Change::Stopped { stopped: false }, member("gpu-8")]);
    scene.restore("backup");
    let store = scene.open();
    let taken = take(&store);
    assert!(taken.metadata.stopped && taken.metadata.doubt == Some(u64::MAX), "{:?}", taken.doubt);
}

/// What it lacks was never acknowledged, or is of tasks alone.
#[test]
fn a_copy_that_lacks_no_worker_is_not_in_doubt() {
    let scene = Scene::new();
    let (store, taken) = scene.start();
    block_on(store.commit(SHARD, taken.epoch, vec![member("gpu-7")])).unwrap();
    scene.back_up("backup");
    block_on(store.commit(SHARD, taken.epoch, plan::changes(1))).unwrap();
    drop(store);
    scene.restore("backup");
    scene.work(Vec::new());
}

/// The first is put back, and then the second, which went its own way before. Both have drawn as many stamps.
#[test]
fn two_copies_in_turn_are_told_apart() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("first");
    drop(scene.start());
    scene.back_up("second");
    scene.restore("first");
    is_in_doubt(&scene, |_| true);
    scene.back_up("first");
    scene.restore("second");
    is_in_doubt(&scene, |_| true);
    scene.restore("first");
    is_in_doubt(&scene, |_| true);
}

/// A crash left the store ahead of its witness; then a copy goes on, to the same number.
#[test]
fn a_store_that_was_ahead_is_old_once_a_copy_went_on() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    let before = fs::read(scene.file()).unwrap();
    scene.back_up("copy");
    drop(scene.start());
    scene.back_up("ahead");
    // As if the process had died between the two writes of that take.
    fs::write(scene.file(), &before).unwrap();
    scene.restore("copy");
    scene.work(Vec::new());
    scene.restore("ahead");
    is_in_doubt(&scene, |doubt| matches!(doubt, Doubt::Behind { store, witness, .. } if store == witness));
}

#[test]
fn a_lost_witness_is_noticed_and_made_anew() {
    let scene = Scene::new();
    for _ in 0..2 {
        scene.work(vec![member("gpu-7")]);
        let file = scene.file();
        fs::remove_dir_all(scene.witness()).unwrap();
        // Opening makes one; that alone must not be enough.
        drop(scene.open());
        is_in_doubt(&scene, |doubt| matches!(doubt, Doubt::Behind { .. }));
        fs::remove_file(&file).unwrap();
        is_in_doubt(&scene, |doubt| *doubt == Doubt::Missing { file: file.clone() });
    }
}

#[test]
fn garbage_in_the_place_of_the_witness_is_noticed_and_replaced() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    let good = fs::read(scene.file()).unwrap();
    let text = String::from_utf8(good.clone()).unwrap();
    let mut garbage: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0; 4096],
        vec![0xff; 100],
        b"evenhand witness 1\n".to_vec(),
        b"evenhand witness 1\nstamp 1 2\n".to_vec(),
        b"evenhand witness 1\nstamp 99999999999999999999999 0000000000000000\n".to_vec(),
        text.replacen("witness 1", "witness 2", 1).into_bytes(),
        "x".repeat(100_000).into_bytes(),
    ];
    garbage.extend((0..text.find("\n\n").unwrap()).map(|end| good[..end].to_vec()));
    for garbage in garbage {
        fs::write(scene.file(), &garbage).unwrap();
        let (store, taken) = scene.start();
        let file = scene.file();
        let said = matches!(&taken.doubt, Some(Doubt::Unreadable { file: of, .. }) if *of == file);
        assert!(said, "{:?} for {}", taken.doubt, garbage.escape_ascii());
        block_on(store.commit(SHARD, taken.epoch, vec![Change::Doubt { left_ms: None }])).unwrap();
        drop(store);
        scene.work(Vec::new());
    }
    // Any other stamp is another one.
    for at in "evenhand witness 1\nstamp ".len()..text.find("\n\n").unwrap() {
        let mut changed = fs::read(scene.file()).unwrap();
        changed[at] ^= 1;
        fs::write(scene.file(), &changed).unwrap();
        is_in_doubt(&scene, |_| true);
    }
}

#[test]
fn a_directory_without_a_witness_is_in_doubt_when_it_gets_one() {
    let scene = Scene::new();
    let without = || Embedded::open(scene.dir(), small(SEGMENT)).unwrap();
    for _ in 0..2 {
        let taken = take(&without());
        assert_eq!((taken.doubt, taken.metadata.doubt), (None, None));
    }
    assert!(!scene.witness().exists());
    is_in_doubt(&scene, |doubt| *doubt == Doubt::Unwitnessed);

    let old = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats/1");
    fs::remove_dir_all(scene.dir()).unwrap();
    copy(&old, &scene.dir());
    is_in_doubt(&scene, |doubt| *doubt == Doubt::Unwitnessed);
}

#[test]
fn another_store_at_the_same_place_is_new() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("first");
    fs::remove_dir_all(scene.dir()).unwrap();
    scene.work(vec![member("gpu-8")]);
    scene.work(Vec::new());
    // Each has a witness of its own, so the first one is still what its own saw last.
    scene.restore("first");
    scene.work(Vec::new());
}

#[test]
fn a_store_that_was_moved_takes_its_witness_along() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("backup");
    scene.work(vec![member("gpu-8")]);
    let moved = scene.path("moved");
    fs::rename(scene.dir(), &moved).unwrap();
    let there = |dir: &Path| take(&Embedded::open(dir, scene.options()).unwrap());
    assert_eq!(there(&moved).doubt, None);
    assert!(fs::read_to_string(scene.file()).unwrap().contains(moved.to_str().unwrap()));
    // And an old copy is one wherever it is.
    assert!(there(&scene.path("backup")).doubt.is_some());
}

/// The frame that settles the witness says it of them all.
#[test]
fn every_shard_of_an_old_copy_is_in_doubt() {
    let scene = Scene::new();
    let [one, two, three] = [ShardId(1), ShardId(2), ShardId(u32::MAX)];
    let store = scene.open();
    for shard in [one, two] {
        block_on(store.take(shard, None)).unwrap();
    }
    drop(store);
    scene.back_up("backup");
    block_on(scene.open().take(three, None)).unwrap();
    scene.restore("backup");
    assert!(block_on(scene.open().take(one, None)).unwrap().doubt.is_some());
    let store = scene.open();
    let taken = block_on(store.take(two, None)).unwrap();
    assert_eq!((taken.doubt, taken.metadata.doubt), (None, Some(u64::MAX)));
    // A shard that the copy lacks may have been there, too.
    for doubt in [Some(Doubt::Shard), None] {
        let taken = block_on(store.take(three, None)).unwrap();
        assert_eq!((taken.doubt, taken.metadata.doubt), (doubt, Some(u64::MAX)));
    }
}

/// A commit that comes before a take, of an owner that lives on, must not settle the witness without a word.
#[test]
fn an_old_copy_is_in_doubt_whatever_is_written_first() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("backup");
    scene.work(Vec::new());
    scene.restore("backup");
    block_on(scene.open().commit(SHARD, Epoch(1), vec![member("gpu-8")])).unwrap();
    assert_eq!(scene.start().1.metadata.doubt, Some(u64::MAX));
}

#[test]
fn an_epoch_that_a_worker_has_shown_is_the_reason_that_counts() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("backup");
    scene.work(Vec::new());
    scene.restore("backup");
    let taken = block_on(scene.open().take(SHARD, Some(Epoch(9)))).unwrap();
    let doubt = taken.doubt.unwrap();
    assert_eq!(doubt, Doubt::Shown { shown: Epoch(9), current: Epoch(1) });
    assert_eq!(doubt.to_string(), "a worker has obeyed epoch 9, and the store is at 1");
    assert_eq!((taken.epoch, taken.metadata.doubt), (Epoch(10), Some(u64::MAX)));
}

/// The content of the witness after each commit: those that change it, and no others.
#[test]
fn commits_of_tasks_do_not_touch_the_witness() {
    let scene = Scene::new();
    let (store, taken) = scene.start();
    let file = scene.file();
    let state = || (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().modified().unwrap());
    let mut last = state();
    let mut drawn = 0;
    for n in 1..=200 {
        let changes = plan::changes(n);
        let witnessed = changes
            .iter()
            .any(|change| matches!(change, Change::Member { record: Some(_), .. } | Change::Stopped { .. }));
        block_on(store.commit(SHARD, taken.epoch, changes)).unwrap();
        let now = state();
        assert_eq!(now != last, witnessed, "commit {n}");
        drawn += u32::from(witnessed);
        last = now;
    }
    assert!(drawn > 30, "{drawn}");
    drop(store);
    let info = embedded::info(scene.dir(), &mut |_, _| {}).unwrap();
    let witness = info.witness.unwrap();
    assert_eq!(file, scene.witness().join(witness.file));
    assert_eq!(witness.stamp, u64::from(drawn) + 2, "one when it was made, one for the take");
}

#[test]
fn a_directory_that_cannot_be_used_is_named_with_what_to_do() {
    let scene = Scene::new();
    drop(scene.open());
    let refused = |witness: &Path, what: &str| {
        let options = Options { witness: Some(witness.into()), ..small(SEGMENT) };
        let error = Embedded::open(scene.dir(), options).unwrap_err();
        let text = error.to_string();
        assert!(matches!(&error, DirError::Witness { dir, .. } if dir == witness), "{text}");
        assert!(text.contains(witness.to_str().unwrap()) && text.contains("--witness"), "{text}");
        assert!(text.contains(what), "{text}");
    };
    fs::write(scene.path("file"), "mine").unwrap();
    refused(&scene.path("file"), "File exists");
    refused(&scene.path("file/below"), "Not a directory");
    refused(&scene.dir(), "inside");
    refused(&scene.dir().join("tables/../witness"), "inside");
    let disk = Disk::new(MIB);
    let witness = disk.store().join("witness");
    fs::create_dir_all(&witness).unwrap();
    disk.remount("ro");
    refused(&witness, "Read-only file system");
    disk.remount("rw");
    assert_eq!(take(&scene.open()).doubt, None);
}

/// Something is in the way of the file itself: it can neither be read nor replaced.
#[test]
fn a_directory_in_the_place_of_the_witness_is_named() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    let file = scene.file();
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let error = Embedded::open(scene.dir(), scene.options()).unwrap_err();
    assert!(matches!(error, DirError::Witness { .. }) && error.to_string().contains(file.to_str().unwrap()));
}

#[test]
fn nothing_is_acknowledged_that_the_witness_does_not_know() {
    let scene = Scene::new();
    let disk = Disk::new(MIB);
    let options = || Options { witness: Some(disk.store()), ..small(SEGMENT) };
    let store = Embedded::open(scene.dir(), options()).unwrap();
    let taken = take(&store);
    disk.remount("ro");
    // Tasks need no witness.
    block_on(store.commit(SHARD, taken.epoch, plan::changes(1))).unwrap();
    let unavailable = |answer: Result<(), StoreError>| {
        let error = answer.unwrap_err();
        let says = error.to_string().contains(disk.store().to_str().unwrap());
        assert!(matches!(error, StoreError::Unavailable { .. }) && says, "{error}");
    };
    unavailable(block_on(store.commit(SHARD, taken.epoch, vec![member("gpu-7")])));
    unavailable(block_on(store.commit(SHARD, taken.epoch, plan::changes(2))));
    for _ in 0..3 {
        unavailable(block_on(store.take(SHARD, None)).map(drop));
    }
    disk.remount("rw");
    // It may or may not have happened; nobody was told. That is no reason for doubt.
    let taken = take(&store);
    assert_eq!((taken.doubt, taken.metadata.doubt), (None, None));
    block_on(store.commit(SHARD, taken.epoch, vec![member("gpu-7")])).unwrap();

    // The same with a full disk.
    let ballast = disk.store().join("ballast");
    let full = fs::write(&ballast, vec![1; 2 * MIB as usize]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    unavailable(block_on(store.commit(SHARD, taken.epoch, vec![member("gpu-8")])));
    unavailable(block_on(store.take(SHARD, None)).map(drop));
    fs::remove_file(&ballast).unwrap();
    assert_eq!(take(&store).doubt, None);
}

/// The store fails and is opened again, as after a failed sync of its own; that is no reason for doubt.
#[test]
fn after_a_failed_sync_of_the_witness_the_owner_takes_again_and_nothing_is_lost() {
    for when in 2..=6 {
        let scene = Scene::new();
        fs::create_dir(scene.witness()).unwrap();
        let (witness, inject) = (scene.witness(), format!("inject=fsync:error=EIO:when={when}"));
        let witness = witness.to_str().unwrap();
        let strace = ["-o", "/dev/null", "-P", witness, "-e", "trace=fsync", "-e", &inject];
        let options = ["--commits", "60", "--witness", witness];
        let (status, last, failures) = Committer::traced(&strace, &scene.dir(), &options).end();
        assert!(status.success() && last == 60, "{inject}: {status}, {last}, {failures:?}");
        let says = |what: &String| what.contains(witness) && what.contains("--witness");
        assert!(!failures.is_empty() && failures.iter().all(says), "{inject}: {failures:?}");
        assert_eq!(Model::default().check_dir(&scene.dir(), SEGMENT), 60);
        assert_eq!(scene.start().1.doubt, None, "{inject}");
    }
}

/// Killed at every call that changes a disk, while it opens, takes and commits, with workers that join. It is never in
/// doubt afterwards; a copy from before is, if it lacks anything that was acknowledged.
#[test]
fn a_kill_at_any_step_leaves_the_newest_trusted_and_old_copies_not() {
    let scene = Scene::new();
    let (mut acked, mut killed, mut old) = (0, 0, 0);
    // A copy of a store that nobody has used is as good as a new one.
    let mut used = false;
    for (call, most) in [("fsync", 30), ("rename", 20), ("fdatasync", 16), ("write", 16), ("pwrite64", 16)] {
        for when in 1..=most {
            let case = format!("{call} {when}");
            let before = Scene::new();
            if scene.dir().exists() {
                copy(&scene.dir(), &before.dir());
            }
            let inject = format!("inject={call}:signal=SIGKILL:when={when}");
            let strace = ["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject];
            let (segment, commits) = (SEGMENT.to_string(), (acked + 12).to_string());
            let witness = scene.witness();
            let options =
                ["--segment", &segment, "--commits", &commits, "--witness", witness.to_str().unwrap()];
            let mut committer = Committer::traced(&strace, &scene.dir(), &options);
            let mut taken = false;
            while let Some(line) = committer.line() {
                taken |= line.starts_with("holds ");
            }
            let (status, last, failures) = committer.end();
            assert!(failures.is_empty(), "{case}: {failures:?}");
            killed += u32::from(!status.success());
            acked = acked.max(last);

            // What was acknowledged, a copy from before lacks.
            if taken && used {
                copy(&scene.witness(), &before.witness());
                assert!(before.start().1.doubt.is_some(), "{case}: the copy from before is trusted");
                old += 1;
            }
            used |= taken;
            // The store itself is fine, in a copy, so that the next round finds it as the kill left it.
            let copied = Scene::new();
            copy(&scene.dir(), &copied.dir());
            if scene.witness().exists() {
                copy(&scene.witness(), &copied.witness());
            }
            let (_, taken) = copied.start();
            assert_eq!(taken.doubt, None, "{case}");
            acked = acked.max(plan::last_commit(taken.metadata.next_seq));
        }
    }
    assert!(killed > 50 && old > 50, "only {killed} were killed, and {old} copies were old");
}

/// The same while it finds out that it is an old copy: it stays in doubt, whatever was written last.
#[test]
fn a_kill_at_any_step_leaves_an_old_copy_in_doubt() {
    let scene = Scene::new();
    scene.work(vec![member("gpu-7")]);
    scene.back_up("backup");
    scene.work(vec![member("gpu-8")]);
    let mut killed = 0;
    for (call, most) in [("fsync", 24), ("rename", 14), ("fdatasync", 6), ("write", 16), ("pwrite64", 8)] {
        for when in 1..=most {
            for lost in [false, true] {
                let case = format!("{call} {when}, witness lost: {lost}");
                let copied = Scene::new();
                copy(&scene.path("backup"), &copied.dir());
                if !lost {
                    copy(&scene.witness(), &copied.witness());
                }
                let inject = format!("inject={call}:signal=SIGKILL:when={when}");
                let strace = ["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject];
                let witness = copied.witness();
                let options = ["--commits", "0", "--witness", witness.to_str().unwrap()];
                let (status, ..) = Committer::traced(&strace, &copied.dir(), &options).end();
                killed += u32::from(!status.success());
                let (_, taken) = copied.start();
                assert_eq!(taken.metadata.doubt, Some(u64::MAX), "{case}");
                // And the newest is not what this witness saw last, once the old copy was taken.
                copy(&scene.dir(), &copied.path("newest"));
                let newest = Embedded::open(copied.path("newest"), copied.options()).unwrap();
                assert!(take(&newest).doubt.is_some(), "{case}");
            }
        }
    }
    assert!(killed > 40, "only {killed} were killed");
}
