//! One run: its processes, its pipes, and what is known of its end.
//!
//! A run is *alive* until its main process is dead, then *leaving* while others of its processes are, then
//! *closing* while its pipes are read to their ends. Whatever the processes do with the pipes, the guardian
//! does not wait for them: each pipe has a task of its own.
//!
//! The streams of an interactive run are the worker's: the guardian hands them to the command and keeps nothing.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::cgroup::RunCgroup;
use super::frames::{End, Interactive, Start};
use super::outbox::Outbox;
use super::processes::{self, MARKER};
use super::trampoline::{Errand, NOT_STARTED, not_started};
use super::{KillCause, LINE_BYTES, Outcome, STDOUT_BYTES_MAX};

const READ_BYTES: usize = 16 * 1024;

/// A run that has not been reported as ended.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) id: u64,
    /// The main process, which leads the process group.
    pub(super) pid: Pid,
    pub(super) marker: String,
    /// When the main process was started, in ticks since boot: nothing older belongs to this run.
    pub(super) since: u64,
    pub(super) deadline_ms: Option<u64>,
    grace_ms: u64,
    /// When SIGTERM has had its time.
    pub(super) kill_at_ms: Option<u64>,
    cause: Option<KillCause>,
    /// It has a terminal. Until its trampoline has made it the leader of a session, it has no process group of its own.
    terminal: bool,
    pub(super) phase: Phase,
    pub(super) cgroup: Option<RunCgroup>,
    /// Orphans that may be of this run, and when they were first seen; see `orphans`.
    pub(super) suspects: HashMap<Pid, u64>,
    pipes: Pipes,
}

/// Where it is in its life.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    /// The main process is not reaped, so its id and that of the group are this run's.
    Alive,
    /// The main process is reaped; others may live.
    Leaving(Outcome),
    /// No process is left. The pipes are waited for until then, in case somebody outside holds them.
    Closing(Outcome, u64),
}

/// What it takes to start a run, beside the order.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) trampoline: &'a [OsString],
    pub(super) marker: String,
    pub(super) lease_until_ms: u64,
    /// The limit of open files that the command is to have.
    pub(super) files: Option<u64>,
    pub(super) cgroup: Option<RunCgroup>,
    pub(super) outbox: &'a Outbox,
    /// Woken when a pipe has been read to its end.
    pub(super) wake: &'a Arc<Notify>,
}

impl Run {
    /// Starts the main process. It must be called on the thread that lives as long as the guardian: the
    /// parent-death signal comes when the *thread* ends that made the child. The descriptors are what an interactive
    /// run has for its streams.
    pub(super) fn start(start: Start, descriptors: Vec<OwnedFd>, launch: Launch<'_>) -> io::Result<Run> {
        let Launch { trampoline, marker, lease_until_ms, files, cgroup, outbox, wake } = launch;
        let dir = cgroup.as_ref().map(|group| group.dir.clone());
        let terminal = start.interactive.is_some_and(|interactive| interactive.terminal);
        let errand = Errand { guardian: processes::own_pid(), lease_until_ms, files, terminal, cgroup: dir };
        let (variable, value) = errand.variable();
        // Not the path it was started from: an upgrade may have put another executable there.
        let mut command = Command::new("/proc/self/exe");
        command.args(trampoline).arg("--").args(start.command.iter().map(|part| OsStr::from_bytes(part)));
        for env in &start.env {
            command.env(OsStr::from_bytes(&env.name), OsStr::from_bytes(&env.value));
        }
        if let Some(dir) = &start.dir {
            command.current_dir(OsStr::from_bytes(dir));
        }
        command.env(variable, value).env(MARKER, &marker);
        if !terminal {
            // Who leads a group cannot begin a session, so a run with a terminal gets its group with that.
            command.process_group(0);
        }
        let child = match connect(&mut command, start.interactive, descriptors).and_then(|()| command.spawn())
        {
            Ok(child) => child,
            Err(error) => {
                if let Some(group) = cgroup {
                    group.remove();
                }
                return Err(error);
            }
        };
        let pid = Pid::from_child(&child);
        let mut run = Run {
            id: start.id,
            pid,
            marker,
            since: processes::started_at(pid).unwrap_or(0),
            deadline_ms: start.deadline_ms,
            grace_ms: start.grace_ms,
            kill_at_ms: None,
            cause: None,
            terminal,
            phase: Phase::Alive,
            cgroup,
            suspects: HashMap::new(),
            pipes: Pipes::default(),
        };
        let limit = usize::try_from(start.stdout_limit).unwrap_or(usize::MAX).min(STDOUT_BYTES_MAX);
        if let Err(error) = run.attach(child, start.payload, limit, outbox, wake) {
            // It is a process already, so it ends like one; only the outcome is another.
            run.pipes.kept().broken = Some(format!("its pipes cannot be read: {error}"));
            run.kill(KillCause::Stop);
        }
        Ok(run)
    }

    fn attach(
        &mut self,
        mut child: Child,
        payload: Bytes,
        limit: usize,
        outbox: &Outbox,
        wake: &Arc<Notify>,
    ) -> io::Result<()> {
        let stdin = child.stdin.take().map(ChildStdin::from_std).transpose()?;
        let stdout = child.stdout.take().map(ChildStdout::from_std).transpose()?;
        let stderr = child.stderr.take().map(ChildStderr::from_std).transpose()?;
        if let Some(mut stdin) = stdin {
            self.pipes.stdin = Some(tokio::spawn(async move {
                // A command that does not want its payload closes the pipe or ends, and that is fine.
                let _ = stdin.write_all(&payload).await;
            }));
        }
        if let Some(stdout) = stdout {
            let (kept, wake) = (self.pipes.kept.clone(), wake.clone());
            self.pipes.readers.push(tokio::spawn(async move {
                read_stdout(stdout, &kept, limit).await;
                wake.notify_one();
            }));
        }
        if let Some(stderr) = stderr {
            let (kept, wake, outbox) = (self.pipes.kept.clone(), wake.clone(), outbox.clone());
            let lines = Lines { id: self.id, not_started: not_started(&self.marker), kept, outbox };
            self.pipes.readers.push(tokio::spawn(async move {
                lines.read(stderr).await;
                wake.notify_one();
            }));
        }
        Ok(())
    }

    /// SIGTERM now and SIGKILL after the grace, unless something sooner was decided.
    pub(super) fn stop(&mut self, cause: KillCause, now_ms: u64, grace_ms: u64) {
        if self.phase != Phase::Alive {
            return;
        }
        if grace_ms == 0 {
            return self.kill(cause);
        }
        self.cause.get_or_insert(cause);
        let kill_at = now_ms.saturating_add(grace_ms);
        self.kill_at_ms = Some(self.kill_at_ms.map_or(kill_at, |earlier| earlier.min(kill_at)));
        self.signal(Signal::TERM);
        if self.terminal {
            // Shells that somebody types into do not mind SIGTERM. Their terminal hangs up.
            self.signal(Signal::HUP);
            self.signal(Signal::CONT);
        }
    }

    /// A signal to its process group; to its main process, as long as that has none of its own. Only while it is alive.
    fn signal(&self, signal: Signal) {
        if !processes::signal_group(self.pid, signal) && self.terminal {
            processes::signal_child(self.pid, signal);
        }
    }

    /// SIGKILL to all that can be named. Those that left the group are found when the main process is dead.
    pub(super) fn kill(&mut self, cause: KillCause) {
        if self.phase == Phase::Alive {
            self.cause.get_or_insert(cause);
            self.signal(Signal::KILL);
        }
        if let Some(group) = &self.cgroup {
            group.kill();
        }
    }

    /// What its clocks ask for.
    pub(super) fn on_time(&mut self, now_ms: u64) {
        if self.phase != Phase::Alive {
            return;
        }
        if self.kill_at_ms.is_some_and(|at| at <= now_ms) {
            self.kill(KillCause::Stop);
        } else if self.deadline_ms.take_if(|at| *at <= now_ms).is_some() {
            self.stop(KillCause::Deadline, now_ms, self.grace_ms);
        }
    }

    /// Reaps the main process if it is dead, after killing the rest of its group: once the main process is
    /// reaped, the group's id may come to mean another one.
    pub(super) fn look(&mut self) {
        if self.phase == Phase::Alive && processes::is_dead(self.pid) {
            processes::signal_group(self.pid, Signal::KILL);
            if let Some(outcome) = processes::reap(self.pid) {
                self.phase = Phase::Leaving(outcome);
            }
            if let Some(group) = &self.cgroup {
                group.kill();
            }
        }
    }

    /// No process is left of it, if its control group agrees.
    pub(super) fn on_left(&mut self, close_by_ms: u64) {
        let Phase::Leaving(outcome) = &self.phase else { return };
        if let Some(group) = &self.cgroup {
            if !group.is_empty() {
                return group.kill();
            }
            group.remove();
        }
        self.phase = Phase::Closing(outcome.clone(), close_by_ms);
    }

    /// Its end, once nothing more is to come.
    pub(super) fn end(&mut self, now_ms: u64) -> Option<End> {
        let Phase::Closing(outcome, close_by_ms) = &self.phase else { return None };
        if now_ms < *close_by_ms && !self.pipes.readers.iter().all(JoinHandle::is_finished) {
            return None;
        }
        let mut kept = self.pipes.kept();
        let said = kept.not_started.take().filter(|_| *outcome == Outcome::Exited(NOT_STARTED.into()));
        let outcome = kept.broken.take().or(said).map_or(outcome.clone(), Outcome::NotStarted);
        Some(End {
            id: self.id,
            outcome: Some(outcome),
            stdout: std::mem::take(&mut kept.stdout).into(),
            stdout_cut: kept.cut,
            lines_dropped: kept.dropped,
            killed: self.cause.map(i32::from),
        })
    }
}

/// Gives a command what it reads from and writes to: pipes to us, or the ends of the worker's streams.
fn connect(
    command: &mut Command,
    interactive: Option<Interactive>,
    descriptors: Vec<OwnedFd>,
) -> io::Result<()> {
    let (stdin, stdout, stderr) = match interactive {
        None => (Stdio::piped(), Stdio::piped(), Stdio::piped()),
        Some(_) => {
            let mut descriptors = descriptors.into_iter();
            let first = descriptors.next().ok_or_else(|| io::Error::other("it has no streams"))?;
            // One is a terminal, and stands for all three.
            let (second, third) = match (descriptors.next(), descriptors.next()) {
                (Some(second), Some(third)) => (second, third),
                (Some(_), None) | (None, Some(_)) | (None, None) => (first.try_clone()?, first.try_clone()?),
            };
            (first.into(), second.into(), third.into())
        }
    };
    command.stdin(stdin).stdout(stdout).stderr(stderr);
    Ok(())
}

/// A run's pipes, each with a task. They end with the run.
#[derive(Debug, Default)]
struct Pipes {
    stdin: Option<JoinHandle<()>>,
    readers: Vec<JoinHandle<()>>,
    kept: Arc<Mutex<Kept>>,
}

impl Pipes {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.stdin.iter().chain(&self.readers).for_each(JoinHandle::abort);
    }
}

/// What was read from the pipes and is not passed on yet.
#[derive(Debug, Default)]
struct Kept {
    stdout: Vec<u8>,
    cut: bool,
    dropped: u64,
    /// What the trampoline said.
    not_started: Option<String>,
    /// What the guardian itself has to say.
    broken: Option<String>,
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the beginning, and reads on so that the command is not held up.
async fn read_stdout(mut pipe: impl AsyncRead + Unpin, kept: &Mutex<Kept>, limit: usize) {
    let mut read = vec![0; READ_BYTES];
    while let Ok(length @ 1..) = pipe.read(&mut read).await {
        let mut kept = lock(kept);
        let room = limit - kept.stdout.len();
        kept.stdout.extend_from_slice(&read[..length.min(room)]);
        kept.cut |= length > room;
    }
}

/// Passes on standard error line by line.
struct Lines {
    id: u64,
    not_started: String,
    kept: Arc<Mutex<Kept>>,
    outbox: Outbox,
}

impl Lines {
    async fn read(&self, mut pipe: impl AsyncRead + Unpin) {
        let mut read = vec![0; READ_BYTES];
        let mut line = Vec::new();
        while let Ok(length @ 1..) = pipe.read(&mut read).await {
            let mut pieces = read[..length].split(|&byte| byte == b'\n').peekable();
            while let Some(piece) = pieces.next() {
                line.extend_from_slice(&piece[..piece.len().min(LINE_BYTES - line.len())]);
                if pieces.peek().is_some() {
                    self.on_line(&line);
                    line.clear();
                }
            }
            // Many short lines are much work, and other runs may be waiting to be killed.
            tokio::task::yield_now().await;
        }
        if !line.is_empty() {
            self.on_line(&line);
        }
    }

    fn on_line(&self, line: &[u8]) {
        if let Some(why) = line.strip_prefix(self.not_started.as_bytes()) {
            lock(&self.kept).not_started = Some(String::from_utf8_lossy(why).into_owned());
        } else if !self.outbox.line(self.id, line.strip_suffix(b"\r").unwrap_or(line)) {
            lock(&self.kept).dropped += 1;
        }
    }
}
