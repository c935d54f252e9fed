//! What must always be true. One walk over a shard, called after every step in tests and simulation.

use std::collections::{BTreeMap, BTreeSet};

use crate::backlog::Lane;
use crate::names::{QueueId, WorkerId};
use crate::owner::Owner;
use crate::shard::{KeyHold, Parked, ParkedKey, Shard};
use crate::timers::due_at;
use crate::workers::LiveRun;

/// Checks every invariant of a shard between steps; the error says which one does not hold, and where.
pub fn invariants(shard: &Shard) -> Result<(), String> {
    for (ix, lane) in shard.lane_states() {
        levels(lane).and_then(|()| keys(lane)).map_err(|what| format!("lane {}: {what}", lane.id))?;
        if lane.window.is_unread() && !lane.window.is_reading() && lane.read_retry.is_none() {
            return Err(format!("lane {}: rows may wait, but no read is on its way", lane.id));
        }
        if lane.window.is_reading() && !shard.has_load_for(ix) {
            return Err(format!("lane {}: it waits for a read that nobody asked for", lane.id));
        }
    }
    timers(shard)?;
    for (at, parked) in &shard.parked {
        let (lane, key) = at;
        let held = shard.key_hold(lane.queue, key).is_some();
        parked.shelf.check().map_err(|what| format!("parked rows of key {key}: {what}"))?;
        let window = &parked.shelf.window;
        let looked_at = held
            || parked.to_come == 0
            || shard.awaits_rate(lane.queue, key)
            || !shard.may_start()
            || shard.is_returning(at);
        let read = window.is_reading() || parked.shelf.read_retry.is_some();
        ensure(looked_at || !window.is_unread() || read, || {
            format!("key {key} may run, and no read of its parked rows is on its way")
        })?;
        ensure(looked_at || !shard.is_due_back(at), || {
            format!("key {key} has parked rows that may have their places, and nothing will give them")
        })?;
        let by_rate = matches!(shard.key_hold(lane.queue, key), Some(KeyHold::AtRate { .. }));
        ensure(!by_rate || !shard.may_start() || shard.awaits_rate(lane.queue, key), || {
            format!("key {key} is held by its rate, and nothing will look at it again")
        })?;
        ensure(parked.rows > 0, || format!("key {key} has a shelf and needs none"))?;
    }
    let aside = shard.unreported_aside();
    ensure(aside == 0 || !shard.may_start(), || {
        format!("{aside} long runners wait, and nothing will start them")
    })?;
    slots(shard)?;
    admission(shard)?;
    queues(shard)
}

/// What is kept of classes, keys and workers that can make room equals what runs.
fn admission(shard: &Shard) -> Result<(), String> {
    for (n, queue) in shard.queues.iter().enumerate() {
        let id = QueueId(n as u32);
        let slots: u64 = shard
            .workers
            .values()
            .filter(|worker| worker.queues.iter().any(|(served, _)| *served == id))
            .map(|worker| u64::from(worker.slots))
            .sum();
        ensure(slots == queue.slots, || format!("queue {id} has {slots} slots, {} counted", queue.slots))?;
        let classes = shard.classes_of(id);
        ensure(classes.is_empty() == queue.holders.is_none(), || {
            format!("queue {id} has classes, or has not")
        })?;
        for live in shard.runs.values().filter(|live| live.default && live.run.lane.queue == id) {
            let (has, class) =
                (live.run.limit_ms, classes.get(live.class).map_or(0, |class| class.duration_ms));
            // (Classes may have become shorter while it ran.)
            let longest = live.class + 1 == classes.len();
            ensure(has == 0 || has <= class || longest, || {
                format!("task {} holds the class of {class} ms, and has {has} ms", live.run.task)
            })?;
        }
        let Some(holders) = &queue.holders else { continue };
        let runs = || shard.runs.values().filter(|live| live.run.lane.queue == id);
        for class in 0..classes.len() {
            let held = runs().filter(|live| live.class >= class).count() as u64;
            let kept = holders.count(class);
            ensure(held == kept, || format!("queue {id}: {held} runs hold class {class}, {kept} counted"))?;
            let defaults = runs().filter(|live| live.default && live.class == class).count();
            ensure(defaults == holders.defaults(class), || format!("queue {id}: defaults of class {class}"))?;
        }
    }
    for (id, worker) in &shard.workers {
        let yields = |live: &&LiveRun| {
            live.worker == *id && (live.default && live.class > 0 || live.run.task.is_interactive())
        };
        let runs: BTreeSet<_> = shard.runs.values().filter(yields).map(|live| live.run.task).collect();
        ensure(runs == worker.yielding, || format!("worker {id} is wrong about what can make room"))?;
        for (queue, _) in &worker.queues {
            let listed = shard.queues[queue.0 as usize].yielding.contains(id);
            ensure(listed != runs.is_empty(), || {
                format!("worker {id} is listed wrongly as able to make room")
            })?;
        }
    }
    Ok(())
}

/// Checks every invariant of an owner between steps, its shard's included.
pub fn owner(owner: &Owner) -> Result<(), String> {
    invariants(owner.shard())?;
    owner.check()
}

/// The same as for lanes; and what is due has been done, or is about to be.
fn timers(shard: &Shard) -> Result<(), String> {
    let shelf = &shard.timers.shelf;
    shelf.check().map_err(|what| format!("timers: {what}"))?;
    let window = &shelf.window;
    let cursor = due_at(window.ack());
    ensure(cursor <= shard.time(), || {
        format!("timers: the cursor is at {cursor}, and that is still to come")
    })?;
    ensure(!window.is_unread() || window.is_reading() || shelf.read_retry.is_some(), || {
        "timers: some may be due, but no read is on its way".to_string()
    })?;
    ensure(!window.is_reading() || shard.has_load_for_timers(), || {
        "timers: they wait for a read that nobody asked for".to_string()
    })
}

/// A <= R, nothing outstanding at or below A, waiting rows in (A, R].
fn levels(lane: &Lane) -> Result<(), String> {
    let window = &lane.window;
    let (ack, read) = (window.ack(), window.read());
    ensure(ack <= read, || format!("A {ack} is above R {read}"))?;
    if let Some((&first, _)) = window.waiting().first_key_value() {
        ensure(first > ack, || format!("{first} waits, but A is {ack}"))?;
    }
    if let Some((&last, _)) = window.waiting().last_key_value() {
        ensure(last <= read, || format!("{last} is in the window, but R is {read}"))?;
        ensure(last <= window.max(), || format!("{last} is in the window, but M is {}", window.max()))?;
    }
    if let Some((&first, _)) = window.running().first_key_value() {
        ensure(first > ack, || format!("{first} runs, but A is {ack}"))?;
    }
    if let Some(pin) = lane.pin() {
        ensure(pin > ack, || format!("{pin} is being written, but A is {ack}"))?;
    }
    for level in window.running().keys() {
        ensure(!window.waiting().contains_key(level), || format!("{level} both waits and runs"))?;
    }
    Ok(())
}

/// The sums that are kept equal what they sum; no key is behind its own rows; every key is remembered
/// for a reason.
fn keys(lane: &Lane) -> Result<(), String> {
    let mut waiting_weights = 0;
    let mut known: BTreeMap<_, (u32, _)> = BTreeMap::new();
    for (&level, entry) in lane.window.waiting() {
        let (rows, last) = known.entry(entry.key).or_insert((0, level));
        *rows += 1;
        *last = level;
    }
    let mut running = 0;
    for (ix, state) in lane.places.keys().iter() {
        let key = &state.key;
        if state.waiting > 0 {
            waiting_weights += u64::from(state.weight.thousandths());
        } else if state.rows == 0 {
            let remembered = state.alarmed || state.finish > lane.places.vtime();
            ensure(remembered, || format!("key {key} should have been forgotten"))?;
            ensure(state.alarmed, || format!("key {key} is idle, and nothing will forget it"))?;
        }
        ensure(state.chain <= state.waiting, || format!("key {key} has a chain longer than what waits"))?;
        let chained = state.chain <= state.chained && state.chained <= state.rows;
        ensure(chained, || format!("key {key} counts its chain wrongly"))?;
        ensure(state.chain == 0 || state.alarmed, || format!("key {key} waits, and nothing holds V for it"))?;
        running += state.rows.saturating_sub(state.waiting) as usize;
        ensure(state.waiting <= state.rows, || format!("key {key} has more waiting rows than rows"))?;
        if let Some((rows, last)) = known.remove(&ix) {
            ensure(rows <= state.waiting, || {
                format!("key {key}: {rows} rows known, {} waiting", state.waiting)
            })?;
            ensure(last.pass() <= state.finish.pass(), || {
                format!("key {key}: a task at {last}, but F is {}", state.finish)
            })?;
        }
    }
    ensure(known.is_empty(), || "a row names a key that is forgotten".to_string())?;
    let (sum, is) = (waiting_weights, lane.places.waiting_weights());
    ensure(sum == is, || format!("weights of waiting keys sum to {sum}, kept is {is}"))?;
    let rows: u64 = lane.places.keys().iter().map(|(_, state)| u64::from(state.rows)).sum();
    ensure(rows == lane.places.rows(), || format!("{rows} rows of keys, kept is {}", lane.places.rows()))?;
    let is = lane.window.running().len();
    ensure(running == is, || format!("keys count {running} running rows, the window {is}"))?;
    let (alarms, keys) = (lane.places.alarms(), lane.places.keys().len());
    ensure(alarms <= keys, || format!("{alarms} alarms for {keys} keys"))
}

/// Slots held equal runs alive, and no slot is free that could be used.
fn slots(shard: &Shard) -> Result<(), String> {
    let mut runs: BTreeMap<WorkerId, u32> = BTreeMap::new();
    for live in shard.runs.values() {
        *runs.entry(live.worker).or_default() += 1;
    }
    for (id, worker) in &shard.workers {
        let alive = runs.remove(id).unwrap_or(0);
        ensure(worker.busy == alive, || format!("worker {id} holds {} slots for {alive} runs", worker.busy))?;
        for (queue, _) in &worker.queues {
            let listed = shard.queues[queue.0 as usize].free.contains(id);
            ensure(listed == worker.has_free_slot(), || {
                format!("worker {id} is listed wrongly as free or not")
            })?;
            // What is about to be looked at is no concern yet: a commit was sealed that had held it up.
            let idle = shard.may_start()
                && worker.has_free_slot()
                && !shard.is_ready(*queue)
                && shard.startable(*queue).is_some();
            ensure(!idle, || format!("worker {id} has a free slot and queue {queue} something to start"))?;
            let room = shard.may_start()
                && !shard.is_ready(*queue)
                && shard.could_make_room(*queue)
                && shard.startable(*queue).is_some();
            ensure(!room, || {
                format!(
                    "a task of queue {queue} waits, and nothing looks at the runs that could make room for it"
                )
            })?;
            let passed_over = shard.may_start()
                && worker.has_free_slot()
                && !shard.is_ready(*queue)
                && shard.moves_left()
                && shard.could_start(*queue);
            ensure(!passed_over, || {
                format!(
                    "worker {id} has a free slot, and a task of queue {queue} that may run is passed over"
                )
            })?;
        }
    }
    for (id, queue) in shard.queues.iter().enumerate().filter(|(_, queue)| queue.holders.is_some()) {
        let id = QueueId(id as u32);
        let looked_at = !shard.may_start() || shard.is_ready(id) || !shard.moves_left();
        let stands_still = shard.settings_of(id).paused || shard.rate_wait(id).is_some();
        if looked_at || stands_still || queue.free.is_empty() {
            continue;
        }
        for lane in queue.lanes.values().map(|ix| shard.lane_at(*ix)) {
            let first = lane.window.waiting().first_key_value();
            let needs = first.map(|(_, entry)| shard.needs(id, entry.max_duration_ms()));
            ensure(needs.is_none_or(|needs| needs == usize::from(lane.id.class.0)), || {
                format!("lane {}: its first task needs another class, and may hide those behind it", lane.id)
            })?;
        }
    }
    ensure(runs.is_empty(), || "a run belongs to no worker".to_string())
}

/// Counts that are kept equal what they count.
fn queues(shard: &Shard) -> Result<(), String> {
    for (_, lane) in shard.lane_states() {
        let of_lane = |((of, _), _): &(&ParkedKey, &Parked)| *of == lane.id;
        let to_come: u64 = shard.parked.iter().filter(of_lane).map(|(_, parked)| parked.to_come).sum();
        let kept = lane.places.to_come;
        ensure(to_come == kept, || format!("lane {}: {to_come} rows are to come, {kept} counted", lane.id))?;
    }
    for (n, queue) in shard.queues.iter().enumerate() {
        let id = QueueId(n as u32);
        let of_tasks = |live: &&LiveRun| live.run.lane.queue == id && !live.run.task.is_interactive();
        let running = shard.runs.values().filter(of_tasks).count() as u64;
        ensure(running == queue.running, || {
            format!("queue {id}: {running} runs, {} counted", queue.running)
        })?;
        let rows: u64 = shard
            .lane_states()
            .filter(|(_, lane)| lane.id.queue == id)
            .flat_map(|(_, lane)| lane.places.keys().iter().map(|(_, state)| u64::from(state.rows)))
            .sum();
        for live in shard.runs.values().filter(|live| live.run.lane.queue == id) {
            let of_key = |other: &&LiveRun| other.run.lane.queue == id && other.run.key == live.run.key;
            let runs = shard.runs.values().filter(of_key).count() as u64;
            let (key, kept) = (&live.run.key, shard.key_counts(&queue.record.name, &live.run.key).running);
            ensure(runs == kept, || format!("queue {id}, key {key}: {runs} runs, {kept} counted"))?;
        }
        let (total, aside) = (queue.record.totals.unfinished(), shard.aside_of(id));
        let scheduled = queue.record.totals.scheduled;
        let parked = shard.parked_of(id);
        ensure(total == rows + aside + scheduled + parked, || {
            format!(
                "queue {id}: {total} unfinished, {rows} rows, {aside} aside, {scheduled} scheduled, {parked} parked"
            )
        })?;
    }
    Ok(())
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}
