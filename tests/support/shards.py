"""Shared by tests: SHARDS."""

import json
import struct
from collections.abc import Mapping
from typing import Any


def safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    entries: dict[str, Any] = {}
    place = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + bytes(place)


SHARDS = {
    "model-00001-of-00002.safetensors": safetensors({"a": ("BF16", (600, 1000), 1_200_000)}),
    "model-00002-of-00002.safetensors": safetensors({"b": ("BF16", (300, 1000), 600_000)}),
}
