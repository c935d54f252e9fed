//! The documents are true: the commands in them are run, in order, and say what the document shows.
//!
//! A `console` block holds commands (`$ …`, with `> …` for further lines) and what they print. In what they print,
//! `[..]` stands for anything within a line and a line `...` for any lines. A block that begins with
//! `console background` holds one command that goes on, as in a terminal of its own. In one that begins with
//! `console about`, numbers and the widths of columns may differ from what is shown. Blocks of another kind are not
//! run. And what documents point to is there.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;

use evenhand::NewTask;
use evenhand_api::v1::Over;
use evenhand_api::{errors, interactive};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{LONG, SOON, Server};

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The documents whose commands are run.
const RUN: [&str; 4] = ["README.md", "docs/cli.md", "docs/rest.md", "docs/tutorial.md"];

/// Every document, by its path in the project.
fn documents() -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![String::new()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(project().join(&dir)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = format!("{dir}{name}");
            let is_dir = entry.file_type().unwrap().is_dir();
            if is_dir && name != "target" && !name.starts_with('.') {
                dirs.push(path + "/");
            } else if !is_dir && name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// How a block of commands is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Exactly,
    About,
    Background,
}

/// A command of a document, and what it is said to print.
#[derive(Debug)]
struct Step {
    line: usize,
    command: String,
    prints: Vec<String>,
    how: How,
}

fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    // None outside of a block that is run.
    let mut block = None;
    let mut in_block = false;
    for (n, line) in text.lines().enumerate() {
        if let Some(kind) = line.strip_prefix("```") {
            in_block = !in_block;
            block = match kind {
                "console" if in_block => Some(How::Exactly),
                "console about" if in_block => Some(How::About),
                "console background" if in_block => Some(How::Background),
                _ => None,
            };
            continue;
        }
        let Some(how) = block else { continue };
        let last = steps.last_mut().filter(|step| step.prints.is_empty());
        if let Some(command) = line.strip_prefix("$ ") {
            let command = command.split("   #").next().unwrap_or(command).trim_end().to_string();
            steps.push(Step { line: n + 1, command, prints: Vec::new(), how });
        } else if let (Some(more), Some(step)) = (line.strip_prefix("> "), last) {
            step.command = format!("{}\n{more}", step.command);
        } else if let Some(step) = steps.last_mut() {
            step.prints.push(line.to_string());
        }
    }
    steps
}

/// Whether a line is as the document has it.
fn is_like(line: &str, shown: &str) -> bool {
    let mut parts = shown.split("[..]");
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

fn are_like(lines: &[&str], shown: &[&str]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((&"...", rest)) => (0..=lines.len()).any(|skipped| are_like(&lines[skipped..], rest)),
        Some((shown, rest)) => {
            lines.split_first().is_some_and(|(line, lines)| is_like(line, shown) && are_like(lines, rest))
        }
    }
}

fn texts(lines: &[String]) -> Vec<&str> {
    lines.iter().map(String::as_str).collect()
}

/// A line without what differs each time: how large numbers are, the units of times, the widths of columns.
fn about(line: &str) -> String {
    let mut shape = String::new();
    for c in line.chars() {
        match c {
            '0'..='9' if shape.ends_with('0') => {}
            '0'..='9' => shape.push('0'),
            ' ' if shape.ends_with(' ') => {}
            c => shape.push(c),
        }
    }
    // 1,399 and 1.5 are numbers as 7 is one.
    let shape = shape.replace("0,0", "0").replace("0.0", "0");
    shape.replace("0 ms", "0 s").replace("0 min", "0 s")
}

/// A place to run a document in: a scratch directory, a port, and the commands that go on.
struct Desk {
    dir: TempDir,
    port: u16,
    running: Vec<Child>,
}

impl Desk {
    fn new() -> Desk {
        let dir = TempDir::new().unwrap();
        let bin = dir.path().join(".bin");
        fs::create_dir(&bin).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_evenhand"), bin.join("evenhand")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Desk { dir, port, running: Vec::new() }
    }

    /// Where the document's server is, if nobody says otherwise, is where ours is.
    fn command(&self, command: &str) -> Command {
        // What builds first is built already.
        let command =
            command.replace("make run", "evenhand dev").replace("target/release/evenhand", "evenhand");
        let command = command.replace("127.0.0.1:7400", &format!("127.0.0.1:{}", self.port));
        let path = std::env::var("PATH").unwrap_or_default();
        // One that does not end is ended, and fails.
        let mut bash = Command::new("timeout");
        bash.args(["300", "bash", "-c", &command])
            .current_dir(self.dir.path())
            .env("PATH", format!("{}:{path}", self.dir.path().join(".bin").display()))
            .env("HOME", self.dir.path())
            .env_remove("XDG_STATE_HOME")
            .env("EVENHAND_SERVER", format!("http://127.0.0.1:{}", self.port))
            .env("EVENHAND_LISTEN", format!("127.0.0.1:{}", self.port))
            .env("EVENHAND_SEAT_DIR", self.dir.path().join(".seats"))
            .env_remove("EVENHAND_CONFIG")
            .stdin(Stdio::null());
        bash
    }

    fn shown(&self, said: &str) -> String {
        said.replace(&format!("127.0.0.1:{}", self.port), "127.0.0.1:7400")
    }

    fn run(&mut self, document: &str, step: &Step) {
        let at = format!("{document}:{}: {}", step.line, step.command);
        let shown: Vec<&str> = step.prints.iter().map(String::as_str).collect();
        if step.how == How::Background {
            let mut child = self.command(&step.command);
            let mut child =
                child.process_group(0).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
            let output = child.stdout.take().unwrap();
            self.running.push(child);
            self.await_lines(&at, output, &shown);
            return;
        }
        let output = self.command(&format!("{{ {}\n}} 2>&1", step.command)).output().unwrap();
        let said = self.shown(&String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success(), "{at}\nends with {}:\n{said}", output.status);
        let lines: Vec<&str> = said.lines().collect();
        let like = match step.how {
            How::Exactly | How::Background => are_like(&lines, &shown),
            How::About => {
                let lines: Vec<String> = lines.iter().map(|line| about(line)).collect();
                let shown: Vec<String> = shown.iter().map(|line| about(line)).collect();
                are_like(&texts(&lines), &texts(&shown))
            }
        };
        assert!(shown.is_empty() || like, "{at}\nshown:\n{}\nsaid:\n{said}", shown.join("\n"));
    }

    /// Waits until a command that goes on has said what it is shown to say.
    fn await_lines(&self, at: &str, output: ChildStdout, shown: &[&str]) {
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // Nobody may be left who wants to know.
                let _ = send.send(line);
            }
        });
        let mut said = Vec::new();
        while !shown.is_empty() {
            let lines_said: Vec<&str> = said.iter().map(String::as_str).collect();
            if are_like(&lines_said, shown) {
                return;
            }
            match lines.recv_timeout(SOON) {
                Ok(line) => said.push(self.shown(&line)),
                Err(_) => panic!("{at}\nshown:\n{}\nsaid:\n{}", shown.join("\n"), said.join("\n")),
            }
        }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        for mut child in self.running.drain(..).rev() {
            let group = Pid::from_raw(child.id() as i32).unwrap();
            let _ = kill_process_group(group, Signal::TERM);
            let _ = child.wait();
        }
    }
}

fn run_document(path: &str) {
    assert!(RUN.contains(&path), "{path} is not among those that are run");
    let text = fs::read_to_string(project().join(path)).unwrap();
    let steps = steps(&text);
    assert!(!steps.is_empty(), "{path} has no commands");
    let mut desk = Desk::new();
    for step in &steps {
        desk.run(path, step);
    }
}

#[test]
fn the_readme_is_true() {
    run_document("README.md");
    let makefile = fs::read_to_string(project().join("Makefile")).unwrap();
    assert!(makefile.contains("\ttarget/release/evenhand dev\n"), "`make run` is not `evenhand dev`");
}

#[test]
fn the_page_on_the_command_line_is_true() {
    run_document("docs/cli.md");
}

#[test]
fn the_page_on_rest_is_true() {
    run_document("docs/rest.md");
}

#[test]
fn the_tutorial_is_true() {
    run_document("docs/tutorial.md");
}

#[test]
fn what_looks_as_if_it_were_run_is_run() {
    let shows_commands = |path: &String| {
        let text = fs::read_to_string(project().join(path)).unwrap();
        text.lines().any(|line| line.trim_start().starts_with("```console"))
    };
    let shown: Vec<String> = documents().into_iter().filter(shows_commands).collect();
    assert_eq!(shown, RUN, "blocks that are not run are `text`");
}

/// The lines of a document that are no code.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    text.lines().enumerate().filter_map(move |(n, line)| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        (!in_block && !fence).then_some((n + 1, line))
    })
}

/// Where a line points to: `[text](target)`, but not in `code`.
fn targets(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(at) = rest.find(['`', ']']) {
        if let Some(code) = rest[at..].strip_prefix('`') {
            // Code in the text of a link does not end the link.
            rest = code.split_once('`').map_or("", |(_, after)| after);
        } else if let Some(target) = rest[at..].strip_prefix("](") {
            let (target, after) = target.split_once(')').unwrap_or((target, ""));
            found.push(target);
            rest = after;
        } else {
            rest = &rest[at + 1..];
        }
    }
    found
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let letters = title.trim().chars().flat_map(char::to_lowercase);
        let kept = letters.filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let again = (1..).map(|n| format!("{anchor}-{n}"));
        let free = std::iter::once(anchor.clone()).chain(again).find(|name| !found.contains(name));
        found.extend(free);
    }
    found
}

#[test]
fn what_documents_point_to_is_there() {
    let mut wrong = Vec::new();
    let mut links = 0;
    for path in documents() {
        let text = fs::read_to_string(project().join(&path)).unwrap();
        for (line, target) in
            prose(&text).flat_map(|(n, line)| targets(line).into_iter().map(move |to| (n, to)))
        {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            links += 1;
            let (file, anchor) =
                target.split_once('#').map_or((target, None), |(file, name)| (file, Some(name)));
            let there = match file {
                "" => project().join(&path),
                file => project().join(&path).parent().unwrap().join(file),
            };
            let is_there = match anchor.filter(|_| there.extension().is_some_and(|kind| kind == "md")) {
                None => there.exists(),
                Some(anchor) => fs::read_to_string(&there).is_ok_and(|text| anchors(&text).contains(anchor)),
            };
            if !is_there {
                wrong.push(format!("{path}:{line}: {target}"));
            }
        }
    }
    assert!(wrong.is_empty(), "these point nowhere:\n{}", wrong.join("\n"));
    assert!(links > 50, "only {links} were found");
}

#[test]
fn links_and_anchors_are_found() {
    assert_eq!(targets("[a](b.md#c), `[x](y)` and [`d`](e) [f]"), ["b.md#c", "e"]);
    let text = "# The `get` call: how, and why?\n```sh\n# no heading\n```\n## Two\n## Two\n#none\n";
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), ["the-get-call-how-and-why", "two", "two-1"]);
}

/// The names of metrics in a text, as a query or a table has them.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_name(c)).filter(|word| word.starts_with("evenhand_"));
    let of_histogram = |word: &str| {
        let suffix = ["_bucket", "_sum", "_count"].into_iter().find_map(|suffix| word.strip_suffix(suffix));
        suffix.unwrap_or(word).to_string()
    };
    words.map(of_histogram).collect()
}

#[test]
fn the_metrics_that_documents_name_are_those_that_there_are() {
    let server = Server::start(LONG);
    let task = vec![NewTask::new("x").key("acme")];
    // Classes are counted where there are some.
    assert_eq!(server.cli(&["queue", "set", "render", "--classes", "3s:all"]).code, 0);
    let id = server.api().enqueue("render", task).unwrap().ids.remove(0);
    let _worker = server.worker_of("w1", &["render"], &["true"]);
    server.api().end(&id);
    // Workers are counted by why they are gone, so one must be.
    assert_eq!(server.cli(&["workers", "drain", "w1", "--wait"]).code, 0);
    let page = server.page("/metrics");
    let there: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned))
        .collect();
    let read = |path: &str| fs::read_to_string(project().join(path)).unwrap();
    assert_eq!(metrics_in(&read("docs/metrics.md")), there);
    let board: Value = serde_json::from_str(&read("docs/grafana.json")).unwrap();
    let queries: Vec<String> = board["panels"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap())
        .map(|target| target["expr"].as_str().unwrap().to_string())
        .collect();
    let asked = metrics_in(&queries.join("\n"));
    assert!(asked.is_subset(&there), "{:?}", asked.difference(&there));
    assert!(metrics_in(&read("docs/operating.md")).is_subset(&there));
    // Labels too: what is grouped by or filtered on is there.
    for label in ["queue", "outcome", "key", "health", "why", "le"] {
        assert!(page.contains(&format!("{label}=\"")), "no label {label}");
    }
    assert_eq!(board["templating"]["list"][1]["name"], json!("queue"));
}

#[test]
fn the_page_on_errors_is_the_table_of_errors() {
    let page = fs::read_to_string(project().join("docs/errors.md")).unwrap();
    let shown: Vec<(String, String, String)> = page
        .lines()
        .filter(|line| line.starts_with("| `") && line.matches('|').count() == 6)
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').into(), cells[2].into(), cells[4].into())
        })
        .collect();
    let told = errors::TABLE.map(|row| (row.kind.name().into(), row.http.to_string(), row.exit.to_string()));
    assert_eq!(shown, told);
}

#[test]
fn the_page_on_rest_has_the_table_of_how_interactive_tasks_end() {
    let page = fs::read_to_string(project().join("docs/rest.md")).unwrap();
    let shown: Vec<(String, String)> = page
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let code = cells.get(1)?.parse::<u16>().ok()?;
            Some((code.to_string(), cells.get(3)?.to_string()))
        })
        .collect();
    let told = interactive::TABLE.map(|row| match row.over {
        Over::Ended => (row.close.to_string(), "the command's code, or 128 and the signal's number".into()),
        Over::Halted
        | Over::TimeUp
        | Over::Lost
        | Over::Canceled
        | Over::NotStarted
        | Over::Stopping
        | Over::Unspecified => (row.close.to_string(), row.exit.to_string()),
    });
    assert_eq!(shown, told);
}

#[test]
fn what_is_shown_is_compared_line_by_line() {
    assert!(
        is_like("task 0-1 is accepted", "task [..] is accepted") && is_like("x", "x") && is_like("x", "[..]")
    );
    assert!(!is_like("xy", "x") && !is_like("task 0-1 is gone", "task [..] is accepted"));
    assert!(are_like(&["a", "b", "c"], &["a", "...", "c"]) && are_like(&["a"], &["a", "..."]));
    assert!(!are_like(&["a", "b"], &["a"]) && !are_like(&["a"], &["a", "b"]));
    assert_eq!(about("  0-7   1,399 ahead;  up 81 ms"), about("  0-110  2 ahead; up 6 s"));
    assert_ne!(about("2 ahead"), about("2 behind"));
    let text = "```console\n$ one   # first\n$ two \\\n> three\nsaid\n```\n```sh\n$ not run\n```\n";
    let found: Vec<_> = steps(text).into_iter().map(|step| (step.command, step.prints)).collect();
    assert_eq!(found, [("one".into(), vec![]), ("two \\\nthree".into(), vec!["said".to_string()])]);
}
