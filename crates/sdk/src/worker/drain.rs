//! When a worker is to stop: in good order, or at once.

use evenhand_core::Refusal;
use evenhand_core::refusal::Kind;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// What a worker was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Take no more work.
    Drain,
    /// End at once.
    Quit,
}

/// Hears it.
#[derive(Debug)]
pub(super) struct Drain {
    asked: Option<watch::Receiver<bool>>,
    signals: Option<(Signal, Signal)>,
    signaled: bool,
}

impl Drain {
    /// By somebody who sets this to true, and by signals.
    pub(super) fn new(asked: Option<watch::Receiver<bool>>, on_signals: bool) -> Result<Drain, Refusal> {
        let both = || Ok((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?));
        let failed = |error: std::io::Error| {
            Refusal::new(Kind::Internal, "", format!("signals cannot be heard: {error}"))
        };
        let signals = on_signals.then(both).transpose().map_err(failed)?;
        Ok(Drain { asked, signals, signaled: false })
    }

    /// What it is told next. Waiting may be given up and taken up again.
    pub(super) async fn next(&mut self) -> Told {
        tokio::select! {
            () = asked(&mut self.asked) => Told::Drain,
            () = signaled(&mut self.signals) => match std::mem::replace(&mut self.signaled, true) {
                false => Told::Drain,
                true => Told::Quit,
            },
        }
    }
}

/// Waits until somebody asks; once.
async fn asked(drain: &mut Option<watch::Receiver<bool>>) {
    let Some(receiver) = drain else { return std::future::pending().await };
    let asked = receiver.wait_for(|drain| *drain).await.is_ok();
    *drain = None;
    if !asked {
        std::future::pending::<()>().await;
    }
}

async fn signaled(signals: &mut Option<(Signal, Signal)>) {
    let Some((terminate, interrupt)) = signals else { return std::future::pending().await };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
