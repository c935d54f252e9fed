//! Reading a lane: in the order of levels, above a level, by pages, to an end that is certain, and
//! nothing of any other lane or shard. The window is built on each of these.

use evenhand_core::backlog::Level;
use evenhand_core::change::Place;
use evenhand_core::names::{LaneId, ShardId};
use evenhand_core::{Change, Row, Task};

use super::Harness;
use super::given::*;

/// Tasks at levels whose order is easy to get wrong: wherever a number could be taken for a signed one,
/// a float, a text, or cut off.
fn awkward_tasks() -> Vec<Task> {
    let passes: [u128; 16] = [
        0,
        1,
        9,
        10,
        (1 << 15) - 1, // the lower half of a level, if halves are signed
        1 << 15,
        (1 << 16) - 1, // the upper half of a level
        1 << 16,
        (1 << 52) + 1, // 53 bits are exact in a float
        (1 << 53) + 1,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        1 << 64,
        (1 << 79) - 1, // the highest bit of a level
        (1 << 80) - 1,
    ];
    // Each pass has a seq near each of these. No two tasks share a seq, as in a real shard.
    let seqs: [u64; 7] = [1, 250, 65_528, (1 << 31) - 8, (1 << 32) - 8, (1 << 47) - 8, Level::LAST_SEQ - 15];
    let mut tasks = Vec::new();
    for (n, pass) in (0..).zip(passes) {
        for seq in seqs {
            tasks.push(Task { place: Place::Lane(level(pass, seq + n)), ..task(seq + n) });
        }
    }
    tasks
}

/// Levels are written as tasks come, not as they will be served.
pub async fn rows_come_in_the_order_of_levels_whatever_order_they_were_written_in<H: Harness>(h: &H) {
    let ordered = awkward_tasks();
    assert!(ordered.is_sorted_by_key(level_of), "the case lists them in order");
    let reversed: Vec<Task> = ordered.iter().rev().cloned().collect();
    for written in [&ordered, &reversed, &shuffled(&ordered)] {
        for together in [1, 10, written.len()] {
            let store = h.fresh().await;
            let owner = Owner::new(&store).await;
            for some in written.chunks(together) {
                owner.commit(accept_all(some)).await;
            }
            assert_eq!(owner.page(LANE, Level::ZERO, ALL).await.rows, rows(&ordered));
        }
    }
}

/// Exclusive, whether there is a row at that level, was one, or never was.
pub async fn a_read_starts_above_its_level<H: Harness>(h: &H) {
    let ordered = awkward_tasks();
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&shuffled(&ordered))).await;
    for (n, task) in ordered.iter().enumerate() {
        let first = |page: crate::Page| page.rows.first().cloned();
        assert_eq!(first(owner.page(LANE, level_of(task), 1).await), ordered.get(n + 1).map(row));
        assert_eq!(first(owner.page(LANE, level_of(task).before(), 1).await), Some(row(task)));
    }
    let gone = &ordered[50];
    owner.commit(vec![finished(gone)]).await;
    assert_eq!(owner.page(LANE, level_of(gone), 1).await.rows, rows(&ordered[51..52]));
    assert_eq!(owner.page(LANE, level_of(gone).before(), 1).await.rows, rows(&ordered[51..52]));
    assert_eq!(owner.page(LANE, highest(), ALL).await.rows, []);
}

/// A reader has room for so many and no more; it may ask for more than there can be.
pub async fn a_read_returns_no_more_than_its_limit<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let tasks: Vec<Task> = (1..=20).map(task).collect();
    owner.commit(accept_all(&tasks)).await;
    for limit in 1..=20 {
        assert_eq!(owner.page(LANE, Level::ZERO, limit).await.rows, rows(&tasks[..limit]));
    }
    for limit in [21, ALL, u32::MAX as usize, i64::MAX as usize, usize::MAX] {
        let page = owner.page(LANE, Level::ZERO, limit).await;
        assert_eq!(page.rows, rows(&tasks));
        assert!(page.end, "with a limit of {limit}");
    }
}

/// A reader that is told of the end reads no more, and one that is not must find something above.
pub async fn the_end_of_a_lane_is_exact<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let page = async |above, limit| {
        let page = owner.page(LANE, above, limit).await;
        (page.rows, page.end)
    };
    assert_eq!(page(Level::ZERO, 1).await, (vec![], true));

    // Neighbours on both sides, which are not of this lane.
    for (n, lane) in [(91, lane(1, 5, 1)), (92, lane(1, 4, 0))] {
        owner.commit(vec![accepted(&Task { lane, ..task(n) })]).await;
    }
    assert_eq!(page(Level::ZERO, 1).await, (vec![], true));

    owner.commit(accept_all(&[task(1), task(2), task(3)])).await;
    assert_eq!(page(Level::ZERO, 2).await, (rows(&[task(1), task(2)]), false));
    assert_eq!(page(Level::ZERO, 3).await, (rows(&[task(1), task(2), task(3)]), true));
    assert_eq!(page(Level::ZERO, 4).await, (rows(&[task(1), task(2), task(3)]), true));
    assert_eq!(page(at(1), 1).await, (rows(&[task(2)]), false));
    assert_eq!(page(at(2), 1).await, (rows(&[task(3)]), true));
    assert_eq!(page(at(3), 1).await, (vec![], true));

    // What was deleted is not a row, and does not stand between a page and the end.
    owner.commit(vec![finished(&task(3))]).await;
    assert_eq!(page(Level::ZERO, 2).await, (rows(&[task(1), task(2)]), true));
    assert_eq!(page(at(1), 1).await, (rows(&[task(2)]), true));
    owner.commit(vec![accepted(&task(4))]).await;
    assert_eq!(page(Level::ZERO, 2).await, (rows(&[task(1), task(2)]), false));
    owner.commit(vec![set_aside(&task(4))]).await;
    assert_eq!(page(Level::ZERO, 2).await, (rows(&[task(1), task(2)]), true));
}

/// No row is lost or repeated where two pages meet, whatever their size.
pub async fn paging_gives_every_row_once<H: Harness>(h: &H) {
    const ROWS: u64 = 2_500;
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    // Ten at each pass, so that pages also meet between rows of the same pass.
    let tasks: Vec<Task> =
        (1..=ROWS).map(|n| Task { place: Place::Lane(level(u128::from(n / 10), n)), ..task(n) }).collect();
    for some in shuffled(&tasks).chunks(500) {
        owner.commit(accept_all(some)).await;
    }
    let expected = rows(&tasks);
    for limit in [1, 2, 3, 7, 499, 1_250, 2_499, 2_500, 2_501] {
        let found: Vec<Row> = owner.rows_by(LANE, limit).await;
        assert!(found == expected, "{} rows of {ROWS} by pages of {limit}, or not in order", found.len());
    }
}

/// Lanes that differ in one number, by one, or that look alike when their numbers are put together.
fn neighbours() -> Vec<LaneId> {
    let mut lanes = vec![
        lane(0, 0, 0),
        lane(0, 0, 255),
        lane(0, 1, 0),
        lane(0, 255, 255),
        lane(1, 0, 0),
        lane(1, 1, 1),
        lane(1, 1, 11),
        lane(1, 11, 1),
        lane(11, 1, 1),
        lane(1, 5, 0),
        lane(1, 5, 1),
        lane(1, 6, 0),
        lane(2, 5, 0),
        lane(255, 5, 0),
        lane(256, 5, 0),
        lane(1 << 31, 5, 0),
        lane(u32::MAX, 0, 0),
        lane(u32::MAX - 1, 255, 255),
        lane(u32::MAX, 255, 254),
    ];
    lanes.sort();
    lanes
}

/// Each lane has rows from its lowest level to the highest, so that a read that runs on meets others'.
fn tasks_of(lanes: &[LaneId]) -> Vec<Vec<Task>> {
    let of_lane = |(n, &lane): (u64, &LaneId)| {
        let last = Level::LAST_SEQ - n;
        vec![
            Task { lane, place: Place::Lane(level(0, 1 + n)), ..task(1 + n) },
            Task { lane, place: Place::Lane(level(5, 100 + n)), ..task(100 + n) },
            Task { lane, place: Place::Lane(level((1 << 80) - 1, last)), ..task(last) },
        ]
    };
    (0u64..).zip(lanes).map(of_lane).collect()
}

/// A read of one lane returns that lane, to its last row and not beyond.
pub async fn lanes_do_not_leak_into_each_other<H: Harness>(h: &H) {
    let lanes = neighbours();
    let tasks = tasks_of(&lanes);
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&shuffled(&tasks.concat()))).await;
    for (&lane, expected) in lanes.iter().zip(&tasks) {
        assert_eq!(owner.page(lane, Level::ZERO, ALL).await.rows, rows(expected), "of lane {lane}");
        let last = owner.page(lane, level_of(&expected[1]), 1).await;
        assert_eq!((last.rows, last.end), (rows(&expected[2..]), true), "of lane {lane}");
        let beyond = owner.page(lane, highest(), 1).await;
        assert_eq!((beyond.rows, beyond.end), (vec![], true), "of lane {lane}");
    }
}

/// Deletes by row and by range stay in their lane, though other lanes have rows in the same range.
pub async fn lanes_do_not_delete_in_each_other<H: Harness>(h: &H) {
    let lanes = neighbours();
    let mut tasks = tasks_of(&lanes);
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(accept_all(&tasks.concat())).await;
    for n in 0..lanes.len() {
        // In turn: a whole lane goes and its ack is the highest there is, the lower rows of a lane go
        // and its ack follows, one row goes.
        let (gone, ack) = match n % 3 {
            0 => (tasks[n].clone(), Some(highest())),
            1 => (tasks[n][..2].to_vec(), Some(level_of(&tasks[n][1]))),
            _ => (tasks[n][1..2].to_vec(), None),
        };
        let mut changes: Vec<Change> = gone.iter().map(finished).collect();
        changes.extend(ack.map(|ack| acked(lanes[n], ack)));
        owner.commit(changes).await;
        tasks[n].retain(|task| !gone.contains(task));
        for (&lane, left) in lanes.iter().zip(&tasks) {
            assert_eq!(owner.page(lane, Level::ZERO, ALL).await.rows, rows(left), "of lane {lane}");
        }
    }
}

/// The same lanes, levels, ids and keys in several shards.
pub async fn shards_do_not_leak_into_each_other<H: Harness>(h: &H) {
    let shards = [0, 1, 2, 255, 256, 1 << 31, u32::MAX].map(ShardId);
    let lanes = [lane(0, 0, 0), LANE, lane(u32::MAX, 255, 254)];
    let store = h.fresh().await;
    let mut before = Vec::new();
    for (n, &shard) in (1u32..).zip(&shards) {
        let own = |id: u64, lane| Task { lane, payload: vec![n as u8].into(), ..task(id) };
        let owner = Owner::of(&store, shard).await;
        owner.commit(accept_all(&[own(1, lanes[0]), own(2, LANE), own(3, lanes[2]), own(4, LANE)])).await;
        owner
            .commit(vec![
                set_aside(&own(4, LANE)),
                put_key(LANE, "acme", n),
                put_override(LANE.queue, "acme", n),
                put_queue(LANE.queue, &format!("render-{n}"), u64::from(n)),
                Change::Lane { lane: LANE, record: Default::default() },
                Change::Seq { next: 4 + u64::from(n) },
            ])
            .await;
        let contents = contents_of(&store, shard, &lanes).await;
        assert_eq!(contents.tasks, [own(1, lanes[0]), own(2, LANE), own(3, lanes[2]), aside(&own(4, LANE))]);
        assert_eq!(contents.metadata.keys, [(LANE, key("acme"), key_record(n))]);
        assert_eq!(contents.metadata.next_seq, 4 + u64::from(n));
        before.push(contents);
    }
    // One shard is emptied; the others keep what they have.
    let owner = Owner::of(&store, shards[1]).await;
    let mut changes: Vec<Change> = before[1].tasks.iter().map(finished).collect();
    changes.extend(lanes.iter().map(|&lane| acked(lane, highest())));
    changes.extend([forget_key(LANE, "acme"), drop_override(LANE.queue, "acme"), Change::Seq { next: 99 }]);
    owner.commit(changes).await;
    for (&shard, before) in shards.iter().zip(&before) {
        let contents = contents_of(&store, shard, &lanes).await;
        if shard == shards[1] {
            assert!(contents.tasks.is_empty() && contents.metadata.keys.is_empty(), "{contents:?}");
        } else {
            assert_eq!(contents, *before, "shard {shard}");
        }
    }
}
