//! Less time for a task, whether it waits or runs. Never more: whoever wants that asks for another task.
//!
//! A task that waits goes to the lane of its new class, as a new one there; if that is the same lane, it keeps its place.
//! The row of one that runs is set aside, since rows are written once: the next owner finds the new duration there.

use std::sync::Arc;

use super::Shard;
use super::ends::{no_such_task, row_of};
use super::reads::Waiter;
use crate::backlog::{Entry, Level};
use crate::bounds;
use crate::change::{Change, Place, Row, Task};
use crate::life::{State, Terms};
use crate::messages::{Answer, Effect};
use crate::names::{Class, LaneId, RequestId, TaskId};
use crate::refusal::{Kind, Refusal};
use crate::timers::due_at;
use crate::workers::CutWhy;

impl Shard {
    pub(super) fn on_shorten(
        &mut self,
        request: RequestId,
        task: TaskId,
        max_duration_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let waiters = self.task_reads.get(&task).map_or(0, |read| read.waiters());
        let refusal = if !(1..=bounds::DURATION_MS).contains(&max_duration_ms) {
            let text = format!("{max_duration_ms} is out of range; use 1 to {}", bounds::DURATION_MS);
            Refusal::invalid("max_duration_ms", text)
        } else if task.0 >= self.next_seq {
            no_such_task(task)
        } else if self.task_reads.len() >= self.bounds.task_reads || waiters >= bounds::WAITERS_PER_TASK {
            Refusal::limited("too many changes at once; send this again in a moment")
        } else if !self.may_start() {
            Refusal::new(Kind::Unavailable, "", "the start gate is shut: what runs already is not known yet")
                .after(1_000)
        } else {
            return self.read_task_for(task, Waiter::Shorten(request, max_duration_ms), effects);
        };
        effects.push(Effect::Answer { request, answer: Err(refusal) });
    }

    /// The store's word on a task that is to take less time.
    pub(super) fn shorten_known(
        &mut self,
        request: RequestId,
        id: TaskId,
        task: Option<&Task>,
        max_duration_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let answer = match task.map(|task| (task, self.state_of(task))) {
            None | Some((_, State::Unknown)) => Err(no_such_task(id)),
            Some((_, State::Ended)) => Err(Refusal::not_found(format!("task {id} has ended"))),
            Some((task, State::Running { .. })) => self.shorten_run(task, max_duration_ms, effects),
            Some((task, State::Scheduled | State::Queued)) => {
                may_shorten(task.max_duration_ms(), max_duration_ms).map(|changes| {
                    if changes {
                        self.shorten_waiting(task, max_duration_ms);
                    }
                    max_duration_ms
                })
            }
        };
        match answer {
            Ok(ms) => self.answer_after_commit(request, Answer::Shortened(ms), effects),
            Err(refusal) => effects.push(Effect::Answer { request, answer: Err(refusal) }),
        }
    }

    fn shorten_run(
        &mut self,
        task: &Task,
        max_duration_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<u64, Refusal> {
        let Some(live) = self.runs.get(&task.id) else { return Err(no_such_task(task.id)) };
        let (queue, class, default) = (live.run.lane.queue, live.class, live.default);
        if !may_shorten(live.run.max_duration_ms(), max_duration_ms)? {
            return Ok(max_duration_ms);
        }
        let to = self.needs(queue, max_duration_ms).min(class);
        if let Some(holders) = &mut self.queues[queue.0 as usize].holders {
            holders.release(task.id, class, default);
            holders.hold(task.id, to, false);
        }
        let Some(live) = self.runs.get_mut(&task.id) else { return Err(no_such_task(task.id)) };
        (live.class, live.default) = (to, false);
        live.run.terms = Some(shorter(live.run.terms.as_deref(), max_duration_ms));
        let (worker, lane, level, charge) = (live.worker, live.run.lane, live.run.level, live.run.charge);
        let row = row_of(&live.run);
        let in_lane = live.in_lane.take();
        let key = live.run.key.clone();
        let from = in_lane.map_or(Place::Aside, |_| Place::Lane(level));
        if let (Some(at), Some(ix)) = (in_lane, self.lane_of(lane)) {
            *self.aside_runs.entry((queue, key)).or_default() += 1;
            self.lanes[ix.0].settle(level, charge, at);
            self.left_lane(ix);
        }
        self.batch.changes.push(Change::Shortened { from_lane: lane, from, lane, to: Place::Aside, row });
        self.task_changed(task.id);
        self.cease_yielding(worker, task.id);
        self.cut(task.id, max_duration_ms, CutWhy::Shortened, effects);
        self.wake(queue);
        Ok(max_duration_ms)
    }

    fn shorten_waiting(&mut self, task: &Task, max_duration_ms: u64) {
        let terms = Some(shorter(task.terms.as_deref(), max_duration_ms));
        let class = Class(self.needs(task.lane.queue, max_duration_ms) as u8);
        let (from_lane, from) = (task.lane, task.place);
        let lane = LaneId { class, ..from_lane };
        let seq = self.next_seq;
        let row = Row { terms, ..task.row_at(Level::ZERO) };
        let (to, row) = match from {
            Place::Lane(level) if lane == from_lane => {
                self.next_seq += 1;
                let Some(row) = self.replace_row(task, Row { level: Level::new(level.pass(), seq), ..row })
                else {
                    return;
                };
                (Place::Lane(row.level), row)
            }
            Place::Timer(level) => {
                self.next_seq += 1;
                self.unschedule(from_lane, level);
                self.lane(lane);
                let row = self.schedule(due_at(level), lane, row, seq);
                (Place::Timer(row.level), row)
            }
            Place::Lane(_) | Place::Parked(_) => {
                self.withdraw(task, false);
                self.enter_or_shelve(lane, row)
            }
            Place::Aside | Place::Over => return,
        };
        self.batch.changes.push(Change::Shortened { from_lane, from, lane, to, row });
        self.task_changed(task.id);
    }

    /// A waiting row goes to a level just behind its own.
    fn replace_row(&mut self, task: &Task, row: Row) -> Option<Row> {
        let (ix, from) = (self.lane_of(task.lane)?, task.place.level()?);
        let commit = self.batch.id;
        let lane = &mut self.lanes[ix.0];
        let key = lane.places.keys().find(&task.key)?;
        lane.move_row(from, row.level, commit);
        self.batch.rows.push((ix, row.level, Entry::of(&row, key)));
        self.dirty_lanes.insert(ix);
        self.hungry.insert(ix);
        Some(row)
    }
}

/// Whether it is any change; an error if it would be more.
fn may_shorten(is_ms: u64, to_ms: u64) -> Result<bool, Refusal> {
    if is_ms > 0 && to_ms > is_ms {
        let text =
            format!("{to_ms} is more than the {is_ms} that the task has; a duration can only be shortened");
        return Err(Refusal::invalid("max_duration_ms", text));
    }
    Ok(to_ms != is_ms)
}

/// The same terms with another duration.
fn shorter(terms: Option<&Terms>, max_duration_ms: u64) -> Arc<Terms> {
    Arc::new(Terms { max_duration_ms, ..terms.cloned().unwrap_or_default() })
}
