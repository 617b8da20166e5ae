"""Shared by tests: run."""

from pathlib import Path

import msgspec

from localchat.fit.speed import Run


def run(path: Path | str, rate: float, **how: int | str | bool) -> Run:
    values = {
        "path": str(path),
        "file_bytes": 1,
        "quantization": "Q8_0",
        "backend": "llamacpp",
        "threads": 2,
        "gpu_layers": 0,
        "kv_type": "f16",
        "safe_mode": False,
        "at": "now",
        **how,
    }
    return msgspec.convert({**values, "rates": [rate]}, Run)
