//! The PostgreSQL store against its promises: the conformance suite, directly and through a pooler, servers that crash,
//! connections that are cut, schemas of other versions, and random work beside the store in memory.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cluster;
mod conforms;
#[path = "../alike/contents.rs"]
mod contents;
mod model;
mod outages;
mod people;
#[path = "../embedded/plan.rs"]
mod plan;
mod schemas;
#[path = "../alike/work.rs"]
mod work;
