"""Totals of engine counters by model, across unloads and restarts."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from localchat.engine.events import EngineStats

COUNTS: Final = ("cancelled", "preemptions", "evictions", "drafted", "accepted")
Counts: TypeAlias = Counter[tuple[str, str]]
"""Values of counters by name and label. The label is an error code or empty."""
_PROGRESS: Final = ("finished", "steps", "prompt_tokens", "completion_tokens")
"""Counts that reveal a restarted engine, because they start again at 0."""


class EngineTotals:
    """Thread-safe: a model is unloaded on another thread than the metrics are read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, Counts] = {}
        """Totals of the engines that have ended, by model."""
        self._latest: dict[int, tuple[str, EngineStats]] = {}
        """Model and last statistics of each running engine, by id of the engine."""

    def observe(self, model: str, engine: object, stats: EngineStats) -> None:
        """Record the statistics of a running engine."""
        with self._lock:
            earlier = self._latest.get(id(engine))
            if earlier is not None and _restarted(earlier[1], stats):
                self._add(*earlier)
            self._latest[id(engine)] = (model, stats)

    def end(self, model: str, engine: object, stats: EngineStats | None) -> None:
        """Record that an engine is unloaded. `stats`: its last statistics, if it could report them."""
        if stats is not None:
            self.observe(model, engine, stats)
        with self._lock:
            latest = self._latest.pop(id(engine), None)
            if latest is not None:
                self._add(*latest)

    def totals(self) -> Mapping[str, Counts]:
        """Return the counts of every model since the server started."""
        with self._lock:
            totals = {model: counts.copy() for model, counts in self._ended.items()}
            for model, stats in self._latest.values():
                totals.setdefault(model, Counter()).update(_counts(stats))
            return totals

    def _add(self, model: str, stats: EngineStats) -> None:
        self._ended.setdefault(model, Counter()).update(_counts(stats))


def failures(counts: Counts) -> Iterable[tuple[str, int]]:
    """Return the error codes of failed requests, each with their number."""
    return [(code, count) for (name, code), count in counts.items() if name == "failed"]


def _counts(stats: EngineStats) -> dict[tuple[str, str], int]:
    return {
        **{(name, ""): getattr(stats, name) for name in COUNTS},
        **{("failed", code): count for code, count in stats.failed.items()},
    }


def _restarted(earlier: EngineStats, later: EngineStats) -> bool:
    return any(getattr(later, name) < getattr(earlier, name) for name in (*_PROGRESS, *COUNTS))
