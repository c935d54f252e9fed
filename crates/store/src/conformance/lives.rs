//! The life of a task beyond its first try: where its row goes, the tries that are remembered, its end and what
//! is remembered of that, for as long as it is.

use evenhand_core::backlog::Level;
use evenhand_core::bounds::TRIES_KEPT;
use evenhand_core::change::{Place, Timed, Try};
use evenhand_core::life::Outcome;
use evenhand_core::names::{ShardId, TaskId};
use evenhand_core::{Change, Task};

use super::Harness;
use super::given::*;
use crate::{History, Store};

/// Task 2 in every place that a task can be, and neighbours that stay what they are.
fn anywhere() -> [(Vec<Change>, Task); 5] {
    let first = task(2);
    let (again, late) = (retried(&first, at(12)), put_off(&first, timer_at(12)));
    [
        (vec![accepted(&first)], first.clone()),
        (vec![accepted(&delayed(&first))], delayed(&first)),
        (vec![accepted(&first), set_aside(&first)], aside(&first)),
        (vec![accepted(&first), moved(&first, &again)], again),
        (vec![accepted(&first), moved(&first, &late)], late),
    ]
}

fn neighbours() -> [Task; 4] {
    [task(1), delayed(&task(3)), aside(&task(4)), task(5)]
}

/// Takes the shard and puts the neighbours into it.
async fn owner_of_neighbours<S: Store>(store: &S) -> Owner<'_, S> {
    let owner = Owner::new(store).await;
    let [one, three, _, five] = neighbours();
    owner.commit(accept_all(&[one, three, task(4), five])).await;
    owner.commit(vec![set_aside(&task(4))]).await;
    owner
}

/// The neighbours, and another among them.
fn among(task: Option<Task>) -> Vec<Task> {
    let mut tasks: Vec<Task> = neighbours().into_iter().chain(task).collect();
    tasks.sort_by_key(|task| task.id);
    tasks
}

/// From the lane, the timers and the long runners to each of them: its row is there and only there, and its
/// record says so.
pub async fn a_task_goes_from_any_place_to_any_other<H: Harness>(h: &H) {
    for (begin, from) in anywhere() {
        for to in [retried(&from, at(20)), put_off(&from, timer_at(20)), aside(&from)] {
            if from.place == to.place {
                continue;
            }
            let store = h.fresh().await;
            let owner = owner_of_neighbours(&store).await;
            owner.commit(begin.clone()).await;
            owner.commit(vec![moved(&from, &to)]).await;
            assert_eq!(owner.task(2).await, Some(to.clone()));
            assert_eq!(contents(&store).await.tasks, among(Some(to.clone())), "from {from:?}");
            // In one commit it comes to the same.
            let store = h.fresh().await;
            let owner = owner_of_neighbours(&store).await;
            owner.commit([begin.clone(), vec![moved(&from, &to)]].concat()).await;
            let store = h.reopen(store).await;
            assert_eq!(contents(&store).await.tasks, among(Some(to)), "from {from:?}, at once");
        }
    }
}

/// Wherever it is: its row goes to its new place, in its own lane or another, and its record says so. What it says of its
/// duration outlives later moves.
pub async fn a_task_is_shortened_wherever_it_is<H: Harness>(h: &H) {
    let other = lane(1, 5, 1);
    for (begin, from) in anywhere() {
        for (lane, place) in [(LANE, Place::Lane(at(20))), (other, Place::Lane(at(20))), (LANE, Place::Aside)]
        {
            let store = h.fresh().await;
            let owner = owner_of_neighbours(&store).await;
            owner.commit(begin.clone()).await;
            let to = shorter(&from, lane, place, 77);
            owner.commit(vec![shortened(&from, &to)]).await;
            assert_eq!(owner.task(2).await, Some(to.clone()), "from {from:?}");
            let store = h.reopen(store).await;
            let rows = contents_of(&store, SHARD, &[LANE, other]).await.rows;
            let mine: Vec<_> = rows.into_iter().filter(|(_, row)| row.task == to.id).collect();
            let expected = place.level().map(|level| (lane, to.row_at(level)));
            assert_eq!(mine, Vec::from_iter(expected), "from {from:?}");
            let owner = Owner::new(&store).await;
            let again = put_off(&to, timer_at(30));
            owner.commit(vec![moved(&to, &again)]).await;
            assert_eq!(owner.task(2).await, Some(again));
        }
    }
}

/// Whether a charge is chained, and whether its cost is a time, is kept, wherever the task is.
pub async fn a_charge_keeps_what_it_says_wherever_its_task_is<H: Harness>(h: &H) {
    for (chained, timed) in [(false, false), (false, true), (true, false), (true, true)] {
        let store = h.fresh().await;
        let owner = Owner::new(&store).await;
        let of = |task: Task| {
            let mut task = task;
            (task.charge.chained, task.charge.timed) = (chained, timed);
            task
        };
        let (one, two) = (of(task(1)), of(delayed(&task(2))));
        owner.commit(accept_all(&[one.clone(), two.clone()])).await;
        assert_eq!(contents(&store).await.tasks, [one.clone(), two.clone()]);
        let owner = Owner::new(&store).await;
        let (one_off, two_due) = (of(put_off(&one, timer_at(11))), of(retried(&two, at(12))));
        owner.commit(vec![moved(&one, &one_off), moved(&two, &two_due)]).await;
        assert_eq!(contents(&store).await.tasks, [one_off.clone(), two_due.clone()]);
        let owner = Owner::new(&store).await;
        owner.commit(vec![moved(&one_off, &aside(&one_off)), moved(&two_due, &aside(&two_due))]).await;
        assert_eq!(contents(&store).await.tasks, [aside(&one_off), aside(&two_due)]);
    }
}

/// From every place, and with all that a task can have left behind.
pub async fn an_end_that_is_not_remembered_leaves_nothing<H: Harness>(h: &H) {
    for (begin, task) in anywhere() {
        for outcome in [Outcome::Succeeded, Outcome::Canceled] {
            let store = h.fresh().await;
            let owner = owner_of_neighbours(&store).await;
            let before = contents(&store).await;
            owner.commit_fenced(vec![], Owner::new(&store).await.epoch).await;
            let owner = Owner::new(&store).await;
            let mut begin = begin.clone();
            if outcome == Outcome::Canceled {
                begin.push(Change::Canceling { task: task.id });
            }
            owner.commit(begin).await;
            owner.commit(vec![ended(&task, outcome, None)]).await;
            assert_eq!(owner.task(2).await, None);
            assert_eq!(owner.history(2).await, History::default());
            assert_eq!(contents(&store).await, before, "after {task:?}");
        }
    }
}

/// Its row goes, its record stays and says that it is over, and its end can be read, until it is forgotten: then
/// nothing is left.
pub async fn an_end_is_remembered_until_it_is_forgotten<H: Harness>(h: &H) {
    for (begin, task) in anywhere() {
        let store = h.fresh().await;
        let owner = owner_of_neighbours(&store).await;
        let before = contents(&store).await;
        let owner = Owner { epoch: Owner::new(&store).await.epoch, ..owner };
        let replayed = Change::Replayed { task: task.id, again: TaskId(5) };
        owner.commit(begin).await;
        let tries = owner.history(2).await.tries;
        assert_eq!(tries.len(), usize::from(task.attempt - 1));
        owner.commit(vec![Change::Canceling { task: task.id }]).await;
        let mut end = end_record(&task);
        end.outcome = Outcome::Canceled;
        let timer = Change::Timed(forget_timer(&task));
        owner.commit(vec![ended(&task, Outcome::Canceled, Some(end.clone())), timer]).await;

        assert_eq!(owner.task(2).await, Some(over(&task)));
        let mut history = History { tries, end: Some(end), replayed_as: None };
        assert_eq!(owner.history(2).await, history);
        let store = h.reopen(store).await;
        let contents_then = contents(&store).await;
        assert_eq!(contents_then.tasks, among(Some(over(&task))));
        assert_eq!(contents_then.rows, before.rows);
        assert_eq!(contents_then.metadata, before.metadata, "nobody has to stop or look after it any more");

        let owner = Owner::new(&store).await;
        owner.commit(vec![replayed]).await;
        history.replayed_as = Some(TaskId(5));
        assert_eq!(owner.history(2).await, history);

        let at = forget_timer(&task).at;
        owner.commit(vec![forgotten(&task), Change::Untimed { at }]).await;
        assert_eq!(owner.task(2).await, None);
        assert_eq!(owner.history(2).await, History::default());
        let store = h.reopen(store).await;
        assert_eq!(contents(&store).await, before, "after {task:?}");
    }
}

/// A short life is over in one commit, and may be forgotten in it.
pub async fn a_task_may_come_end_and_be_forgotten_in_one_commit<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let again = retried(&task(2), at(12));
    let mut changes = vec![accepted(&task(1))];
    changes.extend(remembered(&task(1)));
    changes.extend([accepted(&task(2)), moved(&task(2), &again)]);
    changes.extend(remembered(&again));
    changes.extend([forgotten(&again), Change::Untimed { at: forget_timer(&again).at }]);
    owner.commit(changes).await;
    assert_eq!(owner.history(2).await, History::default());
    let contents = contents(&store).await;
    assert_eq!(contents.tasks, [over(&task(1))]);
    assert_eq!(contents.timers, [forget_timer(&task(1))]);
    assert_eq!(contents.histories[0].end, Some(end_record(&task(1))));
}

/// In order, the latest so many, each as it was; and they go with their task.
pub async fn the_last_tries_of_a_task_are_remembered<H: Harness>(h: &H) {
    const TRIES: u16 = 2 * TRIES_KEPT + 5;
    for remember in [false, true] {
        let store = h.fresh().await;
        let owner = Owner::new(&store).await;
        // Neighbours with tries of their own.
        let others = [1, 3].map(|n| (task(n), retried(&task(n), at(n + 10))));
        let mut last = task(2);
        owner.commit(accept_all(&[task(1), task(2), task(3)])).await;
        owner.commit(others.iter().map(|(from, to)| moved(from, to)).collect()).await;
        let mut tries: Vec<Try> = Vec::new();
        for n in 1..=TRIES {
            let (in_lane, in_timers) =
                (retried(&last, at(100 + u64::from(n))), Place::Timer(timer_at(n.into())));
            let next = if n % 2 == 0 { in_lane } else { Task { place: in_timers, ..in_lane } };
            let next = Task { place: renumbered(next.place, 100 + u64::from(n)), ..next };
            owner.commit(vec![moved(&last, &next)]).await;
            tries.push(tried(&last));
            let kept = &tries[tries.len().saturating_sub(TRIES_KEPT.into())..];
            assert_eq!(owner.history(2).await.tries, kept, "after try {n}");
            last = next;
        }
        let store = h.reopen(store).await;
        let owner = Owner::new(&store).await;
        assert_eq!(owner.history(2).await.tries, tries[tries.len() - usize::from(TRIES_KEPT)..]);
        if remember {
            owner.commit(remembered(&last).into()).await;
            assert_eq!(owner.history(2).await.tries, tries[tries.len() - usize::from(TRIES_KEPT)..]);
            owner.commit(vec![forgotten(&last)]).await;
        } else {
            owner.commit(vec![finished(&last)]).await;
        }
        assert_eq!(owner.history(2).await, History::default());
        for (from, to) in &others {
            assert_eq!(owner.task(from.id.0).await.as_ref(), Some(to));
            assert_eq!(owner.history(from.id.0).await.tries, [tried(from)]);
        }
    }
}

/// The same place with another seq: no two levels end in the same one.
fn renumbered(place: Place, seq: u64) -> Place {
    match place {
        Place::Lane(_) => Place::Lane(at(seq)),
        Place::Timer(_) => Place::Timer(timer_at(seq)),
        Place::Parked(_) => Place::Parked(level(0, seq)),
        Place::Aside | Place::Over => place,
    }
}

/// Of a task that is not there, or of another shard, nothing is known.
pub async fn a_task_that_is_not_there_has_no_history<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    owner.commit(furniture()).await;
    let known = owner.history(6).await;
    assert!(known.end.is_some() && known.tries.len() == 1 && known.replayed_as == Some(TaskId(3)));
    for id in [0, 7, (1 << 8) + 6, (1 << 32) + 6, (1 << 48) + 6, (1 << 63) + 6, u64::MAX] {
        assert_eq!(owner.history(id).await, History::default(), "of task {id}");
        assert_eq!(owner.task(id).await, None, "task {id}");
    }
    assert_eq!(Owner::of(&store, ShardId(2)).await.history(6).await, History::default());
}

/// Whoever runs it again last is remembered.
pub async fn the_latest_replay_of_a_task_is_remembered<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let (one, two) = (task(1), task(2));
    owner.commit(accept_all(&[one.clone(), two.clone()])).await;
    owner.commit([remembered(&one), remembered(&two)].concat()).await;
    for n in [3, 4, Level::LAST_SEQ] {
        let again = Task { id: TaskId(n), place: Place::Lane(at(n)), replay_of: Some(one.id), ..task(n) };
        let replayed = Change::Replayed { task: one.id, again: again.id };
        owner.commit(vec![accepted(&again), replayed]).await;
        assert_eq!(owner.history(1).await.replayed_as, Some(again.id));
        assert_eq!(owner.task(n).await, Some(again));
    }
    assert_eq!(owner.history(2).await.replayed_as, None);
    owner.commit(vec![forgotten(&one), Change::Untimed { at: forget_timer(&one).at }]).await;
    assert_eq!(contents(&store).await.tasks.len(), 4);
}

/// That somebody wants a task stopped is known to the next owner, until the task has ended, however it did.
pub async fn a_cancel_is_remembered_until_its_task_has_ended<H: Harness>(h: &H) {
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let tasks: Vec<Task> = (1..=4).map(task).collect();
    owner.commit(accept_all(&tasks)).await;
    let canceling = |n| Change::Canceling { task: TaskId(n) };
    owner.commit(vec![canceling(1), canceling(2), canceling(3), canceling(3), set_aside(&tasks[1])]).await;
    let store = h.reopen(store).await;
    let owner = Owner::new(&store).await;
    assert_eq!(owner.metadata.canceling, [1, 2, 3].map(TaskId));
    let succeeded = |task: &Task, end| stopped(task, true, Outcome::Succeeded, end);
    owner.commit(vec![ended(&tasks[0], Outcome::Canceled, None)]).await;
    assert_eq!(Owner::new(&store).await.metadata.canceling, [2, 3].map(TaskId));
    let owner = Owner::new(&store).await;
    owner.commit(vec![succeeded(&aside(&tasks[1]), None)]).await;
    assert_eq!(Owner::new(&store).await.metadata.canceling, [TaskId(3)]);
    let owner = Owner::new(&store).await;
    owner.commit(vec![succeeded(&tasks[2], Some(end_record(&tasks[2])))]).await;
    assert_eq!(Owner::new(&store).await.metadata.canceling, []);
    assert_eq!(contents(&store).await.tasks, [over(&tasks[2]), tasks[3].clone()]);
}

/// Hundreds of ends behind each other: all of them go by the range that their timers go by, and nothing else.
pub async fn many_ends_are_forgotten_together<H: Harness>(h: &H) {
    const TASKS: u64 = 500;
    let store = h.fresh().await;
    let owner = Owner::new(&store).await;
    let tasks: Vec<Task> = (1..=TASKS).map(task).collect();
    owner.commit(accept_all(&tasks)).await;
    owner.commit(tasks.iter().flat_map(remembered).collect()).await;
    let is_forget = |what: &Timed| matches!(what, Timed::Forget { .. });
    assert!(owner.timers().await.iter().all(|timer| is_forget(&timer.what)));
    let mut changes: Vec<Change> = tasks[..400].iter().map(forgotten).collect();
    changes.push(timers_acked(forget_timer(&tasks[399]).at));
    owner.commit(changes).await;
    let store = h.reopen(store).await;
    let contents = contents(&store).await;
    assert_eq!(contents.tasks, tasks[400..].iter().map(over).collect::<Vec<_>>());
    assert_eq!(contents.timers, tasks[400..].iter().map(forget_timer).collect::<Vec<_>>());
}
