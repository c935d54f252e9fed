//! The network between workers and servers. A link is one connection: what is said in one direction arrives in
//! order, late by some milliseconds. Nothing of it is lost while the link lives; when it breaks, what is on its
//! way arrives up to some moment and no further, and each side learns of it at a time of its own, or never.
//!
//! A partition (of a worker's machine) or a stall (of one link) holds messages back: they arrive when it is over,
//! as retransmissions do. So an answer may arrive long after it was sent, and what an old link held may arrive
//! when its worker has had another for long: some runtimes still read from it, and the worker must know better.

use evenhand_core::life::{End, Ending};
use evenhand_core::names::{Epoch, Fence, SessionId, TaskId};
use evenhand_core::owner::messages::{Beat, Hello, Input};
use evenhand_core::worker::{self, Down};

use super::clock::{Micros, ms};
use super::workers::Fact;
use super::{Event, World};

/// The two directions of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the worker to the owner.
    Up,
    /// From the owner to the worker.
    Down,
}

/// What a worker says.
#[derive(Clone, Debug)]
pub(super) enum Up {
    Hello(Hello),
    Beat(Beat),
    Ended {
        task: TaskId,
        fence: Fence,
        attempt: u16,
        end: End,
    },
    Refused {
        task: TaskId,
        fence: Fence,
    },
    Offer {
        slots: u32,
    },
    /// It closed the connection, or its kernel did.
    Over,
}

/// What a server says.
#[derive(Clone, Debug)]
pub(super) enum Said {
    Down(Epoch, Down),
    /// It closed the connection, or its kernel did.
    Over,
}

/// What one direction of a link is like.
#[derive(Clone, Copy, Debug, Default)]
struct Path {
    /// When the last message on it arrives.
    last: Micros,
    /// It is held until then.
    held: Micros,
    /// It is broken: what arrives later is lost.
    cut: Option<Micros>,
}

/// A connection. Its number is its session's.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) process: usize,
    pub(super) owner: usize,
    /// The session, as its worker counts them.
    pub(super) numbered: u64,
    /// Starts that were sent on it.
    pub(super) starts: u64,
    up: Path,
    down: Path,
    /// The server has it.
    at_owner: bool,
    /// The worker's runtime still reads it after it was given up, so late.
    lingers: Option<Micros>,
}

impl Link {
    fn path(&mut self, way: Way) -> &mut Path {
        match way {
            Way::Up => &mut self.up,
            Way::Down => &mut self.down,
        }
    }

    pub(super) fn lingers(&self) -> bool {
        self.lingers.is_some()
    }

    fn is_broken(&self) -> bool {
        self.up.cut.is_some() && self.down.cut.is_some()
    }
}

impl World {
    /// A worker connects to whom it takes for the server, if anybody is there and the network is well.
    pub(super) fn dial(&mut self, process: usize) -> Result<(), String> {
        let state = &mut self.processes[process];
        state.dialing = false;
        if !state.alive || state.paused || state.link.is_some() || !state.core.wants_session() {
            return Ok(());
        }
        let reachable = state.blocked_up <= self.now && state.blocked_down <= self.now;
        let mistaken = self.rng.chance(100);
        let zombie = |owner: &usize| mistaken && self.owners[*owner].alive && self.current != Some(*owner);
        let target = self.owners.len().checked_sub(2).filter(zombie).or(self.current);
        let Some(owner) = target.filter(|_| reachable) else {
            self.dial_soon(process);
            return Ok(());
        };
        let lingers = self.rng.chance(400).then(|| self.rng.below(ms(self.unhealthy_ms())));
        // See `cut_off`: a zombie is heard by nobody.
        let cut = (self.current != Some(owner)).then_some(0);
        let link = self.links.len();
        self.links.push(Link {
            process,
            owner,
            numbered: 0,
            starts: 0,
            up: Path::default(),
            down: Path { cut, ..Path::default() },
            at_owner: true,
            lingers,
        });
        self.processes[process].link = Some(link);
        self.murphy_at_dial(link);
        self.step_worker(process, worker::Input::Connected)
    }

    /// An owner that has a successor reaches no worker from now on. It may go on stepping and committing, and
    /// is fenced; but with the embedded store, whose directory one process locks, an owner that goes on cannot
    /// exist at all, and a heartbeat that it answered would be safe only with a lease of the owner's own, which
    /// stores that several servers share will need.
    pub(super) fn cut_off(&mut self, owner: usize) {
        for link in 0..self.links.len() {
            if self.links[link].owner == owner {
                self.break_link(link);
            }
        }
    }

    fn arrival(&mut self, link: usize, way: Way) -> Option<Micros> {
        let delay = self.rng.below(ms(self.plan.net_ms) + 1);
        let now = self.now;
        let path = self.links[link].path(way);
        if path.cut.is_some() {
            return None;
        }
        path.last = path.last.max(now + delay);
        Some(path.last)
    }

    pub(super) fn send_up(&mut self, link: usize, up: Up) {
        if let Some(at) = self.arrival(link, Way::Up) {
            self.at_time(at, Event::Up(link, up));
        }
    }

    pub(super) fn send_down(&mut self, link: usize, said: Said) {
        if let Some(at) = self.arrival(link, Way::Down) {
            self.at_time(at, Event::Down(link, said));
        }
    }

    /// Whether what arrives now does arrive; if it is held, until when.
    fn passes(&mut self, link: usize, way: Way) -> Result<(), Option<Micros>> {
        let now = self.now;
        let machine = &self.processes[self.links[link].process];
        let blocked = match way {
            Way::Up => machine.blocked_up,
            Way::Down => machine.blocked_down,
        };
        let path = self.links[link].path(way);
        if path.cut.is_some_and(|cut| cut < now) {
            return Err(None);
        }
        let until = path.held.max(blocked);
        if until > now {
            path.last = path.last.max(until);
            return Err(Some(until));
        }
        Ok(())
    }

    /// Something that a worker said arrives.
    pub(super) fn arrive_up(&mut self, link: usize, up: Up) -> Result<(), String> {
        match self.passes(link, Way::Up) {
            Err(None) => return Ok(()),
            Err(Some(until)) => {
                self.at_time(until, Event::Up(link, up));
                return Ok(());
            }
            Ok(()) => {}
        }
        let (session, owner) = (SessionId(link as u64), self.links[link].owner);
        if !self.links[link].at_owner {
            return Ok(());
        }
        let input = match up {
            Up::Hello(hello) => {
                self.murphy_at_hello(link);
                Input::Hello { session, hello, endings: Vec::new() }
            }
            Up::Beat(beat) => Input::Beat { session, beat },
            Up::Ended { task, fence, attempt, end } => {
                Input::Ended { session, task, fence, attempt, end, ending: Ending::default() }
            }
            Up::Refused { task, fence } => Input::Refused { session, task, fence },
            Up::Offer { slots } => Input::Offer { session, slots },
            Up::Over => return self.owner_loses_link(link),
        };
        self.tell_owner(owner, input)
    }

    /// Something that a server said arrives.
    pub(super) fn arrive_down(&mut self, link: usize, said: Said) -> Result<(), String> {
        match self.passes(link, Way::Down) {
            Err(None) => return Ok(()),
            Err(Some(until)) => {
                self.at_time(until, Event::Down(link, said));
                return Ok(());
            }
            Ok(()) => {}
        }
        let Link { process, lingers, .. } = self.links[link];
        let given_up = self.processes[process].link != Some(link);
        if matches!(said, Said::Down(_, Down::Welcome { .. })) {
            self.murphy_at_welcome(link);
        }
        match (said, lingers) {
            (Said::Over, _) => self.tell_worker(process, Fact::Over(link)),
            (Said::Down(epoch, down), Some(late)) if given_up => {
                self.at(late, Event::Late(link, epoch, down));
                Ok(())
            }
            (Said::Down(epoch, down), _) => self.tell_worker(process, Fact::Down(link, epoch, down)),
        }
    }

    /// A connection breaks. Each side learns of it when it does, or never.
    pub(super) fn break_link(&mut self, link: usize) {
        if self.links[link].is_broken() {
            return;
        }
        let soon = ms(self.plan.net_ms) + 1;
        for way in [Way::Up, Way::Down] {
            let cut = self.now + self.rng.below(soon);
            self.links[link].path(way).cut.get_or_insert(cut);
            if self.rng.chance(750) {
                let later = self.rng.below(ms(self.unhealthy_ms()));
                self.at(later, Event::Broken(link, way));
            }
        }
    }

    /// A machine is gone: what was on its way may arrive, and nobody learns anything.
    pub(super) fn silence(&mut self, link: usize) {
        let cut = self.now + self.rng.below(ms(self.plan.net_ms) + 1);
        self.links[link].up.cut.get_or_insert(cut);
        self.links[link].down.cut.get_or_insert(cut);
    }

    /// A side learns that its connection is broken.
    pub(super) fn learn_broken(&mut self, link: usize, way: Way) -> Result<(), String> {
        match way {
            Way::Up => self.owner_loses_link(link),
            Way::Down => self.tell_worker(self.links[link].process, Fact::Over(link)),
        }
    }

    fn owner_loses_link(&mut self, link: usize) -> Result<(), String> {
        if std::mem::replace(&mut self.links[link].at_owner, false) {
            let closed = Input::Closed { session: SessionId(link as u64) };
            return self.tell_owner(self.links[link].owner, closed);
        }
        Ok(())
    }

    /// A server closes a connection, after all that it said on it.
    pub(super) fn hang_up(&mut self, link: usize) {
        if std::mem::replace(&mut self.links[link].at_owner, false) {
            self.send_down(link, Said::Over);
        }
    }

    /// A server closes all its connections.
    pub(super) fn hang_up_all(&mut self, owner: usize) {
        for link in 0..self.links.len() {
            if self.links[link].owner == owner {
                self.hang_up(link);
            }
        }
    }

    /// One direction of a link, or both, hold what is said, for a while.
    pub(super) fn stall(&mut self, link: usize, ways: &[Way], until: Micros) {
        for way in ways {
            let path = self.links[link].path(*way);
            path.held = path.held.max(until);
        }
    }

    /// All is well from now on.
    pub(super) fn heal(&mut self) {
        for process in &mut self.processes {
            process.blocked_up = process.blocked_up.min(self.now);
            process.blocked_down = process.blocked_down.min(self.now);
        }
        for link in &mut self.links {
            link.up.held = link.up.held.min(self.now);
            link.down.held = link.down.held.min(self.now);
        }
    }
}
