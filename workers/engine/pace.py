"""How long an engine takes for a request, lately.

Owns: `Pace`. Must not know: engines, who asks.
On failure: nothing here can fail.
"""

from __future__ import annotations

#: Share of the mean that one request makes: it follows some hundred requests. The first hundred weigh alike, since an
#: engine's first ones are often its slowest.
_SHARE = 0.01


class Pace:
    """The mean of an engine's seconds per request: what one takes, divided by how many run at once (Little's law)."""

    def __init__(self) -> None:
        #: 0 while nothing was measured.
        self.request_s = 0.0
        self._noted = 0

    def note(self, seconds: float, *, beside: int) -> None:
        """Count a request that took so many seconds, where so many ran, itself included."""
        each_s = seconds / max(1, beside)
        self._noted += 1
        self.request_s += (each_s - self.request_s) * max(_SHARE, 1 / self._noted)
