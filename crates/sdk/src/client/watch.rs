//! Streams of events, and of pages, that outlive a connection.

use std::time::{Duration, Instant};

use evenhand_api::v1;
use evenhand_core::Refusal;
use evenhand_core::refusal::Kind;
use tonic::Streaming;

use super::{Client, PAUSE, PAUSE_MAX, Task, TaskState, passing};

/// A stream that lasted so long was not refused: what breaks it is a new outage.
const LASTED: Duration = Duration::from_secs(1);

/// What happens to a task, or to many: see [`Client::watch`] and [`Client::watch_all`].
///
/// It outlives the connection and the server. When the stream breaks it is taken up again, as patiently as the
/// client makes its calls, after the last event that was seen. What the server does not know any more is not
/// passed over in silence: a `missed` comes first, and for one task then how it stands now.
///
/// As long as it lives it keeps an attached task ([`NewTask::attached`](crate::NewTask::attached)).
#[derive(Debug)]
pub struct Watch {
    client: Client,
    /// What to ask for; `after` moves on with what is seen.
    request: v1::WatchRequest,
    events: Option<Streaming<v1::TaskEvent>>,
    /// The task's end was seen.
    over: bool,
    /// No event has come since the stream was opened.
    quiet: bool,
    /// To be told before anything else.
    missed: bool,
    opened: Instant,
    /// Since when no stream has lasted.
    broken: Option<Instant>,
    pause: Duration,
}

impl Watch {
    pub(super) async fn open(client: &Client, request: v1::WatchRequest) -> Result<Watch, Refusal> {
        let mut watch = Watch {
            client: client.clone(),
            request,
            events: None,
            over: false,
            quiet: true,
            missed: false,
            opened: Instant::now(),
            broken: None,
            pause: PAUSE,
        };
        watch.reopen().await?;
        Ok(watch)
    }

    /// The next event. None: the task's end has been told. May be given up and called again.
    pub async fn next(&mut self) -> Result<Option<v1::TaskEvent>, Refusal> {
        loop {
            if self.over {
                return Ok(None);
            }
            let Some(events) = &mut self.events else {
                self.reopen().await?;
                continue;
            };
            if std::mem::take(&mut self.missed) {
                let event = Some(v1::task_event::Event::Missed(true));
                return Ok(Some(v1::TaskEvent { event, ..v1::TaskEvent::default() }));
            }
            let why = match events.message().await {
                Ok(Some(event)) => {
                    self.see(&event);
                    return Ok(Some(event));
                }
                // So a server says that the task has ended, and that the caller has seen it.
                Ok(None) if self.quiet && self.goes_on() && self.has_ended().await? => {
                    self.over = true;
                    continue;
                }
                Ok(None) => Refusal::new(Kind::Unavailable, "", "the server ended the stream"),
                Err(status) => passing(&status),
            };
            self.on_broken(why).await?;
        }
    }

    /// Waits until the task has ended; of many, until one has. None: the end was told before.
    pub async fn end(mut self) -> Result<Option<Task>, Refusal> {
        while let Some(event) = self.next().await? {
            if let Some(v1::task_event::Event::Task(task)) = event.event
                && is_over(&task)
            {
                return Ok(Some(task));
            }
        }
        Ok(None)
    }

    fn see(&mut self, event: &v1::TaskEvent) {
        self.quiet = false;
        self.broken = None;
        self.pause = PAUSE;
        if !event.id.is_empty() {
            self.request.after.clone_from(&event.id);
        }
        if let Some(v1::task_event::Event::Task(task)) = &event.event {
            self.over = !self.request.id.is_empty() && is_over(task);
        }
    }

    async fn reopen(&mut self) -> Result<(), Refusal> {
        let open = async |mut grpc: super::Grpc, request| grpc.watch(request).await;
        self.events = Some(self.client.open(self.request.clone(), open).await?);
        self.opened = Instant::now();
        self.quiet = true;
        Ok(())
    }

    /// Whether it watches one task, and not from its beginning.
    fn goes_on(&self) -> bool {
        !self.request.id.is_empty() && !self.request.after.is_empty()
    }

    async fn has_ended(&self) -> Result<bool, Refusal> {
        Ok(is_over(&self.client.get(&self.request.id).await?))
    }

    /// The stream is gone: after a pause the next one may be opened, unless there is no hope.
    async fn on_broken(&mut self, why: Refusal) -> Result<(), Refusal> {
        self.events = None;
        if !super::is_passing(&why) {
            return Err(why);
        }
        if self.opened.elapsed() > LASTED {
            self.broken = None;
            self.pause = PAUSE;
        }
        let since = *self.broken.get_or_insert_with(Instant::now);
        if since.elapsed() > self.client.patience {
            return Err(why);
        }
        // Without an event to go on from, the server cannot know that something was missed.
        self.missed |= self.request.id.is_empty() && self.request.after.is_empty();
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }
}

/// Whether a task has ended.
pub(crate) fn is_over(task: &Task) -> bool {
    match task.state() {
        TaskState::Succeeded | TaskState::Failed | TaskState::Canceled | TaskState::Expired => true,
        TaskState::Queued | TaskState::Scheduled | TaskState::Running | TaskState::Unspecified => false,
    }
}
