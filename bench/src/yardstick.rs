//! The yardstick: the simplest fair queue one would write. Ordered maps, a pass per task and a finish tag
//! per key; start-time fair queueing by the book. It stores nothing, lists no changes, bounds no memory,
//! forgets no key, counts nothing and serves one queue. How close the core comes to it is the price of
//! all that; how fast it is says how fast the machine is just now.

use std::collections::{BTreeMap, VecDeque};

use evenhand_core::NewTask;
use evenhand_core::names::Key;

use crate::Failure;
use crate::clock::{Spent, timed};
use crate::load::Load;
use crate::measure::Cycles;
use crate::rng::Rng;

/// What a task of weight one is charged.
const CHARGE: u64 = 1 << 20;

/// The queue itself.
#[derive(Debug, Default)]
struct Naive {
    waiting: BTreeMap<(u64, u64), Key>,
    finish: BTreeMap<Key, u64>,
    running: BTreeMap<u64, Key>,
    time: u64,
    next_seq: u64,
}

impl Naive {
    fn enqueue(&mut self, key: Key) {
        self.next_seq += 1;
        let pass = match self.finish.get_mut(&key) {
            Some(finish) => {
                let pass = self.time.max(*finish);
                *finish = pass + CHARGE;
                pass
            }
            None => {
                self.finish.insert(key.clone(), self.time + CHARGE);
                self.time
            }
        };
        self.waiting.insert((pass, self.next_seq), key);
    }

    fn start(&mut self) -> Option<u64> {
        let ((pass, task), key) = self.waiting.pop_first()?;
        self.time = self.time.max(pass);
        self.running.insert(task, key);
        Some(task)
    }

    fn end(&mut self, task: u64) -> bool {
        self.running.remove(&task).is_some()
    }
}

/// The yardstick under a load.
#[derive(Debug)]
pub(crate) struct Yardstick {
    load: Load,
    rng: Rng,
    naive: Naive,
    runs: VecDeque<u64>,
    spent: Spent,
}

impl Yardstick {
    /// Builds the backlog and fills the slots.
    pub(crate) fn build(load: Load, seed: u64) -> Result<Yardstick, Failure> {
        let mut naive = Naive::default();
        for n in 0..load.tasks {
            naive.enqueue(load.standing(0, n)?.key);
        }
        let mut runs = VecDeque::new();
        for _ in 0..load.slots {
            runs.extend(naive.start());
        }
        Ok(Yardstick { load, rng: Rng::new(seed), naive, runs, spent: Spent::default() })
    }
}

impl Cycles for Yardstick {
    fn turnover(&self) -> u64 {
        self.load.tasks
    }

    fn batch(&mut self) -> Result<u64, Failure> {
        let tasks: Result<Vec<NewTask>, Failure> =
            (0..self.load.batch).map(|_| self.load.random(0, &mut self.rng)).collect();
        let (tasks, naive, runs) = (tasks?, &mut self.naive, &mut self.runs);
        let ended = timed(&mut self.spent.inside, || {
            let mut ended = 0;
            for task in tasks {
                if runs.pop_front().is_some_and(|run| naive.end(run)) {
                    ended += 1;
                }
                runs.extend(naive.start());
                naive.enqueue(task.key);
            }
            ended
        });
        if ended == self.load.batch { Ok(ended) } else { Err("the yardstick ran dry".into()) }
    }

    fn spent(&mut self) -> Spent {
        std::mem::take(&mut self.spent)
    }
}
