//! A disk that fills up. These tests mount small disks, so they run as root.

use std::path::{Path, PathBuf};
use std::process::Command;

use evenhand::{Kind, NewTask, Refusal, TaskState};
use tempfile::TempDir;

use crate::checker::{all_is_well, await_start, ran_exactly_once};
use crate::support::{Api, LONG, Server, Signpost, block_on, eventually, eventually_some, task};

const MIB: u64 = 1024 * 1024;

/// A file system of this size; it goes when it is dropped.
pub(crate) struct Disk {
    path: PathBuf,
}

impl Disk {
    pub(crate) fn new(path: &Path, mib: u64) -> Disk {
        std::fs::create_dir_all(path).unwrap();
        let size = format!("size={}", mib * MIB);
        let said =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(path).output().unwrap();
        let why = String::from_utf8_lossy(&said.stderr);
        assert!(said.status.success(), "mount: {why}. These tests need a small disk; run them as root");
        Disk { path: path.into() }
    }

    /// Takes room away until only so many bytes are left.
    fn fill(&self, leave: u64) {
        let stat = rustix::fs::statvfs(&self.path).unwrap();
        let take = (stat.f_bavail * stat.f_frsize).saturating_sub(leave);
        let name = format!("ballast-{}", std::fs::read_dir(&self.path).unwrap().count());
        let ballast = std::fs::File::create(self.path.join(name)).unwrap();
        // Until nothing fits any more, if the store takes some of it meanwhile.
        let _ = rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, take);
    }

    fn free(&self) {
        for entry in std::fs::read_dir(&self.path).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("ballast") {
                std::fs::remove_file(path).unwrap();
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily, so that it also goes when a failed test has left files open.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

fn on_a_small_disk(mib: u64, floor: &str) -> (Disk, Server) {
    let dir = TempDir::new().unwrap();
    let mount = dir.path().join("disk");
    let disk = Disk::new(&mount, mib);
    let server = Server::on(dir, mount.join("data"), LONG, &["--floor", floor]);
    (disk, server)
}

/// Sends requests until one is refused because there is no room. One whose outcome is not known is sent again.
fn until_refused(api: &Api, tasks: impl Fn(usize) -> Vec<NewTask>) -> (Vec<String>, Refusal) {
    let mut accepted = Vec::new();
    for request in 0.. {
        let name = format!("request-{request}");
        let refused = eventually_some("a request is answered", || {
            let hasty = api.hasty();
            match block_on(hasty.client.enqueue_once("q", tasks(request), name.clone())) {
                Ok(enqueued) => {
                    accepted.extend(enqueued.ids);
                    Some(None)
                }
                Err(refusal) if refusal.kind == Kind::Unavailable => None,
                Err(refusal) => Some(Some(refusal)),
            }
        });
        if let Some(refusal) = refused {
            assert_eq!(refusal.kind, Kind::Limited, "{refusal}");
            return (accepted, refusal);
        }
    }
    unreachable!("requests are refused some time")
}

#[test]
fn below_the_floor_nothing_is_accepted_and_what_runs_goes_on() {
    let (disk, server) = on_a_small_disk(256, "64");
    let _worker = server.worker("one", 4);
    let api = server.api();
    let go = Signpost::new(&server);
    let mut accepted = api.submit_all("q", vec![go.until().as_str(); 6]);
    accepted[..4].iter().for_each(|id| await_start(&server, id));
    disk.fill(32 * MIB);
    let (more, refused) = until_refused(&api, |_| vec![task("sleep 1")]);
    accepted.extend(more);
    assert!(refused.retry_after_ms.is_some(), "{refused}");
    let said = server.cli(&["submit", "q", "sleep 1"]);
    assert_eq!(said.code, 5, "{said:?}");
    let status = server.cli(&["status"]);
    assert!(status.out.contains("NO ROOM"), "{status:?}");
    assert_eq!(server.metric("evenhand_room"), 0.0);
    // What was accepted ends, also what waited.
    go.raise();
    for id in &accepted {
        assert_eq!(api.end(id).state(), TaskState::Succeeded);
    }
    disk.free();
    eventually("there is room", || api.shard().room);
    accepted.extend(api.submit_all("q", ["sleep 1"]));
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
}

/// Has clients fill the disk until they are refused; what was accepted.
fn filled_by_clients(api: &Api) -> Vec<String> {
    let payload = |n: usize| {
        let mut bytes = format!("sleep {} ", n % 2).into_bytes();
        bytes.resize(100_000, b' ');
        NewTask::new(bytes)
    };
    let (accepted, _) = until_refused(api, |request| {
        assert!(request < 300, "600 MB fit on a small disk");
        (0..20).map(payload).collect()
    });
    assert_eq!(api.queue("q").accepted as usize, accepted.len());
    accepted
}

#[test]
fn what_has_ended_makes_room_for_what_comes() {
    let (_disk, server) = on_a_small_disk(384, "128");
    let api = server.api();
    let mut accepted = filled_by_clients(&api);
    let _worker = server.worker("one", 8);
    all_is_well(&server, &accepted);
    eventually("there is room", || api.shard().room);
    accepted.push(api.submit("sleep 1"));
    all_is_well(&server, &accepted);
}

#[test]
fn a_server_whose_clients_filled_the_disk_starts_again() {
    let (_disk, mut server) = on_a_small_disk(256, "64");
    let api = server.api();
    let accepted = filled_by_clients(&api);
    for _ in 0..3 {
        server.kill();
        server.restart();
        assert_eq!(api.queue("q").waiting as usize, accepted.len());
    }
    let _worker = server.worker("one", 8);
    all_is_well(&server, &accepted);
}

#[test]
fn a_disk_that_is_full_to_the_last_byte_loses_nothing_that_was_accepted() {
    let (disk, server) = on_a_small_disk(256, "32");
    let mut worker = server.worker("one", 8);
    let api = server.api();
    let go = Signpost::new(&server);
    let mut accepted = api.submit_all("q", vec![go.until().as_str(); 8]);
    accepted.iter().for_each(|id| await_start(&server, id));
    disk.fill(0);
    // Whether it is accepted is not known, so it is sent again until it is.
    let doubtful = vec![NewTask::new(vec![b' '; 500_000])];
    let sent = block_on(api.hasty().client.enqueue_once("q", doubtful.clone(), "doubtful".into()));
    go.raise();
    eventually("all have ended", || {
        crate::checker::records(&server).iter().filter(|record| record.what == "end").count() >= 8
    });
    assert!(server.page("/healthz").contains("200"));
    disk.free();
    eventually("there is room", || api.hasty().client_shard().is_some_and(|shard| shard.room));
    let doubtful = api.enqueue_once("q", &doubtful, "doubtful").ids;
    assert!(sent.is_err() || sent.is_ok_and(|sent| sent.ids == doubtful));
    accepted.extend(doubtful);
    accepted.extend(api.submit_all("q", ["sleep 1"]));
    all_is_well(&server, &accepted);
    ran_exactly_once(&server, &accepted);
    assert!(worker.has_ended().is_none(), "{}", worker.said());
}
