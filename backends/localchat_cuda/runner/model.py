"""A loaded model as the runner drives it: weights, pages, and a step from token ids to logits; with CUDA
graphs of the shapes that come again.

A graph is captured when a shape (layout.Shape) is seen for the third time, one of many rows for the second: by
then its kernels are compiled and settled, and a shape that comes once costs nothing. Graphs read the inbox, the
known tokens, the block tables and the pages at their fixed addresses and leave their results at some of their
own. All share one memory pool: they run one after the other.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable

import torch

from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.kernels.int4 import packed_rows
from localchat_cuda.kernels.launch import roomy
from localchat_cuda.layers import DenseLayers, PackedW4Layers, compute_logits
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.runner.input_batch import StepShape
from localchat_cuda.runner.kv_pages import ModelInputs, Pages
from localchat_cuda.weights.loader import ModelWeights

RUNS_BEFORE_CAPTURE = 2
"""Of few rows: a kernel's carve-out (launch.settle) holds from its second launch on. Others need one."""


class DeviceModel:
    """The forward pass. `kernels`: run the kernels, else their references."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, pages: Pages, *, kernels: bool
    ) -> None:
        self.config, self.weights, self.pages, self.kernels = config, weights, pages, kernels
        self._forward = ARCHITECTURES[config.architecture].forward

    def states(self, inputs: ModelInputs) -> torch.Tensor:
        """Last states [P, hidden] of the wanted tokens; keys and values go into the pages."""
        packed = self.weights.packed and inputs.ids.shape[0] <= packed_rows(self.pages.device)
        kind = PackedW4Layers if packed else DenseLayers
        found: torch.Tensor = self._forward(
            kind(self.config, inputs, self.pages, kernels=self.kernels), self.weights
        )
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [P, vocabulary]."""
        return compute_logits(states, self.weights.head, self.config.head_cap, kernels=self.kernels)


Work = Callable[[], tuple[torch.Tensor, ...]]


class CudaGraphs:
    """Captured work by its kind and shape. `enabled` False: everything is launched kernel by kernel."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._held: dict[
            tuple[str, StepShape], tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]
        ]
        self._held = {}
        self._seen: Counter[tuple[str, StepShape]] = Counter()
        self._without_room: set[tuple[str, StepShape]] = set()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self.settled = True
        """Whether the last run was a replay, or never will be: its time is typical. Before, kernels may have
        been compiled, and the GPU waited for the CPU."""

    @property
    def count(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forget all: something that they read has moved. Their memory goes with the last of them."""
        self._held.clear()
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def run(self, kind: str, shape: StepShape, work: Work) -> tuple[torch.Tensor, ...]:
        """What `work` returns; valid until the next run. Equal kind and shape must mean equal addresses and
        sizes of all that it reads and writes."""
        key = kind, shape
        held = self._held.get(key)
        if held is None:
            self._seen[key] += 1
            self.settled = not self.enabled or key in self._without_room
            if (
                not self.enabled
                or self._seen[key] <= (1 if roomy(shape.tokens) else RUNS_BEFORE_CAPTURE)
                or key in self._without_room
            ):
                return work()
            try:
                held = self._held[key] = self._capture(work)
            except torch.OutOfMemoryError:
                # A graph keeps its results for ever; launched kernel by kernel the step may still fit.
                self._without_room.add(key)
                torch.cuda.empty_cache()
                return work()
        else:
            self.settled = True
        held[0].replay()
        return held[1]

    def _capture(self, work: Work) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
        graph = torch.cuda.CUDAGraph()
        # What is in flight ends first: an allocation that waits for it would spoil the capture.
        torch.cuda.synchronize()
        # A graph that the garbage collector finds now would be destroyed, which no capture survives.
        collecting = gc.isenabled()
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            found = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a spoilt capture says so at its end too
                graph.capture_end()
            raise
        else:
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph, found
