"""The Celery app and the Redis client: how processes of the fleet talk.

Owns: `make_app`, task names, queues, Celery's settings with the reason for each, and Redis URLs.
Must not know: what the tasks do (`workers.tasks`), what a batch is.
On failure: `reachable` turns a broker that does not answer into `BrokerUnavailableError`, which names the address
without its password and both ways out.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import redis
from celery import Celery
from celery.app.amqp import AMQP
from kombu import Queue
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from common.errors import BrokerUnavailableError, UsageError
from common.settings import AGGREGATE_QUEUE, DEFAULT_LEASE_S, GPU_QUEUE
from common.transport import Connection, fleet_url, transport_options

RUN_REQUEST = "fleet.run_request"
SEAL_SHARD = "fleet.seal_shard"
ASSEMBLE_BATCH = "fleet.assemble_batch"
FEED = "fleet.feed"
END_EARLY = "fleet.end_early"
FAIL_REQUEST = "fleet.fail_request"
#: A worker without the store asks for a line that was too large for its message.
LEND_LINE = "fleet.lend_line"
#: Sent to a request queue: once it is consumed, the queue has passed all that was sent before it.
MARKER = "fleet.marker"

#: What a delivery returns to its chord. The chord only counts; results are in the ledger.
RECEIPT = 1

_SOCKET_SCHEME = "redis+socket"
#: redis-py's connections over Unix sockets do not know these.
_TCP_OPTIONS: dict[str, Any] = {"socket_keepalive": True, "socket_connect_timeout": 5}


class _Messaging(AMQP):  # type: ignore[misc]  # Celery has no types
    """Celery's way to its broker, by our connection."""

    Connection = Connection


def make_app(broker_url: str, *, request_queue: str = GPU_QUEUE, lease_s: float = DEFAULT_LEASE_S) -> Celery:
    """The Celery app of the fleet, the same for producer, workers, aggregator and Flower.

    Celery 5.7 and kombu 5.7 are pinned: the chord of 5.7 counts a task that ran twice once, older ones do not.
    """
    checked_url(broker_url)
    app = Celery("fleet", broker=fleet_url(broker_url), backend=broker_url, amqp=_Messaging, set_as_current=False)
    app.conf.update(
        # A message lives until its row is recorded.
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,
        worker_prefetch_multiplier=1,
        # Results never travel through Celery; receipts go to the chord all the same.
        task_ignore_result=True,
        # JSON only. Nobody who can write to Redis may run code in a worker.
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        # Events cost 0.15 ms of CPU a request; `-E` turns them on for Flower.
        task_send_sent_event=False,
        worker_send_task_events=False,
        # A lost connection is no reason to cancel what the engine is doing.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # The transport counts what runs on after a reconnect; Celery would take it off the window a second time.
        worker_enable_prefetch_count_reduction=False,
        broker_connection_retry_on_startup=True,
        # A broker may be away for hours; the leases are looked after by the transport meanwhile.
        broker_connection_max_retries=None,
        # Celery's redirection would wrap vLLM's log lines and lose their level.
        worker_redirect_stdouts=False,
        worker_hijack_root_logger=False,
        # A batch may stand still for days; each finished part refreshes its chord.
        result_chord_expires=7 * 86400,
        # The claim on firing the body is twice this; it must stay below the visibility timeout.
        result_chord_join_timeout=3.0,
        # Receipts are constants: their order is not worth 100 bytes each.
        result_backend_transport_options={"result_chord_ordered": False},
        task_default_queue=request_queue,
        task_create_missing_queues=True,
        task_queues=[Queue(request_queue), Queue(AGGREGATE_QUEUE)],
        task_routes={
            SEAL_SHARD: {"queue": AGGREGATE_QUEUE},
            ASSEMBLE_BATCH: {"queue": AGGREGATE_QUEUE},
            FEED: {"queue": AGGREGATE_QUEUE},
            END_EARLY: {"queue": AGGREGATE_QUEUE},
            LEND_LINE: {"queue": AGGREGATE_QUEUE},
            FAIL_REQUEST: {"queue": AGGREGATE_QUEUE},
        },
        # No retry option here: any of them turns kombu's batch publishing off.
        broker_transport_options={
            **transport_options(lease_s),
            "max_connections": 64,
            "socket_timeout": 30,
            "health_check_interval": 25,
            # The body is ASCII JSON already: no base64 around it.
            "body_encoding": "utf-8",
            **({} if broker_url.startswith(_SOCKET_SCHEME) else _TCP_OPTIONS),
        },
        worker_pool="workers.pool:TaskPool",
    )
    return app


def redis_client(broker_url: str, *, tries: int = 3, timeout_s: float = 30.0) -> redis.Redis:
    """A client for the fleet's own keys in the broker's database. Calls are tried `tries` times with backoff.

    A broker that is silent for `timeout_s` counts as away.
    """
    checked_url(broker_url)
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), tries)
    errors: list[type[Exception]] = [redis.ConnectionError, redis.TimeoutError]
    tcp_only = {} if broker_url.startswith(_SOCKET_SCHEME) else _TCP_OPTIONS
    return redis.Redis.from_url(
        _redis_py_url(broker_url),
        retry=retry,
        retry_on_error=errors,
        socket_timeout=timeout_s,
        health_check_interval=25,
        **tcp_only,
    )


def checked_url(broker_url: str) -> str:
    """The URL, if the fleet can use it. Raises `UsageError`."""
    try:
        parts = urlsplit(broker_url)
        _ = parts.port  # reading it is what checks it
    except ValueError:
        parts = None
    if parts is not None and parts.scheme not in ("redis", "rediss", _SOCKET_SCHEME):
        raise UsageError(
            f"FLEET_BROKER_URL has the scheme {parts.scheme!r}; it must be redis://, rediss:// or redis+socket://"
        )
    # Quoting the URL, or what is wrong in it, could quote a part of its password.
    if parts is None or parts.fragment or "@" in parts.query:
        raise UsageError(
            "FLEET_BROKER_URL is no URL: its port is not a number, or its password holds / ? # or @, "
            "which must be written as %2F %3F %23 %40"
        )
    return broker_url


def socket_url(path: str) -> str:
    """The broker URL of a server that listens on a Unix socket only."""
    return f"{_SOCKET_SCHEME}://{quote(path)}?virtual_host=0"


def _redis_py_url(broker_url: str) -> str:
    """redis-py calls a socket `unix://path?db=0` where Celery says `redis+socket://path?virtual_host=0`."""
    parts = urlsplit(broker_url)
    if parts.scheme != _SOCKET_SCHEME:
        return broker_url
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/")
    return f"unix://{parts.netloc}{parts.path}?db={database}"


def without_password(broker_url: str) -> str:
    """The URL for people: no user, no password, no options."""
    parts = urlsplit(broker_url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def reachable(client: redis.Redis, broker_url: str) -> None:
    """Return when the broker answers. Raises `BrokerUnavailableError`, or `UsageError` for a refused password."""
    try:
        client.ping()
    except redis.AuthenticationError as exc:
        raise UsageError(f"the broker at {without_password(broker_url)} refuses the user or password") from exc
    except redis.RedisError as exc:
        raise BrokerUnavailableError(
            f"no broker at {without_password(broker_url)} (FLEET_BROKER_URL): "
            "start one there, for example with `redis-server`, or run everything on this machine with --local"
        ) from exc


def set_up_warnings(client: redis.Redis) -> list[str]:
    """What is wrong with the broker's set-up, a sentence each; a server that does not tell is not complained about."""
    info: Any = client.info()
    found = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(f"Redis may evict what is in flight: set maxmemory-policy noeviction, not {policy}")
    if info.get("aof_enabled") == 0:
        found.append(
            "Redis does not persist: after its restart all rows that are not sealed run again; set appendonly yes"
        )
    return found
