"""How linear layers are stored, a module for each way; `format_of` gives the one of a checkpoint."""

from typing import Protocol

from localchat_cuda.quantization_config import Quantization
from localchat_cuda.weights.formats.awq import Awq
from localchat_cuda.weights.formats.fp8 import Fp8
from localchat_cuda.weights.formats.gptq import Gptq
from localchat_cuda.weights.formats.int4 import Int4
from localchat_cuda.weights.formats.load_target import LoadTarget
from localchat_cuda.weights.formats.unquantized import Floating
from localchat_cuda.weights.formats.weight import Weight


class WeightFormat(Protocol):
    """Reads linear layers of a checkpoint, one at a time."""

    def holds(self, prefix: str) -> bool:
        """Whether the layer with this name is stored this way: others of the checkpoint stay floating."""
        ...

    def part(self, prefix: str, n: int, k: int) -> Weight:
        """The weight [N, K] of one layer, on the device; `weight.join` makes one product of several. Raises
        ModelInvalid."""
        ...


def format_of(quantization: Quantization | None, place: LoadTarget) -> WeightFormat:
    """How this checkpoint's layers are read. Raises ValueError for a method without a module here."""
    if quantization is None:
        return Floating(place)
    if quantization.method == "awq":
        return Awq(place)
    if quantization.method == "gptq":
        return Gptq(place, quantization)
    if quantization.method == "int4":
        return Int4(place, quantization)
    if quantization.method == "fp8":
        return Fp8(place, quantization)
    raise ValueError(f"quantization: no format reads {quantization.method}")


__all__ = ["Floating", "LoadTarget", "WeightFormat", "format_of"]
