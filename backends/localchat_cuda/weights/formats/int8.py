"""compressed-tensors' plain format of 8 bits (int-quantized): W8A16, and W8A8 as SmoothQuant prepares it.

Letters: N output and K input features, G groups along K.

    weight             int8 [N, K]
    weight_scale       bf16, fp16 or fp32: one number, [N, 1], or [N, G]
    weight_zero_point  int8, as the scales, if asymmetric
    input_scale        static scale of activations: not read, because activations stay floating here

Xiao et al., 2022 (arXiv 2211.10438).
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.weights.formats.repack import INT8_MIDDLE, group_size, pack_weight
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.formats.weight_format import WeightFormat


class Int8(WeightFormat):
    """See WeightFormat."""

    suffixes = (".weight_scale",)

    def part(self, prefix: str, n: int, k: int) -> Weight:
        groups = k // group_size(prefix, k, self.quantization.group)
        stored_codes = self.target.tensor(f"{prefix}.weight", (n, k), torch.int8)
        # The packed form has codes from 0 to 255.
        codes = stored_codes.view(torch.uint8) ^ INT8_MIDDLE
        scales = self._sides(f"{prefix}.weight_scale", n, groups, torch.float16)
        zeros = torch.full_like(scales, INT8_MIDDLE)
        if not self.quantization.symmetric:
            stored = self._sides(f"{prefix}.weight_zero_point", n, groups, torch.int8)
            zeros = stored.short() + INT8_MIDDLE
        return pack_weight(prefix, codes, scales, zeros, self.quantization)

    def _sides(self, name: str, n: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return scales or zeros [N, G]."""
        shape = self.target.source.shape(name)
        if shape is None:
            shape = (n, groups)
        if shape not in ((), (1,), (n,), (n, groups)):
            raise ModelInvalid(
                f"{name} has the shape {shape}. Expected one number, {n} numbers or {n}x{groups}.",
                hint="The file may be damaged: download it again.",
            )
        sides = self.target.tensor(name, shape, dtype)
        if shape != (n, groups):
            sides = sides.reshape(-1, 1).expand(n, groups)
        return sides.contiguous()
