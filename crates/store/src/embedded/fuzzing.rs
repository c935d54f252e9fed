//! The decoders of what is on disk, for the fuzzer: what a checksum lets through must still not be able to make
//! the server panic. Nobody else should use this.

use std::fmt::Debug;
use std::sync::Arc;

use evenhand_core::Metadata;

use super::bytes::Get;
use super::layout::{self, Kind, RowKey, TaskKey};
use super::table::{TableKey, read_entry, read_index};
use super::witness::Saved;
use super::{Batch, log, witness};
use crate::values;

/// The payload of a frame of the log: rows, tasks and records, of whatever bytes.
pub fn batch(bytes: &[u8]) {
    let get = &mut Get::new(bytes);
    let (mut metadata, mut aside) = (Metadata::default(), Vec::new());
    while let Some(op) = layout::next_op(get) {
        let value = op.value.map(|(start, end)| &bytes[start..end]).unwrap_or_default();
        match op.kind {
            Kind::Rows => {
                let Some(key) = RowKey::from_bytes(op.key) else { continue };
                let at = layout::level_of(&key);
                if let Some(row) = values::row(at, value) {
                    same(&row, |row, again| values::put_row(again, row), |again| values::row(at, again));
                }
                if let Some(timer) = values::timer(at, value) {
                    same(
                        &timer,
                        |timer, again| values::put_timer(again, timer),
                        |again| values::timer(at, again),
                    );
                }
            }
            Kind::Tasks => {
                let Some(key) = TaskKey::from_bytes(op.key) else { continue };
                let id = layout::task_of(&key);
                if let Some(task) = values::task(id, value) {
                    same(&task, |task, again| values::put_task(again, task), |again| values::task(id, again));
                }
                if let Some((lane, end)) = values::lane_of_end(value).zip(values::end_record(value)) {
                    same(&end, |end, again| values::put_end(again, lane, end), values::end_record);
                }
            }
            Kind::Records => {
                let _ = layout::tell(&mut metadata, &mut aside, op.key, value);
                let _ = (values::epoch(value), values::ack(value));
                let _ = (layout::lane_of_record(op.key), layout::shard_of(op.key));
                let task = layout::task_of_record(op.key).unwrap_or_default();
                let _ = values::moved(task, value);
                if let Some((_, at)) = layout::place_of_parked(op.key)
                    && let Some(row) = values::row(at, value)
                {
                    same(&row, |row, again| values::put_row(again, row), |again| values::row(at, again));
                }
                if let Some(parked) = values::parked(value) {
                    same(&parked, |parked, again| values::put_parked(again, parked), values::parked);
                }
                if let Some(saved) = Saved::get(value) {
                    same(&saved, Saved::put, Saved::get);
                }
                if let Some(member) = values::member(value) {
                    same(&member, |member, again| values::put_member(again, member), values::member);
                }
                if let Some(key) = values::key_record(value) {
                    same(&key, |key, again| values::put_key_record(again, key), values::key_record);
                }
                if let Some(queue) = values::queue(value) {
                    same(&queue, |queue, again| values::put_queue(again, queue), values::queue);
                }
                if let Some(tried) = values::tried(value) {
                    same(&tried, |tried, again| values::put_try(again, tried), values::tried);
                }
                if let Some(request) = values::request(value) {
                    request.ids.to_vec();
                    same(&request, |request, again| values::put_request(again, request), values::request);
                }
            }
        }
    }
}

/// What can be read can be written, and is the same.
fn same<T: PartialEq + Debug>(read: &T, put: impl Fn(&T, &mut Vec<u8>), get: impl Fn(&[u8]) -> Option<T>) {
    let mut again = Vec::new();
    put(read, &mut again);
    assert_eq!(get(&again).as_ref(), Some(read));
}

/// The file of a witness.
pub fn witness(bytes: &[u8]) {
    let _ = witness::parse(bytes);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// What is on disk in every format, with some bytes changed: as the fuzzer would begin.
    #[test]
    fn bytes_that_were_changed_break_nothing() {
        let formats = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats");
        let mut chance = 1_u64;
        let mut below = |n: usize| {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (chance >> 33) as usize % n
        };
        for format in 1..=super::super::FORMAT {
            let log = formats.join(format.to_string()).join("log");
            for file in std::fs::read_dir(log).expect("a log").map(|file| file.expect("a file").path()) {
                let bytes = std::fs::read(&file).expect("a file that can be read");
                let head = Batch::new().bytes.len();
                // Wherever a frame may begin.
                for at in (0..bytes.len().saturating_sub(head)).step_by(8) {
                    let frame = &bytes[at + head..bytes.len().min(at + head + 1_000)];
                    batch(frame);
                    for _ in 0..20 {
                        let mut changed = frame.to_vec();
                        for _ in 0..=below(4) {
                            let at = below(changed.len());
                            changed[at] = [0, 1, 0x7f, 0x80, 0xff, below(256) as u8][below(6)];
                        }
                        batch(&changed);
                        table(&changed);
                        witness(&changed);
                    }
                }
            }
        }
    }
}
