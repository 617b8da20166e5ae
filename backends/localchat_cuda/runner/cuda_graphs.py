"""CUDA graphs of step shapes that recur.

A graph is captured at the third run of a shape (input_batch.StepShape), or at the second run if it has many
rows. By then its kernels are compiled and settled, and a shape that runs once costs nothing. Graphs read the
step buffer, the token table, the block tables and the pages at fixed addresses, and write their results to
fixed addresses. They run one after the other, so they share one memory pool and one buffer for logits.

The least recently used graph is evicted if the graphs exceed GRAPHS or the memory of the plan. vLLM assumes 24
MB per graph of a large model. Here the memory of each graph is measured.
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
"""Runs of a shape of few rows before its capture. Other shapes need one.

Their kernels settle the carve-out (launch.settle) at the second launch."""

GRAPHS = 256
"""Limit of graphs, including those that are captured while the engine is idle (common_steps.py)."""
MIN_GRAPHS = 16
"""Limit below which running out of memory does not lower the number of graphs.

Fewer graphs would evict each other under normal load, and they are too small to be the cause."""

_COVERED_RUNS = 8
"""Number of steps of a shape that may run in graphs of larger shapes.

A launch kernel by kernel and a capture take the host about 70 ms together, and padding costs up to 15 ms."""

Body = Callable[[], tuple[torch.Tensor, ...]]
"""Function that launches kernels and returns their results."""
_Key = tuple[str, StepShape]


class _CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: tuple[torch.Tensor, ...]
    bytes: int
    """Memory that the driver allocated for the graph. torch allocates what its kernels write."""


class ResultBuffer:
    """Buffer for a result that all graphs share, valid until the next run.

    It grows to the largest step. Graphs captured before keep the smaller buffer."""

    def __init__(self, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, columns, dtype=dtype, device=device)

    def rows(self, count: int) -> torch.Tensor:
        """Return the first `count` rows [count, columns]."""
        if self._buffer.shape[0] < count:
            self._buffer = self._buffer.new_empty(power_of_two(count), self._buffer.shape[1])
        return self._buffer[:count]


class CudaGraphs:
    """Captured graphs by kind and shape."""

    def __init__(self, *, enabled: bool, limit_bytes: int = 1 << 62) -> None:
        """`enabled` False: launch all steps kernel by kernel. `limit_bytes`: of the driver, for all graphs."""
        self.enabled = enabled
        self._max_graphs = GRAPHS
        self._limit_bytes = limit_bytes
        self._captured: OrderedDict[_Key, _CapturedGraph] = OrderedDict()
        """Graphs, with the least recently used first."""
        self._seen: Counter[_Key] = Counter()
        self._covered: Counter[_Key] = Counter()
        """Steps that ran in graphs of larger shapes."""
        self._too_large: set[_Key] = set()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self.steady = True
        """The time of the last run is typical: it was a replay, or no run of its shape will be one.

        Other runs may compile kernels, and the GPU waits for the CPU."""

    @property
    def count(self) -> int:
        return len(self._captured)

    @property
    def bytes(self) -> int:
        """Memory that the driver allocated for the graphs. torch does not count it."""
        return sum(graph.bytes for graph in self._captured.values())

    @property
    def full(self) -> bool:
        """True if another graph would evict one."""
        return self.count >= self._max_graphs or self.bytes >= self._limit_bytes

    def has(self, kind: str, shape: StepShape) -> bool:
        """Return True if the next run is a replay, or no run ever will be."""
        key = kind, shape
        return not self.enabled or key in self._captured or key in self._too_large

    def replays(self, kind: str, shape: StepShape) -> bool:
        """Return True if the next run is a replay, or graphs are disabled."""
        return not self.enabled or (kind, shape) in self._captured

    def covers(self, kind: str, shape: StepShape) -> list[StepShape]:
        """Return the captured shapes that may run a step of this shape, sorted by tokens.

        Returns no shapes if this one has a graph, or occurs so often that it should get one."""
        key = kind, shape
        if not self.enabled or key in self._captured or self._covered[key] >= _COVERED_RUNS:
            return []
        shapes = [
            captured
            for captured_kind, captured in self._captured
            if captured_kind == kind and captured.may_cover(shape)
        ]
        if shapes:
            self._covered[key] += 1
        return sorted(shapes)

    def clear(self) -> None:
        """Drop all graphs because a tensor that they read has moved. This frees their memory."""
        self._captured.clear()

    def shrink(self) -> None:
        """Drop all graphs because memory ran out. Many graphs also halve the limit."""
        if self.count > MIN_GRAPHS:
            self._max_graphs = max(MIN_GRAPHS, self.count // 2)
        self.clear()

    def run(self, kind: str, shape: StepShape, body: Body) -> tuple[torch.Tensor, ...]:
        """Run or replay `body`, and return its results, which are valid until the next run.

        For the same kind and shape, `body` must read and write the same addresses and sizes."""
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
        """Count a run without a graph. Return True to capture it now."""
        self._seen[key] += 1
        self.steady = not self.enabled or key in self._too_large
        runs = 1 if own_carveout(shape.tokens) else RUNS_BEFORE_CAPTURE
        return not self.steady and self._seen[key] > runs

    def _try_capture(self, key: _Key, body: Body) -> _CapturedGraph | None:
        """Capture a shape. None on failure: the caller then launches it kernel by kernel."""
        # Evict the least recently used graphs. They must be seen again before they are captured again.
        while self._captured and self.full:
            dropped, _ = self._captured.popitem(last=False)
            self._seen[dropped] = 0
        if not self._captured:
            # A pool is freed with its last graph, or with a failed capture, and cannot be used again.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            captured = self._captured[key] = self._capture(body)
        except Exception as error:
            if not spoils_capture(error):
                raise
        else:
            return captured
        # A graph keeps its memory. Launched kernel by kernel, the step may still fit.
        self._too_large.add(key)
        torch.cuda.empty_cache()
        return None

    def _capture(self, body: Body) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Wait for steps in flight: an allocation that waits for one would invalidate the capture.
        torch.cuda.synchronize()
        before_bytes = _driver_bytes()
        # The garbage collector may destroy a graph, which invalidates the capture.
        collecting = gc.isenabled()
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            results = body()
        except BaseException:
            # An invalidated capture also fails at its end.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        else:
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return _CapturedGraph(graph, results, max(0, _driver_bytes() - before_bytes))


def _driver_bytes() -> int:
    """Return the used memory of the current GPU, without that of torch's allocator."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()
