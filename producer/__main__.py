"""The entry of the command `producer`, and of `python -m producer`: quiet on Ctrl-C before anything is there to end.

Owns: what SIGINT does while the command's modules are imported, and that closed standard streams are replaced
before. Imports nothing heavy itself, for that reason.
On failure: exit 130 without a word; from `producer.cli.main` on, `producer.interrupts` says what is left.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from common.standard import replace_closed_streams


def main() -> NoReturn:
    """Entry point of the console script."""
    replace_closed_streams()
    # Half a second of imports: a KeyboardInterrupt there would be a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from producer import cli  # noqa: PLC0415 - see above

    cli.main()


if __name__ == "__main__":
    main()
