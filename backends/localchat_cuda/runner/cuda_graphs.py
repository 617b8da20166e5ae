"""CUDA graphs of step shapes that come again.

A graph is captured when a shape (input_batch.StepShape) is seen for the third time, one of many rows for the
second: by then its kernels are compiled and settled, and a shape that comes once costs nothing. Graphs read
the step buffer, the token table, the block tables and the pages at their fixed addresses, and leave their
results at fixed addresses of their own. All share one memory pool: they run one after the other.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from localchat_cuda.kernels.launch import own_carveout
from localchat_cuda.runner.input_batch import StepShape

RUNS_BEFORE_CAPTURE = 2
"""Of few rows: a kernel's carve-out (launch.settle) holds from its second launch on. Others need one."""

Body = Callable[[], tuple[torch.Tensor, ...]]
"""Launches kernels and returns their results."""
_Key = tuple[str, StepShape]


class _CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: tuple[torch.Tensor, ...]


class CudaGraphs:
    """Captured graphs by kind and shape."""

    def __init__(self, *, enabled: bool) -> None:
        """`enabled` False: everything is launched kernel by kernel."""
        self.enabled = enabled
        self._captured: dict[_Key, _CapturedGraph] = {}
        self._seen: Counter[_Key] = Counter()
        self._too_large: set[_Key] = set()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self.steady = True
        """The last run was a replay, or never will be one, so its time is typical. Before, kernels may have
        been compiled, and the GPU waited for the CPU."""

    @property
    def count(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Drop all graphs, because a tensor that they read has moved. Their memory goes with the last one."""
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def run(self, kind: str, shape: StepShape, body: Body) -> tuple[torch.Tensor, ...]:
        """The results of `body`, run or replayed; valid until the next run. Equal kind and shape must mean
        equal addresses and sizes of all that `body` reads and writes."""
        key = kind, shape
        captured = self._captured.get(key)
        if captured is None:
            self._seen[key] += 1
            self.steady = not self.enabled or key in self._too_large
            if (
                not self.enabled
                or self._seen[key] <= (1 if own_carveout(shape.tokens) else RUNS_BEFORE_CAPTURE)
                or key in self._too_large
            ):
                return body()
            try:
                captured = self._captured[key] = self._capture(body)
            except torch.OutOfMemoryError:
                # A graph keeps its results for good; launched kernel by kernel the step may still fit.
                self._too_large.add(key)
                torch.cuda.empty_cache()
                return body()
        else:
            self.steady = True
        captured.graph.replay()
        return captured.results

    def _capture(self, body: Body) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Steps in flight end first: an allocation that waits for one would spoil the capture.
        torch.cuda.synchronize()
        # A graph that the garbage collector finds now would be destroyed, which no capture survives.
        collecting = gc.isenabled()
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            results = body()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a spoilt capture fails at its end too
                graph.capture_end()
            raise
        else:
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return _CapturedGraph(graph, results)
