"""Reads messages from the terminal of the user, even if stdin is a pipe."""

import fcntl
import os
import select
import sys
import termios
from contextlib import suppress

from localchat.cli.streams import Terminal
from localchat.errors import UsageError

_FENCE = '"""'
_MOST_AHEAD_BYTES = 4095
"""What Linux keeps of a line that is typed or pasted while nothing reads keys; it drops the rest."""


class TerminalKeyboard:
    """Reads with line editing, if Python has it. Three double quotes begin and end a text of several lines."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        with suppress(ImportError):  # a Python without it still reads lines
            import readline  # noqa: F401 - gives input() its editing and its history

    def read(self) -> str | None:
        """The next message, stripped; None at the end. Raises KeyboardInterrupt."""
        line = self._line("> ")
        if line is None or not line.lstrip().startswith(_FENCE):
            return None if line is None else line.strip()
        lines = [line.lstrip().removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            more = self._line(". ")
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines).rstrip().removesuffix(_FENCE).strip()

    def _line(self, sign: str) -> str | None:
        if _ended_ahead():
            return None
        try:
            if self._terminal.stdout_is_terminal:
                line = input(sign)
            else:
                self._terminal.prompt(sign)
                line = input()
        except EOFError:
            return None
        if len(line.encode("utf-8", "surrogateescape")) == _MOST_AHEAD_BYTES:
            self._terminal.print_line(
                f"localchat: the end of this line may be missing: of a line that comes before the prompt the "
                f"system keeps {_MOST_AHEAD_BYTES:,} bytes, and this one has as many"
            )
        return line


def _ended_ahead() -> bool:
    """Whether Ctrl+D was pressed during an answer.

    The system keeps it as an end of file, which line editing never sees because it reads keys."""
    with suppress(OSError, ValueError, AttributeError):  # stdin is no terminal, or closed
        number = sys.stdin.fileno()
        count = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
        if not any(count) and select.select([number], [], [], 0)[0]:
            return not os.read(number, 1)
    return False


def open_keyboard(terminal: Terminal) -> TerminalKeyboard:
    """The keyboard of this process's terminal, which replaces a stdin that is a pipe. Raises UsageError
    without a terminal."""
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
