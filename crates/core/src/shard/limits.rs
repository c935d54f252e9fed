//! Limits of keys and rates: how many tasks of a key may run at once, and how much of a queue or of a key may start in a
//! second. A key that is at one of its limits is *held*: like one that is paused it gives its places up and waits on its
//! shelf, so that it costs others nothing, and comes back with as many rows as may run.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;

use super::parking::ParkedKey;
use super::{Alarm, LaneIx, Shard};
use crate::admission::Rate;
use crate::admission::rate::Bucket;
use crate::backlog::Cost;
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Change, Override};
use crate::messages::{Answer, Effect, KeyChange};
use crate::names::{Key, Millis, QueueId, QueueName, RequestId};
use crate::refusal::Refusal;

/// What is known of the keys of a queue that has limits for them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keyed {
    uses: BTreeMap<Key, KeyUse>,
    /// Keys that are held by their limits, and by their rates.
    at_limit: u64,
    at_rate: u64,
    /// Up to where it was last looked what need not be remembered.
    swept: Option<Key>,
}

/// What a key uses now.
#[derive(Clone, Copy, Debug)]
struct KeyUse {
    running: u32,
    bucket: Bucket,
    /// It is held by its rate until then.
    until: Option<Millis>,
    /// What held it when it was last looked at.
    held: Option<HeldBy>,
}

/// What holds a key, for the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeldBy {
    Limit,
    Rate,
}

impl Keyed {
    fn count_held(&mut self, key: &Key, held: Option<HeldBy>) {
        let Some(used) = self.uses.get_mut(key) else { return };
        let before = std::mem::replace(&mut used.held, held);
        for (held, more) in [(before, false), (held, true)] {
            let count = match held {
                Some(HeldBy::Limit) => &mut self.at_limit,
                Some(HeldBy::Rate) => &mut self.at_rate,
                None => continue,
            };
            *count = if more { *count + 1 } else { count.saturating_sub(1) };
        }
    }
}

/// Why none of a key's tasks may start now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyHold {
    /// It is paused.
    Paused,
    /// So many of its tasks run, and no more may.
    AtLimit {
        /// Runs.
        running: u32,
        /// What is allowed.
        limit: u32,
    },
    /// As much of it has started as its rate allows.
    AtRate {
        /// The rate.
        rate: Rate,
        /// When the next may start.
        until: Millis,
    },
}

impl fmt::Display for KeyHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyHold::Paused => f.write_str("its key is paused"),
            KeyHold::AtLimit { running, limit } => write!(f, "its key is at its limit, {running} of {limit}"),
            KeyHold::AtRate { rate, .. } => {
                write!(
                    f,
                    "its key has started as much as its rate allows, {} a second",
                    rate.per_second as f64 / 1_000.0
                )
            }
        }
    }
}

impl Shard {
    /// Whether keys of this queue can have limits at all.
    fn is_keyed(&self, queue: QueueId) -> bool {
        self.queues[queue.0 as usize].keyed.is_some()
    }

    /// How many tasks of a key may run at once, by its own limit or by that of its queue.
    pub fn key_limit(&self, queue: QueueId, key: &Key) -> Option<u32> {
        let over = self.queues[queue.0 as usize].overrides.get(key);
        over.and_then(|over| over.limit).or(self.settings_of(queue).key_limit)
    }

    /// How much of a key may start in a second, by its own rate or by that of its queue.
    pub fn key_rate(&self, queue: QueueId, key: &Key) -> Option<Rate> {
        let over = self.queues[queue.0 as usize].overrides.get(key);
        over.and_then(|over| over.rate).or(self.settings_of(queue).key_rate)
    }

    fn unused(&self) -> KeyUse {
        // Whatever an earlier owner has let start: since this one began, nothing has.
        let began = self.began.unwrap_or(self.now);
        let began = if self.canary.is(Bug::RateFullAfterRestart) { Millis(0) } else { began };
        KeyUse { running: 0, bucket: Bucket::empty(began), until: None, held: None }
    }

    fn use_of(&self, queue: QueueId, key: &Key) -> KeyUse {
        let keyed = self.queues[queue.0 as usize].keyed.as_ref();
        keyed.and_then(|keyed| keyed.uses.get(key)).copied().unwrap_or_else(|| self.unused())
    }

    /// Why no task of this key may start now, if none may.
    pub fn key_hold(&self, queue: QueueId, key: &Key) -> Option<KeyHold> {
        if self.key_is_paused(queue, key) {
            return Some(KeyHold::Paused);
        }
        if !self.is_keyed(queue) {
            return None;
        }
        let used = self.use_of(queue, key);
        if let Some(limit) = self.key_limit(queue, key).filter(|limit| used.running >= *limit)
            && !self.canary.is(Bug::KeyLimitIgnored)
        {
            return Some(KeyHold::AtLimit { running: used.running, limit });
        }
        let rate = self.key_rate(queue, key)?;
        let until = used.bucket.ready_at(rate, self.now);
        (until > self.now).then_some(KeyHold::AtRate { rate, until })
    }

    /// Everything that keeps the tasks of this key from being started now.
    pub fn key_holds(&self, queue: QueueId, key: &Key) -> Vec<KeyHold> {
        let mut holds = Vec::new();
        if self.key_is_paused(queue, key) {
            holds.push(KeyHold::Paused);
        }
        if self.is_keyed(queue) {
            let (used, limit) = (self.use_of(queue, key), self.key_limit(queue, key));
            if let Some(limit) = limit.filter(|limit| used.running >= *limit) {
                holds.push(KeyHold::AtLimit { running: used.running, limit });
            }
            if let Some(rate) = self.key_rate(queue, key) {
                let until = used.bucket.ready_at(rate, self.now);
                holds.extend((until > self.now).then_some(KeyHold::AtRate { rate, until }));
            }
        }
        holds
    }

    /// How many more rows of this key its limit lets have places in a lane where so many wait.
    pub(super) fn room_by_limit(&self, queue: QueueId, key: &Key, waiting: u32) -> u64 {
        if !self.is_keyed(queue) {
            return u64::MAX;
        }
        let used = self.use_of(queue, key);
        let by_limit =
            self.key_limit(queue, key).map_or(u64::MAX, |limit| limit.saturating_sub(used.running).into());
        let by_rate =
            self.key_rate(queue, key).map_or(u64::MAX, |rate| used.bucket.available(rate, self.now));
        by_limit.min(by_rate).saturating_sub(waiting.into())
    }

    /// When this queue may start something again, if it may not now because of its rate.
    pub(crate) fn rate_wait(&self, queue: QueueId) -> Option<Millis> {
        let (rate, bucket) = self.rate_of(queue)?;
        Some(bucket.ready_at(rate, self.now)).filter(|until| *until > self.now)
    }

    /// What may start of a queue in a second, and what is left of that.
    pub(crate) fn rate_of(&self, queue: QueueId) -> Option<(Rate, Bucket)> {
        let rate = self.settings_of(queue).rate?;
        Some((rate, self.queues[queue.0 as usize].bucket.unwrap_or(self.unused().bucket)))
    }

    /// Something of this queue and this key starts.
    pub(super) fn take_rate(&mut self, queue: QueueId, key: &Key, cost: Cost) {
        let now = self.now;
        if let Some(rate) = self.settings_of(queue).rate {
            let mut bucket = self.queues[queue.0 as usize].bucket.unwrap_or(self.unused().bucket);
            bucket.take(rate, rate.takes(cost), now);
            self.queues[queue.0 as usize].bucket = Some(bucket);
        }
        if self.is_keyed(queue)
            && let Some(rate) = self.key_rate(queue, key)
        {
            let unused = self.unused();
            if let Some(keyed) = &mut self.queues[queue.0 as usize].keyed {
                keyed.uses.entry(key.clone()).or_insert(unused).bucket.take(rate, rate.takes(cost), now);
            }
        }
    }

    /// It did not start after all.
    pub(super) fn give_back_rate(&mut self, queue: QueueId, key: &Key, cost: Cost) {
        let rate = self.settings_of(queue).rate;
        let key_rate = self.key_rate(queue, key);
        let of = &mut self.queues[queue.0 as usize];
        if let (Some(rate), Some(bucket)) = (rate, &mut of.bucket) {
            bucket.give_back(rate.takes(cost));
        }
        if let (Some(rate), Some(keyed)) = (key_rate, &mut of.keyed)
            && let Some(used) = keyed.uses.get_mut(key)
        {
            used.bucket.give_back(rate.takes(cost));
        }
    }

    /// Sees to it that a queue that waits for its rate is looked at when it may start something.
    pub(super) fn arm_rate(&mut self, queue: QueueId) {
        let Some(until) = self.rate_wait(queue) else { return };
        let before = self.queues[queue.0 as usize].rate_armed;
        // The rate may have been raised since the alarm was set.
        let late = self.canary.is(Bug::RateAlarmKept) && before.is_some();
        if !late && before.is_none_or(|before| before > until) {
            if let Some(before) = before {
                self.alarms.remove(&(before, Alarm::Rate(queue)));
            }
            self.queues[queue.0 as usize].rate_armed = Some(until);
            self.arm(until, Alarm::Rate(queue));
        }
    }

    pub(super) fn on_rate_alarm(&mut self, queue: QueueId) {
        self.queues[queue.0 as usize].rate_armed = None;
        self.wake(queue);
        self.arm_rate(queue);
    }

    /// A run of this key begins to count.
    pub(super) fn key_begins(&mut self, queue: QueueId, key: &Key) {
        let unused = self.unused();
        let Some(keyed) = &mut self.queues[queue.0 as usize].keyed else { return };
        keyed.uses.entry(key.clone()).or_insert(unused).running += 1;
        self.look_at_key(queue, key);
        self.sweep(queue);
    }

    /// It counts no more.
    pub(super) fn key_ceases(&mut self, queue: QueueId, key: &Key) {
        let Some(keyed) = &mut self.queues[queue.0 as usize].keyed else { return };
        if let Some(used) = keyed.uses.get_mut(key) {
            used.running = used.running.saturating_sub(1);
        }
        self.look_at_key(queue, key);
    }

    /// Whether a key may run, and how many of its rows are to come, may have changed.
    pub(super) fn look_at_key(&mut self, queue: QueueId, key: &Key) {
        let hold = self.key_hold(queue, key);
        for ix in self.queues[queue.0 as usize].lanes.values().copied().collect::<Vec<LaneIx>>() {
            let places = &mut self.lanes[ix.0].places;
            if let Some(at) =
                places.keys().find(key).filter(|at| places.keys().get(*at).held != hold.is_some())
            {
                places.set_held(at, hold.is_some());
                self.dirty_lanes.insert(ix);
                if hold.is_none() {
                    self.wake(queue);
                }
            }
            self.recount(&(self.lanes[ix.0].id, key.clone()));
        }
        self.await_rate(queue, key, hold);
    }

    /// Sees to it that a key that is held by its rate is looked at when it is not any more, and counts what is held.
    pub(super) fn await_rate(&mut self, queue: QueueId, key: &Key, hold: Option<KeyHold>) {
        let unused = self.unused();
        if let Some(KeyHold::AtRate { until, .. }) = hold.filter(|_| self.began.is_some())
            && let Some(keyed) = &mut self.queues[queue.0 as usize].keyed
        {
            let used = keyed.uses.entry(key.clone()).or_insert(unused);
            let before = used.until.replace(until);
            if before != Some(until) {
                if let Some(before) = before {
                    self.rate_waits.remove(&(before, queue, key.clone()));
                }
                self.rate_waits.insert((until, queue, key.clone()));
                self.arm(until, Alarm::KeyRates);
            }
        }
        let held = match hold {
            Some(KeyHold::AtLimit { .. }) => Some(HeldBy::Limit),
            Some(KeyHold::AtRate { .. }) => Some(HeldBy::Rate),
            Some(KeyHold::Paused) | None => None,
        };
        if let Some(keyed) = &mut self.queues[queue.0 as usize].keyed {
            keyed.count_held(key, held);
        }
    }

    /// How many keys of a queue are held by their limits, and by their rates.
    pub fn held_keys(&self, queue: &QueueName) -> (u64, u64) {
        let keyed = self.names.get(queue).and_then(|id| self.queues[id.0 as usize].keyed.as_ref());
        keyed.map_or((0, 0), |keyed| (keyed.at_limit, keyed.at_rate))
    }

    /// It will be.
    pub(crate) fn awaits_rate(&self, queue: QueueId, key: &Key) -> bool {
        self.use_of(queue, key)
            .until
            .is_some_and(|until| self.rate_waits.contains(&(until, queue, key.clone())))
    }

    /// This owner's time has begun, and with it the rates of keys: before, nobody knew what time it is.
    pub(super) fn begin_rates(&mut self) {
        for id in (0..self.queues.len() as u32).map(QueueId) {
            let own = |over: &Override| over.rate.is_some();
            let by_queue = self.settings_of(id).key_rate.is_some();
            if by_queue || self.queues[id.0 as usize].overrides.values().any(own) {
                self.limits_changed(id);
            }
        }
    }

    /// Keys whose rate lets them start something again are looked at.
    pub(super) fn on_key_rates_alarm(&mut self) {
        while let Some((until, queue, key)) = self.rate_waits.first().cloned() {
            if until > self.now {
                return self.arm(until, Alarm::KeyRates);
            }
            self.rate_waits.pop_first();
            if let Some(keyed) = &mut self.queues[queue.0 as usize].keyed
                && let Some(used) = keyed.uses.get_mut(&key)
            {
                used.until = None;
            }
            self.look_at_key(queue, &key);
        }
    }

    /// Forgets a few keys that use nothing: memory follows those that do.
    fn sweep(&mut self, queue: QueueId) {
        for _ in 0..bounds::KEYS_SWEPT {
            let Some(keyed) = &self.queues[queue.0 as usize].keyed else { return };
            let after = keyed.swept.clone().map_or(Bound::Unbounded, Bound::Excluded);
            let next = keyed.uses.range((after, Bound::Unbounded)).next();
            let Some((key, used)) = next.map(|(key, used)| (key.clone(), *used)) else {
                if let Some(keyed) = &mut self.queues[queue.0 as usize].keyed {
                    keyed.swept = None;
                }
                return;
            };
            let full = self.key_rate(queue, &key).is_none_or(|rate| used.bucket.is_full(rate, self.now));
            if let Some(keyed) = &mut self.queues[queue.0 as usize].keyed {
                if used.running == 0 && used.until.is_none() && full {
                    // One that is made anew was empty when this owner began, and has filled since: no more than this one.
                    keyed.uses.remove(&key);
                }
                keyed.swept = Some(key);
            }
        }
    }

    /// Whether some key of this queue has a limit or a rate, by its queue or of its own.
    fn has_key_limits(&self, id: QueueId) -> bool {
        let settings = self.settings_of(id);
        let own = |over: &Override| over.limit.is_some() || over.rate.is_some();
        settings.key_limit.is_some()
            || settings.key_rate.is_some()
            || self.queues[id.0 as usize].overrides.values().any(own)
    }

    /// The limits of a queue have changed.
    pub(super) fn limits_changed(&mut self, id: QueueId) {
        let keyed = self.has_key_limits(id);
        let queue = &mut self.queues[id.0 as usize];
        if !keyed && queue.keyed.is_none() {
            return;
        }
        let before = queue.keyed.take().unwrap_or_default();
        let mut after = Keyed::default();
        if keyed {
            let unused = self.unused();
            let runs: Vec<Key> = self.runs_in(id).map(|run| run.key.clone()).collect();
            for (key, used) in before.uses {
                after.uses.insert(key, KeyUse { running: 0, held: None, ..used });
            }
            for key in runs {
                after.uses.entry(key).or_insert(unused).running += 1;
            }
            self.queues[id.0 as usize].keyed = Some(Box::new(after));
        } else {
            self.rate_waits.retain(|(_, queue, _)| *queue != id);
        }
        // Every key that has rows: some are held now that were not, or the other way round.
        let lanes: Vec<LaneIx> = self.queues[id.0 as usize].lanes.values().copied().collect();
        let mut keys: Vec<Key> =
            self.parked.keys().filter(|(lane, _)| lane.queue == id).map(|(_, key)| key.clone()).collect();
        keys.extend(self.queues[id.0 as usize].keyed.iter().flat_map(|keyed| keyed.uses.keys()).cloned());
        for ix in lanes {
            keys.extend(self.lanes[ix.0].places.keys().iter().map(|(_, state)| state.key.clone()));
        }
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            self.look_at_key(id, &key);
        }
    }

    /// How many of a key's parked rows are to come as things stand: none while it is held.
    pub(crate) fn to_come_of(&self, at: &ParkedKey) -> u64 {
        let (lane, key) = at;
        let Some(parked) = self.parked.get(at).filter(|_| self.key_hold(lane.queue, key).is_none()) else {
            return 0;
        };
        let waiting =
            self.lane_of(*lane).and_then(|ix| self.key_state(ix, key)).map_or(0, |state| state.waiting);
        parked.rows.min(self.room_by_limit(lane.queue, key, waiting))
    }

    /// Counts anew how many of a key's parked rows are to come to their lane.
    pub(super) fn recount(&mut self, at: &ParkedKey) {
        let now = self.to_come_of(at);
        let Some(parked) = self.parked.get_mut(at) else { return };
        let before = std::mem::replace(&mut parked.to_come, now);
        if now > 0 {
            self.returning.insert(at.clone());
        }
        self.count_to_come(at, before, now);
    }

    /// So many rows are to come to a lane now, and not so many as before.
    pub(super) fn count_to_come(&mut self, at: &ParkedKey, before: u64, now: u64) {
        let Some(ix) = self.lane_of(at.0).filter(|_| before != now) else { return };
        let places = &mut self.lanes[ix.0].places;
        places.to_come = (places.to_come + now).saturating_sub(before);
        if places.to_come == 0 && self.began.is_some() {
            self.wake(at.0.queue); // less urgent ones may have waited for it
            self.forget_soon(ix); // and keys may have been remembered only because of them
        }
    }

    fn may_set_key(&self, queue: &QueueName, key: &Key, over: &Override) -> Result<(), Refusal> {
        over.check()?;
        self.has_room_for_queue(queue)?;
        self.store_keeps_up(1)?;
        let known = self.names.get(queue).map(|id| &self.queues[id.0 as usize].overrides);
        if known.is_some_and(|known| known.len() >= bounds::OVERRIDES_PER_QUEUE && !known.contains_key(key)) {
            let most = bounds::OVERRIDES_PER_QUEUE;
            return Err(Refusal::invalid(
                "key",
                format!("would be one more with something of its own than {most}; remove others"),
            ));
        }
        Ok(())
    }

    /// What a key has of its own.
    pub fn override_of(&self, queue: &QueueName, key: &Key) -> Override {
        let id = self.names.get(queue);
        id.and_then(|id| self.queues[id.0 as usize].overrides.get(key)).copied().unwrap_or_default()
    }

    pub(super) fn on_set_key(
        &mut self,
        request: RequestId,
        queue: QueueName,
        key: Key,
        change: KeyChange,
        effects: &mut Vec<Effect>,
    ) {
        let before = self.override_of(&queue, &key);
        let over = Override {
            weight: change.weight.unwrap_or(before.weight),
            limit: change.limit.unwrap_or(before.limit),
            rate: change.rate.unwrap_or(before.rate),
        };
        if let Err(refusal) = self.may_set_key(&queue, &key, &over) {
            effects.push(Effect::Answer { request, answer: Err(refusal) });
            return;
        }
        let id = self.queue_named(&queue);
        let queue = &mut self.queues[id.0 as usize];
        if over == Override::default() {
            queue.overrides.remove(&key);
        } else {
            queue.overrides.insert(key.clone(), over);
        }
        for ix in queue.lanes.values() {
            let places = &mut self.lanes[ix.0].places;
            if let Some(key) = places.keys().find(&key) {
                places.set_weight(key, None, over.weight);
                self.dirty_lanes.insert(*ix);
            }
        }
        self.batch.changes.push(Change::Override { queue: id, key: key.clone(), over });
        if (before.limit, before.rate) != (over.limit, over.rate) {
            if self.is_keyed(id) && self.has_key_limits(id) {
                self.look_at_key(id, &key);
            } else {
                self.limits_changed(id);
            }
            self.wake(id);
        }
        self.answer_after_commit(request, Answer::KeySet, effects);
    }
}
