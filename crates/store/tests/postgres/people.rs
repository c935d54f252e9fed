//! What people see: the views, with SQL; and what they are told when a row makes no sense or the disk is full.

use evenhand_core::backlog::Level;
use evenhand_core::change::{Place, Timed};
use evenhand_core::names::{Millis, TaskId};
use evenhand_core::timers::moment;
use evenhand_core::{Change, Task};
use evenhand_store::{Memory, Postgres, Store, StoreError, ready};

use crate::cluster::{SHARED, block_on, fresh_schema, open};
use crate::plan::{self, LANE, SHARD};

/// A store with so many commits of the plan in it.
async fn planned(schema: &str, commits: u64) -> Postgres {
    let store = open(&SHARED.address(schema)).await;
    let epoch = store.take(SHARD, None).await.unwrap().epoch;
    for n in 1..=commits {
        store.commit(SHARD, epoch, plan::changes(n)).await.unwrap();
    }
    store
}

/// Against what the store in memory says after the same commits.
#[test]
fn views_show_what_waits_runs_and_failed() {
    const COMMITS: u64 = 100;
    let (schema, memory) = (fresh_schema(), Memory::default());
    let store = block_on(planned(&schema, COMMITS));
    let epoch = ready(memory.take(SHARD, None)).unwrap().epoch;
    for n in 1..=COMMITS {
        ready(memory.commit(SHARD, epoch, plan::changes(n))).unwrap();
    }
    let count = |is: fn(&Task) -> bool| {
        memory.look(SHARD, |tables| tables.tasks.values().filter(|task| is(task)).count())
    };
    let parked = count(|task| matches!(task.place, Place::Parked(_)));
    let queued = count(|task| matches!(task.place, Place::Lane(_)));
    let scheduled = count(|task| matches!(task.place, Place::Timer(_)));
    let (long, stopping) = memory.look(SHARD, |tables| {
        let others = tables.canceling.iter().filter(|task| !tables.aside.contains(task));
        (tables.aside.len(), others.count())
    });
    assert!([parked, queued, scheduled, long, stopping].iter().all(|n| *n > 0), "there is one of each");

    let ask = |question: &str| SHARED.sql(&format!("SET search_path = {schema}; {question}"));
    let states = ask("SELECT state, count(*) FROM waiting GROUP BY state ORDER BY state");
    assert_eq!(states, format!("parked|{parked}\nqueued|{queued}\nscheduled|{scheduled}"));
    assert_eq!(ask("SELECT DISTINCT queue FROM waiting"), "render");
    let known = ask("SELECT known, count(*) FROM running GROUP BY known ORDER BY known");
    assert_eq!(known, format!("runs long|{long}\nto be stopped|{stopping}"));
    assert_eq!(ask("SELECT count(*) FROM failed"), "0");
    let rows = ask("SELECT count(*) = count(DISTINCT key), sum(queued_or_running) FROM per_key");
    let kept: u64 =
        memory.look(SHARD, |tables| tables.keys.values().map(|record| u64::from(record.rows)).sum());
    assert_eq!(rows, format!("t|{kept}"));
    ask("UPDATE tasks SET outcome = 1, last_error = 'no luck' WHERE place = 4");
    assert_eq!(ask("SELECT DISTINCT error, failed_at > '1970-01-01' FROM failed"), "no luck|t");
    drop(store);
}

/// To the tenth of a second that a timer is set for.
#[test]
fn a_task_that_waits_for_a_time_says_which() {
    let schema = fresh_schema();
    block_on(async {
        let store = planned(&schema, 1).await;
        let epoch = store.take(SHARD, None).await.unwrap().epoch;
        let Some(Change::Accepted(task)) = plan::changes(1).into_iter().next() else { panic!("no task") };
        for (id, ms) in [(100, 1_800_000_000_000), (101, 1_800_000_000_101)] {
            let at = moment(Millis(ms), &Timed::Due(LANE, task.row_at(Level::ZERO)), id);
            let task = Task { id: TaskId(id), place: Place::Timer(at), ..task.clone() };
            store.commit(SHARD, epoch, vec![Change::Accepted(task)]).await.unwrap();
        }
    });
    let due = SHARED.sql(&format!(
        "SET timezone = 'UTC'; SELECT due_at FROM {schema}.waiting WHERE id IN (100, 101) ORDER BY id"
    ));
    assert_eq!(due, "2027-01-15 08:00:00+00\n2027-01-15 08:00:00.2+00");
}

#[test]
fn a_row_that_makes_no_sense_is_named() {
    let schema = fresh_schema();
    block_on(async {
        let store = planned(&schema, 1).await;
        SHARED.sql(&format!("UPDATE {schema}.tasks SET terms = '\\xff' WHERE id = 1"));
        let answer = store.read_task(SHARD, TaskId(1)).await.unwrap_err();
        assert_eq!(
            answer,
            StoreError::Corrupt { what: "a row of tasks (id 1) cannot be what was written".into() }
        );
        SHARED.sql(&format!("UPDATE {schema}.lanes SET ack = '\\x00'"));
        let answer = store.take(SHARD, None).await.unwrap_err();
        assert!(
            matches!(&answer, StoreError::Corrupt { what } if what.contains("lanes (queue 0)")),
            "{answer}"
        );
    });
}

/// A full disk is told as such, and nothing was changed; there is no room until something could be written again.
#[test]
fn a_full_disk_is_no_room_until_there_is_some() {
    let schema = fresh_schema();
    block_on(async {
        let store = planned(&schema, 3).await;
        let epoch = store.take(SHARD, None).await.unwrap().epoch;
        SHARED.sql(&format!(
            "CREATE FUNCTION {schema}.full_disk() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
             CREATE TRIGGER full_disk BEFORE INSERT ON {schema}.tasks EXECUTE FUNCTION {schema}.full_disk()"
        ));
        assert_eq!(store.room(), Ok(()));
        let answer = store.commit(SHARD, epoch, plan::changes(4)).await.unwrap_err();
        assert!(matches!(answer, StoreError::Full { .. }), "{answer}");
        assert_eq!(store.room(), Err(answer));
        assert_eq!(plan::last_commit(store.take(SHARD, None).await.unwrap().metadata.next_seq), 3);
        SHARED.sql(&format!("DROP TRIGGER full_disk ON {schema}.tasks"));
        let epoch = store.take(SHARD, None).await.unwrap().epoch;
        store.commit(SHARD, epoch, plan::changes(4)).await.unwrap();
        assert_eq!(store.room(), Ok(()));
    });
}

/// What is acknowledged is durable, whatever the database, the role or the address says by default.
#[test]
fn a_commit_waits_for_the_disk_even_where_others_do_not() {
    let schema = fresh_schema();
    let epoch =
        block_on(async { open(&SHARED.address(&schema)).await.take(SHARD, None).await.unwrap().epoch });
    let said = SHARED.sql(&format!(
        "SET synchronous_commit = off; BEGIN;
         SELECT {schema}.fence(0, {epoch}, true, 7, NULL, false, NULL, NULL, NULL, NULL);
         SHOW synchronous_commit; COMMIT; SHOW synchronous_commit;
         BEGIN; SELECT 0 FROM {schema}.take(0, NULL); SHOW synchronous_commit; COMMIT"
    ));
    assert_eq!(said, "0\non\noff\n0\non");
}
