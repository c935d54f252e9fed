//! The task of the tests against the real binary: it leaves records that do not depend on what anybody believes.
//!
//! `checked_task DIR` holds a lock on `DIR/locks/TASK` for its whole life, which the kernel frees when its last
//! process is dead: whoever does not get it at once has met another run of the same task. It appends lines to
//! `DIR/records`, each with the time since boot in nanoseconds:
//!
//! ```text
//! start TASK ATTEMPT FENCE PID TIME
//! overlap TASK ATTEMPT FENCE PID TIME
//! end TASK ATTEMPT FENCE PID TIME
//! ```
//!
//! What it does stands in its payload, as words: `sleep MS`, `until FILE` (waits until it is there), `child` and
//! `daemon` (leave a process behind that holds the lock, in the same session or in one of its own), `print TEXT`,
//! `exit CODE`, `exit-first CODE` (on the first attempt only).

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::time::{ClockId, clock_gettime};

/// Long enough to be met by whoever comes too early.
const LINGERS_SECONDS: &str = "60";

struct Task {
    dir: PathBuf,
    id: String,
    attempt: String,
    fence: String,
}

impl Task {
    /// One line, in one write, so that lines of many processes do not mix.
    fn record(&self, what: &str) -> std::io::Result<()> {
        let now = clock_gettime(ClockId::Boottime);
        let nanos = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let Task { dir, id, attempt, fence } = self;
        let line = format!("{what} {id} {attempt} {fence} {} {nanos}\n", std::process::id());
        let mut records = OpenOptions::new().append(true).create(true).open(dir.join("records"))?;
        records.write_all(line.as_bytes())
    }

    /// The lock, or none if another process has it.
    fn lock(&self) -> std::io::Result<Option<File>> {
        let path = self.dir.join("locks").join(&self.id);
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn wait_for(path: &Path) {
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Leaves a process behind. It has the lock's descriptor, and so the lock.
fn leave(program: &str, lock: &File) -> std::io::Result<()> {
    fcntl_setfd(lock, FdFlags::empty())?;
    let words: Vec<&str> = program.split(' ').chain([LINGERS_SECONDS]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    Ok(())
}

fn run() -> std::io::Result<u8> {
    let env = |name: &str| std::env::var(name).unwrap_or_else(|_| "-".into());
    let dir = PathBuf::from(std::env::args_os().nth(1).unwrap_or_default());
    let (id, attempt) = (env("EVENHAND_TASK_ID"), env("EVENHAND_ATTEMPT"));
    let task = Task { dir, id, attempt, fence: env("EVENHAND_FENCE") };
    let mut payload = String::new();
    std::io::stdin().read_to_string(&mut payload)?;
    let Some(lock) = task.lock()? else {
        task.record("overlap")?;
        return Ok(100);
    };
    task.record("start")?;
    let mut exit = 0;
    let mut words = payload.split_ascii_whitespace();
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        match word {
            "sleep" => std::thread::sleep(Duration::from_millis(number())),
            "until" => wait_for(Path::new(words.next().unwrap_or("/"))),
            "child" => leave("sleep", &lock)?,
            "daemon" => leave("setsid sleep", &lock)?,
            "print" => print!("{}", words.next().unwrap_or_default()),
            "exit" => exit = number() as u8,
            "exit-first" => {
                let code = number() as u8;
                if task.attempt == "1" {
                    exit = code;
                }
            }
            other => eprintln!("{other} is nothing to do"),
        }
    }
    task.record("end")?;
    Ok(exit)
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("checked_task: {error}");
            ExitCode::FAILURE
        }
    }
}
