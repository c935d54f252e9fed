//! Changes of many tasks. A server changes a bounded number in one call; this makes the calls.

use evenhand_api::v1;
use evenhand_core::Refusal;

use super::{Client, Filter};

/// What is done to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Cancel,
    Replay,
}

/// What became of tasks, in one step or in all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// How many were canceled, or told to stop; or run again.
    pub tasks: u64,
    /// Of these, running ones that were told to stop.
    pub stopping: u64,
    /// The ids of the tasks that were made, by a replay.
    pub ids: Vec<String>,
}

/// Cancels or replays tasks, a thousand or so with each step: see [`Client::cancel_many`] and
/// [`Client::replay_many`]. Nothing happens without [`Changing::next`] or [`Changing::all`]; when it is dropped or
/// fails, what was done stays done, and another one goes on with the rest.
#[derive(Debug)]
#[must_use = "nothing is changed until the steps are asked for"]
pub struct Changing {
    client: Client,
    what: What,
    /// None: all are done.
    next: Option<v1::ManyRequest>,
}

impl Changing {
    pub(super) fn begin(client: Client, what: What, filter: Filter) -> Changing {
        let first = v1::ManyRequest { filter: Some(filter.filter), cursor: String::new(), limit: None };
        Changing { client, what, next: Some(first) }
    }

    /// Makes the next step, and says what it changed, which may be nothing. None: all are done.
    pub async fn next(&mut self) -> Result<Option<Changed>, Refusal> {
        let Some(request) = self.next.clone() else { return Ok(None) };
        let answer = match self.what {
            What::Cancel => {
                self.client.call(request, async |mut grpc, request| grpc.cancel_many(request).await).await?
            }
            What::Replay => {
                self.client.call(request, async |mut grpc, request| grpc.replay_many(request).await).await?
            }
        };
        let v1::ManyResponse { changed, stopping, cursor, ids } = answer;
        match &mut self.next {
            Some(request) if !cursor.is_empty() => request.cursor = cursor,
            Some(_) | None => self.next = None,
        }
        Ok(Some(Changed { tasks: changed, stopping, ids }))
    }

    /// Makes all steps, and says what they changed together.
    pub async fn all(mut self) -> Result<Changed, Refusal> {
        let mut all = Changed::default();
        while let Some(step) = self.next().await? {
            all.add(step);
        }
        Ok(all)
    }
}

impl Changed {
    /// Counts another step in.
    pub fn add(&mut self, step: Changed) {
        self.tasks += step.tasks;
        self.stopping += step.stopping;
        self.ids.extend(step.ids);
    }
}
