//! A model of workers, owners and restarts, small enough that everything that can happen does.
//!
//! A few workers and tasks, owners that crash and are followed by others, links on which messages are late or come
//! twice, leases that run out, processes that die: all interleavings are played, state by state, and in each it is
//! checked that no task runs twice at once; in the end, that every task can still be run from wherever one got.
//!
//! Messages. A heartbeat that is late, lost or heard twice says what an earlier one said or could have said, so
//! heartbeats are heard at once or not at all. What an owner says may be under way for any time, and come twice, in
//! worlds that are small enough ([`World::late`]). In the others it arrives at once or is lost: nobody looks at what a
//! worker has been told before it says so itself, so a set that arrives late might as well have arrived at once.
//!
//! What the model checks is the core's own code for worker sets ([`WorkerSet`], [`agree`]): who may be given work, and
//! when workers agree that nobody is missing. Around it, time is left out: a lease may run out whenever nobody
//! answers, and an owner gives a worker up only after that, which is what thresholds are for and the other worlds play.
//!
//! Each witness of the start gate is played alone: the workers, and the saved set.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use evenhand_core::canary::{Bug, Canary};
use evenhand_core::names::{Epoch, Incarnation, Life, Seat, WorkerId, WorkerSetId};
use evenhand_core::owner::worker_set::{WorkerSet, agree};

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
    /// Workers.
    pub workers: usize,
    /// Tasks.
    pub tasks: usize,
    /// How often an owner may crash.
    pub crashes: u8,
    /// How many lives workers may have beyond their first, all together.
    pub rebirths: u8,
    /// What an owner says may be under way for any time. If not, it arrives at once, or is lost.
    pub late: bool,
    /// How many messages may come twice, all together.
    pub copies: u8,
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

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An owner takes the shard.
    Begin,
    /// It is gone.
    Crash,
    /// A worker connects and says hello. What it is told may not arrive.
    Hello(u8, bool),
    /// Its connection is gone.
    Cut(u8),
    /// Its heartbeat is heard and answered. The answer may not arrive.
    Beat(u8, bool),
    /// What an owner said arrives; it may be about to arrive again.
    Told(u8, bool),
    /// Nobody has answered a worker for too long: its runs are killed.
    Expire(u8),
    /// A worker and its runs die.
    Die(u8),
    /// An owner gives a worker up.
    Lose(u8),
    /// The start gate opens: nobody can be alive any more who has not come.
    SafeTime,
    /// A task is given to a worker. That may not arrive.
    Start(u8, u8, bool),
    /// It ends, and its end counts.
    End(u8, u8),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Step::Begin => write!(f, "an owner begins"),
            Step::Crash => write!(f, "the owner crashes"),
            Step::Hello(w, true) => write!(f, "w{w} says hello"),
            Step::Hello(w, false) => write!(f, "w{w} says hello, and hears no welcome"),
            Step::Cut(w) => write!(f, "w{w} is cut off"),
            Step::Beat(w, true) => write!(f, "a heartbeat of w{w} is heard"),
            Step::Beat(w, false) => write!(f, "a heartbeat of w{w} is heard, and the answer is lost"),
            Step::Told(w, _) => write!(f, "w{w} is told something"),
            Step::Expire(w) => write!(f, "the lease of w{w} is over"),
            Step::Die(w) => write!(f, "w{w} dies"),
            Step::Lose(w) => write!(f, "w{w} is given up"),
            Step::SafeTime => write!(f, "the safe time is over"),
            Step::Start(w, t, true) => write!(f, "t{t} is given to w{w}"),
            Step::Start(w, t, false) => write!(f, "t{t} is given to w{w}, which never hears of it"),
            Step::End(w, t) => write!(f, "t{t} ends on w{w}"),
        }
    }
}

/// What an owner says to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Down {
    Set(WorkerSetId),
    Start(u8),
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct WorkerState {
    /// None if its process has died for good.
    life: Option<u8>,
    connected: bool,
    set: Option<WorkerSetId>,
    /// Tasks that it runs, a bit each.
    runs: u8,
    /// What is on its way to it.
    down: Vec<Down>,
}

/// What an owner knows of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Member {
    life: u8,
    /// It has said hello to this owner.
    heard: bool,
    first: Option<WorkerSetId>,
    required: bool,
    /// Tasks that it runs, as far as is known.
    runs: u8,
}

/// An owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OwnerState {
    open: bool,
    set: WorkerSet,
    members: Vec<Option<Member>>,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    owner: Option<OwnerState>,
    epoch: u8,
    crashes: u8,
    rebirths: u8,
    copies: u8,
    workers: Vec<WorkerState>,
    /// The lives that the store counts on, by worker.
    saved: Vec<Option<u8>>,
    /// Tasks that have ended, a bit each.
    done: u8,
}

impl World {
    /// Plays everything, up to so many states.
    pub fn explore(&self, most: usize) -> Explored {
        let first = self.first();
        let mut seen: HashMap<u64, u32> = HashMap::from([(fingerprint(&first), 0)]);
        let mut came: Vec<(u32, Option<Step>)> = vec![(0, None)];
        let mut back: Vec<(u32, u32)> = Vec::new();
        let mut ends: Vec<u32> = Vec::new();
        let mut todo = VecDeque::from([(0_u32, first)]);
        let mut steps = 0;
        let all = (1_u8 << self.tasks) - 1;
        while let Some((at, state)) = todo.pop_front() {
            if let Err(what) = no_task_runs_twice(&state, self.tasks) {
                return Explored { states: came.len(), steps, wrong: Some((way(&came, at), what)) };
            }
            if state.done == all || state.workers.iter().all(|worker| worker.life.is_none()) {
                ends.push(at);
                continue; // nothing is left to be done
            }
            for (step, next) in self.next(&state) {
                steps += 1;
                let print = fingerprint(&next);
                let number = *seen.entry(print).or_insert_with(|| {
                    let number = came.len() as u32;
                    came.push((at, Some(step)));
                    todo.push_back((number, next));
                    number
                });
                back.push((number, at));
                if came.len() > most {
                    let what = format!("more than {most} states: the world is too large");
                    return Explored { states: came.len(), steps, wrong: Some((Vec::new(), what)) };
                }
            }
        }
        let wrong = stuck(&back, &ends, came.len())
            .map(|at| (way(&came, at), "not every task can be run from here".to_string()));
        Explored { states: came.len(), steps, wrong }
    }

    fn first(&self) -> State {
        let worker = WorkerState { life: Some(1), connected: false, set: None, runs: 0, down: Vec::new() };
        State {
            owner: None,
            epoch: 0,
            crashes: self.crashes,
            rebirths: self.rebirths,
            copies: self.copies,
            workers: vec![worker; self.workers],
            saved: vec![None; self.workers],
            done: 0,
        }
    }

    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// All that can happen.
    fn next(&self, state: &State) -> Vec<(Step, State)> {
        let mut next = Vec::new();
        let mut add = |step: Step, change: &dyn Fn(&mut State)| {
            let mut after = state.clone();
            change(&mut after);
            self.settle(&mut after);
            next.push((step, after));
        };
        match &state.owner {
            None => add(Step::Begin, &|s| self.begin(s)),
            Some(owner) => {
                if state.crashes > 0 {
                    add(Step::Crash, &|s| crash(s));
                }
                if !owner.open && self.is_safe(state, owner) {
                    add(Step::SafeTime, &|s| open(s));
                }
            }
        }
        for w in 0..self.workers {
            let n = w as u8;
            let worker = &state.workers[w];
            let Some(life) = worker.life else {
                if self.may_be_lost(state, w) {
                    add(Step::Lose(n), &|s| lose(s, w));
                }
                continue;
            };
            if worker.connected {
                add(Step::Cut(n), &|s| cut(&mut s.workers[w]));
                add(Step::Beat(n, true), &|s| self.heard(s, w, true));
                if !self.late {
                    add(Step::Beat(n, false), &|s| self.heard(s, w, false));
                }
                if !worker.down.is_empty() {
                    add(Step::Told(n, false), &|s| told(s, w, false));
                    if state.copies > 0 {
                        add(Step::Told(n, true), &|s| told(s, w, true));
                    }
                }
            } else if state.owner.is_some() {
                add(Step::Hello(n, true), &|s| self.hello(s, w, true));
                if !self.late {
                    add(Step::Hello(n, false), &|s| self.hello(s, w, false));
                }
            }
            // What it runs and knows is over with its lease.
            if !worker.connected && (worker.runs > 0 || worker.set.is_some()) {
                add(Step::Expire(n), &|s| end_life(s, w));
            }
            if worker.connected {
                add(Step::Die(n), &|s| end_life(s, w));
            }
            if self.may_be_lost(state, w) {
                add(Step::Lose(n), &|s| lose(s, w));
            }
            let member = state.owner.as_ref().and_then(|owner| owner.members[w].as_ref());
            let member = member.filter(|member| member.life == life && member.required && worker.connected);
            if let (Some(owner), Some(_)) = (state.owner.as_ref().filter(|owner| owner.open), member) {
                for t in (0..self.tasks).filter(|t| state.done & 1 << t == 0) {
                    let running = owner.members.iter().flatten().any(|member| member.runs & 1 << t != 0);
                    if !running && worker.down.len() < 2 {
                        add(Step::Start(n, t as u8, true), &|s| self.start(s, w, t as u8, true));
                        if !self.late {
                            add(Step::Start(n, t as u8, false), &|s| self.start(s, w, t as u8, false));
                        }
                    }
                    if worker.runs & 1 << t != 0 {
                        add(Step::End(n, t as u8), &|s| ended(s, w, t as u8));
                    }
                }
            }
        }
        next
    }

    fn begin(&self, state: &mut State) {
        state.epoch += 1;
        let incarnation = Incarnation { epoch: Epoch(state.epoch.into()), nonce: 0 };
        let canary = self.bug.map_or_else(Canary::default, Canary::new);
        let saved = |life: &Option<u8>| {
            life.map(|life| Member { life, heard: false, first: None, required: false, runs: 0 })
        };
        // What an old copy says is worth nothing.
        let members = match self.witness {
            Witness::Workers => vec![None; self.workers],
            Witness::Saved | Witness::Both => state.saved.iter().map(saved).collect(),
        };
        state.owner = Some(OwnerState { open: false, set: WorkerSet::new(incarnation, canary), members });
    }

    /// Nobody who has not come can be alive. (On a first start nobody can, at once.)
    fn is_safe(&self, state: &State, owner: &OwnerState) -> bool {
        state.workers.iter().zip(&owner.members).all(|(worker, member)| {
            let came = member.as_ref().is_some_and(|m| m.heard && Some(m.life) == worker.life);
            came || worker.life.is_none() || (worker.runs == 0 && worker.set.is_none())
        })
    }

    fn hello(&self, state: &mut State, w: usize, arrives: bool) {
        let Some(owner) = &mut state.owner else { return };
        let worker = &mut state.workers[w];
        let Some(life) = worker.life else { return };
        worker.connected = true;
        let known = owner.members[w].as_ref().is_some_and(|member| member.life == life);
        if !known {
            if owner.members[w].is_some() {
                owner.set.lose(id_of(w, owner.members[w].as_ref().map_or(0, |member| member.life)));
            }
            owner.members[w] =
                Some(Member { life, heard: false, first: worker.set, required: false, runs: 0 });
            state.saved[w] = Some(life);
        }
        let Some(member) = &mut owner.members[w] else { return };
        if !member.heard {
            member.heard = true;
            member.first = worker.set;
        }
        // What it does not name it never started. What it names counts, as long as the gate is shut.
        member.runs = if owner.open { member.runs & worker.runs } else { worker.runs };
        owner.set.heard(id_of(w, life), worker.set);
        if owner.open || self.is(Bug::SetToldWhileShut) {
            owner.set.join(id_of(w, life), &seat(w), life_of(life));
            let id = owner.set.id();
            self.say(worker, Down::Set(id), arrives);
        }
    }

    /// Something is on its way to a worker, or there.
    fn say(&self, worker: &mut WorkerState, down: Down, arrives: bool) {
        if self.late {
            worker.down.push(down);
        } else if arrives {
            hear(worker, down);
        }
    }

    fn heard(&self, state: &mut State, w: usize, arrives: bool) {
        let worker = &mut state.workers[w];
        let (Some(owner), Some(life)) = (&mut state.owner, worker.life) else { return };
        owner.set.heard(id_of(w, life), worker.set);
        if (owner.open || self.is(Bug::SetToldWhileShut)) && worker.down.is_empty() {
            let id = owner.set.id();
            self.say(worker, Down::Set(id), arrives);
        }
    }

    fn start(&self, state: &mut State, w: usize, t: u8, arrives: bool) {
        let Some(owner) = &mut state.owner else { return };
        if let Some(member) = &mut owner.members[w] {
            member.runs |= 1 << t;
            self.say(&mut state.workers[w], Down::Start(t), arrives);
        }
    }

    /// A life that is over, of which the owner does not know that.
    fn may_be_lost(&self, state: &State, w: usize) -> bool {
        let member = state.owner.as_ref().and_then(|owner| owner.members[w].as_ref());
        member.is_some_and(|member| Some(member.life) != state.workers[w].life)
    }

    /// What follows by itself: the gate opens, and workers are let in.
    fn settle(&self, state: &mut State) {
        let silent: HashSet<WorkerId> = (0..self.workers)
            .filter(|w| !state.workers[*w].connected)
            .filter_map(|w| Some(id_of(w, state.owner.as_ref()?.members[w].as_ref()?.life)))
            .collect();
        let Some(owner) = &mut state.owner else { return };
        if !owner.open {
            let came = owner.members.iter().enumerate().filter_map(|(w, member)| {
                let member = member.as_ref().filter(|member| member.heard)?;
                Some((seat(w), life_of(member.life), member.first))
            });
            let came: Vec<(Seat, Life, Option<WorkerSetId>)> = came.collect();
            let agreed = agree(came.iter().map(|(seat, life, set)| (seat, *life, *set)));
            let all_came = owner.members.iter().flatten().all(|member| member.heard);
            let opens = match self.witness {
                Witness::Workers => agreed,
                Witness::Saved => all_came,
                Witness::Both => agreed || all_came,
            };
            if opens {
                open(state);
            }
        }
        let Some(owner) = state.owner.as_mut().filter(|owner| owner.open) else { return };
        owner.set.propagate(|worker| silent.contains(&worker));
        for (w, member) in owner.members.iter_mut().enumerate() {
            if let Some(member) = member {
                member.required |= owner.set.permits(id_of(w, member.life));
            }
        }
    }
}

fn open(state: &mut State) {
    let Some(owner) = &mut state.owner else { return };
    owner.open = true;
    for (w, member) in owner.members.iter_mut().enumerate() {
        // Whoever has not come is gone.
        if member.as_ref().is_some_and(|member| !member.heard) {
            *member = None;
            state.saved[w] = None;
        }
    }
    for (w, member) in owner.members.iter().enumerate() {
        if let Some(member) = member {
            owner.set.join(id_of(w, member.life), &seat(w), life_of(member.life));
        }
    }
    let all: Vec<(Seat, Life, Option<WorkerSetId>)> = owner
        .members
        .iter()
        .enumerate()
        .filter_map(|(w, member)| member.as_ref().map(|m| (seat(w), life_of(m.life), m.first)))
        .collect();
    if agree(all.iter().map(|(seat, life, set)| (seat, *life, *set))) {
        owner.set.all_know();
    }
}

fn crash(state: &mut State) {
    state.crashes -= 1;
    state.owner = None;
    state.workers.iter_mut().for_each(cut);
}

fn cut(worker: &mut WorkerState) {
    worker.connected = false;
    worker.down.clear();
}

fn told(state: &mut State, w: usize, again: bool) {
    let worker = &mut state.workers[w];
    let down = worker.down[0];
    if again {
        state.copies -= 1;
    } else {
        worker.down.remove(0);
    }
    hear(worker, down);
}

fn hear(worker: &mut WorkerState, down: Down) {
    match down {
        Down::Set(set) => {
            let newer =
                |known: WorkerSetId| known.incarnation != set.incarnation || known.version < set.version;
            if worker.set.is_none_or(newer) {
                worker.set = Some(set);
            }
        }
        Down::Start(t) => worker.runs |= 1 << t,
    }
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

fn lose(state: &mut State, w: usize) {
    let Some(owner) = &mut state.owner else { return };
    if let Some(member) = owner.members[w].take() {
        owner.set.lose(id_of(w, member.life));
        state.saved[w] = None;
    }
}

fn ended(state: &mut State, w: usize, t: u8) {
    state.workers[w].runs &= !(1 << t);
    state.done |= 1 << t;
    if let Some(member) = state.owner.as_mut().and_then(|owner| owner.members[w].as_mut()) {
        member.runs &= !(1 << t);
    }
}

fn id_of(w: usize, life: u8) -> WorkerId {
    WorkerId(w as u64 * 256 + u64::from(life))
}

fn life_of(life: u8) -> Life {
    Life { process: life.into(), rejoin: 0 }
}

fn seat(w: usize) -> Seat {
    match Seat::new(&format!("w{w}")) {
        Ok(seat) => seat,
        Err(refusal) => unreachable!("{refusal}"),
    }
}

fn no_task_runs_twice(state: &State, tasks: usize) -> Result<(), String> {
    for t in 0..tasks {
        let at: Vec<usize> =
            (0..state.workers.len()).filter(|w| state.workers[*w].runs & 1 << t != 0).collect();
        if at.len() > 1 || (!at.is_empty() && state.done & 1 << t != 0) {
            return Err(format!("t{t} runs on {at:?}, done: {}", state.done & 1 << t != 0));
        }
    }
    Ok(())
}

/// A state from which no end can be reached, if there is one.
fn stuck(back: &[(u32, u32)], ends: &[u32], states: usize) -> Option<u32> {
    let mut into: Vec<Vec<u32>> = vec![Vec::new(); states];
    for &(to, from) in back {
        into[to as usize].push(from);
    }
    let mut reaches = vec![false; states];
    let mut todo: Vec<u32> = ends.to_vec();
    ends.iter().for_each(|at| reaches[*at as usize] = true);
    while let Some(at) = todo.pop() {
        for &from in &into[at as usize] {
            if !std::mem::replace(&mut reaches[from as usize], true) {
                todo.push(from);
            }
        }
    }
    reaches.iter().position(|reaches| !reaches).map(|at| at as u32)
}

fn way(came: &[(u32, Option<Step>)], mut at: u32) -> Vec<Step> {
    let mut steps = Vec::new();
    while let (before, Some(step)) = came[at as usize] {
        steps.push(step);
        at = before;
    }
    steps.reverse();
    steps
}

fn fingerprint(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}
