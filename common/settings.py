"""Settings of every process: environment `FLEET_*`, read once in `main` and passed on as arguments.

Owns: names, defaults, units and limits of the settings, and the sentence for a bad one.
Must not know: what the settings are used for. Command-line options win: they are passed as arguments here.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.errors import UsageError

#: Largest shard: a part is sealed in one go, and a chord's body message carries one receipt per request.
MAX_SHARD_SIZE = 1000

#: Queue of the requests and of the aggregator's tasks.
GPU_QUEUE = "gpu"
AGGREGATE_QUEUE = "aggregate"


class FleetSettings(BaseSettings):
    """What every process of a fleet shares. Producer, workers and aggregator must agree on it."""

    model_config = SettingsConfigDict(env_prefix="FLEET_", env_ignore_empty=True, extra="ignore", frozen=True)

    #: Redis or Valkey: `redis://`, `rediss://` or `redis+socket:///path?virtual_host=0`.
    broker_url: str = "redis://localhost:6379/0"
    #: Root of the batch directories, `file:///…`; no default but with `--local`.
    store: str = ""
    #: Most requests of a shard; small files get smaller shards so that they show progress too.
    shard_size: int = Field(default=MAX_SHARD_SIZE, ge=1, le=MAX_SHARD_SIZE)
    #: Requests of a batch that may be published and not finished.
    window: int = Field(default=16_384, ge=1)

    def with_store(self) -> Self:
        """These settings, checked to name a store."""
        if not self.store:
            raise UsageError("FLEET_STORE is not set: name the folder of the batches, for example file:///srv/fleet")
        return self


class WorkerSettings(FleetSettings):
    """What a worker that serves an engine needs besides; for `celery -A workers worker` this is all there is."""

    #: The model that the engine serves: a path or a name; for `echo` just a name.
    model: str = ""
    engine: Literal["vllm", "echo"] = "vllm"
    #: The engine's own flags, quoted as in a shell.
    engine_args: str = ""
    #: Requests in flight; 0 leaves it to the engine's own rule.
    max_inflight: int = Field(default=0, ge=0)
    #: The queue that the worker consumes.
    queue: str = GPU_QUEUE
    #: Seconds that a stopping worker gives its running requests.
    drain_s: float = Field(default=30.0, ge=0)


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
        raise UsageError(f"FLEET_{name}: {first['msg']}") from None
