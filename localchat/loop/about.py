"""What the child tells of itself: which model, how it is loaded, and what it takes."""

from localchat.engine import frames as protocol
from localchat.engine.engine import EngineInfo
from localchat.fit.machine import read_cores
from localchat.fit.plan import MemoryPlan
from localchat.fit.reason import placed
from localchat.loop.backend import Capabilities, ModelInfo
from localchat.loop.embedding import ONLY_EMBEDS
from localchat.loop.footprint import Footprint
from localchat.loop.selection import Selection


def engine_info(
    wish: protocol.Open,
    selection: Selection,
    info: ModelInfo,
    plan: MemoryPlan,
    taken: Footprint,
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
        threads=wish.threads or read_cores(),
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
