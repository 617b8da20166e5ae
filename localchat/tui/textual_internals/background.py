"""Queries the terminal's background color (OSC 11), and removes the reply from the keys.

The query is sent once, on the empty alternate screen before the first frame. Nothing waits for the reply.
Importing this module imports no Textual.

Private Textual API: `linux_driver.XTermParser`, `Parser.feed` and `Parser.tick`.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from textual.driver import Driver

_QUERY: Final = "\x1b]11;?\x1b\\"
_REPLY: Final = re.compile(r"\x1b\]11;([^\x07\x1b]{0,64})(?:\x07|\x1b\\)")
_PARTIAL_REPLY: Final = re.compile(r"\x1b\](?:1(?:1(?:;[^\x07\x1b]{0,64}\x1b?)?)?)?\Z")
_COLOR: Final = re.compile(r"rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_MAX_BUFFERED_S: Final = 0.3
"""Time limit for buffering a partial reply, because it may be keys."""
_UNSUPPORTED: Final = ("linux", "vt", "ansi", "cons")
"""Prefixes of terminal types that do not support the query. Some would print it."""


class Background(NamedTuple):
    """Background color of a terminal. Components are from 0 to 1."""

    red: float
    green: float
    blue: float

    @property
    def is_light(self) -> bool:
        """Whether dark text is easier to read on this background."""
        return 0.299 * self.red + 0.587 * self.green + 0.114 * self.blue > 0.5


def background_of(color: str) -> Background | None:
    """Parse the color of a reply, such as `rgb:ffff/ffff/ffff`. None if it is invalid."""
    match = _COLOR.match(color)
    if match is None:
        return None
    return Background(*(_share(digits) for digits in match.groups()))


def _share(digits: str) -> float:
    return int(digits, 16) / ((1 << 4 * len(digits)) - 1)


class ReplyFilter:
    """Removes the reply from terminal input that arrives in pieces of any size."""

    def __init__(self, on_reply: Callable[[Background], None]) -> None:
        self._on_reply = on_reply
        self._buffered = ""
        self._buffered_since_s = 0.0
        self._after_escape = False

    def keys(self, data: str) -> str:
        """Return `data` without replies. A partial reply at its end is buffered until more arrives."""
        # A single escape character is a key, so it was passed on instead of buffered.
        escape_was_sent = self._after_escape and data.startswith("]")
        self._after_escape = data.endswith("\x1b")
        if escape_was_sent:
            data = f"\x1b{data}"
        else:
            data = self._buffered + data
        self._buffered = ""
        for match in _REPLY.finditer(data):
            background = background_of(match[1])
            if background is not None:
                self._on_reply(background)
        data = _REPLY.sub("", data)
        partial_reply = _PARTIAL_REPLY.search(data)
        if partial_reply is not None:
            self._buffered = partial_reply[0]
            self._buffered_since_s = time.monotonic()
            data = data[: partial_reply.start()]
        if escape_was_sent:
            return data.removeprefix("\x1b")
        return data

    def overdue(self) -> str:
        """Remove and return the buffered input once its time limit has passed."""
        if not self._buffered or time.monotonic() - self._buffered_since_s < _MAX_BUFFERED_S:
            return ""
        keys = self._buffered
        self._buffered = ""
        return keys


def asks_background(
    driver: "type[Driver]", term: str, on_reply: Callable[[Background], None]
) -> "type[Driver]":
    """Return a driver that queries the background, if the terminal type `term` supports that.

    `on_reply` is called on the thread that reads keys.
    """
    if term.startswith(_UNSUPPORTED) or not _reads_replies(driver):
        return driver
    _filter_input(ReplyFilter(on_reply))

    class AsksBackground(driver):  # type: ignore[misc, valid-type]
        _has_asked = False

        def start_application_mode(self) -> None:
            super().start_application_mode()
            if not self._has_asked and self._writer_thread is not None:
                self._has_asked = True
                self.write(_QUERY)
                self.flush()

    return AsksBackground


def _reads_replies(driver: "type[Driver]") -> bool:
    """Return whether the input of a driver can be filtered."""
    return any(base.__name__ == "LinuxDriver" for base in driver.__mro__)


def _filter_input(replies: ReplyFilter) -> None:
    """Pass all input through a filter before Textual's key parser."""
    from textual._xterm_parser import XTermParser
    from textual.drivers import linux_driver
    from textual.message import Message

    class FilteredParser(XTermParser):
        def feed(self, data: str) -> Iterable[Message]:
            if not data:  # the end of the input
                return super().feed(data)
            keys = replies.keys(data)
            if not keys:
                return ()
            return super().feed(keys)

        def tick(self) -> Iterable[Message]:
            if late := replies.overdue():
                yield from super().feed(late)
            yield from super().tick()

    linux_driver.XTermParser = FilteredParser  # type: ignore[attr-defined]
