//! The seat's lock file. Whoever holds its lock is the seat's only living worker on this machine. In it stand
//! a token and a counter of lives: a life with the same token and a higher number proves all lower ones dead,
//! which spares the server to wait for them.
//!
//! The lock alone is no such proof, since a guardian that was killed can leave processes behind. So a life
//! begins only when nothing is left of the earlier ones: lock, sweep, count, in this order.
//!
//! The file is written in place, because a lock is on a file and not on a name. A checksum tells if it was
//! torn; then, and when it was made on another machine (a copied disk), a new token is made, which proves
//! nothing about anybody.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::Seat;
use super::cgroup::Cgroups;
use super::processes::Sweep;
use super::{GuardianError, Instance, SEATS_PER_NAME};

/// How long what is left of earlier lives may take to die.
const SWEEP: Duration = Duration::from_secs(10);
/// Between two looks at something that the kernel does not announce.
const LOOK: Duration = Duration::from_millis(10);

/// A seat that is ours until this is dropped.
#[derive(Debug)]
pub(crate) struct SeatLock {
    file: File,
    seat: String,
    path: PathBuf,
}

/// What stands in the file.
#[derive(Clone, Debug, PartialEq)]
struct Record {
    machine: String,
    token: u64,
    life: u64,
    pid: u32,
}

impl SeatLock {
    /// Takes a seat and begins its next life, for a worker that is its own guardian.
    pub(crate) fn begin(
        dir: &Path,
        seat: &Seat,
        wait: Duration,
    ) -> Result<(SeatLock, Instance), GuardianError> {
        let mut lock = match seat {
            Seat::Named(seat) => SeatLock::take(dir, seat, wait)?,
            Seat::FirstFree(name) => SeatLock::take_first_free(dir, name)?,
        };
        let instance = lock.begin_life(None)?;
        Ok((lock, instance))
    }

    /// Takes a seat; if it is held, tries again for as long as `wait`.
    pub(super) fn take(dir: &Path, seat: &str, wait: Duration) -> Result<SeatLock, GuardianError> {
        let path = dir.join(format!("{seat}.lock"));
        let failed = |error: io::Error| GuardianError::Setup(format!("{}: {error}", path.display()));
        std::fs::create_dir_all(dir).map_err(failed)?;
        let since = Instant::now();
        loop {
            let mut options = OpenOptions::new();
            let mut file =
                options.read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // A file that was deleted and made anew since it was opened is another lock.
                Ok(()) if names(&path, &file).map_err(failed)? => {
                    return Ok(SeatLock { file, seat: seat.to_owned(), path });
                }
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) if since.elapsed() >= wait => {
                    let pid = Record::read(&mut file).ok().flatten().map(|record| record.pid);
                    return Err(GuardianError::SeatInUse { seat: seat.to_owned(), pid });
                }
                Err(Errno::WOULDBLOCK) => thread::sleep(LOOK),
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    /// Takes the first seat that is free of NAME, NAME-2, NAME-3 and so on.
    pub(super) fn take_first_free(dir: &Path, name: &str) -> Result<SeatLock, GuardianError> {
        for n in 1..=SEATS_PER_NAME {
            let seat = if n == 1 { name.to_owned() } else { format!("{name}-{n}") };
            match SeatLock::take(dir, &seat, Duration::ZERO) {
                Err(GuardianError::SeatInUse { .. }) => {}
                taken => return taken,
            }
        }
        Err(GuardianError::NoSeatFree { name: name.to_owned() })
    }

    /// What the markers of all runs of this seat begin with. It names the lock file itself and not its
    /// token: what an earlier life left is found even if the file was torn since.
    pub(super) fn marker(&self) -> Result<String, GuardianError> {
        let file = self.file.metadata().map_err(|error| self.failed(error))?;
        Ok(format!("{}@{:x}-{:x}.", self.seat, file.dev(), file.ino()))
    }

    /// Begins the next life, after all that is left of earlier ones is dead.
    pub(super) fn begin_life(&mut self, cgroups: Option<&Cgroups>) -> Result<Instance, GuardianError> {
        let marker = self.marker()?;
        let since = Instant::now();
        let mut sweep = Sweep::new(&marker);
        loop {
            let grouped = cgroups.map(|cgroups| cgroups.sweep(&marker)).unwrap_or_default();
            if sweep.is_done() && grouped.is_empty() {
                break;
            }
            let pids = &sweep.pids() | &grouped;
            if !pids.is_empty() && since.elapsed() >= SWEEP {
                return Err(GuardianError::Leftovers {
                    seat: self.seat.clone(),
                    pids: pids.into_iter().collect(),
                });
            }
            thread::sleep(LOOK);
        }
        self.count(&machine()).map_err(|error| self.failed(error))
    }

    fn count(&mut self, machine: &str) -> io::Result<Instance> {
        let earlier = Record::read(&mut self.file)?.filter(|record| record.machine == machine);
        let (token, life) = match earlier {
            Some(record) => (record.token, record.life + 1),
            None => (random()?, 1),
        };
        let record = Record { machine: machine.to_owned(), token, life, pid: std::process::id() };
        let text = record.text();
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())?;
        self.file.set_len(text.len() as u64)?;
        self.file.sync_all()?;
        Ok(Instance { seat: self.seat.clone(), token, life })
    }

    fn failed(&self, error: io::Error) -> GuardianError {
        GuardianError::Setup(format!("{}: {error}", self.path.display()))
    }
}

/// Whether a name still means this file.
fn names(path: &Path, file: &File) -> io::Result<bool> {
    let held = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl Record {
    fn text(&self) -> String {
        let Record { machine, token, life, pid } = self;
        let text =
            format!("evenhand seat 1\nmachine {machine}\ntoken {token:016x}\nlife {life}\npid {pid}\n");
        let sum = checksum(text.as_bytes());
        format!("{text}sum {sum:016x}\n")
    }

    fn parse(text: &str) -> Option<Record> {
        let mut lines = text.lines();
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        field("evenhand seat")?;
        let machine = field("machine")?.to_owned();
        let token = u64::from_str_radix(field("token")?, 16).ok()?;
        let life = field("life")?.parse().ok()?;
        let pid = field("pid")?.parse().ok()?;
        // What was read is what would be written, checksum and all.
        Some(Record { machine, token, life, pid }).filter(|record| record.text() == text)
    }

    /// None if the file is new, torn or something else.
    fn read(file: &mut File) -> io::Result<Option<Record>> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.take(4096).read_to_end(&mut bytes)?;
        Ok(std::str::from_utf8(&bytes).ok().and_then(Record::parse))
    }
}

/// FNV-1a. It guards against a torn write, not against people.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// What tells machines apart. Where nobody has given this one an id, this boot of it: then no life proves
/// anything about those before it.
fn machine() -> String {
    ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .map(|text| text.trim().to_owned())
        .find(|id| !id.is_empty() && !id.contains('\n'))
        .unwrap_or_else(|| "unknown".into())
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(dir: &Path) -> SeatLock {
        SeatLock::take(dir, "seat", Duration::ZERO).unwrap()
    }

    #[test]
    fn lives_are_counted_under_one_token() {
        let dir = tempfile::tempdir().unwrap();
        let first = take(dir.path()).count("a").unwrap();
        let second = take(dir.path()).count("a").unwrap();
        assert_eq!((first.life, second.life), (1, 2));
        assert_eq!(first.token, second.token);
    }

    #[test]
    fn another_machine_makes_a_new_token() {
        let dir = tempfile::tempdir().unwrap();
        let first = take(dir.path()).count("a").unwrap();
        let second = take(dir.path()).count("b").unwrap();
        assert_eq!(second.life, 1);
        assert_ne!(first.token, second.token);
    }

    #[test]
    fn a_torn_file_makes_a_new_token_wherever_it_is_torn() {
        let dir = tempfile::tempdir().unwrap();
        let first = take(dir.path()).count("a").unwrap();
        let path = dir.path().join("seat.lock");
        let whole = std::fs::read(&path).unwrap();
        let torn = (0..whole.len()).map(|length| whole[..length].to_vec());
        let garbled = (0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        });
        for bytes in torn.chain(garbled) {
            std::fs::write(&path, bytes).unwrap();
            let next = take(dir.path()).count("a").unwrap();
            assert_eq!(next.life, 1);
            assert_ne!(next.token, first.token);
        }
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(take(dir.path()).count("a").unwrap(), Instance { life: 2, ..first });
    }

    #[test]
    fn the_first_free_seat_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let seats: Vec<SeatLock> =
            (0..SEATS_PER_NAME).map(|_| SeatLock::take_first_free(dir.path(), "host").unwrap()).collect();
        assert_eq!(seats[0].seat, "host");
        assert_eq!(seats[1].seat, "host-2");
        assert_eq!(seats[63].seat, "host-64");
        let error = SeatLock::take_first_free(dir.path(), "host").unwrap_err();
        assert!(matches!(error, GuardianError::NoSeatFree { .. }), "{error}");
        drop(seats);
        assert_eq!(SeatLock::take_first_free(dir.path(), "host").unwrap().seat, "host");
    }
}
