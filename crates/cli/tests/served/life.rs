//! The life of a task: delays, retries, expiry, cancels, replays, unique keys, attached tasks; and how queues treat
//! theirs. What is promised outlives the server.

use std::process::{Child, Command, Stdio};

use evenhand::{Task, TaskState};
use serde_json::Value;

use crate::checker::{all_is_well, await_start, of, ran_once_at_a_time};
use crate::support::{Api, LONG, Said, Server, Signpost, block_on, eventually, eventually_some, wait};

/// A command that is to succeed, and what it said.
fn said(server: &Server, args: &[&str]) -> String {
    let said = server.cli(args);
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.out.trim_end().into()
}

/// The same as JSON.
fn json(server: &Server, args: &[&str]) -> Value {
    let said = server.cli(&[args, &["--json"]].concat());
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.json()
}

fn refused(server: &Server, args: &[&str], code: i32, text: &str) {
    let said = server.cli(args);
    assert!(said.code == code && said.err.contains(text) && said.out.is_empty(), "{args:?}: {said:?}");
}

/// A command that goes on.
fn begin(server: &Server, args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .args(args)
        .env("EVENHAND_SERVER", server.url())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Lets so much time pass, by a task that nobody runs.
fn pass(server: &Server, time: &str) {
    let said = server.cli(&["submit", "nobody-serves-it", "--expires", time, "--wait", "--json"]);
    assert_eq!((said.code, said.json()["state"].as_str()), (1, Some("expired")), "{said:?}");
}

fn kill_and_restart(server: &mut Server) {
    server.kill();
    server.restart();
}

fn states(server: &Server, filter: &[&str]) -> Vec<String> {
    let page = json(server, &[&["list", "--limit", "1000"], filter].concat());
    let tasks = page["tasks"].as_array().unwrap();
    tasks.iter().map(|task| task["state"].as_str().unwrap().to_string()).collect()
}

#[test]
fn a_delayed_task_waits_for_its_time_also_when_the_server_dies() {
    let mut server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let id = said(&server, &["submit", "q", "--delay", "2s", "sleep 0"]);
    let task = json(&server, &["get", &id]);
    let (accepted, due) = (task["accepted_ms"].as_u64().unwrap(), task["due_ms"].as_u64().unwrap());
    // Times are rounded up a little.
    let delay = due - accepted;
    assert!(task["state"] == "scheduled" && (2_000..3_000).contains(&delay), "{task}");
    assert!(said(&server, &["get", &id]).contains("waits     due"), "it is said when");
    assert!(said(&server, &["explain", &id]).contains("waits for its time"));
    assert_eq!(states(&server, &["--state", "scheduled"]), ["scheduled"]);
    assert_eq!((api.queue("q").scheduled, api.queue("q").waiting), (1, 0));
    kill_and_restart(&mut server);
    let ended = api.end(&id);
    assert_eq!(ended.state(), TaskState::Succeeded);
    assert!(ended.tries[0].started_ms >= due, "{ended:?} was due at {due}");
    // A time that is past is now; one that is far stays far.
    let past = server.cli(&["submit", "q", "--at", "2001-01-01T00:00:00Z", "--wait", "sleep 0"]);
    assert_eq!(past.code, 0, "{past:?}");
    let far = said(&server, &["submit", "q", "--at", "2033-05-18T03:33:20Z", "sleep 0"]);
    assert_eq!(json(&server, &["get", &far])["due_ms"], 2_000_000_000_000_u64);
    refused(&server, &["submit", "q", "--at", "9999-01-01T00:00:00Z"], 2, "run_at");
    refused(&server, &["submit", "q", "--delay", "1h", "--expires", "1m"], 2, "expires_ms");
    refused(&server, &["submit", "q", "--delay", "1h", "--at", "2033-05-18T03:33:20Z"], 2, "--at");
    refused(&server, &["submit", "q", "--at", "tomorrow"], 2, "is no time");
}

/// When each try began and ended, how, and what it said.
fn tries(task: &Value) -> Vec<(u64, u64, String, String)> {
    let tries = task["tries"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let one = |(n, tried): (usize, &Value)| {
        assert_eq!((tried["attempt"].as_u64(), tried["seat"].as_str()), (Some(n as u64 + 1), Some("one")));
        let at = |name: &str| tried[name].as_u64().unwrap();
        (at("started_ms"), at("ended_ms"), text(&tried["end"]), text(&tried["error"]))
    };
    tries.iter().enumerate().map(one).collect()
}

#[test]
fn a_failing_task_is_tried_again_after_its_backoff_and_every_try_is_remembered() {
    let mut server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let flags = ["--max-attempts", "3", "--backoff", "400ms", "--backoff-factor", "2", "--max-backoff", "1m"];
    let failed = server.cli(&[&["submit", "q"][..], &flags, &["--wait", "exit 3"]].concat());
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.err.contains("scheduled (attempt 2): again, due"), "{failed:?}");
    let id = failed.err.split(' ').nth(1).unwrap();
    let task = json(&server, &["get", id]);
    assert_eq!((task["state"].as_str(), task["attempt"].as_u64()), (Some("failed"), Some(3)), "{task}");
    let all = tries(&task);
    assert_eq!(all.len(), 3);
    assert!(all.iter().all(|(.., end, error)| end == "failed" && error.contains("exit code 3")), "{all:?}");
    // Half of it at least, since it varies.
    assert!(all[1].0 - all[0].1 >= 200 && all[2].0 - all[1].1 >= 400, "{all:?}");
    let shown = said(&server, &["get", id]);
    assert!(shown.contains("attempt  where ") && shown.matches("exit code 3").count() == 4, "{shown}");

    // Exit code 75 asks for it, 100 forbids it, and the queue decides for those that do not say.
    said(&server, &["queue", "set", "q", "--max-attempts", "2", "--backoff", "0"]);
    for (payload, ends) in [
        ("exit 75", vec!["failed", "failed"]),
        ("exit-first 75", vec!["failed", "succeeded"]),
        ("exit 100", vec!["failed_for_good"]),
        ("exit 0", vec!["succeeded"]),
    ] {
        let id = json(&server, &["submit", "q", payload])["id"].as_str().unwrap().to_string();
        server.api().end(&id);
        let task = json(&server, &["get", &id]);
        assert_eq!(tries(&task).into_iter().map(|(.., end, _)| end).collect::<Vec<_>>(), ends, "{payload}");
        assert_eq!(task["max_attempts"], 2);
    }
    let before = json(&server, &["get", id]);
    kill_and_restart(&mut server);
    assert_eq!(
        json(&server, &["get", id]),
        before,
        "the server died, and what it knew of the task is the same"
    );
    ran_once_at_a_time(&server);
}

#[test]
fn a_task_expires_that_is_not_started_in_time_and_only_that() {
    let server = Server::start(LONG);
    let api = server.api();
    let waits = server.cli(&["submit", "q", "--expires", "300ms", "--wait", "sleep 0"]);
    assert_eq!(waits.code, 1, "{waits:?}");
    assert!(waits.err.contains("expired"), "{waits:?}");
    let waits = waits.err.split(' ').nth(1).unwrap();
    assert_eq!(api.state(waits), TaskState::Expired);
    assert!(said(&server, &["explain", waits]).contains(&format!("evenhand replay {waits}")));
    assert_eq!((api.queue("q").expired, api.queue("q").waiting), (1, 0));
    // One that has begun goes on; one that failed too late is not tried again.
    let _worker = server.worker("one", 2);
    api.await_worker("one");
    let go = Signpost::new(&server);
    let runs = said(&server, &["submit", "q", "--expires", "1s", &go.until()]);
    await_start(&server, &runs);
    let late = ["submit", "q", "--expires", "30s", "--max-attempts", "5", "--backoff", "1d", "exit 1"];
    let late = said(&server, &late);
    assert_eq!(api.end(&late).state(), TaskState::Expired);
    pass(&server, "2s");
    assert_eq!(api.state(&runs), TaskState::Running);
    go.raise();
    assert_eq!(api.end(&runs).state(), TaskState::Succeeded);
    assert!(of(&server, "start", waits).is_empty());
    // In its own words: run again it has its time again.
    let again = json(&server, &["replay", waits])["id"].as_str().unwrap().to_string();
    let again = api.end(&again);
    assert_eq!((again.state(), again.replay_of.as_str()), (TaskState::Succeeded, waits));
}

#[test]
fn a_task_can_be_canceled_in_every_state_but_the_last() {
    let server = Server::start(LONG);
    let api = server.api();
    let canceled = |id: &str| assert_eq!(api.end(id).state(), TaskState::Canceled);
    let waiting = said(&server, &["submit", "q", "sleep 0"]);
    let scheduled = said(&server, &["submit", "q", "--delay", "1h", "sleep 0"]);
    for id in [&waiting, &scheduled] {
        assert_eq!(said(&server, &["cancel", id]), format!("task {id} is canceled"));
        assert_eq!(api.state(id), TaskState::Canceled, "at once");
        assert_eq!(said(&server, &["cancel", id]), format!("task {id} is canceled"), "it is so already");
    }
    // While it runs: told once, and it may be told again.
    let deaf = server.path("deaf");
    let script = format!("trap '' TERM; : > {}; while :; do sleep 0.05; done", deaf.display());
    let _stubborn = server.worker_of("stubborn", &["stubborn"], &["sh", "-c", &script]);
    let stubborn = said(&server, &["submit", "stubborn"]);
    eventually("it runs, and will not listen", || deaf.exists());
    for _ in 0..2 {
        let told = json(&server, &["cancel", &stubborn]);
        assert_eq!(told["stopping"], true, "{told}");
        assert!(api.get(&stubborn).stopping || api.state(&stubborn) == TaskState::Canceled);
    }
    canceled(&stubborn);
    // Between two tries.
    let _worker = server.worker("one", 2);
    let failing = said(&server, &["submit", "q", "--backoff", "1d", "exit 1"]);
    eventually("it waits for its next try", || api.state(&failing) == TaskState::Scheduled);
    assert_eq!(api.get(&failing).tries.len(), 1);
    said(&server, &["cancel", &failing]);
    canceled(&failing);
    // When it is over.
    let over = said(&server, &["submit", "q", "sleep 0"]);
    assert_eq!(api.end(&over).state(), TaskState::Succeeded);
    refused(&server, &["cancel", &over], 3, "has ended");
    assert_eq!(api.state(&over), TaskState::Succeeded);
    // Many: each by itself.
    let more = said(&server, &["submit", "nobody", "x"]);
    let last = said(&server, &["submit", "nobody", "x"]);
    let many = server.cli(&["cancel", &more, &over, "0-4711", &last]);
    assert_eq!(many.out, format!("task {more} is canceled\ntask {last} is canceled\n"), "{many:?}");
    assert!(many.code == 3 && many.err.lines().count() == 2, "{many:?}");
    for id in [&waiting, &scheduled, &more, &last] {
        assert!(of(&server, "start", id).is_empty());
    }
    assert_eq!((api.queue("q").canceled, api.queue("q").scheduled, api.queue("q").waiting), (3, 0, 0));
    ran_once_at_a_time(&server);
}

#[test]
fn a_filter_cancels_and_replays_what_it_names_and_nothing_else() {
    let mut server = Server::start(LONG);
    let api = server.api();
    let lines = |key: &str, n: usize, more: &str| {
        format!("{{\"text\": \"sleep 0\", \"key\": \"{key}\"{more}}}\n").repeat(n).into_bytes()
    };
    let batch = |lines: Vec<u8>| {
        let said = server.cli_with(&["submit", "q", "--batch", "-"], &lines);
        assert_eq!(said.code, 0, "{said:?}");
    };
    batch(lines("a", 1_200, ""));
    batch(lines("a", 30, ", \"delay_ms\": 3600000"));
    batch(lines("b", 20, ""));
    // Nobody is asked, so nothing happens; nor to everything.
    refused(&server, &["cancel", "--queue", "q", "--key", "a"], 2, "--yes");
    refused(&server, &["cancel", "--yes"], 2, "--queue or a --key");
    refused(&server, &["cancel", "--state", "queued", "--yes"], 2, "--queue or a --key");
    refused(&server, &["cancel", "--queue", "q", "--state", "failed", "--yes"], 2, "have ended");
    refused(&server, &["replay", "--queue", "q", "--state", "running", "--yes"], 2, "have not ended");
    refused(&server, &["cancel", "0-1", "--queue", "q"], 2, "cannot be used with");
    refused(&server, &["cancel", "--queue", "nobody", "--yes"], 3, "nobody");
    assert_eq!((api.queue("q").waiting, api.queue("q").scheduled), (1_220, 30));

    let of_a = ["--queue", "q", "--key", "a", "--yes"];
    let with = |first: &[&str], more: &[&str]| said(&server, &[first, &of_a, more].concat());
    assert_eq!(with(&["cancel"], &["--until", "1h"]), "0 tasks are canceled", "they are younger");
    assert_eq!(with(&["cancel"], &["--state", "scheduled"]), "30 tasks are canceled");
    assert_eq!(with(&["cancel"], &["--since", "1h"]), "1,200 tasks are canceled");
    assert_eq!(with(&["cancel"], &[]), "0 tasks are canceled");
    assert_eq!((api.queue("q").waiting, api.queue("q").canceled), (20, 1_230));
    // In steps, for programs.
    let steps = server.cli(&[&["replay", "--json"][..], &of_a, &["--state", "canceled"]].concat());
    let steps: Vec<Value> = steps.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let changed: u64 = steps.iter().map(|step| step["changed"].as_u64().unwrap()).sum();
    let ids: usize = steps.iter().map(|step| step["ids"].as_array().unwrap().len()).sum();
    assert_eq!((changed, ids), (1_230, 1_230));
    assert!(steps.len() > 1);
    assert_eq!(with(&["replay"], &[]), "0 tasks are run again", "once is enough");
    // Those that waited for a time do not any more.
    assert_eq!((api.queue("q").waiting, api.queue("q").scheduled), (1_250, 0));
    kill_and_restart(&mut server);
    let canceled = states(&server, &["--key", "a", "--state", "canceled"]);
    assert!(!canceled.is_empty() && canceled.iter().all(|state| state == "canceled"));
    assert_eq!(
        said(&server, &[&["replay"][..], &of_a].concat()),
        "0 tasks are run again",
        "it is remembered"
    );
    // What runs is stopped.
    let _worker = server.worker_of("one", &["q", "--slots", "2"], &["sleep", "600"]);
    eventually("two run", || api.queue("q").running == 2);
    let all = said(&server, &["cancel", "--queue", "q", "--yes"]);
    let running = all.strip_prefix("1,250 tasks are canceled; ").and_then(|rest| rest.split(' ').next());
    assert!(running.is_some_and(|running| running.parse().is_ok_and(|n: u64| n >= 2)), "{all}");
    eventually("all is over", || api.queue("q").running + api.queue("q").waiting == 0);
    assert_eq!(api.queue("q").canceled, 2_480);
}

#[test]
fn an_ended_task_is_run_again_as_another_one() {
    let mut server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let first = ["submit", "q", "--key", "acme", "--priority", "2", "--max-attempts", "1", "exit 7"];
    let first = said(&server, &first);
    assert_eq!(api.end(&first).state(), TaskState::Failed);
    kill_and_restart(&mut server);
    let told = said(&server, &["replay", &first]);
    let again = told.strip_prefix(&format!("task {first} is run again as ")).unwrap();
    let (old, new) = (api.get(&first), api.end(again));
    assert_eq!((old.replayed_as.as_str(), new.replay_of.as_str()), (again, first.as_str()));
    let same = |task: &Task| (task.key.clone(), task.priority, task.max_attempts, task.state());
    assert_eq!(same(&old), same(&new));
    assert!(said(&server, &["get", &first]).contains(&format!("replayed  as {again}")));
    assert!(said(&server, &["get", again]).contains(&format!("replay of {first}")));
    // What has not ended is not run again.
    let go = Signpost::new(&server);
    let running = said(&server, &["submit", "q", &go.until()]);
    await_start(&server, &running);
    refused(&server, &["replay", &running], 4, "has not ended");
    refused(&server, &["replay", "0-4711"], 3, "0-4711");
    refused(&server, &["replay", "nonsense"], 2, "is no task's id");
    go.raise();
    ran_once_at_a_time(&server);
}

#[test]
fn a_unique_key_is_one_task_whoever_is_first_and_whoever_dies() {
    let mut server = Server::start(LONG);
    let api = server.api();
    let args = ["submit", "q", "--unique", "bill-17", "--json", "sleep 0"];
    let race: Vec<Child> = (0..6).map(|_| begin(&server, &args)).collect();
    let answers: Vec<Value> = race
        .into_iter()
        .map(|child| serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap())
        .collect();
    let id = answers[0]["id"].as_str().unwrap();
    assert!(answers.iter().all(|answer| answer["id"] == id), "{answers:?}");
    assert_eq!(answers.iter().filter(|answer| answer["created"] == true).count(), 1, "{answers:?}");
    kill_and_restart(&mut server);
    let again = server.cli(&["submit", "q", "--unique", "bill-17", "sleep 0"]);
    assert_eq!((again.out.trim(), again.err.trim()), (id, format!("task {id} was there already").as_str()));
    assert_eq!((again.code, api.queue("q").accepted), (0, 1));
    // Also when it has ended: within its window it is done.
    let _worker = server.worker("one", 2);
    assert_eq!(api.end(id).state(), TaskState::Succeeded);
    let waited = server.cli(&["submit", "q", "--unique", "bill-17", "--wait", "sleep 0"]);
    assert_eq!((waited.code, waited.err.contains("was there already")), (0, true), "{waited:?}");
    // Another queue is another task, and so is a window that is over.
    assert_ne!(said(&server, &["submit", "other", "--unique", "bill-17", "sleep 0"]), id);
    let short = ["submit", "q", "--unique", "short", "--unique-for", "500ms", "sleep 0"];
    let first = said(&server, &short);
    eventually("the window is over", || said(&server, &short) != first);
    // By line of a batch.
    let lines = b"{\"text\":\"sleep 0\",\"unique_key\":\"x\"}\n{\"text\":\"sleep 0\",\"unique_key\":\"x\"}\n";
    let batch = server.cli_with(&["submit", "q", "--batch", "-"], lines);
    assert_eq!(batch.out, "1 task accepted, 1 was there already\n", "{batch:?}");
    refused(&server, &["submit", "q", "--unique-for", "1m", "x"], 2, "--unique");
    refused(&server, &["submit", "q", "--unique", "x", "--batch", "-"], 2, "--batch");
    refused(&server, &["submit", "q", "--unique", &"u".repeat(257)], 2, "unique_key");
    assert!(api.queue("q").accepted <= 1 + 1_000);
}

/// The only task that is there.
fn only(api: &Api, queue: &str) -> Task {
    let filter = evenhand::Filter::all().queue(queue);
    eventually_some("there is a task", || {
        block_on(api.client.list(filter.clone())).ok().and_then(|mut page| page.tasks.pop())
    })
}

#[test]
fn an_attached_task_ends_with_those_who_wait_for_it() {
    let server = Server::start(LONG);
    let api = server.api();
    refused(&server, &["submit", "q", "--attached", "x"], 2, "--attached needs --wait");
    let _worker = server.worker("one", 2);
    let go = Signpost::new(&server);
    let mut client = begin(&server, &["submit", "q", "--wait", "--attached=1s", &go.until()]);
    let id = only(&api, "q").id;
    await_start(&server, &id);
    assert_eq!(api.get(&id).attach_ttl_ms, Some(1_000));
    // As long as somebody waits, it goes on.
    pass(&server, "2500ms");
    assert_eq!(api.state(&id), TaskState::Running);
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(api.end(&id).state(), TaskState::Canceled);
    // The same for one that waits, for its turn or for a time.
    for more in [&["--delay", "1h"][..], &[]] {
        let queue = if more.is_empty() { "waits" } else { "later" };
        let mut client =
            begin(&server, &[&["submit", queue, "--wait", "--attached=1s"], more, &["x"]].concat());
        let id = only(&api, queue).id;
        client.kill().unwrap();
        client.wait().unwrap();
        assert_eq!(api.end(&id).state(), TaskState::Canceled);
    }
    // And one whose client stays to the end.
    let kept = server.cli(&["submit", "q", "--wait", "--attached=1s", "sleep 0 print done"]);
    assert_eq!((kept.code, kept.out.as_str()), (0, "done"), "{kept:?}");
}

#[test]
fn an_attached_task_survives_its_server() {
    let mut server = Server::start(LONG);
    let api = server.api();
    let _worker = server.worker("one", 2);
    let go = Signpost::new(&server);
    let mut client = begin(&server, &["submit", "q", "--wait", "--attached=5s", &go.until()]);
    let id = only(&api, "q").id;
    await_start(&server, &id);
    kill_and_restart(&mut server);
    eventually("the worker is back", || api.get(&id).state() == TaskState::Running);
    pass(&server, "6s");
    assert_eq!(api.state(&id), TaskState::Running, "its client has come back");
    go.raise();
    assert!(wait(&mut client, "the client ends").success());
}

#[test]
fn a_paused_queue_starts_nothing_and_what_runs_goes_on() {
    let mut server = Server::start(LONG);
    let api = server.api();
    let command = [crate::support::checked_task().into_os_string(), server.dir.path().into()];
    let _worker = server.worker_of("one", &["q", "other", "--slots", "4"], &command);
    let go = Signpost::new(&server);
    let running = said(&server, &["submit", "q", &go.until()]);
    await_start(&server, &running);
    assert_eq!(said(&server, &["queue", "pause", "q"]), "queue q is paused; what runs goes on");
    let held = said(&server, &["submit", "q", "sleep 0"]);
    go.raise();
    assert_eq!(api.end(&running).state(), TaskState::Succeeded);
    // Others are served meanwhile.
    let other = server.cli(&["submit", "other", "--wait", "sleep 0"]);
    assert_eq!(other.code, 0, "{other:?}");
    assert_eq!(json(&server, &["get", &held])["hold"], "its queue is paused");
    assert!(said(&server, &["explain", &held]).contains("evenhand queue resume q"));
    let table = said(&server, &["queues"]);
    assert!(
        table.lines().any(|line| line.trim_start().starts_with("q ") && line.ends_with("paused")),
        "{table}"
    );
    kill_and_restart(&mut server);
    api.await_worker("one");
    let other = server.cli(&["submit", "other", "--wait", "sleep 0"]);
    assert_eq!(other.code, 0, "{other:?}");
    assert_eq!(api.state(&held), TaskState::Queued, "it is paused still");
    assert_eq!(json(&server, &["queue", "resume", "q"])["settings"]["paused"], false);
    assert_eq!(api.end(&held).state(), TaskState::Succeeded);
    refused(&server, &["queue", "pause", "nobody"], 3, "there is no queue nobody");
}

#[test]
fn a_paused_key_waits_and_others_do_not() {
    let mut server = Server::start(LONG);
    let api = server.api();
    let command = [crate::support::checked_task().into_os_string(), server.dir.path().into()];
    let _worker = server.worker_of("one", &["q"], &command);
    assert_eq!(server.cli(&["submit", "q", "--key", "acme", "--wait", "sleep 0"]).code, 0);
    let paused = said(&server, &["queue", "pause", "q", "--key", "acme"]);
    assert_eq!(paused, "key acme of queue q is paused; what runs goes on");
    let held: Vec<String> =
        (0..3).map(|_| said(&server, &["submit", "q", "--key", "acme", "sleep 0"])).collect();
    assert_eq!(server.cli(&["submit", "q", "--key", "zeta", "--wait", "sleep 0"]).code, 0);
    assert_eq!(json(&server, &["get", &held[0]])["hold"], "key acme is paused");
    kill_and_restart(&mut server);
    api.await_worker("one");
    assert_eq!(server.cli(&["submit", "q", "--key", "zeta", "--wait", "sleep 0"]).code, 0);
    said(&server, &["cancel", &held[1]]);
    assert_eq!(said(&server, &["queue", "weight", "q", "acme", "3"]), "key acme of queue q has weight 3");
    assert_eq!(json(&server, &["queue", "resume", "q", "--key", "acme"])["paused"], false);
    assert_eq!(api.end(&held[0]).state(), TaskState::Succeeded);
    assert_eq!(api.end(&held[1]).state(), TaskState::Canceled);
    assert_eq!(api.end(&held[2]).state(), TaskState::Succeeded);
    refused(&server, &["queue", "weight", "q", "acme", "0.0001"], 2, "out of range");
    assert_eq!(json(&server, &["queue", "get", "q"])["loop"], "idle");
}

#[test]
fn settings_of_a_queue_outlive_the_server() {
    let mut server = Server::start(LONG);
    refused(&server, &["queue", "get", "q"], 3, "there is no queue q");
    let set = ["queue", "set", "q", "--max-attempts", "7", "--backoff", "1s", "--max-lost", "9"];
    let first = json(&server, &set);
    assert_eq!(first["settings"]["share"], "tasks", "if nobody says");
    let more = ["queue", "set", "q", "--backoff-factor", "1.5", "--max-backoff", "1m", "--retention", "7d"];
    let second = json(&server, &[&more[..], &["--share", "time"]].concat());
    assert!(second["version"].as_u64() > first["version"].as_u64(), "{first} {second}");
    let version = second["version"].to_string();
    kill_and_restart(&mut server);
    let got = json(&server, &["queue", "get", "q"]);
    assert_eq!((&got["settings"], &got["version"]), (&second["settings"], &second["version"]));
    let expected = serde_json::json!({
        "retry": {
            "max_attempts": 7, "backoff_ms": 1_000, "factor": 1.5, "max_backoff_ms": 60_000, "max_lost": 9,
        },
        "retention_ms": 604_800_000,
        "paused": false,
        "share": "time",
        "after_downgrade": "fail",
        "interactive_grace_ms": 0,
    });
    assert_eq!(got["settings"], expected);
    let shown = said(&server, &["queue", "get", "q"]);
    assert!(shown.contains("ends are remembered for 7 d") && shown.contains("1.5 times as long"), "{shown}");
    assert!(shown.contains("share     keys share time"), "{shown}");
    // Not behind anybody's back.
    let set =
        |version: &str| server.cli(&["queue", "set", "q", "--max-attempts", "3", "--if-version", version]);
    assert_eq!(set("0").code, 4, "{:?}", set("0"));
    assert_eq!(set(&version).code, 0);
    assert_eq!(set(&version).code, 4, "it has another one since");
    // Wrong ones change nothing.
    refused(&server, &["queue", "set", "q", "--backoff", "31d"], 2, "backoff_ms");
    refused(&server, &["queue", "set", "q", "--retention", "2000d"], 2, "retention_ms");
    refused(&server, &["queue", "set", "q", "--backoff-factor", "0.5"], 2, "--backoff-factor");
    refused(&server, &["queue", "set", "q", "--share", "days"], 2, "[possible values: tasks, time]");
    refused(&server, &["queue", "set", "q"], 2, "--max-attempts");
    refused(&server, &["queue", "set", "a/b", "--max-attempts", "3"], 2, "contains '/'");
}

#[test]
fn results_outlive_the_server_for_as_long_as_the_queue_says() {
    let mut server = Server::start(LONG);
    let _worker = server.worker_of("one", &["q", "short", "none", "--slots", "2"], &["cat"]);
    let api = server.api();
    said(&server, &["queue", "set", "none", "--retention", "0"]);
    said(&server, &["queue", "set", "short", "--retention", "1s"]);
    let ended = |queue: &str| {
        let said = server.cli(&["submit", queue, "--wait", "--json", "the payload"]);
        assert_eq!((said.code, said.json()["result"].as_str()), (0, Some("the payload")), "{said:?}");
        said.json()["id"].as_str().unwrap().to_string()
    };
    let (kept, short, none) = (ended("q"), ended("short"), ended("none"));
    let before = json(&server, &["get", &kept]);
    kill_and_restart(&mut server);
    assert_eq!(json(&server, &["get", &kept]), before);
    assert_eq!(before["result"], "the payload");
    assert_eq!(block_on(api.client.payload(&kept)).unwrap().bytes, "the payload");
    assert_eq!(states(&server, &["--queue", "q"]), ["succeeded"]);
    let watched = server.cli(&["watch", &kept]);
    assert!(watched.code == 0 && watched.out.contains("succeeded"), "{watched:?}");
    for command in ["get", "replay", "cancel", "watch"] {
        refused(&server, &[command, &none], 3, &none);
    }
    eventually("it is forgotten", || server.cli(&["get", &short]).code == 3);
    refused(&server, &["replay", &short], 3, "not remembered");
    assert_eq!(states(&server, &[]), ["succeeded"], "the one that is kept");
    let counts = ["q", "short", "none"].map(|queue| api.queue(queue).succeeded);
    assert_eq!(counts, [1, 1, 1], "counts stay");
    // The store has the one that is kept, and what will forget it.
    said(&server, &["submit", "nobody-serves-it", "x"]);
    said(&server, &["submit", "nobody-serves-it", "--delay", "1h", "x"]);
    assert!(server.stop().success());
    let data = server.data.to_str().unwrap();
    let checked = json(&server, &["store", "check", data]);
    let counts = ["tasks", "ended", "rows", "timers"].map(|name| checked[name].as_u64().unwrap());
    assert_eq!((&checked["whole"], counts), (&Value::Bool(true), [3, 1, 1, 2]), "{checked}");
    let shown = said(&server, &["store", "check", data]);
    assert!(shown.ends_with("3 tasks (1 in lanes, 1 ended), 2 timers"), "{shown}");
}

/// How often a key's tasks have been started.
fn starts(server: &Server, ids: &[String]) -> usize {
    let records = crate::checker::records(server);
    records.iter().filter(|record| record.what == "start" && ids.contains(&record.task)).count()
}

/// Two keys, one slot: the tasks of one hold it much longer than those of the other. By tasks they take turns; by
/// time the slow one gets fewer starts, though it says that its tasks are as quick.
#[test]
fn where_time_is_shared_a_key_of_long_tasks_gets_fewer_starts() {
    let mut server = Server::start(LONG);
    let api = server.api();
    assert_eq!(json(&server, &["queue", "set", "q", "--share", "time"])["settings"]["share"], "time");
    let submit = |key: &str, payload: &str| {
        let lines = format!("{{\"text\":\"{payload}\"}}\n").repeat(40);
        let args = ["submit", "q", "--batch", "-", "--json", "--key", key, "--expected", "50ms"];
        let said = server.cli_with(&args, lines.as_bytes());
        let id =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()["id"].as_str().unwrap().to_string();
        said.out.lines().map(id).collect::<Vec<String>>()
    };
    let (slow, quick) = (submit("slow", "sleep 700"), submit("quick", "sleep 1"));
    assert_eq!((slow.len(), quick.len()), (40, 40));
    assert_eq!(json(&server, &["get", &slow[39]])["expected_ms"], 50);
    assert!(said(&server, &["get", &slow[39]]).contains("expected  to take 50 ms"));
    let _worker = server.worker("one", 1);
    eventually("some of both have ended", || api.queue("q").succeeded >= 20);
    // What was learned of them outlives the server.
    kill_and_restart(&mut server);
    eventually("the quick ones have started", || starts(&server, &quick) == 40);
    let started = starts(&server, &slow);
    assert!((1..=30).contains(&started), "{started} slow ones have started, and 40 quick ones");
    let share = said(&server, &["explain", &slow[39]]);
    assert!(share.contains("of the time of its queue's runs of the last minute"), "{share}");
    refused(&server, &["submit", "q", "--expected", "12d", "x"], 2, "expected_ms");
    refused(&server, &["submit", "q", "--expected", "long", "x"], 2, "is no duration");
    // By tasks again: what waits has its turn all the same.
    assert_eq!(json(&server, &["queue", "set", "q", "--share", "tasks"])["settings"]["share"], "tasks");
    said(&server, &["cancel", "--queue", "q", "--state", "queued", "--yes"]);
    let last = server.cli(&["submit", "q", "--key", "slow", "--wait", "sleep 1"]);
    assert_eq!(last.code, 0, "{last:?}");
    ran_once_at_a_time(&server);
}

/// Delays, retries and restarts at once: everything succeeds, and never twice at a time.
#[test]
fn whatever_happens_between_tries_every_task_comes_to_its_end() {
    let mut server = Server::start(LONG);
    let _workers = [server.worker("one", 4), server.worker("two", 4)];
    let api = server.api();
    let lines: String = (0..200)
        .map(|n| {
            let payload = if n % 3 == 0 { "exit-first 75" } else { "sleep 1" };
            format!("{{\"text\":\"{payload}\",\"key\":\"k{}\",\"delay_ms\":{}}}\n", n % 7, n * 10)
        })
        .collect();
    let said: Said = server.cli_with(&["submit", "q", "--batch", "-", "--json"], lines.as_bytes());
    let id = |line: &str| -> Value { serde_json::from_str(line).unwrap() };
    let ids: Vec<String> =
        said.out.lines().map(|line| id(line)["id"].as_str().unwrap().to_string()).collect();
    assert_eq!(ids.len(), 200, "{said:?}");
    for share in [40, 120] {
        eventually("some have ended", || api.queue("q").succeeded >= share);
        kill_and_restart(&mut server);
    }
    all_is_well(&server, &ids);
}
