"""The standard streams of a command that was started with some of them closed (`2>&-`).

Owns: what stands in for a closed stdout or stderr: /dev/null, as the descriptor too, so that no file or connection
that is opened later becomes what a library, or a process started from here, takes for one of them.
Must not know: what is written. `sys.__stdout__` stays None: by that it is known that nobody reads the stdout.
On failure: raises `OSError` where there is no /dev/null.
"""

from __future__ import annotations

import os
import sys


def replace_closed_streams() -> None:
    """Give a closed stdout or stderr /dev/null. Call first in a process: what has opened since may have its number."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - its only form
        setattr(sys, name, open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115
