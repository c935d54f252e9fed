use super::*;
use crate::backlog::{Charge, Cost, Level};
use crate::names::{Class, Key, LaneId, Priority, QueueId};

const EPOCH: Epoch = Epoch(7);

fn worker() -> Worker {
    let seat = Seat::new("w1").unwrap();
    Worker::new(Offer { seat, token: 1, process: 3, slots: 2, queues: Vec::new() })
}

fn run(task: u64, dispatch: u64) -> Run {
    Run {
        task: TaskId(task),
        lane: LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) },
        level: Level::ZERO,
        key: Key::shared(),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
        attempt: 1,
        max_attempts: 5,
        lost: 0,
        terms: None,
        fence: Fence { epoch: EPOCH, dispatch, nonce: 0 },
        started: Millis(0),
        limit_ms: 0,
    }
}

fn step(worker: &mut Worker, now: u64, input: Input) -> Vec<Effect> {
    let mut effects = Vec::new();
    worker.step(Millis(now), input, &mut effects);
    effects.retain(|effect| !matches!(effect, Effect::Wake { .. } | Effect::Lease { .. }));
    effects
}

fn down(worker: &mut Worker, now: u64, down: Down) -> Vec<Effect> {
    let session = worker.session();
    step(worker, now, Input::Down { epoch: EPOCH, session, down })
}

fn welcome() -> Down {
    Down::Welcome { store: StoreId(9), nonce: 4, thresholds: Thresholds::default(), set: None }
}

/// A worker that was welcomed at 100 ms, having said hello at 0, and runs task 1.
fn at_work() -> Worker {
    let mut worker = worker();
    assert!(matches!(step(&mut worker, 0, Input::Connected)[..], [Effect::Hello(_)]));
    let beat = Beat { number: 1, answered: 0, set: None };
    assert_eq!(down(&mut worker, 100, welcome()), [Effect::Beat(beat)]);
    assert_eq!(
        down(&mut worker, 110, Down::Start { number: 1, run: run(1, 1) }),
        [Effect::Start { run: run(1, 1) }]
    );
    worker
}

#[test]
fn the_lease_is_counted_from_the_send() {
    let mut worker = at_work();
    let lease = Thresholds::default().lease_ms();
    assert_eq!(worker.lease(), Some(Millis(lease)));
    down(&mut worker, 4_000, Down::Answer { number: 1, set: None });
    assert_eq!(worker.lease(), Some(Millis(100 + lease)));
}

#[test]
fn a_start_that_was_buffered_while_the_process_slept_does_not_happen() {
    let mut worker = at_work();
    // Not even before the lease is over: 5 s without an answer is no longer healthy.
    let refuse = Effect::Refuse { task: TaskId(2), fence: run(2, 2).fence };
    assert_eq!(down(&mut worker, 6_000, Down::Start { number: 2, run: run(2, 2) }), [refuse]);
    let effects = down(&mut worker, 70_000, Down::Start { number: 3, run: run(3, 3) });
    assert_eq!(effects, [Effect::Disconnect, Effect::KillAll]);
}

#[test]
fn it_joins_as_a_new_life_when_what_it_killed_is_gone() {
    let mut worker = at_work();
    assert_eq!(step(&mut worker, 60_000, Input::Tick), [Effect::Disconnect, Effect::KillAll]);
    assert!(!worker.wants_session());
    assert_eq!(worker.life().rejoin, 0);
    step(&mut worker, 60_100, Input::Ended { task: TaskId(1), fence: run(1, 1).fence, end: None });
    assert!(worker.wants_session());
    assert_eq!(worker.life().rejoin, 1);
    let [Effect::Hello(hello)] = &step(&mut worker, 60_200, Input::Connected)[..] else { panic!() };
    assert_eq!((hello.session, hello.running.len(), hello.ended.len()), (2, 0, 0));
}

#[test]
fn a_result_that_came_while_it_was_killing_is_kept() {
    let mut worker = at_work();
    step(&mut worker, 60_000, Input::Tick);
    let end = Some(End::Succeeded);
    step(&mut worker, 60_001, Input::Ended { task: TaskId(1), fence: run(1, 1).fence, end });
    let [Effect::Hello(hello)] = &step(&mut worker, 60_200, Input::Connected)[..] else { panic!() };
    assert_eq!(hello.ended, [(run(1, 1), End::Succeeded)]);
}

#[test]
fn a_run_that_was_killed_inside_the_lease_is_said_to_have_failed() {
    let mut worker = at_work();
    let (task, fence) = (TaskId(1), run(1, 1).fence);
    let effects = step(&mut worker, 200, Input::Ended { task, fence, end: None });
    assert_eq!(effects, [Effect::Ended { run: run(1, 1), end: End::Failed }]);
}

#[test]
fn a_run_that_could_not_be_started_is_refused() {
    let mut worker = at_work();
    let (task, fence) = (TaskId(1), run(1, 1).fence);
    let effects = step(&mut worker, 200, Input::NotStarted { task, fence });
    assert_eq!(effects, [Effect::Refuse { task, fence }]);
    assert_eq!(worker.running().count(), 0);
}

/// Found by a seed: the owner counted it as running for ever.
#[test]
fn a_run_that_the_hello_named_and_that_was_not_started_is_refused_after_the_welcome() {
    let mut worker = at_work();
    let (task, fence) = (TaskId(1), run(1, 1).fence);
    step(&mut worker, 200, Input::Disconnected);
    let [Effect::Hello(hello)] = &step(&mut worker, 300, Input::Connected)[..] else { panic!() };
    assert_eq!(hello.running, [run(1, 1)]);
    assert_eq!(step(&mut worker, 310, Input::NotStarted { task, fence }), []);
    let refuse = Effect::Refuse { task, fence };
    assert!(down(&mut worker, 320, welcome()).contains(&refuse));
    // Said once; and a hello that does not name it leaves nothing to say.
    step(&mut worker, 400, Input::Disconnected);
    step(&mut worker, 500, Input::Connected);
    assert!(!down(&mut worker, 510, welcome()).contains(&refuse));
}

#[test]
fn an_end_is_said_again_until_it_is_acknowledged() {
    let mut worker = at_work();
    let fence = run(1, 1).fence;
    let ended = Effect::Ended { run: run(1, 1), end: End::Failed };
    let effects = step(&mut worker, 200, Input::Ended { task: TaskId(1), fence, end: Some(End::Failed) });
    assert_eq!(effects, std::slice::from_ref(&ended));
    for second in 1..=10 {
        let effects = step(&mut worker, second * 1_000 + 300, Input::Tick);
        down(&mut worker, second * 1_000 + 301, Down::Answer { number: second + 1, set: None });
        assert_eq!(effects.contains(&ended), second == 10, "{second}");
    }
    let forget = Effect::Forget { task: TaskId(1), fence };
    assert_eq!(down(&mut worker, 11_000, Down::Acknowledge { task: TaskId(1), fence }), [forget]);
    assert_eq!(worker.unacknowledged(), 0);
}

#[test]
fn an_older_session_and_an_older_owner_are_not_obeyed() {
    let mut worker = at_work();
    step(&mut worker, 200, Input::Disconnected);
    step(&mut worker, 300, Input::Connected);
    let start = Down::Start { number: 2, run: run(2, 2) };
    assert_eq!(step(&mut worker, 310, Input::Down { epoch: EPOCH, session: 1, down: start }), []);
    let old = Input::Down { epoch: Epoch(6), session: 2, down: welcome() };
    assert_eq!(step(&mut worker, 320, old), [Effect::Disconnect]);
}

#[test]
fn an_absence_makes_the_lease_longer_until_the_next_welcome() {
    let mut worker = at_work();
    let lease = Thresholds::default().lease_ms();
    down(&mut worker, 200, Down::Absence { ms: 300_000 });
    assert_eq!(worker.lease(), Some(Millis(lease + 300_000)));
    step(&mut worker, 300, Input::Disconnected);
    assert_eq!(step(&mut worker, 100_000, Input::Tick), []);
    step(&mut worker, 100_000, Input::Connected);
    let session = worker.session();
    step(&mut worker, 100_010, Input::Down { epoch: Epoch(8), session, down: welcome() });
    assert_eq!(worker.lease(), Some(Millis(100_000 + lease)));
}

#[test]
fn it_drains_when_all_has_ended_and_is_acknowledged() {
    let mut worker = at_work();
    let fence = run(1, 1).fence;
    let beat = Effect::Beat(Beat { number: 2, answered: 0, set: None });
    assert_eq!(step(&mut worker, 200, Input::Drain), [Effect::Offer { slots: 0 }, beat]);
    let refuse = Effect::Refuse { task: TaskId(2), fence: run(2, 2).fence };
    assert_eq!(down(&mut worker, 210, Down::Start { number: 2, run: run(2, 2) }), [refuse]);
    step(&mut worker, 220, Input::Ended { task: TaskId(1), fence, end: Some(End::Succeeded) });
    let forget = Effect::Forget { task: TaskId(1), fence };
    assert_eq!(down(&mut worker, 230, Down::Acknowledge { task: TaskId(1), fence }), [forget]);
    // Only when the owner is known to know: a start could be on its way.
    assert_eq!(down(&mut worker, 240, Down::Answer { number: 2, set: None }), [Effect::Exit(Exit::Drained)]);
}

#[test]
fn another_store_is_begun_anew() {
    let mut worker = at_work();
    down(&mut worker, 150, Down::Start { number: 2, run: run(2, 2) });
    let (task, fence) = (TaskId(2), run(2, 2).fence);
    step(&mut worker, 160, Input::Ended { task, fence, end: Some(End::Succeeded) });
    let effects = down(&mut worker, 200, Down::Die { then: Then::Forget });
    assert_eq!(effects, [Effect::Disconnect, Effect::Forget { task, fence }, Effect::KillAll]);
    step(&mut worker, 210, Input::Ended { task: TaskId(1), fence: run(1, 1).fence, end: None });
    let [Effect::Hello(hello)] = &step(&mut worker, 220, Input::Connected)[..] else { panic!() };
    assert_eq!((hello.store, hello.obeyed, hello.life.rejoin), (None, Incarnation::default(), 1));
    assert!(hello.running.is_empty() && hello.ended.is_empty());
}

/// What comes twice was answered the first time, whatever has become of it since.
#[test]
fn a_start_that_comes_twice_is_started_once() {
    let mut worker = at_work();
    let (task, fence) = (TaskId(1), run(1, 1).fence);
    step(&mut worker, 120, Input::Ended { task, fence, end: Some(End::Succeeded) });
    down(&mut worker, 130, Down::Acknowledge { task, fence });
    assert_eq!(down(&mut worker, 140, Down::Start { number: 1, run: run(1, 1) }), []);
}

#[test]
fn a_worker_drains_when_its_owner_asks() {
    let mut worker = at_work();
    let (task, fence) = (TaskId(1), run(1, 1).fence);
    assert!(down(&mut worker, 120, Down::Drain).contains(&Effect::Offer { slots: 0 }));
    step(&mut worker, 130, Input::Ended { task, fence, end: Some(End::Succeeded) });
    down(&mut worker, 140, Down::Acknowledge { task, fence });
    assert_eq!(down(&mut worker, 150, Down::Answer { number: 2, set: None }), [Effect::Exit(Exit::Drained)]);
}
