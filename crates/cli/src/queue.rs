//! `evenhand queue`: how a queue treats its tasks.

use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgGroup, Args as ClapArgs, Subcommand, ValueEnum};
use evenhand::{AfterDowngrade, KeySettings, Limit, QueueSettings, Rate, Retries, Share};
use evenhand_api::rest;
use evenhand_core::Refusal;

use crate::client::LookArgs;
use crate::terminal::{Stream, print, print_json};
use crate::{Done, parse, show};

/// What to do with a queue.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show a queue, how its tasks stand, and its settings
    #[command(
        after_help = "Examples:\n  evenhand queue get render\n  evenhand queue get render --json | jq .settings.retry"
    )]
    Get(OneArgs),
    /// Change settings of a queue: what is not named stays as it is
    Set(SetArgs),
    /// Start nothing of a queue, or of one key of it, any more; what runs goes on
    #[command(
        after_help = "Examples:\n  evenhand queue pause render\n  evenhand queue pause render --key acme"
    )]
    Pause(PauseArgs),
    /// Start tasks of a queue, or of one key of it, again
    #[command(
        after_help = "Examples:\n  evenhand queue resume render\n  evenhand queue resume render --key acme"
    )]
    Resume(PauseArgs),
    /// Give a key of a queue a weight, whatever its tasks ask for
    #[command(
        after_help = "Examples:\n  evenhand queue weight render acme 3\n  evenhand queue weight render acme none"
    )]
    Weight(WeightArgs),
    /// Give a key of a queue a weight, a limit and a rate of its own: what is not named stays as it is
    Key(KeyArgs),
}

/// One queue.
#[derive(Debug, ClapArgs)]
pub(crate) struct OneArgs {
    /// The queue
    queue: String,
    #[command(flatten)]
    look: LookArgs,
}

/// A queue, or one key of it.
#[derive(Debug, ClapArgs)]
pub(crate) struct PauseArgs {
    /// The queue
    queue: String,
    /// This key of it only; an empty one is the key of tasks without one
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    #[command(flatten)]
    look: LookArgs,
}

/// A key and its weight.
#[derive(Debug, ClapArgs)]
pub(crate) struct WeightArgs {
    /// The queue
    queue: String,
    /// The key
    key: String,
    /// 0.001 to 1000; `none` is what its tasks ask for
    #[arg(value_parser = weight)]
    weight: f64,
    #[command(flatten)]
    look: LookArgs,
}

/// A key and what it has of its own.
#[derive(Debug, ClapArgs)]
#[command(
    group = ArgGroup::new("of_key").required(true).multiple(true).args(["weight", "limit", "rate"]),
    after_help = "\
Examples:
  evenhand queue key render acme --limit 4
  evenhand queue key render acme --weight 2 --rate 10/s:burst=30
  evenhand queue key render acme --limit none --rate none

A limit is how many of its tasks may run at once, a rate how many may start in a second: 10/s, 30/m, or 5cost/s where a \
task counts what it costs; `:burst=30` lets so many start at once after a pause. They go before what the queue says of \
all keys (evenhand queue set --key-limit, --key-rate)."
)]
pub(crate) struct KeyArgs {
    /// The queue
    queue: String,
    /// The key; an empty one is the key of tasks without one
    key: String,
    /// 0.001 to 1000; `none` is what its tasks ask for
    #[arg(long, value_name = "WEIGHT", value_parser = weight)]
    weight: Option<f64>,
    /// How many of its tasks may run at once; `none` is what its queue says
    #[arg(long, value_name = "N", value_parser = parse::limit)]
    limit: Option<u32>,
    /// How many of its tasks may start in a second, such as 10/s; `none` is what its queue says
    #[arg(long, value_name = "RATE", value_parser = parse::rate)]
    rate: Option<rest::Rate>,
    #[command(flatten)]
    look: LookArgs,
}

fn weight(text: &str) -> Result<f64, String> {
    match text {
        "none" => Ok(0.0),
        number => number.parse().map_err(|_| "use a number from 0.001 to 1000, or none".to_string()),
    }
}

/// What to change.
#[derive(Debug, ClapArgs)]
#[command(
    group = ArgGroup::new("what").required(true).multiple(true).args([
        "max_attempts", "backoff", "backoff_factor", "max_backoff", "max_lost", "retention", "share", "classes",
        "after_downgrade", "interactive_grace", "key_limit", "rate", "key_rate",
    ]),
    after_help = "\
Examples:
  evenhand queue set render --max-attempts 8 --backoff 1s --max-backoff 10m
  evenhand queue set render --retention 7d
  evenhand queue set render --retention 0 --if-version 3
  evenhand queue set render --share time
  evenhand queue set render --classes 3s:all,10s:8,30s:25% --after-downgrade requeue
  evenhand queue set render --key-limit 4 --rate 100/s:burst=200
  evenhand queue set render --classes none --rate none

The queue is made if it is new. A task that is submitted with its own retries keeps them.

A class is a duration and how many runs may hold it or a longer one: all slots, a number of them, or a percentage. The \
shortest comes first, and its limit is all. A rate is how much may start in a second: 100/s, 30/m, or 5cost/s where a \
task counts what it costs; `:burst=200` lets so much start at once after a pause."
)]
pub(crate) struct SetArgs {
    /// The queue
    queue: String,
    /// How often a task is tried in all
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
    /// After so many runs that were lost with their workers a task is not tried again
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255))]
    max_lost: Option<u32>,
    /// How long ends are remembered, with their results; 0 is not at all
    #[arg(long, value_parser = parse::duration_or_zero, value_name = "TIME")]
    retention: Option<Duration>,
    /// What its keys share
    #[arg(long, value_name = "WHAT")]
    share: Option<ShareArg>,
    /// Its duration classes, shortest first, such as 3s:all,10s:8,30s:25%; or none
    #[arg(long, value_name = "CLASSES", value_parser = parse::classes)]
    classes: Option<parse::Classes>,
    /// What happens to a task whose time was up after it had been downgraded
    #[arg(long, value_name = "WHAT")]
    after_downgrade: Option<AfterArg>,
    /// How long the client of an interactive task is warned before it is halted; 0 is not at all
    #[arg(long, value_parser = parse::duration_or_zero, value_name = "TIME")]
    interactive_grace: Option<Duration>,
    /// How many tasks of one key may run at once, unless the key has a limit of its own; or none
    #[arg(long, value_name = "N", value_parser = parse::limit)]
    key_limit: Option<u32>,
    /// How many of its tasks may start in a second, such as 100/s or 100/s:burst=200; or none
    #[arg(long, value_name = "RATE", value_parser = parse::rate)]
    rate: Option<rest::Rate>,
    /// The same for each of its keys, unless the key has a rate of its own; or none
    #[arg(long, value_name = "RATE", value_parser = parse::rate)]
    key_rate: Option<rest::Rate>,
    /// Only if the settings still have this version
    #[arg(long, value_name = "VERSION")]
    if_version: Option<u64>,
    #[command(flatten)]
    look: LookArgs,
}

/// What keys share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ShareArg {
    /// Every task counts one
    Tasks,
    /// A task counts the time that it takes
    Time,
}

impl ShareArg {
    fn to_wire(self) -> Share {
        match self {
            ShareArg::Tasks => Share::Tasks,
            ShareArg::Time => Share::Time,
        }
    }
}

/// What happens to a task that a downgrade ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AfterArg {
    /// It has failed
    Fail,
    /// It is tried again at once, as long as it has attempts
    Requeue,
}

impl AfterArg {
    fn to_wire(self) -> AfterDowngrade {
        match self {
            AfterArg::Fail => AfterDowngrade::Fail,
            AfterArg::Requeue => AfterDowngrade::Requeue,
        }
    }
}

/// A rate as the client has it; none, if it is 0 a second.
fn some_rate(field: &str, rate: rest::Rate) -> Result<Option<Rate>, Refusal> {
    let wire = rate.to_wire().map_err(|refusal| refusal.within(field))?;
    Ok((wire.per_second_thousandths > 0).then(|| wire.into()))
}

fn class(class: rest::ClassLimit) -> (Duration, Limit) {
    let limit = match class.limit {
        rest::Limit::All => Limit::All,
        rest::Limit::Slots(slots) => Limit::Slots(slots),
        rest::Limit::Percent(percent) => Limit::Percent(percent),
    };
    (Duration::from_millis(class.duration_ms), limit)
}

pub(crate) async fn run(command: Command) -> Done {
    match command {
        Command::Get(args) => get(args).await,
        Command::Set(args) => set(args).await,
        Command::Pause(args) => pause(args, true).await,
        Command::Resume(args) => pause(args, false).await,
        Command::Weight(args) => set_weight(args).await,
        Command::Key(args) => set_key(args).await,
    }
}

async fn get(args: OneArgs) -> Done {
    let queue = rest::QueueDetail::from(args.look.server.client()?.queue(&args.queue, 20).await?);
    match args.look.json {
        true => print_json(&queue)?,
        false => print(show::queue_text(&queue, Stream::Out.width(), Stream::Out.paint()))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn set(args: SetArgs) -> Done {
    let mut settings = QueueSettings::new();
    let retries = args.retries();
    if retries != Retries::new() {
        settings = settings.retries(retries);
    }
    if let Some(retention) = args.retention {
        settings = settings.retention(retention);
    }
    if let Some(share) = args.share {
        settings = settings.share(share.to_wire());
    }
    if let Some(parse::Classes(classes)) = &args.classes {
        settings = settings.classes(classes.iter().copied().map(class));
    }
    if let Some(after) = args.after_downgrade {
        settings = settings.after_downgrade(after.to_wire());
    }
    if let Some(grace) = args.interactive_grace {
        settings = settings.interactive_grace(grace);
    }
    if let Some(limit) = args.key_limit {
        settings = settings.key_limit(Some(limit));
    }
    if let Some(rate) = args.rate {
        settings = settings.rate(some_rate("settings.rate", rate)?);
    }
    if let Some(rate) = args.key_rate {
        settings = settings.key_rate(some_rate("settings.key_rate", rate)?);
    }
    if let Some(version) = args.if_version {
        settings = settings.if_version(version);
    }
    let set = rest::QueueSet::from(args.look.server.client()?.set_queue(&args.queue, settings).await?);
    match args.look.json {
        true => print_json(&set)?,
        false => print(show::settings_text(&args.queue, &set, Stream::Out.width(), Stream::Out.paint()))?,
    }
    Ok(ExitCode::SUCCESS)
}

impl SetArgs {
    fn retries(&self) -> Retries {
        Retries::from(evenhand::wire::Retry {
            max_attempts: self.max_attempts,
            backoff_ms: self.backoff.map(|time| time.as_millis() as u64),
            factor_thousandths: self.backoff_factor,
            max_backoff_ms: self.max_backoff.map(|time| time.as_millis() as u64),
            max_lost: self.max_lost,
        })
    }
}

async fn set_weight(args: WeightArgs) -> Done {
    let WeightArgs { queue, key, weight, look } = args;
    let client = look.server.client()?;
    client.queue(&queue, 1).await?;
    client.set_key_weight(&queue, &key, weight).await?;
    match (look.json, weight == 0.0) {
        (true, _) => print_json(&serde_json::json!({ "queue": queue, "key": key, "weight": weight }))?,
        (false, true) => {
            print(format!("key {key} of queue {queue} has the weight that its tasks ask for\n"))?
        }
        (false, false) => print(format!("key {key} of queue {queue} has weight {weight}\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn set_key(args: KeyArgs) -> Done {
    let KeyArgs { queue, key, weight, limit, rate, look } = args;
    let client = look.server.client()?;
    // A queue that is not there is more likely a mistake in its name.
    client.queue(&queue, 1).await?;
    let mut settings = KeySettings::new();
    let mut said = Vec::new();
    if let Some(weight) = weight {
        settings = settings.weight(Some(weight));
        said.push(match weight == 0.0 {
            true => "the weight that its tasks ask for".into(),
            false => format!("weight {weight}"),
        });
    }
    if let Some(limit) = limit {
        settings = settings.limit(Some(limit));
        said.push(match limit {
            0 => "the limit of its queue".into(),
            limit => format!("limit {limit}"),
        });
    }
    if let Some(rate) = rate {
        settings = settings.rate(some_rate("rate", rate)?);
        said.push(match rate.per_second > 0.0 {
            true => format!("rate {}", show::rate(&rate)),
            false => "the rate of its queue".into(),
        });
    }
    client.set_key(&queue, &key, settings).await?;
    match look.json {
        true => {
            let mut set = serde_json::json!({ "queue": queue, "key": key });
            weight.iter().for_each(|weight| set["weight"] = serde_json::json!(weight));
            limit.iter().for_each(|limit| set["limit"] = serde_json::json!(limit));
            rate.iter().for_each(|rate| set["rate"] = serde_json::json!(rate));
            print_json(&set)?;
        }
        false => print(format!("key {key} of queue {queue} has {}\n", said.join(", ")))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn pause_key(queue: &str, key: &str, look: &LookArgs, paused: bool) -> Done {
    let client = look.server.client()?;
    client.queue(queue, 1).await?;
    match paused {
        true => client.pause_key(queue, key).await?,
        false => client.resume_key(queue, key).await?,
    }
    match (look.json, paused) {
        (true, _) => print_json(&serde_json::json!({ "queue": queue, "key": key, "paused": paused }))?,
        (false, true) => print(format!("key {key} of queue {queue} is paused; what runs goes on\n"))?,
        (false, false) => print(format!("key {key} of queue {queue} goes on\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn pause(args: PauseArgs, paused: bool) -> Done {
    if let Some(key) = &args.key {
        return pause_key(&args.queue, key, &args.look, paused).await;
    }
    let client = args.look.server.client()?;
    // A queue that is not there is made by its first task: to pause one is more likely a mistake in its name.
    client.queue(&args.queue, 1).await?;
    let settings = QueueSettings::new().paused(paused);
    let set = rest::QueueSet::from(client.set_queue(&args.queue, settings).await?);
    match (args.look.json, paused) {
        (true, _) => print_json(&set)?,
        (false, true) => print(format!("queue {} is paused; what runs goes on\n", args.queue))?,
        (false, false) => print(format!("queue {} goes on\n", args.queue))?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SetArgs,
    }

    #[test]
    fn something_must_be_changed() {
        let reads = |words: &[&str]| Line::try_parse_from(["set", "render"].iter().chain(words)).is_ok();
        assert!(reads(&["--retention", "0"]) && reads(&["--backoff", "0", "--max-lost", "3"]));
        assert!(reads(&["--share", "time"]) && reads(&["--share", "tasks"]) && !reads(&["--share", "both"]));
        assert!(
            reads(&["--classes", "3s:all,10s:8"])
                && reads(&["--classes", "none"])
                && !reads(&["--classes", "3s"])
        );
        assert!(reads(&["--rate", "100/s"]) && reads(&["--key-rate", "none"]) && !reads(&["--rate", "100"]));
        assert!(reads(&["--key-limit", "4"]) && !reads(&["--key-limit", "0"]));
        assert!(reads(&["--after-downgrade", "requeue"]) && !reads(&["--after-downgrade", "retry"]));
        assert!(!reads(&[]) && !reads(&["--if-version", "3"]) && !reads(&["--max-lost", "0"]));
    }
}
