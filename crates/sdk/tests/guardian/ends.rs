//! When and how runs end, and that nothing is left of them.

use std::fs::OpenOptions;

use evenhand::guardian::{Event, KillCause, Outcome, Refusal, RunSpec, boottime_ms};
use rustix::process::Signal;

use crate::support::{Bench, LONG_MS, lives, signal, state, strays, until};

const DEAF: &str = "trap '' TERM; echo ready >&2; while :; do sleep 1; done";
const POLITE: &str = "trap 'exit 3' TERM; echo ready >&2; while :; do sleep 0.01; done";

#[tokio::test]
async fn a_run_that_is_stopped_has_its_grace_and_not_more() {
    let mut bench = Bench::new("grace").await;
    bench.ready(1, POLITE).await;
    bench.guardian.stop(1, LONG_MS).await.unwrap();
    let ended = bench.ended(1).await;
    assert_eq!((ended.outcome, ended.killed), (Outcome::Exited(3), Some(KillCause::Stop)));
    bench.ready(2, DEAF).await;
    bench.guardian.stop(2, 50).await.unwrap();
    let ended = bench.ended(2).await;
    assert_eq!((ended.outcome, ended.killed), (Outcome::Signaled(9), Some(KillCause::Stop)));
    // One that has ended is not there to be stopped.
    bench.guardian.stop(2, 50).await.unwrap();
}

#[tokio::test]
async fn a_deadline_ends_a_run_with_grace() {
    let mut bench = Bench::new("deadline").await;
    for (id, script, grace_ms, outcome) in
        [(1, POLITE, LONG_MS, Outcome::Exited(3)), (2, DEAF, 50, Outcome::Signaled(9))]
    {
        let deadline_ms = boottime_ms() + 300;
        let spec = RunSpec { deadline_ms: Some(deadline_ms), grace_ms, ..bench.spec(id, script) };
        bench.guardian.run(spec).await.unwrap();
        bench.started(id).await;
        let ended = bench.ended(id).await;
        assert_eq!((ended.outcome, ended.killed), (outcome, Some(KillCause::Deadline)));
        assert!(boottime_ms() >= deadline_ms);
    }
}

#[tokio::test]
async fn a_deadline_counts_during_a_long_grace() {
    let mut bench = Bench::new("both").await;
    let spec = RunSpec { deadline_ms: Some(boottime_ms() + 300), grace_ms: 1, ..bench.spec(1, DEAF) };
    bench.guardian.run(spec).await.unwrap();
    bench.started(1).await;
    bench.guardian.stop(1, LONG_MS).await.unwrap();
    assert_eq!(bench.ended(1).await.killed, Some(KillCause::Stop));
}

/// Five ways to hide from the end of a run: in the background, in a session of one's own, the same as an
/// orphan, the same without the marker, and as the child of one that hides. Each writes its process id to a
/// file.
const HIDERS: &str = r#"
    export HIDE='echo $$ > $DIR/$0.tmp; mv $DIR/$0.tmp $DIR/$0; exec sleep 1000'
    sh -c "$HIDE" a &
    setsid sh -c "$HIDE" b &
    (setsid sh -c "$HIDE" c &)
    (setsid env -i DIR=$DIR PATH=$PATH sh -c "$HIDE" d &)
    (setsid sh -c 'setsid env -i DIR=$DIR PATH=$PATH sh -c "$HIDE" e & wait' &)
    for f in a b c d e; do while [ ! -e $DIR/$f ]; do sleep 0.01; done; done
"#;
const HIDDEN: [&str; 5] = ["a", "b", "c", "d", "e"];

async fn nothing_hides(cgroups: bool) {
    let mut bench = Bench::with(if cgroups { "hide-cgroup" } else { "hide" }, |options| {
        options.cgroups = cgroups;
    })
    .await;
    let ended = bench.run(1, &format!("{HIDERS} exit 6")).await;
    assert_eq!((ended.outcome, ended.killed), (Outcome::Exited(6), None));
    // At the very moment the end is known, not some time later: they are not even zombies.
    for file in HIDDEN {
        assert_eq!(state(bench.number(file)), None, "{file}");
    }
    assert!(strays(bench.dir.path(), &bench.instance.seat).is_empty());
}

#[tokio::test]
async fn nothing_hides_from_the_end_of_a_run() {
    nothing_hides(false).await;
}

#[tokio::test]
async fn nothing_hides_from_the_end_of_a_run_in_a_cgroup() {
    nothing_hides(true).await;
}

/// The directory of the group that a run is in.
const CGROUP: &str =
    "echo $(grep ' cgroup2 ' /proc/mounts | cut -d' ' -f2 | head -n1)$(sed -n s/^0:://p /proc/self/cgroup)";

#[tokio::test]
async fn a_cgroup_lives_as_long_as_its_run() {
    let mut bench = Bench::with("group", |options| options.cgroups = true).await;
    let ended = bench.run(1, &format!("{CGROUP} > $DIR/group; exec sleep 0")).await;
    assert_eq!(ended.outcome, Outcome::Exited(0));
    let group = std::fs::read_to_string(bench.dir.path().join("group")).unwrap();
    // Where we may make none, runs go without.
    if group.contains("/evenhand-group@") {
        assert!(!std::path::Path::new(group.trim()).exists(), "{group}");
    } else {
        eprintln!("no control groups here: {group}");
    }
}

#[tokio::test]
async fn what_a_run_hides_lives_as_long_as_the_run() {
    let mut bench = Bench::new("hidden").await;
    bench.ready(1, &format!("{HIDERS} echo ready >&2; exec sleep 1000")).await;
    for id in 2..5 {
        bench.run(id, "exit 0").await;
    }
    for file in HIDDEN {
        assert!(lives(bench.number(file)), "{file}");
    }
    bench.guardian.stop(1, 0).await.unwrap();
    bench.ended(1).await;
    for file in HIDDEN {
        assert_eq!(state(bench.number(file)), None, "{file}");
    }
}

#[tokio::test]
async fn who_forks_and_ends_all_the_time_does_not_get_away() {
    let mut bench = Bench::new("dodge").await;
    bench.ready(1, "echo ready >&2; exec sleep 1000").await;
    let dodge = "f() { echo > $DIR/forked; f & }; f";
    for (id, env) in [(2, ""), (3, "env -i DIR=$DIR")] {
        let ended = bench
            .run(id, &format!("(setsid {env} sh -c '{dodge}' &); while [ ! -e $DIR/forked ]; do :; done"))
            .await;
        assert_eq!((ended.outcome, ended.killed), (Outcome::Exited(0), None));
        std::fs::remove_file(bench.dir.path().join("forked")).unwrap();
        assert_eq!(strays(bench.dir.path(), "dodge").len(), 1, "that of the run that is alive");
    }
    assert!(!bench.dir.path().join("forked").exists(), "somebody forks on");
}

#[tokio::test]
async fn many_runs_that_end_at_once_all_end() {
    let mut bench = Bench::new("many").await;
    for id in 0..40 {
        bench.start(id, "setsid sleep 1000 & sleep 0.2").await;
    }
    let mut ended = 0;
    while ended < 40 {
        ended += u64::from(matches!(bench.event().await, Event::Ended(_)));
    }
    assert!(strays(bench.dir.path(), "many").is_empty());
}

#[tokio::test]
async fn a_pipe_that_an_outsider_holds_does_not_delay_the_end_for_ever() {
    let mut bench = Bench::new("held").await;
    let pid = bench.ready(1, "echo out; echo ready >&2; exec sleep 1000").await;
    let open = |fd| OpenOptions::new().write(true).open(format!("/proc/{pid}/fd/{fd}")).unwrap();
    let held = (open(1), open(2));
    bench.guardian.stop(1, 0).await.unwrap();
    assert_eq!(bench.ended(1).await.stdout, "out\n");
    drop(held);
}

#[tokio::test]
async fn past_the_lease_everything_dies_and_nothing_starts() {
    let mut bench = Bench::new("lease").await;
    bench.ready(1, &format!("{HIDERS} {DEAF}")).await;
    bench.ready(2, DEAF).await;
    let until_ms = boottime_ms() + 200;
    bench.guardian.lease(until_ms).await.unwrap();
    for _ in 1..=2 {
        let event = bench.event().await;
        let Event::Ended(ended) = event else { panic!("{event:?}") };
        assert_eq!((ended.outcome, ended.killed), (Outcome::Signaled(9), Some(KillCause::Lease)));
    }
    assert!(boottime_ms() >= until_ms);
    for file in HIDDEN {
        assert_eq!(state(bench.number(file)), None, "{file}");
    }
    bench.start(3, "exit 0").await;
    assert_eq!(bench.event().await, Event::Refused { id: 3, why: Refusal::NoLease });
    bench.guardian.lease(boottime_ms() + LONG_MS).await.unwrap();
    assert_eq!(bench.run(3, "exit 0").await.outcome, Outcome::Exited(0));
}

#[tokio::test]
async fn without_a_lease_nothing_starts() {
    let mut bench = Bench::new("none").await;
    bench.guardian.lease(0).await.unwrap();
    bench.start(1, "exit 0").await;
    assert_eq!(bench.event().await, Event::Refused { id: 1, why: Refusal::NoLease });
}

#[tokio::test]
async fn an_order_that_lay_in_the_pipe_past_the_lease_starts_nothing() {
    let mut bench = Bench::new("buffered").await;
    let guardian = bench.guardian.pid();
    signal(guardian, Signal::STOP);
    until("the stop", || state(guardian) == Some('T')).await;
    let until_ms = boottime_ms() + 100;
    bench.guardian.lease(until_ms).await.unwrap();
    for id in 1..=3 {
        bench.start(id, "touch $DIR/started").await;
    }
    until("the end of the lease", || boottime_ms() >= until_ms).await;
    signal(guardian, Signal::CONT);
    for id in 1..=3 {
        assert_eq!(bench.event().await, Event::Refused { id, why: Refusal::NoLease });
    }
    assert!(!bench.dir.path().join("started").exists());
}

#[tokio::test]
async fn shutdown_ends_what_runs_and_says_so() {
    let mut bench = Bench::new("shutdown").await;
    bench.ready(1, DEAF).await;
    let (dir, rest) = bench.shutdown().await;
    let [Event::Ended(ended)] = rest.as_slice() else { panic!("{rest:?}") };
    assert_eq!((&ended.outcome, ended.killed), (&Outcome::Signaled(9), Some(KillCause::Stop)));
    assert!(strays(dir.path(), "shutdown").is_empty());
}
