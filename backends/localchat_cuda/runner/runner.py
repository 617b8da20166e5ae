"""Executes plans on a GPU, two steps deep; with references instead of kernels on a CPU, one after the other.

`launch` only queues work on one stream: it copies what the plan says into the inbox, computes and draws
(execution.py), and copies home what was drawn. The next step reads its inputs from the table of known tokens,
so it can be launched before this one's tokens are on the CPU; `collect` waits for the oldest step's event and
for nothing else. Inside a step the CPU never waits for the GPU.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

from localchat.backend_api.interface import Capabilities, Copy, MemoryReport, StepPlan, StepResult
from localchat_cuda.compile_ahead.triton_cache import hash_bottom_up
from localchat_cuda.kernels.attention.prefill import best_cut
from localchat_cuda.kernels.launch import interpreted, traits
from localchat_cuda.runner.device_state import StateTable, Writes
from localchat_cuda.runner.input_batch import DECODE_BUCKETS, BatchConfig
from localchat_cuda.runner.model import CudaGraphs, DeviceModel
from localchat_cuda.runner.sampler import DeviceSampler, ReferenceSampler, TritonSampler
from localchat_cuda.runner.step_buffer import StepBuffer
from localchat_cuda.runner.step_executor import StepExecutor, Work
from localchat_cuda.runner.step_output import PendingStep

DEPTH = 2
LOGIT_ROWS = 64
"""Rows of logits at once, and points of one draw; more slots raise it."""
_SLOW_LAUNCH_S = 0.01
"""Where the host takes longer, it replays no graph."""
_OUT_OF_MEMORY = "a step found no GPU memory: smaller steps follow"


class CudaRunner:
    """See backend.Runner. Steps are bounded by the plan's pages and by `capabilities.max_step_tokens`."""

    def __init__(
        self, model: DeviceModel, capabilities: Capabilities, *, graphs: bool = True
    ) -> None:
        """Takes `network` over; its pages are one more than the capabilities' blocks: the last is scratch."""
        self.capabilities = capabilities
        if model.kernels and not interpreted():
            hash_bottom_up()
        self._model: DeviceModel | None = model
        pages, config = model.pages, model.config
        self.device = pages.device
        self._gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._gpu else None  # type: ignore[no-untyped-call]
        sizes = BatchConfig(
            config.heads, config.key_heads, config.head_dim, pages.page_tokens,
            traits(self.device).sms, coded=pages.exponents is not None,
            context_tokens=capabilities.context_tokens,
            chunks=best_cut(
                config.head_dim, pages.page_tokens, pages.dtype, self.device, config.attention_cap
            ),
        )  # fmt: skip
        blocks = capabilities.kv_tokens // capabilities.block_tokens
        with self._on_stream():
            self.table = StateTable(
                capabilities.max_slots, capabilities.context_tokens, pages.page_tokens, blocks,
                self.device,
            )  # fmt: skip
            self._buffer = StepBuffer(self._buffer_words(), DEPTH + 1, self.device)
            most = max(LOGIT_ROWS, min(DECODE_BUCKETS[-1], capabilities.max_slots))
            self._sampler: DeviceSampler = (
                TritonSampler(self.table, config.vocabulary, most)
                if model.kernels
                else ReferenceSampler(self.table, config.vocabulary)
            )
        self.graphs = CudaGraphs(enabled=graphs and self._gpu)
        self._executor = StepExecutor(
            model, self.table, self._buffer, self._sampler, sizes, self.graphs, most
        )
        self._pending: deque[PendingStep] = deque()

    def _buffer_words(self) -> int:
        """Most that a step can say: 16 words a token and 128 a slot cover ids, points and settings."""
        can = self.capabilities
        padded = max(can.max_step_tokens, DECODE_BUCKETS[-1]) + 64
        return 16 * padded + 1024 * (can.max_slots + 64) + 3 * can.max_slots * self.table.width

    # ------------------------------------------------------------------------ launch

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; see backend.Runner."""
        assert len(self._pending) < DEPTH, "too many steps in flight"
        model = self._model
        assert model is not None, "the runner is closed"
        step = PendingStep(plan, time.perf_counter())
        if any(one.status == "out_of_memory" for one in self._pending):
            step.status = "aborted"
        with self._on_stream():
            begun = self._event()
            self.table.leave(plan.leave)
            for operation in plan.memory:
                assert isinstance(operation, Copy), f"a paged cache cannot {operation}"
                model.pages.copy(operation.src_block, operation.dst_block, operation.tokens)
            work, writes = self._prepare(step)
            self._buffer.send()
            self.table.apply(writes, self._buffer)
            self._sampler.apply(self._buffer)
            if work is not None:
                try:
                    self._executor.compute(step, work)
                    step.typical = self.graphs.settled or not work.layout.captured
                except torch.OutOfMemoryError:
                    self._mark_out_of_memory(step)
            done = self._event()
            if begun is not None and done is not None:
                step.events = (begun, done)
        step.host_s = time.perf_counter() - step.begun_s
        self._pending.append(step)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On the runner's stream, without gradients."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def _event(self) -> torch.cuda.Event | None:
        if not self._gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _prepare(self, step: PendingStep) -> tuple[Work | None, Writes]:
        """Put everything that the step says into the inbox; the layout first, where graphs look for it."""
        plan, buffer = step.plan, self._buffer
        entered = self.table.enter(plan.enter)
        for one, known in zip(plan.enter, entered, strict=True):
            if known.sampling.penalised:
                self.table.remember(known.row, one.tokens)
        buffer.begin()
        wanted = bool(plan.rows) and step.status == "ok"
        work = self._executor.prepare(step) if wanted else None
        self._sampler.settle(entered, buffer)
        if self.table.moved or self._sampler.moved:
            self.graphs.clear()
            self.table.moved = self._sampler.moved = False
        return work, self.table.put(plan.rows, buffer, compute=work is not None)

    def _mark_out_of_memory(self, step: PendingStep) -> None:
        """The step did not happen: pages and tables are as they were planned, nothing was drawn."""
        step.status, step.notes = "out_of_memory", (_OUT_OF_MEMORY,)
        step.drawn, step.tokens, step.judged, step.prompt = {}, None, [], []
        if self._gpu:
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------ collect

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Its time is 0 where it says nothing of later ones."""
        step = self._pending.popleft()
        if step.events is None:
            return step.result(time.perf_counter() - step.begun_s)
        begun, done = step.events
        done.synchronize()
        elapsed_s = begun.elapsed_time(done) / 1e3
        return step.result(elapsed_s if self._is_typical(step, elapsed_s) else 0.0)

    def _is_typical(self, step: PendingStep, elapsed_s: float) -> bool:
        """Whether the GPU was busy for that long. Where it waited for the host, which compiles a kernel or
        launches hundreds one by one, the loop would take prompts for slow, and let them wait."""
        waited = step.host_s > max(_SLOW_LAUNCH_S, elapsed_s / 2)
        return step.typical and not (waited and self.graphs.enabled)

    def forget(self) -> None:
        """What was launched is never collected: a rehearsal's steps, of which nothing comes (rehearsal.py)."""
        self._pending.clear()

    def abort(self) -> None:
        """Nothing: a step on a GPU cannot be taken back, and none takes longer than 0.2 s."""

    def memory(self) -> MemoryReport:
        """What tensors hold: weights, pages; compute is all else that torch reserved."""
        if self._model is None:
            return MemoryReport(0, 0, 0, 0)
        weights, kv = self._model.weights.bytes, self._model.pages.bytes
        if not self._gpu:
            return MemoryReport(weights, kv, -1, -1)
        reserved = torch.cuda.memory_reserved(self.device)
        return MemoryReport(weights, kv, max(0, reserved - weights - kv), -1)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._model is None:
            return
        if self._gpu:
            torch.cuda.synchronize(self.device)
        self._pending.clear()
        self.graphs.clear()
        del self._model, self._executor, self._sampler, self._buffer, self.table, self.graphs
        self._model = None
        if self._gpu:
            torch.cuda.empty_cache()
