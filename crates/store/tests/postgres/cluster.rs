//! A PostgreSQL of our own: a cluster in a scratch directory, with a pooler in front, that nothing else uses. It ends with
//! the tests, however they end: a guard waits for the end of a pipe that only this process holds open, and then stops
//! everything and removes the directory.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use evenhand_store::Postgres;
use evenhand_store::postgres::Options;

/// Where Debian puts the programs.
const BIN: &str = "/usr/lib/postgresql/15/bin";

/// Says "ready" when both are, and ends when its input does.
const GUARD: &str = r#"
set -eu
bin=$1; dir=$2; port=$3; pooler=$4
end() {
    [ -f "$dir/pooler.pid" ] && kill "$(cat "$dir/pooler.pid")" 2>/dev/null || true
    "$bin/pg_ctl" -D "$dir/data" stop -m immediate >/dev/null 2>&1 || true
    rm -rf "$dir"
}
trap end EXIT
"$bin/initdb" -D "$dir/data" -U evenhand -A trust -E UTF8 --locale=C --no-sync >"$dir/log" 2>&1
cat >>"$dir/data/postgresql.conf" <<END
listen_addresses = '127.0.0.1'
port = $port
unix_socket_directories = '$dir'
max_connections = 300
shared_buffers = 64MB
END
cat >"$dir/pooler.ini" <<END
[databases]
* = host=127.0.0.1 port=$port user=evenhand
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $pooler
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 20
max_client_conn = 1000
pidfile = $dir/pooler.pid
logfile = $dir/pooler.log
END
"$bin/pg_ctl" -D "$dir/data" -l "$dir/log" -w start >/dev/null 2>&1 || { cat "$dir/log" >&2; exit 1; }
pgbouncer -q -d "$dir/pooler.ini" || { cat "$dir/pooler.log" >&2; exit 1; }
until "$bin/pg_isready" -q -h 127.0.0.1 -p "$pooler"; do sleep 0.05; done
echo ready
cat >/dev/null
"#;

pub(crate) struct Cluster {
    dir: String,
    port: u16,
    pooler: u16,
    /// Its input is what the guard waits on.
    guard: Child,
}

/// A command of the user that the cluster belongs to: PostgreSQL refuses to run as root.
fn command(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--", program]);
        return command;
    }
    Command::new(program)
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

impl Cluster {
    pub(crate) fn start() -> Cluster {
        for program in [&format!("{BIN}/postgres"), "/usr/sbin/pgbouncer"] {
            let there = std::path::Path::new(program).exists();
            assert!(
                there,
                "{program} is missing; `make tools`, and so `make test`, installs what the tests need"
            );
        }
        let made = command("mktemp").args(["-d", "/tmp/evenhand-postgres.XXXXXX"]).output().unwrap();
        let dir = String::from_utf8(made.stdout).unwrap().trim().to_string();
        assert!(!dir.is_empty(), "no directory for a cluster: {}", String::from_utf8_lossy(&made.stderr));
        let (port, pooler) = (free_port(), free_port());
        let mut guard = command("sh");
        guard.args(["-c", GUARD, "guard", BIN, &dir, &port.to_string(), &pooler.to_string()]);
        guard.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/tmp");
        guard.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A signal for the tests is none for the guard.
        std::os::unix::process::CommandExt::process_group(&mut guard, 0);
        let mut guard = guard.spawn().unwrap();
        let mut said = String::new();
        BufReader::new(guard.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said.trim(), "ready", "the cluster did not start");
        Cluster { dir, port, pooler, guard }
    }

    /// The address of the store in a schema.
    pub(crate) fn address(&self, schema: &str) -> String {
        format!("postgres://evenhand@127.0.0.1:{}/postgres?schema={schema}", self.port)
    }

    /// The same behind the pooler.
    pub(crate) fn pooled(&self, schema: &str) -> String {
        format!("postgres://evenhand@127.0.0.1:{}/postgres?schema={schema}&sslmode=disable", self.pooler)
    }

    /// Runs SQL as anybody could, and returns what it says.
    pub(crate) fn sql(&self, statements: &str) -> String {
        let mut psql = Command::new(format!("{BIN}/psql"));
        psql.args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "evenhand", "-d", "postgres"]);
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-f", "-"]);
        let mut psql =
            psql.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        psql.stdin.take().unwrap().write_all(statements.as_bytes()).unwrap();
        let said = psql.wait_with_output().unwrap();
        assert!(said.status.success(), "{statements}: {}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap().trim().to_string()
    }

    /// Stops or starts the server.
    pub(crate) fn control(&self, arguments: &[&str]) {
        let (data, log) = (format!("{}/data", self.dir), format!("{}/log", self.dir));
        let mut control = command(&format!("{BIN}/pg_ctl"));
        control.args(["-D", &data, "-l", &log, "-w"]).args(arguments).current_dir("/tmp");
        assert!(control.stdout(Stdio::null()).status().unwrap().success(), "pg_ctl {arguments:?}");
    }

    /// Makes a certificate for its address that follows from nothing but itself. Returns its file.
    fn certificate(&self, name: &str) -> String {
        let (certificate, key) = (format!("{}/{name}.crt", self.dir), format!("{}/{name}.key", self.dir));
        let mut openssl = command("openssl");
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        openssl.args(["-days", "2", "-subj", "/CN=evenhand", "-addext", "subjectAltName=IP:127.0.0.1"]);
        openssl.args([
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            &key,
            "-out",
            &certificate,
        ]);
        let made = openssl.stderr(Stdio::null()).status().unwrap();
        assert!(made.success(), "openssl made no certificate");
        certificate
    }

    /// Lets it speak TLS. Returns the file of its certificate.
    pub(crate) fn secure(&self) -> String {
        let file = self.certificate("server");
        let key = file.replace(".crt", ".key");
        for (name, value) in [("ssl_cert_file", file.as_str()), ("ssl_key_file", &key), ("ssl", "on")] {
            self.sql(&format!("ALTER SYSTEM SET {name} = '{value}'"));
        }
        self.control(&["restart", "-m", "fast"]);
        file
    }

    /// The file of a certificate that is not its own.
    pub(crate) fn other_root(&self) -> String {
        self.certificate("other")
    }

    /// Stops it, and lets it come back as a standby that is promoted.
    pub(crate) fn promote(&self) {
        self.control(&["stop", "-m", "fast"]);
        let signal = format!("{}/data/standby.signal", self.dir);
        assert!(command("touch").arg(signal).status().unwrap().success());
        self.control(&["start"]);
        self.control(&["promote"]);
    }

    /// As a crash does: without a word to anybody.
    pub(crate) fn crash(&self) {
        self.control(&["stop", "-m", "immediate"]);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

/// The cluster of all tests that do not harm it.
pub(crate) static SHARED: LazyLock<Cluster> = LazyLock::new(Cluster::start);

/// A schema that nobody has used.
pub(crate) fn fresh_schema() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Opens the store at an address.
pub(crate) async fn open(address: &str) -> Postgres {
    Postgres::open(address, Options::default()).await.unwrap_or_else(|error| panic!("{address}: {error}"))
}

/// Runs a future to its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}
