//! The guardian: a small process beside the worker that is the parent of all task processes.
//!
//! The worker talks to the network, holds state and may crash; a run must not live on when it does, or the
//! task would run twice. So the worker starts no task process itself. It starts a guardian (the same
//! executable, [`main_of_guardian`]), tells it through a socket what to run, and hears through a pipe how runs
//! go. The two watch each other:
//!
//! - The worker dies: the guardian reads the end of its orders, kills and reaps every run, frees the seat's
//!   lock, and says that the instance is dead.
//! - The lease is over (the worker is cut off, stopped or slow): the guardian kills every run at once, by
//!   itself, and starts nothing before a later lease arrives.
//! - The guardian dies: the kernel kills the task processes (parent-death signal), and the worker, to which
//!   everything they left behind is handed, kills the rest.
//! - Both die at once: task processes die by the parent-death signal, and what those had started is found
//!   and killed before the next life of the seat begins.
//!
//! How a run's processes are found, however they hide: the guardian is a *subreaper*, so a process whose
//! parent dies becomes the guardian's child. When a run's main process has ended, whatever is left of the
//! run is therefore among the guardian's children, or will be when its parent there is killed. Only when
//! none is left does the run count as ended. See `keeper`.
//!
//! | file | what |
//! |---|---|
//! | `handle` | the worker's side: [`Guardian`] |
//! | `estate` | the worker's side when the guardian has died |
//! | `frames` | what the two say to each other |
//! | `program` | the guardian from its start to its end: [`main_of_guardian`] |
//! | `keeper` | its loop between: orders, clocks, ends |
//! | `orphans` | which of the guardian's children belong to which run |
//! | `run` | one run: its processes and pipes |
//! | `socket` | the way of orders, and of the descriptors that go with some |
//! | `streams` | the streams of an interactive run, which pass the guardian by |
//! | `outbox` | what waits to be read by the worker, bounded |
//! | `trampoline` | the last steps before a task's command takes over |
//! | `processes` | /proc, signals and reaping |
//! | `dirs` | a directory for each run that has files |
//! | `cgroup` | a control group for each run, where that is possible |
//! | `seat` | the lock file: token, life |
//!
//! What is not covered: a process that had itself started by another service (cron, a container engine) is
//! no descendant; a task that became another user (sudo) cannot be killed by a guardian that is not root, so
//! its run does not count as ended before it ends by itself.

mod cgroup;
mod dirs;
mod estate;
mod frames;
mod handle;
mod keeper;
mod orphans;
mod outbox;
mod processes;
mod program;
mod run;
mod seat;
mod socket;
mod streams;
mod trampoline;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;

pub(crate) use self::dirs::discard;
pub use self::handle::Guardian;
pub use self::program::main_of_guardian;
pub(crate) use self::seat::SeatLock;
pub use self::streams::{Inlet, Outlet, Streams, Terminal};
pub use self::trampoline::trampoline;

/// Bytes of a run's standard output that are kept, for a run that does not say.
pub const STDOUT_BYTES: usize = 64 * 1024;
/// Most bytes of standard output that a run may ask to be kept: an end must fit in one frame.
pub const STDOUT_BYTES_MAX: usize = 1024 * 1024;
/// Longest line of standard error that is passed on, in bytes; the rest of a longer line is cut.
pub const LINE_BYTES: usize = 4 * 1024;
/// Most runs at once: as many as a worker may have slots.
pub const RUNS: usize = 10_000;
/// Most seats that are tried for one name: more workers than that on one machine want names of their own.
pub const SEATS_PER_NAME: u32 = 64;

/// How to start a guardian.
#[derive(Clone, Debug)]
pub struct Options {
    /// The executable whose `args` lead to [`main_of_guardian`], such as `/proc/self/exe`.
    pub program: PathBuf,
    /// The arguments that lead to [`main_of_guardian`].
    pub args: Vec<OsString>,
    /// The arguments of the same executable that lead to [`trampoline`]; `-- COMMAND...` is appended.
    pub trampoline: Vec<OsString>,
    /// Where lock files are. It must be on this machine: a lock says nothing about another one.
    pub seat_dir: PathBuf,
    /// Where the directories of runs are. On this machine, too.
    pub work_dir: PathBuf,
    /// The seat to take.
    pub seat: Seat,
    /// How long to wait for a lock that is held. A worker that is started right after another one of its
    /// seat died must give that one's guardian a moment to finish.
    pub lock_wait: Duration,
    /// Put each run in a control group of its own, where that is possible.
    pub cgroups: bool,
}

/// Which seat to take. Names are letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seat {
    /// This one, or fail.
    Named(String),
    /// The first that is free of NAME, NAME-2, NAME-3 and so on.
    FirstFree(String),
}

/// One life of a seat. A later life with the same seat and token proves that this one is over and that
/// nothing of it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The seat.
    pub seat: String,
    /// Random, and bound to the machine. Lives with different tokens say nothing about each other.
    pub token: u64,
    /// Which life it is: 1 for the first.
    pub life: u64,
}

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct RunSpec {
    /// Chosen by the worker; free again when the run has ended or was refused.
    pub id: u64,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Added to the environment that the guardian has.
    pub env: Vec<(OsString, OsString)>,
    /// Where it works; where the guardian does, if nothing is said.
    pub dir: Option<PathBuf>,
    /// Written to the standard input, which is then closed.
    pub payload: Bytes,
    /// When it must be over, in milliseconds of [`boottime_ms`].
    pub deadline_ms: Option<u64>,
    /// How long it has, past the deadline, from SIGTERM to SIGKILL.
    pub grace_ms: u64,
    /// Bytes of standard output to keep; [`STDOUT_BYTES`] if nothing is said.
    pub stdout_limit: Option<usize>,
}

/// What the guardian says.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A run has a process. Its command may still turn out not to exist.
    Started {
        /// The run.
        id: u64,
        /// Its main process, also the id of its process group.
        pid: u32,
    },
    /// A line of a run's standard error, without its end.
    Output {
        /// The run.
        id: u64,
        /// At most [`LINE_BYTES`] long; what is not UTF-8 is replaced.
        line: String,
    },
    /// A run is over, and none of its processes is left.
    Ended(Ended),
    /// A run was not started and will not be.
    Refused {
        /// The run.
        id: u64,
        /// The reason.
        why: Refusal,
    },
    /// The guardian died and what ran is dead. Nothing follows; a new guardian is a new life.
    Gone,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// The run.
    pub id: u64,
    /// How its main process ended.
    pub outcome: Outcome,
    /// Its standard output, as much as was to be kept.
    pub stdout: Bytes,
    /// There was more.
    pub stdout_cut: bool,
    /// Lines of standard error that were not passed on because the worker did not keep up.
    pub lines_dropped: u64,
    /// Why the guardian sent it a signal, if it did. The command may have ended well all the same.
    pub killed: Option<KillCause>,
}

/// How a run's main process ended.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Outcome {
    /// With this code.
    #[prost(int32, tag = "2")]
    Exited(i32),
    /// By this signal.
    #[prost(int32, tag = "3")]
    Signaled(i32),
    /// Its command was never executed, for this reason.
    #[prost(string, tag = "4")]
    NotStarted(String),
}

/// Why the guardian sent a run a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum KillCause {
    /// The worker asked for it, or ended.
    Stop = 0,
    /// Its deadline.
    Deadline = 1,
    /// The lease was over.
    Lease = 2,
}

/// Why a run was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Refusal {
    /// There is no lease, or it was over when the order was read.
    NoLease = 0,
    /// There are [`RUNS`] runs already.
    TooMany = 1,
    /// There is a run with this id.
    Duplicate = 2,
}

/// Why a guardian could not be started or told something.
#[derive(Debug, thiserror::Error)]
pub enum GuardianError {
    /// The seat's lock is held.
    #[error("seat {seat} is in use on this machine{}; stop that worker or choose another seat", by_pid(*pid))]
    SeatInUse {
        /// The seat.
        seat: String,
        /// The guardian that holds it, if the lock file says so.
        pid: Option<u32>,
    },
    /// No seat of a name is free.
    #[error(
        "seats {name} to {name}-{SEATS_PER_NAME} are all in use on this machine; choose another name for the seat"
    )]
    NoSeatFree {
        /// The name.
        name: String,
    },
    /// Processes of an earlier life cannot be killed.
    #[error(
        "processes of an earlier life of seat {seat} are still alive: {pids:?}; end them, or choose another seat"
    )]
    Leftovers {
        /// The seat.
        seat: String,
        /// Their process ids.
        pids: Vec<u32>,
    },
    /// The guardian could not do what it needs for starting.
    #[error("the guardian could not start: {0}")]
    Setup(String),
    /// The guardian's process could not be started.
    #[error("cannot start the guardian with {}: {source}", program.display())]
    Spawn {
        /// The executable.
        program: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// The guardian did not say hello in time.
    #[error("the guardian did not answer within {0:?}; see its messages on standard error")]
    NoAnswer(Duration),
    /// The guardian said something that makes no sense.
    #[error("the guardian does not speak as this worker does: {0}; are they the same executable?")]
    Speech(String),
    /// An order does not fit in a frame.
    #[error("run {id} does not fit: command, environment and payload may have {max} bytes together")]
    TooLarge {
        /// The run.
        id: u64,
        /// The bound.
        max: usize,
    },
    /// The streams of an interactive run could not be made.
    #[error("run {id} can have no {what}: {source}")]
    Streams {
        /// The run.
        id: u64,
        /// Pipes, or a terminal.
        what: &'static str,
        /// The system's word.
        source: std::io::Error,
    },
    /// The guardian is gone.
    #[error("the guardian has ended; start a new one")]
    Gone,
}

fn by_pid(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" by pid {pid}")).unwrap_or_default()
}

/// Milliseconds since the machine was booted, suspended time included. Leases and deadlines are on this
/// clock: while a laptop sleeps or a virtual machine is paused the server's time goes on.
pub fn boottime_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}
