"""Chooses the models of the catalogue that suit this machine: quick, balanced and best answers.

`run`, `fit`, the first run, the model screen and the guide all show its result, so they name the same models
in the same quantizations. The choice needs no network and follows the hardware.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from localchat.backend_api.registry import usable_machine
from localchat.config.paths import Paths
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.speed import DECODE_SHARE, SpeedHistory, ram_bandwidth
from localchat.model_files.architecture import ModelShape
from localchat.models.assess import FitReport, Subject, assess
from localchat.models.catalog import Catalog, CatalogEntry, read_catalog
from localchat.models.published_shapes import gguf_shape, read_published_shapes
from localchat.models.quantization_table import QUICK_TOKENS_PER_S, quantization_rows
from localchat.models.quantizations import same_quantization
from localchat.units import rate, size

Role = Literal["fast", "balanced", "best"]
ROLE_WORDS: Final[dict[Role, str]] = {
    "fast": "quick answers",
    "balanced": "balanced",
    "best": "best answers",
}

_MIN_TOKENS_PER_S: Final[tuple[tuple[Role, float], ...]] = (
    ("best", 4.0),
    ("balanced", 10.0),
    ("fast", QUICK_TOKENS_PER_S),
)
"""Slowest acceptable decode rate of each role. People read about five tokens a second."""
_ROLES_BY_COUNT: Final[tuple[tuple[Role, ...], ...]] = (
    (),
    ("balanced",),
    ("fast", "best"),
    ("fast", "balanced", "best"),
)
"""Roles by the number of models, from weak to strong."""
_STRENGTH_STEP: Final = 0.6
"""Limit on a model's strength, as a share of the next better role's."""
_READ_STEP: Final = 0.75
"""Limit on the weights that a model reads for a token, as a share of the next better role's."""
_OLDEST_YEAR: Final = 2024
_GROWTH_PER_YEAR: Final = 1.75
"""Size of an older model that answers as well as one that is a year newer, as a factor.

A cautious value: Xiao et al., "Densing Law of LLMs" (2024), find that the best models halve every few months.
"""
_CONTEXT_TOKENS: Final = 4096
"""Context that a recommended model must have room for."""
_SLOTS: Final = 2
_MEMORY_SHARE: Final = 0.5
"""Largest share of the RAM for the weights, so that other programs keep running."""
_UNIFIED_BYTES_PER_S: Final = 60e9
"""Rate at which a GPU that shares the RAM reads weights."""
_GPU_SHARE: Final = 0.9
"""Share of a GPU's bandwidth that decoding reaches."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A model of the catalogue that suits this machine."""

    role: Role
    name: str
    """Name for `localchat pull`, with the quantization if that is not the entry's default."""
    entry: str
    """Name in the catalogue."""
    quantization: str
    size_bytes: int
    tokens_per_s: float | None
    """Decode rate, as `fit` shows it. None for a GPU of unknown bandwidth."""

    @property
    def summary(self) -> str:
        """`quick answers, about 33 tok/s, download 502 MB`."""
        parts = [ROLE_WORDS[self.role]]
        if self.tokens_per_s is not None:
            parts.append(f"about {rate(self.tokens_per_s)}")
        return ", ".join((*parts, f"download {size(self.size_bytes)}"))

    @property
    def command(self) -> str:
        """Command that downloads it."""
        return f"localchat pull {self.name}"


def recommended_models(paths: Paths, machine: Machine | None = None) -> tuple[Recommendation, ...]:
    """Choose up to three models that suit this machine, from quick to best.

    Takes about a second. Raises LocalchatError if the user's catalogue cannot be read.
    """
    machine = machine or usable_machine()
    catalog = read_catalog(paths)
    candidates = list(_candidates(catalog, machine))
    candidates.sort(key=lambda candidate: candidate.strength)
    chosen = _chosen(candidates, _reading_speed(candidates, machine))
    history = SpeedHistory(paths.state_dir)
    recommendations = []
    for role, candidate in chosen:
        options = _options(candidate.entry)
        subject = Subject(candidate.name, candidate.shape)
        rows = quantization_rows(subject, options, machine, history, catalog)
        best = next((row for row in rows if row.recommended), None)
        if best is not None:
            recommendation = _recommendation(role, candidate.entry, best.shape, best.report)
        else:
            # A model that is published in a single, unusual quantization.
            report = assess(subject, options, machine, history)
            recommendation = _recommendation(role, candidate.entry, candidate.shape, report)
        recommendations.append(recommendation)
    return tuple(recommendations)


def recommended_names(paths: Paths, machine: Machine) -> list[str]:
    """Return the names of the recommended models, best first. Empty if the catalogue cannot be read."""
    try:
        recommendations = recommended_models(paths, machine)
    except LocalchatError:
        return []
    return [recommendation.name for recommendation in reversed(recommendations)]


class _FittingModel(NamedTuple):
    """A chat model that fits."""

    entry: CatalogEntry
    name: str
    shape: ModelShape
    report: FitReport
    strength: float
    """Quality of its answers, as parameters of a dense model."""
    read_bytes: float
    """Weights read for one token."""


def _recommendation(
    role: Role, entry: CatalogEntry, shape: ModelShape, report: FitReport
) -> Recommendation:
    """Describe a chosen model."""
    name = entry.name
    if not same_quantization(shape.quantization, entry.sources[0].default):
        name = shape.name
    speed = report.expected_speed
    tokens_per_s = None
    if speed is not None:
        tokens_per_s = speed.tokens_per_s
    return Recommendation(
        role=role,
        name=name,
        entry=entry.name,
        quantization=shape.quantization,
        size_bytes=shape.file_bytes,
        tokens_per_s=tokens_per_s,
    )


def _chosen(
    candidates: list[_FittingModel], bytes_per_s: float | None
) -> list[tuple[Role, _FittingModel]]:
    """Choose a candidate for each role, from fast to best. candidates: from weak to strong."""
    chosen: list[tuple[Role, _FittingModel]] = []
    max_strength = max_read_bytes = float("inf")
    for role, min_rate in _MIN_TOKENS_PER_S:
        quick = [
            candidate
            for candidate in candidates
            if candidate.strength <= max_strength
            and candidate.read_bytes <= max_read_bytes
            and (bytes_per_s is None or bytes_per_s / candidate.read_bytes >= min_rate)
        ]
        if quick:
            chosen.append((role, quick[-1]))
            max_strength = quick[-1].strength * _STRENGTH_STEP
            max_read_bytes = quick[-1].read_bytes * _READ_STEP
    models = [candidate for _, candidate in reversed(chosen)]
    ladder = _ladder(candidates)[: len(_MIN_TOKENS_PER_S)]
    if len(models) < len(ladder):
        # A machine too slow for these rates still gets the smallest models.
        models = ladder
    return list(zip(_ROLES_BY_COUNT[len(models)], models, strict=True))


def _ladder(candidates: list[_FittingModel]) -> list[_FittingModel]:
    """The smallest candidates, each clearly stronger than the one before."""
    ladder: list[_FittingModel] = []
    for candidate in candidates:
        if not ladder or candidate.strength * _STRENGTH_STEP >= ladder[-1].strength:
            ladder.append(candidate)
    return ladder


def _candidates(catalog: Catalog, machine: Machine) -> Iterator[_FittingModel]:
    """Yield the chat models that fit in their default quantization, on a GPU if there is one."""
    shapes = read_published_shapes()
    seen: set[tuple[object, ...]] = set()
    for name, entry in catalog.items():
        source = entry.source(None)
        is_chat = {"chat", "tools"} <= set(entry.uses) and "code" not in entry.uses
        if name not in shapes or not is_chat or source is None:
            continue
        quantization = source[1]
        shape = gguf_shape(entry, shapes[name], quantization)
        key = (shapes[name], entry.uses)
        if shape is None or key in seen:
            continue
        report = _report(f"{name}-{quantization.lower()}", entry, shape, machine)
        if report is None:
            continue
        seen.add(key)
        active = entry.active_parameters or entry.parameters
        yield _FittingModel(
            entry,
            report.name,
            shape,
            report,
            model_strength(entry),
            shape.weights_bytes * active / entry.parameters,
        )


def model_strength(entry: CatalogEntry) -> float:
    """Return the parameters of a dense model of the oldest year that answers about as well."""
    active = entry.active_parameters or entry.parameters
    years = (entry.released or _OLDEST_YEAR) - _OLDEST_YEAR
    # A mixture of experts answers like a dense model between its two numbers (geometric mean).
    return float((entry.parameters * active) ** 0.5 * _GROWTH_PER_YEAR**years)


def _report(
    name: str, entry: CatalogEntry, shape: ModelShape, machine: Machine
) -> FitReport | None:
    """Return the plan of a short context. None if the model does not run here, or only slowly."""
    if not machine.gpus and shape.weights_bytes > _MEMORY_SHARE * machine.ram_total_bytes:
        return None
    try:
        report = assess(Subject(name, shape), _options(entry), machine, None, speed=False)
    except LocalchatError:
        return None
    if not report.plan.fits or _is_split(report.plan, machine):
        return None
    return report


def _options(entry: CatalogEntry) -> LoadOptions:
    context = min(_CONTEXT_TOKENS, entry.context_tokens)
    return LoadOptions(max_slots=_SLOTS, context_tokens=context)


def _is_split(plan: MemoryPlan, machine: Machine) -> bool:
    """Return True if layers or experts in RAM would slow a GPU down."""
    split = 0 < plan.gpu_layers < plan.layers or plan.experts_on_cpu > 0
    return bool(machine.gpus or machine.unified_memory) and split


def _reading_speed(candidates: list[_FittingModel], machine: Machine) -> float | None:
    """Return the bytes of weights read per second. None if a GPU does not report its bandwidth."""
    if not candidates:
        return None
    middle = candidates[len(candidates) // 2]
    if not middle.report.plan.gpu_layers:
        return DECODE_SHARE * ram_bandwidth(max(machine.cores, 1))
    if machine.unified_memory:
        return _UNIFIED_BYTES_PER_S
    speeds = [gpu.bytes_per_s for gpu in machine.gpus]
    if speeds and all(speeds):
        return _GPU_SHARE * min(speeds)
    return None
