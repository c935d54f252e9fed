//! Deliberate bugs. Each is a mistake that somebody's system really made; the simulator must catch every
//! one of them, or it would not have caught the real thing. Without the `canary` feature `is` is
//! constantly false and the compiler removes the bug.

/// The bug that is switched on, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Canary(#[cfg(feature = "canary")] Option<Bug>);

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Each deliberate bug of the core.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    EndCountedTwice = "end of a run accepted twice",
}

impl Canary {
    /// Switches one bug on.
    #[cfg(feature = "canary")]
    pub fn new(bug: Bug) -> Self {
        Canary(Some(bug))
    }

    #[cfg(feature = "canary")]
    pub(crate) fn is(self, bug: Bug) -> bool {
        self.0 == Some(bug)
    }

    #[cfg(not(feature = "canary"))]
    #[inline(always)]
    pub(crate) fn is(self, _bug: Bug) -> bool {
        false
    }
}
