//! Evenhand for Rust programs.
//!
//! [`Client`] submits tasks, looks at them, watches, cancels and replays them. [`Worker`] runs them: in this process,
//! with handlers that are typed by serde, or as commands, each in a process of its own.
//!
//! ```no_run
//! use evenhand::{Client, NewTask, Worker, Failure};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Page { url: String }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::new("http://127.0.0.1:7400")?;
//! let task = NewTask::json(&Page { url: "https://example.com".into() })?.key("acme");
//! let id = client.enqueue("fetch", task).await?;
//! println!("accepted as {id}");
//!
//! Worker::new("http://127.0.0.1:7400")
//!     .slots(8)
//!     .handle("fetch", |page: Page, run| async move {
//!         run.output(format!("fetching {}", page.url));
//!         if page.url.is_empty() {
//!             return Err(Failure::for_good("there is nothing to fetch"));
//!         }
//!         Ok(page.url.len())
//!     })
//!     .run()
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! Without async, use [`blocking::Client`]. To test handlers without a server, use [`testing::TestWorker`]. Programs
//! that run are in `crates/sdk/examples`, and `docs/sdk.md` leads through them.
//!
//! Errors are values: a [`Refusal`] says what to do about it ([`Kind`]), which field was wrong, and a sentence for
//! people.
//!
//! In reading order: `client`; `worker` (what users see), `worker::runtime` (the loop around the pure worker of
//! `evenhand-core`), `worker::handlers` and `worker::commands` (the two ways to run a task); [`guardian`];
//! [`blocking`] and [`testing`].

pub mod blocking;
mod client;
pub mod guardian;
pub mod testing;
mod worker;

pub use client::{
    AfterDowngrade, Attach, AttachInput, AttachOutput, Attached, Batcher, Batching, Changed, Changing,
    Client, Enqueued, Filter, Heard, KeySettings, Limit, Listing, NewTask, Payload, QueueSettings, Rate,
    Receipt, Retries, Share, Task, TaskState, Try, Watch,
};
pub use evenhand_api::v1 as wire;
pub use evenhand_core::Refusal;
pub use evenhand_core::refusal::Kind;
pub use worker::{Commands, Failure, Handlers, Run, Worker, WorkerError, say_dead};

/// Where a server is, if nobody says: this machine.
pub const DEFAULT_SERVER: &str = "http://127.0.0.1:7400";

/// Where the server is: what the environment says in `EVENHAND_SERVER`, or [`DEFAULT_SERVER`].
pub fn server() -> String {
    std::env::var("EVENHAND_SERVER").unwrap_or_else(|_| DEFAULT_SERVER.into())
}
