//! What operators do by hand: a worker drains, a worker is given up, the start gate is opened.

use evenhand_api::v1;
use evenhand_core::Refusal;
use evenhand_core::names::Seat;
use evenhand_core::owner::MemberView;
use evenhand_core::owner::health::Health;
use evenhand_core::owner::messages::{Effect, Input};
use evenhand_core::refusal::Kind;
use evenhand_store::Store;
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::Owned;
use crate::mailbox::{Operated, Operation};

/// Where an operator's answer goes.
pub(super) type Operator = oneshot::Sender<Result<Operated, Refusal>>;

impl<S: Store + Clone + 'static> Owned<'_, S> {
    /// Does it, and answers when a crash cannot undo it.
    pub(super) fn operate(&mut self, what: Operation, reply: Operator, effects: &mut Vec<Effect>) {
        let done = match what {
            Operation::Drain(seat) => self.drain(seat, effects).map(Operated::Draining),
            Operation::GiveUp(seat) => self.give_up(seat, effects).map(Operated::GivenUp),
            Operation::OpenGate => Ok(Operated::GateOpen(self.open_gate(effects))),
        };
        match done {
            Ok(done) => {
                let open = u64::from(self.owner.shard().unsealed() > 0);
                self.operated.push((self.sealed + open, done, reply));
                self.answer_operators();
            }
            Err(refusal) => drop(reply.send(Err(refusal))),
        }
    }

    /// Answers those for whom everything is durable.
    pub(super) fn answer_operators(&mut self) {
        let durable = self.durable;
        for (_, done, reply) in self.operated.extract_if(.., |(after, ..)| *after <= durable) {
            drop(reply.send(Ok(done)));
        }
    }

    fn drain(&mut self, seat: Seat, effects: &mut Vec<Effect>) -> Result<v1::DrainWorkerResponse, Refusal> {
        let member = self.member(&seat)?;
        let (told, running) = (member.session.is_some(), member.running);
        info!(%seat, told, running, "a worker is asked to drain");
        self.step(Input::Drain { seat }, effects);
        Ok(v1::DrainWorkerResponse { told, running })
    }

    /// One that has been heard just now is alive for sure, and nobody can know better.
    fn give_up(
        &mut self,
        seat: Seat,
        effects: &mut Vec<Effect>,
    ) -> Result<v1::GiveUpWorkerResponse, Refusal> {
        let member = self.member(&seat)?;
        let alive = match member.health {
            Some(Health::New | Health::Healthy) => member.session.is_some(),
            Some(Health::Unhealthy | Health::MustDie) | None => false,
        };
        if alive {
            let ms = member.silent_ms;
            let message = format!(
                "{seat} is connected and was heard {ms} ms ago, so it is alive, and its tasks would run twice at once; \
                 drain it, or end its process. If its machine has just died, it can be given up when it is unhealthy"
            );
            return Err(Refusal::new(Kind::Conflict, "", message));
        }
        let running = member.running;
        warn!(%seat, running, "an operator gives a worker up: if it is alive, its tasks run twice at once");
        self.step(Input::GiveUp { seat }, effects);
        Ok(v1::GiveUpWorkerResponse { running })
    }

    fn open_gate(&mut self, effects: &mut Vec<Effect>) -> v1::OpenGateResponse {
        let gate = self.owner.gate();
        if gate.open {
            return v1::OpenGateResponse { was_open: true, given_up: Vec::new() };
        }
        let given_up: Vec<String> = gate.absent.iter().map(|seat| seat.as_str().into()).collect();
        warn!(
            without = given_up.join(", "),
            in_doubt = gate.in_doubt,
            "an operator opens the start gate: if one of those is alive who have not come, its tasks run twice at once"
        );
        self.step(Input::OpenGate, effects);
        v1::OpenGateResponse { was_open: false, given_up }
    }

    fn member(&self, seat: &Seat) -> Result<MemberView<'_>, Refusal> {
        let none = || Refusal::not_found(format!("there is no worker {seat}"));
        self.owner.members().find(|member| member.seat == seat).ok_or_else(none)
    }
}
