//! Tasks that are run as commands, each in a process of its own, by a guardian. What a command gets and how it
//! says what became of it is a contract: see `docs/worker.md`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use evenhand_api::{RESULT_BYTES, convert, v1};
use evenhand_core::life::End;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::drain::Drain;
use super::handlers::{Board, Word};
use super::interactive::{self, Call};
use super::runtime::{Happening, Job, RunKey, Runner, Runtime};
use super::{Offer, WorkerError};
use crate::guardian::{
    self, Ended, Event, Guardian, GuardianError, KillCause, Outcome, Refusal, RunSpec, Streams, boottime_ms,
};

/// Exit codes with a meaning of their own, beside 0. 75 is EX_TEMPFAIL of sysexits.h.
const EXIT_RETRY: i32 = 75;
const EXIT_FOR_GOOD: i32 = 100;
/// Things that may wait to be told to the server.
const HAPPENINGS: usize = 1_024;
/// Between the beginnings of two guardians.
const GUARDIAN_AGAIN: Duration = Duration::from_secs(1);
/// How long what interactive runs wrote last may take to reach their clients when the worker ends.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long a seat that was just left may take to be free.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// A worker that runs a command for each task.
#[derive(Clone, Debug)]
pub struct Commands {
    server: String,
    command: Vec<OsString>,
    offer: Offer,
    guardian: (PathBuf, Vec<OsString>, Vec<OsString>),
    drain: Option<watch::Receiver<bool>>,
}

impl Commands {
    /// A worker of this server that runs this command: a program and its arguments.
    ///
    /// `program` is the executable that becomes the guardian when it is started with `guardian_args`, and a
    /// trampoline with `trampoline_args`: see [`crate::guardian`].
    pub fn new(
        server: &str,
        command: Vec<OsString>,
        program: impl Into<PathBuf>,
        guardian_args: Vec<OsString>,
        trampoline_args: Vec<OsString>,
    ) -> Commands {
        let guardian = (program.into(), guardian_args, trampoline_args);
        Commands { server: server.into(), command, offer: Offer::new(), guardian, drain: None }
    }

    /// Serves a queue with this share of the worker's slots, in thousandths.
    pub fn queue(mut self, queue: &str, weight_thousandths: u32) -> Commands {
        self.offer.queues.push((queue.into(), weight_thousandths));
        self
    }

    /// How many tasks it runs at once.
    pub fn slots(mut self, slots: u32) -> Commands {
        self.offer.slots = slots;
        self
    }

    /// Its stable name. If nobody says, the first that is free of those named after this machine.
    pub fn seat(mut self, seat: impl Into<String>) -> Commands {
        self.offer.seat = Some(seat.into());
        self
    }

    /// Where the lock files of this machine's seats are.
    pub fn seat_dir(mut self, dir: impl Into<PathBuf>) -> Commands {
        self.offer.seat_dir = Some(dir.into());
        self
    }

    /// Where the directories of runs with files are; beside the lock files, if nobody says. It must be on this machine.
    pub fn work_dir(mut self, dir: impl Into<PathBuf>) -> Commands {
        self.offer.work_dir = Some(dir.into());
        self
    }

    /// How long a command has from SIGTERM to SIGKILL.
    pub fn grace(mut self, grace: Duration) -> Commands {
        self.offer.grace = grace;
        self
    }

    /// Drains when this turns true: takes no more work, ends when what runs has ended.
    pub fn drain_on(mut self, drain: watch::Receiver<bool>) -> Commands {
        self.drain = Some(drain);
        self
    }

    /// Works until it is drained, or refused. If the guardian dies, what ran is dead too, and the worker begins
    /// a new life with another one.
    pub async fn run(self) -> Result<(), WorkerError> {
        self.offer.queues()?;
        let mut seat = self.offer.seat()?;
        loop {
            let began = Instant::now();
            match self.live(&mut seat).await {
                Err(WorkerError::Guardian(GuardianError::Gone)) => {
                    tracing::warn!("the guardian has died; the worker begins anew with another one");
                    // One that dies again and again must not keep the machine busy.
                    tokio::time::sleep(GUARDIAN_AGAIN.saturating_sub(began.elapsed())).await;
                }
                ended => return ended,
            }
        }
    }

    /// One life, from a guardian's beginning to its end.
    async fn live(&self, seat: &mut guardian::Seat) -> Result<(), WorkerError> {
        let (program, args, trampoline) = self.guardian.clone();
        let options = guardian::Options {
            program,
            args,
            trampoline,
            seat_dir: self.offer.seat_dir(),
            work_dir: self.offer.work_dir(),
            seat: seat.clone(),
            lock_wait: LOCK_WAIT,
            cgroups: true,
        };
        let (guardian, instance, events) = Guardian::start(options).await?;
        // The next life is in the same seat, which proves that this one is over.
        *seat = guardian::Seat::Named(instance.seat.clone());
        let runner = Runs::begin(guardian, events, self.command.clone(), self.offer.grace);
        let drain = Drain::new(self.drain.clone(), false)?;
        Runtime::new(&self.server, &self.offer, instance, runner)?.run(drain).await
    }
}

/// What the guardian is to be told. Orders go through a task of their own: a guardian that is slow must not hold
/// up heartbeats.
#[derive(Debug)]
enum Order {
    Run(RunKey, Job),
    Stop(RunKey),
    Deadline(RunKey, u64),
    KillAll,
    Lease(u64),
    End,
}

/// Runs commands.
struct Runs {
    orders: mpsc::UnboundedSender<Order>,
    happening: mpsc::Receiver<Happening>,
    working: tokio::task::JoinHandle<()>,
    /// Commands have no way to say how far they are.
    board: Arc<Board>,
}

impl Runs {
    fn begin(
        guardian: Guardian,
        events: mpsc::Receiver<Event>,
        command: Vec<OsString>,
        grace: Duration,
    ) -> Runs {
        // Bounded by what the server may order: the slots, and a lease.
        let (orders, ordered) = mpsc::unbounded_channel();
        let (happenings, happening) = mpsc::channel(HAPPENINGS);
        let errand = Errand {
            command,
            orders: orders.downgrade(),
            talking: JoinSet::new(),
            grace_ms: grace.as_millis() as u64,
            happenings,
            next: 0,
            by_id: HashMap::new(),
            by_run: HashMap::new(),
            chores: JoinSet::new(),
        };
        let working = tokio::spawn(errand.run(guardian, events, ordered));
        Runs { orders, happening, working, board: Arc::default() }
    }

    fn order(&self, order: Order) {
        // If nobody takes it, the guardian is gone, which is said elsewhere.
        let _ = self.orders.send(order);
    }
}

impl Runner for Runs {
    fn start(&mut self, job: Job) {
        self.order(Order::Run(job.run, job));
    }

    fn stop(&mut self, run: RunKey) {
        self.order(Order::Stop(run));
    }

    fn deadline(&mut self, run: RunKey, max_duration_ms: u64) {
        self.order(Order::Deadline(run, max_duration_ms));
    }

    fn kill_all(&mut self) {
        self.order(Order::KillAll);
    }

    fn lease(&mut self, until_ms: u64) {
        self.order(Order::Lease(until_ms));
    }

    fn happenings(&mut self) -> &mut mpsc::Receiver<Happening> {
        &mut self.happening
    }

    fn board(&self) -> Arc<Board> {
        self.board.clone()
    }

    async fn end(self) {
        self.order(Order::End);
        drop(self.happening);
        // It ends when the guardian has killed and reaped what is left, and the seat is free.
        drop(self.working.await);
    }
}

/// Goes between the worker and its guardian.
struct Errand {
    command: Vec<OsString>,
    /// Weak: that the worker orders no more must be noticed.
    orders: mpsc::WeakUnboundedSender<Order>,
    /// What goes between interactive runs and their clients.
    talking: JoinSet<()>,
    grace_ms: u64,
    happenings: mpsc::Sender<Happening>,
    next: u64,
    by_id: HashMap<u64, Running>,
    by_run: HashMap<RunKey, u64>,
    /// What is being done with directories of runs.
    chores: JoinSet<Chore>,
}

/// What has been done with the directory of a run.
enum Chore {
    /// It is there with its files; or it could not be made, for this reason.
    Filled(u64, Result<PathBuf, String>),
    /// It is gone.
    Removed(u64),
}

/// A run that the guardian knows, or is about to be told of.
struct Running {
    run: RunKey,
    /// What to start, as long as its files are being placed.
    placing: Option<Job>,
    /// Its directory, if it has one.
    dir: Option<PathBuf>,
    /// How it ended, as long as its directory is being removed.
    over: Option<Over>,
    /// In milliseconds since boot.
    began_ms: u64,
    /// When its command was started; None before that.
    started: Option<Instant>,
    max_duration_ms: u64,
    talk: Option<Talk>,
}

/// What is needed to talk to a run.
struct Talk {
    call: Option<(Call, Option<Streams>)>,
    /// Says how the run ended.
    ended: watch::Sender<Option<v1::InteractiveExit>>,
}

impl Talk {
    fn new(call: Call) -> Talk {
        Talk { call: Some((call, None)), ended: watch::Sender::new(None) }
    }
}

/// How a run ended.
struct Over {
    word: Option<Word>,
    lines_dropped: u64,
    ran: Duration,
}

impl Errand {
    async fn run(
        mut self,
        guardian: Guardian,
        mut events: mpsc::Receiver<Event>,
        mut ordered: mpsc::UnboundedReceiver<Order>,
    ) {
        loop {
            tokio::select! {
                biased;
                // They are few; what is said may be much.
                Some(Ok(chore)) = self.chores.join_next() => {
                    if let Err(error) = self.on_chore(&guardian, chore).await {
                        tracing::warn!(%error, "the guardian was not told");
                    }
                }
                event = events.recv() => match event {
                    Some(Event::Gone) | None => {
                        let over = Happening::Over(GuardianError::Gone.into());
                        drop(self.happenings.send(over).await);
                        // The next life removes what is left of this one: nobody may add to it then.
                        return self.finish_chores().await;
                    }
                    Some(event) => self.on_event(event).await,
                },
                order = ordered.recv() => match order {
                    Some(Order::End) | None => {
                        // What is still said is of no use any more, but must be taken.
                        let drained = async { while events.recv().await.is_some() {} };
                        let ended = async {
                            self.finish_chores().await;
                            guardian.shutdown().await
                        };
                        let _ = tokio::join!(ended, drained);
                        let said = async { while self.talking.join_next().await.is_some() {} };
                        let _ = tokio::time::timeout(LAST_WORDS, said).await;
                        return;
                    }
                    Some(order) => {
                        if let Err(error) = self.on_order(&guardian, order).await {
                            tracing::warn!(%error, "the guardian was not told");
                        }
                    }
                },
            }
        }
    }

    async fn on_order(&mut self, guardian: &Guardian, order: Order) -> Result<(), GuardianError> {
        match order {
            Order::Run(run, mut job) => {
                self.next += 1;
                let id = self.next;
                let files = std::mem::take(&mut job.files);
                let talk = job.interactive.clone().map(|(_, call)| Talk::new(call));
                let mut running = Running {
                    run,
                    placing: None,
                    dir: None,
                    over: None,
                    began_ms: boottime_ms(),
                    started: None,
                    max_duration_ms: job.max_duration_ms,
                    talk,
                };
                self.by_run.insert(run, id);
                if files.is_empty() {
                    self.by_id.insert(id, running);
                    return self.begin_run(guardian, id, job, None).await;
                }
                running.placing = Some(job);
                self.by_id.insert(id, running);
                let dirs = guardian.dirs().clone();
                self.chores.spawn_blocking(move || Chore::Filled(id, dirs.fill(id, &files)));
                Ok(())
            }
            Order::Stop(run) if self.is_placing(run) => {
                self.not_started(self.by_run.get(&run).copied().unwrap_or_default()).await;
                Ok(())
            }
            Order::Stop(run) => match self.by_run.get(&run) {
                Some(&id) => guardian.stop(id, self.grace_ms).await,
                None => Ok(()),
            },
            Order::Deadline(run, ms) => {
                let run = self.by_run.get(&run).and_then(|id| Some((*id, self.by_id.get_mut(id)?)));
                let Some((id, running)) = run else { return Ok(()) };
                running.max_duration_ms = ms;
                if running.placing.is_some() {
                    return Ok(()); // the guardian is told when it is told of the run
                }
                guardian.set_deadline(id, (ms > 0).then_some(running.began_ms + ms)).await
            }
            Order::KillAll => {
                let placing = self.by_id.iter().filter(|(_, running)| running.placing.is_some());
                let placing: Vec<u64> = placing.map(|(id, _)| *id).collect();
                for id in placing {
                    self.not_started(id).await;
                }
                guardian.kill_all().await
            }
            Order::Lease(until_ms) => guardian.lease(until_ms).await,
            Order::End => Ok(()),
        }
    }

    fn is_placing(&self, run: RunKey) -> bool {
        let running = self.by_run.get(&run).and_then(|id| self.by_id.get(id));
        running.is_some_and(|running| running.placing.is_some())
    }

    /// Has the guardian start a run.
    async fn begin_run(
        &mut self,
        guardian: &Guardian,
        id: u64,
        job: Job,
        dir: Option<PathBuf>,
    ) -> Result<(), GuardianError> {
        let asked = job.interactive.as_ref().map(|(asked, _)| asked.clone());
        let spec = self.spec(id, job, dir);
        let told = match asked {
            Some(asked) => {
                let terminal = interactive::terminal(&asked);
                let attached = guardian.attach(spec, terminal.as_ref()).await;
                attached.map(|streams| self.hold(id, streams))
            }
            None => guardian.run(spec).await,
        };
        match told {
            Ok(()) => Ok(()),
            Err(error @ (GuardianError::TooLarge { .. } | GuardianError::Streams { .. })) => {
                self.over(id, interactive::not_started(error.to_string()));
                self.ended(id, Some(Word::failed_for_good(error.to_string())), 0).await;
                Ok(())
            }
            Err(error) => {
                self.not_started(id).await;
                Err(error)
            }
        }
    }

    async fn on_chore(&mut self, guardian: &Guardian, chore: Chore) -> Result<(), GuardianError> {
        match chore {
            Chore::Filled(id, filled) => {
                let running = self.by_id.get_mut(&id);
                let job = running.and_then(|running| {
                    running.dir = filled.as_ref().ok().cloned();
                    running.placing.take()
                });
                match (job, filled) {
                    (Some(job), Ok(dir)) => return self.begin_run(guardian, id, job, Some(dir)).await,
                    (Some(_), Err(why)) => self.ended(id, Some(Word::failed(why)), 0).await,
                    // It was stopped meanwhile.
                    (None, Ok(dir)) => self.remove(id, dir),
                    (None, Err(_)) => {}
                }
            }
            Chore::Removed(id) => {
                if let Some(Running { run, over: Some(over), .. }) = self.by_id.remove(&id) {
                    self.by_run.remove(&run);
                    self.say_over(run, over).await;
                }
            }
        }
        Ok(())
    }

    fn remove(&mut self, id: u64, dir: PathBuf) {
        self.chores.spawn_blocking(move || {
            guardian::discard(&dir);
            Chore::Removed(id)
        });
    }

    /// Waits until nothing is done any more with directories of runs.
    async fn finish_chores(&mut self) {
        while self.chores.join_next().await.is_some() {}
    }

    fn spec(&self, id: u64, job: Job, dir: Option<PathBuf>) -> RunSpec {
        let (began_ms, max_duration_ms) = self
            .by_id
            .get(&id)
            .map_or((boottime_ms(), 0), |running| (running.began_ms, running.max_duration_ms));
        let mut env: Vec<(OsString, OsString)> = Vec::new();
        let mut set = |name: &str, value: String| env.push((name.into(), value.into()));
        set("EVENHAND_TASK_ID", job.task_id);
        set("EVENHAND_QUEUE", job.queue.to_string());
        set("EVENHAND_KEY", job.key);
        set("EVENHAND_ATTEMPT", job.attempt.to_string());
        set("EVENHAND_FENCE", convert::fence_text(job.run.1));
        if !job.content_type.is_empty() {
            set("EVENHAND_CONTENT_TYPE", job.content_type);
        }
        if let Some((asked, _)) = &job.interactive {
            set("EVENHAND_INTERACTIVE", if asked.tty { "tty".into() } else { "pipes".into() });
        }
        let deadline_ms = (max_duration_ms > 0).then_some(began_ms + max_duration_ms);
        if let Some(deadline_ms) = deadline_ms {
            let wall =
                SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64;
            let left_ms = deadline_ms.saturating_sub(boottime_ms());
            set("EVENHAND_DEADLINE_MS", (wall + left_ms).to_string());
        }
        let mut command = self.command.clone();
        if let Some(dir) = &dir {
            env.push(("EVENHAND_DIR".into(), dir.into()));
            // It is named from where the worker is, and is started elsewhere.
            if let Some(program) = command.first_mut()
                && program.as_encoded_bytes().contains(&b'/')
                && let Ok(path) = std::path::absolute(&program)
            {
                *program = path.into();
            }
        }
        RunSpec {
            id,
            command,
            env,
            dir,
            payload: job.payload,
            deadline_ms,
            grace_ms: self.grace_ms,
            stdout_limit: Some(RESULT_BYTES),
        }
    }

    async fn on_event(&mut self, event: Event) {
        match event {
            Event::Gone => {}
            Event::Started { id, .. } => {
                if let Some(running) = self.by_id.get_mut(&id) {
                    running.started = Some(Instant::now());
                }
                self.talk(id);
            }
            Event::Output { id, line } => {
                if let Some(&Running { run, .. }) = self.by_id.get(&id) {
                    drop(self.happenings.send(Happening::Output { run, line }).await);
                }
            }
            Event::Refused { id, why } => {
                let why = match why {
                    Refusal::NoLease => "its worker has lost its server for too long",
                    Refusal::TooMany => "its worker runs as many processes as it may",
                    Refusal::Duplicate => "its worker has mistaken it for another",
                };
                self.over(id, interactive::not_started(why));
                self.not_started(id).await;
            }
            Event::Ended(ended) => {
                self.over(ended.id, interactive::exit(&ended));
                let max_duration_ms = self.by_id.get(&ended.id).map_or(0, |running| running.max_duration_ms);
                let (end, error) = judge(&ended, max_duration_ms);
                let word = end.map(|end| Word { end, result: ended.stdout, ..Word::failed(error) });
                self.ended(ended.id, word, ended.lines_dropped).await;
            }
        }
    }

    /// Keeps the streams of a run until it has a process.
    fn hold(&mut self, id: u64, streams: Streams) {
        let talk = self.by_id.get_mut(&id).and_then(|running| running.talk.as_mut());
        if let Some((_, held)) = talk.and_then(|talk| talk.call.as_mut()) {
            *held = Some(streams);
        }
    }

    /// Calls the server for a run that has been started, once.
    fn talk(&mut self, id: u64) {
        let Some(Running { run, talk: Some(talk), .. }) = self.by_id.get_mut(&id) else { return };
        let Some((call, Some(streams))) = talk.call.take() else { return };
        let (run, ended, orders) = (*run, talk.ended.subscribe(), self.orders.clone());
        self.talking.spawn(async move {
            if call.carry(streams, ended).await.is_err()
                && let Some(orders) = orders.upgrade()
            {
                // If it has ended by itself, there is nothing to stop.
                let _ = orders.send(Order::Stop(run));
            }
        });
        self.clear();
    }

    /// Clears away those who talked.
    fn clear(&mut self) {
        while self.talking.try_join_next().is_some() {}
    }

    /// An interactive run is over: its client is told how.
    fn over(&mut self, id: u64, exit: v1::InteractiveExit) {
        let Some(Running { talk: Some(talk), .. }) = self.by_id.get_mut(&id) else { return };
        talk.ended.send_replace(Some(exit.clone()));
        // It never had a process.
        if let Some((call, _)) = talk.call.take() {
            self.talking.spawn(call.say(exit));
        }
        self.clear();
    }

    async fn not_started(&mut self, id: u64) {
        if let Some(Running { run, dir, .. }) = self.by_id.remove(&id) {
            self.by_run.remove(&run);
            if let Some(dir) = dir {
                self.remove(id, dir);
            }
            drop(self.happenings.send(Happening::NotStarted(run)).await);
        }
    }

    /// A run is over. It is told when its directory is gone, so that its slot is not used before the disk has room.
    async fn ended(&mut self, id: u64, word: Option<Word>, lines_dropped: u64) {
        let Some(running) = self.by_id.get_mut(&id) else { return };
        // One that could not be started took no time.
        let ran = running.started.map_or(Duration::ZERO, |started| started.elapsed());
        let over = Over { word, lines_dropped, ran };
        if let Some(dir) = running.dir.take() {
            running.over = Some(over);
            return self.remove(id, dir);
        }
        let run = running.run;
        self.by_id.remove(&id);
        self.by_run.remove(&run);
        self.say_over(run, over).await;
    }

    async fn say_over(&self, run: RunKey, over: Over) {
        let Over { word, lines_dropped, ran } = over;
        drop(self.happenings.send(Happening::Ended { run, word, lines_dropped, ran }).await);
    }
}

/// What the end of a command means, and what to say of it.
fn judge(ended: &Ended, max_duration_ms: u64) -> (Option<End>, String) {
    match (&ended.outcome, ended.killed) {
        // It did what was asked, whatever was on its way to it.
        (Outcome::Exited(0), _) => (Some(End::Succeeded), String::new()),
        (Outcome::Exited(_) | Outcome::Signaled(_) | Outcome::NotStarted(_), Some(KillCause::Lease)) => {
            (None, String::new())
        }
        (Outcome::Exited(_) | Outcome::Signaled(_), Some(KillCause::Deadline)) => {
            (Some(End::TimeUp), format!("it took longer than {max_duration_ms} ms and was stopped"))
        }
        (Outcome::Exited(_) | Outcome::Signaled(_), Some(KillCause::Stop)) => {
            (Some(End::Failed), "it was stopped".into())
        }
        (Outcome::Exited(EXIT_RETRY), None) => {
            (Some(End::Failed), "it asks to be tried again (exit 75)".into())
        }
        (Outcome::Exited(EXIT_FOR_GOOD), None) => {
            (Some(End::FailedForGood), "it failed for good (exit 100)".into())
        }
        (Outcome::Exited(code), None) => (Some(End::Failed), format!("it ended with exit code {code}")),
        (Outcome::Signaled(signal), None) => (Some(End::Failed), format!("it was killed by signal {signal}")),
        (Outcome::NotStarted(why), Some(_) | None) => {
            (Some(End::Failed), format!("the command could not be started: {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn exit_codes_mean_what_the_contract_says() {
        let judge = |outcome: Outcome, killed: Option<KillCause>| {
            let ended =
                Ended { id: 1, outcome, stdout: Bytes::new(), stdout_cut: false, lines_dropped: 0, killed };
            judge(&ended, 500).0
        };
        assert_eq!(judge(Outcome::Exited(0), None), Some(End::Succeeded));
        assert_eq!(judge(Outcome::Exited(0), Some(KillCause::Deadline)), Some(End::Succeeded));
        assert_eq!(judge(Outcome::Signaled(9), Some(KillCause::Deadline)), Some(End::TimeUp));
        assert_eq!(judge(Outcome::Exited(75), None), Some(End::Failed));
        assert_eq!(judge(Outcome::Exited(100), None), Some(End::FailedForGood));
        assert_eq!(judge(Outcome::Exited(1), None), Some(End::Failed));
        assert_eq!(judge(Outcome::Signaled(9), None), Some(End::Failed));
        assert_eq!(judge(Outcome::Signaled(9), Some(KillCause::Lease)), None);
        assert_eq!(judge(Outcome::Exited(100), Some(KillCause::Stop)), Some(End::Failed));
        assert_eq!(judge(Outcome::NotStarted("no".into()), None), Some(End::Failed));
    }
}
