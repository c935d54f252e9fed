//! Tables that people can read: columns as wide as what is in them, numbers to the right. On a terminal a table is
//! made to fit: columns are shortened, then left out, the least important first. A row is always one line.

use crate::terminal::{Look, Paint, Stream, cut, plain, width};

/// Every column is made as narrow as this; then those are left out that are not dear; then every column is made as
/// narrow as that, but never narrower than its title; then others are left out.
const NARROW: usize = 20;
const NARROWEST: usize = 6;
/// Columns that are given up in this place or earlier are not dear.
const DEAR: u8 = 5;

/// Lays out rows under a head, as wide as they are. A column whose cells are all numbers is set to the right.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let is_number = |row: &Vec<String>, n: usize| row[n].starts_with(|c: char| c.is_ascii_digit());
    let column = |(n, title)| match !rows.is_empty() && rows.iter().all(|row| is_number(row, n)) {
        true => number(title, 0),
        false => column(title, 0),
    };
    let mut table = Table::new(head.iter().copied().enumerate().map(column).collect());
    for row in rows {
        table.row(row.iter().map(|cell| cell.as_str().into()).collect());
    }
    table.text(None, Paint::NONE)
}

/// A column: its title, and how soon it is given up when there is no room: the greatest number goes first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column<'a> {
    title: &'a str,
    give: u8,
    number: bool,
}

/// A column of texts that is given up in this place; 0 never is.
pub(crate) const fn column(title: &str, give: u8) -> Column<'_> {
    Column { title, give, number: false }
}

/// The same of numbers, which are set to the right and never cut: a part of a number is another number.
pub(crate) const fn number(title: &str, give: u8) -> Column<'_> {
    Column { title, give, number: true }
}

/// What stands in a row under a title.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    look: Look,
}

impl Cell {
    pub(crate) fn new(text: &str, look: Look) -> Cell {
        Cell { text: plain(text), look }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::new(text, Look::Plain)
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::new(&text, Look::Plain)
    }
}

/// Rows to lay out.
#[derive(Debug)]
pub(crate) struct Table<'a> {
    columns: Vec<Column<'a>>,
    rows: Vec<Vec<Cell>>,
}

impl<'a> Table<'a> {
    pub(crate) fn new(columns: Vec<Column<'a>>) -> Table<'a> {
        Table { columns, rows: Vec::new() }
    }

    /// One more row, with a cell for each column.
    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The table as standard output wants it: made to fit a terminal, in full for everything else.
    pub(crate) fn for_output(&self) -> String {
        self.text(Stream::Out.width(), Stream::Out.paint())
    }

    pub(crate) fn text(&self, room: Option<usize>, paint: Paint) -> String {
        self.lines(room, paint).into_iter().map(|line| line + "\n").collect()
    }

    /// The head and the rows, a line each, none wider than the room.
    pub(crate) fn lines(&self, room: Option<usize>, paint: Paint) -> Vec<String> {
        let widths = self.widths(room);
        let head = self.columns.iter().map(|column| Cell::new(column.title, Look::Dim)).collect();
        let lay = |row: &Vec<Cell>| {
            let shown = || row.iter().zip(&widths).zip(&self.columns).filter(|((_, width), _)| **width > 0);
            let mut left = room.unwrap_or(usize::MAX);
            let mut line = String::new();
            // Spaces are owed, and paid only before something: no line ends with them.
            let mut owed = 0;
            for ((cell, &columns), column) in shown() {
                let text = cut(&cell.text, columns);
                let gap = columns - width(&text);
                let (before, after) = if column.number { (gap, 0) } else { (0, gap) };
                owed += 2 + before;
                let text = cut(&text, left.saturating_sub(owed));
                if !text.is_empty() {
                    left = left.saturating_sub(owed + width(&text));
                    line.push_str(&" ".repeat(owed));
                    line.push_str(&paint.of(cell.look, &text));
                    owed = 0;
                }
                owed += after;
            }
            line
        };
        std::iter::once(&head).chain(&self.rows).map(lay).collect()
    }

    /// How wide each column is; 0 is left out.
    fn widths(&self, room: Option<usize>) -> Vec<usize> {
        let cells = |n: usize| self.rows.iter().map(move |row| width(&row[n].text));
        let titles = || self.columns.iter().map(|column| width(column.title));
        let mut widths: Vec<usize> =
            titles().enumerate().map(|(n, title)| cells(n).chain([title]).max().unwrap_or(0)).collect();
        let Some(room) = room else { return widths };
        let titles: Vec<usize> = titles().collect();
        let mut order: Vec<usize> = (0..widths.len()).collect();
        order.sort_by_key(|n| std::cmp::Reverse(self.columns[*n].give));
        let over = |widths: &[usize]| {
            let used: usize = widths.iter().filter(|width| **width > 0).map(|width| width + 2).sum();
            used.saturating_sub(room)
        };
        for (narrow, dear) in [(NARROW, DEAR), (NARROWEST, 1)] {
            for &n in order.iter().filter(|n| !self.columns[**n].number) {
                widths[n] -= over(&widths).min(widths[n].saturating_sub(narrow.max(titles[n])));
            }
            for &n in order.iter().filter(|n| self.columns[**n].give >= dear) {
                if over(&widths) == 0 {
                    break;
                }
                let freed = widths[n] + 2;
                let spare = freed.saturating_sub(over(&widths));
                widths[n] = 0;
                self.widen(&mut widths, spare, &order);
            }
        }
        widths
    }

    /// Gives room that has come free to the columns that were shortened, the most important first.
    fn widen(&self, widths: &mut [usize], mut spare: usize, order: &[usize]) {
        for &n in order.iter().rev().filter(|n| widths[**n] > 0).collect::<Vec<_>>() {
            let wanted = self.rows.iter().map(|row| width(&row[n].text)).max().unwrap_or(0);
            let more = wanted.saturating_sub(widths[n]).min(spare);
            widths[n] += more;
            spare -= more;
        }
    }
}

/// A count with its thousands apart: 12,345.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// So many things: 1 task, 12,345 tasks.
pub(crate) fn of(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(n), if n == 1 { "" } else { "s" })
}

/// Bytes in the unit that fits: 3.2 GiB.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = "B";
    for larger in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn numbers_are_set_to_the_right_and_texts_to_the_left() {
        let rows = vec![vec!["render".into(), "1,200".into()], vec!["mail".into(), "7".into()]];
        assert_eq!(
            table(&["queue", "waiting"], &rows),
            "  queue   waiting\n  render    1,200\n  mail          7\n"
        );
    }

    fn wide() -> Table<'static> {
        let mut table =
            Table::new(vec![column("task", 0), column("key", 1), number("waiting", 3), column("why", 2)]);
        table.row(vec!["0-1".into(), "acme".into(), "1,200".into(), "every slot is taken".into()]);
        table.row(vec![
            "0-22".into(),
            "日本語日本語日本語".into(),
            "7".into(),
            "the start gate\nis shut".into(),
        ]);
        table.row(vec!["0-3".into(), "😀😀😀e\u{301}".into(), "-".into(), "".into()]);
        table
    }

    #[test]
    fn a_table_fits_the_least_important_goes_first() {
        let shown: Vec<String> = [Some(80), Some(52), Some(36), Some(24), Some(12)]
            .into_iter()
            .map(|room| {
                let text = wide().text(room, Paint::NONE);
                let room = room.unwrap_or(usize::MAX);
                assert!(text.lines().all(|line| width(line) <= room), "{room}:\n{text}");
                format!("in {room} columns\n{text}")
            })
            .collect();
        expect![[r#"
            in 80 columns
              task  key                 waiting  why
              0-1   acme                  1,200  every slot is taken
              0-22  日本語日本語日本語        7  the start gate is shut
              0-3   😀😀😀é                   -

            in 52 columns
              task  key                 waiting  why
              0-1   acme                  1,200  every slot is …
              0-22  日本語日本語日本語        7  the start gate…
              0-3   😀😀😀é                   -

            in 36 columns
              task  key          waiting  why
              0-1   acme           1,200  every…
              0-22  日本語日本…        7  the s…
              0-3   😀😀😀é            -

            in 24 columns
              task  key       why
              0-1   acme      every…
              0-22  日本語…   the s…
              0-3   😀😀😀é

            in 12 columns
              task
              0-1
              0-22
              0-3
        "#]]
        .assert_eq(&shown.join("\n"));
    }

    #[test]
    fn a_row_is_one_line_whatever_is_in_it() {
        for room in 0..80 {
            assert_eq!(wide().lines(Some(room), Paint::NONE).len(), 4);
            assert!(wide().lines(Some(room), Paint::NONE).iter().all(|line| width(line) <= room), "{room}");
        }
    }

    #[test]
    fn counts_and_bytes_are_readable() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1, 2_000].map(|n| of(n, "task")), ["0 tasks", "1 task", "2,000 tasks"]);
        assert_eq!([0, 1023, 1024, 3_435_973_837].map(bytes), ["0 B", "1023 B", "1.0 KiB", "3.2 GiB"]);
    }
}
