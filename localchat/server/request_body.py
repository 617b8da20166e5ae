"""The body of a request: read within limits, decoded into its type, refused in words."""

import asyncio
import importlib
import re
import zlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request

# Compressed bodies of requests, unpacked within a limit that stands whatever they claim to be.
#
# zstd comes with the standard library from Python 3.14 on, and as `backports.zstd` before; without it a client
# is
# told what is taken instead.


_GZIP: Final = 31
"""zlib's number for a gzip stream with the largest window."""
_WINDOW_LOG: Final = 23
"""8 MiB, which every reader of zstd must bear and no more than which a frame may ask for here."""
_MEMBERS: Final = 16
"""Streams in a row that one body may be made of."""


def decompress(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """The plain body. `encoding`: the Content-Encoding header, empty where there was none. Raises ApiError:
    415 for an encoding that is not known, 413 for more than `most_bytes`, 400 for what cannot be read."""
    given = [name.strip().lower() for name in encoding.split(",")]
    names = [name for name in given if name not in ("", "identity")]
    if not names:
        return body
    make = DECOMPRESSORS.get(names[0])
    if len(names) > 1 or make is None:
        taken = ", ".join(DECOMPRESSORS)
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
    return bad_request(f"The compressed body cannot be read: {why}.", code="invalid_json")


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


DECOMPRESSORS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    **({"zstd": _zstd} if _ZSTD else {}),
}
"""By their names in Content-Encoding: what reads a body that begins so. `x-gzip` and others are nobody's."""


T = TypeVar("T")

_SURROGATES: Final = re.compile(
    rb"(\\\\)|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_PLACE: Final = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]+)`")
_EXACT: Final = float(1 << 53)
"""Below it every whole number is one float and no other."""
_LARGE_BYTES: Final = 32 << 10
"""A compressed body from which on it is unpacked beside the event loop."""


async def read_json(request: Request, kind: type[T], limits: ServerLimits) -> T:
    """Read a body as JSON of this type. Raises ApiError; ClientDisconnect if the client leaves."""
    return decode(await read_body(request, limits), kind, limits)


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """The whole body, decompressed. Raises ApiError; ClientDisconnect where the client leaves."""
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise too_large(limits.body_bytes)
    try:
        async with asyncio.timeout(limits.body_s):
            body = await _received(request, limits)
    except TimeoutError:
        raise ApiError(
            408, "timeout", "The body did not arrive in time.", headers={"connection": "close"}
        ) from None
    encoding = request.headers.get("content-encoding", "")
    if encoding and len(body) > _LARGE_BYTES:
        return await asyncio.to_thread(decompress, body, encoding, limits.unpacked_bytes)
    return decompress(body, encoding, limits.unpacked_bytes)


async def _received(request: Request, limits: ServerLimits) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > limits.body_bytes:
            raise too_large(limits.body_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _check_type(request: Request) -> None:
    """A page of another site can send every other type without asking first."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The content type is {given[:100]!r}; this takes application/json.",
        )


def decode(body: bytes, kind: type[T], limits: ServerLimits) -> T:
    """The body as its type. Raises ApiError that names the field."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        return _decode(body, kind)
    except RecursionError:
        raise bad_request(
            f"The JSON is nested deeper than {limits.depth} levels.", code="invalid_json"
        ) from None
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise bad_request(f"The body is no JSON: {reason}.", code="invalid_json") from error


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return _with_whole_numbers(body, kind, error)
    except msgspec.DecodeError:
        # A client that cut a text in the middle of a character sends half of a surrogate pair.
        mended = _SURROGATES.sub(_whole, body)
        if mended == body:
            raise
        return msgspec.json.decode(mended, type=kind)


def _with_whole_numbers(body: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    """JSON has one kind of number: whoever counts in floats alone writes a thousand as 1000.0 or 1e3. Raises
    `error` where that was not all that is wrong."""
    try:
        return msgspec.convert(_counted(msgspec.json.decode(body)), kind, str_keys=True)
    except msgspec.ValidationError:
        raise error from None


def _counted(value: Any) -> Any:  # noqa: ANN401 - any JSON
    match value:
        case dict():
            return {key: _counted(one) for key, one in value.items()}
        case list():
            return [_counted(one) for one in value]
        case float() if value.is_integer() and abs(value) < _EXACT:
            return int(value)
    return value


def _whole(found: re.Match[bytes]) -> bytes:
    return found[0] if found[1] or found[2] else b"\\ufffd"


def _invalid(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    place = _PLACE.search(text)
    at = place[1].lstrip(".") if place else ""
    said = text[: place.start()] if place else text
    missing = _MISSING.search(said)
    if missing:
        param = f"{at}.{missing[1]}" if at else missing[1]
        return bad_request(
            f"The field {param!r} is required.", param=param, code="missing_required_parameter"
        )
    where = f"The field {at!r}" if at else "The body"
    return bad_request(
        f"{where} has the wrong type: {said[:1].lower()}{said[1:]}.".replace("`", ""),
        param=at or None,
        code="invalid_type",
    )


def check_json_size(value: Any, limits: ServerLimits, param: str) -> None:  # noqa: ANN401 - any JSON
    """Refuse free-form JSON (schemas, for instance) that nests too deep or holds too much, before anything
    walks through it. Raises ApiError."""
    level, held = [value], 0
    for _ in range(limits.depth):
        boxes = [one for one in level if isinstance(one, dict | list)]
        if not boxes:
            return
        held += sum(map(len, boxes))
        if held > limits.values:
            raise bad_request(
                f"The field {param!r} holds more than {limits.values} values.",
                param=param,
                code="invalid_json",
            )
        level = [
            inner for box in boxes for inner in (box.values() if isinstance(box, dict) else box)
        ]
    raise bad_request(
        f"The field {param!r} is nested deeper than {limits.depth} levels.",
        param=param,
        code="invalid_json",
    )
