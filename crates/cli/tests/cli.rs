//! The command line as people and programs use it: what it prints, and what it exits with.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use expect_test::{Expect, expect};
use serde_json::Value;
use tempfile::TempDir;

/// Bounds a test that hangs; nothing is said about how fast anything is.
const SOON: Duration = Duration::from_secs(120);

/// An empty directory to work in, and processes that end with it.
struct Home {
    dir: TempDir,
    url: String,
    children: Vec<Child>,
    /// Kept open: a server must not find that nobody listens.
    _said: Option<BufReader<ChildStdout>>,
}

/// What a command said, and how it ended.
#[derive(Debug)]
struct Said {
    out: String,
    err: String,
    code: i32,
}

impl Said {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Home {
    /// No server: what is asked is not there.
    fn alone() -> Home {
        Home {
            dir: TempDir::new().unwrap(),
            url: "http://127.0.0.1:1".into(),
            children: Vec::new(),
            _said: None,
        }
    }

    fn with_server() -> Home {
        let mut home = Home::alone();
        home.serve("127.0.0.1:0");
        home
    }

    /// Starts a server on what is in the directory.
    fn serve(&mut self, listen: &str) {
        let args =
            "serve --data data --witness witness --log warn --heartbeat 100ms --unhealthy-after 1s --listen";
        let args: Vec<&str> = args.split(' ').chain([listen]).collect();
        let mut child = self.command(&args).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        self.children.insert(0, child);
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let url = line.split_once(" on ").and_then(|(_, rest)| rest.split_once(',')).map(|(url, _)| url);
        self.url = url.unwrap_or_else(|| panic!("the server said {line:?}")).into();
        self._said = Some(said);
    }

    /// Ends the server without a word.
    fn kill_server(&mut self) {
        let mut server = self.children.remove(0);
        server.kill().unwrap();
        server.wait().unwrap();
    }

    /// `evenhand ARGS` in the directory, with nothing of what this process was told.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenhand"));
        let ours = std::env::vars_os().map(|(name, _)| name);
        for name in ours.filter(|name| name.to_string_lossy().starts_with("EVENHAND_")) {
            command.env_remove(name);
        }
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null()).env_remove("NO_COLOR");
        command
    }

    fn ended(mut command: Command, stdin: &str) -> Said {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // One that does not read may end before all is written.
        let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { out: text(output.stdout), err: text(output.stderr), code: output.status.code().unwrap_or(-1) }
    }

    /// Asks the server.
    fn cli(&self, args: &[&str]) -> Said {
        self.cli_with(args, "")
    }

    fn cli_with(&self, args: &[&str], stdin: &str) -> Said {
        let mut command = self.command(args);
        command.env("EVENHAND_SERVER", &self.url);
        Home::ended(command, stdin)
    }

    /// The same with variables, and without the server's.
    fn told(&self, variables: &[(&str, &str)], args: &[&str]) -> Said {
        let mut command = self.command(args);
        command.envs(variables.iter().copied());
        Home::ended(command, "")
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }

    /// A worker that gets work.
    fn worker(&mut self, args: &[&str]) {
        let mut command = self.command(&[&["worker", "--seat-dir", "seats", "--log", "warn"], args].concat());
        self.children.push(command.env("EVENHAND_SERVER", &self.url).spawn().unwrap());
        self.await_worker();
    }

    fn await_worker(&self) {
        eventually("a worker gets work", || {
            self.cli(&["workers", "--json"]).json()["workers"][0]["health"] == "healthy"
        });
    }

    fn submit(&self, args: &[&str]) -> String {
        let said = self.cli(&[&["submit"], args].concat());
        assert_eq!(said.code, 0, "{said:?}");
        said.out.trim().into()
    }

    /// What a command prints, standard error after standard output, without what differs each time.
    fn check(&self, args: &[&str], code: i32, expected: &Expect) {
        let said = self.cli(args);
        let text = format!("$ evenhand {}\n{}{}", args.join(" "), said.out, said.err);
        expected.assert_eq(&same(&text.replace(&self.url, "URL")));
        assert_eq!(said.code, code, "{args:?}");
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Workers first: they would miss their server.
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < SOON, "{what}: not within {SOON:?}");
    }
}

/// Without what differs each time: 340 ms becomes TIME, and gaps, which depend on it, become two spaces.
fn same(text: &str) -> String {
    let is_number = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_digit());
    let is_unit = |word: &str| matches!(word.trim_end_matches([',', ';', ')']), "ms" | "s" | "min");
    let line = |line: &str| {
        let mut words: Vec<&str> = Vec::new();
        for word in line.split(' ') {
            let (last, before) = (words.last().copied(), words.len().checked_sub(2).map(|at| words[at]));
            if is_unit(word) && last.is_some_and(is_number) {
                words.pop();
                words.push("TIME");
            } else if !(word.is_empty() && last == Some("") && before.is_some()) {
                words.push(word);
            }
        }
        words.join(" ")
    };
    text.lines().map(|text| line(text) + "\n").collect()
}

#[test]
fn an_empty_server_says_what_to_do_next() {
    let home = Home::with_server();
    home.check(
        &["list"],
        0,
        &expect![[r#"
            $ evenhand list
            no tasks
        "#]],
    );
    home.check(
        &["queues"],
        0,
        &expect![[r#"
            $ evenhand queues
            no queues yet; `evenhand submit QUEUE` makes one
        "#]],
    );
    home.check(
        &["workers"],
        0,
        &expect![[r#"
            $ evenhand workers
            no workers; `evenhand worker QUEUE -- COMMAND` starts one
        "#]],
    );
    assert_eq!(home.cli(&["queues", "--json"]).out, "{\"queues\":[]}\n");
    assert_eq!(home.cli(&["workers", "--json"]).out, "{\"workers\":[]}\n");
    assert_eq!(home.cli(&["list", "--json"]).out, "{\"tasks\":[]}\n");
    let status = home.cli(&["status", "--json"]).json();
    assert_eq!(
        (&status["shards"][0]["open"], &status["thresholds"]["heartbeat_ms"]),
        (&true.into(), &100.into())
    );
}

#[test]
fn tasks_that_wait_are_listed_explained_and_canceled() {
    let home = Home::with_server();
    let long = "日本語の長い名前のテナント/😀/eu-central-1";
    home.submit(&["render", "--key", "acme", "--content-type", "text/plain", "page 7"]);
    home.submit(&["render", "--key", long, "--priority", "2", "page 8"]);
    home.submit(&["mail", "hello"]);
    home.check(&["list"], 0, &expect![[r#"
        $ evenhand list
          task  queue  key  state  attempt  age  why
          0-1  render  acme  queued  1/5  TIME  0 ahead; no worker serves its queue
          0-2  render  日本語の長い名前のテナント/😀/eu-central-1  queued  1/5  TIME  0 ahead; no worker serves its queue
          0-3  mail  -  queued  1/5  TIME  0 ahead; no worker serves its queue
    "#]]);
    home.check(&["list", "--key", long], 0, &expect![[r#"
        $ evenhand list --key 日本語の長い名前のテナント/😀/eu-central-1
          task  queue  key  state  attempt  age  why
          0-2  render  日本語の長い名前のテナント/😀/eu-central-1  queued  1/5  TIME  0 ahead; no worker serves its queue
    "#]]);
    home.check(
        &["list", "--queue", "render", "--limit", "1"],
        0,
        &expect![[r#"
            $ evenhand list --queue render --limit 1
              task  queue  key  state  attempt  age  why
              0-1  render  acme  queued  1/5  TIME  0 ahead; no worker serves its queue
              there are more: --cursor 0-1
        "#]],
    );
    home.check(
        &["list", "--state", "running"],
        0,
        &expect![[r#"
            $ evenhand list --state running
            no tasks
        "#]],
    );
    home.check(
        &["get", "0-1"],
        0,
        &expect![[r#"
            $ evenhand get 0-1
              task  0-1
              state  queued
              queue  render
              key  acme
              attempt  1 of 5
              priority  5
              accepted  TIME ago
              payload  6 B of text/plain
              waits  0 ahead; no worker serves its queue
        "#]],
    );
    home.check(
        &["explain", "0-1"],
        0,
        &expect![[r#"
            $ evenhand explain 0-1
            task 0-1 waits: no worker serves its queue render

              state  queued, attempt 1 of 5, accepted TIME ago
              position  0 ahead in queue render, priority 5
              waits for no worker serves its queue
              priority 2 goes first
              key  acme, weight 1, 1 waiting, 0 running
              workers  none serves render
              gate  open

            What to do:
              evenhand worker render -- COMMAND  starts a worker for it
        "#]],
    );
    home.check(
        &["queues"],
        0,
        &expect![[r#"
            $ evenhand queues
              queue  waiting  running  scheduled  accepted  succeeded  failed  canceled  expired  next waits
              render  2  0  0  2  0  0  0  0  TIME
              mail  1  0  0  1  0  0  0  0  TIME
        "#]],
    );
    let listed = home.cli(&["list", "--key", "acme", "--state", "queued", "--json"]).json();
    assert_eq!(listed["tasks"][0]["id"], "0-1");
    assert_eq!(listed["tasks"][0]["content_type"], "text/plain");
    let explained = home.cli(&["explain", "0-2", "--json"]).json();
    assert_eq!(explained["why"], "task 0-2 waits: no worker serves its queue render");
    assert_eq!((&explained["task"]["key"], &explained["shard"]["open"]), (&long.into(), &true.into()));
    home.check(
        &["cancel", "0-1"],
        0,
        &expect![[r#"
            $ evenhand cancel 0-1
            task 0-1 is canceled
        "#]],
    );
    assert_eq!(home.cli(&["cancel", "0-3", "--json"]).out, "{\"stopping\":false}\n");
    home.check(
        &["explain", "0-1"],
        0,
        &expect![[r#"
            $ evenhand explain 0-1
            task 0-1 was canceled and will not run

              state  canceled, attempt 1 of 5, accepted TIME ago

            What to do:
              evenhand replay 0-1  runs it after all
        "#]],
    );
    home.check(
        &["explain", "0-99"],
        3,
        &expect![[r#"
            $ evenhand explain 0-99
            evenhand: task 0-99 does not exist, or is not remembered
        "#]],
    );
    home.check(
        &["list", "--state", "success"],
        2,
        &expect![[r#"
            $ evenhand list --state success
            error: invalid value 'success' for '--state <STATE>'
              [possible values: queued, scheduled, running, succeeded, failed, canceled, expired]

              tip: a similar value exists: 'succeeded'

            For more information, try '--help'.
        "#]],
    );
}

#[test]
fn a_task_is_followed_to_its_end() {
    let mut home = Home::with_server();
    let script = "read -r line; echo \"reading $line\" >&2; case $line in bad) exit 100;; esac; printf 'did %s' \"$line\"";
    home.worker(&["q", "--slots", "1", "--seat", "one", "--", "sh", "-c", script]);
    let said = home.cli_with(&["submit", "q", "--wait", "-"], "good\n");
    assert_eq!((said.out.as_str(), said.code), ("did good", 0), "{said:?}");
    assert!(
        said.err.starts_with("task 0-1 is accepted\n") && said.err.ends_with("0-1 succeeded\n"),
        "{said:?}"
    );
    // No terminal: no colours, nothing that is replaced in place.
    assert!(!said.err.contains(['\x1b', '\r']), "{said:?}");
    let failed = home.cli_with(&["submit", "q", "--wait", "-"], "bad\n");
    assert_eq!((failed.out.as_str(), failed.code), ("", 1), "{failed:?}");
    assert!(failed.err.contains(" failed: it failed for good"), "{failed:?}");
    let bad = failed.err.split(' ').nth(1).unwrap().to_string();
    let json = home.cli_with(&["submit", "q", "--wait", "--json", "-"], "good\n").json();
    let good = json["id"].as_str().unwrap();
    assert_eq!((&json["state"], &json["result"]), (&"succeeded".into(), &"did good".into()));
    // What has ended is still told, once.
    let watched = home.cli(&["watch", good]);
    assert_eq!((watched.out, watched.code), (format!("{good} succeeded\n"), 0), "{}", watched.err);
    let watched = home.cli(&["watch", good, "--json"]).json();
    assert_eq!((&watched["event"], &watched["task"]["id"]), (&"finished".into(), &good.into()));
    let explained = home.cli(&["explain", &bad]);
    assert_eq!(explained.code, 0, "{explained:?}");
    expect![[r#"
        task 0-N has failed after 1 attempt: it failed for good (exit 100)

          state  failed, attempt 1 of 5, accepted TIME ago

        What to do:
          evenhand replay 0-N  runs it again, once the reason is gone
    "#]]
    .assert_eq(&same(&explained.out.replace(&bad, "0-N")));
    home.check(
        &["workers"],
        0,
        &expect![[r#"
            $ evenhand workers
              seat  life  health  slots  running  queues  heard  why no work
              one  1  healthy  1  0  q  TIME ago
        "#]],
    );
    home.check(
        &["watch", "0-1", "--queue", "q"],
        2,
        &expect![[r#"
            $ evenhand watch 0-1 --queue q
            error: the argument '[ID]' cannot be used with '--queue <QUEUE>'

            Usage: evenhand watch --server <URL> <ID>

            For more information, try '--help'.
        "#]],
    );
}

#[test]
fn all_tasks_of_a_key_are_watched() {
    let mut home = Home::with_server();
    let mut watch = home.command(&["watch", "--queue", "q", "--key", "acme", "--json"]);
    let mut child = watch.env("EVENHAND_SERVER", &home.url).stdout(Stdio::piped()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    home.children.push(child);
    let (lines, events) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines() {
            let _ = lines.send(serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        }
    });
    // Those of before it watches are not told, so there are more until one is.
    let began = Instant::now();
    let event = loop {
        home.submit(&["q", "--key", "zeta", "x"]);
        home.submit(&["q", "--key", "acme", "x"]);
        if let Ok(event) = events.recv_timeout(Duration::from_millis(100)) {
            break event;
        }
        assert!(began.elapsed() < SOON, "nothing is told");
    };
    assert_eq!((&event["event"], &event["task"]["key"]), (&"queued".into(), &"acme".into()), "{event}");
    home.worker(&["q", "--seat", "one", "--", "true"]);
    let mut names = BTreeSet::new();
    while names.len() < 2 {
        let event = events.recv_timeout(SOON).unwrap();
        if let Some(task) = event.get("task") {
            assert_eq!(task["key"], "acme", "{event}");
        }
        names.extend(event["event"].as_str().filter(|name| *name != "queued").map(String::from));
    }
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["finished", "started"]);
}

#[test]
fn a_task_is_followed_through_a_restart_of_the_server() {
    let mut home = Home::alone();
    // Outside of those that the system hands out, so that it is still free after the restart.
    let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let first = 10_000 + (std::process::id() % 1_000) as u16;
    let listen = format!("127.0.0.1:{}", (first..12_000).find(free).unwrap());
    home.serve(&listen);
    let id = home.submit(&["q", "x"]);
    let mut watch = home.command(&["watch", &id, "--json"]);
    let mut watching = watch.env("EVENHAND_SERVER", &home.url).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["event"], "queued");
    home.kill_server();
    home.serve(&listen);
    home.worker(&["q", "--seat", "one", "--", "true"]);
    let mut event = next();
    while event["event"] != "finished" {
        event = next();
    }
    assert_eq!((&event["task"]["id"], &event["task"]["state"]), (&id.into(), &"succeeded".into()));
    assert!(watching.wait().unwrap().success());
}

#[test]
fn a_batch_says_which_line_and_which_field_is_wrong() {
    let home = Home::with_server();
    let lines =
        "{\"payload\": {\"page\": 7}, \"key\": \"acme\"}\n\n{\"text\": \"x\"}\n{\"base64\": \"AP8=\"}\n";
    let said = home.cli_with(&["submit", "q", "--batch", "-", "--key", "zeta"], lines);
    assert_eq!((said.out.as_str(), said.code), ("3 tasks accepted\n", 0), "{said:?}");
    let said = home.cli_with(&["submit", "q", "--batch", "-", "--json"], "{}\n");
    assert_eq!(said.json()["created"], true);
    let tasks = home.cli(&["list", "--json"]).json();
    let of = |field: &str| -> Vec<Value> {
        tasks["tasks"].as_array().unwrap().iter().map(|task| task[field].clone()).collect()
    };
    assert_eq!(of("key"), ["acme", "zeta", "zeta", ""]);
    assert_eq!(of("payload_bytes"), [11, 1, 2, 0]);
    for (line, what) in [
        (
            "{\"prio\": 3}",
            "line 2: prio is no field of a task; there are payload, text, base64, content_type, key",
        ),
        ("{\"weight\": \"much\"}", "line 2: weight: invalid type: string \"much\", expected f64"),
        ("{\"expires_ms\": 30", "line 2: is no JSON: EOF while parsing an object (column 17)"),
    ] {
        let said = home.cli_with(&["submit", "q", "--batch", "-"], &format!("{{}}\n{line}\n"));
        assert!(said.code == 2 && said.err.contains(what), "{said:?}");
    }
}

#[test]
fn a_batch_that_ends_early_says_how_many_were_accepted() {
    let home = Home::with_server();
    let wrong = |at: usize, line: &str, all: usize| -> Said {
        let lines: String = (1..=all).map(|n| format!("{}\n", if n == at { line } else { "{}" })).collect();
        home.cli_with(&["submit", "q", "--batch", "-"], &lines)
    };
    // Found before it is sent, and all before it is accepted.
    let said = wrong(1_400, "{\"key\": \"a\\u0000\"}", 1_500);
    let what =
        "evenhand: line 1400: key contains the control character '\\0'; remove it; 1,399 tasks accepted\n";
    assert_eq!((said.err.as_str(), said.code), (what, 2));
    let said = wrong(2, "{\"priority\": 10}", 3);
    let what = "evenhand: line 2: priority 10 is out of range; use 0 (first) to 9; 1 task accepted\n";
    assert_eq!((said.err.as_str(), said.code), (what, 2));
    assert_eq!(home.cli(&["queues", "--json"]).json()["queues"][0]["waiting"], 1_400);
    // Found by the server: a call is accepted as a whole or not at all.
    let said = home.cli_with(&["submit", "a/b", "--batch", "-"], "{}\n{}\n");
    assert!(
        said.code == 2 && said.err.contains("queue") && said.err.contains("0 tasks accepted"),
        "{said:?}"
    );
}

#[test]
fn a_line_that_comes_alone_is_submitted() {
    let home = Home::with_server();
    let mut submit = home.command(&["submit", "q", "--batch", "-", "--json"]);
    let submit = submit.env("EVENHAND_SERVER", &home.url).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut submitting = submit.spawn().unwrap();
    let (send, said) = mpsc::channel();
    let out = BufReader::new(submitting.stdout.take().unwrap());
    std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
    let mut stdin = submitting.stdin.take().unwrap();
    for n in 1..=3 {
        stdin.write_all(b"{}\n").unwrap();
        // The pipe stays open: nothing says that there is no more.
        let line = said.recv_timeout(SOON).unwrap();
        assert!(line.contains(&format!("\"0-{n}\"")), "{line}");
    }
    drop(stdin);
    assert!(submitting.wait().unwrap().success());
}

#[test]
fn top_without_a_terminal_is_one_snapshot_after_the_other() {
    let mut home = Home::with_server();
    home.submit(&["render", "--key", "acme", "--weight", "3", "x"]);
    home.submit(&["render", "--key", "😀", "x"]);
    home.submit(&["mail", "x"]);
    let said = home.cli(&["top", "--json", "--count", "2", "--interval", "1ms"]);
    let snapshots: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(snapshots.len(), 2, "{said:?}");
    assert_eq!((&snapshots[0]["rates"], &snapshots[1]["rates"]["accepted"]), (&Value::Null, &0.0.into()));
    assert_eq!(snapshots[0]["queue"]["queue"], "render", "the busiest");
    let keys = snapshots[0]["queue"]["keys"].as_array().unwrap();
    let due = keys.iter().find(|key| key["key"] == "acme").unwrap()["share_due"].as_f64().unwrap();
    assert!((due - 0.75).abs() < 1e-9, "{keys:?}");
    home.check(
        &["top", "--count", "1"],
        0,
        &expect![[r#"
            $ evenhand top --count 1
            evenhand 0.1.0  URL  up TIME  gate open
            3 waiting  0/0 running  accepted -/s  started -/s  finished -/s

            queues  2
              queue  waiting  running  scheduled  accepted  succeeded  failed  canceled  expired  next waits
              render  2  0  0  2  0  0  0  0  TIME
              mail  1  0  0  1  0  0  0  0  TIME

            keys of render, by share received  2
              key  weight  waiting  running  started  received ┃ due  got  due
              acme  3  1  0  0  ······························┃·········  0 %  75 %
              😀  1  1  0  0  ··········┃·····························  0 %  25 %

            workers  0
              no workers: evenhand worker QUEUE -- COMMAND

        "#]],
    );
    home.kill_server();
    let said = home.cli(&["top", "--count", "1"]);
    assert!(said.code == 6 && said.err.contains("the server cannot be reached"), "{said:?}");
}

#[test]
fn a_reader_that_has_gone_ends_a_command_in_silence() {
    let home = Home::with_server();
    let lines = "{}\n".repeat(1_000);
    assert_eq!(home.cli_with(&["submit", "q", "--batch", "-"], &lines).code, 0);
    for args in [
        &["list", "--limit", "1000"][..],
        &["top"],
        &["status", "--json"],
        &["config", "show"],
        &["completions", "bash"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = home.command(args);
        let child = command.env("EVENHAND_SERVER", &home.url).stdout(writer).stderr(Stdio::piped()).spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{args:?}");
    }
}

#[test]
fn what_is_not_there_has_its_exit_code() {
    let home = Home::alone();
    for args in [&["status"][..], &["top", "--json"], &["explain", "0-1"], &["watch", "--queue", "q"]] {
        let said = home.cli(args);
        assert!(said.code == 6 && said.err.contains("cannot be reached"), "{args:?}: {said:?}");
        assert!(said.err.contains("start one with `evenhand serve`"), "{args:?}: {said:?}");
    }
    home.check(&["status", "--server", "nonsense"], 2, &expect![[r#"
        $ evenhand status --server nonsense
        error: invalid value 'nonsense' for '--server <URL>': "nonsense" is no address; one looks like http://127.0.0.1:7400

        For more information, try '--help'.
    "#]]);
    home.check(
        &["config", "check"],
        3,
        &expect![[r#"
            $ evenhand config check
            evenhand: there is no configuration file; looked for evenhand.toml and /etc/evenhand/evenhand.toml
        "#]],
    );
    home.check(
        &["config", "check", "nowhere.toml"],
        2,
        &expect![[r#"
            $ evenhand config check nowhere.toml
            evenhand: cannot read nowhere.toml: No such file or directory (os error 2)
        "#]],
    );
}

#[test]
fn every_command_has_help_with_an_example() {
    let home = Home::alone();
    let commands =
        "dev serve worker submit get watch explain cancel list queues workers status top completions";
    let pairs = ["config check", "config show", "store check", "store info"];
    for command in commands.split(' ').chain(pairs) {
        let args: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let said = home.cli(&args);
        assert!(said.code == 0 && said.out.contains("Examples:\n  evenhand "), "{command}: {}", said.out);
        assert!(said.out.lines().all(|line| line.chars().count() <= 120), "{command}: {}", said.out);
    }
}

#[test]
fn completions_can_be_read_by_their_shells() {
    let home = Home::alone();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let said = home.cli(&["completions", shell]);
        assert!(said.code == 0 && said.out.contains("explain"), "{shell}");
        // Hidden commands are nobody's to complete.
        assert!(!said.out.contains("The last steps before a task"), "{shell}");
    }
    home.file("evenhand.bash", &home.cli(&["completions", "bash"]).out);
    let bash = Command::new("bash").arg("-n").arg(home.dir.path().join("evenhand.bash")).output().unwrap();
    assert!(bash.status.success(), "{bash:?}");
}

#[test]
fn a_flag_goes_before_the_environment_before_the_file_before_the_default() {
    let home = Home::with_server();
    let nowhere = "http://127.0.0.1:1";
    let reached = |variables: &[(&str, &str)], args: &[&str]| home.told(variables, args).code == 0;
    home.file("evenhand.toml", &format!("[client]\nserver = \"{}\"\n", home.url));
    assert!(reached(&[], &["status"]), "the file goes before the default");
    assert!(!reached(&[("EVENHAND_SERVER", nowhere)], &["status"]), "the environment goes before the file");
    let flag = ["status", "--server", &home.url];
    assert!(reached(&[("EVENHAND_SERVER", nowhere)], &flag), "a flag goes before the environment");
    // Which file: the flag's, the environment's, the one that is there.
    home.file("away.toml", &format!("[client]\nserver = \"{nowhere}\"\n"));
    assert!(!reached(&[], &["status", "--config", "away.toml"]));
    assert!(!reached(&[("EVENHAND_CONFIG", "away.toml")], &["status"]));
    assert!(reached(&[("EVENHAND_CONFIG", "away.toml")], &["--config", "evenhand.toml", "status"]));
    let missing = home.told(&[], &["status", "--config", "nowhere.toml"]);
    assert!(missing.code == 2 && missing.err.contains("nowhere.toml"), "{missing:?}");
}

#[test]
fn a_file_is_checked_and_settings_are_shown_with_where_they_come_from() {
    let home = Home::alone();
    home.file(
        "evenhand.toml",
        "[serve]\nlost_after = \"30s\"\nfloor = 64\n\n[worker]\nqueues = [\"render=3\", \"mail\"]\n",
    );
    let said = home.told(&[("EVENHAND_FLOOR", "65"), ("EVENHAND_SEAT", "gpu-7")], &["config", "show"]);
    expect![[r#"
        file: evenhand.toml

          section  field            value                  from
          client   server           http://127.0.0.1:7400  default
          serve    data             evenhand-data          default
          serve    witness          -                      default
          serve    listen           127.0.0.1:7400         default
          serve    heartbeat        1s                     default
          serve    unhealthy_after  5s                     default
          serve    lost_after       30s                    evenhand.toml:2
          serve    absence          5m                     default
          serve    floor            65                     EVENHAND_FLOOR
          serve    log              info                   default
          serve    log_format       text                   default
          worker   queues           render=3 mail          evenhand.toml:6
          worker   slots            -                      default
          worker   seat             gpu-7                  EVENHAND_SEAT
          worker   seat_dir         -                      default
          worker   work_dir         -                      default
          worker   grace            10s                    default
          worker   server           http://127.0.0.1:7400  default
          worker   log              info                   default
          worker   log_format       text                   default
          worker   command          -                      default
    "#]]
    .assert_eq(&said.out);
    let json = home.told(&[("EVENHAND_FLOOR", "65")], &["config", "show", "--json"]).json();
    let setting = |field: &str| -> Value {
        let settings = json["settings"].as_array().unwrap();
        settings.iter().find(|setting| setting["field"] == field).unwrap().clone()
    };
    let floor = setting("floor");
    assert_eq!(
        (&floor["value"], &floor["from"], &floor["place"]),
        (&"65".into(), &"environment".into(), &"EVENHAND_FLOOR".into())
    );
    assert_eq!(
        (&setting("lost_after")["from"], &setting("absence")["from"]),
        (&"file".into(), &"default".into())
    );
    home.check(
        &["config", "check"],
        0,
        &expect![[r#"
            $ evenhand config check
            evenhand.toml is good: 3 settings
        "#]],
    );
    home.file("bad.toml", "[serve]\nlisten = 7400\nlost-after = \"30s\"\n[dev]\n");
    home.check(
        &["config", "check", "bad.toml"],
        2,
        &expect![[r#"
            $ evenhand config check bad.toml
            bad.toml: line 2: serve.listen cannot be 7400: invalid socket address syntax
            bad.toml: line 3: serve.lost-after is no setting; did you mean lost_after?
            bad.toml: line 4: dev is no section; there are client, serve, worker
        "#]],
    );
    let json = home.cli(&["config", "check", "bad.toml", "--json"]).json();
    assert_eq!((&json["good"], &json["problems"][1]["line"]), (&false.into(), &3.into()));
    home.file("disagrees.toml", "[serve]\nheartbeat = \"10s\"\n");
    home.check(
        &["config", "check", "disagrees.toml"],
        2,
        &expect![[r#"
            $ evenhand config check disagrees.toml
            disagrees.toml: --unhealthy-after must be at least two heartbeats
        "#]],
    );
    // What is wrong keeps commands from starting with half of it.
    home.check(
        &["serve", "--config", "bad.toml"],
        2,
        &expect![[r#"
            $ evenhand serve --config bad.toml
            evenhand: bad.toml: line 2: serve.listen cannot be 7400: invalid socket address syntax
            evenhand: bad.toml: line 3: serve.lost-after is no setting; did you mean lost_after?
            evenhand: bad.toml: line 4: dev is no section; there are client, serve, worker
        "#]],
    );
    let wrong = home.told(&[("EVENHAND_FLOOR", "much")], &["config", "show"]);
    assert!(wrong.code == 2 && wrong.err.contains("much"), "{wrong:?}");
}

#[test]
fn a_worker_can_be_told_everything_by_a_file() {
    let mut home = Home::with_server();
    let text = "[worker]\nserver = \"URL\"\nqueues = [\"q\"]\nseat = \"from-file\"\nseat_dir = \"seats\"\nslots = 3\ncommand = [\"printf\", \"%s\", \"from the file\"]\n";
    home.file("evenhand.toml", &text.replace("URL", &home.url));
    let worker = home.command(&["worker", "--slots", "2", "--log", "warn"]).spawn().unwrap();
    home.children.push(worker);
    home.await_worker();
    let workers = home.cli(&["workers", "--json"]).json();
    assert_eq!(
        (&workers["workers"][0]["seat"], &workers["workers"][0]["slots"]),
        (&"from-file".into(), &2.into())
    );
    assert_eq!(home.cli(&["submit", "q", "--wait"]).out, "from the file");
}
