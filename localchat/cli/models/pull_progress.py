"""Views of a pull: a progress bar with sentences, or lines of JSON."""

from typing import Protocol, assert_never

import msgspec

from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import ProgressDisplay
from localchat.errors import LocalchatError
from localchat.models.hub.events import (
    Checking,
    FitAssessed,
    Note,
    Progress,
    PullEvent,
    PullFinished,
    PullStarted,
)
from localchat.units import duration, rate, size, sizes


class PullView(Protocol):
    """Shows the events of one pull. It is a context manager around the pull."""

    def show(self, event: PullEvent) -> None: ...

    def failed(self, problem: LocalchatError) -> None:
        """Report that the pull failed. The command itself prints the error to stderr."""
        ...

    def stopped(self, name: str) -> None:
        """Report that the user pressed Ctrl+C."""
        ...

    def __enter__(self) -> "PullView": ...

    def __exit__(self, *_: object) -> None: ...


def view_for(terminal: Terminal, *, as_json: bool) -> PullView:
    """Return the view that suits the streams."""
    if as_json:
        return JsonView(terminal)
    return ProgressView(terminal)


class JsonView:
    """Prints one event per line to stdout, including failures. Raises LocalchatError if stdout fails."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __enter__(self) -> "JsonView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: PullEvent) -> None:
        self._print(event)

    def failed(self, problem: LocalchatError) -> None:
        line = {
            "event": "error",
            "code": problem.code,
            "message": problem.message,
            "hint": problem.hint,
        }
        self._print(line)

    def stopped(self, name: str) -> None:
        """Print nothing, because the exit code suffices."""

    def _print(self, line: object) -> None:
        self._terminal.answer(msgspec.json.encode(line).decode())
        self._terminal.end_answer()


class ProgressView(ProgressDisplay):
    """Draws one bar for all files on stderr. Sentences appear above it."""

    def show(self, event: PullEvent) -> None:
        match event:
            case Progress():
                self.status(_line(event), event.done_bytes, event.total_bytes)
            case PullFinished():
                self.close()
                self.say(_sentence(event))
            case PullStarted() | FitAssessed() | Checking() | Note():
                self.say(_sentence(event))
            case _:
                assert_never(event)

    def failed(self, problem: LocalchatError) -> None:
        """Remove the bar. The command prints the error."""
        self.close()

    def stopped(self, name: str) -> None:
        self.close()
        self.say(f"stopped; localchat pull {name} resumes the download")


def _line(event: Progress) -> str:
    words = [sizes(event.done_bytes, event.total_bytes)]
    if event.bytes_per_s is not None:
        words.append(f"{size(event.bytes_per_s)}/s")
    if event.left_s is not None and event.done_bytes < event.total_bytes:
        words.append(f"{duration(event.left_s)} left")
    return " · ".join(words)


def _sentence(event: PullStarted | FitAssessed | Checking | Note | PullFinished) -> str:
    match event:
        case FitAssessed():
            return _verdict(event)
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


def _verdict(event: FitAssessed) -> str:
    """Return one line if the model fits, and otherwise also what would help."""
    if event.missing:
        return "\n  ".join((f"{event.name} will not run here: {event.missing}", *event.advice))
    memory = f"{size(event.total_bytes)} of {size(event.free_bytes)} free"
    if not event.fits:
        context = f"with {event.context_tokens:,} tokens of context"
        return "\n  ".join((f"{event.name} will not fit: {memory}, {context}", *event.advice))
    summary = f"{memory}, {event.context_tokens:,} tokens of context"
    if event.expected_range is not None:
        low, high = event.expected_range
        summary += f", between {rate(low)} and {rate(high)}"
    elif event.expected_tokens_per_s is not None:
        summary += f", about {rate(event.expected_tokens_per_s)}"
    return f"{event.name} will fit: {summary}. {event.why}"
