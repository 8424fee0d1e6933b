"""Every Redis key of the fleet, in one table. Celery's and kombu's own keys are theirs.

    key                                type    holds
    fleet:<batch>:<run>:head           hash    the run in flight: total, shards, frontier, step, finished, failed,
                                               fail_after, inexact, closed, ending ("cancelled", "expired", "failed"
                                               or ""), store (the id of the one that it was restored from); tokens
                                               prompt:<model> and completion:<model>; requests published:<queue> and
                                               finished:<queue>. Written first by `restore`, from the store; a script
                                               that finds none writes nothing.
    fleet:<batch>:<run>:sealed         set     numbers of the shards whose part exists
    fleet:<batch>:<run>:rows:<shard>   hash    index -> result row, of a shard that is not sealed yet
    fleet:<batch>:<run>:marks:<shard>  hash    index -> "worker/delivery" that is running it
    fleet:<batch>:<run>:calls:<shard>  hash    index -> engine calls that were begun, across the fleet
    fleet:<batch>:<run>:strikes:<shard> hash   index -> workers or engines that died while they ran it
    fleet:worker:<worker>              string  JSON heartbeat of a live worker, with a TTL
    fleet:workers                      zset    worker -> time of its last heartbeat, with a TTL
    fleet:reopened                     set     "batch/run" of open runs after the first
    fleet:watchdog                     string  who is the watchdog now, with a TTL
    fleet:marker:<marker>              string  a marker message was consumed, with a TTL
    fleet:line:<batch>:<run>:<index>   string  a large line, lent to a worker without the store, with a TTL

Keys of a closed batch have a TTL (`CLOSED_TTL_S`), and so have those of one that somebody removed from the store; keys
of an open one never do.
"""

from __future__ import annotations

#: Seconds for which a line is lent.
LOAN_TTL_S = 60

#: Seconds for which a closed batch's small keys stay, so that late deliveries learn that it is closed.
CLOSED_TTL_S = 24 * 3600

#: Pattern of all heads.
HEADS = "fleet:*:head"

WORKERS = "fleet:workers"
WATCHDOG = "fleet:watchdog"
REOPENED = "fleet:reopened"

#: `worker(worker_id)` is this and the id; the ledger's scripts look the owner of a mark up by it.
WORKER_PREFIX = "fleet:worker:"


def marker(marker_id: str) -> str:
    """String: exists once the marker was consumed."""
    return f"fleet:marker:{marker_id}"


def line(batch_id: str, run: int, index: int) -> str:
    """String: a line that was lent."""
    return f"fleet:line:{batch_id}:{run}:{index}"


def of_batch(batch_id: str) -> str:
    """Pattern of all that a batch has, of whatever run."""
    return f"fleet:{batch_id}:*"


def head(batch_id: str, run: int) -> str:
    """Hash: the run in flight."""
    return f"fleet:{batch_id}:{run}:head"


def sealed(batch_id: str, run: int) -> str:
    """Set: numbers of the sealed shards."""
    return f"fleet:{batch_id}:{run}:sealed"


def rows(batch_id: str, run: int, shard: int) -> str:
    """Hash: index -> result row."""
    return f"fleet:{batch_id}:{run}:rows:{shard}"


def marks(batch_id: str, run: int, shard: int) -> str:
    """Hash: index -> who is running it."""
    return f"fleet:{batch_id}:{run}:marks:{shard}"


def calls(batch_id: str, run: int, shard: int) -> str:
    """Hash: index -> engine calls so far."""
    return f"fleet:{batch_id}:{run}:calls:{shard}"


def strikes(batch_id: str, run: int, shard: int) -> str:
    """Hash: index -> deaths while it ran."""
    return f"fleet:{batch_id}:{run}:strikes:{shard}"


def worker(worker_id: str) -> str:
    """String: a worker's heartbeat."""
    return f"{WORKER_PREFIX}{worker_id}"
