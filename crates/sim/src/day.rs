//! A short simulated day: four tenants share a few workers, and a table shows who got what. Until there
//! is a server, this is what `make run` plays.

use std::collections::BTreeMap;
use std::fmt::Write;

use evenhand_core::backlog::Weight;
use evenhand_core::life::End;
use evenhand_core::names::{Key, Millis, QueueName, TaskId, WorkerId};
use evenhand_core::{Bounds, Input, NewTask, Refusal, Run};

use crate::driver::{Driver, Event, SHARD, Trouble};
use crate::rng::Rng;

const HOUR: u64 = 3_600_000;
const WORKERS: u64 = 4;
const SLOTS: u32 = 4;

/// A tenant of the day.
struct Tenant {
    name: &'static str,
    weight: f64,
    story: &'static str,
}

const TENANTS: &[Tenant] = &[
    Tenant { name: "acme", weight: 3.0, story: "pays for three shares, busy all day" },
    Tenant { name: "bulk", weight: 1.0, story: "drops 12,000 tasks at midnight" },
    Tenant { name: "mona", weight: 1.0, story: "one task every five minutes" },
    Tenant { name: "zeta", weight: 1.0, story: "works from nine to five" },
];

#[derive(Clone, Debug, Default)]
struct Account {
    accepted: u64,
    started: u64,
    /// Accepted, and not served yet by an ideal scheduler that divides every start by the weights.
    ideal_waiting: f64,
    /// What that scheduler has given it so far.
    ideal: f64,
    /// The most that it was behind the ideal, and ahead of it, in tasks.
    behind: f64,
    ahead: f64,
    waits: Vec<u64>,
}

/// Plays the day and returns the table.
pub fn play(seed: u64) -> Result<String, String> {
    let mut day = Day::new(seed).map_err(|refusal| refusal.to_string())?;
    day.run().map_err(|trouble| trouble.to_string())?;
    Ok(day.table())
}

struct Day {
    rng: Rng,
    driver: Driver,
    queue: QueueName,
    accounts: BTreeMap<&'static str, Account>,
    accepted_at: BTreeMap<TaskId, u64>,
    /// Runs by the time they end.
    runs: BTreeMap<(u64, TaskId), (WorkerId, Run)>,
    restarts: u64,
}

impl Day {
    fn new(seed: u64) -> Result<Day, Refusal> {
        let mut driver = Driver::fresh(Bounds::default());
        driver.checks = false; // the worlds check every step; a day is for looking at
        Ok(Day {
            rng: Rng::new(seed),
            driver,
            queue: QueueName::new("render")?,
            accounts: BTreeMap::new(),
            accepted_at: BTreeMap::new(),
            runs: BTreeMap::new(),
            restarts: 0,
        })
    }

    fn run(&mut self) -> Result<(), Trouble> {
        self.workers_join()?;
        for minute in 0..24 * 60 {
            let now = minute * 60_000;
            self.runs_end_until(now)?;
            self.driver.now = Millis(now);
            if minute == 0 {
                self.arrive("bulk", 12_000)?;
            }
            self.arrive("acme", 10)?;
            if minute % 5 == 0 {
                self.arrive("mona", 1)?;
            }
            if (9 * 60..17 * 60).contains(&minute) {
                let burst = if minute % 60 == 0 { 120 } else { 4 };
                self.arrive("zeta", burst)?;
            }
            if minute % (5 * 60) == 4 * 60 {
                self.restart()?;
            }
        }
        self.runs_end_until(24 * HOUR)
    }

    fn workers_join(&mut self) -> Result<(), Trouble> {
        for worker in 1..=WORKERS {
            let queues = vec![(self.queue.clone(), Weight::ONE)];
            self.driver.tell(Input::Slots { worker: WorkerId(worker), slots: SLOTS, queues })?;
        }
        self.look()
    }

    fn arrive(&mut self, name: &'static str, count: u64) -> Result<(), Trouble> {
        let weight = weight_of(name);
        let wrong = |refusal: Refusal| Trouble::Wrong(refusal.to_string());
        let mut task = NewTask::new(Key::new(name).map_err(wrong)?);
        task.weight = Weight::new(weight).map_err(wrong)?;
        let mut left = count;
        while left > 0 {
            let batch = left.min(5_000);
            left -= batch;
            let account = self.accounts.entry(name).or_default();
            account.accepted += batch;
            account.ideal_waiting += batch as f64;
            let before = self.driver.store.look(SHARD, |tables| tables.next_seq.max(1));
            for id in before..before + batch {
                self.accepted_at.insert(TaskId(id), self.driver.now.0);
            }
            self.driver.enqueue(&self.queue.clone(), vec![task.clone(); batch as usize])?;
            self.look()?;
        }
        Ok(())
    }

    fn runs_end_until(&mut self, until: u64) -> Result<(), Trouble> {
        while let Some(entry) = self.runs.first_entry().filter(|entry| entry.key().0 <= until) {
            let ((time, _), (worker, run)) = entry.remove_entry();
            self.driver.now = Millis(time);
            self.driver.end(worker, &run, End::Succeeded)?;
            self.look()?;
        }
        Ok(())
    }

    /// The scheduler is killed and started again; the workers go on and report.
    fn restart(&mut self) -> Result<(), Trouble> {
        self.restarts += 1;
        self.driver.retake()?;
        for worker in 1..=WORKERS {
            let worker = WorkerId(worker);
            let queues = vec![(self.queue.clone(), Weight::ONE)];
            self.driver.tell(Input::Slots { worker, slots: SLOTS, queues })?;
            let mine = self.runs.values().filter(|(id, _)| *id == worker);
            let running = mine.map(|(_, run)| run.clone()).collect();
            self.driver.tell(Input::Report { worker, running, ended: Vec::new(), verify: false })?;
        }
        self.driver.tell(Input::Open)?;
        self.look()
    }

    /// Books what was started.
    fn look(&mut self) -> Result<(), Trouble> {
        for event in self.driver.events() {
            let Event::Started(worker, run) = event else { continue };
            self.serve_ideally();
            for (name, account) in &mut self.accounts {
                if *name == run.key.as_str() {
                    account.started += 1;
                    let accepted = self.accepted_at.remove(&run.task).unwrap_or_default();
                    account.waits.push(self.driver.now.0.saturating_sub(accepted));
                }
                account.behind = account.behind.max(account.ideal - account.started as f64);
                account.ahead = account.ahead.max(account.started as f64 - account.ideal);
            }
            let lasts = self.rng.range(20_000, 70_000);
            self.runs.insert((self.driver.now.0 + lasts, run.task), (worker, run));
        }
        Ok(())
    }

    /// Divides one start among the keys that wait, by weight; what one cannot use goes to the others.
    fn serve_ideally(&mut self) {
        let mut left = 1.0;
        while left > 1e-9 {
            let waiting = self.accounts.iter().filter(|(_, account)| account.ideal_waiting > 1e-9);
            let weights: f64 = waiting.map(|(name, _)| weight_of(name)).sum();
            if weights == 0.0 {
                return;
            }
            let mut given = 0.0;
            for (name, account) in &mut self.accounts {
                if account.ideal_waiting > 1e-9 {
                    let gift = (left * weight_of(name) / weights).min(account.ideal_waiting);
                    account.ideal_waiting -= gift;
                    account.ideal += gift;
                    given += gift;
                }
            }
            left -= given;
        }
    }

    fn table(&mut self) -> String {
        let mut out = String::new();
        let slots = WORKERS * u64::from(SLOTS);
        let restarts = self.restarts;
        let mut line = |text: String| writeln!(out, "{text}").expect("writing to a string");
        line(format!(
            "A simulated day: queue `render`, {slots} slots, tasks of 20 to 70 s, {restarts} restarts of the scheduler."
        ));
        line(String::new());
        line(format!(
            "{:<6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>12} {:>11}   {}",
            "key",
            "weight",
            "accepted",
            "started",
            "wait p50",
            "wait p99",
            "most behind",
            "most ahead",
            "story"
        ));
        for tenant in TENANTS {
            let account = self.accounts.entry(tenant.name).or_default();
            account.waits.sort_unstable();
            let wait =
                |of_100: usize| account.waits.get(account.waits.len() * of_100 / 100).copied().unwrap_or(0);
            line(format!(
                "{:<6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>12} {:>11}   {}",
                tenant.name,
                tenant.weight,
                account.accepted,
                account.started,
                duration(wait(50)),
                duration(wait(99)),
                format!("{:.1} tasks", account.behind),
                format!("{:.1} tasks", account.ahead),
                tenant.story,
            ));
        }
        line(String::new());
        line("Behind and ahead of an ideal scheduler that cuts every start into shares by weight,".into());
        line("at the worst moment of the day, restarts included.".into());
        out
    }
}

fn duration(ms: u64) -> String {
    match ms / 1000 {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s => format!("{:.1} h", s as f64 / 3600.0),
    }
}

fn weight_of(name: &str) -> f64 {
    TENANTS.iter().find(|tenant| tenant.name == name).map_or(1.0, |tenant| tenant.weight)
}
