"""Interface of sums and exchanges of tensors between the ranks of one model.

Letters: N features, P rows, R ranks, S splits. All ranks run the same steps, so they call these operations in
the same order. This module does not import torch.distributed, which some builds of torch lack.
"""

from typing import Protocol

import torch


class Collective(Protocol):
    """Operations that all ranks call together, on the current stream."""

    rank: int
    ranks: int

    def add_up(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' partial sums y [S, P, N]: fp32 [1, P, N], contiguous."""
        ...

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' x [P, N] side by side: [P, R*N]."""
        ...

    def copy_from_first(self, x: torch.Tensor) -> None:
        """Overwrite x with that of rank 0."""
        ...


class Alone:
    """Collective of a single process that stands for one of several ranks, to trace shapes."""

    def __init__(self, ranks: int) -> None:
        self.rank = 0
        self.ranks = ranks

    def add_up(self, y: torch.Tensor) -> torch.Tensor:
        return y.sum(0, keepdim=True, dtype=torch.float32)

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.ranks)

    def copy_from_first(self, x: torch.Tensor) -> None:
        """Do nothing."""
