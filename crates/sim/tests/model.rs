//! Everything that can happen in a small world does.

use evenhand_core::canary::Bug;
use evenhand_sim::model::{Witness, World};

#[test]
fn probe() {
    for witness in [Witness::Workers, Witness::Saved, Witness::Both] {
        for (workers, tasks, crashes, rebirths, copies) in [(2, 1, 2, 1, 1), (2, 2, 2, 1, 0), (3, 1, 1, 0, 0)]
        {
            let world = World { workers, tasks, crashes, rebirths, copies, witness, bug: None };
            let began = std::time::Instant::now();
            let found = world.explore(5_000_000);
            println!(
                "{witness:?} {workers} {tasks} {crashes} {rebirths} {copies}: {} states, {} steps, {:?}",
                found.states,
                found.steps,
                began.elapsed()
            );
            if let Some((way, what)) = found.wrong {
                println!("  {what}");
                way.iter().for_each(|step| println!("    {step}"));
            }
        }
    }
    for bug in [Bug::NewWorkerNotRequired, Bug::UnhealthyNotAsked, Bug::SetToldWhileShut] {
        let world = World {
            workers: 3,
            tasks: 1,
            crashes: 2,
            rebirths: 0,
            copies: 0,
            witness: Witness::Workers,
            bug: Some(bug),
        };
        let found = world.explore(6_000_000);
        println!("{bug:?}: {} states", found.states);
        if let Some((way, what)) = found.wrong {
            println!("  {what}");
            way.iter().for_each(|step| println!("    {step}"));
        }
    }
}
