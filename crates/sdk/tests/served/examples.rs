//! The examples are run, and what they print is looked at; and the page for users shows what they are made of.

use std::process::Stdio;

use evenhand::wire::task_event::Event;
use evenhand::{NewTask, TaskState};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;

use crate::attach::commands;
use crate::support::{Home, example};

fn command(home: &Home, name: &str) -> Command {
    let mut command = Command::new(example(name));
    command.env("EVENHAND_SERVER", &home.url).env("XDG_STATE_HOME", home.dir.path()).kill_on_drop(true);
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

/// What an example prints when it is run to its end.
async fn printed(command: &mut Command) -> String {
    let output = command.output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}: {text}", output.status);
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn submit_and_worker_work_together() {
    let home = Home::new().await;
    let worker = command(&home, "worker").spawn().unwrap();
    let file = home.dir.path().join("text");
    std::fs::write(&file, "one two\nthree\n").unwrap();
    let text = printed(command(&home, "submit").arg(&file)).await;
    assert!(text.starts_with("accepted\n"), "{text}");
    assert!(text.ends_with("3 words\n"), "{text}");

    std::fs::write(&file, "").unwrap();
    let text = printed(command(&home, "submit").arg(&file)).await;
    assert!(text.ends_with("Failed after 1 attempts: the document is empty\n"), "{text}");
    let text = printed(command(&home, "submit").arg(home.dir.path().join("missing"))).await;
    assert!(text.ends_with("Failed after 5 attempts: No such file or directory (os error 2)\n"), "{text}");

    let pid = Pid::from_raw(worker.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let ended = worker.wait_with_output().await.unwrap();
    assert!(ended.status.success(), "{}", ended.status);
    assert_eq!(String::from_utf8(ended.stdout).unwrap(), "drained\n");
    home.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attach_talks_to_a_shell() {
    let home = Home::new().await;
    let worker = commands(&home, "shell", "sh").await;
    assert_eq!(printed(&mut command(&home, "attach")).await, "42\nexit code Some(0)\n");
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_submits_all() {
    let home = Home::new().await;
    let text = printed(&mut command(&home, "batch")).await;
    let begin = "10000 tasks accepted\naccepted: true\naccepted: true\naccepted: true\n10003 tasks wait\n";
    assert!(text.starts_with(begin), "{text}");
    home.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocking_needs_no_runtime() {
    let home = Home::new().await;
    let text = printed(&mut command(&home, "blocking")).await;
    let each = |name: &str| format!("{name}, text/plain\nCanceled\n");
    assert_eq!(text, ["one", "two", "three"].map(each).concat());
    home.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn later_is_one_task_that_is_tried_twice_and_run_again() {
    let home = Home::new().await;
    let text = printed(&mut command(&home, "later")).await;
    let expected = "created: [true, false]\n\
        attempt 1: failed the mail server is busy\n\
        attempt 2: succeeded \n\
        \"the bill of May is sent\"\n\
        again: Succeeded\n";
    assert_eq!(text, expected);
    home.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_a_worker_at_once_and_its_task_waits_again() {
    let home = Home::new().await;
    let id = home.client.enqueue("wait", NewTask::default()).await.unwrap();
    let mut watch = home.client.watch(&id).await.unwrap();
    let worker = command(&home, "testing").spawn().unwrap();
    let state = async || home.client.get(&id).await.unwrap().state();
    // A worker that drains before it has heard of a start gives it back, and ends well.
    while !matches!(watch.next().await.unwrap().unwrap().event, Some(Event::Output(_))) {}
    let pid = Pid::from_raw(worker.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    while home.client.workers().await.unwrap().iter().any(|worker| worker.health != "draining") {
        tokio::task::yield_now().await;
    }
    kill_process(pid, Signal::INT).unwrap();
    let ended = worker.wait_with_output().await.unwrap();
    assert!(!ended.status.success());
    while state().await != TaskState::Queued {
        tokio::task::yield_now().await;
    }
    home.stop().await;
}

/// Every piece of Rust in `docs/sdk.md` stands in an example, line for line.
#[test]
fn the_page_shows_what_is_run() {
    let page = include_str!("../../../../docs/sdk.md");
    let examples = [
        include_str!("../../examples/attach.rs"),
        include_str!("../../examples/batch.rs"),
        include_str!("../../examples/blocking.rs"),
        include_str!("../../examples/later.rs"),
        include_str!("../../examples/submit.rs"),
        include_str!("../../examples/testing.rs"),
        include_str!("../../examples/worker.rs"),
    ];
    let flush = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let examples = examples.map(flush);
    let pieces: Vec<&str> =
        page.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(pieces.len() >= 5, "the page has lost its examples");
    for piece in pieces {
        let shown = flush(piece);
        assert!(examples.iter().any(|example| example.contains(&shown)), "in no example:\n{piece}");
    }
}
