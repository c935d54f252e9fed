//! Interactive tasks: a worker runs its command now, or not at all, and the caller talks to it.

use std::time::Duration;

use bytes::Bytes;
use evenhand_api::v1::attach_request::Message as Ask;
use evenhand_api::v1::attach_response::Message as Answer;
use evenhand_api::v1::client_client::ClientClient;
use evenhand_api::{MESSAGE_BYTES, STDIN_BYTES, v1};
use evenhand_core::Refusal;
use evenhand_core::refusal::Kind;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{CONNECT_WITHIN, Client, passing, silent};

/// Messages that may wait to be sent.
const OUTGOING: usize = 2;
/// How long a server may take to say yes or no.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Bytes that are sent at once.
const CHUNK: usize = STDIN_BYTES / 16;

/// An interactive task to ask for: see [`Client::attach`].
///
/// ```
/// # use std::time::Duration;
/// # use evenhand::Attach;
/// let ask = Attach::new().key("acme").max_duration(Duration::from_secs(3600)).terminal(24, 80, "xterm-256color");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Attach {
    open: v1::AttachOpen,
}

impl Attach {
    /// With standard input, output and error, each on its own; charged to the shared key.
    pub fn new() -> Attach {
        Attach::default()
    }

    /// Whom to charge.
    pub fn key(mut self, key: impl Into<String>) -> Attach {
        self.open.key = key.into();
        self
    }

    /// How long it may take.
    pub fn max_duration(mut self, duration: Duration) -> Attach {
        self.open.max_duration_ms = Some(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// Its command has a terminal of this size and kind (`TERM`). All that it writes is [`Heard::Stdout`] then.
    pub fn terminal(mut self, rows: u16, cols: u16, term: impl Into<String>) -> Attach {
        let terminal = v1::Terminal { rows: rows.into(), cols: cols.into(), term: term.into() };
        self.open.terminal = Some(terminal);
        self
    }
}

/// An interactive task that runs. When both of its ends are dropped, its command is ended.
#[derive(Debug)]
pub struct Attached {
    /// The task's id.
    pub id: String,
    /// Where it runs.
    pub seat: String,
    /// What is said to it.
    pub input: AttachInput,
    /// What it says.
    pub output: AttachOutput,
}

/// The way to an interactive task's command. Dropped, it is the end of the command's input.
#[derive(Debug)]
pub struct AttachInput {
    asks: mpsc::Sender<v1::AttachRequest>,
}

/// The way from an interactive task's command. Dropped, the command is ended.
#[derive(Debug)]
pub struct AttachOutput {
    answers: Streaming<v1::AttachResponse>,
    /// The last word was heard.
    over: bool,
}

/// What comes from an interactive task.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// What its command wrote to its standard output, or to its terminal.
    Stdout(Bytes),
    /// What it wrote to its standard error.
    Stderr(Bytes),
    /// It will be ended to make room.
    Warning {
        /// In so long.
        grace: Duration,
        /// For people.
        message: String,
    },
    /// It is over. Nothing follows.
    Closed(v1::AttachClosed),
}

impl Client {
    /// Has a worker of this queue run its command now, and talks to it; or is refused now, if no slot is free
    /// ([`Kind::Limited`]). The task has a connection of its own, and lasts as long as that at most.
    ///
    /// ```no_run
    /// # use evenhand::{Attach, Client, Heard};
    /// # async fn example(client: Client) -> Result<(), evenhand::Refusal> {
    /// let mut task = client.attach("calc", Attach::new()).await?;
    /// task.input.write("1+1\n").await?;
    /// task.input.end().await?;
    /// while let Some(heard) = task.output.next().await? {
    ///     match heard {
    ///         Heard::Stdout(bytes) => println!("{}", String::from_utf8_lossy(&bytes)),
    ///         Heard::Closed(closed) => println!("it ended with {:?}", closed.exit_code),
    ///         Heard::Stderr(_) | Heard::Warning { .. } => {}
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn attach(&self, queue: &str, ask: Attach) -> Result<Attached, Refusal> {
        let connecting = tokio::time::timeout(CONNECT_WITHIN, self.endpoint.connect());
        let channel = connecting.await.map_err(|_| silent(CONNECT_WITHIN))?.map_err(|error| {
            let why = super::root(&error);
            Refusal::new(Kind::Unavailable, "", format!("the server cannot be reached: {why}"))
        })?;
        let mut grpc = ClientClient::new(channel).max_decoding_message_size(MESSAGE_BYTES);
        let (asks, asked) = mpsc::channel(OUTGOING);
        let open = v1::AttachOpen { queue: queue.into(), ..ask.open };
        // The first message always fits.
        let _ = asks.try_send(v1::AttachRequest { message: Some(Ask::Open(open)) });
        let opening = async {
            let answer = grpc.attach(ReceiverStream::new(asked)).await.map_err(|status| passing(&status))?;
            let mut answers = answer.into_inner();
            let first = answers.message().await.map_err(|status| passing(&status))?;
            match first.and_then(|first| first.message) {
                Some(Answer::Accepted(accepted)) => Ok((accepted, answers)),
                _ => Err(nonsense()),
            }
        };
        let opened = tokio::time::timeout(ANSWER_WITHIN, opening).await;
        let (accepted, answers) = opened.map_err(|_| silent(ANSWER_WITHIN))??;
        let v1::AttachAccepted { task_id: id, seat } = accepted;
        Ok(Attached { id, seat, input: AttachInput { asks }, output: AttachOutput { answers, over: false } })
    }
}

fn nonsense() -> Refusal {
    Refusal::new(Kind::Internal, "", "the server says something else than it should; this is a bug")
}

impl AttachInput {
    /// Sends bytes to its standard input, or types them into its terminal. Waits while the command does not read.
    pub async fn write(&self, bytes: impl Into<Bytes>) -> Result<(), Refusal> {
        let mut bytes = bytes.into();
        while !bytes.is_empty() {
            let chunk = bytes.split_to(bytes.len().min(CHUNK));
            self.say(Ask::Stdin(chunk)).await?;
        }
        Ok(())
    }

    /// Nothing more will be written. In a terminal it is as if somebody typed Ctrl-D.
    pub async fn end(&self) -> Result<(), Refusal> {
        self.say(Ask::Eof(true)).await
    }

    /// Its terminal has another size.
    pub async fn resize(&self, rows: u16, cols: u16) -> Result<(), Refusal> {
        self.say(Ask::Resize(v1::Resize { rows: rows.into(), cols: cols.into() })).await
    }

    async fn say(&self, ask: Ask) -> Result<(), Refusal> {
        let over = || Refusal::new(Kind::NotFound, "", "the interactive task is over");
        self.asks.send(v1::AttachRequest { message: Some(ask) }).await.map_err(|_| over())
    }
}

impl AttachOutput {
    /// What comes next. None: the last word was heard. An error: the connection broke, and the command is ended. May be
    /// given up and called again.
    pub async fn next(&mut self) -> Result<Option<Heard>, Refusal> {
        loop {
            if self.over {
                return Ok(None);
            }
            let answer = self.answers.message().await.map_err(|status| passing(&status));
            let Some(answer) = answer? else {
                let message = "the server cannot be reached: it ended the stream";
                return Err(Refusal::new(Kind::Unavailable, "", message));
            };
            return Ok(Some(match answer.message {
                Some(Answer::Stdout(bytes)) => Heard::Stdout(bytes),
                Some(Answer::Stderr(bytes)) => Heard::Stderr(bytes),
                Some(Answer::Warning(v1::AttachWarning { grace_ms, message })) => {
                    Heard::Warning { grace: Duration::from_millis(grace_ms), message }
                }
                Some(Answer::Closed(closed)) => {
                    self.over = true;
                    Heard::Closed(closed)
                }
                // A newer server may say more.
                Some(Answer::Accepted(_)) | None => continue,
            }));
        }
    }
}
