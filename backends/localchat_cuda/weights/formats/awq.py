"""AutoAWQ's format (version gemm): 4 bits, groups of 32, 64 or 128, zero points.

Letters: N output and K input features, G groups along K.

    qweight  int32 [K, N/8]     eight output features in a word, in the order of int4.pack.AWQ_COLUMNS
    qzeros   int32 [G, N/8]     in the same order
    scales   fp16 [G, N]

Lin et al., 2023 (arXiv 2306.00978).
"""

import torch

from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.formats.weight import refused
from localchat_cuda.weights.formats.weight_format import WeightFormat


class Awq(WeightFormat):
    """See WeightFormat."""

    suffixes = (".qweight",)

    def part(self, prefix: str, n: int, k: int) -> w4_pack.W4:
        groups = k // self.quantization.group
        tensor = self.target.tensor
        codes = tensor(f"{prefix}.qweight", (k, n // 8), torch.int32)
        zeros = tensor(f"{prefix}.qzeros", (groups, n // 8), torch.int32)
        scales = tensor(f"{prefix}.scales", (groups, n), torch.float16)
        hint = (
            "AWQ layers need groups of 32, 64 or 128 that divide their inputs, and outputs in 16s."
        )
        with refused(f"{prefix} cannot be packed", hint):
            return w4_pack.from_awq(codes, zeros, scales)
