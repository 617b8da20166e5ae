"""From where a format reads its tensors, and where they go."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from localchat_cuda.weights.source import WeightSource


class LoadTarget(NamedTuple):
    """dtype: of floating weights. say: takes a sentence that the user should read."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    say: Callable[[str], None]

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device. Raises ModelInvalid."""
        return self.source.tensor(name, shape, dtype).to(self.device)
