//! The guardian's loop: it reads orders, watches clocks, and sees runs to their ends.
//!
//! One thread, so nothing here may wait: not for the worker to read, not for a run's pipes, not for a process
//! to die. What is to be killed is killed before anything is said about it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::signal::unix::Signal;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::cgroup::Cgroups;
use super::dirs::{self, Dirs};
use super::frames::{End, FrameReader, Hello, Order, Refused, Report, Setup, Start, Started};
use super::outbox::Outbox;
use super::program::{Files, Last, read_order};
use super::run::{Launch, Phase, Run};
use super::seat::SeatLock;
use super::socket::Orders;
use super::{GuardianError, Instance, KillCause, Outcome, Refusal, boottime_ms, orphans, processes};

/// How often the clock is looked at while something runs. Timers sleep while the machine does; leases do not.
const TICK_MS: u64 = 200;
/// How often a run is looked at that is on its way out.
const LEAVING_MS: u64 = 20;
/// How long the pipes of a run without processes are waited for.
const CLOSING_MS: u64 = 1_000;
/// Between two complaints about processes that do not die.
const COMPLAIN: Duration = Duration::from_secs(10);

/// What the guardian knows.
pub(super) struct Keeper {
    runs: BTreeMap<u64, Run>,
    /// Counts runs, for their markers: ids may come again.
    started: u64,
    marker: String,
    lease_until_ms: u64,
    /// The worker was told that this lease is over.
    over_told: bool,
    closing_ms: u64,
    files: Files,
    trampoline: Vec<OsString>,
    cgroups: Option<Cgroups>,
    dirs: Dirs,
    outbox: Outbox,
    wake: Arc<Notify>,
}

impl Keeper {
    /// Takes the seat and begins its next life. This may wait: nothing runs yet.
    pub(super) fn begin(
        setup: &Setup,
        files: Files,
        outbox: Outbox,
    ) -> Result<(SeatLock, Instance, Keeper), GuardianError> {
        let dir = Path::new(OsStr::from_bytes(&setup.seat_dir));
        let mut lock = if setup.first_free {
            SeatLock::take_first_free(dir, &setup.seat)?
        } else {
            SeatLock::take(dir, &setup.seat, Duration::from_millis(setup.lock_wait_ms))?
        };
        let cgroups = setup.cgroups.then(Cgroups::find).flatten();
        let instance = lock.begin_life(cgroups.as_ref())?;
        let marker = format!("{}{}.", lock.marker()?, instance.life);
        // Nothing of an earlier life runs any more, and no worker of it is there to place files.
        let work_dir = Path::new(OsStr::from_bytes(&setup.work_dir));
        dirs::sweep(work_dir, &lock.marker()?);
        let dirs = Dirs::new(work_dir, &marker);
        outbox.report(Report::Hello(Hello {
            seat: instance.seat.clone(),
            token: instance.token,
            life: instance.life,
            marker: marker.clone(),
            cgroups: cgroups.as_ref().map(|groups| groups.base().as_os_str().as_bytes().to_vec()),
        }));
        let trampoline = setup.trampoline.iter().map(|arg| OsStr::from_bytes(arg).to_owned()).collect();
        let keeper = Keeper {
            runs: BTreeMap::new(),
            started: 0,
            marker,
            lease_until_ms: 0,
            over_told: false,
            closing_ms: CLOSING_MS,
            files,
            trampoline,
            cgroups,
            dirs,
            outbox,
            wake: Arc::default(),
        };
        Ok((lock, instance, keeper))
    }

    /// Keeps runs until there is a reason to end.
    pub(super) async fn keep(&mut self, orders: &mut FrameReader<Orders>, children: &mut Signal) -> Last {
        let wake = self.wake.clone();
        let mut looked = Instant::now();
        let mut look = false;
        loop {
            self.on_time(boottime_ms());
            if look || looked.elapsed() >= Duration::from_millis(LEAVING_MS) {
                self.see_ends();
                looked = Instant::now();
            }
            look = true;
            tokio::select! {
                _ = children.recv() => {}
                () = wake.notified() => {}
                order = read_order(orders), if self.outbox.room() => {
                    look = false;
                    match order.and_then(|(order, descriptors)| self.on_order(order, descriptors)) {
                        Ok(()) => {}
                        Err(last) => return last,
                    }
                }
                () = sleep(self.wake_in(boottime_ms())) => {}
            }
        }
    }

    fn on_order(&mut self, order: Order, descriptors: Vec<OwnedFd>) -> Result<(), Last> {
        let now_ms = boottime_ms();
        match order {
            Order::Setup(_) => return Err(Last::Nonsense("a second setup".into())),
            Order::Shutdown(_) => return Err(Last::Shutdown),
            Order::Lease(until_ms) => {
                // Whatever it says: if the one before it is over, what ran under that one must not live on.
                self.on_time(now_ms);
                self.lease_until_ms = until_ms;
                self.over_told = false;
            }
            Order::KillAll(_) => self.kill_all(KillCause::Stop),
            Order::Stop(stop) => {
                if let Some(run) = self.runs.get_mut(&stop.id) {
                    run.stop(KillCause::Stop, now_ms, stop.grace_ms);
                }
            }
            Order::Deadline(deadline) => {
                if let Some(run) = self.runs.get_mut(&deadline.id) {
                    run.deadline_ms = deadline.deadline_ms;
                }
            }
            Order::Start(start) => self.on_start(start, descriptors),
        }
        Ok(())
    }

    fn on_start(&mut self, start: Start, descriptors: Vec<OwnedFd>) {
        let id = start.id;
        let refused = |why: Refusal| Report::Refused(Refused { id, why: why.into() });
        if self.runs.contains_key(&id) {
            return self.outbox.report(refused(Refusal::Duplicate));
        }
        if self.runs.len() >= self.files.runs() {
            return self.outbox.report(refused(Refusal::TooMany));
        }
        self.started += 1;
        let marker = format!("{}{}", self.marker, self.started);
        let cgroup = self.cgroups.as_ref().and_then(|groups| groups.make(&marker));
        if cgroup.is_none() {
            self.cgroups = None;
        }
        // The last thing before the start: however long the order lay in the pipe, this is now.
        if boottime_ms() >= self.lease_until_ms {
            if let Some(group) = cgroup {
                group.remove();
            }
            return self.outbox.report(refused(Refusal::NoLease));
        }
        let launch = Launch {
            trampoline: &self.trampoline,
            marker,
            lease_until_ms: self.lease_until_ms,
            files: self.files.before,
            cgroup,
            outbox: &self.outbox,
            wake: &self.wake,
        };
        match Run::start(start, descriptors, launch) {
            Ok(run) => {
                let pid = run.pid.as_raw_nonzero().get();
                self.runs.insert(id, run);
                self.outbox.report(Report::Started(Started { id, pid }));
            }
            Err(error) => {
                let outcome = Some(Outcome::NotStarted(format!("no process could be made: {error}")));
                self.outbox.report(Report::Ended(End { id, outcome, ..End::default() }));
            }
        }
    }

    fn on_time(&mut self, now_ms: u64) {
        if !self.runs.is_empty() && now_ms >= self.lease_until_ms {
            self.kill_all(KillCause::Lease);
            if !self.over_told {
                self.over_told = true;
                self.outbox.report(Report::LeaseOver(self.lease_until_ms));
            }
        }
        for run in self.runs.values_mut() {
            run.on_time(now_ms);
        }
    }

    /// SIGKILL to everything there is, by whatever name it can be reached.
    fn kill_all(&mut self, cause: KillCause) {
        for run in self.runs.values_mut() {
            run.kill(cause);
        }
        // Without the list, those that left their groups are found when their runs are seen to their ends.
        for child in processes::own_children().unwrap_or_default() {
            processes::kill_child(child);
        }
    }

    /// Sees to processes that have died, and to runs that end with them.
    fn see_ends(&mut self) {
        let now_ms = boottime_ms();
        for run in self.runs.values_mut() {
            run.look();
        }
        for id in orphans::settle(&mut self.runs, now_ms) {
            if let Some(run) = self.runs.get_mut(&id) {
                run.on_left(now_ms + self.closing_ms);
            }
        }
        let outbox = &self.outbox;
        self.runs.retain(|_, run| match run.end(now_ms) {
            Some(end) => {
                outbox.report(Report::Ended(end));
                false
            }
            None => true,
        });
    }

    /// How long nothing has to be done, if nothing happens.
    fn wake_in(&self, now_ms: u64) -> Duration {
        let mut wake_ms = match self.runs.is_empty() && self.outbox.room() {
            true => TICK_MS * 1_000,
            false => TICK_MS,
        };
        for run in self.runs.values() {
            if run.phase != Phase::Alive {
                wake_ms = wake_ms.min(LEAVING_MS);
                continue;
            }
            for at_ms in [Some(self.lease_until_ms), run.kill_at_ms, run.deadline_ms].into_iter().flatten() {
                // What is due has been done, and may take the kernel a moment.
                wake_ms = wake_ms.min(if at_ms > now_ms { at_ms - now_ms } else { LEAVING_MS });
            }
        }
        Duration::from_millis(wake_ms)
    }

    /// Removes what is left of its runs' directories, after all else: none of its processes is left, and its worker
    /// places no more files.
    pub(super) fn remove_dirs(self) -> JoinHandle<()> {
        self.dirs.remove()
    }

    /// Kills and reaps everything, and returns only when nothing is left: the lock may not be freed before.
    /// If nobody hears of the ends, pipes are not waited for.
    pub(super) async fn wind_down(&mut self, children: &mut Signal, heard: bool) {
        self.closing_ms = if heard { self.closing_ms } else { 0 };
        let wake = self.wake.clone();
        let mut complained = Instant::now();
        loop {
            self.kill_all(KillCause::Stop);
            self.see_ends();
            if self.runs.is_empty() && processes::childless() {
                return;
            }
            tokio::select! {
                _ = children.recv() => {}
                () = wake.notified() => {}
                () = sleep(Duration::from_millis(LEAVING_MS)) => {}
            }
            if complained.elapsed() >= COMPLAIN {
                complained = Instant::now();
                let pids = processes::own_children().unwrap_or_default().into_iter().map(processes::number);
                tracing::warn!("waiting for processes that do not die: {:?}", pids.collect::<Vec<_>>());
            }
        }
    }
}
