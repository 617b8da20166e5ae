"""EngineInfo of a model in this process: how it is loaded, the memory it takes, its fingerprint."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil
from msgspec.structs import astuple

from localchat import __version__
from localchat.backend_api.interface import Capabilities, MemoryReport, ModelInfo
from localchat.backend_api.registry import BackendChoice
from localchat.core.embedding import ONLY_EMBEDS
from localchat.engine.interface import EngineInfo, GpuPart, MemoryParts, TokenizerInfo
from localchat.engine.local import protocol
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import placed
from localchat.units import percent, size

_TOLERATED_SHARE = 0.1
_TOLERATED_BYTES = 64_000_000
"""A smaller difference is noise of the allocator and of the interpreter."""


_DEFAULTS = LoadOptions()


class MemoryUsage:
    """Planned and measured memory of the loaded model. Created before the load."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._offloads = bool(plan.gpu_layers)
        self._before_bytes = int(psutil.Process().memory_info().rss)
        self._mapped_bytes = plan.mapped_bytes
        self.predicted = MemoryParts(
            plan.weights_bytes,
            plan.kv_bytes,
            plan.compute_bytes,
            plan.overhead_bytes,
        )
        self.actual: MemoryParts | None = None
        """Measured memory. None before the load."""

    @property
    def actual_bytes(self) -> int:
        """Sum of the measured parts. 0 before the load."""
        if self.actual:
            return sum(max(0, part) for part in astuple(self.actual))
        return 0

    @property
    def error(self) -> str:
        """Sentence about a plan that was far off. Empty otherwise, and before the load."""
        if self.actual:
            return prediction_error(astuple(self.predicted), astuple(self.actual))
        return ""

    def measure(self, report: MemoryReport) -> None:
        """Record the parts after the load.

        Buffers count in full, even if none of their pages was touched yet. File pages that the system can drop
        do not count, as in the plan. The overhead is what this process used before the load (interpreter,
        libraries, vocabulary) and what the runner uses besides. With layers on a GPU the overhead is unknown,
        because the GPU's runtime uses memory on the card.
        """
        weights, kv, compute, other = report
        if weights >= 0:
            weights = max(weights - self._mapped_bytes, 0)
        overhead = -1
        if not self._offloads:
            overhead = self._before_bytes + max(other, 0)
        self.actual = MemoryParts(weights, kv, compute, overhead)


def prediction_error(predicted: Sequence[int], actual: Sequence[int]) -> str:
    """Return a sentence if the parts differ from the plan by over a tenth. Empty otherwise.

    Both list bytes in the same order. -1 in `actual` means unknown and does not count.
    """
    measured = [(plan, took) for plan, took in zip(predicted, actual, strict=True) if took >= 0]
    planned = sum(plan for plan, _ in measured)
    took = sum(took for _, took in measured)
    difference = abs(took - planned)
    if difference <= max(_TOLERATED_SHARE * planned, _TOLERATED_BYTES):
        return ""
    comparison = "more" if took > planned else "less"
    return (
        f"It takes {size(took)}, {percent(difference, planned)} {comparison} than the {size(planned)} "
        "that were planned."
    )


class ProcessState(NamedTuple):
    """Fields of EngineInfo that only the engine process can fill."""

    path: str
    safe_mode: bool
    threads: int
    fingerprint: str
    notes: tuple[str, ...]
    warning: str
    sampling: dict[str, float]
    tokenizer: TokenizerInfo


def engine_info(
    spec: protocol.Open,
    choice: BackendChoice,
    info: ModelInfo,
    plan: MemoryPlan,
    memory: MemoryUsage,
    can: Capabilities | None,
    state: ProcessState,
) -> EngineInfo:
    """Return the engine as front ends see it. `can`: None before the load; the plan's figures replace it."""
    return EngineInfo(
        model=spec.name,
        backend=choice.backend.name,
        architecture=info.architecture,
        quantization=info.quantization,
        parameters=info.parameters,
        context_tokens=can.context_tokens if can else plan.context_tokens,
        context_train=info.context_train,
        kv_type=can.kv_type if can else plan.kv_type,
        gpu_layers=plan.gpu_layers,
        layers=plan.layers or info.layers,
        file_bytes=info.file_bytes,
        predicted_bytes=plan.total_bytes,
        actual_bytes=memory.actual_bytes,
        loaded=memory.actual is not None,
        why=" ".join(filter(None, (placed(choice.why, plan), memory.error))),
        limits=_limits(info, can),
        only_embeds=bool(info.pooling),
        predicted=memory.predicted,
        actual=memory.actual,
        free_bytes=plan.free_bytes,
        kv_types=can.kv_types if can else plan.kv_types,
        kv_tokens=can.kv_tokens if can else plan.kv_tokens,
        experts_on_cpu=plan.experts_on_cpu,
        gpus=plan.gpus,
        gpu_parts=gpu_parts(plan),
        max_rows=can.max_rows if can else 0,
        media=info.media,
        loss=plan.loss,
        lora=spec.load.lora,
        **state._asdict(),
    )


def gpu_parts(plan: MemoryPlan) -> tuple[GpuPart, ...]:
    """Return the part of each GPU. Empty with fewer than two GPUs."""
    if plan.gpus > 1:
        return (GpuPart(plan.gpu_layers, plan.gpu_bytes),) * plan.gpus
    return tuple(GpuPart(*share) for share in plan.gpu_shares)


def fingerprint(
    info: ModelInfo,
    kv_type: str,
    versions: Iterable[tuple[str, str]],
    load: LoadOptions = _DEFAULTS,
) -> str:
    """Hash everything besides the request that decides a text, as 16 hex digits.

    Covers the model file, chat template, quantization, what the load rounds, KV type and library versions.
    """
    parts = [__version__, info.identity, info.chat_template or "", info.quantization, kv_type]
    if load.gpus != 1:
        parts.append(f"gpus {load.gpus}")
    if load.quantize:
        parts.append(f"layers {load.quantize}")
    if info.encoder:
        parts.append(f"encoder {info.encoder}")
    parts += [f"lora {identity} {scale!r}" for identity, scale in info.adapters]
    parts += [f"{name} {version}" for name, version in versions]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def _limits(info: ModelInfo, can: Capabilities | None) -> tuple[str, ...]:
    if info.pooling:
        return (ONLY_EMBEDS,)
    return can.limits if can else ()
