//! The commit log: where a commit becomes durable. It is a few files of fixed size ("segments"), written in
//! place from front to back and used again when what they hold has reached the tables: a sync then has
//! no new file size to write, which makes it about twice as fast.
//!
//! A frame is the unit that is written, synced and acknowledged at once. It has a number, one more than
//! the last, and a checksum that begins with the store's secret and its segment's number, so that neither
//! an old frame in a used file nor a payload that looks like a frame is ever taken for one. Whoever reads the log can thus tell its end from damage:
//! - A frame that is not whole, with nothing valid after it, was being written when the process or the
//!   machine died. It was never acknowledged, and is dropped.
//! - A frame that is not whole, with a valid frame after it, was whole once: the next one is only written
//!   when it is synced. That is damage.
//! - The same if the frame was acknowledged: the file `acked` names the last one that was. It is written
//!   after each sync and not synced itself, so it never says too much.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::bytes::{Get, Put, checksum};
use super::files::{About, DirError, damaged, numbered, read_small, sync_dir};

/// Bytes before a frame's payload: checksum (8), length of the payload (4), a short checksum of length and
/// number (4), number (8). The short one is looked at first: a payload full of things that look like heads
/// would otherwise make the search for later frames long.
pub(super) const FRAME_HEADER: usize = 24;
const ALIGN: u64 = 8;
const SEGMENT_HEADER: u64 = 40;
const MAGIC: &[u8; 8] = b"EVENHLOG";
const ACKED_LEN: u64 = 24;
/// Seeds of checksums, so that one kind of thing is never taken for another.
const HEADER_SEED: u64 = 1;
const ACKED_SEED: u64 = 2;

/// A segment that is being written.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) number: u64,
    secret: u64,
    file: File,
    /// Where the next frame goes.
    pub(super) at: u64,
}

pub(super) fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number:08}.log"))
}

fn spare_path(dir: &Path) -> PathBuf {
    dir.join("spare")
}

/// Makes sure that a file of full size lies ready for the next segment.
pub(super) fn prepare_spare(dir: &Path, used: Option<&Path>, size: u64) -> Result<(), DirError> {
    let spare = spare_path(dir);
    if spare.try_exists().about(&spare, "looking for it")? {
        if let Some(used) = used {
            std::fs::remove_file(used).about(used, "removing")?;
        }
        return sync_dir(dir);
    }
    match used {
        Some(used) => {
            // A commit larger than a segment has made it longer.
            let cut = OpenOptions::new()
                .write(true)
                .open(used)
                .and_then(|file| if file.metadata()?.len() > size { file.set_len(size) } else { Ok(()) });
            cut.about(used, "cutting to size")?;
            std::fs::rename(used, &spare).about(&spare, "renaming")?;
        }
        None => {
            let making = dir.join("spare.new");
            let made = File::create(&making).and_then(|mut file| {
                let zeros = vec![0; 1 << 20];
                let mut left = size;
                while left > 0 {
                    let n = left.min(zeros.len() as u64);
                    file.write_all(&zeros[..n as usize])?;
                    left -= n;
                }
                file.sync_all()
            });
            if let Err(error) = made {
                // Half of it only takes room away.
                let _ = std::fs::remove_file(&making);
                return Err(error).about(&making, "making room for the log");
            }
            std::fs::rename(&making, &spare).about(&spare, "renaming")?;
        }
    }
    sync_dir(dir)
}

impl Segment {
    /// Begins a segment in the spare file. `first` is the number of its first frame.
    pub(super) fn begin(dir: &Path, number: u64, first: u64, secret: u64) -> Result<Segment, DirError> {
        Segment::begin_in(&spare_path(dir), dir, number, first, secret)
    }

    /// Begins a segment anew that holds no frame.
    pub(super) fn resume(dir: &Path, number: u64, first: u64, secret: u64) -> Result<Segment, DirError> {
        Segment::begin_in(&segment_path(dir, number), dir, number, first, secret)
    }

    fn begin_in(spare: &Path, dir: &Path, number: u64, first: u64, secret: u64) -> Result<Segment, DirError> {
        let path = segment_path(dir, number);
        let file = OpenOptions::new().write(true).open(spare).about(spare, "opening")?;
        let mut head = Vec::with_capacity(SEGMENT_HEADER as usize);
        head.put(MAGIC);
        head.put_u64(number);
        head.put_u64(first);
        head.put_u64(0);
        head.put_u64(checksum(HEADER_SEED, &head));
        // Whatever frame was here must not follow the new head.
        head.resize(head.len() + FRAME_HEADER, 0);
        let written = file.write_all_at(&head, 0).and_then(|()| file.sync_data());
        written.about(spare, "writing its head")?;
        if path != spare {
            std::fs::rename(spare, &path).about(&path, "renaming")?;
        }
        sync_dir(dir)?;
        Ok(Segment { path, number, secret, file, at: SEGMENT_HEADER })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == SEGMENT_HEADER
    }

    pub(super) fn secret(&self) -> u64 {
        self.secret
    }

    /// Writes a frame and syncs it. The buffer begins with room for the head.
    pub(super) fn append(&mut self, number: u64, frame: &mut Vec<u8>) -> Result<(), DirError> {
        let payload = (frame.len() - FRAME_HEADER) as u32;
        let seed = seed(self.secret, self.number);
        frame[8..12].copy_from_slice(&payload.to_le_bytes());
        frame[12..16].copy_from_slice(&head_checksum(seed, payload, number).to_le_bytes());
        frame[16..24].copy_from_slice(&number.to_le_bytes());
        let sum = checksum(seed, &frame[8..]);
        frame[..8].copy_from_slice(&sum.to_le_bytes());
        frame.resize(frame.len().next_multiple_of(ALIGN as usize), 0);
        let written = self.file.write_all_at(frame, self.at).and_then(|()| self.file.sync_data());
        written.about(&self.path, "writing a commit")?;
        self.at += frame.len() as u64;
        Ok(())
    }
}

fn head_checksum(seed: u64, len: u32, number: u64) -> u32 {
    let mut head = Vec::with_capacity(12);
    head.put_u32(len);
    head.put_u64(number);
    checksum(seed, &head) as u32
}

/// Where the checksums of a segment's frames begin.
fn seed(secret: u64, segment: u64) -> u64 {
    secret.wrapping_add(segment)
}

/// The file that names the last frame acknowledged.
#[derive(Debug)]
pub(super) struct Acked {
    path: PathBuf,
    file: File,
}

/// What it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LastAcked {
    /// The frame.
    pub(super) frame: u64,
    /// Its segment.
    pub(super) segment: u64,
}

fn acked_path(dir: &Path) -> PathBuf {
    dir.join("acked")
}

impl Acked {
    pub(super) fn open(dir: &Path) -> Result<Acked, DirError> {
        let path = acked_path(dir);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        Ok(Acked { file: file.about(&path, "opening")?, path })
    }

    /// Says so. Not synced: see the head of this module.
    pub(super) fn say(&self, last: LastAcked) -> Result<(), DirError> {
        let mut bytes = Vec::with_capacity(ACKED_LEN as usize);
        bytes.put_u64(last.frame);
        bytes.put_u64(last.segment);
        bytes.put_u64(checksum(ACKED_SEED, &bytes));
        self.file.write_all_at(&bytes, 0).about(&self.path, "writing")
    }

    pub(super) fn sync(&self) -> Result<(), DirError> {
        self.file.sync_all().about(&self.path, "syncing")
    }

    pub(super) fn read(dir: &Path) -> Result<LastAcked, DirError> {
        let path = acked_path(dir);
        let Some(bytes) = read_small(&path, ACKED_LEN)? else {
            return Err(DirError::Missing { file: path, what: "every store has one".into() });
        };
        let get = &mut Get::new(&bytes);
        match (get.u64(), get.u64(), get.u64()) {
            (Some(frame), Some(segment), Some(sum)) if sum == checksum(ACKED_SEED, &bytes[..16]) => {
                Ok(LastAcked { frame, segment })
            }
            _ => damaged(&path, 0, "its checksum is wrong"),
        }
    }
}

/// A segment that was read.
#[derive(Debug)]
pub(super) struct ReadSegment {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    /// Bytes of it that are used.
    pub(super) used: u64,
}

impl ReadSegment {
    pub(super) fn is_empty(&self) -> bool {
        self.used == SEGMENT_HEADER
    }
}

/// What a log holds.
#[derive(Debug)]
pub(super) struct Replayed {
    /// The number of the last whole frame; one less than the first if there is none.
    pub(super) last: u64,
    /// The segments read.
    pub(super) segments: Vec<ReadSegment>,
    /// Bytes of an unfinished frame at the end, which was never acknowledged.
    pub(super) unfinished: u64,
}

/// Reads the log from a segment on and hands out every frame above `above`: the segment's bytes, and where
/// in them the frame's payload begins and ends. Changes nothing.
pub(super) fn replay(
    dir: &Path,
    log: &Path,
    from: u64,
    above: u64,
    secret: u64,
    mut each: impl FnMut(&Path, &Arc<Vec<u8>>, usize, usize) -> Result<(), DirError>,
) -> Result<Replayed, DirError> {
    let acked = Acked::read(dir)?;
    let files = numbered(log)?.into_iter().filter(|(number, kind, _)| kind == "log" && *number >= from);
    let mut replayed = Replayed { last: above, segments: Vec::new(), unfinished: 0 };
    let mut next = None;
    let mut ended: Option<(PathBuf, u64, String)> = None;
    for (expected, (number, _, path)) in (from..).zip(files) {
        if number != expected {
            let what = format!("the log goes on in {}", path.display());
            return Err(DirError::Missing { file: segment_path(log, expected), what });
        }
        let bytes = Arc::new(std::fs::read(&path).about(&path, "reading")?);
        let first = match segment_head(&bytes, number) {
            Ok(first) => first,
            Err(what) => return damaged(&path, 0, what),
        };
        // What is in tables may be missing here: after a failed sync only a cache may have had it.
        let wanted = next.unwrap_or(first.min(above + 1)).max(first.min(above + 1));
        if let Some((file, at, what)) = ended.take_if(|_| first > wanted) {
            return damaged(&file, at, format!("{what}, though later commits follow in {}", path.display()));
        }
        if first != wanted {
            let what = format!("it begins with commit {first}, but commit {wanted} is the next");
            return damaged(&path, 16, what);
        }
        let mut at = SEGMENT_HEADER as usize;
        let mut frame = first;
        let problem = loop {
            match frame_at(&bytes, at, seed(secret, number), frame) {
                Ok(end) => {
                    if frame > above {
                        each(&path, &bytes, at + FRAME_HEADER, end)?;
                        replayed.last = frame;
                    }
                    at = end.next_multiple_of(ALIGN as usize);
                    frame += 1;
                }
                Err(what) => break what,
            }
        };
        if let Some(later) = later_frame(&bytes, at, seed(secret, number), frame) {
            let what = format!(
                "commit {frame} cannot be read ({problem}), but there is one after it at byte {later}"
            );
            return damaged(&path, at as u64, what);
        }
        replayed.unfinished = unfinished(&bytes, at, frame);
        next = Some(frame);
        ended = Some((path.clone(), at as u64, format!("commit {frame} cannot be read ({problem})")));
        replayed.segments.push(ReadSegment { number, path, used: at as u64 });
    }
    let Some(last) = replayed.segments.last() else {
        let what = "the manifest says that the log begins there".into();
        return Err(DirError::Missing { file: segment_path(log, from), what });
    };
    if acked.segment > last.number {
        let what = format!("commit {} was acknowledged, and it is there", acked.frame);
        return Err(DirError::Missing { file: segment_path(log, acked.segment), what });
    }
    let found = next.map_or(above, |next| next - 1).max(above);
    if acked.frame > found {
        let what = format!("the log ends with commit {found}, but commit {} was acknowledged", acked.frame);
        return damaged(&last.path, last.used, what);
    }
    Ok(replayed)
}

pub(super) fn segment_head(bytes: &[u8], number: u64) -> Result<u64, String> {
    let get = &mut Get::new(bytes);
    let (Some(magic), Some(own), Some(first), Some(0), Some(sum)) =
        (get.take(8), get.u64(), get.u64(), get.u64(), get.u64())
    else {
        return Err("its head is cut off or wrong".into());
    };
    if magic != MAGIC || sum != checksum(HEADER_SEED, &bytes[..32]) {
        return Err("the checksum of its head is wrong".into());
    }
    if own != number {
        return Err(format!("it was written as segment {own}"));
    }
    Ok(first)
}

/// Checks the frame at a place: where its payload ends, or what is wrong.
pub(super) fn frame_at(bytes: &[u8], at: usize, seed: u64, number: u64) -> Result<usize, String> {
    let get = &mut Get::from(bytes, at);
    let (Some(sum), Some(len), Some(head), Some(own)) = (get.u64(), get.u32(), get.u32(), get.u64()) else {
        return Err("the file ends".into());
    };
    if own != number || head != head_checksum(seed, len, number) {
        return Err("there is no head of it".into());
    }
    let end = at + FRAME_HEADER + len as usize;
    match bytes.get(at + 8..end) {
        None => Err("the file ends within it".into()),
        Some(summed) if checksum(seed, summed) != sum => Err("its checksum is wrong".into()),
        Some(_) => Ok(end),
    }
}

/// A valid frame after a place where none is: proof that what should be there was whole once.
fn later_frame(bytes: &[u8], from: usize, seed: u64, after: u64) -> Option<usize> {
    let mut at = from.next_multiple_of(ALIGN as usize);
    while at + FRAME_HEADER <= bytes.len() {
        let own = Get::from(bytes, at + 16).u64()?;
        // Not further away than frames fit into what is left.
        let possible = own > after && own - after <= (bytes.len() - from) as u64 / FRAME_HEADER as u64;
        if possible && frame_at(bytes, at, seed, own).is_ok() {
            return Some(at);
        }
        at += ALIGN as usize;
    }
    None
}

/// How much of a frame stands where the log ends.
fn unfinished(bytes: &[u8], at: usize, number: u64) -> u64 {
    let get = &mut Get::from(bytes, at);
    match (get.u64(), get.u32(), get.u32(), get.u64()) {
        (Some(_), Some(len), Some(_), Some(own)) if own == number => FRAME_HEADER as u64 + u64::from(len),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: u64 = 7;

    /// A log of segments that begin with these frames and hold so many, the last of which was acknowledged.
    fn given(segments: &[(u64, u64)], acked: LastAcked) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (number, (first, frames)) in (1..).zip(segments) {
            prepare_spare(dir.path(), None, 4096).unwrap();
            let mut segment = Segment::begin(dir.path(), number, *first, SECRET).unwrap();
            for frame in *first..first + frames {
                let mut bytes = vec![frame as u8; FRAME_HEADER + 50];
                segment.append(frame, &mut bytes).unwrap();
            }
        }
        Acked::open(dir.path()).unwrap().say(acked).unwrap();
        dir
    }

    fn frames(dir: &Path, above: u64) -> Result<(Vec<u8>, Replayed), DirError> {
        let mut seen = Vec::new();
        let replayed = replay(dir, dir, 1, above, SECRET, |_, bytes, start, end| {
            assert_eq!(end - start, 50);
            seen.push(bytes[start]);
            Ok(())
        })?;
        Ok((seen, replayed))
    }

    /// Writes over a part of a segment.
    fn harm(dir: &Path, segment: u64, at: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(segment_path(dir, segment)).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }

    #[test]
    fn frames_come_back_in_order_over_all_segments() {
        let dir = given(&[(1, 3), (4, 2)], LastAcked { frame: 5, segment: 2 });
        let (seen, replayed) = frames(dir.path(), 0).unwrap();
        assert_eq!((seen, replayed.last), (vec![1, 2, 3, 4, 5], 5));
        assert_eq!(frames(dir.path(), 4).unwrap().0, [5]);
    }

    #[test]
    fn a_frame_that_was_never_acknowledged_is_dropped_if_it_is_not_whole() {
        let dir = given(&[(1, 3)], LastAcked { frame: 2, segment: 1 });
        let third = SEGMENT_HEADER + 2 * 80;
        harm(dir.path(), 1, third + 60, &[0xff; 4]);
        let (seen, replayed) = frames(dir.path(), 0).unwrap();
        assert_eq!((seen, replayed.last, replayed.unfinished), (vec![1, 2], 2, 74));
    }

    #[test]
    fn a_frame_that_was_acknowledged_is_missed() {
        let dir = given(&[(1, 3)], LastAcked { frame: 3, segment: 1 });
        let third = SEGMENT_HEADER + 2 * 80;
        harm(dir.path(), 1, third, &[0; 80]);
        assert!(matches!(frames(dir.path(), 0), Err(DirError::Damaged { at, .. }) if at == third));
    }

    #[test]
    fn a_frame_before_a_whole_one_is_missed_even_if_nobody_knows_what_was_acknowledged() {
        let dir = given(&[(1, 3)], LastAcked { frame: 0, segment: 1 });
        let second = SEGMENT_HEADER + 80;
        harm(dir.path(), 1, second + 30, &[0xff]);
        assert!(matches!(frames(dir.path(), 0), Err(DirError::Damaged { at, .. }) if at == second));
    }

    // After a failed sync only the cache had frame 3; it was written into tables, and then the power went.
    #[test]
    fn a_frame_that_is_in_tables_may_be_missing() {
        let dir = given(&[(1, 2), (4, 0)], LastAcked { frame: 2, segment: 1 });
        let (seen, replayed) = frames(dir.path(), 3).unwrap();
        assert_eq!((seen, replayed.last), (vec![], 3));
        assert!(matches!(frames(dir.path(), 2), Err(DirError::Damaged { .. })));
    }

    #[test]
    fn a_log_that_begins_too_late_is_missed() {
        let dir = given(&[(4, 2)], LastAcked { frame: 5, segment: 1 });
        assert_eq!(frames(dir.path(), 3).unwrap().0, [4, 5]);
        assert!(matches!(frames(dir.path(), 2), Err(DirError::Damaged { .. })));
    }
}
