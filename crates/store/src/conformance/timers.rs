//! Timers: kept like the rows of a lane. In the order of their levels, read above a level, by pages, to an end
//! that is certain; deleted one by one, and by range up to an ack level. What waits for a time is found by these
//! alone.

use evenhand_core::backlog::Level;
use evenhand_core::change::{Place, Timed, TimerRow};
use evenhand_core::names::{ShardId, TaskId};
use evenhand_core::{Change, Task};

use super::Harness;
use super::given::*;

fn timed(timers: &[TimerRow]) -> Vec<Change> {
    timers.iter().cloned().map(Change::Timed).collect()
}

/// Timers of every kind at levels whose order is easy to get wrong.
fn awkward_timers() -> Vec<TimerRow> {
    let passes =
        [0, 1, (1 << 15) - 1, 1 << 16, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, (1 << 80) - 1];
    let seqs = [1, 250, (1 << 32) - 8, (1 << 47) - 8, Level::LAST_SEQ - 15];
    let mut timers = Vec::new();
    for (n, pass) in (0..).zip(passes) {
        for seq in seqs {
            timers.push(TimerRow { at: level(pass, seq + n), ..timer(seq) });
        }
    }
    timers
}

/// They are set in any order, and due in that of their levels.
pub async fn timers_come_in_the_order_of_levels_whatever_order_they_were_set_in<H: Harness>(h: &H) {
    let ordered = awkward_timers();
    assert!(ordered.is_sorted_by_key(|timer| timer.at), "the case lists them in order");
    let reversed: Vec<TimerRow> = ordered.iter().rev().cloned().collect();
    for set in [&ordered, &reversed, &shuffled(&ordered)] {
        for together in [1, 10, set.len()] {
            let store = h.fresh().await;
            let owner = Owner::new(&store).await;
            for some in set.chunks(together) {
                owner.commit(timed(some)).await;
            }
            assert_eq!(owner.timer_page(Level::ZERO, ALL).await.rows, ordered);
            for (n, timer) in ordered.iter().enumerate() {
                let above = owner.timer_page(timer.at, 1).await;
                assert_eq!(above.rows, ordered.get(n + 1).cloned().into_iter().collect::<Vec<_>>());
                assert_eq!(owner.timer_page(timer.at.before(), 1).await.rows, std::slice::from_ref(timer));
            }
        }
    }
}

/// No timer is lost or repeated where two pages meet, and the last page says that it is the last.
pub async fn paging_gives_every_timer_once_and_an_exact_end<H: Harness>(h: &H) {
    const TIMERS: u64 = 1_500;
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let page = owner.timer_page(Level::ZERO, 1).await;
    assert_eq!((page.rows, page.end), (vec![], true));
    // Ten at each pass, so that pages also meet between timers of the same moment.
    let at = |n: u64| level(u128::from(n / 10), n);
    let timers: Vec<TimerRow> = (1..=TIMERS).map(|n| TimerRow { at: at(n), ..timer(n) }).collect();
    for some in shuffled(&timers).chunks(400) {
        owner.commit(timed(some)).await;
    }
    for limit in [1, 7, 499, 1_499, 1_500, 1_501, usize::MAX] {
        let found = owner.timers_by(limit).await;
        assert!(found == timers, "{} timers of {TIMERS} by pages of {limit}, or not in order", found.len());
    }
    let end = async |above, limit| owner.timer_page(above, limit).await.end;
    assert!(!end(at(TIMERS - 2), 1).await);
    assert!(end(at(TIMERS - 1), 1).await);
    assert!(end(at(TIMERS), 1).await);
    // What was deleted does not stand between a page and the end.
    owner.commit(vec![Change::Untimed { at: at(TIMERS) }]).await;
    assert!(end(at(TIMERS - 2), 1).await);
}

/// One goes, whatever kind it is; the others stay, and nothing minds one that never was.
pub async fn a_timer_that_is_not_needed_any_more_goes_alone<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let mut timers: Vec<TimerRow> = (1..=30).map(timer).collect();
    owner.commit(timed(&timers)).await;
    for n in [30, 1, 17, 16, 15] {
        owner.commit(vec![Change::Untimed { at: timer_at(n) }]).await;
        timers.retain(|timer| timer.at != timer_at(n));
        assert_eq!(owner.timers().await, timers);
    }
    owner.commit(vec![Change::Untimed { at: timer_at(99) }]).await;
    // Set and given up in one commit.
    owner.commit(vec![Change::Timed(timer(40)), Change::Untimed { at: timer_at(40) }]).await;
    let store = h.reopen(store).await;
    assert_eq!(contents(&store).await.timers, timers);
}

/// Inclusive, and exact at neighbouring levels.
pub async fn an_ack_deletes_the_timers_at_or_below_it_and_none_above<H: Harness>(h: &H) {
    let timers = awkward_timers();
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(timed(&shuffled(&timers))).await;
    owner.commit(vec![timers_acked(Level::ZERO)]).await;
    assert_eq!(owner.timers().await, timers);
    for (n, timer) in timers.iter().enumerate().step_by(4) {
        owner.commit(vec![timers_acked(timer.at.before())]).await;
        assert_eq!(owner.timers().await, timers[n..], "just below {}", timer.at);
        // Twice, because the record is saved again by every commit that touches a timer.
        for _ in 0..2 {
            owner.commit(vec![timers_acked(timer.at)]).await;
            assert_eq!(owner.timers().await, timers[n + 1..], "at {}", timer.at);
        }
    }
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    let last = timers.len().next_multiple_of(4) - 4;
    assert_eq!(owner.metadata.timers.ack, timers[last].at);
    assert_eq!(owner.metadata.lanes, [], "the levels of the timers are no lane's");
    assert_eq!(owner.timers().await, timers[last + 1..]);
}

/// As an owner writes it: timers are handled, and their tasks go to the lane, end or are forgotten in the commit
/// that raises the ack over them. What was set in the same commit stays.
pub async fn an_ack_rides_in_the_commit_that_handles_what_is_below_it<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let waiting: Vec<Task> = (1..=5).map(|n| delayed(&task(n))).collect();
    owner.commit(accept_all(&waiting)).await;
    let placed = |n: u64| Task { place: Place::Lane(at(10 + n)), ..task(n) };
    let mut changes = vec![moved(&waiting[0], &placed(1)), finished(&waiting[1])];
    changes.push(moved(&waiting[2], &put_off(&waiting[2], timer_at(20))));
    changes.extend([accepted(&delayed(&task(6))), timers_acked(timer_at(3))]);
    owner.commit(changes).await;
    let left = vec![
        placed(1),
        put_off(&waiting[2], timer_at(20)),
        waiting[3].clone(),
        waiting[4].clone(),
        delayed(&task(6)),
    ];
    let contents = contents(&store).await;
    assert_eq!(contents.tasks, left);
    assert_eq!(contents.timers.iter().map(|timer| timer.task.0).collect::<Vec<_>>(), [4, 5, 6, 3]);
    let page = Owner::new(&store).await.timer_page(timer_at(3), ALL).await;
    assert_eq!((page.rows, page.deleted), (contents.timers, 0));
}

/// Thousands of timers come and go, the ack is saved along, and the owner crashes: its successor's first read
/// starts behind all of it.
pub async fn timers_below_a_saved_ack_are_not_passed_over<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let numbers: Vec<u64> = (1..=3_000).collect();
    for some in numbers.chunks(500) {
        owner.commit(some.iter().map(|&n| Change::Timed(timer(n))).collect()).await;
        for (part, over) in shuffled(some).chunks(100).enumerate() {
            let mut changes: Vec<Change> =
                over.iter().map(|&n| Change::Untimed { at: timer_at(n) }).collect();
            changes.push(timers_acked(timer_at(if part == 4 { some[499] } else { some[0] - 1 })));
            owner.commit(changes).await;
        }
    }
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata.timers.ack, timer_at(3_000));
    let page = owner.timer_page(timer_at(3_000), 100).await;
    assert_eq!((page.rows, page.end, page.deleted), (vec![], true, 0));
    owner.commit(vec![Change::Timed(timer(3_001)), Change::Timed(timer(3_002))]).await;
    let page = owner.timer_page(timer_at(3_000), 1).await;
    assert_eq!((page.rows, page.end, page.deleted), (vec![timer(3_001)], false, 0));
}

/// Rows and timers of the same levels, in the first lane, the last ones and one between, in two shards: reads and
/// deletes of the one are not of the other.
pub async fn timers_and_lanes_do_not_leak_into_each_other<H: Harness>(h: &H) {
    let lanes = [lane(0, 0, 0), LANE, lane(u32::MAX - 1, 255, 255), lane(u32::MAX, 255, 254)];
    let shards = [SHARD, ShardId(SHARD.0 + 1)];
    let store = h.fresh().await;
    let levels: Vec<Level> = (1..=12).map(at).chain([highest()]).collect();
    let timers: Vec<TimerRow> =
        levels.iter().map(|&at| TimerRow { at, task: TaskId(at.seq()), what: Timed::Expire }).collect();
    let tasks = |of: usize| -> Vec<Task> {
        let own = levels.iter().enumerate().filter(|(n, _)| n % lanes.len() == of);
        own.map(|(_, &at)| Task { lane: lanes[of], place: Place::Lane(at), ..task(at.seq()) }).collect()
    };
    for shard in shards {
        let owner = Owner::of(&store, shard).await;
        owner.commit(timed(&timers)).await;
        owner.commit((0..lanes.len()).flat_map(|of| accept_all(&tasks(of))).collect()).await;
    }
    let owner = Owner::new(&store).await;
    assert_eq!(owner.timers().await, timers);
    for (of, &lane) in lanes.iter().enumerate() {
        assert_eq!(owner.rows(lane).await, rows(&tasks(of)), "of lane {lane}");
    }
    // All timers go; then all rows do, and new timers stay.
    owner.commit(vec![Change::Untimed { at: at(1) }, timers_acked(at(6))]).await;
    assert_eq!(owner.timers().await, timers[6..]);
    for (of, &lane) in lanes.iter().enumerate() {
        assert_eq!(owner.rows(lane).await, rows(&tasks(of)), "of lane {lane}");
    }
    let mut changes: Vec<Change> = (0..lanes.len()).flat_map(tasks).map(|task| finished(&task)).collect();
    changes.extend(lanes.map(|lane| acked(lane, highest())));
    owner.commit(changes).await;
    assert_eq!(contents_of(&store, shards[0], &lanes).await.timers, timers[6..]);
    let other = contents_of(&store, shards[1], &lanes).await;
    assert_eq!((other.timers, other.tasks.len()), (timers, levels.len()));
}
