//! A worker: serves the queue `count`, whose tasks name files to count the words of. Ctrl-C drains it: what runs is
//! finished first.
//!
//! ```text
//! evenhand dev                                           # a server; or your own, in EVENHAND_SERVER
//! cargo run -p evenhand --example worker
//! cargo run -p evenhand --example submit -- README.md    # something to do
//! ```

use std::path::PathBuf;

use evenhand::{Failure, Run, Worker, WorkerError};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Document {
    path: PathBuf,
}

#[derive(Serialize)]
struct Counted {
    words: usize,
}

async fn count(document: Document, run: Run) -> Result<Counted, Failure> {
    // An error here means: try again. Perhaps the file is still on its way.
    let text = tokio::fs::read_to_string(&document.path).await?;
    let lines = text.lines().count();
    if lines == 0 {
        // And this: do not try again, an empty document stays empty.
        return Err(Failure::for_good("the document is empty"));
    }
    let mut words = 0;
    for (n, line) in text.lines().enumerate() {
        if run.is_canceled() {
            return Err(Failure::retry("canceled"));
        }
        words += line.split_whitespace().count();
        run.progress((n + 1) as f64 / lines as f64, format!("line {} of {lines}", n + 1));
        tokio::task::yield_now().await;
    }
    run.output(format!("attempt {} for {}: {lines} lines", run.attempt(), run.key()));
    Ok(Counted { words })
}

#[tokio::main]
async fn main() -> Result<(), WorkerError> {
    Worker::new(&evenhand::server()).slots(4).handle("count", count).drain_on_signals().run().await?;
    println!("drained");
    Ok(())
}
