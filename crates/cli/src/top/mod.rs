//! `evenhand top`: everything at a glance, again and again. On a terminal a screen that is redrawn; for programs, and
//! where there is no terminal, one snapshot per interval.
//!
//! One task asks the server, one thread reads the keys; `screen` is a function of what is known to lines of text.

mod screen;

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args as ClapArgs;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::{cursor, execute, queue, style, terminal};
use evenhand::{Client, Kind, Refusal};
use evenhand_api::rest::{Queue, QueueDetail, Status, Worker};
use serde::Serialize;
use tokio::sync::{mpsc, watch};

use crate::client::LookArgs;
use crate::terminal::{Stream, print, print_json, say, written};
use crate::{Done, Failure, parse, serve};

/// Rates are taken over so many snapshots: one alone jumps.
const SNAPSHOTS: usize = 6;
/// How many keys of a queue are asked for.
const KEYS: u32 = 200;
/// How long an answer may take before the server counts as away.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// What to look at, and how often.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Keys: q quits, the arrows or tab choose the queue whose keys are shown, s sorts the keys, p pauses.

Examples:
  evenhand top
  evenhand top --queue render --interval 5s
  evenhand top --json --count 1 | jq .rates")]
pub(crate) struct Args {
    /// The queue whose keys are shown first; the busiest, if nobody says
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// How often to look
    #[arg(long, default_value = "1s", value_parser = parse::duration, value_name = "TIME")]
    interval: Duration,
    /// End after so many looks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    #[command(flatten)]
    look: LookArgs,
}

/// How everything stands at one moment.
#[derive(Debug, Serialize)]
struct Snapshot {
    /// Milliseconds since 1970.
    at_ms: u64,
    status: Status,
    rates: Option<Rates>,
    queues: Vec<Queue>,
    /// The chosen queue with its keys.
    queue: Option<QueueDetail>,
    workers: Vec<Worker>,
}

/// Tasks per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Rates {
    accepted: f64,
    /// What ended or began to run; a run that is tried again counts when it is over.
    started: f64,
    finished: f64,
}

/// What rates are taken from.
#[derive(Clone, Copy, Debug)]
struct Totals {
    at: Instant,
    accepted: u64,
    started: u64,
    finished: u64,
}

impl Totals {
    fn of(queues: &[Queue], at: Instant) -> Totals {
        let sum = |of: fn(&Queue) -> u64| queues.iter().map(of).sum();
        Totals {
            at,
            accepted: sum(|queue| queue.accepted),
            started: sum(|queue| queue.succeeded + queue.failed + queue.running),
            finished: sum(|queue| queue.succeeded + queue.failed + queue.canceled + queue.expired),
        }
    }
}

/// Asks the server.
struct Looker {
    client: Client,
    totals: VecDeque<Totals>,
}

impl Looker {
    fn new(client: &Client) -> Looker {
        Looker { client: client.clone().patience(Duration::ZERO), totals: VecDeque::new() }
    }

    async fn look(&mut self, chosen: Option<&str>) -> Result<Snapshot, Refusal> {
        let away = |_| Refusal::new(Kind::Unavailable, "", "the server does not answer");
        tokio::time::timeout(ANSWERS_WITHIN, self.ask(chosen)).await.map_err(away)?
    }

    async fn ask(&mut self, chosen: Option<&str>) -> Result<Snapshot, Refusal> {
        let status = Status::from(self.client.status().await?);
        let queues: Vec<Queue> = self.client.queues().await?.into_iter().map(Queue::from).collect();
        let workers = self.client.workers().await?.into_iter().map(Worker::from).collect();
        let busiest = || queues.iter().rev().max_by_key(|queue| queue.waiting + queue.running);
        let is_there = |name: &&str| queues.iter().any(|queue| queue.queue == *name);
        let name = chosen.filter(is_there).or_else(|| busiest().map(|queue| queue.queue.as_str()));
        let queue = match name {
            Some(name) => Some(QueueDetail::from(self.client.queue(name, KEYS).await?)),
            None => None,
        };
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let rates = self.rates(Totals::of(&queues, Instant::now()));
        Ok(Snapshot { at_ms, status, rates, queues, queue, workers })
    }

    fn rates(&mut self, now: Totals) -> Option<Rates> {
        // Another store counts from its own beginning.
        if self.totals.back().is_some_and(|last| last.accepted > now.accepted) {
            self.totals.clear();
        }
        let first = self.totals.front().copied();
        self.totals.push_back(now);
        if self.totals.len() > SNAPSHOTS {
            self.totals.pop_front();
        }
        let first = first?;
        let seconds = now.at.duration_since(first.at).as_secs_f64().max(1e-3);
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        Some(Rates {
            accepted: rate(now.accepted, first.accepted),
            started: rate(now.started, first.started),
            finished: rate(now.finished, first.finished),
        })
    }
}

pub(crate) async fn run(args: Args) -> Done {
    let live = Stream::Out.is_live() && std::io::stdin().is_terminal();
    // So many looks are for looking at later: they stay on the terminal.
    match live && !args.look.json && args.count.is_none() {
        true => screens(args).await,
        false => snapshots(args).await,
    }
}

/// One snapshot per interval.
async fn snapshots(args: Args) -> Done {
    let mut looker = Looker::new(&args.look.server.client()?);
    let mut tick = tokio::time::interval(args.interval);
    let mut view = View::new(&args);
    let mut done = 0;
    while args.count.is_none_or(|count| done < count) {
        tick.tick().await;
        match looker.look(args.queue.as_deref()).await {
            Ok(snapshot) if args.look.json => print_json(&snapshot)?,
            Ok(snapshot) => {
                view.snapshot = Some(snapshot);
                let room = Stream::Out.width().map(|columns| (columns, usize::MAX));
                let lines = screen::lines(&view, room, Stream::Out.paint());
                print(lines.join("\n") + "\n\n")?;
            }
            Err(refusal) if done == 0 => return Err(refusal.into()),
            // It may come back.
            Err(refusal) => say(format!("evenhand: {}", refusal.message))?,
        }
        done += 1;
    }
    Ok(ExitCode::SUCCESS)
}

/// What a screen shows.
#[derive(Debug)]
struct View {
    server: String,
    snapshot: Option<Snapshot>,
    /// Why the last look failed.
    trouble: Option<String>,
    chosen: Option<String>,
    sort: Sort,
    paused: bool,
    keys_work: bool,
}

/// What keys are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Received,
    Due,
    Waiting,
    Name,
}

impl View {
    fn new(args: &Args) -> View {
        View {
            server: args.look.server.server().into(),
            snapshot: None,
            trouble: None,
            chosen: args.queue.clone(),
            sort: Sort::Received,
            paused: false,
            keys_work: false,
        }
    }

    /// The queue whose keys are shown.
    fn chosen(&self) -> Option<&str> {
        let shown = self.snapshot.as_ref().and_then(|snapshot| snapshot.queue.as_ref());
        self.chosen.as_deref().or_else(|| shown.map(|detail| detail.queue.queue.as_str()))
    }

    /// Another queue, so many places on.
    fn choose(&mut self, places: isize) {
        let Some(snapshot) = &self.snapshot else { return };
        let names: Vec<&str> = snapshot.queues.iter().map(|queue| queue.queue.as_str()).collect();
        let at = names.iter().position(|name| Some(*name) == self.chosen()).unwrap_or(0) as isize;
        if !names.is_empty() {
            self.chosen = Some(names[(at + places).rem_euclid(names.len() as isize) as usize].into());
        }
    }

    fn sort_next(&mut self) {
        self.sort = match self.sort {
            Sort::Received => Sort::Due,
            Sort::Due => Sort::Waiting,
            Sort::Waiting => Sort::Name,
            Sort::Name => Sort::Received,
        };
    }

    /// False: it is to end.
    fn on_key(&mut self, key: KeyEvent) -> bool {
        match (key.code, key.modifiers.contains(KeyModifiers::CONTROL)) {
            (KeyCode::Char('c' | 'd'), true) | (KeyCode::Char('q') | KeyCode::Esc, false) => return false,
            (KeyCode::Down | KeyCode::Right | KeyCode::Tab, _) => self.choose(1),
            (KeyCode::Up | KeyCode::Left | KeyCode::BackTab, _) => self.choose(-1),
            (KeyCode::Char('s'), false) => self.sort_next(),
            (KeyCode::Char('p' | ' '), false) => self.paused = !self.paused,
            _ => {}
        }
        true
    }
}

/// A screen that is redrawn.
async fn screens(args: Args) -> Done {
    let client = args.look.server.client()?;
    let mut signals = serve::Signals::new()?;
    let mut view = View { keys_work: true, ..View::new(&args) };
    let (choose, chosen) = watch::channel(view.chosen.clone());
    let (looks, mut looked) = mpsc::channel(1);
    tokio::spawn(look_on(Looker::new(&client), args.interval, chosen, looks));
    let screen = Screen::enter().map_err(Failure::new)?;
    let mut typed = typed();
    loop {
        screen.draw(&view)?;
        tokio::select! {
            event = typed.recv() => match event {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if !view.on_key(key) {
                        break;
                    }
                    // A change is looked at once; what is the same is not.
                    choose.send_if_modified(|chosen| {
                        let changed = *chosen != view.chosen;
                        chosen.clone_from(&view.chosen);
                        changed
                    });
                }
                // Whatever it is, a resize above all, it is drawn anew.
                Some(_) => {}
                // The terminal has gone.
                None => break,
            },
            look = looked.recv() => {
                let Some(look) = look else { return Err(Failure::new("the server is not looked at any more")) };
                if view.paused {
                    continue;
                }
                match look {
                    Ok(snapshot) => (view.snapshot, view.trouble) = (Some(snapshot), None),
                    Err(refusal) => view.trouble = Some(refusal.message),
                }
            },
            _ = signals.told_to_stop() => break,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Looks every interval, and at once when another queue is chosen.
async fn look_on(
    mut looker: Looker,
    interval: Duration,
    mut chosen: watch::Receiver<Option<String>>,
    looks: mpsc::Sender<Result<Snapshot, Refusal>>,
) {
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            changed = chosen.changed() => if changed.is_err() { return },
        }
        let name = chosen.borrow_and_update().clone();
        if looks.send(looker.look(name.as_deref()).await).await.is_err() {
            return;
        }
    }
}

/// What is typed, and resizes. The thread ends with the process: nothing can wake it from its read.
fn typed() -> mpsc::Receiver<Event> {
    let (events, typed) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if events.blocking_send(event).is_err() {
                return;
            }
        }
    });
    typed
}

/// The terminal while it is ours. It is given back as it was, also when something panics.
struct Screen;

/// Whether it is: given back twice, the cursor would go back over what a panic says.
static OURS: AtomicBool = AtomicBool::new(false);

impl Screen {
    fn enter() -> std::io::Result<Screen> {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            Screen::leave();
            previous(info);
        }));
        OURS.store(true, Ordering::SeqCst);
        terminal::enable_raw_mode()?;
        let screen = Screen;
        execute!(std::io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    fn leave() {
        if !OURS.swap(false, Ordering::SeqCst) {
            return;
        }
        // There is nobody to tell.
        let _ = execute!(std::io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }

    fn draw(&self, view: &View) -> Result<(), Failure> {
        let (columns, rows) = terminal::size().unwrap_or((80, 24));
        // The last column stays free: clearing behind a full line would clear its last character.
        let room = (usize::from(columns).saturating_sub(1), usize::from(rows));
        let lines = screen::lines(view, Some(room), Stream::Out.paint());
        let mut out = std::io::stdout().lock();
        let mut draw = || {
            queue!(out, terminal::BeginSynchronizedUpdate)?;
            for (row, line) in lines.iter().take(room.1).enumerate() {
                let (line, rest) = (style::Print(line), terminal::Clear(terminal::ClearType::UntilNewLine));
                queue!(out, cursor::MoveTo(0, row as u16), line, rest)?;
            }
            if lines.len() < room.1 {
                let rest = terminal::Clear(terminal::ClearType::FromCursorDown);
                queue!(out, cursor::MoveTo(0, lines.len() as u16), rest)?;
            }
            queue!(out, terminal::EndSynchronizedUpdate)?;
            out.flush()
        };
        written(draw())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        Screen::leave();
    }
}
