//! A model of workers, owners and restarts, small enough that everything that can happen does.
//!
//! A few workers and tasks, owners that crash and are followed by others, links on which messages are late or come
//! twice, leases that run out, processes that die: all interleavings are played, state by state, and in each it is
//! checked that no task runs twice at once; in the end, that every task can still be run from wherever one got.
//!
//! Messages. What an owner says may arrive at once or never, be late on each link by any time and be overtaken, and come
//! twice; what is under way is over with its session. A heartbeat that is late says what the worker knew when it was sent,
//! as if what it was told since were late; one that comes twice says nothing new. So heartbeats are heard at once or not
//! at all. An end that is late or lost is said again: the run counts as one that runs until its end is heard.
//!
//! What the model checks is the core's own code for worker sets ([`WorkerSet`](evenhand_core::owner::worker_set::WorkerSet),
//! [`agree`](evenhand_core::owner::worker_set::agree)): who may be given work, and when workers agree that nobody is
//! missing. Around it, time is left out: a lease may run out whenever nobody answers, and an owner gives a worker up only
//! after that, which is what thresholds are for and the other worlds play.
//!
//! Each witness of the start gate is played alone: the workers, and the saved set.
//!
//! Most states differ in nothing that can come of them. `alike.rs` says which count as one, and a test looks whether
//! they are. States are told apart by a fingerprint of 64 bits: among ten million, two that differ have the same one with a
//! chance of one in 300,000.

mod alike;
mod sets;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;

use evenhand_core::canary::Bug;

use alike::{Name, Orders, Quick};
use sets::{Id, Op, Sets};

/// No world has more workers.
const WORKERS: usize = 4;
/// No worker has more lives.
const LIVES: u8 = 4;

/// Who is believed when an owner begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// The workers alone: the store may be any old copy.
    Workers,
    /// The saved set alone.
    Saved,
    /// Either.
    Both,
}

/// How large the world is.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// Workers, four at most.
    pub workers: usize,
    /// Tasks.
    pub tasks: usize,
    /// How often an owner may crash.
    pub crashes: u8,
    /// How many lives workers may have beyond their first, all together; three at most.
    pub rebirths: u8,
    /// On each link one message may be under way for any time, and be overtaken by others.
    pub late: bool,
    /// On each link one message may come again at any time.
    pub twice: bool,
    /// A worker that joins may be queued: counted on, but not in the set until later.
    pub turnover: bool,
    /// Who is believed.
    pub witness: Witness,
    /// A rule that is switched off.
    pub bug: Option<Bug>,
}

/// What was found.
#[derive(Debug)]
pub struct Explored {
    /// Different states that were seen.
    pub states: usize,
    /// Steps between them.
    pub steps: u64,
    /// The shortest way to a state that must not be, if there is one, and what is wrong there.
    pub wrong: Option<(Vec<Step>, String)>,
}

/// What becomes of a message to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It arrives at once.
    Arrives,
    /// It never does.
    Lost,
    /// It will, or will be lost.
    Late,
    /// It arrives at once, and maybe once more.
    Twice,
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An owner takes the shard.
    Begin,
    /// It is gone.
    Crash,
    /// A worker connects and says hello, and is welcomed.
    Hello(u8, Fate),
    /// The same, but it is queued.
    Queue(u8),
    /// One that was queued comes into the set.
    Join(u8),
    /// Its connection is gone.
    Cut(u8),
    /// Its heartbeat is heard and answered.
    Beat(u8, Fate),
    /// What an owner said arrives late; if true, it may come once more.
    Told(u8, bool),
    /// A start comes again.
    Again(u8),
    /// A worker that is cut off dies, or nobody has answered it for too long: its runs are killed.
    Expire(u8),
    /// An owner gives a worker up.
    Lose(u8),
    /// The start gate opens: nobody can be alive any more who has not come.
    SafeTime,
    /// A task is given to a worker.
    Start(u8, u8, Fate),
    /// It ends, and its end counts.
    End(u8, u8),
}

impl Step {
    /// Somebody dies: it must be possible to run tasks without that. A link on which something was lost may be cut.
    fn is_fault(self) -> bool {
        matches!(self, Step::Crash | Step::Expire(_))
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Arrives => Ok(()),
            Fate::Lost => write!(f, ", which never hears of it"),
            Fate::Late => write!(f, ", which does not hear of it yet"),
            Fate::Twice => write!(f, ", which may hear it again"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Step::Begin => write!(f, "an owner begins"),
            Step::Crash => write!(f, "the owner crashes"),
            Step::Hello(w, Fate::Arrives) => write!(f, "w{w} says hello"),
            Step::Hello(w, fate) => write!(f, "w{w} says hello; the welcome goes to w{w}{fate}"),
            Step::Queue(w) => write!(f, "w{w} says hello and is queued"),
            Step::Join(w) => write!(f, "w{w} is queued no longer"),
            Step::Cut(w) => write!(f, "w{w} is cut off"),
            Step::Beat(w, Fate::Arrives) => write!(f, "a heartbeat of w{w} is heard"),
            Step::Beat(w, fate) => write!(f, "a heartbeat of w{w} is heard; the answer goes to w{w}{fate}"),
            Step::Told(w, _) => write!(f, "w{w} is told something late"),
            Step::Again(w) => write!(f, "w{w} is told something again"),
            Step::Expire(w) => write!(f, "w{w} dies, or its lease is over"),
            Step::Lose(w) => write!(f, "w{w} is given up"),
            Step::SafeTime => write!(f, "the safe time is over"),
            Step::Start(w, t, fate) => write!(f, "t{t} is given to w{w}{fate}"),
            Step::End(w, t) => write!(f, "t{t} ends on w{w}"),
        }
    }
}

/// What an owner says to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Down {
    Set(Id),
    Start(u8),
}

/// A worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct WorkerState {
    /// None if its process has died for good.
    life: Option<u8>,
    connected: bool,
    set: Option<Id>,
    /// Tasks that it runs, a bit each.
    runs: u8,
    /// What is on its way to it.
    late: Option<Down>,
    /// The task whose start may come again.
    again: Option<u8>,
}

/// What an owner knows of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Member {
    life: u8,
    /// It has said hello to this owner.
    heard: bool,
    /// It is not in the set yet.
    queued: bool,
    first: Option<Id>,
    required: bool,
    /// Tasks that it runs, as far as is known.
    runs: u8,
}

/// An owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OwnerState {
    open: bool,
    /// Which of [`Sets`].
    set: u32,
    members: [Option<Member>; WORKERS],
}

/// Everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    owner: Option<OwnerState>,
    epoch: u8,
    crashes: u8,
    rebirths: u8,
    workers: [WorkerState; WORKERS],
    /// The lives that the store counts on, by worker.
    saved: [Option<u8>; WORKERS],
    /// Tasks that have ended, a bit each.
    done: u8,
}

/// What a message to a worker is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Set,
    Start,
}

impl World {
    /// Plays everything, up to so many states.
    pub fn explore(&self, most: usize) -> Explored {
        self.explore_telling(most, |_| {})
    }

    /// The same; says from time to time how many states there are.
    pub fn explore_telling(&self, most: usize, mut tell: impl FnMut(usize)) -> Explored {
        let mut sets = Sets::new(self.bug);
        let orders = Orders::of(self);
        let first = self.first();
        let mut seen: HashMap<u64, u32, Quick> = HashMap::default();
        seen.insert(self.fingerprint(&mut sets, &orders, &first), 0);
        let mut todo = VecDeque::from([first]);
        let mut ways = Ways { came: vec![(0, None)], steps: Vec::new(), starts: vec![0] };
        let mut ends: Vec<bool> = Vec::new();
        let mut steps = 0;
        let mut next = Vec::new();
        while let Some(state) = todo.pop_front() {
            let at = ends.len() as u32;
            if let Err(what) = self.no_task_runs_twice(&state) {
                return Explored { states: ways.came.len(), steps, wrong: Some((ways.to(at), what)) };
            }
            // If all is done nothing is left to be looked at; if all are dead, nothing can be done.
            let over = state.done == self.all_tasks() || state.workers.iter().all(|w| w.life.is_none());
            ends.push(over);
            next.clear();
            if !over {
                self.next(&mut sets, &state, &mut next);
            }
            for (step, after) in &next {
                steps += 1;
                let number = match seen.entry(self.fingerprint(&mut sets, &orders, after)) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(new) => {
                        let number = ways.came.len() as u32;
                        ways.came.push((at, Some(*step)));
                        todo.push_back(*after);
                        *new.insert(number)
                    }
                };
                if !step.is_fault() && number != at {
                    ways.steps.push(number);
                }
            }
            ways.starts.push(ways.steps.len() as u32);
            if ways.came.len() > most {
                let what = format!("more than {most} states: the world is too large");
                return Explored { states: ways.came.len(), steps, wrong: Some((Vec::new(), what)) };
            }
            if at.is_multiple_of(1 << 16) {
                tell(ways.came.len());
            }
        }
        let wrong = ways.stuck(&ends).map(|at| {
            (ways.to(at), "not every task can be run from here, though nothing more fails".to_string())
        });
        Explored { states: ends.len(), steps, wrong }
    }

    fn all_tasks(&self) -> u8 {
        (1 << self.tasks) - 1
    }

    fn first(&self) -> State {
        assert!(self.workers <= WORKERS && self.rebirths < LIVES, "{self:?} is too large");
        let worker = |w| WorkerState {
            life: (w < self.workers).then_some(1),
            connected: false,
            set: None,
            runs: 0,
            late: None,
            again: None,
        };
        State {
            owner: None,
            epoch: 0,
            crashes: self.crashes,
            rebirths: self.rebirths,
            workers: std::array::from_fn(worker),
            saved: [None; WORKERS],
            done: 0,
        }
    }

    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// All that can happen.
    fn next(&self, sets: &mut Sets, state: &State, next: &mut Vec<(Step, State)>) {
        let names = self.names(sets, state);
        let mut add = |step: Step, change: &mut dyn FnMut(&mut Sets, &mut State)| {
            let mut after = *state;
            change(sets, &mut after);
            self.settle(sets, &mut after);
            next.push((step, after));
        };
        match &state.owner {
            None => add(Step::Begin, &mut |sets, s| self.begin(sets, s)),
            Some(owner) => {
                if state.crashes > 0 {
                    add(Step::Crash, &mut |_, s| crash(s));
                }
                if !owner.open && self.is_safe(state, owner) {
                    add(Step::SafeTime, &mut |sets, s| open(sets, s));
                }
            }
        }
        for w in 0..self.workers {
            let n = w as u8;
            let worker = &state.workers[w];
            let member = state.owner.as_ref().and_then(|owner| owner.members[w]);
            if member.is_some_and(|member| Some(member.life) != worker.life) {
                add(Step::Lose(n), &mut |sets, s| lose(sets, s, w));
            }
            let Some(life) = worker.life else { continue };
            let member = member.filter(|member| member.life == life);
            let tells =
                state.owner.is_some_and(|owner| self.tells(&owner)) && member.is_none_or(|m| !m.queued);
            // Who joins makes a set that it does not know.
            let is_news = tells && (member.is_none() || names.news[w]);
            let fates = |what| self.fates(worker, names.late[w], what);
            if worker.connected {
                add(Step::Cut(n), &mut |_, s| cut(&mut s.workers[w]));
                for fate in fates(is_news.then_some(What::Set)) {
                    add(Step::Beat(n, fate), &mut |sets, s| self.heard(sets, s, w, fate));
                }
            } else {
                // What it runs and knows is over with its lease. One that nobody knows of might as well come first.
                let counted_on = match state.owner {
                    Some(_) => member.is_some(),
                    None => self.witness != Witness::Workers && state.saved[w] == Some(life),
                };
                if worker.runs > 0 || worker.set.is_some() || counted_on {
                    add(Step::Expire(n), &mut |_, s| end_life(s, w));
                }
                if let Some(owner) = &state.owner {
                    for fate in fates(is_news.then_some(What::Set)) {
                        add(Step::Hello(n, fate), &mut |sets, s| self.hello(sets, s, w, fate, false));
                    }
                    if self.turnover && owner.open && member.is_none() && worker.set.is_none() {
                        add(Step::Queue(n), &mut |sets, s| self.hello(sets, s, w, Fate::Lost, true));
                    }
                }
            }
            if worker.late.is_some() {
                add(Step::Told(n, false), &mut |_, s| told(&mut s.workers[w], false));
                if self.twice && worker.again.is_none() && matches!(worker.late, Some(Down::Start(_))) {
                    add(Step::Told(n, true), &mut |_, s| told(&mut s.workers[w], true));
                }
            }
            if let Some(t) = worker.again {
                add(Step::Again(n), &mut |_, s| again(&mut s.workers[w], t));
            }
            let (Some(owner), Some(member)) = (state.owner.as_ref().filter(|owner| owner.open), member)
            else {
                continue;
            };
            if member.queued {
                add(Step::Join(n), &mut |sets, s| join(sets, s, w));
            }
            if !member.required || !worker.connected {
                continue;
            }
            for t in (0..self.tasks as u8).filter(|t| state.done & 1 << t == 0) {
                if !owner.members.iter().flatten().any(|member| member.runs & 1 << t != 0) {
                    for fate in fates(Some(What::Start)) {
                        add(Step::Start(n, t, fate), &mut |_, s| self.start(s, w, t, fate));
                    }
                }
                if worker.runs & 1 << t != 0 {
                    add(Step::End(n, t), &mut |_, s| ended(s, w, t));
                }
            }
        }
    }

    /// What may become of a message to a worker. One that is lost might as well be late for ever, or until another one is
    /// late; and one that changes nothing, now or later, arrives.
    fn fates(&self, worker: &WorkerState, late: Name, what: Option<What>) -> impl Iterator<Item = Fate> {
        let waits = late != Name::None || matches!(worker.late, Some(Down::Start(_)));
        let twice = what == Some(What::Start) && self.twice && worker.again.is_none();
        let fates = [
            (Fate::Arrives, true),
            (Fate::Lost, what.is_some() && (!self.late || waits)),
            (Fate::Late, what.is_some() && self.late),
            (Fate::Twice, twice),
        ];
        fates.into_iter().filter_map(|(fate, may)| may.then_some(fate))
    }

    /// Whether an owner tells workers its set.
    fn tells(&self, owner: &OwnerState) -> bool {
        owner.open || self.is(Bug::SetToldWhileShut)
    }

    fn begin(&self, sets: &mut Sets, state: &mut State) {
        state.epoch += 1;
        let saved = |life: Option<u8>| {
            life.map(|life| Member {
                life,
                heard: false,
                queued: false,
                first: None,
                required: false,
                runs: 0,
            })
        };
        // What an old copy says is worth nothing.
        let members = match self.witness {
            Witness::Workers => [None; WORKERS],
            Witness::Saved | Witness::Both => state.saved.map(saved),
        };
        state.owner = Some(OwnerState { open: false, set: sets.after(0, Op::New(state.epoch)), members });
    }

    /// Nobody who has not come can be alive. (On a first start nobody can, at once.)
    fn is_safe(&self, state: &State, owner: &OwnerState) -> bool {
        state.workers.iter().zip(&owner.members).all(|(worker, member)| {
            let came = member.is_some_and(|m| m.heard && Some(m.life) == worker.life);
            came || worker.life.is_none() || (worker.runs == 0 && worker.set.is_none())
        })
    }

    fn hello(&self, sets: &mut Sets, state: &mut State, w: usize, fate: Fate, queued: bool) {
        let Some(owner) = &mut state.owner else { return };
        let tells = self.tells(owner);
        let worker = &mut state.workers[w];
        let Some(life) = worker.life else { return };
        worker.connected = true;
        if let Some(member) = owner.members[w].take_if(|member| member.life != life) {
            owner.set = sets.after(owner.set, Op::Lose(w as u8, member.life));
        }
        let new = Member { life, heard: false, queued, first: None, required: false, runs: 0 };
        let member = owner.members[w].get_or_insert(new);
        state.saved[w] = Some(life);
        if !member.heard {
            member.heard = true;
            member.first = worker.set;
        }
        // What it does not name it never started. What it names counts, as long as the gate is shut.
        member.runs = if owner.open { member.runs & worker.runs } else { worker.runs };
        owner.set = sets.after(owner.set, Op::Heard(w as u8, life, worker.set));
        if tells && !member.queued {
            owner.set = sets.after(owner.set, Op::Join(w as u8, life));
            self.say(worker, Down::Set(sets.id(owner.set)), fate);
        }
    }

    fn heard(&self, sets: &mut Sets, state: &mut State, w: usize, fate: Fate) {
        let worker = &mut state.workers[w];
        let (Some(owner), Some(life)) = (&mut state.owner, worker.life) else { return };
        owner.set = sets.after(owner.set, Op::Heard(w as u8, life, worker.set));
        let queued = owner.members[w].is_some_and(|member| member.queued);
        if self.tells(owner) && !queued {
            self.say(worker, Down::Set(sets.id(owner.set)), fate);
        }
    }

    fn start(&self, state: &mut State, w: usize, t: u8, fate: Fate) {
        if let Some(member) = state.owner.as_mut().and_then(|owner| owner.members[w].as_mut()) {
            member.runs |= 1 << t;
            self.say(&mut state.workers[w], Down::Start(t), fate);
        }
    }

    /// Something is on its way to a worker, or there.
    fn say(&self, worker: &mut WorkerState, down: Down, fate: Fate) {
        match fate {
            Fate::Lost => {}
            Fate::Late => worker.late = Some(down),
            Fate::Arrives => hear(worker, down),
            Fate::Twice => hear_twice(worker, down),
        }
    }

    /// What follows by itself: the gate opens, and workers are let in.
    fn settle(&self, sets: &mut Sets, state: &mut State) {
        let silent =
            (0..self.workers).filter(|w| !state.workers[*w].connected).fold(0, |silent, w| silent | 1 << w);
        let Some(owner) = &state.owner else { return };
        if !owner.open {
            let came = by_worker(owner).filter(|(_, member)| member.heard);
            let agreed = sets.agree(came.map(|(w, member)| (w, member.life, member.first)));
            let all_came = owner.members.iter().flatten().all(|member| member.heard);
            let opens = match self.witness {
                Witness::Workers => agreed,
                Witness::Saved => all_came,
                Witness::Both => agreed || all_came,
            };
            if opens {
                open(sets, state);
            }
        }
        let Some(owner) = state.owner.as_mut().filter(|owner| owner.open) else { return };
        // Only a bug looks at who is silent.
        let silent = if self.is(Bug::UnhealthyNotAsked) { silent } else { 0 };
        owner.set = sets.after(owner.set, Op::Propagate(silent));
        for (w, member) in owner.members.iter_mut().enumerate() {
            if let Some(member) = member {
                member.required |= sets.permits(owner.set, w, member.life);
            }
        }
    }

    fn no_task_runs_twice(&self, state: &State) -> Result<(), String> {
        for t in 0..self.tasks {
            let runs = |w: &usize| state.workers[*w].runs & 1 << t != 0;
            let at = (0..self.workers).filter(runs);
            let done = state.done & 1 << t != 0;
            if at.clone().count() + usize::from(done) > 1 {
                return Err(format!("t{t} runs on {:?}, done: {done}", at.collect::<Vec<usize>>()));
            }
        }
        Ok(())
    }
}

/// How one got to each state, and where one gets from there if nothing more fails.
struct Ways {
    came: Vec<(u32, Option<Step>)>,
    /// States that come next, and where those of each state start.
    steps: Vec<u32>,
    starts: Vec<u32>,
}

impl Ways {
    fn to(&self, mut at: u32) -> Vec<Step> {
        let mut steps = Vec::new();
        while let (before, Some(step)) = self.came[at as usize] {
            steps.push(step);
            at = before;
        }
        steps.reverse();
        steps
    }

    /// The first state from which no end can be reached, if there is one. Ends are mostly further on, so it is looked from
    /// the last state to the first, as often as that finds something.
    fn stuck(&self, ends: &[bool]) -> Option<u32> {
        let mut reaches = ends.to_vec();
        loop {
            let mut found = false;
            for at in (0..reaches.len()).rev().filter(|at| !ends[*at]) {
                let next = self.starts[at] as usize..self.starts[at + 1] as usize;
                if !reaches[at] && self.steps[next].iter().any(|next| reaches[*next as usize]) {
                    (reaches[at], found) = (true, true);
                }
            }
            if !found {
                return reaches.iter().position(|reaches| !reaches).map(|at| at as u32);
            }
        }
    }
}

fn open(sets: &mut Sets, state: &mut State) {
    let Some(owner) = &mut state.owner else { return };
    owner.open = true;
    for (w, member) in owner.members.iter_mut().enumerate() {
        // Whoever has not come is gone.
        if member.is_some_and(|member| !member.heard) {
            *member = None;
            state.saved[w] = None;
        }
    }
    for (w, member) in by_worker(owner).collect::<Vec<_>>() {
        owner.set = sets.after(owner.set, Op::Join(w as u8, member.life));
    }
    if sets.agree(by_worker(owner).map(|(w, member)| (w, member.life, member.first))) {
        owner.set = sets.after(owner.set, Op::AllKnow);
    }
}

fn by_worker(owner: &OwnerState) -> impl Iterator<Item = (usize, Member)> {
    owner.members.into_iter().enumerate().filter_map(|(w, member)| Some((w, member?)))
}

fn crash(state: &mut State) {
    state.crashes -= 1;
    state.owner = None;
    state.workers.iter_mut().for_each(cut);
}

/// What was on its way in a session is worth nothing in the next.
fn cut(worker: &mut WorkerState) {
    worker.connected = false;
    (worker.late, worker.again) = (None, None);
}

fn told(worker: &mut WorkerState, twice: bool) {
    match worker.late.take() {
        Some(down) if twice => hear_twice(worker, down),
        Some(down) => hear(worker, down),
        None => {}
    }
}

fn hear(worker: &mut WorkerState, down: Down) {
    match down {
        Down::Set(set) if takes(worker, set) => worker.set = Some(set),
        Down::Set(_) => {}
        Down::Start(t) => worker.runs |= 1 << t,
    }
}

/// Hears something that will come again. A set that has been taken will not be taken again: that is over.
fn hear_twice(worker: &mut WorkerState, down: Down) {
    hear(worker, down);
    match down {
        Down::Set(_) => {}
        Down::Start(t) => worker.again = Some(t),
    }
}

/// A start comes again. A worker knows by its fence that it has had it.
fn again(worker: &mut WorkerState, _t: u8) {
    worker.again = None;
}

/// Whether a worker takes what it is told for newer than what it knows.
fn takes(worker: &WorkerState, set: Id) -> bool {
    worker.set.is_none_or(|known| known.epoch != set.epoch || known.version < set.version)
}

fn end_life(state: &mut State, w: usize) {
    let worker = &mut state.workers[w];
    cut(worker);
    (worker.runs, worker.set) = (0, None);
    worker.life = match worker.life {
        Some(life) if state.rebirths > 0 => {
            state.rebirths -= 1;
            Some(life + 1)
        }
        _ => None,
    };
}

fn lose(sets: &mut Sets, state: &mut State, w: usize) {
    let Some(owner) = &mut state.owner else { return };
    if let Some(member) = owner.members[w].take() {
        owner.set = sets.after(owner.set, Op::Lose(w as u8, member.life));
        state.saved[w] = None;
    }
}

/// A worker that was queued comes into the set; it is told so with its next answer.
fn join(sets: &mut Sets, state: &mut State, w: usize) {
    let Some(owner) = &mut state.owner else { return };
    if let Some(member) = &mut owner.members[w] {
        member.queued = false;
        owner.set = sets.after(owner.set, Op::Join(w as u8, member.life));
    }
}

fn ended(state: &mut State, w: usize, t: u8) {
    state.workers[w].runs &= !(1 << t);
    state.done |= 1 << t;
    if let Some(member) = state.owner.as_mut().and_then(|owner| owner.members[w].as_mut()) {
        member.runs &= !(1 << t);
    }
}
