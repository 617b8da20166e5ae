"""MXFP8 format: e4m3 codes with a power of two (e8m0) for 32 columns.

Letters: N output and K input features.

    weight        float8_e4m3fn [N, K]
    weight_scale  uint8 [N, K/32], exponents biased by 127. 255 means NaN.

Open Compute Project, Microscaling Formats 1.0 (2023).
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.kernels.fp8_int8.pack import E4M3, MX_GROUP, MX_MOST, W8, padded
from localchat_cuda.weights.formats.weight import all_true
from localchat_cuda.weights.formats.weight_format import WeightFormat


class Mxfp8(WeightFormat):
    """See WeightFormat."""

    suffixes = (".weight_scale",)

    def part(self, prefix: str, n: int, k: int) -> W8:
        codes = self.target.tensor(f"{prefix}.weight", (n, k), E4M3)
        name = f"{prefix}.weight_scale"
        exponents = self.target.tensor(name, (n, k // MX_GROUP), torch.uint8)
        if not all_true(exponents <= MX_MOST, on_meta=True):
            raise ModelInvalid(
                f"{name} has scales above {2 ** (MX_MOST - 127)} or that are not a number.",
                hint="The file may be damaged: download it again, or use another quantization of the model.",
            )
        return padded(W8(codes, exponents)).aligned()
