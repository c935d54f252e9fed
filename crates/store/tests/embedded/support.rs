//! Scratch directories, stores in them, and tasks to put there.

use std::future::Future;

use evenhand_store::embedded::Options;

/// Runs a future to its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Options for small tests: a log of this size, and no floor.
pub(crate) fn small(segment: u64) -> Options {
    Options { segment, floor: 0 }
}
