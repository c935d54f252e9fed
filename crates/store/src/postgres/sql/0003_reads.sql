-- Version 1, third part: reads that must start where they are told and stop when they have enough. A level at or below
-- which all is settled is a place to start from: what was deleted below it is not looked at, vacuumed or not.

CREATE FUNCTION read_lane(
    p_shard integer, p_queue integer, p_priority smallint, p_class smallint, p_above bytea, p_limit bigint
) RETURNS TABLE (
    id bigint, level bytea, key text, cost integer, weight integer, chained boolean, timed boolean, attempt integer,
    max_attempts integer, lost smallint, terms bytea
) LANGUAGE plpgsql STABLE /*planning*/ AS $$
#variable_conflict use_column
DECLARE
    is_ack bytea;
BEGIN
    SELECT ack INTO is_ack FROM lanes
    WHERE shard = p_shard AND queue = p_queue AND priority = p_priority AND class = p_class;
    p_above := greatest(p_above, is_ack);
    RETURN QUERY
    SELECT id, level, key, cost, weight, chained, timed, attempt, max_attempts, lost, terms FROM tasks
    WHERE place = 0 AND shard = p_shard AND queue = p_queue AND priority = p_priority AND class = p_class
        AND level > p_above
    ORDER BY shard, queue, priority, class, level LIMIT p_limit;
END $$;

CREATE FUNCTION read_parked(
    p_shard integer, p_queue integer, p_priority smallint, p_class smallint, p_key text, p_above bytea, p_limit bigint
) RETURNS TABLE (
    id bigint, level bytea, key text, cost integer, weight integer, chained boolean, timed boolean, attempt integer,
    max_attempts integer, lost smallint, terms bytea
) LANGUAGE plpgsql STABLE /*planning*/ AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT id, level, key, cost, weight, chained, timed, attempt, max_attempts, lost, terms FROM tasks
    WHERE place = 2 AND shard = p_shard AND queue = p_queue AND priority = p_priority AND class = p_class
        AND key = p_key AND level > p_above
    ORDER BY shard, queue, priority, class, key, level LIMIT p_limit;
END $$;

-- So many timers of either sort: those that tasks wait for, of kind 0 and with their rows, and the others.
CREATE FUNCTION read_timers(p_shard integer, p_above bytea, p_limit bigint) RETURNS TABLE (
    id bigint, level bytea, key text, cost integer, weight integer, chained boolean, timed boolean, attempt integer,
    max_attempts integer, lost smallint, terms bytea, kind smallint, tries integer, queue integer, priority smallint,
    class smallint
) LANGUAGE plpgsql STABLE /*planning*/ AS $$
#variable_conflict use_column
DECLARE
    is_ack bytea;
BEGIN
    SELECT timers_ack INTO is_ack FROM shards WHERE shard = p_shard;
    p_above := greatest(p_above, is_ack);
    RETURN QUERY
    SELECT id, level, key, cost, weight, chained, timed, attempt, max_attempts, lost, terms, 0::smallint, NULL::integer,
        queue, priority, class
    FROM tasks WHERE place = 1 AND shard = p_shard AND level > p_above ORDER BY shard, level LIMIT p_limit;
    RETURN QUERY
    SELECT task, level, NULL::text, NULL::integer, NULL::integer, NULL::boolean, NULL::boolean, NULL::integer,
        NULL::integer, NULL::smallint, NULL::bytea, kind, tries, NULL::integer, NULL::smallint, NULL::smallint
    FROM timers WHERE shard = p_shard AND level > p_above ORDER BY shard, level LIMIT p_limit;
END $$;

-- Tasks by id. The last row is no task: its id is where a listing that is full, or long enough, is to go on.
CREATE FUNCTION list_tasks(
    p_shard integer, p_queue integer, p_ended boolean, p_after bigint, p_limit bigint, p_bytes bigint, p_passed bigint
) RETURNS TABLE (
    is_task boolean, id bigint, queue integer, priority smallint, class smallint, place smallint, level bytea, key text,
    cost integer, weight integer, chained boolean, timed boolean, attempt integer, max_attempts integer, lost smallint,
    terms bytea, replay_of bigint, accepted_ms bigint, content_type text, files bytea, payload bytea
) LANGUAGE plpgsql STABLE /*planning*/ AS $$
#variable_conflict use_column
DECLARE
    found_tasks refcursor;
    one_task tasks%ROWTYPE;
    seen bigint := p_after;
    listed bigint := 0;
    passed bigint := 0;
    bytes bigint := 0;
BEGIN
    IF p_ended THEN
        OPEN found_tasks FOR SELECT * FROM tasks
            WHERE place = 4 AND shard = p_shard AND id > p_after ORDER BY shard, id;
    ELSE
        OPEN found_tasks FOR SELECT * FROM tasks WHERE shard = p_shard AND id > p_after ORDER BY shard, id;
    END IF;
    LOOP
        FETCH found_tasks INTO one_task;
        EXIT WHEN NOT FOUND;
        passed := passed + 1;
        IF one_task.queue <> p_queue OR (one_task.place = 4) <> p_ended THEN
            IF passed >= p_passed THEN
                is_task := false;
                id := one_task.id;
                RETURN NEXT;
                EXIT;
            END IF;
            CONTINUE;
        END IF;
        IF listed >= p_limit OR bytes >= p_bytes THEN
            is_task := false;
            id := seen;
            RETURN NEXT;
            EXIT;
        END IF;
        seen := one_task.id;
        listed := listed + 1;
        bytes := bytes + octet_length(one_task.payload) + coalesce(octet_length(one_task.files), 0);
        RETURN QUERY SELECT true, one_task.id, one_task.queue, one_task.priority, one_task.class, one_task.place,
            one_task.level, one_task.key, one_task.cost, one_task.weight, one_task.chained, one_task.timed,
            one_task.attempt, one_task.max_attempts, one_task.lost, one_task.terms, one_task.replay_of,
            one_task.accepted_ms, one_task.content_type, one_task.files, one_task.payload;
    END LOOP;
    CLOSE found_tasks;
END $$;
