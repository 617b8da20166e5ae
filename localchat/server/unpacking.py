"""Compressed bodies of requests, unpacked within a limit that stands whatever they claim to be.

zstd comes with the standard library from Python 3.14 on, and as `backports.zstd` before; without it a client is
told what is taken instead.
"""

import importlib
import zlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from localchat.server.failures import ApiError, refused

_GZIP: Final = 31
"""zlib's number for a gzip stream with the largest window."""
_WINDOW_LOG: Final = 23
"""8 MiB, which every reader of zstd must bear and no more than which a frame may ask for here."""
_MEMBERS: Final = 16
"""Streams in a row that one body may be made of."""


def unpacked(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """The plain body. `encoding`: the Content-Encoding header, empty where there was none. Raises ApiError: 415
    for an encoding that is not known, 413 for more than `most_bytes`, 400 for what cannot be read."""
    given = [name.strip().lower() for name in encoding.split(",")]
    names = [name for name in given if name not in ("", "identity")]
    if not names:
        return body
    make = UNPACKERS.get(names[0])
    if len(names) > 1 or make is None:
        taken = ", ".join(UNPACKERS)
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The content encoding is {encoding[:50]!r}; this takes one of {taken}, or none.",
            headers={"accept-encoding": taken},
        )
    return _plain(body, make, most_bytes)


def too_large(most_bytes: int, what: str = "The request is") -> ApiError:
    """413. The rest of the body is not read, so the connection ends."""
    return ApiError(
        413,
        "request_too_large",
        f"{what} larger than {most_bytes} bytes.",
        headers={"connection": "close"},
    )


def _plain(body: bytes, make: Callable[[bytes], Any], most_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    rest = body
    while rest or not pieces:
        if len(pieces) == _MEMBERS:
            raise _unreadable(f"it has more than {_MEMBERS} parts")
        unpacker = make(rest)
        try:
            piece = unpacker.decompress(rest, most_bytes - size + 1)
        except (zlib.error, _ZSTD_ERROR) as error:
            raise _unreadable(str(error)) from error
        size += len(piece)
        if size > most_bytes:
            raise too_large(most_bytes, "Unpacked, the request is")
        if not unpacker.eof:
            raise _unreadable("it is cut off")
        pieces.append(piece)
        rest = unpacker.unused_data
    return b"".join(pieces)


def _unreadable(why: str) -> ApiError:
    return refused(f"The compressed body cannot be read: {why}.", code="invalid_json")


def _gzip(_: bytes) -> Any:  # noqa: ANN401 - zlib's type has no public name
    return zlib.decompressobj(_GZIP)


def _deflate(body: bytes) -> Any:  # noqa: ANN401
    """In zlib's envelope, as the standard says, or without one, as some send it."""
    wrapped = len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)


def _zstd_module() -> ModuleType | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


_ZSTD: Final = _zstd_module()
_ZSTD_ERROR: Final[type[Exception]] = _ZSTD.ZstdError if _ZSTD else zlib.error


def _zstd(_: bytes) -> Any:  # noqa: ANN401
    assert _ZSTD is not None
    most = {_ZSTD.DecompressionParameter.window_log_max: _WINDOW_LOG}
    return _ZSTD.ZstdDecompressor(options=most)


UNPACKERS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    **({"zstd": _zstd} if _ZSTD else {}),
}
"""By their names in Content-Encoding: what reads a body that begins so. `x-gzip` and others are nobody's."""
