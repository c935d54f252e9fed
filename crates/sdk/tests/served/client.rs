//! The client: patience, batches, watches that outlive a server, and the one without async.

use std::collections::HashSet;
use std::time::Duration;

use evenhand::wire::task_event::Event;
use evenhand::{
    Batching, Client, Failure, Filter, Kind, NewTask, QueueSettings, Retries, Share, TaskState, blocking,
    wire,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::support::Home;

/// Somebody who takes connections and says nothing.
async fn hung() -> (TcpListener, Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    (listener, client)
}

#[tokio::test]
async fn a_server_that_hangs_does_not_hang_its_callers() {
    let (_listener, client) = hung().await;
    let client = client.patience(Duration::from_millis(50));
    let refusal = client.get("0-1").await.unwrap_err();
    assert_eq!(refusal.kind, Kind::Unavailable);
    assert!(refusal.message.starts_with("the server did not answer within "), "{refusal}");
    assert_eq!(client.watch("0-1").await.unwrap_err().kind, Kind::Unavailable);
    assert_eq!(client.enqueue("q", NewTask::new("x")).await.unwrap_err().kind, Kind::Unavailable);
}

#[tokio::test]
async fn what_a_task_was_submitted_with_is_found_again() {
    let home = Home::new().await;
    let id = home.client.enqueue("q", NewTask::json(&[1, 2]).unwrap().key("acme")).await.unwrap();
    home.client.enqueue("q", NewTask::new("x").key("zeta")).await.unwrap();
    home.client.enqueue("other", NewTask::new("y").key("acme")).await.unwrap();
    let payload = home.client.payload(&id).await.unwrap();
    assert_eq!(
        (&payload.bytes[..], payload.content_type.as_str()),
        (b"[1,2]".as_slice(), "application/json")
    );

    let listed = async |filter: Filter| {
        let mut listing = home.client.list_all(filter);
        let mut found = Vec::new();
        while let Some(task) = listing.next().await.unwrap() {
            found.push((task.queue, task.key));
        }
        found
    };
    let pair = |queue: &str, key: &str| (queue.to_string(), key.to_string());
    assert_eq!(listed(Filter::all()).await, [pair("q", "acme"), pair("q", "zeta"), pair("other", "acme")]);
    assert_eq!(listed(Filter::all().key("acme")).await, [pair("q", "acme"), pair("other", "acme")]);
    assert_eq!(listed(Filter::all().queue("q").key("zeta")).await, [pair("q", "zeta")]);
    assert_eq!(listed(Filter::all().state(TaskState::Running)).await, []);

    let about = home.client.queue("q", 10).await.unwrap();
    assert_eq!(about.queue.unwrap().waiting, 2);
    let keys: HashSet<String> = about.keys.into_iter().map(|key| key.key).collect();
    assert_eq!(keys, HashSet::from(["acme".into(), "zeta".into()]));
    assert_eq!(home.client.queue("q", 0).await.unwrap_err().field, "keys");
    home.stop().await;
}

#[tokio::test]
async fn a_batch_takes_what_is_good_and_refuses_the_rest_by_itself() {
    let home = Home::new().await;
    let batch = home.client.batch_with("q", Batching { tasks: 64, ..Batching::default() });
    let mut receipts = Vec::new();
    for n in 0..300 {
        let key = if n % 50 == 7 { "k".repeat(300) } else { format!("k{n}") };
        match batch.push(NewTask::json(&n).unwrap().key(key)).await {
            Ok(receipt) => receipts.push((n, receipt)),
            Err(refusal) => {
                assert_eq!((n % 50, refusal.kind, refusal.field.as_str()), (7, Kind::TooLarge, "key"));
            }
        }
    }
    let mut ids = HashSet::new();
    for (n, receipt) in receipts {
        let id = receipt.await.unwrap();
        let payload = home.client.payload(&id).await.unwrap();
        assert_eq!(payload.bytes, n.to_string(), "each caller gets the id of its own task");
        ids.insert(id);
    }
    assert_eq!(ids.len(), 294);
    // A refusal that is about the queue is everybody's.
    let nowhere = home.client.batch("a/b");
    assert_eq!(nowhere.enqueue(NewTask::new("x")).await.unwrap_err().field, "queue");
    home.stop().await;
}

#[tokio::test]
async fn a_batch_refuses_at_once_and_alone_what_a_server_would() {
    let home = Home::new().await;
    // Nobody is there: what is refused is refused without a call.
    let (_listener, away) = hung().await;
    let batch = away.batch("q");
    let task = || NewTask::new("x");
    let year = Duration::from_secs(365 * 24 * 3_600);
    let (mega, second) = (1024 * 1024, Duration::from_secs(1));
    for bad in [
        task().key("k".repeat(257)),
        task().weight_thousandths(0),
        task().priority(10),
        task().priority(1_000),
        task().max_attempts(0),
        task().max_attempts(1_001),
        task().retries(Retries::new().factor(0.5)),
        task().retries(Retries::new().backoff(Duration::MAX)),
        task().retries(Retries::new().max_lost(3)),
        task().delay(20 * year),
        task().expires(Duration::ZERO),
        task().attached(Duration::from_millis(1)),
        task().unique("u".repeat(257)),
        task().unique("u").unique_for(year),
        task().max_duration(Duration::ZERO),
        task().max_duration(year + second),
        task().expected(Duration::ZERO),
        task().expected(year),
        task().content_type("none"),
        task().content_type(format!("c/{}", "c".repeat(126))),
        NewTask::new(vec![0; mega + 1]),
    ] {
        let here = batch.push(bad.clone()).await.unwrap_err();
        let there = home.client.enqueue("q", bad).await.unwrap_err();
        let field = there.field.strip_prefix("tasks[0].").unwrap();
        assert_eq!((here.kind, here.field.as_str()), (there.kind, field), "{here} {there}");
    }
    for good in [
        task().key("k".repeat(256)).weight_thousandths(1).priority(9).max_attempts(1_000),
        task().priority(0).max_attempts(1).max_duration(year).expected(1_000_000 * second),
        NewTask::new(vec![0; mega]).content_type(format!("c/{}", "c".repeat(125))),
    ] {
        home.client.batch("q").enqueue(good).await.unwrap();
    }
    home.stop().await;
}

#[tokio::test]
async fn a_unique_key_is_one_task_and_a_filter_changes_all_that_it_names() {
    let home = Home::new().await;
    let one = |key: &str| NewTask::new("x").unique("only").key(key);
    let first = home.client.enqueue_all("q", vec![one("a"), one("b"), NewTask::new("y")]).await.unwrap();
    let created: Vec<bool> = first.tasks().map(|(_, created)| created).collect();
    assert_eq!((created.as_slice(), first.created), ([true, false, true].as_slice(), true));
    assert_eq!(first.ids[0], first.ids[1]);
    assert_eq!(home.client.enqueue("q", one("c")).await.unwrap(), first.ids[0]);
    // Two queues are two tasks.
    assert!(home.client.enqueue_all("other", vec![one("a")]).await.unwrap().known.is_empty());

    let many: Vec<NewTask> = (0..2_500).map(|n| NewTask::json(&n).unwrap().key("many")).collect();
    home.client.enqueue_all("q", many).await.unwrap();
    let of_many = || Filter::all().queue("q").key("many");
    let mut canceling = home.client.cancel_many(of_many());
    let (mut steps, mut tasks) = (0, 0);
    while let Some(step) = canceling.next().await.unwrap() {
        assert!(step.tasks <= 1_000, "{step:?}");
        (steps, tasks) = (steps + 1, tasks + step.tasks);
    }
    assert!(steps >= 3 && tasks == 2_500, "{tasks} in {steps} steps");
    assert_eq!(home.client.cancel_many(of_many()).all().await.unwrap().tasks, 0);
    let again = home.client.replay_many(of_many().state(TaskState::Canceled)).all().await.unwrap();
    assert_eq!((again.tasks, again.ids.len()), (2_500, 2_500));
    assert_eq!(home.client.replay_many(of_many()).all().await.unwrap().tasks, 0, "they were run again");
    assert_eq!(home.client.queue("q", 1).await.unwrap().queue.unwrap().waiting, 2_502);
    // Never everything by mistake.
    assert_eq!(home.client.cancel_many(Filter::all()).all().await.unwrap_err().kind, Kind::Invalid);
    home.stop().await;
}

#[tokio::test]
async fn settings_are_changed_one_by_one_and_not_behind_ones_back() {
    let home = Home::new().await;
    let retries = Retries::new().max_attempts(7).backoff(Duration::from_secs(3));
    let set = home.client.set_queue("q", QueueSettings::new().retries(retries)).await.unwrap();
    let kept = QueueSettings::new().retention(Duration::ZERO).if_version(set.version);
    let set = home.client.set_queue("q", kept.clone()).await.unwrap();
    let settings = set.settings.unwrap();
    let retry = settings.retry.unwrap();
    assert_eq!(
        (retry.max_attempts, retry.backoff_ms, settings.retention_ms),
        (Some(7), Some(3_000), Some(0))
    );
    assert_eq!(home.client.set_queue("q", kept).await.unwrap_err().kind, Kind::Conflict);
    home.client.pause("q").await.unwrap();
    let about = home.client.queue("q", 1).await.unwrap();
    assert_eq!((about.settings.unwrap().paused, about.version), (Some(true), set.version + 1));
    assert!(about.queue.unwrap().paused);
    home.client.resume("q").await.unwrap();
    assert!(!home.client.queues().await.unwrap()[0].paused);
    let shares = async || home.client.queue("q", 1).await.unwrap().settings.unwrap().share();
    assert_eq!(shares().await, Share::Tasks, "if nobody says");
    home.client.set_queue("q", QueueSettings::new().share(Share::Time)).await.unwrap();
    home.client.pause("q").await.unwrap();
    assert_eq!(shares().await, Share::Time, "what is not named stays");
    let nothing = QueueSettings::new().share(Share::Unspecified);
    assert_eq!(home.client.set_queue("q", nothing).await.unwrap_err().field, "settings.share");
    let task = home.client.enqueue("q", NewTask::new("x").expected(Duration::from_secs(3))).await.unwrap();
    assert_eq!(home.client.get(&task).await.unwrap().expected_ms, Some(3_000));
    home.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_makes_a_task_with_each_call_is_called_once() {
    let (_listener, client) = hung().await;
    let client = client.patience(Duration::from_secs(3_600));
    let began = tokio::time::Instant::now();
    assert_eq!(client.replay("0-1").await.unwrap_err().kind, Kind::Unavailable);
    assert!(began.elapsed() < Duration::from_secs(3_600), "it was sent again");
}

#[tokio::test(start_paused = true)]
async fn an_enqueue_is_not_tried_again_when_its_request_id_may_be_forgotten() {
    let (_listener, client) = hung().await;
    let client = client.patience(Duration::from_secs(24 * 3_600));
    let began = tokio::time::Instant::now();
    assert_eq!(client.enqueue("q", NewTask::new("x")).await.unwrap_err().kind, Kind::Unavailable);
    let minutes = began.elapsed().as_secs() / 60;
    assert!((8..10).contains(&minutes), "{minutes} minutes");
}

#[tokio::test]
async fn what_a_batch_was_given_is_sent_when_it_is_closed_or_dropped() {
    let home = Home::new().await;
    let patient = Batching { linger: Duration::from_secs(3_600), ..Batching::default() };
    let batch = home.client.batch_with("q", patient.clone());
    let other = batch.clone();
    let receipt = batch.push(NewTask::new("x")).await.unwrap();
    batch.close().await;
    home.client.get(&receipt.await.unwrap()).await.unwrap();
    assert_eq!(other.push(NewTask::new("y")).await.unwrap_err().kind, Kind::Conflict);

    let batch = home.client.batch_with("q", patient);
    let receipt = batch.push(NewTask::new("z")).await.unwrap();
    drop(batch);
    home.client.get(&receipt.await.unwrap()).await.unwrap();
    home.stop().await;
}

#[tokio::test]
async fn a_batch_that_cannot_be_sent_makes_its_callers_wait() {
    let (_listener, client) = hung().await;
    let small = Batching { tasks: 2, bytes: 64, linger: Duration::ZERO, calls: 1 };
    let batch = client.batch_with("q", small);
    let mut taken = 0;
    let mut receipts = Vec::new();
    // Nobody answers, so at some time there is no room.
    while let Ok(receipt) =
        tokio::time::timeout(Duration::from_millis(100), batch.push(NewTask::new("x"))).await
    {
        taken += 1;
        receipts.push(receipt.unwrap());
        assert!(taken < 1_000, "nothing bounds it");
    }
}

#[tokio::test]
async fn a_watch_of_many_tells_of_those_and_no_others() {
    let home = Home::new().await;
    let mut watch = home.client.watch_all(Filter::all().queue("q").key("acme")).await.unwrap();
    home.client.enqueue("q", NewTask::new("1").key("zeta")).await.unwrap();
    home.client.enqueue("other", NewTask::new("2").key("acme")).await.unwrap();
    let id = home.client.enqueue("q", NewTask::new("3").key("acme")).await.unwrap();
    let event = watch.next().await.unwrap().unwrap();
    assert_eq!(event.task_id, id);
    assert!(!event.id.is_empty(), "it can be gone on from");
    let request = wire::WatchRequest { queue: "q".into(), after: "nonsense".into(), ..Default::default() };
    let mut lost = home.client.watch_from(request).await.unwrap();
    assert_eq!(lost.next().await.unwrap().unwrap().event, Some(Event::Missed(true)));
    let of_state = Filter::all().state(TaskState::Running);
    assert_eq!(home.client.watch_all(of_state).await.unwrap_err().field, "state");
    drop((watch, lost));
    home.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_outlives_the_server_and_says_that_it_missed_something() {
    let mut home = Home::new().await;
    let id = home.client.enqueue("q", NewTask::json(&7).unwrap()).await.unwrap();
    let mut watch = home.client.watch(&id).await.unwrap();
    let mut all = home.client.watch_all(Filter::all()).await.unwrap();
    assert!(matches!(watch.next().await.unwrap().unwrap().event, Some(Event::Task(_))));
    home.restart().await;
    assert_eq!(watch.next().await.unwrap().unwrap().event, Some(Event::Missed(true)));
    assert_eq!(all.next().await.unwrap().unwrap().event, Some(Event::Missed(true)));
    let waiting = tokio::spawn({
        let (client, id) = (home.client.clone(), id.clone());
        async move { client.wait(&id).await }
    });
    let handler = async |number: u32, _| Ok::<_, Failure>(number);
    let worker = tokio::spawn(home.worker().handle("q", handler).run());
    let mut last = None;
    while let Some(event) = watch.next().await.unwrap() {
        last = Some(event);
    }
    let Some(Event::Task(task)) = last.clone().unwrap().event else { panic!("{last:?}") };
    assert_eq!((task.state(), task.result.as_deref()), (TaskState::Succeeded, Some(b"7".as_slice())));
    assert_eq!(waiting.await.unwrap().unwrap(), task);
    let later = home.client.wait(&id).await.unwrap();
    assert_eq!((later.state(), later.result), (task.state(), task.result), "also when it has ended before");
    drop(all);
    home.end(worker).await;
}

#[tokio::test]
async fn a_connection_that_is_cut_is_made_again() {
    let home = Home::new().await;
    let line = Line::to(home.url.strip_prefix("http://").unwrap()).await;
    let client = Client::new(&line.url).unwrap();
    let id = client.enqueue("q", NewTask::new("x")).await.unwrap();
    let mut watch = client.watch(&id).await.unwrap();
    assert!(matches!(watch.next().await.unwrap().unwrap().event, Some(Event::Task(_))));
    line.cut().await;
    assert_eq!(client.get(&id).await.unwrap().state(), TaskState::Queued);
    assert!(watch.next().await.unwrap().is_some(), "how it stands, or what was missed");
    client.cancel(&id).await.unwrap();
    let mut last = None;
    while let Some(event) = watch.next().await.unwrap() {
        last = event.event;
    }
    let Some(Event::Task(task)) = last else { panic!("{last:?}") };
    assert_eq!(task.state(), TaskState::Canceled);
    assert_eq!(client.watch("").await.unwrap_err().field, "id", "nothing is not everything");
    home.stop().await;
}

/// A way to a server that can be cut.
struct Line {
    url: String,
    cut: mpsc::Sender<oneshot::Sender<()>>,
}

impl Line {
    async fn to(server: &str) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (cut, mut cuts) = mpsc::channel::<oneshot::Sender<()>>(1);
        let server = server.to_string();
        tokio::spawn(async move {
            let mut lines = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((mut near, _)) = listener.accept() => {
                        let mut far = TcpStream::connect(&server).await.unwrap();
                        lines.spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
                    }
                    cut = cuts.recv() => {
                        lines.shutdown().await;
                        let Some(done) = cut else { return };
                        done.send(()).unwrap();
                    }
                }
            }
        });
        Line { url, cut }
    }

    /// Cuts all connections there are.
    async fn cut(&self) {
        let (done, is_done) = oneshot::channel();
        self.cut.send(done).await.unwrap();
        is_done.await.unwrap();
    }
}

#[test]
fn without_async_there_is_a_client_too() {
    let outside = Client::new("http://127.0.0.1:1").unwrap_err();
    assert_eq!(outside.field, "client", "{outside}");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let home = runtime.block_on(Home::new());
    let client = blocking::Client::new(&home.url).unwrap();
    let id = client.enqueue("q", NewTask::new("x")).unwrap();
    let mut watch = client.watch(&id).unwrap();
    assert!(matches!(watch.next().unwrap().unwrap().event, Some(Event::Task(_))));
    client.cancel(&id).unwrap();
    let Some(Event::Task(task)) = watch.last().unwrap().unwrap().event else { panic!("no end") };
    assert_eq!(task.state(), TaskState::Canceled);
    assert_eq!(client.get("0-999").unwrap_err().kind, Kind::NotFound);

    // An error is the last item: whoever passes over errors comes to an end.
    let mut listing = client.list_all(Filter::all().queue("a/b"));
    assert_eq!(listing.next().unwrap().unwrap_err().field, "queue");
    assert!(listing.next().is_none());

    // What a batch was given is sent before it is gone, whatever becomes of the client.
    let batch = client.batch_with("q", Batching { linger: Duration::from_secs(3_600), ..Default::default() });
    let receipt = batch.push(NewTask::new("y")).unwrap();
    drop((client, batch));
    let id = receipt.wait().unwrap();

    // In a runtime it says what is wrong, and waits for nothing.
    let client = blocking::Client::new(&home.url).unwrap();
    let watch = client.clone().patience(Duration::ZERO).watch_all(Filter::all()).unwrap();
    runtime.block_on(async {
        assert_eq!(blocking::Client::new(&home.url).unwrap_err().field, "client");
        assert_eq!(client.get(&id).unwrap_err().field, "client");
        drop(client);
        home.client.get(&id).await.unwrap();
        home.stop().await;
    });
    assert_eq!(watch.filter_map(Result::ok).count(), 0, "the server is gone, and this comes to an end");
}
