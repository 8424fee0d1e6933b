"""Our transport on a real server: what it assumes of kombu 5.7, and that leases, acknowledgements and hand-backs hold.

Where stock kombu has no such safeguard the same test runs on it too and shows the harm (`stock`).
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import kombu
import pytest
import redis
from celery import Celery
from celery.worker import state
from celery.worker.request import Request
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.transport import redis as stock
from kombu.transport import virtual
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.broker import make_app
from common.transport import (
    ACK_BATCH,
    REQUESTS,
    RESTORE_SLICE,
    Channel,
    Leases,
    Message,
    QoS,
    Transport,
    fleet_url,
    read_json,
    transport_options,
)
from tests.servers import Process, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LEASE_S = 1.2
SWEEP_S = 0.3
#: A lease that ran out is noticed within this; the machine may be busy.
SLACK_S = 2.0

OURS_AND_STOCK = pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])


class Server:
    """A server with an append-only file, which can be stopped and started again."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket = folder / "s.sock"
        self._command = [
            binary, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket),
            "--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip
        self.client = redis.Redis(unix_socket_path=str(self.socket))
        self.start()

    def start(self) -> None:
        self._process = Process("server", self._command, self._folder, {"PATH": os.environ.get("PATH", os.defpath)})
        wait_until(self._answers, 20, "the server answers")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """Kill it: what was answered is in the file."""
        self._process.kill()
        self.client.connection_pool.disconnect()

    def queue(self, name: str = "q") -> list[dict[str, Any]]:
        """The messages of a queue, the next one first."""
        return [json.loads(raw) for raw in reversed(self.client.lrange(name, 0, -1))]

    def bodies(self, name: str = "q") -> list[int]:
        return [int(message["body"]) for message in self.queue(name)]

    def unacked(self) -> int:
        hashed, indexed = self.client.pipeline().hlen("unacked").zcard("unacked_index").execute()
        assert hashed == indexed
        return int(hashed)

    def calls(self, command: str) -> int:
        return int(self.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

    def clear(self) -> None:
        self.client.flushall()
        self.client.config_resetstat()
        self.client.config_set("maxmemory", 0)


@pytest.fixture(scope="module")
def one_server(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(server, tmp_path_factory.mktemp("broker"))
    try:
        yield started
    finally:
        started.client.close()
        started.stop()


@pytest.fixture
def broker(one_server: Server) -> Server:
    one_server.clear()
    return one_server


class Holder:
    """One process' worth of transport: a connection that consumes `q`, with leases of its own."""

    def __init__(self, broker: Server, *, ours: bool = True, prefetch: int = 0, lease_s: float = LEASE_S) -> None:
        self._prefetch = prefetch
        self._broker = broker
        self._options = {**transport_options(lease_s, sweep_s=SWEEP_S), "body_encoding": "utf-8"}
        # Two holders in one test process are two processes of a fleet.
        self.leases = Leases()
        self._transport = type("OwnTransport", (Transport,), {"leases": self.leases}) if ours else stock.Transport
        self.got: list[Any] = []
        self.connect()

    def connect(self) -> None:
        self.connection = Connection(self._broker.url, transport=self._transport, transport_options=self._options)
        self.channel = self.connection.default_channel
        self._consumer = Consumer(self.channel, [Queue("q")], on_message=self.got.append, prefetch_count=self._prefetch)
        self._consumer.consume()

    def send(self, *bodies: int, **headers: Any) -> None:
        with Producer(self.channel) as producer:
            for body in bodies:
                producer.publish(body, routing_key="q", serializer="json", headers=headers)

    def drain(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        """Take what comes, and sweep, as a worker's loop does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            try:
                self.connection.drain_events(timeout=0.1)
            except TimeoutError:
                self.channel.qos.restore_visible()

    def take(self, *bodies: int) -> list[Any]:
        """Wait for these messages; returns them and forgets them."""
        self.drain(10, lambda: len(self.got) >= len(bodies))
        taken, self.got[:] = list(self.got), []
        assert [int(message.body) for message in taken] == list(bodies)
        return taken

    def close(self) -> None:
        self.got.clear()
        self.connection.close()
        self.leases.hand_back()


@pytest.fixture
def holders(broker: Server) -> Iterator[Callable[..., Holder]]:
    with ExitStack() as stack:

        def make(**options: Any) -> Holder:
            holder = Holder(broker, **options)
            stack.callback(holder.close)
            return holder

        yield make


HOLDING = """
import signal, sys, time
from kombu import Connection, Consumer, Queue
from common.transport import fleet_url, transport_options
url, lease_s, count, ours = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "ours"
got = []
connection = Connection(fleet_url(url) if ours else url, transport_options=transport_options(lease_s, sweep_s=999))
Consumer(connection.default_channel, [Queue("q")], on_message=got.append, prefetch_count=count).consume()
while len(got) < count:
    connection.drain_events(timeout=10)
print("holding", flush=True)
while signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}) == signal.SIGUSR1:
    got[0].requeue() if sys.argv[5] == "requeue" else got[0].ack()
    time.sleep(0.3)
    print("did", flush=True)
"""


@pytest.fixture
def holding(broker: Server, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start processes that take `count` messages and then act on signals: USR1 acts on the first one, USR2 ends."""
    started: list[Process] = []

    def start(count: int = 1, *, ours: bool = True, action: str = "ack", lease_s: float = LEASE_S) -> Process:
        script = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})" + HOLDING
        words = [broker.url, str(lease_s), str(count), "ours" if ours else "stock", action]
        process = Process("holder", [sys.executable, "-c", script, *words], tmp_path, environment())
        started.append(process)
        wait_until(lambda: b"holding" in process.stdout or not process.running, 30, "the holder holds")
        assert process.running, process.stderr
        return process

    yield start
    for process in started:
        process.kill()


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": path, "LC_ALL": "C.UTF-8", **extra}


# -- what is assumed of kombu and Celery -------------------------------------------------------------------------------


def test_kombu_is_of_the_series_that_the_transport_was_written_for() -> None:
    assert kombu.__version__.startswith("5.7.")


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (virtual.Message.__init__, "(self, payload, channel=None, **kwargs)"),
        (virtual.QoS.__init__, "(self, channel, prefetch_count=0)"),
        (virtual.QoS.append, "(self, message, delivery_tag)"),
        (virtual.QoS.can_consume, "(self)"),
        (virtual.QoS.restore_unacked_once, "(self, stderr=None)"),
        (virtual.Channel.basic_ack, "(self, delivery_tag, multiple=False)"),
        (virtual.Channel.basic_reject, "(self, delivery_tag, requeue=False)"),
        (virtual.Channel._next_delivery_tag, "(self)"),
        (virtual.Channel._lookup, "(self, exchange, routing_key, default=None)"),
        (virtual.Channel._get_message_priority, "(self, message, reverse=False)"),
        (virtual.Transport._deliver, "(self, message, queue)"),
        (stock.QoS.__init__, "(self, *args, **kwargs)"),
        (stock.QoS.append, "(self, message, delivery_tag)"),
        (stock.QoS.ack, "(self, delivery_tag)"),
        (stock.QoS.reject, "(self, delivery_tag, requeue=False)"),
        (stock.QoS.restore_unacked, "(self, client=None)"),
        (stock.QoS.restore_visible, "(self, start=0, num=10, interval=10)"),
        (stock.Channel.__init__, "(self, *args, **kwargs)"),
        (stock.Channel._create_client, "(self, asynchronous=False)"),
        (stock.Channel._connparams, "(self, asynchronous=False)"),
        (stock.Channel._get, "(self, queue)"),
        (stock.Channel._brpop_read, "(self, **options)"),
        (stock.Channel._q_for_pri, "(self, queue, pri)"),
        (stock.Channel.close, "(self)"),
        (stock.Channel.queue_declare, "(self, queue=None, passive=False, **kwargs)"),
        (stock.Channel.queue_bind, "(self, queue, exchange=None, routing_key='', arguments=None, **kwargs)"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_what_is_overridden_or_called_has_the_expected_signature(function: Any, signature: str) -> None:
    assert str(inspect.signature(function)) == signature


def test_nothing_new_in_kombu_writes_to_unacked_behind_our_back() -> None:
    """Every method of the stock QoS is either overridden here or known to be unused then."""
    known = {"pipe_or_acquire", "_remove_from_indices", "restore_by_tag", "restore_at_shutdown"}
    keys = {"unacked_key", "unacked_index_key", "unacked_mutex_key", "unacked_mutex_expire", "visibility_timeout"}
    theirs = {name for name in vars(stock.QoS) if not name.startswith("__")}
    assert theirs - set(vars(QoS)) == known | keys
    assert {name for name in vars(virtual.QoS) if callable(getattr(virtual.QoS, name)) and name[:2] != "__"} == {
        "ack", "append", "can_consume", "can_consume_max_estimate", "get", "_flush", "reject", "restore_unacked",
        "restore_unacked_once", "restore_visible",
    }  # fmt: skip
    writers = [name for name, value in vars(stock.Channel).items() if "unacked_key" in source(value)]
    assert writers == ["_restore"], "only _restore, which the QoS that we replaced called"


def source(value: Any) -> str:
    return inspect.getsource(value) if inspect.isfunction(value) else ""


def test_kombu_makes_our_classes_from_the_class_of_the_transport(holders: Callable[..., Holder]) -> None:
    holder = holders()
    holder.send(1)
    (message,) = holder.take(1)
    assert isinstance(message, Message)
    assert isinstance(holder.channel, Channel)
    assert isinstance(holder.channel.qos, QoS)
    assert holder.channel.connection.leases is holder.leases
    assert Transport.leases is not holder.leases


def test_attributes_that_are_touched_are_there(holders: Callable[..., Holder]) -> None:
    channel = holders(ours=False).channel
    assert (channel.unacked_key, channel.unacked_index_key) == ("unacked", "unacked_index")
    assert (channel.unacked_restore_interval, channel.visibility_timeout) == (SWEEP_S, LEASE_S)
    assert channel._create_client().connection_pool is channel._pool
    assert channel._create_client() is not channel._create_client(), "kombu caches it itself: drop our override"
    assert channel._lookup("", "q") == ["q"]
    assert channel._q_for_pri("q", 0) == "q"
    assert {"host", "port", "db", "username", "password", "socket_timeout"} <= set(channel._connparams())
    assert isinstance(channel.connection_errors, tuple)
    assert channel.closed is False
    qos = channel.qos
    qos._quick_ack("tag")
    assert qos._dirty == {"tag"}
    assert not qos._delivered
    assert qos._delivered.restored is False
    assert callable(qos._on_collect.cancel)


def test_messages_that_are_there_are_taken_at_once(broker: Server, holders: Callable[..., Holder]) -> None:
    """In order, as many as the window has room for, noted in `unacked` in the step that takes them."""
    holder = holders(prefetch=8)
    holder.send(*range(60))
    broker.client.config_resetstat()

    holder.drain(5, lambda: len(holder.got) >= 8)

    assert [int(message.body) for message in holder.got] == list(range(8))
    assert len({message.delivery_tag for message in holder.got}) == 8
    assert broker.unacked() == 8
    assert broker.bodies() == list(range(8, 60))
    assert broker.calls("brpop") <= 2
    assert broker.calls("ltrim") == 1
    holder.got[3].ack()
    wait_until(lambda: broker.unacked() == 7, 5, "the acknowledgement is written")
    holder.drain(5, lambda: len(holder.got) >= 9)
    assert int(holder.got[8].body) == 8


@pytest.mark.parametrize("let_go", ["ack", "requeue", "park"])
def test_the_window_counts_requests(broker: Server, holders: Callable[..., Holder], let_go: str) -> None:
    """A message may carry several; what is let go makes room for as many."""
    holder = holders(prefetch=12)
    holder.send(*range(40), **{REQUESTS: 4})

    holder.drain(10, lambda: len(holder.got) >= 3)
    holder.drain(0.3)
    assert [int(message.body) for message in holder.got] == [0, 1, 2]

    first = holder.got.pop(0)
    if let_go == "park":
        holder.leases.park(first.delivery_tag)
        first.ack()  # as Celery does then
    else:
        getattr(first, let_go)()
    wait_until(lambda: len(holder.leases) == 2, 5, "it is let go")
    holder.drain(5, lambda: len(holder.got) >= 3)
    holder.drain(0.3)
    assert len(holder.got) == 3
    assert holder.channel.qos.room == 0


def test_a_take_stops_where_the_window_is_full(broker: Server, holders: Callable[..., Holder]) -> None:
    """Behind messages of one request each come some of several: at most the last one goes over."""
    holder = holders(prefetch=12)
    holder.send(*range(10))
    holder.send(*range(10, 40), **{REQUESTS: 4})

    holder.drain(10, lambda: len(holder.got) >= 11)
    holder.drain(0.3)
    assert [int(message.body) for message in holder.got] == list(range(11))
    for message in holder.got[:10]:
        message.ack()
    wait_until(lambda: len(holder.leases) == 1, 5, "they are acknowledged")
    holder.drain(10, lambda: len(holder.got) >= 13)
    holder.drain(0.3)

    assert [int(message.body) for message in holder.got[10:]] == [10, 11, 12]


def test_a_prompt_does_not_say_how_many_requests_a_message_carries(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    holder = holders(prefetch=12)
    with Producer(holder.channel) as producer:
        for _ in range(20):
            text = '"headers": {"requests": 64, \\"headers\\": {"requests": 64'
            producer.publish({"text": text}, routing_key="q", serializer="json")

    holder.drain(10, lambda: len(holder.got) >= 12)
    holder.drain(0.3)

    assert len(holder.got) == 12


def test_entries_that_cannot_be_read_do_not_keep_others_from_coming_back(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    """The oldest come first, and a sweep sees a slice of them at a time."""
    strange = {f"strange-{number}": number for number in range(2 * RESTORE_SLICE)}
    broker.client.zadd("unacked_index", strange)
    broker.client.hset("unacked", mapping=dict.fromkeys(strange, "no entry"))
    doomed = holders()
    doomed.send(1)
    doomed.take(1)
    doomed.leases.alive = lambda: False
    other = holders()

    other.drain(3 * LEASE_S + SLACK_S, lambda: other.got)

    assert [int(message.body) for message in other.got] == [1]
    assert set(broker.client.hkeys("unacked")) >= {tag.encode() for tag in strange}, "they are kept"


def test_a_message_that_says_nonsense_carries_one_request(broker: Server, holders: Callable[..., Holder]) -> None:
    holder = holders(prefetch=3)
    for said in (-1, 0, "4", None, True, 2.5):
        holder.send(1, **{REQUESTS: said})

    holder.drain(10, lambda: len(holder.got) >= 3)
    holder.drain(0.3)

    assert len(holder.got) == 3


def test_of_messages_that_nobody_acknowledges_none_is_noted(broker: Server, holders: Callable[..., Holder]) -> None:
    """Answers to `celery inspect` for one: a program that has left would never acknowledge them."""
    holder = holders()
    holder._consumer.cancel()
    consumer = Consumer(holder.channel, [Queue("q")], on_message=holder.got.append, no_ack=True)
    consumer.consume()
    holder.send(*range(8))

    holder.take(*range(8))

    assert broker.unacked() == 0
    assert broker.bodies() == []


def test_a_short_queue_is_shared_out(broker: Server, holders: Callable[..., Holder]) -> None:
    """Who comes first takes a quarter, so that no worker idles beside one that took everything."""
    holder = holders()
    holder.send(*range(8))
    taken = holder.channel.qos.take("q")
    assert [int(json.loads(message)["body"]) for _, message in taken] == [0, 1]
    assert broker.unacked() == 2


def test_a_burst_is_taken_in_one_turn_of_the_loop(broker: Server, holders: Callable[..., Holder]) -> None:
    """An engine that works on the first requests leaves the loop little of a small machine."""
    holder = holders()
    holder.send(*range(100))
    holder.connection.drain_events(timeout=5)
    assert [int(message.body) for message in holder.got] == list(range(100))


def test_what_was_taken_and_never_delivered_comes_back(broker: Server, holders: Callable[..., Holder]) -> None:
    """The taker died between: stock kombu loses a message that it has popped and not noted."""
    holder = holders()
    holder.send(*range(4))
    assert len(holder.channel.qos.take("q")) == 1
    holder.connection.transport.cycle.close()
    other = holders()
    other.take(1, 2, 3)
    (late,) = other.take(0)
    assert late.delivery_info["redelivered"] is True


def test_a_message_that_cannot_be_read_does_not_hold_up_its_neighbours(
    broker: Server, holders: Callable[..., Holder], caplog: pytest.LogCaptureFixture
) -> None:
    holder = holders()
    holder.send(0, 1)
    broker.client.lpush("q", "not JSON", "{}")
    holder.send(*range(4, 30))
    holder.take(0, 1, *range(4, 30))
    assert caplog.text.count("cannot be read") == 2


NO_MESSAGE = [
    b"not JSON: a prompt",
    b"\xff\xfe",
    b"5",
    b"[]",
    b"[" * 10_000,
    b'{"__type__": "decimal", "__value__": "no number"}',
    b'{"__type__": "datetime", "__value__": 5}',
    b'{"__type__": "bytes", "__value__": 5}',
    b"{}",
    b'{"properties": {}}',
    b'{"properties": {"delivery_tag": "t", "delivery_info": 5}}',
    b'{"body": "x", "properties": {"delivery_tag": "t", "body_encoding": "base64"}}',
    b'{"body": "x", "properties": {"delivery_tag": "t", "body_encoding": "none such"}}',
]


@pytest.mark.parametrize("at", [0, 20], ids=["waited for", "taken with others"])
@pytest.mark.parametrize("raw", NO_MESSAGE, ids=range(len(NO_MESSAGE)))
def test_what_is_no_message_does_not_end_who_takes_it(
    broker: Server, holders: Callable[..., Holder], caplog: pytest.LogCaptureFixture, raw: bytes, at: int
) -> None:
    """Celery's worker ends on what its transport raises, and so would the next one, and the next."""
    holder = holders()
    holder.send(*range(at))
    broker.client.lpush("q", raw)
    holder.send(*range(at, 40))
    holder.take(*range(40))
    assert any(said in caplog.text for said in ("is dropped", "is left out", "stays in unacked"))
    assert "prompt" not in caplog.text
    assert not holder.channel.taken


NO_TASK = [1e308, None, True, 5, "[[], {}", "5", "null", "[]", "[[], {}]", "[5, {}, {}]", "[[], 5, {}]", "[[], {}, 5]"]


@pytest.mark.parametrize("at", [0, 20], ids=["waited for", "taken with others"])
@pytest.mark.parametrize("body", NO_TASK, ids=range(len(NO_TASK)))
def test_a_task_whose_body_is_none_does_not_end_who_takes_it(
    broker: Server, holders: Callable[..., Holder], caplog: pytest.LogCaptureFixture, body: object, at: int
) -> None:
    """Celery reads the body as soon as a message comes, and its worker ends on what that raises."""
    raw = {
        "body": body, "content-type": "application/json", "content-encoding": "utf-8",
        "headers": {"task": "t", "id": "i"}, "properties": {"delivery_tag": "t", "body_encoding": "utf-8"},
    }  # fmt: skip
    holder = holders()
    holder.send(*range(at))
    broker.client.lpush("q", json.dumps(raw))
    holder.send(*range(at, 40))
    holder.take(*range(40))
    assert "is left out" in caplog.text


@pytest.mark.parametrize("queue", [b"null", b"true", b"[]", b'{"a":1}', b'"unacked"'])
def test_an_entry_that_names_no_queue_does_not_keep_a_dead_ones_from_coming_back(
    broker: Server, holders: Callable[..., Holder], queue: bytes
) -> None:
    dead = holders()
    dead.send(1)
    (message,) = dead.take(1)
    raw = broker.client.hget("unacked", message.delivery_tag)
    dead.connection.transport.cycle.close()
    dead.leases.alive = lambda: False
    for number in range(2 * RESTORE_SLICE):
        entry = json.dumps([json.loads(raw)[0], "", "here"]).encode().replace(b'"here"', queue)
        broker.client.hset("unacked", f"older{number}", entry)
        broker.client.zadd("unacked_index", {f"older{number}": 1.0})
    (late,) = holders().take(1)
    assert late.delivery_info["redelivered"] is True


@pytest.mark.parametrize("raw", NO_MESSAGE, ids=range(len(NO_MESSAGE)))
def test_what_is_no_message_does_not_keep_a_dead_ones_from_coming_back(
    broker: Server, holders: Callable[..., Holder], raw: bytes
) -> None:
    """A sweep looks at the oldest first, again and again."""
    dead = holders()
    dead.send(1)
    dead.take(1)
    dead.connection.transport.cycle.close()
    dead.leases.alive = lambda: False
    broker.client.hset("unacked", "older", b"[" + raw + b',"","q"]')
    broker.client.zadd("unacked_index", {"older": 1.0})
    (late,) = holders().take(1)
    assert late.delivery_info["redelivered"] is True


def test_what_the_connection_raises_is_not_taken_for_an_unreadable_message(
    broker: Server, holders: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be raised again and again, and nobody would connect anew."""
    holder = holders()
    holder.send(1)

    def torn(*_: object, **__: object) -> None:
        raise AttributeError("a connection that is gone")

    monkeypatch.setattr(holder.channel.client, "parse_response", torn)
    with pytest.raises(AttributeError, match="gone"):
        holder.drain(10)


def test_what_a_consumer_raises_is_not_taken_for_an_unreadable_message(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    def fail(_: object) -> None:
        raise ValueError("a consumer's own")

    holder = holders()
    holder._consumer.on_message = fail
    holder.send(1)
    with pytest.raises(ValueError, match="a consumer's own"):
        holder.drain(10)
    assert broker.unacked() == 1


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "é\U0001f642"], "n": 12345678901234567890123},
        {"__type__": "text of a user"},
        {"when": datetime(2026, 11, 30, tzinfo=UTC), "raw": b"x", "text": '"__type__"'},
        ["\ud800"],
    ],
)
def test_json_is_read_as_kombu_reads_it(value: Any) -> None:
    text = kombu_dumps(value)
    assert read_json(text) == read_json(text.encode()) == kombu_loads(text)
    with pytest.raises(ValueError, match="line 1"):
        read_json(text[:-1])


def test_entries_have_the_layout_of_stock_kombu(broker: Server, holders: Callable[..., Holder]) -> None:
    """[message, exchange, routing key] by tag, and the tag's score in seconds: old workers and KEDA read them too."""
    layouts = []
    for ours in (False, True):
        holder = holders(ours=ours)
        began = time.time()
        holder.send(1)
        (message,) = holder.take(1)
        tag = message.delivery_tag
        entry = json.loads(broker.client.hget("unacked", tag))
        assert began - 0.1 <= broker.client.zscore("unacked_index", tag) <= time.time() + 0.1
        layouts.append((type(entry), len(entry), set(entry[0]), entry[0]["body"], *entry[1:]))
        message.ack()
        wait_until(lambda: broker.unacked() == 0, 5, "the acknowledgement is written")
    assert layouts[0] == layouts[1]


@OURS_AND_STOCK
def test_old_and_new_workers_restore_each_others_messages(
    broker: Server, holders: Callable[..., Holder], ours: bool
) -> None:
    """A rolling upgrade loses nothing. `ours` is who restores."""
    holder = holders(ours=not ours)
    holder.send(1)
    (message,) = holder.take(1)
    sweeper = holders(ours=ours)
    if ours:
        holder.connection.transport.cycle.close()
        (again,) = sweeper.take(1)
        assert again.delivery_tag != message.delivery_tag
    else:
        sweeper.channel.qos.restore_by_tag(message.delivery_tag)
        (again,) = sweeper.take(1)
    assert again.delivery_info["redelivered"] is True
    again.ack()
    wait_until(lambda: broker.unacked() == 0, 5, "all is acknowledged")


def test_what_the_transport_needs_of_celery_exists() -> None:
    conf = Celery(set_as_current=False).conf
    # What still runs takes its place in our prefetch window; Celery must not take it off a second time.
    assert conf.worker_enable_prefetch_count_reduction is True
    assert isinstance(state.scheduled_requests, WeakSet)
    assert isinstance(Request.message, property)
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is False


@pytest.mark.parametrize(
    ("url", "ours", "params"),
    [
        ("redis://:pw@host:7/2", "fleet://:pw@host:7/2", {"host": "host", "port": 7, "db": 2, "password": "pw"}),
        ("redis://", "fleet://", {"host": "127.0.0.1", "port": 6379, "db": 0}),
        ("redis+socket:///tmp/x.s?virtual_host=3", "fleet+socket:///tmp/x.s?virtual_host=3", {"path": "/tmp/x.s"}),
        ("rediss://h/1", "fleet://h/1?ssl_cert_reqs=required", {"connection_class": redis.SSLConnection}),
        ("rediss://h?ssl_cert_reqs=none", "fleet://h?ssl_cert_reqs=none", {"connection_class": redis.SSLConnection}),
    ],
)
def test_a_url_selects_the_transport_and_keeps_where_the_broker_is(url: str, ours: str, params: dict[str, Any]) -> None:
    assert fleet_url(url) == ours
    connection = Celery(broker=ours, set_as_current=False).connection_for_read()
    assert connection.get_transport_cls() is Transport
    assert connection.clone().get_transport_cls() is Transport

    class Unconnected(Channel):
        def __init__(self) -> None:
            self.connection = connection.transport

    found = Unconnected()._connparams()
    assert {name: found[name] for name in params} == params


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host:7/2", "redis://user:**@host:7/2"),
        ("redis+socket:///tmp/x.s?virtual_host=0", "redis+socket:///tmp/x.s"),
        ("rediss://:pw@host/1", "rediss://:**@host:6379/1"),
    ],
)
def test_an_apps_connection_is_shown_as_operators_write_it(url: str, shown: str) -> None:
    """Flower chooses by this URL how to ask the broker for its queues; `fleet://` it does not know."""
    connection = make_app(url).connection_for_read()

    assert connection.get_transport_cls() is Transport
    assert connection.as_uri() == shown
    assert connection.clone().as_uri() == shown


def test_leases_work_over_a_unix_socket(broker: Server) -> None:
    url = fleet_url(f"redis+socket://{broker.socket}?virtual_host=0")
    own = type("OwnTransport", (Transport,), {"leases": Leases()})
    with Connection(url, transport_options=transport_options(LEASE_S, sweep_s=SWEEP_S)) as connection:
        connection.transport_cls = own
        with connection.SimpleQueue("q") as queue:
            queue.put("x")
            message = queue.get(timeout=5)
            first = broker.client.zscore("unacked_index", message.delivery_tag)
            renewed = lambda: broker.client.zscore("unacked_index", message.delivery_tag) > first  # noqa: E731
            wait_until(renewed, 10, "the lease is renewed")
            message.ack()
            wait_until(lambda: broker.unacked() == 0, 5, "the acknowledgement is written")
    own.leases.hand_back()


def test_publishing_in_batches_still_works(broker: Server, holders: Callable[..., Holder]) -> None:
    holder = holders()
    assert holder.connection.transport.supports_batch_publish
    assert holder.channel.supports_batch_publish
    with Producer(holder.channel) as producer, producer.batch(max_size=100):
        for number in range(250):
            producer.publish(number, routing_key="other", serializer="json")
            assert broker.client.llen("other") % 100 == 0
    assert broker.bodies("other") == list(range(250))


def test_the_channels_client_is_made_once(holders: Callable[..., Holder]) -> None:
    channel = holders().channel
    first = channel._create_client()
    assert channel._create_client() is first
    channel._disconnect_pools()
    assert channel._create_client() is not first, "a client of a pool that was given up"


# -- leases ------------------------------------------------------------------------------------------------------------


@OURS_AND_STOCK
def test_messages_held_beyond_their_lease_are_not_delivered_again(holders: Callable[..., Holder], ours: bool) -> None:
    """The prefetched ones neither. Stock kombu hands them to the next worker while the first still works on them."""
    holder, other = holders(ours=ours), holders(ours=ours)
    holder.send(1, 2, 3)
    holder.drain(5, lambda: len(holder.got) == 3)
    other.drain(2.5 * LEASE_S, lambda: other.got)
    assert bool(other.got) is not ours


def test_a_lease_is_renewed_three_times_before_it_runs_out(broker: Server, holders: Callable[..., Holder]) -> None:
    holder = holders()
    holder.send(1)
    (message,) = holder.take(1)
    scores: set[float] = set()

    def seen() -> int:
        scores.add(broker.client.zscore("unacked_index", message.delivery_tag))
        return len(scores)

    wait_until(lambda: seen() >= 6, 20, "it is renewed again and again")
    between = [later - earlier for earlier, later in itertools.pairwise(sorted(scores))]
    # By the server's clock; the shortest one, for a busy machine may delay any.
    assert min(between) < LEASE_S / 3


def test_a_delivery_that_is_just_being_written_is_not_taken_for_lost(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    holder = holders()
    holder.send(1)
    (message,) = holder.take(1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with redis.Redis(port=port, socket_timeout=LEASE_S, retry=Retry(NoBackoff(), 0)) as slow:
            holder.leases.hold(slow, "tag", message, json.dumps([message._raw, "", "q"]))  # over several renewals
    wait_until(lambda: broker.unacked() == 2, 5, "the entry is written")
    holder.leases.ack("tag")
    wait_until(lambda: broker.unacked() == 1, 5, "it was still ours, so it is acknowledged")


def test_a_stale_engine_host_loses_its_messages(broker: Server, holders: Callable[..., Holder]) -> None:
    holder, other = holders(), holders()
    holder.send(1)
    (message,) = holder.take(1)
    holder.leases.alive = lambda: False
    (again,) = other.take(1)
    assert again.delivery_info["redelivered"] is True
    holder.leases.alive = lambda: True
    holder.drain(LEASE_S)  # it learns that it lost the lease
    assert broker.unacked() == 1, "what is another's by now is not renewed"
    message.ack()
    other.drain(0.2)
    assert broker.unacked() == 1, "what is another's by now is not acknowledged"
    again.ack()
    wait_until(lambda: broker.unacked() == 0, 5, "all is acknowledged")


def test_two_sweepers_put_a_message_back_once(broker: Server, holders: Callable[..., Holder]) -> None:
    holder, other = holders(), holders()
    other._consumer.cancel()
    holder.send(1)
    (message,) = holder.take(1)
    holder._consumer.cancel()
    found = [(message.delivery_tag, broker.client.hget("unacked", message.delivery_tag))]
    assert [each.leases._put_back(broker.client, found, 0) for each in (holder, other)] == [1, 0]
    assert (broker.bodies(), broker.unacked()) == ([1], 0)


def test_what_a_killed_process_held_is_delivered_again_after_a_lease(
    broker: Server, holders: Callable[..., Holder], holding: Callable[..., Process]
) -> None:
    other = holders(prefetch=1)
    other._consumer.cancel()
    other.send(1)
    process = holding()
    other._consumer.consume()
    other.drain(1.5 * LEASE_S)
    assert not other.got, "it lives, so it keeps it"
    process.kill()
    killed = time.monotonic()
    (message,) = other.take(1)
    assert time.monotonic() - killed < LEASE_S + SWEEP_S + SLACK_S
    assert message.delivery_info["redelivered"] is True


@pytest.mark.parametrize(("action", "ours"), [("ack", True), ("ack", False), ("requeue", True), ("requeue", False)])
def test_a_process_that_wakes_up_leaves_alone_what_is_anothers(
    broker: Server, holders: Callable[..., Holder], holding: Callable[..., Process], action: str, ours: bool
) -> None:
    """Stock kombu keeps the tag over a redelivery: the woken process requeues, or acknowledges and so loses, what
    another one is working on.
    """
    other = holders(ours=ours)
    other._consumer.cancel()
    other.send(1)
    process = holding(ours=ours, action=action)
    other._consumer.consume()
    process.send(signal.SIGSTOP)
    (message,) = other.take(1)
    other._consumer.cancel()
    process.send(signal.SIGCONT)
    process.send(signal.SIGUSR1)
    wait_until(lambda: b"did" in process.stdout, 10, "the woken process acts")
    held = broker.client.hexists("unacked", message.delivery_tag)
    assert held is ours
    assert broker.bodies() == ([1] if action == "requeue" and not ours else [])


def test_a_parked_delivery_comes_back_after_its_lease(broker: Server, holders: Callable[..., Holder]) -> None:
    holder = holders(prefetch=1)
    holder.send(1)
    (message,) = holder.take(1)
    assert not holder.channel.qos.can_consume()
    holder.leases.park(message.delivery_tag)
    message.ack()
    assert holder.channel.qos.can_consume(), "the slot is free"
    assert broker.unacked() == 1
    (again,) = holder.take(1)
    assert again.delivery_info["redelivered"] is True


def test_an_outage_longer_than_the_lease_takes_nothing_from_who_lives(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    """After it every lease looks expired. Nobody is swept before the holders had the time to renew."""
    holder, other = holders(), holders()
    holder.send(1, 2)
    messages = holder.take(1, 2)
    other.drain(LEASE_S)
    holder.leases.alive = lambda: False  # the holder is slow to find out that the broker is back
    broker.stop()
    time.sleep(1.2 * LEASE_S)
    broker.start()
    other.leases.sweep(broker.client, SWEEP_S)
    holder.leases.alive = lambda: True
    other.connection.close()
    other.connect()
    other.drain(1.5 * LEASE_S)
    assert not other.got
    for message in messages:
        message.ack()
    wait_until(lambda: broker.unacked() == 0, 5, "all is acknowledged")


def test_a_full_server_still_renews_acknowledges_and_takes_back(broker: Server, holders: Callable[..., Holder]) -> None:
    holder, other = holders(), holders()
    other._consumer.cancel()
    holder.send(1, 2, 3)
    broker.client.config_set("maxmemory", 1)
    with pytest.raises(redis.OutOfMemoryError):
        broker.client.set("anything", 1)
    one, two, _three = holder.take(1, 2, 3)
    other._consumer.consume()
    other.drain(2 * LEASE_S)
    assert not other.got, "renewed"
    one.ack()
    two.requeue()
    other.take(2)
    wait_until(lambda: broker.unacked() == 2, 5, "the acknowledgement is written: it makes room")


@OURS_AND_STOCK
def test_a_worker_that_cannot_declare_its_queues_on_a_full_server_tries_again(
    broker: Server, holders: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Celery tries connection errors again. To stock kombu a full server is none: the worker ends with a traceback."""
    monkeypatch.setattr("common.transport.FULL_WAIT_S", 0.0)
    holder = holders(ours=ours)
    broker.client.config_set("maxmemory", 1)

    with pytest.raises(redis.RedisError, match="maxmemory") as refused:
        Queue("another", Exchange("some"))(holder.channel).declare()

    assert isinstance(refused.value, holder.connection.connection_errors) is ours


def test_a_delivery_that_could_not_be_written_is_written_later(broker: Server, holders: Callable[..., Holder]) -> None:
    """Between its pop and its entry in `unacked` a message is nowhere but here."""
    holder = holders()
    holder.send(1)
    (message,) = holder.take(1)
    message.ack()
    wait_until(lambda: broker.unacked() == 0, 5, "the acknowledgement is written")
    entry = json.dumps([message._raw, "", "q"])
    with redis.Redis(port=free_port(), retry=Retry(NoBackoff(), 0)) as away:
        holder.leases.hold(away, "tag", message, entry)
    wait_until(lambda: broker.client.hget("unacked", "tag") == entry.encode(), 5, "the entry is written")


# -- acknowledgements --------------------------------------------------------------------------------------------------


def test_acknowledgements_are_written_in_batches_and_leave_nothing(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    holder = holders()
    bodies = range(320)
    holder.send(*bodies)
    messages = holder.take(*bodies)
    for message in messages:
        message.ack()
    wait_until(lambda: broker.unacked() == 0, 5, "all are acknowledged")
    assert broker.calls("zrem") <= 320 / ACK_BATCH + 1
    assert len(holder.leases) == 0


@OURS_AND_STOCK
def test_an_acknowledgement_while_the_broker_is_away_is_written_later(
    broker: Server, holders: Callable[..., Holder], ours: bool
) -> None:
    holder = holders(ours=ours)
    holder.send(1, 2)
    one, two = holder.take(1, 2)
    broker.stop()
    try:
        if not ours:
            with pytest.raises(holder.connection.connection_errors):
                one.ack()
            return
        one.ack()
        time.sleep(0.1)
    finally:
        broker.start()
    wait_until(lambda: broker.unacked() == 1, 5, "the acknowledgement is written")
    assert broker.client.hexists("unacked", two.delivery_tag)


# -- reconnects and the end --------------------------------------------------------------------------------------------


@OURS_AND_STOCK
def test_closing_a_channel_does_not_requeue_what_still_runs(
    broker: Server, holders: Callable[..., Holder], ours: bool
) -> None:
    """kombu closes channels on a broken socket. Stock kombu puts everything back: it runs a second time."""
    holder = holders(ours=ours)
    holder.send(1, 2)
    messages = holder.take(1, 2)
    holder.connection.close()
    assert sorted(broker.bodies()) == ([] if ours else [1, 2])
    if ours:
        for message in messages:
            message.ack()
        wait_until(lambda: broker.unacked() == 0, 5, "acknowledged through the independent client")


def test_what_runs_on_over_a_reconnect_takes_its_place_in_the_window(
    broker: Server, holders: Callable[..., Holder]
) -> None:
    holder = holders(prefetch=3)
    holder.send(1, 2, 3, 4, 5)
    old = holder.take(1, 2, 3)
    holder.connection.close()
    holder.connect()
    holder.drain(0.5)
    assert not holder.got
    old.pop(0).ack()
    holder.take(4)
    del old[0]  # nobody can acknowledge it any more, as Celery drops scheduled requests
    wait_until(lambda: broker.unacked() == 2, 5, "the dropped one is handed back")
    assert broker.bodies() == [2, 5]
    old.pop().ack()
    holder.drain(5, lambda: len(holder.got) == 2)
    assert len(holder.leases) == 3


def test_a_requeued_message_is_next_and_marked(broker: Server, holders: Callable[..., Holder]) -> None:
    holder = holders(prefetch=2)
    holder.send(1, 2, 3)
    one, _two = holder.take(1, 2)
    holder._consumer.cancel()
    one.requeue()
    wait_until(lambda: broker.bodies() == [1, 3], 5, "it is the next one")
    assert broker.queue()[0]["properties"]["delivery_info"]["redelivered"] is True
    assert broker.unacked() == 1


@OURS_AND_STOCK
def test_a_process_that_ends_hands_back_at_once_in_order(
    broker: Server, holders: Callable[..., Holder], holding: Callable[..., Process], ours: bool
) -> None:
    producer = holders()
    producer._consumer.cancel()
    producer.send(*range(6))
    process = holding(4, ours=ours, lease_s=60)
    assert (broker.unacked(), broker.bodies()) == (4, [4, 5])
    process.send(signal.SIGUSR2)
    result = process.wait(10)
    assert (result.code, result.stderr) == (0, "")
    assert broker.unacked() == 0
    # Stock kombu puts them in backwards.
    assert broker.bodies() == ([0, 1, 2, 3, 4, 5] if ours else [3, 2, 1, 0, 4, 5])
    assert all(message["headers"]["redelivered"] for message in broker.queue()[:4])


def test_a_process_that_ends_while_the_broker_is_away_just_ends(
    broker: Server, holders: Callable[..., Holder], holding: Callable[..., Process]
) -> None:
    producer = holders()
    producer._consumer.cancel()
    producer.send(1)
    process = holding(lease_s=60)
    broker.stop()
    try:
        process.send(signal.SIGUSR2)
        assert process.wait(10).code == 0
    finally:
        broker.start()
    assert broker.unacked() == 1, "it is left to its lease"


# -- in Celery workers -------------------------------------------------------------------------------------------------

APP = """
import os, time
from celery import Celery
from celery.worker import state
from common.transport import Transport, fleet_url, transport_options
Transport.leases.dropped = lambda: [request.message for request in state.scheduled_requests]
url = os.environ["URL"]
app = Celery("t", broker=fleet_url(url) if os.environ["OURS"] == "1" else url, set_as_current=True)
app.conf.update(
    task_acks_late=True, worker_prefetch_multiplier=1, task_ignore_result=True, task_default_queue="q",
    broker_connection_retry_on_startup=True, worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_enable_prefetch_count_reduction=False,
    broker_transport_options={**transport_options(float(os.environ["LEASE_S"]), sweep_s=0.5), "body_encoding": "utf-8"},
)
def log(*words):
    with open(os.environ["LOG"], "a") as out:
        print(*words, file=out)
@app.task(name="work")
def work(number, seconds):
    log("start", number)
    time.sleep(seconds)
    log("end", number)
@app.task(name="die")
def die():
    state.should_stop = 70
"""


class Worker:
    """A Celery worker with eight threads over our transport or the stock one."""

    def __init__(self, broker: Server, folder: Path, *, ours: bool, lease_s: float = LEASE_S) -> None:
        (folder / "worker_app.py").write_text(APP)
        self._log = folder / "log"
        self._log.touch()
        extra = {"URL": broker.url, "OURS": str(int(ours)), "LEASE_S": str(lease_s), "LOG": str(self._log)}
        words = ["-m", "celery", "-A", "worker_app", "worker", "-P", "threads", "-c", "8", "--without-gossip",
                 "--without-mingle", "--loglevel", "INFO"]  # fmt: skip
        self.process = Process("worker", [sys.executable, *words], folder, environment(**extra))
        self._app = Celery(broker=broker.url, set_as_current=False)
        self._app.conf.update(task_default_queue="q", broker_transport_options={"body_encoding": "utf-8"})
        wait_until(lambda: " ready." in self.process.stderr or not self.process.running, 30, "the worker is ready")

    def send(self, name: str, *args: Any, **options: Any) -> None:
        self._app.send_task(name, args, ignore_result=True, **options)

    def logged(self, word: str) -> list[int]:
        pairs = (line.split() for line in self._log.read_text().splitlines())
        return sorted(int(number) for said, number in pairs if said == word)

    def close(self) -> None:
        self._app.close()
        self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@OURS_AND_STOCK
def test_a_broker_restart_with_requests_in_flight_runs_each_once(broker: Server, tmp_path: Path, ours: bool) -> None:
    """The stock worker crashes: AttributeError, 'NoneType' object has no attribute 'hostname'."""
    with Worker(broker, tmp_path, ours=ours) as worker:
        requests = list(range(8 if ours else 4))  # a full window; the stock worker would not notice soon
        for number in requests:
            worker.send("work", number, 3.0)
        wait_until(lambda: worker.logged("start") == requests, 20, "all run")
        broker.stop()
        time.sleep(1.5 * LEASE_S if ours else 0.5)
        broker.start()
        if not ours:
            wait_until(lambda: "no attribute 'hostname'" in worker.process.stderr, 20, "the stock worker crashes")
            return
        worker.send("work", 8, 0.0)
        wait_until(lambda: worker.logged("end") == [*requests, 8], 20, "all have ended, the new one too")
        wait_until(lambda: broker.unacked() == 0, 5, "all are acknowledged")
        assert worker.logged("start") == [*requests, 8]
        assert worker.process.running
        assert "CRITICAL" not in worker.process.stderr
        assert worker.process.stop().code == 0


@OURS_AND_STOCK
def test_reset_connections_run_nothing_twice(broker: Server, tmp_path: Path, ours: bool) -> None:
    """The stock worker starts everything in flight a second time."""
    with Worker(broker, tmp_path, ours=ours, lease_s=LEASE_S if ours else 60) as worker:
        for number in range(4):
            worker.send("work", number, 2.0)
        worker.send("work", 4, 0.0, countdown=6)  # scheduled: Celery drops it on a reconnect
        wait_until(lambda: len(worker.logged("start")) == 4 and broker.unacked() == 5, 20, "all are in hand")
        broker.client.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: len(worker.logged("end")) >= 5, 20, "all have ended")
        if not ours:
            wait_until(lambda: len(worker.logged("start")) > 5, 5, "something is run twice")
            return
        wait_until(lambda: broker.unacked() == 0, 5, "all are acknowledged")
        assert worker.logged("start") == worker.logged("end") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("by", ["SIGTERM", "exit 70"])
def test_a_worker_that_stops_hands_back_what_it_did_not_run(broker: Server, tmp_path: Path, by: str) -> None:
    """And keeps the leases of what it finishes while it drains."""
    with Worker(broker, tmp_path, ours=True) as worker:
        for number in range(3):
            worker.send("work", number, 0.0, countdown=60)
        worker.send("work", 9, 5 * LEASE_S)
        wait_until(lambda: broker.unacked() == 4 and worker.logged("start"), 20, "all are in hand")
        tag = next(tag for tag, entry in broker.client.hgetall("unacked").items() if b"[9, " in entry)
        if by == "SIGTERM":
            worker.process.send(signal.SIGTERM)
        else:
            worker.send("die")
        time.sleep(2 * LEASE_S)
        last = broker.client.zscore("unacked_index", tag)
        assert last is not None
        wait_until(lambda: broker.client.zscore("unacked_index", tag) > last, 2 * LEASE_S, "renewed while it drains")
        result = worker.process.wait(20)
        assert result.code == (0 if by == "SIGTERM" else 70), result.stderr
        assert broker.unacked() == 0
        assert [json.loads(message["body"])[0][0] for message in broker.queue()] == [0, 1, 2]
        assert all(message["headers"]["redelivered"] for message in broker.queue())
        assert worker.logged("end") == [9]
