//! The witness: how a store knows that its directory is its newest copy, and not a backup that was put back.
//!
//! A copy looks like the store it was made of; what it lacks can only be known outside. So a store keeps one small
//! file in another directory, its *witness*, which holds a *stamp*: a number, and random bits that make it the only
//! one of its kind. Before anything is acknowledged that a copy must not lack unnoticed (a shard that is taken, a
//! worker that is saved, the mark of a good stop), a new stamp is drawn:
//!
//! 1. it becomes durable in the store, in the frame that holds all this, beside the one that the witness has;
//! 2. it becomes durable in the witness;
//! 3. whoever waits for the frame is told.
//!
//! A store is taken for the newest if its witness has the store's stamp, or the one before it.
//!
//! **An old copy is never taken for the newest.** What was acknowledged in a frame has had its stamp in the witness
//! since. A copy without that frame has neither this stamp nor a later one, as no stamp is drawn twice; so neither
//! of its two is what the witness has. That holds as well for copies that went different ways, each in turn with
//! the same witness: counting alone would give both the same number.
//!
//! **The newest is not taken for an old copy** because of a crash. Between 1 and 2 the witness has the stamp
//! before. A second step 1 cannot come before step 2: if writing the witness fails, the store fails and is opened
//! again, and opening writes the stamp that counts into the witness, after the log has become tables and is sure to
//! be on disk.
//!
//! **What an old copy does.** It goes on, but in doubt: its next frame with a stamp also says so for every shard
//! ([`Metadata::doubt`](evenhand_core::Metadata::doubt)). The stamp before that one is what the witness has; so
//! from then on the store is taken for the newest, with the doubt saved in it, and not before. If there is no
//! witness to be read, opening makes one with a stamp that no store has.
//!
//! The file is named after a number that was drawn for the store: so it is found wherever the directory is moved or
//! copied to, and directories of the same name, as in containers, do not share one.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::bytes::{Get, Put};
use super::files::{self, DirError};
use crate::Doubt;

/// The first line of the file.
const HEAD: &str = "evenhand witness 1";
/// More than the file is long.
const MOST_BYTES: u64 = 64 * 1024;

/// Tells one state of a store from every other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp {
    /// For people: a later one has a higher number.
    pub(super) number: u64,
    /// Makes it the only one.
    pub(super) random: u64,
}

impl Stamp {
    fn after(number: u64) -> Stamp {
        Stamp { number: number.saturating_add(1), random: files::random() }
    }
}

/// What the store itself remembers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Saved {
    /// Names the file.
    pub(super) id: u64,
    /// The last stamp.
    pub(super) stamp: Stamp,
    /// What the witness had when it was drawn.
    pub(super) before: Stamp,
    /// It was an old copy once: it may lack whole shards.
    pub(super) was_old: bool,
}

impl Saved {
    pub(super) fn put(&self, value: &mut Vec<u8>) {
        value.put_u64(self.id);
        for Stamp { number, random } in [self.stamp, self.before] {
            value.put_u64(number);
            value.put_u64(random);
        }
        value.put_u8(self.was_old.into());
    }

    pub(super) fn get(value: &[u8]) -> Option<Saved> {
        let get = &mut Get::new(value);
        let id = get.u64()?;
        let stamp = Stamp { number: get.u64()?, random: get.u64()? };
        let before = Stamp { number: get.u64()?, random: get.u64()? };
        let was_old = match get.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        Some(Saved { id, stamp, before, was_old })
    }

    pub(super) fn file_name(&self) -> String {
        format!("{:016x}", self.id)
    }
}

/// The witness of an open store.
#[derive(Debug)]
pub(super) struct Witness {
    dir: PathBuf,
    /// Where the store is, for people who find the file.
    store: PathBuf,
    /// What the file has.
    has: Stamp,
    saved: Saved,
    /// Why the store is taken for an old copy, until that is durable.
    old: Option<Doubt>,
}

/// Makes the directory that witnesses are in, and refuses one that would be copied with the store.
pub(super) fn prepare(dir: &Path, store: &Path) -> Result<(), DirError> {
    files::create_dirs(dir).map_err(|error| unusable(dir, &error))?;
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.into());
    if real(dir).starts_with(real(store)) {
        let what = "it is inside the store's directory, and would be copied and put back with it".into();
        return Err(DirError::Witness { dir: dir.into(), what });
    }
    Ok(())
}

/// An error of a file in there.
fn unusable(dir: &Path, error: &DirError) -> DirError {
    DirError::Witness { dir: dir.into(), what: error.to_string() }
}

impl Witness {
    /// Finds out whether the store is the newest, given what is durable in it and whether nobody has ever used it.
    pub(super) fn open(
        dir: &Path,
        store: &Path,
        saved: Option<Saved>,
        unused: bool,
    ) -> Result<Witness, DirError> {
        let file = |saved: &Saved| dir.join(saved.file_name());
        let (saved, has, old) = match saved {
            Some(saved) => {
                let file = file(&saved);
                match read(&file) {
                    Ok(Some(has)) if has == saved.stamp || has == saved.before => (saved, saved.stamp, None),
                    Ok(Some(has)) => {
                        let (store, witness) = (saved.stamp.number, has.number);
                        (saved, has, Some(Doubt::Behind { file, store, witness }))
                    }
                    Ok(None) => (saved, Stamp::after(saved.stamp.number), Some(Doubt::Missing { file })),
                    Err(what) => {
                        (saved, Stamp::after(saved.stamp.number), Some(Doubt::Unreadable { file, what }))
                    }
                }
            }
            None => {
                let saved = Saved { id: files::random(), ..Saved::default() };
                (saved, Stamp::after(0), (!unused).then_some(Doubt::Unwitnessed))
            }
        };
        let store = store.canonicalize().unwrap_or_else(|_| store.into());
        let mut witness = Witness { dir: dir.into(), store, has, saved, old };
        // Even if it has this stamp already: that may not be durable yet. And if it cannot be written, better now.
        witness.write(has)?;
        Ok(witness)
    }

    /// Why the store is taken for an old copy, as long as it has not been told so.
    pub(super) fn old(&self) -> Option<&Doubt> {
        self.old.as_ref()
    }

    /// Why a shard that nobody has taken yet may only be missing.
    pub(super) fn may_lack_shards(&self) -> Option<Doubt> {
        self.saved.was_old.then_some(Doubt::Shard)
    }

    /// What a frame is to save that holds what no copy may lack.
    pub(super) fn next(&self) -> Saved {
        let stamp = Stamp::after(self.saved.stamp.number.max(self.has.number));
        Saved { stamp, before: self.has, was_old: self.saved.was_old || self.old.is_some(), ..self.saved }
    }

    /// The frame is durable: so must the stamp be, before anybody hears of it.
    pub(super) fn saved(&mut self, saved: Saved) -> Result<(), DirError> {
        (self.saved, self.old) = (saved, None);
        self.write(saved.stamp)
    }

    fn write(&mut self, stamp: Stamp) -> Result<(), DirError> {
        let name = self.saved.file_name();
        let mut text = format!("{HEAD}\nstamp {} {:016x}\n", stamp.number, stamp.random);
        let _ = write!(
            text,
            "\nWith this file the Evenhand store that was last in\n{:?}\nnotices when it is an old copy of itself. Do not copy it, \
             nor put it back with the store.\n",
            self.store
        );
        files::replace(&self.dir, &name, &format!("{name}.new"), text.as_bytes())
            .map_err(|error| unusable(&self.dir, &error))?;
        self.has = stamp;
        Ok(())
    }
}

/// The stamp in a witness; None if there is no such file. An error says why it cannot be read.
fn read(file: &Path) -> Result<Option<Stamp>, String> {
    match files::read_small(file, MOST_BYTES) {
        Ok(Some(bytes)) => parse(&bytes).map(Some).ok_or_else(|| "it is not what a store writes".into()),
        Ok(None) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// The stamp in the bytes of a witness.
pub(super) fn parse(bytes: &[u8]) -> Option<Stamp> {
    let mut lines = std::str::from_utf8(bytes).ok()?.lines();
    if lines.next()? != HEAD {
        return None;
    }
    let (number, random) = lines.next()?.strip_prefix("stamp ")?.split_once(' ')?;
    (random.len() == 16)
        .then_some(Stamp { number: number.parse().ok()?, random: u64::from_str_radix(random, 16).ok()? })
}
