"""Views of a pull: a progress bar with sentences, or lines of JSON."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias, assert_never

from localchat.cli.output import json_line
from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import ProgressDisplay
from localchat.errors import LocalchatError
from localchat.models.hub.events import (
    Checking,
    Note,
    Progress,
    PullEvent,
    PullFinished,
    PullStarted,
)
from localchat.units import duration, size, sizes

if TYPE_CHECKING:
    from localchat.models.assess import FitReport


class JsonView:
    """Prints one event per line to stdout, including failures. Raises LocalchatError if stdout fails."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __enter__(self) -> "JsonView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: PullEvent | Mapping[str, object]) -> None:
        """Print an event."""
        self._terminal.answer(json_line(event))
        self._terminal.end_answer()

    def show_verdict(self, report: "FitReport") -> None:
        """Print whether the model will run here, with the fields of `fit --json`."""
        self.show({"event": "verdict", "name": report.name, **report.record()})

    def failed(self, problem: LocalchatError) -> None:
        """Print the error, which the command itself also prints to stderr."""
        line = {
            "event": "error",
            "code": problem.code,
            "message": problem.message,
            "hint": problem.hint,
        }
        self.show(line)

    def stopped(self, name: str) -> None:
        """Print nothing, because the exit code suffices."""


class ProgressView(ProgressDisplay):
    """Draws one bar for all files on stderr. Sentences appear above it."""

    def show(self, event: PullEvent) -> None:
        """Draw the progress, or print the sentence of another event."""
        match event:
            case Progress():
                self.status(_line(event), event.done_bytes, event.total_bytes)
            case PullFinished():
                self.close()
                self.say(_sentence(event))
            case PullStarted() | Checking() | Note():
                self.say(_sentence(event))
            case _:
                assert_never(event)

    def failed(self, problem: LocalchatError) -> None:
        """Remove the bar. The command prints the error."""
        self.close()

    def show_verdict(self, report: "FitReport") -> None:
        """Print whether the model will run here."""
        self.say(_verdict(report))

    def stopped(self, name: str) -> None:
        """Print how to resume a pull after Ctrl+C."""
        self.close()
        self.say(f"stopped; localchat pull {name} resumes the download")


PullView: TypeAlias = JsonView | ProgressView


def _line(event: Progress) -> str:
    words = [sizes(event.done_bytes, event.total_bytes)]
    if event.bytes_per_s is not None:
        words.append(f"{size(event.bytes_per_s)}/s")
    if event.left_s is not None and event.done_bytes < event.total_bytes:
        words.append(f"{duration(event.left_s)} left")
    return " · ".join(words)


def _sentence(event: PullStarted | Checking | Note | PullFinished) -> str:
    match event:
        case PullStarted():
            details = [size(event.total_bytes)]
            if len(event.files) > 1:
                details.insert(0, f"{len(event.files)} files")
            if event.done_bytes:
                details.append(f"{size(event.done_bytes)} already downloaded")
            return f"{event.name} from {event.repository}: {', '.join(details)}"
        case Checking():
            return f"verifying the {size(event.total_bytes)} of {event.file} that are already here"
        case Note():
            return event.text
        case PullFinished():
            return _finish_sentence(event)


def _finish_sentence(event: PullFinished) -> str:
    if event.trouble:
        return f"{event.name} is downloaded"
    command = f"localchat run {event.name}"
    if not event.fetched_bytes:
        return f"{event.name} is already here: {command}"
    if event.hashed:
        return f"{event.name} is downloaded and verified: {command}"
    return f"{event.name} is downloaded (the hub has no hash to verify it): {command}"


def _verdict(report: "FitReport") -> str:
    """Return one line if the model fits, and otherwise also what would help."""
    plan = report.plan
    if plan.missing:
        return "\n  ".join((f"{report.name} will not run here: {plan.missing}", *plan.advice))
    memory = f"{size(plan.total_bytes)} of {size(plan.free_bytes)} free"
    if not plan.fits:
        context = f"with {plan.context_tokens:,} tokens of context"
        first = f"{report.name} will not fit: {memory}, {context}"
        more = f"localchat fit {report.name} lists what makes room"
        return "\n  ".join((first, *plan.advice, more))
    summary = f"{memory}, {plan.context_tokens:,} tokens of context"
    if report.expected_speed is not None:
        summary += f", {report.expected_speed.words}"
    return f"{report.name} will fit: {summary}. {report.why}"
