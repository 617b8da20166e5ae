"""Executes step plans on a GPU, two steps deep; on a CPU with references instead of kernels, one by one.

`launch` only queues work on one stream: it copies the plan's numbers to the device, computes and samples
(step_executor.py), and copies the sampled tokens to the host. The next step reads its inputs from the token
table, so it can be launched before this one's tokens are on the CPU; `collect` waits for the oldest step's
event and for nothing else. Inside a step the CPU never waits for the GPU.
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
from localchat_cuda.compile_ahead.triton_cache import hash_bottom_up
from localchat_cuda.kernels.attention.prefill import best_tile_config
from localchat_cuda.kernels.launch import interpreted, traits
from localchat_cuda.plan.memory_plan import logit_rows
from localchat_cuda.runner.common_steps import common_steps
from localchat_cuda.runner.cuda_errors import describe_device, is_device_fault, is_out_of_memory
from localchat_cuda.runner.cuda_graphs import RUNS_BEFORE_CAPTURE, CudaGraphs
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.host_pages import HostPages
from localchat_cuda.runner.input_batch import DECODE_BUCKETS, BatchConfig, StepShape, TokenSpan
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.runner.model import DeviceModel, Fusion
from localchat_cuda.runner.sampler import DeviceSampler, ReferenceSampler, TritonSampler
from localchat_cuda.runner.step_buffer import StepBuffer
from localchat_cuda.runner.step_executor import PreparedStep, StepExecutor
from localchat_cuda.runner.step_output import PendingStep

X = TypeVar("X")

DEPTH = 2
"""Steps in flight."""
_MOST_WANTED = 32
"""Steps at most that are prepared because they were missing, in one pause."""
_SLOW_LAUNCH_S = 0.01
"""A launch that takes longer on the host replays no graph."""
_OUT_OF_MEMORY = "a step ran out of GPU memory; the next steps are smaller"


class AttachedDrafter(Drafter, Protocol):
    """A drafter with a runner of its own."""

    runner: "CudaRunner"

    def forget(self, seq: int) -> None:
        """Give up what is held of a sequence, which left or begins again."""
        ...


class CudaRunner:
    """See backend_api.interface.Runner. A step has `capabilities.max_step_tokens` tokens at most."""

    def __init__(
        self,
        model: DeviceModel,
        capabilities: Capabilities,
        *,
        graphs: bool = True,
        graph_bytes: int = 1 << 62,
        host_blocks: HostPages | None = None,
    ) -> None:
        """Takes ownership of `model`, which has one page more than the capabilities have blocks, of both kinds:
        the last one is for padding. `graphs` False: capture none; `graph_bytes`: most memory that they may
        take. `host_blocks`: those of the capabilities, None only where no plan names any."""
        self.capabilities = capabilities
        if model.kernels and not interpreted():
            hash_bottom_up()
        self._model: DeviceModel | None = model
        self._host_blocks = host_blocks
        pages = model.pages
        config = model.config
        self.device = pages.device
        self._gpu = self.device.type == "cuda"
        # Asked for in advance: after an error the GPU answers no more.
        self._device_text = describe_device(self.device)
        self._stream = torch.cuda.Stream(self.device) if self._gpu else None  # type: ignore[no-untyped-call]
        blocks = capabilities.kv_tokens // capabilities.block_tokens
        with self.on_stream():
            self.table = StateTable(
                capabilities.max_slots,
                capabilities.context_tokens,
                pages.page_tokens,
                blocks,
                self.device,
                capabilities.window_blocks or None,
            )
            self._buffer = StepBuffer(self._buffer_words(), DEPTH + 1, self.device)
            max_rows = logit_rows(capabilities.max_slots)
            self._sampler: DeviceSampler = (
                TritonSampler(
                    self.table, config.vocabulary, max_rows, rescores=model.approximate_rows > 0
                )
                if model.kernels
                else ReferenceSampler(self.table, config.vocabulary)
            )
        self.graphs = CudaGraphs(enabled=graphs and self._gpu, limit_bytes=graph_bytes)
        self._executor = StepExecutor(
            model,
            self.table,
            self._buffer,
            self._sampler,
            _batch_config(model, capabilities),
            self.graphs,
            max_rows,
            DEPTH + 1,
        )
        self._pending: deque[PendingStep] = deque()
        self._drafter: AttachedDrafter | None = None
        self.sleeps = True
        """Steps that are queued behind others are waited for by a thread that sleeps."""
        self._common_steps = common_steps(capabilities, self.table.scratch)
        """Those that `warm_up_next` still has to run."""
        self._wanted: dict[tuple[str, StepShape], list[TokenSpan]] = {}
        """Steps that would have had drafts, by kind and shape of their graph. They go first."""
        self._most_wanted = _MOST_WANTED
        self._repeated: tuple[list[TokenSpan], str, int] | None = None
        """The step of padding that `warm_up_next` ran, unless it was captured: the kind of its graph, and how
        often it ran."""

    @property
    def model(self) -> DeviceModel:
        """The model that it runs."""
        assert self._model is not None, "the runner is closed"
        return self._model

    def keep_last_states(self, states: LastStates, fusion: Fusion | None = None) -> None:
        """Keep the last states of every step from here on, or those of several layers, for prediction heads."""
        self.model.last_states, self.model.fusion = states, fusion
        self.graphs.clear()  # those that were captured keep none

    def prepare(self, steps: Iterator[list[TokenSpan]]) -> None:
        """Let `warm_up_next` run these steps of padding, in place of the common ones."""
        self._common_steps = steps

    def attach(self, drafter: AttachedDrafter) -> None:
        """Own a drafter from here on."""
        self._drafter = drafter
        self.capabilities = replace(self.capabilities, draft_model=True)

    @property
    def drafter(self) -> AttachedDrafter:
        """See backend_api.drafter.DraftingRunner."""
        assert self._drafter is not None, "the capabilities say that nothing drafts"
        return self._drafter

    def _buffer_words(self) -> int:
        """Words of any step but for logit biases and many forks: 16 a token and 1,024 a slot."""
        caps = self.capabilities
        padded = max(caps.max_step_tokens, DECODE_BUCKETS[-1]) + 64
        tables = (2 if caps.window_blocks else 1) * caps.max_slots * self.table.width
        return 16 * padded + 1024 * (caps.max_slots + 64) + 3 * tables

    # ------------------------------------------------------------------------ launch

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; see backend_api.interface.Runner."""
        assert len(self._pending) < DEPTH, "too many steps in flight"
        model = self._model
        assert model is not None, "the runner is closed"
        step = PendingStep(plan, time.perf_counter())
        if any(one.status == "out_of_memory" for one in self._pending):
            step.status = "aborted"
        self._note_drafted(plan, model)
        with self.on_stream(), self._faults(step):
            begun = self._event()
            self.table.remove(plan.leave)
            self._sampler.add(self.table.add(plan.enter))
            behind = self._execute_memory(plan, model.pages)
            self._buffer.begin_step()
            prepared = self._guarded(step, self._prepare)
            # Block tables grow whatever became of the step.
            writes = self.table.write(plan.rows, self._buffer, compute=prepared is not None)
            # Last, because it may take the room of the others.
            self._guarded(step, self._write_settings)
            self._buffer.send()
            self.table.apply(writes)
            if prepared is not None:
                self._guarded(step, partial(self._compute, prepared))
            self._save(behind)
            # Behind another step this one is waited for while a third is queued already, so the thread may
            # sleep: waking up late costs the GPU nothing. A step alone is waited for by a core that spins.
            done = self._event(blocking=bool(self._pending) and self.sleeps)
            if begun is not None and done is not None:
                step.events = (begun, done)
        step.host_s = time.perf_counter() - step.launched_s
        self._pending.append(step)

    def _note_drafted(self, plan: StepPlan, model: DeviceModel) -> None:
        """Tell those who draft for the sequences of a plan."""
        moved = (*plan.leave, *(entry.seq for entry in plan.enter))
        for seq in moved if self._drafter is not None else ():
            self.drafter.forget(seq)
        if model.last_states is not None:
            for seq in moved:
                model.last_states.forget(seq)
            model.last_states.note(plan.rows)

    def _execute_memory(self, plan: StepPlan, pages: Pages) -> list[SaveBlock]:
        """Queue the memory operations, but for the saves that nothing in the plan depends on: these come once
        the step is queued. Then wait for the copies of all blocks that rows begin to use."""
        host = self._host_blocks
        new = [block for row in plan.rows for block in row.new_blocks]
        if host is None:
            for operation in plan.memory:
                _execute(operation, pages)
            return []
        loaded = {one.block for one in plan.memory if isinstance(one, LoadBlock)}
        copied = {one.dst_block for one in plan.memory if isinstance(one, Copy)}
        written = {*new, *loaded, *copied}
        behind: list[SaveBlock] = []
        for operation in plan.memory:
            match operation:
                case Copy(source, target, tokens):
                    host.wait_for((source, target))
                    pages.copy(source, target, tokens)
                    host.copied()
                case SaveBlock(block) if block not in written:
                    behind.append(operation)
                case SaveBlock(block, number) | LoadBlock(number, block):
                    if any(one.host_block == number for one in behind):
                        self._save(behind)
                        behind = []
                    if isinstance(operation, SaveBlock):
                        host.save(block, number)
                    else:
                        host.load(number, block)
                case _:
                    raise AssertionError(f"a paged cache cannot {operation}")
        host.wait_for(new)
        return behind

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
        """On the runner's stream, without gradients."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def _faults(self, step: PendingStep) -> Iterator[None]:
        """Report an error of the GPU with the steps that may have made it: `step` and those in flight.

        The first line of the error alone: what follows is advice to developers of CUDA programs."""
        try:
            yield
        except Exception as error:
            if not is_device_fault(error):
                raise
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            one_of = "; ".join(
                f"step {each.plan.number}, {each.shape}"
                for each in (step, *self._pending)
                if each.shape is not None
            )
            raise DeviceFault(
                f"The GPU reported an error: {what}. Last launched: {one_of or 'no step'}. "
                f"{self._device_text}"
            ) from error

    def _event(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """Record the stream's place; None on a CPU. `blocking`: whoever waits for it sleeps."""
        if not self._gpu:
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _guarded(self, step: PendingStep, work: Callable[[PendingStep], X | None]) -> X | None:
        """Do a part of a launch, unless the step was given up; a lack of memory gives it up."""
        if step.status == "out_of_memory":
            return None
        try:
            return work(step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Not in the handler: its traceback would keep the step's tensors.
        self._give_up(step)
        return None

    def _prepare(self, step: PendingStep) -> PreparedStep | None:
        """Write the arrays of the computation into the buffer; the layout first, where graphs look for it."""
        if not step.plan.rows or step.status != "ok":
            return None
        prepared = self._executor.prepare(step)
        step.shape = prepared.batch.shape
        return prepared

    def _write_settings(self, _: PendingStep) -> None:
        """Write the settings of new sequences into the buffer, and the tokens that their penalties need."""
        self.table.store_tokens()
        self._sampler.write_settings(self._buffer)

    def _compute(self, prepared: PreparedStep, step: PendingStep) -> None:
        """Bring the settings of new sequences into force, and queue the step."""
        self._sampler.apply_settings()
        if self._sampler.reallocated:
            # Graphs read the settings by their addresses.
            self.graphs.clear()
            self._sampler.reallocated = False
        self._executor.compute(step, prepared)
        step.typical = self.graphs.steady or not prepared.batch.captured

    def _give_up(self, step: PendingStep) -> None:
        """Drop the step's results. Pages and tables stay as the plan has them."""
        step.status = "out_of_memory"
        step.notes = (_OUT_OF_MEMORY,)
        step.sampled = {}
        step.tokens = None
        step.top_logprobs = []
        step.prompt_logprobs = []
        if self._gpu:
            self.graphs.shrink()
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------ while nothing runs

    def warm_up_next(self) -> bool:
        """Run a step of padding that is wanted or common once, the last time to capture its graph; see
        backend_api.interface.Runner. A request that comes meanwhile waits for one run, not for all."""
        begun = self._wanted or self._repeated
        if self._drafter is not None and not begun and self._drafter.runner.warm_up_next():
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
                self._buffer.send()
                self._guarded(step, partial(self._executor.compute, prepared=prepared))
                if self._stream is not None:
                    self._stream.synchronize()
                if not self.graphs.steady and runs < RUNS_BEFORE_CAPTURE:
                    self._repeated = spans, kind, runs + 1
                if step.status != "ok":
                    # Memory is short: graphs are for steps that come.
                    self._common_steps = iter(())
                    self._most_wanted = 0
                    self._wanted.clear()
                return step.status == "ok"
        return False

    def _unprepared(self) -> Iterator[tuple[list[TokenSpan], str, int]]:
        """Steps of padding to run next, each with the kind of its graph, empty for the usual one, and how often
        it ran."""
        if self._repeated is not None:
            repeated = self._repeated
            self._repeated = None
            yield repeated
        while self._wanted:
            kind, shape = next(iter(self._wanted))
            yield self._wanted.pop((kind, shape)), kind, 0
        while not self.graphs.full and (spans := next(self._common_steps, None)) is not None:
            yield spans, "", 0

    def prepared(self, rows: Sequence[DecodeRow], *, masked: bool) -> bool:
        """Whether a graph holds a step of these rows; see backend_api.prepared_steps."""
        if not self.graphs.enabled:
            return True
        if any(row.seq not in self.table.sequences for row in rows):
            return False  # a choice that enters with the next plan
        spans = [TokenSpan(self.table.scratch, row.start, row.width) for row in rows]
        shape, kinds = self._executor.kinds(spans, [row.seq for row in rows], masked=masked)
        missing = [kind for kind in kinds if not self.graphs.replays(kind, shape)]
        for kind in missing:
            if not self.graphs.has(kind, shape) and len(self._wanted) < self._most_wanted:
                self._wanted[kind, shape] = spans
        return not missing

    # ------------------------------------------------------------------------ collect

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. `elapsed_s` is 0 if it does not predict that of later steps."""
        step = self._pending.popleft()
        if step.events is None:
            return step.result(time.perf_counter() - step.launched_s)
        begun, done = step.events
        with self._faults(step):
            done.synchronize()
            elapsed_s = begun.elapsed_time(done) / 1e3
        return step.result(elapsed_s if self._is_typical(step, elapsed_s) else 0.0)

    def _is_typical(self, step: PendingStep, elapsed_s: float) -> bool:
        """True if the GPU was busy for that long. A GPU that waited for the host, which compiled a kernel or
        launched hundreds one by one, would make the scheduler believe that prompts are slow."""
        waited = step.host_s > max(_SLOW_LAUNCH_S, elapsed_s / 2)
        return step.typical and not (waited and self.graphs.enabled)

    def discard_pending(self) -> None:
        """Forget all launched steps without collecting them: those of compile ahead compute nothing."""
        self._pending.clear()

    def abort(self) -> None:
        """Nothing: a queued step cannot be stopped, and none takes longer than 0.2 s."""

    def memory(self) -> MemoryReport:
        """Bytes of weights and pages; compute is everything else that torch reserved, whatever drafts among it,
        other what the driver took for captured graphs."""
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
    """One layout serves all layers: the widest heads decide the tiles, the fewest key heads the splits."""
    pages = model.pages
    config = model.config
    d = max(map(config.head_dim_of, range(config.layers)))
    key_heads = min(map(config.key_heads_of, range(config.layers)))
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
        prefill_tile=None
        if config.gemma and config.gemma.head_dim != config.head_dim
        # the faster kernel would have to take heads of both widths
        else best_tile_config(
            d, pages.page_tokens, pages.dtype, pages.device, config.attention_cap
        ),
    )


def _execute(operation: MemoryOp, pages: Pages) -> None:
    """Queue a memory operation. Only a model with states has others than Copy."""
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
