"""What a request's message looks like, made once per shard and filled once per request.

Owns: the task message of `run_request`, in Celery's protocol 2 inside kombu's envelope.
Must not know: how messages are sent (`common.transport`), when (`common.dispatch`).
On failure: nothing here can fail; a message that Celery would have made differently is found by
`tests/contract/test_celery.py`, which compares it field by field with what `send_task` sends.

Of `send_task`'s 100 µs a request nearly all goes into what is the same for a whole shard: routing, options, the chord's
signature, two serializations. So Celery makes the headers once (`AMQP.as_task_v2`, Celery 5.7) with marks where
requests differ, the whole is serialized, and from then on a message is one `%` of a template.
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any

from kombu.utils.json import dumps
from pydantic_core import to_json

from common import broker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery

    from common.batch import Run, Shard

#: Where requests differ. The quotes around a mark go with it: plain ones in the envelope, escaped ones in the body.
_HOLE = re.compile(r'\\?"<<(\w+)>>\\?"')


def _hole(name: str) -> str:
    return f"<<{name}>>"


class RequestMessages:
    """The messages of a shard's requests. With `group_id` and `body` they are the header of a chord."""

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
        arguments = {"batch_id": run.batch_id, "run": run.number, "shard": shard.number, "index": _hole("index")}
        arguments |= {"count": shard.count, "line": _hole("line")}
        task = app.amqp.as_task_v2(
            _hole("id"),
            broker.RUN_REQUEST,
            kwargs=arguments,
            group_id=group_id,
            group_index=_hole("position") if group_id is not None else None,
            chord=body,
            ignore_result=True,
            # Celery would put the prompt here, for Flower and the logs to show.
            argsrepr="-",
            kwargsrepr=_hole("repr"),
        )
        envelope = {
            "body": dumps(task.body),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": task.headers,
            "properties": {
                "correlation_id": _hole("id"),
                "reply_to": app.thread_oid,
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
                "body_encoding": "utf-8",
                "delivery_tag": _hole("tag"),
            },
        }
        # Every second piece is the name of a hole.
        pieces = _HOLE.split(dumps(envelope).replace("%", "%%"))
        self._template = "".join(piece if number % 2 == 0 else f"%({piece})s" for number, piece in enumerate(pieces))

    def fill(self, task_id: str, index: int, position: int, line: str | Sequence[int]) -> bytes:
        """The message of one request as it lies in the queue: its id, its index, its place in the chord, its line.

        `line` is the line, or of a large one where it lies.
        """
        quoted = f'"{task_id}"'
        message = self._template % {
            "id": quoted,
            "repr": f'"{self._ids}{index}"',
            "position": position,
            "tag": f'"{uuid.uuid4()}"',
            "index": index,
            # A string in the body, which is a string in the envelope.
            "line": _quoted(_quoted(line))[1:-1] if isinstance(line, str) else list(line),
        }
        return message.encode()


def _quoted(text: str) -> str:
    return to_json(text).decode()
