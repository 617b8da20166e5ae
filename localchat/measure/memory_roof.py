"""The memory roof of decoding: bytes that a step has to read, and how fast the memory reads.

A step reads the weights once for all its requests, and the KV cache of each.
"""

from pathlib import Path

import msgspec

from localchat.fit.hardware import Machine
from localchat.fit.memory_plan import CacheSpec, MemoryPlan, kv_layer_bytes
from localchat.fit.speed import ram_bandwidth
from localchat.measure.statistics import PointFigures
from localchat.model_files.architecture import ModelShape
from localchat.model_files.checkpoint import ModelSummary
from localchat.model_files.ggml_types import KV_FORMATS
from localchat.models.info.checkpoint_info import describe_checkpoint


class MemoryRoof(msgspec.Struct, frozen=True):
    """What bounds the decode speed of a loaded model."""

    weights_bytes: int
    """That one step reads."""
    kv_bytes_per_token: int
    bytes_per_s: float
    measured: bool
    """False: the peak that the GPU's driver reports."""

    def share(self, point: PointFigures, clients: int, context_tokens: int) -> float | None:
        """Bytes that the steps of a point read, over those that the memory can read in the same time.

        Above 1 where the weights stay in the cache of the processor. None without a time per token, as of an
        answer that comes in one piece."""
        if point.tpot_ms is None or not point.tpot_ms.mean:
            return None
        tokens = point.completion_tokens * point.requests
        # A draft that was accepted cost no step of its own.
        steps_share = max(tokens - (point.accepted or 0), 1) / tokens
        held = context_tokens + point.prompt_tokens + point.completion_tokens / 2
        step_bytes = self.weights_bytes + clients * held * self.kv_bytes_per_token
        return step_bytes * steps_share / (point.tpot_ms.mean / 1e3) / self.bytes_per_s


def memory_roof(
    path: Path, model: ModelSummary, plan: MemoryPlan, machine: Machine
) -> MemoryRoof | None:
    """The roof of a model that is loaded by this plan; None where it lies in two kinds of memory, or the
    bandwidth is unknown. Takes a fifth of a second on a CPU."""
    if isinstance(model, ModelShape):
        weights = model.token_bytes
        kv = _kv_bytes(model, plan.kv_type)
    else:
        weights = plan.weights_bytes - plan.unpacked_bytes
        kv = describe_checkpoint(path, model).kv_bytes_per_token
        kv = kv // 2 if plan.kv_type.startswith("fp8") else kv
    if plan.gpu_layers == 0:
        return MemoryRoof(weights, kv, ram_bandwidth(machine.cores), measured=True)
    speeds = [gpu.bytes_per_s for gpu in machine.gpus]
    if plan.gpu_layers < plan.layers or not speeds or not all(speeds):
        return None
    return MemoryRoof(weights, kv, min(speeds), measured=False)


def _kv_bytes(model: ModelShape, kv_type: str) -> int:
    known = kv_type if kv_type in KV_FORMATS else "f16"
    return sum(kv_layer_bytes(model, CacheSpec(1, 1, 0, known)))
