//! The wire: protobuf types and services, generated from `proto/`, and how they become the core's types.
//! Nothing behind the edge knows them. [`convert`] is for runs, hellos and names; [`errors`] has the one table
//! of error kinds, [`interactive`] the one of how interactive tasks end; `rest` has the same in JSON.

pub mod codec;
pub mod convert;
pub mod errors;
pub mod interactive;
#[cfg(feature = "rest")]
pub mod rest;

/// Generated from `proto/evenhand/v1`.
#[expect(
    missing_docs,
    clippy::allow_attributes_without_reason,
    reason = "generated; the comments are in the proto files"
)]
pub mod v1 {
    tonic::include_proto!("evenhand.v1");
}

/// The version of the workers' protocol. A worker and a server that differ in it do not work together; fields
/// that may be absent are added without raising it.
pub const PROTOCOL: u32 = 1;

/// The largest message either side takes: the largest enqueue, and room for names.
pub const MESSAGE_BYTES: usize = 24 * 1024 * 1024;

/// The largest result of a run, in bytes. Larger data belongs in an object store, its address in the result.
pub const RESULT_BYTES: usize = 64 * 1024;
/// The longest error text of a run, in bytes.
pub const ERROR_BYTES: usize = 4 * 1024;
/// The longest line of a run's output, in bytes.
pub const LINE_BYTES: usize = 4 * 1024;
/// The longest text that goes with a run's progress, in bytes.
pub const PROGRESS_BYTES: usize = 1024;
/// The most bytes that an interactive task is sent at a time.
pub const STDIN_BYTES: usize = 1024 * 1024;
/// The longest name of a kind of terminal, in bytes.
pub const TERM_BYTES: usize = 64;
/// The longest request id, in bytes.
pub const REQUEST_ID_BYTES: usize = 128;
/// The last time that may be named, in milliseconds since 1970: the end of the year 9999.
pub const TIME_MS: u64 = 253_402_300_799_999;
/// Most tasks in one page of a list.
pub const PAGE_TASKS: u32 = 1_000;
