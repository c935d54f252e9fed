//! When a waiting task will start: its position, a time by which it has started, and a time at which it is expected to.
//!
//! Both times come from playing admission forward on a copy: runs end one after the other, and each slot that becomes free
//! goes to the task that the dispatcher would choose. For the upper bound everything takes as long as it may; where a task
//! ahead has no duration there is no bound. For the expected time everything takes as long as it did of late.
//!
//! So an estimate depends on what runs and on what goes before, and on nothing else: tasks that come behind change nothing,
//! and one that is fairer or more urgent goes ahead and is seen to.
//!
//! The copy ([`Snapshot`]) is taken in the shard's step; the play needs nothing of the shard, and belongs on another
//! thread. Memory knows a window of each lane. What is beyond it, or behind something that is, or stands on a shelf, is
//! extrapolated and marked *approximate*; so is everything where something is at work that the play does not know: workers
//! that other queues with waiting tasks share, limits and rates of keys.

use std::collections::{BTreeMap, BTreeSet};

use crate::admission::chance::Chance;
use crate::admission::cycle::Holders;
use crate::admission::rate::Bucket;
use crate::admission::{ClassLimit, Rate, classes};
use crate::backlog::{Cost, Level, Turns, VTime};
use crate::change::Place;
use crate::names::{Class, Key, LaneId, Millis, Priority, QueueId, QueueName, TaskId, WorkerId};
use crate::shard::{Parked, Shard};
use crate::workers::Worker;

/// A number as it was of late: the mean of about the last 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mean {
    count: u64,
    /// In 1024ths.
    value: u64,
}

impl Mean {
    pub(crate) fn learn(&mut self, new: u64) {
        self.count = (self.count + 1).min(64);
        let new = new.min(1 << 40) << 10;
        self.value = if new >= self.value {
            self.value + (new - self.value) / self.count
        } else {
            self.value - (self.value - new) / self.count
        };
    }

    /// In 1024ths, if anything is known.
    fn fine(self) -> Option<u64> {
        (self.count > 0).then_some(self.value.max(1))
    }
}

/// When a task will start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// 1 goes next.
    pub position: u64,
    /// It starts within so many milliseconds, if nothing goes ahead that does not stand ahead now. None if something ahead
    /// may take as long as it likes.
    pub upper_ms: Option<u64>,
    /// It is expected to start in so many milliseconds. None before anything has ended.
    pub expected_ms: Option<u64>,
    /// Not all is known that decides it.
    pub approximate: bool,
}

/// A waiting task of which somebody wants to know. As the store has it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The task.
    pub task: TaskId,
    /// Its lane.
    pub lane: LaneId,
    /// Where it waits.
    pub place: Place,
    /// Its key.
    pub key: Key,
}

/// Times are in 1024ths of a millisecond from now.
type Fine = u64;

const MS: Fine = 1 << 10;
/// By so many ends of other runs for each further class a task can be set back by runs that end early. Found by
/// measurement, in `evenhand-sim estimates`.
const SHIFT: usize = 2;
/// How far it is looked for such ends; beyond, the longest class is added instead.
const LOOK: usize = 256;
/// So many shelves of a queue are looked at row by row. Where there are more, it counts how many rows they have.
const SHELVES: usize = 1_000;
/// Something without an end.
const NEVER: Fine = u64::MAX;

/// All of a queue that decides when its tasks start.
#[derive(Clone, Debug)]
pub struct Snapshot {
    classes: Vec<ClassLimit>,
    limits: Vec<u64>,
    free: u64,
    runs: Vec<Running>,
    interactive: u64,
    grace: Fine,
    /// In the order of priorities, then classes.
    lanes: Vec<LaneCopy>,
    turns: BTreeMap<Priority, Turns<Class>>,
    /// What may start in a second, and what is left of it now.
    rate: Option<(Rate, Bucket)>,
    now: Millis,
    shelves: BTreeMap<(LaneId, Key), ShelfCopy>,
    took: Took,
    approximate: bool,
    /// Nothing starts at all.
    stands_still: bool,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    /// Of this queue: it counts for its classes.
    own: bool,
    class: usize,
    default: bool,
    /// How long it has run.
    age: Fine,
    /// When it ends at the latest, and when it is expected to.
    upper: Fine,
    expected: Fine,
}

#[derive(Clone, Debug)]
struct LaneCopy {
    id: LaneId,
    /// In the order in which they are served, as far as memory knows them.
    waiting: Vec<Waiting>,
    /// The weights of its waiting keys, and how many rows each has; nobody asks where a lane has its priority alone.
    keys: Vec<(u64, u64)>,
    weights: u64,
    /// Rows that memory does not know, and where they begin and end.
    beyond: u64,
    read: Level,
    from: VTime,
    /// Per key with rows beyond: up to where, and its weight.
    ends: Vec<(VTime, f64)>,
    took: Took,
}

/// The rows of a key that stand beside a lane.
#[derive(Clone, Debug)]
struct ShelfCopy {
    rows: u64,
    /// The first of them, as far as memory knows them.
    known: Vec<Level>,
    /// Its key is held, and how many of its tasks may run at once, if that is why.
    held: bool,
    limit: Option<u32>,
}

impl ShelfCopy {
    /// How many of its rows stand before this one.
    fn before(&self, level: Level) -> u64 {
        match self.known.binary_search(&level) {
            Ok(n) => n as u64,
            Err(_) => self.rows.saturating_sub(1),
        }
    }
}

/// How long runs took of late.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Took {
    /// Of all of them.
    mean: Mean,
    /// Of those that name a duration: how much of it they used, in thousandths.
    used: Mean,
}

impl Took {
    pub(crate) fn learn(&mut self, ms: u64, max_duration_ms: u64) {
        self.mean.learn(ms);
        if let Some(used) = (ms.min(1 << 40) * 1_000).checked_div(max_duration_ms) {
            self.used.learn(used);
        }
    }

    /// What is to be expected of one that names this duration, or none; what it said itself counts first.
    fn expect(self, told_ms: u64, max_duration_ms: u64, other: Took) -> Option<Fine> {
        if told_ms > 0 {
            return Some(told_ms.saturating_mul(MS));
        }
        let used = |took: Took| took.used.fine().filter(|_| max_duration_ms > 0);
        let part = |used: u64| u128::from(used) * u128::from(max_duration_ms) / 1_000;
        let fine = |used: u64| u64::try_from(part(used)).unwrap_or(NEVER - 1).max(1);
        let by_use = used(self).or(used(other)).map(fine);
        by_use.or(self.mean.fine()).or(other.mean.fine())
    }
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    task: TaskId,
    level: Level,
    key: u32,
    cost: Cost,
    /// What it takes of a rate.
    charged: Cost,
    /// 0 if it names none.
    max_duration_ms: u64,
    /// 0 if it did not say.
    expected_ms: u64,
}

impl Shard {
    /// A copy of all that decides when the tasks of a queue start.
    pub fn snapshot(&self, name: &QueueName, now: Millis) -> Option<Snapshot> {
        let id = self.queue_id(name)?;
        let now = now.max(self.time());
        let queue = &self.queues[id.0 as usize];
        let serves =
            |worker: &Worker| worker.slots > 0 && worker.queues.iter().any(|(queue, _)| *queue == id);
        let serving: BTreeSet<WorkerId> =
            self.workers.iter().filter(|(_, worker)| serves(worker)).map(|(id, _)| *id).collect();
        let free = serving.iter().filter_map(|id| self.workers.get(id));
        let free = free.map(|worker| u64::from(worker.slots.saturating_sub(worker.busy))).sum();
        let mut snapshot = Snapshot {
            classes: self.classes_of(id).to_vec(),
            limits: classes::limits(self.classes_of(id), queue.slots),
            free,
            runs: Vec::new(),
            interactive: 0,
            grace: self.settings_of(id).interactive_grace_ms * MS,
            lanes: Vec::new(),
            turns: queue.turns.clone(),
            rate: self.rate_of(id),
            now,
            shelves: self.shelves_of(id),
            took: queue.took,
            approximate: self.is_shared(id) || queue.keyed.is_some(),
            stands_still: !self.may_start() || self.settings_of(id).paused || serving.is_empty(),
        };
        for live in self.runs.values().filter(|live| serving.contains(&live.worker)) {
            let run = &live.run;
            if run.task.is_interactive() {
                snapshot.interactive += 1;
                continue;
            }
            let took = self.lane_of(run.lane).map(|ix| self.lane_at(ix).took).unwrap_or_default();
            let age = now.0.saturating_sub(run.started.0) * MS;
            let limit = if run.limit_ms == 0 { NEVER } else { run.limit_ms.saturating_mul(MS) };
            let told_ms = run.terms.as_ref().map_or(0, |terms| terms.expected_ms);
            let whole = took.expect(told_ms, run.max_duration_ms(), queue.took);
            // One that takes longer than others is as likely as not to be nearly done.
            let left = whole.map(|whole| if age < whole { whole - age } else { whole / 2 });
            let upper = limit.saturating_sub(age);
            snapshot.runs.push(Running {
                own: run.lane.queue == id,
                class: live.class,
                default: live.default,
                age,
                upper,
                expected: left.unwrap_or(NEVER).min(upper),
            });
        }
        for ((priority, _), ix) in &queue.lanes {
            let alone = queue.lanes.keys().filter(|(other, _)| other == priority).count() == 1;
            let lane = self.lane_at(*ix);
            let waiting: Vec<Waiting> = lane
                .window
                .waiting()
                .iter()
                .map(|(level, entry)| Waiting {
                    task: entry.task,
                    level: *level,
                    key: entry.key.number(),
                    cost: entry.charge.asked().cost,
                    charged: entry.charge.cost,
                    max_duration_ms: entry.max_duration_ms(),
                    expected_ms: entry.terms.as_ref().map_or(0, |terms| terms.expected_ms),
                })
                .collect();
            if waiting.is_empty() && lane.places.waiting_weights() == 0 && lane.places.to_come == 0 {
                continue;
            }
            // What is to come from shelves may go before what has its place.
            snapshot.approximate |= lane.places.to_come > 0;
            let known = waiting.len() as u64;
            let rows: u64 = lane.places.rows() - lane.window.running().len() as u64;
            let mut copy = LaneCopy {
                id: lane.id,
                waiting,
                keys: Vec::new(),
                weights: lane.places.waiting_weights(),
                beyond: rows.saturating_sub(known),
                read: lane.window.read(),
                from: lane.window.read().pass().time().max(lane.places.vtime()),
                ends: Vec::new(),
                took: lane.took,
            };
            if !alone || copy.beyond > 0 {
                for (ix, state) in lane.places.keys().iter().filter(|(_, state)| state.waiting > 0) {
                    let at = ix.number() as usize;
                    if !alone {
                        copy.keys.resize(copy.keys.len().max(at + 1), (0, 0));
                        copy.keys[at] = (u64::from(state.weight.thousandths()), u64::from(state.waiting));
                    }
                    if copy.beyond > 0 && state.finish > copy.from {
                        copy.ends.push((state.finish, f64::from(state.weight.thousandths()) / 1_000.0));
                    }
                }
                copy.ends.sort_unstable_by_key(|(end, _)| *end);
            }
            snapshot.lanes.push(copy);
        }
        Some(snapshot)
    }

    fn shelves_of(&self, id: QueueId) -> BTreeMap<(LaneId, Key), ShelfCopy> {
        let of_queue = || self.parked.iter().filter(|((lane, _), _)| lane.queue == id);
        let few = of_queue().take(SHELVES + 1).count() <= SHELVES;
        let copy = |(at, parked): (&(LaneId, Key), &Parked)| {
            let waiting = parked.shelf.window.waiting();
            let copy = ShelfCopy {
                rows: parked.rows,
                known: if few { waiting.keys().copied().collect() } else { Vec::new() },
                held: self.key_hold(id, &at.1).is_some(),
                limit: self.key_limit(id, &at.1),
            };
            (at.clone(), copy)
        };
        of_queue().map(copy).collect()
    }

    /// Whether workers of this queue also serve others in which tasks wait.
    fn is_shared(&self, id: QueueId) -> bool {
        let serving = self.workers.values().filter(|w| w.queues.iter().any(|(queue, _)| *queue == id));
        let others: BTreeSet<QueueId> = serving
            .flat_map(|worker| worker.queues.iter().map(|(queue, _)| *queue))
            .filter(|q| *q != id)
            .collect();
        others.into_iter().any(|queue| self.waiting_in(queue) > 0)
    }
}

/// A snapshot, played to its end.
#[derive(Clone, Debug)]
pub struct Forecast {
    of: Snapshot,
    expected: Played,
    upper: Played,
}

impl Forecast {
    fn new(of: Snapshot, last: Option<BTreeSet<TaskId>>) -> Forecast {
        let all = if of.stands_still { 0 } else { of.len() };
        let expected = Played::new(Play::new(&of, false).run(last.clone(), all));
        let upper = Played::new(Play::new(&of, true).run(last, all));
        Forecast { of, expected, upper }
    }

    /// When this task will start. None if it does not wait here, and while nothing starts at all.
    pub fn of(&self, wanted: &Wanted) -> Option<Estimate> {
        if self.of.stands_still {
            return None;
        }
        let bound = |n: usize| self.of.bound(&self.upper, n);
        match (self.expected.find(wanted.task), self.upper.find(wanted.task)) {
            (None, None) => self.of.extrapolate(wanted, &self.expected, &self.upper),
            (Some(n), upper) => {
                let Started { at, unseen, .. } = self.expected.starts[n];
                let expected = stretched(at, n, unseen);
                let unseen_above = upper.map_or(0, |n| self.upper.starts[n].unseen);
                let approximate = unseen > 0 || unseen_above > 0;
                Some(self.of.told(n as u64 + 1 + unseen, Some(expected), upper.and_then(bound), approximate))
            }
            (None, Some(n)) => {
                let unseen = self.upper.starts[n].unseen;
                Some(self.of.told(n as u64 + 1 + unseen, None, bound(n), unseen > 0))
            }
        }
    }
}

/// When each task starts that does, in the order in which they do.
#[derive(Clone, Debug)]
struct Played {
    starts: Vec<Started>,
    /// The same by task: where each stands in that order.
    by_task: Vec<(TaskId, u32)>,
    /// When the last one starts.
    last: Option<Fine>,
}

impl Played {
    fn new(starts: Vec<Started>) -> Played {
        let mut by_task: Vec<(TaskId, u32)> =
            starts.iter().enumerate().map(|(n, start)| (start.task, n as u32)).collect();
        by_task.sort_unstable();
        let last = starts.iter().map(|start| start.at).max().filter(|at| *at < NEVER);
        Played { starts, by_task, last }
    }

    fn find(&self, task: TaskId) -> Option<usize> {
        let at = self.by_task.binary_search_by_key(&task, |(task, _)| *task).ok()?;
        Some(self.by_task[at].1 as usize)
    }
}

#[derive(Clone, Copy, Debug)]
struct Started {
    task: TaskId,
    at: Fine,
    /// When it starts at the latest, if others end early.
    late: Fine,
    /// Rows that memory does not know and that may go before it.
    unseen: u64,
}

/// The time of the n-th start, at the same pace, if so many more go before it.
fn stretched(at: Fine, n: usize, unseen: u64) -> Fine {
    if unseen == 0 || at == NEVER {
        return at;
    }
    let more = u128::from(at) * u128::from(unseen) / (n as u128 + 1);
    at.saturating_add(u64::try_from(more).unwrap_or(NEVER))
}

impl Snapshot {
    /// Tasks that it knows, in all lanes.
    pub fn len(&self) -> usize {
        self.lanes.iter().map(|lane| lane.waiting.len()).sum()
    }

    /// It knows none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// When these tasks will start. None of one that does not wait here, and while nothing starts at all.
    pub fn estimate(&self, wanted: &[Wanted]) -> Vec<Option<Estimate>> {
        let mut left: BTreeSet<TaskId> = wanted.iter().map(|wanted| wanted.task).collect();
        for entry in self.lanes.iter().flat_map(|lane| &lane.waiting) {
            left.remove(&entry.task);
        }
        // If all that are wanted are known, the play ends with the last of them.
        let last = left.is_empty().then(|| wanted.iter().map(|wanted| wanted.task).collect::<BTreeSet<_>>());
        let forecast = Forecast::new(self.clone(), last);
        wanted.iter().map(|wanted| forecast.of(wanted)).collect()
    }

    /// Plays it to its end, to be asked of any task.
    pub fn forecast(self) -> Forecast {
        Forecast::new(self, None)
    }

    /// The bound of the task that starts as the n-th in the play where everything takes its time.
    ///
    /// Where a queue has one class, a run that ends early delays nobody. Where it has several, it may let a task of
    /// another lane take a turn that it would not have had: the slot is another's then, or the room in the class, and this
    /// one waits for the next. So its bound is when [`SHIFT`] more runs for each further class have ended, of all that run
    /// when it starts and of those that hold its class or a longer one; and at least half as much again. It depends on what
    /// runs and what goes before alone.
    fn bound(&self, played: &Played, n: usize) -> Option<Fine> {
        let start = *played.starts.get(n)?;
        let bound = match self.classes.last().filter(|_| self.classes.len() > 1) {
            None => start.at,
            Some(longest) => {
                let most = start.at.saturating_add(longest.duration_ms.saturating_mul(MS));
                let half = start.at.saturating_add(start.at / 2);
                start.late.min(most).max(half.min(most))
            }
        };
        Some(stretched(bound, n, start.unseen))
    }

    fn told(
        &self,
        position: u64,
        expected: Option<Fine>,
        upper: Option<Fine>,
        approximate: bool,
    ) -> Estimate {
        let ms = |fine: Option<Fine>| fine.filter(|fine| *fine < NEVER).map(|fine| fine.div_ceil(MS));
        let upper_ms = ms(upper);
        // What is expected is no later than what is certain.
        let expected_ms = ms(expected).map(|ms| upper_ms.map_or(ms, |upper| ms.min(upper)));
        Estimate { position, upper_ms, expected_ms, approximate: approximate || self.approximate }
    }

    /// Of a task that memory does not know: by how many of its lane go before it, as its keys were charged.
    fn extrapolate(&self, wanted: &Wanted, expected: &Played, upper: &Played) -> Option<Estimate> {
        let lane = self.lanes.iter().find(|lane| lane.id == wanted.lane);
        let known = expected.starts.len().max(upper.starts.len()) as f64;
        let before = match (wanted.place, lane) {
            (Place::Lane(level), Some(lane)) if level > lane.read => {
                lane.rows_before(level.pass().time()).min(lane.beyond.saturating_sub(1) as f64)
            }
            // In memory's part of its lane: if it waits there and does not start in the play, something stands in its way
            // for ever. If it does not wait there, it has been started.
            (Place::Lane(level), Some(lane)) => {
                let at = lane.waiting.binary_search_by_key(&level, |other| other.level).ok()?;
                return Some(self.told(at as u64 + 1, None, None, true));
            }
            (Place::Parked(level), lane) => {
                let shelf = self.shelves.get(&(wanted.lane, wanted.key.clone()))?;
                let own = shelf.before(level);
                let beyond = lane.map_or(0, |lane| lane.beyond);
                if shelf.held {
                    // It waits for its own key's runs first of all.
                    let took = lane.map_or(self.took, |lane| lane.took);
                    let each = took.mean.fine().or(self.took.mean.fine());
                    let rounds = shelf.limit.map(|limit| own / u64::from(limit.max(1)) + 1);
                    let wait = each.zip(rounds).map(|(each, rounds)| each.saturating_mul(rounds));
                    return Some(self.told(own + 1, wait, None, true));
                }
                // The others come in turn, as far as they have as many.
                let others =
                    self.shelves.iter().filter(|((lane, key), _)| *lane == wanted.lane && *key != wanted.key);
                let others: u64 = others.map(|(_, other)| other.rows.min(own)).sum();
                (own + others + beyond) as f64
            }
            (Place::Lane(_), None) | (Place::Timer(_) | Place::Aside | Place::Over, _) => return None,
        };
        let ahead = known + before;
        // At the pace of what is known.
        let later = |played: &Played| {
            let last = played.last.filter(|_| played.starts.len() == self.len() && known > 0.0)?;
            Some((last as f64 * ahead / known) as Fine)
        };
        Some(self.told(ahead as u64 + 1, later(expected), later(upper), true))
    }
}

impl LaneCopy {
    /// About how many rows beyond the window go before this time: each key's rows stand one charge after the other.
    fn rows_before(&self, time: VTime) -> f64 {
        let span = |to: VTime| (to.min(time) - self.from).to_f64();
        self.ends.iter().map(|(end, weight)| span(*end) * weight).sum()
    }
}

/// Admission, played forward.
struct Play<'a> {
    of: &'a Snapshot,
    upper: bool,
    now: Fine,
    free: u64,
    interactive: u64,
    holders: Option<Holders>,
    chance: Chance,
    runs: Vec<PlayedRun>,
    ends: BTreeSet<(Fine, usize)>,
    /// Default runs that hold more than the first class.
    yielding: Vec<usize>,
    turns: BTreeMap<Priority, Turns<Class>>,
    lanes: Vec<PlayedLane>,
    rate: Option<(Rate, Bucket)>,
    /// Per priority: rows beyond the windows of lanes that have come to the end of theirs.
    unseen: BTreeMap<Priority, u64>,
}

#[derive(Clone, Copy)]
struct PlayedRun {
    own: bool,
    class: usize,
    default: bool,
    began: i128,
    ends: Fine,
}

struct PlayedLane {
    next: usize,
    weights: u64,
    keys: Vec<(u64, u64)>,
}

impl<'a> Play<'a> {
    fn new(of: &'a Snapshot, upper: bool) -> Play<'a> {
        let mut play = Play {
            of,
            upper,
            now: 0,
            free: of.free,
            interactive: of.interactive,
            holders: (!of.classes.is_empty()).then(|| Holders::new(of.limits.clone())),
            chance: Chance::new(1),
            runs: Vec::new(),
            ends: BTreeSet::new(),
            rate: of.rate,
            unseen: BTreeMap::new(),
            yielding: Vec::new(),
            turns: of.turns.clone(),
            lanes: of
                .lanes
                .iter()
                .map(|lane| PlayedLane { next: 0, weights: lane.weights, keys: lane.keys.clone() })
                .collect(),
        };
        for run in &of.runs {
            let ends = if upper { run.upper } else { run.expected };
            play.begin(PlayedRun {
                own: run.own,
                class: run.class,
                default: run.default,
                began: -i128::from(run.age),
                ends,
            });
        }
        play
    }

    fn begin(&mut self, run: PlayedRun) {
        let ix = self.runs.len();
        if let Some(holders) = self.holders.as_mut().filter(|_| run.own) {
            holders.hold(TaskId(ix as u64), run.class, run.default);
        }
        if run.own && run.default && run.class > 0 {
            self.yielding.push(ix);
        }
        self.runs.push(run);
        if run.ends < NEVER {
            self.ends.insert((run.ends, ix));
        }
    }

    /// Until these have started, or nothing more can.
    fn run(mut self, mut last: Option<BTreeSet<TaskId>>, all: usize) -> Vec<Started> {
        let mut starts = Vec::with_capacity(all);
        loop {
            let mut wait = None;
            while let Some((lane, moves)) = self.next_start() {
                wait = self.rate_wait();
                if wait.is_some() {
                    break;
                }
                self.give_up(&moves);
                if self.free == 0 {
                    self.make_room();
                }
                if self.free == 0 {
                    break;
                }
                let class = self.head(lane).map_or(0, |head| self.needs(head.max_duration_ms));
                let (at, late, unseen) = (self.now, self.late(class), self.unseen_before(lane));
                let task = self.start(lane);
                starts.push(Started { task, at, late, unseen });
                if let Some(last) = &mut last {
                    last.remove(&task);
                    if last.is_empty() {
                        return starts;
                    }
                }
            }
            if starts.len() == all || !self.next_end(wait) {
                return starts;
            }
        }
    }

    /// When so many of the runs have ended by which a task of this class can be set back that starts now.
    fn late(&self, class: usize) -> Fine {
        if !self.upper || self.of.classes.len() < 2 {
            return self.now;
        }
        let shift = SHIFT * (self.of.classes.len() - 1);
        let of_class = |ix: usize| self.runs[ix].own && self.runs[ix].class >= class;
        let ends = self.ends.iter().take(LOOK);
        let any = ends.clone().nth(shift - 1).map_or(NEVER, |(at, _)| *at);
        let own = ends.filter(|(_, ix)| of_class(*ix)).nth(shift - 1).map_or(NEVER, |(at, _)| *at);
        if class > 0 { any.max(own) } else { any }
    }

    /// Rows that memory does not know and that go before the next task of a lane.
    fn unseen_before(&self, lane: usize) -> u64 {
        self.unseen.range(..=self.of.lanes[lane].id.priority).map(|(_, rows)| rows).sum()
    }

    /// When the rate lets something start again, if it does not now.
    fn rate_wait(&self) -> Option<Fine> {
        let (rate, bucket) = self.rate?;
        let ready = bucket.ready_at(rate, self.of.now.plus(self.now / MS));
        let ready = ready.0.saturating_sub(self.of.now.0).saturating_mul(MS);
        (ready > self.now).then_some(ready)
    }

    /// The next run ends, or the time comes that is waited for. False if neither does.
    fn next_end(&mut self, wait: Option<Fine>) -> bool {
        let first = self.ends.first().copied();
        match (first, wait) {
            (None, None) => false,
            (None, Some(until)) => {
                self.now = until;
                true
            }
            (Some((at, _)), Some(until)) if until < at => {
                self.now = until;
                true
            }
            (Some((at, ix)), _) => {
                self.ends.remove(&(at, ix));
                self.now = self.now.max(at);
                self.free += 1;
                let run = self.runs[ix];
                if let Some(holders) = self.holders.as_mut().filter(|_| run.own) {
                    holders.release(TaskId(ix as u64), run.class, run.default);
                }
                self.runs[ix].ends = NEVER;
                self.yielding.retain(|other| *other != ix);
                true
            }
        }
    }

    fn needs(&self, max_duration_ms: u64) -> usize {
        let of = &self.of.classes;
        if max_duration_ms == 0 || of.is_empty() {
            return 0;
        }
        classes::covering(of, max_duration_ms).unwrap_or(of.len() - 1)
    }

    fn head(&self, lane: usize) -> Option<&Waiting> {
        self.of.lanes[lane].waiting.get(self.lanes[lane].next)
    }

    /// The lane that goes next among those that need a class below this one.
    fn first_lane(&self, below: usize) -> Option<usize> {
        let mut best: Option<(Priority, usize)> = None;
        for lane in 0..self.lanes.len() {
            let LaneId { priority, class, .. } = self.of.lanes[lane].id;
            if best.is_some_and(|(first, _)| priority > first) {
                break;
            }
            let Some(head) = self.head(lane) else { continue };
            if below < usize::MAX && self.needs(head.max_duration_ms) >= below {
                continue;
            }
            let turn = |class: Class| self.turns.get(&priority).map(|turns| turns.turn(class));
            if best.is_none_or(|(_, other)| turn(class) < turn(self.of.lanes[other].id.class)) {
                best = Some((priority, lane));
            }
        }
        best.map(|(_, lane)| lane)
    }

    fn next_start(&self) -> Option<(usize, Vec<(usize, usize)>)> {
        let Some(holders) = &self.holders else {
            return self.first_lane(usize::MAX).map(|lane| (lane, Vec::new()));
        };
        let needs = |lane: usize| self.head(lane).map_or(0, |head| self.needs(head.max_duration_ms));
        let plan = holders.plan(|below| self.first_lane(below).map(needs))?;
        self.first_lane(plan.below).map(|lane| (lane, plan.moves))
    }

    fn give_up(&mut self, moves: &[(usize, usize)]) {
        let Some(holders) = &mut self.holders else { return };
        for downgrade in holders.carry_out(moves, &mut self.chance) {
            self.downgraded(downgrade.task.0 as usize, downgrade.to);
        }
    }

    fn downgraded(&mut self, ix: usize, to: usize) {
        let limit = i128::from(self.of.classes.get(to).map_or(0, |class| class.duration_ms)) * i128::from(MS);
        let run = &mut self.runs[ix];
        run.class = to;
        let ends = u64::try_from((run.began + limit).max(i128::from(self.now))).unwrap_or(NEVER);
        if ends < run.ends {
            self.ends.remove(&(run.ends, ix));
            run.ends = ends;
            self.ends.insert((ends, ix));
        }
        if to == 0 {
            self.yielding.retain(|other| *other != ix);
        }
    }

    /// No slot is free: default runs are downgraded to the first class, and one interactive run is halted.
    fn make_room(&mut self) {
        for ix in std::mem::take(&mut self.yielding) {
            let from = self.runs[ix].class;
            if let Some(holders) = &mut self.holders {
                holders.downgrade(TaskId(ix as u64), from, 0);
            }
            self.downgraded(ix, 0);
        }
        if self.interactive > 0 {
            self.interactive -= 1;
            if self.of.grace == 0 {
                self.free += 1;
            } else {
                let ends = self.now + self.of.grace;
                let began = i128::from(self.now);
                self.begin(PlayedRun { own: false, class: 0, default: false, began, ends });
            }
        }
    }

    fn start(&mut self, at: usize) -> TaskId {
        let lane = &self.of.lanes[at];
        let waiting = lane.waiting[self.lanes[at].next];
        self.lanes[at].next += 1;
        if self.lanes[at].next == lane.waiting.len() && lane.beyond > 0 {
            *self.unseen.entry(lane.id.priority).or_default() += lane.beyond;
        }
        if let Some((rate, bucket)) = &mut self.rate {
            bucket.take(*rate, rate.takes(waiting.charged), self.of.now.plus(self.now / MS));
        }
        self.free -= 1;
        let (class, limit_ms, default) = match &self.holders {
            Some(holders) if waiting.max_duration_ms == 0 => {
                let class = holders.longest_free();
                (class, self.of.classes.get(class).map_or(0, |class| class.duration_ms), true)
            }
            Some(_) | None => (self.needs(waiting.max_duration_ms), waiting.max_duration_ms, false),
        };
        let limit = if limit_ms == 0 { NEVER } else { limit_ms.saturating_mul(MS) };
        let expected = lane.took.expect(waiting.expected_ms, waiting.max_duration_ms, self.of.took);
        let takes = if self.upper { limit } else { expected.unwrap_or(NEVER).min(limit) };
        self.begin(PlayedRun {
            own: true,
            class,
            default,
            began: i128::from(self.now),
            ends: self.now.saturating_add(takes),
        });
        self.charge(at, waiting);
        waiting.task
    }

    /// Lanes of a priority take turns: the same charges as the dispatcher's.
    fn charge(&mut self, at: usize, waiting: Waiting) {
        let LaneId { priority, class, .. } = self.of.lanes[at].id;
        let lane = &mut self.lanes[at];
        if lane.keys.is_empty() {
            return;
        }
        if let Some(turns) = self.turns.get_mut(&priority) {
            turns.charge(class, VTime::share(waiting.cost, lane.weights.max(1)));
        }
        if let Some((weight, rows)) = lane.keys.get_mut(waiting.key as usize) {
            *rows = rows.saturating_sub(1);
            if *rows == 0 {
                lane.weights = lane.weights.saturating_sub(*weight);
            }
        }
    }
}
