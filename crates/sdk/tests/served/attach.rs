//! Interactive tasks as programs have them, and what workers make of them.

use std::time::Duration;

use evenhand::wire::Over;
use evenhand::{
    Attach, AttachOutput, Attached, Commands, Failure, Heard, Kind, NewTask, Refusal, TaskState, wire,
};
use evenhand_api::v1::client_client::ClientClient;
use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use evenhand_api::{PROTOCOL, errors, v1};
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::support::{Home, example};

/// A worker of a queue that runs a shell script for each task, once it gets work.
pub(crate) async fn commands(
    home: &Home,
    queue: &str,
    script: &str,
) -> JoinHandle<Result<(), evenhand::WorkerError>> {
    let command = ["sh", "-c", script].map(Into::into).to_vec();
    let (guardian, trampoline) = (vec!["guardian".into()], vec!["trampoline".into()]);
    let worker = Commands::new(&home.url, command, example("guardian_child"), guardian, trampoline)
        .queue(queue, 1_000)
        .slots(2)
        .seat("w")
        .seat_dir(home.dir.path())
        .grace(Duration::from_secs(1))
        .drain_on(home.draining());
    let worker = tokio::spawn(worker.run());
    ready(home).await;
    worker
}

async fn ready(home: &Home) {
    let works = |worker: &wire::Worker| worker.health == "healthy" && worker.why_not.is_empty();
    while !home.client.workers().await.unwrap().iter().any(works) {
        tokio::task::yield_now().await;
    }
}

/// What comes until the end: standard output, standard error, and how it ended.
async fn all(output: &mut AttachOutput) -> (Vec<u8>, Vec<u8>, wire::AttachClosed) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    loop {
        match output.next().await.unwrap().unwrap() {
            Heard::Stdout(bytes) => out.extend(bytes),
            Heard::Stderr(bytes) => err.extend(bytes),
            Heard::Warning { .. } => {}
            Heard::Closed(closed) => {
                assert_eq!(output.next().await, Ok(None), "nothing follows");
                return (out, err, closed);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_talks_to_a_command() {
    let home = Home::new().await;
    let worker = commands(&home, "q", "cat; echo $EVENHAND_KEY >&2; exit 3").await;
    let ask = Attach::new().key("acme").max_duration(Duration::from_secs(600));
    let Attached { id, seat, input, mut output } = home.client.attach("q", ask).await.unwrap();
    assert_eq!(seat, "w");
    assert!(!id.is_empty());
    // More than one message holds.
    let sent = vec![b'x'; 3_000_000];
    let bytes = sent.clone();
    let writing = tokio::spawn(async move {
        input.write(bytes).await.unwrap();
        input.end().await.unwrap();
        input
    });
    let (out, err, closed) = all(&mut output).await;
    assert!(out == sent);
    assert_eq!((err.as_slice(), closed.over(), closed.exit_code), (&b"acme\n"[..], Over::Ended, Some(3)));
    // What is said to one that is over says so, sooner or later.
    let input = writing.await.unwrap();
    while input.write("x").await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(input.write("x").await.unwrap_err().kind, Kind::NotFound);
    // The end of what is said is the end of the input.
    let Attached { input, mut output, .. } = home.client.attach("q", Attach::new()).await.unwrap();
    input.write("y").await.unwrap();
    drop(input);
    assert_eq!(all(&mut output).await.0, b"y");
    // A terminal.
    let ask = Attach::new().terminal(12, 34, "vt100");
    let Attached { input, mut output, .. } = home.client.attach("q", ask).await.unwrap();
    input.write("typed\n").await.unwrap();
    input.resize(13, 35).await.unwrap();
    input.end().await.unwrap();
    let (out, err, closed) = all(&mut output).await;
    assert_eq!((String::from_utf8(out).unwrap().as_str(), err.len()), ("typed\r\ntyped\r\n\r\n", 0));
    assert_eq!(closed.exit_code, Some(3));
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_lets_them_finish_and_their_last_words_arrive() {
    let home = Home::new().await;
    let worker = commands(&home, "q", "cat; echo last").await;
    let Attached { input, mut output, .. } = home.client.attach("q", Attach::new()).await.unwrap();
    input.write("first\n").await.unwrap();
    assert_eq!(output.next().await.unwrap(), Some(Heard::Stdout("first\n".into())));
    let ending = tokio::spawn(home.end(worker));
    input.end().await.unwrap();
    let (out, _, closed) = all(&mut output).await;
    assert_eq!((out.as_slice(), closed.exit_code), (&b"last\n"[..], Some(0)));
    ending.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_handlers_refuses_and_says_why() {
    let home = Home::new().await;
    let worker = home.worker().handle("q", async |(), _| Ok::<_, Failure>(1));
    let worker = tokio::spawn(worker.run());
    ready(&home).await;
    for _ in 0..3 {
        let mut attached = home.client.attach("q", Attach::new()).await.unwrap();
        let closed = all(&mut attached.output).await.2;
        assert_eq!(closed.over(), Over::NotStarted);
        assert!(closed.message.contains("runs handlers"), "{}", closed.message);
    }
    // It is none the worse for it.
    let id = home.client.enqueue("q", NewTask::json(&()).unwrap()).await.unwrap();
    assert_eq!(home.client.wait(&id).await.unwrap().state(), TaskState::Succeeded);
    home.end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_for_what_is_not_there_is_refused() {
    let home = Home::new().await;
    let refused = async |queue: &str, ask: Attach| home.client.attach(queue, ask).await.unwrap_err();
    assert_eq!(refused("q", Attach::new()).await.kind, Kind::NotFound);
    let worker = commands(&home, "q", "cat").await;
    let wrong = [
        (refused(" ", Attach::new()).await, "queue"),
        (refused("q", Attach::new().key("\n")).await, "key"),
        (refused("q", Attach::new().max_duration(Duration::ZERO)).await, "max_duration_ms"),
        (refused("q", Attach::new().terminal(1, 1, "no such thing")).await, "terminal.term"),
    ];
    for (refusal, field) in wrong {
        assert_eq!((refusal.kind, refusal.field.as_str()), (Kind::Invalid, field));
    }
    let held = [home.client.attach("q", Attach::new()).await, home.client.attach("q", Attach::new()).await];
    let refusal = refused("q", Attach::new()).await;
    assert_eq!(refusal.kind, Kind::Limited, "{refusal}");
    drop(held);
    home.end(worker).await;
}

fn first<T: Send + 'static>(message: T) -> impl tokio_stream::Stream<Item = T> + Send + 'static {
    // Held open: it is not the end of the stream that is wrong.
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let _ = sender.try_send(message);
    tokio::spawn(async move { sender.closed().await });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_told_what_is_wrong_with_what_they_say() {
    let home = Home::new().await;
    let channel = Channel::from_shared(home.url.clone()).unwrap().connect().await.unwrap();
    let mut client = ClientClient::new(channel.clone());
    let mut worker = WorkerSessionsClient::new(channel);
    let refusal = |status: tonic::Status| -> Refusal { errors::refusal(&status) };
    for message in [None, Some(v1::attach_request::Message::Stdin("x".into()))] {
        let status = client.attach(first(v1::AttachRequest { message })).await.unwrap_err();
        assert_eq!(refusal(status).field, "open");
    }
    let up = |message| v1::InteractiveUp { message };
    let status = worker.interactive(first(up(None))).await.unwrap_err();
    assert_eq!(refusal(status).field, "hello");
    let hello = |protocol: u32, run: Option<v1::RunId>| {
        let hello = v1::InteractiveHello { protocol, shard: 0, session: 1, run };
        up(Some(v1::interactive_up::Message::Hello(hello)))
    };
    let status = worker.interactive(first(hello(99, None))).await.unwrap_err();
    assert_eq!(refusal(status).field, "protocol");
    let status = worker.interactive(first(hello(PROTOCOL, None))).await.unwrap_err();
    assert_eq!(refusal(status).field, "run");
    let status = worker.interactive(first(hello(PROTOCOL, Some(v1::RunId::default())))).await.unwrap_err();
    assert_eq!(refusal(status).kind, Kind::NotFound);
    home.stop().await;
}
