//! Outages: connections that are cut, servers that crash or do not answer, and standbys that are promoted. Whatever
//! happens, what was acknowledged is there, what was not is there in full or not at all, and the store goes on by itself.

use std::time::Duration;

use evenhand_core::Change;
use evenhand_core::names::{ShardId, TaskId};
use evenhand_store::postgres::Options;
use evenhand_store::{Doubt, Memory, Postgres, Store, StoreError, ready};
use tokio_postgres::NoTls;

use crate::cluster::{Cluster, SHARED, block_on, fresh_schema, open};
use crate::contents::read_all;
use crate::plan::{self, LANE, SHARD};

/// Asserts that a store holds so many commits of the plan, each in full.
async fn holds(store: &Postgres, commits: u64) {
    let memory = Memory::default();
    let epoch = ready(memory.take(SHARD, None)).unwrap().epoch;
    for n in 1..=commits {
        ready(memory.commit(SHARD, epoch, plan::changes(n))).unwrap();
    }
    let expected = ready(read_all(&memory, SHARD, &[LANE], 1_000)).unwrap().1;
    let mut found = read_all(store, SHARD, &[LANE], 1_000).await.unwrap().1;
    found.metadata.members.sort_by(|(a, _), (b, _)| a.cmp(b));
    assert!(found == expected, "not what {commits} commits leave");
}

/// Takes the shard as an owner does that lost it: again and again until it is answered. Returns the last commit.
async fn taken(store: &Postgres) -> (evenhand_core::names::Epoch, u64) {
    for _ in 0..100 {
        match store.take(SHARD, None).await {
            Ok(taken) => return (taken.epoch, plan::last_commit(taken.metadata.next_seq)),
            Err(StoreError::Unavailable { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    panic!("the store does not come back");
}

#[test]
fn a_cut_connection_comes_back_by_itself() {
    let schema = fresh_schema();
    block_on(async {
        let store = open(&format!("{}&application_name={schema}", SHARED.address(&schema))).await;
        let (mut epoch, mut last) = taken(&store).await;
        for _ in 0..10 {
            for _ in 0..3 {
                match store.commit(SHARD, epoch, plan::changes(last + 1)).await {
                    Ok(()) => last += 1,
                    Err(StoreError::Unavailable { .. }) => {
                        let (now, found) = taken(&store).await;
                        assert!(found == last || found == last + 1, "{found} commits after {last}");
                        (epoch, last) = (now, found);
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            let cut = SHARED.sql(&format!(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{schema}'"
            ));
            assert_ne!(cut, "0", "there was something to cut");
            // A read does not even notice.
            assert!(store.read_task(SHARD, TaskId(4)).await.unwrap().is_some());
        }
        assert!(last >= 20, "only {last} commits");
        holds(&store, last).await;
    });
}

#[test]
fn what_was_acknowledged_outlives_a_crash_of_the_server() {
    let cluster = Cluster::start();
    block_on(async {
        let store = open(&cluster.address("evenhand")).await;
        let (mut epoch, mut last) = taken(&store).await;
        for round in 1..=4 {
            for _ in 0..30 {
                store.commit(SHARD, epoch, plan::changes(last + 1)).await.unwrap();
                last += 1;
            }
            // With a commit on its way, every other time.
            let (late, crash) = (store.commit(SHARD, epoch, plan::changes(last + 1)), async {
                if round % 2 == 0 {
                    tokio::task::yield_now().await;
                }
                cluster.crash();
            });
            let (answer, ()) = tokio::join!(late, crash);
            let down = store.read_task(SHARD, TaskId(4)).await;
            assert!(matches!(down, Err(StoreError::Unavailable { .. })), "{down:?}");
            cluster.control(&["start"]);
            let (now, found) = taken(&store).await;
            match answer {
                Ok(()) => assert_eq!(found, last + 1),
                Err(StoreError::Unavailable { .. }) => assert!(found == last || found == last + 1),
                Err(other) => panic!("{other}"),
            }
            (epoch, last) = (now, found);
            holds(&store, last).await;
            epoch = taken(&store).await.0.max(epoch);
        }
    });
}

/// Somebody sits on the shard's row. The caller is told in time, and what it asked for does not happen later.
#[test]
fn a_commit_that_is_not_answered_is_given_up() {
    let schema = fresh_schema();
    block_on(async {
        let options = Options { limit: Duration::from_millis(300), ..Options::default() };
        let patient = open(&SHARED.address(&schema)).await;
        let store = Postgres::open(&SHARED.address(&schema), options).await.unwrap();
        let epoch = store.take(SHARD, None).await.unwrap().epoch;
        store.commit(SHARD, epoch, plan::changes(1)).await.unwrap();

        let address = SHARED.address(&schema);
        let (mut client, connection) =
            tokio_postgres::connect(address.split('?').next().unwrap(), NoTls).await.unwrap();
        tokio::spawn(connection);
        let sitting = client.transaction().await.unwrap();
        sitting.batch_execute(&format!("SELECT 0 FROM {schema}.shards FOR UPDATE")).await.unwrap();
        let answer = store.commit(SHARD, epoch, plan::changes(2)).await.unwrap_err();
        assert!(
            matches!(&answer, StoreError::Unavailable { what } if what.contains("no answer")),
            "{answer}"
        );
        assert!(store.take(SHARD, None).await.is_err());
        // Reads do not wait for it.
        assert!(store.read_task(SHARD, TaskId(1)).await.unwrap().is_some());
        sitting.rollback().await.unwrap();

        let found = taken(&patient).await.1;
        assert!(found == 1 || found == 2, "{found} commits");
        holds(&patient, found).await;
        holds(&store, found).await;
    });
}

/// A standby that was promoted may lack what was acknowledged: whoever takes a shard is told, once, and whoever took it
/// before may not go on.
#[test]
fn another_timeline_is_doubt_for_every_shard() {
    let cluster = Cluster::start();
    let (one, two, three) = (ShardId(1), ShardId(2), ShardId(3));
    let next = |next| vec![Change::Seq { next }];
    block_on(async {
        let store = open(&cluster.address("evenhand")).await;
        let owner = store.take(one, None).await.unwrap();
        assert_eq!((store.take(two, None).await.unwrap().doubt, owner.doubt), (None, None));
        store.commit(one, owner.epoch, next(5)).await.unwrap();
        // A restart alone is none.
        cluster.control(&["restart", "-m", "fast"]);
        let mut again = store.take(one, None).await;
        while matches!(again, Err(StoreError::Unavailable { .. })) {
            again = store.take(one, None).await;
        }
        let owner = again.unwrap();
        assert_eq!((owner.doubt, owner.metadata.doubt), (None, None));

        cluster.promote();
        let mut refused = store.commit(one, owner.epoch, next(6)).await.unwrap_err();
        for _ in 0..2 {
            // The connection may have been lost first.
            refused = store.commit(one, owner.epoch, next(6)).await.unwrap_err();
        }
        assert!(
            matches!(&refused, StoreError::Unavailable { what } if what.contains("timeline")),
            "{refused}"
        );
        assert!(store.commit(one, owner.epoch, vec![]).await.is_err(), "not even a commit of nothing");

        let mut again = store.take(one, None).await;
        while matches!(again, Err(StoreError::Unavailable { .. })) {
            again = store.take(one, None).await;
        }
        let owner = again.unwrap();
        assert!(
            matches!(&owner.doubt, Some(Doubt::Cluster { before, now })
            if before.ends_with("timeline 1") && now.ends_with("timeline 2")),
            "{:?}",
            owner.doubt
        );
        assert_eq!((owner.metadata.doubt, owner.metadata.next_seq), (Some(u64::MAX), 5));
        store.commit(one, owner.epoch, vec![Change::Doubt { left_ms: None }]).await.unwrap();
        let owner = store.take(one, None).await.unwrap();
        assert_eq!((owner.doubt, owner.metadata.doubt), (None, None));
        let other = store.take(two, None).await.unwrap();
        assert_eq!((other.doubt, other.metadata.doubt), (None, Some(u64::MAX)));
        let new = store.take(three, None).await.unwrap();
        assert_eq!((new.doubt, new.metadata.doubt), (Some(Doubt::Shard), Some(u64::MAX)));
    });
}
