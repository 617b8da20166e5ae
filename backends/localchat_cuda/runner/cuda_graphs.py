"""CUDA graphs of step shapes that come again.

A graph is captured when a shape (input_batch.StepShape) is seen for the third time, one of many rows for the
second: by then its kernels are compiled and settled, and a shape that comes once costs nothing. Graphs read
the step buffer, the token table, the block tables and the pages at their fixed addresses, and leave their
results at fixed addresses. All share one memory pool, and one buffer for logits: they run one after the other.

The least recently used graph goes where there are more than GRAPHS, or where they take more memory than the
plan gives them. vLLM counts 24 MB a graph of a large model; what a graph takes is measured here.
"""

import contextlib
import gc
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from localchat_cuda.kernels.launch import own_carveout, power_of_two
from localchat_cuda.runner.cuda_errors import spoils_capture
from localchat_cuda.runner.input_batch import StepShape

RUNS_BEFORE_CAPTURE = 2
"""Of few rows: a kernel's carve-out (launch.settle) holds from its second launch on. Others need one."""

GRAPHS = 256
"""Most graphs at once: those that are captured while nothing runs (common_steps.py), and others."""
LEAST_GRAPHS = 16
"""So many are not to blame where memory ran out, and with fewer the shapes of a load would drive each other
out."""

Body = Callable[[], tuple[torch.Tensor, ...]]
"""Launches kernels and returns their results."""
_Key = tuple[str, StepShape]


class _CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: tuple[torch.Tensor, ...]
    bytes: int
    """Memory that the driver took for the graph; what its kernels write is torch's."""


class ResultBuffer:
    """Memory for a result that all graphs write in turn, so that none keeps its own; valid until the next run.

    It grows to the largest step. A graph that was captured before holds the smaller one until it goes.
    """

    def __init__(self, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._held = torch.empty(0, columns, dtype=dtype, device=device)

    def rows(self, count: int) -> torch.Tensor:
        """The first `count` rows [count, columns]."""
        if self._held.shape[0] < count:
            self._held = self._held.new_empty(power_of_two(count), self._held.shape[1])
        return self._held[:count]


class CudaGraphs:
    """Captured graphs by kind and shape."""

    def __init__(self, *, enabled: bool, limit_bytes: int = 1 << 62) -> None:
        """`enabled` False: everything is launched kernel by kernel. `limit_bytes`: most memory of the driver's
        for all graphs."""
        self.enabled = enabled
        self._most = GRAPHS
        self._limit_bytes = limit_bytes
        self._captured: OrderedDict[_Key, _CapturedGraph] = OrderedDict()
        """The least recently used first."""
        self._seen: Counter[_Key] = Counter()
        self._too_large: set[_Key] = set()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self.steady = True
        """The last run was a replay, or never will be one, so its time is typical. Before, kernels may have
        been compiled, and the GPU waited for the CPU."""

    @property
    def count(self) -> int:
        return len(self._captured)

    @property
    def bytes(self) -> int:
        """Memory that the driver took for the graphs; torch does not count it."""
        return sum(one.bytes for one in self._captured.values())

    @property
    def full(self) -> bool:
        """Whether another graph takes the place of one that is held."""
        return self.count >= self._most or self.bytes >= self._limit_bytes

    def has(self, kind: str, shape: StepShape) -> bool:
        """Whether the next run of this kind and shape is a replay, or will never be one."""
        key = kind, shape
        return not self.enabled or key in self._captured or key in self._too_large

    def replays(self, kind: str, shape: StepShape) -> bool:
        """Whether the next run of this kind and shape is a replay; True where no run ever is."""
        return not self.enabled or (kind, shape) in self._captured

    def clear(self) -> None:
        """Drop all graphs, because a tensor that they read has moved. Their memory goes with the last one."""
        self._captured.clear()

    def shrink(self) -> None:
        """Drop all graphs, because memory ran out. Where they were many, keep half as many from now on."""
        if self.count > LEAST_GRAPHS:
            self._most = max(LEAST_GRAPHS, self.count // 2)
        self.clear()

    def run(self, kind: str, shape: StepShape, body: Body) -> tuple[torch.Tensor, ...]:
        """The results of `body`, run or replayed; valid until the next run. Equal kind and shape must mean
        equal addresses and sizes of all that `body` reads and writes."""
        key = kind, shape
        captured = self._captured.get(key)
        if captured is None:
            if not self._is_due(key, shape):
                return body()
            captured = self._try_capture(key, body)
            if captured is None:
                return body()
        else:
            self._captured.move_to_end(key)
            self.steady = True
        captured.graph.replay()
        return captured.results

    def _is_due(self, key: _Key, shape: StepShape) -> bool:
        """Count a run of a shape without a graph; whether it is to be captured now."""
        self._seen[key] += 1
        self.steady = not self.enabled or key in self._too_large
        needed = 1 if own_carveout(shape.tokens) else RUNS_BEFORE_CAPTURE
        return not self.steady and self._seen[key] > needed

    def _try_capture(self, key: _Key, body: Body) -> _CapturedGraph | None:
        """Capture a shape; None where that failed, which leaves launching it kernel by kernel."""
        while self._captured and self.full:
            dropped, _ = self._captured.popitem(last=False)
            self._seen[dropped] = 0
        if not self._captured:
            # A pool goes with its last graph, also with one whose capture failed, and cannot be used again.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            captured = self._captured[key] = self._capture(body)
        except Exception as error:
            if not spoils_capture(error):
                raise
        else:
            return captured
        # A graph holds memory for good; launched kernel by kernel the step may still fit.
        self._too_large.add(key)
        torch.cuda.empty_cache()
        return None

    def _capture(self, body: Body) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Steps in flight end first: an allocation that waits for one would spoil the capture.
        torch.cuda.synchronize()
        before_bytes = _driver_bytes()
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
        return _CapturedGraph(graph, results, max(0, _driver_bytes() - before_bytes))


def _driver_bytes() -> int:
    """Memory of the current GPU that is taken, but not by torch's allocator."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()
