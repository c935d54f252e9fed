-- Version 1, first half: what is remembered, one table for each kind of thing.
--
-- Numbers that are unsigned where they come from stand in signed columns of the same width, bit by bit: real ones never
-- reach the sign. Times are milliseconds since 1970; the views show them as timestamps. Levels are 16 bytes that sort
-- as they are served. Texts sort by bytes: no collation of the operating system can change under an index.

CREATE TABLE store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    -- Which cluster this is, and on which timeline: a restored or promoted copy has another one. Null: not known yet.
    cluster bigint,
    timeline integer,
    -- It was an old copy once, which may have lacked whole shards.
    was_old boolean NOT NULL DEFAULT false
);
INSERT INTO store DEFAULT VALUES;

CREATE TABLE shards (
    shard integer PRIMARY KEY,
    epoch bigint NOT NULL,
    next_seq bigint NOT NULL DEFAULT 0,
    stopped boolean NOT NULL DEFAULT false,
    -- In milliseconds; -1 if nobody has begun to wait.
    doubt_ms bigint,
    store_id bigint,
    timers_ack bytea NOT NULL DEFAULT '\x00000000000000000000000000000000',
    timers_max bytea NOT NULL DEFAULT '\x00000000000000000000000000000000',
    -- On which timeline it was taken: its owner may not go on on another one.
    timeline integer
) WITH (
    -- Updated by every commit. Half-empty pages let PostgreSQL do that in place, without touching the index, and clean
    -- up behind itself whenever the page is read.
    fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

-- A task and all that became of it, its row included: where it waits is a column with an index of its own. So accepting
-- writes one row and finishing removes one.
CREATE TABLE tasks (
    shard integer NOT NULL,
    queue integer NOT NULL,
    id bigint NOT NULL,
    priority smallint NOT NULL,
    class smallint NOT NULL,
    -- Where it is: 0 in its lane (it waits there, or runs), 1 waits for a time, 2 parked, 3 set aside (runs long), 4 over.
    place smallint NOT NULL,
    lost smallint NOT NULL,
    attempt integer NOT NULL,
    max_attempts integer NOT NULL,
    -- What it was charged, in thousandths.
    cost integer NOT NULL,
    weight integer NOT NULL,
    chained boolean NOT NULL,
    timed boolean NOT NULL,
    canceling boolean NOT NULL DEFAULT false,
    accepted_ms bigint NOT NULL,
    replay_of bigint,
    replayed_as bigint,
    -- How it ended: 0 succeeded, 1 failed, 2 canceled, 3 expired; and its last try, as in tries.
    outcome smallint,
    ended_ms bigint,
    last_attempt integer,
    last_end smallint,
    last_started_ms bigint,
    last_ended_ms bigint,
    last_seat text COLLATE "C",
    -- Its level, where its place has one.
    level bytea,
    key text COLLATE "C" NOT NULL,
    content_type text COLLATE "C" NOT NULL,
    -- What it asked for beyond the ordinary.
    terms bytea,
    last_error text COLLATE "C",
    last_error_raw bytea,
    files bytea,
    payload bytea NOT NULL,
    result bytea,
    -- Whom its end names, if that is not its key.
    end_key text COLLATE "C",
    PRIMARY KEY (shard, id)
) WITH (
    -- Every row is written once, changed seldom and deleted: after a hundredth of the table, or 20,000 rows, there is
    -- something to clean, and the cleaner must be faster than the owner is.
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.1
);
-- Compressing costs more than it saves, and reading a piece of it needs all.
ALTER TABLE tasks ALTER COLUMN payload SET STORAGE EXTERNAL;
ALTER TABLE tasks ALTER COLUMN files SET STORAGE EXTERNAL;
ALTER TABLE tasks ALTER COLUMN result SET STORAGE EXTERNAL;
CREATE INDEX tasks_in_lanes ON tasks (shard, queue, priority, class, level) WHERE place = 0;
CREATE INDEX tasks_timed ON tasks (shard, level) WHERE place = 1;
CREATE INDEX tasks_parked ON tasks (shard, queue, priority, class, key, level) WHERE place = 2;
CREATE INDEX tasks_aside ON tasks (shard, id) WHERE place = 3;
CREATE INDEX tasks_over ON tasks (shard, id) WHERE place = 4;
CREATE INDEX tasks_failed ON tasks (shard, ended_ms) WHERE outcome = 1;
CREATE INDEX tasks_canceling ON tasks (shard, id) WHERE canceling;

-- A try that was followed by another.
CREATE TABLE tries (
    shard integer NOT NULL,
    attempt integer NOT NULL,
    task bigint NOT NULL,
    started_ms bigint NOT NULL,
    ended_ms bigint NOT NULL,
    -- 0 succeeded, 1 failed, 2 failed for good, 3 lost, 4 time up, 5 time up after a downgrade.
    outcome smallint NOT NULL,
    seat text COLLATE "C",
    error text COLLATE "C" NOT NULL,
    -- The same, where it holds what text cannot.
    error_raw bytea,
    PRIMARY KEY (shard, task, attempt)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);

-- Timers beside those that tasks wait for, which are in tasks.
CREATE TABLE timers (
    shard integer NOT NULL,
    -- 1 expire, 2 detach, 3 forget.
    kind smallint NOT NULL,
    task bigint NOT NULL,
    tries integer,
    level bytea NOT NULL,
    PRIMARY KEY (shard, level)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE queues (
    shard integer NOT NULL,
    queue integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    accepted bigint NOT NULL,
    succeeded bigint NOT NULL,
    failed bigint NOT NULL,
    canceled bigint NOT NULL,
    expired bigint NOT NULL,
    scheduled bigint NOT NULL,
    -- Of its runs, in eighths of a millisecond.
    average bigint NOT NULL,
    PRIMARY KEY (shard, queue)
) WITH (
    fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE settings (
    shard integer NOT NULL,
    queue integer NOT NULL,
    version bigint NOT NULL,
    paused boolean NOT NULL,
    record bytea NOT NULL,
    PRIMARY KEY (shard, queue)
);

CREATE TABLE lanes (
    shard integer NOT NULL,
    queue integer NOT NULL,
    priority smallint NOT NULL,
    class smallint NOT NULL,
    ack bytea NOT NULL,
    max bytea NOT NULL,
    vtime bytea NOT NULL,
    turn bytea NOT NULL,
    PRIMARY KEY (shard, queue, priority, class)
) WITH (
    fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE keys (
    shard integer NOT NULL,
    queue integer NOT NULL,
    priority smallint NOT NULL,
    class smallint NOT NULL,
    -- For people: how many rows it has in the lane, and its weight in thousandths. The record has all of it.
    weight integer NOT NULL,
    rows bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    record bytea NOT NULL,
    PRIMARY KEY (shard, queue, priority, class, key)
) WITH (
    fillfactor = 60, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE parked (
    shard integer NOT NULL,
    queue integer NOT NULL,
    priority smallint NOT NULL,
    class smallint NOT NULL,
    rows bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    ack bytea NOT NULL,
    max bytea NOT NULL,
    PRIMARY KEY (shard, queue, priority, class, key)
) WITH (
    fillfactor = 60, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE paused (
    shard integer NOT NULL,
    queue integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    PRIMARY KEY (shard, queue, key)
);

CREATE TABLE overrides (
    shard integer NOT NULL,
    queue integer NOT NULL,
    -- For people, in thousandths, and how many may run at once. The record has all of it.
    weight integer,
    at_once bigint,
    key text COLLATE "C" NOT NULL,
    record bytea NOT NULL,
    PRIMARY KEY (shard, queue, key)
);

CREATE TABLE members (
    shard integer NOT NULL,
    seat text COLLATE "C" NOT NULL,
    wait_ms bigint NOT NULL,
    -- What it ran when the last owner stopped in good order.
    running bigint[] NOT NULL,
    record bytea NOT NULL,
    PRIMARY KEY (shard, seat)
);

CREATE TABLE requests (
    shard integer NOT NULL,
    until_ms bigint NOT NULL,
    key bytea NOT NULL,
    record bytea NOT NULL,
    PRIMARY KEY (shard, key)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);

-- A moment, if it is one that PostgreSQL can show.
CREATE FUNCTION moment(ms bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT CASE WHEN ms BETWEEN 0 AND 200000000000000 THEN to_timestamp(ms / 1000.0) END $$;

-- The moment that a timer's level stands for: 64 bits behind the first two bytes count quarters of 100 ms.
CREATE FUNCTION due(level bytea) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN substr(level, 1, 4) = '\x00000000' THEN
        to_timestamp((('x' || encode(substr(level, 3, 8), 'hex'))::bit(64)::bigint / 4) / 10.0)
    END
$$;

-- Tasks that have not ended. Starting a task writes nothing, so one that is 'queued' may be running.
CREATE VIEW waiting AS
SELECT t.shard, q.name AS queue, t.id, t.key,
    CASE t.place WHEN 0 THEN 'queued' WHEN 1 THEN 'scheduled' WHEN 2 THEN 'parked' END AS state,
    t.priority, t.class, t.attempt, t.max_attempts, moment(t.accepted_ms) AS accepted_at,
    CASE t.place WHEN 1 THEN due(t.level) END AS due_at, t.canceling, t.content_type, t.payload
FROM tasks t LEFT JOIN queues q ON q.shard = t.shard AND q.queue = t.queue
WHERE t.place IN (0, 1, 2);

-- What is known here of running tasks. Workers know what runs; of that the store hears when a run is long enough to be
-- set aside, when somebody wants it stopped, and when the server stops in good order. Ask the server for the rest.
CREATE VIEW running AS
SELECT t.shard, q.name AS queue, t.id, t.key, m.seat,
    CASE WHEN m.seat IS NOT NULL THEN 'when the server stopped' WHEN t.place = 3 THEN 'runs long' ELSE 'to be stopped' END
        AS known,
    t.attempt, t.max_attempts, moment(t.accepted_ms) AS accepted_at, t.canceling
FROM tasks t
LEFT JOIN queues q ON q.shard = t.shard AND q.queue = t.queue
LEFT JOIN (
    SELECT m.shard, m.seat, unnest(m.running) AS task FROM members m JOIN shards s ON s.shard = m.shard AND s.stopped
) m ON m.shard = t.shard AND m.task = t.id
WHERE t.place <> 4 AND (t.place = 3 OR t.canceling OR m.seat IS NOT NULL);

-- Tasks that failed for good and are remembered.
CREATE VIEW failed AS
SELECT t.shard, q.name AS queue, t.id, t.key, moment(t.ended_ms) AS failed_at, t.last_attempt AS attempts,
    t.last_seat AS seat, t.last_error AS error, moment(t.accepted_ms) AS accepted_at, t.replayed_as, t.content_type,
    t.payload
FROM tasks t LEFT JOIN queues q ON q.shard = t.shard AND q.queue = t.queue
WHERE t.outcome = 1;

-- Keys that have something waiting or running, or that their lanes remember. Counted, not obtained by scanning.
CREATE VIEW per_key AS
SELECT k.shard, q.name AS queue, k.key, sum(k.in_lanes)::bigint AS queued_or_running, sum(k.parked)::bigint AS parked,
    coalesce(max(o.weight), max(k.weight)) / 1000.0 AS weight, max(o.at_once) AS at_once, bool_or(p.key IS NOT NULL) AS paused
FROM (
    SELECT shard, queue, key, rows AS in_lanes, 0 AS parked, weight FROM keys
    UNION ALL SELECT shard, queue, key, 0, rows, NULL FROM parked
) k
LEFT JOIN queues q ON q.shard = k.shard AND q.queue = k.queue
LEFT JOIN overrides o ON o.shard = k.shard AND o.queue = k.queue AND o.key = k.key
LEFT JOIN paused p ON p.shard = k.shard AND p.queue = k.queue AND p.key = k.key
GROUP BY k.shard, q.name, k.key;
