"""Interface of sums and exchanges of tensors between the ranks of one model.

Letters: N features, P rows, R ranks, S splits. All ranks run the same steps, so they call these operations in
the same order. This module does not import torch.distributed, which some builds of torch lack.
"""

from typing import Protocol

import torch

from localchat_cuda.kernels.all_reduce import PeerMemory, all_reduce

PEER_ROWS = 128
"""Rows that kernels add up over peer memory. NCCL is faster for more."""


class Collective(Protocol):
    """Operations that all ranks call together, on the current stream."""

    rank: int
    ranks: int
    peers: PeerMemory | None
    """Memory through which kernels add up few rows; None: the GPUs share none."""

    def add_up(self, y: torch.Tensor, *, exact: bool = True) -> torch.Tensor:
        """Return the sum of the ranks' partial sums y [S, P, N]: [1, P, N], contiguous.

        fp32, or bf16 if that is faster and `exact` is False."""
        ...

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' x [P, N] side by side: [P, R*N]."""
        ...

    def copy_from_first(self, x: torch.Tensor) -> None:
        """Overwrite x with that of rank 0."""
        ...


class Alone:
    """Collective of a single process that stands for one of several ranks, to trace shapes."""

    def __init__(self, ranks: int, columns: int) -> None:
        """`columns`: of the rows that are added up."""
        self.rank = 0
        self.ranks = ranks
        words = torch.empty(2, ranks, PEER_ROWS * columns, dtype=torch.int64, device="meta")
        addresses = torch.empty(ranks, dtype=torch.int64, device="meta")
        self.peers: PeerMemory | None = PeerMemory.empty(0, words, addresses)

    def add_up(self, y: torch.Tensor, *, exact: bool = True) -> torch.Tensor:
        if self.peers is not None and y[0].numel() <= self.peers.most:
            return all_reduce(y.contiguous(), self.peers)
        return y.sum(0, keepdim=True, dtype=torch.float32)

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.ranks)

    def copy_from_first(self, x: torch.Tensor) -> None:
        """Do nothing."""
