"""Assesses a model before it is loaded, or even fetched: backend, memory, speed and alternatives.

One FitReport serves `fit`, `pull`, the first run and the terminal UI.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from localchat.backend_api.interface import Backend
from localchat.backend_api.registry import BackendChoice, choose_for_load, find_backends
from localchat.errors import ModelInvalid
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import USUAL_LENGTH, Kind, kind_name, placed, runner_name
from localchat.fit.speed import SpeedHistory, is_bandwidth_disturbed
from localchat.model_files.checkpoint import Checkpoint, ModelSummary
from localchat.units import rate


class ExpectedSpeed(NamedTuple):
    """Expected decode speed at a short context."""

    tokens_per_s: float
    basis: str
    """The source of the number, a phrase."""
    low: float = 0.0
    """Lower end of a prediction's range. 0 if the speed was measured."""
    high: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether this model ran here with the same options."""
        return not self.low

    @property
    def words(self) -> str:
        """`about 12.0 tok/s`, and the range of a prediction: `about 8.0 tok/s (4.0 to 12.0)`."""
        words = f"about {rate(self.tokens_per_s)}"
        if self.is_measured:
            return words
        low, high = (rate(end).removesuffix(" tok/s") for end in (self.low, self.high))
        return f"{words} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class FitReport:
    """The result of assessing one model."""

    name: str
    plan: MemoryPlan
    backend: str
    """Its name, as --backend takes it."""
    why: str
    """Sentence on the choice of the backend."""
    alternatives: tuple[str, ...]
    """Sentences on other backends and formats."""
    memory_bytes: int
    """Total memory that bounds the plan."""
    others_bytes: int
    """Part of it that other programs use."""
    expected_speed: ExpectedSpeed | None
    """Measured or predicted speed. None if the backend cannot tell."""

    def record(self) -> dict[str, Any]:
        """Return the fields of `--json`, whose names are stable."""
        plan = self.plan
        speed = self.expected_speed
        return {
            "backend": self.backend,
            "why": self.why,
            "alternatives": self.alternatives,
            "fits": plan.fits,
            "missing": plan.missing or None,
            "context_tokens": plan.context_tokens,
            "max_context_tokens": plan.max_context_tokens,
            "kv_type": plan.kv_type,
            "weights_bytes": plan.weights_bytes,
            "kv_bytes": plan.kv_bytes,
            "compute_bytes": plan.compute_bytes,
            "overhead_bytes": plan.overhead_bytes,
            "total_bytes": plan.total_bytes,
            "free_bytes": plan.free_bytes,
            "memory_bytes": self.memory_bytes,
            "others_bytes": self.others_bytes,
            "gpu_layers": plan.gpu_layers,
            "layers": plan.layers,
            "gpu_bytes": plan.gpu_bytes,
            "gpu_free_bytes": plan.gpu_free_bytes,
            "expected_tokens_per_s": speed.tokens_per_s if speed else None,
            "experts_on_cpu": plan.experts_on_cpu,
            "gpu_shares": [share.layers for share in plan.gpu_shares],
            "expected_by": speed.basis if speed else None,
            "expected_range": [speed.low, speed.high] if speed and not speed.is_measured else None,
            "advice": plan.advice,
            "notes": plan.notes,
            "kv_tokens": plan.kv_tokens if plan.fits else None,
            "conversations": {
                str(length): plan.conversations(length)
                for length in sorted({min(USUAL_LENGTH, plan.context_tokens), plan.context_tokens})
            },
        }


class Subject(NamedTuple):
    """A model to assess."""

    name: str
    model: ModelSummary
    path: Path | None = None
    """Path of its files. None for a model on a hub."""
    backend: str | None = None
    """Name of the backend that the user requested."""

    @property
    def kind(self) -> Kind:
        """Kind of its files."""
        if isinstance(self.model, Checkpoint):
            return "safetensors"
        return "gguf"


def assess(
    subject: Subject,
    options: LoadOptions,
    machine: Machine,
    history: SpeedHistory | None,
    *,
    speed: bool = True,
) -> FitReport:
    """Choose a backend for a model, plan the load and estimate the speed.

    `history`: past runs of this machine. `speed`: whether to estimate it.
    Raises ModelInvalid for a model that the chosen backend cannot run, UsageError for impossible options,
    LocalchatError if no backend reads such files.
    """
    chosen = choose_for_load(subject.model, subject.kind, options, machine, subject.backend)
    backend = chosen.backend
    if subject.kind not in backend.kinds:
        raise ModelInvalid(
            f"{runner_name(backend.name)} does not run {kind_name(subject.kind)}",
            hint="leave --backend out, and the right one is chosen",
        )
    if objection := backend.objection(subject.model):
        hint = ""
        if subject.kind == "safetensors":
            hint = "take a GGUF of it: llama.cpp knows more architectures"
        raise ModelInvalid(f"{subject.name} cannot be run: {objection}", hint=hint)
    plan = backend.plan(subject.model, options, machine)
    available = backend.available()
    if not available.ok and not plan.missing:
        plan = replace(plan, fits=False, missing=available.reason, advice=())
        if available.hint:
            plan = replace(plan, advice=(available.hint,))
    total, others = _memory(plan, machine)
    threads = options.threads or machine.cores
    expected = None
    if speed:
        expected = _expected_speed(subject, backend, plan, threads, history)
    return FitReport(
        name=subject.name,
        plan=plan,
        backend=backend.name,
        why=placed(chosen.why, plan),
        alternatives=_alternatives(subject, chosen, plan),
        memory_bytes=total,
        others_bytes=others,
        expected_speed=expected,
    )


def _alternatives(subject: Subject, chosen: BackendChoice, plan: MemoryPlan) -> tuple[str, ...]:
    others = tuple(f"--backend {name}: {runner_name(name)} runs it too." for name in chosen.others)
    if subject.kind == "safetensors":
        if plan.missing:
            return others  # the plan's advice already suggests a GGUF
        return (*others, "A GGUF of the same model runs on llama.cpp, also without a GPU.")
    if "safetensors" in chosen.backend.kinds:
        return others
    if any(
        "safetensors" in backend.kinds and backend.available().ok
        for backend in find_backends().values()
    ):
        return (*others, "Its AWQ or bf16 checkpoint (safetensors) would run on the CUDA backend.")
    return others


def _memory(plan: MemoryPlan, machine: Machine) -> tuple[int, int]:
    """Return the total memory that bounds the plan, and the part in use."""
    total = free = 0
    if plan.gpu_bytes < plan.total_bytes or not plan.gpu_bytes:
        total = machine.ram_total_bytes
        free = machine.ram_free_bytes
    if plan.gpu_bytes:
        total += sum(gpu.total_bytes for gpu in machine.gpus)
        free += machine.gpu_free_bytes
    return total, max(total - free, 0)


def _expected_speed(
    subject: Subject, backend: Backend, plan: MemoryPlan, threads: int, history: SpeedHistory | None
) -> ExpectedSpeed | None:
    """Return the speed of earlier runs, else the backend's prediction. None if there is neither."""
    if not plan.fits:
        return None
    if history is not None and subject.path is not None:
        run = history.measured(
            subject.path,
            backend=backend.name,
            threads=threads,
            gpu_layers=plan.gpu_layers,
            kv_type=plan.kv_type,
            experts_on_cpu=plan.experts_on_cpu,
        )
        if run is not None:
            return ExpectedSpeed(run.tokens_per_s, run.basis)
    estimate = backend.expected_rate(subject.model, plan, threads)
    if estimate is None:
        return None
    memory = "the memory"
    if plan.gpu_layers:
        memory = "the GPU's"
    basis = f"estimated from {memory} bandwidth"
    if plan.gpu_layers < plan.layers and is_bandwidth_disturbed(threads):
        basis = "estimated from the usual memory bandwidth, because other programs use the CPU now"
    if estimate.untried:
        basis += f"; no run of {runner_name(backend.name)} on such a GPU is known"
    return ExpectedSpeed(estimate.tokens_per_s, basis, estimate.low, estimate.high)
