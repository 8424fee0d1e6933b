"""The exceptions of the fleet, as operators see them.

Owns: the tree under `FleetError`.
Failures of single requests are *values* (`common.failures`) and never live here.
A class docstring is the default message, so that no error is without a sentence.
"""

from __future__ import annotations


class FleetError(Exception):
    """Something in the fleet went wrong."""

    exit_code = 1

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class UsageError(FleetError):
    """The command line or the settings are not usable."""

    exit_code = 2


class InputRefusedError(FleetError):
    """The input file was refused; nothing was queued.

    `problems` holds at most `common.batch.MAX_PROBLEMS` lines `INPUT:LINE: reason`; `total` counts all.
    """

    exit_code = 2

    def __init__(self, problems: list[str], total: int) -> None:
        self.problems = problems
        self.total = total
        unnamed = total - len(problems)
        more = [f"... and {unnamed} more problem{'' if unnamed == 1 else 's'}"] if unnamed > 0 else []
        super().__init__("\n".join([*problems, *more]))


class SourceUnavailableError(FleetError):
    """The input cannot be reached."""


class DestinationError(UsageError):
    """The destination cannot be written."""


class OutputFailedError(FleetError):
    """The output file can no longer be written; the rows are safe in the batch."""

    #: Not that of an outage, after which a supervisor tries again: once its batch is closed, a file is a new one.
    exit_code = 5


class BrokerUnavailableError(FleetError):
    """The broker cannot be reached."""


class StoreUnavailableError(FleetError):
    """The store cannot be reached."""


class NoSuchBatchError(FleetError):
    """There is no such batch in the store."""


class ObjectMissingError(FleetError):
    """The object is not in the store."""


class HoleError(FleetError):
    """A row of the shard is missing; a hole is never sealed."""


class EngineStartError(FleetError):
    """The engine could not be started."""

    exit_code = 2


class EngineDeadError(FleetError):
    """The engine is dead; its requests belong to another worker."""

    exit_code = 70


class EngineAbortedError(FleetError):
    """The engine cut the request short; the row is not an answer."""
