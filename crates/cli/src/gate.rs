//! `evenhand gate`: how the start gate stands, and to open it by hand.

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use evenhand::Client;
use evenhand_api::rest;

use crate::client::LookArgs;
use crate::table::of;
use crate::terminal::{Stream, ask, print, print_json, say};
use crate::{Done, Failure, show};

/// To look at the gate, or to open it.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  evenhand gate
  evenhand gate --json | jq .absent_seats
  evenhand gate open

After a crash of the server nothing starts until it is known what runs."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    look: LookArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Open the gate without the workers that it waits for: they count as dead
    Open(OpenArgs),
}

/// Whether to ask.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand gate open
  evenhand gate open --yes --json

If a worker that it waits for is alive, its tasks run twice at once. On a terminal you are asked first; everywhere else \
say --yes.")]
struct OpenArgs {
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn run(args: Args) -> Done {
    match args.command {
        None => look_at(args.look).await,
        Some(Command::Open(args)) => open(args).await,
    }
}

async fn shard(client: &Client) -> Result<rest::Shard, Failure> {
    let shard = rest::Status::from(client.status().await?).shards.into_iter().next();
    shard.ok_or_else(|| Failure::new("the server has no shard"))
}

async fn look_at(look: LookArgs) -> Done {
    let shard = shard(&look.server.client()?).await?;
    match look.json {
        true => print_json(&shard)?,
        false => print(show::gate_text(&shard, Stream::Out.width(), Stream::Out.paint()))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn open(args: OpenArgs) -> Done {
    let OpenArgs { yes, look } = args;
    let client = look.server.client()?;
    let shard = shard(&client).await?;
    if !shard.open {
        say(risk(&shard))?;
        ask(yes, "open the start gate", "Open the start gate now?")?;
    }
    // A gate that is open is asked, too: it says the same.
    let opened = rest::GateOpened::from(client.open_gate().await?);
    match look.json {
        true => print_json(&opened)?,
        false => print(says(&opened) + "\n")?,
    }
    Ok(ExitCode::SUCCESS)
}

fn says(opened: &rest::GateOpened) -> String {
    match (opened.was_open, opened.given_up.is_empty()) {
        (true, _) => "the start gate is open already".into(),
        (false, true) => "the start gate is open".into(),
        (false, false) => format!("the start gate is open, without {}", opened.given_up.join(", ")),
    }
}

/// What it means to open a gate that is shut.
fn risk(shard: &rest::Shard) -> String {
    let mut text = format!("the start gate is shut: {}\n", shard.waits_for.as_deref().unwrap_or_default());
    let absent = shard.absent_seats.len() as u64;
    if absent > 0 {
        let seats = shard.absent_seats.join(", ");
        text.push_str(&format!(
            "if it is opened now, {} count{} as dead: {seats}\n\
             if one of them is alive, its tasks run twice at once\n",
            of(absent, "worker"),
            if absent == 1 { "s" } else { "" },
        ));
    }
    if shard.in_doubt {
        text.push_str(
            "the store may be an old copy, so there may be workers that it does not know: if one of them is alive, its \
             tasks run twice at once\n",
        );
    }
    text.push_str("open it only if you know that no worker is alive that has not come");
    text
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::terminal::Paint;

    fn shut(absent: &[&str], in_doubt: bool, waits_for: &str) -> rest::Shard {
        let shard = evenhand::wire::Shard {
            waits_for: waits_for.into(),
            absent_seats: absent.iter().map(|seat| seat.to_string()).collect(),
            opens_in_ms: Some(41_000),
            in_doubt,
            ..evenhand::wire::Shard::default()
        };
        let status = evenhand::wire::StatusResponse { shards: vec![shard], ..Default::default() };
        rest::Status::from(status).shards.remove(0)
    }

    #[test]
    fn what_is_risked_is_said_with_the_names_of_those_it_is_about() {
        let waits = "waiting for 2 of 40 workers: gpu-7, gpu-9, at most 41 s";
        expect![[r#"
            the start gate is shut: waiting for 2 of 40 workers: gpu-7, gpu-9, at most 41 s
            if it is opened now, 2 workers count as dead: gpu-7, gpu-9
            if one of them is alive, its tasks run twice at once
            open it only if you know that no worker is alive that has not come
        "#]]
        .assert_eq(&(risk(&shut(&["gpu-7", "gpu-9"], false, waits)) + "\n"));
    }

    #[test]
    fn a_gate_that_is_shut_says_whom_it_waits_for_and_what_to_do() {
        let waits = "waiting for 2 of 40 workers: gpu-7, gpu-9, at most 41 s";
        expect![[r#"
              gate      shut: nothing starts; tasks are accepted, and what runs goes on
              why       waiting for 2 of 40 workers: gpu-7, gpu-9, at most 41 s

            What to do:
              bring these workers back, in their seats; or wait: it opens by itself
              evenhand gate open   opens it now; it says what that risks
        "#]]
        .assert_eq(&show::gate_text(&shut(&["gpu-7", "gpu-9"], false, waits), Some(100), Paint::NONE));
        let waits = "the store may be an old copy: waiting until all workers agree that nobody is missing, at most 361 s";
        expect![[r#"
              gate      shut: nothing starts; tasks are accepted, and what runs goes on
              why       the store may be an old copy: waiting until all workers agree that nobody is missing, at
                        most 361 s
              in doubt  the store seems to be older than what it was before, such as a backup that was restored.
                        There may be workers that it does not know, and what they run. The gate opens as soon as
                        those that are here agree that nobody is missing, or when nobody else can be alive

            What to do:
              wait: it opens by itself
              evenhand gate open   opens it now; it says what that risks
        "#]].assert_eq(&show::gate_text(&shut(&[], true, waits), Some(100), Paint::NONE));
    }
}
