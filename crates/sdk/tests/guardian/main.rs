//! The guardian with real processes. Everything here is about one promise: no process of a run outlives the
//! run's end, its lease, its worker or its guardian.
//!
//! Guardians, runs and workers are processes of `examples/guardian_child.rs`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod deaths;
mod ends;
mod interactive;
mod runs;
mod seats;
mod support;
