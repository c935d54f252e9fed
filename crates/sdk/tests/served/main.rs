//! The SDK against a real server, on the store in memory, in this process.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on must fail")]

mod attach;
mod client;
mod examples;
mod fickle;
mod support;
mod worker;
