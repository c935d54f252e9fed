//! Clients: they enqueue, cancel, change weights, and say the same again when they named what they asked for,
//! to whoever they take for the owner.

use evenhand_core::backlog::Cost;
use evenhand_core::change::{Settings, Share};
use evenhand_core::messages::{Input, InteractiveAsk, KeyChange, Start, Unique};
use evenhand_core::names::{Key, Millis, Priority, QueueName, RequestId, RequestKey, TaskId};
use evenhand_core::{NewTask, Refusal, bounds};

use super::clock::ms;
use super::{Event, World, queue_name, weight};
use crate::oracle::named_payload;
use crate::plan::Arrivals;

/// A request that its caller named.
#[derive(Clone, Debug)]
pub(super) struct Named {
    key: RequestKey,
    queue: QueueName,
    tasks: Vec<NewTask>,
}

impl World {
    pub(super) fn clients_act(&mut self) -> Result<(), String> {
        if self.actions_left == 0 {
            return Ok(());
        }
        self.actions_left -= 1;
        let mean = ms(self.plan.span_ms) / self.plan.actions.max(1);
        let pause = match self.plan.arrivals {
            Arrivals::Bursts => *self.rng.pick(&[0, 0, 0, 4 * mean]),
            Arrivals::Steady | Arrivals::Zipf | Arrivals::Giant | Arrivals::OneShot | Arrivals::Canceled => {
                self.rng.below(2 * mean)
            }
        };
        self.at(pause, Event::ClientsAct);
        // Most requests reach the owner; some reach one that only believes it is.
        let mistaken = self.rng.chance(100);
        let zombie = self.owners.len().checked_sub(2).filter(|_| mistaken);
        let Some(owner) = zombie.or(self.current) else { return Ok(()) };
        let input = self.request().map_err(|refusal| refusal.to_string())?;
        self.soon(Event::ToOwner(owner, input));
        if self.plan.arrivals == Arrivals::Canceled && self.rng.chance(300) {
            self.cancel_many(owner);
        }
        Ok(())
    }

    fn next_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    fn request(&mut self) -> Result<Input, Refusal> {
        let request = self.next_request();
        let queue = queue_name(self.rng.below(self.plan.queues));
        match self.rng.below(100) {
            0..=4 => {
                let key = self.key()?;
                let mut change = KeyChange::default();
                match self.rng.below(3) {
                    0 => {
                        change.weight =
                            Some(self.rng.chance(700).then(|| weight(self.rng.range(1, 1_000_000))))
                    }
                    1 => change.limit = Some(self.rng.chance(500).then(|| self.rng.range(1, 3) as u32)),
                    _ => change.rate = Some(self.plan.queue.key_rate.filter(|_| self.rng.chance(500))),
                }
                Ok(Input::SetKey { request, queue, key, change })
            }
            46..=49 if !self.tasks_seen.is_empty() => {
                let task = *self.rng.pick(&self.tasks_seen);
                let max_duration_ms = self.rng.range(1, 2 * self.plan.run_ms.max(2));
                Ok(Input::Shorten { request, task, max_duration_ms })
            }
            _ if self.rng.chance(self.plan.interactive) => {
                let max_duration_ms = *self.rng.pick(&[0, self.plan.run_ms]);
                let ask = InteractiveAsk { key: self.key()?, max_duration_ms };
                Ok(Input::Interactive { request, queue, ask })
            }
            5..=14 if !self.tasks_seen.is_empty() => {
                let task = *self.rng.pick(&self.tasks_seen);
                self.cancels.insert(request, task);
                Ok(Input::Cancel { request, task })
            }
            31..=34 if !self.tasks_seen.is_empty() && self.plan.queue.retention_ms > 0 => {
                Ok(Input::Replay { request, task: *self.rng.pick(&self.tasks_seen) })
            }
            35..=37 if self.plan.timed > 0 => {
                let paused = self.rng.chance(500);
                let share = *self.rng.pick(&[self.plan.queue.share, Share::Tasks, Share::Time]);
                let mut settings = Settings { paused, share, ..self.plan.queue.clone() };
                if self.rng.chance(300) {
                    settings.classes.truncate(self.rng.below(3) as usize);
                    settings.key_limit = self.rng.chance(500).then(|| self.rng.range(1, 3) as u32);
                    for rate in [&mut settings.rate, &mut settings.key_rate].into_iter().flatten() {
                        rate.per_second *= *self.rng.pick(&[1, 1, 10]);
                    }
                }
                let version = self.rng.chance(300).then(|| self.rng.below(3));
                Ok(Input::Configure { request, queue, settings, version })
            }
            41..=45 if self.plan.timed > 0 => {
                let (key, paused) = (self.key()?, self.rng.chance(500));
                Ok(Input::PauseKey { request, queue, key, paused })
            }
            38..=40 if !self.tasks_seen.is_empty() => {
                Ok(Input::Watched { task: *self.rng.pick(&self.tasks_seen), now: self.rng.chance(500) })
            }
            15..=30 if !self.named.is_empty() => {
                let Named { key, queue, tasks } = self.rng.pick(&self.named).clone();
                self.keys_of_requests.insert(request, key);
                Ok(Input::Enqueue { request, queue, tasks, once: Some(key) })
            }
            _ => {
                let tasks = match self.plan.arrivals {
                    Arrivals::Steady | Arrivals::Zipf => self.rng.range(1, 4),
                    Arrivals::Bursts | Arrivals::OneShot => self.rng.range(1, 12),
                    Arrivals::Giant => self.rng.range(1, 8),
                    Arrivals::Canceled => self.rng.range(5, 40),
                };
                let tasks: Result<Vec<NewTask>, Refusal> = (0..tasks).map(|_| self.task()).collect();
                let mut tasks = tasks?;
                if self.rng.chance(self.plan.timed)
                    && let Some(unique) = tasks.first_mut()
                {
                    self.unique(&queue, unique);
                    tasks.truncate(1);
                    return Ok(Input::Enqueue { request, queue, tasks, once: None });
                }
                let once = self.rng.chance(self.plan.named).then(|| {
                    let key = RequestKey(u128::from(request.0));
                    tasks.iter_mut().for_each(|task| task.payload = named_payload(key).into());
                    self.oracle.names(key, tasks.len());
                    self.keys_of_requests.insert(request, key);
                    self.named.push(Named { key, queue: queue.clone(), tasks: tasks.clone() });
                    key
                });
                Ok(Input::Enqueue { request, queue, tasks, once })
            }
        }
    }

    /// A caller reads that its tasks are accepted.
    pub(super) fn told_accepted(&mut self, request: RequestId, tasks: &[TaskId]) -> Result<(), String> {
        self.oracle.told_accepted(tasks)?;
        match self.keys_of_requests.get(&request) {
            Some(&key) => self.oracle.told_named(key, tasks),
            None => Ok(()),
        }
    }

    fn cancel_many(&mut self, owner: usize) {
        let some = self.tasks_seen.len().saturating_sub(60);
        let spare = self.rng.range(2, 10);
        let tasks: Vec<TaskId> = self.tasks_seen[some..].to_vec();
        for task in tasks {
            if task.0 % spare != 0 {
                let request = self.next_request();
                self.cancels.insert(request, task);
                self.soon(Event::ToOwner(owner, Input::Cancel { request, task }));
            }
        }
    }

    fn key(&mut self) -> Result<Key, Refusal> {
        let n = match self.plan.arrivals {
            Arrivals::Giant if self.rng.chance(900) => 0,
            Arrivals::Zipf => self.rng.zipf(self.plan.keys),
            Arrivals::OneShot => {
                self.next_key += 1;
                self.plan.keys + self.next_key
            }
            Arrivals::Steady | Arrivals::Bursts | Arrivals::Giant | Arrivals::Canceled => {
                self.rng.below(self.plan.keys)
            }
        };
        Key::new(&format!("k{n}"))
    }

    fn task(&mut self) -> Result<NewTask, Refusal> {
        let mut task = NewTask::new(self.key()?);
        task.weight = weight(*self.rng.pick(&[1, 200, 1000, 1000, 1000, 5000, 1_000_000]));
        task.priority = Priority(self.rng.below(self.plan.priorities) as u8);
        if !self.plan.queue.classes.is_empty() && self.rng.chance(600) {
            task.max_duration_ms = self.rng.pick(&self.plan.queue.classes).duration_ms;
        } else if self.rng.chance(100) {
            task.max_duration_ms = self.rng.range(1, 2 * self.plan.run_ms.max(1));
        }
        task.cost = Cost::new(*self.rng.pick(&[1, 1000, 1000, 1000, 7000]))?;
        task.expected_ms = *self.rng.pick(&[0, 0, 1, self.plan.run_ms, 10 * self.plan.run_ms]);
        task.max_attempts = Some(self.rng.range(1, 4) as u16);
        task.payload = vec![7; self.rng.below(20) as usize].into();
        if self.rng.chance(self.plan.timed) {
            let longest = self.plan.span_ms;
            task.start = match self.rng.below(3) {
                0 => Start::After(self.rng.below(longest)),
                1 => Start::After(self.rng.below(200)),
                // In the past, or not, by whatever clock there is.
                _ => Start::At(Millis(1_000_000 + self.rng.below(longest))),
            };
        }
        if self.rng.chance(self.plan.timed) {
            task.expires_ms = self.rng.range(1, self.plan.span_ms);
        }
        if self.rng.chance(self.plan.timed / 2) {
            task.attach_ms = self.rng.range(bounds::ATTACH_MIN_MS, bounds::ATTACH_MIN_MS + self.plan.span_ms);
        }
        Ok(task)
    }

    /// Makes a task the only one of its kind: one that is new, or one that there was before.
    fn unique(&mut self, queue: &QueueName, task: &mut NewTask) {
        let before: Vec<RequestKey> =
            self.uniques.iter().filter(|(of, _)| of == queue).map(|(_, key)| *key).collect();
        let key = if before.is_empty() || self.rng.chance(400) {
            let key = RequestKey(1 << 100 | self.uniques.len() as u128);
            self.oracle.names(key, 1);
            self.uniques.push((queue.clone(), key));
            key
        } else {
            *self.rng.pick(&before)
        };
        task.payload = named_payload(key).into();
        task.unique = Some(Unique { key, window_ms: bounds::UNIQUE_MS });
    }

    /// In the end nothing is paused.
    pub(super) fn resume_queues(&mut self) -> Result<(), String> {
        let Some(owner) = self.current else { return Ok(()) };
        let shard = self.owners[owner].core.shard();
        let paused = |queue: &&QueueName| shard.settings(queue).settings.paused;
        for queue in shard.queue_names().filter(paused).cloned().collect::<Vec<_>>() {
            let (request, settings) = (self.next_request(), self.plan.queue.clone());
            self.soon(Event::ToOwner(owner, Input::Configure { request, queue, settings, version: None }));
        }
        let shard = self.owners[owner].core.shard();
        let paused: Vec<(QueueName, Key)> =
            shard.paused_keys().map(|(q, k)| (q.clone(), k.clone())).collect();
        for (queue, key) in paused {
            let request = self.next_request();
            self.soon(Event::ToOwner(owner, Input::PauseKey { request, queue, key, paused: false }));
        }
        Ok(())
    }
}
