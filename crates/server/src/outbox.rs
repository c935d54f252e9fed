//! How the loop reaches a worker: what it says gathers in one message until the connection takes it, so that
//! a worker that is given a thousand tasks gets few messages. What gathers is bounded by what the worker may be
//! told: its slots, its ends, one answer.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use evenhand_api::v1;
use tokio_stream::Stream;
use tonic::Status;

/// Bytes of payloads and files after which a message is full.
const FULL_BYTES: usize = 1024 * 1024;
/// Messages that may wait to be sent.
const MESSAGES: usize = 10_000;
/// Things in it after which it is full.
const FULL_ITEMS: usize = 1_024;

#[derive(Debug, Default)]
struct State {
    messages: VecDeque<v1::Down>,
    closed: bool,
    waker: Option<Waker>,
}

/// The loop's end of a worker's session. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outbox(Arc<Mutex<State>>);

/// The connection's end.
#[derive(Debug)]
pub(crate) struct Outgoing(Outbox);

impl Outbox {
    pub(crate) fn outgoing(&self) -> Outgoing {
        Outgoing(self.clone())
    }

    /// Has this sent after all before it. False: more waits than a peer that reads would leave.
    #[must_use]
    pub(crate) fn push(&self, down: v1::Down) -> bool {
        let mut state = self.lock();
        if state.closed {
            return true;
        }
        if state.messages.len() >= MESSAGES {
            return false;
        }
        state.messages.push_back(down);
        wake(state);
        true
    }

    /// Ends the session at once: what waits is not sent.
    pub(crate) fn cut(&self) {
        self.lock().messages.clear();
        self.close();
    }

    /// Ends the session when all is sent.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        wake(state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wake(mut state: MutexGuard<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl Stream for Outgoing {
    type Item = Result<v1::Down, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.0.lock();
        match state.messages.pop_front() {
            Some(down) => Poll::Ready(Some(Ok(down))),
            None if state.closed => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Outgoing {
    /// Nobody will take what is left.
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.messages.clear();
    }
}

/// What gathers for a worker in one round of the loop.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    pub(crate) down: v1::Down,
    bytes: usize,
}

impl Gathering {
    pub(crate) fn start(&mut self, start: v1::Start) {
        self.bytes += start.payload.len() + start.files.iter().map(|file| file.content.len()).sum::<usize>();
        self.down.start.push(start);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= FULL_BYTES || self.down.start.len() >= FULL_ITEMS
    }

    pub(crate) fn is_empty(&self) -> bool {
        let v1::Down {
            epoch: _,
            session: _,
            welcome,
            answer,
            start,
            stop,
            acknowledged,
            deadlines,
            absence_ms,
            die,
            drain,
            queues: _,
        } = &self.down;
        welcome.is_none()
            && answer.is_none()
            && start.is_empty()
            && stop.is_empty()
            && acknowledged.is_empty()
            && deadlines.is_empty()
            && absence_ms.is_none()
            && die.is_none()
            && !drain
    }
}
