//! How messages are read from the wire: as prost does, after a look at how many fields they have. A field may be two
//! bytes on the wire and a hundred in memory, so a bound on bytes alone does not bound memory.

use std::marker::PhantomData;

use prost::Message;
use prost::bytes::Buf;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

/// Most fields of a message, those of its parts not counted: a full enqueue has 10,000.
const FIELDS: usize = 250_000;

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

impl<U: Message + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        if !is_within(&bytes, FIELDS) {
            return Err(Status::out_of_range(format!(
                "a message has more than {FIELDS} fields; send less at once"
            )));
        }
        // What is wrong with it, prost says better.
        U::decode(bytes).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Whether a message has at most so many fields. What cannot be read has none.
fn is_within(mut bytes: &[u8], most: usize) -> bool {
    let mut fields = 0;
    while bytes.has_remaining() {
        let skipped = decode_key(&mut bytes)
            .and_then(|(tag, kind)| skip_field(kind, tag, &mut bytes, DecodeContext::default()));
        fields += 1;
        if skipped.is_err() {
            return true;
        }
        if fields > most {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1;

    #[test]
    fn fields_are_counted_before_they_are_read() {
        let tasks = |n| v1::EnqueueRequest { tasks: vec![v1::NewTask::default(); n], ..Default::default() };
        assert!(is_within(&tasks(10).encode_to_vec(), 10));
        assert!(!is_within(&tasks(11).encode_to_vec(), 10));
        assert!(is_within(b"", 0) && is_within(&[0xff; 9], 0));
    }
}
