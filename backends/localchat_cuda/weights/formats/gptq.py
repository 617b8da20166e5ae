"""GPTQ's format of 4 or 8 bits: symmetric or not, both conventions of the zeros, act-order.

Letters: N output and K input features, G groups along K.

    qweight  int32 [K/8, N]     eight input features in a word (of 8 bits: four), the lowest bits first
    qzeros   int32 [G, N/8]     eight output features in a word
    scales   fp16 or bf16 [G, N]
    g_idx    int32 [K]          the group of each column; with act-order groups are scattered

Version 1 stores a zero minus one, version 2 as it is. The label in config.json is often wrong, so the stored
zeros decide if they are clear: symmetric zeros are 8 (of 8 bits: 128), all of them, after the right decoding;
asymmetric ones are at the middle of a group's codes, since weights are as often negative as positive. Version 1
subtracts one from whole words (GPTQModel), so that a zero of 0 borrows from its neighbour, or from each code
(others); if there is such a zero, the middle of the codes decides, too.

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
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.source import LoadTarget
from localchat_cuda.weights.values import all_true

_CLEARLY = 0.4
"""Codes by which zeros of one convention must be nearer to the middle than those of the other. The right
ones are off by 0.2 to 0.4 in groups of 128 normal weights, the wrong ones by about 1."""
_ONES = {4: 0x11111111, 8: 0x01010101}


class _GptqTensors(NamedTuple):
    """Stored tensors of a layer."""

    codes: torch.Tensor
    """uint8 [N, K], their columns sorted by `order` if there is one."""
    words: torch.Tensor
    """qzeros as stored."""
    scales: torch.Tensor
    order: torch.Tensor | None
    bits: int

    @property
    def zeros(self) -> torch.Tensor:
        """uint8 [N, G], as stored."""
        return unpack_codes(self.words, 1, self.bits).t()

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


class Gptq:
    """See formats.WeightFormat."""

    def __init__(self, target: LoadTarget, quantization: Quantization) -> None:
        self.target = target
        self.quantization = quantization
        self.zeros_minus_one = quantization.zeros_minus_one
        """The convention of the zeros; corrected when a layer clearly contradicts it."""

    def holds(self, prefix: str) -> bool:
        return self.target.source.has(f"{prefix}.qweight")

    def part(self, prefix: str, n: int, k: int) -> Weight:
        found = self._read(prefix, n, k)
        if not found.words.is_meta:
            self._detect_convention(found)
        zeros = self._zeros(found)
        return pack_weight(
            prefix,
            found.codes,
            found.scales.t(),
            zeros,
            found.order,
            found.bits,
            symmetric=self.quantization.symmetric,
        )

    def _read(self, prefix: str, n: int, k: int) -> _GptqTensors:
        size = group_size(prefix, k, self.quantization.group)
        bits, in_word = self.quantization.bits, 32 // self.quantization.bits
        tensor = self.target.tensor
        groups = None
        if size < k and (self.quantization.act_order or self.target.source.has(f"{prefix}.g_idx")):
            groups = tensor(f"{prefix}.g_idx", (k,), torch.int32)
        order = column_order(prefix, groups, size)
        words = tensor(f"{prefix}.qweight", (k // in_word, n), torch.int32)
        codes = unpack_codes(words, 0, bits).t()
        return _GptqTensors(
            codes if order is None else codes[:, order],
            tensor(f"{prefix}.qzeros", (k // size, n // in_word), torch.int32),
            tensor(f"{prefix}.scales", (k // size, n), torch.float16),
            order,
            bits,
        )

    def _detect_convention(self, layer: _GptqTensors) -> None:
        """Adopt the layer's convention of zeros if it clearly contradicts ours; notify the user."""
        zeros_minus_one = _stored_minus_one(layer)
        if zeros_minus_one is None or zeros_minus_one == self.zeros_minus_one:
            return
        self.zeros_minus_one = zeros_minus_one
        claimed, found = (
            ("as they are", "minus one") if zeros_minus_one else ("minus one", "as they are")
        )
        self.target.notify(
            f"config.json says that zeros are stored {claimed} (GPTQ version {1 + zeros_minus_one}); these are "
            f"stored {found} (version {2 - zeros_minus_one}), and are read so."
        )

    def _zeros(self, layer: _GptqTensors) -> torch.Tensor:
        """uint8 [N, G]."""
        stored = layer.zeros
        if not self.zeros_minus_one:
            return stored
        alone = (stored + 1) & layer.most
        if all_true(stored != layer.most, on_meta=True):
            return alone
        borrowed = _borrowed(layer)
        middle = _middles(layer)
        differ = alone != borrowed
        off = [(each - middle)[differ].abs().sum() for each in (alone.float(), borrowed.float())]
        return alone if bool(off[0] < off[1]) else borrowed


def _borrowed(layer: _GptqTensors) -> torch.Tensor:
    """Zeros [N, G] of words that had one subtracted in each place, with borrows."""
    whole = (layer.words.to(torch.int64) & 0xFFFFFFFF) + _ONES[layer.bits] & 0xFFFFFFFF
    words = torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)
    return unpack_codes(words, 1, layer.bits).t()


def _middles(layer: _GptqTensors) -> torch.Tensor:
    """The mean code of each group [N, G]."""
    n = layer.codes.shape[0]
    groups = layer.words.shape[0]
    runs = layer.codes.reshape(n, groups, -1)
    return runs.sum(-1, dtype=torch.int32) / runs.shape[2]


def _stored_minus_one(layer: _GptqTensors) -> bool | None:
    """True if these zeros are stored minus one; None: unclear."""
    stored = layer.zeros
    symmetric = 1 << (layer.bits - 1)
    low = int(stored.min())
    high = int(stored.max())
    if low == high and low in (symmetric - 1, symmetric):
        return low == symmetric - 1
    middles = _middles(layer)
    as_is = float((middles - stored).abs().mean())
    more = float((middles - ((stored + 1) & layer.most)).abs().mean())
    if abs(as_is - more) < _CLEARLY:
        return None
    return more < as_is
