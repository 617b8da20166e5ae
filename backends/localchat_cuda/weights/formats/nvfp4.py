"""NVFP4: e2m1 codes with an e4m3 scale for 16 columns and an fp32 number for the layer.

Letters: N output and K input features.

    compressed-tensors (nvfp4-pack-quantized)   ModelOpt (NVFP4)
    weight_packed        uint8 [N, K/2]         weight           two columns in a byte, the first lowest
    weight_scale         e4m3 [N, K/16]         weight_scale
    weight_global_scale  fp32 [1]               weight_scale_2   fp32, one number

    w = e2m1(code) * weight_scale * weight_scale_2 = e2m1(code) * weight_scale / weight_global_scale

So the two numbers are inverses of each other. Static scales of activations (input_scale, input_global_scale)
are not read, because activations stay floating here. NVIDIA, 2025 (arXiv 2509.25149).
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.kernels.fp8_int8.pack import E4M3
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.weights.formats.weight import all_true
from localchat_cuda.weights.formats.weight_format import WeightFormat

_PACKED = "weight_packed"
_NUMBER = "weight_scale_2"
_INVERSE_NUMBER = "weight_global_scale"
_GROUP = 16
_NAN = 0x7F
"""E4m3 code of no number. Larger codes are negative."""


class Nvfp4(WeightFormat):
    """See WeightFormat."""

    suffixes = (f".{_PACKED}", f".{_NUMBER}")

    def part(self, prefix: str, n: int, k: int) -> ggml_pack.GgmlWeight:
        tensor = self.target.tensor
        if self.target.source.has(f"{prefix}.{_PACKED}"):
            codes = tensor(f"{prefix}.{_PACKED}", (n, k // 2), torch.uint8)
            number = 1 / self._number(f"{prefix}.{_INVERSE_NUMBER}")
        else:
            codes = tensor(f"{prefix}.weight", (n, k // 2), torch.uint8)
            number = self._number(f"{prefix}.{_NUMBER}")
        name = f"{prefix}.weight_scale"
        scales = tensor(name, (n, k // _GROUP), E4M3)
        if not all_true(scales.view(torch.uint8) < _NAN, on_meta=True):
            raise _damaged(f"{name} has scales that are negative or not a number")
        return ggml_pack.GgmlWeight((ggml_pack.pack_nvfp4(codes, scales, number),))

    def _number(self, name: str) -> torch.Tensor:
        """Return the number of a layer, above 0. Raises ModelInvalid."""
        shape = self.target.source.shape(name)
        if shape is None:
            shape = (1,)
        number = self.target.tensor(name, shape, torch.float32)
        if number.numel() != 1:
            raise _damaged(f"{name} has the shape {shape}. Expected one number")
        if not all_true(number.isfinite() & (number > 0), on_meta=True):
            raise _damaged(f"{name} is {float(number)}. Expected a number above 0")
        return number


def _damaged(problem: str) -> ModelInvalid:
    return ModelInvalid(
        f"{problem}.",
        hint="The file may be damaged: download it again, or use another quantization of the model.",
    )
