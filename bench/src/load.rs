//! The load: how many tasks stand, of how many keys, in how many queues, and who works on them.
//!
//! Keys have names as users choose them and arrive, as they do at a server, in newly allocated memory
//! with every task. They come in a scattered order, because tenants do not enqueue in order of their
//! names.

use evenhand_core::NewTask;
use evenhand_core::names::{Key, QueueName};

use crate::Failure;
use crate::rng::Rng;

/// Scatters keys. Prime, and larger than any number of keys, so that no two keys become one.
const SCATTER: u64 = 2_147_483_647;

/// What stands in the backlog and who works on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Keys over all queues; the n-th key enqueues to the (n modulo queues)-th queue.
    pub(crate) keys: u64,
    /// Tasks that stand, spread evenly over the keys.
    pub(crate) tasks: u64,
    /// Queues.
    pub(crate) queues: u64,
    /// Workers; the queues are dealt out to them.
    pub(crate) workers: u64,
    /// Slots of each worker.
    pub(crate) slots: u32,
    /// Tasks in one enqueue, and cycles in one commit.
    pub(crate) batch: u64,
}

impl Load {
    /// One queue, one worker of 100 slots, batches of 100.
    pub(crate) fn new(keys: u64, tasks: u64) -> Load {
        Load { keys, tasks, queues: 1, workers: 1, slots: 100, batch: 100 }
    }

    /// Refuses what would run dry or leave a queue without keys.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let (tasks, slots) = (self.tasks, self.workers * u64::from(self.slots));
        let needed = slots + self.batch * self.queues;
        if tasks < needed {
            return Err(format!(
                "{tasks} tasks are too few to keep {slots} slots busy with batches of {} in {} queues; \
                 use at least {needed}",
                self.batch, self.queues
            ));
        }
        if self.keys < self.queues {
            return Err(format!("{} keys are too few for {} queues", self.keys, self.queues));
        }
        Ok(())
    }

    /// The name of a queue.
    pub(crate) fn queue(queue: u64) -> Result<QueueName, Failure> {
        QueueName::new(&format!("render-{queue}")).map_err(|refusal| refusal.to_string())
    }

    /// How many of the standing tasks are in a queue.
    pub(crate) fn tasks_of(&self, queue: u64) -> u64 {
        self.tasks / self.queues + u64::from(queue < self.tasks % self.queues)
    }

    /// The n-th standing task of a queue.
    pub(crate) fn standing(&self, queue: u64, n: u64) -> Result<NewTask, Failure> {
        let of_queue = self.keys_of(queue);
        let scattered = u128::from(n % of_queue) * u128::from(SCATTER) % u128::from(of_queue);
        task(queue + self.queues * scattered as u64)
    }

    /// A task of a random key of a queue.
    pub(crate) fn random(&self, queue: u64, rng: &mut Rng) -> Result<NewTask, Failure> {
        task(queue + self.queues * rng.below(self.keys_of(queue)))
    }

    fn keys_of(&self, queue: u64) -> u64 {
        (self.keys - queue).div_ceil(self.queues)
    }

    /// The queues that a worker serves.
    pub(crate) fn queues_of(&self, worker: u64) -> Vec<u64> {
        if self.workers > self.queues {
            return vec![worker % self.queues];
        }
        (0..self.queues).filter(|queue| queue % self.workers == worker).collect()
    }
}

fn task(key: u64) -> Result<NewTask, Failure> {
    let key = Key::new(&format!("tenant-{key:06}")).map_err(|refusal| refusal.to_string())?;
    Ok(NewTask::new(key))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn standing_tasks_are_spread_evenly() {
        let load = Load { queues: 3, ..Load::new(10, 60) };
        let mut tasks: BTreeMap<String, u64> = BTreeMap::new();
        for queue in 0..3 {
            for n in 0..load.tasks_of(queue) {
                *tasks.entry(load.standing(queue, n).unwrap().key.to_string()).or_default() += 1;
            }
        }
        // The first queue has four keys, the others three.
        assert_eq!(tasks.into_values().collect::<Vec<_>>(), [5, 7, 7, 5, 7, 7, 5, 6, 6, 5]);
    }

    #[test]
    fn every_queue_is_served() {
        for (queues, workers) in [(1, 1), (1, 10), (10, 1), (100, 2), (1_000, 16)] {
            let load = Load { queues, workers, ..Load::new(1_000, 1_000_000) };
            let mut served: Vec<u64> = (0..workers).flat_map(|worker| load.queues_of(worker)).collect();
            served.sort_unstable();
            served.dedup();
            assert_eq!(served.len() as u64, queues);
        }
    }

    #[test]
    fn a_load_that_would_run_dry_is_refused() {
        assert!(Load::new(10, 199).check().unwrap_err().contains("use at least 200"));
        assert!(Load::new(10, 200).check().is_ok());
    }
}
