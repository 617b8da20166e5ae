"""Command line: parse arguments, ask an engine, print the answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from localchat.cli.context import AppContext


def main(args: Sequence[str] | None = None, app: "AppContext | None" = None) -> NoReturn:
    """Run the command and exit with its code. Without `args`, use the arguments of the process."""
    import sys

    _end_at_ctrl_c()
    from localchat import gc_control

    gc_control.pause_gc()
    from localchat.cli.main import run

    _fill_closed_descriptors()
    _replace_invalid_bytes()
    if args is None:
        args = sys.argv[1:]
    sys.exit(run(args, app))


def _end_at_ctrl_c() -> None:
    """Let Ctrl+C end the program without a traceback while there is nothing to save.

    `run` handles Ctrl+C itself.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _fill_closed_descriptors() -> None:
    """Open the standard streams that a shell has closed.

    Otherwise the next file or pipe would get their numbers, and text for a stream would end up there. Writing
    to a stdout that was closed fails, because an answer that cannot be read is not a success.
    """
    import os
    import sys

    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # `open` returns the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
            if number == 1:
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end


def _replace_invalid_bytes() -> None:
    """Read terminal input that is not UTF-8 as U+FFFD.

    Python would raise an error, or return surrogates, which files and engines reject.
    """
    import io
    import sys

    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.isatty():
        sys.stdin.reconfigure(errors="replace")
