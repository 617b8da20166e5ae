"""Ranks of one model as threads of the test, which exchange tensors through a list."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch

from localchat_cuda.kernels.all_reduce import PeerMemory
from localchat_cuda.ranks.messages import RankJob
from localchat_cuda.ranks.worker import Follower, Inbox
from localchat_cuda.ranks.workers import Workers
from localchat_cuda.runner.runner import CudaRunner
from tests.support.tiny_engine_core import tiny_runner

R = TypeVar("R")


class _Meeting:
    """Where the threads leave tensors for each other."""

    def __init__(self, ranks: int) -> None:
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def exchanged(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()
        return found


class ThreadCollective:
    """See ranks.collective.Collective."""

    def __init__(self, rank: int, ranks: int, meeting: _Meeting) -> None:
        self.rank, self.ranks = rank, ranks
        self.peers: PeerMemory | None = None
        self._meeting = meeting

    def add_up(self, y: torch.Tensor, *, exact: bool = True) -> torch.Tensor:
        total = y.sum(0, keepdim=True, dtype=torch.float32)
        return torch.stack(self._meeting.exchanged(self.rank, total)).sum(0)

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.exchanged(self.rank, x), 1)

    def copy_from_first(self, x: torch.Tensor) -> None:
        x.copy_(self._meeting.exchanged(self.rank, x)[0])


def on_ranks(ranks: int, work: Callable[[ThreadCollective], R]) -> Sequence[R]:
    """What `work` returns on each rank. An error of one rank ends the others."""
    meeting = _Meeting(ranks)

    def run(rank: int) -> R:
        # Each thread has a number of its own. Tiny products lose much where the cores are busy.
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                return work(ThreadCollective(rank, ranks, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class _Thread:
    """A thread in the place of a process."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        """Nothing ends a thread."""


class ThreadWorkers(Workers):
    """See Workers. The other ranks are threads of this process."""

    def __init__(self, ranks: int, runner_of: Callable[[ThreadCollective], CudaRunner]) -> None:
        """`runner_of`: makes the runner of a rank."""
        self.meeting = _Meeting(ranks)
        self._runner_of = runner_of
        self.ended: list[str] = []
        whole: Any = None
        job = RankJob(0, ranks, "cpu", whole, None, whole, Path(), -1)
        super().__init__(job, ["cpu"] * (ranks - 1), self.ended.append)
        self.listen()

    def _start(self, job: RankJob) -> None:
        ours, theirs = Pipe()

        def run() -> None:
            torch.set_num_threads(1)
            runner = self._runner_of(ThreadCollective(job.rank, job.ranks, self.meeting))
            with theirs:
                Follower(runner, theirs, Inbox(theirs, end=lambda: None)).run()

        self._links.append(ours)
        thread: Any = _Thread(run)
        self._processes.append(thread)


def ranked_runner(folder: Path, ranks: int = 2, **how: Any) -> CudaRunner:
    """A tiny runner over several ranks, the others as threads; the rest as in `tiny_runner`."""
    file = -1
    if how.get("host_blocks"):
        file = os.memfd_create("host blocks")
        os.ftruncate(file, 1 << 26)
    workers = ThreadWorkers(
        ranks, lambda other: tiny_runner(folder, collective=other, host_file=file, **how)
    )
    first = ThreadCollective(0, ranks, workers.meeting)
    return tiny_runner(folder, collective=first, workers=workers, host_file=file, **how)
