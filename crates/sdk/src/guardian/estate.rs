//! What a guardian that was killed leaves behind, as its worker sees it.
//!
//! The kernel kills the main processes of its runs by their parent-death signal. What those had started is
//! handed to the next subreaper above, which is the worker.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::time::sleep;

use super::cgroup::{self, Cgroups};
use super::frames::Hello;
use super::processes::{self, Sweep};

/// Between two looks at what is left.
const LOOK: Duration = Duration::from_millis(10);
/// Between two complaints about processes that do not die.
const COMPLAIN: Duration = Duration::from_secs(10);

/// Kills all that a dead guardian left, and returns when nothing is left. The sessions are the guardian's, and those
/// that its runs may lead.
pub(super) async fn kill_estate(sessions: &[Pid], hello: &Hello) {
    let cgroups = hello.cgroups.as_ref().map(|base| Cgroups::at(OsStr::from_bytes(base).into()));
    let mut sweep = Sweep::new(&hello.marker);
    let mut ours = HashSet::new();
    let mut complained = Instant::now();
    loop {
        let mut left = 0;
        let children = processes::own_children_asked();
        let seen = children.is_ok();
        for child in children.unwrap_or_default() {
            // This process may have children of its own, which are none of the guardian's. A session's id means
            // nothing else while anybody is in it.
            let of_session = processes::session_of(child).is_some_and(|of| sessions.contains(&of));
            // In the middle of its end a process has no environment any more, but it still has its group.
            let marked = || {
                let marker = processes::marker_of(child).ok().flatten().or_else(|| cgroup::marker_of(child));
                marker.is_some_and(|marker| marker.starts_with(&hello.marker))
            };
            if !of_session && !ours.contains(&child) && !marked() {
                continue;
            }
            ours.insert(child);
            if let Some(group) = processes::group_of(child).filter(|_| of_session) {
                processes::signal_group(group, Signal::KILL);
            }
            processes::kill_child(child);
            // Reaped or not: only a look that finds nobody counts.
            processes::reap(child);
            left += 1;
        }
        let swept = sweep.is_done();
        left += sweep.pids().len();
        left += cgroups.as_ref().map_or(0, |groups| groups.sweep(&hello.marker).len());
        // Who cannot be seen is not gone.
        if left == 0 && seen && swept {
            return;
        }
        if complained.elapsed() >= COMPLAIN {
            complained = Instant::now();
            tracing::warn!("waiting for {left} processes that a dead guardian left and that do not die");
        }
        sleep(LOOK).await;
    }
}
