"""The streams of one run. stdout carries the answer alone; everything else is talk and goes to stderr.

Off a terminal nothing is coloured, moved or animated, and the bytes of the answer are the model's own. On
one, text from outside is made inert first, and one progress line is drawn and erased again.
"""

import fcntl
import io
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final, TextIO

from localchat.errors import LocalchatError
from localchat.sanitize import sanitize

_ERASE: Final = "\r\x1b[2K"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_LINE_EVERY_S: Final = 10.0
"""How often progress may take a line where it cannot be drawn in place."""


class OutputClosed(Exception):
    """The reader of stdout is gone."""


def stdout_trouble(problem: OSError) -> LocalchatError:
    """What is said where stdout takes no more, of a full disk for instance."""
    return LocalchatError(f"stdout cannot be written: {problem.strerror or problem}")


class Terminal:
    """Writes answers, talk and progress. Callable from any thread: an engine speaks from its own."""

    def __init__(
        self, environ: Mapping[str, str], *, quiet: bool = False, color: bool = True
    ) -> None:
        self._out = _usable(sys.stdout)
        self._talk = _usable(sys.stderr)
        self.stdout_is_terminal = self._out.isatty()
        self.stderr_is_terminal = self._talk.isatty()
        plain = environ.get("TERM") == "dumb"
        self.colored = (
            self.stderr_is_terminal and color and not plain and not environ.get("NO_COLOR")
        )
        self.animated = self.stderr_is_terminal and not plain and not quiet
        self._quiet = quiet
        self._lock = threading.RLock()
        self._drawn = False
        self._next_line_s = time.monotonic() + _LINE_EVERY_S
        self._newlines = ""
        self._in_reasoning = False
        self._open = False
        self._held: list[str] = []

    # ------------------------------------------------------------------ stdout

    @property
    def stdout_is_closed(self) -> bool:
        """Whether the shell closed it: what then stands in its place (cli/__init__.py) can be read alone."""
        try:
            flags = fcntl.fcntl(self._out.fileno(), fcntl.F_GETFL)
        except (OSError, ValueError):  # no file of the system
            return False
        return flags & os.O_ACCMODE == os.O_RDONLY

    def answer(self, text: str) -> None:
        """A piece of the answer. Newlines at its end wait until more text follows them."""
        whole = self._newlines + text
        body = whole.rstrip("\n")
        self._newlines = whole[len(body) :]
        if body:
            self._leave_reasoning()
            self._open = True  # before the write: Ctrl+C may come right behind it
            self._write_out(body)

    def end_answer(self, *, empty: bool = True) -> None:
        """Exactly one newline behind the answer, whatever it ended with. `empty`: also where there was no
        text at all."""
        self._leave_reasoning()
        self._newlines = ""
        if self._open or empty:
            self._write_out("\n")
        with self._lock:
            self._open = False
            held, self._held = self._held, []
        for sentence in held:
            self.notify(sentence)

    def _write_out(self, text: str) -> None:
        with self._lock:
            self.progress("")
            try:
                self._out.write(sanitize(text) if self.stdout_is_terminal else text)
                self._out.flush()
            except BrokenPipeError as closed:
                raise OutputClosed from closed
            except OSError as problem:
                raise stdout_trouble(problem) from problem

    # ------------------------------------------------------------------ stderr

    def notify(self, sentence: str) -> None:
        """A notice, unless the run is quiet. Where it would break a line of the answer, it waits."""
        if self._quiet:
            return
        with self._lock:
            if self._open and self.stdout_is_terminal and self.stderr_is_terminal:
                self._held.append(sentence)
                return
        self.print_line(f"localchat: {sentence}", dim=True)

    def print_line(self, text: str, *, dim: bool = False) -> None:
        """A line that was asked for, or that matters even to a quiet run."""
        self._leave_reasoning()
        with self._lock:
            self.progress("")
            self._write_talk(self._styled(text, dim) + "\n")

    def ask(self, sign: str) -> None:
        """The sign before a line of input, where stdout must not carry it."""
        with self._lock:
            self._write_talk(sign)

    def reasoning(self, text: str) -> None:
        """A piece of what the model thinks."""
        with self._lock:
            self.progress("")
            self._in_reasoning = True
            self._write_talk(self._styled(text, dim=True))

    def _leave_reasoning(self) -> None:
        with self._lock:
            if self._in_reasoning:
                self._in_reasoning = False
                self._write_talk("\n\n" if self.stdout_is_terminal else "\n")

    def progress(self, line: str) -> None:
        """Draw one quiet line, or erase it (empty). Off a terminal: a plain line every ten seconds."""
        with self._lock:
            if self.animated:
                if line or self._drawn:
                    self._write_talk(_ERASE + (self._styled(line, dim=True) if line else ""))
                self._drawn = bool(line)
            elif line and not self._quiet and time.monotonic() >= self._next_line_s:
                self._next_line_s = time.monotonic() + _LINE_EVERY_S
                self._write_talk(f"localchat: {line}\n")

    def _styled(self, text: str, dim: bool) -> str:
        shown = sanitize(text) if self.stderr_is_terminal else text
        return f"{_DIM}{shown}{_PLAIN}" if dim and self.colored else shown

    def _write_talk(self, text: str) -> None:
        try:
            self._talk.write(text)
            self._talk.flush()
        except OSError:
            self._talk = io.StringIO()  # nobody reads the talk; the answer goes on


def _usable(stream: TextIO | None) -> TextIO:
    """The stream, made unable to fail on a character; a closed one becomes a sink."""
    if stream is None or stream.closed:
        return io.StringIO()
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
        if not stream.isatty():
            stream.reconfigure(encoding="utf-8", newline="\n")
    return stream
