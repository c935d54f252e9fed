//! The life of a task: its states, what can happen to it, and what comes of that. Everything that decides over
//! a task asks [`after`], which is the whole table; the rest of the shard only carries out what it says.
//!
//! ```text
//!                  ┌────────── retry after backoff ──────────┐
//!  enqueue ─► scheduled ─ due ─► queued ─ dispatch ─► running ─┴─► succeeded | failed
//!               └──────── cancel, expire ────────┴─ cancel ─┘      canceled | expired
//! ```

use std::fmt;
use std::sync::Arc;

use crate::bounds;
use crate::names::{Millis, TaskId};
use crate::refusal::Refusal;

/// How a run ended, as its worker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It did what was asked.
    Succeeded,
    /// It failed; another try may help.
    Failed,
    /// It failed, and another try would fail too.
    FailedForGood,
    /// Its worker is gone. Costs an attempt: nobody knows how far it came.
    Lost,
    /// It took longer than it may, and was stopped.
    TimeUp,
    /// The same, after it had been downgraded: it had less time than it was given at its start.
    Downgraded,
}

/// How a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// A run of it succeeded.
    Succeeded,
    /// It failed for good, or its attempts are used up.
    Failed,
    /// It was canceled.
    Canceled,
    /// It was not started in time.
    Expired,
}

/// What a run leaves behind. Kept with its task's end, or with the try that it was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// What it made, if it succeeded.
    pub result: Arc<[u8]>,
    /// What it said of its failure.
    pub error: Arc<str>,
    /// When it wants to be tried again, in milliseconds from its end, if it said.
    pub retry_after_ms: Option<u64>,
    /// How long it ran, in milliseconds, as its worker measured it.
    pub ran_ms: Option<u64>,
}

/// Where a task is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits for a time.
    Scheduled,
    /// It waits in its lane.
    Queued,
    /// A worker runs it; `canceled` if somebody wants it stopped.
    Running { canceled: bool },
    /// It has ended, and its end is remembered.
    Ended,
    /// No such task: it never was, or nobody remembers it.
    Unknown,
}

/// What happens to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Its delay or its backoff is over.
    Due,
    /// The run that the shard counts on has ended. Reports are matched by (task, fence) first, so each run
    /// gets here at most once.
    Ended(End),
    /// A run that the shard did not count on any more has ended: it was given up as lost, or an earlier owner
    /// started it. `counted`: its attempt has been counted already.
    EndedLate { end: End, counted: bool },
    /// Its worker says that the run never began.
    Refused,
    /// Somebody does not want it any more.
    Cancel,
    /// Nobody has watched it for as long as it was to wait for a watcher.
    Detached,
    /// It is too late to start it.
    Expire,
    /// Somebody wants it to be run again.
    Replay,
}

/// What the table has to know of a task beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tries {
    /// Which try it is.
    pub(crate) attempt: u16,
    pub(crate) max_attempts: u16,
    /// Runs of it that were lost with their workers, before this one.
    pub(crate) lost: u8,
    pub(crate) max_lost: u8,
    /// A retry would come after it has expired.
    pub(crate) expires: bool,
    /// What a downgrade ended is tried again.
    pub(crate) requeue: bool,
}

/// What comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It waits in its lane.
    Queue,
    /// It waits for its backoff to be over, and is tried again.
    Retry,
    /// Its worker is told to stop it.
    Stop,
    /// It has ended.
    Finish(Outcome),
    /// Another task is made of it.
    Again,
    /// Nothing: it is answered, and that is all.
    Stay,
    /// Nothing, and whoever asked is told that there is nothing to do it to.
    Refuse,
}

/// The transition table. Every pair is decided on purpose; there is no arm for "all the rest".
pub(crate) fn after(state: State, event: Event, tries: Tries) -> Next {
    use Event::{Cancel, Detached, Due, Ended, EndedLate, Expire, Refused, Replay};
    match (state, event) {
        // It waits, for a time or for its turn.
        (State::Scheduled, Due) => Next::Queue,
        // Its timer was handled before: a timer and its row go in one commit, so this is the same one read again.
        (State::Queued, Due) => Next::Stay,
        (State::Scheduled | State::Queued, Cancel | Detached) => Next::Finish(Outcome::Canceled),
        (State::Scheduled | State::Queued, Expire) => Next::Finish(Outcome::Expired),
        // A run that was given up reports after all. A real result counts; a failure only if its attempt
        // has not been counted: the task waits for the very next try otherwise.
        (State::Scheduled | State::Queued, EndedLate { end: End::Succeeded, .. }) => {
            Next::Finish(Outcome::Succeeded)
        }
        (State::Scheduled | State::Queued, EndedLate { end: End::FailedForGood, .. }) => {
            Next::Finish(Outcome::Failed)
        }
        (
            State::Scheduled | State::Queued,
            EndedLate { end: End::Failed | End::Lost | End::TimeUp | End::Downgraded, counted: true },
        ) => Next::Stay,
        (
            State::Scheduled | State::Queued,
            EndedLate {
                end: end @ (End::Failed | End::Lost | End::TimeUp | End::Downgraded),
                counted: false,
            },
        ) => tried_in_vain(end, tries),
        // Ends and refusals are matched by fence against what runs, so these are of no run that counts.
        (State::Scheduled | State::Queued, Ended(_) | Refused) => Next::Stay,

        // It runs.
        (State::Running { .. }, Ended(End::Succeeded)) => Next::Finish(Outcome::Succeeded),
        (
            State::Running { canceled: true },
            Ended(End::Failed | End::FailedForGood | End::Lost | End::TimeUp | End::Downgraded) | Refused,
        ) => Next::Finish(Outcome::Canceled),
        (State::Running { canceled: false }, Ended(End::FailedForGood)) => Next::Finish(Outcome::Failed),
        (
            State::Running { canceled: false },
            Ended(end @ (End::Failed | End::Lost | End::TimeUp | End::Downgraded)),
        ) => tried_in_vain(end, tries),
        // A dispatch that never started costs nothing.
        (State::Running { canceled: false }, Refused) => Next::Queue,
        (State::Running { canceled: false }, Cancel | Detached) => Next::Stop,
        // Asked twice: the worker has been told.
        (State::Running { canceled: true }, Cancel | Detached) => Next::Stay,
        // It was started in time.
        (State::Running { .. }, Expire) => Next::Stay,
        // A newer run is alive: this one was given up, and what it did is not asked for any more.
        (State::Running { .. }, EndedLate { .. }) => Next::Stay,
        (State::Running { .. }, Due) => Next::Stay,

        // It is over. What comes now comes late or twice, and changes nothing; but it may be run again.
        (State::Ended, Due | Ended(_) | EndedLate { .. } | Refused | Detached | Expire) => Next::Stay,
        (State::Ended, Cancel) => Next::Refuse,
        (State::Ended, Replay) => Next::Again,
        (State::Scheduled | State::Queued | State::Running { .. }, Replay) => Next::Refuse,

        // Nobody remembers it: a report of it is acknowledged, so that its worker forgets it too.
        (State::Unknown, Due | Ended(_) | EndedLate { .. } | Refused | Detached | Expire) => Next::Stay,
        (State::Unknown, Cancel | Replay) => Next::Refuse,
    }
}

/// A try that failed or was lost: there is another one, or there is not.
fn tried_in_vain(end: End, tries: Tries) -> Next {
    let lost_too_often = end == End::Lost && tries.lost.saturating_add(1) >= tries.max_lost;
    let cut = end == End::Downgraded && !tries.requeue;
    if tries.attempt >= tries.max_attempts || lost_too_often || cut {
        Next::Finish(Outcome::Failed)
    } else if tries.expires {
        Next::Finish(Outcome::Expired)
    } else {
        Next::Retry
    }
}

/// How long a task waits before it is tried again: `first_ms`, then each time `factor` times as long, up to
/// `max_ms`; all of it times a number between a half and one and a half, so that what failed together does not
/// come back together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backoff {
    /// Before the second try, in milliseconds.
    pub first_ms: u64,
    /// By how much it grows, in thousandths.
    pub factor: u32,
    /// Longest, in milliseconds.
    pub max_ms: u64,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { first_ms: 250, factor: 2_000, max_ms: 3_600_000 }
    }
}

impl Backoff {
    /// The wait after so many tries, without chance.
    pub fn plain_ms(self, attempt: u16) -> u64 {
        let mut ms = u128::from(self.first_ms);
        for _ in 1..attempt {
            if ms >= u128::from(self.max_ms) || self.factor <= 1_000 {
                break;
            }
            ms = ms * u128::from(self.factor) / 1_000;
        }
        u64::try_from(ms).unwrap_or(u64::MAX).min(self.max_ms)
    }

    /// The wait after this try of this task. The same every time it is asked: chance comes from the numbers.
    pub(crate) fn wait_ms(self, task: TaskId, attempt: u16) -> u64 {
        let chance = mixed(task.0 ^ u64::from(attempt) << 48) >> 54; // 0 to 1023
        let half = self.plain_ms(attempt) / 2;
        half.saturating_add((u128::from(half) * 2 * u128::from(chance) / 1_023) as u64)
    }

    /// Checks what a user chose.
    pub fn check(self) -> Result<(), Refusal> {
        let most = bounds::BACKOFF_MS;
        if self.first_ms > most {
            let is = self.first_ms;
            return Err(Refusal::invalid("backoff_ms", format!("{is} is out of range; use 0 to {most}")));
        }
        if self.max_ms > most {
            let is = self.max_ms;
            return Err(Refusal::invalid("max_backoff_ms", format!("{is} is out of range; use 0 to {most}")));
        }
        if !(1_000..=100_000).contains(&self.factor) {
            let is = f64::from(self.factor) / 1_000.0;
            return Err(Refusal::invalid("factor", format!("{is} is out of range; use 1 to 100")));
        }
        Ok(())
    }
}

/// Spreads a number over all bits (splitmix64).
fn mixed(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// What a task asked for beyond the ordinary. Most have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Its own backoff; the queue's if it has none.
    pub backoff: Option<Backoff>,
    /// After this no run of it is started.
    pub expires: Option<Millis>,
    /// It is canceled when nobody has watched it for so many milliseconds; 0 if it does not care.
    pub attach_ms: u64,
    /// How long a run of it takes, as its caller thinks, in milliseconds; 0 if it did not say.
    pub expected_ms: u64,
    /// How long a run of it may take, in milliseconds; 0 if it did not say.
    pub max_duration_ms: u64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Succeeded => "succeeded",
            Outcome::Failed => "failed",
            Outcome::Canceled => "canceled",
            Outcome::Expired => "expired",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIES: Tries =
        Tries { attempt: 1, max_attempts: 5, lost: 0, max_lost: 3, expires: false, requeue: false };

    #[test]
    fn a_backoff_doubles_up_to_its_cap_and_varies_by_half() {
        let backoff = Backoff::default();
        let plain: Vec<u64> = (1..=5).map(|attempt| backoff.plain_ms(attempt)).collect();
        assert_eq!(plain, [250, 500, 1_000, 2_000, 4_000]);
        assert_eq!(backoff.plain_ms(1_000), 3_600_000);
        let waits: Vec<u64> = (1..2_000).map(|task| backoff.wait_ms(TaskId(task), 3)).collect();
        assert!(waits.iter().all(|wait| (500..=1_500).contains(wait)));
        let mean = waits.iter().sum::<u64>() / waits.len() as u64;
        assert!((950..1_050).contains(&mean), "{mean}");
        assert!(waits.iter().any(|wait| *wait < 520) && waits.iter().any(|wait| *wait > 1_480));
        let flat = Backoff { first_ms: 0, factor: 1_000, max_ms: 0 };
        assert_eq!(flat.wait_ms(TaskId(1), 1_000), 0);
        let huge = Backoff { first_ms: u64::MAX, factor: 100_000, max_ms: u64::MAX };
        assert!(huge.wait_ms(TaskId(1), u16::MAX) > u64::MAX / 4);
    }

    #[test]
    fn success_that_comes_after_a_cancel_stays_success_and_any_other_end_is_canceled() {
        let canceled = State::Running { canceled: true };
        let end = |end| after(canceled, Event::Ended(end), TRIES);
        assert_eq!(end(End::Succeeded), Next::Finish(Outcome::Succeeded));
        for other in [End::Failed, End::FailedForGood, End::Lost] {
            assert_eq!(end(other), Next::Finish(Outcome::Canceled));
        }
        assert_eq!(after(canceled, Event::Cancel, TRIES), Next::Stay);
    }

    #[test]
    fn a_task_that_keeps_killing_its_workers_is_not_tried_for_ever() {
        let running = State::Running { canceled: false };
        let lost =
            |lost| after(running, Event::Ended(End::Lost), Tries { lost, max_attempts: 1_000, ..TRIES });
        assert_eq!([lost(0), lost(1), lost(2)], [Next::Retry, Next::Retry, Next::Finish(Outcome::Failed)]);
        let failed = Tries { lost: 2, max_attempts: 1_000, ..TRIES };
        assert_eq!(after(running, Event::Ended(End::Failed), failed), Next::Retry);
    }

    #[test]
    fn a_late_failure_burns_no_attempt_twice() {
        for state in [State::Scheduled, State::Queued] {
            let late = |end, counted| after(state, Event::EndedLate { end, counted }, TRIES);
            assert_eq!(late(End::Failed, true), Next::Stay);
            assert_eq!(late(End::Failed, false), Next::Retry);
            assert_eq!(late(End::Succeeded, true), Next::Finish(Outcome::Succeeded));
        }
        let late = Event::EndedLate { end: End::Succeeded, counted: false };
        assert_eq!(after(State::Running { canceled: false }, late, TRIES), Next::Stay);
        assert_eq!(after(State::Ended, late, TRIES), Next::Stay);
    }
}
