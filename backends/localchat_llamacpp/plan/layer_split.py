"""Divides the layers of a model between several GPUs, as llama.cpp's split mode `layer` does.

Layers go to the GPUs in their order and are never divided. llama.cpp takes shares (`tensor_split`) and gives
layer i of n to the first GPU whose cumulative share exceeds i/n, so a share of whole layers less a half names
the borders exactly, whatever the rounding.
"""

from collections.abc import Sequence

from localchat.model_files.architecture import ModelShape

_LEVELS = 256


def layer_weights(shape: ModelShape, gpu_layers: int, experts_on_cpu: int) -> list[int]:
    """Bytes of weights on GPUs, of each offloaded layer; the last is the output."""
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
    """Number of layers of each GPU, so that all are filled to about the same degree.

    sizes: of the layers in order; rooms: bytes of each GPU. Where they do not fit, the last GPU gets the rest.
    """
    for level in range(1, _LEVELS + 1):
        counts = _filled(sizes, [room * level // _LEVELS for room in rooms])
        if sum(counts) == len(sizes):
            return counts
    *before, _ = _filled(sizes, rooms)
    return (*before, len(sizes) - sum(before))


def _filled(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """Layers of each GPU where each takes as many as it has room for."""
    counts = []
    place = 0
    for room in rooms:
        start = place
        taken = 0
        while place < len(sizes) and taken + sizes[place] <= room:
            taken += sizes[place]
            place += 1
        counts.append(place - start)
    return tuple(counts)


def tensor_split(layers: Sequence[int]) -> list[float]:
    """The shares that make llama.cpp give so many layers to each GPU; the borders lie between two layers."""
    first, *rest = layers
    shares = [first - 0.5 if first else 0.0, *map(float, rest)]
    shares[-1] += 0.5 if first else 0.0
    return shares
