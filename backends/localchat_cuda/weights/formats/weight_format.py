"""Reader of a checkpoint's linear layers, and the reader of floating ones."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from localchat_cuda.config.quantization import Quantization
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.source import LoadTarget


class WeightFormat(ABC):
    """Reader of the linear layers that are stored in one format."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Ends of names of tensors. A layer in this format has at least one of them."""

    def __init__(self, target: LoadTarget, quantization: Quantization) -> None:
        self.target = target
        self.quantization = quantization

    def holds(self, prefix: str) -> bool:
        """Return True if a layer is stored in this format. The other layers are floating."""
        return any(self.target.source.has(prefix + suffix) for suffix in self.suffixes)

    @abstractmethod
    def part(self, prefix: str, n: int, k: int) -> Weight:
        """Load the weight [N, K] of a layer to the device. Raises ModelInvalid."""


class Unquantized(WeightFormat):
    """Unquantized format: `weight` [N, K] in a floating type."""

    suffixes = (".weight",)

    def __init__(self, target: LoadTarget) -> None:
        self.target = target

    def part(self, prefix: str, n: int, k: int) -> torch.Tensor:
        return self.target.tensor(f"{prefix}.weight", (n, k), self.target.dtype)
