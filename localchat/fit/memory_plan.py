"""What a load takes and whether it fits: formulas stand here once, and each backend's plan.py adds its buffers.

Sizes are bytes. A *cell* is the place of one token in a KV cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from localchat.errors import DoesNotFit
from localchat.fit.hardware import Machine
from localchat.model_files.architecture import LayerShape, ModelShape
from localchat.model_files.ggml_types import FILE_TYPES, KV_FORMATS, NumberFormat, stored_bytes
from localchat.units import size

ROUNDING_TOKENS = 256
LEAST_CONTEXT_TOKENS = 512
"""A context that the planner would choose by itself is never shorter (the trained one may be)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The verdict before a load, all sizes in bytes of the memory that bounds it.

    max_context_tokens: the largest context that fits with this KV type. advice: what would help, best
    first. notes: what was decided, in sentences, for the user. gpu_layers: of `layers`, which counts the
    output layer too. gpu_bytes, gpu_free_bytes: the part of the totals that is graphics memory.
    window_only: sliding-window layers keep only their window (then a prefix cannot be cut anywhere).
    mapped_bytes: file pages in RAM beside weights that were copied in another order; the system drops them
    where memory is short, so they count neither as needed nor as free. missing: what the load lacks besides
    memory, a sentence (then it does not fit). kv_types: how this model's cache can be kept, best first; empty
    where nobody knows.
    """

    backend: str
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int
    free_bytes: int
    fits: bool
    context_tokens: int
    max_context_tokens: int
    kv_type: str
    flash_attention: bool
    gpu_layers: int
    cache_ram_bytes: int
    max_step_tokens: int
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    layers: int = 0
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0
    window_only: bool = False
    mapped_bytes: int = 0
    missing: str = ""
    kv_types: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Everything that will be taken."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.overhead_bytes


def demand(plan: MemoryPlan, name: str) -> MemoryPlan:
    """The plan, where it fits. DoesNotFit with both numbers and the advice otherwise. `name`: the model."""
    if plan.fits:
        return plan
    if plan.missing:
        raise DoesNotFit(f"{name} is not loaded: {plan.missing}", hint="\n".join(plan.advice))
    raise DoesNotFit(
        f"{name} with {plan.context_tokens:,} tokens of context needs {size(plan.total_bytes)}, and "
        f"{size(plan.free_bytes)} are free.",
        hint="\n".join(plan.advice),
        needed_bytes=plan.total_bytes,
        free_bytes=plan.free_bytes,
        context_tokens=plan.context_tokens,
        max_context_tokens=plan.max_context_tokens,
    )


# ---------------------------------------------------------------------------- memory that may be taken


def reserve_bytes(total_bytes: int) -> int:
    """What is left alone of a memory of `total_bytes`: half a gigabyte, or a twentieth."""
    return max(500_000_000, total_bytes // 20)


def spendable_ram(machine: Machine) -> int:
    """RAM that a load may take now."""
    return max(machine.ram_free_bytes - reserve_bytes(machine.ram_total_bytes), 0)


def spendable_gpu(machine: Machine, most_bytes: int | None = None) -> int:
    """Graphics memory that a load may take now, all cards together. most_bytes: of each, None: all that is
    free."""
    free = (max(gpu.free_bytes - reserve_bytes(gpu.total_bytes), 0) for gpu in machine.gpus)
    return sum(each if most_bytes is None else min(each, most_bytes) for each in free)


# ---------------------------------------------------------------------------- weights


class Split(NamedTuple):
    """Bytes in RAM and bytes on the GPU."""

    ram: int
    gpu: int


def weights_split(shape: ModelShape, gpu_layers: int) -> Split:
    """Weights in RAM and on the GPU when the last `gpu_layers` layers are offloaded; the output is the last.

    The input embedding stays in RAM; where it is the output matrix too, the GPU gets a copy.
    """
    first = max(shape.all_layers + 1 - gpu_layers, 0)
    ram = gpu = 0
    tied = shape.tied
    for weight in shape.weights:
        if weight.part == "embedding":
            ram += weight.size_bytes
            gpu += weight.size_bytes if tied and gpu_layers > 0 else 0
        elif (
            gpu_layers > 0
            and (weight.layer if weight.part == "layer" else shape.all_layers) >= first
        ):
            gpu += weight.size_bytes
        else:
            ram += weight.size_bytes
    return Split(ram, gpu)


# ---------------------------------------------------------------------------- keys and values


class CacheSpec(NamedTuple):
    """A KV cache. cells: tokens of all sequences. window_cells: cells of layers with a sliding window
    (`cells` where they keep everything). sequences: states of recurrent layers. padded_values: all layers'
    values are as wide as the widest (llama.cpp without flash attention)."""

    cells: int
    window_cells: int
    sequences: int
    kv_type: str = "f16"
    padded_values: bool = False


def kv_layer_bytes(shape: ModelShape, spec: CacheSpec) -> tuple[int, ...]:
    """Keys, values and recurrent states per layer."""
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
    """Up to the next multiple of 256."""
    return -(-tokens // ROUNDING_TOKENS) * ROUNDING_TOKENS


def largest(fits: Callable[[int], bool], most: int, step: int = ROUNDING_TOKENS) -> int:
    """The largest multiple of `step` up to `most` (or `most` itself) for which `fits`, which must be true
    below and false above one border; 0: none."""
    if fits(most):
        return most
    low, high = 0, -(-most // step)
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
"""Of whole files: embeddings and outputs are stored finer than the name says."""


def smaller_quantization(shape: ModelShape, most_bytes: int) -> str:
    """The finest usual quantization of these weights that takes at most `most_bytes` and less than now;
    empty: none."""
    now = shape.weights_bytes
    names = list(_BITS_PER_WEIGHT)
    finer = names.index(shape.quantization) + 1 if shape.quantization in names else 0
    for name in names[finer:]:
        bits = _BITS_PER_WEIGHT[name]
        wanted = int(shape.parameters * bits / 8)
        if wanted <= most_bytes and wanted < 0.95 * now and name in FILE_TYPES.values():
            return name
    return ""
