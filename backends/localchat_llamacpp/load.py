"""Loads weights and context by a plan, warms them up, and makes the runner."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localchat.backend_api.interface import (
    Capabilities,
    LoadRequest,
    MemoryReport,
    Progress,
    Widths,
)
from localchat.errors import ModelInvalid
from localchat.fit.memory_plan import MemoryPlan
from localchat_llamacpp.batch import Batch
from localchat_llamacpp.build_advice import offload_advice
from localchat_llamacpp.drafter import load_drafter
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.native_model import (
    KV_TYPES,
    ContextSpec,
    Placement,
    Weights,
    load_weights,
    open_context,
    outputs_max,
)
from localchat_llamacpp.plan.compute_buffers import SPARE_STATES, context_cells
from localchat_llamacpp.runner import LlamaCppRunner
from localchat_llamacpp.warmup import WarmUp

_NO_REWIND = (
    "This model keeps one running state and cannot go back in it: an earlier prompt is reused only from the "
    "places where its state was saved, shortly before a prompt's end and at an answer's, and where a draft is "
    "rejected, the accepted ones before it are computed again."
)
_WINDOW = (
    "This model's sliding window keeps only its last {} tokens here: going back further computes the text "
    "again."
)
_WINDOW_SAVED = (
    "This model looks back {} tokens in some layers, and of a text that waits in RAM those alone are kept: "
    "going back in it computes it again."
)


_LONE = frozenset({"plamo2"})
"""Architectures whose graph in llama.cpp 0.3.36 ends the process (SIGABRT) with three sequences in a step."""
_TILE_ROWS = 64
"""Rows of a prompt that flash attention computes as one tile on a CPU, where KV is in f16. A step of fewer rows
reads all KV for each of them (0.5B shapes after 3,000 tokens: 37 ms of CPU a token at 32 rows, 20 at 64)."""
_MAPPED = "_Mapped"
_IN_RAM = ("CPU", "AMX")
"""The library's names of buffers: pages of the file, and memory of this machine."""
_ALONE = "This llama.cpp computes one text of this model at a time: others wait for it."


@dataclass(frozen=True, slots=True)
class Target:
    """A model to load."""

    path: Path
    """Its first file."""
    total_bytes: int
    """Of all files."""
    kv_types: tuple[str, ...]
    """Those that the model's head sizes allow."""
    threads: int
    architecture: str = ""
    """As the file names it."""
    experts: bool = False
    """A mixture of experts, of which each token of a step reads others."""


def refuse_other_kinds(model: int) -> None:
    """Raise ModelInvalid for models that do not write token by token. The vocabulary suffices."""
    api = library().api
    if api.llama_model_is_diffusion(model):
        raise ModelInvalid(
            "This is a diffusion model; localchat runs models that write token by token."
        )
    if api.llama_model_has_encoder(model) or not api.llama_model_has_decoder(model):
        raise ModelInvalid(
            "This model has an encoder; localchat runs decoder-only models, such as Llama, Qwen or Gemma."
        )


def load_runner(
    target: Target, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
) -> LlamaCppRunner:
    """Load weights, make the context, warm up. Releases everything when one of them fails.

    Raises ModelInvalid, DoesNotFit, EngineClosed, each with the library's own reason.
    """
    if request.plan.kv_type not in KV_TYPES:
        raise ModelInvalid(
            f"KV type {request.plan.kv_type!r}: the known ones are {', '.join(KV_TYPES)}"
        )
    weights = load_weights(
        target.path,
        placement=_placement(request.plan, notify),
        safe_mode=request.safe_mode,
        total_bytes=target.total_bytes,
        progress=progress,
    )
    try:
        return _with_context(weights, target, request, progress)
    except BaseException:
        weights.close()
        raise


def _with_context(
    weights: Weights, target: Target, request: LoadRequest, progress: Progress
) -> LlamaCppRunner:
    plan = request.plan
    api = library().api
    room = max(plan.kv_tokens, plan.context_tokens)
    cells = context_cells(room)
    most = int(api.llama_max_parallel_sequences()) - 1
    spare = SPARE_STATES if _is_stateful(weights.handle) else 0
    spec = ContextSpec(
        context_tokens=room,
        slots=min(request.options.max_slots + spare, most),
        step_tokens=min(plan.max_step_tokens, cells),
        kv_type=plan.kv_type,
        flash_attention=plan.flash_attention,
        threads=target.threads,
        window_only=plan.window_only,
    )
    context, buffers = open_context(weights, spec)
    drafter = None
    try:
        if not api.llama_get_memory(context):
            raise ModelInvalid(
                "This is an embedding model: it has no KV cache and cannot generate text."
            )
        vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(weights.handle)))
        batch = Batch(spec.step_tokens, spec.slots + 1)
        warm = WarmUp(context, batch, spec.slots, vocab_size)
        can_truncate = warm.run(min(spec.step_tokens, plan.context_tokens - 8))
        files = [target.total_bytes]
        if request.options.draft is not None:
            drafter = load_drafter(weights.handle, request, target.threads, progress)
            files.append(Path(request.options.draft).stat().st_size)
        taken = [*weights.buffers, *buffers, *(drafter.buffers if drafter is not None else ())]
        return LlamaCppRunner(
            weights,
            context,
            _capabilities(weights.handle, spec, can_truncate, target, buffers, request),
            batch=batch,
            outputs_max=outputs_max(spec),
            vocab_size=vocab_size,
            threads=target.threads,
            report=report(taken, sum(files)),
            drafter=drafter,
            on_gpu=plan.gpu_layers != 0,
            window_only=spec.window_only,
        )
    except BaseException:
        if drafter is not None:
            drafter.close()
        api.llama_free(context)
        raise


def _placement(plan: MemoryPlan, notify: Callable[[str], None]) -> Placement:
    """The planned places of layers and experts, as far as this build can offload."""
    if plan.gpu_layers and not library().api.llama_supports_gpu_offload():
        notify(offload_advice())
        return Placement()
    return Placement(plan.gpu_layers, plan.experts_on_cpu, plan.gpu_shares)


def _capabilities(
    model: int,
    spec: ContextSpec,
    can_truncate: bool,
    target: Target,
    buffers: list[Buffer],
    request: LoadRequest,
) -> Capabilities:
    api: Any = library().api
    stateful = _is_stateful(model)
    window = int(api.llama_model_n_swa(model))
    rewind: Literal["any", "last_n", "checkpoint"] = "any"
    limits: tuple[str, ...] = ()
    if stateful or not can_truncate:
        rewind = "checkpoint"
        limits = (_NO_REWIND,)
    elif window > 0:
        # With room for all of them the cells before the window are kept too, but a saved state leaves them out,
        # and a full cache may write over them.
        sentence = _WINDOW if spec.window_only else _WINDOW_SAVED
        rewind = "last_n"
        limits = (sentence.format(window),)
    alone = target.architecture in _LONE
    on_gpu = request.plan.gpu_layers != 0
    cells = context_cells(spec.context_tokens)
    return Capabilities(
        context_tokens=request.plan.context_tokens,
        # The cells beyond the room, to a round number, are not promised to anyone.
        kv_tokens=spec.context_tokens,
        max_slots=spec.slots,
        max_rows=1 if alone else min(request.options.max_slots, spec.slots),
        max_step_tokens=spec.step_tokens,
        # The draft model and the model compute one after the other.
        depth=2 if on_gpu and rewind == "any" and request.options.draft is None else 1,
        rewind=rewind,
        rewind_tokens=window if rewind == "last_n" else 0,
        bytes_per_token=_size(buffers, "KV") // cells,
        state_bytes=_size(buffers, "RS") // (spec.slots + 1),
        exports="range" if rewind == "any" else "whole",
        draft_model=request.options.draft is not None,
        all_logprobs=True,
        kv_type=spec.kv_type,
        kv_types=target.kv_types,
        seeds_run_alone=not on_gpu,
        step_target_s=0.1 if on_gpu else 0.25,
        widths=_widths(spec, request),
        limits=(*limits, _ALONE) if alone else limits,
    )


def _widths(spec: ContextSpec, request: LoadRequest) -> Widths:
    """The widths that fill tiles of attention."""
    tiled = spec.flash_attention and spec.kv_type == "f16" and not request.plan.gpu_layers
    return Widths(tuple(range(_TILE_ROWS, spec.step_tokens + 1, _TILE_ROWS)) if tiled else ())


def _is_stateful(model: int) -> bool:
    api = library().api
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def report(buffers: list[Buffer], file_bytes: int) -> MemoryReport:
    """Allocated bytes by purpose.

    A mapped buffer reaches from its first tensor to its last one, also over those between them that went to a
    GPU: of a file of `file_bytes` no more than the rest counts.
    """
    model = [buffer for buffer in buffers if buffer.purpose == "model"]
    mapped = sum(one.size_bytes for one in model if one.device.endswith(_MAPPED))
    on_gpus = sum(one.size_bytes for one in model if _is_on_gpu(one.device))
    return MemoryReport(
        weights_bytes=_size(buffers, "model") - max(0, mapped + on_gpus - file_bytes),
        kv_bytes=_size(buffers, "KV", "RS"),
        compute_bytes=_size(buffers, "compute"),
        other_bytes=_size(buffers, "output"),
    )


def _is_on_gpu(device: str) -> bool:
    return not device.startswith(_IN_RAM) and not device.endswith((_MAPPED, "_Host"))


def _size(buffers: list[Buffer], *purposes: str) -> int:
    return sum(buffer.size_bytes for buffer in buffers if buffer.purpose in purposes)
