//! What worker and guardian say to each other: a length of four bytes (little endian), then a protobuf
//! message. Both ends are the same executable, so there are no versions. A frame that is too long or cannot
//! be read is an error of the whole pipe; whoever reads it gives the other up.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{KillCause, Outcome, Refusal};

/// Longest frame. A payload has at most 1 MiB, and the system itself refuses commands and environments
/// above 2 MiB.
pub(super) const FRAME_BYTES: usize = 4 * 1024 * 1024;
const LENGTH_BYTES: usize = 4;
/// Room to read into: what a pipe holds by default.
const READ_BYTES: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of {0} bytes; {FRAME_BYTES} is the most")]
    TooLong(usize),
    #[error("a frame was cut off")]
    Torn,
    #[error("a frame cannot be read: {0}")]
    Garbled(#[from] prost::DecodeError),
    #[error("a frame that says nothing")]
    Empty,
    #[error(transparent)]
    Pipe(#[from] io::Error),
}

/// From the worker.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ToGuardian {
    #[prost(oneof = "Order", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub(super) order: Option<Order>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Order {
    /// The first one, once.
    #[prost(message, tag = "1")]
    Setup(Setup),
    #[prost(message, tag = "2")]
    Start(Start),
    #[prost(message, tag = "3")]
    Stop(Stop),
    #[prost(message, tag = "4")]
    Deadline(Deadline),
    /// Until when runs may be alive, in milliseconds of the boot clock.
    #[prost(uint64, tag = "5")]
    Lease(u64),
    #[prost(message, tag = "6")]
    KillAll(KillAll),
    /// The last one: the end of the pipe that follows is no death of the worker.
    #[prost(message, tag = "7")]
    Shutdown(Shutdown),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Setup {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) seat_dir: Vec<u8>,
    #[prost(string, tag = "2")]
    pub(super) seat: String,
    #[prost(bool, tag = "3")]
    pub(super) first_free: bool,
    #[prost(uint64, tag = "4")]
    pub(super) lock_wait_ms: u64,
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub(super) trampoline: Vec<Vec<u8>>,
    #[prost(bool, tag = "6")]
    pub(super) cgroups: bool,
    #[prost(bytes = "vec", tag = "7")]
    pub(super) work_dir: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Start {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub(super) command: Vec<Vec<u8>>,
    #[prost(message, repeated, tag = "3")]
    pub(super) env: Vec<Variable>,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) payload: Bytes,
    #[prost(uint64, optional, tag = "5")]
    pub(super) deadline_ms: Option<u64>,
    #[prost(uint64, tag = "6")]
    pub(super) grace_ms: u64,
    #[prost(uint64, tag = "7")]
    pub(super) stdout_limit: u64,
    #[prost(bytes = "vec", optional, tag = "8")]
    pub(super) dir: Option<Vec<u8>>,
    /// With it come descriptors: see `streams`. There is no payload then, and no output is kept.
    #[prost(message, optional, tag = "9")]
    pub(super) interactive: Option<Interactive>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Interactive {
    /// One descriptor comes, of a terminal. Otherwise three: standard input, output and error.
    #[prost(bool, tag = "1")]
    pub(super) terminal: bool,
}

impl Interactive {
    /// How many descriptors come with the order.
    pub(super) fn descriptors(self) -> usize {
        if self.terminal { 1 } else { 3 }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Variable {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) name: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Stop {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(uint64, tag = "2")]
    pub(super) grace_ms: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Deadline {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(uint64, optional, tag = "2")]
    pub(super) deadline_ms: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KillAll {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Shutdown {}

/// From the guardian.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ToWorker {
    #[prost(oneof = "Report", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub(super) report: Option<Report>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Report {
    /// The answer to the setup: the life has begun.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// Or it has not, and the guardian ends.
    #[prost(message, tag = "2")]
    Failed(Failed),
    #[prost(message, tag = "3")]
    Started(Started),
    #[prost(message, tag = "4")]
    Output(Output),
    #[prost(message, tag = "5")]
    Ended(End),
    #[prost(message, tag = "6")]
    Refused(Refused),
    /// The lease until then was over, and all runs were sent SIGKILL.
    #[prost(uint64, tag = "7")]
    LeaseOver(u64),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Hello {
    #[prost(string, tag = "1")]
    pub(super) seat: String,
    #[prost(uint64, tag = "2")]
    pub(super) token: u64,
    #[prost(uint64, tag = "3")]
    pub(super) life: u64,
    /// What the markers of all runs of this life begin with.
    #[prost(string, tag = "4")]
    pub(super) marker: String,
    /// Where the runs' control groups are, if they have any.
    #[prost(bytes = "vec", optional, tag = "5")]
    pub(super) cgroups: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Failed {
    #[prost(oneof = "Failure", tags = "1, 2, 3, 4")]
    pub(super) failure: Option<Failure>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Failure {
    #[prost(message, tag = "1")]
    InUse(InUse),
    #[prost(string, tag = "2")]
    NoSeatFree(String),
    #[prost(message, tag = "3")]
    Leftovers(Leftovers),
    #[prost(string, tag = "4")]
    Other(String),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct InUse {
    #[prost(string, tag = "1")]
    pub(super) seat: String,
    #[prost(uint32, optional, tag = "2")]
    pub(super) pid: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Leftovers {
    #[prost(string, tag = "1")]
    pub(super) seat: String,
    #[prost(uint32, repeated, tag = "2")]
    pub(super) pids: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Started {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(int32, tag = "2")]
    pub(super) pid: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Output {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) line: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct End {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(oneof = "Outcome", tags = "2, 3, 4")]
    pub(super) outcome: Option<Outcome>,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) stdout: Bytes,
    #[prost(bool, tag = "6")]
    pub(super) stdout_cut: bool,
    #[prost(uint64, tag = "7")]
    pub(super) lines_dropped: u64,
    #[prost(enumeration = "KillCause", optional, tag = "8")]
    pub(super) killed: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Refused {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(enumeration = "Refusal", tag = "2")]
    pub(super) why: i32,
}

/// A message as a frame.
pub(super) fn encode<M: Message>(message: &M) -> Result<Bytes, FrameError> {
    let length = message.encoded_len();
    let Some(prefix) = u32::try_from(length).ok().filter(|_| length <= FRAME_BYTES) else {
        return Err(FrameError::TooLong(length));
    };
    let mut frame = BytesMut::with_capacity(LENGTH_BYTES + length);
    frame.put_u32_le(prefix);
    message.encode(&mut frame).map_err(|_| FrameError::TooLong(length))?;
    Ok(frame.freeze())
}

/// Frames from a pipe. What was read of the next one is kept here, so waiting for it may be given up and
/// taken up again.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    pipe: R,
    read: BytesMut,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(pipe: R) -> Self {
        FrameReader { pipe, read: BytesMut::new() }
    }

    /// Where the frames come from.
    pub(super) fn pipe(&mut self) -> &mut R {
        &mut self.pipe
    }

    /// The next message; none at the end of the pipe.
    pub(super) async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, FrameError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            self.read.reserve(READ_BYTES);
            if self.pipe.read_buf(&mut self.read).await? == 0 {
                return if self.read.is_empty() { Ok(None) } else { Err(FrameError::Torn) };
            }
        }
    }

    fn take<M: Message + Default>(&mut self) -> Result<Option<M>, FrameError> {
        let Some(prefix) = self.read.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > FRAME_BYTES {
            return Err(FrameError::TooLong(length));
        }
        // Decoded from a slice, so that what is kept of it is a copy and does not hold on to the buffer.
        let Some(body) = self.read.get(LENGTH_BYTES..LENGTH_BYTES + length) else { return Ok(None) };
        let message = M::decode(body)?;
        self.read.advance(LENGTH_BYTES + length);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8]) -> Result<Option<ToGuardian>, FrameError> {
        FrameReader::new(bytes).next().await
    }

    #[tokio::test]
    async fn what_is_written_is_read() {
        let orders = [Order::Lease(7), Order::Stop(Stop { id: 1, grace_ms: 2 }), Order::KillAll(KillAll {})];
        let mut pipe = Vec::new();
        for order in &orders {
            pipe.extend(encode(&ToGuardian { order: Some(order.clone()) }).unwrap());
        }
        let mut reader = FrameReader::new(pipe.as_slice());
        for order in orders {
            assert_eq!(reader.next::<ToGuardian>().await.unwrap().unwrap().order, Some(order));
        }
        assert!(reader.next::<ToGuardian>().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_malformed_frame_is_an_error() {
        assert!(read(b"").await.unwrap().is_none());
        assert!(matches!(read(&[1]).await, Err(FrameError::Torn)));
        assert!(matches!(read(&[2, 0, 0, 0, 8]).await, Err(FrameError::Torn)));
        assert!(matches!(read(&[0xff; 16]).await, Err(FrameError::TooLong(_))));
        assert!(matches!(read(&[2, 0, 0, 0, 0xff, 0xff]).await, Err(FrameError::Garbled(_))));
    }

    #[test]
    fn a_frame_that_is_too_long_is_not_written() {
        let payload = Bytes::from(vec![0; FRAME_BYTES]);
        let order = Some(Order::Start(Start { payload, ..Start::default() }));
        assert!(matches!(encode(&ToGuardian { order }), Err(FrameError::TooLong(_))));
    }
}
