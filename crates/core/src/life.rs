//! What becomes of a task when a run of it ends. Timers, backoff and the full transition table belong here
//! when they come; a retry waits for nothing but its place until then.

/// How a run ended, as its worker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It did what was asked.
    Succeeded,
    /// It failed; another try may help.
    Failed,
    /// It failed, and another try would fail too.
    FailedForGood,
    /// Its worker is gone. Costs an attempt: nobody knows how far it came.
    Lost,
}

/// How a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// A run of it succeeded.
    Succeeded,
    /// It failed for good, or its attempts are used up.
    Failed,
    /// It was canceled.
    Canceled,
}

/// What comes after the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Retry,
    Finish(Outcome),
}

/// Decides what comes after a run. Success that arrives after a cancel stays success; any other end
/// after a cancel is canceled, not retried.
pub(crate) fn after(end: End, attempt: u16, max_attempts: u16, cancel: bool) -> Next {
    match (end, cancel) {
        (End::Succeeded, _) => Next::Finish(Outcome::Succeeded),
        (End::Failed | End::FailedForGood | End::Lost, true) => Next::Finish(Outcome::Canceled),
        (End::FailedForGood, false) => Next::Finish(Outcome::Failed),
        (End::Failed | End::Lost, false) if attempt < max_attempts => Next::Retry,
        (End::Failed | End::Lost, false) => Next::Finish(Outcome::Failed),
    }
}
