"""Paired measuring on a machine that others use too.

A *round* runs every variant once at both lengths, one after the other, in an order that turns with each
round; figures are medians over rounds of what each round says by itself. How much processor time others took
is measured beside each round, and rounds beside busy neighbours are left out where enough others remain.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

QUIET = 0.05
"""Of one core: what others may take of a round that counts as quiet."""


class Variant(NamedTuple):
    """Something to time. generate(tokens) makes so many tokens in each of `streams` streams."""

    name: str
    generate: Callable[[int], None]
    streams: int = 1


class Round(NamedTuple):
    """Tokens a second by variant; cores that others used meanwhile."""

    rates: dict[str, float]
    others: float
    steady: bool


class Rounds(NamedTuple):
    """Rounds that count, and how many there were."""

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
        """Cores that others used, the median."""
        return statistics.median(one.others for one in self.counted)


class Lengths(NamedTuple):
    """A rate is the difference of two lengths over the difference of their times: what a request costs
    once falls out."""

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
    most_rounds: int,
    steady: Callable[[], bool] = lambda: True,
) -> Rounds:
    """Rounds until `rounds` of them were quiet, `most_rounds` at most; then the quietest `rounds`.

    `steady`: asked after each round whether all variants still ran as they were set up.
    """
    neighbours = Neighbours()
    found: list[Round] = []
    while len(found) < most_rounds and sum(map(_quiet, found)) < rounds:
        turn = len(found) % len(variants)
        neighbours.start()
        times = {variant.name: 0.0 for variant in variants}
        for tokens, sign in ((lengths.short, -1), (lengths.long, 1)):
            for variant in (*variants[turn:], *variants[:turn]):
                began_s = time.perf_counter()
                variant.generate(tokens)
                times[variant.name] += sign * (time.perf_counter() - began_s)
        more = lengths.long - lengths.short
        rates = {one.name: one.streams * more / times[one.name] for one in variants}
        found.append(Round(rates, neighbours.cores(), steady()))
    ordered = sorted(found, key=lambda one: (not one.steady, one.others))
    quiet = sum(map(_quiet, found))
    return Rounds(ordered[:rounds], quiet, len(found))


def _quiet(one: Round) -> bool:
    return one.steady and one.others <= QUIET


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
