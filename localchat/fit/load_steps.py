"""Finds the steps that make room for a load, by the planner that decides on the load itself.

It is asked again with one option changed, so that a step which is said to be enough is enough.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import structs

from localchat.fit.kv_types import FP8, number_bytes
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import LEAST_CONTEXT_TOKENS, MemoryPlan
from localchat.fit.memory_steps import MemoryStep
from localchat.units import size, tokens

Planner: TypeAlias = Callable[[LoadOptions], MemoryPlan]
"""Plans one model with other options."""

_SMALLER_KV: Final = ("q8_0", FP8)
"""KV types to go down to, in order. q4_0 is never proposed: it damages models whose keys have outliers."""


@dataclass(frozen=True, slots=True)
class SlotLimit:
    """How the number of requests at once is set where the load was asked for."""

    flag: str = "--n"
    key: str = "n"
    """The setting; empty: only the flag can."""
    least: int = 2


def load_steps(
    options: LoadOptions, plan: Planner, *, has_gpu: bool, slots: SlotLimit | None = None
) -> tuple[MemoryStep, ...]:
    """The first seven steps for a load with these options, which change no weights.

    `has_gpu`: whether a GPU could hold layers. Raises what `plan` raises.
    """
    return _LoadSteps(options, plan, has_gpu, slots or SlotLimit()).all()


def needed_bytes(plan: MemoryPlan) -> int:
    """Least memory of a plan: with one sequence's KV, and without copies that plentiful memory allows."""
    room = max(plan.kv_tokens, plan.context_tokens, 1)
    kv = plan.kv_bytes * plan.context_tokens // room
    return plan.total_bytes - plan.kv_bytes - plan.unpacked_bytes + kv


class _LoadSteps:
    def __init__(
        self, options: LoadOptions, plan: Planner, has_gpu: bool, slots: SlotLimit
    ) -> None:
        self._options = options
        self._plan = plan
        self._slots = slots
        self._has_gpu = has_gpu
        found = plan(options)
        # At one context, two plans differ by the step alone.
        self._fixed = structs.replace(options, context_tokens=found.context_tokens)
        self._base = plan(self._fixed)

    def all(self) -> tuple[MemoryStep, ...]:
        return (
            MemoryStep(
                "shorter_input",
                "memory is reserved for the whole context before an input is read",
            ),
            self._prefix_reuse(),
            MemoryStep(
                "chunked_prefill",
                f"always on: a prompt is read in steps of {tokens(self._base.max_step_tokens)}, whose "
                f"buffers are part of {size(self._base.compute_bytes)}",
            ),
            self._kv_type(),
            self._context(),
            self._gpu_layers(),
            self._fewer_slots(),
        )

    def _changed(self, **options: object) -> tuple[int, MemoryPlan]:
        """Bytes that other options save at the same context, and the plan that results."""
        same_context = self._plan(structs.replace(self._fixed, **options))
        saved = needed_bytes(self._base) - needed_bytes(same_context)
        return max(saved, 0), self._plan(structs.replace(self._options, **options))

    def _prefix_reuse(self) -> MemoryStep:
        asked = self._options.cache_ram_bytes or 0
        if not asked:
            return MemoryStep(
                "prefix_reuse", "it saves time: a reused prefix takes as much of the KV cache"
            )
        plan = self._plan(structs.replace(self._options, cache_ram_bytes=0))
        return MemoryStep(
            "prefix_reuse",
            "no RAM kept for prefixes of idle conversations, which are then computed anew",
            asked,
            suffices=plan.fits,
            flag="--cache-ram 0",
            settings=(("cache_ram_mib", "0"),),
        )

    def _kv_type(self) -> MemoryStep:
        now = number_bytes(self._base.kv_type) or 0.0
        smaller = [
            name
            for name in _SMALLER_KV
            if name in self._base.kv_types and (number_bytes(name) or now) < now
        ]
        if not smaller:
            return MemoryStep("kv_type", f"{self._base.kv_type} is the smallest for this model")
        steps = [self._kv_step(name) for name in smaller]
        return next((step for step in steps if step.suffices), steps[-1])

    def _kv_step(self, name: str) -> MemoryStep:
        saved, plan = self._changed(kv_type=name)
        coarse = (number_bytes(name) or 1.0) < 1.0
        return MemoryStep(
            "kv_type",
            f"KV cache in {name} rather than {self._base.kv_type}"
            f"{', which answers may suffer from' if coarse else ''}{self._then(plan)}",
            saved,
            suffices=plan.fits,
            flag=f"--kv-type {name}",
            settings=(("kv_cache_type", name),),
        )

    def _then(self, plan: MemoryPlan) -> str:
        """The context that a plan chose by itself."""
        chosen = plan.fits and self._options.context_tokens is None
        if chosen:
            return f", and {tokens(plan.context_tokens)} of context"
        return ""

    def _context(self) -> MemoryStep:
        now = self._base.context_tokens
        longest = self._base.max_context_tokens
        target = longest if longest >= LEAST_CONTEXT_TOKENS else LEAST_CONTEXT_TOKENS
        if target >= now:
            return MemoryStep("context", f"{tokens(now)} are few already")
        saved, plan = self._changed(context_tokens=target)
        windows = ", sliding-window layers with their window only" if plan.window_only else ""
        return MemoryStep(
            "context",
            f"{tokens(target)} rather than {now:,}{windows}",
            saved,
            suffices=plan.fits,
            flag=f"--ctx {target}",
            settings=(("context_length", str(target)),),
        )

    def _gpu_layers(self) -> MemoryStep:
        base = self._base
        if base.backend == "cuda":
            return MemoryStep(
                "gpu_layers",
                "this backend keeps all layers on the GPU; a GGUF on llama.cpp can leave some in RAM",
            )
        if not self._has_gpu:
            return MemoryStep("gpu_layers", "no GPU is used here")
        if self._options.gpu_layers == "auto":
            placed = f"{base.gpu_layers} of {base.layers}"
            return MemoryStep("gpu_layers", f"{placed} are there, as memory allows")
        fixed = self._plan(structs.replace(self._fixed, gpu_layers="auto"))
        if fixed.gpu_layers == base.gpu_layers:
            return MemoryStep("gpu_layers", f"{base.gpu_layers} of {base.layers} are there already")
        plan = self._plan(structs.replace(self._options, gpu_layers="auto"))
        freed = base.gpu_bytes - fixed.gpu_bytes
        kind = "graphics memory" if freed > 0 else "RAM"
        ram = base.total_bytes - base.gpu_bytes - (fixed.total_bytes - fixed.gpu_bytes)
        return MemoryStep(
            "gpu_layers",
            f"{fixed.gpu_layers} of {base.layers} rather than {base.gpu_layers}, which frees {kind}",
            max(freed, ram, 0),
            suffices=plan.fits,
            flag=f"--gpu-layers {fixed.gpu_layers}",
            settings=(("gpu_layers", str(fixed.gpu_layers)),),
        )

    def _fewer_slots(self) -> MemoryStep:
        now = self._options.max_slots
        least = self._slots.least
        if now <= least:
            return MemoryStep("slots", f"{now} at once is the least already")
        saved, plan = self._changed(max_slots=least)
        change = f"{least} at once rather than {now}"
        if not saved and not plan.fits:
            return MemoryStep("slots", f"{change}: all requests share one cache")
        return MemoryStep(
            "slots",
            change,
            saved,
            suffices=plan.fits,
            flag=f"{self._slots.flag} {least}",
            settings=((self._slots.key, str(least)),) if self._slots.key else (),
        )
