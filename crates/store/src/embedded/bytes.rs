//! Bytes in files: how numbers are written and read back, the checksum, and [`Value`], a piece of a buffer
//! that several owners share (a commit's frame, a table's block), so that values are never copied between
//! the log, memory and the tables.

use std::sync::Arc;

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

/// What numbers and texts look like on disk: little-endian, texts after their length.
pub(super) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, n: u8) {
        self.put(&[n]);
    }
    fn put_u16(&mut self, n: u16) {
        self.put(&n.to_le_bytes());
    }
    fn put_u32(&mut self, n: u32) {
        self.put(&n.to_le_bytes());
    }
    fn put_u64(&mut self, n: u64) {
        self.put(&n.to_le_bytes());
    }
    fn put_u128(&mut self, n: u128) {
        self.put(&n.to_le_bytes());
    }
    fn put_text(&mut self, text: &str) {
        self.put_u16(text.len() as u16);
        self.put(text.as_bytes());
    }
    /// A number that is mostly small, in seven bits a byte.
    fn put_short(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.put_u8(n as u8 | 0x80);
            n >>= 7;
        }
        self.put_u8(n as u8);
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Reads what [`Put`] wrote. None when there is not enough left: the caller knows file and place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Get<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Get<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Get<'a> {
        Get { bytes, at: 0 }
    }

    pub(super) fn from(bytes: &'a [u8], at: usize) -> Get<'a> {
        Get { bytes, at }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn is_done(&self) -> bool {
        self.at >= self.bytes.len()
    }

    pub(super) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(n)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }
    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub(super) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }
    pub(super) fn text(&mut self) -> Option<&'a str> {
        let len = self.u16()?;
        std::str::from_utf8(self.take(len.into())?).ok()
    }
    pub(super) fn short(&mut self) -> Option<u64> {
        let mut n = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(n);
            }
        }
        None
    }
}
