"""Memory formulas that both backends share, and the plan of a load.

Each backend's plan/memory_plan.py adds its buffers. Sizes are bytes. A *cell* of a KV cache stores one token.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    """Part of a load on one of several GPUs."""

    layers: int
    """The output layer counts as one."""
    size_bytes: int
    total_bytes: int
    """Memory of the whole GPU, by which a backend recognizes it."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Verdict on a load before it starts. Sizes are in bytes of the memory that bounds it.

    Size: `fit`, the loaders and the engine's statistics read every field.
    """

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
    """Longest context that fits with this KV type."""
    kv_type: str
    flash_attention: bool
    gpu_layers: int
    """Layers on the GPU, out of `layers`, which counts the output layer too."""
    cache_ram_bytes: int
    """RAM for prefixes that are swapped to the host."""
    max_step_tokens: int
    advice: tuple[str, ...] = ()
    """Sentences on what would help besides the steps of every load (steps.py), best first."""
    notes: tuple[str, ...] = ()
    """Sentences on what was decided."""
    loss: str = ""
    """Sentence on the quality that a chosen option costs. It is among `notes` too."""
    layers: int = 0
    gpu_bytes: int = 0
    """Graphics memory within the total."""
    gpu_free_bytes: int = 0
    """Graphics memory within `free_bytes`."""
    window_only: bool = False
    """Whether sliding-window layers store only their window, which limits where a prefix can be cut."""
    mapped_bytes: int = 0
    """Cached file pages of repacked weights and lookup tables.

    The system drops them when memory is short, so they count neither as needed nor as free.
    """
    missing: str = ""
    """Sentence on what the load lacks besides memory. Not empty only if it does not fit."""
    kv_types: tuple[str, ...] = ()
    """KV types that this model can have, best first. Empty if unknown."""
    reserve_bytes: int = 0
    """Free memory that is kept for other programs, in addition to `free_bytes`."""
    unpacked_bytes: int = 0
    """Part of `weights_bytes`: an unpacked copy of packed weights, which speeds up prompts."""
    head_bounds: bool = False
    """Whether the weights include an int8 copy of the output head."""
    draft_bytes: int = 0
    """Part of `compute_bytes`: a draft model, or the model's own prediction head, with its KV."""
    prediction_head: bool = False
    """Whether the model's own prediction head is loaded to draft."""
    saved_states: int = 0
    """States of recurrent layers saved on the GPU for prefixes. Part of `compute_bytes`."""

    kv_tokens: int = 0
    """Tokens that the KV cache stores in all. 0 if unknown."""
    window_pages: int = 0
    """Pages in the pool of sliding-window layers. Part of `kv_bytes`. 0: one pool for all layers."""
    slots: int = 0
    """Sequences computed at once. 0: the requested number."""
    experts_on_cpu: int = 0
    """Layers on the GPU whose experts stay in RAM, from the first."""
    gpus: int = 1
    """GPUs that compute every layer together. The sizes on GPUs are those of each one."""
    gpu_shares: tuple[GpuShare, ...] = ()
    """Layers of each GPU, in order. Empty with fewer than two GPUs."""

    def conversations(self, length_tokens: int) -> int:
        """Return how many conversations of this length the KV cache stores. 0 if the load does not fit."""
        if self.fits:
            return self.kv_tokens // max(length_tokens, 1)
        return 0

    @property
    def total_bytes(self) -> int:
        """All memory of the load."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.overhead_bytes


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
    """Return the plan if it fits. Raises DoesNotFit with both numbers and the advice. name: the model."""
    if plan.fits:
        return plan
    if plan.missing:
        raise DoesNotFit(f"{name} is not loaded: {plan.missing}", hint="\n".join(plan.advice))
    raise DoesNotFit(
        f"{name} with {plan.context_tokens:,} tokens of context needs {size(plan.total_bytes)}, and "
        f"{size(plan.free_bytes)} are free{kept_free(plan.reserve_bytes)}.",
        hint="\n".join((*all_advice(plan), SEE_FIT)),
        needed_bytes=plan.total_bytes,
        free_bytes=plan.free_bytes,
        context_tokens=plan.context_tokens,
        max_context_tokens=plan.max_context_tokens,
    )


SEE_FIT = "`localchat fit MODEL` lists what makes room."
ANYWAY = "--anyway loads it regardless; the system may kill it when memory runs out."
_RESERVE_BYTES = 500_000_000


def all_advice(plan: MemoryPlan) -> tuple[str, ...]:
    """Return the backend's remedies for a load that does not fit, and the overriding flag."""
    # `--anyway` sets the reserve to zero.
    if plan.fits or plan.missing or not plan.reserve_bytes:
        return plan.advice
    return (*plan.advice, ANYWAY)


def kept_free(reserve_bytes: int) -> str:
    """Return the part of a sentence that names the reserve. Empty without one."""
    if reserve_bytes:
        return f", besides {size(reserve_bytes)} kept for other programs"
    return ""


def gpu_reserve_bytes(total_bytes: int) -> int:
    """Return the graphics memory to leave free: half a gigabyte, or a twentieth."""
    return max(_RESERVE_BYTES, total_bytes // 20)


def ram_reserve_bytes(machine: Machine) -> int:
    """Return the RAM to leave free: half a gigabyte or a twentieth, but a sixteenth of a small machine."""
    total = machine.ram_total_bytes
    return max(min(_RESERVE_BYTES, total // 16), total // 20)


def spendable_ram(machine: Machine, *, anyway: bool = False) -> int:
    """Return the RAM that a load may take now. anyway: without a reserve."""
    reserve = 0 if anyway else ram_reserve_bytes(machine)
    return max(machine.ram_free_bytes - reserve, 0)


def spendable_gpu(machine: Machine, limit_bytes: int | None = None, *, anyway: bool = False) -> int:
    """Return the graphics memory of all GPUs that a load may take now. limit_bytes: for each GPU."""
    return sum(spendable_gpus(machine, limit_bytes, anyway=anyway))


def spendable_gpus(
    machine: Machine, limit_bytes: int | None = None, *, anyway: bool = False
) -> tuple[int, ...]:
    """Return the memory of each GPU that a load may take now."""
    sizes = []
    for gpu in machine.gpus:
        reserve = 0 if anyway else gpu_reserve_bytes(gpu.total_bytes)
        free_bytes = max(gpu.free_bytes - reserve, 0)
        sizes.append(free_bytes if limit_bytes is None else min(free_bytes, limit_bytes))
    return tuple(sizes)


class Split(NamedTuple):
    """Bytes in RAM and bytes on the GPU."""

    ram: int
    gpu: int


def weights_split(shape: ModelShape, gpu_layers: int, experts_on_cpu: int = 0) -> Split:
    """Divide the weights between RAM and GPU when the last `gpu_layers` layers are offloaded.

    The output counts as the last layer. The input embedding stays in RAM. If it is the output matrix too, the
    GPU gets a copy. Experts of the first `experts_on_cpu` layers stay in RAM.
    """
    first_on_gpu = max(shape.all_layers + 1 - gpu_layers, 0)
    embedding_on_gpu = shape.tied and gpu_layers > 0
    ram = 0
    gpu = 0
    for weight in shape.weights:
        if weight.part in ("embedding", "lookup"):
            ram += weight.size_bytes
            if weight.part == "embedding" and embedding_on_gpu:
                gpu += weight.size_bytes
            continue
        layer = weight.layer if weight.part == "layer" else shape.all_layers
        stays_in_ram = weight.routed and weight.layer < experts_on_cpu
        if gpu_layers > 0 and layer >= first_on_gpu and not stays_in_ram:
            gpu += weight.size_bytes
        else:
            ram += weight.size_bytes
    return Split(ram, gpu)


class CacheSpec(NamedTuple):
    """Size of a KV cache."""

    cells: int
    """Tokens of all sequences."""
    window_cells: int
    """Cells of layers with a sliding window. `cells` if they store everything."""
    sequences: int
    """Sequences with a state in recurrent layers."""
    kv_type: str = "f16"
    padded_values: bool = False
    """Whether all layers' values are as wide as the widest (llama.cpp without flash attention)."""


def kv_layer_bytes(shape: ModelShape, spec: CacheSpec) -> tuple[int, ...]:
    """Return the bytes of keys, values and recurrent states of each layer."""
    format_ = KV_FORMATS[spec.kv_type]
    widest = 0
    if spec.padded_values:
        widest = max((layer.values for layer in shape.layers), default=0)
    return tuple(_layer_bytes(layer, spec, format_, widest) for layer in shape.layers)


def _layer_bytes(layer: LayerShape, spec: CacheSpec, format_: NumberFormat, widest: int) -> int:
    cells = spec.window_cells if layer.sliding else spec.cells
    values = max(layer.values, widest if layer.values else 0)
    row = stored_bytes(format_, layer.keys) + stored_bytes(format_, values)
    return cells * row + spec.sequences * layer.state * 4


def kv_types(shape: ModelShape) -> tuple[str, ...]:
    """Return the KV types whose blocks divide this model's head width, best first."""
    rows = {width for layer in shape.layers for width in (layer.keys, layer.values) if width}
    return tuple(
        name
        for name, format_ in KV_FORMATS.items()
        if shape.head_width % format_.block == 0 and all(row % format_.block == 0 for row in rows)
    )


def rounded(tokens: int) -> int:
    """Round tokens up to the next multiple of 256."""
    return -(-tokens // ROUNDING_TOKENS) * ROUNDING_TOKENS


def largest(fits: Callable[[int], bool], limit: int, step: int = ROUNDING_TOKENS) -> int:
    """Return the largest multiple of `step` up to `limit`, or `limit` itself, that fits.

    `fits` must be true up to some number and false above it. 0 if it is false everywhere.
    """
    if fits(limit):
        return limit
    low = 0
    high = -(-limit // step)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step


_BITS_PER_WEIGHT = {
    "Q8_0": 8.5,
    "Q6_K": 6.6,
    "Q5_K_M": 5.7,
    "Q4_K_M": 4.9,
    "Q3_K_M": 3.9,
    "Q2_K": 3.0,
    "IQ2_XXS": 2.2,
}
"""Bits of whole files, whose embeddings and outputs are finer than the name suggests."""


_ROUGH_BITS = 3.5


def is_rough(quantization: str) -> bool:
    """Return True if a smaller model answers better than this usual quantization."""
    return _BITS_PER_WEIGHT[quantization] < _ROUGH_BITS


def smaller_quantizations(shape: ModelShape) -> dict[str, float]:
    """Return the usual quantizations below the present size, finest first, with their share of it."""
    if "MXFP4" in shape.quantization.upper():
        # The makers trained the experts in 4 bits, and every other file of the model keeps them.
        return {}
    present_bytes = shape.weights_bytes
    names = list(_BITS_PER_WEIGHT)
    finer = 0
    if shape.quantization in names:
        finer = names.index(shape.quantization) + 1
    shares = {
        name: shape.parameters * _BITS_PER_WEIGHT[name] / 8 / max(present_bytes, 1)
        for name in names[finer:]
        if name in FILE_TYPES.values()
    }
    return {name: share for name, share in shares.items() if share < 0.95}


def usual_bits(quantization: str) -> float | None:
    """Return the bits per weight of a usual quantization. None for another name."""
    return {"F16": 16.0, "BF16": 16.0, **_BITS_PER_WEIGHT}.get(quantization)
