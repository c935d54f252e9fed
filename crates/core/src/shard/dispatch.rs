//! Starting tasks. A free slot goes to one of its worker's queues by the worker's weights; within the
//! queue to the first priority that has something to start; within the priority to the lane whose turn
//! it is; within the lane to the lowest level. Which lanes are candidates is a matter of admission (`admit`):
//! classes that are full are left out, and runs may have to make room.
//!
//! Between steps no worker has a free slot while a queue it serves could start something.

use std::collections::BTreeSet;

use super::timing::Over;
use super::{LaneIx, Shard};
use crate::backlog::{VTime, Weight};
use crate::bounds;
use crate::canary::Bug;
use crate::change::Place;
use crate::life::Outcome;
use crate::messages::{Effect, Run};
use crate::names::{Class, Fence, QueueId, QueueName, WorkerId};
use crate::refusal::Refusal;
use crate::workers::{LiveRun, Worker};

/// What a queue's loop does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopState {
    /// Nothing waits, runs or is scheduled.
    Idle,
    /// There is something to start: it is being read or written, or the start gate is shut.
    Running,
    /// All that may start has started, and slots are free: it sleeps until something is due or comes.
    Scheduled,
    /// Every slot is taken, or there is none, and nothing that runs makes room: it sleeps until a slot becomes free,
    /// whatever comes.
    Saturated,
}

impl LoopState {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            LoopState::Idle => "idle",
            LoopState::Running => "running",
            LoopState::Scheduled => "scheduled",
            LoopState::Saturated => "saturated",
        }
    }
}

impl Shard {
    pub(super) fn on_slots(
        &mut self,
        id: WorkerId,
        slots: u32,
        queues: Vec<(QueueName, Weight)>,
        effects: &mut Vec<Effect>,
    ) {
        if let Err(refusal) = self.may_join(id, slots, &queues) {
            effects.push(Effect::RefuseWorker { worker: id, refusal });
            return;
        }
        let served: Vec<(QueueId, Weight)> =
            queues.into_iter().map(|(name, weight)| (self.queue_named(&name), weight)).collect();
        self.withdraw_offer(id);
        let worker = self.workers.entry(id).or_default();
        let before = std::mem::replace(&mut worker.queues, served);
        worker.slots = slots;
        let Worker { turns, queues, .. } = worker;
        turns.retain(|queue| queues.iter().any(|(id, _)| *id == queue));
        let served = worker.queues.clone();
        self.count_offer(id);
        for (queue, _) in before.into_iter().chain(served) {
            self.slots_changed(queue);
            self.wake(queue); // runs may make room here that could not before
        }
        self.note_free(id);
    }

    pub(crate) fn may_join(
        &self,
        id: WorkerId,
        slots: u32,
        queues: &[(QueueName, Weight)],
    ) -> Result<(), Refusal> {
        if !self.workers.contains_key(&id) && self.workers.len() >= bounds::WORKERS {
            return Err(Refusal::limited(format!("there are {} workers already", bounds::WORKERS)));
        }
        if slots > bounds::SLOTS_PER_WORKER {
            let most = bounds::SLOTS_PER_WORKER;
            return Err(Refusal::too_large(
                "slots",
                format!("{slots} are too many; a worker has at most {most}"),
            ));
        }
        let names: BTreeSet<&QueueName> = queues.iter().map(|(name, _)| name).collect();
        if names.len() != queues.len() {
            return Err(Refusal::invalid("queues", "names a queue twice; name each once"));
        }
        if queues.len() > bounds::QUEUES_PER_WORKER {
            let (is, most) = (queues.len(), bounds::QUEUES_PER_WORKER);
            return Err(Refusal::too_large(
                "queues",
                format!("has {is} queues; a worker serves at most {most}"),
            ));
        }
        let new = names.into_iter().filter(|name| !self.names.contains_key(name)).count();
        if self.queues.len() + new > bounds::QUEUES {
            return Err(Refusal::invalid("queues", format!("there are {} queues already", bounds::QUEUES)));
        }
        Ok(())
    }

    /// Takes a worker out of the lists of free ones.
    pub(super) fn leave_queues(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if std::mem::take(&mut worker.listed) {
            for (queue, _) in &worker.queues {
                self.queues[queue.0 as usize].free.remove(&id);
            }
        }
    }

    /// Lists a worker as free in its queues, if it is, and has them looked at.
    pub(super) fn note_free(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if worker.has_free_slot() && !worker.listed {
            worker.listed = true;
            for (queue, _) in &worker.queues {
                self.queues[queue.0 as usize].free.insert(id);
                self.ready.insert(*queue);
            }
        }
    }

    /// A slot of this worker is no longer held.
    pub(super) fn free_slot(&mut self, id: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.busy -= 1;
            self.freed.push(id);
        }
    }

    /// Has a queue looked at, if a worker could take something of it, or could make room for it. Where every slot is
    /// taken and nothing makes room, a slot that becomes free is what wakes it: an enqueue can change nothing.
    pub(super) fn wake(&mut self, queue: QueueId) {
        let of = &self.queues[queue.0 as usize];
        if !of.free.is_empty() || !of.yielding.is_empty() {
            self.ready.insert(queue);
        }
    }

    /// It is looked at with the next fact, or when the alarm is heard that is set for its rate.
    pub(crate) fn is_ready(&self, queue: QueueId) -> bool {
        let until = self.rate_wait(queue).unwrap_or(self.now);
        let armed = self.queues[queue.0 as usize].rate_armed;
        self.ready.contains(&queue) || armed.is_some_and(|at| at <= until)
    }

    /// How many times a queue was looked at for something to start.
    pub fn looks(&self) -> u64 {
        self.looks
    }

    /// What a queue's loop does.
    pub fn loop_state(&self, name: &QueueName) -> LoopState {
        let Some(&id) = self.names.get(name) else { return LoopState::Idle };
        let queue = &self.queues[id.0 as usize];
        let totals = queue.record.totals;
        let waiting = totals.unfinished().saturating_sub(queue.running + totals.scheduled);
        if totals.unfinished() == 0 {
            LoopState::Idle
        } else if queue.free.is_empty() && queue.yielding.is_empty() {
            LoopState::Saturated
        } else if waiting > 0 && !self.settings_of(id).paused {
            LoopState::Running
        } else {
            LoopState::Scheduled
        }
    }

    /// Starts whatever can be started.
    pub(super) fn dispatch(&mut self, effects: &mut Vec<Effect>) {
        // A slot that has just become free is mostly filled at once, without listing it in every queue.
        for id in std::mem::take(&mut self.freed) {
            while self.may_start() && self.start_one(id, effects) {}
            self.note_free(id);
            self.note_yielding(id);
        }
        if !self.may_start() {
            return;
        }
        while let Some(queue) = self.ready.pop_first() {
            self.looks += 1;
            loop {
                self.clear_heads(queue, effects);
                let Some(ix) = self.startable(queue) else {
                    if self.give_up_for_blocked(queue, effects) {
                        continue;
                    }
                    break;
                };
                if let Some(worker) = self.next_free(queue) {
                    self.start_one(worker, effects);
                } else if !self.clear_head(ix, effects) && !self.make_room(queue, effects) {
                    break;
                }
            }
            self.arm_rate(queue);
        }
    }

    /// The free worker after the one that was given a task last.
    pub(super) fn next_free(&mut self, queue: QueueId) -> Option<WorkerId> {
        let queue = &mut self.queues[queue.0 as usize];
        let after = (std::ops::Bound::Excluded(queue.last_worker), std::ops::Bound::Unbounded);
        let next = queue.free.range(after).next().or_else(|| queue.free.first()).copied()?;
        queue.last_worker = next;
        Some(next)
    }

    /// The lane of this queue that goes next, if any has something to start now. A lane that has not
    /// been read yet, or whose rows are on their way from a shelf, may hold a task that goes first, so lower
    /// priorities wait for it.
    pub(crate) fn startable(&self, queue: QueueId) -> Option<LaneIx> {
        self.next_start(queue).map(|(lane, _)| lane)
    }

    /// The same among the lanes whose first task needs a class below this one.
    pub(super) fn first_lane(&self, queue: QueueId, below: usize) -> Option<LaneIx> {
        let queue = &self.queues[queue.0 as usize];
        for (&priority, turns) in &queue.turns {
            let lanes = queue.lanes.range((priority, Class(0))..=(priority, Class(u8::MAX)));
            let lanes = lanes.filter(|(_, ix)| !self.is_left_out(**ix, below));
            let window = |ix: &LaneIx| &self.lanes[ix.0].window;
            let has = |ix: LaneIx| !window(&ix).waiting().is_empty();
            let waiting = lanes.clone().filter(|(_, ix)| has(**ix) && !self.is_held_up(**ix));
            if let Some(class) = turns.next(waiting.map(|((_, class), _)| *class)) {
                return queue.lanes.get(&(priority, class)).copied();
            }
            if lanes.clone().any(|(_, ix)| has(*ix)) {
                return None; // what is held up here goes first all the same
            }
            let to_come = |ix: &LaneIx| self.lanes[ix.0].places.to_come > 0;
            let unread = lanes.into_iter().any(|(_, ix)| window(ix).is_unread() || to_come(ix));
            if unread && !self.canary.is(Bug::PriorityByArrival) {
                return None;
            }
        }
        None
    }

    /// Starts one task on this worker, if it has a free slot and one of its queues something to start.
    fn start_one(&mut self, id: WorkerId, effects: &mut Vec<Effect>) -> bool {
        let Some(worker) = self.workers.get(&id).filter(|worker| worker.has_free_slot()) else {
            return false;
        };
        // Of the queues that have something to start, the one whose turn it is. Whether one has is asked only
        // of those that would go before the best so far.
        let mut next = None;
        for (queue, _) in &worker.queues {
            let turn = worker.turns.turn(*queue);
            if next.is_none_or(|best| turn < best) && self.startable(*queue).is_some() {
                next = Some(turn);
            }
        }
        let Some((_, queue)) = next else { return false };
        if self.clear_heads(queue, effects) {
            return true; // it may be another queue's turn now
        }
        let Some((ix, moves)) = self.next_start(queue) else { return false };
        if self.clear_head(ix, effects) {
            return true;
        }
        self.give_up_classes(queue, &moves, effects);
        let fence = self.next_fence();
        let lane = &mut self.lanes[ix.0];
        let weights = lane.places.waiting_weights();
        let Some((level, entry)) = lane.start_first() else { return false };
        let key = lane.places.keys().get(entry.key).key.clone();
        let (class, limit_ms, default) = self.class_to_start(queue, entry.max_duration_ms());
        let lane = &self.lanes[ix.0];
        let run = Run {
            task: entry.task,
            lane: lane.id,
            level,
            key,
            charge: entry.charge,
            attempt: entry.attempt,
            max_attempts: entry.max_attempts,
            lost: entry.lost,
            terms: entry.terms,
            fence,
            started: self.now,
            limit_ms,
        };
        let lane = lane.id;
        self.made_room(lane, &run.key);
        self.dirty_lanes.insert(ix);
        self.hungry.insert(ix);

        let queue_state = &mut self.queues[queue.0 as usize];
        queue_state.running += 1;
        // Lanes and queues take turns by tasks: how long one takes is not known yet, and a caller may say anything.
        let cost = entry.charge.asked().cost;
        let share = VTime::share(cost, weights);
        queue_state.turns.entry(lane.priority).or_default().charge(lane.class, share);

        self.hold_slot(id);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.charge(queue, cost);
        }
        let live = LiveRun { class, default, ..LiveRun::new(run.clone(), id, Some(entry.key)) };
        self.runs.insert(entry.task, live);
        self.take_rate(queue, &run.key, run.charge.cost);
        self.begin_holding(entry.task);
        let work = self.payloads.take(entry.task);
        effects.push(Effect::Start { worker: id, run, work });
        true
    }

    /// Clears the heads of all lanes of a queue with classes, where all may be asked what they need. True if anything was.
    fn clear_heads(&mut self, queue: QueueId, effects: &mut Vec<Effect>) -> bool {
        let of = &self.queues[queue.0 as usize];
        if of.holders.is_none() || self.settings_of(queue).paused || self.rate_wait(queue).is_some() {
            return false;
        }
        let mut cleared = false;
        for ix in self.queues[queue.0 as usize].lanes.values().copied().collect::<Vec<LaneIx>>() {
            while self.clear_head(ix, effects) {
                cleared = true;
            }
        }
        cleared
    }

    /// Takes away what stands first in its lane and cannot be started from there: a task of a key that is held, one that has
    /// expired, or one that needs another class than the lane's. Nothing makes room for it. True if anything was.
    fn clear_head(&mut self, ix: LaneIx, effects: &mut Vec<Effect>) -> bool {
        self.moves_left() && (self.park_first(ix) || self.expire_first(ix, effects) || self.move_first(ix))
    }

    /// The fence of the run that is started next.
    pub(super) fn next_fence(&mut self) -> Fence {
        let fence = Fence { epoch: self.epoch, dispatch: self.next_dispatch, nonce: self.nonce };
        self.next_dispatch += 1;
        fence
    }

    /// If it is too late to start the task that goes next, it has ended. Its timer may not have come yet.
    fn expire_first(&mut self, ix: LaneIx, effects: &mut Vec<Effect>) -> bool {
        let lane = &mut self.lanes[ix.0];
        let Some((&level, entry)) = lane.window.waiting().first_key_value() else { return false };
        if !entry.expires_by(self.now) {
            return false;
        }
        let expires = entry.terms.as_ref().and_then(|terms| terms.expires);
        self.batch.parks += 1;
        let (key, charge) = (entry.key, entry.charge);
        let over = Over {
            task: entry.task,
            lane: lane.id,
            key: lane.places.keys().get(key).key.clone(),
            from: Place::Lane(level),
            attempt: entry.attempt,
            max_attempts: entry.max_attempts,
            expires,
            outcome: Outcome::Expired,
            last: None,
            result: [].into(),
        };
        lane.places.uncharge(&over.key, charge);
        lane.withdraw(level, charge, key);
        self.made_room(over.lane, &over.key);
        self.task_changed(over.task);
        self.left_lane(ix);
        self.finish(over, effects);
        true
    }

    /// A slot of this worker is held by a run.
    pub(super) fn hold_slot(&mut self, id: WorkerId) {
        let worker = self.workers.entry(id).or_default();
        worker.busy += 1;
        if !worker.has_free_slot() {
            self.leave_queues(id);
        }
    }
}
