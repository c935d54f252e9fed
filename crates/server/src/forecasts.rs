//! When waiting tasks will start, for those who ask and those who watch. The loop copies what decides it
//! ([`Snapshot`](evenhand_core::estimate::Snapshot)); the play that follows is done elsewhere, on a thread that may block.
//!
//! A forecast serves all who ask of its queue until it is too old. The more it cost to make, the longer it is used, so
//! that copying and playing take a twentieth of the time at most, whatever the backlog and however many ask: a queue with
//! a hundred thousand waiting tasks is looked at every few seconds, a small one whenever somebody asks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use evenhand_api::v1;
use evenhand_core::Task;
use evenhand_core::estimate::{Estimate, Forecast, Wanted};
use evenhand_core::names::QueueName;
use tokio::sync::Mutex as AsyncMutex;

use crate::mailbox::Mailbox;

/// A forecast serves at least so long.
const FRESH: Duration = Duration::from_millis(50);
/// And so many times as long as it took to make.
const TIMES: u32 = 20;
/// Queues of which a forecast is kept. Beyond, all are forgotten: each can be made anew.
const QUEUES: usize = 1_000;
/// Between two words on the same task to one who watches it.
pub(crate) const TELL_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Made {
    /// None: nothing starts, or there is no such queue.
    forecast: Option<Arc<Forecast>>,
    /// When the copy was taken, and until when it serves.
    times: Option<(Instant, Instant)>,
}

/// Who makes it holds its lock: the others wait for the same.
type Place = Arc<AsyncMutex<Made>>;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Forecasts(Mutex<BTreeMap<QueueName, Place>>);

impl Forecasts {
    fn place(&self, queue: &QueueName) -> Place {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if places.len() >= QUEUES && !places.contains_key(queue) {
            places.clear();
        }
        places.entry(queue.clone()).or_default().clone()
    }

    /// When a waiting task will start, as far as it is known.
    pub(crate) async fn of(&self, mailbox: &Mailbox, queue: &QueueName, task: &Task) -> Option<Estimate> {
        let place = self.place(queue);
        let mut made = place.lock().await;
        if made.times.is_none_or(|(_, until)| Instant::now() >= until) {
            let began = Instant::now();
            // A server that is busy or stopping has better things to do.
            let snapshot = mailbox.snapshot(queue.clone()).await.ok()?;
            let taken = Instant::now();
            let forecast = match snapshot {
                Some(snapshot) => tokio::task::spawn_blocking(move || snapshot.forecast()).await.ok(),
                None => None,
            };
            *made = Made {
                forecast: forecast.map(Arc::new),
                times: Some((taken, Instant::now() + FRESH.max(began.elapsed() * TIMES))),
            };
        }
        let (forecast, taken) = (made.forecast.clone()?, made.times?.0);
        drop(made);
        let wanted = Wanted { task: task.id, lane: task.lane, place: task.place, key: task.key.clone() };
        let age_ms = taken.elapsed().as_millis() as u64;
        forecast.of(&wanted).map(|estimate| Estimate {
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
