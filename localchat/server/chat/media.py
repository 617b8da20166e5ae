"""Reads the pictures, recordings and files of requests: base64, data URLs and, if allowed, other URLs."""

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request

from localchat.engine.attachments import make_attachment
from localchat.engine.request import Attachment
from localchat.errors import UsageError
from localchat.media.format import HEAD_BYTES, MediaKind, media_format
from localchat.media.limits import MAX_ATTACHMENTS, MAX_FILE_BYTES
from localchat.server.errors import ApiError, bad_request, to_api_error
from localchat.server.state import service_of

R = TypeVar("R")

_FROM_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_SPACE: Final = b" \t\r\n\f\v"
_FETCH_S: Final = 20.0
"""Time for all URLs of a request together."""


class NeedsThread(Exception):
    """Raised on the event loop by a request with media: decoding and fetching would block it."""


class MediaReader:
    """Reads the media of one request. Its methods raise ApiError, which names the part.

    param: path of the part in the request.
    """

    def __init__(self, *, allow_fetch: bool = False, on_event_loop: bool = False) -> None:
        """on_event_loop: raise NeedsThread instead of reading anything."""
        self._allow_fetch = allow_fetch
        self._on_event_loop = on_event_loop
        self._count = 0
        self._deadline_s = time.monotonic() + _FETCH_S

    def media_from_url(
        self, url: str | None, param: str, kind: MediaKind | None = None
    ) -> Attachment:
        """Return the picture or recording behind a data URL, or behind a URL if fetching is allowed."""
        return self.media(self.data_from_url(url, param), param, kind=kind)

    def media_from_base64(
        self, data: str | None, param: str, kind: MediaKind | None = None
    ) -> Attachment:
        """Return a picture or recording. Some clients send a data URL in place of base64."""
        return self.media(self.data_from_base64(data, param), param, kind=kind)

    def file(self, data: bytes, name: str, param: str) -> str | Attachment:
        """Return a file as media, or else as text with its name and a fence."""
        if media_format(data[:HEAD_BYTES]) is not None:
            return self.media(data, param, name)
        from localchat.documents.inclusion import file_text

        try:
            return file_text(name or "file", data)
        except UsageError as problem:
            raise _refused(problem, param) from problem

    def media(
        self, data: bytes, param: str, name: str = "", kind: MediaKind | None = None
    ) -> Attachment:
        """Return the attachment of a picture or a recording."""
        self._count += 1
        # The engine checks the whole conversation. Here the limit bounds the work.
        if self._count > MAX_ATTACHMENTS:
            raise bad_request(
                f"The request has more than {MAX_ATTACHMENTS} pictures and recordings.", param=param
            )
        try:
            attachment = make_attachment(data, name or param)
        except UsageError as problem:
            raise _refused(problem, param) from problem
        if kind is not None and attachment.kind != kind:
            article = "a picture" if kind == "image" else "a recording"
            raise bad_request(f"{param} is not {article}.", param=param)
        return msgspec.structs.replace(attachment, name=name)

    def data_from_base64(self, data: str | None, param: str) -> bytes:
        """Decode base64, with or without padding and line breaks."""
        self._check_thread()
        if not data:
            raise bad_request(f"{param} is empty; base64 is expected.", param=param)
        if data[:5].lower() == "data:":
            return self.data_from_url(data, param)
        _check_size(len(data) * 3 // 4, param)
        try:
            # The URL-safe alphabet is accepted too. A regular expression would need 10 ms per MB.
            text = data.encode("ascii").translate(_FROM_URL_SAFE, _SPACE).rstrip(b"=")
            return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError) as problem:
            raise bad_request(f"{param} is not valid base64.", param=param) from problem

    def data_from_url(self, url: str | None, param: str) -> bytes:
        """Return the bytes behind a URL."""
        self._check_thread()
        scheme, _, rest = (url or "").partition(":")
        match scheme.lower():
            case "data" if rest:
                head, _, data = rest.partition(",")
                if head.lower().replace(" ", "").endswith(";base64"):
                    return self.data_from_base64(data, param)
                _check_size(len(data) // 3, param)
                return unquote_to_bytes(data)
            case "http" | "https" if not self._allow_fetch:
                raise bad_request(
                    f"{param} is a URL, and this server does not fetch URLs. Send the content as a data "
                    "URL or base64, or start the server with --allow-fetch.",
                    param=param,
                    code="url_not_allowed",
                )
            case "http" | "https":
                from localchat.documents.public_fetch import fetch_public

                try:
                    return fetch_public(url or "", MAX_FILE_BYTES, self._deadline_s)
                except UsageError as problem:
                    raise _refused(problem, param) from problem
        raise bad_request(
            f"{param} is not a data URL (data:image/png;base64,...)"
            + (" or a web address." if self._allow_fetch else "."),
            param=param,
        )

    def _check_thread(self) -> None:
        if self._on_event_loop:
            raise NeedsThread


TEXT_ONLY: Final = MediaReader(on_event_loop=True)
"""Reader for the first attempt of `translate`."""


async def translate(request: Request, work: Callable[[MediaReader], R]) -> R:
    """Run the translation of a body, on a thread if it contains media. Raises ApiError."""
    try:
        return work(TEXT_ONLY)
    except NeedsThread:
        reader = MediaReader(allow_fetch=service_of(request).config.allow_fetch)
        return await asyncio.to_thread(work, reader)


def _check_size(size_bytes: int, param: str) -> None:
    if size_bytes > MAX_FILE_BYTES:
        raise bad_request(
            f"{param} is larger than {MAX_FILE_BYTES // 1_000_000} MB.",
            param=param,
            code="request_too_large",
        )


def _refused(problem: UsageError, param: str) -> ApiError:
    message = to_api_error(problem).message
    # The path of the part keeps its case at the start of the sentence.
    if message[1:].startswith(param[1:]):
        message = param + message[len(param) :]
    return bad_request(message, param=param, code="invalid_media")
