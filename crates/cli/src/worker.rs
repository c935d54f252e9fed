//! `evenhand worker`: runs a command for each task; and the two hidden commands that its processes are.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use evenhand::guardian::Instance;
use evenhand::{Commands, WorkerError};
use tokio::sync::watch;

use crate::client::ServerArgs;
use crate::log::LogArgs;
use crate::{Done, Failure, parse, serve};

/// What a worker is told.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand worker render -- ./render.sh
  evenhand worker render=3 mail=1 --slots 8 --seat gpu-7 -- python3 work.py

The command gets the payload on standard input, and EVENHAND_TASK_ID, EVENHAND_QUEUE, EVENHAND_KEY, \
EVENHAND_ATTEMPT, EVENHAND_FENCE and, if there is one, EVENHAND_DEADLINE_MS in its environment. If the task has \
files, it works in a directory of its own, EVENHAND_DIR, where they are; it is removed afterwards. Its standard \
output is the result, lines on standard error are shown to whoever watches the task. Exit code 0 is success, 75 \
asks for another try, 100 fails for good, any other fails and is tried again.

If somebody talks to it (evenhand attach), EVENHAND_INTERACTIVE is tty or pipes, its streams are the client's, and there \
is no payload.

SIGTERM and Ctrl-C drain the worker: it takes no more tasks and ends when those it runs have ended.")]
pub(crate) struct Args {
    /// The queues to serve, each with its share of the slots
    #[arg(required = true, env = "EVENHAND_QUEUES", value_delimiter = ' ', value_parser = parse::queue, value_name = "QUEUE[=WEIGHT]")]
    queues: Vec<(String, u32)>,
    /// How many tasks to run at once; as many as there are cores, if nobody says
    #[arg(long, env = "EVENHAND_SLOTS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slots: Option<u32>,
    /// The worker's stable name; the first free one of those named after this machine, if nobody says
    #[arg(long, env = "EVENHAND_SEAT", value_name = "NAME")]
    seat: Option<String>,
    /// Where the lock files of this machine's seats are
    #[arg(long, env = "EVENHAND_SEAT_DIR", value_name = "DIR")]
    seat_dir: Option<PathBuf>,
    /// Where the directories of runs with files are; below the seat directory, if nobody says
    #[arg(long, env = "EVENHAND_WORK_DIR", value_name = "DIR")]
    work_dir: Option<PathBuf>,
    /// How long a command has from SIGTERM to SIGKILL
    #[arg(long, env = "EVENHAND_GRACE", default_value = "10s", value_parser = parse::duration, value_name = "TIME")]
    grace: Duration,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    log: LogArgs,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What a guardian is told beside what its worker says.
#[derive(Debug, ClapArgs)]
pub(crate) struct GuardianArgs {
    #[command(flatten)]
    server: ServerArgs,
}

/// What a trampoline is told.
#[derive(Debug, ClapArgs)]
pub(crate) struct TrampolineArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) async fn run(args: Args) -> Done {
    args.log.begin()?;
    if let Some(program) = args.command.first()
        && !can_run(program)
    {
        let text = format!("command: {} is not there, or cannot be run", program.display());
        return Err(Failure { text, exit: 2 });
    }
    let mut signals = serve::Signals::new()?;
    let (drain, draining) = watch::channel(false);
    let mut worker = commands(args.server.server(), args.command).grace(args.grace).drain_on(draining);
    for (queue, weight) in &args.queues {
        worker = worker.queue(queue, *weight);
    }
    if let Some(slots) = args.slots {
        worker = worker.slots(slots);
    }
    if let Some(seat) = args.seat {
        worker = worker.seat(seat);
    }
    if let Some(dir) = args.seat_dir {
        worker = worker.seat_dir(dir);
    }
    if let Some(dir) = args.work_dir {
        worker = worker.work_dir(dir);
    }
    let mut running = std::pin::pin!(worker.run());
    let ended = tokio::select! {
        ended = &mut running => ended,
        _ = signals.told_to_stop() => {
            tracing::info!("waiting for what runs to end; once more to stop at once");
            let _ = drain.send(true);
            tokio::select! {
                ended = running => ended,
                _ = signals.told_to_stop() => {
                    // The guardian sees this process end, and kills what runs.
                    return Err(Failure::new("stopped at once: what ran is killed and will be run again"));
                }
            }
        }
    };
    ended.map(|()| ExitCode::SUCCESS).map_err(failure)
}

/// Whether there is such a program, as a shell would find it. A typo must not fail every task of a queue.
fn can_run(program: &OsStr) -> bool {
    let is_program = |path: &Path| {
        path.metadata().is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    if program.as_encoded_bytes().contains(&b'/') {
        return is_program(Path::new(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| is_program(&dir.join(program)))
}

pub(crate) fn failure(error: WorkerError) -> Failure {
    match error {
        WorkerError::Refused(refusal) => refusal.into(),
        WorkerError::Guardian(error) => Failure::new(error),
    }
}

/// A worker that has this executable as its guardian.
pub(crate) fn commands(server: &str, command: Vec<OsString>) -> Commands {
    let guardian = vec!["guardian".into(), "--server".into(), server.into()];
    Commands::new(server, command, "/proc/self/exe", guardian, vec!["trampoline".into()])
}

/// The guardian's process.
pub(crate) fn guardian(args: GuardianArgs) -> ExitCode {
    let server = args.server.server().to_string();
    evenhand::guardian::main_of_guardian(async move |instance: Instance| {
        evenhand::say_dead(&server, &instance, false).await;
    })
}

/// A task's process, before its command.
pub(crate) fn trampoline(args: TrampolineArgs) -> ExitCode {
    evenhand::guardian::trampoline(args.args)
}
