"""The ledger's Lua scripts, and how they are sent.

Owns: the scripts, each one atomic step of the state machine that `common.ledger` draws, and `Script`.
Must not know: what the keys are called (`common.keys`), who calls.
On failure: redis-py's errors. All scripts may be repeated: a second run finds what the first one wrote.

Their keys and arguments are positional; `common.ledger` is their only caller and stands beside them for that reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError, ResponseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis

BEGIN = """
local head, sealed, rows, marks, calls, strikes = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local shard, index, mark, worker_prefix, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local admitted, suspect = tonumber(ARGV[6]), tonumber(ARGV[7])
local run = redis.call('HMGET', head, 'closed', 'ending')
if not run[1] then return {'unknown', 0, 0} end
if run[1] ~= '' or (run[2] and run[2] ~= '') or redis.call('SISMEMBER', sealed, shard) == 1
        or redis.call('HEXISTS', rows, index) == 1 then
    return {'done', 0, 0}
end
local deaths = tonumber(redis.call('HGET', strikes, index) or '0')
local owner = redis.call('HGET', marks, index)
if owner and owner ~= mark then
    if redis.call('EXISTS', worker_prefix .. string.match(owner, '^(.*)/')) == 1 then return {'parked', 0, deaths} end
    deaths = redis.call('HINCRBY', strikes, index, 1)
    redis.call('HDEL', marks, index)
end
if deaths > most then return {'poison', 0, deaths} end
if deaths >= suspect and deaths > admitted then return {'suspect', 0, deaths} end
redis.call('HSET', marks, index, mark)
return {'ours', redis.call('HINCRBY', calls, index, 1) - 1, deaths}
"""

RELEASE = """
local marks, index, mark = KEYS[1], ARGV[1], ARGV[2]
if redis.call('HGET', marks, index) == mark then return redis.call('HDEL', marks, index) end
return 0
"""

RECORD = """
local head, sealed, rows, marks = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local shard, index, row, failed = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local prompt_tokens, completion_tokens, count = ARGV[5], ARGV[6], tonumber(ARGV[7])
local model, queue = ARGV[8], ARGV[9]
local run = redis.call('HMGET', head, 'closed', 'frontier', 'shards', 'step', 'fail_after', 'published:' .. queue)
if not run[1] then return {'unknown', 0, 0} end
if run[1] ~= '' or redis.call('SISMEMBER', sealed, shard) == 1 then return {'done', 0, 0} end
if redis.call('HSETNX', rows, index, row) == 0 then
    return {'done', redis.call('HLEN', rows) == count and 1 or 0, 0}
end
redis.call('HDEL', marks, index)
local finished = redis.call('HINCRBY', head, 'finished', 1)
local full, feed = 0, 0
if failed == 1 then
    local all = redis.call('HINCRBY', head, 'failed', 1)
    if run[5] and run[5] ~= '' and all >= tonumber(run[5]) then feed = 1 end
end
if prompt_tokens ~= '0' then redis.call('HINCRBY', head, 'prompt:' .. model, prompt_tokens) end
if completion_tokens ~= '0' then redis.call('HINCRBY', head, 'completion:' .. model, completion_tokens) end
if run[6] then redis.call('HINCRBY', head, 'finished:' .. queue, 1) end
if redis.call('HLEN', rows) == count then full = 1 end
if tonumber(run[2]) < tonumber(run[3]) and finished % tonumber(run[4]) == 0 then feed = 1 end
return {'ours', full, feed}
"""

RESTORE = """
local head, sealed = KEYS[1], KEYS[2]
if redis.call('EXISTS', head) == 1 and redis.call('HGET', head, 'closed') ~= 'purged' then return 0 end
redis.call('DEL', head, sealed)
local counted = 10 + tonumber(ARGV[10])
for i = counted + 1, #ARGV do redis.call('SADD', sealed, ARGV[i]) end
for i = 11, counted, 2 do redis.call('HSET', head, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', head, 'total', ARGV[1], 'shards', ARGV[2], 'step', ARGV[3], 'finished', ARGV[4], 'failed', ARGV[5],
    'fail_after', ARGV[6], 'frontier', 0, 'ending', '', 'closed', ARGV[7], 'store', ARGV[9])
if ARGV[7] ~= '' then
    redis.call('EXPIRE', head, ARGV[8])
    redis.call('EXPIRE', sealed, ARGV[8])
end
return 1
"""

CLAIM = """
local head, number = KEYS[1], ARGV[1]
if redis.call('HGET', head, 'closed') ~= '' or redis.call('HGET', head, 'frontier') ~= number then return 0 end
redis.call('HINCRBY', head, 'frontier', 1)
return 1
"""

# Sealing and spilling make room: they must work when Redis is full (Redis 7, "Script flags").
MARK_SEALED = """#!lua flags=allow-oom
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('SADD', KEYS[2], ARGV[1]) == 0 then return 0 end
local lost = tonumber(ARGV[2]) - redis.call('HLEN', KEYS[3])
if lost > 0 then
    redis.call('HINCRBY', KEYS[1], 'finished', lost)
    redis.call('HSET', KEYS[1], 'inexact', '1')
end
return 1
"""

MARK_SPILLED = """#!lua flags=allow-oom
local rows, marked = KEYS[1], 0
for i = 1, #ARGV, 2 do
    local row = redis.call('HGET', rows, ARGV[i])
    if row and row ~= '' and redis.sha1hex(row) == ARGV[i + 1] then
        redis.call('HSET', rows, ARGV[i], '')
        marked = marked + 1
    end
end
return marked
"""

UNSPILL = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], ARGV[1]) == '' then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""

SET_ENDING = """#!lua flags=allow-oom
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HGET', KEYS[1], 'ending') ~= '' then return 0 end
redis.call('HSET', KEYS[1], 'ending', ARGV[1])
return 1
"""

CLOSE = """#!lua flags=allow-oom
local head, sealed = KEYS[1], KEYS[2]
local shards = redis.call('HGET', head, 'shards')
if not shards then return 0 end
redis.call('HSET', head, 'closed', ARGV[1])
redis.call('EXPIRE', head, ARGV[2])
redis.call('EXPIRE', sealed, ARGV[2])
for shard = 0, tonumber(shards) - 1 do
    for i = 3, #ARGV do redis.call('EXPIRE', ARGV[i] .. shard, ARGV[2]) end
end
return 1
"""

KEEP_OPEN = """#!lua flags=allow-oom
local head, sealed = KEYS[1], KEYS[2]
local run = redis.call('HMGET', head, 'closed', 'shards')
if run[1] ~= '' then return 0 end
local function persist(shard)
    for i = 1, 4 do redis.call('PERSIST', ARGV[i] .. shard) end
end
for i = 5, #ARGV do persist(ARGV[i]) end
if redis.call('PERSIST', head) + redis.call('PERSIST', sealed) > 0 then
    for shard = 0, tonumber(run[2]) - 1 do persist(shard) end
end
return 1
"""

# Heartbeats and the watchdog's lock are a few small keys, and without them a full Redis would stay full.
WATCH = """#!lua flags=allow-oom
local who = redis.call('GET', KEYS[1])
if who and who ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

BEAT = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[4])
redis.call('EXPIRE', KEYS[2], 3600)
return 1
"""


class Script:
    """A Lua script that is sent by its digest and loaded when Redis does not know it (a restart forgets scripts)."""

    def __init__(self, client: redis.Redis, body: str) -> None:
        self._client = client
        self._body = body
        self._sha = ""

    def call(self, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script once."""
        return self.call_many([(script_keys, args)])[0]

    def call_many(self, calls: Sequence[tuple[Sequence[str], Sequence[Any]]]) -> list[Any]:
        """Run the script once per element in one round trip. The first error of any of them is raised.

        All scripts are idempotent, so calls that succeeded beside a failed one may be repeated.
        """
        if not self._sha:
            self._sha = self._load()
        try:
            return self._pipelined(calls)
        except NoScriptError:
            self._load()
            return self._pipelined(calls)

    def _load(self) -> str:
        try:
            return str(self._client.script_load(self._body))
        except ResponseError:
            if not self._body.startswith("#!"):
                raise
            # Redis 6 knows no flags: such a script fails there while memory is short, as every write does.
            self._body = self._body.partition("\n")[2]
            return str(self._client.script_load(self._body))

    def _pipelined(self, calls: Sequence[tuple[Sequence[str], Sequence[Any]]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for script_keys, args in calls:
                pipe.evalsha(self._sha, len(script_keys), *script_keys, *args)
            return list(pipe.execute())
