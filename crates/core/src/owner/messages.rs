//! What an owner hears from its server and what it wants done. A worker says hello, and is heard from then
//! on by its session; what is about tasks alone goes straight to the shard.

use super::health::Thresholds;
use crate::backlog::Weight;
use crate::life::{End, Ending};
use crate::messages::{self, Run};
use crate::names::{
    Epoch, Fence, Incarnation, Life, QueueName, Seat, SessionId, StoreId, TaskId, WorkerId, WorkerSetId,
};
use crate::refusal::Refusal;

/// How a worker begins a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// Its seat.
    pub seat: Seat,
    /// Bound to its machine.
    pub token: u64,
    /// Its life.
    pub life: Life,
    /// Its sessions in this life, counted: this one.
    pub session: u64,
    /// The slots it offers.
    pub slots: u32,
    /// The queues it serves, with the share of its slots that each gets.
    pub queues: Vec<(QueueName, Weight)>,
    /// The store that it last worked for.
    pub store: Option<StoreId>,
    /// The last owner it has obeyed: none before it had a higher epoch.
    pub obeyed: Incarnation,
    /// The last worker set that it was told, unless its lease has been over since.
    pub set: Option<WorkerSetId>,
    /// All that it runs.
    pub running: Vec<Run>,
    /// All that ended and was not acknowledged.
    pub ended: Vec<(Run, End)>,
}

/// A numbered sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Counted within the session, from 1.
    pub number: u64,
    /// The last answer that has arrived; 0 is the welcome.
    pub answered: u64,
    /// The last worker set that it was told.
    pub set: Option<WorkerSetId>,
}

/// A fact that an owner learns.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Something about tasks or the store.
    Shard(messages::Input),
    /// A worker begins a session.
    Hello {
        /// Its connection.
        session: SessionId,
        /// What it says.
        hello: Hello,
        /// What the runs left behind that it says have ended, in order; nothing where this is shorter.
        endings: Vec<Ending>,
    },
    /// A worker is alive.
    Beat {
        /// Its connection.
        session: SessionId,
        /// What it says.
        beat: Beat,
    },
    /// A worker offers another number of slots.
    Offer {
        /// Its connection.
        session: SessionId,
        /// All its slots; none while it drains.
        slots: u32,
    },
    /// A run ended.
    Ended {
        /// The connection of its worker.
        session: SessionId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
        /// Which try it was.
        attempt: u16,
        /// How it ended.
        end: End,
        /// What it left behind.
        ending: Ending,
    },
    /// A worker did not start a run, and never will.
    Refused {
        /// Its connection.
        session: SessionId,
        /// The task.
        task: TaskId,
        /// The run.
        fence: Fence,
    },
    /// A connection is closed.
    Closed {
        /// Which.
        session: SessionId,
    },
    /// A guardian says that this process life of a seat is over, and all its processes are gone.
    Dead {
        /// The seat.
        seat: Seat,
        /// Bound to its machine.
        token: u64,
        /// The process life.
        process: u64,
        /// It drained: all its ends have been acknowledged, and what else it is thought to run, it never started.
        drained: bool,
    },
    /// Somebody wants a worker to take no more work, and to end when what it runs has ended.
    Drain {
        /// Its seat.
        seat: Seat,
    },
    /// Somebody who takes the risk says that a worker is dead, with all that it ran.
    GiveUp {
        /// Its seat.
        seat: Seat,
    },
    /// Somebody who takes the risk wants the start gate open: whoever has not come counts as dead.
    OpenGate,
    /// The server wants to stop in good order.
    Stop,
    /// Time has passed.
    Tick,
}

/// Something the server must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// What the shard wants done. Workers are reached in the session of their latest welcome.
    Shard(messages::Effect),
    /// Let a worker in; from now on it is this one.
    Welcome {
        /// Its connection.
        session: SessionId,
        /// Who it is.
        worker: WorkerId,
        /// The store it works for.
        store: StoreId,
        /// The owner's nonce.
        nonce: u64,
        /// What counts for it.
        thresholds: Thresholds,
        /// The worker set, if it may be told.
        set: Option<WorkerSetId>,
    },
    /// End a session.
    Refuse {
        /// Its connection.
        session: SessionId,
        /// Why.
        refusal: Refusal,
        /// What the worker should do.
        then: Then,
    },
    /// Answer a heartbeat.
    Answer {
        /// The connection.
        session: SessionId,
        /// Of the heartbeat.
        number: u64,
        /// The worker set, if it may be told.
        set: Option<WorkerSetId>,
    },
    /// Tell a worker that its lease is so much longer, because the server stops in good order.
    Absence {
        /// The connection.
        session: SessionId,
        /// How much longer, in milliseconds.
        ms: u64,
    },
    /// Tell a worker to drain.
    Drain {
        /// The connection.
        session: SessionId,
    },
    /// A worker has obeyed an owner of this epoch, of which the store knows nothing. If the store still is this owner's, it
    /// has been set back: take it anew, above that epoch and in doubt.
    Doubt {
        /// The epoch.
        shown: Epoch,
    },
    /// All is saved: the server may end.
    Stopped,
    /// For the log, and for those who watch.
    Note(Note),
}

/// What a worker does when its session is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Say hello again, after a while.
    Retry,
    /// End: it has no place here.
    Exit,
    /// End all runs, forget the store it worked for, and say hello anew.
    Forget,
}

/// Something worth telling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A worker is counted on.
    Joined {
        /// Its seat.
        seat: Seat,
        /// Its life.
        life: Life,
    },
    /// A worker is no longer counted on.
    Lost {
        /// Its seat.
        seat: Seat,
        /// Its life.
        life: Life,
        /// Runs that were its.
        runs: usize,
        /// Why.
        why: &'static str,
    },
    /// A worker gets work, or gets none any more.
    Health {
        /// Its seat.
        seat: Seat,
        /// It gets work.
        healthy: bool,
    },
    /// Tasks may start.
    GateOpened,
}
