//! The last steps before a task's command takes over. Between `fork` and `exec` only unsafe code can run, so
//! the guardian starts this executable first; it does in safe code what a task process must do to itself,
//! and becomes the command.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getppid, getrlimit, ioctl_tiocsctty, set_parent_process_death_signal,
    setrlimit, setsid,
};

use super::processes::MARKER;
use super::{boottime_ms, cgroup};

/// Carries an [`Errand`] to the trampoline. The command does not get to see it.
const ERRAND: &str = "EVENHAND_TRAMPOLINE";
/// What a shell says of a command that is not there. Whether it was the command itself that ended so is
/// told by [`not_started`].
pub(super) const NOT_STARTED: u8 = 127;

/// What the guardian tells the trampoline.
#[derive(Debug, PartialEq)]
pub(super) struct Errand {
    pub(super) guardian: Pid,
    pub(super) lease_until_ms: u64,
    /// The limit of open files to go back to, if there was one.
    pub(super) files: Option<u64>,
    /// Standard input is a terminal that is to control the command's session.
    pub(super) terminal: bool,
    pub(super) cgroup: Option<PathBuf>,
}

impl Errand {
    /// The variable to give to the trampoline.
    pub(super) fn variable(&self) -> (&'static str, OsString) {
        let Errand { guardian, lease_until_ms, files, terminal, cgroup } = self;
        let files = files.map_or("-".to_owned(), |files| files.to_string());
        let terminal = if *terminal { "tty" } else { "-" };
        let guardian = guardian.as_raw_nonzero();
        let mut value = OsString::from(format!("{guardian} {lease_until_ms} {files} {terminal} "));
        value.push(cgroup.as_deref().unwrap_or(Path::new("")));
        (ERRAND, value)
    }

    fn parse(value: &OsString) -> Option<Errand> {
        use std::os::unix::ffi::{OsStrExt, OsStringExt};
        let mut parts = value.as_bytes().splitn(5, |&byte| byte == b' ');
        let mut part = || parts.next();
        let guardian = std::str::from_utf8(part()?).ok()?.parse().ok()?;
        let lease_until_ms = std::str::from_utf8(part()?).ok()?.parse().ok()?;
        let files = match std::str::from_utf8(part()?).ok()? {
            "-" => None,
            files => Some(files.parse().ok()?),
        };
        let terminal = match part()? {
            b"-" => false,
            b"tty" => true,
            _ => return None,
        };
        let cgroup = Some(part()?).filter(|path| !path.is_empty());
        let cgroup = cgroup.map(|path| PathBuf::from(OsString::from_vec(path.to_vec())));
        Some(Errand { guardian: Pid::from_raw(guardian)?, lease_until_ms, files, terminal, cgroup })
    }
}

/// What the trampoline says on standard error before the reason why a command was not executed. It names
/// the run, so that no command says it by chance.
pub(super) fn not_started(marker: &str) -> String {
    format!("evenhand: run {marker} was not started: ")
}

/// Becomes the command. The hidden subcommand that the guardian starts runs call this first thing, with
/// its arguments: `-- COMMAND...`. Returns only if the command cannot be executed.
pub fn trampoline(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let why = fly(args.into_iter().collect());
    let marker = std::env::var(MARKER).unwrap_or_default();
    eprintln!("{}{why}", not_started(&marker));
    ExitCode::from(NOT_STARTED)
}

/// Why it could not.
fn fly(args: Vec<OsString>) -> String {
    let command = args.strip_prefix(&[OsString::from("--")]).unwrap_or(&args);
    let Some(errand) = std::env::var_os(ERRAND).as_ref().and_then(Errand::parse) else {
        return format!("{ERRAND} is not set; this command is for the guardian alone");
    };
    let Some((program, arguments)) = command.split_first() else { return "no command was given".into() };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return format!("the parent-death signal cannot be set: {error}");
    }
    // A guardian that died before that line sends no signal.
    if getppid() != Some(errand.guardian) {
        return "its guardian is dead".into();
    }
    if errand.terminal {
        // What is typed there, and its end, reaches the command and no one else.
        if let Err(error) = setsid().and_then(|_| ioctl_tiocsctty(std::io::stdin())) {
            return format!("it cannot have its terminal: {error}");
        }
    }
    if let Some(dir) = &errand.cgroup {
        cgroup::join(dir);
    }
    // The guardian may have raised it for itself. If it cannot be lowered, it is only higher than asked for.
    let limit = Rlimit { current: errand.files, ..getrlimit(Resource::Nofile) };
    let _ = setrlimit(Resource::Nofile, limit);
    // The machine may have slept since the guardian looked.
    if boottime_ms() >= errand.lease_until_ms {
        return "the lease is over".into();
    }
    let error = Command::new(program).args(arguments).env_remove(ERRAND).exec();
    format!("{}: {error}", program.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errand_arrives_as_it_was_sent() {
        let deep = PathBuf::from("/sys/fs/cgroup/a b/c");
        for (files, terminal, cgroup) in [(None, false, None), (Some(1024), true, Some(deep))] {
            let guardian = rustix::process::getpid();
            let errand = Errand { guardian, lease_until_ms: 12, files, terminal, cgroup };
            assert_eq!(Errand::parse(&errand.variable().1), Some(errand));
        }
        for garbage in
            ["", "1", "1 2", "1 2 3", "1 2 3 -", "x 2 3 - ", "1 x 3 - ", "1 2 x - ", "0 2 3 - ", "1 2 3 x "]
        {
            assert_eq!(Errand::parse(&garbage.into()), None, "{garbage}");
        }
    }
}
