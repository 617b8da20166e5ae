"""Output of commands: lines, tables and JSON on stdout, and the question before a removal."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Final

import click

from localchat.cli.streams import Terminal, tell
from localchat.errors import UsageError
from localchat.sanitize import sanitize, sanitize_line

_MIN_COLUMNS: Final = 20


def print_lines(environ: Mapping[str, str], lines: Iterable[str]) -> None:
    """Print lines. A terminal gets them sanitized and wrapped at words.

    Raises LocalchatError if stdout cannot be written.
    """
    terminal = Terminal(environ)
    terminal.answer("\n".join(lines))
    terminal.end_answer(empty=False)


def report_width(environ: Mapping[str, str]) -> int | None:
    """Return the columns of the terminal on stdout. None without one, where lines may have any length."""
    if not Terminal(environ).stdout_is_terminal:
        return None
    return max(get_terminal_size().columns, _MIN_COLUMNS)


def print_json(environ: Mapping[str, str], data: object) -> None:
    """Print a JSON value on one line."""
    print_lines(environ, (json_line(data),))


def json_line(data: object) -> str:
    """Return a JSON value on one line. Bytes of a file name that are not UTF-8 are escaped."""
    import msgspec

    try:
        return msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        from localchat.chat.export import json_text

        return json_text(msgspec.to_builtins(data))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    *,
    width: int | None = None,
    keep: int = 1,
) -> list[str]:
    """Align cells in columns that are two spaces apart. The head may be empty.

    `right` lists the columns to align right. Columns beyond `width` continue below, where the first `keep`
    columns are repeated.
    """
    cells = [[sanitize_line(cell) for cell in row] for row in rows]
    if head:
        cells.insert(0, list(head))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for columns in _parts(widths, width, keep):
        for row in cells:
            aligned = []
            for column in columns:
                align = str.rjust if column in right else str.ljust
                aligned.append(align(row[column], widths[column]))
            lines.append("  ".join(aligned).rstrip())
    return lines


def _parts(widths: Sequence[int], width: int | None, keep: int) -> list[list[int]]:
    """Distribute columns over parts of a table. Each part fits in `width` if its columns allow that."""
    repeated = list(range(keep))
    parts = [[*repeated]]
    for column in range(keep, len(widths)):
        part = parts[-1]
        part_width = sum(widths[other] + 2 for other in part) + widths[column]
        if width is not None and part_width > width and len(part) > keep:
            part = [*repeated]
            parts.append(part)
        part.append(column)
    return parts


def confirm(question: str, *, yes: bool, verb: str, about: str = "") -> bool:
    """Return True if the user agrees, by `--yes` or on the terminal. Raises UsageError without a terminal.

    `about` is printed before the question.
    """
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{verb} needs confirmation, but stdin is not a terminal", hint="use --yes to confirm"
        )
    if about:
        tell(about)
    return click.confirm(sanitize(question), err=True)
