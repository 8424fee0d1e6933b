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
from typing import TYPE_CHECKING, Any

from common import keys
from common.ledger import parse_beats, parse_head
from common.settings import AGGREGATE_QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import redis

    from common.ledger import Progress, WorkerBeat

#: kombu's keys of what is in hand (kombu 5.7, transport/redis.py; `tests/contract/test_transport.py` holds them).
UNACKED, UNACKED_INDEX = "unacked", "unacked_index"

#: Seconds of work over which the rate is measured. Long enough for requests of a minute or two to even out.
RATE_WINDOW_S = 300.0
#: Seconds of work without a finished request after which the rate is known to be 0.
STILL_S = 60.0
#: Runs that are remembered to tell a restored head from a new one.
MAX_RUNS = 10_000


@dataclass(frozen=True)
class Run:
    """A run in flight. Requests of one queue alone are not counted by queue; they are those of `default`."""

    batch_id: str
    progress: Progress
    default: str

    @property
    def open(self) -> bool:
        """Whether it has no end yet."""
        return not self.progress.closed

    @property
    def queues(self) -> Mapping[str, int]:
        """The queues that its requests were published to, with how many."""
        return self.progress.published or {self.default: 1}

    @property
    def remaining(self) -> int:
        """Requests that are still to be run."""
        left = self.progress.total - self.progress.finished
        return max(0, left) if self.open and not self.progress.ending else 0

    def remaining_of(self, queue: str) -> float:
        """Those of a queue. What is not published yet is taken to fall to the queues as what was published did."""
        if queue not in self.queues or not self.remaining:
            return 0.0
        if not self.progress.published:
            return float(self.remaining)
        unfinished = {each: max(0, self.progress.unfinished(each)) for each in self.queues}
        unpublished = max(0, self.remaining - sum(unfinished.values()))
        share = self.queues[queue] / sum(self.queues.values())
        return min(float(self.remaining), unfinished[queue] + unpublished * share)

    def finished_of(self, queue: str) -> int:
        """Rows of requests of a queue, since Redis knows the run."""
        if not self.progress.published:
            return self.progress.finished if queue == self.default else 0
        return self.progress.finished_from.get(queue, 0)

    @property
    def tokens_per_request(self) -> float:
        """The mean of the finished requests; 0 before there is one."""
        tokens = sum(prompt + completion for prompt, completion in self.progress.tokens.values())
        return tokens / self.progress.finished if self.progress.finished else 0.0


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

    def open_batches(self, queue: str) -> int:
        """Batches without an end that have requests in a queue."""
        return len({run.batch_id for run in self.runs.values() if run.open and queue in run.queues})

    def remaining(self, queue: str) -> int:
        """Requests of open batches without a row, published or not."""
        return math.ceil(sum(run.remaining_of(queue) for run in self.runs.values()))

    def remaining_tokens(self, queue: str) -> float:
        """Estimate of the tokens of these requests."""
        return sum(run.remaining_of(queue) * run.tokens_per_request for run in self.runs.values())

    def ready(self, queue: str) -> int:
        """Workers that take requests of a queue."""
        return sum(worker.queue == queue and worker.state == "ready" for worker in self.workers)

    def capacity(self, queue: str) -> int:
        """Requests that these want in flight."""
        return sum(worker.inflight for worker in self.workers if worker.queue == queue and worker.state == "ready")


def read_sample(client: redis.Redis, queues: Iterable[str], *, default: str, lease_s: float) -> Sample:
    """Read everything in a few round trips; `default` is the queue without a route. Raises redis-py's errors."""
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
            pipe.hgetall(head)
        pipe.info("memory")
        pipe.info("persistence")
        answers = iter(pipe.execute())
    seconds, micros = next(answers)
    now = seconds + micros / 1e6
    leased, oldest = next(answers), next(answers)
    lengths = {name: next(answers) for name in names}
    fields = {head: next(answers) for head in heads}
    return Sample(
        queues=lengths,
        leased=leased,
        oldest_lease_s=max(0.0, now - oldest[0][1]) if oldest else 0.0,
        overdue=int(client.zcount(UNACKED_INDEX, "-inf", now - lease_s)),
        # One without a total expired between the scan and the question.
        runs={
            head: Run(head.split(":")[1], parse_head(found), default)
            for head, found in fields.items()
            if b"total" in found
        },
        workers=beats,
        info={**next(answers), **next(answers)},
    )


def _read_beats(client: redis.Redis) -> tuple[WorkerBeat, ...]:
    """The live workers. `Ledger.workers` drops the dead ones from the index, for which a reader has no right."""
    members: Any = client.zrange(keys.WORKERS, 0, -1)
    ids = [member.decode() for member in members]
    values: Any = client.mget([keys.worker(worker_id) for worker_id in ids]) if ids else []
    return tuple(parse_beats(zip(ids, values, strict=True)))


@dataclass
class Rate:
    """Finished requests of a queue per second, over the last minutes in which there was work and a worker to do it."""

    queue: str
    finished_total: int = 0
    _seen: dict[str, int] = field(default_factory=dict)
    _spans: deque[tuple[float, int, int]] = field(default_factory=deque)
    _last: tuple[float, int, bool] | None = None

    def add(self, at: float, sample: Sample) -> None:
        """Take the next sample in, of the moment `at` in seconds."""
        finished = self._new_rows(sample, first=self._last is None)
        self.finished_total += finished
        ready = sample.ready(self.queue)
        busy = bool(ready and sample.remaining(self.queue))
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
            finished = run.finished_of(self.queue)
            if not first:
                new += max(0, finished - self._seen.get(head, 0))
            self._seen[head] = max(finished, self._seen.pop(head, 0))
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
