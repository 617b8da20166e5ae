"""Source of one rank's part of a checkpoint. Reads only that part from the files.

A table names the axis of each linear layer that is divided: its output features (rows) or its input features
(columns). Names of tensors then show where a storage format has that axis, so the formats load a part like a
smaller layer.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.weights.layer_shapes import linear_shapes, norm_widths
from localchat_cuda.weights.source import CheckpointWeights, Slices

_TRANSPOSED = ("qweight", "qzeros", "scales")
"""Tensors of AWQ and GPTQ, whose first axis are the input features."""
_GROUP_NUMBERS = ("g_idx", "weight_g_idx")
"""Numbers of the group of each input feature."""


class Cut(NamedTuple):
    """Features of one rank, out of all features of a layer."""

    total: int
    ranges: tuple[tuple[int, int], ...]
    """First feature and number of features, in order."""

    def total_size(self, size: int) -> int:
        """Return the size of a whole axis of which the rank has `size`."""
        return size * self.total // sum(length for _, length in self.ranges)

    def scaled(self, size: int, name: str) -> tuple[tuple[int, int], ...]:
        """Return the ranges on an axis of `size`.

        The axis may be packed, or have one number per group. Raises ModelInvalid if a range ends inside a word
        or group."""
        scaled = []
        for first, length in self.ranges:
            if first * size % self.total or length * size % self.total:
                raise ModelInvalid(
                    f"{name} cannot be divided among GPUs: a part ends inside a group of its scales.",
                    hint="Use one GPU (--gpus 1), another number of GPUs, or another quantization.",
                )
            scaled.append((first * size // self.total, length * size // self.total))
        return tuple(scaled)


class LinearCut(NamedTuple):
    """Part of a linear layer. None: all features."""

    rows: Cut | None = None
    columns: Cut | None = None


class RankWeights:
    """See WeightSource. Shapes are those of the rank's part."""

    def __init__(
        self, source: CheckpointWeights, config: ModelConfig, part: ModelConfig, rank: int
    ) -> None:
        """`config`: of the whole model. `part`: of one rank, from split_config."""
        self._source = source
        self._rank = rank
        self._part = part
        self._vocabulary = (config.family.names.embedding, config.family.names.head)
        self._linears = dict(_linear_cuts(config, part, rank))
        self._tensors = dict(_tensor_cuts(config, part, rank))

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._source.shape(name)
        axis, cut = self._find_cut(name, stored)
        if cut is None:
            return stored
        length = sum(length for _, length in cut.scaled(stored[axis], name))
        return _with_size(stored, axis, length)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name in self._vocabulary:
            return self._vocabulary_rows(name, shape, dtype)
        stored = self._source.shape(name)
        axis, cut = self._find_cut(name, stored)
        if cut is None:
            tensor = self._source.tensor(name, shape, dtype)
            if self._rank and name.endswith("down_proj_bias"):
                # Ranks add up their products, so that only one of them may add the bias.
                tensor = torch.zeros_like(tensor)
            return tensor
        slices = Slices(axis, cut.scaled(stored[axis], name))
        shape = _with_size(shape, axis, cut.total_size(shape[axis]))
        tensor = self._source.tensor(name, shape, dtype, slices)
        if name.endswith(_GROUP_NUMBERS):
            # Groups are numbered from the first one of the part. -1 means unset.
            tensor = tensor - tensor.min().clamp(min=0)
        return tensor

    def unread(self) -> list[str]:
        return self._source.unread()

    def _find_cut(self, name: str, stored: tuple[int, ...]) -> tuple[int, Cut | None]:
        """Return the axis and the part of a tensor of this shape. None: all of it."""
        axis, cut = self._tensors.get(name, (0, None))
        if cut is None:
            prefix, _, suffix = name.rpartition(".")
            axis, cut = _axis_of(suffix, self._linears.get(prefix, LinearCut()))
        # A single number counts for all features.
        if cut is None or axis >= len(stored) or stored[axis] == 1:
            return 0, None
        return axis, cut

    def _vocabulary_rows(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the rank's rows of the embedding or the head. Rows beyond the vocabulary are zeros."""
        rows, columns = shape
        vocabulary = self._part.vocabulary
        first = min(self._rank * rows, vocabulary)
        length = min(rows, vocabulary - first)
        slices = Slices(0, ((first, length),))
        tensor = self._source.tensor(name, (vocabulary, columns), dtype, slices)
        return torch.nn.functional.pad(tensor, (0, 0, 0, rows - length))


def _axis_of(suffix: str, linear: LinearCut) -> tuple[int, Cut | None]:
    """Return the axis and the part of a linear layer's tensor with this suffix."""
    if suffix in _GROUP_NUMBERS:
        return 0, linear.columns
    if suffix == "bias":
        return 0, linear.rows
    rows_axis = 0
    if suffix in _TRANSPOSED:
        rows_axis = 1
    if linear.columns is not None:
        return 1 - rows_axis, linear.columns
    return rows_axis, linear.rows


def _with_size(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """Return the shape with another size along one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def _cut(rank: int, ranks: int, *parts: tuple[int, int]) -> Cut | None:
    """Return the cut of joined parts. None: the rank has all features.

    `parts`: number of features of each part in the model, and in one rank."""
    if all(total == own for total, own in parts):
        return None
    ranges = []
    start = 0
    for total, own in parts:
        # Several ranks have the same key heads if there are fewer heads than ranks.
        ranges.append((start + rank * (total // own) // ranks * own, own))
        start += total
    return Cut(start, tuple(ranges))


def _linear_cuts(
    config: ModelConfig, part: ModelConfig, rank: int
) -> Iterator[tuple[str, LinearCut]]:
    """Yield the divided linear layers by their prefix."""
    names = config.family.names
    ranks = part.ranks
    for layer in range(config.layers):
        begin = names.layer.format(layer)
        own_shapes = linear_shapes(part, layer)
        for field, (parts, k) in linear_shapes(config, layer).items():
            own_parts, own_k = own_shapes[field]
            columns = _cut(rank, ranks, (k, own_k))
            pairs = list(zip(parts, own_parts, strict=True))
            prefixes = names.merged[field][: len(pairs)]
            if len(prefixes) == 1:
                yield begin + prefixes[0], LinearCut(_cut(rank, ranks, *pairs), columns)
                continue
            for prefix, pair in zip(prefixes, pairs, strict=True):
                yield begin + prefix, LinearCut(_cut(rank, ranks, pair), columns)
        if names.kv:
            assert config.latent is not None
            columns_of_head = config.latent.plain + config.latent.value
            pair = columns_of_head * config.heads, columns_of_head * part.heads
            yield begin + names.kv, LinearCut(_cut(rank, ranks, pair))
        if config.has_experts(layer) and names.experts is not None:
            yield from _expert_cuts(begin, names.experts, config, part, rank)


def _expert_cuts(
    begin: str, names: ExpertNames, config: ModelConfig, part: ModelConfig, rank: int
) -> Iterator[tuple[str, LinearCut]]:
    """Yield the linear layers of a layer's experts. Each expert is divided by its inner columns."""
    assert config.mixture is not None
    inner = _cut(rank, part.ranks, (config.intermediate, part.intermediate))
    for number in range(config.mixture.experts):
        for name in names.gate_up:
            yield begin + name.format(number), LinearCut(inner)
        yield begin + names.down.format(number), LinearCut(None, inner)
    if not config.mixture.shared or names.shared is None:
        return
    gate_up, down = names.shared
    pair = (
        config.intermediate * config.mixture.shared,
        part.intermediate * config.mixture.shared,
    )
    parts = 1 + config.family.gated_feed
    # Gate and up may be stored as one.
    pairs = [pair] * (parts // len(gate_up))
    for name in gate_up:
        yield begin + name, LinearCut(_cut(rank, part.ranks, *pairs))
    yield begin + down, LinearCut(None, _cut(rank, part.ranks, pair))


def _tensor_cuts(
    config: ModelConfig, part: ModelConfig, rank: int
) -> Iterator[tuple[str, tuple[int, Cut | None]]]:
    """Yield divided tensors that are no linear layers: the axis, and the cut."""
    names = config.family.names
    ranks = part.ranks
    for layer in range(config.layers):
        begin = names.layer.format(layer)
        if names.sinks:
            yield begin + names.sinks, (0, _cut(rank, ranks, (config.heads, part.heads)))
        own_widths = norm_widths(part, names, layer)
        for field, width in norm_widths(config, names, layer).items():
            yield begin + names.norms[field], (0, _cut(rank, ranks, (width, own_widths[field])))
        experts = names.experts
        if experts is None or not config.has_experts(layer):
            continue
        pair = config.intermediate, part.intermediate
        if experts.interleaved:
            yield from _interleaved_cuts(begin + experts.interleaved, pair, rank, ranks)
        elif experts.stacked is not None:
            gate_up, down = experts.stacked
            yield begin + gate_up, (1, _cut(rank, ranks, pair, pair))
            yield begin + down, (2, _cut(rank, ranks, pair))


def _interleaved_cuts(
    begin: str, pair: tuple[int, int], rank: int, ranks: int
) -> Iterator[tuple[str, tuple[int, Cut | None]]]:
    """Yield the tensors of interleaved_experts.py, in which rows of gate and up alternate."""
    rows = _cut(rank, ranks, (2 * pair[0], 2 * pair[1]))
    columns = _cut(rank, ranks, pair)
    yield f"{begin}gate_up_proj", (2, rows)
    yield f"{begin}gate_up_proj_bias", (1, rows)
    yield f"{begin}down_proj", (1, columns)
    for kind in ("blocks", "scales"):
        yield f"{begin}gate_up_proj_{kind}", (1, rows)
        yield f"{begin}down_proj_{kind}", (2, columns)
