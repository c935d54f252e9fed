//! What a store takes on disk and in memory.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Failure;

/// A directory that is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(under: &Path) -> Result<Scratch, Failure> {
        let path = under.join(format!("run-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Scratch(path))
    }

    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        // Only if nobody else uses it.
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// Bytes that a directory takes on disk, as `du` counts them.
pub(super) fn disk_bytes(dir: &Path) -> u64 {
    files(dir).iter().filter_map(|path| path.metadata().ok()).map(|file| 512 * file.blocks()).sum()
}

/// Every file below a directory. What vanishes meanwhile is left out.
pub(super) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(files(&entry.path())),
            Ok(_) => found.push(entry.path()),
            Err(_) => {}
        }
    }
    found.sort();
    found
}

/// A line of this process's status in bytes, such as VmRSS or VmHWM.
pub(super) fn memory_bytes(line: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let found = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
    let kib = found.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
