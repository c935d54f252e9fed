//! Very many workers in one process: each is the worker of `evenhand-core` with a session of its own, and nothing else. What
//! it is given ends at once, or with it. Like real ones they dial again after a pause that grows; unlike them they can be told to dial
//! as soon as there is a server, and to vanish without a word.

use std::time::{Duration, Instant};

use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use evenhand_api::{convert, v1};
use evenhand_core::life::End;
use evenhand_core::names::{Epoch, Millis, QueueName, Seat, ShardId, StoreId};
use evenhand_core::worker::{Down, Effect, Input, Offer, Worker};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use super::load::mixed;
use super::target::Target;
use crate::Failure;

/// The pauses of real workers between two tries to connect.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Between two tries of one that was told that the server is there.
const AT_ONCE: Duration = Duration::from_millis(2);
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const SHARD: ShardId = ShardId(0);

/// When a worker dials again.
#[derive(Clone, Debug)]
pub(crate) enum Dial {
    /// After a pause, as real workers do.
    Paused,
    /// As soon as this says that the server listens.
    AtOnce(watch::Receiver<bool>),
}

/// What workers see, each with its number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// An owner of this epoch let it in. It had dialed at this time.
    Welcomed { worker: usize, epoch: u64, dialed: Instant, at: Instant },
    /// A task began.
    Began { at: Instant },
}

/// When one leaves without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    Never,
    /// So long after it has said hello.
    AfterHello(Duration),
    /// As soon as it is let in, before it has said anything more.
    AtWelcome,
}

/// A worker to be.
#[derive(Clone, Debug)]
pub(crate) struct One {
    pub(crate) number: usize,
    pub(crate) seat: String,
    pub(crate) queue: String,
    /// The life of its seat.
    pub(crate) life: u64,
    pub(crate) dial: Dial,
    /// If it leaves, it takes what it runs with it.
    pub(crate) leaves: Leaves,
    pub(crate) events: mpsc::UnboundedSender<Event>,
}

impl One {
    /// Lives until it leaves, or is dropped: then nobody is told either.
    pub(crate) async fn live(self, url: &str) -> Result<(), Failure> {
        let offer = Offer {
            seat: Seat::new(&self.seat)?,
            token: 1,
            process: self.life,
            slots: 1,
            queues: vec![(QueueName::new(&self.queue)?, convert::weight(1_000)?)],
        };
        let endpoint = Endpoint::from_shared(url.to_string()).map_err(Failure::new)?;
        let endpoint = endpoint.tcp_nodelay(true).connect_timeout(CONNECT_WITHIN);
        let mut living = Living {
            grpc: WorkerSessionsClient::new(endpoint.connect_lazy()),
            core: Worker::new(offer),
            began: Instant::now(),
            wake: None,
            one: self,
        };
        let mut pause = PAUSE;
        for turn in 0_u64.. {
            if let Dial::AtOnce(there) = &mut living.one.dial {
                // It ends with the measurement, and so does this.
                let _ = there.wait_for(|there| *there).await;
            }
            match living.session().await {
                Over::Left => break,
                Over::Broken { welcome: true } => pause = PAUSE,
                Over::Broken { welcome: false } => {}
            }
            let part = 0.75
                + (mixed(turn.wrapping_mul(1_000_003) + living.one.number as u64) % 500) as f64 / 1_000.0;
            match living.one.dial {
                Dial::Paused => tokio::time::sleep(pause.mul_f64(part)).await,
                Dial::AtOnce(_) => tokio::time::sleep(AT_ONCE).await,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
        Ok(())
    }
}

/// How a session ended.
enum Over {
    Left,
    Broken { welcome: bool },
}

struct Living {
    one: One,
    grpc: WorkerSessionsClient<Channel>,
    core: Worker,
    /// What its clock counts from.
    began: Instant,
    wake: Option<Millis>,
}

struct Link {
    out: mpsc::UnboundedSender<v1::Up>,
    incoming: Streaming<v1::Down>,
}

impl Living {
    fn step(&mut self, input: Input, effects: &mut Vec<Effect>) {
        self.core.step(Millis(self.began.elapsed().as_millis() as u64), input, effects);
    }

    async fn session(&mut self) -> Over {
        let dialed = Instant::now();
        let (out, outgoing) = mpsc::unbounded_channel();
        let dialing = self.grpc.session(UnboundedReceiverStream::new(outgoing));
        let Ok(Ok(answer)) = tokio::time::timeout(CONNECT_WITHIN, dialing).await else {
            return Over::Broken { welcome: false };
        };
        let mut link = Link { out, incoming: answer.into_inner() };
        let mut effects = Vec::new();
        self.step(Input::Connected, &mut effects);
        let leaves_at = match self.one.leaves {
            Leaves::AfterHello(after) => Some(Instant::now() + after),
            Leaves::Never | Leaves::AtWelcome => None,
        };
        let mut welcome = false;
        loop {
            if !self.perform(&link, &mut effects) {
                return Over::Broken { welcome };
            }
            let now = self.began.elapsed();
            let wakes = self
                .wake
                .map(|at| Duration::from_millis(at.0).saturating_sub(now) + Duration::from_millis(1));
            let leaves = leaves_at.map(|at| at.saturating_duration_since(Instant::now()));
            tokio::select! {
                down = link.incoming.message() => match down {
                    Ok(Some(down)) => {
                        if down.welcome.is_some() {
                            welcome = true;
                            let (worker, at) = (self.one.number, Instant::now());
                            self.tell(Event::Welcomed { worker, epoch: down.epoch, dialed, at });
                            if self.one.leaves == Leaves::AtWelcome {
                                return Over::Left;
                            }
                        }
                        self.on_down(&down, &mut effects);
                    }
                    Ok(None) | Err(_) => {
                        self.step(Input::Disconnected, &mut effects);
                        return Over::Broken { welcome };
                    }
                },
                () = tokio::time::sleep(leaves.unwrap_or_default()), if leaves.is_some() => return Over::Left,
                () = tokio::time::sleep(wakes.unwrap_or_default()), if wakes.is_some() => {
                    self.wake = None;
                    self.step(Input::Tick, &mut effects);
                }
            }
        }
    }

    fn tell(&self, event: Event) {
        // Nobody listens any more once it is measured.
        let _ = self.one.events.send(event);
    }

    fn on_down(&mut self, down: &v1::Down, effects: &mut Vec<Effect>) {
        let (epoch, session) = (Epoch(down.epoch), down.session);
        let mut say = |down: Down| self.step(Input::Down { epoch, session, down }, effects);
        if let Some(v1::Welcome { store_id, nonce, thresholds: Some(thresholds), worker_set }) = &down.welcome
            && let Ok(thresholds) = convert::parse_thresholds(thresholds)
        {
            let set = worker_set.as_ref().map(convert::parse_worker_set);
            say(Down::Welcome { store: StoreId(*store_id), nonce: *nonce, thresholds, set });
        }
        if let Some(v1::Answer { number, worker_set }) = &down.answer {
            say(Down::Answer { number: *number, set: worker_set.as_ref().map(convert::parse_worker_set) });
        }
        for start in &down.start {
            if let Some(Ok(run)) = start.run.as_ref().map(convert::parse_run) {
                say(Down::Start { number: start.number, run });
            }
        }
        for (task, fence) in down.acknowledged.iter().map(convert::parse_run_id) {
            say(Down::Acknowledge { task, fence });
        }
        if let Some(die) = &down.die {
            // Whoever holds the connection may end it.
            let (then, session) = (convert::parse_then(die.then), self.core.session());
            self.step(Input::Down { epoch: Epoch(u64::MAX), session, down: Down::Die { then } }, effects);
        }
    }

    /// False if the session is over.
    fn perform(&mut self, link: &Link, effects: &mut Vec<Effect>) -> bool {
        let mut news = v1::News::default();
        let mut goes_on = true;
        while !effects.is_empty() {
            for effect in std::mem::take(effects) {
                match effect {
                    Effect::Hello(hello) => {
                        let ended = hello.ended.iter().map(|(run, end)| v1::Ended {
                            run: Some(convert::run(run)),
                            end: convert::end(*end).into(),
                            ..v1::Ended::default()
                        });
                        let running = hello.running.iter().map(convert::run).collect();
                        let hello = convert::hello(&hello, SHARD, running, ended.collect());
                        let _ = link.out.send(v1::Up { message: Some(v1::up::Message::Hello(hello)) });
                    }
                    Effect::Beat(beat) => {
                        news.heartbeat = Some(v1::Heartbeat {
                            number: beat.number,
                            answered: beat.answered,
                            worker_set: beat.set.map(convert::worker_set),
                        });
                    }
                    Effect::Start { run } => {
                        self.tell(Event::Began { at: Instant::now() });
                        if self.one.leaves == Leaves::Never {
                            let (task, fence) = (run.task, run.fence);
                            self.step(Input::Ended { task, fence, end: Some(End::Succeeded) }, effects);
                        }
                    }
                    Effect::Ended { run, end } => news.ended.push(v1::RunEnded {
                        run: Some(convert::run_id(run.task, run.fence)),
                        attempt: run.attempt.into(),
                        end: convert::end(end).into(),
                        ran_ms: Some(0),
                        ..v1::RunEnded::default()
                    }),
                    Effect::Refuse { task, fence } => news.refused.push(convert::run_id(task, fence)),
                    Effect::Offer { slots } => news.slots = Some(slots),
                    Effect::Wake { at } => self.wake = Some(at),
                    Effect::Disconnect | Effect::Exit(_) => goes_on = false,
                    // What it runs is nothing that could be ended before it leaves.
                    Effect::Stop { .. }
                    | Effect::Limit { .. }
                    | Effect::Forget { .. }
                    | Effect::Lease { .. }
                    | Effect::KillAll => {}
                }
            }
        }
        if news != v1::News::default() {
            let _ = link.out.send(v1::Up { message: Some(v1::up::Message::News(news)) });
        }
        goes_on
    }
}

/// Lets this process, and a server that it starts, have as many connections as the system allows.
pub(crate) fn allow_connections(wanted: usize) -> Result<(), Failure> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).map_err(Failure::new)?;
    match getrlimit(Resource::Nofile).current {
        Some(most) if most < wanted as u64 + 100 => {
            let text = format!(
                "{wanted} workers need more open files than the {most} that are allowed; see `ulimit -Hn`"
            );
            Err(Failure { text, exit: 2 })
        }
        Some(_) | None => Ok(()),
    }
}

/// Workers of one queue.
#[derive(Debug)]
pub(crate) struct Crowd {
    /// Says that the server listens.
    pub(crate) there: watch::Sender<bool>,
    pub(crate) events: mpsc::UnboundedReceiver<Event>,
    living: JoinSet<Result<(), Failure>>,
    /// How each is made to vanish.
    ends: Vec<AbortHandle>,
}

impl Crowd {
    /// Workers that stay. They dial as soon as the server listens, or after pauses.
    pub(crate) fn start(target: &Target, queue: &str, workers: usize, at_once: bool) -> Crowd {
        let (there, listens) = watch::channel(true);
        let (tell, events) = mpsc::unbounded_channel();
        let mut living = JoinSet::new();
        let ends = (0..workers).map(|number| {
            let one = One {
                number,
                seat: target.name(&number.to_string()),
                queue: queue.to_string(),
                life: 1,
                dial: if at_once { Dial::AtOnce(listens.clone()) } else { Dial::Paused },
                leaves: Leaves::Never,
                events: tell.clone(),
            };
            let url = target.url().to_string();
            living.spawn(async move { one.live(&url).await })
        });
        let ends = ends.collect();
        Crowd { there, events, living, ends }
    }

    /// One of them vanishes without a word.
    pub(crate) fn vanish(&mut self, number: usize) {
        if let Some(end) = self.ends.get(number) {
            end.abort();
        }
    }

    /// How one of them failed, if one has.
    pub(crate) fn failed(&mut self) -> Option<Failure> {
        let ended = self.living.try_join_next()?;
        ended.ok().and_then(Result::err)
    }
}
