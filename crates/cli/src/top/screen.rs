//! The lines of a screen, from what is known.

use evenhand_api::rest::QueueKey;

use crate::show;
use crate::table::{Cell, Table, column, count, number};
use crate::terminal::{Look, Paint, line, width};
use crate::top::{Sort, View};

/// Rows for those that have none to spare: title, head and the empty line before them.
const AROUND: usize = 3;

/// What is seen: as many lines and columns as there is room for, or all of it.
pub(super) fn lines(view: &View, room: Option<(usize, usize)>, paint: Paint) -> Vec<String> {
    let columns = room.map(|(columns, _)| columns);
    let put = |parts: &[(String, Look)]| line(parts, columns.unwrap_or(usize::MAX), paint);
    let mut lines = head(view).iter().map(|parts| put(parts)).collect::<Vec<_>>();
    if let Some(snapshot) = &view.snapshot {
        let chosen = view.chosen();
        let queues = show::queues(&snapshot.queues, chosen.or(Some("")).filter(|_| view.keys_work));
        let keys = snapshot.queue.as_ref().map_or(&[][..], |detail| &detail.keys);
        let keys = keys_table(keys, view.sort, columns);
        let workers = show::workers(&snapshot.workers);
        let feet = usize::from(view.keys_work);
        let left = room.map(|(_, rows)| rows.saturating_sub(lines.len() + feet + 3 * AROUND));
        let rows = divide(left, [queues.rows(), keys.rows(), workers.rows()]);
        // The chosen queue stays in sight.
        let at = snapshot.queues.iter().position(|queue| Some(queue.queue.as_str()) == chosen).unwrap_or(0);
        let from = (at + 1).saturating_sub(rows[0]);
        let name = snapshot.queue.as_ref().map_or("", |detail| detail.queue.queue.as_str());
        let by = match view.sort {
            Sort::Received => "share received",
            Sort::Due => "share due",
            Sort::Waiting => "waiting",
            Sort::Name => "name",
        };
        let keys_of = if name.is_empty() { "keys".into() } else { format!("keys of {name}, by {by}") };
        for (title, table, rows, from, none) in [
            ("queues".into(), queues, rows[0], from, "no queues yet: evenhand submit QUEUE"),
            (keys_of, keys, rows[1], 0, "no keys: nothing waits, and nothing has started for a minute"),
            ("workers".into(), workers, rows[2], 0, "no workers: evenhand worker QUEUE -- COMMAND"),
        ] {
            let all = table.rows();
            let some = if rows < all { format!("{rows} of {all}") } else { count(all as u64) };
            lines.push(String::new());
            lines.push(put(&[(title, Look::Strong), (some, Look::Dim)]));
            if all == 0 {
                lines.push(put(&[(format!("  {none}"), Look::Dim)]));
                continue;
            }
            let mut laid = table.lines(columns, paint).into_iter();
            lines.extend(laid.next());
            lines.extend(laid.skip(from).take(rows));
        }
    }
    if view.keys_work {
        let rows = room.map_or(usize::MAX, |(_, rows)| rows);
        lines.truncate(rows.saturating_sub(1));
        if rows < usize::MAX {
            lines.resize(rows.saturating_sub(1), String::new());
        }
        let pause = if view.paused { ("PAUSED: p goes on", Look::Waits) } else { ("p pause", Look::Dim) };
        let feet =
            [("q quit", Look::Dim), ("arrows, tab: queue", Look::Dim), ("s sort keys", Look::Dim), pause];
        lines.push(put(&feet.map(|(text, look)| (text.to_string(), look))));
    }
    lines
}

/// The server, and totals.
fn head(view: &View) -> Vec<Vec<(String, Look)>> {
    let mut lines = Vec::new();
    if let Some(trouble) = &view.trouble {
        let why = trouble.trim_start_matches("the server cannot be reached: ");
        lines.push(vec![
            ("the server cannot be reached; trying again".into(), Look::Bad),
            (view.server.clone(), Look::Plain),
            (why.into(), Look::Dim),
        ]);
    }
    let Some(snapshot) = &view.snapshot else {
        if lines.is_empty() {
            lines.push(vec![(format!("evenhand  {}", view.server), Look::Strong), ("…".into(), Look::Dim)]);
        }
        return lines;
    };
    let status = &snapshot.status;
    if lines.is_empty() {
        let mut first = vec![
            (format!("evenhand {}", status.version), Look::Strong),
            (view.server.clone(), Look::Plain),
            (format!("up {}", show::age(status.up_ms)), Look::Plain),
        ];
        for shard in &status.shards {
            let look = if shard.open { Look::Good } else { Look::Waits };
            first.push((format!("gate {}", show::gate(shard)), look));
            if !shard.room {
                first.push(("NO ROOM: no new tasks are accepted".into(), Look::Bad));
            }
        }
        lines.push(first);
    }
    let waiting: u64 = status.shards.iter().map(|shard| shard.waiting).sum();
    let running: u64 = status.shards.iter().map(|shard| shard.running).sum();
    let slots: u64 = snapshot.workers.iter().map(|worker| u64::from(worker.slots)).sum();
    let rate = |name: &str, rate: Option<f64>| {
        let rate = match rate {
            Some(rate) if rate < 10.0 => format!("{rate:.1}"),
            Some(rate) => count(rate.round() as u64),
            None => "-".into(),
        };
        (format!("{name} {rate}/s"), Look::Plain)
    };
    let rates = snapshot.rates;
    let scheduled: u64 = snapshot.queues.iter().map(|queue| queue.scheduled).sum();
    let scheduled = if scheduled == 0 { String::new() } else { format!("{} scheduled", count(scheduled)) };
    lines.push(vec![
        (format!("{} waiting", count(waiting)), Look::Waits),
        (format!("{}/{} running", count(running), count(slots)), Look::Active),
        (scheduled, Look::Waits),
        rate("accepted", rates.map(|rates| rates.accepted)),
        rate("started", rates.map(|rates| rates.started)),
        rate("finished", rates.map(|rates| rates.finished)),
    ]);
    lines
}

fn keys_table(keys: &[QueueKey], sort: Sort, columns: Option<usize>) -> Table<'static> {
    // As long as the bar, so that it is never cut.
    let (title, bar) = match columns {
        Some(..60) => ("got/due", 7),
        Some(..100) => ("got/due     ", 12),
        Some(..140) => ("received ┃ due          ", 24),
        Some(_) | None => ("received ┃ due                          ", 40),
    };
    let some_held = keys.iter().any(|key| key.held.is_some());
    let mut columns = vec![
        column("key", 0),
        number("weight", 4),
        number("waiting", 2),
        number("running", 3),
        number("started", 5),
        column(title, 1),
        number("got", 0),
        number("due", 0),
    ];
    if some_held {
        columns.push(column("held", 2));
    }
    let mut table = Table::new(columns);
    let mut keys: Vec<&QueueKey> = keys.iter().collect();
    // Those that are alike stay in their order by name, so that they do not jump.
    keys.sort_by(|a, b| a.key.cmp(&b.key));
    match sort {
        Sort::Received => keys.sort_by(|a, b| b.share.total_cmp(&a.share)),
        Sort::Due => keys.sort_by(|a, b| b.share_due.total_cmp(&a.share_due)),
        Sort::Waiting => keys.sort_by_key(|key| std::cmp::Reverse(key.waiting)),
        Sort::Name => {}
    }
    for key in keys {
        let waits = key.waiting > 0;
        let look = match () {
            () if !waits => Look::Dim,
            () if key.share < key.share_due * 0.8 => Look::Waits,
            () => Look::Good,
        };
        let due = waits.then_some(key.share_due);
        debug_assert_eq!(width(title), bar);
        let mut cells: Vec<Cell> = vec![
            show::key(&key.key).into(),
            show::weight(key.weight).into(),
            count(key.waiting).into(),
            count(key.running).into(),
            count(key.started).into(),
            Cell::new(&show::bar(key.share, due, bar), look),
            show::percent(key.share).into(),
            due.map_or_else(|| "-".into(), show::percent).into(),
        ];
        if some_held {
            cells.push(Cell::new(&show::key_held(key), Look::Waits));
        }
        table.row(cells);
    }
    table
}

/// Divides rows among those who want some, evenly, and gives what one does not want to the others.
fn divide<const N: usize>(left: Option<usize>, wanted: [usize; N]) -> [usize; N] {
    let Some(mut left) = left else { return wanted };
    let mut given = [0; N];
    while left > 0 && given != wanted {
        for (given, wanted) in given.iter_mut().zip(wanted) {
            if *given < wanted && left > 0 {
                *given += 1;
                left -= 1;
            }
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use evenhand::wire;
    use evenhand_api::rest::{Queue, QueueClass, QueueDetail, Status, Worker};
    use expect_test::{Expect, expect};

    use super::*;
    use crate::top::{Rates, Snapshot};

    fn view() -> View {
        let queue = |name: &str, waiting| wire::Queue {
            r#loop: String::new(),
            name: name.into(),
            waiting,
            running: 3,
            accepted: 12_345,
            succeeded: 11_000,
            failed: 2,
            canceled: 1,
            oldest_waiting_ms: Some(340),
            scheduled: if name == "mail" { 40 } else { 0 },
            expired: 5,
            paused: name == "mail",
            ..wire::Queue::default()
        };
        let key = |key: &str, thousandths, waiting, share, share_due| wire::QueueKey {
            key: key.into(),
            weight_thousandths: thousandths,
            waiting,
            running: 1,
            started: 60,
            share,
            share_due,
            ..wire::QueueKey::default()
        };
        let detail = wire::QueueResponse {
            queue: Some(queue("render", 1_200)),
            keys: vec![
                key("acme", 2_000, 900, 0.48, 0.5),
                key("日本語の長い名前のテナント/😀", 1_000, 300, 0.1, 0.25),
                key("", 1_000, 0, 0.42, 0.0),
            ],
            ..wire::QueueResponse::default()
        };
        let served = wire::ServedQueue { queue: "render".into(), weight_thousandths: 3_000 };
        let worker = |seat: &str, health: &str, why: &str| wire::Worker {
            seat: seat.into(),
            process_life: 3,
            health: health.into(),
            slots: 8,
            running: 3,
            queues: vec![served.clone()],
            heard_ms_ago: Some(40),
            lost_in_ms: 53_000,
            why_not: why.into(),
            ..wire::Worker::default()
        };
        let shard =
            wire::Shard { open: true, waiting: 1_207, running: 6, room: true, ..wire::Shard::default() };
        let status = wire::StatusResponse {
            version: "0.1.0".into(),
            up_ms: 200_000,
            shards: vec![shard],
            ..Default::default()
        };
        let queues =
            [queue("render", 1_200), queue("mail", 7), queue("a-queue-with-a-name-that-is-rather-long", 0)];
        let workers = [worker("gpu-1", "healthy", ""), worker("gpu-2", "unhealthy", "it is silent")];
        View {
            server: "http://127.0.0.1:7400".into(),
            snapshot: Some(Snapshot {
                at_ms: 0,
                status: Status::from(status),
                rates: Some(Rates { accepted: 120.4, started: 9.96, finished: 0.0 }),
                queues: queues.map(Queue::from).into(),
                queue: Some(QueueDetail::from(detail)),
                workers: workers.map(Worker::from).into(),
            }),
            trouble: None,
            chosen: Some("mail".into()),
            sort: Sort::Received,
            paused: false,
            keys_work: true,
        }
    }

    fn check(view: &View, room: Option<(usize, usize)>, expected: &Expect) {
        let lines = lines(view, room, Paint::NONE);
        if let Some((columns, rows)) = room {
            assert!(lines.len() <= rows && lines.iter().all(|line| width(line) <= columns), "{lines:#?}");
        }
        expected.assert_eq(&lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    }

    #[test]
    fn it_fits_the_usual_terminal() {
        check(
            &view(),
            Some((79, 24)),
            &expect![[r#"
                evenhand 0.1.0  http://127.0.0.1:7400  up 3 min  gate open
                1,207 waiting  6/16 running  40 scheduled  accepted 120/s  started 10.0/s  fin…

                queues  3
                     queue              waiting  running  scheduled  failed  next waits  paused
                     render               1,200        3          0       2      340 ms
                  ▶  mail                     7        3         40       2      340 ms  paused
                     a-queue-with-a-n…        0        3          0       2      340 ms

                keys of render, by share received  3
                  key                        weight  waiting  running  got/due        got   due
                  acme                            2      900        1  ██████┃·····  48 %  50 %
                  -                               1        0        1  █████·······  42 %     -
                  日本語の長い名前のテナン…       1      300        1  █··┃········  10 %  25 %

                workers  2
                  seat   health     slots  running  queues        heard  why no work
                  gpu-1  healthy        8        3  render=3  40 ms ago
                  gpu-2  unhealthy      8        3  render=3  40 ms ago  it is silent; lost in…




                q quit  arrows, tab: queue  s sort keys  p pause
            "#]],
        );
    }

    #[test]
    fn a_large_terminal_has_room_for_everything() {
        check(
            &view(),
            Some((159, 24)),
            &expect![[r#"
                evenhand 0.1.0  http://127.0.0.1:7400  up 3 min  gate open
                1,207 waiting  6/16 running  40 scheduled  accepted 120/s  started 10.0/s  finished 0.0/s

                queues  3
                     queue                                    waiting  running  scheduled  accepted  succeeded  failed  canceled  expired  next waits  paused
                     render                                     1,200        3          0    12,345     11,000       2         1        5      340 ms
                  ▶  mail                                           7        3         40    12,345     11,000       2         1        5      340 ms  paused
                     a-queue-with-a-name-that-is-rather-long        0        3          0    12,345     11,000       2         1        5      340 ms

                keys of render, by share received  3
                  key                            weight  waiting  running  started  received ┃ due                             got   due
                  acme                                2      900        1       60  ███████████████████·┃···················  48 %  50 %
                  -                                   1        0        1       60  █████████████████·······················  42 %     -
                  日本語の長い名前のテナント/😀       1      300        1       60  ████······┃·····························  10 %  25 %

                workers  2
                  seat   life  health     slots  running  queues        heard  why no work
                  gpu-1     3  healthy        8        3  render=3  40 ms ago
                  gpu-2     3  unhealthy      8        3  render=3  40 ms ago  it is silent; lost in 53 s




                q quit  arrows, tab: queue  s sort keys  p pause
            "#]],
        );
    }

    #[test]
    fn classes_and_keys_that_are_held_are_seen() {
        let mut view = view();
        if let Some(snapshot) = &mut view.snapshot {
            let class = |duration_ms, held, limit| QueueClass { duration_ms, held, limit };
            snapshot.queues[0].classes = vec![class(3_000, 5, 8), class(10_000, 2, 4), class(30_000, 1, 1)];
            if let Some(acme) = snapshot.queue.as_mut().and_then(|detail| detail.keys.first_mut()) {
                (acme.limit, acme.held) = (Some(4), Some("limit".into()));
            }
        }
        let lines = lines(&view, None, Paint::NONE);
        let line = |with: &str| lines.iter().find(|line| line.contains(with)).cloned().unwrap_or_default();
        assert!(line("render  ").ends_with("3s 5/8  10s 2/4  30s 1/1"), "{lines:#?}");
        assert!(line("acme").ends_with("50 %  limit 4"), "{lines:#?}");
    }

    #[test]
    fn a_small_terminal_keeps_what_matters() {
        check(
            &View { paused: true, ..view() },
            Some((39, 14)),
            &expect![[r#"
                evenhand 0.1.0  http://127.0.0.1:7400
                1,207 waiting  6/16 running  40 schedu…

                queues  1 of 3
                     queue     waiting  running  paused
                  ▶  mail            7        3  paused

                keys of render, by share received  1 o…
                  key      waiting  got/due   got   due
                  acme         900  ███·┃··  48 %  50 %

                workers  0 of 2
                  seat   health     slots  running
                q quit  arrows, tab: queue  s sort keys
            "#]],
        );
    }

    #[test]
    fn no_terminal_is_too_small() {
        for (columns, rows) in (0..100).flat_map(|columns| [0, 1, 2, 5, 10, 30].map(|rows| (columns, rows))) {
            let lines = lines(&view(), Some((columns, rows)), Paint::NONE);
            assert!(lines.iter().all(|line| width(line) <= columns), "{columns}x{rows}: {lines:#?}");
        }
    }

    #[test]
    fn a_server_that_is_away_is_told_beside_what_was_last_known() {
        let away =
            View { trouble: Some("the server cannot be reached: Connection refused".into()), ..view() };
        let lines = lines(&away, Some((120, 24)), Paint::NONE);
        expect![[r#"
            the server cannot be reached; trying again  http://127.0.0.1:7400  Connection refused
            1,207 waiting  6/16 running  40 scheduled  accepted 120/s  started 10.0/s  finished 0.0/s"#]]
        .assert_eq(&lines[..2].join("\n"));
        check(
            &View { snapshot: None, keys_work: false, ..away },
            None,
            &expect![[r#"
                the server cannot be reached; trying again  http://127.0.0.1:7400  Connection refused
            "#]],
        );
    }
}
