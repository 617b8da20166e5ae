"""Bytes that llama.cpp allocates besides weights and KV, from the shape of a model.

Formulas fitted to `no_alloc` loads of llama-cpp-python 0.3.36 (Llama, Qwen2 and Gemma 3 shapes of 0.5 to 12 B,
contexts of 2,048 to 32,768, 128 and 512 tokens a step): the scratch of a graph is its widest moment, which is
the attention scores (without flash attention), the feed-forward block, or the logits.
"""

from typing import NamedTuple

from localchat.fit.hardware import Gpu, Machine
from localchat.fit.memory_plan import rounded
from localchat.model_files.architecture import ModelShape, Weight

PROCESS_BYTES = 80_000_000
"""The engine process before it reads a model: interpreter, numpy, llama.cpp's libraries."""
TOKEN_BYTES = 400
"""Of the vocabulary, per token, in llama.cpp and in Python."""
_GPU_CONTEXT_BYTES = 450_000_000
_LARGE_GPU_CONTEXT_BYTES = 640_000_000
_LARGE_GPU_BYTES = 60_000_000_000
OUTPUT_ROWS = 64
SPARE_STATES = 2
"""Further sequences of a model that cannot rewind: they hold the states from before drafts, for two texts at
once. Each takes a state's memory, and with more texts at once drafts bring little."""


class Steps(NamedTuple):
    """Parameters of a native context."""

    slots: int
    """Sequences at once, without that of the warm-up."""
    tokens: int
    """Most tokens of a step."""

    @property
    def sequences(self) -> int:
        """As llama.cpp counts them."""
        return self.slots + 1

    @property
    def reserved_tokens(self) -> int:
        """llama.cpp measures its graph with a multiple of the sequences."""
        return -(-self.tokens // self.sequences) * self.sequences

    @property
    def output_rows(self) -> int:
        """Rows with logits in one decode (n_outputs_max)."""
        return max(self.sequences, min(OUTPUT_ROWS, self.tokens))


def context_cells(context_tokens: int) -> int:
    """Cells of the cache for a context."""
    return rounded(context_tokens)


def window_cells(shape: ModelShape, cells: int, steps: Steps) -> int:
    """Cells of a sliding-window layer that keeps only its window, for all sequences together."""
    return min(cells, rounded(shape.window * steps.sequences + steps.tokens))


def compute_bytes(
    shape: ModelShape, cells: int, sliding_cells: int, steps: Steps, *, flash: bool
) -> int:
    """Scratch buffer of one device that runs the whole graph."""
    tokens = steps.reserved_tokens
    seen = cells if any(layer.keys for layer in shape.layers) else 0
    mask = tokens * (seen + (sliding_cells if shape.window else 0)) * (2 if flash else 4)
    query = max(shape.heads * shape.head_width, shape.embedding)
    keys = max((layer.keys for layer in shape.layers), default=0)
    attention = 4 * tokens * (5 * query + 2 * keys) + mask
    if not flash:
        attention += 4 * tokens * shape.heads * seen
    routed = 2 * shape.experts_used * shape.embedding
    forward = 4 * tokens * (3 * shape.feed_forward + 4 * shape.embedding + routed) + mask
    recurrent = 4 * tokens * (6 * shape.inner + 2 * shape.embedding) + mask
    state = max((layer.state for layer in shape.layers), default=0)
    logits = 4 * steps.output_rows * (shape.vocab_size + 2 * shape.embedding)
    return max(
        attention, forward, recurrent + 4 * steps.sequences * state if shape.inner else 0, logits
    )


def input_bytes(shape: ModelShape, cells: int, steps: Steps) -> int:
    """RAM of a graph that runs on a GPU: embedded tokens and masks."""
    masks = 2 if shape.window else 1
    return steps.reserved_tokens * (4 * shape.embedding + 4 * masks * cells)


def gpu_context_bytes(gpus: tuple[Gpu, ...]) -> int:
    """Memory of a CUDA context and its libraries, on all GPUs.

    More where there are more multiprocessors (640 MB measured on an H200). A GPU that cannot be read counts
    as one.
    """
    sizes = [
        _LARGE_GPU_CONTEXT_BYTES if gpu.total_bytes > _LARGE_GPU_BYTES else _GPU_CONTEXT_BYTES
        for gpu in gpus
    ]
    return sum(sizes) or _GPU_CONTEXT_BYTES


def borrowed_bytes(shape: ModelShape, gpu_layers: int, experts_on_cpu: int = 0) -> int:
    """Buffer on a GPU that holds a part of the layers, or all without some experts.

    A long prompt is computed there whole, and the weights of the other layers are copied in for it, two
    matrices at a time (measured: 80 to 95 MB of a 7B).
    """
    first = shape.all_layers + 1 - gpu_layers
    if gpu_layers <= 0:
        return 0
    left = sorted(
        weight.size_bytes
        for weight in shape.weights
        if weight.part == "layer"
        and weight.layer < (max(first, experts_on_cpu) if weight.routed else first)
    )
    return sum(left[-2:])


def overhead_bytes(shape: ModelShape, steps: Steps) -> int:
    """RAM of the engine process: interpreter, vocabulary, copied logits."""
    logits = 4 * steps.output_rows * shape.vocab_size
    return PROCESS_BYTES + TOKEN_BYTES * shape.vocab_size + logits


# ---------------------------------------------------------------------------- repacked weights

_AVX2 = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
_ARM = frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
_AMX = frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16"})


class Repacked(NamedTuple):
    """CPU weights that llama.cpp copies in another order (`use_extra_bufts`), in bytes."""

    copies: int = 0
    """What it keeps."""
    originals: int = 0
    """Their pages of the mapped file, which are not read again."""


def repacked_weights(shape: ModelShape, machine: Machine, gpu_layers: int) -> Repacked:
    """Bytes of these weights that are copied on this CPU."""
    formats, amx = _repacked_formats(machine.cpu_flags)
    # The output is offloaded first; a tied embedding serves as the output and gets a copy for that.
    output = "embedding" if shape.tied else "output"
    first_on_gpu = shape.all_layers + 1 - gpu_layers

    def in_ram(weight: Weight) -> bool:
        if weight.part == "layer":
            return weight.layer < first_on_gpu
        return weight.part == output and gpu_layers == 0

    copied = [
        weight
        for weight in shape.weights
        if weight.format.name in formats and _repackable(weight.shape, amx=amx) and in_ram(weight)
    ]
    originals = sum(weight.size_bytes for weight in copied)
    # AMX stores sums beside its tiles, except for F16, which it takes as it is.
    tiles = sum(weight.size_bytes for weight in copied if amx and weight.format.name != "F16")
    return Repacked(originals + tiles // 50, originals)


def _repacked_formats(flags: frozenset[str]) -> tuple[frozenset[str], bool]:
    if {"amx_int8", "avx512_vnni"} <= flags:
        return _AMX, True
    if "avx2" in flags:
        return (_AVX2 | {"Q2_K"} if "avx512f" in flags else _AVX2), False
    return (_ARM if "asimddp" in flags else frozenset()), False


def _repackable(sides: tuple[int, ...], *, amx: bool) -> bool:
    """True if the copying kernels take a matrix of these sides."""
    return 2 <= len(sides) <= (2 if amx else 3) and sides[1] % (32 if amx else 8) == 0
