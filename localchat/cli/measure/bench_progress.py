"""Progress of a benchmark: a bar on a terminal, occasional lines elsewhere."""

import time

from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import TerminalBar
from localchat.measure.sweep import (
    PointAdvanced,
    PointMeasured,
    PointPlace,
    PointRefused,
    PointStarted,
    ServerStarted,
    SweepEvent,
)
from localchat.units import counted, duration, rate


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
                self._status(
                    f"{_words(place)}: {counted(requests, 'answer')}, {rate(tokens_per_s)}{trouble}"
                )
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
        self._bar = TerminalBar(terminal)
        self._at = self._total = 0

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _begin(self, place: PointPlace, round_: int, at: int, total: int) -> None:
        self._at = at
        self._total = total
        self._status(_words(place))

    def _status(self, words: str) -> None:
        self._bar.update(words + self._left(), completed=self._at, total=self._total or None)

    def _say(self, words: str) -> None:
        self._bar.say(words)

    def _left(self) -> str:
        if not self._at:
            return ""
        spent_s = time.monotonic() - self._began_s
        return f" · at most {duration(spent_s / self._at * (self._total - self._at))} left"


def progress_for(terminal: Terminal) -> SweepProgress:
    """The progress that fits stderr."""
    if terminal.animated:
        return SweepBar(terminal)
    return SweepProgress(terminal)


def _words(place: PointPlace) -> str:
    clients = f"{place.clients} client{'' if place.clients == 1 else 's'}"
    context = f" after {place.context_tokens:,}" if place.context_tokens else ""
    return f"{place.variant} · {place.shape}{context} · {clients}"
