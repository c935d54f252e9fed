//! What a seed decides before a chaotic world begins: who the tenants are, how much memory there is,
//! when a worker counts as lost, and how much goes wrong. Times are drawn as parts of `lost_after`, so that
//! a world with quick thresholds is a short one, and as eventful as any other.

use evenhand_core::Bounds;
use evenhand_core::admission::{ClassLimit, Limit, Rate, RateUnit};
use evenhand_core::change::{AfterDowngrade, Settings, Share};
use evenhand_core::life::Backoff;
use evenhand_core::owner::health::Thresholds;

use crate::rng::Rng;

/// How tasks arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// One after the other.
    Steady,
    /// Many at once, then a pause.
    Bursts,
    /// Keys by Zipf's law.
    Zipf,
    /// One tenant sends almost everything.
    Giant,
    /// Every task has a key of its own.
    OneShot,
    /// Large backlogs, most of which are canceled.
    Canceled,
}

/// What mostly goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing: what happens there is not the weather.
    None,
    /// A little of everything, or much of it.
    All,
    /// Servers crash, are replaced while they run, and drop their owners.
    Servers,
    /// Servers stop in good order, and workers are cut off just then.
    Stops,
    /// Workers are cut off and connections break.
    Network,
    /// Processes are stopped for a while.
    Sleep,
    /// Workers die, in every way there is.
    Deaths,
}

/// How often what goes wrong, per thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    /// Of commits: it fails, in one of several ways.
    pub commit: u64,
    /// Of reads: it fails.
    pub read: u64,
    /// Of changes of weather: the server crashes.
    pub crash: u64,
    /// The same: another owner takes over while the first goes on.
    pub zombie: u64,
    /// The same: the server stops in good order.
    pub stop: u64,
    /// The same: a worker ends, in one of several ways.
    pub death: u64,
    /// The same: a worker is cut off, in one or both directions.
    pub partition: u64,
    /// The same: a connection breaks, or stalls.
    pub broken: u64,
    /// The same: a process is stopped for a while.
    pub pause: u64,
    /// Of moments at which it would be worst: the worst happens.
    pub murphy: u64,
    /// Of changes of weather: the store is copied, or set back to the copy.
    pub set_back: u64,
}

impl Rates {
    fn new(trouble: Trouble, rng: &mut Rng) -> Rates {
        let read = *rng.pick(&[0, 20, 300]);
        match trouble {
            Trouble::None => Rates::default(),
            Trouble::All => Rates {
                commit: *rng.pick(&[0, 5, 50]),
                read,
                crash: *rng.pick(&[0, 20, 120]),
                zombie: *rng.pick(&[0, 20, 120]),
                stop: *rng.pick(&[0, 20, 120]),
                death: *rng.pick(&[0, 20, 120]),
                partition: *rng.pick(&[0, 40, 150]),
                broken: *rng.pick(&[0, 40, 150]),
                pause: *rng.pick(&[0, 30, 100]),
                murphy: *rng.pick(&[0, 50, 200]),
                set_back: *rng.pick(&[0, 150]),
            },
            Trouble::Servers => Rates {
                commit: *rng.pick(&[0, 5, 20]),
                read,
                crash: *rng.pick(&[10, 60]),
                zombie: *rng.pick(&[0, 40]),
                stop: *rng.pick(&[0, 10]),
                murphy: *rng.pick(&[60, 120]),
                set_back: *rng.pick(&[0, 0, 150]),
                ..Rates::default()
            },
            Trouble::Stops => Rates { read, stop: *rng.pick(&[20, 40]), murphy: 200, ..Rates::default() },
            Trouble::Network => {
                Rates { partition: *rng.pick(&[50, 150]), broken: *rng.pick(&[0, 80]), ..Rates::default() }
            }
            Trouble::Sleep => Rates { pause: *rng.pick(&[50, 150]), ..Rates::default() },
            Trouble::Deaths => Rates { death: *rng.pick(&[50, 150]), ..Rates::default() },
        }
    }
}

/// How clocks go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drift {
    /// Not at all.
    None,
    /// Each as it likes, by up to a hundredth.
    Any,
    /// The worst there is: workers live by slow clocks, and servers lose patience by fast ones.
    Worst,
}

/// A world to be played.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bounds of the core, often tiny.
    pub bounds: Bounds,
    /// How queues treat their tasks.
    pub queue: Settings,
    /// Per thousand of tasks: it waits for a time before it starts; it expires; it is attached; it has a unique
    /// key.
    pub timed: u64,
    /// How tasks arrive.
    pub arrivals: Arrivals,
    /// Queues.
    pub queues: u64,
    /// Keys that return.
    pub keys: u64,
    /// Priorities in use.
    pub priorities: u64,
    /// Per thousand of requests: somebody wants a slot now.
    pub interactive: u64,
    /// Seats of workers.
    pub workers: u64,
    /// Slots of a worker, at most.
    pub slots: u64,
    /// How many times clients act.
    pub actions: u64,
    /// How many times the weather may change.
    pub weather: u64,
    /// How long clients act and things go wrong.
    pub span_ms: u64,
    /// What counts for workers; the second sometimes holds for one owner.
    pub thresholds: [Thresholds; 2],
    /// How long workers may go on without a server that stopped in good order.
    pub absence_ms: u64,
    /// How clocks go wrong.
    pub drift: Drift,
    /// The longest delay of a store operation.
    pub delay_ms: u64,
    /// The longest delay of a message on a network that is well.
    pub net_ms: u64,
    /// How long it takes at most to kill a run.
    pub kill_ms: u64,
    /// The longest run, but for the long ones.
    pub run_ms: u64,
    /// Per thousand: a run may take longer than a worker lives without a server. A few do, in a world.
    pub long_run: u64,
    /// Whoever takes the shard is in doubt whether its store is the newest copy.
    pub doubtful: bool,
    /// What mostly goes wrong.
    pub trouble: Trouble,
    /// How often what goes wrong.
    pub rates: Rates,
    /// Per thousand: a run fails.
    pub run_fault: u64,
    /// Per thousand: a run cannot be started.
    pub refusal: u64,
    /// Per thousand of enqueues: the caller names the request.
    pub named: u64,
}

impl Plan {
    /// The plan of a seed.
    pub fn new(rng: &mut Rng) -> Plan {
        let arrivals = *rng.pick(&[
            Arrivals::Steady,
            Arrivals::Bursts,
            Arrivals::Zipf,
            Arrivals::Giant,
            Arrivals::OneShot,
            Arrivals::Canceled,
        ]);
        let trouble = *rng.pick(&[
            Trouble::None,
            Trouble::None,
            Trouble::All,
            Trouble::Servers,
            Trouble::Servers,
            Trouble::Stops,
            Trouble::Network,
            Trouble::Network,
            Trouble::Sleep,
            Trouble::Deaths,
        ]);
        let lost_ms = *rng.pick(&[500, 600, 1_000, 3_000]);
        let first = thresholds(rng, lost_ms);
        let other = lost_ms * rng.range(1, 4);
        let second = thresholds(rng, other);
        let quickest = first.unhealthy_after_ms.min(second.unhealthy_after_ms);
        // Runs are dead within the margin that the thresholds leave, most of which may be needed for it.
        let slowest_kill = (lost_ms / 10).max(100) * 8 / 10;
        let absence = *rng.pick(&[0, 1, 4, 12]);
        Plan {
            bounds: Bounds {
                window_rows: *rng.pick(&[1, 2, 3, 5, 12, 40, 1000]),
                page_rows: *rng.pick(&[1, 2, 3, 10, 100]),
                payload_bytes: *rng.pick(&[0, 40, 10_000]),
                aside_after_ends: *rng.pick(&[1, 2, 5, 50]),
                aside_after_ms: *rng.pick(&[1, 50, 2_000]),
                tasks_in_flight: *rng.pick(&[5, 50, 10_000]),
                task_reads: *rng.pick(&[2, 1000]),
                moves_per_commit: *rng.pick(&[1, 2, 5, 2_000]),
            },
            queue: Settings {
                max_attempts: 3,
                backoff: Backoff {
                    first_ms: *rng.pick(&[0, 0, 1, 150, lost_ms / 2]),
                    factor: *rng.pick(&[1_000, 2_000]),
                    max_ms: lost_ms,
                },
                max_lost: *rng.pick(&[1, 2, 255]),
                retention_ms: *rng.pick(&[0, 0, 1, 300, lost_ms]),
                share: *rng.pick(&[Share::Tasks, Share::Tasks, Share::Time]),
                ..admission(rng, lost_ms)
            },
            timed: *rng.pick(&[0, 0, 100, 400]),
            arrivals,
            queues: rng.range(1, 3),
            keys: *rng.pick(&[1, 3, 10, 30]),
            priorities: rng.range(1, 3),
            interactive: *rng.pick(&[0, 0, 100]),
            workers: rng.range(1, 4),
            slots: rng.range(1, 4),
            actions: rng.range(20, 120),
            weather: if trouble == Trouble::None { 0 } else { 40 },
            span_ms: lost_ms * rng.range(3, 12),
            thresholds: [first, second],
            absence_ms: absence * lost_ms,
            drift: *rng.pick(&[Drift::None, Drift::Any, Drift::Worst]),
            delay_ms: (*rng.pick(&[0, 1, 5, 50, 300])).min(lost_ms / 8),
            net_ms: *rng.pick(&[0, 1, 10, quickest / 8, quickest / 4]),
            kill_ms: *rng.pick(&[0, 10, slowest_kill]),
            run_ms: *rng.pick(&[1, 20, lost_ms / 4, lost_ms, 2 * lost_ms]),
            long_run: *rng.pick(&[20, 200, 400]),
            doubtful: rng.chance(300),
            trouble,
            rates: Rates::new(trouble, rng),
            run_fault: *rng.pick(&[0, 50, 400]),
            refusal: *rng.pick(&[0, 20, 200]),
            named: *rng.pick(&[0, 300]),
        }
    }

    /// The plan of a seed in which the store is set back again and again, while workers die, come and are cut off.
    pub fn of_set_backs(rng: &mut Rng) -> Plan {
        let mut plan = Plan::new(rng);
        plan.trouble = Trouble::All;
        plan.doubtful = false;
        plan.weather = 60;
        plan.actions = *rng.pick(&[2, 12]);
        plan.arrivals = Arrivals::Steady;
        plan.workers = rng.range(2, 4);
        plan.run_fault = 0;
        plan.run_ms = plan.thresholds[0].lost_after_ms / *rng.pick(&[1, 4, 16]);
        plan.rates = Rates {
            crash: *rng.pick(&[0, 100]),
            death: *rng.pick(&[50, 200]),
            partition: *rng.pick(&[50, 200]),
            murphy: *rng.pick(&[0, 100]),
            set_back: 300,
            ..Rates::default()
        };
        plan
    }

    /// The plan of a seed in which servers come and go that live by different thresholds, and workers are cut off just when
    /// they have been heard: those that run something long go on by what the server before granted them.
    pub fn of_restarts(rng: &mut Rng) -> Plan {
        let mut plan = Plan::new(rng);
        let lost_ms = plan.thresholds[0].lost_after_ms;
        let other = lost_ms * rng.range(3, 6);
        plan.thresholds[1] = thresholds(rng, other);
        plan.trouble = Trouble::Servers;
        plan.weather = 60;
        plan.actions = 60;
        plan.arrivals = *rng.pick(&[Arrivals::Steady, Arrivals::Canceled]);
        plan.workers = rng.range(2, 4);
        // Nothing but a lease ends a run here, or it would be over before it does harm.
        plan.queue =
            Settings { classes: Vec::new(), key_limit: None, rate: None, key_rate: None, ..plan.queue };
        plan.run_ms = 3 * plan.longest_lost_ms();
        plan.long_run = 400;
        plan.run_fault = 0;
        plan.net_ms = *rng.pick(&[0, 1, 10]);
        plan.rates = Rates {
            crash: *rng.pick(&[10, 30]),
            stop: *rng.pick(&[0, 30]),
            death: *rng.pick(&[0, 50]),
            murphy: 80,
            ..Rates::default()
        };
        plan
    }

    /// The plan of a seed with more workers than may join at once. Their joins are saved one after the other here, so the
    /// store is quick, or they would be lost before they are let in.
    pub fn of_crowds(rng: &mut Rng) -> Plan {
        let mut plan = Plan::new(rng);
        plan.workers = rng.range(17, 24);
        plan.delay_ms = plan.delay_ms.min(2);
        plan
    }

    /// How long a long run takes at most.
    pub fn long_run_ms(&self) -> u64 {
        2 * (self.longest_lost_ms() + self.absence_ms)
    }

    /// The longest that a task waits for a time, whichever.
    pub fn longest_wait_ms(&self) -> u64 {
        2 * self.queue.backoff.max_ms + self.queue.retention_ms + 2 * self.span_ms
    }

    /// The longest time after which an owner of this plan gives a silent worker up.
    pub fn longest_lost_ms(&self) -> u64 {
        self.thresholds[0].lost_after_ms.max(self.thresholds[1].lost_after_ms)
    }
}

/// Classes, limits and rates, or none of them.
fn admission(rng: &mut Rng, lost_ms: u64) -> Settings {
    let classes = *rng.pick(&[0, 0, 1, 2, 3, 5]);
    let mut limit = 6;
    let mut duration_ms = 0;
    let class = |n: u64| {
        duration_ms += rng.range(1, lost_ms);
        limit = rng.range(1, limit);
        let percents = n.is_multiple_of(2) && classes > 3;
        let limit = match n {
            0 => Limit::All,
            n if percents => Limit::Percent((90 / n) as u8),
            _ => Limit::Slots(limit as u32),
        };
        ClassLimit { duration_ms, limit }
    };
    let classes = (0..classes).map(class).collect();
    let rate = |rng: &mut Rng| {
        // Not so low that a world takes for ever.
        let per_second = *rng.pick(&[0, 0, 0, 2_000, 20_000, 500_000]);
        let (burst, unit) = (rng.range(1_000, 9_000), *rng.pick(&[RateUnit::Tasks, RateUnit::Cost]));
        (per_second > 0).then_some(Rate { per_second, burst, unit })
    };
    Settings {
        classes,
        after_downgrade: *rng.pick(&[AfterDowngrade::Fail, AfterDowngrade::Requeue]),
        interactive_grace_ms: *rng.pick(&[0, 0, 50]),
        key_limit: *rng.pick(&[None, None, Some(1), Some(2)]),
        rate: rate(rng),
        key_rate: rate(rng),
        ..Settings::default()
    }
}

/// Thresholds that make sense together.
fn thresholds(rng: &mut Rng, lost_after_ms: u64) -> Thresholds {
    let unhealthy_after_ms = lost_after_ms / *rng.pick(&[2, 2, 3, 4]);
    let heartbeat_ms = unhealthy_after_ms / rng.range(2, 3);
    let thresholds = Thresholds { heartbeat_ms, unhealthy_after_ms, lost_after_ms };
    debug_assert_eq!(thresholds.check(), Ok(()), "{thresholds:?}");
    thresholds
}
