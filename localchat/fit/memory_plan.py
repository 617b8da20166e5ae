"""Formulas of a load's memory that both backends share, and the plan that results.

Each backend's memory_plan.py adds its buffers. Sizes are bytes. A *cell* is the place of one token in a KV
cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from localchat.errors import DoesNotFit, UsageError
from localchat.fit.hardware import Machine
from localchat.model_files.architecture import LayerShape, ModelShape
from localchat.model_files.ggml_types import FILE_TYPES, KV_FORMATS, NumberFormat, stored_bytes
from localchat.units import size, tokens

ROUNDING_TOKENS = 256
MIN_CONTEXT_TOKENS = 512
"""Shortest context that a planner chooses by itself (unless the model was trained for less)."""


class GpuShare(NamedTuple):
    """The part of a load that one of several GPUs takes."""

    layers: int
    """The output layer counts as one."""
    size_bytes: int
    total_bytes: int
    """Memory of the whole GPU, by which a backend finds it again."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Verdict on a load before it starts. Sizes are in bytes of the memory that bounds it."""

    backend: str
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int
    free_bytes: int
    """Memory that the load may take."""
    fits: bool
    context_tokens: int
    max_context_tokens: int
    """Largest context that fits with this KV type."""
    kv_type: str
    flash_attention: bool
    gpu_layers: int
    """Of `layers`, which counts the output layer too."""
    cache_ram_bytes: int
    """RAM for prefixes that are swapped to the host."""
    max_step_tokens: int
    advice: tuple[str, ...] = ()
    """What would help, best first."""
    notes: tuple[str, ...] = ()
    """What was decided, in sentences for the user."""
    layers: int = 0
    gpu_bytes: int = 0
    """Graphics memory within the total."""
    gpu_free_bytes: int = 0
    """Graphics memory within `free_bytes`."""
    window_only: bool = False
    """Sliding-window layers keep only their window, so a prefix cannot be truncated anywhere."""
    mapped_bytes: int = 0
    """File pages of weights that were also copied in another order, or of which a token reads one row. The
    system drops them where memory is short, so they count neither as needed nor as free."""
    missing: str = ""
    """What the load lacks besides memory, a sentence; then it does not fit."""
    kv_types: tuple[str, ...] = ()
    """KV types that this model can have, best first; empty: unknown."""
    reserve_bytes: int = 0
    """Free memory that is kept for other programs; not within `free_bytes`."""
    unpacked_bytes: int = 0
    """Within `weights_bytes`: a copy of packed weights for the gemms of prompts, where memory is plentiful."""
    head_bounds: bool = False
    """The weights count an int8 copy of the output head, which saves most reads of the head itself."""
    draft_bytes: int = 0
    """Within `compute_bytes`: a draft model, or the model's own prediction head, with its KV."""
    prediction_head: bool = False
    """The model's own prediction head is loaded, and drafts."""
    saved_states: int = 0
    """States of recurrent layers that are kept on the GPU for prefixes; within `compute_bytes`."""

    kv_tokens: int = 0
    """Room of the KV cache for all conversations together; 0: unknown."""
    window_pages: int = 0
    """Pages that layers with a sliding window have apart from the others, within `kv_bytes`; 0: none."""
    slots: int = 0
    """Sequences computed at once; 0: as many as were asked for."""
    experts_on_cpu: int = 0
    """Layers, counted from the first, whose experts stay in RAM although the layer is on the GPU."""
    gpu_shares: tuple[GpuShare, ...] = ()
    """Layers of each GPU, in order; empty with fewer than two GPUs."""

    def conversations(self, length_tokens: int) -> int:
        """The most conversations of this length that the KV cache holds at once; 0 if the load does not fit."""
        if self.fits:
            return self.kv_tokens // max(length_tokens, 1)
        return 0

    @property
    def total_bytes(self) -> int:
        """All memory of the load."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.overhead_bytes


def machine_beside(machine: Machine, plan: MemoryPlan) -> Machine:
    """The machine with this plan loaded. Several GPUs give in proportion to what they have free."""
    free = max(machine.gpu_free_bytes, 1)
    gpus = tuple(
        replace(gpu, free_bytes=max(gpu.free_bytes - plan.gpu_bytes * gpu.free_bytes // free, 0))
        for gpu in machine.gpus
    )
    in_ram = plan.total_bytes - (0 if machine.unified_memory else plan.gpu_bytes)
    return replace(machine, gpus=gpus, ram_free_bytes=max(machine.ram_free_bytes - in_ram, 0))


def check_context(name: str, requested: int | None, limit: int, *, anyway: bool) -> None:
    """Raise UsageError for a context beyond the trained length, unless `anyway`. limit: 0 if unknown."""
    if not limit or (requested or 0) <= limit or anyway:
        return
    model = name.rpartition("/")[2]
    raise UsageError(
        f"{model} was trained for a context of {tokens(limit)}, and {requested:,} were requested.",
        hint=f"Use --ctx {limit} or less. --anyway loads it regardless, but answers beyond the trained "
        "length are often nonsense.",
    )


def demand(plan: MemoryPlan, name: str) -> MemoryPlan:
    """The plan itself if it fits. Raises DoesNotFit with both numbers and the advice. name: the model."""
    if plan.fits:
        return plan
    if plan.missing:
        raise DoesNotFit(f"{name} is not loaded: {plan.missing}", hint="\n".join(plan.advice))
    raise DoesNotFit(
        f"{name} with {plan.context_tokens:,} tokens of context needs {size(plan.total_bytes)}, and "
        f"{size(plan.free_bytes)} are free{kept_free(plan.reserve_bytes)}.",
        hint="\n".join(all_advice(plan)),
        needed_bytes=plan.total_bytes,
        free_bytes=plan.free_bytes,
        context_tokens=plan.context_tokens,
        max_context_tokens=plan.max_context_tokens,
    )


# ---------------------------------------------------------------------------- memory that may be taken


ANYWAY = "--anyway loads it regardless; the system may kill it when memory runs out."
_RESERVE_BYTES = 500_000_000


def all_advice(plan: MemoryPlan) -> tuple[str, ...]:
    """Remedies for a load that does not fit, best first, and the way past the verdict."""
    if plan.fits or plan.missing or not plan.reserve_bytes:
        return plan.advice  # without a reserve, the user asked for it anyway
    return (*plan.advice, ANYWAY)


def kept_free(reserve_bytes: int) -> str:
    """The part of a sentence that names the reserve; empty without one."""
    if reserve_bytes:
        return f", besides {size(reserve_bytes)} kept for other programs"
    return ""


def gpu_reserve_bytes(total_bytes: int) -> int:
    """Graphics memory left free on a GPU: half a gigabyte, or a twentieth."""
    return max(_RESERVE_BYTES, total_bytes // 20)


def ram_reserve_bytes(machine: Machine) -> int:
    """RAM left free: half a gigabyte, or a twentieth; a sixteenth of a small machine or container."""
    total = machine.ram_total_bytes
    return max(min(_RESERVE_BYTES, total // 16), total // 20)


def spendable_ram(machine: Machine, *, anyway: bool = False) -> int:
    """RAM that a load may take now. anyway: without a reserve."""
    reserve = 0 if anyway else ram_reserve_bytes(machine)
    return max(machine.ram_free_bytes - reserve, 0)


def spendable_gpu(machine: Machine, most_bytes: int | None = None, *, anyway: bool = False) -> int:
    """Graphics memory that a load may take now, all GPUs together. most_bytes: a limit for each."""
    return sum(spendable_gpus(machine, most_bytes, anyway=anyway))


def spendable_gpus(
    machine: Machine, most_bytes: int | None = None, *, anyway: bool = False
) -> tuple[int, ...]:
    """The same for each GPU."""
    free = (
        max(gpu.free_bytes - (0 if anyway else gpu_reserve_bytes(gpu.total_bytes)), 0)
        for gpu in machine.gpus
    )
    return tuple(each if most_bytes is None else min(each, most_bytes) for each in free)


# ---------------------------------------------------------------------------- weights


class Split(NamedTuple):
    """Bytes in RAM and bytes on the GPU."""

    ram: int
    gpu: int


def weights_split(shape: ModelShape, gpu_layers: int, experts_on_cpu: int = 0) -> Split:
    """Weights in RAM and on the GPU when the last `gpu_layers` layers are offloaded.

    The output counts as the last layer. The input embedding stays in RAM; where it is the output matrix too,
    the GPU gets a copy. Experts of the first `experts_on_cpu` layers stay in RAM.
    """
    first = max(shape.all_layers + 1 - gpu_layers, 0)
    ram = gpu = 0
    tied = shape.tied
    for weight in shape.weights:
        if weight.part == "embedding":
            ram += weight.size_bytes
            gpu += weight.size_bytes if tied and gpu_layers > 0 else 0
        elif weight.part == "lookup":
            ram += weight.size_bytes
        elif (
            gpu_layers > 0
            and (weight.layer if weight.part == "layer" else shape.all_layers) >= first
            and not (weight.routed and weight.layer < experts_on_cpu)
        ):
            gpu += weight.size_bytes
        else:
            ram += weight.size_bytes
    return Split(ram, gpu)


# ---------------------------------------------------------------------------- keys and values


class CacheSpec(NamedTuple):
    """Size of a KV cache."""

    cells: int
    """Tokens of all sequences."""
    window_cells: int
    """Cells of layers with a sliding window; `cells` where they keep everything."""
    sequences: int
    """States of recurrent layers."""
    kv_type: str = "f16"
    padded_values: bool = False
    """All layers' values are as wide as the widest (llama.cpp without flash attention)."""


def kv_layer_bytes(shape: ModelShape, spec: CacheSpec) -> tuple[int, ...]:
    """Bytes of keys, values and recurrent states, per layer."""
    format_ = KV_FORMATS[spec.kv_type]
    widest = max((layer.values for layer in shape.layers), default=0) if spec.padded_values else 0
    return tuple(_layer_bytes(layer, spec, format_, widest) for layer in shape.layers)


def _layer_bytes(layer: LayerShape, spec: CacheSpec, format_: NumberFormat, widest: int) -> int:
    cells = spec.window_cells if layer.sliding else spec.cells
    values = max(layer.values, widest if layer.values else 0)
    row = stored_bytes(format_, layer.keys) + stored_bytes(format_, values)
    return cells * row + spec.sequences * layer.state * 4


def kv_types(shape: ModelShape) -> tuple[str, ...]:
    """KV types whose blocks divide this model's head width, best first."""
    rows = {width for layer in shape.layers for width in (layer.keys, layer.values) if width}
    return tuple(
        name
        for name, format_ in KV_FORMATS.items()
        if shape.head_width % format_.block == 0 and all(row % format_.block == 0 for row in rows)
    )


# ---------------------------------------------------------------------------- the largest that fits


def rounded(tokens: int) -> int:
    """Tokens rounded up to the next multiple of 256."""
    return -(-tokens // ROUNDING_TOKENS) * ROUNDING_TOKENS


def largest(fits: Callable[[int], bool], most: int, step: int = ROUNDING_TOKENS) -> int:
    """Largest multiple of `step` up to `most` (or `most` itself) for which `fits` is true; 0: none.

    `fits` must be true below and false above one border.
    """
    if fits(most):
        return most
    low = 0
    high = -(-most // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


# ---------------------------------------------------------------------------- another quantization

_BITS_PER_WEIGHT = {
    "Q8_0": 8.5,
    "Q6_K": 6.6,
    "Q5_K_M": 5.7,
    "Q4_K_M": 4.9,
    "Q3_K_M": 3.9,
    "Q2_K": 3.0,
    "IQ2_XXS": 2.2,
}
"""Of whole files: embeddings and outputs are stored finer than the name suggests."""


_ROUGH_BITS = 3.5


def is_rough(quantization: str) -> bool:
    """Whether a usual quantization has so few bits that a smaller model answers better."""
    return _BITS_PER_WEIGHT[quantization] < _ROUGH_BITS


def smaller_quantization(shape: ModelShape, most_bytes: int) -> str:
    """The finest usual quantization of these weights within `most_bytes` and below the present size; empty:
    none."""
    now = shape.weights_bytes
    for name, share in smaller_quantizations(shape).items():
        if now * share <= most_bytes:
            return name
    return ""


def smaller_quantizations(shape: ModelShape) -> dict[str, float]:
    """Usual quantizations below the present size, the finest first, with their share of it."""
    now = shape.weights_bytes
    names = list(_BITS_PER_WEIGHT)
    finer = names.index(shape.quantization) + 1 if shape.quantization in names else 0
    shares = {
        name: shape.parameters * _BITS_PER_WEIGHT[name] / 8 / max(now, 1)
        for name in names[finer:]
        if name in FILE_TYPES.values()
    }
    return {name: share for name, share in shares.items() if share < 0.95}


def usual_bits(quantization: str) -> float | None:
    """Bits a weight of a usual quantization; None for another name."""
    return {"F16": 16.0, "BF16": 16.0, **_BITS_PER_WEIGHT}.get(quantization)
