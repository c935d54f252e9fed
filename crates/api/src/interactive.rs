//! Interactive tasks on the wire: how they end, on every surface, and what clients may say of their terminals. With
//! the feature `rest` also the frames of the WebSocket.

use evenhand_core::Refusal;

use crate::{TERM_BYTES, v1};
use v1::Over;

/// A terminal's size if nobody says: what terminals have had for ever.
const ROWS: u32 = 24;
const COLS: u32 = 80;

/// How an interactive task ended, on every surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Why.
    pub over: Over,
    /// With this code a WebSocket is closed.
    pub close: u16,
    /// With this code the command line exits. Where the command ended by itself, with the command's own.
    pub exit: u8,
    /// For people.
    pub text: &'static str,
}

const fn row(over: Over, close: u16, exit: u8, text: &'static str) -> Row {
    Row { over, close, exit, text }
}

/// The one table of ends.
pub const TABLE: [Row; 7] = [
    row(Over::Ended, 1000, 0, "it ended"),
    row(Over::Halted, 4001, 5, "it was halted to make room; try again later"),
    row(Over::TimeUp, 4002, 1, "it took longer than it was allowed to"),
    row(Over::Lost, 4003, 6, "its worker is gone"),
    row(Over::Canceled, 4004, 1, "it was canceled"),
    row(Over::NotStarted, 4005, 1, "its worker could not start it"),
    row(Over::Stopping, 1012, 6, "the server is stopping; try again in a moment"),
];

/// The row of an end. One that nobody knows is that of a lost worker: nothing is known of the task.
pub fn ended(over: Over) -> Row {
    TABLE.into_iter().find(|row| row.over == over).unwrap_or(TABLE[3])
}

/// What is said of an end: `exit 0`, or why it was.
pub fn text(closed: &v1::AttachClosed) -> String {
    match (closed.over(), closed.exit_code, closed.signal) {
        (Over::Ended, Some(code), _) => format!("exit {code}"),
        (Over::Ended, None, Some(signal)) => format!("signal {signal}"),
        (over, ..) if closed.message.is_empty() => ended(over).text.into(),
        (..) => closed.message.clone(),
    }
}

/// With what the command line exits: as its command did, or as the table says.
pub fn exit(closed: &v1::AttachClosed) -> u8 {
    let own = match (closed.over(), closed.exit_code, closed.signal) {
        (Over::Ended, Some(code), _) => u8::try_from(code).ok(),
        // As a shell does.
        (Over::Ended, None, Some(signal)) => u8::try_from(signal.saturating_add(128)).ok(),
        _ => None,
    };
    own.unwrap_or(ended(closed.over()).exit)
}

/// What an interactive run is to have, as its client says.
pub fn terminal(terminal: Option<&v1::Terminal>) -> Result<v1::Interactive, Refusal> {
    let Some(v1::Terminal { rows, cols, term }) = terminal else { return Ok(v1::Interactive::default()) };
    let or = |said: u32, usual: u32| if said == 0 { usual } else { said };
    let (rows, cols) = size(or(*rows, ROWS), or(*cols, COLS))?;
    let plain = |byte: u8| byte.is_ascii_graphic();
    if term.len() > TERM_BYTES || !term.bytes().all(plain) {
        let most = format!("must be at most {TERM_BYTES} letters, digits and signs, such as xterm-256color");
        return Err(Refusal::invalid("term", most));
    }
    Ok(v1::Interactive { tty: true, rows: rows.into(), cols: cols.into(), term: term.clone() })
}

/// A terminal's size, checked.
pub fn size(rows: u32, cols: u32) -> Result<(u16, u16), Refusal> {
    let checked = |field: &str, n: u32| {
        let wrong = || Refusal::invalid(field, format!("{n} is out of range; use 1 to {}", u16::MAX));
        u16::try_from(n).ok().filter(|n| *n > 0).ok_or_else(wrong)
    };
    Ok((checked("rows", rows)?, checked("cols", cols)?))
}

/// The frames of the WebSocket. A binary frame begins with one byte that says which stream it is of; a text frame is
/// JSON.
#[cfg(feature = "rest")]
pub mod frames {
    use bytes::{BufMut, Bytes, BytesMut};
    use evenhand_core::Refusal;
    use serde::{Deserialize, Serialize};

    use super::size;
    use crate::rest::parse;
    use crate::{STDIN_BYTES, v1};
    use v1::attach_request::Message as FromClient;

    /// The first byte of a binary frame.
    pub const STDIN: u8 = 0;
    /// What a command wrote to its standard output, or to its terminal.
    pub const STDOUT: u8 = 1;
    /// What it wrote to its standard error.
    pub const STDERR: u8 = 2;

    /// What a server says in text frames, one of them at a time.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Control {
        /// The first frame: the task has a slot.
        Accepted {
            /// Its id.
            task: String,
            /// Where it runs.
            seat: String,
        },
        /// It will be ended to make room.
        Warning {
            /// In so many milliseconds.
            grace_ms: u64,
            /// For people.
            message: String,
        },
    }

    /// What a client says in text frames.
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Said {
        resize: Option<Resize>,
        eof: Option<bool>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Resize {
        rows: u32,
        cols: u32,
    }

    /// What a command wrote, as a binary frame.
    pub fn output(stream: u8, bytes: &[u8]) -> Bytes {
        let mut frame = BytesMut::with_capacity(1 + bytes.len());
        frame.put_u8(stream);
        frame.put_slice(bytes);
        frame.freeze()
    }

    /// A binary frame from a client.
    pub fn parse_binary(frame: &Bytes) -> Result<FromClient, Refusal> {
        match frame.first() {
            Some(&STDIN) if frame.len() <= 1 + STDIN_BYTES => Ok(FromClient::Stdin(frame.slice(1..))),
            Some(&STDIN) => {
                Err(Refusal::too_large("frame", format!("send at most {STDIN_BYTES} bytes in one frame")))
            }
            Some(_) | None => Err(Refusal::invalid("frame", "a binary frame begins with the byte 0: stdin")),
        }
    }

    /// A text frame from a client: what it says, in order.
    pub fn parse_text(frame: &str) -> Result<Vec<FromClient>, Refusal> {
        let Said { resize, eof } = parse(frame.as_bytes())?;
        let mut said = Vec::new();
        if let Some(Resize { rows, cols }) = resize {
            let (rows, cols) = size(rows, cols).map_err(|refusal| refusal.within("resize"))?;
            said.push(FromClient::Resize(v1::Resize { rows: rows.into(), cols: cols.into() }));
        }
        if eof == Some(true) {
            said.push(FromClient::Eof(true));
        }
        if said.is_empty() && eof.is_none() {
            return Err(Refusal::invalid("frame", "says neither resize nor eof"));
        }
        Ok(said)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn frames_say_what_the_document_says() {
            let parsed = parse_text(r#"{"resize":{"rows":24,"cols":80}}"#).unwrap();
            assert_eq!(parsed, [FromClient::Resize(v1::Resize { rows: 24, cols: 80 })]);
            assert_eq!(parse_text(r#"{"eof":true}"#).unwrap(), [FromClient::Eof(true)]);
            assert_eq!(parse_text(r#"{"eof":false}"#).unwrap(), []);
            for (wrong, field) in [
                ("", ""),
                ("{}", "frame"),
                ("[]", ""),
                (r#"{"resize":{"rows":0,"cols":80}}"#, "resize.rows"),
                (r#"{"resize":{"rows":24,"cols":65536}}"#, "resize.cols"),
                (r#"{"resize":{"rows":24}}"#, "resize"),
                (r#"{"stdin":"x"}"#, "stdin"),
            ] {
                let refusal = parse_text(wrong).unwrap_err();
                assert_eq!(refusal.field, field, "{wrong}: {refusal}");
            }
            assert_eq!(parse_binary(&Bytes::from("\0ab")).unwrap(), FromClient::Stdin("ab".into()));
            assert_eq!(parse_binary(&Bytes::from("\0")).unwrap(), FromClient::Stdin(Bytes::new()));
            for wrong in ["", "\u{1}x", "x"] {
                assert!(parse_binary(&Bytes::from(wrong)).is_err(), "{wrong:?}");
            }
            assert!(parse_binary(&vec![0; STDIN_BYTES + 2].into()).is_err());
            assert_eq!(output(STDERR, b"no"), "\u{2}no");
            let accepted = Control::Accepted { task: "0-1".into(), seat: "a".into() };
            let json = serde_json::to_string(&accepted).unwrap();
            assert_eq!(json, r#"{"accepted":{"task":"0-1","seat":"a"}}"#);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_is_in_the_table_once() {
        for over in 1..=7 {
            let over = Over::try_from(over).unwrap();
            assert_eq!(TABLE.iter().filter(|row| row.over == over).count(), 1, "{over:?}");
        }
        assert!(Over::try_from(8).is_err());
        assert_eq!(ended(Over::Unspecified).over, Over::Lost);
    }

    #[test]
    fn a_command_that_ended_by_itself_is_told_by_its_code() {
        let closed = |over: Over, exit_code, signal| v1::AttachClosed {
            over: over.into(),
            exit_code,
            signal,
            message: String::new(),
        };
        let said = |closed: v1::AttachClosed| (exit(&closed), text(&closed));
        assert_eq!(said(closed(Over::Ended, Some(0), None)), (0, "exit 0".into()));
        assert_eq!(said(closed(Over::Ended, Some(42), None)), (42, "exit 42".into()));
        assert_eq!(said(closed(Over::Ended, None, Some(9))), (137, "signal 9".into()));
        // How it was killed does not matter where it was.
        assert_eq!(said(closed(Over::Halted, None, Some(9))).0, 5);
        assert_eq!(said(closed(Over::TimeUp, Some(0), None)).0, 1);
        assert_eq!(said(closed(Over::Unspecified, None, None)).0, 6);
    }

    #[test]
    fn a_terminal_is_checked() {
        let of = |rows, cols, term: &str| v1::Terminal { rows, cols, term: term.into() };
        let usual = terminal(Some(&of(0, 0, ""))).unwrap();
        assert_eq!((usual.tty, usual.rows, usual.cols), (true, 24, 80));
        assert!(!terminal(None).unwrap().tty);
        assert_eq!(terminal(Some(&of(70_000, 80, ""))).unwrap_err().field, "rows");
        for term in ["a b", "x\u{0}", "x\ny", &"x".repeat(65)] {
            assert_eq!(terminal(Some(&of(24, 80, term))).unwrap_err().field, "term");
        }
    }
}
