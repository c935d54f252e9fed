//! One kind of row, in order: what came since the last flush is in memory (and in the log), the rest in
//! layers of sorted tables, the newest first. Flushing makes a new layer; merging makes one layer of several.
//!
//! Merging is lazy: eight layers of about the same size become one ([`FAN`]), so a row is rewritten about as
//! often as the number of rows has digits to the base of eight. Tables that overlap with no other are
//! handed over as they are. When deletes, and rows that are settled (at or below their lane's ack level),
//! are half as many as all puts, all layers are merged into one, which gives the room back. Deletes of rows
//! that are written once cancel their puts wherever they meet; what is settled is left out of every flush
//! and every merge.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use super::bytes::Value;
use super::files::DirError;
use super::layout::{self, Kind};
use super::table::{Cursor, Slot, Table, TableKey, Writer};

/// Runs of one size that are merged into one of the next.
pub(super) const FAN: usize = 8;
/// Layers of one kind above which commits wait for the merger: reads would have to look into too many.
pub(super) const MOST_LAYERS: usize = 64;
/// Deletes below which giving their room back is not worth the work, as long as there is room.
pub(super) const FEW_GONES: u64 = 10_000;

/// Entries in memory.
pub(super) type Memory<K> = BTreeMap<K, Slot>;

/// A table of a layer, as far as it has not been merged away.
#[derive(Debug)]
pub(super) struct Part<K> {
    pub(super) table: Arc<Table<K>>,
    /// What is at or below has been merged into another layer.
    pub(super) above: Option<K>,
}

impl<K: Clone> Clone for Part<K> {
    fn clone(&self) -> Self {
        Part { table: self.table.clone(), above: self.above.clone() }
    }
}

impl<K: TableKey> Part<K> {
    /// Walks through it from a place on.
    fn walk(&self, from: &Bound<K>) -> Cursor<K> {
        let from = match (from, &self.above) {
            (Bound::Included(from), Some(above)) if from > above => Bound::Included(from.clone()),
            (Bound::Excluded(from), Some(above)) => Bound::Excluded(from.max(above).clone()),
            (_, Some(above)) => Bound::Excluded(above.clone()),
            (from, None) => from.clone(),
        };
        self.table.walk(from)
    }
}

/// Tables that do not overlap, in the order of their keys.
#[derive(Debug)]
pub(super) struct Layer<K> {
    pub(super) id: u64,
    /// Its size class: how many merges deep it is.
    pub(super) tier: u8,
    pub(super) parts: Vec<Part<K>>,
}

impl<K: Clone> Clone for Layer<K> {
    fn clone(&self) -> Self {
        Layer { id: self.id, tier: self.tier, parts: self.parts.clone() }
    }
}

impl<K: TableKey> Layer<K> {
    /// The first part that may hold a key above this one.
    fn from(&self, above: &Bound<K>) -> usize {
        match above {
            Bound::Unbounded => 0,
            Bound::Included(key) => self.parts.partition_point(|part| part.table.last < *key),
            Bound::Excluded(key) => self.parts.partition_point(|part| part.table.last <= *key),
        }
    }

    fn get(&self, key: &K) -> Result<Option<Slot>, DirError> {
        match self.parts.get(self.from(&Bound::Included(key.clone()))) {
            Some(part) if part.above.as_ref().is_none_or(|above| key > above) => part.table.get(key),
            _ => Ok(None),
        }
    }
}

/// One kind of row.
#[derive(Debug)]
pub(super) struct Tree<K> {
    pub(super) kind: Kind,
    /// What came since the last flush began.
    pub(super) active: Memory<K>,
    /// Deletes among it.
    gones: u64,
    /// What is being flushed.
    pub(super) sealed: Option<Arc<Memory<K>>>,
    /// The newest first.
    pub(super) layers: Arc<Vec<Layer<K>>>,
}

/// What a read needs beside the layers: taken under the lock, used without it.
pub(super) struct View<K> {
    recent: Vec<(K, Slot)>,
    sealed: Option<Arc<Memory<K>>>,
    layers: Arc<Vec<Layer<K>>>,
    from: Bound<K>,
    to: Bound<K>,
    limit: usize,
}

impl<K: TableKey> Tree<K> {
    pub(super) fn new(kind: Kind, layers: Vec<Layer<K>>) -> Tree<K> {
        Tree { kind, active: BTreeMap::new(), gones: 0, sealed: None, layers: Arc::new(layers) }
    }

    pub(super) fn put(&mut self, key: K, value: Value) {
        self.active.insert(key, Slot::Put(value));
    }

    pub(super) fn delete(&mut self, key: K) {
        match self.active.entry(key) {
            // Its only put is here, so nothing of it is further down.
            Entry::Occupied(entry) if self.kind.once() && matches!(entry.get(), Slot::Put(_)) => {
                entry.remove();
            }
            Entry::Occupied(mut entry) => drop(entry.insert(Slot::Gone)),
            Entry::Vacant(entry) => {
                self.gones += 1;
                entry.insert(Slot::Gone);
            }
        }
    }

    /// Forgets a range of keys that nobody will ask for again.
    pub(super) fn forget(&mut self, from: K, to: K) {
        while let Some((key, _)) = self.active.range(from.clone()..=to.clone()).next() {
            let key = key.clone();
            if let Some(Slot::Gone) = self.active.remove(&key) {
                self.gones -= 1;
            }
        }
    }

    /// Whether its deletes should reach the tables soon, because they would free about as much as is there.
    /// `few` deletes are too few for that.
    pub(super) fn is_mostly_gone(&self, few: u64) -> bool {
        self.kind.once() && self.gones >= few && {
            let puts: u64 =
                self.layers.iter().flat_map(|layer| &layer.parts).map(|part| part.table.puts).sum();
            self.gones * 2 >= puts
        }
    }

    pub(super) fn seal(&mut self) -> Arc<Memory<K>> {
        let sealed = Arc::new(std::mem::take(&mut self.active));
        self.gones = 0;
        self.sealed = Some(sealed.clone());
        sealed
    }

    /// Prepares a read of at most `limit` rows.
    pub(super) fn view(&self, from: Bound<K>, to: Bound<K>, limit: usize) -> View<K> {
        let mut puts = 0;
        let mut recent = Vec::new();
        if !is_empty(&from, &to) {
            for (key, slot) in self.active.range((from.clone(), to.clone())) {
                recent.push((key.clone(), slot.clone()));
                puts += usize::from(matches!(slot, Slot::Put(_)));
                if puts == limit {
                    break;
                }
            }
        }
        View { recent, sealed: self.sealed.clone(), layers: self.layers.clone(), from, to, limit }
    }

    /// The same, but looking at a bounded number of entries in memory, which holds up the writer. The key is
    /// where it was cut, if it was: there may be more beyond.
    pub(super) fn view_some(&self, from: Bound<K>, to: Bound<K>, limit: usize) -> (View<K>, Option<K>) {
        let most = limit.saturating_add(4096);
        let cut = match is_empty(&from, &to) {
            true => None,
            false => self.active.range((from.clone(), to.clone())).nth(most).map(|(key, _)| key.clone()),
        };
        let to = cut.clone().map_or(to, Bound::Included);
        (self.view(from, to, limit), cut)
    }

    /// What a key stands for, as far as memory knows; the layers to ask if it does not.
    pub(super) fn find(&self, key: &K) -> Found<K> {
        let sealed = || self.sealed.as_ref().and_then(|sealed| sealed.get(key));
        self.active.get(key).or_else(sealed).cloned().ok_or_else(|| self.layers.clone())
    }
}

/// What memory knows of a key, or the layers to ask.
pub(super) type Found<K> = Result<Slot, Arc<Vec<Layer<K>>>>;

/// What a key stands for in some layers.
pub(super) fn find_in<K: TableKey>(layers: &[Layer<K>], key: &K) -> Result<Option<Value>, DirError> {
    for layer in layers {
        match layer.get(key)? {
            Some(Slot::Put(value)) => return Ok(Some(value)),
            Some(Slot::Gone) => return Ok(None),
            None => {}
        }
    }
    Ok(None)
}

fn is_empty<K: Ord>(from: &Bound<K>, to: &Bound<K>) -> bool {
    match (from, to) {
        (Bound::Included(a) | Bound::Excluded(a), Bound::Included(b)) => a > b,
        (Bound::Included(a) | Bound::Excluded(a), Bound::Excluded(b)) => a >= b,
        _ => false,
    }
}

impl<K: TableKey> View<K> {
    /// The rows that are there, in order.
    pub(super) fn rows(self) -> Result<Vec<(K, Value)>, DirError> {
        let mut rows = Vec::new();
        self.each(|key, value| rows.push((key, value)))?;
        Ok(rows)
    }

    /// Their keys alone: values, which may be large, are let go at once.
    pub(super) fn keys(self) -> Result<Vec<K>, DirError> {
        let mut keys = Vec::new();
        self.each(|key, _| keys.push(key))?;
        Ok(keys)
    }

    fn each(self, mut each: impl FnMut(K, Value)) -> Result<(), DirError> {
        let mut left = self.limit;
        if left == 0 || is_empty(&self.from, &self.to) {
            return Ok(());
        }
        let mut merge = Merge::new();
        merge.add(self.recent.into_iter().map(Ok))?;
        if let Some(sealed) = &self.sealed {
            let range = sealed.range((self.from.clone(), self.to.clone()));
            merge.add(range.map(|(key, slot)| Ok((key.clone(), slot.clone()))))?;
        }
        for layer in self.layers.iter() {
            merge.add(Walk::new(layer, &self.from, self.to.clone()))?;
        }
        while left > 0 {
            let Some(next) = merge.next() else { break };
            let (key, slot, _) = next?;
            if is_beyond(&key, &self.to) {
                break;
            }
            if let Slot::Put(value) = slot {
                each(key, value);
                left -= 1;
            }
        }
        Ok(())
    }
}

/// Walks through a layer.
struct Walk<'a, K> {
    parts: &'a [Part<K>],
    from: Bound<K>,
    to: Bound<K>,
    cursor: Option<Cursor<K>>,
}

impl<'a, K: TableKey> Walk<'a, K> {
    fn new(layer: &'a Layer<K>, from: &Bound<K>, to: Bound<K>) -> Walk<'a, K> {
        Walk { parts: &layer.parts[layer.from(from)..], from: from.clone(), to, cursor: None }
    }
}

impl<K: TableKey> Iterator for Walk<'_, K> {
    type Item = Result<(K, Slot), DirError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.cursor.as_mut().and_then(Iterator::next) {
                return Some(entry);
            }
            let (part, rest) = self.parts.split_first()?;
            if is_beyond(&part.table.first, &self.to) {
                return None;
            }
            self.parts = rest;
            self.cursor = Some(part.walk(&self.from));
        }
    }
}

fn is_beyond<K: Ord>(key: &K, to: &Bound<K>) -> bool {
    match to {
        Bound::Included(to) => key > to,
        Bound::Excluded(to) => key >= to,
        Bound::Unbounded => false,
    }
}

type Source<'a, K> = Box<dyn Iterator<Item = Result<(K, Slot), DirError>> + 'a>;

/// Merges sources in the order of their keys; of equal keys the first source's, which is the newest.
pub(super) struct Merge<'a, K> {
    heap: BinaryHeap<Reverse<Head<K>>>,
    sources: Vec<Source<'a, K>>,
}

struct Head<K> {
    key: K,
    source: usize,
    slot: Slot,
}

impl<K: Ord> PartialEq for Head<K> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<K: Ord> Eq for Head<K> {}

impl<K: Ord> PartialOrd for Head<K> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<K: Ord> Ord for Head<K> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key).then(self.source.cmp(&other.source))
    }
}

impl<'a, K: TableKey> Merge<'a, K> {
    pub(super) fn new() -> Merge<'a, K> {
        Merge { heap: BinaryHeap::new(), sources: Vec::new() }
    }

    fn add(
        &mut self,
        mut source: impl Iterator<Item = Result<(K, Slot), DirError>> + 'a,
    ) -> Result<(), DirError> {
        if let Some(first) = source.next() {
            let (key, slot) = first?;
            self.heap.push(Reverse(Head { key, slot, source: self.sources.len() }));
            self.sources.push(Box::new(source));
        }
        Ok(())
    }

    /// Takes the smallest entry and brings up the next of its source.
    fn pop(&mut self) -> Result<Option<(K, Slot)>, DirError> {
        let Some(mut top) = self.heap.peek_mut() else { return Ok(None) };
        let head = &mut top.0;
        match self.sources[head.source].next() {
            Some(next) => {
                let (key, slot) = next?;
                let key = std::mem::replace(&mut head.key, key);
                Ok(Some((key, std::mem::replace(&mut head.slot, slot))))
            }
            None => {
                let Reverse(head) = std::collections::binary_heap::PeekMut::pop(top);
                Ok(Some((head.key, head.slot)))
            }
        }
    }

    /// The next key, what it stands for, and whether an older put of it was passed over.
    pub(super) fn next(&mut self) -> Option<Result<(K, Slot, bool), DirError>> {
        let (key, slot) = match self.pop() {
            Ok(found) => found?,
            Err(error) => return Some(Err(error)),
        };
        let mut older_put = false;
        while self.heap.peek().is_some_and(|Reverse(head)| head.key == key) {
            match self.pop() {
                Ok(Some((_, slot))) => older_put |= matches!(slot, Slot::Put(_)),
                Ok(None) => break,
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Ok((key, slot, older_put)))
    }
}

/// Which layers to merge next, by their places; None if there is nothing to do.
pub(super) fn choose<K: TableKey>(
    layers: &[Layer<K>],
    is_settled: &dyn Fn(&K) -> bool,
    few: u64,
) -> Option<std::ops::Range<usize>> {
    if is_urgent(layers) {
        return same_size(layers);
    }
    let (mut puts, mut gones) = (0, 0);
    for part in layers.iter().flat_map(|layer| &layer.parts) {
        puts += part.table.puts;
        gones += part.table.gones + part.table.settled(is_settled);
    }
    // Above so many layers commits wait for a merge, so there must be one to do.
    if gones >= few && gones * 2 >= puts || layers.len() > MOST_LAYERS {
        return Some(0..layers.len());
    }
    same_size(layers)
}

/// Whether so many small layers have come that nothing else should be merged first.
pub(super) fn is_urgent<K>(layers: &[Layer<K>]) -> bool {
    layers.iter().take_while(|layer| layer.tier == 0).count() >= 2 * FAN
}

/// Runs of the same size that follow each other, if they are many.
fn same_size<K>(layers: &[Layer<K>]) -> Option<std::ops::Range<usize>> {
    let mut start = 0;
    while start < layers.len() {
        let same = layers[start..].iter().take_while(|layer| layer.tier == layers[start].tier).count();
        if same >= FAN {
            return Some(start..start + same);
        }
        start += same;
    }
    None
}

/// Where new tables get their numbers and their place, who may stop a merge, and whether there is room.
pub(super) struct Making<'a> {
    pub(super) dir: &'a Path,
    pub(super) number: &'a dyn Fn() -> u64,
    pub(super) stop: &'a dyn Fn() -> bool,
    pub(super) room: &'a dyn Fn() -> Result<(), DirError>,
    /// Bytes after which a table is full.
    pub(super) table: u64,
}

/// Writes entries in order into tables of bounded size. Until they are handed over they are nobody's, and
/// go when this goes: they would only take room away.
pub(super) struct Tables<'a, K: TableKey> {
    kind: Kind,
    making: &'a Making<'a>,
    writer: Option<Writer<K>>,
    /// In order, and whether it is new or was there before.
    made: Vec<(Part<K>, bool)>,
}

impl<'a, K: TableKey> Tables<'a, K> {
    fn new(kind: Kind, making: &'a Making<'a>) -> Self {
        Tables { kind, making, writer: None, made: Vec::new() }
    }

    fn add(&mut self, key: &K, slot: &Slot) -> Result<(), DirError> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => {
                (self.making.room)()?;
                none.insert(Writer::create(self.making.dir, (self.making.number)(), self.kind)?)
            }
        };
        writer.add(key, slot)
    }

    fn is_full(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.len() >= self.making.table)
    }

    fn end(&mut self) -> Result<(), DirError> {
        if let Some(writer) = self.writer.take() {
            let table = Arc::new(writer.finish(self.making.dir, self.kind)?);
            self.made.push((Part { table, above: None }, true));
        }
        Ok(())
    }

    fn carry(&mut self, part: Part<K>) {
        self.made.push((part, false));
    }

    /// The caller will name them.
    pub(super) fn hand_over(&mut self) -> Vec<Part<K>> {
        self.made.drain(..).map(|(part, _)| part).collect()
    }
}

impl<K: TableKey> Drop for Tables<'_, K> {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.abandon();
        }
        for (part, _) in self.made.iter().filter(|(_, new)| *new) {
            let _ = std::fs::remove_file(&part.table.path);
        }
    }
}

/// Writes what was in memory into tables. Deletes are left out if there is nothing below.
pub(super) fn flush<'a, K: TableKey>(
    kind: Kind,
    memory: &Memory<K>,
    bottom: bool,
    is_settled: &dyn Fn(&K) -> bool,
    making: &'a Making<'a>,
) -> Result<Tables<'a, K>, DirError> {
    let mut tables = Tables::new(kind, making);
    // Tasks come in the order of their ids, and deletes are of earlier ones: in tables of their own, so
    // that merging the deletes leaves the new tasks alone. The same of ends, which follow the tasks.
    let cuts = match kind {
        Kind::Tasks => cuts(memory),
        Kind::Rows | Kind::Records => [None; 3],
    };
    for (key, slot) in memory {
        if tables.is_full() || cuts.contains(&Some(key)) {
            tables.end()?;
        }
        if !(bottom && matches!(slot, Slot::Gone) || is_settled(key)) {
            tables.add(key, slot)?;
        }
    }
    tables.end()?;
    Ok(tables)
}

/// Where a table of tasks should end before the next begins: at the first task that is put, at the first end,
/// and at the first end that is put.
fn cuts<K: TableKey>(memory: &Memory<K>) -> [Option<&K>; 3] {
    let is_put = |(_, slot): &(&K, &Slot)| matches!(slot, Slot::Put(_));
    let is_end = |(key, _): &(&K, &Slot)| layout::is_end(key.bytes());
    let first = |found: Option<(_, _)>| found.map(|(key, _)| key);
    [
        first(memory.iter().find(|entry| is_put(entry) && !is_end(entry))),
        first(memory.iter().find(is_end)),
        first(memory.iter().find(|entry| is_put(entry) && is_end(entry))),
    ]
}

/// Merges layers into one. Each time a table is full, `commit` gets the parts made since the last time and
/// the key up to which the layers are merged (None: to their end), and says whether to go on. What is merged
/// can be let go at once, so a merge needs no more room than a table of each layer. Large tables that overlap
/// with no other are carried over as they are.
pub(super) fn merge<K: TableKey>(
    kind: Kind,
    layers: &[Layer<K>],
    bottom: bool,
    is_settled: &dyn Fn(&K) -> bool,
    making: &Making<'_>,
    mut commit: impl FnMut(Vec<Part<K>>, Option<&K>) -> Result<bool, DirError>,
) -> Result<(), DirError> {
    let mut tables = Tables::new(kind, making);
    let mut parts: Vec<(usize, &Part<K>)> = Vec::new();
    for (age, layer) in layers.iter().enumerate() {
        parts.extend(layer.parts.iter().map(|part| (age, part)));
    }
    parts.sort_by(|(_, a), (_, b)| lower(a).cmp(lower(b)));
    let mut rest = &parts[..];
    while let Some((first, _)) = rest.split_first() {
        // The parts that hang together by their keys.
        let mut last = &first.1.table.last;
        let mut together = 1;
        while let Some((_, part)) = rest.get(together).filter(|(_, part)| lower(part) <= last) {
            last = last.max(&part.table.last);
            together += 1;
        }
        let (group, others) = rest.split_at(together);
        rest = others;
        let table = &first.1.table;
        let as_it_is = !(bottom && table.gones > 0) && table.settled(is_settled) == 0;
        if together == 1 && as_it_is && table.len >= making.table / 4 {
            tables.end()?;
            tables.carry(first.1.clone());
            continue;
        }
        let mut by_age = group.to_vec();
        by_age.sort_by_key(|(age, _)| *age);
        let mut merge = Merge::new();
        for (_, part) in by_age {
            merge.add(part.walk(&Bound::Unbounded))?;
        }
        let mut seen = 0_u32;
        while let Some(next) = merge.next() {
            let (key, slot, older_put) = next?;
            seen = seen.wrapping_add(1);
            if seen.is_multiple_of(1024) && (making.stop)() {
                return Ok(());
            }
            let is_void = match slot {
                Slot::Put(_) => false,
                Slot::Gone => bottom || kind.once() && older_put,
            };
            if is_void || is_settled(&key) {
                continue;
            }
            tables.add(&key, &slot)?;
            if tables.is_full() {
                tables.end()?;
                if !commit(tables.hand_over(), Some(&key))? {
                    return Ok(());
                }
            }
        }
    }
    tables.end()?;
    commit(tables.hand_over(), None)?;
    Ok(())
}

/// The smallest key of a part, or one that is not above it.
fn lower<K: TableKey>(part: &Part<K>) -> &K {
    part.above.as_ref().unwrap_or(&part.table.first)
}
