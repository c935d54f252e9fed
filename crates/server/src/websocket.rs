//! Interactive tasks over a WebSocket. A binary frame is bytes of a stream, which its first byte names; a text frame is
//! JSON. How a task ended is the code that the socket is closed with. See `docs/rest.md`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use evenhand_api::interactive::frames::{self, Control};
use evenhand_api::v1::attach_request::Message as FromClient;
use evenhand_api::v1::attach_response::Message as ToClient;
use evenhand_api::{STDIN_BYTES, convert, interactive, v1};
use evenhand_core::Refusal;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::time::Instant;

use crate::interactive::{Gone, Session, Sink, Source, checked, relay};

/// The largest message that a client may send: the most bytes at once, and the byte before them.
pub(crate) const MESSAGE_BYTES: usize = STDIN_BYTES + 1;
/// A client is gone that for so long has neither said anything, not even that it is there when it was asked, nor taken
/// anything. One that only reads slowly may have more on its way to it than the question.
const SILENT: Duration = Duration::from_secs(30);
/// What had to wait for so long went when the client took what was before it. What goes at once says nothing: the
/// system takes it, also for a client that has vanished.
const WAITED: Duration = Duration::from_millis(50);
/// The longest reason that fits into a close frame, in bytes.
const REASON_BYTES: usize = 123;
/// The code of a socket whose client spoke nonsense: "policy violation".
const NONSENSE: u16 = 1008;

/// Talks until it is over. Whatever goes with the connection is held until then.
pub(crate) async fn serve<H>(socket: WebSocket, session: Session, held: H) {
    let (sink, stream) = socket.split();
    let seen = Arc::new(Mutex::new(Instant::now()));
    let source = Frames { stream, said: Vec::new(), seen: seen.clone() };
    relay(session, source, Socket { sink, seen }).await;
    drop(held);
}

/// What the client says.
struct Frames {
    stream: SplitStream<WebSocket>,
    /// What the last frame said and was not taken yet, the last first.
    said: Vec<FromClient>,
    seen: Seen,
}

/// When there was last a sign of the client.
type Seen = Arc<Mutex<Instant>>;

fn see(seen: &Seen) {
    *seen.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
}

/// Returns when there has been none for too long.
async fn silence(seen: &Seen) {
    loop {
        let until = *seen.lock().unwrap_or_else(PoisonError::into_inner) + SILENT;
        if until <= Instant::now() {
            return;
        }
        tokio::time::sleep_until(until).await;
    }
}

impl Source for Frames {
    async fn next(&mut self) -> Option<Result<FromClient, Refusal>> {
        loop {
            if let Some(said) = self.said.pop() {
                return Some(Ok(said));
            }
            let frame = tokio::select! {
                frame = self.stream.next() => frame?.ok()?,
                () = silence(&self.seen) => return None,
            };
            see(&self.seen);
            match frame {
                Message::Binary(bytes) => return Some(frames::parse_binary(&bytes).and_then(checked)),
                Message::Text(text) => match frames::parse_text(&text) {
                    Ok(said) => self.said = said.into_iter().rev().collect(),
                    Err(refusal) => return Some(Err(refusal)),
                },
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return None,
            }
        }
    }
}

/// How the client is reached.
struct Socket {
    sink: SplitSink<WebSocket, Message>,
    seen: Seen,
}

impl Socket {
    async fn say(&mut self, message: Message) -> Result<(), Gone> {
        let began = Instant::now();
        self.sink.send(message).await.map_err(|_| Gone)?;
        if began.elapsed() >= WAITED {
            see(&self.seen);
        }
        Ok(())
    }

    async fn end(mut self, code: u16, mut reason: String) {
        convert::cut(&mut reason, REASON_BYTES);
        let frame = CloseFrame { code, reason: reason.into() };
        let _ = self.sink.send(Message::Close(Some(frame))).await;
    }
}

impl Sink for Socket {
    async fn send(&mut self, said: ToClient) -> Result<(), Gone> {
        let control =
            |control: &Control| Message::Text(serde_json::to_string(control).unwrap_or_default().into());
        let message = match said {
            ToClient::Accepted(v1::AttachAccepted { task_id: task, seat }) => {
                control(&Control::Accepted { task, seat })
            }
            ToClient::Warning(v1::AttachWarning { grace_ms, message }) => {
                control(&Control::Warning { grace_ms, message })
            }
            ToClient::Stdout(bytes) => Message::Binary(frames::output(frames::STDOUT, &bytes)),
            ToClient::Stderr(bytes) => Message::Binary(frames::output(frames::STDERR, &bytes)),
            // The last word goes another way.
            ToClient::Closed(_) => return Ok(()),
        };
        self.say(message).await
    }

    async fn ping(&mut self) -> Result<(), Gone> {
        self.say(Message::Ping(bytes::Bytes::new())).await
    }

    async fn close(self, closed: v1::AttachClosed) {
        let code = interactive::ended(closed.over()).close;
        self.end(code, interactive::text(&closed)).await;
    }

    async fn refuse(self, refusal: Refusal) {
        self.end(NONSENSE, refusal.to_string()).await;
    }
}
