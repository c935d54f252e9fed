//! The streams of an interactive run, on their way between its process and the server.
//!
//! Each run has a connection of its own, so that whoever does not read, the client or the process, holds up this run
//! alone: what is not read stays in the pipe, and its writer waits. If the connection breaks, nobody is there any more,
//! and the run is ended.

use std::time::Duration;

use bytes::Bytes;
use evenhand_api::v1::interactive_down::Message as FromClient;
use evenhand_api::v1::interactive_up::Message as ToClient;
use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use evenhand_api::{MESSAGE_BYTES, interactive, v1};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tracing::debug;

use crate::client::endpoint;
use crate::guardian::{Ended, Inlet, KillCause, Outcome, Outlet, Streams, Terminal};

/// Bytes that are read and sent at once.
const CHUNK: usize = 32 * 1024;
/// Messages that may wait to be sent. Each output holds the place of its next one.
const OUTGOING: usize = 4;
/// How long the server may take to take up a call.
const CALL_WITHIN: Duration = Duration::from_secs(5);
/// How long the pipes of a run that has ended are waited for, and how much is still read from them, in case somebody
/// outside of the run holds them.
const CLOSING: Duration = Duration::from_secs(1);
const CLOSING_BYTES: usize = 4 * 1024 * 1024;
/// How long the server has to take what was said last.
const FAREWELL: Duration = Duration::from_secs(10);

/// Nobody is there any more.
#[derive(Debug)]
pub(crate) struct Gone;

/// Where to call, and about which run.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) server: String,
    pub(crate) hello: v1::InteractiveHello,
}

/// An open call.
struct Line {
    out: mpsc::Sender<v1::InteractiveUp>,
    incoming: Streaming<v1::InteractiveDown>,
}

/// The terminal that a run is to have, if it is to have one.
pub(crate) fn terminal(asked: &v1::Interactive) -> Option<Terminal> {
    // A server checks it; one that does not gets a terminal of the usual size.
    let (rows, cols) = interactive::size(asked.rows, asked.cols).unwrap_or((24, 80));
    asked.tty.then(|| Terminal { rows, cols, term: asked.term.clone() })
}

/// How a run ended, on the wire.
pub(crate) fn exit(ended: &Ended) -> v1::InteractiveExit {
    use v1::interactive_exit::{Killed, Outcome as Wire};
    let outcome = match &ended.outcome {
        Outcome::Exited(code) => Wire::Exited(*code),
        Outcome::Signaled(signal) => Wire::Signaled(*signal),
        Outcome::NotStarted(why) => Wire::NotStarted(super::runtime::cut(why.clone())),
    };
    let killed = match ended.killed {
        None => Killed::Unspecified,
        Some(KillCause::Stop) => Killed::Stop,
        Some(KillCause::Deadline) => Killed::TimeUp,
        Some(KillCause::Lease) => Killed::Lease,
    };
    v1::InteractiveExit { outcome: Some(outcome), killed: killed.into() }
}

/// It was never started, for this reason.
pub(crate) fn not_started(why: impl Into<String>) -> v1::InteractiveExit {
    let outcome = Some(v1::interactive_exit::Outcome::NotStarted(why.into()));
    v1::InteractiveExit { outcome, ..v1::InteractiveExit::default() }
}

fn up(message: ToClient) -> v1::InteractiveUp {
    v1::InteractiveUp { message: Some(message) }
}

impl Call {
    /// Carries everything, until the run has ended and all of it was taken. `ended` says how, when it has.
    pub(crate) async fn carry(
        self,
        streams: Streams,
        mut ended: watch::Receiver<Option<v1::InteractiveExit>>,
    ) -> Result<(), Gone> {
        let Line { out, mut incoming } = self.open().await?;
        let Streams { input, stdout, stderr } = streams;
        let outputs = async {
            let stderr = async {
                match stderr {
                    Some(stderr) => pump(stderr, &out, ToClient::Stderr, ended.clone()).await,
                    None => Ok(()),
                }
            };
            tokio::try_join!(pump(stdout, &out, ToClient::Stdout, ended.clone()), stderr)?;
            // Whoever drops the other end has forgotten the run.
            let exit = ended.wait_for(Option::is_some).await.map_err(|_| Gone)?.clone();
            let exit = exit.ok_or(Gone)?;
            out.send(up(ToClient::Exit(exit))).await.map_err(|_| Gone)
        };
        tokio::select! {
            sent = outputs => sent?,
            gone = listen(&mut incoming, input) => return Err(gone),
        }
        farewell(Line { out, incoming }).await;
        Ok(())
    }

    /// Says how a run ended that had no streams, or was never started.
    pub(crate) async fn say(self, exit: v1::InteractiveExit) {
        if let Ok(line) = self.open().await
            && line.out.send(up(ToClient::Exit(exit))).await.is_ok()
        {
            farewell(line).await;
        }
    }

    async fn open(self) -> Result<Line, Gone> {
        let Call { server, hello } = self;
        let calling = async {
            let endpoint = endpoint(&server).map_err(|refusal| refusal.to_string())?;
            let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
            let mut grpc = WorkerSessionsClient::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES)
                .max_encoding_message_size(MESSAGE_BYTES);
            let (out, outgoing) = mpsc::channel(OUTGOING);
            // The first message always fits.
            let _ = out.try_send(up(ToClient::Hello(hello)));
            let answer = grpc.interactive(ReceiverStream::new(outgoing)).await;
            let answer = answer.map_err(|status| status.message().to_string())?;
            Ok::<_, String>(Line { out, incoming: answer.into_inner() })
        };
        let opened = timeout(CALL_WITHIN, calling).await.unwrap_or_else(|_| Err("no answer in time".into()));
        opened.map_err(|why| {
            debug!(why, "the streams of an interactive run are not wanted");
            Gone
        })
    }
}

/// Waits until the server has taken all that was said.
async fn farewell(line: Line) {
    let Line { out, mut incoming } = line;
    drop(out);
    let over = async { while let Ok(Some(_)) = incoming.message().await {} };
    let _ = timeout(FAREWELL, over).await;
}

/// Does what the client says, until it is gone.
async fn listen(incoming: &mut Streaming<v1::InteractiveDown>, mut input: Inlet) -> Gone {
    while let Ok(Some(down)) = incoming.message().await {
        // A process that does not read any more is no reason to end it.
        let _ = match down.message {
            Some(FromClient::Stdin(bytes)) => input.write(&bytes).await,
            Some(FromClient::Eof(true)) => input.end().await,
            Some(FromClient::Resize(v1::Resize { rows, cols })) => match interactive::size(rows, cols) {
                Ok((rows, cols)) => input.resize(rows, cols),
                Err(_) => Ok(()),
            },
            Some(FromClient::Eof(false)) | None => Ok(()),
        };
    }
    Gone
}

/// Sends what a run writes, until it writes no more.
async fn pump(
    mut outlet: Outlet,
    out: &mpsc::Sender<v1::InteractiveUp>,
    wrap: impl Fn(Bytes) -> ToClient,
    mut ended: watch::Receiver<Option<v1::InteractiveExit>>,
) -> Result<(), Gone> {
    let mut buffer = vec![0; CHUNK];
    let mut late = 0;
    while late < CLOSING_BYTES {
        // Nothing is read that cannot be sent: it waits in the pipe.
        let place = out.reserve().await.map_err(|_| Gone)?;
        let read = tokio::select! {
            biased;
            read = outlet.read(&mut buffer) => read.unwrap_or(0),
            () = over(&mut ended) => 0,
        };
        if read == 0 {
            break;
        }
        place.send(up(wrap(Bytes::copy_from_slice(&buffer[..read]))));
        late += if ended.borrow().is_some() { read } else { 0 };
    }
    Ok(())
}

/// The run has ended, and what it left in its pipes has been there to be read.
async fn over(ended: &mut watch::Receiver<Option<v1::InteractiveExit>>) {
    // Whoever drops the other end has forgotten the run.
    let _ = ended.wait_for(Option::is_some).await;
    tokio::time::sleep(CLOSING).await;
}
