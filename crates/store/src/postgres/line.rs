//! Lines: connections that come back. A line has one connection at a time, which a task of its own drives, and makes a new
//! one when it is needed and the last one is gone; after failures it waits a little first, longer each time. Nothing
//! that was sent is ever sent again, but for reads, once, on a new connection.
//!
//! Everything has an end: an operation that is not answered in time is canceled, and its connection is given up, so that
//! no later one waits behind it. Statements have no names and leave nothing behind in the session, so the
//! connection may lead to a pooler that gives each transaction another server's.

use std::time::Duration;

use evenhand_core::names::Epoch;
use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::address::Address;
use super::errors::{meaning, told, unavailable};
use crate::StoreError;

/// First wait after a connection could not be made, and the longest.
const WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Where lines lead, and how long anything may take.
pub(super) struct Way {
    pub(super) address: Address,
    pub(super) tls: MakeRustlsConnect,
    pub(super) limit: Duration,
}

/// A parameter of a statement.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// A connection.
pub(super) struct Live {
    pub(super) client: Client,
    driver: AbortHandle,
}

impl Live {
    /// Asks the server to stop what it does for us, and leaves.
    fn give_up(&self, way: &Way) {
        let (cancel, tls) = (self.client.cancel_token(), way.tls.clone());
        let limit = way.limit;
        tokio::spawn(async move { timeout(limit, cancel.cancel_query(tls)).await });
        self.driver.abort();
    }
}

impl Way {
    /// Makes a connection.
    pub(super) async fn connect(&self) -> Result<Live, String> {
        let connecting = self.address.config.connect(self.tls.clone());
        let connected = timeout(self.limit, connecting).await;
        let connected = connected.map_err(|_| format!("no connection within {:?}", self.limit))?;
        let (client, connection) = connected.map_err(|error| told(&error))?;
        // What breaks it, its client is told.
        let driver = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok(Live { client, driver })
    }
}

/// A connection that comes back.
#[derive(Default)]
pub(super) struct Line {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: Option<std::sync::Arc<Live>>,
    /// How long to wait after the next failure, and until when because of the last one.
    wait: Duration,
    until: Option<Instant>,
}

impl Line {
    /// A line that has its first connection already.
    pub(super) fn new(live: Live) -> Line {
        Line { state: Mutex::new(State { live: Some(live.into()), ..State::default() }) }
    }

    /// The connection, or a new one.
    pub(super) async fn live(&self, way: &Way) -> Result<std::sync::Arc<Live>, StoreError> {
        let mut state = self.state.lock().await;
        if let Some(live) = state.live.as_ref().filter(|live| !live.client.is_closed()) {
            return Ok(live.clone());
        }
        state.live = None;
        if let Some(until) = state.until {
            sleep_until(until).await;
        }
        match way.connect().await {
            Ok(live) => {
                let live = std::sync::Arc::new(live);
                *state = State { live: Some(live.clone()), ..State::default() };
                Ok(live)
            }
            Err(what) => {
                state.wait = (state.wait * 2).clamp(WAIT, LONGEST_WAIT);
                state.until = Some(Instant::now() + state.wait);
                Err(unavailable(format!("connecting: {what}")))
            }
        }
    }

    /// Sends one statement and waits for its answer. Never sent twice.
    pub(super) async fn once(
        &self,
        way: &Way,
        what: &str,
        epoch: Option<Epoch>,
        statement: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, StoreError> {
        let live = self.live(way).await?;
        in_time(way, what, &live, live.client.query_typed(statement, parameters))
            .await?
            .map_err(|error| meaning(what, epoch, &error))
    }

    /// The same for a statement that only reads: tried once more if the connection is lost.
    pub(super) async fn read(
        &self,
        way: &Way,
        what: &str,
        statement: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, StoreError> {
        let live = self.live(way).await?;
        let first = in_time(way, what, &live, live.client.query_typed(statement, parameters)).await?;
        match first {
            Err(error) if live.client.is_closed() || error.is_closed() => {
                drop((live, error));
                self.once(way, what, None, statement, parameters).await
            }
            answer => answer.map_err(|error| meaning(what, None, &error)),
        }
    }
}

/// Waits for an answer, but not for ever.
pub(super) async fn in_time<T>(
    way: &Way,
    what: &str,
    live: &Live,
    answer: impl Future<Output = T>,
) -> Result<T, StoreError> {
    timeout(way.limit, answer).await.map_err(|_| {
        live.give_up(way);
        unavailable(format!("{what}: no answer within {:?}", way.limit))
    })
}
