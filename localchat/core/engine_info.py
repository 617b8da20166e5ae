"""The memory that a loaded model takes of this process, by the parts that its plan has."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

from localchat import __version__
from localchat.backend_api.interface import Capabilities, MemoryReport, ModelInfo
from localchat.backend_api.selection import Selection
from localchat.core.embedding import ONLY_EMBEDS
from localchat.engine.interface import EngineInfo, MemoryParts
from localchat.engine.local import protocol
from localchat.fit.hardware import read_cores
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import percent, placed, size

# What a load took beside what was planned: a planner that is wrong says so itself.


_SHARE = 0.1
_LEAST_BYTES = 64_000_000
"""Below, a difference is noise of the allocator and of the interpreter."""


def surprise(predicted: Sequence[int], actual: Sequence[int]) -> str:
    """One sentence where the parts took over a tenth more or less than planned; empty otherwise. Parts in
    bytes, in the same order; -1 in `actual` is not known and does not count."""
    known = [(plan, took) for plan, took in zip(predicted, actual, strict=True) if took >= 0]
    planned, took = sum(plan for plan, _ in known), sum(took for _, took in known)
    difference = abs(took - planned)
    if difference <= max(_SHARE * planned, _LEAST_BYTES):
        return ""
    word = "more" if took > planned else "less"
    return (
        f"the load took {size(took)} where {size(planned)} were planned, {percent(difference, planned)} "
        f"{word}: `fit` is off by as much for this model"
    )


class MemoryUsage:
    """Made between plan and load, measured after the load. `actual` is None until then."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._offloads = bool(plan.gpu_layers)
        self._before_bytes = _resident_bytes()
        # File pages that nobody needs any more are still held.
        self.predicted = MemoryParts(
            plan.weights_bytes + plan.mapped_bytes,
            plan.kv_bytes,
            plan.compute_bytes,
            plan.overhead_bytes,
        )
        self.actual: MemoryParts | None = None

    @property
    def actual_bytes(self) -> int:
        """What is known of the parts, together; 0 before the load."""
        return sum(max(0, part) for part in _parts(self.actual)) if self.actual else 0

    def measure(self, report: MemoryReport, say: Callable[[str], None]) -> None:
        """The parts as they are: buffers as the runner knows them, whole, also where no page of them was
        touched yet; as overhead what this process held before the load (interpreter, libraries, vocabulary)
        with what the runner keeps besides. With layers on a GPU the overhead is not known: its runtime keeps
        memory on the card. `say` gets a sentence where the plan was far off."""
        weights, kv, compute, other = report
        overhead = -1 if self._offloads else self._before_bytes + max(other, 0)
        self.actual = MemoryParts(weights, kv, compute, overhead)
        if sentence := surprise(_parts(self.predicted), _parts(self.actual)):
            say(sentence)


def _parts(found: MemoryParts) -> tuple[int, int, int, int]:
    return found.weights_bytes, found.kv_bytes, found.compute_bytes, found.overhead_bytes


def _resident_bytes() -> int:
    """RAM of this process, files mapped into it included."""
    import psutil

    return int(psutil.Process().memory_info().rss)


# What the child tells of itself: which model, how it is loaded, and what it takes.


def engine_info(
    wish: protocol.Open,
    selection: Selection,
    info: ModelInfo,
    plan: MemoryPlan,
    taken: MemoryUsage,
    can: Capabilities | None,
    **told: object,
) -> EngineInfo:
    """The engine as doors see it. `can`: None before the load. `told`: the fields that the worker knows alone
    (path, safe_mode, fingerprint, notes, warning)."""
    return EngineInfo(
        model=wish.name,
        backend=selection.backend.name,
        architecture=info.architecture,
        quantization=info.quantization,
        parameters=info.parameters,
        context_tokens=can.context_tokens if can else plan.context_tokens,
        context_train=info.context_train,
        kv_type=can.kv_type if can else plan.kv_type,
        gpu_layers=plan.gpu_layers,
        layers=plan.layers or info.layers,
        threads=wish.load.threads or read_cores(),
        file_bytes=info.file_bytes,
        predicted_bytes=plan.total_bytes,
        actual_bytes=taken.actual_bytes,
        loaded=taken.actual is not None,
        why=placed(selection.why, plan),
        limits=(ONLY_EMBEDS,) if info.pooling else can.limits if can else (),
        predicted=taken.predicted,
        actual=taken.actual,
        free_bytes=plan.free_bytes,
        kv_types=can.kv_types if can else plan.kv_types,
        **told,  # type: ignore[arg-type]
    )


# What decides a text besides the request, as one short word.


def fingerprint(
    info: ModelInfo, kv_type: str, versions: Iterable[tuple[str, str]], *, head_int8: bool = False
) -> str:
    """16 hex digits of a hash over model file, template, quantization, KV type and library versions."""
    parts = [__version__, info.identity, info.chat_template or "", info.quantization, kv_type]
    parts += ["head int8"] if head_int8 else []
    parts += [f"{name} {version}" for name, version in versions]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]
