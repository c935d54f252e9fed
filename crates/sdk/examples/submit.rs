//! Submits one task, and shows what happens to it until it has ended.
//!
//! ```text
//! evenhand dev                                           # a server; or your own, in EVENHAND_SERVER
//! cargo run -p evenhand --example worker                 # somebody who runs it
//! cargo run -p evenhand --example submit -- README.md
//! ```

use std::path::PathBuf;
use std::time::Duration;

use evenhand::{Client, NewTask, TaskState};
use serde::{Deserialize, Serialize};

#[derive(Serialize)]
struct Document {
    path: PathBuf,
}

#[derive(Deserialize)]
struct Counted {
    words: usize,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("name a file to count the words of")?.into();

    let client = Client::new(&evenhand::server())?.patience(Duration::from_secs(10));
    let task = NewTask::json(&Document { path })?.key("acme").max_duration(Duration::from_secs(60));
    // When this returns, the task is on disk. It is sent again if need be, and accepted once.
    let id = client.enqueue("count", task).await?;
    println!("accepted");

    let mut watch = client.watch(&id).await?;
    while let Some(event) = watch.next().await? {
        use evenhand::wire::task_event::Event;
        match event.event {
            Some(Event::Progress(progress)) => println!("progress: {}", progress.message),
            Some(Event::Output(line)) => println!("output: {line}"),
            // How it stands, lines that were left out, ..
            Some(_) | None => {}
        }
    }

    // Without the events in between, this alone waits for the end.
    let task = client.wait(&id).await?;
    if task.state() == TaskState::Succeeded {
        let counted: Counted = serde_json::from_slice(&task.result.unwrap_or_default())?;
        println!("{} words", counted.words);
    } else {
        println!("{:?} after {} attempts: {}", task.state(), task.attempt, task.error);
    }
    Ok(())
}
