"""Loads the native library once, and captures its log.

Its functions are untyped (`Any`), and only this package calls them.
"""

import re
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from localchat.errors import LocalchatError
from localchat_llamacpp.c_api import bind
from localchat_llamacpp.library_source import LibraryFile, find_library
from localchat_llamacpp.shared_object import load

_LEVEL_DEBUG = 1
_LEVEL_WARN = 3
_LEVEL_ERROR = 4
_LEVEL_CONTINUE = 5
"""ggml's numbers."""

_KEPT_LINES = 400
_SHOWN_LINES = 4
_BUFFER = re.compile(r"(\S+)\s+(\S+)\s+buffer size\s*=\s*([\d.]+) MiB")


class Buffer(NamedTuple):
    """An allocation that the library reported."""

    device: str
    purpose: str
    """model, KV, RS, compute or output."""
    size_bytes: int


class NativeLog:
    """Log lines of the library, newest last.

    Any thread that calls the library writes to it. deque.append is atomic, and readers copy.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self._level = _LEVEL_DEBUG
        self._partial = ""
        self._watchers: list[Callable[[int, str], None]] = []

    def receive(self, level: int, text: bytes | None, _user: object = None) -> None:
        """Body of the native callback. Text comes in pieces: a line ends at its newline."""
        if level != _LEVEL_CONTINUE:
            self._level = level
        *lines, partial = (self._partial + (text or b"").decode("utf-8", "replace")).split("\n")
        # A model file can put megabytes into one line.
        self._partial = partial[-4000:]
        for line in lines:
            self._lines.append((self._level, line[:1000].rstrip()))
            for watcher in self._watchers:
                watcher(self._level, line)

    def capture(self) -> "LogCapture":
        """Return a context manager that collects buffers and warnings."""
        return LogCapture(self._watchers)

    def tail(self) -> str:
        """Return the last lines, whatever their level, as part of a sentence."""
        return "; ".join(line for _, line in list(self._lines)[-_SHOWN_LINES:])


class LogCapture:
    """Lines, buffers and warnings that the library logged while this was open."""

    def __init__(self, watchers: list[Callable[[int, str], None]]) -> None:
        self._watchers = watchers
        self.buffers: list[Buffer] = []
        self.complaints: list[str] = []
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def __enter__(self) -> "LogCapture":
        self._watchers.append(self._capture)
        return self

    def __exit__(self, *_: object) -> None:
        self._watchers.remove(self._capture)

    def _capture(self, level: int, line: str) -> None:
        self.lines.append(line[:400])
        if match := _BUFFER.search(line):
            device, purpose, size = match.groups()
            self.buffers.append(Buffer(device, purpose, int(float(size) * 1024 * 1024)))
        if level in (_LEVEL_WARN, _LEVEL_ERROR) and line.strip():
            self.complaints = [*self.complaints[-20:], line.strip()[:400]]

    def reason(self) -> str:
        """Return the last warnings and errors as part of a sentence."""
        return "; ".join(self.complaints[-3:]) or "llama.cpp gives no reason"


class Library(NamedTuple):
    """The loaded library, its functions and its log."""

    origin: LibraryFile
    api: Any
    """Functions and structs of llama.h by name (c_api.py)."""
    log: NativeLog
    callback: object
    """Reference that keeps the callback alive."""


@cache
def library() -> Library:
    """Load llama.cpp in about 0.1 s, and redirect its log before it can print. Once per process.

    Raises LocalchatError without a usable library.
    """
    search = find_library()
    if search.library is None:
        raise LocalchatError(
            " ".join(("There is no llama.cpp here.", *search.passed_over)), hint=search.hint
        )
    origin = search.library
    api = bind(load(origin.file, origin.again), str(origin.file))
    log = NativeLog()
    callback = api.llama_log_callback(log.receive)
    api.llama_log_set(callback, None)
    api.llama_backend_init()
    return Library(origin, api, log, callback)
