"""How much work a fleet has and how fast it gets done, read from Redis by lengths and counters alone.

Owns: `read_sample`, the measured rate, and the formula for the number of workers.
Must not know: who asks (`workers.exporter`), Celery, the store. Never reads a message or a row, and writes nothing, so
that a user of Redis with read rights is enough.
On failure: raises redis-py's errors; an outage is never a sample of zeros.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from common import keys
from common.ledger import parse_beat
from common.settings import AGGREGATE_QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import redis

    from common.ledger import WorkerBeat

#: kombu's keys of what is in hand (kombu 5.7, transport/redis.py; `tests/contract/test_transport.py` holds them).
UNACKED, UNACKED_INDEX = "unacked", "unacked_index"

#: Seconds of work over which the rate is measured. Long enough for requests of a minute or two to even out.
RATE_WINDOW_S = 300.0
#: Seconds of work without a finished request after which the rate is known to be 0.
STILL_S = 60.0
#: Runs that are remembered to tell a restored head from a new one.
MAX_RUNS = 10_000

_FIELDS = ("total", "finished", "prompt_tokens", "completion_tokens", "ending", "closed")


class Run(NamedTuple):
    """Counters of a run in flight. `open`: it has no end yet; `ending`: it is being ended early."""

    batch_id: str
    total: int
    finished: int
    tokens: int
    open: bool
    ending: bool

    @property
    def remaining(self) -> int:
        """Requests that are still to be run."""
        return max(0, self.total - self.finished) if self.open and not self.ending else 0

    @property
    def remaining_tokens(self) -> float:
        """Estimate by the mean of the finished requests."""
        return self.remaining * self.tokens / self.finished if self.finished else 0.0


@dataclass(frozen=True)
class Sample:
    """What Redis said at one moment. `queues`: messages waiting, by queue; `runs` by the key of their head."""

    queues: Mapping[str, int]
    leased: int
    oldest_lease_s: float
    overdue: int
    runs: Mapping[str, Run]
    workers: tuple[WorkerBeat, ...]
    info: Mapping[str, Any]

    @property
    def open_batches(self) -> int:
        """Batches without an end."""
        return len({run.batch_id for run in self.runs.values() if run.open})

    @property
    def remaining(self) -> int:
        """Requests of open batches without a row, published or not."""
        return sum(run.remaining for run in self.runs.values())

    @property
    def remaining_tokens(self) -> float:
        """Estimate of the tokens of these requests."""
        return sum(run.remaining_tokens for run in self.runs.values())

    def ready(self, queue: str) -> int:
        """Workers that take requests of a queue."""
        return sum(worker.queue == queue and worker.state == "ready" for worker in self.workers)

    def capacity(self, queue: str) -> int:
        """Requests that these want in flight."""
        return sum(worker.inflight for worker in self.workers if worker.queue == queue and worker.state == "ready")


def read_sample(client: redis.Redis, queues: Iterable[str], *, lease_s: float) -> Sample:
    """Read everything in a few round trips. Raises redis-py's errors."""
    beats = _read_beats(client)
    names = sorted({*queues, AGGREGATE_QUEUE, *(beat.queue for beat in beats)})
    heads = sorted(key.decode() for key in client.scan_iter(match=keys.HEADS, count=1000))
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hlen(UNACKED)
        pipe.zrange(UNACKED_INDEX, 0, 0, withscores=True)
        for name in names:
            pipe.llen(name)
        for head in heads:
            pipe.hmget(head, _FIELDS)
        pipe.info("memory")
        pipe.info("persistence")
        answers = iter(pipe.execute())
    seconds, micros = next(answers)
    now = seconds + micros / 1e6
    leased, oldest = next(answers), next(answers)
    lengths = {name: next(answers) for name in names}
    runs = {head: run for head in heads if (run := _run(head, next(answers))) is not None}
    return Sample(
        queues=lengths,
        leased=leased,
        oldest_lease_s=max(0.0, now - oldest[0][1]) if oldest else 0.0,
        overdue=int(client.zcount(UNACKED_INDEX, "-inf", now - lease_s)),
        runs=runs,
        workers=beats,
        info={**next(answers), **next(answers)},
    )


def _read_beats(client: redis.Redis) -> tuple[WorkerBeat, ...]:
    """The live workers. `Ledger.workers` drops the dead ones from the index, for which a reader has no right."""
    members: Any = client.zrange(keys.WORKERS, 0, -1)
    ids = [member.decode() for member in members]
    values: Any = client.mget([keys.worker(worker_id) for worker_id in ids]) if ids else []
    return tuple(parse_beat(worker_id, value) for worker_id, value in zip(ids, values, strict=True) if value)


def _run(head: str, values: list[bytes | None]) -> Run | None:
    total, finished, prompt_tokens, completion_tokens, ending, closed = (value or b"" for value in values)
    if not total:
        return None  # it expired between the scan and the question
    return Run(
        batch_id=head.split(":")[1],
        total=int(total),
        finished=int(finished or 0),
        tokens=int(prompt_tokens or 0) + int(completion_tokens or 0),
        open=not closed,
        ending=bool(ending),
    )


@dataclass
class Rate:
    """Finished requests per second, over the last minutes in which there was work and a worker to do it."""

    finished_total: int = 0
    _seen: dict[str, int] = field(default_factory=dict)
    _spans: deque[tuple[float, int, int]] = field(default_factory=deque)
    _last: tuple[float, int, bool] | None = None

    def add(self, at: float, sample: Sample, queue: str) -> None:
        """Take the next sample in, of the moment `at` in seconds."""
        finished = self._new_rows(sample, first=self._last is None)
        self.finished_total += finished
        ready = sample.ready(queue)
        busy = bool(ready and sample.remaining)
        if self._last is not None:
            since, ready_before, busy_before = self._last
            if busy_before or (busy and finished):
                self._spans.append((at - since, finished, max(ready, ready_before)))
        self._last = (at, ready, busy)
        while len(self._spans) > 1 and sum(span[0] for span in self._spans) - self._spans[0][0] >= RATE_WINDOW_S:
            self._spans.popleft()

    def skip(self) -> None:
        """A sample could not be had: the time until the next one does not count."""
        if self._last is not None:
            self._last = (*self._last[:2], False)

    def _new_rows(self, sample: Sample, *, first: bool) -> int:
        """Rows since the last sample. A head that was restored stands lower than before, not higher."""
        new = 0
        for head, run in sample.runs.items():
            if not first:
                new += max(0, run.finished - self._seen.get(head, 0))
            self._seen[head] = max(run.finished, self._seen.pop(head, 0))
        while len(self._seen) > max(MAX_RUNS, len(sample.runs)):
            del self._seen[next(iter(self._seen))]
        return new

    @property
    def per_second(self) -> float | None:
        """Of the whole fleet; None until measured."""
        return self._over(sum(span[0] for span in self._spans))

    @property
    def per_worker(self) -> float | None:
        """Of one ready worker; None until measured."""
        return self._over(sum(span[0] * span[2] for span in self._spans))

    def _over(self, time_s: float) -> float | None:
        finished = sum(span[1] for span in self._spans)
        known = finished or sum(span[0] for span in self._spans) >= STILL_S
        return finished / time_s if known and time_s else None


def drain_s(remaining: int, per_second: float | None) -> float | None:
    """Seconds until nothing remains; None while nobody can know."""
    if not remaining:
        return 0.0
    return remaining / per_second if per_second else None


def desired_replicas(
    *, remaining: int, waiting: int, workers: int, per_worker: float | None, target_s: float, least: int, most: int
) -> int:
    """How many workers would do what remains in `target_s` seconds. `waiting`: messages queued or leased."""
    if not remaining and not waiting:
        wanted = 0
    elif per_worker:
        wanted = max(1, math.ceil(remaining / (per_worker * target_s)))
    else:
        wanted = max(1, workers)
    return max(least, min(wanted, most) if most else wanted)
