//! A conversation with a worker's command.
//!
//! ```text
//! evenhand dev                                           # a server; or your own, in EVENHAND_SERVER
//! evenhand worker shell -- sh                            # a worker
//! cargo run -p evenhand --example attach
//! ```

use evenhand::{Attach, Client, Heard};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::new(&evenhand::server())?;

    // It has a slot when this returns; if none is free, it is refused.
    let mut task = client.attach("shell", Attach::new().key("acme")).await?;
    task.input.write("echo $((6 * 7))\n").await?;
    task.input.end().await?;
    while let Some(heard) = task.output.next().await? {
        match heard {
            Heard::Stdout(bytes) => print!("{}", String::from_utf8_lossy(&bytes)),
            Heard::Stderr(bytes) => eprint!("{}", String::from_utf8_lossy(&bytes)),
            Heard::Warning { message, .. } => eprintln!("{message}"),
            Heard::Closed(closed) => println!("exit code {:?}", closed.exit_code),
        }
    }
    Ok(())
}
