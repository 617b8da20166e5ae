"""Sums and exchanges between processes on one host: gloo on a CPU, NCCL on GPUs.

Few rows are added up by a kernel of our own (kernels/all_reduce.py) over memory that all GPUs map. CUDA graphs
contain both.
"""

import contextlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from localchat_cuda.kernels.all_reduce import PeerMemory, all_reduce
from localchat_cuda.ranks.collective import PEER_ROWS

_TIMEOUT = timedelta(minutes=10)
"""Limit of one operation. Prompts take seconds, and workers.py notices earlier that a rank ended."""
# The name of the older function is deprecated since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessCollective:
    """Collective of processes on one host. See Collective."""

    def __init__(
        self, rank: int, ranks: int, meeting: Path, device: torch.device, columns: int
    ) -> None:
        """Join the other ranks. Blocks until all have joined.

        `meeting`: file through which the ranks find each other. It must not exist before. `columns`: of the
        rows that are added up."""
        self.rank = rank
        self.ranks = ranks
        self._gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if self._gpu else "gloo",
            store=FileStore(str(meeting), ranks),
            rank=rank,
            world_size=ranks,
            timeout=_TIMEOUT,
            device_id=device if self._gpu else None,
        )
        self.peers: PeerMemory | None = None
        if self._gpu:
            self.peers = _try_peer_memory(rank, ranks, PEER_ROWS * columns, device)

    def add_up(self, y: torch.Tensor, *, exact: bool = True) -> torch.Tensor:
        if self.peers is not None and y[0].numel() <= self.peers.most:
            return all_reduce(y.contiguous(), self.peers)
        # In fp32, sums of many rows take a fifth of a prompt's time. Sums of fp16 may be beyond its range.
        dtype = torch.bfloat16 if self._gpu and not exact else torch.float32
        total = y.sum(0, keepdim=True, dtype=dtype)
        dist.all_reduce(total)
        return total

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty(self.ranks, *x.shape)
        _all_gather(parts.view(-1, x.shape[1]), x.contiguous())
        return parts.transpose(0, 1).reshape(x.shape[0], -1)

    def copy_from_first(self, x: torch.Tensor) -> None:
        dist.broadcast(x, 0)

    def close(self) -> None:
        """Leave the other ranks on a CPU. Idempotent.

        NCCL might wait for ranks that have ended, and the process of a GPU ends with its model."""
        if not self._gpu and dist.is_initialized():
            dist.destroy_process_group()


def _try_peer_memory(
    rank: int, ranks: int, numbers: int, device: torch.device
) -> PeerMemory | None:
    """Return memory that the ranks share, tried once. None if any GPU cannot map another's.

    `numbers`: of the largest sum. All ranks get the same answer."""
    peers: PeerMemory | None = None
    with contextlib.suppress(RuntimeError, ImportError, AttributeError):
        peers = _map_peers(rank, ranks, numbers, device)
    works = torch.tensor([peers is not None], dtype=torch.int32, device=device)
    # No rank writes into an inbox before all are zero.
    dist.all_reduce(works, dist.ReduceOp.MIN)
    if peers is None or not works.item():
        return None
    # An error of the kernel belongs here, and not inside a step.
    all_reduce(torch.zeros(1, 1, 1, device=device), peers)
    torch.cuda.synchronize(device)
    return peers


def _map_peers(rank: int, ranks: int, numbers: int, device: torch.device) -> PeerMemory:
    """Allocate an inbox, and map those of the other ranks. RuntimeError: the GPUs cannot."""
    # This module is the public interface to such memory, in spite of its name.
    from torch.distributed import _symmetric_memory as symmetric

    words = symmetric.empty(2, ranks, numbers, dtype=torch.int64, device=device)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    handle = symmetric.rendezvous(words, group)
    words.zero_()
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    peers = PeerMemory.empty(rank, words, addresses)
    torch.cuda.synchronize(device)
    return peers
