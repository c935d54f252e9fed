//! How messages are read from the wire: as prost does, after a look at how many fields they have. A field may be two
//! bytes on the wire and a hundred in memory, so a bound on bytes alone does not bound memory.

use std::any::TypeId;
use std::marker::PhantomData;

use prost::Message;
use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::v1;

/// Most fields of a message: a full enqueue has 10,000. Those of its parts are counted where there may be many: the
/// files of tasks, and the classes of a queue.
const FIELDS: usize = 250_000;
/// Where those are: `files` in `tasks` of an enqueue.
const FILES: &[u32] = &[2, 16];
/// `classes` in `classes` in `settings` of a change of a queue.
const CLASSES: &[u32] = &[2, 5, 1];

/// Where a message may have many parts within a part.
fn inside(message: TypeId) -> &'static [u32] {
    if message == TypeId::of::<v1::EnqueueRequest>() {
        FILES
    } else if message == TypeId::of::<v1::SetQueueRequest>() {
        CLASSES
    } else {
        &[]
    }
}

/// The codec of all services.
#[derive(Debug)]
pub struct Bounded<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Bounded<T, U> {
    fn default() -> Self {
        Bounded(PhantomData)
    }
}

impl<T: Message + Send + 'static, U: Message + Default + Send + 'static> Codec for Bounded<T, U> {
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(Default::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(PhantomData)
    }
}

/// Reads messages.
#[derive(Debug)]
pub struct BoundedDecoder<U>(PhantomData<U>);

impl<U: Message + Default + 'static> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        if !is_within(&bytes, inside(TypeId::of::<U>()), FIELDS) {
            return Err(Status::out_of_range(format!(
                "a message has more than {FIELDS} fields; send less at once"
            )));
        }
        // What is wrong with it, prost says better.
        U::decode(bytes).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Whether a message has at most so many fields, with those of its parts that are on this way: the number of a field, and
/// of one in that, and so on. What cannot be read has none.
fn is_within(mut bytes: &[u8], way: &[u32], most: usize) -> bool {
    let mut left = most;
    while let Some((tag, part)) = next_field(&mut bytes) {
        let within = left > 0 && {
            left -= 1;
            count(tag, part, way, &mut left)
        };
        if !within {
            return false;
        }
    }
    true
}

/// Takes the fields that are on the way within a field off those that are left, if there are as many.
fn count(tag: u32, mut part: &[u8], way: &[u32], left: &mut usize) -> bool {
    let [first, rest @ ..] = way else { return true };
    if tag != *first {
        return true;
    }
    while let Some((tag, part)) = next_field(&mut part) {
        if rest.first() == Some(&tag) {
            if *left == 0 {
                return false;
            }
            *left -= 1;
            if !count(tag, part, rest, left) {
                return false;
            }
        }
    }
    true
}

/// The next field: its number, and what is in it. None at the end, and where nothing can be read.
fn next_field<'a>(bytes: &mut &'a [u8]) -> Option<(u32, &'a [u8])> {
    if bytes.is_empty() {
        return None;
    }
    let (tag, kind) = decode_key(bytes).ok()?;
    if kind != WireType::LengthDelimited {
        skip_field(kind, tag, bytes, DecodeContext::default()).ok()?;
        return Some((tag, &[]));
    }
    let length = usize::try_from(decode_varint(bytes).ok()?).ok()?;
    let (part, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some((tag, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_before_they_are_read() {
        let tasks = |n| v1::EnqueueRequest { tasks: vec![v1::NewTask::default(); n], ..Default::default() };
        assert!(is_within(&tasks(10).encode_to_vec(), &[], 10));
        assert!(!is_within(&tasks(11).encode_to_vec(), &[], 10));
        assert!(is_within(b"", &[], 0) && is_within(&[0xff; 9], &[], 0));
    }

    /// Two bytes each, and sixty in memory. What else a task has is not many, and a payload may look like anything.
    #[test]
    fn the_files_of_all_tasks_of_an_enqueue_are_counted_too() {
        let files = vec![v1::File::default(); 10];
        let mut task = v1::NewTask { files, key: "acme".into(), priority: Some(5), ..Default::default() };
        task.payload = v1::NewTask { files: vec![v1::File::default(); 1_000], ..Default::default() }
            .encode_to_vec()
            .into();
        let request = v1::EnqueueRequest { queue: "q".into(), tasks: vec![task; 3], ..Default::default() };
        let bytes = request.encode_to_vec();
        assert!(is_within(&bytes, FILES, 1 + 3 + 30));
        assert!(!is_within(&bytes, FILES, 3 + 30));
        for end in 0..bytes.len() {
            is_within(&bytes[..end], FILES, usize::MAX);
        }
    }

    #[test]
    fn the_classes_of_a_queue_are_counted_too() {
        let classes = Some(v1::Classes { classes: vec![v1::ClassLimit::default(); 30] });
        let settings = Some(v1::QueueSettings { classes, paused: Some(true), ..Default::default() });
        let request = v1::SetQueueRequest { name: "q".into(), settings, version: None };
        let bytes = request.encode_to_vec();
        let way = inside(TypeId::of::<v1::SetQueueRequest>());
        // The name, the settings, the classes, and each of them.
        assert!(is_within(&bytes, way, 3 + 30));
        assert!(!is_within(&bytes, way, 2 + 30));
    }
}
