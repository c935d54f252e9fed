//! `evenhand store`: is a store's directory whole, and what is in it. Both commands change nothing and need
//! the directory for themselves, so the server must be stopped (or a copy be looked at).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use evenhand_store::embedded::{self, Checked, Info};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::table::{bytes, count, of, table};
use crate::terminal::print;
use crate::{Done, Failure};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Read every byte of a store and say what is wrong with it
    ///
    /// Checks every checksum, the order and number of rows in each table, and that rows, tasks and
    /// records tell the same story. Changes nothing. Ends with 0 if the store is whole, with 1 if not.
    #[command(
        after_help = "Examples:\n  evenhand store check /var/lib/evenhand\n  evenhand store check --json backup/ | jq .problems"
    )]
    Check(Place),
    /// Show what is in a store: shards, queues, tasks, tables and log
    ///
    /// Changes nothing. Tasks are counted from the queues' records, so this is quick on large stores.
    #[command(
        after_help = "Examples:\n  evenhand store info /var/lib/evenhand\n  evenhand store info --json /var/lib/evenhand | jq '.shards[].queues'"
    )]
    Info(Place),
}

#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The store's directory
    dir: PathBuf,
    /// Print JSON for programs instead of text for people
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: Command) -> Done {
    match command {
        Command::Check(place) => {
            let bar = bar("checking");
            let checked = embedded::check(&place.dir, &mut |done, total| advance(&bar, done, total));
            let checked = checked.map_err(Failure::new)?;
            bar.finish_and_clear();
            let whole = checked.problems.is_empty();
            print(if place.json { check_json(&checked) } else { check_text(&place, &checked) })?;
            Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Info(place) => {
            let bar = bar("reading");
            let info = embedded::info(&place.dir, &mut |done, total| advance(&bar, done, total));
            let info = info.map_err(Failure::new)?;
            bar.finish_and_clear();
            print(if place.json { info_json(&info) } else { info_text(&place, &info) })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A bar on standard error, if that is a terminal; a few times a second at most.
fn bar(doing: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
    if let Ok(style) = ProgressStyle::with_template(
        "{msg} [{wide_bar}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    ) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(doing);
    bar
}

fn advance(bar: &ProgressBar, done: u64, total: u64) {
    if bar.length() != Some(total) {
        bar.set_length(total);
    }
    // Once per so many bytes: telling the bar costs more than reading a row.
    if done >> 18 != bar.position() >> 18 || done == total {
        bar.set_position(done);
    }
}

fn check_text(place: &Place, checked: &Checked) -> String {
    let dir = place.dir.display();
    if checked.problems.is_empty() {
        let (files, read) = (of(checked.files, "file"), bytes(checked.bytes));
        let (tasks, timers) = (of(checked.tasks, "task"), of(checked.timers, "timer"));
        let (rows, ended) = (count(checked.rows), count(checked.ended));
        return format!(
            "{dir} is whole: {files}, {read}, {tasks} ({rows} in lanes, {ended} ended), {timers}\n"
        );
    }
    let mut text = format!("{dir} is damaged:\n");
    for problem in &checked.problems {
        text.push_str(&format!("  {problem}\n"));
    }
    text
}

fn check_json(checked: &Checked) -> String {
    let json = json!({
        "whole": checked.problems.is_empty(),
        "problems": checked.problems,
        "files": checked.files,
        "bytes": checked.bytes,
        "tasks": checked.tasks,
        "ended": checked.ended,
        "rows": checked.rows,
        "timers": checked.timers,
    });
    format!("{json:#}\n")
}

fn info_text(place: &Place, info: &Info) -> String {
    let mut text = format!(
        "{}: store format {}, {}\n{}, {} of them in the log alone ({})\n",
        place.dir.display(),
        info.format,
        bytes(info.bytes),
        of(info.commits, "commit"),
        count(info.commits_in_log),
        bytes(info.log_bytes),
    );
    if info.unfinished_bytes > 0 {
        let unfinished = bytes(info.unfinished_bytes);
        text.push_str(&format!("{unfinished} of a commit that was never finished, nor acknowledged\n"));
    }
    let rows: Vec<Vec<String>> = info
        .tables
        .iter()
        .map(|kind| {
            let counts = [kind.tables, kind.layers, kind.puts, kind.deletes].map(count);
            let [tables, layers, puts, deletes] = counts;
            vec![kind.kind.into(), tables, layers, puts, deletes, bytes(kind.bytes)]
        })
        .collect();
    text.push('\n');
    text.push_str(&table(&["kind", "tables", "layers", "puts", "deletes", "size"], &rows));
    if info.shards.is_empty() {
        text.push_str("\nno shard has been taken yet\n");
    }
    for shard in &info.shards {
        text.push_str(&format!(
            "\nshard {}: epoch {}, next seq {}, {} remembered, {} set aside\n",
            shard.shard,
            shard.epoch,
            shard.next_seq,
            of(shard.keys, "key"),
            of(shard.aside, "task")
        ));
        let rows: Vec<Vec<String>> = shard
            .queues
            .iter()
            .map(|queue| {
                let totals = queue.record.totals;
                let counts = [
                    totals.unfinished(),
                    totals.accepted,
                    totals.succeeded,
                    totals.failed,
                    totals.canceled,
                    queue.lanes,
                    queue.keys,
                ];
                std::iter::once(queue.record.name.to_string()).chain(counts.map(count)).collect()
            })
            .collect();
        let head = ["queue", "unfinished", "accepted", "succeeded", "failed", "canceled", "lanes", "keys"];
        text.push_str(&table(&head, &rows));
    }
    text
}

fn info_json(info: &Info) -> String {
    let tables = info.tables.iter().map(|of| {
        json!({
            "kind": of.kind, "tables": of.tables, "layers": of.layers, "puts": of.puts,
            "deletes": of.deletes, "bytes": of.bytes,
        })
    });
    let shards = info.shards.iter().map(|shard| {
        let queues = shard.queues.iter().map(|queue| {
            let totals = queue.record.totals;
            json!({
                "queue": queue.record.name.as_str(), "unfinished": totals.unfinished(),
                "accepted": totals.accepted, "succeeded": totals.succeeded, "failed": totals.failed,
                "canceled": totals.canceled, "lanes": queue.lanes, "keys": queue.keys,
            })
        });
        json!({
            "shard": shard.shard.0, "epoch": shard.epoch.0, "next_seq": shard.next_seq,
            "keys": shard.keys, "aside": shard.aside, "queues": queues.collect::<Vec<_>>(),
        })
    });
    let json = json!({
        "format": info.format, "bytes": info.bytes, "commits": info.commits,
        "commits_in_log": info.commits_in_log, "log_bytes": info.log_bytes,
        "unfinished_bytes": info.unfinished_bytes,
        "tables": tables.collect::<Vec<_>>(), "shards": shards.collect::<Vec<_>>(),
    });
    format!("{json:#}\n")
}
