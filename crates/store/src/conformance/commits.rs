//! One commit: all of it, in its order, as large as the bounds allow, visible at once and durable.

use evenhand_core::backlog::{Level, Weight};
use evenhand_core::change::LaneRecord;
use evenhand_core::names::{LaneId, QueueId, ShardId};
use evenhand_core::{Change, Task, bounds};

use super::Harness;
use super::given::*;

/// Each step of a task's life, read back at once by the owner itself.
pub async fn a_read_sees_every_commit_acknowledged_before_it<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    for n in 1..=50 {
        owner.commit(vec![accepted(&task(n))]).await;
        assert_eq!(owner.task(n).await, Some(task(n)));
        assert_eq!(owner.rows(LANE).await, rows(&[task(n)]));
        assert_eq!(owner.tasks().await, [task(n)]);

        let again = retried(&task(n), at(1_000 + n));
        owner.commit(vec![requeued(&task(n), at(1_000 + n))]).await;
        assert_eq!(owner.task(n).await, Some(again.clone()));
        assert_eq!(owner.rows(LANE).await, [row(&again)]);

        owner.commit(vec![finished(&again)]).await;
        assert_eq!(owner.task(n).await, None);
        assert_eq!(owner.rows(LANE).await, []);
        assert_eq!(owner.tasks().await, []);
    }
}

/// An owner with nothing to save may still ask whether it is the owner.
pub async fn a_commit_of_no_changes_changes_nothing<H: Harness>(h: &H) {
    let store = h.fresh().await;
    Owner::new(&store).await.commit(furniture()).await;
    let before = contents(&store).await;
    Owner::new(&store).await.commit(Vec::new()).await;
    assert_eq!(contents(&store).await, before);
}

/// Changes take effect in their order: forgotten and used again is kept, used and forgotten is gone.
pub async fn the_last_change_of_a_record_in_a_commit_wins<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let queue = LANE.queue;
    owner.commit(vec![put_key(LANE, "kept", 1), put_key(LANE, "gone", 1)]).await;
    owner.commit(vec![put_override(queue, "kept", 1), put_override(queue, "gone", 1)]).await;
    owner
        .commit(vec![
            forget_key(LANE, "kept"),
            put_key(LANE, "kept", 2),
            put_key(LANE, "gone", 2),
            forget_key(LANE, "gone"),
            // The same of keys that the store has not seen before.
            forget_key(LANE, "new"),
            put_key(LANE, "new", 2),
            put_key(LANE, "new", 3),
            put_key(LANE, "never", 2),
            forget_key(LANE, "never"),
            drop_override(queue, "kept"),
            put_override(queue, "kept", 2_000),
            put_override(queue, "gone", 2_000),
            drop_override(queue, "gone"),
            acked(LANE, at(1)),
            acked(LANE, at(2)),
            put_queue(queue, "render", 1),
            put_queue(queue, "render", 2),
            Change::Seq { next: 8 },
            Change::Seq { next: 9 },
        ])
        .await;
    let metadata = Owner::new(&store).await.metadata;
    let keys = vec![(LANE, key("kept"), key_record(2)), (LANE, key("new"), key_record(3))];
    assert_eq!(metadata.keys, keys);
    let weights: Vec<_> = metadata
        .overrides
        .iter()
        .map(|(_, key, w)| (key.as_str(), w.weight.map_or(0, Weight::thousandths)))
        .collect();
    assert_eq!(weights, [("kept", 2_000)]);
    let record = LaneRecord { ack: at(2), max: at(2), ..LaneRecord::default() };
    assert_eq!(metadata.lanes, [(LANE, record)]);
    assert_eq!(metadata.queues.iter().map(|(_, q)| q.totals.accepted).collect::<Vec<_>>(), [2]);
    assert_eq!(metadata.next_seq, 9);
}

/// Nothing of a short life stays behind, whichever way it went.
pub async fn a_task_accepted_and_finished_in_one_commit_leaves_nothing<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner
        .commit(vec![
            accepted(&task(1)),
            finished(&task(1)),
            accepted(&task(2)),
            requeued(&task(2), at(5)),
            finished(&retried(&task(2), at(5))),
            accepted(&task(3)),
            set_aside(&task(3)),
            finished(&aside(&task(3))),
            accepted(&task(4)), // and a neighbour that stays
        ])
        .await;
    for n in 1..=3 {
        assert_eq!(owner.task(n).await, None);
    }
    let contents = contents(&store).await;
    assert_eq!(contents.tasks, [task(4)]);
    assert_eq!(contents.metadata.aside, []);
}

/// A row that moves twice is found where it came to rest, and nowhere else.
pub async fn a_task_may_move_several_times_in_one_commit<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&[task(1), task(2), task(3), task(4)])).await;
    let once = |n, to| retried(&task(n), at(to));
    owner
        .commit(vec![
            requeued(&task(1), at(11)),
            requeued(&once(1, 11), at(21)),
            set_aside(&task(2)),
            requeued(&aside(&task(2)), at(12)),
            requeued(&task(3), at(13)),
            set_aside(&once(3, 13)),
        ])
        .await;
    let expected = vec![retried(&once(1, 11), at(21)), once(2, 12), aside(&once(3, 13)), task(4)];
    assert_eq!(contents(&store).await.tasks, expected);
}

/// A call with as many tasks as are allowed is accepted as one, or refused as one.
pub async fn the_largest_enqueue_by_tasks_is_one_commit<H: Harness>(h: &H) {
    let many: Vec<Task> = (1..=bounds::TASKS_PER_ENQUEUE as u64).map(task).collect();
    let mut changes = accept_all(&many);
    changes.push(Change::Seq { next: many.len() as u64 + 1 });
    let store = h.fresh().await;
    let zombie = Owner::new(&store).await;
    let owner = Owner::new(&store).await;
    zombie.commit_fenced(changes.clone(), owner.epoch).await;
    let none = contents(&store).await;
    assert!(none.tasks.is_empty(), "{} tasks of a fenced commit", none.tasks.len());

    Owner::new(&store).await.commit(changes).await;
    let store = h.reopen(store).await;
    let all = contents(&store).await;
    assert!(all.tasks == many, "{} tasks of {}, or not what was accepted", all.tasks.len(), many.len());
    assert_eq!(all.metadata.next_seq, many.len() as u64 + 1);

    // And as many ends, with the ack over all of them.
    let mut ends: Vec<Change> = many.iter().map(finished).collect();
    ends.push(acked(LANE, at(many.len() as u64)));
    Owner::new(&store).await.commit(ends).await;
    let none = contents(&store).await;
    assert!(none.tasks.is_empty(), "{} tasks that ended", none.tasks.len());
}

/// The same for bytes: the largest payloads, as many as one call may bring.
pub async fn the_largest_enqueue_by_bytes_is_one_commit<H: Harness>(h: &H) {
    let count = (bounds::PAYLOAD_BYTES_PER_ENQUEUE / bounds::PAYLOAD_BYTES) as u64;
    let large = |n: u64| Task { payload: vec![n as u8; bounds::PAYLOAD_BYTES].into(), ..task(n) };
    let many: Vec<Task> = (1..=count).map(large).collect();
    let store = h.fresh().await;
    let zombie = Owner::new(&store).await;
    let owner = Owner::new(&store).await;
    zombie.commit_fenced(accept_all(&many), owner.epoch).await;
    assert_eq!(owner.tasks().await.len(), 0);

    owner.commit(accept_all(&many)).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for task in &many {
        let found = owner.task(task.id.0).await;
        assert!(found.as_ref() == Some(task), "task {} is not what was accepted", task.id);
    }
    assert_eq!(owner.rows(LANE).await, rows(&many));
}

/// A busy shard saves hundreds of lanes at once, each with its keys.
pub async fn a_commit_may_touch_many_lanes_and_keys<H: Harness>(h: &H) {
    let lanes: Vec<LaneId> =
        (0..20).flat_map(|queue| (0..10).map(move |priority| lane(queue, priority, 0))).collect();
    let (mut changes, mut keys, mut records, mut tasks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (n, &lane) in (1u64..).zip(&lanes) {
        tasks.push(Task { lane, ..task(n) });
        changes.push(Change::Accepted(Task { lane, ..task(n) }));
        for name in 1..=20u32 {
            changes.push(put_key(lane, &name.to_string(), n as u32 * 20 + name));
            keys.push((lane, key(&name.to_string()), key_record(n as u32 * 20 + name)));
        }
        let record = LaneRecord { ack: Level::ZERO, max: at(n), ..LaneRecord::default() };
        changes.push(Change::Lane { lane, record });
        records.push((lane, record));
    }
    changes.extend((0..20).map(|queue| put_queue(QueueId(queue), &format!("queue-{queue}"), 10)));
    keys.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));

    let store = h.fresh().await;
    Owner::new(&store).await.commit(shuffled(&changes)).await;
    let contents = contents_of(&store, SHARD, &lanes).await;
    assert_eq!(contents.metadata.lanes, records);
    assert_eq!(contents.metadata.keys, keys);
    assert_eq!(contents.metadata.queues.len(), 20);
    assert_eq!(contents.tasks, tasks);
}

/// Shards have nothing to do with each other, so neither waits for nor fails the other.
pub async fn commits_of_two_shards_at_once_both_happen<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let one = Owner::of(&store, ShardId(1)).await;
    let two = Owner::of(&store, ShardId(2)).await;
    for n in 1..=20 {
        let of_two = Task { payload: b"two".as_slice().into(), ..task(n) };
        both(one.commit(vec![accepted(&task(n))]), two.commit(vec![accepted(&of_two)])).await;
        assert_eq!(one.task(n).await, Some(task(n)));
        assert_eq!(two.task(n).await, Some(of_two));
    }
    assert_eq!((one.rows(LANE).await.len(), two.rows(LANE).await.len()), (20, 20));
}
