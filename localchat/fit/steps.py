"""Steps that make room for a load, each with its gain on this machine.

The order is that of the loss to the user: a coarser KV cache costs little, a smaller model answers worse.
`load_steps` plans the load again with one option changed, so a step that is said to suffice does suffice.
models/substitutes.py adds the steps that change weights, and chat/prompt_steps.py has those of a prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from localchat.fit.kv_types import smaller_kv_type
from localchat.fit.load_options import LoadOptions
from localchat.units import size, tokens

# memory_plan probes the hardware, and screens import this module before their first frame.
if TYPE_CHECKING:
    from localchat.fit.memory_plan import MemoryPlan

StepName: TypeAlias = Literal[
    "shorter_input",
    "kv_type",
    "context",
    "gpu_layers",
    "slots",
    "quantization",
    "model",
]
TITLES: Final[dict[StepName, str]] = {
    "shorter_input": "shorter input",
    "kv_type": "KV type",
    "context": "context",
    "gpu_layers": "layers on the GPU",
    "slots": "fewer slots",
    "quantization": "smaller quantization",
    "model": "another model",
}

IN_ORDER: Final = "What makes room, in order of what it costs you:"
_TRIFLE: Final = 100
"""A step that frees less than this part of the missing memory is not listed."""


class MemoryStep(msgspec.Struct, frozen=True):
    """A step towards a load or a prompt that fits."""

    name: StepName
    change: str
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

    @property
    def can_be_taken(self) -> bool:
        """Whether the program can apply it. The other steps are up to the user."""
        return bool(self.settings or self.model)

    @property
    def is_here(self) -> bool:
        """Whether its model is on this machine."""
        return self.flag.startswith("-m ")

    def is_worth(self, missing_bytes: int) -> bool:
        """Return whether the step frees enough bytes to be listed."""
        return self.suffices or self.gained_bytes * _TRIFLE > max(missing_bytes, 0)

    @property
    def gain(self) -> str:
        """`frees 1.2 GB, which is enough`."""
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
        if self.name == "shorter_input":
            return self.change  # its title and its gain would only repeat it
        flag = f" ({self.flag})" if with_flag and self.flag else ""
        return f"{TITLES[self.name]}: {self.change}; {self.gain}{flag}"

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
    """Yield the steps in order with their numbers."""
    for number, step in enumerate(steps, 1):
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
) -> Iterator[MemoryStep]:
    """Yield the steps for a load with these options that change no weights.

    has_gpu: whether a GPU could hold layers. Raises what `plan` raises.
    """
    # With a fixed context, two plans differ by the step alone.
    fixed = msgspec.structs.replace(options, context_tokens=plan(options).context_tokens)
    load = _Load(options, fixed, plan, plan(fixed))
    yield from _kv_type_steps(load)
    yield from _context_steps(load)
    if has_gpu and load.base.backend != "cuda" and options.gpu_layers != "auto":
        yield from _gpu_layers_steps(load)
    yield from _slots_steps(load, slots or SlotLimit())


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


def _kv_type_steps(load: _Load) -> Iterator[MemoryStep]:
    small = smaller_kv_type(load.base.kv_type, load.base.kv_types)
    if small is None or not load.base.kv_types:
        return
    saved, plan = load.changed(kv_type=small.kv_type)
    change = f"KV cache in {small.kv_type} rather than {load.base.kv_type}"
    if plan.fits and load.options.context_tokens is None:
        change += f", and {tokens(plan.context_tokens)} of context"
    yield MemoryStep(
        "kv_type",
        change,
        saved,
        suffices=plan.fits,
        flag=f"--kv-type {small.kv_type}",
        settings=(("kv_cache_type", small.kv_type),),
    )


def _context_steps(load: _Load) -> Iterator[MemoryStep]:
    from localchat.fit.memory_plan import MIN_CONTEXT_TOKENS

    context = load.base.context_tokens
    target = max(load.base.max_context_tokens, MIN_CONTEXT_TOKENS)
    if target < context:
        saved, plan = load.changed(context_tokens=target)
        windows = ""
        if plan.window_only:
            windows = ", sliding-window layers with their window only"
        yield MemoryStep(
            "context",
            f"{tokens(target)} rather than {context:,}{windows}",
            saved,
            suffices=plan.fits,
            flag=f"--ctx {target}",
            settings=(("context_length", str(target)),),
        )


def _gpu_layers_steps(load: _Load) -> Iterator[MemoryStep]:
    """Yield the number of layers for which the GPU has memory, if it is another."""
    base = load.base
    automatic = load.plan(msgspec.structs.replace(load.fixed, gpu_layers="auto"))
    if automatic.gpu_layers != base.gpu_layers:
        plan = load.plan(msgspec.structs.replace(load.options, gpu_layers="auto"))
        freed_gpu = base.gpu_bytes - automatic.gpu_bytes
        freed_ram = base.total_bytes - automatic.total_bytes - freed_gpu
        kind = "graphics memory" if freed_gpu > 0 else "RAM"
        yield MemoryStep(
            "gpu_layers",
            f"{automatic.gpu_layers} of {base.layers} rather than {base.gpu_layers}, which frees {kind}",
            max(freed_gpu, freed_ram, 0),
            suffices=plan.fits,
            flag=f"--gpu-layers {automatic.gpu_layers}",
            settings=(("gpu_layers", str(automatic.gpu_layers)),),
        )


def _slots_steps(load: _Load, slots: SlotLimit) -> Iterator[MemoryStep]:
    current = load.options.max_slots
    if current > slots.min_slots:
        saved, plan = load.changed(max_slots=slots.min_slots)
        yield MemoryStep(
            "slots",
            f"{slots.min_slots} at once rather than {current}",
            saved,
            suffices=plan.fits,
            flag=f"{slots.flag} {slots.min_slots}",
            settings=((slots.key, str(slots.min_slots)),) if slots.key else (),
        )
