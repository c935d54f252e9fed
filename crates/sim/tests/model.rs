//! Everything that can happen in a small world does.

use evenhand_core::canary::Bug;
use evenhand_sim::model::{Explored, Witness, World};

const MOST: usize = 10_000_000;

/// Three workers, of which one may have another life, two tasks, two owners that crash, and on every link one message that
/// is late and one that comes twice.
fn required(witness: Witness) -> World {
    World {
        workers: 3,
        tasks: 2,
        crashes: 2,
        rebirths: 1,
        late: true,
        twice: true,
        turnover: false,
        witness,
        bug: None,
    }
}

/// Two workers that do not die, and messages that arrive at once or are lost: enough to do harm, if a rule is missing.
fn with(bug: Bug) -> World {
    let required = required(Witness::Workers);
    World { workers: 2, tasks: 1, rebirths: 0, late: false, twice: false, bug: Some(bug), ..required }
}

fn check(world: World) {
    let found = world.explore(MOST);
    println!("{world:?}: {} states, {} steps", found.states, found.steps);
    assert!(found.wrong.is_none(), "{world:?}: {}", story(found));
}

/// How something can go wrong, a line each.
fn story(found: Explored) -> String {
    let Some((way, what)) = found.wrong else { return format!("{} states, all well", found.states) };
    let mut lines: Vec<String> = way.iter().map(ToString::to_string).collect();
    lines.push(what);
    lines.join("\n")
}

#[test]
fn nothing_runs_twice_and_everything_can_be_run_if_workers_are_believed() {
    check(required(Witness::Workers));
}

#[test]
fn nothing_runs_twice_and_everything_can_be_run_if_the_saved_set_is_believed() {
    check(required(Witness::Saved));
}

#[test]
fn nothing_runs_twice_and_everything_can_be_run_if_either_is_believed() {
    check(required(Witness::Both));
}

/// Joins that are put off, which needs no second task.
#[test]
fn nothing_runs_twice_and_everything_can_be_run_if_new_workers_are_queued() {
    for witness in [Witness::Workers, Witness::Saved, Witness::Both] {
        check(World { tasks: 1, late: false, twice: false, turnover: true, ..required(witness) });
    }
}

#[test]
fn states_that_count_as_one_are_alike() {
    for witness in [Witness::Workers, Witness::Saved, Witness::Both] {
        for (workers, tasks) in [(2, 1), (3, 2)] {
            let world = World { workers, tasks, turnover: true, ..required(witness) };
            let (states, left) = world.compare(100_000).unwrap_or_else(|what| panic!("{what}"));
            println!("{world:?}: {states} states, {left} left");
        }
    }
}

/// A worker that is alone knows of nobody else. Another one comes and is given a task at once; after a restart the
/// first agrees with itself that nobody is missing.
#[test]
fn if_new_workers_are_not_required_first_a_task_runs_twice() {
    let story = story(with(Bug::NewWorkerNotRequired).explore(MOST));
    assert!(story.ends_with("t0 runs on [0, 1], done: false"), "{story}");
}

/// The same, but the first is silent when the other comes, and is not asked.
#[test]
fn if_silent_workers_are_not_asked_a_task_runs_twice() {
    let story = story(with(Bug::UnhealthyNotAsked).explore(MOST));
    assert!(story.contains("w0 is cut off\nw1 says hello"), "{story}");
    assert!(story.ends_with("t0 runs on [0, 1], done: false"), "{story}");
}

/// An owner that has not heard all workers yet tells those that it has that they are all.
#[test]
fn if_sets_are_told_while_the_gate_is_shut_a_task_runs_twice() {
    let story = story(with(Bug::SetToldWhileShut).explore(MOST));
    assert!(story.ends_with("t0 runs on [0, 1], done: false"), "{story}");
}
