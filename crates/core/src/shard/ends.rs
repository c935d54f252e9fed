//! Taking tasks out: ends, retries, cancels, replays, lost workers; and what a new owner is told of runs that
//! began before it. What comes of an event is not decided here but in [`life`].

use std::collections::BTreeSet;
use std::collections::btree_map;
use std::sync::Arc;

use super::reads::Waiter;
use super::timing::{Over, Placing};
use super::{Alarm, HeldEnd, LaneIx, Shard};
use crate::admission::classes;
use crate::admission::rate::Bucket;
use crate::backlog::{Charge, Cost, Entry, Level, Pass};
use crate::bounds;
use crate::canary::Bug;
use crate::change::{
    AfterDowngrade, Change, EndRecord, MemberRecord, Place, Row, Settings, SettingsRecord, Task, Timed, Try,
};
use crate::life::{self, End, Ending, Event, Next, Outcome, State, Tries};
use crate::messages::{Answer, Effect, NewTask, Run, Why};
use crate::names::{Fence, Key, LaneId, Millis, QueueId, QueueName, RequestId, Seat, TaskId, WorkerId};
use crate::refusal::{Kind, Refusal};
use crate::timers::moment;
use crate::workers::{CutWhy, LiveRun};

impl Shard {
    /// A worker's runs from before the restart count as running; what ended is held until the gate opens.
    pub(super) fn on_report(
        &mut self,
        worker: WorkerId,
        running: Vec<Run>,
        ended: Vec<(Run, End, Ending)>,
        verify: bool,
        effects: &mut Vec<Effect>,
    ) {
        self.reported.forget(worker);
        for run in running {
            let (task, fence) = (run.task, run.fence);
            if task.is_interactive() && !self.runs.contains_key(&task) {
                // It was another owner's, or is being halted: nobody waits for what it says.
                effects.push(Effect::Stop { worker, task, fence });
                continue;
            }
            let known = |live: &LiveRun| (live.worker, live.run.fence) == (worker, fence);
            if self.runs.get(&task).is_some_and(known) {
                continue;
            }
            if verify && !self.open {
                self.verify(worker, run, effects);
            } else if self.open || !self.adopt(worker, run, effects) {
                effects.push(Effect::Stop { worker, task, fence });
            }
        }
        for (run, end, ending) in ended {
            if let Some(ix) = self.lane_of(run.lane).filter(|ix| run.level <= self.lanes[ix.0].window.max()) {
                // It was dispatched, so V was at least here, whatever the store remembers.
                self.lanes[ix.0].places.raise_vtime(run.level.pass());
            }
            let Run { task, fence, attempt, started, .. } = run;
            let level = Some(run.level);
            self.on_ended(HeldEnd { worker, task, fence, attempt, started, level, end, ending }, effects);
        }
    }

    /// Counts a reported run as running. False if the shard knows better.
    pub(super) fn adopt(&mut self, worker: WorkerId, run: Run, effects: &mut Vec<Effect>) -> bool {
        let Some(ix) = self.lane_of(run.lane) else { return false };
        if run.level > self.lanes[ix.0].window.max() {
            return false; // no owner ever gave that place
        }
        if !self.workers.contains_key(&worker) && self.workers.len() >= bounds::WORKERS {
            return false;
        }
        if let Some(live) = self.runs.get_mut(&run.task) {
            let (other, fence) = (live.worker, live.run.fence);
            let place = |run: &Run| (run.lane, run.level);
            if run.fence <= fence || place(&run) != place(&live.run) || run.key != live.run.key {
                return false;
            }
            // Of two runs of a task the newer one counts.
            let task = run.task;
            let old = live.clone();
            live.run = run;
            live.worker = worker;
            (live.overdue_at, live.halt_at) = (None, None);
            self.cease_holding(&old);
            self.free_slot(other);
            self.hold_slot(worker);
            self.classify(task);
            self.begin_holding(task);
            self.condemn(other, task, fence, true, effects);
            return true;
        }
        let mut run = run;
        let lane = &mut self.lanes[ix.0];
        // Its client may have shortened it when its worker could not be told any more.
        let mut shortened = None;
        let in_lane = if let Some(saved) = self.aside.remove(&run.task) {
            lane.places.raise_vtime(run.level.pass());
            *self.aside_runs.entry((run.lane.queue, run.key.clone())).or_default() += 1;
            if saved.max_duration_ms() != run.max_duration_ms() {
                run.terms = saved.terms.clone();
                shortened = Some(saved.max_duration_ms()).filter(|ms| *ms > 0);
                let less = |ms: u64| if run.limit_ms == 0 { ms } else { run.limit_ms.min(ms) };
                run.limit_ms = shortened.map_or(run.limit_ms, less);
            }
            None
        } else {
            let found = lane.places.keys().find(&run.key);
            let Some(key) = found.filter(|&key| lane.places.keys().get(key).waiting > 0) else {
                return false;
            };
            if run.level <= lane.window.ack() {
                return false;
            }
            lane.adopt(run.level, run.task, key, run.charge);
            Some(key)
        };
        self.queues[run.lane.queue.0 as usize].running += 1;
        self.hold_slot(worker);
        self.payloads.take(run.task);
        let (task, cancel) = (run.task, self.canceling.contains(&run.task));
        self.runs.insert(task, LiveRun { cancel, ..LiveRun::new(run, worker, in_lane) });
        self.classify(task);
        self.begin_holding(task);
        if let Some(max_duration_ms) = shortened {
            self.cut(task, max_duration_ms, CutWhy::Shortened, effects);
        }
        self.hungry.insert(ix);
        true
    }

    /// Whatever could be running has been reported. Long runners that nobody reported are lost.
    pub(super) fn on_open(&mut self, effects: &mut Vec<Effect>) {
        if self.open {
            return;
        }
        self.open = true;
        let ended: BTreeSet<TaskId> = self.held_ends.keys().map(|(task, _)| *task).collect();
        let lost: Vec<Task> = self.aside.values().filter(|task| !ended.contains(&task.id)).cloned().collect();
        for task in lost {
            self.lose_aside(&task, effects);
        }
        let ends = std::mem::take(&mut self.held_ends);
        for held in ends.into_values() {
            if self.runs.contains_key(&held.task) {
                self.on_ended(held, effects);
            } else {
                self.unresolved.insert(held.task);
                self.read_task_for(held.task, Waiter::LateEnd(held), effects);
            }
        }
        // Canceled while they ran, and nobody runs them any more: they must not start again.
        for task in self.canceling.iter().copied().collect::<Vec<_>>() {
            if !self.runs.contains_key(&task) && !self.canary.is(Bug::CancelLost) {
                self.unresolved.insert(task);
                self.read_task_for(task, Waiter::Cancel(None), effects);
            }
        }
        for ix in 0..self.lanes.len() {
            self.forget(LaneIx(ix));
        }
        self.begin(effects);
    }

    /// If nothing is in the way any more, tasks may start, and cancels that came too early are looked at.
    pub(super) fn begin(&mut self, effects: &mut Vec<Effect>) {
        if self.may_start() {
            self.ready.extend((0..self.queues.len() as u32).map(QueueId));
            for (request, task) in std::mem::take(&mut self.held_cancels) {
                self.cancel(request, task, effects);
            }
        }
    }

    /// A saved long runner that no worker runs.
    fn lose_aside(&mut self, task: &Task, effects: &mut Vec<Effect>) {
        let state = State::Running { canceled: self.canceling.contains(&task.id) };
        self.aside.remove(&task.id);
        let tried = Try {
            attempt: task.attempt,
            seat: None,
            started: Millis(0),
            ended: self.now,
            end: End::Lost,
            error: Arc::default(),
        };
        let row = task.row_at(Level::ZERO);
        self.after_run(
            state,
            Event::Ended(End::Lost),
            task.lane,
            row,
            Place::Aside,
            tried,
            &Ending::default(),
            effects,
        );
    }

    /// A run has ended, in whatever way: its task is tried again, or has ended too.
    #[expect(clippy::too_many_arguments, reason = "a task in all its parts")]
    fn after_run(
        &mut self,
        state: State,
        event: Event,
        lane: LaneId,
        row: Row,
        from: Place,
        tried: Try,
        ending: &Ending,
        effects: &mut Vec<Effect>,
    ) {
        let settings = self.settings_of(lane.queue);
        let backoff = row.terms.as_ref().and_then(|terms| terms.backoff).unwrap_or(settings.backoff);
        let asked = ending.retry_after_ms.map(|ms| ms.min(bounds::BACKOFF_MS));
        let mut wait_ms = asked.unwrap_or_else(|| backoff.wait_ms(row.task, row.attempt));
        if tried.end == End::Downgraded {
            wait_ms = 0; // it is not its fault
        }
        let due = self.now.plus(wait_ms);
        let expires = row.expires();
        let tries = Tries {
            attempt: row.attempt,
            max_attempts: row.max_attempts,
            lost: row.lost,
            max_lost: settings.max_lost,
            expires: expires.is_some_and(|expires| expires <= due),
            requeue: settings.after_downgrade == AfterDowngrade::Requeue,
        };
        match life::after(state, event, tries) {
            Next::Retry => {
                let lost = row.lost.saturating_add(u8::from(tried.end == End::Lost));
                let attempt = row.attempt + if self.canary.is(Bug::AttemptCountedTwice) { 2 } else { 1 };
                let row = Row { attempt, lost, ..row };
                let (task, key, max_attempts) = (row.task, row.key.clone(), row.max_attempts);
                let error = tried.error.clone();
                let (due, end) = ((wait_ms > 0).then_some(due), Some(tried.end));
                self.retry(lane, row, from, due, cut(tried));
                let retried = Effect::Retried { task, end, lane, key, attempt, max_attempts, due, error };
                self.after_commit(retried, effects);
            }
            Next::Finish(outcome) => {
                let result = if outcome == Outcome::Succeeded { ending.result.clone() } else { [].into() };
                let over = Over::of_row(&row, lane, from, outcome);
                self.finish(Over { last: Some(tried), result, ..over }, effects);
            }
            // None of these follows the end of a run.
            Next::Queue | Next::Stop | Next::Again | Next::Stay | Next::Refuse => {}
        }
    }

    /// A dispatch that never started: its row waits again, uncharged.
    pub(super) fn on_refused(
        &mut self,
        worker: WorkerId,
        task: TaskId,
        fence: Fence,
        effects: &mut Vec<Effect>,
    ) {
        self.reported.is_over(task, fence);
        let is_its = |live: &&LiveRun| (live.worker, live.run.fence) == (worker, fence);
        let Some(live) = self.runs.get(&task).filter(is_its) else { return };
        let (queue, key, cost) = (live.run.lane.queue, live.run.key.clone(), live.run.charge.cost);
        self.give_back_rate(queue, &key, cost);
        self.wake(queue); // what the rate held up may start
        if task.is_interactive() {
            return self.end_interactive(task, Why::Lost, effects);
        }
        let Some(live) = self.runs.get(&task) else { return };
        match life::after(State::Running { canceled: live.cancel }, Event::Refused, NO_TRIES) {
            Next::Queue => {}
            // Canceled before it began.
            Next::Finish(_) => {
                self.uncharge_run(task);
                return self.end_run(task, End::Failed, &Ending::default(), None, effects);
            }
            Next::Retry | Next::Stop | Next::Again | Next::Stay | Next::Refuse => return,
        }
        let Some(live) = self.take_run(worker, task, fence) else { return };
        let run = &live.run;
        if row_of(run).expires().is_some_and(|expires| expires <= self.now) {
            // Its timer has come and gone while it ran, as it seemed.
            let from = live.in_lane.map_or(Place::Aside, |_| Place::Lane(run.level));
            if let (Some(key), Some(ix)) = (live.in_lane, self.lane_of(run.lane)) {
                self.lanes[ix.0].places.uncharge(&run.key, run.charge);
                self.lanes[ix.0].settle(run.level, run.charge, key);
                self.left_lane(ix);
            }
            self.task_changed(task);
            return self.finish(Over::of_row(&row_of(run), run.lane, from, Outcome::Expired), effects);
        }
        match (live.in_lane, self.lane_of(run.lane)) {
            (Some(key), Some(ix)) => {
                self.lanes[ix.0].give_back(run.level, Entry::of(&row_of(run), key));
                self.hungry.insert(ix);
                self.dirty_lanes.insert(ix);
            }
            (Some(_), None) | (None, _) => {
                self.place_row(run.lane, row_of(run), Place::Aside, None, Placing::Back);
                self.task_changed(task);
            }
        }
        self.wake(live.run.lane.queue);
        let Run { lane, attempt, max_attempts, .. } = live.run;
        let (key, due, error) = (live.run.key, None, Arc::default());
        let retried = Effect::Retried { task, end: None, lane, key, attempt, max_attempts, due, error };
        self.after_commit(retried, effects);
    }

    /// The end of a run counts once, by (task, fence). The others are expected: a worker repeats an end
    /// until it is acknowledged, and reports to a new owner what it reported to the old one.
    pub(super) fn on_ended(&mut self, held: HeldEnd, effects: &mut Vec<Effect>) {
        let HeldEnd { worker, task, fence, .. } = held;
        if task.is_interactive() {
            // Nothing of it is saved, so nothing has to be.
            if self.runs.get(&task).is_some_and(|live| live.run.fence == fence) {
                self.end_interactive(task, self.why_over(task, held.end), effects);
            }
            return effects.push(Effect::Acknowledge { worker, task, fence });
        }
        if !self.open {
            // A worker may well say it again before the gate opens.
            if self.held_ends.len() < bounds::HELD_ENDS {
                self.held_ends.insert((task, fence), held);
                self.reported.is_over(task, fence);
            }
            return;
        }
        self.reported.is_over(task, fence);
        match self.runs.get(&task) {
            Some(live) if live.run.fence == fence => {
                self.end_run(task, held.end, &held.ending, Some(worker), effects);
            }
            // A newer run of the task is alive: this end is of one that was given up.
            Some(_) => self.after_commit(Effect::Acknowledge { worker, task, fence }, effects),
            // Ended before, or lost, or from before a restart: the store knows.
            None if self.task_reads.len() < self.bounds.task_reads => {
                self.read_task_for(task, Waiter::LateEnd(held), effects);
            }
            None => {} // its worker says it again
        }
    }

    /// All runs of a lost worker end.
    pub(super) fn on_lost(&mut self, worker: WorkerId, effects: &mut Vec<Effect>) {
        let lost: Vec<TaskId> =
            self.runs.iter().filter(|(_, live)| live.worker == worker).map(|(&task, _)| task).collect();
        self.reported.forget(worker);
        self.withdraw_offer(worker);
        let served = self.workers.get_mut(&worker).map(|worker| {
            worker.slots = 0;
            std::mem::take(&mut worker.queues)
        });
        for (queue, _) in served.into_iter().flatten() {
            self.slots_changed(queue);
        }
        for task in lost {
            // What it said before it was lost counts.
            let fence = self.runs.get(&task).map(|live| live.run.fence);
            let held = fence.and_then(|fence| self.held_ends.remove(&(task, fence)));
            match held {
                _ if task.is_interactive() => self.end_interactive(task, Why::Lost, effects),
                Some(held) => self.end_run(task, held.end, &held.ending, None, effects),
                None => self.end_run(task, End::Lost, &Ending::default(), None, effects),
            }
        }
        self.workers.remove(&worker);
        // In one commit with the ends of its runs: they are only known to be over if it is.
        if let Some(seat) = self.seats.remove(&worker) {
            self.batch.changes.push(Change::Member { seat, record: None });
        }
    }

    /// A worker that an earlier owner saved is counted on.
    pub(crate) fn count_on(&mut self, worker: WorkerId, seat: Seat) {
        self.seats.insert(worker, seat);
    }

    /// A worker is counted on from now on, or what is remembered of it changes.
    pub(super) fn on_member(
        &mut self,
        worker: WorkerId,
        seat: Seat,
        record: MemberRecord,
        effects: &mut Vec<Effect>,
    ) {
        self.seats.insert(worker, seat.clone());
        let wait_ms = record.wait_ms;
        self.batch.changes.push(Change::Member { seat, record: Some(record) });
        self.after_commit(Effect::MemberSaved { worker, wait_ms }, effects);
    }

    /// Takes a run out of the books and frees its slot.
    pub(super) fn take_run(&mut self, worker: WorkerId, task: TaskId, fence: Fence) -> Option<LiveRun> {
        let live = self.runs.get(&task)?;
        if live.run.fence != fence || live.worker != worker {
            return None;
        }
        let live = self.runs.remove(&task)?;
        let queue = &mut self.queues[live.run.lane.queue.0 as usize];
        if task.is_interactive() {
            queue.interactive -= 1;
        } else {
            queue.running -= 1;
        }
        self.cease_holding(&live);
        if live.in_lane.is_none() {
            self.forget_aside_run(&live.run);
        }
        self.free_slot(live.worker);
        Some(live)
    }

    fn forget_aside_run(&mut self, run: &Run) {
        if let btree_map::Entry::Occupied(mut count) =
            self.aside_runs.entry((run.lane.queue, run.key.clone()))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// A run that counts has ended: retry or finish its task, and acknowledge when that is durable.
    fn end_run(
        &mut self,
        task: TaskId,
        end: End,
        ending: &Ending,
        tell: Option<WorkerId>,
        effects: &mut Vec<Effect>,
    ) {
        let Some((fence, worker)) = self.runs.get(&task).map(|live| (live.run.fence, live.worker)) else {
            return;
        };
        let taken = if self.canary.is(Bug::EndCountedTwice) && end == End::Failed {
            self.runs.get(&task).cloned()
        } else {
            self.take_run(worker, task, fence)
        };
        let Some(live) = taken else { return };
        let (end, error) = self.judge(&live, end, ending);
        let run = &live.run;
        let from = live.in_lane.map_or(Place::Aside, |_| Place::Lane(run.level));
        if end != End::Lost {
            let ran_ms = self.now.0.saturating_sub(run.started.0);
            self.queues[run.lane.queue.0 as usize].took.learn(ran_ms, run.max_duration_ms());
            if let Some(ix) = self.lane_of(run.lane) {
                self.lanes[ix.0].took.learn(ran_ms, run.max_duration_ms());
            }
            let started = Some(run.started);
            self.run_took(run.lane, &run.key, run.level.pass(), run.charge, started, ending);
        }
        if let Some(ix) = self.lane_of(run.lane) {
            if let Some(key) = live.in_lane {
                self.lanes[ix.0].settle(run.level, run.charge, key);
            }
            self.left_lane(ix);
        }
        let tried = Try {
            attempt: run.attempt,
            seat: self.seats.get(&worker).cloned(),
            started: run.started,
            ended: self.now,
            end,
            error,
        };
        let state = State::Running { canceled: live.cancel };
        self.after_run(state, Event::Ended(end), run.lane, row_of(run), from, tried, ending, effects);
        self.task_changed(task);
        if let Some(worker) = tell {
            let acknowledge = Effect::Acknowledge { worker, task, fence };
            if self.canary.is(Bug::AckBeforeCommit) {
                effects.push(acknowledge);
            } else {
                self.after_commit(acknowledge, effects);
            }
        }
    }

    /// How a run has ended that its worker says ended like this: whether its time was up is one thing, whether it had as
    /// much as it was given at first is another.
    fn judge(&self, live: &LiveRun, end: End, ending: &Ending) -> (End, Arc<str>) {
        let end = if live.overdue && end == End::Failed { End::TimeUp } else { end };
        let late = matches!(end, End::TimeUp | End::Downgraded);
        match (&live.cut, end) {
            (Some(cut), _) if live.default && late => (End::Downgraded, cut.to_string().into()),
            // An earlier owner has downgraded it, and took the reason with it.
            (None, End::Downgraded) if live.default => {
                let seconds = live.run.limit_ms as f64 / 1_000.0;
                (end, format!("its time was cut to {seconds} s, to make room for other tasks").into())
            }
            // Its client has shortened it since, or its queue has no classes any more.
            (_, End::Downgraded) => (End::TimeUp, ending.error.clone()),
            (_, end) => (end, ending.error.clone()),
        }
    }

    /// Finds out which class a run holds that an earlier owner has started.
    fn classify(&mut self, task: TaskId) {
        let Some(live) = self.runs.get(&task) else { return };
        let of = self.classes_of(live.run.lane.queue);
        let default = !of.is_empty() && live.run.max_duration_ms() == 0;
        let longest = of.len().saturating_sub(1);
        let class = match live.run.limit_ms {
            0 => longest,
            limit_ms => classes::covering(of, limit_ms).unwrap_or(longest),
        };
        if let Some(live) = self.runs.get_mut(&task) {
            (live.class, live.default) = (class, default);
        }
    }

    /// If a run's time was charged ahead, it counts now how long it took. One that was lost with its worker is not
    /// its key's fault, and stays charged as it is.
    fn run_took(
        &mut self,
        lane: LaneId,
        key: &Key,
        pass: Pass,
        charge: Charge,
        started: Option<Millis>,
        ending: &Ending,
    ) {
        let Some(ix) = self.lane_of(lane).filter(|_| charge.timed) else { return };
        // Its worker knows better: its word may have come late, and another owner's clock may have gone otherwise.
        let since_ms = started.filter(|started| *started > Millis(0));
        let since_ms = since_ms.map(|started| self.now.0.saturating_sub(started.0));
        let Some(ms) = ending.ran_ms.or(since_ms) else { return };
        let took = Cost::of_ms(ms);
        if self.canary.is(Bug::TimeNotCounted) {
            return;
        }
        self.lanes[ix.0].places.took(key, pass, charge, took);
        self.queues[lane.queue.0 as usize].record.average.learn(took);
        self.dirty_lanes.insert(ix);
        self.dirty_queues.insert(lane.queue);
    }

    /// A run never began, so it took no time, whatever was charged.
    fn uncharge_run(&mut self, task: TaskId) {
        let Some(live) = self.runs.get_mut(&task) else { return };
        let charge = live.run.charge;
        live.run.charge.timed = false;
        if let Some(ix) = self.lane_index.get(&live.run.lane) {
            self.lanes[ix.0].places.uncharge(&live.run.key, charge);
            self.dirty_lanes.insert(*ix);
        }
    }

    /// Records a task's end.
    pub(super) fn finish(&mut self, over: Over, effects: &mut Vec<Effect>) {
        let Over { task, lane, key, from, attempt, max_attempts, expires, outcome, last, result } = over;
        let queue = &mut self.queues[lane.queue.0 as usize];
        let totals = &mut queue.record.totals;
        match outcome {
            Outcome::Succeeded => totals.succeeded += 1,
            Outcome::Failed => totals.failed += 1,
            Outcome::Canceled => totals.canceled += 1,
            Outcome::Expired => totals.expired += 1,
        }
        let retention_ms = self.settings_of(lane.queue).retention_ms;
        self.dirty_queues.insert(lane.queue);
        let tries = attempt.saturating_sub(1);
        if let Place::Parked(level) = from {
            self.batch.changes.push(Change::Unparked { lane, key: key.clone(), level });
        }
        let end = Arc::new(EndRecord { key, outcome, at: self.now, last, result });
        let kept = (retention_ms > 0).then(|| end.clone());
        let canceling = self.canceling.remove(&task);
        self.batch.changes.push(Change::Finished { task, lane, from, tries, canceling, outcome, end: kept });
        if retention_ms > 0 {
            self.set_timer(self.now.plus(retention_ms), task, Timed::Forget { tries });
        }
        if let Some(expires) = expires.filter(|expires| *expires > self.now) {
            self.untime(moment(expires, &Timed::Expire, task.0));
        }
        self.payloads.take(task);
        self.aside.remove(&task);
        self.watched.remove(&task);
        self.after_commit(Effect::Finished { task, lane, max_attempts, end }, effects);
    }

    /// Ends a task that waits, for a time or for its turn.
    pub(super) fn finish_waiting(&mut self, task: &Task, outcome: Outcome, effects: &mut Vec<Effect>) {
        self.withdraw(task, false);
        let row = task.row_at(Level::ZERO);
        self.finish(Over::of_row(&row, task.lane, task.place, outcome), effects);
    }

    /// Has a task tried again, at once or when its backoff is over.
    fn retry(&mut self, lane: LaneId, row: Row, from: Place, due: Option<Millis>, tried: Try) {
        self.aside.remove(&row.task);
        match due {
            Some(due) => {
                let seq = self.next_seq;
                self.next_seq += 1;
                let row = self.schedule(due, lane, row, seq);
                let to = Place::Timer(row.level);
                self.batch.changes.push(Change::Moved { lane, from, to, row, tried: Some(tried) });
            }
            None => self.place_row(lane, row, from, Some(tried), Placing::Again),
        }
    }

    /// Where a task is in its life, as the store has it and memory knows better.
    pub(super) fn state_of(&self, task: &Task) -> State {
        if let Some(live) = self.runs.get(&task.id) {
            return State::Running { canceled: live.cancel };
        }
        match task.place {
            Place::Lane(_) | Place::Parked(_) | Place::Aside => State::Queued,
            Place::Timer(_) => State::Scheduled,
            Place::Over => State::Ended,
        }
    }

    pub(super) fn tries_of(&self, task: &Task) -> Tries {
        Tries {
            attempt: task.attempt,
            max_attempts: task.max_attempts,
            lost: task.lost,
            max_lost: self.settings_of(task.lane.queue).max_lost,
            expires: false,
            requeue: self.settings_of(task.lane.queue).after_downgrade == AfterDowngrade::Requeue,
        }
    }

    /// A row left this lane: forget keys, save levels, and see whether a long runner holds A back.
    pub(super) fn left_lane(&mut self, ix: LaneIx) {
        self.dirty_lanes.insert(ix);
        self.hungry.insert(ix);
        self.forget(ix);
        if self.batch.parks >= self.bounds.moves_per_commit {
            // It may have been what held the others up.
            self.wake(self.lanes[ix.0].id.queue);
        }
        let bound = u64::from(self.bounds.aside_after_ends.max(1));
        while self.lanes[ix.0].stuck_behind().is_some_and(|(_, _, ends)| ends >= bound) {
            if !self.set_aside_first(ix) {
                break;
            }
        }
        self.arm_aside(ix);
    }

    /// Sees to it that a long runner is noticed by time, too.
    fn arm_aside(&mut self, ix: LaneIx) {
        let Some(started) = self.first_stuck(ix) else { return };
        if !self.lanes[ix.0].aside_armed {
            self.lanes[ix.0].aside_armed = true;
            let at = started.plus(self.bounds.aside_after_ms).max(self.now.plus(1));
            self.arm(at, Alarm::SetAside(ix));
        }
    }

    /// When the run that holds A back was dispatched, if one does.
    fn first_stuck(&self, ix: LaneIx) -> Option<Millis> {
        let (_, task, _) = self.lanes[ix.0].stuck_behind()?;
        self.runs.get(&task).map(|live| live.run.started)
    }

    pub(super) fn on_aside_timer(&mut self, ix: LaneIx) {
        self.lanes[ix.0].aside_armed = false;
        while self.first_stuck(ix).is_some_and(|started| started.plus(self.bounds.aside_after_ms) <= self.now)
        {
            if !self.set_aside_first(ix) {
                break;
            }
        }
        self.arm_aside(ix);
    }

    /// Moves the row of the run that holds A back to the table of long runners.
    fn set_aside_first(&mut self, ix: LaneIx) -> bool {
        let Some((level, task, _)) = self.lanes[ix.0].stuck_behind() else { return false };
        let Some(live) = self.runs.get_mut(&task) else { return false };
        let Some(key) = live.in_lane.take() else { return false };
        *self.aside_runs.entry((live.run.lane.queue, live.run.key.clone())).or_default() += 1;
        let lane = &mut self.lanes[ix.0];
        let id = lane.id;
        let row = row_of(&live.run);
        lane.settle(level, row.charge, key);
        let (from, to) = (Place::Lane(level), Place::Aside);
        self.batch.changes.push(Change::Moved { lane: id, from, to, row, tried: None });
        self.dirty_lanes.insert(ix);
        self.hungry.insert(ix);
        self.task_changed(task);
        true
    }

    pub(super) fn on_cancel(&mut self, request: RequestId, task: TaskId, effects: &mut Vec<Effect>) {
        let waiters = self.task_reads.get(&task).map_or(0, |read| read.waiters());
        if task.is_interactive() && self.runs.contains_key(&task) {
            let fence = self.runs[&task].run.fence;
            self.on_hangup(task, fence, effects);
            effects.push(Effect::Answer { request, answer: Ok(Answer::Stopping) });
        } else if task.0 >= self.next_seq {
            // Or a task that is accepted meanwhile could be taken for it.
            effects.push(Effect::Answer { request, answer: Err(no_such_task(task)) });
        } else if self.task_reads.len() + self.held_cancels.len() >= self.bounds.task_reads
            || waiters >= bounds::WAITERS_PER_TASK
        {
            let refusal = Refusal::limited("too many cancels at once; send this again in a moment");
            effects.push(Effect::Answer { request, answer: Err(refusal) });
        } else if self.may_start() || self.runs.contains_key(&task) {
            self.cancel(request, task, effects);
        } else {
            self.held_cancels.push((request, task));
        }
    }

    fn cancel(&mut self, request: RequestId, task: TaskId, effects: &mut Vec<Effect>) {
        if self.runs.contains_key(&task) {
            self.stop_run(task, effects);
            self.answer_after_commit(request, Answer::Stopping, effects);
        } else {
            self.read_task_for(task, Waiter::Cancel(Some(request)), effects);
        }
    }

    /// Has a running task stopped. That somebody wants it is saved: a new owner goes on with it.
    pub(super) fn stop_run(&mut self, task: TaskId, effects: &mut Vec<Effect>) {
        let Some(live) = self.runs.get_mut(&task) else { return };
        if !std::mem::replace(&mut live.cancel, true) {
            let stop = Effect::Stop { worker: live.worker, task, fence: live.run.fence };
            self.canceling.insert(task);
            self.batch.changes.push(Change::Canceling { task });
            effects.push(stop);
        }
    }

    pub(super) fn on_replay(&mut self, request: RequestId, task: TaskId, effects: &mut Vec<Effect>) {
        let waiters = self.task_reads.get(&task).map_or(0, |read| read.waiters());
        if task.0 >= self.next_seq {
            effects.push(Effect::Answer { request, answer: Err(no_such_task(task)) });
        } else if self.task_reads.len() >= self.bounds.task_reads || waiters >= bounds::WAITERS_PER_TASK {
            let refusal = Refusal::limited("too many replays at once; send this again in a moment");
            effects.push(Effect::Answer { request, answer: Err(refusal) });
        } else {
            self.read_task_for(task, Waiter::Replay(request), effects);
        }
    }

    /// Makes a new task of one that has ended.
    fn replay(&mut self, request: RequestId, task: &Task, effects: &mut Vec<Effect>) {
        let terms = task.terms.as_deref().cloned().unwrap_or_default();
        let expires_ms = terms.expires.map_or(0, |expires| expires.0.saturating_sub(task.accepted.0));
        let asked = self.lane_of(task.lane).and_then(|ix| {
            let keys = self.lanes[ix.0].places.keys();
            keys.find(&task.key).map(|key| keys.get(key).asked)
        });
        let new = NewTask {
            key: task.key.clone(),
            // What the key's latest task asked for, if that is known: not what an old one did, nor an override.
            weight: asked.unwrap_or(task.charge.weight),
            priority: task.lane.priority,
            cost: task.charge.asked().cost,
            max_attempts: Some(task.max_attempts),
            backoff: terms.backoff,
            start: Default::default(),
            expires_ms,
            attach_ms: 0,
            unique: None,
            expected_ms: terms.expected_ms,
            max_duration_ms: terms.max_duration_ms,
            content_type: task.content_type.clone(),
            payload: task.payload.clone(),
            files: task.files.clone(),
        };
        let name = self.queues[task.lane.queue.0 as usize].record.name.clone();
        let fits = self.class_for(task.lane.queue, new.max_duration_ms);
        if let Err(refusal) = fits.and_then(|_| self.has_room_for_tasks(&name, std::slice::from_ref(&new))) {
            effects.push(Effect::Answer { request, answer: Err(refusal) });
            return;
        }
        let again = self.accept_one(task.lane.queue, new, Some(task.id));
        self.batch.changes.push(Change::Replayed { task: task.id, again });
        self.answer_after_commit(request, Answer::Replayed(again), effects);
    }

    pub(super) fn on_configure(
        &mut self,
        request: RequestId,
        queue: QueueName,
        settings: Settings,
        version: Option<u64>,
        effects: &mut Vec<Effect>,
    ) {
        let now = self.settings(&queue).version;
        let allowed = settings.check().and_then(|()| self.has_room_for_queue(&queue)).and_then(|()| {
            let unchanged = version.is_none_or(|version| version == now);
            let text =
                format!("the settings were changed since version {}; read them again", version.unwrap_or(0));
            if unchanged { Ok(()) } else { Err(Refusal::new(Kind::Conflict, "version", text)) }
        });
        if let Err(refusal) = allowed {
            effects.push(Effect::Answer { request, answer: Err(refusal) });
            return;
        }
        let id = self.queue_named(&queue);
        let version = now + 1;
        let record = SettingsRecord { version, settings };
        let before = self.settings_of(id).clone();
        self.queues[id.0 as usize].settings = Some(record.clone());
        let after = &record.settings;
        if before.classes != after.classes {
            self.classes_changed(id);
        }
        if before.rate != after.rate {
            self.queues[id.0 as usize].bucket = Some(Bucket::empty(self.now));
        }
        if (before.key_limit, before.key_rate) != (after.key_limit, after.key_rate) {
            self.limits_changed(id);
        }
        // It may be another number of their rows that has places ahead of time.
        self.returning.extend(self.parked.keys().filter(|(lane, _)| lane.queue == id).cloned());
        self.wake(id);
        self.batch.changes.push(Change::Settings { queue: id, record });
        self.answer_after_commit(request, Answer::Configured(version), effects);
    }

    /// The store's word on a task that somebody asked about.
    pub(super) fn on_task_known(
        &mut self,
        id: TaskId,
        task: Option<&Task>,
        waiter: Waiter,
        effects: &mut Vec<Effect>,
    ) {
        let state = task.map_or(State::Unknown, |task| self.state_of(task));
        match waiter {
            Waiter::Cancel(Some(request)) if self.runs.contains_key(&id) => self.cancel(request, id, effects),
            Waiter::Cancel(request) => self.cancel_known(id, task, state, request, effects),
            Waiter::Replay(request) => {
                let tries = task.map_or(NO_TRIES, |task| self.tries_of(task));
                match (life::after(state, Event::Replay, tries), task) {
                    (Next::Again, Some(task)) => self.replay(request, task, effects),
                    (_, Some(_)) => {
                        let text = format!("task {id} has not ended; cancel it first");
                        let refusal = Refusal::new(Kind::Conflict, "", text);
                        effects.push(Effect::Answer { request, answer: Err(refusal) });
                    }
                    (_, None) => {
                        let text = format!("task {id} does not exist, or its end is not remembered any more");
                        effects.push(Effect::Answer { request, answer: Err(Refusal::not_found(text)) });
                    }
                }
            }
            Waiter::Shorten(request, max_duration_ms) => {
                self.shorten_known(request, id, task, max_duration_ms, effects);
            }
            Waiter::Reported(fence) => self.on_verified(id, fence, task, effects),
            Waiter::Expire(at) => self.on_expiry(at, task, effects),
            Waiter::Detach(at) => self.on_detached(at, id, task, effects),
            Waiter::LateEnd(held) if self.runs.contains_key(&id) => self.on_ended(held, effects),
            Waiter::LateEnd(held) => {
                if let Some(task) = task {
                    self.late_end(task, state, &held, effects);
                    if let Some(task) = self.aside.get(&id).cloned() {
                        self.lose_aside(&task, effects); // it was of an earlier attempt
                    }
                }
                let HeldEnd { worker, task, fence, .. } = held;
                self.after_commit(Effect::Acknowledge { worker, task, fence }, effects);
            }
        }
    }

    fn cancel_known(
        &mut self,
        id: TaskId,
        task: Option<&Task>,
        state: State,
        request: Option<RequestId>,
        effects: &mut Vec<Effect>,
    ) {
        let tries = task.map_or(NO_TRIES, |task| self.tries_of(task));
        match (life::after(state, Event::Cancel, tries), task) {
            (Next::Finish(outcome), Some(task)) => {
                self.finish_waiting(task, outcome, effects);
                if let Some(request) = request {
                    self.answer_after_commit(request, Answer::Canceled, effects);
                }
            }
            (_, task) => {
                self.canceling.remove(&id);
                if let Some(request) = request {
                    let over = task.is_some();
                    let text = if over { "has ended" } else { "does not exist, or has ended" };
                    let answer = Err(Refusal::not_found(format!("task {id} {text}")));
                    self.after_commit(Effect::Answer { request, answer }, effects);
                }
            }
        }
    }

    /// The end of a run that nobody counted on any more, of a task that does not run.
    fn late_end(&mut self, task: &Task, state: State, held: &HeldEnd, effects: &mut Vec<Effect>) {
        let counted = held.attempt != task.attempt;
        // Somebody wanted it stopped, and it was; the owner that knew of its run is gone.
        let (state, event) = match self.canceling.contains(&task.id) && !counted && state != State::Ended {
            true => (State::Running { canceled: true }, Event::Ended(held.end)),
            false => (state, Event::EndedLate { end: held.end, counted }),
        };
        if life::after(state, event, self.tries_of(task)) == Next::Stay {
            return;
        }
        let level = match task.place {
            Place::Lane(level) => Some(level),
            Place::Aside => held.level,
            Place::Timer(_) | Place::Parked(_) | Place::Over => None,
        };
        if let Some(level) = level.filter(|_| !counted) {
            let started = Some(held.started);
            self.run_took(task.lane, &task.key, level.pass(), task.charge, started, &held.ending);
        }
        self.withdraw(task, true);
        if let Some(ix) = self.lane_of(task.lane) {
            self.forget(ix); // its key may be remembered for nothing but that
        }
        let tried = Try {
            attempt: held.attempt,
            seat: self.seats.get(&held.worker).cloned(),
            started: held.started,
            ended: self.now,
            end: held.end,
            error: held.ending.error.clone(),
        };
        let row = task.row_at(Level::ZERO);
        self.after_run(state, event, task.lane, row, task.place, tried, &held.ending, effects);
    }

    /// A waiting task leaves where it waits: it was canceled, or had been served before this owner knew.
    pub(super) fn withdraw(&mut self, task: &Task, served: bool) {
        match task.place {
            Place::Lane(level) => {
                let Some(ix) = self.lane_of(task.lane) else { return };
                let lane = &mut self.lanes[ix.0];
                if let Some(key) = lane.places.keys().find(&task.key) {
                    if served {
                        lane.adopt(level, task.id, key, task.charge);
                        lane.settle(level, task.charge, key);
                    } else {
                        lane.places.uncharge(&task.key, task.charge);
                        lane.withdraw(level, task.charge, key);
                    }
                    self.made_room(task.lane, &task.key);
                    self.left_lane(ix);
                    self.wake(task.lane.queue); // what stood behind it may need a shorter class
                }
            }
            Place::Timer(level) => self.unschedule(task.lane, level),
            Place::Parked(level) => self.unshelve(task.lane, &task.key, level),
            Place::Aside | Place::Over => {}
        }
        self.task_changed(task.id);
    }
}

/// Of a task that nobody knows.
pub(super) const NO_TRIES: Tries =
    Tries { attempt: 1, max_attempts: 1, lost: 0, max_lost: 1, expires: false, requeue: false };

pub(super) fn no_such_task(task: TaskId) -> Refusal {
    Refusal::not_found(format!("task {task} does not exist, or has ended"))
}

/// What waits again if a run did not end its task.
pub(super) fn row_of(run: &Run) -> Row {
    Row {
        level: run.level,
        task: run.task,
        key: run.key.clone(),
        charge: run.charge,
        attempt: run.attempt,
        max_attempts: run.max_attempts,
        lost: run.lost,
        terms: run.terms.clone(),
    }
}

/// A try with as much of its error as is kept of one that is followed by another.
fn cut(tried: Try) -> Try {
    if tried.error.len() <= bounds::TRY_ERROR_BYTES {
        return tried;
    }
    let mut end = bounds::TRY_ERROR_BYTES;
    while !tried.error.is_char_boundary(end) {
        end -= 1;
    }
    Try { error: tried.error[..end].into(), ..tried }
}
