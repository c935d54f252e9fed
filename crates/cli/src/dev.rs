//! `evenhand dev`: a server and a worker in one process, to play with. The worker shows each task that it runs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use evenhand::Worker;
use evenhand_core::owner::Settings;
use tokio::sync::watch;

use crate::log::LogArgs;
use crate::terminal::{Look, Stream, cut, plain, print};
use crate::{Done, Failure, serve, terminal, worker};

/// The queue that the worker serves.
const QUEUE: &str = "demo";
/// How long a demo task takes: long enough to see that they take turns.
const TAKES: Duration = Duration::from_millis(500);

/// What to play with.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  evenhand dev
  evenhand dev --listen 127.0.0.1:7401 --data /tmp/try

Its worker serves the queue demo: evenhand submit demo --wait hello")]
pub(crate) struct Args {
    /// Where the data is; made if it is not there
    #[arg(long, env = "EVENHAND_DATA", default_value = "evenhand-data", value_name = "DIR")]
    data: PathBuf,
    /// Where to listen
    #[arg(long, env = "EVENHAND_LISTEN", default_value = "127.0.0.1:7400", value_name = "ADDR")]
    listen: SocketAddr,
    /// How many demo tasks to run at once
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slots: u32,
    #[command(flatten)]
    log: LogArgs,
}

pub(crate) async fn run(args: Args) -> Done {
    args.log.begin()?;
    let mut signals = serve::Signals::new()?;
    let floor_mib = 128;
    let mut server = serve::start(&args.data, None, args.listen, Settings::default(), floor_mib).await?;
    let url = format!("http://{}", server.addr());
    let (drain, draining) = watch::channel(false);
    let demo = Worker::new(&url)
        .seat("dev")
        .seat_dir(args.data.join("seats"))
        .slots(args.slots)
        .drain_on(draining)
        .handle_bytes(QUEUE, |payload, run| async move {
            let text = String::from_utf8_lossy(&payload).into_owned();
            let whose = if run.key().is_empty() { "nobody".into() } else { run.key().to_string() };
            say(&format!("task {} of {whose}: {text}", run.task_id()));
            run.output(format!("working on {text:?}"));
            tokio::time::sleep(TAKES).await;
            Ok(format!("done: {text}\n").into_bytes())
        });
    let mut working = tokio::spawn(demo.run());
    welcome(&args, &url);
    tokio::select! {
        ended = server.ended() => return ended.map(|()| ExitCode::SUCCESS).map_err(Failure::new),
        ended = &mut working => return match ended.map_err(Failure::new)? {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => Err(worker::failure(error)),
        },
        told = signals.told_to_stop() => told,
    };
    let _ = terminal::say("stopping: waiting for demo tasks to end; Ctrl-C once more to stop at once");
    let _ = drain.send(true);
    tokio::select! {
        _ = &mut working => {}
        _ = signals.told_to_stop() => {}
    }
    serve::stop(server, &mut signals).await
}

/// A line of the worker's, told apart from the server's.
fn say(line: &str) {
    let line = cut(&plain(line), 200);
    let who = Stream::Out.paint().of(Look::Good, "demo worker");
    // Nobody has to listen.
    let _ = print(format!("{who}  {line}\n"));
}

fn welcome(args: &Args, url: &str) {
    let program = std::env::args().next().unwrap_or_else(|| "evenhand".into());
    let server = if url == evenhand::DEFAULT_SERVER { String::new() } else { format!(" --server {url}") };
    let text = format!(
        "
evenhand is ready: {url}, data in {}

In another terminal:
  {program} submit {QUEUE} --key acme 'hello'{server}
  {program} submit {QUEUE} --key zeta --wait 'hello, and tell me when it is done'{server}
  {program} top{server}
  curl {url}/metrics

Ctrl-C stops it; what was accepted is still there at the next start.

",
        args.data.display()
    );
    // Nobody has to listen.
    let _ = print(text);
}
