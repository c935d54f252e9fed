//! What PostgreSQL says when something is wrong, as what an owner has to do about it.

use evenhand_core::names::Epoch;
use tokio_postgres::error::SqlState;

use crate::StoreError;

/// Raised by `fence`: another owner has taken the shard. The detail is the shard's epoch.
const FENCED: &str = "EH001";

/// Why a store could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The address cannot be understood, or asks for what there is not.
    #[error("the address of the PostgreSQL store is wrong: {what}")]
    Address {
        /// Where, and what is wrong.
        what: String,
    },
    /// The server cannot be reached, or does not let us in.
    #[error("PostgreSQL cannot be used: {what}")]
    Unreachable {
        /// What was tried.
        what: String,
    },
    /// The database holds texts in another encoding.
    #[error("the database's encoding is {encoding}; create one with ENCODING 'UTF8'")]
    Encoding {
        /// Which.
        encoding: String,
    },
    /// A newer program has been here.
    #[error(
        "schema {schema} has version {found}, and this program knows versions up to {known}; use a newer one"
    )]
    Newer {
        /// The schema.
        schema: String,
        /// Its version.
        found: usize,
        /// The newest that is known.
        known: usize,
    },
    /// The tables could not be made.
    #[error("the schema of the PostgreSQL store could not be brought up to date: {what}")]
    Schema {
        /// What went wrong.
        what: String,
    },
}

/// What an error says, with what is behind it.
pub(super) fn told(error: &tokio_postgres::Error) -> String {
    let Some(db) = error.as_db_error() else {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(error) = source {
            text = format!("{text}: {error}");
            source = error.source();
        }
        return text;
    };
    let more = |what: Option<&str>| what.map_or(String::new(), |what| format!(" ({what})"));
    format!("{}: {}{}{}", db.code().code(), db.message(), more(db.detail()), more(db.hint()))
}

/// What an error of an operation means.
pub(super) fn meaning(what: &str, epoch: Option<Epoch>, error: &tokio_postgres::Error) -> StoreError {
    let said = format!("{what}: {}", told(error));
    let (Some(db), Some(state)) = (error.as_db_error(), error.code()) else {
        return match std::error::Error::source(error) {
            // An answer that we do not understand; everything else is the connection.
            Some(source) if source.is::<tokio_postgres::types::WrongType>() => corrupt(said),
            Some(_) | None => unavailable(said),
        };
    };
    if state.code() == FENCED {
        let current = db.detail().and_then(|detail| detail.parse::<i64>().ok());
        return match (epoch, current) {
            (Some(epoch), Some(current)) => StoreError::Fenced { epoch, current: Epoch(current as u64) },
            _ => unavailable(said),
        };
    }
    match state {
        // Too many connections, or too little memory, pass by themselves; a full disk does not.
        &SqlState::DISK_FULL | &SqlState::CONFIGURATION_LIMIT_EXCEEDED => StoreError::Full { what: said },
        &SqlState::INSUFFICIENT_PRIVILEGE => unavailable(said),
        state => match state.code().get(..2) {
            // Wrong data, a broken constraint, a table or function that is not there, a damaged page or index.
            Some("22" | "23" | "42" | "3F") => corrupt(said),
            Some("XX") if matches!(state.code(), "XX001" | "XX002") => corrupt(said),
            _ => unavailable(said),
        },
    }
}

pub(super) fn unavailable(what: String) -> StoreError {
    StoreError::Unavailable { what }
}

pub(super) fn corrupt(what: String) -> StoreError {
    StoreError::Corrupt { what }
}
