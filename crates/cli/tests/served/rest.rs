//! REST as a stranger uses it: over a socket, with whatever bytes. What the OpenAPI document says is held against
//! the server by `scripts/rest-contract`; here is what a document cannot say.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use evenhand_api::errors;
use serde_json::{Value, json};

use crate::support::{LONG, Server, eventually};

pub(crate) const JSON: &str = "content-type: application/json\r\n";

/// An answer of HTTP.
pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn read(stream: TcpStream) -> Answer {
        let mut reader = BufReader::new(stream);
        let head = read_head(&mut reader);
        let mut body = Vec::new();
        // A peer that refused a body may have cut the rest of it off.
        let _ = reader.read_to_end(&mut body);
        Answer { status: head[9..12].parse().unwrap(), head, body }
    }

    pub(crate) fn json(&self) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}{text}", self.head))
    }

    /// What kind of error, and in which field.
    pub(crate) fn error(&self) -> (u16, String, String) {
        let json = self.json();
        let text = |name: &str| json["error"][name].as_str().unwrap_or_default().to_string();
        assert!(!text("message").is_empty());
        (self.status, text("kind"), text("field"))
    }
}

fn read_head(reader: &mut impl BufRead) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).unwrap() > 0, "the answer ended in its head: {head:?}");
    }
    head
}

impl Server {
    pub(crate) fn ask(&self, method: &str, path: &str, head: &str, body: impl AsRef<[u8]>) -> Answer {
        Answer::read(self.send(method, path, head, body.as_ref()))
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "")
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, JSON, body.to_string())
    }

    /// Submits tasks, which must be accepted.
    fn submit(&self, queue: &str, tasks: &Value) -> Vec<String> {
        let answer = self.post(&format!("/v1/queues/{queue}/tasks"), &json!({ "tasks": tasks }));
        assert_eq!(answer.status, 200, "{}", answer.json());
        let id = |task: &Value| task["id"].as_str().unwrap().to_string();
        answer.json()["tasks"].as_array().unwrap().iter().map(id).collect()
    }

    pub(crate) fn events(&self, path: &str, after: Option<&str>) -> Stream {
        let head = after.map_or_else(String::new, |id| format!("last-event-id: {id}\r\n"));
        let mut reader = BufReader::new(self.send("GET", path, &head, b""));
        let head = read_head(&mut reader);
        Stream { status: head[9..12].parse().unwrap(), reader }
    }
}

/// Server-sent events. What frames them in chunks is skipped: no line of an event begins as a chunk's size does.
pub(crate) struct Stream {
    status: u16,
    reader: BufReader<TcpStream>,
}

#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) data: Value,
}

impl Stream {
    /// The next event. None: the stream has ended.
    fn next(&mut self) -> Option<Said> {
        let mut said = Said::default();
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            match line.trim_end().split_once(": ") {
                Some(("event", name)) => said.name = name.into(),
                Some(("id", id)) => said.id = id.into(),
                Some(("data", data)) => said.data = serde_json::from_str(data).unwrap(),
                Some(_) => {}
                None if line == "\n" && !said.name.is_empty() => return Some(said),
                None => {}
            }
        }
    }

    /// Events up to one of this name.
    pub(crate) fn until(&mut self, name: &str) -> Vec<Said> {
        let mut seen = Vec::new();
        while seen.last().is_none_or(|said: &Said| said.name != name) {
            seen.push(self.next().unwrap_or_else(|| panic!("the stream ended before {name}: {seen:?}")));
        }
        seen
    }
}

/// A server whose shard is taken: until then REST says that it is unavailable.
fn ready() -> Server {
    let server = Server::start(LONG);
    eventually("the server is ready", || server.get("/readyz").status == 200);
    server
}

fn names(seen: &[Said]) -> Vec<&str> {
    seen.iter().map(|said| said.name.as_str()).collect()
}

#[test]
fn files_go_in_with_a_task_and_come_out_by_name() {
    let server = Server::start(LONG);
    let files = json!([
        { "name": "page.html", "text": "<p>grüß" },
        { "name": "a b?%", "base64": "AP8=" },
        { "name": "empty" },
    ]);
    let id = server.submit("q", &json!([{ "text": "x", "files": files }])).remove(0);
    let shown = server.get(&format!("/v1/tasks/{id}")).json();
    let sizes = json!([
        { "name": "page.html", "bytes": 9 },
        { "name": "a b?%", "bytes": 2 },
        { "name": "empty", "bytes": 0 },
    ]);
    assert_eq!((&shown["files"], &shown["payload_bytes"]), (&sizes, &json!(1)));
    let file = |name: &str| server.get(&format!("/v1/tasks/{id}/files/{name}"));
    let page = file("page.html");
    assert_eq!((page.status, page.body.as_slice()), (200, "<p>grüß".as_bytes()));
    assert!(page.head.contains("application/octet-stream") && page.head.contains("nosniff"), "{}", page.head);
    assert_eq!(file("a%20b%3F%25").body, [0, 0xff]);
    assert_eq!((file("empty").status, file("empty").body), (200, vec![]));
    assert_eq!(file("none").error().0, 404);
    assert_eq!(file("%ff").error(), (400, "invalid".into(), "path".into()));
    assert_eq!(server.get("/v1/tasks/0-4711/files/a").status, 404);

    let wrong = |files: Value| {
        let tasks = json!({ "tasks": [{}, { "files": files }] });
        server.post("/v1/queues/q/tasks", &tasks).error()
    };
    let refused = |status, kind: &str, field: &str| (status, kind.to_string(), format!("tasks[1].{field}"));
    let invalid = |field| refused(400, "invalid", field);
    assert_eq!(wrong(json!([{ "name": "a" }, { "name": "a/b" }])), invalid("files[1].name"));
    assert_eq!(wrong(json!([{ "name": "a" }, { "name": "a" }])), invalid("files[1].name"));
    assert_eq!(wrong(json!([{ "name": "a", "text": "", "base64": "" }])), invalid("files[0].text"));
    assert_eq!(wrong(json!([{ "name": "a", "base64": "!" }])), invalid("files[0].base64"));
    assert_eq!(wrong(json!([{ "name": "a", "body": "" }])), invalid("files[0].body"));
    assert_eq!(wrong(json!([{ "text": "" }])), invalid("files[0]"));
    let many: Vec<Value> = (0..1_000).map(|n| json!({ "name": n.to_string() })).collect();
    assert_eq!(wrong(json!(many)), refused(413, "too_large", "files"));
    let large = json!([{ "name": "a", "text": "x".repeat(1024 * 1024 + 1) }]);
    assert_eq!(wrong(large), refused(413, "too_large", "files[0]"));
}

#[test]
fn a_task_is_submitted_run_and_looked_at() {
    let server = ready();
    let body = r#"{"tasks":[{"payload": {"b":1,"a":[2.50]}, "key":"acme"}]}"#;
    let submitted = server.ask("POST", "/v1/queues/render/tasks", JSON, body).json();
    let id = submitted["tasks"][0]["id"].as_str().unwrap();
    let path = format!("/v1/tasks/{id}");
    let waiting = server.get(&path).json();
    assert_eq!((&waiting["state"], &waiting["key"]), (&json!("queued"), &json!("acme")));
    assert_eq!((&waiting["ahead"], &waiting["hold"]), (&json!(0), &json!("no worker serves its queue")));
    // As it was sent, byte for byte.
    let payload = server.get(&format!("{path}/payload"));
    assert!(payload.head.contains("content-type: application/json\r\n"), "{}", payload.head);
    assert_eq!(payload.body, br#"{"b":1,"a":[2.50]}"#);
    assert_eq!(server.get(&format!("{path}/result")).error(), (409, "conflict".into(), String::new()));

    let script = r#"echo "$EVENHAND_KEY" >&2; cat"#;
    let _worker = server.worker_of("w1", &["render"], &["sh", "-c", script]);
    eventually("it has ended", || server.get(&path).json()["state"] == "succeeded");
    let ended = server.get(&path).json();
    assert_eq!((&ended["result"], &ended["attempt"]), (&json!(r#"{"b":1,"a":[2.50]}"#), &json!(1)));
    assert_eq!(server.get(&format!("{path}/result")).body, br#"{"b":1,"a":[2.50]}"#);
    assert_eq!(server.get(&format!("{path}/payload")).body, payload.body);
    assert_eq!((&ended["tries"][0]["end"], &ended["tries"][0]["seat"]), (&json!("succeeded"), &json!("w1")));
    // The same for programs on the command line.
    assert_eq!(server.cli(&["get", "--json", id]).json(), ended);
    let queue = server.get("/v1/queues/render").json();
    assert_eq!((&queue["succeeded"], &queue["keys"][0]["key"]), (&json!(1), &json!("acme")));
    assert_eq!(server.get("/v1/queues").json()["queues"][0]["queue"], "render");
    assert_eq!(server.get("/v1/workers").json()["workers"][0]["seat"], "w1");
    assert_eq!(server.get("/v1/status").json()["shards"][0]["open"], true);
}

#[test]
fn payloads_are_json_text_or_bytes() {
    let server = ready();
    let tasks = json!([
        { "payload": null },
        { "text": "h\u{0}\u{1f980}" },
        { "base64": "AP8=", "content_type": "image/png" },
        {},
        { "payload": "text" },
    ]);
    let wanted: [(&[u8], &str); 5] = [
        (b"null", "application/json"),
        ("h\u{0}\u{1f980}".as_bytes(), "application/octet-stream"),
        (&[0, 255], "image/png"),
        (b"", "application/octet-stream"),
        (br#""text""#, "application/json"),
    ];
    for (id, (bytes, kind)) in server.submit("q", &tasks).iter().zip(wanted) {
        let payload = server.get(&format!("/v1/tasks/{id}/payload"));
        assert_eq!(payload.body, bytes, "{id}");
        assert!(payload.head.contains(&format!("content-type: {kind}\r\n")), "{}", payload.head);
    }
    let shouted =
        server.ask("POST", "/v1/queues/q/tasks", "content-type: Application/JSON\r\n", r#"{"tasks":[{}]}"#);
    assert_eq!(shouted.status, 200);
    // A whole body is a payload, whatever it is.
    let head = "content-type: application/json\r\n";
    let raw = server.ask("POST", "/v1/queues/q/tasks/raw?key=%F0%9F%A6%80%2F&weight=2.5", head, "{ not json");
    let id = raw.json()["tasks"][0]["id"].as_str().unwrap().to_string();
    assert_eq!(server.get(&format!("/v1/tasks/{id}/payload")).body, b"{ not json");
    assert_eq!(server.get(&format!("/v1/tasks/{id}")).json()["key"], "\u{1f980}/");
}

#[test]
fn bad_requests_say_which_field_and_change_nothing() {
    let server = ready();
    let tasks = "/v1/queues/q/tasks";
    let invalid = |field: &str| (400, "invalid".to_string(), field.to_string());
    let too_large = |field: &str| (413, "too_large".to_string(), field.to_string());
    let wrong = |body: &str, expected: (u16, String, String)| {
        let answer = server.ask("POST", tasks, JSON, body);
        assert_eq!(answer.error(), expected, "{}", &body[..body.len().min(100)]);
    };
    for body in ["", "{", "[]", "\u{0}", "{}", r#"{"tasks":[{}]} x"#, r#"{"tasks":{}}"#, "null", "\u{feff}{}"]
    {
        assert_eq!(server.ask("POST", tasks, JSON, body).error().1, "invalid", "{body}");
    }
    wrong(r#"{"tasks":[]}"#, invalid("tasks"));
    wrong(r#"{"tasks":[{}],"queue":"other"}"#, invalid("queue"));
    wrong(r#"{"tasks":[{},{"wieght":2}]}"#, invalid("tasks[1].wieght"));
    wrong(r#"{"tasks":[{"weight":"2"}]}"#, invalid("tasks[0].weight"));
    wrong(r#"{"tasks":[{"weight":0}]}"#, invalid("tasks[0].weight"));
    wrong(r#"{"tasks":[{"priority":10}]}"#, invalid("tasks[0].priority"));
    wrong(r#"{"tasks":[{"priority":-1}]}"#, invalid("tasks[0].priority"));
    wrong(r#"{"tasks":[{"max_attempts":1}]}"#, invalid("tasks[0].max_attempts"));
    wrong(r#"{"tasks":[{"retry":{"max_attempts":0}}]}"#, invalid("tasks[0].retry.max_attempts"));
    wrong(r#"{"tasks":[{"retry":{"max_lost":1}}]}"#, invalid("tasks[0].retry.max_lost"));
    wrong(r#"{"tasks":[{"retry":{"factor":0.5}}]}"#, invalid("tasks[0].retry.factor"));
    wrong(r#"{"tasks":[{"delay_ms":1,"run_at_ms":1}]}"#, invalid("tasks[0].delay_ms"));
    wrong(r#"{"tasks":[{"run_at_ms":"tomorrow"}]}"#, invalid("tasks[0].run_at_ms"));
    wrong(r#"{"tasks":[{"unique_ms":1}]}"#, invalid("tasks[0].unique_ms"));
    wrong(r#"{"tasks":[{"max_duration_ms":1.5}]}"#, invalid("tasks[0].max_duration_ms"));
    wrong(r#"{"tasks":[{"expected_ms":0}]}"#, invalid("tasks[0].expected_ms"));
    wrong(r#"{"tasks":[{"expected_ms":"1s"}]}"#, invalid("tasks[0].expected_ms"));
    wrong(r#"{"tasks":[{"key":"a\u0000b"}]}"#, invalid("tasks[0].key"));
    wrong(r#"{"tasks":[{"payload":1,"text":"1"}]}"#, invalid("tasks[0].payload"));
    wrong(r#"{"tasks":[{"base64":"%"}]}"#, invalid("tasks[0].base64"));
    wrong(r#"{"tasks":[{"content_type":"png"}]}"#, invalid("tasks[0].content_type"));
    wrong(&format!(r#"{{"tasks":[{{"key":"{}"}}]}}"#, "k".repeat(300)), too_large("tasks[0].key"));
    wrong(
        &format!(r#"{{"tasks":[{{"text":"{}"}}]}}"#, "x".repeat(10_000_000)),
        too_large("tasks[0].payload"),
    );
    wrong(&format!(r#"{{"tasks":[{{"text":"{}"}}]}}"#, "x".repeat(30_000_000)), too_large("body"));
    wrong(&format!(r#"{{"tasks":{}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000)), invalid("tasks[0]"));
    wrong(&format!(r#"{{"tasks":[{}{{}}]}}"#, "{},".repeat(1_000_000)), too_large("tasks"));
    // Names in paths.
    for (queue, kind) in [
        ("a%2Fb", "invalid"),
        ("%22", "invalid"),
        ("%00", "invalid"),
        ("%F0%9F%A6%80", "invalid"),
        ("%FF", "invalid"),
    ] {
        let answer = server.ask("POST", &format!("/v1/queues/{queue}/tasks"), JSON, r#"{"tasks":[{}]}"#);
        assert_eq!((answer.error().0, answer.error().1.as_str()), (400, kind), "{queue}");
    }
    let long = format!("/v1/queues/{}/tasks", "q".repeat(65));
    assert_eq!(server.ask("POST", &long, JSON, r#"{"tasks":[{}]}"#).error(), too_large("queue"));
    // What is not JSON, and what another site's page in a browser could send.
    for head in ["", "content-type: text/plain\r\n", "content-type: application/x-www-form-urlencoded\r\n"] {
        assert_eq!(server.ask("POST", tasks, head, r#"{"tasks":[{}]}"#).error(), invalid("content-type"));
    }
    let gzip = format!("{JSON}content-encoding: gzip\r\n");
    assert_eq!(server.ask("POST", tasks, &gzip, r#"{"tasks":[{}]}"#).error(), invalid("content-encoding"));
    let raw = "/v1/queues/q/tasks/raw";
    let page = "origin: http://example.com\r\n";
    assert_eq!(server.ask("POST", raw, page, "x").error(), invalid("origin"));
    assert_eq!(server.ask("POST", &format!("{raw}?kee=1"), "", "x").error(), invalid("kee"));
    assert_eq!(server.ask("POST", &format!("{raw}?priority=x"), "", "x").error(), invalid("priority"));
    assert_eq!(
        server.ask("POST", &format!("{raw}?expected_ms=0"), "", "x").error(),
        invalid("tasks[0].expected_ms")
    );
    assert_eq!(server.ask("POST", raw, "", "x".repeat(2_000_000)).error(), too_large("tasks[0].payload"));
    // What is not there.
    assert_eq!(server.get("/v1/tasks/0-99").error().0, 404);
    assert_eq!(server.get("/v1/tasks/7-1").error().0, 404);
    assert_eq!(server.get("/v1/tasks/x").error(), invalid("id"));
    assert_eq!(server.get("/v1/tasks?limit=0").error(), invalid("limit"));
    assert_eq!(server.get("/v1/tasks?state=over").error(), invalid("state"));
    assert_eq!(server.get("/v1/tasks?accepted_from_ms=x").error(), invalid("accepted_from_ms"));
    for what in ["cancel", "replay"] {
        let many = |body: &str| server.ask("POST", &format!("/v1/tasks/{what}"), JSON, body).error();
        assert_eq!(many("{}"), invalid("queue"));
        assert_eq!(many(r#"{"key":"a","limit":0}"#), invalid("limit"));
        assert_eq!(many(r#"{"key":"a","cursor":"0-1"}"#), invalid("cursor"));
        assert_eq!(many(r#"{"key":"a","kee":"b"}"#), invalid("kee"));
        let form = server.ask("POST", &format!("/v1/tasks/{what}"), "", r#"{"key":"a"}"#);
        assert_eq!(form.error(), invalid("content-type"));
    }
    for path in ["/v1/queues/q/pause", "/v1/queues/q/resume", "/v1/tasks/0-1/replay"] {
        assert_eq!(server.ask("POST", path, page, "").error(), invalid("origin"));
    }
    let set = |body: &str| server.ask("PUT", "/v1/queues/q", JSON, body).error();
    assert_eq!(set(r#"{}"#).1, "invalid");
    assert_eq!(set(r#"{"settings":{"retention_ms":-1}}"#), invalid("settings.retention_ms"));
    assert_eq!(set(r#"{"settings":{"share":"days"}}"#), invalid("settings.share"));
    assert_eq!(set(r#"{"settings":{"share":2}}"#), invalid("settings.share"));
    assert_eq!(set(r#"{"settings":{"retry":{"max_lost":256}}}"#), invalid("settings.retry.max_lost"));
    assert_eq!(set(r#"{"settings":{},"version":7}"#), (409, "conflict".into(), "version".into()));
    assert_eq!(server.get("/v1/tasks?cursor=x").error(), invalid("cursor"));
    assert_eq!(server.get("/v1/nothing").error().0, 404);
    assert_eq!(server.get("/").error().0, 404);
    let put = server.ask("PUT", "/v1/tasks", "", "");
    assert!(put.status == 405 && put.head.contains("allow: GET"), "{}", put.head);
    assert_eq!(put.error().1, "invalid");
    // None of it did anything.
    assert_eq!(server.get("/v1/tasks").json(), json!({ "tasks": [] }));
    assert_eq!(server.get("/v1/queues").json(), json!({ "queues": [] }));
}

#[test]
fn a_request_with_the_same_id_is_the_same_request() {
    let server = ready();
    let body = json!({ "tasks": [{}, {}], "request_id": "order 7" });
    let (first, again) = (server.post("/v1/queues/q/tasks", &body), server.post("/v1/queues/q/tasks", &body));
    let ids = |answer: &Answer| {
        let json = answer.json();
        json["tasks"].as_array().unwrap().iter().map(|task| task["id"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&first), ids(&again));
    assert_eq!(
        (&first.json()["tasks"][0]["created"], &again.json()["tasks"][1]["created"]),
        (&json!(true), &json!(false))
    );
    let raw = || server.ask("POST", "/v1/queues/q/tasks/raw?request_id=order%207", "", "x").json();
    assert_eq!(raw()["tasks"][0]["id"], ids(&first)[0]);
}

#[test]
fn pages_are_whole_whatever_happens_between_them() {
    let server = ready();
    let tasks = |keys: &[&str]| Value::from_iter(keys.iter().map(|key| json!({ "key": key })));
    let many: Vec<&str> = (0..700).map(|n| if n % 3 == 0 { "acme" } else { "zeta" }).collect();
    let ids = server.submit("q", &tasks(&many));
    server.submit("other", &tasks(&["acme"; 5]));
    let walk = |filter: &str, between: &dyn Fn()| {
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = server.get(&format!("/v1/tasks?queue=q&limit=97{filter}&cursor={cursor}")).json();
            let tasks = page["tasks"].as_array().unwrap();
            seen.extend(tasks.iter().map(|task| task["id"].as_str().unwrap().to_string()));
            between();
            match page["cursor"].as_str() {
                Some(next) => cursor = next.into(),
                None => return seen,
            }
        }
    };
    let of_acme: Vec<&String> = ids.iter().step_by(3).collect();
    assert_eq!(walk("", &|| {}), ids);
    assert_eq!(walk("&key=acme", &|| {}).iter().collect::<Vec<_>>(), of_acme);
    assert!(walk("&state=running", &|| {}).is_empty());
    // Others come and go: what stays is seen once.
    let (gone, stays) = ids.split_at(50);
    let seen = walk("&state=queued", &|| {
        server.submit("q", &tasks(&["new"]));
        let first =
            server.get("/v1/tasks?queue=q&limit=1").json()["tasks"][0]["id"].as_str().unwrap().to_string();
        if gone.contains(&first) {
            assert_eq!(server.ask("DELETE", &format!("/v1/tasks/{first}"), "", "").status, 200);
        }
    });
    let unique: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(unique.len(), seen.len());
    assert!(stays.iter().all(|id| unique.contains(id)));
}

#[test]
fn events_of_a_task_go_on_where_they_were() {
    let server = ready();
    let ids = server.submit("render", &json!([{}]));
    let path = format!("/v1/tasks/{}/events", ids[0]);
    let mut first = server.events(&path, None);
    let begun = first.next().unwrap();
    assert_eq!((begun.name.as_str(), &begun.data["task"]["state"]), ("queued", &json!("queued")));
    let go = server.path("go");
    let script = format!("echo one >&2; while [ ! -e {} ]; do sleep 0.02; done; echo two >&2", go.display());
    let _worker = server.worker_of("w1", &["render"], &["sh", "-c", &script]);
    let seen = first.until("output");
    assert_eq!(names(&seen), ["started", "output"]);
    assert_eq!(seen[1].data["output"], "one");
    drop(first);
    std::fs::write(&go, "").unwrap();
    eventually("it has ended", || {
        server.get(&format!("/v1/tasks/{}", ids[0])).json()["state"] == "succeeded"
    });
    // It has ended meanwhile: what was missed comes, and then the end.
    let mut again = server.events(&path, Some(&seen[1].id));
    let rest = again.until("finished");
    assert_eq!(names(&rest), ["output", "finished"]);
    assert_eq!(rest[0].data["output"], "two");
    assert!(again.next().is_none());
    // Who has seen the end is told not to come back.
    assert_eq!(server.events(&path, Some(&rest[1].id)).status, 204);
    // From a life of the server that nobody knows: it is said, and how the task stands.
    let mut lost = server.events(&path, Some("00000000-5"));
    assert_eq!(names(&lost.until("finished")), ["missed", "finished"]);
    assert_eq!(server.get("/v1/tasks/0-99/events").error().0, 404);
}

// Scenario 24.
#[test]
fn a_client_that_leaves_holds_nothing_up() {
    let server = ready();
    let ids = server.submit("render", &json!([{}, {}, {}]));
    let mut left = server.events(&format!("/v1/tasks/{}/events", ids[0]), None);
    assert_eq!(left.next().unwrap().name, "queued");
    drop(left);
    // One that waits on the command line, and is killed.
    let mut waits = Command::new(env!("CARGO_BIN_EXE_evenhand"))
        .args(["submit", "render", "--wait", "x", "--server", &server.url()])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(waits.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("is accepted"), "{said}");
    waits.kill().unwrap();
    waits.wait().unwrap();
    let _worker = server.worker_of("w1", &["render", "--slots", "1"], &["true"]);
    eventually("all have ended", || server.get("/v1/queues/render").json()["succeeded"] == 4);
    assert_eq!(server.metric("evenhand_slots_leaked"), 0.0);
}

#[test]
fn a_task_whose_worker_dies_is_seen_to_wait_again() {
    let server = ready();
    let ids = server.submit("render", &json!([{}]));
    let mut events = server.events(&format!("/v1/tasks/{}/events", ids[0]), None);
    let mut worker = server.worker_of("w1", &["render"], &["sleep", "1000"]);
    assert_eq!(names(&events.until("started")), ["queued", "started"]);
    worker.kill();
    let again = events.next().unwrap();
    let task = &again.data["task"];
    assert_eq!((again.name.as_str(), &task["attempt"]), ("scheduled", &json!(2)));
    assert_eq!(task["error"], "its worker was lost");
    let due = events.next().unwrap();
    assert_eq!((due.name.as_str(), &due.data["task"]["state"]), ("queued", &json!("queued")));
    assert!(due.data["at_ms"].as_u64() >= task["due_ms"].as_u64());
}

#[test]
fn events_on_a_filter_go_on_where_they_were() {
    let server = ready();
    let mut all = server.events("/v1/events", None);
    let mut of_acme = server.events("/v1/events?queue=render&key=acme", None);
    let _worker = server.worker_of("w1", &["render", "mail"], &["true"]);
    let ended = |stream: &mut Stream| {
        let seen = stream.until("finished");
        assert_eq!(names(&seen), ["queued", "started", "finished"]);
        let of = &seen[2].data["task"];
        (
            of["queue"].as_str().unwrap().to_string(),
            of["key"].as_str().unwrap().to_string(),
            seen[2].id.clone(),
        )
    };
    server.submit("render", &json!([{ "key": "zeta" }]));
    assert_eq!(ended(&mut all).1, "zeta");
    server.submit("render", &json!([{ "key": "acme" }]));
    let (_, key, last) = ended(&mut of_acme);
    assert_eq!(key, "acme");
    assert_eq!(ended(&mut all).1, "acme");
    drop(of_acme);
    for queue in ["render", "mail"] {
        server.submit(queue, &json!([{ "key": "acme" }]));
        assert_eq!(ended(&mut all).0, queue);
    }
    let mut again = server.events("/v1/events?queue=render&key=acme", Some(&last));
    assert_eq!(ended(&mut again).1, "acme");
    // A task that is canceled while it waits is seen to end too. Said again, it is done all the same.
    let canceled = server.submit("nobody", &json!([{}]));
    for _ in 0..2 {
        assert_eq!(server.ask("DELETE", &format!("/v1/tasks/{}", canceled[0]), "", "").status, 200);
    }
    let seen = all.until("finished");
    assert_eq!(
        (seen[1].data["task"]["state"].as_str(), names(&seen)),
        (Some("canceled"), vec!["queued", "finished"])
    );
}

#[test]
fn the_document_names_every_path_and_every_error() {
    let server = ready();
    let document = server.get("/v1/openapi.json").json();
    let paths = document["paths"].as_object().unwrap();
    for (path, operations) in paths {
        for (method, operation) in operations.as_object().unwrap() {
            let described = operation["responses"].as_object().unwrap();
            for row in errors::TABLE {
                assert!(described.contains_key(&row.http.to_string()), "{method} {path}: {}", row.http);
            }
            assert!(operation["summary"].is_string(), "{method} {path}");
        }
    }
    assert!(paths.contains_key("/v1/queues/{queue}/tasks") && paths.len() >= 11);
    // Everything that is referred to is there.
    let text = document.to_string();
    for reference in text.split("\"#/").skip(1) {
        let pointer = format!("/{}", reference.split('"').next().unwrap());
        assert!(document.pointer(&pointer).is_some(), "{pointer}");
    }
}

#[test]
fn prometheus_finds_nothing_to_complain_of() {
    let server = ready();
    server.submit("render", &json!([{ "key": "a\"\\\u{1f980}" }]));
    let _worker = server.worker_of("w1", &["render"], &["true"]);
    eventually("it has ended", || server.get("/v1/queues/render").json()["succeeded"] == 1);
    let page = server.get("/metrics");
    assert!(page.head.contains("text/plain; version=0.0.4"), "{}", page.head);
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut promtool = promtool.expect("promtool, which `make tools` installs (apt: prometheus)");
    promtool.stdin.take().unwrap().write_all(&page.body).unwrap();
    let said = promtool.wait_with_output().unwrap();
    assert!(
        said.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&said.stderr),
        String::from_utf8_lossy(&page.body)
    );
    let open = server.ask("GET", "/metrics", "accept: application/openmetrics-text\r\n", "");
    assert!(open.head.contains("openmetrics-text") && open.body.ends_with(b"# EOF\n"), "{}", open.head);
}
