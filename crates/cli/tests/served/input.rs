//! Bad input: a clear error that names the field, the right exit code, and nothing lost.

use evenhand::{Kind, NewTask, Refusal, wire};
use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use evenhand_api::v1::{self, die::Then};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::checker::all_is_well;
use crate::support::{Api, LONG, SHORT, SOON, Server, block_on, eventually, runtime};

fn retry(task: &mut v1::NewTask) -> &mut v1::Retry {
    task.retry.get_or_insert_default()
}

/// Files of these names, each of so many bytes.
fn files(names: &[&str], bytes: usize) -> Vec<v1::File> {
    let content = bytes::Bytes::from(vec![0; bytes]);
    names.iter().map(|name| v1::File { name: name.to_string(), content: content.clone() }).collect()
}

fn refused(api: &Api, queue: &str, task: v1::NewTask) -> Refusal {
    api.hasty().enqueue(queue, vec![task.into()]).unwrap_err()
}

#[test]
fn what_a_client_gets_wrong_is_named() {
    let server = Server::start(LONG);
    let api = server.api();
    let names = ["", "a/b", "a\"b", "a'b", "a b", "a\0b", "\u{1F600}", "-a", "../a", &"x".repeat(65)];
    for name in names {
        let refusal = api.hasty().enqueue(name, vec![NewTask::new("")]).unwrap_err();
        assert_eq!(refusal.field, "queue", "{name:?}: {refusal}");
        let listed =
            block_on(api.hasty().client.list(wire::ListRequest { queue: name.into(), ..Default::default() }));
        if !name.is_empty() {
            assert_eq!(listed.unwrap_err().field, "queue", "{name:?}");
        }
    }
    type Spoil = fn(&mut v1::NewTask);
    let cases: [(Kind, &str, Spoil); 27] = [
        (Kind::Invalid, "key", |task| task.key = "a\0b".into()),
        (Kind::Invalid, "key", |task| task.key = "a\nb".into()),
        (Kind::TooLarge, "key", |task| task.key = "k".repeat(257)),
        (Kind::Invalid, "weight_thousandths", |task| task.weight_thousandths = Some(0)),
        (Kind::Invalid, "weight_thousandths", |task| task.weight_thousandths = Some(u32::MAX)),
        (Kind::Invalid, "priority", |task| task.priority = Some(99)),
        (Kind::Invalid, "priority", |task| task.priority = Some(u32::MAX)),
        (Kind::Invalid, "retry.max_attempts", |task| retry(task).max_attempts = Some(0)),
        (Kind::Invalid, "retry.max_attempts", |task| retry(task).max_attempts = Some(65_537)),
        (Kind::Invalid, "retry.backoff_ms", |task| retry(task).backoff_ms = Some(u64::MAX)),
        (Kind::Invalid, "retry.factor", |task| retry(task).factor_thousandths = Some(0)),
        (Kind::Invalid, "delay_ms", |task| task.delay_ms = Some(u64::MAX)),
        (Kind::Invalid, "delay_ms", |task| (task.delay_ms, task.run_at_ms) = (Some(1), Some(1))),
        (Kind::Invalid, "expires_ms", |task| task.expires_ms = Some(u64::MAX)),
        (Kind::Invalid, "attach_ttl_ms", |task| task.attach_ttl_ms = Some(1)),
        (Kind::TooLarge, "unique_key", |task| task.unique_key = "u".repeat(257)),
        (Kind::Invalid, "unique_ms", |task| {
            (task.unique_key, task.unique_ms) = ("u".into(), Some(u64::MAX));
        }),
        (Kind::Invalid, "max_duration_ms", |task| task.max_duration_ms = Some(0)),
        (Kind::Invalid, "expected_ms", |task| task.expected_ms = Some(0)),
        (Kind::Invalid, "expected_ms", |task| task.expected_ms = Some(u64::MAX)),
        (Kind::Invalid, "files[1].name", |task| task.files = files(&["a", "../b"], 1)),
        (Kind::Invalid, "files[1].name", |task| task.files = files(&["a", "a"], 1)),
        (Kind::TooLarge, "files[0].name", |task| task.files = files(&[&"n".repeat(129)], 1)),
        (Kind::TooLarge, "files[0]", |task| task.files = files(&["a"], 1024 * 1024 + 1)),
        (Kind::TooLarge, "files", |task| task.files = files(&["a", "b", "c", "d", "e"], 1024 * 1024)),
        (Kind::TooLarge, "files", |task| task.files = vec![v1::File::default(); 65]),
        (Kind::TooLarge, "payload", |task| task.payload = vec![0; 10 * 1024 * 1024].into()),
    ];
    for (kind, field, spoil) in cases {
        let mut task = v1::NewTask::default();
        spoil(&mut task);
        let refusal = refused(&api, "q", task.clone());
        assert_eq!(
            (refusal.kind, refusal.field.as_str()),
            (kind, format!("tasks[0].{field}").as_str()),
            "{refusal}"
        );
        assert!(!refusal.message.is_empty());
        // The good ones beside it are not accepted either, and the bad one is told from them.
        let mixed = vec![NewTask::new(""), NewTask::new(""), task.into()];
        let refusal = api.hasty().enqueue("q", mixed).unwrap_err();
        assert_eq!(refusal.field, format!("tasks[2].{field}"), "{refusal}");
    }
    let far = v1::NewTask { max_duration_ms: Some(u64::MAX), ..Default::default() };
    assert_eq!(refused(&api, "q", far).field, "tasks[0].max_duration_ms");
    let none = api.hasty().enqueue("q", Vec::new()).unwrap_err();
    assert_eq!((none.kind, none.field.as_str()), (Kind::Invalid, "tasks"), "{none}");
    let many = api.hasty().enqueue("q", vec![NewTask::new(""); 100_000]).unwrap_err();
    assert_eq!((many.kind, many.field.as_str()), (Kind::TooLarge, "tasks"), "{many}");
    let heavy = api.hasty().enqueue("q", vec![NewTask::new(vec![0; 1024 * 1024]); 17]).unwrap_err();
    assert_eq!((heavy.kind, heavy.field.as_str()), (Kind::TooLarge, "tasks"), "{heavy}");
    let name = "r".repeat(129);
    let long = block_on(api.hasty().client.enqueue_once("q", vec![NewTask::new("")], name)).unwrap_err();
    assert_eq!((long.kind, long.field.as_str()), (Kind::TooLarge, "request_id"), "{long}");
    assert_eq!(api.queue("q").accepted, 0, "what was refused was accepted");

    for id in ["", "x", "0", "0-", "-1", "0-1-2", "0-99999999999999999999", "0-\0", "\u{1F600}"] {
        for refusal in [
            block_on(api.hasty().client.get(id)).unwrap_err(),
            block_on(api.hasty().client.cancel(id)).unwrap_err(),
            block_on(api.hasty().client.watch(id)).unwrap_err(),
        ] {
            assert_eq!((refusal.kind, refusal.field.as_str()), (Kind::Invalid, "id"), "{id:?}: {refusal}");
        }
    }
    for id in ["0-0", "0-4711", "0-18446744073709551615", "7-1"] {
        assert_eq!(block_on(api.hasty().client.get(id)).unwrap_err().kind, Kind::NotFound, "{id}");
        assert_eq!(block_on(api.hasty().client.cancel(id)).unwrap_err().kind, Kind::NotFound, "{id}");
        assert_eq!(block_on(api.hasty().client.watch(id)).unwrap_err().kind, Kind::NotFound, "{id}");
    }
    let list = |queue: &str, cursor: &str, limit| {
        let request = wire::ListRequest {
            queue: queue.into(),
            cursor: cursor.into(),
            limit,
            ..wire::ListRequest::default()
        };
        block_on(api.hasty().client.list(request))
    };
    for cursor in ["x", "0-", "\u{1F600}", "0-1-1"] {
        assert_eq!(list("", cursor, None).unwrap_err().field, "cursor", "{cursor:?}");
    }
    for limit in [0, 1_001, u32::MAX] {
        assert_eq!(list("", "", Some(limit)).unwrap_err().field, "limit");
    }
    assert!(list("", "0-18446744073709551615", None).unwrap().tasks.is_empty());
    assert_eq!(list("nobody", "", None).unwrap_err().kind, Kind::NotFound);

    // All is as it was.
    let _worker = server.worker("one", 2);
    let id = api.submit("sleep 1");
    all_is_well(&server, &[id]);
}

/// It fits in no message, so it does not even get to where fields are looked at.
#[test]
fn what_fits_in_no_message_is_too_large_as_well() {
    let server = Server::start(LONG);
    let bytes = vec![b'x'; 30 * 1024 * 1024];
    let said = server.cli_with(&["submit", "q", "-"], &bytes);
    assert_eq!(said.code, 2, "{said:?}");
    let huge = server.api().hasty().enqueue("q", vec![NewTask::new(bytes)]).unwrap_err();
    assert_eq!(huge.kind, Kind::TooLarge, "{huge}");
}

#[test]
fn the_command_line_says_what_is_wrong_and_exits_by_its_kind() {
    let mut server = Server::start(LONG);
    let big = "x".repeat(1024 * 1024 + 1);
    let lines = b"{\"text\": \"sleep 1\"}\n{\"text\": \"sleep 1\", \"prio\": 3}\n";
    let cases: [(&[&str], &[u8], i32, &str); 20] = [
        (&["submit", "a/b", "x"], b"", 2, "queue: contains '/'"),
        (&["submit", "q", "--weight", "0", "x"], b"", 2, "--weight"),
        (&["submit", "q", "--weight=-1", "x"], b"", 2, "--weight"),
        (&["submit", "q", "--priority", "99", "x"], b"", 2, "--priority"),
        (&["submit", "q", "--max-attempts", "0", "x"], b"", 2, "--max-attempts"),
        (&["submit", "q", "--max-duration", "soon", "x"], b"", 2, "--max-duration"),
        (&["submit", "q", "--key", "a\tb", "x"], b"", 2, "tasks[0].key: contains the control character"),
        (&["submit", "q", "-"], big.as_bytes(), 2, "tasks[0].payload: has 1048577 bytes"),
        (&["submit", "q", "--batch", "-"], lines, 2, "line 2: prio is no field of a task"),
        (&["submit", "q", "--batch", "-"], b"[1]\n", 2, "line 1: must be a JSON object"),
        (&["submit", "q", "--batch", "-"], b"{\"priority\": -1}\n", 2, "line 1: priority"),
        (&["submit", "q", "--batch", "/nowhere"], b"", 1, "/nowhere"),
        (&["get", "nonsense"], b"", 2, "id: \"nonsense\" is no task's id"),
        (&["get", "0-4711"], b"", 3, "0-4711 does not exist"),
        (&["cancel", "0-4711"], b"", 3, "4711 does not exist"),
        (&["watch", "0-4711"], b"", 3, "0-4711 does not exist"),
        (&["list", "--queue", "nobody"], b"", 3, "there is no queue nobody"),
        (&["list", "--cursor", "nonsense"], b"", 2, "cursor: is none that a list gave"),
        (&["list", "--limit", "0"], b"", 2, "--limit"),
        (&["worker", "a/b", "--", "true"], b"", 2, "contains '/'"),
    ];
    for (args, stdin, code, text) in cases {
        let said = server.cli_with(args, stdin);
        assert_eq!(said.code, code, "{args:?}: {said:?}");
        assert!(said.err.contains(text) && said.out.is_empty(), "{args:?} was to say {text:?}: {said:?}");
        assert!(!said.err.contains("panicked"), "{said:?}");
    }
    let said = server.cli(&["get", "0-1", "--server", "nonsense"]);
    assert!(said.code == 2 && said.err.contains("nonsense"), "{said:?}");
    server.kill();
    for args in [["get", "0-1"], ["submit", "q"]] {
        let said = server.cli(&args);
        assert_eq!(said.code, 6, "{args:?}: {said:?}");
        assert!(said.err.contains("cannot be reached"), "{said:?}");
    }
    server.restart();
    // A batch is not all or nothing, and says so.
    let api = server.api();
    let _worker = server.worker("one", 1);
    eventually("what was accepted of the batch ends", || {
        api.queue("q").waiting + api.queue("q").running == 0
    });
    assert_eq!(server.cli(&["list"]).code, 0);
}

/// A worker that says whatever it likes.
struct Session {
    up: mpsc::Sender<v1::Up>,
    down: Streaming<v1::Down>,
}

fn sessions(server: &Server) -> WorkerSessionsClient<Channel> {
    let _inside = runtime().enter();
    WorkerSessionsClient::new(Endpoint::from_shared(server.url()).unwrap().connect_lazy())
}

impl Session {
    fn new(server: &Server) -> Session {
        let (up, outgoing) = mpsc::channel(100);
        let mut grpc = sessions(server);
        let down =
            block_on(async move { grpc.session(ReceiverStream::new(outgoing)).await }).unwrap().into_inner();
        Session { up, down }
    }

    fn say(&mut self, message: v1::up::Message) {
        block_on(self.up.send(v1::Up { message: Some(message) })).unwrap();
    }

    fn hello(server: &Server, hello: v1::Hello) -> Session {
        let mut session = Session::new(server);
        session.say(v1::up::Message::Hello(hello));
        session
    }

    /// The next message; None at the end.
    fn hear(&mut self) -> Option<v1::Down> {
        block_on(async { tokio::time::timeout(SOON, self.down.message()).await }).unwrap().unwrap_or(None)
    }

    /// How the session is ended.
    fn end(mut self) -> (v1::Error, Then) {
        while let Some(down) = self.hear() {
            if let Some(die) = down.die {
                return (die.error.clone().unwrap(), die.then());
            }
        }
        panic!("the session ended without a word");
    }

    fn welcome(&mut self) -> v1::Down {
        loop {
            let down = self.hear().unwrap();
            assert!(down.die.is_none(), "{down:?}");
            if down.welcome.is_some() {
                return down;
            }
        }
    }
}

fn good_hello() -> v1::Hello {
    v1::Hello {
        protocol: evenhand_api::PROTOCOL,
        program: "a test".into(),
        seat: "stranger".into(),
        token: 7,
        process_life: 1,
        session: 1,
        slots: 1,
        queues: vec![v1::ServedQueue { queue: "elsewhere".into(), weight_thousandths: 1000 }],
        ..v1::Hello::default()
    }
}

fn some_run(task: u64, epoch: u64) -> v1::Run {
    v1::Run {
        id: Some(v1::RunId { task, epoch, dispatch: 1, nonce: 0 }),
        queue_id: 0,
        priority: 5,
        level: vec![0; 16],
        cost_thousandths: 1000,
        weight_thousandths: 1000,
        attempt: 1,
        max_attempts: 5,
        ..v1::Run::default()
    }
}

#[test]
fn a_worker_that_says_hello_wrongly_is_told_what_is_wrong() {
    let server = Server::start(SHORT);
    let api = server.api();
    eventually("the shard is taken", || api.shard().open);
    type Spoil = fn(&mut v1::Hello);
    let twice = |hello: &mut v1::Hello| hello.queues.push(hello.queues[0].clone());
    let many = |hello: &mut v1::Hello| {
        let queue = |n| v1::ServedQueue { queue: format!("q{n}"), weight_thousandths: 1000 };
        hello.queues = (0..65).map(queue).collect();
    };
    let cases: [(&str, Spoil); 20] = [
        ("protocol", |hello| hello.protocol = 0),
        ("protocol", |hello| hello.protocol = 99),
        ("shard", |hello| hello.shard = 7),
        ("seat", |hello| hello.seat.clear()),
        ("seat", |hello| hello.seat = "a/b".into()),
        ("seat", |hello| hello.seat = "\u{1F600}".into()),
        ("queues", |hello| hello.queues.clear()),
        ("queues", twice),
        ("queues", many),
        ("queues[0].queue", |hello| hello.queues[0].queue = "a\0b".into()),
        ("queues[0].weight_thousandths", |hello| hello.queues[0].weight_thousandths = 0),
        ("slots", |hello| hello.slots = u32::MAX),
        ("running[0].id", |hello| hello.running = vec![v1::Run::default()]),
        ("running[0].level", |hello| hello.running = vec![v1::Run { level: vec![1; 15], ..some_run(1, 1) }]),
        ("running[0].priority", |hello| hello.running = vec![v1::Run { priority: 10, ..some_run(1, 1) }]),
        ("running[0].attempt", |hello| hello.running = vec![v1::Run { attempt: 0, ..some_run(1, 1) }]),
        ("running[0].key", |hello| hello.running = vec![v1::Run { key: "a\0b".into(), ..some_run(1, 1) }]),
        ("ended[0].run", |hello| hello.ended = vec![v1::Ended::default()]),
        ("ended[0].end", |hello| {
            hello.ended = vec![v1::Ended { run: Some(some_run(1, 1)), end: 77, ..Default::default() }]
        }),
        ("epoch", |hello| hello.epoch = u64::MAX),
    ];
    for (field, spoil) in cases {
        let mut hello = good_hello();
        spoil(&mut hello);
        let (error, _) = Session::hello(&server, hello).end();
        assert_eq!(error.field, field, "{error:?}");
        assert!(!error.message.is_empty() && !error.kind.is_empty(), "{error:?}");
    }
    let version = |protocol| Session::hello(&server, v1::Hello { protocol, ..good_hello() }).end();
    let (error, then) = version(99);
    assert!(error.message.contains("upgrade the server") && then == Then::Exit, "{error:?}");
    let (error, then) = version(0);
    assert!(error.message.contains("upgrade the worker") && then == Then::Exit, "{error:?}");
    let (error, then) = Session::hello(&server, v1::Hello { store_id: 1, ..good_hello() }).end();
    assert!(error.field == "store_id" && then == Then::Forget, "{error:?}");
    // Out of turn.
    let mut session = Session::new(&server);
    session.say(v1::up::Message::News(v1::News::default()));
    assert_eq!(session.end().0.field, "hello");
    let session = Session::new(&server);
    block_on(session.up.send(v1::Up { message: None })).unwrap();
    assert_eq!(session.end().0.field, "hello");
    let mut session = Session::hello(&server, good_hello());
    session.welcome();
    session.say(v1::up::Message::Hello(good_hello()));
    assert_eq!(session.end().0.field, "news");
    let spoiled = [
        v1::RunEnded::default(),
        v1::RunEnded { run: Some(v1::RunId::default()), attempt: 1, end: 77, ..Default::default() },
    ];
    for (n, ended) in spoiled.into_iter().enumerate() {
        let seat = format!("stranger-{n}");
        let mut session = Session::hello(&server, v1::Hello { seat, ..good_hello() });
        session.welcome();
        session.say(v1::up::Message::News(v1::News { ended: vec![ended], ..Default::default() }));
        let (error, _) = session.end();
        assert!(error.field.starts_with("ended[0]."), "{error:?}");
    }
    // The dead are announced in the same words.
    let dead = v1::DeadRequest { protocol: 99, seat: "one".into(), ..Default::default() };
    let refused = block_on(async { sessions(&server).dead(dead).await }).unwrap_err();
    assert!(refused.message().contains("protocol"), "{refused}");
    let dead = v1::DeadRequest { protocol: 1, seat: "a/b".into(), ..Default::default() };
    let refused = block_on(async { sessions(&server).dead(dead).await }).unwrap_err();
    assert!(refused.message().contains("seat"), "{refused}");
    let dead = v1::DeadRequest { protocol: 1, seat: "nobody".into(), ..Default::default() };
    block_on(async { sessions(&server).dead(dead).await }).unwrap();
    // Those who were let in and then ended have to be given up: until then a new worker gets no work.
    let _worker = server.worker("one", 1);
    let id = api.submit("sleep 1");
    all_is_well(&server, &[id]);
}

/// It is well formed, and false: runs of tasks that do not exist, wait, have ended, or run elsewhere.
#[test]
fn a_worker_that_reports_nonsense_harms_nobody_elses_tasks() {
    let server = Server::start(SHORT);
    let api = server.api();
    let _worker = server.worker("one", 2);
    let go = crate::support::Signpost::new(&server);
    let ended = api.submit("sleep 1");
    api.end(&ended);
    let running = api.submit(&go.until());
    crate::checker::await_start(&server, &running);
    let number = |id: &str| id.rsplit('-').next().unwrap().parse::<u64>().unwrap();
    let epoch = api.shard().epoch;
    let mut runs = Vec::new();
    for task in [0, number(&ended), number(&running), 4711, u64::MAX] {
        runs.push(some_run(task, epoch));
        runs.push(v1::Run { queue_id: u32::MAX, ..some_run(task, epoch) });
        runs.push(v1::Run { level: vec![255; 16], class: 15, priority: 9, ..some_run(task, 0) });
        runs.push(v1::Run { attempt: 1000, max_attempts: 1, key: "other".into(), ..some_run(task, epoch) });
    }
    for (n, run) in runs.iter().enumerate() {
        let seat = format!("stranger-{n}");
        let hello = v1::Hello { running: vec![run.clone(), run.clone()], seat: seat.clone(), ..good_hello() };
        drop(Session::hello(&server, hello));
        let end =
            |end: v1::EndKind| v1::Ended { run: Some(run.clone()), end: end.into(), ..Default::default() };
        // A success of a run that nobody started would be believed only for a task that has none: leave it out.
        let said = vec![end(v1::EndKind::Failed), end(v1::EndKind::FailedForGood)];
        let hello = v1::Hello { ended: said, seat: format!("{seat}-e"), ..good_hello() };
        let mut session = Session::hello(&server, hello);
        let told = |end: v1::EndKind| v1::RunEnded {
            run: run.id,
            attempt: 1,
            end: end.into(),
            ..Default::default()
        };
        session.say(v1::up::Message::News(v1::News {
            heartbeat: Some(v1::Heartbeat { number: u64::MAX, answered: u64::MAX, worker_set: None }),
            ended: [v1::EndKind::Failed, v1::EndKind::FailedForGood].map(told).into(),
            refused: vec![run.id.unwrap(), v1::RunId::default()],
            progress: [f64::NAN, f64::NEG_INFINITY, 7.0]
                .map(|fraction| v1::RunProgress {
                    run: run.id,
                    progress: Some(v1::Progress { fraction: Some(fraction), message: "é".repeat(5_000) }),
                })
                .into(),
            output: vec![v1::Output {
                run: run.id,
                lines: vec!["\u{1b}[2J".repeat(1000); 10],
                dropped: u64::MAX,
            }],
            slots: Some(u32::MAX),
        }));
        drop(session);
        assert!(server.page("/healthz").contains("200 OK"), "after {run:?}:\n{}", server.log());
    }
    go.raise();
    let fresh = api.submit("sleep 1");
    for id in [&ended, &running, &fresh] {
        let task = api.end(id);
        assert_eq!(task.state(), evenhand::TaskState::Succeeded, "{task:?}\n{}", server.log());
    }
    all_is_well(&server, &[ended, running, fresh]);
    eventually("the strangers are given up", || api.workers().len() == 1);
}

/// Its run ended and that is on disk, and yet it says to the next server that it goes on. As one might whose lease was too
/// long: it must not do more harm than that.
#[test]
fn a_worker_that_goes_on_with_an_ended_task_does_not_spoil_the_store() {
    let mut server = Server::start(LONG);
    let api = server.api();
    eventually("the shard is taken", || api.shard().open);
    let accepted = api.submit_all("q", vec!["sleep 1"; 5]);
    let queues = vec![v1::ServedQueue { queue: "q".into(), weight_thousandths: 1000 }];
    let hello =
        |session, running| v1::Hello { session, running, slots: 2, queues: queues.clone(), ..good_hello() };
    let beat = |session: &mut Session, worker_set| {
        let heartbeat = Some(v1::Heartbeat { number: 1, worker_set, ..Default::default() });
        session.say(v1::up::Message::News(v1::News { heartbeat, ..Default::default() }));
    };
    let ends = |session: &mut Session, run: &v1::Run| {
        let (id, end) = (run.id.unwrap(), v1::EndKind::Succeeded.into());
        let ended = vec![v1::RunEnded { run: Some(id), attempt: 1, end, ..Default::default() }];
        session.say(v1::up::Message::News(v1::News { ended, ..Default::default() }));
        while !session.hear().unwrap().acknowledged.contains(&id) {}
    };
    let mut session = Session::hello(&server, hello(1, vec![]));
    let set = session.welcome().welcome.unwrap().worker_set;
    beat(&mut session, set);
    let mut runs: Vec<v1::Run> = Vec::new();
    while runs.len() < 2 {
        runs.extend(session.hear().unwrap().start.into_iter().filter_map(|start| start.run));
    }
    ends(&mut session, &runs[1]);
    server.kill();
    server.restart();
    let mut session = Session::hello(&server, hello(2, runs[..2].to_vec()));
    session.welcome();
    beat(&mut session, None);
    ends(&mut session, &runs[1]);
    server.kill();
    server.restart();
    eventually("it serves again", || api.client_shard().is_some());
    let queue = api.queue("q");
    assert_eq!(
        (queue.succeeded, queue.accepted as usize),
        (1, accepted.len()),
        "{queue:?}\n{}",
        server.log()
    );
}
