//! The start gate after a crash: shut until everybody who could be running something has said so or is dead, and
//! not a moment longer.

use evenhand::{TaskState, wire};

use crate::checker::{all_is_well, await_start, await_starts, of, records};
use crate::support::{LONG, Server, Signpost, Times, WorkerProcess, block_on, eventually, lives};

/// A server that was killed while `one` ran a task and `two` ran none. Both workers live.
fn crashed(times: Times) -> (Server, [WorkerProcess; 2], Signpost, String) {
    let mut server = Server::start(times);
    let one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let long = api.submit(&go.until());
    await_start(&server, &long);
    let two = server.worker("two", 1);
    api.await_worker("two");
    server.kill();
    (server, [one, two], go, long)
}

#[test]
fn nothing_starts_before_a_worker_that_never_returns_is_surely_dead() {
    let (mut server, [mut one, _two], go, long) = crashed(Times { lost_after: "12s", absence: "30s" });
    one.kill_with_guardian();
    server.restart();
    let api = server.api();
    let fresh = api.submit("sleep 1");
    let waits =
        |text: &str| text.contains("waiting for 1 of 2 workers: one, at most ") && text.contains(" s");
    eventually("the other worker has reported", || waits(&api.shard().waits_for));
    let shard = api.shard();
    assert!(!shard.open && shard.absent_seats == ["one"] && shard.opens_in_ms.is_some(), "{shard:?}");
    let said = server.cli(&["status"]);
    assert!(
        said.code == 0 && said.out.contains("gate      shut: waiting for 1 of 2 workers: one, at most "),
        "{said:?}"
    );
    let json = server.cli(&["status", "--json"]).json();
    assert_eq!(json["shards"][0]["open"], false);
    assert_eq!(json["shards"][0]["absent_seats"], serde_json::json!(["one"]));
    let ready = server.page("/readyz");
    assert!(ready.starts_with("HTTP/1.1 503") && waits(&ready), "{ready}");
    let held = api.get(&fresh);
    assert_eq!(held.state(), TaskState::Queued);
    assert!(held.hold.contains("gate"), "why it waits: {:?}", held.hold);
    // What is waited for is over; everything before it has not been started.
    eventually("the gate opens", || {
        let starts = records(&server).iter().filter(|record| record.what == "start").count();
        let open = api.shard().open;
        assert!(open || starts == 1, "a task started behind a gate that is shut");
        open
    });
    go.raise();
    assert_eq!(api.end(&long).state(), TaskState::Succeeded);
    assert_eq!(of(&server, "start", &long).len(), 2);
    all_is_well(&server, &[long, fresh]);
    assert!(server.page("/readyz").starts_with("HTTP/1.1 200"));
}

#[test]
fn the_next_life_of_a_seat_proves_the_last_one_dead() {
    let (mut server, [mut one, _two], go, long) = crashed(LONG);
    one.kill_with_guardian();
    server.restart();
    let api = server.api();
    eventually("the other worker has reported", || api.shard().absent_seats == ["one"]);
    assert!(!api.shard().open);
    let _again = server.worker("one", 1);
    eventually("the gate opens", || api.shard().open);
    await_starts(&server, &long, 2);
    go.raise();
    all_is_well(&server, &[long]);
}

/// The guardian says so when the server is back, if that is soon; and frees the seat in any case.
#[test]
fn a_guardian_that_outlives_its_worker_ends_the_runs() {
    let (mut server, [mut one, _two], go, long) = crashed(LONG);
    let run = of(&server, "start", &long)[0].pid;
    one.kill();
    eventually("the run is dead", || !lives(run));
    server.restart();
    let api = server.api();
    let _again = server.worker("one", 1);
    eventually("the gate opens", || api.shard().open);
    await_starts(&server, &long, 2);
    go.raise();
    all_is_well(&server, &[long]);
}

#[test]
fn workers_that_all_return_open_the_gate_without_a_wait() {
    let (mut server, _workers, go, long) = crashed(LONG);
    server.restart();
    let api = server.api();
    eventually("the gate opens", || api.shard().open);
    let shard = api.shard();
    assert_eq!((shard.running, shard.workers), (1, 2), "{shard:?}");
    let fresh = api.submit("sleep 1");
    api.end(&fresh);
    assert!(of(&server, "end", &long).is_empty());
    go.raise();
    all_is_well(&server, &[long, fresh]);
}

#[test]
fn restarts_do_not_postpone_the_opening_for_ever() {
    let (mut server, [mut one, mut two], go, long) = crashed(Times { lost_after: "15s", absence: "30s" });
    one.kill_with_guardian();
    two.kill_with_guardian();
    let api = server.api();
    // Each life of the server is too short for the whole wait.
    let mut lives = 0;
    loop {
        server.restart();
        lives += 1;
        let began = std::time::Instant::now();
        while !api.shard().open && began.elapsed() < std::time::Duration::from_secs(8) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        if api.shard().open {
            break;
        }
        assert!(lives < 6, "the wait begins anew with every start: {:?}", api.shard());
        server.kill();
    }
    assert!(lives > 1, "the first life was to be too short");
    let _worker = server.worker("three", 1);
    go.raise();
    all_is_well(&server, &[long]);
}

#[test]
fn an_operator_opens_the_gate_without_a_worker_that_is_missing() {
    let (mut server, [mut one, _two], go, long) = crashed(LONG);
    one.kill_with_guardian();
    server.restart();
    let api = server.api();
    let fresh = api.submit("sleep 1");
    eventually("the other worker has reported", || api.shard().absent_seats == ["one"]);
    let said = server.cli(&["gate"]);
    assert!(said.out.contains("waiting for 1 of 2 workers: one, at most "), "{said:?}");
    let mut watch = block_on(api.client.watch(&fresh)).unwrap();
    let mut next_hold = || {
        let event = block_on(watch.next()).unwrap().unwrap().event.unwrap();
        let wire::task_event::Event::Task(task) = &event else { panic!("{event:?}") };
        assert_eq!(task.state(), TaskState::Queued, "{task:?}");
        task.hold.clone()
    };
    let hold = next_hold();
    assert!(hold.starts_with("the start gate is shut: waiting for 1 of 2 workers: one, at most "), "{hold}");
    let unasked = server.cli(&["gate", "open"]);
    assert_eq!(unasked.code, 2, "{unasked:?}");
    assert!(unasked.err.contains("if one of them is alive, its tasks run twice at once"), "{unasked:?}");
    assert!(unasked.err.contains("say --yes") && !api.shard().open, "{unasked:?}");

    let opened = server.cli(&["gate", "open", "--yes"]);
    assert_eq!((opened.code, opened.out.as_str()), (0, "the start gate is open, without one\n"));
    assert!(opened.err.contains("twice at once"), "{opened:?}");
    await_starts(&server, &long, 2);
    // Whoever watches hears of it, though the one worker that is there has no slot for it.
    let hold = next_hold();
    assert!(!hold.contains("gate"), "{hold}");
    let again = server.cli(&["gate", "open"]);
    assert_eq!((again.code, again.out.as_str()), (0, "the start gate is open already\n"));
    assert!(server.cli(&["gate"]).out.contains("open: tasks may start"));
    go.raise();
    all_is_well(&server, &[long, fresh]);
}
