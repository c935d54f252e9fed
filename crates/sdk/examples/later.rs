//! Tasks that wait for a time, that there is only one of, and that are run again. Runs its own worker.
//!
//! ```text
//! evenhand dev                                           # a server; or your own, in EVENHAND_SERVER
//! cargo run -p evenhand --example later
//! ```

use std::time::Duration;

use evenhand::{Client, Failure, NewTask, QueueSettings, Retries, Run, Worker};
use tokio::sync::watch;

/// Mails a bill. The first try of each fails: the mail server is busy.
async fn bill(month: String, run: Run) -> Result<String, Failure> {
    match run.attempt() {
        1 => Err(Failure::retry_after(Duration::from_millis(50), "the mail server is busy")),
        _ => Ok(format!("the bill of {month} is sent")),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::new(&evenhand::server())?;
    let (drain, draining) = watch::channel(false);
    let worker = Worker::new(&evenhand::server()).handle("bills", bill).drain_on(draining);
    let worker = tokio::spawn(worker.run());

    // How the queue treats its tasks, unless they say it themselves.
    let retries = Retries::new().max_attempts(8).backoff(Duration::from_secs(1));
    let week = Duration::from_secs(7 * 24 * 3600);
    client.set_queue("bills", QueueSettings::new().retries(retries).retention(week)).await?;

    // In a while, but not too late; and however often it is submitted within an hour, it is one task.
    let task = NewTask::json(&"May")?
        .delay(Duration::from_millis(100))
        .expires(Duration::from_secs(60))
        .unique("May")
        .unique_for(Duration::from_secs(3600));
    let submitted = client.enqueue_all("bills", vec![task.clone(), task]).await?;
    let created: Vec<bool> = submitted.tasks().map(|(_, created)| created).collect();
    println!("created: {created:?}");

    // A watch has seen the end, a look has every try as well.
    let id = &submitted.ids[0];
    client.wait(id).await?;
    let task = client.get(id).await?;
    for tried in &task.tries {
        println!("attempt {}: {} {}", tried.attempt, tried.end, tried.error);
    }
    println!("{}", String::from_utf8_lossy(&task.result.unwrap_or_default()));

    // Once more, as another task.
    let again = client.wait(&client.replay(id).await?).await?;
    println!("again: {:?}", again.state());

    drain.send_replace(true);
    worker.await??;
    Ok(())
}
