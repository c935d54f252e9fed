//! How fast a PostgreSQL takes tasks and ends them, a commit at a time, as an owner commits:
//! `cargo run --release -p evenhand-store --example postgres_rate -- postgres://… [tasks] [batch]`.
//! Give the address a schema that is used for nothing else.

#![expect(clippy::unwrap_used, reason = "whoever runs it wants to see what went wrong")]

use std::sync::Arc;
use std::time::Instant;

use evenhand_core::backlog::{Average, Charge, Cost, Level, VTime, Weight};
use evenhand_core::change::{
    EndRecord, KeyRecord, LaneRecord, Place, QueueRecord, ShelfRecord, Timed, TimerRow, Totals, Try,
};
use evenhand_core::life::{End, Outcome};
use evenhand_core::names::{
    Class, ContentType, Key, LaneId, Millis, Priority, QueueId, QueueName, Seat, ShardId, TaskId,
};
use evenhand_core::{Change, Task};
use evenhand_store::postgres::Options;
use evenhand_store::{Postgres, Store};

const SHARD: ShardId = ShardId(0);
const LANE: LaneId = LaneId { queue: QueueId(0), priority: Priority(5), class: Class(0) };
const KEYS: u64 = 100;
const PAGE: usize = 4_096;

fn level(seq: u64) -> Level {
    Level::new(VTime::from_bits(u128::from(seq) * VTime::TICK.to_bits()).pass(), seq)
}

fn key(n: u64) -> Key {
    Key::new(&format!("tenant-{}", n % KEYS)).unwrap()
}

fn task(id: u64) -> Task {
    Task {
        id: TaskId(id),
        lane: LANE,
        place: Place::Lane(level(id)),
        key: key(id),
        charge: Charge { cost: Cost::ONE, weight: Weight::ONE, chained: true, timed: false },
        attempt: 1,
        max_attempts: 5,
        lost: 0,
        terms: None,
        replay_of: None,
        accepted: Millis(1_800_000_000_000 + id),
        content_type: ContentType::new(ContentType::JSON).unwrap(),
        payload: vec![b'x'; 100].into(),
        files: Default::default(),
    }
}

/// What every commit writes beside its tasks.
fn records(changes: &mut Vec<Change>, accepted: u64, ended: u64, some: impl Iterator<Item = u64>) {
    let vtime = VTime::from_bits(u128::from(ended) << 60);
    let record = LaneRecord { ack: level(ended), max: level(accepted), vtime, turn: vtime };
    changes.push(Change::Lane { lane: LANE, record });
    let keys: std::collections::BTreeSet<u64> = some.map(|n| n % KEYS).collect();
    for n in keys {
        let record = KeyRecord {
            finish: vtime,
            due: vtime,
            rows: n as u32,
            chained: 0,
            refund: VTime::ZERO,
            credit: VTime::ZERO,
            average: Average::default(),
            weight: Weight::ONE,
        };
        changes.push(Change::Key { lane: LANE, key: key(n), record: Some(record) });
    }
    let totals = Totals { accepted, succeeded: ended, ..Totals::default() };
    let name = QueueName::new("render").unwrap();
    let record = QueueRecord { name, totals, average: Average::default() };
    changes.push(Change::Queue { queue: LANE.queue, record });
    changes.push(Change::Seq { next: accepted * 2 + 1 });
}

fn finished(id: u64, remember: bool, changes: &mut Vec<Change>) {
    let last = Try {
        attempt: 1,
        seat: Some(Seat::new("gpu-7").unwrap()),
        started: Millis(1_800_000_000_000),
        ended: Millis(1_800_000_000_100),
        end: End::Succeeded,
        error: "".into(),
    };
    let (key, outcome, at) = (key(id), Outcome::Succeeded, Millis(1_800_000_000_100));
    let end = remember.then(|| Arc::new(EndRecord { key, outcome, at, last: Some(last), result: [].into() }));
    let from = Place::Lane(level(id));
    changes.push(Change::Finished {
        task: TaskId(id),
        lane: LANE,
        from,
        tries: 0,
        canceling: false,
        outcome,
        end,
    });
    if remember {
        let what = Timed::Forget { tries: 0 };
        changes.push(Change::Timed(TimerRow { at: level(id), task: TaskId(id), what }));
    }
}

async fn run(store: &Postgres, first: u64, tasks: u64, batch: u64, remember: bool) {
    let epoch = store.take(SHARD, None).await.unwrap().epoch;
    let numbers: Vec<u64> = (first..first + tasks).collect();
    let last = first + tasks - 1;
    let say = |what: &str, since: Instant| {
        let seconds = since.elapsed().as_secs_f64();
        println!("{what:<44} {:>9.0} tasks/s", tasks as f64 / seconds);
    };
    let began = Instant::now();
    let since = Instant::now();
    for some in numbers.chunks(batch as usize) {
        let mut changes: Vec<Change> = some.iter().map(|&id| Change::Accepted(task(id))).collect();
        records(&mut changes, some[some.len() - 1], first - 1, some.iter().copied());
        store.commit(SHARD, epoch, changes).await.unwrap();
    }
    say("accepted", since);
    let since = Instant::now();
    let (mut above, mut read) = (level(first - 1), 0);
    loop {
        let page = store.read_lane(SHARD, LANE, above, PAGE).await.unwrap();
        above = page.rows.last().map_or(above, |row| row.level);
        read += page.rows.len();
        if page.end {
            break;
        }
    }
    assert_eq!(read as u64, tasks);
    say("read in pages of 4,096 rows", since);
    let since = Instant::now();
    for some in numbers.chunks(batch as usize) {
        let mut changes = Vec::new();
        some.iter().for_each(|&id| finished(id, remember, &mut changes));
        records(&mut changes, last, some[some.len() - 1], some.iter().copied());
        store.commit(SHARD, epoch, changes).await.unwrap();
    }
    say(if remember { "finished, ends remembered" } else { "finished, ends not remembered" }, since);
    if remember {
        let since = Instant::now();
        for some in numbers.chunks(batch as usize) {
            let forget = |&id| Change::Forgotten { task: TaskId(id), tries: 0 };
            let mut changes: Vec<Change> = some.iter().map(forget).collect();
            let ack = level(some[some.len() - 1]);
            changes.push(Change::Timers { record: ShelfRecord { ack, max: level(last) } });
            store.commit(SHARD, epoch, changes).await.unwrap();
        }
        say("forgotten", since);
    }
    say("all of it", began);
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().expect("the address of a PostgreSQL");
    let mut number = |default: u64| arguments.next().map_or(default, |text| text.parse().unwrap());
    let (tasks, batch, rounds) = (number(100_000), number(500), number(1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Postgres::open(&address, Options::default()).await.unwrap();
        let mut first = store.take(SHARD, None).await.unwrap().metadata.next_seq.max(1);
        for round in 0..rounds {
            for remember in [false, true] {
                println!("round {}: {tasks} tasks in commits of {batch}", round + 1);
                run(&store, first, tasks, batch, remember).await;
                first += 2 * tasks;
            }
        }
    });
}
