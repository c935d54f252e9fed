//! A server, and what a worker of it needs.

use std::net::SocketAddr;
use std::path::PathBuf;

use evenhand::{Client, Worker, WorkerError};
use evenhand_core::owner::Settings;
use evenhand_core::owner::health::Thresholds;
use evenhand_server::{Config, Server};
use evenhand_store::Memory;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) struct Home {
    server: Option<Server>,
    store: Memory,
    addr: SocketAddr,
    pub(crate) url: String,
    pub(crate) client: Client,
    pub(crate) dir: TempDir,
    drain: watch::Sender<bool>,
}

impl Home {
    pub(crate) async fn new() -> Home {
        let store = Memory::default();
        let server = serve("127.0.0.1:0".parse().unwrap(), &store).await;
        let addr = server.addr();
        let url = format!("http://{addr}");
        let client = Client::new(&url).unwrap();
        let (drain, dir) = (watch::channel(false).0, TempDir::new().unwrap());
        Home { server: Some(server), store, addr, url, client, dir, drain }
    }

    pub(crate) fn worker(&self) -> Worker {
        Worker::new(&self.url).seat("w").seat_dir(self.dir.path()).slots(4).drain_on(self.drain.subscribe())
    }

    pub(crate) fn draining(&self) -> watch::Receiver<bool> {
        self.drain.subscribe()
    }

    /// Stops the server, and starts another one on the same store at the same address.
    pub(crate) async fn restart(&mut self) {
        self.server.take().unwrap().stop().await.unwrap();
        self.server = Some(serve(self.addr, &self.store).await);
    }

    /// Drains a worker, and the server after it.
    pub(crate) async fn end(self, worker: JoinHandle<Result<(), WorkerError>>) {
        self.drain.send_replace(true);
        worker.await.unwrap().unwrap();
        self.stop().await;
    }

    pub(crate) async fn stop(self) {
        self.server.unwrap().stop().await.unwrap();
    }
}

async fn serve(listen: SocketAddr, store: &Memory) -> Server {
    let thresholds = Thresholds { heartbeat_ms: 50, unhealthy_after_ms: 2_000, lost_after_ms: 20_000 };
    let settings = Settings { thresholds, ..Settings::default() };
    Server::start(Config { listen, store: "memory".into(), settings }, store.clone()).await.unwrap()
}

/// An example's program.
pub(crate) fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is missing; run `cargo build -p evenhand --examples`", path.display());
    path
}
