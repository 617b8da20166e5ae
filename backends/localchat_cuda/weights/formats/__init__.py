"""Storage formats of linear layers, one module each; `weight_format` chooses the one of a checkpoint."""

from localchat_cuda.config.quantization import Method, Quantization
from localchat_cuda.weights.formats.awq import Awq
from localchat_cuda.weights.formats.fp8 import Fp8
from localchat_cuda.weights.formats.ggml import Ggml
from localchat_cuda.weights.formats.gptq import Gptq
from localchat_cuda.weights.formats.int8 import Int8
from localchat_cuda.weights.formats.mxfp8 import Mxfp8
from localchat_cuda.weights.formats.nvfp4 import Nvfp4
from localchat_cuda.weights.formats.pack_quantized import PackQuantized
from localchat_cuda.weights.formats.rounded import Rounded
from localchat_cuda.weights.formats.weight_format import Unquantized, WeightFormat
from localchat_cuda.weights.source import LoadTarget

_FORMATS: dict[Method, type[WeightFormat]] = {
    "awq": Awq,
    "fp8": Fp8,
    "gguf": Ggml,
    "gptq": Gptq,
    "int8": Int8,
    "mxfp8": Mxfp8,
    "nvfp4": Nvfp4,
    "packed": PackQuantized,
}
"""Formats by method. MXFP4 stores experts alone (interleaved_experts.py)."""


def weight_format(quantization: Quantization | None, target: LoadTarget) -> WeightFormat:
    """Return the format of a checkpoint's layers."""
    if quantization is None or quantization.of_experts:
        return Unquantized(target)
    if quantization.on_load:
        return Rounded(target, quantization)
    return _FORMATS[quantization.method](target, quantization)


__all__ = ["Unquantized", "WeightFormat", "weight_format"]
