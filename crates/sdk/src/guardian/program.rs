//! The guardian as a program: what it makes of itself before its life begins, and what it does when it ends.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, set_child_subreaper, setrlimit, setsid};
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use super::frames::{
    Failed, Failure, FrameError, FrameReader, InUse, Interactive, Leftovers, Order, Report, ToGuardian,
};
use super::keeper::Keeper;
use super::outbox::Outbox;
use super::socket::Orders;
use super::{GuardianError, Instance, RUNS, processes};

/// How long the worker has to read what is left to say.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long it may take to say that the worker is dead.
const OBITUARY: Duration = Duration::from_secs(5);
/// The pipes of a run.
const FILES_PER_RUN: u64 = 3;
/// Files that are open all the time or for a moment, generously.
const FILES_OF_OUR_OWN: u64 = 64;

/// The guardian's process, from start to end. The hidden subcommand that [`super::Options::args`] name calls
/// this, on the main thread and with no runtime around it.
///
/// If the worker dies, `on_worker_death` is called when all runs are dead and the lock is free. It is to
/// tell the server, and has a few seconds for it.
pub fn main_of_guardian<F, D>(on_worker_death: F) -> ExitCode
where
    F: FnOnce(Instance) -> D,
    D: Future<Output = ()>,
{
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.to_string()),
    };
    let result = runtime.block_on(guard(on_worker_death));
    // A lookup of a name that hangs must not keep us.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => failed(&why),
    }
}

fn failed(why: &str) -> ExitCode {
    eprintln!("evenhand guardian: {why}");
    ExitCode::FAILURE
}

/// Why a guardian ends.
pub(super) enum Last {
    Shutdown,
    WorkerDied,
    Nonsense(String),
}

async fn guard<F, D>(on_worker_death: F) -> Result<(), String>
where
    F: FnOnce(Instance) -> D,
    D: Future<Output = ()>,
{
    // Handlers that do nothing. Unlike ignored signals they are not inherited by the commands.
    let deaf = |kind| signal(kind).map_err(|error| format!("signals cannot be handled: {error}"));
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()] {
        let _: Signal = deaf(kind)?;
    }
    let mut children = deaf(SignalKind::child())?;
    // A session of its own is a process group of its own, and has no terminal that could stop it. It fails
    // only for a process that leads a group already.
    let _ = setsid();
    set_child_subreaper(Some(processes::own_pid()))
        .map_err(|error| format!("cannot adopt orphans: {error}"))?;
    let (orders, reports) = pipes().map_err(|error| {
        format!("standard input and output must lead to the worker, which starts this by itself ({error})")
    })?;
    let mut orders = FrameReader::new(orders);
    let outbox = Outbox::default();
    let writer = tokio::spawn(outbox.clone().write_to(reports));

    let setup = match read_order(&mut orders).await {
        Ok((Order::Setup(setup), _)) => setup,
        Ok(_) => return Err("an order came before the setup".into()),
        Err(Last::Nonsense(why)) => return Err(why),
        Err(Last::WorkerDied | Last::Shutdown) => return Ok(()),
    };
    let (lock, instance, mut keeper) = match Keeper::begin(&setup, Files::raise(), outbox.clone()) {
        Ok(begun) => begun,
        Err(error) => {
            outbox.report(Report::Failed(Failed { failure: Some(failure(error)) }));
            outbox.close();
            let _ = timeout(FAREWELL, writer).await;
            return Ok(());
        }
    };
    let last = keeper.keep(&mut orders, &mut children).await;
    keeper.wind_down(&mut children, matches!(last, Last::Shutdown)).await;
    match last {
        Last::Shutdown => {
            let removing = keeper.remove_dirs();
            outbox.close();
            let _ = timeout(FAREWELL, writer).await;
            drop(lock);
            let _ = removing.join();
            Ok(())
        }
        Last::WorkerDied => {
            let removing = keeper.remove_dirs();
            drop(lock);
            let told = timeout(OBITUARY, on_worker_death(instance)).await;
            let _ = removing.join();
            told.map_err(|_| "the worker died, and nobody could be told in time".into())
        }
        // The worker lives and will see that we are gone.
        Last::Nonsense(why) => Err(why),
    }
}

/// How many files may be open: each run needs three, and some must be left for looking after them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Files {
    /// The limit as it was. It is given back to the commands, some of which take a high one badly.
    pub(super) before: Option<u64>,
    now: Option<u64>,
}

impl Files {
    /// Raises the limit as far as we may.
    fn raise() -> Files {
        let limit = getrlimit(Resource::Nofile);
        let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        Files { before: limit.current, now: if raised.is_ok() { limit.maximum } else { limit.current } }
    }

    /// The most runs there may be.
    pub(super) fn runs(self) -> usize {
        let room = self.now.map_or(u64::MAX, |files| files.saturating_sub(FILES_OF_OUR_OWN) / FILES_PER_RUN);
        usize::try_from(room).unwrap_or(usize::MAX).min(RUNS)
    }
}

/// Our ends of the socket and the pipe. Those of the descriptors that we do not use stay open, which does not
/// matter: the ends that are waited for are the worker's.
fn pipes() -> io::Result<(Orders, pipe::Sender)> {
    let orders = io::stdin().as_fd().try_clone_to_owned()?;
    let reports = io::stdout().as_fd().try_clone_to_owned()?;
    Ok((Orders::new(orders)?, pipe::Sender::from_owned_fd(reports)?))
}

/// The next order, with the descriptors that came with it.
pub(super) async fn read_order(orders: &mut FrameReader<Orders>) -> Result<(Order, Vec<OwnedFd>), Last> {
    match orders.next::<ToGuardian>().await {
        Ok(Some(message)) => {
            let order = message.order.ok_or_else(|| Last::Nonsense(FrameError::Empty.to_string()))?;
            let count = match &order {
                Order::Start(start) => start.interactive.map_or(0, Interactive::descriptors),
                Order::Setup(_)
                | Order::Stop(_)
                | Order::Deadline(_)
                | Order::Lease(_)
                | Order::KillAll(_)
                | Order::Shutdown(_) => 0,
            };
            let missing = || Last::Nonsense("an order came without its descriptors".into());
            Ok((order, orders.pipe().take(count).ok_or_else(missing)?))
        }
        // A worker may die in the middle of a frame.
        Ok(None) | Err(FrameError::Torn | FrameError::Pipe(_)) => Err(Last::WorkerDied),
        Err(error @ (FrameError::TooLong(_) | FrameError::Garbled(_) | FrameError::Empty)) => {
            Err(Last::Nonsense(error.to_string()))
        }
    }
}

fn failure(error: GuardianError) -> Failure {
    match error {
        GuardianError::SeatInUse { seat, pid } => Failure::InUse(InUse { seat, pid }),
        GuardianError::NoSeatFree { name } => Failure::NoSeatFree(name),
        GuardianError::Leftovers { seat, pids } => Failure::Leftovers(Leftovers { seat, pids }),
        GuardianError::Setup(why) => Failure::Other(why),
        error @ (GuardianError::Spawn { .. }
        | GuardianError::NoAnswer(_)
        | GuardianError::Speech(_)
        | GuardianError::TooLarge { .. }
        | GuardianError::Streams { .. }
        | GuardianError::Gone) => Failure::Other(error.to_string()),
    }
}
