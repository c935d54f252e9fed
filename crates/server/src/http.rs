//! The port: gRPC for clients and workers, REST, and a few pages for operators, on one socket. What strangers may do
//! to it is bounded: connections, streams on each, the time a head may take, the size of a message; a peer that
//! has vanished is noticed by pings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use evenhand_api::MESSAGE_BYTES;
use evenhand_api::v1::client_server::ClientServer;
use evenhand_api::v1::worker_sessions_server::WorkerSessionsServer;
use evenhand_store::Store;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tracing::{debug, warn};

use crate::Config;
use crate::clients::Clients;
use crate::clock::Clock;
use crate::interactive::Registry;
use crate::mailbox::Mailbox;
use crate::metrics::{Metrics, plain};
use crate::rest;
use crate::workers::Workers;

/// Connections at once. More are closed as they come.
const CONNECTIONS: usize = 20_000;
/// Dials that may wait to be taken up: after a restart all workers dial at once, and those beyond it wait for a second. The
/// kernel has a bound of its own.
const BACKLOG: u32 = 16_384;
/// Streams on one connection.
const STREAMS: u32 = 256;
/// How long the head of a request may take.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// How long the first request may take: what says nothing for so long has nothing to say.
const FIRST_WITHIN: Duration = Duration::from_secs(60);
/// How often a silent peer is asked whether it is there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(10);
const PONG_WITHIN: Duration = Duration::from_secs(10);
/// What one connection, and one stream on it, may have on its way to us.
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
const STREAM_WINDOW: u32 = 1024 * 1024;

/// What the port serves.
pub(crate) struct Serving<S> {
    pub(crate) mailbox: Mailbox,
    pub(crate) registry: Registry,
    pub(crate) store: S,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) config: Config,
    pub(crate) clock: Clock,
}

/// What the pages need.
struct Pages<S> {
    clients: Arc<Clients<S>>,
    metrics: Arc<Metrics>,
}

/// Listens there.
pub(crate) fn listen(addr: std::net::SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?; // a server that is started again need not wait for the last one's connections
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// Every connection is an open file.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, accepting says so when it comes to that.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Serves until it is told to stop.
pub(crate) async fn serve<S: Store + Clone + 'static>(
    listener: TcpListener,
    serving: Serving<S>,
    mut stopping: watch::Receiver<bool>,
) {
    let router = router(serving);
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG_WITHIN);
    let (builder, graceful) = (Arc::new(builder), GracefulShutdown::new());
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let mut crowded = Crowded::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopping.wait_for(|stop| *stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // No files left, or a peer that has gone: neither is the end of the server.
                crowded.say(&format!("a connection could not be accepted: {error}"));
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let Ok(held) = connections.clone().try_acquire_owned() else {
            crowded.say("all connections are taken; more are closed as they come");
            continue;
        };
        // A small answer must not wait for a larger one.
        drop(stream.set_nodelay(true));
        let held = Arc::new(held);
        let spoken = Arc::new(AtomicBool::new(false));
        let service = hyper_util::service::TowerToHyperService::new(Peer {
            router: router.clone(),
            addr: stream.peer_addr().ok(),
            spoken: spoken.clone(),
            held: Held(held.clone()),
        });
        let watcher = graceful.watcher();
        let builder = builder.clone();
        tokio::spawn(async move {
            let connection = builder
                .serve_connection_with_upgrades(TokioIo::<TcpStream>::new(stream), service)
                .into_owned();
            let mut connection = std::pin::pin!(watcher.watch(connection));
            let served = tokio::select! {
                served = &mut connection => served,
                () = silent(&spoken) => {
                    debug!("a connection said nothing and is closed");
                    return;
                }
            };
            if let Err(error) = served {
                debug!(%error, "a connection broke");
            }
            drop(held);
        });
    }
    graceful.shutdown().await;
}

/// Returns if there has been no request by the time there should have been one.
async fn silent(spoken: &AtomicBool) {
    tokio::time::sleep(FIRST_WITHIN).await;
    if spoken.load(Ordering::Relaxed) {
        std::future::pending().await
    }
}

/// Says the same thing at most once a minute.
#[derive(Default)]
struct Crowded {
    said: Option<Instant>,
}

impl Crowded {
    fn say(&mut self, what: &str) {
        if self.said.is_none_or(|said| said.elapsed() > Duration::from_secs(60)) {
            self.said = Some(Instant::now());
            warn!("{what}");
        }
    }
}

/// The place that a connection takes among all that there may be. Whoever keeps the connection beyond HTTP keeps it.
#[derive(Clone, Debug)]
pub(crate) struct Held(#[expect(dead_code, reason = "it is held, not looked at")] Arc<OwnedSemaphorePermit>);

/// The routes, for one connection: handlers may ask who is on the other end.
#[derive(Clone)]
struct Peer {
    router: axum::Router,
    addr: Option<std::net::SocketAddr>,
    /// There has been a request.
    spoken: Arc<AtomicBool>,
    held: Held,
}

impl<B> tower::Service<axum::http::Request<B>> for Peer
where
    axum::Router: tower::Service<axum::http::Request<B>>,
{
    type Response = <axum::Router as tower::Service<axum::http::Request<B>>>::Response;
    type Error = <axum::Router as tower::Service<axum::http::Request<B>>>::Error;
    type Future = <axum::Router as tower::Service<axum::http::Request<B>>>::Future;

    fn poll_ready(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        tower::Service::poll_ready(&mut self.router, context)
    }

    fn call(&mut self, mut request: axum::http::Request<B>) -> Self::Future {
        let info = tonic::transport::server::TcpConnectInfo { local_addr: None, remote_addr: self.addr };
        request.extensions_mut().insert(info);
        request.extensions_mut().insert(self.held.clone());
        self.spoken.store(true, Ordering::Relaxed);
        tower::Service::call(&mut self.router, request)
    }
}

fn router<S: Store + Clone + 'static>(serving: Serving<S>) -> axum::Router {
    let Serving { mailbox, registry, store, metrics, config, clock } = serving;
    let clients = Arc::new(Clients {
        mailbox: mailbox.clone(),
        store,
        about: config.store,
        settings: config.settings,
        began: Instant::now(),
        clock,
        forecasts: Arc::default(),
    });
    let workers = Workers { mailbox, registry, sessions: AtomicU64::new(0) };
    let limited = |service: ClientServer<Clients<S>>| service.max_decoding_message_size(MESSAGE_BYTES);
    let clients_service = limited(ClientServer::from_arc(clients.clone()));
    let workers_service = WorkerSessionsServer::new(workers)
        .max_decoding_message_size(MESSAGE_BYTES)
        .max_encoding_message_size(usize::MAX);
    let grpc = tonic::service::Routes::new(clients_service).add_service(workers_service);
    let pages = axum::Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz::<S>))
        .route("/metrics", get(metrics_page::<S>))
        .with_state(Arc::new(Pages { clients: clients.clone(), metrics }));
    let all = grpc.prepare().into_axum_router().merge(pages).merge(rest::router(clients));
    all.fallback(rest::not_found)
}

/// Ready: the shard is here and its gate is open.
async fn readyz<S: Store + Clone + 'static>(State(pages): State<Arc<Pages<S>>>) -> impl IntoResponse {
    match pages.clients.mailbox.look().await {
        Ok(view) if view.shard.open => (StatusCode::OK, "ready\n".to_string()),
        Ok(view) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("the start gate is shut: {}\n", view.shard.waits_for))
        }
        Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, format!("{refusal}\n")),
    }
}

async fn metrics_page<S: Store + Clone + 'static>(
    State(pages): State<Arc<Pages<S>>>,
    headers: HeaderMap,
) -> impl IntoResponse {
    let look = pages.clients.look().await;
    let page = pages.metrics.page(look.ok().as_ref(), pages.clients.mailbox.fill());
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (kind, page) = match accept.contains("application/openmetrics-text") {
        true => ("application/openmetrics-text; version=1.0.0; charset=utf-8", page),
        false => ("text/plain; version=0.0.4; charset=utf-8", plain(&page)),
    };
    ([(header::CONTENT_TYPE, kind)], page)
}
