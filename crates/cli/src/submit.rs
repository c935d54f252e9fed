//! `evenhand submit`: a task, a task and its end, or every line of a file.

use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args as ClapArgs;
use evenhand::{Client, NewTask, Refusal, wire};
use evenhand_api::rest::{self, EnqueuedTask, State};
use evenhand_core::bounds;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use crate::client::LookArgs;
use crate::table::{count, of};
use crate::terminal::{Stream, print, print_json, say, written};
use crate::watch::{Follow, Shown};
use crate::{Done, Failure, parse};

/// Tasks in one call of a batch, and their bytes; and calls on their way at once.
const BATCH: usize = 1_000;
const BATCH_BYTES: usize = 4 * 1024 * 1024;
const CALLS: usize = 4;
/// A task waits at most so long for others to go with it.
const GATHER: Duration = Duration::from_millis(100);
/// Lines that are read ahead.
const LINES: usize = 64;
/// How long a server may be away from a batch.
const PATIENCE: Duration = Duration::from_secs(60);

/// What to submit.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand submit render 'page 7'
  evenhand submit render --key acme --priority 2 --max-duration 30s - < page.json
  evenhand submit render --wait 'page 7'
  evenhand submit render --batch tasks.jsonl
  evenhand submit mail --at 2026-12-24T18:00:00+01:00 --expires 60d 'merry Christmas'
  evenhand submit mail --max-attempts 10 --backoff 5s --max-backoff 10m 'bill 17'
  evenhand submit mail --unique bill-17 --unique-for 1h 'bill 17'
  evenhand submit render --wait --attached 'page 7'
  evenhand submit render --key acme --expected 5m 'a long film'
  evenhand submit render --file page.html --file style.css=themes/dark.css 'to pdf'

A line of a batch is a JSON object with any of: payload (any JSON value, given to the worker as JSON), text (given \
as it is), base64 (bytes), content_type, key, weight, priority, retry (an object with max_attempts, backoff_ms, \
factor, max_backoff_ms), max_duration_ms, expected_ms, delay_ms, run_at_ms, expires_ms, attach_ttl_ms, unique_key, \
unique_ms, files (a list of objects with name, and text or base64). What a line does not say, the flags do. --wait shows on standard error what happens; the result goes to standard output.")]
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
    /// How long a run takes, as far as you know: what it is charged where its queue shares time
    #[arg(long, value_parser = parse::duration, value_name = "TIME")]
    expected: Option<Duration>,
    /// Start it after so long
    #[arg(long, value_parser = parse::duration, value_name = "TIME", conflicts_with = "at")]
    delay: Option<Duration>,
    /// Start it at this time: 2026-11-16T09:30:00Z
    #[arg(long, value_parser = parse::time, value_name = "WHEN")]
    at: Option<SystemTime>,
    /// After so long it is too late to start it
    #[arg(long, value_parser = parse::duration, value_name = "TIME")]
    expires: Option<Duration>,
    /// How often it may be tried; its queue decides, if nobody says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    max_attempts: Option<u32>,
    /// How long it waits before the second try
    #[arg(long, value_parser = parse::duration_or_zero, value_name = "TIME")]
    backoff: Option<Duration>,
    /// How many times as long it waits before each later one
    #[arg(long, value_parser = parse::factor, value_name = "FACTOR")]
    backoff_factor: Option<u32>,
    /// How long it waits at most
    #[arg(long, value_parser = parse::duration_or_zero, value_name = "TIME")]
    max_backoff: Option<Duration>,
    /// The same again in the same queue is the same task: nothing is accepted then
    #[arg(long, value_name = "KEY", conflicts_with = "batch")]
    unique: Option<String>,
    /// How long --unique counts; a day, if nobody says
    #[arg(long, value_parser = parse::duration, value_name = "TIME")]
    unique_for: Option<Duration>,
    /// Give it this file, under its own name or another; may be given again
    #[arg(long, value_name = "[NAME=]PATH")]
    file: Vec<String>,
    /// What the payload is, as HTTP says it: application/json
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// A name for this request: the same again within ten minutes is the same request
    #[arg(long, value_name = "ID", conflicts_with = "batch")]
    request_id: Option<String>,
    /// Wait for the end: print the result; exit with 1 if the task failed
    #[arg(long, conflicts_with = "batch")]
    wait: bool,
    /// With --wait: cancel it when nobody has waited for it for so long; 10s, if nobody says
    #[arg(long, value_parser = parse::duration, value_name = "TIME", num_args = 0..=1, require_equals = true,
        default_missing_value = "10s")]
    attached: Option<Duration>,
    #[command(flatten)]
    look: LookArgs,
}

pub(crate) async fn run(args: Args) -> Done {
    if args.attached.is_some() && !args.wait {
        let text = "--attached needs --wait: a task is kept by somebody who waits for it".into();
        return Err(Failure { text, exit: 2 });
    }
    if args.unique_for.is_some() && args.unique.is_none() && args.batch.is_none() {
        return Err(Failure {
            text: "--unique-for needs --unique: it says how long that counts".into(),
            exit: 2,
        });
    }
    let files = args.file.iter().map(|file| read_file(file)).collect::<Result<Vec<_>, _>>()?;
    let client = args.look.server.client()?;
    if let Some(file) = &args.batch {
        return submit_batch(&client, &args, files, file).await;
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
    let flags = flagged(&args, &files, rest::NewTask::default())?;
    let task = NewTask::from(wire::NewTask { payload: payload.into(), ..flags });
    if !files.is_empty() {
        // What a server would not take need not be sent.
        task.check().map_err(|refusal| named(&args.file, refusal))?;
    }
    let tasks = vec![task];
    let enqueued = match args.request_id.clone() {
        Some(id) => client.enqueue_once(&args.queue, tasks, id).await?,
        None => client.enqueue_all(&args.queue, tasks).await?,
    };
    let (id, created) = enqueued.tasks().next().unwrap_or_default();
    let id = id.to_string();
    if !args.look.json && !created {
        say(format!("task {id} was there already"))?;
    }
    if !args.wait {
        match args.look.json {
            true => print_json(&EnqueuedTask { id, created })?,
            false => print(format!("{id}\n"))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !args.look.json && created {
        say(format!("task {id} is accepted"))?;
    }
    let shown = if args.look.json { Shown::Nothing } else { Shown::Text(Stream::Err) };
    let task = Follow::new(&client, &id, shown).attached(args.attached).until_it_ends().await?;
    let succeeded = State::of(&task) == State::Succeeded;
    if args.look.json {
        print_json(&rest::Task::from(task))?;
    } else if let Some(result) = &task.result {
        let mut out = std::io::stdout().lock();
        written(out.write_all(result).and_then(|()| out.flush()))?;
    }
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads what `--file` names: `PATH`, or `NAME=PATH`. A path with a `=` in it needs a `/` before that.
fn read_file(said: &str) -> Result<wire::File, Failure> {
    let wrong = |what: String| Failure { text: format!("--file {said}: {what}"), exit: 2 };
    let (name, path) = match said.split_once('=') {
        Some((name, path)) if !name.contains('/') => (name, Path::new(path)),
        Some(_) | None => {
            let path = Path::new(said);
            let name = path.file_name().and_then(|name| name.to_str());
            (name.ok_or_else(|| wrong("has no name; give one, as NAME=PATH".into()))?, path)
        }
    };
    let most = bounds::FILE_BYTES;
    let mut content = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| wrong(error.to_string()))?;
    file.take(most as u64 + 1).read_to_end(&mut content).map_err(|error| wrong(error.to_string()))?;
    if content.len() > most {
        let text =
            format!("has more than {most} bytes, which is the most; store it elsewhere and send its address");
        return Err(wrong(text));
    }
    Ok(wire::File { name: name.into(), content: content.into() })
}

/// A refusal of files, by what was said on the command line: `files[1].name` is the second `--file`.
fn named(said: &[String], refusal: Refusal) -> Failure {
    let place = refusal.field.strip_prefix("files[").and_then(|rest| rest.split_once(']'));
    match place.and_then(|(n, _)| said.get(n.parse::<usize>().ok()?)) {
        Some(said) => Failure { text: format!("--file {said}: the name {}", refusal.message), exit: 2 },
        None => refusal.into(),
    }
}

/// A task, with what the flags say where it says nothing.
fn flagged(args: &Args, files: &[wire::File], task: rest::NewTask) -> Result<wire::NewTask, Refusal> {
    // Before it becomes what a JSON payload is by itself.
    let content_type = task.content_type.or_else(|| args.content_type.clone());
    let task = rest::NewTask { content_type, ..task }.to_wire()?;
    let ms = |time: Option<Duration>| time.map(|time| time.as_millis() as u64);
    let said = task.retry.unwrap_or_default();
    let retry = wire::Retry {
        max_attempts: said.max_attempts.or(args.max_attempts),
        backoff_ms: said.backoff_ms.or_else(|| ms(args.backoff)),
        factor_thousandths: said.factor_thousandths.or(args.backoff_factor),
        max_backoff_ms: said.max_backoff_ms.or_else(|| ms(args.max_backoff)),
        max_lost: said.max_lost,
    };
    let (delay_ms, run_at_ms) = match (task.delay_ms, task.run_at_ms) {
        (None, None) => (ms(args.delay), args.at.map(parse::since_1970)),
        said => said,
    };
    let text = |said: String, flag: &Option<String>| match said.is_empty() {
        true => flag.clone().unwrap_or_default(),
        false => said,
    };
    Ok(wire::NewTask {
        key: text(task.key, &args.key),
        weight_thousandths: task.weight_thousandths.or(args.weight),
        priority: task.priority.or(args.priority),
        retry: (retry != wire::Retry::default()).then_some(retry),
        max_duration_ms: task.max_duration_ms.or_else(|| ms(args.max_duration)),
        expected_ms: task.expected_ms.or_else(|| ms(args.expected)),
        delay_ms,
        run_at_ms,
        expires_ms: task.expires_ms.or_else(|| ms(args.expires)),
        attach_ttl_ms: task.attach_ttl_ms.or_else(|| ms(args.attached)),
        // A window is for those that have a key.
        unique_ms: match task.unique_key.is_empty() && args.unique.is_none() {
            true => task.unique_ms,
            false => task.unique_ms.or_else(|| ms(args.unique_for)),
        },
        unique_key: text(task.unique_key, &args.unique),
        files: if task.files.is_empty() { files.to_vec() } else { task.files },
        ..task
    })
}

async fn submit_batch(client: &Client, args: &Args, files: Vec<wire::File>, file: &PathBuf) -> Done {
    let (input, size): (Box<dyn BufRead + Send>, Option<u64>) = match file.to_str() {
        Some("-") => (Box::new(std::io::BufReader::new(std::io::stdin())), None),
        _ => {
            let name = file.display();
            let file = std::fs::File::open(file).map_err(|error| Failure::new(format!("{name}: {error}")))?;
            let bytes = file.metadata().ok().map(|about| about.len());
            (Box::new(std::io::BufReader::new(file)), bytes)
        }
    };
    // A reader of its own: a pipe may be silent for long, and cannot be asked whether it has more.
    let (send, mut lines) = mpsc::channel(LINES);
    std::thread::spawn(move || {
        for line in input.lines() {
            if send.blocking_send(line).is_err() {
                return;
            }
        }
    });
    let mut batch = Batch::new(client, args, files, progress(size));
    let mut done = batch.read(&mut lines).await;
    // What is on its way may be accepted, whatever happens to us.
    while let Some(answer) = batch.calls.join_next().await {
        let counted = batch.on_answer(answer);
        done = done.and(counted);
    }
    batch.bar.finish_and_clear();
    done?;
    batch.said()
}

/// Tasks of one call, and the line of each.
#[derive(Debug, Default)]
struct Gathered {
    tasks: Vec<NewTask>,
    lines: Vec<u64>,
    bytes: usize,
}

/// How a call ended, and the lines that were in it.
type Answered = (Vec<u64>, Result<evenhand::Enqueued, Refusal>);

/// A batch on its way.
struct Batch<'a> {
    client: Client,
    args: &'a Args,
    /// For lines that have none.
    files: Vec<wire::File>,
    bar: ProgressBar,
    /// What is not sent yet, and since when.
    gathered: Gathered,
    since: Instant,
    calls: JoinSet<Answered>,
    accepted: u64,
    /// Those that were there already, by their unique keys.
    known: u64,
    /// What went wrong, by line.
    wrong: BTreeMap<u64, Failure>,
}

impl<'a> Batch<'a> {
    fn new(client: &Client, args: &'a Args, files: Vec<wire::File>, bar: ProgressBar) -> Batch<'a> {
        Batch {
            client: client.clone().patience(PATIENCE),
            args,
            files,
            bar,
            gathered: Gathered::default(),
            since: Instant::now(),
            calls: JoinSet::new(),
            accepted: 0,
            known: 0,
            wrong: BTreeMap::new(),
        }
    }

    /// Sends every line, until there are no more or one is wrong. What was gathered before that one is sent.
    async fn read(&mut self, lines: &mut mpsc::Receiver<std::io::Result<String>>) -> Result<(), Failure> {
        let mut n = 0;
        // A call that was refused ends it.
        while self.wrong.is_empty() {
            let waits = !self.gathered.tasks.is_empty();
            tokio::select! {
                biased;
                Some(answer) = self.calls.join_next() => self.on_answer(answer)?,
                line = lines.recv() => {
                    let Some(line) = line else { break };
                    n += 1;
                    if let Err(failure) = self.on_line(n, line) {
                        self.wrong.insert(n, failure);
                        break;
                    }
                    if self.gathered.tasks.len() == BATCH || self.gathered.bytes >= BATCH_BYTES {
                        self.send().await?;
                    }
                }
                () = tokio::time::sleep_until(self.since + GATHER), if waits => self.send().await?,
            }
        }
        self.send().await
    }

    fn on_line(&mut self, n: u64, line: std::io::Result<String>) -> Result<(), Failure> {
        let line = line.map_err(|error| Failure::new(format!("line {n}: {error}")))?;
        self.bar.inc(line.len() as u64 + 1);
        if line.trim().is_empty() {
            return Ok(());
        }
        let task = batch_line(self.args, &self.files, &line)
            .map_err(|what| Failure { text: format!("line {n}: {what}"), exit: 2 })?;
        if self.gathered.tasks.is_empty() {
            self.since = Instant::now();
        }
        self.gathered.bytes += task.input_bytes();
        self.gathered.tasks.push(task);
        self.gathered.lines.push(n);
        Ok(())
    }

    /// Sends what is gathered, if no call was refused.
    async fn send(&mut self) -> Result<(), Failure> {
        while self.calls.len() >= CALLS
            && let Some(answer) = self.calls.join_next().await
        {
            self.on_answer(answer)?;
        }
        let Gathered { tasks, lines, .. } = std::mem::take(&mut self.gathered);
        // A line that is wrong is the last one: what was gathered comes before it.
        let refused = lines.last().is_some_and(|last| self.wrong.range(..last).next().is_some());
        if tasks.is_empty() || refused {
            return Ok(());
        }
        let (client, queue) = (self.client.clone(), self.args.queue.clone());
        self.calls.spawn(async move { (lines, client.enqueue_all(&queue, tasks).await) });
        Ok(())
    }

    fn on_answer(&mut self, answer: Result<Answered, JoinError>) -> Result<(), Failure> {
        let (lines, answer) = answer.map_err(Failure::new)?;
        let enqueued = match answer {
            Ok(enqueued) => enqueued,
            Err(refusal) => {
                self.wrong.insert(lines.first().copied().unwrap_or_default(), refused(&lines, refusal));
                return Ok(());
            }
        };
        for (id, created) in enqueued.tasks() {
            match created {
                true => self.accepted += 1,
                false => self.known += 1,
            }
            if self.args.look.json {
                print_json(&EnqueuedTask { id: id.into(), created })?;
            }
        }
        self.bar.set_message(self.counted());
        Ok(())
    }

    fn counted(&self) -> String {
        let accepted = format!("{} accepted", of(self.accepted, "task"));
        match self.known {
            0 => accepted,
            1 => format!("{accepted}, 1 was there already"),
            known => format!("{accepted}, {} were there already", count(known)),
        }
    }

    /// Says how many were accepted, and what was not.
    fn said(self) -> Done {
        let accepted = self.counted();
        if let Some(exit) = self.wrong.values().next().map(|failure| failure.exit) {
            let wrong: Vec<String> = self.wrong.into_values().map(|failure| failure.text).collect();
            return Err(Failure { text: format!("{}; {accepted}", wrong.join("\n")), exit });
        }
        if !self.args.look.json {
            print(format!("{accepted}\n"))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What a server said of a call, by the lines of the file: it knows only the places within the call.
fn refused(lines: &[u64], mut refusal: Refusal) -> Failure {
    let all = match lines {
        [first, .., last] => format!("lines {first} to {last}"),
        [line] => format!("line {line}"),
        [] => String::new(),
    };
    let place = refusal.field.strip_prefix("tasks[").and_then(|rest| rest.split_once(']'));
    let place = place.and_then(|(n, field)| {
        let line = lines.get(n.parse::<usize>().ok()?)?;
        Some((*line, field.trim_start_matches('.').to_string()))
    });
    let Some((line, field)) = place else {
        let failure = Failure::from(refusal);
        return Failure { text: format!("{all}: {}", failure.text), ..failure };
    };
    refusal.field = field;
    let failure = Failure::from(refusal);
    let with_it = if lines.len() > 1 { format!("; with it {all} are refused") } else { String::new() };
    Failure { text: format!("line {line}: {}{with_it}", failure.text), ..failure }
}

/// A task from a line of a batch.
fn batch_line(args: &Args, files: &[wire::File], line: &str) -> Result<NewTask, String> {
    // Serde would read a list as the fields in their order.
    if !line.trim_start().starts_with('{') {
        return Err("must be a JSON object".into());
    }
    let mut json = serde_json::Deserializer::from_str(line);
    let task: rest::NewTask = serde_path_to_error::deserialize(&mut json)
        .map_err(|error| wrong_field(&error.path().to_string(), error.inner()))?;
    json.end().map_err(|error| wrong_field(".", &error))?;
    let wrong = |refusal: Refusal| format!("{} {}", refusal.field, refusal.message);
    let task = NewTask::from(flagged(args, files, task).map_err(wrong)?);
    // What a server would not take is told before it is sent.
    task.check().map_err(wrong)?;
    Ok(task)
}

/// What serde found, in our words.
fn wrong_field(field: &str, error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    if let Some(rest) = what.strip_prefix("unknown field `") {
        let (name, known) = rest.split_once('`').unwrap_or((rest, ""));
        let known = known.trim_start_matches(", expected one of ").replace('`', "");
        let of = if field.starts_with("files[") { "file" } else { "task" };
        return format!("{name} is no field of a {of}; there are {known}");
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
            "{\"key\": \"a\\u0000b\"}",
            "{\"content_type\": \"json\"}",
            "{\"max_duration_ms\": 0}",
            "{\"expected_ms\": 1e10}",
            "{\"files\": {\"a\": \"b\"}}",
            "{\"files\": [{\"text\": \"b\"}]}",
            "{\"files\": [{\"name\": \"a\", \"body\": \"b\"}]}",
            "{\"files\": [{\"name\": \"a\"}, {\"name\": \"a/b\"}]}",
            "{\"files\": [{\"name\": \"a\"}, {\"name\": \"a\"}]}",
            "{\"files\": [{\"name\": \"a\", \"text\": \"b\", \"base64\": \"\"}]}",
            "{\"files\": [{\"name\": \"a\", \"base64\": \"!\"}]}",
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
            .map(|line| format!("{line}  ->  {}\n", batch_line(&args(&[]), &[], line).unwrap_err()))
            .collect();
        expect![[r#"
            {"prio": 3}  ->  prio is no field of a task; there are payload, text, base64, content_type, key, weight, priority, retry, max_duration_ms, expected_ms, delay_ms, run_at_ms, expires_ms, attach_ttl_ms, unique_key, unique_ms, files
            {"priority": -1}  ->  priority: -1 is out of range, or not a whole number
            {"priority": "high"}  ->  priority: invalid type: string "high", expected a JSON number
            {"key": 3}  ->  key: invalid type: integer `3`, expected a string
            {"weight": 0}  ->  weight 0.0 is out of range; use 0.001 to 1000 with at most three decimals
            {"payload": 1, "text": "a"}  ->  payload is given twice; use one of payload, text and base64
            {"base64": "!"}  ->  base64 cannot be read: Invalid symbol 33, offset 0.
            {"key": "a\u0000b"}  ->  key contains the control character '\0'; remove it
            {"content_type": "json"}  ->  content_type "json" is none; one looks like text/plain
            {"max_duration_ms": 0}  ->  max_duration_ms 0 is out of range; use 1 to 31536000000
            {"expected_ms": 1e10}  ->  expected_ms 10000000000 is out of range; use 1 to 1000000000
            {"files": {"a": "b"}}  ->  files: invalid type: map, expected a list
            {"files": [{"text": "b"}]}  ->  files[0]: missing field `name`
            {"files": [{"name": "a", "body": "b"}]}  ->  body is no field of a file; there are name, text, base64
            {"files": [{"name": "a"}, {"name": "a/b"}]}  ->  files[1].name "a/b" is a path; give a name without `/`
            {"files": [{"name": "a"}, {"name": "a"}]}  ->  files[1].name "a" is the name of another file too; give each its own
            {"files": [{"name": "a", "text": "b", "base64": ""}]}  ->  files[0].text goes with no base64; give one of them
            {"files": [{"name": "a", "base64": "!"}]}  ->  files[0].base64 cannot be read: Invalid symbol 33, offset 0.
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
    fn what_a_server_refuses_is_told_by_line() {
        let at = |field: &str, lines: &[u64]| refused(lines, Refusal::invalid(field, "is wrong")).text;
        assert_eq!(
            at("tasks[1].key", &[1001, 1003, 1004]),
            "line 1003: key: is wrong; with it lines 1001 to 1004 are refused"
        );
        assert_eq!(at("tasks[0].key", &[7]), "line 7: key: is wrong");
        assert_eq!(at("tasks[0]", &[7]), "line 7: is wrong");
        // Not of one task, or of one that was not there.
        assert_eq!(at("queue", &[3, 4, 5]), "lines 3 to 5: queue: is wrong");
        assert_eq!(at("tasks[9].key", &[3]), "line 3: tasks[9].key: is wrong");
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
        let line = r#"{"priority": 7, "payload": {"b": 1, "a": [1.0]}}"#;
        let task = flagged(&args, &[], serde_json::from_str(line).unwrap()).unwrap();
        assert_eq!(
            (task.key.as_str(), task.priority, task.weight_thousandths),
            ("acme", Some(7), Some(2_500))
        );
        assert_eq!((task.max_duration_ms, task.content_type.as_str()), (Some(3_000), "application/json"));
        // As it was sent, byte for byte.
        assert_eq!(task.payload, r#"{"b": 1, "a": [1.0]}"#);
    }

    #[test]
    fn the_life_of_a_task_is_told_by_flags_and_by_lines() {
        let line = |flags: &[&str], line: &str| {
            flagged(&args(flags), &[], serde_json::from_str(line).unwrap()).map_err(|refusal| refusal.field)
        };
        let flags =
            ["--max-attempts", "3", "--backoff", "0", "--backoff-factor", "1.5", "--max-backoff", "1h"];
        let retry = line(&flags, r#"{"retry": {"max_attempts": 9}}"#).unwrap().retry.unwrap();
        assert_eq!((retry.max_attempts, retry.backoff_ms), (Some(9), Some(0)));
        assert_eq!((retry.factor_thousandths, retry.max_backoff_ms), (Some(1_500), Some(3_600_000)));
        // Nothing is said of retries: the queue decides.
        assert_eq!(line(&[], "{}").unwrap().retry, None);
        // A line that says when it starts says all of it.
        let task = line(&["--delay", "1m", "--expires", "1h"], r#"{"run_at_ms": 7}"#).unwrap();
        assert_eq!((task.delay_ms, task.run_at_ms, task.expires_ms), (None, Some(7), Some(3_600_000)));
        let expected = |text: &str| line(&["--expected", "5m"], text).unwrap().expected_ms;
        assert_eq!((expected("{}"), expected(r#"{"expected_ms": 7}"#)), (Some(300_000), Some(7)));
        let task = line(&["--at", "1970-01-01T00:00:09Z"], "{}").unwrap();
        assert_eq!((task.delay_ms, task.run_at_ms), (None, Some(9_000)));
        let task = line(&["--batch", "-", "--unique-for", "1m"], r#"{"unique_key": "a"}"#).unwrap();
        assert_eq!((task.unique_key.as_str(), task.unique_ms), ("a", Some(60_000)));
        assert_eq!(line(&["--batch", "-", "--unique-for", "1m"], "{}").unwrap().unique_ms, None);
        let attached = |flags: &[&str]| line(flags, "{}").unwrap().attach_ttl_ms;
        assert_eq!(attached(&["--wait", "--attached", "data"]), Some(10_000));
        assert_eq!(attached(&["--wait", "--attached=1m", "data"]), Some(60_000));
    }
}
