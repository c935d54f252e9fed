//! The conformance suite, once with the server and once through a pooler that gives each transaction another connection.

use std::sync::Mutex;

use evenhand_store::Postgres;
use evenhand_store::conformance::{self, Harness};

use crate::cluster::{SHARED, block_on, fresh_schema, open};

/// A schema for each store. The last one is opened again.
struct InCluster {
    pooled: bool,
    last: Mutex<String>,
}

fn in_cluster(pooled: bool) -> InCluster {
    InCluster { pooled, last: Mutex::default() }
}

impl InCluster {
    async fn open(&self, schema: &str) -> Postgres {
        open(&if self.pooled { SHARED.pooled(schema) } else { SHARED.address(schema) }).await
    }
}

impl Harness for InCluster {
    type Store = Postgres;

    async fn fresh(&self) -> Postgres {
        let schema = fresh_schema();
        *self.last.lock().unwrap() = schema.clone();
        self.open(&schema).await
    }

    async fn reopen(&self, store: Postgres) -> Postgres {
        drop(store);
        let schema = self.last.lock().unwrap().clone();
        self.open(&schema).await
    }
}

mod directly {
    use super::*;

    conformance::suite!(in_cluster(false), block_on);
}

mod through_a_pooler {
    use super::*;

    conformance::suite!(in_cluster(true), block_on);
}
