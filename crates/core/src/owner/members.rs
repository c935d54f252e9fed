//! The workers that a shard counts on, by seat, and who may take a seat.

use super::health::Health;
use super::messages::{Hello, Then};
use crate::backlog::Weight;
use crate::change::MemberRecord;
use crate::names::{Fence, Life, Millis, QueueName, SessionId, TaskId, WorkerId, WorkerSetId};
use crate::refusal::{Kind, Refusal};

/// A worker that the shard counts on.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) worker: WorkerId,
    pub(super) token: u64,
    pub(super) life: Life,
    /// As the worker counts its sessions: older ones are over.
    pub(super) numbered: u64,
    /// Its connection, if it has one.
    pub(super) session: Option<SessionId>,
    pub(super) slots: u32,
    pub(super) queues: Vec<(QueueName, Weight)>,
    /// None until this owner has heard it: what it runs is not known.
    pub(super) health: Option<Health>,
    /// When it was last heard and answered; while it is absent, when waiting for it began.
    pub(super) heard: Millis,
    /// When it last showed that an answer has reached it.
    pub(super) acknowledged: Millis,
    pub(super) answered: u64,
    /// After so much silence it cannot be alive any more.
    pub(super) wait_ms: u64,
    /// What the store has as that, or is about to have.
    pub(super) saved_wait_ms: u64,
    /// Its welcome waits for the commit of its record.
    pub(super) unsaved: bool,
    /// It has heard from this owner: what earlier ones granted it no longer counts.
    pub(super) confirmed: bool,
    /// It has had work.
    pub(super) worked: bool,
    /// It was asked to take no more work.
    pub(super) draining: bool,
    /// What the shard was last told that it offers.
    pub(super) offered: u32,
    /// The worker set that it knew when this owner first heard it, or that an earlier owner saved of it.
    pub(super) first_set: Option<WorkerSetId>,
    /// All others have required it, so it may have work. That is not asked again.
    pub(super) required: bool,
    /// Runs it named in its hello that it shall stop, as soon as it is welcome.
    pub(super) stop: Vec<(TaskId, Fence)>,
}

/// What becomes of a hello, given who has the seat.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Claim {
    /// The seat is free.
    Join,
    /// The same life again, in a new session.
    Resume,
    /// A later life: the one that has the seat is dead.
    Replace,
    /// No.
    Refuse(Refusal, Then),
}

impl Member {
    /// A worker that an earlier owner saved. It has not been heard.
    pub(super) fn saved(worker: WorkerId, record: &MemberRecord, now: Millis) -> Member {
        Member {
            worker,
            token: record.token,
            life: record.life,
            numbered: 0,
            session: None,
            slots: 0,
            queues: Vec::new(),
            health: None,
            heard: now,
            acknowledged: now,
            answered: 0,
            wait_ms: record.wait_ms,
            saved_wait_ms: record.wait_ms,
            unsaved: false,
            confirmed: false,
            worked: false,
            draining: false,
            offered: 0,
            first_set: record.set,
            required: false,
            stop: Vec::new(),
        }
    }

    pub(super) fn is_absent(&self) -> bool {
        self.health.is_none()
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.health == Some(Health::Healthy)
    }

    /// It is connected, and has not been silent for long: what it is told it hears.
    pub(super) fn is_heard(&self) -> bool {
        self.session.is_some() && matches!(self.health, Some(Health::New | Health::Healthy))
    }

    /// It may be given work now.
    pub(super) fn is_usable(&self) -> bool {
        self.session.is_some() && !self.unsaved && self.required && self.is_healthy() && !self.draining
    }

    /// How long it is still waited for if it stays silent.
    pub(super) fn wait_left(&self, now: Millis) -> u64 {
        self.wait_ms.saturating_sub(now.0.saturating_sub(self.heard.0))
    }

    /// Who may have the seat that this one has.
    pub(super) fn claim(&self, hello: &Hello, now: Millis) -> Claim {
        let seat = &hello.seat;
        if hello.token != self.token {
            let left = self.wait_left(now).div_ceil(1000);
            let (message, then) = if self.is_healthy() {
                (
                    format!("{seat} is taken by a healthy worker on another machine; choose another"),
                    Then::Exit,
                )
            } else {
                let what = "is held by a worker on another machine that is silent but may be alive";
                (format!("{seat} {what}; it is free in {left} s, if that one stays silent"), Then::Retry)
            };
            let refusal = Refusal::new(Kind::Conflict, "seat", message);
            return Claim::Refuse(refusal.after(self.wait_left(now)), then);
        }
        if hello.life > self.life {
            return Claim::Replace;
        }
        if hello.life < self.life {
            let message = format!("{seat} has been taken over by a later life of it: {}", self.life);
            return Claim::Refuse(Refusal::new(Kind::Conflict, "seat", message), Then::Exit);
        }
        if hello.session <= self.numbered {
            let message = format!("session {} of {seat} is older than its newest", hello.session);
            return Claim::Refuse(Refusal::new(Kind::Conflict, "session", message), Then::Retry);
        }
        Claim::Resume
    }
}
