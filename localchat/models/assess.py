"""The verdict on a model before it is loaded, or even fetched: backend and why, memory, speed, and what else
could be done. One value for `fit`, `pull`, the first run and the UI."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from localchat.backend_api.interface import Backend
from localchat.backend_api.registry import choose_for_model, find_backends
from localchat.errors import ModelInvalid
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind, kind_name, placed, runner_name
from localchat.fit.speed_history import NO_MEASUREMENTS, SpeedHistory
from localchat.model_files.checkpoint import Checkpoint, ModelSummary


class ExpectedSpeed(NamedTuple):
    """Tokens a second at a short context. `basis`: where the number comes from, a phrase."""

    tokens_per_s: float
    basis: str


@dataclass(frozen=True, slots=True)
class FitReport:
    """`backend`: its name, as --backend takes it. `why`: one sentence on the choice. `alternatives`:
    sentences. `memory_bytes`, `others_bytes`: of the memory that bounds the plan, all of it and what is
    taken. `expected_speed`: None where there is no estimate."""

    name: str
    plan: MemoryPlan
    backend: str
    why: str
    alternatives: tuple[str, ...]
    memory_bytes: int
    others_bytes: int
    expected_speed: ExpectedSpeed | None

    def record(self) -> dict[str, Any]:
        """What `--json` says, with stable names."""
        plan = self.plan
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
            "expected_tokens_per_s": self.expected_speed.tokens_per_s
            if self.expected_speed
            else None,
            "expected_by": self.expected_speed.basis if self.expected_speed else None,
            "advice": plan.advice,
            "notes": plan.notes,
        }


def usable_machine() -> Machine:
    """This machine now, with every GPU that an installed backend could use."""
    from localchat.fit.hardware import read_machine

    machine = read_machine()
    for backend in find_backends().values():
        if backend.available().ok:
            machine = backend.with_gpus(machine)
    return machine


class Subject(NamedTuple):
    """What is judged. `path`: where it lies here, None for one on a hub. `wanted`: a backend's name."""

    name: str
    model: ModelSummary
    path: Path | None = None
    wanted: str | None = None

    @property
    def kind(self) -> Kind:
        """Of its files."""
        return "safetensors" if isinstance(self.model, Checkpoint) else "gguf"


def assess(
    subject: Subject,
    options: LoadOptions,
    machine: Machine,
    history: SpeedHistory | None,
    *,
    speed: bool = True,
) -> FitReport:
    """Choose a backend for a model, plan the load and estimate the speed.

    `history`: past runs of this machine. `speed`: whether to estimate it, which may take a second.
    Raises ModelInvalid for a model that the chosen backend cannot run, UsageError for impossible options,
    LocalchatError where no backend reads such files.
    """
    chosen = choose_for_model(subject.model, subject.kind, subject.wanted)
    backend = chosen.backend
    if subject.kind not in backend.kinds:
        raise ModelInvalid(
            f"{runner_name(backend.name)} does not run {kind_name(subject.kind)}",
            hint="leave --backend out, and the right one is chosen",
        )
    if objection := backend.objection(subject.model):
        instead = "take a GGUF of it: llama.cpp knows more architectures"
        raise ModelInvalid(
            f"{subject.name} cannot be run: {objection}",
            hint=instead if subject.kind == "safetensors" else "",
        )
    plan = backend.plan(subject.model, options, machine)
    available = backend.available()
    if not available.ok and not plan.missing:
        plan = _unavailable(plan, available.reason, available.hint)
    total, others = _memory(plan, machine)
    threads = options.threads or machine.cores
    expected = _expected_speed(subject, backend, plan, threads, history) if speed else None
    return FitReport(
        name=subject.name,
        plan=plan,
        backend=backend.name,
        why=placed(chosen.why, plan),
        alternatives=_alternatives(subject, chosen.others, plan),
        memory_bytes=total,
        others_bytes=others,
        expected_speed=expected,
    )


def _unavailable(plan: MemoryPlan, reason: str, hint: str) -> MemoryPlan:
    return replace(plan, fits=False, missing=reason, advice=(hint,) if hint else ())


def _alternatives(subject: Subject, others: tuple[str, ...], plan: MemoryPlan) -> tuple[str, ...]:
    asked = tuple(f"--backend {name}: {runner_name(name)} runs it too." for name in others)
    if subject.kind == "safetensors":
        if plan.missing:
            return asked  # the plan's own advice says it
        return (*asked, "A GGUF of the same model runs on llama.cpp, also without a GPU.")
    if any("safetensors" in one.kinds and one.available().ok for one in find_backends().values()):
        return (*asked, "Its AWQ or bf16 checkpoint (safetensors) would run on the CUDA backend.")
    return asked


def _memory(plan: MemoryPlan, machine: Machine) -> tuple[int, int]:
    """All memory that the plan draws on, and what of it is taken: RAM, with the cards where they are used."""
    total = free = 0
    if plan.gpu_bytes < plan.total_bytes or not plan.gpu_bytes:
        total, free = machine.ram_total_bytes, machine.ram_free_bytes
    if plan.gpu_bytes:
        total += sum(gpu.total_bytes for gpu in machine.gpus)
        free += machine.gpu_free_bytes
    return total, max(total - free, 0)


def _expected_speed(
    subject: Subject, backend: Backend, plan: MemoryPlan, threads: int, history: SpeedHistory | None
) -> ExpectedSpeed | None:
    if not plan.fits:
        return None
    if history is not None and subject.path is not None:
        found = history.measured(
            subject.path,
            backend=backend.name,
            threads=threads,
            gpu_layers=plan.gpu_layers,
            kv_type=plan.kv_type,
        )
        if found is not None:
            return ExpectedSpeed(found, "as measured here before")
    whole = plan.gpu_layers >= plan.layers > 0
    past = (
        history.past(backend=backend.name, threads=threads, whole_gpu=whole)
        if history is not None and (whole or not plan.gpu_layers)
        else ()
    )
    measures = history.measures if history is not None else NO_MEASUREMENTS
    estimate = backend.expected_rate(subject.model, plan, threads, past, measures)
    if estimate is None:
        return None
    by = "the GPU's bandwidth" if plan.gpu_layers else "a probe of this build"
    corrected = f", corrected by {len(past)} past run{'s' if len(past) > 1 else ''}" if past else ""
    if estimate.disturbed:
        return ExpectedSpeed(
            estimate.tokens_per_s,
            f"by {by}{corrected}, and rather more: other programs kept the processor busy meanwhile",
        )
    return ExpectedSpeed(estimate.tokens_per_s, f"by {by}{corrected}, while nothing else computes")
