//! Files of tasks: what a command finds, that it finds them as they were submitted each time, and that nothing of them
//! is left on a worker's disk, however a run ends.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use evenhand::{Kind, NewTask, TaskState, wire};

use crate::space::Disk;
use crate::support::{LONG, Server, Signpost, WorkerProcess, block_on, eventually, eventually_some};

fn shell(server: &Server, script: &str) -> WorkerProcess {
    server.worker_of("one", &["q", "--slots", "4"], &["sh", "-c", script])
}

/// The directories of runs that are there, by lives.
fn dirs(server: &Server) -> Vec<(String, PathBuf)> {
    let list = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let mut dirs: Vec<(String, PathBuf)> = Vec::new();
    for life in list(server.path("seats/work")) {
        let name = life.file_name().into_string().unwrap();
        dirs.extend(list(life.path()).map(|run| (name.clone(), run.path())));
    }
    dirs.sort();
    dirs
}

/// A task with two files.
fn with_files(payload: &str) -> NewTask {
    NewTask::new(payload.as_bytes().to_vec()).file("page.html", "<p>").file("-style css", "p {}")
}

fn submit(server: &Server, task: NewTask) -> String {
    server.api().enqueue("q", vec![task]).unwrap().ids.remove(0)
}

fn result(task: &wire::Task) -> &str {
    std::str::from_utf8(task.result.as_deref().unwrap_or_default()).unwrap()
}

#[test]
fn a_command_finds_its_files_where_it_works_and_they_are_gone_afterwards() {
    let server = Server::start(LONG);
    // Named from where the worker is, not from where the run is.
    fs::write(
        server.path("work.sh"),
        "#!/bin/sh\ncat; stat -c '|%a %n' . * 2>&1 | tr -d '\\n'; printf '|%s|%s|' \"$PWD\" \"$EVENHAND_DIR\"\ncat ./*\n\
         [ -e ./fail ] && exit 100; exit 0\n",
    )
    .unwrap();
    let set = Command::new("chmod").arg("+x").arg(server.path("work.sh")).status().unwrap();
    assert!(set.success());
    let mut evenhand = Command::new(env!("CARGO_BIN_EXE_evenhand"));
    evenhand.current_dir(server.dir.path());
    let mut worker = server.worker_by(evenhand, "seats", "one", &["q"], &["./work.sh"]);

    fs::write(server.path("page.html"), "<p>").unwrap();
    fs::write(server.path("dark.css"), "p {}").unwrap();
    let (page, style) = (server.path("page.html"), server.path("dark.css"));
    let flags = [page.display().to_string(), format!("style={}", style.display())];
    let said = server
        .cli(&["submit", "q", "--wait", "--json", "--file", &flags[0], "--file", &flags[1], "pay load"]);
    assert_eq!(said.code, 0, "{said:?}");
    let json = said.json();
    let parts: Vec<&str> = json["result"].as_str().unwrap().split('|').collect();
    assert_eq!(parts[..4], ["pay load", "700 .", "600 page.html", "600 style"]);
    assert!(parts[4].starts_with(server.path("seats/work/one@").to_str().unwrap()), "{parts:?}");
    assert_eq!((parts[4], parts[6]), (parts[5], "<p>p {}"));
    assert!(!PathBuf::from(parts[4]).exists(), "it is gone when the end is known");
    let id = json["id"].as_str().unwrap();
    let files = server.cli(&["get", id, "--json"]).json()["files"].clone();
    assert_eq!(files, serde_json::json!([{"name": "page.html", "bytes": 3}, {"name": "style", "bytes": 4}]));
    let shown = server.cli(&["get", id]).out;
    assert!(shown.contains("  files     3 B  page.html\n            4 B  style\n"), "{shown}");
    let api = server.api();
    assert_eq!(block_on(api.client.file(id, "style")).unwrap(), "p {}");
    let none = block_on(api.hasty().client.file(id, "nothing")).unwrap_err();
    assert_eq!(none.kind, Kind::NotFound, "{none}");

    let failed = api.end(&submit(&server, with_files("").file("fail", "")));
    assert_eq!((failed.state(), failed.error.as_str()), (TaskState::Failed, "it failed for good (exit 100)"));
    assert_eq!(dirs(&server), []);
    worker.signal(rustix::process::Signal::TERM);
    assert!(worker.ended().success());
    assert_eq!(fs::read_dir(server.path("seats/work")).unwrap().count(), 0, "nothing is left of the life");
}

#[test]
fn a_run_without_files_works_where_its_worker_does() {
    let server = Server::start(LONG);
    let _worker = shell(&server, "pwd; echo \"${EVENHAND_DIR-none}\"");
    let ended = server.api().end(&submit(&server, NewTask::new("")));
    assert_eq!(result(&ended), format!("{}\nnone\n", std::env::current_dir().unwrap().display()));
    assert!(!server.path("seats/work").exists());
}

/// The first try spoils them, and shuts its directory.
#[test]
fn every_try_and_every_replay_finds_the_files_as_they_were_submitted() {
    let server = Server::start(LONG);
    let script = r#"cat page.html "./-style css"; ls | wc -l
        if [ "$EVENHAND_ATTEMPT" = 1 ]; then
            echo spoilt > page.html; rm ./-s*; mkdir -p new/dir; ln -s / new/root; chmod 0 new/dir new; exit 1
        fi"#;
    let _worker = shell(&server, script);
    let api = server.api();
    let retries = evenhand::Retries::new().max_attempts(2).backoff(std::time::Duration::ZERO);
    let id = submit(&server, with_files("").retries(retries));
    let ended = api.end(&id);
    assert_eq!((ended.tries.len(), result(&ended).trim_end()), (2, "<p>p {}2"), "{ended:?}");
    assert_eq!(dirs(&server), []);
    let again = block_on(api.client.replay(&id)).unwrap();
    let ended = api.end(&again);
    assert_eq!((ended.tries.len(), result(&ended).trim_end()), (2, "<p>p {}2"), "{ended:?}");
    assert_eq!(ended.files, api.get(&id).files);
    assert_eq!(dirs(&server), []);
}

#[test]
fn the_directory_of_a_canceled_run_is_gone_when_it_has_ended() {
    let server = Server::start(LONG);
    let _worker = shell(&server, "touch began; while :; do sleep 1; done");
    let api = server.api();
    let id = submit(&server, with_files(""));
    await_run(&server);
    block_on(api.client.cancel(&id)).unwrap();
    assert_eq!(api.end(&id).state(), TaskState::Canceled);
    assert_eq!(dirs(&server), []);
}

/// Waits until a run is in its directory, and says of which life it is.
fn await_run(server: &Server) -> String {
    eventually_some("a run is in its directory", || {
        dirs(server).into_iter().find(|(_, dir)| dir.join("began").exists()).map(|(life, _)| life)
    })
}

/// The worker alone, the guardian alone, and both: the directory goes with its life, or when the next one begins; and
/// the next run finds the files.
#[test]
fn whoever_is_killed_the_directory_is_not_left() {
    let server = Server::start(LONG);
    crate::chaos::never_give_up(&server);
    let api = server.api();
    let go = Signpost::new(&server);
    let script = format!("cat page.html; touch began; while [ ! -e {} ]; do sleep 0.1; done", go.path());
    let id = submit(&server, with_files(""));

    let mut worker = shell(&server, &script);
    let first = await_run(&server);
    worker.kill();
    eventually("its guardian has removed it", || dirs(&server).is_empty());

    let mut worker = shell(&server, &script);
    let second = await_run(&server);
    worker.kill_guardian();
    let third =
        eventually_some("the next life runs it", || Some(await_run(&server)).filter(|life| *life != second));
    eventually("the life before is removed", || dirs(&server).iter().all(|(life, _)| *life == third));

    worker.kill_with_guardian();
    assert_eq!(dirs(&server).len(), 1, "nobody is there to remove it");
    let _worker = shell(&server, &script);
    let last =
        eventually_some("the next life runs it", || Some(await_run(&server)).filter(|life| *life != third));
    eventually("the life before is removed", || dirs(&server).iter().all(|(life, _)| *life == last));
    assert!(first < second && second < third && third < last, "{first} {second} {third} {last}");

    go.raise();
    let ended = api.end(&id);
    assert_eq!((ended.state(), result(&ended)), (TaskState::Succeeded, "<p>"), "{ended:?}");
    assert_eq!(dirs(&server), []);
}

/// From the client to the server, to the store and back, and to the worker: four files of 1 MiB each, four such tasks
/// in one call; and as many files as there may be.
#[test]
fn the_largest_tasks_get_through() {
    let mut server = Server::start(LONG);
    let mega = vec![b'x'; 1024 * 1024];
    let large = (0..4).fold(NewTask::new(""), |task, n| task.file(format!("f{n}"), mega.clone()));
    let many = (0..64).fold(NewTask::new(""), |task, n| task.file(format!("{n:0>128}"), "12345678"));
    let api = server.api();
    let mut ids = api.enqueue("q", vec![large; 4]).unwrap().ids;
    ids.extend(api.enqueue("q", vec![many]).unwrap().ids);
    // What memory held of them is gone.
    server.stop();
    server.restart();
    let _worker = shell(&server, "cat ./* | wc -c; ls | wc -l");
    for (n, id) in ids.iter().enumerate() {
        let ended = api.end(id);
        let expected = if n < 4 { "4194304\n4\n" } else { "512\n64\n" };
        assert_eq!(result(&ended), expected, "{}", ended.error);
    }
    assert_eq!(api.get(&ids[4]).files.len(), 64);
}

#[test]
fn a_worker_that_cannot_place_files_fails_the_try_and_says_why() {
    let server = Server::start(LONG);
    let disk = Disk::new(&server.path("disk"), 1);
    fs::write(server.path("no-directory"), "").unwrap();
    let api = server.api();
    let mega = vec![b'x'; 1024 * 1024];
    for (seat, dir, why) in
        [("one", "no-directory", "no-directory"), ("two", "disk", "No space left on device (os error 28)")]
    {
        let dir = server.path(dir);
        let mut worker = server.worker_of(seat, &["q", "--work-dir", dir.to_str().unwrap()], &["true"]);
        let task = NewTask::new("").max_attempts(1).file("a", mega.clone()).file("b", mega.clone());
        let ended = api.end(&submit(&server, task));
        assert_eq!(ended.state(), TaskState::Failed);
        assert!(ended.error.starts_with("its files could not be placed: "), "{}", ended.error);
        assert!(ended.error.contains(why), "{}", ended.error);
        // Others are run all the same, and nothing of it is left in the way.
        let plain = api.end(&submit(&server, NewTask::new("")));
        assert_eq!(plain.state(), TaskState::Succeeded, "{}", plain.error);
        let small = api.end(&submit(&server, NewTask::new("").max_attempts(1).file("a", "small")));
        let expected = if seat == "two" { TaskState::Succeeded } else { TaskState::Failed };
        assert_eq!(small.state(), expected, "{}", small.error);
        worker.signal(rustix::process::Signal::TERM);
        assert!(worker.ended().success());
    }
    drop(disk);
}

#[test]
fn what_cannot_be_submitted_is_told_by_what_was_said() {
    let server = Server::start(LONG);
    fs::write(server.path("large"), vec![0; 1024 * 1024 + 1]).unwrap();
    fs::write(server.path("small"), "s").unwrap();
    let at = |name: &str| server.path(name).display().to_string();
    let named = |name: &str, path: &str| format!("{name}={}", at(path));
    for (files, what) in [
        (vec![at("none")], "No such file or directory"),
        (vec![at("large")], "has more than 1048576 bytes, which is the most"),
        (vec!["..".to_string()], "has no name; give one, as NAME=PATH"),
        (vec![at("")], "Is a directory"),
        (vec![named("..", "small")], "the name \"..\" is a directory; give the name of a file"),
        (vec![named("a\tb", "small")], "the name contains the control character '\\t'; remove it"),
        (vec![named("", "small")], "the name is empty; give a name such as `page.html`"),
        (vec![at("small"), named("small", "small")], "the name \"small\" is the name of another file too"),
    ] {
        let mut args = vec!["submit", "q"];
        files.iter().for_each(|file| args.extend(["--file", file]));
        let said = server.cli(&args);
        assert!(said.code == 2 && said.err.contains(what), "{files:?}: {said:?}");
        let last = files.last().unwrap();
        assert!(said.err.starts_with(&format!("evenhand: --file {last}: ")), "{said:?}");
    }
    // A line's own files, or those of the flags.
    let lines = "{\"files\": [{\"name\": \"a\", \"text\": \"1\"}]}\n{}\n{\"files\": [{\"name\": \"a/b\"}]}\n";
    let said = server.cli_with(&["submit", "q", "--batch", "-", "--file", &at("small")], lines.as_bytes());
    let wrong =
        "evenhand: line 3: files[0].name \"a/b\" is a path; give a name without `/`; 2 tasks accepted";
    assert!(said.code == 2 && said.err.starts_with(wrong), "{said:?}");
    let tasks = server.cli(&["list", "--json"]).json();
    let name = |n: usize| tasks["tasks"][n]["files"][0]["name"].clone();
    assert_eq!((name(0), name(1)), ("a".into(), "small".into()));
}
