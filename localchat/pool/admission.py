"""Memory admission: decides if one more model fits next to the loaded ones."""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from localchat.backend_api.registry import usable_machine
from localchat.config.paths import find_paths
from localchat.engine.options import EngineOptions, RouteOptions
from localchat.errors import DoesNotFit, EngineBusy, LocalchatError
from localchat.fit.hardware import read_machine
from localchat.fit.memory_plan import demand, kept_free
from localchat.fit.steps import MemoryStep, SlotLimit
from localchat.model_files.checkpoint import read_summary
from localchat.models.assess import Subject, assess
from localchat.models.substitutes import memory_steps
from localchat.pool.entry import RETRY_AFTER_S, FreeMemory, ModelSpec, PoolEntry
from localchat.units import size

_GOAL_TOKENS = 8192
"""A context that is worth unloading an idle model for."""


class AdmissionResult(NamedTuple):
    """Admission decision for one model. Byte counts are 0 for a model that is not loaded on this machine."""

    fits: bool
    """The model can be loaded now."""
    cramped: bool = False
    """It fits only with a shorter context than it should have."""
    needed_bytes: int = 0
    """RAM and GPU memory together."""
    free_bytes: int = 0
    """RAM and GPU memory together."""
    advice: tuple[str, ...] = ()
    """Ways to make it fit, best first."""
    gpu_bytes: int = 0
    """Part of `needed_bytes` on the GPU."""
    gpu_free_bytes: int = 0
    """Part of `free_bytes` on the GPU."""
    gpu_limit_bytes: int | None = None
    """The user's limit for GPU memory, even if more becomes free; None: no limit."""

    anyway: bool = False
    """It is loaded even where it does not fit, once the others are unloaded."""
    reserve_bytes: int = 0
    """Free memory that is kept for other programs; not within `free_bytes`."""

    @property
    def ram_bytes(self) -> int:
        """Part of `needed_bytes` in RAM."""
        return self.needed_bytes - self.gpu_bytes

    def never_fits(self, entries: Iterable[PoolEntry]) -> bool:
        """True if it would not fit even with all these entries unloaded."""
        if self.anyway:
            return False
        listed = list(entries)
        gpu = self.gpu_free_bytes + sum(entry.gpu_bytes for entry in listed)
        if self.gpu_limit_bytes is not None:
            gpu = min(gpu, self.gpu_limit_bytes)
        ram = self.free_bytes - self.gpu_free_bytes + sum(entry.ram_bytes for entry in listed)
        return self.gpu_bytes > gpu or self.ram_bytes > ram

    def gains_from(self, entry: PoolEntry) -> bool:
        """True if this entry holds memory of a kind that the model needs."""
        return bool((self.gpu_bytes and entry.gpu_bytes) or (self.ram_bytes and entry.ram_bytes))


def check_memory(options: EngineOptions, loaded: Iterable[PoolEntry]) -> AdmissionResult:
    """Compare a model's planned size with free memory.

    Memory that loaded engines will still claim is not free. Raises LocalchatError for a file or options that
    cannot be loaded.
    """
    if options.route is not None:
        return _both(options.route, loaded)
    # A remote model takes no memory here; a third-party backend class plans its own memory.
    if options.remote is not None or ":" in (options.backend or ""):
        return AdmissionResult(fits=True)
    model = read_summary(options.model, dummy_weights=options.load.dummy_weights)
    subject = Subject(options.name, model, options.model, options.backend)
    machine = usable_machine()
    limit = options.load.gpu_limit_bytes
    plan = assess(subject, options.load, machine, None, speed=False).plan
    if plan.missing:
        demand(plan, options.name)
    entries = list(loaded)
    gpu = plan.gpu_bytes
    ram = plan.total_bytes - plan.gpu_bytes
    gpu_free = plan.gpu_free_bytes - sum(entry.uncounted_gpu_bytes for entry in entries)
    ram_free = plan.free_bytes - plan.gpu_free_bytes
    ram_free -= sum(entry.uncounted_ram_bytes for entry in entries)
    # A kind of memory that the model does not need must not fail the check.
    gpu_free = max(gpu_free, 0) if gpu else 0
    ram_free = max(ram_free, 0) if ram else 0
    trained = model.context_train
    return AdmissionResult(
        fits=plan.fits
        and ((gpu <= gpu_free and ram <= ram_free) or (options.load.anyway and not entries)),
        anyway=options.load.anyway,
        reserve_bytes=plan.reserve_bytes,
        cramped=options.load.context_tokens is None
        and plan.context_tokens < min(trained, _GOAL_TOKENS),
        needed_bytes=plan.total_bytes,
        free_bytes=gpu_free + ram_free,
        advice=plan.advice,
        gpu_bytes=gpu,
        gpu_free_bytes=gpu_free,
        gpu_limit_bytes=None if limit is None else limit * max(len(machine.gpus), 1),
    )


def _both(route: RouteOptions, loaded: Iterable[PoolEntry]) -> AdmissionResult:
    """The admission of the two models of a route, which stay loaded together."""
    entries = list(loaded)
    small = check_memory(route.small, entries)
    large = check_memory(route.large, entries)
    needed = small.needed_bytes + large.needed_bytes
    gpu = small.gpu_bytes + large.gpu_bytes
    free = max(small.free_bytes, large.free_bytes)
    return large._replace(
        fits=small.fits and large.fits and (needed <= free or large.anyway),
        cramped=False,
        needed_bytes=needed,
        free_bytes=free,
        advice=(*large.advice, "a smaller pair of models, or a shorter --ctx"),
        gpu_bytes=gpu,
        gpu_free_bytes=max(small.gpu_free_bytes, large.gpu_free_bytes),
    )


def free_memory() -> FreeMemory:
    """Free memory of this machine now."""
    machine = read_machine()
    gpus = machine.gpus
    return FreeMemory(
        machine.ram_free_bytes,
        machine.ram_total_bytes,
        machine.gpu_free_bytes,
        sum(gpu.total_bytes for gpu in gpus),
    )


def never_fits(spec: ModelSpec, verdict: AdmissionResult) -> DoesNotFit:
    """The error for a model that does not fit even alone, with the steps that would make room."""
    error = DoesNotFit(
        f"{spec.name} needs {size(verdict.needed_bytes)}, and {size(verdict.free_bytes)} are free"
        f"{kept_free(verdict.reserve_bytes)}",
        hint="\n".join(verdict.advice) or f"localchat fit {spec.name} shows what would help",
        needed_bytes=verdict.needed_bytes,
        free_bytes=verdict.free_bytes,
    )
    with suppress(LocalchatError):
        error.steps = tuple(step.as_json() for step in _steps(spec.options))
    return error


def _steps(options: EngineOptions) -> tuple[MemoryStep, ...]:
    composed = options.remote is not None or options.route is not None
    if composed or ":" in (options.backend or "") or not options.model.exists():
        return ()
    model = read_summary(options.model, dummy_weights=options.load.dummy_weights)
    subject = Subject(options.name, model, options.model, options.backend)
    limits = SlotLimit("--parallel", "", 1)
    paths = find_paths(os.environ)
    return memory_steps(subject, options.load, usable_machine(), paths, os.environ, limits)


def memory_in_use(
    spec: ModelSpec, verdict: AdmissionResult, entries: Iterable[PoolEntry]
) -> EngineBusy:
    """The error for a model that would fit if a loaded one were idle."""
    uses = "; ".join(
        f"{one.spec.name} ({size(one.memory_bytes)}) by {one.client_names()}" for one in entries
    )
    return EngineBusy(
        f"{spec.name} needs {size(verdict.needed_bytes)}, {size(verdict.free_bytes)} are free, and the "
        f"loaded models are in use: {uses}",
        hint="try again when one is idle, or unload one: localchat stop MODEL",
        retry_after_s=RETRY_AFTER_S,
    )
