"""Memory admission: decides whether another model fits next to the loaded ones."""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from localchat.backend_api.registry import usable_machine
from localchat.config.paths import find_paths
from localchat.engine.options import EngineOptions
from localchat.errors import DoesNotFit, EngineBusy, LocalchatError
from localchat.fit.memory_plan import SEE_FIT, demand, kept_free
from localchat.fit.steps import MemoryStep, SlotLimit
from localchat.model_files.checkpoint import read_summary
from localchat.models.assess import Subject, assess
from localchat.models.substitutes import memory_steps
from localchat.pool.entry import RETRY_AFTER_S, ModelSpec, PoolEntry
from localchat.units import size

_GOAL_TOKENS = 8192
"""Context in tokens that justifies unloading an idle model."""


class AdmissionResult(NamedTuple):
    """Admission decision for a model. Byte counts are 0 for a model that is not loaded on this machine."""

    fits: bool
    """True if the model can be loaded now."""
    cramped: bool = False
    """True if the model fits only with a short context."""
    needed_bytes: int = 0
    """RAM and GPU memory together."""
    free_bytes: int = 0
    """RAM and GPU memory together."""
    advice: tuple[str, ...] = ()
    """Ways to make the model fit, best first."""
    gpu_bytes: int = 0
    """Part of `needed_bytes` on the GPU."""
    gpu_free_bytes: int = 0
    """Part of `free_bytes` on the GPU."""
    gpu_limit_bytes: int | None = None
    """The user's limit for GPU memory, None without a limit."""
    anyway: bool = False
    """Load the model even if it does not fit, once the others are unloaded."""
    reserve_bytes: int = 0
    """Free memory reserved for other programs; not part of `free_bytes`."""

    @property
    def ram_bytes(self) -> int:
        """Part of `needed_bytes` in RAM."""
        return self.needed_bytes - self.gpu_bytes

    def never_fits(self, entries: Iterable[PoolEntry]) -> bool:
        """Return True if the model would not fit even with all these entries unloaded."""
        if self.anyway:
            return False
        entries = list(entries)
        gpu = self.gpu_free_bytes + sum(entry.gpu_bytes for entry in entries)
        if self.gpu_limit_bytes is not None:
            gpu = min(gpu, self.gpu_limit_bytes)
        ram = self.free_bytes - self.gpu_free_bytes + sum(entry.ram_bytes for entry in entries)
        return self.gpu_bytes > gpu or self.ram_bytes > ram

    def gains_from(self, entry: PoolEntry) -> bool:
        """Return True if the entry uses memory of a kind that the model needs."""
        return bool((self.gpu_bytes and entry.gpu_bytes) or (self.ram_bytes and entry.ram_bytes))


def check_memory(options: EngineOptions, loaded: Iterable[PoolEntry]) -> AdmissionResult:
    """Compare a model's planned size with free memory.

    Memory that loaded engines will still claim is not free. Raises LocalchatError for a file or options that
    cannot be loaded.
    """
    # A remote model takes no memory here. A third-party backend class plans its own memory.
    if options.remote is not None or ":" in (options.backend or ""):
        return AdmissionResult(fits=True)
    model = read_summary(options.model, dummy_weights=options.load.dummy_weights)
    subject = Subject(options.name, model, options.model, options.backend)
    machine = usable_machine()
    limit = options.load.gpu_limit_bytes
    if limit is not None:
        limit *= max(len(machine.gpus), 1)
    plan = assess(subject, options.load, machine, None, speed=False).plan
    if plan.missing:
        demand(plan, options.name)
    entries = list(loaded)
    gpu = plan.gpu_bytes
    ram = plan.total_bytes - plan.gpu_bytes
    gpu_free = plan.gpu_free_bytes - sum(entry.uncounted_gpu_bytes for entry in entries)
    ram_free = plan.free_bytes - plan.gpu_free_bytes
    ram_free -= sum(entry.uncounted_ram_bytes for entry in entries)
    # A lack of memory that the model does not need must not fail the check.
    gpu_free = max(gpu_free, 0) if gpu else 0
    ram_free = max(ram_free, 0) if ram else 0
    has_room = gpu <= gpu_free and ram <= ram_free
    is_short = plan.context_tokens < min(model.context_train, _GOAL_TOKENS)
    return AdmissionResult(
        fits=plan.fits and (has_room or (options.load.anyway and not entries)),
        anyway=options.load.anyway,
        reserve_bytes=plan.reserve_bytes,
        cramped=options.load.context_tokens is None and is_short,
        needed_bytes=plan.total_bytes,
        free_bytes=gpu_free + ram_free,
        advice=plan.advice,
        gpu_bytes=gpu,
        gpu_free_bytes=gpu_free,
        gpu_limit_bytes=limit,
    )


def never_fits(spec: ModelSpec, admission: AdmissionResult) -> DoesNotFit:
    """Return the error for a model that does not fit alone, with ways to make room."""
    error = DoesNotFit(
        f"{spec.name} needs {size(admission.needed_bytes)}, and {size(admission.free_bytes)} are free"
        f"{kept_free(admission.reserve_bytes)}",
        hint="\n".join((*admission.advice, SEE_FIT)),
        needed_bytes=admission.needed_bytes,
        free_bytes=admission.free_bytes,
    )
    with suppress(LocalchatError):
        error.steps = tuple(step.as_json() for step in _steps(spec.options))
    return error


def _steps(options: EngineOptions) -> tuple[MemoryStep, ...]:
    if options.remote is not None or ":" in (options.backend or "") or not options.model.exists():
        return ()
    model = read_summary(options.model, dummy_weights=options.load.dummy_weights)
    subject = Subject(options.name, model, options.model, options.backend)
    limits = SlotLimit("--parallel", "", 1)
    paths = find_paths(os.environ)
    return memory_steps(subject, options.load, usable_machine(), paths, os.environ, limits)


def memory_in_use(
    spec: ModelSpec, admission: AdmissionResult, entries: Iterable[PoolEntry]
) -> EngineBusy:
    """Return the error for a model that would fit if a loaded one were idle."""
    uses = "; ".join(
        f"{entry.spec.name} ({size(entry.memory_bytes)}) by {entry.client_names()}"
        for entry in entries
    )
    return EngineBusy(
        f"{spec.name} needs {size(admission.needed_bytes)}, {size(admission.free_bytes)} are free, and the "
        f"loaded models are in use: {uses}",
        hint="try again when one is idle, or unload one: localchat stop MODEL",
        retry_after_s=RETRY_AFTER_S,
    )
