//! Who may have a seat.

use evenhand::TaskState;
use rustix::process::Signal;

use crate::checker::{all_is_well, await_start, await_starts, of};
use crate::support::{LONG, Server, Signpost, Times, eventually};

#[test]
fn a_seat_in_use_on_this_machine_is_refused_and_its_holder_goes_on() {
    let server = Server::start(LONG);
    let mut one = server.worker("one", 1);
    let api = server.api();
    api.await_worker("one");
    let mut second = server.worker("one", 1);
    assert_eq!(second.ended().code(), Some(1));
    let said = second.said();
    let pid = one.guardian().to_string();
    assert!(said.contains("seat one is in use on this machine by pid") && said.contains(&pid), "{said}");
    let id = api.submit("sleep 1");
    all_is_well(&server, &[id]);
    assert!(one.has_ended().is_none());
}

#[test]
fn a_dead_workers_seat_is_taken_over_without_a_wait() {
    let server = Server::start(LONG);
    crate::chaos::never_give_up(&server);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = api.submit(&format!("daemon {}", go.until()));
    for life in 1..=4 {
        let mut worker = server.worker("one", 1);
        await_starts(&server, &id, life);
        match life {
            1 | 3 => worker.kill(),
            2 => worker.kill_with_guardian(),
            _ => {
                go.raise();
                assert_eq!(api.end(&id).state(), TaskState::Succeeded);
            }
        }
    }
    all_is_well(&server, &[id]);
}

#[test]
fn another_machine_cannot_push_a_healthy_worker_out_of_its_seat() {
    let server = Server::start(LONG);
    let mut one = server.worker("one", 1);
    let api = server.api();
    api.await_worker("one");
    let mut other = server.worker_on("elsewhere", "one", &["q"], &["true"]);
    assert_eq!(other.ended().code(), Some(4), "{}", other.said());
    assert!(other.said().contains("taken by a healthy worker on another machine"), "{}", other.said());
    let id = api.submit("sleep 1");
    all_is_well(&server, &[id]);
    assert!(one.has_ended().is_none());
}

#[test]
fn another_machine_gets_the_seat_of_a_worker_that_is_surely_dead() {
    let server = Server::start(Times { lost_after: "4s", absence: "30s" });
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = api.submit(&go.until());
    await_start(&server, &id);
    // Stopped, not dead: it could go on.
    one.signal(Signal::STOP);
    let guardian = one.guardian();
    eventually("it is silent", || api.workers().iter().any(|worker| worker.health == "unhealthy"));
    let task = crate::support::checked_task();
    let command = [task.as_os_str(), server.dir.path().as_os_str()];
    let mut other = server.worker_on("elsewhere", "one", &["q"], &command);
    await_starts(&server, &id, 2);
    one.signal(Signal::CONT);
    go.raise();
    assert_eq!(api.end(&id).state(), TaskState::Succeeded);
    assert!(!one.ended().success(), "the seat is another's: {}", one.said());
    assert!(!crate::support::lives(guardian));
    assert!(other.has_ended().is_none());
    all_is_well(&server, &[id]);
}

/// As a laptop that slept: its runs are dead, and given to others meanwhile; the worker itself goes on.
#[test]
fn a_worker_that_was_stopped_for_long_joins_again() {
    let server = Server::start(Times { lost_after: "2s", absence: "30s" });
    crate::chaos::never_give_up(&server);
    let mut one = server.worker("one", 1);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = api.submit(&go.until());
    for round in 1..=3 {
        await_starts(&server, &id, round);
        let run = of(&server, "start", &id)[round - 1].pid;
        one.signal(Signal::STOP);
        eventually("it is given up", || api.workers().is_empty());
        assert!(!crate::support::lives(run), "its run is dead before that");
        // The fault that is played: it misses everything that could be done in time.
        std::thread::sleep(std::time::Duration::from_millis(1_000 * round as u64));
        one.signal(Signal::CONT);
        await_starts_or_end(&server, &id, &mut one, round + 1);
    }
    go.raise();
    assert_eq!(api.end(&id).state(), TaskState::Succeeded);
    all_is_well(&server, &[id]);
}

fn await_starts_or_end(server: &Server, id: &str, worker: &mut crate::support::WorkerProcess, starts: usize) {
    eventually("it runs the task again", || {
        let ended = worker.has_ended();
        assert!(ended.is_none(), "it has ended: {ended:?}\n{}", worker.said());
        of(server, "start", id).len() == starts
    });
}

#[test]
fn workers_without_a_name_find_seats_of_their_own() {
    let server = Server::start(LONG);
    let api = server.api();
    let start = || {
        std::process::Command::new(env!("CARGO_BIN_EXE_evenhand"))
            .args(["worker", "q", "--slots", "1", "--server", &server.url(), "--seat-dir"])
            .arg(server.path("seats"))
            .args(["--", "true"])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut workers = [start(), start(), start()];
    eventually("three seats are taken", || api.workers().len() == 3);
    for worker in &mut workers {
        crate::support::signal(worker.id(), Signal::TERM);
        assert!(crate::support::wait(worker, "it drains").success());
    }
    eventually("all have left", || api.workers().is_empty());
}

/// When it goes on it finds its lease over and kills what runs, although the worker was heard all the time.
#[test]
fn a_guardian_that_was_stopped_for_long_leaves_no_task_running_for_ever() {
    let server = Server::start(Times { lost_after: "2s", absence: "30s" });
    let mut one = server.worker("one", 2);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = api.submit(&go.until());
    await_start(&server, &id);
    let guardian = one.guardian();
    crate::support::signal(guardian, Signal::STOP);
    // Longer than any lease: the fault that is played.
    std::thread::sleep(std::time::Duration::from_millis(3_000));
    crate::support::signal(guardian, Signal::CONT);
    go.raise();
    assert_eq!(api.end(&id).state(), TaskState::Succeeded);
    all_is_well(&server, &[id]);
}
