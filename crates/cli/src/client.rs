//! What asks a server and ends: submit, get, watch, cancel, list, queues, workers, status.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use evenhand::{Client, NewTask, Refusal, TaskState, wire};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use crate::table::{count, of, table};
use crate::{Done, Failure, parse, show};

/// Tasks in one call of a batch, and their bytes; and calls on their way at once.
const BATCH: usize = 1_000;
const BATCH_BYTES: usize = 4 * 1024 * 1024;
const CALLS: usize = 4;

/// Where the server is.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ServerArgs {
    /// Where the server is
    #[arg(long, env = "EVENHAND_SERVER", default_value = evenhand::DEFAULT_SERVER, value_name = "URL")]
    server: String,
}

impl ServerArgs {
    pub(crate) fn server(&self) -> &str {
        self.server.trim_end_matches('/')
    }

    /// A client that a person waits for: it gives up sooner than a program's would.
    fn client(&self) -> Result<Client, Refusal> {
        Ok(Client::new(self.server())?.patience(Duration::from_secs(5)))
    }
}

/// A look at something.
#[derive(Debug, ClapArgs)]
pub(crate) struct LookArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Print JSON for programs instead of text for people
    #[arg(long)]
    json: bool,
}

/// One task.
#[derive(Debug, ClapArgs)]
pub(crate) struct TaskArgs {
    /// The task's id, such as 0-42
    id: String,
    #[command(flatten)]
    look: LookArgs,
}

/// Which tasks.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand list
  evenhand list --queue render --limit 1000 --json | jq -r '.tasks[].id'")]
pub(crate) struct ListArgs {
    /// Of this queue only
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// How many
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Go on where the last page ended
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    #[command(flatten)]
    look: LookArgs,
}

/// What to submit.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand submit render 'page 7'
  evenhand submit render --key acme --priority 2 --max-duration 30s - < page.json
  evenhand submit render --wait 'page 7'
  evenhand submit render --batch tasks.jsonl

A line of a batch is a JSON object with any of: payload (any JSON value, given to the worker as JSON), text (given
as it is), key, weight, priority, max_attempts, max_duration_ms. What a line does not say, the flags do.")]
pub(crate) struct SubmitArgs {
    /// The queue; made if it is new
    queue: String,
    /// The payload as it is; - reads it from standard input
    #[arg(conflicts_with = "batch", value_name = "DATA|-")]
    data: Option<String>,
    /// Submit every line of this file (- is standard input), a JSON object each
    #[arg(long, value_name = "FILE")]
    batch: Option<PathBuf>,
    /// Whom to charge
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// The key's weight from now on
    #[arg(long, value_parser = parse::weight, value_name = "WEIGHT")]
    weight: Option<u32>,
    /// 0 (first) to 9
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=9))]
    priority: Option<u32>,
    /// How long one run may take
    #[arg(long, value_parser = parse::duration, value_name = "TIME")]
    max_duration: Option<Duration>,
    /// How often it may be tried
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    max_attempts: Option<u32>,
    /// A name for this request: the same again within ten minutes is the same request
    #[arg(long, value_name = "ID", conflicts_with = "batch")]
    request_id: Option<String>,
    /// Wait for the end: print the result; exit with 1 if the task failed
    #[arg(long, conflicts_with = "batch")]
    wait: bool,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn submit(args: SubmitArgs) -> Done {
    let client = args.look.server.client()?;
    if let Some(file) = &args.batch {
        return submit_batch(&client, &args, file).await;
    }
    let payload = match args.data.as_deref() {
        Some("-") => {
            let mut bytes = Vec::new();
            std::io::stdin().lock().read_to_end(&mut bytes).map_err(Failure::new)?;
            bytes
        }
        Some(data) => data.as_bytes().to_vec(),
        None => Vec::new(),
    };
    let tasks = vec![flagged(&args, NewTask::new(payload))];
    let enqueued = match args.request_id.clone() {
        Some(id) => client.enqueue_once(&args.queue, tasks, id).await?,
        None => client.enqueue_all(&args.queue, tasks).await?,
    };
    let id = enqueued.ids.first().cloned().unwrap_or_default();
    if !args.wait {
        match args.look.json {
            true => println!("{}", json!({ "id": id, "created": enqueued.created })),
            false => println!("{id}"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !args.look.json {
        eprintln!("task {id} is accepted");
    }
    let task = follow(&client, &id, args.look.json).await?;
    if args.look.json {
        println!("{}", show::task_json(&task));
    } else if let Some(result) = &task.result {
        std::io::stdout().write_all(result).map_err(Failure::new)?;
    }
    Ok(match task.state() {
        TaskState::Succeeded => ExitCode::SUCCESS,
        TaskState::Failed
        | TaskState::Canceled
        | TaskState::Queued
        | TaskState::Running
        | TaskState::Unspecified => ExitCode::FAILURE,
    })
}

/// What the flags say of a task.
fn flagged(args: &SubmitArgs, mut task: NewTask) -> NewTask {
    if let Some(key) = &args.key {
        task = task.key(key);
    }
    if let Some(weight) = args.weight {
        task = task.weight_thousandths(weight);
    }
    if let Some(priority) = args.priority {
        task = task.priority(priority);
    }
    if let Some(duration) = args.max_duration {
        task = task.max_duration(duration);
    }
    if let Some(attempts) = args.max_attempts {
        task = task.max_attempts(attempts);
    }
    task
}

/// Shows what happens to a task on standard error, until it has ended.
async fn follow(client: &Client, id: &str, quiet: bool) -> Result<evenhand::Task, Failure> {
    loop {
        let mut watch = client.watch(id).await?;
        while let Some(event) = watch.next().await? {
            if !quiet {
                show::event(&event);
            }
            if let Some(wire::task_event::Event::Task(task)) = event.event
                && show::is_over(&task)
            {
                return Ok(task);
            }
        }
        // The server ended the stream: it was restarted, perhaps.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn submit_batch(client: &Client, args: &SubmitArgs, file: &PathBuf) -> Done {
    let (input, size): (Box<dyn BufRead + Send>, Option<u64>) = match file.to_str() {
        Some("-") => (Box::new(std::io::BufReader::new(std::io::stdin())), None),
        _ => {
            let name = file.display();
            let file = std::fs::File::open(file).map_err(|error| Failure::new(format!("{name}: {error}")))?;
            let bytes = file.metadata().ok().map(|about| about.len());
            (Box::new(std::io::BufReader::new(file)), bytes)
        }
    };
    let bar = progress(size);
    let mut calls = tokio::task::JoinSet::new();
    let (mut tasks, mut bytes, mut accepted) = (Vec::with_capacity(BATCH), 0, 0);
    let mut print = |done: Option<Result<Result<evenhand::Enqueued, Refusal>, tokio::task::JoinError>>| {
        let Some(done) = done else { return Ok(()) };
        let enqueued = done.map_err(Failure::new)??;
        accepted += enqueued.ids.len() as u64;
        if args.look.json {
            enqueued.ids.iter().for_each(|id| println!("{}", json!({ "id": id })));
        }
        bar.set_message(format!("{} accepted", of(accepted, "task")));
        Ok::<(), Failure>(())
    };
    for (n, line) in input.lines().enumerate() {
        let line = line.map_err(|error| Failure::new(format!("line {}: {error}", n + 1)))?;
        bar.inc(line.len() as u64 + 1);
        if line.trim().is_empty() {
            continue;
        }
        let task = batch_line(args, &line).map_err(|what| Failure {
            text: format!("line {}: {what}; lines before it may be accepted", n + 1),
            exit: 2,
        })?;
        bytes += task.payload_bytes();
        tasks.push(task);
        if tasks.len() == BATCH || bytes >= BATCH_BYTES {
            bytes = 0;
            if calls.len() == CALLS {
                print(calls.join_next().await)?;
            }
            spawn(&mut calls, client, &args.queue, std::mem::take(&mut tasks));
        }
    }
    if !tasks.is_empty() {
        spawn(&mut calls, client, &args.queue, tasks);
    }
    while !calls.is_empty() {
        print(calls.join_next().await)?;
    }
    bar.finish_and_clear();
    if !args.look.json {
        println!("{} accepted", of(accepted, "task"));
    }
    Ok(ExitCode::SUCCESS)
}

fn spawn(
    calls: &mut tokio::task::JoinSet<Result<evenhand::Enqueued, Refusal>>,
    client: &Client,
    queue: &str,
    tasks: Vec<NewTask>,
) {
    let (client, queue) = (client.clone().patience(Duration::from_secs(60)), queue.to_string());
    calls.spawn(async move { client.enqueue_all(&queue, tasks).await });
}

/// A task from a line of a batch.
fn batch_line(args: &SubmitArgs, line: &str) -> Result<NewTask, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("is no JSON: {error}"))?;
    let Value::Object(fields) = value else { return Err("must be a JSON object".into()) };
    let payload = match (fields.get("payload"), fields.get("text")) {
        (Some(_), Some(_)) => return Err("has both payload and text; give one".into()),
        (Some(payload), None) => payload.to_string().into_bytes(),
        (None, Some(Value::String(text))) => text.clone().into_bytes(),
        (None, Some(_)) => return Err("text must be a string".into()),
        (None, None) => Vec::new(),
    };
    let mut task = flagged(args, NewTask::new(payload));
    for (name, value) in &fields {
        let number = || {
            let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
            number.ok_or_else(|| format!("{name} must be a number from 0 on, not {value}"))
        };
        task = match name.as_str() {
            "payload" | "text" => task,
            "key" => task.key(value.as_str().ok_or_else(|| format!("key must be a string, not {value}"))?),
            "weight" => task.weight_thousandths(parse::weight(&value.to_string())?),
            "priority" => task.priority(number()?),
            "max_attempts" => task.max_attempts(number()?),
            "max_duration_ms" => task.max_duration(Duration::from_millis(number()?.into())),
            _ => {
                return Err(format!(
                    "{name} is no field of a task; there are payload, text, key, weight, priority, max_attempts and \
                     max_duration_ms"
                ));
            }
        };
    }
    Ok(task)
}

/// A bar on a terminal, of a file whose size is known; a counter otherwise.
fn progress(bytes: Option<u64>) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(bytes, target);
    let template = match bytes {
        Some(_) => "{bar:30} {percent}% {msg} ({eta} left)",
        None => "{spinner} {msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

pub(crate) async fn get(args: TaskArgs) -> Done {
    let task = args.look.server.client()?.get(&args.id).await?;
    match args.look.json {
        true => println!("{}", show::task_json(&task)),
        false => print!("{}", show::task_text(&task)),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn watch(args: TaskArgs) -> Done {
    let client = args.look.server.client()?;
    let mut watch = client.watch(&args.id).await?;
    while let Some(event) = watch.next().await? {
        match args.look.json {
            true => println!("{}", show::event_json(&event)),
            false => show::event(&event),
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn cancel(args: TaskArgs) -> Done {
    let stopping = args.look.server.client()?.cancel(&args.id).await?;
    match (args.look.json, stopping) {
        (true, stopping) => println!("{}", json!({ "id": args.id, "stopping": stopping })),
        (false, true) => println!("task {} is running; its worker has been told to stop it", args.id),
        (false, false) => println!("task {} is canceled", args.id),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn list(args: ListArgs) -> Done {
    let request = wire::ListRequest {
        queue: args.queue.unwrap_or_default(),
        cursor: args.cursor.unwrap_or_default(),
        limit: Some(args.limit),
        ..wire::ListRequest::default()
    };
    let page = args.look.server.client()?.list(request).await?;
    if args.look.json {
        let tasks: Vec<Value> = page.tasks.iter().map(show::task_json).collect();
        println!("{}", json!({ "tasks": tasks, "cursor": page.cursor }));
        return Ok(ExitCode::SUCCESS);
    }
    if page.tasks.is_empty() {
        println!("no tasks");
    } else {
        let rows: Vec<Vec<String>> = page.tasks.iter().map(show::task_row).collect();
        print!("{}", table(&["task", "queue", "key", "state", "attempt", "age", "why"], &rows));
    }
    if !page.cursor.is_empty() {
        println!("  there are more: --cursor {}", page.cursor);
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn queues(args: LookArgs) -> Done {
    let queues = args.server.client()?.queues().await?;
    if args.json {
        println!("{}", Value::Array(queues.iter().map(show::queue_json).collect()));
    } else if queues.is_empty() {
        println!("no queues yet; `evenhand submit QUEUE` makes one");
    } else {
        let row = |queue: &wire::Queue| {
            let ages = queue.oldest_waiting_ms.map_or_else(|| "-".into(), show::age);
            let numbers =
                [queue.waiting, queue.running, queue.accepted, queue.succeeded, queue.failed, queue.canceled];
            [queue.name.clone()].into_iter().chain(numbers.map(count)).chain([ages]).collect()
        };
        let rows: Vec<Vec<String>> = queues.iter().map(row).collect();
        let head =
            ["queue", "waiting", "running", "accepted", "succeeded", "failed", "canceled", "next waits"];
        print!("{}", table(&head, &rows));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn workers(args: LookArgs) -> Done {
    let workers = args.server.client()?.workers().await?;
    if args.json {
        println!("{}", Value::Array(workers.iter().map(show::worker_json).collect()));
    } else if workers.is_empty() {
        println!("no workers; `evenhand worker QUEUE -- COMMAND` starts one");
    } else {
        let rows: Vec<Vec<String>> = workers.iter().map(show::worker_row).collect();
        print!(
            "{}",
            table(&["seat", "life", "health", "slots", "running", "queues", "heard", "why no work"], &rows)
        );
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn status(args: LookArgs) -> Done {
    let status = args.server.client()?.status().await?;
    match args.json {
        true => println!("{}", show::status_json(&status)),
        false => print!("{}", show::status_text(args.server.server(), &status)),
    }
    Ok(ExitCode::SUCCESS)
}
