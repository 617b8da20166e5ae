"""Steps that make room for a load or a prompt: nine, in order, each with its gain on this machine.

The order is that of the loss to the user: cutting the input costs nothing, a smaller model answers worse.
`load_steps` plans the load again with one option changed, so a step that is said to suffice does suffice.
models/substitutes.py adds the steps that change weights, and chat/prompt_steps.py has those of a prompt.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from localchat.fit.kv_types import FP8, number_bytes
from localchat.fit.load_options import LoadOptions
from localchat.units import size, tokens

# memory_plan probes the hardware, and screens import this module before their first frame.
if TYPE_CHECKING:
    from localchat.fit.memory_plan import MemoryPlan

StepName: TypeAlias = Literal[
    "shorter_input",
    "prefix_reuse",
    "chunked_prefill",
    "kv_type",
    "context",
    "gpu_layers",
    "slots",
    "quantization",
    "model",
]
TITLES: Final[dict[StepName, str]] = {
    "shorter_input": "shorter input",
    "prefix_reuse": "prefix reuse",
    "chunked_prefill": "chunked prefill",
    "kv_type": "KV type",
    "context": "context",
    "gpu_layers": "layers on the GPU",
    "slots": "fewer slots",
    "quantization": "smaller quantization",
    "model": "smaller model",
}

IN_ORDER: Final = "What makes room, in order of what it costs you:"
_TRIFLE: Final = 100
_SMALLER_KV: Final = ("q8_0", FP8)
"""KV types to propose, in order. q4_0 is missing: it damages models whose keys have outliers."""


class MemoryStep(msgspec.Struct, frozen=True):
    """A step towards a load or a prompt that fits."""

    name: StepName
    change: str
    """The change, or why the step gives nothing here."""
    gained_bytes: int = 0
    """Memory that it frees."""
    gained_tokens: int = 0
    """Room for a prompt that it adds."""
    suffices: bool = False
    """Whether it is enough by itself."""
    flag: str = ""
    """Flags, or the command, that apply it."""
    settings: tuple[tuple[str, str], ...] = ()
    """Keys and values that apply it."""
    model: str = ""
    """Model to use instead."""
    is_trifle: bool = False
    """Whether it frees too little to be worth a thought."""

    @property
    def helps(self) -> bool:
        """Whether it gives anything here."""
        gains = self.gained_bytes > 0 and not self.is_trifle
        return self.suffices or gains or self.gained_tokens > 0

    @property
    def can_be_taken(self) -> bool:
        """Whether the program can apply it. The other steps are up to the user."""
        return self.helps and bool(self.settings or self.model)

    @property
    def is_here(self) -> bool:
        """Whether its model is on this machine."""
        return self.flag.startswith("-m ")

    @property
    def title(self) -> str:
        """Name for people."""
        return TITLES[self.name]

    @property
    def gain(self) -> str:
        """`frees 1.2 GB, which is enough`."""
        if not self.helps:
            return "frees nothing here"
        gains = []
        if self.gained_bytes > 0:
            gains.append(f"frees {size(self.gained_bytes)}")
        if self.gained_tokens > 0:
            gains.append(f"adds room for {tokens(self.gained_tokens)}")
        if not gains:
            return "enough" if self.suffices else "not enough by itself"
        verdict = "which is enough" if self.suffices else "not enough by itself"
        return f"{' and '.join(gains)}, {verdict}"

    def sentence(self, *, with_flag: bool = True) -> str:
        """Return the step in one line."""
        flag = ""
        if with_flag and self.flag and self.helps:
            flag = f" ({self.flag})"
        return f"{self.title}: {self.change}; {self.gain}{flag}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `--json` and of the endpoint."""
        return {
            "step": self.name,
            "change": self.change,
            "gained_bytes": self.gained_bytes,
            "gained_tokens": self.gained_tokens,
            "suffices": self.suffices,
            "flag": self.flag or None,
            "settings": dict(self.settings),
            "model": self.model or None,
        }


def step_lines(steps: tuple[MemoryStep, ...]) -> Iterator[str]:
    """Yield the steps that help, in order with their numbers. `as_json` has the others too."""
    for number, step in enumerate((step for step in steps if step.helps), 1):
        yield f"{number}. {step.sentence()}"


Planner: TypeAlias = "Callable[[LoadOptions], MemoryPlan]"
"""Plans the load of one model with other options."""


@dataclass(frozen=True, slots=True)
class SlotLimit:
    """How a front end sets the number of requests at once."""

    flag: str = "--n"
    key: str = "n"
    """Setting with that number. Empty if only the flag sets it."""
    min_slots: int = 2


def load_steps(
    options: LoadOptions, plan: Planner, *, has_gpu: bool, slots: SlotLimit | None = None
) -> tuple[MemoryStep, ...]:
    """Return the first seven steps for a load with these options, which change no weights.

    has_gpu: whether a GPU could hold layers. Raises what `plan` raises.
    """
    # With a fixed context, two plans differ by the step alone.
    fixed = msgspec.structs.replace(options, context_tokens=plan(options).context_tokens)
    load = _Load(options, fixed, plan, plan(fixed))
    return (
        MemoryStep(
            "shorter_input", "memory is reserved for the whole context before an input is read"
        ),
        _prefix_reuse_step(load),
        MemoryStep(
            "chunked_prefill",
            f"always on: a prompt is read in steps of {tokens(load.base.max_step_tokens)}, whose "
            f"buffers are part of {size(load.base.compute_bytes)}",
        ),
        _kv_type_step(load),
        _context_step(load),
        _gpu_layers_step(load, has_gpu=has_gpu),
        _slots_step(load, slots or SlotLimit()),
    )


def without_trifles(steps: Iterable[MemoryStep], missing_bytes: int) -> tuple[MemoryStep, ...]:
    """Mark steps that free less than a hundredth of the missing memory, so that people do not see them."""
    return tuple(
        msgspec.structs.replace(step, is_trifle=True)
        if not step.suffices and 0 < step.gained_bytes * _TRIFLE < missing_bytes
        else step
        for step in steps
    )


def needed_bytes(plan: "MemoryPlan") -> int:
    """Return the minimum memory of a plan: one sequence's KV, and no copies that spare memory allows."""
    kv_tokens = max(plan.kv_tokens, plan.context_tokens, 1)
    kv_bytes = plan.kv_bytes * plan.context_tokens // kv_tokens
    return plan.total_bytes - plan.kv_bytes - plan.unpacked_bytes + kv_bytes


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that does not fit."""

    options: LoadOptions
    fixed: LoadOptions
    """The options with the context that the planner chose."""
    plan: Planner
    base: "MemoryPlan"
    """Plan of the fixed options."""

    def changed(self, **changes: object) -> tuple[int, "MemoryPlan"]:
        """Return the bytes that changed options save at the same context, and the resulting plan."""
        same_context = self.plan(msgspec.structs.replace(self.fixed, **changes))
        saved = needed_bytes(self.base) - needed_bytes(same_context)
        return max(saved, 0), self.plan(msgspec.structs.replace(self.options, **changes))


def _prefix_reuse_step(load: _Load) -> MemoryStep:
    cache_bytes = load.options.cache_ram_bytes or 0
    if not cache_bytes:
        return MemoryStep(
            "prefix_reuse", "it saves time: a reused prefix takes as much of the KV cache"
        )
    plan = load.plan(msgspec.structs.replace(load.options, cache_ram_bytes=0))
    return MemoryStep(
        "prefix_reuse",
        "no RAM kept for prefixes of idle conversations, which are then computed anew",
        cache_bytes,
        suffices=plan.fits,
        flag="--cache-ram 0",
        settings=(("cache_ram_mib", "0"),),
    )


def _kv_type_step(load: _Load) -> MemoryStep:
    """Return the first smaller KV type that suffices, else the smallest."""
    current_bytes = number_bytes(load.base.kv_type) or 0.0
    smaller = [
        name
        for name in _SMALLER_KV
        if name in load.base.kv_types and (number_bytes(name) or current_bytes) < current_bytes
    ]
    if not smaller:
        return MemoryStep("kv_type", f"{load.base.kv_type} is the smallest for this model")
    steps = [_smaller_kv_step(load, name) for name in smaller]
    return next((step for step in steps if step.suffices), steps[-1])


def _smaller_kv_step(load: _Load, kv_type: str) -> MemoryStep:
    saved, plan = load.changed(kv_type=kv_type)
    change = f"KV cache in {kv_type} rather than {load.base.kv_type}"
    if (number_bytes(kv_type) or 1.0) < 1.0:
        change += ", which answers may suffer from"
    if plan.fits and load.options.context_tokens is None:
        change += f", and {tokens(plan.context_tokens)} of context"
    return MemoryStep(
        "kv_type",
        change,
        saved,
        suffices=plan.fits,
        flag=f"--kv-type {kv_type}",
        settings=(("kv_cache_type", kv_type),),
    )


def _context_step(load: _Load) -> MemoryStep:
    from localchat.fit.memory_plan import MIN_CONTEXT_TOKENS

    context = load.base.context_tokens
    target = max(load.base.max_context_tokens, MIN_CONTEXT_TOKENS)
    if target >= context:
        return MemoryStep("context", f"{tokens(context)} are few already")
    saved, plan = load.changed(context_tokens=target)
    windows = ""
    if plan.window_only:
        windows = ", sliding-window layers with their window only"
    return MemoryStep(
        "context",
        f"{tokens(target)} rather than {context:,}{windows}",
        saved,
        suffices=plan.fits,
        flag=f"--ctx {target}",
        settings=(("context_length", str(target)),),
    )


def _gpu_layers_step(load: _Load, *, has_gpu: bool) -> MemoryStep:
    base = load.base
    if base.backend == "cuda":
        return MemoryStep(
            "gpu_layers",
            "this backend keeps all layers on the GPU; a GGUF on llama.cpp can leave some in RAM",
        )
    if not has_gpu:
        return MemoryStep("gpu_layers", "no GPU is used here")
    if load.options.gpu_layers == "auto":
        placed = f"{base.gpu_layers} of {base.layers}"
        return MemoryStep("gpu_layers", f"{placed} are there, as memory allows")
    automatic = load.plan(msgspec.structs.replace(load.fixed, gpu_layers="auto"))
    if automatic.gpu_layers == base.gpu_layers:
        return MemoryStep("gpu_layers", f"{base.gpu_layers} of {base.layers} are there already")
    plan = load.plan(msgspec.structs.replace(load.options, gpu_layers="auto"))
    freed_gpu = base.gpu_bytes - automatic.gpu_bytes
    freed_ram = base.total_bytes - base.gpu_bytes - (automatic.total_bytes - automatic.gpu_bytes)
    kind = "RAM"
    if freed_gpu > 0:
        kind = "graphics memory"
    return MemoryStep(
        "gpu_layers",
        f"{automatic.gpu_layers} of {base.layers} rather than {base.gpu_layers}, which frees {kind}",
        max(freed_gpu, freed_ram, 0),
        suffices=plan.fits,
        flag=f"--gpu-layers {automatic.gpu_layers}",
        settings=(("gpu_layers", str(automatic.gpu_layers)),),
    )


def _slots_step(load: _Load, slots: SlotLimit) -> MemoryStep:
    current = load.options.max_slots
    if current <= slots.min_slots:
        return MemoryStep("slots", f"{current} at once is the least already")
    saved, plan = load.changed(max_slots=slots.min_slots)
    change = f"{slots.min_slots} at once rather than {current}"
    if not saved and not plan.fits:
        return MemoryStep("slots", f"{change}: all requests share one cache")
    return MemoryStep(
        "slots",
        change,
        saved,
        suffices=plan.fits,
        flag=f"{slots.flag} {slots.min_slots}",
        settings=((slots.key, str(slots.min_slots)),) if slots.key else (),
    )
