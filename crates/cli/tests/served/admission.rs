//! Admission as people use it: classes, limits of keys and rates are set and read on every surface, hold real workers
//! back, cut the time of real runs, and every rule in a task's way is told.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use evenhand::{AfterDowngrade, KeySettings, Limit, NewTask, QueueSettings, Rate, TaskState, wire};
use serde_json::{Value, json};

use crate::interactive::Screen;
use crate::rest::JSON;
use crate::support::{
    Api, LONG, Server, Signpost, WorkerProcess, block_on, checked_task, eventually, eventually_some, wait,
};

/// A command that is to succeed, as JSON.
fn told(server: &Server, args: &[&str]) -> Value {
    let said = server.cli(&[args, &["--json"]].concat());
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.json()
}

/// The same, as people see it.
fn text(server: &Server, args: &[&str]) -> String {
    let said = server.cli(args);
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.out
}

fn put(server: &Server, queue: &str, settings: &Value) -> Value {
    let body = json!({ "settings": settings }).to_string();
    let answer = server.ask("PUT", &format!("/v1/queues/{queue}"), JSON, body);
    assert_eq!(answer.status, 200, "{}", answer.json());
    answer.json()["settings"].clone()
}

fn rest(server: &Server, path: &str) -> Value {
    let answer = server.ask("GET", path, "", "");
    assert_eq!(answer.status, 200, "{path}: {}", answer.json());
    answer.json()
}

/// The kinds of the rules in a task's way, in order.
fn kinds(server: &Server, id: &str) -> Vec<String> {
    let task = rest(server, &format!("/v1/tasks/{id}"));
    let holds = task["holds"].as_array().cloned().unwrap_or_default();
    assert_eq!(task["hold"], holds.first().map_or(Value::Null, |hold| hold["message"].clone()), "{task}");
    holds.iter().map(|hold| hold["kind"].as_str().unwrap().to_string()).collect()
}

fn hold(server: &Server, id: &str, kind: &str) -> Value {
    let task = rest(server, &format!("/v1/tasks/{id}"));
    let holds = task["holds"].as_array().cloned().unwrap_or_default();
    holds.into_iter().find(|hold| hold["kind"] == kind).unwrap_or_else(|| panic!("no {kind} in {task}"))
}

fn worker(server: &Server, seat: &str, slots: &str) -> WorkerProcess {
    let command = [checked_task().into_os_string(), server.dir.path().into()];
    let worker = server.worker_of(seat, &["q", "--slots", slots], &command);
    server.api().await_worker(seat);
    worker
}

fn submit(api: &Api, payload: &str, with: impl FnOnce(NewTask) -> NewTask) -> String {
    let task = with(NewTask::new(payload.as_bytes().to_vec()));
    api.enqueue("q", vec![task]).unwrap().ids.remove(0)
}

fn await_running(api: &Api, id: &str) -> evenhand::Task {
    eventually_some(&format!("{id} runs"), || {
        Some(api.get(id)).filter(|task| task.state() == TaskState::Running)
    })
}

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn what_is_set_on_one_surface_is_read_on_every_other() {
    let server = Server::start(LONG);
    let api = server.api();
    let set = told(
        &server,
        &[
            "queue",
            "set",
            "q",
            "--classes",
            "3s:all,10s:8,30s:25%",
            "--after-downgrade",
            "requeue",
            "--interactive-grace",
            "2s",
            "--key-limit",
            "4",
            "--rate",
            "100/s:burst=200",
            "--key-rate",
            "5cost/s",
        ],
    );
    let classes = json!([
        { "duration_ms": 3000, "limit": "all" },
        { "duration_ms": 10000, "limit": 8 },
        { "duration_ms": 30000, "limit": "25%" }
    ]);
    let there = rest(&server, "/v1/queues/q")["settings"].clone();
    assert_eq!(set["settings"], there);
    assert_eq!(there["classes"], classes);
    assert_eq!(
        (&there["after_downgrade"], &there["interactive_grace_ms"]),
        (&json!("requeue"), &json!(2000))
    );
    assert_eq!(there["key_limit"], 4);
    assert_eq!(there["rate"], json!({ "per_second": 100.0, "burst": 200.0, "unit": "tasks" }));
    assert_eq!(there["key_rate"], json!({ "per_second": 5.0, "burst": 5.0, "unit": "cost" }));
    let wire = block_on(api.client.queue("q", 1)).unwrap().settings.unwrap();
    assert_eq!((wire.after_downgrade(), wire.key_limit), (AfterDowngrade::Requeue, Some(4)));
    let limits: Vec<_> = wire.classes.unwrap().classes.into_iter().filter_map(|class| class.limit).collect();
    use wire::class_limit::Limit::{All, Percent, Slots};
    assert_eq!(limits, [All(true), Slots(8), Percent(25)]);
    let shown = text(&server, &["queue", "get", "q"]);
    assert!(shown.contains("classes   3s:all,10s:8,30s:25%\n"), "{shown}");

    // What is not named stays. A list replaces the one before, and an empty one removes it; so does 0.
    let after = put(&server, "q", &json!({ "classes": [{ "duration_ms": 500, "limit": "all" }] }));
    assert_eq!(after["classes"], json!([{ "duration_ms": 500, "limit": "all" }]));
    assert_eq!(after["key_limit"], 4);
    let none = put(&server, "q", &json!({ "classes": [], "key_limit": 0, "rate": { "per_second": 0 } }));
    assert_eq!(
        (&none["classes"], &none["key_limit"], &none["rate"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!(none["key_rate"]["per_second"], 5.0);
    let settings = QueueSettings::new()
        .classes([(MINUTE, Limit::All), (5 * MINUTE, Limit::Slots(2))])
        .after_downgrade(AfterDowngrade::Fail)
        .interactive_grace(Duration::ZERO)
        .key_limit(Some(7))
        .rate(Some(Rate::per_second(0.5)))
        .key_rate(None);
    block_on(api.client.set_queue("q", settings)).unwrap();
    let shown = text(&server, &["queue", "get", "q"]);
    assert!(shown.contains("classes   1m:all,5m:2\n") && !shown.contains("key rate"), "{shown}");
    text(&server, &["queue", "set", "q", "--classes", "none", "--key-limit", "none", "--rate", "none"]);
    let there = rest(&server, "/v1/queues/q")["settings"].clone();
    assert_eq!(
        (&there["classes"], &there["key_limit"], &there["rate"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
}

#[test]
fn what_is_wrong_names_its_field_on_every_surface() {
    let server = Server::start(LONG);
    let api = server.api();
    let refused = |settings: Value| {
        let body = json!({ "settings": settings }).to_string();
        let (status, kind, field) = server.ask("PUT", "/v1/queues/q", JSON, body).error();
        assert!(status == 400 && kind == "invalid" || status == 413, "{settings}: {status} {kind}");
        field
    };
    let class = |duration_ms: u64, limit: Value| json!({ "duration_ms": duration_ms, "limit": limit });
    let first = class(3000, json!("all"));
    for (classes, field) in [
        (json!([class(3000, json!(8))]), "settings.classes[0].limit"),
        (json!([class(0, json!("all"))]), "settings.classes[0].duration_ms"),
        (json!([first, class(3000, json!(1))]), "settings.classes[1].duration_ms"),
        (json!([first, class(5000, json!(0))]), "settings.classes[1].limit"),
        (json!([first, class(5000, json!("0%"))]), "settings.classes[1].limit"),
        (json!([first, class(5000, json!("most"))]), "settings.classes[1].limit"),
        (json!([first, class(5000, json!("8"))]), "settings.classes[1].limit"),
        (json!([first, class(5000, json!(1.5))]), "settings.classes[1].limit"),
        (json!([first, class(5000, json!(null))]), "settings.classes[1].limit"),
        (json!([first, class(5000, json!(2)), class(6000, json!(3))]), "settings.classes[2].limit"),
        (json!([first, { "duration_ms": 5000 }]), "settings.classes[1]"),
        (json!([first, { "duration_ms": "5s", "limit": 1 }]), "settings.classes[1].duration_ms"),
    ] {
        assert_eq!(refused(json!({ "classes": classes })), field, "{classes}");
    }
    let many: Vec<Value> = (1..=17).map(|n| class(n, json!("all"))).collect();
    assert_eq!(refused(json!({ "classes": many })), "settings.classes");
    for (settings, field) in [
        (json!({ "rate": { "per_second": -1 } }), "settings.rate.per_second"),
        (json!({ "rate": { "per_second": 1, "burst": 0.5 } }), "settings.rate.burst"),
        (json!({ "key_rate": { "per_second": 1.0001 } }), "settings.key_rate.per_second"),
        (json!({ "key_rate": { "per_second": 1, "unit": "beans" } }), "settings.key_rate.unit"),
        (json!({ "key_limit": -1 }), "settings.key_limit"),
        (json!({ "interactive_grace_ms": 60_001 }), "settings.interactive_grace_ms"),
        (json!({ "after_downgrade": "shrug" }), "settings.after_downgrade"),
    ] {
        assert_eq!(refused(settings.clone()), field, "{settings}");
    }
    let key = |body: Value| server.ask("PUT", "/v1/queues/q/keys", JSON, body.to_string()).error().2;
    assert_eq!(key(json!({ "key": "a", "limit": -1 })), "limit");
    assert_eq!(key(json!({ "key": "a", "rate": { "per_second": 1e9 } })), "rate.per_second");
    // Nothing of it was done.
    assert_eq!(server.ask("GET", "/v1/queues/q", "", "").status, 404);

    let wrong = QueueSettings::new().classes([(MINUTE, Limit::Slots(1))]);
    assert_eq!(block_on(api.client.set_queue("q", wrong)).unwrap_err().field, "settings.classes[0].limit");
    let wrong = KeySettings::new().rate(Some(Rate::per_second(1.0).burst(0.1)));
    assert_eq!(block_on(api.client.set_key("q", "a", wrong)).unwrap_err().field, "rate.burst");
    for (args, says) in [
        (["--classes", "3s:8"], "settings.classes[0].limit: is the first: its limit must be `all`"),
        (["--classes", "3s"], "write a duration and its limit: 3s:all,10s:8,30s:25%, or none"),
        (["--rate", "100"], "write 100/s, 30/m, 5cost/s or 100/s:burst=200"),
        (["--key-limit", "0"], "write how many may run at once, 1 or more, or none"),
        (["--after-downgrade", "shrug"], "possible values: fail, requeue"),
        (["--interactive-grace", "5m"], "settings.interactive_grace_ms: 300000 is out of range"),
    ] {
        let said = server.cli(&[&["queue", "set", "q"][..], &args].concat());
        assert!(said.code == 2 && said.err.contains(says), "{args:?}: {said:?}");
    }
}

/// A default run that holds the long class, and a task that needs it. What becomes of the first?
fn downgraded(server: &Server, after: AfterDowngrade) -> (Signpost, String) {
    let api = server.api();
    let settings =
        QueueSettings::new().classes([(2 * MINUTE / 60, Limit::All), (10 * MINUTE, Limit::Slots(1))]);
    block_on(api.client.set_queue("q", settings.after_downgrade(after))).unwrap();
    let go = Signpost::new(server);
    let default = submit(&api, &go.until(), |task| task.max_attempts(1_000));
    let runs = await_running(&api, &default);
    assert_eq!((runs.limit_ms, runs.class_ms, runs.max_duration_ms), (Some(600_000), Some(600_000), None));
    assert!(runs.cut.is_none() && runs.deadline_ms > Some(runs.accepted_ms + 600_000 - 1), "{runs:?}");
    let held = json!([
        { "duration_ms": 2000, "held": 1, "limit": 2 },
        { "duration_ms": 600_000, "held": 1, "limit": 1 }
    ]);
    assert_eq!(rest(server, "/v1/queues/q")["classes"], held);
    assert!(text(server, &["queues"]).contains("2s 1/2  10m 1/1"));

    let mut watch = block_on(api.client.watch(&default)).unwrap();
    let long = submit(&api, &go.until(), |task| task.max_duration(5 * MINUTE));
    assert_eq!(await_running(&api, &long).class_ms, Some(600_000));
    let cut = block_on(async {
        loop {
            let event = watch.next().await.unwrap().unwrap();
            if let Some(wire::task_event::Event::Task(wire::Task { cut: Some(cut), limit_ms, .. })) =
                event.event
            {
                assert_eq!(limit_ms, Some(2_000));
                return cut;
            }
        }
    });
    assert_eq!((cut.from_ms, cut.to_ms, cut.kind.as_str()), (600_000, 2_000, "class_full"));
    assert!(
        cut.reason.starts_with("its time was cut from 600 s to 2 s: a task needed the 600 s class"),
        "{cut:?}"
    );
    (go, default)
}

#[test]
fn a_default_task_that_is_downgraded_fails_and_says_why() {
    let server = Server::start(LONG);
    let api = server.api();
    let _worker = worker(&server, "one", "2");
    let (go, default) = downgraded(&server, AfterDowngrade::Fail);
    let ended = api.end(&default);
    assert_eq!((ended.state(), ended.tries.len()), (TaskState::Failed, 1), "{ended:?}");
    assert_eq!(ended.tries[0].end, "downgraded");
    assert!(ended.error.starts_with("its time was cut from 600 s to 2 s"), "{ended:?}");
    let shown = text(&server, &["get", &default]);
    assert!(shown.contains("downgraded  its time was cut from 600 s to 2 s"), "{shown}");
    assert_eq!(server.metric("evenhand_runs_cut_total{why=\"class_full\"}"), 1.0);
    assert_eq!(server.metric("evenhand_runs_ended_total{end=\"downgraded\"}"), 1.0);
    assert_eq!(server.metric("evenhand_class_held{queue=\"q\",class=\"10m\"}"), 1.0);
    assert_eq!(server.metric("evenhand_class_limit{queue=\"q\",class=\"2s\"}"), 2.0);
    go.raise();
}

#[test]
fn a_default_task_that_is_downgraded_is_tried_again_where_its_queue_says_so() {
    let server = Server::start(LONG);
    let api = server.api();
    let _worker = worker(&server, "one", "2");
    let (go, default) = downgraded(&server, AfterDowngrade::Requeue);
    eventually("it is tried again", || api.get(&default).attempt > 1);
    go.raise();
    let ended = api.end(&default);
    assert_eq!(ended.state(), TaskState::Succeeded, "{ended:?}");
    assert_eq!(ended.tries[0].end, "downgraded", "{ended:?}");
    assert!(ended.tries[0].error.starts_with("its time was cut from 600 s to 2 s"), "{ended:?}");
}

#[test]
fn a_task_is_shortened_while_it_waits_and_while_it_runs() {
    let server = Server::start(LONG);
    let api = server.api();
    let go = Signpost::new(&server);
    let id = submit(&api, &go.until(), |task| task.max_duration(10 * MINUTE).max_attempts(1));
    let path = format!("/v1/tasks/{id}");
    let answer = server.ask("PATCH", &path, JSON, r#"{"max_duration_ms":300000}"#);
    assert_eq!((answer.status, answer.json()), (200, json!({ "max_duration_ms": 300_000 })));
    assert_eq!(rest(&server, &path)["max_duration_ms"], 300_000);
    // Never more, nor nothing, nor anything else.
    for (body, field) in [
        (r#"{"max_duration_ms":300001}"#, "max_duration_ms"),
        (r#"{"max_duration_ms":0}"#, "max_duration_ms"),
        (r#"{"max_duration_ms":null}"#, "max_duration_ms"),
        (r#"{"priority":1}"#, "priority"),
        ("{}", ""),
    ] {
        let (status, kind, wrong) = server.ask("PATCH", &path, JSON, body).error();
        assert_eq!((status, kind.as_str(), wrong.as_str()), (400, "invalid", field), "{body}");
    }
    let _worker = worker(&server, "one", "1");
    let runs = await_running(&api, &id);
    assert_eq!((runs.limit_ms, runs.class_ms, runs.cut), (Some(300_000), None, None));
    assert_eq!(text(&server, &["shorten", &id, "2m"]), format!("task {id} may take 2m\n"));
    let task = rest(&server, &path);
    assert_eq!((&task["max_duration_ms"], &task["limit_ms"]), (&json!(120_000), &json!(120_000)));
    assert_eq!((&task["cut"]["kind"], &task["cut"]["to_ms"]), (&json!("shortened"), &json!(120_000)));
    assert_eq!(task["cut"]["from_ms"], 300_000);
    block_on(api.client.shorten(&id, Duration::from_millis(1))).unwrap();
    let ended = api.end(&id);
    assert_eq!((ended.state(), ended.tries[0].end.as_str()), (TaskState::Failed, "time_up"), "{ended:?}");
    assert!(text(&server, &["get", &id]).contains("time up"));
    assert_eq!(server.metric("evenhand_runs_ended_total{end=\"time_up\"}"), 1.0);
    // It has ended; others never were.
    let said = server.cli(&["shorten", &id, "1ms"]);
    assert!(said.code == 3 && said.err.contains(&format!("task {id} has ended")), "{said:?}");
    let said = server.cli(&["shorten", "0-999", "1ms"]);
    assert!(said.code == 3 && said.err.contains("task 0-999 does not exist"), "{said:?}");
    go.raise();
}

#[test]
fn the_limit_of_a_key_holds_across_workers() {
    let server = Server::start(LONG);
    let api = server.api();
    let _workers = [worker(&server, "one", "2"), worker(&server, "two", "2")];
    assert_eq!(
        text(&server, &["queue", "key", "q", "acme", "--limit", "2", "--weight", "3"]),
        "key acme of queue q has weight 3, limit 2\n"
    );
    let go = Signpost::new(&server);
    let ids: Vec<String> = (0..5).map(|_| submit(&api, &go.until(), |task| task.key("acme"))).collect();
    let others: Vec<String> = (0..2).map(|_| submit(&api, &go.until(), |task| task.key("zeta"))).collect();
    others.iter().chain(&ids[..2]).for_each(|id| drop(await_running(&api, id)));
    assert_eq!(kinds(&server, &ids[2])[0], "key_limit");
    let limit = hold(&server, &ids[2], "key_limit");
    assert_eq!(limit["message"], "key acme is at its limit, 2 of 2");
    assert_eq!((&limit["held"], &limit["limit"]), (&json!(2), &json!(2)));
    let said = text(&server, &["explain", &ids[2]]);
    assert!(
        said.contains("key acme is at its limit, 2 of 2") && said.contains("queue key q acme --limit N"),
        "{said}"
    );
    let keys = rest(&server, "/v1/queues/q")["keys"].as_array().cloned().unwrap();
    let key = |name: &str| keys.iter().find(|key| key["key"] == name).cloned().unwrap();
    let acme = key("acme");
    assert_eq!((&acme["limit"], &acme["held"], &acme["weight"]), (&json!(2), &json!("limit"), &json!(3.0)));
    assert_eq!((&key("zeta")["limit"], &key("zeta")["held"]), (&Value::Null, &Value::Null));
    assert_eq!(server.metric("evenhand_keys_held{queue=\"q\",by=\"limit\"}"), 1.0);
    go.raise();
    ids.iter().for_each(|id| assert_eq!(api.end(id).state(), TaskState::Succeeded));
    text(&server, &["queue", "key", "q", "acme", "--limit", "none"]);
    let said = server.cli(&["queue", "key", "q", "acme"]);
    assert_eq!(said.code, 2, "something must be changed: {said:?}");
}

#[test]
fn a_rate_holds_until_it_is_raised() {
    let server = Server::start(LONG);
    let api = server.api();
    let _worker = worker(&server, "one", "2");
    // Nothing may have started before this owner began, so the first has to wait, too.
    text(&server, &["queue", "set", "q", "--rate", "0.001/s"]);
    let id = submit(&api, "sleep 0", |task| task.key("acme"));
    assert_eq!(kinds(&server, &id), ["queue_rate"]);
    let rate = hold(&server, &id, "queue_rate");
    assert!(rate["wait_ms"].as_u64().unwrap() > 60_000, "{rate}");
    assert_eq!(rate["rate"]["per_second"], 0.001);
    assert!(text(&server, &["explain", &id]).contains("its queue is at its rate, 0.001 a second"));
    text(&server, &["queue", "set", "q", "--rate", "none"]);
    assert_eq!(api.end(&id).state(), TaskState::Succeeded);

    block_on(api.client.set_key("q", "acme", KeySettings::new().rate(Some(Rate::per_second(0.001)))))
        .unwrap();
    let id = submit(&api, "sleep 0", |task| task.key("acme"));
    let other = submit(&api, "sleep 0", |task| task.key("zeta"));
    assert_eq!(api.end(&other).state(), TaskState::Succeeded);
    assert_eq!(kinds(&server, &id), ["key_rate"]);
    assert_eq!(hold(&server, &id, "key_rate")["rate"]["per_second"], 0.001);
    assert_eq!(server.metric("evenhand_keys_held{queue=\"q\",by=\"rate\"}"), 1.0);
    block_on(api.client.set_key("q", "acme", KeySettings::new().rate(None))).unwrap();
    assert_eq!(api.end(&id).state(), TaskState::Succeeded);
}

#[test]
fn every_rule_in_a_tasks_way_is_told_in_order() {
    let server = Server::start(LONG);
    let api = server.api();
    let go = Signpost::new(&server);
    let waits = submit(&api, &go.until(), |task| task.key("acme"));
    text(&server, &["queue", "pause", "q"]);
    text(&server, &["queue", "pause", "q", "--key", "acme"]);
    assert_eq!(kinds(&server, &waits), ["queue_paused", "key_paused", "no_worker"]);
    text(&server, &["queue", "resume", "q"]);
    text(&server, &["queue", "resume", "q", "--key", "acme"]);
    text(&server, &["queue", "set", "q", "--classes", "1m:all,10m:1"]);
    let _worker = worker(&server, "one", "2");
    await_running(&api, &waits);
    let long = |key: &'static str, priority| {
        submit(&api, &go.until(), move |task| task.key(key).priority(priority).max_duration(5 * MINUTE))
    };
    let holds = long("acme", 5);
    await_running(&api, &holds);
    let urgent = long("acme", 1);
    let second = long("zeta", 5);
    let third = long("zeta", 5);
    let full = hold(&server, &urgent, "class_full");
    assert_eq!((&full["class_ms"], &full["held"], &full["limit"]), (&json!(600_000), &json!(1), &json!(1)));
    assert_eq!(full["by"], json!([holds]));
    assert_eq!(full["message"], format!("the 10m class is full: 1 of 1 held by {holds}"));
    assert_eq!(kinds(&server, &urgent), ["class_full", "no_free_slot"]);
    assert_eq!(kinds(&server, &second), ["class_full", "no_free_slot"], "what cannot run is not in its way");
    assert_eq!(kinds(&server, &third), ["class_full", "no_free_slot", "own_key"]);
    let short = submit(&api, "sleep 0", |task| task.key("beta").priority(2).max_duration(MINUTE / 60));
    let later = submit(&api, "sleep 0", |task| task.key("beta").max_duration(MINUTE / 60));
    assert_eq!(kinds(&server, &short), ["no_free_slot"]);
    assert_eq!(kinds(&server, &later), ["no_free_slot", "higher_priority"]);
    assert_eq!(hold(&server, &later, "higher_priority")["priority"], 2);
    let said = told(&server, &["explain", &third]);
    assert_eq!(said["task"]["holds"][0]["kind"], "class_full", "{said}");
    let said = text(&server, &["explain", &third]);
    assert!(
        said.contains("waits for the 10m class is full") && said.contains("1 task of its key goes before it"),
        "{said}"
    );
    // Lists keep to the first.
    let page = rest(&server, "/v1/tasks?state=queued&key=zeta");
    assert_eq!((&page["tasks"][0]["holds"], &page["tasks"][0]["hold"]), (&Value::Null, &full["message"]));
    go.raise();
    for id in [&waits, &holds, &urgent, &second, &third, &short, &later] {
        assert_eq!(api.end(id).state(), TaskState::Succeeded, "{id}");
    }
}

/// One slot, and tasks that may take a minute each: those who ask and those who watch are told when theirs starts.
#[test]
fn a_waiting_task_says_when_it_will_start() {
    let server = Server::start(LONG);
    let api = server.api();
    let signpost = Signpost::new(&server);
    let _worker = worker(&server, "w1", "1");
    let minute = |task: NewTask| task.max_duration(MINUTE);
    let first = submit(&api, &signpost.until(), minute);
    await_running(&api, &first);
    let (second, third) = (submit(&api, "sleep 0", minute), submit(&api, "sleep 0", minute));
    let estimate = |id: &str| rest(&server, &format!("/v1/tasks/{id}"))["estimate"].clone();
    let said = eventually_some("an estimate", || Some(estimate(&third)).filter(|said| !said.is_null()));
    let upper = said["upper_ms"].as_u64().unwrap();
    assert!((1..=120_000).contains(&upper), "{said}");
    assert_eq!((&said["position"], &said["approximate"]), (&json!(2), &json!(false)), "{said}");
    assert_eq!(estimate(&second)["position"], json!(1));
    // The bound comes nearer by itself.
    eventually("the bound to come nearer", || estimate(&third)["upper_ms"].as_u64().unwrap() < upper);
    assert!(text(&server, &["get", &third]).contains("within "), "{}", text(&server, &["get", &third]));
    // Who watches is told, and told again when it moves up.
    let mut watch = block_on(api.client.watch(&third)).unwrap();
    let mut next = |position: u64| {
        loop {
            let event = block_on(watch.next()).unwrap().expect("it waits").event;
            if let Some(wire::task_event::Event::Estimate(said)) = event
                && said.position == position
            {
                return said;
            }
        }
    };
    assert!(next(2).upper_ms.is_some());
    block_on(api.client.cancel(&second)).unwrap();
    assert!(next(1).upper_ms.unwrap() <= 60_000);
    signpost.raise();
    assert_eq!(api.end(&third).state(), TaskState::Succeeded);
    assert_eq!(estimate(&third), Value::Null);
}

#[test]
fn who_watches_a_task_is_told_when_it_starts_while_it_waits_and_no_longer() {
    let server = Server::start(LONG);
    let api = server.api();
    let signpost = Signpost::new(&server);
    let _worker = worker(&server, "w1", "1");
    let minute = |task: NewTask| task.max_duration(MINUTE);
    let first = submit(&api, &signpost.until(), minute);
    await_running(&api, &first);
    let mut running = server.events(&format!("/v1/tasks/{first}/events"), None);
    let begun = running.until("started");
    assert_eq!(begun[0].data["task"]["state"], "running");
    let second = submit(&api, "sleep 0", minute);
    let mut waiting = server.events(&format!("/v1/tasks/{second}/events"), None);
    let said = waiting.until("estimate").pop().unwrap();
    assert_eq!((said.id.as_str(), &said.data["task_id"]), ("", &json!(second)));
    assert_eq!(said.data["estimate"]["position"], 1, "{}", said.data);
    assert!((1..=60_000).contains(&said.data["estimate"]["upper_ms"].as_u64().unwrap()), "{}", said.data);
    // The same on the command line, for people and for pipes.
    let mut screen =
        Screen::of(&server, &["submit", "q", "--wait", "--max-duration", "1m", "sleep 0"], 24, 200);
    screen.shows("1 ahead, starts in about ");
    screen.shows(", within ");
    let mut pipe = Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .args(["watch", &second, "--server", &server.url()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(pipe.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut lines = lines.skip_while(|line| !line.starts_with("  position 1, starts in about "));
    assert!(lines.next().is_some());
    signpost.raise();
    let rest = running.until("finished");
    assert!(rest.iter().all(|said| said.name != "estimate"), "{rest:?}");
    let mut rest = waiting.until("finished").into_iter().skip_while(|said| said.name != "started");
    assert!(rest.next().is_some() && rest.all(|said| said.name != "estimate"));
    let rest: Vec<String> = lines.filter(|line| !line.starts_with("  position ")).collect();
    assert!(
        matches!(&rest[..], [started, finished] if started.contains("running") && finished.contains("succeeded")),
        "{rest:?}"
    );
    assert!(wait(&mut pipe, "watch ends").success());
    assert!(wait(&mut screen.child, "submit ends").success());
}
