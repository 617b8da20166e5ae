"""Loads a checkpoint into a warm runner."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from triton.runtime.cache import triton_key

from localchat.backend_api.interface import (
    LAST,
    Capabilities,
    Enter,
    LoadRequest,
    LogitsPosition,
    Progress,
    SamplingParams,
    StepPlan,
    StepRow,
    Widths,
)
from localchat.errors import DoesNotFit
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.open_gguf import read_header
from localchat_cuda.compile_ahead.job import CompileJob, Phase
from localchat_cuda.compile_ahead.process import CompileProcess
from localchat_cuda.compile_ahead.workers import CompileAhead
from localchat_cuda.config.gguf import LayerFormats, layer_formats
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.exact_widths import exact_widths
from localchat_cuda.kernels.launch import interpreted, set_safe_mode, traits, trust_callers
from localchat_cuda.plan import window_plan
from localchat_cuda.plan.memory_plan import OVERHEAD_BYTES, kv_token_bytes, kv_types
from localchat_cuda.ranks.collective import Collective
from localchat_cuda.ranks.host_memory import block_count
from localchat_cuda.ranks.messages import RankJob
from localchat_cuda.ranks.rank_weights import RankWeights
from localchat_cuda.runner.common_steps import DRAFT_ROWS
from localchat_cuda.runner.cuda_errors import is_out_of_memory
from localchat_cuda.runner.cuda_graphs import RUNS_BEFORE_CAPTURE
from localchat_cuda.runner.host_pages import HostMemory, HostPages
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    DRAFT_STEP_TOKENS,
    MIXED_BUCKETS,
    MIXED_DECODE_BUCKETS,
    PREFILL_BUCKETS,
)
from localchat_cuda.runner.kv_pages import Pages, host_layout
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_output import DEPTH
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import with_unpacked
from localchat_cuda.weights.source import CheckpointWeights, RandomWeights, WeightSource

_STEP_S = 0.2
_SHARED_STEP_S = 0.0225
"""Time limits of steps with prompt chunks, alone and while other sequences decode.

0.2 s instead of 0.1 s lets 7,000 tokens of a 7B model share one step, which dequantizes the weights once
instead of twice. No other request waits for it."""
_LIMITS = (
    "answers with the same seed can differ at near-ties, because sums depend on the rows of a step",
    "no embeddings",
)
_NO_HOST_BLOCKS = "Idle conversations are not swapped to RAM, because it cannot be pinned"
_STATE_INTERVAL = 4096
"""Tokens between saved states. A state of Qwen3.5-9B takes as much memory as 1,600 tokens of KV."""
_WARM_PROMPTS = (33, 100, 1100)
"""Prompt lengths, one for each kernel variant of the gemms: few tiles, more tiles, and dequantized."""
_WARM_POSITIONS = (1, 130, 260, 520, 1040)
"""Positions, one for each number of ranges into which attention divides a history."""


class RankGroup(Protocol):
    """Processes that compute a model together, as one of them sees the others."""

    job: RankJob

    def join(
        self, device: torch.device, columns: int, progress: Progress, *, host_blocks: bool
    ) -> tuple[Collective, bool]:
        """Connect the ranks once all have loaded; see workers.Workers.join."""
        ...


def load_runner(
    config: ModelConfig,
    path: Path | None,
    device_name: str,
    request: LoadRequest,
    progress: Progress,
    notify: Callable[[str], None],
    compile_process: CompileProcess | None = None,
    group: RankGroup | None = None,
) -> CudaRunner:
    """Load weights to the device, allocate pages, and warm up.

    `path`: folder or GGUF file; None: random weights. Safe mode uses neither CUDA graphs nor PDL nor kernels in
    Gluon. `group`: processes that compute the model together. `config` is then that of this rank,
    and ranks other than 0 do not warm up. Raises ModelInvalid, DoesNotFit, DeviceFault, EngineClosed."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Start now, because the first kernel would wait 0.5 s for this hash.
        threading.Thread(target=triton_key, name="triton key", daemon=True).start()
    set_safe_mode(request.safe_mode)
    plan = request.plan
    caps = capabilities(config, request)
    total = max(plan.weights_bytes, 1)

    def report_layer(done: int, layers: int) -> bool:
        # The head follows the last layer, and `progress(total, total)` follows the head.
        return progress(min(total * done // (layers + 1), total - 1), total)

    def report_waiting(done: int, ranks: int) -> bool:
        return progress(total - 1, total)

    source = source_of(config, path, device, in_slices=group is not None)
    if group is not None and isinstance(source, CheckpointWeights):
        source = RankWeights(source, group.job.config, config, group.job.rank)
    # Safe mode avoids kernels that are not needed.
    head_bounds = plan.head_bounds and device.type == "cuda" and not request.safe_mode
    memory = _host_memory(device, caps, notify, group)
    # Rank 0 compiles the kernels of all ranks.
    compiles = group is None or group.job.rank == 0
    job: CompileJob | None = None
    if compiles and device.type == "cuda" and not interpreted():
        formats: LayerFormats = ()
        if isinstance(source, GgufWeights):
            formats = layer_formats(source.header)
        unpacked = plan.unpacked_bytes > 0
        job = CompileJob(config, caps, traits(device), unpacked, head_bounds, formats)
    with (
        CompileAhead(job, notify, compile_process) as ahead,
        advise_on_out_of_memory(request),
    ):
        weights = load(
            config,
            source,
            device,
            head_bounds=head_bounds,
            progress=report_layer,
            notify=notify,
        )
        ahead.wait(Phase.ONE_ROW if group is None else Phase.ALL)
        if plan.unpacked_bytes:
            weights = with_unpacked(weights, getattr(torch, config.dtype))
        pages = Pages(config, caps, device)
        memory = _pinned(memory, notify)
        collective: Collective | None = None
        if group is not None:
            collective, has_memory = group.join(
                device, config.hidden, report_waiting, host_blocks=memory is not None
            )
            if memory is not None and not has_memory:
                notify(f"{_NO_HOST_BLOCKS} on every GPU.")
                memory.close()
                memory = None
        model = DeviceModel(
            config, weights, pages, kernels=device.type == "cuda", collective=collective
        )
        progress(total, total)
        if device.type == "cuda":
            trust_callers()
        host_blocks = None
        if memory is not None:
            host_blocks = HostPages(pages, memory, 0 if group is None else group.job.rank)
        runner = _runner(model, caps, host_blocks, request, group)
        if compiles:
            warm_up(runner)
        runner.compiling = ahead
        if ahead.finished():
            runner.prepare_for_bursts()
            if device.type == "cuda" and compiles:
                widths = exact_widths(runner)
                runner.capabilities = replace(runner.capabilities, exact_widths=widths)
    return runner


def _runner(
    model: DeviceModel,
    caps: Capabilities,
    host_blocks: HostPages | None,
    request: LoadRequest,
    group: RankGroup | None,
) -> CudaRunner:
    """Make the runner, with the capabilities that its host blocks allow."""
    if host_blocks is None:
        caps = replace(caps, host_blocks=0)
    else:
        padding_page = caps.kv_tokens // caps.block_tokens
        caps = replace(caps, host_block_s=host_blocks.load_s(padding_page))
    graph_bytes = max(0, request.plan.overhead_bytes - OVERHEAD_BYTES)
    make: Callable[..., CudaRunner] = CudaRunner
    if group is not None and group.job.rank == 0:
        # These modules import torch.distributed.
        from localchat_cuda.ranks.ranked_runner import RankedRunner
        from localchat_cuda.ranks.workers import Workers

        assert isinstance(group, Workers)
        make = partial(RankedRunner, workers=group)
    return make(
        model, caps, graphs=not request.safe_mode, graph_bytes=graph_bytes, host_blocks=host_blocks
    )


def _host_memory(
    device: torch.device,
    caps: Capabilities,
    notify: Callable[[str], None],
    group: RankGroup | None,
) -> HostMemory | None:
    """Allocate pinned memory for the host blocks. None: not requested, or not available."""
    file = -1 if group is None else group.job.host_memory
    if not caps.host_blocks or (group is not None and file < 0):
        return None
    try:
        return HostMemory(device, caps.bytes_per_token * PAGE_TOKENS, caps.host_blocks, file)
    except OSError as error:
        notify(f"{_NO_HOST_BLOCKS} ({error.strerror}).")
        return None


def _pinned(memory: HostMemory | None, notify: Callable[[str], None]) -> HostMemory | None:
    """Wait until the memory of the host blocks is pinned. None: no memory."""
    if memory is None:
        return None
    try:
        memory.wait()
    except RuntimeError as error:
        notify(f"{_NO_HOST_BLOCKS} ({error}).")
        return None
    return memory


def source_of(
    config: ModelConfig, path: Path | None, device: torch.device, *, in_slices: bool = False
) -> WeightSource:
    """Return the weights of the folder or GGUF file at `path`; None: random weights.

    `in_slices`: see CheckpointWeights."""
    if path is None:
        return random_weights(config, device)
    if path.is_file():
        return GgufWeights(read_header(path), device)
    return CheckpointWeights(path, device, in_slices=in_slices)


def random_weights(config: ModelConfig, device: torch.device) -> RandomWeights:
    """Return random weights with the groups of the config."""
    quantization = config.quantization
    if quantization:
        return RandomWeights(device, group=quantization.group, bits=quantization.bits)
    return RandomWeights(device)


def capabilities(config: ModelConfig, request: LoadRequest) -> Capabilities:
    """Return the capabilities of the loaded model, from its plan."""
    plan = request.plan
    slots = plan.slots or request.options.max_slots
    windows = plan.window_pages
    # With a page pool of their own, layers with a window do not count here.
    per_token = kv_token_bytes(config, plan.kv_type, windowed=False if windows else None)
    block_bytes = max(1, per_token * PAGE_TOKENS)
    kv_tokens = plan.kv_bytes // block_bytes * PAGE_TOKENS
    return Capabilities(
        context_tokens=plan.context_tokens,
        kv_tokens=plan.kv_tokens if windows else kv_tokens,
        max_slots=slots,
        max_rows=window_plan.rows(config, windows, plan.max_step_tokens, slots),
        max_step_tokens=plan.max_step_tokens,
        depth=DEPTH,
        block_tokens=PAGE_TOKENS,
        window_tokens=window_plan.window_of(config) if windows else 0,
        window_blocks=windows,
        host_blocks=block_count(config, plan),
        host_layout=host_layout(config),
        bytes_per_token=per_token * config.ranks,
        rewind="any" if config.recurrent is None else "checkpoint",
        state_bytes=config.state_bytes,
        saved_states=plan.saved_states,
        state_interval_tokens=_STATE_INTERVAL if plan.saved_states else 0,
        kv_type=plan.kv_type,
        kv_types=kv_types(config),
        step_target_s=_STEP_S,
        shared_step_target_s=_SHARED_STEP_S,
        draft_rows=DRAFT_ROWS,
        draft_step_tokens=DRAFT_STEP_TOKENS,
        moves_rows=True,
        prepares_steps=True,
        widths=Widths(PREFILL_BUCKETS, MIXED_DECODE_BUCKETS, MIXED_BUCKETS, DECODE_BUCKETS),
        limits=tuple(_limits(config, plan)),
    )


def _limits(config: ModelConfig, plan: MemoryPlan) -> Iterator[str]:
    yield from _LIMITS
    if plan.window_pages:
        yield (
            "layers with a sliding window cache only that window; idle conversations are stored neither in "
            "RAM nor on disk"
        )
    if config.fp8_activations:
        yield (
            "this checkpoint was made for 8-bit activations: GPUs with FP8 tensor cores round them in steps "
            "of more than 64 rows"
        )
    if config.recurrent is not None:
        yield (
            "prefixes hit only where a state was saved, because states cannot rewind; idle conversations are "
            "stored neither in RAM nor on disk"
        )


def warm_up(runner: CudaRunner) -> None:
    """Run prompts and single tokens at several lengths, and capture the graph of one row.

    This compiles kernels or reads them from Triton's cache. It writes only to pages without an owner."""
    caps = runner.capabilities
    page = caps.block_tokens
    room = min(caps.context_tokens, caps.kv_tokens) - 1
    longest = min(max(_WARM_PROMPTS), room, caps.max_step_tokens)
    if longest < 1:
        return
    blocks = tuple(range(-(-(longest + 1) // page)))
    sampling = SamplingParams(temperature=0.0)
    enter: tuple[Enter, ...] = (Enter(-1, 0, (0,) * longest, longest, sampling),)
    for size in sorted({min(prompt, longest) for prompt in _WARM_PROMPTS}):
        row = StepRow(-1, 0, 0, (0,) * size, (), blocks)
        runner.launch(StepPlan(0, (row,), (LogitsPosition(0, size - 1, -1),), (), enter))
        runner.collect()
        enter = ()
        blocks = ()
    for position in (*_WARM_POSITIONS, *[1] * RUNS_BEFORE_CAPTURE):
        if position < longest:
            row = StepRow(-1, 0, position, LAST)
            runner.launch(StepPlan(0, (row,), (LogitsPosition(0, 0, -1),)))
            runner.collect()
    runner.launch(StepPlan(0, leave=(-1,)))
    runner.collect()


@contextmanager
def advise_on_out_of_memory(request: LoadRequest) -> Iterator[None]:
    """Translate out-of-memory errors of the GPU to DoesNotFit, with the bytes that the load needs."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        plan = request.plan
        raise DoesNotFit(
            f"The GPU ran out of memory: this load needs {plan.total_bytes:,} bytes.",
            hint="Other programs may have allocated memory since the load was planned: close them, or use a "
            "shorter context (--ctx) or less KV (--kv-gb).",
            needed_bytes=plan.total_bytes,
            free_bytes=plan.free_bytes,
        ) from error
