//! The store's part of a world: commits and reads that are slow, fail, or happen without an answer, and a disk
//! that fills up now and then. With [`Options::disk`](super::Options) a real directory does all of it too.

use evenhand_core::Change;
use evenhand_core::messages::Input;
use evenhand_core::names::CommitId;
use evenhand_store::{Fault, Store, StoreError, ready};

use super::{Event, World};
use crate::driver::SHARD;
use crate::oracle::Oracle;
use crate::reads::Read;

impl World {
    /// The disk fills up now and then, and is emptied again; it is not full for ever.
    pub(super) fn room_changes(&mut self) {
        let (room, rng) = &mut self.room;
        let changed = if *room { rng.chance(20) } else { rng.chance(200) };
        if self.calm && !*room || !self.calm && changed {
            *room = !*room;
            self.store.set_room(*room);
            self.tell_room();
        }
    }

    /// One commit is on its way at a time: the next must not happen if this one does not.
    pub(super) fn send_next(&mut self, owner: usize) {
        if self.owners[owner].in_flight {
            return;
        }
        if let Some((commit, changes)) = self.owners[owner].unsent.pop_front() {
            self.owners[owner].in_flight = true;
            self.soon(Event::Apply(owner, commit, changes));
        }
    }

    pub(super) fn apply(
        &mut self,
        owner: usize,
        commit: CommitId,
        changes: Vec<Change>,
    ) -> Result<(), String> {
        let faulty = self.rng.chance(self.plan.rates.commit) && !self.calm;
        let fault = *self.rng.pick(&[Fault::Lost, Fault::AnswerLost, Fault::AnswerLost, Fault::Full]);
        if faulty {
            self.store.fail_commit(fault);
        }
        let epoch = self.owners[owner].core.shard().epoch();
        let accepts = changes.iter().any(|change| matches!(change, Change::Accepted(_)));
        let happens = self.store.look(SHARD, |tables| tables.epoch == epoch)
            && (self.room.0 || !accepts)
            && !(faulty && matches!(fault, Fault::Lost | Fault::Full));
        if happens {
            let oracle = &mut self.oracle;
            let now = self.owners[owner].clock(self.now);
            self.store.look(SHARD, |tables| oracle.applies(tables, &changes, now))?;
            // A task that an old copy does not know would be forgotten, and another one would get its number.
            if accepts {
                self.copy = None;
            }
        }
        let copy = self.disk.is_some().then(|| changes.clone());
        let result = ready(self.store.commit(SHARD, epoch, changes));
        if let (Some(disk), Some(changes)) = (&mut self.disk, copy) {
            match &result {
                Err(StoreError::Fenced { .. }) => disk.commit(epoch, changes, &result)?,
                _ if happens => disk.commit(epoch, changes, &Ok(()))?,
                _ => {}
            }
        }
        self.store.look(SHARD, |tables| self.oracle.applied(tables))?;
        if self.steps.is_multiple_of(64) {
            self.store.look(SHARD, Oracle::counts)?;
        }
        match result {
            Ok(()) => self.soon(Event::Applied(owner, commit, true)),
            Err(StoreError::Corrupt { what }) => return Err(what),
            Err(StoreError::Fenced { .. } | StoreError::Unavailable { .. } | StoreError::Full { .. }) => {
                self.soon(Event::Applied(owner, commit, false));
            }
        }
        Ok(())
    }

    pub(super) fn read(&mut self, owner: usize, read: Read) -> Result<(), String> {
        let failed = self.rng.chance(self.plan.rates.read);
        let input = if failed { read.fail() } else { read.happen(&self.store) };
        if let Some(disk) = &mut self.disk
            && !matches!(input, Input::LoadFailed { .. })
        {
            disk.read(&read, &input)?;
        }
        self.soon(Event::ToOwner(owner, input));
        Ok(())
    }
}
