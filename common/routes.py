"""Which queue a request goes to, by the model that it names.

Owns: `Routes`, and the setting's form. Must not know: who publishes, who consumes.
On failure: a setting that cannot be read raises `UsageError` with one sentence.

    FLEET_ROUTES="llama=gpu-llama,embedder=gpu-embed"

A model that no route names goes to the default queue, whose engine answers it, with a 404 row if it does not serve it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.batch import model_of
from common.errors import UsageError
from common.settings import AGGREGATE_QUEUE, GPU_QUEUE, QUEUE_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self


@dataclass(frozen=True)
class Routes:
    """Model -> queue. Without routes every request goes to the default queue, and no line is looked into."""

    by_model: Mapping[str, str] = field(default_factory=dict)
    default: str = GPU_QUEUE

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `MODEL=QUEUE,MODEL=QUEUE`. Raises `UsageError`."""
        by_model: dict[str, str] = {}
        for each in filter(None, (part.strip() for part in text.split(","))):
            model, equals, queue = (part.strip() for part in each.rpartition("="))
            if not equals or not model or QUEUE_NAME.fullmatch(queue) is None or queue == AGGREGATE_QUEUE:
                raise UsageError(f"FLEET_ROUTES: {each!r} is no MODEL=QUEUE")
            if by_model.setdefault(model, queue) != queue:
                raise UsageError(f"FLEET_ROUTES: {model!r} has two queues")
        return cls(by_model)

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues, the default one first."""
        return tuple(dict.fromkeys((self.default, *self.by_model.values())))

    @property
    def single(self) -> bool:
        """Whether all requests go to one queue."""
        return not self.by_model

    def queue_of(self, model: str | None) -> str:
        """The queue of a model's requests."""
        return self.default if model is None else self.by_model.get(model, self.default)

    def queue_of_line(self, line: str) -> str:
        """The queue of a request, by its line."""
        return self.default if self.single else self.queue_of(model_of(line))

    def models_of(self, queue: str) -> tuple[str, ...]:
        """The models whose requests go to a queue by name."""
        return tuple(sorted(model for model, other in self.by_model.items() if other == queue))
