//! The cycle for any number of classes beside a transcription of the text that it generalises, which knows three:
//! "fast", "medium" and "slow", with "default" and "interactive" tasks. Both play the same states; what they do must be
//! the same, up to whom chance chooses among equals.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::admission::{ClassLimit, Limit};
use crate::backlog::Weight;
use crate::change::Settings;
use crate::life::{End, Ending};
use crate::messages::InteractiveAsk;
use crate::names::{Epoch, Key, Millis, QueueId, QueueName, RequestId, WorkerId};
use crate::{Bounds, Effect, Input, Metadata, NewTask, Run, Shard, check};

const FAST: usize = 0;
const MEDIUM: usize = 1;
const SLOW: usize = 2;

/// What runs: how many fixed tasks hold each class, how many default ones, and interactive ones.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Running {
    fixed: Vec<u64>,
    defaults: Vec<u64>,
    interactive: u64,
}

/// A task that waits: one that needs a class, or a default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    Needs(usize),
    Default,
}

impl Waits {
    fn class(self) -> usize {
        match self {
            Waits::Needs(class) => class,
            Waits::Default => FAST,
        }
    }
}

/// What one cycle did.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Did {
    Started { place: usize, class: usize },
    Nothing,
}

impl Running {
    fn count(&self, class: usize) -> u64 {
        let of = |held: &[u64]| held.iter().skip(class).sum::<u64>();
        of(&self.fixed) + of(&self.defaults) + if class == 0 { self.interactive } else { 0 }
    }
}

/// The text, line by line. `limits` are the slow, medium and fast limit by class.
fn transcribed(running: &mut Running, limits: &[u64], queue: &[Waits]) -> Did {
    let reached = |running: &Running, class: usize| running.count(class) >= limits[class];
    let mut ignored = SLOW + 1; // tasks of this class and above
    let first = |ignored: usize| queue.iter().position(|task| task.class() < ignored);
    let is = |at: Option<usize>, least: usize| at.is_some_and(|at| queue[at].class() >= least);

    // if a "slow" task is the first in queue and the "slow limit" is reached:
    if is(first(ignored), SLOW) && reached(running, SLOW) {
        // if some "default" tasks are running with "slow" duration, a random one of them is downgraded to "medium"
        // duration; if the "medium limit" is also reached, this task is downgraded to "fast" duration instead.
        if running.defaults[SLOW] > 0 {
            let to = if reached(running, MEDIUM) { FAST } else { MEDIUM };
            running.defaults[SLOW] -= 1;
            running.defaults[to] += 1;
        }
        // if the "slow limit" is still reached, all "slow" tasks in queue are ignored for the rest of the cycle.
        if reached(running, SLOW) {
            ignored = SLOW;
        }
    }
    // if any unignored tasks in queue remain, a "medium"-to-"slow" task is the first in queue, and the "medium limit"
    // is reached:
    if is(first(ignored), MEDIUM) && reached(running, MEDIUM) {
        // if some "default" tasks are running with "slow" duration, a random one of them is downgraded to "fast";
        // otherwise, if some are running with "medium" duration, a random one of them is downgraded to "fast".
        let from = if running.defaults[SLOW] > 0 { SLOW } else { MEDIUM };
        if running.defaults[from] > 0 {
            running.defaults[from] -= 1;
            running.defaults[FAST] += 1;
        }
        // if the "medium limit" is still reached, all "medium"-to-"slow" tasks in queue are ignored for the rest.
        if reached(running, MEDIUM) {
            ignored = MEDIUM;
        }
    }
    // if any unignored tasks in queue remain, and the "fast limit" is reached:
    if first(ignored).is_some() && reached(running, FAST) {
        // if some "default" tasks are running with "slow" or "medium" duration, they all are downgraded to "fast".
        // This does not impact the "fast limit" immediately.
        running.defaults[FAST] += std::mem::take(&mut running.defaults[SLOW]);
        running.defaults[FAST] += std::mem::take(&mut running.defaults[MEDIUM]);
        // if some "interactive" tasks are running, a random one of them is halted, and its backend is considered free.
        running.interactive = running.interactive.saturating_sub(1);
    }
    // if at this point there still is an unignored task in the queue, we must be able to assign it to a free backend. A
    // "default" task will be initially assigned as large duration as possible without violating limits.
    match first(ignored) {
        Some(place) if !reached(running, FAST) => {
            let class = match queue[place] {
                Waits::Needs(class) => {
                    running.fixed[class] += 1;
                    class
                }
                Waits::Default => {
                    let class = if reached(running, MEDIUM) {
                        FAST
                    } else if reached(running, SLOW) {
                        MEDIUM
                    } else {
                        SLOW
                    };
                    running.defaults[class] += 1;
                    class
                }
            };
            Did::Started { place, class }
        }
        // otherwise, cycle is over and we wait for some running task to finish.
        Some(_) | None => Did::Nothing,
    }
}

/// The same with the code that the shard uses.
struct Played {
    holders: Holders,
    next: u64,
    interactive: Vec<TaskId>,
    chance: Chance,
}

impl Played {
    fn new(running: &Running, limits: &[u64], seed: u64) -> Played {
        let mut played = Played {
            holders: Holders::new(limits.to_vec()),
            next: 0,
            interactive: Vec::new(),
            chance: Chance::new(seed),
        };
        for (class, count) in running.fixed.iter().enumerate() {
            for _ in 0..*count {
                played.begin(class, false);
            }
        }
        for (class, count) in running.defaults.iter().enumerate() {
            for _ in 0..*count {
                played.begin(class, true);
            }
        }
        for _ in 0..running.interactive {
            let task = played.begin(FAST, false);
            played.interactive.push(task);
        }
        played
    }

    fn begin(&mut self, class: usize, default: bool) -> TaskId {
        self.next += 1;
        self.holders.hold(TaskId(self.next), class, default);
        TaskId(self.next)
    }

    fn cycle(&mut self, queue: &[Waits]) -> Did {
        let first = |below: usize| queue.iter().position(|task| task.class() < below);
        let needs = |below: usize| first(below).map(|at| queue[at].class());
        let plan = self.holders.plan(needs);
        // What is planned is done also if no task is left in the end: room was made for one that needs still more.
        let (below, moves) = self.holders.plan_all(needs);
        assert_eq!(plan.as_ref().map(|plan| plan.below), first(below).map(|_| below));
        self.holders.carry_out(&moves, &mut self.chance);
        let Some(place) = first(below) else { return Did::Nothing };
        if self.holders.is_reached(FAST) {
            for class in 1..self.holders.classes() {
                for task in self.holders.defaults_of(class) {
                    self.holders.downgrade(task, class, FAST);
                }
            }
            if !self.interactive.is_empty() {
                let task = self.interactive.swap_remove(self.chance.below(self.interactive.len()));
                self.holders.release(task, FAST, false);
            }
        }
        if self.holders.is_reached(FAST) {
            return Did::Nothing;
        }
        let (class, default) = match queue[place] {
            Waits::Needs(class) => (class, false),
            Waits::Default => (self.holders.longest_free(), true),
        };
        self.begin(class, default);
        Did::Started { place, class }
    }

    fn running(&self) -> Running {
        let classes = self.holders.classes();
        let defaults: Vec<u64> = (0..classes).map(|class| self.holders.defaults(class) as u64).collect();
        let exactly = |class: usize| self.holders.count(class) - self.holders.count(class + 1);
        let mut fixed: Vec<u64> = (0..classes).map(|class| exactly(class) - defaults[class]).collect();
        fixed[FAST] -= self.interactive.len() as u64;
        Running { fixed, defaults, interactive: self.interactive.len() as u64 }
    }
}

fn waits(classes: usize) -> impl Strategy<Value = Waits> {
    prop_oneof![3 => (0..classes).prop_map(Waits::Needs), 1 => Just(Waits::Default)]
}

/// Any state, also such as arise when limits are lowered while tasks run.
fn state(classes: usize) -> impl Strategy<Value = (Running, Vec<u64>, Vec<Waits>)> {
    let counts = || prop::collection::vec(0..4_u64, classes);
    let limits = prop::collection::vec(1..7_u64, classes).prop_map(|mut limits| {
        limits.sort_unstable_by(|a, b| b.cmp(a));
        limits
    });
    let queue = prop::collection::vec(waits(classes), 0..7);
    (counts(), counts(), 0..3_u64, limits, queue).prop_map(|(fixed, defaults, interactive, limits, queue)| {
        (Running { fixed, defaults, interactive }, limits, queue)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    /// Cycle after cycle, until nothing more happens.
    #[test]
    fn three_classes_do_what_the_text_says((running, limits, queue) in state(3), seed in any::<u64>()) {
        let (mut text, mut text_queue) = (running.clone(), queue.clone());
        let mut played = Played::new(&running, &limits, seed);
        for _ in 0..20 {
            let expected = transcribed(&mut text, &limits, &text_queue);
            prop_assert_eq!(played.cycle(&text_queue), expected.clone());
            prop_assert_eq!(played.running(), text.clone());
            match expected {
                Did::Started { place, .. } => drop(text_queue.remove(place)),
                Did::Nothing => break,
            }
        }
    }

    /// Whatever the number of classes: no start exceeds a limit, and a task of the first class waits only for slots.
    #[test]
    fn no_start_exceeds_a_limit((running, limits, queue) in (1..6_usize).prop_flat_map(state), seed in any::<u64>()) {
        let mut played = Played::new(&running, &limits, seed);
        let mut queue = queue;
        while let Did::Started { place, class } = played.cycle(&queue) {
            for (lower, limit) in limits.iter().enumerate().take(class + 1) {
                prop_assert!(played.holders.count(lower) <= *limit, "class {lower} of {class}: {played:?}", played = played.running());
            }
            queue.remove(place);
        }
        let short = queue.iter().any(|task| task.class() == FAST);
        prop_assert!(!short || played.holders.is_reached(FAST), "a short task waits beside a free slot");
        for task in &queue {
            let blocked = (0..=task.class()).any(|class| played.holders.is_reached(class));
            prop_assert!(blocked, "{task:?} waits and could run");
        }
    }
}

fn run(limits: &[u64], defaults: &[u64], fixed: &[u64], queue: &[Waits]) -> (Did, Running) {
    let running = Running { fixed: fixed.to_vec(), defaults: defaults.to_vec(), interactive: 0 };
    let mut played = Played::new(&running, limits, 7);
    (played.cycle(queue), played.running())
}

#[test]
fn a_downgrade_goes_to_below_the_lowest_limit_that_is_reached() {
    // Only the longest is full: one class down.
    let (did, after) = run(&[9, 9, 9, 9, 1], &[0, 0, 0, 0, 1], &[0; 5], &[Waits::Needs(4)]);
    assert_eq!((did, after.defaults), (Did::Started { place: 0, class: 4 }, vec![0, 0, 0, 1, 0]));
    // The second is full too, though those between are not: to the first.
    let (did, after) = run(&[9, 2, 2, 2, 1], &[0, 0, 0, 0, 1], &[0, 1, 0, 0, 0], &[Waits::Needs(4)]);
    assert_eq!((did, after.defaults), (Did::Started { place: 0, class: 4 }, vec![1, 0, 0, 0, 0]));
    // Nobody can give way: what needs the class is left out, and what is shorter goes on.
    let queue = [Waits::Needs(4), Waits::Needs(3)];
    let (did, after) = run(&[9, 9, 9, 9, 1], &[0, 1, 0, 0, 0], &[0, 0, 0, 0, 1], &queue);
    assert_eq!((did, after.defaults), (Did::Started { place: 1, class: 3 }, vec![0, 1, 0, 0, 0]));
}

#[test]
fn a_denied_request_takes_one_step_of_the_longest() {
    let running = Running { fixed: vec![0; 5], defaults: vec![1, 1, 0, 2, 0], interactive: 0 };
    let mut played = Played::new(&running, &[9; 5], 1);
    let mut steps = Vec::new();
    while let Some(Downgrade { from, to, among, .. }) = played.holders.deny(&mut played.chance) {
        steps.push((from, to, among));
    }
    let expected = [(3, 2, 2), (3, 2, 1), (2, 1, 2), (2, 1, 1), (1, 0, 3), (1, 0, 2), (1, 0, 1)];
    assert_eq!(steps, expected);
}

/// A denied interactive request, as the text has it.
fn transcribed_denial(running: &mut Running) {
    if running.defaults[SLOW] > 0 {
        running.defaults[SLOW] -= 1;
        running.defaults[MEDIUM] += 1;
    } else if running.defaults[MEDIUM] > 0 {
        running.defaults[MEDIUM] -= 1;
        running.defaults[FAST] += 1;
    }
}

/// A whole shard with one worker, whose commits happen at once.
struct Whole {
    shard: Shard,
    queue: QueueName,
    next_request: u64,
}

impl Whole {
    fn new(limits: &[u64]) -> Whole {
        let shard = Shard::new(Bounds::default(), Epoch(1), 7, Metadata::default()).unwrap();
        let queue = QueueName::new("q").unwrap();
        let mut whole = Whole { shard, queue: queue.clone(), next_request: 0 };
        whole.tell(Input::Open);
        let class = |(n, limit): (usize, &u64)| ClassLimit {
            duration_ms: 1_000 * (n as u64 + 1),
            limit: if n == 0 { Limit::All } else { Limit::Slots(*limit as u32) },
        };
        let classes = limits.iter().enumerate().map(class).collect();
        let (request, settings) = (whole.request(), Settings { classes, ..Settings::default() });
        whole.tell(Input::Configure { request, queue: queue.clone(), settings, version: None });
        let queues = vec![(queue, Weight::ONE)];
        whole.tell(Input::Slots { worker: WorkerId(1), slots: limits[FAST] as u32, queues });
        whole
    }

    fn request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    fn tell(&mut self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let mut effects = Vec::new();
            self.shard.step(Millis(1), input, &mut effects);
            self.shard.seal(&mut effects);
            check::invariants(&self.shard).unwrap();
            for effect in effects {
                if let Effect::Save { commit, .. } = effect {
                    inputs.push_back(Input::Committed { commit });
                }
            }
        }
    }

    fn put(&mut self, waits: Waits) {
        let mut task = NewTask::new(Key::shared());
        task.max_duration_ms = match waits {
            Waits::Needs(class) => 1_000 * (class as u64 + 1),
            Waits::Default => 0,
        };
        let request = self.request();
        self.tell(Input::Enqueue { request, queue: self.queue.clone(), tasks: vec![task], once: None });
    }

    fn interactive(&mut self) {
        let (request, ask) = (self.request(), InteractiveAsk { key: Key::shared(), max_duration_ms: 0 });
        self.tell(Input::Interactive { request, queue: self.queue.clone(), ask });
    }

    /// Ends one of the runs, and says what it was: its class, and whether a default or an interactive one.
    fn end(&mut self, pick: usize) -> Option<(usize, bool, bool)> {
        let at = pick.checked_rem(self.shard.runs.len())?;
        let live = self.shard.runs.values().nth(at)?;
        let Run { task, fence, attempt, .. } = live.run;
        let was = (live.class, live.default, task.is_interactive());
        let (end, ending) = (End::Succeeded, Ending::default());
        self.tell(Input::Ended { worker: WorkerId(1), task, fence, attempt, end, ending });
        Some(was)
    }

    fn running(&self) -> Running {
        let mut running = Running { fixed: vec![0; 3], defaults: vec![0; 3], interactive: 0 };
        for live in self.shard.runs.values() {
            match (live.run.task.is_interactive(), live.default) {
                (true, _) => running.interactive += 1,
                (false, true) => running.defaults[live.class] += 1,
                (false, false) => running.fixed[live.class] += 1,
            }
        }
        running
    }
}

/// What happens next; the number chooses among runs.
#[derive(Clone, Copy, Debug)]
enum Act {
    Put(bool),
    Interactive,
    End(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => any::<bool>().prop_map(Act::Put),
        1 => Just(Act::Interactive),
        3 => (0..50_usize).prop_map(Act::End),
    ];
    prop::collection::vec(act, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// The dispatcher itself beside the text, from the beginning. What waits at one time is of one lane, for which of
    /// several lanes goes first is not the text's matter; what runs is of all kinds.
    #[test]
    fn a_shard_does_what_the_text_says(
        limits in prop::collection::vec(1..6_u64, 3),
        phases in prop::collection::vec((0..3_usize, acts()), 1..8),
    ) {
        let mut limits = limits;
        limits.sort_unstable_by(|a, b| b.cmp(a));
        let mut whole = Whole::new(&limits);
        let mut text = Running { fixed: vec![0; 3], defaults: vec![0; 3], interactive: 0 };
        for (class, acts) in phases {
            let mut queue: Vec<Waits> = Vec::new();
            let mut acts = VecDeque::from(acts);
            // Until nothing waits any more.
            while let Some(act) = acts.pop_front().or_else(|| (!queue.is_empty()).then_some(Act::End(queue.len()))) {
                match act {
                    Act::Put(default) => {
                        let waits = if class == FAST && default { Waits::Default } else { Waits::Needs(class) };
                        whole.put(waits);
                        queue.push(waits);
                    }
                    Act::Interactive if text.count(FAST) < limits[FAST] => {
                        whole.interactive();
                        text.interactive += 1;
                    }
                    Act::Interactive => {
                        whole.interactive();
                        transcribed_denial(&mut text);
                    }
                    Act::End(pick) => match whole.end(pick) {
                        Some((_, _, true)) => text.interactive -= 1,
                        Some((held, true, false)) => text.defaults[held] -= 1,
                        Some((held, false, false)) => text.fixed[held] -= 1,
                        None => prop_assert!(queue.is_empty(), "{queue:?} waits, and nothing runs"),
                    },
                }
                while let Did::Started { place, .. } = transcribed(&mut text, &limits, &queue) {
                    queue.remove(place);
                }
                prop_assert_eq!(whole.running(), text.clone(), "after {:?}", act);
                prop_assert_eq!(whole.shard.waiting_in(QueueId(0)), queue.len() as u64);
            }
        }
    }
}
