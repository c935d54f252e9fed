//! The loop around the pure worker of `evenhand-core`: it moves bytes between the server and what runs tasks,
//! keeps the connection, and tells the time. What it says to the server gathers while the last message is
//! being sent.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use evenhand_api::{ERROR_BYTES, MESSAGE_BYTES, PROTOCOL, RESULT_BYTES, convert, errors, v1};
use evenhand_core::Refusal;
use evenhand_core::names::{Epoch, Fence, Millis, Seat, ShardId, StoreId, TaskId};
use evenhand_core::refusal::Kind;
use evenhand_core::worker::{self as core, Down, Effect, Exit, Input};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;
use tracing::{debug, info, warn};

use super::drain::{Drain, Told};
use super::handlers::{Board, Word};
use super::interactive::Call;
use super::{Offer, WorkerError};
use crate::client::endpoint;
use crate::guardian::{Instance, boottime_ms};

/// The one shard there is, until servers have several.
const SHARD: ShardId = ShardId(0);
/// Messages that may wait to be sent; what comes meanwhile gathers.
const OUTGOING: usize = 2;
/// Things that happen in one round at most.
const HAPPENINGS: usize = 1_024;
/// The first wait before another try to connect, and the longest.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a try may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How long a guardian or a drained worker tries to say that it is over.
const SAY_DEAD_WITHIN: Duration = Duration::from_secs(3);
/// Bytes of ends in one message. With these, the output below and the progress of every slot, a message is within
/// `MESSAGE_BYTES`.
const RESULTS: usize = 8 * 1024 * 1024;
/// Lines of output that gather at most, and their bytes; more are counted.
const LINES: usize = 4_096;
const LINE_BYTES: usize = 4 * 1024 * 1024;
/// Between two times that progress is told. The last word of a run goes with its end, whenever that is.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// Which run.
pub(crate) type RunKey = (TaskId, Fence);

/// A run to start.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) run: RunKey,
    pub(crate) task_id: String,
    pub(crate) queue: Arc<str>,
    pub(crate) key: String,
    pub(crate) attempt: u32,
    pub(crate) payload: Bytes,
    /// Its input files.
    pub(crate) files: Vec<v1::File>,
    /// Empty: nobody said.
    pub(crate) content_type: String,
    /// How long it may take; 0: as long as it likes.
    pub(crate) max_duration_ms: u64,
    /// Somebody talks to it, in this way.
    pub(crate) interactive: Option<(v1::Interactive, Call)>,
}

/// What happens to runs.
#[derive(Debug)]
pub(crate) enum Happening {
    Output {
        run: RunKey,
        line: String,
    },
    /// A run is over and nothing of it is left. No word of it: it was killed because the lease was over.
    Ended {
        run: RunKey,
        word: Option<Word>,
        lines_dropped: u64,
        /// From its start to its end, by a clock that does not jump.
        ran: Duration,
    },
    /// A run was not started, and will not be.
    NotStarted(RunKey),
    /// Nothing more can be run.
    Over(WorkerError),
}

/// How tasks are run: in this process, or as commands.
pub(crate) trait Runner {
    /// Starts a run; it is answered by [`Happening::Ended`], whatever becomes of it.
    fn start(&mut self, job: Job);
    /// Ends a run, with grace.
    fn stop(&mut self, run: RunKey);
    /// Gives a run this long from its start, whatever it was told before.
    fn deadline(&mut self, run: RunKey, max_duration_ms: u64);
    /// Kills everything.
    fn kill_all(&mut self);
    /// Everything may live until then, in milliseconds since boot, and must be dead soon after.
    fn lease(&mut self, until_ms: u64);
    /// What happens.
    fn happenings(&mut self) -> &mut mpsc::Receiver<Happening>;
    /// How far runs are, as far as they say.
    fn board(&self) -> Arc<Board>;
    /// Frees the seat. Nothing runs any more.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// A connection.
struct Link {
    out: mpsc::Sender<v1::Up>,
    incoming: Streaming<v1::Down>,
}

/// See the module's text.
pub(crate) struct Runtime<R> {
    grpc: WorkerSessionsClient<Channel>,
    server: String,
    seat: Seat,
    instance: Instance,
    core: core::Worker,
    runner: R,
    /// The names of queues, as this session's owner numbers them.
    queues: HashMap<u32, Arc<str>>,
    /// Runs as the server described them.
    runs: HashMap<RunKey, v1::Run>,
    /// Starts that the core has not decided on yet.
    offered: HashMap<RunKey, v1::Start>,
    /// Ends that are not acknowledged.
    ended: HashMap<RunKey, v1::Ended>,
    news: v1::News,
    /// Lines in the news, and their bytes.
    lines: usize,
    line_bytes: usize,
    board: Arc<Board>,
    /// When progress may be told again.
    progress_at: Instant,
    link: Option<Link>,
    connecting: bool,
    pause: Duration,
    connect_at: Instant,
    wake: Option<Millis>,
    refusal: Option<Refusal>,
    exit: Option<Exit>,
    /// Said once for each time that the server is away.
    complained: bool,
}

impl<R: Runner> Runtime<R> {
    pub(crate) fn new(
        server: &str,
        offer: &Offer,
        instance: Instance,
        runner: R,
    ) -> Result<Runtime<R>, WorkerError> {
        let seat = Seat::new(&instance.seat)?;
        let core = core::Worker::new(core::Offer {
            seat: seat.clone(),
            token: instance.token,
            process: instance.life,
            slots: offer.slots,
            queues: offer.queues()?,
        });
        Ok(Runtime {
            grpc: sessions(server)?,
            server: server.into(),
            seat,
            instance,
            core,
            board: runner.board(),
            progress_at: Instant::now(),
            runner,
            queues: HashMap::new(),
            runs: HashMap::new(),
            offered: HashMap::new(),
            ended: HashMap::new(),
            news: v1::News::default(),
            lines: 0,
            line_bytes: 0,
            link: None,
            connecting: false,
            pause: PAUSE,
            connect_at: Instant::now(),
            wake: None,
            refusal: None,
            exit: None,
            complained: false,
        })
    }

    /// Works until it is drained or refused.
    pub(super) async fn run(mut self, drain: Drain) -> Result<(), WorkerError> {
        info!(seat = %self.seat, life = self.instance.life, server = self.server, "the worker begins");
        let result = self.work(drain).await;
        let drained = result.is_ok() && self.core.is_clean();
        let Runtime { runner, instance, server, .. } = self;
        runner.end().await;
        // All its processes are gone: the server need not wait to find out.
        say_dead(&server, &instance, drained).await;
        result
    }

    async fn work(&mut self, mut drain: Drain) -> Result<(), WorkerError> {
        let mut effects = Vec::new();
        let mut happenings = Vec::with_capacity(HAPPENINGS);
        let (to_connected, mut connected) = mpsc::channel::<Result<Link, Refusal>>(1);
        loop {
            self.perform(&mut effects);
            if let Some(exit) = self.exit {
                return match exit {
                    Exit::Drained => Ok(()),
                    Exit::Refused => Err(self.refusal.take().unwrap_or_else(unreachable).into()),
                };
            }
            self.send_news();
            let idle = self.link.is_none() && !self.connecting && self.core.wants_session();
            if idle && Instant::now() >= self.connect_at {
                self.connecting = true;
                let (grpc, connected) = (self.grpc.clone(), to_connected.clone());
                tokio::spawn(async move { drop(connected.send(connect(grpc).await).await) });
            }
            let now = boottime_ms();
            let mut sleep = self.wake.map_or(1_000, |at| at.0.saturating_sub(now)).min(1_000);
            if idle && !self.connecting {
                let left = self.connect_at.saturating_duration_since(Instant::now());
                sleep = sleep.min(left.as_millis() as u64 + 1);
            }
            let board = self.board.clone();
            let left = self.progress_at.saturating_duration_since(Instant::now());
            // Whoever has just been told of progress is told again later.
            let tells = self.link.is_some() && left.is_zero();
            if self.link.is_some() && !tells && !board.is_empty() {
                sleep = sleep.min(left.as_millis() as u64 + 1);
            }
            let full = self.link.as_ref().filter(|_| has_news(&self.news)).map(|link| link.out.clone());
            tokio::select! {
                biased;
                // First, so that nothing is taken after it was asked to take nothing.
                told = drain.next() => match told {
                    Told::Drain => {
                        info!("draining: no more work is taken, what runs goes on");
                        self.step(Input::Drain, &mut effects);
                    }
                    Told::Quit => return Err(quit().into()),
                },
                down = incoming(&mut self.link) => match down {
                    Ok(down) => self.on_down(down, &mut effects),
                    Err(why) => self.on_broken(&why, &mut effects),
                },
                Some(link) = connected.recv() => self.on_connected(link, &mut effects),
                _ = self.runner.happenings().recv_many(&mut happenings, HAPPENINGS) => {
                    for happening in happenings.drain(..) {
                        self.on_happening(happening, &mut effects)?;
                    }
                }
                () = room(full) => {}
                () = board.said(), if tells => {}
                () = tokio::time::sleep(Duration::from_millis(sleep)) => {}
            }
            // What else has happened meanwhile goes into the same message.
            for _ in 0..HAPPENINGS {
                let Ok(happening) = self.runner.happenings().try_recv() else { break };
                self.on_happening(happening, &mut effects)?;
            }
            let now = Millis(boottime_ms());
            if self.wake.is_some_and(|at| at <= now) {
                self.wake = None;
                self.step(Input::Tick, &mut effects);
            }
        }
    }

    fn step(&mut self, input: Input, effects: &mut Vec<Effect>) {
        self.core.step(Millis(boottime_ms()), input, effects);
    }

    // --- the connection ---

    fn on_connected(&mut self, link: Result<Link, Refusal>, effects: &mut Vec<Effect>) {
        self.connecting = false;
        match link {
            Ok(link) => {
                self.link = Some(link);
                self.news = v1::News::default();
                (self.lines, self.line_bytes) = (0, 0);
                self.step(Input::Connected, effects);
            }
            Err(refusal) => {
                if !std::mem::replace(&mut self.complained, true) {
                    warn!(why = %refusal.message, server = self.server, "the server is away; trying again until it is back");
                }
                self.later();
            }
        }
    }

    /// The next try comes after a while that grows, and is not the same for all workers.
    fn later(&mut self) {
        let jitter =
            std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), self.instance.life) % 500;
        self.connect_at = Instant::now() + self.pause.mul_f64(0.75 + jitter as f64 / 1_000.0);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    fn on_broken(&mut self, why: &str, effects: &mut Vec<Effect>) {
        debug!(why, "the connection to the server is gone");
        self.link = None;
        self.later();
        self.step(Input::Disconnected, effects);
    }

    fn send_news(&mut self) {
        let Some(link) = &self.link else { return };
        let now = Instant::now();
        let tells = now >= self.progress_at && !self.board.is_empty();
        if !tells && !has_news(&self.news) {
            return;
        }
        let Ok(permit) = link.out.try_reserve() else { return };
        if tells {
            self.progress_at = now + PROGRESS_EVERY;
        }
        (self.lines, self.line_bytes) = (0, 0);
        let news = next_message(&mut self.news, &self.board, tells);
        permit.send(v1::Up { message: Some(v1::up::Message::News(news)) });
    }

    fn on_down(&mut self, down: v1::Down, effects: &mut Vec<Effect>) {
        let v1::Down {
            epoch,
            queues,
            session,
            welcome,
            answer,
            start,
            stop,
            acknowledged,
            deadlines,
            absence_ms,
            die,
            drain,
        } = down;
        let epoch = Epoch(epoch);
        let mut say = |runtime: &mut Self, down: Down| {
            runtime.step(Input::Down { epoch, session, down }, effects);
            runtime.perform(effects);
        };
        if let Some(v1::Welcome { store_id, nonce, thresholds, worker_set }) = welcome {
            match thresholds.as_ref().map(convert::parse_thresholds) {
                Some(Ok(thresholds)) => {
                    let set = worker_set.as_ref().map(convert::parse_worker_set);
                    say(self, Down::Welcome { store: StoreId(store_id), nonce, thresholds, set });
                    if self.core.is_in() {
                        info!(seat = %self.seat, epoch = %epoch, "the server lets the worker in");
                        self.pause = PAUSE;
                        self.complained = false;
                    }
                }
                Some(Err(_)) | None => warn!("the server's thresholds make no sense; the welcome is ignored"),
            }
        }
        if let Some(answer) = answer {
            let set = answer.worker_set.as_ref().map(convert::parse_worker_set);
            say(self, Down::Answer { number: answer.number, set });
        }
        self.queues.extend(queues.into_iter().map(|queue| (queue.id, queue.name.into())));
        // An interactive run may be stopped to make room for what is started: that is heard first.
        let (first, stop): (Vec<_>, Vec<_>) =
            stop.iter().map(convert::parse_run_id).partition(|(task, _)| task.is_interactive());
        for (task, fence) in first {
            say(self, Down::Stop { task, fence });
        }
        for start in start {
            let parsed = start.run.as_ref().map(convert::parse_run);
            let Some(Ok(run)) = parsed else {
                warn!("the server wants a run started that makes no sense");
                continue;
            };
            let (key, number) = ((run.task, run.fence), start.number);
            self.offered.insert(key, start);
            say(self, Down::Start { number, run });
            if !self.core.holds_up(key.0) {
                self.offered.remove(&key);
            }
        }
        for v1::Deadline { run, max_duration_ms, asked_ms } in &deadlines {
            if let Some((task, fence)) = run.as_ref().map(convert::parse_run_id) {
                let (limit_ms, max_duration_ms) = (*max_duration_ms, *asked_ms);
                say(self, Down::Limit { task, fence, limit_ms, max_duration_ms });
            }
        }
        for (task, fence) in stop {
            say(self, Down::Stop { task, fence });
        }
        for id in &acknowledged {
            let (task, fence) = convert::parse_run_id(id);
            say(self, Down::Acknowledge { task, fence });
        }
        if drain {
            info!("asked to drain: no more work is taken, what runs goes on");
            say(self, Down::Drain);
        }
        if let Some(ms) = absence_ms {
            say(self, Down::Absence { ms });
            info!(seconds = ms / 1000, "the server stops for a while; what runs goes on");
        }
        if let Some(v1::Die { error, then }) = die {
            let refusal = error.as_ref().map_or_else(unreachable, errors::refusal_of);
            let then = convert::parse_then(then);
            if !self.core.is_in() || then != evenhand_core::owner::messages::Then::Retry {
                warn!(why = %refusal, ?then, "the server ends the session");
            }
            if let Some(ms) = refusal.retry_after_ms {
                self.pause = self.pause.max(Duration::from_millis(ms).min(PAUSE_MAX));
            }
            self.refusal = Some(refusal);
            // Said by whoever holds the connection: it need not know the session to end it.
            let session = self.core.session();
            self.step(Input::Down { epoch: Epoch(u64::MAX), session, down: Down::Die { then } }, effects);
        }
    }

    // --- what runs ---

    fn on_happening(&mut self, happening: Happening, effects: &mut Vec<Effect>) -> Result<(), WorkerError> {
        match happening {
            Happening::Output { run, line } => self.on_output(run, Some(line), 0),
            Happening::Ended { run, word, lines_dropped, ran } => {
                if lines_dropped > 0 {
                    self.on_output(run, None, lines_dropped);
                }
                let wire = self.runs.remove(&run);
                // Killed, and not because we said so: the owner must hear of it.
                let unasked = word.is_none() && !self.core.is_killing();
                let word = match unasked {
                    true => Some(Word::failed("it was killed, because its guardian heard nothing".into())),
                    false => word,
                };
                let end = word.as_ref().map(|word| word.end);
                if let (Some(word), Some(wire)) = (word, wire) {
                    let Word { end, result, error, retry_after } = word;
                    let ended = v1::Ended {
                        run: Some(wire),
                        end: convert::end(end).into(),
                        result: result.slice(..result.len().min(RESULT_BYTES)),
                        error: cut(error),
                        retry_after_ms: retry_after.map(|after| after.as_millis() as u64),
                        ran_ms: Some(ran.as_millis() as u64),
                    };
                    self.ended.insert(run, ended);
                }
                let (task, fence) = run;
                self.step(Input::Ended { task, fence, end }, effects);
            }
            Happening::NotStarted(run) => {
                self.runs.remove(&run);
                let (task, fence) = run;
                self.step(Input::NotStarted { task, fence }, effects);
            }
            Happening::Over(error) => return Err(error),
        }
        Ok(())
    }

    fn on_output(&mut self, run: RunKey, line: Option<String>, dropped: u64) {
        let id = convert::run_id(run.0, run.1);
        let line = line.map(cut);
        if self.link.is_none() || self.news.output.len() >= LINES {
            return; // nobody would hear it, or too many are talking
        }
        let bytes = line.as_ref().map_or(0, String::len);
        let fits = self.lines < LINES && self.line_bytes + bytes <= LINE_BYTES;
        let same = |output: &v1::Output| output.run == Some(id);
        if !self.news.output.last().is_some_and(same) {
            self.news.output.push(v1::Output { run: Some(id), lines: Vec::new(), dropped: 0 });
        }
        if let Some(output) = self.news.output.last_mut() {
            output.dropped += dropped;
            match line {
                Some(line) if fits => {
                    self.lines += 1;
                    self.line_bytes += bytes;
                    output.lines.push(line);
                }
                Some(_) => output.dropped += 1,
                None => {}
            }
        }
    }

    fn perform(&mut self, effects: &mut Vec<Effect>) {
        for effect in effects.drain(..) {
            match effect {
                Effect::Hello(hello) => {
                    let running = hello.running.iter().map(convert::run);
                    let ended =
                        hello.ended.iter().filter_map(|(run, _)| self.ended.get(&(run.task, run.fence)));
                    let hello = convert::hello(&hello, SHARD, running.collect(), all_ends(ended));
                    let up = v1::Up { message: Some(v1::up::Message::Hello(hello)) };
                    if let Some(link) = &self.link {
                        // The first message of a connection always fits.
                        drop(link.out.try_send(up));
                    }
                }
                Effect::Beat(beat) => {
                    self.news.heartbeat = Some(v1::Heartbeat {
                        number: beat.number,
                        answered: beat.answered,
                        worker_set: beat.set.map(convert::worker_set),
                    });
                }
                Effect::Ended { run, .. } => {
                    if let Some(ended) = self.ended.get(&(run.task, run.fence)) {
                        self.news.ended.push(v1::RunEnded {
                            run: Some(convert::run_id(run.task, run.fence)),
                            attempt: run.attempt.into(),
                            end: ended.end,
                            result: ended.result.clone(),
                            error: ended.error.clone(),
                            retry_after_ms: ended.retry_after_ms,
                            ran_ms: ended.ran_ms,
                        });
                    }
                }
                Effect::Refuse { task, fence } => {
                    self.offered.remove(&(task, fence));
                    self.news.refused.push(convert::run_id(task, fence));
                }
                Effect::Offer { slots } => self.news.slots = Some(slots),
                Effect::Start { run } => self.start((run.task, run.fence)),
                Effect::Limit { task, fence, limit_ms } => {
                    if let Some(start) = self.offered.get_mut(&(task, fence))
                        && let Some(run) = &mut start.run
                    {
                        run.max_duration_ms = limit_ms; // it has not begun
                    }
                    self.runner.deadline((task, fence), limit_ms);
                }
                Effect::Stop { task, fence } => self.runner.stop((task, fence)),
                Effect::Forget { task, fence } => drop(self.ended.remove(&(task, fence))),
                Effect::Lease { until } => self.runner.lease(until.0),
                Effect::KillAll => {
                    if !self.runs.is_empty() {
                        warn!(runs = self.runs.len(), "the lease is over: what runs is killed");
                    }
                    self.offered.clear();
                    self.runner.kill_all();
                }
                Effect::Disconnect => {
                    self.link = None;
                    self.later();
                }
                Effect::Exit(exit) => self.exit = Some(exit),
                Effect::Wake { at } => self.wake = Some(at),
            }
        }
    }

    fn start(&mut self, key: RunKey) {
        let Some(start) = self.offered.remove(&key) else { return };
        let Some(run) = start.run else { return };
        let hello = v1::InteractiveHello {
            protocol: PROTOCOL,
            shard: SHARD.0,
            session: self.core.session(),
            run: Some(convert::run_id(key.0, key.1)),
        };
        let call = || Call { server: self.server.clone(), hello };
        let interactive = start.interactive.map(|asked| (asked, call()));
        self.runner.start(Job {
            run: key,
            task_id: convert::task_id(SHARD, key.0),
            queue: self.queues.get(&run.queue_id).cloned().unwrap_or_default(),
            key: run.key.clone(),
            attempt: run.attempt,
            payload: start.payload,
            files: start.files,
            content_type: start.content_type,
            max_duration_ms: run.max_duration_ms,
            interactive,
        });
        self.runs.insert(key, run);
    }
}

fn unreachable() -> Refusal {
    Refusal::new(Kind::Internal, "", "the server ended the session and did not say why")
}

/// Told by a second signal.
fn quit() -> Refusal {
    let what = "stopped at once, by a second signal: what ran will be run again";
    Refusal::new(Kind::Unavailable, "", what)
}

/// What is said next: all the news, but only as many ends as fit; the others stay. The progress of every run, if it is
/// time to tell it, and otherwise of those whose ends are told: a server takes what a run said before the ends of the
/// same message, so that neither waits for the other.
fn next_message(news: &mut v1::News, board: &Board, tells: bool) -> v1::News {
    let mut next = std::mem::take(news);
    news.ended = next.ended.split_off(fit(&next.ended));
    let said = if tells {
        board.take()
    } else {
        board.take_of(next.ended.iter().filter_map(|ended| ended.run.as_ref()).map(convert::parse_run_id))
    };
    let wire = |((task, fence), progress)| v1::RunProgress {
        run: Some(convert::run_id(task, fence)),
        progress: Some(progress),
    };
    next.progress = said.into_iter().map(wire).collect();
    next
}

/// How many ends fit into one message.
fn fit(ended: &[v1::RunEnded]) -> usize {
    let mut bytes = 0;
    let fit = ended.iter().take_while(|ended| {
        bytes += ended.encoded_len();
        bytes <= RESULTS
    });
    fit.count().max(1).min(ended.len())
}

/// Every end is named in a hello, or it would count as never started, and how long it ran; results only as far as
/// they fit.
fn all_ends<'a>(ended: impl Iterator<Item = &'a v1::Ended>) -> Vec<v1::Ended> {
    let mut bytes = 0;
    let named = ended.map(|ended| {
        bytes += ended.result.len() + ended.error.len();
        match bytes <= RESULTS {
            true => ended.clone(),
            false => {
                let v1::Ended { end, ran_ms, .. } = *ended;
                v1::Ended { run: ended.run.clone(), end, ran_ms, ..v1::Ended::default() }
            }
        }
    });
    named.collect()
}

fn has_news(news: &v1::News) -> bool {
    let v1::News { heartbeat, ended, refused, output, slots, progress } = news;
    let said = !output.is_empty() || !progress.is_empty();
    heartbeat.is_some() || !ended.is_empty() || !refused.is_empty() || said || slots.is_some()
}

/// An error or a line, no longer than it may be.
pub(super) fn cut(mut text: String) -> String {
    convert::cut(&mut text, ERROR_BYTES);
    text
}

fn sessions(server: &str) -> Result<WorkerSessionsClient<Channel>, Refusal> {
    Ok(WorkerSessionsClient::new(endpoint(server)?.connect_lazy())
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(MESSAGE_BYTES))
}

async fn connect(mut grpc: WorkerSessionsClient<Channel>) -> Result<Link, Refusal> {
    let (out, outgoing) = mpsc::channel(OUTGOING);
    let session = grpc.session(ReceiverStream::new(outgoing));
    match tokio::time::timeout(CONNECT_WITHIN, session).await {
        Ok(Ok(answer)) => Ok(Link { out, incoming: answer.into_inner() }),
        Ok(Err(status)) => Err(errors::refusal(&status)),
        Err(_) => Err(Refusal::new(Kind::Unavailable, "", "the server did not answer in time")),
    }
}

/// The next message; for ever, if there is no connection.
async fn incoming(link: &mut Option<Link>) -> Result<v1::Down, String> {
    match link {
        Some(link) => match link.incoming.message().await {
            Ok(Some(down)) => Ok(down),
            Ok(None) => Err("the server closed it".into()),
            Err(status) => Err(status.message().into()),
        },
        None => std::future::pending().await,
    }
}

/// Waits until another message can be sent, if one waits to be.
async fn room(full: Option<mpsc::Sender<v1::Up>>) {
    match full {
        Some(out) => drop(out.reserve().await),
        None => std::future::pending().await,
    }
}

/// Tells a server that this life of a seat is over and nothing of it is left, so that it does not wait; and whether it
/// drained, so that what was on its way to it counts as never started. Tries for a moment; the server finds out by
/// itself otherwise.
pub async fn say_dead(server: &str, instance: &Instance, drained: bool) {
    let said = async {
        let mut grpc = sessions(server).ok()?;
        loop {
            let request = v1::DeadRequest {
                protocol: PROTOCOL,
                shard: SHARD.0,
                seat: instance.seat.clone(),
                token: instance.token,
                process_life: instance.life,
                drained,
            };
            match grpc.dead(request).await {
                Ok(_) => return Some(()),
                Err(_) => tokio::time::sleep(PAUSE * 4).await,
            }
        }
    };
    if tokio::time::timeout(SAY_DEAD_WITHIN, said).await.is_err() {
        debug!(seat = instance.seat, "the server could not be told that the worker is over");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(task: u64) -> RunKey {
        (TaskId(task), Fence { epoch: Epoch(1), dispatch: task, nonce: 0 })
    }

    fn ended(task: u64, bytes: usize) -> v1::RunEnded {
        let (task, fence) = run(task);
        v1::RunEnded {
            run: Some(convert::run_id(task, fence)),
            result: vec![0; bytes].into(),
            ..v1::RunEnded::default()
        }
    }

    fn output(task: u64) -> v1::Output {
        let (task, fence) = run(task);
        v1::Output { run: Some(convert::run_id(task, fence)), lines: vec!["x".into()], dropped: 0 }
    }

    fn tasks(said: &v1::News) -> Vec<u64> {
        let mut tasks: Vec<u64> =
            said.progress.iter().filter_map(|said| said.run.as_ref()).map(|run| run.task).collect();
        tasks.sort_unstable();
        tasks
    }

    #[test]
    fn an_end_waits_neither_for_output_nor_for_progress_and_does_not_hurry_that_of_others() {
        let board = Board::default();
        for task in 1..=3 {
            board.say(run(task), v1::Progress::default());
        }
        let mut news =
            v1::News { output: vec![output(1), output(2)], ended: vec![ended(1, 1)], ..v1::News::default() };
        let sent = next_message(&mut news, &board, false);
        assert_eq!((sent.output.len(), sent.ended.len()), (2, 1), "what others say does not hold it up");
        assert_eq!(tasks(&sent), [1], "its own last word, and no one else's");
        assert_eq!(tasks(&next_message(&mut news, &board, true)), [2, 3], "theirs, when it is time");
        assert!(!has_news(&news));
    }

    #[test]
    fn ends_that_do_not_fit_go_with_the_next_message() {
        let board = Board::default();
        board.say(run(2), v1::Progress::default());
        let ends = vec![ended(1, RESULTS - 100), ended(2, 200), ended(3, 200)];
        let mut news = v1::News { output: vec![output(2)], ended: ends, ..v1::News::default() };
        let sent = next_message(&mut news, &board, false);
        assert_eq!((sent.output.len(), sent.ended.len(), tasks(&sent)), (1, 1, vec![]));
        let sent = next_message(&mut news, &board, false);
        assert_eq!((sent.ended.len(), tasks(&sent)), (2, vec![2]));
    }

    #[test]
    fn a_hello_names_every_end_and_how_long_it_ran_with_as_many_results_as_fit() {
        let ended = |bytes: usize, ran_ms: u64| v1::Ended {
            run: Some(v1::Run::default()),
            result: vec![0; bytes].into(),
            ran_ms: Some(ran_ms),
            ..v1::Ended::default()
        };
        let named = all_ends([ended(RESULTS - 100, 7), ended(200, 70), ended(200, 700)].iter());
        let said: Vec<_> = named.iter().map(|ended| (ended.result.len(), ended.ran_ms)).collect();
        assert_eq!(said, [(RESULTS - 100, Some(7)), (0, Some(70)), (0, Some(700))]);
    }

    #[test]
    fn the_largest_message_is_within_bounds() {
        let slots = evenhand_core::bounds::SLOTS_PER_WORKER as usize;
        let a_progress = v1::RunProgress {
            run: Some(v1::RunId { task: u64::MAX, epoch: u64::MAX, dispatch: u64::MAX, nonce: u64::MAX }),
            progress: Some(v1::Progress {
                fraction: Some(0.5),
                message: "x".repeat(evenhand_api::PROGRESS_BYTES),
            }),
        };
        // Tags and lengths are at most 8 bytes each.
        let per_run = a_progress.encoded_len() + 8;
        let refused_and_output = (slots + LINES) * 64 + LINES * 8;
        assert!(RESULTS + LINE_BYTES + slots * per_run + slots * 8 + refused_and_output < MESSAGE_BYTES);
    }
}
