//! The one place that knows terminals: whether there is one, how wide it is, colours, and text that must not
//! move its cursor. What is printed is printed from here, so that a reader that has gone ends us in silence.

use std::fmt::Display;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};

use unicode_width::UnicodeWidthStr;

use crate::Failure;

/// Prints an answer on standard output.
pub(crate) fn print(text: impl Display) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    written(write!(out, "{text}").and_then(|()| out.flush()))
}

/// Prints a value for programs: one line of JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    print(serde_json::to_string(value).map_err(Failure::new)? + "\n")
}

/// Says something that is no answer, on standard error.
pub(crate) fn say(text: impl Display) -> Result<(), Failure> {
    written(writeln!(std::io::stderr().lock(), "{text}"))
}

/// Asks whether to do something, unless that is said already. An error is the end: it is not wanted, or there is nobody
/// to ask.
pub(crate) fn ask(yes: bool, what: &str, question: &str) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let text = format!("nobody can be asked here whether to {what}; say --yes");
        return Err(Failure { text, exit: 2 });
    }
    Stream::Err.print(format!("{question} [y/N] "))?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).map_err(Failure::new)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::new("nothing is done")),
    }
}

/// A reader that has gone (`evenhand list | head -1`) has what it wanted.
pub(crate) fn written(written: std::io::Result<()>) -> Result<(), Failure> {
    written.map_err(|error| match error.kind() == ErrorKind::BrokenPipe {
        true => Failure { text: String::new(), exit: 0 },
        false => Failure::new(format!("cannot write: {error}")),
    })
}

/// One of the two ways to a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

impl Stream {
    /// Whether a person sees it, on something that can move its cursor.
    pub(crate) fn is_live(self) -> bool {
        let terminal = match self {
            Stream::Out => std::io::stdout().is_terminal(),
            Stream::Err => std::io::stderr().is_terminal(),
        };
        terminal && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
    }

    /// How wide it is, in columns. None: it is no terminal, and a line may be as long as it likes.
    pub(crate) fn width(self) -> Option<usize> {
        let terminal = match self {
            Stream::Out => std::io::stdout().is_terminal(),
            Stream::Err => std::io::stderr().is_terminal(),
        };
        // A terminal that does not know (a serial line) says 0.
        let size = crossterm::terminal::size().ok().filter(|(columns, _)| *columns > 0);
        terminal.then(|| size.map_or(80, |(columns, _)| columns.into()))
    }

    /// Prints text there.
    pub(crate) fn print(self, text: impl Display) -> Result<(), Failure> {
        match self {
            Stream::Out => print(text),
            Stream::Err => {
                let mut err = std::io::stderr().lock();
                written(write!(err, "{text}").and_then(|()| err.flush()))
            }
        }
    }

    /// The paint to use there.
    pub(crate) fn paint(self) -> Paint {
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Paint { on: self.is_live() && !unwanted }
    }
}

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    on: bool,
}

/// What a text is, and so how it looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    Plain,
    Good,
    Bad,
    Waits,
    Active,
    Strong,
    Dim,
}

impl Paint {
    /// No colours at all.
    pub(crate) const NONE: Paint = Paint { on: false };

    pub(crate) fn is_on(self) -> bool {
        self.on
    }

    pub(crate) fn of(self, look: Look, text: &str) -> String {
        let code = match look {
            Look::Plain => return text.into(),
            Look::Good => 32,
            Look::Bad => 31,
            Look::Waits => 33,
            Look::Active => 36,
            Look::Strong => 1,
            Look::Dim => 2,
        };
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
    }
}

/// How many columns a text takes.
pub(crate) fn width(text: &str) -> usize {
    text.width()
}

/// Somebody's text on one line, without what would move the cursor or turn the direction of what follows.
pub(crate) fn plain(text: &str) -> String {
    let is_plain = |c: char| {
        !c.is_control()
            && !matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}')
    };
    let shown = |c: char| match c {
        '\t' | '\n' => ' ',
        c if is_plain(c) => c,
        _ => '\u{fffd}',
    };
    text.trim_end().chars().map(shown).collect()
}

/// A text in at most so many columns; an ellipsis says that some of it is left out.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    if columns == 0 {
        return String::new();
    }
    // No column holds more than a few characters, so the rest of a long text cannot matter.
    let longest = columns.saturating_mul(8);
    if text.len() <= columns || (text.chars().nth(longest).is_none() && width(text) <= columns) {
        return text.into();
    }
    // The longest part that leaves room for the ellipsis; marks stay with the letter that they stand on.
    let ends = text.char_indices().take(longest).filter(|(at, _)| {
        let next = text[*at..].chars().next().map_or(1, |c| width(c.encode_utf8(&mut [0; 4])));
        next > 0 && !text[..*at].ends_with('\u{200d}')
    });
    let end = ends.map(|(at, _)| at).take_while(|at| width(&text[..*at]) < columns).last().unwrap_or(0);
    format!("{}…", &text[..end])
}

/// A text in lines of at most so many columns, broken between words; after the first they are indented.
pub(crate) fn wrap(text: &str, indent: usize, columns: Option<usize>) -> Vec<String> {
    let columns = columns.unwrap_or(usize::MAX);
    let mut words = text.split(' ');
    let mut lines = Vec::new();
    let mut line = words.next().unwrap_or_default().to_string();
    for word in words {
        // A word that fits in no line stands alone, and the terminal breaks it.
        if width(&line) + 1 + width(word) > columns {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
        } else {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

/// Parts of one line in at most so many columns; those at its end are cut or left out.
pub(crate) fn line(parts: &[(String, Look)], columns: usize, paint: Paint) -> String {
    let mut left = columns;
    let mut line = String::new();
    for (text, look) in parts.iter().filter(|(text, _)| !text.is_empty()) {
        let gap = if line.is_empty() { 0 } else { 2 };
        let text = cut(text, left.saturating_sub(gap));
        if text.is_empty() {
            break;
        }
        left -= gap + width(&text);
        line = format!("{line}{}{}", " ".repeat(gap), paint.of(*look, &text));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_by_columns_and_not_by_bytes() {
        assert_eq!(cut("render", 6), "render");
        assert_eq!(cut("renders", 6), "rende…");
        assert_eq!(cut("日本語", 6), "日本語");
        // A wide character that would stand half outside goes as a whole.
        assert_eq!(cut("日本語", 5), "日本…");
        assert_eq!(cut("日本語", 4), "日…");
        assert_eq!(cut("😀😀😀", 3), "😀…");
        assert_eq!(cut("abc", 1), "…");
        assert_eq!(cut("abc", 0), "");
        // A letter keeps its mark.
        assert_eq!(cut("e\u{301}e\u{301}e\u{301}", 2), "e\u{301}…");
        let parts = ["日本語", "", "render", "x"].map(|text| (text.to_string(), Look::Plain));
        assert_eq!(line(&parts, 80, Paint::NONE), "日本語  render  x");
        assert_eq!(line(&parts, 12, Paint::NONE), "日本語  ren…");
        assert_eq!(line(&parts, 8, Paint::NONE), "日本語");
        for columns in 1..30 {
            let long = "a日e\u{301}😀\u{1F469}\u{200D}\u{1F680}".repeat(40);
            assert!(width(&cut(&long, columns)) <= columns, "{columns}");
        }
    }

    #[test]
    fn texts_are_broken_between_words() {
        assert_eq!(wrap("one two three", 2, Some(8)), ["one two", "  three"]);
        assert_eq!(wrap("one two three", 2, None), ["one two three"]);
        assert_eq!(wrap("日本 日本語 x", 4, Some(7)), ["日本", "    日本語", "    x"]);
        assert_eq!(wrap("  evenhand worker   starts", 2, Some(80)), ["  evenhand worker   starts"]);
        assert_eq!(wrap("", 2, Some(8)), [""]);
    }

    #[test]
    fn nothing_that_moves_the_cursor_gets_through() {
        assert_eq!(plain("a\x1b[2Jb\r\nc\td\n"), "a\u{fffd}[2Jb\u{fffd} c d");
        assert_eq!(plain("pay \u{202e}exe.pdf"), "pay \u{fffd}exe.pdf");
        assert_eq!(plain("acme/日本/😀"), "acme/日本/😀");
    }

    #[test]
    fn colours_can_be_left_out() {
        assert_eq!(Paint { on: true }.of(Look::Good, "ok"), "\x1b[32mok\x1b[0m");
        assert_eq!(Paint::NONE.of(Look::Good, "ok"), "ok");
    }
}
