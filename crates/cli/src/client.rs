//! What asks a server and ends: get, list, queues, status.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::{Args as ClapArgs, ValueEnum};
use evenhand::{Client, Filter, Refusal, wire};
use evenhand_api::rest;

use crate::terminal::{Stream, print, print_json};
use crate::{Done, parse, show};

/// Where the server is.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ServerArgs {
    /// Where the server is
    #[arg(long, env = "EVENHAND_SERVER", default_value = evenhand::DEFAULT_SERVER, value_parser = parse::server, value_name = "URL")]
    server: String,
}

impl ServerArgs {
    pub(crate) fn server(&self) -> &str {
        &self.server
    }

    /// A client that a person waits for: it gives up sooner than a program's would.
    pub(crate) fn client(&self) -> Result<Client, Refusal> {
        Ok(Client::new(self.server())?.patience(Duration::from_secs(5)))
    }
}

/// A look at something.
#[derive(Debug, ClapArgs)]
pub(crate) struct LookArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Print JSON for programs instead of text for people
    #[arg(long)]
    pub(crate) json: bool,
}

/// One task.
#[derive(Debug, ClapArgs)]
pub(crate) struct TaskArgs {
    /// The task's id, such as 0-42
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) look: LookArgs,
}

/// One task, and how long it may take.
#[derive(Debug, ClapArgs)]
pub(crate) struct ShortenArgs {
    /// The task's id, such as 0-42
    id: String,
    /// How long one run of it may take from now on, such as 5s
    #[arg(value_parser = parse::duration, value_name = "TIME")]
    time: Duration,
    #[command(flatten)]
    look: LookArgs,
}

/// Which tasks: those that match everything that is named.
#[derive(Debug, ClapArgs)]
pub(crate) struct FilterArgs {
    /// Of this queue only
    #[arg(long, value_name = "QUEUE")]
    pub(crate) queue: Option<String>,
    /// Of this key only
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,
    /// In this state only
    #[arg(long, value_name = "STATE")]
    pub(crate) state: Option<StateArg>,
    /// Accepted at this time or later (2026-11-16T09:30:00Z), or so long ago at most (2h)
    #[arg(long, value_parser = parse::time_or_ago, value_name = "TIME")]
    pub(crate) since: Option<SystemTime>,
    /// Accepted before this time, or longer ago
    #[arg(long, value_parser = parse::time_or_ago, value_name = "TIME")]
    pub(crate) until: Option<SystemTime>,
}

impl FilterArgs {
    /// Nothing is named.
    pub(crate) fn is_empty(&self) -> bool {
        let FilterArgs { queue, key, state, since, until } = self;
        queue.is_none() && key.is_none() && state.is_none() && since.is_none() && until.is_none()
    }

    pub(crate) fn filter(&self) -> Filter {
        let state = self.state.map_or(wire::TaskState::Unspecified, StateArg::to_wire);
        Filter::from(wire::Filter {
            queue: self.queue.clone().unwrap_or_default(),
            key: self.key.clone().unwrap_or_default(),
            state: state.into(),
            accepted_from_ms: self.since.map(parse::since_1970),
            accepted_before_ms: self.until.map(parse::since_1970),
        })
    }
}

/// How a task can stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateArg {
    Queued,
    Scheduled,
    Running,
    Succeeded,
    Failed,
    Canceled,
    Expired,
}

impl StateArg {
    pub(crate) fn state(self) -> rest::State {
        match self {
            StateArg::Queued => rest::State::Queued,
            StateArg::Scheduled => rest::State::Scheduled,
            StateArg::Running => rest::State::Running,
            StateArg::Succeeded => rest::State::Succeeded,
            StateArg::Failed => rest::State::Failed,
            StateArg::Canceled => rest::State::Canceled,
            StateArg::Expired => rest::State::Expired,
        }
    }

    fn to_wire(self) -> wire::TaskState {
        self.state().to_wire()
    }
}

/// Which tasks, and how many.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand list --key acme --state queued
  evenhand list --state failed --since 1h
  evenhand list --queue render --limit 1000 --json | jq -r '.tasks[].id'

Tasks are listed by id, the oldest first: those that have not ended, and those whose end is remembered.")]
pub(crate) struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// How many
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Go on where the last page ended
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn shorten(args: ShortenArgs) -> Done {
    args.look.server.client()?.shorten(&args.id, args.time).await?;
    let max_duration_ms = args.time.as_millis() as u64;
    match args.look.json {
        true => print_json(&rest::Shortened { max_duration_ms })?,
        false => print(format!("task {} may take {}\n", args.id, show::duration(max_duration_ms)))?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn get(args: TaskArgs) -> Done {
    let task = rest::Task::from(args.look.server.client()?.get(&args.id).await?);
    match args.look.json {
        true => print_json(&task)?,
        false => print(show::task_text(&task, Stream::Out.width(), Stream::Out.paint()))?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn list(args: ListArgs) -> Done {
    let request = wire::ListRequest {
        cursor: args.cursor.unwrap_or_default(),
        limit: Some(args.limit),
        ..args.filter.filter().into()
    };
    let page = rest::Tasks::from(args.look.server.client()?.list(request).await?);
    if args.look.json {
        print_json(&page)?;
        return Ok(ExitCode::SUCCESS);
    }
    // A page may have none and still not be the last.
    match (page.tasks.is_empty(), &page.cursor) {
        (true, None) => print("no tasks\n")?,
        (true, Some(_)) => {}
        (false, _) => print(show::tasks(&page.tasks).for_output())?,
    }
    if let Some(cursor) = &page.cursor {
        print(format!("  there are more: --cursor {cursor}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn queues(args: LookArgs) -> Done {
    let queues = args.server.client()?.queues().await?;
    let queues = rest::Queues { queues: queues.into_iter().map(rest::Queue::from).collect() };
    if args.json {
        print_json(&queues)?;
    } else if queues.queues.is_empty() {
        print("no queues yet; `evenhand submit QUEUE` makes one\n")?;
    } else {
        print(show::queues(&queues.queues, None).for_output())?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn status(args: LookArgs) -> Done {
    let status = rest::Status::from(args.server.client()?.status().await?);
    match args.json {
        true => print_json(&status)?,
        false => {
            print(show::status_text(args.server.server(), &status, Stream::Out.width(), Stream::Out.paint()))?
        }
    }
    Ok(ExitCode::SUCCESS)
}
