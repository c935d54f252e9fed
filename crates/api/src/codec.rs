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

/// Most fields of a message: a full enqueue has 10,000. Those of its parts are counted where there may be many, the
/// files of tasks.
const FIELDS: usize = 250_000;
/// Where those are: `files` in `tasks` of an enqueue.
const FILES: (u32, u32) = (2, 16);

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
        let inside = (TypeId::of::<U>() == TypeId::of::<v1::EnqueueRequest>()).then_some(FILES);
        if !is_within(&bytes, inside, FIELDS) {
            return Err(Status::out_of_range(format!(
                "a message has more than {FIELDS} fields; send less at once"
            )));
        }
        // What is wrong with it, prost says better.
        U::decode(bytes).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Whether a message has at most so many fields, with those of one kind in its parts of one kind: (part, field). What
/// cannot be read has none.
fn is_within(mut bytes: &[u8], inside: Option<(u32, u32)>, most: usize) -> bool {
    let mut fields = 0;
    while let Some((tag, mut part)) = next_field(&mut bytes) {
        fields += 1;
        if let Some((_, inner)) = inside.filter(|(outer, _)| *outer == tag) {
            while let Some((tag, _)) = next_field(&mut part) {
                fields += usize::from(tag == inner);
            }
        }
        if fields > most {
            return false;
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
        assert!(is_within(&tasks(10).encode_to_vec(), None, 10));
        assert!(!is_within(&tasks(11).encode_to_vec(), None, 10));
        assert!(is_within(b"", None, 0) && is_within(&[0xff; 9], None, 0));
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
        assert!(is_within(&bytes, Some(FILES), 1 + 3 + 30));
        assert!(!is_within(&bytes, Some(FILES), 3 + 30));
        for end in 0..bytes.len() {
            is_within(&bytes[..end], Some(FILES), usize::MAX);
        }
    }
}
