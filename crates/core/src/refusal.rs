//! What a caller is told when the shard says no. Few kinds, each saying what to do; the message is for
//! people and names the field that was wrong. A refused input changes nothing.

use std::fmt;

/// What the caller should do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Correct the request; sending it again as it is cannot succeed.
    Invalid,
    /// Send less.
    TooLarge,
    /// Send the same again later.
    Limited,
    /// There is no such thing (any more).
    NotFound,
    /// It contradicts what is there.
    Conflict,
    /// The server cannot do it now; send it again, here or elsewhere.
    Unavailable,
    /// A mistake of ours.
    Internal,
}

impl Kind {
    /// The kind's name, the same on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Invalid => "invalid",
            Kind::TooLarge => "too_large",
            Kind::Limited => "limited",
            Kind::NotFound => "not_found",
            Kind::Conflict => "conflict",
            Kind::Unavailable => "unavailable",
            Kind::Internal => "internal",
        }
    }

    /// What it means, and what to do.
    pub fn advice(self) -> &'static str {
        match self {
            Kind::Invalid => "The request is wrong: correct it",
            Kind::TooLarge => "The request is too large: send less",
            Kind::Limited => "Too much at once: send the same again later",
            Kind::NotFound => "There is no such thing (any more)",
            Kind::Conflict => "It contradicts what is there",
            Kind::Unavailable => "The server cannot do it now: send it again, here or elsewhere",
            Kind::Internal => "A mistake of ours",
        }
    }
}

/// A clear no.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What to do about it.
    pub kind: Kind,
    /// The field that was wrong, as the caller wrote it (`tasks[3].weight`); empty if none.
    pub field: String,
    /// A sentence for people.
    pub message: String,
    /// After how long it is worth sending again, if it is, in milliseconds.
    pub retry_after_ms: Option<u64>,
}

/// A wait for something that passes in moments: a full mailbox, a store that is behind.
const MOMENT_MS: u64 = 50;

impl Refusal {
    /// A no of this kind.
    pub fn new(kind: Kind, field: impl Into<String>, message: impl Into<String>) -> Self {
        Refusal { kind, field: field.into(), message: message.into(), retry_after_ms: None }
    }

    /// The same, worth sending again after so many milliseconds.
    pub fn after(self, ms: u64) -> Self {
        Refusal { retry_after_ms: Some(ms), ..self }
    }

    /// A request that must be corrected.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Refusal::new(Kind::Invalid, field, message)
    }

    /// A request that is larger than a bound.
    pub fn too_large(field: impl Into<String>, message: impl Into<String>) -> Self {
        Refusal::new(Kind::TooLarge, field, message)
    }

    /// A request that may succeed later.
    pub fn limited(message: impl Into<String>) -> Self {
        Refusal::new(Kind::Limited, "", message).after(MOMENT_MS)
    }

    /// Something that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Refusal::new(Kind::NotFound, "", message)
    }

    /// The same refusal, seen from one level further out: `weight` in `tasks[3]` is `tasks[3].weight`.
    pub fn within(mut self, outer: impl fmt::Display) -> Self {
        self.field =
            if self.field.is_empty() { outer.to_string() } else { format!("{outer}.{}", self.field) };
        self
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            write!(f, "{}: {}", self.kind.name(), self.message)
        } else {
            write!(f, "{}: {}: {}", self.kind.name(), self.field, self.message)
        }
    }
}

impl std::error::Error for Refusal {}
