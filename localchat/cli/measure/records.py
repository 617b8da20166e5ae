"""Commands whose results are stored: run them, and list or show their results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import click

from localchat.cli.context import AppContext, app_context
from localchat.cli.output import print_json, print_lines, report_width
from localchat.cli.signals import terminate_gracefully
from localchat.cli.streams import tell
from localchat.errors import ExitCode, LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.measure.records import StoredRecord
    from localchat.measure.store import RecordStore

_Record = TypeVar("_Record", bound="StoredRecord")


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


@dataclass(frozen=True, slots=True)
class RecordView(Generic[_Record]):
    """Output of one kind of result. Functions with a width get that of the terminal, or None."""

    store: "RecordStore[_Record]"
    lines: Callable[[_Record, int | None], Iterable[str]]
    list_lines: Callable[[Sequence[_Record]], Iterable[str]]
    svg: Callable[[_Record], str] | None = None
    """Draws a result, if the command has `--svg`."""


def run_to_end(run: Callable[[], None]) -> RunEnd:
    """Run a measurement. Catch its error or Ctrl+C, so that the results so far are stored."""
    try:
        run()
    except LocalchatError as problem:
        return RunEnd(problem)
    except KeyboardInterrupt:
        return RunEnd(interrupted=True)
    return RunEnd()


def record_command(
    ctx: click.Context, view: RecordView[_Record], measure: Callable[[], MeasuredResult[_Record]]
) -> int:
    """Run a command with the flags of `record_options`. Return the exit code."""
    app = app_context(ctx)
    options = ctx.params
    show = options["show"]
    actions = (options["as_list"], show is not None, bool(options["words"]))
    if sum(actions) > 1:
        raise UsageError("--list, --show and a model exclude each other")
    if options["as_list"]:
        records = list(view.store)
        lines = view.list_lines(records) if records else [f"No {view.store.noun} is stored yet."]
        _print(app, records, lines, as_json=options["as_json"])
    elif show is not None:
        _present(app, view, view.store.find(show), options)
    else:
        # SIGTERM stops a measurement as Ctrl+C does. Its result is stored before the process ends.
        with terminate_gracefully():
            return _measure(app, view, measure, options)
    return ExitCode.OK


def _measure(
    app: AppContext,
    view: RecordView[_Record],
    measure: Callable[[], MeasuredResult[_Record]],
    options: dict[str, Any],
) -> int:
    svg: Path | None = options.get("svg")
    if svg is not None and not svg.absolute().parent.is_dir():
        raise UsageError(f"--svg: there is no folder {svg.absolute().parent}")
    record, end, missed = measure()
    problem = end.problem
    if record is not None:
        if options["keep"]:
            try:
                record = view.store.add(record)
            except LocalchatError as failure:
                # Show the result before this error, because it would be lost.
                problem = problem or failure
        _present(app, view, record, options)
    if problem is not None:
        raise problem
    if end.interrupted:
        return ExitCode.INTERRUPTED
    for sentence in missed:
        tell(sentence)
    if missed or record is None:
        return ExitCode.ERROR
    return ExitCode.OK


def _present(
    app: AppContext, view: RecordView[_Record], record: _Record, options: dict[str, Any]
) -> None:
    """Print a result, and draw it into the file of `--svg`."""
    if view.svg is not None and options["svg"] is not None:
        _write(options["svg"], view.svg(record))
    lines = view.lines(record, report_width(app.environ))
    _print(app, record, lines, as_json=options["as_json"])


def _write(path: Path, text: str) -> None:
    from localchat.atomic import write_text
    from localchat.errors import reason

    try:
        write_text(path, text)
    except OSError as problem:
        raise LocalchatError(f"{path} cannot be written: {reason(problem)}") from problem


def _print(app: AppContext, value: object, lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        print_json(app.environ, value)
    else:
        print_lines(app.environ, lines)


def stored_as(record: "StoredRecord", *, complete: bool) -> str:
    """Return `Stored as number 3, interrupted`, the start of a report's last sentence."""
    number = f"Stored as number {record.id}" if record.id else "Not stored"
    if complete:
        return number
    return f"{number}, interrupted"


def short_date(record: "StoredRecord") -> str:
    """Return the start time for a list, `2026-11-23 10:00`."""
    return record.at[:16].replace("T", " ")
