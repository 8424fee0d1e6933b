"""`worker flower`: Celery's own Flower, with settings under which it may run beside a fleet.

Owns: these settings. Must not know: what Flower shows; tasks tell ids only (`common.dispatch`).
On failure: a Flower that everybody could read is refused with one sentence.

`celery -A workers flower` is the same without the settings; it works as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UsageError
from common.settings import WorkerSettings, load

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

#: Flower's options as its environment has them (Flower 2, options.py); a user's own values stay.
SETTINGS = {
    "FLOWER_ADDRESS": "127.0.0.1",
    # It only looks: nobody can stop workers or revoke requests from a browser.
    "FLOWER_READ_ONLY": "true",
    # A batch has a task per request. So many are kept, the oldest go first: 290 MiB after 100,000 requests.
    "FLOWER_MAX_TASKS": "20000",
    # A worker that is started again is another one.
    "FLOWER_PURGE_OFFLINE_WORKERS": "300",
    "FLOWER_TASKS_COLUMNS": "name,kwargs,state,runtime,worker,received,uuid",
    "FLOWER_TASK_RUNTIME_METRIC_BUCKETS": "0.1,0.5,1,5,15,60,300,900,3600",
}

#: Options that ask for a login, by password or by OAuth.
LOGINS = ("basic_auth", "auth")


def run_flower(arguments: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Run Flower until it is stopped. Raises `UsageError` where it would ask nobody for a password."""
    load(WorkerSettings)  # those of the app that it loads; one sentence now instead of a traceback from Celery
    given = {argument.lstrip("-").partition("=")[0].replace("-", "_") for argument in arguments}
    asks = any(login in given or environ.get(f"FLOWER_{login.upper()}") for login in LOGINS)
    if not asks and "help" not in given:
        raise UsageError("Flower would be open to everybody: set FLOWER_BASIC_AUTH=user:password, or its --auth")
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
    from celery.bin.celery import celery  # noqa: PLC0415 - takes a while

    celery(["-A", "workers", "flower", *arguments], auto_envvar_prefix="CELERY", standalone_mode=False)
    return 0
