//! The conformance suite, once with everything in the log and in memory, once with a log so small that
//! nearly every commit makes tables and merges run all the time.

use std::sync::Mutex;

use evenhand_store::Embedded;
use evenhand_store::conformance::{self, Harness};
use tempfile::TempDir;

use crate::support::{block_on, small};

struct OnDisk {
    segment: u64,
    dirs: Mutex<Vec<TempDir>>,
}

fn on_disk(segment: u64) -> OnDisk {
    OnDisk { segment, dirs: Mutex::default() }
}

impl Harness for OnDisk {
    type Store = Embedded;

    async fn fresh(&self) -> Embedded {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(dir.path(), small(self.segment)).unwrap();
        self.dirs.lock().unwrap().push(dir);
        store
    }

    async fn reopen(&self, store: Embedded) -> Embedded {
        let dir = store.dir().to_path_buf();
        drop(store);
        Embedded::open(dir, small(self.segment)).unwrap()
    }
}

mod with_a_large_log {
    use super::*;

    conformance::suite!(on_disk(8 << 20), block_on);
}

mod with_a_tiny_log {
    use super::*;

    conformance::suite!(on_disk(4 << 10), block_on);
}
