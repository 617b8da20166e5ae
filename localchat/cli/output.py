"""Output of commands: lines or JSON on stdout, and the question before a removal."""

import sys
from collections.abc import Iterable, Mapping, Sequence

import click

from localchat.cli.streams import Terminal
from localchat.errors import UsageError
from localchat.sanitize import sanitize, sanitize_line


def print_lines(environ: Mapping[str, str], lines: Iterable[str]) -> None:
    """Print lines, sanitized on a terminal. Raises LocalchatError if stdout cannot be written."""
    terminal = Terminal(environ)
    terminal.answer("\n".join(lines))
    terminal.end_answer(empty=False)


def print_json(environ: Mapping[str, str], data: object) -> None:
    """Print a JSON value on one line."""
    import msgspec

    print_lines(environ, (msgspec.json.encode(data).decode(),))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Align cells in columns, two spaces apart. `right`: columns that are aligned to the right."""

    cells = [list(head), *([sanitize_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def confirm(question: str, *, yes: bool, verb: str) -> bool:
    """Whether the user agrees, by `--yes` or on the terminal. Raises UsageError without a terminal."""

    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{verb} asks first, and there is no terminal", hint="--yes agrees")
    return click.confirm(sanitize(question), err=True)
