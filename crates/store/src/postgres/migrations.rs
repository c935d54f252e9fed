//! The schema, step by step. Each version is a list of SQL files that are applied in one transaction, under a lock that
//! servers which start at the same time wait for; the table `versions` says which have been. A version that has been
//! released is never changed: what a later one needs is a new version (which may replace functions as it likes). A
//! schema that is newer than this program is refused, since the program does not know what it would break.

use std::time::Duration;

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::errors::{OpenError, told};

/// The versions, the first one first.
const VERSIONS: &[&[&str]] = &[&[
    include_str!("sql/0001_tables.sql"),
    include_str!("sql/0002_commit.sql"),
    include_str!("sql/0003_reads.sql"),
]];

/// How long a lock may be waited for in a commit or a take, in milliseconds: less than a caller waits.
const LOCK_MS: u32 = 8_000;

/// What holds inside of our functions. An expensive plan is not compiled: it only looks expensive, because all others
/// are ruled out.
fn planning(schema: &str) -> String {
    let ruled_out = ["seqscan", "bitmapscan", "hashjoin", "mergejoin", "sort"];
    let ruled_out: String = ruled_out.iter().map(|plan| format!(" SET enable_{plan} = off")).collect();
    format!(
        "SET search_path = {schema}, pg_temp{ruled_out} SET plan_cache_mode = force_generic_plan SET jit = off \
         SET lock_timeout = {LOCK_MS}"
    )
}

/// The version of a schema; 0 if there is none yet.
async fn version(client: &Client, schema: &str) -> Result<usize, OpenError> {
    let exists = "SELECT to_regclass($1) IS NOT NULL";
    let name = format!("{schema}.versions");
    let row = client.query_typed(exists, &[(&name, Type::TEXT)]).await.map_err(failed)?;
    if !row.first().is_some_and(|row| row.get::<_, bool>(0)) {
        return Ok(0);
    }
    let last = format!("SELECT coalesce(max(version), 0) FROM {schema}.versions");
    let rows = client.query_typed(&last, &[]).await.map_err(failed)?;
    let version: i32 = rows.first().map_or(0, |row| row.get(0));
    Ok(usize::try_from(version).unwrap_or(0))
}

fn failed(error: tokio_postgres::Error) -> OpenError {
    OpenError::Schema { what: told(&error) }
}

/// Brings a schema to the newest version, if it is not there yet.
pub(super) async fn migrate(client: &Client, schema: &str, wait: Duration) -> Result<(), OpenError> {
    let known = VERSIONS.len();
    let refuse = |found: usize| Err(OpenError::Newer { schema: schema.into(), found, known });
    match version(client, schema).await? {
        found if found > known => return refuse(found),
        // No right to create anything is needed, and no lock.
        found if found == known => return Ok(()),
        _ => {}
    }
    // Whether the schema is there is asked of the table, with a lock of its own: what this session has cached of it may
    // be older than our lock, and CREATE SCHEMA IF NOT EXISTS goes by that.
    let begin = format!(
        "BEGIN; SET LOCAL lock_timeout = {wait}; SET LOCAL statement_timeout = {wait};
         SELECT pg_advisory_xact_lock(hashtext('evenhand'), hashtext('{schema}'));
         DO $$ BEGIN
             IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = '{schema}') THEN
                 CREATE SCHEMA {schema};
             END IF;
         END $$;
         SET LOCAL search_path = {schema}, pg_temp;
         CREATE TABLE IF NOT EXISTS {schema}.versions (
             version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now()
         )",
        wait = wait.as_millis(),
    );
    client.batch_execute(&begin).await.map_err(failed)?;
    let found = version(client, schema).await?;
    if found > known {
        client.batch_execute("ROLLBACK").await.map_err(failed)?;
        return refuse(found);
    }
    let planning = planning(schema);
    for (n, files) in (1..).zip(VERSIONS).skip(found) {
        for file in *files {
            client.batch_execute(&file.replace("/*planning*/", &planning)).await.map_err(failed)?;
        }
        let done = format!("INSERT INTO {schema}.versions (version) VALUES ({n})");
        client.batch_execute(&done).await.map_err(failed)?;
    }
    client.batch_execute("COMMIT").await.map_err(failed)
}
