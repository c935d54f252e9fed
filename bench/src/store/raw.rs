//! What the store is compared with, doing as many bytes in the same run: the least that a durable store
//! could do. Nothing is encoded or summed, nothing can be found again, nothing is ever given back.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use evenhand_core::backlog::Level;
use evenhand_core::names::TaskId;

use crate::Failure;

/// How the file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// At its end, so that each sync has a new size to write too.
    Append,
    /// From front to back over what is there, again and again, as the store's log is.
    InPlace,
}

/// Bytes of a file that is written in place: as many as the store's segment.
const IN_PLACE: u64 = 32 * 1024 * 1024;

/// A file that is synced after each write.
#[derive(Debug)]
pub(super) struct Raw {
    path: PathBuf,
    file: File,
    how: How,
    at: u64,
    noise: Vec<u8>,
}

impl Raw {
    pub(super) fn create(path: &Path, how: How) -> Result<Raw, Failure> {
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
        let mut raw =
            Raw { path: path.into(), file: file.map_err(failed)?, how, at: 0, noise: vec![0xa5; 1 << 20] };
        if how == How::InPlace {
            for _ in 0..IN_PLACE >> 20 {
                raw.file.write_all(&raw.noise).map_err(failed)?;
            }
            raw.file.sync_all().map_err(failed)?;
            raw.file.rewind().map_err(failed)?;
        }
        Ok(raw)
    }

    /// Writes so many bytes and syncs them.
    pub(super) fn write(&mut self, bytes: u64) -> Result<u64, Failure> {
        self.write_io(bytes).map_err(|error| format!("{}: {error}", self.path.display()))
    }

    fn write_io(&mut self, bytes: u64) -> std::io::Result<u64> {
        if self.how == How::InPlace && self.at + bytes > IN_PLACE {
            self.at = self.file.seek(SeekFrom::Start(0))?;
        }
        let place = self.at;
        if self.noise.len() < bytes as usize {
            self.noise.resize(bytes as usize, 0xa5);
        }
        self.file.write_all(&self.noise[..bytes as usize])?;
        self.file.sync_data()?;
        self.at += bytes;
        Ok(place)
    }

    /// Gives the room back; the next write is the first.
    pub(super) fn empty(&mut self) -> Result<(), Failure> {
        let emptied = match self.how {
            How::Append => self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0))),
            How::InPlace => self.file.seek(SeekFrom::Start(0)),
        };
        self.at = emptied.map_err(|error| format!("{}: {error}", self.path.display()))?;
        Ok(())
    }
}

/// Where each task is, by its place in the lane and by its id.
#[derive(Debug, Default)]
pub(super) struct Index {
    rows: BTreeMap<Level, TaskId>,
    tasks: BTreeMap<TaskId, u64>,
}

impl Index {
    pub(super) fn insert(&mut self, places: &[(Level, TaskId)], at: u64) {
        for &(level, task) in places {
            self.rows.insert(level, task);
            self.tasks.insert(task, at);
        }
    }

    pub(super) fn remove(&mut self, places: &[(Level, TaskId)]) {
        for (level, task) in places {
            self.rows.remove(level);
            self.tasks.remove(task);
        }
    }
}
