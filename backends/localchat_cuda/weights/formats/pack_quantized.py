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

from localchat_cuda.weights.formats.repack import (
    column_order,
    group_size,
    pack_weight,
    unpack_codes,
)
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.formats.weight_format import WeightFormat


class PackQuantized(WeightFormat):
    """See WeightFormat."""

    suffixes = (".weight_packed",)

    def part(self, prefix: str, n: int, k: int) -> Weight:
        size = group_size(prefix, k, self.quantization.group)
        tensor = self.target.tensor
        act_order = self.quantization.act_order
        order = column_order(prefix, "weight_g_idx", k, size, self.target, act_order=act_order)
        bits = self.quantization.bits
        words = tensor(f"{prefix}.weight_packed", (n, k * bits // 32), torch.int32)
        codes = unpack_codes(words, 1, bits)
        if order is not None:
            codes = codes[:, order]
        scales = tensor(f"{prefix}.weight_scale", (n, k // size), torch.float16)
        if self.quantization.symmetric:
            zeros = torch.full_like(scales, 1 << bits - 1)
        else:
            zeros = self._zeros(f"{prefix}.weight_zero_point", n, k // size)
        return pack_weight(prefix, codes, scales, zeros, self.quantization, order)

    def _zeros(self, name: str, n: int, groups: int) -> torch.Tensor:
        """Return the zeros [N, G], shifted to be 0 or more."""
        bits = self.quantization.bits
        if self.target.source.shape(name) == (n, groups):
            return self.target.tensor(name, (n, groups), torch.int8).short() + (1 << bits - 1)
        words = self.target.tensor(name, (n * bits // 32, groups), torch.int32)
        return unpack_codes(words, 0, bits)
