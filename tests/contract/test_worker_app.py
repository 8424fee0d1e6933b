"""What a worker's app does at Celery's signals. In a process of its own: the app connects handlers for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from types import SimpleNamespace as Thing
import redis
from common import broker
from common.settings import AGGREGATE_QUEUE
from workers.app import start_watchdog

started = []
settings = Thing(broker_url=broker.socket_url(sys.argv[1]))
fleet = Thing(settings=settings, watchdog=Thing(start=lambda: started.append(True)))
app = Thing(fleet=fleet, amqp=Thing(queues=Thing(consume_from={AGGREGATE_QUEUE: None})))
try:
    start_watchdog(Thing(app=app))
except redis.RedisError:
    print("the broker failed, watchdogs started:", len(started))
"""


def test_the_watchdog_starts_though_the_broker_fails_while_its_set_up_is_asked_for(tmp_path: Path) -> None:
    """Celery logs an exception of a signal's handler and goes on; an aggregator without a watchdog would go on too."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "nobody.sock")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.stdout.strip() == "the broker failed, watchdogs started: 1", done.stderr
