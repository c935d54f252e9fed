//! Canaries: known bugs, each switched on alone, that the worlds must notice. What it takes for some of them to do
//! harm is so rare that no random world comes to it; the model does ([`model`](crate::model)).

use evenhand_core::canary::Bug;

use crate::model::{Witness, World};
use crate::one_way;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::set_back;
use crate::world::{FLAWS, MISTAKES, play_plan};
use crate::{Canary, Options, Report, Violation, play};

/// Those that only the model notices.
const MODELED: [Bug; 3] = [Bug::NewWorkerNotRequired, Bug::UnhealthyNotAsked, Bug::SetToldWhileShut];

/// Those that do harm only when the store is set back.
const OF_SET_BACKS: [Bug; 2] = [Bug::DoubtIgnored, Bug::DoubtForgotten];

/// Those that do harm only when servers come and go, with other thresholds, while long runs go on.
const OF_RESTARTS: [Bug; 4] =
    [Bug::LoweredAtOnce, Bug::AnswerBeforeWaitSaved, Bug::CancelLost, Bug::AbsenceForgotten];

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
    if let Canary::Core(bug) = canary
        && MODELED.contains(&bug)
    {
        return model_breaks(bug);
    }
    if canary == Canary::Core(Bug::OneWayNeverLost) {
        return one_way::play(Some(Bug::OneWayNeverLost))
            .err()
            .map(|what| Violation::new("one way", 0, 0, what));
    }
    if canary == Canary::Core(Bug::FenceRepeats) {
        return set_back::play(Some(Bug::FenceRepeats))
            .err()
            .map(|what| Violation::new("set back", 0, 0, what));
    }
    let plain = Options { blind, ..Options::default() };
    let play: fn(u64, Options) -> Result<Report, Violation> = match canary {
        Canary::Core(bug) if OF_SET_BACKS.contains(&bug) => play_set_backs,
        Canary::Core(bug) if OF_RESTARTS.contains(&bug) => play_restarts,
        Canary::Core(_) | Canary::Store(_) | Canary::World(_) => play,
    };
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

/// Plays a seed in which the store is set back again and again.
pub fn play_set_backs(seed: u64, options: Options) -> Result<Report, Violation> {
    let mut rng = Rng::new(seed);
    let plan = Plan::of_set_backs(&mut rng);
    play_plan(seed, rng, plan, options)
}

/// Plays a seed in which servers come and go, with other thresholds.
pub fn play_restarts(seed: u64, options: Options) -> Result<Report, Violation> {
    let mut rng = Rng::new(seed);
    let plan = Plan::of_restarts(&mut rng);
    play_plan(seed, rng, plan, options)
}

fn model_breaks(bug: Bug) -> Option<Violation> {
    let world = World {
        workers: 2,
        tasks: 1,
        crashes: 2,
        rebirths: 0,
        late: false,
        twice: false,
        turnover: false,
        witness: Witness::Workers,
        bug: Some(bug),
    };
    let (way, what) = world.explore(3_000_000).wrong?;
    Some(Violation::new("model", 0, way.len() as u64, what))
}
