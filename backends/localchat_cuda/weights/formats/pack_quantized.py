"""compressed-tensors' packed format of 4 or 8 bits (pack-quantized), as llm-compressor writes it.

Letters: N output and K input features, G groups along K.

    weight_packed      int32 [N, K/8]     eight input features in a word, the lowest bits first, plus 8;
                                          of 8 bits four in a word, plus 128
    weight_scale       bf16 or fp16 [N, G]
    weight_zero_point  int32 [N/8, G]     if asymmetric: eight output features in a word, plus 8;
                       int8 [N, G]        as early versions wrote it, -8 to 7
    weight_g_idx       int32 [K]          if groups are scattered (act-order): each column's group
"""

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


class PackQuantized:
    """See formats.WeightFormat."""

    def __init__(self, target: LoadTarget, quantization: Quantization) -> None:
        self.target = target
        self.quantization = quantization
        self.bits = quantization.bits
        self.codes_per_word = 32 // quantization.bits
        self.middle = 1 << (quantization.bits - 1)

    def holds(self, prefix: str) -> bool:
        return self.target.source.has(f"{prefix}.weight_packed")

    def part(self, prefix: str, n: int, k: int) -> Weight:
        size = group_size(prefix, k, self.quantization.group)
        tensor = self.target.tensor
        groups = None
        if size < k and (
            self.quantization.act_order or self.target.source.has(f"{prefix}.weight_g_idx")
        ):
            groups = tensor(f"{prefix}.weight_g_idx", (k,), torch.int32)
        order = column_order(prefix, groups, size)
        words = tensor(f"{prefix}.weight_packed", (n, k // self.codes_per_word), torch.int32)
        codes = unpack_codes(words, 1, self.bits)
        if order is not None:
            codes = codes[:, order]
        scales = tensor(f"{prefix}.weight_scale", (n, k // size), torch.float16)
        if self.quantization.symmetric:
            zeros = torch.full_like(scales, self.middle)
        else:
            zeros = self._zeros(f"{prefix}.weight_zero_point", n, k // size)
        return pack_weight(
            prefix,
            codes,
            scales,
            zeros,
            order,
            self.bits,
            symmetric=self.quantization.symmetric,
        )

    def _zeros(self, name: str, n: int, groups: int) -> torch.Tensor:
        """Return the zeros [N, G], shifted to be 0 or more."""
        if self.target.source.shape(name) == (n, groups):
            return self.target.tensor(name, (n, groups), torch.int8).short() + self.middle
        words = self.target.tensor(name, (n // self.codes_per_word, groups), torch.int32)
        return unpack_codes(words, 0, self.bits)
