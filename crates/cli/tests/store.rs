//! `evenhand store` as people use it: on a store that is whole, on one that is not, on what is no store.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use evenhand_core::backlog::{Charge, Cost, Level, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, Place, QueueRecord, Totals};
use evenhand_core::names::{
    Class, ContentType, Key, LaneId, Millis, Priority, QueueId, QueueName, ShardId, TaskId,
};
use evenhand_core::{Change, Task};
use evenhand_store::embedded::Options;
use evenhand_store::{Embedded, Store, wait};
use expect_test::{Expect, expect};
use tempfile::TempDir;

/// A store with three tasks of one queue.
fn given() -> TempDir {
    let dir = TempDir::new().unwrap();
    let store =
        Embedded::open(dir.path(), Options { segment: 1 << 16, floor: 0, ..Options::default() }).unwrap();
    let epoch = wait(store.take(ShardId(0), None)).unwrap().epoch;
    let lane = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };
    let key = Key::new("acme").unwrap();
    let mut changes: Vec<Change> = (1..=3)
        .map(|id| {
            Change::Accepted(Task {
                id: TaskId(id),
                lane,
                place: Place::Lane(Level::new(Default::default(), id)),
                key: key.clone(),
                charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
                attempt: 1,
                max_attempts: 1,
                lost: 0,
                terms: None,
                replay_of: None,
                files: Default::default(),
                accepted: Millis(0),
                content_type: ContentType::default(),
                payload: [7; 100].into(),
            })
        })
        .collect();
    let totals = Totals { accepted: 3, ..Totals::default() };
    let record = KeyRecord {
        finish: Default::default(),
        due: Default::default(),
        rows: 3,
        chained: 3,
        refund: Default::default(),
        credit: Default::default(),
        average: Default::default(),
        weight: Weight::ONE,
    };
    let max = Level::new(Default::default(), 3);
    changes.extend([
        Change::Queue {
            queue: QueueId(0),
            record: QueueRecord {
                name: QueueName::new("render").unwrap(),
                totals,
                average: Default::default(),
            },
        },
        Change::Lane { lane, record: LaneRecord { max, ..LaneRecord::default() } },
        Change::Key { lane, key, record: Some(record) },
        Change::Seq { next: 4 },
    ]);
    wait(store.commit(ShardId(0), epoch, changes)).unwrap();
    dir
}

/// What `evenhand store COMMAND DIR` prints, standard error after standard output, and how it ends.
fn run(command: &str, dir: &Path) -> (String, i32) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_evenhand")).args(["store", command]).arg(dir).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap().replace(dir.to_str().unwrap(), "DIR");
    (text, output.status.code().unwrap())
}

fn check(command: &str, dir: &Path, code: i32, expected: &Expect) {
    let (text, ended) = run(command, dir);
    expected.assert_eq(&text);
    assert_eq!(ended, code);
}

#[test]
fn a_whole_store_is_said_to_be_whole() {
    check(
        "check",
        given().path(),
        0,
        &expect![[r#"
            DIR is whole: 1 file, 904 B, 3 tasks (3 in lanes, 0 ended), 0 timers
        "#]],
    );
}

#[test]
fn info_shows_queues_tables_and_log() {
    check(
        "info",
        given().path(),
        0,
        &expect![[r#"
            DIR: store format 4, 128.2 KiB
            2 commits, 2 of them in the log alone (128.0 KiB)

              kind     tables  layers  puts  deletes  size
              rows          0       0     0        0   0 B
              tasks         0       0     0        0   0 B
              records       0       0     0        0   0 B

            shard 0: epoch 1, next seq 4, 1 key remembered, 0 tasks set aside
              queue   unfinished  accepted  succeeded  failed  canceled  lanes  keys
              render           3         3          0       0         0      1     1
        "#]],
    );
}

#[test]
fn damage_is_named_with_file_and_place() {
    let dir = given();
    let file = dir.path().join("manifest");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    check(
        "check",
        dir.path(),
        1,
        &expect![[r#"
        DIR is damaged:
          DIR/manifest is damaged at byte 0: its checksum is wrong. Restore the directory from a backup
    "#]],
    );
    check(
        "info",
        dir.path(),
        1,
        &expect![[r#"
        evenhand: DIR/manifest is damaged at byte 0: its checksum is wrong. Restore the directory from a backup
    "#]],
    );
}

#[test]
fn what_is_no_store_is_said_to_be_none_and_left_alone() {
    let dir = TempDir::new().unwrap();
    check(
        "check",
        &dir.path().join("nowhere"),
        1,
        &expect![[r#"
        evenhand: DIR holds no store; name the directory that the server was given
    "#]],
    );
    check(
        "info",
        dir.path(),
        1,
        &expect![[r#"
        evenhand: DIR holds no store; name the directory that the server was given
    "#]],
    );
    std::fs::write(dir.path().join("letter.txt"), "dear").unwrap();
    check(
        "check",
        dir.path(),
        1,
        &expect![[r#"
        evenhand: DIR is not an Evenhand store: it has files, but no `evenhand-store` among them; name an empty directory or a store
    "#]],
    );
    assert_eq!(dir.path().read_dir().unwrap().count(), 1);
}

#[test]
fn a_store_that_is_open_is_not_looked_into() {
    let dir = given();
    let _open =
        Embedded::open(dir.path(), Options { segment: 1 << 16, floor: 0, ..Options::default() }).unwrap();
    check(
        "check",
        dir.path(),
        1,
        &expect![[r#"
        evenhand: DIR is open in another process; stop that one first, two cannot share a store
    "#]],
    );
}

#[test]
fn programs_get_json() {
    let dir = given();
    let json = |command: &str| -> serde_json::Value {
        let output = Command::new(env!("CARGO_BIN_EXE_evenhand"))
            .args(["store", command, "--json"])
            .arg(dir.path())
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let checked = json("check");
    assert_eq!((&checked["whole"], &checked["tasks"]), (&true.into(), &3.into()));
    assert_eq!((&checked["rows"], &checked["ended"], &checked["timers"]), (&3.into(), &0.into(), &0.into()));
    let info = json("info");
    assert_eq!(info["shards"][0]["queues"][0]["queue"], "render");
    assert_eq!(info["shards"][0]["queues"][0]["unfinished"], 3);
    assert_eq!(info["format"], 4);
}
