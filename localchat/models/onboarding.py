"""The first run: hardware, models of other programs, and three models of the catalogue that fit.

Plain data, without the network.

`first_run` takes a second or two, most of it the speed benchmark: call it on a worker thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from localchat.backend_api.registry import usable_machine
from localchat.config.paths import Paths
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.speed_history import SpeedHistory
from localchat.model_files.architecture import ModelShape
from localchat.models.assess import FitReport, Subject, assess
from localchat.models.catalog import Catalog, CatalogEntry, read_catalog
from localchat.models.hub.download import DownloadRate, download_rate
from localchat.models.index import Model, read_index
from localchat.models.published_models import gguf_shape
from localchat.models.published_shapes import read_published_shapes
from localchat.units import rate, size

Role = Literal["fast", "balanced", "best"]

_AIMS: Final[tuple[tuple[Role, float], ...]] = (("best", 5.0), ("balanced", 15.0), ("fast", 40.0))
"""Tokens a second that a model of each role must write at least; people read some five words a second."""
_STEP: Final = 0.6
"""A recommendation must be clearly smaller than the one above it."""
_USUAL_BYTES_PER_S: Final = 15e9
"""At which the CPU of a usual laptop reads weights."""
_GOAL_TOKENS: Final = 4096
_SLOTS: Final = 2
_OWN: Final = frozenset({"file", "link", "pulled", "alias"})


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One model to begin with."""

    role: Role
    name: str
    """As `localchat pull` takes it."""
    about: str
    parameters: int
    size_bytes: int
    download_s: float
    """At the rate of `FirstRun.rate`."""
    context_tokens: int
    gpu_layers: int
    layers: int
    tokens_per_s: float | None
    """An estimate, where there is one."""
    why: str
    disturbed: bool = False
    """Other programs were using the CPU when its speed was estimated: it is faster without them."""

    @property
    def speed_words(self) -> str:
        """`about 40.1 tok/s`, `more than 4.3 tok/s`; empty where it is unknown."""
        if self.tokens_per_s is None:
            return ""
        return f"{'more than' if self.disturbed else 'about'} {rate(self.tokens_per_s)}"

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return f"localchat pull {self.name}"


@dataclass(frozen=True, slots=True)
class FirstRun:
    """Everything that a user without a model sees first."""

    hardware: str
    """One line."""
    external: tuple[Model, ...]
    """Usable models of other programs."""
    recommendations: tuple[Recommendation, ...]
    """Fast, balanced, best: as many as fit."""
    rate: DownloadRate


def first_run(paths: Paths, environ: Mapping[str, str], machine: Machine | None = None) -> FirstRun:
    """Gather everything. Raises LocalchatError where the user's catalogue or aliases cannot be read."""
    here = machine or usable_machine()
    index = read_index(paths, environ)
    rate = download_rate(paths.state_dir)
    catalogue = read_catalog(paths)
    return FirstRun(
        hardware=hardware_line(here),
        external=tuple(one for one in index.models if one.kind == "adopted" and not one.trouble),
        recommendations=tuple(_cards(catalogue, here, SpeedHistory(paths.state_dir), rate)),
        rate=rate,
    )


def with_models_that_fit(advice: str, paths: Paths, machine: Machine | None = None) -> str:
    """Advice for a load that does not fit, and the strongest chat models that would. Blocks for a moment."""
    names = fitting_names(paths, machine or usable_machine())
    line = f"Models that fit here: {', '.join(names)}. localchat pull NAME fetches one."
    return f"{advice}\n{line}".lstrip() if names else advice


def fitting_names(paths: Paths, machine: Machine, most: int = 2) -> list[str]:
    """Names of the strongest chat models of the catalogue that fit. Blocks for a moment."""
    try:
        found = sorted(_candidates(read_catalog(paths), machine), key=lambda one: one.strength)
    except LocalchatError:
        return []  # the user's catalogue cannot be read, which other commands report
    return [one.name for one in found[: -most - 1 : -1]]


def fitting_by_size(
    paths: Paths, machine: Machine, most_bytes: Sequence[float] = (2.2e9, 5.5e9, 12e9)
) -> list[tuple[str, int]]:
    """Name and weights of the strongest chat model that fits, up to each of these sizes.

    For a machine whose speed is not measured yet. Blocks for a moment. Raises LocalchatError."""
    found = sorted(_candidates(read_catalog(paths), machine), key=lambda one: one.strength)
    best = [[one for one in found if one.shape.weights_bytes <= most][-1:] for most in most_bytes]
    return list(dict.fromkeys((one.name, one.shape.weights_bytes) for step in best for one in step))


def is_first_run(paths: Paths, environ: Mapping[str, str]) -> bool:
    """Whether the user has no model yet: nothing pulled, imported or put into the models folder."""
    return not any(model.kind in _OWN for model in read_index(paths, environ).models)


def hardware_line(machine: Machine) -> str:
    """`AMD EPYC 7B13, 2 cores · 8.1 GB of RAM, 6.0 GB free · RTX 4090, 24.0 GB, 21.0 GB free`."""
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    unified = ", shared with its GPU" if machine.unified_memory else ""
    parts = [
        ", ".join(part for part in (machine.cpu_name.strip(), cores) if part),
        f"{size(machine.ram_total_bytes)} of RAM{unified}, {size(machine.ram_free_bytes)} free",
    ]
    parts += [
        f"{gpu.name}, {size(gpu.total_bytes)}, {size(gpu.free_bytes)} free" for gpu in machine.gpus
    ]
    return " · ".join([*parts, *([machine.gpu_note.rstrip(".")] if machine.gpu_note else [])])


class _Candidate(NamedTuple):
    """A model that fits."""

    entry: CatalogEntry
    name: str
    shape: ModelShape
    report: FitReport
    strength: float
    """Quality of its answers, as parameters of a dense model."""
    read_bytes: float
    """Read for one token."""


def _cards(
    catalogue: Catalog, machine: Machine, history: SpeedHistory, rate: DownloadRate
) -> Iterator[Recommendation]:
    """From the fast to the best."""
    candidates = sorted(_candidates(catalogue, machine), key=lambda one: one.strength)
    reading = _reading_speed(candidates, machine, history)
    speed = reading.bytes_per_s if reading is not None else None
    for role, one in _chosen(candidates, _speed_to_choose_by(reading, machine)):
        plan = one.report.plan
        yield Recommendation(
            role=role,
            name=one.name,
            about=one.entry.about,
            parameters=one.entry.parameters,
            size_bytes=one.shape.file_bytes,
            download_s=one.shape.file_bytes / rate.bytes_per_s,
            context_tokens=plan.context_tokens,
            gpu_layers=plan.gpu_layers,
            layers=plan.layers,
            tokens_per_s=_token_rate(one, speed, machine, history),
            why=one.report.why,
            disturbed=reading is not None and reading.disturbed,
        )


def _speed_to_choose_by(reading: "_ReadingSpeed | None", machine: Machine) -> float | None:
    """Bytes a second. A measurement that other programs disturbed must neither make a usual machine slow nor,
    where it gave nothing, let the largest model through."""
    if machine.gpus or machine.unified_memory or (reading is not None and not reading.disturbed):
        return reading.bytes_per_s if reading is not None else None
    return max(_USUAL_BYTES_PER_S, reading.bytes_per_s if reading is not None else 0.0)


def _token_rate(
    one: _Candidate, speed: float | None, machine: Machine, history: SpeedHistory
) -> float | None:
    """Tokens a second. On a CPU by the bytes read; on a GPU by an estimate, as a token has a constant part."""
    if speed is None or not one.report.plan.gpu_layers:
        return speed / one.read_bytes if speed is not None else None
    options = LoadOptions(max_slots=_SLOTS)
    expected_speed = assess(Subject(one.name, one.shape), options, machine, history).expected_speed
    return expected_speed.tokens_per_s if expected_speed is not None else None


def _chosen(candidates: list[_Candidate], speed: float | None) -> list[tuple[Role, _Candidate]]:
    """From fast to best. candidates: from weak to strong. speed: bytes a second; None: unknown."""
    found: list[tuple[Role, _Candidate]] = []
    for role, least in _AIMS:
        most = found[-1][1].strength * _STEP if found else float("inf")
        left = [one for one in candidates if one.strength <= most]
        quick = [one for one in left if speed is None or speed / one.read_bytes >= least]
        found += [(role, one) for one in quick[-1:]]
    ladder: list[_Candidate] = []
    for one in candidates:
        if not ladder or one.strength * _STEP >= ladder[-1].strength:
            ladder.append(one)
    if len(found) < min(len(ladder), len(_AIMS)):
        # A machine too slow for the aims still gets the smallest ones, in order.
        names: tuple[Role, ...] = ("fast", "balanced", "best")
        return list(zip(names, ladder, strict=False))
    return found[::-1]


def _candidates(catalogue: Catalog, machine: Machine) -> Iterator[_Candidate]:
    """General chat models that fit, in their default quantization; with a GPU those that fit on it whole."""
    shapes = read_published_shapes()
    seen: set[tuple[object, ...]] = set()
    for name, entry in catalogue.items():
        found = entry.source(None)
        if name not in shapes or not {"chat", "tools"} <= set(entry.uses) or "code" in entry.uses:
            continue
        shape = gguf_shape(entry, shapes[name], found[1]) if found else None
        if shape is None or found is None:
            continue
        full = f"{name}-{found[1].lower()}"
        options = LoadOptions(max_slots=_SLOTS)
        try:
            report = assess(Subject(full, shape), options, machine, None, speed=False)
        except LocalchatError:
            continue  # no backend here runs it
        short = report.plan.context_tokens < min(_GOAL_TOKENS, entry.context_tokens)
        if not report.plan.fits or short or _slowed(report.plan, machine):
            continue
        key = (shapes[name], entry.uses)
        if key in seen:
            continue
        seen.add(key)
        active = entry.active_parameters or entry.parameters
        yield _Candidate(
            entry,
            full,
            shape,
            report,
            # A mixture of experts answers like a dense model between its two numbers (geometric mean).
            (entry.parameters * active) ** 0.5,
            shape.weights_bytes * active / entry.parameters,
        )


def _slowed(plan: MemoryPlan, machine: Machine) -> bool:
    """Whether layers or experts in RAM would slow a GPU down."""
    parted = 0 < plan.gpu_layers < plan.layers or plan.experts_on_cpu > 0
    return bool(machine.gpus or machine.unified_memory) and parted


class _ReadingSpeed(NamedTuple):
    """How fast weights are read here."""

    bytes_per_s: float
    disturbed: bool


def _reading_speed(
    candidates: list[_Candidate], machine: Machine, history: SpeedHistory
) -> _ReadingSpeed | None:
    """Estimated with a model of medium size."""
    if not candidates:
        return None
    middle = candidates[len(candidates) // 2]
    options = LoadOptions(max_slots=_SLOTS)
    expected_speed = assess(
        Subject(middle.name, middle.shape), options, machine, history
    ).expected_speed
    if expected_speed is None:
        return None
    bytes_per_s = expected_speed.tokens_per_s * middle.read_bytes
    return _ReadingSpeed(bytes_per_s, expected_speed.disturbed)
