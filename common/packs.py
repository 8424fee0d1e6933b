"""Packs: a few requests that one message carries, where requests are so short that their messages would weigh more.

Owns: which requests may share a message, and how many do. Must not know: what messages look like, who sends them.
On failure: nothing here can fail; a line that cannot be read travels alone.

A request that generates takes its worker tens of milliseconds, and has a message of its own. An embedding takes a few,
or a fraction of one, and then what a message costs (some 0.3 ms of CPU in all processes together) counts. How long
requests take is measured by the workers and told in their heartbeats; until they have, nothing is packed.

Each request of a pack keeps its own mark, strikes, row and engine call (`common.ledger`): what they share is the
message, so they are leased, acknowledged and counted in the chord together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import from_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from common.ledger import WorkerBeat

    #: What a message carries of a request: its line, or where a large one lies (shard, offset, bytes).
    Claim = str | tuple[int, int, int]

#: Ends of the urls whose requests do not generate: each is one pass of the model over its input.
PACKED_URLS = ("/embeddings", "/score", "/rerank", "/pooling", "/classify")

_QUOTED_ENDS = tuple(f'{url}"' for url in PACKED_URLS)

#: Seconds of a worker's time that a pack may take: what waits for its slowest member, and comes back if a worker dies.
PACK_S = 0.025

#: Bytes of all lines of a pack together.
PACK_BYTES = 16 * 1024

#: A pack takes no more than this share of a worker's requests in flight.
PACK_SHARE = 4


def pack_sizes(workers: Iterable[WorkerBeat], most: int) -> dict[str, int]:
    """How many requests a message may carry, by queue; at most `most`, and 1 for a queue that is not named.

    By the slowest worker that serves a queue, and the one with the least in flight. One that has measured nothing yet
    may be slow, or too old to know packs.
    """
    sizes: dict[str, int] = {}
    for worker in workers:
        if worker.engine and worker.state == "ready":
            in_time = int(PACK_S / worker.request_s) if worker.request_s else 1
            size = max(1, min(most, in_time, worker.inflight // PACK_SHARE))
            sizes[worker.queue] = min(size, sizes.get(worker.queue, size))
    return sizes


def pack(
    requests: Iterable[tuple[str, int, Claim]], sizes: Mapping[str, int]
) -> Iterator[tuple[str, int, list[Claim]]]:
    """Group requests (queue, index, claim) into messages: queue, index of the first, and the claims of all.

    Only neighbours share a message: requests of one queue whose indexes follow each other.
    """
    queue, first, claims, size = "", 0, [], 0  # type: tuple[str, int, list[Claim], int]
    for at, index, claim in requests:
        room = sizes.get(at, 1)
        bytes_ = len(claim.encode()) if room > 1 and isinstance(claim, str) and _is_short(claim) else PACK_BYTES
        if (
            claims
            and at == queue
            and index == first + len(claims)
            and len(claims) < room
            and size + bytes_ < PACK_BYTES
        ):
            claims.append(claim)
            size += bytes_
            continue
        if claims:
            yield queue, first, claims
        queue, first, claims, size = at, index, [claim], bytes_
    if claims:
        yield queue, first, claims


def may_be_short(line: str) -> bool:
    """Whether a line may be of a request that can share a message, without reading it: a prompt may fool it.

    A line that is too long for any pack says nothing of those that fit, and is not looked through.
    """
    return len(line) < PACK_BYTES and any(end in line for end in _QUOTED_ENDS)


def _is_short(line: str) -> bool:
    """Whether a line's request does not generate."""
    try:
        return str(from_json(line)["url"]).endswith(PACKED_URLS)
    except (ValueError, KeyError, TypeError):
        return False
