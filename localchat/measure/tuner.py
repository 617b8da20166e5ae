"""Finds the fastest settings of a model on this machine by measuring: one setting after the other.

Each value is tried beside the best so far in interleaved rounds and taken only if it is faster by more than
the noise. At the end everything that was taken is measured once more beside the settings as they were, and
kept only if it is faster; so a tuned model is never slower than before, as far as can be measured.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from localchat.config.settings import Settings
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.memory_plan import MemoryPlan
from localchat.measure.statistics import Difference, difference
from localchat.measure.sweep import (
    BenchVariant,
    OpenServer,
    Point,
    PointPlace,
    Sweep,
    SweepEvent,
    SweepSpec,
    rates,
)
from localchat.measure.variants import flag_word
from localchat.measure.workload import Shape

TUNE_SHAPES: Final = (
    Shape("answer", 100, 60),
    Shape("reading", 600, 8),
    Shape("edit", 160, 120, "edit"),
)
"""Short forms of decoding, of prefill, and of an answer that repeats its prompt, which drafts help."""
_LEAST_GAIN: Final = 0.02
"""A smaller gain is not worth a setting."""
_LOSSLESS_KV: Final = ("f16", "q8_0")
"""KV types that change answers hardly; smaller ones are a question of quality, not of speed alone."""
_MOST_THREADS: Final = 64

Watch = Callable[[str], AbstractContextManager[Callable[[SweepEvent], None]]]
"""Shows the events of one comparison; the string says what is compared."""


class Knob(NamedTuple):
    """A setting and the values that are worth a trial, the present one left out."""

    key: str
    values: tuple[str, ...]


class Trial(msgspec.Struct, frozen=True):
    """One value that was tried."""

    key: str
    value: str
    against: str
    """The value that it was compared with."""
    gain: Difference | None
    """Of speed; None: it could not be measured."""
    taken: bool
    problem: str = ""
    """Why it could not be measured."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one model."""

    model: str
    trials: tuple[Trial, ...]
    settings: dict[str, str]
    """What is faster, by key; empty: the settings are the fastest that was found."""
    gain: Difference | None = None
    """Of all of them together; None: there are none."""


def knobs(
    settings: Settings, pinned: Mapping[str, object], plan: MemoryPlan, machine: Machine
) -> list[Knob]:
    """The settings to tune for a model with this plan, those of most effect first. pinned: by key, settings
    that the user gave, which stay."""
    logical = os.cpu_count() or machine.cores
    threads = {1 << power for power in range(7)} | {machine.cores, machine.cores - 1, logical}
    threads = {count for count in threads if 1 <= count <= min(logical, _MOST_THREADS)}
    kv_types = [one for one in plan.kv_types or _LOSSLESS_KV if one in _LOSSLESS_KV]
    on_cpu = plan.gpu_layers < plan.layers or not plan.layers
    found = [
        Knob("gpu_layers", _gpu_layers(plan, machine)),
        Knob(
            "threads",
            tuple(str(one) for one in sorted(threads - {settings.threads or machine.cores}))
            if on_cpu
            else (),
        ),
        Knob("kv_cache_type", tuple(one for one in kv_types if one != plan.kv_type)),
        Knob("speculation", ("false" if settings.speculation else "true",)),
    ]
    return [knob for knob in found if knob.values and knob.key not in pinned]


def _gpu_layers(plan: MemoryPlan, machine: Machine) -> tuple[str, ...]:
    """Fewer layers on a GPU than fit: none, and half. Where all fit, none is surely slower."""
    if not machine.gpus or not 0 < plan.gpu_layers < plan.layers:
        return ()
    return tuple(dict.fromkeys((str(plan.gpu_layers // 2), "0")))


@dataclass(slots=True)
class Tuner:
    """Tries the values of every knob."""

    model: str
    """The word for it."""
    knobs: Sequence[Knob]
    present: Mapping[str, str]
    """The values now, by key, as they are shown."""
    open_server: OpenServer
    watch: Watch
    clients: int = 1
    rounds: int = 3
    shapes: tuple[Shape, ...] = TUNE_SHAPES
    trials: list[Trial] = field(default_factory=list)
    _taken: dict[str, str] = field(default_factory=dict)

    def run(self) -> Tuning:
        """Measure. Raises LocalchatError where the model cannot be measured as it is."""
        for knob in self.knobs:
            self._try(knob)
        gain: Difference | None = None
        if self._taken:
            gain = self._compare("all of it", [{}, self._taken])[1]
            if not _is_faster(gain):
                self._taken.clear()
                gain = None
        return Tuning(
            model=self.model, trials=tuple(self.trials), settings=dict(self._taken), gain=gain
        )

    def _try(self, knob: Knob) -> None:
        """Compare the values of one knob with the present one, and take the fastest."""
        found = self._gains(knob)
        gains = {value: gain for value, gain in found.items() if isinstance(gain, Difference)}
        faster = {value: gain.share for value, gain in gains.items() if _is_faster(gain)}
        best = max(faster, key=lambda value: faster[value], default=None)
        for value, gain in found.items():
            problem = gain.message if isinstance(gain, LocalchatError) else ""
            against = self.present.get(knob.key, "")
            self.trials.append(
                Trial(knob.key, value, against, gains.get(value), value == best, problem)
            )
        if best is not None:
            self._taken[knob.key] = best

    def _gains(self, knob: Knob) -> dict[str, Difference | LocalchatError]:
        """What each value brings, or why it cannot be measured."""
        tried = [{**self._taken, knob.key: value} for value in knob.values]
        try:
            found = self._compare(flag_word(knob.key), [self._taken, *tried])[1:]
            return dict(zip(knob.values, found, strict=True))
        except LocalchatError as problem:
            if len(knob.values) == 1:
                return {knob.values[0]: problem}
        # One of them cannot be loaded: it must not hide the others.
        return {
            value: gain
            for value in knob.values
            for gain in self._gains(Knob(knob.key, (value,))).values()
        }

    def _compare(self, what: str, settings: Sequence[Mapping[str, str]]) -> list[Difference]:
        """The gain of each of these settings over the first, which are measured in turns.

        Raises LocalchatError where one cannot be loaded, or answers nothing."""
        variants = tuple(
            BenchVariant(_name(values, at), self.model, dict(values))
            for at, values in enumerate(settings)
        )
        spec = SweepSpec(
            variants=variants,
            shapes=self.shapes,
            clients=(self.clients,),
            rounds=self.rounds,
            requests=1,
        )
        with self.watch(what) as show:
            sweep = Sweep(spec, self.open_server, show)
            sweep.run()
        found = [scores(sweep.points, one, self.shapes, self.clients) for one in variants]
        if not all(found):
            raise LocalchatError("no prompt of the trial fits into its context")
        return [difference(one, found[0]) for one in found]


def scores(
    points: Sequence[Point], variant: BenchVariant, shapes: Sequence[Shape], clients: int
) -> list[float]:
    """Speed in each round: the geometric mean over the shapes, so that each counts alike."""
    by_shape = [rates(points, PointPlace(variant.name, shape.name, 0, clients)) for shape in shapes]
    measured = [values for values in by_shape if values]
    return [
        math.exp(math.fsum(map(math.log, each)) / len(each)) for each in zip(*measured, strict=True)
    ]


def _is_faster(gain: Difference) -> bool:
    return gain.beyond_noise and gain.share >= _LEAST_GAIN


def _name(values: Mapping[str, str], at: int) -> str:
    words = " ".join(f"{flag_word(key)}={value}" for key, value in values.items())
    return words or ("as it is" if at == 0 else "nothing")
