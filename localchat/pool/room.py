"""Whether one more model fits beside those that are loaded: asked of the backend's planner before a load."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from localchat.backends import backend_for
from localchat.engine.options import EngineOptions
from localchat.errors import DoesNotFit, EngineBusy
from localchat.fit.header import read_header
from localchat.fit.plan import LoadWish, demand
from localchat.fit.verdict import usable_machine
from localchat.fit.words import size
from localchat.pool.member import RETRY_AFTER_S, Member, Wanted

_GOAL_TOKENS = 8192
"""A context that is worth unloading an idle model for."""


class Verdict(NamedTuple):
    """fits: it can be loaded now. cramped: only with a context shorter than it should have. Bytes: 0 where
    nobody can know before the load. advice: what would help, best first."""

    fits: bool
    cramped: bool = False
    needed_bytes: int = 0
    free_bytes: int = 0
    advice: tuple[str, ...] = ()


class Room(Protocol):
    """Judges a load beside the engines that are there."""

    def judge(self, options: EngineOptions, beside: Iterable[Member]) -> Verdict:
        """Raises LocalchatError for a file or wish that no load can be made of."""
        ...


class MachineRoom:
    """By live free memory, less what engines hold of it without the system's knowing."""

    def judge(self, options: EngineOptions, beside: Iterable[Member]) -> Verdict:
        if options.remote is not None or options.model.is_dir():
            return Verdict(
                fits=True
            )  # nothing is loaded here; or no header to plan by: the engine decides as it loads
        header = read_header(options.model)
        plan = backend_for(options.model, options.backend).plan(
            header, _wish(options), usable_machine()
        )
        if plan.missing:
            demand(plan, options.name)
        free = plan.free_bytes - sum(member.hidden_bytes for member in beside)
        goal = min(header.number("context_length"), _GOAL_TOKENS)
        return Verdict(
            fits=plan.fits and plan.total_bytes <= free,
            cramped=options.context_tokens is None and plan.context_tokens < goal,
            needed_bytes=plan.total_bytes,
            free_bytes=max(free, 0),
            advice=plan.advice,
        )


def _wish(options: EngineOptions) -> LoadWish:
    return LoadWish(
        context_tokens=options.context_tokens,
        kv_type=options.kv_type,
        gpu_layers=options.gpu_layers,
        max_slots=options.max_slots,
        cache_ram_bytes=options.cache_ram_bytes,
        threads=options.threads,
        require_gpu=options.require_gpu,
        head_int8=options.head_int8,
    )


def never_fits(wanted: Wanted, verdict: Verdict) -> DoesNotFit:
    """Not even alone."""
    return DoesNotFit(
        f"{wanted.name} needs {size(verdict.needed_bytes)}, and {size(verdict.free_bytes)} are free",
        hint="\n".join(verdict.advice) or f"localchat fit {wanted.name} tells what would help",
        needed_bytes=verdict.needed_bytes,
        free_bytes=verdict.free_bytes,
    )


def all_used(wanted: Wanted, verdict: Verdict, members: Iterable[Member]) -> EngineBusy:
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
