"""What decides a text besides the request, as one short word."""

import hashlib
from collections.abc import Iterable

from localchat import __version__
from localchat.loop.backend import ModelInfo


def fingerprint(
    info: ModelInfo, kv_type: str, versions: Iterable[tuple[str, str]], *, head_int8: bool = False
) -> str:
    """16 hex digits of a hash over model file, template, quantization, KV type and library versions."""
    parts = [__version__, info.identity, info.chat_template or "", info.quantization, kv_type]
    parts += ["head int8"] if head_int8 else []
    parts += [f"{name} {version}" for name, version in versions]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]
