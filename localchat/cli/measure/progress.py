"""Progress of measurements: a bar with the time left on a terminal, occasional lines elsewhere."""

import time
from typing import TYPE_CHECKING

from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import ProgressDisplay
from localchat.units import counted, duration, rate

if TYPE_CHECKING:
    from localchat.measure.comparison import QualityProgress
    from localchat.measure.sweep import PointKey, SweepEvent


class MeasureProgress(ProgressDisplay):
    """Progress of a measurement on stderr, with the time left."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._began_s = time.monotonic()
        self._done = 0
        self._total = 0

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
                self._show(f"{variant}: starting")
            case PointStarted(key, done, total):
                self._done = done
                self._total = total
                self._show(_describe(key))
            case PointAdvanced(key, requests, tokens_per_s, failed):
                failures = f", {failed} failed" if failed else ""
                self._show(
                    f"{_describe(key)}: {counted(requests, 'answer')}, {rate(tokens_per_s)}{failures}"
                )
            case PointMeasured(point):
                figures = point.figures
                tpot = f", {figures.tpot_ms.p50:.1f} ms per token" if figures.tpot_ms else ""
                self.say(
                    f"{_describe(point.key)}: {rate(figures.tokens_per_s)}, TTFT "
                    f"{figures.ttft_ms.p50:.0f} ms{tpot}"
                )
            case PointRefused(key, reason):
                self.say(f"{_describe(key)}: skipped: {reason}")

    def show_quality(self, progress: "QualityProgress") -> None:
        """Show a step of a quality comparison."""
        self._done = progress.done
        self._total = progress.total
        self._show(f"{progress.variant}: {progress.step}")

    def _show(self, text: str) -> None:
        self.status(text + self._time_left(), self._done, self._total or None)

    def _time_left(self) -> str:
        if not self._done:
            return ""
        spent_s = time.monotonic() - self._began_s
        # Sweeps may end early, and tests may be skipped, so this is an upper bound.
        left_s = spent_s / self._done * (self._total - self._done)
        return f" · at most {duration(left_s)} left"


def _describe(key: "PointKey") -> str:
    return f"{key.variant} · {key.shape} · {key.load}"
