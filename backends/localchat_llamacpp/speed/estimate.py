"""Estimates a model's tokens per second on this machine before it is loaded.

One token reads the weights once, so its time is their bytes over the rate at which this build multiplies by
them, and a constant a layer: attention over a short context, and some thirty operations after each of which
the threads wait for each other. The benchmark measures both (benchmark.py).
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from localchat.fit.hardware import Machine
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.speed_history import Estimate, MeasurementCache
from localchat.model_files.architecture import ModelShape
from localchat.model_files.ggml_types import KV_FORMATS, NUMBER_FORMATS
from localchat_llamacpp.speed.benchmark import Costs, Layer, costs

_LOOP_S = 0.4e-3
"""A step of the engine core without llama.cpp's: bookkeeping, sampling, text, frames (guide: 1.4 ms a step,
0.9 of them in llama.cpp)."""
_TOKEN_S = 2e-9
"""Of sampling, for each token of the vocabulary."""
_LAYER_UNKNOWN_S = {False: 0.2e-3, True: 0.3e-3}
"""Of a layer that the benchmark could not measure, without and with flash attention (two cores, 12 heads of
64)."""
_READING_SHARE = 0.9
"""Share of a GPU's bandwidth that its gemms reach."""
_GPU_LAYER_S = 100e-6
"""Other time of a layer on a GPU: its many small kernels, one after the other (7B shapes of 28 layers on an
H200: 3.9 ms a token, of which reading takes 0.9)."""
_CROSSING_S = 60e-6
"""Of a layer whose experts are in RAM: its rows go to the CPU and back, and both wait for each other."""
_USUAL = 0.93
"""Speed of an answer as a share of the best steps, which the benchmark takes (0.8 to 1.07 for models of 8 to
40 layers on two cores)."""
_USUAL_RUNS = 1.5
_LEAST_RATIO = 0.3
_MOST_RATIO = 1.6
_WIDEST_HEAD = 512
_LEAST_BYTES_PER_S = 3e9
"""Slower than usual machines: so little says only that other programs left next to nothing."""


class DecodeSetup(NamedTuple):
    """A model and its KV cache."""

    shape: ModelShape
    kv_type: str
    flash: bool
    """True if attention is flash attention."""

    @property
    def layer(self) -> Layer | None:
        """The usual attending layer; None where none attends, or in an unusual shape."""
        shape = self.shape
        keys = [layer.keys for layer in shape.layers if layer.keys]
        work = bytes_per_token(shape)
        if not keys or not shape.head_width or not shape.heads or not work:
            return None
        kv_heads = max(sorted(keys)[len(keys) // 2] // shape.head_width, 1)
        usual = shape.heads % kv_heads == 0 and shape.head_width % 2 == 0
        block = KV_FORMATS[self.kv_type].block
        if not usual or shape.head_width % block or shape.head_width > _WIDEST_HEAD:
            return None
        code = max(work, key=lambda one: work[one])
        return Layer(shape.heads, kv_heads, shape.head_width, self.kv_type, self.flash, code)


class MeasuredSetup(NamedTuple):
    """A setup that ran here, and its tokens a second."""

    running: DecodeSetup
    tokens_per_s: float


def measured_setup(shape: ModelShape, kv_type: str, tokens_per_s: float) -> MeasuredSetup:
    """A past run, with flash attention where the cache is quantized, as the planner chooses on a CPU."""
    return MeasuredSetup(DecodeSetup(shape, kv_type, KV_FORMATS[kv_type].block > 1), tokens_per_s)


def expected_rate(
    running: DecodeSetup,
    threads: int,
    measures: MeasurementCache,
    past: Sequence[MeasuredSetup] = (),
) -> Estimate | None:
    """Tokens a second of one request with a short context, all layers on the CPU.

    On a quiet machine. Takes about a second where `measures` lack a result. None where the benchmark fails, or
    other programs leave it next to nothing.
    past: models that ran here with as many threads; how far the estimate was off for them corrects it.
    """
    known = [one for one in past if bytes_per_token(one.running.shape)]
    every = [running, *(one.running for one in known)]
    if not bytes_per_token(running.shape):
        return None
    codes = {code for one in every for code in bytes_per_token(one.shape)}
    layers = [layer for one in every if (layer := one.layer) is not None]
    found = costs(threads, codes, layers, measures)
    step_s = _step_s(running, found)
    if step_s is None:
        return None
    work = bytes_per_token(running.shape)
    gemms_s = _gemms_s(work, found.bytes_per_s)
    if not found.quiet and sum(work.values()) < _LEAST_BYTES_PER_S * gemms_s:
        return None
    ratios = [
        one.tokens_per_s * expected for one in known if (expected := _step_s(one.running, found))
    ]
    return Estimate(_ratio(ratios) / step_s, disturbed=not found.quiet)


def _step_s(running: DecodeSetup, found: Costs) -> float | None:
    """One token's time; None where the rate of a format is unknown."""
    work = bytes_per_token(running.shape)
    if not work.keys() <= found.bytes_per_s.keys():
        return None
    layer = running.layer
    unknown = _LAYER_UNKNOWN_S[running.flash]
    layer_s = found.layer_s.get(layer, unknown) if layer is not None else unknown
    if not found.quiet:
        # Threads that wait for a core do so after each of many operations: a large gemm is a better measure.
        layer_s = min(layer_s, unknown)
    shape = running.shape
    return (
        _gemms_s(work, found.bytes_per_s)
        + len(shape.layers) * layer_s
        + (found.step_s if found.quiet else 0.0)
        + _LOOP_S
        + _TOKEN_S * shape.vocab_size
    )


def offloaded_rate(
    running: DecodeSetup,
    plan: MemoryPlan,
    machine: Machine,
    threads: int,
    measures: MeasurementCache,
    past: Sequence[MeasuredSetup] = (),
) -> Estimate | None:
    """The same with layers on GPUs; None where a driver does not report the bandwidth.

    GPUs read their weights one after another at nearly their bandwidth, and spend a constant on each layer;
    what stays in RAM, whole layers or experts, is priced by the benchmark. past: models that ran whole on
    these GPUs, whose times correct the estimate.
    """
    speeds = [gpu.bytes_per_s for gpu in machine.gpus]
    if not speeds or not all(speeds) or not plan.layers:
        return None
    off = [1 / (one.tokens_per_s * _on_gpu_s(one.running.shape, min(speeds))) for one in past]
    correction = median(off) if off else 1.0
    if plan.experts_on_cpu:
        return _without_experts(running.shape, plan, min(speeds), threads, measures, correction)
    whole_s = _on_gpu_s(running.shape, min(speeds)) * correction
    on_gpus = plan.gpu_layers / plan.layers
    if on_gpus >= 1:
        return Estimate(1 / whole_s)
    on_cpu = expected_rate(running, threads, measures)
    if on_cpu is None:
        return None
    rest_s = (1 - on_gpus) / on_cpu.tokens_per_s
    return Estimate(1 / (on_gpus * whole_s + rest_s), on_cpu.disturbed)


def _without_experts(
    shape: ModelShape,
    plan: MemoryPlan,
    bytes_per_s: int,
    threads: int,
    measures: MeasurementCache,
    correction: float,
) -> Estimate | None:
    """The rate with the experts of some layers in RAM; None where the benchmark fails."""
    in_ram = bytes_per_token(shape, experts_below=plan.experts_on_cpu)
    found = costs(threads, in_ram, (), measures)
    if not in_ram.keys() <= found.bytes_per_s.keys():
        return None
    read = shape.token_bytes - sum(in_ram.values())
    gpu_s = _reading_s(read, shape.all_layers, bytes_per_s) * correction
    cpu_s = _gemms_s(in_ram, found.bytes_per_s) / _USUAL + plan.experts_on_cpu * _CROSSING_S
    step_s = gpu_s + cpu_s + _LOOP_S + _TOKEN_S * shape.vocab_size
    return Estimate(1 / step_s, disturbed=not found.quiet)


def _on_gpu_s(shape: ModelShape, bytes_per_s: int) -> float:
    return _reading_s(shape.token_bytes, shape.all_layers, bytes_per_s)


def _reading_s(read: int, layers: int, bytes_per_s: int) -> float:
    return read / (_READING_SHARE * bytes_per_s) + _GPU_LAYER_S * layers


def _gemms_s(work: Mapping[int, int], rates: Mapping[int, float]) -> float:
    return sum(count / rates[code] for code, count in work.items())


def _ratio(measured: Sequence[float]) -> float:
    """Speed of an answer relative to the best steps: that of past runs, within what is possible.

    The usual value counts for one and a half of them: two models differ by more than a machine does from day
    to day.
    """
    if not measured:
        return _USUAL
    found = (len(measured) * median(measured) + _USUAL_RUNS * _USUAL) / (
        len(measured) + _USUAL_RUNS
    )
    return min(max(found, _LEAST_RATIO), _MOST_RATIO)


def bytes_per_token(shape: ModelShape, experts_below: int | None = None) -> dict[int, int]:
    """Bytes of weights that one token reads, by ggml's type number; vectors are left out.

    experts_below: count the experts of the layers before this one alone.
    """
    codes = {format_.name: code for code, format_ in NUMBER_FORMATS.items()}
    found: dict[int, int] = {}
    for weight, read in shape.read_weights():
        if experts_below is not None and not (weight.routed and weight.layer < experts_below):
            continue
        code = codes[weight.format.name]
        found[code] = found.get(code, 0) + read
    return found
