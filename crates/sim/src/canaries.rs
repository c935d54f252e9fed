//! Canaries: known bugs, each switched on alone, that the worlds must notice.

use evenhand_core::canary::Bug;

use crate::world::{FLAWS, MISTAKES};
use crate::{Canary, Options, Violation, play};

/// Every canary and what is wrong with it.
pub fn all() -> Vec<(Canary, &'static str)> {
    let core = Bug::ALL.iter().map(|&bug| (Canary::Core(bug), bug.text()));
    let store = FLAWS.iter().map(|&(flaw, text)| (Canary::Store(flaw), text));
    let world = MISTAKES.iter().map(|&(mistake, text)| (Canary::World(mistake), text));
    core.chain(store).chain(world).collect()
}

/// Plays seeds until the bug is noticed: a world breaks, or the core panics, that is well without the bug.
/// If `blind`, the core's own invariants are not looked at: the onlooker must notice.
pub fn hunt(canary: Canary, seeds: u64, blind: bool) -> Option<Violation> {
    let plain = Options { blind, ..Options::default() };
    (0..seeds).find_map(|seed| {
        let options = Options { canary: Some(canary), ..plain };
        let violation = match std::panic::catch_unwind(|| play(seed, options)) {
            Ok(Ok(_)) => return None,
            Ok(Err(violation)) => violation,
            Err(_) => Violation::panicked(seed),
        };
        play(seed, plain).is_ok().then_some(violation)
    })
}
