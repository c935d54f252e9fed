//! Workers that crash again and again beside steady ones. They vanish without a word, in any moment, and come back as the next
//! life of their seat; hardly one of them is ever long enough there to know of anybody. They must not keep others from work.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use evenhand::TaskState;
use evenhand_api::v1;
use evenhand_api::v1::worker_sessions_client::WorkerSessionsClient;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use crate::checker::{all_is_well, await_start, ran_exactly_once};
use crate::support::{Dice, LONG, Server, Signpost, WorkerProcess, alone, eventually, runtime};

const CRASHING: u64 = 25;
const STEADY: usize = 10;

/// Workers that crash, as long as this lives.
struct Crashing {
    /// How many lives have ended.
    lives: Arc<AtomicUsize>,
    _seats: JoinSet<()>,
}

impl Crashing {
    fn start(server: &Server, dice: &mut Dice) -> Crashing {
        let lives = Arc::new(AtomicUsize::new(0));
        let _inside = runtime().enter();
        let mut seats = JoinSet::new();
        for n in 0..CRASHING {
            let (url, mut dice, lives) = (server.url(), dice.split(), lives.clone());
            seats.spawn(async move {
                for life in 1.. {
                    // A server that is away, or ends the session, is one more way to end.
                    let _ = one_life(&url, n, life, &mut dice).await;
                    lives.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(dice.below(400))).await;
                }
            });
        }
        Crashing { lives, _seats: seats }
    }

    /// Waits until each has crashed about twice more.
    fn await_more(&self) {
        let before = self.lives.load(Ordering::Relaxed);
        let enough = || self.lives.load(Ordering::Relaxed) >= before + 2 * CRASHING as usize;
        eventually("workers crash again and again", enough);
    }
}

/// Says hello and vanishes: before it is let in, mostly as soon as it is, or after some heartbeats.
async fn one_life(url: &str, n: u64, life: u64, dice: &mut Dice) -> Option<()> {
    let channel = Endpoint::from_shared(url.to_string()).ok()?.connect().await.ok()?;
    let (up, outgoing) = mpsc::channel(10);
    let hello = v1::Hello {
        protocol: evenhand_api::PROTOCOL,
        seat: format!("crashing-{n}"),
        token: 7,
        process_life: life,
        session: 1,
        slots: 1,
        queues: vec![v1::ServedQueue { queue: "elsewhere".into(), weight_thousandths: 1000 }],
        ..v1::Hello::default()
    };
    let say = async |message| up.send(v1::Up { message: Some(message) }).await.ok();
    say(v1::up::Message::Hello(hello)).await?;
    let mut down =
        WorkerSessionsClient::new(channel).session(ReceiverStream::new(outgoing)).await.ok()?.into_inner();
    if dice.one_in(4) {
        return Some(());
    }
    let mut known = down.message().await.ok()??.welcome?.worker_set;
    let beats = if dice.one_in(3) { 1 + dice.below(3) } else { 0 };
    for number in 1..=beats {
        let worker_set = known;
        let heartbeat = v1::Heartbeat { number, answered: number - 1, worker_set };
        say(v1::up::Message::News(v1::News { heartbeat: Some(heartbeat), ..v1::News::default() })).await?;
        let answer = down.message().await.ok()??.answer?;
        known = answer.worker_set.or(known);
        tokio::time::sleep(Duration::from_millis(dice.below(100))).await;
    }
    Some(())
}

/// Gives each of these workers, which have a slot each, something to do at the same time; and returns what.
fn all_run(server: &Server, go: &Signpost, seats: &[&str]) -> Vec<String> {
    let api = server.api();
    let ids = api.submit_all("q", vec![go.until().as_str(); seats.len()]);
    ids.iter().for_each(|id| await_start(server, id));
    let mut busy: Vec<String> = ids.iter().map(|id| api.get(id).seat).collect();
    busy.sort();
    assert_eq!(busy, seats, "each runs one");
    ids
}

fn end(server: &Server, go: &Signpost, ids: &[String]) {
    go.raise();
    ids.iter().for_each(|id| assert_eq!(server.api().end(id).state(), TaskState::Succeeded));
}

fn steady(server: &Server) -> (Vec<String>, Vec<WorkerProcess>) {
    let names: Vec<String> = (0..STEADY).map(|n| format!("steady-{n:02}")).collect();
    let workers = names.iter().map(|name| server.worker(name, 1)).collect();
    (names, workers)
}

#[test]
fn workers_that_crash_again_and_again_keep_nobody_from_work() {
    let _alone = alone();
    let mut dice = Dice::new();
    let server = Server::start(LONG);
    let (names, _workers) = steady(&server);
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    let first = Signpost::new(&server);
    let mut accepted = all_run(&server, &first, &names);
    let crashing = Crashing::start(&server, &mut dice);
    crashing.await_more();
    end(&server, &first, &accepted);
    let second = Signpost::new(&server);
    let more = all_run(&server, &second, &names);
    // All ten are busy, so what comes now is for one that joins now.
    let _eleventh = server.worker("steady-10", 1);
    names.push("steady-10");
    let late = server.api().submit(&second.until());
    await_start(&server, &late);
    assert_eq!(server.api().get(&late).seat, "steady-10");
    crashing.await_more();
    end(&server, &second, &more);
    end(&server, &second, std::slice::from_ref(&late));
    accepted.extend(more);
    accepted.push(late);
    let third = Signpost::new(&server);
    let last = all_run(&server, &third, &names);
    end(&server, &third, &last);
    accepted.extend(last);
    drop(crashing);
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
}

#[test]
fn workers_that_crash_keep_nobody_from_work_after_a_crash_of_the_server_either() {
    let _alone = alone();
    let mut dice = Dice::new();
    let mut server = Server::start(LONG);
    let (names, _workers) = steady(&server);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let first = Signpost::new(&server);
    let mut accepted = all_run(&server, &first, &names);
    end(&server, &first, &accepted);
    let crashing = Crashing::start(&server, &mut dice);
    crashing.await_more();
    server.kill();
    server.restart();
    let second = Signpost::new(&server);
    let more = all_run(&server, &second, &names);
    crashing.await_more();
    end(&server, &second, &more);
    accepted.extend(more);
    drop(crashing);
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
}
