//! The embedded store against its promises: the conformance suite with tables of every age, crashes at
//! any moment, disks that fail, fill up or forget, and directories that are not what they should be.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod conforms;
#[path = "../alike/contents.rs"]
mod contents;
mod damage;
mod disks;
mod formats;
mod killed;
mod model;
mod moments;
mod plan;
mod space;
mod stories;
mod support;
mod synced;
mod witness;
#[path = "../alike/work.rs"]
mod work;
