"""Splits the bytes of a terminal into keys and pastes, before Textual's parser reads them.

Textual 8.2 reads escape codes inside a bracketed paste as keys, and decodes bytes strictly. Here a paste is
everything between its two markers, whatever it contains, and an invalid byte becomes U+FFFD. The reply to the
query of background.py is removed from the keys.

Importing this module imports no Textual.

Private Textual API: `LinuxDriver.run_input_thread`, `.exit_event`, `linux_driver.XTermParser`.
"""

import os
import re
import select
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from localchat.tui.textual_internals.background import Background, background_of, is_linux_driver

if TYPE_CHECKING:
    from textual.driver import Driver
    from textual.message import Message

PASTE_START: Final = b"\x1b[200~"
PASTE_END: Final = b"\x1b[201~"
_KEY_WAIT_S: Final = 0.1
"""Silence after which an incomplete escape sequence is read as keys."""
_PASTE_END_WAIT_S: Final = 0.03
"""Silence after which an end marker ends the paste."""
_PASTE_WAIT_S: Final = 2.0
"""Silence after which a paste without an end marker is delivered."""
_BURST_BYTES: Final = 64
"""Size from which input with line ends is a paste rather than typed keys."""
_READ_BYTES: Final = 65_536
_MARKERS: Final = re.compile(r"\x1b\[20[01]~")
_ESCAPE_THEN_TEXT: Final = re.compile(
    r"\x1b(?=(?:[^\x00-\x20\x7f0-9\[\\\]OPNX^_]|[OPNX][a-z])[^\x00-\x1f\x7f]{3})"
)
"""The escape key before typed text. Terminals send fewer characters for one key."""
_REPLY: Final = re.compile(r"\x1b\]11;([^\x07\x1b]{0,64})(?:\x07|\x1b\\)")
_PARTIAL_REPLY: Final = re.compile(rb"\x1b\](?:1(?:1(?:;[^\x07\x1b]{0,64}\x1b?)?)?)?\Z")


class Keys(NamedTuple):
    """Characters and escape sequences of keys, and reports of the terminal."""

    text: str


class EscapeKey(NamedTuple):
    """The escape key alone."""


class PastedText(NamedTuple):
    """A complete paste."""

    text: str


class BackgroundReply(NamedTuple):
    """The background color of the terminal, such as `rgb:ffff/ffff/ffff`."""

    color: str


TerminalEvent: TypeAlias = Keys | EscapeKey | PastedText | BackgroundReply


class TerminalInput:
    """Finds pastes in terminal input that arrives in pieces of any size.

    A paste may contain its own markers: the last end marker of a burst ends it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._in_paste = False
        self._paste_end: int | None = None
        """Index of the end marker that probably ends the paste."""
        self._searched = 0
        """Bytes of the buffer that contain no end marker."""
        self._end_is_missing = False
        """Whether a paste was delivered before its end marker arrived."""

    @property
    def wait_s(self) -> float:
        """Time to wait for more bytes before calling `silent`."""
        if self._paste_end is None:
            return _KEY_WAIT_S
        return _PASTE_END_WAIT_S

    def feed(self, data: bytes) -> Iterator[TerminalEvent]:
        """Add bytes from the terminal, and yield the complete events."""
        self._buffer += data
        if self._end_is_missing and not self._in_paste:
            self._resume_paste()
        while True:
            if not self._in_paste:
                start = self._buffer.find(PASTE_START)
                if start < 0:
                    yield from self._take_keys(len(self._buffer) - self._incomplete_bytes())
                    return
                yield from self._take_keys(start)
                del self._buffer[: len(PASTE_START)]
                self._begin_paste()
            if not self._find_end():
                return
            yield self._take_paste()

    def silent(self, seconds: float) -> Iterator[TerminalEvent]:
        """Yield the events that are complete after this many seconds without input."""
        if self._paste_end is not None:
            if seconds >= _PASTE_END_WAIT_S:
                yield self._take_paste()
                yield from self.feed(b"")
        elif self._in_paste:
            if seconds >= _PASTE_WAIT_S:
                self._end_is_missing = True
                yield self._take_paste()
        elif seconds >= _KEY_WAIT_S and self._buffer:
            if self._buffer == b"\x1b":
                self._buffer.clear()
                yield EscapeKey()
            else:
                yield from self._take_keys(len(self._buffer))

    def _begin_paste(self) -> None:
        self._in_paste = True
        self._end_is_missing = False
        self._paste_end = None
        self._searched = 0

    def _resume_paste(self) -> None:
        """Continue a paste that was delivered early. Its line ends must not send messages."""
        end = self._buffer.find(PASTE_END)
        start = self._buffer.find(PASTE_START)
        is_burst = len(self._buffer) >= _BURST_BYTES and (
            b"\r" in self._buffer or b"\n" in self._buffer
        )
        if (end >= 0 and (start < 0 or end < start)) or (is_burst and start < 0):
            self._begin_paste()

    def _find_end(self) -> bool:
        """Find the end marker. Return True if another paste begins after it."""
        buffer = self._buffer
        width = len(PASTE_END)
        if self._paste_end is None:
            first = buffer.find(PASTE_END, max(0, self._searched - width + 1))
            if first < 0:
                self._searched = len(buffer)
                return False
            self._paste_end = first
        while True:
            after = self._paste_end + width
            next_end = buffer.find(PASTE_END, after)
            next_start = buffer.find(PASTE_START, after)
            if next_start >= 0 and (next_end < 0 or next_start < next_end):
                return True
            if next_end < 0:
                return False
            self._paste_end = next_end

    def _take_paste(self) -> PastedText:
        end = self._paste_end
        if end is None:
            end = len(self._buffer)
        text = bytes(self._buffer[:end]).decode("utf-8", "replace")
        del self._buffer[: end + len(PASTE_END)]
        self._in_paste = False
        self._paste_end = None
        return PastedText(_MARKERS.sub("", text))

    def _incomplete_bytes(self) -> int:
        """Return the length of a partial reply or paste marker at the end of the buffer.

        The escape key alone counts as a partial marker.
        """
        if reply := _PARTIAL_REPLY.search(self._buffer):
            return len(reply[0])
        for length in range(len(PASTE_START) - 1, 0, -1):
            if self._buffer.endswith(PASTE_START[:length]):
                return length
        return 0

    def _take_keys(self, length: int) -> Iterator[TerminalEvent]:
        text = self._decoder.decode(bytes(self._buffer[:length]))
        del self._buffer[:length]
        for index, part in enumerate(_REPLY.split(text)):
            if index % 2:
                yield BackgroundReply(part)
                continue
            first, *others = _ESCAPE_THEN_TEXT.split(part)
            if first:
                yield Keys(first)
            for other in others:
                yield EscapeKey()
                yield Keys(other)


def reads_pastes(
    driver: "type[Driver]", on_background: Callable[[Background], None]
) -> "type[Driver]":
    """Return a driver that reads through `TerminalInput`. Only the Linux driver changes.

    `on_background` is called on the thread that reads keys.
    """
    if not is_linux_driver(driver):
        return driver

    class ReadsPastes(driver):  # type: ignore[misc, valid-type]
        def run_input_thread(self) -> None:
            """Read the terminal until the driver stops. Runs on its own thread."""
            from textual.drivers import linux_driver

            parser = linux_driver.XTermParser(self._debug)  # type: ignore[attr-defined]
            source = TerminalInput()
            silent_s = 0.0
            while not self.exit_event.is_set():
                wait_s = source.wait_s
                if select.select([self.fileno], [], [], wait_s)[0]:
                    silent_s = 0.0
                    data = _read(self.fileno)
                    if not data:
                        self._app.call_later(self._app.action_quit)
                        return
                    terminal_events = source.feed(data)
                else:
                    silent_s += wait_s
                    terminal_events = source.silent(silent_s)
                for message in _messages(terminal_events, parser.feed, on_background):
                    self.process_message(message)
                for message in parser.tick():
                    self.process_message(message)

    return ReadsPastes


def _read(fileno: int) -> bytes:
    """Read input from the terminal. Empty once the terminal is closed."""
    with suppress(OSError):
        return os.read(fileno, _READ_BYTES)
    return b""


def _messages(
    terminal_events: Iterable[TerminalEvent],
    parse: "Callable[[str], Iterable[Message]]",
    on_background: Callable[[Background], None],
) -> "Iterator[Message]":
    from textual import events

    for event in terminal_events:
        match event:
            case Keys(text):
                yield from parse(text)
            case EscapeKey():
                yield events.Key("escape", "\x1b")
            case PastedText(text):
                yield events.Paste(text)
            case BackgroundReply(color):
                if (background := background_of(color)) is not None:
                    on_background(background)
