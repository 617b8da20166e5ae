"""Queries the terminal's background color (OSC 11). `TerminalInput` finds the reply among the keys.

The query is sent once, on the empty alternate screen before the first frame. Nothing waits for the reply.
Importing this module imports no Textual.

Private Textual API: `LinuxDriver._writer_thread`.
"""

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from textual.driver import Driver

_QUERY: Final = "\x1b]11;?\x1b\\"
_COLOR: Final = re.compile(r"rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
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


def asks_background(driver: "type[Driver]", term: str) -> "type[Driver]":
    """Return a driver that queries the background, if the terminal type `term` supports that."""
    if term.startswith(_UNSUPPORTED) or not is_linux_driver(driver):
        return driver

    class AsksBackground(driver):  # type: ignore[misc, valid-type]
        _has_asked = False

        def start_application_mode(self) -> None:
            super().start_application_mode()
            if not self._has_asked and self._writer_thread is not None:
                self._has_asked = True
                self.write(_QUERY)
                self.flush()

    return AsksBackground


def is_linux_driver(driver: "type[Driver]") -> bool:
    """Return whether a driver reads the terminal as `TerminalInput` expects."""
    return any(base.__name__ == "LinuxDriver" for base in driver.__mro__)
