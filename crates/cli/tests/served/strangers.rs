//! Whoever connects without being a client: half-open connections, garbage, peers that stop listening.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use bytes::{Buf, BufMut};
use evenhand::TaskState;
use evenhand_api::v1;
use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};

use crate::checker::all_is_well;
use crate::support::{Dice, LONG, SHORT, SOON, Server, block_on, eventually};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

/// Connects and says this.
fn say(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.addr).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.set_write_timeout(Some(SOON)).unwrap();
    // It may be closed before all is said.
    let _ = stream.write_all(bytes);
    stream
}

/// Whether the other side closes it; false if it is still open when a test has waited long enough.
fn is_closed(stream: &mut TcpStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return false;
            }
            Err(_) => return true,
        }
    }
}

fn garbage(dice: &mut Dice) -> Vec<Vec<u8>> {
    let random = |dice: &mut Dice, len: u64| (0..len).map(|_| dice.below(256) as u8).collect::<Vec<u8>>();
    let framed = |dice: &mut Dice| {
        let mut bytes = [PREFACE, SETTINGS].concat();
        for _ in 0..8 {
            let len = dice.below(300);
            bytes.extend([0, (len >> 8) as u8, len as u8, dice.below(12) as u8, dice.below(256) as u8]);
            bytes.extend((dice.below(9) as u32).to_be_bytes());
            bytes.extend(random(dice, len));
        }
        bytes
    };
    let mut all = vec![
        b"\r\n\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        b"BREW /healthz HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        b"GET /healthz HTTP/9.9\r\nhost: x\r\n\r\n".to_vec(),
        b"POST /evenhand.v1.Client/Enqueue HTTP/1.1\r\nhost: x\r\ncontent-type: application/grpc\r\ncontent-length: 5\r\n\r\n\0\0\0\0\x04".to_vec(),
        b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n".to_vec(),
        b"POST /evenhand.v1.Client/Enqueue HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n".to_vec(),
        // A TLS hello, as far as it matters.
        [&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03][..], &random(dice, 505)].concat(),
        // Headers without an end.
        [b"GET /healthz HTTP/1.1\r\n".to_vec(), [b"x-large: ".to_vec(), vec![b'x'; 2_000_000]].concat()].concat(),
        [b"GET /healthz HTTP/1.1\r\n".to_vec(), b"x: y\r\n".repeat(100_000), b"\r\n".to_vec()].concat(),
        [PREFACE, &[0xff; 64]].concat(),
        [PREFACE, SETTINGS, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat(),
        b"SSH-2.0-OpenSSH_9.6\r\n".to_vec(),
        b"\0".to_vec(),
    ];
    for n in 0..40 {
        let len = 1 + dice.below(4_000);
        all.push(if n % 2 == 0 { random(dice, len) } else { framed(dice) });
    }
    all
}

fn is_well(server: &Server) {
    let page = server.page("/healthz");
    assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("ok\n"), "{page}\n{}", server.log());
}

#[test]
fn garbage_on_the_port_harms_nobody() {
    let mut dice = Dice::new();
    let server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let mut open = Vec::new();
    let mut accepted = Vec::new();
    for (n, bytes) in garbage(&mut dice).iter().enumerate() {
        open.push(say(&server, bytes));
        if n % 8 == 0 {
            is_well(&server);
            accepted.push(api.submit("sleep 1"));
        }
        // Some leave at once, some stay.
        if dice.one_in(2) {
            open.swap_remove(dice.below(open.len() as u64) as usize);
        }
    }
    is_well(&server);
    all_is_well(&server, &accepted);
}

/// Bytes as they are.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

/// One call with these bytes as its message.
fn call(server: &Server, path: &'static str, bytes: Vec<u8>) -> Result<Vec<u8>, Status> {
    let endpoint = Endpoint::from_shared(server.url()).unwrap();
    block_on(async move {
        let mut grpc = tonic::client::Grpc::new(endpoint.connect().await.unwrap());
        grpc.ready().await.unwrap();
        let answer = grpc.unary(Request::new(bytes), PathAndQuery::from_static(path), Raw).await?;
        Ok(answer.into_inner())
    })
}

/// The same to a method that answers with a stream, read to its end.
fn session(server: &Server, messages: Vec<Vec<u8>>) -> Result<usize, Status> {
    let endpoint = Endpoint::from_shared(server.url()).unwrap();
    block_on(async move {
        let mut grpc = tonic::client::Grpc::new(endpoint.connect().await.unwrap());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::from_static("/evenhand.v1.WorkerSessions/Session");
        let request = Request::new(tokio_stream::iter(messages));
        let mut answer = grpc.streaming(request, path, Raw).await?.into_inner();
        let mut heard = 0;
        while answer.message().await?.is_some() {
            heard += 1;
        }
        Ok(heard)
    })
}

#[test]
fn messages_that_are_no_protobuf_are_refused() {
    let mut dice = Dice::new();
    let server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let methods = [
        "/evenhand.v1.Client/Enqueue",
        "/evenhand.v1.Client/Get",
        "/evenhand.v1.Client/Cancel",
        "/evenhand.v1.Client/List",
        "/evenhand.v1.WorkerSessions/Dead",
    ];
    for method in methods {
        // A field of the wrong type, a length beyond the end, text that is none, a number without an end.
        for bytes in [vec![0x08, 0x01], vec![0x0a, 0xff, 0x7f], vec![0x0a, 0x02, 0xff, 0xfe], vec![0xff; 11]]
        {
            let refused = call(&server, method, bytes.clone());
            // What one method takes for nonsense is an unknown field of another.
            if let Err(status) = refused {
                let expected = [Code::Internal, Code::InvalidArgument, Code::NotFound];
                assert!(expected.contains(&status.code()), "{method} {bytes:?}: {status}");
            }
        }
        for _ in 0..20 {
            let len = dice.below(200);
            drop(call(&server, method, (0..len).map(|_| dice.below(256) as u8).collect()));
        }
    }
    for path in ["/evenhand.v1.Client/Nothing", "/evenhand.v2.Client/Get", "/nowhere", "/"] {
        assert_eq!(call(&server, path, Vec::new()).unwrap_err().code(), Code::Unimplemented, "{path}");
    }
    for _ in 0..20 {
        let messages =
            (0..3).map(|_| (0..dice.below(100)).map(|_| dice.below(256) as u8).collect()).collect();
        drop(session(&server, messages));
    }
    drop(session(&server, Vec::new()));
    is_well(&server);
    let api = server.api();
    // What random bytes happen to say may be a task, of some queue.
    let id = api.submit("sleep 1");
    all_is_well(&server, &[id]);
}

#[test]
fn half_a_request_is_not_waited_for_for_ever() {
    let server = Server::start(LONG);
    let halves: [&[u8]; 5] = [
        b"GET /healthz HTTP/1.1\r\nhost: ",
        b"G",
        &PREFACE[..10],
        PREFACE,
        &[PREFACE, SETTINGS, &[0, 0, 40, 1, 4, 0, 0, 0, 1, 0x82]].concat(),
    ];
    let mut open: Vec<(&[u8], TcpStream)> = halves.iter().map(|half| (*half, say(&server, half))).collect();
    is_well(&server);
    for (half, stream) in &mut open {
        assert!(is_closed(stream), "{:?} is waited for for ever", String::from_utf8_lossy(half));
    }
    is_well(&server);
}

/// It is given tasks, and neither reads nor writes from then on.
#[test]
fn a_worker_that_falls_silent_is_given_up_and_its_tasks_run_elsewhere() {
    let server = Server::start(SHORT);
    let api = server.api();
    let url = server.url();
    eventually("the shard is taken", || api.shard().open);
    let (up, outgoing) = mpsc::channel(10);
    let mut silent = block_on(async move {
        let channel =
            Endpoint::from_shared(url).unwrap().initial_stream_window_size(65_535).connect().await.unwrap();
        WorkerSessionsClient::new(channel).session(ReceiverStream::new(outgoing)).await.unwrap().into_inner()
    });
    let hello = v1::Hello {
        protocol: evenhand_api::PROTOCOL,
        seat: "silent".into(),
        token: 7,
        process_life: 1,
        session: 1,
        slots: 100,
        queues: vec![v1::ServedQueue { queue: "q".into(), weight_thousandths: 1000 }],
        ..v1::Hello::default()
    };
    let say = |message| block_on(up.send(v1::Up { message: Some(message) })).unwrap();
    say(v1::up::Message::Hello(hello));
    let welcome = block_on(silent.message()).unwrap().unwrap().welcome.unwrap();
    // It gets tasks once it has shown that it knows who the workers are.
    let heartbeat = v1::Heartbeat { number: 1, worker_set: welcome.worker_set, ..Default::default() };
    say(v1::up::Message::News(v1::News { heartbeat: Some(heartbeat), ..Default::default() }));
    // Much more than its window takes.
    let payload = format!("sleep 1 {}", " ".repeat(50_000));
    let accepted = api.submit_all("q", vec![payload.as_str(); 60]);
    eventually("it is given tasks", || api.queue("q").running > 0);
    let _worker = server.worker("one", 8);
    for id in &accepted {
        assert_eq!(api.end(id).state(), TaskState::Succeeded);
    }
    all_is_well(&server, &accepted);
}

/// One that never speaks after it has connected, and clients that leave in the middle of an answer.
#[test]
fn peers_that_leave_or_stop_listening_hold_nobody_up() {
    let server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let go = crate::support::Signpost::new(&server);
    let long = api.submit(&go.until());
    let mut watching = Vec::new();
    for _ in 0..50 {
        watching.push(block_on(api.client.watch(&long)).unwrap());
        let (_, outgoing) = mpsc::channel::<v1::Up>(1);
        let url = server.url();
        // A session without a hello.
        drop(block_on(async move {
            let channel = Endpoint::from_shared(url).unwrap().connect().await.unwrap();
            WorkerSessionsClient::new(channel).session(ReceiverStream::new(outgoing)).await
        }));
    }
    watching.truncate(25);
    let mut accepted = vec![long.clone()];
    accepted.extend(api.submit_all("q", vec!["sleep 1"; 20]));
    accepted[1..].iter().for_each(|id| drop(api.end(id)));
    go.raise();
    for watch in watching {
        assert_eq!(block_on(watch.end()).unwrap().unwrap().state(), TaskState::Succeeded);
    }
    all_is_well(&server, &accepted);
}
