//! Handlers in one's own process: a server on the store in memory, a worker and a client in one program.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on must fail")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use evenhand::{Client, Failure, Kind, NewTask, Task, TaskState, Worker, WorkerError, wire};
use evenhand_core::owner::Settings;
use evenhand_core::owner::health::Thresholds;
use evenhand_server::{Config, Server};
use evenhand_store::Memory;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// A server, and what a worker of it needs.
struct Home {
    server: Server,
    url: String,
    client: Client,
    seats: TempDir,
    drain: watch::Sender<bool>,
}

impl Home {
    async fn new() -> Home {
        let thresholds = Thresholds { heartbeat_ms: 50, unhealthy_after_ms: 2_000, lost_after_ms: 20_000 };
        let settings = Settings { thresholds, ..Settings::default() };
        let config = Config { listen: "127.0.0.1:0".parse().unwrap(), store: "memory".into(), settings };
        let server = Server::start(config, Memory::default()).await.unwrap();
        let url = format!("http://{}", server.addr());
        let client = Client::new(&url).unwrap();
        Home { server, url, client, seats: TempDir::new().unwrap(), drain: watch::channel(false).0 }
    }

    fn worker(&self) -> Worker {
        Worker::new(&self.url).seat("w").seat_dir(self.seats.path()).slots(4).drain_on(self.drain.subscribe())
    }

    /// Drains a worker, and the server after it.
    async fn end(self, worker: JoinHandle<Result<(), WorkerError>>) {
        self.drain.send(true).unwrap();
        worker.await.unwrap().unwrap();
        assert_eq!(self.client.workers().await.unwrap(), [], "a drained worker is gone at once");
        self.server.stop().await.unwrap();
    }

    async fn submit(&self, task: NewTask) -> String {
        self.client.enqueue("q", task).await.unwrap()
    }

    /// How a task ended, and what its run said on the way.
    async fn ended(&self, id: &str) -> (Task, Vec<String>) {
        let mut watch = self.client.watch(id).await.unwrap();
        let mut lines = Vec::new();
        while let Some(event) = watch.next().await.unwrap() {
            match event.event {
                Some(wire::task_event::Event::Output(line)) => lines.push(line),
                Some(wire::task_event::Event::Task(task))
                    if !matches!(
                        task.state(),
                        TaskState::Queued | TaskState::Scheduled | TaskState::Running
                    ) =>
                {
                    return (task, lines);
                }
                Some(
                    wire::task_event::Event::Task(_)
                    | wire::task_event::Event::Dropped(_)
                    | wire::task_event::Event::Progress(_)
                    | wire::task_event::Event::Missed(_)
                    | wire::task_event::Event::Estimate(_),
                )
                | None => {}
            }
        }
        panic!("the stream ended before the task did");
    }
}

fn json_task(value: Value) -> NewTask {
    NewTask::json(&value).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn values_go_in_and_values_come_out() {
    let home = Home::new().await;
    let go = Arc::new(Notify::new());
    let handler = {
        let go = go.clone();
        move |numbers: Vec<u32>, run: evenhand::Run| {
            let go = go.clone();
            async move {
                go.notified().await;
                run.output(format!("{} numbers for {}", numbers.len(), run.key()));
                Ok::<_, Failure>(json!({ "sum": numbers.iter().sum::<u32>(), "attempt": run.attempt() }))
            }
        }
    };
    let worker = tokio::spawn(home.worker().handle("q", handler).run());
    let id = home.submit(json_task(json!([1, 2, 3])).key("acme")).await;
    let ended = home.ended(&id);
    go.notify_one();
    let (task, _) = ended.await;
    assert_eq!(task.state(), TaskState::Succeeded, "{task:?}");
    let result: Value = serde_json::from_slice(task.result.as_deref().unwrap()).unwrap();
    assert_eq!(result, json!({ "sum": 6, "attempt": 1 }));
    // It has ended, and is remembered for a while; a look says more than an event.
    let seen = home.client.get(&id).await.unwrap();
    assert_eq!((&seen.result, seen.state(), seen.ended_ms), (&task.result, task.state(), task.ended_ms));
    assert_eq!((seen.tries.len(), seen.tries[0].end.as_str()), (1, "succeeded"));
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_values_and_a_panic_is_a_failure() {
    let home = Home::new().await;
    let tries = Arc::new(AtomicU32::new(0));
    let counted = tries.clone();
    let worker = home.worker().handle("q", move |what: String, _| {
        let tries = counted.clone();
        async move {
            tries.fetch_add(1, Ordering::Relaxed);
            match what.as_str() {
                "retry" => Err(Failure::retry("not today")),
                "for good" => Err(Failure::for_good("never")),
                "error" => Err("x".parse::<u32>().unwrap_err().into()),
                "panic" => panic!("oh no"),
                _ => Ok(()),
            }
        }
    });
    let worker = tokio::spawn(worker.run());
    for (what, attempts, error) in [
        ("retry", 3, "not today"),
        ("for good", 1, "never"),
        ("error", 3, "invalid digit found in string"),
        ("panic", 3, "the handler stopped with a panic: oh no"),
    ] {
        tries.store(0, Ordering::Relaxed);
        let id = home.submit(json_task(what.into()).max_attempts(3)).await;
        let (task, _) = home.ended(&id).await;
        assert_eq!((task.state(), task.error.as_str()), (TaskState::Failed, error), "{what}");
        assert_eq!(tries.load(Ordering::Relaxed), attempts, "{what}");
    }
    // What the handler cannot read, it never sees.
    let id = home.submit(json_task(json!({ "not": "text" }))).await;
    let (task, _) = home.ended(&id).await;
    assert!(task.error.starts_with("the payload is not what the handler takes: "), "{}", task.error);
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_told_of_a_cancel_and_is_dropped_at_its_deadline() {
    let home = Home::new().await;
    let running = Arc::new(Notify::new());
    let begun = running.clone();
    let worker = home.worker().handle("q", move |wait_for_cancel: bool, run: evenhand::Run| {
        let begun = begun.clone();
        async move {
            begun.notify_one();
            if wait_for_cancel {
                run.canceled().await;
                return Err::<(), _>(Failure::retry("as you wish"));
            }
            std::future::pending().await
        }
    });
    let worker = tokio::spawn(worker.run());
    let id = home.submit(json_task(true.into())).await;
    running.notified().await;
    assert!(home.client.cancel(&id).await.unwrap(), "it runs");
    let (task, _) = home.ended(&id).await;
    assert_eq!(task.state(), TaskState::Canceled, "{task:?}");
    let timed = json_task(false.into()).max_duration(Duration::from_millis(20)).max_attempts(1);
    let (task, _) = home.ended(&home.submit(timed).await).await;
    assert_eq!((task.state(), task.error.as_str()), (TaskState::Failed, "it took longer than 20 ms"));
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_lets_what_runs_end_and_takes_nothing_more() {
    let home = Home::new().await;
    let (running, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begun, may_end) = (running.clone(), go.clone());
    let worker = home.worker().slots(1).handle_bytes("q", move |payload, _| {
        let (begun, may_end) = (begun.clone(), may_end.clone());
        async move {
            begun.notify_one();
            may_end.notified().await;
            Ok(payload)
        }
    });
    let worker = tokio::spawn(worker.run());
    let (first, second) =
        (home.submit(NewTask::new("first")).await, home.submit(NewTask::new("second")).await);
    running.notified().await;
    home.drain.send(true).unwrap();
    let ended = home.ended(&first);
    go.notify_one();
    assert_eq!(ended.await.0.result.as_deref(), Some(b"first".as_slice()));
    worker.await.unwrap().unwrap();
    let task = home.client.get(&second).await.unwrap();
    assert_eq!((task.state(), task.hold.as_str()), (TaskState::Queued, "no worker serves its queue"));
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_wrong_is_told_what_is_wrong() {
    let home = Home::new().await;
    let refused = |worker: Worker| async move {
        match worker.run().await.unwrap_err() {
            WorkerError::Refused(refusal) => (refusal.kind, refusal.field),
            WorkerError::Guardian(error) => panic!("{error}"),
        }
    };
    let nothing = |_: Value, _| async { Ok::<(), Failure>(()) };
    assert_eq!(refused(home.worker()).await, (Kind::Invalid, "queues".into()));
    let queue = home.worker().handle("a/b", nothing);
    assert_eq!(refused(queue).await, (Kind::Invalid, "queue".into()));
    let twice = home.worker().handle("q", nothing).handle("q", nothing);
    assert_eq!(refused(twice).await, (Kind::Invalid, "queues".into()));
    let many = home.worker().handle("q", nothing).slots(10_001);
    assert_eq!(refused(many).await, (Kind::TooLarge, "slots".into()));
    let seat = home.worker().handle("q", nothing).seat("a b");
    assert_eq!(refused(seat).await, (Kind::Invalid, "seat".into()));
    let worker = tokio::spawn(home.worker().handle("q", nothing).run());
    while home.client.workers().await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let same_seat = home.worker().handle("q", nothing).run().await.unwrap_err();
    assert!(same_seat.to_string().starts_with("seat w is in use on this machine"), "{same_seat}");
    home.end(worker).await;
}
