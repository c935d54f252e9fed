//! Deliberate bugs. Each is a mistake that somebody's system really made; the simulator must catch every
//! one of them, or it would not have caught the real thing. Without the `canary` feature `is` is
//! constantly false and the compiler removes the bug.

/// The bug that is switched on, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Canary(#[cfg(feature = "canary")] Option<Bug>);

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Each deliberate bug of the core.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Bug { $($(#[$doc])* #[doc = $text] $name,)* }

        #[cfg(feature = "canary")]
        impl Bug {
            /// All of them.
            pub const ALL: &'static [Bug] = &[$(Bug::$name,)*];

            /// What is wrong, in a few words.
            pub fn text(self) -> &'static str {
                match self { $(Bug::$name => $text,)* }
            }
        }
    };
}

bugs! {
    AckNotPinned = "A not pinned during a write",
    MergeWithoutEnd = "write merged above R without the end known",
    LoadBeforeCommit = "load running ahead of its commit",
    TimeFromAck = "V taken from the ack level",
    TimeHeldByNewKeys = "V held still by a stream of new keys",
    TimePassesWaiting = "V running past a key that waits",
    PassBelowAck = "pass not raised to A of its lane",
    ChargesNotRestored = "charges not restored after a restart",
    ReadAboveDropped = "R left above a dropped row",
    RunningForgotten = "running row forgotten when the window shrinks",
    PageOverwrites = "read page that overwrites what settled meanwhile",
    ReplyBeforeCommit = "reply before commit",
    HeldWriteLost = "write dropped that came while a read was pending",
    RetryUncharged = "retry not charged to its key",
    AsideForgotten = "long runner forgotten after a restart",
    PriorityByArrival = "lower priority served while a higher one is unread",
    AckBeforeCommit = "finish acknowledged before its commit",
    LeaseFromAnswer = "lease counted from the answer instead of the send",
    StartAfterLease = "buffered run started after the lease",
    WorkBeforeJoinSaved = "work given to a worker before its join is saved",
    AnswerBeforeWaitSaved = "lease granted before the wait for it is saved",
    GateIgnoresAbsent = "gate opened while a saved worker has not been heard",
    MarkKept = "mark of a good stop used twice",
    OldSessionObeyed = "worker obeying an older session",
    EndCountedTwice = "end of a run accepted twice",
    AttemptCountedTwice = "attempt counted twice",
    RetryLost = "retry lost on a crash",
    RetryBehindBacklog = "retry behind its key's backlog",
    CancelLost = "cancel of a running task lost on a crash",
    SegmentDropped = "segment dropped with a task in it",
    ParkedCredit = "a paused key coming back with credit",
    TimeNotCounted = "a run's real time not counted where time is shared",
    PlacedAtOnce = "a backlog that shares time placed all at once",
    CreditNotGiven = "a run's time that was charged and not taken not given back",
    NewWorkerNotRequired = "a new worker given work before the others require it",
    SetToldWhileShut = "worker sets told while the gate is shut",
    UnhealthyNotAsked = "silent workers not asked whether they require a new one",
    FenceRepeats = "fences that come again after the store was set back",
    DoubtIgnored = "an old copy of the store taken for the newest",
    DoubtForgotten = "doubt about the store forgotten on a crash",
    AgreeOnSome = "gate opened by a part of the workers",
    AgreeOnNewSet = "gate opened by echoes of the new owner's set",
    AbsenceForgotten = "absence forgotten after a crash",
    LoweredAtOnce = "lowered thresholds counted before the worker knows them",
    OneWayNeverLost = "a worker that hears nothing never lost",
    OldHelloHeard = "an older session of a worker let in",
    SavedSetOverwritten = "saved set overwritten while the gate is shut",
    RequiredForgotten = "a worker that had work asked for again when it was silent",
    ParkedForgotten = "parked tasks forgotten on a crash",
    ClassLimitIgnored = "a task started though its class was full",
    DowngradeNotTold = "a downgraded run not told its new time",
    ClassesShareTime = "a newcomer to a full class placed by the time of another class",
    KeyLimitIgnored = "a key's limit not looked at",
    RateFullAfterRestart = "a rate's bucket full after a restart",
    HaltNotTold = "a halted run whose client is never told",
    InteractiveWaits = "an interactive request that waits for a commit",
    ClassBlocksShorter = "a class that is full blocking a shorter one",
    ClassFreedUnseen = "a class that has room again not looked at",
    RateAlarmKept = "the alarm of a slow rate kept when the rate was raised",
    RoomNotMade = "a run that could make room not looked at when it begins",
    LongHidesShort = "a task that needs another class than its lane's hiding those behind it",
    UniqueForgotten = "unique key forgotten on a crash",
}

impl Canary {
    /// Switches one bug on.
    #[cfg(feature = "canary")]
    pub fn new(bug: Bug) -> Self {
        Canary(Some(bug))
    }

    /// This bug is switched on.
    #[cfg(feature = "canary")]
    pub fn is(self, bug: Bug) -> bool {
        self.0 == Some(bug)
    }

    /// This bug is switched on.
    #[cfg(not(feature = "canary"))]
    #[inline(always)]
    pub fn is(self, _bug: Bug) -> bool {
        false
    }
}
