//! Admission: which of the tasks that wait may start now. The backlog says who goes first; admission says what may run
//! beside what.
//!
//! - [`classes`]: a queue's durations and their limits. Limit i caps how many runs hold class i or a longer one, so that
//!   short work finds slots however much long work there is.
//! - `cycle`: who holds which class, and what happens when a task needs one that is full.
//! - [`rate`]: how many starts, or how much of them, a second may bring.
//!
//! The shard asks here before each start (`shard/admit.rs`), and estimates ask the same of a copy.

pub(crate) mod chance;
pub mod classes;
pub(crate) mod cycle;
pub mod rate;

pub use classes::{ClassLimit, Limit};
pub use rate::{Rate, RateUnit};
