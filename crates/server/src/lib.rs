//! Evenhand's server: the shell around an owner. It moves bytes between the network, the store and the core,
//! and decides nothing.
//!
//! In reading order:
//! 1. [`Config`], [`Server`]: what it is told; starting and stopping it.
//! 2. `shard`: the loop around an owner. One thread, one mailbox for workers and one for clients, both
//!    bounded; a batch of inputs is stepped while the last batch's commit is on its way.
//! 3. `mailbox`: how the rest of the server reaches the loop. `outbox`: how the loop reaches a worker.
//! 4. `clients`, `workers`: the two services of gRPC; `listing`: tasks by the page. `rest`: the clients' one in JSON.
//!    `http`: the port, and the pages for operators. `interactive`: where clients and interactive runs meet;
//!    `websocket`: such clients that come from REST.
//! 5. `forecasts`: when waiting tasks will start. `events`: who watches which task, and how the last ones ended that the store forgets. `metrics`: what
//!    an operator asks first.

mod clients;
mod clock;
mod events;
mod forecasts;
mod http;
mod interactive;
mod listing;
mod mailbox;
mod metrics;
mod outbox;
mod rest;
mod shard;
mod websocket;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use evenhand_core::owner::Settings;
use evenhand_store::Store;
use tokio::sync::watch;
use tracing::info;

pub use clock::Clock;

/// What a server is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: SocketAddr,
    /// What the store is and where, for people.
    pub store: String,
    /// What its owner is told.
    pub settings: Settings,
}

/// Why a server cannot start or go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServerError {
    /// The port is not to be had.
    #[error(
        "cannot listen on {listen}: {why}; is another server running? Stop it, or choose another address with --listen"
    )]
    Listen {
        /// Where.
        listen: SocketAddr,
        /// What the system says.
        why: String,
    },
    /// The store will not do.
    #[error("{0}")]
    Store(String),
    /// The system has no thread left.
    #[error("cannot start a thread: {0}")]
    Thread(String),
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    http: tokio::task::JoinHandle<()>,
    shard: tokio::sync::oneshot::Receiver<Result<(), ServerError>>,
    mailbox: mailbox::Mailbox,
    registry: interactive::Registry,
}

impl Server {
    /// Takes the shard, listens, and serves until it is told to stop.
    pub async fn start<S: Store + Clone + 'static>(config: Config, store: S) -> Result<Server, ServerError> {
        http::raise_open_files();
        let listen =
            |error: std::io::Error| ServerError::Listen { listen: config.listen, why: error.to_string() };
        let listener = http::listen(config.listen).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let (metrics, clock) = (Arc::new(metrics::Metrics::new()), Clock::new());
        let (mailbox, inbox) = mailbox::new();
        let (registry, hung_up) = interactive::Registry::new();
        let (stop, stopping) = watch::channel(false);
        let (ended, shard) = tokio::sync::oneshot::channel();
        let talks = shard::Talks { registry: registry.clone(), hung_up };
        let looping =
            shard::Loop::new(config.clone(), store.clone(), inbox, talks, metrics.clone(), clock.clone());
        // The loop has a thread of its own: what it steps through may take milliseconds, and the network must
        // not wait for it.
        std::thread::Builder::new()
            .name("shard 0".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
                let result = match runtime {
                    Ok(runtime) => runtime.block_on(looping.run()),
                    Err(error) => Err(ServerError::Thread(error.to_string())),
                };
                drop(ended.send(result));
            })
            .map_err(|error| ServerError::Thread(error.to_string()))?;
        let (of_mailbox, of_registry) = (mailbox.clone(), registry.clone());
        let serving =
            http::Serving { mailbox: of_mailbox, registry: of_registry, store, metrics, config, clock };
        let http = tokio::spawn(http::serve(listener, serving, stopping));
        info!(%addr, "listening");
        Ok(Server { addr, stop, http, shard, mailbox, registry })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits until the server ends by itself, which it does only when it cannot go on.
    pub async fn ended(&mut self) -> Result<(), ServerError> {
        match (&mut self.shard).await {
            Ok(result) => result,
            Err(_) => Err(ServerError::Store("the shard's loop has ended; this is a bug".into())),
        }
    }

    /// Stops in good order: starts nothing more, saves what runs, lets the workers go on without a server for
    /// a while, answers what was asked, closes.
    pub async fn stop(self) -> Result<(), ServerError> {
        info!("stopping: what runs goes on, and is saved");
        // Conversations cannot go on without us. Who talks is told so before the port is closed.
        self.registry.stop();
        self.mailbox.stop().await;
        let result = match tokio::time::timeout(Duration::from_secs(30), self.shard).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(ServerError::Store("the shard's loop has ended; this is a bug".into())),
            Err(_) => Err(ServerError::Store(
                "the store has not answered for 30 s; what runs is not saved, so the next start will wait for its \
                 workers"
                    .into(),
            )),
        };
        drop(tokio::time::timeout(Duration::from_secs(2), self.registry.is_empty()).await);
        // Whoever still waits on the port has heard all there is to hear.
        let _ = self.stop.send(true);
        drop(tokio::time::timeout(Duration::from_secs(5), self.http).await);
        result
    }
}
