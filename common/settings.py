"""Settings of every process: environment `FLEET_*`, read once in `main` and passed on as arguments.

Owns: names, defaults, units and limits of the settings, and the sentence for a bad one.
Must not know: what the settings are used for. Command-line options win: they are passed as arguments here.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.errors import UsageError

#: Largest shard: a part is sealed in one go, and a chord's body message carries one receipt per request.
MAX_SHARD_SIZE = 1000

#: Most requests of one message.
MAX_PACK_SIZE = 64

#: Shortest lease: below it a busy machine loses deliveries that are alive.
MIN_LEASE_S = 10.0
DEFAULT_LEASE_S = 30.0
#: Tests cannot wait for real leases; with this variable at "1" shorter ones are accepted.
_SHORT_LEASES = "FLEET_TEST_SHORT_LEASES"

#: Queue of the requests and of the aggregator's tasks.
GPU_QUEUE = "gpu"
AGGREGATE_QUEUE = "aggregate"

#: What a queue may be called: it is a key in Redis and a label of metrics.
QUEUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def checked_queue(name: str) -> str:
    """The name, if a queue may be called so. Raises `ValueError` with a sentence that does not quote it."""
    if QUEUE_NAME.fullmatch(name) is None:
        raise ValueError("must be letters, digits, '.', '_' and '-', and begin with a letter or digit")
    return name


#: A setting that names one queue.
Queue = Annotated[str, AfterValidator(checked_queue), Field(json_schema_extra={"limits": "letters, digits, `._-`"})]


class FleetSettings(BaseSettings):
    """What every process of a fleet shares. Producer, workers and aggregator must agree on it."""

    model_config = SettingsConfigDict(env_prefix="FLEET_", env_ignore_empty=True, extra="ignore", frozen=True)

    #: Redis or Valkey: `redis://`, `rediss://` or `redis+socket:///path?virtual_host=0`.
    broker_url: str = "redis://localhost:6379/0"
    #: Root of the batch directories, `file:///…` or `s3://…`; no default but with `--local`.
    store: str = ""
    #: URL of a store that is compatible with S3, for everything that is called `s3://…`; "" for AWS.
    s3_endpoint: str = ""
    #: Most requests of a shard; small files get smaller shards so that they show progress too.
    shard_size: int = Field(default=MAX_SHARD_SIZE, ge=1, le=MAX_SHARD_SIZE)
    #: Requests of a batch that may be published and not finished.
    window: int = Field(default=16_384, ge=1)
    #: Most requests that a message may carry, of endpoints that do not generate and when they take a worker a few
    #: milliseconds; 1 for a message each. Producers and aggregators.
    pack_size: int = Field(default=16, ge=1, le=MAX_PACK_SIZE)
    #: Queues of models, `MODEL=QUEUE,…`; a model that is not named goes to the queue `gpu`. Producers and aggregators.
    routes: str = ""
    #: Seconds for which a delivery is its worker's, renewed several times while the worker lives; at least 10. A chord
    #: whose body is being sent claims it for up to 21 s; a lease below that leaves such a loss to the watchdog.
    lease_s: float = Field(
        default=DEFAULT_LEASE_S, allow_inf_nan=False, json_schema_extra={"limits": f"at least {MIN_LEASE_S:g}"}
    )

    @field_validator("routes")
    @classmethod
    def _readable(cls, routes: str) -> str:
        from common.routes import Routes  # noqa: PLC0415 - it needs the names of queues from here

        Routes.parse(routes)  # here, so that every process refuses it before it does anything
        return routes

    @field_validator("lease_s")
    @classmethod
    def _long_enough(cls, lease_s: float) -> float:
        if lease_s < (0.1 if os.environ.get(_SHORT_LEASES) == "1" else MIN_LEASE_S):
            raise ValueError(f"must be at least {MIN_LEASE_S:g}")
        return lease_s

    def with_store(self) -> Self:
        """These settings, checked to name a store."""
        if not self.store:
            raise UsageError(
                "FLEET_STORE is not set: name the place of the batches: file:///srv/fleet or s3://bucket/prefix"
            )
        return self


class ProducerSettings(FleetSettings):
    """What a producer needs besides: limits on what an input may cost."""

    #: Bytes of an input, as it is read: decompressed.
    max_input_bytes: int = Field(default=64 * 1024**3, ge=1)
    #: Lines of an input, blank ones too.
    max_lines: int = Field(default=10_000_000, ge=1)
    #: Bytes of one line. A worker without a store borrows a large one through Redis, whose strings end at 512 MiB,
    #: and its answer travels there.
    max_line_bytes: int = Field(default=64 * 1024**2, ge=1)


class WorkerSettings(FleetSettings):
    """What a worker that serves an engine needs besides; for `celery -A workers worker` this is all there is."""

    #: The model that the engine serves: a path or a name; for `echo` just a name.
    model: str = ""
    #: What answers requests; `echo` needs no model.
    engine: Literal["vllm", "echo"] = "vllm"
    #: The engine's own flags, quoted as in a shell.
    engine_args: str = ""
    #: Requests in flight; 0 leaves it to the engine's own rule.
    max_inflight: int = Field(default=0, ge=0)
    #: The queue that the worker consumes.
    queue: Queue = GPU_QUEUE
    #: The only batch that an aggregator looks after: that of a local fleet, which sets it.
    only_batch: str = ""
    #: Seconds that a stopping worker gives its running requests.
    drain_s: float = Field(default=30.0, ge=0)
    #: Deaths of workers or engines that a request may cause; the next one makes it a failed row.
    max_deliveries: int = Field(default=3, ge=2)
    #: Seconds that one engine call may take; 0 for no limit.
    request_timeout_s: float = Field(default=0.0, ge=0)
    #: Port of the worker's or aggregator's metrics and health pages; 0 for none.
    metrics_port: int = Field(default=0, ge=0, le=65535)
    #: Address of these pages. In a container `0.0.0.0`; they ask for no password.
    metrics_host: str = "127.0.0.1"
    #: Hosts, separated by commas, from which media that requests name may be fetched; empty for all public ones.
    allowed_media_domains: str = ""
    #: Bytes that all media of a request may have together.
    media_max_bytes: int = Field(default=128 * 1024 * 1024, ge=1)
    #: Seconds that one download may take, with its redirects.
    media_timeout_s: float = Field(default=60.0, gt=0)
    #: How lines of the log look: `json`, `text`, or by whether stderr is a terminal. The exporter and the engine's
    #: processes read it too (`workers.logs`).
    log_format: Literal["auto", "json", "text"] = "auto"
    #: Share of a traced batch's requests that get a span of their own, 0 to 1; see docs/metrics.md for traces.
    trace_requests: float = Field(default=0.01, ge=0, le=1)


class ExporterSettings(FleetSettings):
    """What the exporter needs besides."""

    #: Port of its pages.
    exporter_port: int = Field(default=9465, ge=1, le=65535)
    #: Address of its pages. In a container `0.0.0.0`; they ask for no password.
    exporter_host: str = "127.0.0.1"
    #: Seconds between two samples of Redis.
    exporter_interval_s: float = Field(default=5.0, ge=0.1)
    #: The queue of requests that no route names, and the default of `/scale`: that of the workers.
    queue: Queue = GPU_QUEUE


Settings = TypeVar("Settings", bound=FleetSettings)


def load(kind: type[Settings], **options: Any) -> Settings:
    """Read settings of one kind; options that are not None win over the environment.

    Raises `UsageError` with one sentence that names the variable, never its value (it may hold a password).
    """
    try:
        return kind(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise UsageError(f"FLEET_{name}: {first['msg'].removeprefix('Value error, ')}") from None
