"""The entry of the command `worker`, and of `python -m workers`: quiet on Ctrl-C before a worker is there to drain.

Owns: what SIGINT does while the command's modules are imported, and that closed standard streams are replaced before.
Imports nothing heavy itself, for that reason; an engine's processes import this module too.
On failure: exit 130 without a word; nothing was taken yet. Celery sets handlers of its own before it takes anything.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from common.standard import replace_closed_streams


def main() -> NoReturn:
    """Entry point of the console script."""
    replace_closed_streams()
    # A second of imports: a KeyboardInterrupt there would be a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from workers import cli  # noqa: PLC0415 - see above

    cli.main()


if __name__ == "__main__":
    main()
