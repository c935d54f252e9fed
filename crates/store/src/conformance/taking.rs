//! Taking a shard: the epoch always rises, and the metadata is what was committed last. The rest of an
//! owner's safety stands on these two.

use evenhand_core::backlog::{Average, Level, VTime, Weight};
use evenhand_core::change::{LaneRecord, QueueRecord, ShelfRecord, Totals};
use evenhand_core::life::Outcome;
use evenhand_core::names::{Epoch, LaneId, QueueId, RequestKey, ShardId, StoreId, TaskId};
use evenhand_core::{Change, Metadata};

use super::Harness;
use super::given::*;
use crate::{History, LAST_SHOWN, Store, StoreError};

/// A shard nobody has heard of can be taken, and 0 stays free to mean "no epoch".
pub async fn a_new_shard_is_empty_at_an_epoch_above_zero<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    assert!(owner.epoch > Epoch(0));
    assert_eq!(owner.metadata, Metadata::default());
    let page = owner.page(LANE, Level::ZERO, 10).await;
    assert!(page.rows.is_empty() && page.end, "{page:?}");
    let timers = owner.timer_page(Level::ZERO, 10).await;
    assert!(timers.rows.is_empty() && timers.end, "{timers:?}");
    assert_eq!(owner.history(1).await, History::default());
    let listing = owner.list(None, 0, 10).await;
    assert!(listing.tasks.is_empty() && listing.more.is_none(), "{listing:?}");
}

/// An epoch that was forgotten (0) or guessed (the first one) does not pass for an owner's.
pub async fn a_shard_that_nobody_took_takes_no_commit<H: Harness>(h: &H) {
    let store = h.fresh().await;
    for epoch in [Epoch(0), Epoch(1)] {
        let answer = store.commit(SHARD, epoch, furniture()).await;
        assert!(matches!(answer, Err(StoreError::Fenced { .. })), "{answer:?} under epoch {epoch}");
    }
    let contents = contents(&store).await;
    assert_eq!(contents.metadata, Metadata::default());
    assert!(contents.tasks.is_empty(), "{:?}", contents.tasks);
}

/// Whatever an owner did or did not do, the next one's epoch is higher.
pub async fn taking_raises_the_epoch_every_time<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let mut last = Epoch(0);
    for round in 1..=20 {
        let owner = Owner::new(&store).await;
        assert!(owner.epoch > last, "{} after {last}", owner.epoch);
        last = owner.epoch;
        if round % 3 == 0 {
            owner.commit(vec![accepted(&task(round))]).await;
        }
    }
}

/// Two servers that take a shard in the same moment cannot both be its owner.
pub async fn two_takes_at_once_get_two_epochs<H: Harness>(h: &H) {
    let store = h.fresh().await;
    for round in 1..=20 {
        let (one, other) = both(Owner::new(&store), Owner::new(&store)).await;
        assert_ne!(one.epoch, other.epoch);
        let (loser, winner) = if one.epoch < other.epoch { (one, other) } else { (other, one) };
        loser.commit_fenced(vec![Change::Seq { next: 999 }], winner.epoch).await;
        winner.commit(vec![Change::Seq { next: round }]).await;
        assert_eq!(Owner::new(&store).await.metadata.next_seq, round);
    }
}

/// Each kind of record comes back as it was saved last: new, changed, and gone.
pub async fn taking_returns_the_metadata_last_committed<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let (mail, render) = (QueueId(0), QueueId(1));
    let levels = |n: u64| LaneRecord {
        ack: at(n),
        max: at(n + 50),
        vtime: VTime::from_bits(u128::from(n) << 64 | 3),
        turn: VTime::from_bits(u128::from(n) << 80 | 5),
    };
    let queue = |name: &str, accepted| QueueRecord {
        name: queue_name(name),
        totals: Totals { accepted, succeeded: 3, failed: 2, canceled: 1, expired: 5, scheduled: 4 },
        average: Average::from_bits(accepted),
    };
    let other = LaneId { queue: mail, ..LANE };
    // The rows of the two long runners, above any ack of this case.
    let (seven, eight) = (task(207), task(208));

    let owner = Owner::new(&store).await;
    owner
        .commit(vec![
            accepted(&seven),
            accepted(&eight),
            set_aside(&seven),
            put_key(LANE, "acme", 1),
            put_key(LANE, "zeta", 2),
            put_key(other, "acme", 3),
            put_override(render, "acme", 1),
            put_override(render, "zeta", 1_000_000),
            Change::Lane { lane: LANE, record: levels(1) },
            Change::Lane { lane: other, record: levels(2) },
            Change::Queue { queue: mail, record: queue("mail", 10) },
            Change::Queue { queue: render, record: queue("render", 20) },
            put_member("gpu-7", 3),
            put_member("gpu-8", 0),
            Change::Stopped { stopped: true },
            Change::Doubt { left_ms: Some(u64::MAX) },
            put_request(0, 1),
            put_request(u128::MAX, 2),
            Change::Store { id: StoreId(u64::MAX) },
            timers_acked(timer_at(9)),
            Change::Canceling { task: TaskId(207) },
            Change::Canceling { task: TaskId(208) },
            put_parked(LANE, "acme", 1),
            put_parked(other, "acme", 2),
            put_paused(mail, "acme", true),
            put_paused(render, "acme", true),
            put_settings(mail, 1),
            put_settings(render, 2),
            Change::Seq { next: 209 },
        ])
        .await;
    let first = Metadata {
        next_seq: 209,
        queues: vec![(mail, queue("mail", 10)), (render, queue("render", 20))],
        overrides: vec![(render, key("acme"), own(Weight::MIN)), (render, key("zeta"), own(Weight::MAX))],
        lanes: vec![(other, levels(2)), (LANE, levels(1))],
        keys: vec![
            (other, key("acme"), key_record(3)),
            (LANE, key("acme"), key_record(1)),
            (LANE, key("zeta"), key_record(2)),
        ],
        aside: vec![aside(&seven)],
        members: vec![(seat_name("gpu-7"), member_record(3)), (seat_name("gpu-8"), member_record(0))],
        stopped: true,
        doubt: Some(u64::MAX),
        requests: vec![(RequestKey(0), request_record(1)), (RequestKey(u128::MAX), request_record(2))],
        timers: ShelfRecord { ack: timer_at(9), max: timer_at(9) },
        canceling: vec![TaskId(207), TaskId(208)],
        parked: vec![(other, key("acme"), parked_record(2)), (LANE, key("acme"), parked_record(1))],
        paused: vec![(mail, key("acme")), (render, key("acme"))],
        settings: vec![(mail, settings_record(1)), (render, settings_record(2))],
        store: Some(StoreId(u64::MAX)),
    };
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata, first);

    owner
        .commit(vec![
            set_aside(&eight),
            ended(&aside(&seven), Outcome::Canceled, None),
            put_key(LANE, "acme", 11),
            forget_key(LANE, "zeta"),
            drop_override(render, "acme"),
            put_override(mail, "acme", 1_500),
            Change::Lane { lane: LANE, record: levels(9) },
            Change::Queue { queue: render, record: queue("render", 21) },
            put_member("gpu-7", 1),
            drop_member("gpu-8"),
            Change::Stopped { stopped: false },
            Change::Doubt { left_ms: Some(60_000) },
            drop_request(u128::MAX),
            timers_acked(timer_at(10)),
            put_parked(other, "acme", 3),
            drop_parked(LANE, "acme"),
            put_paused(mail, "acme", false),
            put_paused(mail, "zeta", true),
            put_settings(render, 6),
            Change::Seq { next: 300 },
        ])
        .await;
    let second = Metadata {
        next_seq: 300,
        queues: vec![(mail, queue("mail", 10)), (render, queue("render", 21))],
        overrides: vec![(mail, key("acme"), own(weight(1_500))), (render, key("zeta"), own(Weight::MAX))],
        lanes: vec![(other, levels(2)), (LANE, levels(9))],
        keys: vec![(other, key("acme"), key_record(3)), (LANE, key("acme"), key_record(11))],
        aside: vec![aside(&eight)],
        members: vec![(seat_name("gpu-7"), member_record(1))],
        stopped: false,
        doubt: Some(60_000),
        requests: vec![(RequestKey(0), request_record(1))],
        timers: ShelfRecord { ack: timer_at(10), max: timer_at(10) },
        canceling: vec![TaskId(208)],
        parked: vec![(other, key("acme"), parked_record(3))],
        paused: vec![(mail, key("zeta")), (render, key("acme"))],
        settings: vec![(mail, settings_record(1)), (render, settings_record(6))],
        store: Some(StoreId(u64::MAX)),
    };
    assert_eq!(Owner::new(&store).await.metadata, second);
}

/// Whoever takes the shard next knows how long it still has to wait, and that it has not.
pub async fn doubt_is_remembered_until_it_is_not<H: Harness>(h: &H) {
    let mut store = h.fresh().await;
    assert_eq!(Owner::new(&store).await.metadata.doubt, None);
    for left_ms in [Some(u64::MAX), Some(60_000), Some(0), None, None, Some(1), None] {
        Owner::new(&store).await.commit(vec![Change::Doubt { left_ms }]).await;
        assert_eq!(Owner::new(&store).await.metadata.doubt, left_ms);
        store = h.reopen(store).await;
        assert_eq!(Owner::new(&store).await.metadata.doubt, left_ms);
        assert_eq!(Owner::of(&store, ShardId(2)).await.metadata.doubt, None);
    }
}

/// What workers have obeyed, nobody may be again: the next owner is above it, and in doubt, and so are those after it.
pub async fn an_epoch_that_a_worker_has_shown_is_left_behind_in_doubt<H: Harness>(h: &H) {
    let mut store = h.fresh().await;
    Owner::new(&store).await.commit(furniture()).await;
    for (before, shown) in [(None, 40), (Some(u64::MAX), 41), (Some(60_000), 1_000), (Some(0), 1), (None, 0)]
    {
        let last = Owner::new(&store).await;
        last.commit(vec![Change::Doubt { left_ms: before }]).await;
        let owner = Owner::shown(&store, Epoch(shown)).await;
        assert!(owner.epoch > last.epoch && owner.epoch > Epoch(shown), "{} after {shown}", owner.epoch);
        assert_eq!(owner.metadata, Metadata { doubt: Some(u64::MAX), ..last.metadata.clone() });
        last.commit_fenced(vec![Change::Doubt { left_ms: None }], owner.epoch).await;
        let (epoch, metadata) = (owner.epoch, owner.metadata);
        store = h.reopen(store).await;
        let next = Owner::new(&store).await;
        assert!(next.epoch > epoch, "{} after {epoch}", next.epoch);
        assert_eq!(next.metadata, metadata);
    }
}

/// Nor can a shard be brought to its last epoch, above which nobody could take it.
pub async fn an_epoch_that_none_could_be_above_is_refused<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    for shown in [Epoch(u64::MAX), Epoch(LAST_SHOWN.0 + 1)] {
        let answer = store.take(SHARD, Some(shown)).await;
        assert!(matches!(answer, Err(StoreError::Full { .. })), "{answer:?}");
        owner.commit(vec![Change::Seq { next: 5 }]).await;
    }
    assert_eq!(Owner::new(&store).await.metadata.doubt, None);
    let above = Owner::shown(&store, LAST_SHOWN).await.epoch;
    assert!(above > LAST_SHOWN && Owner::new(&store).await.epoch > above);
}

/// A shard that changes hands and is not worked on stays as it is.
pub async fn taking_changes_nothing_but_the_epoch<H: Harness>(h: &H) {
    let store = h.fresh().await;
    Owner::new(&store).await.commit(furniture()).await;
    let before = contents(&store).await;
    for _ in 0..5 {
        assert_eq!(contents(&store).await, before);
    }
}

/// A restart with many keys in the backlog changes nobody's place: none is left out of a long answer.
pub async fn taking_returns_every_one_of_100_000_keys<H: Harness>(h: &H) {
    const KEYS: u32 = 100_000;
    let name = |n: u32| format!("tenant-{n:06}");
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let numbers: Vec<u32> = (1..=KEYS).collect();
    for some in shuffled(&numbers).chunks(10_000) {
        owner.commit(some.iter().map(|&n| put_key(LANE, &name(n), n)).collect()).await;
    }
    let expected: Vec<_> = numbers.iter().map(|&n| (LANE, key(&name(n)), key_record(n))).collect();
    let keys = Owner::new(&store).await.metadata.keys;
    assert!(keys == expected, "{} keys of {KEYS}, or not what was saved", keys.len());
}

/// What was acknowledged outlives the process, and so does the epoch: an owner from before a crash is
/// fenced after it.
pub async fn reopening_keeps_everything_and_the_epoch_goes_on_rising<H: Harness>(h: &H) {
    let store = h.fresh().await;
    Owner::new(&store).await.commit(furniture()).await;
    let before = contents(&store).await;
    let mut store = store;
    let mut last = Owner::new(&store).await.epoch;
    for _ in 0..3 {
        store = h.reopen(store).await;
        let stale = store.commit(SHARD, Epoch(last.0 - 1), vec![Change::Seq { next: 999 }]).await;
        assert_eq!(stale, Err(StoreError::Fenced { epoch: Epoch(last.0 - 1), current: last }));
        assert_eq!(contents(&store).await, before);
        let epoch = Owner::new(&store).await.epoch;
        assert!(epoch > last, "{epoch} after {last}");
        last = epoch;
    }
    // An owner whose server lives on may go on after the store's restart: its epoch is still the shard's.
    let epoch = last;
    store = h.reopen(store).await;
    let answer = store.commit(SHARD, epoch, vec![Change::Seq { next: 77 }]).await;
    assert_eq!(answer, Ok(()));
    store = h.reopen(store).await;
    assert_eq!(contents(&store).await.metadata.next_seq, 77);
}
