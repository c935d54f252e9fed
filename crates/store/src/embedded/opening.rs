//! Opening a directory: making an empty one a store, reading what is there, and writing what the log held
//! into tables before anything is built on it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Options;
use super::files::{About, Dir, DirError, damaged, numbered, random, sync_dir};
use super::layout::Kind;
use super::log::{self, Acked, LastAcked, Replayed, Segment};
use super::manifest::Standing;
use super::reads::Reads;
use super::tree::{self, Layer, Making, Memory, Part};
use super::trees::{Planted, Trees};

/// What is on disk, read without changing anything.
pub(super) struct Loaded {
    pub(super) standing: Standing,
    pub(super) trees: Trees,
    pub(super) replayed: Replayed,
}

/// Reads the manifest, the tables' indexes and the log.
pub(super) fn load(dir: &Dir) -> Result<Loaded, DirError> {
    let standing = Standing::read(dir)?;
    let mut trees = Trees::of(&standing);
    let each = |path: &Path, buffer: &Arc<Vec<u8>>, start: usize, end: usize| {
        trees
            .apply(buffer, start, end)
            .map_or_else(|| damaged(path, start as u64, "a commit says what this version does not know"), Ok)
    };
    let Standing { segment, flushed, secret, .. } = standing;
    let replayed = log::replay(&dir.path, &dir.log(), segment, flushed, secret, each)?;
    let mut loaded = Loaded { standing, trees, replayed };
    loaded.trees.acks = loaded.acks()?;
    Ok(loaded)
}

impl Reads for Loaded {
    fn with<T>(&self, look: impl FnOnce(&Trees) -> T) -> T {
        look(&self.trees)
    }
}

/// Every table is an open file, and a large store has more of them than the usual soft limit allows.
pub(super) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, opening a table will say so when it comes to that.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Makes an empty store, or ends what an earlier try began. The mark comes last; a directory that has lost
/// its mark is no empty store.
pub(super) fn begin(dir: &Dir, options: &Options) -> Result<(), DirError> {
    let lost = |what: &str| Err(DirError::Missing { file: dir.mark_path(), what: what.into() });
    if dir.path.join("manifest").exists() {
        return match load(dir)?.replayed.last {
            0 => dir.mark(),
            _ => lost("there are commits in the directory"),
        };
    }
    if !numbered(&dir.tables())?.is_empty() {
        return lost("there are tables in the directory");
    }
    if Acked::read(&dir.path).is_ok_and(|acked| acked.frame > 0) {
        return lost("commits were acknowledged in the directory");
    }
    for (_, _, path) in numbered(&dir.log())? {
        std::fs::remove_file(&path).about(&path, "removing")?;
    }
    let secret = random();
    log::prepare_spare(&dir.log(), None, options.segment)?;
    Segment::begin(&dir.log(), 1, 1, secret)?;
    let acked = Acked::open(&dir.path)?;
    acked.say(LastAcked { frame: 0, segment: 1 })?;
    acked.sync()?;
    Standing { segment: 1, next_table: 1, next_layer: 1, secret, ..Standing::default() }.write(dir)?;
    if let Some(parent) = dir.path.parent().filter(|parent| parent.is_dir()) {
        // An earlier try may have made the directory and died before its name was durable.
        sync_dir(parent)?;
    }
    dir.mark()
}

/// Writes what the log held into tables and begins a new segment.
pub(super) fn checkpoint(
    dir: &Dir,
    options: &Options,
    loaded: Loaded,
) -> Result<(Standing, Trees, Segment), DirError> {
    let Loaded { mut standing, mut trees, replayed } = loaded;
    let log = dir.log();
    // Tables that a flush or a merge did not come to name.
    let named: BTreeSet<u64> = standing.numbers().into_iter().collect();
    for (number, _, path) in numbered(&dir.tables())? {
        if !named.contains(&number) {
            std::fs::remove_file(&path).about(&path, "removing")?;
        }
    }
    if !trees.is_empty() {
        let next_table = AtomicU64::new(standing.next_table);
        let making = Making {
            dir: &dir.tables(),
            number: &|| next_table.fetch_add(1, Ordering::SeqCst),
            stop: &|| false,
            room: &|| Ok(()),
            table: options.table,
        };
        flush_one(&mut standing, &trees.rows.seal(), Kind::Rows, &making)?;
        flush_one(&mut standing, &trees.tasks.seal(), Kind::Tasks, &making)?;
        flush_one(&mut standing, &trees.records.seal(), Kind::Records, &making)?;
        standing.next_table = next_table.into_inner();
        sync_dir(&dir.tables())?;
        trees = Trees { acks: trees.acks, ..Trees::of(&standing) };
    }
    if standing.flushed != replayed.last {
        // Before the next segment begins: what the tables hold need not be in the log any more.
        standing.flushed = replayed.last;
        standing.write(dir)?;
    }
    let (mut used, first) = (replayed.segments, replayed.last + 1);
    let segment = match used.pop_if(|last| last.is_empty()) {
        Some(empty) => Segment::resume(&log, empty.number, first, standing.secret)?,
        None => {
            log::prepare_spare(&log, None, options.segment)?;
            let number = used.last().map_or(standing.segment, |last| last.number + 1);
            Segment::begin(&log, number, first, standing.secret)?
        }
    };
    standing.segment = segment.number;
    standing.write(dir)?;
    // Those that were read, and those that a flush did not come to give away.
    for (number, kind, path) in numbered(&log)? {
        if kind == "log" && number < segment.number {
            log::prepare_spare(&log, Some(&path), options.segment)?;
        }
    }
    log::prepare_spare(&log, None, options.segment)?;
    Ok((standing, trees, segment))
}

fn flush_one<K: Planted>(
    standing: &mut Standing,
    memory: &Memory<K>,
    kind: Kind,
    making: &Making<'_>,
) -> Result<(), DirError> {
    let bottom = K::layers(standing).is_empty();
    let parts = tree::flush(kind, memory, bottom, &|_| false, making)?.hand_over();
    add_layer(standing, parts);
    Ok(())
}

pub(super) fn add_layer<K: Planted>(standing: &mut Standing, parts: Vec<Part<K>>) {
    if !parts.is_empty() {
        let layer = Layer { id: standing.next_layer, tier: 0, parts };
        standing.next_layer += 1;
        K::layers(standing).insert(0, layer);
    }
}
