//! When waiting tasks will start, for those who ask and those who watch. The loop copies what decides it
//! ([`Snapshot`](evenhand_core::estimate::Snapshot)); the play that follows is done elsewhere, on a thread that may block.
//!
//! A forecast serves all who ask of its queue until it is too old. The more it cost to make, the longer it is used: a queue
//! with a hundred thousand waiting tasks is looked at every few seconds, a small one whenever somebody asks. One is made at
//! a time, and then none for a while, so that copying and playing take a fortieth of the time at most, whatever the
//! backlogs, however many queues there are and however many ask. Who cannot wait for that is told what is known from
//! before, or nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use evenhand_api::v1;
use evenhand_core::estimate::{Estimate, Forecast, Wanted};
use evenhand_core::names::QueueName;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::time::{Instant, sleep_until, timeout};

use crate::mailbox::Mailbox;

/// A forecast serves at least so long.
const FRESH: Duration = Duration::from_millis(50);
/// And so many times as long as it took to make. From when one begins to be made until the next does, it is as long.
const TIMES: u32 = 40;
/// How long somebody waits until one can be made; and how long it is not tried again if that was in vain.
const PATIENCE: Duration = Duration::from_millis(500);
/// Queues of which a forecast is kept. Beyond, all are forgotten: each can be made anew.
const QUEUES: usize = 1_000;
/// Between two words on the same task to one who watches it.
pub(crate) const TELL_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Made {
    /// It, and when the copy was taken. None: nothing starts, or there is no such queue; or nothing was made yet.
    forecast: Option<(Arc<Forecast>, Instant)>,
    /// Until when it serves.
    until: Option<Instant>,
}

/// Makes one. None: a server that is busy or stopping has better things to do.
async fn make(mailbox: &Mailbox, queue: &QueueName, turn: Turn) -> Option<Made> {
    let began = turn.began;
    let snapshot = mailbox.snapshot(queue.clone()).await.ok()?;
    let taken = Instant::now();
    let forecast = match snapshot {
        // It goes on when nobody waits for it any more, and so does its turn.
        Some(snapshot) => {
            let played = tokio::task::spawn_blocking(move || {
                let forecast = snapshot.forecast();
                drop(turn);
                forecast
            });
            played.await.ok().map(|forecast| (Arc::new(forecast), taken))
        }
        None => None,
    };
    Some(Made { forecast, until: Some(Instant::now() + FRESH.max(began.elapsed() * TIMES)) })
}

/// Who makes it holds its lock: the others wait for the same.
type Place = Arc<AsyncMutex<Made>>;

/// When the next forecast may be made, of whatever queue. Who makes one holds the lock.
#[derive(Debug)]
struct Budget(Arc<AsyncMutex<Instant>>);

impl Budget {
    /// None: it would take too long until it is ours.
    async fn turn(&self) -> Option<Turn> {
        let turn = async {
            let next = self.0.clone().lock_owned().await;
            sleep_until(*next).await;
            Turn { next, began: Instant::now() }
        };
        timeout(PATIENCE, turn).await.ok()
    }
}

/// Whoever has it may make a forecast, as long as it lives.
#[derive(Debug)]
struct Turn {
    next: OwnedMutexGuard<Instant>,
    began: Instant,
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.next = self.began + self.began.elapsed() * TIMES;
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Forecasts {
    places: Mutex<BTreeMap<QueueName, Place>>,
    budget: Budget,
}

impl Default for Forecasts {
    fn default() -> Forecasts {
        Forecasts { places: Mutex::default(), budget: Budget(Arc::new(AsyncMutex::new(Instant::now()))) }
    }
}

impl Forecasts {
    fn place(&self, queue: &QueueName) -> Place {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if places.len() >= QUEUES && !places.contains_key(queue) {
            places.clear();
        }
        places.entry(queue.clone()).or_default().clone()
    }

    /// When a waiting task will start, as far as it is known.
    pub(crate) async fn of(&self, mailbox: &Mailbox, queue: &QueueName, wanted: &Wanted) -> Option<Estimate> {
        let place = self.place(queue);
        let mut made = place.lock().await;
        if made.until.is_none_or(|until| Instant::now() >= until) {
            match self.budget.turn().await {
                Some(turn) => *made = make(mailbox, queue, turn).await?,
                // What is known from before serves a while longer.
                None => made.until = Some(Instant::now() + PATIENCE),
            }
        }
        let (forecast, taken) = made.forecast.clone()?;
        drop(made);
        let age_ms = taken.elapsed().as_millis() as u64;
        forecast.of(wanted).map(|estimate| Estimate {
            upper_ms: estimate.upper_ms.map(|ms| ms.saturating_sub(age_ms)),
            expected_ms: estimate.expected_ms.map(|ms| ms.saturating_sub(age_ms)),
            ..estimate
        })
    }
}

/// The same on the wire.
pub(crate) fn to_wire(estimate: Estimate) -> v1::Estimate {
    let Estimate { position, upper_ms, expected_ms, approximate } = estimate;
    v1::Estimate { position, upper_ms, expected_ms, approximate }
}

/// What was last said to one who watches a task.
#[derive(Debug, Default)]
pub(crate) struct Told(Option<(Instant, v1::Estimate)>);

impl Told {
    /// Whether this is worth saying: the position has changed, or a time by more than has passed anyway. A tenth is
    /// nothing, nor is a second.
    pub(crate) fn is_news(&mut self, now: v1::Estimate) -> bool {
        let news = match &self.0 {
            None => true,
            Some((at, before)) => {
                let passed = at.elapsed().as_millis() as u64;
                let differs = |before: Option<u64>, now: Option<u64>| match (before, now) {
                    (Some(before), Some(now)) => {
                        let due = before.saturating_sub(passed);
                        due.abs_diff(now) > (due / 10).max(1_000)
                    }
                    (None, None) => false,
                    (Some(_), None) | (None, Some(_)) => true,
                };
                before.position.abs_diff(now.position) > before.position / 10
                    || differs(before.upper_ms, now.upper_ms)
                    || differs(before.expected_ms, now.expected_ms)
            }
        };
        if news {
            self.0 = Some((Instant::now(), now));
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn forecasts_take_a_part_of_the_time_whatever_they_are_of() {
        let forecasts = Forecasts::default();
        let turn = forecasts.budget.turn().await.unwrap();
        assert!(forecasts.budget.turn().await.is_none(), "one is made at a time");
        tokio::time::advance(Duration::from_secs(1)).await;
        let began = turn.began;
        drop(turn);
        assert!(forecasts.budget.turn().await.is_none(), "and then there is rest");
        tokio::time::sleep_until(began + Duration::from_secs(15)).await;
        assert!(forecasts.budget.turn().await.is_none());
        let next = *forecasts.budget.0.lock().await;
        tokio::time::sleep_until(next - PATIENCE / 2).await;
        let turn = forecasts.budget.turn().await.unwrap();
        assert!(turn.began >= began + (next - began), "who comes a little early waits");
        // What cost nothing keeps nobody.
        drop(turn);
        assert!(forecasts.budget.turn().await.is_some());
    }

    #[test]
    fn only_what_has_changed_noticeably_is_news() {
        let said = |position, expected_ms| v1::Estimate { position, expected_ms, ..v1::Estimate::default() };
        let mut told = Told::default();
        assert!(told.is_news(said(100, Some(60_000))));
        assert!(!told.is_news(said(100, Some(60_000))));
        assert!(!told.is_news(said(95, Some(57_000))));
        assert!(told.is_news(said(89, Some(57_000))), "more than a tenth nearer");
        assert!(!told.is_news(said(85, Some(53_000))));
        assert!(told.is_news(said(85, Some(40_000))), "sooner than was said");
        assert!(told.is_news(said(85, None)));
        assert!(told.is_news(said(2, None)));
        assert!(told.is_news(said(1, None)), "near the end every place counts");
    }
}
