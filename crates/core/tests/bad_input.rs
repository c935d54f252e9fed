//! Bad input: each a clear refusal that names the field, and nothing changed.

#![expect(clippy::unwrap_used, reason = "a failed unwrap here is a failed test")]

use std::sync::Arc;

use evenhand_core::backlog::{Average, Cost, Level, VTime, Weight};
use evenhand_core::change::{KeyRecord, LaneRecord, Override, ParkedRecord, QueueRecord, Totals};
use evenhand_core::life::{End, Ending};
use evenhand_core::messages::Answer;
use evenhand_core::names::{
    Class, CommitId, Epoch, Fence, FileName, Key, LaneId, LoadId, Millis, Priority, QueueId, QueueName,
    RequestId, TaskId, WorkerId,
};
use evenhand_core::{Bounds, Effect, File, Input, Metadata, NewTask, Refusal, Shard, bounds, check};
use expect_test::{Expect, expect};

fn said<T: std::fmt::Debug>(result: Result<T, Refusal>) -> String {
    match result {
        Ok(value) => format!("accepted {value:?}"),
        Err(refusal) => refusal.to_string(),
    }
}

fn check_all(lines: Vec<String>, expected: Expect) {
    expected.assert_eq(&(lines.join("\n") + "\n"));
}

#[test]
fn weights_are_refused_not_clamped() {
    let weights = [
        0.0,
        -1.0,
        0.0009,
        0.001,
        0.0015,
        0.1 + 0.2,
        0.3,
        501.0,
        1000.0,
        1000.001,
        1e300,
        f64::INFINITY,
        f64::NAN,
    ];
    check_all(
        weights.into_iter().map(|weight| said(Weight::new(weight))).collect(),
        expect![[r#"
            invalid: weight: 0.0 is out of range; use 0.001 to 1000 with at most three decimals
            invalid: weight: -1.0 is out of range; use 0.001 to 1000 with at most three decimals
            invalid: weight: 0.0009 is out of range; use 0.001 to 1000 with at most three decimals
            accepted Weight(1)
            invalid: weight: 0.0015 has more than three decimals; use 0.001 to 1000 with at most three decimals
            invalid: weight: 0.30000000000000004 has more than three decimals; use 0.001 to 1000 with at most three decimals
            accepted Weight(300)
            accepted Weight(501000)
            accepted Weight(1000000)
            invalid: weight: 1000.001 is out of range; use 0.001 to 1000 with at most three decimals
            invalid: weight: 1e300 is out of range; use 0.001 to 1000 with at most three decimals
            invalid: weight: inf is out of range; use 0.001 to 1000 with at most three decimals
            invalid: weight: NaN is not a number; use 0.001 to 1000 with at most three decimals
        "#]],
    );
}

#[test]
fn costs_are_refused_not_clamped() {
    check_all(
        [0, 1, 1_000_000_000, 1_000_000_001, u32::MAX].map(|cost| said(Cost::new(cost))).to_vec(),
        expect![[r#"
            invalid: cost: 0 is out of range; use 0.001 to 1000000
            accepted Cost(1)
            accepted Cost(1000000000)
            invalid: cost: 1000000.001 is out of range; use 0.001 to 1000000
            invalid: cost: 4294967.295 is out of range; use 0.001 to 1000000
        "#]],
    );
}

#[test]
fn queue_names_fit_a_url() {
    let long = "q".repeat(65);
    let names = ["", "render", "a/b", "a b", "a\"b", "a\0b", "große", "😀", "..", &long];
    check_all(
        names.into_iter().map(|name| said(QueueName::new(name))).collect(),
        expect![[r#"
            invalid: queue: is empty; give a name such as `render`
            accepted QueueName("render")
            invalid: queue: contains '/'; use letters, digits, `.`, `_` and `-`
            invalid: queue: contains ' '; use letters, digits, `.`, `_` and `-`
            invalid: queue: contains '"'; use letters, digits, `.`, `_` and `-`
            invalid: queue: contains '\0'; use letters, digits, `.`, `_` and `-`
            invalid: queue: contains 'ß'; use letters, digits, `.`, `_` and `-`
            invalid: queue: "😀" must begin with a letter or a digit
            invalid: queue: ".." must begin with a letter or a digit
            too_large: queue: has 65 bytes; at most 64 are allowed
        "#]],
    );
}

#[test]
fn keys_are_any_text_without_control_characters() {
    let long = "k".repeat(257);
    let keys = ["", "acme", "a/b", "a \"b\"", "a\0b", "a\nb", "große 😀", &long];
    check_all(
        keys.into_iter().map(|key| said(Key::new(key))).collect(),
        expect![[r#"
        accepted Key("")
        accepted Key("acme")
        accepted Key("a/b")
        accepted Key("a \"b\"")
        invalid: key: contains the control character '\0'; remove it
        invalid: key: contains the control character '\n'; remove it
        accepted Key("große 😀")
        too_large: key: has 257 bytes; at most 256 are allowed
    "#]],
    );
}

#[test]
fn files_have_names_and_no_paths() {
    let (longest, long) = ("n".repeat(128), "n".repeat(129));
    let names = [
        "page.html",
        "-r",
        ".hidden",
        "große 😀",
        "a\\b",
        "...",
        "",
        ".",
        "..",
        "a/b",
        "/etc/passwd",
        "../up",
        "a\0b",
        "a\nb",
        &longest,
        &long,
    ];
    check_all(
        names.into_iter().map(|name| said(FileName::new(name))).collect(),
        expect![[r#"
        accepted FileName("page.html")
        accepted FileName("-r")
        accepted FileName(".hidden")
        accepted FileName("große 😀")
        accepted FileName("a\\b")
        accepted FileName("...")
        invalid: name: is empty; give a name such as `page.html`
        invalid: name: "." is a directory; give the name of a file
        invalid: name: ".." is a directory; give the name of a file
        invalid: name: "a/b" is a path; give a name without `/`
        invalid: name: "/etc/passwd" is a path; give a name without `/`
        invalid: name: "../up" is a path; give a name without `/`
        invalid: name: contains the control character '\0'; remove it
        invalid: name: contains the control character '\n'; remove it
        accepted FileName("nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn")
        too_large: name: has 129 bytes; at most 128 are allowed
    "#]],
    );
}

#[test]
fn files_count_in_what_memory_holds_beside_waiting_rows() {
    let held = |task: NewTask| {
        let mut shard = shard();
        enqueue(&mut shard, vec![task]);
        shard.held().payload_bytes
    };
    let none = held(task());
    assert_eq!(held(NewTask { payload: vec![0; 100].into(), ..task() }), none + 100);
    assert!(held(NewTask { files: files_of(2, &[0; 100]), ..task() }) >= none + 200);
}

fn shard() -> Shard {
    let mut shard = Shard::new(Bounds::default(), Epoch(1), 7, Metadata::default()).unwrap();
    shard.step(Millis(0), Input::Open, &mut Vec::new());
    shard
}

/// So many files with these bytes: f0, f1 and so on.
fn files_of(files: usize, bytes: &[u8]) -> Arc<[File]> {
    let file = |n| File { name: FileName::new(&format!("f{n}")).unwrap(), bytes: bytes.into() };
    (0..files).map(file).collect()
}

fn task() -> NewTask {
    NewTask::new(Key::shared())
}

fn enqueue(shard: &mut Shard, tasks: Vec<NewTask>) -> String {
    let mut effects = Vec::new();
    let queue = QueueName::new("q").unwrap();
    shard.step(Millis(0), Input::Enqueue { request: RequestId(1), queue, tasks, once: None }, &mut effects);
    shard.seal(&mut effects);
    check::invariants(shard).unwrap();
    match &effects[..] {
        [Effect::Answer { answer: Err(refusal), .. }] => refusal.to_string(),
        [Effect::Save { changes, .. }] => format!("{} changes", changes.len()),
        other => format!("{other:?}"),
    }
}

#[test]
fn a_bad_task_refuses_the_whole_call_and_changes_nothing() {
    let mut shard = shard();
    let with = |change: fn(&mut NewTask)| {
        let mut bad = task();
        change(&mut bad);
        vec![task(), bad]
    };
    let large: Arc<[u8]> = vec![0; bounds::PAYLOAD_BYTES].into();
    let filled = |files: usize| NewTask { payload: large.clone(), files: files_of(files, &large), ..task() };
    let calls = vec![
        vec![],
        vec![task(); bounds::TASKS_PER_ENQUEUE + 1],
        with(|task| task.priority = Priority(10)),
        with(|task| task.max_attempts = Some(0)),
        with(|task| task.max_attempts = Some(1_001)),
        with(|task| task.payload = vec![0; 10_000_000].into()),
        vec![NewTask { payload: large.clone(), ..task() }; 17],
        with(|task| task.files = files_of(65, &[])),
        with(|task| task.files = files_of(3, &vec![0; 2_000_000])),
        with(|task| task.files = [files_of(3, b"x"), files_of(1, b"y")].concat().into()),
        vec![task(), filled(4)],
        vec![filled(3), filled(3), filled(3), filled(3), filled(0)],
    ];
    let untouched = format!("{shard:?}");
    let said = calls.into_iter().map(|call| enqueue(&mut shard, call)).collect();
    assert_eq!(format!("{shard:?}"), untouched);
    check_all(
        said,
        expect![[r#"
        invalid: tasks: is empty; give at least one task
        too_large: tasks: has 10001 tasks; send at most 10000 in one call
        invalid: tasks[1].priority: 10 is out of range; use 0 (first) to 9
        invalid: tasks[1].retry.max_attempts: 0 is out of range; use 1 to 1000
        invalid: tasks[1].retry.max_attempts: 1001 is out of range; use 1 to 1000
        too_large: tasks[1].payload: has 10000000 bytes, at most 1048576 are allowed; store it elsewhere and send its address
        too_large: tasks: has 17825792 bytes of payloads and files; send at most 16777216 in one call
        too_large: tasks[1].files: has 65 files; at most 64 are allowed
        too_large: tasks[1].files[0]: has 2000000 bytes, at most 1048576 are allowed; store it elsewhere and send its address
        invalid: tasks[1].files[3].name: "f0" is the name of another file too; give each its own
        too_large: tasks[1].files: have 5242880 bytes together with the payload, at most 4194304 are allowed; store some of them elsewhere and send their addresses
        too_large: tasks: has 17825792 bytes of payloads and files; send at most 16777216 in one call
    "#]],
    );
}

#[test]
fn the_largest_call_is_accepted() {
    let said = enqueue(&mut shard(), vec![task(); bounds::TASKS_PER_ENQUEUE]);
    expect!["10004 changes"].assert_eq(&said);
    let large = vec![0; bounds::FILE_BYTES];
    let filled = NewTask { files: files_of(4, &large), ..task() };
    expect!["8 changes"].assert_eq(&enqueue(&mut shard(), vec![filled; 4]));
    let many = NewTask { files: files_of(bounds::FILES_PER_TASK, b"x"), ..task() };
    expect!["5 changes"].assert_eq(&enqueue(&mut shard(), vec![many]));
}

#[test]
fn without_room_in_the_store_new_tasks_are_refused_until_there_is_some() {
    let mut shard = shard();
    let mut lines = Vec::new();
    for enough in [false, true] {
        shard.step(Millis(0), Input::Room { enough }, &mut Vec::new());
        lines.push(enqueue(&mut shard, vec![task()]));
    }
    check_all(
        lines,
        expect![[r#"
        limited: the store has no room for new tasks; send this again when space has been made
        5 changes
    "#]],
    );
}

#[test]
fn times_in_the_far_past_and_future_are_only_numbers() {
    let mut shard = shard();
    let mut effects = Vec::new();
    for now in [u64::MAX, 0, 1] {
        shard.step(Millis(now), Input::Tick, &mut effects);
        enqueue(&mut shard, vec![task()]);
    }
}

/// What no well-behaved shell would say. None of it may panic or change what is accepted.
#[test]
fn facts_about_unknown_things_are_ignored_or_answered() {
    let mut shard = shard();
    let fence = Fence { epoch: Epoch(9), dispatch: 9, nonce: 9 };
    let (worker, task) = (WorkerId(9), TaskId(9));
    let facts = vec![
        Input::Refused { worker, task, fence },
        Input::Lost { worker },
        Input::LoadFailed { load: LoadId(9) },
        Input::Loaded { load: LoadId(9), rows: Vec::new(), end: true },
        Input::TaskLoaded { load: LoadId(9), task: None },
        Input::Slots { worker, slots: 3, queues: Vec::new() },
        Input::Open,
    ];
    for fact in facts {
        let mut effects = Vec::new();
        shard.step(Millis(1), fact, &mut effects);
        assert_eq!(effects, []);
        check::invariants(&shard).unwrap();
    }
    let mut effects = Vec::new();
    shard.step(Millis(1), Input::Committed { commit: CommitId(7) }, &mut effects);
    assert!(matches!(&effects[..], [Effect::Broken { .. }]), "a commit that was never asked for");
    // The end of a run that nobody knows: the store is asked, and then the worker is told to forget it.
    let mut effects = Vec::new();
    shard.step(
        Millis(1),
        Input::Ended { worker, task, fence, attempt: 1, end: End::Succeeded, ending: Ending::default() },
        &mut effects,
    );
    let [Effect::LoadTask { load, .. }] = effects[..] else { panic!("{effects:?}") };
    let mut effects = Vec::new();
    shard.step(Millis(1), Input::TaskLoaded { load, task: None }, &mut effects);
    assert_eq!(effects, [Effect::Acknowledge { worker, task, fence }]);
    // A wish about a task that does not exist yet: it is not looked for, or it could be taken for one that comes.
    for wish in [Input::Cancel { request: RequestId(2), task }, Input::Replay { request: RequestId(2), task }]
    {
        let mut effects = Vec::new();
        shard.step(Millis(1), wish, &mut effects);
        assert!(matches!(&effects[..], [Effect::Answer { answer: Err(_), .. }]), "{effects:?}");
    }
}

#[test]
fn a_worker_that_offers_nonsense_is_refused() {
    let mut shard = shard();
    let untouched = format!("{shard:?}");
    let queue = |n: usize| (QueueName::new(&format!("q{n}")).unwrap(), Weight::ONE);
    let offers =
        [(u32::MAX, vec![queue(0)]), (1, vec![queue(0), queue(0)]), (1, (0..65).map(queue).collect())];
    let said = offers.map(|(slots, queues)| {
        let mut effects = Vec::new();
        shard.step(Millis(0), Input::Slots { worker: WorkerId(1), slots, queues }, &mut effects);
        let [Effect::RefuseWorker { refusal, .. }] = &effects[..] else { panic!("{effects:?}") };
        refusal.to_string()
    });
    assert_eq!(format!("{shard:?}"), untouched);
    check_all(
        said.to_vec(),
        expect![[r#"
        too_large: slots: 4294967295 are too many; a worker has at most 10000
        invalid: queues: names a queue twice; name each once
        too_large: queues: has 65 queues; a worker serves at most 64
    "#]],
    );
}

/// What a damaged store might return. Each is an error value that says what is wrong.
#[test]
fn metadata_that_contradicts_itself_is_an_error_not_a_panic() {
    let lane = |queue| LaneId { queue: QueueId(queue), priority: Priority(5), class: Class(0) };
    let queue = |id, accepted| {
        let totals = Totals { accepted, ..Totals::default() };
        (
            QueueId(id),
            QueueRecord {
                name: QueueName::new(&format!("q{id}")).unwrap(),
                totals,
                average: Average::default(),
            },
        )
    };
    let record = |rows| KeyRecord {
        finish: VTime::ZERO,
        due: VTime::ZERO,
        rows,
        chained: 0,
        refund: VTime::ZERO,
        credit: VTime::ZERO,
        average: Average::default(),
        weight: Weight::ONE,
    };
    let empty = Metadata::default;
    let high = LaneRecord { max: Level::new(VTime::ZERO.pass(), 9), ..LaneRecord::default() };
    let damaged = [
        Metadata { queues: vec![queue(1, 0)], ..empty() },
        Metadata { queues: vec![queue(0, 0), queue(0, 0)], ..empty() },
        Metadata { lanes: vec![(lane(0), LaneRecord::default())], ..empty() },
        Metadata { queues: vec![queue(0, 0)], lanes: vec![(lane(0), high)], next_seq: 9, ..empty() },
        Metadata { queues: vec![queue(0, 1)], keys: vec![(lane(0), Key::shared(), record(1))], ..empty() },
        Metadata { queues: vec![queue(0, 3)], ..empty() },
        Metadata { overrides: vec![(QueueId(4), Key::shared(), Override::default())], ..empty() },
        Metadata { parked: vec![(lane(0), Key::shared(), ParkedRecord::default())], ..empty() },
        Metadata { paused: vec![(QueueId(4), Key::shared())], ..empty() },
    ];
    let said = damaged.map(|metadata| Shard::new(Bounds::default(), Epoch(1), 7, metadata).unwrap_err());
    check_all(
        said.to_vec(),
        expect![[r#"
            queue 0 is missing, and queue 1 is there
            a queue is there twice
            lane 0/5/0 belongs to no queue, or is there twice
            lane 0/5/0 has rows up to 0.000#9, but the next seq is 9
            key (shared) belongs to no lane (0/5/0), or counts more rows than it has
            queue q0 counts 3 unfinished tasks, its keys count 0
            key (shared) has something of its own in queue 4, which does not exist
            key (shared) is parked beside lane 0/5/0, which does not exist
            key (shared) is paused in queue 4, which does not exist
        "#]],
    );
}

#[test]
fn an_answer_waits_for_its_commit() {
    let mut shard = shard();
    let mut effects = Vec::new();
    let queue = QueueName::new("q").unwrap();
    shard.step(
        Millis(0),
        Input::Enqueue { request: RequestId(1), queue, tasks: vec![task()], once: None },
        &mut effects,
    );
    assert_eq!(effects, []);
    shard.seal(&mut effects);
    let [Effect::Save { commit, .. }] = effects[..] else { panic!("{effects:?}") };
    effects.clear();
    shard.step(Millis(0), Input::Committed { commit }, &mut effects);
    let answer = Ok(Answer::Accepted(vec![(TaskId(1), true)]));
    assert_eq!(effects, [Effect::Answer { request: RequestId(1), answer }]);
}
