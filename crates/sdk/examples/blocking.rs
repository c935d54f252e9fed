//! The client without async.
//!
//! ```text
//! evenhand dev                                           # a server; or your own, in EVENHAND_SERVER
//! cargo run -p evenhand --example blocking
//! ```

use evenhand::blocking::Client;
use evenhand::{Filter, NewTask, Refusal, TaskState};

fn main() -> Result<(), Refusal> {
    let client = Client::new(&evenhand::server())?;
    for name in ["one", "two", "three"] {
        client.enqueue("letters", NewTask::new(name).content_type("text/plain").key("acme"))?;
    }

    let waiting = Filter::all().queue("letters").key("acme").state(TaskState::Queued);
    for task in client.list_all(waiting) {
        let task = task?;
        let payload = client.payload(&task.id)?;
        println!("{}, {}", String::from_utf8_lossy(&payload.bytes), payload.content_type);
        client.cancel(&task.id)?;
        println!("{:?}", client.wait(&task.id)?.state());
    }
    Ok(())
}
