"""What a request's message looks like, made once per shard and filled once per request.

Owns: the task message of `run_request`, in Celery's protocol 2 inside kombu's envelope.
Must not know: how messages are sent (`common.transport`), when (`common.dispatch`).
On failure: nothing here can fail; a message that Celery would have made differently is found by
`tests/contract/test_celery.py`, which compares it field by field with what `send_task` sends.

Of `send_task`'s 100 µs a request nearly all goes into what is the same for a whole shard: routing, options, the chord's
signature, two serializations. So Celery makes the headers once (`AMQP.as_task_v2`, Celery 5.7) with marks where
requests differ, the whole is serialized, and from then on a message is one `%` of a template.
Three headers are our own: the time of publishing, how many requests a pack carries, and the root of a traced batch.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from kombu.utils.json import dumps
from pydantic_core import to_json

from common import broker
from common.settings import MAX_PACK_SIZE
from common.tracing import TRACEPARENT
from common.transport import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery

    from common.batch import Run, Shard
    from common.packs import Claim

#: The header with the time at which a shard's publishing began, in seconds since the epoch by the sender's clock.
PUBLISHED_S = "published_s"

#: Where requests differ. The quotes around a mark go with it: plain ones in the envelope, escaped ones in the body.
_HOLE = re.compile(r'\\?"<<(\w+)>>\\?"')


def _hole(name: str) -> str:
    return f"<<{name}>>"


class RequestMessages:
    """The messages of a shard's requests. With `group_id` and `body` they are the header of a chord.

    A pack's message has one more argument and one more header; every other one looks as if there were no packs.
    """

    def __init__(
        self,
        app: Celery,
        run: Run,
        shard: Shard,
        *,
        queue: str,
        group_id: str | None = None,
        body: Any = None,
    ) -> None:
        self._ids = f"{run.batch_id}/{run.number}/{shard.number}/"
        self._app = app
        self._run = run
        self._shard = shard
        self._queue = queue
        self._group_id = group_id
        self._body = body
        self._single = self._make_template()
        #: Made when the first pack comes; most shards have none.
        self._pack = ""

    def _make_template(self, **more: Any) -> str:
        run, shard = self._run, self._shard
        arguments = {"batch_id": run.batch_id, "run": run.number, "shard": shard.number, "index": _hole("index")}
        arguments |= {"count": shard.count, "line": _hole("line"), **more}
        task = self._app.amqp.as_task_v2(
            _hole("id"),
            broker.RUN_REQUEST,
            kwargs=arguments,
            group_id=self._group_id,
            group_index=_hole("position") if self._group_id is not None else None,
            chord=self._body,
            ignore_result=True,
            # Celery would put the prompt here, for Flower and the logs to show.
            argsrepr="-",
            kwargsrepr=_hole("repr"),
        )
        # Of the shard, so that it costs a request nothing; a shard is published within moments.
        task.headers[PUBLISHED_S] = round(time.time(), 3)
        if run.traceparent:
            task.headers[TRACEPARENT] = run.traceparent
        envelope = {
            "body": dumps(task.body),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            # First, where the transport looks for it.
            "headers": {REQUESTS: _hole("requests"), **task.headers} if more else task.headers,
            "properties": {
                "correlation_id": _hole("id"),
                "reply_to": self._app.thread_oid,
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": self._queue},
                "priority": 0,
                "body_encoding": "utf-8",
                "delivery_tag": _hole("tag"),
            },
        }
        # Every second piece is the name of a hole.
        pieces = _HOLE.split(dumps(envelope).replace("%", "%%"))
        return "".join(piece if number % 2 == 0 else f"%({piece})s" for number, piece in enumerate(pieces))

    def fill(self, task_id: str, index: int, position: int, claims: Sequence[Claim]) -> bytes:
        """The message as it lies in the queue: its id, its first request's index, its place in the chord, its requests.

        Of each request its line, or of a large one where it lies. Several follow each other, and are lines.
        """
        quoted = f'"{task_id}"'
        first, *others = claims
        values = {
            "id": quoted,
            "repr": f'"{self._ids}{indexes_repr(index, len(claims))}"',
            "position": position,
            "tag": f'"{uuid.uuid4()}"',
            "index": index,
            # A string in the body, which is a string in the envelope.
            "line": _quoted(_quoted(first))[1:-1] if isinstance(first, str) else list(first),
        }
        if not others:
            return (self._single % values).encode()
        self._pack = self._pack or self._make_template(more=_hole("more"))
        values |= {"requests": len(claims), "more": _quoted(to_json(others).decode())[1:-1]}
        return (self._pack % values).encode()


def indexes_repr(first: int, count: int) -> str:
    """How a message's requests are shown: `7`, or `7-9` where it carries three."""
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def read_indexes(shown: str) -> range:
    """What `indexes_repr` wrote. No more than a message may carry: Redis is open to more than the fleet."""
    first, _, last = shown.partition("-")
    return range(int(first), min(int(last or first), int(first) + MAX_PACK_SIZE - 1) + 1)


def _quoted(text: str) -> str:
    return to_json(text).decode()
