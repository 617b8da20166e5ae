"""Plans the GPU memory of a load: weights, KV pages, workspace, driver overhead. Imports no torch.

Free memory is read at planning time; limits are absolute (`StepLimits`). If the trained context does not fit
and the user asked for none, the plan has a shorter one and a note.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from localchat.errors import UsageError
from localchat.fit.hardware import Gpu
from localchat.fit.kv_types import FP8, canonical_kv_type
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    LEAST_CONTEXT_TOKENS,
    MemoryPlan,
    gpu_reserve_bytes,
    largest,
)
from localchat.model_files.safetensors import SafetensorsHeader
from localchat.units import gigabytes_flag, size, tokens
from localchat_cuda.delta_net_config import TAPS
from localchat_cuda.ggml_forms import packed_bytes
from localchat_cuda.model_config import FloatType, ModelConfig
from localchat_cuda.quantization_config import floating_bytes, padded
from localchat_cuda.rope_config import DynamicNtkScaling, LongRopeScaling
from localchat_cuda.weights.tensor_names import canonical_name, is_text

PAGE_TOKENS = 64
STEP_TOKENS = 2048
"""Most tokens of a step, 50 ms for a 7B model on an H200."""
_LARGE_STEPS = ((60_000_000_000, 8192), (30_000_000_000, 4096))
"""(least bytes that may be used, tokens of a step). 4,096 take 1.4 GB for activations, 8,192 twice that; each
doubling dequantizes half as often."""
OVERHEAD_BYTES = 800_000_000
"""The driver's context, the libraries' handles and workspaces, compiled kernels."""
_LEAST_GRAPH_BYTES, _GRAPH_SHARE = 150_000_000, 50
LOGIT_ROWS = 64
"""Rows of logits at once, and positions of one sample batch; more slots raise it."""
LARGEST_DECODE, LARGEST_CAPTURED = 256, 4096
"""Rows of the largest step that only decodes or verifies, and of the largest that is captured."""
HEAD_BOUNDS = True
"""Whether a load may keep an int8 copy of its head that finds the tokens to compute exactly."""
HEAD_COLUMNS = 128
"""The gemm of an 8-bit head takes columns in runs of these."""
_DEQUANT_PAGES, _DEQUANT_BYTES = 512, 1 << 27
"""Most pages and bytes of an FP8 cache that a step dequantizes: 32,768 tokens, fewer with many key heads."""
_HOPPER_BYTES = 40_000_000_000
"""No Hopper GPU has less memory."""
_SAVED_STATES, _SAVED_SHARE = 64, 4
"""Most states that are saved for prefixes, and the part of the KV cache's memory that they take at most."""
_HALF, _FLOAT, _TABLE, _LARGEST_SLOTS = 2, 4, 4, 256
_HOST_BYTES, _HOST_SHARE, _HOST_CACHES = 4_000_000_000, 4, 4
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
) -> MemoryPlan:
    """Plan a load to one GPU. Never raises for memory: `fit.memory_plan.demand` makes the error of a plan that
    does not fit. Raises UsageError for a KV type that the engine lacks, and for impossible numbers.
    `ram_bytes`: free RAM, of which pinned memory for idle KV takes a part."""
    limits = limits or StepLimits()
    return _LoadPlanner(config, tuple(headers), options, gpu, limits, ram_bytes).plan()


def kv_types(config: ModelConfig) -> tuple[str, ...]:
    """Possible KV types, best first: the type of the activations, then FP8."""
    return _KV_TYPES[config.dtype], FP8


def kv_token_bytes(config: ModelConfig, kv_type: str | None = None) -> int:
    """Bytes of keys and values of one token in all layers; None: in the model's own type."""
    heads = 2 * config.attention_layers * config.key_heads
    if kv_type == FP8:
        return heads * (config.head_dim + 1)
    return heads * config.head_dim * (_FLOAT if config.dtype == "float32" else _HALF)


def weights_bytes(config: ModelConfig, headers: Iterable[SafetensorsHeader]) -> int:
    """Bytes of the text part's tensors once loaded, floating ones in the config's type."""
    float_bytes = _FLOAT if config.dtype == "float32" else _HALF
    bytes_of = config.quantization.loaded_bytes if config.quantization else floating_bytes
    return sum(
        bytes_of(tensor, float_bytes)
        for header in headers
        for tensor in header.tensors
        if is_text(tensor.name)
        and not (config.tied and canonical_name(tensor.name) == "lm_head.weight")
    )


def parameters(config: ModelConfig) -> int:
    """Number of weights, as model sizes are counted."""
    width, d = config.hidden, config.head_dim
    norms = 4 if config.post_normed and not config.normed_projections else 2
    layer = width * norms
    if config.mixture is not None:
        layer += width * (config.mixture.experts + config.mixture.gated)
        layer += _expert_biases(config)
    layer += width if config.output_bias else 0
    attention = config.qkv_columns if config.qkv_bias else 0
    attention += config.heads if config.sinks else 0
    attention += 2 * d if config.normed_heads else 0
    attention += (config.heads + config.key_heads) * d if config.normed_projections else 0
    others = config.layers * layer + config.attention_layers * attention
    if (net := config.delta_net) is not None:
        gates = 2 * net.value_heads * (width + 1)
        others += net.count * (gates + net.channels * TAPS + net.value_dim)
    ends = config.vocabulary * width * (1 if config.tied else 2) + width
    return sum(map(prod, _all_linear_shapes(config))) + others + ends


def _expert_biases(config: ModelConfig) -> int:
    """Numbers in the biases of a layer's router and experts."""
    if config.mixture is None or not config.mixture.biased:
        return 0
    return config.mixture.experts * (1 + 2 * config.intermediate + config.hidden)


def _expert_bytes(config: ModelConfig) -> int:
    """Bytes of the linear layers of a layer's experts."""
    shapes, quantization = _expert_shapes(config), config.quantization
    if quantization is None or config.mixture is None:
        return sum(n * k for n, k in shapes) * (_FLOAT if config.dtype == "float32" else _HALF)
    if quantization.of_experts:
        rows = 2 * config.mixture.stored * padded(config.intermediate)
        shapes = ((rows, shapes[0][1]), *shapes[1:])
    return sum(quantization.linear_bytes(n, k) for n, k in shapes)


def _expert_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs of the linear layers of a layer's experts, all joined."""
    if config.mixture is None:
        return ()
    stored, width, inner = config.mixture.stored, config.hidden, config.intermediate
    return (stored * 2 * inner, width), (stored * width, inner)


def _all_linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs of the linear layers of all layers, but for the gates of delta nets."""
    width, heads, inner = config.hidden, config.heads * config.head_dim, config.intermediate
    feed = _expert_shapes(config) or ((2 * inner, width), (width, inner))
    attention = (config.qkv_columns, width), (width, heads), *feed
    net = config.delta_net
    if net is None:
        return attention * config.layers
    return attention * config.attention_layers + (
        (net.columns, width), (width, net.values), *feed,
    ) * net.count  # fmt: skip


def token_bytes(config: ModelConfig, weights: int) -> int:
    """Bytes that one token reads of so many bytes of weights: not those of experts that it does not choose."""
    if config.mixture is None:
        return weights
    share = config.layers * _expert_bytes(config) / dummy_bytes(config)
    return round(weights * (1 - share * (1 - config.mixture.taken / config.mixture.stored)))


def dummy_bytes(config: ModelConfig) -> int:
    """Bytes of random weights of this shape."""
    float_bytes = _FLOAT if config.dtype == "float32" else _HALF
    if config.quantization is None:
        return parameters(config) * float_bytes
    if config.quantization.of_experts:
        return _float_and_expert_bytes(config, float_bytes)
    shapes = Counter(_all_linear_shapes(config))
    linear = sum(
        count * config.quantization.linear_bytes(*shape) for shape, count in shapes.items()
    )
    plain = parameters(config) - sum(count * prod(shape) for shape, count in shapes.items())
    return linear + plain * float_bytes


def _float_and_expert_bytes(config: ModelConfig, float_bytes: int) -> int:
    """Bytes of a model of whose layers the experts alone are quantized."""
    assert config.mixture is not None
    experts = config.layers * sum(map(prod, _expert_shapes(config)))
    padding = config.mixture.experts * 2 * (padded(config.intermediate) - config.intermediate)
    plain = parameters(config) - experts + config.layers * padding  # in biases
    return config.layers * _expert_bytes(config) + plain * float_bytes


def unpacked_bytes(config: ModelConfig) -> int:
    """Bytes of unpacked copies of all packed linear layers outside experts; 0 for a model without."""
    quantization = config.quantization
    if quantization is None or not (quantization.packed or quantization.in_ggml_forms):
        return 0
    experts = config.layers * sum(map(prod, _expert_shapes(config)))
    return (sum(map(prod, _all_linear_shapes(config))) - experts) * _HALF


def head_int8_bytes(config: ModelConfig) -> int:
    """Bytes that an 8-bit head takes more than the floating one: negative, unless the embedding is the head,
    too, and stays."""
    numbers = config.vocabulary * config.hidden
    float_bytes = _FLOAT if config.dtype == "float32" else _HALF
    return numbers + _FLOAT * config.vocabulary - (0 if config.tied else numbers * float_bytes)


def head_bounds_bytes(config: ModelConfig) -> int:
    """Bytes of an int8 copy of the head, with a scale and a bound for each token."""
    return config.vocabulary * (config.hidden + 2 * _FLOAT)


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
    delta rule reads and makes, and the keys and values of its chunks."""
    feed = 0 if config.mixture is not None else 2 * config.intermediate
    net = config.delta_net
    width = max(config.qkv_columns, feed, config.hidden, 0 if net is None else net.columns)
    activations = step * (2 * width + 3 * config.hidden) * _FLOAT
    if config.mixture is not None:
        chosen = config.mixture.taken * (config.intermediate * _HALF + config.hidden * _FLOAT)
        activations += step * (chosen + 2 * config.hidden * _HALF)
    if net is not None:
        chunks = net.value_heads * net.key_dim + net.values
        activations += step * (net.channels + chunks + 2 * net.values) * _HALF
    logits = 4 * logit_rows(slots) * config.vocabulary * _FLOAT
    states = min(step, LARGEST_CAPTURED) * config.hidden * _HALF
    dequantized = (feed or width) * config.hidden * _HALF if config.quantization else 0
    return activations + logits + states + dequantized


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
    """Bytes of the tables of cosines and sines: one more where some layers have their own rotation or none."""
    tables = 1 + (config.windowed_rotation is not None) + any(config.unrotated)
    return tables * context * config.head_dim * _FLOAT


class _LoadPlanner:
    def __init__(
        self, config: ModelConfig, headers: tuple[SafetensorsHeader, ...], options: LoadOptions, gpu: Gpu,
        limits: StepLimits, ram_bytes: int,
    ) -> None:  # fmt: skip
        self.config, self.options, self.limits = config, options, limits
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
        self.workspace = workspace_bytes(config, options.max_slots, self.step)
        context = options.context_tokens or config.context_train
        self.workspace += rotation_bytes(config, context) + table_bytes(options.max_slots, context)
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
        self.notes = [*_window_notes(config), *_context_notes(config)]
        if config.quantization is not None and config.quantization.on_load:
            self.notes.append(f"The layers are {config.quantization.label} while they are read.")
        if config.head_format and config.tied:  # the embedding is in memory, too
            self.weights += packed_bytes(config.head_format, config.vocabulary, config.hidden)
        if options.head_int8 and not config.head_format:
            self.weights += head_int8_bytes(config)
            self.notes.append("The output head is rounded to 8 bits.")
        self.head_bounds = self._takes_head_bounds()
        if self.head_bounds:
            self.weights += head_bounds_bytes(config)

    def _takes_head_bounds(self) -> bool:
        """Whether the head can have an int8 copy, and there is room: it shortens no context, and takes at
        most a quarter of the memory for the KV cache."""
        config, options = self.config, self.options
        if not HEAD_BOUNDS or options.head_int8 or config.dtype == "float32" or config.head_format:
            return False
        if config.head_cap or config.hidden % HEAD_COLUMNS:
            return False
        more, room = head_bounds_bytes(config), self.kv_available()
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
                hint=f"Possible on the CUDA backend: {', '.join(self.kv_types)} (half the memory). "
                "llama.cpp has others, for GGUF files.",
            )

    def kv(self, context: int, kv_type: str = "") -> int:
        """Bytes of the pages of one sequence of `context` tokens."""
        pages = -(-context // PAGE_TOKENS)
        return pages * PAGE_TOKENS * kv_token_bytes(self.config, kv_type or self.kv_type)

    def kv_available(self, kv_type: str = "") -> int:
        """Bytes left for the KV cache."""
        left = self.free - self.weights - self.workspace - self.overhead
        if kv_type == FP8 != self.kv_type:
            left -= dequant_bytes(self.config, self.gpu)
        most = self.limits.kv_bytes
        return max(left if most is None else min(left, most), 0)

    def plan(self) -> MemoryPlan:
        """See the module's `plan`."""
        trained, asked = self.config.context_train, self.options.context_tokens
        goal = asked or trained
        longest = self._longest(max(trained, goal))
        least = min(LEAST_CONTEXT_TOKENS, trained)
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
        if self.kv_type == FP8:
            return
        possible = self._longest(most, FP8)
        if possible > max(longest, LEAST_CONTEXT_TOKENS):
            yield f"FP8 KV would give {tokens(possible)} (--kv-type {FP8})."

    def _all_slots_fit(self, context: int) -> bool:
        """True if every slot can hold the whole context."""
        return self.kv(context) * self.options.max_slots <= self.kv_available()

    def _kv_budget(self, context: int) -> int:
        """Bytes for the KV cache: enough for all slots, or all that is left; one sequence at least."""
        useful = self.kv(context) * self.options.max_slots
        page = self.kv(1)
        return max(min(useful, self.kv_available() // page * page), self.kv(context))

    def _result(
        self, context: int, longest: int, *, fits: bool, advice: tuple[str, ...]
    ) -> MemoryPlan:
        kv = self._kv_budget(context) if fits else self.kv(context)
        total = self.weights + kv + self.workspace + self.overhead
        # The cache comes first: what it cannot use may hold the weights a second time.
        unpacked = unpacked_bytes(self.config) if self._all_slots_fit(context) else 0
        unpacked = unpacked if total + unpacked <= self.free else 0
        total += unpacked
        return MemoryPlan(
            backend="cuda",
            weights_bytes=self.weights + unpacked,
            kv_bytes=kv,
            compute_bytes=self.workspace,
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
            saved_states=self.saved_states,
            kv_tokens=kv // self.kv(1) * PAGE_TOKENS,
        )

    def _host_bytes(self, kv: int) -> int:
        """Pinned RAM for KV that nobody uses: as requested, but for RAM that is not free. A hybrid's would
        lack its states."""
        if self.config.delta_net is not None:
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
        kv, most = self.kv(goal), self.limits
        total = self.weights + kv + self.workspace + self.overhead
        if most.kv_bytes is not None and most.kv_bytes < kv and total <= self.free:
            yield f"--kv-gb {gigabytes_flag(kv)}: what {tokens(goal)} take."
        if most.gpu_bytes is not None and most.gpu_bytes < total <= self.device_free:
            yield f"--vram-gb {gigabytes_flag(total)}: what it takes with {tokens(goal)}."

    def _advice(self, goal: int, longest: int, least: int) -> Iterator[str]:
        yield from self._limit_advice(goal)
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


def _window_notes(config: ModelConfig) -> Iterator[str]:
    """Note that sliding windows save no memory here."""
    widths = [width for width in config.windows if width]
    if widths:
        yield (
            f"{len(widths)} of {config.layers} layers see the last {tokens(max(widths))} only; the cache "
            "keeps all tokens for them, too."
        )
