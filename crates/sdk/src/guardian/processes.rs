//! Processes as the kernel shows them: whose child they are, which run they carry in their environment, and
//! how they are killed and reaped.
//!
//! Process ids are used again. A number is safe to signal only while the process cannot be reaped by
//! somebody else: it is our own child (we alone reap it), or it is held by a pidfd.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open,
    pidfd_send_signal, waitid,
};

use super::Outcome;

/// The variable that marks every process of a run: SEAT@LOCK.LIFE.RUN, where LOCK is the lock file.
pub(super) const MARKER: &str = "EVENHAND_RUN";

pub(super) fn own_pid() -> Pid {
    rustix::process::getpid()
}

/// What a process id is called in frames and messages.
pub(super) fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

/// All children of this process, dead ones that are not reaped included. An error is no empty list: it says
/// nothing about who lives.
///
/// Orphans that are handed to us meanwhile are not in it. Complete only where one thread alone reaps, as the
/// guardian's does: the kernel skips a child in this list when the one before it is reaped while it is read.
pub(super) fn own_children() -> io::Result<Vec<Pid>> {
    children(own_pid())
}

/// The same for a process in which others reap too, and threads come and go. Asks every process there is.
pub(super) fn own_children_asked() -> io::Result<Vec<Pid>> {
    children_asked(own_pid())
}

fn children_asked(parent: Pid) -> io::Result<Vec<Pid>> {
    let mut children = all()?;
    let mut unseen = None;
    children.retain(|&pid| {
        is_child(pid, parent).unwrap_or_else(|error| {
            unseen = Some(error);
            false
        })
    });
    unseen.map_or(Ok(children), Err)
}

fn children(parent: Pid) -> io::Result<Vec<Pid>> {
    let mut children = Vec::new();
    for thread in fs::read_dir(format!("/proc/{}/task", parent.as_raw_nonzero()))? {
        let thread = thread?.path();
        match fs::read_to_string(thread.join("children")) {
            Ok(list) => {
                let pids = list.split_ascii_whitespace();
                children.extend(pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
            }
            Err(error) if !gone(&error) => return Err(error),
            // A kernel without that file: then every process says who its parent is.
            Err(_) if thread.exists() => {
                return children_asked(parent);
            }
            // A thread that has ended.
            Err(_) => {}
        }
    }
    Ok(children)
}

/// All processes there are.
fn all() -> io::Result<Vec<Pid>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        pids.extend(pid.and_then(Pid::from_raw));
    }
    Ok(pids)
}

/// Whether an error means that a process or a thread has ended.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || Errno::from_io_error(error) == Some(Errno::SRCH)
}

/// What /proc/PID/stat says. The name, field 2, may hold anything; so this begins behind it.
struct Stat(String);

impl Stat {
    fn read(pid: Pid) -> io::Result<Stat> {
        let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
        let behind_name = stat.rsplit(|&byte| byte == b')').next().unwrap_or_default();
        Ok(Stat(String::from_utf8_lossy(behind_name).into_owned()))
    }

    /// A field, numbered as in proc(5), from 3.
    fn field(&self, field: usize) -> Option<&str> {
        self.0.split_ascii_whitespace().nth(field - 3)
    }

    fn number(&self, field: usize) -> Option<u64> {
        self.field(field)?.parse().ok()
    }

    /// None also for a process that is out of our sight, which the kernel calls 0.
    fn pid(&self, field: usize) -> Option<Pid> {
        Pid::from_raw(self.field(field)?.parse().ok()?)
    }
}

/// Whether a process is the child of another. One that has ended is not; one that cannot be seen is an error.
fn is_child(pid: Pid, parent: Pid) -> io::Result<bool> {
    match Stat::read(pid) {
        Ok(stat) => Ok(stat.pid(4) == Some(parent)),
        Err(error) if gone(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// When a process was started, in ticks since boot. None if it is gone.
pub(super) fn started_at(pid: Pid) -> Option<u64> {
    Stat::read(pid).ok()?.number(22)
}

/// The process group of a process. None if it was made outside of our container.
pub(super) fn group_of(pid: Pid) -> Option<Pid> {
    Stat::read(pid).ok()?.pid(5)
}

/// The session of a process. None if it was made outside of our container.
pub(super) fn session_of(pid: Pid) -> Option<Pid> {
    Stat::read(pid).ok()?.pid(6)
}

/// The run's marker that a process was started with. None also if it is dead, is not ours to look at, or is in
/// the middle of exec.
pub(super) fn marker_of(pid: Pid) -> io::Result<Option<String>> {
    let environ = match fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) {
        Ok(environ) => environ,
        Err(error) if gone(&error) || error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(error),
    };
    let marker = environ
        .split(|&byte| byte == 0)
        .find_map(|variable| variable.strip_prefix(MARKER.as_bytes())?.strip_prefix(b"="));
    Ok(marker.and_then(|marker| String::from_utf8(marker.to_vec()).ok()))
}

/// SIGKILL to a child of ours that was not reaped.
pub(super) fn kill_child(pid: Pid) {
    // That it is dead already, or not ours to kill, shows when it is looked for again.
    let _ = kill_process(pid, Signal::KILL);
}

/// Any signal to a child of ours that was not reaped.
pub(super) fn signal_child(pid: Pid, signal: Signal) {
    let _ = kill_process(pid, signal);
}

/// A signal to the process group that a child of ours, not reaped yet, leads or belongs to.
/// False if there is no such group.
pub(super) fn signal_group(group: Pid, signal: Signal) -> bool {
    kill_process_group(group, signal) != Err(Errno::SRCH)
}

/// Whether a child of ours is dead. It is not reaped, so its id still is its own.
pub(super) fn is_dead(child: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(retried(|| waitid(WaitId::Pid(child), options)), Ok(None))
}

/// Reaps a child of ours if it is dead.
pub(super) fn reap(child: Pid) -> Option<Outcome> {
    match retried(|| waitid(WaitId::Pid(child), WaitIdOptions::EXITED | WaitIdOptions::NOHANG)) {
        Ok(None) => None,
        Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Outcome::Exited(code),
            (None, signal) => Outcome::Signaled(signal.unwrap_or(Signal::KILL.as_raw())),
        }),
        // Not our child any more: it is dead, and how it ended is lost.
        Err(_) => Some(Outcome::Signaled(Signal::KILL.as_raw())),
    }
}

/// Whether this process has no children at all, living or dead. The kernel's word, so a proof.
pub(super) fn childless() -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(retried(|| waitid(WaitId::All, options)), Err(Errno::CHILD))
}

fn retried<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// How long a sweep must find nobody. A process shows no environment in the moment of exec, so one look is no
/// proof.
const CALM: Duration = Duration::from_millis(50);

/// Kills every process, whosever child, whose marker begins with a prefix, and all that these have started.
pub(super) struct Sweep<'a> {
    prefix: &'a str,
    /// Those that were found and may not be dead yet. Some could not be found again.
    held: Vec<Held>,
    /// Since when nobody was found.
    calm_since: Option<Instant>,
}

impl<'a> Sweep<'a> {
    pub(super) fn new(prefix: &'a str) -> Sweep<'a> {
        Sweep { prefix, held: Vec::new(), calm_since: None }
    }

    /// Looks and kills once more. True when nobody is left; not if nothing could be seen.
    pub(super) fn is_done(&mut self) -> bool {
        self.held.retain(Held::lives);
        let looked = self.look();
        self.held.iter().for_each(Held::kill);
        if looked.is_err() || !self.held.is_empty() {
            self.calm_since = None;
            return false;
        }
        self.calm_since.get_or_insert_with(Instant::now).elapsed() >= CALM
    }

    /// Those that were alive at the last look.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        self.held.iter().map(|held| number(held.pid)).collect()
    }

    fn look(&mut self) -> io::Result<()> {
        let prefix = self.prefix;
        let marked = |pid| Ok(marker_of(pid)?.is_some_and(|marker| marker.starts_with(prefix)));
        self.hold(all()?, marked)?;
        // What a marked process has started without its marker can be found only as long as the parent lives.
        let mut next = 0;
        while let Some(parent) = self.held.get(next).map(|held| held.pid) {
            match children(parent) {
                Ok(children) => self.hold(children, |child| is_child(child, parent))?,
                Err(error) if gone(&error) => {}
                Err(error) => return Err(error),
            }
            next += 1;
        }
        Ok(())
    }

    /// Holds those that are wanted, and not held yet.
    fn hold(&mut self, pids: Vec<Pid>, wanted: impl Fn(Pid) -> io::Result<bool>) -> io::Result<()> {
        let known: HashSet<Pid> = self.held.iter().map(|held| held.pid).chain([own_pid()]).collect();
        for pid in pids.into_iter().filter(|pid| !known.contains(pid)) {
            self.held.extend(Held::open(pid, &wanted)?);
        }
        Ok(())
    }
}

/// A process that is not our child, held so that its number cannot come to mean another one.
struct Held {
    pid: Pid,
    started_at: u64,
    /// None on kernels that do not know pidfds.
    fd: Option<OwnedFd>,
}

impl Held {
    /// Looks at the process only after it is held: what was seen is then true of what is killed.
    fn open(pid: Pid, wanted: impl Fn(Pid) -> io::Result<bool>) -> io::Result<Option<Held>> {
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => Some(fd),
            Err(Errno::NOSYS | Errno::PERM) => None,
            // It has ended, or is the thread of a process.
            Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let started_at = match Stat::read(pid) {
            Ok(stat) => stat.number(22).unwrap_or(0),
            Err(error) if gone(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(wanted(pid)?.then_some(Held { pid, started_at, fd }).filter(Held::lives))
    }

    fn kill(&self) {
        let _ = match &self.fd {
            Some(fd) => pidfd_send_signal(fd, Signal::KILL),
            None => kill_process(self.pid, Signal::KILL),
        };
    }

    /// Whether it can still do something: a process that only waits to be reaped, with no thread left,
    /// cannot.
    fn lives(&self) -> bool {
        let stat = match Stat::read(self.pid) {
            Ok(stat) => stat,
            Err(error) => return !gone(&error),
        };
        let ended =
            matches!(stat.field(3), Some("Z" | "X")) && stat.number(20).is_none_or(|threads| threads <= 1);
        !ended && stat.number(22) == Some(self.started_at)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    #[expect(clippy::zombie_processes, reason = "it is reaped by what is tested")]
    fn a_child_is_listed_until_it_is_reaped() {
        let mut child = Command::new("cat").env(MARKER, "x@1.2.3.4").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(own_children().unwrap().contains(&pid));
        // It is hidden until exec is through.
        while marker_of(pid).unwrap().as_deref() != Some("x@1.2.3.4") {
            std::thread::yield_now();
        }
        assert!(is_child(pid, own_pid()).unwrap() && !is_child(own_pid(), pid).unwrap());
        assert!(started_at(pid) >= started_at(own_pid()));
        assert!(!is_dead(pid) && reap(pid).is_none());
        drop(child.stdin.take());
        while !is_dead(pid) {
            std::thread::yield_now();
        }
        assert!(own_children().unwrap().contains(&pid));
        assert_eq!(reap(pid), Some(Outcome::Exited(0)));
        assert!(!own_children().unwrap().contains(&pid));
    }
}
