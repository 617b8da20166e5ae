"""Shared by tests: write."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.cuda_configs import QWEN25


def write(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], int]], **raw: Any
) -> Path:
    """A checkpoint whose weights are a hole. tensors: type, shape and bytes by name."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN25, **raw}))
    entries: dict[str, Any] = {}
    place = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    head = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + place)
    return folder
