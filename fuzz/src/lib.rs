//! Fuzz targets: one function for each decoder of bytes that come from outside. A target must return, whatever
//! the bytes; what it finds it may check further.
//!
//! `make fuzz` lets libFuzzer look for bytes that break one, for a minute each; what it found worth keeping is in
//! `corpus/`, and the tests go through all of that. See CONTRIBUTING.md.

use evenhand_api::rest::{self, Enqueue};
use evenhand_api::{convert, errors, interactive, v1};
use evenhand_core::names::{ContentType, Key, QueueName, Seat};
use evenhand_store::embedded::fuzzing;
use prost::Message;

/// A target's name, and what it does.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 9] = [
    ("worker_up", worker_up),
    ("worker_down", worker_down),
    ("client", client),
    ("rest", rest),
    ("websocket", websocket),
    ("config", evenhand_cli::fuzz_config),
    ("store_batch", fuzzing::batch),
    ("store_table", fuzzing::table),
    ("store_segment", fuzzing::segment),
];

/// What workers say.
fn worker_up(bytes: &[u8]) {
    let Ok(up) = v1::Up::decode(bytes) else { return };
    match up.message {
        Some(v1::up::Message::Hello(hello)) => {
            let Ok(parsed) = convert::parse_hello(&hello) else { return };
            assert_eq!((parsed.running.len(), parsed.ended.len()), (hello.running.len(), hello.ended.len()));
            // What can be read can be said again, and is the same.
            for run in &parsed.running {
                assert_eq!(convert::parse_run(&convert::run(run)).as_ref(), Ok(run));
            }
        }
        Some(v1::up::Message::News(news)) => {
            for ended in &news.ended {
                let _ = (convert::parse_attempt("attempt", ended.attempt), convert::parse_end(ended.end));
            }
            for said in news.progress.into_iter().filter_map(|said| said.progress) {
                let bounded = convert::progress(said);
                assert!(bounded.fraction.is_none_or(|part| (0.0..=1.0).contains(&part)));
                assert!(bounded.message.len() <= evenhand_api::PROGRESS_BYTES);
            }
        }
        None => {}
    }
}

/// What a server says to workers.
fn worker_down(bytes: &[u8]) {
    let Ok(down) = v1::Down::decode(bytes) else { return };
    for start in &down.start {
        drop(start.run.as_ref().map(convert::parse_run));
    }
    if let Some(thresholds) = down.welcome.and_then(|welcome| welcome.thresholds) {
        drop(convert::parse_thresholds(&thresholds));
    }
    if let Some(die) = down.die {
        convert::parse_then(die.then);
        drop(die.error.as_ref().map(errors::refusal_of));
    }
}

/// What clients of a WebSocket say: what can be read is within bounds.
fn websocket(bytes: &[u8]) {
    use interactive::frames::{parse_binary, parse_text};
    let frame = bytes::Bytes::copy_from_slice(bytes);
    let binary = parse_binary(&frame).into_iter();
    let text = std::str::from_utf8(bytes).ok().and_then(|text| parse_text(text).ok()).unwrap_or_default();
    for said in binary.chain(text) {
        match said {
            v1::attach_request::Message::Resize(v1::Resize { rows, cols }) => {
                assert!(interactive::size(rows, cols).is_ok());
            }
            v1::attach_request::Message::Stdin(stdin) => assert_eq!(stdin.len() + 1, bytes.len()),
            v1::attach_request::Message::Eof(eof) => assert!(eof),
            v1::attach_request::Message::Open(_) => panic!("nobody can open twice"),
        }
    }
}

/// What clients say, and what they hear of errors.
fn client(bytes: &[u8]) {
    if let Ok(request) = v1::EnqueueRequest::decode(bytes) {
        drop(QueueName::new(&request.queue));
        request.tasks.into_iter().for_each(|task| drop(convert::new_task(task)));
    }
    drop(v1::ListRequest::decode(bytes));
    drop(v1::WatchRequest::decode(bytes));
    if let Ok(v1::AttachRequest { message: Some(v1::attach_request::Message::Open(open)) }) =
        v1::AttachRequest::decode(bytes)
        && let Ok(asked) = interactive::terminal(open.terminal.as_ref())
    {
        assert!(!asked.tty || interactive::size(asked.rows, asked.cols).is_ok());
    }
    let status = tonic::Status::with_details(tonic::Code::Internal, "", bytes.to_vec().into());
    drop(errors::refusal(&status));
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = (Key::new(text), Seat::new(text), ContentType::new(text));
        if let Ok((shard, task)) = convert::parse_task_id(text) {
            assert_eq!(convert::parse_task_id(&convert::task_id(shard, task)), Ok((shard, task)));
        }
    }
}

/// The body of an enqueue over REST.
fn rest(bytes: &[u8]) {
    let Ok(request) = rest::parse::<Enqueue>(bytes).and_then(|body| body.to_wire("q".into())) else { return };
    for task in request.tasks {
        let payload = task.payload.clone();
        if let Ok(new) = convert::new_task(task) {
            assert_eq!(new.payload[..], payload[..]);
        }
    }
}
