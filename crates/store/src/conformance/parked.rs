//! Rows of keys that may not run: each key has a shelf of its own, read above a level, by pages. They go one by one.

use evenhand_core::backlog::Level;
use evenhand_core::change::{ParkedRecord, ParkedRow, Place, ShelfRecord};
use evenhand_core::names::{Key, QueueId};
use evenhand_core::{Change, Task};

use super::Harness;
use super::given::*;
use crate::Store;

/// A task on the shelf of this key.
fn parked(n: u64, of: &str) -> Task {
    Task { place: Place::Parked(level(0, n)), key: key(of), ..task(n) }
}

fn row(task: &Task) -> ParkedRow {
    let Place::Parked(level) = task.place else { panic!("task {} is not parked", task.id) };
    ParkedRow { lane: task.lane, row: task.row_at(level) }
}

fn record(rows: u64) -> ParkedRecord {
    ParkedRecord {
        paused: rows.is_multiple_of(2),
        rows,
        shelf: ShelfRecord { ack: level(0, rows), max: level(0, rows + 1) },
    }
}

async fn shelf<S: Store>(owner: &Owner<'_, S>, queue: QueueId, of: &str, limit: usize) -> Vec<ParkedRow> {
    let (mut rows, mut above) = (Vec::new(), Level::ZERO);
    loop {
        let page = owner.parked_page(queue, &key(of), above, limit).await;
        assert!(page.rows.len() == limit || page.end, "{} rows of {limit}, and no end", page.rows.len());
        above = page.rows.last().map_or(above, |row| row.row.level);
        rows.extend(page.rows);
        if page.end {
            return rows;
        }
    }
}

/// Keys that begin with each other, and the same key of another queue, have shelves of their own.
pub async fn parked_rows_stay_with_their_keys_and_come_in_order<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let keys = ["a", "ab", "a b", "", "b", "ünï"];
    let tasks: Vec<Task> = (1..=60).map(|n| parked(n, keys[n as usize % keys.len()])).collect();
    let elsewhere = Task { lane: lane(9, 0, 0), ..parked(61, "a") };
    for some in shuffled(&tasks).chunks(7) {
        owner.commit(accept_all(some)).await;
    }
    owner.commit(accept_all(std::slice::from_ref(&elsewhere))).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for of in keys {
        let expected: Vec<ParkedRow> = tasks.iter().filter(|task| task.key == key(of)).map(row).collect();
        for limit in [1, 3, 10, 100] {
            assert_eq!(shelf(&owner, LANE.queue, of, limit).await, expected, "of key {of:?}");
        }
    }
    assert_eq!(shelf(&owner, elsewhere.lane.queue, "a", 10).await, [row(&elsewhere)]);
    assert_eq!(shelf(&owner, QueueId(3), "a", 10).await, []);
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
    let mine: Vec<ParkedRow> =
        (1..=4).map(shelved).filter(|task| task.key.as_str() == of).map(|task| row(&task)).collect();
    assert_eq!(shelf(&owner, LANE.queue, &of, 10).await, mine);
    assert_eq!(owner.task(2).await, Some(shelved(2)));
    assert_eq!((owner.rows(LANE).await, owner.timers().await), (vec![], vec![]));

    let back = Task { place: Place::Lane(at(31)), ..task(1) };
    let later = put_off(&task(2), timer_at(32));
    let unparked = |task: &Task| {
        let Place::Parked(level) = task.place else { panic!("it is not parked") };
        Change::Unparked { queue: task.lane.queue, key: task.key.clone(), level }
    };
    owner.commit(vec![moved(&shelved(1), &back), moved(&shelved(2), &later)]).await;
    owner.commit(vec![unparked(&shelved(3)), finished(&shelved(3))]).await;
    let mut over: Vec<Change> = remembered(&shelved(4)).into();
    over.push(unparked(&shelved(4)));
    owner.commit(over).await;
    for n in 1..=4 {
        assert_eq!(shelf(&owner, LANE.queue, task(n).key.as_str(), 10).await, []);
    }
    assert_eq!(owner.rows(LANE).await, rows(&[back]));
    assert_eq!((owner.task(2).await, owner.task(3).await), (Some(later), None));
    assert_eq!(owner.task(4).await.map(|task| task.place), Some(Place::Over));
}

/// What is saved of parked keys is known to the next owner.
pub async fn parked_keys_are_remembered_until_they_are_not<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let put = |queue: u32, of: &str, rows: u64| Change::Parked {
        queue: QueueId(queue),
        key: key(of),
        record: Some(record(rows)),
    };
    owner.commit(vec![put(1, "a", 1), put(1, "ab", 2), put(2, "", u64::MAX >> 20), put(1, "a", 4)]).await;
    let expected = vec![
        (QueueId(1), key("a"), record(4)),
        (QueueId(1), key("ab"), record(2)),
        (QueueId(2), Key::shared(), record(u64::MAX >> 20)),
    ];
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata.parked, expected);
    owner.commit(vec![Change::Parked { queue: QueueId(1), key: key("a"), record: None }]).await;
    assert_eq!(Owner::new(&store).await.metadata.parked, expected[1..]);
}
