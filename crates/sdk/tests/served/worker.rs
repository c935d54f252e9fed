//! What handlers and commands are told, and what they say.

use std::sync::Arc;
use std::time::Duration;

use evenhand::wire::task_event::Event;
use evenhand::{Commands, Failure, NewTask, Run, TaskState};
use tokio::sync::Notify;

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
            Event::Dropped(_) | Event::Missed(_) => {}
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
                Event::Task(_) | Event::Output(_) | Event::Progress(_) | Event::Dropped(_) | Event::Missed(_),
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
