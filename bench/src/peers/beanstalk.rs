//! beanstalkd's protocol, as much of it as is measured: put, reserve, delete, many of them in one write. It is
//! text in lines; a job's bytes follow the line that says how many they are.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use crate::Failure;

/// How long an answer may take. Nothing waits longer than a second on purpose.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Seconds that a worker has for a job before somebody else gets it; far more than a run takes.
const TTR: u32 = 600;
/// Longest line and largest job that an answer may have: more is no answer.
const LINE_BYTES: u64 = 1_024;
const JOB_BYTES: usize = 16 * 1024 * 1024;

/// A job's number.
pub(super) type Id = u64;

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Inserted(Id),
    /// Its bytes are in the connection's [`Connection::job`].
    Reserved(Id),
    Deleted,
    TimedOut,
}

/// A connection: commands gather until they are sent, answers come in their order.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    answers: BufReader<TcpStream>,
    out: Vec<u8>,
    job: Vec<u8>,
}

impl Connection {
    pub(super) fn open(addr: SocketAddr) -> Result<Connection, Failure> {
        let connect = || {
            let stream = TcpStream::connect_timeout(&addr, ANSWER_WITHIN)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER_WITHIN))?;
            stream.set_write_timeout(Some(ANSWER_WITHIN))?;
            let answers = BufReader::with_capacity(64 * 1024, stream.try_clone()?);
            Ok(Connection { stream, answers, out: Vec::new(), job: Vec::new() })
        };
        connect().map_err(|error: std::io::Error| format!("beanstalkd cannot be reached: {error}"))
    }

    /// A second end of it that sends, while this one listens.
    pub(super) fn sender(&self) -> Result<Sender, Failure> {
        let stream = self.stream.try_clone().map_err(|error| error.to_string())?;
        Ok(Sender { stream, out: Vec::new() })
    }

    pub(super) fn put(&mut self, job: &[u8]) {
        put(&mut self.out, job);
    }

    /// Asks for a job, and waits for one so long.
    pub(super) fn reserve(&mut self, seconds: u32) {
        self.out.extend_from_slice(format!("reserve-with-timeout {seconds}\r\n").as_bytes());
    }

    pub(super) fn delete(&mut self, id: Id) {
        self.out.extend_from_slice(format!("delete {id}\r\n").as_bytes());
    }

    /// Sends what has gathered.
    pub(super) fn send(&mut self) -> Result<(), Failure> {
        send(&mut self.stream, &mut self.out)
    }

    /// The next answer.
    pub(super) fn reply(&mut self) -> Result<Reply, Failure> {
        read(&mut self.answers, &mut self.job)
    }

    /// What was reserved last.
    pub(super) fn job(&self) -> &[u8] {
        &self.job
    }
}

/// The end of a connection that sends.
#[derive(Debug)]
pub(super) struct Sender {
    stream: TcpStream,
    out: Vec<u8>,
}

impl Sender {
    /// Sends one job.
    pub(super) fn put(&mut self, job: &[u8]) -> Result<(), Failure> {
        put(&mut self.out, job);
        send(&mut self.stream, &mut self.out)
    }

    /// Ends the connection, whoever waits for it.
    pub(super) fn close(&self) {
        // Closed by the other side already is closed too.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn put(out: &mut Vec<u8>, job: &[u8]) {
    out.extend_from_slice(format!("put 0 0 {TTR} {}\r\n", job.len()).as_bytes());
    out.extend_from_slice(job);
    out.extend_from_slice(b"\r\n");
}

fn send(stream: &mut TcpStream, out: &mut Vec<u8>) -> Result<(), Failure> {
    let sent = stream.write_all(out).map_err(|error| format!("beanstalkd does not listen: {error}"));
    out.clear();
    sent
}

/// Reads an answer; a job's bytes go into `job`.
fn read(from: &mut impl BufRead, job: &mut Vec<u8>) -> Result<Reply, Failure> {
    let broken = |error: std::io::Error| format!("beanstalkd does not answer: {error}");
    let mut line = Vec::new();
    from.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line).map_err(broken)?;
    let text = String::from_utf8_lossy(&line);
    let strange = || match line.is_empty() {
        true => "beanstalkd has closed the connection".to_string(),
        false => format!("beanstalkd answered {text:?}"),
    };
    let Some(whole) = text.strip_suffix("\r\n") else { return Err(strange()) };
    let number = |word: &str| word.parse::<u64>().map_err(|_| strange());
    match whole.split(' ').collect::<Vec<_>>().as_slice() {
        ["INSERTED", id] => Ok(Reply::Inserted(number(id)?)),
        ["DELETED"] => Ok(Reply::Deleted),
        ["TIMED_OUT"] => Ok(Reply::TimedOut),
        ["RESERVED", id, bytes] => {
            let (id, bytes) = (number(id)?, number(bytes)? as usize);
            if bytes > JOB_BYTES {
                return Err(strange());
            }
            job.resize(bytes + 2, 0);
            from.read_exact(job).map_err(broken)?;
            if !job.ends_with(b"\r\n") {
                return Err(format!("beanstalkd's job {id} is longer than the {bytes} bytes it said"));
            }
            job.truncate(bytes);
            Ok(Reply::Reserved(id))
        }
        _ => Err(strange()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut bytes: &[u8]) -> Vec<Result<(Reply, Vec<u8>), Failure>> {
        let mut replies = Vec::new();
        for _ in 0..10 {
            let mut job = Vec::new();
            let reply = read(&mut bytes, &mut job).map(|reply| (reply, job));
            let over = reply.is_err();
            replies.push(reply);
            if over {
                break;
            }
        }
        replies
    }

    #[test]
    fn answers_are_read_one_after_the_other() {
        let said = b"INSERTED 7\r\nRESERVED 7 6\r\na\r\nb\0c\r\nDELETED\r\nTIMED_OUT\r\nRESERVED 8 0\r\n\r\n";
        let replies = all(said);
        let wanted = [
            (Reply::Inserted(7), b"".as_slice()),
            (Reply::Reserved(7), b"a\r\nb\0c"),
            (Reply::Deleted, b""),
            (Reply::TimedOut, b""),
            (Reply::Reserved(8), b""),
        ];
        for (reply, (wanted, job)) in replies.iter().zip(wanted) {
            assert_eq!(reply, &Ok((wanted, job.to_vec())));
        }
        assert_eq!(replies.last(), Some(&Err("beanstalkd has closed the connection".into())));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        for (said, says) in [
            ("NOT_FOUND\r\n", "NOT_FOUND"),
            ("DEADLINE_SOON\r\n", "DEADLINE_SOON"),
            ("INSERTED\r\n", "INSERTED"),
            ("INSERTED x\r\n", "INSERTED x"),
            ("INSERTED 7 8\r\n", "INSERTED 7 8"),
            ("INSERTED 7\n", "INSERTED 7"),
            ("INSERTED 7", "INSERTED 7"),
            ("RESERVED 7 99999999999\r\n", "99999999999"),
            ("RESERVED 7 3\r\nab", "does not answer"),
            ("RESERVED 7 3\r\nabcde", "longer"),
            ("", "closed"),
        ] {
            let reply = all(said.as_bytes()).pop().unwrap();
            assert!(reply.as_ref().is_err_and(|why| why.contains(says)), "{said:?}: {reply:?}");
        }
        let long = "x".repeat(5_000);
        assert!(all(long.as_bytes())[0].is_err());
    }

    #[test]
    fn a_job_is_put_with_its_length() {
        let mut out = Vec::new();
        put(&mut out, b"a\r\nb");
        assert_eq!(out, b"put 0 0 600 4\r\na\r\nb\r\n");
    }
}
