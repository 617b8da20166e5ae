"""KV cache types by the names of `--kv-type`.

llama.cpp has ggml's formats. The CUDA backend has `fp8`: 8 bits per number, with a scale for each token and
head. The numbers are integers, because e4m3 damaged models with biased keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localchat.model_files.ggml_types import KV_FORMATS

FP8 = "fp8"
_OTHER_NAMES = {"fp8_e4m3": FP8}
_SMALL = ("q8_0", FP8)
"""Types without a noticeable loss of quality. q4_0 damages models whose keys have outliers."""
_HEAD_WIDTH = 128
"""Numbers that share a scale in most models."""


class SmallerKVType(NamedTuple):
    """A KV type and its size relative to another."""

    kv_type: str
    share: float


def canonical_kv_type(kv_type: str | None) -> str | None:
    """Return the usual name of a KV type. Unknown names stay as they are."""
    if kv_type is None:
        return None
    return _OTHER_NAMES.get(kv_type, kv_type)


def number_bytes(kv_type: str) -> float | None:
    """Return the bytes of one number. None for an unknown type."""
    if kv_type == FP8:
        return 1 + 1 / _HEAD_WIDTH
    format_ = KV_FORMATS.get(kv_type)
    if format_ is None:
        return None
    return format_.block_bytes / format_.block


def smaller_kv_type(kv_type: str, possible: Sequence[str]) -> SmallerKVType | None:
    """Return a smaller type to propose if the cache is too large. None if it is small already.

    possible: types that the model's cache can have. Empty for those of llama.cpp.
    """
    now = number_bytes(kv_type)
    for name in _SMALL:
        size = number_bytes(name)
        if now is not None and size is not None and size < now and name in (possible or _SMALL):
            return SmallerKVType(name, size / now)
    return None
