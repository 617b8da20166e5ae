"""Memory roof of decoding: bytes that a step has to read, and how fast the memory reads.

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
    """Limit on the decode speed of a loaded model."""

    weights_bytes: int
    """Bytes of weights that a step reads."""
    kv_bytes_per_token: int
    bytes_per_s: float
    measured: bool
    """False for the peak that the GPU's driver reports."""

    def share(self, point: PointFigures, clients: int, context_tokens: int) -> float | None:
        """Return the share of the memory bandwidth that the steps of a point used.

        It exceeds 1 if the weights fit in the processor's cache. None without a time per token, such as for
        answers that arrive in one piece.
        """
        if point.tpot_ms is None or not point.tpot_ms.mean:
            return None
        tokens = point.completion_tokens * point.requests
        # An accepted draft token costs no step of its own.
        steps_share = max(tokens - (point.accepted or 0), 1) / tokens
        cached_tokens = context_tokens + point.prompt_tokens + point.completion_tokens / 2
        step_bytes = self.weights_bytes + clients * cached_tokens * self.kv_bytes_per_token
        return step_bytes * steps_share / (point.tpot_ms.mean / 1e3) / self.bytes_per_s


def memory_roof(
    path: Path, model: ModelSummary, plan: MemoryPlan, machine: Machine
) -> MemoryRoof | None:
    """Return the roof of a model under a load plan. Takes 0.2 s on a CPU.

    None if two kinds of memory hold the model, or the bandwidth is unknown.
    """
    if isinstance(model, ModelShape):
        weights_bytes = model.token_bytes
        kv_type = plan.kv_type if plan.kv_type in KV_FORMATS else "f16"
        kv_bytes = sum(kv_layer_bytes(model, CacheSpec(1, 1, 0, kv_type)))
    else:
        weights_bytes = plan.weights_bytes - plan.unpacked_bytes
        kv_bytes = describe_checkpoint(path, model).kv_bytes_per_token
        if plan.kv_type.startswith("fp8"):
            kv_bytes //= 2
    if plan.gpu_layers == 0:
        return MemoryRoof(weights_bytes, kv_bytes, ram_bandwidth(machine.cores), measured=True)
    bandwidths = [gpu.bytes_per_s for gpu in machine.gpus]
    if plan.gpu_layers < plan.layers or not bandwidths or not all(bandwidths):
        return None
    return MemoryRoof(weights_bytes, kv_bytes, min(bandwidths), measured=False)
