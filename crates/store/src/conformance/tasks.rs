//! A task is two things in a store, its record and its row, and each step of its life changes both
//! together and touches no other task.

use evenhand_core::Task;
use evenhand_core::life::Outcome;
use evenhand_core::names::ShardId;

use super::Harness;
use super::given::*;
use crate::Store;

/// Takes [`super::given::SHARD`] and puts tasks 1 to 5 into it.
async fn owner_of_five<S: Store>(store: &S) -> Owner<'_, S> {
    let owner = Owner::new(store).await;
    owner.commit((1..=5).map(|n| accepted(&task(n))).collect()).await;
    owner
}

/// Tasks 1 to 5 with one of them replaced.
fn five_with(changed: Task) -> Vec<Task> {
    let others = (1..=5).map(task);
    others.map(|task| if task.id == changed.id { changed.clone() } else { task }).collect()
}

/// Never accepted, ended, or of another shard.
pub async fn a_task_that_is_not_there_is_none<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = owner_of_five(&store).await;
    assert_eq!(owner.task(3).await, Some(task(3)));
    owner.commit(vec![finished(&task(3))]).await;
    for id in [3, 0, 6, (1 << 8) + 1, (1 << 32) + 1, (1 << 48) + 1, u64::MAX] {
        assert_eq!(owner.task(id).await, None, "task {id}");
    }
    assert_eq!(Owner::of(&store, ShardId(2)).await.task(1).await, None);
}

/// Its record and its row go together, however it ended, and nobody else's.
pub async fn finishing_removes_one_task_and_its_row<H: Harness>(h: &H) {
    for outcome in [Outcome::Succeeded, Outcome::Failed, Outcome::Canceled, Outcome::Expired] {
        let store = h.fresh().await;
        let owner = owner_of_five(&store).await;
        for n in [3, 1, 5] {
            owner.commit(vec![ended(&task(n), outcome, None)]).await;
            assert_eq!(owner.task(n).await, None);
        }
        assert_eq!(contents(&store).await.tasks, [task(2), task(4)]);
    }
}

/// To a place before others, between them, and behind them: its row is there and only there, its record
/// has the new level, attempt and charge, and its payload is untouched.
pub async fn requeueing_moves_one_row_and_updates_its_task<H: Harness>(h: &H) {
    for to in [level(0, 6), level(3, 6), level(9, 6)] {
        let store = h.fresh().await;
        let owner = owner_of_five(&store).await;
        owner.commit(vec![requeued(&task(2), to)]).await;
        let moved = retried(&task(2), to);
        assert_ne!((moved.attempt, moved.charge), (task(2).attempt, task(2).charge));
        assert_eq!(owner.task(2).await, Some(moved.clone()));
        let mut in_order = five_with(moved.clone());
        in_order.sort_by_key(level_of);
        assert_eq!(owner.rows(LANE).await, rows(&in_order));
        assert_eq!(contents(&store).await.tasks, five_with(moved));
    }
}

/// Its row leaves the lane; its record, payload and all, is among what a new owner is given.
pub async fn setting_aside_takes_one_row_away_and_keeps_its_task<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = owner_of_five(&store).await;
    owner.commit(vec![set_aside(&task(2))]).await;
    assert_eq!(owner.task(2).await, Some(aside(&task(2))));
    assert_eq!(owner.rows(LANE).await, rows(&[task(1), task(3), task(4), task(5)]));
    let store = h.reopen(store).await;
    let contents = contents(&store).await;
    assert_eq!(contents.tasks, five_with(aside(&task(2))));
    assert_eq!(contents.metadata.aside, [aside(&task(2))]);
}

/// A long runner that was lost waits again, and may become a long runner again.
pub async fn a_task_set_aside_can_be_requeued<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = owner_of_five(&store).await;
    owner.commit(vec![set_aside(&task(2)), set_aside(&task(4))]).await;
    owner.commit(vec![requeued(&aside(&task(2)), at(6))]).await;
    let again = retried(&task(2), at(6));
    assert_eq!(owner.task(2).await, Some(again.clone()));
    assert_eq!(owner.rows(LANE).await, rows(&[task(1), task(3), task(5), again.clone()]));
    assert_eq!(contents(&store).await.metadata.aside, [aside(&task(4))]);

    let owner = Owner::new(&store).await;
    owner.commit(vec![set_aside(&again)]).await;
    assert_eq!(contents(&store).await.metadata.aside, [aside(&again), aside(&task(4))]);
}

/// It has no row in the lane any more, and leaves no place in the table of long runners.
pub async fn a_task_set_aside_can_be_finished<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = owner_of_five(&store).await;
    owner.commit(vec![set_aside(&task(2)), set_aside(&task(4))]).await;
    owner.commit(vec![finished(&aside(&task(2)))]).await;
    assert_eq!(owner.task(2).await, None);
    let contents = contents(&store).await;
    assert_eq!(contents.tasks, [task(1), task(3), aside(&task(4)), task(5)]);
    assert_eq!(contents.metadata.aside, [aside(&task(4))]);
}
