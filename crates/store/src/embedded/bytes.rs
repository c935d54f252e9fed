//! Bytes in files: the checksum, and [`Value`], a piece of a buffer that several owners share (a commit's frame, a
//! table's block), so that values are never copied between the log, memory and the tables. How numbers are written
//! and read back is the same for all stores: [`Put`] and [`Get`].

use std::sync::Arc;

pub(super) use crate::bytes::{Get, Put};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The checksum of everything on disk: fast enough to be checked on every read.
pub(super) fn checksum(seed: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

/// A piece of a shared buffer.
#[derive(Clone)]
pub(super) struct Value {
    buffer: Arc<Vec<u8>>,
    start: u32,
    end: u32,
}

impl Value {
    pub(super) fn new(buffer: &Arc<Vec<u8>>, start: usize, end: usize) -> Value {
        debug_assert!(start <= end && end <= buffer.len());
        Value { buffer: buffer.clone(), start: start as u32, end: end as u32 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start as usize..self.end as usize]
    }
}

impl std::fmt::Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.end - self.start)
    }
}
