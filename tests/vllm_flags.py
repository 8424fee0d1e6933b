"""How the tests start a real engine: small and quick, and with rows that do not depend on their batch."""

from __future__ import annotations

#: float32, because only then a row does not depend on what else is in the batch.
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", "128M", "--served-model-name", "test-model"),
)
