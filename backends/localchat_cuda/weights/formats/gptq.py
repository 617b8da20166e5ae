"""GPTQ's format of 4 or 8 bits: symmetric or not, both conventions of the zeros, act-order.

Letters: N output and K input features, G groups along K.

    qweight  int32 [K/8, N]     eight input features in a word (of 8 bits: four), the lowest bits first
    qzeros   int32 [G, N/8]     eight output features in a word
    scales   fp16 or bf16 [G, N]
    g_idx    int32 [K]          the group of each column; with act-order groups are scattered

Version 1 stores a zero minus one, and version 2 stores it unchanged. The label in config.json is often wrong,
so the stored zeros decide if they are clear. Symmetric zeros all become 8 (128 for 8 bits) after the right
decoding. Asymmetric ones are at the middle of a group's codes, because weights are negative as often as
positive. In version 1, GPTQModel subtracts one from whole words, so that a zero of 0 borrows from its neighbor.
Others subtract from each code. For such zeros the middle of the codes decides, too.

Frantar et al., 2022 (arXiv 2210.17323); layouts of AutoGPTQ and GPTQModel.
"""

from typing import NamedTuple

import torch

from localchat_cuda.config.quantization import Quantization
from localchat_cuda.weights.formats.repack import (
    column_order,
    group_size,
    pack_weight,
    unpack_codes,
)
from localchat_cuda.weights.formats.weight import Weight, all_true
from localchat_cuda.weights.formats.weight_format import WeightFormat
from localchat_cuda.weights.source import LoadTarget

_CLEARLY = 0.4
"""Difference between two conventions' distances from the middle, in codes, that decides between them.

In groups of 128 normally distributed weights, right zeros are off by 0.2 to 0.4 and wrong ones by about 1."""
_ONES = {4: 0x11111111, 8: 0x01010101}


class _GptqTensors(NamedTuple):
    """Stored tensors of a layer."""

    codes: torch.Tensor
    """uint8 [N, K], with columns sorted by `order` unless that is None."""
    words: torch.Tensor
    """Stored qzeros."""
    scales: torch.Tensor
    order: torch.Tensor | None
    bits: int

    @property
    def zeros(self) -> torch.Tensor:
        """Zeros as stored, uint8 [N, G]."""
        return unpack_codes(self.words, 1, self.bits).t()

    @property
    def max_code(self) -> int:
        """Largest code."""
        return (1 << self.bits) - 1


class Gptq(WeightFormat):
    """See WeightFormat."""

    suffixes = (".qweight",)

    def __init__(self, target: LoadTarget, quantization: Quantization) -> None:
        super().__init__(target, quantization)
        self.zeros_minus_one = quantization.zeros_minus_one
        """Convention of the zeros, corrected when a layer clearly contradicts it."""

    def part(self, prefix: str, n: int, k: int) -> Weight:
        stored = self._read(prefix, n, k)
        if not stored.words.is_meta:
            self._detect_convention(stored)
        zeros = self._zeros(stored)
        scales = stored.scales.t()
        return pack_weight(prefix, stored.codes, scales, zeros, self.quantization, stored.order)

    def _read(self, prefix: str, n: int, k: int) -> _GptqTensors:
        size = group_size(prefix, k, self.quantization.group)
        bits = self.quantization.bits
        codes_per_word = 32 // bits
        tensor = self.target.tensor
        act_order = self.quantization.act_order
        order = column_order(prefix, "g_idx", k, size, self.target, act_order=act_order)
        words = tensor(f"{prefix}.qweight", (k // codes_per_word, n), torch.int32)
        codes = unpack_codes(words, 0, bits).t()
        if order is not None:
            codes = codes[:, order]
        return _GptqTensors(
            codes,
            tensor(f"{prefix}.qzeros", (k // size, n // codes_per_word), torch.int32),
            tensor(f"{prefix}.scales", (k // size, n), torch.float16),
            order,
            bits,
        )

    def _detect_convention(self, layer: _GptqTensors) -> None:
        """Adopt the layer's convention of zeros if it clearly contradicts config.json, and notify the user."""
        zeros_minus_one = _stored_minus_one(layer)
        if zeros_minus_one is None or zeros_minus_one == self.zeros_minus_one:
            return
        self.zeros_minus_one = zeros_minus_one
        claimed = "minus one (GPTQ version 1)"
        actual = "as they are (version 2)"
        if zeros_minus_one:
            claimed = "as they are (GPTQ version 2)"
            actual = "minus one (version 1)"
        self.target.notify(
            f"config.json says that zeros are stored {claimed}, but they are stored {actual}. They are read "
            "accordingly."
        )

    def _zeros(self, layer: _GptqTensors) -> torch.Tensor:
        """Return the zeros, uint8 [N, G]. Adds the one that files of version 1 subtract.

        If that is ambiguous, take the reading whose zeros are nearer to the mean codes.
        """
        stored = layer.zeros
        if not self.zeros_minus_one:
            return stored
        by_code = (stored + 1) & layer.max_code
        if all_true(stored != layer.max_code, on_meta=True):
            return by_code
        # A zero of 0 was stored as the largest code, with or without a borrow from its neighbor.
        by_word = _borrowed(layer)
        means = _mean_codes(layer)
        differ = by_code != by_word
        distance_by_code = (by_code.float() - means)[differ].abs().sum()
        distance_by_word = (by_word.float() - means)[differ].abs().sum()
        return by_code if bool(distance_by_code < distance_by_word) else by_word


def _borrowed(layer: _GptqTensors) -> torch.Tensor:
    """Return the zeros [N, G] of words whose codes were decremented with borrows."""
    unsigned = (layer.words.to(torch.int64) & 0xFFFFFFFF) + _ONES[layer.bits] & 0xFFFFFFFF
    words = torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)
    return unpack_codes(words, 1, layer.bits).t()


def _mean_codes(layer: _GptqTensors) -> torch.Tensor:
    """Return the mean code of each group [N, G]."""
    n = layer.codes.shape[0]
    groups = layer.words.shape[0]
    runs = layer.codes.reshape(n, groups, -1)
    return runs.sum(-1, dtype=torch.int32) / runs.shape[2]


def _stored_minus_one(layer: _GptqTensors) -> bool | None:
    """Return True if the zeros are stored minus one; None if that is unclear."""
    stored = layer.zeros
    symmetric = 1 << (layer.bits - 1)
    low = int(stored.min())
    high = int(stored.max())
    if low == high and low in (symmetric - 1, symmetric):
        return low == symmetric - 1
    means = _mean_codes(layer)
    distance = float((means - stored).abs().mean())
    distance_plus_one = float((means - ((stored + 1) & layer.max_code)).abs().mean())
    if abs(distance - distance_plus_one) < _CLEARLY:
        return None
    return distance_plus_one < distance
