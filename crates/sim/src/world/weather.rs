//! What goes wrong, and when: servers crash, stop and are replaced while they run; workers end in every way
//! there is; connections break, stall and are cut off; processes sleep. It lasts for a while (the plan's
//! `span_ms`), then all is well, and everything must come to an end.

use evenhand_core::owner::messages::Input;

use super::clock::{Micros, ms};
use super::network::{Link, Way};
use super::workers::{Fact, Process};
use super::{Event, World};
use crate::{Canary, Mistake};

const BOTH: &[Way] = &[Way::Up, Way::Down];

impl World {
    /// The weather changes, or not.
    pub(super) fn weather(&mut self) -> Result<(), String> {
        if self.weather_left == 0 {
            return Ok(());
        }
        self.weather_left -= 1;
        let pause = self.rng.below(2 * ms(self.plan.span_ms) / self.plan.weather.max(1));
        self.at(pause, Event::Weather);
        if self.rng.chance(self.plan.rates.crash) {
            self.crash();
        }
        if self.rng.chance(self.plan.rates.zombie) && self.current.is_some() {
            self.at(0, Event::TakeOver(None));
        }
        if self.rng.chance(self.plan.rates.set_back) {
            self.set_back();
        }
        if self.rng.chance(self.plan.rates.stop)
            && let Some(owner) = self.current
        {
            self.tell_owner(owner, Input::Stop)?;
        }
        if self.rng.chance(self.plan.rates.death)
            && let Some(process) = self.some_process()
        {
            self.worker_ends(process)?;
        }
        if self.rng.chance(self.plan.rates.partition)
            && let Some(process) = self.some_process()
        {
            self.partition(process);
        }
        if self.rng.chance(self.plan.rates.broken)
            && let Some(process) = self.some_process()
            && let Some(link) = self.processes[process].link
        {
            if self.rng.chance(500) {
                self.break_link(link);
            } else {
                let ways = self.ways();
                let until = self.now + self.a_while();
                self.stall(link, ways, until);
            }
        }
        if self.rng.chance(self.plan.rates.pause) {
            self.pause();
        }
        if self.options.canary == Some(Canary::World(Mistake::WallClock))
            && let Some(process) = self.some_process()
        {
            let back = self.rng.below(ms(2 * self.lost_ms()));
            self.set_clock_back(process, back);
        }
        Ok(())
    }

    /// Some process, mostly one that has something to lose.
    fn some_process(&mut self) -> Option<usize> {
        let any = self.rng.chance(300);
        let alive = |any: bool| {
            let of = |process: &Process| process.alive && (any || !process.runs.is_empty());
            (0..self.processes.len()).filter(|&n| of(&self.processes[n])).collect::<Vec<usize>>()
        };
        let some = Some(alive(any)).filter(|some| !some.is_empty()).unwrap_or_else(|| alive(true));
        if some.is_empty() { None } else { Some(*self.rng.pick(&some)) }
    }

    fn ways(&mut self) -> &'static [Way] {
        self.rng.pick::<&'static [Way]>(&[BOTH, &[Way::Up], &[Way::Down]])
    }

    /// From less than a heartbeat to more than what it takes to be lost.
    fn a_while(&mut self) -> u64 {
        let t = self.thresholds;
        let most = [t.heartbeat_ms, t.unhealthy_after_ms, t.lost_after_ms, 2 * t.lost_after_ms];
        let most = *self.rng.pick(&most);
        self.rng.below(ms(most))
    }

    /// A worker is cut off, in one or both directions. Where it is both, they do not begin and end together;
    /// the worst is when a last answer arrives late, and nothing after it.
    fn partition(&mut self, process: usize) {
        let t = self.thresholds;
        if self.rng.chance(600) {
            let late = self.rng.range(ms(t.unhealthy_after_ms / 2), ms(t.unhealthy_after_ms));
            self.block(process, Way::Down, late);
            let soon = self.rng.below(ms(t.heartbeat_ms));
            self.at(soon, Event::Block(process, Way::Up, ms(2 * t.lost_after_ms)));
            return;
        }
        for way in self.ways() {
            let (soon, lasts) = (self.rng.below(ms(t.heartbeat_ms)), self.a_while());
            self.at(soon, Event::Block(process, *way, lasts));
        }
    }

    /// A machine is cut off in one direction, from now on and for so long.
    pub(super) fn block(&mut self, process: usize, way: Way, lasts: Micros) {
        let until = self.now + if self.calm { 0 } else { lasts };
        let state = &mut self.processes[process];
        match way {
            Way::Up => state.blocked_up = state.blocked_up.max(until),
            Way::Down => state.blocked_down = state.blocked_down.max(until),
        }
    }

    fn pause(&mut self) {
        let pause = self.a_while();
        if self.rng.chance(300) {
            if let Some(owner) = self.current {
                self.owners[owner].paused = true;
                self.at(pause, Event::ContinueOwner(owner));
            }
        } else if let Some(process) = self.some_process() {
            self.pause_worker(process, pause);
        }
    }

    fn pause_worker(&mut self, process: usize, pause: Micros) {
        self.processes[process].paused = true;
        self.at(pause, Event::Continue(process));
    }

    /// A worker ends, in one of the ways there are.
    fn worker_ends(&mut self, process: usize) -> Result<(), String> {
        match self.rng.below(10) {
            0..5 => {
                // A guardian that is slow to notice.
                let within = *self.rng.pick(&[0, self.plan.kill_ms, 300, self.lost_ms() / 2]);
                self.process_ends(process, within);
            }
            5..7 => self.machine_is_lost(process),
            7..9 => self.tell_worker(process, Fact::Drain)?,
            _ => {
                // Two machines were given the same seat; perhaps because the first seemed to be gone.
                if self.rng.chance(500) {
                    self.cut_off_soon(process, 1, 2 * self.plan.longest_lost_ms());
                }
                self.another_machine(self.processes[process].place, true);
            }
        }
        Ok(())
    }

    /// Whether the worst happens on this link, just now. It is worse for a worker that has something to lose.
    fn worst(&mut self, link: usize) -> bool {
        let Link { process, owner, .. } = self.links[link];
        let likely = if self.processes[process].runs.is_empty() { 1 } else { 3 };
        self.weather_left > 0
            && self.current == Some(owner)
            && self.rng.chance(likely * self.plan.rates.murphy)
    }

    /// Just when a worker connects, its connection stalls: its next hello may be heard before this one.
    pub(super) fn murphy_at_dial(&mut self, link: usize) {
        if self.weather_left > 0 && self.rng.chance(2 * self.plan.rates.broken) {
            let until = self.now + ms(self.unhealthy_ms()) + self.rng.below(ms(self.lost_ms()));
            self.stall(link, &[Way::Up], until);
        }
    }

    /// Just when a worker has been heard, it is cut off: it goes on by what the owner before granted it.
    pub(super) fn murphy_at_hello(&mut self, link: usize) {
        if self.worst(link) && self.rng.chance(300) {
            self.cut_off_for_long(self.links[link].process, ms(2 * self.plan.longest_lost_ms()));
        }
    }

    /// Just when a worker is let in, its machine is cut off and the server dies.
    pub(super) fn murphy_at_welcome(&mut self, link: usize) {
        let Link { process, owner, .. } = self.links[link];
        if !self.worst(link) {
            return;
        }
        let soon = *self.rng.pick(&[1, ms(4 * self.plan.net_ms + 4)]);
        self.cut_off_soon(process, soon, 2 * self.plan.longest_lost_ms());
        let after = self.rng.below(ms(2 * self.plan.delay_ms + 3));
        self.at(after, Event::Crash(owner));
    }

    /// Just when a start is on its way to a worker, its process is stopped for longer than it may live.
    pub(super) fn murphy_at_start(&mut self, process: usize) {
        if self.weather_left > 0 && self.rng.chance(self.plan.rates.pause / 10) {
            let lost = self.lost_ms();
            let pause = self.rng.range(ms(lost), ms(2 * lost));
            self.pause_worker(process, pause);
        }
    }

    /// Just when a server has stopped in good order, workers are cut off for longer than they may live.
    pub(super) fn murphy_at_stop(&mut self, owner: usize) {
        for process in 0..self.processes.len() {
            let link = self.processes[process].link;
            if self.weather_left > 0
                && link.is_some_and(|link| self.links[link].owner == owner)
                && self.rng.chance(4 * self.plan.rates.murphy)
            {
                let lasts = self.plan.absence_ms + 2 * self.plan.longest_lost_ms();
                self.cut_off_soon(process, ms(2 * self.plan.net_ms + 2), lasts);
            }
        }
    }

    fn cut_off_soon(&mut self, process: usize, within: Micros, lasts_ms: u64) {
        let after = self.rng.below(within);
        self.at(after, Event::Partition(process, ms(lasts_ms)));
    }

    /// What `murphy` brought about, a moment later.
    pub(super) fn cut_off_for_long(&mut self, process: usize, lasts: Micros) {
        let until = self.now + lasts;
        let state = &mut self.processes[process];
        (state.blocked_up, state.blocked_down) = (until, until);
        self.stubborn_until = self.stubborn_until.max(until);
    }

    /// Nothing goes wrong any more: what was cut off is reached again, and what slept goes on.
    pub(super) fn clear_up(&mut self) -> Result<(), String> {
        self.heal();
        self.room_changes();
        for process in 0..self.processes.len() {
            self.continue_worker(process)?;
        }
        for owner in 0..self.owners.len() {
            self.continue_owner(owner)?;
        }
        Ok(())
    }
}
