"""Sums and exchanges between processes on one host: gloo on a CPU, NCCL on GPUs.

A few rows are added up by torch's one-shot kernel over symmetric memory instead, in which every rank reads the
rows of all others. CUDA graphs contain both.
"""

import contextlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_TIMEOUT = timedelta(minutes=10)
"""Limit of one operation. Prompts take seconds, and workers.py notices earlier that a rank ended."""
_ONE_SHOT_ROWS = 16
"""Rows that the one-shot kernel adds up. NCCL is faster for more."""
_ALIGNED_NUMBERS = 4
"""fp32 numbers in 16 bytes, which the one-shot kernel reads at once."""
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
        self._one_shot: _OneShot | None = None
        if self._gpu:
            self._one_shot = _OneShot.try_new(_ONE_SHOT_ROWS * columns, device)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        one_shot = self._one_shot
        if one_shot is not None and rows <= _ONE_SHOT_ROWS and x.dtype == torch.float32:
            return one_shot.add_up(x)
        dist.all_reduce(x)
        return x

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


class _OneShot:
    """Buffer in memory that all GPUs map, and torch's one-shot sum over it.

    The kernel waits for all ranks before it reads their buffers, and again before it ends, so the next sum can
    use the same buffer."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        """`numbers`: of fp32, of the largest sum. Raises RuntimeError if the GPUs cannot map the buffer."""
        # This module is the public interface to such memory, in spite of its name.
        from torch.distributed import _symmetric_memory as symmetric

        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self.buffer = symmetric.empty(numbers, dtype=torch.float32, device=device)
        symmetric.rendezvous(self.buffer, self._group)
        # An error in the first sum belongs here, and not inside a step.
        self.add_up(torch.zeros(1, _ALIGNED_NUMBERS, device=device))
        torch.cuda.synchronize(device)

    @classmethod
    def try_new(cls, numbers: int, device: torch.device) -> "_OneShot | None":
        """Return None if any GPU has no access to another's memory. All ranks get the same answer."""
        one_shot: _OneShot | None = None
        with contextlib.suppress(RuntimeError, ImportError, AttributeError):
            one_shot = cls(numbers, device)
        works = torch.tensor([one_shot is not None], dtype=torch.int32, device=device)
        dist.all_reduce(works, dist.ReduceOp.MIN)
        return one_shot if bool(works.item()) else None

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x in fp32."""
        # Numbers after those of x are of an earlier sum, and are cut off again.
        part = self.buffer[: x.numel() + -x.numel() % _ALIGNED_NUMBERS]
        part[: x.numel()].copy_(x.view(-1))
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._group)
        return total[: x.numel()].view(x.shape)
