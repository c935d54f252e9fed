//! Taking tasks in: validation, places, and the change that makes them durable.

use std::sync::Arc;

use super::{Alarm, Part, Shard};
use crate::backlog::{Charge, Cost, Entry, Level, Pass, VTime, Weight};
use crate::bounds;
use crate::canary::Bug;
use crate::change::{Change, Place, RequestIds, RequestRecord, Task, Timed};
use crate::life::Terms;
use crate::messages::{Answer, Effect, NewTask, Start, Work};
use crate::names::{Class, LaneId, Millis, QueueId, QueueName, RequestId, RequestKey, TaskId};
use crate::refusal::Refusal;

impl Shard {
    pub(super) fn on_enqueue(
        &mut self,
        request: RequestId,
        queue: QueueName,
        tasks: Vec<NewTask>,
        once: Option<RequestKey>,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(known) = once.and_then(|key| self.known_as(key)) {
            // It may have come while the first one's commit is on its way: that one has to be durable.
            let before = Answer::AcceptedBefore(known.ids.to_vec());
            return self.answer_after_commit(request, before, effects);
        }
        match self.may_accept(&queue, &tasks).and_then(|()| self.has_room_for_names(once, &tasks)) {
            Ok(()) => {
                let accepted = self.accept(&queue, tasks);
                if let Some(key) = once {
                    let ids: Vec<TaskId> = accepted.iter().map(|(id, _)| *id).collect();
                    self.remember_request(key, bounds::REQUEST_MS, &ids);
                }
                self.answer_after_commit(request, Answer::Accepted(accepted), effects);
            }
            Err(refusal) => effects.push(Effect::Answer { request, answer: Err(refusal) }),
        }
    }

    /// Checks all of a request before any of it changes something.
    fn may_accept(&self, queue: &QueueName, tasks: &[NewTask]) -> Result<(), Refusal> {
        if tasks.is_empty() {
            return Err(Refusal::invalid("tasks", "is empty; give at least one task"));
        }
        if tasks.len() > bounds::TASKS_PER_ENQUEUE {
            let (is, most) = (tasks.len(), bounds::TASKS_PER_ENQUEUE);
            return Err(Refusal::too_large(
                "tasks",
                format!("has {is} tasks; send at most {most} in one call"),
            ));
        }
        let classes = self.names.get(queue).map_or(&*self.defaults.classes, |id| self.classes_of(*id));
        let mut bytes = 0;
        for (n, task) in tasks.iter().enumerate() {
            let checked = task.check(task.payload.len()).and_then(|()| self.may_start_then(task));
            let checked = checked.and_then(|()| self.class_among(classes, task.max_duration_ms).map(drop));
            checked.map_err(|refusal| refusal.within(format_args!("tasks[{n}]")))?;
            bytes += task.input_bytes();
        }
        if bytes > bounds::PAYLOAD_BYTES_PER_ENQUEUE {
            let most = bounds::PAYLOAD_BYTES_PER_ENQUEUE;
            return Err(Refusal::too_large(
                "tasks",
                format!("has {bytes} bytes of payloads and files; send at most {most} in one call"),
            ));
        }
        self.has_room_for_queue(queue)?;
        self.has_room_for_tasks(queue, tasks)
    }

    /// Whether the times that a task asks for make sense now.
    fn may_start_then(&self, task: &NewTask) -> Result<(), Refusal> {
        if let Start::At(at) = task.start
            && at > self.now.plus(bounds::DELAY_MS)
        {
            return Err(Refusal::invalid("run_at_ms", "is more than 10 years away"));
        }
        let wait_ms = self.start_of(task.start).map_or(0, |due| due.0.saturating_sub(self.now.0));
        if task.expires_ms > 0 && wait_ms >= task.expires_ms {
            let text = format!("{} is over before the task may start, in {wait_ms} ms", task.expires_ms);
            return Err(Refusal::invalid("expires_ms", text));
        }
        Ok(())
    }

    /// When a task is due, if it has to wait for a time.
    fn start_of(&self, start: Start) -> Option<Millis> {
        let due = match start {
            Start::Now => self.now,
            Start::After(ms) => self.now.plus(ms),
            Start::At(at) => at,
        };
        (due > self.now).then_some(due)
    }

    fn has_room_for_names(&self, once: Option<RequestKey>, tasks: &[NewTask]) -> Result<(), Refusal> {
        let new = |task: &&NewTask| task.unique.is_some_and(|unique| self.known_as(unique.key).is_none());
        let unique = tasks.iter().filter(new).count();
        // Unique keys are remembered for long: they must not take the place of request ids.
        let keys_fit = unique == 0 || self.requests.len() + unique <= bounds::REQUESTS / 2;
        if keys_fit && (once.is_none() || self.requests.len() + unique < bounds::REQUESTS) {
            return Ok(());
        }
        let (most, what) = match keys_fit {
            true => (bounds::REQUESTS, "request ids"),
            false => (bounds::REQUESTS / 2, "unique keys"),
        };
        let text = format!("{most} {what} are remembered; send this again later, or without");
        Err(Refusal::limited(text).after(bounds::REQUESTS_AFTER_MS))
    }

    /// What was accepted under this name, if that still counts.
    fn known_as(&self, key: RequestKey) -> Option<&RequestRecord> {
        self.requests.get(&key).filter(|record| record.until > self.now)
    }

    fn remember_request(&mut self, key: RequestKey, window_ms: u64, ids: &[TaskId]) {
        let record = RequestRecord { until: self.now.plus(window_ms), ids: RequestIds::of(ids) };
        self.requests_by_age.insert((record.until, key));
        if let Some(old) = self.requests.insert(key, record.clone()) {
            self.requests_by_age.remove(&(old.until, key));
        }
        self.batch.changes.push(Change::Request { key, record: Some(record) });
        self.arm_requests();
    }

    /// Sees to it that the oldest name is forgotten in time.
    pub(super) fn arm_requests(&mut self) {
        let Some(&(until, _)) = self.requests_by_age.first() else { return };
        let due = until.max(self.now.plus(bounds::REQUESTS_AFTER_MS));
        if self.requests_armed.is_none_or(|armed| due < armed) {
            self.requests_armed = Some(due);
            self.arm(due, Alarm::ForgetRequests);
        }
    }

    pub(super) fn on_requests_timer(&mut self) {
        self.requests_armed = None;
        for _ in 0..bounds::REQUESTS_PER_STEP {
            let old = self.requests_by_age.first().filter(|(until, _)| *until <= self.now);
            let Some(&(until, key)) = old else { break };
            self.requests_by_age.remove(&(until, key));
            self.requests.remove(&key);
            self.batch.changes.push(Change::Request { key, record: None });
        }
        self.arm_requests();
    }

    pub(super) fn has_room_for_queue(&self, queue: &QueueName) -> Result<(), Refusal> {
        if self.names.contains_key(queue) || self.queues.len() < bounds::QUEUES {
            return Ok(());
        }
        Err(Refusal::invalid(
            "queue",
            format!("would be one more than {}; use an existing one", bounds::QUEUES),
        ))
    }

    pub(super) fn has_room_for_tasks(&self, queue: &QueueName, tasks: &[NewTask]) -> Result<(), Refusal> {
        self.store_keeps_up(tasks.len())?;
        if self.next_seq + tasks.len() as u64 > Level::LAST_NEW_SEQ {
            return Err(Refusal::limited("this shard has numbered all the tasks it can; move the queue"));
        }
        let Some(id) = self.names.get(queue) else { return Ok(()) };
        let cost = |task: &NewTask| task.cost.max(Cost::of_ms(task.expected_ms));
        let spans = tasks.iter().fold(VTime::ZERO, |sum, t| sum + VTime::charge(cost(t), Weight::MIN));
        for ix in self.queues[id.0 as usize].lanes.values() {
            let lane = &self.lanes[ix.0];
            if lane.places.top().max(lane.ack().time()) + spans > VTime::LAST {
                return Err(Refusal::limited("this queue's virtual time is used up; use another queue"));
            }
            let keys = lane.places.keys().len() + tasks.len();
            if lane.places.rows() + tasks.len() as u64 > bounds::ROWS_PER_LANE || keys > bounds::KEYS_PER_LANE
            {
                return Err(Refusal::limited(
                    "this queue holds all the tasks it can; wait until some have ended",
                ));
            }
        }
        Ok(())
    }

    /// Answers "limited" while the store is so far behind that memory would grow.
    pub(super) fn store_keeps_up(&self, more: usize) -> Result<(), Refusal> {
        if !self.room {
            return Err(Refusal::limited(
                "the store has no room for new tasks; send this again when space has been made",
            )
            .after(1_000));
        }
        let in_flight: usize =
            self.batch.size() + self.sealed.iter().map(|batch| batch.size()).sum::<usize>();
        if in_flight + more > self.bounds.tasks_in_flight.max(more) {
            return Err(Refusal::limited("the store is behind; send this again in a moment"));
        }
        Ok(())
    }

    /// Places the tasks and has them saved. Nothing can fail here.
    fn accept(&mut self, name: &QueueName, tasks: Vec<NewTask>) -> Vec<(TaskId, bool)> {
        let queue = self.queue_named(name);
        let mut accepted = Vec::with_capacity(tasks.len());
        let mut attached = Vec::new();
        for new in tasks {
            let (attach_ms, next) = (new.attach_ms, TaskId(self.next_seq));
            attached.extend((attach_ms > 0).then_some((next, attach_ms)));
            let Some(unique) = new.unique else {
                accepted.push((self.accept_one(queue, new, None), true));
                continue;
            };
            let known = self.known_as(unique.key).and_then(|record| record.ids.to_vec().first().copied());
            if let Some(id) = known {
                attached.pop_if(|(id, _)| *id == next);
                accepted.push((id, false));
                continue;
            }
            let id = self.accept_one(queue, new, None);
            self.remember_request(unique.key, unique.window_ms, &[id]);
            accepted.push((id, true));
        }
        // After all of them, so that their ids follow each other.
        for (id, attach_ms) in attached {
            self.set_timer(self.now.plus(attach_ms), id, Timed::Detach);
        }
        accepted
    }

    /// Places a task, in its lane or among the timers, and has it saved.
    pub(super) fn accept_one(&mut self, queue: QueueId, new: NewTask, replay_of: Option<TaskId>) -> TaskId {
        let over = self.queues[queue.0 as usize].overrides.get(&new.key).and_then(|over| over.weight);
        let max_attempts = new.max_attempts.unwrap_or(self.settings_of(queue).max_attempts);
        let expires = (new.expires_ms > 0).then(|| self.now.plus(new.expires_ms));
        let NewTask { backoff, attach_ms, expected_ms, max_duration_ms, .. } = new;
        let terms = Terms { backoff, expires, attach_ms, expected_ms, max_duration_ms };
        let weight = over.unwrap_or(new.weight);
        let class = self.needs(queue, max_duration_ms) as u8;
        let lane_id = LaneId { queue, priority: new.priority, class: Class(class) };
        let ix = self.lane(lane_id);
        let id = TaskId(self.next_seq);
        self.next_seq += 1;
        let mut task = Task {
            id,
            lane: lane_id,
            place: Place::Over,
            key: new.key,
            // What it asks for. It is not charged before it has a place.
            charge: Charge { cost: new.cost, weight: new.weight, chained: false, timed: false },
            attempt: 1,
            max_attempts,
            lost: 0,
            terms: (terms != Terms::default()).then(|| Arc::new(terms)),
            replay_of,
            accepted: self.now,
            content_type: new.content_type,
            payload: new.payload,
            files: new.files,
        };
        if let Some(due) = self.start_of(new.start) {
            let row = self.schedule(due, lane_id, task.row_at(Level::ZERO), id.0);
            task.place = Place::Timer(row.level);
        } else if self.is_parked(lane_id, &task.key) {
            let places = &mut self.lanes[ix.0].places;
            if let Some(key) = places.keys().find(&task.key) {
                places.set_weight(key, Some(new.weight), over);
            }
            let row = self.shelve(lane_id, task.row_at(Level::ZERO), id.0, Part::Last);
            task.place = Place::Parked(row.level);
        } else {
            let commit = self.batch.id;
            let places = &mut self.lanes[ix.0].places;
            let key = places.key(&task.key, weight);
            places.set_weight(key, Some(new.weight), over);
            let (cost, timed) = self.cost_of(ix, key, new.cost, task.terms.as_deref());
            let mut at_least = self.lanes[ix.0].ack();
            if self.canary.is(Bug::ClassesShareTime) {
                let times = self.queues[queue.0 as usize].lanes.values();
                at_least = times.map(|ix| self.lanes[ix.0].places.vtime().pass()).fold(at_least, Pass::max);
            }
            let lane = &mut self.lanes[ix.0];
            let (pass, charge) = lane.places.place(key, cost, at_least);
            let level = Level::new(pass, id.0);
            lane.chosen(level, commit);
            (task.place, task.charge) = (Place::Lane(level), Charge { timed, ..charge });
            self.batch.rows.push((ix, level, Entry::of(&task.row_at(level), key)));
        }
        if !matches!(task.place, Place::Timer(_)) && !self.key_is_paused(queue, &task.key) {
            let (payload, content_type) = (task.payload.clone(), task.content_type.clone());
            let work = Work { payload, content_type, files: task.files.clone() };
            self.payloads.keep(id, work, self.bounds.payload_bytes);
        }
        self.batch.changes.push(Change::Accepted(task));
        self.task_changed(id);
        self.dirty_lanes.insert(ix);
        self.queues[queue.0 as usize].record.totals.accepted += 1;
        self.dirty_queues.insert(queue);
        if let Some(expires) = expires {
            self.set_expiry(expires, id);
        }
        id
    }
}
