//! What may run beside what: the classes that runs hold, who makes room for a task that waits, and the time that runs
//! have. The cycle itself is [`Holders`]; here is what it does to this shard's queues, runs and workers.
//!
//! Times are enforced by workers. The scheduler looks, some seconds later, whether they were, and has what is overdue
//! stopped.

use super::{Alarm, LaneIx, Shard};
use crate::admission::cycle::{Downgrade, Holders};
use crate::admission::{ClassLimit, classes};
use crate::bounds;
use crate::canary::Bug;
use crate::messages::Effect;
use crate::names::{Class, LaneId, Millis, QueueId, QueueName, TaskId, WorkerId};
use crate::refusal::Refusal;
use crate::workers::{Cut, CutWhy, LiveRun};

/// How a class of a queue stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassView {
    /// How long its tasks may run, in milliseconds.
    pub duration_ms: u64,
    /// Runs that hold it or a longer one.
    pub held: u64,
    /// How many may.
    pub limit: u64,
}

impl Shard {
    /// The classes of a queue; none if it has none.
    pub(crate) fn classes_of(&self, queue: QueueId) -> &[ClassLimit] {
        &self.settings_of(queue).classes
    }

    /// How the classes of a queue stand, shortest first.
    pub fn classes(&self, queue: &QueueName) -> Vec<ClassView> {
        let Some(&id) = self.names.get(queue) else { return Vec::new() };
        let Some(holders) = &self.queues[id.0 as usize].holders else { return Vec::new() };
        let view = |(class, of): (usize, &ClassLimit)| ClassView {
            duration_ms: of.duration_ms,
            held: holders.count(class),
            limit: holders.limit(class),
        };
        self.classes_of(id).iter().enumerate().map(view).collect()
    }

    /// The duration of the class that a run holds, in milliseconds; None if its queue has no classes.
    pub fn class_of_run(&self, task: TaskId) -> Option<u64> {
        let live = self.runs.get(&task)?;
        self.classes_of(live.run.lane.queue).get(live.class).map(|class| class.duration_ms)
    }

    /// Whether the first task of some lane could start now, by its class and by its key. Not asked by the dispatcher,
    /// which goes another way: this is what it comes to.
    pub(crate) fn could_start(&self, id: QueueId) -> bool {
        let queue = &self.queues[id.0 as usize];
        let lanes = || queue.lanes.iter().map(|(at, ix)| (at, &self.lanes[ix.0]));
        // What is being read, written or brought may go first.
        let settled = lanes().all(|(_, lane)| {
            !lane.window.is_unread() && lane.places.to_come == 0 && !lane.window.is_reading()
        });
        if !settled || self.settings_of(id).paused || self.rate_wait(id).is_some() {
            return false;
        }
        let room = |class: usize| {
            let free = |holders: &Holders| (1..=class).all(|class| !holders.is_reached(class));
            queue.holders.as_deref().is_none_or(free)
        };
        lanes().any(|(_, lane)| {
            lane.window.waiting().first_key_value().is_some_and(|(_, entry)| {
                let key = lane.places.keys().get(entry.key);
                !key.held && room(self.needs(id, entry.max_duration_ms()))
            })
        })
    }

    /// What has changed about the time of a run, if anything has.
    pub fn cut_of(&self, task: TaskId) -> Option<&Cut> {
        self.runs.get(&task)?.cut.as_ref()
    }

    /// The lane for a task of this duration, or why there is none.
    pub(super) fn class_for(&self, queue: QueueId, max_duration_ms: u64) -> Result<Class, Refusal> {
        self.class_among(self.classes_of(queue), max_duration_ms)
    }

    pub(super) fn class_among(&self, classes: &[ClassLimit], max_duration_ms: u64) -> Result<Class, Refusal> {
        let Some(longest) = classes.last() else { return Ok(Class(0)) };
        let covering = classes::covering(classes, max_duration_ms);
        covering.map(|class| Class(class as u8)).ok_or_else(|| {
            let most = longest.duration_ms;
            let text = format!(
                "{max_duration_ms} is longer than the longest class of this queue, {most}; ask for less"
            );
            Refusal::invalid("max_duration_ms", text)
        })
    }

    /// The class that a task of this duration needs, as the classes are now.
    pub(crate) fn needs(&self, queue: QueueId, max_duration_ms: u64) -> usize {
        let of = self.classes_of(queue);
        if max_duration_ms == 0 || of.is_empty() {
            return 0;
        }
        classes::covering(of, max_duration_ms).unwrap_or(of.len() - 1)
    }

    /// The class that the first task of a lane needs; that of the lane, if it is not known.
    fn first_needs(&self, ix: LaneIx) -> usize {
        let lane = &self.lanes[ix.0];
        let first = lane.window.waiting().first_key_value();
        first.map_or(usize::from(lane.id.class.0), |(_, entry)| {
            self.needs(lane.id.queue, entry.max_duration_ms())
        })
    }

    /// The lane of this queue that goes next, if any has something to start now, and which default runs give up a
    /// class for it.
    pub(super) fn next_start(&self, id: QueueId) -> Option<(LaneIx, Vec<(usize, usize)>)> {
        if self.settings_of(id).paused || self.rate_wait(id).is_some() {
            return None;
        }
        let Some(holders) = &self.queues[id.0 as usize].holders else {
            return self.first_lane(id, usize::MAX).map(|ix| (ix, Vec::new()));
        };
        if self.canary.is(Bug::ClassLimitIgnored) {
            return self.first_lane(id, usize::MAX).map(|ix| (ix, Vec::new()));
        }
        let plan = holders.plan(|below| self.first_lane(id, below).map(|ix| self.first_needs(ix)))?;
        if plan.below < holders.classes() && self.canary.is(Bug::ClassBlocksShorter) {
            return None;
        }
        self.first_lane(id, plan.below).map(|ix| (ix, plan.moves))
    }

    /// Whether a lane is left out because its first task needs a class that is.
    pub(crate) fn is_left_out(&self, ix: LaneIx, below: usize) -> bool {
        below < usize::MAX && self.first_needs(ix) >= below
    }

    /// The classes of a queue that are full and stay so: nothing that holds one makes room. Shortest first. The first
    /// class is as wide as there are slots, and not among them.
    pub(crate) fn full_classes(&self, queue: QueueId) -> Vec<usize> {
        let Some(holders) = &self.queues[queue.0 as usize].holders else { return Vec::new() };
        let yields = |class: usize| (class..holders.classes()).any(|longer| holders.defaults(longer) > 0);
        let is_full =
            |class: &usize| holders.limit(*class) > 0 && holders.is_reached(*class) && !yields(*class);
        (1..holders.classes()).filter(is_full).collect()
    }

    /// The class that a task gets which starts now, how long it may run, and whether it can be downgraded.
    pub(super) fn class_to_start(&self, queue: QueueId, max_duration_ms: u64) -> (usize, u64, bool) {
        let of = self.classes_of(queue);
        match &self.queues[queue.0 as usize].holders {
            Some(holders) if max_duration_ms == 0 => {
                let class = holders.longest_free().min(of.len().saturating_sub(1));
                (class, of.get(class).map_or(0, |class| class.duration_ms), true)
            }
            Some(_) | None => (self.needs(queue, max_duration_ms), max_duration_ms, false),
        }
    }

    /// A run begins to count: for its class, its worker and its key. It is in the books.
    pub(super) fn begin_holding(&mut self, task: TaskId) {
        let Some(live) = self.runs.get(&task) else { return };
        let (worker, queue, key) = (live.worker, live.run.lane.queue, live.run.key.clone());
        let (class, default, limit_ms, started) =
            (live.class, live.default, live.run.limit_ms, live.run.started);
        if let Some(holders) = &mut self.queues[queue.0 as usize].holders {
            holders.hold(task, class, default);
        }
        if default && class > 0 || task.is_interactive() {
            self.begin_yielding(worker, task);
        }
        if limit_ms > 0 {
            self.arm_overdue(task, started.plus(limit_ms));
        }
        self.key_begins(queue, &key);
    }

    /// A run counts no more. It has just left the books.
    pub(super) fn cease_holding(&mut self, live: &LiveRun) {
        let (task, queue) = (live.run.task, live.run.lane.queue);
        if let Some(holders) = &mut self.queues[queue.0 as usize].holders {
            holders.release(task, live.class, live.default);
            // What waits for a class may go on, though no slot may have become free for it.
            if !self.canary.is(Bug::ClassFreedUnseen) {
                self.wake(queue);
            }
        }
        self.cease_yielding(live.worker, task);
        if let Some(at) = live.overdue_at {
            self.alarms.remove(&(at, Alarm::Overdue(task)));
        }
        if let Some(at) = live.halt_at {
            self.alarms.remove(&(at, Alarm::Halt(task)));
        }
        self.key_ceases(queue, &live.run.key);
    }

    fn begin_yielding(&mut self, id: WorkerId, task: TaskId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        worker.yielding.insert(task);
        if worker.yielding.len() == 1 {
            for (queue, _) in &worker.queues {
                self.queues[queue.0 as usize].yielding.insert(id);
            }
        }
        self.note_yielding(id);
    }

    /// Has the queues of this worker looked at that have no free slot, if runs there could make room: the cycle goes on.
    pub(super) fn note_yielding(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get(&id).filter(|worker| !worker.yielding.is_empty()) else { return };
        if self.canary.is(Bug::RoomNotMade) {
            return;
        }
        for (queue, _) in &worker.queues {
            if self.queues[queue.0 as usize].free.is_empty() {
                self.ready.insert(*queue);
            }
        }
    }

    /// Whether a run would make room for a task of this queue, now, that waits and finds no free slot.
    pub(crate) fn could_make_room(&self, queue: QueueId) -> bool {
        let of = &self.queues[queue.0 as usize];
        of.free.is_empty()
            && of.yielding.iter().filter_map(|id| self.workers.get(id)).any(|worker| {
                let default = |task: &TaskId| !task.is_interactive();
                worker.slots > 0 && worker.busy <= worker.slots && worker.yielding.iter().any(default)
            })
    }

    /// Whether a task of this duration has to wait in another lane than this one, as the classes are now.
    pub(super) fn belongs_elsewhere(&self, lane: LaneId, max_duration_ms: u64) -> bool {
        self.queues[lane.queue.0 as usize].holders.is_some()
            && self.needs(lane.queue, max_duration_ms) != usize::from(lane.class.0)
            && !self.canary.is(Bug::LongHidesShort)
    }

    pub(super) fn cease_yielding(&mut self, id: WorkerId, task: TaskId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if worker.yielding.remove(&task) && worker.yielding.is_empty() {
            for (queue, _) in &worker.queues {
                self.queues[queue.0 as usize].yielding.remove(&id);
            }
        }
    }

    /// A worker has so many slots for these queues no more: it is gone, or about to say anew what it offers.
    pub(super) fn withdraw_offer(&mut self, id: WorkerId) {
        self.leave_queues(id);
        let Some(worker) = self.workers.get(&id) else { return };
        for (queue, _) in &worker.queues {
            let queue = &mut self.queues[queue.0 as usize];
            queue.slots -= u64::from(worker.slots);
            queue.yielding.remove(&id);
        }
    }

    /// What a worker offers counts from now on.
    pub(super) fn count_offer(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get(&id) else { return };
        for (queue, _) in &worker.queues {
            let queue = &mut self.queues[queue.0 as usize];
            queue.slots += u64::from(worker.slots);
            if !worker.yielding.is_empty() {
                queue.yielding.insert(id);
            }
        }
    }

    /// The slots that serve a queue have changed: percentages follow.
    pub(super) fn slots_changed(&mut self, queue: QueueId) {
        let slots = self.queues[queue.0 as usize].slots;
        if self.queues[queue.0 as usize].holders.is_some() {
            let limits = classes::limits(self.classes_of(queue), slots);
            if let Some(holders) = &mut self.queues[queue.0 as usize].holders {
                holders.set_limits(limits);
            }
            self.wake(queue);
        }
    }

    /// The classes of a queue have changed: what runs holds those that it would hold now.
    pub(super) fn classes_changed(&mut self, id: QueueId) {
        let of = self.classes_of(id).to_vec();
        let slots = self.queues[id.0 as usize].slots;
        let mut holders = (!of.is_empty()).then(|| Box::new(Holders::new(classes::limits(&of, slots))));
        let runs: Vec<TaskId> = self.runs_in(id).map(|run| run.task).collect();
        for task in runs {
            let Some(live) = self.runs.get_mut(&task) else { continue };
            let longest = of.len().saturating_sub(1);
            live.default = !of.is_empty() && live.run.max_duration_ms() == 0 && !task.is_interactive();
            live.class = match live.run.limit_ms {
                _ if task.is_interactive() || of.is_empty() => 0,
                0 => longest,
                limit_ms => classes::covering(&of, limit_ms).unwrap_or(longest),
            };
            let (worker, yields) = (live.worker, live.default && live.class > 0 || task.is_interactive());
            if let Some(holders) = &mut holders {
                holders.hold(task, live.class, live.default);
            }
            if yields { self.begin_yielding(worker, task) } else { self.cease_yielding(worker, task) }
        }
        self.queues[id.0 as usize].holders = holders;
    }

    /// Has default runs hold shorter classes, so that the first task can have the one that it needs.
    pub(super) fn give_up_classes(
        &mut self,
        queue: QueueId,
        moves: &[(usize, usize)],
        effects: &mut Vec<Effect>,
    ) {
        if moves.is_empty() {
            return;
        }
        let Some(holders) = &mut self.queues[queue.0 as usize].holders else { return };
        for Downgrade { task, from, to, among } in holders.carry_out(moves, &mut self.chance) {
            // What made it necessary: the lowest limit that was reached, which is the one above where it goes.
            let class_ms = self.classes_of(queue).get(to + 1).map_or(0, |class| class.duration_ms);
            debug_assert!(from > to);
            self.downgraded(task, to, CutWhy::ClassFull { class_ms, among }, effects);
        }
    }

    /// What waits here needs classes that are full, and nothing can start. Default runs may have to give them up even so,
    /// if more hold them than may. True if one did: then it is worth another look.
    pub(super) fn give_up_for_blocked(&mut self, queue: QueueId, effects: &mut Vec<Effect>) -> bool {
        let Some(holders) = &self.queues[queue.0 as usize].holders else { return false };
        if self.settings_of(queue).paused || self.rate_wait(queue).is_some() {
            return false;
        }
        let (below, moves) =
            holders.plan_all(|below| self.first_lane(queue, below).map(|ix| self.first_needs(ix)));
        let blocked =
            below < holders.classes() && self.first_lane(queue, below).is_none() && !moves.is_empty();
        if blocked {
            self.give_up_classes(queue, &moves, effects);
        }
        blocked
    }

    /// A default run holds this class now: its worker is told what time it has.
    fn downgraded(&mut self, task: TaskId, to: usize, why: CutWhy, effects: &mut Vec<Effect>) {
        let Some(live) = self.runs.get_mut(&task) else { return };
        live.class = to;
        let worker = live.worker;
        let queue = live.run.lane.queue;
        let to_ms = self.classes_of(queue).get(to).map_or(0, |class| class.duration_ms);
        if to == 0 {
            self.cease_yielding(worker, task);
        }
        if !self.canary.is(Bug::DowngradeNotTold) {
            self.cut(task, to_ms, why, effects);
        }
    }

    /// A run has less time from now on.
    pub(super) fn cut(&mut self, task: TaskId, to_ms: u64, why: CutWhy, effects: &mut Vec<Effect>) {
        let now = self.now;
        let Some(live) = self.runs.get_mut(&task) else { return };
        let run = &mut live.run;
        live.shortened |= why == CutWhy::Shortened;
        let less = run.limit_ms == 0 || run.limit_ms > to_ms;
        if less {
            let had_ms = live.cut.as_ref().map_or(run.limit_ms, |cut| cut.from_ms);
            live.cut = Some(Cut { at: now, from_ms: had_ms, to_ms, why });
            run.limit_ms = to_ms;
        }
        let (started, limit) = (run.started, limit_of(live));
        if why == CutWhy::Shortened {
            // Also if it has no less time than before: its worker has to know that it is no default task any more.
            self.after_commit(limit, effects)
        } else if less {
            effects.push(limit)
        }
        if less {
            self.arm_overdue(task, started.plus(to_ms).max(now));
        }
    }

    /// What a worker is told again of the time of its runs, where that has changed since they started.
    pub fn cut_runs_of(&self, worker: WorkerId) -> impl Iterator<Item = Effect> {
        let cut = move |live: &&LiveRun| live.worker == worker && (live.cut.is_some() || live.shortened);
        self.runs.values().filter(cut).map(limit_of)
    }

    /// A task waits and no slot is free: default runs are downgraded to the first class, and one interactive run is
    /// halted, both on workers that could take the task. True if a slot is free now.
    pub(super) fn make_room(&mut self, queue: QueueId, effects: &mut Vec<Effect>) -> bool {
        if self.queues[queue.0 as usize].yielding.is_empty() {
            return false;
        }
        let Some((_, moves)) = self.next_start(queue) else { return false };
        self.give_up_classes(queue, &moves, effects);
        let of = self.queues[queue.0 as usize].yielding.iter();
        let can_take = |id: &&WorkerId| {
            self.workers.get(id).is_some_and(|worker| worker.slots > 0 && worker.busy <= worker.slots)
        };
        let workers: Vec<WorkerId> = of.filter(can_take).copied().collect();
        let mut interactive = Vec::new();
        for id in workers {
            let Some(worker) = self.workers.get(&id) else { continue };
            for task in worker.yielding.iter().copied().collect::<Vec<TaskId>>() {
                if task.is_interactive() {
                    interactive.push(task);
                } else {
                    self.downgrade_to_first(task, effects);
                }
            }
        }
        self.halt_one(queue, interactive, effects)
    }

    fn downgrade_to_first(&mut self, task: TaskId, effects: &mut Vec<Effect>) {
        let Some(live) = self.runs.get(&task) else { return };
        let (queue, class) = (live.run.lane.queue, live.class);
        if let Some(holders) = self.queues[queue.0 as usize].holders.as_mut().filter(|_| class > 0) {
            holders.downgrade(task, class, 0);
            self.downgraded(task, 0, CutWhy::NoFreeSlot, effects);
        }
    }

    /// An interactive request found no slot: one default run gives up one class for the next one.
    pub(super) fn denied(&mut self, queue: QueueId, effects: &mut Vec<Effect>) {
        let Some(holders) = &mut self.queues[queue.0 as usize].holders else { return };
        if let Some(Downgrade { task, to, among, .. }) = holders.deny(&mut self.chance) {
            self.downgraded(task, to, CutWhy::Denied { among }, effects);
        }
    }

    fn arm_overdue(&mut self, task: TaskId, due: Millis) {
        let at = due.plus(bounds::OVERDUE_MS).max(self.now.plus(1));
        let Some(live) = self.runs.get_mut(&task) else { return };
        if let Some(before) = live.overdue_at.replace(at) {
            self.alarms.remove(&(before, Alarm::Overdue(task)));
        }
        self.arm(at, Alarm::Overdue(task));
    }

    /// A run's time has been over for a while, and its worker has not said that it ended.
    pub(super) fn on_overdue(&mut self, task: TaskId, effects: &mut Vec<Effect>) {
        let now = self.now;
        let Some(live) = self.runs.get_mut(&task) else { return };
        live.overdue_at = None;
        let due = live.run.started.plus(live.run.limit_ms);
        if live.run.limit_ms > 0 && due <= now {
            live.overdue = true;
            effects.push(Effect::Stop { worker: live.worker, task, fence: live.run.fence });
        }
        if live.run.limit_ms > 0 {
            self.arm_overdue(task, due.max(now));
        }
    }
}

/// The time that a run has, for its worker.
fn limit_of(live: &LiveRun) -> Effect {
    Effect::Limit {
        worker: live.worker,
        task: live.run.task,
        fence: live.run.fence,
        limit_ms: live.run.limit_ms,
        max_duration_ms: live.run.max_duration_ms(),
    }
}
