"""Downloads files from the hub: resumes, counts, and verifies the hash."""

import re
from pathlib import Path
from typing import Final

import httpx2

from localchat.errors import NetworkError
from localchat.models.hub.client import HubClient, Listing, RetryableError
from localchat.models.hub.events import Checking, EventSink, Note, ProgressMeter
from localchat.models.hub.partial_file import PartialFile, RemoteFile
from localchat.models.hub.retry import gives_up, pause
from localchat.units import size

CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_SLOW_CHECK_BYTES: Final = 64 << 20
"""Reading a part above this again takes a moment, so an event announces it."""
_MOST_RESTARTS: Final = 3


class Download:
    """Files of one listing, fetched one after another."""

    def __init__(
        self, hub: HubClient, listing: Listing, meter: ProgressMeter, emit: EventSink
    ) -> None:
        self._hub = hub
        self._listing = listing
        self._meter = meter
        self._emit = emit

    def fetch(self, file: RemoteFile, target: Path) -> str:
        """Fetch a file to `target`, from where an earlier download ended; returns its sha256.

        A wrong hash discards the file and fetches it once more. Raises NetworkError, and LocalchatError for
        the disk.
        """
        if not file.hash:
            self._emit(Note(f"the hub gives no hash of {file.path}: its length alone is checked"))
        with PartialFile(target, file) as part:
            if part.length > _SLOW_CHECK_BYTES:
                self._emit(Checking(file.path, part.length))
            part.hash_existing()
            for last in (False, True):
                self._fill(part, file)
                if part.matches:
                    part.finish()
                    self._meter.show(file.path)
                    return part.sha256
                received = part.found_hash
                self._discard(part)
                if not last:
                    self._emit(
                        Note(f"{file.path} came with a wrong hash; it is fetched once more, whole")
                    )
        raise NetworkError(
            f"{file.path} came with a wrong hash twice: {file.hash} is right, {received} came",
            hint="what came is discarded. The server or something on the way alters the file: try another "
            "network, or another repository of the same model",
        )

    def _fill(self, part: PartialFile, file: RemoteFile) -> None:
        """Download the rest of a file, and resume after failures. Raises NetworkError after too many."""
        failures = 0
        restarts = part.restarts
        while part.length < file.size:
            before = part.length
            try:
                self._stream(part, file)
            except RetryableError as problem:
                why = f"{file.path}: {problem}"
                if part.restarts - restarts > _MOST_RESTARTS:
                    raise NetworkError(
                        f"{why}; it had to start over {_MOST_RESTARTS} times",
                        hint="the server sends another file each time, or cannot resume a download; "
                        "run the same command again later",
                    ) from problem
                if part.length - before >= max(1, min(1 << 20, file.size // 100)):
                    failures = 0  # it made progress
                failures += 1
                if gives_up(failures, problem.asked_s):
                    wait = ""
                    if problem.asked_s:
                        wait = f"; it asks to wait {problem.asked_s / 60:.0f} minutes"
                    raise NetworkError(
                        f"{why}{wait}",
                        hint=f"{size(part.length)} of the file are kept; run the same command again to resume",
                    ) from problem
                pause(why, failures, problem.asked_s, self._emit)

    def _stream(self, part: PartialFile, file: RemoteFile) -> None:
        """Send one request and append its body. Raises RetryableError if it ends early."""
        start = part.length
        with self._hub.open(self._listing, file.path, start, etag=part.etag) as response:
            etag = _strong(response.headers.get("etag"))
            if response.status_code == 416:
                self._discard(part)
                raise RetryableError("it is shorter on the server than what is here")
            wrong = _mismatch(response, start, file)
            changed = bool(start and part.etag and etag and etag != part.etag)
            if wrong or (changed and response.status_code == 206):
                self._discard(part)
                raise RetryableError(wrong or "it changed on the server")
            if start and response.status_code == 200:
                why = "the server cannot resume it"
                if changed:
                    why = "it changed on the server"
                self._emit(Note(f"{file.path}: {why}; starting over"))
                self._discard(part)
            part.set_etag(etag)
            for piece in response.iter_raw():
                needed = piece[: file.size - part.length]
                part.write(needed)
                self._meter.add(file.path, len(needed))
                if part.length == file.size:
                    return
        raise RetryableError(f"the connection ended after {size(part.length)}")

    def _discard(self, part: PartialFile) -> None:
        self._meter.discard(part.length)
        part.restart()


def _strong(etag: str | None) -> str:
    """Return an ETag that If-Range may carry, else empty: a weak one does not promise equal bytes."""
    if etag and etag.startswith('"') and len(etag) <= 300:
        return etag
    return ""


def _mismatch(response: httpx2.Response, start: int, file: RemoteFile) -> str:
    """Return why this response cannot be the rest of the file, or an empty text."""
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        total = length if length.isdigit() else "*"
    else:
        match = CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
        if match is None or int(match[1]) != start:
            return "the server sends another range than requested"
        total = match[3]
    if total != "*" and int(total[:20]) != file.size:
        return f"it has {total[:20]} bytes on the server and {file.size} in the listing"
    return ""
