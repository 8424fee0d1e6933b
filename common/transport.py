"""Our kombu transport: deliveries are leases that a living process renews, and nothing is run twice for a lost socket.

Owns: what kombu 5.7 writes to `unacked` and `unacked_index`, when a delivery goes back to its queue, and the scheme
`fleet`. Must not know: Celery's worker, engines, batches.
On failure: nothing here raises into kombu's event loop for a broker that is away. Acknowledgements, hand-backs and
entries that could not be written are kept and tried again; what cannot be put back at exit is left to its lease.

    queue ─BRPOP─▶ held: in `unacked`, score = server's clock, renewed 4 times per lease while `Leases.alive()`
                     │ ack ───────▶ written within 10 ms or 64 of them, in one script
                     │ requeue, process exit ──▶ front of its queue, marked redelivered
                     │ park ──────▶ not renewed any more; the sweep brings it back
                     │ not renewed for a lease ──sweep──▶ front of its queue, marked redelivered
                     │ channel closed ──▶ still held and renewed while anyone refers to the message, then handed back

Where one message is, more are taken with it, up to the prefetch window: one script takes and notes them.

Every delivery gets a tag of its own when it is received, so "the tag is in `unacked`" *means* "it is still ours": a
process that was stopped beyond its lease cannot renew, acknowledge or requeue what belongs to another by now. Stock
kombu keeps the tag over a redelivery. Each change is one script; a script pushes before it deletes, since
a server that is full refuses the push.

Closing a channel hands nothing back, because kombu closes channels alike when a socket broke and at the end. So a
message counts as held until nobody refers to it; requests that Celery drops on a reconnect go back, those that run do
not. `Leases.hand_back` ends it all; it also runs at the interpreter's exit.

Selected by URL: kombu gives URLs only the transports of its alias table (`kombu.transport.TRANSPORT_ALIASES`), and
Celery's `broker_transport` is ignored for `redis+socket://` (kombu 5.7, connection.py), so `fleet_url` enters the
scheme there. What is assumed of kombu's internals is held by `tests/contract/test_transport.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import traceback
import uuid
import weakref
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import kombu
import redis
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as stock
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads
from pydantic_core import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

logger = logging.getLogger("fleet.transport")

SCHEME = "fleet"

#: Header of a message that carries several requests: how many. The prefetch window counts requests.
REQUESTS = "requests"

#: An acknowledgement waits at most so long, or for so many others.
ACK_WAIT_S = 0.01
ACK_BATCH = 64
#: Renewals per lease: one may fail.
RENEWALS = 4
#: Seconds between tries while the broker is away.
RETRY_S = 0.25
#: Seconds for which a full server is left alone by who could not declare a queue.
FULL_WAIT_S = 2.0
#: Tags of one script call or pipeline: a server is never busy for long, and 20 MB payloads are possible.
RENEW_SLICE = 500
RESTORE_SLICE = 50
#: Messages that are taken at once, besides the one that was waited for.
TAKE_SLICE = 64
#: So many times before the consumer's loop goes on. An engine that works on the first requests leaves the loop little
#: of a small machine: each of its turns then takes as long as one of the engine's steps.
TAKES = 16
#: Slices of one sweep; the rest waits for the next one.
SWEEP_SLICES = 20

_JSON = "application/json"

_AWAY = (redis.RedisError, OSError)

_NOW = "local t = redis.call('TIME'); local now = t[1] + t[2] / 1000000\n"

#: KEYS unacked, index; ARGV tag, entry.
_APPEND = f"""{_NOW}
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
"""

#: KEYS unacked, index; ARGV tags.
_ACK = """
redis.call('HDEL', KEYS[1], unpack(ARGV))
redis.call('ZREM', KEYS[2], unpack(ARGV))
"""

#: How a message looks that carries several requests, and no other one: in its body quotes are escaped.
_SEVERAL = f'"headers": {{"{REQUESTS}": '

#: KEYS queue, unacked, index; ARGV most messages, room, prefix of the tags, end of the entries. Returns messages, the
#: oldest first, until the room in requests is used up; the last one may take more. They are taken when they are noted,
#: so none is lost in between. A short queue is shared out: a quarter at a time.
_TAKE = f"""{_NOW}
local length = redis.call('LLEN', KEYS[1])
local count = math.min(tonumber(ARGV[1]), math.ceil(length / 4))
if count < 1 then return {{}} end
local taken, room = {{}}, tonumber(ARGV[2])
local waiting = redis.call('LRANGE', KEYS[1], -count, -1)
for place = count, 1, -1 do
  local message = waiting[place]
  local number = #taken + 1
  redis.call('HSET', KEYS[2], ARGV[3] .. number, '[' .. message .. ARGV[4])
  redis.call('ZADD', KEYS[3], now, ARGV[3] .. number)
  taken[number] = message
  local _, header = string.find(message, '{_SEVERAL}', 1, true)
  room = room - (header and tonumber(string.match(message, '^%d+', header + 1)) or 1)
  if room <= 0 then break end
end
redis.call('LTRIM', KEYS[1], 0, -#taken - 1)
return taken
"""

#: KEYS index; ARGV tags. Returns those that are not ours any more.
_RENEW = f"""{_NOW}
local lost = {{}}
for _, tag in ipairs(ARGV) do
  if redis.call('ZSCORE', KEYS[1], tag) then redis.call('ZADD', KEYS[1], 'XX', now, tag)
  else lost[#lost + 1] = tag end
end
return lost
"""

#: KEYS unacked, index, swept; ARGV lease, limit, seconds between sweeps. Returns tag, entry, tag, entry …
#: Nothing is restored before sweeps have gone on for half a lease without a gap: after an outage or a pause of the
#: broker every lease looks expired, and the holders come first.
_EXPIRED = f"""{_NOW}
local since = redis.call('GET', KEYS[3])
redis.call('SET', KEYS[3], since or now, 'PX', math.ceil(ARGV[3] * 3000))
if not since or now - since < ARGV[1] / 2 then return {{}} end
local found = {{}}
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[1], 'LIMIT', 0, ARGV[2])) do
  local entry = redis.call('HGET', KEYS[1], tag)
  if entry then found[#found + 1] = tag; found[#found + 1] = entry
  else redis.call('ZREM', KEYS[2], tag) end
end
return found
"""

#: KEYS unacked, index, queues …; ARGV tag, message, lease ('0': at any age).
_RESTORE = f"""{_NOW}
local score = redis.call('ZSCORE', KEYS[2], ARGV[1])
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 or (score and now - score < tonumber(ARGV[3])) then return 0 end
for i = 3, #KEYS do redis.call('RPUSH', KEYS[i], ARGV[2]) end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""

#: Redis 7 and Valkey: a full server still lets leases be renewed and messages move; they take no more room than before.
_ALLOW_FULL = "#!lua flags=allow-oom\n"


@dataclass(slots=True)
class _Held:
    """A delivery in hand. `entry`: still to be written to `unacked`. `ours`: the lease was not lost to a sweep.

    `requests`: how many it carries.
    """

    message: weakref.ref[Any]
    written: bool = False
    entry: str | None = None
    ours: bool = True
    requests: int = 1


class Leases:
    """The deliveries that this process holds, and the one thread that writes for them through a client of its own.

    There is one per process. kombu makes transports, channels and their QoS from a class and passes them nothing of
    ours, so it hangs on the class: `Transport.leases`. The thread starts with the first delivery; a process that
    only publishes has none.

    Two questions are for the worker to answer. `alive`: while it says False nothing is renewed, so that a worker whose
    engine hangs loses its requests. `dropped`: the messages that the consumer gives up when its channel closes though
    something may still refer to them; for Celery 5.7 those of `celery.worker.state.scheduled_requests`.
    """

    def __init__(self) -> None:
        self.alive: Callable[[], bool] = lambda: True
        self.dropped: Callable[[], Iterable[Any]] = tuple
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        #: Requests in hand beside the first one of each delivery.
        self.packed = 0
        #: Held, but received on a channel that was closed since.
        self._detached: set[str] = set()
        self._acks: list[str] = []
        self._returns: list[str] = []
        self._wake = threading.Event()
        self._full = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._server: tuple[Any, ...] = ()
        self._renew_at = self._lease_s = 0.0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def detached(self) -> int:
        """How many deliveries are in hand whose channel is closed; they still take room in the prefetch window."""
        return len(self._detached)

    def bind(self, channel: Any) -> None:
        """Write to this channel's server from now on. Raises `RuntimeError` for a second server in use."""
        params = channel._connparams()  # noqa: SLF001 - kombu has no public way; all here is held by the contract test
        server = tuple(params.get(name) for name in ("host", "port", "path", "db", "username"))
        with self._lock:
            if server != self._server and self._held:
                raise RuntimeError("a process holds deliveries of one broker only")
            #: Names queues and keys, which works on a closed channel too.
            self._channel = channel
            self._lease_s = float(channel.visibility_timeout)
            self._keys = (channel.unacked_key, channel.unacked_index_key)
            if server == self._server:
                return
            timeout_s = max(0.5, self._lease_s / RENEWALS)
            params.update(socket_timeout=timeout_s, max_connections=8, retry_on_timeout=False)
            if "host" in params:
                params["socket_connect_timeout"] = timeout_s
            self._client: Any = redis.Redis(connection_pool=redis.ConnectionPool(**params))
            version = str(self._client.info("server")["redis_version"])
            head = _ALLOW_FULL if int(version.partition(".")[0]) >= 7 else ""
            self._append, self._take_more, self._ack, self._renew, self._expired, self._restore = (
                self._client.register_script(head + body) for body in (_APPEND, _TAKE, _ACK, _RENEW, _EXPIRED, _RESTORE)
            )
            if not self._pid:
                atexit.register(self.hand_back)
            self._server, self._pid = server, os.getpid()

    # -- what becomes of a delivery -----------------------------------------------------------------------------------

    def take(self, client: Any, queue_key: str, queue: str, room: int) -> list[tuple[str, bytes]]:
        """Take messages of a queue for so many requests, noted as ours already: their tags, and they.

        Raises redis-py's errors.

        If the answer is lost on its way they come back after a lease.
        """
        prefix = f"{uuid.uuid4()}-"
        args: list[Any] = [min(room, TAKE_SLICE), room, prefix, f',"",{dumps(queue)}]']
        taken = self._take_more(keys=[queue_key, *self._keys], args=args, client=client)
        return [(f"{prefix}{number}", message) for number, message in enumerate(taken, start=1)]

    def hold(self, client: Any, tag: str, message: Any, entry: str | None) -> None:
        """Take a delivery in hand. It is run even if it cannot be written now: it was popped, and would be lost.

        `entry` is None for one that `take` has noted.
        """
        requests = _requests_of(message)
        held = _Held(weakref.ref(message), written=entry is None, requests=requests)
        with self._lock:
            self._held[tag] = held
            self.packed += requests - 1
            if self._thread is None or not self._thread.is_alive():
                self._stop.clear()
                self._renew_at = monotonic() + self._lease_s / RENEWALS
                self._thread = threading.Thread(target=self._run, name="fleet-leases", daemon=True)
                self._thread.start()
        if entry is None:
            return
        try:
            self._append(keys=self._keys, args=[tag, entry], client=client)
        except _AWAY as exc:
            logger.warning("a delivery could not be written to %s yet: %s", self._keys[0], type(exc).__name__)
            held.entry = entry
            self._wake.set()
        else:
            held.written = True

    def ack(self, tag: str) -> None:
        """Acknowledge. Never blocks or fails; does nothing to what is parked, handed back or another's by now."""
        self._drop(tag, self._acks)
        if len(self._acks) >= ACK_BATCH:
            self._full.set()
        self._wake.set()

    def requeue(self, tag: str) -> None:
        """Put a delivery back to the front of its queue."""
        self._drop(tag, self._returns)
        self._full.set()
        self._wake.set()

    def park(self, tag: str) -> None:
        """Renew no more: the delivery comes back after a lease. Acknowledge it then as usual; that frees the slot."""
        self._drop(tag, [])

    def detach(self, tags: Sequence[str]) -> None:
        """The channel of these deliveries is closed. They stay held while anyone refers to their messages."""
        dropped = {message.delivery_tag for message in self.dropped()}
        with self._lock:
            self._detached.update(tag for tag in tags if tag in self._held)
        for tag in reversed(tags):
            if tag in dropped:
                self.requeue(tag)

    def hand_back(self) -> None:
        """Put everything back at once, oldest first in line, and stop; what the broker does not take has its lease."""
        if self._pid != os.getpid():  # never bound, or a fork: the deliveries are the parent's
            return
        self._stop.set()
        self._wake.set()
        self._full.set()
        if self._thread is not None:
            self._thread.join(2.0)
        try:
            self._write_acks()
            self._write_entries()
            with self._lock:
                self._returns += [tag for tag, held in reversed(self._held.items()) if held.ours]
                self._held.clear()
                self._detached.clear()
                self.packed = 0
            self._write_returns()
        except _AWAY as exc:
            logger.warning("deliveries not handed back, they are left to their lease: %s", type(exc).__name__)
        self._client.connection_pool.disconnect()

    def sweep(self, client: Any, every_s: float) -> None:
        """Put back deliveries, anybody's, that were not renewed for a lease. Raises redis-py's errors."""
        for _ in range(SWEEP_SLICES):
            keys = [*self._keys, f"{self._keys[0]}_swept"]
            found = self._expired(keys, [self._lease_s, RESTORE_SLICE, every_s], client)
            back = self._put_back(client, list(zip(found[::2], found[1::2], strict=True)), self._lease_s)
            if back:
                logger.warning("%d deliveries were put back: their lease had run out", back)
            if len(found) < 2 * RESTORE_SLICE:
                return

    def _drop(self, tag: str, then: list[str]) -> None:
        """Let a delivery go; if it was ours, note it for the thread. The lists are emptied in place, by `_take`."""
        with self._lock:
            held = self._held.pop(tag, None)
            self._detached.discard(tag)
            if held is None:
                return
            self.packed -= held.requests - 1
            if held.ours:
                then.append(tag)

    def _take(self, tags: list[str]) -> list[Any]:
        with self._lock:
            taken = tags[:]
            tags.clear()
        return taken

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        away = False
        while not self._stop.is_set():
            # After a reconnect, look soon for what Celery dropped.
            self._wake.wait(min(max(0.0, self._renew_at - monotonic()), 1.0 if self._detached else 60.0))
            if self._wake.is_set():
                self._full.wait(ACK_WAIT_S)
            self._wake.clear()
            self._full.clear()
            try:
                trouble = self._round()
            except Exception as exc:  # noqa: BLE001 - without this thread every lease would run out
                trouble = repr(exc)
            if trouble is not None and not away:
                logger.warning("the broker does not take acknowledgements or leases: %s; trying on", trouble)
            away = trouble is not None
            if away:
                self._stop.wait(min(RETRY_S, self._lease_s / RENEWALS / 2))
                self._wake.set()

    def _round(self) -> str | None:
        """Write what is due, leases first; what went wrong, if anything did."""
        trouble = None
        for write in (self._write_leases, self._write_acks, self._write_entries, self._write_returns):
            try:
                write()
            except redis.ResponseError as exc:  # one refused write must not hold up the others
                trouble = str(exc)
            except _AWAY as exc:
                return type(exc).__name__
        return trouble

    def _write_leases(self) -> None:
        with self._lock:
            gone = [tag for tag in self._detached if self._held[tag].message() is None]
        for tag in gone:
            self.requeue(tag)
        if monotonic() < self._renew_at:
            return
        if self.alive():
            with self._lock:
                tags = [tag for tag, held in self._held.items() if held.ours and held.written]
            lost = {tag for part in _slices(tags, RENEW_SLICE) for tag in self._renew(self._keys[1:], part)}
            with self._lock:
                held = [self._held[tag] for tag in map(bytes_to_str, lost) if tag in self._held]
            for each in held:
                each.ours = False
            if held:
                logger.warning("%d deliveries are another's by now: they were not renewed for a lease", len(held))
        else:
            logger.warning("the engine host is stale: %d deliveries are not renewed", len(self._held))
        self._renew_at = monotonic() + self._lease_s / RENEWALS

    def _write_acks(self) -> None:
        tags = self._take(self._acks)
        try:
            for part in _slices(tags, RENEW_SLICE):
                self._ack(self._keys, part)  # a full server refuses to begin a MULTI, though this one frees memory
        except BaseException:
            with self._lock:
                self._acks += tags  # removing twice does no harm
            raise

    def _write_entries(self) -> None:
        with self._lock:
            late = [(tag, held) for tag, held in self._held.items() if held.entry is not None]
        for tag, held in late:
            args: list[Any] = [tag, held.entry]
            self._append(self._keys, args)
            held.entry, held.written = None, True

    def _write_returns(self) -> None:
        tags = self._take(self._returns)
        try:
            for part in _slices(tags, RESTORE_SLICE):
                found = zip(part, self._client.hmget(self._keys[0], part), strict=True)
                self._put_back(self._client, [(tag, entry) for tag, entry in found if entry is not None], 0)
        except BaseException:
            with self._lock:
                self._returns += tags  # what was put back already is not in `unacked` any more
            raise

    def _put_back(self, client: Any, entries: Sequence[tuple[Any, Any]], lease_s: float) -> int:
        """Put entries of `unacked` back, the first one deepest; returns how many still had to be."""
        unreadable: list[Any] = []
        with client.pipeline(transaction=False) as pipe:
            for tag, entry in entries:
                try:
                    queues, message = _redelivered(self._channel, entry)
                except _UNREADABLE:
                    unreadable.append(tag)
                    continue
                self._restore(keys=[*self._keys, *queues], args=[tag, message, lease_s], client=pipe)
            answers = pipe.execute(raise_on_error=False)
        # What it names as its queue is none.
        asked = [tag for tag, _ in entries if tag not in unreadable]
        unreadable += [tag for tag, answer in zip(asked, answers, strict=True) if "WRONGTYPE" in str(answer)]
        if unreadable:
            # Not looked at again: the oldest come first, and a slice of such would be all that a sweep ever sees.
            logger.error("%d entries of %s cannot be read and stay there", len(unreadable), self._keys[0])
            client.zrem(self._keys[1], *unreadable)
        for answer in answers:
            if isinstance(answer, Exception):
                logger.error("a delivery was not put back: %s", answer)
        return sum(answer == 1 for answer in answers)


def _redelivered(channel: Any, entry: bytes) -> tuple[list[str], str]:
    """Where an entry of `unacked` goes, and what goes there. kombu 5.7: an entry is [message, exchange, routing key].

    Our own entries name their queue by the anonymous exchange; a stock worker's need the exchange's table.
    """
    message, exchange, routing_key = loads(bytes_to_str(entry))
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_info"]["redelivered"] = True
    priority = channel._get_message_priority(message, reverse=False)  # noqa: SLF001
    queues = channel._lookup(exchange, routing_key) or [routing_key]  # noqa: SLF001
    if not all(isinstance(queue, str) for queue in queues):
        raise TypeError("an entry that names no queue")
    return [channel._q_for_pri(queue, priority) for queue in queues], dumps(message)  # noqa: SLF001


def _requests_of(message: Any) -> int:
    """How many requests a message carries."""
    requests = (getattr(message, "headers", None) or {}).get(REQUESTS, 1)
    return requests if type(requests) is int and requests > 0 else 1


def _slices(tags: list[Any], size: int) -> Iterable[list[Any]]:
    return (tags[start : start + size] for start in range(0, len(tags), size))


class _UnreadableError(Exception):
    """What lay in a queue is no message: whoever may write to the broker may have put it there."""


#: What reading something that is not built as a message raises; kombu's JSON makes dates, decimals and bytes too, and
#: may be nested too deeply.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Raises `_UnreadableError` for whatever goes wrong with a message that is not built as one."""
    try:
        yield
    except _UNREADABLE as exc:
        raise _UnreadableError(type(exc).__name__) from exc


def _in_reading(exc: BaseException) -> bool:
    """Whether kombu raised this while it read a message, and not while it talked to the server."""
    frames = (frame for frame, _ in traceback.walk_tb(exc.__traceback__))
    return any(frame.f_globals.get("__name__") in ("kombu.utils.json", "kombu.utils.encoding") for frame in frames)


def _from_queue(raw: dict[str, Any], queue: str) -> dict[str, Any]:
    """Note in a raw message the queue that it came from: there it goes back to, whatever else its exchange feeds."""
    with _unreadable():
        raw["properties"].setdefault("delivery_info", {})["queue"] = queue
    return raw


def _refuse_no_task(body: Any) -> None:
    """Raises `TypeError` for a body that is none of a task: Celery 5.7's protocol 2, and it does not check."""
    args, kwargs, embedded = body
    if not (isinstance(args, list) and isinstance(kwargs, dict) and isinstance(embedded, dict)):
        raise TypeError("a task's body is its arguments, by place and by name, and what it embeds")


class Message(virtual.Message):  # type: ignore[misc]  # kombu has no types
    """A delivery, under a tag of its own. `delivery_info["redelivered"]` is true if it is not the first one."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        with _unreadable():
            if payload["properties"]["delivery_tag"] not in channel.taken:
                payload["properties"]["delivery_tag"] = channel._next_delivery_tag()  # noqa: SLF001
            super().__init__(payload, channel=channel, **kwargs)
            if self.content_type == _JSON:
                # Celery would do it at once, and end over what it cannot read, or put it into the log.
                body = self.decode()  # kept by kombu
                if "task" in (self.headers or ()):
                    _refuse_no_task(body)

    def _decode(self) -> Any:
        if self.content_type == _JSON and (self.accept is None or _JSON in self.accept):
            return read_json(self.body)
        return super()._decode()


class QoS(stock.QoS):  # type: ignore[misc]  # kombu has no types
    """The prefetch window of a channel. What is in hand is the business of `Leases`."""

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        self._leases: Leases = channel.connection.leases
        self._leases.bind(channel)
        super().__init__(channel, prefetch_count)
        self._swept_at = monotonic()

    def can_consume(self) -> bool:
        """Whether the window has room. What runs on since before a reconnect takes its place in it.

        The window counts requests; the last message taken may carry more than there is room for.
        """
        return self.room > 0

    @property
    def room(self) -> int:
        """How many more requests may be taken now."""
        in_hand = len(self._delivered) - len(self._dirty) + self._leases.detached + self._leases.packed
        return self.prefetch_count - in_hand if self.prefetch_count else TAKE_SLICE

    def append(self, message: Any, delivery_tag: str) -> None:
        """Take a delivery in hand."""
        if delivery_tag in self.channel.taken:
            self.channel.taken.discard(delivery_tag)
            self._leases.hold(None, delivery_tag, message, None)
            virtual.QoS.append(self, message, delivery_tag)
            return
        info = message.delivery_info
        where = ("", info["queue"]) if "queue" in info else (info["exchange"], info["routing_key"])
        entry = dumps([message._raw, *where])  # noqa: SLF001
        self._leases.hold(self.channel._create_client(), delivery_tag, message, entry)  # noqa: SLF001
        virtual.QoS.append(self, message, delivery_tag)

    def take(self, queue: str) -> list[tuple[str, bytes]]:
        """Take messages of a queue while there is room, of the highest priority alone: their tags, and they."""
        channel, room = self.channel, self.room
        if room <= 0:
            return []
        return self._leases.take(channel._create_client(), channel._q_for_pri(queue, 0), queue, room)  # noqa: SLF001

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge; the broker hears of it within 10 ms, or when it is back."""
        self._leases.ack(delivery_tag)
        self._quick_ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:  # noqa: FBT002 - kombu's signature
        """Discard, or put back to the front of the queue (stock kombu: to its end)."""
        (self._leases.requeue if requeue else self._leases.ack)(delivery_tag)
        self._quick_ack(delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:  # noqa: ARG002 - kombu's signature
        """Put everything of this channel back: `basic_recover`."""
        for tag in reversed(list(self._delivered)):
            self._leases.requeue(tag)
        self._delivered.clear()

    def restore_unacked_once(self, stderr: Any = None) -> None:  # noqa: ARG002 - kombu's signature
        """The channel closes. Nothing is put back here; stock kombu would run again what is still running."""
        self._on_collect.cancel()
        self._leases.detach(list(self._delivered))
        self._delivered.clear()
        self._delivered.restored = True

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Sweep, in the consumer's loop; kombu calls this every `unacked_restore_interval`, and at each empty poll."""
        if not self.channel.work_queues:
            return  # Flower and `celery inspect` listen to events and answers only, and need no right to touch work
        every_s = self.channel.unacked_restore_interval
        if monotonic() - self._swept_at >= every_s / 2:
            self._swept_at = monotonic()
            self._leases.sweep(self.channel._create_client(), every_s)  # noqa: SLF001


@contextlib.contextmanager
def _full_is_away() -> Iterator[None]:
    """To a worker that starts, a server that is too full for its queues is one that is away: it tries again.

    Celery does so at once, and to it a refusal would be the end. Raises `redis.ConnectionError`.
    """
    try:
        yield
    except redis.OutOfMemoryError as exc:
        logger.warning("the broker has no room for a queue: %s", exc)
        sleep(FULL_WAIT_S)
        raise redis.ConnectionError(str(exc)) from exc


class Channel(stock.Channel):  # type: ignore[misc]  # kombu has no types
    """A channel with one client for all its commands; stock kombu makes a `redis.Redis` per command, 48 µs each."""

    QoS = QoS
    Message = Message
    _shared: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Tags of messages that were taken and are being delivered.
        self.taken: set[str] = set()
        #: Queues whose messages nobody acknowledges: what was noted of those would stay noted.
        self._unacknowledged: set[str] = set()
        if self.global_keyprefix:
            raise ValueError("the fleet's transport has no global_keyprefix: give the fleet a database of its own")

    def _create_client(self, asynchronous: bool = False) -> Any:  # noqa: FBT002 - kombu's signature
        if asynchronous:
            return super()._create_client(asynchronous=True)
        if self._shared is None or self._shared.connection_pool is not self._pool:
            self._shared = super()._create_client()
        return self._shared

    def _get(self, queue: str) -> dict[str, Any]:
        return _from_queue(super()._get(queue), queue)

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        """Consume."""
        if no_ack:
            self._unacknowledged.add(queue)
        else:
            self._unacknowledged.discard(queue)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def queue_declare(self, *args: Any, **kwargs: Any) -> Any:
        """Declare."""
        with _full_is_away():
            return super().queue_declare(*args, **kwargs)

    def queue_bind(self, *args: Any, **kwargs: Any) -> None:
        """Bind."""
        with _full_is_away():
            super().queue_bind(*args, **kwargs)

    @property
    def work_queues(self) -> list[str]:
        """The queues that are consumed here and acknowledged; answers of Celery's remote control, for one, are not."""
        return [queue for queue in self.active_queues if queue not in self._unacknowledged]

    def _brpop_read(self, **options: Any) -> Any:
        """Deliver the message that was waited for, then as many more as are there and the window has room for.

        One by one each would cost a turn of the loop and two round trips.
        """
        before = self.connection.delivered
        try:
            answer = super()._brpop_read(**options)
        except _UNREADABLE as exc:
            if self.connection.delivered != before or not _in_reading(exc):
                raise
            queues = ", ".join(self.active_queues)
            logger.error("a message of %s cannot be read and is dropped: %s", queues, type(exc).__name__)
            answer = True
        for queue in self.work_queues:
            for _ in range(TAKES):
                if not self._take(queue):
                    break
        return answer

    def _take(self, queue: str) -> int:
        """Take and deliver what one command gives; how many messages that was."""
        try:
            taken = self.qos.take(queue)
        except _AWAY as exc:
            # The next wait for a message will notice it too, and Celery then connects again.
            logger.debug("nothing more taken from %s: %s", queue, type(exc).__name__)
            return 0
        self.taken.update(tag for tag, _ in taken)
        for tag, raw in taken:
            try:
                message = read_json(raw)
                message["properties"].pop("delivery_tag")  # its sender's; without one it is no message
                message["properties"]["delivery_tag"] = tag
            except _UNREADABLE:
                logger.error("a message of %s cannot be read and stays in unacked", queue)
                self.taken.discard(tag)
                continue
            self.connection._deliver(message, queue)  # noqa: SLF001 - as kombu's own `_brpop_read` does
            self.taken.discard(tag)  # where it was left out, nobody else does
        return len(taken)

    def push(self, queue: str, messages: Sequence[bytes]) -> None:
        """Publish messages that are whole already to a queue, the first one first, all of them or none.

        kombu 5.7 (transport/redis.py, `_put`): a queue is a list of its name, the oldest message at its right end.
        Raises `OperationalError`, after which they may or may not be there.
        """
        try:
            self._create_client().lpush(self._q_for_pri(queue, 0), *messages)
        except _AWAY as exc:
            raise OperationalError(str(exc)) from exc

    def close(self) -> None:
        """Close. Over a dead socket stock kombu breaks off at the reply that it waits for, and stays half open."""
        try:
            super().close()
        except self.connection_errors:
            if not self.closed:
                super().close()


class Transport(stock.Transport):  # type: ignore[misc]  # kombu has no types
    """kombu's Redis transport with leases."""

    Channel = Channel
    leases: ClassVar[Leases] = Leases()
    #: Messages that were handed on.
    delivered = 0

    def _deliver(self, message: dict[str, Any], queue: str) -> None:
        """Hand a message on. What is no message is left out, since each of its kind would end one worker more."""
        self.delivered += 1
        try:
            super()._deliver(_from_queue(message, queue), queue)
        except _UnreadableError as exc:
            logger.error("a message of %s cannot be read and is left out: %s", queue, exc)


class Connection(kombu.Connection):  # type: ignore[misc]  # kombu has no types
    """A connection that shows the broker's URL as operators write it. Flower chooses by it how to ask for queues."""

    def as_uri(self, *args: Any, **kwargs: Any) -> str:
        """The URL for people; kombu and Celery only show it (kombu 5.7, celery 5.7)."""
        shown = str(super().as_uri(*args, **kwargs))
        plain = "rediss" if self.ssl else "redis"
        return plain + shown.removeprefix(SCHEME) if shown.startswith((f"{SCHEME}:", f"{SCHEME}+")) else shown


def read_json(raw: bytes | str) -> Any:
    """What kombu's own `loads` reads, quicker where the text has none of the types that it adds to JSON."""
    if (b"__type__" if isinstance(raw, bytes) else "__type__") not in raw:  # type: ignore[operator]  # same type
        try:
            return from_json(raw)
        except ValueError:
            pass  # kombu may read it, and names what is wrong if it cannot
    return loads(bytes_to_str(raw))


def fleet_url(broker_url: str) -> str:
    """The URL that makes kombu and Celery talk to this Redis by our transport: `fleet://…`, `fleet+socket://…`."""
    TRANSPORT_ALIASES[SCHEME] = f"{__name__}:{Transport.__name__}"
    parts = urlsplit(broker_url)
    query = parts.query
    if parts.scheme == "rediss" and "ssl_cert_reqs=" not in query:
        # kombu knows TLS by the scheme `rediss` or by these options; without either it would talk in the clear.
        query = f"{query}&ssl_cert_reqs=required".lstrip("&")
    rest = broker_url.partition("://")[2].partition("?")[0]
    kind = "+socket" if parts.scheme.endswith("+socket") else ""
    return f"{SCHEME}{kind}://{rest}" + (f"?{query}" if query else "")


def transport_options(lease_s: float, *, sweep_s: float = 5.0) -> dict[str, Any]:
    """Options for `broker_transport_options`. Seconds; a dead holder's messages run again after the sum at most."""
    return {
        "visibility_timeout": lease_s,
        "unacked_restore_interval": sweep_s,
        # For a stock worker that still shares the server: sweep each time, and let no dead sweeper block the others.
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 30,
    }
