"""What the engine host tells of itself: a small protocol, so that it knows nothing of Prometheus.

Owns: `Observer` and `Unobserved`. Must not know: who listens.
On failure: an observer never raises, and is never waited for: it is called on the engine's loop, for every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from workers.engine import Reply
    from workers.engine.host import EngineHost


class Observer(Protocol):
    """Hears what happens to requests. Nothing that it is told may be kept or shown but numbers and kinds."""

    def watch(self, host: EngineHost) -> None:
        """From now on this host may be asked how it stands."""

    def taken(self, *, redelivered: bool, waited_s: float | None) -> None:
        """A delivery came; `waited_s` seconds after its message was published, where that is known.

        By two machines' clocks: it may be negative.
        """

    def parked(self) -> None:
        """A delivery was let go: a live worker runs its request."""

    def begun(self, strikes: int) -> None:
        """A request goes to the engine; so many workers or engines died while they ran it."""

    def called(self, line: str, seconds: float, reply: Reply | None) -> None:
        """An engine call ended after `seconds`; without a reply it was cut short or raised."""

    def recorded(self, line: str, reply: Reply, *, first: bool) -> None:
        """A reply went to the ledger. `first`: its row is the request's row; else another one was before it."""

    def idle(self, seconds: float, *, backlog: bool) -> None:
        """So much of the engine's time went unused, while there was something for it to do or was not."""

    def handed_back(self) -> None:
        """A request goes back to its queue."""

    def draining(self, *, dead: bool) -> None:
        """The worker stops, because its engine is dead or because it was told to."""


class Unobserved:
    """Hears nothing."""

    def watch(self, host: EngineHost) -> None:
        """Nothing."""

    def taken(self, *, redelivered: bool, waited_s: float | None) -> None:
        """Nothing."""

    def parked(self) -> None:
        """Nothing."""

    def begun(self, strikes: int) -> None:
        """Nothing."""

    def called(self, line: str, seconds: float, reply: Reply | None) -> None:
        """Nothing."""

    def recorded(self, line: str, reply: Reply, *, first: bool) -> None:
        """Nothing."""

    def idle(self, seconds: float, *, backlog: bool) -> None:
        """Nothing."""

    def handed_back(self) -> None:
        """Nothing."""

    def draining(self, *, dead: bool) -> None:
        """Nothing."""
