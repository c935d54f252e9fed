//! Numbers and texts as bytes, for every store that keeps records of its own making: how they are written and read
//! back.

/// What numbers and texts look like on disk: little-endian, texts after their length.
pub(crate) trait Put {
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
pub(crate) struct Get<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Get<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Get<'a> {
        Get { bytes, at: 0 }
    }

    pub(crate) fn from(bytes: &'a [u8], at: usize) -> Get<'a> {
        Get { bytes, at }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn is_done(&self) -> bool {
        self.at >= self.bytes.len()
    }

    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(n)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub(crate) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }
    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let len = self.u16()?;
        std::str::from_utf8(self.take(len.into())?).ok()
    }
    pub(crate) fn short(&mut self) -> Option<u64> {
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
