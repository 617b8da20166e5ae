"""Plans the GPU memory of a load: weights, KV pages, workspace, driver overhead. Imports no torch.

Free memory is read at planning time; limits are absolute (`StepLimits`). If the trained context does not fit
and the user asked for none, the plan has a shorter one and a note.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    dummy_bytes,
    head_bounds_bytes,
    head_int8_bytes,
    unpacked_bytes,
    weights_bytes,
)

STEP_TOKENS = 2048
"""Most tokens of a step, 50 ms for a 7B model on an H200."""
_LARGE_STEPS = ((60_000_000_000, 8192), (30_000_000_000, 4096))
"""(least bytes that may be used, tokens of a step). 4,096 take 1.4 GB for activations, 8,192 twice that; each
doubling dequantizes half as often."""
OVERHEAD_BYTES = 800_000_000
"""The driver's context, the libraries' handles and workspaces, compiled kernels."""
_LEAST_GRAPH_BYTES = 150_000_000
_GRAPH_SHARE = 50
LOGIT_ROWS = 64
"""Rows of logits at once, and positions of one sample batch; more slots raise it."""
LARGEST_DECODE = 256
LARGEST_CAPTURED = 4096
"""Rows of the largest step that only decodes or verifies, and of the largest that is captured."""
HEAD_BOUNDS = True
"""Whether a load may keep an int8 copy of its head that finds the tokens to compute exactly."""
HEAD_COLUMNS = 128
"""The gemm of an 8-bit head takes columns in runs of these."""
_DEQUANT_PAGES = 512
_DEQUANT_BYTES = 1 << 27
"""Most pages and bytes of an FP8 cache that a step dequantizes: 32,768 tokens, fewer with many key heads."""
_HOPPER_BYTES = 40_000_000_000
"""No Hopper GPU has less memory."""
_SAVED_STATES = 64
_SAVED_SHARE = 4
"""Most states that are saved for prefixes, and the part of the KV cache's memory that they take at most."""
_WORTH = 1.5
"""Windowed layers have pages of their own where the room for conversations, or the context, grows so much."""
_ENOUGH_TOKENS = 4096
"""For each of the answers that may run at once: with so much room, idle conversations are worth more."""
_MORE_SLOTS = (128, 64, 32)
_SHORT_TOKENS = 1024
"""Sequences at once where the cache has room for as many of so many tokens. Those that grow longer preempt."""
STATE_WINDOW = 1024
"""Last states of a sequence that are kept for prediction heads."""
_HALF = 2
_FLOAT = 4
_TABLE = 4
_LARGEST_SLOTS = 256
_HOST_BYTES = 4_000_000_000
_HOST_SHARE = 4
_HOST_CACHES = 4
"""Pinned RAM for KV that nobody uses, by default: so much, a quarter of the free RAM, and four times the KV
cache at most."""
_KV_TYPES: dict[FloatType, str] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Absolute limits that the user set, in bytes; None: no limit."""

    gpu_bytes: int | None = None
    """Everything on the GPU."""
    kv_bytes: int | None = None
    """The KV cache alone."""


def plan(
    config: ModelConfig,
    headers: Iterable[SafetensorsHeader],
    options: LoadOptions,
    gpu: Gpu,
    limits: StepLimits | None = None,
    ram_bytes: int = 0,
    draft: DraftShape | None = None,
) -> MemoryPlan:
    """Plan a load to one GPU. Never raises for memory: `fit.memory_plan.demand` makes the error of a plan that
    does not fit. Raises UsageError for a KV type that the engine lacks, and for impossible numbers.
    `ram_bytes`: free RAM, of which pinned memory for idle KV takes a part. `draft`: the draft model."""
    headers = tuple(headers)
    limits = limits or StepLimits()
    # A capped context has an error of its own.
    trained = 0 if config.context_capped else config.context_train
    check_context("The model", options.context_tokens, trained, anyway=options.anyway)

    def planned(*, apart: bool) -> MemoryPlan:
        planner = _LoadPlanner(config, headers, options, gpu, limits, ram_bytes, draft, apart=apart)
        return planner.plan()

    together = planned(apart=False)
    if not window_plan.window_of(config) or config.delta_net is not None:
        return together
    apart = planned(apart=True)
    if _saves(apart, together, options.max_slots):
        return apart
    return together


def _saves(apart: MemoryPlan, together: MemoryPlan, slots: int) -> bool:
    """True if pages of their own for windowed layers allow much more. That costs the KV in RAM and on the disk,
    so it is not done where there is room enough anyway."""
    if not (apart.fits and together.fits):
        return apart.fits or (not together.fits and apart.total_bytes < together.total_bytes)
    if apart.context_tokens >= _WORTH * together.context_tokens:
        return True
    more = apart.kv_tokens >= _WORTH * together.kv_tokens
    short = together.kv_tokens < slots * min(together.context_tokens, _ENOUGH_TOKENS)
    return more and short and apart.context_tokens >= together.context_tokens


def kv_types(config: ModelConfig) -> tuple[str, ...]:
    """Possible KV types, best first: the type of the activations, then FP8, which no kernel has for latents."""
    own = _KV_TYPES[config.dtype]
    return (own, FP8) if config.latent is None else (own,)


def kv_token_bytes(
    config: ModelConfig, kv_type: str | None = None, windowed: bool | None = None
) -> int:
    """Bytes of keys and values of one token in all layers, or in those with (True) or without (False) a window.

    `kv_type` None: in the model's own type.
    """
    both = 2 if config.latent is None else 1
    layers = [n for n in config.kv_layers if windowed in (None, config.window(n) > 0)]
    shapes = [(both * config.key_heads_of(n), config.head_dim_of(n)) for n in layers]
    if kv_type == FP8:
        return sum(heads * (d + 1) for heads, d in shapes)
    return sum(map(prod, shapes)) * (_FLOAT if config.dtype == "float32" else _HALF)


def step_tokens(free_bytes: int) -> int:
    """Most tokens of a step if so many bytes of the GPU may be used."""
    return next((most for least, most in _LARGE_STEPS if free_bytes >= least), STEP_TOKENS)


def logit_rows(slots: int) -> int:
    """Rows of logits at once, and positions of one sample batch."""
    return max(LOGIT_ROWS, min(LARGEST_DECODE, slots))


def graph_bytes(gpu: Gpu, limits: StepLimits) -> int:
    """Most memory of captured graphs: a 50th of the GPU, little where the user limits what may be used. vLLM
    counts 24 MB a graph."""
    if limits.gpu_bytes is not None:
        return _LEAST_GRAPH_BYTES
    return max(_LEAST_GRAPH_BYTES, gpu.total_bytes // _GRAPH_SHARE)


def workspace_bytes(config: ModelConfig, slots: int, step: int = STEP_TOKENS) -> int:
    """Bytes of the largest tensors of a step besides weights and cache.

    Activations of `step` tokens; logits of one sample batch, the graphs' buffer for them, and the sampler's two
    copies; the graphs' buffer for last states; the dequantized weight that the library multiplies. Of experts
    the inner features and the results of every choice, and the rows in 16 bits twice. Of delta nets what the
    delta rule reads and makes, and the keys and values of its chunks. Of latent attention the queries in
    all their forms, and each head's mix of latents and its values."""
    dense = (n for n in range(config.layers) if config.gemma or not config.has_experts(n))
    feed = 2 * max(map(config.intermediate_of, dense), default=0)
    net = config.delta_net
    width = max(config.qkv_columns, feed, config.hidden, 0 if net is None else net.columns)
    rows = 3
    if config.gemma is not None:
        width = max(width, config.layers * config.gemma.input_columns)
        # Streams of the residual, and the projections that they begin with.
        rows += 2 * config.gemma.altup.streams if config.gemma.altup else 0
    latent = config.latent
    if latent is not None:
        width = max(width, latent.queries(config.heads))
    activations = step * (2 * width + rows * config.hidden) * _FLOAT
    if config.mixture is not None:
        chosen = config.mixture.taken * (config.intermediate * _HALF + config.hidden * _FLOAT)
        activations += step * (chosen + 2 * config.hidden * _HALF)
    if latent is not None:
        each = latent.plain + latent.row + latent.kv_rank + latent.value
        activations += step * config.heads * each * _HALF
    if net is not None:
        chunks = net.value_heads * net.key_dim + net.values
        activations += step * (net.channels + chunks + 2 * net.values) * _HALF
    logits = 4 * logit_rows(slots) * config.vocabulary * _FLOAT
    states = min(step, LARGEST_CAPTURED) * config.hidden * _HALF
    dequantized = (feed or width) * config.hidden * _HALF if config.quantization else 0
    return activations + logits + states + dequantized


def can_bound_head(config: ModelConfig) -> bool:
    """Whether the output head can have an int8 copy that says which tokens can win."""
    plain = config.dtype != "float32" and not config.head_format and not config.head_cap
    return HEAD_BOUNDS and plain and config.hidden % HEAD_COLUMNS == 0


def table_bytes(slots: int, context: int) -> int:
    """Bytes of the token table and the block tables."""
    return (slots + 1) * (context + context // PAGE_TOKENS) * _TABLE


def dequant_pages(key_heads: int, head_dim: int) -> int:
    """Most FP8 pages that a step dequantizes, into memory that all layers share."""
    return min(_DEQUANT_PAGES, _DEQUANT_BYTES // (2 * key_heads * PAGE_TOKENS * head_dim * _HALF))


def dequant_bytes(config: ModelConfig, gpu: Gpu) -> int:
    """Bytes of that memory, on GPUs that may have the kernel which needs it."""
    if gpu.total_bytes < _HOPPER_BYTES:
        return 0
    page = 2 * config.key_heads * PAGE_TOKENS * config.head_dim * _HALF
    return dequant_pages(config.key_heads, config.head_dim) * page


def rotation_bytes(config: ModelConfig, context: int) -> int:
    """Bytes of the tables of cosines and sines: one for each rotation and head dimension."""
    tables = {(config.rotation_of(n), config.table_dim_of(n)) for n in range(config.layers)}
    return sum(d for _, d in tables) * context * _FLOAT


def draft_bytes(config: ModelConfig, weights: int, context: int, slots: int) -> int:
    """Bytes of a draft model, or of a head as a model, with so many bytes of weights of its own.

    `context`, `slots`: of the model that it drafts for."""
    text = draft_plan.text_tokens(config, context)
    cache = (draft_plan.pool_tokens(config, context) + PAGE_TOKENS) * kv_token_bytes(config)
    tables = rotation_bytes(config, text) + table_bytes(slots, text)
    work = workspace_bytes(config, slots, draft_plan.STEP_TOKENS)
    return weights + cache + tables + work + draft_plan.GRAPH_BYTES


class _LoadPlanner:
    def __init__(
        self,
        config: ModelConfig,
        headers: tuple[SafetensorsHeader, ...],
        options: LoadOptions,
        gpu: Gpu,
        limits: StepLimits,
        ram_bytes: int,
        draft: DraftShape | None,
        *,
        apart: bool,
    ) -> None:
        """`apart`: windowed layers have pages of their own."""
        self.config = config
        self.options = options
        self.limits = limits
        self.ram_bytes = ram_bytes
        self.kv_types = kv_types(config)
        self.kv_type = canonical_kv_type(options.kv_type) or self.kv_types[0]
        self._check()
        self.weights = weights_bytes(config, headers) if headers else dummy_bytes(config)
        self.reserve = 0 if options.anyway else gpu_reserve_bytes(gpu.total_bytes)
        self.device_free = max(gpu.free_bytes - self.reserve, 0)
        self.free = self.device_free
        if limits.gpu_bytes is not None:
            self.free = min(self.free, limits.gpu_bytes)
        self.step = step_tokens(self.free)
        self.apart = apart
        self.window_pages = 0
        if apart:
            room = self.free - self.weights
            page = self._window_page_bytes()
            self.step = window_plan.step_tokens(self.step, room, page)
        self.workspace = workspace_bytes(config, options.max_slots, self.step)
        context = options.context_tokens or config.context_train
        self.workspace += rotation_bytes(config, context) + table_bytes(options.max_slots, context)
        if apart:
            self.workspace += (options.max_slots + 1) * (context // PAGE_TOKENS) * _TABLE
        self.overhead = OVERHEAD_BYTES + graph_bytes(gpu, limits)
        if self.kv_type == FP8:
            self.workspace += dequant_bytes(config, gpu)
        self.saved_states = 0
        if config.delta_net is not None:
            self.workspace += config.state_bytes * (options.max_slots + 1)
            room = max(0, self.free - self.weights - self.workspace - self.overhead)
            self.saved_states = min(_SAVED_STATES, room // _SAVED_SHARE // config.state_bytes)
            self.workspace += config.state_bytes * self.saved_states
        self.gpu = gpu
        self.notes = [*_context_notes(config)]
        self.draft_bytes = 0
        self.prediction_head = False
        if draft is not None:
            self._add_draft(draft, context)
        if config.quantization is not None and config.quantization.on_load:
            self.notes.append(config.quantization.load_note)
        if config.head_format and config.tied:  # the embedding is in memory, too
            self.weights += packed_bytes(config.head_format, config.vocabulary, config.hidden)
        if options.head_int8 and not config.head_format:
            self.weights += head_int8_bytes(config)
            self.notes.append("The output head is rounded to 8 bits.")
        if apart:
            self.window_pages = window_plan.most_pages(
                config, self.step, options.max_slots, self._windows_fit
            )
        self.notes = [*self._window_notes(), *self.notes]
        drafts = options.speculation and self.saved_states > 0
        if draft is None and drafts and has_head(config, headers):
            self._add_prediction_head(head_bytes(config, headers))
        self.head_bounds = self._takes_head_bounds()
        if self.head_bounds:
            self.weights += head_bounds_bytes(config)

    def _add_draft(self, draft: DraftShape, context: int) -> None:
        """Take a draft model, or an EAGLE-3 head."""
        own = weights_bytes(draft.config, draft.headers)
        self.draft_bytes = draft_bytes(draft.config, own, context, self.options.max_slots)
        if draft.eagle is not None:
            self.draft_bytes += self._last_states_bytes()
        self.workspace += self.draft_bytes
        kind = "draft model" if draft.eagle is None else "EAGLE-3 head"
        self.notes.append(f"The {kind} {draft.name} takes {size(self.draft_bytes)}.")

    def _last_states_bytes(self) -> int:
        """Bytes of the states that a head goes on from."""
        number = _FLOAT if self.config.dtype == "float32" else _HALF
        return (self.options.max_slots + 1) * STATE_WINDOW * self.config.hidden * number

    def _add_prediction_head(self, weights: int) -> None:
        """Take the model's own head, if it shortens no context."""
        config = self.config
        slots = self.options.max_slots
        context = self.options.context_tokens or config.context_train
        own = draft_bytes(head_config(config), weights, context, slots) + self._last_states_bytes()
        if self.kv(context) > self.kv_available() - own:
            self.notes.append(
                f"Its prediction head is not loaded: with it, the context would be shorter ({size(own)})."
            )
            return
        self.draft_bytes = own
        self.prediction_head = True
        self.workspace += own
        self.notes.append(f"Its prediction head drafts, and takes {size(own)}.")

    def _takes_head_bounds(self) -> bool:
        """Whether the head can have an int8 copy, and there is room: it shortens no context, and takes at
        most a quarter of the memory for the KV cache."""
        config = self.config
        options = self.options
        if options.head_int8 or not can_bound_head(config):
            return False
        more = head_bounds_bytes(config)
        room = self.kv_available()
        context = options.context_tokens or config.context_train
        return more <= room // 4 and self.kv(context) <= room - more

    def _check(self) -> None:
        options = self.options
        if options.context_tokens is not None and options.context_tokens < 1:
            raise UsageError(f"A context of {options.context_tokens} tokens is not possible.")
        bound = self.config.context_train
        if self.config.context_capped and (options.context_tokens or 0) > bound:
            raise UsageError(
                f"A context of {options.context_tokens:,} tokens is not possible: from {bound:,} on this model "
                "scales its attention by the position, which is not done here.",
                hint=f"Ask for --ctx {bound} at most, or take a GGUF of the model for llama.cpp.",
            )
        if not 1 <= options.max_slots <= _LARGEST_SLOTS:
            raise UsageError(
                f"{options.max_slots} sequences at once: 1 to {_LARGEST_SLOTS} are possible."
            )
        if options.experts_on_cpu not in ("auto", 0):
            raise UsageError(
                "The CUDA backend keeps all weights on the GPU: no experts can stay in RAM.",
                hint="Leave out --experts-on-cpu, or take a GGUF of the model for llama.cpp.",
            )
        if options.head_int8 and self.config.hidden % HEAD_COLUMNS:
            raise UsageError(
                f"The head of this model, with {self.config.hidden} columns, cannot be rounded to 8 bits.",
                hint=f"Leave out --head-int8: it takes columns in {HEAD_COLUMNS}s.",
            )
        if self.kv_type not in self.kv_types:
            raise UsageError(
                f"The KV cache of this model cannot be {options.kv_type} here.",
                hint=f"Possible on the CUDA backend: {', '.join(self.kv_types)} "
                f"({'half the memory' if FP8 in self.kv_types else 'one latent for all heads'}). "
                "llama.cpp has others, for GGUF files.",
            )

    def kv(self, context: int, kv_type: str = "") -> int:
        """Bytes of the pages of one sequence of `context` tokens, with all pages that windows have apart."""
        pages = -(-context // PAGE_TOKENS)
        return pages * self._page_bytes(kv_type) + self._windows_bytes(kv_type)

    def _page_bytes(self, kv_type: str = "") -> int:
        """Bytes of a page in all layers, or in those without a window."""
        windowed = False if self.apart else None
        return PAGE_TOKENS * kv_token_bytes(self.config, kv_type or self.kv_type, windowed)

    def _window_page_bytes(self, kv_type: str = "") -> int:
        return PAGE_TOKENS * kv_token_bytes(self.config, kv_type or self.kv_type, windowed=True)

    def _windows_bytes(self, kv_type: str = "") -> int:
        """Bytes of the pages that windowed layers have apart."""
        return self.window_pages * self._window_page_bytes(kv_type)

    def _windows_fit(self, pages: int) -> bool:
        """Whether so many window pages leave half of the memory to other layers, a quarter where only two
        sequences have windows, and in any case the context that was asked for."""
        self.window_pages, room = pages, self.kv_available()
        if self.kv(self.options.context_tokens or 1) > room:
            return False
        left = room // (4 if self._rows() <= 2 else 2) if self._page_bytes() else 0
        return self._windows_bytes() <= room - left

    def kv_available(self, kv_type: str = "") -> int:
        """Bytes left for the KV cache."""
        left = self.free - self.weights - self.workspace - self.overhead
        if kv_type == FP8 != self.kv_type:
            left -= dequant_bytes(self.config, self.gpu)
        most = self.limits.kv_bytes
        return max(left if most is None else min(left, most), 0)

    def plan(self) -> MemoryPlan:
        """See the module's `plan`."""
        trained = self.config.context_train
        asked = self.options.context_tokens
        goal = asked or trained
        longest = self._longest(max(trained, goal))
        least = min(MIN_CONTEXT_TOKENS, trained)
        if asked is None and least <= longest < trained:
            self.notes.append(
                f"{tokens(longest)} of context fit; the model allows {tokens(trained)}."
                + "".join(f" {line}" for line in self._fp8_advice(longest, trained))
            )
            goal = longest
        fits = longest >= goal
        scaling = self.config.rotation.scaling
        if (
            isinstance(scaling, LongRopeScaling | DynamicNtkScaling)
            and goal > scaling.original_context
        ):
            self.notes.append(
                f"Beyond {tokens(scaling.original_context)} positions are stretched, in short texts too: "
                f"--ctx {scaling.original_context} leaves them as most of the training had them."
            )
        if asked is not None and asked > trained:
            self.notes.append(
                f"The model was trained for {tokens(trained)}; beyond, it may ramble."
            )
        advice = () if fits else tuple(self._advice(goal, longest, least))
        return self._result(goal, longest, fits=fits, advice=advice)

    def _longest(self, most: int, kv_type: str = "") -> int:
        return largest(lambda count: self.kv(count, kv_type) <= self.kv_available(kv_type), most)

    def _fp8_advice(self, longest: int, most: int) -> Iterator[str]:
        """Suggest an FP8 cache if it allows more than `longest`."""
        if self.kv_type == FP8 or FP8 not in self.kv_types:
            return
        possible = self._longest(most, FP8)
        if possible > max(longest, MIN_CONTEXT_TOKENS):
            yield f"FP8 KV would give {tokens(possible)} (--kv-type {FP8})."

    def _all_slots_fit(self, context: int) -> bool:
        """True if every slot can hold the whole context."""
        slots = self.options.max_slots
        more = self.kv(context) - self._windows_bytes()
        return self._rows() == slots and more * slots <= self.kv_available() - self._windows_bytes()

    def _rows(self) -> int:
        """Sequences that run at once."""
        slots = self.options.max_slots
        return window_plan.rows(self.config, self.window_pages, self.step, slots)

    def _kv_budget(self, context: int) -> int:
        """Bytes for the KV cache: enough for all slots, or all that is left; one sequence at least."""
        windows = self._windows_bytes()
        page = max(1, self._page_bytes())
        useful = (self.kv(context) - windows) * self.options.max_slots
        room = (self.kv_available() - windows) // page * page
        return windows + max(min(useful, room), self.kv(context) - windows)

    def _result(
        self, context: int, longest: int, *, fits: bool, advice: tuple[str, ...]
    ) -> MemoryPlan:
        kv = self._kv_budget(context) if fits else self.kv(context)
        total = self.weights + kv + self.workspace + self.overhead
        # The cache comes first: what it cannot use may hold the weights a second time.
        unpacked = unpacked_bytes(self.config) if self._all_slots_fit(context) else 0
        unpacked = unpacked if total + unpacked <= self.free else 0
        total += unpacked
        found = self._more_slots(kv, context, self.free - total) if fits else (0, 0, 0)
        slots, more, of_cache = found
        kv = kv - of_cache
        total = total + more - of_cache
        return MemoryPlan(
            backend="cuda",
            weights_bytes=self.weights + unpacked,
            kv_bytes=kv,
            compute_bytes=self.workspace + more,
            overhead_bytes=self.overhead,
            free_bytes=self.free,
            fits=fits,
            context_tokens=context,
            max_context_tokens=longest,
            kv_type=self.kv_type,
            flash_attention=True,
            gpu_layers=self.config.layers + 1,
            cache_ram_bytes=self._host_bytes(kv) if fits else 0,
            max_step_tokens=self.step,
            advice=advice,
            notes=tuple(self.notes),
            layers=self.config.layers + 1,
            gpu_bytes=total,
            gpu_free_bytes=self.free,
            missing="" if fits else self._limit_exceeded(context, total),
            kv_types=self.kv_types,
            reserve_bytes=self.reserve,
            unpacked_bytes=unpacked,
            head_bounds=self.head_bounds,
            draft_bytes=self.draft_bytes,
            prediction_head=self.prediction_head,
            saved_states=self.saved_states,
            kv_tokens=self._kv_tokens(kv, context),
            window_pages=self.window_pages,
            slots=slots,
        )

    def _more_slots(self, kv: int, context: int, left: int) -> tuple[int, int, int]:
        """Sequences at once where these are more than were asked for, else 0; bytes of work that they take;
        and those that the cache gives up for them, where less is `left`."""
        asked = self.options.max_slots
        page = self._page_bytes()
        own = self.config.delta_net is not None or self.window_pages or self.draft_bytes
        for slots in _MORE_SLOTS if self.options.more_slots and page and not own else ():
            more = table_bytes(slots, context) - table_bytes(asked, context)
            more += workspace_bytes(self.config, slots, self.step)
            more -= workspace_bytes(self.config, asked, self.step)
            of_cache = -(-max(0, more - left) // page) * page
            enough = max(slots * _SHORT_TOKENS // PAGE_TOKENS * page, self.kv(context))
            if slots > asked and kv - of_cache >= enough:
                return slots, more, of_cache
        return 0, 0, 0

    def _kv_tokens(self, kv: int, context: int) -> int:
        """Tokens of all sequences in so many bytes of pages. Where all layers have windows, pages of the
        others have no bytes."""
        page = self._page_bytes()
        if not page:
            return self.options.max_slots * -(-context // PAGE_TOKENS) * PAGE_TOKENS
        return (kv - self._windows_bytes()) // page * PAGE_TOKENS

    def _window_notes(self) -> Iterator[str]:
        """Say what windows save."""
        widths = [width for width in self.config.windows if width]
        if not widths:
            return
        some = f"{len(widths)} of {self.config.layers} layers"
        if not self.apart:
            yield f"{some} see the last {tokens(max(widths))} only; the cache keeps all tokens for them, too."
            return
        yield (
            f"{some} keep what their windows of {tokens(max(widths))} see; idle conversations are kept neither "
            "in RAM nor on the disk."
        )
        if self._rows() < self.options.max_slots:
            yield f"{self._rows()} answers run at once; others wait, for want of memory for their windows."

    def _host_bytes(self, kv: int) -> int:
        """Pinned RAM for KV that nobody uses: as requested, but for RAM that is not free. A hybrid's would
        lack its states, and windows that are apart have no place in it."""
        if self.config.delta_net is not None or self.apart:
            return 0
        asked = self.options.cache_ram_bytes
        if asked is None:
            return min(_HOST_BYTES, self.ram_bytes // _HOST_SHARE, _HOST_CACHES * kv)
        if asked > self.ram_bytes // 2:
            self.notes.append(
                f"--cache-ram is {size(self.ram_bytes // 2)} here: pinned RAM is at most half of what is free."
            )
        return min(asked, self.ram_bytes // 2)

    def _limit_exceeded(self, context: int, total: int) -> str:
        """The message if only the user's limit on the KV cache forbids the load, else empty."""
        most = self.limits.kv_bytes
        if most is None or total > self.free or self.kv(context) <= most:
            return ""
        return (
            f"the KV cache of {tokens(context)} takes {size(self.kv(context))}, and --kv-gb allows "
            f"{size(most)}."
        )

    def _limit_advice(self, goal: int) -> Iterator[str]:
        """Suggest to raise limits that the user set."""
        kv = self.kv(goal)
        most = self.limits
        total = self.weights + kv + self.workspace + self.overhead
        if most.kv_bytes is not None and most.kv_bytes < kv and total <= self.free:
            yield f"--kv-gb {gigabytes_flag(kv)}: what {tokens(goal)} take."
        if most.gpu_bytes is not None and most.gpu_bytes < total <= self.device_free:
            yield f"--vram-gb {gigabytes_flag(total)}: what it takes with {tokens(goal)}."

    def _advice(self, goal: int, longest: int, least: int) -> Iterator[str]:
        yield from self._limit_advice(goal)
        if self.draft_bytes and not self.prediction_head:
            yield f"Leave out --draft: the draft model takes {size(self.draft_bytes)}."
        yield from self._fp8_advice(longest, max(goal, self.config.context_train))
        if least <= longest < goal:
            yield f"--ctx {longest}: {size(self.kv(longest))} of cache."
        if self.gpu.others_bytes > 1_000_000_000:
            yield f"Other programs hold {size(self.gpu.others_bytes)} of this GPU: close them."
        if self.config.quantization is None:
            quarter = self.weights // 4 + self.workspace + self.overhead + self.kv(least)
            if quarter <= self.free:
                yield "An AWQ or GPTQ quantization of this model takes a third."
        yield "A GGUF of this model: llama.cpp can leave some layers in RAM."


def _context_notes(config: ModelConfig) -> Iterator[str]:
    if config.context_capped:
        yield (
            f"The context ends at {tokens(config.context_train)}: beyond, this model scales its attention by "
            "the position, which is not done here."
        )
