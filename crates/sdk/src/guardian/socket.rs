//! The way of orders, from worker to guardian: a socket, so that descriptors can go with an order. They arrive no
//! later than the first byte of the frame that they were sent with, and in the order of the frames; so whoever has read
//! a frame finds its descriptors first in the queue.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::fs::{FileType, fstat};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::{AsyncRead, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::UnixStream;

/// Descriptors that come with one order at most.
pub(super) const DESCRIPTORS: usize = 3;
/// Descriptors that may wait for their frames to be read; more is nonsense. What is read at once holds a few orders.
const WAITING: usize = 1_024;

/// An order, with what goes with it.
#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) frame: bytes::Bytes,
    /// At most [`DESCRIPTORS`].
    pub(super) descriptors: Vec<OwnedFd>,
}

impl From<bytes::Bytes> for Parcel {
    fn from(frame: bytes::Bytes) -> Parcel {
        Parcel { frame, descriptors: Vec::new() }
    }
}

/// Writes a parcel. Its descriptors are closed on this side then.
pub(super) async fn write(socket: &mut UnixStream, parcel: Parcel) -> io::Result<()> {
    let Parcel { frame, descriptors } = parcel;
    let mut sent = 0;
    if !descriptors.is_empty() {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
                return Err(io::Error::other("too many descriptors for one order"));
            }
            Ok(sendmsg(&*socket, &[IoSlice::new(&frame)], &mut control, SendFlags::NOSIGNAL)?)
        };
        sent = socket.async_io(Interest::WRITABLE, send).await?;
    }
    socket.write_all(&frame[sent..]).await
}

/// The guardian's end.
#[derive(Debug)]
pub(super) struct Orders {
    socket: UnixStream,
    descriptors: VecDeque<OwnedFd>,
}

impl Orders {
    /// Reads from this socket. Anything else is an error.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Orders> {
        if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::Socket {
            return Err(io::Error::other("not a socket"));
        }
        let socket = std::os::unix::net::UnixStream::from(fd);
        socket.set_nonblocking(true)?;
        Ok(Orders { socket: UnixStream::from_std(socket)?, descriptors: VecDeque::new() })
    }

    /// The descriptors that came with the frame that was just read, so many.
    pub(super) fn take(&mut self, count: usize) -> Option<Vec<OwnedFd>> {
        (self.descriptors.len() >= count).then(|| self.descriptors.drain(..count).collect())
    }
}

impl AsyncRead for Orders {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Orders { socket, descriptors } = self.get_mut();
        loop {
            ready!(socket.poll_read_ready(context))?;
            let receive = || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let room = buffer.initialize_unfilled();
                let flags = RecvFlags::CMSG_CLOEXEC;
                let read = recvmsg(&*socket, &mut [IoSliceMut::new(room)], &mut control, flags)?;
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(came) = message {
                        descriptors.extend(came);
                    }
                }
                if read.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > WAITING {
                    return Err(io::Error::other("descriptors that nobody asked for"));
                }
                Ok(read.bytes)
            };
            match socket.try_io(Interest::READABLE, receive) {
                Ok(bytes) => {
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use bytes::Bytes;

    use super::super::frames::{FrameReader, Interactive, Order, Start, ToGuardian, encode};
    use super::*;

    #[tokio::test]
    async fn descriptors_arrive_with_the_orders_that_they_were_sent_with() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs.into_std().unwrap());
        let mut orders = FrameReader::new(Orders::new(theirs).unwrap());
        let large = Bytes::from(vec![7; 1024 * 1024]);
        let writing = tokio::spawn(async move {
            let mut readers = Vec::new();
            for id in 0..20 {
                // Now and then an order without any, and one that does not fit into the socket.
                let interactive = (id % 3 > 0).then_some(Interactive { terminal: id % 3 == 1 });
                let payload = if id % 5 == 0 { large.clone() } else { Bytes::new() };
                let order = Some(Order::Start(Start { id, interactive, payload, ..Start::default() }));
                let frame = encode(&ToGuardian { order }).unwrap();
                let mut descriptors = Vec::new();
                for _ in 0..interactive.map_or(0, Interactive::descriptors) {
                    let (reader, writer) = io::pipe().unwrap();
                    readers.push((id, reader));
                    descriptors.push(writer.into());
                }
                write(&mut ours, Parcel { frame, descriptors }).await.unwrap();
            }
            readers
        });
        while let Some(message) = orders.next::<ToGuardian>().await.unwrap() {
            let Some(Order::Start(start)) = message.order else { panic!() };
            let count = start.interactive.map_or(0, Interactive::descriptors);
            for descriptor in orders.pipe().take(count).unwrap() {
                std::fs::File::from(descriptor).write_all(&[start.id as u8]).unwrap();
            }
        }
        assert!(orders.pipe().take(1).is_none());
        let readers = writing.await.unwrap();
        assert_eq!(readers.len(), 25);
        for (id, mut reader) in readers {
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            assert_eq!(read, [id as u8], "and no copy of it is left open on either side");
        }
    }

    #[tokio::test]
    async fn only_a_socket_will_do() {
        assert!(Orders::new(io::pipe().unwrap().0.into()).is_err());
        assert!(Orders::new(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }
}
