//! Runs handlers without a server, for tests.
//!
//! What runs them is what runs them in a worker: payloads are read the same way, panics are caught, results and texts
//! have the same bounds, cancels and deadlines do what they do there. What a server does is not here: fairness,
//! retries (but see [`TestWorker::run_to_end`]), leases.
//!
//! ```
//! use evenhand::testing::TestWorker;
//! use evenhand::{Failure, Handlers, NewTask, Run};
//!
//! async fn double(number: u32, run: Run) -> Result<u32, Failure> {
//!     run.output(format!("doubling {number}"));
//!     number.checked_mul(2).ok_or_else(|| Failure::for_good("that is too much"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), evenhand::Refusal> {
//! let worker = TestWorker::new(Handlers::new().handle("double", double));
//!
//! let ended = worker.run("double", NewTask::json(&21)?).await?;
//! assert_eq!(ended.json::<u32>()?, 42);
//! assert_eq!(ended.output, ["doubling 21"]);
//!
//! let ended = worker.run("double", NewTask::json(&u32::MAX)?).await?;
//! assert_eq!(ended.failure(), Some(&Failure::for_good("that is too much")));
//! # Ok(()) }
//! ```
//!
//! Needs a runtime of tokio around it: `#[tokio::test]`. With `start_paused = true` there, deadlines come at once.

use std::time::Duration;

use bytes::Bytes;
use evenhand_api::convert;
use evenhand_core::life::End;
use evenhand_core::names::{Epoch, Fence, QueueName, ShardId, TaskId};
use evenhand_core::{Refusal, bounds};
use serde::de::DeserializeOwned;

pub use evenhand_api::v1::Progress;

use crate::client::NewTask;
use crate::worker::{Failure, Handlers, Happening, InProcess, Job, RunKey, Runner, Word};

/// Runs handlers, one task at a time or many.
#[derive(Clone, Debug)]
pub struct TestWorker {
    handlers: Handlers,
    grace: Duration,
}

impl TestWorker {
    /// Of these handlers, or of a [`crate::Worker`]'s.
    pub fn new(handlers: impl Into<Handlers>) -> TestWorker {
        TestWorker { handlers: handlers.into(), grace: Duration::from_secs(10) }
    }

    /// How long a handler may go on after its task was canceled; 10 s if nobody says.
    pub fn grace(mut self, grace: Duration) -> TestWorker {
        self.grace = grace;
        self
    }

    /// Runs a task once. A refusal: no server would accept such a task.
    pub async fn run(&self, queue: &str, task: NewTask) -> Result<Ended, Refusal> {
        Ok(self.start(queue, task)?.end().await)
    }

    /// Runs a task again and again, as a server has it done: until it succeeds, fails for good or has no attempts
    /// left (5, if it does not say). How each run ended; the last one counts. No time passes between them, whatever
    /// the task or a failure says of it.
    pub async fn run_to_end(&self, queue: &str, task: NewTask) -> Result<Vec<Ended>, Refusal> {
        let retry = task.task.retry.unwrap_or_default();
        let most = retry.max_attempts.unwrap_or(bounds::DEFAULT_ATTEMPTS.into());
        let mut all = Vec::new();
        for attempt in 1..=most {
            let ended = self.start_attempt(queue, task.clone(), attempt)?.end().await;
            let again = matches!(ended.outcome, Outcome::Failed(Failure::Retry { .. }) | Outcome::Killed);
            all.push(ended);
            if !again {
                break;
            }
        }
        Ok(all)
    }

    /// Starts the first run of a task: to look at it, or to do something to it, while it runs.
    pub fn start(&self, queue: &str, task: NewTask) -> Result<TestRun, Refusal> {
        self.start_attempt(queue, task, 1)
    }

    /// The same for a later run: the handler sees this number as its attempt.
    pub fn start_attempt(&self, queue: &str, task: NewTask, attempt: u32) -> Result<TestRun, Refusal> {
        QueueName::new(queue)?;
        task.check()?;
        let NewTask { task } = task;
        let attempt = convert::parse_attempt("attempt", attempt)?.into();
        let run = (TaskId(1), Fence { epoch: Epoch(1), dispatch: u64::from(attempt), nonce: 0 });
        let mut runner = InProcess::for_tests(self.handlers.clone(), self.grace);
        runner.start(Job {
            run,
            task_id: convert::task_id(ShardId(0), run.0),
            queue: queue.into(),
            key: task.key,
            attempt,
            payload: task.payload,
            files: task.files,
            content_type: task.content_type,
            max_duration_ms: task.max_duration_ms.unwrap_or(0),
            interactive: None,
        });
        Ok(TestRun { runner, run, output: Vec::new(), outcome: None })
    }
}

/// A task that is being run. Dropped, its handler is too.
#[must_use = "its handler is dropped with it; wait for its end"]
pub struct TestRun {
    runner: InProcess,
    run: RunKey,
    output: Vec<String>,
    outcome: Option<Outcome>,
}

impl TestRun {
    /// Cancels the task: the handler is told, and dropped after the grace.
    pub fn cancel(&mut self) {
        self.runner.stop(self.run);
    }

    /// Makes its time be over: the handler is dropped where it waits.
    pub fn expire(&mut self) {
        // The least that there is. Its beginning was at least so long ago, or will have been in a moment.
        self.runner.deadline(self.run, 1);
    }

    /// Ends it as a worker does that has lost its server for too long: the handler is dropped where it waits, and the
    /// task would be run again.
    pub fn kill(&mut self) {
        self.runner.kill_all();
    }

    /// Waits for the next line that the handler says. None: it has ended.
    pub async fn output(&mut self) -> Option<String> {
        if !self.step().await {
            return None;
        }
        self.output.last().cloned()
    }

    /// Waits for the end.
    pub async fn end(mut self) -> Ended {
        while self.step().await {}
        let said = self.runner.board().take();
        let progress = said.into_iter().map(|(_, progress)| progress).collect();
        let output = std::mem::take(&mut self.output);
        Ended { outcome: self.outcome.take().unwrap_or(Outcome::Killed), output, progress }
    }

    /// Waits for the next line. False: it has ended.
    async fn step(&mut self) -> bool {
        while self.outcome.is_none() {
            match self.runner.happenings().recv().await {
                Some(Happening::Output { line, .. }) => {
                    self.output.push(line);
                    return true;
                }
                Some(Happening::Ended { word: None, .. }) => self.outcome = Some(Outcome::Killed),
                Some(Happening::Ended { word: Some(word), .. }) => {
                    let Word { end, result, error, retry_after } = word;
                    self.outcome = Some(match end {
                        End::Succeeded => Outcome::Succeeded(result),
                        End::FailedForGood => Outcome::Failed(Failure::ForGood(error)),
                        End::Failed | End::TimeUp | End::Downgraded => {
                            Outcome::Failed(Failure::Retry { why: error, after: retry_after })
                        }
                        End::Lost => Outcome::Killed,
                    });
                }
                Some(Happening::NotStarted(_) | Happening::Over(_)) | None => {
                    self.outcome = Some(Outcome::Killed);
                }
            }
        }
        false
    }
}

impl std::fmt::Debug for TestRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestRun").field("output", &self.output).finish_non_exhaustive()
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// What became of it.
    pub outcome: Outcome,
    /// The lines that it said.
    pub output: Vec<String>,
    /// What it said of how far it is. A server may be told less: of what comes fast, the last.
    pub progress: Vec<Progress>,
}

/// What became of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded, with this result.
    Succeeded(Bytes),
    /// It failed: it returned a failure, could not read its payload, took too long, stopped with a panic.
    Failed(Failure),
    /// It was killed, and its task would be run again.
    Killed,
}

impl Ended {
    /// The result, if it succeeded.
    pub fn result(&self) -> Option<&Bytes> {
        match &self.outcome {
            Outcome::Succeeded(result) => Some(result),
            Outcome::Failed(_) | Outcome::Killed => None,
        }
    }

    /// The result, read as JSON. A refusal: it did not succeed, or the result is another one.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Refusal> {
        let none = || Refusal::invalid("result", format!("there is none: {:?}", self.outcome));
        serde_json::from_slice(self.result().ok_or_else(none)?)
            .map_err(|error| Refusal::invalid("result", format!("is not what was expected: {error}")))
    }

    /// The failure, if it failed.
    pub fn failure(&self) -> Option<&Failure> {
        match &self.outcome {
            Outcome::Failed(failure) => Some(failure),
            Outcome::Succeeded(_) | Outcome::Killed => None,
        }
    }
}
