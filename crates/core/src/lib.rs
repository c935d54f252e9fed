//! Evenhand's decision core: which task runs next, and why.
//!
//! It is pure. A [`Shard`] is told facts and a time, changes its state, and lists what must be done; it
//! has no clock, no randomness, no threads, no IO and no hash order (`clippy.toml` enforces it). So the
//! same inputs give the same effects, byte for byte, and the simulator can try in minutes what takes
//! production years.
//!
//! The story on one page:
//!
//! 1. [`names`], [`bounds`], [`refusal`]: what things are called, how large they may be, how no is said.
//! 2. [`backlog`]: a *lane* is one ordered backlog of a (queue, priority, class). A task's place in it,
//!    its *level*, is decided when it is accepted, so that keys share by weight. Memory holds a *window*
//!    of the lane; the store holds all of it.
//! 3. [`change`]: what the store must remember. A task costs two rows; starting one costs nothing.
//! 4. [`messages`]: inputs and effects.
//! 5. [`shard`]: `step`. Tasks are accepted, saved, merged into windows when durable, started on free
//!    slots, and settled when they end.
//! 6. [`admission`]: what may run beside what: duration classes, limits, rates.
//! 7. [`life`]: what can happen to a task and what comes of it. [`timers`]: what waits for a time. [`workers`]:
//!    slots.
//! 8. [`owner`]: a shard and its workers: sessions, health, the start gate. [`worker`]: the worker's side.
//! 9. [`explain`]: why a task is not running. [`estimate`]: when it will. [`check`]: what must always be true.
//! 10. [`canary`]: deliberate bugs, for the simulator to catch.

pub mod admission;
pub mod backlog;
pub mod bounds;
pub mod canary;
pub mod change;
pub mod check;
pub mod estimate;
pub mod explain;
pub mod life;
pub mod messages;
pub mod names;
pub mod owner;
pub mod refusal;
pub mod shard;
pub mod timers;
pub mod worker;
pub mod workers;

pub use bounds::Bounds;
pub use change::{Change, Metadata, Row, Task};
pub use messages::{Answer, Effect, File, Input, NewTask, Run, Work};
pub use owner::Owner;
pub use refusal::Refusal;
pub use shard::Shard;
