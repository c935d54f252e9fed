//! Every bound of the core, each with its reason. Past a bound the caller gets a clear refusal
//! ("try later" or "too large"); nothing grows without limit and nothing accepted is lost.
//!
//! Bounds on what a caller may send are constants. Bounds on what memory may hold are fields of
//! [`Bounds`], because the simulator runs with windows of one row and servers with windows of many.

/// Longest name of a queue or a seat in bytes. They stand in URLs, metrics and tables.
pub const NAME_BYTES: usize = 64;
/// Longest key in bytes: room for a UUID, an e-mail address or a path-like tenant name.
pub const KEY_BYTES: usize = 256;
/// Largest payload in bytes. Larger data belongs in an object store, its address in the payload.
pub const PAYLOAD_BYTES: usize = 1024 * 1024;
/// Most input files of a task: a run's directory is filled with them before it begins.
pub const FILES_PER_TASK: usize = 64;
/// Longest name of an input file in bytes: half of what file systems allow, so that a program may add to it.
pub const FILE_NAME_BYTES: usize = 128;
/// Largest input file in bytes, for the reason of [`PAYLOAD_BYTES`].
pub const FILE_BYTES: usize = PAYLOAD_BYTES;
/// Most bytes of a task's payload and its files together: all of it goes to the worker in one message, and four
/// such tasks fit one enqueue.
pub const INPUT_BYTES: usize = 4 * 1024 * 1024;
/// Longest content type in bytes: room for the longest registered one and its parameters.
pub const CONTENT_TYPE_BYTES: usize = 127;
/// Longest run that may be asked for, in milliseconds: 365 days.
pub const DURATION_MS: u64 = 365 * 24 * 3600 * 1000;
/// How long a request id is remembered, in milliseconds.
pub const REQUEST_MS: u64 = 10 * 60 * 1000;
/// Most request ids that are remembered, at about 100 bytes each: 6,000 requests a second for all of that
/// time. More are refused, not forgotten early.
pub const REQUESTS: usize = 4_000_000;
/// Request ids forgotten in one commit, so that none is huge.
pub const REQUESTS_PER_STEP: usize = 10_000;
/// Between two rounds of forgetting them, in milliseconds.
pub const REQUESTS_AFTER_MS: u64 = 1_000;
/// Most tasks in one enqueue: one call must fit one commit without delaying the others in it.
pub const TASKS_PER_ENQUEUE: usize = 10_000;
/// Most bytes of payloads and files in one enqueue, for the same reason.
pub const PAYLOAD_BYTES_PER_ENQUEUE: usize = 16 * 1024 * 1024;
/// Priorities are 0 (first) to 9.
pub const PRIORITIES: u8 = 10;
/// Most duration classes of a queue: the cycle looks at each of them before each start.
pub const CLASSES: u8 = 16;
/// Highest rate, and largest burst, in thousandths: far more than one shard can start.
pub const RATE: u64 = 1_000_000_000;
/// Longest warning that an interactive run may get before it is halted, in milliseconds: so long a task waits for its
/// slot.
pub const INTERACTIVE_GRACE_MS: u64 = 60_000;
/// How long after a run's time the scheduler has it stopped, if its worker has not, in milliseconds; and again after as
/// long. Workers are exact; this is for those that are not.
pub const OVERDUE_MS: u64 = 5_000;
/// Keys that are looked at in one start, whether anything must be remembered of their limits.
pub(crate) const KEYS_SWEPT: usize = 2;
/// Most queues in one shard: their settings and counts stay in memory for good.
pub const QUEUES: usize = 10_000;
/// Most queues one worker may serve: choosing among them is linear.
pub const QUEUES_PER_WORKER: usize = 64;
/// Numbers of tasks that are left out when the store is found to be an old copy, at least, and up to twice as many: more than
/// it can have given since. There is room for half a million such events.
pub(crate) const SEQS_SKIPPED: u64 = 1 << 28;
/// Most workers of one shard: a pass over all of them must stay within milliseconds.
pub const WORKERS: usize = 10_000;
/// Most slots of one worker.
pub const SLOTS_PER_WORKER: u32 = 10_000;
/// Most attempts a task may ask for.
pub const ATTEMPTS: u16 = 1_000;
/// Attempts of a task that does not say.
pub const DEFAULT_ATTEMPTS: u16 = 5;
/// Longest backoff that may be asked for, in milliseconds: 30 days.
pub const BACKOFF_MS: u64 = 30 * 24 * 3600 * 1000;
/// Farthest that a task may be put off, in milliseconds: 10 years. What is in the past is due at once.
pub const DELAY_MS: u64 = 10 * 365 * 24 * 3600 * 1000;
/// Longest that the end of a task may be remembered, in milliseconds: a year.
pub const RETENTION_MS: u64 = 365 * 24 * 3600 * 1000;
/// How long it is if nobody says, in milliseconds: a day.
pub const DEFAULT_RETENTION_MS: u64 = 24 * 3600 * 1000;
/// Longest window of a unique key, in milliseconds: 30 days; and what it is if nobody says: a day.
pub const UNIQUE_MS: u64 = 30 * 24 * 3600 * 1000;
/// The window of a unique key if nobody says.
pub const DEFAULT_UNIQUE_MS: u64 = 24 * 3600 * 1000;
/// Longest unique key in bytes.
pub const UNIQUE_KEY_BYTES: usize = 256;
/// Shortest time without a watcher after which an attached task is canceled, in milliseconds: a client that
/// has to connect again needs a moment. The longest is a day.
pub const ATTACH_MIN_MS: u64 = 1_000;
/// Its longest, a day.
pub const ATTACH_MS: u64 = 24 * 3600 * 1000;
/// Runs lost with their workers after which a task is not tried again: by then it is likelier that it kills
/// them than that they die by themselves.
pub const DEFAULT_LOST: u8 = 3;
/// Tries that are remembered of a task, the last ones.
pub const TRIES_KEPT: u16 = 20;
/// Longest error text that is kept of a try before the last, in bytes.
pub const TRY_ERROR_BYTES: usize = 1_024;
/// Most keys of a shard that may be paused: they stay in memory.
pub const PAUSED_KEYS: usize = 10_000;
/// Rows of one key that are given places ahead of time where a queue shares time, or as many as run. Fewer follow
/// what runs really took more closely; more than a commit can bring keep a slot from waiting for it.
pub const PLACED_AHEAD: u32 = 8;
/// Most shelves for the others, over all keys: they stay in memory. Tasks of further keys are placed at once.
pub const SHELVES: usize = 100_000;
/// Parked rows that memory should hold, divided among the shelves.
pub const PARKED_IN_MEMORY: usize = 200_000;
/// But at least so many of each: twice what is placed ahead.
pub const SHELF_MIN: usize = 16;
/// And at most so many.
pub const SHELF_MAX: usize = 500;
/// Most reads of shelves that one step asks for: after a restart there may be many to read.
pub const SHELF_READS: usize = 256;
/// Most rows of one lane: the rows of one key are counted in 32 bits, and one key may have them all.
pub const ROWS_PER_LANE: u64 = u32::MAX as u64;
/// Most keys of one queue with a weight, a limit or a rate of their own: they stay in memory for good.
pub const OVERRIDES_PER_QUEUE: usize = 100_000;
/// Keys forgotten in one step: forgetting 100,000 idle keys must not make one huge commit.
pub const FORGET_PER_STEP: usize = 256;
/// Between two such steps, in milliseconds.
pub const FORGET_AFTER_MS: u64 = 100;
/// Most keys that a lane remembers, at about 170 bytes each.
pub const KEYS_PER_LANE: usize = 10_000_000;
/// Most callers that may wait for the store's word on one task.
pub const WAITERS_PER_TASK: usize = 64;
/// How often the time that absent workers are still waited for is saved, in milliseconds: a restart waits
/// at most so much longer.
pub const WAIT_SAVED_MS: u64 = 5_000;
/// An end that is not acknowledged is said again after so many milliseconds, within a session that lives.
pub const SAY_AGAIN_MS: u64 = 10_000;
/// Heartbeats that a worker remembers as unanswered; at one a second more than any threshold is long.
pub const BEATS_IN_FLIGHT: usize = 1_000;
/// Most ends of runs held while the gate is shut; a worker repeats those beyond it. As many as slots.
pub const HELD_ENDS: usize = 1_000_000;
/// Commits that may be in flight at once. The server uses one, and fills the next meanwhile.
pub const COMMITS_IN_FLIGHT: usize = 16;
/// First wait after a failed read, in milliseconds; it doubles up to [`READ_RETRY_MAX_MS`].
pub const READ_RETRY_MS: u64 = 10;
/// Longest wait between tries of a failed read. Long outages must end soon after the store is back.
pub const READ_RETRY_MAX_MS: u64 = 5_000;

/// Bounds on what one shard holds in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Waiting rows held per lane. Reading starts at half of it, so at a million starts per second
    /// 32,768 rows still cover a read of 30 ms; at about 100 bytes a row a full lane costs 6 MiB.
    pub window_rows: usize,
    /// Rows asked for in one read: large enough that the round trip does not count, small enough that
    /// one read does not hold up the store.
    pub page_rows: usize,
    /// Bytes of payloads and files kept beside waiting rows, over all lanes. Beyond it those of a started task are
    /// read from the store.
    pub payload_bytes: usize,
    /// Ends behind a long-running task after which its row is set aside and A moves on. Deleted rows
    /// above A are what a new owner scans; stores want that well below 10,000.
    pub aside_after_ends: u32,
    /// The same by time: a task that has run this long is set aside if anything ended behind it.
    pub aside_after_ms: u64,
    /// Unanswered work (changes in commits that are not durable yet) above which callers are answered
    /// "limited". It bounds the memory a slow store can make us hold.
    pub tasks_in_flight: usize,
    /// Point reads of tasks in flight. More cancels are answered "limited"; more late ends are dropped,
    /// since a worker repeats them.
    pub task_reads: usize,
    /// Timers that one commit handles, and rows that it parks, brings back or lets expire: a million at once must not
    /// make one huge commit. The rest follows when it is sealed, or durable.
    pub moves_per_commit: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            window_rows: 65_536,
            page_rows: 4_096,
            payload_bytes: 64 * 1024 * 1024,
            aside_after_ends: 1_000,
            aside_after_ms: 60_000,
            tasks_in_flight: 100_000,
            task_reads: 10_000,
            moves_per_commit: 2_000,
        }
    }
}
