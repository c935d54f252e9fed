//! What a command gets, and what is heard of it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use bytes::Bytes;
use evenhand::guardian::{
    Event, GuardianError, KillCause, LINE_BYTES, Outcome, Refusal, RunSpec, STDOUT_BYTES, STDOUT_BYTES_MAX,
    boottime_ms,
};

use crate::support::{Bench, LONG_MS, signal, until};

#[tokio::test]
async fn the_payload_comes_back_as_the_result() {
    let mut bench = Bench::new("echo").await;
    let payload: Bytes = (0..STDOUT_BYTES_MAX).map(|n| (n % 251) as u8).collect();
    let spec = bench.spec(1, "cat");
    let spec = RunSpec { payload: payload.clone(), stdout_limit: Some(payload.len()), ..spec };
    bench.guardian.run(spec).await.unwrap();
    bench.started(1).await;
    let ended = bench.ended(1).await;
    assert_eq!(ended.outcome, Outcome::Exited(0));
    assert!(ended.stdout == payload);
    assert!(!ended.stdout_cut);
    assert_eq!(ended.killed, None);
}

#[tokio::test]
async fn exit_codes_and_signals_are_told_apart() {
    let mut bench = Bench::new("codes").await;
    for (id, code) in [0, 1, 75, 100, 127].into_iter().enumerate() {
        let ended = bench.run(id as u64, &format!("exit {code}")).await;
        assert_eq!((ended.outcome, ended.killed), (Outcome::Exited(code), None));
    }
    let ended = bench.run(9, "kill -SEGV $$").await;
    assert_eq!((ended.outcome, ended.killed), (Outcome::Signaled(11), None));
}

#[tokio::test]
async fn a_command_that_cannot_be_executed_was_not_started() {
    let mut bench = Bench::new("absent").await;
    let with_nul = OsString::from_vec(b"a\0b".to_vec());
    let commands: [(Vec<OsString>, &str); 4] = [
        (vec!["/does/not/exist".into()], "/does/not/exist: No such file"),
        (vec!["/".into()], "/: Permission denied"),
        (vec![], "no command"),
        (vec![with_nul], "nul byte"),
    ];
    for (id, (command, expected)) in (0..).zip(commands) {
        bench.guardian.run(RunSpec { id, command, ..RunSpec::default() }).await.unwrap();
        let mut event = bench.event().await;
        if let Event::Started { .. } = event {
            event = bench.event().await;
        }
        let Event::Ended(ended) = event else { panic!("{event:?}") };
        let Outcome::NotStarted(why) = &ended.outcome else { panic!("{ended:?}") };
        assert!(why.contains(expected), "{why}");
    }
    // The guardian is none the worse for it.
    assert_eq!(bench.run(9, "exit 3").await.outcome, Outcome::Exited(3));
}

#[tokio::test]
async fn the_environment_is_ours_plus_the_workers_plus_the_marker() {
    let mut bench = Bench::new("env").await;
    let spec =
        bench.spec(7, "echo $PATH; echo $EVENHAND_TASK_ID; echo $EVENHAND_RUN; env | grep -c TRAMPOLINE");
    let env = vec![("EVENHAND_TASK_ID".into(), "t1".into()), ("EVENHAND_RUN".into(), "forged".into())];
    bench.guardian.run(RunSpec { env, ..spec }).await.unwrap();
    bench.started(7).await;
    let stdout = bench.ended(7).await.stdout;
    let lines: Vec<&str> = std::str::from_utf8(&stdout).unwrap().lines().collect();
    assert_eq!(lines[0], std::env::var("PATH").unwrap());
    assert_eq!(lines[1], "t1");
    assert!(lines[2].starts_with("env@"), "{}", lines[2]);
    assert_eq!(lines[3], "0");
}

#[tokio::test]
async fn a_command_that_reads_nothing_blocks_nothing() {
    let mut bench = Bench::new("unread").await;
    let payload = Bytes::from(vec![b'x'; 1024 * 1024]);
    // One closes its standard input, one leaves it open, and both stay until they are stopped.
    for (id, script) in [(1, "exec sleep 1000 0<&-"), (2, "exec sleep 1000")] {
        let spec = RunSpec { payload: payload.clone(), ..bench.spec(id, script) };
        bench.guardian.run(spec).await.unwrap();
        bench.started(id).await;
    }
    let spec = RunSpec { payload, ..bench.spec(3, "echo done") };
    bench.guardian.run(spec).await.unwrap();
    bench.started(3).await;
    assert_eq!(bench.ended(3).await.stdout, "done\n");
    for id in [1, 2] {
        bench.guardian.stop(id, 0).await.unwrap();
        assert_eq!(bench.ended(id).await.killed, Some(KillCause::Stop));
    }
}

#[tokio::test]
async fn endless_output_is_cut_and_blocks_nothing() {
    let mut bench = Bench::new("endless").await;
    let ended = bench.run(1, "yes | head -c 10000000; exit 5").await;
    assert_eq!(
        (ended.outcome, ended.stdout.len(), ended.stdout_cut),
        (Outcome::Exited(5), STDOUT_BYTES, true)
    );
    bench.ready(2, "yes | (head -c 1000000; echo ready >&2; cat)").await;
    let spec = RunSpec { stdout_limit: Some(3), ..bench.spec(3, "printf abcd") };
    bench.guardian.run(spec).await.unwrap();
    bench.started(3).await;
    let ended = bench.ended(3).await;
    assert_eq!((ended.stdout, ended.stdout_cut), (Bytes::from("abc"), true));
    bench.guardian.stop(2, 0).await.unwrap();
    assert!(bench.ended(2).await.stdout_cut);
}

#[tokio::test]
async fn standard_error_arrives_by_lines_before_the_end() {
    let mut bench = Bench::new("lines").await;
    let long = "y".repeat(LINE_BYTES);
    let script = r"printf 'one\n\ntwo\r\n' >&2; printf '\377\n' >&2
                   head -c 10000 /dev/zero | tr '\0' y >&2; printf '\nlast' >&2";
    let ended = bench.run(1, script).await;
    assert_eq!(ended.lines_dropped, 0);
    assert_eq!(bench.lines[&1], ["one", "", "two", "\u{fffd}", &long, "last"]);
}

#[tokio::test]
async fn lines_that_nobody_reads_are_dropped_and_counted() {
    let mut bench = Bench::new("flood").await;
    bench.start(1, "seq 200000 >&2; echo 1 > $DIR/done").await;
    bench.started(1).await;
    // Nobody hears events now, and the run is not held up by it.
    until("the end of the flood", || bench.dir.path().join("done").exists()).await;
    let ended = bench.ended(1).await;
    let heard = bench.lines[&1].len() as u64;
    assert!(ended.lines_dropped > 0);
    assert_eq!(heard + ended.lines_dropped, 200_000);
}

#[tokio::test]
async fn an_id_is_free_when_its_run_has_ended() {
    let mut bench = Bench::new("ids").await;
    bench.start(1, "exec sleep 1000").await;
    bench.started(1).await;
    bench.start(1, "exit 0").await;
    assert_eq!(bench.event().await, Event::Refused { id: 1, why: Refusal::Duplicate });
    bench.guardian.kill_all().await.unwrap();
    assert_eq!(bench.ended(1).await.killed, Some(KillCause::Stop));
    assert_eq!(bench.run(1, "exit 4").await.outcome, Outcome::Exited(4));
}

#[tokio::test]
async fn what_does_not_fit_in_a_frame_is_refused_by_the_worker() {
    let mut bench = Bench::new("large").await;
    let spec = RunSpec { payload: Bytes::from(vec![0; 5_000_000]), ..bench.spec(1, "cat") };
    let error = bench.guardian.run(spec).await.unwrap_err();
    assert!(matches!(error, GuardianError::TooLarge { id: 1, .. }), "{error}");
    assert_eq!(bench.run(1, "exit 0").await.outcome, Outcome::Exited(0));
}

#[tokio::test]
async fn signals_of_a_terminal_do_not_end_the_guardian() {
    use rustix::process::Signal;
    let mut bench = Bench::new("deaf").await;
    for sent in [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT] {
        signal(bench.guardian.pid(), sent);
    }
    // And what it does not hear, its runs do.
    let ended = bench.run(1, "kill -TERM $$; sleep 1000").await;
    assert_eq!(ended.outcome, Outcome::Signaled(Signal::TERM.as_raw()));
}

#[tokio::test]
async fn a_new_deadline_replaces_the_old_one() {
    let mut bench = Bench::new("later").await;
    let deadline_ms = Some(boottime_ms() + LONG_MS);
    let spec = RunSpec { deadline_ms, ..bench.spec(1, "exec sleep 1000") };
    bench.guardian.run(spec).await.unwrap();
    bench.started(1).await;
    bench.guardian.set_deadline(1, Some(boottime_ms())).await.unwrap();
    let ended = bench.ended(1).await;
    assert_eq!(ended.killed, Some(KillCause::Deadline));
}

#[tokio::test]
async fn a_command_has_the_limits_that_the_worker_has() {
    let mut bench = Bench::new("limits").await;
    let limits = |name| {
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        limits.lines().find(|line| line.starts_with(name)).unwrap().to_owned()
    };
    let ended = bench.run(1, "grep '^Max open files' /proc/self/limits").await;
    assert_eq!(std::str::from_utf8(&ended.stdout).unwrap().trim_end(), limits("Max open files").trim_end());
}
