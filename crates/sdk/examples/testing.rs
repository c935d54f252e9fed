//! Handlers that are tested without a server. Look at the tests below; they are run by
//!
//! ```text
//! cargo test -p evenhand --example testing
//! ```

use evenhand::{Failure, Handlers, Run, Worker, WorkerError};

/// What the worker serves, apart from the worker: so that tests can have it too.
fn handlers() -> Handlers {
    Handlers::new().handle("halve", halve).handle("wait", wait)
}

async fn halve(number: u32, run: Run) -> Result<u32, Failure> {
    run.progress(0.5, "thinking");
    if run.attempt() == 1 && number == 4 {
        return Err(Failure::retry("not at once"));
    }
    if number % 2 == 1 {
        return Err(Failure::for_good("it is odd"));
    }
    run.output(format!("{number} for {}", run.key()));
    Ok(number / 2)
}

async fn wait((): (), run: Run) -> Result<(), Failure> {
    run.output("waiting");
    run.canceled().await;
    Err(Failure::retry("canceled"))
}

#[tokio::main]
async fn main() -> Result<(), WorkerError> {
    Worker::new(&evenhand::server()).handlers(handlers()).drain_on_signals().run().await
}

#[cfg(test)]
mod tests {
    use evenhand::testing::{Outcome, TestWorker};
    use evenhand::{NewTask, Refusal};

    use super::*;

    #[tokio::test]
    async fn an_even_number_is_halved() -> Result<(), Refusal> {
        let ended = TestWorker::new(handlers()).run("halve", NewTask::json(&10)?.key("acme")).await?;
        assert_eq!(ended.json::<u32>()?, 5);
        assert_eq!(ended.output, ["10 for acme"]);
        assert_eq!(ended.progress[0].message, "thinking");
        Ok(())
    }

    #[tokio::test]
    async fn an_odd_number_fails_for_good() -> Result<(), Refusal> {
        let ended = TestWorker::new(handlers()).run("halve", NewTask::json(&3)?).await?;
        assert_eq!(ended.failure(), Some(&Failure::for_good("it is odd")));
        Ok(())
    }

    #[tokio::test]
    async fn a_later_attempt_succeeds() -> Result<(), Refusal> {
        let runs = TestWorker::new(handlers()).run_to_end("halve", NewTask::json(&4)?).await?;
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[1].json::<u32>()?, 2);
        Ok(())
    }

    #[tokio::test]
    async fn a_canceled_task_ends() -> Result<(), Refusal> {
        let mut run = TestWorker::new(handlers()).start("wait", NewTask::default())?;
        assert_eq!(run.output().await.as_deref(), Some("waiting"));
        run.cancel();
        assert_eq!(run.end().await.failure(), Some(&Failure::retry("canceled")));
        Ok(())
    }

    #[tokio::test]
    async fn a_task_that_takes_too_long_is_dropped() -> Result<(), Refusal> {
        let mut run = TestWorker::new(handlers()).start("wait", NewTask::default())?;
        run.expire();
        assert!(matches!(run.end().await.outcome, Outcome::Failed(Failure::Retry { .. })));
        Ok(())
    }
}
