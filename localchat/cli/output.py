"""Data on stdout: lines for a person, or JSON for a program."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from localchat.cli.streams import Terminal


def print_lines(environ: Mapping[str, str], lines: Iterable[str]) -> None:
    """Lines, whatever they hold made inert on a terminal. Raises LocalchatError where stdout is full."""
    terminal = Terminal(environ)
    terminal.answer("\n".join(lines))
    terminal.end_answer(empty=False)


def print_json(environ: Mapping[str, str], data: object) -> None:
    """One JSON value on one line."""
    import msgspec

    print_lines(environ, (msgspec.json.encode(data).decode(),))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Columns as wide as their widest cell, two blanks apart. `right`: columns of numbers."""
    from localchat.sanitize import sanitize_line

    cells = [list(head), *([sanitize_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def agreed(question: str, *, yes: bool, verb: str) -> bool:
    """Whether the user agrees: `--yes`, or an answer on the terminal. Raises UsageError where there is none."""
    import click

    from localchat.errors import UsageError
    from localchat.sanitize import sanitize

    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{verb} asks first, and there is no terminal", hint="--yes agrees")
    return click.confirm(sanitize(question), err=True)
