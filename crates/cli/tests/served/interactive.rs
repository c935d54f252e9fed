//! Interactive tasks: `evenhand attach` in a pipe and on a terminal, the WebSocket, and every way in which one ends.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use evenhand::wire;
use evenhand_api::interactive::frames::{STDERR, STDIN, STDOUT};
use futures_util::{SinkExt, StreamExt};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use crate::support::{
    Api, LONG, SHORT, SOON, Said, Server, Times, WorkerProcess, block_on, eventually, eventually_some, lives,
    signal, wait,
};

/// A server, and a worker with so many slots that runs a shell script for each task.
fn begin(times: Times, slots: u32, script: &str) -> (Server, Api, WorkerProcess) {
    let server = Server::start(times);
    let worker = server.worker_of("w", &["q", "--slots", &slots.to_string()], &["sh", "-c", script]);
    let api = server.api();
    await_work(&api);
    (server, api, worker)
}

/// Waits until the worker's slots may be used.
fn await_work(api: &Api) {
    let works = |worker: &wire::Worker| worker.health == "healthy" && worker.why_not.is_empty();
    eventually("the worker gets work", || api.workers().iter().any(works));
}

/// A client in a pipe that goes on until somebody ends it.
struct Talk {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Talk {
    fn begin(server: &Server, args: &[&str]) -> Talk {
        let mut child = Command::new(env!("CARGO_BIN_EXE_evenhand"))
            .args(["attach", "q", "--server", &server.url()])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Talk { child, out }
    }

    fn say(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).and_then(|()| stdin.flush()).unwrap();
    }

    /// The next line, without its end; empty at the end.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim_end().to_string()
    }

    /// How it ended, with what it said last.
    fn ended(mut self) -> Said {
        let mut out = String::new();
        self.out.read_to_string(&mut out).unwrap();
        let mut err = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        let code = wait(&mut self.child, "attach ends").code().unwrap_or(-1);
        Said { out, err, code }
    }
}

/// A script that says its process id and then does what it is told to.
const ECHO: &str = "echo $$; cat";

#[test]
fn a_command_is_talked_to_through_pipes() {
    let script = r#"echo "$EVENHAND_QUEUE/$EVENHAND_KEY/$EVENHAND_INTERACTIVE" >&2; cat; exit 7"#;
    let (server, _api, _worker) = begin(LONG, 2, script);
    let mut talk = Talk::begin(&server, &["--key", "acme"]);
    // Answer by answer.
    for n in 0..3 {
        talk.say(&format!("line {n}\n"));
        assert_eq!(talk.line(), format!("line {n}"));
    }
    drop(talk.child.stdin.take());
    let said = talk.ended();
    assert_eq!((said.code, said.out.as_str()), (7, ""), "{said:?}");
    assert_eq!(said.err, "q/acme/pipes\nevenhand: exit 7\n");
    // Every byte there is, and more than all buffers together hold.
    let bytes: Vec<u8> = (0..8_000_000_u32).map(|n| (n % 253) as u8).collect();
    let mut child = Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .args(["attach", "q", "--server", &server.url()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let sent = bytes.clone();
    let writing = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let mut read = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut read).unwrap();
    writing.join().unwrap();
    assert!(read == bytes, "{} of {} bytes came back", read.len(), bytes.len());
    assert_eq!(wait(&mut child, "attach ends").code(), Some(7));
    // What is given is the input, and its end.
    let said = server.cli(&["attach", "q", "one", "two"]);
    assert_eq!((said.out.as_str(), said.code), ("one two\n", 7), "{said:?}");
}

#[test]
fn a_command_that_ends_at_once_has_said_all_and_a_signal_is_told() {
    let (server, _api, _worker) = begin(LONG, 1, "echo out; echo err >&2");
    for _ in 0..20 {
        let said = server.cli(&["attach", "q"]);
        assert_eq!((said.out.as_str(), said.err.as_str(), said.code), ("out\n", "err\n", 0), "{said:?}");
    }
    let (server, _api, _worker) = begin(LONG, 1, "kill -SEGV $$");
    let said = server.cli(&["attach", "q"]);
    assert_eq!((said.err.as_str(), said.code), ("evenhand: signal 11\n", 139), "{said:?}");
}

#[test]
fn a_command_that_is_not_there_is_told() {
    let server = Server::start(LONG);
    let command = server.path("command");
    std::fs::copy("/bin/cat", &command).unwrap();
    let _worker = server.worker_of("w", &["q"], &[&command]);
    await_work(&server.api());
    std::fs::remove_file(&command).unwrap();
    let said = server.cli(&["attach", "q"]);
    let why = format!("was not started: {}: No such file", command.display());
    assert!(said.err.contains(&why), "{said:?}");
    assert_eq!(said.code, 127);
}

/// A terminal with somebody in front of it, and a command in it.
pub(crate) struct Screen {
    ours: File,
    theirs: OwnedFd,
    pub(crate) child: Child,
    read: Vec<u8>,
}

impl Screen {
    fn begin(server: &Server, args: &[&str], rows: u16, cols: u16) -> Screen {
        Screen::of(server, &[&["attach", "q", "--tty"], args].concat(), rows, cols)
    }

    /// With any command of evenhand in it.
    pub(crate) fn of(server: &Server, args: &[&str], rows: u16, cols: u16) -> Screen {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        unlockpt(&ours).unwrap();
        let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
        resize(&ours, rows, cols);
        let end = || Stdio::from(theirs.try_clone().unwrap());
        // It needs the terminal as its own to be told of its size.
        let child = Command::new("setsid")
            .args(["--ctty", env!("CARGO_BIN_EXE_evenhand")])
            .args(args)
            .args(["--server", &server.url()])
            .env("TERM", "xterm-test")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .unwrap();
        Screen { ours: ours.into(), theirs, child, read: Vec::new() }
    }

    fn type_in(&mut self, text: &str) {
        self.ours.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until this is shown, and forgets what came before.
    pub(crate) fn shows(&mut self, text: &str) {
        loop {
            let so_far = String::from_utf8_lossy(&self.read).into_owned();
            if let Some(at) = so_far.find(text) {
                self.read = so_far[at + text.len()..].into();
                return;
            }
            let mut buffer = [0; 4096];
            let read = self.ours.read(&mut buffer).unwrap();
            assert!(read > 0, "{text:?} never came: {so_far:?}");
            self.read.extend_from_slice(&buffer[..read]);
        }
    }
}

fn resize(terminal: impl std::os::fd::AsFd, rows: u16, cols: u16) {
    tcsetwinsize(terminal, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
}

/// A shell that somebody types into, as far as it is the same everywhere.
const SHELL: &str = r#"trap 'echo "size $(stty size)"' WINCH; trap 'echo interrupted' INT
    test -t 0 && test -t 1 && test -t 2 && echo "$EVENHAND_INTERACTIVE $TERM $(stty size)"
    while :; do read -r line && case $line in exit) exit 9;; esac && echo "got $line"; done"#;

#[test]
fn a_command_has_a_terminal_of_our_size_and_ours_is_as_it_was_afterwards() {
    let (server, _api, _worker) = begin(LONG, 1, SHELL);
    let mut screen = Screen::begin(&server, &[], 31, 117);
    let before = format!("{:?}", tcgetattr(&screen.theirs).unwrap());
    screen.shows("evenhand: on w");
    screen.shows("tty xterm-test 31 117");
    screen.type_in("hello\r");
    screen.shows("hello");
    screen.shows("got hello");
    assert_ne!(format!("{:?}", tcgetattr(&screen.theirs).unwrap()), before, "it passes on what is typed");
    resize(&screen.ours, 44, 155);
    screen.shows("size 44 155");
    // Ctrl-C is the command's, not ours.
    screen.type_in("\u{3}");
    screen.shows("interrupted");
    screen.type_in("exit\r");
    screen.shows("evenhand: exit 9");
    assert_eq!(wait(&mut screen.child, "attach ends").code(), Some(9));
    assert_eq!(format!("{:?}", tcgetattr(&screen.theirs).unwrap()), before);
}

#[test]
fn whoever_hangs_up_or_is_ended_leaves_the_terminal_as_it_was_and_no_process() {
    let server = Server::start(LONG);
    let file = server.path("pid");
    let script = format!("echo $$ > {}; {SHELL}", file.display());
    let _worker = server.worker_of("w", &["q", "--slots", "1"], &["sh", "-c", &script]);
    let api = server.api();
    await_work(&api);
    for (how, code) in [("hang up", 130), ("SIGTERM", 143), ("SIGHUP", 129)] {
        let mut screen = Screen::begin(&server, &[], 24, 80);
        screen.shows("tty xterm-test");
        let pid: u32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        match how {
            "SIGTERM" => signal(screen.child.id(), Signal::TERM),
            "SIGHUP" => signal(screen.child.id(), Signal::HUP),
            _ => screen.type_in("\r~."),
        }
        assert_eq!(wait(&mut screen.child, "attach ends").code(), Some(code), "{how}");
        let modes = tcgetattr(&screen.theirs).unwrap();
        assert!(modes.local_modes.contains(rustix::termios::LocalModes::ICANON), "{how}");
        eventually("its process is gone", || !lives(pid));
        eventually("its slot is free", || api.workers()[0].running == 0);
    }
}

#[test]
fn who_finds_no_slot_is_told_at_once() {
    let (server, api, _worker) = begin(LONG, 1, ECHO);
    let said = server.cli(&["attach", "nowhere"]);
    assert_eq!(said.code, 3, "{said:?}");
    let mut talk = Talk::begin(&server, &[]);
    talk.line();
    let said = server.cli(&["attach", "q"]);
    assert_eq!(said.code, 5, "{said:?}");
    assert!(said.err.contains("every slot is taken"), "{said:?}");
    // The same in HTTP: an ordinary error, before anything is upgraded.
    let refused = block_on(connect(&server, "/v1/queues/q/interactive")).unwrap_err();
    let Error::Http(answer) = refused else { panic!("{refused}") };
    assert_eq!(answer.status(), 429);
    let body: Value = serde_json::from_slice(answer.body().as_ref().unwrap()).unwrap();
    assert_eq!(body["error"]["kind"], "limited", "{body}");
    assert_eq!(
        server.metric("evenhand_interactive_denied_total"),
        2.0,
        "a queue that is not there denies nobody"
    );
    drop(talk.child.stdin.take());
    assert_eq!(talk.ended().code, 0);
    // And it is free again as soon as that has ended.
    eventually("the slot is free", || server.cli(&["attach", "q", "x"]).code == 0);
    assert_eq!(api.queue("q").running, 0);
}

#[test]
fn a_task_that_needs_the_slot_halts_an_interactive_one() {
    let (server, api, _worker) = begin(LONG, 1, "trap '' TERM; echo $$; cat");
    let mut talk = Talk::begin(&server, &[]);
    let pid: u32 = talk.line().parse().unwrap();
    let id = api.submit("a payload");
    // The client hears of it at once, though its process takes its time to die.
    let said = talk.ended();
    assert_eq!(said.code, 5, "{said:?}");
    assert!(said.err.contains("halted to make room"), "{said:?}");
    let ended = api.end(&id);
    assert!(!lives(pid), "the slot is not used twice at once");
    let result = String::from_utf8(ended.result.unwrap().to_vec()).unwrap();
    assert!(result.ends_with("\na payload"), "{result:?}");
}

#[test]
fn a_client_is_warned_before_it_is_halted_if_its_queue_wants_that() {
    let (server, api, _worker) = begin(LONG, 1, ECHO);
    let grace = |time| assert_eq!(server.cli(&["queue", "set", "q", "--interactive-grace", time]).code, 0);
    let warned = |socket: &mut Socket| {
        let Message::Text(text) = socket.next() else { panic!("no warning") };
        serde_json::from_str::<Value>(&text).unwrap()["warning"]["grace_ms"].as_u64()
    };
    grace("1m");
    let mut socket = Socket::open(&server, "");
    socket.text_of(STDOUT);
    let id = api.submit("a payload");
    assert_eq!(warned(&mut socket), Some(60_000));
    // It may go on until then.
    socket.say("still here\n");
    assert_eq!(socket.text_of(STDOUT), "still here\n");
    socket.send(Message::Text(json!({ "eof": true }).to_string().into()));
    assert_eq!(socket.closed().0, 1000);
    api.end(&id);
    grace("500ms");
    let mut socket = Socket::open(&server, "");
    let pid: u32 = socket.text_of(STDOUT).trim().parse().unwrap();
    let id = api.submit("a payload");
    assert_eq!(warned(&mut socket), Some(500));
    assert_eq!(socket.closed().0, 4001);
    api.end(&id);
    assert!(!lives(pid));
    grace("1m");
    // One that ends in time makes room by itself.
    let mut talk = Talk::begin(&server, &[]);
    talk.line();
    let id = api.submit("a payload");
    let stderr = talk.child.stderr.take().unwrap();
    let warning = BufReader::new(stderr).lines().map(Result::unwrap).find(|line| !line.is_empty());
    assert!(warning.as_ref().unwrap().contains("a task needs this slot"), "{warning:?}");
    drop(talk.child.stdin.take());
    assert_eq!(wait(&mut talk.child, "attach ends").code(), Some(0));
    api.end(&id);
}

#[test]
fn an_interactive_task_ends_when_its_time_is_up() {
    let (server, _api, _worker) = begin(LONG, 1, ECHO);
    let talk = Talk::begin(&server, &["--max-duration", "5s"]);
    let said = talk.ended();
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.err.contains("took longer than it was allowed to"), "{said:?}");
    let pid: u32 = said.out.trim().parse().unwrap();
    eventually("its process is gone", || !lives(pid));
    let said = server.cli(&["attach", "q", "--max-duration", "400d"]);
    assert_eq!(said.code, 2, "{said:?}");
}

#[test]
fn a_worker_that_dies_is_told() {
    for with_guardian in [false, true] {
        let (server, api, mut worker) = begin(SHORT, 1, ECHO);
        let mut talk = Talk::begin(&server, &[]);
        let pid: u32 = talk.line().parse().unwrap();
        if with_guardian {
            worker.kill_with_guardian()
        } else {
            worker.kill()
        }
        let said = talk.ended();
        assert_eq!(said.code, 6, "{said:?}");
        assert!(said.err.contains("its worker is gone"), "{said:?}");
        eventually("its process is gone", || !lives(pid));
        eventually("nothing runs", || api.workers().iter().all(|worker| worker.running == 0));
    }
}

#[test]
fn a_guardian_that_dies_is_told_and_the_worker_goes_on() {
    let (server, _api, mut worker) = begin(SHORT, 1, ECHO);
    let mut talk = Talk::begin(&server, &[]);
    let pid: u32 = talk.line().parse().unwrap();
    worker.kill_guardian();
    let said = talk.ended();
    assert_eq!(said.code, 6, "{said:?}");
    assert!(!lives(pid));
    eventually("there is a slot again", || server.cli(&["attach", "q", "x"]).code == 0);
}

#[test]
fn a_client_that_is_gone_ends_its_process() {
    let (server, api, _worker) = begin(LONG, 2, ECHO);
    let mut talk = Talk::begin(&server, &[]);
    let pid: u32 = talk.line().parse().unwrap();
    talk.child.kill().unwrap();
    talk.child.wait().unwrap();
    eventually("its process is gone", || !lives(pid));
    // The same with a WebSocket that is cut, and with one that is closed.
    for close in [false, true] {
        let mut socket = Socket::open(&server, "");
        let pid: u32 = socket.text_of(STDOUT).trim().parse().unwrap();
        if close {
            block_on(socket.0.close(None)).unwrap();
        }
        drop(socket);
        eventually("its process is gone", || !lives(pid));
    }
    eventually("nothing runs", || api.workers().iter().all(|worker| worker.running == 0));
}

#[test]
fn a_client_that_is_gone_ends_its_process_also_one_that_does_not_read() {
    let (server, api, _worker) = begin(LONG, 1, "echo $$; exec sleep 100000");
    let mut child = Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .args(["attach", "q", "--server", &server.url()])
        .stdin(File::open("/dev/zero").unwrap())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid: u32 = line.trim().parse().unwrap();
    let io = format!("/proc/{}/io", child.id());
    let read = || std::fs::read_to_string(&io).unwrap().lines().next().unwrap().to_string();
    eventually("no more is read", || {
        let before = read();
        (0..500).all(|_| {
            std::thread::yield_now();
            read() == before
        })
    });
    signal(child.id(), Signal::INT);
    assert_eq!(wait(&mut child, "attach ends").code(), Some(130));
    eventually("its process is gone", || !lives(pid));
    eventually("its slot is free", || api.workers()[0].running == 0);
    // The same with a WebSocket, when it is asked whether it is there.
    let mut socket = Socket::open(&server, "");
    let pid: u32 = socket.text_of(STDOUT).trim().parse().unwrap();
    block_on(async {
        let frame = || Message::Binary(vec![STDIN; 64 * 1024].into());
        while tokio::time::timeout(Duration::from_millis(500), socket.0.send(frame())).await.is_ok() {}
    });
    assert!(lives(pid));
    drop(socket);
    eventually("its process is gone", || !lives(pid));
    eventually("its slot is free", || api.workers()[0].running == 0);
}

#[test]
fn who_reads_late_hears_why_it_is_over() {
    let (server, api, _worker) = begin(LONG, 1, r#"test -n "$EVENHAND_INTERACTIVE" || exec cat; yes"#);
    let mut talk = Talk::begin(&server, &[]);
    talk.line();
    let id = api.submit("a payload");
    api.end(&id);
    let said = talk.ended();
    assert_eq!(said.code, 5, "{}", said.err);
    assert!(said.err.contains("halted to make room"), "{}", said.err);
}

#[test]
fn a_server_that_is_gone_ends_what_was_talked_to() {
    let (mut server, _api, _worker) = begin(LONG, 2, ECHO);
    let mut talk = Talk::begin(&server, &[]);
    let pid: u32 = talk.line().parse().unwrap();
    let mut other = Socket::open(&server, "");
    let second: u32 = other.text_of(STDOUT).trim().parse().unwrap();
    server.stop();
    let said = talk.ended();
    assert_eq!(said.code, 6, "{said:?}");
    assert!(said.err.contains("the server is stopping"), "{said:?}");
    assert_eq!(other.closed().0, 1012);
    eventually("their processes are gone", || !lives(pid) && !lives(second));
    server.restart();
    let mut talk = eventually_some("the worker is back", || {
        let mut talk = Talk::begin(&server, &[]);
        let line = talk.line();
        (!line.is_empty()).then(|| (talk, line.parse::<u32>().unwrap()))
    });
    server.kill();
    let said = std::mem::replace(&mut talk.0, Talk::begin(&server, &[])).ended();
    assert_eq!(said.code, 6, "{said:?}");
    eventually("its process is gone", || !lives(talk.1));
    assert_eq!(talk.0.ended().code, 6);
}

#[test]
fn an_interactive_task_can_be_canceled() {
    let (server, api, _worker) = begin(LONG, 1, ECHO);
    let mut socket = Socket::open(&server, "");
    let pid: u32 = socket.text_of(STDOUT).trim().parse().unwrap();
    // That is all that can be done with it.
    for command in ["get", "watch"] {
        let said = server.cli(&[command, &socket.1]);
        assert!(said.code == 3 && said.err.contains("is interactive: there is no record"), "{said:?}");
    }
    block_on(api.client.cancel(&socket.1)).unwrap();
    let (code, reason) = socket.closed();
    assert_eq!((code, reason.as_str()), (4004, "it was canceled"));
    eventually("its process is gone", || !lives(pid));
}

type Stream = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn connect(server: &Server, path: &str) -> Result<Stream, Error> {
    let url = format!("ws://{}{path}", server.addr);
    tokio::time::timeout(SOON, tokio_tungstenite::connect_async(url)).await.unwrap().map(|(stream, _)| stream)
}

/// A client that comes by WebSocket, and its task's id.
struct Socket(Stream, String);

impl Socket {
    fn open(server: &Server, query: &str) -> Socket {
        let stream = block_on(connect(server, &format!("/v1/queues/q/interactive{query}"))).unwrap();
        let mut socket = Socket(stream, String::new());
        let Message::Text(text) = socket.next() else { panic!("no text first") };
        let accepted: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(accepted["accepted"]["seat"], "w", "{accepted}");
        socket.1 = accepted["accepted"]["task"].as_str().unwrap().to_string();
        socket
    }

    /// The next message that is not about whether anybody is there.
    fn next(&mut self) -> Message {
        loop {
            let next = block_on(async { tokio::time::timeout(SOON, self.0.next()).await });
            match next.unwrap().unwrap().unwrap() {
                Message::Ping(_) | Message::Pong(_) => {}
                message @ (Message::Text(_) | Message::Binary(_) | Message::Close(_) | Message::Frame(_)) => {
                    return message;
                }
            }
        }
    }

    fn send(&mut self, message: Message) {
        block_on(self.0.send(message)).unwrap();
    }

    fn say(&mut self, text: &str) {
        self.send(Message::Binary([&[STDIN], text.as_bytes()].concat().into()));
    }

    /// What comes next, which is of this stream.
    fn text_of(&mut self, stream: u8) -> String {
        match self.next() {
            Message::Binary(bytes) => {
                assert_eq!(bytes[0], stream, "{bytes:?}");
                String::from_utf8(bytes[1..].to_vec()).unwrap()
            }
            other @ (Message::Text(_)
            | Message::Ping(_)
            | Message::Pong(_)
            | Message::Close(_)
            | Message::Frame(_)) => panic!("{other:?}"),
        }
    }

    /// Reads on until this was shown.
    fn shows(&mut self, text: &str) {
        let mut so_far = String::new();
        while !so_far.contains(text) {
            so_far += &self.text_of(STDOUT);
        }
    }

    /// How it was closed.
    fn closed(&mut self) -> (u16, String) {
        loop {
            if let Message::Close(frame) = self.next() {
                let frame = frame.unwrap();
                return (frame.code.into(), frame.reason.to_string());
            }
        }
    }
}

#[test]
fn a_web_socket_carries_what_the_document_says() {
    let script = r#"read -r line; echo "got $line"; echo err >&2; cat > /dev/null; echo over; exit 3"#;
    let (server, _api, _worker) = begin(LONG, 4, script);
    let mut socket = Socket::open(&server, "?key=acme");
    socket.say("hello\n");
    let mut said = [socket.next(), socket.next()].map(|message| message.into_data().to_vec());
    said.sort();
    assert_eq!(
        said,
        [[&[STDOUT], "got hello\n".as_bytes()].concat(), [&[STDERR], "err\n".as_bytes()].concat()]
    );
    socket.send(Message::Text(json!({ "eof": true }).to_string().into()));
    assert_eq!(socket.text_of(STDOUT), "over\n");
    assert_eq!(socket.closed(), (1000, "exit 3".into()));
    // What makes no sense ends it, and says what was wrong.
    for (wrong, says) in [
        (Message::Text("{}".into()), "neither resize nor eof"),
        (Message::Text("nonsense".into()), "invalid"),
        (Message::Text(json!({ "resize": { "rows": 0, "cols": 1 } }).to_string().into()), "resize.rows"),
        (Message::Binary(vec![9].into()), "begins with the byte 0"),
        (Message::Binary(vec![].into()), "begins with the byte 0"),
        (Message::Binary(vec![0; 1024 * 1024 + 2].into()), "frame: send at most 1048576 bytes"),
    ] {
        let mut socket = eventually_some("a slot is free", || {
            let free = block_on(connect(&server, "/v1/queues/q/interactive")).ok()?;
            Some(Socket(free, String::new()))
        });
        socket.send(wrong.clone());
        let (code, reason) = socket.closed();
        assert!(code == 1008 && reason.contains(says), "{code} {reason}, not {says}");
    }
}

#[test]
fn a_web_socket_is_closed_by_both_and_says_how_it_ended() {
    let (server, api, mut worker) = begin(SHORT, 2, "cat");
    // Whoever leaves is let go in good order.
    let mut socket = Socket::open(&server, "");
    block_on(socket.0.close(None)).unwrap();
    assert!(matches!(socket.next(), Message::Close(_)));
    assert!(block_on(socket.0.next()).is_none(), "and nothing is reset");
    eventually("its slot is free", || api.workers()[0].running == 0);
    // All that it still said is read, so that the code is not lost.
    let mut socket = Socket::open(&server, "?max_duration_ms=300");
    for _ in 0..8 {
        socket.say(&"x".repeat(1000));
    }
    assert_eq!(socket.closed(), (4002, "it took longer than it was allowed to".into()));
    assert!(block_on(socket.0.next()).is_none());
    let mut lasting = Socket::open(&server, "");
    lasting.say("x");
    assert_eq!(lasting.text_of(STDOUT), "x");
    worker.kill_with_guardian();
    assert_eq!(lasting.closed(), (4003, "its worker is gone".into()));
    // Handlers cannot be talked to.
    let (drain, drained) = tokio::sync::watch::channel(false);
    let handlers = evenhand::Worker::new(&server.url())
        .seat("h")
        .seat_dir(server.path("handlers"))
        .handle_bytes("handled", |bytes: bytes::Bytes, _| async move { Ok::<_, evenhand::Failure>(bytes) })
        .drain_on(drained);
    let serving = std::thread::spawn(move || block_on(handlers.run()));
    let stream = eventually_some("there is a slot", || {
        block_on(connect(&server, "/v1/queues/handled/interactive")).ok()
    });
    let (code, reason) = Socket(stream, String::new()).closed();
    assert!(code == 4005 && reason.contains("handlers"), "{code} {reason}");
    drain.send_replace(true);
    serving.join().unwrap().unwrap();
}

#[test]
fn a_web_socket_may_have_a_terminal() {
    let (server, _api, _worker) = begin(LONG, 1, SHELL);
    let mut socket = Socket::open(&server, "?tty=true&rows=33&cols=99&term=vt100");
    socket.shows("tty vt100 33 99\r\n");
    socket.send(Message::Text(json!({ "resize": { "rows": 11, "cols": 22 } }).to_string().into()));
    socket.shows("size 11 22\r\n");
    socket.say("\u{3}");
    socket.shows("interrupted\r\n");
    socket.say("exit\n");
    assert_eq!(socket.closed(), (1000, "exit 9".into()));
}

#[test]
fn what_is_wrong_with_a_request_is_said_before_it_is_upgraded() {
    let (server, _api, _worker) = begin(LONG, 1, ECHO);
    for (path, field) in [
        ("/v1/queues/q/interactive?tty=maybe", "tty"),
        ("/v1/queues/q/interactive?tty=true&rows=0", "rows"),
        ("/v1/queues/q/interactive?tty=true&term=a%20b", "terminal.term"),
        ("/v1/queues/q/interactive?max_duration_ms=0", "max_duration_ms"),
        ("/v1/queues/q/interactive?color=red", "color"),
        ("/v1/queues/%20/interactive", "queue"),
    ] {
        let Err(Error::Http(answer)) = block_on(connect(&server, path)) else { panic!("{path}") };
        let body: Value = serde_json::from_slice(answer.body().as_ref().unwrap()).unwrap();
        assert_eq!(
            (answer.status().as_u16(), &body["error"]["field"]),
            (400, &json!(field)),
            "{path}: {body}"
        );
    }
    // A browser that another site's page has sent here.
    let head = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\norigin: https://example.com\r\n";
    let mut answer = String::new();
    let mut stream = server.send("GET", "/v1/queues/q/interactive", head, b"");
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("origin"), "{answer}");
    // One that is no WebSocket at all.
    let answer = server.page("/v1/queues/q/interactive");
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("this is a WebSocket"), "{answer}");
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody_else() {
    let (server, api, worker) =
        begin(SHORT, 8, r#"case ${EVENHAND_INTERACTIVE-no} in no) cat;; *) echo $$; yes;; esac"#);
    // More of them than one connection's window holds.
    let mut stalled: Vec<Socket> = (0..6).map(|_| Socket::open(&server, "")).collect();
    let pids: Vec<u32> = stalled
        .iter_mut()
        .map(|socket| socket.text_of(STDOUT).lines().next().unwrap().parse().unwrap())
        .collect();
    let waits = |pid: u32| {
        // The shell waits for `yes`, which waits at its pipe.
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let child = children.trim().to_string();
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
    };
    let settled = |pids: &[u32]| {
        pids.iter().all(|pid| {
            (0..50).all(|_| {
                std::thread::yield_now();
                waits(*pid)
            })
        })
    };
    eventually("all floods stand still", || settled(&pids));
    let before = server.memory_kib("VmRSS");
    // Longer than it takes to lose a worker whose heartbeats do not come.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        let id = api.submit("a payload");
        assert_eq!(api.end(&id).result.unwrap(), "a payload");
    }
    assert!(!worker.said().contains("lease is over"), "{}", worker.said());
    assert_eq!(api.workers().iter().filter(|worker| worker.health == "healthy").count(), 1);
    let grown = server.memory_kib("VmRSS").saturating_sub(before);
    assert!(grown < 32 * 1024, "the server has grown by {grown} KiB");
    // Whoever reads again gets more.
    for socket in &mut stalled {
        for _ in 0..100 {
            assert!(socket.text_of(STDOUT).starts_with(['y', '\n']));
        }
    }
    drop(stalled);
    eventually("their processes are gone", || pids.iter().all(|pid| !lives(*pid)));
}
