//! What a worker's command is promised: its input, its environment, what its output and its exit code mean, and
//! how it is ended.

use std::process::{Command, Stdio};

use evenhand::{NewTask, TaskState};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use crate::checker::{all_is_well, await_start, of, ran_once_at_a_time};
use crate::support::{Api, LONG, SHORT, Server, Signpost, block_on, eventually, lives, task};

fn shell(server: &Server, script: &str) -> crate::support::WorkerProcess {
    server.worker_of("one", &["q", "--slots", "4"], &["sh", "-c", script])
}

#[test]
fn a_command_gets_its_task_and_its_output_is_the_result() {
    let server = Server::start(LONG);
    let script = r#"cat; printf '|%s|%s|%s|%s|%s|%s' "$EVENHAND_TASK_ID" "$EVENHAND_QUEUE" "$EVENHAND_KEY" \
        "$EVENHAND_ATTEMPT" "$EVENHAND_FENCE" "${EVENHAND_DEADLINE_MS-none}""#;
    let _worker = shell(&server, script);
    let said = server.cli(&["submit", "q", "--key", "acme/\"\u{1F600}\"", "--wait", "--json", "pay load"]);
    let json = said.json();
    assert_eq!((said.code, json["state"].as_str()), (0, Some("succeeded")), "{said:?}");
    let result = json["result"].as_str().unwrap();
    let parts: Vec<&str> = result.split('|').collect();
    assert_eq!(parts[..5], ["pay load", json["id"].as_str().unwrap(), "q", "acme/\"\u{1F600}\"", "1"]);
    assert!(parts[5].contains('-'), "a fence: {result}");
    assert_eq!(parts[6], "none");
    let timed = server.cli(&["submit", "q", "--max-duration", "1h", "--wait", "-"]);
    assert_eq!(timed.code, 0);
    let deadline: u64 = timed.out.rsplit('|').next().unwrap().parse().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    assert!(deadline > now && deadline < now + 3_600_000, "{deadline} at {now}");
}

#[test]
fn every_byte_of_a_payload_arrives_and_a_long_result_is_cut() {
    let server = Server::start(LONG);
    let _worker = shell(&server, "cat");
    let api = server.api();
    let bytes: Vec<u8> = (0..60_000_u32).map(|n| (n * 7 % 256) as u8).collect();
    let payloads = [Vec::new(), vec![0], bytes.clone(), vec![b'x'; 1024 * 1024]];
    for payload in payloads {
        let id = api.enqueue("q", vec![NewTask::new(payload.clone())]).unwrap().ids.remove(0);
        let ended = api.end(&id);
        assert_eq!(ended.state(), TaskState::Succeeded, "{}", ended.error);
        let kept = payload.len().min(64 * 1024);
        assert_eq!(ended.result.as_deref().unwrap(), &payload[..kept], "of {} bytes", payload.len());
    }
    let said = server.cli_with(&["submit", "q", "--wait", "-"], b"from standard input");
    assert_eq!((said.out.as_str(), said.code), ("from standard input", 0), "{said:?}");
}

#[test]
fn lines_on_standard_error_are_seen_by_who_watches() {
    let server = Server::start(LONG);
    let go = Signpost::new(&server);
    let script = format!(
        "{}; echo first >&2; printf 'se\\033cond\\n' >&2; printf unfinished >&2; echo result",
        go.until().replacen("until ", "while [ ! -e ", 1) + " ]; do sleep 0.05; done"
    );
    let _worker = shell(&server, &script);
    let api = server.api();
    let id = api.submit("");
    let mut watching = Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .args(["watch", &id, "--json", "--server", &server.url()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(watching.stdout.take().unwrap()));
    let first: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(first["task"]["id"], *id);
    go.raise();
    let events: Vec<serde_json::Value> =
        lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert!(watching.wait().unwrap().success());
    let output: Vec<&str> = events.iter().filter_map(|event| event["output"].as_str()).collect();
    assert_eq!(output, ["first", "se\u{1b}cond", "unfinished"], "{events:?}");
    assert_eq!(events.last().unwrap()["task"]["state"], "succeeded");
    assert_eq!(events.last().unwrap()["task"]["result"], "result\n");
    // Later as well.
    assert_eq!(server.cli(&["watch", &id]).code, 0);
    let shown = server.cli(&["get", &id]);
    assert!(shown.out.contains("succeeded") && shown.out.contains("result"), "{shown:?}");
}

fn ends(server: &Server, api: &Api, payload: &str, attempts: u32) -> (TaskState, u32, usize, String) {
    let id = api.enqueue("q", vec![task(payload).max_attempts(attempts)]).unwrap().ids.remove(0);
    let ended = api.end(&id);
    (ended.state(), ended.attempt, of(server, "start", &id).len(), ended.error)
}

#[test]
fn exit_codes_say_what_becomes_of_a_task() {
    let server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let none = String::new();
    assert_eq!(ends(&server, &api, "exit 0", 3), (TaskState::Succeeded, 1, 1, none.clone()));
    assert_eq!(ends(&server, &api, "exit-first 75", 3), (TaskState::Succeeded, 2, 2, none));
    let (state, attempt, starts, error) = ends(&server, &api, "exit 75", 3);
    assert_eq!((state, attempt, starts), (TaskState::Failed, 3, 3));
    assert!(error.contains("75"), "{error}");
    let (state, attempt, starts, error) = ends(&server, &api, "exit 100", 3);
    assert_eq!((state, attempt, starts), (TaskState::Failed, 1, 1));
    assert!(error.contains("for good"), "{error}");
    let (state, attempt, starts, error) = ends(&server, &api, "exit 3", 2);
    assert_eq!((state, attempt, starts), (TaskState::Failed, 2, 2));
    assert!(error.contains("exit code 3"), "{error}");
    let failed = server.cli(&["submit", "q", "--wait", "--max-attempts", "1", "exit 7"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    ran_once_at_a_time(&server);
}

#[test]
fn a_command_that_is_not_there_is_named() {
    let server = Server::start(LONG);
    // At once, before a task fails for it.
    let mut never = server.worker_of("none", &["q"], &["/nowhere/at-all"]);
    assert_eq!(never.ended().code(), Some(2));
    assert!(never.said().contains("/nowhere/at-all is not there"), "{}", never.said());
    // Or when it has gone since.
    let command = server.path("at-all");
    std::os::unix::fs::symlink("/bin/true", &command).unwrap();
    let _worker = server.worker_of("one", &["q"], &[&command]);
    let api = server.api();
    eventually("the worker is there", || api.shard().workers == 1);
    std::fs::remove_file(&command).unwrap();
    let id = api.enqueue("q", vec![NewTask::new("").max_attempts(2)]).unwrap().ids.remove(0);
    let ended = api.end(&id);
    assert_eq!((ended.state(), ended.attempt), (TaskState::Failed, 2));
    assert!(
        ended.error.contains("could not be started") && ended.error.contains("at-all"),
        "{}",
        ended.error
    );
}

/// Whether nothing of a task's runs is left.
fn is_free(server: &Server, id: &str) -> bool {
    let lock = std::fs::File::open(server.path("locks").join(id)).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[test]
fn a_task_that_takes_too_long_dies_with_all_it_started() {
    let server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let never = Signpost::new(&server);
    let payload = format!("child daemon {}", never.until());
    // Enough for both runs to begin on a machine that is busy with something else.
    let limit = std::time::Duration::from_millis(3_000);
    let id =
        api.enqueue("q", vec![task(&payload).max_attempts(2).max_duration(limit)]).unwrap().ids.remove(0);
    let ended = api.end(&id);
    assert_eq!((ended.state(), ended.attempt), (TaskState::Failed, 2));
    assert!(ended.error.contains("longer than 3000 ms"), "{}", ended.error);
    assert!(is_free(&server, &id), "something of it is left");
    assert_eq!(of(&server, "start", &id).len(), 2);
    ran_once_at_a_time(&server);
}

#[test]
fn what_a_task_leaves_behind_dies_before_it_counts_as_ended() {
    let server = Server::start(LONG);
    let _worker = server.worker("one", 4);
    let api = server.api();
    let ids = api.submit_all("q", ["child", "daemon", "daemon exit-first 75", "child daemon child daemon"]);
    for id in &ids {
        assert_eq!(api.end(id).state(), TaskState::Succeeded);
        assert!(is_free(&server, id), "something of {id} is left");
    }
    all_is_well(&server, &ids);
}

#[test]
fn a_waiting_task_that_is_canceled_never_runs() {
    let server = Server::start(LONG);
    let api = server.api();
    let ids = api.submit_all("q", ["sleep 1", "sleep 1", "sleep 1"]);
    let said = server.cli(&["cancel", &ids[0]]);
    assert_eq!((said.code, said.out.trim()), (0, format!("task {} is canceled", ids[0]).as_str()));
    let json = server.cli(&["cancel", &ids[1], "--json"]).json();
    assert_eq!(json["stopping"], false);
    assert_eq!(api.state(&ids[0]), TaskState::Canceled);
    let _worker = server.worker("one", 1);
    assert_eq!(api.end(&ids[2]).state(), TaskState::Succeeded);
    assert!(of(&server, "start", &ids[0]).is_empty() && of(&server, "start", &ids[1]).is_empty());
    let queue = api.queue("q");
    assert_eq!((queue.succeeded, queue.canceled, queue.waiting), (1, 2, 0));
    // What has ended stays as it is.
    let again = block_on(api.hasty().client.cancel(&ids[0]));
    assert!(again.is_err() || again == Ok(false), "{again:?}");
    let late = block_on(api.hasty().client.cancel(&ids[2]));
    assert!(late.is_err(), "{late:?}");
    assert_eq!(api.state(&ids[2]), TaskState::Succeeded);
}

#[test]
fn a_running_task_that_is_canceled_is_stopped_with_all_it_started() {
    let server = Server::start(LONG);
    let _worker = server.worker("one", 2);
    let api = server.api();
    let never = Signpost::new(&server);
    let id = api.submit(&format!("child daemon {}", never.until()));
    await_start(&server, &id);
    let said = server.cli(&["cancel", &id]);
    assert!(said.code == 0 && said.out.contains("told to stop"), "{said:?}");
    assert_eq!(api.end(&id).state(), TaskState::Canceled);
    assert!(is_free(&server, &id));
    assert_eq!(of(&server, "start", &id).len(), 1);
    ran_once_at_a_time(&server);
}

#[test]
fn a_command_that_will_not_stop_is_killed_after_its_grace() {
    let server = Server::start(LONG);
    let _worker = shell(&server, "trap '' TERM; echo here >&2; while :; do sleep 0.05; done");
    let api = server.api();
    let id = api.submit("");
    eventually("it runs", || api.state(&id) == TaskState::Running);
    assert!(block_on(api.client.cancel(&id)).unwrap());
    assert_eq!(api.end(&id).state(), TaskState::Canceled);
    eventually("its slot is free", || api.queue("q").running == 0);
}

#[test]
fn a_worker_that_drains_ends_what_it_runs_and_takes_nothing_more() {
    let server = Server::start(LONG);
    let mut worker = server.worker("one", 2);
    let api = server.api();
    let go = Signpost::new(&server);
    let running = api.submit(&go.until());
    await_start(&server, &running);
    worker.signal(Signal::TERM);
    eventually("it drains", || api.workers().iter().any(|worker| worker.health == "draining"));
    let fresh = api.submit("sleep 1");
    go.raise();
    assert_eq!(api.end(&running).state(), TaskState::Succeeded);
    assert!(worker.ended().success(), "{}", worker.said());
    eventually("the server knows", || api.workers().is_empty());
    assert_eq!(api.state(&fresh), TaskState::Queued);
    assert!(of(&server, "start", &fresh).is_empty());
    let _next = server.worker("one", 2);
    all_is_well(&server, &[running, fresh]);
}

#[test]
fn a_worker_told_twice_stops_at_once_and_its_task_runs_again() {
    let server = Server::start(LONG);
    let mut worker = server.worker("one", 2);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = api.submit(&format!("child {}", go.until()));
    await_start(&server, &id);
    worker.signal(Signal::TERM);
    eventually("it drains", || worker.said().contains("draining"));
    worker.signal(Signal::TERM);
    assert_eq!(worker.ended().code(), Some(1), "{}", worker.said());
    let first = of(&server, "start", &id)[0].pid;
    eventually("its run is dead", || !lives(first));
    let _next = server.worker("one", 2);
    crate::checker::await_starts(&server, &id, 2);
    go.raise();
    all_is_well(&server, &[id]);
}

/// Three slots, seven tasks: three run, four wait, and one end starts exactly one more.
#[test]
fn no_more_runs_than_slots() {
    let server = Server::start(SHORT);
    let _worker = server.worker("one", 3);
    let api = server.api();
    let signs: Vec<Signpost> = (0..7).map(|_| Signpost::new(&server)).collect();
    let payloads: Vec<String> = signs.iter().map(Signpost::until).collect();
    let ids = api.submit_all("q", payloads.iter().map(String::as_str));
    let count = || (api.queue("q").running, api.queue("q").waiting);
    for (n, sign) in signs.iter().enumerate() {
        let running = (ids.len() - n).min(3);
        ids[n..n + running].iter().for_each(|id| await_start(&server, id));
        assert_eq!(count(), (running as u64, (ids.len() - n - running) as u64));
        let started = crate::checker::records(&server).iter().filter(|record| record.what == "start").count();
        assert_eq!(started, n + running);
        sign.raise();
        api.end(&ids[n]);
    }
    all_is_well(&server, &ids);
}

/// Also in the moment in which it ends.
#[test]
fn a_task_is_known_at_every_moment() {
    let server = Server::start(LONG);
    let _worker = server.worker("one", 4);
    let api = server.api();
    let ids = api.submit_all("q", vec!["sleep 1"; 60]);
    for id in &ids {
        loop {
            let asked = block_on(api.hasty().client.get(id));
            let known =
                asked.unwrap_or_else(|refusal| panic!("a task that was accepted is not known: {refusal}"));
            if crate::support::is_over(&known) {
                break;
            }
        }
    }
    all_is_well(&server, &ids);
}

#[test]
fn whoever_waits_for_a_task_gets_its_end_however_soon_it_comes() {
    let server = Server::start(LONG);
    let _worker = shell(&server, "cat");
    server.api().await_worker("one");
    for n in 0..60 {
        let said = server.cli(&["submit", "q", "--wait", &format!("{n}")]);
        assert_eq!((said.code, said.out), (0, n.to_string()), "{}", said.err);
    }
}
