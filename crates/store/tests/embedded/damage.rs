//! Files that are not what was written: a byte changed, an end cut off, a file gone, in every file of a
//! store and at many places. The store says which file is wrong, and where, or holds exactly what it held:
//! never anything else, and never a panic.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use evenhand_store::{Embedded, Store};
use tempfile::TempDir;

use crate::plan;
use crate::support::{Contents, Dice, Model, block_on, copy, files, read_all, small};

const SEGMENT: u64 = 64 * 1024;
/// So many that there are runs of tables in two sizes, and commits in the log.
const COMMITS: u64 = 700;
/// Places in each file where a byte is changed, beside the first and the last.
const FLIPS: u64 = 16;

const MARK: &str = "evenhand-store";

/// What is done to a file.
#[derive(Clone, Copy, Debug)]
enum Harm {
    Flip { at: u64 },
    Cut { to: u64 },
    Remove,
}

impl Harm {
    fn to(self, file: &Path) {
        let mut bytes = std::fs::read(file).unwrap();
        match self {
            Harm::Flip { at } => bytes[at as usize] ^= 0x10,
            Harm::Cut { to } => bytes.truncate(to as usize),
            Harm::Remove => return std::fs::remove_file(file).unwrap(),
        }
        std::fs::write(file, bytes).unwrap();
    }
}

/// What came of it.
enum Came {
    Unharmed,
    Noticed,
    Wrong(String),
}

/// What a file is: its ending, or its name.
fn kind(file: &Path) -> String {
    file.extension().or(file.file_name()).unwrap().to_str().unwrap().into()
}

/// A store that was left without notice, and what is in it.
fn given() -> (TempDir, Contents) {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path(), small(SEGMENT)).unwrap();
    block_on(async {
        let epoch = store.take(plan::SHARD, None).await.unwrap().epoch;
        for n in 1..=COMMITS {
            store.commit(plan::SHARD, epoch, plan::changes(n)).await.unwrap();
        }
    });
    (dir, Model::default().at(COMMITS))
}

/// Opens a store and reads all of it; an error as its text.
fn look(dir: &Path) -> Result<Contents, String> {
    let store = Embedded::open(dir, small(SEGMENT)).map_err(|error| error.to_string())?;
    let read = block_on(read_all(&store, plan::SHARD, &[plan::LANE], 100));
    read.map(|(_, contents)| contents).map_err(|error| error.to_string())
}

fn try_out(given: &Path, held: &Contents, file: &Path, harm: Harm) -> Came {
    let scratch = tempfile::tempdir_in(given.parent().unwrap()).unwrap();
    copy(given, scratch.path());
    let file = scratch.path().join(file);
    harm.to(&file);
    let is_mark = file.ends_with(MARK);
    match catch_unwind(AssertUnwindSafe(|| look(scratch.path()))) {
        Err(_) => Came::Wrong("it panicked".into()),
        Ok(Ok(contents)) if contents == *held => Came::Unharmed,
        Ok(Ok(contents)) => {
            let (tasks, of) = (contents.tasks.len(), held.tasks.len());
            Came::Wrong(format!("it has other contents, and does not say so ({tasks} tasks, not {of})"))
        }
        Ok(Err(text)) if text.contains("panicked") => Came::Wrong(text),
        // Another number there is another format.
        Ok(Err(text)) if is_mark && text.contains("store format") => Came::Noticed,
        Ok(Err(text)) => {
            let names_file = text.contains(file.to_str().unwrap());
            let names_place = text
                .split_once("at byte ")
                .is_some_and(|(_, at)| at.starts_with(|first: char| first.is_ascii_digit()));
            let named = names_file && (names_place || matches!(harm, Harm::Remove));
            if named { Came::Noticed } else { Came::Wrong(format!("it does not say where: {text}")) }
        }
    }
}

#[test]
fn a_store_that_lost_its_mark_is_not_made_anew() {
    let (dir, held) = given();
    if let Came::Wrong(what) = try_out(dir.path(), &held, Path::new(MARK), Harm::Remove) {
        panic!("{what}");
    }
}

#[test]
fn damage_is_named_or_does_no_harm() {
    let (dir, held) = given();
    let mut dice = Dice(3);
    let mut wrong = String::new();
    // Of each kind of file: how many, and how many changed bytes were noticed and how many were not.
    let mut noticed: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for file in files(dir.path()) {
        let name = file.strip_prefix(dir.path()).unwrap();
        if ["lock", "log/spare", "log/spare.new"].iter().any(|empty| name == Path::new(empty)) {
            continue;
        }
        let len = file.metadata().unwrap().len();
        let spread = (0..FLIPS).map(|n| (n * len + dice.below(len)) / FLIPS);
        let flips = [0, len - 1].into_iter().chain(spread).map(|at| Harm::Flip { at });
        let cuts = [0, len / 2, len - 1].map(|to| Harm::Cut { to });
        let of_kind = noticed.entry(kind(&file)).or_default();
        of_kind.0 += 1;
        // A store without its mark has a test of its own.
        let remove = (name != Path::new(MARK)).then_some(Harm::Remove);
        for harm in flips.chain(cuts).chain(remove) {
            match (try_out(dir.path(), &held, name, harm), harm) {
                (Came::Noticed, Harm::Flip { .. }) => of_kind.1 += 1,
                (Came::Unharmed, Harm::Flip { .. }) => of_kind.2 += 1,
                (Came::Noticed | Came::Unharmed, Harm::Cut { .. } | Harm::Remove) => {}
                (Came::Wrong(what), _) => {
                    writeln!(wrong, "{} ({len} bytes), {harm:?}: {what}", name.display()).unwrap()
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    for kind in [MARK, "manifest", "acked", "log", "rows", "tasks", "records"] {
        let (files, noticed, _) = *noticed.get(kind).unwrap_or_else(|| panic!("there is no file {kind}"));
        assert!(noticed > 0, "none of the bytes changed in {kind} was noticed");
        let is_table = matches!(kind, "rows" | "tasks" | "records");
        assert!(files > 2 || !is_table, "only {files} tables of {kind}");
    }
    println!("files, changed bytes that were noticed, and that were not: {noticed:?}");
}
