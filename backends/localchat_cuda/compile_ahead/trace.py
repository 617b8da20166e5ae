"""Compiles a model's kernels by launching steps of every shape over tensors without memory.

Nothing is computed, and no GPU is needed. A kernel takes 0.1 to 10 s to compile and a model needs about a
hundred: compiled on first use, they stop a conversation again and again. Here weights, pages and the state
table are on torch's device `meta` and pretend to be on a given GPU (launch.imagine), as Triton's driver does.
So the code that runs later decides what is compiled, whatever the model, and Triton's cache keeps it.

Several processes launch the same steps (workers.py starts them); the first to claim a kernel compiles it.

    python -m localchat_cuda.compile_ahead.trace < JOB    a pickled CompileJob; prints the number of kernels
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.jit import JITFunction, JitFunctionInfo

from localchat.backend_api.interface import (
    LAST,
    Capabilities,
    Enter,
    LogitsPosition,
    Mask,
    SamplingParams,
    StepPlan,
    StepRow,
)
from localchat.fit.kv_types import FP8
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import launch
from localchat_cuda.kernels.attention.decode import LONG_TOKENS
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    MAX_DECODE_WIDTH,
    MIXED_BUCKETS,
    MIXED_DECODE_BUCKETS,
    PREFILL_BUCKETS,
)
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.meta_weights import META, MetaWeights
from localchat_cuda.weights.model_weights import with_unpacked

_GREEDY = SamplingParams(temperature=0.0)
_PENALISED = SamplingParams(temperature=0.7, frequency_penalty=0.1)
_TOP_K = SamplingParams(temperature=0.7, frequency_penalty=0.1, top_k=20)
"""Decided by likely tokens (kernels/sampling/rescore.py), which the one before is not."""
_DRAFTS = (0, 1, 3, 7, 15)
_HISTORIES = (1, 70, 130, 260, 520)
"""One for each number of ranges that a history is cut into."""
_LONG_HISTORIES = 1_040, 2_080, LONG_TOKENS
"""The same, of lone sequences: over latents, and in long contexts."""
_SHARED_TOKENS = 512
"""Tokens of a step that several prompts share."""
_MIXED_TOKENS = 640, 2048
"""Of steps with prompts and decoding rows that leave rows out behind the last attention, with packed and with
unpacked int4 weights."""


class CompileJob(NamedTuple):
    """A model, and the GPU to compile its kernels for."""

    config: ModelConfig
    capabilities: Capabilities
    gpu: launch.Traits
    head_int8: bool = False
    unpacked: bool = False
    """The weights are in memory unpacked, too."""
    head_bounds: bool = False
    formats: LayerFormats = ()
    """Kinds of layers of a GGUF file."""
    claims: str = ""
    """Folder with a file for every kernel, made by the process that compiles it; empty: compile all here."""


# ---------------------------------------------------------------------------- without memory


def one_layer_per_kind(config: ModelConfig, formats: LayerFormats = ()) -> ModelConfig:
    """Keep one layer of each kind, and the last one: after its attention fewer rows go on."""
    last = config.layers - 1
    kinds = {
        (
            config.window(n),
            config.has_delta_net(n),
            config.qkv_heads(n),
            config.intermediate_of(n),
            config.has_experts(n),
            bool(config.gemma and config.gemma.altup and config.gemma.altup.cutoff(n) is not None),
        ): n
        for n in reversed(range(last))
    }
    kept = (*sorted(kinds.values()), last)
    kept = (kept[0],) * (len(formats) - len(kept)) + kept
    net = config.delta_net
    return replace(
        config,
        layers=len(kept),
        windows=tuple(map(config.window, kept)) if config.windows else (),
        mixture=config.mixture and config.mixture.keep(kept),
        delta_net=net and replace(net, layers=tuple(map(config.has_delta_net, kept))),
        gemma=config.gemma and config.gemma.keep(kept),
        unrotated=tuple(config.unrotated[n] for n in kept) if config.unrotated else (),
    )


def meta_runner(job: CompileJob) -> CudaRunner:
    """The runner of a load, with a few layers and without memory."""
    config = one_layer_per_kind(job.config, job.formats)
    capabilities = job.capabilities
    pages = Pages(
        config,
        capabilities.kv_tokens // capabilities.block_tokens + 1,
        capabilities.context_tokens,
        META,
        getattr(torch, config.dtype),
        capabilities.block_tokens,
        fp8=capabilities.kv_type == FP8,
        slots=capabilities.max_slots,
        window_pages=capabilities.window_blocks and capabilities.window_blocks + 1,
    )
    weights = load(
        config,
        config.family.names,
        MetaWeights(job.formats, config.head_format),
        META,
        head_int8=job.head_int8,
        head_bounds=job.head_bounds,
    )
    if job.unpacked:
        weights = with_unpacked(weights, pages.dtype)
    return CudaRunner(DeviceModel(config, weights, pages, kernels=True), capabilities, graphs=False)


# ---------------------------------------------------------------------------- the steps


class CompileShape(NamedTuple):
    """A step that needs kernels of its own."""

    rows: tuple[tuple[int, int, int], ...]
    """Each (start, new tokens, drafts among them)."""
    sampling: SamplingParams = _GREEDY
    masked: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of its sequences in the cache."""
        return sum(start + width for start, width, _ in self.rows)


def compile_shapes(capabilities: Capabilities) -> Iterator[CompileShape]:
    """One step for each set of kernels, of those that fit in the cache."""
    return (shape for shape in all_shapes(capabilities) if shape.tokens <= capabilities.kv_tokens)


def all_shapes(capabilities: Capabilities) -> Iterator[CompileShape]:
    """As compile_shapes, also those that do not fit."""
    room = min(capabilities.context_tokens, capabilities.kv_tokens) - 1
    widest = min(capabilities.max_step_tokens, room)
    histories = [at for at in _HISTORIES if at + max(_DRAFTS) < room]
    writers = sorted({min(rows, capabilities.max_slots) for rows in DECODE_BUCKETS})
    for drafts, rows, history in product(_DRAFTS, writers, histories):
        if not drafts or rows * (1 + drafts) <= DECODE_BUCKETS[-1]:
            yield CompileShape(((history, 1 + drafts, drafts),) * rows)
    for history in _LONG_HISTORIES:
        if history < room:
            yield CompileShape(((history, 1, 0),))
    for size in sorted({widest, *(each for each in PREFILL_BUCKETS if each <= widest)}):
        if size > MAX_DECODE_WIDTH:
            yield CompileShape(((0, size, 0),))
            yield CompileShape(((room - size, size, 0),))
    # after the last attention there is a row per prompt that ends
    for size, count in product((_SHARED_TOKENS, widest), writers):
        if MAX_DECODE_WIDTH < size // count <= widest // count:
            yield CompileShape(((0, size // count, 0),) * count)
    decode_rows = (*MIXED_DECODE_BUCKETS[1:], 2 * MIXED_DECODE_BUCKETS[-1])
    mixed = product(decode_rows, (*_MIXED_TOKENS, widest), (0, *_DRAFTS[-2:]))
    for own, tokens, drafts in (
        *mixed,
        *((MIXED_DECODE_BUCKETS[1], tokens, 0) for tokens in MIXED_BUCKETS),
    ):
        rows = min(own // (1 + drafts), capabilities.max_slots - 1)
        size = tokens - own
        for history in histories:
            if rows > 0 and MAX_DECODE_WIDTH < size <= widest - own:
                yield CompileShape((*((history, 1 + drafts, drafts),) * rows, (0, size, 0)))
    yield CompileShape(((1, 1, 0),), _PENALISED)
    yield CompileShape(((1, 1, 0),), _TOP_K)
    yield CompileShape(((1, 1, 0),), masked=True)


def step_plan(shape: CompileShape, vocabulary: int) -> StepPlan:
    """The plan of a step whose sequences all enter with it."""
    enter = []
    rows = []
    positions = []
    for slot, (start, width, drafts) in enumerate(shape.rows):
        seq = -1 - slot
        tokens = (0,) * width
        enter.append(Enter(seq, slot, tokens, start + width, shape.sampling))
        own = LAST if width - drafts == 1 else tokens[: width - drafts]
        rows.append(StepRow(seq, slot, start, own, tokens[:drafts]))
        positions += [LogitsPosition(slot, at, seq) for at in range(width - drafts - 1, width)]
    masks = (Mask(0, bytes(4 * -(-vocabulary // 32))),) if shape.masked else ()
    return StepPlan(0, tuple(rows), tuple(positions), enter=tuple(enter), masks=masks)


def launch_all(
    runner: CudaRunner, vocabulary: int, steps: Iterable[CompileShape]
) -> list[Exception]:
    """Launch the steps; returns the errors of those that could not be compiled."""
    errors: list[Exception] = []
    for shape in steps:
        plan = step_plan(shape, vocabulary)
        try:
            runner.launch(plan)
        except (TritonError, RuntimeError, OSError) as error:
            errors.append(error)
        runner.launch(StepPlan(0, leave=tuple(one.seq for one in plan.enter)))
        runner.discard_pending()
    return errors


# ---------------------------------------------------------------------------- compiling


class _CompileOnlyDriver:
    """The part of Triton's driver that compiling calls."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Claims:
    """Kernels that this process compiles: those that it was the first to claim."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        self._parent_pid = os.getppid()
        self._skipped: set[str] = set()
        self.count = 0

    def skip(self, *, key: str, fn: JitFunctionInfo, **rest: object) -> bool:
        """Triton's hook before it compiles; True leaves this kernel out. Raises SystemExit if the parent is
        gone: nothing waits for the result then."""
        if os.getppid() != self._parent_pid:
            raise SystemExit(1)
        name = hashlib.sha256(f"{fn.module}.{fn.name}{key}".encode()).hexdigest()
        if name in self._skipped:
            return True
        if self._folder is not None:
            try:
                (self._folder / name).touch(exist_ok=False)
            except FileExistsError:
                self._skipped.add(name)
                return True
        self.count += 1
        return False


def _specialization(argument: object) -> Hashable:
    """What tells kernels apart, at least: Triton's own key takes most of the time of a launch."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, list):
        return tuple(map(_specialization, argument))
    if hasattr(argument, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        return tuple(map(_specialization, vars(argument).values()))
    return type(argument), argument


def only_compile(gpu: launch.Traits, claims: Claims) -> None:
    """From now on, launches in this process only compile, for this GPU, into Triton's cache."""
    run = triton.runtime.jit.JITFunction.run
    made = dict[Hashable, object]()

    def compile_once(kernel: JITFunction, grid: object) -> Callable[..., object]:
        def launched(*arguments: object, **options: object) -> object:
            values = map(_specialization, (*arguments, *options.values()))
            key = (id(kernel), *options, *values)
            if key not in made:
                made[key] = run(kernel, *arguments, grid=grid, warmup=True, **options)
            return made[key]

        return launched

    triton.runtime.jit.JITFunction.__getitem__ = compile_once
    triton.runtime.driver.set_active(_CompileOnlyDriver(gpu.capability))
    triton.knobs.runtime.jit_cache_hook = claims.skip
    launch.imagine(gpu)


def compile_all(job: CompileJob) -> tuple[int, list[Exception]]:
    """Compile all kernels that no other process has claimed; returns their number and the errors."""
    claims = Claims(job.claims)
    only_compile(job.gpu, claims)
    runner = meta_runner(job)
    errors = launch_all(runner, job.config.vocabulary, compile_shapes(job.capabilities))
    return claims.count, errors


def main() -> int:
    """Compile the job from stdin."""
    count, errors = compile_all(pickle.load(sys.stdin.buffer))  # noqa: S301 (written by workers.py)
    sys.stdout.write(f"{count}\n")
    for error in errors:
        sys.stderr.write(f"{error}\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
