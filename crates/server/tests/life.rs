//! The life of a task as a client sees it over REST, with a worker that is a script and a store in memory.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on must fail")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use evenhand_api::{PROTOCOL, v1};
use evenhand_core::backlog::Level;
use evenhand_core::change::TimerRow;
use evenhand_core::names::{Epoch, Key, LaneId, ShardId, TaskId};
use evenhand_core::owner::Settings;
use evenhand_core::{Change, Task};
use evenhand_server::{Config, Server};
use evenhand_store::{History, Listing, Memory, Page, Store, StoreError, Taken, Wanted};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, OnceCell, mpsc};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;

/// A server.
struct Home {
    server: Server,
    addr: SocketAddr,
}

/// What a run does. None: it goes on until it is stopped.
type Script = fn(&v1::Start) -> Option<Does>;

/// How a run ends, with which result and error, when it wants to be tried again, and what its worker says of how long
/// it took.
#[derive(Default)]
struct Does {
    end: v1::EndKind,
    result: &'static str,
    error: &'static str,
    retry_after_ms: Option<u64>,
    /// It ends after so long.
    after: Duration,
    ran_ms: Option<u64>,
}

impl Does {
    fn ended(self, run: &v1::Run) -> v1::RunEnded {
        v1::RunEnded {
            run: run.id,
            attempt: run.attempt,
            end: self.end.into(),
            result: self.result.into(),
            error: self.error.into(),
            retry_after_ms: self.retry_after_ms,
            ran_ms: self.ran_ms,
        }
    }
}

impl Home {
    async fn new() -> Home {
        Home::of(Memory::default()).await
    }

    async fn of(store: impl Store + Clone + 'static) -> Home {
        let listen = "127.0.0.1:0".parse().unwrap();
        let config = Config { listen, store: "memory".into(), settings: Settings::default() };
        let server = Server::start(config, store).await.unwrap();
        let addr = server.addr();
        Home { server, addr }
    }

    /// Asks, and gets the status and the JSON.
    async fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        let body = body.map_or_else(String::new, |body| body.to_string());
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            self.addr,
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|_| json!(body)))
    }

    async fn get(&self, path: &str) -> Value {
        let (status, answer) = self.ask("GET", path, None).await;
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.ask("POST", path, Some(body)).await;
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// What is said of a request that is refused: its status and the field that is wrong.
    async fn refused(&self, method: &str, path: &str, body: Value) -> (u16, String) {
        let (status, answer) = self.ask(method, path, Some(body)).await;
        (status, answer["error"]["field"].as_str().unwrap_or_default().into())
    }

    async fn submit(&self, queue: &str, task: Value) -> String {
        let answer = self.post(&format!("/v1/queues/{queue}/tasks"), json!({ "tasks": [task] })).await;
        answer["tasks"][0]["id"].as_str().unwrap().into()
    }

    async fn task(&self, id: &str) -> Value {
        self.get(&format!("/v1/tasks/{id}")).await
    }

    /// Waits until a task stands like this.
    async fn until(&self, id: &str, state: &str) -> Value {
        let began = Instant::now();
        loop {
            let task = self.task(id).await;
            if task["state"] == state {
                return task;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "not {state}: {task}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A worker of all these queues with ten slots that does what the script says.
    async fn worker(&self, queues: &[&str], script: Script) -> JoinHandle<()> {
        self.worker_of(queues, 10, script).await
    }

    async fn worker_of(&self, queues: &[&str], slots: u32, script: Script) -> JoinHandle<()> {
        let server = tonic::transport::Endpoint::new(format!("http://{}", self.addr)).unwrap();
        let mut client = WorkerSessionsClient::new(server.connect().await.unwrap());
        let (up, ups) = mpsc::channel(100);
        let served = |name: &&str| v1::ServedQueue { queue: (*name).into(), weight_thousandths: 1000 };
        let hello = v1::Hello {
            protocol: PROTOCOL,
            seat: "w1".into(),
            token: 7,
            process_life: 1,
            session: 1,
            slots,
            queues: queues.iter().map(served).collect(),
            ..v1::Hello::default()
        };
        up.send(v1::Up { message: Some(v1::up::Message::Hello(hello)) }).await.unwrap();
        let mut down = client.session(ReceiverStream::new(ups)).await.unwrap().into_inner();
        tokio::spawn(async move {
            let (mut number, mut answered, mut worker_set) = (0, 0, None);
            let mut beats = tokio::time::interval(Duration::from_millis(200));
            let mut runs: Vec<v1::Run> = Vec::new();
            loop {
                let mut news = v1::News::default();
                tokio::select! {
                    _ = beats.tick() => {
                        number += 1;
                        news.heartbeat = Some(v1::Heartbeat { number, answered, worker_set });
                    }
                    said = down.message() => {
                        let Ok(Some(said)) = said else { return };
                        answered = said.answer.map_or(answered, |answer| answer.number);
                        // What it knows of the others, it shows.
                        let told = said.welcome.and_then(|welcome| welcome.worker_set);
                        let told = said.answer.and_then(|answer| answer.worker_set).or(told);
                        worker_set = told.or(worker_set);
                        for start in said.start {
                            let run = start.run.clone().unwrap();
                            match script(&start) {
                                Some(does) if does.after.is_zero() => news.ended.push(does.ended(&run)),
                                Some(does) => {
                                    let up = up.clone();
                                    tokio::spawn(async move {
                                        tokio::time::sleep(does.after).await;
                                        let news = v1::News { ended: vec![does.ended(&run)], ..v1::News::default() };
                                        let message = Some(v1::up::Message::News(news));
                                        let _ = up.send(v1::Up { message }).await;
                                    });
                                }
                                None => runs.push(run),
                            }
                        }
                        for id in said.stop {
                            let stopped = runs.extract_if(.., |run| run.id == Some(id));
                            let does = || Does { end: v1::EndKind::Failed, error: "stopped", ..Does::default() };
                            news.ended.extend(stopped.map(|run| does().ended(&run)));
                        }
                    }
                }
                if up.send(v1::Up { message: Some(v1::up::Message::News(news)) }).await.is_err() {
                    return;
                }
            }
        })
    }
}

fn succeed(_: &v1::Start) -> Option<Does> {
    Some(Does { end: v1::EndKind::Succeeded, result: "done", ..Does::default() })
}

fn hang(_: &v1::Start) -> Option<Does> {
    None
}

/// All take the same time; but of those of one key their worker says that they were quick, and only their end came
/// late.
fn some_were_quick(start: &v1::Start) -> Option<Does> {
    let quick = start.run.as_ref().unwrap().key == "quick";
    let ran_ms = quick.then_some(1);
    Some(Does { end: v1::EndKind::Succeeded, after: Duration::from_millis(20), ran_ms, ..Does::default() })
}

/// Fails twice, says when it wants to be tried again, and succeeds.
fn third_time(start: &v1::Start) -> Option<Does> {
    let failed =
        |error, retry_after_ms| Does { end: v1::EndKind::Failed, error, retry_after_ms, ..Does::default() };
    Some(match start.run.as_ref().unwrap().attempt {
        1 => failed("not yet", None),
        2 => failed("not now", Some(200)),
        _ => Does { end: v1::EndKind::Succeeded, result: "at last", ..Does::default() },
    })
}

fn ids(tasks: &Value) -> Vec<&str> {
    tasks["tasks"].as_array().unwrap().iter().map(|task| task["id"].as_str().unwrap()).collect()
}

fn now_ms() -> u64 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_tried_again_and_its_end_is_remembered() {
    let home = Home::new().await;
    let _worker = home.worker(&["q"], third_time).await;
    let retry = json!({ "max_attempts": 3, "backoff_ms": 50 });
    let id = home.submit("q", json!({ "text": "hello", "key": "acme", "retry": retry })).await;
    let task = home.until(&id, "succeeded").await;
    assert_eq!(
        (&task["result"], &task["attempt"], &task["max_attempts"]),
        (&json!("at last"), &json!(3), &json!(3))
    );
    assert!(task["ended_ms"].as_u64() >= task["accepted_ms"].as_u64());
    let tries = task["tries"].as_array().unwrap();
    let said: Vec<_> =
        tries.iter().map(|tried| (&tried["attempt"], &tried["end"], &tried["error"])).collect();
    let none = Value::Null;
    assert_eq!(
        said,
        [
            (&json!(1), &json!("failed"), &json!("not yet")),
            (&json!(2), &json!("failed"), &json!("not now")),
            (&json!(3), &json!("succeeded"), &none),
        ]
    );
    assert_eq!(tries[0]["seat"], "w1");
    assert!(tries[2]["started_ms"].as_u64().unwrap() >= tries[1]["ended_ms"].as_u64().unwrap() + 200);
    assert_eq!(home.get(&format!("/v1/tasks/{id}/payload")).await, json!("hello"));
    assert_eq!(home.get(&format!("/v1/tasks/{id}/result")).await, json!("at last"));
    // Once more, as another task.
    let again = home.ask("POST", &format!("/v1/tasks/{id}/replay"), None).await.1["id"].clone();
    let again = again.as_str().unwrap();
    let copy = home.until(again, "succeeded").await;
    assert_eq!((copy["replay_of"].as_str(), copy["key"].as_str()), (Some(id.as_str()), Some("acme")));
    assert_eq!(home.task(&id).await["replayed_as"], again);
    assert_eq!(home.ask("POST", "/v1/tasks/0-999/replay", None).await.0, 404);
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_task_waits_for_its_time_and_no_longer() {
    let home = Home::new().await;
    let _worker = home.worker(&["q"], succeed).await;
    // One that is far away and is not wanted any more must not keep the others waiting.
    let far = home.submit("q", json!({ "delay_ms": 3_600_000 })).await;
    let task = home.task(&far).await;
    assert_eq!(task["state"], "scheduled");
    assert!((3_500_000..3_700_000).contains(&(task["due_ms"].as_u64().unwrap() - now_ms())));
    assert_eq!(
        home.ask("DELETE", &format!("/v1/tasks/{far}"), None).await,
        (200, json!({ "stopping": false }))
    );
    assert_eq!(
        home.ask("DELETE", &format!("/v1/tasks/{far}"), None).await,
        (200, json!({ "stopping": false }))
    );
    assert_eq!(home.task(&far).await["state"], "canceled");
    let soon = home.submit("q", json!({ "delay_ms": 700 })).await;
    let due = home.task(&soon).await["due_ms"].as_u64().unwrap();
    assert!(due <= now_ms() + 900, "due in {} ms", due - now_ms());
    let task = home.until(&soon, "succeeded").await;
    assert!(task["tries"][0]["started_ms"].as_u64().unwrap() >= task["accepted_ms"].as_u64().unwrap() + 700);
    let past = home.submit("q", json!({ "run_at_ms": 1_000 })).await;
    home.until(&past, "succeeded").await;
    let both = json!({ "tasks": [{ "run_at_ms": 1, "delay_ms": 1 }] });
    assert_eq!(home.refused("POST", "/v1/queues/q/tasks", both).await, (400, "tasks[0].delay_ms".into()));
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_started_in_time_expires() {
    let home = Home::new().await;
    let id = home.submit("q", json!({ "expires_ms": 300 })).await;
    assert!(home.task(&id).await["expires_at_ms"].as_u64().unwrap() > now_ms() - 5_000);
    let _worker = home.worker(&["other"], succeed).await;
    let task = home.until(&id, "expired").await;
    assert_eq!(task["tries"], Value::Null);
    assert_eq!(home.get("/v1/queues/q").await["expired"], 1);
    assert_eq!(ids(&home.get("/v1/tasks?state=expired").await), [id]);
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unique_key_makes_a_task_the_only_one() {
    let home = Home::new().await;
    let task = |key: &str| json!({ "unique_key": key, "text": "x" });
    let tasks = json!({ "tasks": [task("a"), task("b"), task("a"), { "text": "x" }], "request_id": "a" });
    let answer = home.post("/v1/queues/q/tasks", tasks.clone()).await;
    let created: Vec<_> =
        answer["tasks"].as_array().unwrap().iter().map(|task| task["created"].as_bool().unwrap()).collect();
    assert_eq!(created, [true, true, false, true]);
    assert_eq!(answer["tasks"][0]["id"], answer["tasks"][2]["id"]);
    let again = home.post("/v1/queues/q/tasks", tasks).await;
    assert_eq!(ids(&again), ids(&answer));
    assert!(again["tasks"].as_array().unwrap().iter().all(|task| task["created"] == false));
    // In another queue it is another task.
    let other = home.post("/v1/queues/other/tasks", json!({ "tasks": [task("a")] })).await;
    assert_eq!(other["tasks"][0]["created"], true);
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_are_canceled_and_run_again_a_bounded_number_at_a_time() {
    let home = Home::new().await;
    for (n, key) in ["acme", "globex"].into_iter().enumerate() {
        let tasks: Vec<Value> = (0..25).map(|_| json!({ "key": key, "delay_ms": n * 1_000_000 })).collect();
        home.post("/v1/queues/q/tasks", json!({ "tasks": tasks })).await;
    }
    let all = |path: &'static str, filter: Value| {
        let home = &home;
        async move {
            let (mut calls, mut changed, mut made, mut filter) = (0, 0, Vec::new(), filter);
            loop {
                let answer = home.post(path, filter.clone()).await;
                calls += 1;
                changed += answer["changed"].as_u64().unwrap();
                made.extend(answer["ids"].as_array().into_iter().flatten().cloned());
                match answer["cursor"].as_str() {
                    Some(cursor) => filter["cursor"] = json!(cursor),
                    None => return (calls, changed, made.len()),
                }
            }
        }
    };
    assert_eq!(home.refused("POST", "/v1/tasks/cancel", json!({})).await, (400, "queue".into()));
    assert_eq!(home.refused("POST", "/v1/tasks/cancel", json!({ "quue": "q" })).await, (400, "quue".into()));
    assert_eq!(
        home.refused("POST", "/v1/tasks/replay", json!({ "key": "a", "cursor": "0-1" })).await.1,
        "cursor"
    );
    let (calls, changed, _) = all("/v1/tasks/cancel", json!({ "key": "acme", "limit": 10 })).await;
    assert!((3..=4).contains(&calls), "{calls}");
    assert_eq!(changed, 25);
    assert_eq!(all("/v1/tasks/cancel", json!({ "key": "acme" })).await.1, 0);
    assert_eq!(all("/v1/tasks/cancel", json!({ "queue": "q", "state": "queued" })).await.1, 0);
    assert_eq!(ids(&home.get("/v1/tasks?state=canceled&key=acme&limit=1000").await).len(), 25);
    assert_eq!(ids(&home.get("/v1/tasks?state=scheduled&limit=1000").await).len(), 25);
    assert_eq!(ids(&home.get("/v1/tasks?queue=q&limit=1000").await).len(), 50);
    // Those that are run again are run again once.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let (_, changed, made) = all("/v1/tasks/replay", json!({ "queue": "q", "limit": 7 })).await;
    assert_eq!((changed, made), (25, 25));
    assert_eq!(all("/v1/tasks/replay", json!({ "queue": "q" })).await.1, 0);
    assert_eq!(ids(&home.get("/v1/tasks?state=queued&limit=1000").await).len(), 25);
    // Running ones are told to stop.
    let _worker = home.worker(&["q"], hang).await;
    let began = Instant::now();
    while home.get("/v1/queues/q").await["running"] != 10 {
        assert!(began.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    home.post("/v1/queues/q/pause", json!({})).await;
    let stopped = home.post("/v1/tasks/cancel", json!({ "queue": "q", "state": "running" })).await;
    assert_eq!((&stopped["changed"], &stopped["stopping"]), (&json!(10), &json!(10)));
    while home.get("/v1/queues/q").await["running"] != 0 {
        assert!(began.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(home.get("/v1/queues/q").await["canceled"], 35);
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_changed_by_one_at_a_time() {
    let home = Home::new().await;
    let settings =
        json!({ "settings": { "retention_ms": 0, "retry": { "max_attempts": 2, "factor": 1.5 } } });
    let (status, set) = home.ask("PUT", "/v1/queues/q", Some(settings)).await;
    assert_eq!((status, &set["version"]), (200, &json!(1)));
    let retry = json!({ "max_attempts": 2, "backoff_ms": 250, "factor": 1.5, "max_backoff_ms": 3_600_000, "max_lost": 3 });
    assert_eq!(
        set["settings"],
        json!({
            "retry": retry, "retention_ms": 0, "paused": false, "share": "tasks", "after_downgrade": "fail",
            "interactive_grace_ms": 0,
        })
    );
    let stale = json!({ "settings": { "paused": true }, "version": 0 });
    assert_eq!(home.refused("PUT", "/v1/queues/q", stale).await, (409, "version".into()));
    let wrong = json!({ "settings": { "paused": true, "retry": { "max_attempts": 0 } } });
    assert_eq!(home.refused("PUT", "/v1/queues/q", wrong).await, (400, "settings.retry.max_attempts".into()));
    let wrong = json!({ "settings": { "pause": true } });
    assert_eq!(home.refused("PUT", "/v1/queues/q", wrong).await, (400, "settings.pause".into()));
    assert_eq!(home.get("/v1/queues/q").await["paused"], false);
    let paused = home.post("/v1/queues/q/pause", json!({})).await;
    assert_eq!((&paused["version"], &paused["settings"]["paused"]), (&json!(2), &json!(true)));
    // Nothing is started, and nothing is remembered when it ends; but for a moment.
    let _worker = home.worker(&["q"], succeed).await;
    let id = home.submit("q", json!({})).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let task = home.task(&id).await;
    assert_eq!((&task["hold"], &task["max_attempts"]), (&json!("its queue is paused"), &json!(2)));
    home.post("/v1/queues/q/resume", json!({})).await;
    let task = home.until(&id, "succeeded").await;
    assert_eq!(task["result"], "done");
    assert_eq!(ids(&home.get("/v1/tasks").await), [] as [&str; 0]);
    assert_eq!(home.get("/v1/queues/q").await["version"], 3);
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_task_is_canceled_when_nobody_watches_it() {
    let home = Home::new().await;
    let _worker = home.worker(&["q"], hang).await;
    let alone = home.submit("q", json!({ "attach_ttl_ms": 1_000 })).await;
    let watched = home.submit("q", json!({ "attach_ttl_ms": 1_000 })).await;
    let mut watcher = TcpStream::connect(home.addr).await.unwrap();
    let request = format!("GET /v1/tasks/{watched}/events HTTP/1.1\r\nhost: x\r\n\r\n");
    watcher.write_all(request.as_bytes()).await.unwrap();
    home.until(&alone, "canceled").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(home.task(&watched).await["state"], "running");
    assert_eq!(home.task(&watched).await["attach_ttl_ms"], 1_000);
    drop(watcher);
    let left = Instant::now();
    home.until(&watched, "canceled").await;
    let took = left.elapsed();
    assert!((Duration::from_millis(900)..Duration::from_secs(4)).contains(&took), "{took:?}");
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ended_is_known_to_the_next_server() {
    let store = Memory::default();
    let home = Home::of(store.clone()).await;
    let worker = home.worker(&["q"], succeed).await;
    let id = home.submit("q", json!({ "text": "x" })).await;
    home.until(&id, "succeeded").await;
    let later = home.submit("q", json!({ "delay_ms": 1_500 })).await;
    home.server.stop().await.unwrap();
    worker.await.unwrap();
    let home = Home::of(store).await;
    assert_eq!(home.task(&id).await["result"], "done");
    assert_eq!(home.task(&later).await["state"], "scheduled");
    let _worker = home.worker(&["q"], succeed).await;
    home.until(&later, "succeeded").await;
    home.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_keys_share_is_set_and_seen() {
    let home = Home::new().await;
    let share = |share: Value| json!({ "settings": { "share": share } });
    let (status, set) = home.ask("PUT", "/v1/queues/q", Some(share(json!("time")))).await;
    assert_eq!((status, &set["settings"]["share"], &set["version"]), (200, &json!("time"), &json!(1)));
    for wrong in [json!("day"), json!("Time"), json!(2), json!("")] {
        let (status, answer) = home.ask("PUT", "/v1/queues/q", Some(share(wrong.clone()))).await;
        assert_eq!((status, &answer["error"]["field"]), (400, &json!("settings.share")), "{wrong}: {answer}");
        if wrong.is_string() {
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(message.contains("expected `tasks` or `time`"), "{message}");
        }
    }
    // What is not named stays.
    home.post("/v1/queues/q/pause", json!({})).await;
    let queue = home.get("/v1/queues/q").await;
    assert_eq!((&queue["settings"]["share"], &queue["settings"]["paused"]), (&json!("time"), &json!(true)));
    // A task says what it expects, and is shown with it; so is its replay.
    let id = home.submit("q", json!({ "expected_ms": 30_000 })).await;
    assert_eq!(home.task(&id).await["expected_ms"], 30_000);
    home.ask("DELETE", &format!("/v1/tasks/{id}"), None).await;
    let again = home.ask("POST", &format!("/v1/tasks/{id}/replay"), None).await.1["id"].clone();
    assert_eq!(home.task(again.as_str().unwrap()).await["expected_ms"], 30_000);
    let (status, raw) = home.ask("POST", "/v1/queues/q/tasks/raw?expected_ms=7", None).await;
    assert_eq!(status, 200, "{raw}");
    assert_eq!(home.task(raw["tasks"][0]["id"].as_str().unwrap()).await["expected_ms"], 7);
    let silent = home.submit("q", json!({})).await;
    assert_eq!(home.task(&silent).await["expected_ms"], Value::Null);
    for wrong in [json!(0), json!(1_000_000_001), json!("long"), json!(-1), json!(1.5)] {
        let tasks = json!({ "tasks": [{ "expected_ms": wrong }] });
        let refused = home.refused("POST", "/v1/queues/q/tasks", tasks).await;
        assert_eq!(refused, (400, "tasks[0].expected_ms".into()), "{wrong}");
    }
    home.server.stop().await.unwrap();
}

/// It is the worker that knows how long a run took: two keys hold the slot for the same time, but of one its worker
/// says that its runs were short, and it gets more of them.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_says_of_how_long_runs_took_decides_who_goes_next() {
    let home = Home::new().await;
    home.ask("PUT", "/v1/queues/q", Some(json!({ "settings": { "share": "time" } }))).await;
    let of = |key: &str| vec![json!({ "key": key, "expected_ms": 1 }); 150];
    let tasks = [of("quick"), of("slow")].concat();
    home.post("/v1/queues/q/tasks", json!({ "tasks": tasks })).await;
    let _worker = home.worker_of(&["q"], 1, some_were_quick).await;
    let began = Instant::now();
    loop {
        let left = home.get("/v1/tasks?queue=q&key=quick&state=queued&limit=1000").await;
        if ids(&left).is_empty() {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{left}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // By tasks it would be every other one. They took twenty times as long, but those that were placed before that
    // was known were not.
    let slow = 150 - ids(&home.get("/v1/tasks?queue=q&key=slow&state=queued&limit=1000").await).len();
    assert!((1..=50).contains(&slow), "{slow} of slow, 150 of quick");
    // What they got is told as time, and most of it went to the one that was slow.
    let queue = home.get("/v1/queues/q").await;
    let share = |key: &str| {
        let keys = queue["keys"].as_array().unwrap();
        keys.iter().find(|of| of["key"] == key).unwrap()["share"].as_f64().unwrap()
    };
    assert!(share("slow") > share("quick"), "{queue}");
    home.server.stop().await.unwrap();
}

/// A store in memory that keeps the first who reads a task waiting: it is told when that has begun, and says when it may
/// go on.
#[derive(Clone, Default)]
struct Slow {
    memory: Memory,
    first: Arc<OnceCell<()>>,
    begun: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Store for Slow {
    async fn take(&self, shard: ShardId, shown: Option<Epoch>) -> Result<Taken, StoreError> {
        self.memory.take(shard, shown).await
    }

    async fn commit(&self, shard: ShardId, epoch: Epoch, changes: Vec<Change>) -> Result<(), StoreError> {
        self.memory.commit(shard, epoch, changes).await
    }

    async fn read_lane(
        &self,
        shard: ShardId,
        lane: LaneId,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.memory.read_lane(shard, lane, above, limit).await
    }

    async fn read_timers(
        &self,
        shard: ShardId,
        above: Level,
        limit: usize,
    ) -> Result<Page<TimerRow>, StoreError> {
        self.memory.read_timers(shard, above, limit).await
    }

    async fn read_parked(
        &self,
        shard: ShardId,
        lane: LaneId,
        key: Key,
        above: Level,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.memory.read_parked(shard, lane, key, above, limit).await
    }

    async fn read_task(&self, shard: ShardId, task: TaskId) -> Result<Option<Task>, StoreError> {
        let found = self.memory.read_task(shard, task).await;
        if self.first.set(()).is_ok() {
            self.begun.notify_one();
            self.go_on.notified().await;
        }
        found
    }

    async fn read_history(&self, shard: ShardId, task: TaskId) -> Result<History, StoreError> {
        self.memory.read_history(shard, task).await
    }

    async fn list_tasks(
        &self,
        shard: ShardId,
        wanted: Wanted,
        after: TaskId,
        limit: usize,
    ) -> Result<Listing, StoreError> {
        self.memory.list_tasks(shard, wanted, after, limit).await
    }
}

fn says_its_time(start: &v1::Start) -> Option<Does> {
    let result = match start.run.as_ref().unwrap().max_duration_ms {
        60_000 => "a minute",
        1_000 => "a second",
        _ => "another time",
    };
    Some(Does { end: v1::EndKind::Succeeded, result, ..Does::default() })
}

/// The run has begun, as far as the scheduler knows, but its worker has not been told yet: the payload comes first.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_cut_while_its_payload_is_read_starts_with_less_time() {
    let memory = Memory::default();
    let home = Home::of(memory.clone()).await;
    let id = home.submit("q", json!({ "text": "x", "max_duration_ms": 60_000 })).await;
    home.server.stop().await.unwrap();
    // Another server knows no payload: it reads it when the task's turn comes.
    let store = Slow { memory, ..Slow::default() };
    let home = Home::of(store.clone()).await;
    let _worker = home.worker(&["q"], says_its_time).await;
    store.begun.notified().await;
    let body = json!({ "max_duration_ms": 1_000 });
    let (status, said) = home.ask("PATCH", &format!("/v1/tasks/{id}"), Some(body)).await;
    assert_eq!(status, 200, "{said}");
    store.go_on.notify_one();
    assert_eq!(home.until(&id, "succeeded").await["result"], "a second");
    home.server.stop().await.unwrap();
}
