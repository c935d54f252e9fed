//! Which of the guardian's children belong to which run.
//!
//! Beside the main processes of runs, the guardian's children are orphans: processes of runs whose own
//! parents have died. When a run's main process is reaped, all that is left of the run is below orphans of
//! it, and when such an orphan dies its children become orphans. So killing and reaping a run's orphans until
//! there are none ends the run, whatever its processes did: forked, called setsid, or closed their pipes.
//! There is no race in it: children are handed to the guardian before their parent can be reaped.
//!
//! An orphan says whose it is by its process group, its control group, or the marker in its environment. A
//! process can get rid of all three. One that cannot be told to be of a run that is alive is killed when a run
//! that is as old or older ends: rather too many than a task that runs twice.

use std::collections::{BTreeMap, HashSet};

use rustix::process::Pid;

use super::run::{Phase, Run};
use super::{cgroup, processes};

/// A process shows no environment in the moment of exec. So one that is of no run is looked at twice, so
/// many milliseconds apart.
const SECOND_LOOK_MS: u64 = 100;
/// Nor does one that forks and ends all the time wait for a second look. After so long the first is enough.
const ONE_LOOK_MS: u64 = 500;
/// Most looks at the children in one go.
const LOOKS: usize = 100;

/// Reaps all orphans that are dead and kills those of runs that are leaving. The runs of which nothing is
/// left.
pub(super) fn settle(runs: &mut BTreeMap<u64, Run>, now_ms: u64) -> Vec<u64> {
    for _ in 0..LOOKS {
        let mains: HashSet<Pid> =
            runs.values().filter(|run| run.phase == Phase::Alive).map(|run| run.pid).collect();
        // Who cannot be seen is not gone.
        let Ok(mut orphans) = processes::own_children() else { return Vec::new() };
        orphans.retain(|child| !mains.contains(child));
        let count = orphans.len();
        orphans.retain(|&orphan| processes::reap(orphan).is_none());
        let reaped = orphans.len() < count;
        let mut lefts: HashSet<u64> =
            runs.values().filter(|run| matches!(run.phase, Phase::Leaving(_))).map(|run| run.id).collect();
        if !lefts.is_empty() {
            for orphan in orphans {
                for id in settle_one(runs, orphan, now_ms) {
                    lefts.remove(&id);
                }
            }
        }
        // What was reaped may have left children to us after the list was read.
        if !reaped {
            return lefts.into_iter().collect();
        }
    }
    Vec::new()
}

/// Kills a living orphan if it must not live. The leaving runs that it may be of.
fn settle_one(runs: &mut BTreeMap<u64, Run>, orphan: Pid, now_ms: u64) -> Vec<u64> {
    match owner(runs, orphan) {
        Some(id) => {
            let leaving = runs.get(&id).is_some_and(|run| run.phase != Phase::Alive);
            if leaving {
                processes::kill_child(orphan);
            }
            if leaving { vec![id] } else { Vec::new() }
        }
        None => {
            let started = processes::started_at(orphan).unwrap_or(u64::MAX);
            let others = runs.values().any(|run| run.phase == Phase::Alive);
            let mut of = Vec::new();
            for run in runs.values_mut() {
                if matches!(run.phase, Phase::Leaving(_)) && run.since <= started {
                    let since_ms = run.suspects.values().copied().min().unwrap_or(now_ms);
                    let first_ms = *run.suspects.entry(orphan).or_insert(now_ms);
                    let sure = first_ms + SECOND_LOOK_MS <= now_ms || since_ms + ONE_LOOK_MS <= now_ms;
                    if sure || !others {
                        processes::kill_child(orphan);
                    }
                    of.push(run.id);
                }
            }
            of
        }
    }
}

/// The run that an orphan can be told to be of.
fn owner(runs: &BTreeMap<u64, Run>, orphan: Pid) -> Option<u64> {
    // A group's id stays its own while the group has a member, and the orphan is one. But if it is the group
    // of a run that is alive, an earlier run's group of the same id was empty.
    let group = processes::group_of(orphan);
    let grouped = || runs.values().filter(|run| Some(run.pid) == group);
    let alive = grouped().find(|run| run.phase == Phase::Alive);
    if let Some(run) = alive.or_else(|| grouped().find(|run| matches!(run.phase, Phase::Leaving(_)))) {
        return Some(run.id);
    }
    let by = |marker: Option<String>| {
        marker.and_then(|marker| runs.values().find(|run| run.marker == marker)).map(|run| run.id)
    };
    by(cgroup::marker_of(orphan)).or_else(|| by(processes::marker_of(orphan).ok().flatten()))
}
