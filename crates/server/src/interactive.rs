//! Interactive tasks: where the two ends of a conversation meet. A client comes over gRPC (`clients`) or a WebSocket
//! (`websocket`), and asks the loop for a slot; the worker that starts the run then calls with the run's streams
//! (`workers`). The [`Registry`] knows who waits for whom; [`relay`] goes between them, the same for both kinds of
//! clients.
//!
//! Nothing gathers here: a message is taken from one end when the other has taken the last. So whoever does not read
//! holds up their own conversation, down to the process at its pipe, and nothing else.
//!
//! A conversation ends in one of these ways: the process ends, and says how; the shard says why it is over; the client
//! is gone, and the shard is told to have the process ended; the worker is gone; the server stops.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use evenhand_api::v1::attach_request::Message as FromClient;
use evenhand_api::v1::attach_response::Message as ToClient;
use evenhand_api::v1::interactive_down::Message as ToRun;
use evenhand_api::v1::interactive_exit::{Killed, Outcome};
use evenhand_api::v1::interactive_up::Message as FromRun;
use evenhand_api::v1::{self, Over};
use evenhand_api::{ERROR_BYTES, STDIN_BYTES, convert, interactive};
use evenhand_core::Refusal;
use evenhand_core::names::{Fence, TaskId};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// How long a worker has to call for a run that it was told to start. It may have to finish killing another one first.
const CALL_WITHIN: Duration = Duration::from_secs(60);
/// How long the last words of a run may keep us waiting when it is over.
const LAST_WORD: Duration = Duration::from_secs(5);
/// How long a client may take nothing of what a run that has ended has left behind. It may be read at the pace of
/// somebody who turns pages, but not for ever: its slot is free, and others have it.
const UNREAD: Duration = Duration::from_secs(60);
/// How long a client has to take its last word.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// How often a client is asked whether it is there.
const PING_EVERY: Duration = Duration::from_secs(10);
/// Messages that may wait for a worker.
const TO_WORKER: usize = 2;

/// Which run.
pub(crate) type RunKey = (TaskId, Fence);

/// What is known of a conversation beside what is said in it.
#[derive(Clone, Copy, Debug, Default)]
struct News {
    /// How often its client was to be warned, and of what.
    warnings: u64,
    grace_ms: u64,
    /// Why it is over.
    over: Option<Over>,
}

/// What a worker says of a run.
pub(crate) type Ups = Pin<Box<dyn Stream<Item = Result<v1::InteractiveUp, Status>> + Send>>;

/// A worker's end.
struct Caller {
    up: Ups,
    down: mpsc::Sender<Result<v1::InteractiveDown, Status>>,
}

/// What a worker hears.
pub(crate) type Downs = mpsc::Receiver<Result<v1::InteractiveDown, Status>>;

/// A conversation, as others reach it.
struct Line {
    news: watch::Sender<News>,
    /// Where the worker's end goes, until it is there.
    caller: Option<oneshot::Sender<Caller>>,
}

#[derive(Default)]
struct Lines {
    lines: HashMap<RunKey, Line>,
    stopping: bool,
}

/// All conversations. Clones are the same. There are at most as many as there are slots, and those whose runs are over
/// and whose clients still take what is left of them.
#[derive(Clone)]
pub(crate) struct Registry {
    lines: Arc<Mutex<Lines>>,
    /// Runs whose clients are gone, for the loop. Each is said once.
    hangups: mpsc::UnboundedSender<RunKey>,
    /// Told when a conversation is over.
    fewer: Arc<Notify>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("conversations", &self.lines().lines.len()).finish()
    }
}

impl Registry {
    /// It, and the runs whose clients are gone.
    pub(crate) fn new() -> (Registry, mpsc::UnboundedReceiver<RunKey>) {
        let (hangups, hung_up) = mpsc::unbounded_channel();
        (Registry { lines: Arc::default(), hangups, fewer: Arc::default() }, hung_up)
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run has been given a slot: its client's end. If that is dropped, the client is gone.
    pub(crate) fn open(&self, run: RunKey, task_id: String, seat: String) -> Session {
        let (caller, called) = oneshot::channel();
        let mut lines = self.lines();
        let over = lines.stopping.then_some(Over::Stopping);
        let (news, heard) = watch::channel(News { over, ..News::default() });
        lines.lines.insert(run, Line { news, caller: Some(caller) });
        Session { registry: self.clone(), run, task_id, seat, news: heard, called: Some(called), over: false }
    }

    /// The worker's end of a run: what it is to hear. None if nobody waits for it.
    pub(crate) fn call(&self, run: RunKey, up: Ups) -> Option<Downs> {
        let waits = self.lines().lines.get_mut(&run)?.caller.take()?;
        let (down, downs) = mpsc::channel(TO_WORKER);
        waits.send(Caller { up, down }).ok()?;
        Some(downs)
    }

    /// A run will be halted in so long.
    pub(crate) fn warn(&self, run: RunKey, grace_ms: u64) {
        if let Some(line) = self.lines().lines.get(&run) {
            line.news.send_modify(|news| (news.warnings, news.grace_ms) = (news.warnings + 1, grace_ms));
        }
    }

    /// A run is over, for the shard.
    pub(crate) fn over(&self, run: RunKey, over: Over) {
        if let Some(line) = self.lines().lines.get(&run) {
            line.news.send_modify(|news| news.over = news.over.or(Some(over)));
        }
    }

    /// All runs are over.
    pub(crate) fn all_over(&self, over: Over) {
        for line in self.lines().lines.values() {
            line.news.send_modify(|news| news.over = news.over.or(Some(over)));
        }
    }

    /// The server stops, and all conversations with it.
    pub(crate) fn stop(&self) {
        self.lines().stopping = true;
        self.all_over(Over::Stopping);
    }

    /// Waits until there are none.
    pub(crate) async fn is_empty(&self) {
        loop {
            let fewer = self.fewer.notified();
            if self.lines().lines.is_empty() {
                return;
            }
            fewer.await;
        }
    }
}

/// A client's end of a conversation. Dropped before it is over, the client counts as gone.
pub(crate) struct Session {
    registry: Registry,
    run: RunKey,
    task_id: String,
    seat: String,
    news: watch::Receiver<News>,
    called: Option<oneshot::Receiver<Caller>>,
    /// There is nothing left to hang up.
    over: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("task", &self.task_id).field("seat", &self.seat).finish()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.registry.lines().lines.remove(&self.run);
        self.registry.fewer.notify_waiters();
        if !self.over {
            // Without a loop there is nobody to tell, and nothing that runs.
            let _ = self.registry.hangups.send(self.run);
        }
    }
}

/// Nobody is there any more.
#[derive(Debug)]
pub(crate) struct Gone;

/// What a client says. Waiting for it may be given up and taken up again.
pub(crate) trait Source: Send {
    /// None: it is gone. An error: it says what makes no sense.
    fn next(&mut self) -> impl Future<Output = Option<Result<FromClient, Refusal>>> + Send;
    /// Returns when it is gone, or has said what makes no sense, as far as that is seen while nothing is taken from it.
    fn gone(&mut self) -> impl Future<Output = Option<Refusal>> + Send;
    /// Takes leave, after the last word or when it is gone: what it still says is for nobody.
    fn leave(self) -> impl Future<Output = ()> + Send;
}

/// How a client is reached.
pub(crate) trait Sink: Send {
    /// Has it take this. It may be given up; what was begun is finished with what comes next.
    fn send(&mut self, said: ToClient) -> impl Future<Output = Result<(), Gone>> + Send;
    /// Asks whether it is there.
    fn ping(&mut self) -> impl Future<Output = Result<(), Gone>> + Send;
    /// The last word.
    fn close(self, closed: v1::AttachClosed) -> impl Future<Output = ()> + Send;
    /// The last word to one that speaks nonsense.
    fn refuse(self, refusal: Refusal) -> impl Future<Output = ()> + Send;
}

/// Checks what a client says after it has opened.
pub(crate) fn checked(said: FromClient) -> Result<FromClient, Refusal> {
    match &said {
        FromClient::Open(_) => Err(Refusal::invalid("open", "is for the first message alone")),
        FromClient::Stdin(bytes) if bytes.len() > STDIN_BYTES => {
            Err(Refusal::too_large("stdin", format!("send at most {STDIN_BYTES} bytes at a time")))
        }
        FromClient::Resize(v1::Resize { rows, cols }) => {
            interactive::size(*rows, *cols).map_err(|refusal| refusal.within("resize"))?;
            Ok(said)
        }
        FromClient::Stdin(_) | FromClient::Eof(_) => Ok(said),
    }
}

/// Why a conversation ended.
enum End {
    ClientGone,
    /// The client spoke nonsense.
    Wrong(Refusal),
    /// The shard said so, and the worker has said no more.
    Over(Over),
    Exit(v1::InteractiveExit),
    /// The worker's end is gone without a word.
    Broken,
}

impl End {
    fn left(wrong: Option<Refusal>) -> End {
        wrong.map_or(End::ClientGone, End::Wrong)
    }
}

/// Goes between a client and a run until it is over.
pub(crate) async fn relay(mut session: Session, mut source: impl Source, mut sink: impl Sink) {
    let accepted = v1::AttachAccepted { task_id: session.task_id.clone(), seat: session.seat.clone() };
    let end = match within(&session.news, sink.send(ToClient::Accepted(accepted))).await {
        Ok(()) => converse(&mut session, &mut source, &mut sink).await,
        Err(end) => end,
    };
    let exited = matches!(end, End::Exit(_));
    let closed = match end {
        // The process is ended at once, however long the client takes to go.
        End::ClientGone => {
            drop(session);
            let _ = timeout(CLOSE_WITHIN, source.leave()).await;
            return;
        }
        End::Wrong(refusal) => {
            drop(session);
            let refusing = async {
                sink.refuse(refusal).await;
                source.leave().await;
            };
            let _ = timeout(CLOSE_WITHIN, refusing).await;
            return;
        }
        End::Over(over) => closed(over),
        End::Broken => closed(session.why().await.filter(|over| *over != Over::Ended).unwrap_or(Over::Lost)),
        End::Exit(exit) => session.on_exit(exit).await,
    };
    // If the shard still counts on it, nobody talks to it any more.
    session.over = exited || session.news.borrow().over.is_some();
    let closing = async {
        sink.close(closed).await;
        source.leave().await;
    };
    let _ = timeout(CLOSE_WITHIN, closing).await;
}

async fn converse(session: &mut Session, source: &mut impl Source, sink: &mut impl Sink) -> End {
    let mut early = None;
    let caller = match await_caller(session, source, sink, &mut early).await {
        Ok(caller) => caller,
        Err(end) => return end,
    };
    let Caller { up, down } = caller;
    let over = {
        let mut news = session.news.clone();
        async move {
            let told = news.wait_for(|news| news.over.is_some_and(is_final)).await;
            let over = told.ok().and_then(|news| news.over);
            match over {
                Some(over) => End::Over(over),
                None => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        biased;
        end = over => end,
        end = outputs(session.news.clone(), up, sink) => end,
        end = inputs(source, early, down) => end,
    }
}

/// Whether nothing that the run still says matters.
fn is_final(over: Over) -> bool {
    match over {
        Over::Halted | Over::TimeUp | Over::Canceled | Over::Stopping | Over::NotStarted => true,
        // What it wrote last may be on its way, or why it was not started.
        Over::Ended | Over::Lost | Over::Unspecified => false,
    }
}

/// Waits for the worker's end. What the client says first meanwhile is kept; more is not taken from it.
async fn await_caller(
    session: &mut Session,
    source: &mut impl Source,
    sink: &mut impl Sink,
    early: &mut Option<FromClient>,
) -> Result<Caller, End> {
    let Some(mut called) = session.called.take() else { return Err(End::Broken) };
    let mut news = session.news.clone();
    let mut patience = Box::pin(sleep(CALL_WITHIN));
    let mut pings = pings();
    loop {
        let over = news.borrow_and_update().over;
        if let Some(over) = over.filter(|over| is_final(*over)) {
            return Err(End::Over(over));
        }
        tokio::select! {
            caller = &mut called => return caller.map_err(|_| End::Broken),
            said = first(source, early.is_none()) => match said {
                None => return Err(End::ClientGone),
                Some(Err(refusal)) => return Err(End::Wrong(refusal)),
                Some(Ok(said)) => *early = Some(said),
            },
            _ = pings.tick() => within(&session.news, sink.ping()).await?,
            _ = news.changed(), if over.is_none() => {}
            () = sleep(LAST_WORD), if over.is_some() => return Err(End::Over(over.unwrap_or(Over::Lost))),
            () = &mut patience => return Err(End::Broken),
        }
    }
}

/// What a client says if it is wanted, and whether it is gone in any case.
async fn first(source: &mut impl Source, wanted: bool) -> Option<Result<FromClient, Refusal>> {
    match wanted {
        true => source.next().await,
        false => source.gone().await.map(Err),
    }
}

/// Takes what the client says to the run. Ends when the client does.
async fn inputs(
    source: &mut impl Source,
    early: Option<FromClient>,
    down: mpsc::Sender<Result<v1::InteractiveDown, Status>>,
) -> End {
    let mut said = early;
    loop {
        let message = match said.take() {
            Some(FromClient::Stdin(bytes)) => Some(ToRun::Stdin(bytes)),
            Some(FromClient::Eof(eof)) => Some(ToRun::Eof(eof)),
            Some(FromClient::Resize(size)) => Some(ToRun::Resize(size)),
            Some(FromClient::Open(_)) | None => None,
        };
        if message.is_some() {
            // A command that does not read may hold this up for ever, but not longer than its client is there.
            let taken = tokio::select! {
                biased;
                taken = down.send(Ok(v1::InteractiveDown { message })) => taken,
                wrong = source.gone() => return End::left(wrong),
            };
            if taken.is_err() {
                // The worker takes no more; it is about to say why.
                return End::left(source.gone().await);
            }
        }
        match source.next().await {
            None => return End::ClientGone,
            Some(Err(refusal)) => return End::Wrong(refusal),
            Some(Ok(next)) => said = Some(next),
        }
    }
}

/// When to ask a client whether it is there.
fn pings() -> Interval {
    let mut pings = interval(PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}

/// Waits until a client has taken something. When the run is over, it has so long.
async fn within(
    news: &watch::Receiver<News>,
    taking: impl Future<Output = Result<(), Gone>>,
) -> Result<(), End> {
    let mut news = news.clone();
    let too_late = async move {
        let told = news.wait_for(|news| news.over.is_some()).await;
        match told.ok().and_then(|news| news.over) {
            Some(over) => {
                sleep(patience(over)).await;
                over
            }
            // Whoever could say so is gone, and this with it.
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        taken = taking => taken.map_err(|Gone| End::ClientGone),
        over = too_late => Err(End::Over(over)),
    }
}

/// How long a client may take nothing when its run is over.
fn patience(over: Over) -> Duration {
    match over {
        Over::Ended => UNREAD,
        Over::Halted
        | Over::TimeUp
        | Over::Canceled
        | Over::Stopping
        | Over::NotStarted
        | Over::Lost
        | Over::Unspecified => LAST_WORD,
    }
}

/// Takes what the run says to the client, and warnings.
async fn outputs(mut news: watch::Receiver<News>, mut up: Ups, sink: &mut impl Sink) -> End {
    let mut warned = 0;
    let mut until: Option<Instant> = None;
    let mut pings = pings();
    loop {
        let News { warnings, grace_ms, over } = *news.borrow_and_update();
        if warnings > warned {
            warned = warnings;
            let warning = v1::AttachWarning { grace_ms, message: warning(grace_ms) };
            if let Err(end) = within(&news, sink.send(ToClient::Warning(warning))).await {
                return end;
            }
        }
        until = match over {
            None => None,
            // What a dead process has left in its pipes comes at the pace of its client.
            Some(Over::Ended) => Some(Instant::now() + LAST_WORD),
            // What is lost may live on for a while, and talk.
            Some(_) => until.or(Some(Instant::now() + LAST_WORD)),
        };
        let taken = tokio::select! {
            said = up.next() => match said.and_then(Result::ok).and_then(|up| up.message) {
                Some(FromRun::Stdout(bytes)) => within(&news, sink.send(ToClient::Stdout(bytes))).await,
                Some(FromRun::Stderr(bytes)) => within(&news, sink.send(ToClient::Stderr(bytes))).await,
                Some(FromRun::Exit(exit)) => return End::Exit(exit),
                Some(FromRun::Hello(_)) | None => return End::Broken,
            },
            _ = news.changed(), if over.is_none() => Ok(()),
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                return End::Over(over.unwrap_or(Over::Lost));
            }
            _ = pings.tick() => within(&news, sink.ping()).await,
        };
        if let Err(end) = taken {
            return end;
        }
    }
}

fn warning(grace_ms: u64) -> String {
    format!("a task needs this slot: it will be halted in {} s", grace_ms.div_ceil(1_000))
}

fn closed(over: Over) -> v1::AttachClosed {
    let message = interactive::ended(over).text.into();
    v1::AttachClosed { over: over.into(), message, ..v1::AttachClosed::default() }
}

impl Session {
    /// Why it is over, if the shard says so soon.
    async fn why(&mut self) -> Option<Over> {
        let told = timeout(LAST_WORD, self.news.wait_for(|news| news.over.is_some())).await;
        told.ok()?.ok()?.over
    }

    /// What to say of a run that has ended.
    async fn on_exit(&mut self, exit: v1::InteractiveExit) -> v1::AttachClosed {
        let killed = exit.killed();
        let ended = match exit.outcome {
            Some(Outcome::Exited(code)) => v1::AttachClosed { exit_code: Some(code), ..closed(Over::Ended) },
            Some(Outcome::Signaled(signal)) => {
                v1::AttachClosed { signal: Some(signal), ..closed(Over::Ended) }
            }
            Some(Outcome::NotStarted(mut message)) => {
                convert::cut(&mut message, ERROR_BYTES);
                return v1::AttachClosed { message, ..closed(Over::NotStarted) };
            }
            None => return closed(Over::Lost),
        };
        // When the client hears of it, its slot is free. And if somebody wanted it to end, the shard knows who.
        match (killed, self.why().await) {
            (Killed::Unspecified, _) | (Killed::Stop | Killed::Lease, Some(Over::Ended)) => ended,
            (Killed::TimeUp, _) => closed(Over::TimeUp),
            (Killed::Stop | Killed::Lease, Some(over)) => closed(over),
            (Killed::Stop | Killed::Lease, None) => closed(Over::Lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use evenhand_core::names::Epoch;
    use tokio::task::JoinHandle;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    const RUN: RunKey = (TaskId(7), Fence { epoch: Epoch(1), dispatch: 2, nonce: 3 });

    /// A client that says what it is told to, and is there as long as the other is.
    struct Says(mpsc::Receiver<Result<FromClient, Refusal>>, mpsc::Receiver<()>);

    impl Source for Says {
        async fn next(&mut self) -> Option<Result<FromClient, Refusal>> {
            self.0.recv().await
        }

        async fn gone(&mut self) -> Option<Refusal> {
            self.1.recv().await;
            None
        }

        async fn leave(self) {}
    }

    /// A client that writes down what it hears.
    struct Hears(mpsc::Sender<String>);

    impl Sink for Hears {
        async fn send(&mut self, said: ToClient) -> Result<(), Gone> {
            let said = match said {
                ToClient::Accepted(accepted) => format!("{} on {}", accepted.task_id, accepted.seat),
                ToClient::Stdout(bytes) => format!("out {bytes:?}"),
                ToClient::Stderr(bytes) => format!("err {bytes:?}"),
                ToClient::Warning(warning) => format!("warning {}", warning.grace_ms),
                ToClient::Closed(_) => panic!("said otherwise"),
            };
            self.0.send(said).await.map_err(|_| Gone)
        }

        async fn ping(&mut self) -> Result<(), Gone> {
            Ok(())
        }

        async fn close(self, closed: v1::AttachClosed) {
            let text = interactive::text(&closed);
            let _ = self.0.send(format!("closed {} {text}", interactive::ended(closed.over()).close)).await;
        }

        async fn refuse(self, refusal: Refusal) {
            let _ = self.0.send(format!("refused {refusal}")).await;
        }
    }

    struct Stage {
        registry: Registry,
        hung_up: mpsc::UnboundedReceiver<RunKey>,
        client: mpsc::Sender<Result<FromClient, Refusal>>,
        here: mpsc::Sender<()>,
        heard: mpsc::Receiver<String>,
        relaying: JoinHandle<()>,
    }

    impl Stage {
        async fn new() -> Stage {
            let (registry, hung_up) = Registry::new();
            let session = registry.open(RUN, "0-7".into(), "w".into());
            let (client, said) = mpsc::channel(1);
            let (hears, mut heard) = mpsc::channel(1);
            let (here, there) = mpsc::channel(1);
            let relaying = tokio::spawn(relay(session, Says(said, there), Hears(hears)));
            assert_eq!(heard.recv().await.unwrap(), "0-7 on w");
            Stage { registry, hung_up, client, here, heard, relaying }
        }

        /// The worker calls.
        fn call(&self) -> (mpsc::Sender<Result<v1::InteractiveUp, Status>>, Downs) {
            let (up, ups) = mpsc::channel(1);
            (up, self.registry.call(RUN, Box::pin(ReceiverStream::new(ups))).unwrap())
        }

        async fn hears(&mut self, text: &str) {
            assert_eq!(self.heard.recv().await.as_deref(), Some(text));
        }

        /// It ended with this word, and whether the shard was told that the client is gone.
        async fn ends(mut self, text: Option<&str>, hung_up: bool) {
            assert_eq!(self.heard.recv().await.as_deref(), text);
            self.relaying.await.unwrap();
            assert_eq!(self.hung_up.try_recv().is_ok(), hung_up);
            self.registry.is_empty().await;
            assert!(self.registry.call(RUN, Box::pin(tokio_stream::empty())).is_none());
        }
    }

    fn up(message: FromRun) -> Result<v1::InteractiveUp, Status> {
        Ok(v1::InteractiveUp { message: Some(message) })
    }

    fn exit(outcome: Outcome, killed: Killed) -> Result<v1::InteractiveUp, Status> {
        up(FromRun::Exit(v1::InteractiveExit { outcome: Some(outcome), killed: killed.into() }))
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_said_arrives_and_the_exit_closes() {
        let mut stage = Stage::new().await;
        // Before the worker is there: it is kept.
        stage.client.send(Ok(FromClient::Stdin("early".into()))).await.unwrap();
        let (run, mut downs) = stage.call();
        assert!(
            stage.registry.call(RUN, Box::pin(tokio_stream::empty())).is_none(),
            "one worker calls, once"
        );
        let said =
            |down: Option<Result<v1::InteractiveDown, Status>>| down.unwrap().unwrap().message.unwrap();
        assert_eq!(said(downs.recv().await), ToRun::Stdin("early".into()));
        stage.client.send(Ok(FromClient::Eof(true))).await.unwrap();
        assert_eq!(said(downs.recv().await), ToRun::Eof(true));
        run.send(up(FromRun::Stdout(Bytes::from("a")))).await.unwrap();
        run.send(up(FromRun::Stderr(Bytes::from("b")))).await.unwrap();
        stage.hears("out b\"a\"").await;
        stage.hears("err b\"b\"").await;
        stage.registry.warn(RUN, 3_000);
        stage.hears("warning 3000").await;
        run.send(exit(Outcome::Exited(4), Killed::Unspecified)).await.unwrap();
        stage.ends(Some("closed 1000 exit 4"), false).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_gone_hangs_up_whenever_it_goes() {
        // Before the worker is there, and after; and one that does not hear any more.
        let mut stage = Stage::new().await;
        stage.client = mpsc::channel(1).0;
        stage.ends(None, true).await;

        let mut stage = Stage::new().await;
        let (run, _downs) = stage.call();
        stage.client = mpsc::channel(1).0;
        stage.ends(None, true).await;
        assert!(run.is_closed(), "the worker hears of it, too");

        let mut stage = Stage::new().await;
        let (run, _downs) = stage.call();
        stage.heard.close();
        run.send(up(FromRun::Stdout(Bytes::from("a")))).await.unwrap();
        stage.ends(None, true).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_gone_hangs_up_also_when_nothing_is_taken_from_it() {
        // It has spoken, and the worker is not there yet.
        let mut stage = Stage::new().await;
        stage.client.send(Ok(FromClient::Stdin("early".into()))).await.unwrap();
        stage.here = mpsc::channel(1).0;
        stage.ends(None, true).await;
        // The command does not read.
        let mut stage = Stage::new().await;
        let (_run, downs) = stage.call();
        for _ in 0..TO_WORKER + 2 {
            stage.client.send(Ok(FromClient::Stdin("more".into()))).await.unwrap();
        }
        stage.here = mpsc::channel(1).0;
        stage.ends(None, true).await;
        assert_eq!(downs.len(), TO_WORKER, "it was held up");
        // The worker takes no more, and does not say why.
        let mut stage = Stage::new().await;
        let (_run, downs) = stage.call();
        drop(downs);
        stage.client.send(Ok(FromClient::Stdin("more".into()))).await.unwrap();
        stage.here = mpsc::channel(1).0;
        stage.ends(None, true).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_is_not_waited_for_when_its_run_is_over() {
        for over in [Over::Ended, Over::Lost] {
            let stage = Stage::new().await;
            let (run, _downs) = stage.call();
            for _ in 0..3 {
                run.send(up(FromRun::Stdout(Bytes::from("a")))).await.unwrap();
            }
            stage.registry.over(RUN, over);
            stage.registry.is_empty().await;
            stage.relaying.await.unwrap();
        }
        // Whoever reads slowly gets all of it.
        let mut stage = Stage::new().await;
        let (run, _downs) = stage.call();
        stage.registry.over(RUN, Over::Ended);
        let running = tokio::spawn(async move {
            for _ in 0..3 {
                run.send(up(FromRun::Stdout(Bytes::from("a")))).await.unwrap();
            }
            run.send(exit(Outcome::Exited(0), Killed::Unspecified)).await.unwrap();
            run
        });
        for _ in 0..2 {
            sleep(UNREAD / 2).await;
            stage.hears("out b\"a\"").await;
        }
        stage.hears("out b\"a\"").await;
        stage.ends(Some("closed 1000 exit 0"), false).await;
        running.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_speaks_nonsense_is_told_so_and_hangs_up() {
        let stage = Stage::new().await;
        let _run = stage.call();
        stage.client.send(Err(Refusal::invalid("frame", "is wrong"))).await.unwrap();
        stage.ends(Some("refused invalid: frame: is wrong"), true).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_shards_word_closes_at_once_also_a_client_that_does_not_read() {
        for (over, text) in [
            (Over::Halted, "closed 4001 it was halted to make room; try again later"),
            (Over::Canceled, "closed 4004 it was canceled"),
            (Over::TimeUp, "closed 4002 it took longer than it was allowed to"),
        ] {
            let mut stage = Stage::new().await;
            let (run, _downs) = stage.call();
            // More than it takes.
            run.send(up(FromRun::Stdout(Bytes::from("a")))).await.unwrap();
            run.send(up(FromRun::Stdout(Bytes::from("b")))).await.unwrap();
            run.send(up(FromRun::Stdout(Bytes::from("c")))).await.unwrap();
            stage.registry.over(RUN, over);
            // The first word counts.
            stage.registry.over(RUN, Over::Lost);
            stage.hears("out b\"a\"").await;
            stage.ends(Some(text), false).await;
        }
        // Before the worker is there.
        let stage = Stage::new().await;
        stage.registry.stop();
        stage.ends(Some("closed 1012 the server is stopping; try again in a moment"), false).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_run_says_last_is_waited_for_when_it_has_ended() {
        let mut stage = Stage::new().await;
        stage.registry.over(RUN, Over::Ended);
        let (run, _downs) = stage.call();
        run.send(up(FromRun::Stdout(Bytes::from("late")))).await.unwrap();
        stage.hears("out b\"late\"").await;
        run.send(exit(Outcome::Signaled(9), Killed::Unspecified)).await.unwrap();
        stage.ends(Some("closed 1000 signal 9"), false).await;
        // Why it was not started, also when the shard has heard of it first.
        let stage = Stage::new().await;
        stage.registry.over(RUN, Over::Lost);
        let (run, _downs) = stage.call();
        run.send(exit(Outcome::NotStarted("no hands".into()), Killed::Unspecified)).await.unwrap();
        stage.ends(Some("closed 4005 no hands"), false).await;
        // But not for ever, even if it talks on.
        let stage = Stage::new().await;
        let (run, downs) = stage.call();
        stage.registry.over(RUN, Over::Lost);
        let Stage { registry, hung_up, client, here, mut heard, relaying } = stage;
        let talking = tokio::spawn(async move {
            while run.send(up(FromRun::Stdout(Bytes::from("more")))).await.is_ok() {
                sleep(LAST_WORD / 3).await;
            }
            drop(downs);
        });
        let mut last = String::new();
        while let Some(next) = heard.recv().await {
            last = next;
        }
        assert_eq!(last, "closed 4003 its worker is gone");
        talking.await.unwrap();
        relaying.await.unwrap();
        drop((registry, hung_up, client, here));
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_that_was_killed_is_over_for_the_reason_that_the_shard_has() {
        for (over, text) in [
            (Some(Over::Halted), "closed 4001 it was halted to make room; try again later"),
            (Some(Over::Ended), "closed 1000 signal 15"),
            (None, "closed 4003 its worker is gone"),
        ] {
            let stage = Stage::new().await;
            let (run, _downs) = stage.call();
            run.send(exit(Outcome::Signaled(15), Killed::Stop)).await.unwrap();
            tokio::task::yield_now().await;
            if let Some(over) = over {
                stage.registry.over(RUN, over);
            }
            stage.ends(Some(text), false).await;
        }
        let stage = Stage::new().await;
        let (run, _downs) = stage.call();
        run.send(exit(Outcome::Signaled(15), Killed::TimeUp)).await.unwrap();
        stage.ends(Some("closed 4002 it took longer than it was allowed to"), false).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_never_calls_or_breaks_off_is_gone() {
        let stage = Stage::new().await;
        stage.ends(Some("closed 4003 its worker is gone"), true).await;
        let stage = Stage::new().await;
        let (run, _downs) = stage.call();
        drop(run);
        stage.ends(Some("closed 4003 its worker is gone"), true).await;
    }
}
