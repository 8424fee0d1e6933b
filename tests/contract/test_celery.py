"""What the fleet assumes of Celery 5.7 and kombu 5.7, on a real server. Read it before the pins are moved."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from celery.app.task import Context
from celery.concurrency.base import BasePool
from celery.worker.request import Request, create_request_cls
from kombu.exceptions import ContentDisallowed
from kombu.serialization import dumps, loads, prepare_accept_content, registry

from common import broker, layout
from common.batch import Run, Shard, first_run
from common.dispatch import publish_shard, republish
from common.messages import PUBLISHED_S, RequestMessages
from common.routes import Routes
from common.store import LocalStore
from common.transport import REQUESTS, Transport
from producer import control, intake
from tests.invariants import chat_line, chat_lines
from tests.servers import BrokerServer, close_app, free_port
from workers.lines import Place, read_line
from workers.receipts import Receipts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from celery import Celery


#: Lines that a JSON library on the way would change: escapes, floats, nulls, key order, repeated and unknown keys.
AWKWARD = [
    chat_line("é–日本 🙂", "العربية \u2028 e\u0301", z=None, a=1),
    r'{"custom_id":"esc","method":"POST","url":"u","body":{"x":"\u00e9\ud83d\ude42\u0000\/","f":1.0,"g":1e5,"h":-0.0}}',
    '{ "body" : {"t":0.10,"big":12345678901234567890123,"same":1,"same":2},"url":"u", "method":"POST","custom_id":"o"}',
]
SENTINEL = "sentinel-in-a-prompt"


@pytest.fixture(params=["socket", "tcp"])
def app(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> Iterator[Celery]:
    """The fleet's app over a server that listens on a socket, and on TCP."""
    port = free_port() if request.param == "tcp" else 0
    with BrokerServer(tmp_path / "b", {"PATH": ""}, port=port) as started:
        made = broker.make_app(started.url)
        made.test_server = started
        yield made
        close_app(made)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def embedding_line(number: int, text: str) -> str:
    body = {"model": "m", "input": text}
    return json.dumps({"custom_id": f"e{number}", "method": "POST", "url": "/v1/embeddings", "body": body})


def durable(store: LocalStore, folder: Path, lines: list[str]) -> Run:
    """The first run of a batch of these lines."""
    path = folder / "in.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    checked = intake.check("in.jsonl", str(path))
    return first_run(control.write_batch(store, checked, digest="0" * 64, max_shard_size=1000, new=True))


def queued(app: Celery, queue: str) -> list[dict[str, Any]]:
    """The messages of a queue, in the order in which they will be taken, with `body` read."""
    messages = [json.loads(raw) for raw in reversed(app.test_server.client.lrange(queue, 0, -1))]
    return [{**message, "body": json.loads(message["body"])} for message in messages]


def published(app: Celery, store: LocalStore, folder: Path, lines: list[str]) -> list[dict[str, Any]]:
    run = durable(store, folder, lines)
    publish_shard(app, store, run, run.shards[0], routes=Routes())
    return queued(app, "gpu")


def finish(app: Celery, message: dict[str, Any], receipt: int = broker.RECEIPT) -> None:
    """Count a header message as done, as the pool does it."""
    _, _, embed = message["body"]
    context = Context({**message["headers"], **embed})
    app.backend.mark_as_done(message["headers"]["id"], receipt, context, store_result=False)


def test_the_versions_are_those_that_were_read() -> None:
    assert metadata.version("celery").startswith("5.7.")
    assert metadata.version("kombu").startswith("5.7.")


def test_a_shard_is_published_in_order_with_its_chord(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    messages = published(app, store, tmp_path, chat_lines(5))

    assert [message["body"][1]["index"] for message in messages] == [0, 1, 2, 3, 4]
    assert [message["headers"]["group_index"] for message in messages] == [0, 1, 2, 3, 4]
    assert {message["headers"]["task"] for message in messages} == {broker.RUN_REQUEST}
    assert len({message["headers"]["group"] for message in messages}) == 1
    assert len({message["headers"]["id"] for message in messages}) == 5
    assert all(message["body"][2]["chord"]["task"] == broker.SEAL_SHARD for message in messages)
    assert app.test_server.client.llen("aggregate") == 0


@pytest.mark.parametrize("chorded", [True, False])
def test_a_hand_made_message_is_what_send_task_sends(
    app: Celery, store: LocalStore, tmp_path: Path, chorded: bool
) -> None:
    """Field by field, in content and order; but for the tag, which is random, two options that Celery copies, and the
    header that is our own.
    """
    lines = [*AWKWARD, chat_line("holes", '"<<index>>" %s %(line)s \\"<<line>>\\"')]
    run = durable(store, tmp_path, lines)
    shard = run.shards[0]
    if chorded:
        publish_shard(app, store, run, shard, routes=Routes())
    else:
        republish(app, store, run, shard, shard.indexes, routes=Routes())
    ours = [json.loads(raw) for raw in reversed(app.test_server.client.lrange("gpu", 0, -1))]

    assert len(ours) == len(lines)
    for position, (made, line) in enumerate(zip(ours, lines, strict=True)):
        _, _, embed = json.loads(made["body"])
        app.send_task(
            broker.RUN_REQUEST,
            kwargs={
                "batch_id": run.batch_id,
                "run": 1,
                "shard": 0,
                "index": position,
                "count": len(lines),
                "line": line,
            },
            task_id=made["headers"]["id"],
            queue="gpu",
            ignore_result=True,
            argsrepr="-",
            kwargsrepr=f"{run.batch_id}/1/0/{position}",
            **(
                {"group_id": made["headers"]["group"], "group_index": position, "chord": embed["chord"]}
                if chorded
                else {}
            ),
        )
        assert time.time() - 60 < made["headers"].pop(PUBLISHED_S) <= time.time()
        sent = json.loads(app.test_server.client.lindex("gpu", 0))
        for name in ("argsrepr", "kwargsrepr"):
            sent["properties"].pop(name)
        sent["properties"]["delivery_tag"] = made["properties"]["delivery_tag"]
        # Celery escapes what is not ASCII, a message made by hand holds it as UTF-8.
        assert json.dumps(json.loads(sent.pop("body"))) == json.dumps(json.loads(made.pop("body")))
        assert json.dumps(sent) == json.dumps(made)


def test_a_pack_is_what_send_task_sends_with_one_more_argument_and_header(
    app: Celery, store: LocalStore, tmp_path: Path
) -> None:
    lines = [embedding_line(number, text) for number, text in enumerate(["plain", 'q"uo\\te %s <<index>>', "ä\u2028"])]
    run = durable(store, tmp_path, lines)
    publish_shard(app, store, run, run.shards[0], routes=Routes(), packs={"gpu": 16})
    (made,) = (json.loads(raw) for raw in app.test_server.client.lrange("gpu", 0, -1))
    del made["headers"][PUBLISHED_S]
    _, _, embed = json.loads(made["body"])
    arguments = {"batch_id": run.batch_id, "run": 1, "shard": 0, "index": 0, "count": 3, "line": lines[0]}

    app.send_task(
        broker.RUN_REQUEST,
        kwargs={**arguments, "more": lines[1:]},
        task_id=made["headers"]["id"],
        queue="gpu",
        ignore_result=True,
        argsrepr="-",
        kwargsrepr=f"{run.batch_id}/1/0/0-2",
        group_id=made["headers"]["group"],
        group_index=0,
        chord=embed["chord"],
        headers={REQUESTS: 3},
    )

    sent = json.loads(app.test_server.client.lindex("gpu", 0))
    for name in ("argsrepr", "kwargsrepr"):
        sent["properties"].pop(name)
    sent["properties"]["delivery_tag"] = made["properties"]["delivery_tag"]
    assert json.loads(sent.pop("body")) == json.loads(made.pop("body"))
    assert sent == made


def test_a_chord_of_packs_waits_for_every_message(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    """Its size is how many messages there are; requests that generate keep one each."""
    lines = [*(embedding_line(number, "x") for number in range(5)), *chat_lines(2)]
    run = durable(store, tmp_path, lines)

    sent = publish_shard(app, store, run, run.shards[0], routes=Routes(), packs={"gpu": 2})

    messages = queued(app, "gpu")
    assert [message["body"][1]["index"] for message in messages] == [0, 2, 4, 5, 6]
    assert [message["headers"]["group_index"] for message in messages] == [0, 1, 2, 3, 4]
    assert sent == {"gpu": 7}
    for message in messages[:-1]:
        finish(app, message)
    assert app.test_server.client.llen("aggregate") == 0
    finish(app, messages[-1])
    assert app.test_server.client.llen("aggregate") == 1


def test_what_got_lost_is_sent_again_one_by_one(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    run = durable(store, tmp_path, [embedding_line(number, "x") for number in range(4)])

    republish(app, store, run, run.shards[0], run.shards[0].indexes, routes=Routes())

    assert [REQUESTS in message["headers"] for message in queued(app, "gpu")] == [False] * 4


def test_the_messages_of_a_shard_go_out_before_all_are_made(
    app: Celery, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number, the first ones at once, and by bytes: nobody waits behind large ones."""
    monkeypatch.setattr("common.dispatch.PUBLISH_FIRST", 2)
    monkeypatch.setattr("common.dispatch.PUBLISH_BATCH", 4)
    monkeypatch.setattr("common.dispatch.PUBLISH_BYTES", 10_000)
    run = durable(
        store, tmp_path, [*chat_lines(4), chat_line("large", "x" * 10_000), *(chat_line(end, end) for end in "xyz")]
    )
    seen = []
    fill = RequestMessages.fill

    def watched(*args: Any) -> bytes:
        seen.append(app.test_server.client.llen("gpu"))
        return fill(*args)

    monkeypatch.setattr(RequestMessages, "fill", watched)
    publish_shard(app, store, run, run.shards[0], routes=Routes())

    assert seen == [0, 0, 2, 2, 2, 5, 5, 5]
    assert [message["body"][1]["index"] for message in queued(app, "gpu")] == list(range(8))


def test_a_large_line_stays_in_the_batch_directory(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    """Its message says where it lies, whoever sends it."""
    large = [chat_line(f"large-{number}", "é🙂\u2028" * 20_000) for number in range(2)]
    lines = [chat_line("first", "é"), large[0], chat_line("between", "é"), large[1]]
    run = durable(store, tmp_path, lines)
    publish_shard(app, store, run, run.shards[0], routes=Routes())
    republish(app, store, run, run.shards[0], {1, 2}, routes=Routes())

    assert all(len(raw) < 4096 for raw in app.test_server.client.lrange("gpu", 0, -1))
    carried = [message["body"][1]["line"] for message in queued(app, "gpu")]
    found = [
        line if isinstance(line, str) else read_line(store, run.batch_id, Place(*line)).decode() for line in carried
    ]
    assert found == [*lines, *lines[1:3]]
    assert [isinstance(line, str) for line in carried] == [True, False, True, False, False, True]


def test_the_ids_of_a_shard_derive_from_its_place(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    run = durable(store, tmp_path, chat_lines(3))
    for _ in range(2):
        publish_shard(app, store, run, run.shards[0], routes=Routes())

    ids = [message["headers"]["id"] for message in queued(app, "gpu")]

    assert ids[:3] == ids[3:]


def test_the_body_of_a_chord_is_sent_once_however_often_its_tasks_are_counted(
    app: Celery, store: LocalStore, tmp_path: Path
) -> None:
    messages = published(app, store, tmp_path, chat_lines(4))
    for message in (messages[0], messages[0], messages[1], messages[1], messages[0], messages[2]):
        finish(app, message)
    assert queued(app, "aggregate") == []

    finish(app, messages[3])

    (body,) = queued(app, "aggregate")
    assert body["headers"]["task"] == broker.SEAL_SHARD
    batch_id = messages[0]["body"][1]["batch_id"]
    assert body["body"][1] == {"batch_id": batch_id, "run": 1, "shard": 0}
    for message in messages:
        finish(app, message)
        finish(app, message, receipt=2)
    assert len(queued(app, "aggregate")) == 1


@pytest.mark.parametrize("expires", [5, 0, None])
def test_a_chord_does_not_hang_on_the_expiry_of_results(
    app: Celery, store: LocalStore, tmp_path: Path, expires: int | None
) -> None:
    """C09: with stock settings the first receipts expire before the last one comes, and the body is never sent."""
    app.conf.result_expires = expires
    messages = published(app, store, tmp_path, chat_lines(3))
    client, group = app.test_server.client, messages[0]["headers"]["group"]
    for message in messages[:2]:
        finish(app, message)

    found = {key: client.ttl(key) for key in client.scan_iter(f"*{group}*")}
    assert found
    assert all(ttl_s == -1 or ttl_s > 6 * 86400 for ttl_s in found.values()), found
    finish(app, messages[2])

    assert [body["headers"]["task"] for body in queued(app, "aggregate")] == [broker.SEAL_SHARD]


def test_without_an_expiry_of_its_own_a_chord_goes_with_its_results(
    app: Celery, store: LocalStore, tmp_path: Path
) -> None:
    """The safeguard off."""
    app.conf.update(result_expires=5, result_chord_expires=None)
    messages = published(app, store, tmp_path, chat_lines(3))
    client, group = app.test_server.client, messages[0]["headers"]["group"]
    finish(app, messages[0])

    assert min(client.ttl(key) for key in client.scan_iter(f"*{group}*")) in range(6)


def parts(messages: list[dict[str, Any]], receipt: int = broker.RECEIPT) -> list[tuple[str, int, Context]]:
    """Header messages as finished deliveries."""
    contexts = [Context({**message["headers"], **message["body"][2]}) for message in messages]
    return [(context.id, receipt, context) for context in contexts]


def test_receipts_that_are_counted_together_lie_where_celery_puts_them(
    app: Celery, store: LocalStore, tmp_path: Path
) -> None:
    messages = published(app, store, tmp_path, chat_lines(5))
    client, group = app.test_server.client, messages[0]["headers"]["group"]

    def noted() -> list[Any]:
        keys = [app.backend.get_key_for_group(group, end) for end in (".j", ".d", ".s")]
        found = [client.lrange(keys[0], 0, -1), client.smembers(keys[1]), client.get(keys[2])]
        assert all(client.ttl(key) > 0 for key in keys)
        client.delete(*keys[:2])
        return found

    for message in messages[:4]:
        finish(app, message)
    theirs = noted()
    Receipts(app.backend).count(parts(messages[:4]))

    assert noted() == theirs


def test_receipts_that_are_counted_together_fire_the_body_once(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    """However often a part is counted, beside other parts or alone, and whoever counts the last one."""
    receipts = Receipts(app.backend)
    messages = published(app, store, tmp_path, chat_lines(6))
    receipts.count(parts([*messages[:4], *messages[1:3]]))
    finish(app, messages[1])
    receipts.count([])
    assert queued(app, "aggregate") == []

    receipts.count(parts(messages[3:]))

    (body,) = queued(app, "aggregate")
    assert body["headers"]["task"] == broker.SEAL_SHARD
    assert body["body"][0] == [[1] * 6]
    receipts.count(parts(messages, receipt=2))
    assert len(queued(app, "aggregate")) == 1
    left = app.test_server.client.keys("celery-taskset-meta-*")
    assert [key.decode()[-2:] for key in left] == [".c"]


def test_receipts_of_several_chords_and_of_none_are_counted_together(
    app: Celery, store: LocalStore, tmp_path: Path
) -> None:
    first = published(app, store, tmp_path, chat_lines(2))
    run = durable(store, tmp_path, chat_lines(3))
    republish(app, store, run, run.shards[0], {0}, routes=Routes())
    publish_shard(app, store, run, run.shards[0], routes=Routes())
    plain, *second = queued(app, "gpu")[2:]

    Receipts(app.backend).count(parts([first[0], second[0], plain, second[2], first[1], second[1]]))

    assert len(queued(app, "aggregate")) == 2


def test_a_shard_of_one_request_has_a_chord_too(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    (message,) = published(app, store, tmp_path, chat_lines(1))

    finish(app, message)

    assert len(queued(app, "aggregate")) == 1


def test_a_chord_leaves_no_key_without_a_ttl(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    for message in published(app, store, tmp_path, chat_lines(2)):
        finish(app, message)

    client = app.test_server.client
    assert [key for key in client.scan_iter("celery-task*") if client.ttl(key) == -1] == []


def test_republished_requests_are_plain_tasks_with_fresh_ids(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    run = durable(store, tmp_path, chat_lines(4))

    for _ in range(2):
        republish(app, store, run, run.shards[0], {1, 3}, routes=Routes())

    messages = queued(app, "gpu")
    assert [message["body"][1]["index"] for message in messages] == [1, 3, 1, 3]
    assert len({message["headers"]["id"] for message in messages}) == 4
    assert not any(message["body"][2]["chord"] or message["headers"]["group"] for message in messages)


def test_a_shard_without_missing_requests_is_sent_to_be_sealed(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    run = durable(store, tmp_path, chat_lines(4))

    republish(app, store, run, run.shards[0], set(), routes=Routes())

    (message,) = queued(app, "aggregate")
    assert message["headers"]["task"] == broker.SEAL_SHARD
    assert queued(app, "gpu") == []


def test_an_app_publishes_where_an_earlier_one_was_closed(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    """Of these tests themselves: a free port may have been an earlier server's, and kombu's pools go by URL."""
    published(app, store, tmp_path, chat_lines(1))
    close_app(app)
    other = broker.make_app(app.test_server.url)
    other.test_server = app.test_server

    assert len(published(other, store, tmp_path, chat_lines(2))) == 3
    close_app(other)


def test_publishing_is_really_batched(app: Celery) -> None:
    client = app.test_server.client

    with app.producer_pool.acquire(block=True) as producer:
        assert producer.supports_batch_publish
        with producer.batch(max_size=3):
            for number in range(4):
                app.send_task(
                    "t", kwargs={"n": number}, producer=producer, queue="gpu", ignore_result=True, retry=False
                )
                assert client.llen("gpu") == (3 if number >= 2 else 0)
        assert producer.supports_batch_publish

    assert client.llen("gpu") == 4


def test_a_line_travels_as_the_very_string(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    messages = published(app, store, tmp_path, AWKWARD)

    assert [message["body"][1]["line"] for message in messages] == AWKWARD
    with app.connection_for_read() as connection, connection.channel() as channel:
        for line in AWKWARD:
            message = app.amqp.queues["gpu"](channel).get(no_ack=True)
            _, keywords, _ = loads(
                message.body, message.content_type, message.content_encoding, accept={"application/json"}
            )
            assert keywords["line"] == line


PARENT = "00-11112222333344445555666677778888-1234567812345678-01"


def test_the_messages_of_a_traced_batch_carry_its_trace_and_change_in_nothing_else(
    app: Celery, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a header of its own, where Celery keeps unknown ones; also of what is sent again."""
    (plain,) = published(app, store, tmp_path, [chat_line("a", "x")])
    app.test_server.client.delete("gpu")
    monkeypatch.setattr("common.tracing.current", lambda: PARENT)
    run = durable(store, tmp_path, [chat_line("a", "x")])
    publish_shard(app, store, run, run.shards[0], routes=Routes())
    republish(app, store, run, run.shards[0], [0], routes=Routes())
    traced, again = queued(app, "gpu")
    packed = json.loads(RequestMessages(app, run, run.shards[0], queue="gpu").fill("id", 0, 0, ["{}", "{}"]))

    assert packed["headers"]["traceparent"] == PARENT
    assert json.loads(store.read(layout.manifest(run.batch_id)))["traceparent"] == PARENT
    assert traced["headers"].pop("traceparent") == again["headers"].pop("traceparent") == PARENT
    assert list(traced) == list(plain)
    assert list(traced["headers"]) == list(plain["headers"])
    assert list(traced["body"][1]) == list(plain["body"][1])


def test_no_header_of_a_message_holds_the_prompt(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    messages = published(app, store, tmp_path, [chat_line("a", SENTINEL)])
    run = durable(store, tmp_path, [chat_line("a", SENTINEL)])
    republish(app, store, run, run.shards[0], {0}, routes=Routes())
    finish(app, messages[0])

    for message in (*queued(app, "gpu"), *queued(app, "aggregate")):
        assert message["headers"]["argsrepr"] == "-" or message["headers"]["task"] == broker.SEAL_SHARD
        assert SENTINEL not in json.dumps({**message, "body": None})
    assert SENTINEL not in json.dumps(queued(app, "aggregate"))
    assert messages[0]["headers"]["kwargsrepr"].endswith("/1/0/0")


def test_no_client_subscribes_to_results(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    published(app, store, tmp_path, chat_lines(50))

    assert app.test_server.client.pubsub_channels() == []


def test_a_message_that_was_taken_and_not_acknowledged_is_in_the_index_of_unacked_ones(
    app: Celery, store: LocalStore, tmp_path: Path
) -> None:
    """`producer.local` deletes these keys by name; what is handed back is on its queue again."""
    published(app, store, tmp_path, chat_lines(1))
    client = app.test_server.client

    with app.connection_for_read() as connection:
        channel = connection.channel()
        taken = app.amqp.queues["gpu"](channel).get()
        assert taken is not None
        assert (client.llen("gpu"), client.hlen("unacked"), client.zcard("unacked_index")) == (0, 1, 1)
        Transport.leases.hand_back()

    assert (client.llen("gpu"), client.hlen("unacked"), client.zcard("unacked_index")) == (1, 0, 0)


class CapturingPool(BasePool):  # type: ignore[misc]  # Celery has no types
    """What a pool of Celery's is called with."""

    def on_apply(self, target: Any, args: Any, kwargs: Any = None, **options: Any) -> None:
        self.called = (args, kwargs, options)


def test_a_pool_is_called_with_the_arguments_that_ours_unpacks(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    published(app, store, tmp_path, [AWKWARD[0]])

    @app.task(name=broker.RUN_REQUEST, shared=False)
    async def run_request(**_: object) -> int:
        return broker.RECEIPT

    pool = CapturingPool(1, app=app)
    with app.connection_for_read() as connection, connection.channel() as channel:
        message = app.amqp.queues["gpu"](channel).get(no_ack=True)
        request = create_request_cls(Request, app.tasks[broker.RUN_REQUEST], pool, "host", None, app=app)(
            message, app=app, hostname="host", decoded=False
        )
        request.execute_using_pool(pool)

    (name, task_id, headers, body, content_type, content_encoding), keywords, options = pool.called
    assert (name, task_id) == (broker.RUN_REQUEST, headers["id"])
    assert (content_type, content_encoding) == ("application/json", "utf-8")
    _, request_keywords, embed = loads(body, content_type, content_encoding, accept={"application/json"})
    assert request_keywords["line"] == AWKWARD[0]
    assert Context({**headers, **embed}).chord is not None
    assert not keywords
    assert options["callback"] == request.on_success
    assert options["accept_callback"] == request.on_accepted


#: In a process of its own: Celery shares the tasks of an app with every other app of the process.
PRINT_STEPS = """
from workers.app import app
worker = app.WorkController(pool_cls="workers.pool:TaskPool", concurrency=1, queues=["gpu"], hostname="t@t")
print(*(type(step).__name__ for step in worker.steps))
"""


def test_the_capacity_is_set_when_the_engine_is_loaded_and_before_the_consumer_starts() -> None:
    printed = subprocess.run([sys.executable, "-c", PRINT_STEPS], check=True, capture_output=True, timeout=60)

    steps = printed.stdout.decode().split()
    places = [steps.index(name) for name in ("Hub", "Pool", "EngineCapacity", "Consumer")]
    assert places == sorted(places)


def test_only_json_is_accepted(app: Celery) -> None:
    content_type, encoding, data = dumps([(), {}, {}], serializer="pickle")
    accept = prepare_accept_content(app.conf.accept_content)

    assert app.conf.accept_content == app.conf.result_accept_content == ["json"]
    with pytest.raises(ContentDisallowed):
        loads(data, content_type, encoding, accept=accept)
    assert not (set(accept) & set(registry.type_to_name) - {"application/json"})


def test_every_message_of_the_fleet_has_a_queue_that_somebody_consumes(app: Celery) -> None:
    for task in (broker.SEAL_SHARD, broker.ASSEMBLE_BATCH, broker.FEED):
        assert app.amqp.router.route({}, task)["queue"].name == "aggregate"
    assert set(app.amqp.queues) == {"gpu", "aggregate"}


def test_a_shard_names_its_requests_from_its_first_one(app: Celery, store: LocalStore, tmp_path: Path) -> None:
    run = durable(store, tmp_path, chat_lines(40))
    assert run.manifest.counts == (16, 16, 8)

    publish_shard(app, store, run, run.shards[2], routes=Routes())

    assert run.shards[2] == Shard(number=2, before=32, source=2, first=32, indexes=range(32, 40))
    assert [message["body"][1]["index"] for message in queued(app, "gpu")] == list(range(32, 40))
    assert store.exists(layout.shard_input(run.batch_id, 2))
