//! The ack level: what is at or below it may go by range, what is above it may not, and a reader that
//! starts above it meets no remains of what was deleted. After a crash, the deleted rows that the next
//! owner has to pass over decide how long it takes to start.

use evenhand_core::backlog::Level;
use evenhand_core::change::Place;
use evenhand_core::names::LaneId;
use evenhand_core::{Change, Task};

use super::Harness;
use super::given::*;
use crate::Store;

/// The saved ack of a lane, as a new owner learns it.
fn saved_ack<S: Store>(owner: &Owner<'_, S>, lane: LaneId) -> Level {
    let found = owner.metadata.lanes.iter().find(|(id, _)| *id == lane);
    found.map_or(Level::ZERO, |(_, record)| record.ack)
}

/// Inclusive, and exact at neighbouring levels, also between rows of the same pass.
pub async fn an_ack_deletes_the_rows_at_or_below_it_and_none_above<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let places = [(0, 1), (7, 2), (7, 3), (7, 4), (8, 5), (1 << 40, 6), (1 << 79, 7), ((1 << 80) - 1, 8)];
    let tasks: Vec<Task> =
        places.map(|(pass, seq)| Task { place: Place::Lane(level(pass, seq)), ..task(seq) }).to_vec();
    owner.commit(accept_all(&tasks)).await;

    // An owner removes the records of these tasks, too; here the range alone has to do it, for the rows.
    owner.commit(vec![acked(LANE, Level::ZERO)]).await;
    assert_eq!(owner.rows(LANE).await, rows(&tasks));
    for n in 0..tasks.len() {
        owner.commit(vec![acked(LANE, level_of(&tasks[n]).before())]).await;
        assert_eq!(owner.rows(LANE).await, rows(&tasks[n..]), "just below {:?}", tasks[n].place);
        // Twice, because a lane's record is saved again by every commit that touches the lane.
        for _ in 0..2 {
            owner.commit(vec![acked(LANE, level_of(&tasks[n]))]).await;
            assert_eq!(owner.rows(LANE).await, rows(&tasks[n + 1..]), "at {:?}", tasks[n].place);
        }
    }
}

/// As an owner writes it: ends, a retry, a long runner, new tasks and the ack that covers the settled
/// ones. What moved up or was accepted in the same commit stays.
pub async fn an_ack_rides_in_the_commit_that_settles_what_is_below_it<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit((1..=8).map(|n| accepted(&task(n))).collect()).await;
    let changes = vec![
        finished(&task(1)),
        accepted(&task(9)),
        requeued(&task(2), at(10)),
        set_aside(&task(3)),
        finished(&task(4)),
        acked(LANE, at(4)),
    ];
    owner.commit(changes).await;
    let mut left = vec![retried(&task(2), at(10)), aside(&task(3))];
    left.extend((5..=9).map(task));
    assert_eq!(contents(&store).await.tasks, left);
    let owner = Owner::new(&store).await;
    assert_eq!(saved_ack(&owner, LANE), at(4));
    let mut waiting: Vec<Task> = (5..=9).map(task).collect();
    waiting.push(retried(&task(2), at(10)));
    assert_eq!(owner.page(LANE, at(4), ALL).await.rows, rows(&waiting));
}

/// Thousands of tasks come and go, the ack is saved along, and the owner crashes: its successor's first
/// read starts behind all of it.
pub async fn rows_settled_below_a_saved_ack_are_not_passed_over<H: Harness>(h: &H) {
    const TASKS: u64 = 5_000;
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let numbers: Vec<u64> = (1..=TASKS).collect();
    for some in numbers.chunks(500) {
        owner.commit(some.iter().map(|&n| accepted(&task(n))).collect()).await;
        // They end in any order, in several commits; only the last of these can move the ack.
        for (part, ends) in shuffled(some).chunks(100).enumerate() {
            let mut changes: Vec<Change> = ends.iter().map(|&n| finished(&task(n))).collect();
            let settled = if part == 4 { some[499] } else { some[0] - 1 };
            changes.push(acked(LANE, at(settled)));
            owner.commit(changes).await;
        }
    }
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(saved_ack(&owner, LANE), at(TASKS));
    let page = owner.page(LANE, saved_ack(&owner, LANE), 100).await;
    assert_eq!((page.rows, page.end, page.deleted), (vec![], true, 0));

    owner.commit(accept_all(&[task(TASKS + 1), task(TASKS + 2)])).await;
    let page = owner.page(LANE, saved_ack(&owner, LANE), 1).await;
    assert_eq!((page.rows, page.end, page.deleted), (rows(&[task(TASKS + 1)]), false, 0));
}

/// One task at the head runs and runs, and everything behind it ends. Once it is set aside, the ack can
/// pass it and the deleted rows behind it.
pub async fn a_long_runner_set_aside_leaves_no_deleted_rows_to_pass_over<H: Harness>(h: &H) {
    const ENDS: u64 = 1_000;
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit((1..=ENDS + 2).map(|n| accepted(&task(n))).collect()).await;
    for n in 2..=ENDS + 1 {
        owner.commit(vec![finished(&task(n)), acked(LANE, Level::ZERO)]).await;
    }
    let page = owner.page(LANE, Level::ZERO, 10).await;
    assert_eq!((page.rows, page.end), (rows(&[task(1), task(ENDS + 2)]), true));
    assert!(page.deleted <= ENDS, "{} passed over where {ENDS} were deleted", page.deleted);

    owner.commit(vec![set_aside(&task(1)), acked(LANE, at(ENDS + 1))]).await;
    let owner = Owner::new(&store).await;
    let page = owner.page(LANE, saved_ack(&owner, LANE), 10).await;
    assert_eq!((page.rows, page.end, page.deleted), (rows(&[task(ENDS + 2)]), true, 0));
    assert_eq!(owner.metadata.aside, [aside(&task(1))]);
}

/// Deletes more often than the ack is saved: a crash makes the next owner pass over those since, and no
/// more than those.
pub async fn a_read_passes_over_no_more_rows_than_were_deleted_above_the_ack<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit((1..=1_000).map(|n| accepted(&task(n))).collect()).await;
    for n in 1..=600 {
        let mut changes = vec![finished(&task(n))];
        if n % 250 == 0 {
            changes.push(acked(LANE, at(n)));
        }
        owner.commit(changes).await;
    }
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(saved_ack(&owner, LANE), at(500));
    let page = owner.page(LANE, at(500), 10).await;
    assert_eq!(page.rows, (601..=610).map(|n| row(&task(n))).collect::<Vec<_>>());
    assert!(page.deleted <= 100, "{} passed over where 100 were deleted", page.deleted);
    // From there on nothing was deleted.
    assert_eq!(owner.page(LANE, at(610), 10).await.deleted, 0);
    assert_eq!(owner.page(LANE, at(610), ALL).await.deleted, 0);
}
