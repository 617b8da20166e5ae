"""FP8 format: e4m3 codes with scales per tensor, per output feature, or per block of 128 x 128.

Letters: N output and K input features.

    weight            float8_e4m3fn [N, K]
    weight_scale_inv  [ceil(N / 128), ceil(K / 128)], multiplied with the codes in spite of its name:
                      DeepSeek's layout, Qwen's too
    weight_scale      one number, or [N], or [N, 1], or blocks as above: compressed-tensors (float-quantized),
                      vLLM's and Meta's own, ModelOpt
    input_scale       static scale of activations: not read, ours are computed in each step
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.config.quantization import Quantization
from localchat_cuda.kernels.fp8_int8.pack import BLOCK, E4M3, W8, padded
from localchat_cuda.weights.source import LoadTarget

_NAMES = {0: "weight_scale", BLOCK: "weight_scale_inv"}
"""Names of the scales by what config.json states; a checkpoint may have either."""


class Fp8:
    """See formats.WeightFormat."""

    def __init__(self, target: LoadTarget, quantization: Quantization) -> None:
        self.target = target
        self.group = quantization.group
        first = _NAMES[self.group]
        self.names = sorted(_NAMES.values(), key=lambda name: name != first)

    def holds(self, prefix: str) -> bool:
        return any(self.target.source.has(f"{prefix}.{name}") for name in self.names)

    def part(self, prefix: str, n: int, k: int) -> W8:
        codes = self.target.tensor(f"{prefix}.weight", (n, k), E4M3)
        # Kernels load 16 bytes at a time; a view into a file may begin anywhere.
        aligned = codes if codes.data_ptr() % 16 == 0 else codes.clone()
        return padded(W8(aligned, self._scales(prefix, n, k)))

    def _scales(self, prefix: str, n: int, k: int) -> torch.Tensor:
        source = self.target.source
        held = next((name for name in self.names if source.has(f"{prefix}.{name}")), self.names[0])
        name = f"{prefix}.{held}"
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        shape = source.shape(name)
        if shape is None:
            shape = blocks if self.group else (n,)
        found = self.target.tensor(name, shape, torch.float32)
        if found.numel() == 1:
            return found.reshape(1).repeat(n)
        if shape in ((n,), (n, 1)):
            return found.reshape(n)
        if shape == blocks:
            return found.contiguous()
        raise ModelInvalid(
            f"{name} has the shape {shape}: one number, {n} of them or {blocks[0]}x{blocks[1]} are possible.",
            hint="The file may be damaged, or its scales stand for blocks of another size than 128 x 128.",
        )
