//! `evenhand watch`: what happens to a task until it has ended, or to all tasks of a queue or a key. On a terminal
//! how a task stands is one line that is replaced in place; everywhere else each event is a line of its own.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use evenhand::{Client, Kind, Refusal, wire};
use evenhand_api::rest;
use serde::Serialize;

use crate::client::LookArgs;
use crate::terminal::{Look, Stream, line, print_json};
use crate::{Done, Failure, show};

/// How often a line that is replaced is looked at again.
const TICK: Duration = Duration::from_secs(1);
/// How long such a look may take before the line says that the server is away.
const LOOK_WITHIN: Duration = Duration::from_secs(2);
/// How long a server may be away from somebody who watches.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a shell says of a command that was ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// What to watch.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand watch 0-42
  evenhand watch --queue render --key acme
  evenhand watch --queue render --json | jq -r 'select(.event == \"finished\") | .task.id'

A task is watched until it has ended, a queue or a key until Ctrl-C.")]
pub(crate) struct Args {
    /// The task's id, such as 0-42; all tasks, if nobody says
    #[arg(conflicts_with_all = ["queue", "key"])]
    id: Option<String>,
    /// All tasks of this queue
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// All tasks of this key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn run(args: Args) -> Done {
    let client = args.look.server.client()?;
    let shown = if args.look.json { Shown::Json } else { Shown::Text(Stream::Out) };
    match args.id {
        Some(id) => Follow::new(&client, &id, shown).until_it_ends().await.map(drop)?,
        None => {
            let request = wire::WatchRequest {
                queue: args.queue.unwrap_or_default(),
                key: args.key.unwrap_or_default(),
                ..wire::WatchRequest::default()
            };
            watch_many(&client, request, shown).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// To whom events are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Nothing,
    Json,
    Text(Stream),
}

/// An event for programs, as the stream of REST has it, with its name.
#[derive(Serialize)]
struct Named {
    event: &'static str,
    #[serde(flatten)]
    told: rest::Event,
}

/// Events, also of a server that is restarted meanwhile. Whether it is there at all is found out sooner.
async fn events(
    client: &Client,
    request: wire::WatchRequest,
    patience: Duration,
) -> Result<evenhand::Watch, Refusal> {
    client.status().await?;
    client.clone().patience(patience).watch_from(request).await
}

/// One task, until it has ended.
pub(crate) struct Follow<'a> {
    client: &'a Client,
    id: &'a str,
    shown: Shown,
    live: Live,
    patience: Duration,
    /// Without us it is canceled after so long.
    attached: Option<Duration>,
    /// How it stood last.
    task: Option<rest::Task>,
}

impl<'a> Follow<'a> {
    pub(crate) fn new(client: &'a Client, id: &'a str, shown: Shown) -> Follow<'a> {
        let live = match shown {
            Shown::Text(stream) => Live::new(stream),
            Shown::Nothing | Shown::Json => Live { stream: Stream::Err, on: false, drawn: false },
        };
        Follow { client, id, shown, live, patience: PATIENCE, attached: None, task: None }
    }

    /// It is kept by those who watch it: without them it is canceled after so long.
    pub(crate) fn attached(self, attached: Option<Duration>) -> Follow<'a> {
        Follow { attached, ..self }
    }

    /// How it ended.
    pub(crate) async fn until_it_ends(mut self) -> Result<evenhand::Task, Failure> {
        let request = wire::WatchRequest { id: self.id.into(), ..wire::WatchRequest::default() };
        let events = events(self.client, request, self.patience).await?;
        let live = self.live.on;
        // Neither is given up for the other: to come back to a server may take longer than a tick, and nobody
        // who presses Ctrl-C waits for an answer.
        let mut next = std::pin::pin!(next_of(events));
        let mut look = std::pin::pin!(look_after(Duration::ZERO, self.client, self.id));
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        loop {
            tokio::select! {
                biased;
                _ = &mut interrupted => {
                    self.live.clear()?;
                    let goes_on = match (self.shown, self.attached) {
                        (Shown::Text(_), None) => {
                            format!("task {0} goes on; `evenhand watch {0}` shows it again", self.id)
                        }
                        (Shown::Text(_), Some(ttl)) => format!(
                            "task {0} is canceled in {1}, unless `evenhand watch {0}` goes on",
                            self.id,
                            show::age(ttl.as_millis() as u64)
                        ),
                        (Shown::Nothing | Shown::Json, _) => String::new(),
                    };
                    return Err(Failure { text: goes_on, exit: INTERRUPTED });
                }
                (event, events) = &mut next => match event {
                    Ok(Some(event)) => {
                        let over = ended(&event);
                        self.on_event(event)?;
                        if let Some(task) = over {
                            self.live.clear()?;
                            return Ok(task);
                        }
                        next.set(next_of(events));
                    }
                    Ok(None) => return Err(Failure::new("the stream of events has ended")),
                    Err(refusal) => {
                        self.live.clear()?;
                        return Err(refusal.into());
                    }
                },
                seen = &mut look, if live => {
                    self.on_look(seen)?;
                    look.set(look_after(TICK, self.client, self.id));
                }
            }
        }
    }

    fn on_event(&mut self, event: wire::TaskEvent) -> Result<(), Failure> {
        let (name, told) = rest::Event::named(event);
        let stream = match self.shown {
            Shown::Nothing => return Ok(()),
            Shown::Json => return print_json(&Named { event: name, told }),
            Shown::Text(stream) => stream,
        };
        // What the replaced line says needs no line of its own.
        let again = told.task.as_ref().is_some_and(|task| task.error.is_some());
        let passes = matches!(name, "queued" | "scheduled" | "started") && !again
            || name == "progress"
            || name == "estimate"
            || name == "missed";
        if !(self.live.on && passes)
            && let Some(line) = show::event(&told, stream.paint())
        {
            self.live.line(&line)?;
        }
        if let Some(mut task) = told.task {
            // An event says less than a look.
            task.accepted_ms = task.accepted_ms.or(self.task.as_ref().and_then(|last| last.accepted_ms));
            self.task = (!task.state.is_over()).then_some(task);
        }
        if let (Some(task), Some(progress)) = (&mut self.task, told.progress) {
            task.progress = Some(progress);
        }
        if let (Some(task), Some(estimate)) = (&mut self.task, told.estimate) {
            task.estimate = Some(estimate);
        }
        self.draw()
    }

    /// A task that waits moves up without an event; and a server may go without one.
    fn on_look(&mut self, seen: Result<evenhand::Task, Refusal>) -> Result<(), Failure> {
        match seen {
            Ok(task) if matches!(rest::State::of(&task), rest::State::Queued | rest::State::Scheduled) => {
                self.task = Some(task.into());
            }
            Err(refusal) if refusal.kind == Kind::Unavailable => {
                return self.live.draw(&[("the server cannot be reached; trying again".into(), Look::Waits)]);
            }
            Ok(_) | Err(_) => {}
        }
        self.draw()
    }

    fn draw(&mut self) -> Result<(), Failure> {
        match &self.task {
            Some(task) => self.live.draw(&show::live(task)),
            None => Ok(()),
        }
    }
}

/// The next event, and where the one after it comes from.
async fn next_of(mut events: evenhand::Watch) -> (Result<Option<wire::TaskEvent>, Refusal>, evenhand::Watch) {
    (events.next().await, events)
}

/// How a task stands, after a while.
async fn look_after(pause: Duration, client: &Client, id: &str) -> Result<evenhand::Task, Refusal> {
    tokio::time::sleep(pause).await;
    let client = client.clone().patience(Duration::ZERO);
    let looked = tokio::time::timeout(LOOK_WITHIN, client.get(id)).await;
    looked.unwrap_or_else(|_| Err(Refusal::new(Kind::Unavailable, "", "the server does not answer")))
}

/// How a task ended, if it did.
fn ended(event: &wire::TaskEvent) -> Option<evenhand::Task> {
    match &event.event {
        Some(wire::task_event::Event::Task(task)) if rest::State::of(task).is_over() => Some(task.clone()),
        Some(
            wire::task_event::Event::Task(_)
            | wire::task_event::Event::Output(_)
            | wire::task_event::Event::Dropped(_)
            | wire::task_event::Event::Progress(_)
            | wire::task_event::Event::Estimate(_)
            | wire::task_event::Event::Missed(_),
        )
        | None => None,
    }
}

async fn watch_many(client: &Client, request: wire::WatchRequest, shown: Shown) -> Result<(), Failure> {
    let mut events = events(client, request, PATIENCE).await?;
    while let Some(event) = events.next().await? {
        let (name, told) = rest::Event::named(event);
        match shown {
            Shown::Nothing => {}
            Shown::Json => print_json(&Named { event: name, told })?,
            Shown::Text(stream) => stream.print(show::event_of_many(&told, name, stream.paint()) + "\n")?,
        }
    }
    Ok(())
}

/// A line at the end of what is shown that is replaced in place.
#[derive(Debug)]
struct Live {
    stream: Stream,
    on: bool,
    drawn: bool,
}

impl Live {
    fn new(stream: Stream) -> Live {
        Live { stream, on: stream.is_live(), drawn: false }
    }

    /// A line that stays.
    fn line(&mut self, line: &str) -> Result<(), Failure> {
        self.clear()?;
        self.stream.print(format!("{line}\n"))
    }

    /// What stands there from now on.
    fn draw(&mut self, parts: &[(String, Look)]) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        // The last column stays free: some terminals go to the next line when it is filled.
        let columns = self.stream.width().unwrap_or(80).saturating_sub(1);
        let line = line(parts, columns, self.stream.paint());
        self.drawn = true;
        self.stream.print(format!("\r\x1b[2K{line}"))
    }

    fn clear(&mut self) -> Result<(), Failure> {
        match std::mem::take(&mut self.drawn) {
            true => self.stream.print("\r\x1b[2K"),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use evenhand_core::owner::Settings;
    use tempfile::TempDir;

    use super::*;
    use crate::serve;

    #[tokio::test(flavor = "multi_thread")]
    async fn on_a_terminal_too_a_server_may_not_stay_away_for_ever() {
        let dir = TempDir::new().unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let server = serve::start(dir.path(), None, any, Settings::default(), 1).await.unwrap();
        let client = Client::new(&format!("http://{}", server.addr())).unwrap();
        let id = client.enqueue("q", evenhand::NewTask::new("x")).await.unwrap();
        let mut follow = Follow::new(&client, &id, Shown::Text(Stream::Err));
        follow.live.on = true;
        // More than a tick, so that one comes while the way back is looked for.
        follow.patience = 3 * TICK;
        let stopped = async {
            tokio::time::sleep(TICK / 2).await;
            server.stop().await.unwrap();
        };
        let both = async { tokio::join!(follow.until_it_ends(), stopped).0 };
        let ended = tokio::time::timeout(30 * TICK, both).await.expect("it gives up");
        assert_eq!(ended.unwrap_err().exit, 6);
    }
}
