//! `evenhand cancel` and `evenhand replay`: tasks by their ids, or all of a filter, step by step.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use evenhand::{Changed, Client};
use evenhand_api::rest;
use serde::Serialize;

use crate::client::{FilterArgs, LookArgs};
use crate::table::{count, of};
use crate::terminal::{Stream, ask, plain, print, print_json, say};
use crate::{Done, Failure};

/// Which tasks to cancel.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand cancel 0-42
  evenhand cancel --queue render --key acme --state queued
  evenhand cancel --queue render --since 1h --yes --json

With a queue or a key instead of ids, all tasks that match are canceled. On a terminal you are asked first; \
everywhere else, and if you do not want to be asked, say --yes. It goes on step by step: when it is ended in between, \
what is canceled stays so, and the same command goes on.")]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    tasks: Chosen,
}

/// Which tasks to run again.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand replay 0-42
  evenhand replay --queue render --state failed
  evenhand replay --queue render --key acme --state failed --since 1h --yes

With a queue or a key instead of ids, all ended tasks that match and were not run again yet are. On a terminal you are \
asked first; everywhere else, and if you do not want to be asked, say --yes.")]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    tasks: Chosen,
}

#[derive(Debug, ClapArgs)]
struct Chosen {
    /// The tasks' ids, such as 0-42
    #[arg(value_name = "TASK", conflicts_with_all = ["queue", "key", "state", "since", "until"])]
    ids: Vec<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    look: LookArgs,
}

/// What is done to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Cancel,
    Replay,
}

impl What {
    /// Cancel this; run this again.
    fn asked(self, tasks: &str) -> String {
        match self {
            What::Cancel => format!("Cancel {tasks}?"),
            What::Replay => format!("Run again {tasks}?"),
        }
    }

    fn done(self) -> &'static str {
        match self {
            What::Cancel => "canceled",
            What::Replay => "run again",
        }
    }

    fn name(self) -> &'static str {
        match self {
            What::Cancel => "cancel",
            What::Replay => "replay",
        }
    }
}

/// What became of a task, for programs: what REST answers, and of several which it was.
#[derive(Serialize)]
struct One<'a, T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<&'a str>,
    #[serde(flatten)]
    answer: T,
}

pub(crate) async fn cancel(args: CancelArgs) -> Done {
    run(What::Cancel, args.tasks).await
}

pub(crate) async fn replay(args: ReplayArgs) -> Done {
    run(What::Replay, args.tasks).await
}

async fn run(what: What, chosen: Chosen) -> Done {
    let client = chosen.look.server.client()?;
    if !chosen.ids.is_empty() {
        return each(what, &client, &chosen).await;
    }
    if chosen.filter.queue.is_none() && chosen.filter.key.is_none() {
        let all = if chosen.filter.is_empty() { "" } else { ": a filter has one of them at least" };
        let text = format!("name tasks to {}, or a --queue or a --key{all}", what.name());
        return Err(Failure { text, exit: 2 });
    }
    // Told before anybody is asked: in these states nothing can be done.
    if let Some(state) = chosen.filter.state.map(|state| state.state())
        && state.is_over() != (what == What::Replay)
    {
        let text = match what {
            What::Cancel => format!("--state {}: these have ended, and cannot be canceled", state.name()),
            What::Replay => format!("--state {}: these have not ended, and are not run again", state.name()),
        };
        return Err(Failure { text, exit: 2 });
    }
    let asked = what.asked(&described(what, &chosen.filter));
    ask(chosen.yes, &format!("{} many tasks", what.name()), &asked)?;
    all(what, &client, &chosen).await
}

/// Tasks by their ids. Each is done by itself; the exit code is that of the first that could not be.
async fn each(what: What, client: &Client, chosen: &Chosen) -> Done {
    let mut exit = 0;
    for id in &chosen.ids {
        let done = match what {
            What::Cancel => client.cancel(id).await.map(Answer::Canceled),
            What::Replay => client.replay(id).await.map(Answer::Replayed),
        };
        match done {
            Ok(answer) if chosen.look.json => answer.json((chosen.ids.len() > 1).then_some(id.as_str()))?,
            Ok(answer) => print(answer.text(id) + "\n")?,
            Err(refusal) => {
                let failure = Failure::from(refusal);
                if let [_] = chosen.ids.as_slice() {
                    return Err(failure);
                }
                say(format!("evenhand: {id}: {}", failure.text))?;
                exit = if exit == 0 { failure.exit } else { exit };
            }
        }
    }
    Ok(ExitCode::from(exit))
}

/// What a server said of one task.
enum Answer {
    /// Whether it is being stopped.
    Canceled(bool),
    /// The new task.
    Replayed(String),
}

impl Answer {
    fn text(&self, id: &str) -> String {
        match self {
            Answer::Canceled(true) => format!("task {id} is running; its worker has been told to stop it"),
            Answer::Canceled(false) => format!("task {id} is canceled"),
            Answer::Replayed(again) => format!("task {id} is run again as {again}"),
        }
    }

    fn json(self, task: Option<&str>) -> Result<(), Failure> {
        match self {
            Answer::Canceled(stopping) => print_json(&One { task, answer: rest::Canceled { stopping } }),
            Answer::Replayed(id) => print_json(&One { task, answer: rest::Replayed { id } }),
        }
    }
}

/// All tasks of a filter.
async fn all(what: What, client: &Client, chosen: &Chosen) -> Done {
    let filter = chosen.filter.filter();
    let mut steps = match what {
        What::Cancel => client.cancel_many(filter),
        What::Replay => client.replay_many(filter),
    };
    let live = Stream::Err.is_live() && !chosen.look.json;
    let clear = || if live { Stream::Err.print("\r\x1b[2K") } else { Ok(()) };
    let (mut tasks, mut stopping) = (0, 0);
    loop {
        let step = match steps.next().await {
            Ok(Some(step)) => step,
            Ok(None) => break,
            Err(refusal) => {
                clear()?;
                let failure = Failure::from(refusal);
                let text = match tasks {
                    0 => failure.text,
                    tasks => format!("{}; before that {} {}", failure.text, is(tasks), what.done()),
                };
                return Err(Failure { text, ..failure });
            }
        };
        tasks += step.tasks;
        stopping += step.stopping;
        if chosen.look.json {
            print_step(what, step)?;
        } else if live {
            Stream::Err.print(format!("\r\x1b[2K{} {} …", count(tasks), what.done()))?;
        }
    }
    clear()?;
    if !chosen.look.json {
        let stopped = match stopping {
            0 => String::new(),
            1 => "; 1 of them was running and is being stopped".into(),
            n => format!("; {} of them were running and are being stopped", count(n)),
        };
        print(format!("{} {}{stopped}\n", is(tasks), what.done()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// So many tasks are.
fn is(tasks: u64) -> String {
    format!("{} {}", of(tasks, "task"), if tasks == 1 { "is" } else { "are" })
}

/// A step as REST has it, without its cursor: it is passed on here.
fn print_step(what: What, step: Changed) -> Result<(), Failure> {
    let Changed { tasks: changed, stopping, ids } = step;
    match what {
        What::Cancel => print_json(&rest::CanceledMany { changed, stopping, cursor: None }),
        What::Replay => print_json(&rest::ReplayedMany { changed, ids, cursor: None }),
    }
}

/// Which tasks, in words.
fn described(what: What, filter: &FilterArgs) -> String {
    let state = match (filter.state, what) {
        (Some(state), _) => state.state().name(),
        (None, What::Cancel) => "unfinished",
        (None, What::Replay) => "ended",
    };
    let queue = filter.queue.as_ref().map(|queue| format!("queue {}", plain(queue)));
    let key = filter.key.as_ref().map(|key| format!("key {}", plain(key)));
    let of: Vec<String> = [queue, key].into_iter().flatten().collect();
    let timed = filter.since.is_some() || filter.until.is_some();
    let accepted = if timed { ", accepted in that time" } else { "" };
    format!("all {state} tasks of {}{accepted}", of.join(", "))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        tasks: Chosen,
    }

    #[test]
    fn what_is_asked_says_what_would_be_done() {
        let asked = |what: What, words: &[&str]| {
            let chosen = Line::parse_from(["x"].iter().chain(words)).tasks;
            what.asked(&described(what, &chosen.filter))
        };
        assert_eq!(
            asked(What::Cancel, &["--queue", "render", "--key", "acme"]),
            "Cancel all unfinished tasks of queue render, key acme?"
        );
        assert_eq!(
            asked(What::Replay, &["--queue", "render", "--state", "failed", "--since", "1h"]),
            "Run again all failed tasks of queue render, accepted in that time?"
        );
    }

    #[test]
    fn ids_and_a_filter_exclude_each_other() {
        assert!(Line::try_parse_from(["x", "0-1", "0-2"]).is_ok());
        assert!(Line::try_parse_from(["x", "0-1", "--queue", "q"]).is_err());
    }
}
