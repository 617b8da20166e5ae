"""What can be known of the terminal behind Textual's driver. Uses parts of Textual that are not public; the
version is pinned."""

import os
import signal
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from localchat.sanitize import sanitize

if TYPE_CHECKING:
    from textual.app import App
    from textual.driver import Driver


def output_is_pending(app: "App[object]") -> bool:
    """Whether drawings wait because the terminal has not read earlier ones. Thirty may wait, the next one
    then holds the whole program."""
    writer = getattr(app._driver, "_writer_thread", None)
    return writer is not None and writer._queue.qsize() > 1


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Within, another program has the terminal, and Ctrl+C, which reaches both, is its own."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def hangup_safe(driver: "type[Driver]") -> "type[Driver]":
    """The same driver, for a terminal that may be closed at any moment. Its thread that writes would end with
    an error, and who writes next waits for ever once thirty pieces wait."""

    class HangupSafe(driver):  # type: ignore[misc, valid-type]
        def start_application_mode(self) -> None:
            file = getattr(self, "_file", None)
            if file is not None and not isinstance(file, _DiscardOnceClosed):
                self._file = _DiscardOnceClosed(file)
            super().start_application_mode()

    return HangupSafe


class _DiscardOnceClosed:
    """A stream that nobody may read any more: what is written then goes nowhere."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError:
            self._let_go()

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        # What the stream holds back goes the same way, also with the interpreter's last flush.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)


# Letters that Textual takes for keys without one, because Python calls them not printable: the joiners of
# Persian and of emoji, the wide space of Japanese, the space that does not break.


def is_invisible_character(character: str | None) -> bool:
    """Whether a key brings such a letter. What could turn or hide a text is none."""
    return (
        character is not None
        and len(character) == 1
        and not character.isprintable()
        and unicodedata.category(character) in ("Cf", "Zs")
        and sanitize(character) == character
    )
