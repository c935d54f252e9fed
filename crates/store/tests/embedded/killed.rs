//! A process that is killed at any moment. What it acknowledged is there in full, what it did not is there
//! in full or not at all. (This says nothing about syncs: the system keeps what a dead process wrote. For
//! those see `synced`.)

use std::hint::spin_loop;

use crate::support::{Committer, Dice, Model};

/// A log so small that a few commits fill a segment.
const SEGMENT: u64 = 16 * 1024;
const ROUNDS: u64 = 200;

#[test]
fn what_was_acknowledged_before_a_kill_is_there_in_full() {
    let dir = tempfile::tempdir().unwrap();
    let mut dice = Dice(1);
    let mut model = Model::default();
    let mut acked = 0;
    for round in 0..ROUNDS {
        let mut committer = Committer::start(dir.path(), &["--segment", &SEGMENT.to_string()]);
        // Before it says a word, while it opens the store, or after some commits; and a little later.
        let lines = if dice.one_in(4) { 0 } else { 1 + dice.below(30) };
        for _ in 0..lines {
            committer.line().unwrap();
        }
        let spins = dice.below(if lines == 0 { 8_000_000 } else { 400_000 });
        (0..spins).for_each(|_| spin_loop());
        acked = committer.kill().max(acked);

        let found = model.check_dir(dir.path(), SEGMENT);
        let expected = acked..=acked + 1;
        assert!(
            expected.contains(&found),
            "round {round}: {found} commits are there, {acked} were acknowledged"
        );
        acked = found;
    }
    assert!(acked > 10 * ROUNDS, "only {acked} commits were made; the kills came too early to mean much");
}

#[test]
fn a_kill_at_any_step_to_the_disk_leaves_whole_commits() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::default();
    let (mut acked, mut killed) = (0, 0);
    // Calls are counted by thread: the first ones are those of opening, later ones come when the log is
    // written, flushed and merged.
    for (call, most) in [("fsync", 30), ("rename", 15), ("unlink", 6), ("fdatasync", 12)] {
        for when in 1..=most {
            let inject = format!("inject={call}:signal=SIGKILL:when={when}");
            let strace = ["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject];
            let (segment, commits) = (SEGMENT.to_string(), (acked + 80).to_string());
            let options = ["--segment", &segment, "--commits", &commits];
            let (status, last, failures) = Committer::traced(&strace, dir.path(), &options).end();
            assert!(failures.is_empty(), "{inject}: {failures:?}");
            killed += u32::from(!status.success());
            // It may have been killed before it said what it holds.
            acked = acked.max(last);
            let found = model.check_dir(dir.path(), SEGMENT);
            assert!(
                (acked..=acked + 1).contains(&found),
                "{inject}: {found} are there, {acked} were acknowledged"
            );
            acked = found;
        }
    }
    assert!(killed > 40, "only {killed} were killed");
}
