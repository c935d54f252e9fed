//! What workers say, over gRPC: one stream each way. The first message is a hello; from then on everything is
//! passed to the loop as it comes. Nonsense ends the session with an error that names the field.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evenhand_api::v1::interactive_up::Message as FromRun;
use evenhand_api::v1::worker_sessions_server::WorkerSessions;
use evenhand_api::{ERROR_BYTES, LINE_BYTES, PROTOCOL, RESULT_BYTES, convert, errors, v1};
use evenhand_core::Refusal;
use evenhand_core::life::Ending;
use evenhand_core::names::{Seat, SessionId};
use evenhand_core::owner::messages::{Beat, Then};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::debug;

use crate::interactive::{Registry, RunKey};
use crate::mailbox::{self, FromWorker, Mailbox, RunEnded};
use crate::outbox::Outbox;
use crate::shard::SHARD;

/// A connection that says nothing for so long after it was made is no worker's.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

/// The service.
#[derive(Debug)]
pub(crate) struct Workers {
    pub(crate) mailbox: Mailbox,
    pub(crate) registry: Registry,
    pub(crate) sessions: AtomicU64,
}

type Lines = Pin<Box<dyn Stream<Item = Result<v1::InteractiveDown, Status>> + Send>>;
type Down = Pin<Box<dyn Stream<Item = Result<v1::Down, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerSessions for Workers {
    type SessionStream = Down;
    type InteractiveStream = Lines;

    async fn session(&self, request: Request<Streaming<v1::Up>>) -> Result<Response<Down>, Status> {
        let address = request.remote_addr().map_or_else(String::new, |addr| addr.to_string());
        let mut incoming = request.into_inner();
        let outbox = Outbox::default();
        let outgoing = outbox.outgoing();
        let session = SessionId(self.sessions.fetch_add(1, Ordering::Relaxed) + 1);
        let mailbox = self.mailbox.clone();
        tokio::spawn(async move {
            let said = match greet(&mut incoming, session, &outbox, &mailbox, address).await {
                Ok(true) => listen(&mut incoming, session, &mailbox).await,
                Ok(false) => Ok(()),
                Err(refusal) => Err(refusal),
            };
            if let Err(refusal) = said {
                debug!(%session, why = %refusal, "a worker's session is refused");
                let _ = outbox.push(die(&refusal));
            }
            outbox.close();
            mailbox.hear(FromWorker::Closed { session }).await;
        });
        Ok(Response::new(Box::pin(outgoing)))
    }

    async fn interactive(
        &self,
        request: Request<Streaming<v1::InteractiveUp>>,
    ) -> Result<Response<Lines>, Status> {
        let mut incoming = request.into_inner();
        let run = name(&mut incoming).await.map_err(|refusal| errors::status(&refusal))?;
        let downs = self.registry.call(run, Box::pin(incoming));
        let gone = || errors::status(&Refusal::not_found("nobody talks to this run (any more)"));
        Ok(Response::new(Box::pin(ReceiverStream::new(downs.ok_or_else(gone)?))))
    }

    async fn dead(&self, request: Request<v1::DeadRequest>) -> Result<Response<v1::DeadResponse>, Status> {
        let said = request.into_inner();
        let seat = speaks(said.protocol, said.shard).and_then(|()| Seat::new(&said.seat));
        let seat = seat.map_err(|refusal| errors::status(&refusal))?;
        let v1::DeadRequest { token, process_life: process, drained, .. } = said;
        let message = FromWorker::Dead { seat, token, process, drained };
        match self.mailbox.hear(message).await {
            true => Ok(Response::new(v1::DeadResponse {})),
            false => Err(errors::status(&mailbox::stopping())),
        }
    }
}

/// Waits for the name of the run that these streams are of.
async fn name(incoming: &mut Streaming<v1::InteractiveUp>) -> Result<RunKey, Refusal> {
    let first = tokio::time::timeout(HELLO_WITHIN, incoming.message()).await;
    let Ok(Ok(Some(v1::InteractiveUp { message: Some(FromRun::Hello(hello)) }))) = first else {
        return Err(Refusal::invalid("hello", "must be the first message"));
    };
    speaks(hello.protocol, hello.shard)?;
    let run = hello.run.ok_or_else(|| Refusal::invalid("run", "is missing"))?;
    Ok(convert::parse_run_id(&run))
}

/// Whether a worker speaks as this server does.
fn speaks(protocol: u32, shard: u32) -> Result<(), Refusal> {
    if protocol != PROTOCOL {
        let older = if protocol < PROTOCOL { "worker" } else { "server" };
        return Err(Refusal::invalid(
            "protocol",
            format!(
                "the worker speaks version {protocol}, this server version {PROTOCOL}; upgrade the {older}"
            ),
        ));
    }
    if shard != SHARD.0 {
        return Err(Refusal::invalid(
            "shard",
            format!("shard {shard} is not here; this server has shard {SHARD}"),
        ));
    }
    Ok(())
}

fn die(refusal: &Refusal) -> v1::Down {
    let die = v1::Die { error: Some(errors::error(refusal)), then: convert::then(Then::Exit).into() };
    v1::Down { die: Some(die), ..v1::Down::default() }
}

/// Waits for the hello and passes it on. False: the connection ended before it.
async fn greet(
    incoming: &mut Streaming<v1::Up>,
    session: SessionId,
    outbox: &Outbox,
    mailbox: &Mailbox,
    address: String,
) -> Result<bool, Refusal> {
    let first = tokio::time::timeout(HELLO_WITHIN, incoming.message()).await;
    let Ok(first) = first else {
        let seconds = HELLO_WITHIN.as_secs();
        return Err(Refusal::invalid("hello", format!("did not come within {seconds} s")));
    };
    let Ok(Some(up)) = first else { return Ok(false) };
    let Some(v1::up::Message::Hello(hello)) = up.message else {
        return Err(Refusal::invalid("hello", "must be the first message"));
    };
    speaks(hello.protocol, hello.shard)?;
    let parsed = convert::parse_hello(&hello)?;
    let ends = parsed.ended.iter().zip(hello.ended);
    let results = ends.map(|(_, ended)| {
        let v1::Ended { run: _, end: _, result, error, retry_after_ms, ran_ms } = ended;
        ending(&result, error, retry_after_ms, ran_ms)
    });
    let results = results.collect();
    let hello = FromWorker::Hello { session, hello: parsed, results, outbox: outbox.clone(), address };
    Ok(mailbox.hear(hello).await)
}

/// Passes on what the worker says, until it says no more.
async fn listen(
    incoming: &mut Streaming<v1::Up>,
    session: SessionId,
    mailbox: &Mailbox,
) -> Result<(), Refusal> {
    while let Ok(Some(up)) = incoming.message().await {
        let Some(v1::up::Message::News(news)) = up.message else {
            return Err(Refusal::invalid("news", "must follow the hello"));
        };
        let v1::News { heartbeat, ended, refused, output, slots, progress } = news;
        // Heartbeats first: they wait for nothing.
        if let Some(beat) = heartbeat {
            let set = beat.worker_set.as_ref().map(convert::parse_worker_set);
            let beat = Beat { number: beat.number, answered: beat.answered, set };
            mailbox.hear(FromWorker::Beat { session, beat }).await;
        }
        if let Some(slots) = slots {
            mailbox.hear(FromWorker::Offer { session, slots }).await;
        }
        // What a run said before it ended comes before its end.
        for v1::Output { run, lines, dropped } in output {
            if let Some(id) = run {
                let (task, fence) = convert::parse_run_id(&id);
                let mut lines = lines;
                lines.iter_mut().for_each(|line| convert::cut(line, LINE_BYTES));
                mailbox.hear(FromWorker::Output { task, fence, lines, dropped }).await;
            }
        }
        for v1::RunProgress { run, progress } in progress {
            if let (Some(id), Some(progress)) = (run, progress) {
                let (task, fence) = convert::parse_run_id(&id);
                let progress = convert::progress(progress);
                mailbox.hear(FromWorker::Progress { task, fence, progress }).await;
            }
        }
        if !ended.is_empty() {
            let parsed = ended.into_iter().enumerate().map(|(n, ended)| {
                run_ended(ended).map_err(|refusal| refusal.within(format_args!("ended[{n}]")))
            });
            let ended = parsed.collect::<Result<Vec<_>, Refusal>>()?;
            mailbox.hear(FromWorker::Ended { session, ended }).await;
        }
        for id in &refused {
            let (task, fence) = convert::parse_run_id(id);
            mailbox.hear(FromWorker::Refused { session, task, fence }).await;
        }
    }
    Ok(())
}

fn run_ended(ended: v1::RunEnded) -> Result<RunEnded, Refusal> {
    let v1::RunEnded { run, attempt, end, result, error, retry_after_ms, ran_ms } = ended;
    let id = run.ok_or_else(|| Refusal::invalid("run", "is missing"))?;
    let (task, fence) = convert::parse_run_id(&id);
    let attempt = convert::parse_attempt("attempt", attempt)?;
    let (end, ending) = (convert::parse_end(end)?, ending(&result, error, retry_after_ms, ran_ms));
    Ok(RunEnded { task, fence, attempt, end, ending })
}

/// What a run left behind, cut to what is kept of it.
fn ending(result: &[u8], mut error: String, retry_after_ms: Option<u64>, ran_ms: Option<u64>) -> Ending {
    convert::cut(&mut error, ERROR_BYTES);
    // A copy of its own: what came with it in the same message must not be kept for it.
    let result = result[..result.len().min(RESULT_BYTES)].into();
    Ending { result, error: error.into(), retry_after_ms, ran_ms }
}
