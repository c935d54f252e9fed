//! A server that comes and goes as a test wants it, and lets the test hear all that a worker says.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use evenhand::wire;
use evenhand_api::v1::worker_sessions_server::{WorkerSessions, WorkerSessionsServer};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Server, TcpIncoming};
use tonic::{Request, Response, Status, Streaming};

const EPOCH: u64 = 1;

pub(crate) struct Fickle {
    pub(crate) url: String,
    sessions: mpsc::Receiver<Session>,
    away: Arc<AtomicBool>,
}

impl Fickle {
    pub(crate) async fn new() -> Fickle {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (told, sessions) = mpsc::channel(10);
        let away = Arc::new(AtomicBool::new(false));
        let service = WorkerSessionsServer::new(Service { told, away: away.clone() });
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener)));
        Fickle { url, sessions, away }
    }

    /// The next session, from its hello on.
    pub(crate) async fn hello(&mut self) -> Session {
        self.sessions.recv().await.unwrap()
    }

    /// Cuts a session, and takes no other one for so long.
    pub(crate) async fn leave(&self, session: Session, pause: Duration) {
        self.away.store(true, Ordering::Relaxed);
        drop(session);
        tokio::time::sleep(pause).await;
        self.away.store(false, Ordering::Relaxed);
    }
}

struct Service {
    told: mpsc::Sender<Session>,
    away: Arc<AtomicBool>,
}

#[tonic::async_trait]
impl WorkerSessions for Service {
    type SessionStream = ReceiverStream<Result<wire::Down, Status>>;
    type InteractiveStream = ReceiverStream<Result<wire::InteractiveDown, Status>>;

    async fn interactive(
        &self,
        _: Request<Streaming<wire::InteractiveUp>>,
    ) -> Result<Response<Self::InteractiveStream>, Status> {
        Err(Status::not_found("nobody talks here"))
    }

    async fn session(
        &self,
        request: Request<Streaming<wire::Up>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        if self.away.load(Ordering::Relaxed) {
            return Err(Status::unavailable("away"));
        }
        let (told, mut up) = (self.told.clone(), request.into_inner());
        let (down, downs) = mpsc::channel(10);
        tokio::spawn(async move {
            if let Ok(Some(wire::Up { message: Some(wire::up::Message::Hello(hello)) })) = up.message().await
            {
                let _ = told.send(Session { hello, up, down }).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(downs)))
    }

    async fn dead(&self, _: Request<wire::DeadRequest>) -> Result<Response<wire::DeadResponse>, Status> {
        Ok(Response::new(wire::DeadResponse {}))
    }
}

pub(crate) struct Session {
    pub(crate) hello: wire::Hello,
    up: Streaming<wire::Up>,
    down: mpsc::Sender<Result<wire::Down, Status>>,
}

impl Session {
    async fn say(&self, down: wire::Down) {
        let said = wire::Down { epoch: EPOCH, session: self.hello.session, ..down };
        self.down.send(Ok(said)).await.unwrap();
    }

    pub(crate) async fn welcome(&self) {
        let thresholds = wire::Thresholds {
            heartbeat_ms: 20,
            unhealthy_after_ms: 2_000,
            lost_after_ms: 60_000,
            ..wire::Thresholds::default()
        };
        let welcome =
            Some(wire::Welcome { store_id: 7, nonce: 1, thresholds: Some(thresholds), worker_set: None });
        let queues = vec![wire::QueueName { id: 0, name: "q".into() }];
        self.say(wire::Down { welcome, queues, ..wire::Down::default() }).await;
    }

    /// Starts a run, and waits until the worker has heard of it.
    pub(crate) async fn start(&mut self, number: u64) {
        let run = wire::Run {
            id: Some(run_id(number)),
            level: vec![0; 16],
            key: "acme".into(),
            cost_thousandths: 1_000,
            weight_thousandths: 1_000,
            attempt: 1,
            max_attempts: 5,
            timed: true,
            ..wire::Run::default()
        };
        let start = vec![wire::Start { run: Some(run), number, ..wire::Start::default() }];
        self.say(wire::Down { start, ..wire::Down::default() }).await;
        // What is said before an answer has been heard when the answer has.
        let mut answered = None;
        loop {
            match (self.news().await.heartbeat, answered) {
                (Some(beat), None) => answered = Some(beat.number),
                (Some(beat), Some(number)) if beat.answered >= number => return,
                (Some(_) | None, _) => {}
            }
        }
    }

    /// The next end of a run.
    pub(crate) async fn ended(&mut self) -> wire::RunEnded {
        loop {
            if let Some(ended) = self.news().await.ended.pop() {
                return ended;
            }
        }
    }

    pub(crate) async fn acknowledge(&self, number: u64) {
        self.say(wire::Down { acknowledged: vec![run_id(number)], ..wire::Down::default() }).await;
    }

    /// What the worker says next. Its heartbeats are answered.
    async fn news(&mut self) -> wire::News {
        let up = self.up.message().await.unwrap().unwrap();
        let Some(wire::up::Message::News(news)) = up.message else { panic!("{up:?}") };
        if let Some(beat) = &news.heartbeat {
            let answer = Some(wire::Answer { number: beat.number, worker_set: None });
            self.say(wire::Down { answer, ..wire::Down::default() }).await;
        }
        news
    }
}

fn run_id(number: u64) -> wire::RunId {
    wire::RunId { task: number, epoch: EPOCH, dispatch: number, nonce: 1 }
}
