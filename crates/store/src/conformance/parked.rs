//! Rows that stand beside their lane: each key of a lane has a shelf of its own, read above a level, by pages. They go
//! one by one.

use evenhand_core::backlog::Level;
use evenhand_core::change::Place;
use evenhand_core::names::{Key, LaneId, QueueId};
use evenhand_core::{Change, Row, Task};

use super::Harness;
use super::given::*;
use crate::Store;

/// A task on the shelf of this key.
fn parked(n: u64, of: &str) -> Task {
    Task { place: Place::Parked(level(0, n)), key: key(of), ..task(n) }
}

fn row(task: &Task) -> Row {
    let Place::Parked(level) = task.place else { panic!("task {} is not parked", task.id) };
    task.row_at(level)
}

/// Takes a task off its shelf.
fn unparked(task: &Task) -> Change {
    Change::Unparked { lane: task.lane, key: task.key.clone(), level: row(task).level }
}

async fn shelf<S: Store>(owner: &Owner<'_, S>, lane: LaneId, of: &str, limit: usize) -> Vec<Row> {
    let (mut rows, mut above) = (Vec::new(), Level::ZERO);
    loop {
        let page = owner.parked_page(lane, &key(of), above, limit).await;
        assert!(page.rows.len() == limit || page.end, "{} rows of {limit}, and no end", page.rows.len());
        above = page.rows.last().map_or(above, |row| row.level);
        rows.extend(page.rows);
        if page.end {
            return rows;
        }
    }
}

/// Keys that begin with each other, and the same key of another lane or queue, have shelves of their own.
pub async fn parked_rows_stay_with_their_keys_and_come_in_order<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let keys = ["a", "ab", "a b", "", "b", "ünï"];
    let tasks: Vec<Task> = (1..=60).map(|n| parked(n, keys[n as usize % keys.len()])).collect();
    let lanes = [lane(0, 9, 9), lane(1, 5, 1), lane(1, 6, 0), lane(9, 5, 0)];
    let elsewhere: Vec<Task> = (61..).zip(lanes).map(|(n, lane)| Task { lane, ..parked(n, "a") }).collect();
    for some in shuffled(&tasks).chunks(7) {
        owner.commit(accept_all(some)).await;
    }
    owner.commit(accept_all(&elsewhere)).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for of in keys {
        let expected: Vec<Row> = tasks.iter().filter(|task| task.key == key(of)).map(row).collect();
        for limit in [1, 3, 10, 100] {
            assert_eq!(shelf(&owner, LANE, of, limit).await, expected, "of key {of:?}");
        }
    }
    for task in &elsewhere {
        assert_eq!(shelf(&owner, task.lane, "a", 10).await, [row(task)], "of lane {}", task.lane);
    }
    assert_eq!(shelf(&owner, lane(3, 5, 0), "a", 10).await, []);
    assert_eq!(owner.task(1).await, Some(parked(1, keys[1])));
}

/// A row goes to its key's shelf and comes back, to its lane, to the timers, or not at all.
pub async fn a_row_goes_to_the_shelf_and_leaves_it<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&[task(1), task(2), delayed(&task(3)), task(4)])).await;
    let of = task(1).key.as_str().to_owned();
    let shelved = |n: u64| Task { place: Place::Parked(level(0, 20 + n)), ..task(n) };
    owner.commit(vec![moved(&task(1), &shelved(1)), moved(&task(2), &shelved(2))]).await;
    owner.commit(vec![moved(&delayed(&task(3)), &shelved(3)), moved(&task(4), &shelved(4))]).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    let mine: Vec<Row> =
        (1..=4).map(shelved).filter(|task| task.key.as_str() == of).map(|task| row(&task)).collect();
    assert_eq!(shelf(&owner, LANE, &of, 10).await, mine);
    assert_eq!(owner.task(2).await, Some(shelved(2)));
    assert_eq!((owner.rows(LANE).await, owner.timers().await), (vec![], vec![]));

    let back = Task { place: Place::Lane(at(31)), ..task(1) };
    let later = put_off(&task(2), timer_at(32));
    owner.commit(vec![moved(&shelved(1), &back), moved(&shelved(2), &later)]).await;
    owner.commit(vec![unparked(&shelved(3)), finished(&shelved(3))]).await;
    let mut over: Vec<Change> = remembered(&shelved(4)).into();
    over.push(unparked(&shelved(4)));
    owner.commit(over).await;
    for n in 1..=4 {
        assert_eq!(shelf(&owner, LANE, task(n).key.as_str(), 10).await, []);
    }
    assert_eq!(owner.rows(LANE).await, rows(&[back]));
    assert_eq!((owner.task(2).await, owner.task(3).await), (Some(later), None));
    assert_eq!(owner.task(4).await.map(|task| task.place), Some(Place::Over));
}

/// One key in several lanes of a queue: what one lane takes from its shelf stays on those of the others.
pub async fn lanes_of_one_queue_park_the_same_key_apart<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let lanes = [LANE, lane(1, 5, 1), lane(1, 6, 0)];
    let tasks: Vec<Task> =
        (1..=9).map(|n| Task { lane: lanes[n as usize % lanes.len()], ..parked(n, "a") }).collect();
    owner.commit(accept_all(&shuffled(&tasks))).await;
    let (mut taken, mut kept): (Vec<Task>, Vec<Task>) =
        tasks.into_iter().partition(|task| task.lane == lanes[1]);
    for limit in [1, 10] {
        assert_eq!(shelf(&owner, lanes[1], "a", limit).await, taken.iter().map(row).collect::<Vec<_>>());
    }
    // The first two go, one to the lane, and one for good; of another lane, one in the midst.
    let (first, second, other) = (taken.remove(0), taken.remove(0), kept.remove(2));
    let back = Task { place: Place::Lane(at(20)), ..first.clone() };
    owner.commit(vec![moved(&first, &back), unparked(&second), finished(&second)]).await;
    owner.commit(vec![unparked(&other), finished(&other)]).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for lane in lanes {
        let left = taken.iter().chain(&kept).filter(|task| task.lane == lane);
        assert_eq!(shelf(&owner, lane, "a", 2).await, left.map(row).collect::<Vec<_>>(), "of lane {lane}");
    }
    assert_eq!(owner.rows(lanes[1]).await, rows(&[back]));
}

/// What is saved of parked rows is known to the next owner, lane by lane.
pub async fn parked_keys_are_remembered_until_they_are_not<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let (slow, other) = (lane(1, 5, 1), lane(2, 0, 0));
    owner.commit(vec![put_parked(LANE, "a", 1), put_parked(LANE, "ab", 2), put_parked(slow, "a", 3)]).await;
    owner.commit(vec![put_parked(other, "", u64::MAX >> 20), put_parked(LANE, "a", 4)]).await;
    let expected = vec![
        (LANE, key("a"), parked_record(4)),
        (LANE, key("ab"), parked_record(2)),
        (slow, key("a"), parked_record(3)),
        (other, Key::shared(), parked_record(u64::MAX >> 20)),
    ];
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata.parked, expected);
    owner.commit(vec![drop_parked(LANE, "a")]).await;
    assert_eq!(Owner::new(&store).await.metadata.parked, expected[1..]);
}

/// That a key is paused is known to the next owner, queue by queue, however often it was said.
pub async fn paused_keys_are_remembered_until_they_are_not<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let (one, two) = (QueueId(1), QueueId(2));
    let keys = [(one, ""), (one, "a"), (one, "ab"), (two, ""), (two, "a")];
    owner.commit(keys.iter().map(|(queue, key)| put_paused(*queue, key, true)).collect()).await;
    owner.commit(vec![put_paused(one, "a", true), put_paused(two, "never", false)]).await;
    let said =
        |keys: &[(QueueId, &str)]| keys.iter().map(|(queue, of)| (*queue, key(of))).collect::<Vec<_>>();
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata.paused, said(&keys));
    // It has nothing to do with rows that are parked.
    owner
        .commit(vec![put_parked(LANE, "ab", 1), put_paused(one, "a", false), put_paused(two, "", false)])
        .await;
    owner.commit(vec![drop_parked(LANE, "ab"), put_paused(two, "", true), put_paused(two, "", false)]).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata.paused, said(&[keys[0], keys[2], keys[4]]));
    assert_eq!(owner.metadata.parked, []);
}
