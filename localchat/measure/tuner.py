"""Search for the fastest settings of a model, one setting after the other.

Each value is measured beside the best so far in interleaved rounds, and taken only if it is faster by more than
the noise. At the end all changes together are measured once more beside the original settings, and taken only
if they are faster. So a tuned model is never slower than before, as far as can be measured.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from localchat.config.settings import Given, Settings, convert
from localchat.config.settings_file import read_settings, write_setting
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.memory_plan import MemoryPlan
from localchat.measure.statistics import Difference, difference
from localchat.measure.sweep import (
    OpenServer,
    Point,
    PointKey,
    Sweep,
    SweepEvent,
    SweepSpec,
    rates,
)
from localchat.measure.variants import BenchVariant, flag_name, setting_text
from localchat.measure.workload import Shape
from localchat.state_file import StateFile

TUNE_SHAPES: Final = (
    Shape("answer", 100, 60),
    Shape("reading", 600, 8),
    Shape("edit", 160, 120, "edit"),
)
"""Short tests of decoding, prefill, and an answer that repeats its prompt, where drafts help."""
_MIN_GAIN: Final = 0.02
"""Gain below which a setting is not worth changing."""
_LOSSLESS_KV: Final = ("f16", "q8_0")
"""KV types that hardly change answers. Smaller types trade quality for speed."""
_MAX_THREADS: Final = 64
_FILE: Final = "tuned.json"
_LOCK_S: Final = 10.0

Watch = Callable[[str], AbstractContextManager[Callable[[SweepEvent], None]]]
"""Shows the events of one comparison, whose subject is the argument."""


class Knob(NamedTuple):
    """A setting with the values worth a trial, other than the present one."""

    key: str
    values: tuple[str, ...]


class Trial(msgspec.Struct, frozen=True):
    """Outcome of one value."""

    key: str
    value: str
    against: str
    """Present value, which it was compared with."""
    gain: Difference | None
    """Gain in speed; None if the value could not be measured."""
    taken: bool
    problem: str = ""
    """Reason why it could not be measured."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one model."""

    model: str
    trials: tuple[Trial, ...]
    settings: dict[str, str]
    """Faster values by key; empty if the present settings are the fastest."""
    gain: Difference | None = None
    """Gain of all of them together; None without changes."""


def knobs(
    settings: Settings, pinned: Mapping[str, object], plan: MemoryPlan, machine: Machine
) -> list[Knob]:
    """Return the settings to tune, those with the largest effect first.

    `pinned` holds the keys of settings that the user gave, which stay.
    """
    kv_types = [kv_type for kv_type in plan.kv_types or _LOSSLESS_KV if kv_type in _LOSSLESS_KV]
    candidates = [
        Knob("gpu_layers", _gpu_layers(plan, machine)),
        Knob("threads", _thread_counts(settings.threads or machine.cores, plan, machine)),
        Knob("kv_cache_type", tuple(kv_type for kv_type in kv_types if kv_type != plan.kv_type)),
        Knob("speculation", ("false" if settings.speculation else "true",)),
    ]
    return [knob for knob in candidates if knob.values and knob.key not in pinned]


def _gpu_layers(plan: MemoryPlan, machine: Machine) -> tuple[str, ...]:
    """Return smaller numbers of GPU layers to try: half, and none."""
    # If all layers fit, fewer are surely slower.
    if not machine.gpus or not 0 < plan.gpu_layers < plan.layers:
        return ()
    return tuple(dict.fromkeys((str(plan.gpu_layers // 2), "0")))


def _thread_counts(present: int, plan: MemoryPlan, machine: Machine) -> tuple[str, ...]:
    """Return numbers of threads to try, if layers run on the CPU."""
    if plan.layers and plan.gpu_layers >= plan.layers:
        return ()
    logical = os.cpu_count() or machine.cores
    counts = {1 << power for power in range(7)} | {machine.cores, machine.cores - 1, logical}
    counts.discard(present)
    limit = min(logical, _MAX_THREADS)
    return tuple(str(count) for count in sorted(counts) if 1 <= count <= limit)


@dataclass(slots=True)
class Tuner:
    """Tries the values of every knob."""

    model: str
    """Name or path of the model."""
    knobs: Sequence[Knob]
    present: Mapping[str, str]
    """Present values by key, as results show them."""
    open_server: OpenServer
    watch: Watch
    clients: int = 1
    rounds: int = 3
    shapes: tuple[Shape, ...] = TUNE_SHAPES
    trials: list[Trial] = field(default_factory=list)
    _best: dict[str, str] = field(default_factory=dict)
    """Faster values by key, so far."""

    def run(self) -> Tuning:
        """Measure all knobs. Raises LocalchatError if the present settings cannot be measured."""
        for knob in self.knobs:
            self._try(knob)
        gain: Difference | None = None
        if self._best:
            gain = self._compare("all of it", [{}, self._best])[1]
            if not _is_faster(gain):
                self._best.clear()
                gain = None
        return Tuning(
            model=self.model, trials=tuple(self.trials), settings=dict(self._best), gain=gain
        )

    def _try(self, knob: Knob) -> None:
        """Compare the values of a knob with the present one, and take the fastest."""
        outcomes = self._outcomes(knob)
        gains = {key: gain for key, gain in outcomes.items() if isinstance(gain, Difference)}
        faster = {value: gain.share for value, gain in gains.items() if _is_faster(gain)}
        fastest = max(faster, key=lambda value: faster[value], default=None)
        present = self.present.get(knob.key, "")
        for value, outcome in outcomes.items():
            problem = outcome.message if isinstance(outcome, LocalchatError) else ""
            is_fastest = value == fastest
            self.trials.append(
                Trial(knob.key, value, present, gains.get(value), is_fastest, problem)
            )
        if fastest is not None:
            self._best[knob.key] = fastest

    def _outcomes(self, knob: Knob) -> dict[str, Difference | LocalchatError]:
        """Return the gain of each value, or the error that its load raised."""
        candidates = [{**self._best, knob.key: value} for value in knob.values]
        try:
            gains = self._compare(flag_name(knob.key), [self._best, *candidates])[1:]
            return dict(zip(knob.values, gains, strict=True))
        except LocalchatError as problem:
            if len(knob.values) == 1:
                return {knob.values[0]: problem}
        # One value cannot be loaded. Measured alone, it does not hide the others.
        outcomes: dict[str, Difference | LocalchatError] = {}
        for value in knob.values:
            outcomes |= self._outcomes(Knob(knob.key, (value,)))
        return outcomes

    def _compare(self, subject: str, settings: Sequence[Mapping[str, str]]) -> list[Difference]:
        """Return the gain of each of these settings over the first, from interleaved rounds.

        Raises LocalchatError if one of them cannot be loaded, or gives no answers.
        """
        variants = tuple(
            BenchVariant(_variant_name(values, is_first=index == 0), self.model, dict(values))
            for index, values in enumerate(settings)
        )
        spec = SweepSpec(
            variants=variants,
            shapes=self.shapes,
            clients=(self.clients,),
            rounds=self.rounds,
            requests=1,
        )
        with self.watch(subject) as show:
            sweep = Sweep(spec, self.open_server, show)
            sweep.run()
        speeds = [scores(sweep.points, variant, self.shapes, self.clients) for variant in variants]
        if not all(speeds):
            raise LocalchatError("no prompt of the trial fits into its context")
        return [difference(values, speeds[0]) for values in speeds]


def scores(
    points: Sequence[Point], variant: BenchVariant, shapes: Sequence[Shape], clients: int
) -> list[float]:
    """Return the speed of each round: the geometric mean over the shapes, so that all count alike."""
    by_shape = [rates(points, PointKey(variant.name, shape.name, 0, clients)) for shape in shapes]
    measured = [speeds for speeds in by_shape if speeds]
    return [
        math.exp(math.fsum(map(math.log, speeds)) / len(speeds))
        for speeds in zip(*measured, strict=True)
    ]


def _is_faster(gain: Difference) -> bool:
    return gain.beyond_noise and gain.share >= _MIN_GAIN


def _variant_name(values: Mapping[str, str], *, is_first: bool) -> str:
    if values:
        return " ".join(f"{flag_name(key)}={value}" for key, value in values.items())
    if is_first:
        return "as it is"
    return "nothing"


class TunedSetting(msgspec.Struct, frozen=True):
    """Setting that a tuning wrote."""

    key: str
    written: str
    before: str | None
    """Earlier value; None if the model's section did not have the key."""


class _TunedFile(msgspec.Struct, frozen=True):
    version: Literal[1] = 1
    models: dict[str, tuple[TunedSetting, ...]] = {}


class Undo(NamedTuple):
    """Outcome of an undo."""

    restored: list[TunedSetting]
    skipped: list[TunedSetting]
    """Settings that were changed since the tuning."""


class TunedSettings:
    """Writes the settings of a model, and remembers the earlier values for an undo."""

    def __init__(self, settings_file: Path, state_dir: Path) -> None:
        self._settings_file = settings_file
        self._state = StateFile(state_dir / _FILE, _TunedFile, _TunedFile())

    def write(self, model: str, settings: Mapping[str, str]) -> None:
        """Write settings for a model. Raises UsageError, LocalchatError, OSError.

        Settings that only an earlier tuning wrote can still be undone.
        """
        section = read_settings(self._settings_file).models.get(model, {})
        earlier = {entry.key: entry for entry in self._state.read().models.get(model, ())}
        entries = dict(earlier)
        for key, value in settings.items():
            before = setting_text(section[key]) if key in section else None
            if key in earlier and before == earlier[key].written:
                before = earlier[key].before
            entries[key] = TunedSetting(key, value, before)
        self._remember(model, tuple(entries.values()))
        for key, value in settings.items():
            write_setting(self._settings_file, key, value, model)

    def undo(self, model: str) -> Undo:
        """Restore the values from before the tuning, except those that were changed since.

        Raises UsageError, LocalchatError, OSError.
        """
        section = read_settings(self._settings_file).models.get(model, {})
        undo = Undo([], [])
        for entry in self._state.read().models.get(model, ()):
            if section.get(entry.key) != convert(entry.key, Given(entry.written, entry.key)):
                undo.skipped.append(entry)
                continue
            write_setting(self._settings_file, entry.key, entry.before, model)
            undo.restored.append(entry)
        self._remember(model, ())
        return undo

    def _remember(self, model: str, entries: tuple[TunedSetting, ...]) -> None:
        def change(file: _TunedFile) -> _TunedFile:
            models = dict(file.models)
            models.pop(model, None)
            if entries:
                models[model] = entries
            return _TunedFile(models=models)

        self._state.update(change, _LOCK_S)
