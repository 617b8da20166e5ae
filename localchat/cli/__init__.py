"""The command line: a door that parses, asks an engine, and prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from localchat.cli.door import Door


def main(args: Sequence[str] | None = None, door: "Door | None" = None) -> NoReturn:
    """Run the command and exit with its code. `args` None: those of the process."""
    import sys

    from localchat import startup

    startup.rest()
    from localchat.cli.app import run

    _fill_closed_descriptors()
    sys.exit(run(sys.argv[1:] if args is None else args, door))


def _fill_closed_descriptors() -> None:
    """Where a shell closed stdin, stdout or stderr, the next file or pipe to be opened would take its
    number, and what is meant for a stream would end up there."""
    import os

    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
