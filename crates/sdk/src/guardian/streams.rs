//! The streams of an interactive run. The worker makes them and keeps one end of each; the other ends go to the
//! guardian with the order to start, and from there to the command. So the guardian is not in the way of the bytes, and
//! nothing of them gathers in it: a command that writes more than is read waits at its pipe, as it would anywhere.
//!
//! Without a terminal there are three pipes. With one there is a pseudo-terminal, which the command has as its standard
//! input, output and error, and which controls its session.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;

/// What ends the input of a terminal: Ctrl-D.
const END_OF_INPUT: u8 = 4;

/// A terminal that a run is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// How many rows it shows.
    pub rows: u16,
    /// How many columns.
    pub cols: u16,
    /// What it understands: `TERM` of the command. Empty: nobody said.
    pub term: String,
}

/// The worker's ends of an interactive run's streams. Dropped, the command finds the end of its input, and nobody who
/// reads; if it has a terminal, that hangs up.
#[derive(Debug)]
pub struct Streams {
    /// What the command reads.
    pub input: Inlet,
    /// What it writes. With a terminal that is all there is.
    pub stdout: Outlet,
    /// What it writes to standard error, if it has no terminal.
    pub stderr: Option<Outlet>,
}

/// A way into a command.
#[derive(Debug)]
pub struct Inlet(Way<pipe::Sender>);

/// A way out of a command.
#[derive(Debug)]
pub struct Outlet(Way<pipe::Receiver>);

#[derive(Debug)]
enum Way<P> {
    Pipe(P),
    Terminal(Arc<AsyncFd<OwnedFd>>),
    Closed,
}

impl Streams {
    /// Makes them, and the ends that the command is to have.
    pub(super) fn open(terminal: Option<&Terminal>) -> io::Result<(Streams, Vec<OwnedFd>)> {
        match terminal {
            Some(terminal) => Streams::terminal(terminal),
            None => Streams::pipes(),
        }
    }

    fn pipes() -> io::Result<(Streams, Vec<OwnedFd>)> {
        let (stdin, input) = io::pipe()?;
        let (stdout, out) = io::pipe()?;
        let (stderr, err) = io::pipe()?;
        let outlet = |fd: io::PipeReader| -> io::Result<Outlet> {
            Ok(Outlet(Way::Pipe(pipe::Receiver::from_owned_fd(fd.into())?)))
        };
        let input = Inlet(Way::Pipe(pipe::Sender::from_owned_fd(input.into())?));
        let streams = Streams { input, stdout: outlet(stdout)?, stderr: Some(outlet(stderr)?) };
        Ok((streams, vec![stdin.into(), out.into(), err.into()]))
    }

    fn terminal(terminal: &Terminal) -> io::Result<(Streams, Vec<OwnedFd>)> {
        // Neither end becomes the terminal of this process, nor of what it starts.
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags)?;
        unlockpt(&ours)?;
        let theirs = ioctl_tiocgptpeer(&ours, flags)?;
        resize(&ours, terminal.rows, terminal.cols)?;
        let mut modes = tcgetattr(&theirs)?;
        // So that a character of several bytes is erased as one.
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&theirs, OptionalActions::Now, &modes)?;
        fcntl_setfl(&ours, fcntl_getfl(&ours)? | OFlags::NONBLOCK)?;
        #[expect(
            deprecated,
            reason = "what it asks for holds: the descriptor is owned, and lives as long as this"
        )]
        let ours = Arc::new(AsyncFd::new(ours)?);
        let (input, stdout) = (Inlet(Way::Terminal(ours.clone())), Outlet(Way::Terminal(ours)));
        Ok((Streams { input, stdout, stderr: None }, vec![theirs]))
    }
}

fn resize(terminal: impl AsFd, rows: u16, cols: u16) -> io::Result<()> {
    Ok(tcsetwinsize(terminal, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })?)
}

impl Inlet {
    /// Writes all of it; waits while the command does not read. An error means that nobody reads any more.
    pub async fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Way::Pipe(pipe) => pipe.write_all(bytes).await,
            Way::Terminal(terminal) => {
                while !bytes.is_empty() {
                    let mut ready = terminal.writable().await?;
                    match ready.try_io(|fd| Ok(rustix::io::write(fd, bytes)?)) {
                        Ok(written) => bytes = &bytes[written?..],
                        Err(_would_block) => {}
                    }
                }
                Ok(())
            }
            Way::Closed => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Nothing more will come. A terminal is told so as a person would: it can be written to afterwards.
    pub async fn end(&mut self) -> io::Result<()> {
        match &self.0 {
            Way::Pipe(_) | Way::Closed => {
                self.0 = Way::Closed;
                Ok(())
            }
            Way::Terminal(_) => self.write(&[END_OF_INPUT]).await,
        }
    }

    /// The terminal has another size. Without a terminal there is nothing to do.
    pub fn resize(&self, rows: u16, cols: u16) -> io::Result<()> {
        match &self.0 {
            Way::Terminal(terminal) => resize(terminal.get_ref(), rows, cols),
            Way::Pipe(_) | Way::Closed => Ok(()),
        }
    }
}

impl Outlet {
    /// Reads what is there, or waits for it. 0 means that nobody can write any more. May be given up and called again.
    pub async fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Way::Pipe(pipe) => pipe.read(into).await,
            Way::Terminal(terminal) => loop {
                let mut ready = terminal.readable().await?;
                match ready.try_io(|fd| Ok(rustix::io::read(fd, &mut *into)?)) {
                    Ok(Ok(read)) => return Ok(read),
                    // So a terminal says that nobody has it any more.
                    Ok(Err(error)) if Errno::from_io_error(&error) == Some(Errno::IO) => return Ok(0),
                    Ok(Err(error)) => return Err(error),
                    Err(_would_block) => {}
                }
            },
            Way::Closed => Ok(0),
        }
    }
}
