"""Run a measurement to its end, and print its result."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import click

from localchat.cli.context import app_context
from localchat.cli.output import print_json, print_lines, report_width
from localchat.cli.signals import terminate_gracefully
from localchat.cli.streams import tell
from localchat.errors import ExitCode, LocalchatError

if TYPE_CHECKING:
    from localchat.measure.records import MeasureRecord

_Record = TypeVar("_Record", bound="MeasureRecord")


class RunEnd(NamedTuple):
    """How a measurement ended."""

    problem: LocalchatError | None = None
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        """True if everything was measured."""
        return self.problem is None and not self.interrupted


class MeasuredResult(NamedTuple, Generic[_Record]):
    """Result of a command, and how it ended."""

    record: _Record | None
    """Result; None if nothing was measured."""
    end: RunEnd
    missed: Sequence[str] = ()
    """Sentences on targets that the result misses."""


def run_to_end(run: Callable[[], None]) -> RunEnd:
    """Run a measurement. Catch its error or Ctrl+C, so that the results so far are shown."""
    try:
        run()
    except LocalchatError as problem:
        return RunEnd(problem)
    except KeyboardInterrupt:
        return RunEnd(interrupted=True)
    return RunEnd()


def measure_command(
    ctx: click.Context,
    measure: Callable[[], MeasuredResult[_Record]],
    lines: Callable[[_Record, int | None], Iterable[str]],
    draw: Callable[[_Record], None] | None = None,
) -> int:
    """Measure, and print the result. Return the exit code.

    `lines` formats a result for the width of the terminal, or None. `draw` draws it into a file.
    """
    environ = app_context(ctx).environ
    # SIGTERM stops a measurement as Ctrl+C does. Its result is shown before the process ends.
    with terminate_gracefully():
        record, end, missed = measure()
        problem = end.problem
        if record is not None:
            if draw is not None:
                try:
                    draw(record)
                except LocalchatError as failure:
                    # Show the result before this error, because it would be lost.
                    problem = problem or failure
            if ctx.params["as_json"]:
                print_json(environ, record)
            else:
                print_lines(environ, lines(record, report_width(environ)))
    if problem is not None:
        raise problem
    if end.interrupted:
        return ExitCode.INTERRUPTED
    for sentence in missed:
        tell(sentence)
    if missed or record is None:
        return ExitCode.ERROR
    return ExitCode.OK
