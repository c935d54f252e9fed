//! Submits many tasks, which go to the server together in few calls; and looks at the queue afterwards.
//!
//! ```text
//! evenhand dev                                           # a server; or your own, in EVENHAND_SERVER
//! cargo run -p evenhand --example batch
//! ```

use evenhand::{Client, NewTask, Refusal};

const TASKS: u32 = 10_000;

#[tokio::main]
async fn main() -> Result<(), Refusal> {
    let client = Client::new(&evenhand::server())?;
    let batch = client.batch("numbers");

    // From one place: hand them in, then see what became of each. When too many are on their way, push waits.
    let mut receipts = Vec::new();
    for number in 0..TASKS {
        let task = NewTask::json(&number)?.key(format!("tenant-{}", number % 10));
        receipts.push(batch.push(task).await?);
    }
    for receipt in receipts {
        receipt.await?;
    }
    println!("{TASKS} tasks accepted");

    // From many places: each waits for the id of its own task, and they share the calls.
    let requests = ["a", "b", "c"].map(|payload| {
        let batch = batch.clone();
        tokio::spawn(async move { batch.enqueue(NewTask::new(payload)).await })
    });
    for request in requests {
        let accepted = request.await.is_ok_and(|id| id.is_ok());
        println!("accepted: {accepted}");
    }

    // Nothing that was handed in is left behind.
    batch.close().await;

    let about = client.queue("numbers", 3).await?;
    println!("{} tasks wait", about.queue.unwrap_or_default().waiting);
    for key in about.keys {
        println!("{:?}: {} wait, {:.0} % are due to it", key.key, key.waiting, key.share_due * 100.0);
    }
    Ok(())
}
