"""How a waiting producer shows progress: a bar on a terminal, plain lines elsewhere, always on stderr.

Owns: `Progress`, the rates and the time left. Must not know: where the numbers come from.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

#: Seconds between two plain lines.
PLAIN_INTERVAL_S = 10.0
#: Seconds that rates look back.
RATE_WINDOW_S = 20.0


class Rates:
    """Rates over the last seconds, from samples of counters."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, at: float, done: int, tokens: int) -> None:
        """Add a sample taken at `at` (monotonic seconds)."""
        self._samples.append((at, done, tokens))
        while len(self._samples) > 2 and self._samples[1][0] < at - RATE_WINDOW_S:
            self._samples.popleft()

    def per_second(self) -> tuple[float, float]:
        """Requests and tokens per second."""
        if not self._samples:
            return 0.0, 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds


def counted(number: int, thing: str) -> str:
    """A number of things for people: 1 shard, 2 shards, 0 batches."""
    ending = "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{'' if number == 1 else ending}"


def duration(seconds: float) -> str:
    """Seconds for people: 9.3 s, 4:05, 1:02:03."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(max(60, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Progress of one batch. Use as a context manager; without a terminal it prints a line every few seconds."""

    def __init__(self, stream: TextIO | None = None, *, plain: bool | None = None) -> None:
        self._stream = stream = stream or sys.stderr  # as it is now, not as it was when this was imported
        self._plain = not stream.isatty() if plain is None else plain
        self._rates = Rates()
        self._last_line: float | None = None
        self._note = ""
        self._bar: _Bar | None = None

    def __enter__(self) -> Self:
        if not self._plain:
            self._bar = _Bar(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """Show a lasting line."""
        if self._bar is not None:
            self._bar.say(text)
        else:
            print(text, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Show what is being waited for; plain output prints it when it changes its first word."""
        if self._bar is not None:
            self._bar.note(text)
        elif text and text.partition(" (")[0] != self._note.partition(" (")[0]:
            print(text, file=self._stream, flush=True)
        self._note = text

    def update(self, *, done: int, total: int, failed: int, tokens: int) -> None:
        """Show new counts. `done` includes failed rows."""
        at = time.monotonic()
        self._rates.add(at, done, tokens)
        requests_s, tokens_s = self._rates.per_second()
        left = f"{duration((total - done) / requests_s)} left" if requests_s and done < total else ""
        parts = (f"{failed} failed", f"{requests_s:.1f} requests/s", f"{tokens_s:.0f} tokens/s", left)
        figures = ", ".join(part for part in parts if part)
        if self._bar is not None:
            self._bar.update(done, total, figures)
        elif done and (self._last_line is None or at - self._last_line >= PLAIN_INTERVAL_S) and done < total:
            self._last_line = at
            print(f"{done}/{total} done, {figures}", file=self._stream, flush=True)


class _Bar:
    """A bar on a terminal, drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - 100 ms that plain output need not pay
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as RichProgress  # noqa: PLC0415

        self._console = Console(file=stream, highlight=False)
        self._rich = RichProgress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[waiting]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._rich.add_task("", total=None, figures="", waiting="")
        self._rich.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def note(self, text: str) -> None:
        self._rich.update(self._task, waiting=text)

    def update(self, done: int, total: int, figures: str) -> None:
        self._rich.update(self._task, completed=done, total=total, figures=figures)

    def stop(self) -> None:
        self._rich.stop()
