"""Command line: parses arguments, asks an engine, prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from localchat.cli.context import AppContext


def main(args: Sequence[str] | None = None, app: "AppContext | None" = None) -> NoReturn:
    """Run the command and exit with its code. `args=None`: the arguments of the process."""
    import sys

    _end_at_ctrl_c()
    from localchat import gc_control

    gc_control.pause_gc()
    from localchat.cli.main import run

    _fill_closed_descriptors()
    _replace_invalid_bytes()
    sys.exit(run(sys.argv[1:] if args is None else args, app))


def _end_at_ctrl_c() -> None:
    """Let Ctrl+C end the program without a traceback while it loads and ends.

    Nothing is lost then. `run` handles Ctrl+C itself."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _fill_closed_descriptors() -> None:
    """Open the standard streams that a shell has closed.

    The next file or pipe would get their numbers, and text for a stream would end up there. Writing to a
    stdout that was closed fails: an answer that nobody can read is no success."""
    import os
    import sys

    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
            if number == 1:
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end


def _replace_invalid_bytes() -> None:
    """Read keys of a terminal that are not UTF-8 as U+FFFD.

    Python would raise an error, or return surrogates that no file and no engine accepts."""
    import io
    import sys

    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.isatty():
        sys.stdin.reconfigure(errors="replace")
