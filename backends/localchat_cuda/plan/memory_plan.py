"""Plans the GPU memory of a load: weights, KV pages, workspace and driver overhead. Imports no torch.

The planner builds a frozen `GpuBudget` in stages: weights and workspace first, then the optional parts.
`_memory_plan` turns the budget into a MemoryPlan. If the trained context does not fit and the user requested
none, the plan has a shorter one and a note.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from localchat.errors import UsageError
from localchat.fit.hardware import Gpu
from localchat.fit.kv_types import FP8, canonical_kv_type
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    MIN_CONTEXT_TOKENS,
    MemoryPlan,
    check_context,
    gpu_reserve_bytes,
    largest,
)
from localchat.model_files.safetensors import SafetensorsHeader
from localchat.units import gigabytes_flag, size, tokens
from localchat_cuda.config.model import PAGE_TOKENS, FloatType, ModelConfig
from localchat_cuda.config.prediction import has_head, head_bytes, head_config
from localchat_cuda.config.rope import DynamicNtkScaling, LongRopeScaling
from localchat_cuda.ggml_forms import packed_bytes
from localchat_cuda.plan import draft_plan, window_plan
from localchat_cuda.plan.draft_plan import DraftShape
from localchat_cuda.plan.weight_sizes import (
    head_bounds_bytes,
    own_dummy_bytes,
    unpacked_bytes,
    weight_share,
    weights_bytes,
)

STEP_TOKENS = 2048
"""Tokens of a step: 50 ms for a 7B model on an H200."""
_LARGE_STEPS = ((60_000_000_000, 8192), (30_000_000_000, 4096))
"""Tokens of a step from this much free memory. 4,096 take 1.4 GB for activations, 8,192 twice that; each
doubling dequantizes half as often."""
OVERHEAD_BYTES = 800_000_000
"""The driver's context, the libraries' handles and workspaces, compiled kernels."""
_COLLECTIVE_BYTES = 400_000_000
"""Buffers of NCCL for sums over several GPUs (not measured yet)."""
_MIN_GRAPH_BYTES = 150_000_000
_GRAPH_SHARE = 50
LOGIT_ROWS = 64
"""Rows of logits at once, and positions of one sample batch. More slots raise it."""
LARGEST_DECODE = 256
"""Rows of the largest step that only decodes or verifies."""
LARGEST_CAPTURED = 4096
"""Rows of the largest step that is captured as a graph."""
HEAD_BOUNDS = True
"""Whether a load may have an int8 copy of its head, which bounds the logits."""
_DEQUANT_PAGES = 512
_DEQUANT_BYTES = 1 << 27
"""Limit on the pages of an FP8 cache that a step dequantizes: 32,768 tokens, fewer with many key heads."""
_HOPPER = 9
"""First number of the compute capability."""
_MIN_HOPPER_BYTES = 40_000_000_000
"""Memory of the smallest Hopper GPU."""
_SAVED_STATES = 64
_SAVED_SHARE = 4
"""States saved for prefixes take at most this part of the KV cache's memory."""
_WORTH = 1.5
"""Growth of room or context that justifies a page pool for windowed layers."""
_ENOUGH_TOKENS = 4096
"""Room per slot from which cached idle conversations are worth more than more room."""
_MORE_SLOTS = (128, 64, 32)
_SHORT_TOKENS = 1024
"""Room per sequence that justifies more slots. Sequences that grow longer preempt others."""
STATE_WINDOW = 1024
"""Last states of a sequence that are kept for prediction heads."""
_HALF = 2
_FLOAT = 4
_TABLE = 4
_HOST_BYTES = 4_000_000_000
_HOST_SHARE = 4
_HOST_CACHES = 4
"""Default limits on pinned RAM for idle KV: 4 GB, a quarter of the free RAM, four times the KV cache."""
_KV_TYPES: dict[FloatType, str] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def plan(
    config: ModelConfig,
    headers: Iterable[SafetensorsHeader],
    options: LoadOptions,
    gpu: Gpu,
    ram_bytes: int = 0,
    draft: DraftShape | None = None,
    undivided: ModelConfig | None = None,
) -> MemoryPlan:
    """Plan a load to one GPU. Never raises for lack of memory; `fit.memory_plan.demand` does that.

    ram_bytes: free RAM, of which pinned memory for idle KV takes a part. Raises UsageError for a KV type that
    the engine lacks. undivided: shape of the whole model, if `config` is that of one of several GPUs that
    compute it together.
    """
    headers = tuple(headers)
    # A capped context has an error of its own.
    trained = 0 if config.context_capped else config.context_train
    check_context("The model", options.context_tokens, trained, anyway=options.anyway)
    _check_options(config, options)
    share = weight_share(undivided or config, config)
    load = _GpuLoad(config, headers, options, gpu, ram_bytes, draft, share)
    budget = _budget(load, has_window_pool=False)
    if window_plan.window_of(config) and config.recurrent is None:
        windowed = _budget(load, has_window_pool=True)
        if _saves(_memory_plan(windowed), _memory_plan(budget), options.max_slots):
            budget = windowed
    return _memory_plan(_with_head_bounds(budget))


def _saves(window_pool: MemoryPlan, shared_pool: MemoryPlan, slots: int) -> bool:
    """Return True if a page pool for windowed layers allows much more.

    It costs the KV in RAM and on disk, so a load with enough room does without.
    """
    if not (window_pool.fits and shared_pool.fits):
        smaller = window_pool.total_bytes < shared_pool.total_bytes
        return window_pool.fits or (not shared_pool.fits and smaller)
    if window_pool.context_tokens >= _WORTH * shared_pool.context_tokens:
        return True
    has_more_room = window_pool.kv_tokens >= _WORTH * shared_pool.kv_tokens
    is_short = shared_pool.kv_tokens < slots * min(shared_pool.context_tokens, _ENOUGH_TOKENS)
    keeps_context = window_pool.context_tokens >= shared_pool.context_tokens
    return has_more_room and is_short and keeps_context


def _check_options(config: ModelConfig, options: LoadOptions) -> None:
    limit = config.context_train
    if config.context_capped and (options.context_tokens or 0) > limit:
        raise UsageError(
            f"A context of {options.context_tokens:,} tokens is not possible: from {limit:,} on this model "
            "scales its attention by the position, which is not done here.",
            hint=f"Ask for --ctx {limit} at most, or take a GGUF of the model for llama.cpp.",
        )
    if options.experts_on_cpu not in ("auto", 0):
        raise UsageError(
            "The CUDA backend keeps all weights on the GPU: no experts can stay in RAM.",
            hint="Leave out --experts-on-cpu, or take a GGUF of the model for llama.cpp.",
        )
    possible = kv_types(config)
    if canonical_kv_type(options.kv_type) not in (None, *possible):
        reason = "one latent for all heads"
        if FP8 in possible:
            reason = "half the memory"
        raise UsageError(
            f"The KV cache of this model cannot be {options.kv_type} here.",
            hint=f"Possible on the CUDA backend: {', '.join(possible)} ({reason}). "
            "llama.cpp has others, for GGUF files.",
        )


def kv_types(config: ModelConfig) -> tuple[str, ...]:
    """Return the possible KV types, best first: that of the activations, then FP8 (no kernel for latents)."""
    own = _KV_TYPES[config.dtype]
    if config.latent is None:
        return (own, FP8)
    return (own,)


def kv_token_bytes(
    config: ModelConfig, kv_type: str | None = None, windowed: bool | None = None
) -> int:
    """Return the bytes of keys and values of one token.

    kv_type: None for the model's own type. windowed: count only layers with (True) or without (False) a
    sliding window.
    """
    parts = 2 if config.latent is None else 1
    layers = [n for n in config.kv_layers if windowed in (None, config.window(n) > 0)]
    shapes = [(parts * config.key_heads_of(n), config.head_dim_of(n)) for n in layers]
    if kv_type == FP8:
        return sum(heads * (d + 1) for heads, d in shapes)
    return sum(map(prod, shapes)) * config.float_bytes


def step_tokens(free_bytes: int) -> int:
    """Return the tokens of a step with this much usable memory."""
    return next((step for min_bytes, step in _LARGE_STEPS if free_bytes >= min_bytes), STEP_TOKENS)


def logit_rows(slots: int) -> int:
    """Return the rows of logits at once, which are the positions of one sample batch."""
    return max(LOGIT_ROWS, min(LARGEST_DECODE, slots))


def graph_bytes(gpu: Gpu, gpu_limit_bytes: int | None) -> int:
    """Return the limit on captured graphs: a 50th of the GPU, or little if the user limits its use.

    vLLM counts 24 MB a graph.
    """
    if gpu_limit_bytes is not None:
        return _MIN_GRAPH_BYTES
    return max(_MIN_GRAPH_BYTES, gpu.total_bytes // _GRAPH_SHARE)


def workspace_bytes(config: ModelConfig, slots: int, step: int = STEP_TOKENS) -> int:
    """Return the bytes of the largest tensors of a step besides weights and cache.

    Activations of `step` tokens; logits of one sample batch, the graphs' buffer for them, and the sampler's two
    copies; the graphs' buffer for last states; the dequantized weight that the library multiplies.
    """
    dense_layers = (n for n in range(config.layers) if config.gemma or not config.has_experts(n))
    feed = 2 * max(map(config.intermediate_of, dense_layers), default=0)
    width = max(config.qkv_columns, feed, config.hidden)
    if config.recurrent is not None:
        width = max(width, config.recurrent.columns)
    if config.gemma is not None:
        width = max(width, config.layers * config.gemma.input_columns)
    if config.latent is not None:
        width = max(width, config.latent.queries(config.heads))
    activations = step * (2 * width + 3 * config.hidden) * _FLOAT
    activations += step * _extra_token_bytes(config)
    logits = 4 * logit_rows(slots) * config.vocabulary * _FLOAT
    states = min(step, LARGEST_CAPTURED) * config.hidden * _HALF
    dequantized = 0
    if config.quantization:
        dequantized = (feed or width) * config.hidden * _HALF
    return activations + logits + states + dequantized


def _extra_token_bytes(config: ModelConfig) -> int:
    """Return the activation bytes per token of mixtures, latent attention and running states."""
    extra = 0
    if config.mixture is not None:
        # Inner features and results of every chosen expert, and the rows in 16 bits twice.
        chosen = config.mixture.taken * (config.intermediate * _HALF + config.hidden * _FLOAT)
        extra += chosen + 2 * config.hidden * _HALF
    if (latent := config.latent) is not None:
        # Queries in all their forms, and each head's mix of latents and its values.
        head_numbers = latent.plain + latent.row + latent.kv_rank + latent.value
        extra += config.heads * head_numbers * _HALF
    if (states := config.recurrent) is not None:
        # Input and output of the rule that changes a state, and the keys and values of its chunks.
        chunks = states.value_heads * states.key_dim + states.values
        extra += (states.channels + chunks + 2 * states.values) * _HALF
    return extra


def can_bound_head(config: ModelConfig) -> bool:
    """Return True if the output head can have an int8 copy that bounds its logits."""
    plain = config.dtype != "float32" and not config.head_format and not config.head_cap
    # Likely tokens would have to be found across GPUs.
    plain = plain and config.ranks == 1
    return HEAD_BOUNDS and plain


def table_bytes(slots: int, context: int) -> int:
    """Return the bytes of the token table and the block tables."""
    return (slots + 1) * (context + context // PAGE_TOKENS) * _TABLE


def dequant_pages(key_heads: int, head_dim: int) -> int:
    """Return the limit on FP8 pages that a step dequantizes into memory of all layers."""
    return min(_DEQUANT_PAGES, _DEQUANT_BYTES // (2 * key_heads * PAGE_TOKENS * head_dim * _HALF))


def dequant_bytes(config: ModelConfig, gpu: Gpu) -> int:
    """Return the bytes of that memory. 0 on GPUs that cannot have the kernel which needs it."""
    if gpu.total_bytes < _MIN_HOPPER_BYTES:
        return 0
    page_bytes = 2 * config.key_heads * PAGE_TOKENS * config.head_dim * _HALF
    return dequant_pages(config.key_heads, config.head_dim) * page_bytes


def rotation_bytes(config: ModelConfig, context: int) -> int:
    """Return the bytes of the cosine and sine tables, one per rotation and dimension."""
    tables = {(config.rotation_of(n), config.table_dim_of(n)) for n in range(config.layers)}
    return sum(d for _, d in tables) * context * _FLOAT


def draft_bytes(config: ModelConfig, weights: int, context: int, slots: int) -> int:
    """Return the bytes of a draft model or head with `weights` bytes of its own.

    context, slots: those of the model that it drafts for.
    """
    text = draft_plan.text_tokens(config, context)
    cache = (draft_plan.pool_tokens(config, context) + PAGE_TOKENS) * kv_token_bytes(config)
    tables = rotation_bytes(config, text) + table_bytes(slots, text)
    work = workspace_bytes(config, slots, draft_plan.STEP_TOKENS)
    return weights + cache + tables + work + draft_plan.GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class _GpuLoad:
    """A request to load a model."""

    config: ModelConfig
    headers: tuple[SafetensorsHeader, ...]
    options: LoadOptions
    gpu: Gpu
    ram_bytes: int
    draft: DraftShape | None
    share: float
    """Part of the stored weights that this GPU loads."""

    @property
    def context(self) -> int:
        """The requested context, else the trained one."""
        return self.options.context_tokens or self.config.context_train


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Division of one GPU's memory, in bytes, before the KV cache takes its part.

    Size: each field is a number that the MemoryPlan reports.
    """

    load: _GpuLoad
    free: int
    """Memory that the load may take."""
    reserve: int
    kv_type: str
    step: int
    """Tokens of a step."""
    weights: int
    workspace: int
    overhead: int
    has_window_pool: bool
    """Whether windowed layers have a page pool of their own."""
    window_pages: int = 0
    saved_states: int = 0
    draft_bytes: int = 0
    """Part of the workspace that a draft model or head takes."""
    prediction_head: bool = False
    head_bounds: bool = False
    notes: tuple[str, ...] = ()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the layers of the shared pool."""
        windowed = False if self.has_window_pool else None
        return PAGE_TOKENS * kv_token_bytes(self.load.config, self.kv_type, windowed)

    @property
    def windows_bytes(self) -> int:
        """Bytes of the pages in the pool of windowed layers."""
        page = PAGE_TOKENS * kv_token_bytes(self.load.config, self.kv_type, windowed=True)
        return self.window_pages * page

    @property
    def rows(self) -> int:
        """Sequences that run at once."""
        slots = self.load.options.max_slots
        return window_plan.rows(self.load.config, self.window_pages, self.step, slots)

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.workspace + self.overhead

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of one sequence of `context` tokens and of the whole window pool."""
        return -(-context // PAGE_TOKENS) * self.page_bytes + self.windows_bytes

    def kv_room(self) -> int:
        """Return the bytes left for the KV cache."""
        room = self.free - self.fixed_bytes
        if self.load.options.kv_limit_bytes is not None:
            room = min(room, self.load.options.kv_limit_bytes)
        return max(room, 0)

    def longest_context(self, limit: int) -> int:
        """Return the longest context up to `limit` that fits."""
        room = self.kv_room()
        return largest(lambda context: self.kv_bytes(context) <= room, limit)

    def fits_every_slot(self, context: int) -> bool:
        """Return True if every slot can store the whole context."""
        slots = self.load.options.max_slots
        own_bytes = self.kv_bytes(context) - self.windows_bytes
        return self.rows == slots and own_bytes * slots <= self.kv_room() - self.windows_bytes

    def leaves_room_for_others(self) -> bool:
        """Return True if the window pool leaves half of the memory to the other layers.

        A quarter is enough where only two sequences have windows. The requested context fits in any case.
        """
        room = self.kv_room()
        if self.kv_bytes(self.load.options.context_tokens or 1) > room:
            return False
        if not self.page_bytes:
            return self.windows_bytes <= room
        left = room // (4 if self.rows <= 2 else 2)
        return self.windows_bytes <= room - left


def _budget(load: _GpuLoad, *, has_window_pool: bool) -> GpuBudget:
    """Divide the memory of the GPU. The order matters: later parts take what earlier ones leave."""
    budget = _with_saved_states(_base_budget(load, has_window_pool=has_window_pool))
    budget = _with_head(_with_draft(budget))
    if has_window_pool:
        budget = _with_window_pool(budget)
    budget = replace(budget, notes=(*_window_notes(budget), *budget.notes))
    return _with_prediction_head(budget)


def _base_budget(load: _GpuLoad, *, has_window_pool: bool) -> GpuBudget:
    """Count weights, tensors of a step and tables."""
    config = load.config
    options = load.options
    reserve = 0 if options.anyway else gpu_reserve_bytes(load.gpu.total_bytes)
    free = max(load.gpu.free_bytes - reserve, 0)
    if options.gpu_limit_bytes is not None:
        free = min(free, options.gpu_limit_bytes)
    kv_type = canonical_kv_type(options.kv_type) or kv_types(config)[0]
    weights = own_dummy_bytes(config)
    if load.headers:
        weights = round(weights_bytes(config, load.headers) * load.share)
    step = step_tokens(free)
    if has_window_pool:
        page = PAGE_TOKENS * kv_token_bytes(config, kv_type, windowed=True)
        step = window_plan.step_tokens(step, free - weights, page)
    workspace = workspace_bytes(config, options.max_slots, step)
    workspace += rotation_bytes(config, load.context)
    workspace += table_bytes(options.max_slots, load.context)
    if has_window_pool:
        # The window pool has block tables of its own.
        workspace += (options.max_slots + 1) * (load.context // PAGE_TOKENS) * _TABLE
    if kv_type == FP8:
        workspace += dequant_bytes(config, load.gpu)
    if config.ranks > 1:
        # Buffers of NCCL, and the logits of all GPUs side by side.
        workspace += (
            _COLLECTIVE_BYTES + 2 * logit_rows(options.max_slots) * config.vocabulary * _FLOAT
        )
    return GpuBudget(
        load=load,
        free=free,
        reserve=reserve,
        kv_type=kv_type,
        step=step,
        weights=weights,
        workspace=workspace,
        overhead=OVERHEAD_BYTES + graph_bytes(load.gpu, options.gpu_limit_bytes),
        has_window_pool=has_window_pool,
        notes=tuple(_context_notes(config)),
    )


def _with_saved_states(budget: GpuBudget) -> GpuBudget:
    """Add the running states of a hybrid: one per slot, and those that are saved for prefixes."""
    config = budget.load.config
    if config.recurrent is None:
        return budget
    slot_states = config.state_bytes * (budget.load.options.max_slots + 1)
    room = max(0, budget.free - budget.fixed_bytes - slot_states)
    saved = min(_SAVED_STATES, room // _SAVED_SHARE // config.state_bytes)
    workspace = budget.workspace + slot_states + config.state_bytes * saved
    return replace(budget, workspace=workspace, saved_states=saved)


def _with_draft(budget: GpuBudget) -> GpuBudget:
    """Add a draft model, an EAGLE-3 head or an assistant, if the user named one."""
    load = budget.load
    draft = load.draft
    if draft is None:
        return budget
    slots = load.options.max_slots
    weights = weights_bytes(draft.config, draft.headers)
    if draft.assistant is None:
        own_bytes = draft_bytes(draft.config, weights, load.context, slots)
    else:
        # An assistant has no KV cache.
        work = workspace_bytes(draft.config, slots, draft_plan.STEP_TOKENS)
        own_bytes = weights + table_bytes(slots, load.context) + work + draft_plan.GRAPH_BYTES
    if draft.reads_states:
        own_bytes += _last_states_bytes(load)
    note = f"The {draft.kind} {draft.name} takes {size(own_bytes)}."
    workspace = budget.workspace + own_bytes
    return replace(budget, workspace=workspace, draft_bytes=own_bytes, notes=(*budget.notes, note))


def _last_states_bytes(load: _GpuLoad) -> int:
    """Return the bytes of the states that a head continues from."""
    states = (load.options.max_slots + 1) * STATE_WINDOW
    return states * load.config.hidden * load.config.float_bytes


def _with_head(budget: GpuBudget) -> GpuBudget:
    """Add what rounding at the load changes about the weights and the output head."""
    config = budget.load.config
    weights = budget.weights
    notes = budget.notes
    if config.quantization is not None and config.quantization.on_load:
        notes = (*notes, config.quantization.load_note)
    if config.head_format and config.tied:
        # The embedding is in memory, too.
        weights += packed_bytes(config.head_format, config.vocabulary, config.hidden)
    return replace(budget, weights=weights, notes=notes)


def _with_window_pool(budget: GpuBudget) -> GpuBudget:
    """Add the largest window pool that leaves room for the other layers."""

    def fits(pages: int) -> bool:
        return replace(budget, window_pages=pages).leaves_room_for_others()

    slots = budget.load.options.max_slots
    pages = window_plan.most_pages(budget.load.config, budget.step, slots, fits)
    return replace(budget, window_pages=pages)


def _with_prediction_head(budget: GpuBudget) -> GpuBudget:
    """Add the model's own prediction head, unless it would shorten the context."""
    load = budget.load
    config = load.config
    can_draft = load.options.speculation and budget.saved_states > 0 and load.draft is None
    # A head reads the whole embedding and output head, of which a GPU has a part.
    can_draft = can_draft and config.ranks == 1
    if not can_draft or not has_head(config, load.headers):
        return budget
    weights = head_bytes(config, load.headers)
    own_bytes = draft_bytes(head_config(config), weights, load.context, load.options.max_slots)
    own_bytes += _last_states_bytes(load)
    if budget.kv_bytes(load.context) > budget.kv_room() - own_bytes:
        note = f"Its prediction head is not loaded: with it, the context would be shorter ({size(own_bytes)})."
        return replace(budget, notes=(*budget.notes, note))
    return replace(
        budget,
        workspace=budget.workspace + own_bytes,
        draft_bytes=own_bytes,
        prediction_head=True,
        notes=(*budget.notes, f"Its prediction head drafts, and takes {size(own_bytes)}."),
    )


def _with_head_bounds(budget: GpuBudget) -> GpuBudget:
    """Add an int8 copy of the head if it shortens no context.

    It takes at most a quarter of the room for the KV cache.
    """
    load = budget.load
    if not can_bound_head(load.config):
        return budget
    copy_bytes = head_bounds_bytes(load.config)
    room = budget.kv_room()
    if copy_bytes > room // 4 or budget.kv_bytes(load.context) > room - copy_bytes:
        return budget
    return replace(budget, weights=budget.weights + copy_bytes, head_bounds=True)


def _memory_plan(budget: GpuBudget) -> MemoryPlan:
    """Choose the context, and divide the rest between KV cache, slots and weight copies."""
    load = budget.load
    trained = load.config.context_train
    context = load.context
    longest = budget.longest_context(max(trained, context))
    min_context = min(MIN_CONTEXT_TOKENS, trained)
    notes = budget.notes
    if load.options.context_tokens is None and min_context <= longest < trained:
        note = f"{tokens(longest)} of context fit; the model allows {tokens(trained)}."
        notes = (*notes, " ".join((note, *_fp8_advice(budget, longest, trained))))
        context = longest
    notes = (*notes, *_length_notes(load, context))
    budget = replace(budget, notes=notes)
    if longest < context:
        return _refused(budget, context, longest)
    return _accepted(budget, context, longest)


def _refused(budget: GpuBudget, context: int, longest: int) -> MemoryPlan:
    """Return the plan of a load that does not fit."""
    kv = budget.kv_bytes(context)
    unpacked = _unpacked_bytes(budget, context, kv)
    return replace(
        _result(budget, context, longest, kv, unpacked),
        missing=_exceeded_limit(budget, context, budget.fixed_bytes + kv + unpacked),
        advice=tuple(_advice(budget, context)),
    )


def _accepted(budget: GpuBudget, context: int, longest: int) -> MemoryPlan:
    """Return the plan of a load that fits."""
    kv = _kv_cache_bytes(budget, context)
    # The cache comes first: memory that it cannot use may hold the weights a second time.
    unpacked = _unpacked_bytes(budget, context, kv)
    left = budget.free - budget.fixed_bytes - kv - unpacked
    budget, kv, slots = _with_more_slots(budget, kv, context, left)
    host_cache, host_notes = _host_cache(budget, kv)
    budget = replace(budget, notes=(*budget.notes, *host_notes))
    plan = _result(budget, context, longest, kv, unpacked)
    return replace(plan, fits=True, slots=slots, cache_ram_bytes=host_cache)


def _result(budget: GpuBudget, context: int, longest: int, kv: int, unpacked: int) -> MemoryPlan:
    layers = budget.load.config.layers + 1
    return MemoryPlan(
        backend="cuda",
        weights_bytes=budget.weights + unpacked,
        kv_bytes=kv,
        compute_bytes=budget.workspace,
        overhead_bytes=budget.overhead,
        free_bytes=budget.free,
        fits=False,
        context_tokens=context,
        max_context_tokens=longest,
        kv_type=budget.kv_type,
        flash_attention=True,
        gpu_layers=layers,
        cache_ram_bytes=0,
        max_step_tokens=budget.step,
        notes=budget.notes,
        layers=layers,
        gpu_bytes=budget.fixed_bytes + kv + unpacked,
        gpu_free_bytes=budget.free,
        kv_types=kv_types(budget.load.config),
        reserve_bytes=budget.reserve,
        unpacked_bytes=unpacked,
        head_bounds=budget.head_bounds,
        draft_bytes=budget.draft_bytes,
        prediction_head=budget.prediction_head,
        saved_states=budget.saved_states,
        kv_tokens=_kv_tokens(budget, kv, context),
        window_pages=budget.window_pages,
    )


def _kv_cache_bytes(budget: GpuBudget, context: int) -> int:
    """Return the size of the cache: enough for all slots, or all that is left; one sequence at least."""
    windows = budget.windows_bytes
    page = max(1, budget.page_bytes)
    sequence = budget.kv_bytes(context) - windows
    room = (budget.kv_room() - windows) // page * page
    return windows + max(min(sequence * budget.load.options.max_slots, room), sequence)


def _kv_tokens(budget: GpuBudget, kv: int, context: int) -> int:
    """Return the capacity of a cache of `kv` bytes in tokens."""
    if not budget.page_bytes:
        # Every layer has a window, so pages of the other pool are empty.
        return budget.load.options.max_slots * -(-context // PAGE_TOKENS) * PAGE_TOKENS
    return (kv - budget.windows_bytes) // budget.page_bytes * PAGE_TOKENS


def _unpacked_bytes(budget: GpuBudget, context: int, kv: int) -> int:
    """Return the bytes of unpacked copies of the weights. 0 unless every slot fits beside them."""
    if not budget.fits_every_slot(context):
        return 0
    hopper = budget.load.gpu.compute_capability[0] == _HOPPER
    unpacked = unpacked_bytes(budget.load.config, hopper=hopper)
    if budget.fixed_bytes + kv + unpacked <= budget.free:
        return unpacked
    return 0


def _with_more_slots(
    budget: GpuBudget, kv: int, context: int, left: int
) -> tuple[GpuBudget, int, int]:
    """Add slots for short sequences, if the options allow them. left: unused bytes.

    Returns also the bytes of the KV cache, and the number of slots, 0 without more than requested.
    """
    options = budget.load.options
    config = budget.load.config
    page = budget.page_bytes
    is_bound = config.recurrent is not None or budget.window_pages or budget.draft_bytes
    if not options.more_slots or not page or is_bound:
        return budget, kv, 0
    requested = options.max_slots
    for slots in _MORE_SLOTS:
        workspace = table_bytes(slots, context) - table_bytes(requested, context)
        workspace += workspace_bytes(config, slots, budget.step)
        workspace -= workspace_bytes(config, requested, budget.step)
        from_cache = -(-max(0, workspace - left) // page) * page
        enough = max(slots * _SHORT_TOKENS // PAGE_TOKENS * page, budget.kv_bytes(context))
        if slots > requested and kv - from_cache >= enough:
            budget = replace(budget, workspace=budget.workspace + workspace)
            return budget, kv - from_cache, slots
    return budget, kv, 0


def _host_cache(budget: GpuBudget, kv: int) -> tuple[int, tuple[str, ...]]:
    """Return the bytes of pinned RAM for idle KV, and notes.

    A hybrid model's would lack its states, and the window pool has no copy in RAM.
    """
    load = budget.load
    if load.config.recurrent is not None or budget.has_window_pool:
        return 0, ()
    requested = load.options.cache_ram_bytes
    if requested is None:
        return min(_HOST_BYTES, load.ram_bytes // _HOST_SHARE, _HOST_CACHES * kv), ()
    limit = load.ram_bytes // 2
    if requested <= limit:
        return requested, ()
    note = f"--cache-ram is {size(limit)} here: pinned RAM is at most half of what is free."
    return limit, (note,)


def _context_notes(config: ModelConfig) -> Iterator[str]:
    if config.context_capped:
        yield (
            f"The context ends at {tokens(config.context_train)}: beyond, this model scales its attention by "
            "the position, which is not done here."
        )


def _window_notes(budget: GpuBudget) -> Iterator[str]:
    """Explain what sliding windows save."""
    config = budget.load.config
    widths = [width for width in config.windows if width]
    if not widths:
        return
    layers = f"{len(widths)} of {config.layers} layers"
    if not budget.has_window_pool:
        yield f"{layers} see the last {tokens(max(widths))} only; the cache keeps all tokens for them, too."
        return
    yield (
        f"{layers} keep what their windows of {tokens(max(widths))} see; idle conversations are kept neither "
        "in RAM nor on the disk."
    )
    if budget.rows < budget.load.options.max_slots:
        yield f"{budget.rows} answers run at once; others wait, for want of memory for their windows."


def _length_notes(load: _GpuLoad, context: int) -> Iterator[str]:
    """Warn about a context beyond the original or trained length."""
    scaling = load.config.rotation.scaling
    if (
        isinstance(scaling, LongRopeScaling | DynamicNtkScaling)
        and context > scaling.original_context
    ):
        yield (
            f"Beyond {tokens(scaling.original_context)} positions are stretched, in short texts too: "
            f"--ctx {scaling.original_context} leaves them as most of the training had them."
        )
    trained = load.config.context_train
    if (load.options.context_tokens or 0) > trained:
        yield f"The model was trained for {tokens(trained)}; beyond, it may ramble."


def _fp8_advice(budget: GpuBudget, longest: int, limit: int) -> Iterator[str]:
    """Suggest an FP8 cache if it allows more than `longest`."""
    config = budget.load.config
    if budget.kv_type == FP8 or FP8 not in kv_types(config):
        return
    workspace = budget.workspace + dequant_bytes(config, budget.load.gpu)
    possible = replace(budget, kv_type=FP8, workspace=workspace).longest_context(limit)
    if possible > max(longest, MIN_CONTEXT_TOKENS):
        yield f"FP8 KV would give {tokens(possible)} (--kv-type {FP8})."


def _exceeded_limit(budget: GpuBudget, context: int, total: int) -> str:
    """Return the message if only --kv-gb forbids the load, else empty."""
    limit = budget.load.options.kv_limit_bytes
    if limit is None or total > budget.free or budget.kv_bytes(context) <= limit:
        return ""
    return (
        f"the KV cache of {tokens(context)} takes {size(budget.kv_bytes(context))}, and --kv-gb allows "
        f"{size(limit)}."
    )


def _limit_advice(budget: GpuBudget, context: int) -> Iterator[str]:
    """Suggest raising limits that the user set."""
    options = budget.load.options
    kv = budget.kv_bytes(context)
    total = budget.fixed_bytes + kv
    device_free = max(budget.load.gpu.free_bytes - budget.reserve, 0)
    if options.kv_limit_bytes is not None and options.kv_limit_bytes < kv and total <= budget.free:
        yield f"--kv-gb {gigabytes_flag(kv)}: what {tokens(context)} take."
    if options.gpu_limit_bytes is not None and options.gpu_limit_bytes < total <= device_free:
        yield f"--vram-gb {gigabytes_flag(total)}: what it takes with {tokens(context)}."


def _advice(budget: GpuBudget, context: int) -> Iterator[str]:
    """Yield what would help besides the steps of every load (fit/steps.py)."""
    yield from _limit_advice(budget, context)
    if budget.draft_bytes and not budget.prediction_head:
        yield f"Leave out --draft: the draft model takes {size(budget.draft_bytes)}."
    others_bytes = budget.load.gpu.others_bytes
    if others_bytes > 1_000_000_000:
        yield f"Other programs hold {size(others_bytes)} of this GPU: close them."
    yield "A GGUF of this model: llama.cpp can leave some layers in RAM."
