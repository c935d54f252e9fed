//! Scenarios: small situations written as text, played against a shard and a memory store, answered as
//! text. Commits and reads happen at once unless they are held, so that races can be spelled out.
//!
//! ```text
//! bounds window=2 page=2          before anything else: sizes of the core
//! slots w1 2 [render=3 mail=1]    a worker and its slots; without queues it serves all of them
//! settings backoff=1000 retention=5000 attempts=9 lost=2    before anything else: how queues treat their tasks
//! put a*3 b:w=5 c:p=0             accept tasks: key[*count][:w=weight][:p=priority][:d=duration][:x=cost][:t=tries]
//! put a*3:ms=500                  ... that say how long they take
//! put a:delay=500:expires=900:attach=1000:unique=u:for=60000    ... that wait for a time, or are the only ones
//! classes 3s:all 10s:8 30s:25%    the duration classes of the queue
//! settings after=requeue grace=500 keylimit=4 rate=2/3 keyrate=1/1    what else counts for it; a rate with its burst
//! settings rate=2/3cost           a rate of cost, not of tasks
//! limit a 4 | limit a none | rate a 2/3    the same for one key
//! interactive i a [d=5s] | hangup i        somebody wants a slot now; leaves
//! shorten a/1 3s | time a/1       less time for a task; a run's time is over
//! cut a/1                         the same, and its worker says that it had less than at first
//! held                            how many runs hold each class or a longer one, of how many that may
//! in mail put a                   the same in another queue than `q`
//! done a/1 | fail a/1 | fail a/1 for good | refuse a/1    the run of the first task of key a ends, or never began
//! again a/1                       the last end that was said of a task is said again
//! replay a/1 as b/1               a caller's wish, and how the new task is called
//! pause | resume | pause version=1    the same, for the queue
//! share time | share tasks        what the keys of the queue share
//! pause key a | resume key a      the same, for one key
//! watch a/1 | leave a/1           somebody watches, and does not any more
//! done                            the oldest run ends
//! drain                           runs end one after the other, oldest first, until none is left
//! cancel a/2 | weight a 5 | weight a none     a caller's wish
//! restart | lose w1               the owner or a worker dies
//! take, report w1, open           a restart in its parts: the gate is shut until `open`
//! hold writes | hold reads        from now on they stay on their way
//! write | read                    one of them arrives and is answered; `release` lets all go
//! write lost | write unknown | read lost    it fails, or happens and the answer is lost
//! wait 100                        time passes, in milliseconds
//! lanes | explain a/2 | counts | counts a | reads | loop | tries a/1    show something
//! ```
//! A task is called `key/n`: the n-th of its key, in the order of acceptance.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;

use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::backlog::{Cost, Weight};
use evenhand_core::change::{AfterDowngrade, Settings, Share, Try};
use evenhand_core::life::{Backoff, End, Ending, Terms};
use evenhand_core::messages::{Answer, InteractiveAsk, KeyChange, Start, Unique};
use evenhand_core::names::{
    CommitId, Key, Millis, Priority, QueueName, RequestId, RequestKey, TaskId, WorkerId,
};
use evenhand_core::{Bounds, Change, Effect, Input, NewTask, Refusal, Run, Shard, check};
use evenhand_store::{Fault, Memory, Store, StoreError, ready};

use crate::driver::{SHARD, plain};
use crate::reads::Read;

/// Plays a scenario and returns what happened, a line each.
///
/// # Panics
/// If the script makes no sense, or an invariant of the core does not hold.
pub fn play(script: &str) -> String {
    let mut stage = Stage::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        stage.line(line);
    }
    stage.out
}

struct Stage {
    out: String,
    bounds: Bounds,
    settings: Settings,
    store: Memory,
    shard: Option<Shard>,
    now: u64,
    wake: Option<Millis>,
    hold_writes: bool,
    hold_reads: bool,
    writes: VecDeque<(CommitId, Vec<Change>)>,
    reads: VecDeque<Read>,
    read_count: u64,
    workers: BTreeMap<WorkerId, (u32, Vec<(QueueName, Weight)>)>,
    runs: Vec<(WorkerId, Run)>,
    names: BTreeMap<TaskId, String>,
    counts: BTreeMap<String, u64>,
    requests: BTreeMap<RequestId, (String, Vec<String>)>,
    /// What was said last of the end of a task's run.
    ends: BTreeMap<String, Input>,
    next_request: u64,
}

impl Stage {
    fn new() -> Stage {
        Stage {
            out: String::new(),
            bounds: Bounds::default(),
            settings: plain(),
            store: Memory::default(),
            shard: None,
            now: 0,
            wake: None,
            hold_writes: false,
            hold_reads: false,
            writes: VecDeque::new(),
            reads: VecDeque::new(),
            read_count: 0,
            workers: BTreeMap::new(),
            runs: Vec::new(),
            names: BTreeMap::new(),
            counts: BTreeMap::new(),
            requests: BTreeMap::new(),
            ends: BTreeMap::new(),
            next_request: 0,
        }
    }

    fn say(&mut self, line: impl std::fmt::Display) {
        writeln!(self.out, "{line}").expect("writing to a string");
    }

    fn line(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["bounds", ref sizes @ ..] => sizes.iter().for_each(|size| self.bound(size)),
            ["slots", worker, slots, ref queues @ ..] => self.slots(worker, slots, queues),
            ["put", ref tasks @ ..] => self.put("q", tasks),
            ["in", queue, "put", ref tasks @ ..] => self.put(queue, tasks),
            ["done"] => self.end_oldest(),
            ["done", task] => self.end(task, End::Succeeded),
            ["fail", task] => self.end(task, End::Failed),
            ["fail", task, "for", "good"] => self.end(task, End::FailedForGood),
            ["again", task] => {
                let input = self.ends.get(task).cloned().expect("an end that was said");
                self.step(input);
            }
            ["replay", task, "as", name] => {
                let task = self.task(task);
                let request = self.request("replay", vec![name.to_string()]);
                self.step(Input::Replay { request, task });
            }
            [what @ ("pause" | "resume"), "key", key] => {
                let request = self.request(what, vec![]);
                let (queue, key) = (queue_named("q"), key_named(key));
                self.step(Input::PauseKey { request, queue, key, paused: what == "pause" });
            }
            [what @ ("pause" | "resume"), ref version @ ..] => {
                let version = version.first().map(|text| number(text.trim_start_matches("version=")));
                let request = self.request(what, vec![]);
                let settings = Settings { paused: what == "pause", ..self.settings.clone() };
                self.step(Input::Configure { request, queue: queue_named("q"), settings, version });
            }
            ["classes", ref classes @ ..] => {
                self.settings.classes = classes.iter().map(|class| class_of(class)).collect();
                self.configure("classes");
            }
            ["limit", key, limit] => {
                let limit = Some((limit != "none").then(|| number(limit) as u32));
                self.set_key("limit", key, KeyChange { limit, ..KeyChange::default() });
            }
            ["rate", key, rate] => {
                let rate = Some((rate != "none").then(|| rate_of(rate)));
                self.set_key("rate", key, KeyChange { rate, ..KeyChange::default() });
            }
            ["interactive", name, key, ref duration @ ..] => {
                let max_duration_ms = duration.first().map_or(0, |text| ms_of(text.trim_start_matches("d=")));
                let request = self.request("interactive", vec![name.to_string()]);
                let ask = InteractiveAsk { key: key_named(key), max_duration_ms };
                self.step(Input::Interactive { request, queue: queue_named("q"), ask });
            }
            ["hangup", name] => {
                let task = self.task(name);
                let fence = self.runs.iter().find(|(_, run)| run.task == task).expect("it runs").1.fence;
                self.step(Input::Hangup { task, fence });
            }
            ["shorten", name, duration] => {
                let task = self.task(name);
                let request = self.request("shorten", vec![name.to_string()]);
                self.step(Input::Shorten { request, task, max_duration_ms: ms_of(duration) });
            }
            ["time", task] => self.end(task, End::TimeUp),
            ["cut", task] => self.end(task, End::Downgraded),
            ["held"] => {
                let classes = self.shard().classes(&queue_named("q"));
                let line = classes.iter().map(|class| {
                    format!("{}: {} of {}", duration(class.duration_ms), class.held, class.limit)
                });
                let line = line.collect::<Vec<_>>().join(", ");
                self.say(line);
            }
            ["share", what] => {
                self.settings.share = if what == "time" { Share::Time } else { Share::Tasks };
                self.configure("share");
            }
            [what @ ("watch" | "leave"), task] => {
                let task = self.task(task);
                self.step(Input::Watched { task, now: what == "watch" });
            }
            ["settings", ref settings @ ..] => settings.iter().for_each(|setting| self.setting(setting)),
            ["loop"] => {
                let (state, looks) = (self.shard().loop_state(&queue_named("q")), self.shard().looks());
                self.say(format_args!("{}, {looks} looks", state.name()));
            }
            ["tries", task] => self.tries(task),
            ["refuse", task] => self.refuse(task),
            ["drain"] => {
                while !self.runs.is_empty() {
                    self.end_oldest();
                }
            }
            ["cancel", task] => {
                let task = self.task(task);
                let request = self.request("cancel", vec![]);
                self.step(Input::Cancel { request, task });
            }
            ["weight", key, weight] => {
                let weight = Some((weight != "none").then(|| weight_of(weight)));
                self.set_key("weight", key, KeyChange { weight, ..KeyChange::default() });
            }
            ["restart"] => self.restart(),
            ["take"] => {
                self.say("another owner takes the shard");
                self.take();
            }
            ["report", worker] => self.report(worker_named(worker)),
            ["open"] => self.step(Input::Open),
            ["lose", worker] => {
                let worker = worker_named(worker);
                self.runs.retain(|(id, _)| *id != worker);
                self.workers.remove(&worker);
                self.step(Input::Lost { worker });
            }
            ["hold", "writes"] => self.hold_writes = true,
            ["hold", "reads"] => self.hold_reads = true,
            ["release"] => {
                self.hold_writes = false;
                self.hold_reads = false;
                self.settle();
            }
            ["write"] => self.write_next(None),
            ["write", "lost"] => self.write_next(Some(Fault::Lost)),
            ["write", "unknown"] => self.write_next(Some(Fault::AnswerLost)),
            ["read"] => self.read_next(false),
            ["read", "lost"] => self.read_next(true),
            ["wait", ms] => self.wait(ms.parse().expect("milliseconds")),
            ["lanes"] => self.lanes(),
            ["explain", task] => self.explain(task),
            ["counts"] => self.show_counts(),
            ["counts", key] => {
                let counts = self.shard().key_counts(&queue_named("q"), &key_named(key));
                self.say(format_args!("{key}: waiting {} running {}", counts.waiting, counts.running));
            }
            ["reads"] => self.say(format!("{} reads, {} on their way", self.read_count, self.reads.len())),
            _ => panic!("what does {line:?} mean?"),
        }
    }

    fn setting(&mut self, setting: &str) {
        let (name, value) = setting.split_once('=').expect("name=value");
        match name {
            "backoff" => {
                let ms = number(value);
                self.settings.backoff = Backoff { first_ms: ms, factor: 2_000, max_ms: 100 * ms };
            }
            "retention" => self.settings.retention_ms = number(value),
            "attempts" => self.settings.max_attempts = number(value) as u16,
            "lost" => self.settings.max_lost = number(value) as u8,
            "after" => {
                let requeue = value == "requeue";
                self.settings.after_downgrade =
                    if requeue { AfterDowngrade::Requeue } else { AfterDowngrade::Fail };
            }
            "grace" => self.settings.interactive_grace_ms = number(value),
            "keylimit" => self.settings.key_limit = Some(number(value) as u32),
            "rate" => self.settings.rate = Some(rate_of(value)),
            "keyrate" => self.settings.key_rate = Some(rate_of(value)),
            _ => panic!("there is no setting {name}"),
        }
    }

    fn configure(&mut self, what: &str) {
        let request = self.request(what, vec![]);
        let (queue, settings) = (queue_named("q"), self.settings.clone());
        self.step(Input::Configure { request, queue, settings, version: None });
    }

    fn set_key(&mut self, what: &str, key: &str, change: KeyChange) {
        let request = self.request(what, vec![]);
        self.step(Input::SetKey { request, queue: queue_named("q"), key: key_named(key), change });
    }

    fn tries(&mut self, name: &str) {
        let history = ready(self.store.read_history(SHARD, self.task(name))).expect("no fault was ordered");
        let last = history.end.and_then(|end| {
            self.say(format_args!("{name}: {} at {}", end.outcome, end.at));
            end.last
        });
        for tried in history.tries.into_iter().chain(last) {
            let Try { attempt, started, ended, end, .. } = tried;
            self.say(format_args!("{name} attempt {attempt}: {end:?} from {started} to {ended}"));
        }
        if let Some(again) = history.replayed_as {
            self.say(format_args!("{name} again as {}", self.name(again)));
        }
    }

    fn bound(&mut self, size: &str) {
        let (name, value) = size.split_once('=').expect("name=value");
        let value: u64 = value.parse().expect("a number");
        match name {
            "window" => self.bounds.window_rows = value as usize,
            "page" => self.bounds.page_rows = value as usize,
            "aside" => self.bounds.aside_after_ends = value as u32,
            "aside_ms" => self.bounds.aside_after_ms = value,
            "in_flight" => self.bounds.tasks_in_flight = value as usize,
            _ => panic!("there is no bound {name}"),
        }
    }

    // --- the shard ---

    fn shard(&mut self) -> &mut Shard {
        if self.shard.is_none() {
            self.take();
            self.step(Input::Open);
        }
        self.shard.as_mut().expect("it was taken")
    }

    fn take(&mut self) {
        let taken = ready(self.store.take(SHARD, None)).expect("a memory store can be taken");
        let shard = Shard::new(self.bounds.clone(), taken.epoch, 7, taken.metadata);
        self.shard = Some(shard.expect("the metadata is sound").with_defaults(self.settings.clone()));
        self.writes.clear();
        self.reads.clear();
        self.wake = None;
    }

    fn restart(&mut self) {
        self.say("restart");
        self.take();
        for worker in self.workers.keys().copied().collect::<Vec<_>>() {
            self.report(worker);
        }
        self.step(Input::Open);
    }

    fn report(&mut self, worker: WorkerId) {
        let (slots, queues) = self.workers.get(&worker).cloned().expect("a worker that is known");
        self.step(Input::Slots { worker, slots, queues });
        let mine = self.runs.iter().filter(|(id, _)| *id == worker);
        let running = mine.map(|(_, run)| run.clone()).collect();
        self.step(Input::Report { worker, running, ended: Vec::new(), verify: false });
    }

    fn step(&mut self, input: Input) {
        let now = Millis(self.now);
        let mut effects = Vec::new();
        let shard = self.shard();
        shard.step(now, input, &mut effects);
        shard.seal(&mut effects);
        if let Err(what) = check::invariants(shard) {
            panic!("{what}\nafter\n{}", self.out);
        }
        effects.into_iter().for_each(|effect| self.perform(effect));
        self.settle();
    }

    /// Lets arrive what is not held.
    fn settle(&mut self) {
        loop {
            if !self.hold_writes && !self.writes.is_empty() {
                self.write_next(None);
            } else if !self.hold_reads && !self.reads.is_empty() {
                self.read_next(false);
            } else {
                return;
            }
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Save { commit, changes } => self.writes.push_back((commit, changes)),
            Effect::Load { load, lane, above, limit } => {
                self.reads.push_back(Read::Lane { load, lane, above, limit });
            }
            Effect::LoadTimers { load, above, limit } => {
                self.reads.push_back(Read::Timers { load, above, limit });
            }
            Effect::LoadParked { load, lane, key, above, limit } => {
                self.reads.push_back(Read::Parked { load, lane, key, above, limit });
            }
            Effect::LoadTask { load, task } => self.reads.push_back(Read::Task { load, task }),
            Effect::Start { worker, run, .. } => {
                if run.task.is_interactive() {
                    // Its name is that of the request, which is answered next.
                    let names = self.requests.values().find(|(what, _)| what == "interactive");
                    let name = names.and_then(|(_, names)| names.first()).expect("a request for it");
                    self.names.insert(run.task, name.clone());
                }
                let (name, on) = (self.name(run.task), self.on(worker));
                let again =
                    if run.attempt > 1 { format!(" (attempt {})", run.attempt) } else { String::new() };
                let time = match run.limit_ms {
                    0 => String::new(),
                    ms => format!(" for {}", duration(ms)),
                };
                self.say(format_args!("run {name}{on}{again}{time}"));
                self.runs.push((worker, run));
            }
            Effect::Stop { task, .. } => self.say(format_args!("stop {}", self.name(task))),
            Effect::Limit { task, limit_ms, max_duration_ms, .. } => {
                if let Some((_, run)) = self.runs.iter_mut().find(|(_, run)| run.task == task) {
                    run.limit_ms = limit_ms;
                    let terms = run.terms.as_deref().cloned().unwrap_or_default();
                    run.terms = Some(Terms { max_duration_ms, ..terms }.into());
                }
                self.say(format_args!("cut {} to {}", self.name(task), duration(limit_ms)));
            }
            Effect::Warn { task, grace_ms, .. } => {
                self.say(format_args!("warn {}: {grace_ms} ms", self.name(task)));
            }
            Effect::InteractiveOver { task, why, .. } => {
                self.say(format_args!("over {}: {why:?}", self.name(task)));
                self.runs.retain(|(_, run)| run.task != task);
            }
            Effect::Acknowledge { .. }
            | Effect::MemberSaved { .. }
            | Effect::Marked { .. }
            | Effect::Retried { .. }
            | Effect::Due { .. } => {}
            Effect::RefuseWorker { worker, refusal } => {
                self.say(format_args!("w{worker} refused: {refusal}"))
            }
            Effect::Answer { request, answer } => self.answered(request, answer),
            Effect::Finished { task, end, .. } => {
                let outcome = end.outcome.to_string();
                if outcome != "succeeded" {
                    self.say(format_args!("{outcome} {}", self.name(task)));
                }
            }
            Effect::Wake { at } => self.wake = Some(at),
            Effect::Broken { what } => self.say(format_args!("broken: {what}")),
        }
    }

    fn answered(&mut self, request: RequestId, answer: Result<Answer, Refusal>) {
        let (what, names) = self.requests.remove(&request).expect("a request that was made");
        match answer {
            Ok(Answer::Accepted(tasks)) => {
                for ((task, created), name) in tasks.into_iter().zip(names) {
                    if created {
                        self.names.insert(task, name);
                    } else {
                        self.say(format_args!("{name} is {}", self.name(task)));
                    }
                }
            }
            Ok(Answer::AcceptedBefore(tasks)) => {
                for (task, name) in tasks.into_iter().zip(names) {
                    self.names.insert(task, name);
                }
            }
            Ok(Answer::Replayed(task)) => {
                self.names.extend(names.into_iter().map(|name| (task, name)));
            }
            Ok(Answer::Shortened(ms)) => self.say(format_args!("shortened to {}", duration(ms))),
            Ok(
                Answer::KeySet
                | Answer::Canceled
                | Answer::Configured(_)
                | Answer::KeyPaused(_)
                | Answer::Interactive { .. },
            ) => {}
            Ok(Answer::Stopping) => self.say("stopping"),
            Err(refusal) => self.say(format_args!("{what} refused: {refusal}")),
        }
    }

    // --- the store ---

    fn write_next(&mut self, fault: Option<Fault>) {
        let (commit, changes) = self.writes.pop_front().expect("a write on its way");
        if let Some(fault) = fault {
            self.store.fail_commit(fault);
        }
        // Tasks get their names when the store has them: the caller may never hear of them.
        for change in &changes {
            if let Change::Accepted(task) = change
                && !self.names.contains_key(&task.id)
            {
                let named = self.requests.values().flat_map(|(_, names)| names).find(|name| {
                    name.starts_with(&format!("{}/", task.key.as_str()))
                        && !self.names.values().any(|taken| taken == *name)
                });
                let name = named.cloned().unwrap_or_else(|| format!("{}/?", task.key));
                self.names.insert(task.id, name);
            }
        }
        let epoch = self.shard().epoch();
        match ready(self.store.commit(SHARD, epoch, changes)) {
            Ok(()) => self.step(Input::Committed { commit }),
            Err(error @ (StoreError::Unavailable { .. } | StoreError::Full { .. })) => {
                self.say(format_args!("write failed: {error}"));
                self.restart();
            }
            Err(error @ (StoreError::Fenced { .. } | StoreError::Corrupt { .. })) => panic!("{error}"),
        }
    }

    fn read_next(&mut self, lost: bool) {
        let read = self.reads.pop_front().expect("a read on its way");
        self.read_count += u64::from(matches!(read, Read::Lane { .. }) && !lost);
        let input = if lost { read.fail() } else { read.happen(&self.store) };
        self.step(input);
    }

    fn wait(&mut self, ms: u64) {
        let until = self.now + ms;
        while let Some(at) = self.wake.filter(|at| at.0 <= until) {
            self.now = self.now.max(at.0);
            self.wake = None;
            self.step(Input::Tick);
        }
        self.now = until;
    }

    // --- workers and callers ---

    fn slots(&mut self, worker: &str, slots: &str, queues: &[&str]) {
        let worker = worker_named(worker);
        let slots: u32 = slots.parse().expect("a number of slots");
        let mut served: Vec<(QueueName, Weight)> = queues
            .iter()
            .map(|queue| {
                let (name, weight) = queue.split_once('=').unwrap_or((queue, "1"));
                (queue_named(name), weight_of(weight))
            })
            .collect();
        if served.is_empty() {
            served.push((queue_named("q"), Weight::ONE));
        }
        self.workers.insert(worker, (slots, served.clone()));
        self.step(Input::Slots { worker, slots, queues: served });
    }

    fn put(&mut self, queue: &str, words: &[&str]) {
        let mut tasks = Vec::new();
        let mut names = Vec::new();
        for word in words {
            let mut parts = word.split(':');
            let first = parts.next().expect("a key");
            let (key, count) = first.split_once('*').unwrap_or((first, "1"));
            let mut task = NewTask::new(key_named(key));
            for part in parts {
                let (name, value) = part.split_once('=').expect("name=value");
                match name {
                    "w" => task.weight = weight_of(value),
                    "p" => task.priority = Priority(value.parse().expect("a priority")),
                    "d" => task.max_duration_ms = ms_of(value),
                    "x" => {
                        task.cost = Cost::new(value.parse::<u32>().expect("a cost") * 1000).expect("a cost")
                    }
                    "delay" => task.start = Start::After(number(value)),
                    "at" => task.start = Start::At(Millis(number(value))),
                    "ms" => task.expected_ms = number(value),
                    "expires" => task.expires_ms = number(value),
                    "attach" => task.attach_ms = number(value),
                    "unique" => {
                        let key = RequestKey(value.bytes().fold(0, |sum, byte| sum * 256 + u128::from(byte)));
                        task.unique = Some(Unique { key, window_ms: 60_000 });
                    }
                    "for" => {
                        let window_ms = number(value);
                        task.unique = task.unique.map(|unique| Unique { window_ms, ..unique });
                    }
                    "t" => task.max_attempts = Some(value.parse().expect("a number of tries")),
                    _ => panic!("what is {name} of a task?"),
                }
            }
            for _ in 0..count.parse::<u64>().expect("a count") {
                let n = self.counts.entry(key.to_string()).or_default();
                *n += 1;
                names.push(format!("{key}/{n}"));
                tasks.push(task.clone());
            }
        }
        let request = self.request("put", names);
        self.step(Input::Enqueue { request, queue: queue_named(queue), tasks, once: None });
    }

    fn request(&mut self, what: &str, names: Vec<String>) -> RequestId {
        self.next_request += 1;
        let request = RequestId(self.next_request);
        self.requests.insert(request, (what.to_string(), names));
        request
    }

    fn take_run(&mut self, name: &str) -> (WorkerId, Run) {
        let n = self.runs.iter().position(|(_, run)| self.name(run.task) == name);
        let n = n.unwrap_or_else(|| panic!("{name} does not run\n{}", self.out));
        self.runs.remove(n)
    }

    fn end(&mut self, name: &str, end: End) {
        let (worker, run) = self.take_run(name);
        let Run { task, fence, attempt, .. } = run;
        let input = Input::Ended { worker, task, fence, attempt, end, ending: Ending::default() };
        self.ends.insert(name.to_string(), input.clone());
        self.step(input);
    }

    fn end_oldest(&mut self) {
        let name = self.runs.first().map(|(_, run)| self.name(run.task)).expect("something runs");
        self.end(&name, End::Succeeded);
    }

    fn refuse(&mut self, name: &str) {
        let (worker, run) = self.take_run(name);
        self.step(Input::Refused { worker, task: run.task, fence: run.fence });
    }

    fn task(&self, name: &str) -> TaskId {
        let found = self.names.iter().find(|(_, n)| *n == name);
        *found.unwrap_or_else(|| panic!("there is no task {name}")).0
    }

    fn name(&self, task: TaskId) -> String {
        self.names.get(&task).cloned().unwrap_or_else(|| format!("task {task}"))
    }

    fn on(&self, worker: WorkerId) -> String {
        if self.workers.len() > 1 { format!(" on w{worker}") } else { String::new() }
    }

    // --- showing ---

    fn lanes(&mut self) {
        self.shard();
        let lines = self.store.look(SHARD, |tables| {
            let mut lines = Vec::new();
            for (lane, record) in &tables.lanes {
                let rows = tables.rows.range((*lane, evenhand_core::backlog::Level::ZERO)..);
                let rows = rows.take_while(|((id, _), _)| id == lane);
                let rows: Vec<String> = rows
                    .map(|((_, level), row)| format!("{}@{}", self.name(row.task), level.pass().time()))
                    .collect();
                lines.push(format!("lane {lane}: V={} rows [{}]", record.vtime, rows.join(" ")));
            }
            lines
        });
        lines.into_iter().for_each(|line| self.say(line));
    }

    fn explain(&mut self, name: &str) {
        let task = self.task(name);
        let line = match ready(self.store.read_task(SHARD, task)).expect("no fault was ordered") {
            Some(task) => {
                let now = Millis(self.now);
                let standing = self.shard().explain(now, &task);
                standing.text(|task| self.name(task))
            }
            None => "no such task".to_string(),
        };
        self.say(format_args!("{name}: {line}"));
    }

    fn show_counts(&mut self) {
        let queue = queue_named("q");
        if let Some(counts) = self.shard().counts(&queue) {
            let t = counts.totals;
            self.say(format_args!(
                "waiting {} running {} succeeded {} failed {} canceled {}{}{}",
                counts.waiting,
                counts.running,
                t.succeeded,
                t.failed,
                t.canceled,
                if t.expired > 0 { format!(" expired {}", t.expired) } else { String::new() },
                if t.scheduled > 0 { format!(" scheduled {}", t.scheduled) } else { String::new() },
            ));
        }
        let held = self.shard().held();
        self.say(format_args!("in memory: {} rows, {} keys", held.rows, held.keys));
    }
}

fn queue_named(name: &str) -> QueueName {
    QueueName::new(name).expect("a good name")
}

fn key_named(key: &str) -> Key {
    Key::new(key).expect("a good key")
}

fn weight_of(weight: &str) -> Weight {
    Weight::new(weight.parse().expect("a number")).expect("a good weight")
}

/// `3s`, `250ms`.
fn ms_of(text: &str) -> u64 {
    match text.strip_suffix("ms") {
        Some(ms) => number(ms),
        None => number(text.trim_end_matches('s')) * 1_000,
    }
}

fn duration(ms: u64) -> String {
    if ms.is_multiple_of(1_000) { format!("{}s", ms / 1_000) } else { format!("{ms}ms") }
}

/// `3s:all`, `10s:8`, `30s:25%`.
fn class_of(text: &str) -> ClassLimit {
    let (duration, limit) = text.split_once(':').expect("duration:limit");
    let limit = match (limit, limit.strip_suffix('%')) {
        ("all", _) => Limit::All,
        (_, Some(percent)) => Limit::Percent(number(percent) as u8),
        (limit, None) => Limit::Slots(number(limit) as u32),
    };
    ClassLimit { duration_ms: ms_of(duration), limit }
}

/// `2/3`: two a second, three at once. `2/3cost`: so much cost.
fn rate_of(text: &str) -> Rate {
    let (text, unit) = match text.strip_suffix("cost") {
        Some(text) => (text, RateUnit::Cost),
        None => (text, RateUnit::Tasks),
    };
    let (per_second, burst) = text.split_once('/').unwrap_or((text, "1"));
    let per_second = (per_second.parse::<f64>().expect("a number") * 1_000.0).round() as u64;
    Rate { per_second, burst: number(burst) * 1_000, unit }
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

fn worker_named(name: &str) -> WorkerId {
    WorkerId(name.trim_start_matches('w').parse().expect("w and a number"))
}
