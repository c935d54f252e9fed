//! What an error is called on each surface. One row for each kind; whoever reads an error on one surface finds
//! the same kind on the others.

use evenhand_core::Refusal;
use evenhand_core::refusal::Kind;
use prost::Message;
use tonic::{Code, Status};

use crate::v1;

/// A kind of error on all surfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The kind.
    pub kind: Kind,
    /// The code of gRPC.
    pub code: Code,
    /// The status of HTTP.
    pub http: u16,
    /// What the command line exits with.
    pub exit: u8,
}

/// Every kind.
pub const TABLE: [Row; 7] = [
    Row { kind: Kind::Invalid, code: Code::InvalidArgument, http: 400, exit: 2 },
    Row { kind: Kind::NotFound, code: Code::NotFound, http: 404, exit: 3 },
    Row { kind: Kind::Conflict, code: Code::FailedPrecondition, http: 409, exit: 4 },
    Row { kind: Kind::TooLarge, code: Code::OutOfRange, http: 413, exit: 2 },
    Row { kind: Kind::Limited, code: Code::ResourceExhausted, http: 429, exit: 5 },
    Row { kind: Kind::Unavailable, code: Code::Unavailable, http: 503, exit: 6 },
    Row { kind: Kind::Internal, code: Code::Internal, http: 500, exit: 1 },
];

/// The row of a kind.
pub fn row(kind: Kind) -> Row {
    TABLE.into_iter().find(|row| row.kind == kind).unwrap_or(TABLE[6])
}

/// A refusal as protobuf.
pub fn error(refusal: &Refusal) -> v1::Error {
    v1::Error {
        kind: refusal.kind.name().into(),
        message: refusal.message.clone(),
        field: refusal.field.clone(),
        retry_after_ms: refusal.retry_after_ms,
    }
}

/// A refusal as gRPC says it: code and text for everybody, the rest in the details.
pub fn status(refusal: &Refusal) -> Status {
    let details = error(refusal).encode_to_vec();
    let text = match refusal.field.as_str() {
        "" => refusal.message.clone(),
        field => format!("{field}: {}", refusal.message),
    };
    Status::with_details(row(refusal.kind).code, text, details.into())
}

/// What gRPC said, as the refusal it was; or the nearest there is, if it was not ours.
pub fn refusal(status: &Status) -> Refusal {
    let ours = v1::Error::decode(status.details()).ok();
    let kind = |name: &str| TABLE.iter().find(|row| row.kind.name() == name).map(|row| row.kind);
    if let Some(error) = ours
        && let Some(kind) = kind(&error.kind)
    {
        let refusal = Refusal::new(kind, error.field, error.message);
        return Refusal { retry_after_ms: error.retry_after_ms, ..refusal };
    }
    let passing = [Code::Cancelled, Code::DeadlineExceeded, Code::Unknown, Code::Aborted];
    let kind = if passing.contains(&status.code()) {
        Kind::Unavailable
    } else {
        TABLE.iter().find(|row| row.code == status.code()).map_or(Kind::Internal, |row| row.kind)
    };
    Refusal::new(kind, "", status.message())
}

/// A protobuf error as the refusal it was.
pub fn refusal_of(error: &v1::Error) -> Refusal {
    let kind = TABLE.iter().find(|row| row.kind.name() == error.kind).map_or(Kind::Internal, |row| row.kind);
    let refusal = Refusal::new(kind, error.field.clone(), error.message.clone());
    Refusal { retry_after_ms: error.retry_after_ms, ..refusal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_the_same_on_the_way_back() {
        for row in TABLE {
            let there = Refusal::new(row.kind, "tasks[3].weight", "must be positive").after(70);
            assert_eq!(refusal(&status(&there)), there);
            assert_eq!(refusal_of(&error(&there)), there);
            assert_eq!(status(&there).code(), row.code);
        }
    }

    #[test]
    fn no_two_kinds_share_a_code() {
        let mut codes: Vec<i32> = TABLE.iter().map(|row| row.code as i32).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), TABLE.len());
    }

    #[test]
    fn errors_that_are_not_ours_have_a_kind_too() {
        assert_eq!(refusal(&Status::unavailable("gone")).kind, Kind::Unavailable);
        assert_eq!(refusal(&Status::unimplemented("what")).kind, Kind::Internal);
        let garbage = Status::with_details(Code::NotFound, "x", vec![0xff; 9].into());
        assert_eq!(refusal(&garbage).kind, Kind::NotFound);
    }
}
