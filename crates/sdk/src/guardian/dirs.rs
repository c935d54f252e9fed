//! Directories of runs: where the files of a task are placed, and where its command works. A run without files has
//! none.
//!
//! ```text
//! WORK_DIR/SEAT@LOCK.LIFE/7     the directory of run 7 of this life
//! ```
//!
//! The worker makes a run's directory and fills it, because the guardian may not wait for a disk; and it removes it
//! when the guardian has said that none of the run's processes is left. Whatever else happens, the directory goes
//! with its life: a guardian removes that of its own life when it ends, and those of earlier lives of its seat when
//! it begins. These are known by their names, which begin as the markers of all runs of the seat do.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use evenhand_api::v1;
use evenhand_core::names::FileName;

/// Nobody else need look into it.
const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// The directories of one life's runs.
#[derive(Clone, Debug)]
pub(crate) struct Dirs {
    life: PathBuf,
}

impl Dirs {
    /// Of the life whose markers begin like this: `SEAT@LOCK.LIFE.`
    pub(super) fn new(work_dir: &Path, marker: &str) -> Dirs {
        Dirs { life: work_dir.join(marker.trim_end_matches('.')) }
    }

    /// Makes the directory of a run, with these files in it. Waits for the disk.
    pub(crate) fn fill(&self, run: u64, files: &[v1::File]) -> Result<PathBuf, String> {
        let dir = self.life.join(run.to_string());
        let filled = self.make(&dir).and_then(|()| files.iter().try_for_each(|file| place(&dir, file)));
        if let Err((path, error)) = filled {
            discard(&dir);
            return Err(format!("its files could not be placed: {}: {error}", path.display()));
        }
        Ok(dir)
    }

    fn make(&self, dir: &Path) -> Result<(), (PathBuf, io::Error)> {
        let made = DirBuilder::new().recursive(true).mode(DIR_MODE).create(&self.life);
        made.map_err(|error| (self.life.clone(), error))?;
        DirBuilder::new().mode(DIR_MODE).create(dir).map_err(|error| (dir.into(), error))
    }

    /// Removes all of them. None of the life's processes is left.
    pub(super) fn remove(self) -> JoinHandle<()> {
        // Whoever waits for our end, or for the seat, need not wait for a disk.
        std::thread::spawn(move || discard(&self.life))
    }
}

fn place(dir: &Path, file: &v1::File) -> Result<(), (PathBuf, io::Error)> {
    let path = dir.join(&file.name);
    // The server has checked it, but it is we who would write elsewhere.
    if let Err(refusal) = FileName::new(&file.name) {
        return Err((path, io::Error::new(io::ErrorKind::InvalidFilename, refusal.to_string())));
    }
    let mut options = OpenOptions::new();
    let opened = options.write(true).create_new(true).mode(FILE_MODE).open(&path);
    opened.and_then(|mut opened| opened.write_all(&file.content)).map_err(|error| (path, error))
}

/// Removes what earlier lives of a seat have left, in a thread of its own. `marker` is what the markers of all runs of
/// the seat begin with: `SEAT@LOCK.`
pub(super) fn sweep(work_dir: &Path, marker: &str) {
    let Ok(entries) = work_dir.read_dir() else { return };
    let named = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(marker.as_bytes());
    let left = entries.flatten().filter(|entry| named(&entry.file_name())).map(|entry| entry.path());
    let left: Vec<PathBuf> = left.collect();
    if !left.is_empty() {
        std::thread::spawn(move || left.iter().for_each(|dir| discard(dir)));
    }
}

/// Removes a directory with all that is in it. What cannot be removed is left to the next life.
pub(crate) fn discard(dir: &Path) {
    if let Err(error) = remove(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, dir = %dir.display(), "a directory of a run cannot be removed");
    }
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            // A command may have shut its own directories.
            unlock(dir);
            fs::remove_dir_all(dir)
        }
        removed => removed,
    }
}

/// Makes a directory, and those in it, such that they can be emptied. Goes through no link.
fn unlock(dir: &Path) {
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        // What cannot be done will show when it is removed.
        let _ = fs::set_permissions(&dir, Permissions::from_mode(DIR_MODE));
        let entries = dir.read_dir().into_iter().flatten().flatten();
        let is_dir = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        dirs.extend(entries.filter(is_dir).map(|entry| entry.path()));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn file(name: &str, content: &'static [u8]) -> v1::File {
        v1::File { name: name.into(), content: content.into() }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = dir.read_dir().unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_directory_holds_its_files_and_is_for_nobody_else() {
        let work = tempfile::tempdir().unwrap();
        let dirs = Dirs::new(&work.path().join("work"), "seat@1-2.3.");
        let dir = dirs.fill(7, &[file("a b", b"one"), file("-c", b"")]).unwrap();
        assert_eq!(dir, work.path().join("work/seat@1-2.3/7"));
        assert_eq!(fs::read(dir.join("a b")).unwrap(), b"one");
        assert_eq!(names(&dir), ["-c", "a b"]);
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        let modes = [work.path().join("work"), dir.clone(), dir.join("a b")].map(|path| mode(&path));
        assert_eq!(modes, [0o700, 0o700, 0o600]);
        dirs.clone().remove().join().unwrap();
        assert_eq!(names(&work.path().join("work")), [""; 0]);
        dirs.remove().join().unwrap();
    }

    #[test]
    fn what_cannot_be_placed_leaves_nothing_and_says_where() {
        let work = tempfile::tempdir().unwrap();
        let dirs = Dirs::new(work.path(), "seat@1-2.3.");
        let twice = dirs.fill(7, &[file("a", b"one"), file("a", b"two")]).unwrap_err();
        assert!(twice.starts_with("its files could not be placed: ") && twice.contains("/7/a: "), "{twice}");
        assert_eq!(names(&work.path().join("seat@1-2.3")), [""; 0]);
        // A name that leads elsewhere.
        let outside = work.path().join("outside");
        for name in ["../../outside", outside.to_str().unwrap(), "", ".", "..", "a/b", "a\0b"] {
            let refused = dirs.fill(7, &[file("a", b"one"), file(name, b"two")]).unwrap_err();
            assert!(refused.contains("name: "), "{name:?}: {refused}");
            assert!(!outside.exists());
            assert_eq!(names(&work.path().join("seat@1-2.3")), [""; 0]);
        }
        fs::write(work.path().join("no-directory"), "").unwrap();
        let dirs = Dirs::new(&work.path().join("no-directory"), "seat@1-2.3.");
        assert!(dirs.fill(7, &[]).unwrap_err().contains("no-directory"));
    }

    #[test]
    fn earlier_lives_of_the_seat_are_swept_and_no_others() {
        let work = tempfile::tempdir().unwrap();
        for life in ["seat@1-2.3.", "seat@1-2.4.", "seat@1-22.3.", "seat.b@1-2.3."] {
            Dirs::new(work.path(), life).fill(1, &[file("a", b"one")]).unwrap();
        }
        sweep(work.path(), "seat@1-2.");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while names(work.path()) != ["seat.b@1-2.3", "seat@1-22.3"] {
            assert!(std::time::Instant::now() < deadline, "{:?}", names(work.path()));
            std::thread::yield_now();
        }
        sweep(&work.path().join("none"), "seat@1-2.");
    }

    /// Root may do all of it anyway; then this says little.
    #[test]
    fn a_directory_that_its_command_has_shut_is_removed_too() {
        let work = tempfile::tempdir().unwrap();
        let dir = work.path().join("run");
        fs::create_dir_all(dir.join("a/b")).unwrap();
        fs::write(dir.join("a/b/c"), "").unwrap();
        std::os::unix::fs::symlink("/", dir.join("a/root")).unwrap();
        for shut in ["a/b", "a", ""] {
            fs::set_permissions(dir.join(shut), Permissions::from_mode(0o000)).unwrap();
        }
        unlock(&dir);
        assert_eq!(dir.join("a/b").metadata().unwrap().mode() & 0o777, 0o700);
        remove(&dir).unwrap();
        assert!(!dir.exists());
    }
}
