//! The decoders of what is on disk, for the fuzzer: what a checksum lets through must still not be able to make
//! the server panic. Nobody else should use this.

use std::sync::Arc;

use evenhand_core::Metadata;

use super::bytes::Get;
use super::layout::{self, Kind, RowKey, TaskKey};
use super::table::{TableKey, read_entry, read_index};
use super::{Batch, log};

/// The payload of a frame of the log: rows, tasks and records, of whatever bytes.
pub fn batch(bytes: &[u8]) {
    let get = &mut Get::new(bytes);
    let (mut metadata, mut aside) = (Metadata::default(), Vec::new());
    while let Some(op) = layout::next_op(get) {
        let value = op.value.map(|(start, end)| &bytes[start..end]).unwrap_or_default();
        match op.kind {
            Kind::Rows => drop(RowKey::from_bytes(op.key).and_then(|key| layout::row(&key, value))),
            Kind::Tasks => {
                let Some(key) = TaskKey::from_bytes(op.key) else { continue };
                let Some(task) = layout::task(&key, value) else { continue };
                // What can be read can be written, and is the same.
                let mut again = Vec::new();
                layout::put_task(&mut again, &task);
                assert_eq!(layout::task(&key, &again).as_ref(), Some(&task));
            }
            Kind::Records => {
                let _ = layout::tell(&mut metadata, &mut aside, op.key, value);
                let _ = (layout::moved(value), layout::epoch(value), layout::ack(value));
                let _ = (layout::lane_of_record(op.key), layout::shard_of(op.key));
            }
        }
    }
}

/// The index and a block of a table.
pub fn table(bytes: &[u8]) {
    let count = bytes.first().copied().unwrap_or_default().into();
    let rest = bytes.get(1..).unwrap_or_default();
    drop(read_index::<RowKey>(rest, count));
    drop(read_index::<Box<[u8]>>(rest, count));
    let block = Arc::new(rest.to_vec());
    let (mut at, mut last) = (0, Vec::new());
    while let Some((_, _, next)) = read_entry::<Box<[u8]>>(&block, at, &mut last) {
        assert!(next > at);
        at = next;
    }
}

/// A segment of the log: its head, and frames at any place.
pub fn segment(bytes: &[u8]) {
    let _ = log::segment_head(bytes, 1);
    for at in (0..bytes.len()).step_by(8) {
        if let Ok(end) = log::frame_at(bytes, at, 7, 1) {
            batch(&bytes[at + Batch::new().bytes.len()..end]);
        }
    }
}
