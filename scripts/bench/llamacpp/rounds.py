"""Paired measurements on a machine that others use too.

A *round* runs every variant at both lengths, one after the other, in an order that changes with each
round; results are medians over rounds. The processor time of other programs is measured during each
run: a disturbed run is repeated a few times at once, and rounds with such runs are left out if enough
others remain.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import psutil

QUIET = 0.05
"""Of one core: what others may take of a run that counts as quiet."""
_TRIES = 3


class Variant(NamedTuple):
    """Something to time. generate(tokens) makes so many tokens in each of `streams` streams."""

    name: str
    generate: Callable[[int], None]
    streams: int = 1


class Run(NamedTuple):
    """One timed run. others: cores that other programs used meanwhile. steady: it kept its threads."""

    others: float
    seconds: float
    steady: bool

    @property
    def quiet(self) -> bool:
        return self.steady and self.others <= QUIET

    @property
    def trouble(self) -> tuple[bool, float]:
        """Sort key; less is better."""
        return not self.steady, self.others


class Round(NamedTuple):
    """Tokens a second by variant, and the most disturbed run."""

    rates: dict[str, float]
    worst: Run


class Rounds(NamedTuple):
    """The rounds that count, and how many there were."""

    counted: list[Round]
    quiet: int
    made: int

    def rate(self, name: str) -> float:
        """Tokens a second, the median."""
        return statistics.median(one.rates[name] for one in self.counted)

    def ratio(self, name: str, other: str) -> float:
        """Of rates measured in the same round, the median."""
        return statistics.median(one.rates[name] / one.rates[other] for one in self.counted)

    def spread(self, name: str, other: str) -> tuple[float, float]:
        """The lowest and the highest of those ratios."""
        ratios = [one.rates[name] / one.rates[other] for one in self.counted]
        return min(ratios), max(ratios)

    def others(self) -> float:
        """Cores that others used in the worst run of a round, the median."""
        return statistics.median(one.worst.others for one in self.counted)


class Lengths(NamedTuple):
    """Two lengths: the rate is their difference over the difference of their times, which cancels the
    fixed cost of a request.
    """

    short: int
    long: int


class Neighbours:
    """How many cores other programs use, from one `start` to the next."""

    def start(self) -> None:
        self._began_s = time.perf_counter()
        self._busy_s, self._ours_s = _busy_s(), _ours_s()

    def cores(self) -> float:
        elapsed_s = time.perf_counter() - self._began_s
        others_s = (_busy_s() - self._busy_s) - (_ours_s() - self._ours_s)
        return max(0.0, others_s / elapsed_s)


def measure(
    variants: Sequence[Variant],
    lengths: Lengths,
    *,
    rounds: int,
    patience_s: float,
    steady: Callable[[], bool] = lambda: True,
) -> Rounds:
    """Measure until `rounds` rounds were quiet, or `patience_s` are over; the least disturbed `rounds`
    count.

    `steady`: called after each run, whether its threads computed as they were set up.
    """
    began_s = time.perf_counter()
    found: list[Round] = []
    while sum(one.worst.quiet for one in found) < rounds:
        if found and time.perf_counter() - began_s > patience_s:
            break
        turn = len(found) % len(variants)
        found.append(_round((*variants[turn:], *variants[:turn]), lengths, steady))
    ordered = sorted(found, key=lambda one: one.worst.trouble)
    return Rounds(ordered[:rounds], sum(one.worst.quiet for one in found), len(found))


def _round(variants: Sequence[Variant], lengths: Lengths, steady: Callable[[], bool]) -> Round:
    runs = {
        (variant.name, tokens): _run(partial(variant.generate, tokens), steady)
        for tokens in lengths
        for variant in variants
    }
    more = lengths.long - lengths.short
    rates = {}
    for name, _, streams in variants:
        seconds = runs[name, lengths.long].seconds - runs[name, lengths.short].seconds
        rates[name] = streams * more / seconds
    return Round(rates, max(runs.values(), key=lambda run: run.trouble))


def _run(task: Callable[[], None], steady: Callable[[], bool]) -> Run:
    """The first quiet run of a few, else the quietest."""
    runs: list[Run] = []
    while len(runs) < _TRIES and not (runs and runs[-1].quiet):
        neighbours = Neighbours()
        neighbours.start()
        began_s = time.perf_counter()
        task()
        elapsed_s = time.perf_counter() - began_s
        runs.append(Run(neighbours.cores(), elapsed_s, steady()))
    return min(runs, key=lambda run: run.trouble)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(
        sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    )


def _ours_s() -> float:
    """Processor time of this process and its children, ended ones too."""
    me = psutil.Process()
    own = me.cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in me.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return float(total)
