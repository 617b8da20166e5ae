"""How a pull is shown: a bar on a terminal, a line now and then elsewhere, or lines of JSON."""

import sys
from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec

from localchat.cli.streams import Terminal
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
from localchat.sanitize import sanitize_line
from localchat.units import duration, rate, size, sizes

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class View(Protocol):
    """Shows the events of one pull; entered before the first and left at the end."""

    def show(self, event: PullEvent) -> None: ...

    def failed(self, problem: LocalchatError) -> None:
        """The pull ends with this; the command says it on stderr as every error."""
        ...

    def stopped(self, name: str) -> None:
        """Somebody pressed Ctrl+C."""
        ...

    def __enter__(self) -> "View": ...

    def __exit__(self, *_: object) -> None: ...


def view_for(terminal: Terminal, *, as_json: bool) -> View:
    """The view that fits the streams."""
    if as_json:
        return JsonView(terminal)
    return BarView(terminal) if terminal.animated else LineView(terminal)


class JsonView:
    """One event in a line on stdout, a failure too. Raises LocalchatError where stdout is full."""

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
        """Nothing: the exit code says it."""

    def _print(self, line: object) -> None:
        self._terminal.answer(msgspec.json.encode(line).decode())
        self._terminal.end_answer()


class LineView:
    """Sentences on stderr, and how far it is every ten seconds."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __enter__(self) -> "LineView":
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.progress("")

    def show(self, event: PullEvent) -> None:
        match event:
            case Progress():
                self._terminal.progress(_line(event))
            case PullFinished() | PullStarted() | FitAssessed() | Checking() | Note():
                self._terminal.notify(_sentence(event))
            case _:
                assert_never(event)

    def failed(self, problem: LocalchatError) -> None:
        """Nothing more than what every error says."""

    def stopped(self, name: str) -> None:
        self._terminal.notify(_kept(name))


class BarView:
    """One bar for all files on stderr, with rate and time left; sentences stand above it."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "BarView":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def show(self, event: PullEvent) -> None:
        match event:
            case Progress():
                self._draw(event)
            case PullFinished():
                self.__exit__()
                self._terminal.notify(_sentence(event))
            case PullStarted() | FitAssessed() | Checking() | Note():
                self._say(_sentence(event))
            case _:
                assert_never(event)

    def failed(self, problem: LocalchatError) -> None:
        self.__exit__()

    def stopped(self, name: str) -> None:
        self.__exit__()
        self._terminal.notify(_kept(name))

    def _draw(self, event: Progress) -> None:
        if self._bars is None:
            self._bars, self._task = _bar(event.total_bytes, colored=self._terminal.colored)
            self._bars.start()
        assert self._task is not None
        self._bars.update(self._task, completed=event.done_bytes, words=_line(event))

    def _say(self, sentence: str) -> None:
        if self._bars is None:
            self._terminal.notify(sentence)
        else:
            self._bars.console.print(
                f"localchat: {sanitize_line(sentence)}", style="dim", markup=False, highlight=False
            )


def _bar(total_bytes: int, *, colored: bool) -> "tuple[Bars, TaskID]":
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    console = Console(file=sys.stderr, force_terminal=True, no_color=not colored)
    words = TextColumn("{task.fields[words]}", markup=False)
    bars = Bars(BarColumn(bar_width=None), words, console=console, expand=True)
    return bars, bars.add_task("", total=total_bytes, words="")


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
            files = f"{len(event.files)} files, " if len(event.files) > 1 else ""
            here = f", {size(event.done_bytes)} of it here already" if event.done_bytes else ""
            return f"{event.name} from {event.repository}: {files}{size(event.total_bytes)}{here}"
        case Checking():
            return f"reading again the {size(event.total_bytes)} of {event.file} that are here"
        case Note():
            return event.text
        case PullFinished():
            how = "is here, its hash is right" if event.fetched_bytes else "is here already"
            return f"{event.name} {how}: localchat run {event.name}"


def _verdict(event: FitAssessed) -> str:
    """A line where it fits; where it does not, also what would help."""
    if event.missing:
        return "\n  ".join((f"{event.name} will not run here: {event.missing}", *event.advice))
    memory = f"{size(event.total_bytes)} of {size(event.free_bytes)} free"
    if not event.fits:
        context = f"with {event.context_tokens:,} tokens of context"
        return "\n  ".join((f"{event.name} will not fit: {memory}, {context}", *event.advice))
    pace = event.expected_tokens_per_s
    speed = f", about {rate(pace)}" if pace is not None else ""
    context = f"{event.context_tokens:,} tokens of context"
    return f"{event.name} will fit: {memory}, {context}{speed}. {event.why}"


def _kept(name: str) -> str:
    return f"stopped; what came is kept, and localchat pull {name} goes on there"
