//! `evenhand attach`: a worker's command as if it ran here. Our standard input is its, its output is ours, and we exit as
//! it does. With `--tty` it has a terminal, and ours only passes on what is typed.

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use clap::Args as ClapArgs;
use crossterm::terminal;
use evenhand::{Attach, AttachInput, AttachOutput, Attached, Heard, wire};
use evenhand_api::interactive;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::client::ServerArgs;
use crate::terminal::{Stream, plain, say, written};
use crate::{Done, Failure, parse};

/// Bytes that are read at once.
const CHUNK: usize = 32 * 1024;
/// What a shell adds to the number of a signal.
const SIGNALED: u8 = 128;
const SIGINT: u8 = 2;

/// What to talk to.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand attach calc 1+1
  echo 1+1 | evenhand attach calc
  evenhand attach shell --tty
  evenhand attach shell --tty --key acme --max-duration 1h

An interactive task never waits: if no slot is free, evenhand exits with 5. When evenhand ends, the worker's command is \
ended too. It exits as the command did; or with 5 if the command was halted to make room, 6 if its worker or the server \
is gone, 1 if its time was up or it was canceled. With --tty, ~. at the beginning of a line hangs up, and ~~ is a ~.")]
pub(crate) struct Args {
    /// The queue: one of its workers runs its command
    queue: String,
    /// Its standard input: these words, and the end of a line; ours, if nobody says
    #[arg(conflicts_with = "tty", value_name = "DATA")]
    data: Vec<String>,
    /// Give the command a terminal: for shells, editors, and whatever asks who is there
    #[arg(long)]
    tty: bool,
    /// Whom to charge
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// How long it may take
    #[arg(long, value_parser = parse::duration, value_name = "TIME")]
    max_duration: Option<Duration>,
    #[command(flatten)]
    server: ServerArgs,
}

pub(crate) async fn run(args: Args) -> Done {
    let mut ask = Attach::new();
    if let Some(key) = args.key {
        ask = ask.key(key);
    }
    if let Some(duration) = args.max_duration {
        ask = ask.max_duration(duration);
    }
    // Before the size is looked at: one that comes meanwhile is not lost.
    let sizes = if args.tty { signal(SignalKind::window_change()).ok() } else { None };
    if args.tty {
        let (cols, rows) = size().unwrap_or((80, 24));
        ask = ask.terminal(rows, cols, std::env::var("TERM").unwrap_or_default());
    }
    // Before there is something to end: a signal that comes meanwhile is not lost.
    let mut signals = Signals::new().map_err(Failure::new)?;
    let Attached { seat, input, output, .. } = args.server.client()?.attach(&args.queue, ask).await?;
    let ours = args.tty && std::io::stdin().is_terminal();
    if ours && Stream::Err.is_live() {
        say(format!("evenhand: on {}; Enter ~. hangs up", plain(&seat)))?;
    }
    let raw = if ours { Some(Raw::begin().map_err(Failure::new)?) } else { None };
    let speaking = speak(input, args.data, ours, sizes);
    let ended = tokio::select! {
        closed = listen(output, raw.is_some()) => closed.map(Ended::Closed),
        number = signals.next() => Ok(Ended::Signal(number)),
        () = speaking => Ok(Ended::HungUp),
    };
    // Whatever it was, the terminal is as it was before anything is said.
    drop(raw);
    match ended? {
        Ended::Closed(closed) => {
            if (closed.over(), closed.exit_code) != (wire::Over::Ended, Some(0)) {
                say(format!("evenhand: {}", plain(&interactive::text(&closed))))?;
            }
            Ok(ExitCode::from(interactive::exit(&closed)))
        }
        Ended::Signal(number) => Ok(ExitCode::from(SIGNALED.saturating_add(number))),
        Ended::HungUp => {
            say("evenhand: hung up")?;
            Ok(ExitCode::from(SIGNALED + SIGINT))
        }
    }
}

/// Why it is over.
enum Ended {
    Closed(wire::AttachClosed),
    Signal(u8),
    HungUp,
}

/// The size of our terminal: columns and rows.
fn size() -> Option<(u16, u16)> {
    // A terminal that does not know (a serial line) says 0.
    terminal::size().ok().filter(|(cols, rows)| *cols > 0 && *rows > 0)
}

/// Our terminal passes on what is typed, as long as this lives.
struct Raw;

impl Raw {
    fn begin() -> std::io::Result<Raw> {
        terminal::enable_raw_mode()?;
        Ok(Raw)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = terminal::disable_raw_mode();
    }
}

/// Those that end us.
struct Signals([(u8, Signal); 3]);

impl Signals {
    fn new() -> std::io::Result<Signals> {
        let of = |kind: SignalKind| {
            let number = u8::try_from(kind.as_raw_value()).unwrap_or(SIGINT);
            Ok::<_, std::io::Error>((number, signal(kind)?))
        };
        Ok(Signals([of(SignalKind::interrupt())?, of(SignalKind::terminate())?, of(SignalKind::hangup())?]))
    }

    async fn next(&mut self) -> u8 {
        let [(interrupt, interrupts), (terminate, terminates), (hangup, hangups)] = &mut self.0;
        tokio::select! {
            _ = interrupts.recv() => *interrupt,
            _ = terminates.recv() => *terminate,
            _ = hangups.recv() => *hangup,
        }
    }
}

/// Writes what the command does, until it is over.
async fn listen(mut output: AttachOutput, raw: bool) -> Result<wire::AttachClosed, Failure> {
    // In a raw terminal a line does not begin at its beginning by itself.
    let end = if raw { "\r\n" } else { "\n" };
    loop {
        match output.next().await? {
            Some(Heard::Stdout(bytes)) => write(Stream::Out, bytes).await?,
            Some(Heard::Stderr(bytes)) => write(Stream::Err, bytes).await?,
            Some(Heard::Warning { message, .. }) => {
                write(Stream::Err, format!("{end}evenhand: {}{end}", plain(&message)).into()).await?;
            }
            Some(Heard::Closed(closed)) => return Ok(closed),
            None => return Err(Failure::new("the server said nothing of how it ended")),
        }
    }
}

/// Writes bytes as they are. Whoever does not read them holds up the command, and not our signals.
async fn write(stream: Stream, bytes: Bytes) -> Result<(), Failure> {
    let writing = tokio::task::spawn_blocking(move || match stream {
        Stream::Out => {
            let mut out = std::io::stdout().lock();
            out.write_all(&bytes).and_then(|()| out.flush())
        }
        Stream::Err => std::io::stderr().lock().write_all(&bytes),
    });
    written(writing.await.map_err(Failure::new)?)
}

/// Takes what is typed to the command, and what becomes of our terminal. Ends only when somebody hangs up.
async fn speak(input: AttachInput, data: Vec<String>, ours: bool, mut sizes: Option<Signal>) {
    let mut typed = Some(match data.is_empty() {
        true => read_stdin(),
        false => given(data.join(" ") + "\n"),
    });
    let mut escape = Escape::default();
    loop {
        let sent = tokio::select! {
            bytes = next(&mut typed) => match bytes {
                Some(bytes) if ours => {
                    let (bytes, hung_up) = escape.pass(&bytes);
                    let sent = input.write(bytes).await;
                    if hung_up {
                        return;
                    }
                    sent
                }
                Some(bytes) => input.write(bytes).await,
                None => {
                    typed = None;
                    input.end().await
                }
            },
            () = resized(&mut sizes) => match size() {
                Some((cols, rows)) => input.resize(rows, cols).await,
                None => Ok(()),
            },
        };
        if sent.is_err() {
            // It is over, which is heard elsewhere.
            return std::future::pending().await;
        }
    }
}

/// What is typed next; None at the end, which is said once.
async fn next(typed: &mut Option<mpsc::Receiver<Bytes>>) -> Option<Bytes> {
    match typed {
        Some(typed) => typed.recv().await,
        None => std::future::pending().await,
    }
}

async fn resized(sizes: &mut Option<Signal>) {
    match sizes {
        Some(sizes) => drop(sizes.recv().await),
        None => std::future::pending().await,
    }
}

/// Our standard input. A read cannot be given up, so it has a thread of its own, which ends with us.
fn read_stdin() -> mpsc::Receiver<Bytes> {
    let (sender, typed) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(read @ 1..) = std::io::stdin().lock().read(&mut buffer) {
            if sender.blocking_send(Bytes::copy_from_slice(&buffer[..read])).is_err() {
                return;
            }
        }
    });
    typed
}

fn given(text: String) -> mpsc::Receiver<Bytes> {
    let (sender, typed) = mpsc::channel(1);
    // There is room for one.
    let _ = sender.try_send(text.into());
    typed
}

/// Looks for `~.` at the beginning of a line.
#[derive(Debug, Default, PartialEq, Eq)]
enum Escape {
    /// A line begins.
    #[default]
    Beginning,
    /// In the middle of one.
    Within,
    /// It began with a tilde, which is held back.
    Tilde,
}

impl Escape {
    /// What is to be passed on, and whether somebody hangs up.
    fn pass(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(typed.len() + 1);
        for &byte in typed {
            *self = match (&self, byte) {
                (Escape::Beginning, b'~') => {
                    *self = Escape::Tilde;
                    continue;
                }
                (Escape::Tilde, b'.') => return (passed, true),
                (Escape::Tilde, b'~') => Escape::Within,
                (Escape::Tilde, _) => {
                    passed.push(b'~');
                    if byte == b'\r' || byte == b'\n' { Escape::Beginning } else { Escape::Within }
                }
                (Escape::Beginning | Escape::Within, b'\r' | b'\n') => Escape::Beginning,
                (Escape::Beginning | Escape::Within, _) => Escape::Within,
            };
            passed.push(byte);
        }
        (passed, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_tilde_and_a_dot_at_the_beginning_of_a_line_hang_up() {
        let pass = |typed: &[&str]| {
            let mut escape = Escape::default();
            let mut all = String::new();
            for typed in typed {
                let (passed, hung_up) = escape.pass(typed.as_bytes());
                all += std::str::from_utf8(&passed).unwrap();
                if hung_up {
                    return (all, true);
                }
            }
            (all, false)
        };
        let is = |typed: &[&str], passed: &str, hung_up: bool| {
            assert_eq!(pass(typed), (passed.to_string(), hung_up), "{typed:?}");
        };
        is(&["ls\r", "~", ".", "never"], "ls\r", true);
        is(&["~."], "", true);
        is(&["ls ~.\r"], "ls ~.\r", false);
        is(&["~~."], "~.", false);
        is(&["~x\r~."], "~x\r", true);
        is(&["~\r~."], "~\r", true);
        is(&["cd ~\r", "~/bin\r"], "cd ~\r~/bin\r", false);
    }
}
