"""Reads and checks config.json of a Hugging Face checkpoint: the shapes that the engine runs on.

Imports no torch. An error for an unsupported model names what is supported, and llama.cpp as the alternative.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, get_args

from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat.model_files.checkpoint import weight_paths, whole_config
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors
from localchat_cuda.config.delta_net import DeltaNet, read_delta_net
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.gemma import read_gemma
from localchat_cuda.config.latent import read_latent
from localchat_cuda.config.mixture import Mixture, read_mixture
from localchat_cuda.config.model import HYBRID_FORMS, Activation, FloatType, ModelConfig
from localchat_cuda.config.quantization import (
    STORED,
    Quantization,
    parse_quantization,
)
from localchat_cuda.config.rope import read_rotations
from localchat_cuda.config.tensor_names import is_text
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
    WIDTHS,
    WITHOUT_WINDOWS,
    Architecture,
)

HEAD_DIMENSIONS = (64, 96, 128, 256)
_MOST_LAYERS = 10_000
_LOADS = f"The CUDA backend loads {FAMILIES} in {STORED}."
_UNSUPPORTED_HINT = (
    f"{_LOADS} For other models take a GGUF file: llama.cpp runs it on this GPU too."
)
_DAMAGED_HINT = "The file may be cut off or damaged: download it again."
_FLOAT_TYPES: dict[str, FloatType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Factors(NamedTuple):
    """Of a Granite; logits are divided by theirs."""

    embedding: float
    attention: float
    residual: float
    logits: float


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
            raise self.unsupported(f"delta nets quantized as {quantization.label} ({HYBRID_FORMS})")
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
