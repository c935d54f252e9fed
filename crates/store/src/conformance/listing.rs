//! Listing tasks: by id, by pages whose cursor is the last id seen, with an exact word on whether more
//! follow. People page through a backlog that lives while they look at it.

use evenhand_core::backlog::Level;
use evenhand_core::change::{EndRecord, Place};
use evenhand_core::life::Outcome;
use evenhand_core::names::{QueueId, TaskId};
use evenhand_core::{Change, Task, bounds};

use super::Harness;
use super::given::*;
use crate::{LISTING_BYTES, Wanted};

/// In order of numbers, not of text, of levels, or of acceptance; waiting or set aside.
pub async fn tasks_are_listed_by_id_wherever_they_are<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let ids = [1, 2, 9, 10, 11, 99, 100, 255, 256, 65_536, 1 << 32, (1 << 32) + 1, 1 << 47, Level::LAST_SEQ];
    // The later a task was accepted, the lower its level: levels must not decide.
    let tasks: Vec<Task> =
        ids.map(|id| Task { place: Place::Lane(level(u128::from(u64::MAX - id), id)), ..task(id) }).to_vec();
    owner.commit(accept_all(&shuffled(&tasks))).await;
    assert_eq!(owner.list(None, 0, ALL).await.tasks, tasks);

    owner.commit(vec![set_aside(&tasks[3]), requeued(&tasks[4], level(0, 12))]).await;
    let mut tasks = tasks;
    tasks[3] = aside(&tasks[3]);
    tasks[4] = retried(&tasks[4], level(0, 12));
    assert_eq!(owner.list(None, 0, ALL).await.tasks, tasks);
    for (n, id) in ids.into_iter().enumerate() {
        assert_eq!(owner.list(None, id, ALL).await.tasks, tasks[n + 1..], "after {id}");
        assert_eq!(owner.list(None, id - 1, 1).await.tasks, tasks[n..=n], "after {}", id - 1);
    }
    assert_eq!(owner.list(None, u64::MAX, ALL).await.tasks, []);
}

/// Of all its lanes, and of no other queue's.
pub async fn a_listing_of_one_queue_shows_that_queue_alone<H: Harness>(h: &H) {
    let queues = [0, 1, 2, 11, 256, u32::MAX];
    let lanes: Vec<_> = queues
        .into_iter()
        .flat_map(|queue| [lane(queue, 0, 0), lane(queue, 5, 1), lane(queue, 9, 0)])
        .collect();
    let tasks: Vec<Task> =
        (1..=180).map(|n| Task { lane: lanes[n as usize % lanes.len()], ..task(n) }).collect();
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&shuffled(&tasks))).await;
    for queue in queues.map(QueueId) {
        let own: Vec<Task> = tasks.iter().filter(|task| task.lane.queue == queue).cloned().collect();
        assert_eq!(own.len(), 30);
        for limit in [1, 7, 30, ALL] {
            assert_eq!(owner.tasks_by(Some(queue), limit).await, own, "of queue {queue} by {limit}");
        }
    }
    let other = owner.list(Some(QueueId(3)), 0, ALL).await;
    assert!(other.tasks.is_empty() && other.more.is_none(), "{other:?}");
    assert_eq!(owner.tasks_by(None, 7).await, tasks);
}

/// "More" is a promise that the next page is not empty; without it the reader stops. Tasks of other
/// queues are not more.
pub async fn whether_more_follow_is_exact<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let elsewhere = Task { lane: lane(2, 5, 0), ..task(4) };
    owner.commit(accept_all(&[task(1), task(2), task(3), elsewhere.clone()])).await;
    let more = async |queue, after, limit| owner.list(queue, after, limit).await.more.is_some();

    assert!(more(None, 0, 3).await);
    assert!(!more(None, 0, 4).await);
    assert!(!more(None, 0, 5).await);
    assert!(!more(None, 0, usize::MAX).await);
    assert!(!more(None, 4, 1).await);
    let here = Some(LANE.queue);
    assert!(more(here, 0, 2).await);
    assert!(!more(here, 0, 3).await);
    assert!(!more(here, 2, 1).await);
    let there = Some(elsewhere.lane.queue);
    assert!(!more(there, 0, 1).await);
    assert_eq!(owner.list(there, 0, 1).await.tasks.first(), Some(&elsewhere));

    owner.commit(vec![finished(&elsewhere)]).await;
    assert!(!more(None, 0, 3).await);
}

/// No task is lost or repeated where two pages meet, whatever their size.
pub async fn listing_by_pages_gives_every_task_once<H: Harness>(h: &H) {
    const TASKS: u64 = 2_500;
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let tasks: Vec<Task> = (1..=TASKS).map(task).collect();
    for some in shuffled(&tasks).chunks(500) {
        owner.commit(accept_all(some)).await;
    }
    for limit in [1, 2, 7, 499, 1_250, 2_499, 2_500, 2_501] {
        let found = owner.tasks_by(None, limit).await;
        assert!(found == tasks, "{} tasks of {TASKS} by pages of {limit}, or not in order", found.len());
    }
}

/// A page of large tasks is short, and says where the next one begins.
pub async fn a_listing_is_bounded_in_bytes<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let large = |n| Task { payload: vec![n as u8; bounds::PAYLOAD_BYTES].into(), ..task(n) };
    let most = (LISTING_BYTES / bounds::PAYLOAD_BYTES) as u64;
    for n in 1..=3 * most {
        owner.commit(vec![accepted(&large(n))]).await;
    }
    let first = owner.list(None, 0, ALL).await;
    assert_eq!((first.tasks.len() as u64, first.more), (most, Some(TaskId(most))));
    let (mut after, mut seen) = (0, Vec::new());
    loop {
        let page = owner.list(None, after, ALL).await;
        seen.extend(page.tasks.iter().map(|task| task.id.0));
        let Some(last) = page.more else { break };
        after = last.0;
    }
    assert_eq!(seen, (1..=3 * most).collect::<Vec<u64>>());
}

/// Of all queues or one, whatever lies between, by pages of any size.
pub async fn tasks_that_have_ended_are_listed_apart_from_those_that_have_not<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let ids = (1..=300).chain([Level::LAST_SEQ - 1, Level::LAST_SEQ]);
    let tasks: Vec<Task> = ids.map(|n| Task { lane: lane(n as u32 % 3, 5, 0), ..task(n) }).collect();
    owner.commit(accept_all(&shuffled(&tasks))).await;
    // Some stretches end as a whole, some do not at all, and some in between.
    let ends = |task: &Task| match task.id.0 % 100 {
        0..30 => true,
        30..60 => task.id.0.is_multiple_of(7),
        _ => task.id.0 == Level::LAST_SEQ,
    };
    let end = |task: &Task| ended(task, Outcome::Failed, Some(end_record(task)));
    owner.commit(tasks.iter().filter(|task| ends(task)).map(end).collect()).await;
    let tasks: Vec<Task> =
        tasks.iter().map(|task| if ends(task) { over(task) } else { task.clone() }).collect();
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    for queue in [None, Some(QueueId(0)), Some(QueueId(2)), Some(QueueId(3))] {
        for ended in [None, Some(true), Some(false)] {
            let wanted = |task: &&Task| {
                queue.is_none_or(|queue| task.lane.queue == queue)
                    && ended.is_none_or(|ended| ended == (task.place == Place::Over))
            };
            let expected: Vec<Task> = tasks.iter().filter(wanted).cloned().collect();
            for limit in [1, 7, 100, ALL] {
                let found = owner.wanted_by(Wanted { queue, ended }, limit).await;
                assert_eq!(found, expected, "of {queue:?}, ended {ended:?}, by {limit}");
            }
            let after = expected.last().map_or(u64::MAX, |last| last.id.0);
            for after in [after, Level::LAST_SEQ, 1 << 63, u64::MAX] {
                let none = owner.list_wanted(Wanted { queue, ended }, after, ALL).await;
                assert_eq!((none.tasks, none.more), (vec![], None), "after {after}");
            }
        }
    }
}

/// Large payloads, and large results, which are not even shown.
pub async fn a_listing_of_ended_tasks_is_bounded_in_bytes<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let large = |n| Task { payload: vec![n as u8; bounds::PAYLOAD_BYTES].into(), ..task(n) };
    let most = (LISTING_BYTES / bounds::PAYLOAD_BYTES) as u64;
    for n in 1..=2 * most + 1 {
        let end = EndRecord { result: vec![n as u8; bounds::PAYLOAD_BYTES].into(), ..end_record(&task(n)) };
        owner.commit(vec![accepted(&large(n)), ended(&large(n), end.outcome, Some(end))]).await;
    }
    for ended in [None, Some(true)] {
        let (mut after, mut seen) = (0, Vec::new());
        loop {
            let page = owner.list_wanted(Wanted { queue: None, ended }, after, ALL).await;
            assert!(page.tasks.len() as u64 <= most, "{} tasks at once", page.tasks.len());
            seen.extend(page.tasks.iter().map(|task| task.id.0));
            let Some(last) = page.more else { break };
            after = last.0;
        }
        assert_eq!(seen, (1..=2 * most + 1).collect::<Vec<u64>>());
    }
}

/// Between two pages tasks end (the one that the cursor stands on, too), are accepted, move and are set
/// aside. Whoever is there all the time is shown once.
pub async fn tasks_that_come_and_go_between_pages_hide_and_repeat_no_others<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit((1..=40).map(|n| accepted(&task(n))).collect()).await;

    let moved = [requeued(&task(3), at(50)), requeued(&task(35), at(51))];
    let set_apart = [set_aside(&task(5)), set_aside(&task(36))];
    let between: [Vec<Change>; 3] = [
        vec![finished(&task(10)), finished(&task(1))],
        vec![finished(&task(21)), finished(&task(20)), accepted(&task(41))],
        [&moved[..], &set_apart[..], &[accepted(&task(42))]].concat(),
    ];
    let (mut shown, mut after): (Vec<u64>, u64) = (Vec::new(), 0);
    let mut between = between.into_iter();
    loop {
        let listing = owner.list(Some(LANE.queue), after, 10).await;
        shown.extend(listing.tasks.iter().map(|task| task.id.0));
        let Some(last) = listing.more else { break };
        after = last.0;
        if let Some(changes) = between.next() {
            owner.commit(changes).await;
        }
    }
    assert_eq!(between.next(), None, "all of it happened between pages");
    // Of those that ended, only 21 did so before its page was read.
    let expected: Vec<u64> = (1..=42).filter(|n| *n != 21).collect();
    assert_eq!(shown, expected);
}
