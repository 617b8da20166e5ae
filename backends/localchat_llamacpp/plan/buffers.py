"""Bytes that llama.cpp allocates besides weights and KV, and the division of layers between GPUs.

The formulas fit `no_alloc` loads of llama-cpp-python 0.3.36 (Llama, Qwen2 and Gemma 3 shapes of 0.5 to 12 B,
contexts of 2,048 to 32,768, 128 and 512 tokens per step). The widest operation of a graph sets its scratch
buffer: the attention scores (without flash attention), the feed-forward block, or the logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localchat.fit.hardware import Gpu, Machine
from localchat.fit.memory_plan import rounded
from localchat.model_files.architecture import ModelShape, Weight
from localchat.model_files.projector import Projector

PROCESS_BYTES = 80_000_000
"""The engine process before it reads a model: interpreter, numpy, llama.cpp's libraries."""
TOKEN_BYTES = 400
"""Bytes per vocabulary entry, in llama.cpp and in Python."""
_GPU_CONTEXT_BYTES = 450_000_000
_LARGE_GPU_CONTEXT_BYTES = 640_000_000
_LARGE_GPU_BYTES = 60_000_000_000
STATE_WINDOW = 512
"""States of a sequence that are stored for a prediction head."""
_HEAD_TOKENS = 4096
"""Tokens of a text that a prediction head attends to."""
OUTPUT_ROWS = 64
SPARE_STATES = 2
"""Additional sequences of a model that cannot rewind. They store the states before drafts of two texts.

Each takes a state's memory, and with more texts at once drafts gain little.
"""


class Steps(NamedTuple):
    """Parameters of a native context."""

    slots: int
    """Sequences at once, without the scratch slot."""
    tokens: int
    """Limit on the tokens of a step."""

    @property
    def sequences(self) -> int:
        """Sequences as llama.cpp counts them."""
        return self.slots + 1

    @property
    def reserved_tokens(self) -> int:
        """Tokens for which llama.cpp sizes its graph: a multiple of the sequences."""
        return -(-self.tokens // self.sequences) * self.sequences

    @property
    def output_rows(self) -> int:
        """Rows with logits in one decode (n_outputs_max)."""
        return max(self.sequences, min(OUTPUT_ROWS, self.tokens))


def context_cells(context_tokens: int) -> int:
    """Return the cells of the cache for a context."""
    return rounded(context_tokens)


def head_cells(context_tokens: int, slots: int) -> int:
    """Return the cells of a prediction head's cache, which stores the end of each text."""
    return min(context_cells(context_tokens), slots * _HEAD_TOKENS)


def window_cells(shape: ModelShape, cells: int, steps: Steps) -> int:
    """Return the cells of a window-only layer for all sequences together."""
    return min(cells, rounded(shape.window * steps.sequences + steps.tokens))


def compute_bytes(
    shape: ModelShape, cells: int, sliding_cells: int, steps: Steps, *, flash: bool
) -> int:
    """Return the scratch buffer of a device that runs the whole graph."""
    tokens = steps.reserved_tokens
    attended = 0
    if any(layer.keys for layer in shape.layers):
        attended = cells
    masked = attended + (sliding_cells if shape.window else 0)
    mask = tokens * masked * (2 if flash else 4)
    query = max(shape.heads * shape.head_width, shape.embedding)
    keys = max((layer.keys for layer in shape.layers), default=0)
    attention = 4 * tokens * (5 * query + 2 * keys) + mask
    if not flash:
        attention += 4 * tokens * shape.heads * attended
    routed = 2 * shape.experts_used * shape.embedding
    forward = 4 * tokens * (3 * shape.feed_forward + 4 * shape.embedding + routed) + mask
    recurrent = 4 * tokens * (6 * shape.inner + 2 * shape.embedding) + mask
    state = max((layer.state for layer in shape.layers), default=0)
    logits = 4 * steps.output_rows * (shape.vocab_size + 2 * shape.embedding)
    if not shape.inner:
        return max(attention, forward, logits)
    return max(attention, forward, recurrent + 4 * steps.sequences * state, logits)


def input_bytes(shape: ModelShape, cells: int, steps: Steps) -> int:
    """Return the RAM of a graph that runs on a GPU: embedded tokens and masks."""
    masks = 2 if shape.window else 1
    return steps.reserved_tokens * (4 * shape.embedding + 4 * masks * cells)


def gpu_context_bytes(gpus: tuple[Gpu, ...]) -> int:
    """Return the memory of CUDA contexts and their libraries on all GPUs.

    It grows with the multiprocessors (640 MB measured on an H200). GPUs that cannot be read count as one.
    """
    sizes = [
        _LARGE_GPU_CONTEXT_BYTES if gpu.total_bytes > _LARGE_GPU_BYTES else _GPU_CONTEXT_BYTES
        for gpu in gpus
    ]
    return sum(sizes) or _GPU_CONTEXT_BYTES


def borrowed_bytes(shape: ModelShape, gpu_layers: int, experts_on_cpu: int = 0) -> int:
    """Return the GPU buffer for weights that stay in RAM.

    The GPU computes long prompts whole, and copies in the other weights, two matrices at a time (measured: 80
    to 95 MB of a 7B).
    """
    if gpu_layers <= 0:
        return 0
    first = shape.all_layers + 1 - gpu_layers
    in_ram = sorted(
        weight.size_bytes
        for weight in shape.weights
        if weight.part == "layer"
        and weight.layer < (max(first, experts_on_cpu) if weight.routed else first)
    )
    return sum(in_ram[-2:])


def overhead_bytes(shape: ModelShape, steps: Steps) -> int:
    """Return the RAM of the engine process: interpreter, vocabulary, copied logits."""
    logits = 4 * steps.output_rows * shape.vocab_size
    return PROCESS_BYTES + TOKEN_BYTES * shape.vocab_size + logits


_AVX2 = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
_ARM = frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
_AMX = frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16"})


class Repacked(NamedTuple):
    """Bytes of CPU weights that llama.cpp repacks (`use_extra_bufts`)."""

    copies: int = 0
    """Bytes of the repacked copies."""
    originals: int = 0
    """Bytes of the originals in the mapped file, which are not read again."""


def repacked_weights(shape: ModelShape, machine: Machine, gpu_layers: int) -> Repacked:
    """Return the bytes that llama.cpp repacks on this CPU."""
    formats, amx = _repacked_formats(machine.cpu_flags)
    # The output is offloaded first. A tied embedding serves as the output, and gets a copy for that.
    output = "output"
    if shape.tied:
        output = "embedding"
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
    """Return True if the repacking kernels support a matrix of these sides."""
    return 2 <= len(sides) <= (2 if amx else 3) and sides[1] % (32 if amx else 8) == 0


_AUDIO_FRAMES = 1500
"""Frames of half a minute of sound, which encoders of the Whisper family compute at once."""


def encoder_compute_bytes(encoder: Projector) -> int:
    """Return a projector's buffers for its largest picture and half a minute of sound.

    Measured with tiny models in xllamacpp 2026.10: seven vectors a patch, or the two sides of a wide layer.
    """
    sizes = (("vision", encoder.max_patches), ("audio", _AUDIO_FRAMES))
    total = 0
    for name, rows in sizes:
        width = encoder.number(name, "embedding_length")
        wide = encoder.number(name, "feed_forward_length")
        total += 4 * rows * max(7 * width, 2 * (width + wide))
    return total


_LEVELS = 256


def layer_weights(shape: ModelShape, gpu_layers: int, experts_on_cpu: int) -> list[int]:
    """Return the bytes of weights on GPUs for each offloaded layer. The last one is the output."""
    first = max(shape.all_layers + 1 - gpu_layers, 0)
    sizes = [0] * (shape.all_layers + 1)
    for weight in shape.weights:
        if weight.part == "lookup" or (weight.part == "embedding" and not shape.tied):
            continue
        layer = weight.layer if weight.part == "layer" else shape.all_layers
        if not (weight.routed and layer < experts_on_cpu):
            sizes[layer] += weight.size_bytes
    return sizes[first:]


def split_layers(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers of each GPU so that all are about equally full.

    sizes: bytes of the layers in order. rooms: bytes of each GPU. Layers that do not fit go to the last GPU.
    """
    for level in range(1, _LEVELS + 1):
        counts = _filled(sizes, [room * level // _LEVELS for room in rooms])
        if sum(counts) == len(sizes):
            return counts
    *before, _ = _filled(sizes, rooms)
    return (*before, len(sizes) - sum(before))


def _filled(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each GPU if each is filled completely."""
    counts = []
    layer = 0
    for room in rooms:
        start = layer
        used = 0
        while layer < len(sizes) and used + sizes[layer] <= room:
            used += sizes[layer]
            layer += 1
        counts.append(layer - start)
    return tuple(counts)


def tensor_split(layers: Sequence[int]) -> list[float]:
    """Return the shares for which llama.cpp puts this many layers on each GPU.

    llama.cpp puts layer i of n on the first GPU whose cumulative share exceeds i/n. With half a layer less on
    the first GPU, every border is in the middle between two layers, so rounding cannot move a layer.
    """
    first, *others = layers
    shares = [first - 0.5 if first else 0.0, *map(float, others)]
    shares[-1] += 0.5 if first else 0.0
    return shares
