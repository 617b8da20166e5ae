"""Read messages from the terminal of the user, even if stdin is a pipe."""

import fcntl
import os
import select
import sys
import termios
from contextlib import suppress

from localchat.cli.streams import Terminal
from localchat.errors import UsageError

_FENCE = '"""'
_MAX_BUFFERED_BYTES = 4095
"""Bytes of a line that Linux stores while no program reads the terminal. It drops the rest."""


class TerminalKeyboard:
    """Reads lines, with editing if Python supports it. Three double quotes enclose several lines."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        with suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401 - adds editing and history to input()

    def read(self) -> str | None:
        """Return the next message, stripped, or None at the end. Raises KeyboardInterrupt."""
        line = self._line("> ")
        if line is None:
            return None
        if not line.lstrip().startswith(_FENCE):
            return line.strip()
        lines = [line.lstrip().removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            line = self._line(". ")
            if line is None:
                break
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(_FENCE).strip()

    def _line(self, sign: str) -> str | None:
        if _ended_during_answer():
            return None
        try:
            if self._terminal.stdout_is_terminal:
                line = input(sign)
            else:
                self._terminal.prompt(sign)
                line = input()
        except EOFError:
            return None
        if len(line.encode("utf-8", "surrogateescape")) == _MAX_BUFFERED_BYTES:
            self._terminal.print_line(
                "localchat: the end of this line may be missing, because the system stores only "
                f"{_MAX_BUFFERED_BYTES:,} bytes of a line that is pasted before the prompt"
            )
        return line


def _ended_during_answer() -> bool:
    """Return True if Ctrl+D was pressed during an answer.

    The system stores it as an end of file. Line editing reads keys and never sees it.
    """
    with suppress(OSError, ValueError, AttributeError):  # stdin is closed or not a terminal
        number = sys.stdin.fileno()
        # Count after select: a line that arrives in between would look like the end of file, and lose a byte.
        if select.select([number], [], [], 0)[0]:
            count = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
            return not any(count) and not os.read(number, 1)
    return False


def open_keyboard(terminal: Terminal) -> TerminalKeyboard:
    """Open the terminal of this process. It replaces a stdin that is a pipe.

    Raises UsageError without a terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        try:
            handle = os.open("/dev/tty", os.O_RDWR)
        except OSError as problem:
            raise UsageError(
                "a conversation needs a terminal, and this process has none",
                hint="leave -i out, and give the question as an argument or on stdin",
            ) from problem
        os.dup2(handle, 0)
        os.close(handle)
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    return TerminalKeyboard(terminal)
