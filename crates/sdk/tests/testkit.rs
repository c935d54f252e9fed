//! The test kit does to a handler what a worker does.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on must fail")]

/// The tests that the example shows are run with these.
#[path = "../examples/testing.rs"]
#[expect(dead_code, reason = "it is a program, and its main is run by other tests")]
mod example;

use std::time::Duration;

use evenhand::testing::{Outcome, TestWorker};
use evenhand::{Failure, Handlers, Kind, NewTask, Retries, Run, Worker};

async fn obey(order: String, run: Run) -> Result<String, Failure> {
    match order.as_str() {
        "panic" => panic!("oh no"),
        "large" => Ok("x".repeat(100_000)),
        "wordy" => Err(Failure::retry("é".repeat(10_000))),
        "error" => Ok("x".parse::<u8>()?.to_string()),
        "busy" => Err(Failure::retry_after(Duration::from_secs(30), "busy")),
        "hang" => std::future::pending().await,
        "talk" => {
            run.output("é".repeat(10_000));
            run.progress(0.1, "begun");
            run.progress(7.0, "more than done");
            let files: Vec<&str> = run.files().iter().map(|file| file.name.as_str()).collect();
            assert_eq!(run.file("none"), None);
            if let Some(page) = run.file("page.html") {
                return Ok(format!("{} with {}", files.join(", "), String::from_utf8_lossy(page)));
            }
            Ok(format!("{} {} {} {}", run.queue(), run.key(), run.attempt(), run.content_type()))
        }
        _ => Err(Failure::for_good("what?")),
    }
}

fn worker() -> TestWorker {
    TestWorker::new(Handlers::new().handle("q", obey))
}

fn order(order: &str) -> NewTask {
    NewTask::json(&order).unwrap()
}

#[tokio::test]
async fn failures_are_those_of_a_worker() {
    for (task, failure) in [
        (order("panic"), Failure::retry("the handler stopped with a panic: oh no")),
        (order("error"), Failure::retry("invalid digit found in string")),
        (order("?"), Failure::for_good("what?")),
        (order("busy"), Failure::retry_after(Duration::from_secs(30), "busy")),
        (order("wordy"), Failure::retry("é".repeat(2_048))),
        (
            order("large"),
            Failure::for_good(
                "the result has 100002 bytes; at most 65536 are kept: store it elsewhere and return its address",
            ),
        ),
        (
            NewTask::new("not json"),
            Failure::for_good("the payload is not what the handler takes: expected ident at line 1 column 2"),
        ),
    ] {
        assert_eq!(worker().run("q", task).await.unwrap().failure(), Some(&failure));
    }
    let nobody = worker().run("other", order("?")).await.unwrap();
    assert_eq!(nobody.failure(), Some(&Failure::retry("no handler serves queue other")));
    let ended = worker().run("q", order("?")).await.unwrap();
    assert!(ended.json::<String>().unwrap_err().message.contains("what?"), "a failure is no result");
}

#[tokio::test]
async fn what_a_run_says_and_is_told_is_seen() {
    let task = order("talk").key("acme");
    let ended = worker().start_attempt("q", task, 3).unwrap().end().await;
    assert_eq!(ended.json::<String>().unwrap(), "q acme 3 application/json");
    assert_eq!(ended.output, ["é".repeat(2_048)]);
    let said: Vec<_> = ended.progress.iter().map(|said| (said.fraction, said.message.as_str())).collect();
    assert_eq!(said, [(Some(0.1), "begun"), (Some(1.0), "more than done")]);
}

#[tokio::test]
async fn a_handler_has_the_files_of_its_task() {
    let task = order("talk").file("page.html", "<p>").file("style.css", vec![0xff]);
    let ended = worker().run("q", task).await.unwrap();
    assert_eq!(ended.json::<String>().unwrap(), "page.html, style.css with <p>");
    let path = worker().run("q", order("talk").file("a", "").file("../b", "")).await.unwrap_err();
    assert_eq!((path.kind, path.field.as_str()), (Kind::Invalid, "files[1].name"));
}

#[tokio::test]
async fn what_no_server_accepts_is_refused() {
    let large = NewTask::new(vec![b'x'; 2 * 1024 * 1024]);
    let refusal = worker().run("q", large).await.unwrap_err();
    assert_eq!((refusal.kind, refusal.field.as_str()), (Kind::TooLarge, "payload"));
    assert_eq!(worker().run("a/b", order("?")).await.unwrap_err().field, "queue");
}

#[tokio::test(start_paused = true)]
async fn time_is_over_and_grace_is_over_without_waiting() {
    let timed = order("hang").max_duration(Duration::from_secs(3_600));
    let ended = worker().run("q", timed).await.unwrap();
    assert_eq!(ended.failure(), Some(&Failure::retry("it took longer than 3600000 ms")));
    let mut run = worker().start("q", order("hang")).unwrap();
    run.cancel();
    let ended = run.end().await;
    assert_eq!(ended.failure(), Some(&Failure::retry("it was canceled and did not end in time")));
}

#[tokio::test]
async fn a_run_can_be_killed_and_a_task_is_tried_until_it_has_no_attempts_left() {
    let mut run = worker().start("q", order("hang")).unwrap();
    run.kill();
    assert_eq!(run.end().await.outcome, Outcome::Killed);
    let runs = worker().run_to_end("q", order("error").max_attempts(3)).await.unwrap();
    assert_eq!(runs.len(), 3);
    let retries = Retries::new().max_attempts(2).backoff(Duration::from_secs(3_600));
    assert_eq!(worker().run_to_end("q", order("error").retries(retries)).await.unwrap().len(), 2);
    // A worker's handlers are tested the same way.
    let of_worker = TestWorker::new(Worker::new("http://127.0.0.1:1").handle("q", obey));
    assert_eq!(of_worker.run_to_end("q", order("?")).await.unwrap().len(), 1);
}
