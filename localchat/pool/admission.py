"""Whether one more model fits beside those that are loaded: asked of the backend's planner before a load."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from localchat.engine.options import EngineOptions
from localchat.errors import DoesNotFit, EngineBusy
from localchat.fit.memory_plan import demand
from localchat.model_files.checkpoint import Checkpoint, read_unloaded
from localchat.models.assess import Subject, assess, usable_machine
from localchat.pool.entry import RETRY_AFTER_S, ModelSpec, PoolEntry
from localchat.units import size

_GOAL_TOKENS = 8192
"""A context that is worth unloading an idle model for."""


class AdmissionResult(NamedTuple):
    """fits: it can be loaded now. cramped: only with a context shorter than it should have. needed_bytes,
    free_bytes: of RAM and graphics memory together; gpu_bytes, gpu_free_bytes: the part that is graphics
    memory. Bytes are 0 where nothing is loaded here. advice: what would help, best first. gpu_most_bytes: what
    the user allows of the graphics memory, whoever leaves it; None: all."""

    fits: bool
    cramped: bool = False
    needed_bytes: int = 0
    free_bytes: int = 0
    advice: tuple[str, ...] = ()
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0
    gpu_most_bytes: int | None = None

    @property
    def ram_bytes(self) -> int:
        """What is needed of the RAM."""
        return self.needed_bytes - self.gpu_bytes

    def never(self, members: Iterable[PoolEntry]) -> bool:
        """Whether it would not fit, had all of these members left."""
        listed = list(members)
        gpu = self.gpu_free_bytes + sum(member.gpu_bytes for member in listed)
        if self.gpu_most_bytes is not None:
            gpu = min(gpu, self.gpu_most_bytes)
        ram = self.free_bytes - self.gpu_free_bytes + sum(member.ram_bytes for member in listed)
        return self.gpu_bytes > gpu or self.ram_bytes > ram

    def helped_by(self, member: PoolEntry) -> bool:
        """Whether this member holds memory of the kind that is needed."""
        return bool((self.gpu_bytes and member.gpu_bytes) or (self.ram_bytes and member.ram_bytes))


class Room(Protocol):
    """Judges a load beside the engines that are there."""

    def judge(self, options: EngineOptions, beside: Iterable[PoolEntry]) -> AdmissionResult:
        """Raises LocalchatError for a file or wish that no load can be made of."""
        ...


class MemoryAdmission:
    """By live free memory, less what engines hold of it without the system's knowing."""

    def judge(self, options: EngineOptions, beside: Iterable[PoolEntry]) -> AdmissionResult:
        if options.remote is not None or ":" in (options.backend or ""):
            return AdmissionResult(
                fits=True
            )  # nothing is loaded here, or by a stranger's class that plans itself
        model = read_unloaded(options.model, dummy_weights=options.load.dummy_weights)
        subject = Subject(options.name, model, options.model, options.backend)
        machine, limit = usable_machine(), options.load.gpu_limit_bytes
        plan = assess(subject, options.load, machine, None, speed=False).plan
        if plan.missing:
            demand(plan, options.name)
        members = list(beside)
        gpu, ram = plan.gpu_bytes, plan.total_bytes - plan.gpu_bytes
        gpu_free = plan.gpu_free_bytes - sum(member.hidden_gpu_bytes for member in members)
        ram_free = plan.free_bytes - plan.gpu_free_bytes
        ram_free -= sum(member.hidden_ram_bytes for member in members)
        # Memory that is not asked for does not count, whoever is short of it.
        gpu_free, ram_free = max(gpu_free, 0) if gpu else 0, max(ram_free, 0) if ram else 0
        trained = (
            model.context_train if isinstance(model, Checkpoint) else model.number("context_length")
        )
        return AdmissionResult(
            fits=plan.fits and gpu <= gpu_free and ram <= ram_free,
            cramped=options.load.context_tokens is None
            and plan.context_tokens < min(trained, _GOAL_TOKENS),
            needed_bytes=plan.total_bytes,
            free_bytes=gpu_free + ram_free,
            advice=plan.advice,
            gpu_bytes=gpu,
            gpu_free_bytes=gpu_free,
            gpu_most_bytes=None if limit is None else limit * max(len(machine.gpus), 1),
        )


def never_fits(wanted: ModelSpec, verdict: AdmissionResult) -> DoesNotFit:
    """Not even alone."""
    return DoesNotFit(
        f"{wanted.name} needs {size(verdict.needed_bytes)}, and {size(verdict.free_bytes)} are free",
        hint="\n".join(verdict.advice) or f"localchat fit {wanted.name} tells what would help",
        needed_bytes=verdict.needed_bytes,
        free_bytes=verdict.free_bytes,
    )


def all_used(
    wanted: ModelSpec, verdict: AdmissionResult, members: Iterable[PoolEntry]
) -> EngineBusy:
    """It would fit if somebody left."""
    uses = "; ".join(
        f"{one.wanted.name} ({size(one.memory_bytes)}) by {one.client_names()}" for one in members
    )
    return EngineBusy(
        f"{wanted.name} needs {size(verdict.needed_bytes)}, {size(verdict.free_bytes)} are free, and the "
        f"loaded models are in use: {uses}",
        hint="try again when one is idle, or unload one: localchat stop MODEL",
        retry_after_s=RETRY_AFTER_S,
    )
