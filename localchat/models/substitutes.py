"""Completes the steps for a model that does not fit, by smaller weights."""

from collections.abc import Iterator, Mapping
from typing import Final

from localchat.backend_api.registry import choose_for_load
from localchat.config.paths import Paths
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan, is_rough, smaller_quantizations
from localchat.fit.steps import (
    MemoryStep,
    Planner,
    SlotLimit,
    load_steps,
    needed_bytes,
)
from localchat.model_files.architecture import ModelShape
from localchat.model_files.checkpoint import read_summary
from localchat.models.assess import Subject, assess
from localchat.models.catalog import read_catalog
from localchat.models.index import read_index
from localchat.models.names import parse
from localchat.models.published_shapes import published_names
from localchat.models.quantization_table import offered_names
from localchat.models.recommended_models import recommended_names
from localchat.models.resolve import GUIDE
from localchat.units import size

_FOUR_BITS: Final = 0.3
"""Size of AWQ and GPTQ weights relative to 16 bits, embeddings included."""
_MIN_SHARE: Final = 0.05
"""Share of the weights that do not fit, below which a model is no substitute."""
_MAX_READ: Final = 12
"""Limit on the models whose headers are read for the step to a smaller one."""


def memory_steps(
    subject: Subject,
    options: LoadOptions,
    machine: Machine,
    paths: Paths,
    environ: Mapping[str, str],
    slots: SlotLimit | None = None,
) -> tuple[MemoryStep, ...]:
    """Return the steps for a load that does not fit, in order. Blocks briefly. Raises LocalchatError."""
    backend = choose_for_load(
        subject.model, subject.kind, options, machine, subject.backend
    ).backend

    def plan(changed: LoadOptions) -> MemoryPlan:
        return backend.plan(subject.model, changed, machine)

    has_gpu = bool(machine.gpus) or machine.unified_memory
    first = load_steps(options, plan, has_gpu=has_gpu, slots=slots)
    base = plan(options)
    substitutes = _Substitutes(subject, options, machine, paths, environ, base)
    missing_bytes = needed_bytes(base) - base.free_bytes
    steps = (*first, *substitutes.quantizations(), *substitutes.models())
    return tuple(step for step in steps if step.is_worth(missing_bytes))


class _Substitutes:
    """Other weights for a model that does not fit."""

    def __init__(
        self,
        subject: Subject,
        options: LoadOptions,
        machine: Machine,
        paths: Paths,
        environ: Mapping[str, str],
        base: MemoryPlan,
    ) -> None:
        self._subject = subject
        self._options = options
        self._machine = machine
        self._paths = paths
        self._environ = environ
        self._base = base

    def quantizations(self) -> Iterator[MemoryStep]:
        """Yield the finest quantization of the same model that fits, else the coarsest."""
        shape = self._subject.model
        if isinstance(shape, ModelShape):
            names = smaller_quantizations(shape)
            if offered := offered_names(self._subject.name, read_catalog(self._paths)):
                names = {name: share for name, share in names.items() if name in offered}
            steps = [self._scaled(shape, name, share) for name, share in names.items()]
            if steps:
                yield next((step for step in steps if step.suffices), steps[-1])
        elif shape.quantization in ("", "F16", "BF16", "F32", "FP16"):
            saved = round(self._base.weights_bytes * (1 - _FOUR_BITS))
            yield MemoryStep(
                "quantization",
                "AWQ or GPTQ weights of 4 bits",
                saved,
                suffices=needed_bytes(self._base) - saved <= self._base.free_bytes,
            )

    def _scaled(self, shape: ModelShape, name: str, share: float) -> MemoryStep:
        plan = self._planner(shape.scaled(name, share))(self._options)
        rough = ""
        if is_rough(name):
            rough = ", which answers much worse"
        total = round(shape.weights_bytes * share)
        pull_name = self._published(name)
        return MemoryStep(
            "quantization",
            f"{name} of this model, about {size(total)}, rather than {shape.quantization}{rough}",
            shape.weights_bytes - total,
            suffices=plan.fits,
            flag=f"localchat pull {pull_name}" if pull_name else "",
            model=pull_name,
        )

    def _planner(self, shape: ModelShape) -> Planner:
        backend = choose_for_load(
            shape, "gguf", self._options, self._machine, self._subject.backend
        ).backend
        return lambda options: backend.plan(shape, options, self._machine)

    def _published(self, quantization: str) -> str:
        """Return the catalogue's name for this model in a quantization. Empty without one."""
        try:
            reference = parse(self._subject.name, read_catalog(self._paths))
        except LocalchatError:
            return ""
        suffix = f"-{quantization.lower()}"
        return next((name for name in published_names(reference) if name.endswith(suffix)), "")

    def models(self) -> Iterator[MemoryStep]:
        """Yield a fitting model of this machine, else of the catalog, else the guide."""
        for name, total in self._here():
            yield MemoryStep(
                "model",
                f"{name}, which is here and takes {size(total)}",
                max(needed_bytes(self._base) - total, 0),
                suffices=True,
                flag=f"-m {name}",
                model=name,
            )
            return
        if names := recommended_names(self._paths, self._machine):
            yield MemoryStep(
                "model",
                f"{names[0]} is recommended for this machine",
                suffices=True,
                flag=f"localchat pull {names[0]}",
                model=names[0],
            )
        elif self._subject.name != GUIDE:
            yield MemoryStep(
                "model",
                "no model of the catalogue fits, and the guide knows localchat alone",
                self._base.weights_bytes,
                flag=f"-m {GUIDE}",
                model=GUIDE,
            )

    def _here(self) -> Iterator[tuple[str, int]]:
        """Yield the names of fitting models here and the memory that they need, largest first."""
        try:
            models = read_index(self._paths, self._environ).models
        except LocalchatError:
            return
        max_bytes = self._subject.model.weights_bytes
        fitting = [
            candidate
            for candidate in models
            if candidate.path is not None
            and not candidate.trouble
            and candidate.path != self._subject.path
            and candidate.name != GUIDE
            and max_bytes * _MIN_SHARE
            < candidate.size_bytes
            < min(max_bytes, self._base.free_bytes)
        ]
        for candidate in sorted(fitting, key=lambda candidate: -candidate.size_bytes)[:_MAX_READ]:
            assert candidate.path is not None
            try:
                summary = read_summary(candidate.path)
                if isinstance(summary, ModelShape) and summary.pooling:
                    continue  # embeddings, no chat
                subject = Subject(candidate.name, summary, candidate.path)
                plan = assess(subject, self._options, self._machine, None, speed=False).plan
            except LocalchatError:
                continue
            if plan.fits:
                yield candidate.name, needed_bytes(plan)
