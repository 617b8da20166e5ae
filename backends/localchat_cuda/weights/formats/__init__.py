"""Storage formats of linear layers, one module each; `weight_format` chooses the one of a checkpoint."""

from typing import Protocol

from localchat_cuda.config.quantization import Quantization
from localchat_cuda.weights.formats.awq import Awq
from localchat_cuda.weights.formats.fp8 import Fp8
from localchat_cuda.weights.formats.ggml import Ggml
from localchat_cuda.weights.formats.gptq import Gptq
from localchat_cuda.weights.formats.int8 import Int8
from localchat_cuda.weights.formats.mxfp8 import Mxfp8
from localchat_cuda.weights.formats.nvfp4 import Nvfp4
from localchat_cuda.weights.formats.pack_quantized import PackQuantized
from localchat_cuda.weights.formats.rounded import Rounded
from localchat_cuda.weights.formats.unquantized import Unquantized
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.source import LoadTarget


class WeightFormat(Protocol):
    """Reader of a checkpoint's linear layers."""

    def holds(self, prefix: str) -> bool:
        """Return True if a layer is stored in this format. The other layers are floating."""
        ...

    def part(self, prefix: str, n: int, k: int) -> Weight:
        """Load the weight [N, K] of a layer to the device. Raises ModelInvalid."""
        ...


def weight_format(quantization: Quantization | None, target: LoadTarget) -> WeightFormat:
    """Return the format of a checkpoint's layers. Raises ValueError for a method without a module here."""
    if quantization is None or quantization.of_experts:
        return Unquantized(target)
    if quantization.on_load:
        return Rounded(target, quantization)
    if quantization.method == "awq":
        return Awq(target, quantization)
    if quantization.method == "gptq":
        return Gptq(target, quantization)
    if quantization.method == "packed":
        return PackQuantized(target, quantization)
    if quantization.method == "int8":
        return Int8(target, quantization)
    if quantization.method == "fp8":
        return Fp8(target, quantization)
    if quantization.method == "nvfp4":
        return Nvfp4(target)
    if quantization.method == "mxfp8":
        return Mxfp8(target)
    if quantization.method == "gguf":
        return Ggml(target)
    raise ValueError(f"quantization: no format reads {quantization.method}")


__all__ = ["Unquantized", "WeightFormat", "weight_format"]
