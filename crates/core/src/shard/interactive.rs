//! Interactive tasks. One never queues: it gets a slot now, or is denied now. Nothing of it is saved, it is of no lane,
//! and it does not outlive its owner. It is the first to go when a task needs a slot: it is halted, and its slot counts as
//! free at once (its worker finishes killing it before it starts the next). A queue may have its clients warned first.

use super::{Alarm, Shard};
use crate::backlog::{Charge, Cost, Level, Weight};
use crate::bounds;
use crate::canary::Bug;
use crate::life::End;
use crate::messages::{Answer, Effect, InteractiveAsk, Run, Why, Work};
use crate::names::{Class, Fence, LaneId, Priority, QueueId, QueueName, RequestId, TaskId, WorkerId};
use crate::refusal::{Kind, Refusal};
use crate::workers::LiveRun;

impl Shard {
    pub(super) fn on_interactive(
        &mut self,
        request: RequestId,
        queue: QueueName,
        ask: InteractiveAsk,
        effects: &mut Vec<Effect>,
    ) {
        let started = self.may_be_interactive(&queue, &ask).and_then(|id| {
            self.slot_for(id).map(|worker| (id, worker)).inspect_err(|_| self.denied(id, effects))
        });
        let answer = match started {
            Ok((id, worker)) => {
                let fence = self.start_interactive(id, worker, ask, effects);
                Ok(Answer::Interactive { task: TaskId::interactive(fence.dispatch), fence, worker })
            }
            Err(refusal) => Err(refusal),
        };
        if self.canary.is(Bug::InteractiveWaits) {
            return self.after_commit(Effect::Answer { request, answer }, effects);
        }
        effects.push(Effect::Answer { request, answer });
    }

    /// What is asked before anybody looks for a slot.
    fn may_be_interactive(&self, queue: &QueueName, ask: &InteractiveAsk) -> Result<QueueId, Refusal> {
        if ask.max_duration_ms > bounds::DURATION_MS {
            let (is, most) = (ask.max_duration_ms, bounds::DURATION_MS);
            return Err(Refusal::invalid(
                "max_duration_ms",
                format!("{is} is out of range; use 1 to {most}"),
            ));
        }
        let Some(&id) = self.names.get(queue) else {
            return Err(Refusal::not_found(format!("there is no queue {queue}, and no worker serves it")));
        };
        if !self.may_start() {
            let text = "the start gate is shut: what runs already is not known yet";
            return Err(Refusal::new(Kind::Unavailable, "", text).after(1_000));
        }
        if self.settings_of(id).paused {
            return Err(Refusal::limited(format!("queue {queue} is paused")).after(1_000));
        }
        if let Some(until) = self.rate_wait(id) {
            let text = format!("queue {queue} has started as much as its rate allows");
            return Err(Refusal::limited(text).after(until.0.saturating_sub(self.now.0)));
        }
        match self.key_hold(id, &ask.key) {
            Some(hold) => Err(Refusal::limited(hold.to_string()).after(1_000)),
            None => Ok(id),
        }
    }

    /// A worker with a free slot. What waits in the queue could not use it, or it would not be free.
    fn slot_for(&mut self, id: QueueId) -> Result<WorkerId, Refusal> {
        if let Some(worker) = self.next_free(id) {
            return Ok(worker);
        }
        let queue = &self.queues[id.0 as usize];
        let text = match queue.slots {
            0 => format!("no worker serves queue {}", queue.record.name),
            slots => format!("every slot is taken ({slots}); interactive tasks do not wait"),
        };
        Err(Refusal::limited(text).after(1_000))
    }

    fn start_interactive(
        &mut self,
        queue: QueueId,
        worker: WorkerId,
        ask: InteractiveAsk,
        effects: &mut Vec<Effect>,
    ) -> Fence {
        let fence = self.next_fence();
        let task = TaskId::interactive(fence.dispatch);
        let run = Run {
            task,
            lane: LaneId { queue, priority: Priority::DEFAULT, class: Class(0) },
            level: Level::ZERO,
            key: ask.key,
            charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: false, timed: false },
            attempt: 1,
            max_attempts: 1,
            lost: 0,
            terms: None,
            fence,
            started: self.now,
            limit_ms: ask.max_duration_ms,
        };
        self.hold_slot(worker);
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.charge(queue, Cost::ONE);
        }
        *self.aside_runs.entry((queue, run.key.clone())).or_default() += 1;
        self.queues[queue.0 as usize].interactive += 1;
        self.runs.insert(task, LiveRun::new(run.clone(), worker, None));
        self.take_rate(queue, &run.key, Cost::ONE);
        self.begin_holding(task);
        let work = Work { payload: [].into(), content_type: Default::default(), files: Default::default() };
        effects.push(Effect::Start { worker, run, work: Some(work) });
        fence
    }

    /// Halts one of these runs, or warns its client if its queue wants that. True if a slot is free now.
    pub(super) fn halt_one(&mut self, queue: QueueId, among: Vec<TaskId>, effects: &mut Vec<Effect>) -> bool {
        let halting = |task: &&TaskId| self.runs.get(task).is_some_and(|live| live.halt_at.is_some());
        let warned = among.iter().filter(halting).count() as u64;
        let (mut free, fresh): (bool, Vec<TaskId>) =
            (false, among.iter().filter(|task| !halting(task)).copied().collect());
        // As many as there are tasks that could start, where it takes a while; one otherwise, for then it is asked again.
        let waiting = self.at_hand(queue).saturating_sub(warned);
        let mut fresh = fresh;
        for _ in 0..waiting {
            if fresh.is_empty() || free {
                break;
            }
            let task = fresh.swap_remove(self.chance.below(fresh.len()));
            free = self.halt(task, effects);
        }
        free
    }

    /// Halts a run at once, or warns its client. True if its slot is free.
    fn halt(&mut self, task: TaskId, effects: &mut Vec<Effect>) -> bool {
        let Some(live) = self.runs.get(&task) else { return false };
        let (queue, fence) = (live.run.lane.queue, live.run.fence);
        let grace_ms = self.settings_of(queue).interactive_grace_ms;
        if grace_ms == 0 {
            return self.halt_now(task, effects);
        }
        let at = self.now.plus(grace_ms);
        if let Some(live) = self.runs.get_mut(&task) {
            live.halt_at = Some(at);
        }
        self.arm(at, Alarm::Halt(task));
        effects.push(Effect::Warn { task, fence, grace_ms });
        false
    }

    fn halt_now(&mut self, task: TaskId, effects: &mut Vec<Effect>) -> bool {
        let Some((worker, fence)) = self.runs.get(&task).map(|live| (live.worker, live.run.fence)) else {
            return false;
        };
        effects.push(Effect::Stop { worker, task, fence });
        self.end_interactive(task, Why::Halted, effects);
        // It must be seen now, not after whatever else has become free.
        self.note_free(worker);
        true
    }

    /// A warning is over. If nothing waits for the slot any more, the run goes on.
    pub(super) fn on_halt_alarm(&mut self, task: TaskId, effects: &mut Vec<Effect>) {
        let Some(live) = self.runs.get_mut(&task) else { return };
        live.halt_at = None;
        let worker = live.worker;
        let served = self.workers.get(&worker).map(|worker| worker.queues.clone()).unwrap_or_default();
        let needed =
            |id: &QueueId| self.queues[id.0 as usize].free.is_empty() && self.startable(*id).is_some();
        if served.iter().any(|(id, _)| needed(id)) {
            self.halt_now(task, effects);
            // Whoever needs the slot gets it, so that it is known whether others that were warned have to go too.
            self.dispatch(effects);
        }
    }

    /// Tasks that memory knows in lanes of this queue which have something to start.
    fn at_hand(&self, queue: QueueId) -> u64 {
        let of = &self.queues[queue.0 as usize];
        let below = of
            .holders
            .as_ref()
            .map_or(usize::MAX, |_| self.full_classes(queue).first().copied().unwrap_or(usize::MAX));
        let lanes = of.lanes.values().filter(|ix| !self.is_left_out(**ix, below));
        lanes.map(|ix| self.lanes[ix.0].window.waiting().len() as u64).sum()
    }

    /// The client of an interactive run is gone: nobody wants it any more.
    pub(super) fn on_hangup(&mut self, task: TaskId, fence: Fence, effects: &mut Vec<Effect>) {
        let Some(live) = self.runs.get_mut(&task).filter(|live| live.run.fence == fence) else { return };
        if task.is_interactive() && !std::mem::replace(&mut live.cancel, true) {
            effects.push(Effect::Stop { worker: live.worker, task, fence });
        }
    }

    /// Why an interactive run is over that ended like this.
    pub(super) fn why_over(&self, task: TaskId, end: End) -> Why {
        let canceled = self.runs.get(&task).is_some_and(|live| live.cancel);
        match end {
            End::Lost => Why::Lost,
            End::TimeUp => Why::TimeUp,
            End::Succeeded | End::Failed | End::FailedForGood | End::Downgraded if canceled => Why::Canceled,
            End::Succeeded | End::Failed | End::FailedForGood | End::Downgraded => Why::Ended,
        }
    }

    /// An interactive run leaves the books.
    pub(super) fn end_interactive(&mut self, task: TaskId, why: Why, effects: &mut Vec<Effect>) {
        let Some((worker, fence)) = self.runs.get(&task).map(|live| (live.worker, live.run.fence)) else {
            return;
        };
        let untold = why == Why::Halted && self.canary.is(Bug::HaltNotTold);
        if self.take_run(worker, task, fence).is_some() && !untold {
            effects.push(Effect::InteractiveOver { task, fence, why });
        }
    }
}
