//! What people see of a shard: its tasks, queues, keys, workers and gate, at one moment.

use std::collections::HashMap;

use evenhand_api::{convert, v1};
use evenhand_core::Task;
use evenhand_core::change::Share;
use evenhand_core::explain::{Hold, Standing};
use evenhand_core::names::{Key, QueueId, QueueName, Seat};
use evenhand_core::owner::health::Health;
use evenhand_core::owner::{GateView, MemberView};
use evenhand_core::shard::KeyHold;
use evenhand_store::Store;

use super::{Owned, SHARD};
use crate::mailbox::{Explained, QueueView, RunTime, View};

/// Waiting tasks whose keys are shown as those that go next.
const NEXT_KEYS: usize = 1_000;
/// Workers that are named where many are waited for.
const SEATS_NAMED: usize = 5;

/// What a gate that is shut waits for, for people.
pub(super) fn gate_text(gate: &GateView) -> String {
    let named: Vec<&str> = gate.absent.iter().take(SEATS_NAMED).map(Seat::as_str).collect();
    let more = if gate.absent.len() > named.len() { ", …" } else { "" };
    let named = format!("{}{more}", named.join(", "));
    let absent = format!("{} of {} workers", gate.absent.len(), gate.members);
    let at_most = format!("at most {} s", gate.opens_in_ms.div_ceil(1000));
    match (gate.in_doubt, gate.absent.is_empty()) {
        (false, false) => format!("waiting for {absent}: {named}, {at_most}"),
        // The last server stopped in good order, and that is being noted.
        (false, true) => "a moment: what the last server saved is being taken over".into(),
        (true, true) => format!("{IN_DOUBT}, {at_most}"),
        (true, false) => {
            let are = if gate.absent.len() == 1 { "is" } else { "are" };
            format!("{IN_DOUBT}, {at_most}; {absent} {are} absent: {named}")
        }
    }
}

const IN_DOUBT: &str = "the store may be an old copy: waiting until all workers agree that nobody is missing";

impl<S: Store + Clone + 'static> Owned<'_, S> {
    /// How tasks stand that the store has.
    pub(super) fn explain(&self, tasks: Vec<Task>) -> Vec<Explained> {
        let standings = self.owner.shard().explain_all(self.shell.clock.now(), &tasks);
        let gate = self.owner.gate();
        let gate = (!gate.open).then(|| format!("{}: {}", Hold::GateShut, gate_text(&gate)));
        let mut idle: HashMap<QueueId, Option<String>> = HashMap::new();
        // Of some rules more can be said than the shard knows.
        let mut say = |queue: QueueId, hold: &Hold| {
            let more = match hold {
                Hold::GateShut => gate.clone(),
                Hold::NoWorker => idle.entry(queue).or_insert_with(|| self.idle(queue)).clone(),
                Hold::Paused
                | Hold::Key { .. }
                | Hold::QueueRate { .. }
                | Hold::ClassFull { .. }
                | Hold::NoFreeSlot { .. }
                | Hold::HigherPriority { .. }
                | Hold::OtherKeys { .. }
                | Hold::OwnKey { .. }
                | Hold::Reading
                | Hold::Writing => None,
            };
            let said = convert::hold(SHARD, hold);
            v1::Hold { message: more.unwrap_or(said.message), ..said }
        };
        let mut explain = |(task, standing): (Task, Standing)| {
            let (mut seat, mut holds, mut time) = (None, Vec::new(), RunTime::default());
            match &standing {
                Standing::Running { worker, .. } => {
                    seat = self.owner.seat(*worker).cloned();
                    time = self.owner.shard().run(task.id).map(|run| self.time_of(run)).unwrap_or_default();
                }
                Standing::Waiting { holds: all, .. } => {
                    holds = all.iter().map(|hold| say(task.lane.queue, hold)).collect();
                }
                Standing::Scheduled { .. } | Standing::Over | Standing::Gone => {}
            }
            let progress = self.progress.get(&task.id).map(|(_, progress)| progress.clone());
            Explained { queue: self.queue_name(task.lane.queue), task, standing, seat, progress, holds, time }
        };
        tasks.into_iter().zip(standings).map(&mut explain).collect()
    }

    /// Why the workers that serve a queue take none of its tasks; None, if there are none.
    fn idle(&self, queue: QueueId) -> Option<String> {
        let name = self.owner.shard().queue_name(queue)?;
        let mut serving =
            self.owner.members().filter(|member| member.queues.iter().any(|(served, _)| served == name));
        let first = serving.next()?;
        Some(match serving.count() {
            0 => {
                let why = first.why_not.as_deref().unwrap_or("it offers no slots");
                format!("the only worker of its queue, {}, gets no work: {why}", first.seat)
            }
            more => format!("none of the {} workers of its queue gets work", more + 1),
        })
    }

    pub(super) fn view(&self) -> View {
        let shard = self.owner.shard();
        let gate = self.owner.gate();
        let queues: Vec<QueueView> = shard.queue_names().filter_map(|name| self.queue(name, 0)).collect();
        let (slots_held, runs_alive) = shard.slots_and_runs();
        let held = shard.held();
        let shut = !gate.open;
        View {
            shard: v1::Shard {
                id: SHARD.0,
                epoch: shard.epoch().0,
                open: gate.open,
                waits_for: if shut { gate_text(&gate) } else { String::new() },
                absent_seats: gate.absent.iter().map(|seat| seat.as_str().into()).collect(),
                opens_in_ms: shut.then_some(gate.opens_in_ms),
                waiting: queues.iter().map(|view| view.queue.waiting).sum(),
                running: runs_alive,
                workers: gate.members as u32,
                room: self.room,
                in_doubt: gate.in_doubt,
            },
            store_id: self.owner.store().0,
            queues,
            workers: self.owner.members().map(|member| self.worker(&member, gate.open)).collect(),
            started: self.shell.starts.queues(),
            busiest: self.shell.starts.busiest(),
            slots_held,
            runs_alive,
            payload_bytes: held.payload_bytes,
            window_rows: held.rows,
            timers: held.timers,
            keys: held.keys,
            looks: shard.looks(),
            worker_set: self.owner.worker_set().version,
        }
    }

    /// A queue, and so many of its keys: those that start most, and those that go next.
    pub(super) fn queue(&self, name: &QueueName, keys: usize) -> Option<QueueView> {
        let shard = self.owner.shard();
        let (id, counts) = (shard.queue_id(name)?, shard.counts(name)?);
        let settings = shard.settings(name);
        let held = match settings.settings.share {
            Share::Time if keys > 0 => Some(self.held(id)),
            Share::Time | Share::Tasks => None,
        };
        let mut seen: Vec<Key> = Vec::new();
        if keys > 0 {
            seen.extend(self.shell.starts.keys_of(id).cloned());
            seen.extend(shard.next_keys(name, NEXT_KEYS).cloned());
            seen.extend(held.iter().flat_map(HashMap::keys).copied().cloned());
            seen.sort_unstable();
            seen.dedup();
        }
        // Of what it shares: starts, or time.
        let got = |key: Option<&Key>| match (&held, key) {
            (None, _) => self.shell.starts.lately(id, key),
            (Some(held), None) => self.shell.starts.took_lately(id, None) + held.values().sum::<u64>(),
            (Some(held), Some(of)) => {
                self.shell.starts.took_lately(id, key) + held.get(of).copied().unwrap_or(0)
            }
        };
        let all = got(None);
        let key = |key: Key| {
            let counts = shard.key_counts(name, &key);
            let share_due = shard.share_due(name, &key);
            let started = self.shell.starts.lately(id, Some(&key));
            v1::QueueKey {
                key: key.as_str().into(),
                weight_thousandths: counts.weight.thousandths(),
                waiting: counts.waiting,
                running: counts.running,
                started,
                share: if all == 0 { 0.0 } else { got(Some(&key)) as f64 / all as f64 },
                share_due,
                paused: shard.is_paused(name, &key),
                limit: shard.key_limit(id, &key),
                rate: shard.key_rate(id, &key).map(convert::rate),
                held: match shard.key_hold(id, &key) {
                    Some(KeyHold::Paused) => "paused".into(),
                    Some(KeyHold::AtLimit { .. }) => "limit".into(),
                    Some(KeyHold::AtRate { .. }) => "rate".into(),
                    None => String::new(),
                },
            }
        };
        let mut found: Vec<v1::QueueKey> = seen.into_iter().map(key).collect();
        let counts_for = |key: &v1::QueueKey| key.started + key.waiting + key.running;
        found.retain(|key| counts_for(key) > 0 || key.share > 0.0);
        found.sort_by(|a, b| {
            let order = b.share.total_cmp(&a.share).then(b.waiting.cmp(&a.waiting));
            order.then_with(|| a.key.cmp(&b.key))
        });
        found.truncate(keys);
        Some(QueueView {
            id,
            queue: v1::Queue {
                name: name.as_str().into(),
                waiting: counts.waiting,
                running: counts.running,
                accepted: counts.totals.accepted,
                succeeded: counts.totals.succeeded,
                failed: counts.totals.failed,
                canceled: counts.totals.canceled,
                oldest_waiting_ms: None,
                scheduled: counts.scheduled,
                expired: counts.totals.expired,
                paused: settings.settings.paused,
                r#loop: shard.loop_state(name).name().into(),
                classes: shard.classes(name).iter().map(convert::queue_class).collect(),
                interactive: counts.interactive,
            },
            settings,
            held_keys: shard.held_keys(name),
            first: shard.first_waiting(name).collect(),
            keys: found,
        })
    }

    /// How long the runs of a queue's keys have held their slots of late, those that go on.
    fn held(&self, queue: QueueId) -> HashMap<&Key, u64> {
        let (shard, now) = (self.owner.shard(), self.shell.clock.now());
        let mut held: HashMap<&Key, u64> = HashMap::new();
        for run in shard.runs_in(queue) {
            let ms = now.0.saturating_sub(run.started.0);
            *held.entry(&run.key).or_default() += self.shell.starts.of_late(ms, now);
        }
        held
    }

    fn worker(&self, member: &MemberView<'_>, gate_open: bool) -> v1::Worker {
        let link = member.session.and_then(|session| self.links.get(&session));
        let health = match member.health {
            None => "absent",
            Some(silent @ (Health::Unhealthy | Health::MustDie)) => silent.name(),
            Some(Health::New | Health::Healthy) if member.draining || member.slots == 0 => "draining",
            // It is heard, but not all others know of it yet.
            Some(Health::Healthy) if gate_open && !member.required => Health::New.name(),
            Some(heard @ (Health::New | Health::Healthy)) => heard.name(),
        };
        let mut why_not: String = member.why_not.as_deref().unwrap_or_default().into();
        if member.draining && member.session.is_none() {
            why_not.push_str("; it is told to drain when it is back");
        }
        v1::Worker {
            seat: member.seat.as_str().into(),
            process_life: member.life.process,
            rejoin: member.life.rejoin,
            health: health.into(),
            slots: member.slots,
            running: member.running,
            queues: convert::served(member.queues),
            heard_ms_ago: member.health.map(|_| member.silent_ms),
            lost_in_ms: member.lost_in_ms,
            why_not,
            address: link.map_or_else(String::new, |link| link.address.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_that_is_shut_says_whom_it_waits_for_and_for_how_long() {
        let seat = |n: &usize| Seat::new(&format!("gpu-{n}")).unwrap();
        let text = |absent: &[usize], in_doubt| {
            let absent = absent.iter().map(seat).collect();
            gate_text(&GateView { open: false, absent, opens_in_ms: 40_001, in_doubt, members: 40 })
        };
        assert_eq!(text(&[7, 9], false), "waiting for 2 of 40 workers: gpu-7, gpu-9, at most 41 s");
        assert_eq!(
            text(&[1, 2, 3, 4, 5, 6], false),
            "waiting for 6 of 40 workers: gpu-1, gpu-2, gpu-3, gpu-4, gpu-5, …, at most 41 s"
        );
        assert_eq!(
            text(&[], true),
            "the store may be an old copy: waiting until all workers agree that nobody is missing, at most 41 s"
        );
        assert_eq!(
            text(&[7], true),
            "the store may be an old copy: waiting until all workers agree that nobody is missing, at most 41 s; \
             1 of 40 workers is absent: gpu-7"
        );
    }
}
