"""Reads and checks config.json of a Hugging Face checkpoint: the shapes that the engine runs on.

Imports no torch. An error for an unsupported model names what is supported, and llama.cpp as the alternative.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from localchat.errors import ModelInvalid, ModelMissing, UsageError, reason
from localchat.fit.load_options import RoundedType
from localchat.model_files.checkpoint import weight_paths, whole_config
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors
from localchat_cuda.config_fields import ConfigFields
from localchat_cuda.delta_net_config import DeltaNet, read_delta_net
from localchat_cuda.gemma_config import GemmaLayers, read_gemma
from localchat_cuda.latent_config import LatentAttention, read_latent
from localchat_cuda.mixture_config import BESIDE_DENSE_FORMS, EXPERT_FORMS, Mixture, read_mixture
from localchat_cuda.quantization_config import (
    STORED,
    Quantization,
    parse_quantization,
    rounding,
)
from localchat_cuda.rope_config import Rotation, read_rotations
from localchat_cuda.supported_architectures import (
    BIASED,
    CLASSES,
    DEFAULTS,
    FAMILIES,
    GEMMAS,
    GRANITES,
    HYBRIDS,
    LATENTS,
    MIXTURES,
    OLMOS,
    WIDTHS,
    WITHOUT_WINDOWS,
    Architecture,
)
from localchat_cuda.weights.tensor_names import is_text

Activation = Literal["silu", "gelu_tanh"]
FloatType = Literal["bfloat16", "float16", "float32"]

HEAD_DIMENSIONS = (64, 96, 128, 256)
_MOST_LAYERS = 10_000
_LOADS = f"The CUDA backend loads {FAMILIES} in {STORED}."
_UNSUPPORTED_HINT = (
    f"{_LOADS} For other models take a GGUF file: llama.cpp runs it on this GPU too."
)
_DAMAGED_HINT = "The file may be cut off or damaged: download it again."
_FLOAT_TYPES: dict[str, FloatType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_HYBRID_FORMS = "delta nets are possible in bf16, fp16 and 4 bits"
_NEVER_ROUNDED: dict[Architecture, str] = {
    "gpt_oss": "its experts are possible in bf16 and MXFP4",
    "gemma4": BESIDE_DENSE_FORMS,
}
"""Mixtures whose experts are not rounded at the load, and what they are possible in."""
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family."""

    architecture: Architecture
    layers: int
    hidden: int
    """Columns of the residual."""
    intermediate: int
    """Columns inside the MLP, or one expert."""
    heads: int
    """Of queries."""
    key_heads: int
    """Of keys and values."""
    head_dim: int
    vocabulary: int
    """Rows of the embedding."""
    context_train: int
    eps: float
    rotation: Rotation
    windowed_rotation: Rotation | None
    """Of the layers with a window, if it differs."""
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    quantization: Quantization | None
    """Of the layers; None: they are floating."""
    dtype: FloatType
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a generation, as far as config.json states them."""
    windows: tuple[int, ...] = ()
    """By layer, the keys that a query sees; 0: all."""
    attention_scale: float = 0.0
    """Of the attention's logits; 0.0: 1/sqrt(head_dim)."""
    attention_cap: float = 0.0
    """The attention's logits become cap * tanh(logit / cap); 0.0: no cap."""
    head_cap: float = 0.0
    """The same for the head's logits."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    """Factor of the rows of the embedding."""
    vision: bool = False
    """The checkpoint sees images, too; that part is not loaded."""
    context_capped: bool = False
    """Beyond `context_train`, attention would need a scale by position, which no kernel here has."""
    mixture: Mixture | None = None
    """Of the feed-forward layers; None: they are dense."""
    unrotated: tuple[bool, ...] = ()
    """By layer, whether queries and keys are not rotated; empty: all are."""
    logits_divisor: float = 1.0
    """Of the head's logits."""
    delta_net: DeltaNet | None = None
    """Of a hybrid, whose attention has an output gate; None: all layers have attention."""
    latent: LatentAttention | None = None
    """Of multi-head latent attention, whose keys are one head of latents; None: it is the usual one."""
    gemma: GemmaLayers | None = None
    """Of a Gemma 3n or 4, whose layers differ; some of these numbers are then of its layers with a window."""

    def window(self, layer: int) -> int:
        """Keys that a query of a layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def has_delta_net(self, layer: int) -> bool:
        """True if a layer has a delta net in place of attention."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    def head_dim_of(self, layer: int) -> int:
        """Columns of a head in a layer."""
        own = self.gemma
        if own is not None and own.full[layer]:
            return own.head_dim
        return self.head_dim

    def value_dim_of(self, layer: int) -> int:
        """Columns of a head of values in the cache of a layer."""
        if self.latent is None:
            return self.head_dim_of(layer)
        return self.latent.kv_rank

    def table_dim_of(self, layer: int) -> int:
        """Columns of a head that a layer's table of rotations has."""
        if self.latent is None:
            return self.head_dim_of(layer)
        return self.latent.rope

    def has_experts(self, layer: int) -> bool:
        """True if experts are the feed-forward layer, or a part of it."""
        mixture = self.mixture
        return mixture is not None and not (mixture.dense and mixture.dense[layer])

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.has_experts, range(self.layers)))

    def key_heads_of(self, layer: int) -> int:
        """Heads of keys and values that a layer reads."""
        own = self.gemma
        if own is not None and own.full[layer]:
            return own.key_heads
        return self.key_heads

    def intermediate_of(self, layer: int) -> int:
        """Columns inside the MLP of a layer."""
        if self.gemma is not None:
            return self.gemma.intermediates[layer]
        if self.mixture is not None and not self.has_experts(layer):
            return self.mixture.dense_columns
        return self.intermediate

    def qkv_heads(self, layer: int) -> tuple[int, ...]:
        """Heads of each projection that a layer merges into one gemm: queries, of a hybrid with their gates,
        and keys and values as far as it has them."""
        keys = 2 if self.gemma is None else self.gemma.projections(layer)
        queries = self.heads if self.delta_net is None else 2 * self.heads
        return queries, *(self.key_heads_of(layer),) * keys

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself but for some of a Gemma 3n or 4."""
        return layer if self.gemma is None else self.gemma.source(layer)

    def rotation_of(self, layer: int) -> Rotation | None:
        """Rotation of a layer; None: its queries and keys are not rotated."""
        if self.unrotated and self.unrotated[layer]:
            return None
        windowed = self.windowed_rotation if self.window(layer) else None
        return windowed or self.rotation

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with keys and values of their own."""
        return tuple(
            n for n in range(self.layers) if not self.has_delta_net(n) and self.kv_source(n) == n
        )

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.layers - (0 if self.delta_net is None else self.delta_net.count)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all delta nets."""
        numbers = 4 if self.dtype == "float32" else 2
        if self.delta_net is None:
            return 0
        return self.delta_net.state_bytes(numbers)

    @property
    def fp8_activations(self) -> bool:
        """True if gemms of many rows may round their activations to 8 bits."""
        return self.quantization is not None and self.quantization.fp8_activations

    @property
    def packed(self) -> bool:
        """True if layers become 4-bit codes in the order of the int4 gemms."""
        return self.quantization is not None and self.quantization.packed

    @property
    def head_format(self) -> str:
        """Number format of a head that stays in ggml's blocks; empty for others."""
        if self.quantization is not None:
            return self.quantization.head
        return ""

    @property
    def qkv_columns(self) -> int:
        """Most output columns of a merged gemm of queries, keys, values and a hybrid's output gate."""
        if self.latent is not None:
            return (self.latent.query_rank or self.latent.queries(self.heads)) + self.latent.row
        return max(sum(self.qkv_heads(n)) * self.head_dim_of(n) for n in range(self.layers))

    @property
    def normed_heads(self) -> bool:
        """True if queries and keys are normalized per head."""
        return self.architecture in ("qwen3", "qwen3_moe", "gemma3", "gemma3n", "gemma4", *HYBRIDS)

    @property
    def rounds_embedding_scale(self) -> bool:
        """True if the reference rounds the factor of embeddings to the model's dtype."""
        return self.post_normed

    @property
    def output_bias(self) -> bool:
        """True if attention's output layer has a bias."""
        return self.architecture == "gpt_oss"

    @property
    def sinks(self) -> bool:
        """True if each query head has a logit for a key without a value."""
        return self.architecture == "gpt_oss"

    @property
    def post_normed(self) -> bool:
        """True if outputs of attention and MLP are normalized before they join the residual."""
        return self.architecture in (*GEMMAS, "glm4", *OLMOS)

    @property
    def normed_projections(self) -> bool:
        """True if queries are normalized over all heads, as keys are; then inputs of layers have no norms."""
        return self.architecture in OLMOS


class Factors(NamedTuple):
    """Of a Granite; logits are divided by theirs."""

    embedding: float
    attention: float
    residual: float
    logits: float


class RuntimeConfig(NamedTuple):
    """The config as the engine runs it. `notes`: sentences on how it differs from the checkpoint."""

    config: ModelConfig
    notes: tuple[str, ...]


def runtime_config(config: ModelConfig, *, gpu: bool) -> RuntimeConfig:
    """Choose a floating type that the engine computes in. `gpu` False: for the references on a CPU."""
    notes = []
    if gpu and config.dtype == "float32":
        notes.append("The weights are stored in fp32; they are loaded as bf16.")
        config = replace(config, dtype="bfloat16")
    if config.post_normed and config.dtype == "float16":
        notes.append(
            "Numbers in this model leave the range of fp16, in which it is stored: it runs in bf16."
        )
        config = replace(config, dtype="bfloat16")
    return RuntimeConfig(config, tuple(notes))


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder. Raises ModelMissing, ModelInvalid."""
    raw = read_raw(folder)
    headers = () if _has_dtype(raw) else map(read_safetensors, weight_paths(folder))
    return parse_config(raw, str(folder / "config.json"), headers)


def read_raw(folder: Path) -> Mapping[str, Any]:
    """The config.json of a checkpoint folder. Raises ModelMissing, ModelInvalid."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelMissing(
            f"{folder} has no config.json.", hint="Give the folder of a Hugging Face checkpoint."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelInvalid(
            f"{path} cannot be read: {reason(error)}.", hint=_DAMAGED_HINT
        ) from error
    if not isinstance(found, dict):
        raise ModelInvalid(f"{path} is not a JSON object.", hint=_DAMAGED_HINT)
    return whole_config(folder, found)


def parse_config(
    raw: Mapping[str, Any], name: str, headers: Iterable[SafetensorsHeader] = ()
) -> ModelConfig:
    """Parse a config. `name`: for messages. `headers`: of the weights, which give the dtype if the config has
    none. Raises ModelInvalid."""
    architecture = _Reader(raw, name).architecture()
    text = raw.get("text_config")
    vision = isinstance(text, dict) or "vision_config" in raw
    default = DEFAULTS.get(architecture, {})
    reader = _Reader({**default, **raw, **(text or {})} if vision else {**default, **raw}, name)
    reader.check(architecture)
    (heads, key_heads), hidden = reader.heads(), reader.integer("hidden_size")
    latent = read_latent(reader) if architecture in LATENTS else None
    head_dim = reader.head_dim(hidden // heads) if latent is None else latent.row
    layers = reader.integer("num_hidden_layers", most=_MOST_LAYERS)
    context = reader.integer("max_position_embeddings")
    gemma = read_gemma(reader, architecture, layers)
    rotations = read_rotations(reader, latent.rope if latent else head_dim, context)
    if latent is not None and rotations.all.columns:
        raise reader.unsupported(f"{rotations.all.columns} of {latent.rope} columns rotated")
    context = max(context, rotations.context)
    context_capped = 0 < rotations.bound < context
    is_gemma = architecture in GEMMAS
    granite = reader.granite() if architecture in GRANITES else None
    quantization = parse_quantization(
        reader.raw.get("quantization_config"), name, reader.unsupported
    )
    mixture = reader.mixture(architecture, quantization)
    inner = WIDTHS.get(architecture, "intermediate_size")
    inner = "moe_intermediate_size" if gemma and mixture else inner
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=gemma.intermediates[0] if gemma and not mixture else reader.integer(inner),
        heads=heads,
        key_heads=1 if latent else key_heads,
        head_dim=head_dim,
        vocabulary=reader.integer("vocab_size"),
        context_train=rotations.bound if context_capped else context,
        context_capped=context_capped,
        eps=reader.number("rms_norm_eps", 1e-6) / (granite.residual**2 if granite else 1.0),
        rotation=rotations.all,
        windowed_rotation=rotations.windowed,
        tied=bool(reader.raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture in BIASED
        or (architecture == "glm4" and bool(reader.raw.get("attention_bias", True))),
        quantization=quantization,
        dtype=reader.dtype(stored_type(headers)),
        eos_ids=token_ids(raw.get("eos_token_id", reader.raw.get("eos_token_id"))),
        windows=read_windows(
            reader, architecture, layers, context, own_rotation=rotations.windowed is not None
        ),
        attention_scale=(
            granite.attention
            if granite
            else latent.scale
            if latent
            else reader.attention_scale(architecture)
        ),
        attention_cap=reader.cap("attn_logit_softcapping") if architecture == "gemma2" else 0.0,
        head_cap=reader.cap("final_logit_softcapping") if is_gemma else 0.0,
        activation=reader.activation(),
        embedding_scale=(
            granite.embedding / granite.residual if granite else hidden**0.5 if is_gemma else 1.0
        ),
        vision=vision,
        mixture=mixture,
        unrotated=reader.unrotated(architecture, layers),
        logits_divisor=granite.logits if granite else 1.0,
        delta_net=reader.delta_net(layers, quantization) if architecture in HYBRIDS else None,
        gemma=gemma,
        latent=latent,
    )


def rounded_config(config: ModelConfig, to: RoundedType | None, name: str) -> ModelConfig:
    """The config whose layers are rounded at the load, as --quantize asks (None: as they are).

    Raises UsageError for a checkpoint that is quantized."""
    if to is None:
        return config
    if config.quantization is not None and not config.quantization.on_load:
        raise UsageError(
            f"{name} is quantized already ({config.quantization.label}), and cannot be rounded to {to}.",
            hint="Leave out --quantize, or name the model in bf16.",
        )
    never = _NEVER_ROUNDED.get(config.architecture) if config.mixture else None
    expected = config.mixture is not None or config.delta_net is not None
    if expected and (to != "int4" or never):
        kind = "a hybrid" if config.delta_net else "a mixture of experts"
        forms = never or (_HYBRID_FORMS if config.delta_net else EXPERT_FORMS)
        other = "Leave out --quantize" if never else "Ask for --quantize int4"
        raise UsageError(
            f"{name} is {kind}, and cannot be rounded to {to}: {forms}.",
            hint=f"{other}, or take a GGUF file: llama.cpp runs it on this GPU too.",
        )
    return replace(config, quantization=rounding(to))


def stored_type(headers: Iterable[SafetensorsHeader]) -> FloatType:
    """The type of most numbers in the floating tensors; fp16 if there are none."""
    counts: Counter[FloatType] = Counter()
    for header in headers:
        for tensor in header.tensors:
            if tensor.dtype in _FLOAT_TYPES and is_text(tensor.name):
                counts[_FLOAT_TYPES[tensor.dtype]] += tensor.size_bytes // int(tensor.dtype[-2:])
    return max(counts, key=lambda kind: counts[kind], default="float16")


def _has_dtype(raw: Mapping[str, Any]) -> bool:
    text = raw.get("text_config")
    places = (raw, text) if isinstance(text, dict) else (raw,)
    return any(each.get("dtype") or each.get("torch_dtype") for each in places)


def read_windows(
    fields: ConfigFields,
    architecture: Architecture,
    layers: int,
    context: int,
    *,
    own_rotation: bool = False,
) -> tuple[int, ...]:
    """By layer, the keys that a query sees; 0: all. `own_rotation`: layers with a window have their own.
    Raises ModelInvalid."""
    raw = fields.raw
    configured = raw.get("sliding_window")
    if architecture in WITHOUT_WINDOWS or (
        architecture in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
        and not raw.get("use_sliding_window")
    ):
        configured = None
    if configured is None:
        return (0,) * layers
    window = fields.integer("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ModelInvalid(f"{fields.name}: layer_types is no list of {layers} kinds.")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.unsupported(f"layers of kind {kind}")
        windowed = [kind == "sliding_attention" for kind in kinds]
    elif architecture in ("qwen2", "qwen3"):
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelInvalid(f"{fields.name}: max_window_layers is {first!r}, no usable number.")
        windowed = [layer >= first for layer in range(layers)]
    elif architecture in (*GEMMAS, "gpt_oss", "olmo3"):
        pattern = fields.integer("sliding_window_pattern")
        windowed = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        windowed = [True] * layers
    # A window as wide as the context hides nothing, but it may tell which rotation its layer has.
    width = window if own_rotation or window < context else 0
    return tuple(width if each else 0 for each in windowed)


def token_ids(found: object) -> tuple[int, ...]:
    """`eos_token_id` in its three forms: null, a number, a list of numbers."""
    listed = found if isinstance(found, list) else [found]
    return tuple(token for token in listed if isinstance(token, int) and token >= 0)


class _Reader(ConfigFields):
    """Fields that only this module reads."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        super().__init__(raw, name, _UNSUPPORTED_HINT)

    def architecture(self) -> Architecture:
        named = self.raw.get("architectures")
        listed = [str(each) for each in named] if isinstance(named, list) else []
        for each in listed:
            if each in CLASSES:
                found = CLASSES[each]
                dense = found != "granite4" or self.raw.get("num_local_experts") == 0
                return found if dense else "granite4_moe"
        raise self.unsupported(f"the architecture {', '.join(listed) or 'of no name'}")

    def check(self, architecture: Architecture) -> None:
        """Raise ModelInvalid for features that no layer here has."""
        if self.raw.get("mlp_bias"):
            raise self.unsupported("biases in the feed-forward layers")
        biased = self.raw.get("attention_bias")
        out = architecture != "gpt_oss" and self.raw.get("attention_out_bias")
        if (architecture not in (*BIASED, "glm4") and biased) or out:
            raise self.unsupported("biases in the attention layers of this architecture")
        if architecture in ("gpt_oss", "seed_oss") and not biased:
            raise self.unsupported("attention layers without the biases of this architecture")
        if self.raw.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise self.unsupported("attention to later tokens")
        if architecture in ("granite4", "granite4_moe"):
            kinds = self.raw.get("layer_types")
            if not isinstance(kinds, list) or {*kinds} - {"attention", "full_attention"}:
                raise self.unsupported("Mamba layers")

    def heads(self) -> tuple[int, int]:
        """Query heads and key heads. Raises ModelInvalid."""
        heads = self.integer("num_attention_heads")
        key_heads = self.integer("num_key_value_heads", heads)
        if heads % key_heads:
            raise self.unsupported(
                f"{heads} query heads over {key_heads} key heads, of which they are no multiple"
            )
        return heads, key_heads

    def attention_scale(self, architecture: Architecture) -> float:
        """Of the scores; 0: the root of the head dimension divides them. Raises ModelInvalid."""
        if architecture in ("gemma3n", "gemma4"):
            return 1.0
        if architecture in GEMMAS:
            return float(self.number("query_pre_attn_scalar", 256.0) ** -0.5)
        return 0.0

    def mixture(
        self, architecture: Architecture, quantization: Quantization | None
    ) -> Mixture | None:
        """The experts of a layer. Raises ModelInvalid for forms that no kernel here has."""
        dense = architecture == "gemma4" and not self.raw.get("enable_moe_block")
        if architecture not in MIXTURES or dense:
            return None
        return read_mixture(self, architecture, quantization, gelu=self.activation() != "silu")

    def granite(self) -> Factors:
        """The factors of a Granite. Raises ModelInvalid."""
        names = "embedding_multiplier", "attention_multiplier", "residual_multiplier"
        return Factors(*(self.number(name, 1.0) for name in (*names, "logits_scaling")))

    def unrotated(self, architecture: Architecture, layers: int) -> tuple[bool, ...]:
        """The layers without rotations: some of a SmolLM3, all or none of a Granite 4. Raises ModelInvalid."""
        if architecture in ("granite4", "granite4_moe"):
            if self.raw.get("position_embedding_type") == "rope":
                return ()
            return (True,) * layers
        if architecture != "smollm3":
            return ()
        listed = self.raw.get("no_rope_layers")
        if listed is None:
            interval = self.integer("no_rope_layer_interval", 4)
            return tuple((layer + 1) % interval == 0 for layer in range(layers))
        if not isinstance(listed, list) or len(listed) < layers:
            raise ModelInvalid(f"{self.name}: no_rope_layers is no list of {layers} numbers.")
        return tuple(not each for each in listed[:layers])

    def delta_net(self, layers: int, quantization: Quantization | None) -> DeltaNet:
        """The delta nets of a hybrid. Raises ModelInvalid for forms that are not loaded."""
        if quantization is not None and not quantization.packed:
            raise self.unsupported(
                f"delta nets quantized as {quantization.label} ({_HYBRID_FORMS})"
            )
        if self.activation() != "silu":
            raise self.unsupported("delta nets with another activation than SiLU")
        return read_delta_net(self, layers)

    def head_dim(self, default: int) -> int:
        found = self.integer("head_dim", default)
        if found not in HEAD_DIMENSIONS:
            known = ", ".join(map(str, HEAD_DIMENSIONS))
            raise self.unsupported(f"heads of {found} columns ({known} are possible)")
        return found

    def activation(self) -> Activation:
        found = self.raw.get("hidden_activation") or self.raw.get("hidden_act") or "silu"
        if not isinstance(found, str) or found not in _ACTIVATIONS:
            raise self.unsupported(f"the activation {found}")
        return _ACTIVATIONS[found]

    def cap(self, field: str) -> float:
        if self.raw.get(field) is not None:
            return self.number(field, 0.0)
        return 0.0

    def dtype(self, stored: FloatType) -> FloatType:
        found = self.raw.get("dtype") or self.raw.get("torch_dtype") or stored
        if not _is_float_type(found):
            raise self.unsupported(f"weights in {found}")
        return found


def _is_float_type(found: object) -> TypeGuard[FloatType]:
    return found in get_args(FloatType)
