-- Version 1, second part: what a commit does. Each function does one kind of thing to one table, for as many rows as it
-- is given, and returns the shard that it was given: so a commit is one statement, in which the functions that it needs
-- are nested, in order, around the fence. One statement is one round trip and one transaction, and there is none that a
-- dropped caller could leave open.
--
-- /*planning*/ stands for settings that hold inside of a function: its schema, and a planner that goes by the indexes and
-- by nothing else, however old its statistics are. A table of waiting tasks is empty at one time and has millions of
-- rows at another, and a plan that was made for the one must do for the other.

-- The timeline that is written to now; null if that may not be known. Fails on a standby, which takes no commits.
CREATE FUNCTION timeline() RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN has_function_privilege('pg_catalog.pg_walfile_name(pg_lsn)', 'execute') THEN
        ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
    END
$$;

-- The cluster's number; null if that may not be known.
CREATE FUNCTION cluster() RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN has_function_privilege('pg_catalog.pg_control_system()', 'execute') THEN
        (SELECT system_identifier FROM pg_control_system())
    END
$$;

-- Goes on only if the epoch is the shard's, and keeps it the shard's until the end of the transaction. A commit that
-- writes nothing only asks.
CREATE FUNCTION fence(
    p_shard integer, p_epoch bigint, p_writes boolean, p_next_seq bigint, p_stopped boolean, p_set_doubt boolean,
    p_doubt_ms bigint, p_store_id bigint, p_ack bytea, p_max bytea
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
DECLARE
    is_epoch bigint;
    is_timeline integer;
    is_ack bytea;
BEGIN
    IF p_writes THEN
        SELECT epoch, timeline, timers_ack INTO is_epoch, is_timeline, is_ack
        FROM shards WHERE shard = p_shard FOR UPDATE;
        -- What is acknowledged is durable, whatever the database says by default.
        IF current_setting('synchronous_commit') = 'off' THEN
            PERFORM set_config('synchronous_commit', 'on', true);
        END IF;
    ELSE
        SELECT epoch, timeline INTO is_epoch, is_timeline FROM shards WHERE shard = p_shard;
    END IF;
    IF is_epoch IS DISTINCT FROM p_epoch THEN
        RAISE EXCEPTION 'shard % has another owner', p_shard USING ERRCODE = 'EH001', DETAIL = coalesce(is_epoch, 0);
    END IF;
    IF is_timeline IS DISTINCT FROM timeline() THEN
        RAISE EXCEPTION 'shard % was taken on timeline %, and this is timeline %', p_shard, is_timeline, timeline()
            USING ERRCODE = 'EH002';
    END IF;
    IF p_ack > is_ack THEN
        DELETE FROM timers WHERE shard = p_shard AND level > is_ack AND level <= p_ack;
    END IF;
    IF num_nonnulls(p_next_seq, p_stopped, p_store_id, p_ack) > 0 OR p_set_doubt THEN
        UPDATE shards SET
            next_seq = coalesce(p_next_seq, next_seq), stopped = coalesce(p_stopped, stopped),
            doubt_ms = CASE WHEN p_set_doubt THEN p_doubt_ms ELSE doubt_ms END,
            store_id = coalesce(p_store_id, store_id), timers_ack = coalesce(p_ack, timers_ack),
            timers_max = coalesce(p_max, timers_max)
        WHERE shard = p_shard;
    END IF;
    RETURN p_shard;
END $$;

-- Makes the caller the owner. Until the transaction ends nobody commits to the shard.
CREATE FUNCTION take(p_shard integer, p_shown bigint) RETURNS TABLE (
    new_epoch bigint, old_epoch bigint, is_new boolean, was_old boolean, old_cluster bigint, old_timeline integer,
    new_cluster bigint, new_timeline integer, differs boolean
) LANGUAGE plpgsql /*planning*/ AS $$
#variable_conflict use_column
DECLARE
    saved store%ROWTYPE;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    new_cluster := cluster();
    new_timeline := timeline();
    SELECT * INTO saved FROM store;
    IF saved.cluster IS DISTINCT FROM new_cluster OR saved.timeline IS DISTINCT FROM new_timeline THEN
        -- The first to notice tells all shards, and saves what the cluster is now; the others wait here.
        SELECT * INTO saved FROM store FOR UPDATE;
    END IF;
    old_cluster := saved.cluster;
    old_timeline := saved.timeline;
    differs := coalesce(old_cluster <> new_cluster, false) OR coalesce(old_timeline <> new_timeline, false);
    IF differs THEN
        UPDATE shards SET doubt_ms = -1;
    END IF;
    IF saved.cluster IS DISTINCT FROM new_cluster OR saved.timeline IS DISTINCT FROM new_timeline THEN
        UPDATE store SET cluster = coalesce(new_cluster, cluster), timeline = coalesce(new_timeline, timeline),
            was_old = was_old OR differs;
    END IF;
    was_old := saved.was_old OR differs;
    INSERT INTO shards (shard, epoch) VALUES (p_shard, 0) ON CONFLICT DO NOTHING;
    is_new := FOUND;
    SELECT epoch INTO old_epoch FROM shards WHERE shard = p_shard FOR UPDATE;
    new_epoch := greatest(old_epoch, p_shown) + 1;
    UPDATE shards SET epoch = new_epoch, timeline = new_timeline,
        doubt_ms = CASE WHEN p_shown IS NOT NULL OR is_new AND was_old THEN -1 ELSE doubt_ms END
    WHERE shard = p_shard;
    RETURN NEXT;
END $$;

CREATE FUNCTION forget_tasks(p_shard integer, p_ids bigint[], p_tried bigint[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM tasks WHERE shard = p_shard AND id = ANY (p_ids);
    IF cardinality(p_tried) > 0 THEN
        DELETE FROM tries WHERE shard = p_shard AND task = ANY (p_tried);
    END IF;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_tasks(
    p_shard integer, p_ids bigint[], p_queues integer[], p_priorities smallint[], p_classes smallint[],
    p_places smallint[], p_levels bytea[], p_keys text[], p_costs integer[], p_weights integer[], p_chained boolean[],
    p_timed boolean[], p_attempts integer[], p_max_attempts integer[], p_lost smallint[], p_terms bytea[],
    p_replay_of bigint[], p_accepted_ms bigint[], p_content_types text[], p_files bytea[], p_payloads bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO tasks (
        shard, id, queue, priority, class, place, level, key, cost, weight, chained, timed, attempt, max_attempts, lost,
        terms, replay_of, accepted_ms, content_type, files, payload
    ) SELECT p_shard, * FROM unnest(
        p_ids, p_queues, p_priorities, p_classes, p_places, p_levels, p_keys, p_costs, p_weights, p_chained, p_timed,
        p_attempts, p_max_attempts, p_lost, p_terms, p_replay_of, p_accepted_ms, p_content_types, p_files, p_payloads
    );
    RETURN p_shard;
END $$;

-- Tasks are somewhere else now. What is null stays as it is, but for the level and, if there are new ones, the terms.
CREATE FUNCTION move_tasks(
    p_shard integer, p_ids bigint[], p_queues integer[], p_priorities smallint[], p_classes smallint[],
    p_places smallint[], p_levels bytea[], p_costs integer[], p_weights integer[], p_chained boolean[], p_timed boolean[],
    p_attempts integer[], p_lost smallint[], p_new_terms boolean[], p_terms bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    UPDATE tasks t SET
        queue = coalesce(m.queue, t.queue), priority = coalesce(m.priority, t.priority), class = coalesce(m.class, t.class),
        place = m.place, level = m.level, cost = m.cost, weight = m.weight, chained = m.chained, timed = m.timed,
        attempt = coalesce(m.attempt, t.attempt), lost = coalesce(m.lost, t.lost),
        terms = CASE WHEN m.new_terms THEN m.terms ELSE t.terms END
    FROM unnest(
        p_ids, p_queues, p_priorities, p_classes, p_places, p_levels, p_costs, p_weights, p_chained, p_timed, p_attempts,
        p_lost, p_new_terms, p_terms
    ) AS m (id, queue, priority, class, place, level, cost, weight, chained, timed, attempt, lost, new_terms, terms)
    WHERE t.shard = p_shard AND t.id = m.id;
    RETURN p_shard;
END $$;

CREATE FUNCTION end_tasks(
    p_shard integer, p_ids bigint[], p_outcomes smallint[], p_ended_ms bigint[], p_attempts integer[], p_ends smallint[],
    p_started_ms bigint[], p_last_ended_ms bigint[], p_seats text[], p_errors text[], p_errors_raw bytea[],
    p_results bytea[], p_keys text[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    UPDATE tasks t SET
        place = 4, level = NULL, canceling = false, outcome = e.outcome, ended_ms = e.ended_ms, last_attempt = e.attempt,
        last_end = e.ending, last_started_ms = e.started_ms, last_ended_ms = e.last_ended_ms, last_seat = e.seat,
        last_error = e.error, last_error_raw = e.error_raw, result = e.result,
        end_key = nullif(e.key, t.key)
    FROM unnest(
        p_ids, p_outcomes, p_ended_ms, p_attempts, p_ends, p_started_ms, p_last_ended_ms, p_seats, p_errors, p_errors_raw,
        p_results, p_keys
    ) AS e (id, outcome, ended_ms, attempt, ending, started_ms, last_ended_ms, seat, error, error_raw, result, key)
    WHERE t.shard = p_shard AND t.id = e.id;
    RETURN p_shard;
END $$;

CREATE FUNCTION replay_tasks(p_shard integer, p_ids bigint[], p_again bigint[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    UPDATE tasks t SET replayed_as = r.again
    FROM unnest(p_ids, p_again) AS r (id, again) WHERE t.shard = p_shard AND t.id = r.id;
    RETURN p_shard;
END $$;

CREATE FUNCTION cancel_tasks(p_shard integer, p_ids bigint[]) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    UPDATE tasks SET canceling = true WHERE shard = p_shard AND id = ANY (p_ids) AND NOT canceling;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_tries(p_shard integer, p_tasks bigint[], p_attempts integer[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM tries t USING unnest(p_tasks, p_attempts) AS d (task, attempt)
    WHERE t.shard = p_shard AND t.task = d.task AND t.attempt = d.attempt;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_tries(
    p_shard integer, p_tasks bigint[], p_attempts integer[], p_started_ms bigint[], p_ended_ms bigint[],
    p_outcomes smallint[], p_seats text[], p_errors text[], p_errors_raw bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO tries (shard, task, attempt, started_ms, ended_ms, outcome, seat, error, error_raw)
    SELECT p_shard, * FROM unnest(
        p_tasks, p_attempts, p_started_ms, p_ended_ms, p_outcomes, p_seats, p_errors, p_errors_raw
    )
    ON CONFLICT (shard, task, attempt) DO UPDATE SET
        started_ms = excluded.started_ms, ended_ms = excluded.ended_ms, outcome = excluded.outcome, seat = excluded.seat,
        error = excluded.error, error_raw = excluded.error_raw;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_timers(p_shard integer, p_levels bytea[]) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM timers WHERE shard = p_shard AND level = ANY (p_levels);
    RETURN p_shard;
END $$;

CREATE FUNCTION put_timers(p_shard integer, p_levels bytea[], p_kinds smallint[], p_tasks bigint[], p_tries integer[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO timers (shard, level, kind, task, tries)
    SELECT p_shard, * FROM unnest(p_levels, p_kinds, p_tasks, p_tries)
    ON CONFLICT (shard, level) DO UPDATE SET kind = excluded.kind, task = excluded.task, tries = excluded.tries;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_queues(
    p_shard integer, p_queues integer[], p_names text[], p_accepted bigint[], p_succeeded bigint[], p_failed bigint[],
    p_canceled bigint[], p_expired bigint[], p_scheduled bigint[], p_average bigint[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO queues (shard, queue, name, accepted, succeeded, failed, canceled, expired, scheduled, average)
    SELECT p_shard, * FROM unnest(
        p_queues, p_names, p_accepted, p_succeeded, p_failed, p_canceled, p_expired, p_scheduled, p_average
    )
    ON CONFLICT (shard, queue) DO UPDATE SET
        name = excluded.name, accepted = excluded.accepted, succeeded = excluded.succeeded, failed = excluded.failed,
        canceled = excluded.canceled, expired = excluded.expired, scheduled = excluded.scheduled,
        average = excluded.average;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_settings(
    p_shard integer, p_queues integer[], p_versions bigint[], p_paused boolean[], p_records bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO settings (shard, queue, version, paused, record)
    SELECT p_shard, * FROM unnest(p_queues, p_versions, p_paused, p_records)
    ON CONFLICT (shard, queue) DO UPDATE SET
        version = excluded.version, paused = excluded.paused, record = excluded.record;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_lanes(
    p_shard integer, p_queues integer[], p_priorities smallint[], p_classes smallint[], p_acks bytea[], p_maxs bytea[],
    p_vtimes bytea[], p_turns bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO lanes (shard, queue, priority, class, ack, max, vtime, turn)
    SELECT p_shard, * FROM unnest(p_queues, p_priorities, p_classes, p_acks, p_maxs, p_vtimes, p_turns)
    ON CONFLICT (shard, queue, priority, class) DO UPDATE SET
        ack = excluded.ack, max = excluded.max, vtime = excluded.vtime, turn = excluded.turn;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_keys(
    p_shard integer, p_queues integer[], p_priorities smallint[], p_classes smallint[], p_keys text[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM keys k USING unnest(p_queues, p_priorities, p_classes, p_keys) AS d (queue, priority, class, key)
    WHERE k.shard = p_shard AND k.queue = d.queue AND k.priority = d.priority AND k.class = d.class AND k.key = d.key;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_keys(
    p_shard integer, p_queues integer[], p_priorities smallint[], p_classes smallint[], p_keys text[], p_weights integer[],
    p_rows bigint[], p_records bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO keys (shard, queue, priority, class, key, weight, rows, record)
    SELECT p_shard, * FROM unnest(p_queues, p_priorities, p_classes, p_keys, p_weights, p_rows, p_records)
    ON CONFLICT (shard, queue, priority, class, key) DO UPDATE SET
        weight = excluded.weight, rows = excluded.rows, record = excluded.record;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_parked(
    p_shard integer, p_queues integer[], p_priorities smallint[], p_classes smallint[], p_keys text[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM parked k USING unnest(p_queues, p_priorities, p_classes, p_keys) AS d (queue, priority, class, key)
    WHERE k.shard = p_shard AND k.queue = d.queue AND k.priority = d.priority AND k.class = d.class AND k.key = d.key;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_parked(
    p_shard integer, p_queues integer[], p_priorities smallint[], p_classes smallint[], p_keys text[], p_rows bigint[],
    p_acks bytea[], p_maxs bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO parked (shard, queue, priority, class, key, rows, ack, max)
    SELECT p_shard, * FROM unnest(p_queues, p_priorities, p_classes, p_keys, p_rows, p_acks, p_maxs)
    ON CONFLICT (shard, queue, priority, class, key) DO UPDATE SET
        rows = excluded.rows, ack = excluded.ack, max = excluded.max;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_paused(p_shard integer, p_queues integer[], p_keys text[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM paused p USING unnest(p_queues, p_keys) AS d (queue, key)
    WHERE p.shard = p_shard AND p.queue = d.queue AND p.key = d.key;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_paused(p_shard integer, p_queues integer[], p_keys text[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO paused (shard, queue, key) SELECT p_shard, * FROM unnest(p_queues, p_keys) ON CONFLICT DO NOTHING;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_overrides(p_shard integer, p_queues integer[], p_keys text[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM overrides o USING unnest(p_queues, p_keys) AS d (queue, key)
    WHERE o.shard = p_shard AND o.queue = d.queue AND o.key = d.key;
    RETURN p_shard;
END $$;

CREATE FUNCTION put_overrides(
    p_shard integer, p_queues integer[], p_keys text[], p_weights integer[], p_at_once bigint[], p_records bytea[]
) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO overrides (shard, queue, key, weight, at_once, record)
    SELECT p_shard, * FROM unnest(p_queues, p_keys, p_weights, p_at_once, p_records)
    ON CONFLICT (shard, queue, key) DO UPDATE SET
        weight = excluded.weight, at_once = excluded.at_once, record = excluded.record;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_members(p_shard integer, p_seats text[]) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM members WHERE shard = p_shard AND seat = ANY (p_seats);
    RETURN p_shard;
END $$;

CREATE FUNCTION put_members(p_shard integer, p_seats text[], p_wait_ms bigint[], p_running text[], p_records bytea[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO members (shard, seat, wait_ms, running, record)
    SELECT p_shard, m.seat, m.wait_ms, m.running::bigint[], m.record
    FROM unnest(p_seats, p_wait_ms, p_running, p_records) AS m (seat, wait_ms, running, record)
    ON CONFLICT (shard, seat) DO UPDATE SET
        wait_ms = excluded.wait_ms, running = excluded.running, record = excluded.record;
    RETURN p_shard;
END $$;

CREATE FUNCTION drop_requests(p_shard integer, p_keys bytea[]) RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    DELETE FROM requests WHERE shard = p_shard AND key = ANY (p_keys);
    RETURN p_shard;
END $$;

CREATE FUNCTION put_requests(p_shard integer, p_keys bytea[], p_until_ms bigint[], p_records bytea[])
RETURNS integer LANGUAGE plpgsql /*planning*/ AS $$
BEGIN
    INSERT INTO requests (shard, key, until_ms, record) SELECT p_shard, * FROM unnest(p_keys, p_until_ms, p_records)
    ON CONFLICT (shard, key) DO UPDATE SET until_ms = excluded.until_ms, record = excluded.record;
    RETURN p_shard;
END $$;
