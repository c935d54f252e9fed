//! Servers and workers that die, stop and come back at random moments, under load. Nothing that was accepted may
//! be lost, and no task may run twice at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;

use evenhand::NewTask;
use rustix::process::Signal;

use crate::checker::{all_is_well, await_start, records};
use crate::support::{
    Api, Dice, SHORT, Server, Times, WorkerProcess, alone, eventually, rounds, signal, task,
};

/// However often a task is lost with its worker here, it is tried again.
pub(crate) fn never_give_up(server: &Server) {
    let said = server.cli(&["queue", "set", "q", "--max-lost", "255"]);
    assert_eq!(said.code, 0, "{said:?}");
}

/// What a client has sent and was told.
#[derive(Default)]
struct Sent {
    requests: Vec<(String, Vec<NewTask>, Vec<String>)>,
}

impl Sent {
    fn ids(&self) -> Vec<String> {
        self.requests.iter().flat_map(|(_, _, ids)| ids.clone()).collect()
    }

    /// The same requests again are the same requests.
    fn send_again(&self, api: &Api) {
        for (name, tasks, ids) in self.requests.iter().step_by(7) {
            let again = api.enqueue_once("q", tasks, name);
            assert_eq!((&again.ids, again.created), (ids, false), "request {name}, sent again");
        }
    }
}

/// Sends tasks until it is told to stop, each request as often as it takes to get an answer.
fn load(api: &Api, mut dice: Dice, payload: impl Fn(&mut Dice) -> String, stop: &AtomicBool) -> Sent {
    let mut sent = Sent::default();
    while !stop.load(Ordering::Relaxed) {
        let tasks: Vec<NewTask> = (0..1 + dice.below(8))
            .map(|_| task(&payload(&mut dice)).key(format!("tenant-{}", dice.below(5))))
            .collect();
        let name = format!("request-{}", sent.requests.len());
        let ids = api.enqueue_once("q", &tasks, &name).ids;
        assert_eq!(ids.len(), tasks.len());
        sent.requests.push((name, tasks, ids));
        dice.pause(20, 300);
    }
    sent
}

/// Mostly short; some leave processes behind, some want to be tried twice.
pub(crate) fn any_payload(dice: &mut Dice) -> String {
    let mut payload = format!("sleep {}", dice.below(200));
    if dice.one_in(6) {
        payload += if dice.one_in(2) { " child" } else { " daemon" };
    }
    if dice.one_in(10) {
        payload += " exit-first 75";
    }
    payload
}

/// Plays faults under load, then waits for the end of everything and checks it.
pub(crate) fn under_load(
    server: &mut Server,
    dice: &mut Dice,
    payload: impl Fn(&mut Dice) -> String + Send + Sync + Copy,
    faults: impl FnOnce(&mut Server, &mut Dice),
) {
    let stop = AtomicBool::new(false);
    let (api, load_dice) = (server.api(), dice.split());
    let sent = std::thread::scope(|scope| {
        let loading: ScopedJoinHandle<'_, Sent> = scope.spawn(|| load(&api, load_dice, payload, &stop));
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| faults(server, dice)));
        stop.store(true, Ordering::Relaxed);
        let sent = loading.join();
        if let Err(panic) = played {
            std::panic::resume_unwind(panic);
        }
        sent.unwrap()
    });
    let starts = all_is_well(server, &sent.ids());
    sent.send_again(&api);
    assert_eq!(
        api.queue("q").accepted as usize,
        sent.ids().len(),
        "what is sent again is not accepted again"
    );
    println!("{} requests, {} tasks, {starts} runs", sent.requests.len(), sent.ids().len());
}

#[test]
fn a_server_killed_at_any_moment_loses_nothing_and_repeats_nothing() {
    let _alone = alone();
    let mut dice = Dice::new();
    let mut server = Server::start(SHORT);
    never_give_up(&server);
    let _workers = [server.worker("one", 4), server.worker("two", 4)];
    under_load(&mut server, &mut dice, any_payload, |server, dice| {
        for _ in 0..rounds(15) {
            dice.pause(30, 900);
            server.kill();
            dice.pause(0, 400);
            server.restart();
        }
    });
}

/// What happens to a worker.
#[derive(Clone, Copy, Debug)]
enum Blow {
    KillWorker,
    KillGuardian,
    KillBoth,
    StopWorker,
    StopGuardian,
}

const BLOWS: [Blow; 5] =
    [Blow::KillWorker, Blow::KillGuardian, Blow::KillBoth, Blow::StopWorker, Blow::StopGuardian];

const SLOTS: u32 = 4;

fn strike(server: &Server, dice: &mut Dice, seat: &str, worker: &mut WorkerProcess, blow: Blow) {
    let guardian = worker.guardian();
    match blow {
        Blow::KillWorker => worker.kill(),
        Blow::KillGuardian => worker.kill_guardian(),
        Blow::KillBoth => worker.kill_with_guardian(),
        Blow::StopWorker => {
            worker.signal(Signal::STOP);
            dice.pause(2_500, 3_500);
            worker.signal(Signal::CONT);
        }
        Blow::StopGuardian => {
            signal(guardian, Signal::STOP);
            dice.pause(2_500, 3_500);
            signal(guardian, Signal::CONT);
        }
    }
    if worker.has_ended().is_some() {
        *worker = server.worker(seat, SLOTS);
    }
}

#[test]
fn workers_killed_and_stopped_at_any_moment_leave_no_run_behind() {
    let _alone = alone();
    let mut dice = Dice::new();
    let mut server = Server::start(SHORT);
    never_give_up(&server);
    let seats = ["one", "two", "three"];
    let mut workers = seats.map(|seat| server.worker(seat, SLOTS));
    under_load(&mut server, &mut dice, any_payload, |server, dice| {
        for round in 0..rounds(10) {
            dice.pause(100, 500);
            let n = dice.below(seats.len() as u64) as usize;
            strike(server, dice, seats[n], &mut workers[n], BLOWS[round as usize % BLOWS.len()]);
        }
    });
}

/// While both are stopped nothing can end what they started, so here every task ends by itself long before the
/// worker is given up. What waits in pipes and sockets meanwhile must not start when they go on.
#[test]
fn a_worker_stopped_together_with_its_guardian_starts_nothing_late() {
    let _alone = alone();
    let mut dice = Dice::new();
    let mut server = Server::start(Times { lost_after: "4s", ..SHORT });
    never_give_up(&server);
    let mut workers = [server.worker("one", SLOTS), server.worker("two", SLOTS)];
    under_load(
        &mut server,
        &mut dice,
        |dice| format!("sleep {}", dice.below(100)),
        |_, dice| {
            for round in 0..rounds(3) {
                dice.pause(100, 500);
                let worker = &mut workers[round as usize % 2];
                let guardian = worker.guardian();
                worker.signal(Signal::STOP);
                signal(guardian, Signal::STOP);
                dice.pause(4_500, 5_500);
                worker.signal(Signal::CONT);
                dice.pause(0, 20);
                signal(guardian, Signal::CONT);
            }
        },
    );
}

#[test]
fn server_and_workers_killed_in_any_order_lose_nothing() {
    let _alone = alone();
    let mut dice = Dice::new();
    let mut server = Server::start(SHORT);
    never_give_up(&server);
    let seats = ["one", "two"];
    let mut workers = seats.map(|seat| server.worker(seat, SLOTS));
    under_load(&mut server, &mut dice, any_payload, |server, dice| {
        for _ in 0..rounds(6) {
            dice.pause(50, 600);
            let n = dice.below(2) as usize;
            let stopped = dice.one_in(3);
            if stopped {
                server.stop();
            } else {
                server.kill();
            }
            match dice.below(3) {
                0 => workers[n].kill(),
                1 => workers[n].kill_with_guardian(),
                _ => {}
            }
            if dice.one_in(2) && workers[n].has_ended().is_some() {
                workers[n] = server.worker(seats[n], SLOTS);
            }
            dice.pause(0, 300);
            server.restart();
            if workers[n].has_ended().is_some() {
                workers[n] = server.worker(seats[n], SLOTS);
            }
        }
    });
}

#[test]
fn a_worker_that_vanishes_while_it_is_given_tasks_loses_none() {
    let _alone = alone();
    let mut dice = Dice::new();
    let server = Server::start(SHORT);
    never_give_up(&server);
    let api = server.api();
    let mut accepted = Vec::new();
    for round in 0..rounds(5) {
        accepted.extend(api.submit_all("q", vec!["sleep 30"; 150]));
        let before = records(&server).len();
        let mut worker = server.worker("one", 100);
        // From before the first start to in the middle of them.
        if round > 0 {
            eventually("tasks are being started", || records(&server).len() > before);
            dice.pause(0, 100);
        } else {
            api.await_worker("one");
        }
        match dice.below(2) {
            0 => worker.kill(),
            _ => worker.kill_with_guardian(),
        }
    }
    let _worker = server.worker("one", 20);
    all_is_well(&server, &accepted);
}

/// What a worker is given in the moment in which its guardian is gone cannot be run there. That is no failure of
/// the task.
#[test]
fn a_guardian_that_dies_while_tasks_are_started_fails_none_of_them() {
    let server = Server::start(SHORT);
    never_give_up(&server);
    let api = server.api();
    let mut accepted = Vec::new();
    let mut worker = server.worker("one", 16);
    for _ in 0..rounds(8) {
        api.await_worker("one");
        accepted.push(api.submit("daemon sleep 500"));
        await_start(&server, &accepted[accepted.len() - 1]);
        worker.kill_guardian();
        accepted.extend((0..8).map(|_| api.submit("sleep 1")));
    }
    all_is_well(&server, &accepted);
}
