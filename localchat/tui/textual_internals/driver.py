"""Direct access to the terminal: its writer thread, its closing, and keys that Textual misreads.

Importing this module imports no Textual, so that `launch` can use it before the environment is prepared.

Private Textual API: `App._driver`, `Driver._auto_restart`, `LinuxDriver._writer_thread`, `._file`,
`._must_signal_resume` and `._sigcont_application`, `WriterThread._queue`, `textual._ansi_sequences`.
"""

import os
import signal
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from localchat.sanitize import sanitize

if TYPE_CHECKING:
    from textual.app import App
    from textual.driver import Driver


# ---------------------------------------------------------------------------- output


def output_is_pending(app: "App[object]") -> bool:
    """Return whether the terminal has not read earlier frames yet.

    The queue holds thirty frames. The next one blocks the program.
    """
    writer = getattr(app._driver, "_writer_thread", None)
    return writer is not None and writer._queue.qsize() > 1


def terminal_writer(app: "App[Any]") -> Callable[[str], None]:
    """Return a function that writes escape sequences between the screen's own updates."""
    driver = app._driver
    if driver is not None:
        return driver.write
    return lambda sequence: None


def alert(app: "App[Any]", text: str) -> None:
    """Ring the bell, and send a notification (OSC 9)."""
    app.bell()
    terminal_writer(app)(f"\x1b]9;{sanitize(text)}\x1b\\")


def can_suspend(app: "App[Any]") -> bool:
    """Return whether a shell can resume the program.

    A program that leads its session has no shell, as in `xterm -e` or a container.
    """
    driver = app._driver
    if driver is None or not driver.can_suspend:
        return False
    return os.getsid(0) != os.getpid()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl+C while another program, which receives it too, has the terminal."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def terminal_released(app: "App[Any]") -> Iterator[None]:
    """Release the terminal to another program inside the block. The session continues.

    The block must not raise: Textual's `suspend` would never take the terminal back.
    """
    # Without batch_update the program hangs after thirty frames to a terminal that reads nothing.
    with app.suspend(), app.batch_update(), interrupts_ignored():
        yield
    app.refresh(layout=True)


def hangup_safe(driver: "type[Driver]") -> "type[Driver]":
    """Return a driver for a terminal that may close at any moment.

    Textual's writer thread would end with an error, and the program would block forever once thirty frames
    are queued. A closing terminal also sends SIGCONT, on which Textual starts its threads a second time. The
    first thread that reads keys may then outlive the screen and keep the process running in a busy loop.
    """

    class HangupSafe(driver):  # type: ignore[misc, valid-type]
        def start_application_mode(self) -> None:
            file = getattr(self, "_file", None)
            if file is not None and not isinstance(file, _DiscardOnceClosed):
                self._file = _DiscardOnceClosed(file)
            super().start_application_mode()

        def _sigcont_application(self, *received: object) -> None:
            if not os.isatty(self.fileno):
                return
            if self._auto_restart and not self._must_signal_resume and self._writer_thread:
                # Stopped by SIGSTOP, which no program sees: its threads are still there.
                self.suspend_application_mode()
            super()._sigcont_application(*received)

    return HangupSafe


class _DiscardOnceClosed:
    """A text stream that discards its output once the terminal is gone."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError:
            self._redirect_to_null()

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        # Buffered text goes there too, at the interpreter's last flush.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._file.fileno())
        os.close(null)


# ---------------------------------------------------------------------------- keys


def add_alt_keys() -> None:
    """Add Alt+Enter and Alt+1 to Alt+9.

    Most terminals send them as Escape and the key. Textual would read Enter (and send the message), or the
    character that a Mac types with Alt.
    """
    from enum import Enum

    from textual import _ansi_sequences

    names = {"\r": "enter"} | {digit: digit for digit in "123456789"}
    alt = Enum("alt", {f"alt_{name}": f"alt+{name}" for name in names.values()})  # type: ignore[misc]
    table = _ansi_sequences.ANSI_SEQUENCES_KEYS
    for key, name in names.items():
        table[f"\x1b{key}"] = (alt[f"alt_{name}"],)  # type: ignore[index]


def is_invisible_character(character: str | None) -> bool:
    """Return whether a key is a zero-width joiner, or an ideographic or non-breaking space.

    Textual drops them because `str.isprintable()` is False. Persian and emoji need the joiners, and Japanese
    needs the wide space. False for characters that could reverse or hide text.
    """
    return (
        character is not None
        and len(character) == 1
        and not character.isprintable()
        and unicodedata.category(character) in ("Cf", "Zs")
        and sanitize(character) == character
    )
