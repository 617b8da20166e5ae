"""Compiles a model's kernels by launching steps of every shape over tensors without memory.

Nothing is computed, and no GPU is needed. A kernel takes 0.1 to 10 s to compile, and a model needs about a
hundred. Compiled on first use, they would interrupt a conversation again and again. Here weights, pages and the
state table are on torch's device `meta` and pretend to be on a given GPU (launch.imagine), as does Triton's
driver. So the code that runs later decides what is compiled, for any model, and Triton's cache stores it.

Several processes launch the same steps (__main__.py forks them). The first to claim a kernel compiles it. The
steps that one user needs for a first answer come first (Phase), so that a load waits only for those.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import CompiledKernel
from triton.errors import TritonError
from triton.runtime.jit import JITFunction, JitFunctionInfo

from localchat.backend_api.interface import LAST, Enter, LogitsPosition, Mask, StepPlan, StepRow
from localchat_cuda.compile_ahead.job import CompileJob, CompileShape, Phase, compile_shapes
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import launch
from localchat_cuda.ranks.collective import Alone
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.meta_weights import META, MetaWeights
from localchat_cuda.weights.model_weights import with_unpacked


def one_layer_per_kind(config: ModelConfig, formats: LayerFormats = ()) -> ModelConfig:
    """Keep one layer of each kind, and the last ones, which drop rows."""
    last = config.last_mixer
    kinds = {
        (
            config.window(n),
            config.is_recurrent(n),
            config.has_attention(n),
            config.qkv_heads(n),
            config.intermediate_of(n),
            config.has_experts(n),
        ): n
        for n in reversed(range(last))
    }
    chosen = (*sorted(kinds.values()), *range(last, config.layers))
    # A GGUF file may have more kinds of layers by their formats, which the layers have in turn.
    chosen = (chosen[0],) * (len(formats) - len(chosen)) + chosen
    states = config.recurrent
    return replace(
        config,
        layers=len(chosen),
        windows=tuple(map(config.window, chosen)) if config.windows else (),
        mixture=config.mixture and config.mixture.keep(chosen),
        recurrent=states and replace(states, layers=tuple(map(config.is_recurrent, chosen))),
        feeds=tuple(map(config.has_feed, chosen)) if config.feeds else (),
        gemma=config.gemma and config.gemma.keep(chosen),
        unrotated=tuple(config.unrotated[n] for n in chosen) if config.unrotated else (),
    )


def meta_runner(job: CompileJob) -> CudaRunner:
    """Make the runner of a load with a few layers and without memory."""
    config = one_layer_per_kind(job.config, job.formats)
    capabilities = job.capabilities
    pages = Pages(config, capabilities, META)
    weights = load(
        config,
        MetaWeights(job.formats, config.head_format),
        META,
        head_bounds=job.head_bounds,
    )
    if job.unpacked:
        weights = with_unpacked(weights, pages.dtype)
    collective = Alone(config.ranks, config.hidden) if config.ranks > 1 else None
    model = DeviceModel(config, weights, pages, kernels=True, collective=collective)
    return CudaRunner(model, capabilities, graphs=False)


def step_plan(shape: CompileShape, vocabulary: int) -> StepPlan:
    """Return the plan of a step whose sequences all enter with it."""
    enter = []
    rows = []
    positions = []
    for slot, (start, width, drafts) in enumerate(shape.rows):
        seq = -1 - slot
        tokens = (0,) * width
        enter.append(Enter(seq, slot, tokens, start + width, shape.sampling))
        row_tokens = LAST if width - drafts == 1 else tokens[: width - drafts]
        rows.append(StepRow(seq, slot, start, row_tokens, tokens[:drafts]))
        last = width - drafts - 1
        positions += [LogitsPosition(slot, index, seq) for index in range(last, width)]
    masks: tuple[Mask, ...] = ()
    if shape.masked:
        masks = (Mask(0, bytes(4 * -(-vocabulary // 32))),)
    return StepPlan(0, tuple(rows), tuple(positions), enter=tuple(enter), masks=masks)


def launch_all(
    runner: CudaRunner, vocabulary: int, steps: Iterable[CompileShape]
) -> list[Exception]:
    """Launch the steps, and return the errors of those that could not be compiled."""
    errors: list[Exception] = []
    for shape in steps:
        plan = step_plan(shape, vocabulary)
        try:
            runner.launch(plan)
        except (TritonError, RuntimeError, OSError) as error:
            errors.append(error)
        runner.launch(StepPlan(0, leave=tuple(enter.seq for enter in plan.enter)))
        runner.discard_pending()
    return errors


class _CompileOnlyDriver:
    """Part of Triton's driver that compiling calls."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Claims:
    """Claims of this process on kernels. The first process to claim a kernel compiles it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        self._parent_pid = os.getppid()
        self._skipped: set[str] = set()
        self.count = 0

    def skip(self, *, key: str, fn: JitFunctionInfo, **options: object) -> bool:
        """Return True to skip a kernel that another process compiles. Triton calls this before compiling.

        Raises SystemExit if the parent process has exited."""
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
    """Return a key by which launches need different kernels.

    It is cheaper than Triton's key, which takes most of the time of a launch."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, list | tuple):
        return tuple(map(_specialization, argument))
    if hasattr(argument, "block_shape"):
        # Tensor descriptor of Triton or Gluon.
        return tuple(map(_specialization, vars(argument).values()))
    return type(argument), argument


def _build_launcher(kernel: CompiledKernel) -> None:
    """Compile the C function that launches a kernel. Triton 3.9 and later need none."""
    if hasattr(nvidia_driver, "make_launcher"):
        nvidia_driver.CudaLauncher(kernel.src, kernel.metadata)


def _without_torch_compile() -> None:
    """Keep torch from importing its compiler, which takes 4 s.

    It does so at the first operation on `meta` that is written in Python, to exclude it from compilation."""
    if "torch._dynamo" not in sys.modules:
        stub = ModuleType("torch._dynamo")
        stub.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
        sys.modules["torch._dynamo"] = stub
        torch._dynamo = stub


def only_compile(gpu: launch.Traits, claims: Claims) -> None:
    """Make launches in this process only compile, for this GPU, into Triton's cache."""
    _without_torch_compile()
    run = triton.runtime.jit.JITFunction.run
    compiled = dict[Hashable, object]()

    def compile_once(kernel: JITFunction, grid: object) -> Callable[..., object]:
        def launched(*arguments: object, **options: object) -> object:
            values = map(_specialization, (*arguments, *options.values()))
            key = (id(kernel), *options, *values)
            if key not in compiled:
                compiled_kernel = run(kernel, *arguments, grid=grid, warmup=True, **options)
                if compiled_kernel is not None:
                    _build_launcher(compiled_kernel)
                compiled[key] = compiled_kernel
            return compiled[key]

        return launched

    triton.runtime.jit.JITFunction.__getitem__ = compile_once
    triton.runtime.driver.set_active(_CompileOnlyDriver(gpu.capability))
    triton.knobs.runtime.jit_cache_hook = claims.skip
    launch.imagine(gpu)


def compile_all(
    job: CompileJob, finished: Callable[[Phase, list[Exception]], None]
) -> tuple[int, list[Exception]]:
    """Compile all kernels that no other process has claimed. Return their number and the errors.

    `finished`: called after each phase with its errors."""
    claims = Claims(job.claims)
    only_compile(job.gpu, claims)
    runner = meta_runner(job)
    shapes = list(compile_shapes(job.capabilities))
    errors: list[Exception] = []
    for phase in Phase:
        steps = [shape for shape in shapes if shape.phase is phase]
        failed = launch_all(runner, job.config.vocabulary, steps)
        errors += failed
        finished(phase, failed)
    return claims.count, errors
