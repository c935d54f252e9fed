//! Workers and guardians that are killed or stopped at any time. What they ran dies.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use evenhand::guardian::{Event, boottime_ms};
use rustix::process::Signal;

use crate::support::{Bench, Worker, child_program, lives, next_life, signal, state, strays, until};

/// A run with something in a session of its own, which ignores all but SIGKILL.
const STUBBORN: &str = "setsid sh -c 'trap \"\" TERM HUP; echo $$ > $DIR/tmp; mv $DIR/tmp $DIR/stray
                            while :; do sleep 1; done' &
                        while [ ! -e $DIR/stray ]; do sleep 0.01; done
                        echo ready >&2; while :; do sleep 1; done";

async fn stray(dir: &std::path::Path) -> u32 {
    until("the stray", || dir.join("stray").exists()).await;
    fs::read_to_string(dir.join("stray")).unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn a_stopped_worker_does_not_keep_its_runs_past_the_lease() {
    let dir = tempfile::tempdir().unwrap();
    // The flood fills the pipe to the worker, which must not keep the guardian from killing.
    let script = format!("(while :; do seq 1000 >&2; done) & {STUBBORN}");
    let lease_ms = 2_000;
    let before_ms = boottime_ms();
    let worker = Worker::start(dir.path(), "stopped", lease_ms, &script);
    signal(worker.pid(), Signal::STOP);
    until("the stop", || state(worker.pid()) == Some('T')).await;
    let stray = stray(dir.path()).await;
    until("the run's death", || !lives(worker.run) && !lives(stray)).await;
    until("the end of all", || strays(dir.path(), "stopped").is_empty()).await;
    assert!(boottime_ms() >= before_ms + lease_ms);
    assert_eq!(state(worker.pid()), Some('T'));
    assert!(lives(worker.guardian));
}

#[tokio::test]
async fn what_a_killed_worker_ran_dies_and_its_death_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(dir.path(), "killed", 600_000, STUBBORN);
    let stray = stray(dir.path()).await;
    worker.kill();
    let told = dir.path().join("death");
    until("the word of its death", || fs::read_to_string(&told).is_ok_and(|text| text.ends_with('\n'))).await;
    // When it is told, it is true.
    assert!(!lives(worker.run) && !lives(stray));
    assert!(strays(dir.path(), "killed").is_empty());
    let text = fs::read_to_string(&told).unwrap();
    assert_eq!(text, format!("killed {} {}\n", worker.token, worker.life));

    let (guardian, next, _events) = next_life(dir.path(), "killed").await;
    assert_eq!((next.token, next.life), (worker.token, worker.life + 1));
    guardian.shutdown().await.unwrap();
    // An orderly end is no death.
    assert_eq!(fs::read_to_string(&told).unwrap(), text);
}

#[tokio::test]
async fn what_a_killed_guardian_ran_is_dead_before_the_worker_knows() {
    guardian_killed(false).await;
}

#[tokio::test]
async fn what_a_killed_guardian_ran_in_cgroups_is_dead_before_the_worker_knows() {
    guardian_killed(true).await;
}

/// As in a container whose first process began no session: its own is out of sight there, and has no number.
#[test]
fn what_a_killed_guardian_ran_dies_also_where_the_session_is_out_of_sight() {
    let tests = std::env::current_exe().unwrap();
    let test = "deaths::what_a_killed_guardian_ran_is_dead_before_the_worker_knows";
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc"]).arg(tests).args(["--exact", test]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

async fn guardian_killed(cgroups: bool) {
    let mut bench = Bench::with("orphaned", |options| options.cgroups = cgroups).await;
    // A child of the worker's own, which is none of the guardian's business.
    let mut bystander = Command::new("sleep").arg("1000").spawn().unwrap();
    // One more without a marker, which only the worker can find: it becomes its child.
    let pid = bench.ready(1, &format!("env -i sleep 1000 & echo $! > $DIR/bare; {STUBBORN}")).await;
    let (stray, bare) = (bench.number("stray"), bench.number("bare"));
    signal(bench.guardian.pid(), Signal::KILL);
    assert_eq!(bench.event().await, Event::Gone);
    for (who, pid) in [("the run", pid), ("the stray", stray), ("the bare", bare)] {
        assert!(!lives(pid), "{who} lives: {:?}", fs::read_to_string(format!("/proc/{pid}/status")));
    }
    assert!(strays(bench.dir.path(), "orphaned").is_empty());
    assert!(lives(bystander.id()));
    bystander.kill().unwrap();
    bystander.wait().unwrap();
    assert!(bench.guardian.lease(boottime_ms()).await.is_err());
    let dir = bench.dir.path().to_owned();
    let (guardian, next, _events) = next_life(&dir, "orphaned").await;
    assert_eq!((next.token, next.life), (bench.instance.token, bench.instance.life + 1));
    guardian.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_guardian_that_is_killed_while_starting_runs_leaves_none() {
    for round in 0..10 {
        let mut bench = Bench::new("busy").await;
        for id in 0..20 {
            bench.start(id, "setsid sleep 1000 & sleep 1000").await;
        }
        for id in 0..round {
            bench.started(id).await;
        }
        signal(bench.guardian.pid(), Signal::KILL);
        while bench.event().await != Event::Gone {}
        assert!(strays(bench.dir.path(), "busy").is_empty(), "round {round}");
    }
}

#[tokio::test]
async fn a_guardian_that_is_stopped_past_the_lease_is_killed_with_its_runs() {
    let mut bench = Bench::new("stalled").await;
    let pid = bench.ready(1, STUBBORN).await;
    let stray = bench.number("stray");
    signal(bench.guardian.pid(), Signal::STOP);
    bench.guardian.lease(boottime_ms() + 100).await.unwrap();
    assert_eq!(bench.event().await, Event::Gone);
    assert!(!lives(pid) && !lives(stray));
}

#[tokio::test]
async fn when_worker_and_guardian_die_at_once_the_next_life_waits_for_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(dir.path(), "both", 600_000, STUBBORN);
    let stray = stray(dir.path()).await;
    // Stopped, it cannot notice that its guardian died.
    signal(worker.pid(), Signal::STOP);
    signal(worker.guardian, Signal::KILL);
    worker.kill();
    until("the death of the main process", || !lives(worker.run)).await;
    assert!(lives(stray), "nobody was left to kill it");
    let (guardian, next, _events) = next_life(dir.path(), "both").await;
    assert!(!lives(stray));
    assert!(strays(dir.path(), "both").is_empty());
    assert_eq!((next.token, next.life), (worker.token, worker.life + 1));
    guardian.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_handle_that_is_dropped_counts_as_a_dead_worker() {
    let mut bench = Bench::new("dropped").await;
    let pid = bench.ready(1, STUBBORN).await;
    let stray = bench.number("stray");
    let rest = bench.rest().await;
    assert_eq!(rest.last(), Some(&Event::Gone));
    assert!(!lives(pid) && !lives(stray));
}

#[tokio::test]
async fn a_guardian_that_hears_nonsense_ends_in_order() {
    for nonsense in [&b"\xff\xff\xff\xff"[..], &[1, 0, 0, 0, 0xff], &[0, 0, 0, 0], &[2, 0, 0, 0, 0x28, 1]] {
        let mut command = Command::new(child_program());
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        command.arg("guardian").stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let guardian = command.spawn().unwrap();
        ours.write_all(nonsense).unwrap();
        let output = guardian.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with("evenhand guardian: ") && !text.contains("panicked"), "{text}");
    }
}
