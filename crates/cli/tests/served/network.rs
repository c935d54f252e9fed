//! Machines of their own for workers: network namespaces that are connected to the server's by a cable each, which can be
//! cut in either direction or in both.
//!
//! A test that wants them plays in a process of its own ([`apart`]), in a namespace that has nothing but what it makes
//! there, and in which process ids are its own too. So nothing of it is seen outside, nobody's network is touched, and
//! nothing is left behind: when that process ends, however it ends, the kernel ends all that it started and takes the
//! network down. It ends as soon as the one that started it is gone.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};

/// Says to a process that it is the one that plays.
const APART: &str = "EVENHAND_TEST_APART";

/// Where the server is.
pub(crate) const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 254));

/// Packets are taken whose answers would not find their way back: a cut of one direction must not be one of both.
const ONE_WAY: &str =
    "echo 0 | tee /proc/sys/net/ipv4/conf/all/rp_filter /proc/sys/net/ipv4/conf/default/rp_filter";

/// Plays the test of this name in a process of its own, with an empty network, and fails if it fails. The name is that of
/// the test which calls this.
pub(crate) fn apart(name: &str, play: impl FnOnce()) {
    if std::env::var_os(APART).is_some() {
        std::thread::spawn(end_with_the_other);
        return play();
    }
    // A pid 1 that ends takes all of its namespace with it.
    let mut playing = Command::new("unshare")
        .args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads", "1"])
        .env(APART, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Open until it has ended, or this process has.
    let open = playing.stdin.take();
    let output = playing.wait_with_output().unwrap();
    drop(open);
    let [said, complained] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    println!("{said}");
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{name} in a network of its own (this needs root and iproute2): {}\n{complained}",
        output.status
    );
}

/// Waits until the process that started this one is gone.
fn end_with_the_other() {
    let mut rest = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut rest);
    std::process::exit(1);
}

/// Runs commands of `ip`, here or in a namespace.
fn ip(inside: Option<&Machine>, commands: &[String]) {
    let mut command = match inside {
        Some(machine) => machine.command("ip"),
        None => Command::new("ip"),
    };
    let child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.unwrap_or_else(|error| panic!("ip: {error}; `make tools` installs it"));
    child.stdin.take().unwrap().write_all(commands.join("\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{commands:?} said: {complained}");
}

/// The way that what is sent gets lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The cable is out.
    Both,
    /// What the worker sends.
    FromWorker,
    /// What the server sends.
    ToWorker,
}

/// A machine without anything on it, connected to the server's.
pub(crate) struct Machine {
    /// Holds the namespace: it ends when its input does.
    holder: Child,
    number: usize,
    cut: Option<Cut>,
}

impl Machine {
    /// Makes the server's network, and machines that are connected to it.
    pub(crate) fn all(machines: usize) -> Vec<Machine> {
        assert!(Command::new("sh").args(["-c", ONE_WAY]).status().unwrap().success());
        let lines = [
            "link set lo up".to_string(),
            "link add br0 type bridge".into(),
            format!("addr add {SERVER}/24 dev br0"),
            "link set br0 up".into(),
        ];
        ip(None, &lines);
        (1..=machines).map(Machine::new).collect()
    }

    fn new(number: usize) -> Machine {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", &format!("{ONE_WAY} >&2 && echo there && exec cat")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "there\n", "a network namespace is made");
        let machine = Machine { holder, number, cut: None };
        let (port, pid) = (machine.port(), machine.holder.id());
        let cable = [
            format!("link add {port} type veth peer name eth0 netns {pid}"),
            format!("link set {port} master br0"),
            format!("link set {port} up"),
        ];
        ip(None, &cable);
        let own = [
            "link set lo up".to_string(),
            format!("addr add {}/24 dev eth0", machine.address()),
            "link set eth0 up".into(),
        ];
        ip(Some(&machine), &own);
        machine
    }

    fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 99, 0, self.number as u8)
    }

    /// The end of its cable that is at the server.
    fn port(&self) -> String {
        format!("port{}", self.number)
    }

    /// A program that will run there.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg(program);
        command
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    pub(crate) fn cut(&mut self, cut: Cut) {
        self.mend();
        self.change(cut, ["down", "add"]);
        self.cut = Some(cut);
    }

    pub(crate) fn mend(&mut self) {
        if let Some(cut) = self.cut.take() {
            self.change(cut, ["up", "del"]);
        }
    }

    fn change(&self, cut: Cut, [link, route]: [&str; 2]) {
        match cut {
            Cut::Both => ip(None, &[format!("link set {} {link}", self.port())]),
            Cut::FromWorker => ip(Some(self), &[format!("route {route} blackhole {SERVER}/32")]),
            Cut::ToWorker => ip(None, &[format!("route {route} blackhole {}/32", self.address())]),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
