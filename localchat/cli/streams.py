"""Standard streams of a run: stdout carries the answer alone, stderr everything else.

On a terminal, text is sanitized and wrapped at words, and a progress line is drawn and erased again. Elsewhere
nothing is colored or animated, and the answer has exactly the bytes of the model.
"""

import codecs
import fcntl
import io
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final, TextIO

import click

from localchat.cli.word_wrap import WordWrap, cells, wrap_at_words
from localchat.errors import LocalchatError
from localchat.notice_cause import notice_cause
from localchat.sanitize import one_line, sanitize

_ERASE: Final = "\r\x1b[2K"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_KEEP_BYTES: Final = "localchat.keep_bytes"
"""Error handler of streams that are no terminal."""
_LINE_EVERY_S: Final = 10.0
"""Interval of progress lines in a stderr that cannot erase them."""


class OutputClosed(Exception):
    """The reader of stdout has closed it."""


def stdout_trouble(problem: OSError) -> LocalchatError:
    """Return the error for a failed write to stdout, such as on a full disk."""
    return LocalchatError(f"cannot write to stdout: {problem.strerror or problem}")


class Terminal:
    """Writes answers, notices and progress. Engines call it from threads of their own."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        quiet: bool = False,
        color: bool = True,
        stats: bool = False,
    ) -> None:
        """`stats`: show notes of an engine even if stdout is a pipe."""
        self._out = _usable(sys.stdout)
        self._err = _usable(sys.stderr)
        self.stdout_is_terminal = self._out.isatty()
        self.stderr_is_terminal = self._err.isatty()
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
        self._answer_wrap = WordWrap()
        self._reasoning_wrap = WordWrap()
        self._in_reasoning = False
        self._line_open = False
        self._pending: list[str] = []
        self._notes_wanted = not quiet and (stats or self.stdout_is_terminal)
        self._causes: set[str] = set()
        """Causes of the notes so far."""

    @property
    def stdout_is_closed(self) -> bool:
        """True if the shell closed stdout. Its replacement (see cli/__init__.py) is read-only."""
        try:
            flags = fcntl.fcntl(self._out.fileno(), fcntl.F_GETFL)
        except (OSError, ValueError):  # not a file of the operating system
            return False
        return flags & os.O_ACCMODE == os.O_RDONLY

    def answer(self, text: str) -> None:
        """Write a piece of the answer. Trailing newlines are buffered until more text follows."""
        text = self._newlines + text
        body = text.rstrip("\n")
        self._newlines = text[len(body) :]
        if body:
            self._leave_reasoning()
            # Set it before the write, because Ctrl+C may arrive right after it.
            self._line_open = True
            if self.stdout_is_terminal:
                body = self._answer_wrap.add(sanitize(body), columns(self._out))
            self._write_out(body)

    def end_answer(self, *, empty: bool = True) -> None:
        """End the answer with exactly one newline. `empty`: even if there was no text."""
        self._leave_reasoning()
        self._newlines = ""
        if self._line_open or empty:
            self._write_out(f"{self._answer_wrap.rest()}\n")
        with self._lock:
            self._line_open = False
            pending = self._pending
            self._pending = []
        for sentence in pending:
            self.notify(sentence)

    def _write_out(self, text: str) -> None:
        with self._lock:
            self.progress("")
            try:
                self._out.write(text)
                self._out.flush()
            except BrokenPipeError as closed:
                raise OutputClosed from closed
            except OSError as problem:
                raise stdout_trouble(problem) from problem

    def note(self, sentence: str) -> None:
        """Print a note of an engine below the answer, once for each cause. In a pipe only with `stats`.

        Until the answer begins, the note is also the progress line, if that is erased later.
        """
        cause = notice_cause(sentence)
        with self._lock:
            if not self._notes_wanted or cause in self._causes:
                return
            self._causes.add(cause)
            self._pending.append(sentence)
            if self.animated and not self._line_open:
                self.progress(sentence)

    def warn(self, sentence: str) -> None:
        """Print a warning, even in a pipe, unless a note had the same cause."""
        cause = notice_cause(sentence)
        with self._lock:
            was_noted = cause in self._causes
            self._causes.add(cause)
        if sentence and not was_noted:
            self.notify(sentence)

    def notify(self, sentence: str) -> None:
        """Print a notice unless the run is quiet. Wait with it while a line of the answer is open."""
        if self._quiet:
            return
        with self._lock:
            if self._line_open:  # both streams may go to the same terminal or file
                self._pending.append(sentence)
                return
        self.print_line(f"localchat: {one_line(sentence)}", dim=True)

    def silence(self) -> None:
        """Print no notices from now on, because a screen owns the terminal."""
        self._quiet = True

    def print_line(self, text: str, *, dim: bool = False) -> None:
        """Print a line that the user requested, or that even a quiet run needs."""
        self._leave_reasoning()
        with self._lock:
            self.progress("")
            self._write_err(self._styled(text, dim, columns(self._err)) + "\n")

    def print_command(self, command: str) -> None:
        """Print a command to copy, unless the run is quiet. The terminal wraps it, so a copy is one line."""
        if self._quiet:
            return
        with self._lock:
            self.progress("")
            self._write_err(self._styled(command, dim=True) + "\n")

    def prompt(self, sign: str) -> None:
        """Print a prompt to stderr, because stdout carries only answers."""
        with self._lock:
            self._write_err(sign)

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning."""
        with self._lock:
            self.progress("")
            self._in_reasoning = True
            if self.stderr_is_terminal:
                text = self._reasoning_wrap.add(sanitize(text), columns(self._err))
            self._write_err(self._styled(text, dim=True))

    def _leave_reasoning(self) -> None:
        with self._lock:
            if self._in_reasoning:
                self._in_reasoning = False
                self._write_err(self._styled(self._reasoning_wrap.rest(), dim=True))
                self._write_err("\n\n" if self.stdout_is_terminal else "\n")

    def progress(self, line: str) -> None:
        """Draw the progress line, or erase it if empty. Off a terminal, print a line every ten seconds."""
        line = one_line(line)
        with self._lock:
            if self.animated:
                if line or self._drawn:
                    row = _one_row(line, columns(self._err))
                    if row:
                        row = self._styled(row, dim=True)
                    self._write_err(_ERASE + row)
                self._drawn = bool(line)
            elif line and not self._quiet and time.monotonic() >= self._next_line_s:
                self._next_line_s = time.monotonic() + _LINE_EVERY_S
                self._write_err(f"localchat: {line}\n")

    def _styled(self, text: str, dim: bool, width: int = 0) -> str:
        """Return the text as stderr shows it, wrapped at `width` cells unless that is 0."""
        if self.stderr_is_terminal:
            text = wrap_at_words(sanitize(text), width)
        if dim and self.colored:
            return f"{_DIM}{text}{_PLAIN}"
        return text

    def _write_err(self, text: str) -> None:
        try:
            self._err.write(text)
            self._err.flush()
        except OSError:
            self._err = io.StringIO()  # stderr was closed by its reader, and the answer continues


def tell(text: str) -> None:
    """Print the message of a command to stderr, wrapped at words on a terminal."""
    click.echo(wrap_at_words(text, columns(sys.stderr)), err=True)


def columns(stream: TextIO | None) -> int:
    """Return the width of a terminal, or 0 if it is unknown."""
    if stream is None:
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _one_row(line: str, width: int) -> str:
    """Cut a line to `width` cells. Of two rows, only the last would be erased."""
    if not width or cells(line) < width:
        return line
    while cells(line) > width - 2:
        line = line[:-1]
    return f"{line}…"


def _usable(stream: TextIO | None) -> TextIO:
    """Make a stream write any text. Discard the text of a closed one.

    A terminal gets a `?` for what it cannot show. Elsewhere, file names keep their bytes.
    """
    if stream is None or stream.closed:
        return io.StringIO()
    if isinstance(stream, io.TextIOWrapper):
        if stream.isatty():
            stream.reconfigure(errors="replace")
        else:
            stream.reconfigure(encoding="utf-8", errors=_KEEP_BYTES, newline="\n")
    return stream


def _escaped_bytes(problem: UnicodeError) -> tuple[bytes | str, int]:
    """Return the bytes of a file name that is not UTF-8, or a `?` for any other lone surrogate."""
    assert isinstance(problem, UnicodeEncodeError)
    letter = problem.object[problem.start]
    end = problem.start + 1
    if "\udc80" <= letter <= "\udcff":
        return letter.encode(errors="surrogateescape"), end
    return "?", end


codecs.register_error(_KEEP_BYTES, _escaped_bytes)
