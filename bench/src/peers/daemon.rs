//! A beanstalkd that is started for one measurement, with its log in a directory of its own, and ended with it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::beanstalk::Connection;
use crate::Failure;

/// How long it may take until it listens: so many looks, so far apart.
const LOOKS: u32 = 250;
const LOOK: Duration = Duration::from_millis(20);

/// When beanstalkd syncs its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syncs {
    /// After each write, as Evenhand does.
    Each,
    /// Every 50 ms, as it does if nobody says: what was answered in between is lost with the machine.
    Sometimes,
}

impl Syncs {
    pub(super) fn name(self) -> &'static str {
        match self {
            Syncs::Each => "beanstalkd -f0",
            Syncs::Sometimes => "beanstalkd (-f50)",
        }
    }
}

/// A running beanstalkd.
#[derive(Debug)]
pub(super) struct Daemon {
    child: Child,
    addr: SocketAddr,
}

impl Daemon {
    /// Whether there is one to start.
    pub(super) fn ready(program: &Path) -> Result<(), Failure> {
        let version = Command::new(program).arg("-v").stdin(Stdio::null()).stdout(Stdio::null()).status();
        version.map(drop).map_err(|error| missing(program, &error))
    }

    /// Starts one, and returns when it listens.
    pub(super) fn start(program: &Path, dir: &Path, syncs: Syncs) -> Result<Daemon, Failure> {
        std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let addr = free.map_err(|error| format!("no port for beanstalkd: {error}"))?;
        let mut command = Command::new(program);
        command.args(["-l", "127.0.0.1", "-p", &addr.port().to_string(), "-b"]).arg(dir);
        if syncs == Syncs::Each {
            command.arg("-f0");
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.map_err(|error| {
            let program = program.display();
            format!("cannot start {program}: {error}; `make bench-tools` adds it, or --beanstalkd says where it is")
        })?;
        let mut daemon = Daemon { child, addr };
        for _ in 0..LOOKS {
            if let Ok(Some(status)) = daemon.child.try_wait() {
                return Err(format!("beanstalkd ended as soon as it began: {status}"));
            }
            if Connection::open(addr).is_ok() {
                return Ok(daemon);
            }
            std::thread::sleep(LOOK);
        }
        Err("beanstalkd does not listen".into())
    }

    pub(super) fn connect(&self) -> Result<Connection, Failure> {
        Connection::open(self.addr)
    }
}

fn missing(program: &Path, error: &std::io::Error) -> Failure {
    let program = program.display();
    format!("cannot start {program}: {error}; `make bench-tools` adds it, or --beanstalkd says where it is")
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Its data goes with it: there is nothing to end in good order.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
