//! Interactive runs in the loop: who asks for one, what the worker is told of the client's terminal, and what the
//! client is told of the run. The conversation itself does not pass the loop: see `crate::interactive`.

use std::collections::HashMap;

use evenhand_api::convert;
use evenhand_api::v1::{self, Over};
use evenhand_core::messages::{InteractiveAsk, Why};
use evenhand_core::names::{QueueName, RequestId, SessionId};
use evenhand_core::owner::messages::{Effect, Input};
use evenhand_core::refusal::Kind;
use evenhand_core::{Answer, Input as ShardInput, Refusal, Run, Work};
use evenhand_store::Store;
use tokio::sync::{mpsc, oneshot};

use super::{Owned, SHARD};
use crate::interactive::{Registry, RunKey, Session};

/// What the loop shares with those who talk.
#[derive(Debug)]
pub(crate) struct Talks {
    pub(crate) registry: Registry,
    /// Runs whose clients are gone.
    pub(crate) hung_up: mpsc::UnboundedReceiver<RunKey>,
}

/// Who asks, and what came of it. A start and the answer that goes with it come in one step, in whatever order; the
/// first of the two waits here for the second.
#[derive(Debug, Default)]
pub(super) struct Asking {
    requests: HashMap<RequestId, (v1::Interactive, oneshot::Sender<Result<Session, Refusal>>)>,
    starts: HashMap<RunKey, (SessionId, Run, Work)>,
    terminals: HashMap<RunKey, v1::Interactive>,
}

impl<S: Store + Clone + 'static> Owned<'_, S> {
    pub(super) fn ask_interactive(
        &mut self,
        queue: QueueName,
        ask: InteractiveAsk,
        terminal: v1::Interactive,
        reply: oneshot::Sender<Result<Session, Refusal>>,
        effects: &mut Vec<Effect>,
    ) {
        self.next_request += 1;
        let request = RequestId(self.next_request);
        self.asking.requests.insert(request, (terminal, reply));
        self.step(Input::Shard(ShardInput::Interactive { request, queue, ask }), effects);
    }

    /// The shard has decided on a request of somebody who wants to talk.
    pub(super) fn answer_interactive(&mut self, request: RequestId, answer: Result<Answer, Refusal>) {
        let Some((terminal, reply)) = self.asking.requests.remove(&request) else { return };
        let answer = match answer {
            Ok(Answer::Interactive { task, fence, worker }) => {
                let seat = self.owner.seat(worker).map_or_else(String::new, |seat| seat.as_str().into());
                let run = (task, fence);
                // Before the worker is told: it may call at once.
                let session = self.shell.talks.registry.open(run, convert::task_id(SHARD, task), seat);
                match self.asking.starts.remove(&run) {
                    Some((to, run, work)) => self.send_start(to, &run, work, Some(terminal)),
                    None => drop(self.asking.terminals.insert(run, terminal)),
                }
                Ok(session)
            }
            Ok(
                Answer::Accepted(_)
                | Answer::AcceptedBefore(_)
                | Answer::Replayed(_)
                | Answer::Configured(_)
                | Answer::KeySet
                | Answer::Shortened(_)
                | Answer::KeyPaused(_)
                | Answer::Canceled
                | Answer::Stopping,
            ) => Err(crate::clients::no_such_answer()),
            Err(refusal) => {
                if refusal.kind == Kind::Limited {
                    self.shell.metrics.interactive_denied();
                }
                Err(refusal)
            }
        };
        // If whoever asked has left, the session is dropped here, and so the client counts as gone.
        drop(reply.send(answer));
    }

    pub(super) fn start_interactive(&mut self, to: SessionId, run: Run, work: Option<Work>) {
        // Nothing of it is in the store.
        let Some(work) = work else { return };
        let key = (run.task, run.fence);
        match self.asking.terminals.remove(&key) {
            Some(terminal) => self.send_start(to, &run, work, Some(terminal)),
            None => drop(self.asking.starts.insert(key, (to, run, work))),
        }
    }

    pub(super) fn on_hangup(&mut self, run: RunKey, effects: &mut Vec<Effect>) {
        let (task, fence) = run;
        self.step(Input::Shard(ShardInput::Hangup { task, fence }), effects);
    }

    pub(super) fn on_interactive_over(&mut self, run: RunKey, why: Why) {
        self.asking.terminals.remove(&run);
        self.asking.starts.remove(&run);
        let over = match why {
            Why::Ended => Over::Ended,
            Why::Halted => Over::Halted,
            Why::TimeUp => Over::TimeUp,
            Why::Lost => Over::Lost,
            Why::Canceled => Over::Canceled,
        };
        self.shell.metrics.interactive_over(why);
        self.shell.talks.registry.over(run, over);
    }
}
