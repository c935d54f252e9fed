//! Owners that lost the shard, and know it late or never. Nothing they do may change anything, and what
//! they did in the last moment either happened before the take-over, and is seen by it, or not at all.

use evenhand_core::change::Place;
use evenhand_core::life::Outcome;
use evenhand_core::names::{Epoch, ShardId, StoreId, TaskId};
use evenhand_core::{Change, Task};

use super::Harness;
use super::given::*;
use crate::{Store, StoreError};

/// A dense number for each kind of change. A new kind does not compile until it has one, and then the
/// zombie must try it.
fn kind(change: &Change) -> usize {
    match change {
        Change::Accepted(_) => 0,
        Change::Moved { .. } => 1,
        Change::Canceling { .. } => 2,
        Change::Finished { .. } => 3,
        Change::Forgotten { .. } => 4,
        Change::Replayed { .. } => 5,
        Change::Timed(_) => 6,
        Change::Untimed { .. } => 7,
        Change::Timers { .. } => 8,
        Change::Settings { .. } => 9,
        Change::Key { .. } => 10,
        Change::Lane { .. } => 11,
        Change::Queue { .. } => 12,
        Change::Override { .. } => 13,
        Change::Member { .. } => 14,
        Change::Stopped { .. } => 15,
        Change::Request { .. } => 16,
        Change::Store { .. } => 17,
        Change::Unparked { .. } => 18,
        Change::Parked { .. } => 19,
        Change::Paused { .. } => 20,
        Change::Doubt { .. } => 21,
        Change::Shortened { .. } => 22,
        Change::Seq { .. } => KINDS - 1,
    }
}

const KINDS: usize = 24;

/// What a zombie might do to [`furniture`]: each of these would be seen if it happened.
fn mischief() -> Vec<Change> {
    let changes = vec![
        accepted(&task(9)),
        accepted(&Task { payload: b"not what was accepted".as_slice().into(), ..task(1) }),
        accepted(&delayed(&task(8))),
        requeued(&task(1), at(9)),
        requeued(&aside(&task(4)), at(10)),
        requeued(&delayed(&task(5)), at(11)),
        moved(&task(2), &put_off(&task(2), timer_at(12))),
        set_aside(&task(2)),
        shortened(&task(2), &shorter(&task(2), lane(1, 5, 1), Place::Lane(at(12)), 77)),
        Change::Canceling { task: TaskId(2) },
        finished(&task(3)),
        finished(&aside(&task(4))),
        finished(&delayed(&task(5))),
        ended(&task(1), Outcome::Canceled, None),
        ended(&task(1), Outcome::Canceled, Some(end_record(&task(1)))),
        forgotten(&retried(&task(6), at(16))),
        Change::Replayed { task: TaskId(6), again: TaskId(77) },
        Change::Timed(timer(6)),
        Change::Untimed { at: timer_at(7) },
        timers_acked(highest()),
        Change::Unparked { lane: LANE, key: key("acme"), level: level(0, 18) },
        put_parked(LANE, "acme", 77),
        put_parked(LANE, "new", 77),
        drop_parked(LANE, "acme"),
        put_paused(LANE.queue, "acme", false),
        put_paused(LANE.queue, "new", true),
        put_settings(LANE.queue, 77),
        put_settings(lane(7, 0, 0).queue, 77),
        put_key(LANE, "acme", 77),
        put_key(LANE, "new", 77),
        forget_key(LANE, "acme"),
        acked(LANE, highest()),
        put_queue(LANE.queue, "render", 77),
        put_queue(lane(7, 0, 0).queue, "new", 77),
        put_override(LANE.queue, "acme", 77),
        put_override(LANE.queue, "new", 77),
        drop_override(LANE.queue, "acme"),
        put_member("gpu-7", 7),
        put_member("new", 7),
        drop_member("gpu-7"),
        Change::Stopped { stopped: false },
        Change::Doubt { left_ms: Some(77) },
        Change::Doubt { left_ms: None },
        put_request(4, 77),
        put_request(77, 77),
        drop_request(4),
        Change::Store { id: StoreId(77) },
        Change::Seq { next: 77 },
    ];
    for number in 0..KINDS {
        assert!(changes.iter().any(|change| kind(change) == number), "no change of kind {number} is tried");
    }
    changes
}

/// Each kind of change alone, under the epoch before and under one long past.
pub async fn a_zombie_owner_changes_nothing_by_any_kind_of_change<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let (long_past, zombie) = (Owner::new(&store).await, Owner::new(&store).await);
    zombie.commit(furniture()).await;
    let before = contents(&store).await;
    for change in mischief() {
        let owner = Owner::new(&store).await;
        long_past.commit_fenced(vec![change.clone()], owner.epoch).await;
        zombie.commit_fenced(vec![change.clone()], owner.epoch).await;
        assert_eq!(contents(&store).await, before, "after a fenced {change:?}");
    }
}

/// All kinds of change together, in either order: not even the first of them happens.
pub async fn a_fenced_commit_changes_nothing_at_all<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let zombie = Owner::new(&store).await;
    zombie.commit(furniture()).await;
    let before = contents(&store).await;
    let owner = Owner::new(&store).await;
    zombie.commit_fenced(mischief(), owner.epoch).await;
    zombie.commit_fenced(mischief().into_iter().rev().collect(), owner.epoch).await;
    assert_eq!(contents(&store).await, before);
}

/// The old owner goes on settling, and saves an ack level above what the new owner has accepted since.
pub async fn a_zombie_owner_deletes_nothing_of_what_its_successor_accepted<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let old: Vec<Task> = (1..=10).map(task).collect();
    let new: Vec<Task> = (11..=20).map(task).collect();
    let zombie = Owner::new(&store).await;
    zombie.commit(accept_all(&old)).await;

    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&new)).await;
    let mut settled: Vec<Change> = old.iter().map(finished).collect();
    settled.push(acked(LANE, at(15)));
    zombie.commit_fenced(settled, owner.epoch).await;
    zombie.commit_fenced(vec![acked(LANE, highest())], owner.epoch).await;
    zombie.commit_fenced(new.iter().map(finished).collect(), owner.epoch).await;

    assert_eq!(owner.rows(LANE).await, rows(&[old, new].concat()));
    owner.commit(vec![finished(&task(1)), acked(LANE, at(1))]).await;
    assert_eq!(contents(&store).await.tasks, (2..=20).map(task).collect::<Vec<_>>());
}

/// An owner asks with an empty commit whether it still is one.
pub async fn a_fenced_commit_of_no_changes_is_refused<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let zombie = Owner::new(&store).await;
    let owner = Owner::new(&store).await;
    zombie.commit_fenced(Vec::new(), owner.epoch).await;
    owner.commit(Vec::new()).await;
}

/// The epoch must be the shard's own, not merely high enough.
pub async fn an_epoch_that_nobody_was_given_is_refused<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(furniture()).await;
    for epoch in [Epoch(0), Epoch(owner.epoch.0 + 1), Epoch(u64::MAX)] {
        let answer = store.commit(SHARD, epoch, mischief()).await;
        assert_eq!(answer, Err(StoreError::Fenced { epoch, current: owner.epoch }));
    }
    owner.commit(vec![Change::Seq { next: 18 }]).await;
    let contents = contents(&store).await;
    assert_eq!(contents.metadata.next_seq, 18);
    assert_eq!(contents.tasks, furnished());
}

/// Each shard has an epoch of its own.
pub async fn the_epoch_of_another_shard_is_refused<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let other = ShardId(SHARD.0 + 1);
    let owner = Owner::new(&store).await;
    owner.commit(furniture()).await;
    let mut elsewhere = Owner::of(&store, other).await;
    while elsewhere.epoch <= owner.epoch {
        let next = Owner::of(&store, other).await;
        assert!(next.epoch > elsewhere.epoch, "{} after {}", next.epoch, elsewhere.epoch);
        elsewhere = next;
    }
    let answer = store.commit(SHARD, elsewhere.epoch, mischief()).await;
    assert_eq!(answer, Err(StoreError::Fenced { epoch: elsewhere.epoch, current: owner.epoch }));
    owner.commit(Vec::new()).await; // taking the other shard has fenced nobody here
    assert_eq!(contents(&store).await.tasks, furnished());
}

/// A fence is no curse: the same server may own the shard again under a new epoch.
pub async fn a_fenced_owner_can_take_the_shard_again<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let first = Owner::new(&store).await;
    let second = Owner::new(&store).await;
    first.commit_fenced(vec![accepted(&task(1))], second.epoch).await;
    let first = Owner::new(&store).await;
    first.commit(vec![accepted(&task(1))]).await;
    second.commit_fenced(vec![finished(&task(1))], first.epoch).await;
    assert_eq!(first.rows(LANE).await, rows(&[task(1)]));
}

/// The new owner's first read is enough: it need not wait for writes of its predecessor.
pub async fn a_write_that_arrived_before_the_take_over_is_seen_by_it<H: Harness>(h: &H) {
    let store = h.fresh().await;
    for n in 1..=20 {
        let old = Owner::new(&store).await;
        old.commit(vec![accepted(&task(n)), Change::Seq { next: n + 1 }]).await;
        let new = Owner::new(&store).await;
        assert_eq!(new.metadata.next_seq, n + 1);
        assert_eq!(new.page(LANE, at(n - 1), 1).await.rows, rows(&[task(n)]));
    }
}

/// A write is on its way when the shard changes hands, and arrives after that.
pub async fn a_late_write_fails_or_was_seen_by_the_take_over<H: Harness>(h: &H) {
    let store = h.fresh().await;
    for n in 1..=20 {
        let old = Owner::new(&store).await;
        let changes = vec![accepted(&task(n)), Change::Seq { next: n + 1 }];
        let late = store.commit(SHARD, old.epoch, changes);
        let new = Owner::new(&store).await;
        let answer = late.await;
        happened_before_or_not_at_all(&old, &new, n, &answer).await;
    }
}

/// The same, with nobody deciding which of the two comes first.
pub async fn a_commit_that_races_a_take_over_happened_before_it_or_fails<H: Harness>(h: &H) {
    let store = h.fresh().await;
    for n in 1..=50 {
        let old = Owner::new(&store).await;
        let changes = vec![accepted(&task(n)), Change::Seq { next: n + 1 }];
        let write = store.commit(SHARD, old.epoch, changes);
        let (answer, new) = if n % 2 == 0 {
            both(write, Owner::new(&store)).await
        } else {
            let (new, answer) = both(Owner::new(&store), write).await;
            (answer, new)
        };
        happened_before_or_not_at_all(&old, &new, n, &answer).await;
    }
}

/// Judges the old owner's commit of task `n` (and of the seq after it) by what the new owner was given.
async fn happened_before_or_not_at_all<S: Store>(
    old: &Owner<'_, S>,
    new: &Owner<'_, S>,
    n: u64,
    answer: &Result<(), StoreError>,
) {
    let seen = new.metadata.next_seq == n + 1;
    match answer {
        Ok(()) => assert!(seen, "task {n} was acknowledged, and the take-over did not see it"),
        Err(error) => {
            assert_eq!(*error, StoreError::Fenced { epoch: old.epoch, current: new.epoch });
            assert!(!seen, "task {n} was refused, and the take-over saw it");
        }
    }
    let page = new.page(LANE, at(n - 1), 10).await;
    assert_eq!(page.rows, if seen { rows(&[task(n)]) } else { Vec::new() });
    assert_eq!(new.task(n).await, seen.then(|| task(n)));
}

/// Nobody waits for the answer: whether the commit happened is in doubt until the shard is taken, and
/// settled from then on.
pub async fn a_commit_given_up_half_way_is_all_or_nothing<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let mut next = 1;
    for size in [1, 10, 1, 1_000, 1, 100] {
        let some: Vec<Task> = (next..next + size).map(task).collect();
        let above = at(next - 1);
        next += size;
        let mut changes = accept_all(&some);
        changes.push(Change::Seq { next });
        let old = Owner::new(&store).await;
        begin_and_drop(store.commit(SHARD, old.epoch, changes)).await;

        let new = Owner::new(&store).await;
        let happened = new.metadata.next_seq == next;
        for _ in 0..2 {
            let page = new.page(LANE, above, ALL).await;
            assert_eq!(page.rows, if happened { rows(&some) } else { Vec::new() });
        }
        let owner = Owner::new(&store).await;
        assert_eq!(owner.metadata.next_seq == next, happened, "it was decided by the first take-over");
        let kept =
            contents(&store).await.tasks.iter().filter(|task| task.place.level() > Some(above)).count();
        assert_eq!(kept, if happened { some.len() } else { 0 });
    }
}
