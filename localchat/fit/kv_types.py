"""KV cache types by the names of `--kv-type`.

ggml's formats under llama.cpp, and the CUDA backend's `fp8`: 8 bits a number, with a scale for each token and
head. The numbers were e4m3 once, which damaged models with biased keys. They are whole numbers now.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localchat.model_files.ggml_types import KV_FORMATS

FP8 = "fp8"
_OTHER_NAMES = {"fp8_e4m3": FP8}
_SMALL = ("q8_0", FP8)
"""Types without a noticeable loss."""
_HEAD_WIDTH = 128
"""Numbers that share an exponent in most models."""


class SmallerKVType(NamedTuple):
    """A KV type, and its size as a share of another's."""

    kv_type: str
    share: float


def canonical_kv_type(kv_type: str | None) -> str | None:
    """The usual name of a KV type; an unknown name stays as it is."""
    if kv_type is None:
        return None
    return _OTHER_NAMES.get(kv_type, kv_type)


def number_bytes(kv_type: str) -> float | None:
    """Bytes of one number; None for an unknown type."""
    if kv_type == FP8:
        return 1 + 1 / _HEAD_WIDTH
    format_ = KV_FORMATS.get(kv_type)
    if format_ is None:
        return None
    return format_.block_bytes / format_.block


def smaller_kv_type(kv_type: str, possible: Sequence[str]) -> SmallerKVType | None:
    """A smaller type to propose where the cache takes too much; None: it is small already.

    possible: types that the model's cache can have; empty: unknown, then llama.cpp's.
    """
    now = number_bytes(kv_type)
    for name in _SMALL:
        size = number_bytes(name)
        if now is not None and size is not None and size < now and name in (possible or _SMALL):
            return SmallerKVType(name, size / now)
    return None
