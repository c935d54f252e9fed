//! A control group for each run, where that is possible: cgroup v2 is mounted, and we may make groups below
//! our own. The kernel then kills a run's processes in one stroke, however they hide. Where it is not
//! possible, runs do without: see `orphans` for what holds then.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

/// What the names of the groups begin with; the run's marker follows.
const NAME: &str = "evenhand-";

/// The group below which those of runs are made: our own.
#[derive(Clone, Debug)]
pub(super) struct Cgroups {
    base: PathBuf,
}

/// The group of one run.
#[derive(Debug)]
pub(super) struct RunCgroup {
    pub(super) dir: PathBuf,
}

impl Cgroups {
    /// Looks where ours is.
    pub(super) fn find() -> Option<Cgroups> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        base(&mounts, &own).map(Cgroups::at)
    }

    /// Where somebody else found it.
    pub(super) fn at(base: PathBuf) -> Cgroups {
        Cgroups { base }
    }

    pub(super) fn base(&self) -> &Path {
        &self.base
    }

    /// Makes the group of a run. None if that is not possible, or a group cannot be killed (Linux 5.14).
    pub(super) fn make(&self, marker: &str) -> Option<RunCgroup> {
        let group = RunCgroup { dir: self.base.join(format!("{NAME}{marker}")) };
        if let Err(error) = fs::create_dir(&group.dir) {
            tracing::debug!("runs go without control groups: {}: {error}", group.dir.display());
            return None;
        }
        if !group.dir.join("cgroup.kill").exists() {
            tracing::debug!("runs go without control groups: this kernel cannot kill them");
            group.remove();
            return None;
        }
        Some(group)
    }

    /// Kills and removes every group whose marker begins with `prefix`. The processes that are still in one.
    pub(super) fn sweep(&self, prefix: &str) -> BTreeSet<u32> {
        let Ok(entries) = fs::read_dir(&self.base) else { return BTreeSet::new() };
        let begin = format!("{NAME}{prefix}");
        let ours = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&begin));
        let mut left = BTreeSet::new();
        for group in ours.map(|entry| RunCgroup { dir: entry.path() }) {
            group.kill();
            if group.is_empty() {
                group.remove();
            } else {
                let pids = fs::read_to_string(group.dir.join("cgroup.procs")).unwrap_or_default();
                // At least one, 0, if they are out of our sight.
                left.extend(pids.lines().filter_map(|pid| pid.parse::<u32>().ok()));
                left.extend(pids.trim().is_empty().then_some(0));
            }
        }
        left
    }
}

impl RunCgroup {
    /// SIGKILL to all in it, and to what they start meanwhile.
    pub(super) fn kill(&self) {
        let _ = fs::write(self.dir.join("cgroup.kill"), "1");
    }

    /// Whether no living process is in it, nor below.
    pub(super) fn is_empty(&self) -> bool {
        match fs::read_to_string(self.dir.join("cgroup.events")) {
            Ok(events) => events.lines().any(|line| line == "populated 0"),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Removes it, with those that a task made below. If that fails, the seat's next life tries again.
    pub(super) fn remove(&self) {
        remove(&self.dir);
    }
}

fn remove(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

/// Puts this process into a group. Without success it stays where it is, and is found by other means.
pub(super) fn join(dir: &Path) {
    let _ = fs::write(dir.join("cgroup.procs"), "0");
}

/// The marker of the run in whose group a process is.
pub(super) fn marker_of(pid: Pid) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero())).ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    group.split('/').find_map(|part| part.strip_prefix(NAME)).map(str::to_owned)
}

/// Our own group's directory, from what /proc says about mounts and about us.
fn base(mounts: &str, own: &str) -> Option<PathBuf> {
    let own = Path::new(own.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let below = own.strip_prefix(root).ok().filter(|_| kind.starts_with("cgroup2 "))?;
        let plain = below.components().all(|part| part != std::path::Component::ParentDir);
        plain.then(|| Path::new(point).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_group_is_found_where_it_is_mounted() {
        let v2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        let hybrid = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw\n";
        let bound = "41 31 0:38 /a /mnt rw,relatime - cgroup2 cgroup2 rw\n";
        let found = |mounts, own| base(mounts, own).map(|path| path.display().to_string());
        assert_eq!(found(v2, "0::/user.slice/x\n").as_deref(), Some("/sys/fs/cgroup/user.slice/x"));
        assert_eq!(found(hybrid, "1:cpu:/\n0::/\n").as_deref(), Some("/sys/fs/cgroup/unified/"));
        assert_eq!(found(bound, "0::/a/b\n").as_deref(), Some("/mnt/b"));
        assert_eq!(found(bound, "0::/c\n"), None);
        assert_eq!(found(v2, "0::/../c\n"), None);
        assert_eq!(found(v2, "1:cpu:/\n"), None);
    }
}
