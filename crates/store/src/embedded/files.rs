//! The directory and its files: names, the lock, the format mark, and the one error type that says which
//! file is wrong, at which byte, and what to do.
//!
//! ```text
//! DIR/evenhand-store       what this directory is, and in which format (text)
//! DIR/lock                 held by the process that has it open
//! DIR/manifest             which tables are live, and from where the log is needed
//! DIR/acked                the last commit that was acknowledged
//! DIR/log/00000007.log     commits that are in no table yet
//! DIR/tables/00000042.rows sorted tables, one kind of row each
//! ```
//!
//! Outside of it there is one more, the [witness](super::witness).

use std::fs::{File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::StoreError;

/// The format that this version writes. It reads those from [`OLDEST_FORMAT`] on, and turns a directory into
/// one of this when it is opened. 2 added records (workers, requests, the store's id) and a field of tasks; 3
/// added timers, tries, ends, settings, and what tasks, rows, queues and requests have to say of them; 4 added the
/// files of tasks, how long a task may take to its row, two ways for a run to end, and what settings and keys have to say
/// of classes, limits and rates. Each reads what those before it wrote as it is.
///
/// To change it: raise this number; teach [`Dir::open`] to turn a directory of the last format into one of
/// this (or to say that it cannot, and with which version it can); keep the directory of every earlier
/// format in `tests/formats` with a test that opens it; write it into the changelog.
pub const FORMAT: u32 = 4;
/// The oldest format that this version reads.
pub(super) const OLDEST_FORMAT: u32 = 1;

const MARK: &str = "evenhand-store";
const MARK_TEXT: &str = "This directory is an Evenhand store. Its files belong together: copy all or none.";

/// What can be wrong with a store's directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirError {
    /// The operating system said no.
    #[error("{}: {what}", file.display())]
    Io {
        /// Which file or directory.
        file: PathBuf,
        /// What was tried, and the system's answer.
        what: String,
        /// The answer was that there is no room.
        full: bool,
    },
    /// A file holds what was never written to it.
    #[error("{} is damaged at byte {at}: {what}. Restore the directory from a backup", file.display())]
    Damaged {
        /// Which file.
        file: PathBuf,
        /// Where.
        at: u64,
        /// What is wrong there.
        what: String,
    },
    /// A file is gone.
    #[error("{} is missing: {what}. Restore the directory from a backup", file.display())]
    Missing {
        /// Which file.
        file: PathBuf,
        /// How we know that it must be there.
        what: String,
    },
    /// Something has a right checksum, and yet is not what we write.
    #[error("{what} cannot be read, though its checksum is right; this is a bug")]
    Unreadable {
        /// What.
        what: String,
    },
    /// Another process has the directory open.
    #[error("{} is open in another process; stop that one first, two cannot share a store", dir.display())]
    Locked {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory is of another format.
    #[error(
        "{} has store format {found}, this version of Evenhand writes format {FORMAT} and reads those from {OLDEST_FORMAT} on; {}",
        dir.display(),
        if *found > FORMAT { "use the version that wrote it, or a later one" } else { "upgrade it step by step, as the changelog says" }
    )]
    Format {
        /// The directory.
        dir: PathBuf,
        /// Its format.
        found: u32,
    },
    /// The directory holds something else.
    #[error(
        "{} is not an Evenhand store: it has files, but no `{MARK}` among them; name an empty directory or a store",
        dir.display()
    )]
    Foreign {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory of the witness cannot be used.
    #[error(
        "the witness directory {} cannot be used: {what}. Make it a directory that can be written, or choose another with --witness",
        dir.display()
    )]
    Witness {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// There is no store.
    #[error("{} holds no store; name the directory that the server was given", dir.display())]
    Absent {
        /// The directory.
        dir: PathBuf,
    },
}

impl From<DirError> for StoreError {
    fn from(error: DirError) -> Self {
        let what = error.to_string();
        match error {
            DirError::Io { full: true, .. } => StoreError::Full { what },
            DirError::Io { full: false, .. }
            | DirError::Locked { .. }
            | DirError::Witness { .. }
            | DirError::Absent { .. } => StoreError::Unavailable { what },
            DirError::Damaged { .. }
            | DirError::Unreadable { .. }
            | DirError::Missing { .. }
            | DirError::Format { .. }
            | DirError::Foreign { .. } => StoreError::Corrupt { what },
        }
    }
}

impl DirError {
    /// The same, for a place where trying again when there is room would not do.
    pub(super) fn beyond_retry(self) -> DirError {
        if let DirError::Io { file, what, .. } = self {
            return DirError::Io { file, what, full: false };
        }
        self
    }
}

/// Says which file an answer of the operating system is about.
pub(super) trait About<T> {
    fn about(self, file: &Path, doing: &str) -> Result<T, DirError>;
}

impl<T> About<T> for io::Result<T> {
    fn about(self, file: &Path, doing: &str) -> Result<T, DirError> {
        self.map_err(|error| DirError::Io {
            file: file.into(),
            what: format!("{doing}: {error}"),
            full: matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded),
        })
    }
}

pub(super) fn damaged<T>(file: &Path, at: u64, what: impl Into<String>) -> Result<T, DirError> {
    Err(DirError::Damaged { file: file.into(), at, what: what.into() })
}

/// An open directory. Nobody else has it open as long as this lives.
#[derive(Debug)]
pub(super) struct Dir {
    pub(super) path: PathBuf,
    lock: File,
}

impl Drop for Dir {
    /// Closing the file would do if no child process had inherited it between its fork and its exec.
    fn drop(&mut self) {
        let _ = self.lock.unlock();
    }
}

impl Dir {
    /// Opens a store's directory, and makes an empty or missing one a store.
    pub(super) fn open(path: &Path) -> Result<Dir, DirError> {
        create_dirs(path)?;
        if !path.join(MARK).try_exists().about(path, "looking for a store")? {
            // A store that was being made when its process died has no mark yet, but its own names.
            for entry in path.read_dir().about(path, "listing")? {
                let name = entry.about(path, "listing")?.file_name();
                let ours =
                    ["lock", "log", "tables", "manifest", "manifest.new", "acked", MARK_NEW, "lost+found"];
                if !ours.iter().any(|own| name == *own) {
                    return Err(DirError::Foreign { dir: path.into() });
                }
            }
        }
        let dir = Dir { path: path.into(), lock: lock(path, true)? };
        create_dirs(&dir.log())?;
        create_dirs(&dir.tables())?;
        Ok(dir)
    }

    /// Opens a store's directory to look at it: nothing in it is changed.
    pub(super) fn look(path: &Path) -> Result<Dir, DirError> {
        if !path.join(MARK).try_exists().about(path, "looking for a store")? {
            let dir = path.into();
            return Err(if path.join("manifest").exists() {
                DirError::Missing { file: path.join(MARK), what: "the rest of a store is there".into() }
            } else if path.is_dir() && path.read_dir().about(path, "listing")?.next().is_some() {
                DirError::Foreign { dir }
            } else {
                DirError::Absent { dir }
            });
        }
        Ok(Dir { path: path.into(), lock: lock(path, false)? })
    }

    /// Which format it has, if it is a store: the mark is there, and of a format that we read.
    pub(super) fn format(&self) -> Result<Option<u32>, DirError> {
        let file = self.mark_path();
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return damaged(&file, 0, "it is not text");
            }
            Err(error) => return Err(error).about(&file, "reading"),
        };
        let found = text.strip_prefix("format ").and_then(|rest| rest.split_once('\n'));
        let Some((Ok(found), rest)) = found.map(|(number, rest)| (number.parse::<u32>(), rest)) else {
            return damaged(&file, 0, "its first line is not `format` and a number");
        };
        if !(OLDEST_FORMAT..=FORMAT).contains(&found) {
            return Err(DirError::Format { dir: self.path.clone(), found });
        }
        if rest.trim_end() != MARK_TEXT {
            return damaged(&file, text.len() as u64 - rest.len() as u64, "its text was changed");
        }
        Ok(Some(found))
    }

    /// Writes the mark: from now on it is a store.
    pub(super) fn mark(&self) -> Result<(), DirError> {
        replace(&self.path, MARK, MARK_NEW, format!("format {FORMAT}\n{MARK_TEXT}\n").as_bytes())
    }

    pub(super) fn mark_path(&self) -> PathBuf {
        self.path.join(MARK)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    pub(super) fn tables(&self) -> PathBuf {
        self.path.join("tables")
    }

    /// Bytes that the file system still has for us.
    pub(super) fn free(&self) -> Result<u64, DirError> {
        let answer = rustix::fs::statvfs(&self.path).map_err(io::Error::from);
        answer.map(|fs| fs.f_bavail * fs.f_frsize).about(&self.path, "asking for free space")
    }
}

const MARK_NEW: &str = "evenhand-store.new";

fn lock(path: &Path, create: bool) -> Result<File, DirError> {
    let file = path.join("lock");
    let opened = if create {
        OpenOptions::new().create(true).truncate(false).write(true).open(&file)
    } else {
        File::open(&file)
    };
    let opened = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(DirError::Missing { file, what: "every store has one".into() });
        }
        opened => opened.about(&file, "opening")?,
    };
    match opened.try_lock() {
        Ok(()) => Ok(opened),
        Err(TryLockError::WouldBlock) => Err(DirError::Locked { dir: path.into() }),
        Err(TryLockError::Error(error)) => Err(error).about(&file, "locking"),
    }
}

/// Writes a small file so that after a crash it is there as it was before, or as it is now.
pub(super) fn replace(dir: &Path, name: &str, temporary: &str, bytes: &[u8]) -> Result<(), DirError> {
    let (new, file) = (dir.join(temporary), dir.join(name));
    let written = File::create(&new).and_then(|mut opened| {
        opened.write_all(bytes)?;
        opened.sync_all()
    });
    written.about(&new, "writing")?;
    std::fs::rename(&new, &file).about(&file, "replacing")?;
    sync_dir(dir)
}

/// Creates a directory and those above it that are missing, with durable names.
pub(super) fn create_dirs(path: &Path) -> Result<(), DirError> {
    let absolute = std::path::absolute(path).about(path, "looking for it")?;
    let missing: Vec<&Path> = absolute.ancestors().take_while(|dir| !dir.exists()).collect();
    std::fs::create_dir_all(&absolute).about(path, "creating the directory")?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_dir)
}

/// Makes the names in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), DirError> {
    File::open(dir).and_then(|opened| opened.sync_all()).about(dir, "syncing the directory")
}

/// A random number.
pub(super) fn random() -> u64 {
    // The standard library's hashers begin with random numbers, which is all we need of one.
    RandomState::new().hash_one(())
}

/// Reads a small file; None if it is not there.
pub(super) fn read_small(file: &Path, most: u64) -> Result<Option<Vec<u8>>, DirError> {
    let opened = match File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).about(file, "opening"),
    };
    let mut bytes = Vec::new();
    opened.take(most + 1).read_to_end(&mut bytes).about(file, "reading")?;
    if bytes.len() as u64 > most {
        return damaged(file, most, "it is longer than it can be");
    }
    Ok(Some(bytes))
}

/// Numbered files of a directory, `00000042.rows` as (42, "rows"), in order. Others are not ours.
pub(super) fn numbered(dir: &Path) -> Result<Vec<(u64, String, PathBuf)>, DirError> {
    let mut found = Vec::new();
    for entry in dir.read_dir().about(dir, "listing")? {
        let path = entry.about(dir, "listing")?.path();
        let number = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse().ok());
        let kind = path.extension().and_then(|kind| kind.to_str()).map(String::from);
        if let (Some(number), Some(kind)) = (number, kind) {
            found.push((number, kind, path));
        }
    }
    found.sort();
    Ok(found)
}
