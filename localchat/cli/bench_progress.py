"""Progress of a benchmark: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING

from localchat.bench.sweep import (
    PointAdvanced,
    PointMeasured,
    PointPlace,
    PointRefused,
    PointStarted,
    ServerStarted,
    SweepEvent,
)
from localchat.cli.streams import Terminal
from localchat.sanitize import sanitize_line
from localchat.units import duration, rate

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class SweepProgress:
    """Sentences on stderr: one for each point. A context manager that lasts as long as the sweep."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._began_s = time.monotonic()

    def __enter__(self) -> "SweepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.progress("")

    def show(self, event: SweepEvent) -> None:
        """Show an event; called by the thread of the sweep."""
        match event:
            case ServerStarted(variant):
                self._status(f"{variant}: starting")
            case PointStarted(place, round_, at, total):
                self._begin(place, round_, at, total)
            case PointAdvanced(place, requests, tokens_per_s, failed):
                trouble = f", {failed} failed" if failed else ""
                self._status(f"{_words(place)}: {requests} answers, {rate(tokens_per_s)}{trouble}")
            case PointMeasured(point):
                found = point.figures
                tpot = f", {found.tpot_ms.p50:.1f} ms a token" if found.tpot_ms else ""
                self._say(
                    f"{_words(point.place)}: {rate(found.tokens_per_s)}, TTFT "
                    f"{found.ttft_ms.p50:.0f} ms{tpot}"
                )
            case PointRefused(place, reason):
                self._say(f"{_words(place)}: left out: {reason}")

    def _begin(self, place: PointPlace, round_: int, at: int, total: int) -> None:
        self._status(f"point {at + 1} of at most {total}: {_words(place)}")

    def _status(self, words: str) -> None:
        self._terminal.progress(words)

    def _say(self, words: str) -> None:
        self._terminal.notify(words)


class SweepBar(SweepProgress):
    """A bar over all points with the time left; a line above it for each point."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._at = self._total = 0

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _begin(self, place: PointPlace, round_: int, at: int, total: int) -> None:
        self._at, self._total = at, total
        self._status(_words(place))

    def _status(self, words: str) -> None:
        bars, task = self._drawn()
        bars.update(task, completed=self._at, total=self._total or None, text=words + self._left())

    def _say(self, words: str) -> None:
        bars, _ = self._drawn()
        bars.console.print(
            f"localchat: {sanitize_line(words)}", style="dim", markup=False, highlight=False
        )

    def _left(self) -> str:
        if not self._at:
            return ""
        spent_s = time.monotonic() - self._began_s
        return f" · at most {duration(spent_s / self._at * (self._total - self._at))} left"

    def _drawn(self) -> "tuple[Bars, TaskID]":
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            console = Console(
                file=sys.stderr, force_terminal=True, no_color=not self._terminal.colored
            )
            text = TextColumn("{task.fields[text]}", markup=False)
            self._bars = Bars(BarColumn(bar_width=20), text, console=console, transient=True)
            self._task = self._bars.add_task("", total=None, text="")
            self._bars.start()
        assert self._task is not None
        return self._bars, self._task


def progress_for(terminal: Terminal) -> SweepProgress:
    """The progress that fits stderr."""
    return SweepBar(terminal) if terminal.animated else SweepProgress(terminal)


def _words(place: PointPlace) -> str:
    clients = f"{place.clients} client{'' if place.clients == 1 else 's'}"
    context = f" after {place.context_tokens:,}" if place.context_tokens else ""
    return f"{place.variant} · {place.shape}{context} · {clients}"
