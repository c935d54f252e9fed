//! A story that no random world comes to, as our own workers leave when they hear nothing: a worker goes on saying that
//! it is alive on a link whose other direction is dead. It must be given up, or what it ran would wait for ever.

use std::collections::VecDeque;

use evenhand_core::backlog::Weight;
use evenhand_core::canary::{Bug, Canary};
use evenhand_core::names::{Incarnation, Life, Millis, QueueName, Seat, SessionId, StoreId};
use evenhand_core::owner::messages::{Beat, Effect, Hello, Input};
use evenhand_core::owner::{Identity, Owner, Settings};
use evenhand_core::{Effect as ShardEffect, Input as ShardInput, Refusal};
use evenhand_store::{Memory, Store, ready};

use crate::driver::SHARD;

/// Steps an owner, whose commits happen at once.
fn step(owner: &mut Owner, store: &Memory, now: Millis, input: Input) -> Result<(), String> {
    let mut inputs = VecDeque::from([input]);
    while let Some(input) = inputs.pop_front() {
        let mut effects = Vec::new();
        owner.step(now, input, &mut effects);
        owner.seal(&mut effects);
        for effect in effects {
            if let Effect::Shard(ShardEffect::Save { commit, changes }) = effect {
                let saved = ready(store.commit(SHARD, owner.shard().epoch(), changes));
                saved.map_err(|error| error.to_string())?;
                inputs.push_back(Input::Shard(ShardInput::Committed { commit }));
            }
        }
    }
    Ok(())
}

fn hello() -> Result<Hello, Refusal> {
    Ok(Hello {
        seat: Seat::new("w1")?,
        token: 1,
        life: Life { process: 1, rejoin: 0 },
        session: 1,
        slots: 1,
        queues: vec![(QueueName::new("q")?, Weight::ONE)],
        store: None,
        obeyed: Incarnation::default(),
        set: None,
        running: Vec::new(),
        ended: Vec::new(),
    })
}

/// Plays it. An error says what went wrong.
pub fn play(bug: Option<Bug>) -> Result<(), String> {
    let store = Memory::default();
    let taken = ready(store.take(SHARD, None)).map_err(|error| error.to_string())?;
    let identity = Identity { epoch: taken.epoch, seed: 7, store: StoreId(5), nonce: 1 };
    let (settings, canary) = (Settings::default(), bug.map_or_else(Canary::default, Canary::new));
    let (heartbeat_ms, lost_ms) = (settings.thresholds.heartbeat_ms, settings.thresholds.lost_after_ms);
    let mut owner =
        Owner::with_canary(Millis(0), settings, identity, taken.metadata, canary, &mut Vec::new())?;
    let (session, hello) = (SessionId(1), hello().map_err(|refusal| refusal.to_string())?);
    step(&mut owner, &store, Millis(0), Input::Hello { session, hello, endings: Vec::new() })?;
    for number in 1..=3 * lost_ms / heartbeat_ms {
        let now = Millis(number * heartbeat_ms);
        // The welcome is all that has ever arrived.
        let beat = Beat { number, answered: 0, set: None };
        step(&mut owner, &store, now, Input::Beat { session, beat })?;
        step(&mut owner, &store, now, Input::Tick)?;
    }
    match owner.members().next() {
        None => Ok(()),
        Some(member) => Err(format!("{} hears nothing, and is never given up", member.seat)),
    }
}
