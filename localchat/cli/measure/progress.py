"""Progress of measurements: a bar with the time left on a terminal, occasional lines elsewhere."""

import time
from typing import TYPE_CHECKING

from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import TerminalBar
from localchat.units import counted, duration, rate

if TYPE_CHECKING:
    from localchat.measure.comparison import QualityProgress
    from localchat.measure.sweep import PointKey, SweepEvent


class MeasureProgress:
    """Progress on stderr. A context manager that lasts as long as the measurement."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar = TerminalBar(terminal) if terminal.animated else None
        self._began_s = time.monotonic()
        self._done = 0
        self._total = 0

    def __enter__(self) -> "MeasureProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is None:
            self._terminal.progress("")
        else:
            self._bar.close()

    def show_sweep(self, event: "SweepEvent") -> None:
        """Show an event of a benchmark. Called on the thread of the sweep."""
        from localchat.measure.sweep import (
            PointAdvanced,
            PointMeasured,
            PointRefused,
            PointStarted,
            ServerStarted,
        )

        match event:
            case ServerStarted(variant):
                self._status(f"{variant}: starting")
            case PointStarted(key, done, total):
                self._done = done
                self._total = total
                self._status(_describe(key))
            case PointAdvanced(key, requests, tokens_per_s, failed):
                failures = f", {failed} failed" if failed else ""
                self._status(
                    f"{_describe(key)}: {counted(requests, 'answer')}, {rate(tokens_per_s)}{failures}"
                )
            case PointMeasured(point):
                figures = point.figures
                tpot = f", {figures.tpot_ms.p50:.1f} ms per token" if figures.tpot_ms else ""
                self._print(
                    f"{_describe(point.key)}: {rate(figures.tokens_per_s)}, TTFT "
                    f"{figures.ttft_ms.p50:.0f} ms{tpot}"
                )
            case PointRefused(key, reason):
                self._print(f"{_describe(key)}: skipped: {reason}")

    def show_quality(self, progress: "QualityProgress") -> None:
        """Show a step of a quality comparison."""
        self._done = progress.done
        self._total = progress.total
        self._status(f"{progress.variant}: {progress.step}")

    def _status(self, text: str) -> None:
        text += self._time_left()
        if self._bar is None:
            self._terminal.progress(text)
        else:
            self._bar.update(text, completed=self._done, total=self._total or None)

    def _print(self, sentence: str) -> None:
        if self._bar is None:
            self._terminal.notify(sentence)
        else:
            self._bar.say(sentence)

    def _time_left(self) -> str:
        if not self._done:
            return ""
        spent_s = time.monotonic() - self._began_s
        # Sweeps may end early, and tests may be skipped, so this is an upper bound.
        left_s = spent_s / self._done * (self._total - self._done)
        return f" · at most {duration(left_s)} left"


def _describe(key: "PointKey") -> str:
    context = f" after {key.context_tokens:,}" if key.context_tokens else ""
    return f"{key.variant} · {key.shape}{context} · {counted(key.clients, 'client')}"
