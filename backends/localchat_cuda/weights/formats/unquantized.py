"""Unquantized format: `weight` [N, K] in a floating type."""

import torch

from localchat_cuda.weights.source import LoadTarget


class Unquantized:
    """See formats.WeightFormat."""

    def __init__(self, target: LoadTarget) -> None:
        self.target = target

    def holds(self, prefix: str) -> bool:
        return self.target.source.has(f"{prefix}.weight")

    def part(self, prefix: str, n: int, k: int) -> torch.Tensor:
        return self.target.tensor(f"{prefix}.weight", (n, k), self.target.dtype)
