//! What asks a server and ends: get, cancel, list, queues, workers, status.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args as ClapArgs, ValueEnum};
use evenhand::{Client, Refusal, wire};
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

/// Which tasks.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand list --key acme --state queued
  evenhand list --queue render --limit 1000 --json | jq -r '.tasks[].id'")]
pub(crate) struct ListArgs {
    /// Of this queue only
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Of this key only
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Those that wait, or those that run
    #[arg(long, value_name = "STATE")]
    state: Option<ListedState>,
    /// How many
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Go on where the last page ended
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    #[command(flatten)]
    look: LookArgs,
}

/// How a task can stand that has not ended.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ListedState {
    Queued,
    Running,
}

pub(crate) async fn get(args: TaskArgs) -> Done {
    let task = rest::Task::from(args.look.server.client()?.get(&args.id).await?);
    match args.look.json {
        true => print_json(&task)?,
        false => print(show::task_text(&task, Stream::Out.width(), Stream::Out.paint()))?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn cancel(args: TaskArgs) -> Done {
    let stopping = args.look.server.client()?.cancel(&args.id).await?;
    match (args.look.json, stopping) {
        (true, stopping) => print_json(&rest::Canceled { stopping })?,
        (false, true) => {
            print(format!("task {} is running; its worker has been told to stop it\n", args.id))?
        }
        (false, false) => print(format!("task {} is canceled\n", args.id))?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn list(args: ListArgs) -> Done {
    let state = match args.state {
        None => wire::TaskState::Unspecified,
        Some(ListedState::Queued) => wire::TaskState::Queued,
        Some(ListedState::Running) => wire::TaskState::Running,
    };
    let request = wire::ListRequest {
        queue: args.queue.unwrap_or_default(),
        cursor: args.cursor.unwrap_or_default(),
        limit: Some(args.limit),
        key: args.key.unwrap_or_default(),
        state: state.into(),
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

pub(crate) async fn workers(args: LookArgs) -> Done {
    let workers = args.server.client()?.workers().await?;
    let workers = rest::Workers { workers: workers.into_iter().map(rest::Worker::from).collect() };
    if args.json {
        print_json(&workers)?;
    } else if workers.workers.is_empty() {
        print("no workers; `evenhand worker QUEUE -- COMMAND` starts one\n")?;
    } else {
        print(show::workers(&workers.workers).for_output())?;
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
