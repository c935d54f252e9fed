//! Who may sit where.

use std::process::{Command, Stdio};

use evenhand::guardian::{Guardian, GuardianError, Options, Seat};

use crate::support::{Bench, lives, next_life, options, refusal};

#[tokio::test]
async fn a_seat_in_use_is_refused_by_name_and_pid() {
    let bench = Bench::new("taken").await;
    let error = refusal(options(bench.dir.path(), "taken")).await;
    let pid = bench.guardian.pid();
    let text = format!("seat taken is in use on this machine by pid {pid}; stop that worker");
    assert!(error.to_string().starts_with(&text), "{error}");
    bench.shutdown().await;
}

#[tokio::test]
async fn the_first_free_seat_of_a_name_is_taken() {
    let bench = Bench::new("host").await;
    let first_free = Options { seat: Seat::FirstFree("host".into()), ..options(bench.dir.path(), "") };
    let (second, instance, _events) = Guardian::start(first_free.clone()).await.unwrap();
    assert_eq!(instance.seat, "host-2");
    let (dir, _) = bench.shutdown().await;
    let (first, instance, _events) = Guardian::start(first_free).await.unwrap();
    assert_eq!((instance.seat.as_str(), instance.life), ("host", 2));
    first.shutdown().await.unwrap();
    second.shutdown().await.unwrap();
    drop(dir);
}

#[tokio::test]
async fn a_life_begins_only_when_nothing_of_the_earlier_ones_is_left() {
    let mut bench = Bench::new("lingers").await;
    let marker = String::from_utf8(bench.run(1, "printf $EVENHAND_RUN").await.stdout.to_vec()).unwrap();
    let (dir, _) = bench.shutdown().await;
    // Something of that life that nobody could have killed, with a child that does not carry its marker.
    let mut command = Command::new("sh");
    command.args(["-c", "env -i sleep 1000 & echo $!; wait"]).env("EVENHAND_RUN", marker);
    let mut stray = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(stray.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    // Of another seat, whose name begins alike.
    let mut other = Command::new("sleep").arg("1000").env("EVENHAND_RUN", "linger@1-1.1.1").spawn().unwrap();
    let (guardian, next, _events) = next_life(dir.path(), "lingers").await;
    assert_eq!(next.life, 2);
    assert!(!lives(stray.id()));
    assert!(!lives(line.trim().parse().unwrap()));
    assert!(lives(other.id()));
    guardian.shutdown().await.unwrap();
    stray.wait().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
}

#[tokio::test]
async fn what_cannot_work_is_said_clearly() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = refusal(options(&file, "seat")).await;
    assert!(matches!(&error, GuardianError::Setup(why) if why.contains("file")), "{error}");
    let error = refusal(Options { program: "/does/not/exist".into(), ..options(dir.path(), "seat") }).await;
    assert!(matches!(error, GuardianError::Spawn { .. }), "{error}");
    let error = refusal(Options { program: "/bin/true".into(), ..options(dir.path(), "seat") }).await;
    assert!(matches!(error, GuardianError::Setup(_) | GuardianError::Gone), "{error}");
}
