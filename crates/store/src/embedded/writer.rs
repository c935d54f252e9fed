//! The writer: gathers commits into a frame, makes it durable, acknowledges, and applies it to memory. The
//! only one that writes to the log and to memory.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use evenhand_core::names::{Epoch, ShardId};

use super::engine::{Answer, Flush, Request, Shared, lock};
use super::files::DirError;
use super::layout::{self, Batch, Kind};
use super::log::{self, Acked, LastAcked, Segment};
use super::tree::{FEW_GONES, MOST_LAYERS};
use super::witness::Witness;
use crate::{Doubt, StoreError, next_epoch};

/// Bytes that a frame may gather from several commits: enough to share a sync, little enough that the
/// first of them does not wait long.
const GATHER: usize = 1024 * 1024;
/// Bytes of the largest frame: places in it are counted in 32 bits, and a log is read as a whole.
pub(super) const LARGEST: usize = 1024 * 1024 * 1024;
/// How often the writer looks whether there is something to flush early, when nobody asks for anything.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The one that writes.
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) segment: Segment,
    pub(super) acked: Acked,
    /// The last frame.
    pub(super) last: u64,
    pub(super) epochs: BTreeMap<ShardId, Epoch>,
    pub(super) witness: Option<Witness>,
}

/// What to say when a frame is durable.
enum Pending {
    Commit(Answer<()>),
    Take {
        answer: Answer<(Epoch, Option<Doubt>)>,
        shard: ShardId,
        before: Epoch,
        epoch: Epoch,
        doubt: Option<Doubt>,
    },
}

impl Pending {
    fn answer(self, answer: Result<(), StoreError>) {
        // Nobody may be waiting any more.
        match self {
            Pending::Commit(waiting) => drop(waiting.send(answer)),
            Pending::Take { answer: waiting, epoch, doubt, .. } => {
                drop(waiting.send(answer.map(|()| (epoch, doubt))));
            }
        }
    }
}

/// A frame and where its payload ends; None if there was nothing to write.
type Written = Option<(Arc<Vec<u8>>, usize)>;

impl Writer {
    pub(super) fn run(mut self, inbox: &Receiver<Request>) {
        loop {
            let first = match inbox.recv_timeout(LOOK_AGAIN) {
                Ok(first) => first,
                Err(RecvTimeoutError::Timeout) => {
                    // If there is no room, however little is worth giving back.
                    let few = self.shared.few_gones();
                    self.flush_early(few);
                    if few < FEW_GONES {
                        lock(&self.shared.background).merge = true;
                        self.shared.turned.notify_all();
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut frame: Option<Batch> = None;
            let mut pending = Vec::new();
            let mut next = Some(first);
            while let Some(request) = next {
                if let Request::Idle { .. } = request {
                    // What came before it must not wait for it.
                    self.write(frame.take(), std::mem::take(&mut pending));
                }
                self.gather(request, &mut frame, &mut pending);
                let full = frame.as_ref().is_some_and(|frame| frame.bytes.len() >= GATHER);
                next = if full { None } else { inbox.try_recv().ok() };
            }
            self.write(frame, pending);
        }
    }

    /// Adds a request to the frame, or refuses it.
    fn gather(&mut self, request: Request, frame: &mut Option<Batch>, pending: &mut Vec<Pending>) {
        if let Some(error) = self.shared.failed() {
            match request {
                Request::Commit { answer, .. } => drop(answer.send(Err(error))),
                Request::Take { answer, .. } => drop(answer.send(Err(error))),
                Request::Idle { answer } => drop(answer.send(Err(error))),
            }
            return;
        }
        match request {
            Request::Idle { answer } => {
                // Once more if the flusher was busy with what came before.
                self.shared.rest();
                self.flush_early(FEW_GONES);
                drop(answer.send(Ok(())));
            }
            Request::Take { shard, shown, answer } => {
                let before = self.epochs.get(&shard).copied().unwrap_or_default();
                let epoch = match next_epoch(before, shown) {
                    Ok(epoch) => epoch,
                    Err(error) => return drop(answer.send(Err(error))),
                };
                self.epochs.insert(shard, epoch);
                let doubt = match shown {
                    Some(shown) => Some(Doubt::Shown { shown, current: before }),
                    None => self.witness.as_ref().and_then(|witness| match witness.old() {
                        Some(old) => Some(old.clone()),
                        None if before == Epoch(0) => witness.may_lack_shards(),
                        None => None,
                    }),
                };
                let mut batch = Batch { witnessed: true, ..Batch::new() };
                batch.put(Kind::Records, &layout::epoch_key(shard), &epoch.0.to_le_bytes());
                if doubt.is_some() {
                    batch.put(Kind::Records, &layout::doubt_key(shard), &u64::MAX.to_le_bytes());
                }
                join(frame, batch);
                pending.push(Pending::Take { answer, shard, before, epoch, doubt });
            }
            Request::Commit { shard, epoch, batch, answer } => {
                let current = self.epochs.get(&shard).copied().unwrap_or_default();
                // 0 is the epoch of a shard that nobody has taken, so it is no owner's.
                if epoch != current || epoch == Epoch(0) {
                    return drop(answer.send(Err(StoreError::Fenced { epoch, current })));
                }
                if batch.accepts
                    && let Err(error) = self.shared.room()
                {
                    return drop(answer.send(Err(error)));
                }
                join(frame, batch);
                pending.push(Pending::Commit(answer));
            }
        }
    }

    fn write(&mut self, frame: Option<Batch>, pending: Vec<Pending>) {
        let written = match frame {
            Some(frame) if frame.bytes.len() > log::FRAME_HEADER => self.append_witnessed(frame),
            _ => Ok(None),
        };
        match written {
            Ok(None) => pending.into_iter().for_each(|pending| pending.answer(Ok(()))),
            Ok(Some((frame, end))) => {
                // Held before anybody knows of the commit, so that whoever knows of it reads it.
                let mut trees = self.shared.trees_mut();
                pending.into_iter().for_each(|pending| pending.answer(Ok(())));
                let applied = trees.apply(&frame, log::FRAME_HEADER, end);
                drop(trees);
                match applied {
                    Some(()) => self.flush_early(FEW_GONES),
                    None => {
                        let what = "a commit could not be applied; this is a bug".into();
                        self.shared.fail(StoreError::Corrupt { what });
                    }
                }
            }
            Err(error) => {
                if matches!(error, StoreError::Full { .. }) {
                    // Nothing was written, so nobody took a shard.
                    for taken in pending.iter().rev() {
                        if let Pending::Take { shard, before, .. } = taken {
                            match before {
                                Epoch(0) => self.epochs.remove(shard),
                                _ => self.epochs.insert(*shard, *before),
                            };
                        }
                    }
                } else {
                    self.shared.fail(error.clone());
                }
                pending.into_iter().for_each(|pending| pending.answer(Err(error.clone())));
            }
        }
    }

    /// Gives deletes to the flusher before the segment is full, if they would free much of what is in
    /// tables and it has nothing else to do. `few` of them are not worth it.
    fn flush_early(&mut self, few: u64) {
        let mostly_gone = {
            let trees = self.shared.trees();
            trees.rows.is_mostly_gone(few) || trees.tasks.is_mostly_gone(few)
        };
        let busy =
            || lock(&self.shared.background).flush.is_some() || self.shared.most_layers() > MOST_LAYERS;
        if !mostly_gone || busy() {
            return;
        }
        match self.rotate() {
            Ok(()) | Err(StoreError::Full { .. }) => {}
            Err(error) => self.shared.fail(error),
        }
    }

    /// Makes a frame durable, and sees to it that no copy lacks it unnoticed if it must not.
    fn append_witnessed(&mut self, mut frame: Batch) -> Result<Written, StoreError> {
        let Some(witness) = self.witness.as_ref().filter(|_| frame.witnessed) else {
            return self.append(frame.bytes);
        };
        let saved = witness.next();
        let mut value = Vec::new();
        saved.put(&mut value);
        frame.put(Kind::Records, layout::WITNESS, &value);
        if witness.old().is_some() {
            for shard in self.epochs.keys() {
                frame.put(Kind::Records, &layout::doubt_key(*shard), &u64::MAX.to_le_bytes());
            }
        }
        let written = self.append(frame.bytes)?;
        if let Some(witness) = &mut self.witness {
            let unknown = |error: DirError| StoreError::Unavailable { what: error.to_string() };
            witness.saved(saved).map_err(unknown)?;
        }
        Ok(written)
    }

    /// Makes a frame durable. `Full` means that nothing was written; any other error that this is unknown.
    fn append(&mut self, mut frame: Vec<u8>) -> Result<Written, StoreError> {
        if frame.len() > LARGEST {
            let what = format!("a commit of {} bytes; at most {LARGEST} are possible", frame.len());
            return Err(StoreError::Full { what });
        }
        let full = self.segment.at + frame.len() as u64 > self.shared.options.segment;
        if full && !self.segment.is_empty() {
            self.rotate()?;
        }
        let end = frame.len();
        let unknown = |error: DirError| StoreError::Unavailable { what: error.to_string() };
        self.segment.append(self.last + 1, &mut frame).map_err(unknown)?;
        self.last += 1;
        let last = LastAcked { frame: self.last, segment: self.segment.number };
        self.acked.say(last).map_err(unknown)?;
        Ok(Some((Arc::new(frame), end)))
    }

    /// Hands what is in memory to the flusher and begins a new segment. Waits if the flusher or the merger
    /// is behind.
    fn rotate(&mut self) -> Result<(), StoreError> {
        let shared = &self.shared;
        let mut background = lock(&shared.background);
        loop {
            if let Some(error) = shared.failed() {
                return Err(error);
            }
            if shared.stop.load(Ordering::SeqCst) {
                return Err(StoreError::Unavailable { what: "the store is being closed".into() });
            }
            let no_room = if background.flush.is_some() {
                &background.no_room_to_flush
            } else if shared.most_layers() > MOST_LAYERS {
                &background.no_room_to_merge
            } else {
                break;
            };
            if let Some(error) = no_room {
                return Err(StoreError::Full { what: error.to_string() });
            }
            background = shared.turned.wait(background).unwrap_or_else(PoisonError::into_inner);
        }
        let (number, secret) = (self.segment.number + 1, self.segment.secret());
        let next = Segment::begin(&shared.dir.log(), number, self.last + 1, secret);
        let next = next.map_err(|error| StoreError::Unavailable { what: error.to_string() })?;
        let used = std::mem::replace(&mut self.segment, next);
        let mut trees = shared.trees_mut();
        background.flush = Some(Flush {
            rows: trees.rows.seal(),
            tasks: trees.tasks.seal(),
            records: trees.records.seal(),
            through: self.last,
            segment: used.number,
        });
        drop(trees);
        shared.turned.notify_all();
        Ok(())
    }
}

/// Adds a batch to those that travel in the same frame.
fn join(frame: &mut Option<Batch>, batch: Batch) {
    match frame {
        Some(frame) => {
            frame.bytes.extend_from_slice(&batch.bytes[log::FRAME_HEADER..]);
            frame.witnessed |= batch.witnessed;
        }
        None => *frame = Some(batch),
    }
}
