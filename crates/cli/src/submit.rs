//! `evenhand submit`: a task, a task and its end, or every line of a file.

use std::io::{BufRead, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use evenhand::{Client, NewTask, Refusal, wire};
use evenhand_api::rest::{self, EnqueuedTask, State};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::client::LookArgs;
use crate::table::of;
use crate::terminal::{Stream, print, print_json, say, written};
use crate::watch::{Follow, Shown};
use crate::{Done, Failure, parse};

/// Tasks in one call of a batch, and their bytes; and calls on their way at once.
const BATCH: usize = 1_000;
const BATCH_BYTES: usize = 4 * 1024 * 1024;
const CALLS: usize = 4;

/// What to submit.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand submit render 'page 7'
  evenhand submit render --key acme --priority 2 --max-duration 30s - < page.json
  evenhand submit render --wait 'page 7'
  evenhand submit render --batch tasks.jsonl

A line of a batch is a JSON object with any of: payload (any JSON value, given to the worker as JSON), text (given \
as it is), base64 (bytes), content_type, key, weight, priority, max_attempts, max_duration_ms. What a line does not \
say, the flags do. --wait shows on standard error what happens; the result goes to standard output.")]
pub(crate) struct Args {
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
    /// What the payload is, as HTTP says it: application/json
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// A name for this request: the same again within ten minutes is the same request
    #[arg(long, value_name = "ID", conflicts_with = "batch")]
    request_id: Option<String>,
    /// Wait for the end: print the result; exit with 1 if the task failed
    #[arg(long, conflicts_with = "batch")]
    wait: bool,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn run(args: Args) -> Done {
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
    let flags = flagged(&args, rest::NewTask::default()).to_wire()?;
    let tasks = vec![NewTask::from(wire::NewTask { payload: payload.into(), ..flags })];
    let enqueued = match args.request_id.clone() {
        Some(id) => client.enqueue_once(&args.queue, tasks, id).await?,
        None => client.enqueue_all(&args.queue, tasks).await?,
    };
    let created = enqueued.created;
    let id = enqueued.ids.into_iter().next().unwrap_or_default();
    if !args.wait {
        match args.look.json {
            true => print_json(&EnqueuedTask { id, created })?,
            false => print(format!("{id}\n"))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !args.look.json {
        say(format!("task {id} is accepted"))?;
    }
    let shown = if args.look.json { Shown::Nothing } else { Shown::Text(Stream::Err) };
    let task = Follow::new(&client, &id, shown).until_it_ends().await?;
    let succeeded = State::of(&task) == State::Succeeded;
    if args.look.json {
        print_json(&rest::Task::from(task))?;
    } else if let Some(result) = &task.result {
        let mut out = std::io::stdout().lock();
        written(out.write_all(result).and_then(|()| out.flush()))?;
    }
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A task, with what the flags say where it says nothing.
fn flagged(args: &Args, task: rest::NewTask) -> rest::NewTask {
    rest::NewTask {
        content_type: task.content_type.or_else(|| args.content_type.clone()),
        key: task.key.or_else(|| args.key.clone()),
        weight: task.weight.or_else(|| args.weight.map(|thousandths| f64::from(thousandths) / 1e3)),
        priority: task.priority.or(args.priority),
        max_attempts: task.max_attempts.or(args.max_attempts),
        max_duration_ms: task
            .max_duration_ms
            .or_else(|| args.max_duration.map(|time| time.as_millis() as u64)),
        ..task
    }
}

async fn submit_batch(client: &Client, args: &Args, file: &PathBuf) -> Done {
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
    let mut count = |done: Option<Result<Result<evenhand::Enqueued, Refusal>, tokio::task::JoinError>>| {
        let Some(done) = done else { return Ok(()) };
        let enqueued = done.map_err(Failure::new)??;
        accepted += enqueued.ids.len() as u64;
        if args.look.json {
            for id in enqueued.ids {
                print_json(&EnqueuedTask { id, created: enqueued.created })?;
            }
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
                count(calls.join_next().await)?;
            }
            spawn(&mut calls, client, &args.queue, std::mem::take(&mut tasks));
        }
    }
    if !tasks.is_empty() {
        spawn(&mut calls, client, &args.queue, tasks);
    }
    while !calls.is_empty() {
        count(calls.join_next().await)?;
    }
    bar.finish_and_clear();
    if !args.look.json {
        print(format!("{} accepted\n", of(accepted, "task")))?;
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
fn batch_line(args: &Args, line: &str) -> Result<NewTask, String> {
    // Serde would read a list as the fields in their order.
    if !line.trim_start().starts_with('{') {
        return Err("must be a JSON object".into());
    }
    let mut json = serde_json::Deserializer::from_str(line);
    let task: rest::NewTask = serde_path_to_error::deserialize(&mut json)
        .map_err(|error| wrong_field(&error.path().to_string(), error.inner()))?;
    json.end().map_err(|error| wrong_field(".", &error))?;
    let task = flagged(args, task).to_wire();
    task.map(NewTask::from).map_err(|refusal| format!("{} {}", refusal.field, refusal.message))
}

/// What serde found, in our words.
fn wrong_field(field: &str, error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    if let Some(rest) = what.strip_prefix("unknown field `") {
        let (name, known) = rest.split_once('`').unwrap_or((rest, ""));
        let known = known.trim_start_matches(", expected one of ").replace('`', "");
        return format!("{name} is no field of a task; there are {known}");
    }
    if let Some(name) = what.strip_prefix("duplicate field ") {
        return format!("{} is given twice", name.trim_matches('`'));
    }
    match (field, error.classify()) {
        ("." | "", _) | (_, serde_json::error::Category::Syntax | serde_json::error::Category::Eof) => {
            format!("is no JSON: {what} (column {})", error.column())
        }
        (field, _) => format!("{field}: {what}"),
    }
}

/// A bar on a terminal, of a file whose size is known; a counter otherwise.
fn progress(bytes: Option<u64>) -> ProgressBar {
    let target = match Stream::Err.is_live() {
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

#[cfg(test)]
mod tests {
    use clap::Parser;
    use expect_test::expect;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(words: &[&str]) -> Args {
        Line::parse_from(["submit", "q"].iter().chain(words)).args
    }

    #[test]
    fn a_line_that_is_wrong_is_told_which_field() {
        let lines = [
            "{\"prio\": 3}",
            "{\"priority\": -1}",
            "{\"priority\": \"high\"}",
            "{\"key\": 3}",
            "{\"weight\": 0}",
            "{\"payload\": 1, \"text\": \"a\"}",
            "{\"base64\": \"!\"}",
            "{\"key\": \"a\", \"key\": \"b\"}",
            "{\"key\": \"a\"",
            "{\"key\": a}",
            "{} {}",
            "[1]",
            "null",
            "hello",
        ];
        let said: Vec<String> = lines
            .iter()
            .map(|line| format!("{line}  ->  {}\n", batch_line(&args(&[]), line).unwrap_err()))
            .collect();
        expect![[r#"
            {"prio": 3}  ->  prio is no field of a task; there are payload, text, base64, content_type, key, weight, priority, max_attempts, max_duration_ms
            {"priority": -1}  ->  priority: -1 is out of range, or not a whole number
            {"priority": "high"}  ->  priority: invalid type: string "high", expected a JSON number
            {"key": 3}  ->  key: invalid type: integer `3`, expected a string
            {"weight": 0}  ->  weight 0.0 is out of range; use 0.001 to 1000 with at most three decimals
            {"payload": 1, "text": "a"}  ->  payload is given twice; use one of payload, text and base64
            {"base64": "!"}  ->  base64 cannot be read: Invalid symbol 33, offset 0.
            {"key": "a", "key": "b"}  ->  key is given twice
            {"key": "a"  ->  is no JSON: EOF while parsing an object (column 11)
            {"key": a}  ->  is no JSON: expected value (column 9)
            {} {}  ->  is no JSON: trailing characters (column 4)
            [1]  ->  must be a JSON object
            null  ->  must be a JSON object
            hello  ->  must be a JSON object
        "#]].assert_eq(&said.concat());
    }

    #[test]
    fn what_a_line_does_not_say_the_flags_do() {
        let args = args(&[
            "--batch",
            "-",
            "--key",
            "acme",
            "--priority",
            "2",
            "--weight",
            "2.5",
            "--max-duration",
            "3s",
        ]);
        let task = flagged(
            &args,
            serde_json::from_str(r#"{"priority": 7, "payload": {"b": 1, "a": [1.0]}}"#).unwrap(),
        );
        let task = task.to_wire().unwrap();
        assert_eq!(
            (task.key.as_str(), task.priority, task.weight_thousandths),
            ("acme", Some(7), Some(2_500))
        );
        assert_eq!((task.max_duration_ms, task.content_type.as_str()), (Some(3_000), "application/json"));
        // As it was sent, byte for byte.
        assert_eq!(task.payload, r#"{"b": 1, "a": [1.0]}"#);
    }
}
