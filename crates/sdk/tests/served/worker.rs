//! What handlers and commands are told, and what they say.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evenhand::wire::task_event::Event;
use evenhand::{Commands, Failure, Kind, NewTask, Run, TaskState, Worker, WorkerError};
use tempfile::TempDir;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::fickle::Fickle;
use crate::support::{Home, example};

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_told_while_it_runs_and_the_last_one_before_the_end() {
    let home = Home::new().await;
    let go = Arc::new(Notify::new());
    let may_end = go.clone();
    let worker = home.worker().handle("q", move |(), run: Run| {
        let go = may_end.clone();
        async move {
            for n in 0..10_000 {
                run.progress(f64::from(n), "too fast to tell them all");
            }
            run.progress(0.5, "half");
            go.notified().await;
            run.progress(f64::NAN, "done");
            run.output("the last line");
            Ok::<_, Failure>(run.content_type().to_string())
        }
    });
    let worker = tokio::spawn(worker.run());
    let id = home.client.enqueue("q", NewTask::json(&()).unwrap()).await.unwrap();
    let mut watch = home.client.watch(&id).await.unwrap();
    let (mut said, mut lines, mut end) = (Vec::new(), Vec::new(), None);
    // The watch may begin after it was told; then the first event has it.
    while let Some(event) = watch.next().await.unwrap() {
        match event.event.unwrap() {
            Event::Progress(progress) => said.push(progress),
            Event::Output(line) => lines.push(line),
            Event::Task(task) => {
                said.extend(task.progress.clone());
                end = Some(task);
            }
            Event::Dropped(_) | Event::Missed(_) | Event::Estimate(_) => {}
        }
        if said.last().is_some_and(|progress| progress.message == "half") {
            go.notify_one();
        }
    }
    let end = end.unwrap();
    assert_eq!(end.state(), TaskState::Succeeded, "{end:?}");
    assert_eq!(end.result.as_deref(), Some(br#""application/json""#.as_slice()));
    assert!(said.iter().all(|progress| progress.fraction.is_none_or(|part| (0.0..=1.0).contains(&part))));
    let last = said.last().unwrap();
    assert_eq!((last.message.as_str(), last.fraction), ("done", None));
    assert_eq!(lines, ["the last line"]);
    assert!(said.len() < 1_000, "{} were told", said.len());
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_says_when_it_wants_to_be_tried_again() {
    let home = Home::new().await;
    let hour = Duration::from_secs(3_600);
    let worker = home.worker().handle("q", move |(), _: Run| async move {
        Err::<(), _>(Failure::retry_after(hour, "the disk is full"))
    });
    let worker = tokio::spawn(worker.run());
    let id = home.client.enqueue("q", NewTask::default()).await.unwrap();
    let mut watch = home.client.watch(&id).await.unwrap();
    let scheduled = loop {
        match watch.next().await.unwrap().unwrap().event {
            Some(Event::Task(task)) if task.state() == TaskState::Scheduled => break task,
            Some(
                Event::Task(_)
                | Event::Output(_)
                | Event::Progress(_)
                | Event::Dropped(_)
                | Event::Missed(_)
                | Event::Estimate(_),
            )
            | None => {}
        }
    };
    assert_eq!((scheduled.attempt, scheduled.error.as_str()), (2, "the disk is full"));
    let task = home.client.get(&id).await.unwrap();
    let wait = task.due_ms.unwrap() - task.tries[0].ended_ms;
    assert!((3_600_000..3_660_000).contains(&wait), "{wait}");
    // Whatever it waits for, it can be canceled.
    assert!(!home.client.cancel(&id).await.unwrap());
    assert_eq!(watch.end().await.unwrap().unwrap().state(), TaskState::Canceled);
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_panics_before_it_waits_ends_its_run_alone() {
    let home = Home::new().await;
    let worker = home.worker().handle_bytes("q", |payload: bytes::Bytes, _| {
        assert!(payload != "bad", "I will not");
        async move { Ok(payload) }
    });
    let worker = tokio::spawn(worker.run());
    let bad = home.client.enqueue("q", NewTask::new("bad").max_attempts(1)).await.unwrap();
    let task = home.client.wait(&bad).await.unwrap();
    assert_eq!(task.error, "the handler stopped with a panic: I will not");
    let good = home.client.enqueue("q", NewTask::new("good")).await.unwrap();
    assert_eq!(home.client.wait(&good).await.unwrap().state(), TaskState::Succeeded);
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_told_what_its_payload_is_if_anybody_said() {
    let home = Home::new().await;
    let script = "printf '%s' \"${EVENHAND_CONTENT_TYPE-nobody said}\"";
    let command = ["sh", "-c", script].map(Into::into).to_vec();
    let program = example("guardian_child");
    let worker =
        Commands::new(&home.url, command, program, vec!["guardian".into()], vec!["trampoline".into()])
            .queue("q", 1_000)
            .slots(2)
            .seat("commands")
            .seat_dir(home.dir.path())
            .drain_on(home.draining());
    let worker = tokio::spawn(worker.run());
    for (task, told) in [
        (NewTask::new("x").content_type("image/png"), "image/png"),
        (NewTask::json(&1).unwrap(), "application/json"),
        (NewTask::new("x"), "nobody said"),
    ] {
        let id = home.client.enqueue("q", task).await.unwrap();
        let task = home.client.wait(&id).await.unwrap();
        assert_eq!(task.result.as_deref(), Some(told.as_bytes()), "{task:?}");
    }
    home.end(worker).await;
}

/// How long the runs of the next test take at least.
const SLEEP_MS: u64 = 300;

type Working = JoinHandle<Result<(), WorkerError>>;

fn handlers(url: &str, dir: &TempDir, drain: watch::Receiver<bool>) -> Working {
    let worker = Worker::new(url).seat("w").seat_dir(dir.path()).slots(1).drain_on(drain);
    let worker = worker.handle_bytes("q", |_, _| async {
        tokio::time::sleep(Duration::from_millis(SLEEP_MS)).await;
        Ok::<_, Failure>("")
    });
    tokio::spawn(worker.run())
}

fn commands(url: &str, dir: &TempDir, drain: watch::Receiver<bool>) -> Working {
    let command = ["sh", "-c", "sleep 0.3"].map(Into::into).to_vec();
    let program = example("guardian_child");
    let worker = Commands::new(url, command, program, vec!["guardian".into()], vec!["trampoline".into()]);
    let worker = worker.queue("q", 1_000).slots(1).seat("w").seat_dir(dir.path()).drain_on(drain);
    tokio::spawn(worker.run())
}

/// What a worker says that a run took: about as long as it slept, and not longer than this.
fn took(ran_ms: Option<u64>, at_most: Duration) {
    // A command is seen from outside, where its start may be known a moment late.
    let fits = |ms: u64| 2 * ms >= SLEEP_MS && Duration::from_millis(ms) <= at_most;
    assert!(ran_ms.is_some_and(fits), "{ran_ms:?}, at most {at_most:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_says_how_long_the_run_took_also_when_it_is_said_again() {
    for begin in [handlers, commands] {
        let (drain, draining) = watch::channel(false);
        let (mut server, dir) = (Fickle::new().await, TempDir::new().unwrap());
        let worker = begin(&server.url, &dir, draining);
        let mut session = server.hello().await;
        session.welcome().await;
        let began = Instant::now();
        session.start(1).await;
        took(session.ended().await.ran_ms, began.elapsed());
        session.acknowledge(1).await;
        // To a server that may not know the run, long after its end: the time since then does not count.
        let began = Instant::now();
        session.start(2).await;
        server.leave(session, Duration::from_millis(10 * SLEEP_MS)).await;
        let session = server.hello().await;
        assert_eq!(session.hello.ended.len(), 1, "{:?}", session.hello);
        took(session.hello.ended[0].ran_ms, began.elapsed() / 2);
        assert!(session.hello.ended[0].run.as_ref().is_some_and(|run| run.timed), "as it was told");
        session.welcome().await;
        session.acknowledge(2).await;
        drain.send_replace(true);
        worker.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_drains_a_worker_and_its_run_returns_when_all_has_ended() {
    let home = Home::new().await;
    let (began, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (says, waits) = (began.clone(), go.clone());
    let worker = home.worker().handle("q", move |(), _: Run| {
        let (began, go) = (says.clone(), waits.clone());
        async move {
            began.notify_one();
            go.notified().await;
            Ok::<_, Failure>(())
        }
    });
    let worker = tokio::spawn(worker.run());
    let id = home.client.enqueue("q", NewTask::json(&()).unwrap()).await.unwrap();
    began.notified().await;
    let drained = home.client.drain_worker("w").await.unwrap();
    assert_eq!((drained.told, drained.running), (true, 1));
    let waits = home.client.enqueue("q", NewTask::json(&()).unwrap()).await.unwrap();
    go.notify_one();
    worker.await.unwrap().unwrap();
    assert_eq!(home.client.wait(&id).await.unwrap().state(), TaskState::Succeeded);
    assert_eq!(home.client.get(&waits).await.unwrap().state(), TaskState::Queued);
    let refusal = home.client.drain_worker("nobody").await.unwrap_err();
    assert_eq!((refusal.kind, refusal.message.as_str()), (Kind::NotFound, "there is no worker nobody"));
    home.stop().await;
}
