//! Sorted tables: files that are written once and never changed. A table is a row of blocks, then an index
//! (first key, place and checksum of each block), then a foot of fixed size with the index's own checksum:
//! every byte is covered by a checksum that is checked when it is read, and the index alone is kept in
//! memory. The operating system's cache does the rest.
//!
//! A block is a row of entries: how many bytes of the last key the next one shares, the rest of the key,
//! the value's length plus one (nought for a delete), the value.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::bytes::{Get, Put, Value, checksum};
use super::files::{About, DirError, damaged};
use super::layout::Kind;

/// A key of some kind of row.
pub(super) trait TableKey: Ord + Clone + Send + Sync + std::fmt::Debug + 'static {
    fn bytes(&self) -> &[u8];
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

impl TableKey for Box<[u8]> {
    fn bytes(&self) -> &[u8] {
        self
    }
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(bytes.into())
    }
}

/// What a key stands for.
#[derive(Clone, Debug)]
pub(super) enum Slot {
    Put(Value),
    Gone,
}

/// Bytes of a block: one read of the disk, and little to look through.
const BLOCK: usize = 16 * 1024;
const FOOT: usize = 64;
const MAGIC: &[u8; 8] = b"EVENHTAB";
const SEED: u64 = 3;

pub(super) fn table_path(dir: &Path, number: u64, kind: Kind) -> PathBuf {
    dir.join(format!("{number:08}.{}", kind.name()))
}

pub(super) struct Block<K> {
    first: K,
    at: u64,
    len: u32,
    sum: u64,
}

/// An open table.
pub(super) struct Table<K> {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    pub(super) len: u64,
    pub(super) first: K,
    pub(super) last: K,
    pub(super) puts: u64,
    pub(super) gones: u64,
    file: File,
    blocks: Vec<Block<K>>,
}

impl<K> std::fmt::Debug for Table<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

impl<K: TableKey> Table<K> {
    /// Opens a table whose length is known. Reads its index, no block.
    pub(super) fn open(dir: &Path, number: u64, kind: Kind, len: u64) -> Result<Table<K>, DirError> {
        let path = table_path(dir, number, kind);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(DirError::Missing { file: path, what: "the manifest names it".into() });
            }
            Err(error) => return Err(error).about(&path, "opening"),
        };
        let is = file.metadata().about(&path, "asking for its length")?.len();
        if is != len || len < FOOT as u64 {
            return damaged(&path, is.min(len), format!("it has {is} bytes; {len} were written"));
        }
        let foot_at = len - FOOT as u64;
        let mut foot = [0; FOOT];
        file.read_exact_at(&mut foot, foot_at).about(&path, "reading its foot")?;
        let get = &mut Get::new(&foot);
        let (Some(magic), Some(index_at), Some(index_sum), Some(puts), Some(gones), Some(blocks)) =
            (get.take(8), get.u64(), get.u64(), get.u64(), get.u64(), get.u64())
        else {
            return damaged(&path, foot_at, "its foot is too short");
        };
        if magic != MAGIC || Get::from(&foot, FOOT - 8).u64() != Some(checksum(SEED, &foot[..FOOT - 8])) {
            return damaged(&path, foot_at, "the checksum of its foot is wrong");
        }
        if index_at > foot_at {
            return damaged(&path, foot_at, "its foot says that the index is behind it");
        }
        let mut index = vec![0; (foot_at - index_at) as usize];
        file.read_exact_at(&mut index, index_at).about(&path, "reading its index")?;
        if checksum(SEED, &index) != index_sum {
            return damaged(&path, index_at, "the checksum of its index is wrong");
        }
        match read_index::<K>(&index, blocks) {
            Some((blocks, last)) => {
                let first = blocks[0].first.clone();
                Ok(Table { number, path, len, first, last, puts, gones, file, blocks })
            }
            None => damaged(&path, index_at, "its index cannot be read"),
        }
    }

    /// About how many of its entries are settled, by the first key of each block.
    pub(super) fn settled(&self, is_settled: &dyn Fn(&K) -> bool) -> u64 {
        let blocks = self.blocks.iter().filter(|block| is_settled(&block.first)).count() as u64;
        (self.puts + self.gones) * blocks / self.blocks.len() as u64
    }

    fn block(&self, n: usize) -> Result<Arc<Vec<u8>>, DirError> {
        let block = &self.blocks[n];
        let mut bytes = vec![0; block.len as usize];
        self.file.read_exact_at(&mut bytes, block.at).about(&self.path, "reading")?;
        if checksum(SEED, &bytes) != block.sum {
            let what = format!("the checksum of the {} bytes from there is wrong", block.len);
            return damaged(&self.path, block.at, what);
        }
        Ok(Arc::new(bytes))
    }

    /// Walks through it from a place on.
    pub(super) fn walk(self: &Arc<Self>, from: Bound<K>) -> Cursor<K> {
        let next_block = match &from {
            // The last block that begins at or below the key may go beyond it.
            Bound::Included(key) | Bound::Excluded(key) => {
                self.blocks.partition_point(|block| block.first <= *key).saturating_sub(1)
            }
            Bound::Unbounded => 0,
        };
        Cursor { table: self.clone(), next_block, block: None, at: 0, key: Vec::new(), from }
    }

    /// What a key stands for.
    pub(super) fn get(self: &Arc<Self>, key: &K) -> Result<Option<Slot>, DirError> {
        if *key < self.first || *key > self.last {
            return Ok(None);
        }
        match self.walk(Bound::Included(key.clone())).step()? {
            Some((found, slot)) if found == *key => Ok(Some(slot)),
            _ => Ok(None),
        }
    }
}

pub(super) fn read_index<K: TableKey>(index: &[u8], count: u64) -> Option<(Vec<Block<K>>, K)> {
    let get = &mut Get::new(index);
    let mut blocks = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let len = get.u16()?;
        let first = K::from_bytes(get.take(len.into())?)?;
        let (len, sum) = (get.u32()?, get.u64()?);
        blocks.push(Block { first, at, len, sum });
        at += u64::from(len);
    }
    let len = get.u16()?;
    let last = K::from_bytes(get.take(len.into())?)?;
    (get.is_done() && !blocks.is_empty()).then_some((blocks, last))
}

/// Walks through a table.
pub(super) struct Cursor<K> {
    table: Arc<Table<K>>,
    next_block: usize,
    block: Option<Arc<Vec<u8>>>,
    at: usize,
    key: Vec<u8>,
    from: Bound<K>,
}

impl<K: TableKey> Cursor<K> {
    fn step(&mut self) -> Result<Option<(K, Slot)>, DirError> {
        loop {
            let block = match &self.block {
                Some(block) if self.at < block.len() => block,
                _ if self.next_block == self.table.blocks.len() => return Ok(None),
                _ => {
                    self.at = 0;
                    self.key.clear();
                    self.next_block += 1;
                    self.block.insert(self.table.block(self.next_block - 1)?)
                }
            };
            let Some((key, slot, at)) = read_entry(block, self.at, &mut self.key) else {
                let at = self.table.blocks[self.next_block - 1].at + self.at as u64;
                return damaged(&self.table.path, at, "there is no entry");
            };
            self.at = at;
            match &self.from {
                Bound::Excluded(from) if key <= *from => continue,
                Bound::Included(from) if key < *from => continue,
                Bound::Unbounded => {}
                Bound::Excluded(_) | Bound::Included(_) => self.from = Bound::Unbounded,
            }
            return Ok(Some((key, slot)));
        }
    }
}

pub(super) fn read_entry<K: TableKey>(
    block: &Arc<Vec<u8>>,
    at: usize,
    last: &mut Vec<u8>,
) -> Option<(K, Slot, usize)> {
    let get = &mut Get::from(block, at);
    let (shared, rest) = (get.short()? as usize, get.short()? as usize);
    let len = get.short()?;
    if shared > last.len() {
        return None;
    }
    last.truncate(shared);
    last.extend_from_slice(get.take(rest)?);
    let key = K::from_bytes(last)?;
    let start = get.at();
    let slot = match len.checked_sub(1) {
        None => Slot::Gone,
        Some(len) => {
            get.take(len as usize)?;
            Slot::Put(Value::new(block, start, get.at()))
        }
    };
    Some((key, slot, get.at()))
}

impl<K: TableKey> Iterator for Cursor<K> {
    type Item = Result<(K, Slot), DirError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step().transpose()
    }
}

/// Writes a table, in the order of its keys.
pub(super) struct Writer<K> {
    path: PathBuf,
    number: u64,
    file: BufWriter<File>,
    written: u64,
    block: Vec<u8>,
    block_first: Option<K>,
    blocks: u64,
    index: Vec<u8>,
    last: Option<K>,
    puts: u64,
    gones: u64,
}

impl<K: TableKey> Writer<K> {
    pub(super) fn create(dir: &Path, number: u64, kind: Kind) -> Result<Writer<K>, DirError> {
        let path = table_path(dir, number, kind);
        let file = File::create(&path).about(&path, "creating")?;
        Ok(Writer {
            path,
            number,
            file: BufWriter::with_capacity(256 * 1024, file),
            written: 0,
            block: Vec::with_capacity(2 * BLOCK),
            block_first: None,
            blocks: 0,
            index: Vec::new(),
            last: None,
            puts: 0,
            gones: 0,
        })
    }

    pub(super) fn add(&mut self, key: &K, slot: &Slot) -> Result<(), DirError> {
        let shared = match (&self.block_first, &self.last) {
            (Some(_), Some(last)) => {
                let (last, key) = (last.bytes(), key.bytes());
                last.iter().zip(key).take_while(|(a, b)| a == b).count()
            }
            _ => {
                self.block_first = Some(key.clone());
                0
            }
        };
        let rest = &key.bytes()[shared..];
        self.block.put_short(shared as u64);
        self.block.put_short(rest.len() as u64);
        match slot {
            Slot::Put(value) => {
                self.puts += 1;
                self.block.put_short(value.bytes().len() as u64 + 1);
                self.block.put(rest);
                self.block.put(value.bytes());
            }
            Slot::Gone => {
                self.gones += 1;
                self.block.put_short(0);
                self.block.put(rest);
            }
        }
        self.last = Some(key.clone());
        if self.block.len() >= BLOCK {
            self.end_block()?;
        }
        Ok(())
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> u64 {
        self.written + self.block.len() as u64
    }

    fn end_block(&mut self) -> Result<(), DirError> {
        let Some(first) = self.block_first.take() else { return Ok(()) };
        self.index.put_u16(first.bytes().len() as u16);
        self.index.put(first.bytes());
        self.index.put_u32(self.block.len() as u32);
        self.index.put_u64(checksum(SEED, &self.block));
        self.file.write_all(&self.block).about(&self.path, "writing")?;
        self.written += self.block.len() as u64;
        self.blocks += 1;
        self.block.clear();
        Ok(())
    }

    /// Makes it durable, its name excepted, and opens it. It must not be empty.
    pub(super) fn finish(mut self, dir: &Path, kind: Kind) -> Result<Table<K>, DirError> {
        match self.close() {
            Ok(len) => Table::open(dir, self.number, kind, len),
            Err(error) => {
                self.abandon();
                Err(error)
            }
        }
    }

    fn close(&mut self) -> Result<u64, DirError> {
        self.end_block()?;
        if let Some(last) = &self.last {
            self.index.put_u16(last.bytes().len() as u16);
            self.index.put(last.bytes());
        }
        let mut foot = Vec::with_capacity(FOOT);
        foot.put(MAGIC);
        foot.put_u64(self.written);
        foot.put_u64(checksum(SEED, &self.index));
        foot.put_u64(self.puts);
        foot.put_u64(self.gones);
        foot.put_u64(self.blocks);
        foot.resize(FOOT - 8, 0);
        foot.put_u64(checksum(SEED, &foot));
        let len = self.written + (self.index.len() + foot.len()) as u64;
        let path = &self.path;
        self.file.write_all(&self.index).about(path, "writing")?;
        self.file.write_all(&foot).about(path, "writing")?;
        self.file.flush().about(path, "writing")?;
        self.file.get_ref().sync_all().about(path, "syncing")?;
        Ok(len)
    }

    /// Gives it up: half a table only takes room away.
    pub(super) fn abandon(self) {
        let path = self.path.clone();
        drop(self);
        let _ = std::fs::remove_file(path);
    }
}
