//! What operators do by hand: workers drain and are given up, the start gate is opened, an old copy of the data is
//! restored. What these commands say to those who mistype.

use std::fs;
use std::io::Read;
use std::path::Path;

use evenhand::TaskState;
use rustix::process::Signal;
use serde_json::json;

use crate::checker::{all_is_well, await_start, await_starts, of};
use crate::support::{Api, LONG, Server, Signpost, checked_task, eventually, lives, signal};

fn health(api: &Api, seat: &str) -> String {
    let workers = api.workers();
    workers.into_iter().find(|worker| worker.seat == seat).map_or_else(String::new, |worker| worker.health)
}

/// The status line and the body of an answer to a request without a body.
fn post(server: &Server, path: &str) -> (String, serde_json::Value) {
    let mut answer = String::new();
    server.send("POST", path, "", b"").read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().into(), serde_json::from_str(body).unwrap())
}

#[test]
fn a_worker_that_is_drained_ends_what_it_runs_and_takes_nothing_more() {
    let server = Server::start(LONG);
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let runs = api.submit(&go.until());
    await_start(&server, &runs);
    let waits = api.submit("sleep 1");
    let drain = || server.cli(&["workers", "drain", "one", "--wait"]);
    let said = std::thread::scope(|scope| {
        let waiting = scope.spawn(drain);
        eventually("it drains", || health(&api, "one") == "draining");
        let worker = api.workers().remove(0);
        assert!(worker.why_not.contains("drain") && worker.running == 1, "{worker:?}");
        assert_eq!(post(&server, "/v1/workers/one/drain").1, json!({ "told": true, "running": 1 }));
        go.raise();
        waiting.join().unwrap()
    });
    assert_eq!((said.code, said.err.as_str()), (0, "one: 1 run left\n"), "{said:?}");
    assert_eq!(said.out, "one drains: 1 run goes on, then it ends\none is gone\n");
    assert_eq!(one.ended().code(), Some(0), "{}", one.said());
    assert_eq!(api.end(&runs).state(), TaskState::Succeeded);
    assert_eq!(api.get(&waits).state(), TaskState::Queued);
    assert!(of(&server, "start", &waits).is_empty());
    let _two = server.worker("two", 1);
    all_is_well(&server, &[runs, waits]);
}

#[test]
fn a_worker_that_is_away_drains_when_it_is_back() {
    let mut server = Server::start(LONG);
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let runs = api.submit(&go.until());
    await_start(&server, &runs);
    one.signal(Signal::STOP);
    server.kill();
    server.restart();
    eventually("it is absent", || api.shard().absent_seats == ["one"]);
    let said = server.cli(&["workers", "drain", "one"]);
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "one is not connected, so it cannot be told now; it drains when it is back\n")
    );
    assert!(api.workers()[0].why_not.ends_with("it is told to drain when it is back"), "{:?}", api.workers());
    one.signal(Signal::CONT);
    eventually("it drains", || health(&api, "one") == "draining");
    go.raise();
    assert_eq!(one.ended().code(), Some(0), "{}", one.said());
    all_is_well(&server, &[runs]);
}

#[test]
fn a_worker_that_is_given_up_leaves_its_tasks_and_its_seat_to_others_at_once() {
    let server = Server::start(LONG);
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = api.submit(&go.until());
    await_start(&server, &id);
    let alive = server.cli(&["workers", "give-up", "one", "--yes"]);
    assert_eq!(alive.code, 4, "{alive:?}");
    assert!(alive.err.contains("so it is alive") && alive.err.contains("drain it"), "{alive:?}");
    // As a machine that has died: nothing of it moves any more, and its run is gone.
    let (guardian, run) = (one.guardian(), of(&server, "start", &id)[0].pid);
    one.signal(Signal::STOP);
    signal(guardian, Signal::STOP);
    signal(run, Signal::KILL);
    eventually("the run is dead", || !lives(run));
    eventually("it is silent", || health(&api, "one") == "unhealthy");
    let command = [checked_task().into_os_string(), server.dir.path().into()];
    let mut other = server.worker_on("elsewhere", "one", &["q"], &command);
    eventually("the seat is held", || other.said().contains("silent but may be alive"));

    let unasked = server.cli(&["workers", "give-up", "one"]);
    assert_eq!(unasked.code, 2, "{unasked:?}");
    assert!(
        unasked.err.contains("its tasks run twice at once") && unasked.err.contains("--yes"),
        "{unasked:?}"
    );
    assert_eq!(of(&server, "start", &id).len(), 1);

    let said = server.cli(&["workers", "give-up", "one", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (0, "one is given up: 1 task is tried again\n"), "{said:?}");
    assert!(said.err.contains("its tasks run twice at once"), "{said:?}");
    assert_eq!(server.metric("evenhand_runs_lost_total"), 1.0);
    let gone = "evenhand_workers_gone_total{why=\"an operator has given it up\"}";
    assert_eq!(server.metric(gone), 1.0);
    await_starts(&server, &id, 2);
    one.signal(Signal::CONT);
    signal(guardian, Signal::CONT);
    assert!(!one.ended().success(), "the seat is another's: {}", one.said());
    go.raise();
    assert_eq!(api.end(&id).state(), TaskState::Succeeded);
    assert!(other.has_ended().is_none());
    all_is_well(&server, &[id]);
}

#[test]
fn whoever_mistypes_is_told_so_and_nothing_happens() {
    let server = Server::start(LONG);
    for command in [&["workers", "drain", "nobody"][..], &["workers", "give-up", "nobody", "--yes"]] {
        let said = server.cli(command);
        assert_eq!(
            (said.code, said.err.as_str()),
            (3, "evenhand: there is no worker nobody\n"),
            "{command:?}"
        );
    }
    for command in
        [&["workers", "drain"][..], &["workers", "give-up"], &["workers", "undo", "one"], &["gate", "shut"]]
    {
        assert_eq!(server.cli(command).code, 2, "{command:?}");
    }
    for path in ["/v1/workers/nobody/drain", "/v1/workers/nobody/give-up"] {
        let (status, body) = post(&server, path);
        assert!(status.contains("404"), "{status}");
        assert_eq!(body["error"]["message"], "there is no worker nobody");
        assert!(post(&server, &path.replace("nobody", "no%20body")).0.contains("400"));
    }
    assert_eq!(post(&server, "/v1/gate/open").1, json!({ "was_open": true, "given_up": [] }));
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        match path.is_dir() {
            true => copy(&path, &to.join(name)),
            false => drop(fs::copy(&path, to.join(name)).unwrap()),
        }
    }
}

#[test]
fn a_restored_copy_is_noticed_and_the_gate_is_shut_until_all_workers_agree() {
    let mut server = Server::start(LONG);
    let (one, two) = (server.worker("one", 1), server.worker("two", 1));
    let api = server.api();
    api.await_worker("one");
    api.await_worker("two");
    let go = Signpost::new(&server);
    let long = api.submit(&go.until());
    await_start(&server, &long);
    assert!(server.stop().success());
    copy(&server.data, &server.path("backup"));
    server.restart();
    // The copy knows nothing of this one.
    let later = api.submit(&go.until());
    await_start(&server, &later);
    server.kill();
    one.signal(Signal::STOP);
    two.signal(Signal::STOP);
    fs::remove_dir_all(&server.data).unwrap();
    copy(&server.path("backup"), &server.data);
    server.restart();
    // Nobody has to come for that: the witness says so.
    let shard = api.shard();
    assert!(shard.in_doubt && !shard.open && shard.opens_in_ms.is_some(), "{shard:?}");
    assert!(server.log().contains("the store is taken for an old copy of itself"), "{}", server.log());
    let doubt =
        "the store may be an old copy: waiting until all workers agree that nobody is missing, at most ";
    let said = server.cli(&["status"]).out;
    assert!(said.contains(doubt) && said.contains("2 of 2 workers are absent: one, two"), "{said}");
    assert!(server.cli(&["gate"]).out.contains("in doubt"), "{:?}", server.cli(&["gate"]));
    assert_eq!(server.cli(&["gate", "--json"]).json()["in_doubt"], true);
    assert_eq!(server.metric("evenhand_gate_in_doubt"), 1.0);
    let unasked = server.cli(&["gate", "open"]);
    assert!(unasked.code == 2 && unasked.err.contains("workers that it does not know"), "{unasked:?}");
    let fresh = api.submit("sleep 1");
    assert!(api.get(&fresh).hold.contains(doubt), "{:?}", api.get(&fresh));

    two.signal(Signal::CONT);
    eventually("one of them has come", || api.shard().absent_seats == ["one"]);
    assert!(api.shard().in_doubt);
    one.signal(Signal::CONT);
    eventually("the gate opens", || api.shard().open);
    assert!(!api.shard().in_doubt);
    assert_eq!(server.metric("evenhand_gate_in_doubt"), 0.0);
    go.raise();
    for id in [&long, &fresh] {
        assert_eq!(api.end(id).state(), TaskState::Succeeded);
    }
    assert_eq!(of(&server, "start", &long).len(), 1, "what runs goes on");
}
