"""FP8 format: e4m3 codes with scales per tensor, per output feature, or per block of 128 x 128.

Letters: N output and K input features.

    weight            float8_e4m3fn [N, K]
    weight_scale_inv  [ceil(N / 128), ceil(K / 128)], multiplied with the codes despite its name: the layout
                      of DeepSeek and Qwen
    weight_scale      one number, or [N], or [N, 1], or blocks as above: compressed-tensors (float-quantized),
                      vLLM's and Meta's own, ModelOpt
    input_scale       static scale of activations: not read, because each step computes its own
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.kernels.fp8_int8.pack import BLOCK, E4M3, W8, padded
from localchat_cuda.weights.formats.weight_format import WeightFormat


class Fp8(WeightFormat):
    """See WeightFormat."""

    suffixes = (".weight_scale", ".weight_scale_inv")

    def part(self, prefix: str, n: int, k: int) -> W8:
        codes = self.target.tensor(f"{prefix}.weight", (n, k), E4M3)
        return padded(W8(codes, self._scales(prefix, n, k))).aligned()

    def _scales(self, prefix: str, n: int, k: int) -> torch.Tensor:
        source = self.target.source
        # A checkpoint may have either name, whatever the group in config.json.
        usual = prefix + self.suffixes[self.quantization.group > 0]
        names = (usual, *(prefix + suffix for suffix in self.suffixes))
        name = next(filter(source.has, names), usual)
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        shape = source.shape(name)
        if shape is None and self.quantization.group:
            shape = blocks
        elif shape is None:
            shape = (n,)
        scales = self.target.tensor(name, shape, torch.float32)
        if scales.numel() == 1:
            return scales.reshape(1).repeat(n)
        if shape in ((n,), (n, 1)):
            return scales.reshape(n)
        if shape == blocks:
            return scales.contiguous()
        raise ModelInvalid(
            f"{name} has the shape {shape}. Expected one number, {n} numbers or {blocks[0]}x{blocks[1]}.",
            hint="The file may be damaged, or its scales may belong to blocks of another size than 128 x 128.",
        )
