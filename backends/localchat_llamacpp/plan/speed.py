"""Predicts decode speed from memory bandwidths and the bytes that a token reads."""

from typing import Final, NamedTuple

from localchat.fit.hardware import Machine
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.speed import DECODE_SHARE, Estimate, Spread, ram_bandwidth
from localchat.model_files.architecture import ModelShape

_GPU_SHARE: Final = 0.9
"""Share of a GPU's bandwidth that its matrix products reach."""
_CPU_LAYER_S: Final = 0.2e-3
"""Other time of a layer on a CPU. Its threads wait for each other about thirty times (two cores)."""
_GPU_LAYER_S: Final = 100e-6
"""Other time of a layer on a GPU: many small kernels in sequence (7B shapes on an H200)."""
_CROSSING_S: Final = 60e-6
"""Time to send a layer's rows to experts in RAM and back."""
_STEP_S: Final = 0.4e-3
"""Time of the engine core per step: bookkeeping, sampling, text and frames."""
_ON_CPU: Final = Spread(0.35, 1.8)
"""Compute limits a slow CPU, and caches help a small model."""
_ON_GPU: Final = Spread(0.5, 1.3)


class _TokenCost(NamedTuple):
    """Bytes that a token reads and layers that it passes, by memory."""

    ram_bytes: float
    ram_layers: float
    gpu_bytes: float
    gpu_layers: float
    crossings: int


def expected_rate(
    shape: ModelShape, plan: MemoryPlan, machine: Machine, threads: int
) -> Estimate | None:
    """Predict the tokens per second of one short request on a quiet machine.

    Measuring the bandwidth of the RAM takes 0.2 s, once. None if a driver does not report the bandwidth of its
    GPU.
    """
    cost = _token_cost(shape, plan)
    gpu_bytes_per_s = min((gpu.bytes_per_s for gpu in machine.gpus), default=0)
    if not shape.token_bytes or (cost.gpu_layers and not gpu_bytes_per_s):
        return None
    ram_bytes_per_s = 0.0
    if cost.ram_bytes:
        ram_bytes_per_s = ram_bandwidth(threads or machine.cores)
    seconds = _step_s(cost, ram_bytes_per_s, gpu_bytes_per_s)
    spread = _ON_CPU if cost.ram_bytes else _ON_GPU
    return spread.around(1 / seconds)


def _token_cost(shape: ModelShape, plan: MemoryPlan) -> _TokenCost:
    """Divide what a token reads as the plan divides the layers."""
    layers = shape.all_layers
    if plan.experts_on_cpu:
        experts = routed_token_bytes(shape, plan.experts_on_cpu)
        on_gpu = shape.token_bytes - experts
        return _TokenCost(experts, 0, on_gpu, layers, crossings=plan.experts_on_cpu)
    gpu_share = 0.0
    if plan.layers:
        gpu_share = plan.gpu_layers / plan.layers
    ram_share = 1 - gpu_share
    return _TokenCost(
        shape.token_bytes * ram_share,
        layers * ram_share,
        shape.token_bytes * gpu_share,
        layers * gpu_share,
        crossings=0,
    )


def routed_token_bytes(shape: ModelShape, first_layers: int) -> int:
    """Return the bytes of experts that a token reads in the first layers."""
    return sum(
        read_bytes
        for weight, read_bytes in shape.read_weights()
        if weight.routed and weight.layer < first_layers
    )


def _step_s(cost: _TokenCost, ram_bytes_per_s: float, gpu_bytes_per_s: float) -> float:
    """Expected seconds of a token."""
    seconds = _STEP_S + cost.crossings * _CROSSING_S
    if cost.ram_bytes:
        seconds += cost.ram_bytes / (DECODE_SHARE * ram_bytes_per_s)
        seconds += cost.ram_layers * _CPU_LAYER_S
    if cost.gpu_layers:
        seconds += cost.gpu_bytes / (_GPU_SHARE * gpu_bytes_per_s)
        seconds += cost.gpu_layers * _GPU_LAYER_S
    return seconds
