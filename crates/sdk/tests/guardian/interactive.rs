//! Runs that somebody talks to: their streams, their terminals, and that they die like all others.

use std::time::Duration;

use evenhand::guardian::{Ended, Event, KillCause, Outcome, Outlet, RunSpec, Streams, Terminal, boottime_ms};
use rustix::process::Signal;

use crate::support::{Bench, LONG_MS, lives, next_life, signal, state, strays, until};

const SCREEN: Terminal = Terminal { rows: 24, cols: 80, term: String::new() };

impl Bench {
    /// Starts a shell script as an interactive run.
    async fn attach(&mut self, id: u64, terminal: Option<&Terminal>, script: &str) -> (u32, Streams) {
        let streams = self.guardian.attach(self.spec(id, script), terminal).await.unwrap();
        (self.started(id).await, streams)
    }
}

/// Reads until a text has come. What came.
async fn read_until(outlet: &mut Outlet, text: &str) -> String {
    let mut read = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let so_far = String::from_utf8_lossy(&read).into_owned();
        if so_far.contains(text) {
            return so_far;
        }
        let length = outlet.read(&mut buffer).await.unwrap();
        assert!(length > 0, "{text:?} never came: {so_far:?}");
        read.extend_from_slice(&buffer[..length]);
    }
}

async fn read_all(outlet: &mut Outlet) -> Vec<u8> {
    let mut read = Vec::new();
    let mut buffer = [0; 64 * 1024];
    loop {
        match outlet.read(&mut buffer).await.unwrap() {
            0 => return read,
            length => read.extend_from_slice(&buffer[..length]),
        }
    }
}

fn plainly(ended: &Ended) -> (&Outcome, Option<KillCause>) {
    assert!(ended.stdout.is_empty(), "what was written is the caller's: {ended:?}");
    (&ended.outcome, ended.killed)
}

#[tokio::test]
async fn bytes_go_both_ways_through_pipes() {
    let mut bench = Bench::new("cat").await;
    let (_, mut streams) = bench.attach(1, None, "cat; echo done >&2; exit 7").await;
    // One after the other: each is answered before the next is asked.
    for text in ["one\n", "two\n"] {
        streams.input.write(text.as_bytes()).await.unwrap();
        assert_eq!(read_until(&mut streams.stdout, text).await, text);
    }
    // More than the pipes hold, with every byte there is.
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let Streams { mut input, mut stdout, stderr } = streams;
    let sent = data.clone();
    let writing = tokio::spawn(async move {
        input.write(&sent).await.unwrap();
        input.end().await.unwrap();
        input.write(b"too late").await.unwrap_err();
    });
    assert!(read_all(&mut stdout).await == data);
    writing.await.unwrap();
    assert_eq!(read_all(&mut stderr.unwrap()).await, b"done\n");
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Exited(7), None));
    assert!(bench.lines.is_empty());
}

#[tokio::test]
async fn without_a_terminal_there_is_none() {
    let mut bench = Bench::new("none").await;
    let script = "test -t 0 || test -t 1 || test -t 2 || echo none; (: </dev/tty) || echo nor at /dev/tty";
    let (_, mut streams) = bench.attach(1, None, script).await;
    assert_eq!(read_all(&mut streams.stdout).await, b"none\nnor at /dev/tty\n");
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Exited(0), None));
}

#[tokio::test]
async fn a_terminal_is_one_in_every_way() {
    let mut bench = Bench::new("tty").await;
    let screen = Terminal { rows: 37, cols: 131, term: "xterm-256color".into() };
    let script = r#"test -t 0 && test -t 1 && test -t 2 && echo all three
        stty size; echo $TERM; echo of its own > /dev/tty; echo and errors >&2
        ps -o pid=,pgid=,sid=,tpgid= -p $$ | while read pid group session front; do
            [ $pid = $group ] && [ $pid = $session ] && [ $pid = $front ] && echo leads
        done
        stty -echo; echo ready; read line; echo "got $line"; cat; exit 4"#;
    let (_, mut streams) = bench.attach(1, Some(&screen), script).await;
    assert!(streams.stderr.is_none());
    let said = read_until(&mut streams.stdout, "ready\r\n").await;
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(
        lines,
        ["all three", "37 131", "xterm-256color", "of its own", "and errors", "leads", "ready"]
    );
    streams.input.write("ö and more\n".as_bytes()).await.unwrap();
    assert_eq!(read_until(&mut streams.stdout, "more\r\n").await, "got ö and more\r\n");
    // Its input ends as if somebody had typed Ctrl-D.
    streams.input.end().await.unwrap();
    assert_eq!(read_all(&mut streams.stdout).await, b"");
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Exited(4), None));
}

#[tokio::test]
async fn what_is_typed_is_echoed_and_a_new_size_is_told() {
    let mut bench = Bench::new("size").await;
    let script = "trap 'stty size' WINCH; echo ready; while :; do read line; done";
    let (_, mut streams) = bench.attach(1, Some(&SCREEN), script).await;
    read_until(&mut streams.stdout, "ready\r\n").await;
    streams.input.resize(50, 160).unwrap();
    // A shell looks at its traps when the line is there.
    streams.input.write(b"hello\n").await.unwrap();
    let said = read_until(&mut streams.stdout, "50 160\r\n").await;
    assert!(said.contains("hello"), "{said:?}");
    bench.guardian.stop(1, 0).await.unwrap();
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Signaled(9), Some(KillCause::Stop)));
}

#[tokio::test]
async fn ctrl_c_reaches_the_process() {
    let mut bench = Bench::new("ctrl-c").await;
    let script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.01; done";
    let (_, mut streams) = bench.attach(1, Some(&SCREEN), script).await;
    read_until(&mut streams.stdout, "ready\r\n").await;
    streams.input.write(&[3]).await.unwrap();
    read_until(&mut streams.stdout, "caught\r\n").await;
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Exited(5), None));
}

#[tokio::test]
async fn one_with_a_terminal_that_minds_no_sigterm_as_shells_do_is_hung_up() {
    let mut bench = Bench::new("shell").await;
    let script = "trap '' TERM; echo ready; while :; do sleep 0.01; done";
    let (_, mut streams) = bench.attach(1, Some(&SCREEN), script).await;
    read_until(&mut streams.stdout, "ready\r\n").await;
    bench.guardian.stop(1, LONG_MS).await.unwrap();
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Signaled(1), Some(KillCause::Stop)));
}

#[tokio::test]
async fn a_command_that_cannot_be_executed_says_so_to_whoever_is_there() {
    let mut bench = Bench::new("absent").await;
    let spec = RunSpec { id: 1, command: vec!["/does/not/exist".into()], ..RunSpec::default() };
    let streams = bench.guardian.attach(spec.clone(), None).await.unwrap();
    bench.started(1).await;
    let said = read_all(&mut streams.stderr.unwrap()).await;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("was not started: /does/not/exist: No such file"), "{said}");
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Exited(127), None));
    let mut streams = bench.guardian.attach(RunSpec { id: 2, ..spec }, Some(&SCREEN)).await.unwrap();
    bench.started(2).await;
    read_until(&mut streams.stdout, "/does/not/exist: No such file").await;
    assert_eq!(plainly(&bench.ended(2).await), (&Outcome::Exited(127), None));
}

/// How much memory a process has, in KiB.
fn memory_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

async fn a_flood_waits(terminal: Option<&Terminal>) {
    let mut bench = Bench::new(if terminal.is_some() { "flood-tty" } else { "flood" }).await;
    let before = memory_kib(bench.guardian.pid());
    let (pid, mut streams) = bench.attach(1, terminal, "exec yes").await;
    // It has written what there is room for, and waits to write more.
    until("the flood stands still", || state(pid) == Some('S')).await;
    // Nobody is held up by it.
    for id in 2..5 {
        assert_eq!(bench.run(id, "exit 3").await.outcome, Outcome::Exited(3));
    }
    assert_eq!(state(pid), Some('S'), "it still waits");
    let grown = memory_kib(bench.guardian.pid()).saturating_sub(before);
    assert!(grown < 4 * 1024, "the guardian has grown by {grown} KiB");
    // And it goes on as soon as somebody reads.
    let mut read = 0;
    let mut buffer = [0; 64 * 1024];
    while read < 1_000_000 {
        read += streams.stdout.read(&mut buffer).await.unwrap();
    }
    bench.guardian.stop(1, 0).await.unwrap();
    assert_eq!(plainly(&bench.ended(1).await).1, Some(KillCause::Stop));
}

#[tokio::test]
async fn a_flood_of_output_waits_for_a_reader_that_stalls() {
    a_flood_waits(None).await;
}

#[tokio::test]
async fn a_flood_on_a_terminal_waits_for_a_reader_that_stalls() {
    a_flood_waits(Some(&SCREEN)).await;
}

#[tokio::test]
async fn input_that_nobody_reads_holds_up_its_writer_alone() {
    let mut bench = Bench::new("unread").await;
    let (_, streams) = bench.attach(1, None, "exec sleep 1000").await;
    let Streams { mut input, .. } = streams;
    let writing = tokio::spawn(async move { input.write(&vec![b'x'; 10_000_000]).await });
    assert_eq!(bench.run(2, "exit 3").await.outcome, Outcome::Exited(3));
    assert!(!writing.is_finished());
    bench.guardian.stop(1, 0).await.unwrap();
    bench.ended(1).await;
    writing.await.unwrap().unwrap_err();
}

/// A job in the background, one that is not in the process group any more, and one without a marker.
const HIDERS: &str = r"trap '' TERM HUP
    sh -c 'echo $$ > $DIR/a; exec sleep 1000' &
    setsid sh -c 'echo $$ > $DIR/b; exec sleep 1000' &
    env -i DIR=$DIR PATH=$PATH sh -c 'echo $$ > $DIR/c; exec sleep 1000' &
    for f in a b c; do while [ ! -s $DIR/$f ]; do sleep 0.01; done; done
    echo ready; while :; do sleep 1; done";

/// Both ways to be interactive. Names are for seats: what a seat of the same name leaves may be killed late.
const WAYS: [(&str, Option<&Terminal>); 2] = [("pipes", None), ("terminal", Some(&SCREEN))];

/// Starts the hiders. The processes that there are then.
async fn hiders(bench: &mut Bench, terminal: Option<&Terminal>) -> (Vec<u32>, Streams) {
    let (pid, mut streams) = bench.attach(1, terminal, HIDERS).await;
    read_until(&mut streams.stdout, "ready").await;
    let mut pids: Vec<u32> = ["a", "b", "c"].map(|file| bench.number(file)).into();
    pids.push(pid);
    (pids, streams)
}

#[tokio::test]
async fn nothing_of_an_interactive_run_is_left_when_it_is_stopped() {
    for (name, terminal) in WAYS {
        for cgroups in [false, true] {
            let seat = format!("stopped-{name}-{cgroups}");
            let mut bench = Bench::with(&seat, |options| options.cgroups = cgroups).await;
            let (pids, _streams) = hiders(&mut bench, terminal).await;
            bench.guardian.stop(1, 50).await.unwrap();
            let ended = bench.ended(1).await;
            assert_eq!(plainly(&ended), (&Outcome::Signaled(9), Some(KillCause::Stop)));
            for pid in pids {
                assert_eq!(state(pid), None, "{seat}");
            }
        }
    }
}

#[tokio::test]
async fn nothing_of_an_interactive_run_outlives_its_guardian() {
    for (seat, terminal) in WAYS {
        let mut bench = Bench::new(seat).await;
        let (pids, _streams) = hiders(&mut bench, terminal).await;
        signal(bench.guardian.pid(), Signal::KILL);
        assert_eq!(bench.event().await, Event::Gone);
        for pid in pids {
            assert!(!lives(pid), "{seat}");
        }
        let dir = bench.dir.path().to_owned();
        assert!(strays(&dir, seat).is_empty());
        let (guardian, ..) = next_life(&dir, seat).await;
        guardian.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn nothing_of_an_interactive_run_outlives_its_lease_or_its_deadline() {
    for (seat, terminal) in WAYS {
        let mut bench = Bench::new(seat).await;
        let (pids, _streams) = hiders(&mut bench, terminal).await;
        bench.guardian.lease(boottime_ms() + 100).await.unwrap();
        assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Signaled(9), Some(KillCause::Lease)));
        for pid in pids {
            assert!(!lives(pid), "{seat}");
        }
        bench.guardian.lease(boottime_ms() + LONG_MS).await.unwrap();
        let spec = RunSpec { deadline_ms: Some(boottime_ms() + 50), ..bench.spec(2, "exec sleep 1000") };
        let _streams = bench.guardian.attach(spec, terminal).await.unwrap();
        bench.started(2).await;
        assert_eq!(plainly(&bench.ended(2).await).1, Some(KillCause::Deadline));
    }
}

#[tokio::test]
async fn one_that_is_killed_while_it_is_being_started_is_dead() {
    // Whether or not it has a session and a process group of its own by then: the pauses hit different moments.
    let mut bench = Bench::new("early").await;
    for id in 0..30 {
        let _streams = bench.guardian.attach(bench.spec(id, "exec sleep 1000"), Some(&SCREEN)).await.unwrap();
        tokio::time::sleep(Duration::from_micros(id * 200)).await;
        bench.guardian.stop(id, 0).await.unwrap();
        let pid = bench.started(id).await;
        let ended = bench.ended(id).await;
        assert_eq!(plainly(&ended), (&Outcome::Signaled(9), Some(KillCause::Stop)));
        assert_eq!(state(pid), None);
    }
}

#[tokio::test]
async fn a_terminal_that_its_worker_drops_hangs_up() {
    let mut bench = Bench::new("hangup").await;
    let script = "trap 'exit 6' HUP; echo ready; while :; do sleep 0.01; done";
    let (_, mut streams) = bench.attach(1, Some(&SCREEN), script).await;
    read_until(&mut streams.stdout, "ready\r\n").await;
    drop(streams);
    assert_eq!(plainly(&bench.ended(1).await), (&Outcome::Exited(6), None));
}

#[tokio::test]
async fn an_interactive_run_that_is_refused_leaves_nothing_open() {
    let mut bench = Bench::new("refused").await;
    bench.guardian.lease(0).await.unwrap();
    for id in 0..10 {
        let mut streams = bench.guardian.attach(bench.spec(id, "cat"), None).await.unwrap();
        let event = bench.event().await;
        assert!(matches!(event, Event::Refused { .. }), "{event:?}");
        assert_eq!(read_all(&mut streams.stdout).await, b"");
        assert_eq!(read_all(&mut streams.stderr.unwrap()).await, b"");
    }
}
