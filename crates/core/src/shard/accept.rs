//! Taking tasks in: validation, places, and the change that makes them durable.

use super::{Shard, Timer};
use crate::backlog::{Entry, Level, VTime, Weight};
use crate::bounds;
use crate::change::{Change, RequestRecord, Task};
use crate::messages::{Answer, Effect, NewTask, Work};
use crate::names::{Key, LaneId, QueueName, RequestId, RequestKey, TaskId};
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
        if let Some(known) = once.and_then(|key| self.requests.get(&key)) {
            // It may have come while the first one's commit is on its way: that one has to be durable.
            let before = Answer::AcceptedBefore(known.ids());
            return self.answer_after_commit(request, before, effects);
        }
        match self.may_accept(&queue, &tasks).and_then(|()| self.has_room_for_request(once)) {
            Ok(()) => {
                let ids = self.accept(&queue, tasks);
                if let (Some(key), Some(&first)) = (once, ids.first()) {
                    self.remember_request(key, first, ids.len());
                }
                self.answer_after_commit(request, Answer::Accepted(ids), effects);
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
        let mut bytes = 0;
        for (n, task) in tasks.iter().enumerate() {
            task.check(task.payload.len()).map_err(|refusal| refusal.within(format_args!("tasks[{n}]")))?;
            bytes += task.payload.len();
        }
        if bytes > bounds::PAYLOAD_BYTES_PER_ENQUEUE {
            let most = bounds::PAYLOAD_BYTES_PER_ENQUEUE;
            return Err(Refusal::too_large(
                "tasks",
                format!("has {bytes} bytes of payload; send at most {most} in one call"),
            ));
        }
        self.has_room_for_queue(queue)?;
        self.has_room_for_tasks(queue, tasks)
    }

    fn has_room_for_request(&self, once: Option<RequestKey>) -> Result<(), Refusal> {
        if once.is_none() || self.requests.len() < bounds::REQUESTS {
            return Ok(());
        }
        let (most, minutes) = (bounds::REQUESTS, bounds::REQUEST_MS / 60_000);
        Err(Refusal::limited(format!(
            "{most} request ids are remembered, each for {minutes} minutes; send more tasks with each"
        ))
        .after(bounds::REQUESTS_AFTER_MS))
    }

    fn remember_request(&mut self, key: RequestKey, first: TaskId, tasks: usize) {
        let record = RequestRecord { at: self.now, first, tasks: tasks as u32 };
        self.requests.insert(key, record);
        self.requests_by_age.push_back((self.now, key));
        self.batch.changes.push(Change::Request { key, record: Some(record) });
        self.arm_requests();
    }

    /// Sees to it that the oldest request is forgotten in time.
    pub(super) fn arm_requests(&mut self) {
        if let Some(&(at, _)) = self.requests_by_age.front()
            && !self.requests_armed
        {
            self.requests_armed = true;
            let due = at.plus(bounds::REQUEST_MS).max(self.now.plus(bounds::REQUESTS_AFTER_MS));
            self.arm(due, Timer::ForgetRequests);
        }
    }

    pub(super) fn on_requests_timer(&mut self) {
        self.requests_armed = false;
        for _ in 0..bounds::REQUESTS_PER_STEP {
            let old = self.requests_by_age.front().filter(|(at, _)| at.plus(bounds::REQUEST_MS) <= self.now);
            let Some(&(_, key)) = old else { break };
            self.requests_by_age.pop_front();
            self.requests.remove(&key);
            self.batch.changes.push(Change::Request { key, record: None });
        }
        self.arm_requests();
    }

    fn has_room_for_queue(&self, queue: &QueueName) -> Result<(), Refusal> {
        if self.names.contains_key(queue) || self.queues.len() < bounds::QUEUES {
            return Ok(());
        }
        Err(Refusal::invalid(
            "queue",
            format!("would be one more than {}; use an existing one", bounds::QUEUES),
        ))
    }

    fn has_room_for_tasks(&self, queue: &QueueName, tasks: &[NewTask]) -> Result<(), Refusal> {
        self.store_keeps_up(tasks.len())?;
        if self.next_seq + tasks.len() as u64 > Level::LAST_NEW_SEQ {
            return Err(Refusal::limited("this shard has numbered all the tasks it can; move the queue"));
        }
        let Some(id) = self.names.get(queue) else { return Ok(()) };
        let spans = tasks.iter().fold(VTime::ZERO, |sum, t| sum + VTime::charge(t.cost, Weight::MIN));
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
    fn store_keeps_up(&self, more: usize) -> Result<(), Refusal> {
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
    fn accept(&mut self, name: &QueueName, tasks: Vec<NewTask>) -> Vec<TaskId> {
        let queue = self.queue_named(name);
        let mut ids = Vec::with_capacity(tasks.len());
        for new in tasks {
            let over = self.queues[queue.0 as usize].overrides.get(&new.key).copied();
            let weight = over.unwrap_or(new.weight);
            let ix = self.lane(LaneId { queue, priority: new.priority, class: new.class });
            let seq = self.next_seq;
            self.next_seq += 1;
            let commit = self.batch.id;
            let lane = &mut self.lanes[ix.0];
            let key = lane.places.key(&new.key, weight);
            lane.places.set_weight(key, Some(new.weight), over);
            let (pass, charge) = lane.places.place(key, new.cost, lane.ack());
            let level = Level::new(pass, seq);
            lane.chosen(level, commit);
            let id = TaskId(seq);
            let (payload, content_type) = (new.payload.clone(), new.content_type.clone());
            let work = Work { payload, content_type, max_duration_ms: new.max_duration_ms };
            self.payloads.keep(id, work, self.bounds.payload_bytes);
            let entry = Entry { task: id, key, charge, attempt: 1, max_attempts: new.max_attempts };
            self.batch.rows.push((ix, level, entry));
            self.batch.changes.push(Change::Accepted(Task {
                id,
                lane: lane.id,
                level: Some(level),
                key: new.key,
                charge,
                attempt: 1,
                max_attempts: new.max_attempts,
                accepted: self.now,
                max_duration_ms: new.max_duration_ms,
                content_type: new.content_type,
                payload: new.payload,
            }));
            self.dirty_lanes.insert(ix);
            ids.push(id);
        }
        self.queues[queue.0 as usize].record.totals.accepted += ids.len() as u64;
        self.dirty_queues.insert(queue);
        ids
    }

    fn may_set_weight(&self, queue: &QueueName, key: &Key) -> Result<(), Refusal> {
        self.has_room_for_queue(queue)?;
        self.store_keeps_up(1)?;
        let known = self.names.get(queue).map(|id| &self.queues[id.0 as usize].overrides);
        if known.is_some_and(|known| known.len() >= bounds::OVERRIDES_PER_QUEUE && !known.contains_key(key)) {
            let most = bounds::OVERRIDES_PER_QUEUE;
            return Err(Refusal::invalid(
                "key",
                format!("would be one more override than {most}; remove others"),
            ));
        }
        Ok(())
    }

    pub(super) fn on_set_weight(
        &mut self,
        request: RequestId,
        queue: QueueName,
        key: Key,
        weight: Option<Weight>,
        effects: &mut Vec<Effect>,
    ) {
        if let Err(refusal) = self.may_set_weight(&queue, &key) {
            effects.push(Effect::Answer { request, answer: Err(refusal) });
            return;
        }
        let id = self.queue_named(&queue);
        let queue = &mut self.queues[id.0 as usize];
        match weight {
            Some(weight) => queue.overrides.insert(key.clone(), weight),
            None => queue.overrides.remove(&key),
        };
        for ix in queue.lanes.values() {
            let places = &mut self.lanes[ix.0].places;
            if let Some(key) = places.keys().find(&key) {
                places.set_weight(key, None, weight);
                self.dirty_lanes.insert(*ix);
            }
        }
        self.batch.changes.push(Change::Override { queue: id, key, weight });
        self.answer_after_commit(request, Answer::WeightSet, effects);
    }
}
