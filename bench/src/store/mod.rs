//! `store`: what the embedded store does in a second, and what it takes on disk and in memory.
//!
//! 1. [`owner`]: makes the changes that a shard's owner makes, and drives the store through its trait.
//! 2. [`raw`]: the yardsticks, a plain file with and without an index. [`rates`]: both in turns.
//! 3. [`room`]: bytes on disk and in memory, and when the store is at rest.
//!
//! One store is filled to each number of standing tasks in turn, and measured there. It lies on a real disk:
//! in a directory of memory a sync costs nothing, and the numbers mean nothing.

mod owner;
mod rates;
mod raw;
mod room;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use evenhand_store::Embedded;
use evenhand_store::embedded::Options;

use crate::Failure;
use crate::cli::{StoreArgs, StoreOpenArgs};
use crate::report::{Aims, Report, Value};
use owner::Owner;
use rates::{Beside, Row, Work, Yardsticks};
use room::Scratch;

/// The batch that the aims are for.
const LARGE: u64 = 1_000;
const MANY_KEYS: usize = 1_000_000;
const SEED: u64 = 4;

/// What is measured, with what.
struct Plan {
    scratch: Scratch,
    keys: usize,
    payload: usize,
    tasks: u64,
    most_commits: u64,
    rounds: u64,
}

impl Plan {
    fn commits(&self, batch: u64) -> u64 {
        (self.tasks / batch).clamp(1, self.most_commits)
    }

    fn open(&self, dir: &Path) -> Result<Owner, Failure> {
        let store = Embedded::open(dir, Options::default()).map_err(|error| error.to_string())?;
        Owner::take(store, self.keys, self.payload, SEED)
    }
}

/// Measures everything.
pub(crate) fn run(args: &StoreArgs, show: impl Fn(Report)) -> Result<(), Failure> {
    let plan = Plan {
        scratch: Scratch::new(&args.dir)?,
        keys: args.keys as usize,
        payload: args.payload as usize,
        tasks: args.tasks,
        most_commits: args.commits,
        rounds: u64::from(args.rounds),
    };
    let mut standing = args.standing.clone();
    standing.sort_unstable();
    let mut room = Rooms::default();
    let rows = measure_rates(&plan, &standing, &args.batches, &mut room)?;
    show(rates_table(&plan, &rows));
    show(latencies_table(&rows));
    if args.standing.iter().any(|standing| *standing > 0) {
        measure_keys(&plan, &mut room)?;
    }
    show(room_table(&room));
    let growth = measure_growth(&plan)?;
    show(growth_table(&plan, &growth));
    show(aims(&rows, &room, &growth));
    Ok(())
}

/// Tasks that the store alone accepts and finishes per second, in large batches: for what is measured beside it.
pub(crate) fn alone(dir: &Path, keys: usize, payload: usize, tasks: u64) -> Result<(f64, f64), Failure> {
    let plan = Plan { scratch: Scratch::new(dir)?, keys, payload, tasks, most_commits: u64::MAX, rounds: 1 };
    let mut sticks = Yardsticks::create(&plan.scratch)?;
    let mut owner = plan.open(&plan.scratch.join("store"))?;
    let mut rate = |work| {
        let row = rates::measure(&plan, &mut owner, &mut sticks, 0, work, LARGE)?;
        Ok::<f64, Failure>(row.rate(row.store))
    };
    Ok((rate(Work::Accept)?, rate(Work::Finish)?))
}

/// What a store takes when so many tasks stand, and how long it takes to open.
struct Room {
    tasks: u64,
    keys: usize,
    disk: u64,
    opened: Opened,
}

#[derive(Default)]
struct Rooms {
    rooms: Vec<Room>,
    /// Tasks accepted and finished before the most memory was looked at.
    worked: u64,
}

fn measure_rates(
    plan: &Plan,
    standing: &[u64],
    batches: &[u64],
    rooms: &mut Rooms,
) -> Result<Vec<Row>, Failure> {
    let dir = plan.scratch.join("store");
    let mut sticks = Yardsticks::create(&plan.scratch)?;
    let mut owner = plan.open(&dir)?;
    let mut rows = Vec::new();
    rooms.worked = plan.tasks;
    for &stand in standing {
        rates::stand(&mut owner, &mut sticks, stand)?;
        owner.rest()?;
        for &batch in batches {
            for work in [Work::Accept, Work::Finish] {
                rows.push(rates::measure(plan, &mut owner, &mut sticks, stand, work, batch)?);
            }
        }
        if Some(&stand) == standing.iter().find(|standing| **standing > 0) {
            rows.push(rates::measure(plan, &mut owner, &mut sticks, stand, Work::Mix, LARGE)?);
        }
        if stand > 0 {
            owner.rest()?;
            let disk = room::disk_bytes(&dir);
            drop(owner);
            let last = Some(&stand) == standing.last();
            let opened = child(&dir, plan.keys, plan.payload, if last { plan.tasks } else { 0 })?;
            rooms.rooms.push(Room { tasks: stand, keys: plan.keys, disk, opened });
            owner = plan.open(&dir)?;
        }
    }
    drop(owner);
    let _ = std::fs::remove_dir_all(&dir);
    Ok(rows)
}

/// A store with as many keys as tasks.
fn measure_keys(plan: &Plan, rooms: &mut Rooms) -> Result<(), Failure> {
    eprintln!("store: a million keys with a task each");
    let dir = plan.scratch.join("keys");
    let store = Embedded::open(&dir, Options::default()).map_err(|error| error.to_string())?;
    let mut owner = Owner::take(store, MANY_KEYS, plan.payload, SEED)?;
    while owner.standing() < MANY_KEYS as u64 {
        let commit = owner.accept_in_turn(LARGE);
        owner.commit(commit.changes)?;
    }
    owner.wait_until_applied()?;
    owner.rest()?;
    let disk = room::disk_bytes(&dir);
    drop(owner);
    let opened = child(&dir, MANY_KEYS, plan.payload, 0)?;
    rooms.rooms.push(Room { tasks: MANY_KEYS as u64, keys: MANY_KEYS, disk, opened });
    let _ = std::fs::remove_dir_all(&dir);
    Ok(())
}

/// What a child said that opened a store: seconds, and resident bytes.
#[derive(Clone, Copy, Debug)]
struct Opened {
    open: f64,
    take: f64,
    resident: f64,
    /// After some work; None if there was none.
    most: Option<f64>,
}

/// Opens a store in a process of its own, whose memory is the store's alone.
fn child(dir: &Path, keys: usize, payload: usize, tasks: u64) -> Result<Opened, Failure> {
    let failed = |why: String| format!("opening the store again: {why}");
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let mut command = Command::new(program);
    command.arg("store-open").arg("--dir").arg(dir);
    for (name, number) in [("--keys", keys as u64), ("--payload", payload as u64), ("--tasks", tasks)] {
        command.args([name, &number.to_string()]);
    }
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers.as_slice() {
        [open, take, resident, most] => {
            let most = (tasks > 0).then_some(*most);
            let opened = Opened { open: *open, take: *take, resident: *resident, most };
            eprintln!("store: opened again in {:.2} s", open + take);
            Ok(opened)
        }
        _ => Err(failed(format!("it said {said:?}"))),
    }
}

/// In the child: opens the store, works a little, and prints what it saw.
pub(crate) fn open(args: &StoreOpenArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let store = Embedded::open(&args.dir, Options::default()).map_err(|error| error.to_string())?;
    let opened = start.elapsed();
    let start = Instant::now();
    let mut owner = Owner::take(store, args.keys as usize, args.payload as usize, SEED + 1)?;
    let taken = start.elapsed();
    let resident = room::memory_bytes("VmRSS");
    for _ in 0..args.tasks / LARGE {
        let commit = owner.accept(LARGE);
        owner.commit(commit.changes)?;
    }
    for _ in 0..args.tasks / LARGE {
        let commit = owner.finish(LARGE)?;
        owner.commit(commit.changes)?;
    }
    let most = room::memory_bytes("VmHWM");
    println!("{} {} {resident} {most}", opened.as_secs_f64(), taken.as_secs_f64());
    Ok(())
}

/// Bytes of a directory.
struct Grown {
    /// At rest. The last deletes are in the log alone, and what they delete is still in tables.
    at_rest: u64,
    /// Opened again, which writes what the log holds into tables, and at rest.
    opened: u64,
}

/// Bytes of the directory after each passage of all tasks, the empty store first.
fn measure_growth(plan: &Plan) -> Result<Vec<Grown>, Failure> {
    const PASSAGES: u64 = 4;
    let dir: PathBuf = plan.scratch.join("growth");
    let mut owner = plan.open(&dir)?;
    let mut grown = vec![Grown { at_rest: room::disk_bytes(&dir), opened: room::disk_bytes(&dir) }];
    for passage in 1..=PASSAGES {
        for _ in 0..plan.tasks / LARGE {
            let commit = owner.accept(LARGE);
            owner.commit(commit.changes)?;
        }
        for _ in 0..plan.tasks / LARGE {
            let commit = owner.finish(LARGE)?;
            owner.commit(commit.changes)?;
        }
        owner.wait_until_applied()?;
        owner.rest()?;
        let at_rest = room::disk_bytes(&dir);
        drop(owner);
        owner = plan.open(&dir)?;
        owner.rest()?;
        let opened = room::disk_bytes(&dir);
        eprintln!("store: passage {passage}: {} MiB, opened again {}", at_rest >> 20, opened >> 20);
        grown.push(Grown { at_rest, opened });
    }
    drop(owner);
    let _ = std::fs::remove_dir_all(&dir);
    Ok(grown)
}

fn rates_table(plan: &Plan, rows: &[Row]) -> Report {
    let mut report = Report::new(
        "store",
        &format!(
            "Speed of the embedded store: {} keys, payloads of {} bytes, one commit after the other, each synced,\n\
             until the last could be read. Raw files take as many bytes as the store's log, in as many pieces,\n\
             each synced: at the file's end; in place, as the log is written; at the end, with an index in\n\
             memory by level and by id. `reading` is the part of the time that went into reading rows, `behind`\n\
             for how long the store went on working afterwards. Rates are over all slices of a row, parts (`of ..`)\n\
             are medians of its slices.",
            plan.keys, plan.payload,
        ),
        &[
            ("standing", "standing"),
            ("work", "work"),
            ("batch", "batch"),
            ("tasks", "tasks"),
            ("log_bytes_per_task", "log bytes/task"),
            ("tasks_per_second", "tasks/s"),
            ("reading_percent", "reading %"),
            ("behind_seconds", "behind s"),
            ("raw_tasks_per_second", "raw/s"),
            ("part_of_raw", "of raw"),
            ("raw_in_place_tasks_per_second", "in place/s"),
            ("part_of_raw_in_place", "of in place"),
            ("raw_indexed_tasks_per_second", "with index/s"),
            ("part_of_raw_indexed", "of with index"),
        ],
    );
    for row in rows {
        let part = |other: &Beside| Value::Number(other.part(), 2);
        report.row(vec![
            Value::Count(row.standing),
            Value::text(row.work.name()),
            Value::Count(row.batch),
            Value::Count(row.tasks),
            Value::Number(row.bytes_per_task, 0),
            Value::Number(row.rate(row.store), 0),
            Value::Number(100.0 * row.reading.as_secs_f64() / row.store.as_secs_f64(), 0),
            Value::Number(row.behind.as_secs_f64(), 1),
            Value::Number(row.rate(row.appended.took), 0),
            part(&row.appended),
            Value::Number(row.rate(row.in_place.took), 0),
            part(&row.in_place),
            Value::Number(row.rate(row.indexed.took), 0),
            part(&row.indexed),
        ]);
    }
    report
}

fn latencies_table(rows: &[Row]) -> Report {
    let mut report = Report::new(
        "store_latency",
        "How long a commit takes, in milliseconds. The last column is the longest stall.",
        &[
            ("standing", "standing"),
            ("work", "work"),
            ("batch", "batch"),
            ("commits", "commits"),
            ("p50_ms", "p50"),
            ("p99_ms", "p99"),
            ("p999_ms", "p99.9"),
            ("max_ms", "longest"),
        ],
    );
    for row in rows {
        let ms = |part: f64| Value::Number(1e3 * row.latency(part).as_secs_f64(), 2);
        report.row(vec![
            Value::Count(row.standing),
            Value::text(row.work.name()),
            Value::Count(row.batch),
            Value::Count(row.latencies.len() as u64),
            ms(0.5),
            ms(0.99),
            ms(0.999),
            ms(1.0),
        ]);
    }
    report
}

fn room_table(rooms: &Rooms) -> Report {
    let mut report = Report::new(
        "store_room",
        &format!(
            "What a store takes while it rests: bytes of its directory (the log's files, of fixed size, are\n\
             part of it), seconds to open it again and take the shard, in a process of its own, with the files\n\
             in the system's cache, and that process's resident MiB: then, and the most while {} more tasks\n\
             were accepted and finished.",
            rooms.worked,
        ),
        &[
            ("standing", "standing"),
            ("keys", "keys"),
            ("disk_mib", "MiB on disk"),
            ("disk_bytes_per_task", "bytes per task"),
            ("open_seconds", "open s"),
            ("take_seconds", "take s"),
            ("resident_mib", "resident MiB"),
            ("most_resident_mib", "at most"),
        ],
    );
    let mib = |bytes: f64| Value::Number(bytes / f64::from(1 << 20), 0);
    for room in &rooms.rooms {
        report.row(vec![
            Value::Count(room.tasks),
            Value::Count(room.keys as u64),
            mib(room.disk as f64),
            Value::Number(room.disk as f64 / room.tasks as f64, 0),
            Value::Number(room.opened.open, 2),
            Value::Number(room.opened.take, 2),
            mib(room.opened.resident),
            room.opened.most.map_or(Value::None, mib),
        ]);
    }
    report
}

fn growth_table(plan: &Plan, grown: &[Grown]) -> Report {
    let mut report = Report::new(
        "store_growth",
        &format!(
            "MiB of the directory after {} tasks were accepted and finished, again and again: at rest, when the\n\
             last deletes are only in the log, and at rest after the store was opened again.",
            plan.tasks
        ),
        &[("passages", "passages"), ("mib", "at rest"), ("mib_opened_again", "opened again")],
    );
    let mib = |bytes: u64| Value::Number(bytes as f64 / f64::from(1 << 20), 1);
    for (passages, grown) in grown.iter().enumerate() {
        report.row(vec![Value::Count(passages as u64), mib(grown.at_rest), mib(grown.opened)]);
    }
    report
}

fn aims(rows: &[Row], rooms: &Rooms, growth: &[Grown]) -> Report {
    let mut aims = Aims::new("Aims for the store (with batches of 1,000)");
    let at = |standing: u64, work: Work| {
        rows.iter().find(|row| row.standing == standing && row.work == work && row.batch == LARGE)
    };
    let percent = |part: f64, whole: f64| 100.0 * part / whole;
    let rate = |row: &Row| row.rate(row.store);
    let mut standing: Vec<u64> = rows.iter().map(|row| row.standing).collect();
    standing.dedup();
    for &standing in &standing {
        if let (Some(accept), Some(finish)) = (at(standing, Work::Accept), at(standing, Work::Finish)) {
            let of_raw = 100.0 * accept.appended.part();
            aims.at_least(
                &format!("accept, % of a raw append, {standing} standing, at least"),
                35.0,
                of_raw,
                0,
            );
            let of_accept = percent(rate(finish), rate(accept));
            aims.at_least(
                &format!("finish, % of accept, {standing} standing, at least"),
                100.0,
                of_accept,
                0,
            );
        }
    }
    if let (Some(&least), Some(&most)) = (standing.first(), standing.last())
        && least < most
    {
        for work in [Work::Accept, Work::Finish] {
            if let (Some(few), Some(many)) = (at(least, work), at(most, work)) {
                let what = format!("{}, % with {most} standing of that with {least}, at least", work.name());
                aims.at_least(&what, 50.0, percent(rate(many), rate(few)), 0);
            }
        }
    }
    let opened = rooms.rooms.iter().map(|room| room.opened.open + room.opened.take);
    if let Some(longest) = opened.reduce(f64::max) {
        aims.at_most("seconds to open again, at most", 10.0, longest, 1);
    }
    if let [_, first, .., last] = growth {
        let grown = (last.at_rest as f64 - first.at_rest as f64) / f64::from(1 << 20);
        aims.at_most("MiB grown from the first passage to the last, at most", 1.0, grown, 1);
    }
    aims.report()
}
