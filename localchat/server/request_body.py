"""Request bodies: read within limits, decompressed and decoded.

The standard library has zstd from Python 3.14 on, `backports.zstd` before. Without either, zstd is rejected.
"""

import asyncio
import importlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from localchat.server.body_budget import BodyBudget, BodyReservation
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request, missing_field
from localchat.server.fields import check_unknown_fields, note_ignored

T = TypeVar("T")

_SURROGATES: Final = re.compile(
    rb"(\\\\)|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_PATH: Final = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_MISSING_FIELD: Final = re.compile(r"missing required field `([^`]+)`")
_UNKNOWN_FIELD: Final = re.compile(r"contains unknown field `(.*)`", re.DOTALL)
_MAX_INTEGER: Final = float(1 << 64)
"""Limit of the floats that are taken for integers. Seeds have up to 64 bits."""
_TYPES_OF_PROGRAMS: Final = ("", "application/x-www-form-urlencoded", "text/plain")
"""Content types of programs that post JSON: LiteLLM sends none, curl that of a form, others that of a text."""
_LARGE_BYTES: Final = 32 << 10
"""Compressed bodies above this size are decompressed on a thread."""
_GZIP: Final = 31
"""zlib's wbits for a gzip stream with the largest window."""
_WINDOW_LOG: Final = 23
"""Largest zstd window: 8 MiB, which every decoder must support."""


async def read_json(request: Request, kind: type[T], *, with_media: bool = False) -> T:
    """Read a body as JSON of this type, and note the fields that are ignored.

    with_media: allow the size of pictures and recordings. `check_text_size` then bounds the text.

    Raises ApiError; ClientDisconnect if the client disconnects.
    """
    budget: BodyBudget = request.app.state.bodies
    limits: ServerLimits = request.app.state.service.config.limits
    if with_media:
        max_bytes = limits.media_body_bytes
        limits = replace(limits, body_bytes=max_bytes, unpacked_bytes=max_bytes)
    with budget.reservation() as reservation:
        body = await _read_body(request, limits, reservation)
        value = decode(body, kind, limits)
        # A second decoding shows the fields that the type does not have.
        note_ignored(request.scope, check_unknown_fields(decode(body, object, limits), kind))
        return value


async def _read_body(request: Request, limits: ServerLimits, reservation: BodyReservation) -> bytes:
    """Read the whole body and decompress it. Raises ApiError; ClientDisconnect."""
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise too_large(limits.body_bytes)
    try:
        async with asyncio.timeout(limits.body_s):
            body = await _receive(request, limits, reservation)
    except TimeoutError:
        raise ApiError(
            408, "timeout", "The body did not arrive in time.", headers={"connection": "close"}
        ) from None
    encoding = request.headers.get("content-encoding", "")
    # A large body would block the event loop, and its size after decompression is unknown.
    if encoding and len(body) > _LARGE_BYTES:
        reservation.resize(len(body) + limits.unpacked_bytes)
        return await asyncio.to_thread(decompress, body, encoding, limits.unpacked_bytes)
    return decompress(body, encoding, limits.unpacked_bytes)


async def _receive(request: Request, limits: ServerLimits, reservation: BodyReservation) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limits.body_bytes:
            raise too_large(limits.body_bytes)
        reservation.resize(size)
        pieces.append(piece)
    return b"".join(pieces)


def _check_type(request: Request) -> None:
    """Accept only JSON: browsers let pages of other sites send other types without a preflight.

    Programs may also send no type, or curl's default as in Ollama's own examples.
    """
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and (
        kind not in _TYPES_OF_PROGRAMS or _is_browser(request.headers)
    ):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The content type must be application/json; got {content_type[:100]!r}.",
        )


def _is_browser(headers: Mapping[str, str]) -> bool:
    """Return True for a browser: it sends Origin or Sec-Fetch-Site with a POST, or at least its name."""
    return (
        "origin" in headers
        or "sec-fetch-site" in headers
        or "mozilla" in headers.get("user-agent", "").lower()
    )


def decode(body: bytes, kind: type[T], limits: ServerLimits) -> T:
    """Decode a JSON body to a type. Raises ApiError, which names the wrong field."""
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
        raise bad_request(f"The body is not valid JSON: {reason}.", code="invalid_json") from error


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return _decode_with_integers(body, kind, error)
    except msgspec.DecodeError:
        # A client that cuts a text inside of a character sends half of a surrogate pair. Replace it by U+FFFD.
        repaired = _SURROGATES.sub(_replace_lone_surrogate, body)
        if repaired == body:
            raise
        return msgspec.json.decode(repaired, type=kind)


def _decode_with_integers(body: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    """Decode again with whole floats as integers.

    Some languages write 1000 as 1000.0 or 1e3. Raises `error` if something else is wrong too.
    """
    try:
        return msgspec.convert(_with_integers(msgspec.json.decode(body)), kind, str_keys=True)
    except msgspec.ValidationError:
        raise error from None


def _with_integers(value: Any) -> Any:  # noqa: ANN401 - any JSON
    match value:
        case dict():
            return {key: _with_integers(item) for key, item in value.items()}
        case list():
            return [_with_integers(item) for item in value]
        case float() if value.is_integer() and abs(value) < _MAX_INTEGER:
            return int(value)
    return value


def _replace_lone_surrogate(match: re.Match[bytes]) -> bytes:
    if match[1] or match[2]:  # an escaped backslash, or a complete pair
        return match[0]
    return b"\\ufffd"


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Convert msgspec's error, which names the path of the wrong value behind the reason."""
    reason = str(error)
    path = ""
    if match := _PATH.search(reason):
        path = match[1].lstrip(".")
        reason = reason[: match.start()]
    prefix = f"{path}." if path else ""
    if unknown := _UNKNOWN_FIELD.search(reason):
        param = f"{prefix}{unknown[1]}"[:100]
        return bad_request(
            f"The field {param!r} is unknown.", param=param, code="unsupported_parameter"
        )
    if missing := _MISSING_FIELD.search(reason):
        return missing_field(f"{prefix}{missing[1]}")
    subject = f"The field {path!r}" if path else "The body"
    return bad_request(
        f"{subject} has the wrong type: {reason[:1].lower()}{reason[1:]}.".replace("`", ""),
        param=path or None,
        code="invalid_type",
    )


def check_json_size(value: Any, limits: ServerLimits, param: str) -> None:  # noqa: ANN401 - any JSON
    """Reject free-form JSON with too many levels or values. Raises ApiError.

    Call this before anything recurses into a schema.
    """
    level = [value]
    count = 0
    for _ in range(limits.depth):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return
        count += sum(map(len, containers))
        if count > limits.values:
            raise bad_request(
                f"The field {param!r} holds more than {limits.values} values.",
                param=param,
                code="invalid_json",
            )
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    raise bad_request(
        f"The field {param!r} is nested deeper than {limits.depth} levels.",
        param=param,
        code="invalid_json",
    )


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body. `encoding`: the Content-Encoding header, or empty.

    Raises ApiError: 415 for an unknown encoding, 413 for more than `max_bytes`, 400 for a damaged body.
    """
    names = [name.strip().lower() for name in encoding.split(",")]
    encodings = [name for name in names if name not in ("", "identity")]
    if not encodings:
        return body
    make = DECOMPRESSORS.get(encodings[0])
    if len(encodings) > 1 or make is None:
        supported = ", ".join(DECOMPRESSORS)
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The content encoding must be one of {supported}, or none; got {encoding[:50]!r}.",
            headers={"accept-encoding": supported},
        )
    return _decompress(body, make(), max_bytes)


def too_large(max_bytes: int, subject: str = "The request is") -> ApiError:
    """413: the body is too large. The rest of it is not read, so the connection closes."""
    return ApiError(
        413,
        "request_too_large",
        f"{subject} larger than {max_bytes} bytes.",
        headers={"connection": "close"},
    )


def _decompress(body: bytes, decompressor: Any, max_bytes: int) -> bytes:  # noqa: ANN401
    try:
        data: bytes = decompressor.decompress(body, max_bytes + 1)
    except (zlib.error, _ZSTD_ERROR) as error:
        raise _unreadable(str(error)) from error
    if len(data) > max_bytes:
        raise too_large(max_bytes, "Unpacked, the request is")
    if not decompressor.eof:
        raise _unreadable("it is cut off")
    if decompressor.unused_data:
        raise _unreadable("something follows its end")
    return data


def _unreadable(why: str) -> ApiError:
    return bad_request(f"The compressed body cannot be read: {why}.", code="invalid_json")


def _zstd_module() -> ModuleType | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


_ZSTD: Final = _zstd_module()
_ZSTD_ERROR: Final[type[Exception]] = _ZSTD.ZstdError if _ZSTD else zlib.error


def _zstd() -> Any:  # noqa: ANN401
    assert _ZSTD is not None
    options = {_ZSTD.DecompressionParameter.window_log_max: _WINDOW_LOG}
    return _ZSTD.ZstdDecompressor(options=options)


DECOMPRESSORS: Final[Mapping[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(_GZIP),
    **({"zstd": _zstd} if _ZSTD else {}),
}
"""Decompressors by Content-Encoding. Legacy names such as `x-gzip` are rejected."""
