"""Output of commands: lines or JSON on stdout, and the question before a removal."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import Final

import click

from localchat.cli.streams import Terminal
from localchat.errors import UsageError
from localchat.sanitize import sanitize, sanitize_line

_LEAST_COLUMNS: Final = 20


def print_lines(environ: Mapping[str, str], lines: Iterable[str]) -> None:
    """Print lines, sanitized on a terminal. Raises LocalchatError if stdout cannot be written."""
    terminal = Terminal(environ)
    terminal.answer("\n".join(lines))
    terminal.end_answer(empty=False)


def print_report(environ: Mapping[str, str], lines: Iterable[str]) -> None:
    """Print tables and sentences; a sentence wraps at words on a terminal. Raises as `print_lines`."""
    if (width := report_width(environ)) is not None:
        lines = [part for line in lines for part in wrapped(line, width)]
    print_lines(environ, lines)


def report_width(environ: Mapping[str, str]) -> int | None:
    """Columns of the terminal on stdout; None: there is none, and lines may have any length."""
    if not Terminal(environ).stdout_is_terminal:
        return None
    return max(get_terminal_size().columns, _LEAST_COLUMNS)


def wrapped(line: str, width: int) -> list[str]:
    """The line at this width. Tables, which have two spaces between columns, stay as they are."""
    if len(line) <= width or "  " in line.strip():
        return [line]
    return wrap(line, width, break_long_words=False, break_on_hyphens=False)


def print_json(environ: Mapping[str, str], data: object) -> None:
    """Print a JSON value on one line."""
    import msgspec

    print_lines(environ, (msgspec.json.encode(data).decode(),))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    *,
    width: int | None = None,
    keep: int = 1,
) -> list[str]:
    """Align cells in columns, two spaces apart, below a head, which may be empty.

    `right` lists the columns to align to the right. Columns beyond `width` continue below, where the first
    `keep` columns are repeated.
    """
    cells = [[sanitize_line(cell) for cell in row] for row in rows]
    if head:
        cells.insert(0, list(head))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for columns in _parts(widths, width, keep):
        for row in cells:
            shown = (
                row[at].rjust(widths[at]) if at in right else row[at].ljust(widths[at])
                for at in columns
            )
            lines.append("  ".join(shown).rstrip())
    return lines


def _parts(widths: Sequence[int], width: int | None, keep: int) -> list[list[int]]:
    """The columns of each part of a table, so that none is wider than `width` if its columns allow that."""
    first = list(range(keep))
    parts = [first[:]]
    for at in range(keep, len(widths)):
        taken = sum(widths[one] + 2 for one in parts[-1])
        if width is not None and taken + widths[at] > width and len(parts[-1]) > keep:
            parts.append(first[:])
        parts[-1].append(at)
    return parts


def confirm(question: str, *, yes: bool, verb: str) -> bool:
    """Whether the user agrees, by `--yes` or on the terminal. Raises UsageError without a terminal."""

    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{verb} asks first, and there is no terminal", hint="use --yes to agree")
    return click.confirm(sanitize(question), err=True)
