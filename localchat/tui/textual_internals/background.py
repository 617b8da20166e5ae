"""Asks the terminal for its background colour (OSC 11), and keeps the reply out of the keys.

The question is written once, on the empty alternate screen before the first frame, and nobody waits for the
reply. Importing this module imports no Textual.

Private Textual API: `linux_driver.XTermParser`, `Parser.feed` and `Parser.tick`.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from textual.driver import Driver

_QUESTION: Final = "\x1b]11;?\x1b\\"
_REPLY: Final = re.compile(r"\x1b\]11;([^\x07\x1b]{0,64})(?:\x07|\x1b\\)")
_BEGUN: Final = re.compile(r"\x1b\](?:1(?:1(?:;[^\x07\x1b]{0,64}\x1b?)?)?)?\Z")
_COLOR: Final = re.compile(r"rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_PATIENCE_S: Final = 0.3
"""The longest time that half a reply is held back: it may be keys after all."""
_SILENT: Final = ("linux", "vt", "ansi", "cons")
"""Kinds of terminals that do not know the question; some would print it."""


class Background(NamedTuple):
    """The background of a terminal; each part is from 0 to 1."""

    red: float
    green: float
    blue: float

    @property
    def is_light(self) -> bool:
        """Whether dark text is easier to read on it."""
        return 0.299 * self.red + 0.587 * self.green + 0.114 * self.blue > 0.5


def background_of(color: str) -> Background | None:
    """The colour of a reply, as `rgb:ffff/ffff/ffff`; None if it is none."""
    found = _COLOR.match(color)
    if found is None:
        return None
    return Background(*(_share(part) for part in found.groups()))


def _share(digits: str) -> float:
    return int(digits, 16) / ((1 << 4 * len(digits)) - 1)


class ReplyFilter:
    """Takes the reply out of what the terminal sends, however it is cut into pieces."""

    def __init__(self, on_reply: Callable[[Background], None]) -> None:
        self._on_reply = on_reply
        self._held = ""
        self._held_s = 0.0
        self._after_escape = False

    def keys(self, data: str) -> str:
        """The rest of `data`. Half a reply at its end is held back until the other half comes."""
        # The escape character alone is a key, and is not held back.
        is_rest = self._after_escape and data.startswith("]")
        self._after_escape = data.endswith("\x1b")
        data = ("\x1b" if is_rest else self._held) + data
        self._held = ""
        for match in _REPLY.finditer(data):
            if (found := background_of(match[1])) is not None:
                self._on_reply(found)
        data = _REPLY.sub("", data)
        if (begun := _BEGUN.search(data)) is not None:
            self._held = begun[0]
            self._held_s = time.monotonic()
            data = data[: begun.start()]
        return data.removeprefix("\x1b") if is_rest else data

    def overdue(self) -> str:
        """What was held back for too long, or everything at the end of the input."""
        if not self._held or time.monotonic() - self._held_s < _PATIENCE_S:
            return ""
        held = self._held
        self._held = ""
        return held


def asks_background(
    driver: "type[Driver]", term: str, on_reply: Callable[[Background], None]
) -> "type[Driver]":
    """The same driver, which asks a terminal of the kind `term` for its background. `on_reply` is called on the
    thread that reads keys."""
    if term.startswith(_SILENT) or not _reads_replies(driver):
        return driver
    _filter_input(ReplyFilter(on_reply))

    class AsksBackground(driver):  # type: ignore[misc, valid-type]
        _has_asked = False

        def start_application_mode(self) -> None:
            super().start_application_mode()
            if not self._has_asked and self._writer_thread is not None:
                self._has_asked = True
                self.write(_QUESTION)
                self.flush()

    return AsksBackground


def _reads_replies(driver: "type[Driver]") -> bool:
    """Whether a driver is the one whose input can be filtered."""
    return any(each.__name__ == "LinuxDriver" for each in driver.__mro__)


def _filter_input(replies: ReplyFilter) -> None:
    """Let a filter read everything before Textual's parser of keys."""
    from textual._xterm_parser import XTermParser
    from textual.drivers import linux_driver
    from textual.message import Message

    class FilteredParser(XTermParser):
        def feed(self, data: str) -> Iterable[Message]:
            if not data:  # the end of the input
                return super().feed(data)
            keys = replies.keys(data)
            return super().feed(keys) if keys else ()

        def tick(self) -> Iterable[Message]:
            if late := replies.overdue():
                yield from super().feed(late)
            yield from super().tick()

    linux_driver.XTermParser = FilteredParser  # type: ignore[attr-defined]
