//! Server, workers and clients as they are used: real processes, real signals, real disks. What happened is
//! judged by records that the tasks themselves leave behind (`checker`), never by what a scheduler believes.
//!
//! Every fault is drawn from a seed, which a failing test prints; `EVENHAND_CHAOS_SEED` sets it. With
//! `EVENHAND_CHAOS_ROUNDS` the tests under load go on for that many rounds.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admission;
mod benches;
mod chaos;
mod checker;
mod contract;
mod crowds;
mod docs;
mod files;
mod gate;
mod input;
mod interactive;
mod life;
mod network;
mod operators;
mod outages;
mod partitions;
mod rest;
mod seats;
mod space;
mod strangers;
mod support;
mod turnover;
