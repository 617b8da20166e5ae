"""Executes step plans on a GPU with two steps in flight, or on a CPU.

On a CPU, references run instead of kernels.

`launch` only queues work on one stream. It copies the plan's numbers to the device, computes and samples
(step_executor.py), and copies the sampled tokens to the host. The next step reads its inputs from the token
table, so it can be launched before this step's tokens are on the CPU. `collect` waits only for the event of the
oldest step. Inside a step, the CPU never waits for the GPU.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from localchat.backend_api.drafter import Drafter
from localchat.backend_api.interface import (
    Alias,
    Capabilities,
    Copy,
    Discard,
    LoadBlock,
    MemoryOp,
    MemoryReport,
    Restore,
    Save,
    SaveBlock,
    StepPlan,
    StepResult,
)
from localchat.backend_api.prepared_steps import DecodeRow
from localchat.errors import DeviceFault
from localchat_cuda.compile_ahead.job import FEW_ROWS, Phase
from localchat_cuda.compile_ahead.triton_cache import hash_bottom_up
from localchat_cuda.compile_ahead.workers import CompileAhead
from localchat_cuda.kernels.attention.prefill import best_tile_config
from localchat_cuda.kernels.launch import interpreted, traits
from localchat_cuda.plan.memory_plan import logit_rows
from localchat_cuda.runner.common_steps import common_steps, covering_steps
from localchat_cuda.runner.cuda_errors import describe_device, is_device_fault, is_out_of_memory
from localchat_cuda.runner.cuda_graphs import RUNS_BEFORE_CAPTURE, CudaGraphs
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.host_pages import HostPages
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    MAX_DECODE_WIDTH,
    BatchConfig,
    StepShape,
    TokenSpan,
)
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.sampler import ReferenceSampler, TritonSampler
from localchat_cuda.runner.step_buffer import StepBuffer
from localchat_cuda.runner.step_executor import PreparedStep, StepExecutor
from localchat_cuda.runner.step_output import DEPTH, PendingStep
from localchat_cuda.weights.eagle import EagleWeights

X = TypeVar("X")

_BURST_SLOTS = 32
"""Slots from which a load prepares for many requests at once."""
_MAX_MISSING = 32
"""Limit of missing steps that are captured in one idle period."""
_SLOW_LAUNCH_S = 0.01
"""Host time of a launch above which it did not replay a graph."""
_COMPILING_S = 0.01
"""Longest wait of `warm_up_next` for kernels. A new request waits for it."""


class AttachedDrafter(Drafter, Protocol):
    """Drafter with its own runner."""

    runner: "CudaRunner"

    def forget(self, seq: int) -> None:
        """Free the memory of a sequence that left or starts again."""
        ...


class CudaRunner:
    """See backend_api.interface.Runner. Steps have up to `capabilities.max_step_tokens` tokens.

    Size: it implements four interfaces of the core: steps, prepared steps, drafts and host blocks."""

    def __init__(
        self,
        model: DeviceModel,
        capabilities: Capabilities,
        *,
        graphs: bool = True,
        graph_bytes: int = 1 << 62,
        host_blocks: HostPages | None = None,
    ) -> None:
        """Take ownership of `model`.

        The model has one more page of each kind than the capabilities have blocks, for padding. `graphs` False:
        capture none. `graph_bytes`: limit of their memory. `host_blocks`: those of the capabilities."""
        self.capabilities = capabilities
        if model.kernels and not interpreted():
            hash_bottom_up()
        self._model: DeviceModel | None = model
        self._host_blocks = host_blocks
        pages = model.pages
        config = model.config
        self.device = pages.device
        self._gpu = self.device.type == "cuda"
        # Read in advance, because the GPU does not respond after an error.
        self._device_text = describe_device(self.device)
        self._stream = torch.cuda.Stream(self.device) if self._gpu else None  # type: ignore[no-untyped-call]
        with self.on_stream():
            self.table = StateTable(capabilities, self.device)
            self._buffer = StepBuffer(self._buffer_words(), DEPTH + 1, self.device)
            max_rows = logit_rows(capabilities.max_slots)
            self._sampler: ReferenceSampler | TritonSampler
            if model.kernels:
                self._sampler = TritonSampler(
                    self.table, config.vocabulary, max_rows, rescores=model.approximate_rows > 0
                )
            else:
                self._sampler = ReferenceSampler(self.table, config.vocabulary)
        self.graphs = CudaGraphs(enabled=graphs and self._gpu, limit_bytes=graph_bytes)
        self._executor = StepExecutor(
            model,
            self.table,
            self._buffer,
            self._sampler,
            _batch_config(model, capabilities),
            self.graphs,
            max_rows,
        )
        self._pending: deque[PendingStep] = deque()
        self.compiling: CompileAhead | None = None
        """Compilation that may still run in other processes; None: all kernels are compiled."""
        self._drafter: AttachedDrafter | None = None
        self.sleeps = True
        """The thread that waits for a step sleeps if other steps were queued before it."""
        self._covering_steps: deque[list[TokenSpan]] = deque()
        if model.collective is None:
            self._covering_steps.extend(covering_steps(capabilities, self.table.scratch))
        """Steps that `warm_up_next` runs before all others."""
        self._common_steps = common_steps(capabilities, self.table.scratch)
        """Steps that `warm_up_next` has not run yet."""
        self._missing: dict[tuple[str, StepShape], list[TokenSpan]] = {}
        """Steps that could not have drafts without a graph, by its kind and shape. They run first."""
        self._max_missing = _MAX_MISSING
        self._repeated: tuple[list[TokenSpan], str, int] | None = None
        """Last step of `warm_up_next` if it needs more runs: spans, kind of graph, number of runs."""

    @property
    def model(self) -> DeviceModel:
        """Model of the runner."""
        assert self._model is not None, "the runner is closed"
        return self._model

    def keep_last_states(self, states: LastStates, eagle: EagleWeights | None = None) -> None:
        """Store states of every step for prediction heads. `eagle`: head that projects several layers'."""
        self.model.last_states = states
        self.model.eagle = eagle
        # Graphs captured before do not store them.
        self.graphs.clear()

    def prepare(self, steps: Iterator[list[TokenSpan]]) -> None:
        """Replace the steps of padding that `warm_up_next` runs."""
        self._covering_steps.clear()
        self._common_steps = steps

    def attach(self, drafter: AttachedDrafter) -> None:
        """Take ownership of a drafter."""
        self._drafter = drafter
        self.capabilities = replace(self.capabilities, draft_model=True)

    @property
    def drafter(self) -> AttachedDrafter:
        """See backend_api.drafter.DraftingRunner."""
        assert self._drafter is not None, "the capabilities state that the runner has no drafter"
        return self._drafter

    def _buffer_words(self) -> int:
        """Return the words of the largest step without logit biases and many forks."""
        caps = self.capabilities
        # 16 words per token and 1,024 per slot.
        padded = max(caps.max_step_tokens, DECODE_BUCKETS[-1]) + 64
        table_words = caps.max_slots * self.table.width
        if caps.window_blocks:
            table_words *= 2
        return 16 * padded + 1024 * (caps.max_slots + 64) + 3 * table_words

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; see backend_api.interface.Runner."""
        assert len(self._pending) < DEPTH, "too many steps in flight"
        model = self._model
        assert model is not None, "the runner is closed"
        self._wait_for_kernels(plan)
        step = PendingStep(plan, time.perf_counter())
        if any(pending.status == "out_of_memory" for pending in self._pending):
            step.status = "aborted"
        self._update_drafting_state(plan, model)
        with self.on_stream(), self._faults(step):
            start = self._event()
            self.table.remove(plan.leave)
            self._sampler.add(self.table.add(plan.enter))
            late_saves = self._execute_memory(plan, model.pages)
            self._buffer.begin_step()
            prepared = self._guarded(step, self._prepare)
            # Block tables grow even if the step is dropped.
            if plan.moved:
                writes = self.table.write_blocks(plan, self._buffer)
            else:
                writes = self.table.write(plan.rows, self._buffer, compute=prepared is not None)
            # Write the settings last, because they may fill the buffer.
            self._guarded(step, self._write_settings)
            self._buffer.send()
            self.table.apply(writes)
            if prepared is not None:
                self._guarded(step, partial(self._compute, prepared))
            self._save(late_saves)
            # While the host waits for a step behind another one, a third step is already queued. The thread may
            # sleep, because waking up late does not cost GPU time. The host spins for a lone step.
            done = self._event(blocking=bool(self._pending) and self.sleeps)
            if start is not None and done is not None:
                step.events = (start, done)
        step.host_s = time.perf_counter() - step.launched_s
        self._pending.append(step)

    def _wait_for_kernels(self, plan: StepPlan) -> None:
        """Wait until the kernels of a step are compiled.

        Compiled by this process, one after the other, they would take longer. A short prompt runs with the
        kernels of longer ones until its own are compiled, so only rounding differs from later answers."""
        self._executor.max_decode_width = MAX_DECODE_WIDTH
        if self.compiling is None:
            return
        if self.compiling.finished():
            self.compiling = None
            return
        drafts = any(row.drafts for row in plan.rows)
        phase = Phase.of([row.width for row in plan.rows], drafts=drafts)
        if phase is Phase.SHORT_PROMPT and not self.compiling.reached(phase):
            self._executor.max_decode_width = 1
            phase = Phase.ONE_ROW
        self.compiling.wait(phase)

    def _update_drafting_state(self, plan: StepPlan, model: DeviceModel) -> None:
        """Report a plan's sequences to the drafter and the store of last states."""
        moved = (*plan.leave, *(entry.seq for entry in plan.enter))
        if self._drafter is not None:
            for seq in moved:
                self._drafter.forget(seq)
        if model.last_states is not None:
            for seq in moved:
                model.last_states.forget(seq)
            model.last_states.note(plan.unmoved().rows)

    def _execute_memory(self, plan: StepPlan, pages: Pages) -> list[SaveBlock]:
        """Queue the memory operations of a plan, and return saves to queue after the step.

        Nothing in the plan depends on those saves. Make the stream wait for the copies of all blocks that rows
        start to use."""
        host = self._host_blocks
        if plan.moved:
            new = [block for _, blocks in plan.new_blocks for block in blocks]
        else:
            new = [block for row in plan.rows for block in row.new_blocks]
        if host is None:
            for operation in plan.memory:
                _execute(operation, pages)
            return []
        loaded = {load.block for load in plan.memory if isinstance(load, LoadBlock)}
        copied = {copy.dst_block for copy in plan.memory if isinstance(copy, Copy)}
        written = {*new, *loaded, *copied}
        late_saves: list[SaveBlock] = []
        for operation in plan.memory:
            match operation:
                case Copy(source, target, tokens):
                    host.wait_for((source, target))
                    pages.copy(source, target, tokens)
                    host.copied()
                case SaveBlock(block) if block not in written:
                    late_saves.append(operation)
                case SaveBlock(block, number) | LoadBlock(number, block):
                    if any(save.host_block == number for save in late_saves):
                        self._save(late_saves)
                        late_saves = []
                    if isinstance(operation, SaveBlock):
                        host.save(block, number)
                    else:
                        host.load(number, block)
                case _:
                    raise AssertionError(f"a paged cache cannot {operation}")
        host.wait_for(new)
        return late_saves

    def _save(self, operations: list[SaveBlock]) -> None:
        if self._host_blocks is not None:
            for operation in operations:
                self._host_blocks.save(operation.block, operation.host_block)
            self._host_blocks.record()

    def host_block(self, number: int) -> memoryview | None:
        """See backend_api.kv_transfer.HostBlockRunner."""
        assert self._host_blocks is not None, "there are no host blocks"
        return self._host_blocks.bytes_of(number)

    def block_sums(self, numbers: Sequence[int]) -> list[bytes]:
        """See backend_api.kv_transfer.HostBlockRunner."""
        assert self._host_blocks is not None, "there are no host blocks"
        return self._host_blocks.sums_of(numbers)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run code on the runner's stream, without gradients."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def _faults(self, step: PendingStep) -> Iterator[None]:
        """Report a GPU error with the steps that may have caused it: `step` and those in flight."""
        try:
            yield
        except Exception as error:
            if not is_device_fault(error):
                raise
            # The other lines are advice to developers of CUDA programs.
            first_line = str(error).strip().partition("\n")[0] or type(error).__name__
            suspects = "; ".join(
                f"step {suspect.plan.number}, {suspect.shape}"
                for suspect in (step, *self._pending)
                if suspect.shape is not None
            )
            raise DeviceFault(
                f"The GPU reported an error: {first_line}. Last launched: {suspects or 'no step'}. "
                f"{self._device_text}"
            ) from error

    def _event(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """Record an event on the stream; None on a CPU. `blocking`: a thread that waits for it sleeps."""
        if not self._gpu:
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _guarded(self, step: PendingStep, work: Callable[[PendingStep], X | None]) -> X | None:
        """Run a part of a launch, unless the step was dropped. Running out of memory drops it."""
        if step.status == "out_of_memory":
            return None
        try:
            return work(step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # The handler's traceback would keep the step's tensors, so drop the step here.
        self._drop(step)
        return None

    def _prepare(self, step: PendingStep) -> PreparedStep | None:
        """Write the arrays of the computation to the start of the buffer."""
        if not step.plan.rows or step.status != "ok":
            return None
        prepared = self._executor.prepare(step)
        step.shape = prepared.batch.shape
        return prepared

    def _write_settings(self, _: PendingStep) -> None:
        """Write settings of new sequences to the buffer, and the tokens that their penalties count."""
        self.table.store_tokens()
        self._sampler.write_settings(self._buffer)

    def _compute(self, prepared: PreparedStep, step: PendingStep) -> None:
        """Apply the settings of new sequences, and queue the step."""
        self._sampler.apply_settings()
        if self._sampler.reallocated:
            # Graphs read the settings by their addresses.
            self.graphs.clear()
            self._sampler.reallocated = False
        self._executor.compute(step, prepared)
        batch = prepared.batch
        step.typical = (self.graphs.steady or not batch.captured) and not batch.covered

    def _drop(self, step: PendingStep) -> None:
        """Drop the results of a step that ran out of memory. Pages and tables stay as planned."""
        step.status = "out_of_memory"
        step.notes = ("a step ran out of GPU memory; the next steps are smaller",)
        step.sampled = {}
        step.tokens = None
        step.top_logprobs = []
        step.prompt_logprobs = []
        if self._gpu:
            self.graphs.shrink()
            torch.cuda.empty_cache()

    def prepare_for_bursts(self) -> None:
        """Capture the covering steps, if the runner has slots for many requests.

        They take about half a second. Without them, each new shape of a burst takes the host 35 ms."""
        if self.capabilities.max_slots >= _BURST_SLOTS:
            while (self._covering_steps or self._repeated) and self.warm_up_next():
                pass

    def warm_up_next(self) -> bool:
        """Run one missing or common step of padding; see backend_api.interface.Runner.

        A new request waits for this run only. The last run of a step captures its graph."""
        if self.compiling is not None and not self.compiling.finished():
            self.compiling.idle(_COMPILING_S)
            return True
        has_work = self._missing or self._repeated
        if self._drafter is not None and not has_work and self._drafter.runner.warm_up_next():
            return True
        if not self.graphs.enabled or self._model is None:
            return False
        assert not self._pending, "a step is in flight"
        step = PendingStep(StepPlan(0, ()), time.perf_counter())
        with self.on_stream(), self._faults(step):
            for spans, kind, runs in self._unprepared():
                self._buffer.begin_step()
                prepared = self._executor.prepare_padding(spans, kind)
                step.shape = prepared.batch.shape
                if self._executor.captured(prepared):
                    continue
                self._before_padding(spans, kind)
                self._buffer.send()
                self._guarded(step, partial(self._executor.compute, prepared=prepared))
                if self._stream is not None:
                    self._stream.synchronize()
                if not self.graphs.steady and runs < RUNS_BEFORE_CAPTURE:
                    self._repeated = spans, kind, runs + 1
                if step.status != "ok":
                    # Leave the remaining memory to graphs of steps that occur.
                    self._covering_steps.clear()
                    self._common_steps = iter(())
                    self._max_missing = 0
                    self._missing.clear()
                return step.status == "ok"
        return False

    def _before_padding(self, spans: list[TokenSpan], kind: str) -> None:
        """Do something before a step of padding runs. RankedRunner sends it to the other ranks."""

    def run_padding(self, spans: list[TokenSpan], kind: str) -> None:
        """Run a step of padding that rank 0 runs, too. See step_executor.prepare_padding."""
        assert not self._pending, "a step is in flight"
        step = PendingStep(StepPlan(0, ()), time.perf_counter())
        with self.on_stream(), self._faults(step):
            self._buffer.begin_step()
            prepared = self._executor.prepare_padding(spans, kind)
            self._buffer.send()
            self._executor.compute(step, prepared)
            if self._stream is not None:
                self._stream.synchronize()

    def _unprepared(self) -> Iterator[tuple[list[TokenSpan], str, int]]:
        """Yield steps of padding to run next: spans, kind of graph (empty: the usual), number of runs."""
        if self._repeated is not None:
            repeated = self._repeated
            self._repeated = None
            yield repeated
        while self._covering_steps:
            yield self._covering_steps.popleft(), "", 0
        while self._missing:
            kind, shape = next(iter(self._missing))
            yield self._missing.pop((kind, shape)), kind, 0
        while not self.graphs.full and (spans := next(self._common_steps, None)) is not None:
            yield spans, "", 0

    def prepared(self, rows: Sequence[DecodeRow], *, masked: bool) -> bool:
        """Return True if a graph can run a step of these rows; see backend_api.prepared_steps."""
        if not self.graphs.enabled:
            return True
        if any(row.seq not in self.table.sequences for row in rows):
            # A choice that enters with the next plan.
            return False
        spans = [TokenSpan(self.table.scratch, row.start, row.width) for row in rows]
        shape, kinds = self._executor.kinds(spans, [row.seq for row in rows], masked=masked)
        missing = [kind for kind in kinds if not self.graphs.replays(kind, shape)]
        for kind in missing:
            if not self.graphs.has(kind, shape) and len(self._missing) < self._max_missing:
                self._missing[kind, shape] = spans
        return not missing

    def ready_rows(self, sequences: int) -> int:
        """Return how many sequences have their kernels; see backend_api.prepared_steps."""
        limit = self.capabilities.max_rows
        compiling = self.compiling
        if compiling is None or compiling.finished():
            return limit
        ready = 1
        if compiling.reached(Phase.FEW_ROWS):
            ready = min(limit, FEW_ROWS)
        if sequences > ready:
            compiling.hurry()
        return ready

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. `elapsed_s` is 0 if it does not predict later steps."""
        step = self._pending.popleft()
        if step.events is None:
            return step.result(time.perf_counter() - step.launched_s)
        start, done = step.events
        with self._faults(step):
            done.synchronize()
            elapsed_s = start.elapsed_time(done) / 1e3
        if not self._is_typical(step, elapsed_s):
            elapsed_s = 0.0
        return step.result(elapsed_s)

    @property
    def step_is_done(self) -> bool:
        """True if `collect` does not have to wait for the oldest launched step."""
        events = self._pending[0].events
        return events is None or events[1].query()  # type: ignore[no-untyped-call]

    def finish_block_copies(self) -> None:
        """Wait for all copies between pages and host blocks."""
        if self._host_blocks is not None:
            self._host_blocks.synchronize()

    def _is_typical(self, step: PendingStep, elapsed_s: float) -> bool:
        """Return True if the GPU was busy for the whole time of a step.

        Otherwise it waited for the host, which compiled a kernel or launched hundreds one by one. The scheduler
        would conclude that prompts are slow."""
        waited = step.host_s > max(_SLOW_LAUNCH_S, elapsed_s / 2)
        return step.typical and not (waited and self.graphs.enabled)

    def discard_pending(self) -> None:
        """Drop all launched steps without collecting them. Compiling ahead has no results."""
        self._pending.clear()

    def abort(self) -> None:
        """Do nothing: a queued step cannot be cancelled, and takes at most 0.2 s."""

    def memory(self) -> MemoryReport:
        """Return the bytes of weights, pages, compute and captured graphs.

        Compute is the rest of what torch reserved, including the drafter's memory. The driver allocates
        graphs."""
        if self._model is None:
            return MemoryReport(0, 0, 0, 0)
        weights = self._model.weights.bytes
        kv = self._model.pages.bytes
        graphs = self.graphs.bytes
        if self._drafter is not None:
            graphs += self._drafter.runner.graphs.bytes
        if not self._gpu:
            return MemoryReport(weights, kv, -1, -1)
        reserved = torch.cuda.memory_reserved(self.device)
        return MemoryReport(weights, kv, max(0, reserved - weights - kv), graphs)

    def close(self) -> None:
        """Free all memory. Idempotent."""
        if self._model is None:
            return
        if self.compiling is not None:
            self.compiling.stop()
        if self._gpu:
            torch.cuda.synchronize(self.device)
        if self._drafter is not None:
            self._drafter.runner.close()
        self._pending.clear()
        self.graphs.clear()
        if self._host_blocks is not None:
            self._host_blocks.close()
        del self._model, self._executor, self._sampler, self._buffer, self.table, self.graphs
        self._model = None
        if self._gpu:
            torch.cuda.empty_cache()


def _batch_config(model: DeviceModel, capabilities: Capabilities) -> BatchConfig:
    """Return the layout of steps, which serves all layers.

    The widest heads decide the tiles, and the fewest key heads decide the splits."""
    pages = model.pages
    config = model.config
    d = max(map(config.head_dim_of, range(config.layers)))
    key_heads = min(map(config.key_heads_of, range(config.layers)))
    prefill_tile = None
    # The faster kernel does not support heads of two widths in one layout.
    if not config.gemma or config.gemma.head_dim == config.head_dim:
        prefill_tile = best_tile_config(
            d, pages.page_tokens, pages.dtype, pages.device, config.attention_cap
        )
    return BatchConfig(
        config.heads,
        key_heads,
        d,
        pages.page_tokens,
        traits(pages.device).sms,
        fp8_kv=bool(pages.exponents),
        context_tokens=capabilities.context_tokens,
        latents=config.latent is not None,
        states=pages.states is not None,
        prefill_tile=prefill_tile,
    )


def _execute(operation: MemoryOp, pages: Pages) -> None:
    """Queue a memory operation. Only models with states have other operations than Copy."""
    if isinstance(operation, Copy):
        source = operation.src_block
        target = operation.dst_block
        pages.copy(source, target, operation.tokens, windowed=operation.window)
        return
    states = pages.states
    assert states is not None, f"a paged cache cannot {operation}"
    match operation:
        case Save(slot, key):
            states.save(slot, key)
        case Restore(key, slot):
            states.restore(key, slot)
        case Discard(key):
            states.discard(key)
        case Alias(source, target):
            states.copy(source, target)
        case _:
            raise AssertionError(f"a paged cache cannot {operation}")
