"""Loads weights and context by a plan, warms them up, and creates the runner."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from localchat.backend_api.interface import (
    Capabilities,
    LoadRequest,
    MemoryReport,
    Progress,
    Widths,
)
from localchat.errors import DoesNotFit, ModelInvalid
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.adapter import Adapter
from localchat.model_files.ggml_types import KV_FORMATS
from localchat_llamacpp.adapters import LoadedAdapters
from localchat_llamacpp.attention_tiles import TILE_ROWS, prompt_widths
from localchat_llamacpp.batch import Batch
from localchat_llamacpp.drafter import LlamaDrafter, load_drafter, open_head
from localchat_llamacpp.media_api import uses_mrope
from localchat_llamacpp.media_reader import MediaEncoder
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.native_model import (
    ContextSpec,
    Placement,
    Weights,
    load_weights,
    open_context,
)
from localchat_llamacpp.plan.buffers import SPARE_STATES, context_cells
from localchat_llamacpp.runner import LlamaCppRunner

_NO_REWIND = (
    "This model has a recurrent state that cannot be cut back. An earlier prompt is reused only from points "
    "where the state was saved: shortly before a prompt's end, and at an answer's end. After a rejected draft, "
    "the accepted tokens before it are computed again."
)
_WINDOW = (
    "This model's sliding window keeps only its last {} tokens here: going back further computes the text "
    "again."
)
_WINDOW_SAVED = (
    "This model attends to only the last {} tokens in some layers, and text that is swapped to RAM keeps only "
    "these. Going back in it computes it again."
)
_SINGLE_TEXT = frozenset({"plamo2"})
"""Architectures whose graph aborts the process with three sequences in a step (0.3.36)."""
_MAPPED = "_Mapped"
_IN_RAM = ("CPU", "AMX")
"""The library's names of buffers in RAM."""
_GPU_ROW_COST = 0.15
_CPU_ROW_COST = 0.5
"""Two cores need 0.45 to 1.0. If rows are cheaper, drafts that are likely enough measure it."""
_MAX_SLOTS = 255
"""llama.cpp counts 256 sequences, and one is the scratch sequence."""
_ALONE = "This llama.cpp computes one text of this model at a time. Other requests wait."


@dataclass(frozen=True, slots=True)
class Target:
    """A model to load."""

    path: Path
    """First file of the model."""
    total_bytes: int
    """Size of all files."""
    kv_types: tuple[str, ...]
    """KV types that the model's head sizes allow."""
    threads: int
    architecture: str = ""
    """Name of the architecture in the file."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that requests can apply."""


def refuse_other_kinds(model: int) -> None:
    """Raise ModelInvalid for models that do not generate token by token. The vocabulary suffices."""
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
    target: Target,
    request: LoadRequest,
    progress: Progress,
    notify: Callable[[str], None],
    media: MediaEncoder | None = None,
) -> LlamaCppRunner:
    """Load the weights, create the context, and warm up. Releases everything on failure.

    media: reads attachments from then on.

    Raises ModelInvalid, DoesNotFit, EngineClosed, each with the library's own reason.
    """
    # Any other number of a type ends the process in native code.
    if request.plan.kv_type not in KV_FORMATS:
        raise ModelInvalid(
            f"KV type {request.plan.kv_type!r}: expected one of {', '.join(KV_FORMATS)}"
        )
    weights = load_weights(
        target.path,
        placement=_placement(request.plan),
        safe_mode=request.safe_mode,
        total_bytes=target.total_bytes,
        progress=progress,
        head=_uses_head(request),
    )
    with ExitStack() as on_failure:
        on_failure.callback(weights.close)
        runner = _runner(weights, target, request, progress, notify, media, on_failure)
        on_failure.pop_all()
    if media is not None:
        on_gpu = request.plan.gpu_layers != 0
        media.attach(weights.handle, threads=target.threads, use_gpu=on_gpu)
    return runner


def _runner(
    weights: Weights,
    target: Target,
    request: LoadRequest,
    progress: Progress,
    notify: Callable[[str], None],
    media: MediaEncoder | None,
    on_failure: ExitStack,
) -> LlamaCppRunner:
    """Create the context, the adapters and the drafter, and warm up. on_failure: releases what is created."""
    api = library().api
    model = weights.handle
    spec = _context_spec(model, target, request)
    context, buffers = open_context(weights, spec)
    on_failure.callback(api.llama_free, context)
    if not api.llama_get_memory(context):
        raise ModelInvalid(
            "This is an embedding model: it has no KV cache and cannot generate text."
        )
    files = [target.total_bytes]
    adapters = None
    if target.adapters:
        adapters = LoadedAdapters(model, target.adapters)
        buffers = [*buffers, *adapters.buffers]
        files += [adapter.header.file_bytes for adapter in target.adapters]
        # The warm-up then also allocates what a step with adapters needs.
        adapters.apply(context, tuple(1.0 for _ in target.adapters))
    vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
    batch = Batch(spec.step_tokens, spec.slots + 1)
    step = min(spec.step_tokens, request.plan.context_tokens - 8)
    can_truncate = _warm_up(context, batch, spec.slots, vocab_size, step)
    drafter: LlamaDrafter | None = None
    if request.options.draft is not None:
        drafter = load_drafter(model, request, target.threads, progress)
        files.append(Path(request.options.draft).stat().st_size)
    elif _uses_head(request):
        drafter = _open_head(weights, request, target.threads, notify)
    used = [*weights.buffers, *buffers]
    if drafter is not None:
        on_failure.callback(drafter.close)
        used += drafter.buffers
    drafts = drafter is not None
    return LlamaCppRunner(
        weights,
        context,
        _capabilities(model, spec, can_truncate, target, buffers, request, drafts=drafts),
        spec=spec,
        batch=batch,
        vocab_size=vocab_size,
        report=report(used, sum(files)),
        drafter=drafter,
        on_gpu=request.plan.gpu_layers != 0,
        mrope=uses_mrope(model),
        media=media,
        adapters=adapters,
    )


def _context_spec(model: int, target: Target, request: LoadRequest) -> ContextSpec:
    """Return the parameters of the context that the plan describes."""
    plan = request.plan
    room = max(plan.kv_tokens, plan.context_tokens)
    spare = 0
    if _is_stateful(model):
        spare = SPARE_STATES
    return ContextSpec(
        context_tokens=room,
        slots=min(request.options.max_slots + spare, _MAX_SLOTS),
        step_tokens=min(plan.max_step_tokens, context_cells(room)),
        kv_type=plan.kv_type,
        flash_attention=plan.flash_attention,
        threads=target.threads,
        window_only=plan.window_only,
    )


def _uses_head(request: LoadRequest) -> bool:
    """Return whether the model's prediction head drafts. After a crash in a load, it does not."""
    planned = request.plan.prediction_head and request.options.draft is None
    return planned and not request.safe_mode


def _open_head(
    weights: Weights, request: LoadRequest, threads: int, notify: Callable[[str], None]
) -> LlamaDrafter | None:
    """Open the prediction head. None if this llama.cpp cannot run it; the model then runs without it."""
    try:
        return open_head(weights, request, threads)
    except (DoesNotFit, RuntimeError) as error:
        notify(f"The model's prediction head does not draft: {error}")
        return None


def _warm_up(context: int, batch: Batch, slot: int, vocab_size: int, tokens: int) -> bool:
    """Decode `tokens` tokens, then one more, and empty the slot. Return whether its tail can be removed.

    This reads the weights and reveals faults of the build. The wide step comes first, because the fault of AMX
    builds needs two rows. Raises RuntimeError if the library fails.
    """
    api = library().api
    memory = api.llama_get_memory(context)

    def decode(start: int, rows: int) -> None:
        batch.clear()
        ids = [(start + row) * 7919 % vocab_size for row in range(rows)]
        batch.add(slot, start, ids, [rows - 1])
        status = api.llama_decode(context, batch.native)
        api.llama_synchronize(context)
        if status != 0:
            tail = library().log.tail()
            raise RuntimeError(f"llama.cpp failed in warm-up (status {status}): {tail}")

    try:
        decode(0, tokens)
        can_truncate = bool(api.llama_memory_seq_rm(memory, slot, tokens - 1, -1))
        decode(tokens - 1 if can_truncate else tokens, 1)
        return can_truncate
    finally:
        api.llama_memory_seq_rm(memory, slot, -1, -1)


def _placement(plan: MemoryPlan) -> Placement:
    """Return the planned placement of layers and experts, as far as this build can offload."""
    if plan.gpu_layers and not library().api.llama_supports_gpu_offload():
        return Placement()
    return Placement(plan.gpu_layers, plan.experts_on_cpu, plan.gpu_shares)


def _capabilities(
    model: int,
    spec: ContextSpec,
    can_truncate: bool,
    target: Target,
    buffers: list[Buffer],
    request: LoadRequest,
    *,
    drafts: bool,
) -> Capabilities:
    rewind, window, limits = _rewinding(model, spec, can_truncate=can_truncate)
    alone = target.architecture in _SINGLE_TEXT
    on_gpu = request.plan.gpu_layers != 0
    row_cost = _CPU_ROW_COST
    if on_gpu:
        row_cost = _GPU_ROW_COST
    cells = context_cells(spec.context_tokens)
    return Capabilities(
        context_tokens=request.plan.context_tokens,
        # The context is rounded up to whole cells. The extra cells are not part of the promise.
        kv_tokens=spec.context_tokens,
        max_slots=spec.slots,
        max_rows=1 if alone else min(request.options.max_slots, spec.slots),
        max_step_tokens=spec.step_tokens,
        # The drafter and the model compute one after the other.
        depth=2 if on_gpu and rewind == "any" and not drafts else 1,
        rewind=rewind,
        rewind_tokens=window,
        bytes_per_token=_size(buffers, "KV") // cells,
        state_bytes=_size(buffers, "RS") // (spec.slots + 1),
        exports="range" if rewind == "any" else "whole",
        draft_model=drafts,
        all_logprobs=True,
        kv_type=spec.kv_type,
        kv_types=target.kv_types,
        seeds_run_alone=not on_gpu,
        row_cost=row_cost,
        moves_rows=rewind == "any",
        step_target_s=0.1 if on_gpu else 0.25,
        widths=_widths(model, spec, request),
        limits=(*limits, _ALONE) if alone else limits,
    )


class _Rewinding(NamedTuple):
    """How far a slot can be truncated."""

    rewind: Literal["any", "last_n", "checkpoint"]
    window_tokens: int = 0
    """Tokens of the window, if it limits truncation."""
    limits: tuple[str, ...] = ()
    """Sentences about it for the user."""


def _rewinding(model: int, spec: ContextSpec, *, can_truncate: bool) -> _Rewinding:
    if _is_stateful(model) or not can_truncate:
        return _Rewinding("checkpoint", limits=(_NO_REWIND,))
    window = int(library().api.llama_model_n_swa(model))
    if window <= 0:
        return _Rewinding("any")
    # With room, the cache also stores the cells before the window. A saved state omits them, and a full cache
    # may overwrite them.
    sentence = _WINDOW if spec.window_only else _WINDOW_SAVED
    return _Rewinding("last_n", window, (sentence.format(window),))


def _widths(model: int, spec: ContextSpec, request: LoadRequest) -> Widths:
    """Return the widths that fill tiles of attention."""
    if not spec.flash_attention or spec.kv_type != "f16" or request.plan.gpu_layers:
        return Widths(())
    heads = int(library().api.llama_model_n_head(model))
    # Where others decode, one tile per head makes them wait half as long as two.
    mixed = tuple(range(TILE_ROWS, spec.step_tokens + 1, TILE_ROWS))
    return Widths(prefill=prompt_widths(spec.step_tokens, heads, spec.threads), mixed=mixed)


def _is_stateful(model: int) -> bool:
    api = library().api
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def report(buffers: list[Buffer], file_bytes: int) -> MemoryReport:
    """Sum the allocated bytes by purpose.

    A mapped buffer spans everything between its first and last tensor, including tensors that went to a GPU.
    So no more counts than the rest of `file_bytes`.
    """
    model = [buffer for buffer in buffers if buffer.purpose == "model"]
    mapped = sum(part.size_bytes for part in model if part.device.endswith(_MAPPED))
    on_gpus = sum(part.size_bytes for part in model if _is_on_gpu(part.device))
    return MemoryReport(
        weights_bytes=_size(buffers, "model", "LoRA") - max(0, mapped + on_gpus - file_bytes),
        kv_bytes=_size(buffers, "KV", "RS"),
        compute_bytes=_size(buffers, "compute"),
        other_bytes=_size(buffers, "output"),
    )


def _is_on_gpu(device: str) -> bool:
    return not device.startswith(_IN_RAM) and not device.endswith((_MAPPED, "_Host"))


def _size(buffers: list[Buffer], *purposes: str) -> int:
    return sum(buffer.size_bytes for buffer in buffers if buffer.purpose in purposes)
