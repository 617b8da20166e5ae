"""Layers as they were trained: `weight` [N, K] in a floating type."""

import torch

from localchat_cuda.weights.formats.load_target import LoadTarget


class Floating:
    """See formats.Format."""

    def __init__(self, place: LoadTarget) -> None:
        self.place = place

    def holds(self, prefix: str) -> bool:
        return self.place.source.has(f"{prefix}.weight")

    def part(self, prefix: str, n: int, k: int) -> torch.Tensor:
        return self.place.tensor(f"{prefix}.weight", (n, k), self.place.dtype)
