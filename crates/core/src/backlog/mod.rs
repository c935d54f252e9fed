//! The backlog: in which order tasks are served, and how much of that order memory holds.
//!
//! Read in this order: [`vtime`] (the numbers), [`level`] (a place), [`places`] (who gets which place),
//! [`window`] (what memory knows of a lane), [`lane`] (both together), [`turns`] (choosing among lanes
//! and queues). [`shelf`] is for rows that stand in another order beside the lanes: timers, and those of keys that
//! may not run.

mod keys;
pub(crate) mod lane;
mod level;
mod pins;
mod places;
#[cfg(test)]
mod plan_one;
mod shelf;
pub(crate) mod turns;
mod vtime;
mod window;

pub(crate) use keys::{KeyIx, KeyState};
pub(crate) use lane::Lane;
pub use level::Level;
pub use places::Charge;
pub(crate) use shelf::Shelf;
pub(crate) use turns::Turns;
pub use vtime::{Average, Cost, Pass, VTime, Weight};
pub(crate) use window::Entry;
