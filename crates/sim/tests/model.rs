//! Everything that can happen in a small world does.

use evenhand_core::canary::Bug;
use evenhand_sim::model::{Explored, Witness, World};

const MOST: usize = 3_000_000;

/// Two workers, of which one may have another life, and two owners that crash.
fn small(witness: Witness) -> World {
    World { workers: 2, tasks: 1, crashes: 2, rebirths: 1, late: false, copies: 0, witness, bug: None }
}

/// How something can go wrong, a line each.
fn story(found: Explored) -> String {
    let Some((way, what)) = found.wrong else { return format!("{} states, all well", found.states) };
    let mut lines: Vec<String> = way.iter().map(ToString::to_string).collect();
    lines.push(what);
    lines.join("\n")
}

#[test]
fn nothing_runs_twice_and_everything_can_be_run_whoever_is_believed() {
    for witness in [Witness::Workers, Witness::Saved, Witness::Both] {
        for (late, copies, tasks) in [(true, 1, 1), (false, 0, 2)] {
            let found = World { late, copies, tasks, ..small(witness) }.explore(MOST);
            println!(
                "{witness:?}, {tasks} tasks, late {late}: {} states, {} steps",
                found.states, found.steps
            );
            assert!(found.wrong.is_none(), "{witness:?}: {}", story(found));
        }
    }
}

/// A worker that is alone knows of nobody else. Another one comes and is given a task at once; after a restart the
/// first agrees with itself that nobody is missing.
#[test]
fn if_new_workers_are_not_required_first_a_task_runs_twice() {
    let world = World { bug: Some(Bug::NewWorkerNotRequired), rebirths: 0, ..small(Witness::Workers) };
    let story = story(world.explore(MOST));
    assert!(story.ends_with("t0 runs on [0, 1], done: false"), "{story}");
}

/// The same, but the first is silent when the other comes, and is not asked.
#[test]
fn if_silent_workers_are_not_asked_a_task_runs_twice() {
    let world = World { bug: Some(Bug::UnhealthyNotAsked), rebirths: 0, ..small(Witness::Workers) };
    let story = story(world.explore(MOST));
    assert!(story.contains("w0 is cut off\nw1 says hello"), "{story}");
    assert!(story.ends_with("t0 runs on [0, 1], done: false"), "{story}");
}

/// An owner that has not heard all workers yet tells those that it has that they are all.
#[test]
fn if_sets_are_told_while_the_gate_is_shut_a_task_runs_twice() {
    let world = World { bug: Some(Bug::SetToldWhileShut), rebirths: 0, ..small(Witness::Workers) };
    let story = story(world.explore(MOST));
    assert!(story.ends_with("t0 runs on [0, 1], done: false"), "{story}");
}
