"""Form data with a file (`multipart/form-data`, RFC 7578): kept on disk while it arrives, then taken apart."""

import asyncio
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import IO, Final, NamedTuple

from starlette.requests import ClientDisconnect, Request

from localchat.server.cancellation import shielded
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request
from localchat.server.request_body import too_large

_KIND: Final = "multipart/form-data"
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{1,200}")
_FORM_BYTES: Final = 64 << 10
"""Room for the fields beside the file."""
_FIELD_BYTES: Final = 8 << 10
_MAX_HEAD_BYTES: Final = 8 << 10
_MAX_PARTS: Final = 32


class UploadForm(NamedTuple):
    """A form with a file."""

    fields: dict[str, str]
    filename: str
    """As the client calls it; empty without a file."""
    content: Path
    """The file, in the folder that was given; empty without one."""
    size: int
    """Of the file, in bytes."""


class _Part(NamedTuple):
    name: str
    filename: str | None
    begin: int
    end: int


async def read_form(request: Request, limits: ServerLimits, folder: Path) -> UploadForm:
    """Read a form within the limits. The caller removes `content`.

    Raises ApiError; ClientDisconnect if the client leaves."""
    boundary = _boundary(request.headers.get("content-type", ""))
    largest = limits.upload_bytes + _FORM_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > largest:
        raise too_large(limits.upload_bytes)
    with tempfile.TemporaryFile(dir=folder) as body:
        try:
            async with asyncio.timeout(limits.upload_s):
                await _receive(request, body, largest, limits.upload_bytes)
        except TimeoutError:
            raise ApiError(
                408, "timeout", "The file did not arrive in time.", headers={"connection": "close"}
            ) from None
        taking = asyncio.to_thread(_take_apart, body, boundary, limits, folder)
        return await shielded(taking, lambda form: form.content.unlink(missing_ok=True))


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    found = header.get_param("boundary")
    if header.get_content_type() != _KIND or not isinstance(found, str):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The content type is {content_type[:100]!r}; it must be {_KIND} with a boundary.",
        )
    if not _BOUNDARY.fullmatch(found):
        raise bad_request("The boundary of the form is not valid.", code="invalid_form")
    return found.encode("ascii")


async def _receive(request: Request, body: IO[bytes], largest: int, named: int) -> None:
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > largest:
            raise too_large(named)
        body.write(piece)
        if not message.get("more_body", False):
            body.flush()
            return


def _take_apart(body: IO[bytes], boundary: bytes, limits: ServerLimits, folder: Path) -> UploadForm:
    if not body.tell():
        raise bad_request("The form is empty.", code="invalid_form")
    fields: dict[str, str] = {}
    file: _Part | None = None
    with mmap.mmap(body.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for part in _parts(view, boundary):
            if part.filename is not None:
                if file is not None:
                    raise bad_request("The form holds more than one file.", param="file")
                file = part
                continue
            if part.end - part.begin > _FIELD_BYTES:
                raise bad_request(f"The field {part.name!r} is too long.", param=part.name)
            fields[part.name] = view[part.begin : part.end].decode("utf-8", "replace")
    size = file.end - file.begin if file is not None else 0
    if size > limits.upload_bytes:
        raise too_large(limits.upload_bytes)
    handle, name = tempfile.mkstemp(prefix=".upload.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as content:
            if file is not None:
                body.seek(file.begin)
                _copy(body, content, size)
    except BaseException:  # a full disk, for instance
        Path(name).unlink()
        raise
    return UploadForm(fields, (file and file.filename) or "", Path(name), size)


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    shutil.copyfileobj(source, target)
    target.truncate(size)


def _parts(view: mmap.mmap, boundary: bytes) -> Iterator[_Part]:
    """The parts in their order. Raises ApiError where the form is broken."""
    mark = b"--" + boundary
    at = 0 if view[: len(mark)] == mark else view.find(b"\r\n" + mark) + 2
    if at == 1:
        raise _broken()
    for _ in range(_MAX_PARTS):
        at += len(mark)
        if view[at : at + 2] == b"--":
            return
        head_end = view.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        end = view.find(b"\r\n" + mark, head_end + 2) if head_end >= 0 else -1
        if end < 0:
            raise _broken()
        yield _part(view[at:head_end], head_end + 4, max(end, head_end + 4))
        at = end + 2
    raise bad_request(f"The form has more than {_MAX_PARTS} parts.", code="invalid_form")


def _part(head: bytes, begin: int, end: int) -> _Part:
    header = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, colon, value = line.partition(":")
        if colon and key.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name = header.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _broken()
    return _Part(name, header.get_filename(), begin, end)


def _broken() -> ApiError:
    return bad_request("The form is not complete or not valid.", code="invalid_form")
