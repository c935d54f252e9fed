//! A process for tests to kill, to trace and to trouble: it commits batch after batch to an embedded store
//! and says so on its standard output, one line each, when the store has acknowledged it.
//!
//! ```text
//! committer DIR [--segment BYTES] [--floor BYTES] [--witness DIR] [--commits N] [--hold]
//!
//! doubt WHAT    the store is taken for an old copy
//! holds N       the shard is taken; the store has the commits up to N
//! acked N       commit N is acknowledged
//! failed WHAT   the store said no; the shard is taken again
//! refused WHAT  the directory cannot be opened; the process ends with status 2
//! ```
//!
//! It ends when the store has N commits. With `--hold` it commits nothing, and ends when its standard
//! input does.

#![expect(clippy::unwrap_used, reason = "a part of the tests, which fail by panicking")]

#[path = "../tests/embedded/plan.rs"]
mod plan;

use std::io::Read;
use std::process::ExitCode;

use evenhand_store::embedded::Options;
use evenhand_store::{Embedded, Store};

/// Errors in a row after which it gives up: the trouble does not pass.
const PATIENCE: u32 = 20;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().unwrap();
    let mut options = Options { segment: 64 * 1024, floor: 0, table: 64 * 1024, witness: None };
    let (mut commits, mut hold) = (u64::MAX, false);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().unwrap().parse().unwrap();
        match argument.as_str() {
            "--witness" => options.witness = Some(arguments.next().unwrap().into()),
            "--segment" => options.segment = number(),
            "--floor" => options.floor = number(),
            "--commits" => commits = number(),
            "--hold" => hold = true,
            unknown => panic!("{unknown} is no option; see the head of the source"),
        }
    }
    let store = match Embedded::open(dir, options) {
        Ok(store) => store,
        Err(error) => {
            println!("refused {error}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(run(&store, if hold { 0 } else { commits }, hold))
}

async fn run(store: &Embedded, commits: u64, hold: bool) -> ExitCode {
    let mut failures = 0;
    while failures < PATIENCE {
        let taken = match store.take(plan::SHARD, None).await {
            Ok(taken) => taken,
            Err(error) => {
                println!("failed {error}");
                failures += 1;
                continue;
            }
        };
        let mut last = plan::last_commit(taken.metadata.next_seq);
        if let Some(doubt) = &taken.doubt {
            println!("doubt {doubt}");
        }
        println!("holds {last}");
        if hold {
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            return ExitCode::SUCCESS;
        }
        loop {
            if last >= commits {
                return ExitCode::SUCCESS;
            }
            match store.commit(plan::SHARD, taken.epoch, plan::changes(last + 1)).await {
                Ok(()) => {
                    last += 1;
                    failures = 0;
                    println!("acked {last}");
                }
                Err(error) => {
                    println!("failed {error}");
                    failures += 1;
                    break;
                }
            }
        }
    }
    ExitCode::FAILURE
}
