//! Tables that people can read: columns as wide as what is in them, numbers to the right.

use std::fmt::Write;

/// Lays out rows under a head. A column whose cells are all numbers is set to the right.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let is_number = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    let columns: Vec<(usize, bool)> = (0..head.len())
        .map(|n| {
            let cells = || rows.iter().map(|row| row[n].as_str());
            let width = cells().chain([head[n]]).map(|cell| cell.chars().count()).max().unwrap_or(0);
            (width, !rows.is_empty() && cells().all(is_number))
        })
        .collect();
    let mut text = String::new();
    let head: Vec<String> = head.iter().map(|title| title.to_string()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (cell, (width, number)) in row.iter().zip(&columns) {
            let gap = " ".repeat(width.saturating_sub(cell.chars().count()));
            // Writing to a string cannot fail.
            let _ = if *number { write!(line, "  {gap}{cell}") } else { write!(line, "  {cell}{gap}") };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
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
    use super::*;

    #[test]
    fn numbers_are_set_to_the_right_and_texts_to_the_left() {
        let rows = vec![vec!["render".into(), "1,200".into()], vec!["mail".into(), "7".into()]];
        assert_eq!(
            table(&["queue", "waiting"], &rows),
            "  queue   waiting\n  render    1,200\n  mail          7\n"
        );
    }

    #[test]
    fn counts_and_bytes_are_readable() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1, 2_000].map(|n| of(n, "task")), ["0 tasks", "1 task", "2,000 tasks"]);
        assert_eq!([0, 1023, 1024, 3_435_973_837].map(bytes), ["0 B", "1023 B", "1.0 KiB", "3.2 GiB"]);
    }
}
