"""Compares what `localchat tune` finds with an exhaustive grid of the same settings.

    python -m scripts.tools.check_tune MODEL... [--rounds 5] [--tune-rounds 3] [--cpu]

For each model `tune` is asked, without writing anything; then every combination of the values that it tried is
measured in interleaved rounds, by the score of `tune` itself: the geometric mean of the speeds of its shapes.
Reported are all combinations beside the choice of `tune`, each with the interval that holds the true difference
in 95 of 100 cases.

--cpu is for a machine that others use: tokens of one thread are counted by the CPU time of server and
engine instead of by the clock, which then says nothing; `tune` itself still goes by the clock.

The last line is JSON. Ends with 1 if, beyond noise, a combination is more than 3 % faster than the choice, or
the choice slower than the defaults.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import psutil

from localchat.measure.endpoint import BenchEndpoint
from localchat.measure.memory_roof import MemoryRoof
from localchat.measure.server_process import ServerCommand, server_process
from localchat.measure.statistics import Difference, difference
from localchat.measure.sweep import (
    Point,
    PointMeasured,
    PointStarted,
    Sweep,
    SweepEvent,
    SweepSpec,
)
from localchat.measure.tuner import TUNE_SHAPES, scores
from localchat.measure.variants import BenchVariant

_WANTED = 0.03
_CLIENTS = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tune-rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    found = [
        _check(model, asked.rounds, asked.tune_rounds, cpu=asked.cpu) for model in asked.models
    ]
    print(json.dumps(found))
    return 0 if all(one["ok"] for one in found) else 1


def _check(model: str, rounds: int, tune_rounds: int, *, cpu: bool) -> dict[str, Any]:
    tuned = _tuned(model, tune_rounds, ["--threads", "1"] if cpu else [])
    values: dict[str, list[str]] = {}
    for trial in tuned["trials"]:
        known = values.setdefault(trial["key"], [trial["against"]])
        known.append(trial["value"])
    grid = [
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    ]
    fixed = {"threads": "1"} if cpu else {}
    variants = tuple(BenchVariant(_name(one), model, {**fixed, **one}) for one in grid)
    measured = _measured(variants, rounds, cpu=cpu)
    defaults = {key: known[0] for key, known in values.items()}
    choice = _name({**defaults, **tuned["settings"]})
    against = {name: difference(one, measured[choice]) for name, one in measured.items()}
    best = max(against, key=lambda name: against[name].share)
    print(f"{model}: tune takes {choice} in {len(tuned['trials'])} trials; against it in the grid:")
    for name in sorted(against, key=lambda name: -against[name].share):
        mark = " (defaults)" if name == _name(defaults) else ""
        print(f"  {name:56} {_words(against[name])}{mark}", flush=True)
    beaten = _beyond(against[best], _WANTED)
    worse = _beyond(against[_name(defaults)], 0.0)
    return {
        "model": model,
        "choice": choice,
        "best": best,
        "best_over_choice": against[best].share,
        "margin": against[best].margin,
        "defaults_over_choice": against[_name(defaults)].share,
        "ok": not beaten and not worse,
    }


def _tuned(model: str, rounds: int, flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "localchat", "tune", model, "--rounds", str(rounds), "--json"]
    done = subprocess.run(
        [*command, *flags, "--quiet"], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measured(
    variants: tuple[BenchVariant, ...], rounds: int, *, cpu: bool
) -> dict[str, list[float]]:
    """The score of every variant in each round."""
    spec = SweepSpec(
        variants=variants, shapes=TUNE_SHAPES, clients=(_CLIENTS,), rounds=rounds, requests=1
    )
    watch = _Watch()
    sweep = Sweep(spec, _open, watch.show)
    sweep.run()
    points = watch.by_cpu if cpu else sweep.points
    return {one.name: scores(points, one, TUNE_SHAPES, _CLIENTS) for one in variants}


class _Watch:
    """Writes points as they are measured, and knows them by CPU time too."""

    def __init__(self) -> None:
        self.by_cpu: list[Point] = []
        self._before_s = 0.0

    def show(self, event: SweepEvent) -> None:
        """Take an event of the sweep."""
        if isinstance(event, PointStarted):
            self._before_s = _cpu_s()
        if not isinstance(event, PointMeasured):
            return
        point = event.point
        spent_s = _cpu_s() - self._before_s  # the request that warms up is in it, for all alike
        rate = point.figures.completion_tokens * point.figures.requests / spent_s
        found = msgspec.structs.replace(point.figures, tokens_per_s=rate)
        self.by_cpu.append(Point(point.key, point.round, found))
        place, clock = point.key, point.figures.tokens_per_s
        sys.stderr.write(
            f"{point.round} {place.variant} {place.shape}: {clock:.1f} tok/s, {rate:.1f} a CPU second\n"
        )


def _cpu_s() -> float:
    """CPU time of the server and its engine so far."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent = child.cpu_times()
            total += spent.user + spent.system
    return total


@contextmanager
def _open(variant: BenchVariant) -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
    command = ServerCommand(variant.model, variant.settings, variant.parallel)
    with server_process(command, os.environ) as url:
        yield BenchEndpoint(url, own=True), None


def _name(values: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _beyond(found: Difference, share: float) -> bool:
    """Whether it is surely more than this."""
    return found.share - (found.margin or 0.0) > share


def _words(found: Difference) -> str:
    return f"{found.share:+.1%} ±{found.margin or 0:.1%}"


if __name__ == "__main__":
    sys.exit(main())
