//! What keeps A down while rows are being written: per commit that is not durable yet, the lowest level it writes.

use std::collections::VecDeque;

use super::level::Level;
use crate::names::CommitId;

/// The lowest level of each commit on its way, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pins(VecDeque<(CommitId, Level)>);

impl Pins {
    /// A level was chosen for a row that `commit` will write.
    pub(crate) fn chosen(&mut self, level: Level, commit: CommitId) {
        match self.0.back_mut() {
            Some((last, lowest)) if *last == commit => *lowest = (*lowest).min(level),
            _ => self.0.push_back((commit, level)),
        }
    }

    /// The lowest level that is chosen but not merged yet.
    pub(crate) fn lowest(&self) -> Option<Level> {
        self.0.iter().map(|&(_, level)| level).min()
    }

    /// All rows up to this commit are durable and merged.
    pub(crate) fn unpin(&mut self, commit: CommitId) {
        while self.0.front().is_some_and(|&(c, _)| c <= commit) {
            self.0.pop_front();
        }
    }
}
