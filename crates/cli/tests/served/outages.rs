//! A server that is away for a while: killed, stopped in good order, killed while ends are on their way, or come
//! back with an empty directory.

use rustix::process::Signal;

use crate::checker::{
    all_is_well, await_start, await_starts, of, ran_exactly_once, ran_once_at_a_time, records,
};
use crate::support::{LONG, SHORT, Server, Signpost, Times, eventually, signal, task};

#[test]
fn tasks_go_on_and_end_while_the_server_is_away() {
    let mut server = Server::start(LONG);
    let worker = server.worker("one", 8);
    let api = server.api();
    let go = Signpost::new(&server);
    let accepted = api.submit_all("q", vec![go.until().as_str(); 8]);
    accepted.iter().for_each(|id| await_start(&server, id));
    server.kill();
    eventually("the worker notices", || worker.said().contains("the server is away"));
    go.raise();
    eventually("all end", || records(&server).iter().filter(|record| record.what == "end").count() == 8);
    server.restart();
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
}

#[test]
fn tasks_that_outlive_the_outage_are_not_repeated() {
    let mut server = Server::start(LONG);
    let worker = server.worker("one", 4);
    let api = server.api();
    let go = Signpost::new(&server);
    let mut accepted = api.submit_all("q", vec![go.until().as_str(); 3]);
    accepted.iter().for_each(|id| await_start(&server, id));
    for _ in 0..2 {
        server.kill();
        let away = worker.said().matches("the server is away").count();
        eventually("the worker notices", || {
            worker.said().matches("the server is away").count() > away || away > 0
        });
        server.restart();
        // They count as running: only one slot is left.
        let fresh = api.submit("sleep 1");
        api.end(&fresh);
        let shard = api.shard();
        assert_eq!((shard.open, shard.running), (true, 3), "{shard:?}");
        accepted.push(fresh);
    }
    go.raise();
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
}

/// The worker that runs the long task cannot answer, so if the next server waited for it, nothing would start. The other
/// one has had work before: the first knows of it. A new one waits until all others know of it.
#[test]
fn after_a_stop_in_good_order_the_gate_opens_at_once() {
    let mut server = Server::start(LONG);
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let long = api.submit(&go.until());
    await_start(&server, &long);
    let _two = server.worker("two", 1);
    let first = api.submit("sleep 1");
    api.end(&first);
    let mut accepted = vec![long.clone(), first];
    for _ in 0..2 {
        let before = one.said().matches("the server stops for a while").count();
        assert!(server.stop().success(), "{}", server.log());
        eventually("the worker is told", || {
            one.said().matches("the server stops for a while").count() > before
        });
        one.signal(Signal::STOP);
        server.restart();
        let fresh = api.submit("sleep 1");
        api.end(&fresh);
        accepted.push(fresh);
        let shard = api.shard();
        assert!(shard.open && shard.waits_for.is_empty() && shard.running == 1, "{shard:?}");
        let stands = api.get(&long);
        assert_eq!((stands.state(), stands.seat.as_str()), (evenhand::TaskState::Running, "one"));
        assert!(of(&server, "end", &long).is_empty());
        one.signal(Signal::CONT);
        api.await_worker("one");
    }
    go.raise();
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
    assert!(one.has_ended().is_none());
}

#[test]
fn a_worker_that_dies_while_a_stopped_server_is_away_is_given_up_in_the_end() {
    let mut server = Server::start(Times { lost_after: "2s", absence: "3s" });
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let long = api.submit(&go.until());
    await_start(&server, &long);
    let _two = server.worker("two", 1);
    api.await_worker("two");
    assert!(server.stop().success());
    one.kill_with_guardian();
    server.restart();
    // The gate is open, and the task counts as running until its worker cannot be alive any more.
    let fresh = api.submit("sleep 1");
    api.end(&fresh);
    await_starts(&server, &long, 2);
    go.raise();
    let ended = api.end(&long);
    assert_eq!(ended.attempt, 2);
    all_is_well(&server, &[long, fresh]);
}

#[test]
fn ends_that_the_server_never_heard_are_said_again() {
    let mut server = Server::start(LONG);
    let _worker = server.worker("one", 10);
    let api = server.api();
    let mut accepted = Vec::new();
    for _ in 0..3 {
        let go = Signpost::new(&server);
        let ids = api.submit_all("q", vec![go.until().as_str(); 10]);
        ids.iter().for_each(|id| await_start(&server, id));
        signal(server.pid(), Signal::STOP);
        go.raise();
        eventually("all end", || ids.iter().all(|id| !of(&server, "end", id).is_empty()));
        server.kill();
        server.restart();
        ids.iter().for_each(|id| assert_eq!(api.end(id).state(), evenhand::TaskState::Succeeded));
        accepted.extend(ids);
    }
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
}

#[test]
fn a_request_sent_again_after_a_crash_is_the_same_request() {
    let mut server = Server::start(SHORT);
    let api = server.api();
    let tasks = vec![task("sleep 1"), task("sleep 2")];
    let first = api.enqueue_once("q", &tasks, "order-17");
    assert!(first.created && first.ids.len() == 2);
    let again = api.enqueue_once("q", &tasks, "order-17");
    assert_eq!((&again.ids, again.created), (&first.ids, false));
    server.kill();
    server.restart();
    let again = api.enqueue_once("q", &tasks, "order-17");
    assert_eq!((&again.ids, again.created), (&first.ids, false));
    // Also when the tasks have ended, and in its own queue only.
    let _worker = server.worker("one", 2);
    first.ids.iter().for_each(|id| drop(api.end(id)));
    server.kill();
    server.restart();
    let again = api.enqueue_once("q", &tasks, "order-17");
    assert_eq!((&again.ids, again.created), (&first.ids, false));
    assert!(api.enqueue_once("other", &tasks, "order-17").created);
    let said = server.cli(&["submit", "q", "--request-id", "order-18", "--json", "sleep 1"]).json();
    let repeated = server.cli(&["submit", "q", "--request-id", "order-18", "--json", "sleep 1"]).json();
    assert_eq!((&said["created"], &repeated["created"]), (&true.into(), &false.into()));
    assert_eq!(said["id"], repeated["id"]);
    let mut accepted = first.ids;
    accepted.push(said["id"].as_str().unwrap().into());
    all_is_well(&server, &accepted);
}

/// Ids begin anew in a new store, so the tasks of the old one are told apart by what they wait for.
#[test]
fn a_worker_whose_server_lost_its_store_ends_what_it_ran_and_works_for_the_new_one() {
    let mut server = Server::start(LONG);
    let mut worker = server.worker("one", 2);
    let api = server.api();
    let never = Signpost::new(&server);
    let old = api.submit_all("q", [never.until().as_str(), &format!("daemon {}", never.until())]);
    old.iter().for_each(|id| await_start(&server, id));
    let before = records(&server);
    server.kill();
    std::fs::rename(&server.data, server.path("gone")).unwrap();
    server.restart();
    let go = Signpost::new(&server);
    go.raise();
    // The first ids of the new store are those of the old one, whose locks are free only if nothing of it is left.
    let ids = api.submit_all("q", vec![go.until().as_str(); 3]);
    assert_eq!(ids[..2], old[..]);
    ids.iter().for_each(|id| assert_eq!(api.end(id).state(), evenhand::TaskState::Succeeded));
    let all = records(&server);
    assert!(all.iter().all(|record| record.what != "overlap"), "{all:?}");
    assert_eq!(all[..before.len()], before[..]);
    for record in before {
        assert!(!crate::support::lives(record.pid), "a run of the old store lives: {record:?}");
    }
    assert!(worker.has_ended().is_none(), "{}", worker.said());
}

#[test]
fn a_stop_lets_nothing_be_lost_that_comes_at_the_same_moment() {
    let mut server = Server::start(LONG);
    let _worker = server.worker("one", 4);
    let api = server.api();
    let mut accepted = Vec::new();
    for _ in 0..4 {
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                (0..30).flat_map(|_| api.submit_all("q", ["sleep 5", "sleep 20"])).collect::<Vec<_>>()
            });
            eventually("something is accepted", || !records(&server).is_empty());
            assert!(server.stop().success(), "{}", server.log());
            server.restart();
            accepted.extend(sending.join().unwrap());
        });
    }
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
    ran_once_at_a_time(&server);
}
