"""How the tests start a real engine: small and quick, and with rows that do not depend on their batch."""

from __future__ import annotations

#: float32, because only then a row does not depend on what else is in the batch.
SMALL = (
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "128M"),
    *("--served-model-name", "test-model"),
)

#: For the chat model, whose own length would take more memory.
FLAGS = (*SMALL, "--max-model-len", "1024")
