//! The manifest: which tables are live, in which layers, and from where the log is still needed. It is small
//! and replaced as a whole, so a flush or a merge has happened or has not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::bytes::{Get, Put, checksum};
use super::files::{Dir, DirError, damaged, read_small, replace};
use super::layout::{Kind, RecordKey, RowKey, TaskKey};
use super::table::{Table, TableKey};
use super::tree::{Layer, Part};

const MAGIC: &[u8; 8] = b"EVENHMAN";
const SEED: u64 = 4;
/// Far more than any store needs; a longer file is none of ours.
const MOST: u64 = 64 * 1024 * 1024;

/// What the manifest says.
#[derive(Clone, Debug, Default)]
pub(super) struct Standing {
    /// Commits up to this frame are in tables.
    pub(super) flushed: u64,
    /// The first segment of the log that is needed.
    pub(super) segment: u64,
    /// The number of the next table.
    pub(super) next_table: u64,
    /// The id of the next layer.
    pub(super) next_layer: u64,
    /// A number that no caller knows: where the checksums of the log begin.
    pub(super) secret: u64,
    pub(super) rows: Vec<Layer<RowKey>>,
    pub(super) tasks: Vec<Layer<TaskKey>>,
    pub(super) records: Vec<Layer<RecordKey>>,
}

pub(super) fn manifest_path(dir: &Path) -> PathBuf {
    dir.join("manifest")
}

impl Standing {
    pub(super) fn write(&self, dir: &Dir) -> Result<(), DirError> {
        let mut bytes = Vec::with_capacity(4096);
        bytes.put(MAGIC);
        for number in [self.flushed, self.segment, self.next_table, self.next_layer, self.secret] {
            bytes.put_u64(number);
        }
        put_layers(&mut bytes, &self.rows);
        put_layers(&mut bytes, &self.tasks);
        put_layers(&mut bytes, &self.records);
        bytes.put_u64(checksum(SEED, &bytes));
        replace(&dir.path, "manifest", "manifest.new", &bytes)
    }

    /// Reads it and opens the tables that it names.
    pub(super) fn read(dir: &Dir) -> Result<Standing, DirError> {
        let path = manifest_path(&dir.path);
        let Some(bytes) = read_small(&path, MOST)? else {
            return Err(DirError::Missing { file: path, what: "every store has one".into() });
        };
        let Some((summed, sum)) = bytes.split_last_chunk::<8>() else {
            return damaged(&path, 0, "it is too short");
        };
        if checksum(SEED, summed) != u64::from_le_bytes(*sum) {
            return damaged(&path, 0, "its checksum is wrong");
        }
        let get = &mut Get::new(summed);
        let (Some(magic), Some(flushed), Some(segment), Some(next_table), Some(next_layer), Some(secret)) =
            (get.take(8), get.u64(), get.u64(), get.u64(), get.u64(), get.u64())
        else {
            return damaged(&path, 0, "it is too short");
        };
        if magic != MAGIC {
            return damaged(&path, 0, "it is no manifest");
        }
        let tables = dir.tables();
        Ok(Standing {
            flushed,
            segment,
            next_table,
            next_layer,
            secret,
            rows: get_layers(get, &path, &tables, Kind::Rows)?,
            tasks: get_layers(get, &path, &tables, Kind::Tasks)?,
            records: get_layers(get, &path, &tables, Kind::Records)?,
        })
    }

    /// The numbers of all tables.
    pub(super) fn numbers(&self) -> Vec<u64> {
        fn of<K>(layers: &[Layer<K>]) -> impl Iterator<Item = u64> {
            layers.iter().flat_map(|layer| &layer.parts).map(|part| part.table.number)
        }
        of(&self.rows).chain(of(&self.tasks)).chain(of(&self.records)).collect()
    }
}

fn put_layers<K: TableKey>(bytes: &mut Vec<u8>, layers: &[Layer<K>]) {
    bytes.put_u32(layers.len() as u32);
    for layer in layers {
        bytes.put_u64(layer.id);
        bytes.put_u8(layer.tier);
        bytes.put_u32(layer.parts.len() as u32);
        for part in &layer.parts {
            bytes.put_u64(part.table.number);
            bytes.put_u64(part.table.len);
            // Nought for none; a key is never empty.
            let above = part.above.as_ref().map_or(&[][..], TableKey::bytes);
            bytes.put_u16(above.len() as u16);
            bytes.put(above);
        }
    }
}

fn get_layers<K: TableKey>(
    get: &mut Get<'_>,
    path: &Path,
    tables: &Path,
    kind: Kind,
) -> Result<Vec<Layer<K>>, DirError> {
    let mut layers = Vec::new();
    let wrong = |at: usize| damaged(path, at as u64, format!("its list of {} cannot be read", kind.name()));
    let Some(count) = get.u32() else { return wrong(get.at()) };
    for _ in 0..count {
        let (Some(id), Some(tier), Some(count)) = (get.u64(), get.u8(), get.u32()) else {
            return wrong(get.at());
        };
        let mut parts = Vec::new();
        for _ in 0..count {
            let (Some(number), Some(len), Some(above)) = (get.u64(), get.u64(), get.u16()) else {
                return wrong(get.at());
            };
            let Some(above) = get.take(above.into()) else { return wrong(get.at()) };
            let above = if above.is_empty() { None } else { K::from_bytes(above) };
            let table = Arc::new(Table::open(tables, number, kind, len)?);
            parts.push(Part { table, above });
        }
        layers.push(Layer { id, tier, parts });
    }
    Ok(layers)
}
