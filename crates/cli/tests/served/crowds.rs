//! Very many: connections that do nothing, and tasks that wait.

use std::io::Write;
use std::net::TcpStream;

use evenhand::{NewTask, TaskState, wire};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::checker::{all_is_well, records};
use crate::support::{LONG, Server, alone, block_on, eventually};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[test]
fn ten_thousand_idle_connections_hold_nobody_up() {
    const CONNECTIONS: usize = 10_000;
    let _alone = alone();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    assert!(most > CONNECTIONS as u64 + 1_000, "this test needs more open files: `ulimit -n 20000`");
    let server = Server::start(LONG);
    let _worker = server.worker("one", 4);
    let api = server.api();
    let mut accepted = api.submit_all("q", ["sleep 1"]);
    api.end(&accepted[0]);
    let before = server.memory_kib("VmRSS");
    let mut idle = Vec::with_capacity(CONNECTIONS);
    for n in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(server.addr).unwrap();
        if n % 2 == 0 {
            stream.write_all(PREFACE).unwrap();
        }
        idle.push(stream);
        if n % 1_000 == 0 {
            accepted.push(api.submit("sleep 1"));
        }
    }
    let after = server.memory_kib("VmRSS");
    println!("{CONNECTIONS} connections: the server has {before} KiB without and {after} KiB with them");
    accepted.extend(api.submit_all("q", vec!["sleep 1"; 50]));
    assert!(server.page("/healthz").contains("200 OK"));
    assert_eq!(server.cli(&["status"]).code, 0);
    all_is_well(&server, &accepted);
    drop(idle);
    assert!(server.page("/healthz").contains("200 OK"));
    // A megabyte for every ten connections would be a leak, or a buffer too large.
    assert!(after < before + 1024 * 1024, "{before} KiB, then {after} KiB");
}

#[test]
fn memory_does_not_grow_with_the_tasks_that_wait() {
    const CALL: usize = 10_000;
    let _alone = alone();
    let tasks = 1_000_000;
    let mut server = Server::start(LONG);
    let api = server.api();
    let (mut first, mut last) = (String::new(), String::new());
    let mut memory = Vec::new();
    let begin = server.memory_kib("VmRSS");
    for half in 0..2 {
        let began = std::time::Instant::now();
        for n in 0..tasks / 2 / CALL {
            let key = format!("tenant-{}", n % 10);
            // Large enough that what is kept of payloads is full long before the first half is over.
            let payload = |n: usize| format!("sleep {}{}", n % 2, " ".repeat(200));
            let new = |n: usize| NewTask::new(payload(n)).key(&key).max_attempts(1_000);
            let ids = api.enqueue("q", (0..CALL).map(new).collect()).unwrap().ids;
            if first.is_empty() {
                first.clone_from(&ids[0]);
            }
            last.clone_from(&ids[CALL - 1]);
        }
        memory.push((server.memory_kib("VmRSS"), server.memory_kib("VmHWM")));
        println!(
            "half {half}: {} tasks in {:?}, RSS and peak in KiB: {:?}",
            tasks / 2,
            began.elapsed(),
            memory[half]
        );
    }
    println!("{begin} KiB at first; window {} rows", server.metric("evenhand_window_rows"));
    let queue = api.queue("q");
    assert_eq!((queue.accepted, queue.waiting), (tasks as u64, tasks as u64));
    let [(_, half), (_, whole)] = memory[..] else { panic!() };
    assert!(whole < 1024 * 1024, "{whole} KiB for {tasks} tasks");
    assert!(whole < half + half / 3, "{half} KiB for half of them, {whole} KiB for all");
    // Everything answers.
    let waits = api.get(&last);
    assert_eq!(waits.state(), TaskState::Queued);
    assert!(waits.ahead.unwrap() > 0, "{waits:?}");
    let page =
        block_on(api.client.list(wire::ListRequest { limit: Some(1_000), ..Default::default() })).unwrap();
    assert!(page.tasks.len() == 1_000 && page.tasks[0].id == first && !page.cursor.is_empty());
    let next = wire::ListRequest { cursor: page.cursor, limit: Some(1_000), ..Default::default() };
    assert_eq!(block_on(api.client.list(next)).unwrap().tasks.len(), 1_000);
    assert!(!block_on(api.client.cancel(&last)).unwrap());
    assert_eq!(api.state(&last), TaskState::Canceled);
    server.kill();
    server.restart();
    println!("after a restart {} KiB", server.memory_kib("VmRSS"));
    assert_eq!(api.queue("q").waiting, tasks as u64 - 1);
    let mut worker = server.worker("one", 4);
    eventually("some have run", || api.queue("q").succeeded >= 100);
    worker.kill();
    // One slot after the other: in the order of their places, each key's in the order in which they came.
    let starts: Vec<u64> = records(&server)
        .into_iter()
        .filter(|record| record.what == "start")
        .map(|record| record.task.rsplit('-').next().unwrap().parse().unwrap())
        .collect();
    let of_key =
        |key: u64| starts.iter().filter(|task| (**task - 1) / CALL as u64 % 10 == key).collect::<Vec<_>>();
    let counts: Vec<usize> = (0..10).map(|key| of_key(key).len()).collect();
    println!("{} starts, by key: {counts:?}", starts.len());
    assert!(counts.iter().all(|count| *count + 4 >= starts.len() / 10), "all keys share: {counts:?}");
    for key in 0..10 {
        // Four slots: neighbours may be seen in either order.
        let tasks = of_key(key);
        assert!(
            tasks.iter().enumerate().all(|(n, task)| (**task - 1) % CALL as u64 <= n as u64 + 8),
            "{tasks:?}"
        );
    }
    assert_eq!(server.metric("evenhand_slots_leaked"), 0.0);
    assert!(!server.log().contains("panicked"));
}
