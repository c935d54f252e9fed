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
use futures_util::stream::SplitSink;
use futures_util::{SinkExt, Stream, StreamExt};
use tokio::time::Instant;

use crate::interactive::{Gone, Session, Sink, Source, checked, relay};

/// The largest message that is read. A client may send half of it, and the byte before that; if it sends a little more,
/// it is read to its end, so that its sender can be told. What is larger still cannot be read past.
pub(crate) const MESSAGE_BYTES: usize = 2 * STDIN_BYTES;
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
    let source = Frames { stream, ahead: None, said: Vec::new(), broken: false, seen: seen.clone() };
    relay(session, source, Socket { sink, seen }).await;
    drop(held);
}

/// What the client says.
struct Frames<S> {
    stream: S,
    /// A frame that came while nothing was taken.
    ahead: Option<Message>,
    /// Nothing can be read any more.
    broken: bool,
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

impl<S: Stream<Item = Result<Message, axum::Error>> + Send + Unpin> Frames<S> {
    /// The next frame that says something. An error: it is gone, or makes no sense.
    async fn frame(&mut self) -> Result<Message, Option<Refusal>> {
        loop {
            // What is there counts, also if nobody looked for a while.
            let frame = tokio::select! {
                biased;
                frame = self.stream.next() => frame.ok_or(None)?,
                () = silence(&self.seen) => return Err(None),
            };
            see(&self.seen);
            match frame {
                Ok(frame @ (Message::Binary(_) | Message::Text(_))) => return Ok(frame),
                Ok(Message::Ping(_) | Message::Pong(_)) => {}
                Ok(Message::Close(_)) => return Err(None),
                Err(error) => {
                    self.broken = true;
                    return Err(nonsense(&error));
                }
            }
        }
    }
}

/// What was wrong with a frame; nothing, if it was the connection.
fn nonsense(error: &axum::Error) -> Option<Refusal> {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    let io = causes.into_iter().any(|cause| cause.is::<std::io::Error>());
    let most = format!("{error}; send at most {STDIN_BYTES} bytes in one frame");
    (!io).then(|| Refusal::invalid("frame", most))
}

impl<S: Stream<Item = Result<Message, axum::Error>> + Send + Unpin> Source for Frames<S> {
    async fn next(&mut self) -> Option<Result<FromClient, Refusal>> {
        loop {
            if let Some(said) = self.said.pop() {
                return Some(Ok(said));
            }
            let frame = match self.ahead.take() {
                Some(frame) => {
                    // Nobody listened while it waited here.
                    see(&self.seen);
                    frame
                }
                None => match self.frame().await {
                    Ok(frame) => frame,
                    Err(wrong) => return wrong.map(Err),
                },
            };
            match frame {
                Message::Binary(bytes) => return Some(frames::parse_binary(&bytes).and_then(checked)),
                Message::Text(text) => match frames::parse_text(&text) {
                    Ok(said) => self.said = said.into_iter().rev().collect(),
                    Err(refusal) => return Some(Err(refusal)),
                },
                Message::Ping(_) | Message::Pong(_) | Message::Close(_) => {}
            }
        }
    }

    /// Looks one frame ahead. What is behind that is not seen, so that a client cannot be called silent; that it is gone
    /// shows when it is asked whether it is there.
    async fn gone(&mut self) -> Option<Refusal> {
        if self.ahead.is_none() {
            match self.frame().await {
                Ok(frame) => self.ahead = Some(frame),
                Err(wrong) => return wrong,
            }
        }
        std::future::pending().await
    }

    /// Reads on to the client's word of leave. A socket that is closed while there is something to read is reset, and then
    /// the client may not hear how it ended.
    async fn leave(mut self) {
        while !self.broken && matches!(self.stream.next().await, Some(Ok(_))) {}
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

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::sync::mpsc;
    use tokio::time::timeout;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    type Client = mpsc::Sender<Result<Message, axum::Error>>;

    fn frames() -> (Client, Frames<ReceiverStream<Result<Message, axum::Error>>>) {
        let (client, stream) = mpsc::channel(4);
        let seen = Arc::new(Mutex::new(Instant::now()));
        let stream = ReceiverStream::new(stream);
        (client, Frames { stream, ahead: None, said: Vec::new(), broken: false, seen })
    }

    async fn says(frames: &mut impl Source, text: &'static str) {
        let said = frames.next().await.unwrap().unwrap();
        assert_eq!(said, FromClient::Stdin(bytes::Bytes::from(text)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_nobody_listened_to_was_not_silent() {
        let (client, mut frames) = frames();
        for text in ["\0a", "\0b", "\0c"] {
            client.send(Ok(Message::Binary(text.into()))).await.unwrap();
        }
        says(&mut frames, "a").await;
        // The command does not read, for long.
        timeout(SILENT * 3, frames.gone()).await.unwrap_err();
        says(&mut frames, "b").await;
        tokio::time::sleep(SILENT * 3).await;
        says(&mut frames, "c").await;
        // Whoever answers when asked is there.
        for _ in 0..3 {
            timeout(SILENT / 2, frames.gone()).await.unwrap_err();
            client.send(Ok(Message::Pong(bytes::Bytes::new()))).await.unwrap();
        }
        // Who does not is gone.
        assert_eq!(frames.gone().await, None);
        assert!(frames.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_leaves_is_seen_while_nothing_is_taken_from_it() {
        let (client, mut frames_of) = frames();
        client.send(Ok(Message::Close(None))).await.unwrap();
        assert_eq!(frames_of.gone().await, None);
        let (client, mut frames_of) = frames();
        drop(client);
        assert_eq!(frames_of.gone().await, None);
        // A connection that broke is no nonsense; a frame that cannot be read is.
        let (client, mut frames_of) = frames();
        client.send(Err(axum::Error::new(io::Error::other("reset")))).await.unwrap();
        assert_eq!(frames_of.gone().await, None);
        let (client, mut frames_of) = frames();
        client.send(Err(axum::Error::new("too long"))).await.unwrap();
        let refusal = frames_of.gone().await.unwrap();
        assert_eq!(refusal.field, "frame", "{refusal}");
        // And is not read past.
        timeout(SILENT, frames_of.leave()).await.unwrap();
    }
}
