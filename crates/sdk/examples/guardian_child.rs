//! A process for tests to kill: the executable that a guardian and its runs are started from, and a worker.
//!
//! ```text
//! guardian_child guardian                 writes SEAT TOKEN LIFE to the file $GUARDIAN_CHILD_DEATH
//!                                         when its worker has died
//! guardian_child trampoline -- COMMAND... becomes the command
//! guardian_child worker DIR SEAT LEASE_MS -- COMMAND...
//!
//! instance TOKEN LIFE   the guardian said hello
//! guardian PID          its process
//! started PID           the command runs, under a lease from now
//! ended                 it does not any more
//! refused TEXT          the guardian could not be started; the process ends with status 2
//! ```
//!
//! The worker shuts its guardian down and ends when its standard input does.

#![expect(clippy::unwrap_used, reason = "a part of the tests, which fail by panicking")]

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use evenhand::guardian::{
    Event, Guardian, Instance, Options, RunSpec, Seat, boottime_ms, main_of_guardian, trampoline,
};

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    match args.next().unwrap().to_str().unwrap() {
        "guardian" => main_of_guardian(on_worker_death),
        "trampoline" => trampoline(args),
        "worker" => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(worker(args.collect()))
        }
        unknown => panic!("{unknown} is no mode; see the head of the source"),
    }
}

async fn on_worker_death(instance: Instance) {
    if let Some(path) = std::env::var_os("GUARDIAN_CHILD_DEATH") {
        let text = format!("{} {} {}\n", instance.seat, instance.token, instance.life);
        // A test that is over has taken its directory with it.
        let _ = std::fs::write(path, text);
    }
}

async fn worker(args: Vec<OsString>) -> ExitCode {
    let text = |at: usize| args[at].to_str().unwrap();
    let options = Options {
        program: "/proc/self/exe".into(),
        args: vec!["guardian".into()],
        trampoline: vec!["trampoline".into()],
        seat_dir: text(0).into(),
        work_dir: PathBuf::from(text(0)).join("work"),
        seat: Seat::Named(text(1).into()),
        lock_wait: Duration::ZERO,
        cgroups: false,
    };
    let (guardian, instance, mut events) = match Guardian::start(options).await {
        Ok(started) => started,
        Err(error) => {
            println!("refused {error}");
            return ExitCode::from(2);
        }
    };
    println!("instance {} {}", instance.token, instance.life);
    println!("guardian {}", guardian.pid());
    guardian.lease(boottime_ms() + text(2).parse::<u64>().unwrap()).await.unwrap();
    let command = args[4..].to_vec();
    guardian.run(RunSpec { id: 1, command, ..RunSpec::default() }).await.unwrap();
    let over = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    tokio::pin!(over);
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            _ = &mut over => break,
        };
        match event {
            Some(Event::Started { pid, .. }) => println!("started {pid}"),
            Some(Event::Ended(_)) => println!("ended"),
            Some(Event::Output { .. } | Event::Refused { .. }) => {}
            Some(Event::Gone) | None => return ExitCode::FAILURE,
        }
    }
    guardian.shutdown().await.unwrap();
    ExitCode::SUCCESS
}
