//! Twenty workers on machines of their own, some of which are cut off from the server, in one direction or in both, or
//! stopped for longer than a worker is waited for; and a server that is killed meanwhile. No task may run twice at once,
//! and in the end all have run.
//!
//! Here a worker cannot be told that it was given up, and what it says comes late, or to another server, or never. What it
//! runs is dead in time only because its own lease says so.

use std::collections::BTreeSet;

use rustix::process::Signal;

use crate::chaos::{any_payload, never_give_up, under_load};
use crate::checker::of;
use crate::network::{Cut, Machine, SERVER, apart};
use crate::support::{
    Api, Dice, Server, Signpost, Times, WorkerProcess, alone, checked_task, eventually, rounds,
};

const WORKERS: usize = 20;
/// As many may be cut off or stopped at the same time.
const ILL: usize = 7;
const CUTS: [Cut; 3] = [Cut::Both, Cut::FromWorker, Cut::ToWorker];

/// A worker on its machine.
struct Seat {
    name: String,
    machine: Machine,
    worker: WorkerProcess,
    stopped: bool,
}

impl Seat {
    fn new(server: &Server, n: usize, machine: Machine) -> Seat {
        let name = format!("worker-{n:02}");
        let command = [checked_task().into_os_string(), server.dir.path().into()];
        let evenhand = machine.command(env!("CARGO_BIN_EXE_evenhand"));
        let worker = server.worker_by(evenhand, "seats", &name, &["q", "--slots", "2"], &command);
        Seat { name, machine, worker, stopped: false }
    }

    fn is_ill(&self) -> bool {
        self.stopped || self.machine.is_cut()
    }

    fn go_on(&mut self) {
        self.machine.mend();
        if std::mem::replace(&mut self.stopped, false) {
            self.worker.signal(Signal::CONT);
        }
    }
}

/// Some take longer than a worker is waited for, so that there is something to run twice.
fn some_long(dice: &mut Dice) -> String {
    let long = if dice.one_in(4) { format!("sleep {} ", 2_000 + dice.below(6_000)) } else { String::new() };
    long + &any_payload(dice)
}

/// Whom a server counts on, if it can say.
fn counted(api: &Api) -> Option<BTreeSet<String>> {
    Some(api.client_workers()?.into_iter().map(|worker| worker.seat).collect())
}

/// One fault, or the end of some.
fn disturb(server: &mut Server, dice: &mut Dice, seats: &mut [Seat], round: u64) {
    let api = server.api();
    if round % 15 == 14 {
        server.kill();
        dice.pause(0, 300);
        server.restart();
    }
    let well: Vec<usize> = (0..seats.len()).filter(|n| !seats[*n].is_ill()).collect();
    if well.len() > WORKERS - ILL {
        let seat = &mut seats[well[dice.below(well.len() as u64) as usize]];
        match dice.below(5) {
            0 | 1 => {
                seat.worker.signal(Signal::STOP);
                seat.stopped = true;
            }
            _ => seat.machine.cut(CUTS[dice.below(3) as usize]),
        }
    } else {
        // Somebody has to be given up before it goes on.
        eventually("a worker that nobody hears is given up", || {
            counted(&api).is_some_and(|counted| {
                seats.iter().any(|seat| seat.is_ill() && !counted.contains(&seat.name))
            })
        });
    }
    let Some(counted) = counted(&api) else { return };
    for seat in seats.iter_mut().filter(|seat| seat.is_ill()) {
        // What is in the socket of one that was stopped for so long must not start. Cables are mended at any time.
        if !counted.contains(&seat.name) || !seat.stopped && dice.one_in(20) {
            seat.go_on();
        }
    }
}

#[test]
fn workers_cut_off_and_stopped_at_any_moment_never_run_a_task_twice_at_once() {
    let _alone = alone();
    let name = "partitions::workers_cut_off_and_stopped_at_any_moment_never_run_a_task_twice_at_once";
    apart(name, || {
        let mut dice = Dice::fixed(4);
        let machines = Machine::all(WORKERS);
        let mut server = Server::listening(SERVER, Times { lost_after: "3s", absence: "30s" }, &[]);
        never_give_up(&server);
        let seat = |(n, machine)| Seat::new(&server, n, machine);
        let mut seats: Vec<Seat> = machines.into_iter().enumerate().map(seat).collect();
        let api = server.api();
        seats.iter().for_each(|seat| api.await_worker(&seat.name));
        under_load(&mut server, &mut dice, some_long, |server, dice| {
            for round in 0..rounds(60) {
                dice.pause(50, 300);
                disturb(server, dice, &mut seats, round);
            }
            seats.iter_mut().for_each(Seat::go_on);
        });
        let log = server.log();
        let [gone, with_runs] =
            ["a worker is gone", "a worker is given up"].map(|what| log.matches(what).count());
        println!("given up: {gone} workers that ran nothing, {with_runs} with what they ran");
        assert!(gone + with_runs > 0, "nobody was given up:\n{log}");
        all_get_work(&server, &mut seats);
    });
}

/// Each of them runs something at the same time.
fn all_get_work(server: &Server, seats: &mut [Seat]) {
    let api = server.api();
    let go = Signpost::new(server);
    let before = api.queue("q").accepted as usize;
    let ids = api.submit_all("q", vec![go.until().as_str(); 2 * seats.len()]);
    eventually("all workers have both slots taken", || {
        ids.iter().all(|id| !of(server, "start", id).is_empty())
    });
    for seat in seats {
        let ended = seat.worker.has_ended();
        assert!(ended.is_none(), "{} has ended: {ended:?}\n{}", seat.name, seat.worker.said());
    }
    go.raise();
    ids.iter().for_each(|id| drop(api.end(id)));
    assert_eq!(api.queue("q").accepted as usize, before + ids.len());
}
