//! The wire: protobuf types and services, generated from `proto/`, and how they become the core's types.
//! Nothing behind the edge knows them.

/// Generated from `proto/evenhand/v1`.
#[expect(
    missing_docs,
    clippy::allow_attributes_without_reason,
    reason = "generated; the comments are in the proto files"
)]
pub mod v1 {
    tonic::include_proto!("evenhand.v1");
}
