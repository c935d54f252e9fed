//! What waits to be read by the worker. A worker may be slow or stopped for any length of time; then lines of
//! output are dropped and counted, while starts, ends and refusals are kept. Those are bounded by the runs
//! there are, since no orders are read while there is no [`Outbox::room`]. Nobody ever waits to put something
//! in: the guardian must be free to kill.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use prost::Message;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;

use super::frames::{Output, Report, ToWorker, encode};

/// Bytes of lines that wait at most: some seconds of a chatty task.
const LINES_BYTES: usize = 1024 * 1024;
/// Bytes that wait when orders are no longer read.
const ROOM_BYTES: usize = 16 * 1024 * 1024;
/// What a waiting frame costs beside its bytes, about: many short lines must not weigh nothing.
const FRAME_COST: usize = 64;

/// Shared by the keeper, the readers of runs' pipes and the writer.
#[derive(Clone, Debug, Default)]
pub(super) struct Outbox {
    waiting: Arc<Mutex<Waiting>>,
    more: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Waiting {
    frames: VecDeque<(Kind, Bytes)>,
    bytes: usize,
    line_bytes: usize,
    /// Nothing more will be put in.
    closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Line,
    Report,
}

impl Outbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts in what must arrive.
    pub(super) fn report(&self, report: Report) {
        match encode(&ToWorker { report: Some(report) }) {
            Ok(frame) => self.put(Kind::Report, frame),
            // Every report is bounded by what it is made of.
            Err(error) => tracing::error!("a report was lost: {error}"),
        }
    }

    /// Puts in a line of output. False if it was dropped.
    pub(super) fn line(&self, id: u64, line: &[u8]) -> bool {
        if self.waiting().line_bytes + line.len() + FRAME_COST > LINES_BYTES {
            return false;
        }
        let message = ToWorker { report: Some(Report::Output(Output { id, line: line.to_vec() })) };
        debug_assert!(message.encoded_len() < LINES_BYTES, "lines are cut before they come here");
        let Ok(frame) = encode(&message) else { return false };
        self.put(Kind::Line, frame);
        true
    }

    fn put(&self, kind: Kind, frame: Bytes) {
        let mut waiting = self.waiting();
        let cost = frame.len() + FRAME_COST;
        waiting.bytes += cost;
        waiting.line_bytes += if kind == Kind::Line { cost } else { 0 };
        waiting.frames.push_back((kind, frame));
        drop(waiting);
        self.more.notify_one();
    }

    /// Whether orders may be read, which lead to more reports.
    pub(super) fn room(&self) -> bool {
        self.waiting().bytes < ROOM_BYTES
    }

    /// Says that nothing more will be put in.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        self.more.notify_one();
    }

    /// Writes what is put in, until it is closed and empty, or nobody reads. After that it goes on to
    /// empty itself.
    pub(super) async fn write_to(self, mut pipe: impl AsyncWrite + Unpin) {
        let mut reads = true;
        loop {
            let next = {
                let mut waiting = self.waiting();
                let next = waiting.frames.pop_front();
                if next.is_none() && waiting.closed {
                    return;
                }
                next
            };
            let Some((kind, frame)) = next else {
                self.more.notified().await;
                continue;
            };
            reads = reads && pipe.write_all(&frame).await.is_ok();
            let mut waiting = self.waiting();
            let cost = frame.len() + FRAME_COST;
            waiting.bytes -= cost;
            waiting.line_bytes -= if kind == Kind::Line { cost } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::FrameReader;
    use super::*;

    #[tokio::test]
    async fn lines_are_dropped_when_nobody_reads_and_reports_are_not() {
        let outbox = Outbox::default();
        let (mut kept, mut dropped) = (0, 0);
        for _ in 0..100_000 {
            *if outbox.line(1, b"a line") { &mut kept } else { &mut dropped } += 1;
        }
        assert!(kept > 1_000 && dropped > 1_000, "{kept} {dropped}");
        outbox.report(Report::LeaseOver(5));
        outbox.close();
        let (theirs, ours) = tokio::io::duplex(100);
        let writer = tokio::spawn(outbox.clone().write_to(ours));
        let mut reader = FrameReader::new(theirs);
        for _ in 0..kept {
            let report = reader.next::<ToWorker>().await.unwrap().unwrap().report;
            assert_eq!(report, Some(Report::Output(Output { id: 1, line: b"a line".to_vec() })));
        }
        let last = reader.next::<ToWorker>().await.unwrap().unwrap().report;
        assert_eq!(last, Some(Report::LeaseOver(5)));
        writer.await.unwrap();
        assert_eq!(outbox.waiting().bytes, 0);
        assert_eq!(outbox.waiting().line_bytes, 0);
        assert!(outbox.line(1, b"a line"));
    }
}
