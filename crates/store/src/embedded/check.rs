//! Looking at a directory without opening it for work: is it whole ([`check`]), and what is in it
//! ([`info`]). Both change nothing, and both refuse a directory that a server has open.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use evenhand_core::change::{Place, QueueRecord, Timed};
use evenhand_core::names::{Epoch, Key, LaneId, QueueId, ShardId, TaskId};
use evenhand_core::{Bounds, Shard};

use super::bytes::checksum;
use super::files::{About, Dir, DirError, FORMAT, damaged};
use super::layout::{self, Kind, LanePrefix, RowKey, TIMERS};
use super::opening::{Loaded, load};
use super::reads::{Reads, end_of, parked_row, row, timer};
use super::table::{Slot, Table, TableKey};
use super::tree::Layer;
use super::trees::Planted;
use crate::Wanted;
use crate::values;

/// Is told how far the work is: bytes done, and bytes in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// What is wrong, each naming file and place where it can. Empty: the directory is whole.
    pub problems: Vec<String>,
    /// Files that were read.
    pub files: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Tasks found, those that have ended included.
    pub tasks: u64,
    /// Those of them that have ended.
    pub ended: u64,
    /// Rows found in lanes.
    pub rows: u64,
    /// Timers found.
    pub timers: u64,
}

/// What is in a store.
#[derive(Clone, Debug, PartialEq)]
pub struct Info {
    /// Its format.
    pub format: u32,
    /// Bytes of all its files.
    pub bytes: u64,
    /// The number of the last commit.
    pub commits: u64,
    /// Commits that are in the log alone.
    pub commits_in_log: u64,
    /// Bytes of the log's segments.
    pub log_bytes: u64,
    /// Bytes of a commit at the end of the log that was never finished, nor acknowledged.
    pub unfinished_bytes: u64,
    /// Its tables by kind.
    pub tables: Vec<TableInfo>,
    /// Its shards.
    pub shards: Vec<ShardInfo>,
    /// What it remembers of its witness, if it has one.
    pub witness: Option<WitnessInfo>,
}

/// What a store remembers of its witness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WitnessInfo {
    /// The name of its file, in the directory that the server was given for it.
    pub file: String,
    /// The number of the last stamp.
    pub stamp: u64,
}

/// The tables of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableInfo {
    /// rows, tasks or records.
    pub kind: &'static str,
    /// Sorted layers, each of which a read may have to look into.
    pub layers: u64,
    /// Tables.
    pub tables: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Entries that put something.
    pub puts: u64,
    /// Entries that delete something.
    pub deletes: u64,
}

/// A shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardInfo {
    /// Its number.
    pub shard: ShardId,
    /// Its owner's epoch.
    pub epoch: Epoch,
    /// The next seq.
    pub next_seq: u64,
    /// Keys that its lanes remember.
    pub keys: u64,
    /// Tasks whose rows are set aside, because they run long.
    pub aside: u64,
    /// For how long there may be workers that the store does not know of, in milliseconds: it was an old copy.
    pub doubt_ms: Option<u64>,
    /// Its queues.
    pub queues: Vec<QueueInfo>,
}

/// A queue.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueInfo {
    /// Its name and counts.
    pub record: QueueRecord,
    /// Lanes that it has.
    pub lanes: u64,
    /// Keys that they remember.
    pub keys: u64,
}

/// Looks into a store.
pub fn info(dir: impl AsRef<Path>, progress: Progress<'_>) -> Result<Info, DirError> {
    let dir = look(dir.as_ref())?;
    let loaded = load(&dir)?;
    let total = tables_of(Kind::Records, &loaded.standing.records).bytes;
    let mut done = 0;
    let mut shards = Vec::new();
    for shard in loaded.shards()? {
        let metadata = loaded.metadata(shard, &mut |bytes| {
            done += bytes;
            progress(done.min(total), total);
        })?;
        let (mut lanes, mut keys) = (BTreeMap::new(), BTreeMap::new());
        metadata.lanes.iter().for_each(|(lane, _)| *lanes.entry(lane.queue).or_default() += 1);
        metadata.keys.iter().for_each(|(lane, ..)| *keys.entry(lane.queue).or_default() += 1);
        let queues = metadata.queues.iter().map(|(id, record)| QueueInfo {
            record: record.clone(),
            lanes: lanes.get(id).copied().unwrap_or(0),
            keys: keys.get(id).copied().unwrap_or(0),
        });
        shards.push(ShardInfo {
            shard,
            epoch: loaded.epoch(shard)?,
            next_seq: metadata.next_seq,
            keys: metadata.keys.len() as u64,
            aside: metadata.aside.len() as u64,
            doubt_ms: metadata.doubt,
            queues: queues.collect(),
        });
    }
    progress(total, total);
    let standing = &loaded.standing;
    Ok(Info {
        format: FORMAT,
        bytes: bytes_of(&dir.path)?,
        commits: loaded.replayed.last,
        commits_in_log: loaded.replayed.last - standing.flushed,
        log_bytes: bytes_of(&dir.log())?,
        unfinished_bytes: loaded.replayed.unfinished,
        tables: vec![
            tables_of(Kind::Rows, &standing.rows),
            tables_of(Kind::Tasks, &standing.tasks),
            tables_of(Kind::Records, &standing.records),
        ],
        shards,
        witness: loaded
            .witness()?
            .map(|saved| WitnessInfo { file: saved.file_name(), stamp: saved.stamp.number }),
    })
}

/// Reads every byte of a store and says what is wrong. An error means that the check could not be done.
pub fn check(dir: impl AsRef<Path>, progress: Progress<'_>) -> Result<Checked, DirError> {
    let dir = look(dir.as_ref());
    let loaded = match dir.and_then(|dir| load(&dir)) {
        Ok(loaded) => loaded,
        Err(error @ (DirError::Damaged { .. } | DirError::Missing { .. })) => {
            // Nothing else can be told of a store that cannot be opened.
            return Ok(Checked { problems: vec![error.to_string()], ..Checked::default() });
        }
        Err(error) => return Err(error),
    };
    let mut checked = Checked::default();
    for segment in &loaded.replayed.segments {
        checked.files += 1;
        checked.bytes += segment.used;
    }
    let standing = &loaded.standing;
    let rows = tables_of(Kind::Rows, &standing.rows).bytes;
    let tasks = tables_of(Kind::Tasks, &standing.tasks).bytes;
    let records = tables_of(Kind::Records, &standing.records).bytes;
    // Tables are read twice: each for itself, and all together.
    let total = checked.bytes + 2 * (rows + tasks + records);
    let mut done = checked.bytes;
    let mut advance = |bytes: u64| {
        done += bytes;
        progress(done.min(total), total);
    };
    check_tables(&mut checked, &standing.rows, &mut advance)?;
    check_tables(&mut checked, &standing.tasks, &mut advance)?;
    check_tables(&mut checked, &standing.records, &mut advance)?;
    if checked.problems.is_empty() {
        for shard in loaded.shards()? {
            check_shard(&mut checked, &loaded, shard, &mut advance)?;
        }
    }
    progress(total, total);
    Ok(checked)
}

fn look(path: &Path) -> Result<Dir, DirError> {
    let dir = Dir::look(path)?;
    dir.format()?;
    Ok(dir)
}

fn tables_of<K: TableKey>(kind: Kind, layers: &[Layer<K>]) -> TableInfo {
    let mut info = TableInfo {
        kind: kind.name(),
        layers: layers.len() as u64,
        tables: 0,
        bytes: 0,
        puts: 0,
        deletes: 0,
    };
    for part in layers.iter().flat_map(|layer| &layer.parts) {
        info.tables += 1;
        info.bytes += part.table.len;
        info.puts += part.table.puts;
        info.deletes += part.table.gones;
    }
    info
}

/// Bytes of the files in a directory and below.
fn bytes_of(dir: &Path) -> Result<u64, DirError> {
    let mut bytes = 0;
    for entry in dir.read_dir().about(dir, "listing")? {
        let entry = entry.about(dir, "listing")?;
        let metadata = entry.metadata().about(&entry.path(), "asking for its length")?;
        bytes += if metadata.is_dir() { bytes_of(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

/// Reads each table for itself: checksums, order, counts.
fn check_tables<K: TableKey>(
    checked: &mut Checked,
    layers: &[Layer<K>],
    advance: &mut dyn FnMut(u64),
) -> Result<(), DirError> {
    for part in layers.iter().flat_map(|layer| &layer.parts) {
        checked.files += 1;
        checked.bytes += part.table.len;
        match check_table(&part.table) {
            Ok(()) => {}
            Err(error @ DirError::Damaged { .. }) => checked.problems.push(error.to_string()),
            Err(error) => return Err(error),
        }
        advance(part.table.len);
    }
    Ok(())
}

fn check_table<K: TableKey>(table: &Arc<Table<K>>) -> Result<(), DirError> {
    let (mut puts, mut gones, mut last) = (0, 0, None);
    for entry in table.walk(Bound::Unbounded) {
        let (key, slot) = entry?;
        if last.as_ref().is_some_and(|last| *last >= key) {
            return damaged(&table.path, 0, "its keys are not in order");
        }
        match slot {
            Slot::Put(_) => puts += 1,
            Slot::Gone => gones += 1,
        }
        last = Some(key);
    }
    if (puts, gones) != (table.puts, table.gones) || last.as_ref() != Some(&table.last) {
        return damaged(&table.path, table.len, "its foot does not say what is in it");
    }
    Ok(())
}

/// What a set of (task, place) looks like, whatever its order.
#[derive(Debug, Default, PartialEq)]
struct Sum {
    count: u64,
    sum: u64,
}

impl Sum {
    /// Of a task and the key of its row.
    fn add(&mut self, task: TaskId, at: &[u8]) {
        self.count += 1;
        self.sum = self.sum.wrapping_add(checksum(task.0, at));
    }

    /// Of a task wherever it is.
    fn add_task(&mut self, task: TaskId) {
        self.add(task, &[]);
    }
}

/// What is parked of a key: as its rows say, and as its tasks do.
#[derive(Default)]
struct Shelf {
    rows: Sum,
    tasks: Sum,
}

/// What a shard's rows, tasks and ends say, to be compared.
#[derive(Default)]
struct Story {
    by_rows: BTreeMap<LanePrefix, Sum>,
    by_tasks: BTreeMap<LanePrefix, Sum>,
    /// Tasks that wait for a time, by queue.
    scheduled: BTreeMap<QueueId, u64>,
    /// What is parked beside a lane, by lane and key.
    parked: BTreeMap<(LaneId, Key), Shelf>,
    /// Tasks that have ended: as they say, as their ends say, and as the timers say that will forget them.
    over: Sum,
    ends: Sum,
    to_forget: Sum,
}

/// Whether rows, tasks and records tell the same story.
fn check_shard(
    checked: &mut Checked,
    loaded: &Loaded,
    shard: ShardId,
    advance: &mut dyn FnMut(u64),
) -> Result<(), DirError> {
    let metadata = loaded.metadata(shard, advance)?;
    let mut story = Story::default();
    read_rows(checked, &mut story, loaded, shard, advance)?;
    read_parked(&mut story, loaded, shard, advance)?;
    read_tasks(checked, &mut story, loaded, shard, advance)?;
    check_records(checked, loaded, shard)?;
    let mut wrong = |what: String| checked.problems.push(format!("shard {shard}: {what}"));

    let lanes: BTreeSet<&LanePrefix> = story.by_rows.keys().chain(story.by_tasks.keys()).collect();
    for lane in lanes {
        let (rows, tasks) = (story.by_rows.get(lane), story.by_tasks.get(lane));
        if rows != tasks {
            let count = |sum: Option<&Sum>| sum.map_or(0, |sum| sum.count);
            let (rows, tasks) = (count(rows), count(tasks));
            wrong(if *lane == layout::lane_prefix(shard, TIMERS) {
                format!(
                    "{rows} timers are of tasks that wait for them, and {tasks} tasks say that they do, not the same"
                )
            } else {
                let queue = u32::from_be_bytes([lane[4], lane[5], lane[6], lane[7]]);
                format!(
                    "lane {queue}/{}/{} has {rows} rows, and {tasks} tasks say that they wait there, not the same",
                    lane[8], lane[9],
                )
            });
        }
    }
    if story.over != story.ends || story.ends != story.to_forget {
        wrong(format!(
            "{} tasks have ended, {} ends are remembered, and {} timers are there to forget them, not the same",
            story.over.count, story.ends.count, story.to_forget.count,
        ));
    }
    for (queue, record) in &metadata.queues {
        let (counted, found) = (record.totals.scheduled, story.scheduled.remove(queue).unwrap_or_default());
        if counted != found {
            let name = &record.name;
            wrong(format!("queue {name} counts {counted} tasks that wait for a time, and {found} do"));
        }
    }
    for ((lane, key), Shelf { rows, tasks }) in &story.parked {
        if rows != tasks {
            let (rows, tasks) = (rows.count, tasks.count);
            wrong(format!(
                "key {key} has {rows} rows beside lane {lane}, and {tasks} tasks say that they are parked there, \
                 not the same"
            ));
        }
    }
    for (lane, key, record) in &metadata.parked {
        let found = story.parked.remove(&(*lane, key.clone())).unwrap_or_default().tasks.count;
        if record.rows != found {
            let counted = record.rows;
            wrong(format!("key {key} counts {counted} tasks parked beside lane {lane}, and has {found}"));
        }
    }
    if let Some(((lane, key), shelf)) = story.parked.first_key_value() {
        let found = shelf.tasks.count;
        wrong(format!("{found} tasks of key {key} are parked beside lane {lane}, where it has no record"));
    }
    if let Some((queue, found)) = story.scheduled.first_key_value() {
        wrong(format!("{found} tasks wait for a time in queue {queue}, which does not exist"));
    }
    if let Err(what) = Shard::new(Bounds::default(), loaded.epoch(shard)?, 0, metadata) {
        wrong(what.to_string());
    }
    Ok(())
}

/// Reads every row and every timer.
fn read_rows(
    checked: &mut Checked,
    story: &mut Story,
    loaded: &Loaded,
    shard: ShardId,
    advance: &mut dyn FnMut(u64),
) -> Result<(), DirError> {
    let timers = layout::lane_prefix(shard, TIMERS);
    let (from, to) = layout::rows_of(shard);
    loaded.walk::<RowKey>(Bound::Included(from), Bound::Included(to), |key, value| {
        advance((key.bytes().len() + value.bytes().len()) as u64);
        let lane = layout::lane_of(key);
        if key.is_settled(&loaded.trees.acks) {
            return Ok(());
        }
        if lane != timers {
            checked.rows += 1;
            story.by_rows.entry(lane).or_default().add(row(key, value)?.task, key.bytes());
            return Ok(());
        }
        checked.timers += 1;
        let timer = timer(key, value)?;
        match timer.what {
            Timed::Due(of, _) => {
                *story.scheduled.entry(of.queue).or_default() += 1;
                story.by_rows.entry(lane).or_default().add(timer.task, key.bytes());
            }
            Timed::Forget { .. } => story.to_forget.add_task(timer.task),
            // Their tasks may have ended before, or be gone.
            Timed::Expire | Timed::Detach => {}
        }
        Ok(())
    })
}

/// Reads every parked row.
fn read_parked(
    story: &mut Story,
    loaded: &Loaded,
    shard: ShardId,
    advance: &mut dyn FnMut(u64),
) -> Result<(), DirError> {
    loaded.records(shard, layout::PARKED_ROW..=layout::PARKED_ROW, |at, value| {
        advance((at.len() + value.bytes().len()) as u64);
        let (lane, row) = parked_row(at, value)?;
        story.parked.entry((lane, row.key)).or_default().rows.add(row.task, at);
        Ok(())
    })
}

/// Reads every task and every end.
fn read_tasks(
    checked: &mut Checked,
    story: &mut Story,
    loaded: &Loaded,
    shard: ShardId,
    advance: &mut dyn FnMut(u64),
) -> Result<(), DirError> {
    let mut after = TaskId(0);
    loop {
        let listing = loaded.list(shard, Wanted::default(), after, 1_000)?;
        for task in &listing.tasks {
            advance(task.input_bytes() as u64);
            checked.tasks += 1;
            let (lane, level) = match task.place {
                Place::Lane(level) => (task.lane, level),
                Place::Timer(level) => (TIMERS, level),
                Place::Parked(level) => {
                    let at = layout::parked_row_key(shard, task.lane, &task.key, level);
                    story.parked.entry((task.lane, task.key.clone())).or_default().tasks.add(task.id, &at);
                    continue;
                }
                Place::Aside => continue,
                Place::Over => {
                    checked.ended += 1;
                    story.over.add_task(task.id);
                    continue;
                }
            };
            let lane = layout::lane_prefix(shard, lane);
            story.by_tasks.entry(lane).or_default().add(task.id, layout::row_key(lane, level).bytes());
        }
        match listing.more {
            Some(last) => after = last,
            None => break,
        }
    }
    let from = Bound::Included(layout::end_key(shard, TaskId(0)));
    let to = Bound::Included(layout::end_key(shard, layout::LAST_TASK));
    loaded.walk(from, to, |key, value| {
        advance(value.bytes().len() as u64);
        let task = layout::task_of(key);
        end_of(task, value)?;
        story.ends.add_task(task);
        Ok(())
    })
}

/// Reads every record of a single task: it must be one that is there.
fn check_records(checked: &mut Checked, loaded: &Loaded, shard: ShardId) -> Result<(), DirError> {
    let unreadable =
        |what: &str, task: TaskId| DirError::Unreadable { what: format!("{what} of task {task}") };
    for (letter, what) in [
        (layout::MOVED, "the place"),
        (layout::TRY, "a try"),
        (layout::REPLAYED, "the replay"),
        (layout::CANCELING, "the cancel"),
    ] {
        loaded.records(shard, letter..=letter, |key, value| {
            let Some(task) = layout::task_of_record(key) else {
                return Err(unreadable(what, TaskId(0)));
            };
            let good = match letter {
                layout::MOVED => values::moved(task, value.bytes()).is_some(),
                layout::TRY => values::tried(value.bytes()).is_some(),
                layout::REPLAYED => values::number(value.bytes()).is_some(),
                _ => true,
            };
            if !good {
                return Err(unreadable(what, task));
            }
            let found = loaded.find(&layout::task_key(shard, task))?;
            let ended = loaded.find(&layout::end_key(shard, task))?;
            if found.is_none() || letter == layout::CANCELING && ended.is_some() {
                checked.problems.push(format!(
                    "shard {shard}: {what} of task {task} is remembered, and the task is not there any more"
                ));
            }
            Ok(())
        })?;
    }
    Ok(())
}
