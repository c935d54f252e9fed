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
}

impl Kind {
    /// The kind's name, the same on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Invalid => "invalid",
            Kind::TooLarge => "too_large",
            Kind::Limited => "limited",
            Kind::NotFound => "not_found",
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
}

impl Refusal {
    /// A request that must be corrected.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Refusal { kind: Kind::Invalid, field: field.into(), message: message.into() }
    }

    /// A request that is larger than a bound.
    pub fn too_large(field: impl Into<String>, message: impl Into<String>) -> Self {
        Refusal { kind: Kind::TooLarge, field: field.into(), message: message.into() }
    }

    /// A request that may succeed later.
    pub fn limited(message: impl Into<String>) -> Self {
        Refusal { kind: Kind::Limited, field: String::new(), message: message.into() }
    }

    /// Something that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Refusal { kind: Kind::NotFound, field: String::new(), message: message.into() }
    }

    /// The same refusal, seen from one level further out: `weight` in `tasks[3]` is `tasks[3].weight`.
    pub(crate) fn within(mut self, outer: impl fmt::Display) -> Self {
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
