"""How long an engine takes for a request, lately.

Owns: `Pace`. Must not know: engines, who asks.
On failure: nothing here can fail.
"""

from __future__ import annotations

#: Share of the mean that one request makes: it follows some hundred requests.
_SHARE = 0.01


class Pace:
    """The mean of an engine's seconds per request: what one takes, divided by how many run at once (Little's law)."""

    def __init__(self) -> None:
        #: 0 while nothing was measured.
        self.request_s = 0.0

    def note(self, seconds: float, *, beside: int) -> None:
        """Count a request that took so many seconds, where so many ran, itself included."""
        each_s = seconds / max(1, beside)
        self.request_s += (each_s - self.request_s) * (_SHARE if self.request_s else 1.0)
